"""The journal's files without accidents: what is written is what is recovered and read."""

from pathlib import Path
from threading import Thread
from typing import Generic, TypeVar

import pytest

from holdfast.cluster.disk import REAL_DISK, Disk
from holdfast.cluster.journal import Entry, Flush, Journal, JournalBroken, Recovered, stamp_of
from holdfast.cluster.journal_errors import JournalFailed, JournalRefused
from holdfast.cluster.journal_frames import Identity
from holdfast.cluster.segments import Segments
from tests.fakes.disk import MemoryDisk

IDENTITY = Identity(cluster_id="c-1", node="a", incarnation=77)
FOLDER = "/journal"


def first_segment(number: int = 1) -> str:
    return f"{FOLDER}/{number:010}.wal"


D = TypeVar("D", bound=Disk)


class Written(Generic[D]):
    """A journal on its files, flushed by hand."""

    def __init__(self, disk: D, segments: Segments, *, window_bytes: int = 0) -> None:
        self.disk = disk
        self.segments = segments
        self.journal = Journal.recovered(segments.recovered, segments.read_entries, window_bytes=window_bytes)

    @classmethod
    def new(cls, disk: D, *, folder: str = FOLDER, segment_bytes: int = 1 << 20) -> "Written[D]":
        return cls(disk, Segments.create(folder, IDENTITY, disk=disk, segment_bytes=segment_bytes))

    @classmethod
    def again(cls, disk: D, *, folder: str = FOLDER, segment_bytes: int = 1 << 20) -> "Written[D]":
        return cls(disk, Segments.open(folder, disk=disk, segment_bytes=segment_bytes))

    def add(self, *commands: bytes, term: int = 1) -> None:
        self.journal.setCurrentTerm(max(term, self.journal.term), self.journal.vote)
        for command in commands:
            self.journal.add(command, self.journal.last + 1, term)

    def flush(self) -> None:
        while (taken := self.journal.take()) is not None:
            self.segments.write(taken)
            self.journal.on_durable(taken.lsn)

    def entries(self) -> list[Entry]:
        return all_entries(self.journal)


def all_entries(journal: Journal, max_bytes: int = 200) -> list[Entry]:
    """Every entry of the log, in reads of `max_bytes`."""
    entries: list[Entry] = []
    while (index := journal.base + 1 + len(entries)) <= journal.last:
        entries += journal.read(index, max_bytes)[0]
    return entries


def test_new_journal_is_an_empty_log() -> None:
    disk = MemoryDisk()
    Segments.create(FOLDER, IDENTITY, disk=disk).close()
    assert Segments.open(FOLDER, disk=disk).recovered == Recovered()


def test_entries_term_and_vote_survive() -> None:
    written = Written.new(MemoryDisk())
    written.add(b"one", b"two", term=1)
    written.flush()
    written.journal.setCurrentTerm(5, "b")
    written.add(b"three", term=5)
    written.flush()
    again = Written.again(written.disk.copy())
    assert again.entries() == [(b"one", 2, 1), (b"two", 3, 1), (b"three", 4, 5)]
    assert (again.journal.term, again.journal.vote, again.journal.durable_index) == (5, "b", 4)


def test_vote_survives_without_any_entry() -> None:
    """R9: a node that forgets its vote votes twice."""
    written = Written.new(MemoryDisk())
    written.journal.setCurrentTerm(3, "näme")
    written.flush()
    assert Written.again(written.disk.copy()).journal.vote == "näme"


def test_truncation_survives() -> None:
    """The entries are still in the file, and must not come back."""
    written = Written.new(MemoryDisk())
    written.add(b"one", b"two", b"three", term=1)
    written.flush()
    written.journal.deleteEntriesFrom(2)
    written.flush()
    assert Written.again(written.disk.copy()).entries() == [(b"one", 2, 1)]
    written.add(b"other", term=4)
    written.flush()
    assert Written.again(written.disk.copy()).entries() == written.entries() == [(b"one", 2, 1), (b"other", 3, 4)]


