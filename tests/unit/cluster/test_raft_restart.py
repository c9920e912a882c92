"""Starting again: journal and state agree, or the one way in which they may differ is made good."""

from random import Random

import pytest

from holdfast.client.protocol.errors import StateBroken
from holdfast.cluster import membership
from holdfast.cluster.consensus import BATCH
from holdfast.cluster.journal import Journal, Recovered
from holdfast.cluster.raft import Raft
from tests.simulation.scripted import sync

RULING = membership.of("abc")


def start(journal: Journal, applied: int, applied_term: int) -> Raft:
    return Raft(
        me="a",
        journal=journal,
        clock=lambda: 0.0,
        rng=Random(1),
        applied=applied,
        applied_term=applied_term,
        configuration=RULING,
    )


def written(*entries: tuple[int, bytes], base: int = 1, base_term: int = 0) -> Journal:
    journal = Journal(Recovered(base=base, base_term=base_term, last=base))
    for term, command in entries:
        journal.add(command, journal.last + 1, term)
    sync(journal)
    return journal


def test_a_node_goes_on_with_its_term_vote_and_log() -> None:
    journal = written((3, BATCH), (3, BATCH))
    journal.setCurrentTerm(5, "b")
    raft = start(journal, 2, 3)
    assert (raft.term, raft.applied, raft.commit_index, raft.committed()) == (5, 2, 2, 2)
    with pytest.raises(Exception, match="vote"):
        journal.setCurrentTerm(5, "c")


def test_a_term_is_never_below_that_of_the_last_entry() -> None:
    assert start(written((7, BATCH)), 1, 0).term == 7


def test_a_crash_between_snapshot_and_journal_is_made_good() -> None:
    """The state is a snapshot at 40 of term 6; the journal still holds losers of term 2 there, or ends before it."""
    for count in (10, 60):
        journal = written(*[(2, BATCH)] * count)
        raft = start(journal, 40, 6)
        assert (journal.base, journal.base_term, journal.last, raft.commit_index) == (40, 6, 40, 40)


def test_a_state_that_ends_before_the_journal_begins_is_refused() -> None:
    journal = written((4, BATCH), base=50, base_term=4)
    with pytest.raises(StateBroken, match="before the journal begins"):
        start(journal, 20, 3)
    assert journal.last == 51


def test_configurations_behind_the_applied_state_are_found_again() -> None:
    change = membership.encode(membership.of("ab"))
    raft = start(written((1, BATCH), (1, change), (1, BATCH)), 2, 1)
    assert (raft.configuration, raft.configuration_index) == (membership.of("ab"), 3)
