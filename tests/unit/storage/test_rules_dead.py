"""Rules D1 … D6: where dead messages go, what is known of them, and how they come back."""

from typing import Any

import pytest

from holdfast.client.protocol.columns import MessageParts, check, decode_headers, header_cell, pack
from holdfast.client.protocol.commands import (
    AckBatch,
    CreateGroup,
    CreateQueue,
    DeleteGroup,
    DeleteQueue,
    DropDead,
    Lease,
    Nack,
    OpenProducer,
    OpenSession,
    Redrive,
    RedriveToOrigin,
    Touch,
    UpdateQueue,
)
from holdfast.client.protocol.errors import (
    BadHeader,
    DeadLetterCycle,
    OriginGone,
    QueueNotFound,
    QueueReferenced,
    ReservedName,
)
from holdfast.client.protocol.queries import DeadLetters, DescribeQueue, Explain, FindMoved, Peek, Stats
from holdfast.client.protocol.replies import (
    DeadListed,
    DeadRow,
    Done,
    Explained,
    Failed,
    Grant,
    GroupStats,
    Leased,
    MessageBatch,
    Messages,
    QueueCreated,
    QueueDescribed,
    Redriven,
    Reply,
    Settled,
    VersionsFound,
)
from holdfast.client.protocol.values import GroupSettings, LeaseId, QueueId, QueueSettings
from tests.support.machine import START_MS, Machine, produce, session_id

GRAVES = QueueId(1)
Q = QueueId(2)
NOTHING = Leased(lease_id=LeaseId(0), deadline_ms=0, grants=())
TEA = MessageParts(b"tea", key="k1", headers={"colour": "green"})


def queues(*messages: bytes | MessageParts, **settings: Any) -> Machine:
    """A queue `graves` without settings and a queue `q` with these, both with a group `default`."""
    machine = Machine()
    for session in (1, 2):
        machine.do(OpenSession(consumer_id=f"worker-{session}"), session)
    assert machine.do(CreateQueue(name="graves")) == QueueCreated(queue_id=GRAVES)
    assert machine.do(CreateQueue(name="q", settings=QueueSettings(**settings))) == QueueCreated(queue_id=Q)
    if messages:
        machine.do(produce(Q, *messages, client_id="shop", first_seq=101))
    return machine


def moving(*messages: bytes | MessageParts, **settings: Any) -> Machine:
    return queues(*messages, dlq_strategy="move", dlq_queue="graves", **settings)


def take(machine: Machine, queue: QueueId = Q, group: str = "default", session: int = 1) -> Leased:
    reply = machine.do(Lease(queue_id=queue, group=group, max_messages=100), session)
    assert isinstance(reply, Leased), reply
    return reply


def kill(machine: Machine, *versions: int, error: str | None = None, group: str = "default") -> None:
    """Lease all that is available, reject these."""
    lease_id = take(machine, group=group).lease_id
    ranges = tuple((lease_id, version, version) for version in versions)
    reply = machine.do(Nack(queue_id=Q, group=group, ranges=ranges, dead=True, error=error))
    assert reply == Settled(count=len(versions))


def dead(machine: Machine, **named: Any) -> tuple[DeadRow, ...]:
    reply = machine.ask(DeadLetters(queue_id=Q, **named))
    assert isinstance(reply, DeadListed), reply
    return reply.rows


def stats(machine: Machine, queue: QueueId = Q, group: str = "default") -> GroupStats:
    reply = machine.ask(Stats(queue_id=queue, group=group))
    assert isinstance(reply, GroupStats), reply
    return reply


def why(machine: Machine, version: int, group: str = "default") -> Reply:
    return machine.ask(Explain(queue_id=Q, group=group, version=version))


def stored(machine: Machine, queue: QueueId) -> tuple[MessageBatch, ...]:
    page = machine.ask(Peek(queue_id=queue, limit=100))
    assert isinstance(page, Messages), page
    return page.batches


def headers(batch: MessageBatch, index: int = 0) -> dict[str, str]:
    return decode_headers(header_cell(batch.columns, batch.body, index))


def redrive(*rows: tuple[int, int, int]) -> Redrive:
    return Redrive(queue_id=Q, group="default", dead=rows)


# D1: strategies


