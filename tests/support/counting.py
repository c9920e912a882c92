"""Transactions that note which tables are read and written: costs are compared in operations, never in time."""

from collections import Counter
from collections.abc import Iterator

from holdfast.storage.store import ReadTxn, WriteTxn
from holdfast.storage.tables import Table


class CountingReads:
    """A read transaction that notes what is read; every row of a scan counts."""

    def __init__(self, txn: ReadTxn, counts: Counter[str]) -> None:
        self._reads = txn
        self._counts = counts

    def _note(self, what: str, table: int) -> None:
        self._counts[f"{what} {Table(table).name}"] += 1
        self._counts["operations"] += 1

    def get(self, table: int, key: bytes) -> bytes | None:
        self._note("get", table)
        return self._reads.get(table, key)

    def view(self, table: int, key: bytes) -> memoryview | None:
        self._note("get", table)
        return self._reads.view(table, key)

    def first(self, table: int, low: bytes, high: bytes) -> tuple[bytes, bytes] | None:
        self._note("first", table)
        return self._reads.first(table, low, high)

    def last(self, table: int, low: bytes, high: bytes) -> tuple[bytes, bytes] | None:
        self._note("last", table)
        return self._reads.last(table, low, high)

    def scan(self, table: int, low: bytes, high: bytes) -> Iterator[tuple[bytes, bytes]]:
        self._note("scan", table)
        for row in self._reads.scan(table, low, high):
            self._note("row", table)
            yield row


class CountingTxn(CountingReads):
    """A write transaction that notes what is read and written."""

    def __init__(self, txn: WriteTxn, counts: Counter[str]) -> None:
        super().__init__(txn, counts)
        self._txn = txn

    def put(self, table: int, key: bytes, value: bytes | memoryview) -> bytes | None:
        self._note("put", table)
        return self._txn.put(table, key, value)

    def append(self, table: int, key: bytes, value: bytes | memoryview) -> None:
        self._note("append", table)
        self._txn.append(table, key, value)

    def insert(self, table: int, key: bytes, value: bytes | memoryview) -> None:
        self._note("insert", table)
        self._txn.insert(table, key, value)

    def delete(self, table: int, key: bytes) -> bytes | None:
        self._note("delete", table)
        return self._txn.delete(table, key)
