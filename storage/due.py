"""What falls due in a group (T3): lease expiry, the end of a delay, TTL, in the order (due time, kind, version).

Each happens at its own due time, whoever touches the group and whenever, so the result does not depend on that.
"""

from holdfast.storage import clock, dead, groups, history, leases, settled, survivors
from holdfast.storage.effects import TouchSoon
from holdfast.storage.rows import (
    BEGUN,
    LEASE_AUTO,
    NEVER,
    REDRIVE,
    GroupRow,
    QueueRow,
    Span,
    unpack_batch,
    unpack_span,
)
from holdfast.storage.state import State, View
from holdfast.storage.tables import Table, k1, k2, k3

LEASE_EXPIRED = "lease expired"

_LEASE, _WAIT, _SCHED, _TTL = range(4)
_KINDS = (0, 1, 1, 2)  # both delays are one kind

Event = tuple[int, int, int, int, bytes]  # due time, kind, version, source, key


def fold(state: State, queue: QueueRow, group: GroupRow) -> bool:
    """Fold what is due in this group, as much as one command may; says whether more is due."""
    if not is_due(state, queue, group):
        return False
    budget = state.limits.fold_ranges
    while budget > 0:
        event = _next(state, queue, group)
        if event is None:
            dead.end_old(state, queue, group, budget)
            return False
        at_ms, _, _, source, key = event
        if source == _LEASE:
            budget -= _lease_expires(state, queue, group, key, at_ms)
        elif source == _WAIT:
            budget -= _wait_ends(state, queue, group, key, at_ms)
        elif source == _SCHED:
            budget -= _batch_due(state, queue, group, key)
        else:
            budget -= _batch_expires(state, queue, group, key, at_ms)
        state.touch_group(group)
    if _next(state, queue, group) is None:
        return False
    state.effects[TouchSoon(queue.q)] = None
    return True


def release_due(state: State, queue: QueueRow, group: GroupRow) -> None:
    """For a generation that begins: what was held back and has come due before is available at once."""
    for _ in range(state.limits.fold_ranges):
        row = _next_sched(state, queue, group)
        if row is None:
            return
        _batch_due(state, queue, group, row[0])
    state.effects[TouchSoon(queue.q)] = None


def is_due(view: View, queue: QueueRow, group: GroupRow) -> bool:
    """Cheap, and sure when it says no."""
    return (
        view.lease_time >= group.lease_due
        or view.time_ms >= group.wait_due
        or (queue.sched_rows > 0 and group.held > 0)
        or queue.ttl_rows > 0
        or (group.parked > 0 and queue.settings.dead_retention_ms is not None)
    )


def _next(state: State, queue: QueueRow, group: GroupRow) -> Event | None:
    found: list[Event] = []
    now = state.time_ms
    if state.lease_time >= group.lease_due:
        group.lease_due = NEVER
        for scope in (group.hold, group.g) if group.pins else (group.hold,):
            row = state.txn.first(Table.LEASE_DUE, k1(scope), k1(scope + 1))
            deadline = NEVER if row is None else int.from_bytes(row[0][8:16], "big")
            group.lease_due = min(group.lease_due, deadline)
            if row is not None and deadline <= state.lease_time:
                at_ms = clock.due_time(state.meta, deadline)
                found.append((at_ms, 0, int.from_bytes(row[0][16:24], "big"), _LEASE, row[0]))
    if now >= group.wait_due:
        row = state.txn.first(Table.WAIT_DUE, k1(group.shelf), k1(group.shelf + 1))
        group.wait_due = NEVER if row is None else int.from_bytes(row[0][8:16], "big")
        if row is not None and group.wait_due <= now:
            found.append((group.wait_due, 1, int.from_bytes(row[0][16:], "big"), _WAIT, row[0]))
    if queue.sched_rows:
        row = _next_sched(state, queue, group)
        if row is not None:
            found.append(_batch_event(row[0], _SCHED))
    if queue.ttl_rows:
        row = state.txn.first(Table.TTL, k3(queue.q, group.ttl_time, group.ttl_version + 1), k2(queue.q, now + 1))
        if row is not None:
            found.append(_batch_event(row[0], _TTL))
    return min(found) if found else None


def _next_sched(state: State, queue: QueueRow, group: GroupRow) -> tuple[bytes, bytes] | None:
    """The next batch whose due time has come, of those that are not folded in this group."""
    if not group.held:
        return None
    low = k3(queue.q, group.sched_time, group.sched_version + 1)
    return state.txn.first(Table.SCHED, low, k2(queue.q, state.time_ms + 1))


