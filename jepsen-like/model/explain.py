"""Why a version, or anything of a group, is not being delivered now (E1)."""

from holdfast.client.protocol.replies import Explained
from holdfast.jepsen.model import groups
from holdfast.jepsen.model.clock import due_of_deadline, shown_deadline
from holdfast.jepsen.model.records import Group, Life, OpenLease, Queue, effective
from holdfast.jepsen.model.state import State


def explain(state: State, queue: Queue, group: Group, version: int | None) -> Explained:
    if version is None:
        return _explain_group(state, queue, group)
    if version > queue.tail:
        return Explained(reason="not_produced")
    life = group.lives.get(version)
    if life is not None and life.state != "freed":
        return _explain_life(state, queue, group, life)
    if any(row.version == version for row in group.dead.values()):
        # A row from before the last Seek, of a version that the group does not walk again.
        return _dead(group, version)
    if version < group.start:
        return Explained(reason="before_start")
    return Explained(reason="freed")


def _explain_group(state: State, queue: Queue, group: Group) -> Explained:
    """The first reason nothing is delivered: what is in the way of the lowest available version, else of the others."""
    available = group.in_state("ready")
    if available:
        return _available(queue, group, available[0])
    if group.leases:
        first = min(group.leases.values(), key=lambda one: (due_of_deadline(state, one.deadline), one.id))
        return _leased(state, first)
    delayed = [life.due_ms for life in group.lives.values() if life.state == "delayed" and life.due_ms is not None]
    if delayed:
        return Explained(reason="delayed", facts=(("until_ms", min(delayed)),))
    return Explained(reason="empty")


def _explain_life(state: State, queue: Queue, group: Group, life: Life) -> Explained:
    match life.state:
        case "ready":
            return _available(queue, group, life.version)
        case "delayed":
            return Explained(reason="delayed", facts=(("until_ms", life.due_ms),))
        case "leased":
            return _leased(state, group.leases[life.lease_id])
        case "dead":
            return _dead(group, life.version)
        case settled:
            return Explained(reason=settled)


def _available(queue: Queue, group: Group, version: int) -> Explained:
    limit = effective(queue, group, "max_in_flight")
    if limit is not None and len(group.in_state("leased")) >= limit:
        return Explained(reason="in_flight_limit", facts=(("limit", limit),))
    holes, cap = groups.holes(queue, group), groups.cap_in_force(queue, group)
    if holes > cap and version > groups.highest_settled(group):
        return Explained(reason="hole_cap", facts=(("holes", holes), ("cap", cap)))
    return Explained(reason="available")


def _leased(state: State, lease: OpenLease) -> Explained:
    return Explained(
        reason="leased",
        facts=(
            ("lease_id", lease.id),
            ("consumer_id", lease.consumer_id),
            ("until_ms", shown_deadline(state, lease.deadline)),
        ),
    )


def _dead(group: Group, version: int) -> Explained:
    """With the facts of its newest row, for as long as there is one."""
    rows = [row for row in group.dead.values() if row.version == version]
    newest = max(rows, key=lambda row: row.dead_seq, default=None)
    facts = () if newest is None else (("dead_seq", newest.dead_seq), ("cause", newest.reason))
    return Explained(reason="dead", facts=facts)
