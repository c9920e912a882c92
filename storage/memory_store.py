"""The Store in memory: the same contract as `lmdb_store.py`, with nothing to open and nothing to grow.

Each table is a dict and the sorted list of its keys, changed in place. The rule that keeps it honest: before
a row changes, its former value goes to the writer's undo log and to every open reader, so an abort is an undo
and a reader never sees a later row. Nothing is ever copied whole.
"""

import os
import struct
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from threading import Condition, Lock, RLock, get_ident
from types import TracebackType
from typing import BinaryIO, Final, TypeVar

from holdfast.storage.store import (
    MAX_KEY_BYTES,
    ReadTxn,
    StoreBusy,
    StoreClosed,
    StoreDamaged,
    StoreFormatUnknown,
    StoreMisused,
    WriteTxn,
)

T = TypeVar("T")

FORMAT_VERSION: Final = 1

DUMP_FILE: Final = "rows.dump"
_MAGIC: Final = b"HFROWS\r\n"
_HEAD: Final = struct.Struct(">8sIH")  # magic, version, tables
_ROW: Final = struct.Struct(">HHI")  # table, key bytes, value bytes
_END: Final = struct.Struct(">HQ")  # no table, rows
_NO_TABLE: Final = 0xFFFF
_WRITE_BYTES: Final = 1 << 20

_Old = dict[bytes, bytes | None]


class MemoryStore:
    """Tables in this process's memory; gone with it, but for what `copy_to` wrote."""

    kind = "memory"

    def __init__(
        self,
        tables: Sequence[str],
        *,
        source: str | PathLike[str] | None = None,
        reader_wait_s: float = 30.0,
    ) -> None:
        """Start empty, or with the rows of `source`, a file that `copy_to` wrote."""
        if len(set(tables)) != len(tables):
            raise StoreMisused(f"table names repeat: {tables}")
        self._names = tuple(tables)
        self._reader_wait_s = reader_wait_s
        self._tables = [_Table() for _ in tables]
        self._lock = RLock()  # held for one operation, never for a whole transaction
        self._reader_left = Condition(self._lock)
        self._readers: list[MemoryReadTxn] = []
        self._writer = Lock()
        self._writer_thread = 0
        self._undo: list[_Old] = [{} for _ in tables]
        self._closed = False
        if source is not None:
            with open(source, "rb") as file:
                self._load(file)

    def read(self) -> "_Reading":
        return _Reading(self)

    def transact(self, work: Callable[[WriteTxn], T]) -> T:
        self._refuse_nested("transact")
        with self._writer:
            self._writer_thread = get_ident()
            try:
                self._refuse_closed()
                result = work(MemoryWriteTxn(self))
            except BaseException:
                self._abort()
                raise
            finally:
                self._writer_thread = 0
            self._forget_undo()
            return result

    def copy_into(self, descriptor: int, started: Callable[[ReadTxn], None] | None = None) -> None:
        self._refuse_nested("copy")
        with self.read() as txn:
            if started is not None:
                started(txn)
            pending = bytearray(_HEAD.pack(_MAGIC, FORMAT_VERSION, len(self._names)))
            for name in self._names:
                encoded = name.encode("ascii")
                pending += bytes((len(encoded),)) + encoded
            row_count = 0
            for table in range(len(self._names)):
                for key, value in txn.scan_all(table):
                    pending += _ROW.pack(table, len(key), len(value)) + key + value
                    row_count += 1
                    if len(pending) >= _WRITE_BYTES:
                        _write_all(descriptor, pending)
                        pending.clear()
            pending += _END.pack(_NO_TABLE, row_count)
            _write_all(descriptor, pending)

    def copy_to(self, path: str | PathLike[str]) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            self.copy_into(descriptor)
            os.fsync(descriptor)
        except BaseException:
            os.unlink(path)
            raise
        finally:
            os.close(descriptor)

    def used_bytes(self) -> int:
        self._refuse_closed()
        with self._lock:
            return sum(table.used_bytes for table in self._tables)

    def sync(self) -> None:
        self._refuse_closed()

    def close(self) -> None:
        self._refuse_nested("close")
        with self._writer, self._lock:
            if self._closed:
                return
            if not self._reader_left.wait_for(lambda: not self._readers, self._reader_wait_s):
                raise StoreBusy(f"{len(self._readers)} readers still open after {self._reader_wait_s} s")
            self._closed = True

    def _abort(self) -> None:
        with self._lock:
            for table, old in zip(self._tables, self._undo, strict=True):
                for key, value in old.items():
                    table.set(key, value)
            self._forget_undo()

    def _forget_undo(self) -> None:
        with self._lock:
            for old in self._undo:
                old.clear()

    def _remember(self, table: int, key: bytes, value: bytes | None) -> None:
        """Keep what `key` has now, for an abort and for those who began before this transaction's commit."""
        self._undo[table].setdefault(key, value)
        for reader in self._readers:
            reader.old[table].setdefault(key, value)

    def _load(self, file: BinaryIO) -> None:
        table_count = _check_head(file)
        names = [_read_exactly(file, _read_exactly(file, 1)[0]).decode("ascii") for _ in range(table_count)]
        targets = [self._tables[self._names.index(name)] if name in self._names else None for name in names]
        row_count = 0
        while (table := int.from_bytes(head := _read_exactly(file, 2))) != _NO_TABLE:
            if table >= table_count:
                raise StoreDamaged(f"{file.name}: a row of table {table}, there are {table_count}")
            _, key_bytes, value_bytes = _ROW.unpack(head + _read_exactly(file, _ROW.size - 2))
            key, value = _read_exactly(file, key_bytes), _read_exactly(file, value_bytes)
            row_count += 1
            if (target := targets[table]) is not None:
                target.set(key, value)
        if row_count != int.from_bytes(_read_exactly(file, 8)) or file.read(1):
            raise StoreDamaged(f"{file.name}: the number of rows differs from what was written")

    def _refuse_closed(self) -> None:
        if self._closed:
            raise StoreClosed("the store is closed")

    def _refuse_nested(self, call: str) -> None:
        if self._writer_thread == get_ident():
            raise StoreMisused(f"{call} inside a write transaction of the same thread")


