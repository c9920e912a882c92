"""A follower's promises: nothing acknowledged is cut, nothing unverified is committed, nothing is said too early."""

from holdfast.cluster import membership
from holdfast.cluster.consensus import BATCH
from holdfast.cluster.leading import Window
from holdfast.cluster.messages import AppendEntries, AppendReply, RequestVote, SnapshotHead, StaleTerm, VoteGranted
from holdfast.cluster.outbox import HELD_MAX
from tests.simulation.scripted import NOTHING, log, scripted

SMALL = Window(batch_bytes=400)


def append(
    term: int, prev: tuple[int, int] | None, *entries: tuple[bytes, int, int], commit: int = 1, epoch: int = 1
) -> AppendEntries:
    prev_index, prev_term = prev or (None, 0)
    return AppendEntries(term, commit, prev_index, prev_term, entries, epoch, 0)


def test_a_repeated_message_cuts_nothing_that_was_acknowledged() -> None:
    """R3: entries 3 to 14 are committed with b; the first message comes again; then the leader dies."""
    with scripted({name: NOTHING for name in "abc"}, window=SMALL) as script:
        script.lead("a", "b")
        for number in range(12):
            script["a"].propose(BATCH + b"%03d" % number + bytes(50))
        script["a"].push()
        script.sync("a")
        first, *others = script.take("a", "b")
        assert others
        script.give([first, *others])
        script.give(script.take("b", "a"))
        committed = script["a"].commit_index
        assert committed == script["b"].journal.last == 14
        script.give([first])
        assert script["b"].journal.last == committed


def test_a_heartbeat_cuts_nothing_behind_the_place_that_it_names() -> None:
    with scripted({"a": NOTHING, "b": log((1, 8))}) as script:
        script.give([("a", "b", append(1, (4, 1)))])
        assert script["b"].journal.last == 9
        [(_, _, reply)] = script.take("b", "a")
        assert isinstance(reply, AppendReply)
        assert (reply.success, reply.next_index) == (True, 5)


def test_a_conflicting_entry_cuts_what_follows() -> None:
    with scripted({"a": NOTHING, "b": log((1, 8))}) as script:
        script.give([("a", "b", append(2, (4, 1), (BATCH, 5, 1), (BATCH, 6, 2)))])
        assert (script["b"].journal.last, script["b"].journal.last_term) == (6, 2)


def test_only_what_a_message_has_compared_is_committed() -> None:
    """R4: behind the fifth entry stand losers of an earlier term; the leader has committed others there."""
    with scripted({"a": NOTHING, "b": log((1, 8))}) as script:
        script.give([("a", "b", append(2, (5, 1), commit=9))])
        assert script["b"].commit_index == 5
        script.give([("a", "b", append(2, (5, 1), (BATCH, 6, 1), commit=9))])
        assert script["b"].commit_index == 6


def test_the_wait_for_a_snapshot_commits_nothing() -> None:
    """R6: a leader that is cut off holds conflicting entries; the new one has compacted past them."""
    with scripted({"a": NOTHING, "c": log((1, 18))}) as script:
        script.give([("a", "c", append(2, None, commit=40))])
        assert script["c"].commit_index == 1
        [(_, _, reply)] = script.take("c", "a")
        assert isinstance(reply, AppendReply)
        assert not reply.success and not reply.reset


def test_a_vote_leaves_only_when_it_is_on_disk() -> None:
    """R9."""
    with scripted({name: NOTHING for name in "abc"}) as script:
        script["b"].deliver("a", RequestVote(7, 9, 5))
        script["b"].step()
        assert script["b"].take_ready() == []
        flush = script["b"].begin_flush()
        assert flush is not None
        script["b"].durable(flush.lsn)
        assert script["b"].take_ready() == [("a", VoteGranted(7))]


