"""Handing out (L1, L3, L5, L6): the lowest available versions, within every limit."""

from holdfast.client.protocol.commands import Lease
from holdfast.client.protocol.errors import AckHoleCapExceeded, InFlightLimit, LeaseTooLong
from holdfast.client.protocol.replies import Grant, Leased
from holdfast.client.protocol.values import LeaseId
from holdfast.jepsen.model import dead, groups, history
from holdfast.jepsen.model.clock import shown_deadline
from holdfast.jepsen.model.records import AutoAck, Group, OpenLease, Queue, effective
from holdfast.jepsen.model.state import State

NOTHING = Leased(lease_id=LeaseId(0), deadline_ms=0, grants=())


def lease(state: State, session: bytes, request_seq: int, command: Lease) -> Leased:
    queue, group = state.group(command.queue_id, command.group)
    timeout_ms = command.visibility_timeout_ms or effective(queue, group, "visibility_timeout_ms")
    if timeout_ms > queue.settings.max_lease_ms:
        state.fire("L1.too_long")
        raise LeaseTooLong(timeout_ms=timeout_ms, limit=queue.settings.max_lease_ms)
    first = _first_deliverable(state, queue, group)
    if first is None:
        state.fire("L7.empty")
        return NOTHING
    room = _room(state, queue, group, session, command.auto_ack)
    last = _last_allowed(state, queue, group, first)
    taken = _take(state, queue, group, command, room, last)
    return _grant(state, queue, group, session, request_seq, command, taken, timeout_ms)


def _first_deliverable(state: State, queue: Queue, group: Group) -> int | None:
    """The lowest available version; those before it that have used up their attempts die on the way (L3)."""
    limit = effective(queue, group, "max_delivery_attempts")
    spent: list[int] = []
    first = None
    for version in group.in_state("ready"):
        if group.lives[version].attempts < limit:
            first = version
            break
        spent.append(version)
    _bury(state, queue, group, spent)
    return first


def _bury(state: State, queue: Queue, group: Group, spent: list[int]) -> None:
    """The limit was lowered after they came back: each dies by itself (0002, 29)."""
    for version in spent:
        state.fire("L3.at_hand_out")
        dead.end_lives(state, queue, group, {version: "max_attempts"}, state.time_ms)


def _room(state: State, queue: Queue, group: Group, session: bytes, auto_ack: bool) -> int | None:
    """How many messages the limits of L1 leave; none without limits. Raises InFlightLimit where one leaves nothing."""
    own = [lease for lease in group.leases.values() if lease.session == session]
    used = [
        ("max_in_flight", effective(queue, group, "max_in_flight"), len(group.in_state("leased"))),
        (
            "max_in_flight_per_session",
            queue.settings.max_in_flight_per_session,
            sum(len(group.held_by(lease.id)) for lease in own),
        ),
    ]
    if not auto_ack:
        used.append(("leases_per_session", state.limits.leases_per_session, len(own)))
    room: int | None = None
    for name, limit, count in used:
        if limit is None:
            continue
        if count >= limit:
            state.fire(f"L1.{name}")
            raise InFlightLimit(limit_name=name, limit=limit)
        if name != "leases_per_session":  # that one counts leases, not messages: it refuses, but clips nothing
            room = limit - count if room is None else min(room, limit - count)
    return room


def _last_allowed(state: State, queue: Queue, group: Group, first: int) -> int:
    """Up to where delivery may go (L5). Raises AckHoleCapExceeded where nothing below that is available."""
    holes, cap = groups.holes(queue, group), groups.cap_in_force(queue, group)
    if holes <= cap:
        return queue.tail
    highest = groups.highest_settled(group)
    if first > highest:
        state.fire("L5.cap")
        raise AckHoleCapExceeded(holes=holes, cap=cap, next_due_ms=groups.next_due_ms(state, group))
    state.fire("L5.below_highest_only")
    return highest