def _batch_event(key: bytes, source: int) -> Event:
    return (int.from_bytes(key[8:16], "big"), _KINDS[source], int.from_bytes(key[16:], "big"), source, key)


def _lease_expires(state: State, queue: QueueRow, group: GroupRow, key: bytes, at_ms: int) -> int:
    """Every unsettled version returns (S5)."""
    lease_id = int.from_bytes(key[24:], "big")
    row = leases.read_lease(state, group, lease_id)
    if row is None:
        state.delete(Table.LEASE_DUE, key)
        return 1
    if row.flags & LEASE_AUTO:
        leases.end_auto(state, queue, group, lease_id, row)
        return 1
    survivors.sort_first(state, group, lease_id, row.held)
    leases.end_lease(state, group, lease_id, row)
    n = sum(span.hi - span.lo + 1 for span in row.held)
    group.in_flight -= n
    state.add_flight(group.hold, row.session, -n, 0)
    policy = groups.policy(queue, group)
    back: list[tuple[Span, int]] = []
    for span in row.held:
        span.attempts = leases.attempts_after(row, span)
        span.flags &= ~BEGUN
        span.error = LEASE_EXPIRED
        away = 0
        if policy.backoff_on_expiry:
            away = min(policy.backoff.delay_ms(span.attempts), policy.max_nack_delay_ms)
        history.record(
            state, queue, "expiry", at_ms, span.lo, span.hi, group.name, lease_id, span.consumer, LEASE_EXPIRED
        )
        back.append((span, at_ms + away))
    groups.come_back(state, queue, group, back, at_ms=at_ms)
    return max(len(row.held), 1)


def _wait_ends(state: State, queue: QueueRow, group: GroupRow, key: bytes, at_ms: int) -> int:
    """A nack's delay is over."""
    lo = int.from_bytes(key[16:], "big")
    data = state.delete(Table.WAIT, k2(group.shelf, lo))
    state.delete(Table.WAIT_DUE, key)
    if data is None:
        return 1
    span, _ = unpack_span(data, 8)
    group.waiting -= span.hi - span.lo + 1
    if span.attempts < groups.policy(queue, group).max_delivery_attempts:
        groups.put(state, queue, group, span, at_ms, 0)
        return 1
    for version in range(span.lo, span.hi + 1):  # the limit was lowered meanwhile: each dies by itself
        groups.end(state, queue, group, [span.part(version, version)], "max_attempts", at_ms)
    return span.hi - span.lo + 1


def _batch_due(state: State, queue: QueueRow, group: GroupRow, key: bytes) -> int:
    """A delayed batch falls due in this group (P6): its unsettled versions become available."""
    first = int.from_bytes(key[16:], "big")
    group.sched_time, group.sched_version = int.from_bytes(key[8:16], "big"), first
    data = state.txn.get(Table.BATCH, k2(queue.q, first))
    if data is None or first + unpack_batch(first, data).count - 1 < group.start:
        return 1
    batch = unpack_batch(first, data)
    parts = settled.unsettled(state, group, max(batch.first, group.start), batch.last)
    for lo, hi in parts:
        group.held -= hi - lo + 1
        groups.make_available(state, queue, group, Span(lo, hi))
    if parts:
        leases.count_held(group, batch.first, -1)
    return 1


def _batch_expires(state: State, queue: QueueRow, group: GroupRow, key: bytes, at_ms: int) -> int:
    """The TTL of a batch has passed: what nobody holds expires; what is in flight is judged when it returns (P7)."""
    first = int.from_bytes(key[16:], "big")
    group.ttl_time, group.ttl_version = at_ms, first
    data = state.txn.get(Table.BATCH, k2(queue.q, first))
    if data is None:
        return 1
    batch = unpack_batch(first, data)
    lo, hi = max(batch.first, group.start), batch.last
    if lo > hi:
        return 1
    spans = [
        span
        for span in (*groups.peek_back(state, group, lo, hi), *groups.peek_waiting(state, group, lo, hi))
        if not span.flags & REDRIVE
    ]
    if not batch.due:
        for part_lo, part_hi in settled.unsettled(state, group, max(lo, group.cursor), hi):
            spans.append(Span(part_lo, part_hi))
    spans.sort(key=lambda span: span.lo)
    run: list[Span] = []
    for span in spans:
        groups.take_back(state, group, span.lo, span.hi)
        groups.take_waiting(state, group, span.lo, span.hi)
        if run and run[-1].hi + 1 != span.lo:
            groups.end(state, queue, group, run, "expired", at_ms)
            run = []
        run.append(span)
    if run:
        groups.end(state, queue, group, run, "expired", at_ms)
    return max(len(spans), 1)
