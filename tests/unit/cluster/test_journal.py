"""The log in memory: what it promises to the library and to the node, without any disk."""

from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.cluster.journal import (
    ENTRY_OVERHEAD_BYTES,
    FLUSH_BYTES,
    MAX_COMMAND_BYTES,
    OPEN_SLICE_MAX,
    Entry,
    Journal,
    JournalBroken,
    Promise,
    Recovered,
)


def log_of(*terms: int) -> Journal:
    """A journal with one entry for each term, from index 2 on, none of it durable."""
    journal = Journal()
    for index, term in enumerate(terms, start=2):
        journal.setCurrentTerm(term, None)
        journal.add(b"%d" % index, index, term)
    return journal


def flush(journal: Journal) -> None:
    while (taken := journal.take()) is not None:
        journal.on_durable(taken.lsn)


def commands(journal: Journal) -> list[bytes]:
    return [entry[0] for entry in journal.read(journal.base + 1, 1 << 30)[0]]


def test_empty_log_has_its_sentinel_only() -> None:
    journal = Journal()
    assert journal[0] == journal[-1] == (b"", 1, 0)
    assert len(journal) == 1
    assert journal[1:] == []
    assert journal.read(2, 100) == ([], 0)
    assert journal.take() is None


def test_items_and_slices_tell_index_and_term() -> None:
    """The library's side of the seam: it asks by offset from the sentinel and reads index and term only."""
    journal = log_of(1, 1, 3, 3, 7)
    assert journal[0:] == [(b"", 1, 0), (b"", 2, 1), (b"", 3, 1), (b"", 4, 3), (b"", 5, 3), (b"", 6, 7)]
    assert journal[2:4] == [(b"", 3, 1), (b"", 4, 3)]
    assert (journal[3], journal[-2]) == ((b"", 4, 3), (b"", 5, 3))
    assert journal[6:7] == journal[99:] == []
    with pytest.raises(IndexError):
        journal[6]


def test_open_slice_is_bounded() -> None:
    """R19: the library copies the whole suffix for each message otherwise."""
    journal = Journal()
    for index in range(2, OPEN_SLICE_MAX + 100):
        journal.add(b"", index, 1)
    assert len(journal[1:]) == OPEN_SLICE_MAX


def test_term_is_known_for_every_index_of_the_log_and_no_other() -> None:
    journal = log_of(1, 1, 3, 3, 7)
    assert [journal.term_at(index) for index in range(0, 8)] == [None, 0, 1, 1, 3, 3, 7, None]


def test_gap_in_the_log_stops_the_node() -> None:
    journal = log_of(1, 1)
    with pytest.raises(JournalBroken, match="does not follow"):
        journal.add(b"x", 5, 1)
    with pytest.raises(JournalBroken, match="does not follow"):
        journal.add(b"x", 3, 1)


def test_entry_of_an_older_term_stops_the_node() -> None:
    journal = log_of(1, 3)
    with pytest.raises(JournalBroken, match="term 2"):
        journal.add(b"x", 4, 2)


def test_entry_above_the_limit_stops_the_node() -> None:
    with pytest.raises(JournalBroken, match="at most"):
        Journal().add(bytes(MAX_COMMAND_BYTES + 1), 2, 1)


def test_truncation_removes_entries_and_their_terms() -> None:
    journal = log_of(1, 1, 3, 3, 7)
    journal.deleteEntriesFrom(3)
    assert (journal.last, journal.last_term) == (3, 1)
    journal.add(b"new", 4, 8)
    assert commands(journal) == [b"2", b"3", b"new"]
    assert [journal.term_at(index) for index in range(2, 6)] == [1, 1, 8, None]


def test_truncation_to_the_sentinel_and_past_the_end() -> None:
    journal = log_of(1, 2)
    journal.deleteEntriesFrom(3)
    assert journal.last == 3
    journal.deleteEntriesFrom(1)
    assert (journal.last, journal.last_term) == (1, 0)


