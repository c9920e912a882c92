"""Clients on trio: one listener, two tasks for each connection, deadlines for those that are slow or gone.

Decides nothing: what a frame means is `connection.py`, how long is waited `patience.py`, who goes when all together
hold too much `holdings.py`; what becomes of a request is the replica's. `Port.ask` and `Port.gone` are called
synchronously, so that all requests that have come by the same look at the sockets are there when the next turn begins,
and become one entry.
"""

import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import trio

from holdfast.client.protocol.errors import HoldfastError, Overloaded
from holdfast.client.protocol.frames import Buffer
from holdfast.client.protocol.replies import Answer
from holdfast.cluster.accepting import accept_all
from holdfast.cluster.connection import RETRY_AFTER_MS, Asked, Connection, Greeting
from holdfast.cluster.holdings import Holdings
from holdfast.cluster.patience import ClientIdle, ClientSlow, Patience, Times

RECEIVE_BYTES = 262_144
JOIN_BYTES = 65_536  # smaller buffers leave in one write


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits(Times):
    """Of one node. Where the system allows few open files, `descriptors.share` makes the first two smaller."""

    connections: int = 4_096  # that have said hello
    strangers: int = 512  # that have not; one more, and the oldest of them goes
    strangers_per_address: int = 256  # likewise
    send_s: float = 30.0  # for one write of answers: a client that takes longer is gone or will not catch up
    linger_s: float = 1.0  # for a client to read why it is turned away
    unsent_bytes: int = 33_554_432  # answers that one client does not take: four of the largest
    all_unsent_bytes: int = 268_435_456  # that of all clients; above it the one that stands still the longest goes
    all_unfinished_bytes: int = 268_435_456  # frames that have begun, of all clients; above it the oldest goes
    unacknowledged_ms: int = 30_000  # the kernel gives a half-open connection up after this


_LIMITS = ServerLimits()


class Port(Protocol):
    """Who answers. Neither call waits."""

    def ask(self, client: "Client", asked: Asked, size_bytes: int) -> None:
        """A request or an inquiry; `client.finish` in this call or later. Or that one of them is withdrawn."""
        ...

    def gone(self, client: "Client") -> None:
        """The connection is over: nothing of it is waited for any more."""
        ...


