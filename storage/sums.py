"""How many versions of delayed batches a queue stores at or above a version (P6), without a step for each batch (G5).

A batch counts where it begins. SUM holds the total of every aligned block of 64, 64², 64³ and 64⁴ versions that is not
zero, so a total from some version on is the rest of its smallest block, read batch by batch, and the blocks above it:
at most 64 rows on each level, and one row for each sixteen million versions.
"""

from holdfast.storage.rows import QueueRow
from holdfast.storage.state import State, View
from holdfast.storage.tables import Table, k1, k2, k3, u1

BITS = 6
LEVELS = 4


def count(state: State, q: int, first: int, change: int) -> None:
    """A batch that begins at `first` has so many delayed versions more, or less."""
    for level in range(1, LEVELS + 1):
        key = k3(q, level, first >> (level * BITS))
        data = state.txn.get(Table.SUM, key)
        total = (0 if data is None else u1(data)[0]) + change
        if total:
            state.put(Table.SUM, key, k1(total))
        else:
            state.delete(Table.SUM, key)


def delayed_from(view: View, queue: QueueRow, start: int) -> int:
    """Versions at or above `start` in batches with a due time."""
    if start <= queue.low:
        return queue.sched_versions
    total = 0
    end = ((start >> BITS) + 1) << BITS
    for batch in view.batches(queue.q, start, end - 1):
        if batch.due:
            total += batch.last - max(batch.first, start) + 1
    for level in range(1, LEVELS + 1):
        block = end >> (level * BITS)
        end = -(-end >> ((level + 1) * BITS)) << ((level + 1) * BITS)  # where the next level can go on: rounded up
        above = k3(queue.q, level, end >> (level * BITS)) if level < LEVELS else k2(queue.q, level + 1)
        total += sum(u1(data)[0] for _, data in view.txn.scan(Table.SUM, k3(queue.q, level, block), above))
    return total
