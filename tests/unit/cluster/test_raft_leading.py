"""A leader's promises: it counts what is on disks in its own term, sends each thing once, and bounds what it sends."""

from collections import Counter

import pytest

from holdfast.client.protocol.errors import BatchTooLarge
from holdfast.client.protocol.limits import U63_MAX
from holdfast.cluster import membership
from holdfast.cluster.consensus import BATCH
from holdfast.cluster.events import BecameLeader, LostLeadership, Role, SnapshotNeeded
from holdfast.cluster.journal import Journal, Promise
from holdfast.cluster.leading import Window
from holdfast.cluster.messages import ENTRY_BYTES, AppendEntries, AppendReply, SnapshotHead
from tests.simulation.scripted import NOTHING, log, scripted

THREE = {name: NOTHING for name in "abc"}
ONE_ENTRY = Window(batch_bytes=1)


def test_an_acknowledgement_of_a_former_leadership_counts_for_nothing() -> None:
    """R5.

    1. a (term 3) sends entries 10 to 15 of an old term to c; c's answer is slow.
    2. b leads in term 4 and overwrites them on a and c with 10 and 11.
    3. a leads in term 5 by b's vote and appends 12 to 15. The old answer arrives.
    """
    logs = {"a": log((1, 14)), "b": log((1, 8), (2, 1)), "c": log((1, 8))}
    with scripted(logs, term=2, window=ONE_ENTRY) as script:
        a, c = script["a"], script["c"]
        script.elect("a", "c")
        for _ in range(4):  # found apart, then sent from the match point on, one entry a message
            for letter in script.take("a", "c", AppendEntries):
                if c.journal.last < 15:
                    script.give([letter])
            if c.journal.last == 15:
                break
            script.give(script.take("c", "a"))
            script.beat("a")
        slow = [letter for letter in script.take("c", "a") if isinstance(letter[2], AppendReply) and letter[2].success]
        assert slow[-1][2].next_index == 16  # type: ignore[union-attr]
        script.letters.clear()
        script.lead("b", "c", "a")
        assert a.journal.last == c.journal.last == 11
        script.letters.clear()
        script.elect("a", "b")
        for _ in range(3):
            a.propose(BATCH)
        script.sync("a")
        before = a.commit_index
        assert (a.term, a.journal.last, before) == (5, 15, 11)
        script.give(slow)
        assert a.commit_index == before


def test_a_leader_counts_itself_only_after_its_own_sync() -> None:
    """R8."""
    with scripted(THREE) as script:
        script.lead("a", "b")
        a = script["a"]
        before = a.commit_index
        a.propose(BATCH)
        a.push()
        script.collect("a")
        script.give(script.take("a", "b"))
        for sender, _, message in script.take("b", "a"):
            a.deliver(sender, message)
        a.step()
        assert (a.commit_index, a.committed(), a.journal.last) == (before, before, before + 1)
        script.sync("a")
        a.step()
        assert a.committed() == before + 1


def test_what_is_in_flight_is_not_sent_again() -> None:
    """R10: an acknowledgement of one message pulls nothing back that was sent behind it."""
    with scripted(THREE, window=ONE_ENTRY) as script:
        script.lead("a", "b")
        for _ in range(200):
            script["a"].propose(BATCH)
        script["a"].push()
        script.sync("a")
        sent, on_their_way = 0, script.take("a", "b")
        for _ in range(400):
            if not on_their_way:
                break
            letter = on_their_way.pop(0)
            sent += len(letter[2].entries)  # type: ignore[union-attr]
            script.give([letter])
            script.give(script.take("b", "a"))
            on_their_way += script.take("a", "b", AppendEntries)
        assert script["a"].match["b"] == script["a"].journal.last
        assert sent == 200


def test_ten_thousand_conflicting_entries_take_a_few_messages() -> None:
    """R11: walked back one entry a heartbeat, this took minutes."""
    logs = {"a": log((1, 4), (2, 10_000)), "b": log((1, 4), (3, 2_000)), "c": log((1, 4), (3, 2_000))}
    with scripted(logs, term=3) as script:
        script.lead("b", "c")
        script.letters.clear()
        script["b"].disconnected("a")
        script["b"].connected("a")
        script.beat("b")
        letters = script.exchange("b", "a")
        assert script["a"].journal.last == script["b"].journal.last
        assert letters <= 8


