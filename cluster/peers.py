"""The links to the other nodes, on trio: one listener, a dialler for every lower name, two tasks for each session.

Decides nothing: who may talk is `handshake.py`, what is delivered, dropped or over is `links.py`. Handlers are called
synchronously, between two awaits, so the node's other tasks never see a session half changed. A library's error becomes
one of ours in `_translated` and nowhere else. What a handler raises passes through `run` and ends the node.
"""

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

import trio

from holdfast.client.protocol.errors import HoldfastError, Misuse, ProtocolViolated
from holdfast.cluster.accepting import Short, accept_all
from holdfast.cluster.handshake import NONCE_BYTES, Established, Handshake
from holdfast.cluster.journal_frames import Identity
from holdfast.cluster.links import Handlers, LinkLimits, Links, LinkStatus, PeerSilent, PeerSlow, Session, SessionLost
from holdfast.cluster.messages import Message

Address: TypeAlias = tuple[str, int]
Trouble: TypeAlias = Callable[[str, HoldfastError], None]

RECEIVE_BYTES = 262_144  # handled in one go, so also for how long the loop is not given back
UNSENT_BYTES = 131_072  # what the kernel may hold unsent: it cannot be overtaken by a heartbeat any more
STRANGER_BYTES = 4_096  # what is read at once of one who has not proven itself
STRANGERS_MAX = 64  # connections that have not proven themselves; one more, and the oldest goes


