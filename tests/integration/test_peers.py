"""Nodes on real sockets of the loopback: they find each other, stay in order, and survive whatever knocks."""

import os
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from random import Random

import pytest
import trio
import trio.testing

from holdfast.client.protocol.errors import BadFrame, HoldfastError, StateBroken, VersionUnsupported
from holdfast.cluster.handshake import (
    MAGIC,
    ClusterKnown,
    Handshake,
    NotAPeer,
    OtherCluster,
    OtherPeer,
    OwnName,
    PeerUnformed,
    ProofWrong,
)
from holdfast.cluster.journal_frames import Identity
from holdfast.cluster.links import FrameWriter, Handlers, LinkLimits, PeerSilent, PeerSlow, SessionLost
from holdfast.cluster.messages import CHUNK_BYTES, AppendEntries, Message, SnapshotChunk, StaleTerm, encode
from holdfast.cluster.peers import STRANGERS_MAX, Address, DialTiming, ListenFailed, Peers, listen

SECRET = b"the secret of the test cluster"
HOST = "127.0.0.1"
HANG_S = 10.0  # a test that hangs fails here; none waits for it
LIMITS, TIMING = LinkLimits(), DialTiming()
pytestmark = pytest.mark.trio


class Node:
    """One node's links, and all that they told; `until` waits for what they will tell."""

    def __init__(
        self,
        name: str,
        secret: bytes = SECRET,
        cluster_id: str = "c1",
        limits: LinkLimits = LIMITS,
        timing: DialTiming = TIMING,
    ) -> None:
        self.name = name
        self.told: list[tuple[object, ...]] = []
        self.terms: dict[str, list[int]] = {}
        self.troubles: list[tuple[str, HoldfastError]] = []
        self.address: Address = (HOST, 0)
        self.scope = trio.CancelScope()
        self.deliver: Callable[[str, Message, int], None] = self.keep
        self._changed = trio.Event()
        self.peers = Peers(
            me=Identity(cluster_id=cluster_id, node=name, incarnation=1),
            secret=secret,
            handlers=Handlers(
                connected=lambda peer: self.note("connected", peer),
                disconnected=lambda peer: self.note("disconnected", peer),
                deliver=lambda peer, message, log: self.deliver(peer, message, log),
            ),
            nonce=os.urandom,
            rng=Random(name),
            trouble=self.trouble,
            limits=limits,
            timing=timing,
        )

    def note(self, *what: object) -> None:
        self.told.append(what)
        self._changed.set()

    def trouble(self, where: str, error: HoldfastError) -> None:
        self.troubles.append((where, error))
        self._changed.set()

    def keep(self, peer: str, message: Message, log: int) -> None:
        if isinstance(message, StaleTerm):
            self.terms.setdefault(peer, []).append(message.term)
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        with trio.fail_after(HANG_S):
            while not condition():
                self._changed = trio.Event()
                await self._changed.wait()

    async def until_told(self, *what: object, count: int = 1) -> None:
        await self.until(lambda: self.told.count(what) >= count)

    async def until_trouble(self, kind: type[HoldfastError]) -> None:
        await self.until(lambda: self.ended_by(kind))

    def ended_by(self, kind: type[HoldfastError]) -> bool:
        return any(isinstance(error, kind) for _, error in self.troubles)

    async def run(self, listeners: list[trio.SocketListener]) -> None:
        with self.scope:
            await self.peers.run(listeners)


@asynccontextmanager
async def running(*nodes: Node, dial: bool = True) -> AsyncIterator[None]:
    """All of them listening, and dialling each other; stopped and told so at the end."""
    async with trio.open_nursery() as nursery:
        for node in nodes:
            listeners = await listen(node.address)
            node.address = listeners[0].socket.getsockname()[:2]
            nursery.start_soon(node.run, listeners)
        for node in nodes:
            node.peers.use({each.name: each.address for each in nodes} if dial else {})
        yield
        nursery.cancel_scope.cancel()


async def connected(*nodes: Node) -> None:
    for node in nodes:
        for other in nodes:
            if other is not node:
                await node.until_told("connected", other.name)


async def eventually(condition: Callable[[], bool]) -> None:
    """For tests on a clock of their own: wait in the real time of the sockets, and not for ever."""
    for _ in range(2_000):
        if condition():
            return
        await trio.testing.wait_all_tasks_blocked(0.001)
    raise AssertionError("it did not come to pass")


async def closed(stream: trio.SocketStream) -> bool:
    """Waits until the other side has closed; whether it closed without a word."""
    said = b""
    with trio.fail_after(HANG_S), suppress(trio.BrokenResourceError):  # broken: closed with bytes of ours unread
        while data := await stream.receive_some():
            said += data
    return not said


