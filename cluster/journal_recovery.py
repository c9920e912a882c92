"""What a journal's files hold: read back in order after a crash, and kept up to date with each write.

A flush is one frame, one write, one sync; flush k+1 is written only after flush k is durable. From that follows
what a bad frame means. Nothing good behind it: it was being written, nobody relied on it, it is wiped. The good head
of a later flush behind it: it was acknowledged and is damaged, and the node must not start as if it had never promised
anything.
"""

import os
import struct
from array import array
from bisect import bisect_right
from typing import Final

from holdfast.cluster.disk import Disk, File, Held
from holdfast.cluster.journal import (
    BASE,
    ENTRY,
    NEVER_WRITTEN,
    RECORD,
    RESET,
    STAMP,
    TRUNCATE,
    JournalBroken,
    Outline,
    Promise,
    stamp_of,
)
from holdfast.cluster.journal_errors import JournalDamaged, JournalRefused, JournalUnreadable, damaged
from holdfast.cluster.journal_frames import (
    HEAD_BYTES,
    Found,
    FrameReader,
    Identity,
    opened,
    read_header,
    records_in,
    salt_of,
    stamped,
)

POINT_BYTES: Final = 64 << 10  # one remembered place per so many bytes: 24 bytes in memory for 64 KiB on disk
PLAN: Final = "repair"  # the name under which a repair is written down until it is finished
LOCK: Final = "lock"  # the name of the file whose lock is held by whoever uses the folder
UNFINISHED: Final = ".new"  # ends the name of a file that is not whole yet
_ENDING: Final = ".wal"


class Segment:
    """One file; `last` is the highest entry of the present log in it or before it, once another follows it."""

    __slots__ = ("end", "last", "number")

    def __init__(self, number: int, end: int) -> None:
        self.number = number
        self.end = end
        self.last = 0


class Change(Outline):
    """A log as one more flush leaves it, worked out beside it: one that contradicts itself changes nothing."""

    def __init__(self, log: Outline, number: int, records: bytes) -> None:
        """`JournalBroken` if the flush cannot follow that log."""
        super().__init__(NEVER_WRITTEN)
        self.become(log)
        self.number = number
        self.size = len(records)
        self.first = 0  # of its entries that are in force at its end; 0 if there is none
        self.cut: tuple[int, int] | None = None  # first entry that is not where it was, lowest end of the log meanwhile
        try:
            self._replay(records)
        except (struct.error, UnicodeDecodeError) as problem:
            raise JournalBroken(f"flush {number} cannot be read: {problem}") from problem

    def _replay(self, records: bytes) -> None:
        kind = 0
        for kind, index, term, payload in records_in(records):
            if kind == ENTRY:
                self._append(index, term)
                self.first = self.first or index
            elif kind == STAMP:
                self._stamp(index, term, payload)
            elif kind == BASE:
                self._compact(index, term)
            elif kind == TRUNCATE:
                self._truncate(index)
                self._moved(index)
            elif kind == RESET:
                self._reset(index, term)
                self._moved(0)
            else:
                raise JournalBroken(f"flush {self.number} has a record of unknown kind {kind}")
        if kind != STAMP:
            raise JournalBroken(f"flush {self.number} does not end with a stamp")

    def _stamp(self, last: int, last_term: int, standing: bytes) -> None:
        if (last, last_term) != (self.last, self.last_term):
            raise JournalBroken(f"flush {self.number} ends at {last} of term {last_term}, not {self.last}")
        term, vote, promise = stamped(standing)
        if takes_back(self, term, vote):
            raise JournalBroken(f"flush {self.number} goes back from {self.term}, {self.vote} to {term}, {vote}")
        self._stand(term, vote, promise)

    def _moved(self, first: int) -> None:
        before = self.cut or (first, self.last)
        self.cut = (min(before[0], first), min(before[1], self.last))
        self.first = 0 if self.first >= first else self.first


def takes_back(log: Outline, term: int, vote: str | None) -> bool:
    """Whether this term and vote would undo those of the log."""
    return term < log.term or (term == log.term and log.vote is not None and vote != log.vote)


