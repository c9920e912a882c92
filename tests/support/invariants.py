"""What must be true of the tables after every entry, whatever the commands were: structure, counters, digest."""

from collections import Counter

from holdfast.storage import digest, gaps, groups, leases, ranges, reap, settled, sums, unfinished
from holdfast.storage.rows import (
    LEASE_AUTO,
    REDRIVE,
    REDRIVEN,
    WHYS,
    GroupRow,
    unpack_batch,
    unpack_dead,
    unpack_lease,
    unpack_span,
)
from holdfast.storage.state import View
from holdfast.storage.store import ReadTxn
from holdfast.storage.tables import Table, k1

ABOVE = b"\xff" * 64


def check(txn: ReadTxn) -> None:
    view = View(txn)
    assert digest.maintained(txn) == digest.recomputed(txn), "the digest does not follow the rows"
    blobs = Counter(int.from_bytes(key, "big") for key, _ in txn.scan(Table.BLOB, b"", ABOVE))
    for key, data in txn.scan(Table.QUEUE, b"", ABOVE):
        q = int.from_bytes(key, "big")
        queue = view.queue(q)
        assert queue is not None
        if queue.deleted:
            continue
        batches = [
            unpack_batch(int.from_bytes(key[8:], "big"), data) for key, data in txn.scan(Table.BATCH, k1(q), k1(q + 1))
        ]
        stored = [v for batch in batches for v in range(batch.first, batch.last + 1)]
        assert stored == sorted(set(stored)), "batches overlap"
        assert queue.low == (stored[0] if stored else queue.tail + 1), (queue.low, stored[:1], queue.tail)
        assert queue.stored_count == len(stored)
        assert queue.stored_bytes == sum(batch.body_bytes for batch in batches)
        assert queue.sched_rows == sum(1 for batch in batches if batch.due)
        assert queue.sched_versions == sum(batch.count for batch in batches if batch.due)
        for start in (queue.low, queue.low + 1, (queue.low + queue.tail) // 2, queue.tail):
            assert sums.delayed_from(view, queue, start) == sum(
                batch.last - max(batch.first, start) + 1 for batch in batches if batch.due and batch.last >= start
            ), "sums differ from the batches"
        assert queue.ttl_rows == sum(1 for batch in batches if batch.expires)
        live = [batch for batch in batches if not batch.flags]
        assert queue.live_count == sum(batch.count for batch in live)
        assert queue.live_bytes == sum(batch.body_bytes for batch in live)
        absent = set(range(queue.low, queue.tail + 1)) - set(stored)
        freed = [
            v
            for key, data in txn.scan(Table.FREED, k1(q), k1(q + 1))
            for v in range(int.from_bytes(key[8:], "big"), int.from_bytes(data, "big") + 1)
        ]
        assert freed == sorted(absent), (freed, absent)
        for batch in batches:
            assert blobs[batch.blob] == 1
        for group in view.groups(q):
            _check_group(view, q, group.name)


def _check_group(view: View, q: int, name: str) -> None:
    queue, group = view.queue(q), view.group(q, name)
    assert queue is not None and group is not None
    where: dict[int, str] = {}
    redriven: set[int] = set()

    def put(lo: int, hi: int, place: str) -> None:
        for version in range(lo, hi + 1):
            assert version not in where, f"version {version} is {where[version]} and {place}"
            where[version] = place

    for _, data in view.txn.scan(Table.BACK, k1(group.shelf), k1(group.shelf + 1)):
        span = unpack_span(data)[0]
        put(span.lo, span.hi, "ready")
        if span.flags & REDRIVE:
            redriven.update(range(span.lo, span.hi + 1))
    for _, data in view.txn.scan(Table.WAIT, k1(group.shelf), k1(group.shelf + 1)):
        span = unpack_span(data, 8)[0]
        put(span.lo, span.hi, "waiting")
        if span.flags & REDRIVE:
            redriven.update(range(span.lo, span.hi + 1))
    flights: Counter[bytes] = Counter()
    for _, data in view.txn.scan(Table.LEASE, k1(group.hold), k1(group.hold + 1)):
        row = unpack_lease(data)
        assert row.held and not row.flags & LEASE_AUTO
        for span in row.held:
            put(span.lo, span.hi, "leased")
            flights[row.session] += span.hi - span.lo + 1
            if span.flags & REDRIVE:
                redriven.update(range(span.lo, span.hi + 1))
    for key, data in view.txn.scan(Table.FLIGHT, k1(group.hold), k1(group.hold + 1)):
        assert int.from_bytes(data[:8], "big") == flights.pop(key[8:], 0)
    assert not flights
    purged_dead = {
        v
        for grave in reap.purged_graves(view, group)
        for row in (unpack_dead(data) for _, data in view.txn.scan(Table.DEAD, k1(grave), k1(grave + 1)))
        for v in range(row.span.lo, row.span.hi + 1)
        if row.g == group.g
    }
    done: dict[int, str] = {}
    rows = settled.overlapping(view, group, 1, queue.tail)
    for first, last, why in rows:
        for version in range(first, last + 1):
            assert version not in done
            done[version] = WHYS[why]
            if why != REDRIVEN:
                put(version, version, "purged" if WHYS[why] == "dead" and version in purged_dead else WHYS[why])
            elif version not in redriven:
                put(version, version, "purged")
    assert redriven <= {v for v, why in done.items() if why == "redriven"}
    assert group.done_rows == len(rows)
    _check_line(view, group, where, redriven)
    for version in range(max(group.start, group.known_from), group.line + 1):
        if version not in where:
            where[version] = done[version] = "purged"
    for lo, hi in gaps.missing(view, queue, group):
        put(lo, hi, "freed")
        done |= dict.fromkeys(range(lo, hi + 1), "freed")
    exact, lowest = unfinished.finished(view, queue, group)
    held_batches = 0
    for batch in view.batches(q, 1, queue.tail):
        if batch.due and leases.is_held(group, batch):
            parts = [v for v in range(max(batch.first, group.start), batch.last + 1) if v not in where]
            for version in parts:
                where[version] = "held"
            held_batches += bool(parts) and max(batch.first, group.start) < group.cursor
    for version in range(group.cursor, queue.tail + 1):
        stored_in = view.batch_at(q, version)
        if version not in where and stored_in is not None and not stored_in.due:
            where[version] = "ready"
    states = Counter(where.values())
    versions = range(group.start, queue.tail + 1)
    missing = [v for v in versions if v not in where and v >= group.known_from]
    assert not missing, f"versions {missing} of {name} are nowhere"
    assert states["held"] == group.held, (states, group.held)
    assert held_batches == group.held_passed
    assert states["waiting"] == group.waiting
    assert states["leased"] == group.in_flight
    for reason in ("acked", "discarded", "cancelled", "trimmed", "freed"):
        assert states[reason] == getattr(exact, reason), (name, reason, states[reason], getattr(exact, reason))
    for reason in ("dead", "moved", "purged"):  # parked rows of earlier generations have no place in this one
        outside = getattr(group, reason) - states[reason]
        assert 0 <= outside <= group.carried, (name, reason, states[reason], getattr(group, reason), group.carried)
    assert states["ready"] == groups.ready(queue, exact), (states, groups.ready(queue, exact))
    settled_or_redriven = sorted(v for v in done if v >= group.start)
    floor = group.start - 1
    while floor + 1 in done or group.start <= floor + 1 < group.known_from:
        floor += 1
    assert exact.floor == floor, (exact.floor, floor)
    assert lowest == min([floor + 1, *redriven])
    above = [v for v in settled_or_redriven if v > floor]
    assert exact.holes == sum(1 for v in above if v - 1 not in done or v - 1 <= floor), (exact.holes, above)
    assert exact.settled_top == max([group.start - 1, group.known_from - 1, *settled_or_redriven])
    for version, place in where.items():
        if place in ("ready", "waiting", "leased", "held"):
            assert view.batch_at(q, version) is not None, f"version {version} is {place} but not stored"


def _check_line(view: View, group: GroupRow, where: dict[int, str], redriven: set[int]) -> None:
    """OPEN and AGAIN, with what is not sorted in yet: what is unsettled below the line, and what is redriven (G5)."""
    plain, again = unfinished.unsorted(view, group)
    opened, reopened = (ranges.within(view, table, group.shelf, 1, 2**62) for table in (Table.OPEN, Table.AGAIN))
    assert (len(opened), len(reopened)) == (group.open_rows, group.redriven)
    assert opened == ranges.runs(opened) and reopened == ranges.runs(reopened), "runs that touch are two rows"
    unsettled = {v for v, place in where.items() if place in ("ready", "waiting", "leased") and v <= group.line}
    assert {v for lo, hi in opened + plain for v in range(lo, hi + 1)} == unsettled - redriven
    assert {v for lo, hi in reopened + again for v in range(lo, hi + 1)} == redriven