# Talking -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", ["ab", "abc"])
async def test_nodes_exchange_ten_thousand_messages_in_order_each_way(names: str) -> None:
    nodes = [Node(name) for name in names]
    async with running(*nodes):
        await connected(*nodes)
        for burst in range(10):  # with room for the others between two bursts
            for node in nodes:
                for other in nodes:
                    if other is not node:
                        sent = [node.peers.send(other.name, StaleTerm(burst * 1_000 + n)) for n in range(1_000)]
                        assert all(sent)
            await trio.lowlevel.checkpoint()
        for node in nodes:
            for other in nodes:
                if other is not node:
                    terms = node.terms.setdefault(other.name, [])
                    await node.until(lambda terms=terms: len(terms) >= 10_000)  # type: ignore[misc]
                    assert terms == list(range(10_000))
    for node in nodes:
        assert [each for each in node.told if each[0] == "disconnected"]  # stopping is told too
        assert not any(each.connected for each in node.peers.status())


async def test_the_higher_name_dials_and_small_messages_are_not_held_back() -> None:
    a, b = Node("a"), Node("b")
    async with running(a, b):
        await connected(a, b)
        for node in (a, b):
            (conversation,) = node.peers._conversations.values()
            stream = conversation._stream
            assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            local = stream.socket.getsockname()[1]
            assert (local == a.address[1]) == (node is a)  # a was called, b has a port of the system's choice


async def test_a_message_from_within_connected_is_the_first_of_its_session() -> None:
    a, b = Node("a"), Node("b")
    plain = a.note

    def greet(*what: object) -> None:
        plain(*what)
        if what == ("connected", "b"):
            assert a.peers.send("b", StaleTerm(77))

    a.note = greet  # type: ignore[method-assign]
    async with running(a, b):
        await b.until(lambda: b.terms.get("a") == [77])
        assert b.told == [("connected", "a")]


async def test_a_frame_that_comes_together_with_the_last_proof_is_delivered() -> None:
    b = Node("b")
    async with running(b), trio.open_nursery() as nursery:
        listeners = await listen((HOST, 0))

        async def answer(stream: trio.SocketStream) -> None:
            me = Identity(cluster_id="c1", node="a", incarnation=1)
            handshake = Handshake(me=me, secret=SECRET, nonce=bytes(32), dialled=None)
            await stream.send_all(handshake.feed(await stream.receive_some()))
            proof = handshake.feed(await stream.receive_some())
            frame = FrameWriter(handshake.established().send_key).seal(encode(StaleTerm(9)))
            await stream.send_all(b"".join((proof, *frame)))
            await closed(stream)

        nursery.start_soon(trio.serve_listeners, answer, listeners)
        b.peers.use({"a": listeners[0].socket.getsockname()[:2]})
        await b.until(lambda: b.terms == {"a": [9]})
        assert b.told == [("connected", "a")]
        nursery.cancel_scope.cancel()


async def test_a_killed_connection_is_told_and_made_anew_and_nothing_of_the_old_comes_late() -> None:
    a, b = Node("a"), Node("b", timing=DialTiming(first_wait_s=0.001, longest_wait_s=0.001))
    async with running(a, b):
        for round_ in range(1, 6):
            await a.until_told("connected", "b", count=round_)
            await b.until_told("connected", "a", count=round_)
            for number in range(100):
                a.peers.send("b", StaleTerm(1_000 * round_ + number))
            (a if round_ % 2 else b).peers.drop("b" if round_ % 2 else "a")
            assert not (a if round_ % 2 else b).peers.send("b" if round_ % 2 else "a", StaleTerm(1))
            await a.until_told("disconnected", "b", count=round_)
            await b.until_told("disconnected", "a", count=round_)
        await b.until_told("connected", "a", count=6)
    for node in (a, b):
        assert [each[0] for each in node.told] == ["connected", "disconnected"] * 6
    assert b.terms.get("a", []) == sorted(b.terms.get("a", []))


async def test_a_node_that_comes_back_under_its_address_is_found_again() -> None:
    a, b = Node("a"), Node("b")
    async with running(b):
        async with running(a):
            b.peers.use({"a": a.address})
            await connected(a, b)
        await b.until_told("disconnected", "a")
        again = Node("a")
        again.address = a.address
        async with running(again, dial=False):
            await connected(again, b)