class _Table:
    """The rows of one table and their keys in order."""

    __slots__ = ("keys", "rows", "used_bytes")

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}
        self.keys: list[bytes] = []
        self.used_bytes = 0

    def set(self, key: bytes, value: bytes | None) -> None:
        old = self.rows.get(key)
        if old is not None:
            self.used_bytes -= len(key) + len(old)
        if value is not None:
            self.used_bytes += len(key) + len(value)
            if old is None:
                if not self.keys or key > self.keys[-1]:
                    self.keys.append(key)
                else:
                    insort(self.keys, key)
            self.rows[key] = value
        elif old is not None:
            del self.keys[bisect_left(self.keys, key)]
            del self.rows[key]


class _Reading:
    """One read transaction as a `with` block, known to the store so that writers keep its rows for it."""

    __slots__ = ("_store", "_txn")

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def __enter__(self) -> "MemoryReadTxn":
        store = self._store
        with store._lock:
            store._refuse_closed()
            self._txn = MemoryReadTxn(store)
            store._readers.append(self._txn)
        return self._txn

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        store = self._store
        with store._lock:
            store._readers.remove(self._txn)
            store._reader_left.notify_all()


class MemoryReadTxn:
    """The tables of now, seen through the former values of whatever changed since the transaction began."""

    __slots__ = ("_store", "old")

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.old: list[_Old] = [dict(changed) for changed in store._undo]

    def get(self, table: int, key: bytes) -> bytes | None:
        _refuse_empty(key)
        with self._store._lock:
            old = self.old[table]
            return old[key] if key in old else self._store._tables[table].rows.get(key)

    def view(self, table: int, key: bytes) -> memoryview | None:
        value = self.get(table, key)
        return None if value is None else memoryview(value)

    def first(self, table: int, low: bytes, high: bytes) -> tuple[bytes, bytes] | None:
        with self._store._lock:
            keys, old = self._store._tables[table].keys, self.old[table]
            at = bisect_left(keys, low)
            while at < len(keys) and keys[at] in old:
                at += 1
            found = [key for key, value in old.items() if value is not None and low <= key < high]
            found += [key for key in keys[at : at + 1] if key < high]
            return self._row(table, min(found, default=None))

    def last(self, table: int, low: bytes, high: bytes) -> tuple[bytes, bytes] | None:
        with self._store._lock:
            keys, old = self._store._tables[table].keys, self.old[table]
            at = bisect_left(keys, high)
            while at > 0 and keys[at - 1] in old:
                at -= 1
            found = [key for key, value in old.items() if value is not None and low <= key < high]
            found += [key for key in keys[max(at - 1, 0) : at] if key >= low]
            return self._row(table, max(found, default=None))

    def scan(self, table: int, low: bytes, high: bytes) -> Iterator[tuple[bytes, bytes]]:
        row = self.first(table, low, high)
        while row is not None:
            yield row
            row = self.first(table, row[0] + b"\x00", high)

    def scan_all(self, table: int) -> Iterator[tuple[bytes, bytes]]:
        return self.scan(table, b"", b"\xff" * (MAX_KEY_BYTES + 1))

    def _row(self, table: int, key: bytes | None) -> tuple[bytes, bytes] | None:
        if key is None:
            return None
        value = self.get(table, key)
        assert value is not None  # narrows the type: the key was found under this lock
        return key, value


