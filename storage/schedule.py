"""Cancel and reschedule (P6): versions that no group has leased or settled yet."""

from collections.abc import Callable
from functools import partial

from holdfast.client.protocol import columns as batches
from holdfast.client.protocol.commands import Cancel, Range, Reschedule
from holdfast.client.protocol.replies import VersionOutcome, VersionsChanged
from holdfast.client.protocol.values import Columns
from holdfast.storage import freeing, groups, leases, settled
from holdfast.storage.rows import REDRIVE, WHY_NUMBER, BatchRow, GroupRow, QueueRow
from holdfast.storage.state import State, content_hash

CANCELLED = WHY_NUMBER["cancelled"]
OK, TOO_LATE, NOT_FOUND = "ok", "too_late", "not_found"

Run = tuple[int, int, str, str]  # first, last, outcome, group


def cancel(state: State, queue: QueueRow, command: Cancel) -> VersionsChanged:
    return _each(state, queue, command.versions, _cancel)


def reschedule(state: State, queue: QueueRow, command: Reschedule) -> VersionsChanged:
    asked = command.not_before_ms if command.delay_ms is None else state.time_ms + command.delay_ms
    due = max(asked or 0, state.time_ms + 1)
    return _each(state, queue, command.versions, partial(_move, due=due))


def _each(
    state: State,
    queue: QueueRow,
    versions: tuple[Range, ...],
    change: Callable[[State, QueueRow, BatchRow, list[Range]], None],
) -> VersionsChanged:
    """Judge all ranges, then change what nobody has touched, each batch once; storage that nobody needs goes."""
    outcomes: list[VersionOutcome] = []
    cuts: dict[int, tuple[BatchRow, list[Range]]] = {}
    for wanted in versions:
        for lo, hi, outcome, group in _judge(state, queue, wanted):
            outcomes.append(VersionOutcome(lo, hi, outcome, group))
            if outcome == OK:
                for batch in state.batches(queue.q, lo, hi):
                    part = (max(lo, batch.first), min(hi, batch.last))
                    cuts.setdefault(batch.first, (batch, []))[1].append(part)
    for batch, parts in cuts.values():
        change(state, queue, batch, parts)
        freeing.release(state, queue, batch.first, batch.last)
    return VersionsChanged(outcomes=tuple(outcomes))


def _judge(state: State, queue: QueueRow, wanted: Range) -> list[Run]:
    """The outcome of each version of the range, as maximal runs."""
    runs: list[Run] = []
    at = wanted[0]
    for batch in state.batches(queue.q, *wanted):
        lo, hi = max(batch.first, wanted[0]), min(batch.last, wanted[1])
        _add(runs, at, lo - 1, NOT_FOUND, "")
        for part_lo, part_hi, group in _touched(state, queue, batch, lo, hi):
            _add(runs, part_lo, part_hi, TOO_LATE if group else OK, group)
        at = hi + 1
    _add(runs, at, wanted[1], NOT_FOUND, "")
    return runs


def _touched(state: State, queue: QueueRow, batch: BatchRow, lo: int, hi: int) -> list[tuple[int, int, str]]:
    """Parts of lo … hi with the first group that has leased or settled them, or an empty name."""
    parts = [(lo, hi, "")]
    for group in reversed(state.groups(queue.q)):
        untouched = _untouched(state, group, batch, lo, hi)
        cut: list[tuple[int, int, str]] = []
        for first, last, name in parts:
            at = first
            for free_lo, free_hi in untouched:
                if free_hi < at or free_lo > last:
                    continue
                if free_lo > at:
                    cut.append((at, free_lo - 1, group.name))
                cut.append((max(at, free_lo), min(last, free_hi), name))
                at = free_hi + 1
            if at <= last:
                cut.append((at, last, group.name))
        parts = cut
    return parts


def _untouched(state: State, group: GroupRow, batch: BatchRow, lo: int, hi: int) -> list[tuple[int, int]]:
    """The parts of lo … hi that this group has neither leased nor settled."""
    parts = []
    if lo < group.start:
        parts += settled.not_redriven(state, group, lo, min(hi, group.start - 1))
        lo = group.start
    if lo > hi:
        return parts
    if not batch.due:
        parts += settled.unsettled(state, group, max(lo, group.cursor), hi)
    elif leases.is_held(group, batch):
        parts += settled.unsettled(state, group, lo, hi)
    else:
        spans = groups.peek_back(state, group, lo, hi)
        parts += [(span.lo, span.hi) for span in spans if not span.count and not span.flags & REDRIVE]
    return parts


