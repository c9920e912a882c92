"""Dead letters: where a version goes that a group will not deliver again (D1, D2), and how it comes back (D4).

A dead row owns a copy of its content, so that a batch can be freed around it. Rows never span two batches.
"""

from holdfast.client.protocol import columns as batches
from holdfast.client.protocol.commands import DropDead, Redrive
from holdfast.client.protocol.replies import Redriven
from holdfast.client.protocol.values import Columns
from holdfast.storage import freeing, groups, history, produce, settled
from holdfast.storage.rows import (
    CAUSES,
    DEAD,
    DEAD_MOVE_FAILED,
    REDRIVE,
    REDRIVEN,
    WHY_NUMBER,
    BatchRow,
    Cause,
    DeadRow,
    GroupRow,
    QueueRow,
    Span,
    unpack_dead,
)
from holdfast.storage.state import State, View, content_hash
from holdfast.storage.tables import Table, k1, k2, k3

MOVED = WHY_NUMBER["moved"]
DISCARDED = WHY_NUMBER["discarded"]
PURGED = WHY_NUMBER["purged"]

LINEAGE = "holdfast-"


def die(state: State, queue: QueueRow, group: GroupRow, span: Span, cause: Cause, at_ms: int) -> None:
    """The group gives these versions up, by its strategy (D1)."""
    strategy = groups.policy(queue, group).dlq_strategy
    redriven = bool(span.flags & REDRIVE)
    history.record(state, queue, "dead", at_ms, span.lo, span.hi, group.name, 0, span.consumer, cause)
    if strategy == "discard":
        groups.settle(state, queue, group, span.lo, span.hi, DISCARDED, redriven=redriven)
        return
    for batch in list(state.batches(queue.q, span.lo, span.hi)):
        part = span.part(max(batch.first, span.lo), min(batch.last, span.hi))
        if strategy == "move" and _move(state, queue, group, part, batch, cause, at_ms):
            groups.settle(state, queue, group, part.lo, part.hi, MOVED, redriven=redriven)
        else:
            _park(state, queue, group, part, batch, cause, at_ms, failed=strategy == "move")
            groups.settle(state, queue, group, part.lo, part.hi, DEAD, redriven=redriven)


def redrive(state: State, queue: QueueRow, group: GroupRow, command: Redrive) -> Redriven:
    """Bring the named deaths back; whatever is not that death any more is skipped (D4)."""
    asked = count = 0
    for lo, hi, dead_seq in command.dead:
        asked += hi - lo + 1
        for part in _take_rows(state, group, lo, hi, dead_seq):
            count += _bring_back(state, queue, group, part)
    state.touch_group(group)
    return Redriven(count=count, skipped=asked - count)


def drop(state: State, group: GroupRow, command: DropDead) -> Redriven:
    """End dead rows by hand; their versions stay dead (D2)."""
    asked = count = 0
    for lo, hi, dead_seq in command.dead:
        asked += hi - lo + 1
        for part in _take_rows(state, group, lo, hi, dead_seq):
            state.drop_blob(part.blob)
            count += part.span.hi - part.span.lo + 1
    state.touch_group(group)
    return Redriven(count=count, skipped=asked - count)


def end_old(state: State, queue: QueueRow, group: GroupRow, budget: int) -> int:
    """Remove rows whose retention has passed; says how many."""
    retention = queue.settings.dead_retention_ms
    if retention is None or not group.dead_rows:
        return 0
    done = 0
    while done < budget:
        found = state.txn.first(Table.DEAD_DUE, k1(group.gid), k3(group.gid, max(state.time_ms - retention + 1, 0), 0))
        if found is None:
            break
        lo = int.from_bytes(found[0][16:], "big")
        row = read_row(state, group, lo)
        if row is None:
            break
        _remove_row(state, group, row)
        state.drop_blob(row.blob)
        done += 1
    return done


def purge(state: State, group: GroupRow) -> int:
    """Remove every dead row of the group, and count its versions as purged; says how many there were."""
    count = 0
    for _, data in list(state.txn.scan(Table.DEAD, k1(group.gid), k1(group.gid + 1))):
        row = unpack_dead(data)
        _remove_row(state, group, row)
        state.drop_blob(row.blob)
        count += row.span.hi - row.span.lo + 1
        if row.g == group.g:
            settled.change(state, group, row.span.lo, row.span.hi, PURGED)
    group.dead -= count
    group.purged += count
    return count


