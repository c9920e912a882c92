"""Removing what was deleted, a bounded number of rows an entry (G5).

Delete, seek and purge make rows unreachable at once by giving up an id; a task remembers what is left to remove.
Every node works on the same tasks at the same entries, so their stores stay equal. What commands wait for
(`unfinished`) goes before what only takes room, however much of that there is.
"""

import struct
from typing import Literal, get_args

from holdfast.storage import freeing, gaps, settled, survivors
from holdfast.storage.effects import ReapSoon, WakeConsumers
from holdfast.storage.rows import DeadRow, GroupRow, QueueRow, unpack_batch, unpack_dead
from holdfast.storage.settled import PURGED
from holdfast.storage.state import State, View
from holdfast.storage.tables import Table, after, k1

Task = Literal["rows", "dead", "batches", "release", "staged", "sort", "purged", "gaps"]
_TASKS: tuple[Task, ...] = get_args(Task)
_WAITED_FOR = ("sort", "gaps")
_LATER = 2**62  # the first key of tasks for which nobody waits
_END = 2**63
_ROW = struct.Struct(">BBQQQ")

GENERATION_TABLES = (Table.DONE, Table.PIN, Table.LEASE, Table.LEASE_DUE)
SHELF_TABLES = (Table.BACK, Table.WAIT, Table.WAIT_DUE, Table.OPEN, Table.AGAIN)
HOLD_TABLES = (Table.LEASE, Table.LEASE_DUE, Table.FLIGHT)


def forget_generation(state: State, group: GroupRow) -> None:
    """All rows of one generation of a group."""
    _forget(state, GENERATION_TABLES, group.g)
    forget_shelf(state, group)
    forget_hold(state, group)


def forget_shelf(state: State, group: GroupRow) -> None:
    """What is available, away or open again."""
    _forget(state, SHELF_TABLES, group.shelf)


def forget_hold(state: State, group: GroupRow) -> None:
    """All leases, but for auto-acked ones."""
    _forget(state, HOLD_TABLES, group.hold)


def forget_dead(state: State, group: GroupRow) -> None:
    """All dead rows of a group, with their bodies."""
    if group.parked:
        _add(state, "dead", Table.DEAD, group.grave, 0, 0)
        _add(state, "rows", Table.DEAD_DUE, group.grave, 0, 0)
        _add(state, "rows", Table.DEAD_AT, group.grave, 0, 0)


def forget_purged(state: State, group: GroupRow) -> None:
    """All dead rows of a group, with their bodies; those versions that died in its present generation become purged."""
    _add(state, "purged", Table.DEAD, group.grave, group.q, group.gid)
    _add(state, "rows", Table.DEAD_DUE, group.grave, 0, 0)
    _add(state, "rows", Table.DEAD_AT, group.grave, 0, 0)


def purged_graves(view: View, group: GroupRow) -> list[int]:
    """Under which ids dead rows of this group stand that were purged."""
    tasks = (_ROW.unpack(data) for _, data in view.txn.scan(Table.REAP, k1(0), k1(_END)))
    return [scope for task, _, scope, _, gid in tasks if _TASKS[task] == "purged" and gid == group.gid]


def sort_later(state: State, group: GroupRow) -> None:
    """Leases from before the group's last purge that one command could not sort in."""
    _add(state, "sort", Table.OPEN, group.q, group.shelf, 0)


def fill_later(state: State, group: GroupRow) -> None:
    """Gaps before a generation's time that one command could not take over."""
    _add(state, "gaps", Table.FREED, group.q, group.g, 0)


def forget_queue(state: State, queue: QueueRow) -> None:
    """All rows of a queue but its tombstone."""
    _add(state, "batches", Table.BATCH, queue.q, 0, 0)
    for table in (
        Table.SCHED, Table.TTL, Table.PRODUCER, Table.READER, Table.HISTORY, Table.FREED,
        Table.KEPT, Table.SUM,
    ):  # fmt: skip
        if table == Table.PRODUCER or state.txn.first(table, k1(queue.q), after(k1(queue.q))) is not None:
            _add(state, "rows", table, queue.q, 0, 0)  # likewise those of PRODUCER


def forget_staged(state: State, number: int) -> None:
    """All chunks that are still staged under a transaction's number, with their bodies."""
    if state.txn.first(Table.STAGE, k1(number), after(k1(number))) is not None:
        _add(state, "staged", Table.STAGE, number, 0, 0)


