"""A set of versions as rows `scope lo -> hi`, kept as its maximal runs: touching ranges become one row.

So the number of rows is the number of runs, and no two runs touch.
"""

from holdfast.client.protocol.errors import StateBroken
from holdfast.storage.state import State, View
from holdfast.storage.tables import Table, k1, k2

Range = tuple[int, int]


def add(state: State, table: Table, scope: int, lo: int, hi: int) -> int:
    """Put versions in that are not in; says by how many the runs became more."""
    change = 1
    before = state.txn.last(table, k1(scope), k2(scope, lo))
    if before is not None and _unpack(before)[1] == lo - 1:
        lo = _unpack(before)[0]
        state.delete(table, before[0])
        change -= 1
    following = state.delete(table, k2(scope, hi + 1))
    if following is not None:
        hi = int.from_bytes(following, "big")
        change -= 1
    state.insert(table, k2(scope, lo), k1(hi))
    return change


def cut(state: State, table: Table, scope: int, lo: int, hi: int) -> int:
    """Take versions out that are in; says by how many the runs became more."""
    change = removed = 0
    for first, last in _overlapping(state, table, scope, lo, hi):
        state.delete(table, k2(scope, first))
        change -= 1
        removed += min(last, hi) - max(first, lo) + 1
        for part_lo, part_hi in ((first, lo - 1), (hi + 1, last)):
            if part_lo <= part_hi:
                state.insert(table, k2(scope, part_lo), k1(part_hi))
                change += 1
    if removed != hi - lo + 1:
        raise StateBroken(problem=f"versions {lo}-{hi} are not all in {table.name} under {scope}")
    return change


def within(view: View, table: Table, scope: int, lo: int, hi: int) -> list[Range]:
    """The parts of lo … hi that are in, ascending."""
    return [(max(first, lo), min(last, hi)) for first, last in _overlapping(view, table, scope, lo, hi)]


def any_of(view: View, table: Table, scope: int, lo: int, hi: int) -> bool:
    """Whether one of lo … hi is in: the run that begins last also ends last."""
    found = view.txn.last(table, k1(scope), k2(scope, hi + 1))
    return found is not None and _unpack(found)[1] >= lo


def lowest(view: View, table: Table, scope: int) -> Range | None:
    found = view.txn.first(table, k1(scope), k1(scope + 1))
    return None if found is None else _unpack(found)


def highest(view: View, table: Table, scope: int) -> Range | None:
    found = view.txn.last(table, k1(scope), k1(scope + 1))
    return None if found is None else _unpack(found)


def runs(ranges: list[Range]) -> list[Range]:
    """Disjoint ranges in any order as maximal runs, ascending."""
    found: list[Range] = []
    for lo, hi in sorted(ranges):
        if found and found[-1][1] == lo - 1:
            found[-1] = (found[-1][0], hi)
        else:
            found.append((lo, hi))
    return found


def _overlapping(view: View, table: Table, scope: int, lo: int, hi: int) -> list[Range]:
    rows = []
    before = view.txn.last(table, k1(scope), k2(scope, lo))
    if before is not None and _unpack(before)[1] >= lo:
        rows.append(_unpack(before))
    rows += [_unpack(row) for row in view.txn.scan(table, k2(scope, lo), k2(scope, hi + 1))]
    return rows


def _unpack(row: tuple[bytes, bytes]) -> Range:
    return int.from_bytes(row[0][8:], "big"), int.from_bytes(row[1], "big")