class DurableLog(Outline):
    """What the files hold, and where: fed with every frame in order, on recovery and after each write alike."""

    def __init__(self) -> None:
        super().__init__(NEVER_WRITTEN)
        self.flush = 0
        self.segments: list[Segment] = []
        self.absent_until = 0  # entries up to here were in segments that are gone; the base must reach it
        # Places to begin reading, ascending both by entry and by position: three columns. Between two of them
        # entries follow one another without a truncation, in one segment.
        self._firsts_at = array("Q")
        self._segments_at = array("Q")
        self._offsets_at = array("Q")
        self._place_due = 0  # offset in the newest segment from which the next frame with entries is remembered

    def open_segment(self, number: int, flush: int, records: bytes, end: int) -> None:
        """A segment begins; its opening says what is known already, or everything if it is the oldest."""
        told = opened(flush, records)
        if not self.segments:
            Outline.__init__(self, told)
            self.flush = flush
            self.absent_until = told.last
        elif told != self.outlined(self.flush):
            raise JournalBroken(f"segment {number} opens with {told}, the ones before it end otherwise")
        else:
            self.segments[-1].last = self.last
        self.segments.append(Segment(number, end))
        self._place_due = 0

    def absorb(self, number: int, offset: int, records: bytes) -> None:
        """The frame at `offset` of the newest segment is durable; `JournalBroken` if it cannot be."""
        self.change(Change(self, number, records), offset)

    def change(self, change: Change, offset: int) -> None:
        """The same for a flush that was worked out before it was written."""
        self.become(change)
        if change.cut is not None:
            self._forget_places(*change.cut)
        self.flush = change.number
        segment = self.segments[-1]
        segment.end = offset + HEAD_BYTES + change.size
        if change.first and offset >= self._place_due:
            self._firsts_at.append(change.first)
            self._segments_at.append(segment.number)
            self._offsets_at.append(offset)
            self._place_due = offset + POINT_BYTES

    def place(self, index: int) -> tuple[int, int, int] | None:
        """Segment and offset from which to look for `index`, and the first entry that is not to be read there."""
        at = bisect_right(self._firsts_at, index) - 1
        if at < 0 or not self.base < index <= self.last:
            return None
        bound = self._firsts_at[at + 1] if at + 1 < len(self._firsts_at) else self.last + 1
        return self._segments_at[at], self._offsets_at[at], bound

    def settle(self, term: int, vote: str | None, promise: Promise) -> bytes:
        """The records that end a repair: a base where the kept segments begin, and how things stand."""
        records = b""
        if self.base < self.absent_until:  # the record that compacted as far is behind the damage
            base_term = self.term_at(self.absent_until) or 0
            records = RECORD.pack(BASE, self.absent_until, base_term, 0)
            self._compact(self.absent_until, base_term)
        self._stand(term, vote, promise)
        return records + stamp_of(self)

    def forget_oldest(self) -> None:
        """The oldest segment is gone."""
        del self.segments[0]
        gone = bisect_right(self._segments_at, self.segments[0].number - 1)
        del self._firsts_at[:gone], self._segments_at[:gone], self._offsets_at[:gone]

    def _forget_places(self, first: int, last: int) -> None:
        """No entry from `first` on is where it was, and the log ended at `last`; the next needs a place of its own."""
        while self._firsts_at and self._firsts_at[-1] >= first:
            del self._firsts_at[-1], self._segments_at[-1], self._offsets_at[-1]
        for segment in self.segments:
            segment.last = min(segment.last, last)
        self.absent_until = min(self.absent_until, last)
        self._place_due = 0


