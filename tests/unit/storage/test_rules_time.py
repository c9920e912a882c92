"""Rules T1 … T4: the one clock of the fold, what falls due by it, and ids that outlive a restore."""

from typing import Any

from holdfast.client.protocol.columns import MessageParts
from holdfast.client.protocol.commands import (
    AckBatch,
    CreateQueue,
    DeleteQueue,
    Extend,
    Lease,
    Nack,
    OpenProducer,
    OpenSession,
    Release,
    Reschedule,
    SetLimits,
    TimeStep,
    Touch,
    UpdateQueue,
)
from holdfast.client.protocol.errors import LeaseExpired
from holdfast.client.protocol.queries import DeadLetters, DescribeQueue, Explain, Peek, Stats
from holdfast.client.protocol.replies import (
    DeadListed,
    Done,
    Explained,
    Extended,
    Grant,
    GroupStats,
    Leased,
    Messages,
    Produced,
    ProducerOpened,
    QueueCreated,
    QueueDescribed,
    RefusedRange,
    Settled,
    Touched,
)
from holdfast.client.protocol.values import GENERATION_SHIFT, LeaseId, QueueId, QueueSettings, Version
from holdfast.storage.machine import begin_generation
from tests.support.machine import START_MS, Machine, produce

Q = QueueId(1)
HOUR_MS = 3_600_000
NOTHING = Leased(lease_id=LeaseId(0), deadline_ms=0, grants=())


def queue_with(*messages: bytes | MessageParts, **settings: Any) -> Machine:
    machine = Machine()
    for session in (1, 2):
        machine.do(OpenSession(consumer_id=f"worker-{session}"), session)
    assert machine.do(CreateQueue(name="q", settings=QueueSettings(**settings))) == QueueCreated(queue_id=Q)
    for message in messages:
        assert isinstance(machine.do(produce(Q, message)), Produced)
    return machine


def take(machine: Machine, count: int = 10, session: int = 1, **named: Any) -> Leased:
    reply = machine.do(Lease(queue_id=Q, group="default", max_messages=count, **named), session)
    assert isinstance(reply, Leased), reply
    return reply


def ack(lease: int, first: int, last: int) -> AckBatch:
    return AckBatch(queue_id=Q, group="default", ranges=((lease, first, last),))


def stats(machine: Machine) -> GroupStats:
    reply = machine.ask(Stats(queue_id=Q, group="default"))
    assert isinstance(reply, GroupStats), reply
    return reply


def deaths(machine: Machine) -> list[tuple[int, str, int, int]]:
    """Of each dead row: version, reason, attempts, when it died after the start."""
    reply = machine.ask(DeadLetters(queue_id=Q))
    assert isinstance(reply, DeadListed), reply
    return [(row.version, row.reason, row.attempts, row.died_ms - START_MS) for row in reply.rows]


def dead_order(machine: Machine) -> list[tuple[int, str]]:
    """Version and reason of each dead row, in the order of the deaths."""
    reply = machine.ask(DeadLetters(queue_id=Q))
    assert isinstance(reply, DeadListed), reply
    return [(row.version, row.reason) for row in sorted(reply.rows, key=lambda row: row.dead_seq)]


def restore(machine: Machine) -> None:
    """What a restore from a backup does to the state: the next generation, in which ids count from 1."""
    machine.store.transact(begin_generation)


def committed_ms(machine: Machine) -> int:
    """The committed time of an entry that does nothing else, after the start."""
    return machine.entry([machine.envelope(OpenSession())])[0].place.time_ms - START_MS


# T1: one stamp an entry


def test_committed_time_never_goes_back() -> None:
    """T1: a stamp that is older than the state's time leaves it where it is."""
    machine = queue_with()
    machine.pass_ms(5_000)
    assert committed_ms(machine) == 5_000
    machine.pass_ms(-4_999)
    assert committed_ms(machine) == 5_000
    machine.pass_ms(5_000)
    assert committed_ms(machine) == 5_001


def test_all_commands_of_an_entry_fold_at_its_one_stamp() -> None:
    """T1: what the second command of an entry sees is the time of the first, and the first's effect."""
    machine = queue_with()
    machine.pass_ms(70)
    answers = machine.entry(
        [
            machine.envelope(produce(Q, b"a")),
            machine.envelope(Lease(queue_id=Q, group="default", max_messages=1)),
        ]
    )
    assert [(answer.place.position, answer.place.time_ms - START_MS) for answer in answers] == [(0, 70), (1, 70)]
    assert answers[1].reply == Leased(
        lease_id=LeaseId(1), group_generation=1, deadline_ms=START_MS + 30_070, grants=(Grant(1, 1, 1, 1),)
    )


