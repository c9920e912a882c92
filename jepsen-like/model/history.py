"""The delivery history of a queue that keeps one: a row for each run of versions, per command or event."""

from collections.abc import Iterable

from holdfast.client.protocol.replies import HistoryRow
from holdfast.jepsen.model.records import Queue, runs
from holdfast.jepsen.model.state import State

KINDS = ("produce", "lease", "extend", "ack", "nack", "release", "expiry", "dead", "redrive")


def record(
    state: State,
    queue: Queue,
    kind: str,
    versions: Iterable[int],
    *,
    at_ms: int,
    group: str = "",
    lease_id: int = 0,
    consumer_id: str = "",
    error: str | None = None,
) -> None:
    """Write one row for each maximal run of these versions, if the queue keeps a history."""
    if not queue.settings.history:
        return
    for first, last in runs(versions):
        state.fire(f"history.{kind}")
        queue.history_seq += 1
        queue.history.append(
            HistoryRow(
                seq=queue.history_seq,
                kind=kind,
                time_ms=at_ms,
                first=first,
                last=last,
                group=group,
                lease_id=lease_id,
                consumer_id=consumer_id,
                error=error or "",
            )
        )
    del queue.history[: -state.limits.history_rows]


def kept(state: State, queue: Queue) -> list[HistoryRow]:
    """The rows that are not as old as `history_ms` yet."""
    rows = [row for row in queue.history if row.time_ms + state.limits.history_ms > state.time_ms]
    if len(rows) < len(queue.history):
        state.fire("history.aged")
    return rows
