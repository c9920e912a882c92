"""What a purge leaves in flight (G5): leases that were open when it came still hold their versions, below its line.

A purge draws the line, and the leases from before it are *sorted in*, in the order of their ids and a bounded number
of ranges an entry, the first of them by the purge itself: what they hold goes into OPEN, or into AGAIN if it was
redriven. What leaves its lease before its turn, settled or returned, is sorted in first. Until all is, the group may
take too much for settled, but nothing for unsettled that is not: nothing is handed out that was purged, storage below
the line is not freed, and what needs floor or holes exactly is refused for the moment. A query counts what is missing
itself.
"""

from collections.abc import Iterator

from holdfast.storage import settled
from holdfast.storage.ranges import Range
from holdfast.storage.rows import REDRIVE, GroupRow, QueueRow, Span, unpack_lease
from holdfast.storage.state import State, View
from holdfast.storage.tables import Table, k2


def draw_line(state: State, queue: QueueRow, group: GroupRow) -> None:
    """Everything up to the tail is settled, but for what is in flight; the shelf is empty already."""
    group.line = group.floor = group.settled_top = queue.tail
    group.open_rows = group.redriven = group.holes = 0
    group.sort_from = group.sort_to = group.sort_version = 0
    if group.in_flight:
        group.sort_to = state.newest_lease
        sort(state, group, state.limits.reap_rows)
    state.touch_group(group)


def sort(state: State, group: GroupRow, budget: int) -> int:
    """Sort in what the next leases hold, range by range; says how much of the budget is left."""
    while budget > 0 and group.sort_to:
        low, high = k2(group.hold, group.sort_from), k2(group.hold, group.sort_to + 1)
        found = state.txn.first(Table.LEASE, low, high)
        if found is None:
            group.sort_from = group.sort_to = group.sort_version = 0
        else:
            lease_id = int.from_bytes(found[0][8:], "big")
            left = _left(group, lease_id, unpack_lease(found[1]).held)
            _sort_in(state, group, left[:budget])
            group.sort_from, group.sort_version = lease_id, 0
            if len(left) > budget:
                group.sort_version = left[budget].lo
            else:
                group.sort_from += 1
            budget -= max(len(left), 1)
        state.touch_group(group)
    return max(budget, 0)


def sort_first(state: State, group: GroupRow, lease_id: int, spans: list[Span]) -> None:
    """Before these leave their lease: settled or returned, they are known to have been in flight."""
    if group.sort_from <= lease_id <= group.sort_to:
        _sort_in(state, group, _left(group, lease_id, spans))


def unsorted(view: View, group: GroupRow) -> Iterator[tuple[list[Range], list[Range]]]:
    """What each lease holds that is not sorted in yet: plain ranges and redriven ones. It may be every open lease."""
    if group.sort_to:
        rows = view.txn.scan(Table.LEASE, k2(group.hold, group.sort_from), k2(group.hold, group.sort_to + 1))
        for key, data in rows:
            spans = _left(group, int.from_bytes(key[8:], "big"), unpack_lease(data).held)
            yield _ranges(spans, redriven=False), _ranges(spans, redriven=True)


def _left(group: GroupRow, lease_id: int, held: list[Span]) -> list[Span]:
    """What is left to sort in of what a lease holds."""
    if lease_id > group.sort_from:
        return held
    return [span for span in held if span.lo >= group.sort_version]


def _sort_in(state: State, group: GroupRow, spans: list[Span]) -> None:
    settled.reopen(state, group, _ranges(spans, redriven=False), _ranges(spans, redriven=True))


def _ranges(spans: list[Span], *, redriven: bool) -> list[Range]:
    return [(span.lo, span.hi) for span in spans if bool(span.flags & REDRIVE) == redriven]
