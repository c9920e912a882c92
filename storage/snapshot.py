"""The whole state as one file, and back: how a snapshot looks on disk and how it replaces a store.

The rule that keeps it honest: a name is given only to what is whole and fsynced. A snapshot gets its name
after its last byte is on disk, a store is replaced after every byte of the snapshot was checked, and both
happen by one rename.

    header    magic, version, kind of store, length of meta, size of payload; meta; checksum of all that
    payload   what `Store.copy_into` writes, in chunks of 1 MiB, each followed by its checksum
    trailer   magic, checksum of all chunks' checksums and the header

Checksums are xxh3-128. A chunk's is seeded with its number, so two chunks that changed places are found too.
"""

import contextlib
import fcntl
import os
import struct
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from io import BufferedReader
from os import PathLike
from pathlib import Path
from threading import Thread
from typing import BinaryIO, Final

import xxhash

from holdfast.storage import lmdb_store, memory_store
from holdfast.storage.store import ReadTxn, Store, StoreDamaged, StoreFormatUnknown, StoreMisused

FORMAT_VERSION: Final = 1
CHUNK_BYTES: Final = 1 << 20
MAX_META_BYTES: Final = 1 << 20  # an index, a term, a membership; a damaged length allocates no more

_MAGIC: Final = b"HFSNAP\r\n"
_TRAILER_MAGIC: Final = b"HFSNEND\n"
_HEAD: Final = struct.Struct(">8sHHIQ")  # magic, version, kind, meta bytes, payload bytes
_CHECKSUM_BYTES: Final = 16
_TRAILER_BYTES: Final = len(_TRAILER_MAGIC) + _CHECKSUM_BYTES

_KIND_NUMBER: Final = {"lmdb": 1, "memory": 2}
_KIND_NAME: Final = {number: name for name, number in _KIND_NUMBER.items()}
_STORE_FILE: Final = {"lmdb": "data.mdb", "memory": "rows.dump"}  # one file is the whole store
_CHECK_FILE: Final = {"lmdb": lmdb_store.check_file, "memory": memory_store.check_file}


class SnapshotDamaged(StoreDamaged):
    """The snapshot is not what was written; `offset` is where the first damaged piece begins."""

    def __init__(self, path: str | PathLike[str], offset: int, what: str) -> None:
        super().__init__(f"{os.fspath(path)} at byte {offset}: {what}")
        self.offset = offset


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotHeader:
    """What a snapshot says of itself."""

    kind: str
    meta: bytes
    payload_bytes: int


def write_snapshot(store: Store, path: str | PathLike[str], meta: bytes | Callable[[ReadTxn], bytes]) -> SnapshotHeader:
    """Write the store's present state to `path`, which is absent or as before until the snapshot is whole.

    A callable `meta` is given the very state that is written, so an index in it cannot be ahead or behind.
    Meant for a worker thread; writes to the store go on meanwhile. An `OSError` such as a full disk is passed
    on.
    """
    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    try:
        with partial.open("w+b") as file:
            header = _write_container(store, file, meta)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(target)
    except Exception:
        partial.unlink(missing_ok=True)
        raise
    _sync_directory(target.parent)
    return header


def read_snapshot_header(path: str | PathLike[str]) -> SnapshotHeader:
    """Kind, meta and size, with the header's checksum verified and the payload not looked at."""
    with open(path, "rb") as file:
        return _Reader(file, path).header


def read_snapshot_meta(path: str | PathLike[str]) -> bytes:
    """The meta that the snapshot was written with; the payload is not looked at."""
    return read_snapshot_header(path).meta


def verify_snapshot(path: str | PathLike[str]) -> SnapshotHeader:
    """Read every byte in chunks; raise `SnapshotDamaged` at the first that is wrong."""
    with open(path, "rb") as file:
        reader = _Reader(file, path)
        for _ in reader.chunks():
            pass
        return reader.header


