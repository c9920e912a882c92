"""Repair: keeps what is readable before the damage, forgets no vote, and marks what may have been promised."""

from contextlib import suppress
from random import Random

import pytest

from holdfast.cluster.journal import Journal, Promise
from holdfast.cluster.journal_errors import JournalDamaged, JournalRefused
from holdfast.cluster.journal_frames import Identity
from holdfast.cluster.journal_repair import repair
from holdfast.cluster.segments import Segments
from tests.fakes.disk import MemoryDisk, PowerCut
from tests.unit.cluster.test_segments_crash import (
    FOLDER,
    SEGMENT_BYTES,
    flush,
    last_frame,
    path_of,
    reopened,
    seen,
    written,
)


def repaired(disk: MemoryDisk) -> Segments:
    """Repair, and see that what it says is what the journal then opens with."""
    disk.next_process()
    said = repair(FOLDER, disk=disk, segment_bytes=SEGMENT_BYTES)
    segments, _ = reopened(disk)
    assert segments.recovered == said
    return segments


def frames(disk: MemoryDisk, number: int) -> list[int]:
    """Where the frames of a segment begin, the opening first."""
    content = disk.peek(path_of(number))
    return [at for at in range(len(content)) if content.startswith(b"\xf5HfJ", at)]


def test_flipped_bit_at_every_byte_is_repaired_to_a_prefix_with_vote_and_promise() -> None:
    """R25: the node comes back knowing its vote and how much it must hear again before it counts."""
    disk, segments, _ = written(9)
    truth, entries = seen(disk.copy())
    newest, begin, _ = last_frame(disk, segments)
    shortest = len(entries)
    for segment in segments._log.segments:
        path = path_of(segment.number)
        for offset in range(begin if path == newest else segment.end):
            rotten = disk.copy()
            rotten.flip(path, offset)
            after = repaired(rotten).recovered
            kept = seen(rotten)[1]
            assert kept == entries[: len(kept)]
            assert (after.term, after.vote) == (truth.term, truth.vote)
            assert after.promise == (None if kept == entries else Promise(index=truth.last, term=truth.runs[-1][1]))
            shortest = min(shortest, len(kept))
    assert shortest == 0


def test_repaired_journal_goes_on_and_keeps_its_mark_until_the_promise_is_kept() -> None:
    disk, segments, journal = written(9)
    disk.flip(path_of(2), frames(disk, 2)[1] + 30)
    promised = Promise(index=journal.last, term=journal.last_term)
    segments = repaired(disk)
    journal = Journal.recovered(segments.recovered, segments.read_entries)
    assert 1 < journal.last < promised.index
    for _ in range(30):  # over several segments
        journal.add(bytes(50), journal.last + 1, journal.term)
        flush(segments, journal)
    segments, journal = reopened(disk)
    assert journal.promise == promised
    journal.promise_kept()
    flush(segments, journal)
    assert reopened(disk)[1].promise is None


def test_second_repair_does_not_forget_the_first_promise() -> None:
    disk, _, journal = written(9)
    promised = Promise(index=journal.last, term=journal.last_term)
    disk.flip(path_of(1), frames(disk, 1)[2] + 30)
    segments = repaired(disk)
    journal = Journal.recovered(segments.recovered, segments.read_entries)
    for _ in range(2):
        journal.add(b"x", journal.last + 1, journal.term)
        flush(segments, journal)
    disk.flip(path_of(1), frames(disk, 1)[2] + 30)  # the very frame that the first repair wrote
    assert repaired(disk).recovered.promise == promised


def test_damage_that_took_no_entry_leaves_no_mark() -> None:
    disk, segments, journal = written(1)
    for term in (7, 8):
        journal.setCurrentTerm(term, "c")
        flush(segments, journal)
    disk.flip(path_of(1), frames(disk, 1)[2] + 30)
    after = repaired(disk).recovered
    assert (after.promise, after.last, after.term, after.vote) == (None, journal.last, 8, "c")


