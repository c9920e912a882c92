"""Connections between clients and nodes: the node's real `Connection` at one end, a client's real core at the other.

Bytes arrive in order and late. A node that died resets its connections or just falls silent; one that is cut off keeps
them open and hears nothing, until either end finds out.
"""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Protocol

from holdfast.client.protocol.errors import HoldfastError
from holdfast.client.protocol.replies import Answer
from holdfast.cluster.connection import Asked, Connection, Greeting
from holdfast.jepsen.simulation.scheduler import Scheduler

if TYPE_CHECKING:
    from holdfast.jepsen.simulation.host import HostedLog


class Caller(Protocol):
    """A client's end."""

    def connected(self, wire: "Wire") -> None: ...
    def received(self, wire: "Wire", data: bytes) -> None: ...
    def disconnected(self, wire: "Wire") -> None: ...


class Wire:
    """One connection of one client to one node."""

    def __init__(self, wires: "Wires", caller: Caller, node: "HostedLog") -> None:
        self._wires, self._caller, self.node = wires, caller, node
        self.server: Connection | None = None  # while the node holds its end
        self._client_open = True
        self._arrivals_s = [0.0, 0.0]  # of what was sent last: to the node, to the client

    # The client's side

    def dial(self) -> None:
        self._to_node(self._accept)

    def write(self, data: bytes) -> None:
        self._to_node(partial(self._fed, data))

    def close(self) -> None:
        """The client drops it; the node finds out."""
        self._client_open = False
        self._to_node(self._lost)

    # The node's side

    def finish(self, request_id: int, outcome: Answer | HoldfastError) -> None:
        if self.server is None:
            return
        if isinstance(outcome, Answer):
            self.server.answer(request_id, outcome)
        else:
            self.server.decline(request_id, outcome)
        self._flush(self.server)

    def _accept(self) -> None:
        host = self.node.host
        if not host.up:
            self._to_client(self._end)
            return
        self.server = Connection(lambda: Greeting("simulated", host.name))
        self.node.wires[self] = None
        self._to_client(lambda: self._caller.connected(self))

    def _fed(self, data: bytes) -> None:
        server = self.server
        if server is None:
            self._to_client(self._end)  # as a reset answers what comes to a connection that nobody knows
            return
        for asked, size_bytes in server.feed(data):
            self.node.ask(self, asked, size_bytes)
        self._flush(server)

    def _flush(self, server: Connection) -> None:
        data = b"".join(server.take())
        if data:
            self._to_client(lambda: self._caller.received(self, data))

    def _lost(self) -> None:
        if self.server is not None:
            self.node.gone(self, self.server)
            self.server = None

    def reset(self) -> None:
        """Both ends learn that it is over, each at its own time."""
        self._wires.scheduler.after(0.01 * self._wires.rng.random(), lambda: self.node.host.run(self._lost))
        self._wires.scheduler.after(0.01 * self._wires.rng.random(), self._end)

    def died(self, delay_s: float | None) -> None:
        """The node is gone; the client hears of it after this long, or when it next writes there."""
        self.server = None
        if delay_s is not None:
            self._wires.scheduler.after(delay_s, self._end)

    def _end(self) -> None:
        if self._client_open:
            self._client_open = False
            self._caller.disconnected(self)

    # Both ways

    def _to_node(self, action: Callable[[], None]) -> None:
        self._send(0, lambda: self.node.host.run(action) if self.node.host.up else action())

    def _to_client(self, action: Callable[[], None]) -> None:
        self._send(1, lambda: action() if self._client_open else None)

    def _send(self, way: int, action: Callable[[], None]) -> None:
        """In order, after a while; not at all while the node is cut off from its clients, at either end of the way."""
        wires, name = self._wires, self.node.host.name
        if name in wires.cut:
            return
        now_s = wires.scheduler.now_s
        arrival_s = max(now_s + 0.0002 + 0.002 * wires.rng.random(), self._arrivals_s[way])
        self._arrivals_s[way] = arrival_s
        wires.scheduler.at(arrival_s, lambda: action() if name not in wires.cut else None)


class Wires:
    """All of them. `cut` are the nodes that no client reaches now."""

    def __init__(self, scheduler: Scheduler, rng: Random) -> None:
        self.scheduler, self.rng = scheduler, rng
        self.cut: set[str] = set()

    def cut_off(self, node: "HostedLog") -> None:
        self.cut.add(node.host.name)

    def heal(self, nodes: "list[HostedLog]") -> None:
        """What was swallowed is not sent again: connections that lived through a cut end with it."""
        for node in nodes:
            if node.host.name in self.cut:
                for wire in list(node.wires):
                    wire.reset()
        self.cut.clear()


AskedBy = tuple[Wire, Asked]
