"""Clients' connections on real sockets of the loopback, deadlines under a clock that jumps: who goes, who is told."""

import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager

import pytest
import trio
import trio.testing

from holdfast.client.protocol import codec
from holdfast.client.protocol.commands import OpenSession
from holdfast.client.protocol.errors import BadFrame, HoldfastError, Overloaded
from holdfast.client.protocol.frames import FrameReader, write_frame
from holdfast.client.protocol.messages import (
    Answered,
    Declined,
    FromClient,
    FromNode,
    Hello,
    Ping,
    Pong,
    Request,
    Welcome,
)
from holdfast.client.protocol.replies import Answer, Done, MessageBatch, Messages
from holdfast.client.protocol.values import Columns, Place, SessionId, ends_of
from holdfast.cluster.client_stream import Client, ServerLimits
from holdfast.cluster.connection import Asked, Greeting
from holdfast.cluster.patience import ClientSilent, ClientSlow
from holdfast.cluster.server import Clients

HOST = "127.0.0.1"
HANG_S = 10.0  # of real time: a test that hangs fails here; none waits for it
DONE = Answer(Place(3, 0, 1_000), Done())
pytestmark = pytest.mark.trio


class Desk:
    """What stands behind the connections, and what it heard."""

    def __init__(self) -> None:
        self.port = 0
        self.asked: list[tuple[Client, Asked]] = []
        self.left: list[Client] = []
        self.rejected: list[HoldfastError] = []
        self.clients: Clients
        self.peers = ExitStack()  # closed at the end

    def ask(self, client: Client, asked: Asked, size_bytes: int) -> None:
        self.asked.append((client, asked))

    def gone(self, client: Client) -> None:
        self.left.append(client)

    def answer(self, at: int, answer: Answer = DONE) -> None:
        """As a turn does it."""
        client, asked = self.asked[at]
        client.put(asked.request_id, answer)
        client.flush()


