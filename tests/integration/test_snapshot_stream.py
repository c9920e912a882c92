"""A whole state from one node to another over real sockets, beside other messages and across a lost session."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random

import pytest
import trio

from holdfast.cluster.consensus import NO_OP
from holdfast.cluster.messages import CHUNK_BYTES, Message, SnapshotChunk, SnapshotDone, SnapshotHead, StaleTerm
from holdfast.cluster.peers import DialTiming, Peers
from holdfast.cluster.snapshots import Link, Received, Receiver, StreamBroken, send_snapshot
from holdfast.cluster.state import NodeState
from tests.integration.test_peers import Node, connected, running
from tests.unit.cluster.test_state import message, opened, opening

TERM = 3
LOG = 2
SEED = 20
pytestmark = pytest.mark.trio


class Follower(Node):
    """A node that receives what its peers stream, as the real one does around `Receiver`."""

    def __init__(self, folder: Path) -> None:
        super().__init__("b", timing=DialTiming(first_wait_s=0.001, longest_wait_s=0.001))
        self.receiver = Receiver(folder)
        self.received: list[Received] = []
        self.chunks = 0
        self.lose_session_at: int | None = None
        self.second_began = trio.Event()
        self.chunks_before_term: list[int] = []  # how much of a stream had come when some other message did
        self.deliver = self.take

    def note(self, *what: object) -> None:
        if what == ("disconnected", "a"):
            self.receiver.disconnected("a")
        super().note(*what)

    def take(self, peer: str, message: Message, log: int) -> None:
        try:
            match message:
                case SnapshotHead():
                    assert log == LOG
                    self.receiver.head(peer, message)
                    if message.epoch == 2:
                        self.second_began.set()
                case SnapshotChunk():
                    self.chunks += 1
                    self.receiver.chunk(peer, message)
                    if self.chunks == self.lose_session_at:
                        self.peers.drop(peer)
                case SnapshotDone():
                    received = self.receiver.done(peer, message)
                    if received is not None:
                        self.received.append(received)
                case _:
                    self.chunks_before_term.append(self.chunks)
        except StreamBroken:
            self.peers.drop(peer)
        self.keep(peer, message, log)


class Interrupted:
    """A link that has no room for a while, once that many chunks were sent."""

    def __init__(self, peers: Peers, chunks: int, until: trio.Event) -> None:
        self._peers, self._left, self._until = peers, 1 + chunks, until

    async def room(self, peer: str) -> int | None:
        if not self._left:
            await self._until.wait()
        return await self._peers.room(peer)

    def send(self, peer: str, message: Message, log: int = 0) -> bool:
        self._left = max(0, self._left - 1)
        return self._peers.send(peer, message, log)


@pytest.fixture
def leader(tmp_path: Path) -> Iterator[NodeState]:
    """Some 10 MB of messages, and a snapshot of them."""
    drawn = Random(SEED)
    with closing(opened(tmp_path / "a")) as state:
        state.apply([(NO_OP, 2, 1), opening(3), *(message(index, drawn.randbytes(500_000)) for index in range(4, 24))])
        state.snapshot()
        yield state


async def stream(link: Link, state: NodeState, epoch: int) -> bool:
    newest = state.newest_snapshot()
    assert newest is not None
    return await send_snapshot(link, "b", *newest, term=TERM, epoch=epoch, log=LOG)


async def chatter(node: Node, until: trio.Event) -> int:
    """Other messages all the while; how many."""
    count = 0
    while not until.is_set():
        node.peers.send("b", StaleTerm(count))
        count += 1
        await trio.lowlevel.checkpoint()
    return count


async def installed(state: NodeState, received: Received) -> None:
    state.swap(await trio.to_thread.run_sync(state.prepare, received.path))


async def test_a_state_is_streamed_beside_other_messages_and_arrives_the_same(
    leader: NodeState, tmp_path: Path
) -> None:
    a, b = Node("a"), Follower(tmp_path / "b")
    with closing(opened(tmp_path / "b")) as state:
        async with running(a, b), trio.open_nursery() as nursery:
            await connected(a, b)
            sent, said = trio.Event(), []

            async def talk() -> None:
                said.append(await chatter(a, sent))

            nursery.start_soon(talk)
            assert await stream(a.peers, leader, epoch=1)
            sent.set()
            await b.until(lambda: bool(b.received) and bool(said) and len(b.terms.get("a", [])) == said[0])
        assert b.terms["a"] == list(range(said[0]))
        assert b.chunks > 10_000_000 // CHUNK_BYTES
        assert any(0 < chunks < b.chunks for chunks in b.chunks_before_term)  # none waited for the stream to end
        await installed(state, b.received[0])
        assert (state.reached, state.digest) == (leader.reached, leader.digest)


async def test_a_stream_whose_session_is_lost_in_the_middle_begins_anew_and_arrives_the_same(
    leader: NodeState, tmp_path: Path
) -> None:
    a, b = Node("a"), Follower(tmp_path / "b")
    b.lose_session_at = 20
    with closing(opened(tmp_path / "b")) as state:
        async with running(a, b):
            await connected(a, b)
            assert not await stream(a.peers, leader, epoch=1)
            await b.until_told("disconnected", "a")
            assert b.received == [] and b.receiver.receiving is None
            assert list((tmp_path / "b" / "received").iterdir()) == []
            await a.until_told("connected", "b", count=2)
            assert await stream(a.peers, leader, epoch=2)
            await b.until(lambda: bool(b.received))
        (received,) = b.received
        assert received.head.epoch == 2
        assert b.chunks == b.lose_session_at + -(-received.head.size_bytes // CHUNK_BYTES)
        await installed(state, received)
        assert (state.reached, state.digest) == (leader.reached, leader.digest)


async def test_a_stream_that_is_begun_twice_in_one_session_arrives_once_under_its_last_epoch(
    leader: NodeState, tmp_path: Path
) -> None:
    """Chunks of both are mixed on the way: those of the former epoch belong to nothing any more."""
    a, b = Node("a"), Follower(tmp_path / "b")
    async with running(a, b):
        await connected(a, b)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream, Interrupted(a.peers, 5, b.second_began), leader, 1)
            await b.until(lambda: b.chunks == 5)
            assert await stream(a.peers, leader, epoch=2)
        await b.until(lambda: bool(b.received))
    (received,) = b.received
    assert received.head.epoch == 2 and b.told == [("connected", "a"), ("disconnected", "a")]
    newest = leader.newest_snapshot()
    assert newest is not None and received.path.read_bytes() == newest[0].read_bytes()
