"""Moved dead letters as a query (D4): which versions of a dead-letter queue can go home. Never called by the fold."""

from collections.abc import Mapping
from typing import Any

from holdfast.client.protocol import columns as batches
from holdfast.client.protocol.queries import FindMoved
from holdfast.client.protocol.replies import VersionsFound
from holdfast.client.protocol.values import Columns
from holdfast.storage import filters, origin
from holdfast.storage.rows import BatchRow, GroupRow, QueueRow
from holdfast.storage.state import View

# What the filter language calls it, and the header in which a moved message carries it.
LINEAGE = {
    "origin_queue": "holdfast-origin-queue",
    "origin_version": "holdfast-origin-version",
    "client_id": "holdfast-client-id",
    "client_seq": "holdfast-client-seq",
    "reason": "holdfast-reason",
    "attempts": "holdfast-attempts",
    "last_error": "holdfast-last-error",
    "group": "holdfast-group",
}


def find(view: View, queue: QueueRow, group: GroupRow, query: FindMoved) -> VersionsFound:
    """Available versions with lineage that match, ascending; a page ends by its limit or its scan budget.

    A batch counts for the budget like a version: many of them may have nothing that is available.
    """
    where = filters.parse(query.where) if query.where.strip() else None
    found: list[tuple[int, int]] = []
    count = scanned = 0
    for walked, batch in enumerate(view.batches(queue.q, query.from_version, queue.tail)):
        low = max(query.from_version, batch.first)
        if walked >= query.scan:
            return VersionsFound(versions=tuple(found), next_version=low)
        versions = [version for version, _ in origin.available(view, group, batch, low, batch.last)]
        if not versions:
            continue
        columns, body = view.content(queue.q, batch.first, batch.blob)
        for version in versions:
            if scanned >= query.scan or count >= query.limit:
                return VersionsFound(versions=tuple(found), next_version=version)
            scanned += 1
            headers = batches.decode_headers(batches.header_cell(columns, body, version - batch.first))
            if "holdfast-origin-queue-id" not in headers:
                continue
            if where is not None and not where.matches(_Fields(batch, version, columns, body, headers)):
                continue
            count += 1
            if found and found[-1][1] == version - 1:
                found[-1] = (found[-1][0], version)
            else:
                found.append((version, version))
    return VersionsFound(versions=tuple(found), next_version=None)


class _Fields:
    """One moved message by the names of the filter language; what its lineage does not tell is null."""

    def __init__(
        self, batch: BatchRow, version: int, columns: Columns, body: memoryview, headers: Mapping[str, str]
    ) -> None:
        self._batch, self._version, self._headers = batch, version, headers
        self._columns, self._body = columns, body

    def __getitem__(self, name: str) -> Any:
        index = self._version - self._batch.first
        match name:
            case "version":
                return self._version
            case "died_ms":
                return self._batch.enqueued  # it was moved in the entry in which it died
            case "key":
                return batches.key_of(self._columns, self._body, index).decode() or None
            case "payload_bytes":
                begin, end = batches.bounds(self._columns, index)
                return end - begin
            case "headers":
                return self._headers
            case "move_failed":
                return False
            case _:
                text = self._headers.get(LINEAGE.get(name, ""))
                return int(text) if text is not None and filters.FIELDS[name] == "int" else text