class MemoryWriteTxn:
    """Changes rows in place, each after its former value was remembered."""

    __slots__ = ("_store", "_tables")

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._tables = store._tables

    def get(self, table: int, key: bytes) -> bytes | None:
        _refuse_empty(key)
        return self._tables[table].rows.get(key)

    def view(self, table: int, key: bytes) -> memoryview | None:
        value = self.get(table, key)
        return None if value is None else memoryview(value)

    def first(self, table: int, low: bytes, high: bytes) -> tuple[bytes, bytes] | None:
        rows = self._tables[table]
        at = bisect_left(rows.keys, low)
        if at == len(rows.keys) or rows.keys[at] >= high:
            return None
        return rows.keys[at], rows.rows[rows.keys[at]]

    def last(self, table: int, low: bytes, high: bytes) -> tuple[bytes, bytes] | None:
        rows = self._tables[table]
        at = bisect_left(rows.keys, high)
        if at == 0 or rows.keys[at - 1] < low:
            return None
        return rows.keys[at - 1], rows.rows[rows.keys[at - 1]]

    def scan(self, table: int, low: bytes, high: bytes) -> Iterator[tuple[bytes, bytes]]:
        rows = self._tables[table]
        for at in range(bisect_left(rows.keys, low), bisect_left(rows.keys, high)):
            yield rows.keys[at], rows.rows[rows.keys[at]]

    def put(self, table: int, key: bytes, value: bytes | memoryview) -> bytes | None:
        _refuse_unfit(key)
        return self._change(table, key, bytes(value))

    def append(self, table: int, key: bytes, value: bytes | memoryview) -> None:
        _refuse_unfit(key)
        keys = self._tables[table].keys
        if keys and key <= keys[-1]:
            raise StoreMisused(f"append to table {table}: {key.hex()} is not greater than every key")
        self._change(table, key, bytes(value))

    def insert(self, table: int, key: bytes, value: bytes | memoryview) -> None:
        _refuse_unfit(key)
        if key in self._tables[table].rows:
            raise StoreMisused(f"insert into table {table}: {key.hex()} is present")
        self._change(table, key, bytes(value))

    def delete(self, table: int, key: bytes) -> bytes | None:
        _refuse_empty(key)
        return self._change(table, key, None)

    def _change(self, table: int, key: bytes, value: bytes | None) -> bytes | None:
        store = self._store
        with store._lock:
            former = self._tables[table].rows.get(key)
            store._remember(table, key, former)
            self._tables[table].set(key, value)
        return former


def check_file(path: str | PathLike[str]) -> None:
    """Raise `StoreFormatUnknown` unless this file is one that `MemoryStore` would load."""
    with open(path, "rb") as file:
        _check_head(file)


def _check_head(file: BinaryIO) -> int:
    """How many tables the file has, if it is of our format."""
    magic, version, table_count = _HEAD.unpack(_read_exactly(file, _HEAD.size))
    if magic != _MAGIC or version != FORMAT_VERSION:
        found = version if magic == _MAGIC else None
        raise StoreFormatUnknown(file.name, found=found, supported=FORMAT_VERSION)
    return int(table_count)


def _refuse_empty(key: bytes) -> None:
    if not key:
        raise StoreMisused("a key has at least one byte")


def _refuse_unfit(key: bytes) -> None:
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise StoreMisused(f"a key has 1..{MAX_KEY_BYTES} bytes, this one {len(key)}")


def _write_all(descriptor: int, data: bytearray) -> None:
    with memoryview(data) as rest:
        written = 0
        while written < len(rest):
            written += os.write(descriptor, rest[written:])


def _read_exactly(file: BinaryIO, size_bytes: int) -> bytes:
    data = file.read(size_bytes)
    if len(data) != size_bytes:
        raise StoreDamaged(f"{file.name}: ends at {file.tell()}, inside a row")
    return data