def test_a_stamp_adds_an_hour_whole_but_not_a_millisecond_more() -> None:
    """T1: an hour ahead is taken as it is, and what is beyond is clipped to an hour an entry."""
    machine = queue_with()
    machine.pass_ms(HOUR_MS)
    assert committed_ms(machine) == HOUR_MS
    machine.pass_ms(HOUR_MS + 1)
    assert committed_ms(machine) == 2 * HOUR_MS
    assert committed_ms(machine) == 2 * HOUR_MS + 1


def test_the_very_first_stamp_is_taken_as_it_is() -> None:
    """T1: a new cluster starts at its leader's time, not an hour after 1970."""
    machine = Machine()
    assert committed_ms(machine) == 0


# T2: lease time


def test_a_time_step_expires_no_lease() -> None:
    """T2: a step of two hours leaves a lease of a second open until its second has passed."""
    machine = queue_with(b"a", b"b")
    assert take(machine, visibility_timeout_ms=1_000).deadline_ms == START_MS + 1_000
    assert machine.do(TimeStep(by_ms=2 * HOUR_MS)) == Done()
    machine.pass_ms(2 * HOUR_MS + 999)
    assert machine.do(ack(1, 1, 1)) == Settled(count=1)
    machine.pass_ms(1)
    assert machine.do(ack(1, 2, 2)) == Settled(count=0, refused=(RefusedRange(1, 2, 2, LeaseExpired.code),))


def test_the_deadline_that_a_client_sees_moves_with_a_step() -> None:
    """T2: an answer after a step names the deadline in committed time as it is then."""
    machine = queue_with(b"a")
    take(machine, visibility_timeout_ms=1_000)
    machine.do(TimeStep(by_ms=HOUR_MS))
    reply = machine.do(Extend(queue_id=Q, group="default", lease_id=LeaseId(1), visibility_timeout_ms=1))
    assert reply == Extended(deadline_ms=START_MS + HOUR_MS + 1_000, held=((1, 1),))


def test_delays_and_ttls_see_a_step() -> None:
    """T2: a step of an hour makes an hour's delay and an hour's TTL due, and one less by a millisecond does not."""
    delayed, mortal = MessageParts(b"later", delay_ms=HOUR_MS), MessageParts(b"mortal", ttl_ms=HOUR_MS)
    machine = queue_with(delayed, mortal)
    machine.do(TimeStep(by_ms=HOUR_MS - 1))
    machine.do(Touch(queue_id=Q))
    assert (stats(machine).delayed, stats(machine).ready, stats(machine).discarded) == (1, 1, 0)
    machine.do(TimeStep(by_ms=1))
    machine.do(Touch(queue_id=Q))
    assert (stats(machine).delayed, stats(machine).ready, stats(machine).discarded) == (0, 1, 1)
    assert machine.payloads(Q, take(machine)) == [b"later"]


def test_a_step_takes_effect_at_its_place_in_the_entry() -> None:
    """T2: commands before the step in the same entry are answered at the time before it."""
    machine = queue_with()
    answers = machine.entry(
        [machine.envelope(OpenSession()), machine.envelope(TimeStep(by_ms=10)), machine.envelope(OpenSession())]
    )
    assert [answer.place.time_ms - START_MS for answer in answers] == [0, 10, 10]


def test_retention_sees_a_step() -> None:
    """T2: what is kept for an hour is gone after a step of an hour, and not a millisecond before."""
    machine = queue_with(b"a", replay_ms=HOUR_MS)
    take(machine)
    machine.do(ack(1, 1, 1))
    for by_ms, kept in ((HOUR_MS - 1, 1), (1, 0)):
        machine.do(TimeStep(by_ms=by_ms))
        machine.do(Touch(queue_id=Q))
        described = machine.ask(DescribeQueue(name="q"))
        assert isinstance(described, QueueDescribed)
        assert described.stored_messages == kept


# T3: what is due


def test_a_lease_ends_at_its_deadline_whenever_that_is_noticed() -> None:
    """T3: a death by the last attempt's expiry is dated to the deadline, not to the command that folded it."""
    machine = queue_with(b"a", max_delivery_attempts=1)
    take(machine, visibility_timeout_ms=1_000)
    machine.pass_ms(900_000)
    assert machine.do(Touch(queue_id=Q)) == Touched(more=False)
    assert deaths(machine) == [(1, "max_attempts", 1, 1_000)]


