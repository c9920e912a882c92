"""How long settled messages are kept for replay, and when unsettled ones are given up (G3); readers by version."""

import struct
from itertools import islice

from holdfast.client.protocol.commands import ReportCursor
from holdfast.client.protocol.errors import LimitReached
from holdfast.client.protocol.replies import Done, ReaderDescribed
from holdfast.client.protocol.values import QueueSettings
from holdfast.storage import freeing, groups, settled
from holdfast.storage.rows import BATCH_KEPT, NEVER, REDRIVE, WHY_NUMBER, BatchRow, GroupRow, QueueRow, Span
from holdfast.storage.state import State, View
from holdfast.storage.tables import Table, after, k1, text_key

TRIMMED = WHY_NUMBER["trimmed"]

_READER = struct.Struct(">QQ")


def fold(state: State, queue: QueueRow) -> None:
    """Retention's share in a command that names this queue, after the groups that it touches were folded."""
    settings = queue.settings
    if settings.drop_after_ms is not None or settings.drop_after_bytes is not None:
        _trim(state, queue)
    if queue.kept_rows:
        free_kept(state, queue)


def report_cursor(state: State, queue: QueueRow, command: ReportCursor) -> Done:
    key = text_key(queue.q, command.reader)
    if state.txn.get(Table.READER, key) is None:
        _make_place(state, queue)
        queue.readers += 1
        state.touch_queue(queue)
    state.put(Table.READER, key, _READER.pack(command.version, state.time_ms))
    state.lowest_readers.clear()
    return Done()


def _make_place(state: State, queue: QueueRow) -> None:
    """Refuse one reader too many. Those that were silent for too long give their place when it is needed."""
    limit = state.limits.readers_per_queue
    if queue.readers < limit:
        return
    prefix = k1(queue.q)
    for key, data in list(state.txn.scan(Table.READER, prefix, after(prefix))):
        if _READER.unpack(data)[1] + state.limits.cursor_hold_ms <= state.time_ms:
            state.delete(Table.READER, key)
            queue.readers -= 1
            state.touch_queue(queue)
    if queue.readers >= limit:
        raise LimitReached(limit_name="readers_per_queue", limit=limit)


def readers(view: View, queue: QueueRow) -> tuple[ReaderDescribed, ...]:
    rows = []
    prefix = k1(queue.q)
    for key, data in view.txn.scan(Table.READER, prefix, after(prefix)):
        version, reported_ms = _READER.unpack(data)
        rows.append(
            ReaderDescribed(
                name=key[8:].decode(), version=version, lag=max(queue.tail - version, 0), reported_ms=reported_ms
            )
        )
    return tuple(rows)


def free_kept(state: State, queue: QueueRow) -> None:
    """Free batches that are kept for replay only and are beyond a limit; `replay_bytes` counts from the newest.

    What cannot be freed is passed over, a bounded number of batches a command: the next one goes on behind them.
    """
    settings = queue.settings
    passed = queue.free_passed
    found = _from(state, queue, queue.free_at)
    queue.free_at = queue.free_passed = 0
    state.touch_queue(queue)
    for batch in found:
        young = settings.replay_ms is None or batch.enqueued + settings.replay_ms > state.time_ms
        small = settings.replay_bytes is None or queue.stored_bytes - passed <= settings.replay_bytes
        if young and small and is_replay(settings):
            return
        if batch.flags & BATCH_KEPT and not freeing.needed(state, queue, batch) and not _held(state, queue, batch):
            freeing.free(state, queue, batch)
        else:
            passed += batch.body_bytes
    if len(found) == state.limits.retention_batches:
        queue.free_at, queue.free_passed = found[-1].last + 1, passed


def _from(state: State, queue: QueueRow, version: int) -> list[BatchRow]:
    """The batches that one command looks at, beginning where the last one stopped."""
    return list(islice(state.batches(queue.q, max(queue.low, version), queue.tail), state.limits.retention_batches))


def is_replay(settings: QueueSettings) -> bool:
    return settings.replay_ms is not None or settings.replay_bytes is not None


def _held(view: View, queue: QueueRow, batch: BatchRow) -> bool:
    """Whether a reader that was heard of lately has not read this yet; bounded by the batch's age."""
    hold = view.limits.cursor_hold_ms
    settings = queue.settings
    if not is_replay(settings) or batch.enqueued + (settings.replay_ms or 0) + hold <= view.time_ms:
        return False
    return _lowest_reader(view, queue) < batch.last


def _lowest_reader(view: View, queue: QueueRow) -> int:
    """How far the last of those readers has come that were heard of lately; read once, however many batches wait."""
    if not queue.readers:
        return NEVER
    hold = view.limits.cursor_hold_ms
    asked = queue.q, view.time_ms, hold
    lowest = view.lowest_readers.get(asked)
    if lowest is None:
        prefix = k1(queue.q)
        rows = (_READER.unpack(data) for _, data in view.txn.scan(Table.READER, prefix, after(prefix)))
        lowest = min((version for version, reported_ms in rows if reported_ms + hold > view.time_ms), default=NEVER)
        view.lowest_readers[asked] = lowest
    return lowest


def _trim(state: State, queue: QueueRow) -> None:
    """End available messages that are too old or too far behind; never one that is leased, delayed or redriven.

    What cannot be ended is passed over, as in `free_kept`.
    """
    settings = queue.settings
    passed = queue.trim_passed
    found = _from(state, queue, queue.trim_at)
    queue.trim_at = queue.trim_passed = 0
    state.touch_queue(queue)
    for batch in found:
        old = settings.drop_after_ms is not None and batch.enqueued + settings.drop_after_ms <= state.time_ms
        far = settings.drop_after_bytes is not None and queue.live_bytes - passed > settings.drop_after_bytes
        if not old and not far:
            return
        live = queue.live_bytes
        for group in state.groups(queue.q):
            _trim_batch(state, queue, group, batch)
        if not batch.flags & BATCH_KEPT and queue.live_bytes == live:
            passed += batch.body_bytes
    if len(found) == state.limits.retention_batches:
        queue.trim_at, queue.trim_passed = found[-1].last + 1, passed


def _trim_batch(state: State, queue: QueueRow, group: GroupRow, batch: BatchRow) -> None:
    lo, hi = max(batch.first, group.start), batch.last
    if lo > hi:
        return
    spans = [span for span in groups.peek_back(state, group, lo, hi) if not span.flags & REDRIVE]
    for span in spans:
        groups.take_back(state, group, span.lo, span.hi)
    if not batch.due:
        for part_lo, part_hi in settled.unsettled(state, group, max(lo, group.cursor), hi):
            spans.append(Span(part_lo, part_hi))
    for span in sorted(spans, key=lambda span: span.lo):
        groups.settle(state, queue, group, span.lo, span.hi, TRIMMED)