def _take(state: State, queue: Queue, group: Group, command: Lease, room: int | None, last: int) -> list[int]:
    """Walk from the lowest on until the lease is full, and look no further."""
    limit = effective(queue, group, "max_delivery_attempts")
    most = command.max_messages if room is None else min(command.max_messages, room)
    taken: list[int] = []
    spent: list[int] = []
    size_bytes = 0
    for version in group.in_state("ready"):
        if len(taken) == most or size_bytes > command.max_bytes or version > last:
            break
        if group.lives[version].attempts >= limit:
            spent.append(version)
            continue
        message = queue.message(version)
        assert message is not None, "an available version is stored"
        if taken and size_bytes + message.size_bytes > command.max_bytes:
            state.fire("L1.max_bytes")
            break
        size_bytes += message.size_bytes
        taken.append(version)
    if most < command.max_messages and len(taken) == most:
        state.fire("L1.clipped")
    _bury(state, queue, group, spent)
    return taken


def _grant(
    state: State,
    queue: Queue,
    group: Group,
    session: bytes,
    request_seq: int,
    command: Lease,
    taken: list[int],
    timeout_ms: int,
) -> Leased:
    lease_id = state.next_id(state.lease_ids)
    state.lease_ids.add(lease_id)
    consumer_id = state.sessions[session].consumer_id
    counts = effective(queue, group, "count")
    for version in taken:
        _deliver(state, queue, group, version, lease_id, consumer_id)
    grants = _grants(group, taken, 1 if counts == "leased" else 0)
    deadline = state.lease_ms + timeout_ms
    _record(state, queue, group, "lease", taken, lease_id, consumer_id)
    if command.auto_ack:
        state.fire("L6.auto_ack")
        _record(state, queue, group, "ack", taken, lease_id, consumer_id)
        for version in taken:
            group.lives[version].settle("acked")
        group.auto_acks[lease_id] = AutoAck(lease_id, session, request_seq, deadline, grants)
    else:
        state.fire("L1.grant")
        group.leases[lease_id] = OpenLease(lease_id, session, consumer_id, state.lease_ms, deadline, counts, grants)
    return Leased(
        lease_id=LeaseId(lease_id),
        deadline_ms=shown_deadline(state, deadline),
        group_generation=group.generation,
        counts_begun=counts == "begun",
        grants=grants,
    )


def _deliver(state: State, queue: Queue, group: Group, version: int, lease_id: int, consumer_id: str) -> None:
    life = group.lives[version]
    life.state, life.lease_id, life.ever_leased = "leased", lease_id, True
    life.delivery_count += 1
    if life.delivery_count > 1:
        state.fire("L2.redelivery")
    if life.first_delivered_ms is None:
        life.first_delivered_ms = state.time_ms
    life.last_delivered_ms = state.time_ms
    life.consumer_id = consumer_id
    batch = queue.batch_of(version)
    if batch is not None and batch.due_ms is None and not life.redriven:
        group.highest_plain = max(group.highest_plain, version)


def _grants(group: Group, taken: list[int], added: int) -> tuple[Grant, ...]:
    """Maximal runs with equal counts."""
    found: list[Grant] = []
    for version in taken:
        life = group.lives[version]
        first, counts = version, (life.delivery_count, life.attempts + added, life.redrives)
        if found and (found[-1].last, found[-1].delivery_count, found[-1].attempts, found[-1].redrives) == (
            version - 1,
            *counts,
        ):
            first = found.pop().first
        found.append(Grant(first, version, *counts))
    return tuple(found)


def _record(
    state: State, queue: Queue, group: Group, kind: str, versions: list[int], lease_id: int, consumer_id: str
) -> None:
    history.record(
        state,
        queue,
        kind,
        versions,
        at_ms=state.time_ms,
        group=group.name,
        lease_id=lease_id,
        consumer_id=consumer_id,
    )