def test_beginning_that_was_compacted_behind_the_damage_stays_compacted() -> None:
    """The kept segments do not hold the record of the compaction that let older ones go."""
    disk, segments, journal = written(25)
    journal.setRaftCommitIndex(20)
    journal.compact(20)
    flush(segments, journal)
    assert segments.drop_before(20) > 2
    oldest = segments._log.segments[0].number
    disk.flip(path_of(oldest + 1), frames(disk, oldest + 1)[1] + 30)
    truth = journal.last
    after = repaired(disk).recovered
    assert 2 < after.base <= 20 < after.last < truth
    assert after.promise == Promise(index=truth, term=journal.last_term)
    assert [entry[1] for entry in seen(disk)[1]] == list(range(after.base + 1, after.last + 1))


def test_missing_oldest_segment_leaves_vote_and_promise() -> None:
    disk, _, journal = written(9)
    disk.remove(path_of(1))
    after = repaired(disk).recovered
    assert (after.base, after.last, after.term, after.vote) == (1, 1, journal.term, "b")
    assert after.promise == Promise(index=journal.last, term=journal.last_term)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_unreadable_vote_is_refused_and_nothing_is_changed(elsewhere: bool) -> None:
    """R24: the newest segment is gone as a whole, and with it perhaps a vote."""
    disk, segments, _ = written(9)
    newest = path_of(segments._log.segments[-1].number)
    disk.poke(newest, bytes(SEGMENT_BYTES))
    if elsewhere:
        disk.flip(path_of(1), frames(disk, 1)[1] + 30)  # then there are good frames behind the first damage
    before = {name: disk.peek(f"{FOLDER}/{name}") for name in disk.names(FOLDER)}
    disk.next_process()
    with pytest.raises(JournalRefused, match="new member name"):
        repair(FOLDER, disk=disk)
    assert before == {name: disk.peek(f"{FOLDER}/{name}") for name in disk.names(FOLDER)}


def test_journal_without_any_readable_header_is_refused() -> None:
    disk, segments, _ = written(9)
    for segment in segments._log.segments:
        disk.flip(path_of(segment.number), 20)
    disk.next_process()
    with pytest.raises(JournalRefused, match="new member name"):
        repair(FOLDER, disk=disk)


def test_whole_or_torn_journal_needs_no_repair_and_gets_none() -> None:
    disk, segments, _ = written(3)
    path, _, end = last_frame(disk, segments)
    segments.close()
    for _ in range(2):
        expected, steps = seen(disk.copy())[0], disk.steps
        assert repair(FOLDER, disk=disk) == expected
        assert disk.steps == steps
        disk.flip(path, end - 1)


@pytest.mark.parametrize("segment", [1, 2])
def test_power_cut_at_every_step_of_a_repair_leaves_one_that_can_be_finished(segment: int) -> None:
    """Between the first change and the last the journal does not open: half a repair may have lost the vote."""
    disk, _, _ = written(16)
    disk.flip(path_of(segment), 20 if segment == 1 else frames(disk, segment)[1] + 30)
    whole = disk.copy()
    repair(FOLDER, disk=whole, segment_bytes=SEGMENT_BYTES)
    expected = seen(whole.copy())
    assert whole.steps > 8
    for step in range(whole.steps + 1):
        for seed in range(8):
            twin = disk.copy()
            twin.cut_at = step
            with suppress(PowerCut):
                repair(FOLDER, disk=twin, segment_bytes=SEGMENT_BYTES)
            twin.crash(Random(seed))
            try:
                assert seen(twin) == expected
            except JournalDamaged:
                assert step < whole.steps
                repair(FOLDER, disk=twin, segment_bytes=SEGMENT_BYTES)
                assert seen(twin) == expected


def test_unfinished_repair_cannot_be_opened_nor_made_anew() -> None:
    disk, _, _ = written(9)
    disk.flip(path_of(1), 20)
    disk.next_process()
    disk.cut_at = disk.steps + 6
    with pytest.raises(PowerCut):
        repair(FOLDER, disk=disk)
    disk.kill()
    with pytest.raises(JournalDamaged, match="not finished"):
        Segments.open(FOLDER, disk=disk)
    for number in range(1, 9):
        with suppress(KeyError):
            disk.remove(path_of(number))
    with pytest.raises(JournalRefused, match="already"):
        Segments.create(FOLDER, Identity(cluster_id="c", node="a", incarnation=6), disk=disk)
