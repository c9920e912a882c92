"""Whether a node is alive and ready, and what its status page shows. Pure: a status in, an answer out.

Alive asks "would a restart help?", ready asks "should clients be sent here?". A `no` names every reason it has.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

from holdfast.cluster.events import Role

Json: TypeAlias = "str | int | Mapping[str, Json] | list[Json] | None"

# A turn waits for nothing but the processor and the state's pages: a loop that was away for so long will not come back.
# Fsync runs beside it, so a slow disk alone does not get a node killed.
TURN_AGE_MAX_MS = 10_000
# Applying keeps up with the log within a turn or two. A node further behind is catching up after a restart, and answers
# of its state would be old.
APPLY_LAG_MAX = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """One node of the configuration, as this one sees it; this one itself is among them, connected."""

    name: str
    address: str
    client_address: str | None
    role: Literal["voter", "learner"]
    connected: bool
    match: int | None  # how far its disk agrees with our log: known to the leader alone
    lag: int | None  # entries between that and the end of our log


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """One node at one moment. `leader` is who leads as far as this node knows; `skew_ms` is known to the leader."""

    node: str
    cluster_id: str  # empty until the cluster is formed
    role: Role
    term: int
    leader: str | None
    leader_address: str | None
    applied: int
    digest: str  # of the state at `applied`, in hexadecimal: the same on every node that has applied the same
    committed: int
    durable: int
    last: int
    time_ms: int  # committed time
    fsync: Literal["always", "os"]
    pid: int
    address: str
    members: tuple[MemberStatus, ...]
    skew_ms: Mapping[str, int]
    journal_bytes: int
    state_bytes: int
    started_ms: int  # by the wall clock
    turn_age_ms: int  # since the turn loop last came round, by the monotonic clock
    stopping: bool
    failed: str | None
    disk_free_bytes: int
    refusing_produce: bool  # the disk is nearly full: produce and stage are refused, settling goes on
    promised: int | None = None  # after a repair: the entry that a leader must have before this node counts again


def healthz(status: NodeStatus) -> tuple[int, dict[str, Json]]:
    """Alive: the turn loop ran of late, and nothing failed. 200, or 503 with the reasons."""
    return _verdict("alive", status, _dead_because(status))


def readyz(status: NodeStatus) -> tuple[int, dict[str, Json]]:
    """Ready: alive, formed, with a leader, applied nearly all that is committed, not stopping. 200 or 503."""
    reasons = _dead_because(status)
    if not status.cluster_id:
        reasons.append({"reason": "not_formed"})
    if status.leader is None:
        reasons.append({"reason": "no_leader", "term": status.term})
    lag = status.committed - status.applied
    if lag > APPLY_LAG_MAX:
        reasons.append({"reason": "applying", "lag": lag, "limit": APPLY_LAG_MAX})
    if status.promised is not None:
        reasons.append({"reason": "repaired", "promised": status.promised, "last": status.last})
    if status.stopping:
        reasons.append({"reason": "stopping"})
    return _verdict("ready", status, reasons)


def status_page(status: NodeStatus) -> dict[str, Json]:
    """All of it as JSON."""
    page: dict[str, Json] = {field.name: getattr(status, field.name) for field in fields(NodeStatus)}
    page["role"] = role_name(status.role)
    page["skew_ms"] = dict(status.skew_ms)
    page["members"] = [
        {field.name: getattr(member, field.name) for field in fields(MemberStatus)} for member in status.members
    ]
    return page


def role_name(role: Role) -> str:
    return role.name.lower()


def _dead_because(status: NodeStatus) -> list[Json]:
    reasons: list[Json] = []
    if status.failed is not None:
        reasons.append({"reason": "failed", "error": status.failed})
    if status.turn_age_ms > TURN_AGE_MAX_MS:
        reasons.append({"reason": "stalled", "turn_age_ms": status.turn_age_ms, "limit_ms": TURN_AGE_MAX_MS})
    return reasons


def _verdict(question: str, status: NodeStatus, reasons: list[Json]) -> tuple[int, dict[str, Json]]:
    # What does not make it a `no`, but an operator should see wherever he looks: the fsync mode and a full disk.
    facts: dict[str, Json] = {
        "node": status.node,
        "fsync": status.fsync,
        "refusing_produce": status.refusing_produce,
    }
    return (503 if reasons else 200), {question: not reasons, "reasons": reasons, **facts}
