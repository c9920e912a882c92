"""One contract, both stores. What only LMDB does (files, growth, formats) is at the end."""

import os
import shutil
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from holdfast.storage.lmdb_store import FORMAT_VERSION, MIN_MAP_BYTES, LmdbStore
from holdfast.storage.memory_store import MemoryStore
from holdfast.storage.store import (
    MAX_KEY_BYTES,
    ReadTxn,
    Store,
    StoreBusy,
    StoreClosed,
    StoreDamaged,
    StoreError,
    StoreFormatUnknown,
    StoreFull,
    StoreMisused,
    WriteTxn,
)

TABLES = ("queue", "batch", "lease")
QUEUE, BATCH, LEASE = range(3)
TOP = b"\xff" * (MAX_KEY_BYTES + 1)  # above every key


class Stop(Exception):
    """Raised by a test's own work to abort its transaction."""


@pytest.fixture(params=["lmdb", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made: Store
    if request.param == "lmdb":
        made = LmdbStore(tmp_path / "store", TABLES)
    else:
        made = MemoryStore(TABLES)
    yield made
    made.close()


def put_all(store: Store, table: int, *keys: bytes) -> None:
    def work(txn: WriteTxn) -> None:
        for key in keys:
            txn.put(table, key, b"value of " + key)

    store.transact(work)


def rows(txn: ReadTxn, table: int) -> list[tuple[bytes, bytes]]:
    return list(txn.scan(table, b"", TOP))


def viewed(txn: ReadTxn, table: int, key: bytes) -> bytes | None:
    view = txn.view(table, key)
    return None if view is None else bytes(view)


def all_rows(store: Store) -> list[list[tuple[bytes, bytes]]]:
    with store.read() as txn:
        return [rows(txn, table) for table in range(len(TABLES))]


def test_put_and_delete_return_the_former_value(store: Store) -> None:
    def work(txn: WriteTxn) -> list[bytes | None]:
        return [
            txn.put(QUEUE, b"k", b"one"),
            txn.put(QUEUE, b"k", b"two"),
            txn.delete(QUEUE, b"k"),
            txn.delete(QUEUE, b"k"),
            txn.get(QUEUE, b"k"),
        ]

    assert store.transact(work) == [None, b"one", b"two", None, None]


def test_a_transaction_reads_its_own_writes_and_commits_them(store: Store) -> None:
    def work(txn: WriteTxn) -> bytes | None:
        txn.put(QUEUE, b"a", b"1")
        return txn.get(QUEUE, b"a")

    assert store.transact(work) == b"1"
    with store.read() as txn:
        assert txn.get(QUEUE, b"a") == b"1"


def test_tables_do_not_see_each_other(store: Store) -> None:
    put_all(store, QUEUE, b"a")
    with store.read() as txn:
        assert txn.get(BATCH, b"a") is None
        assert txn.first(BATCH, b"", TOP) is None


def test_an_empty_value_is_a_value(store: Store) -> None:
    store.transact(lambda txn: txn.put(LEASE, b"a", b""))
    with store.read() as txn:
        assert txn.get(LEASE, b"a") == b""
        assert viewed(txn, LEASE, b"a") == b""
        assert txn.first(LEASE, b"", TOP) == (b"a", b"")
    assert store.transact(lambda txn: txn.put(LEASE, b"a", b"x")) == b""


def test_an_empty_table_has_no_first_last_or_rows(store: Store) -> None:
    def look(txn: ReadTxn) -> None:
        assert txn.first(QUEUE, b"", TOP) is None
        assert txn.last(QUEUE, b"", TOP) is None
        assert rows(txn, QUEUE) == []
        assert txn.get(QUEUE, b"a") is None
        assert txn.view(QUEUE, b"a") is None

    store.transact(look)
    with store.read() as txn:
        look(txn)


def test_low_is_inside_and_high_outside_of_a_range(store: Store) -> None:
    put_all(store, BATCH, b"b", b"d", b"f")

    def look(txn: ReadTxn) -> None:
        def keys(low: bytes, high: bytes) -> tuple[bytes | None, bytes | None, list[bytes]]:
            first, last = txn.first(BATCH, low, high), txn.last(BATCH, low, high)
            return first and first[0], last and last[0], [key for key, _ in txn.scan(BATCH, low, high)]

        assert keys(b"b", b"f") == (b"b", b"d", [b"b", b"d"])
        assert keys(b"b", b"f\x00") == (b"b", b"f", [b"b", b"d", b"f"])
        assert keys(b"b\x00", b"d") == (None, None, [])
        assert keys(b"c", b"e") == (b"d", b"d", [b"d"])
        assert keys(b"d", b"e") == (b"d", b"d", [b"d"])
        assert keys(b"", b"b") == (None, None, [])
        assert keys(b"", b"") == (None, None, [])
        assert keys(b"g", TOP) == (None, None, [])
        assert keys(b"f", b"b") == (None, None, [])
        assert keys(b"d", b"d") == (None, None, [])
        assert keys(b"", TOP) == (b"b", b"f", [b"b", b"d", b"f"])

    store.transact(look)
    with store.read() as txn:
        look(txn)


def test_keys_are_ordered_as_bytes_and_a_prefix_comes_before_what_it_begins(store: Store) -> None:
    put_all(store, QUEUE, b"\xff", b"a\x00", b"a", b"\x00", b"b", b"\x7f", b"\x80")
    assert [key for key, _ in all_rows(store)[QUEUE]] == [
        b"\x00", b"a", b"a\x00", b"b", b"\x7f", b"\x80", b"\xff",
    ]  # fmt: skip


def test_first_and_last_follow_deletions_and_insertions_of_the_same_transaction(store: Store) -> None:
    put_all(store, QUEUE, b"a", b"b", b"c")

    def work(txn: WriteTxn) -> None:
        assert txn.first(QUEUE, b"", TOP) == (b"a", b"value of a")
        txn.delete(QUEUE, b"a")
        assert txn.first(QUEUE, b"", TOP) == (b"b", b"value of b")
        txn.insert(QUEUE, b"aa", b"new")
        assert txn.first(QUEUE, b"", TOP) == (b"aa", b"new")
        txn.delete(QUEUE, b"c")
        assert txn.last(QUEUE, b"", TOP) == (b"b", b"value of b")
        txn.append(QUEUE, b"d", b"end")
        assert txn.last(QUEUE, b"", TOP) == (b"d", b"end")

    store.transact(work)


def test_other_tables_and_other_reads_may_be_used_between_two_rows_of_a_scan(store: Store) -> None:
    put_all(store, QUEUE, b"a", b"b", b"c")

    def work(txn: WriteTxn) -> list[bytes]:
        seen = []
        for key, value in txn.scan(QUEUE, b"", TOP):
            txn.put(BATCH, key, value)
            assert txn.last(QUEUE, b"", TOP) == (b"c", b"value of c")
            assert txn.get(QUEUE, b"a") == b"value of a"
            seen.append(key)
        return seen

    assert store.transact(work) == [b"a", b"b", b"c"]
    assert all_rows(store)[BATCH] == all_rows(store)[QUEUE]


def test_a_scan_may_be_left_halfway(store: Store) -> None:
    put_all(store, QUEUE, b"a", b"b", b"c")

    def work(txn: WriteTxn) -> bytes:
        found = next(txn.scan(QUEUE, b"b", TOP))[0]
        txn.delete(QUEUE, found)
        return found

    assert store.transact(work) == b"b"


def test_append_out_of_order_is_refused_and_undoes_the_transaction(store: Store) -> None:
    put_all(store, BATCH, b"m")
    for key in (b"a", b"m"):

        def work(txn: WriteTxn, key: bytes = key) -> None:
            txn.append(BATCH, b"n", b"")
            txn.delete(BATCH, b"n")
            txn.append(BATCH, key, b"late")

        with pytest.raises(StoreMisused):
            store.transact(work)
    assert all_rows(store)[BATCH] == [(b"m", b"value of m")]


def test_insert_of_a_present_key_is_refused_and_changes_nothing(store: Store) -> None:
    put_all(store, BATCH, b"m")
    with pytest.raises(StoreMisused):
        store.transact(lambda txn: txn.insert(BATCH, b"m", b"other"))
    assert all_rows(store)[BATCH] == [(b"m", b"value of m")]


def test_keys_have_1_to_511_bytes(store: Store) -> None:
    longest, too_long = b"k" * MAX_KEY_BYTES, b"k" * (MAX_KEY_BYTES + 1)
    put_all(store, QUEUE, longest, b"\x00")
    writes: list[Callable[[WriteTxn, bytes], object]] = [
        lambda txn, key: txn.put(QUEUE, key, b""),
        lambda txn, key: txn.append(QUEUE, key, b""),
        lambda txn, key: txn.insert(QUEUE, key, b""),
    ]
    for write in writes:
        for key in (b"", too_long):
            with pytest.raises(StoreMisused):
                store.transact(lambda txn, write=write, key=key: write(txn, key))  # type: ignore[misc]
    for read in (lambda txn: txn.get(QUEUE, b""), lambda txn: txn.delete(QUEUE, b"")):
        with pytest.raises(StoreMisused):
            store.transact(read)
    with pytest.raises(StoreMisused), store.read() as txn:
        txn.get(QUEUE, b"")
    with store.read() as txn:
        assert txn.get(QUEUE, longest) == b"value of " + longest
        assert txn.get(QUEUE, too_long) is None


def test_values_may_come_as_memoryviews_and_be_larger_than_pages(store: Store) -> None:
    body = os.urandom(300_000)

    def work(txn: WriteTxn) -> None:
        txn.append(BATCH, b"a", memoryview(body)[1:])
        txn.insert(BATCH, b"b", memoryview(body)[2:])
        txn.put(BATCH, b"c", memoryview(body)[3:])
        assert txn.put(BATCH, b"c", b"small") == body[3:]
        assert viewed(txn, BATCH, b"a") == body[1:]
        assert txn.delete(BATCH, b"b") == body[2:]

    store.transact(work)
    with store.read() as txn:
        assert rows(txn, BATCH) == [(b"a", body[1:]), (b"c", b"small")]
        view = txn.view(BATCH, b"a")
        assert view is not None
        assert view[100:200] == body[101:201]
        view.release()


def test_an_exception_undoes_everything_and_passes_through(store: Store) -> None:
    put_all(store, QUEUE, b"a", b"b")
    put_all(store, BATCH, b"x")
    before, used = all_rows(store), store.used_bytes()

    def work(txn: WriteTxn) -> None:
        txn.put(QUEUE, b"a", b"changed")
        txn.put(QUEUE, b"a", b"changed again")
        txn.delete(QUEUE, b"b")
        txn.put(QUEUE, b"b", b"back")
        txn.delete(BATCH, b"x")
        txn.append(LEASE, b"new", b"row")
        raise Stop

    with pytest.raises(Stop):
        store.transact(work)
    assert all_rows(store) == before
    assert store.used_bytes() == used
    put_all(store, QUEUE, b"c")
    assert [key for key, _ in all_rows(store)[QUEUE]] == [b"a", b"b", b"c"]


def test_a_reader_keeps_its_state_while_later_transactions_commit(store: Store) -> None:
    put_all(store, QUEUE, b"a", b"b", b"d")
    before = all_rows(store)
    with store.read() as txn:
        scan = txn.scan(QUEUE, b"", TOP)
        assert next(scan)[0] == b"a"
        store.transact(lambda work: work.delete(QUEUE, b"b"))
        store.transact(lambda work: work.put(QUEUE, b"c", b"later"))
        store.transact(lambda work: work.put(QUEUE, b"b", b"later"))
        store.transact(lambda work: work.put(QUEUE, b"d", b"later"))
        store.transact(lambda work: work.put(QUEUE, b"0", b"later"))
        assert [key for key, _ in scan] == [b"b", b"d"]
        assert rows(txn, QUEUE) == before[QUEUE]
        assert txn.first(QUEUE, b"", TOP) == (b"a", b"value of a")
        assert txn.last(QUEUE, b"", TOP) == (b"d", b"value of d")
        assert txn.last(QUEUE, b"", b"d") == (b"b", b"value of b")
        assert txn.first(QUEUE, b"c", b"d") is None
        assert txn.get(QUEUE, b"c") is None
    assert [key for key, _ in all_rows(store)[QUEUE]] == [b"0", b"a", b"b", b"c", b"d"]


def test_readers_on_other_threads_see_no_part_of_an_open_transaction(store: Store) -> None:
    put_all(store, QUEUE, b"a")
    before = all_rows(store)
    seen: list[object] = []

    def look() -> None:
        seen.append(all_rows(store))

    def work(txn: WriteTxn) -> None:
        txn.put(QUEUE, b"a", b"uncommitted")
        txn.put(QUEUE, b"b", b"uncommitted")
        reader = threading.Thread(target=look)
        reader.start()
        reader.join()
        raise Stop

    with pytest.raises(Stop):
        store.transact(work)
    look()
    assert seen == [before, before]


def test_readers_beside_a_writer_always_see_whole_transactions(store: Store) -> None:
    written = threading.Event()
    torn: list[object] = []

    def both(txn: WriteTxn, number: int) -> None:
        value = b"%d" % number
        txn.put(QUEUE, b"n", value)
        txn.put(BATCH, b"n", value)

    def look() -> None:
        while not written.is_set():
            with store.read() as txn:
                pair = txn.get(QUEUE, b"n"), txn.get(BATCH, b"n")
            if pair[0] != pair[1]:
                torn.append(pair)

    readers = [threading.Thread(target=look) for _ in range(3)]
    for reader in readers:
        reader.start()
    try:
        for number in range(300):
            store.transact(lambda txn, number=number: both(txn, number))  # type: ignore[misc]
    finally:
        written.set()
        for reader in readers:
            reader.join()
    assert torn == []


def test_writers_of_several_threads_take_turns(store: Store) -> None:
    def add(txn: WriteTxn) -> None:
        count = int(txn.get(QUEUE, b"count") or b"0")
        txn.put(QUEUE, b"count", b"%d" % (count + 1))

    def many() -> None:
        for _ in range(50):
            store.transact(add)

    writers = [threading.Thread(target=many) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    with store.read() as txn:
        assert txn.get(QUEUE, b"count") == b"200"


def test_a_transaction_inside_a_transaction_is_refused(store: Store) -> None:
    def work(txn: WriteTxn) -> None:
        txn.put(QUEUE, b"a", b"")
        put_all(store, QUEUE, b"b")

    with pytest.raises(StoreMisused):
        store.transact(work)
    assert all_rows(store)[QUEUE] == []


def test_used_bytes_follow_the_rows_and_not_the_history(store: Store) -> None:
    empty = store.used_bytes()

    def fill(txn: WriteTxn) -> None:
        for number in range(200):
            txn.append(BATCH, b"%06d" % number, bytes(10_000))

    store.transact(fill)
    assert store.used_bytes() - empty >= 2_000_000
    store.transact(lambda txn: [txn.delete(BATCH, b"%06d" % number) for number in range(200)])
    assert store.used_bytes() == empty


def test_a_closed_store_refuses_and_closes_again(store: Store) -> None:
    store.sync()
    store.close()
    store.close()
    for call in (lambda: put_all(store, QUEUE, b"a"), lambda: all_rows(store), store.sync, store.used_bytes):
        with pytest.raises(StoreClosed):
            call()


def test_a_copy_holds_the_state_that_was_shown_when_it_started(store: Store, tmp_path: Path) -> None:
    put_all(store, QUEUE, b"a", b"b")
    before = all_rows(store)
    shown: list[object] = []

    def started(txn: ReadTxn) -> None:
        shown.append([rows(txn, table) for table in range(len(TABLES))])
        writer = threading.Thread(target=put_all, args=(store, QUEUE, b"c"))
        writer.start()
        writer.join()

    with (tmp_path / "copy").open("wb") as file:
        store.copy_into(file.fileno(), started)
    assert shown == [before]
    assert all_rows(opened_copy(store, tmp_path / "copy", tmp_path)) == before


def test_copy_to_writes_the_whole_store_into_one_file(store: Store, tmp_path: Path) -> None:
    put_all(store, QUEUE, *(b"%d" % number for number in range(1000)))
    put_all(store, LEASE, b"x")
    (tmp_path / "copy").write_bytes(b"something longer that was there before" * 10_000)
    store.copy_to(tmp_path / "copy")
    assert all_rows(opened_copy(store, tmp_path / "copy", tmp_path)) == all_rows(store)


def test_a_copy_that_fails_leaves_no_file(store: Store, tmp_path: Path) -> None:
    store.close()
    with pytest.raises(StoreClosed):
        store.copy_to(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def opened_copy(store: Store, copy: Path, scratch: Path) -> Store:
    if store.kind == "memory":
        return MemoryStore(TABLES, source=copy)
    home = scratch / "opened"
    home.mkdir()
    copy.rename(home / "data.mdb")
    return LmdbStore(home, TABLES)


KEYS = st.binary(min_size=1, max_size=3).map(lambda drawn: bytes(byte % 4 for byte in drawn))
VALUES = st.one_of(st.binary(max_size=8), st.integers(1, 20_000).map(lambda size: b"v" * size))
NUMBERS = st.sampled_from(range(len(TABLES)))
OPERATIONS = st.one_of(
    st.tuples(st.sampled_from(["put", "insert", "append"]), NUMBERS, KEYS, VALUES),
    st.tuples(st.sampled_from(["get", "view", "delete"]), NUMBERS, KEYS),
    st.tuples(st.sampled_from(["first", "last", "scan"]), NUMBERS, KEYS | st.just(b""), KEYS | st.just(TOP)),
)


class BothStores(RuleBasedStateMachine):
    """The same operations on both stores give the same answers, errors and rows."""

    @initialize()
    def open(self) -> None:
        self.home = Path(tempfile.mkdtemp())
        self.lmdb = self.opened()
        self.memory = MemoryStore(TABLES)

    def opened(self) -> LmdbStore:
        # The smallest map there is, so that growth happens in the middle of everything else.
        return LmdbStore(self.home, TABLES, initial_map_bytes=1)

    @rule(operations=st.lists(OPERATIONS, max_size=20), abort=st.booleans())
    def transact(self, operations: list[tuple[str, int, bytes, bytes]], abort: bool) -> None:
        assert outcome(self.lmdb, operations, abort) == outcome(self.memory, operations, abort)

    @rule(operations=st.lists(OPERATIONS, max_size=10), looks=st.lists(OPERATIONS, max_size=10))
    def read_beside_a_transaction(
        self,
        operations: list[tuple[str, int, bytes, bytes]],
        looks: list[tuple[str, int, bytes, bytes]],
    ) -> None:
        # The LMDB store may have to grow, for which it would wait for this thread's own reader.
        if self.lmdb.map_bytes() < 16 << 20:
            self.lmdb.close()
            self.lmdb = LmdbStore(self.home, TABLES, initial_map_bytes=64 << 20)
        looks = [look for look in looks if look[0] in ("get", "view", "first", "last", "scan")]
        with self.lmdb.read() as one, self.memory.read() as other:
            assert outcome(self.lmdb, operations, False) == outcome(self.memory, operations, False)
            for look in looks:
                assert perform(one, look) == perform(other, look)

    @rule()
    def reopen(self) -> None:
        self.lmdb.close()
        self.lmdb = self.opened()

    @rule()
    def reopen_from_copies(self) -> None:
        self.lmdb.copy_to(self.home / "copy")
        self.lmdb.close()
        (self.home / "copy").rename(self.home / "data.mdb")
        self.lmdb = self.opened()
        self.memory.copy_to(self.home / "rows")
        self.memory.close()
        self.memory = MemoryStore(TABLES, source=self.home / "rows")

    @invariant()
    def same_rows(self) -> None:
        if hasattr(self, "memory"):
            assert all_rows(self.lmdb) == all_rows(self.memory)

    def teardown(self) -> None:
        if hasattr(self, "memory"):
            self.lmdb.close()
            self.memory.close()
            shutil.rmtree(self.home)


def perform(txn: ReadTxn, operation: tuple[str, int, bytes, bytes]) -> object:
    name, *arguments = operation
    answer = getattr(txn, name)(*arguments)
    if name == "scan":
        return list(answer)
    return bytes(answer) if isinstance(answer, memoryview) else answer


def outcome(store: Store, operations: list[tuple[str, int, bytes, bytes]], abort: bool) -> object:
    answers: list[object] = []

    def work(txn: WriteTxn) -> None:
        answers.clear()
        for operation in operations:
            answers.append(perform(txn, operation))
        if abort:
            raise Stop

    try:
        store.transact(work)
    except (Stop, StoreMisused) as error:
        return answers, type(error)
    return answers, None


# The number of examples is the profile's, so that `make fuzz` draws more.
BothStores.TestCase.settings = settings(stateful_step_count=25, suppress_health_check=[HealthCheck.too_slow])
TestBothStores = pytest.mark.fuzz(pytest.mark.slow(BothStores.TestCase))


# What follows is LMDB's own: files, formats and the map that grows.


def fill(store: Store, row_count: int, size_bytes: int = 1000) -> None:
    def work(txn: WriteTxn) -> None:
        for number in range(row_count):
            txn.put(BATCH, b"%08d" % number, bytes(size_bytes))

    store.transact(work)


def test_rows_survive_closing_and_opening(tmp_path: Path) -> None:
    one = LmdbStore(tmp_path, TABLES)
    put_all(one, QUEUE, b"a")
    put_all(one, LEASE, b"b")
    expected = all_rows(one)
    one.sync()
    one.close()
    again = LmdbStore(tmp_path, TABLES)
    assert all_rows(again) == expected
    again.close()


def test_tables_are_found_by_name_and_new_ones_may_be_added(tmp_path: Path) -> None:
    one = LmdbStore(tmp_path, TABLES)
    put_all(one, QUEUE, b"a")
    one.close()
    again = LmdbStore(tmp_path, ("dead", *reversed(TABLES)))
    with again.read() as txn:
        assert txn.get(3, b"a") == b"value of a"
        assert txn.first(0, b"", TOP) is None
    again.close()


def test_table_names_that_repeat_or_are_reserved_are_refused(tmp_path: Path) -> None:
    for names in (("a", "a"), ("a", "holdfast")):
        with pytest.raises(StoreMisused):
            LmdbStore(tmp_path, names)
    with pytest.raises(StoreMisused):
        MemoryStore(("a", "a"))


def test_a_tiny_map_grows_and_the_work_runs_again_from_the_start(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, TABLES, initial_map_bytes=1)
    assert store.map_bytes() == MIN_MAP_BYTES
    runs: list[int] = []

    def work(txn: WriteTxn) -> int:
        runs.append(len(runs))
        for number in range(3000):
            txn.append(BATCH, b"%08d" % number, bytes(1000))
        return runs[-1]

    assert store.transact(work) == len(runs) - 1 > 0
    assert store.map_bytes() >= 3_000_000
    assert len(all_rows(store)[BATCH]) == 3000
    store.close()


def test_one_value_larger_than_the_doubled_map_fits_after_several_growths(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, TABLES, initial_map_bytes=1)
    store.transact(lambda txn: txn.put(BATCH, b"a", bytes(5 << 20)))
    assert len(all_rows(store)[BATCH][0][1]) == 5 << 20
    store.close()


def test_a_filling_map_grows_before_it_is_full(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, TABLES, initial_map_bytes=4 << 20)
    runs = 0

    def work(txn: WriteTxn) -> None:
        nonlocal runs
        runs += 1
        txn.put(BATCH, b"%08d" % runs, bytes(10_000))

    for _ in range(1000):
        store.transact(work)
    assert runs == 1000  # no run was repeated
    assert store.map_bytes() > 4 << 20
    store.close()


def test_a_store_that_was_closed_nearly_full_opens_with_a_small_map(tmp_path: Path) -> None:
    one = LmdbStore(tmp_path, TABLES, initial_map_bytes=1)
    fill(one, 2000)
    one.close()
    again = LmdbStore(tmp_path, TABLES, initial_map_bytes=1)
    fill(again, 4000)
    assert len(all_rows(again)[BATCH]) == 4000
    again.close()


def test_growth_waits_for_an_open_reader_whose_state_stays_whole(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, TABLES, initial_map_bytes=1, reader_wait_s=60)
    put_all(store, QUEUE, b"a")
    writer = threading.Thread(target=fill, args=(store, 3000))
    with store.read() as txn:
        view = txn.view(QUEUE, b"a")
        assert view is not None
        writer.start()
        for _ in range(2000):
            assert txn.get(QUEUE, b"a") == b"value of a"
            assert txn.first(BATCH, b"", TOP) is None
        assert bytes(view) == b"value of a"
        # Three megabytes do not fit, so the writer cannot be done before this block is.
        assert writer.is_alive()
    writer.join()
    assert len(all_rows(store)[BATCH]) == 3000
    store.close()


def test_a_reader_that_never_ends_makes_growth_fail_with_a_typed_error(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, TABLES, initial_map_bytes=1, reader_wait_s=0)
    put_all(store, QUEUE, b"a")
    with store.read() as txn:
        with pytest.raises(StoreBusy):
            fill(store, 3000)
        assert txn.get(QUEUE, b"a") == b"value of a"
        with pytest.raises(StoreBusy):
            store.close()
    fill(store, 3000)
    store.close()


def test_readers_and_syncs_on_other_threads_survive_growths(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, TABLES, initial_map_bytes=1, reader_wait_s=60)
    put_all(store, QUEUE, b"a")
    filled = threading.Event()
    failures: list[BaseException] = []

    def beside(call: Callable[[], object]) -> None:
        try:
            for _ in range(10):  # bounded: a slow disk must not make this test slow
                call()
                if filled.is_set():
                    break
        except BaseException as failure:
            failures.append(failure)

    calls: list[Callable[[], object]] = [
        lambda: all_rows(store)[QUEUE],
        store.sync,
        store.used_bytes,
        lambda: store.copy_to(tmp_path / "copy"),
    ]
    threads = [threading.Thread(target=beside, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    try:
        for row_count in range(500, 4000, 500):
            fill(store, row_count)
    finally:
        filled.set()
        for thread in threads:
            thread.join()
    assert failures == []
    store.close()


def test_a_map_at_its_limit_is_full(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, TABLES, initial_map_bytes=1, max_map_bytes=1 << 20)
    fill(store, 300)
    with pytest.raises(StoreFull):
        fill(store, 3000)
    assert len(all_rows(store)[BATCH]) == 300
    assert store.file_bytes() <= store.map_bytes() == 1 << 20
    store.close()


def test_lmdb_errors_inside_a_transaction_abort_it_and_are_translated(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, TABLES)
    put_all(store, QUEUE, b"a")

    def work(txn: WriteTxn) -> None:
        txn.put(QUEUE, b"a", b"changed")
        raise lmdb.CorruptedError("page")

    with pytest.raises(StoreDamaged):
        store.transact(work)
    with pytest.raises(StoreError), store.read() as txn:
        assert txn.get(QUEUE, b"a") == b"value of a"
        raise lmdb.Error("any other")
    store.close()


def test_another_format_version_is_refused_with_both_versions(tmp_path: Path) -> None:
    LmdbStore(tmp_path, TABLES).close()
    rewrite_format(tmp_path, struct.pack(">8sI", b"HFSTORE\n", FORMAT_VERSION + 6))
    with pytest.raises(StoreFormatUnknown) as refused:
        LmdbStore(tmp_path, TABLES)
    assert (refused.value.found, refused.value.supported) == (FORMAT_VERSION + 6, FORMAT_VERSION)
    rewrite_format(tmp_path, struct.pack(">8sI", b"HFSTORE\n", FORMAT_VERSION))
    LmdbStore(tmp_path, TABLES).close()


@pytest.mark.parametrize("row", [b"", b"HFSTORE\n", struct.pack(">8sI", b"SOMEBODY", 1)])
def test_another_magic_is_refused(tmp_path: Path, row: bytes) -> None:
    LmdbStore(tmp_path, TABLES).close()
    rewrite_format(tmp_path, row)
    with pytest.raises(StoreFormatUnknown) as refused:
        LmdbStore(tmp_path, TABLES)
    assert refused.value.found is None


def rewrite_format(directory: Path, row: bytes) -> None:
    env = lmdb.open(str(directory), max_dbs=8)
    with env.begin(write=True) as txn:
        txn.put(b"format", row, db=env.open_db(b"holdfast", txn=txn))
    env.close()


def test_another_programs_lmdb_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    for name in (b"theirs", b"holdfast"):
        home = tmp_path / name.decode()
        env = lmdb.open(str(home))
        with env.begin(write=True) as txn:
            txn.put(name, b"a plain row")
        env.close()
        before = (home / "data.mdb").read_bytes()
        with pytest.raises(StoreFormatUnknown):
            LmdbStore(home, TABLES)
        assert (home / "data.mdb").read_bytes() == before


@pytest.mark.parametrize("content", [b"not a database", b"not a database" * 2000])
def test_a_file_that_is_no_lmdb_is_refused_and_left_as_it_was(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "data.mdb").write_bytes(content)
    with pytest.raises(StoreError):
        LmdbStore(tmp_path, TABLES)
    assert (tmp_path / "data.mdb").read_bytes() == content


@pytest.mark.parametrize("size_bytes", [0, 1, 15, 20, 100, 4096, 8191])
def test_a_creation_that_was_cut_off_is_completed(tmp_path: Path, size_bytes: int) -> None:
    lmdb.open(str(tmp_path / "whole")).close()
    home = tmp_path / "half"
    home.mkdir()
    (home / "data.mdb").write_bytes((tmp_path / "whole" / "data.mdb").read_bytes()[:size_bytes])
    store = LmdbStore(home, TABLES)
    put_all(store, QUEUE, b"a")
    store.close()
    again = LmdbStore(home, TABLES)
    assert all_rows(again)[QUEUE] == [(b"a", b"value of a")]
    again.close()


def test_an_environment_without_its_first_row_is_completed(tmp_path: Path) -> None:
    lmdb.open(str(tmp_path)).close()
    store = LmdbStore(tmp_path, TABLES)
    put_all(store, QUEUE, b"a")
    store.close()


def test_opening_a_store_twice_in_one_process_is_refused(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, TABLES)
    with pytest.raises(StoreError):
        LmdbStore(tmp_path, TABLES)
    store.close()


@pytest.mark.parametrize("kept", [0, 10, 30, -9, -1])
def test_a_dump_that_was_cut_off_is_refused(tmp_path: Path, kept: int) -> None:
    store = MemoryStore(TABLES)
    put_all(store, QUEUE, b"a", b"b")
    store.copy_to(tmp_path / "rows")
    whole = (tmp_path / "rows").read_bytes()
    (tmp_path / "rows").write_bytes(whole[:kept])
    with pytest.raises(StoreDamaged):
        MemoryStore(TABLES, source=tmp_path / "rows")
    (tmp_path / "rows").write_bytes(b"SOMEBODY" + whole[8:])
    with pytest.raises(StoreFormatUnknown):
        MemoryStore(TABLES, source=tmp_path / "rows")
