"""The journal's files as a whole: append-only segments of checksummed frames, written, rolled, dropped and read.

`0000000001.wal` and so on without a gap. A segment gets its name when it is whole and synced, so nothing in its header
or opening is ever torn; a flush is one frame, one write, one sync, and the next waits for it. `journal_frames.py` has
the bytes, `journal_recovery.py` what they mean after a crash, `journal_repair.py` what is done about damage.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from threading import Lock
from typing import Final

from holdfast.client.protocol.limits import U63_MAX
from holdfast.cluster.disk import REAL_DISK, Disk, File
from holdfast.cluster.journal import ENTRY_OVERHEAD_BYTES, NEVER_WRITTEN, Entry, Flush, JournalBroken
from holdfast.cluster.journal_errors import JournalFailed, JournalRefused, damaged, failing
from holdfast.cluster.journal_frames import (
    HEAD_BYTES,
    FrameReader,
    Identity,
    entries_in,
    frame_bytes,
    header_bytes,
    opening_of,
    salt_of,
    wipe,
)
from holdfast.cluster.journal_recovery import (
    PLAN,
    UNFINISHED,
    Change,
    DurableLog,
    Scan,
    lock,
    require,
    segment_numbers,
    segment_path,
)

SEGMENT_BYTES: Final = 64 << 20
FILL_BYTES: Final = 4 << 20  # written as zeros ahead: a sync there costs 0.7 of one that grows the file
MAX_RECORDS_BYTES: Final = 16 << 20  # above any flush


class Segments:
    """The files of one journal. One thread writes and drops, one thread reads, and they may differ; any may close.

    After any failure to write every later write raises `JournalFailed`: the node exits, and recovery decides.
    """

    def __init__(self, directory: str, identity: Identity, disk: Disk, segment_bytes: int, log: DurableLog) -> None:
        """For `begun` and `resumed`."""
        self.identity = identity
        self.recovered = NEVER_WRITTEN
        self._directory = directory
        self._disk = disk
        self._segment_bytes = segment_bytes
        self._log = log
        self._lock = Lock()  # around the log's outline and places: the writer changes them while the reader looks
        self._writing = Lock()  # one write or drop at a time, and none while the files are closed
        self._failure: BaseException | None = None
        self._closed = False
        self._hold = ExitStack()  # lets go of the folder
        self._file: File
        self._salt = 0
        self._end = self._filled = 0
        self._first_end = 0  # end of the newest segment's opening: a segment without a flush is not left for another
        self._reader_lock = Lock()  # around the two below: a drop closes a file that the reader has
        self._reading: tuple[int, File, FrameReader] | None = None
        self._frame_read: tuple[int, int, list[Entry], int] = (0, 0, [], 0)  # segment, offset, entries, end

    @classmethod
    def create(
        cls, directory: str, identity: Identity, *, disk: Disk = REAL_DISK, segment_bytes: int = SEGMENT_BYTES
    ) -> "Segments":
        """A journal that never had an entry. Refuses a folder that holds one, whole or not."""
        with ExitStack() as hold, failing(f"making the journal in {directory}"):
            disk.make_directory(directory)
            hold.enter_context(closing(lock(directory, disk)))
            if segment_numbers(directory, disk) or PLAN in disk.names(directory):
                raise JournalRefused(f"{directory} holds a journal already")
            segments = cls.begun(directory, identity, disk, segment_bytes, DurableLog())
            segments._hold = hold.pop_all()
        return segments

    @classmethod
    def open(
        cls,
        directory: str,
        identity: Identity | None = None,
        *,
        disk: Disk = REAL_DISK,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> "Segments":
        """Read everything, wipe what was torn, and go on after it; `recovered` tells what is durable.

        Raises `JournalDamaged`, `JournalFailed` if the disk does, and `JournalRefused` if the journal is absent, in
        use, of another format, or not of `identity`, which may be left out to take what the disk says.
        """
        with ExitStack() as hold, failing(f"opening the journal in {directory}"):
            require(directory, disk)
            hold.enter_context(closing(lock(directory, disk)))
            if PLAN in disk.names(directory):
                raise damaged(os.path.join(directory, PLAN), 0, "a repair was begun and not finished")
            scan = Scan(directory, identity, disk)
            scan.run()
            scan.check_begin()
            segments = cls.resumed(scan, directory, disk, segment_bytes)
            segments._hold = hold.pop_all()
        return segments

    @classmethod
    def begun(cls, directory: str, identity: Identity, disk: Disk, segment_bytes: int, log: DurableLog) -> "Segments":
        """Files that open with `log`, which has no entry. For `create` and a repair that keeps no segment.

        The caller holds the folder.
        """
        segments = cls(directory, identity, disk, segment_bytes, log)
        segments._begin_segment(1)
        return segments

    @classmethod
    def resumed(cls, scan: Scan, directory: str, disk: Disk, segment_bytes: int) -> "Segments":
        """Files that go on after what was scanned. For `open` and a repair, which alone may leave out its checks.

        The caller holds the folder.
        """
        segments = cls(directory, scan.known_identity(), disk, segment_bytes, scan.log)
        segments._go_on(scan.newest_frame)
        return segments

    @classmethod
    def seen(cls, directory: str, *, disk: Disk = REAL_DISK) -> "Segments":
        """What is durable now, to read and no more: nothing is locked or wiped, and a node may go on writing.

        Raises as `open` does; a segment that is dropped meanwhile may look like damage, and another try finds it gone.
        """
        with failing(f"reading the journal in {directory}"):
            require(directory, disk)
            scan = Scan(directory, None, disk)
            scan.run()
            segments = cls(directory, scan.known_identity(), disk, SEGMENT_BYTES, scan.log)
            segments.recovered = scan.log.outlined(scan.log.flush)
            return segments

    @property
    def size_bytes(self) -> int:
        """What all segments take, zeros ahead left out."""
        with self._lock:
            return sum(segment.end for segment in self._log.segments)

    def write(self, flush: Flush) -> None:
        """Make one flush durable. `JournalFailed` if that is not certain, and then for good."""
        with self._once():
            self._write(flush)

    def drop_before(self, index: int) -> int:
        """Remove the segments that hold nothing above `index` or above the durable base; how many went.

        Each removal is durable before the next, so a crash leaves a journal without its oldest part, never one
        with a hole.
        """
        dropped = 0
        with self._once():
            segments = self._log.segments
            while len(segments) > 1 and segments[0].last <= min(index, self._log.base):
                self._disk.unlink(segment_path(self._directory, segments[0].number))
                self._disk.sync_directory(self._directory)
                with self._reader_lock:
                    if self._reading is not None and self._reading[0] == segments[0].number:
                        self._leave_file()
                with self._lock:
                    self._log.forget_oldest()
                dropped += 1
        return dropped

    def read_entries(self, index: int, max_bytes: int, last: int = U63_MAX) -> tuple[list[Entry], int]:
        """Durable entries from `index` to `last`, at least one and else no more than `max_bytes`, and their size.

        Every byte is checked again, so damage since the start is never sent to a peer: `JournalDamaged`, or
        `JournalFailed` if the disk does not even give the bytes.
        """
        entries: list[Entry] = []
        size = bound = number = offset = 0
        while True:
            if index >= bound:
                with self._lock:
                    place = self._log.place(index)
                if place is None:
                    break
                number, offset, bound = place
            with self._reader_lock, failing(f"reading segment {number} of the journal in {self._directory}"):
                found, offset = self._read_frame(number, offset)
            skipped = index - found[0][1] if found else 0
            for entry in found[skipped : skipped + bound - index]:
                weight = len(entry[0]) + ENTRY_OVERHEAD_BYTES
                if entries and (size + weight > max_bytes or index > last):
                    return entries, size
                entries.append(entry)
                size += weight
                index += 1
        if not entries:
            raise JournalBroken(f"no entry {index} on disk, the log there is {self._log.base} to {self._log.last}")
        return entries, size

    def close(self) -> None:
        """Close the files and let go of the folder; every flush that `write` returned from is durable.

        Waits for a call that another thread is in; from then on all are refused.
        """
        with self._writing, self._reader_lock, self._hold:
            self._closed = True
            self._failure = self._failure or ValueError("the journal is closed")
            self._file.close()
            self._leave_file()

    @contextmanager
    def _once(self) -> Iterator[None]:
        """What fails inside fails for good."""
        with self._writing:
            if self._failure is not None:
                problem = f"the journal in {self._directory} stopped before: {self._failure}"
                raise JournalFailed(problem) from self._failure
            try:
                with failing(f"writing the journal in {self._directory}"):
                    yield
            except BaseException as failure:
                self._failure = failure
                raise

    def _write(self, flush: Flush) -> None:
        if flush.number != self._log.flush + 1 or len(flush.records) > MAX_RECORDS_BYTES:
            raise JournalBroken(f"flush {flush.number} of {len(flush.records)} bytes cannot follow {self._log.flush}")
        change = Change(self._log, flush.number, flush.records)  # before a byte of what may be wrong is durable
        size = HEAD_BYTES + len(flush.records)
        if self._end + size > self._segment_bytes and self._end > self._first_end:
            self._begin_segment(self._log.segments[-1].number + 1)
        begin, end = self._end, self._end + size
        data = frame_bytes(self._salt, flush.number, flush.records)
        if end > self._filled:
            self._filled = max(end, min(end + FILL_BYTES, self._segment_bytes))
            data += bytes(self._filled - end)
        self._file.pwrite(data, begin)
        self._file.sync()
        with self._lock:
            self._log.change(change, begin)
        self._end = end

    def _begin_segment(self, number: int) -> None:
        """All flushes so far are durable, so the new name proves that the segment before it is complete."""
        log, path = self._log, segment_path(self._directory, number)
        opening = opening_of(log)
        salt = salt_of(self.identity, number)
        data = header_bytes(self.identity, number) + frame_bytes(salt, log.flush, opening)
        filled = max(len(data), min(FILL_BYTES, self._segment_bytes))
        file = self._disk.create(path + UNFINISHED)
        with ExitStack() as on_failure:
            on_failure.callback(file.close)
            file.pwrite(data + bytes(filled - len(data)), 0)
            file.sync()
            self._disk.rename(path + UNFINISHED, path)
            self._disk.sync_directory(self._directory)
            on_failure.pop_all()
        with self._lock:
            log.open_segment(number, log.flush, opening, len(data))
        if number > 1:
            self._file.close()
        self._file, self._salt = file, salt
        self._end = self._first_end = len(data)
        self._filled = filled

    def _go_on(self, newest_frame: tuple[int, bytes] | None) -> None:
        """Make the newest segment ready to be continued.

        Its last frame is written once more: it may be in the page cache only, and after a failed sync even there
        marked as clean, so that a sync alone would not bring it to the disk.
        """
        for name in self._disk.names(self._directory):
            if name.endswith(UNFINISHED):
                self._disk.unlink(os.path.join(self._directory, name))
        segment = self._log.segments[-1]
        file = self._disk.open(segment_path(self._directory, segment.number))
        salt = salt_of(self.identity, segment.number)
        with ExitStack() as on_failure:
            on_failure.callback(file.close)
            wipe(file, segment.end)
            if newest_frame is not None:
                file.pwrite(frame_bytes(salt, self._log.flush, newest_frame[1]), newest_frame[0])
            file.sync()
            self._disk.sync_directory(self._directory)
            self._end, self._filled = segment.end, file.size()
            on_failure.pop_all()
        self._file, self._salt = file, salt
        self._first_end = segment.end if newest_frame is None else newest_frame[0]
        self.recovered = self._log.outlined(self._log.flush)

    def _read_frame(self, number: int, offset: int) -> tuple[list[Entry], int]:
        """Entries of the frame and where the next one begins; a frame just read is not read again."""
        if self._closed:
            raise JournalFailed(f"the journal in {self._directory} is closed")
        if self._frame_read[:2] == (number, offset):
            return self._frame_read[2:]
        path = segment_path(self._directory, number)
        if self._reading is None or self._reading[0] != number:
            self._leave_file()
            file = self._disk.open(path)
            self._reading = (number, file, FrameReader(file, salt_of(self.identity, number), path))
        reader = self._reading[2]
        found = reader.frame(offset)
        if found is None:
            reader.forget()  # its buffer may be older than the frame
            found = reader.frame(offset)
        if found is None:
            raise damaged(path, offset, "a frame that was whole is unreadable")
        self._frame_read = (number, offset, entries_in(found[1]), offset + HEAD_BYTES + len(found[1]))
        return self._frame_read[2:]

    def _leave_file(self) -> None:
        """The reader has no file open any more."""
        if self._reading is not None:
            self._reading[1].close()
        self._reading, self._frame_read = None, (0, 0, [], 0)
