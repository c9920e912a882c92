"""Snapshots between nodes: when one is due, what the journal may forget, and streams that come whole or not at all."""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from holdfast.cluster import membership
from holdfast.cluster.consensus import NO_OP
from holdfast.cluster.messages import CHUNK_BYTES, Message, SnapshotChunk, SnapshotDone, SnapshotHead
from holdfast.cluster.snapshots import Policy, Received, Receiver, Retries, StreamBroken, send_snapshot
from holdfast.cluster.state import NodeState
from holdfast.storage.snapshot import SnapshotDamaged
from tests.unit.cluster.test_state import message, opened, opening

MIB = 1 << 20
TERM, EPOCH = 7, 3

# When, and what may go then ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log_bytes", "state_bytes", "wanted"),
    [
        (0, 0, False),
        (64 * MIB - 1, 0, False),
        (64 * MIB, 0, True),
        (64 * MIB, 64 * MIB, True),
        (64 * MIB, 64 * MIB + 1, False),
        (9_999 * MIB, 10_000 * MIB, False),
        (10_000 * MIB, 10_000 * MIB, True),
    ],
)
def test_a_snapshot_is_due_when_as_much_log_was_written_as_it_will_write(
    log_bytes: int, state_bytes: int, wanted: bool
) -> None:
    assert Policy().wants_snapshot(log_bytes=log_bytes, state_bytes=state_bytes) is wanted


def test_snapshots_cost_no_more_than_the_log_however_the_state_grows() -> None:
    policy, state_bytes, log_bytes, since, written = Policy(), 0, 0, 0, 0
    for _ in range(20_000):
        since, log_bytes, state_bytes = since + MIB, log_bytes + MIB, state_bytes + MIB
        if policy.wants_snapshot(log_bytes=since, state_bytes=state_bytes):
            since, written = 0, written + state_bytes
            state_bytes //= 2
    assert 0 < written <= log_bytes


def compacts_to(
    policy: Policy = Policy(),  # noqa: B008 - frozen
    *,
    base: int = 1,
    snapshots: tuple[int, ...] = (50_000, 58_000),
    applied: int = 60_000,
    matches: tuple[int, ...] = (),
    journal_bytes: int = 100 * MIB,
    state_bytes: int = 0,
    short: bool = False,
    relied: bool = False,
) -> int | None:
    return policy.compacts_to(
        base=base,
        snapshots=snapshots,
        applied=applied,
        matches=matches,
        journal_bytes=journal_bytes,
        state_bytes=state_bytes,
        short=short,
        relied=relied,
    )


def test_the_journal_is_kept_behind_the_last_snapshot_but_one() -> None:
    """The newest may be the one that cannot be read."""
    assert compacts_to(matches=(60_000, 60_000)) == 50_000
    assert compacts_to(matches=()) == 50_000  # who does not lead knows of no matches


def test_the_journal_is_kept_for_the_slowest_peer_and_a_reserve_behind_it() -> None:
    assert compacts_to(matches=(60_000, 20_000)) == 19_000
    assert compacts_to(matches=(50_500,)) == 49_500
    assert compacts_to(matches=(51_000,)) == compacts_to(matches=(51_001,)) == 50_000


def test_nothing_is_let_go_of_behind_a_first_snapshot() -> None:
    assert compacts_to(snapshots=()) is None
    assert compacts_to(snapshots=(50_000,)) is None
    assert compacts_to(snapshots=(50_000,), journal_bytes=1 << 60) is None


def test_on_a_short_disk_one_snapshot_has_to_do_and_nobody_is_waited_for() -> None:
    assert compacts_to(snapshots=(50_000,), matches=(20_000,), short=True, relied=True) == 50_000
    assert compacts_to(snapshots=(50_000,), short=True) is None  # it was not read, or not whole
    assert compacts_to(matches=(20_000,), short=True) == 50_000
    assert compacts_to(snapshots=(), short=True, relied=True) is None
    assert compacts_to(Policy(keep_log=True), snapshots=(50_000,), short=True, relied=True) is None


