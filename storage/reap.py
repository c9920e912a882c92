"""Removing what was deleted, a bounded number of rows an entry (G5).

Delete, seek and purge make rows unreachable at once by giving up an id; a task remembers what is left to remove.
Every node works on the same tasks at the same entries, so their stores stay equal.
"""

import struct
from typing import Literal

from holdfast.storage import freeing
from holdfast.storage.effects import ReapSoon
from holdfast.storage.rows import GroupRow, QueueRow, unpack_batch, unpack_dead
from holdfast.storage.state import State
from holdfast.storage.tables import Table, after, k1

Task = Literal["rows", "dead", "batches", "release", "staged"]
_TASKS: tuple[Task, ...] = ("rows", "dead", "batches", "release", "staged")
_ROW = struct.Struct(">BBQQQ")

GENERATION_TABLES = (
    Table.BACK,
    Table.WAIT,
    Table.WAIT_DUE,
    Table.LEASE,
    Table.LEASE_DUE,
    Table.DONE,
    Table.FLIGHT,
    Table.PIN,
)


def forget_generation(state: State, g: int) -> None:
    """All rows of one generation of a group."""
    for table in GENERATION_TABLES:
        if table == Table.FLIGHT or state.txn.first(table, k1(g), after(k1(g))) is not None:
            _add(state, "rows", table, g, 0, 0)  # rows of FLIGHT may be written only at the end of this entry


def forget_dead(state: State, group: GroupRow) -> None:
    """All dead rows of a group, with their bodies."""
    if group.parked:
        _add(state, "dead", Table.DEAD, group.grave, 0, 0)
        _add(state, "rows", Table.DEAD_DUE, group.grave, 0, 0)
        _add(state, "rows", Table.DEAD_AT, group.grave, 0, 0)


def forget_queue(state: State, queue: QueueRow) -> None:
    """All rows of a queue but its tombstone."""
    _add(state, "batches", Table.BATCH, queue.q, 0, 0)
    for table in (
        Table.SCHED, Table.TTL, Table.PRODUCER, Table.READER, Table.HISTORY, Table.FREED,
        Table.KEPT,
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
            _add(state, "release", Table.BATCH, queue.q, rest, hi)


def work(state: State) -> None:
    """Do one entry's share."""
    budget = state.limits.reap_rows
    while budget > 0:
        found = state.txn.first(Table.REAP, k1(0), k1(2**63))
        if found is None:
            return
        key, data = found
        task, table, scope, lo, hi = _ROW.unpack(data)
        budget, done = _step(state, _TASKS[task], Table(table), scope, lo, hi, key, budget)
        if done:
            state.delete(Table.REAP, key)
    if state.txn.first(Table.REAP, k1(0), k1(2**63)) is not None:
        state.effects[ReapSoon()] = None


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
        elif task == "batches":
            state.drop_blob(unpack_batch(0, data).blob)
        elif task == "staged":
            state.drop_blob(int.from_bytes(data[:8], "big"))
    return budget - max(len(rows), 1), len(rows) < budget


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


def _add(state: State, task: Task, table: Table, scope: int, lo: int, hi: int) -> None:
    state.meta.reap_ids += 1
    state.insert(Table.REAP, k1(state.meta.reap_ids), _ROW.pack(_TASKS.index(task), table, scope, lo, hi))
    state.effects[ReapSoon()] = None