def test_a_parked_message_stays_with_its_payload() -> None:
    """D1: by default it is marked dead, kept, and not delivered."""
    machine = queues(b"a", b"b")
    kill(machine, 1)
    assert [(row.version, row.payload, row.move_failed) for row in dead(machine)] == [(1, b"a", False)]
    assert why(machine, 1) == Explained(reason="dead", facts=(("dead_seq", 1), ("cause", "rejected")))
    assert (stats(machine).dead, stats(machine).in_flight) == (1, 1)


def test_a_moved_message_is_in_its_new_queue_in_the_same_entry() -> None:
    """D1: it is produced there with its lineage in headers behind its own, and is gone here."""
    machine = moving(b"x", TEA)
    kill(machine, 2, error="the vase bit me")
    assert dead(machine) == ()
    assert why(machine, 2) == Explained(reason="moved")
    (batch,) = stored(machine, GRAVES)
    assert machine.payloads(GRAVES, take(machine, GRAVES)) == [b"tea"]
    assert headers(batch) == {
        "colour": "green",
        "holdfast-origin-queue": "q",
        "holdfast-origin-queue-id": "2",
        "holdfast-origin-version": "2",
        "holdfast-client-id": "shop",
        "holdfast-client-seq": "102",
        "holdfast-reason": "rejected",
        "holdfast-attempts": "1",
        "holdfast-group": "default",
        "holdfast-last-error": "the vase bit me",
    }


def test_a_discarded_message_is_counted_and_gone() -> None:
    """D1: no row is kept, the counter tells."""
    machine = queues(b"a", dlq_strategy="discard")
    kill(machine, 1)
    assert dead(machine) == ()
    assert (stats(machine).discarded, stats(machine).dead, stats(machine).expired) == (1, 0, 0)


def test_a_target_must_exist_and_not_lead_back() -> None:
    """D1: a missing queue, the queue itself and a ring of two are refused."""
    machine = moving()
    missing = (("dlq_queue", "nowhere"),)
    assert machine.do(UpdateQueue(queue_id=GRAVES, changes=missing)) == Failed(QueueNotFound(queue="nowhere"))
    for target in ("q", "graves"):
        reply = machine.do(UpdateQueue(queue_id=GRAVES, changes=(("dlq_queue", target),)))
        assert reply == Failed(DeadLetterCycle(queue="graves", target=target))


def test_a_target_cannot_be_deleted_while_it_is_named() -> None:
    """D1: the refusal names who refers to it; after that one is pointed elsewhere it can go."""
    machine = moving()
    assert machine.do(DeleteQueue(queue_id=GRAVES)) == Failed(QueueReferenced(name="graves", referrer="q"))
    machine.do(UpdateQueue(queue_id=Q, changes=(("dlq_strategy", "park"), ("dlq_queue", None))))
    assert machine.do(DeleteQueue(queue_id=GRAVES)) == Done()


def test_when_the_target_is_full_the_message_is_parked() -> None:
    """D1: nothing is lost: it is marked move_failed, and a redrive sends it on when there is room."""
    machine = moving(b"a", b"b")
    machine.do(UpdateQueue(queue_id=GRAVES, changes=(("max_backlog_messages", 1),)))
    kill(machine, 1, 2)
    assert [(row.version, row.dead_seq, row.move_failed) for row in dead(machine)] == [(2, 1, True)]
    assert (stats(machine).moved, stats(machine).dead) == (1, 1)
    assert machine.do(redrive((2, 2, 1))) == Redriven(count=0, skipped=1)
    machine.do(UpdateQueue(queue_id=GRAVES, changes=(("max_backlog_messages", 2),)))
    assert machine.do(redrive((2, 2, 1))) == Redriven(count=1, skipped=0)
    assert (stats(machine).moved, stats(machine).dead) == (2, 0)
    assert machine.payloads(GRAVES, take(machine, GRAVES)) == [b"a", b"b"]


