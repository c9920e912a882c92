"""When storage ends (G3): a batch goes when every group has settled it, also behind a stuck head, or is kept.

`queue.low` is the lowest stored version; FREED holds the gaps above it, so that a group that starts later knows what
it cannot have.
"""

from collections.abc import Iterator

from holdfast.storage import settled, sums
from holdfast.storage.rows import BATCH_KEPT, BatchRow, GroupRow, QueueRow
from holdfast.storage.state import State, View
from holdfast.storage.tables import BATCH, Table, k1, k2, k3


def store_batch(state: State, queue: QueueRow, batch: BatchRow) -> None:
    """Add a batch row with its index rows and counters; the blob is there already."""
    key = k2(queue.q, batch.first)
    state.insert(BATCH, key, batch.pack())
    _count(queue, batch, 1)
    if batch.flags & BATCH_KEPT:
        queue.kept_rows += 1
        state.insert(Table.KEPT, key, b"")
    else:
        queue.live_count += batch.count
        queue.live_bytes += batch.body_bytes
    if batch.due:
        state.insert(Table.SCHED, k3(queue.q, batch.due, batch.first), k1(batch.count))
        sums.count(state, queue.q, batch.first, batch.count)
    if batch.expires:
        state.insert(Table.TTL, k3(queue.q, batch.expires, batch.first), k1(batch.count))
    state.touch_queue(queue)


def remove_batch(state: State, queue: QueueRow, batch: BatchRow) -> None:
    """Take a batch row out again, with its index rows and counters; its blob stays."""
    key = k2(queue.q, batch.first)
    state.delete(BATCH, key)
    _count(queue, batch, -1)
    if batch.flags & BATCH_KEPT:
        queue.kept_rows -= 1
        state.delete(Table.KEPT, key)
    else:
        queue.live_count -= batch.count
        queue.live_bytes -= batch.body_bytes
    if batch.due:
        state.delete(Table.SCHED, k3(queue.q, batch.due, batch.first))
        sums.count(state, queue.q, batch.first, -batch.count)
    if batch.expires:
        state.delete(Table.TTL, k3(queue.q, batch.expires, batch.first))
    state.touch_queue(queue)


def release(state: State, queue: QueueRow, lo: int, hi: int) -> None:
    """Look at the batches of lo … hi: those that no group needs any more are freed or become kept."""
    batch = state.batch_at(queue.q, lo)
    if batch is not None and batch.last >= hi:  # mostly they are of one batch, which needs no walk
        found = [batch]
    else:
        found = list(state.batches(queue.q, lo, hi))
    for batch in found:
        if not needed(state, queue, batch):
            _end(state, queue, batch)


def needed(view: View, queue: QueueRow, batch: BatchRow) -> bool:
    """Whether some group (or a replay of an auto-acked lease) still wants a message of this batch."""
    groups = view.groups(queue.q)
    if not groups:
        return True
    first, last = batch.first, batch.first + batch.count - 1
    for group in groups:
        if not settled.all_settled(view, group, first, last):
            return True
        if group.pins and _pinned(view, group, first, last):
            return True
    return False


def free(state: State, queue: QueueRow, batch: BatchRow) -> None:
    """The end of a batch: row, index rows and blob."""
    remove_batch(state, queue, batch)
    state.drop_blob(batch.blob)
    mark_freed(state, queue, batch.first, batch.last)


def restore(state: State, queue: QueueRow, batch: BatchRow) -> None:
    """Store a batch again in versions that were freed: a redriven message whose batch is gone."""
    q, first, last = queue.q, batch.first, batch.last
    if last < queue.low:
        if queue.low > last + 1:
            state.insert(Table.FREED, k2(q, last + 1), k1(queue.low - 1))
            queue.freed_rows += 1
        queue.low = first
    else:
        found = state.txn.last(Table.FREED, k1(q), k2(q, first + 1))
        if found is not None:
            lo, hi = int.from_bytes(found[0][8:], "big"), int.from_bytes(found[1], "big")
            if lo <= first <= hi:
                state.delete(Table.FREED, found[0])
                queue.freed_rows -= 1
                for part_lo, part_hi in ((lo, first - 1), (last + 1, hi)):
                    if part_lo <= part_hi:
                        state.insert(Table.FREED, k2(q, part_lo), k1(part_hi))
                        queue.freed_rows += 1
    store_batch(state, queue, batch)