def test_a_rejection_of_an_earlier_attempt_is_not_honoured_again() -> None:
    """R11: in a pipeline every message behind the first bad one is rejected; one of these answers is enough."""
    with scripted({"a": log((1, 100)), "b": NOTHING, "c": log((1, 100))}, window=ONE_ENTRY) as script:
        script.elect("a", "c")
        a = script["a"]
        for _ in range(50):
            a.propose(BATCH)
        a.push()
        script.sync("a")
        script.give(script.take("a", "b"))
        rejections = script.take("b", "a", AppendReply)
        assert len(rejections) > 20
        script.letters.clear()
        script.give(rejections)
        sent = Counter(
            entry[1] for letter in script.take("a", "b", AppendEntries) for entry in letter[2].entries  # type: ignore[union-attr]
        )  # fmt: skip
        assert set(sent.values()) == {1}


@pytest.mark.parametrize("size", [1, 65_535, 65_536, 131_062, 196_588, 262_144, 1_048_576, ENTRY_BYTES])
def test_an_entry_of_any_size_arrives_whole(size: int) -> None:
    """R18: no multi-part path."""
    with scripted(THREE, window=Window()) as script:
        script.lead("a", "b")
        command = BATCH + b"\xa5" * (size - 1)
        proposed = script["a"].propose(command)
        assert proposed is not None
        script["a"].push()
        script.sync("a")
        script.exchange("a", "b")
        assert script["b"].journal.read(proposed[0], 1)[0][0][0] == command
        assert script["a"].commit_index == proposed[0]


def test_an_entry_above_the_limit_is_refused() -> None:
    with scripted(THREE) as script, pytest.raises(BatchTooLarge):
        script["a"].propose(bytes(ENTRY_BYTES + 1))


class CountingJournal(Journal):
    """Counts what is handed out, for a copied suffix is invisible otherwise."""

    handed = 0

    def read(self, index: int, max_bytes: int, last: int = U63_MAX) -> tuple[list[tuple[bytes, int, int]], int]:
        entries, size = super().read(index, max_bytes, last)
        self.handed += len(entries)
        return entries, size

    def __getitem__(self, item: int | slice) -> tuple[bytes, int, int] | list[tuple[bytes, int, int]]:
        found = super().__getitem__(item)
        self.handed += len(found) if isinstance(found, list) else 1
        return found


def test_catching_up_costs_in_proportion_to_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """R19."""
    monkeypatch.setattr("tests.simulation.scripted.Journal", CountingJournal)
    handed = {}
    for count in (2_000, 8_000):
        with scripted(
            {"a": log((1, count)), "b": NOTHING, "c": log((1, count))}, window=Window(batch_bytes=4_096)
        ) as script:
            script.lead("a", "c")
            script.beat("a")
            script.exchange("a", "b", rounds=400)
            assert script["b"].journal.last == script["a"].journal.last
            handed[count] = sum(node.journal.handed for node in script.nodes.values())  # type: ignore[attr-defined]
    assert handed[8_000] < 5 * handed[2_000]


def test_a_peer_that_does_not_read_is_sent_a_window_and_no_more() -> None:
    """R20."""
    window = Window(batch_bytes=262_144, in_flight_bytes=1_048_576)
    with scripted(THREE, window=window) as script:
        script.lead("a", "b")
        script.letters.clear()
        for _ in range(160):
            script["a"].propose(BATCH + bytes(65_536))
            script["a"].push()
        script.sync("a")
        sent = sum(len(entry[0]) for letter in script.take("a", "b") for entry in getattr(letter[2], "entries", ()))
        assert sent <= window.in_flight_bytes + window.batch_bytes
        assert script["a"].in_flight_bytes["b"] <= window.in_flight_bytes + window.batch_bytes


def test_a_read_waits_for_a_majority_that_answers_after_it_came() -> None:
    """R15."""
    with scripted(THREE) as script:
        script.lead("a", "b")
        a, seen = script["a"], list[int | None]()
        script.beat("a")
        earlier = script.take("a", "b")
        a.read_barrier(seen.append)
        script.give(earlier)
        script.give(script.take("b", "a"))
        assert seen == []
        script.turn("a")
        script.exchange("a", "b")
        assert seen == [a.commit_index]


def test_reads_of_one_turn_share_a_round() -> None:
    with scripted(THREE) as script:
        script.lead("a", "b")
        script.letters.clear()
        seen: list[int | None] = []
        for _ in range(50):
            script["a"].read_barrier(seen.append)
        script.turn("a")
        assert len(script.letters) == 2
        script.exchange("a", "b")
        assert seen == [script["a"].commit_index] * 50


