"""The journal's files after power cuts, failing disks and rot: no synced flush is lost, no wrong entry is read."""

import errno
import struct
from collections.abc import Callable
from contextlib import suppress
from random import Random

import pytest

from holdfast.cluster.journal import Entry, Journal, Recovered
from holdfast.cluster.journal_errors import JournalDamaged, JournalFailed
from holdfast.cluster.journal_frames import Identity
from holdfast.cluster.segments import Segments
from tests.fakes.disk import MemoryDisk, PowerCut

IDENTITY = Identity(cluster_id="c", node="a", incarnation=5)
FOLDER = "/j"
SEGMENT_BYTES = 700


def path_of(number: int) -> str:
    return f"{FOLDER}/{number:010}.wal"


def reopened(disk: MemoryDisk) -> tuple[Segments, Journal]:
    """As the next process finds it."""
    disk.next_process()
    segments = Segments.open(FOLDER, disk=disk, segment_bytes=SEGMENT_BYTES)
    return segments, Journal.recovered(segments.recovered, segments.read_entries, window_bytes=0)


def created(disk: MemoryDisk) -> tuple[Segments, Journal]:
    Segments.create(FOLDER, IDENTITY, disk=disk, segment_bytes=SEGMENT_BYTES)
    return reopened(disk)


def flush(segments: Segments, journal: Journal) -> None:
    while (taken := journal.take()) is not None:
        segments.write(taken)
        journal.on_durable(taken.lsn)


def entries_of(journal: Journal) -> list[Entry]:
    entries: list[Entry] = []
    while (index := journal.base + 1 + len(entries)) <= journal.last:
        entries += journal.read(index, 1)[0]
    return entries