class ListenFailed(Misuse):
    """An address cannot be listened on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DialTiming:
    connect_s: float = 2.0
    handshake_s: float = 5.0
    first_wait_s: float = 0.03  # a peer that restarts is back at once; its election must not wait for us
    longest_wait_s: float = 0.25  # a node that is back must not wait for us: its log is as old as that


_LIMITS, _TIMING = LinkLimits(), DialTiming()


class Backoff:
    """How long to wait before the next attempt: doubled each time, spread so that nodes do not knock in step."""

    def __init__(self, timing: DialTiming, rng: Random) -> None:
        self._timing, self._rng = timing, rng
        self._step_s = timing.first_wait_s

    def next_s(self, lasted_s: float) -> float:
        """After an attempt whose session lasted that long. One that was soon over is no success."""
        if lasted_s >= self._timing.longest_wait_s:
            self._step_s = self._timing.first_wait_s
        wait_s = self._step_s * (0.5 + self._rng.random())
        self._step_s = min(2 * self._step_s, self._timing.longest_wait_s)
        return wait_s


async def listen(address: Address) -> list[trio.SocketListener]:
    """Listen on this address alone. Raises ListenFailed."""
    host, port = address
    try:
        return await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        raise ListenFailed(f"{host}:{port} cannot be listened on: {error}; choose another address or port") from error


class Peers:
    """All links of one node. Methods that are not `async` return at once; call them on the loop's thread."""

    def __init__(
        self,
        *,
        me: Identity,
        secret: bytes,
        handlers: Handlers,
        nonce: Callable[[int], bytes],
        rng: Random,
        trouble: Trouble = lambda where, error: None,
        short: Short = lambda error: None,
        limits: LinkLimits = _LIMITS,
        timing: DialTiming = _TIMING,
    ) -> None:
        """`nonce` gives that many bytes nobody can foresee; `rng` spreads the attempts and guards nothing.

        `trouble` hears why a dial, a handshake or a session failed, with the peer's name or, of one who has not
        proven a name, its address; `short` of connections that the system has no descriptor for. Raises BadValue for a
        secret or a name that cannot be used.
        """
        self._me, self._secret, self._nonce, self._rng = me, secret, nonce, rng
        self._trouble, self._short, self._limits, self._timing = trouble, short, limits, timing
        self._links = Links(handlers, limits)
        self._addresses: dict[str, Address] = {}
        self._diallers: dict[str, trio.CancelScope] = {}
        self._strangers: dict[trio.CancelScope, None] = {}  # oldest first
        self._conversations: dict[str, _Conversation] = {}
        self._nursery: trio.Nursery | None = None
        self._handshake(None)

    async def run(self, listeners: Sequence[trio.abc.Listener[trio.SocketStream]]) -> None:
        """Hold the links until cancelled; then every session is closed, and its end told. To be called once.

        The listeners are closed at the end too, unless they were `Lent`.
        """
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                self.use(self._addresses)
                await accept_all(listeners, self._answer, self._short, nursery)
            finally:
                self._nursery = None

    def use(self, addresses: Mapping[str, Address]) -> None:
        """From now on dial exactly these, as far as it is us who dial them; a former address is hung up."""
        for peer in [peer for peer in self._diallers if addresses.get(peer) != self._addresses[peer]]:
            self._diallers.pop(peer).cancel()
        self._addresses = dict(addresses)
        for peer, address in self._addresses.items():
            if peer < self._me.node and peer not in self._diallers and self._nursery is not None:
                scope = self._diallers[peer] = trio.CancelScope()
                self._nursery.start_soon(self._dial, peer, address, scope)

    def send(self, peer: str, message: Message, log: int = 0) -> bool:
        """Queue a message for a peer; whether there is a session to take it. See `Links.send`."""
        return self._links.send(peer, message, log)

    def post(self, messages: Iterable[tuple[str, Message]], log: int) -> None:
        """Send many at once, and those that the system takes now without waking a task for them."""
        peers = dict.fromkeys(peer for peer, _ in messages)
        found = [self._conversations[peer] for peer in peers if peer in self._conversations]
        for conversation in found:
            conversation.posting = True
        for peer, message in messages:
            self._links.send(peer, message, log)
        for conversation in found:
            conversation.flush()

    async def room(self, peer: str) -> int | None:
        """Wait until a snapshot stream may send its next message; None if there is no session any more.

        The number tells sessions apart: a stream that sees another one has lost chunks, and begins anew. The next
        `send` without an await between belongs to that session.
        """
        await trio.lowlevel.checkpoint()
        conversation = self._conversations.get(peer)
        if conversation is None:
            return None
        while not conversation.session.has_room:
            await conversation.room.wait()
        return None if conversation.session.over else conversation.session.number

    async def flushed(self, peer: str) -> None:
        """Wait until the system has taken all that was sent to this peer, or its session is over."""
        await trio.lowlevel.checkpoint()
        conversation = self._conversations.get(peer)
        while conversation is not None and not conversation.session.over and not conversation.idle.is_set():
            await conversation.idle.wait()

    def incarnation(self, peer: str) -> int | None:
        """Of the peer's disk, as it has proven it in the session that lasts."""
        session = self._links.session(peer)
        return None if session is None else session.incarnation

    def drop(self, peer: str) -> None:
        """End the session with this peer, if there is one; whoever dials will dial again."""
        session = self._links.session(peer)
        if session is not None:
            session.end(SessionLost(f"this node dropped its session with {peer!r}"))

    def status(self) -> list[LinkStatus]:
        return self._links.status()

    # Meeting

    async def _dial(self, peer: str, address: Address, scope: trio.CancelScope) -> None:
        backoff = Backoff(self._timing, self._rng)
        with scope:
            while True:
                lasted_s = 0.0
                try:
                    stream = await self._connect(address)
                    met = await self._meet(stream, peer)
                except (SessionLost, ProtocolViolated) as error:
                    self._trouble(peer, error)
                else:
                    began_s = trio.current_time()
                    await self._converse(stream, met)
                    lasted_s = trio.current_time() - began_s
                await trio.sleep(backoff.next_s(lasted_s))

    async def _connect(self, address: Address) -> trio.SocketStream:
        with _translated(PeerSilent), trio.fail_after(self._timing.connect_s):
            return await trio.open_tcp_stream(*address)

    async def _answer(self, stream: trio.SocketStream) -> None:
        met: Established | None = None
        caller = _remote(stream)
        with trio.CancelScope() as scope:
            if len(self._strangers) >= STRANGERS_MAX:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.cancel()
            self._strangers[scope] = None
            try:
                met = await self._meet(stream, None)
            except (SessionLost, ProtocolViolated) as error:
                self._trouble(caller, error)
            finally:
                self._strangers.pop(scope, None)
        if met is not None:
            await self._converse(stream, met)

    async def _meet(self, stream: trio.SocketStream, dialled: str | None) -> Established:
        """Shake hands within the time for it. Whatever goes wrong, the stream is closed."""
        try:
            handshake = self._handshake(dialled)
            with _translated(PeerSilent), trio.fail_after(self._timing.handshake_s):
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if hasattr(socket, "TCP_NOTSENT_LOWAT"):
                    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
                await stream.send_all(handshake.start())
                while not handshake.done:
                    data = await stream.receive_some(STRANGER_BYTES)
                    if not data:
                        raise SessionLost("closed during the handshake; the other side's log says why")
                    await stream.send_all(handshake.feed(data))
            return handshake.established()
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise

    def _handshake(self, dialled: str | None) -> Handshake:
        return Handshake(me=self._me, secret=self._secret, nonce=self._nonce(NONCE_BYTES), dialled=dialled)

    async def _converse(self, stream: trio.SocketStream, met: Established) -> None:
        """One session from its begin to its end, which is told in any case; closes the stream."""
        async with stream:
            conversation = _Conversation(self._links, met, stream, self._limits)
            session = conversation.session
            self._conversations[met.peer] = conversation
            try:
                await conversation.run(met.rest)
            finally:
                self._links.close(session, SessionLost("this node closed the connection"))
                conversation.room.set()
                conversation.idle.set()
                if self._conversations.get(met.peer) is conversation:
                    del self._conversations[met.peer]
        if session.error is not None:
            self._trouble(met.peer, session.error)