def test_who_touched_when_makes_no_difference() -> None:
    """T3: a group touched at every due time and one touched once at the end have the same state."""
    outcomes = []
    for pauses in ([5_000], [500, 500, 250, 750, 1_000, 2_000], [1] * 20 + [4_980]):
        machine = queue_with(
            b"a",
            MessageParts(b"b", ttl_ms=1_250),
            MessageParts(b"c", delay_ms=2_000),
            MessageParts(b"d", delay_ms=500, ttl_ms=500),
            max_delivery_attempts=1,
            on_expired="dead_letter",
        )
        take(machine, 1, visibility_timeout_ms=1_000)
        for pause in pauses:
            machine.pass_ms(pause)
            machine.do(Touch(queue_id=Q))
        outcomes.append((deaths(machine), stats(machine), take(machine, session=2)))
    assert outcomes[0][0] == [(1, "max_attempts", 1, 1_000), (2, "expired", 0, 1_250), (4, "expired", 0, 1_000)]
    assert outcomes[0][2].grants == (Grant(3, 3, 1, 1),)
    assert outcomes[1] == outcomes[0]
    assert outcomes[2] == outcomes[0]


def test_deaths_are_numbered_by_due_time_then_kind() -> None:
    """T3: at one and the same time a lease's expiry is folded before a TTL, whatever their versions."""
    machine = queue_with(
        MessageParts(b"mortal", ttl_ms=1_000, delay_ms=1), b"leased", max_delivery_attempts=1, on_expired="dead_letter"
    )
    assert take(machine, visibility_timeout_ms=1_001).grants == (Grant(2, 2, 1, 1),)
    machine.pass_ms(5_000)
    machine.do(Touch(queue_id=Q))
    reply = machine.ask(DeadLetters(queue_id=Q))
    assert isinstance(reply, DeadListed)
    assert sorted((row.dead_seq, row.version, row.died_ms - START_MS) for row in reply.rows) == [
        (1, 2, 1_001),
        (2, 1, 1_001),
    ]


def test_what_is_due_but_not_folded_is_not_handed_out() -> None:
    """T3: with a budget of one range a command, expired messages that wait to be folded are never delivered."""
    machine = queue_with(*[MessageParts(b"mortal", ttl_ms=1_000 + n) for n in range(5)])
    machine.do(SetLimits(changes=(("fold_ranges", 1),)))
    machine.pass_ms(60_000)
    assert take(machine) == NOTHING
    assert machine.do(Touch(queue_id=Q)) == Touched(more=True)
    for _ in range(5):
        assert take(machine) == NOTHING
    assert machine.do(Touch(queue_id=Q)) == Touched(more=False)
    assert (stats(machine).discarded, stats(machine).expired, stats(machine).ready) == (5, 5, 0)


def test_nothing_happens_a_millisecond_before_it_is_due() -> None:
    """T3: a touch just before the due time of a delay changes nothing; at the due time it is available."""
    machine = queue_with(MessageParts(b"later", delay_ms=1_000))
    machine.pass_ms(999)
    assert machine.do(Touch(queue_id=Q)) == Touched(more=False)
    assert machine.ask(Explain(queue_id=Q, group="default", version=1)) == Explained(
        reason="delayed", facts=(("until_ms", START_MS + 1_000),)
    )
    machine.pass_ms(1)
    assert machine.do(Touch(queue_id=Q, group="default")) == Touched(more=False)
    assert machine.ask(Explain(queue_id=Q, group="default", version=1)) == Explained(reason="available")


def test_two_leases_that_end_together_end_by_version() -> None:
    """T3: at one deadline the lease with the lower version is folded first, though it was granted later."""
    machine = queue_with(MessageParts(b"later", delay_ms=1), b"now", max_delivery_attempts=1)
    assert take(machine, visibility_timeout_ms=1_000).grants == (Grant(2, 2, 1, 1),)
    machine.pass_ms(1)
    assert take(machine, visibility_timeout_ms=999).grants == (Grant(1, 1, 1, 1),)
    machine.pass_ms(5_000)
    machine.do(Touch(queue_id=Q))
    assert dead_order(machine) == [(1, "max_attempts"), (2, "max_attempts")]
    assert deaths(machine) == [(1, "max_attempts", 1, 1_000), (2, "max_attempts", 1, 1_000)]