async def test_a_new_session_replaces_one_that_is_half_open() -> None:
    """The dialler's machine lost its power: it comes back before the listener has noticed anything."""
    a = Node("a")
    async with running(a):
        first, _ = await met_by_hand(a)
        await a.until_told("connected", "b")
        second, _ = await met_by_hand(a)
        await a.until_told("connected", "b", count=2)
        assert [each[0] for each in a.told] == ["connected", "disconnected", "connected"]
        assert await closed(first)
        await first.aclose()
        await second.aclose()


async def met_by_hand(node: Node) -> tuple[trio.SocketStream, FrameWriter]:
    """A stream to `node` on which b has proven itself, and what makes its frames."""
    me = Identity(cluster_id="c1", node="b", incarnation=1)
    handshake = Handshake(me=me, secret=SECRET, nonce=os.urandom(32), dialled=node.name)
    stream = await trio.open_tcp_stream(*node.address)
    await stream.send_all(handshake.start())
    while not handshake.done:
        await stream.send_all(handshake.feed(await stream.receive_some()))
    return stream, FrameWriter(handshake.established().send_key)


async def test_a_dialled_peer_that_is_no_longer_wanted_is_hung_up() -> None:
    a, b = Node("a"), Node("b")
    async with running(a, b):
        await connected(a, b)
        b.peers.use({})
        await a.until_told("disconnected", "b")
        await b.until_told("disconnected", "a")


# Refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("secret", "cluster_ids", "at_called", "at_caller"),
    [
        (b"another secret of any length", ("c1", "c1"), ProofWrong, SessionLost),
        (SECRET, ("c1", "c2"), OtherCluster, SessionLost),
        (SECRET, ("c1", ""), PeerUnformed, ClusterKnown),
        (SECRET, ("", "c1"), ClusterKnown, PeerUnformed),
    ],
)
async def test_who_does_not_belong_is_refused_on_both_sides_and_nothing_is_delivered(
    secret: bytes, cluster_ids: tuple[str, str], at_called: type[HoldfastError], at_caller: type[HoldfastError]
) -> None:
    called, caller = Node("a", cluster_id=cluster_ids[0]), Node("b", secret=secret, cluster_id=cluster_ids[1])
    async with running(called, caller):
        await called.until_trouble(at_called)
        await caller.until_trouble(at_caller)
    assert called.told == caller.told == []


@pytest.mark.parametrize(("answers", "error"), [("b", OwnName), ("aa", OtherPeer)])
async def test_an_address_that_leads_to_another_node_is_refused_by_the_dialler(
    answers: str, error: type[HoldfastError]
) -> None:
    b = Node("b")
    async with running(b), trio.open_nursery() as nursery:
        listeners = await listen((HOST, 0))

        async def answer(stream: trio.SocketStream) -> None:
            me = Identity(cluster_id="c1", node=answers, incarnation=1)
            handshake = Handshake(me=me, secret=SECRET, nonce=bytes(32), dialled="zz")
            await stream.receive_some()
            await stream.send_all(handshake.start())  # its hello, as an answer
            await closed(stream)

        nursery.start_soon(trio.serve_listeners, answer, listeners)
        b.peers.use({"a": listeners[0].socket.getsockname()[:2]})
        await b.until_trouble(error)
        nursery.cancel_scope.cancel()
    assert b.told == []


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", NotAPeer),
        (bytes(range(256)) * 1_000, NotAPeer),
        (MAGIC + struct.pack(">H", 9), VersionUnsupported),
        (MAGIC, SessionLost),  # and hangs up
    ],
    ids=["http", "garbage", "version", "half"],
)
async def test_garbage_on_the_port_is_closed_without_a_word_and_peers_do_not_notice(
    words: bytes, error: type[HoldfastError]
) -> None:
    a, b = Node("a"), Node("b")
    async with running(a, b):
        await connected(a, b)
        async with await trio.open_tcp_stream(*a.address) as stream:
            with suppress(trio.BrokenResourceError):  # it may be closed before it has said all
                await stream.send_all(words)
            if error is SessionLost:
                await stream.send_eof()
            await a.until_trouble(error)
            assert await closed(stream)
        assert a.troubles[-1][0].startswith(HOST)
        b.peers.send("a", StaleTerm(5))
        await a.until(lambda: a.terms.get("b") == [5])
        assert a.told == [("connected", "b")]


