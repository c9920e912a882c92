"""The one thread that owns a blocking client's sockets: performs the core's actions and reports what came of them.

Does and decides nothing. Callers hand in requests under a lock-free queue and wait on futures; only this thread
touches the core, the selector and the sockets.
"""

import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from heapq import heappop, heappush
from threading import Thread, get_ident
from typing import assert_never

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
from holdfast.client.protocol.errors import ConnectFailed
from holdfast.client.protocol.frames import Buffer
from holdfast.client.protocol.queries import LeaderQuery

RECEIVE_BYTES = 262_144  # a lease reply of a thousand small messages in one piece
BUFFERS_MAX = 64  # one sendmsg; far below IOV_MAX everywhere


class Asked(Future[Outcome]):
    """One call, and who waits for it."""

    def __init__(self, what: Command | LeaderQuery, deadline_s: float) -> None:
        super().__init__()
        self.what, self.deadline_s = what, deadline_s
        self.call: CallId | None = None
        self.is_wanted = True


class _Connection:
    def __init__(self, address: Address, sock: socket.socket) -> None:
        self.address = address
        self.sock = sock
        self.connected = False
        self.out: deque[Buffer] = deque()


class Loop:
    """Started when made. For any thread; but `drop_sockets` is for a forked child, and nothing else is there."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._inbox: deque[Asked] = deque()
        self._set: deque[tuple[float, Callable[[], None]]] = deque()  # alarms that the thread has not seen yet
        self._alarms: list[tuple[float, int, Callable[[], None]]] = []
        self._alarms_set = 0
        self._stopping = False
        self.broken: BaseException | None = None  # why nothing more can be asked
        self._wake_at_s = float("inf")
        self._todo: deque[Action] = deque()
        self._performing = False
        self._callers: dict[CallId, Asked] = {}
        self._connections: dict[Address, _Connection] = {}
        self._tries: dict[Address, int] = {}
        # One buffer for all: a new one of this size would be mapped and unmapped by the system for every answer.
        self._received = memoryview(bytearray(RECEIVE_BYTES))
        self._selector = selectors.DefaultSelector()
        self._bell, self._ringer = socket.socketpair()
        for end in (self._bell, self._ringer):
            end.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._thread = Thread(target=self._run, name="holdfast-client", daemon=True)
        self._thread.start()

    def ask(self, what: Command | LeaderQuery, deadline_s: float) -> Asked:
        """Begin a call; those of one thread go out in the order in which they are begun."""
        asked = Asked(what, deadline_s)
        self._hand_in(asked)
        return asked

    def outcome_of(self, asked: Asked) -> Outcome:
        """An Answer, or the error that says why there is none. Who is interrupted meanwhile leaves nothing behind."""
        try:
            return asked.result()
        except BaseException:
            self.abandon(asked)
            raise

    def abandon(self, asked: Asked) -> None:
        """Nobody waits for it any more: it is not sent again, and its future stays as it is."""
        asked.is_wanted = False
        self._hand_in(asked)

    def alarm(self, at_s: float, ring: Callable[[], None]) -> None:
        """Call this on the thread at that time of `time.monotonic()`, or a little later; at once where it has ended."""
        self._set.append((at_s, ring))
        self._ring()
        if self.broken is not None:
            self._ring_all()

    @property
    def cluster_id(self) -> str:
        """Of the cluster that this client last spoke to; empty before that."""
        return self._core.cluster_id

    def stop(self) -> None:
        """End all calls with what is known of them, close the sockets, and wait for the thread."""
        self._stopping = True
        self._ring()
        self._thread.join()

    def drop_sockets(self) -> None:
        """In a forked child, where the thread does not exist: close our copies, and leave the parent's alone.

        Nothing is unregistered: the selector's kernel object is shared with the parent.
        """
        for connection in self._connections.values():
            connection.sock.close()
        self._selector.close()
        self._bell.close()
        self._ringer.close()

    def _hand_in(self, asked: Asked) -> None:
        self._inbox.append(asked)
        self._ring()
        if self.broken is not None:
            self._refuse_inbox(self.broken)

    def _ring(self) -> None:
        if get_ident() == self._thread.ident:
            return  # it looks into its inbox before it waits
        with suppress(OSError):  # rung already, or over
            self._ringer.send(b"!")

    def _run(self) -> None:
        error: BaseException = _closed()
        try:
            while not self._stopping:
                self._turn()
            self._perform(self._core.close(time.monotonic()))
            while not self._core.closed:
                self._turn()
        except BaseException as problem:  # a bug of ours must not leave callers waiting for ever
            error = problem
        finally:
            self.broken = error
            for connection in list(self._connections.values()):
                self._close(connection)
            self._fail_all(error)
            self._ring_all()
            self._selector.close()
            self._bell.close()
            self._ringer.close()

    def _turn(self) -> None:
        if self._inbox or self._set:
            wait_s: float | None = 0.0
        else:
            wake_at_s = min(self._wake_at_s, self._alarms[0][0]) if self._alarms else self._wake_at_s
            wait_s = None if wake_at_s == float("inf") else max(wake_at_s - time.monotonic(), 0.0)
        for key, events in self._selector.select(wait_s):
            connection: _Connection | None = key.data
            if connection is None:
                self._bell.recv(4096)
            elif self._connections.get(connection.address) is connection:
                self._serve(connection, events)
        while self._inbox:
            self._take_in(self._inbox.popleft())
        now_s = time.monotonic()
        if now_s >= self._wake_at_s:
            self._tell(Woken())
        while self._set:
            at_s, ring = self._set.popleft()
            self._alarms_set += 1
            heappush(self._alarms, (at_s, self._alarms_set, ring))
        while self._alarms and self._alarms[0][0] <= now_s:
            heappop(self._alarms)[2]()

    def _take_in(self, asked: Asked) -> None:
        if asked.call is not None:  # its caller has gone
            self._callers.pop(asked.call, None)
            outcome = asked.result() if asked.done() and asked.exception() is None else None
            self._perform(self._core.abandon(asked.call, asked.what, outcome, time.monotonic()))
        elif not asked.is_wanted:
            pass  # gone before it was begun
        elif self._stopping:
            asked.set_exception(_closed())
        else:
            asked.call, actions = self._core.call(asked.what, time.monotonic(), deadline_s=asked.deadline_s)
            self._callers[asked.call] = asked
            self._perform(actions)

    def _tell(self, event: Event) -> None:
        self._perform(self._core.handle(event, time.monotonic()))

    def _perform(self, actions: list[Action]) -> None:
        """In the order in which the core asked, also where performing one brings about more."""
        self._todo.extend(actions)
        if self._performing:
            return
        self._performing = True
        while self._todo:
            self._do(self._todo.popleft())
        self._performing = False

    def _do(self, action: Action) -> None:
        match action:
            case Write(address=address, buffers=buffers):
                connection = self._connections.get(address)
                if connection is not None:
                    connection.out.extend(buffers)
                    self._flush(connection)
            case Finish(call=call, outcome=outcome):
                self._callers.pop(call).set_result(outcome)
            case Connect(address=address):
                self._connect(address)
            case Close(address=address):
                closing = self._connections.get(address)
                if closing is not None:
                    self._close(closing)
            case WakeAt(at_s=at_s):
                self._wake_at_s = at_s
            case unknown:
                assert_never(unknown)

    def _serve(self, connection: _Connection, events: int) -> None:
        try:
            if not connection.connected:
                problem = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if problem:
                    raise OSError(problem, os.strerror(problem))
                connection.connected = True
                self._tell(Connected(connection.address))
                self._flush(connection)
                return
            if events & selectors.EVENT_READ:
                size = connection.sock.recv_into(self._received)
                if not size:
                    raise ConnectionResetError
                self._tell(BytesReceived(connection.address, bytes(self._received[:size])))
            if events & selectors.EVENT_WRITE and self._connections.get(connection.address) is connection:
                self._flush(connection)
        except BlockingIOError:
            pass
        except OSError:
            self._lost(connection)

    def _connect(self, address: Address) -> None:
        """Names are looked up here; of several results each try takes the next."""
        tries = self._tries[address] = self._tries.get(address, -1) + 1
        try:
            found = socket.getaddrinfo(*host_and_port(address), type=socket.SOCK_STREAM)
            family, kind, protocol, _, where = found[tries % len(found)]
            sock = socket.socket(family, kind, protocol)
        except (OSError, ValueError):  # also a name that has no form
            self._tell(Disconnected(address))
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = self._connections[address] = _Connection(address, sock)
        self._selector.register(sock, selectors.EVENT_WRITE, connection)
        try:
            sock.connect(where)
        except BlockingIOError:
            pass
        except OSError:
            self._lost(connection)

    def _flush(self, connection: _Connection) -> None:
        """Send what the socket takes; what is left waits until it takes more."""
        out = connection.out
        try:
            while out and connection.connected:
                sent = connection.sock.sendmsg([out[at] for at in range(min(len(out), BUFFERS_MAX))])
                while out and sent >= len(out[0]):
                    sent -= len(out.popleft())
                if sent:
                    out[0] = memoryview(out[0])[sent:]
        except BlockingIOError:
            pass
        except OSError:
            self._lost(connection)
            return
        if connection.connected:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if out else 0)
            if self._selector.get_key(connection.sock).events != wanted:
                self._selector.modify(connection.sock, wanted, connection)

    def _lost(self, connection: _Connection) -> None:
        if self._connections.get(connection.address) is connection:
            self._close(connection)
            self._tell(Disconnected(connection.address))

    def _close(self, connection: _Connection) -> None:
        del self._connections[connection.address]
        self._selector.unregister(connection.sock)
        connection.sock.close()

    def _fail_all(self, error: BaseException) -> None:
        for asked in self._callers.values():
            asked.set_exception(error)
        self._callers.clear()
        self._refuse_inbox(error)

    def _ring_all(self) -> None:
        """There is no clock any more: whoever waits for it shall look."""
        waiting = [ring for _, _, ring in self._alarms]
        self._alarms.clear()
        while self._set:
            waiting.append(self._set.popleft()[1])
        for ring in waiting:
            ring()

    def _refuse_inbox(self, error: BaseException) -> None:
        """What was never begun; for the thread at its end, and for who asks after that."""
        with suppress(IndexError):
            while True:
                asked = self._inbox.popleft()
                if not asked.done():
                    asked.set_exception(error)


def _closed() -> ConnectFailed:
    return ConnectFailed("the client was closed", addresses="")
