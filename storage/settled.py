"""Which versions a group has settled, and why: ranges in DONE, the floor below them, the holes above it (L5).

Above the purge line a version is settled if it is in DONE. Not above it, it is settled unless it is in OPEN, and where
DONE has no reason for it, it was purged: so a purge writes no row for what it settles (G5). Redriven versions stay in
DONE under their own reason, and are in AGAIN until they are settled again; one that is in DONE alone was purged. Floor
and holes do not go back for them (decision 0002, 14).
"""

import struct

from holdfast.client.protocol.errors import StateBroken
from holdfast.storage import ranges
from holdfast.storage.ranges import Range
from holdfast.storage.rows import FREED, REDRIVEN, WHY_NUMBER, WHYS, GroupRow
from holdfast.storage.state import State, View
from holdfast.storage.tables import DONE, Table, k1, k2, u2

PURGED = WHY_NUMBER["purged"]

DoneRow = tuple[int, int, int]  # first, last, why

_ROW = struct.Struct(">QB")  # last, why
_pack = _ROW.pack


def add(state: State, group: GroupRow, lo: int, hi: int, why: int) -> None:
    """Settle versions that are in no DONE row yet."""
    if lo <= group.line:
        _close(state, group, lo, min(hi, group.line), why)
        if hi <= group.line:
            return
        lo = group.line + 1
    g = group.g
    floor = group.floor
    left = row_at_or_before(state, group, lo - 1) if lo > group.start and (floor >= lo - 1 or group.holes) else None
    right = None
    if hi < group.settled_top:
        data = state.txn.get(DONE, k2(g, hi + 1))
        if data is not None:
            right = (hi + 1, *_unpack(data))
    joins_left = left is not None and left[1] == lo - 1
    if group.open_rows and lo == group.line + 1:
        joins_left = not ranges.any_of(state, Table.OPEN, group.shelf, group.line, group.line)
    if lo == floor + 1:
        group.floor = hi
        if right is not None:
            group.holes -= 1
            group.floor = _run_end(state, group, right)
    else:
        group.holes += 1 - joins_left - (right is not None)
    if hi > group.settled_top:
        group.settled_top = hi
    _put_row(state, group, lo, hi, why, left, right)


def change(state: State, group: GroupRow, lo: int, hi: int, why: int) -> None:
    """Give versions that are in DONE another reason: redriven, or settled again after it."""
    rows = overlapping(state, group, max(lo - 1, 1), hi + 1)
    pieces: list[DoneRow] = []
    covered = 0
    for first, last, old in rows:
        if first < lo:
            pieces.append((first, min(last, lo - 1), old))
        if first <= hi and last >= lo:
            covered += min(last, hi) - max(first, lo) + 1
        if last > hi:
            pieces.append((max(first, hi + 1), last, old))
    covered += max(0, min(hi, group.known_from - 1) - lo + 1 - _rows_within(rows, lo, min(hi, group.known_from - 1)))
    if covered != hi - lo + 1:
        raise StateBroken(problem=f"versions {lo}-{hi} of group {group.gid} are not settled")
    pieces.append((lo, hi, why))
    merged: list[DoneRow] = []
    for first, last, reason in sorted(pieces):
        if merged and merged[-1][1] == first - 1 and merged[-1][2] == reason:
            merged[-1] = (merged[-1][0], last, reason)
        else:
            merged.append((first, last, reason))
    for first, _, _ in rows:
        state.delete(DONE, k2(group.g, first))
    for first, last, reason in merged:
        state.insert(DONE, k2(group.g, first), _pack(last, reason))
    group.done_rows += len(merged) - len(rows)
    if why == REDRIVEN:
        group.redriven += ranges.add(state, Table.AGAIN, group.shelf, lo, hi)
    elif group.redriven:
        for first, last in ranges.within(state, Table.AGAIN, group.shelf, lo, hi):
            group.redriven += ranges.cut(state, Table.AGAIN, group.shelf, first, last)


def redrive_below_start(state: State, group: GroupRow, version: int) -> None:
    """A death of an earlier generation, below this one's start, is redriven: floor and holes do not see it."""
    first = last = version
    for low, high, why in overlapping(state, group, max(version - 1, 1), version + 1):
        if why == REDRIVEN:
            state.delete(DONE, k2(group.g, low))
            group.done_rows -= 1
            first, last = min(first, low), max(last, high)
    state.insert(DONE, k2(group.g, first), _pack(last, REDRIVEN))
    group.done_rows += 1
    group.redriven += ranges.add(state, Table.AGAIN, group.shelf, version, version)
    state.touch_group(group)