def release_range(state: State, queue: QueueRow, lo: int, hi: int) -> None:
    """Batches of lo … hi that may be needed by nobody any more; the first of them are looked at now."""
    lo = max(lo, queue.low)
    if lo <= hi:
        rest = _release(state, queue, lo, hi, state.limits.reap_rows)
        if rest <= hi:
            release_later(state, queue, rest, hi)


def release_later(state: State, queue: QueueRow, lo: int, hi: int) -> None:
    """The same, when all that is to be reaped now is done."""
    _add(state, "release", Table.BATCH, queue.q, lo, hi)


def work(state: State) -> None:
    """Do one entry's share."""
    budget = state.limits.reap_rows
    while budget > 0:
        found = state.txn.first(Table.REAP, k1(0), k1(_END))
        if found is None:
            return
        key, data = found
        task, table, scope, lo, hi = _ROW.unpack(data)
        budget, done = _step(state, _TASKS[task], Table(table), scope, lo, hi, key, budget)
        if done:
            state.delete(Table.REAP, key)
    left = state.txn.first(Table.REAP, k1(0), k1(_END))
    if left is not None:
        state.effects[ReapSoon(left[0] < k1(_LATER))] = None


def _step(
    state: State, task: Task, table: Table, scope: int, lo: int, hi: int, key: bytes, budget: int
) -> tuple[int, bool]:
    if task == "release":
        queue = state.queue(scope)
        if queue is None or queue.deleted:
            return budget - 1, True
        rest = _release(state, queue, lo, hi, budget)
        if rest > hi:
            return budget - 1, True
        state.put(Table.REAP, key, _ROW.pack(_TASKS.index(task), table, scope, rest, hi))
        return 0, False
    if task in ("sort", "gaps"):
        queue = state.queue(scope)
        group = next((group for group in state.groups(scope) if lo in (group.shelf, group.g)), None)
        if queue is None or group is None:
            return budget - 1, True  # purged again, at another place or gone: what is left is no affair of this task
        if task == "sort":
            budget = survivors.sort(state, group, budget)
        else:
            budget = gaps.take_over(state, queue, group, budget)
        done = not (group.sort_to if task == "sort" else group.gaps_to)
        if done:
            state.effects[WakeConsumers(queue.q, group.name)] = None  # some waited for just this
        return budget, done
    prefix = k1(scope)
    rows = []
    for row in state.txn.scan(table, prefix, after(prefix)):
        rows.append(row)
        if len(rows) >= budget:
            break
    for row_key, data in rows:
        state.delete(table, row_key)
        if task == "dead":
            state.drop_blob(unpack_dead(data).blob)
        elif task == "purged":
            _purge_dead(state, lo, hi, unpack_dead(data))
        elif task == "batches":
            state.drop_blob(unpack_batch(0, data).blob)
        elif task == "staged":
            state.drop_blob(int.from_bytes(data[:8], "big"))
    return budget - max(len(rows), 1), len(rows) < budget


def _purge_dead(state: State, q: int, gid: int, row: DeadRow) -> None:
    state.drop_blob(row.blob)
    for group in state.groups(q):
        if group.gid == gid and group.g == row.g:
            settled.change(state, group, row.span.lo, row.span.hi, PURGED)
            state.touch_group(group)


def _release(state: State, queue: QueueRow, lo: int, hi: int, budget: int) -> int:
    """Release up to `budget` batches from `lo` on; says where to go on."""
    while budget > 0 and lo <= hi:
        batch = state.next_batch(queue.q, lo)
        if batch is None or batch.first > hi:
            return hi + 1
        freeing.release(state, queue, batch.first, batch.last)
        lo = batch.last + 1
        budget -= 1
    return lo


def _forget(state: State, tables: tuple[Table, ...], scope: int) -> None:
    for table in tables:
        if table == Table.FLIGHT or state.txn.first(table, k1(scope), after(k1(scope))) is not None:
            _add(state, "rows", table, scope, 0, 0)  # rows of FLIGHT may be written only at the end of this entry


def _add(state: State, task: Task, table: Table, scope: int, lo: int, hi: int) -> None:
    state.meta.reap_ids += 1
    is_waited_for = task in _WAITED_FOR
    number = state.meta.reap_ids + (0 if is_waited_for else _LATER)
    state.insert(Table.REAP, k1(number), _ROW.pack(_TASKS.index(task), table, scope, lo, hi))
    state.effects[ReapSoon(is_waited_for)] = None
