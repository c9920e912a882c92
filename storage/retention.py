"""How long settled messages are kept for replay, and when unsettled ones are given up (G3); readers by version."""

import struct

from holdfast.client.protocol.commands import ReportCursor
from holdfast.client.protocol.replies import Done, ReaderDescribed
from holdfast.storage import due, freeing, groups, settled
from holdfast.storage.rows import REDRIVE, WHY_NUMBER, BatchRow, GroupRow, QueueRow, Span, unpack_batch
from holdfast.storage.state import State, View
from holdfast.storage.tables import Table, after, k1, k2, text_key

TRIMMED = WHY_NUMBER["trimmed"]
BATCHES = 256  # how many batches one command looks at

_READER = struct.Struct(">QQ")


def fold(state: State, queue: QueueRow) -> None:
    """Retention's share in a command that names this queue."""
    settings = queue.settings
    if queue.kept_bytes:
        _free_kept(state, queue)
    if settings.drop_after_ms is not None or settings.drop_after_bytes is not None:
        _trim(state, queue)


def report_cursor(state: State, queue: QueueRow, command: ReportCursor) -> Done:
    version = min(command.version, queue.tail)
    state.put(Table.READER, text_key(queue.q, command.reader), _READER.pack(version, state.time_ms))
    return Done()


def readers(view: View, queue: QueueRow) -> tuple[ReaderDescribed, ...]:
    rows = []
    prefix = k1(queue.q)
    for key, data in view.txn.scan(Table.READER, prefix, after(prefix)):
        version, reported_ms = _READER.unpack(data)
        rows.append(
            ReaderDescribed(name=key[8:].decode(), version=version, lag=queue.tail - version, reported_ms=reported_ms)
        )
    return tuple(rows)


def _free_kept(state: State, queue: QueueRow) -> None:
    """Free kept batches, oldest first, that are beyond any limit that is set."""
    settings = queue.settings
    hold = _held_by_readers(state, queue)
    prefix = k1(queue.q)
    rows = []
    for key, _ in state.txn.scan(Table.KEPT, prefix, after(prefix)):
        rows.append(int.from_bytes(key[8:], "big"))
        if len(rows) == BATCHES:
            break
    for first in rows:
        data = state.txn.get(Table.BATCH, k2(queue.q, first))
        if data is None:
            continue
        batch = unpack_batch(first, data)
        old = settings.replay_ms is not None and batch.enqueued + settings.replay_ms <= state.time_ms
        much = settings.replay_bytes is not None and queue.kept_bytes > settings.replay_bytes
        if not (old or much) or batch.last > hold:
            return
        if not freeing.needed(state, queue, batch):
            freeing.free(state, queue, batch)


def _held_by_readers(view: View, queue: QueueRow) -> int:
    """The highest version that no reader still wants; a reader that was silent for too long holds nothing."""
    oldest = view.time_ms - view.limits.cursor_hold_ms
    versions = [reader.version for reader in readers(view, queue) if reader.reported_ms >= oldest]
    return min(versions, default=queue.tail)


def _trim(state: State, queue: QueueRow) -> None:
    """End unsettled messages that are too old or too many; never one that is leased or not yet due."""
    settings = queue.settings
    at = queue.low
    folded = False
    for _ in range(BATCHES):
        much = settings.drop_after_bytes is not None and queue.live_bytes > settings.drop_after_bytes
        batch = state.next_batch(queue.q, at)
        if batch is None:
            return
        old = settings.drop_after_ms is not None and batch.enqueued + settings.drop_after_ms <= state.time_ms
        if not (old or much):
            return
        if not folded:
            for group in list(state.groups(queue.q)):
                due.fold(state, queue, group)
            folded = True
            at = queue.low
            continue
        for group in state.groups(queue.q):
            _trim_batch(state, queue, group, batch)
        at = batch.last + 1


def _trim_batch(state: State, queue: QueueRow, group: GroupRow, batch: BatchRow) -> None:
    lo, hi = max(batch.first, group.start), batch.last
    if lo > hi:
        return
    spans = [*groups.take_back(state, group, lo, hi), *groups.take_waiting(state, group, lo, hi)]
    if not batch.due:
        for part_lo, part_hi in settled.unsettled(state, group, max(lo, group.cursor), hi):
            spans.append(Span(part_lo, part_hi))
    for span in sorted(spans, key=lambda span: span.lo):
        groups.settle(state, queue, group, span.lo, span.hi, TRIMMED, redriven=bool(span.flags & REDRIVE))
