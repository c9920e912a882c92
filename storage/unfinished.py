"""A purge or a seek whose share for later entries is not done: what waits for it, and what queries make of it (G5).

What is handed out is right at once, and so is every counter that the rules look at. Floor, holes and highest settled
are exact only when the leases from before a purge are sorted in (`survivors`) and the gaps of a new generation are
taken over (`gaps`). A query counts what is missing itself, as long as that is not so much that all others had to wait
for it: then it is refused for the moment, as a command is that has to know.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from holdfast.client.protocol.errors import Overloaded
from holdfast.storage import gaps, ranges, settled, survivors
from holdfast.storage.ranges import Range
from holdfast.storage.rows import GroupRow, QueueRow
from holdfast.storage.state import View
from holdfast.storage.tables import Table

T = TypeVar("T")

RETRY_AFTER_MS = 100  # the leader commits entries as fast as it can while this is to be done (ReapSoon)
LOOK_MAX = 10_000  # leases or ranges that one query walks over: some 30 ms in the thread that decides for all


def refuse(view: View, group: GroupRow) -> None:
    """For commands that need it exactly: acting now would make the outcome depend on how far the work has come."""
    if group.sort_to or group.gaps_to:
        raise overloaded(view)


def overloaded(view: View) -> Overloaded:
    return Overloaded(limit_name="reap_rows", limit=view.limits.reap_rows, retry_after_ms=RETRY_AFTER_MS)


def may_exceed(queue: QueueRow, group: GroupRow, cap: int) -> bool:
    """Whether nobody knows yet if there are more holes than this: what a Lease asks (L5)."""
    return bool(group.sort_to or group.gaps_to) and most_holes(queue, group) > cap


def most_holes(queue: QueueRow, group: GroupRow) -> int:
    """No fewer than there are: each version of a lease, and each gap, makes at most one."""
    return group.holes + (group.in_flight if group.sort_to else 0) + (queue.freed_rows + 1 if group.gaps_to else 0)


def finished(view: View, queue: QueueRow, group: GroupRow) -> tuple[GroupRow, int]:
    """For queries: the group's row as it will be when all is done, and its lowest unsettled version.

    Raises Overloaded where too much is missing to look at.
    """
    if group.sort_to:
        return _with_leases(view, group)
    if group.gaps_to:
        group = _with_gaps(view, queue, group)
    return group, settled.lowest_unsettled(view, group)


def unsorted(view: View, group: GroupRow) -> tuple[list[Range], list[Range]]:
    """What leases hold that is not sorted in yet: plain ranges and redriven ones. Raises Overloaded as `finished`."""
    plain: list[Range] = []
    again: list[Range] = []
    for lease_plain, lease_again in _bounded(view, survivors.unsorted(view, group)):
        plain += lease_plain
        again += lease_again
    return plain, again


def _bounded(view: View, found: Iterable[T], looked_at: int = 0) -> Iterator[T]:
    for number, each in enumerate(found, looked_at):
        if number >= LOOK_MAX:
            raise overloaded(view)
        yield each


def _with_leases(view: View, group: GroupRow) -> tuple[GroupRow, int]:
    if group.open_rows + group.redriven > LOOK_MAX:
        raise overloaded(view)
    plain, again = unsorted(view, group)
    every = 1, group.line
    again = ranges.runs(again + ranges.within(view, Table.AGAIN, group.shelf, *every))
    opened = ranges.within(view, Table.OPEN, group.shelf, *every)
    before = settled.holes_at_line(view, group, len(opened), opened[-1] if opened else None)
    opened = ranges.runs(opened + plain)
    exact = replace(group, redriven=len(again))
    if opened:
        exact.floor = opened[0][0] - 1
        exact.holes += settled.holes_at_line(view, group, len(opened), opened[-1]) - before
        if group.settled_top <= group.line:
            exact.settled_top = group.line if opened[-1][1] < group.line else opened[-1][0] - 1
    return exact, min([exact.floor + 1, *(lo for lo, _ in again[:1])])


def _with_gaps(view: View, queue: QueueRow, group: GroupRow) -> GroupRow:
    if group.done_rows > LOOK_MAX:
        raise overloaded(view)
    parts = list(_bounded(view, gaps.missing(view, queue, group)))
    above = [(lo, hi) for lo, hi, _ in settled.overlapping(view, group, group.floor + 1, queue.tail)]
    above = ranges.runs(above + parts)
    exact = replace(group, freed=group.freed + sum(hi - lo + 1 for lo, hi in parts))
    exact.settled_top = max([group.settled_top, *(hi for _, hi in above[-1:])])
    if above and above[0][0] == group.floor + 1:
        exact.floor = above.pop(0)[1]
    exact.holes = len(above)
    return exact