class Lent(trio.abc.Listener[trio.SocketStream]):
    """A listener that outlives the one it was given to: closing it does nothing."""

    def __init__(self, listener: trio.SocketListener) -> None:
        self._listener = listener

    async def accept(self) -> trio.SocketStream:
        return await self._listener.accept()

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


class _Conversation:
    """The two tasks of one session."""

    def __init__(self, links: Links, met: Established, stream: trio.SocketStream, limits: LinkLimits) -> None:
        self.room = trio.Event()  # set when something was taken out of the queue, and at the end
        self.idle = trio.Event()  # set when everything that was put has been written, and at the end
        self._links, self._stream, self._limits = links, stream, limits
        self._scope = trio.CancelScope()
        self._work = trio.Event()
        self.posting = False  # a flush follows: the writer is not woken
        self._writing = False  # it is the writer's turn, until all is out
        self._rest = b""  # of a piece that the system did not take as a whole
        self.session: Session = links.open(met, trio.current_time(), self)  # may wake and cancel us already

    def wake(self) -> None:
        if not self.posting:
            self._work.set()
        if self.idle.is_set():
            self.idle = trio.Event()

    def cancel(self) -> None:
        self._scope.cancel()

    def flush(self) -> None:
        """Write at once what waits, as far as the system takes it: the writer would do so a round of the loop later."""
        self.posting = False
        if not self._writing and not self.session.over:
            piece = self.session.take(trio.current_time())
            if piece:
                self._made_room()
                try:
                    self._rest = piece[os.write(self._stream.socket.fileno(), piece) :]
                except OSError:
                    self._rest = piece  # full, or broken: the writer finds out
                self._writing = bool(self._rest)
        self._work.set() if self._writing or self.session.has_waiting else self.idle.set()

    async def run(self, rest: bytes) -> None:
        """Until the session is over; `rest` came with the handshake."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read, rest)
                nursery.start_soon(self._write)

    async def _read(self, data: bytes) -> None:
        session = self.session
        while not session.over:
            if data:
                self._links.receive(session, data, trio.current_time())
            data = await self._receive()

    async def _receive(self) -> bytes:
        """What came next; nothing if the session is over."""
        # A scope for each call: when this process was stopped for longer than the deadline, trio hands over what has
        # come before it looks at deadlines, and the peer is not dropped for our own sleep.
        try:
            with _translated(PeerSilent), trio.move_on_at(self.session.deadline_s):
                data = await self._stream.receive_some(RECEIVE_BYTES)
                if not data:
                    raise SessionLost(f"{self.session.peer!r} closed the connection")
                return bytes(data)
            self.session.check(trio.current_time())
        except SessionLost as error:
            self.session.end(error)
        return b""

    async def _write(self) -> None:
        session = self.session
        while not session.over:
            piece, self._rest = self._rest or session.take(trio.current_time()), b""
            self._writing = bool(piece)
            if not piece:
                self.idle.set()
                self._work = trio.Event()
                with trio.move_on_at(session.ping_due_s):
                    await self._work.wait()
                continue
            self._made_room()
            try:
                with _translated(PeerSlow), trio.fail_after(self._limits.frame_s):
                    await self._stream.send_all(piece)
            except SessionLost as error:
                session.end(error)

    def _made_room(self) -> None:
        self.room.set()
        self.room = trio.Event()


@contextmanager
def _translated(too_slow: type[SessionLost]) -> Iterator[None]:
    """The one place where errors of trio and of the system become ours."""
    try:
        yield
    except trio.TooSlowError as error:
        raise too_slow("the other side took too long") from error
    except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
        raise SessionLost(f"the connection failed: {error!r}") from error


def _remote(stream: trio.SocketStream) -> str:
    """The stranger's address, if the system still knows it."""
    try:
        host, port, *_ = stream.socket.getpeername()
    except (OSError, trio.ClosedResourceError):
        return "unknown"
    return f"{host}:{port}"
