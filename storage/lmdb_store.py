"""The Store on LMDB, and the only importer of lmdb.

Owns the environment's settings, the growth of its map and the translation of LMDB's errors. Two rules keep it
honest: the map is never resized while a transaction of this process is open (LMDB would unmap memory that the
transaction points into), and no lmdb exception leaves `read`, `transact` or the other public calls.

A commit is not fsynced: the log is the truth, and `sync` makes a state durable when the node asks for it.
"""

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from threading import Condition, Lock, get_ident
from types import TracebackType
from typing import Final, TypeVar

import lmdb

from holdfast.storage.store import (
    ReadTxn,
    StoreBusy,
    StoreClosed,
    StoreDamaged,
    StoreError,
    StoreFormatUnknown,
    StoreFull,
    StoreMisused,
    WriteTxn,
)

T = TypeVar("T")

FORMAT_VERSION: Final = 1

# Address space, not memory or disk: with sync off and no writemap the file grows only as pages are written.
# Large enough that most stores never need to stop for a growth.
INITIAL_MAP_BYTES: Final = 16 << 30
MAX_MAP_BYTES: Final = 1 << 44  # 16 TiB: a bound for runaway growth, well inside a 47-bit address space
MIN_MAP_BYTES: Final = 256 << 10  # room for every table's root, so that creation itself never grows

# A growth that meets a snapshot's copy or a slow fsync waits for it; stopping the node would take longer to
# mend.
READER_WAIT_S: Final = 30.0

DATA_FILE: Final = "data.mdb"
_RESERVED_DB: Final = b"holdfast"
_FORMAT_KEY: Final = b"format"
_FORMAT: Final = struct.Struct(">8sI")
_MAGIC: Final = b"HFSTORE\n"

# How an LMDB 0.9 file begins: page number 0, flags "meta", then LMDB's magic.
_META_HEAD: Final = bytes(10) + b"\x08\x00" + bytes(4) + 0xBEEFC0DE.to_bytes(4, "little")

# Asking LMDB how full it is takes 0.7 µs; a write transaction takes ten. Looking now and then is enough, for
# a full map costs one more run of the work and nothing else.
_TRANSACTIONS_BETWEEN_CHECKS: Final = 32

_MAX_READERS: Final = 1024  # 64 bytes each in the lock file; queries and peeks that overlap stay far below


