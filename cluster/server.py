"""Clients on trio: one listener, two tasks for each connection, deadlines for those that are slow or gone.

Decides nothing: what a frame means is `connection.py`, what becomes of a request is the replica's. `Port.ask` and
`Port.gone` are called synchronously, so that all requests that have come by the same look at the sockets are there
when the next turn begins, and become one entry.
"""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import trio

from holdfast.client.protocol.errors import HoldfastError, Overloaded
from holdfast.client.protocol.frames import Buffer
from holdfast.client.protocol.replies import Answer
from holdfast.cluster.connection import RETRY_AFTER_MS, Asked, Connection, Greeting

RECEIVE_BYTES = 262_144
JOIN_BYTES = 65_536  # smaller buffers leave in one write


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    connections: int = 1_024
    hello_s: float = 10.0
    send_s: float = 30.0  # for one write of answers: a client that takes longer is gone or will not catch up
    idle_s: float = 900.0  # without a request open and without a byte
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

    def __init__(self, core: Connection) -> None:
        self.core = core
        self._work = trio.Event()
        self._scope = trio.CancelScope()
        self._rest: list[Buffer] = []  # taken out, and not written yet
        self._busy = True  # the writer writes, or there is no connection yet
        self._descriptor = -1
        self._heard_s = 0.0

    def finish(self, request_id: int, outcome: Answer | HoldfastError) -> None:
        """What became of a request; sent as soon as the client takes it."""
        self.put(request_id, outcome)
        self.wake()

    def put(self, request_id: int, outcome: Answer | HoldfastError) -> None:
        """The same for one of many: they leave together with the next `flush`."""
        if isinstance(outcome, Answer):
            self.core.answer(request_id, outcome)
        else:
            self.core.decline(request_id, outcome)

    def flush(self) -> None:
        """Send what there is at once, as far as the system takes it; the writer has the rest.

        A task for it would cost more than the answer, and a round of the loop: it would leave that much later.
        """
        if self._busy:
            self.wake()
            return
        pieces = _pieces(self.core.take())
        for at, piece in enumerate(pieces):
            try:
                sent = os.write(self._descriptor, piece)
            except BlockingIOError:
                sent = 0
            except OSError:
                self._scope.cancel()
                return
            if sent < len(piece):
                self._rest = [memoryview(piece)[sent:], *pieces[at + 1 :]]
                self._busy = True
                break
        if self._busy or self.core.closing:
            self.wake()

    def wake(self) -> None:
        self._work.set()
        if self.core.is_slow:
            self._scope.cancel()

    async def run(self, stream: trio.SocketStream, port: Port, limits: ServerLimits) -> None:
        self._descriptor = stream.socket.fileno()
        self._busy = False
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write, stream, limits, nursery.cancel_scope)
                    await self._read(port, limits)
                    self.wake()  # what is unsent may still go out, then the writer ends the connection
        finally:
            self._busy = True  # the number will soon be another connection's: an answer that comes late stays here

    async def _read(self, port: Port, limits: ServerLimits) -> None:
        hello_by = trio.current_time() + limits.hello_s
        self._heard_s = trio.current_time()
        while not self.core.closing:
            greeted = self.core.greeted
            # One scope for many pieces: to make one costs as much as to read a small request.
            with trio.move_on_at(self._heard_s + limits.idle_s if greeted else hello_by) as waited:
                await self._receive(port, greeted)
            if waited.cancelled_caught:
                if greeted and self.core.open_requests:
                    self._heard_s = trio.current_time()
                elif not greeted or self._heard_s + limits.idle_s <= trio.current_time():
                    self._scope.cancel()
                    return

    async def _receive(self, port: Port, greeted: bool) -> None:
        """Until the connection is over, or the client has said hello."""
        while not self.core.closing and self.core.greeted == greeted:
            await trio.lowlevel.wait_readable(self._descriptor)
            try:
                data = os.read(self._descriptor, RECEIVE_BYTES)
            except BlockingIOError:
                continue
            if not data:
                self._scope.cancel()
                return
            self._heard_s = trio.current_time()
            for asked, size_bytes in self.core.feed(data):
                port.ask(self, asked, size_bytes)
            if self.core.has_unsent:
                self.flush()

    async def _write(self, stream: trio.SocketStream, limits: ServerLimits, connection: trio.CancelScope) -> None:
        while True:
            await self._work.wait()
            self._work = trio.Event()
            while self._rest or self.core.has_unsent:
                pieces, self._rest = self._rest or _pieces(self.core.take()), []
                self._busy = True
                for piece in pieces:
                    with trio.fail_after(limits.send_s):
                        await stream.send_all(piece)
            self._busy = False
            if self.core.closing:
                connection.cancel()


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
    """All connections of clients to one node."""

    def __init__(
        self,
        port: Port,
        greeting: Greeting,
        rejected: Callable[[str, Overloaded], None],
        limits: ServerLimits = _LIMITS,
    ) -> None:
        """`rejected` hears of connections that were not taken: from where, and why."""
        self._port, self._greeting, self._rejected, self._limits = port, greeting, rejected, limits
        self._open: set[Client] = set()

    @property
    def count(self) -> int:
        return len(self._open)

    async def serve(self, listeners: list[trio.SocketListener]) -> None:
        """Until cancelled; then every connection is closed."""
        await trio.serve_listeners(self._handle, listeners)

    async def _handle(self, stream: trio.SocketStream) -> None:
        limits = self._limits
        if self.count >= limits.connections:
            error = Overloaded(limit_name="connections", limit=limits.connections, retry_after_ms=RETRY_AFTER_MS)
            self._rejected(_remote(stream), error)
            await trio.aclose_forcefully(stream)
            return
        client = Client(Connection(self._greeting))
        self._open.add(client)
        try:
            _prepare(stream, limits)
            await client.run(stream, self._port, limits)
        except* (OSError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            pass  # the client is gone; its requests are abandoned below
        finally:
            self._open.discard(client)
            self._port.gone(client)
            await trio.aclose_forcefully(stream)


def _prepare(stream: trio.SocketStream, limits: ServerLimits) -> None:
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):  # Linux; elsewhere the system's own times
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limits.unacknowledged_ms)


def _remote(stream: trio.SocketStream) -> str:
    try:
        host, port, *_ = stream.socket.getpeername()
    except OSError:
        return "unknown"
    return f"{host}:{port}"