def test_a_ring_through_a_groups_own_target_is_refused() -> None:
    """D1: a group's dead-letter queue is followed as its queue's is, also over two steps."""
    machine = moving()
    machine.do(CreateQueue(name="deep"))
    machine.do(UpdateQueue(queue_id=GRAVES, changes=(("dlq_queue", "deep"),)))
    own = GroupSettings(dlq_strategy="move", dlq_queue="q")
    reply = machine.do(CreateGroup(queue_id=QueueId(3), group="other", settings=own))
    assert reply == Failed(DeadLetterCycle(queue="deep", target="q"))
    own = GroupSettings(dlq_strategy="move", dlq_queue="nowhere")
    reply = machine.do(CreateGroup(queue_id=QueueId(3), group="other", settings=own))
    assert reply == Failed(QueueNotFound(queue="nowhere"))


def test_a_target_of_a_single_group_cannot_be_deleted_either() -> None:
    """D1: it is referenced as long as the group is there."""
    machine = queues()
    own = GroupSettings(dlq_strategy="move", dlq_queue="graves")
    machine.do(CreateGroup(queue_id=Q, group="other", settings=own))
    assert machine.do(DeleteQueue(queue_id=GRAVES)) == Failed(QueueReferenced(name="graves", referrer="q"))
    machine.do(DeleteGroup(queue_id=Q, group="other"))
    assert machine.do(DeleteQueue(queue_id=GRAVES)) == Done()


def test_the_last_attempts_expiry_moves_as_a_nack_does() -> None:
    """D1: whatever ends a message's attempts, it is moved, here by a crash."""
    machine = moving(b"a", max_delivery_attempts=1)
    take(machine)
    machine.pass_ms(30_000)
    machine.do(Touch(queue_id=Q))
    assert (stats(machine).moved, stats(machine, GRAVES).ready) == (1, 1)
    (batch,) = stored(machine, GRAVES)
    found = headers(batch)
    assert (found["holdfast-reason"], found["holdfast-last-error"]) == ("max_attempts", "lease expired")


# D2: what is known of the dead


def test_a_dead_row_keeps_all_that_is_known() -> None:
    """D2: reason, counts, times, consumer, producer, key, headers and payload are there when the batch is freed."""
    machine = queues(TEA, max_delivery_attempts=2)
    lease_id = take(machine).lease_id
    machine.do(Nack(queue_id=Q, group="default", ranges=((lease_id, 1, 1),), error="once"))
    machine.pass_ms(70)
    lease_id = take(machine, session=2).lease_id
    machine.pass_ms(5)
    machine.do(Nack(queue_id=Q, group="default", ranges=((lease_id, 1, 1),), error="twice"), session=2)
    assert dead(machine) == (
        DeadRow(
            group="default",
            dead_seq=1,
            version=1,
            reason="max_attempts",
            attempts=2,
            delivery_count=2,
            last_error="twice",
            first_delivered_ms=START_MS,
            last_delivered_ms=START_MS + 70,
            died_ms=START_MS + 75,
            consumer_id="worker-2",
            client_id="shop",
            client_seq=101,
            key="k1",
            headers=(("colour", "green"),),
            payload=b"tea",
            move_failed=False,
        ),
    )
    described = machine.ask(DescribeQueue(name="q"))
    assert isinstance(described, QueueDescribed)
    assert described.stored_messages == 0


def test_every_death_has_its_own_number() -> None:
    """D2: dead_seq counts deaths, so the same version dead again is another death."""
    machine = queues(b"a", b"b")
    lease_id = take(machine).lease_id
    for version in (2, 1):
        machine.do(Nack(queue_id=Q, group="default", ranges=((lease_id, version, version),), dead=True))
    assert sorted((row.dead_seq, row.version) for row in dead(machine)) == [(1, 2), (2, 1)]
    machine.do(redrive((2, 2, 1)))
    kill(machine, 2)
    assert sorted((row.dead_seq, row.version) for row in dead(machine)) == [(2, 1), (3, 2)]


def test_a_dead_row_ends_with_its_retention() -> None:
    """D2: a millisecond before it is there, at the time it is gone, and stays counted."""
    machine = queues(b"a", dead_retention_ms=1_000)
    kill(machine, 1)
    machine.pass_ms(999)
    machine.do(Touch(queue_id=Q))
    assert len(dead(machine)) == 1
    machine.pass_ms(1)
    machine.do(Touch(queue_id=Q))
    assert dead(machine) == ()
    assert stats(machine).dead == 1


