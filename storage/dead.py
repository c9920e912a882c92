"""Dead letters: where a version goes that a group will not deliver again (D1, D2), and how it comes back (D4).

A dead row owns a copy of its content, so that a batch can be freed around it. Rows never span two batches.
"""

from holdfast.client.protocol import columns as batches
from holdfast.client.protocol.commands import DropDead, Redrive
from holdfast.client.protocol.errors import StateBroken
from holdfast.client.protocol.replies import Purged, Redriven
from holdfast.client.protocol.values import Columns
from holdfast.storage import freeing, groups, history, produce, settled, unfinished
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

LINEAGE = "holdfast-"
ROWS_LOOKED_AT = 256  # rows that begin at or below a version, newest first, to find those that hold it

# What died: its past, why, version, batch, the batch's body, index in it, client, the client's number.
Letter = tuple[Span, Cause, int, Columns, memoryview, int, str, int]


def die(state: State, queue: QueueRow, group: GroupRow, spans: list[Span], cause: Cause, at_ms: int) -> None:
    """The group gives these neighbouring versions up, by its strategy (D1)."""
    strategy = groups.policy(queue, group).dlq_strategy
    for span in spans:
        history.record(state, queue, "dead", at_ms, span.lo, span.hi, group.name, 0, span.consumer, cause)
    failed = strategy == "move" and not _move(state, queue, group, spans, cause)
    for span in spans:
        redriven = bool(span.flags & REDRIVE)
        if strategy == "discard":
            groups.settle(state, queue, group, span.lo, span.hi, DISCARDED, redriven=redriven)
        elif strategy == "move" and not failed:
            groups.settle(state, queue, group, span.lo, span.hi, MOVED, redriven=redriven)
        else:
            for batch in list(state.batches(queue.q, span.lo, span.hi)):
                part = span.part(max(batch.first, span.lo), min(batch.last, span.hi))
                _park(state, queue, group, part, batch, cause, at_ms, failed=failed)
                groups.settle(state, queue, group, part.lo, part.hi, DEAD, redriven=redriven)


def redrive(state: State, queue: QueueRow, group: GroupRow, command: Redrive) -> Redriven:
    """Bring the named deaths back; whatever is not that death any more is skipped (D4)."""
    for other in state.groups(queue.q):
        if other.gaps_to:
            unfinished.refuse(state, other)  # it would take what is stored again for what it has not settled
    moves = groups.policy(queue, group).dlq_strategy == "move"
    asked = count = 0
    for lo, hi, dead_seq in command.dead:
        asked += hi - lo + 1
        onward: list[DeadRow] = []  # neighbours that could not be moved when they died
        for part in _take_rows(state, group, lo, hi, dead_seq):
            if onward and part.span.lo != onward[-1].span.hi + 1:
                count += _send_on(state, queue, group, onward)
                onward = []
            if moves and part.flags & DEAD_MOVE_FAILED:
                onward.append(part)
            else:
                count += _bring_back(state, queue, group, part)
        if onward:
            count += _send_on(state, queue, group, onward)
    state.touch_group(group)
    return Redriven(count=count, skipped=asked - count)


def drop(state: State, group: GroupRow, command: DropDead) -> Purged:
    """End dead rows by hand; their versions stay dead (D2)."""
    count = 0
    for lo, hi, dead_seq in command.dead:
        for part in _take_rows(state, group, lo, hi, dead_seq):
            state.drop_blob(part.blob)
            count += part.span.hi - part.span.lo + 1
    state.touch_group(group)
    return Purged(count=count)


def end_old(state: State, queue: QueueRow, group: GroupRow, budget: int) -> int:
    """Remove rows whose retention has passed; says how many."""
    retention = queue.settings.dead_retention_ms
    if retention is None or not group.parked:
        return 0
    done = 0
    while done < budget:
        before = k3(group.grave, max(state.time_ms - retention + 1, 0), 0)
        found = state.txn.first(Table.DEAD_DUE, k1(group.grave), before)
        if found is None:
            break
        data = state.txn.get(Table.DEAD, k1(group.grave) + found[0][16:])
        if data is None:
            raise StateBroken(problem=f"group {group.grave} has no dead row {found[0][16:].hex()}")
        row = unpack_dead(data)
        _remove_row(state, group, row)
        state.drop_blob(row.blob)
        done += 1
    return done


