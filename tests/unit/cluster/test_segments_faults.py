"""A second opener, a flush that is wrong, descriptors and plans: each fault ends in a clear error."""

import errno
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from random import Random
from threading import Event, Thread

import pytest

from holdfast.cluster.disk import REAL_DISK
from holdfast.cluster.journal import Flush, Journal, JournalBroken, Recovered, stamp_of
from holdfast.cluster.journal_errors import JournalDamaged, JournalFailed, JournalRefused
from holdfast.cluster.journal_repair import repair
from holdfast.cluster.segments import Segments
from tests.fakes.disk import MemoryDisk, PowerCut
from tests.unit.cluster.test_segments_crash import (
    FOLDER,
    IDENTITY,
    SEGMENT_BYTES,
    created,
    entries_of,
    flush,
    path_of,
    reopened,
    seen,
    written,
)
from tests.unit.cluster.test_segments_repair import frames

# Locked --------------------------------------------------------------------------------------------------


def test_second_opener_is_refused_until_the_first_has_closed() -> None:
    """R1: two processes on one folder wipe and overwrite what the other has acknowledged."""
    disk = MemoryDisk()
    first = Segments.create(FOLDER, IDENTITY, disk=disk)
    for attempt in (
        lambda: Segments.open(FOLDER, disk=disk),
        lambda: repair(FOLDER, disk=disk),
        lambda: Segments.create(FOLDER, IDENTITY, disk=disk),
    ):
        with pytest.raises(JournalRefused, match="in use by another process"):
            attempt()
    first.close()
    second = Segments.open(FOLDER, disk=disk)
    with pytest.raises(JournalRefused, match="in use by another process"):
        Segments.open(FOLDER, disk=disk)
    second.close()
    repair(FOLDER, disk=disk)
    Segments.open(FOLDER, disk=disk).close()


def test_whoever_fails_to_open_does_not_keep_the_folder() -> None:
    disk, _, _ = written(9)
    disk.kill()
    damaged = disk.copy()
    damaged.flip(path_of(1), frames(disk, 1)[1] + 30)
    for _ in range(2):
        with pytest.raises(JournalDamaged):
            reopened(damaged)
    disk.failures["sync"] = errno.EIO
    with pytest.raises(JournalFailed):
        reopened(disk)
    with pytest.raises(JournalRefused, match="already"):
        Segments.create(FOLDER, IDENTITY, disk=disk)
    reopened(disk)


def test_second_opener_of_real_files_is_refused(tmp_path: Path) -> None:
    """R1: the same with the operating system's lock, which dies with its process."""
    folder = str(tmp_path / "journal")
    first = Segments.create(folder, IDENTITY)
    with pytest.raises(JournalRefused, match="in use by another process"):
        Segments.open(folder)
    code = "import sys; from holdfast.cluster.segments import Segments; Segments.open(sys.argv[1])"
    other = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, timeout=30)
    assert "JournalRefused" in other.stderr
    first.close()
    assert repair(folder) == Recovered()
    Segments.open(folder).close()


def test_absent_folder_is_refused_and_not_made(tmp_path: Path) -> None:
    for attempt in (Segments.open, repair):
        with pytest.raises(JournalRefused, match="no journal"):
            attempt(str(tmp_path / "absent"))
    assert not (tmp_path / "absent").exists()


# Wrong ---------------------------------------------------------------------------------------------------


def test_flush_that_contradicts_itself_is_never_written() -> None:
    """R26: synced first and checked afterwards, it kept the node from starting for good."""
    other = Journal()
    other.add(b"x", 2, 1)
    good = other.take()
    assert good is not None
    ends_elsewhere = stamp_of(other)
    no_stamp = good.records[: -len(stamp_of(other))]
    for records in (ends_elsewhere, no_stamp, good.records[:-1], b"\x63" + good.records[1:], b""):
        disk = MemoryDisk()
        segments, _ = created(disk)
        before, steps = disk.peek(path_of(1)), disk.steps
        with pytest.raises(JournalBroken):
            segments.write(Flush(1, 1, records))
        with pytest.raises(JournalFailed, match="stopped before"):
            segments.write(Flush(1, 1, good.records))
        assert (disk.peek(path_of(1)), disk.steps) == (before, steps)
        disk.kill()
        assert seen(disk) == (Recovered(), [])


def test_refused_flush_changes_nothing_that_is_read() -> None:
    """The reader's places are as before, though the flush began with a truncation."""
    disk, segments, journal = written(3)
    expected = entries_of(journal)
    twin = Journal.recovered(reopened(disk.copy())[0].recovered, segments.read_entries)
    twin.deleteEntriesFrom(2)
    taken = twin.take()
    assert taken is not None
    with pytest.raises(JournalBroken):
        segments.write(Flush(1, 4, taken.records + stamp_of(journal)))
    assert entries_of(journal) == expected


# Descriptors ---------------------------------------------------------------------------------------------