def test_a_dead_row_can_be_dropped_by_hand() -> None:
    """D2: only the named death is dropped; it cannot be redriven afterwards."""
    machine = queues(b"a", b"b")
    kill(machine, 1, 2)
    machine.do(DropDead(queue_id=Q, group="default", dead=((1, 1, 1),)))
    assert [row.version for row in dead(machine)] == [2]
    assert machine.do(redrive((1, 1, 1))) == Redriven(count=0, skipped=1)


def test_a_dead_row_outlives_its_neighbours_in_the_batch() -> None:
    """D2: it owns its payload; what was settled beside it can be freed."""
    machine = queues(b"a", b"b", b"c")
    kill(machine, 2)
    machine.do(AckBatch(queue_id=Q, group="default", ranges=((1, 1, 1), (1, 3, 3))))
    assert stored(machine, Q) == ()
    assert [(row.version, row.payload) for row in dead(machine)] == [(2, b"b")]
    machine.do(redrive((2, 2, 1)))
    assert machine.payloads(Q, take(machine)) == [b"b"]


# D3: asking


def test_dead_letters_are_found_by_filter() -> None:
    """D3: fields and headers select, and counting needs no rows."""
    machine = queues(b"a", TEA, b"c")
    kill(machine, 1, 2, error="bad")
    assert [row.version for row in dead(machine, where="key = 'k1' and last_error = 'bad'")] == [2]
    assert [row.version for row in dead(machine, where="client_seq < 102")] == [1]
    assert dead(machine, where="reason = 'expired'") == ()
    counted = machine.ask(DeadLetters(queue_id=Q, where="version >= 1", count_only=True))
    assert counted == DeadListed(rows=(), matched=2, scanned=2, next_token=b"")


def test_dead_letters_come_in_pages() -> None:
    """D3: token after token every row comes once, also where the scan budget ends a page before a match."""
    machine = queues(*[b"m"] * 7)
    kill(machine, *range(1, 8))
    for limit, scan in ((3, 100), (100, 2), (1, 1)):
        found, token, pages = [], b"", 0
        while pages == 0 or token:
            reply = machine.ask(DeadLetters(queue_id=Q, where="version != 4", limit=limit, scan=scan, after=token))
            assert isinstance(reply, DeadListed)
            assert len(reply.rows) <= limit
            assert reply.scanned <= scan
            found += [row.version for row in reply.rows]
            token, pages = reply.next_token, pages + 1
        assert found == [1, 2, 3, 5, 6, 7]


@pytest.mark.parametrize(
    "where",
    [
        "dead_seq = 2",
        "version = 2",
        "reason = 'rejected'",
        "attempts = 2",
        "delivery_count = 2",
        "last_error = 'the vase bit me'",
        f"first_delivered_ms = {START_MS + 100}",
        f"last_delivered_ms = {START_MS + 200}",
        f"died_ms = {START_MS + 300}",
        "consumer_id = 'worker-2'",
        "client_id = 'till'",
        "client_seq = 7",
        "key = 'k1'",
        "header['colour'] = 'green'",
        "payload_bytes = 3",
        "group = 'default' and not move_failed and key is not null",
    ],
)
def test_any_fact_of_a_dead_letter_can_be_asked_for(where: str) -> None:
    """D3: of two dead letters that differ in everything, each fact finds the one."""
    machine = queues(b"a", max_delivery_attempts=1)
    take(machine)
    machine.do(Nack(queue_id=Q, group="default", ranges=((1, 1, 1),), error="once"))
    machine.do(UpdateQueue(queue_id=Q, changes=(("max_delivery_attempts", 5),)))
    machine.do(produce(Q, TEA, client_id="till", first_seq=7))
    machine.pass_ms(100)
    take(machine)
    machine.do(Nack(queue_id=Q, group="default", ranges=((2, 2, 2),)))
    machine.pass_ms(100)
    take(machine, session=2)
    machine.pass_ms(100)
    reject = Nack(queue_id=Q, group="default", ranges=((3, 2, 2),), dead=True, error="the vase bit me")
    assert machine.do(reject, session=2) == Settled(count=1)
    assert len(dead(machine)) == 2
    assert [row.version for row in dead(machine, where=where)] == [2]


