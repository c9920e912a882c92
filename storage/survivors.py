"""What a purge leaves in flight (G5): leases that were open when it came still hold their versions, below its line.

A purge draws the line, and the leases from before it are *sorted in*, in the order of their ids and a bounded number an
entry, the first of them by the purge itself: what they hold goes into OPEN, or into AGAIN if it was redriven. A lease
that somebody settles, or that expires, before its turn is sorted in first. Until all are, the group may take too much
for settled, but nothing for unsettled that is not: nothing is handed out that was purged, storage below the line is not
freed, and what needs floor or holes exactly is refused for the moment. A query counts what is missing itself.
"""

from dataclasses import replace

from holdfast.client.protocol.errors import Overloaded
from holdfast.storage import ranges, settled
from holdfast.storage.ranges import Range
from holdfast.storage.rows import REDRIVE, GroupRow, LeaseRow, QueueRow, unpack_lease
from holdfast.storage.state import State, View
from holdfast.storage.tables import Table, k2

RETRY_AFTER_MS = 100  # entries come as fast as the leader can commit them while something is to be reaped


def draw_line(state: State, queue: QueueRow, group: GroupRow) -> None:
    """Everything up to the tail is settled, but for what is in flight; the shelf is empty already."""
    group.line = group.floor = group.settled_top = queue.tail
    group.open_rows = group.redriven = group.holes = group.sort_from = group.sort_to = 0
    if group.in_flight:
        group.sort_to = state.newest_lease
        sort(state, group, state.limits.reap_rows)
    state.touch_group(group)


def sort(state: State, group: GroupRow, budget: int) -> int:
    """Sort in the next leases; says how much of the budget is left. A lease is sorted in whole."""
    while budget > 0 and group.sort_to:
        low, high = k2(group.hold, group.sort_from), k2(group.hold, group.sort_to + 1)
        found = state.txn.first(Table.LEASE, low, high)
        if found is None:
            group.sort_from = group.sort_to = 0
        else:
            row = unpack_lease(found[1])
            _sort_in(state, group, row)
            group.sort_from = int.from_bytes(found[0][8:], "big") + 1
            budget -= len(row.held)
        state.touch_group(group)
    return budget


def sort_first(state: State, group: GroupRow, lease_id: int, row: LeaseRow) -> None:
    """Before anything changes in what a lease holds."""
    if group.sort_from <= lease_id <= group.sort_to:
        _sort_in(state, group, row)


def refuse_while_sorting(view: View, group: GroupRow) -> None:
    """For commands that need floor or holes exactly: acting now would depend on how far the sorting has come."""
    if group.sort_to:
        raise Overloaded(limit_name="reap_rows", limit=view.limits.reap_rows, retry_after_ms=RETRY_AFTER_MS)


def unsorted(view: View, group: GroupRow) -> tuple[list[Range], list[Range]]:
    """What leases hold that are not sorted in yet: plain ranges and redriven ones. May look at every open lease."""
    plain: list[Range] = []
    again: list[Range] = []
    if group.sort_to:
        rows = view.txn.scan(Table.LEASE, k2(group.hold, group.sort_from), k2(group.hold, group.sort_to + 1))
        for row in (unpack_lease(data) for _, data in rows):
            if not _is_sorted(view, group, row):
                plain += _held(row, redriven=False)
                again += _held(row, redriven=True)
    return plain, again


def sorted_in(view: View, group: GroupRow) -> tuple[GroupRow, int]:
    """For queries: the group's row as it will be when all leases are sorted in, and its lowest unsettled version."""
    if not group.sort_to:
        return group, settled.lowest_unsettled(view, group)
    plain, again = unsorted(view, group)
    every = 1, group.line
    again = ranges.runs(again + ranges.within(view, Table.AGAIN, group.shelf, *every))
    opened = ranges.within(view, Table.OPEN, group.shelf, *every)
    before = settled.holes_at_line(view, group, len(opened), opened[-1] if opened else None)
    opened = ranges.runs(opened + plain)
    exact = replace(group, redriven=len(again), sort_from=0, sort_to=0)
    if opened:
        exact.floor = opened[0][0] - 1
        exact.holes += settled.holes_at_line(view, group, len(opened), opened[-1]) - before
        if group.settled_top <= group.line:
            exact.settled_top = group.line if opened[-1][1] < group.line else opened[-1][0] - 1
    return exact, min([exact.floor + 1, *(lo for lo, _ in again[:1])])


def _sort_in(state: State, group: GroupRow, row: LeaseRow) -> None:
    if not _is_sorted(state, group, row):
        settled.reopen(state, group, _held(row, redriven=False), _held(row, redriven=True))


def _is_sorted(view: View, group: GroupRow, row: LeaseRow) -> bool:
    """All that a lease holds is sorted in together, so its first version tells."""
    first = row.held[0]
    table = Table.AGAIN if first.flags & REDRIVE else Table.OPEN
    return ranges.any_of(view, table, group.shelf, first.lo, first.lo)


def _held(row: LeaseRow, *, redriven: bool) -> list[Range]:
    return [(span.lo, span.hi) for span in row.held if bool(span.flags & REDRIVE) == redriven]