def test_a_delay_that_ends_with_a_ttl_ends_first() -> None:
    """T3: a nack's delay is folded before a TTL of the same time, so attempts are judged before the expiry."""
    machine = queue_with(MessageParts(b"mortal", ttl_ms=1_000), on_expired="dead_letter")
    take(machine)
    machine.do(Nack(queue_id=Q, group="default", ranges=((1, 1, 1),), delay_ms=1_000))
    machine.do(UpdateQueue(queue_id=Q, changes=(("max_delivery_attempts", 1),)))
    machine.pass_ms(1_000)
    machine.do(Touch(queue_id=Q))
    assert deaths(machine) == [(1, "max_attempts", 1, 1_000)]


def test_a_ttl_that_passed_in_flight_counts_at_the_time_of_the_return() -> None:
    """T3: it is dated to the lease's deadline, neither to the TTL nor to the command that folded it."""
    machine = queue_with(MessageParts(b"mortal", ttl_ms=1_000), on_expired="dead_letter")
    take(machine, visibility_timeout_ms=1_500)
    machine.pass_ms(9_000)
    machine.do(Touch(queue_id=Q))
    assert deaths(machine) == [(1, "expired", 1, 1_500)]


def test_a_deadline_falls_due_after_the_steps_made_until_then() -> None:
    """T3: steps before the deadline and at it are added to the due time, a step after it is not."""
    machine = queue_with(b"a", max_delivery_attempts=1)
    take(machine, visibility_timeout_ms=1_000)
    machine.pass_ms(400)
    for passed, by_ms in ((0, 10_000), (600, 500), (1, 70_000)):
        machine.pass_ms(passed)
        machine.do(TimeStep(by_ms=by_ms))
        machine.pass_ms(by_ms)
    machine.do(Touch(queue_id=Q))
    assert deaths(machine) == [(1, "max_attempts", 1, 11_500)]


def test_a_budget_of_one_range_reaches_the_same_state() -> None:
    """T3: folded one range a command or all at once, the same messages die in the same order at the same times."""
    outcomes = []
    for budget in (1_024, 1):
        machine = queue_with(
            b"a",
            b"b",
            MessageParts(b"c", ttl_ms=1_250),
            MessageParts(b"d", delay_ms=2_000),
            MessageParts(b"e", delay_ms=500, ttl_ms=500),
            max_delivery_attempts=1,
            on_expired="dead_letter",
        )
        machine.do(SetLimits(changes=(("fold_ranges", budget),)))
        take(machine, 1, visibility_timeout_ms=1_000)
        take(machine, 1, visibility_timeout_ms=900)
        machine.pass_ms(5_000)
        touches = 1
        while machine.do(Touch(queue_id=Q)) == Touched(more=True):
            touches += 1
        assert (touches > 1) == (budget == 1)
        outcomes.append((dead_order(machine), deaths(machine), stats(machine), take(machine, session=2).grants))
    assert outcomes[0][0] == [(2, "max_attempts"), (1, "max_attempts"), (5, "expired"), (3, "expired")]
    assert outcomes[0][3] == (Grant(4, 4, 1, 1),)
    assert outcomes[1] == outcomes[0]


def test_what_came_back_and_is_due_is_not_handed_out_either() -> None:
    """T3: returned messages whose TTL passed are not delivered while they wait to be folded, and others still are."""
    machine = queue_with(*[MessageParts(b"mortal", ttl_ms=1_000)] * 3, b"lasting")
    take(machine)
    machine.do(Release(queue_id=Q, group="default", ranges=((1, 1, 4),)))
    assert stats(machine).ready == 4
    machine.do(SetLimits(changes=(("fold_ranges", 1),)))
    machine.pass_ms(25_000)
    seen: list[Grant] = []
    for _ in range(8):
        seen += take(machine, session=2).grants
    assert [(grant.first, grant.last) for grant in seen] == [(4, 4)]


def test_a_delay_that_is_over_waits_for_its_fold() -> None:
    """T3: with a budget of one range a command, delayed messages come one by one, and none is lost."""
    machine = queue_with(*[MessageParts(b"later", delay_ms=1_000 + n) for n in range(3)])
    machine.do(SetLimits(changes=(("fold_ranges", 1),)))
    machine.pass_ms(60_000)
    assert [take(machine).grants for _ in range(4)] == [
        (Grant(1, 1, 1, 1),),
        (Grant(2, 2, 1, 1),),
        (Grant(3, 3, 1, 1),),
        (),
    ]