def test_dead_letters_of_one_group_can_be_asked_for() -> None:
    """D3: with a group only its own are found, without one those of all."""
    machine = queues(b"a")
    machine.do(CreateGroup(queue_id=Q, group="other"))
    kill(machine, 1)
    kill(machine, 1, group="other")
    assert [row.group for row in dead(machine, group="other")] == ["other"]
    assert sorted(row.group for row in dead(machine)) == ["default", "other"]


# D4: redrive


def test_a_redriven_message_keeps_its_version() -> None:
    """D4: it is available at once, with attempts from nothing and the delivery count going on."""
    machine = queues(b"a", max_delivery_attempts=1)
    kill(machine, 1)
    assert machine.do(redrive((1, 1, 1))) == Redriven(count=1, skipped=0)
    reply = take(machine)
    assert reply.grants == (Grant(1, 1, 2, 1, redrives=1),)
    assert machine.payloads(Q, reply) == [b"a"]


def test_a_redrive_names_deaths_so_doing_it_twice_does_it_once() -> None:
    """D4: a step that was done is skipped, also when the version is dead again by another death."""
    machine = queues(b"a", b"b")
    kill(machine, 1, 2)
    assert machine.do(redrive((1, 2, 1))) == Redriven(count=2, skipped=0)
    assert machine.do(redrive((1, 2, 1))) == Redriven(count=0, skipped=2)
    kill(machine, 1)
    assert machine.do(redrive((1, 2, 1))) == Redriven(count=0, skipped=2)
    assert machine.do(redrive((1, 1, 3))) == Redriven(count=1, skipped=0)


def test_a_redriven_message_does_not_expire_any_more() -> None:
    """D4: what died of its TTL and was redriven can be delivered."""
    machine = queues(MessageParts(b"a", ttl_ms=1_000), on_expired="dead_letter")
    machine.pass_ms(1_000)
    machine.do(Touch(queue_id=Q))
    assert [(row.reason, row.delivery_count, row.consumer_id) for row in dead(machine)] == [("expired", 0, None)]
    machine.do(redrive((1, 1, 1)))
    machine.pass_ms(100_000)
    assert take(machine).grants == (Grant(1, 1, 1, 1, redrives=1),)


def test_moved_messages_go_home_to_the_group_they_died_in() -> None:
    """D4: in one entry they are moved here, produced there for their group, and cancelled in the others."""
    machine = moving(TEA)
    machine.do(CreateGroup(queue_id=Q, group="other"))
    kill(machine, 1)
    step = RedriveToOrigin(queue_id=GRAVES, group="default", versions=((1, 2),))
    assert machine.do(step) == Redriven(count=1, skipped=1)
    assert stats(machine, GRAVES).moved == 1
    assert why(machine, 2) == Explained(reason="available")
    assert why(machine, 2, "other") == Explained(reason="cancelled")
    home = stored(machine, Q)[-1]
    assert (home.first, headers(home)) == (2, {"colour": "green"})
    assert take(machine).grants == (Grant(2, 2, 1, 1),)
    assert machine.do(step) == Redriven(count=0, skipped=2)


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ("", [1, 2, 3]),
        ("reason = 'rejected' and group = 'default'", [1, 2, 3]),
        ("origin_queue = 'q' and origin_version >= 2", [2, 3]),
        ("client_id = 'shop' and client_seq = 103", [3]),
        ("last_error = 'boom'", [1, 2, 3]),
        ("attempts = 1 and not move_failed", [1, 2, 3]),
        ("key = 'k1' and payload_bytes = 3", [1]),
        ("header['colour'] = 'green'", [1]),
        ("header['holdfast-reason'] = 'rejected' and version <= 2", [1, 2]),
        ("died_ms >= 1", [1, 2, 3]),
        ("dead_seq = 1 or delivery_count = 1 or consumer_id is not null or first_delivered_ms >= 0", []),
    ],
)
def test_moved_messages_are_found_by_what_their_lineage_tells(where: str, found: list[int]) -> None:
    """D4: the filter reads where they died; what nobody wrote down is null."""
    machine = moving(TEA, b"b", b"c")
    kill(machine, 1, 2, 3, error="boom")
    machine.do(produce(GRAVES, b"by hand"))
    reply = machine.ask(FindMoved(queue_id=GRAVES, group="default", where=where))
    assert isinstance(reply, VersionsFound)
    assert [version for first, last in reply.versions for version in range(first, last + 1)] == found
    assert reply.next_version is None


