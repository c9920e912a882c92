"""What a cluster is, asked node by node: each answers for itself, so that one that is down hides no other.

The deciding half of `status()`, for both shells: whom to ask, what is said on each connection, and what follows
from the answers. A node that did not answer is `down` as far as this client can tell; why stands beside it.
"""

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Literal

from holdfast.client.events import Address
from holdfast.client.nodes import PEERS_MAX
from holdfast.client.protocol import codec
from holdfast.client.protocol.errors import BadFrame, ConnectFailed, HoldfastError, ProtocolViolated
from holdfast.client.protocol.frames import FrameReader, write_frame
from holdfast.client.protocol.messages import Answered, Declined, Hello, Inquiry
from holdfast.client.protocol.queries import NodeStatus
from holdfast.client.protocol.quick import dataclass
from holdfast.client.protocol.replies import Failed, Fsync, MemberDescribed, NodeDescribed, Role

ANSWER_S = 2.0  # for each node, all asked at once: a busy one answers within it, and nobody waits long for a dead one

Heard = NodeDescribed | HoldfastError  # what came of asking one address
Rounds = Generator[list[Address], Mapping[Address, Heard], "ClusterStatus"]

_REQUEST_ID = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """One node. `lag` counts the entries that it lacks of the leader's log; none where nobody knows."""

    name: str
    pid: int | None = None
    address: Address | None  # where it serves clients
    role: Role | Literal["down"] = "down"
    applied: int | None = None
    lag: int | None = None
    fsync: Fsync | None = None
    problem: str | None = None  # why it is down, or what is odd about it


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """`leader` and `term` are the highest that anybody named together. `fsync` is the weakest of any node's."""

    leader: str | None
    term: int
    fsync: Fsync
    cluster_id: str
    nodes: list[NodeState]


def ask(addresses: Sequence[Address]) -> Rounds:
    """Yields addresses to ask, all at once, and is sent what each said.

    Raises ConnectFailed where none said anything, and what one said that answers nobody yet.

    Once a node has answered, the cluster is what its members are: an address that is silent and belongs to none of
    them is no node.
    """
    heard: dict[Address, Heard] = {}
    wanted = list(dict.fromkeys(addresses))
    while wanted:
        heard.update((yield wanted))
        known = dict.fromkeys(_members_addresses(heard.values()))
        wanted = [address for address in known if address not in heard][: PEERS_MAX - len(heard)]
    answered = [told for told in heard.values() if isinstance(told, NodeDescribed)]
    if not answered:
        refused = [told for told in heard.values() if isinstance(told, HoldfastError)]
        said = [error for error in refused if not isinstance(error, ConnectFailed)]
        raise said[0] if said else ConnectFailed(addresses=",".join(addresses))
    ours = [told for told in answered if told.cluster_id == answered[0].cluster_id]
    # An old leader that does not know of its successor yet is outvoted by the higher term; a candidate that nobody
    # hears is not, however high its own has grown.
    best = max(ours, key=lambda told: (told.leader is not None, told.term, told.role == "leader"))
    problems = {address: told for address, told in heard.items() if isinstance(told, HoldfastError)}
    nodes = {told.node: _answered(told, best) for told in ours}
    for member in best.members:
        nodes.setdefault(member.name, _down(member, best, problems))
    strangers = {told.address: _stranger(told) for told in answered if told.cluster_id != best.cluster_id}
    return ClusterStatus(
        leader=best.leader,
        term=best.term,
        fsync="os" if any(told.fsync == "os" for told in ours) else "always",
        cluster_id=best.cluster_id,
        nodes=[*sorted(nodes.values(), key=lambda node: node.name), *strangers.values()],
    )


class Exchange:
    """One connection that asks one node, without its socket: send `opening`, then feed what comes."""

    def __init__(self) -> None:
        self._reader = FrameReader()

    def opening(self) -> bytes:
        asked = (Hello(), Inquiry(request_id=_REQUEST_ID, query=NodeStatus(), stale=True))
        frames = (codec.encode_message(message) for message in asked)
        return b"".join(bytes(part) for header, body in frames for part in write_frame(header, *body))

    def feed(self, data: bytes) -> Heard | None:
        """What the node said, once it has."""
        try:
            for frame in self._reader.feed(data):
                match codec.decode_from_node(frame.header, frame.body):
                    case Answered(answer=answer) if isinstance(answer.reply, NodeDescribed):
                        return answer.reply
                    case Answered(answer=answer):
                        reply = answer.reply
                        return reply.error if isinstance(reply, Failed) else BadFrame(problem="another answer came")
                    case Declined(error=error):
                        return error
        except ProtocolViolated as error:
            return error
        return None


def unreachable(address: Address, error: Exception) -> ConnectFailed:
    """What came of asking a node, where the system said no."""
    problem = "no answer in time" if isinstance(error, TimeoutError) else getattr(error, "strerror", None)
    return ConnectFailed(problem or str(error), addresses=address)


def hung_up(address: Address) -> ConnectFailed:
    return ConnectFailed("closed the connection without an answer", addresses=address)


def with_the_silent(addresses: Sequence[Address], heard: Mapping[Address, Heard]) -> dict[Address, Heard]:
    """What was heard in time, and that of the others nothing was."""
    late = {address: ConnectFailed("no answer in time", addresses=address) for address in addresses}
    return {**late, **heard}


def _members_addresses(heard: Iterable[Heard]) -> Iterable[Address]:
    for told in heard:
        if isinstance(told, NodeDescribed):
            yield from (member.client_address for member in told.members if member.client_address)


def _answered(told: NodeDescribed, best: NodeDescribed) -> NodeState:
    lag = _lag(told.node, best)
    if lag is None and best.role == "leader":
        lag = max(best.last - told.last, 0)
    return NodeState(
        name=told.node,
        pid=told.pid,
        address=told.address,
        role=told.role,
        applied=told.applied,
        lag=lag,
        fsync=told.fsync,
    )


def _down(member: MemberDescribed, best: NodeDescribed, problems: Mapping[Address, HoldfastError]) -> NodeState:
    address = member.client_address
    problem = "its address for clients is not known" if not address else "was not asked"
    if address and address in problems:
        problem = str(problems[address])
    return NodeState(name=member.name, address=address or None, lag=_lag(member.name, best), problem=problem)


def _stranger(told: NodeDescribed) -> NodeState:
    return NodeState(
        name=told.node,
        pid=told.pid,
        address=told.address,
        role=told.role,
        applied=told.applied,
        fsync=told.fsync,
        problem=f"belongs to another cluster, {told.cluster_id}",
    )


def _lag(name: str, best: NodeDescribed) -> int | None:
    """As the leader counts it; what another believes of its peers says nothing."""
    if best.role != "leader":
        return None
    if name == best.node:
        return 0
    return next((member.lag for member in best.members if member.name == name), None)