class LmdbStore:
    """Tables in one LMDB environment, a directory of its own."""

    kind = "lmdb"

    def __init__(
        self,
        directory: str | PathLike[str],
        tables: Sequence[str],
        *,
        initial_map_bytes: int = INITIAL_MAP_BYTES,
        max_map_bytes: int = MAX_MAP_BYTES,
        reader_wait_s: float = READER_WAIT_S,
    ) -> None:
        """Open `directory`, making it if needed; a creation that was cut off is completed.

        Raises `StoreFormatUnknown` if the directory holds something else. `reader_wait_s` bounds how long a
        growth or a close waits for open readers.
        """
        self._directory = Path(directory)
        self._max_map_bytes = max_map_bytes
        self._reader_wait_s = reader_wait_s
        self._writer = Lock()
        self._writer_thread = 0
        self._gate = Condition(Lock())
        self._reader_count = 0
        self._gate_shut = False
        self._closed = False
        self._until_check = _TRANSACTIONS_BETWEEN_CHECKS
        try:
            self._env = _open_environment(self._directory, max(initial_map_bytes, MIN_MAP_BYTES), len(tables))
        except lmdb.Error as error:
            raise _translated(error) from error
        try:
            self._page_bytes = self._env.stat()["psize"]
            self._grow_if_filling()
            self._dbs = _open_tables(self._env, self._directory, tables)
        except lmdb.Error as error:
            self._env.close()
            raise _translated(error) from error
        except BaseException:
            self._env.close()
            raise

    def read(self) -> "_Reading":
        return _Reading(self)

    def transact(self, work: Callable[[WriteTxn], T]) -> T:
        self._refuse_nested("transact")
        with self._writer:
            self._writer_thread = get_ident()
            try:
                self._refuse_closed()
                self._until_check -= 1
                if self._until_check <= 0:
                    self._grow_if_filling()
                while True:
                    try:
                        return self._attempt(work)
                    except lmdb.MapFullError:
                        self._grow_after_full()
            except lmdb.Error as error:
                raise _translated(error) from error
            finally:
                self._writer_thread = 0

    def copy_into(self, descriptor: int, started: Callable[[ReadTxn], None] | None = None) -> None:
        with self._begin_copy() as txn:
            if started is not None:
                started(txn)
            # Compacting leaves free pages behind and runs without the interpreter's lock.
            self._env.copyfd(descriptor, compact=True, txn=txn.raw)

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
        with self.read() as txn:
            return self._page_bytes * sum(
                stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
                for stat in map(txn.raw.stat, self._dbs)
            )

    def file_bytes(self) -> int:
        """Space that the file takes, pages free for reuse included; it never shrinks but by a snapshot."""
        with self.read():
            return self._high_water(self._env.info()["last_pgno"])

    def map_bytes(self) -> int:
        """Address space the map has now."""
        with self.read():
            return self._env.info()["map_size"]

    def sync(self) -> None:
        # Counted as a reader: the binding fails any call that meets a resize.
        with self.read():
            self._env.sync(True)

    def close(self) -> None:
        self._refuse_nested("close")
        with self._writer, self._gate:
            if self._closed:
                return
            self._wait_for_readers()
            self._closed = True
            self._gate.notify_all()
            self._env.close()

    def _attempt(self, work: Callable[[WriteTxn], T]) -> T:
        txn = self._env.begin(None, None, True, False)
        try:
            result = work(LmdbWriteTxn(txn, self._dbs))
        except BaseException:
            self._abort(txn)
            raise
        txn.commit()
        return result

    def _abort(self, txn: "lmdb.Transaction[bytes]") -> None:
        """Undo a write transaction while new readers are kept out.

        The binding ends an aborted write transaction (not a committed one) only at a moment when no other
        thread is inside a call to it. Three busy readers leave no such moment for seconds; with the gate shut
        the wait is over when the readers that are open, a copy among them, end or pause.
        """
        with self._gate:
            self._gate_shut = True
        try:
            txn.abort()
        finally:
            with self._gate:
                self._gate_shut = False
                self._gate.notify_all()

    def _begin_copy(self) -> "_Reading":
        """A read transaction for a long copy, with room beside it for what is written meanwhile.

        The map cannot grow until the copy ends, so a map that is over a quarter full grows now, under the
        writer's lock, if no other reader is open.
        """
        self._refuse_nested("copy")
        with self._writer:
            self._refuse_closed()
            try:
                self._grow_if_filling(full_percent=25)
            except lmdb.Error as error:
                raise _translated(error) from error
            reading = _Reading(self)
            reading.enter_gate()
        return reading

    def _high_water(self, last_page: int) -> int:
        return (last_page + 1) * self._page_bytes

    def _grow_if_filling(self, full_percent: int = 60) -> None:
        """Grow early, while it disturbs nobody; the caller holds the writer's lock and no transaction."""
        self._until_check = _TRANSACTIONS_BETWEEN_CHECKS
        info = self._env.info()
        map_bytes = info["map_size"]
        fitting_bytes = self._high_water(info["last_pgno"]) * 100 // full_percent
        if fitting_bytes <= map_bytes or map_bytes >= self._max_map_bytes:
            return
        with self._gate:
            if self._reader_count == 0:
                self._resize(max(2 * map_bytes, fitting_bytes))

    def _grow_after_full(self) -> None:
        # The caller's transaction is aborted, so the writer's lock is all that is held here.
        map_bytes = self._env.info()["map_size"]
        if map_bytes >= self._max_map_bytes:
            raise StoreFull(f"{self._directory}: the map is at its limit of {self._max_map_bytes} bytes")
        with self._gate:
            self._wait_for_readers()
            self._resize(2 * map_bytes)

    def _wait_for_readers(self) -> None:
        """Keep new readers out and let the open ones end; the gate is held on entry and on return."""
        self._gate_shut = True
        try:
            if not self._gate.wait_for(lambda: self._reader_count == 0, self._reader_wait_s):
                raise StoreBusy(f"{self._directory}: {self._reader_count} readers open after {self._reader_wait_s} s")
        finally:
            self._gate_shut = False
            self._gate.notify_all()

    def _resize(self, map_bytes: int) -> None:
        page = self._page_bytes
        bounded = min(map_bytes, self._max_map_bytes)
        self._env.set_mapsize(-(-bounded // page) * page)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise StoreClosed(f"{self._directory} is closed")

    def _refuse_nested(self, call: str) -> None:
        if self._writer_thread == get_ident():
            raise StoreMisused(f"{call} inside a write transaction of the same thread")


class _Reading:
    """One read transaction as a `with` block, counted at the gate."""

    __slots__ = ("_entered", "_store", "_txn")

    def __init__(self, store: LmdbStore) -> None:
        self._store = store
        self._entered = False

    def __enter__(self) -> "LmdbReadTxn":
        if not self._entered:
            self.enter_gate()
        store = self._store
        try:
            self._txn = store._env.begin(buffers=True)
        except BaseException as error:
            self._leave_gate()
            if isinstance(error, lmdb.Error):
                raise _translated(error) from error
            raise
        return LmdbReadTxn(self._txn, store._dbs)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._txn.abort()
        finally:
            self._leave_gate()
        if isinstance(error, lmdb.Error):
            raise _translated(error) from error

    def enter_gate(self) -> None:
        store = self._store
        with store._gate:
            while store._gate_shut:
                store._gate.wait()
            store._refuse_closed()
            store._reader_count += 1
        self._entered = True

    def _leave_gate(self) -> None:
        store = self._store
        self._entered = False
        with store._gate:
            store._reader_count -= 1
            if store._gate_shut and not store._reader_count:
                store._gate.notify_all()


class LmdbReadTxn:
    """Reads with buffers: `view` points into the map, the rest copies out of it.

    One cursor per table is kept: LMDB's cursor calls take two thirds of the time of its transaction calls.
    """

    __slots__ = ("_cursors", "_dbs", "raw")

    def __init__(self, txn: "lmdb.Transaction[memoryview]", dbs: "list[lmdb._Database]") -> None:
        self.raw = txn
        self._dbs = dbs
        self._cursors: list[lmdb.Cursor[memoryview] | None] = [None] * len(dbs)

    def get(self, table: int, key: bytes) -> bytes | None:
        value = (self._cursors[table] or self._open(table)).get(key)
        return None if value is None else bytes(value)

    def view(self, table: int, key: bytes) -> memoryview | None:
        return (self._cursors[table] or self._open(table)).get(key)

    def first(self, table: int, low: bytes, high: bytes) -> tuple[bytes, bytes] | None:
        cursor = self._cursors[table] or self._open(table)
        if not cursor.set_range(low):
            return None
        key = bytes(cursor.key())
        return (key, bytes(cursor.value())) if key < high else None

    def last(self, table: int, low: bytes, high: bytes) -> tuple[bytes, bytes] | None:
        cursor = self._cursors[table] or self._open(table)
        if not (cursor.prev() if cursor.set_range(high) else cursor.last()):
            return None
        key = bytes(cursor.key())
        return (key, bytes(cursor.value())) if low <= key < high else None

    def scan(self, table: int, low: bytes, high: bytes) -> Iterator[tuple[bytes, bytes]]:
        # A cursor of its own: other reads of the table may come between two rows.
        with self.raw.cursor(self._dbs[table]) as cursor:
            if cursor.set_range(low):
                for key, value in cursor.iternext():
                    row = bytes(key)
                    if row >= high:
                        return
                    yield row, bytes(value)

    def _open(self, table: int) -> "lmdb.Cursor[memoryview]":
        cursor = self._cursors[table] = self.raw.cursor(self._dbs[table])
        return cursor


class LmdbWriteTxn:
    """Reads and writes with bytes: every call is one or two cursor calls and nothing else."""

    __slots__ = ("_cursors", "_dbs", "_txn")

    def __init__(self, txn: "lmdb.Transaction[bytes]", dbs: "list[lmdb._Database]") -> None:
        self._txn = txn
        self._dbs = dbs
        self._cursors: list[lmdb.Cursor[bytes] | None] = [None] * len(dbs)

    def get(self, table: int, key: bytes) -> bytes | None:
        return (self._cursors[table] or self._open(table)).get(key)

    def view(self, table: int, key: bytes) -> memoryview | None:
        value = (self._cursors[table] or self._open(table)).get(key)
        return None if value is None else memoryview(value)

    def first(self, table: int, low: bytes, high: bytes) -> tuple[bytes, bytes] | None:
        cursor = self._cursors[table] or self._open(table)
        if not cursor.set_range(low):
            return None
        key = cursor.key()
        return (key, cursor.value()) if key < high else None

    def last(self, table: int, low: bytes, high: bytes) -> tuple[bytes, bytes] | None:
        cursor = self._cursors[table] or self._open(table)
        if not (cursor.prev() if cursor.set_range(high) else cursor.last()):
            return None
        key = cursor.key()
        return (key, cursor.value()) if low <= key < high else None

    def scan(self, table: int, low: bytes, high: bytes) -> Iterator[tuple[bytes, bytes]]:
        with self._txn.cursor(self._dbs[table]) as cursor:
            if cursor.set_range(low):
                for row in cursor.iternext():
                    if row[0] >= high:
                        return
                    yield row

    def put(self, table: int, key: bytes, value: bytes | memoryview) -> bytes | None:
        return (self._cursors[table] or self._open(table)).replace(key, value)

    def append(self, table: int, key: bytes, value: bytes | memoryview) -> None:
        # Positional: dupdata, overwrite, append. Parsing keywords would cost a tenth of a microsecond.
        if not (self._cursors[table] or self._open(table)).put(key, value, True, False, True):
            raise StoreMisused(f"append to table {table}: {key.hex()} is not greater than every key")

    def insert(self, table: int, key: bytes, value: bytes | memoryview) -> None:
        if not (self._cursors[table] or self._open(table)).put(key, value, True, False):
            raise StoreMisused(f"insert into table {table}: {key.hex()} is present")

    def delete(self, table: int, key: bytes) -> bytes | None:
        return (self._cursors[table] or self._open(table)).pop(key)

    def _open(self, table: int) -> "lmdb.Cursor[bytes]":
        cursor = self._cursors[table] = self._txn.cursor(self._dbs[table])
        return cursor


def _open_environment(directory: Path, map_bytes: int, table_count: int) -> lmdb.Environment:
    directory.mkdir(parents=True, exist_ok=True)
    _forget_half_made(directory / DATA_FILE)
    env = lmdb.open(
        str(directory),
        map_size=map_bytes,
        max_dbs=table_count + 1,
        max_readers=_MAX_READERS,
        mode=0o700,
        sync=False,
        metasync=False,
        writemap=False,
        readahead=False,  # a store larger than memory is read here and there, not front to back
        meminit=False,
        # The binding carries two engines whose files differ, and an environment variable chooses between
        # them. Replicas exchange files, so the choice is made here.
        lib_version=0,
    )
    env.reader_check()
    return env


def _forget_half_made(data_file: Path) -> None:
    """Remove a data file that ends inside its two meta pages: its creation was cut off, it never held a
    row."""
    try:
        size_bytes = data_file.stat().st_size
    except FileNotFoundError:
        return
    if size_bytes < 2 * os.sysconf("SC_PAGE_SIZE"):
        with data_file.open("rb") as file:
            head = file.read(len(_META_HEAD))
        if _META_HEAD.startswith(head):
            data_file.unlink()


def _open_tables(env: lmdb.Environment, directory: Path, tables: Sequence[str]) -> "list[lmdb._Database]":
    """The tables' handles in order, after the format row was checked, or written with the first tables."""
    names = [name.encode("ascii") for name in tables]
    if len({*names, _RESERVED_DB}) != len(names) + 1:
        raise StoreMisused(f"table names repeat or take the reserved name: {tables}")
    with env.begin() as txn:
        is_new = txn.stat()["entries"] == 0
    if not is_new:
        _check_format(env, directory)
    with env.begin(write=True) as txn:
        dbs = [env.open_db(name, txn=txn) for name in names]
        if is_new:
            row = _FORMAT.pack(_MAGIC, FORMAT_VERSION)
            txn.put(_FORMAT_KEY, row, db=env.open_db(_RESERVED_DB, txn=txn))
    return dbs


def check_file(path: str | PathLike[str]) -> None:
    """Raise `StoreFormatUnknown` unless this data file, which nobody has open, is one that `LmdbStore` opens."""
    try:
        env = lmdb.open(
            str(path),
            subdir=False,
            readonly=True,
            lock=False,  # no lock file beside it: the file is about to get another name
            max_dbs=1,
            readahead=False,
            lib_version=0,
        )
        try:
            _check_format(env, Path(path))
        finally:
            env.close()
    except lmdb.Error as error:
        raise _translated(error) from error


def _check_format(env: lmdb.Environment, directory: Path) -> None:
    row = None
    try:
        with env.begin() as txn:
            row = txn.get(_FORMAT_KEY, db=env.open_db(_RESERVED_DB, txn=txn, create=False))
    except (lmdb.NotFoundError, lmdb.IncompatibleError):
        pass
    if row is None or len(row) != _FORMAT.size or not row.startswith(_MAGIC):
        raise StoreFormatUnknown(f"{directory}", found=None, supported=FORMAT_VERSION)
    version: int = _FORMAT.unpack(row)[1]
    if version != FORMAT_VERSION:
        raise StoreFormatUnknown(f"{directory}", found=version, supported=FORMAT_VERSION)


_REMEDY = "make room on the disk of the state, or check it, then start the node again"


def _translated(error: lmdb.Error) -> StoreError:
    """The one place where an LMDB error gets its meaning here."""
    said = str(error)
    match error:
        case lmdb.MapFullError() | lmdb.DiskError():
            return StoreFull(f"{said}; {_REMEDY}")
        case lmdb.ReadersFullError() | lmdb.LockError():
            return StoreBusy(said)
        case lmdb.InvalidError() | lmdb.VersionMismatchError():
            return StoreFormatUnknown(said, found=None, supported=FORMAT_VERSION)
        case lmdb.CorruptedError() | lmdb.PageNotFoundError() | lmdb.PanicError() | lmdb.PageFullError():
            return StoreDamaged(said)
        case lmdb.BadValsizeError() | lmdb.BadTxnError() | lmdb.BadDbiError() | lmdb.ReadonlyError():
            return StoreMisused(said)
        case _:  # of the operating system; LMDB says I/O error, too, when a full disk takes a part of a write
            return StoreError(f"{said}; {_REMEDY}")
