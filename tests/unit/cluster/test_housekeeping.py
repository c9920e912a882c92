"""Beside the turns of a node: snapshots that leave the journal its room, and how much of the log may go behind them."""

import io
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import trio

from holdfast.client.protocol.errors import BodyDamaged, InvariantBroken
from holdfast.cluster import membership
from holdfast.cluster.config import Config
from holdfast.cluster.consensus import NO_OP
from holdfast.cluster.housekeeping import Housekeeping, NoRoom
from holdfast.cluster.journal import Journal
from holdfast.cluster.journal_frames import Identity
from holdfast.cluster.logs import Log
from holdfast.cluster.raft import Raft
from holdfast.cluster.replica import Replica
from holdfast.cluster.segments import Segments
from holdfast.cluster.snapshots import Policy
from holdfast.cluster.state import MARK, NodeState, Reached
from tests.unit.cluster.test_state import message, opening

RESERVE = 1_000_000
PLENTY = 1 << 40
FIRST = Reached(1, 0, 0, membership.of("a"))


class House:
    """A node's state with some entries, their log, and a disk whose free bytes the test sets."""

    def __init__(self, folder: Path, policy: Policy) -> None:
        self.folder, self.free, self.now_s = folder, PLENTY, 1_000.0
        self.matches: list[int] = []
        self.found: list[InvariantBroken] = []
        self.stream = io.StringIO()
        identity = Identity(cluster_id="c", node="a", incarnation=1)
        self.segments = Segments.create(str(folder / "journal"), identity)
        self.journal = Journal.recovered(self.segments.recovered, self.segments.read_entries)
        self.state = NodeState(folder / "log", FIRST, lambda: "boot-1")
        self.raft = Raft(
            me="a",
            journal=self.journal,
            clock=lambda: self.now_s,
            rng=Random(1),
            applied=1,
            applied_term=0,
            configuration=FIRST.configuration,
        )
        self.replica = Replica(raft=self.raft, state=self.state, clock=lambda: self.now_s, wall_ms=lambda: 0)
        self.keeping = Housekeeping(
            config=Config(data=folder, disk_reserve_bytes=RESERVE),
            policy=policy,
            segments=self.segments,
            state=self.state,
            replica=self.replica,
            log=Log(node="a", stream=self.stream, wall_ms=lambda: 0, now_s=lambda: self.now_s),
            clock=lambda: self.now_s,
            matches=lambda: self.matches,
            damaged=self.found.append,
            free=lambda _: self.free,
        )
        self.extend(9)

    def extend(self, count: int, *, synced: bool = True) -> None:
        """More entries in log and state."""
        first = self.journal.last + 1
        made = [(NO_OP, 2, 1), opening(3)]
        entries = [made[at - 2] if at < 4 else message(at) for at in range(first, first + count)]
        for command, index, term in entries:
            self.journal.add(command, index, term)
        while synced and (flush := self.journal.take()) is not None:
            self.segments.write(flush)
            self.journal.on_durable(flush.lsn)
        self.state.apply(entries)
        self.journal.setRaftCommitIndex(self.journal.last)
        self.raft.set_applied(self.state.reached.index)

    @property
    def snapshots(self) -> list[int]:
        return [reached.index for _, reached in self.state.snapshots()]

    def told(self, event: str) -> int:
        return self.stream.getvalue().count(f"event={event} ")

    @property
    def needed(self) -> int:
        return self.state.size_bytes + RESERVE

    def close(self) -> None:
        self.state.close()
        self.segments.close()


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    found = House(tmp_path, Policy(log_bytes_min=1, reserve_entries=0))
    yield found
    found.close()


def test_too_little_room_for_messages_is_seen_and_its_end_too(house: House) -> None:
    for free, limit in ((RESERVE, None), (RESERVE - 1, RESERVE), (PLENTY, None)):
        house.free = free
        house.keeping.look()
        assert house.replica.disk_limit == limit


def test_no_snapshot_is_begun_that_would_take_the_reserve(house: House) -> None:
    house.free = house.needed - 1
    with pytest.raises(NoRoom, match="Make room"):
        trio.run(house.keeping.save)
    assert house.snapshots == []
    house.free = house.needed
    trio.run(house.keeping.save)
    assert house.snapshots == [10]


