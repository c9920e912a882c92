"""Rot at the end of the newest segment, zeros that only the cache has, and headers: what may pass as torn, what not."""

import errno
import struct
from zlib import crc32

import pytest

from holdfast.cluster.journal import Journal
from holdfast.cluster.journal_errors import JournalDamaged, JournalFailed, JournalRefused
from holdfast.cluster.journal_frames import frame_bytes, salt_of
from holdfast.cluster.journal_repair import repair
from holdfast.cluster.segments import Segments
from tests.fakes.disk import MemoryDisk
from tests.unit.cluster.test_segments_crash import (
    FOLDER,
    IDENTITY,
    SEGMENT_BYTES,
    created,
    flush,
    path_of,
    reopened,
    seen,
    written,
)
from tests.unit.cluster.test_segments_repair import frames


def voted(terms: int) -> tuple[MemoryDisk, Segments, Journal]:
    """A journal with one vote in each term, one flush each."""
    disk = MemoryDisk()
    segments, journal = created(disk)
    for term in range(1, terms + 1):
        journal.setCurrentTerm(term, "b")
        flush(segments, journal)
    return disk, segments, journal


def contents(disk: MemoryDisk) -> dict[str, bytes]:
    return {name: disk.peek(f"{FOLDER}/{name}") for name in disk.names(FOLDER)}


# Tails of several frames ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rotten", [2, 3])
def test_last_frames_rotten_in_their_records_are_damage_and_not_a_torn_tail(rotten: int) -> None:
    """R25: a good head of flush k+2 proves that k+1 was durable; taken as torn, two acknowledged flushes went."""
    disk, _, _ = written(3)
    at = frames(disk, 1)
    for begin in at[-rotten:]:
        disk.flip(path_of(1), begin + 30)
    with pytest.raises(JournalDamaged, match=f"flush {4 - rotten} is unreadable") as raised:
        reopened(disk)
    assert raised.value.offset == at[-rotten]


def test_last_frame_with_a_good_head_alone_is_still_torn() -> None:
    """R1: it is what a power cut in the middle of a write leaves."""
    disk, _, _ = written(3)
    disk.flip(path_of(1), frames(disk, 1)[-1] + 30)
    assert seen(disk)[0].flush == 2


def test_rotten_tail_is_not_repaired_for_its_votes_are_lost() -> None:
    """R25: the heads say that there were later flushes, and no stamp says what they promised."""
    disk, _, _ = voted(5)
    for begin in frames(disk, 1)[-2:]:
        disk.flip(path_of(1), begin + 30)
    before = contents(disk)
    disk.next_process()
    with pytest.raises(JournalRefused, match="new member name"):
        repair(FOLDER, disk=disk, segment_bytes=SEGMENT_BYTES)
    assert contents(disk) == before


def test_head_newer_than_the_newest_readable_stamp_keeps_a_repair_from_forgetting_its_vote() -> None:
    """R25: damage in the oldest segment, and in the newest one only the opening can be read: its vote is old."""
    disk = MemoryDisk()
    segments, journal = created(disk)
    while len(segments._log.segments) < 3:
        journal.setCurrentTerm(journal.term + 1, "b")
        journal.add(bytes(60), journal.last + 1, journal.term)
        flush(segments, journal)
    for _ in range(2):
        journal.setCurrentTerm(journal.term + 1, "c")
        flush(segments, journal)
    disk.flip(path_of(1), frames(disk, 1)[1] + 30)
    whole = disk.copy()
    assert repair(FOLDER, disk=whole, segment_bytes=SEGMENT_BYTES).vote == "c"
    for begin in frames(disk, 3)[1:]:
        disk.flip(path_of(3), begin + 30)
    before = contents(disk)
    disk.next_process()
    with pytest.raises(JournalRefused, match="new member name"):
        repair(FOLDER, disk=disk, segment_bytes=SEGMENT_BYTES)
    assert contents(disk) == before


# Zeros that only the cache has ---------------------------------------------------------------------------


def test_wipe_whose_sync_failed_is_written_again_though_the_cache_shows_zeros() -> None:
    """R26: the second start sees zeros that are marked clean; skipped, the torn frame comes back with the power."""
    disk, segments, journal = written(2, command_bytes=8)
    journal.add(b"T" * 150, journal.last + 1, journal.term)
    flush(segments, journal)
    begin = frames(disk, 1)[-1]
    disk.flip(path_of(1), begin + 30)
    disk.kill()
    disk.failures["sync"] = errno.EIO
    with pytest.raises(JournalFailed):
        reopened(disk)
    reopened(disk)
    disk.crash()
    assert disk.peek(path_of(1))[begin:].strip(b"\0") == b""


