"""What is not stored where a generation begins (G2): it counts as settled for its floor and holes, and in no counter.

The gaps are taken over from the queue's FREED rows in ascending order, a bounded number an entry, the first of them by
the command that begins the generation (G5). Until all are, the group may take too little for settled, but only what is
not stored and so cannot be handed out; what needs floor, holes or the number of its messages is refused for the moment,
and so is what would store one of these versions again. A query counts what is missing itself.
"""

from collections.abc import Iterator
from itertools import islice

from holdfast.storage import freeing, settled
from holdfast.storage.ranges import Range
from holdfast.storage.rows import FREED, GroupRow, QueueRow
from holdfast.storage.state import State, View


def begin(state: State, queue: QueueRow, group: GroupRow) -> None:
    """All that is not stored from the group's start to the tail."""
    group.gaps_from, group.gaps_to = group.start, queue.tail
    take_over(state, queue, group, state.limits.reap_rows)


def take_over(state: State, queue: QueueRow, group: GroupRow, budget: int) -> int:
    """Take over the next gaps; says how much of the budget is left."""
    found = list(islice(freeing.gaps(state, queue, group.gaps_from), budget))
    for lo, hi in found:
        for part_lo, part_hi in _not_settled(state, group, lo, hi):
            settled.add(state, group, part_lo, part_hi, FREED)
            group.freed += part_hi - part_lo + 1
        group.gaps_from = hi + 1
    if len(found) < budget or group.gaps_from > group.gaps_to:
        group.gaps_from = group.gaps_to = 0
    state.touch_group(group)
    return budget - max(len(found), 1)


def missing(view: View, queue: QueueRow, group: GroupRow) -> Iterator[Range]:
    """What is still to be taken over, ascending. It may be every gap of the queue."""
    if group.gaps_to:
        for lo, hi in freeing.gaps(view, queue, group.gaps_from):
            yield from _not_settled(view, group, lo, hi)


def _not_settled(view: View, group: GroupRow, lo: int, hi: int) -> list[Range]:
    """A gap grows over what the group settled since it began: that has a reason of its own."""
    return settled.unsettled(view, group, lo, min(hi, group.gaps_to))