def read_row(view: View, group: GroupRow, version: int) -> DeadRow | None:
    """The dead row that holds this version, of any generation of the group."""
    found = view.txn.last(Table.DEAD, k1(group.gid), k2(group.gid, version + 1))
    if found is None:
        return None
    row = unpack_dead(found[1])
    return row if row.span.hi >= version else None


def own_headers(headers: dict[str, str]) -> dict[str, str]:
    """A message's headers without the lineage of an earlier move."""
    return {name: value for name, value in headers.items() if not name.startswith(LINEAGE)}


def _park(
    state: State,
    queue: QueueRow,
    group: GroupRow,
    span: Span,
    batch: BatchRow,
    cause: Cause,
    at_ms: int,
    *,
    failed: bool,
) -> None:
    older = read_row(state, group, span.lo)
    if older is not None:  # a row of an earlier generation whose version was walked again: the newer death counts
        for version_row in _take_rows(state, group, span.lo, span.hi, None):
            state.drop_blob(version_row.blob)
            group.carried -= version_row.span.hi - version_row.span.lo + 1
            group.dead -= version_row.span.hi - version_row.span.lo + 1
    all_columns, body = state.content(queue.q, batch.first, batch.blob)
    columns, part = batches.cut(all_columns, body, span.lo - batch.first, span.hi - batch.first)
    row = DeadRow(
        span=span,
        g=group.g,
        dead_seq=group.dead_seq + 1,
        cause=CAUSES.index(cause),
        flags=DEAD_MOVE_FAILED if failed else 0,
        died=at_ms,
        blob=state.add_blob(content_hash(columns, part), columns, part),
        enqueued=batch.enqueued,
        first_seq=batch.first_seq + span.lo - batch.first,
        payload_bytes=columns.payload_bytes,
        body_bytes=len(part),
        client=batch.client,
        generation=batch.generation,
    )
    group.dead_seq += span.hi - span.lo + 1
    _add_row(state, group, row)


def _move(
    state: State, queue: QueueRow, group: GroupRow, span: Span, batch: BatchRow, cause: Cause, at_ms: int
) -> bool:
    """Produce a copy with its lineage in the dead-letter queue; false if it is full or gone."""
    columns, body = state.content(queue.q, batch.first, batch.blob)
    first = span.lo - batch.first
    part_columns, part = batches.cut(columns, body, first, span.hi - batch.first)
    first_seq = batch.first_seq + first
    return _send(state, queue, group, span, part_columns, part, batch.client, first_seq, cause)


def _send(
    state: State,
    queue: QueueRow,
    group: GroupRow,
    span: Span,
    columns: Columns,
    body: bytes | memoryview,
    client: str,
    first_seq: int,
    cause: Cause,
) -> bool:
    target_name = groups.policy(queue, group).dlq_queue
    target_id = state.queue_id(target_name) if target_name is not None else None
    target = state.queue(target_id) if target_id is not None else None
    if target is None:
        return False
    messages = []
    for index in range(columns.count):
        headers = own_headers(batches.decode_headers(batches.header_cell(columns, body, index)))
        headers |= {
            "holdfast-origin-queue": queue.name,
            "holdfast-origin-queue-id": str(queue.q),
            "holdfast-origin-version": str(span.lo + index),
            "holdfast-client-id": client,
            "holdfast-client-seq": str(first_seq + index),
            "holdfast-reason": cause,
            "holdfast-attempts": str(span.attempts),
            "holdfast-group": group.name,
        }
        if span.error:
            headers["holdfast-last-error"] = span.error
        messages.append((batches.payload_of(columns, body, index), batches.key_of(columns, body, index), headers))
    return produce.append_copies(state, target, messages, f"moved/{queue.q}") is not None


def _bring_back(state: State, queue: QueueRow, group: GroupRow, row: DeadRow) -> int:
    """One dead row, out of its table already, becomes available (or goes on to its dead-letter queue)."""
    span = row.span
    n = span.hi - span.lo + 1
    earlier = row.g != group.g
    if row.flags & DEAD_MOVE_FAILED and groups.policy(queue, group).dlq_strategy == "move":
        columns, body = state.content(queue.q, span.lo, row.blob)
        if not _send(state, queue, group, span, columns, body, row.client, row.first_seq, CAUSES[row.cause]):
            _add_row(state, group, row)
            return 0
        state.drop_blob(row.blob)
        group.dead -= n
        if not earlier:
            settled.change(state, group, span.lo, span.hi, MOVED)
        group.moved += n
        return n
    group.dead -= n
    history.record(state, queue, "redrive", state.time_ms, span.lo, span.hi, group.name, 0, "", "")
    if earlier:
        return _bring_back_earlier(state, queue, group, row)
    settled.change(state, group, span.lo, span.hi, REDRIVEN)
    _store_again(state, queue, row)
    groups.make_available(state, queue, group, _redriven(span))
    return n