class Scan:
    """All segments read in order; what is known when damage is met is what a repair keeps."""

    def __init__(self, directory: str, identity: Identity | None, disk: Disk) -> None:
        self.identity = identity
        self.log = DurableLog()
        self.newest_frame: tuple[int, bytes] | None = None  # offset and bytes of the last one of the last segment
        self._directory = directory
        self._disk = disk

    def run(self) -> None:
        """Raise `JournalDamaged` at the first place where acknowledged data is missing."""
        numbers = segment_numbers(self._directory, self._disk)
        if not numbers:
            raise JournalRefused(f"{self._directory} holds no journal")
        for number in numbers:
            self._segment(number, newest=number == numbers[-1])

    def check_begin(self) -> None:
        """Raise `JournalDamaged` if entries that are not compacted were in segments that are gone."""
        if self.log.base < self.log.absent_until:
            oldest = self.log.segments[0].number
            self.log = DurableLog()
            raise damaged(segment_path(self._directory, oldest), 0, "segments before it are missing")

    def known_identity(self) -> Identity:
        """Given, or read from the first segment; `JournalBroken` before that."""
        if self.identity is None:
            raise JournalBroken("the identity is known once a segment was read")
        return self.identity

    def evidence(self) -> bytes | None:
        """Records of the newest good frame behind the damage: its stamp tells vote and promise; None if it is lost.

        It is in the newest segment: if that has no good frame, not even its opening, it held later votes perhaps. So
        did a frame behind it of which only the head is good, and a block behind it that cannot be read. A stamp that
        takes back what is kept is of another past, and what belongs in its place is lost.
        """
        if self.identity is None:
            return None
        newest = segment_numbers(self._directory, self._disk)[-1]
        kept = self.log.segments[-1] if self.log.segments else None
        begin = kept.end if kept is not None and kept.number == newest else 0
        file = self._disk.open(path := segment_path(self._directory, newest))
        reader = FrameReader(file, salt_of(self.identity, newest), path)
        head = best = Found(begin, self.log.flush - 1, None)
        try:
            for found in reader.search(begin, skipping=True):
                head = max(head, found, key=lambda each: each.number)
                if found.records is not None and found.number > best.number:
                    best = found
        finally:
            file.close()
        if best.records is None or head.number > best.number or reader.skipped_at > best.offset:
            return None
        *_, (_, _, _, standing) = records_in(best.records)
        return None if takes_back(self.log, *stamped(standing)[:2]) else best.records

    def learn_identity(self) -> None:
        """Take it from any header that can still be read."""
        for number in segment_numbers(self._directory, self._disk):
            file = self._disk.open(path := segment_path(self._directory, number))
            try:
                self.identity = self.identity or read_header(file, path)[0]
            except (JournalDamaged, JournalUnreadable):
                continue
            finally:
                file.close()

    def _segment(self, number: int, *, newest: bool) -> None:
        path = segment_path(self._directory, number)
        file = self._disk.open(path)
        try:
            self._read(file, path, number, newest=newest)
        finally:
            file.close()

    def _read(self, file: File, path: str, number: int, *, newest: bool) -> None:
        log = self.log
        identity, own_number, end = read_header(file, path)
        self.identity = self.identity or identity
        if identity != self.identity:
            raise JournalRefused(f"{path} belongs to {identity}, not to {self.identity}")
        reader = FrameReader(file, salt_of(identity, number), path)
        opening = reader.frame(end)
        if own_number != number or opening is None:
            raise damaged(path, end, "the opening of the segment is unreadable")
        self._check_follows(number, opening[0], path)
        end += HEAD_BYTES + len(opening[1])
        log.open_segment(number, *opening, end)
        self.newest_frame = None
        while (found := reader.frame(end)) is not None:
            if found[0] != log.flush + 1:
                raise damaged(path, end, f"flush {found[0]} follows flush {log.flush}")
            try:
                log.absorb(found[0], end, found[1])
            except JournalBroken as broken:
                raise damaged(path, end, str(broken)) from broken
            self.newest_frame = (end, found[1])
            end = log.segments[-1].end
        for later in reader.search(end) if newest else ():
            # A torn frame may well have a good head; only the next flush's, or all of one, proves that it was durable.
            if later.number > log.flush + (later.records is None):
                raise damaged(path, end, f"flush {log.flush + 1} is unreadable and {later.number} was begun behind it")

    def _check_follows(self, number: int, flush: int, path: str) -> None:
        if not self.log.segments:
            return
        before = self.log.segments[-1]
        if before.number != number - 1:
            raise damaged(path, 0, f"segment {before.number + 1} is missing")
        if flush != self.log.flush:
            raise damaged(
                segment_path(self._directory, before.number), before.end, f"flush {self.log.flush + 1} is unreadable"
            )


def segment_numbers(directory: str, disk: Disk) -> list[int]:
    """Of every segment that has its name, ascending."""
    stems = (name[: -len(_ENDING)] for name in disk.names(directory) if name.endswith(_ENDING))
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def segment_path(directory: str, number: int) -> str:
    """Where it is once it is whole."""
    return os.path.join(directory, f"{number:010}{_ENDING}")


def lock(directory: str, disk: Disk) -> Held:
    """Nobody else uses the folder until it is closed."""
    try:
        return disk.lock(os.path.join(directory, LOCK))
    except BlockingIOError:
        raise JournalRefused(
            f"{directory} is in use by another process, a node or a repair: a journal has one writer, stop that first"
        ) from None


def require(directory: str, disk: Disk) -> None:
    """`JournalRefused` if there is no journal: before the lock, whose file would be made there."""
    if not segment_numbers(directory, disk) and PLAN not in disk.names(directory):
        raise JournalRefused(f"{directory} holds no journal")