# T4: ids


def test_ids_never_come_again() -> None:
    """T4: a queue created again under its name has another id, and leases go on counting in it."""
    machine = queue_with(b"a")
    assert take(machine).lease_id == 1
    machine.do(DeleteQueue(queue_id=Q))
    assert machine.do(CreateQueue(name="q")) == QueueCreated(queue_id=QueueId(2))
    machine.do(produce(2, b"b"))
    leased = machine.do(Lease(queue_id=QueueId(2), group="default", max_messages=1))
    assert leased == Leased(
        lease_id=LeaseId(2), group_generation=2, deadline_ms=START_MS + 30_000, grants=(Grant(1, 1, 1, 1),)
    )


def test_ids_after_a_restore_are_above_all_before_it() -> None:
    """T4: in the next generation queues and leases count from above 2^48, and batches say when they were made."""
    machine = queue_with(b"before")
    restore(machine)
    above = 1 << GENERATION_SHIFT
    assert machine.do(CreateQueue(name="other")) == QueueCreated(queue_id=QueueId(above + 1))
    assert machine.do(produce(Q, b"after")) == Produced(first_version=Version(2), count=1)
    assert take(machine).lease_id == above + 1
    pages = machine.ask(Peek(queue_id=Q))
    assert isinstance(pages, Messages)
    assert [(batch.first, batch.generation) for batch in pages.batches] == [(1, 0), (2, 1)]


def test_epochs_after_a_restore_are_above_all_before_it() -> None:
    """T4: a producer opened in the next generation has an epoch that no earlier incarnation can have."""
    machine = queue_with()
    open_producer = OpenProducer(queue_id=Q, client_id="shop", nonce=bytes(16))
    assert machine.do(open_producer) == ProducerOpened(epoch=1, high_water=0)
    restore(machine)
    again = OpenProducer(queue_id=Q, client_id="shop", nonce=bytes(15) + b"2")
    assert machine.do(again) == ProducerOpened(epoch=(1 << GENERATION_SHIFT) + 1, high_water=0)


def test_a_batch_keeps_its_generation_when_it_is_cut() -> None:
    """T4: a reschedule after a restore makes three batches of one, all of the generation of the produce."""
    machine = queue_with()
    machine.do(produce(Q, b"a", b"b", b"c"))
    restore(machine)
    machine.do(Reschedule(queue_id=Q, versions=((2, 2),), delay_ms=5))
    pages = machine.ask(Peek(queue_id=Q))
    assert isinstance(pages, Messages)
    assert [(batch.first, batch.generation) for batch in pages.batches] == [(1, 0), (2, 0), (3, 0)]


# What the mutants showed to be untried


def test_a_lease_taken_after_a_step_has_its_timeout() -> None:
    """T2: the deadline counts from the lease time of the grant, in which no step ever made is counted."""
    machine = queue_with(b"a")
    machine.do(TimeStep(by_ms=HOUR_MS))
    assert take(machine).deadline_ms == START_MS + HOUR_MS + 30_000
    machine.pass_ms(HOUR_MS + 30_000)
    assert take(machine, session=2).grants == (Grant(1, 1, 2, 2),)


def test_a_lease_asked_for_again_after_a_step_shows_where_its_deadline_is_now() -> None:
    """T2: the answer is in committed time, so it moves with the step."""
    machine = queue_with(b"a")
    asked = machine.envelope(Lease(queue_id=Q, group="default", max_messages=1))
    machine.entry([asked])
    machine.do(TimeStep(by_ms=HOUR_MS))
    again = machine.entry([asked])[0].reply
    assert isinstance(again, Leased)
    assert (again.replayed, again.deadline_ms) == (True, START_MS + HOUR_MS + 30_000)


def test_of_two_times_the_earlier_is_folded_first_whatever_the_kinds() -> None:
    """T3: a TTL that ended before a lease is folded before it, though expiries of leases are the first kind."""
    machine = queue_with(
        MessageParts(b"mortal", ttl_ms=1_000, delay_ms=1), b"leased", max_delivery_attempts=1, on_expired="dead_letter"
    )
    take(machine, visibility_timeout_ms=5_000)
    machine.pass_ms(9_000)
    machine.do(Touch(queue_id=Q))
    assert dead_order(machine) == [(1, "expired"), (2, "max_attempts")]