def not_redriven(view: View, group: GroupRow, lo: int, hi: int) -> list[tuple[int, int]]:
    """The parts of lo … hi, below the group's start, that were never redriven into this generation."""
    parts = []
    for first, last, _ in overlapping(view, group, lo, hi):
        if first > lo:
            parts.append((lo, first - 1))
        lo = last + 1
    if lo <= hi:
        parts.append((lo, hi))
    return parts


def row_at_or_before(view: View, group: GroupRow, version: int) -> DoneRow | None:
    """The DONE row with the greatest first version that is not above `version`."""
    found = view.txn.last(DONE, k1(group.g), k2(group.g, version + 1))
    return None if found is None else (u2(found[0])[1], *_unpack(found[1]))


def row_holding(view: View, group: GroupRow, version: int) -> DoneRow | None:
    row = row_at_or_before(view, group, version)
    return row if row is not None and row[1] >= version else None


def overlapping(view: View, group: GroupRow, lo: int, hi: int) -> list[DoneRow]:
    """The DONE rows that hold any of lo … hi, ascending."""
    rows = []
    before = row_at_or_before(view, group, lo)
    if before is not None and before[1] >= lo:
        rows.append(before)
    low = before[0] + 1 if before is not None else lo
    for key, data in view.txn.scan(DONE, k2(group.g, max(low, lo)), k2(group.g, hi + 1)):
        rows.append((int.from_bytes(key[8:], "big"), *_unpack(data)))
    return rows


def why_settled(view: View, group: GroupRow, version: int) -> int | None:
    """The number of the reason for which this version is settled (or in DONE, and redriven), or none."""
    row = row_holding(view, group, version)
    if row is not None:
        if row[2] != REDRIVEN or ranges.any_of(view, Table.AGAIN, group.shelf, version, version):
            return row[2]
        return PURGED
    if not group.start <= version <= max(group.line, group.known_from - 1):
        return None
    if version < group.known_from:
        return FREED
    return None if ranges.any_of(view, Table.OPEN, group.shelf, version, version) else PURGED


def was_freed(view: View, group: GroupRow, version: int) -> bool:
    """Whether this version was gone before the generation began; a reason that was forgotten says nothing."""
    row = row_holding(view, group, version)
    return row is not None and row[2] == FREED


def all_settled(view: View, group: GroupRow, lo: int, hi: int) -> bool:
    """Whether the group needs none of these versions: settled (and not redriven), or before its start.

    Looks no further than the first that is needed: a batch that is settled piece by piece is looked at as often. While
    leases from before a purge are not sorted in, nobody knows which of the versions below the line they hold.
    """
    if group.sort_to and lo <= group.line:
        return False
    if group.redriven and ranges.any_of(view, Table.AGAIN, group.shelf, lo, hi):
        return False
    if group.start > hi or hi <= group.floor:
        return True
    if hi <= group.line:
        return not ranges.any_of(view, Table.OPEN, group.shelf, lo, hi)
    if hi > group.settled_top:
        return False
    lo = max(lo, group.start, group.known_from)
    while lo <= hi:
        row = row_at_or_before(view, group, lo)
        if row is None or row[1] < lo:
            return False
        lo = row[1] + 1
    return True


def unsettled(view: View, group: GroupRow, lo: int, hi: int) -> list[tuple[int, int]]:
    """The parts of lo … hi that are not settled, without redriven ones, ascending."""
    lo = max(lo, group.floor + 1)
    if lo > hi:
        return []
    parts = []
    if lo <= group.line:
        parts = ranges.within(view, Table.OPEN, group.shelf, lo, min(hi, group.line))
        lo = group.line + 1
    if lo > group.settled_top:
        return [*parts, (lo, hi)] if lo <= hi else parts
    for first, last, _ in overlapping(view, group, lo, hi):
        if first > lo:
            parts.append((lo, first - 1))
        lo = last + 1
    if lo <= hi:
        parts.append((lo, hi))
    return parts


def lowest_unsettled(view: View, group: GroupRow) -> int:
    """The lowest version that the group has not settled, redriven ones included."""
    again = ranges.lowest(view, Table.AGAIN, group.shelf) if group.redriven else None
    return group.floor + 1 if again is None else min(again[0], group.floor + 1)