def test_compaction_and_reset_survive() -> None:
    written = Written.new(MemoryDisk())
    written.add(b"one", b"two", b"three")
    written.flush()
    written.journal.setRaftCommitIndex(3)
    written.journal.compact(3)
    written.flush()
    again = Written.again(written.disk.copy())
    assert (again.journal.base, again.journal.base_term, again.entries()) == (3, 1, [(b"three", 4, 1)])
    again.journal.reset_to(100, 6)
    again.add(b"next", term=6)
    again.flush()
    last = Written.again(again.disk.copy())
    assert (last.journal.base, last.journal.base_term, last.entries()) == (100, 6, [(b"next", 101, 6)])


def test_changes_of_mind_within_one_flush_are_replayed_in_order() -> None:
    written = Written.new(MemoryDisk())
    written.add(b"2", b"3", b"4")
    written.journal.deleteEntriesFrom(2)
    written.add(b"3'", b"4'", b"5'", term=2)
    written.journal.deleteEntriesFrom(4)
    written.flush()
    expected = [(b"2", 2, 1), (b"3'", 3, 2), (b"4'", 4, 2)]
    assert written.entries() == Written.again(written.disk.copy()).entries() == expected


def test_log_continues_over_many_segments() -> None:
    written = Written.new(MemoryDisk(), segment_bytes=600)
    for number in range(2, 102):
        written.add(b"%d" % number, term=number // 10)
        written.flush()
    assert len(written.disk.names(FOLDER)) > 10
    again = Written.again(written.disk.copy(), segment_bytes=600)
    assert again.entries() == written.entries() == [(b"%d" % number, number, number // 10) for number in range(2, 102)]


def test_flush_larger_than_a_segment_has_one_of_its_own() -> None:
    written = Written.new(MemoryDisk(), segment_bytes=600)
    for size in (5000, 5000, 10, 5000, 10):
        written.add(bytes(size))
        written.flush()
    assert len(written.disk.names(FOLDER)) == 5
    assert [len(entry[0]) for entry in Written.again(written.disk.copy()).entries()] == [5000, 5000, 10, 5000, 10]


@pytest.mark.parametrize("max_bytes", [1, 100, 1000, 1 << 30])
def test_entries_read_from_disk_equal_those_in_memory(max_bytes: int) -> None:
    """Over segments, truncations in several frames, and frames that hold only part of what is asked."""
    disk = MemoryDisk()
    written = Written.new(disk, segment_bytes=900)
    remembered = Journal()
    for round_number in range(1, 60):
        for journal in (written.journal, remembered):
            journal.setCurrentTerm(round_number, None)
            if round_number % 7 == 0:
                journal.deleteEntriesFrom(len(journal) - 5)
            for _ in range(round_number % 4):
                journal.add(b"%d" % round_number * (round_number % 9), journal.last + 1, round_number)
        written.flush()
    expected = all_entries(remembered, max_bytes)
    assert all_entries(written.journal, max_bytes) == expected
    assert all_entries(Written.again(disk.copy()).journal, max_bytes) == expected
    assert written.segments.read_entries(10, max_bytes) == remembered.read(10, max_bytes)
    for last in (2, 10, 12, 30):
        found = written.segments.read_entries(10, max_bytes, last)
        assert found == remembered.read(10, max_bytes, last)
        assert found[0][-1][1] <= max(last, 10)


def test_reader_sees_what_was_written_after_it_had_read_the_place() -> None:
    """Its buffer still has the zeros that were there before."""
    written = Written.new(MemoryDisk())
    for number in range(2, 12):
        written.add(b"%d" % number)
        written.flush()
        assert written.segments.read_entries(number, 1)[0] == [(b"%d" % number, number, 1)]


def test_reading_what_is_not_there_stops_the_node() -> None:
    written = Written.new(MemoryDisk())
    written.add(b"one")
    written.flush()
    for index in (1, 3):
        with pytest.raises(JournalBroken, match=f"no entry {index}"):
            written.segments.read_entries(index, 100)


def test_segments_below_the_durable_base_are_dropped_and_no_others() -> None:
    written = Written.new(MemoryDisk(), segment_bytes=600)
    for number in range(2, 62):
        written.add(b"%d" % number)
        written.flush()
    assert written.segments.drop_before(1000) == 0
    written.journal.setRaftCommitIndex(40)
    written.journal.compact(40)
    assert written.segments.drop_before(40) == 0  # the base is not durable yet
    written.flush()
    size, before = written.segments.size_bytes, len(written.disk.names(FOLDER))
    dropped = written.segments.drop_before(40)
    assert 0 < dropped < before
    assert len(written.disk.names(FOLDER)) == before - dropped
    assert written.segments.size_bytes < size - 400 * dropped
    again = Written.again(written.disk.copy(), segment_bytes=600)
    assert (again.journal.base, again.journal.last) == (40, 61)
    assert again.entries() == written.entries() == [(b"%d" % number, number, 1) for number in range(41, 62)]
    again.journal.setRaftCommitIndex(61)
    again.journal.compact(61)
    again.flush()
    again.segments.drop_before(61)
    assert len(again.disk.names(FOLDER)) <= 2


def test_segments_are_kept_as_long_as_the_caller_wants_them() -> None:
    """A peer that is a little behind is served from the log, not by a snapshot."""
    written = Written.new(MemoryDisk(), segment_bytes=600)
    for number in range(2, 62):
        written.add(b"%d" % number)
        written.flush()
    written.journal.setRaftCommitIndex(60)
    written.journal.compact(60)
    written.flush()
    assert 0 < written.segments.drop_before(20) < written.segments.drop_before(60)


def test_segments_full_of_truncated_entries_are_dropped_too() -> None:
    written = Written.new(MemoryDisk(), segment_bytes=600)
    for number in range(2, 42):
        written.add(b"%d" % number)
        written.flush()
    written.journal.deleteEntriesFrom(9)
    for number in range(10, 22):
        written.add(b"%d" % number, term=2)
        written.flush()
    written.journal.setRaftCommitIndex(15)
    written.journal.compact(15)
    written.flush()
    assert written.segments.drop_before(15) > 4
    again = Written.again(written.disk.copy(), segment_bytes=600)
    assert again.entries() == [(b"%d" % number, number, 2) for number in range(16, 22)]


def test_flushes_are_written_in_order_without_a_gap() -> None:
    segments = Segments.create(FOLDER, IDENTITY, disk=MemoryDisk())
    with pytest.raises(JournalBroken, match="cannot follow"):
        segments.write(Flush(1, 2, b""))
    with pytest.raises(JournalFailed):
        segments.write(Flush(1, 1, b""))


def test_flush_that_contradicts_itself_stops_the_node() -> None:
    other = Journal()
    other.add(b"x", 2, 1)
    segments = Segments.create(FOLDER, IDENTITY, disk=MemoryDisk())
    with pytest.raises(JournalBroken, match="ends at 2"):
        segments.write(Flush(1, 1, stamp_of(other)))


def test_segment_of_another_past_of_this_journal_stops_the_node() -> None:
    """As when a folder is put together from two backups: every frame is good, and the log never existed."""
    disks = []
    for vote in ("a", "b"):
        written = Written.new(MemoryDisk(), segment_bytes=600)
        written.journal.setCurrentTerm(1, vote)
        for _ in range(12):
            written.add(b"x")
            written.flush()
        disks.append(written.disk)
        written.segments.close()
    disks[0].poke(first_segment(2), disks[1].peek(first_segment(2)))
    with pytest.raises(JournalBroken, match="opens with"):
        Segments.open(FOLDER, disk=disks[0])


def test_one_flush_is_one_write_and_one_sync() -> None:
    disk = MemoryDisk()
    written = Written.new(disk)
    for count in (1, 64):
        disk.trace.clear()
        written.add(*[b"x"] * count)
        written.flush()
        assert disk.trace == ["pwrite", "sync"]


def test_closed_journal_writes_no_more() -> None:
    written = Written.new(MemoryDisk())
    written.segments.close()
    written.add(b"one")
    with pytest.raises(JournalFailed, match="closed"):
        written.flush()


def test_journal_of_another_node_cluster_or_incarnation_is_refused() -> None:
    """R24: a disk under the wrong name would vote for two."""
    disk = MemoryDisk()
    Segments.create(FOLDER, IDENTITY, disk=disk).close()
    for told in (IDENTITY, None):
        segments = Segments.open(FOLDER, told, disk=disk)
        assert segments.identity == IDENTITY
        segments.close()
    for other in (
        Identity(cluster_id="c-2", node="a", incarnation=77),
        Identity(cluster_id="c-1", node="b", incarnation=77),
        Identity(cluster_id="c-1", node="a", incarnation=78),
    ):
        with pytest.raises(JournalRefused, match="belongs to"):
            Segments.open(FOLDER, other, disk=disk)


def test_segment_of_another_journal_among_ours_is_refused() -> None:
    disk = MemoryDisk()
    Segments.create(FOLDER, IDENTITY, disk=disk).close()
    Segments.create("/other", Identity(cluster_id="c-1", node="b", incarnation=1), disk=disk)
    disk.poke(first_segment(2), disk.peek("/other/0000000001.wal"))
    with pytest.raises(JournalRefused, match="belongs to"):
        Segments.open(FOLDER, disk=disk)


def test_absent_journal_is_refused_and_a_present_one_not_made_again() -> None:
    disk = MemoryDisk()
    with pytest.raises(JournalRefused, match="no journal"):
        Segments.open(FOLDER, disk=disk)
    Segments.create(FOLDER, IDENTITY, disk=disk).close()
    with pytest.raises(JournalRefused, match="already"):
        Segments.create(FOLDER, IDENTITY, disk=disk)


def test_memory_does_not_grow_with_the_log() -> None:
    """What is held after 200,000 entries: the window, a place per 64 KiB of file, and nothing per entry."""
    disk = MemoryDisk()
    written = Written(disk, Segments.create(FOLDER, IDENTITY, disk=disk), window_bytes=100_000)
    journal = written.journal
    for _ in range(200_000 // 64):
        for _ in range(64):
            journal.add(b"x", journal.last + 1, 1)
        written.flush()
        disk.trace.clear()
    assert held(journal) < 100_000 // 64 + 100
    assert held(written.segments._log) < 3 * (written.segments.size_bytes // 65536 + 2) + 100
    written.segments.close()
    again = Segments.open(FOLDER, disk=disk)
    assert again.recovered.runs == ((2, 1),)
    assert held(again._log) == held(written.segments._log)


def held(owner: object) -> int:
    """How many items all containers of an object have together."""
    return sum(len(value) for value in vars(owner).values() if hasattr(value, "__len__"))


def test_one_thread_reads_what_another_writes(tmp_path: Path) -> None:
    segments = Segments.create(str(tmp_path / "journal"), IDENTITY, segment_bytes=5_000)
    journal = Journal.recovered(segments.recovered, segments.read_entries, window_bytes=0)
    for _ in range(60):
        journal.setCurrentTerm(journal.term + 1, None)
        if journal.last > 20:
            journal.deleteEntriesFrom(len(journal) - 9)
        for _ in range(20):
            journal.add(b"%d" % journal.term * 10, journal.last + 1, journal.term)
        taken = journal.take()
        assert taken is not None
        writer = Thread(target=segments.write, args=(taken,))
        writer.start()
        entries = all_entries(journal, 5000)
        writer.join()
        journal.on_durable(taken.lsn)
        assert all_entries(journal, 5000) == entries
    segments.close()


def test_same_on_real_files(tmp_path: Path) -> None:
    folder = str(tmp_path / "deep" / "journal")
    written = Written.new(REAL_DISK, folder=folder, segment_bytes=5000)
    for number in range(2, 202):
        written.add(b"%d" % number * 20, term=number // 50)
        written.flush()
    written.journal.setCurrentTerm(9, "c")
    written.journal.deleteEntriesFrom(150)
    written.journal.setRaftCommitIndex(100)
    written.journal.compact(90)
    written.flush()
    assert written.segments.drop_before(90) > 0
    expected = [(b"%d" % number * 20, number, number // 50) for number in range(91, 151)]
    assert written.entries() == expected
    written.segments.close()
    (tmp_path / "deep" / "journal" / "0000000099.wal.new").write_bytes(b"left by a crash")
    again = Written.again(REAL_DISK, folder=folder, segment_bytes=5000)
    assert again.entries() == expected
    assert (again.journal.term, again.journal.vote) == (9, "c")
    assert not [name for name in REAL_DISK.names(folder) if name.endswith(".new")]
    again.segments.close()