def test_truncation_at_or_below_the_commit_index_stops_the_node() -> None:
    """R3: the last line of defence if the filter lets a repeated message through."""
    journal = log_of(1, 1, 1)
    journal.setRaftCommitIndex(3)
    journal.setRaftCommitIndex(2)  # nothing un-commits
    with pytest.raises(JournalBroken, match="committed"):
        journal.deleteEntriesFrom(2)
    with pytest.raises(JournalBroken, match="committed"):
        journal.deleteEntriesFrom(0)
    journal.deleteEntriesFrom(3)
    assert journal.last == 3


def test_term_never_goes_back_and_a_vote_is_given_once() -> None:
    """R9, R24: two votes in one term are two leaders."""
    journal = Journal()
    journal.setCurrentTerm(4, None)
    journal.setCurrentTerm(4, "b")
    with pytest.raises(JournalBroken, match="would get one for c"):
        journal.setCurrentTerm(4, "c")
    with pytest.raises(JournalBroken, match="would get one for None"):
        journal.setCurrentTerm(4, None)
    with pytest.raises(JournalBroken, match="goes back"):
        journal.setCurrentTerm(3, None)
    assert (journal.getCurrentTerm(), journal.getVotedForNodeId()) == (4, "b")


def test_library_may_neither_compact_nor_clear() -> None:
    with pytest.raises(JournalBroken):
        Journal().deleteEntriesTo(1)
    with pytest.raises(JournalBroken):
        Journal().clear()


def test_nothing_is_durable_before_the_flush_that_holds_it_is() -> None:
    """R8: the node counts itself by `durable_index`, never by `last`."""
    journal = log_of(1, 1)
    taken = journal.take()
    assert taken is not None
    journal.add(b"later", 4, 1)
    assert (journal.durable_index, journal.durable_lsn) == (1, 0)
    journal.on_durable(taken.lsn)
    assert (journal.durable_index, journal.durable_lsn) == (3, taken.lsn)
    assert journal.lsn == taken.lsn + 1
    flush(journal)
    assert (journal.durable_index, journal.durable_lsn) == (4, journal.lsn)


def test_next_flush_waits_for_the_one_before() -> None:
    """R25: what a bad frame means rests on it."""
    journal = log_of(1)
    first = journal.take()
    journal.add(b"x", 3, 1)
    assert journal.take() is None
    assert first is not None
    journal.on_durable(first.lsn)
    second = journal.take()
    assert second is not None and second.number == first.number + 1


def test_only_the_flush_that_was_taken_becomes_durable() -> None:
    journal = log_of(1)
    with pytest.raises(JournalBroken):
        journal.on_durable(journal.lsn)
    taken = journal.take()
    assert taken is not None
    with pytest.raises(JournalBroken):
        journal.on_durable(taken.lsn - 1)


def test_vote_alone_has_a_sequence_number_and_a_flush() -> None:
    """R9: a vote is held by number like everything else."""
    journal = Journal()
    journal.setCurrentTerm(1, "a")
    taken = journal.take()
    assert taken is not None
    assert (taken.lsn, journal.durable_lsn) == (1, 0)
    journal.on_durable(1)
    journal.setCurrentTerm(1, "a")
    assert journal.take() is None


def test_entries_truncated_while_their_flush_is_under_way_are_not_durable_after_it() -> None:
    """R8: other entries have taken their place by then."""
    journal = log_of(1, 1, 1)
    taken = journal.take()
    journal.deleteEntriesFrom(2)
    journal.setCurrentTerm(2, None)
    journal.add(b"other", 3, 2)
    journal.add(b"other", 4, 2)
    assert taken is not None
    journal.on_durable(taken.lsn)
    assert journal.durable_index == 2
    flush(journal)
    assert journal.durable_index == 4


def test_durable_entries_that_are_truncated_are_durable_no_more() -> None:
    journal = log_of(1, 1, 1)
    flush(journal)
    journal.deleteEntriesFrom(2)
    assert journal.durable_index == 2