@pytest.mark.parametrize(("limit", "scan"), [(1, 100), (2, 100), (100, 1), (100, 2), (1, 1)])
def test_moved_messages_are_found_page_by_page(limit: int, scan: int) -> None:
    """D4: a page ends by its limit or its budget, and the next one begins there: each is found once."""
    machine = moving(*[b"m"] * 5)
    kill(machine, 1, 2, 3, 4, 5)
    held = machine.do(Lease(queue_id=GRAVES, group="default", max_messages=1))
    assert isinstance(held, Leased)
    found: list[int] = []
    start: int | None = 1
    while start is not None:
        query = FindMoved(
            queue_id=GRAVES, group="default", where="version != 4", from_version=start, limit=limit, scan=scan
        )
        reply = machine.ask(query)
        assert isinstance(reply, VersionsFound)
        found += [version for first, last in reply.versions for version in range(first, last + 1)]
        start = reply.next_version
    assert found == [2, 3, 5]


def test_looking_for_moved_messages_is_bounded_also_where_none_is_available() -> None:
    """D4: a page walks over so many batches at most, and the next one goes on behind them."""
    machine = moving(b"a")
    for _ in range(5):
        machine.do(produce(GRAVES, b"by hand"))
    take(machine, GRAVES)
    page = machine.ask(FindMoved(queue_id=GRAVES, group="default", scan=2))
    assert page == VersionsFound(versions=(), next_version=3)
    page = machine.ask(FindMoved(queue_id=GRAVES, group="default", scan=2, from_version=5))
    assert page == VersionsFound(versions=(), next_version=None)


def test_an_origin_that_is_gone_ends_the_step() -> None:
    """D4: a deleted origin, and one created again, are told apart, and the message stays where it is."""
    machine = moving(b"a")
    kill(machine, 1)
    machine.do(DeleteQueue(queue_id=Q))
    step = RedriveToOrigin(queue_id=GRAVES, group="default", versions=((1, 1),))
    assert machine.do(step) == Failed(OriginGone(queue="q", queue_id=2, problem="gone"))
    machine.do(CreateQueue(name="q"))
    assert machine.do(step) == Failed(OriginGone(queue="q", queue_id=2, problem="recreated"))
    assert stats(machine, GRAVES).ready == 1


def test_a_full_origin_ends_the_step_with_what_was_done() -> None:
    """D4: one has room, the second stays; the next step, without room for any, is refused."""
    machine = moving(b"a", b"b", max_backlog_messages=2)
    kill(machine, 1, 2)
    machine.do(produce(Q, b"c"))
    step = RedriveToOrigin(queue_id=GRAVES, group="default", versions=((1, 2),))
    assert machine.do(step) == Redriven(count=1, skipped=0)
    assert machine.do(step) == Failed(OriginGone(queue="q", queue_id=2, problem="full"))
    assert (stats(machine, GRAVES).ready, stats(machine, GRAVES).moved) == (1, 1)


def test_a_redrive_that_stops_half_way_goes_on_where_it_stopped() -> None:
    """D4: steps of one range, each asked for twice under new requests, lose and double nothing."""
    machine = queues(*[b"m"] * 4, max_delivery_attempts=1)
    kill(machine, 1, 2, 3, 4)
    rows = [(row.version, row.version, row.dead_seq) for row in dead(machine)]
    for row in rows[:2]:
        assert machine.do(redrive(row)) == Redriven(count=1, skipped=0)
    assert take(machine).grants == (Grant(1, 2, 2, 1, redrives=1),)
    assert machine.do(redrive(*rows)) == Redriven(count=2, skipped=2)
    assert take(machine).grants == (Grant(3, 4, 2, 1, redrives=1),)
    assert dead(machine) == ()


def test_an_origin_without_its_group_ends_the_step() -> None:
    """D4: a message goes home to its group only, and stays where it is when there is none."""
    machine = moving()
    machine.do(CreateGroup(queue_id=Q, group="other"))
    machine.do(produce(Q, b"a"))
    kill(machine, 1, group="other")
    machine.do(DeleteGroup(queue_id=Q, group="other"))
    step = RedriveToOrigin(queue_id=GRAVES, group="default", versions=((1, 1),))
    assert machine.do(step) == Failed(OriginGone(queue="q", queue_id=2, problem="without its group"))
    assert stats(machine, GRAVES).ready == 1