@asynccontextmanager
async def serving(limits: ServerLimits | None = None) -> AsyncIterator[Desk]:
    desk = Desk()
    listeners = await trio.open_tcp_listeners(0, host=HOST)
    desk.port = listeners[0].socket.getsockname()[1]
    desk.clients = Clients(
        desk,
        lambda: Greeting("c1", "n1"),
        rejected=lambda client, error: desk.rejected.append(error),
        short=lambda error: None,
        limits=limits or ServerLimits(),
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(desk.clients.serve, listeners)
        with desk.peers:
            yield desk
        nursery.cancel_scope.cancel()


async def until(wanted: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + HANG_S
    while not wanted():
        assert time.monotonic() < end_s, what
        await trio.lowlevel.checkpoint()


async def settled() -> None:
    """Whatever has come was read, and what follows from it was done."""
    await trio.testing.wait_all_tasks_blocked(0.01)


class Peer:
    """A client of few words."""

    def __init__(self, desk: Desk, source: str = HOST) -> None:
        self._socket = socket.create_connection((HOST, desk.port), source_address=(source, 0))
        desk.peers.callback(self._socket.close)
        self._socket.setblocking(False)
        self._reader = FrameReader()
        self._over = False
        self.heard: list[FromNode] = []

    def send(self, *messages: FromClient) -> None:
        self._socket.sendall(frames(*messages))

    def send_bytes(self, data: bytes) -> None:
        self._socket.sendall(data)

    def close(self) -> None:
        self._socket.close()

    @property
    def over(self) -> bool:
        """Whether the node has ended it; reads what there is."""
        while not self._over:
            try:
                data = self._socket.recv(262_144)
            except BlockingIOError:
                break
            except ConnectionError:
                data = b""
            self._over = not data
            self.heard += [codec.decode_from_node(frame.header, frame.body) for frame in self._reader.feed(data)]
        return self._over

    async def hears(self, kind: type[FromNode]) -> FromNode:
        """The next thing of this kind."""
        await until(lambda: self.over or any(isinstance(one, kind) for one in self.heard), f"{kind} comes")
        [found, *_] = [one for one in self.heard if isinstance(one, kind)]
        self.heard.remove(found)
        return found

    async def welcomed(self) -> "Peer":
        self.send(Hello(client="test"))
        await self.hears(Welcome)
        return self

    async def ended(self) -> None:
        await until(lambda: self.over, "the node ends the connection")


def frames(*messages: FromClient) -> bytes:
    encoded = [codec.encode_message(message) for message in messages]
    return b"".join(bytes(part) for header, body in encoded for part in write_frame(header, *body))


def request(number: int) -> Request:
    return Request(request_id=number, command=OpenSession(), session=SessionId(b"s" * 16))


def large(size_bytes: int) -> Answer:
    body = bytes(size_bytes)
    batch = MessageBatch(1, 0, 0, "c", 1, Columns(ends=ends_of([size_bytes])), body)
    return Answer(Place(1, -1, 0), Messages(batches=(batch,), next_version=None))


# Deadlines


async def test_who_says_no_hello_is_closed_in_time(mock_clock: trio.testing.MockClock) -> None:
    async with serving() as desk:
        silent, dripping = Peer(desk), Peer(desk)
        await until(lambda: desk.clients.count == 2, "both are there")
        for byte in frames(Hello())[:4]:
            dripping.send_bytes(bytes([byte]))
            await settled()
            mock_clock.jump(1.2)
        await settled()
        assert not silent.over and not dripping.over
        mock_clock.jump(0.3)
        await silent.ended()
        await dripping.ended()
        await until(lambda: desk.clients.count == 0, "both are gone")
        assert [type(error) for error in desk.rejected] == [ClientSilent] * 2


async def test_the_rest_of_a_frame_has_ten_seconds_however_it_drips(mock_clock: trio.testing.MockClock) -> None:
    async with serving() as desk:
        peer, other = await Peer(desk).welcomed(), await Peer(desk).welcomed()
        for byte in frames(request(1))[:9]:
            peer.send_bytes(bytes([byte]))
            await settled()
            mock_clock.jump(1.1)
        await settled()
        assert not peer.over
        mock_clock.jump(0.2)
        await peer.ended()
        assert [type(error) for error in desk.rejected] == [ClientSilent]
        assert desk.asked == []
        other.send(Ping(1))
        assert await other.hears(Pong) == Pong(1)


async def test_who_asks_nothing_is_closed_after_a_quarter_of_an_hour(mock_clock: trio.testing.MockClock) -> None:
    """Not who waits for an answer, and not who pings. It is no trouble: nobody is told."""
    async with serving() as desk:
        idle, waiting, pinging = [await Peer(desk).welcomed() for _ in range(3)]
        waiting.send(request(1))
        await until(lambda: bool(desk.asked), "a request waits")
        for _ in range(2):
            pinging.send(Ping(7))
            await pinging.hears(Pong)
            mock_clock.jump(600)
            await settled()
        await idle.ended()
        assert desk.rejected == []
        desk.answer(0)
        assert await waiting.hears(Answered) == Answered(1, DONE)
        assert not pinging.over


async def test_who_does_not_take_its_answers_is_closed_in_time(mock_clock: trio.testing.MockClock) -> None:
    async with serving() as desk:
        peer = await Peer(desk).welcomed()
        peer.send(*map(request, range(1, 4)))
        await until(lambda: len(desk.asked) == 3, "all are asked")
        other = await Peer(desk).welcomed()
        other.send(request(1))
        await until(lambda: len(desk.asked) == 4, "the other asks, too")
        for at, answer in enumerate([large(8_000_000)] * 3 + [DONE]):
            desk.answer(at, answer)
        await settled()
        mock_clock.jump(29)
        await settled()
        assert desk.left == []
        mock_clock.jump(2)
        await until(lambda: len(desk.left) == 1, "the slow one is gone")
        assert [type(error) for error in desk.rejected] == [ClientSlow]
        assert await other.hears(Answered) == Answered(1, DONE)
        assert not other.over


# Limits


async def test_at_the_limit_of_connections_a_client_is_told_at_its_hello() -> None:
    async with serving(ServerLimits(connections=2)) as desk:
        first, _ = await Peer(desk).welcomed(), await Peer(desk).welcomed()
        third = Peer(desk)
        third.send(Hello(), request(1))  # it does not wait for its welcome; the answer reaches it all the same
        await third.ended()
        told = Overloaded(limit_name="connections", limit=2, retry_after_ms=50)
        assert third.heard == [Declined(0, told)]
        assert desk.rejected == [told]
        assert desk.asked == []
        first.close()
        await until(lambda: desk.clients.count == 1, "there is room")
        await Peer(desk).welcomed()


async def test_those_without_a_hello_make_room_for_each_other_and_keep_nobody_out() -> None:
    async with serving(ServerLimits(connections=2, strangers=3)) as desk:
        greeted = await Peer(desk).welcomed()
        strangers = [Peer(desk) for _ in range(10)]
        await until(lambda: len(desk.rejected) == 7, "the oldest ones go")
        for stranger in strangers[:7]:
            await stranger.ended()
        assert {error.facts["limit_name"] for error in desk.rejected} == {"strangers"}
        assert not any(stranger.over for stranger in strangers[7:])
        await strangers[8].welcomed()
        greeted.send(Ping(1))
        assert await greeted.hears(Pong) == Pong(1)


async def test_one_address_does_not_push_out_the_strangers_of_another() -> None:
    async with serving(ServerLimits(strangers_per_address=2)) as desk:
        other = Peer(desk, source="127.0.0.2")
        await until(lambda: desk.clients.count == 1, "it is there")
        many = [Peer(desk) for _ in range(5)]
        await until(lambda: len(desk.rejected) == 3, "the oldest ones of the other address go")
        for peer in many[:3]:
            await peer.ended()
        assert {error.facts["limit_name"] for error in desk.rejected} == {"strangers_per_address"}
        await other.welcomed()


async def test_who_leaves_too_many_answers_lying_is_closed() -> None:
    async with serving(ServerLimits(unsent_bytes=10_000_000)) as desk:
        peer = await Peer(desk).welcomed()
        peer.send(*map(request, range(1, 9)))
        await until(lambda: len(desk.asked) == 8, "all are asked")
        for at in range(8):
            desk.answer(at, large(4_000_000))
        await until(lambda: len(desk.left) == 1, "it is gone")
        [error] = desk.rejected
        assert error.facts["limit_name"] == "unsent_bytes"
        assert desk.asked[0][0].unsent_bytes == 0


async def test_when_all_leave_too_much_lying_the_one_that_stands_still_goes() -> None:
    """Not the one that takes its answers, if later than they come, and not the one whose answers come last."""
    async with serving(ServerLimits(unsent_bytes=10**9, all_unsent_bytes=48_000_000)) as desk:
        still, reading, later = [await Peer(desk).welcomed() for _ in range(3)]
        for count, peer in enumerate((still, reading, later), start=1):
            peer.send(*map(request, range(1, 11)))
            await until(lambda wanted=10 * count: len(desk.asked) == wanted, "it has asked")  # type: ignore[misc]
        for at in (0, 1, 10, 11):  # more than the system takes of either
            desk.answer(at, large(8_000_000))
        await reading.hears(Answered)
        for at in range(20, 30):
            if not desk.rejected:
                desk.answer(at, large(8_000_000))
                await settled()
        [error] = desk.rejected
        assert error.facts["limit_name"] == "all_unsent_bytes"
        await until(lambda: bool(desk.left), "one is gone")
        assert desk.left == [desk.asked[0][0]]
        await reading.hears(Answered)


async def test_when_begun_frames_are_too_much_the_oldest_goes() -> None:
    async with serving(ServerLimits(all_unfinished_bytes=100_000)) as desk:
        begun = (60_000).to_bytes(4, "big") + bytes(4) + bytes(40_000)
        peers = [await Peer(desk).welcomed() for _ in range(3)]
        for peer in peers:
            peer.send_bytes(begun)
            await settled()
        await peers[0].ended()
        [error] = desk.rejected
        assert error.facts["limit_name"] == "all_unfinished_bytes"
        assert not peers[1].over and not peers[2].over


async def test_who_ends_a_frame_and_begins_the_next_is_not_the_oldest_any_more() -> None:
    async with serving(ServerLimits(all_unfinished_bytes=100_000)) as desk:
        begun = (60_000).to_bytes(4, "big") + bytes(4) + bytes(40_000)
        header, body = codec.encode_message(Ping(1))
        ping = b"".join(bytes(buffer) for buffer in write_frame(header, *body))
        busy, slow, other = [await Peer(desk).welcomed() for _ in range(3)]
        for peer, data in ((busy, ping[:3]), (slow, begun), (busy, ping[3:] + begun), (other, begun)):
            peer.send_bytes(data)
            await settled()
        await slow.ended()
        assert not busy.over and not other.over


async def test_who_breaks_the_protocol_is_told_and_so_is_the_operator(mock_clock: trio.testing.MockClock) -> None:
    """Also a client that goes on sending: closed at once, it would be reset before it reads why."""
    async with serving() as desk:
        peer = await Peer(desk).welcomed()
        for _ in range(5):
            peer.send_bytes(b"\xff" * 10_000)
            await settled()
        declined = await peer.hears(Declined)
        assert isinstance(declined, Declined) and isinstance(declined.error, BadFrame)
        await peer.ended()
        assert [type(error) for error in desk.rejected] == [BadFrame]
        assert desk.left == []
        mock_clock.jump(1.1)
        await until(lambda: len(desk.left) == 1, "it is not waited for any longer")