def read_row(view: View, grave: int, version: int) -> DeadRow | None:
    """The newest dead row that holds this version, of any generation of the group."""
    below = k3(grave, version + 1, 0)
    newest: DeadRow | None = None
    for _ in range(ROWS_LOOKED_AT):
        found = view.txn.last(Table.DEAD_AT, k1(grave), below)
        if found is None:
            break
        data = view.txn.get(Table.DEAD, k1(grave) + found[0][16:])
        row = unpack_dead(data) if data is not None else None
        if row is not None and row.span.hi >= version and (newest is None or row.dead_seq > newest.dead_seq):
            newest = row
        below = found[0]
    return newest


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
        body_bytes=len(part),
        client=batch.client,
        generation=batch.generation,
    )
    group.dead_seq += span.hi - span.lo + 1
    _add_row(state, group, row)


def _move(state: State, queue: QueueRow, group: GroupRow, spans: list[Span], cause: Cause) -> bool:
    """Produce copies with their lineage in the dead-letter queue, all together; false if it is full or gone."""
    letters: list[Letter] = []
    for span in spans:
        for batch in state.batches(queue.q, span.lo, span.hi):
            columns, body = state.content(queue.q, batch.first, batch.blob)
            for version in range(max(batch.first, span.lo), min(batch.last, span.hi) + 1):
                index = version - batch.first
                letters.append((span, cause, version, columns, body, index, batch.client, batch.first_seq + index))
    return _send(state, queue, group, letters)


def _send(state: State, queue: QueueRow, group: GroupRow, letters: list[Letter]) -> bool:
    target_name = groups.policy(queue, group).dlq_queue
    target_id = state.queue_id(target_name) if target_name is not None else None
    target = state.queue(target_id) if target_id is not None else None
    if target is None:
        return False
    messages = []
    for span, cause, version, columns, body, index, client, client_seq in letters:
        headers = own_headers(batches.decode_headers(batches.header_cell(columns, body, index)))
        headers |= {
            "holdfast-origin-queue": queue.name,
            "holdfast-origin-queue-id": str(queue.q),
            "holdfast-origin-version": str(version),
            "holdfast-client-id": client,
            "holdfast-client-seq": str(client_seq),
            "holdfast-reason": cause,
            "holdfast-attempts": str(span.attempts),
        }
        if span.error:
            headers["holdfast-last-error"] = span.error
        headers["holdfast-group"] = group.name
        messages.append((batches.payload_of(columns, body, index), batches.key_of(columns, body, index), headers))
    return produce.append_copies(state, target, messages, f"moved/{queue.q}") is not None


def _send_on(state: State, queue: QueueRow, group: GroupRow, rows: list[DeadRow]) -> int:
    """Dead rows whose move had failed, out of their table already, go to the dead-letter queue now; all or none."""
    letters: list[Letter] = []
    for row in rows:
        columns, body = state.content(queue.q, row.span.lo, row.blob)
        for index in range(row.span.hi - row.span.lo + 1):
            version, number = row.span.lo + index, row.first_seq + index
            letters.append((row.span, CAUSES[row.cause], version, columns, body, index, row.client, number))
    if not _send(state, queue, group, letters):
        for row in rows:
            _add_row(state, group, row)
        return 0
    for row in rows:
        state.drop_blob(row.blob)
        span = row.span
        history.record(state, queue, "redrive", state.time_ms, span.lo, span.hi, group.name, 0, "", "")
        if row.g == group.g:
            settled.change(state, group, span.lo, span.hi, MOVED)
    group.dead -= len(letters)
    group.moved += len(letters)
    return len(letters)


def _bring_back(state: State, queue: QueueRow, group: GroupRow, row: DeadRow) -> int:
    """One dead row, out of its table already, becomes available."""
    if row.g != group.g:
        return _bring_back_earlier(state, queue, group, row)
    span = row.span
    n = span.hi - span.lo + 1
    group.dead -= n
    history.record(state, queue, "redrive", state.time_ms, span.lo, span.hi, group.name, 0, "", "")
    settled.change(state, group, span.lo, span.hi, REDRIVEN)
    _store_again(state, queue, row)
    groups.make_available(state, queue, group, _redriven(span))
    return n


def _bring_back_earlier(state: State, queue: QueueRow, group: GroupRow, row: DeadRow) -> int:
    """A death of an earlier generation: only what this generation never had comes back; the rest is its own affair."""
    n = 0
    for version in range(row.span.lo, row.span.hi + 1):
        piece = _part(state, queue.q, row, version, version)
        if version < group.start:
            if settled.why_settled(state, group, version) is not None:
                _add_row(state, group, piece)
                continue
            settled.redrive_below_start(state, group, version)
        elif settled.was_freed(state, group, version):
            settled.change(state, group, version, version, REDRIVEN)
            group.freed -= 1
            group.carried -= 1
        else:
            _add_row(state, group, piece)
            continue
        n += 1
        group.dead -= 1
        history.record(state, queue, "redrive", state.time_ms, version, version, group.name, 0, "", "")
        _store_again(state, queue, piece)
        groups.make_available(state, queue, group, _redriven(piece.span))
    state.drop_blob(row.blob)
    return n