def test_a_snapshot_that_failed_is_tried_again_ever_more_rarely() -> None:
    retries, now_s, tries = Retries(), 0.0, list[float]()
    while now_s < 10_000.0:
        if retries.due(now_s):
            tries.append(now_s)
            retries.failed(now_s)
        now_s += 1.0
    assert tries[:5] == [0.0, 10.0, 30.0, 70.0, 150.0]
    assert tries[-1] - tries[-2] == 600.0
    retries.succeeded()
    assert retries.due(now_s)
    retries.failed(now_s)
    assert not retries.due(now_s + 9.0)
    assert retries.due(now_s + 10.0)


def test_a_reserve_is_kept_also_where_nobody_is_connected() -> None:
    """A peer that is away for a moment goes on from the log."""
    assert compacts_to(snapshots=(60_000, 60_000)) == 59_000


def test_a_peer_that_waits_for_its_snapshot_holds_the_log_that_follows_it() -> None:
    assert compacts_to(base=30_000, matches=(60_000, 0)) is None


@pytest.mark.parametrize(
    ("journal_bytes", "state_bytes", "index"),
    [
        (1_024 * MIB, 0, 19_000),
        (1_024 * MIB + 1, 0, 50_000),
        (4_000 * MIB, 2_000 * MIB, 19_000),
        (4_000 * MIB + 1, 2_000 * MIB, 50_000),
    ],
)
def test_a_journal_that_is_dearer_than_a_snapshot_waits_for_nobody(
    journal_bytes: int, state_bytes: int, index: int
) -> None:
    assert compacts_to(matches=(20_000,), journal_bytes=journal_bytes, state_bytes=state_bytes) == index


@pytest.mark.parametrize("journal_bytes", [0, 1 << 60])
def test_the_log_is_never_let_go_of_where_it_is_to_be_kept(journal_bytes: int) -> None:
    assert compacts_to(Policy(keep_log=True), matches=(60_000,), journal_bytes=journal_bytes) is None


@pytest.mark.parametrize("journal_bytes", [0, 1 << 60])
def test_what_is_not_applied_is_kept_though_a_received_snapshot_is_ahead(journal_bytes: int) -> None:
    index = compacts_to(snapshots=(90_000, 95_000), applied=60_000, matches=(95_000,), journal_bytes=journal_bytes)
    assert index == 60_000


def test_nothing_is_asked_for_that_is_gone_already() -> None:
    assert compacts_to(base=50_000) is None
    assert compacts_to(base=49_999) == 50_000
    assert compacts_to(base=50_000, journal_bytes=1 << 60) is None


# Receiving -----------------------------------------------------------------------------------------------


class Sent:
    """A snapshot of some chunks, and the messages that carry it."""

    def __init__(self, state: NodeState, epoch: int = EPOCH) -> None:
        found = state.newest_snapshot()
        assert found is not None
        self.path, self.reached = found
        self.data = self.path.read_bytes()
        self.head = SnapshotHead(
            term=TERM,
            index=self.reached.index,
            index_term=self.reached.term,
            epoch=epoch,
            configuration_index=self.reached.configuration_index,
            size_bytes=len(self.data),
            digest=hashlib.sha256(self.data).digest(),
            configuration=membership.encode(self.reached.configuration),
        )
        offsets = range(0, len(self.data), CHUNK_BYTES)
        self.chunks = [SnapshotChunk(epoch, offset, self.data[offset : offset + CHUNK_BYTES]) for offset in offsets]
        self.done = SnapshotDone(epoch, self.reached.index)


@pytest.fixture
def leader(tmp_path: Path) -> Iterator[NodeState]:
    """A state with a snapshot of four chunks or more."""
    state = opened(tmp_path / "leader")
    configuration = membership.encode(membership.of(["a", "b", "c"], ["d"]))
    bodies = [message(index, bytes([index]) * 100_000) for index in range(5, 15)]
    state.apply([(NO_OP, 2, 1), opening(3), (configuration, 4, 1), *bodies])
    state.snapshot()
    yield state
    state.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "follower"


def files_in(folder: Path) -> list[Path]:
    return list((folder / "received").iterdir())


def receive(receiver: Receiver, sent: Sent, peer: str = "a") -> Received | None:
    receiver.head(peer, sent.head)
    for chunk in sent.chunks:
        receiver.chunk(peer, chunk)
    return receiver.done(peer, sent.done)