def test_closed_file_does_not_touch_whoever_got_its_descriptor(tmp_path: Path) -> None:
    """R1: the number is given to the next file that is opened, by anybody."""
    file = REAL_DISK.create(str(tmp_path / "a"))
    file.close()
    other = os.open(tmp_path / "b", os.O_RDWR | os.O_CREAT)
    try:
        for use in (
            lambda: file.pwrite(b"journal", 0),
            lambda: file.pread(1, 0),
            file.sync,
            file.size,
        ):
            with pytest.raises(OSError, match="closed"):
                use()
        file.close()
        assert os.pwrite(other, b"mine", 0) == 4
        assert (tmp_path / "b").read_bytes() == b"mine"
    finally:
        os.close(other)


def test_real_file_is_not_closed_under_a_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R26: the sync would be of whatever file got the number meanwhile, and succeed."""
    file = REAL_DISK.create(str(tmp_path / "a"))
    begun, go_on = Event(), Event()
    alive: list[int] = []

    def slow(descriptor: int) -> None:
        begun.set()
        go_on.wait(10)
        alive.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fdatasync", slow)
    syncing, closing = Thread(target=file.sync), Thread(target=file.close)
    syncing.start()
    assert begun.wait(10)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    go_on.set()
    syncing.join(10)
    closing.join(10)
    assert alive == [0]


def test_close_waits_for_the_write_in_flight_and_later_ones_are_refused() -> None:
    """R26: a descriptor that is closed under a write may be another file's by the time of the sync."""
    disk, segments, journal = written(2)
    journal.add(b"in flight", journal.last + 1, journal.term)
    taken = journal.take()
    assert taken is not None
    begun, go_on = Event(), Event()
    step = disk.step

    def slow(name: str) -> None:
        if name == "sync":
            begun.set()
            go_on.wait(10)
        step(name)

    disk.step = slow  # type: ignore[method-assign]
    writer = Thread(target=segments.write, args=(taken,))
    writer.start()
    assert begun.wait(10)
    closer = Thread(target=segments.close)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive()
    go_on.set()
    writer.join(10)
    closer.join(10)
    with pytest.raises(JournalFailed, match="closed"):
        segments.write(Flush(9, taken.number + 1, taken.records))
    with pytest.raises(JournalFailed, match="closed"):
        segments.read_entries(2, 100)
    segments.close()
    assert disk.handles == []
    assert seen(disk)[1][-1][0] == b"in flight"


def test_dropped_segment_is_not_held_open_by_its_reader() -> None:
    """Else its room is not free until somebody reads elsewhere."""
    disk, segments, journal = written(25)
    assert segments.read_entries(2, 1)[0][0][1] == 2
    journal.setRaftCommitIndex(45)
    journal.compact(45)
    flush(segments, journal)
    assert segments.drop_before(45) > 2
    assert disk.handles_without_name() == 0
    assert [entry[1] for entry in entries_of(journal)] == list(range(46, journal.last + 1))


def test_files_are_closed_by_whoever_failed_to_open_them() -> None:
    disk, _, _ = written(9)
    disk.kill()
    disk.failures["sync"] = errno.EIO
    with pytest.raises(JournalFailed):
        reopened(disk)
    assert disk.handles == []


# Plans ---------------------------------------------------------------------------------------------------


def planned() -> MemoryDisk:
    """A repair that was cut off after its plan was written down."""
    disk, _, _ = written(9)
    disk.flip(path_of(1), frames(disk, 1)[1] + 30)
    disk.kill()
    disk.cut_at = disk.steps + 6
    with pytest.raises(PowerCut):
        repair(FOLDER, disk=disk, segment_bytes=SEGMENT_BYTES)
    disk.kill()
    assert "repair" in disk.names(FOLDER)
    return disk


@pytest.mark.parametrize("offset", [0, 20, 60])
@pytest.mark.parametrize("readable", [True, False])
def test_unreadable_plan_says_what_is_left_to_do(offset: int, readable: bool) -> None:
    """'Run repair' would send the operator in a circle."""
    disk = planned()
    if readable:
        disk.flip(f"{FOLDER}/repair", offset)
    else:
        disk.make_unreadable(f"{FOLDER}/repair", offset, offset + 1)
    with pytest.raises(JournalRefused, match=r"copy .* new member name"):
        repair(FOLDER, disk=disk, segment_bytes=SEGMENT_BYTES)


def test_plan_whose_name_is_in_the_cache_only_is_made_durable_before_it_is_carried_out() -> None:
    """R25: the process died before the folder was synced; later the removals were on disk, and the plan was not."""
    whole, _, _ = written(16)
    whole.flip(path_of(2), frames(whole, 2)[1] + 30)
    finished = whole.copy()
    expected = repair(FOLDER, disk=finished, segment_bytes=SEGMENT_BYTES)
    rename_at = finished.trace.index("rename")
    for step in range(finished.steps):
        for seed in range(12):
            disk = whole.copy()
            disk.cut_at = rename_at + 1
            with pytest.raises(PowerCut):
                repair(FOLDER, disk=disk, segment_bytes=SEGMENT_BYTES)
            disk.kill()
            disk.cut_at = disk.steps + step
            with suppress(PowerCut):
                repair(FOLDER, disk=disk, segment_bytes=SEGMENT_BYTES)
            disk.crash(Random(seed))
            with suppress(JournalDamaged):
                assert seen(disk)[0] == expected
                continue
            assert repair(FOLDER, disk=disk, segment_bytes=SEGMENT_BYTES) == expected
