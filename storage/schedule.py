"""Cancel and reschedule (P6): versions that no group has leased or settled yet."""

from holdfast.client.protocol import columns as batches
from holdfast.client.protocol.commands import Cancel, Range, Reschedule
from holdfast.client.protocol.replies import VersionOutcome, VersionsChanged
from holdfast.storage import freeing, groups, leases, settled
from holdfast.storage.rows import WHY_NUMBER, BatchRow, GroupRow, QueueRow
from holdfast.storage.state import State, content_hash

CANCELLED = WHY_NUMBER["cancelled"]
OK, TOO_LATE, NOT_FOUND = "ok", "too_late", "not_found"

Run = tuple[int, int, str, str]  # first, last, outcome, group


def cancel(state: State, queue: QueueRow, command: Cancel) -> VersionsChanged:
    outcomes: list[VersionOutcome] = []
    for wanted in command.versions:
        runs = _judge(state, queue, wanted)
        outcomes += [VersionOutcome(*run) for run in runs]
        for lo, hi, outcome, _ in runs:
            if outcome == OK:
                for batch in list(state.batches(queue.q, lo, hi)):
                    _cancel_part(state, queue, batch, max(lo, batch.first), min(hi, batch.last))
    return VersionsChanged(outcomes=tuple(outcomes))


def reschedule(state: State, queue: QueueRow, command: Reschedule) -> VersionsChanged:
    asked = command.not_before_ms if command.delay_ms is None else state.time_ms + command.delay_ms
    due = max(asked or 0, state.time_ms + 1)
    outcomes: list[VersionOutcome] = []
    for wanted in command.versions:
        runs = _judge(state, queue, wanted)
        outcomes += [VersionOutcome(*run) for run in runs]
        for lo, hi, outcome, _ in runs:
            if outcome == OK:
                for batch in list(state.batches(queue.q, lo, hi)):
                    _move_part(state, queue, batch, max(lo, batch.first), min(hi, batch.last), due)
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
        parts.append((lo, min(hi, group.start - 1)))
        lo = group.start
    if lo > hi:
        return parts
    if not batch.due:
        parts += settled.unsettled(state, group, max(lo, group.cursor), hi)
    elif leases.is_held(group, batch):
        parts += settled.unsettled(state, group, lo, hi)
    else:
        parts += [(span.lo, span.hi) for span in groups.peek_back(state, group, lo, hi) if not span.count]
    return parts


def _add(runs: list[Run], lo: int, hi: int, outcome: str, group: str) -> None:
    if lo > hi:
        return
    if runs and runs[-1][2:] == (outcome, group):
        runs[-1] = (runs[-1][0], hi, outcome, group)
    else:
        runs.append((lo, hi, outcome, group))


def _cancel_part(state: State, queue: QueueRow, batch: BatchRow, lo: int, hi: int) -> None:
    for group in state.groups(queue.q):
        first = max(lo, group.start)
        if first > hi:
            continue
        if batch.due:
            if leases.is_held(group, batch):
                group.held -= hi - first + 1
                settled.add(state, group, first, hi, CANCELLED)
                if settled.all_settled(state, group, batch.first, batch.last):
                    leases.count_held(group, batch.first, -1)
            else:
                groups.take_back(state, group, first, hi)
                settled.add(state, group, first, hi, CANCELLED)
        else:
            settled.add(state, group, first, hi, CANCELLED)
        settled.count(group, CANCELLED, hi - first + 1)
        state.touch_group(group)
    freeing.release(state, queue, lo, hi)


def _move_part(state: State, queue: QueueRow, batch: BatchRow, lo: int, hi: int, due: int) -> None:
    """Give part of a batch another due time: it becomes a batch of its own, with its TTL counted anew."""
    columns, body = state.content(queue.q, batch.first, batch.blob)
    ttl = batch.expires - max(batch.enqueued, batch.due) if batch.expires else 0
    was_held = [(group, leases.is_held(group, batch)) for group in state.groups(queue.q)] if batch.due else []
    for group, held in was_held:
        if held and not settled.all_settled(state, group, batch.first, batch.last):
            leases.count_held(group, batch.first, -1)
    freeing.remove_batch(state, queue, batch)
    for first, last in ((batch.first, lo - 1), (lo, hi), (hi + 1, batch.last)):
        if first > last:
            continue
        part_columns, part = batches.cut(columns, body, first - batch.first, last - batch.first)
        moved = (first, last) == (lo, hi)
        piece = BatchRow(
            first,
            last - first + 1,
            state.add_blob(content_hash(part_columns, part), part_columns, part),
            batch.enqueued,
            due if moved else batch.due,
            (due + ttl if ttl else 0) if moved else batch.expires,
            batch.first_seq + first - batch.first,
            part_columns.payload_bytes,
            len(part),
            batch.client,
            batch.generation,
            batch.flags,
        )
        freeing.store_batch(state, queue, piece)
        if not moved:
            for group, held in was_held:
                if not held:
                    _stay_folded(state, group, piece)
                elif not settled.all_settled(state, group, first, last):
                    leases.count_held(group, first, 1)
    state.drop_blob(batch.blob)
    for group in state.groups(queue.q):
        _hold_part(state, group, batch, lo, hi)


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