def test_a_stream_becomes_the_file_that_was_sent_and_the_state_in_it(leader: NodeState, folder: Path) -> None:
    sent = Sent(leader)
    assert len(sent.chunks) >= 4
    receiver = Receiver(folder)
    received = receive(receiver, sent)
    assert received is not None and received.head == sent.head
    assert received.path.read_bytes() == sent.data
    assert receiver.receiving is None
    follower = opened(folder)
    follower.swap(follower.prepare(received.path))
    assert (follower.reached, follower.digest) == (leader.reached, leader.digest)
    assert files_in(folder) == []
    follower.close()


def test_how_much_has_come_can_be_seen(leader: NodeState, folder: Path) -> None:
    sent, receiver = Sent(leader), Receiver(folder)
    receiver.head("a", sent.head)
    assert receiver.receiving == (sent.head, 0)
    receiver.chunk("a", sent.chunks[0])
    assert receiver.receiving == (sent.head, CHUNK_BYTES)


def test_what_belongs_to_no_stream_is_ignored(leader: NodeState, folder: Path) -> None:
    sent, receiver = Sent(leader), Receiver(folder)
    receiver.chunk("a", sent.chunks[0])
    assert receiver.done("a", sent.done) is None
    assert files_in(folder) == []


def test_what_another_peer_or_another_epoch_sends_does_not_touch_the_stream(leader: NodeState, folder: Path) -> None:
    sent, receiver, stale = Sent(leader), Receiver(folder), Sent(leader, epoch=EPOCH - 1)
    receiver.head("a", sent.head)
    for chunk, old in zip(sent.chunks, stale.chunks, strict=True):
        receiver.chunk("a", old)
        receiver.chunk("b", chunk)
        receiver.chunk("a", chunk)
        assert receiver.done("a", stale.done) is None
        assert receiver.done("b", sent.done) is None
        receiver.disconnected("b")
    received = receiver.done("a", sent.done)
    assert received is not None and received.path.read_bytes() == sent.data


@pytest.mark.parametrize("picked", [(1,), (0, 0), (0, 2), (0, 1, 0)], ids=["gap", "twice", "hole", "again"])
def test_a_chunk_out_of_order_ends_the_stream(leader: NodeState, folder: Path, picked: tuple[int, ...]) -> None:
    sent, receiver = Sent(leader), Receiver(folder)
    receiver.head("a", sent.head)
    for number in picked[:-1]:
        receiver.chunk("a", sent.chunks[number])
    with pytest.raises(StreamBroken, match="is next"):
        receiver.chunk("a", sent.chunks[picked[-1]])
    assert receiver.receiving is None and files_in(folder) == []
    for chunk in sent.chunks:  # and nothing after it revives the stream
        receiver.chunk("a", chunk)
    assert receiver.done("a", sent.done) is None


