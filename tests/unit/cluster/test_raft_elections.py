"""Elections: votes counted once, asked for first, and never by a node that may not lead."""

from random import Random

from holdfast.cluster import membership
from holdfast.cluster.consensus import BATCH
from holdfast.cluster.elections import Elections, Timing
from holdfast.cluster.events import LeaderChanged, Role
from holdfast.cluster.journal import Promise
from holdfast.cluster.messages import AppendEntries, PreVote, PreVoteReply, RequestVote, TimeoutNow, VoteGranted
from tests.simulation.scripted import NOTHING, log, scripted

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


def test_a_repaired_node_neither_votes_nor_counts_until_a_leader_has_covered_its_promise() -> None:
    with scripted({"a": log((1, 8)), "b": log((1, 3)), "c": log((1, 8))}) as script:
        b = script["b"]
        b.journal.promise = Promise(index=9, term=1)
        script.now_s += 0.6
        script.turn("b")
        script.give([("a", "b", PreVote(2, 1, 9, 1)), ("a", "b", RequestVote(2, 9, 1))])
        assert script.take("b", "a") == [("b", "a", PreVoteReply(1, 1, False))]
        assert (b.term, script.role("b")) == (2, Role.FOLLOWER)
        script.elect("a", "c")
        script.exchange("a", "b")
        assert b.journal.last == script["a"].journal.last
        assert script["a"].match["b"] == 0
        script.exchange("a", "c")
        script.beat("a")
        script.exchange("a", "b")
        assert script["b"].journal.promise is None
        script.beat("a")
        script.exchange("a", "b")
        assert script["a"].match["b"] == b.journal.last
