"""Disks that give an error instead of bytes: the start stops, and a repair takes the place for damage."""

import errno
import os

import pytest

from holdfast.cluster.journal import Journal, Promise
from holdfast.cluster.journal_errors import JournalFailed, JournalRefused, JournalUnreadable
from holdfast.cluster.journal_repair import repair
from holdfast.cluster.segments import Segments
from tests.fakes.disk import MemoryDisk
from tests.unit.cluster.test_segments_crash import (
    FOLDER,
    IDENTITY,
    SEGMENT_BYTES,
    entries_of,
    flush,
    path_of,
    written,
)
from tests.unit.cluster.test_segments_repair import frames

BLOCK = 4096
LARGE_BYTES = 64 << 10


def large(flushes: int) -> tuple[MemoryDisk, Segments, Journal]:
    """A journal whose segments have several blocks, with a flush of three quarters of a block each."""
    disk = MemoryDisk()
    segments = Segments.create(FOLDER, IDENTITY, disk=disk, segment_bytes=LARGE_BYTES)
    journal = Journal.recovered(segments.recovered, segments.read_entries, window_bytes=0)
    for number in range(1, flushes + 1):
        journal.setCurrentTerm(number, "b")
        journal.add(b"%d" % (number % 10) * 3072, journal.last + 1, journal.term)
        flush(segments, journal)
    disk.kill()
    return disk, segments, journal


@pytest.mark.parametrize("begin", [0, 200, 2 * BLOCK, 40 * 1024])
def test_unreadable_sector_stops_the_start_with_file_offset_and_remedy(begin: int) -> None:
    """R26: a raw OSError says neither what is lost nor what to do."""
    disk, _, _ = large(4)
    disk.make_unreadable(path_of(1), begin, begin + 512)
    with pytest.raises(JournalUnreadable, match="holdfast node repair") as raised:
        Segments.open(FOLDER, disk=disk)
    assert raised.value.path == path_of(1)
    assert raised.value.offset <= begin
    assert isinstance(raised.value, JournalFailed)
    assert os.strerror(errno.EIO) in str(raised.value)


def test_unreadable_sector_is_repaired_like_damage() -> None:
    """R25: what is before it is kept, and the newest stamp behind it tells vote and promise."""
    disk, segments, journal = large(50)
    expected = entries_of(reopened_large(disk.copy()))
    assert len(segments._log.segments) == 3
    for number, begin, at_least in (
        (1, 0, 0),
        (1, 5 * BLOCK, 5),
        (2, 0, 18),
        (2, 5 * BLOCK, 22),
        (2, 6 * BLOCK + 1024, 22),
    ):
        rotten = disk.copy()
        rotten.make_unreadable(path_of(number), begin, begin + 512)
        said = repair(FOLDER, disk=rotten, segment_bytes=LARGE_BYTES)
        assert (said.term, said.vote) == (50, "b")
        assert said.promise == Promise(index=journal.last, term=50)
        again = reopened_large(rotten)
        assert again.promise == said.promise
        kept = entries_of(again)
        assert kept == expected[: len(kept)]
        assert len(kept) >= at_least


def reopened_large(disk: MemoryDisk) -> Journal:
    segments = Segments.open(FOLDER, disk=disk, segment_bytes=LARGE_BYTES)
    return Journal.recovered(segments.recovered, segments.read_entries, window_bytes=0)


def test_frame_behind_an_unreadable_sector_of_the_newest_segment_is_found() -> None:
    """The search goes on after the block that cannot be read, and reads the sector a few times only."""
    disk, _, _ = large(12)
    disk.make_unreadable(path_of(1), 5 * BLOCK + 512, 5 * BLOCK + 1024)
    said = repair(FOLDER, disk=disk, segment_bytes=LARGE_BYTES)
    assert (said.term, said.vote, said.promise) == (12, "b", Promise(index=13, term=12))
    assert 2 <= said.last <= 8
    assert disk.failed_reads < 10


def test_unreadable_sector_behind_the_newest_stamp_may_hide_a_vote() -> None:
    """R24: nothing says that no later flush was there, so the repair is refused and nothing changed."""
    disk, _, _ = large(4)
    disk.flip(path_of(1), frames(disk, 1)[1] + 30)
    disk.make_unreadable(path_of(1), 8 * BLOCK, 8 * BLOCK + 512)
    before = disk.peek(path_of(1))
    with pytest.raises(JournalRefused, match="new member name"):
        repair(FOLDER, disk=disk, segment_bytes=LARGE_BYTES)
    assert (disk.peek(path_of(1)), disk.names(FOLDER)) == (before, ["0000000001.wal"])


def test_file_that_cannot_be_read_at_all_is_refused() -> None:
    disk, _, _ = large(50)
    disk.make_unreadable(path_of(3), 0, 1 << 40)
    with pytest.raises(JournalRefused, match="new member name"):
        repair(FOLDER, disk=disk, segment_bytes=LARGE_BYTES)


def test_entry_that_becomes_unreadable_is_a_failed_journal() -> None:
    disk, _, _ = large(4)
    journal = reopened_large(disk)
    disk.make_unreadable(path_of(1), 2 * BLOCK, 2 * BLOCK + 512)
    with pytest.raises(JournalUnreadable):
        entries_of(journal)


def test_entry_whose_segment_cannot_be_opened_is_a_failed_journal() -> None:
    disk, _, _ = large(50)
    journal = reopened_large(disk)
    disk.remove(path_of(1))
    with pytest.raises(JournalFailed, match="reading"):
        entries_of(journal)


@pytest.mark.parametrize("step", ["create", "pwrite", "sync", "rename", "sync_directory"])
def test_journal_that_cannot_be_made_says_so(step: str) -> None:
    disk = MemoryDisk()
    disk.failures[step] = errno.ENOSPC
    with pytest.raises(JournalFailed, match="make room"):
        Segments.create(FOLDER, IDENTITY, disk=disk)


@pytest.mark.parametrize("step", ["create", "pwrite", "sync", "rename", "unlink", "sync_directory"])
def test_repair_that_fails_says_so_and_can_be_done_again(step: str) -> None:
    disk, _, journal = written(9)
    disk.kill()
    disk.flip(path_of(1), frames(disk, 1)[1] + 30)
    disk.failures[step] = errno.EIO
    with pytest.raises(JournalFailed, match="check the disk"):
        repair(FOLDER, disk=disk, segment_bytes=SEGMENT_BYTES)
    assert repair(FOLDER, disk=disk, segment_bytes=SEGMENT_BYTES).term == journal.term