def gaps(view: View, queue: QueueRow, start: int) -> Iterator[tuple[int, int]]:
    """The ranges from `start` to the tail that are not stored, ascending."""
    if start < queue.low:
        yield start, min(queue.low - 1, queue.tail)
        start = queue.low
    if queue.freed_rows:
        before = view.txn.last(Table.FREED, k1(queue.q), k2(queue.q, start))
        if before is not None:
            hi = int.from_bytes(before[1], "big")
            if hi >= start:
                yield start, hi
        for key, data in view.txn.scan(Table.FREED, k2(queue.q, start), k2(queue.q, queue.tail + 1)):
            yield int.from_bytes(key[8:], "big"), int.from_bytes(data, "big")


def pin(state: State, group: GroupRow, ranges: list[tuple[int, int]]) -> None:
    """Keep auto-acked ranges readable for a replay (L6). A generation acks no version twice: its pins never overlap."""
    for lo, hi in ranges:
        state.insert(Table.PIN, k2(group.g, lo), k1(hi))
        group.pins += 1
    state.touch_group(group)


def unpin(state: State, queue: QueueRow, group: GroupRow, ranges: list[tuple[int, int]]) -> None:
    for lo, hi in ranges:
        if state.delete(Table.PIN, k2(group.g, lo)) is not None:
            group.pins -= 1
            state.touch_group(group)
            release(state, queue, lo, hi)


def _end(state: State, queue: QueueRow, batch: BatchRow) -> None:
    settings = queue.settings
    if settings.replay_ms is None and settings.replay_bytes is None:
        free(state, queue, batch)
    elif not batch.flags & BATCH_KEPT:
        queue.live_count -= batch.count
        queue.live_bytes -= batch.body_bytes
        queue.kept_rows += 1
        batch.flags |= BATCH_KEPT
        state.put(BATCH, k2(queue.q, batch.first), batch.pack())
        state.insert(Table.KEPT, k2(queue.q, batch.first), b"")
        state.touch_queue(queue)


def _count(queue: QueueRow, batch: BatchRow, sign: int) -> None:
    queue.stored_count += sign * batch.count
    queue.stored_bytes += sign * batch.body_bytes
    if batch.due:
        queue.sched_rows += sign
        queue.sched_versions += sign * batch.count
    if batch.expires:
        queue.ttl_rows += sign


def _pinned(view: View, group: GroupRow, first: int, last: int) -> bool:
    """Whether a pin holds any of first … last. They do not overlap, so the one that begins last also ends last."""
    found = view.txn.last(Table.PIN, k1(group.g), k2(group.g, last + 1))
    return found is not None and int.from_bytes(found[1], "big") >= first


def mark_freed(state: State, queue: QueueRow, lo: int, hi: int) -> None:
    q = queue.q
    if lo == queue.low:
        queue.low = hi + 1
        if queue.freed_rows:
            data = state.delete(Table.FREED, k2(q, hi + 1))
            if data is not None:
                queue.freed_rows -= 1
                queue.low = int.from_bytes(data, "big") + 1
        return
    if queue.freed_rows:
        before = state.txn.last(Table.FREED, k1(q), k2(q, lo))
        if before is not None and int.from_bytes(before[1], "big") == lo - 1:
            lo = int.from_bytes(before[0][8:], "big")
            state.delete(Table.FREED, before[0])
            queue.freed_rows -= 1
        data = state.delete(Table.FREED, k2(q, hi + 1))
        if data is not None:
            hi = int.from_bytes(data, "big")
            queue.freed_rows -= 1
    state.insert(Table.FREED, k2(q, lo), k1(hi))
    queue.freed_rows += 1
