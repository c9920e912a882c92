"""What one turn reads: a bounded share, in order, from the state that granted it. Real parts, no I/O, time by hand."""

from collections.abc import Iterator

import pytest

from holdfast.client.protocol import commands as c
from holdfast.client.protocol import queries as q
from holdfast.client.protocol.errors import LeaderChanged
from holdfast.client.protocol.replies import Answer, Leased, Messages
from holdfast.cluster.replica import READ_BYTES, Outcome
from tests.support.machine import produce
from tests.unit.cluster.test_replica import Node, Nodes, Q, nodes

MESSAGE = 1_000_000
LEASED = 3  # messages in one lease
SESSIONS = range(3, 11)  # together three times what one turn may read
MOST = READ_BYTES + LEASED * MESSAGE


@pytest.fixture
def full() -> Iterator[tuple[Nodes, Node]]:
    """A queue of large messages, enough for one lease of each session."""
    with nodes("a") as (cluster, node):
        for session in SESSIONS:
            node.do(c.OpenSession(), session)
            node.do(produce(1, *[bytes([session]) * MESSAGE] * LEASED))
        yield cluster, node


def lease() -> c.Lease:
    return c.Lease(queue_id=Q, group="default", max_messages=LEASED, max_bytes=LEASED * MESSAGE)


def turns(node: Node) -> Iterator[list[Outcome]]:
    """What each of the next turns answers: as many as it wants by itself or for its disk, which is quick."""
    node.again = True
    for _ in range(50):
        if not (node.again or node.is_writing):
            return
        before = set(node.outcomes)
        node.turn()
        yield [(token, outcome) for token, outcome in node.outcomes.items() if token not in before]


def size(outcomes: list[Outcome]) -> int:
    replies = [outcome.reply for _, outcome in outcomes if isinstance(outcome, Answer)]
    return sum(len(batch.body) for reply in replies if isinstance(reply, Leased | Messages) for batch in reply.batches)


def test_leases_granted_together_bring_their_messages_over_several_turns(full: tuple[Nodes, Node]) -> None:
    _, node = full
    for session in SESSIONS:
        node.ask(session, lease(), session)
    answered = [found for found in turns(node) if found]
    assert [token for found in answered for token, _ in found] == list(SESSIONS)
    assert max(map(size, answered)) <= MOST
    assert len(answered) >= len(SESSIONS) * LEASED * MESSAGE // MOST
    for session in SESSIONS:
        leased = node.reply(session)
        assert b"".join(bytes(batch.body) for batch in leased.batches) == bytes([session]) * (MESSAGE * LEASED)


def test_what_follows_in_the_log_waits_for_the_messages_of_the_leases_before_it(full: tuple[Nodes, Node]) -> None:
    """They are read from the state that granted them: after the purge they are gone."""
    _, node = full
    for session in SESSIONS:
        node.ask(session, lease(), session)
    purge = c.PurgeQueue(queue_id=Q, group=None, in_flight=True, dead=False)
    purged_after: int | None = None
    for turn, _ in enumerate(turns(node)):
        if turn == 0:
            node.ask("purge", purge)
        if "purge" in node.outcomes and purged_after is None:
            purged_after = len(node.outcomes.keys() & set(SESSIONS))
    assert purged_after == len(SESSIONS)
    for session in SESSIONS:
        assert size([(session, node.outcomes[session])]) == LEASED * MESSAGE


def test_who_is_gone_before_its_messages_were_read_is_not_read_for(full: tuple[Nodes, Node]) -> None:
    _, node = full
    for session in SESSIONS:
        node.ask(session, lease(), session)
    gone = SESSIONS[-1]
    for _ in turns(node):
        if SESSIONS[0] in node.outcomes:
            node.replica.abandon([gone])
    assert set(SESSIONS) - node.outcomes.keys() == {gone}


def test_a_lease_that_was_granted_and_not_read_yet_cannot_be_withdrawn(full: tuple[Nodes, Node]) -> None:
    """It has happened: who withdraws it is told what it holds, and can give it back."""
    _, node = full
    for session in SESSIONS:
        node.ask(session, lease(), session)
    last = SESSIONS[-1]
    for _ in turns(node):
        if SESSIONS[0] in node.outcomes and last not in node.outcomes:
            node.replica.withdraw(last)
    assert isinstance(node.reply(last), Leased)


def test_leases_whose_state_was_replaced_before_they_were_read_are_indeterminate(full: tuple[Nodes, Node]) -> None:
    """A retry under the same number brings the same lease (L4)."""
    _, node = full
    for session in SESSIONS:
        node.ask(session, lease(), session)
    for _ in turns(node):
        if SESSIONS[0] in node.outcomes and SESSIONS[-1] not in node.outcomes:
            node.replica.installed()
    assert set(SESSIONS) <= node.outcomes.keys()
    assert isinstance(node.outcomes[SESSIONS[-1]], LeaderChanged)


@pytest.mark.parametrize("stale", [False, True])
def test_pages_asked_for_together_are_read_over_several_turns(full: tuple[Nodes, Node], stale: bool) -> None:
    _, node = full
    pages = q.Read(queue_id=Q, from_version=1, to_version=LEASED, max_bytes=LEASED * MESSAGE)
    for number in range(8):
        node.read(number, pages, stale=stale)
    answered = [found for found in turns(node) if found]
    assert max(map(size, answered)) <= MOST
    assert set(node.outcomes) >= set(range(8))
    assert sum(map(size, answered)) == 8 * LEASED * MESSAGE
