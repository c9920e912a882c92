"""The delivery history of a queue that asks for one (`history = true`): compact rows with their own retention."""

import struct

from holdfast.client.protocol.replies import HistoryRow
from holdfast.storage.rows import QueueRow, pack_text, unpack_text
from holdfast.storage.state import State, View
from holdfast.storage.tables import Table, k2

KINDS = ("produce", "lease", "extend", "ack", "nack", "release", "expiry", "dead", "redrive")

_ROW = struct.Struct(">BQQQQ")
PASSED_OVER = 10_000
_TRIM = 4  # rows removed for each one added: the backlog of old rows shrinks, and no command pays for all of it


def record(
    state: State,
    queue: QueueRow,
    kind: str,
    time_ms: int,
    first: int,
    last: int,
    group: str,
    lease_id: int,
    consumer: str,
    error: str,
) -> None:
    """Add one row, if this queue keeps a history."""
    if not queue.settings.history:
        return
    queue.history_seq += 1
    row = _ROW.pack(KINDS.index(kind), time_ms, first, last, lease_id)
    state.insert(
        Table.HISTORY,
        k2(queue.q, queue.history_seq),
        row + pack_text(group) + pack_text(consumer) + pack_text(error),
    )
    state.touch_queue(queue)
    _trim(state, queue)


def read(view: View, queue: QueueRow, from_seq: int, limit: int) -> tuple[list[HistoryRow], int | None]:
    """A page of rows, and where the next one begins. Rows beyond their retention that are not removed yet are passed
    over, a bounded number for each page."""
    low = max(from_seq, queue.history_low, queue.history_seq - view.limits.history_rows + 1)
    rows: list[HistoryRow] = []
    for looked, (key, data) in enumerate(view.txn.scan(Table.HISTORY, k2(queue.q, low), k2(queue.q, 2**63))):
        seq = int.from_bytes(key[8:], "big")
        if len(rows) >= limit or looked >= limit + PASSED_OVER:
            return rows, seq
        if _ROW.unpack_from(data)[1] + view.limits.history_ms > view.time_ms:
            rows.append(_unpack(seq, data))
    return rows, None


def _trim(state: State, queue: QueueRow) -> None:
    for _ in range(_TRIM):
        if queue.history_low >= queue.history_seq:
            return
        key = k2(queue.q, queue.history_low)
        too_many = queue.history_seq - queue.history_low + 1 > state.limits.history_rows
        if not too_many:
            data = state.txn.get(Table.HISTORY, key)
            if data is not None and _ROW.unpack_from(data)[1] + state.limits.history_ms > state.time_ms:
                return
        state.delete(Table.HISTORY, key)
        queue.history_low += 1


def _unpack(seq: int, data: bytes) -> HistoryRow:
    kind, time_ms, first, last, lease_id = _ROW.unpack_from(data)
    group, at = unpack_text(data, _ROW.size)
    consumer, at = unpack_text(data, at)
    error, _ = unpack_text(data, at)
    return HistoryRow(
        seq=seq,
        kind=KINDS[kind],
        time_ms=time_ms,
        first=first,
        last=last,
        group=group,
        lease_id=lease_id,
        consumer_id=consumer,
        error=error,
    )
