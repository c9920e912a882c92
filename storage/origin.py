"""Redrive of moved dead letters: from a dead-letter queue back to where they died, in one entry (D4)."""

from holdfast.client.protocol import columns as batches
from holdfast.client.protocol.commands import RedriveToOrigin
from holdfast.client.protocol.errors import OriginGone
from holdfast.client.protocol.replies import Redriven
from holdfast.storage import dead, groups, history, produce, settled
from holdfast.storage.rows import REDRIVE, WHY_NUMBER, BatchRow, GroupRow, QueueRow
from holdfast.storage.state import State, View

MOVED = WHY_NUMBER["moved"]
CANCELLED = WHY_NUMBER["cancelled"]


def redrive_to_origin(state: State, queue: QueueRow, group: GroupRow, command: RedriveToOrigin) -> Redriven:
    """Available versions go home; the first origin that cannot take one ends the step, and those behind it wait."""
    count = before = 0
    for lo, hi in command.versions:
        for batch in list(state.batches(queue.q, lo, hi)):
            columns, body = state.content(queue.q, batch.first, batch.blob)
            for version, redriven in available(state, group, batch, max(lo, batch.first), min(hi, batch.last)):
                index = version - batch.first
                headers = batches.decode_headers(batches.header_cell(columns, body, index))
                if "holdfast-origin-queue-id" not in headers:
                    continue
                message = (batches.payload_of(columns, body, index), batches.key_of(columns, body, index))
                error = _send_home(state, queue, message, headers)
                if error is not None:
                    if count:
                        return Redriven(count=count, skipped=before + version - lo - count)
                    raise error
                _leave(state, queue, group, version, redriven)
                count += 1
        before += hi - lo + 1
    return Redriven(count=count, skipped=before - count)


def available(view: View, group: GroupRow, batch: BatchRow, lo: int, hi: int) -> list[tuple[int, bool]]:
    """Versions of one batch that are available in this group, and whether they were redriven here before."""
    found = []
    for span in groups.peek_back(view, group, lo, hi):
        found += [(version, bool(span.flags & REDRIVE)) for version in range(span.lo, span.hi + 1)]
    if not batch.due:
        for first, last in settled.unsettled(view, group, max(lo, group.cursor), hi):
            found += [(version, False) for version in range(first, last + 1)]
    return sorted(found)


def _send_home(
    state: State, queue: QueueRow, message: tuple[bytes, bytes], headers: dict[str, str]
) -> OriginGone | None:
    """Produce the copy for the group it died in; in the origin's other groups it is cancelled at once."""
    origin_id = int(headers["holdfast-origin-queue-id"])
    name = headers["holdfast-origin-queue"]
    origin = state.queue(origin_id)
    if origin is None or origin.deleted:
        problem = "recreated" if state.queue_id(name) is not None else "gone"
        return OriginGone(queue=name, queue_id=origin_id, problem=problem)
    if state.group(origin_id, headers["holdfast-group"]) is None:
        return OriginGone(queue=name, queue_id=origin_id, problem="without its group")
    payload, key = message
    first = produce.append_copies(state, origin, [(payload, key, dead.own_headers(headers))], f"moved/{queue.q}")
    if first is None:
        return OriginGone(queue=name, queue_id=origin_id, problem="full")
    for other in state.groups(origin_id):
        if other.name != headers["holdfast-group"] and other.start <= first:
            groups.settle(state, origin, other, first, first, CANCELLED)
    return None


def _leave(state: State, queue: QueueRow, group: GroupRow, version: int, redriven: bool) -> None:
    history.record(state, queue, "redrive", state.time_ms, version, version, group.name, 0, "", "")
    groups.take_back(state, group, version, version)
    groups.settle(state, queue, group, version, version, MOVED, redriven=redriven)