def test_much_at_once_is_more_than_one_flush_and_truncation_reaches_all() -> None:
    journal = Journal()
    for index in range(2, 8):
        journal.add(bytes(FLUSH_BYTES // 2), index, 1)
    journal.deleteEntriesFrom(3)
    sizes, ends = [], []
    while (taken := journal.take()) is not None:
        journal.on_durable(taken.lsn)
        sizes.append(len(taken.records))
        ends.append(journal.durable_index)
    assert ends == [3, 3, 3, 3]
    assert max(sizes) < FLUSH_BYTES + FLUSH_BYTES // 2
    assert journal.pending_bytes == 0


def test_read_gives_at_least_one_entry_and_respects_the_size() -> None:
    journal = log_of(1, 1, 2)
    assert journal.read(3, 0) == ([(b"3", 3, 1)], 25)
    assert journal.read(2, 50) == ([(b"2", 2, 1), (b"3", 3, 1)], 50)
    assert journal.read(5, 100) == ([], 0)
    assert journal.read(2, 1_000, 3) == ([(b"2", 2, 1), (b"3", 3, 1)], 50)
    assert journal.read(3, 1_000, 2) == ([(b"3", 3, 1)], 25)
    with pytest.raises(JournalBroken, match="compacted"):
        journal.read(1, 100)


class Counted(list[bytes]):
    """A window that counts how many of its commands were looked at, however that is done."""

    looked_at = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.looked_at += len(found) if isinstance(at, slice) else 1
        return found

    def __iter__(self) -> Iterator[bytes]:
        for command in super().__iter__():
            self.looked_at += 1
            yield command


@pytest.mark.parametrize("per_step", [1, 10])
def test_reading_a_large_window_in_small_steps_looks_at_each_command_twice_at_most(per_step: int) -> None:
    """Once to take it, once to see that it no longer fits. A copy of the rest for each step is n * n / 2 of them."""
    journal = log_of(*[1] * 5000)
    window = journal._window = Counted(journal._window)
    entries: list[Entry] = []
    while (more := journal.read(2 + len(entries), per_step * (4 + ENTRY_OVERHEAD_BYTES))[0]) != []:
        entries += more
    assert [entry[1] for entry in entries] == list(range(2, 5002))
    assert 5000 <= window.looked_at <= 2 * 5000


def test_compaction_moves_the_sentinel_and_keeps_the_rest() -> None:
    journal = log_of(1, 1, 3, 3, 7)
    journal.setRaftCommitIndex(6)
    flush(journal)
    for index, term, kept in [(3, 1, [b"4", b"5", b"6"]), (4, 3, [b"5", b"6"]), (6, 7, [])]:
        journal.compact(index)
        assert journal[0] == (b"", index, term)
        assert journal.last == 6 and journal.last_term == 7
        assert commands(journal) == kept
        assert journal.term_at(index - 1) is None
    journal.compact(2)
    assert journal.base == 6
    journal.add(b"7", 7, 7)
    assert journal.read(7, 100)[0] == [(b"7", 7, 7)]


def test_compaction_of_what_is_not_committed_or_not_durable_stops_the_node() -> None:
    journal = log_of(1, 1, 1)
    journal.setRaftCommitIndex(3)
    with pytest.raises(JournalBroken, match="durable 1"):
        journal.compact(3)
    flush(journal)
    with pytest.raises(JournalBroken, match="committed 3"):
        journal.compact(4)


@pytest.mark.parametrize("index", [3, 4, 5, 500])
def test_reset_leaves_an_empty_log_that_goes_on_after_the_snapshot(index: int) -> None:
    journal = log_of(1, 1, 1, 1)
    flush(journal)
    journal.reset_to(index, 9)
    assert (journal.base, journal.base_term, journal.last, journal.last_term) == (index, 9, index, 9)
    assert journal.durable_index == min(index, 5)
    assert journal.commit == index
    journal.add(b"next", index + 1, 9)
    assert journal.read(index + 1, 100)[0] == [(b"next", index + 1, 9)]
    flush(journal)
    assert journal.durable_index == index + 1


def test_reset_below_the_commit_index_stops_the_node() -> None:
    journal = log_of(1, 1, 1)
    journal.setRaftCommitIndex(4)
    with pytest.raises(JournalBroken, match="committed"):
        journal.reset_to(3, 9)


def test_hooks_are_told_of_appends_and_truncations() -> None:
    told: list[object] = []
    journal = log_of(1)
    journal.on_append = lambda command, index: told.append((command, index))
    journal.on_truncate = told.append
    journal.add(b"x", 3, 1)
    journal.deleteEntriesFrom(1)
    assert told == [(b"x", 3), 2]


def test_recovered_log_is_durable_and_reads_its_entries_from_disk() -> None:
    asked: list[tuple[int, int, int]] = []

    def read(index: int, max_bytes: int, last: int) -> tuple[list[Entry], int]:
        asked.append((index, max_bytes, last))
        return [(b"old", index, 3)], 27

    start = Recovered(base=5, base_term=2, last=9, runs=((6, 3),), term=4, vote="b", flush=17)
    journal = Journal.recovered(start, read)
    assert (journal.durable_index, journal.commit, journal.term, journal.vote) == (9, 5, 4, "b")
    assert journal.read(8, 100, 9) == ([(b"old", 8, 3)], 27)
    assert asked == [(8, 100, 9)]
    journal.add(b"new", 10, 4)
    assert journal.read(10, 100)[0] == [(b"new", 10, 4)]
    taken = journal.take()
    assert taken is not None and taken.number == 18


def test_disk_that_answers_with_another_entry_stops_the_node() -> None:
    start = Recovered(last=9, runs=((2, 3),))
    for answer in [(b"", 8, 2), (b"", 7, 3)]:
        with pytest.raises(JournalBroken, match="other entries"):
            Journal.recovered(start, lambda *_, wrong=answer: ([wrong], 24)).read(8, 100)


def test_disk_that_lags_behind_a_truncation_is_not_believed() -> None:
    """The truncation is in memory, its record waits; the disk still has what was there before."""
    on_disk = [(b"old", index, 3) for index in range(2, 10)]
    journal = Journal.recovered(Recovered(last=9, runs=((2, 3),)), lambda index, *_: (on_disk[index - 2 :], 27 * 8))
    journal.deleteEntriesFrom(5)
    journal.add(b"new", 6, 4)
    assert journal.read(2, 1000) == ([(b"old", index, 3) for index in range(2, 6)], 27 * 4)


def test_window_lets_durable_bytes_go_and_nothing_else() -> None:
    journal = Journal(window_bytes=1000)
    for index in range(2, 52):
        journal.add(bytes(36), index, 1)  # 100 bytes each, with what the object costs
    assert len(journal.read(2, 1 << 20)[0]) == 50
    flush(journal)
    with pytest.raises(JournalBroken, match="not in memory"):
        journal.read(46, 1)
    assert len(journal.read(47, 1 << 20)[0]) == 5


def test_window_keeps_what_is_not_durable_however_much_it_is() -> None:
    journal = Journal(window_bytes=1000)
    journal.add(b"durable", 2, 1)
    taken = journal.take()
    for index in range(3, 53):
        journal.add(bytes(36), index, 1)
    assert taken is not None
    journal.on_durable(taken.lsn)
    assert len(journal.read(3, 1 << 20)[0]) == 50


def test_mark_of_a_repair_stays_until_it_is_kept() -> None:
    journal = Journal(Recovered(promise=Promise(index=7, term=3)))
    kept = [journal.promise]
    journal.promise_kept()
    assert [*kept, journal.promise] == [Promise(index=7, term=3), None]
    assert journal.take() is not None