class Client:
    """One client's connection."""

    def __init__(self, clients: "Clients", host: str, port: int) -> None:
        self.host, self.address = host, f"{host}:{port}"
        self.core = Connection(lambda: clients.admit(self))
        self.over = False
        self._clients, self._limits = clients, clients.limits
        self._work = trio.Event()
        self._scope = trio.CancelScope()
        self._rest: deque[Buffer] = deque()  # taken out, and not written yet
        self._rest_bytes = 0
        self._busy = True  # the writer writes, or there is no connection yet
        self._descriptor = -1

    @property
    def unsent_bytes(self) -> int:
        return self.core.unsent_bytes + self._rest_bytes

    def finish(self, request_id: int, outcome: Answer | HoldfastError) -> None:
        """What became of a request; sent as soon as the client takes it."""
        self.put(request_id, outcome)
        self._work.set()

    def put(self, request_id: int, outcome: Answer | HoldfastError) -> None:
        """The same for one of many: they leave together with the next `flush`."""
        if self.over:
            return
        if isinstance(outcome, Answer):
            self.core.answer(request_id, outcome)
        else:
            self.core.decline(request_id, outcome)
        self._clients.hold_unsent(self)

    def flush(self) -> None:
        """Send what there is at once, as far as the system takes it; the writer has the rest.

        A task for it would cost more than the answer, and a round of the loop: it would leave that much later.
        """
        if self._busy:
            self._work.set()
            return
        self._take()
        while self._rest:
            piece = self._rest[0]
            try:
                sent = os.write(self._descriptor, piece)
            except BlockingIOError:
                sent = 0
            except OSError:
                self.end()
                return
            self._written(sent)
            if sent < len(piece):
                self._rest[0] = memoryview(piece)[sent:]
                self._busy = True
                break
            self._rest.popleft()
        self._clients.hold_unsent(self)
        if self._busy or self.core.closing:
            self._work.set()

    def end(self, error: HoldfastError | None = None) -> None:
        """Nothing more goes to it or comes from it. `error` is told, if it is the node's own decision."""
        if self.over:
            return
        self.over = True
        if error is not None:
            self._clients.rejected(self.address, error)
        self.core.closing = True
        self.core.take()
        self._rest.clear()
        self._rest_bytes = 0
        self._clients.let_go(self)
        self._scope.cancel()

    async def run(self, stream: trio.SocketStream, port: Port) -> None:
        self._descriptor = stream.socket.fileno()
        self._busy = False
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write, stream)
                    await self._read(port)
                    self._work.set()  # what is unsent may still go out, then the writer ends the connection
        finally:
            self._busy = True  # the number will soon be another connection's: an answer that comes late stays here

    async def _read(self, port: Port) -> None:
        core, patience = self.core, Patience(self._limits, trio.current_time())
        while not core.closing:
            greeted = core.greeted
            # One scope for many pieces: to make one costs as much as to read a small request.
            with trio.CancelScope(deadline=patience.until_s(greeted)) as waiting:
                await self._receive(port, patience, waiting)
            error = patience.verdict(core.greeted, bool(core.open_requests), trio.current_time())
            if error is not None and not core.closing:
                self.end(None if isinstance(error, ClientIdle) else error)

    async def _receive(self, port: Port, patience: Patience, waiting: trio.CancelScope) -> None:
        """Until the connection is over, the client has said hello, or it was silent for too long."""
        core = self.core
        greeted, unfinished = core.greeted, core.unfinished
        while not core.closing and core.greeted == greeted:
            await trio.lowlevel.wait_readable(self._descriptor)
            try:
                data = os.read(self._descriptor, RECEIVE_BYTES)
            except BlockingIOError:
                continue
            if not data:
                self.end()
                return
            for asked, size_bytes in core.feed(data):
                port.ask(self, asked, size_bytes)
            patience.heard(core.unfinished, trio.current_time())
            if unfinished or core.unfinished:
                self._clients.hold_unfinished(self)
            if core.unfinished != unfinished:
                unfinished = core.unfinished
                waiting.deadline = patience.until_s(greeted)
            if core.has_unsent:
                self.flush()

    async def _write(self, stream: trio.SocketStream) -> None:
        while True:
            await self._work.wait()
            self._work = trio.Event()
            self._take()
            while self._rest:
                self._busy = True
                piece = self._rest.popleft()
                with trio.move_on_after(self._limits.send_s) as sending:
                    await stream.send_all(piece)
                if sending.cancelled_caught:
                    self.end(ClientSlow(f"it did not take its answers within {self._limits.send_s:g} s"))
                    return
                self._written(len(piece))
                self._clients.hold_unsent(self)
                self._take()
            self._busy = False
            if self.core.closing:
                await self._part(stream)
                return

    async def _part(self, stream: trio.SocketStream) -> None:
        """The last word was sent. Closed with bytes unread, TCP resets, and it might be lost on its way."""
        if self.core.error is not None:
            self._clients.rejected(self.address, self.core.error)
        with trio.move_on_after(self._limits.linger_s):
            await stream.send_eof()
            while await stream.receive_some(RECEIVE_BYTES):
                pass
        self.end()

    def _take(self) -> None:
        if not self._rest:
            self._rest_bytes = self.core.unsent_bytes
            self._rest.extend(_pieces(self.core.take()))

    def _written(self, count: int) -> None:
        if count and not self.over:
            self._rest_bytes -= count
            self._clients.moved(self)


def _pieces(buffers: list[Buffer]) -> list[Buffer]:
    """Small buffers joined: a call of the system costs more than their copy."""
    pieces: list[Buffer] = []
    small: list[Buffer] = []

    def join() -> None:
        if small:
            pieces.append(b"".join(small))
            small.clear()

    for buffer in buffers:
        if len(buffer) < JOIN_BYTES:
            small.append(buffer)
        else:
            join()
            pieces.append(buffer)
    join()
    return pieces


