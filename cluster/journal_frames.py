"""The bytes of a journal's files: headers, frames and the records inside, made and read. One place for the format.

    segment   header, opening frame, frames, zeros ahead of the writer
    header    magic, version, size; segment number, incarnation, cluster id, node name; CRC32 of all that
    frame     magic, CRC32 of number and size, CRC32 of number, size and records, flush number, size, records; both
              begin with the header's CRC32, so that no message can contain a frame that would be believed
    opening   a frame with the number of the flush before it: base, terms and standing, so that older ones can go
    record    kind, two numbers, size, payload: see `journal.py`

What a bad frame means is not decided here: it is no frame, and `journal_recovery.py` knows whether one was due.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple
from zlib import crc32

from holdfast.cluster.disk import File
from holdfast.cluster.journal import (
    BASE,
    ENTRY,
    RECORD,
    RESET,
    RUN,
    RUNS,
    STANDING,
    TRUNCATE,
    Entry,
    JournalBroken,
    Outline,
    Promise,
    Recovered,
    stamp_of,
)
from holdfast.cluster.journal_errors import JournalRefused, JournalUnreadable, damaged

FORMAT_VERSION: Final = 1
READ_BYTES: Final = 1 << 20
BLOCK_BYTES: Final = 4096  # what is passed over where the disk cannot read: a page, for it is read as a whole

_MAGIC: Final = b"HFJRNL\r\n"
_HEADER: Final = struct.Struct("<8sHHQQHH")  # magic, version, size, segment, incarnation, bytes of cluster and node
_VERSION: Final = struct.Struct("<H")
_FRAME_MAGIC: Final = b"\xf5HfJ"  # 0xf5 is in no UTF-8 text: the search for frames meets few that are none
_FRAME: Final = struct.Struct("<4sIIQI")  # magic, checksum of the two numbers, of all, flush number, bytes of records
_COVERED: Final = struct.Struct("<QI")
_CHECKSUM: Final = struct.Struct("<I")
HEAD_BYTES: Final = _FRAME.size  # what a frame has before its records


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Whose journal it is: a disk that comes back under another name, or emptied, must not pass for it (R24)."""

    cluster_id: str
    node: str
    incarnation: int


def header_bytes(identity: Identity, number: int) -> bytes:
    """With which segment `number` of this journal begins."""
    cluster, node = identity.cluster_id.encode(), identity.node.encode()
    size = _HEADER.size + len(cluster) + len(node) + _CHECKSUM.size
    counts = (size, number, identity.incarnation, len(cluster), len(node))
    plain = _HEADER.pack(_MAGIC, FORMAT_VERSION, *counts) + cluster + node
    return plain + _CHECKSUM.pack(crc32(plain))


def read_header(file: File, path: str) -> tuple[Identity, int, int]:
    """Identity, segment number and the header's size. `JournalDamaged`, or `JournalRefused` for another format."""
    fixed = _read(file, path, _HEADER.size, 0)
    if len(fixed) < _HEADER.size or fixed[: len(_MAGIC)] != _MAGIC:
        raise damaged(path, 0, "does not begin as a segment does")
    _, version, size, number, incarnation, cluster_bytes, node_bytes = _HEADER.unpack(fixed)
    names = _read(file, path, cluster_bytes + node_bytes, _HEADER.size)
    problem = ""
    try:
        cluster, node = names[:cluster_bytes].decode(), names[cluster_bytes:].decode()
        identity = Identity(cluster_id=cluster, node=node, incarnation=incarnation)
        # As it was written, but for the version: that of a rotten header of ours is judged below.
        if _with_our_version(_read(file, path, size, 0)) != header_bytes(identity, number):
            problem = "the header's checksum differs"
    except UnicodeDecodeError:
        problem = "the header's names are damaged"
    if version != FORMAT_VERSION:
        if problem:
            raise JournalRefused(
                f"{path} has format {version}; this program reads {FORMAT_VERSION}: use the one that wrote it"
            )
        problem = f"the header's version is damaged, it reads {version}"
    if problem:
        raise damaged(path, 0, problem)
    return identity, number, size


def _with_our_version(header: bytes) -> bytes:
    return header[: len(_MAGIC)] + _VERSION.pack(FORMAT_VERSION) + header[len(_MAGIC) + _VERSION.size :]


def _read(file: File, path: str, size: int, offset: int) -> bytes:
    try:
        return file.pread(size, offset)
    except OSError as failure:
        raise JournalUnreadable(path=path, offset=offset, problem=f"reading failed: {failure}") from failure


def salt_of(identity: Identity, number: int) -> int:
    """The header's checksum, with which those of its frames begin."""
    salt: int = _CHECKSUM.unpack(header_bytes(identity, number)[-_CHECKSUM.size :])[0]
    return salt


def frame_bytes(salt: int, number: int, records: bytes) -> bytes:
    """Flush `number` as it is written."""
    size = len(records)
    head_checksum = crc32(_COVERED.pack(number, size), salt)
    return _FRAME.pack(_FRAME_MAGIC, head_checksum, crc32(records, head_checksum), number, size) + records


class Found(NamedTuple):
    """A good head; `records` are None if they are not as good."""

    offset: int
    number: int
    records: bytes | None