def _redriven(span: Span) -> Span:
    revived = span.part(span.lo, span.hi)
    revived.attempts = 0
    revived.redrives += 1
    revived.flags |= REDRIVE
    return revived


def _store_again(state: State, queue: QueueRow, row: DeadRow) -> None:
    """The content must be readable under its version: where the batch is gone, the dead row's copy takes its place.

    Each version is stored by itself, so that what is freed together does not depend on what died together.
    """
    for version in range(row.span.lo, row.span.hi + 1):
        if state.batch_at(queue.q, version) is not None:
            continue
        piece = _part(state, queue.q, row, version, version)
        batch = BatchRow(
            piece.span.lo,
            1,
            piece.blob,
            piece.enqueued,
            0,
            0,
            piece.first_seq,
            piece.body_bytes,
            piece.client,
            piece.generation,
        )
        freeing.restore(state, queue, batch)
    state.drop_blob(row.blob)


def _take_rows(state: State, group: GroupRow, lo: int, hi: int, dead_seq: int) -> list[DeadRow]:
    """Take out of the table what is exactly the named deaths: version lo with that number, lo + 1 with the next …"""
    found: list[DeadRow] = []
    while lo <= hi:
        row = _row_from(state, group, dead_seq)
        if row is None or row.dead_seq - dead_seq > hi - lo:
            break
        if row.dead_seq > dead_seq:
            lo, dead_seq = lo + row.dead_seq - dead_seq, row.dead_seq
        offset = dead_seq - row.dead_seq
        end = min(hi, lo + row.span.hi - row.span.lo - offset)
        if row.span.lo + offset == lo:
            found.append(_take_part(state, group, row, lo, end))
        lo, dead_seq = end + 1, dead_seq + end + 1 - lo
    return found


def _row_from(state: State, group: GroupRow, dead_seq: int) -> DeadRow | None:
    """The row of this death, or else the next one."""
    before = state.txn.last(Table.DEAD, k1(group.grave), k2(group.grave, dead_seq + 1))
    if before is not None:
        row = unpack_dead(before[1])
        if row.dead_seq + row.span.hi - row.span.lo >= dead_seq:
            return row
    following = state.txn.first(Table.DEAD, k2(group.grave, dead_seq), k1(group.grave + 1))
    return None if following is None else unpack_dead(following[1])


def _take_part(state: State, group: GroupRow, row: DeadRow, first: int, last: int) -> DeadRow:
    _remove_row(state, group, row)
    if (first, last) == (row.span.lo, row.span.hi):
        return row
    if row.span.lo < first:
        _add_row(state, group, _part(state, group.q, row, row.span.lo, first - 1))
    if row.span.hi > last:
        _add_row(state, group, _part(state, group.q, row, last + 1, row.span.hi))
    taken = _part(state, group.q, row, first, last)
    state.drop_blob(row.blob)
    return taken


def _part(state: State, q: int, row: DeadRow, lo: int, hi: int) -> DeadRow:
    """Part of a dead row, with a copy of its part of the content."""
    columns, body = state.content(q, lo, row.blob)
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
        len(part),
        row.client,
        row.generation,
    )


def _add_row(state: State, group: GroupRow, row: DeadRow) -> None:
    state.insert(Table.DEAD, k2(group.grave, row.dead_seq), row.pack())
    state.insert(Table.DEAD_AT, k3(group.grave, row.span.lo, row.dead_seq), b"")
    state.insert(Table.DEAD_DUE, k3(group.grave, row.died, row.dead_seq), b"")
    group.parked += row.span.hi - row.span.lo + 1
    state.touch_group(group)


def _remove_row(state: State, group: GroupRow, row: DeadRow) -> None:
    state.delete(Table.DEAD, k2(group.grave, row.dead_seq))
    state.delete(Table.DEAD_AT, k3(group.grave, row.span.lo, row.dead_seq))
    state.delete(Table.DEAD_DUE, k3(group.grave, row.died, row.dead_seq))
    group.parked -= row.span.hi - row.span.lo + 1
    state.touch_group(group)
