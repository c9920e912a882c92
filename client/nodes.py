"""The nodes as a client knows them: their addresses, the connections to them, and who is believed to lead.

A belief costs nothing when it is wrong: a node that does not lead says so. Part of the core: decides, touches nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from holdfast.client.events import Action, Address, CallId, Close, Connect, Write
from holdfast.client.protocol import codec
from holdfast.client.protocol.errors import BadValue, HoldfastError
from holdfast.client.protocol.frames import FrameReader, write_frame
from holdfast.client.protocol.messages import FromClient, Hello

WELCOME_S = 2.0  # from the wish to connect to the Welcome; longer, and the next address is tried
PONG_S = 5.0  # a connection on which nothing comes for so long after a Ping is taken for dead
PEERS_MAX = 64  # addresses remembered, given ones and those that redirects name
BACKOFF_FIRST_S = 0.01  # an election takes about a tenth of a second: a few knocks, not hundreds
BACKOFF_MAX_S = 0.5  # a client that waits for a cluster notices it within half a second


def backoff_s(setbacks: int, random: Random) -> float:
    """Doubling from the first to the longest, of which up to half is left out at random: clients do not march."""
    longest = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** min(max(setbacks, 1) - 1, 16))
    return longest * random.uniform(0.5, 1.0)


@dataclass(slots=True, eq=False)
class Link:
    """One connection. `sent` finds the call of an answer; a call of none is a probe."""

    until_s: float  # to be welcomed
    connected: bool = False
    ready: bool = False
    reader: FrameReader = field(default_factory=FrameReader)
    sent: dict[int, CallId | None] = field(default_factory=dict)
    probing: bool = False  # a probe is wanted or on its way
    heard_s: float = float("-inf")  # when it last answered as the leader
    pinged_s: float | None = None  # when it was asked whether anybody is there; any byte answers that


@dataclass(slots=True, eq=False)
class Peer:
    """An address where a node is, or was said to be."""

    failures: int = 0  # in a row, since it last answered something
    not_before_s: float = 0.0
    problem: HoldfastError | None = None  # why it let us in no more: a frame of its was bad, or it turned us away


class Nodes:
    """Adds what is to be done to the list of actions that it was given."""

    def __init__(self, addresses: Sequence[Address], random: Random) -> None:
        if not addresses:
            raise BadValue(field="addresses", problem="is empty; give at least one HOST:PORT")
        self._random = random
        self.peers = {address: Peer() for address in addresses}
        self.links: dict[Address, Link] = {}
        self.leader: Address | None = None
        self._turn = addresses[0]  # where to knock while nobody is believed to lead
        self.actions: list[Action] = []
        self._next_request = 1

    @property
    def target(self) -> Address:
        """Where a call goes now."""
        return self.leader or self._turn

    @property
    def connected(self) -> bool:
        return any(link.ready for link in self.links.values())

    def next_wake_s(self, now_s: float, waiting: bool) -> float:
        """When an unwelcoming or dumb connection is to be given up, or the target may be tried again."""
        times = [link.until_s for link in self.links.values() if not link.ready]
        times += [link.pinged_s + PONG_S for link in self.links.values() if link.pinged_s is not None]
        if waiting and self.target not in self.links:
            times.append(self.peers[self.target].not_before_s)
        return min(times, default=float("inf"))

    def next_request_id(self) -> int:
        """Different for every attempt, on whichever connection."""
        self._next_request += 1
        return self._next_request - 1

    def believe(self, leader: Address) -> None:
        if leader not in self.peers:
            if len(self.peers) >= PEERS_MAX:
                return
            self.peers[leader] = Peer()
        self.leader = leader

    def does_not_lead(self, address: Address, leader: Address | None, now_s: float) -> None:
        """The node at `address` said so, and whom it takes for the leader. What another said since is kept."""
        if leader is not None and leader != address:
            self.believe(leader)
        elif self.target == address:
            self.leader = None
            self._next_turn(address, now_s)

    def connect(self, address: Address, now_s: float) -> Link | None:
        """Ask for a connection, unless the last one failed too recently."""
        if self.peers[address].not_before_s > now_s:
            return None
        link = self.links[address] = Link(until_s=now_s + WELCOME_S)
        self.actions.append(Connect(address))
        return link

    def greet(self, address: Address) -> None:
        link = self.links.get(address)
        if link is not None and not link.connected:
            link.connected = True
            self.write(address, Hello())

    def write(self, address: Address, message: FromClient) -> None:
        """Raises Misuse for what has no form on the wire; nothing is sent then."""
        header, body = codec.encode_message(message)
        self.actions.append(Write(address, write_frame(header, *body)))

    def overdue(self, now_s: float) -> list[Address]:
        """Connections that were not welcomed in time, or from which nothing comes any more."""
        return [
            address
            for address, link in self.links.items()
            if (not link.ready and link.until_s <= now_s)
            or (link.pinged_s is not None and link.pinged_s + PONG_S <= now_s)
        ]

    def lose(self, address: Address, now_s: float, *, close: bool) -> Link | None:
        """The connection is over, or is ended. Who led there leads no more, as far as we know."""
        link = self.links.pop(address, None)
        if link is None:
            return None
        if close:
            self.actions.append(Close(address))
        peer = self.peers[address]
        peer.failures += 1
        if not link.ready or peer.failures > 1:  # one that had served is worth an immediate try
            peer.not_before_s = now_s + backoff_s(peer.failures, self._random)
        if self.leader == address:
            self.leader = None
        if self.leader is None:
            self._next_turn(address, now_s)
        return link

    def _next_turn(self, after: Address, now_s: float) -> None:
        """The next address in the round that may be tried soonest."""
        known = list(self.peers)
        at = known.index(after) + 1
        self._turn = min(known[at:] + known[:at], key=lambda other: max(self.peers[other].not_before_s, now_s))