def _add(runs: list[Run], lo: int, hi: int, outcome: str, group: str) -> None:
    if lo > hi:
        return
    if runs and runs[-1][2:] == (outcome, group):
        runs[-1] = (runs[-1][0], hi, outcome, group)
    else:
        runs.append((lo, hi, outcome, group))


def _cancel(state: State, queue: QueueRow, batch: BatchRow, parts: list[Range]) -> None:
    """Settled in every group, and not stored any more: a group that comes later must not get it either."""
    held = {group.gid: bool(batch.due) and leases.is_held(group, batch) for group in state.groups(queue.q)}
    _cut_out(state, queue, batch, parts)
    for lo, hi in parts:
        freeing.mark_freed(state, queue, lo, hi)
        for group in state.groups(queue.q):
            first = max(lo, group.start)
            if first > hi:
                continue
            if held[group.gid]:
                group.held -= hi - first + 1
            elif batch.due:
                groups.take_back(state, group, first, hi)
            settled.add(state, group, first, hi, CANCELLED)
            settled.count(group, CANCELLED, hi - first + 1)
            state.touch_group(group)


def _move(state: State, queue: QueueRow, batch: BatchRow, parts: list[Range], due: int) -> None:
    """Give parts of a batch another due time: each becomes a batch of its own, with its TTL counted anew."""
    ttl = batch.expires - max(batch.enqueued, batch.due) if batch.expires else 0
    for (lo, hi), (columns, body) in zip(parts, _cut_out(state, queue, batch, parts), strict=True):
        moved = _piece(state, batch, lo, columns, body)
        moved.due, moved.expires = due, due + ttl if ttl else 0
        freeing.store_batch(state, queue, moved)
        for group in state.groups(queue.q):
            _hold_part(state, group, batch, lo, hi)


def _cut_out(state: State, queue: QueueRow, batch: BatchRow, parts: list[Range]) -> list[tuple[Columns, bytes]]:
    """Take parts out of a batch; what stands between them becomes batches of their own. Gives the parts' content."""
    columns, body = state.content(queue.q, batch.first, batch.blob)
    was_held = [(group, leases.is_held(group, batch)) for group in state.groups(queue.q)] if batch.due else []
    for group, held in was_held:
        if held and not settled.all_settled(state, group, batch.first, batch.last):
            leases.count_held(group, batch.first, -1)
    freeing.remove_batch(state, queue, batch)
    at = batch.first
    for lo, hi in (*parts, (batch.last + 1, batch.last + 1)):
        first, last, at = at, lo - 1, hi + 1
        if first > last:
            continue
        piece = _piece(state, batch, first, *batches.cut(columns, body, first - batch.first, last - batch.first))
        freeing.store_batch(state, queue, piece)
        for group, held in was_held:
            if not held:
                _stay_folded(state, group, piece)
            elif not settled.all_settled(state, group, first, last):
                leases.count_held(group, first, 1)
    contents = [batches.cut(columns, body, lo - batch.first, hi - batch.first) for lo, hi in parts]
    state.drop_blob(batch.blob)
    return contents


def _piece(state: State, batch: BatchRow, first: int, columns: Columns, body: bytes) -> BatchRow:
    """Part of a batch as a batch of its own, with a copy of its part of the content."""
    return BatchRow(
        first,
        columns.count,
        state.add_blob(content_hash(columns, body), columns, body),
        batch.enqueued,
        batch.due,
        batch.expires,
        batch.first_seq + first - batch.first,
        len(body),
        batch.client,
        batch.generation,
        batch.flags,
    )


def _stay_folded(state: State, group: GroupRow, piece: BatchRow) -> None:
    """A piece of a batch that was folded in this group is folded: no other batch can lie between the two."""
    if leases.is_held(group, piece):
        group.sched_version = piece.first
        state.touch_group(group)


def _hold_part(state: State, group: GroupRow, batch: BatchRow, lo: int, hi: int) -> None:
    """In this group the part is held back now, whatever it was before."""
    first = max(lo, group.start)
    if first > hi:
        return
    if not (batch.due and leases.is_held(group, batch)):
        if batch.due:
            groups.take_back(state, group, first, hi)
        group.held += hi - first + 1
    leases.count_held(group, lo, 1)
    state.touch_group(group)