def _no_step(name: str) -> None:
    pass


def install_snapshot(
    path: str | PathLike[str],
    directory: str | PathLike[str],
    *,
    kind: str = "lmdb",
    step: Callable[[str], None] = _no_step,
) -> SnapshotHeader:
    """Replace the closed store in `directory` by the snapshot's; a crash leaves the old or the new one.

    Nothing of the old store is touched until every byte of the snapshot was checked, and the format of the store
    in it: one that could not be opened is refused with `StoreFormatUnknown`. What an earlier call left behind is
    removed first. `step` is told the name of each step after it was done.
    """
    home = Path(directory)
    current = home / _STORE_FILE[kind]
    incoming = current.with_name(current.name + ".incoming")
    if not home.is_dir():
        home.mkdir(parents=True)
        _sync_directory(home.parent)
    incoming.unlink(missing_ok=True)
    step("cleaned")
    try:
        with open(path, "rb") as file, incoming.open("xb") as built:
            reader = _Reader(file, path)
            if reader.header.kind != kind:
                raise StoreMisused(f"{os.fspath(path)} holds a {reader.header.kind} store, wanted {kind}")
            step("created")
            for chunk in reader.chunks():
                built.write(chunk)
                step("chunk")
            built.flush()
            step("written")
            os.fsync(built.fileno())
        step("synced")
        _CHECK_FILE[kind](incoming)  # whole, but perhaps of another version: what cannot be opened replaces nothing
        # One file is the whole store, so one rename replaces it: there is no moment with neither. A lock file
        # that stays behind is begun afresh by LMDB when nobody else has the store open.
        incoming.rename(current)
    except Exception:
        incoming.unlink(missing_ok=True)
        raise
    step("swapped")
    _sync_directory(home)
    step("done")
    return reader.header


def _write_container(store: Store, file: BinaryIO, meta: bytes | Callable[[ReadTxn], bytes]) -> SnapshotHeader:
    known: list[bytes] = []

    def started(txn: ReadTxn) -> None:
        known.append(meta(txn) if callable(meta) else meta)
        if len(known[0]) > MAX_META_BYTES:
            raise StoreMisused(f"meta has {len(known[0])} bytes, at most {MAX_META_BYTES} fit")

    # The store writes into a pipe and this thread reads it, so the state crosses the disk once, not twice.
    # The first byte comes after `started`, so meta is known when a chunk is.
    payload_bytes = 0
    whole = xxhash.xxh3_128()
    with contextlib.closing(_piped(store, started)) as chunks:
        for number, chunk in enumerate(chunks):
            if number == 0:
                file.write(_header(store.kind, known[0], 0))
            checksum = _checksum(chunk, number)
            whole.update(checksum)
            file.write(chunk)
            file.write(checksum)
            payload_bytes += len(chunk)
    header = _header(store.kind, known[0], payload_bytes)
    whole.update(header)
    file.write(_TRAILER_MAGIC + whole.digest())
    # First in the file and last in time: only now is the payload's size known. The file has no name yet.
    file.seek(0)
    file.write(header)
    return SnapshotHeader(kind=store.kind, meta=known[0], payload_bytes=payload_bytes)


def _piped(store: Store, started: Callable[[ReadTxn], None]) -> Generator[memoryview, None, None]:
    """What `store.copy_into` writes or raises; a chunk is overwritten by the next."""
    outlet, inlet = os.pipe()
    failures: list[BaseException] = []

    def copy() -> None:
        try:
            store.copy_into(inlet, started)
        except BaseException as failure:  # carried to the thread that asked for the copy
            failures.append(failure)
        finally:
            os.close(inlet)

    copier = Thread(target=copy, name="snapshot-copy")
    try:
        with contextlib.suppress(OSError, AttributeError):  # Linux only: fewer, larger reads
            fcntl.fcntl(inlet, fcntl.F_SETPIPE_SZ, CHUNK_BYTES)
        copier.start()
        buffer = memoryview(bytearray(CHUNK_BYTES))
        while filled := _fill(outlet, buffer):
            yield buffer[:filled]
    finally:
        # Closing the outlet first ends a copy that nobody reads any more.
        os.close(outlet)
        copier.join()
    if failures:
        raise failures[0]


