"""Elections: votes counted once, asked for first, and never by a node that may not lead."""

from random import Random

import pytest

from holdfast.cluster import membership
from holdfast.cluster.consensus import BATCH
from holdfast.cluster.elections import Elections, Timing
from holdfast.cluster.events import LeaderChanged, Role
from holdfast.cluster.following import PromiseOpen
from holdfast.cluster.journal import Promise
from holdfast.cluster.messages import (
    AppendEntries,
    AppendReply,
    PreVote,
    PreVoteReply,
    RequestVote,
    TimeoutNow,
    VoteGranted,
)
from tests.simulation.scripted import NOTHING, Scripted, log, scripted

THREE = {name: NOTHING for name in "abc"}


def test_a_vote_counts_once() -> None:
    """R7: the library counts votes, not voters."""
    with scripted({name: NOTHING for name in "abcde"}) as script:
        a = script["a"]
        script.now_s += 0.6
        script.turn("a")
        for voter in "bc":
            script.give(script.take("a", voter))
            script.give(script.take(voter, "a"))
        assert script.role("a") == Role.CANDIDATE
        for _ in range(3):
            script.give([("b", "a", VoteGranted(a.term))])
        assert script.role("a") == Role.CANDIDATE
        script.give([("c", "a", VoteGranted(a.term))])
        assert script.role("a") == Role.LEADER


def test_the_vote_of_a_learner_counts_for_nothing() -> None:
    with scripted({name: NOTHING for name in "abcd"}, configuration=membership.of("abc", "d")) as script:
        script.now_s += 0.6
        script.turn("a")
        script.give(script.take("a", "b"))
        script.give(script.take("b", "a"))
        assert script.role("a") == Role.CANDIDATE
        script.give([("d", "a", VoteGranted(script["a"].term))])
        assert script.role("a") == Role.CANDIDATE


def test_no_term_is_spent_before_a_majority_would_vote() -> None:
    """R12."""
    with scripted(THREE) as script:
        for _ in range(20):
            script.now_s += 0.6
            script.turn("a")
        assert script["a"].term == 1
        assert {type(letter[2]) for letter in script.letters} == {PreVote}


def test_a_node_that_hears_the_leader_would_not_vote_for_another() -> None:
    """R12."""
    with scripted(THREE) as script:
        script.lead("a", "b")
        script.letters.clear()
        script.give([("c", "b", PreVote(9, 1, 99, 9))])
        assert script.take("b", "c") == [("b", "c", PreVoteReply(script["b"].term, 1, False))]
        script["b"].disconnected("a")
        script.give([("c", "b", PreVote(9, 2, 99, 9))])
        assert script.take("b", "c") == [("b", "c", PreVoteReply(script["b"].term, 2, True))]


def test_a_log_that_is_behind_wins_no_pre_vote() -> None:
    elections = Elections(Timing(), Random(1))
    asked = PreVote(5, 1, 10, 3)
    for last, granted in (((3, 10), True), ((3, 11), False), ((4, 2), False), ((2, 99), True)):
        assert elections.grants(asked, "b", term=4, last=last, leader=None, now_s=10.0) is granted
    assert not elections.grants(asked, "b", term=5, last=(1, 1), leader=None, now_s=10.0)


def test_answers_to_an_earlier_round_are_not_collected() -> None:
    elections = Elections(Timing(), Random(1))
    elections.begin_round("a")
    elections.begin_round("a")
    elections.collect(1, "b")
    assert not elections.won("abc")
    elections.collect(2, "b")
    assert elections.won("abc")
    assert not elections.won("abc")


def test_a_closed_connection_to_the_leader_makes_the_next_round_quick() -> None:
    with scripted(THREE) as script:
        script.lead("a", "b")
        script.letters.clear()
        script["b"].disconnected("a")
        script.now_s += 0.04
        script.turn("b")
        assert [letter[2] for letter in script.letters if isinstance(letter[2], PreVote)] != []


def test_a_leader_without_answers_of_a_majority_steps_down() -> None:
    """R14: the sockets are still open."""
    with scripted(THREE) as script:
        script.lead("a", "b")
        for _ in range(10):
            script.beat("a")
        assert script.role("a") == Role.FOLLOWER


def test_an_asked_voter_takes_over_at_once() -> None:
    with scripted(THREE) as script:
        script.lead("a", "b", "c")
        script["a"].propose(BATCH)
        assert not script["a"].transfer("b")  # it lacks the last entry
        assert not script["a"].transfer("nobody")
        script["a"].push()
        script.sync("a")
        script.exchange("a", "b")
        assert script["a"].transfer("b")
        script.sync("a")
        assert [letter[2] for letter in script.take("a", "b", TimeoutNow)] != []
        script.give([("a", "b", TimeoutNow(script["a"].term))])
        script.give(script.take("b", "c", RequestVote))
        script.give(script.take("c", "b"))
        assert script.role("b") == Role.LEADER
        assert LeaderChanged("b", script["b"].term) in script["b"].take_events()


def test_a_learner_never_stands_but_votes() -> None:
    configuration = membership.of("ab", "c")
    with scripted(THREE, configuration=configuration) as script:
        for _ in range(5):
            script.now_s += 1
            script.turn("c")
        assert (script.role("c"), script.letters) == (Role.FOLLOWER, [])
        script.give([("a", "c", RequestVote(2, 1, 0))])
        assert script.take("c", "a") == [("c", "a", VoteGranted(2))]


def test_a_sole_voter_leads_by_itself_and_is_silent_until_its_term_is_on_disk() -> None:
    """Else it could crash, lead again in the same term, and send its learner another entry at the same place."""
    with scripted({"a": NOTHING, "b": NOTHING}, configuration=membership.of("a", "b")) as script:
        a = script["a"]
        script.now_s += 0.6
        a.step()
        assert script.role("a") == Role.LEADER
        a.propose(BATCH)
        a.push()
        assert a.take_ready() == []
        script.sync("a")
        script.beat("a")
        assert script.take("a", "b", AppendEntries) != []