def test_a_stream_that_goes_on_beyond_its_size_is_not_written(leader: NodeState, folder: Path) -> None:
    sent, receiver = Sent(leader), Receiver(folder)
    receiver.head("a", replace(sent.head, size_bytes=CHUNK_BYTES + 1))
    receiver.chunk("a", sent.chunks[0])
    with pytest.raises(StreamBroken, match="longer than"):
        receiver.chunk("a", sent.chunks[1])
    assert files_in(folder) == []


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"digest": bytes(32)}, "another digest"),
        ({"index": 15}, "ends at"),
        ({"index_term": 2}, "another place"),
        ({"configuration_index": 5}, "another place"),
        ({"configuration": membership.encode(membership.of(["a"]))}, "another place"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_file_that_is_not_what_its_head_says_is_refused(
    leader: NodeState, folder: Path, change: dict[str, int], match: str
) -> None:
    """A state of one configuration under a log of another would be R23 again."""
    sent, receiver = Sent(leader), Receiver(folder)
    sent.head = replace(sent.head, **change)  # type: ignore[arg-type]
    with pytest.raises(StreamBroken, match=match):
        receive(receiver, sent)
    assert receiver.receiving is None and files_in(folder) == []


def test_a_file_of_another_place_in_the_log_is_refused_though_head_and_end_agree(
    leader: NodeState, folder: Path
) -> None:
    sent, receiver = Sent(leader), Receiver(folder)
    sent.head, sent.done = replace(sent.head, index=15), SnapshotDone(EPOCH, 15)
    with pytest.raises(StreamBroken, match="another place"):
        receive(receiver, sent)


def test_a_stream_that_ends_early_is_refused(leader: NodeState, folder: Path) -> None:
    sent, receiver = Sent(leader), Receiver(folder)
    sent.chunks.pop()
    with pytest.raises(StreamBroken, match="ends at"):
        receive(receiver, sent)
    assert files_in(folder) == []


def test_what_is_no_snapshot_is_refused_whatever_its_digest(leader: NodeState, folder: Path) -> None:
    sent, receiver, data = Sent(leader), Receiver(folder), b"not a snapshot" * 10
    sent.head = replace(sent.head, size_bytes=len(data), digest=hashlib.sha256(data).digest())
    sent.chunks = [SnapshotChunk(EPOCH, 0, data)]
    with pytest.raises(StreamBroken, match="cannot be read"):
        receive(receiver, sent)
    assert files_in(folder) == []


def test_a_new_head_replaces_the_stream_before_it(leader: NodeState, folder: Path) -> None:
    old, new, receiver = Sent(leader, epoch=1), Sent(leader, epoch=2), Receiver(folder)
    receiver.head("a", old.head)
    receiver.chunk("a", old.chunks[0])
    received = receive(receiver, new, "b")
    assert received is not None and received.path.read_bytes() == new.data
    assert files_in(folder) == [received.path]


def test_a_new_stream_does_not_touch_a_file_that_was_given_away(leader: NodeState, folder: Path) -> None:
    sent, receiver = Sent(leader), Receiver(folder)
    received = receive(receiver, sent)
    assert received is not None
    receiver.head("a", sent.head)
    receiver.disconnected("a")
    assert files_in(folder) == [received.path] and received.path.read_bytes() == sent.data


def test_a_lost_session_drops_its_stream(leader: NodeState, folder: Path) -> None:
    sent, receiver = Sent(leader), Receiver(folder)
    receiver.head("a", sent.head)
    receiver.chunk("a", sent.chunks[0])
    receiver.disconnected("a")
    assert receiver.receiving is None and files_in(folder) == []
    receiver.chunk("a", sent.chunks[1])
    assert receiver.done("a", sent.done) is None


def test_what_an_earlier_life_left_unfinished_is_removed(leader: NodeState, folder: Path) -> None:
    sent, former = Sent(leader), Receiver(folder)
    former.head("a", sent.head)
    former.chunk("a", sent.chunks[0])
    assert len(files_in(folder)) == 1
    receiver = Receiver(folder)
    assert files_in(folder) == []
    assert receive(receiver, sent) is not None


def test_a_stream_that_would_fill_the_disk_is_refused_before_it_begins(leader: NodeState, folder: Path) -> None:
    """It is needed twice, as it comes and as the store that is built of it; and the journal is left its reserve."""
    sent, reserve = Sent(leader), 5 * MIB
    enough = 2 * sent.head.size_bytes + reserve
    with pytest.raises(StreamBroken, match="are free: make room"):
        Receiver(folder, reserve, lambda path: enough - 1).head("a", sent.head)
    assert files_in(folder) == []
    assert receive(Receiver(folder, reserve, lambda path: enough), sent) is not None


def test_a_disk_that_fails_ends_the_stream_and_not_the_node(
    leader: NodeState, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, receiver = Sent(leader), Receiver(folder)
    receiver.head("a", sent.head)

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.write", full)
        with pytest.raises(StreamBroken, match="No space left"):
            receiver.chunk("a", sent.chunks[0])
    assert receiver.receiving is None and files_in(folder) == []
    (folder / "received").rmdir()
    with pytest.raises(StreamBroken, match="cannot be stored"):
        receiver.head("a", sent.head)


def test_a_chunk_that_is_written_in_pieces_comes_whole(
    leader: NodeState, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = os.write
    monkeypatch.setattr("os.write", lambda descriptor, data: plain(descriptor, memoryview(data)[:100_000]))
    sent = Sent(leader)
    received = receive(Receiver(folder), sent)
    assert received is not None and received.path.read_bytes() == sent.data


# Sending -------------------------------------------------------------------------------------------------


class ScriptedLink:
    """Stands in for `Peers`: one session, until `happens` says otherwise at some call of `room`."""

    def __init__(self, happens: Callable[["ScriptedLink"], None] = lambda link: None) -> None:
        self.session: int | None = 1
        self.takes = True
        self.calls: list[str] = []
        self.sent: list[Message] = []
        self._happens = happens

    async def room(self, peer: str) -> int | None:
        await trio.lowlevel.checkpoint()
        assert peer == "b"
        self.calls.append("room")
        self._happens(self)
        return self.session

    def send(self, peer: str, message: Message, log: int = 0) -> bool:
        assert (peer, log) == ("b", 5)
        self.calls.append("send")
        if self.takes:
            self.sent.append(message)
        return self.takes


async def send(link: ScriptedLink, sent: Sent) -> bool:
    return await send_snapshot(link, "b", sent.path, sent.reached, term=TERM, epoch=EPOCH, log=5)


@pytest.mark.trio
async def test_a_snapshot_is_sent_as_a_head_its_chunks_and_an_end(leader: NodeState, folder: Path) -> None:
    """The configuration is the snapshot's own, whatever rules by now (R23)."""
    link, sent = ScriptedLink(), Sent(leader)
    leader.apply([(membership.encode(membership.of(["a", "b", "c"])), 15, 1)])
    assert await send(link, sent)
    assert link.sent == [sent.head, *sent.chunks, sent.done]
    assert link.sent[0].configuration_index == 4  # type: ignore[union-attr]


@pytest.mark.trio
async def test_each_message_of_a_stream_waits_for_room_and_leaves_in_that_session(leader: NodeState) -> None:
    link, sent = ScriptedLink(), Sent(leader)
    assert await send(link, sent)
    assert link.calls == ["room", *["room", "send"] * (2 + len(sent.chunks))]


@pytest.mark.trio
async def test_without_a_session_nothing_is_read_or_sent(leader: NodeState) -> None:
    link, sent = ScriptedLink(), Sent(leader)
    link.session = None
    sent.path.unlink()
    assert not await send(link, sent)
    assert link.calls == ["room"]


@pytest.mark.trio
@pytest.mark.parametrize("session", [None, 2], ids=["lost", "another"])
@pytest.mark.parametrize("messages", [0, 1, 3])
async def test_a_stream_ends_quietly_with_the_session_that_it_began_in(
    leader: NodeState, session: int | None, messages: int
) -> None:
    def happens(link: ScriptedLink) -> None:
        if len(link.sent) == messages and len(link.calls) > 1:
            link.session = session

    link = ScriptedLink(happens)
    assert not await send(link, Sent(leader))
    assert link.calls == ["room", *["room", "send"] * messages, "room"]


@pytest.mark.trio
@pytest.mark.parametrize("messages", [0, 1, 3])
async def test_a_stream_ends_when_the_session_takes_no_more(leader: NodeState, messages: int) -> None:
    def happens(link: ScriptedLink) -> None:
        link.takes = len(link.sent) < messages

    link = ScriptedLink(happens)
    assert not await send(link, Sent(leader))
    assert len(link.sent) == messages and link.calls.count("send") == messages + 1


@pytest.mark.trio
async def test_a_damaged_snapshot_is_not_sent_at_all(leader: NodeState) -> None:
    link, sent = ScriptedLink(), Sent(leader)
    data = bytearray(sent.data)
    data[len(data) // 2] ^= 1
    sent.path.write_bytes(bytes(data))
    with pytest.raises(SnapshotDamaged):
        await send(link, sent)
    assert link.sent == []


@pytest.mark.trio
async def test_a_snapshot_that_is_let_go_of_while_it_is_sent_comes_whole(leader: NodeState) -> None:
    sent = Sent(leader)

    def happens(link: ScriptedLink) -> None:
        if link.sent:
            sent.path.unlink(missing_ok=True)

    link = ScriptedLink(happens)
    assert await send(link, sent)
    assert link.sent == [sent.head, *sent.chunks, sent.done] and not sent.path.exists()