async def test_a_byte_that_is_changed_on_the_way_ends_the_session_and_is_not_delivered() -> None:
    a, b = Node("a"), Node("b")
    async with running(a, dial=False), running(b, dial=False), trio.open_nursery() as nursery:
        tampering = trio.Event()
        relays = await listen((HOST, 0))

        async def relay(near: trio.SocketStream) -> None:
            async with await trio.open_tcp_stream(*a.address) as far, trio.open_nursery() as both:
                both.start_soon(pump, near, far, True)
                both.start_soon(pump, far, near, False)

        async def pump(source: trio.SocketStream, sink: trio.SocketStream, tampered: bool) -> None:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                while data := await source.receive_some():
                    changed = bytes([*data[:-20], data[-20] ^ 1, *data[-19:]])
                    await sink.send_all(changed if tampered and tampering.is_set() else data)
            await sink.aclose()

        nursery.start_soon(trio.serve_listeners, relay, relays)
        b.peers.use({"a": relays[0].socket.getsockname()[:2]})
        await connected(a, b)
        tampering.set()
        b.peers.send("a", StaleTerm(5))
        await a.until_trouble(BadFrame)
        await a.until_told("disconnected", "b")
        await b.until_told("disconnected", "a")
        assert a.terms == {}
        nursery.cancel_scope.cancel()


# Slow and silent ---------------------------------------------------------------------------------------


async def test_a_client_that_never_speaks_is_dropped(mock_clock: trio.testing.MockClock) -> None:
    a = Node("a")
    async with running(a):
        stream = await trio.open_tcp_stream(*a.address)
        await eventually(lambda: len(a.peers._strangers) == 1)
        mock_clock.jump(TIMING.handshake_s)
        await eventually(lambda: a.ended_by(PeerSilent))
        assert await closed(stream)
        await stream.aclose()


async def test_an_address_that_does_not_answer_is_given_up_and_tried_again(
    mock_clock: trio.testing.MockClock,
) -> None:
    b = Node("b")
    with ExitStack() as sockets:
        full = sockets.enter_context(socket.socket())
        full.bind((HOST, 0))
        full.listen(0)  # nobody accepts, and one who waits fills it: further calls are not even refused
        for _ in range(3):
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        async with running(b):
            b.peers.use({"a": full.getsockname()})
            for attempt in range(1, 3):
                await trio.testing.wait_all_tasks_blocked(0.01)
                mock_clock.jump(TIMING.connect_s)
                await eventually(lambda attempt=attempt: len(b.troubles) == attempt)  # type: ignore[misc]
                assert isinstance(b.troubles[-1][1], PeerSilent)
                await trio.testing.wait_all_tasks_blocked(0.01)
                mock_clock.jump(TIMING.longest_wait_s)


async def test_a_peer_that_falls_silent_is_dropped_and_a_living_one_is_not(mock_clock: trio.testing.MockClock) -> None:
    a, c = Node("a"), Node("c")
    async with running(a, c):
        await connected(a, c)
        silent, _ = await met_by_hand(a)
        await a.until_told("connected", "b")
        for ping in range(1, 1 + int(LIMITS.silence_s / LIMITS.ping_s)):
            mock_clock.jump(LIMITS.ping_s)
            await pinged(a, "c", ping)
            await pinged(c, "a", ping)
        await eventually(lambda: ("disconnected", "b") in a.told and a.ended_by(PeerSilent))
        assert ("disconnected", "c") not in a.told and c.told == [("connected", "a")]
        await silent.aclose()


async def test_who_was_stopped_hears_what_waits_before_it_looks_at_its_clock(
    mock_clock: trio.testing.MockClock,
) -> None:
    a = Node("a")
    async with running(a):
        stream, writer = await met_by_hand(a)
        await eventually(lambda: ("connected", "b") in a.told)
        await trio.testing.wait_all_tasks_blocked()
        # No await between the two, as in a process that is stopped: a ping comes, and the deadline passes.
        os.write(stream.socket.fileno(), b"".join(writer.seal(b"")))
        mock_clock.jump(2 * LIMITS.silence_s)
        await pinged(a, "b", 1)
        assert a.told == [("connected", "b")] and a.peers.status()[0].connected
        mock_clock.jump(LIMITS.silence_s)
        await eventually(lambda: ("disconnected", "b") in a.told)
        await stream.aclose()


async def pinged(node: Node, peer: str, count: int) -> None:
    """Wait until that many frames of this peer have come."""
    await eventually(lambda: any(each.peer == peer and each.traffic.frames_in >= count for each in node.peers.status()))


async def test_a_peer_that_does_not_read_costs_bounded_memory_and_then_its_session() -> None:
    limits = LinkLimits(send_bytes=2_000_000)
    a, most = Node("a", limits=limits), 0
    async with running(a):
        stuck, _ = await met_by_hand(a)
        await a.until_told("connected", "b")
        entries = AppendEntries(1, 0, 1, 0, ((b"\x10" * 100_000, 2, 1),), 1, 0)
        with trio.fail_after(HANG_S):
            while a.peers.send("b", entries):
                most = max(most, a.peers.status()[0].queued_bytes)
                await trio.lowlevel.checkpoint()
        await a.until_told("disconnected", "b")
        await a.until_trouble(PeerSlow)
        assert 1_800_000 < most <= limits.send_bytes and a.peers.status()[0].queued_bytes == 0
        await stuck.aclose()