def test_a_snapshot_without_room_is_told_once_and_made_as_soon_as_there_is_room(house: House) -> None:
    house.keeping.logged(1 << 30)
    house.free = house.needed - 1
    for _ in range(20):
        trio.run(house.keeping.save_if_due)
    assert (house.told("snapshot_failed"), house.snapshots) == (1, [])
    house.free = PLENTY
    trio.run(house.keeping.save_if_due)
    assert house.snapshots == [10]


def test_a_snapshot_that_the_disk_refuses_is_not_tried_again_at_once(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = 0

    def full(*_: object) -> None:
        nonlocal tries
        tries += 1
        raise OSError(28, "No space left on device")

    house.keeping.logged(1 << 30)
    with monkeypatch.context() as patched:
        patched.setattr("holdfast.cluster.state.write_snapshot", full)
        for _ in range(120):
            trio.run(house.keeping.save_if_due)
            house.now_s += 1.0
    assert tries == house.told("snapshot_failed") == 4  # after 0, 10, 30 and 70 s
    house.now_s += 600.0
    trio.run(house.keeping.save_if_due)
    assert house.snapshots == [10]


def test_the_log_is_kept_behind_the_older_snapshot_which_makes_the_state_if_the_newer_is_rotten(
    house: House,
) -> None:
    trio.run(house.keeping.save)
    trio.run(house.keeping.compact)
    assert house.journal.base == 1
    for expected in (10, 13, 16):
        house.extend(3)
        trio.run(house.keeping.save)
        trio.run(house.keeping.compact)
        assert (house.journal.base, house.snapshots) == (expected, [expected, expected + 3])
    _flip(house.state.snapshots()[-1][0])
    house.state.abandon()
    (house.folder / "log" / MARK).write_text("another boot")
    house.state = NodeState(house.folder / "log", FIRST, lambda: "boot-2")
    assert house.state.reached.index == 16
    assert house.snapshots == [16]  # the rotten one would count as one that is kept
    assert [index for _, index, _ in house.journal.read(17, 1 << 20)[0]] == [17, 18, 19]


def test_on_a_short_disk_the_older_snapshot_and_its_log_go_whoever_lags(house: House) -> None:
    house.matches = [2]
    trio.run(house.keeping.save)
    house.extend(3)
    trio.run(house.keeping.save)
    trio.run(house.keeping.compact)
    assert (house.journal.base, house.snapshots) == (2, [10, 13])
    house.free = house.needed - 1
    trio.run(house.keeping.compact)
    assert (house.journal.base, house.snapshots) == (13, [13])


def test_a_rotten_snapshot_is_not_relied_on_however_short_the_disk_is(house: House) -> None:
    trio.run(house.keeping.save)
    _flip(house.state.snapshots()[-1][0])
    house.free = 0
    trio.run(house.keeping.compact)
    assert (house.journal.base, house.snapshots) == (1, [10])
    house.free = PLENTY
    house.extend(3)
    trio.run(house.keeping.save)
    _flip(house.state.snapshots()[-1][0])
    house.free = 0
    for _ in range(2):
        trio.run(house.keeping.compact)
        assert (house.journal.base, house.snapshots) == (10, [10, 13])


def test_nothing_is_let_go_of_that_is_applied_and_not_yet_on_our_own_disk(house: House) -> None:
    """So it is after a snapshot was installed inside the log."""
    trio.run(house.keeping.save)
    house.extend(3, synced=False)
    trio.run(house.keeping.save)
    house.extend(1, synced=False)
    trio.run(house.keeping.save)
    trio.run(house.keeping.compact)
    assert (house.journal.base, house.snapshots) == (10, [13, 14])


def test_no_snapshot_is_tried_of_a_state_that_is_known_to_be_damaged(house: House) -> None:
    house.replica.damage = BodyDamaged(queue_id=1, version=1)
    house.state.mark_damaged()
    house.keeping.logged(1 << 30)
    trio.run(house.keeping.save_if_due)
    assert house.snapshots == []


def test_damage_that_is_found_while_a_snapshot_is_taken_ends_the_node_and_not_the_snapshot_does(house: House) -> None:
    """The node hands over first, and says why it ends: not that there is no snapshot of what is damaged."""

    def found(_: Path) -> int:
        house.replica.damage = BodyDamaged(queue_id=1, version=1)
        house.state.mark_damaged()
        return PLENTY

    house.keeping.logged(1 << 30)
    house.keeping._free = found
    trio.run(house.keeping.save_if_due)
    assert house.snapshots == [] and house.told("snapshot_failed") == 0


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