class FrameReader:
    """Frames of one file, read through a buffer of bounded size. `JournalUnreadable` where the disk fails."""

    def __init__(self, file: File, salt: int, path: str) -> None:
        self.skipped_at = -1  # the last place that a search could not read and passed over
        self._file = file
        self._salt = salt
        self._path = path
        self._buffer = b""
        self._start = 0
        self._careful_until = 0  # before this no byte more is read than is needed: one ahead is unreadable

    def frame(self, offset: int) -> tuple[int, bytes] | None:
        """Flush number and records of the frame at `offset`, or None if no good one is there."""
        head = self._head(offset)
        if head is None:
            return None
        head_checksum, checksum, number, size = head
        records = self._bytes(size, offset + _FRAME.size)
        if len(records) < size or crc32(records, head_checksum) != checksum:
            return None
        return number, records

    def search(self, offset: int, *, skipping: bool = False) -> Iterator[Found]:
        """Every good head from `offset` on, wherever it begins: a flush of that number was at least begun.

        With `skipping`, blocks that cannot be read are passed over, and `skipped_at` tells the last of them.
        """
        size = self._file.size()
        while offset < size:
            try:
                chunk = self._chunk(offset)
            except JournalUnreadable:
                if not skipping:
                    raise
                self.skipped_at = offset
                offset += BLOCK_BYTES - offset % BLOCK_BYTES
                continue
            passed = max(1, len(chunk) - len(_FRAME_MAGIC) + 1)
            at = chunk.find(_FRAME_MAGIC)
            while at >= 0:
                found = self._found(offset + at, skipping)
                if found is not None:
                    yield found
                    if found.records is not None:
                        passed = at + _FRAME.size + len(found.records)
                        break
                at = chunk.find(_FRAME_MAGIC, at + 1)
            offset += passed

    def forget(self) -> None:
        """Read from the file again what was read before."""
        self._buffer = b""

    def _head(self, offset: int) -> tuple[int, int, int, int] | None:
        """Both checksums, flush number and size of records, if they are a head's."""
        head = self._bytes(_FRAME.size, offset)
        if len(head) < _FRAME.size:
            return None
        magic, head_checksum, checksum, number, size = _FRAME.unpack(head)
        # The head has a checksum of its own: a message full of magic must not make the search read megabytes for each.
        if magic != _FRAME_MAGIC or crc32(_COVERED.pack(number, size), self._salt) != head_checksum:
            return None
        return head_checksum, checksum, number, size

    def _found(self, offset: int, skipping: bool) -> Found | None:
        try:
            head = self._head(offset)
            if head is None:
                return None
            try:
                frame = self.frame(offset)
            except JournalUnreadable:
                frame = None  # the search comes by there, and decides
            return Found(offset, head[2], None if frame is None else frame[1])
        except JournalUnreadable:
            if not skipping:
                raise
            return None

    def _bytes(self, size: int, offset: int) -> bytes:
        begin = offset - self._start
        if begin < 0 or begin + size > len(self._buffer):
            self._buffer = self._ahead(max(size, READ_BYTES), size, offset)
            self._start, begin = offset, 0
        return self._buffer[begin : begin + size]

    def _chunk(self, offset: int) -> bytes:
        """Bytes to search through: many, or to the end of a block, and of the next where no magic fits before it."""
        left = BLOCK_BYTES - offset % BLOCK_BYTES
        return self._ahead(READ_BYTES, left if left >= len(_FRAME_MAGIC) else left + BLOCK_BYTES, offset)

    def _ahead(self, wanted: int, needed: int, offset: int) -> bytes:
        """`wanted` bytes, or no more than `needed` where there is something unreadable among them.

        Each attempt on a bad sector can take seconds, so the large reads are not tried again before it is passed.
        """
        if wanted > needed and offset >= self._careful_until:
            try:
                return self._file.pread(wanted, offset)
            except OSError:
                self._careful_until = offset + wanted
        return _read(self._file, self._path, needed, offset)


def records_in(records: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Kind, two numbers and payload of each."""
    at, end = 0, len(records)
    while at < end:
        kind, first, second, size = RECORD.unpack_from(records, at)
        at += RECORD.size + size
        if at > end:
            raise JournalBroken(f"a record of {size} bytes is longer than its flush")
        yield kind, first, second, records[at - size : at]


def entries_in(records: bytes) -> list[Entry]:
    """The entries that one frame adds, those that it takes back itself left out."""
    entries: list[Entry] = []
    for kind, index, term, payload in records_in(records):
        if kind == ENTRY:
            entries.append((payload, index, term))
        elif kind == RESET:
            entries.clear()
        elif kind == TRUNCATE:
            while entries and entries[-1][1] >= index:
                entries.pop()
    return entries


def stamped(payload: bytes) -> tuple[int, str | None, Promise]:
    """Term, vote and promise of a stamp."""
    term, promised_index, promised_term = STANDING.unpack_from(payload)
    return term, payload[STANDING.size :].decode() or None, Promise(index=promised_index, term=promised_term)


def opening_of(log: Outline) -> bytes:
    """Records with which a segment begins: everything about the log but its commands."""
    runs = log.outlined(0).runs
    packed = b"".join(RUN.pack(*run) for run in runs)
    base = RECORD.pack(BASE, log.base, log.base_term, 0)
    return base + RECORD.pack(RUNS, log.last, 0, len(packed)) + packed + stamp_of(log)


def opened(number: int, records: bytes) -> Recovered:
    """What an opening tells: the log after flush `number`."""
    (_, base, base_term, _), (_, last, _, runs), (_, _, _, standing) = records_in(records)
    term, vote, promise = stamped(standing)
    return Recovered(
        base=base,
        base_term=base_term,
        last=last,
        runs=tuple((first, run_term) for first, run_term in RUN.iter_unpack(runs)),
        term=term,
        vote=vote,
        promise=promise if promise.index else None,
        flush=number,
    )


def wipe(file: File, offset: int) -> None:
    """Zeros from `offset` to the end; once they are synced, what was there can never be read again.

    They are written even where zeros are read: after a failed sync those may be in the page cache only, marked clean.
    """
    end = file.size()
    while offset < end:
        size = min(READ_BYTES, end - offset)
        file.pwrite(bytes(size), offset)
        offset += size
