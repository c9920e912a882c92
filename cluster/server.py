"""Clients on trio: one listener, and what all connections together may have: how many, and how much of memory.

Who goes when they hold too much is `holdings.py`; one connection is `client_stream.py`. `Port.ask` and `Port.gone` are
called synchronously, so that all requests that have come by the same look at the sockets are there when the next turn
begins, and become one entry.
"""

import socket
from collections.abc import Callable, Sequence

import trio

from holdfast.client.protocol.errors import HoldfastError, Overloaded
from holdfast.cluster.accepting import accept_all
from holdfast.cluster.client_stream import Client, Port, ServerLimits
from holdfast.cluster.connection import RETRY_AFTER_MS, Greeting
from holdfast.cluster.holdings import Holdings

_LIMITS = ServerLimits()


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

    def hold_unfinished(self, client: Client, *, begun: bool) -> None:
        """The same for a frame of its that has begun: just now, if it is another one than before."""
        if client.over:
            return
        if begun:
            self._unfinished.moved(client)
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