def test_a_sole_voter_tells_its_learner_only_of_commits_that_are_on_disk() -> None:
    """R8, where no acknowledgement is there to be clipped."""
    with scripted({"a": NOTHING, "b": NOTHING}, configuration=membership.of("a", "b")) as script:
        script.now_s += 0.6
        script.turn("a")
        script.beat("a")
        script.exchange("a", "b")
        a, durable = script["a"], script["a"].journal.durable_index
        a.propose(BATCH)
        a.step()
        a.push()
        [message] = [message for _, message in a.take_ready() if isinstance(message, AppendEntries) and message.entries]
        assert message.commit_index == a.committed() == durable


def test_a_repaired_node_neither_votes_nor_counts_until_its_promise_is_covered() -> None:
    """Neither for whoever may lack what it had, nor as a copy of what it holds less of than it once had."""
    with scripted({"a": log((1, 8)), "b": log((1, 3)), "c": log((1, 8))}) as script:
        b = script["b"]
        b.journal.promise = Promise(index=10, term=1)
        script.now_s += 0.6
        script.turn("b")
        script.give([("a", "b", PreVote(2, 1, 9, 1)), ("a", "b", RequestVote(2, 9, 1))])
        assert script.take("b", "a") == [("b", "a", PreVoteReply(1, 1, False))]
        assert (b.term, script.role("b")) == (2, Role.FOLLOWER)
        script.elect("a", "c")
        a = script["a"]
        entries = tuple(a.journal.read(5, 1 << 20, 9)[0])
        assert _answer(script, AppendEntries(a.term, 1, 4, 1, entries, 1, 7))[:2] == (False, 0)
        assert b.journal.last == 9 and a.match["b"] == 0
        script.exchange("a", "b")
        assert (b.journal.last, a.match["b"]) == (10, 10)  # the leader's own entry: nothing can be beyond that
        script.exchange("a", "c")
        script.beat("a")
        script.exchange("a", "b")
        assert _answer(script, AppendEntries(a.term, 10, 10, a.term, (), 1, 8)) == (True, 8, None)


def _answer(script: Scripted, message: AppendEntries) -> tuple[bool, int, Promise | None]:
    """Whether b counts as a copy and as a witness, and its promise then."""
    script.give([("a", "b", message)])
    [(_, _, reply)] = script.take("b", "a", AppendReply)
    assert isinstance(reply, AppendReply)
    return reply.success, reply.barrier, script["b"].journal.promise


def test_two_repaired_nodes_of_three_are_led_by_the_third_if_it_has_what_both_had() -> None:
    """They vote as the logs would that they had, and follow as any node does."""
    with scripted({"a": log((1, 8)), "b": log((1, 3)), "c": log((1, 5))}) as script:
        for name in ("b", "c"):
            script[name].journal.promise = Promise(index=9, term=1)
        script.lead("a", "b", "c")
        assert [script[name].commit_index for name in "abc"] == [10, 10, 10]
        assert script["b"].journal.promise is script["c"].journal.promise is None


def test_two_repaired_nodes_of_three_wait_if_the_third_lacks_what_both_had() -> None:
    """That was confirmed, and is nowhere any more that can be read."""
    with scripted({"a": log((1, 7)), "b": log((1, 3)), "c": log((1, 5))}) as script:
        for name in ("b", "c"):
            script[name].journal.promise = Promise(index=9, term=1)
        with pytest.raises(AssertionError, match="a is FOLLOWER in term 1"):
            script.elect("a", "b", "c")
        assert {script.role("b"), script.role("c")} == {Role.FOLLOWER}


def test_what_a_repaired_node_confirmed_with_one_that_is_away_is_not_overwritten() -> None:
    """a and b confirmed entries that c has not; b lost them. c must wait for a, whatever b and c hold now."""
    with scripted({"a": log((1, 8)), "b": log((1, 3)), "c": log((1, 5))}) as script:
        script["b"].journal.promise = Promise(index=9, term=1)
        for _ in range(6):
            script.now_s += 0.6
            script.turn("c")
            script.turn("b")
            script.exchange("b", "c")
        assert script.role("c") != Role.LEADER
        script.letters.clear()
        script.lead("a", "b")
        assert script["b"].journal.last == 10
        assert script["a"].commit_index == 10


@pytest.mark.parametrize(("saw_all", "learners", "kept"), [(True, (), True), (False, (), False), (True, ("b",), False)])
def test_the_only_voter_gives_a_promise_up_only_if_it_was_made_to_nobody(
    saw_all: bool, learners: tuple[str, ...], kept: bool
) -> None:
    """Clients are told what was applied, and there is nobody else to tell. A state made anew is no witness of it."""
    with scripted({"a": log((1, 3))}, configuration=membership.of("a", learners)) as script:
        node = script["a"]
        node.journal.promise = Promise(index=6, term=1)
        if not kept:
            with pytest.raises(PromiseOpen, match="up to 6 may have been confirmed"):
                node.settle_promise_alone(saw_all)
            return
        node.settle_promise_alone(saw_all)
        for _ in range(3):
            script.now_s += 0.6
            script.turn("a")
        assert script.role("a") == Role.LEADER


def test_one_of_several_voters_keeps_its_promise_whatever_its_state_saw() -> None:
    with scripted({"a": log((1, 8)), "b": log((1, 3)), "c": log((1, 8))}) as script:
        script["b"].journal.promise = Promise(index=9, term=1)
        script["b"].settle_promise_alone(saw_all=True)
        assert script["b"].journal.promise is not None