def test_an_acknowledgement_leaves_only_when_its_entries_are_on_disk() -> None:
    """R9; and what was written after the flush began waits for the next one."""
    with scripted({"a": NOTHING, "b": NOTHING}) as script:
        b = script["b"]
        b.deliver("a", append(1, (1, 0), (BATCH, 2, 1)))
        flush = b.begin_flush()
        b.deliver("a", append(1, (2, 1), (BATCH, 3, 1)))
        assert b.take_ready() == []
        assert flush is not None
        b.durable(flush.lsn)
        assert [message.next_index for _, message in b.take_ready() if isinstance(message, AppendReply)] == [3]
        script.sync("b")
        assert [message.next_index for _, _, message in script.letters if isinstance(message, AppendReply)] == [4]


def test_a_leader_of_a_lower_term_is_told_so() -> None:
    """R13: in silence it would go on for ever."""
    with scripted({"a": NOTHING, "b": NOTHING}, term=5) as script:
        script.give([("a", "b", append(3, (1, 0)))])
        assert script.take("b", "a") == [("b", "a", StaleTerm(5))]


def test_a_rejection_names_a_place_below_which_nothing_can_conflict() -> None:
    """R11."""
    with scripted({"a": NOTHING, "b": log((1, 100))}) as script:
        script.give([("a", "b", append(2, (4, 1), commit=4)), ("a", "b", append(2, (90, 2)))])
        reply = script.take("b", "a")[-1][2]
        assert isinstance(reply, AppendReply)
        assert (reply.reset, reply.next_index) == (True, 5)


def test_what_belongs_to_a_session_ends_with_it() -> None:
    """R27: an answer that waited for the disk must not be spoken into the next session."""
    with scripted({"a": NOTHING, "b": NOTHING}) as script:
        script["b"].deliver("a", append(1, (1, 0), (BATCH, 2, 1)))
        script["b"].disconnected("a")
        script["b"].connected("a")
        script.sync("b")
        assert script.letters == []


def head(index: int, term: int, *, voters: str = "abc", configuration_index: int = 0) -> SnapshotHead:
    ruling = membership.encode(membership.of(voters))
    return SnapshotHead(9, index, term, 4, configuration_index, 10, bytes(32), ruling)


def test_a_snapshot_is_acknowledged_when_the_journal_follows_it_on_disk() -> None:
    with scripted({"a": NOTHING, "b": log((1, 8))}) as script:
        b = script["b"]
        assert b.accepts_snapshot("a", head(30, 7))
        b.snapshot_installed("a", head(30, 7))
        assert b.take_ready() == []
        assert (b.journal.base, b.journal.last, b.commit_index, b.applied) == (30, 30, 30, 30)
        script.sync("b")
        [(_, _, reply)] = script.take("b", "a")
        assert reply == AppendReply(31, False, True, 9, 4, 0, 0)


def test_a_snapshot_inside_the_log_keeps_what_follows() -> None:
    with scripted({"a": NOTHING, "b": log((1, 8))}) as script:
        b = script["b"]
        assert b.accepts_snapshot("a", head(6, 1))
        b.snapshot_installed("a", head(6, 1))
        assert (b.journal.last, b.commit_index, b.applied) == (9, 6, 6)


def test_a_snapshot_of_an_old_leader_or_of_what_is_applied_is_not_received() -> None:
    with scripted({"a": NOTHING, "b": log((1, 8))}) as script:
        script.give([("a", "b", append(9, (8, 1), commit=8))])
        script["b"].set_applied(8)
        script.take("b", "a")
        assert not script["b"].accepts_snapshot("a", head(8, 1))
        script["b"].deliver("a", RequestVote(12, 1, 0))
        assert not script["b"].accepts_snapshot("a", head(30, 7))
        script.sync("b")
        assert [message for _, _, message in script.letters] == [AppendReply(9, False, True, 9, 4, 0, 0), StaleTerm(12)]


def test_messages_that_wait_for_a_hanging_disk_are_bounded() -> None:
    with scripted({"a": NOTHING, "b": NOTHING}) as script:
        b = script["b"]
        b.deliver("a", append(1, (1, 0), (BATCH, 2, 1)))
        for _ in range(HELD_MAX + 50):
            b.deliver("a", append(1, (2, 1)))
        script.sync("b")
        assert len(script.letters) == HELD_MAX