def test_a_deposed_leader_answers_no_read() -> None:
    """R15: it still believes that it leads."""
    with scripted(THREE) as script:
        script.lead("a", "b", "c")
        script.letters.clear()
        script.lead("b", "c")
        a, seen = script["a"], list[int | None]()
        assert script.role("a") == Role.LEADER
        a.read_barrier(seen.append)
        script.turn("a")
        script.exchange("a", "b")
        assert seen == [None]
        assert script.role("a") == Role.FOLLOWER
        assert [type(event) for event in a.take_events() if isinstance(event, BecameLeader | LostLeadership)] == [
            BecameLeader,
            LostLeadership,
        ]


def test_a_leader_without_a_committed_entry_of_its_own_answers_no_read() -> None:
    with scripted(THREE) as script:
        script.elect("a", "b")
        seen: list[int | None] = []
        script["a"].read_barrier(seen.append)
        script["a"].step()
        assert seen == [None]


def test_a_peer_behind_the_log_is_sent_a_snapshot_and_goes_on_behind_it() -> None:
    bases = {"a": (30, 1), "c": (30, 1)}
    with scripted({"a": log((1, 10)), "b": NOTHING, "c": log((1, 10))}, bases=bases) as script:
        script.lead("a", "c")
        a, b = script["a"], script["b"]
        script.exchange("a", "b")
        [needed] = [event for event in a.take_events() if isinstance(event, SnapshotNeeded)]
        ruling = membership.encode(a.configuration)
        head = SnapshotHead(a.term, 35, 1, needed.epoch, 0, 1, bytes(32), ruling)
        assert b.accepts_snapshot("a", head)
        b.snapshot_installed("a", head)
        script.sync("b")
        script.exchange("a", "b")
        assert b.journal.last == a.journal.last


def test_a_repaired_node_gets_the_log_behind_a_snapshot_that_does_not_reach_its_promise() -> None:
    """It counts as no copy yet, and comes to count by what follows."""
    bases = {"a": (30, 1), "c": (30, 1)}
    with scripted({"a": log((1, 10)), "b": NOTHING, "c": log((1, 10))}, bases=bases) as script:
        a, b = script["a"], script["b"]
        b.journal.promise = Promise(index=38, term=1)
        script.lead("a", "c")
        script.exchange("a", "b")
        [needed] = [event for event in a.take_events() if isinstance(event, SnapshotNeeded)]
        head = SnapshotHead(a.term, 35, 1, needed.epoch, 0, 1, bytes(32), membership.encode(a.configuration))
        assert b.accepts_snapshot("a", head)
        b.snapshot_installed("a", head)
        script.sync("b")
        script.give(script.take("b", "a"))
        assert a.match["b"] == 0
        for _ in range(3):
            script.exchange("a", "b")
            script.beat("a")
        assert b.journal.last == a.match["b"] == a.journal.last
        assert b.journal.promise is None


def test_a_snapshot_that_came_too_late_is_followed_by_another() -> None:
    bases = {"a": (30, 1), "c": (30, 1)}
    with scripted({"a": log((1, 10)), "b": NOTHING, "c": log((1, 10))}, bases=bases) as script:
        script.lead("a", "c")
        a, b = script["a"], script["b"]
        script.exchange("a", "b")
        [needed] = [event for event in a.take_events() if isinstance(event, SnapshotNeeded)]
        a.set_applied(38)
        a.compact(38)
        head = SnapshotHead(a.term, 35, 1, needed.epoch, 0, 1, bytes(32), membership.encode(a.configuration))
        assert b.accepts_snapshot("a", head)
        b.snapshot_installed("a", head)
        script.sync("b")
        script.give(script.take("b", "a"))
        assert [event.peer for event in a.take_events() if isinstance(event, SnapshotNeeded)] == ["b"]


def test_a_hanging_disk_silences_a_leader() -> None:
    """R28: its heartbeats would keep another from leading, while nothing commits."""
    with scripted(THREE) as script:
        script.lead("a", "b")
        script.letters.clear()
        a = script["a"]
        a.propose(BATCH)
        assert a.begin_flush() is not None
        script.now_s += 0.3
        a.step()
        script.collect("a")
        script.give(script.take("a", "b"))
        for sender, _, message in script.take("b", "a"):
            a.deliver(sender, message)
        a.take_ready()
        script.now_s += 0.3
        a.push()
        a.step()
        assert script.role("a") == Role.LEADER
        assert a.take_ready() == []