async def test_a_write_that_makes_no_progress_ends_the_session(mock_clock: trio.testing.MockClock) -> None:
    """The peer talks on, and so is not silent, but takes nothing."""
    a = Node("a", limits=LinkLimits(silence_s=1_000.0))
    async with running(a):
        stuck, _ = await met_by_hand(a)
        await a.until_told("connected", "b")
        entries = AppendEntries(1, 0, 1, 0, ((b"\x10" * 8_000_000, 2, 1),), 1, 0)
        assert a.peers.send("b", entries) and a.peers.send("b", entries)
        await eventually(lambda: a.peers.status()[0].traffic.frames_out == 1)
        mock_clock.jump(LIMITS.frame_s)
        await eventually(lambda: a.ended_by(PeerSlow))
        await stuck.aclose()


async def stream_snapshot(node: Node, peer: str, chunks: int) -> set[int | None]:
    """Send that many chunks, or until the session is gone; gives the sessions that took part."""
    numbers: set[int | None] = set()
    for number in range(chunks):
        numbers.add(await node.peers.room(peer))
        if None in numbers:
            break
        assert node.peers.send(peer, SnapshotChunk(1, number * CHUNK_BYTES, b"s" * CHUNK_BYTES))
    return numbers


async def test_a_snapshot_stream_to_a_peer_that_does_not_read_waits_and_learns_of_the_end() -> None:
    a, outcome = Node("a"), []
    async with running(a), trio.open_nursery() as nursery:
        stuck, _ = await met_by_hand(a)
        await a.until_told("connected", "b")

        async def stream() -> None:
            outcome.append(await stream_snapshot(a, "b", 1_000))

        nursery.start_soon(stream)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert outcome == [] and a.peers.status()[0].connected
        assert 2 * CHUNK_BYTES < a.peers.status()[0].queued_bytes < 6 * CHUNK_BYTES
        await stuck.aclose()
        await a.until_told("disconnected", "b")
    assert outcome == [{1, None}]


async def test_a_heartbeat_does_not_wait_for_a_snapshot_stream() -> None:
    a, b = Node("a"), Node("b")
    order: list[str] = []

    def deliver(peer: str, message: Message, log: int) -> None:
        order.append(type(message).__name__)
        b.keep(peer, message, log)

    b.deliver = deliver
    async with running(a, b):
        await connected(a, b)
        for _ in range(4):
            a.peers.send("b", SnapshotChunk(1, 0, b"s" * CHUNK_BYTES))
        a.peers.send("b", StaleTerm(1))
        await b.until(lambda: len(order) == 5)
        assert order.index("StaleTerm") == 1
        assert await stream_snapshot(a, "b", 64) == {1}
        await b.until(lambda: len(order) == 69)
        a.peers.drop("b")
        assert await a.peers.room("b") is None


async def test_strangers_are_bounded_and_the_oldest_makes_room() -> None:
    a, b = Node("a", timing=DialTiming(handshake_s=1_000.0)), Node("b")
    async with running(a, b, dial=False):
        first = await trio.open_tcp_stream(*a.address)
        more = [await trio.open_tcp_stream(*a.address) for _ in range(STRANGERS_MAX)]
        assert await closed(first)
        b.peers.use({"a": a.address})
        await connected(a, b)
        assert len(a.peers._strangers) <= STRANGERS_MAX
        for stream in (first, *more):
            await stream.aclose()


# Ends --------------------------------------------------------------------------------------------------


async def test_what_a_handler_raises_ends_the_run() -> None:
    a, b = Node("a"), Node("b")

    def deliver(peer: str, message: Message, log: int) -> None:
        raise StateBroken(problem="by the test")

    a.deliver = deliver
    with pytest.RaisesGroup(StateBroken, flatten_subgroups=True):
        async with running(a, b):
            await connected(a, b)
            b.peers.send("a", StaleTerm(1))
            await trio.sleep_forever()
    assert a.told[-1] == ("disconnected", "b")


async def test_an_address_in_use_is_an_error_that_names_it() -> None:
    (first,) = await listen((HOST, 0))
    async with first:
        port = first.socket.getsockname()[1]
        with pytest.raises(ListenFailed, match=str(port)):
            await listen((HOST, port))