# At and below the purge line -------------------------------------------------------------------------------


def reopen(state: State, group: GroupRow, parts: list[Range], redriven: list[Range]) -> None:
    """These are not settled, though they are not above the line: a lease from before the purge holds them (G5)."""
    before = holes_at_line(state, group, group.open_rows, ranges.highest(state, Table.OPEN, group.shelf))
    for lo, hi in parts:
        group.open_rows += ranges.add(state, Table.OPEN, group.shelf, lo, hi)
    for lo, hi in redriven:
        group.redriven += ranges.add(state, Table.AGAIN, group.shelf, lo, hi)
    _look_again(state, group, before)


def holes_at_line(view: View, group: GroupRow, runs: int, highest: Range | None) -> int:
    """Of the holes, those that begin at or below the line, if so many runs are open there and this is the last."""
    if highest is None:
        return 0
    return runs - 1 + (highest[1] < group.line or row_holding(view, group, group.line + 1) is not None)


def _close(state: State, group: GroupRow, lo: int, hi: int, why: int) -> None:
    """Settle versions that were in flight when the purge came."""
    before = holes_at_line(state, group, group.open_rows, ranges.highest(state, Table.OPEN, group.shelf))
    group.open_rows += ranges.cut(state, Table.OPEN, group.shelf, lo, hi)
    _look_again(state, group, before)
    data = state.txn.get(DONE, k2(group.g, hi + 1))
    right = None if data is None else (hi + 1, *_unpack(data))
    _put_row(state, group, lo, hi, why, row_at_or_before(state, group, lo - 1), right)


def _look_again(state: State, group: GroupRow, before: int) -> None:
    """Floor, holes and highest settled after a change of OPEN; `before` is what `holes_at_line` said then."""
    lowest, highest = (look(state, Table.OPEN, group.shelf) for look in (ranges.lowest, ranges.highest))
    group.holes += holes_at_line(state, group, group.open_rows, highest) - before
    if lowest is None or highest is None:
        row = row_holding(state, group, group.line + 1)
        group.floor = group.line if row is None else _run_end(state, group, row)
        group.settled_top = max(group.settled_top, group.line)
    else:
        group.floor = lowest[0] - 1
        if group.settled_top <= group.line:
            group.settled_top = group.line if highest[1] < group.line else highest[0] - 1
    state.touch_group(group)


def count(group: GroupRow, why: int, n: int) -> None:
    """Move the G4 counter that belongs to a reason."""
    name = WHYS[why]
    setattr(group, name, getattr(group, name) + n)


def _put_row(
    state: State, group: GroupRow, lo: int, hi: int, why: int, left: DoneRow | None, right: DoneRow | None
) -> None:
    """A new DONE row; neighbours with the same reason become one with it."""
    first, last = lo, hi
    if left is not None and left[1] == lo - 1 and left[2] == why:
        first = left[0]
        group.done_rows -= 1
    if right is not None and right[2] == why:
        last = right[1]
        state.delete(DONE, k2(group.g, hi + 1))
        group.done_rows -= 1
    state.put(DONE, k2(group.g, first), _pack(last, why))
    group.done_rows += 1
    if group.done_rows > state.limits.why_ranges:
        _forget_lowest(state, group)


def _run_end(state: State, group: GroupRow, row: DoneRow) -> int:
    """The last version of the run of DONE rows that begins with this one."""
    end = row[1]
    while end < group.settled_top:
        data = state.txn.get(DONE, k2(group.g, end + 1))
        if data is None:
            break
        end = _unpack(data)[0]
    return end


def _forget_lowest(state: State, group: GroupRow) -> None:
    """Bound the past: the lowest row below the floor loses its reason, unless it waits to be settled again."""
    found = state.txn.first(DONE, k2(group.g, group.known_from), k2(group.g, group.floor + 1))
    if found is None:
        return
    last, why = _unpack(found[1])
    again = why == REDRIVEN and ranges.any_of(state, Table.AGAIN, group.shelf, group.known_from, last)
    if last <= group.floor and not again:
        state.delete(DONE, found[0])
        group.done_rows -= 1
        group.known_from = last + 1


def _rows_within(rows: list[DoneRow], lo: int, hi: int) -> int:
    return sum(max(0, min(last, hi) - max(first, lo) + 1) for first, last, _ in rows)


def _unpack(data: bytes) -> tuple[int, int]:
    last, why = _ROW.unpack(data)
    return last, why
