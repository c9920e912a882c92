"""Which versions a group has settled, and why: ranges in DONE, the floor below them, the holes above it (L5).

Redriven versions stay in DONE under their own reason: they are unsettled again, but floor and holes do not go back
(decision 0002, 14).
"""

import struct

from holdfast.client.protocol.errors import StateBroken
from holdfast.storage.rows import FREED, REDRIVEN, WHYS, GroupRow
from holdfast.storage.state import State, View
from holdfast.storage.tables import DONE, k1, k2, u2

DoneRow = tuple[int, int, int]  # first, last, why

_ROW = struct.Struct(">QB")  # last, why
_pack = _ROW.pack


def add(state: State, group: GroupRow, lo: int, hi: int, why: int) -> None:
    """Settle versions that are in no DONE row yet."""
    g = group.g
    floor = group.floor
    left = row_at_or_before(state, group, lo - 1) if lo > group.start and (floor >= lo - 1 or group.holes) else None
    right = None
    if hi < group.settled_top:
        data = state.txn.get(DONE, k2(g, hi + 1))
        if data is not None:
            right = (hi + 1, *_unpack(data))
    joins_left = left is not None and left[1] == lo - 1
    if lo == floor + 1:
        group.floor = hi
        if right is not None:
            group.holes -= 1
            group.floor = _run_end(state, group, right)
    else:
        group.holes += 1 - joins_left - (right is not None)
    if hi > group.settled_top:
        group.settled_top = hi
    first, last = lo, hi
    if joins_left and left is not None and left[2] == why:
        first = left[0]
        group.done_rows -= 1
    if right is not None and right[2] == why:
        last = right[1]
        state.delete(DONE, k2(g, hi + 1))
        group.done_rows -= 1
    state.put(DONE, k2(g, first), _pack(last, why))
    group.done_rows += 1
    if group.done_rows > state.limits.why_ranges:
        _forget_lowest(state, group)


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
    for first, _, old in rows:
        state.delete(DONE, k2(group.g, first))
        group.redriven -= old == REDRIVEN
    for first, last, reason in merged:
        state.insert(DONE, k2(group.g, first), _pack(last, reason))
        group.redriven += reason == REDRIVEN
    group.done_rows += len(merged) - len(rows)


def redrive_below_start(state: State, group: GroupRow, version: int) -> None:
    """A death of an earlier generation, below this one's start, is redriven: floor and holes do not see it."""
    first = last = version
    for low, high, why in overlapping(state, group, max(version - 1, 1), version + 1):
        if why == REDRIVEN:
            state.delete(DONE, k2(group.g, low))
            group.done_rows -= 1
            group.redriven -= 1
            first, last = min(first, low), max(last, high)
    state.insert(DONE, k2(group.g, first), _pack(last, REDRIVEN))
    group.done_rows += 1
    group.redriven += 1
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
    """The number of the reason for which this version is in DONE, or none."""
    row = row_at_or_before(view, group, version)
    if row is not None and row[1] >= version:
        return row[2]
    return FREED if group.start <= version < group.known_from else None


def was_freed(view: View, group: GroupRow, version: int) -> bool:
    """Whether this version was gone before the generation began; a reason that was forgotten says nothing."""
    row = row_at_or_before(view, group, version)
    return row is not None and row[1] >= version and row[2] == FREED


def all_settled(view: View, group: GroupRow, lo: int, hi: int) -> bool:
    """Whether the group needs none of these versions: settled (and not redriven), or before its start.

    Looks no further than the first that is needed: a batch that is settled piece by piece is looked at as often.
    """
    known_from = max(group.start, group.known_from)
    if group.redriven and lo < known_from:
        below = overlapping(view, group, lo, min(hi, known_from - 1))
        if any(why == REDRIVEN for _, _, why in below):
            return False
    if group.start > hi or (hi <= group.floor and not group.redriven):
        return True
    if hi > group.settled_top:
        return False
    lo = max(lo, known_from)
    while lo <= hi:
        row = row_at_or_before(view, group, lo)
        if row is None or row[1] < lo or row[2] == REDRIVEN:
            return False
        lo = row[1] + 1
    return True


def unsettled(view: View, group: GroupRow, lo: int, hi: int) -> list[tuple[int, int]]:
    """The parts of lo … hi that are in no DONE row, ascending."""
    lo = max(lo, group.floor + 1)
    if lo > hi:
        return []
    if lo > group.settled_top:
        return [(lo, hi)]
    parts = []
    for first, last, _ in overlapping(view, group, lo, hi):
        if first > lo:
            parts.append((lo, first - 1))
        lo = last + 1
    if lo <= hi:
        parts.append((lo, hi))
    return parts


def lowest_unsettled(view: View, group: GroupRow) -> int:
    """The lowest version that the group has not settled, redriven ones included."""
    if group.redriven:
        prefix = k1(group.g)
        for key, data in view.txn.scan(DONE, prefix, k2(group.g, group.floor + 1)):
            if _unpack(data)[1] == REDRIVEN:
                return int.from_bytes(key[8:], "big")
    return group.floor + 1


def count(group: GroupRow, why: int, n: int) -> None:
    """Move the G4 counter that belongs to a reason."""
    name = WHYS[why]
    setattr(group, name, getattr(group, name) + n)


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
    if last <= group.floor and why != REDRIVEN:
        state.delete(DONE, found[0])
        group.done_rows -= 1
        group.known_from = last + 1


def _rows_within(rows: list[DoneRow], lo: int, hi: int) -> int:
    return sum(max(0, min(last, hi) - max(first, lo) + 1) for first, last, _ in rows)


def _unpack(data: bytes) -> tuple[int, int]:
    last, why = _ROW.unpack(data)
    return last, why