def test_a_message_that_is_leased_is_not_sent_home() -> None:
    """D4: only what is available in the dead-letter queue is taken; somebody's work is not taken away."""
    machine = moving(b"a", b"b")
    kill(machine, 1, 2)
    reply = machine.do(Lease(queue_id=GRAVES, group="default", max_messages=1))
    assert isinstance(reply, Leased)
    step = RedriveToOrigin(queue_id=GRAVES, group="default", versions=((1, 2),))
    assert machine.do(step) == Redriven(count=1, skipped=1)
    assert (stats(machine, GRAVES).in_flight, stats(machine, GRAVES).moved) == (1, 1)


def test_a_copy_does_not_carry_the_old_expiry() -> None:
    """P7: neither the moved copy nor the one that is sent home ends by the TTL of the first."""
    machine = moving(MessageParts(b"a", ttl_ms=1_000))
    kill(machine, 1)
    machine.pass_ms(60_000)
    machine.do(Touch(queue_id=GRAVES))
    assert stats(machine, GRAVES).ready == 1
    machine.do(RedriveToOrigin(queue_id=GRAVES, group="default", versions=((1, 1),)))
    machine.pass_ms(60_000)
    machine.do(Touch(queue_id=Q))
    assert why(machine, 2) == Explained(reason="available")


# D5: groups


def test_one_groups_dead_letter_is_anothers_message() -> None:
    """D5: it is dead in one group and delivered in the other, whose count is its own."""
    machine = queues(b"a")
    machine.do(CreateGroup(queue_id=Q, group="other"))
    kill(machine, 1)
    reply = take(machine, group="other")
    assert reply.grants == (Grant(1, 1, 1, 1),)
    assert machine.payloads(Q, reply) == [b"a"]
    assert (stats(machine, group="other").dead, stats(machine).dead) == (0, 1)


def test_a_redrive_in_one_group_is_not_seen_by_the_other() -> None:
    """D5: both groups have it dead, one gets it back."""
    machine = queues(b"a")
    machine.do(CreateGroup(queue_id=Q, group="other"))
    kill(machine, 1)
    kill(machine, 1, group="other")
    assert machine.do(redrive((1, 1, 1))) == Redriven(count=1, skipped=0)
    assert [row.group for row in dead(machine)] == ["other"]
    assert take(machine, group="other") == NOTHING


# D6: whose they are


def test_moved_copies_carry_a_reserved_identity() -> None:
    """D6: client_id tells the queue they came from, client_seq their version, in both directions."""
    machine = moving(b"x", b"a")
    kill(machine, 2)
    assert [(batch.client_id, batch.first, batch.first_seq) for batch in stored(machine, GRAVES)] == [("moved/2", 1, 1)]
    machine.do(RedriveToOrigin(queue_id=GRAVES, group="default", versions=((1, 1),)))
    home = stored(machine, Q)[-1]
    assert (home.client_id, home.first, home.first_seq) == ("moved/1", 3, 3)


@pytest.mark.parametrize("client", ["moved/2", "session/" + session_id(1).hex(), "txn/job"])
def test_a_producer_cannot_take_a_reserved_identity(client: str) -> None:
    """D6: names that only the fold gives are refused."""
    machine = queues()
    reply = machine.do(produce(Q, b"a", client_id=client))
    assert reply == Failed(ReservedName(kind="client_id", name=client))
    assert stats(machine).tail_version == 0


def test_a_producer_cannot_write_lineage_headers() -> None:
    """D6: headers that begin with holdfast- are refused before they come near the log."""
    with pytest.raises(BadHeader):
        pack([MessageParts(b"a", headers={"holdfast-group": "other"})])


def test_lineage_headers_made_by_hand_are_refused_too() -> None:
    """D6: bytes that did not come from our own packing are checked when they are decoded."""
    columns, body = pack([MessageParts(b"a", headers={"boldfast-group": "other"})])
    check(columns, body)
    with pytest.raises(BadHeader):
        check(columns, bytes(body).replace(b"boldfast-", b"holdfast-"))