def written(flushes: int, *, command_bytes: int = 20) -> tuple[MemoryDisk, Segments, Journal]:
    """A journal with so many flushes of two entries each, the vote and the term changing now and then."""
    disk = MemoryDisk()
    segments, journal = created(disk)
    for number in range(1, flushes + 1):
        journal.setCurrentTerm(1 + number // 3, "b")
        for _ in range(2):
            journal.add(b"%d " % journal.last * (command_bytes // 2), journal.last + 1, journal.term)
        flush(segments, journal)
    return disk, segments, journal


def last_frame(disk: MemoryDisk, segments: Segments) -> tuple[str, int, int]:
    """File, begin and end of the newest frame."""
    newest = Segments.open(FOLDER, disk=disk.copy(), segment_bytes=SEGMENT_BYTES)
    return path_of(segments._log.segments[-1].number), newest._first_end, newest._end


def seen(disk: MemoryDisk) -> tuple[Recovered, list[Entry]]:
    segments, journal = reopened(disk)
    found = segments.recovered, entries_of(journal)
    segments.close()
    return found


# Torn --------------------------------------------------------------------------------------------------


def test_tail_torn_at_every_byte_loses_no_synced_flush_and_shows_no_wrong_entry() -> None:
    """R1, R25: of the last frame only the first bytes, or only the last ones, reached the disk."""
    disk, segments, journal = written(2, command_bytes=8)
    before = seen(disk.copy())
    journal.add(b"torn", journal.last + 1, journal.term)
    flush(segments, journal)
    path, begin, end = last_frame(disk, segments)
    whole = disk.peek(path)
    assert seen(disk.copy())[1][:-1] == before[1]
    for cut in range(begin, end):
        for content in (
            whole[:cut] + bytes(len(whole) - cut),
            whole[:cut],
            whole[:begin] + bytes(cut + 1 - begin) + whole[cut + 1 :],
        ):
            torn = disk.copy()
            torn.poke(path, content)
            assert seen(torn) == before
            assert torn.peek(path)[begin:].strip(b"\0") == b""  # wiped: it can never be read again


def test_journal_goes_on_over_a_torn_tail() -> None:
    disk, segments, journal = written(3)
    path, _, end = last_frame(disk, segments)
    disk.flip(path, end - 1)
    segments, journal = reopened(disk)
    journal.add(b"x", journal.last + 1, journal.term)
    flush(segments, journal)
    recovered, entries = seen(disk)
    assert recovered.flush == 3
    assert entries[-1][0] == b"x"


def test_wiping_a_torn_tail_can_be_interrupted_anywhere() -> None:
    disk, segments, _ = written(3)
    path, begin, _ = last_frame(disk, segments)
    disk.flip(path, begin + 30)
    expected = seen(disk.copy())
    for seed in range(20):
        for step in range(4):
            again = disk.copy()
            again.cut_at = step
            with pytest.raises(PowerCut):
                reopened(again)
            again.crash(Random(seed))
            assert seen(again) == expected


def test_unsynced_flush_is_lost_with_the_power_and_the_synced_ones_stay() -> None:
    disk, segments, journal = written(2)
    before = seen(disk.copy())
    journal.add(b"unsynced", journal.last + 1, journal.term)
    disk.cut_at = disk.steps + 1  # after the write, before the sync
    with pytest.raises(PowerCut):
        flush(segments, journal)
    disk.crash()
    assert seen(disk) == before


def test_flush_that_only_the_page_cache_has_is_made_durable_before_it_is_relied_on() -> None:
    """R9: the process dies between write and sync, starts again, acknowledges what it reads, then the power goes."""
    disk, segments, journal = written(2)
    journal.add(b"cached", journal.last + 1, journal.term)
    disk.cut_at = disk.steps + 1
    with pytest.raises(PowerCut):
        flush(segments, journal)
    disk.kill()
    relied_on = seen(disk)
    assert relied_on[1][-1][0] == b"cached"
    disk.crash()
    assert seen(disk) == relied_on


def test_flush_whose_sync_failed_is_written_again_before_it_is_relied_on() -> None:
    """R26: after a failed sync the page cache shows the frame and calls it clean, so a sync alone does nothing."""
    disk, segments, journal = written(2)
    journal.add(b"cached", journal.last + 1, journal.term)
    disk.failures["sync"] = errno.EIO
    with pytest.raises(JournalFailed):
        flush(segments, journal)
    disk.kill()
    relied_on = seen(disk)
    assert relied_on[1][-1][0] == b"cached"
    disk.crash()
    assert seen(disk) == relied_on


# Failing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["pwrite", "sync"])
def test_failing_write_or_sync_stops_the_journal_for_good(step: str) -> None:
    """R26: a second sync would succeed and have written nothing."""
    disk, segments, journal = written(2)
    journal.add(b"x", journal.last + 1, journal.term)
    taken = journal.take()
    assert taken is not None
    disk.failures[step] = errno.EIO
    with pytest.raises(JournalFailed, match="check the disk"):
        segments.write(taken)
    steps = disk.steps
    for attempt in (lambda: segments.write(taken), lambda: segments.drop_before(1)):
        with pytest.raises(JournalFailed, match="stopped before"):
            attempt()
    assert disk.steps == steps


@pytest.mark.parametrize("step", ["create", "rename", "sync_directory"])
def test_failure_while_a_segment_is_begun_stops_the_journal_for_good(step: str) -> None:
    disk, segments, journal = written(2)
    disk.failures[step] = errno.EIO
    with pytest.raises(JournalFailed):
        for _ in range(10):
            journal.add(bytes(300), journal.last + 1, journal.term)
            flush(segments, journal)
    with pytest.raises(JournalFailed, match="stopped before"):
        segments.drop_before(1)


def test_full_disk_stops_the_journal_and_what_was_synced_stays() -> None:
    disk, segments, journal = written(2)
    disk.capacity_bytes = 3000
    synced = journal.last
    with pytest.raises(JournalFailed, match="make room"):
        while True:
            journal.add(bytes(100), journal.last + 1, journal.term)
            flush(segments, journal)
            synced = journal.last
    disk.crash(Random(1))
    assert seen(disk)[0].last == synced


# Every step of every change ----------------------------------------------------------------------------


def crash_everywhere(change: Callable[[Segments, Journal], None], make: Callable[[], MemoryDisk]) -> int:
    """Cut the power before each step of `change`; the log after it is the one before or the one after."""
    disk = make()
    start = disk.steps
    segments, journal = reopened(disk)
    before = seen(disk.copy())
    opened = disk.steps
    change(segments, journal)
    after = seen(disk.copy())
    for step in range(disk.steps - opened + 1):
        for seed in (None, *range(12)):
            twin = make()
            assert twin.steps == start
            segments, journal = reopened(twin)
            twin.cut_at = twin.steps + step
            with suppress(PowerCut):
                change(segments, journal)
            twin.crash(None if seed is None else Random(seed))
            found = seen(twin)
            assert logical(found) in (logical(before), logical(after))
            if step == disk.steps - opened:
                assert found == after
    return disk.steps - opened


def logical(found: tuple[Recovered, list[Entry]]) -> tuple[int, int, int, str | None, list[Entry]]:
    return found[0].base, found[0].base_term, found[0].term, found[0].vote, found[1]


def test_power_cut_at_every_step_of_beginning_a_segment() -> None:
    """R1: the segment is there whole, or not there."""

    def change(segments: Segments, journal: Journal) -> None:
        journal.add(bytes(300), journal.last + 1, journal.term)
        flush(segments, journal)

    def make() -> MemoryDisk:
        disk, segments, _ = written(2)
        assert disk.names(FOLDER) == ["0000000001.wal"]
        assert segments._end + 300 > SEGMENT_BYTES
        return disk

    assert crash_everywhere(change, make) == 7


def test_power_cut_at_every_step_of_compaction() -> None:
    """R1: the library's own journal rewrote itself in place. Here the oldest part is there or not, never a hole."""

    def change(segments: Segments, journal: Journal) -> None:
        segments.drop_before(journal.base)

    def make() -> MemoryDisk:
        disk, segments, journal = written(25)
        journal.setRaftCommitIndex(45)
        journal.compact(45)
        flush(segments, journal)
        assert len(disk.names(FOLDER)) > 5
        return disk

    assert crash_everywhere(change, make) >= 8


def test_power_cut_at_every_step_of_creation() -> None:
    for step in range(6):
        for seed in range(12):
            disk = MemoryDisk()
            disk.cut_at = step
            with suppress(PowerCut):
                Segments.create(FOLDER, IDENTITY, disk=disk, segment_bytes=SEGMENT_BYTES)
            disk.crash(Random(seed))
            if not [name for name in disk.names(FOLDER) if name.endswith(".wal")]:
                assert step < 5
                Segments.create(FOLDER, IDENTITY, disk=disk, segment_bytes=SEGMENT_BYTES)
            assert seen(disk) == (Recovered(), [])


# Rot ---------------------------------------------------------------------------------------------------


def test_flipped_bit_anywhere_before_the_last_frame_is_refused() -> None:
    """R25: with a checksum alone it looks like a torn tail, and 59 acknowledged entries went silently."""
    disk, segments, _ = written(8)
    truth = seen(disk.copy())
    newest, begin, _ = last_frame(disk, segments)
    assert disk.peek(newest).count(b"\xf5HfJ") > 2  # an opening, a frame, and the last one
    ends = {path_of(segment.number): segment.end for segment in segments._log.segments}
    assert len(ends) >= 3
    for path, end in ends.items():
        for offset in range(begin if path == newest else end):
            rotten = disk.copy()
            rotten.flip(path, offset, 1 << offset % 8)
            with pytest.raises(JournalDamaged, match="holdfast node repair") as raised:
                reopened(rotten)
            assert raised.value.path == path
            assert raised.value.offset <= offset
        for offset in range(end, len(disk.peek(path))):
            harmless = disk.copy()
            harmless.flip(path, offset)
            assert seen(harmless) == truth


def test_zeroed_frame_in_the_middle_is_refused() -> None:
    """A write that the disk lost looks like the end of the log."""
    disk, _, _ = written(3)
    path = path_of(1)
    content = disk.peek(path)
    frames = [at for at in range(len(content)) if content.startswith(b"\xf5HfJ", at)]
    disk.poke(path, content[: frames[1]] + bytes(frames[2] - frames[1]) + content[frames[2] :])
    with pytest.raises(JournalDamaged, match="flush 1 is unreadable") as raised:
        reopened(disk)
    assert raised.value.offset == frames[1]


def test_missing_segment_is_refused() -> None:
    disk, segments, _ = written(20)
    numbers = [segment.number for segment in segments._log.segments]
    assert len(numbers) > 3
    for number in numbers[:-1]:
        holed = disk.copy()
        holed.remove(path_of(number))
        with pytest.raises(JournalDamaged, match="missing"):
            reopened(holed)


def test_repeated_or_skipped_flush_is_refused() -> None:
    disk, segments, _ = written(3)
    path, begin, end = last_frame(disk, segments)
    content = disk.peek(path)
    disk.poke(path, content[:end] + content[begin:end])
    with pytest.raises(JournalDamaged, match="flush 3 follows flush 3"):
        reopened(disk)


def test_message_that_contains_a_whole_frame_of_another_journal_is_only_a_message() -> None:
    """Whoever can send a message cannot make a torn tail look like rot, nor rot like a torn tail."""
    other, other_segments, _ = written(9)
    path, begin, end = last_frame(other, other_segments)
    forged = other.peek(path)[begin:end]
    disk = MemoryDisk()
    Segments.create(FOLDER, Identity(cluster_id="c", node="a", incarnation=6), disk=disk)
    segments, journal = reopened(disk)
    journal.add(forged * 2, 2, 1)
    flush(segments, journal)
    disk.flip(path_of(1), segments._end - 1)
    assert seen(disk) == (Recovered(), [])


def test_torn_message_full_of_frame_beginnings_is_searched_in_one_pass() -> None:
    """Each of them claims megabytes; reading those for each would keep a node from starting for hours."""
    head = b"\xf5HfJ" + bytes(8) + struct.pack("<QI", 99, 8 << 20)
    disk = MemoryDisk()
    segments, journal = created(disk)
    journal.add(head * 50_000, 2, 1)
    flush(segments, journal)
    disk.flip(path_of(1), segments._end - 1)
    reads: list[int] = []
    disk.on_read = reads.append
    assert seen(disk) == (Recovered(), [])
    assert sum(reads) < 20 << 20


def test_rot_after_the_start_is_not_sent_to_a_peer() -> None:
    disk, _, journal = written(3)
    content = disk.peek(path_of(1))
    disk.flip(path_of(1), content.index(b"3 3 3"))
    with pytest.raises(JournalDamaged, match="was whole"):
        entries_of(journal)


# A log against a list ----------------------------------------------------------------------------------


class Naive:
    """The log as a list, copied whole for each flush."""

    def __init__(self) -> None:
        self.base, self.base_term = 1, 0
        self.entries: list[Entry] = []
        self.term = 0
        self.vote: str | None = None

    def copy(self) -> "Naive":
        twin = Naive()
        twin.__dict__.update(self.__dict__, entries=list(self.entries))
        return twin

    def cut(self, first: int) -> None:
        self.entries = [entry for entry in self.entries if entry[1] < first]


class Driver:
    """Random operations on a journal, its files and the list, with power cuts between any two steps."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.disk = MemoryDisk()
        self.naive = Naive()
        self.flushed = {0: self.naive.copy()}
        self.durable = 0
        self.crashes = 0
        self.segments, self.journal = created(self.disk)

    def run(self, steps: int) -> None:
        operations = [self.add] * 6 + [self.flush] * 6 + [self.vote, self.truncate, self.commit, self.drop]
        for _ in range(steps):
            operation = self.random.choice([*operations, self.compact, self.reset, self.restart])
            if self.random.random() < 0.3:
                self.disk.cut_at = self.disk.steps + self.random.randrange(8)
            try:
                operation()
            except PowerCut:
                self.come_back()
            self.disk.cut_at = None
            if self.random.random() < 0.1:
                self.compare()

    def add(self) -> None:
        for _ in range(self.random.randrange(5)):
            entry = (self.random.randbytes(self.random.randrange(120)), self.journal.last + 1, self.journal.term)
            self.journal.add(*entry)
            self.naive.entries.append(entry)

    def flush(self) -> None:
        taken = self.journal.take()
        if taken is not None:
            self.flushed[taken.number] = self.naive.copy()
            self.segments.write(taken)
            self.journal.on_durable(taken.lsn)
            self.durable = taken.number
            assert self.journal.durable_index == self.journal.last

    def vote(self) -> None:
        term, vote = self.journal.term + self.random.randrange(1, 3), self.random.choice([None, "a", "b"])
        self.journal.setCurrentTerm(term, vote)
        self.naive.term, self.naive.vote = term, vote

    def truncate(self) -> None:
        if self.journal.last > self.journal.commit:
            first = self.random.randrange(self.journal.commit, self.journal.last) + 1
            self.journal.deleteEntriesFrom(first - self.journal.base)
            self.naive.cut(first)

    def commit(self) -> None:
        self.journal.setRaftCommitIndex(self.random.randrange(self.journal.commit, self.journal.last + 1))

    def compact(self) -> None:
        index = min(self.journal.commit, self.journal.durable_index)
        if index > self.journal.base:
            index = self.random.randrange(self.journal.base, index) + 1
            self.naive.base, self.naive.base_term = next(entry[1:] for entry in self.naive.entries if entry[1] == index)
            self.naive.entries = [entry for entry in self.naive.entries if entry[1] > index]
            self.journal.compact(index)

    def reset(self) -> None:
        if self.random.random() < 0.2:
            index = self.journal.commit + self.random.randrange(30)
            self.journal.reset_to(index, self.journal.term)
            self.naive.base, self.naive.base_term, self.naive.entries = index, self.journal.term, []

    def drop(self) -> None:
        self.segments.drop_before(self.random.choice([self.journal.base, self.journal.base - 3]))

    def restart(self) -> None:
        self.segments.close()
        self.disk.kill()
        self.reopen()

    def come_back(self) -> None:
        self.crashes += 1
        if self.random.random() < 0.2:
            self.disk.kill()
        else:
            self.disk.crash(self.random if self.random.random() < 0.8 else None)
        if self.random.random() < 0.3:
            self.disk.cut_at = self.disk.steps + self.random.randrange(5)
        try:
            self.reopen()
        except PowerCut:
            self.come_back()

    def reopen(self) -> None:
        self.segments, self.journal = reopened(self.disk)
        found = self.segments.recovered
        assert self.durable <= found.flush <= self.durable + 1
        self.durable = found.flush
        self.naive = self.flushed[found.flush].copy()
        self.flushed = {found.flush: self.naive.copy()}
        self.compare()

    def compare(self) -> None:
        journal, naive = self.journal, self.naive
        assert (journal.base, journal.base_term, journal.term, journal.vote) == (
            naive.base,
            naive.base_term,
            naive.term,
            naive.vote,
        )
        assert entries_of(journal) == naive.entries
        assert [journal.term_at(entry[1]) for entry in naive.entries] == [entry[2] for entry in naive.entries]


@pytest.mark.parametrize("seed", range(40))
def test_random_operations_and_power_cuts_leave_what_a_list_would_hold(seed: int) -> None:
    driver = Driver(seed)
    driver.run(400)
    driver.compare()
    assert driver.crashes > 5