def _bring_back_earlier(state: State, queue: QueueRow, group: GroupRow, row: DeadRow) -> int:
    """A death of an earlier generation: what this generation has settled, or never had, is available again."""
    n = 0
    for version in range(row.span.lo, row.span.hi + 1):
        n += 1
        why = settled.why_settled(state, group, version)
        if version >= group.start and why is None:
            group.carried -= 1  # this generation delivers it anyway
            continue
        if version >= group.start:
            group.carried -= 1
            if why == REDRIVEN:
                continue
            if why is not None:
                settled.count(group, why, -1)
            settled.change(state, group, version, version, REDRIVEN)
        else:
            settled.add_below_start(state, group, version, REDRIVEN)
        _store_again(state, queue, _part(state, row, version, version))
        groups.make_available(state, queue, group, _redriven(row.span.part(version, version)))
    state.drop_blob(row.blob)
    return n


def _redriven(span: Span) -> Span:
    revived = span.part(span.lo, span.hi)
    revived.attempts = 0
    revived.flags |= REDRIVE
    return revived


def _store_again(state: State, queue: QueueRow, row: DeadRow) -> None:
    """The content must be readable under its version: where the batch is gone, the dead row's copy takes its place."""
    span = row.span
    if state.batch_at(queue.q, span.lo) is not None:
        state.drop_blob(row.blob)
        return
    batch = BatchRow(
        span.lo,
        span.hi - span.lo + 1,
        row.blob,
        row.enqueued,
        0,
        0,
        row.first_seq,
        row.payload_bytes,
        row.body_bytes,
        row.client,
        row.generation,
    )
    freeing.restore(state, queue, batch)


def _take_rows(state: State, group: GroupRow, lo: int, hi: int, dead_seq: int | None) -> list[DeadRow]:
    """Take the rows, or parts of rows, of lo … hi out of the table whose deaths are the named ones."""
    found = []
    row = read_row(state, group, lo)
    rows = [row] if row is not None else []
    for _, data in state.txn.scan(Table.DEAD, k2(group.gid, lo + 1), k2(group.gid, hi + 1)):
        rows.append(unpack_dead(data))
    for row in rows:
        first, last = max(row.span.lo, lo), min(row.span.hi, hi)
        if dead_seq is not None and row.dead_seq + first - row.span.lo != dead_seq + first - lo:
            continue
        _remove_row(state, group, row)
        if (first, last) == (row.span.lo, row.span.hi):
            found.append(row)
            continue
        if row.span.lo < first:
            _add_row(state, group, _part(state, row, row.span.lo, first - 1))
        if row.span.hi > last:
            _add_row(state, group, _part(state, row, last + 1, row.span.hi))
        found.append(_part(state, row, first, last))
        state.drop_blob(row.blob)
    return found


def _part(state: State, row: DeadRow, lo: int, hi: int) -> DeadRow:
    """Part of a dead row, with a copy of its part of the content."""
    columns, body = state.content(0, row.span.lo, row.blob)
    part_columns, part = batches.cut(columns, body, lo - row.span.lo, hi - row.span.lo)
    return DeadRow(
        row.span.part(lo, hi),
        row.g,
        row.dead_seq + lo - row.span.lo,
        row.cause,
        row.flags,
        row.died,
        state.add_blob(content_hash(part_columns, part), part_columns, part),
        row.enqueued,
        row.first_seq + lo - row.span.lo,
        part_columns.payload_bytes,
        len(part),
        row.client,
        row.generation,
    )


def _add_row(state: State, group: GroupRow, row: DeadRow) -> None:
    state.insert(Table.DEAD, k2(group.gid, row.span.lo), row.pack())
    state.insert(Table.DEAD_DUE, k3(group.gid, row.died, row.span.lo), b"")
    group.dead_rows += 1
    state.touch_group(group)


def _remove_row(state: State, group: GroupRow, row: DeadRow) -> None:
    state.delete(Table.DEAD, k2(group.gid, row.span.lo))
    state.delete(Table.DEAD_DUE, k3(group.gid, row.died, row.span.lo))
    group.dead_rows -= 1
    state.touch_group(group)
