"""The sockets of an async client, on anyio: performs the core's actions and reports what came of them.

Does and decides nothing. The twin of `sockets.py`, with tasks in the place of its thread: a task for each connection,
and one that is the core's clock. All of them run on one event loop, so nothing here needs a lock.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, assert_never

import anyio
from anyio.abc import SocketStream, TaskGroup

from holdfast.client import status
from holdfast.client.core import Core
from holdfast.client.events import (
    Action,
    Address,
    BytesReceived,
    CallId,
    Close,
    Connect,
    Connected,
    Disconnected,
    Event,
    Finish,
    Outcome,
    WakeAt,
    Woken,
    Write,
    host_and_port,
)
from holdfast.client.protocol.commands import Command
from holdfast.client.protocol.errors import ConnectFailed, StateBroken
from holdfast.client.protocol.frames import Buffer
from holdfast.client.protocol.queries import LeaderQuery
from holdfast.client.status import Heard

RECEIVE_BYTES = 262_144  # a lease reply of a thousand small messages in one piece

# A peer that is gone or was never there, an address that is none, a stream that our other task has closed.
_LOST = (OSError, ValueError, anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError)


class _Connection:
    def __init__(self, address: Address) -> None:
        self.address = address
        self.scope = anyio.CancelScope(shield=True)
        self.sending = anyio.CancelScope(shield=True)
        self.out: deque[Buffer] = deque()
        self.work = anyio.Event()  # there is something to send


class Asked:
    """One call, and who waits for it."""

    def __init__(self, what: Command | LeaderQuery) -> None:
        self.what = what
        self.call: CallId | None = None
        self.told = anyio.Event()
        self.outcome: Outcome | None = None


class Loop:
    """Lives in a task group of its client's. Its tasks are shielded: they end when the core has closed all."""

    def __init__(self, core: Core, group: TaskGroup) -> None:
        self._core = core
        self._group = group
        self._broken: Exception | None = None  # why nothing more can be asked
        self._failed = False
        self._wake_at_s = float("inf")
        self._sleeps_until_s = float("inf")
        self._changed = anyio.Event()  # the clock is to look again
        self._ended = anyio.Event()
        self._todo: deque[Action] = deque()
        self._performing = False
        self._callers: dict[CallId, Asked] = {}
        self._connections: dict[Address, _Connection] = {}
        group.start_soon(self._run)

    def ask(self, what: Command | LeaderQuery, deadline_s: float) -> Asked:
        """Begin a call; calls go out in the order in which they are begun."""
        if self._broken is not None:
            raise self._broken
        asked = Asked(what)
        asked.call, actions = self._core.call(what, anyio.current_time(), deadline_s=deadline_s)
        self._callers[asked.call] = asked
        self._perform(actions)
        return asked

    async def outcome_of(self, asked: Asked) -> Outcome:
        """An Answer, or the error that says why there is none. Who is cancelled meanwhile leaves nothing behind."""
        try:
            await asked.told.wait()
        except BaseException:
            self._abandon(asked)
            raise
        if asked.outcome is None:
            raise self._broken or StateBroken(problem="a call was told of nothing")
        return asked.outcome

    @property
    def cluster_id(self) -> str:
        """Of the cluster that this client last spoke to; empty before that."""
        return self._core.cluster_id

    async def stop(self) -> None:
        """End all calls with what is known of them, close the sockets, and wait for the tasks."""
        if self._broken is None:
            self._broken = ConnectFailed("the client was closed", addresses="")
            self._perform(self._core.close(anyio.current_time()))
            self._changed.set()
        with anyio.CancelScope(shield=True):
            await self._ended.wait()

    def _abandon(self, asked: Asked) -> None:
        if asked.call is not None and not self._failed:
            self._callers.pop(asked.call, None)
            self._perform(self._core.abandon(asked.call, asked.what, asked.outcome, anyio.current_time()))

    async def _run(self) -> None:
        """The core's clock."""
        with anyio.CancelScope(shield=True):
            while not self._core.closed and not self._failed:
                self._sleeps_until_s = self._wake_at_s
                with anyio.CancelScope(deadline=self._sleeps_until_s):
                    await self._changed.wait()
                self._changed = anyio.Event()
                if anyio.current_time() >= self._wake_at_s:
                    self._tell(Woken())
            self._ended.set()

    def _tell(self, event: Event) -> None:
        try:
            self._perform(self._core.handle(event, anyio.current_time()))
        except Exception as error:
            self._fail(error)

    def _perform(self, actions: list[Action]) -> None:
        """In the order in which the core asked, also where performing one brings about more."""
        self._todo.extend(actions)
        if self._performing:
            return
        self._performing = True
        while self._todo:
            self._do(self._todo.popleft())
        self._performing = False
        if self._core.closed:
            self._changed.set()

    def _do(self, action: Action) -> None:
        match action:
            case Write(address=address, buffers=buffers):
                connection = self._connections.get(address)
                if connection is not None:
                    connection.out.extend(buffers)
                    connection.work.set()
            case Finish(call=call, outcome=outcome):
                asked = self._callers.pop(call)
                asked.outcome = outcome
                asked.told.set()
            case Connect(address=address):
                connection = self._connections[address] = _Connection(address)
                self._group.start_soon(self._task, self._serve, connection)
            case Close(address=address):
                self._close(address)
            case WakeAt(at_s=at_s):
                self._wake_at_s = at_s
                if at_s < self._sleeps_until_s:
                    self._changed.set()
            case unknown:
                assert_never(unknown)

    async def _task(self, work: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        """Errors are for those who ask: no task ends the client's block with them."""
        try:
            await work(*arguments)
        except Exception as error:
            self._fail(error)

    async def _serve(self, connection: _Connection) -> None:
        """One connection from its beginning to its end, its own or the core's."""
        with connection.scope:
            try:
                stream = await anyio.connect_tcp(*host_and_port(connection.address))
            except _LOST:
                self._lost(connection)
                return
            try:
                self._tell(Connected(connection.address))
                self._group.start_soon(self._task, self._send, connection, stream)
                await self._receive(connection, stream)
            finally:
                await anyio.aclose_forcefully(stream)

    async def _receive(self, connection: _Connection, stream: SocketStream) -> None:
        while self._connections.get(connection.address) is connection:
            try:
                data = await stream.receive(RECEIVE_BYTES)
            except _LOST:
                self._lost(connection)
                return
            self._tell(BytesReceived(connection.address, data))

    async def _send(self, connection: _Connection, stream: SocketStream) -> None:
        """What the core has written, as fast as the socket takes it."""
        with connection.sending:
            while self._connections.get(connection.address) is connection:
                await connection.work.wait()
                connection.work = anyio.Event()
                data = b"".join(connection.out)
                connection.out.clear()
                try:
                    await stream.send(data)
                except _LOST:
                    self._lost(connection)

    def _lost(self, connection: _Connection) -> None:
        if self._connections.get(connection.address) is connection:
            self._close(connection.address)
            self._tell(Disconnected(connection.address))

    def _close(self, address: Address) -> None:
        connection = self._connections.pop(address, None)
        if connection is not None:
            connection.scope.cancel()
            connection.sending.cancel()

    def _fail(self, error: Exception) -> None:
        """A bug of ours must not leave callers waiting for ever."""
        if self._failed:
            return
        self._broken, self._failed = error, True
        for asked in self._callers.values():
            asked.told.set()
        self._callers.clear()
        for address in list(self._connections):
            self._close(address)
        self._changed.set()


async def ask_nodes(addresses: Sequence[Address], wait_s: float) -> dict[Address, Heard]:
    """Ask each node how it does, all at once."""
    heard: dict[Address, Heard] = {}

    async def ask(address: Address) -> None:
        heard[address] = await _ask_node(address)

    with anyio.move_on_after(wait_s):
        async with anyio.create_task_group() as group:
            for address in addresses:
                group.start_soon(ask, address)
    return status.with_the_silent(addresses, heard)


async def _ask_node(address: Address) -> Heard:
    exchange = status.Exchange()
    try:
        async with await anyio.connect_tcp(*host_and_port(address)) as stream:
            await stream.send(exchange.opening())
            while True:
                heard = exchange.feed(await stream.receive())
                if heard is not None:
                    return heard
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        return status.hung_up(address)
    except (OSError, ValueError) as error:
        return status.unreachable(address, error)