def test_a_reserved_identity_cannot_be_opened() -> None:
    """D6: nobody gets an epoch under a name that the fold writes under."""
    machine = queues()
    reply = machine.do(OpenProducer(queue_id=Q, client_id="moved/2", nonce=bytes(16)))
    assert reply == Failed(ReservedName(kind="client_id", name="moved/2"))


def test_lineage_keeps_who_sent_it_first() -> None:
    """D6: the copy's own identity is the fold's; the producer and its number are in the headers."""
    machine = moving(b"x", b"a")
    kill(machine, 2)
    (batch,) = stored(machine, GRAVES)
    found = headers(batch)
    assert (batch.client_id, found["holdfast-client-id"], found["holdfast-client-seq"]) == ("moved/2", "shop", "102")


# What the mutants showed to be untried


def three_that_died_together() -> Machine:
    """One dead row of three versions."""
    machine = queues(b"a", b"b", b"c", b"d")
    take(machine)
    machine.do(Nack(queue_id=Q, group="default", ranges=((1, 1, 3),), dead=True))
    return machine


def test_versions_that_die_together_have_numbers_of_their_own() -> None:
    """D2: the death behind three of them is the fourth."""
    machine = three_that_died_together()
    machine.do(Nack(queue_id=Q, group="default", ranges=((1, 4, 4),), dead=True))
    assert [(row.version, row.dead_seq) for row in dead(machine)] == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_a_page_may_end_among_versions_that_died_together() -> None:
    """D3: the next one goes on with the one behind."""
    machine = three_that_died_together()
    page = machine.ask(DeadLetters(queue_id=Q, limit=2))
    assert isinstance(page, DeadListed)
    assert [row.version for row in page.rows] == [1, 2]
    assert [row.version for row in dead(machine, after=page.next_token)] == [3]


def test_a_count_is_of_what_matches() -> None:
    """D3: not of what was looked at."""
    page = three_that_died_together().ask(DeadLetters(queue_id=Q, where="version > 2", count_only=True))
    assert isinstance(page, DeadListed)
    assert (page.matched, page.scanned, page.rows) == (1, 3, ())


def test_a_redrive_takes_a_number_only_with_its_version() -> None:
    """D4: the number of one death does not bring another version back, nor its own under the wrong name."""
    machine = three_that_died_together()
    assert machine.do(redrive((4, 4, 1))) == Redriven(count=0, skipped=1)
    assert machine.do(redrive((2, 2, 1))) == Redriven(count=0, skipped=1)
    assert [row.version for row in dead(machine)] == [1, 2, 3]


def test_a_redriven_message_does_not_expire_with_its_batch() -> None:
    """D4: its neighbours keep the batch and its TTL, which is not the redriven one's any more."""
    machine = queues(MessageParts(b"a", ttl_ms=10_000), MessageParts(b"b", ttl_ms=10_000))
    kill(machine, 1)
    machine.do(redrive((1, 1, 1)))
    machine.pass_ms(10_000)
    machine.do(Touch(queue_id=Q))
    assert take(machine).grants == (Grant(1, 1, 2, 1, redrives=1),)
    assert stats(machine).expired == 0


def test_a_redriven_message_keeps_its_batch() -> None:
    """D4: the last neighbour that is settled does not take the body away from it."""
    machine = queues(b"a", b"b")
    kill(machine, 1)
    machine.do(redrive((1, 1, 1)))
    machine.do(AckBatch(queue_id=Q, group="default", ranges=((1, 2, 2),)))
    assert machine.payloads(Q, take(machine)) == [b"a"]


def test_a_redriven_message_outlives_the_rest_of_its_batch() -> None:
    """D4: it is needed again, though the floor has passed it."""
    machine = queues(b"a", b"b")
    kill(machine, 1)
    machine.do(redrive((1, 1, 1)))
    assert machine.do(AckBatch(queue_id=Q, group="default", ranges=((1, 2, 2),))) == Settled(count=1)
    leased = take(machine)
    assert leased.grants == (Grant(1, 1, 2, 1, redrives=1),)
    assert machine.payloads(Q, leased) == [b"a"]
