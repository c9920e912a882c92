"""Dead letters as a query (D3): rows by filter, in pages, within a scan budget. Never called by the fold."""

from collections.abc import Iterator, Sequence
from typing import Any

from holdfast.client.protocol import columns as batches
from holdfast.client.protocol.errors import BadValue, StateBroken
from holdfast.client.protocol.queries import DeadLetters
from holdfast.client.protocol.replies import DeadListed
from holdfast.client.protocol.replies import DeadRow as DeadReply
from holdfast.client.protocol.values import Columns
from holdfast.storage import filters
from holdfast.storage.rows import CAUSES, DEAD_MOVE_FAILED, DeadRow, GroupRow, QueueRow, unpack_dead
from holdfast.storage.state import View
from holdfast.storage.tables import Table, k1, k3, k4, u4

PAGE_BODY_BYTES = 4_194_304  # payloads of one page; at least one row
PAGE_HEAD_BYTES = 524_288  # all else of it: with the smallest headers still as many elements as a reply may have
_ROW_BYTES = 256  # of a row beside its texts


def select(view: View, queue: QueueRow, chosen: Sequence[GroupRow], query: DeadLetters) -> DeadListed:
    """Matching rows by (group's age, version, death); `after` is the token of the page before.

    A page ends by its limit, its scan budget, or what fits a frame.
    """
    where = filters.parse(query.where) if query.where.strip() else None
    rows: list[DeadReply] = []
    matched = scanned = body_left = head_left = 0
    for group, row, version in _walk(view, chosen, _start(query.after)):
        columns, body = view.content(queue.q, version, row.blob)
        fields = _Fields(group, row, version, columns, body)
        body_bytes, head_bytes = fields.sizes()
        if not rows:
            body_left, head_left = max(PAGE_BODY_BYTES, body_bytes), max(PAGE_HEAD_BYTES, head_bytes)
        full = len(rows) >= query.limit or body_bytes > body_left or head_bytes > head_left
        if scanned >= query.scan or (full and not query.count_only):
            token = k4(group.gid, row.span.lo, row.dead_seq, version)
            return DeadListed(rows=tuple(rows), matched=matched, scanned=scanned, next_token=token)
        scanned += 1
        if where is None or where.matches(fields):
            matched += 1
            if not query.count_only:
                rows.append(_reply(fields))
                body_left, head_left = body_left - body_bytes, head_left - head_bytes
    return DeadListed(rows=tuple(rows), matched=matched, scanned=scanned, next_token=b"")


Start = tuple[int, int, int, int]  # group, first version and number of the row, version in it


def _start(token: bytes) -> Start:
    if not token:
        return 0, 0, 0, 0
    if len(token) != 32:
        raise BadValue(field="after", problem="is no token of a former page")
    gid, lo, dead_seq, version = u4(token)
    return gid, lo, dead_seq, version


def _walk(view: View, chosen: Sequence[GroupRow], start: Start) -> Iterator[tuple[GroupRow, DeadRow, int]]:
    for group in chosen:
        if group.gid < start[0]:
            continue
        here = group.gid == start[0]
        low = k3(group.grave, start[1], start[2]) if here else k1(group.grave)
        for key, _ in view.txn.scan(Table.DEAD_AT, low, k1(group.grave + 1)):
            data = view.txn.get(Table.DEAD, k1(group.grave) + key[16:])
            if data is None:
                raise StateBroken(problem=f"group {group.gid} has no dead row {key[16:].hex()}")
            row = unpack_dead(data)
            first = start[3] if here and key == low else row.span.lo
            for version in range(max(first, row.span.lo), row.span.hi + 1):
                yield group, row, version


class _Fields:
    """One death by the names of the filter language; only what is asked for is decoded."""

    def __init__(self, group: GroupRow, row: DeadRow, version: int, columns: Columns, body: memoryview) -> None:
        self._group, self._row, self._version = group, row, version
        self._columns, self._body = columns, body
        self._index = version - row.span.lo

    def __getitem__(self, name: str) -> Any:
        row, span, index = self._row, self._row.span, self._index
        match name:
            case "dead_seq":
                return row.dead_seq + index
            case "version":
                return self._version
            case "reason":
                return CAUSES[row.cause]
            case "attempts":
                return span.attempts
            case "delivery_count":
                return span.count
            case "last_error":
                return span.error or None
            case "first_delivered_ms":
                return span.first_ms or None
            case "last_delivered_ms":
                return span.last_ms or None
            case "died_ms":
                return row.died
            case "consumer_id":
                return span.consumer or None
            case "client_id":
                return row.client
            case "client_seq":
                return row.first_seq + index
            case "key":
                return batches.key_of(self._columns, self._body, index).decode() or None
            case "group":
                return self._group.name
            case "move_failed":
                return bool(row.flags & DEAD_MOVE_FAILED)
            case "payload_bytes":
                begin, end = batches.bounds(self._columns, index)
                return end - begin
            case "headers":
                return batches.decode_headers(batches.header_cell(self._columns, self._body, index))
            case "origin_queue":
                return self["headers"].get("holdfast-origin-queue")
            case "origin_version":
                text = self["headers"].get("holdfast-origin-version")
                return int(text) if text is not None else None
            case _:
                raise KeyError(name)

    def sizes(self) -> tuple[int, int]:
        """Bytes of the payload, and of all else that the row says."""
        columns, body, index = self._columns, self._body, self._index
        begin, end = batches.bounds(columns, index)
        cells = len(batches.key_of(columns, body, index)) + len(batches.header_cell(columns, body, index))
        texts = len(self._row.span.error) + len(self._row.client)
        return end - begin, cells + 4 * texts + _ROW_BYTES

    def payload(self) -> bytes:
        return batches.payload_of(self._columns, self._body, self._index)


def _reply(fields: _Fields) -> DeadReply:
    names = (
        "group", "dead_seq", "version", "reason", "attempts", "delivery_count", "last_error", "first_delivered_ms",
        "last_delivered_ms", "died_ms", "consumer_id", "client_id", "client_seq", "key", "move_failed",
    )  # fmt: skip
    values = {name: fields[name] for name in names}
    return DeadReply(**values, headers=tuple(fields["headers"].items()), payload=fields.payload())
