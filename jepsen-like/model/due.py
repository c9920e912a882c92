"""What falls due in a group is folded by the next command that touches it (T3), in one fixed order.

Events are looked for anew after each one, for one may cause another: a lease that expires may leave a
delay behind that has ended by now too.
"""

from holdfast.jepsen.model import dead, history
from holdfast.jepsen.model.clock import due_of_deadline
from holdfast.jepsen.model.records import Group, OpenLease, Queue, effective
from holdfast.jepsen.model.settle import come_back, end_if_empty
from holdfast.jepsen.model.state import State

LEASE, DELAY, TTL = 0, 1, 2
Event = tuple[int, int, int, int]  # due time, kind, version, lease id


def fold(state: State, queue: Queue, group: Group) -> None:
    """Do everything that is due by now, each at its own time."""
    while events := due_events(state, group):
        due_ms, kind, lowest, lease_id = min(events)
        if kind == LEASE:
            _expire_lease(state, queue, group, group.leases[lease_id], due_ms)
            continue
        # Versions of one batch that fall due at one time by one kind do so together.
        batch = queue.batch_of(lowest)
        assert batch is not None, "an unsettled version is stored"
        versions = sorted(
            version
            for when, what, version, _ in events
            if (when, what) == (due_ms, kind) and batch.first <= version <= batch.last
        )
        if kind == DELAY:
            _end_delays(state, queue, group, versions, due_ms)
        else:
            state.fire("T3.ttl")
            dead.end_lives(state, queue, group, dict.fromkeys(versions, "expired"), due_ms)
    dead.end_old_rows(state, queue, group)
    for auto_ack in list(group.auto_acks.values()):
        if auto_ack.deadline <= state.lease_ms:
            state.fire("L6.ends")
            del group.auto_acks[auto_ack.lease_id]


def due_events(state: State, group: Group) -> list[Event]:
    events: list[Event] = []
    for lease in group.leases.values():
        if lease.deadline <= state.lease_ms:
            lowest = min(grant.first for grant in lease.grants)
            events.append((due_of_deadline(state, lease.deadline), LEASE, lowest, lease.id))
    for version, life in group.lives.items():
        if life.state == "delayed" and life.due_ms is not None and life.due_ms <= state.time_ms:
            events.append((life.due_ms, DELAY, version, 0))
        waits = life.state == "ready" or (life.state == "delayed" and not life.held)
        if waits and life.expires_ms is not None and life.expires_ms <= state.time_ms:
            events.append((life.expires_ms, TTL, version, 0))
    return events


def _expire_lease(state: State, queue: Queue, group: Group, lease: OpenLease, due_ms: int) -> None:
    state.fire("T3.expiry")
    versions = group.held_by(lease.id)
    history.record(
        state,
        queue,
        "expiry",
        versions,
        at_ms=due_ms,
        group=group.name,
        lease_id=lease.id,
        consumer_id=lease.consumer_id,
        error="lease expired",
    )
    come_back(
        state,
        queue,
        group,
        lease,
        versions,
        due_ms,
        error="lease expired",
        backs_off=effective(queue, group, "backoff_on_expiry"),
    )
    end_if_empty(group, lease)


def _end_delays(state: State, queue: Queue, group: Group, versions: list[int], due_ms: int) -> None:
    """Available now, unless the limit was lowered meanwhile (0002, 25)."""
    limit = effective(queue, group, "max_delivery_attempts")
    for version in versions:
        life = group.lives[version]
        state.fire("T3.held_delay" if life.held else "T3.nack_delay")
        life.state, life.due_ms, life.held = "ready", None, False
        if life.attempts >= limit:
            dead.end_lives(state, queue, group, {version: "max_attempts"}, due_ms)