def _fill(descriptor: int, buffer: memoryview) -> int:
    filled = 0
    while filled < len(buffer) and (got := os.readv(descriptor, [buffer[filled:]])):
        filled += got
    return filled


class _Reader:
    """A snapshot read front to back; holds one chunk at a time."""

    def __init__(self, file: BufferedReader, path: str | PathLike[str]) -> None:
        """Read and check the header, and the file's size against what the header says."""
        self._file = file
        self._path = path
        head = file.read(_HEAD.size)
        if len(head) != _HEAD.size:
            raise SnapshotDamaged(path, len(head), "ends inside its header")
        magic, version, kind, meta_bytes, payload_bytes = _HEAD.unpack(head)
        if magic != _MAGIC:
            raise SnapshotDamaged(path, 0, "does not begin as a snapshot does")
        if version != FORMAT_VERSION:
            raise StoreFormatUnknown(os.fspath(path), found=version, supported=FORMAT_VERSION)
        if meta_bytes > MAX_META_BYTES:
            raise SnapshotDamaged(path, 0, f"names {meta_bytes} bytes of meta")
        meta = file.read(meta_bytes)
        self._header_bytes = head + meta + file.read(_CHECKSUM_BYTES)
        if kind not in _KIND_NAME or self._header_bytes != _header(_KIND_NAME[kind], meta, payload_bytes):
            raise SnapshotDamaged(path, 0, "the header's checksum differs")
        self.header = SnapshotHeader(kind=_KIND_NAME[kind], meta=meta, payload_bytes=payload_bytes)
        self._check_size()

    def chunks(self) -> Iterator[memoryview]:
        """The payload; each chunk is checked before it is given, the trailer before the end. Call once."""
        whole = xxhash.xxh3_128()
        offset = len(self._header_bytes)
        left = self.header.payload_bytes
        number = 0
        buffer = memoryview(bytearray(min(CHUNK_BYTES, left)))
        while left:
            chunk = buffer[: min(CHUNK_BYTES, left)]
            self._file.readinto(chunk)
            checksum = self._file.read(_CHECKSUM_BYTES)
            if checksum != _checksum(chunk, number):
                raise SnapshotDamaged(self._path, offset, f"chunk {number} has another checksum")
            whole.update(checksum)
            yield chunk
            left -= len(chunk)
            offset += len(chunk) + _CHECKSUM_BYTES
            number += 1
        whole.update(self._header_bytes)
        if self._file.read(_TRAILER_BYTES + 1) != _TRAILER_MAGIC + whole.digest():
            raise SnapshotDamaged(self._path, offset, "the trailer differs")

    def _check_size(self) -> None:
        payload_bytes = self.header.payload_bytes
        chunk_count = -(-payload_bytes // CHUNK_BYTES)
        expected = len(self._header_bytes) + payload_bytes + chunk_count * _CHECKSUM_BYTES + _TRAILER_BYTES
        actual = os.fstat(self._file.fileno()).st_size
        if actual != expected:
            raise SnapshotDamaged(
                self._path, min(actual, expected), f"has {actual} bytes where {expected} were written"
            )


def _header(kind: str, meta: bytes, payload_bytes: int) -> bytes:
    plain = _HEAD.pack(_MAGIC, FORMAT_VERSION, _KIND_NUMBER[kind], len(meta), payload_bytes) + meta
    return plain + xxhash.xxh3_128_digest(plain)


def _checksum(chunk: memoryview, number: int) -> bytes:
    return xxhash.xxh3_128_digest(chunk, seed=number)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