class Clients:
    """All connections of clients to one node.

    Those that have not said hello are counted apart: they cost anybody nothing, so they must not keep others out.
    """

    def __init__(
        self,
        port: Port,
        greet: Callable[[], Greeting],
        *,
        rejected: Callable[[str, HoldfastError], None],
        short: Callable[[OSError], None],
        limits: ServerLimits = _LIMITS,
    ) -> None:
        """`greet` says where a client has come to; what it raises of Unavailable turns the client away.

        `rejected` hears of connections that the node ends: from where, and why. `short` of those that it cannot take.
        """
        self.limits, self.rejected = limits, rejected
        self._port, self._greet, self._short = port, greet, short
        self._greeted: set[Client] = set()
        self._strangers: dict[Client, None] = {}  # oldest first
        self._strangers_of: dict[str, dict[Client, None]] = {}  # by host
        self._unsent = Holdings[Client](limits.all_unsent_bytes)
        self._unfinished = Holdings[Client](limits.all_unfinished_bytes)

    @property
    def count(self) -> int:
        return len(self._greeted) + len(self._strangers)

    async def serve(self, listeners: Sequence[trio.abc.Listener[trio.SocketStream]]) -> None:
        """Until cancelled; then every connection is closed."""
        async with trio.open_nursery() as nursery:
            await accept_all(listeners, self._handle, self._short, nursery)

    # For one of them

    def admit(self, client: Client) -> Greeting:
        """It has said hello. Raises Overloaded if there are too many."""
        greeting = self._greet()
        if len(self._greeted) >= self.limits.connections:
            raise _overloaded("connections", self.limits.connections)
        self._no_stranger(client)
        self._greeted.add(client)
        return greeting

    def hold_unsent(self, client: Client) -> None:
        """See how much it has unsent now: alone, and together with all others."""
        if client.over:
            return
        size_bytes, limits = client.unsent_bytes, self.limits
        if size_bytes > limits.unsent_bytes:
            client.end(_overloaded("unsent_bytes", limits.unsent_bytes))
            return
        slowest = self._unsent.hold(client, size_bytes)
        while slowest is not None:
            slowest.end(_overloaded("all_unsent_bytes", limits.all_unsent_bytes))
            slowest = self._unsent.hold(slowest, 0)

    def hold_unfinished(self, client: Client) -> None:
        """The same for a frame of its that has begun."""
        if client.over:
            return
        oldest = self._unfinished.hold(client, client.core.unfinished_bytes)
        while oldest is not None:
            oldest.end(_overloaded("all_unfinished_bytes", self.limits.all_unfinished_bytes))
            oldest = self._unfinished.hold(oldest, 0)

    def moved(self, client: Client) -> None:
        """It has taken something."""
        self._unsent.moved(client)

    def let_go(self, client: Client) -> None:
        """It holds nothing any more."""
        self._unsent.hold(client, 0)
        self._unfinished.hold(client, 0)

    # Connections

    async def _handle(self, stream: trio.SocketStream) -> None:
        client = Client(self, *_remote(stream))
        self._meet(client)
        try:
            _prepare(stream, self.limits)
            await client.run(stream, self._port)
        except* (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the client is gone; its requests are abandoned below
        finally:
            client.end()
            self._no_stranger(client)
            self._greeted.discard(client)
            self._port.gone(client)

    def _meet(self, client: Client) -> None:
        """One stranger more: the oldest makes room for it."""
        limits, host = self.limits, client.host
        same = self._strangers_of.get(host, {})
        if len(same) >= limits.strangers_per_address:
            self._turn_away(next(iter(same)), "strangers_per_address", limits.strangers_per_address)
        elif len(self._strangers) >= limits.strangers:
            self._turn_away(next(iter(self._strangers)), "strangers", limits.strangers)
        self._strangers[client] = None
        self._strangers_of.setdefault(host, {})[client] = None

    def _turn_away(self, client: Client, limit_name: str, limit: int) -> None:
        client.end(_overloaded(limit_name, limit))
        self._no_stranger(client)

    def _no_stranger(self, client: Client) -> None:
        if client in self._strangers:
            del self._strangers[client]
            same = self._strangers_of[client.host]
            del same[client]
            if not same:
                del self._strangers_of[client.host]


def _overloaded(limit_name: str, limit: int) -> Overloaded:
    return Overloaded(limit_name=limit_name, limit=limit, retry_after_ms=RETRY_AFTER_MS)


def _prepare(stream: trio.SocketStream, limits: ServerLimits) -> None:
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):  # Linux; elsewhere the system's own times
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limits.unacknowledged_ms)


def _remote(stream: trio.SocketStream) -> tuple[str, int]:
    """Its host and port, if the system still knows them."""
    try:
        host, port, *_ = stream.socket.getpeername()
    except OSError:
        return "unknown", 0
    return host, port
