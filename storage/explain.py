"""Why is this not being delivered now (E1)? One reason, with its facts, from the state as it stands."""

from collections.abc import Iterator

from holdfast.client.protocol.replies import Explained
from holdfast.storage import dead, groups, leases, ranges, reap, settled, unfinished
from holdfast.storage.rows import (
    CAUSES,
    REDRIVEN,
    WHYS,
    GroupRow,
    LeaseRow,
    QueueRow,
    unpack_batch,
    unpack_lease,
)
from holdfast.storage.state import View
from holdfast.storage.tables import Table, k1, k2, k3


def version_reason(view: View, queue: QueueRow, group: GroupRow, version: int) -> Explained:
    """The state of one version in one group. May look at every open lease of the group."""
    if version > queue.tail:
        return Explained(reason="not_produced")
    if group.sort_to:
        lease = _lease_of(view, group, version)  # before a purge's line is asked, which may not know it yet
        if lease is not None:
            return _leased(view, *lease)
    why = settled.why_settled(view, group, version)
    if why is not None and why != REDRIVEN:
        return _settled(view, group, version, WHYS[why])
    if version < group.start and why != REDRIVEN:
        return _settled(view, group, version, "before_start")
    waiting = groups.span_at(view, Table.WAIT, group.shelf, version)
    if waiting is not None:
        return Explained(reason="delayed", facts=(("until_ms", waiting[1]),))
    if groups.span_at(view, Table.BACK, group.shelf, version) is not None:
        return _available(view, queue, group, version)
    batch = view.batch_at(queue.q, version)
    if batch is not None and batch.due and leases.is_held(group, batch) and why is None:
        return Explained(reason="delayed", facts=(("until_ms", batch.due),))
    if batch is not None and not batch.due and version >= group.cursor and why is None:
        return _available(view, queue, group, version)
    lease = _lease_of(view, group, version)
    return _settled(view, group, version, "freed") if lease is None else _leased(view, *lease)


def group_reason(view: View, queue: QueueRow, group: GroupRow) -> Explained:
    """The first reason nothing is delivered to this group, or `empty`."""
    lowest = lowest_available(view, queue, group)
    if lowest is not None:
        return _available(view, queue, group, lowest)
    if group.in_flight:
        return _leased(view, *_first_due(view, group))
    if groups.delayed(group):
        return Explained(reason="delayed", facts=(("until_ms", _earliest(view, queue, group)),))
    return Explained(reason="empty")


def lowest_available(view: View, queue: QueueRow, group: GroupRow, batches: int | None = None) -> int | None:
    """The version that a Lease would look at first; 0 where more than so many batches lie before it."""
    back = view.txn.first(Table.BACK, k1(group.shelf), k1(group.shelf + 1))
    lowest = int.from_bytes(back[0][8:], "big") if back is not None else None
    at = max(group.cursor, group.skip_to)
    while at <= queue.tail and (lowest is None or at < lowest):
        if batches is not None:
            if not batches:
                return 0
            batches -= 1
        batch = view.next_batch(queue.q, at)
        if batch is None:
            break
        if not batch.due:
            parts = settled.unsettled(view, group, max(at, batch.first), batch.last)
            if parts:
                return parts[0][0] if lowest is None else min(lowest, parts[0][0])
        at = batch.last + 1
    return lowest


def unsettled_ranges(view: View, group: GroupRow, lo: int, hi: int) -> list[tuple[int, int]]:
    """What a group has not settled of lo … hi, redriven ones included."""
    if lo > hi:
        return []
    parts = settled.unsettled(view, group, lo, hi)
    if group.redriven:
        parts += ranges.within(view, Table.AGAIN, group.shelf, lo, hi)
    return sorted(parts)


def _settled(view: View, group: GroupRow, version: int, why: str) -> Explained:
    """What is over, or was never there: a parked death of an earlier generation comes before the latter.

    A death whose row was purged, and is not removed yet, was purged.
    """
    row = dead.read_row(view, group.grave, version) if why in ("dead", "freed", "before_start") else None
    if row is None and why == "dead":
        rows = (dead.read_row(view, grave, version) for grave in reap.purged_graves(view, group))
        why = "purged" if any(row is not None and row.g == group.g for row in rows) else why
    if row is None:
        return Explained(reason=why)
    facts = (("dead_seq", row.dead_seq + version - row.span.lo), ("cause", CAUSES[row.cause]))
    return Explained(reason="dead", facts=facts)


def _available(view: View, queue: QueueRow, group: GroupRow, version: int) -> Explained:
    policy = groups.policy(queue, group)
    group, _ = unfinished.finished(view, queue, group)
    if policy.max_in_flight is not None and group.in_flight >= policy.max_in_flight:
        return Explained(reason="in_flight_limit", facts=(("limit", policy.max_in_flight),))
    over = leases.cap_exceeded(view, group, policy)
    if over is not None and version > group.settled_top:
        return Explained(reason="hole_cap", facts=(("holes", over.holes), ("cap", over.cap)))
    return Explained(reason="available")


def _leased(view: View, lease_id: int, row: LeaseRow) -> Explained:
    consumer = row.held[0].consumer if row.held else ""
    until = row.deadline + view.meta.steps
    return Explained(reason="leased", facts=(("lease_id", lease_id), ("consumer_id", consumer), ("until_ms", until)))


def _lease_of(view: View, group: GroupRow, version: int) -> tuple[int, LeaseRow] | None:
    """The lease that holds this version."""
    for lease_id, row in _open_leases(view, group):
        if any(span.lo <= version <= span.hi for span in row.held):
            return lease_id, row
    return None


def _first_due(view: View, group: GroupRow) -> tuple[int, LeaseRow]:
    """The open lease that ends first; of those that end together the oldest."""
    first = view.txn.first(Table.LEASE_DUE, k1(group.hold), k1(group.hold + 1))
    assert first is not None
    deadline = int.from_bytes(first[0][8:16], "big")
    together = view.txn.scan(Table.LEASE_DUE, k2(group.hold, deadline), k2(group.hold, deadline + 1))
    lease_id = min(int.from_bytes(key[24:], "big") for key, _ in together)
    row = leases.read_lease(view, group, lease_id)
    assert row is not None
    return lease_id, row


def _open_leases(view: View, group: GroupRow) -> Iterator[tuple[int, LeaseRow]]:
    for key, data in view.txn.scan(Table.LEASE, k1(group.hold), k1(group.hold + 1)):
        yield int.from_bytes(key[8:], "big"), unpack_lease(data)


def _earliest(view: View, queue: QueueRow, group: GroupRow) -> int:
    """When the first delayed version of the group comes."""
    times = []
    waiting = view.txn.first(Table.WAIT_DUE, k1(group.shelf), k1(group.shelf + 1))
    if waiting is not None:
        times.append(int.from_bytes(waiting[0][8:16], "big"))
    low = k3(queue.q, group.sched_time, group.sched_version + 1)
    for key, _ in view.txn.scan(Table.SCHED, low, k1(queue.q + 1)):
        first = int.from_bytes(key[16:], "big")
        data = view.txn.get(Table.BATCH, k2(queue.q, first))
        if data is None:
            continue
        batch = unpack_batch(first, data)
        if batch.last >= group.start and not settled.all_settled(view, group, batch.first, batch.last):
            times.append(batch.due)
            break
    return min(times)
