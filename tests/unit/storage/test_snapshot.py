"""Snapshots: what comes back, what is refused, and what a crash in the middle leaves."""

import os
import random
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.storage import lmdb_store, memory_store, snapshot
from holdfast.storage.lmdb_store import LmdbStore
from holdfast.storage.memory_store import DUMP_FILE, MemoryStore
from holdfast.storage.snapshot import (
    CHUNK_BYTES,
    MAX_META_BYTES,
    SnapshotDamaged,
    SnapshotHeader,
    install_snapshot,
    read_snapshot_header,
    read_snapshot_meta,
    verify_snapshot,
    write_snapshot,
)
from holdfast.storage.store import ReadTxn, Store, StoreClosed, StoreFormatUnknown, StoreMisused, WriteTxn

TABLES = ("queue", "batch")
TOP = b"\xff" * 512
SEED = 20


class Crash(BaseException):
    """The process ends here: no handler of ours runs after it, as none would."""


@pytest.fixture(params=["lmdb", "memory"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def opened(kind: str, home: Path) -> Store:
    if kind == "lmdb":
        return LmdbStore(home, TABLES)
    source = home / DUMP_FILE
    return MemoryStore(TABLES, source=source if source.exists() else None)


def fill(store: Store, label: bytes, row_count: int, size_bytes: int = 100) -> None:
    drawn = random.Random(SEED)

    def work(txn: WriteTxn) -> None:
        txn.put(0, b"label", label)
        for number in range(row_count):
            txn.put(1, b"%08d" % number, drawn.randbytes(size_bytes))

    store.transact(work)


def rows_of(txn: ReadTxn) -> list[list[tuple[bytes, bytes]]]:
    return [list(txn.scan(table, b"", TOP)) for table in range(len(TABLES))]


def rows(store: Store) -> list[list[tuple[bytes, bytes]]]:
    with store.read() as txn:
        return rows_of(txn)


def rows_at(kind: str, home: Path) -> list[list[tuple[bytes, bytes]]]:
    store = opened(kind, home)
    found = rows(store)
    store.close()
    return found


def written(kind: str, tmp_path: Path, label: bytes = b"new", row_count: int = 50) -> Path:
    """A snapshot of a store with `row_count` rows, and nothing else left of that store."""
    store = opened(kind, tmp_path / f"source of {label.decode()}")
    fill(store, label, row_count)
    path = tmp_path / f"{label.decode()}.snapshot"
    write_snapshot(store, path, b"meta of " + label)
    store.close()
    return path


@pytest.mark.parametrize("row_count", [0, 1, 500])
def test_a_snapshot_brings_back_every_row_and_its_meta(kind: str, tmp_path: Path, row_count: int) -> None:
    store = opened(kind, tmp_path / "one")
    fill(store, b"label", row_count, size_bytes=5000)
    path = tmp_path / "snapshot"
    header = write_snapshot(store, path, b"index 7")
    assert header == SnapshotHeader(kind=kind, meta=b"index 7", payload_bytes=header.payload_bytes)
    assert verify_snapshot(path) == read_snapshot_header(path) == header
    assert read_snapshot_meta(path) == b"index 7"
    assert install_snapshot(path, tmp_path / "deep" / "two", kind=kind) == header
    assert rows_at(kind, tmp_path / "deep" / "two") == rows(store)
    store.close()


def test_an_installed_store_goes_on_from_the_snapshot(kind: str, tmp_path: Path) -> None:
    path = written(kind, tmp_path)
    old = opened(kind, tmp_path / "home")
    for number in range(100):  # more transactions than the snapshot's store ever had
        fill(old, b"old %d" % number, 3)
    old.close()
    install_snapshot(path, tmp_path / "home", kind=kind)
    store = opened(kind, tmp_path / "home")
    assert rows(store)[0] == [(b"label", b"new")]
    fill(store, b"after", 60)
    assert rows(store)[0] == [(b"label", b"after")]
    store.close()


def test_meta_may_be_taken_from_the_very_state_that_is_written(kind: str, tmp_path: Path) -> None:
    store = opened(kind, tmp_path / "one")
    fill(store, b"before", 10)

    def meta(txn: ReadTxn) -> bytes:
        writer = threading.Thread(target=fill, args=(store, b"after", 10))
        writer.start()
        writer.join()
        return txn.get(0, b"label") or b""

    header = write_snapshot(store, tmp_path / "snapshot", meta)
    assert header.meta == b"before"
    install_snapshot(tmp_path / "snapshot", tmp_path / "two", kind=kind)
    assert rows_at(kind, tmp_path / "two")[0] == [(b"label", b"before")]
    assert rows(store)[0] == [(b"label", b"after")]
    store.close()


def test_a_snapshot_beside_writes_holds_one_state(kind: str, tmp_path: Path) -> None:
    store = opened(kind, tmp_path / "one")
    fill(store, b"0", 200, size_bytes=5000)
    done = threading.Event()

    def write() -> None:
        number = 0
        while not done.is_set():
            number += 1
            value = b"%d" % number

            def both(txn: WriteTxn, value: bytes = value) -> None:
                txn.put(0, b"label", value)
                txn.put(1, b"last", value)

            store.transact(both)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(5):
            write_snapshot(store, tmp_path / "snapshot", b"")
    finally:
        done.set()
        writer.join()
    install_snapshot(tmp_path / "snapshot", tmp_path / "two", kind=kind)
    found = rows_at(kind, tmp_path / "two")
    assert found[0] == [(b"label", dict(found[1]).get(b"last", b"0"))]
    store.close()


def test_writing_replaces_an_older_snapshot_and_its_leftover(kind: str, tmp_path: Path) -> None:
    path = written(kind, tmp_path)
    path.with_name(path.name + ".partial").write_bytes(b"x" * 10_000_000)
    store = opened(kind, tmp_path / "other")
    write_snapshot(store, path, b"second")
    assert verify_snapshot(path).meta == b"second"
    assert not path.with_name(path.name + ".partial").exists()
    store.close()


def test_a_copy_that_fails_leaves_the_older_snapshot_and_nothing_else(kind: str, tmp_path: Path) -> None:
    path = written(kind, tmp_path)
    before = path.read_bytes()
    store = opened(kind, tmp_path / "other")

    def meta(txn: ReadTxn) -> bytes:
        raise ZeroDivisionError

    for bad, error in ((meta, ZeroDivisionError), (bytes(MAX_META_BYTES + 1), StoreMisused)):
        with pytest.raises(error):
            write_snapshot(store, path, bad)
    store.close()
    with pytest.raises(StoreClosed):
        write_snapshot(store, path, b"")
    assert path.read_bytes() == before
    assert not list(tmp_path.glob("*.partial"))


def test_a_disk_that_fills_up_ends_the_copy_and_is_reported_as_itself(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(kind, tmp_path / "one")
    fill(store, b"large", 1000, size_bytes=5000)

    def full(chunk: memoryview, number: int) -> bytes:
        if number == 2:
            raise OSError(28, "No space left on device")
        return checksum(chunk, number)

    checksum = snapshot._checksum
    monkeypatch.setattr(snapshot, "_checksum", full)
    threads = threading.active_count()
    with pytest.raises(OSError, match="No space left"):
        write_snapshot(store, tmp_path / "snapshot", b"")
    assert threading.active_count() == threads
    assert not list(tmp_path.glob("snapshot*"))
    fill(store, b"still works", 10)
    store.close()


def test_every_flipped_byte_is_refused_and_leaves_the_old_store(kind: str, tmp_path: Path) -> None:
    path = written(kind, tmp_path)
    whole = path.read_bytes()
    home = tmp_path / "home"
    old = opened_with(kind, home, b"old")
    drawn = random.Random(SEED)
    edges = [*range(60), *range(len(whole) - 60, len(whole))]
    for position in sorted({*edges, *drawn.sample(range(len(whole)), 150)}):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << drawn.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises((SnapshotDamaged, StoreFormatUnknown)) as refused:
            verify_snapshot(path)
        if isinstance(refused.value, SnapshotDamaged):
            assert refused.value.offset <= position
        else:
            assert 8 <= position < 10  # the version's own bytes
        with pytest.raises((SnapshotDamaged, StoreFormatUnknown)):
            install_snapshot(path, home, kind=kind)
        assert not list(home.glob("*.incoming"))
    assert rows_at(kind, home) == old


def test_every_truncation_and_every_addition_is_refused(kind: str, tmp_path: Path) -> None:
    path = written(kind, tmp_path)
    whole = path.read_bytes()
    drawn = random.Random(SEED)
    edges = [*range(80), *range(len(whole) - 80, len(whole))]
    for size_bytes in sorted({*edges, *drawn.sample(range(len(whole)), 150)}):
        path.write_bytes(whole[:size_bytes])
        with pytest.raises(SnapshotDamaged) as refused:
            verify_snapshot(path)
        assert refused.value.offset <= size_bytes
    path.write_bytes(whole + b"\x00")
    with pytest.raises(SnapshotDamaged) as refused:
        verify_snapshot(path)
    assert refused.value.offset == len(whole)


def test_a_store_of_another_format_is_refused_and_leaves_the_old_one(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The container is ours and whole, but what is in it could not be opened: nothing is replaced by it."""
    home = tmp_path / "home"
    old = opened_with(kind, home, b"old")
    module = lmdb_store if kind == "lmdb" else memory_store
    with monkeypatch.context() as patch:
        patch.setattr(module, "FORMAT_VERSION", 2)
        path = written(kind, tmp_path)
    verify_snapshot(path)
    with pytest.raises(StoreFormatUnknown) as refused:
        install_snapshot(path, home, kind=kind)
    assert (refused.value.found, refused.value.supported) == (2, 1)
    assert rows_at(kind, home) == old
    assert not [left for left in home.iterdir() if "incoming" in left.name]
    install_snapshot(written(kind, tmp_path, b"newer"), home, kind=kind)
    assert rows_at(kind, home)[0] == [(b"label", b"newer")]


def test_damage_is_named_by_the_offset_of_its_chunk(kind: str, tmp_path: Path) -> None:
    store = opened(kind, tmp_path / "one")
    fill(store, b"large", 800, size_bytes=5000)
    path = tmp_path / "snapshot"
    write_snapshot(store, path, b"m")
    store.close()
    whole = path.read_bytes()
    start = 24 + 1 + 16
    second = start + CHUNK_BYTES + 16
    damaged = bytearray(whole)
    damaged[second + 12345] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(SnapshotDamaged) as refused:
        verify_snapshot(path)
    assert refused.value.offset == second
    # Two whole chunks, each right by itself, in each other's place.
    piece = CHUNK_BYTES + 16
    path.write_bytes(whole[:start] + whole[second : second + piece] + whole[start:second] + whole[second + piece :])
    with pytest.raises(SnapshotDamaged) as refused:
        verify_snapshot(path)
    assert refused.value.offset == start


def test_another_version_is_refused_with_both_versions(kind: str, tmp_path: Path) -> None:
    path = written(kind, tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:8] + (9).to_bytes(2) + whole[10:])
    with pytest.raises(StoreFormatUnknown) as refused:
        read_snapshot_meta(path)
    assert (refused.value.found, refused.value.supported) == (9, snapshot.FORMAT_VERSION)


def test_a_snapshot_of_the_other_kind_is_refused(kind: str, tmp_path: Path) -> None:
    path = written(kind, tmp_path)
    other = "memory" if kind == "lmdb" else "lmdb"
    with pytest.raises(StoreMisused):
        install_snapshot(path, tmp_path / "home", kind=other)
    assert os.listdir(tmp_path / "home") == []


def opened_with(kind: str, home: Path, label: bytes) -> list[list[tuple[bytes, bytes]]]:
    """Leave a closed store with that label in `home`; return its rows."""
    install_snapshot(written(kind, home.parent, label, row_count=20), home, kind=kind)
    return rows_at(kind, home)


def steps_of(call: Callable[[Callable[[str], None]], object]) -> list[str]:
    names: list[str] = []
    call(names.append)
    return names


def test_a_crash_at_any_step_of_installing_leaves_the_old_or_the_new_store(kind: str, tmp_path: Path) -> None:
    path = written(kind, tmp_path, b"new", row_count=20_000)
    new = rows_at_installed(kind, path, tmp_path / "reference")
    steps = steps_of(lambda step: install_snapshot(path, tmp_path / "count", kind=kind, step=step))
    assert steps == ["cleaned", "created", *["chunk"] * steps.count("chunk"), "written", "synced", "swapped", "done"]
    assert steps.count("chunk") >= 2
    for number, name in enumerate(steps):
        home = tmp_path / f"home {number}" / "store"
        home.parent.mkdir()
        old = opened_with(kind, home, b"old")
        reached: list[str] = []

        def crash(step: str, reached: list[str] = reached, number: int = number) -> None:
            reached.append(step)
            if len(reached) == number + 1:
                raise Crash

        with pytest.raises(Crash):
            install_snapshot(path, home, kind=kind, step=crash)
        assert rows_at(kind, home) == (new if name in ("swapped", "done") else old)
        # The next call finds whatever the crash left, and finishes.
        install_snapshot(path, home, kind=kind)
        assert rows_at(kind, home) == new
        assert not list(home.glob("*.incoming"))


def rows_at_installed(kind: str, path: Path, home: Path) -> list[list[tuple[bytes, bytes]]]:
    install_snapshot(path, home, kind=kind)
    return rows_at(kind, home)


def test_memory_stays_bounded_by_a_few_chunks(tmp_path: Path) -> None:
    store = opened("lmdb", tmp_path / "one")
    fill(store, b"large", 64, size_bytes=1 << 20)
    path = tmp_path / "snapshot"

    def peak(call: Callable[[], object]) -> int:
        tracemalloc.start()
        call()
        highest = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return highest

    assert peak(lambda: write_snapshot(store, path, b"")) < 4 * CHUNK_BYTES
    assert path.stat().st_size > 60 * CHUNK_BYTES
    assert peak(lambda: verify_snapshot(path)) < 4 * CHUNK_BYTES
    assert peak(lambda: install_snapshot(path, tmp_path / "two")) < 4 * CHUNK_BYTES
    store.close()