def test_vote_after_a_repair_is_not_undone_by_a_frame_that_comes_back() -> None:
    """R9, R26: the repair's wipe failed to sync once; the frame behind it followed the new vote in line."""
    disk, _, _ = voted(6)
    disk.flip(path_of(1), frames(disk, 1)[3] + 30)
    disk.kill()
    step, syncs = disk.step, 0

    def second_sync_fails(name: str) -> None:
        nonlocal syncs
        if name == "sync":
            syncs += 1
            if syncs == 2:  # the plan's is the first
                disk.failures["sync"] = errno.EIO
        step(name)

    disk.step = second_sync_fails  # type: ignore[method-assign]
    with pytest.raises(JournalFailed):
        repair(FOLDER, disk=disk, segment_bytes=SEGMENT_BYTES)
    repair(FOLDER, disk=disk, segment_bytes=SEGMENT_BYTES)
    segments, journal = reopened(disk)
    journal.setCurrentTerm(9, "c")
    flush(segments, journal)
    disk.crash()
    recovered = seen(disk)[0]
    assert (recovered.term, recovered.vote) == (9, "c")


def test_wipe_writes_in_bounded_pieces() -> None:
    disk, _, _ = written(1)
    disk.poke(path_of(1), disk.peek(path_of(1)) + bytes(5 << 20))
    disk.kill()
    disk.trace.clear()
    reopened(disk)
    assert disk.trace == ["pwrite"] * 7 + ["sync", "sync_directory"]  # six pieces, and the last frame


# Stamps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("term", "vote"), [(5, "b"), (6, "c"), (6, None)])
def test_stamp_that_takes_back_a_term_or_a_vote_is_damage_and_no_repair_believes_it(term: int, vote: str) -> None:
    """R9: a good frame of another past, in line by its number, would let the node vote twice."""
    disk, segments, _ = voted(6)
    assert segments._log.flush == 6
    stale = Journal()
    stale.setCurrentTerm(term, vote)
    taken = stale.take()
    assert taken is not None
    content = disk.peek(path_of(1))
    frame = frame_bytes(salt_of(IDENTITY, 1), 7, taken.records)
    disk.poke(path_of(1), content[: segments._end] + frame + content[segments._end + len(frame) :])
    disk.kill()
    with pytest.raises(JournalDamaged, match="flush 7 goes back") as raised:
        reopened(disk)
    assert (raised.value.path, raised.value.offset) == (path_of(1), segments._end)
    with pytest.raises(JournalRefused, match="new member name"):
        repair(FOLDER, disk=disk, segment_bytes=SEGMENT_BYTES)


# Headers -------------------------------------------------------------------------------------------------


def test_flipped_bit_in_a_version_is_damage_and_can_be_repaired() -> None:
    """R25: 'use the program that wrote it' sends the operator looking for a program that never was."""
    disk, _, journal = written(9)
    for offset in (8, 9):
        for bit in range(8):
            rotten = disk.copy()
            rotten.flip(path_of(2), offset, 1 << bit)
            with pytest.raises(JournalDamaged, match="version") as raised:
                reopened(rotten)
            assert raised.value.path == path_of(2)
            assert repair(FOLDER, disk=rotten, segment_bytes=SEGMENT_BYTES).term == journal.term


def test_unknown_format_is_refused_and_left_alone() -> None:
    """Its header need not have our form, nor our checksum."""
    disk, _, _ = written(1)
    content = bytearray(disk.peek(path_of(1)))
    size = struct.unpack_from("<H", content, 10)[0]
    content[8:10] = struct.pack("<H", 2)
    content[size - 4 : size] = struct.pack("<I", crc32(content[: size - 4]))
    for header in (bytes(content), b"HFJRNL\r\n" + struct.pack("<H", 2) + b"\xff" * 200):
        disk.poke(path_of(1), header)
        disk.kill()
        for attempt in (lambda: reopened(disk), lambda: repair(FOLDER, disk=disk)):
            with pytest.raises(JournalRefused, match="format 2"):
                attempt()
        assert disk.peek(path_of(1)) == header
