"""One client's connection on trio: two tasks, deadlines for one that is slow or gone, answers written at once.

Decides nothing: what a frame means is `connection.py`, how long is waited `patience.py`; what all connections together
may have is `server.py`, and what becomes of a request is the replica's.
"""

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import trio

from holdfast.client.protocol.errors import HoldfastError
from holdfast.client.protocol.frames import Buffer
from holdfast.client.protocol.replies import Answer
from holdfast.cluster.connection import Asked, Connection, Greeting
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


class Port(Protocol):
    """Who answers. Neither call waits."""

    def ask(self, client: "Client", asked: Asked, size_bytes: int) -> None:
        """A request or an inquiry; `client.finish` in this call or later. Or that one of them is withdrawn."""
        ...

    def gone(self, client: "Client") -> None:
        """The connection is over: nothing of it is waited for any more."""
        ...


class Keeper(Protocol):
    """Who keeps all of a node's connections: `Clients`."""

    limits: ServerLimits
    rejected: Callable[[str, HoldfastError], None]

    def admit(self, client: "Client") -> Greeting: ...
    def hold_unsent(self, client: "Client") -> None: ...
    def hold_unfinished(self, client: "Client", *, begun: bool) -> None: ...
    def moved(self, client: "Client") -> None: ...
    def let_go(self, client: "Client") -> None: ...


class Client:
    """One client's connection."""

    def __init__(self, clients: Keeper, host: str, port: int) -> None:
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
                self._clients.hold_unfinished(self, begun=core.unfinished != unfinished)
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
