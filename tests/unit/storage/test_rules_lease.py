"""Rules L1 … L7: who gets which versions, how often, and what a lease costs."""

from dataclasses import replace
from typing import Any

from holdfast.client.protocol.columns import MessageParts
from holdfast.client.protocol.commands import (
    AckBatch,
    Cancel,
    CreateGroup,
    CreateQueue,
    Envelope,
    Extend,
    Lease,
    Nack,
    OpenSession,
    PurgeQueue,
    Redrive,
    Release,
    Touch,
    UpdateQueue,
)
from holdfast.client.protocol.errors import (
    AckHoleCapExceeded,
    InFlightLimit,
    LeaseExpired,
    LeaseTooLong,
    RequestSuperseded,
)
from holdfast.client.protocol.queries import DeadLetters, DescribeQueue, Stats
from holdfast.client.protocol.replies import (
    DeadListed,
    Failed,
    Grant,
    GroupStats,
    Leased,
    Produced,
    QueueCreated,
    QueueDescribed,
    Redriven,
    Reply,
    Settled,
)
from holdfast.client.protocol.values import GroupSettings, LeaseId, QueueId, QueueSettings
from holdfast.storage.effects import WakeConsumers
from tests.support.machine import START_MS, Machine, produce

Q = QueueId(1)
NOTHING = Leased(lease_id=LeaseId(0), deadline_ms=0, grants=())


def queue_with(count: int, /, *messages: bytes | MessageParts, **settings: Any) -> Machine:
    """A queue with `count` small messages, and these behind them."""
    machine = Machine()
    for session in (1, 2):
        machine.do(OpenSession(consumer_id=f"worker-{session}"), session)
    assert machine.do(CreateQueue(name="q", settings=QueueSettings(**settings))) == QueueCreated(queue_id=Q)
    for message in [b"%d" % number for number in range(1, count + 1)] + list(messages):
        assert isinstance(machine.do(produce(Q, message)), Produced)
    return machine


def lease(count: int = 10, **named: Any) -> Lease:
    return Lease(queue_id=Q, group="default", max_messages=count, **named)


def take(machine: Machine, count: int = 10, session: int = 1, **named: Any) -> Leased:
    reply = machine.do(lease(count, **named), session)
    assert isinstance(reply, Leased), reply
    return reply


def ack(machine: Machine, lease_id: int, first: int, last: int | None = None) -> None:
    last = last if last is not None else first
    reply = machine.do(AckBatch(queue_id=Q, group="default", ranges=((lease_id, first, last),)))
    assert reply == Settled(count=last - first + 1)


def nack(machine: Machine, lease_id: int, version: int, **named: Any) -> None:
    reply = machine.do(Nack(queue_id=Q, group="default", ranges=((lease_id, version, version),), **named))
    assert reply == Settled(count=1)


def release(machine: Machine, lease_id: int, version: int) -> None:
    reply = machine.do(Release(queue_id=Q, group="default", ranges=((lease_id, version, version),)))
    assert reply == Settled(count=1)


def again(machine: Machine, envelope: Envelope) -> Reply:
    return machine.entry([envelope])[0].reply


def stats(machine: Machine) -> GroupStats:
    reply = machine.ask(Stats(queue_id=Q, group="default"))
    assert isinstance(reply, GroupStats), reply
    return reply


def deaths(machine: Machine) -> list[tuple[int, str, int, int]]:
    """Of each dead row: version, reason, attempts, delivery count."""
    reply = machine.ask(DeadLetters(queue_id=Q))
    assert isinstance(reply, DeadListed), reply
    return [(row.version, row.reason, row.attempts, row.delivery_count) for row in reply.rows]


# L1: what a lease takes


def test_a_lease_takes_the_lowest_versions_under_a_new_id() -> None:
    """L1: the deadline is now plus the queue's timeout, or the request's own."""
    machine = queue_with(5, visibility_timeout_ms=7_000)
    first = Leased(lease_id=LeaseId(1), group_generation=1, deadline_ms=START_MS + 7_000, grants=(Grant(1, 2, 1, 1),))
    assert take(machine, 2) == first
    machine.pass_ms(10)
    second = Leased(lease_id=LeaseId(2), group_generation=1, deadline_ms=START_MS + 15, grants=(Grant(3, 5, 1, 1),))
    assert take(machine, 10, session=2, visibility_timeout_ms=5) == second
    assert take(machine) == NOTHING


def test_a_returned_version_goes_to_the_head() -> None:
    """L1: it is delivered before all that was produced after it, as a grant with its own count."""
    machine = queue_with(4)
    take(machine, 2)
    nack(machine, 1, 2)
    assert take(machine).grants == (Grant(2, 2, 2, 2), Grant(3, 4, 1, 1))


def test_max_bytes_clips_but_leaves_at_least_one() -> None:
    """L1: it stops before the message that would exceed, and takes a first one that is larger alone."""
    machine = queue_with(0, b"123", b"45", b"6", b"1234567890", b"x")
    assert take(machine, max_bytes=5).grants == (Grant(1, 2, 1, 1),)
    assert take(machine, max_bytes=5).grants == (Grant(3, 3, 1, 1),)
    assert take(machine, max_bytes=5).grants == (Grant(4, 4, 1, 1),)


def test_in_flight_limits_clip_and_then_refuse() -> None:
    """L1: the session's limit and the group's each clip a grant; at zero they are named."""
    machine = queue_with(9, max_in_flight=5, max_in_flight_per_session=3)
    assert take(machine).grants == (Grant(1, 3, 1, 1),)
    assert machine.do(lease()) == Failed(InFlightLimit(limit_name="max_in_flight_per_session", limit=3))
    assert take(machine, session=2).grants == (Grant(4, 5, 1, 1),)
    assert machine.do(lease(), session=2) == Failed(InFlightLimit(limit_name="max_in_flight", limit=5))
    ack(machine, 1, 2)
    assert take(machine).grants == (Grant(6, 6, 1, 1),)


def test_an_empty_group_is_empty_whatever_the_limits() -> None:
    """L1: where nothing is available no limit is blamed."""
    machine = queue_with(1, max_in_flight=1)
    take(machine)
    assert take(machine, session=2) == NOTHING


def test_a_timeout_above_the_queues_maximum_is_refused() -> None:
    """L1: at max_lease_ms it is granted, a millisecond above it is not."""
    machine = queue_with(1, max_lease_ms=60_000)
    refusal = Failed(LeaseTooLong(timeout_ms=60_001, limit=60_000))
    assert machine.do(lease(visibility_timeout_ms=60_001)) == refusal
    assert take(machine, visibility_timeout_ms=60_000).deadline_ms == START_MS + 60_000


def test_a_message_that_falls_due_is_taken_before_newer_ones() -> None:
    """L1: the lowest available version is first, wherever it came from."""
    machine = queue_with(1, MessageParts(b"later", delay_ms=5), b"3")
    take(machine, 1)
    machine.pass_ms(5)
    assert take(machine, 1).grants == (Grant(2, 2, 1, 1),)


def test_a_group_may_have_limits_of_its_own() -> None:
    """L1: its visibility timeout and its in-flight limit stand above the queue's."""
    machine = queue_with(3, max_in_flight=9)
    own = GroupSettings(visibility_timeout_ms=500, max_in_flight=2)
    machine.do(CreateGroup(queue_id=Q, group="narrow", settings=own))
    narrow = Lease(queue_id=Q, group="narrow", max_messages=10)
    leased = Leased(lease_id=LeaseId(1), group_generation=2, deadline_ms=START_MS + 500, grants=(Grant(1, 2, 1, 1),))
    assert machine.do(narrow) == leased
    assert machine.do(narrow) == Failed(InFlightLimit(limit_name="max_in_flight", limit=2))
    assert take(machine).grants == (Grant(1, 3, 1, 1),)


def test_a_key_is_a_label_and_orders_nothing() -> None:
    """L1: two messages with one key are with two sessions at the same time."""
    machine = queue_with(0, MessageParts(b"a", key="k"), MessageParts(b"b", key="k"))
    assert take(machine, 1).grants == (Grant(1, 1, 1, 1),)
    assert take(machine, 1, session=2).grants == (Grant(2, 2, 1, 1),)


# L2: counting


def test_only_a_fresh_lease_counts() -> None:
    """L2: extend and nack leave the delivery count alone, the next lease adds one."""
    machine = queue_with(1)
    take(machine)
    machine.do(Extend(queue_id=Q, group="default", lease_id=LeaseId(1)))
    nack(machine, 1, 1)
    assert take(machine).grants == (Grant(1, 1, 2, 2),)


def test_a_release_costs_no_attempt() -> None:
    """L2: handed back unstarted counts as delivered, not as tried."""
    machine = queue_with(1, max_delivery_attempts=2)
    for delivery in range(1, 8):
        assert take(machine).grants == (Grant(1, 1, delivery, 1),)
        release(machine, delivery, 1)
    assert deaths(machine) == []


def test_in_a_group_that_counts_begun_a_crash_costs_what_was_begun() -> None:
    """L2: of three leased, the one marked begun has an attempt more when the lease runs out."""
    machine = queue_with(3, count="begun", visibility_timeout_ms=1_000)
    assert take(machine).grants == (Grant(1, 3, 1, 0),)
    machine.do(Extend(queue_id=Q, group="default", lease_id=LeaseId(1), visibility_timeout_ms=1, begin=((2, 2),)))
    machine.pass_ms(1_000)
    assert take(machine).grants == (Grant(1, 1, 2, 0), Grant(2, 2, 2, 1), Grant(3, 3, 2, 0))


def test_a_redrive_resets_the_attempts_and_not_the_count() -> None:
    """L2: after two deliveries and a redrive it is the third delivery and the first attempt."""
    machine = queue_with(1, max_delivery_attempts=2)
    for lease_id in (1, 2):
        take(machine)
        nack(machine, lease_id, 1)
    assert deaths(machine) == [(1, "max_attempts", 2, 2)]
    assert machine.do(Redrive(queue_id=Q, group="default", dead=((1, 1, 1),))) == Redriven(count=1, skipped=0)
    assert take(machine).grants == (Grant(1, 1, 3, 1, redrives=1),)


def test_an_expiry_counts_as_an_attempt() -> None:
    """L2: a consumer that crashed has tried; the next lease is the second attempt."""
    machine = queue_with(1, visibility_timeout_ms=1_000)
    take(machine)
    machine.pass_ms(1_000)
    assert take(machine).grants == (Grant(1, 1, 2, 2),)


def test_in_a_group_that_counts_begun_only_begun_work_costs() -> None:
    """L2: a lease that ran out costs what was begun in it, and not its neighbour; nor does what was released."""
    machine = queue_with(2, count="begun", max_delivery_attempts=1, visibility_timeout_ms=1_000)
    take(machine)
    machine.do(Extend(queue_id=Q, group="default", lease_id=LeaseId(1), begin=((2, 2),)))
    release(machine, 1, 2)
    assert take(machine).grants == (Grant(2, 2, 2, 0),)
    machine.do(Extend(queue_id=Q, group="default", lease_id=LeaseId(2), begin=((2, 2),)))
    machine.pass_ms(1_000)
    assert take(machine).grants == (Grant(1, 1, 2, 0),)
    assert deaths(machine) == [(2, "max_attempts", 1, 2)]


def test_in_a_group_that_counts_begun_a_nack_counts() -> None:
    """L2: who says that it failed has begun it; else a message that always fails would come back for ever."""
    machine = queue_with(1, count="begun", max_delivery_attempts=2)
    for lease_id in (1, 2):
        take(machine)
        nack(machine, lease_id, 1)
    assert deaths(machine) == [(1, "max_attempts", 2, 2)]


# L3: the limit


def test_five_failures_are_five_attempts() -> None:
    """L3: it is delivered exactly max_delivery_attempts times, and is dead in the command of the last failure."""
    machine = queue_with(1, max_delivery_attempts=5)
    for attempt in range(1, 6):
        assert deaths(machine) == []
        assert take(machine).grants == (Grant(1, 1, attempt, attempt),)
        nack(machine, attempt, 1)
    assert deaths(machine) == [(1, "max_attempts", 5, 5)]
    assert take(machine) == NOTHING


def test_the_last_failure_kills_whatever_its_delay() -> None:
    """L3: a nack with a delay on the last attempt does not wait for the delay."""
    machine = queue_with(1, max_delivery_attempts=1)
    take(machine)
    nack(machine, 1, 1, delay_ms=60_000)
    assert deaths(machine) == [(1, "max_attempts", 1, 1)]


def test_a_limit_lowered_since_is_seen_when_it_would_be_handed_out() -> None:
    """L3: a version that is available with too many attempts dies at the lease that meets it."""
    machine = queue_with(2)
    take(machine, 1)
    nack(machine, 1, 1)
    machine.do(UpdateQueue(queue_id=Q, changes=(("max_delivery_attempts", 1),)))
    assert take(machine).grants == (Grant(2, 2, 1, 1),)
    assert deaths(machine) == [(1, "max_attempts", 1, 1)]


def test_reasons_have_an_order() -> None:
    """L3: rejected comes before max_attempts, and that before expired."""
    mortal = MessageParts(b"m", ttl_ms=1_000)
    machine = queue_with(0, mortal, mortal, mortal, max_delivery_attempts=2, on_expired="dead_letter")
    take(machine)
    nack(machine, 1, 1)
    nack(machine, 1, 2)
    take(machine, 2)
    machine.pass_ms(1_000)
    nack(machine, 2, 1, dead=True)
    nack(machine, 2, 2)
    nack(machine, 1, 3)
    assert deaths(machine) == [(1, "rejected", 2, 2), (2, "max_attempts", 2, 2), (3, "expired", 1, 1)]


def test_five_crashes_are_five_attempts() -> None:
    """L3: exactly max_delivery_attempts deliveries when each ends by its deadline, and none after that."""
    machine = queue_with(1, max_delivery_attempts=5, visibility_timeout_ms=1_000)
    for attempt in range(1, 6):
        assert take(machine, session=1 + attempt % 2).grants == (Grant(1, 1, attempt, attempt),)
        machine.pass_ms(1_000)
    assert take(machine) == NOTHING
    assert deaths(machine) == [(1, "max_attempts", 5, 5)]


def test_a_limit_lowered_since_is_seen_when_a_delay_ends() -> None:
    """L3: it dies at the time at which it would be available again, whoever notices."""
    machine = queue_with(1)
    take(machine)
    nack(machine, 1, 1, delay_ms=1_000)
    machine.do(UpdateQueue(queue_id=Q, changes=(("max_delivery_attempts", 1),)))
    machine.pass_ms(999)
    machine.do(Touch(queue_id=Q))
    assert deaths(machine) == []
    machine.pass_ms(1)
    machine.do(Touch(queue_id=Q))
    assert deaths(machine) == [(1, "max_attempts", 1, 1)]


def test_after_a_redrive_the_limit_counts_from_nothing() -> None:
    """L3: it costs as many attempts again, and dies another death."""
    machine = queue_with(1, max_delivery_attempts=2)
    for delivery in range(1, 7):
        assert take(machine).grants == (Grant(1, 1, delivery, 2 - delivery % 2, redrives=(delivery - 1) // 2),)
        nack(machine, delivery, 1)
        if delivery in (2, 4):
            machine.do(Redrive(queue_id=Q, group="default", dead=((1, 1, delivery // 2),)))
    assert deaths(machine) == [(1, "max_attempts", 2, 6)]


# L4: a lease asked twice


def test_a_retried_lease_is_the_same_lease() -> None:
    """L4: a lost reply costs no second attempt: same id, same counts, same deadline."""
    machine = queue_with(3)
    request = machine.envelope(lease(2))
    first = again(machine, request)
    assert first == Leased(
        lease_id=LeaseId(1), group_generation=1, deadline_ms=START_MS + 30_000, grants=(Grant(1, 2, 1, 1),)
    )
    machine.pass_ms(29_999)
    assert again(machine, request) == Leased(
        lease_id=LeaseId(1),
        group_generation=1,
        deadline_ms=START_MS + 30_000,
        grants=(Grant(1, 2, 1, 1),),
        replayed=True,
    )
    assert stats(machine).in_flight == 2


def test_a_retried_lease_shows_what_is_still_held() -> None:
    """L4: what was settled since is left out, and the deadline is the present one."""
    machine = queue_with(3)
    request = machine.envelope(lease())
    again(machine, request)
    ack(machine, 1, 2)
    machine.do(Extend(queue_id=Q, group="default", lease_id=LeaseId(1), visibility_timeout_ms=50_000))
    assert again(machine, request) == Leased(
        lease_id=LeaseId(1),
        group_generation=1,
        deadline_ms=START_MS + 50_000,
        grants=(Grant(1, 1, 1, 1), Grant(3, 3, 1, 1)),
        replayed=True,
    )


def test_a_retried_lease_that_is_over_says_so() -> None:
    """L4: at its deadline, and when all of it is settled, it is LeaseExpired and takes nothing new."""
    machine = queue_with(2)
    first, second = machine.envelope(lease(1)), machine.envelope(lease(1))
    again(machine, first)
    ack(machine, 1, 1)
    assert again(machine, first) == Failed(LeaseExpired(lease_id=1))
    again(machine, second)
    machine.pass_ms(30_000)
    assert again(machine, second) == Failed(LeaseExpired(lease_id=2))
    assert take(machine).grants == (Grant(2, 2, 2, 2),)


def test_a_retried_empty_answer_stays_empty() -> None:
    """L4: the first answer was that there is nothing, and a retry takes nothing."""
    machine = queue_with(0)
    request = machine.envelope(lease())
    assert again(machine, request) == NOTHING
    machine.do(produce(Q, b"a"))
    reply = again(machine, request)
    assert isinstance(reply, Leased)
    assert (reply.lease_id, reply.grants) == (0, ())
    assert stats(machine).ready == 1


def test_a_retried_lease_leaves_out_what_another_holds_now() -> None:
    """L4: a version that came back and went to another session is not shown, and is still the other's."""
    machine = queue_with(2)
    request = machine.envelope(lease())
    again(machine, request)
    nack(machine, 1, 1)
    assert take(machine, session=2).grants == (Grant(1, 1, 2, 2),)
    assert again(machine, request) == Leased(
        lease_id=LeaseId(1),
        group_generation=1,
        deadline_ms=START_MS + 30_000,
        grants=(Grant(2, 2, 1, 1),),
        replayed=True,
    )


def test_another_replica_answers_a_retried_lease_the_same() -> None:
    """L4: a failover between request and retry costs no second attempt."""
    machine = queue_with(2)
    request = machine.envelope(lease())
    first = again(machine, request)
    other = Machine(index=0)
    for index, data in machine.log:
        other.replay(index, data)
    other.now_ms = machine.now_ms + 5
    reply = again(other, request)
    assert isinstance(first, Leased)
    assert isinstance(reply, Leased)
    assert (reply.lease_id, reply.deadline_ms, reply.grants) == (first.lease_id, first.deadline_ms, first.grants)
    assert stats(other).in_flight == 2


# L5: ack holes


def test_over_the_cap_only_older_versions_are_delivered() -> None:
    """L5: with as many holes as the cap all goes on; with one more, nothing above the highest settled."""
    machine = queue_with(9, max_ack_holes=2)
    take(machine, 6)
    for version in (2, 4):
        ack(machine, 1, version)
    assert take(machine, 1).grants == (Grant(7, 7, 1, 1),)
    ack(machine, 1, 6)
    assert stats(machine).holes == 3
    refusal = AckHoleCapExceeded(holes=3, cap=2, next_due_ms=START_MS + 30_000)
    assert machine.do(lease()) == Failed(refusal)


def test_the_cap_never_stops_what_would_close_the_holes() -> None:
    """L5: versions below the highest settled one are delivered over the cap, and acking them opens the rest."""
    machine = queue_with(6, max_ack_holes=1)
    take(machine, 5)
    for version in (2, 4):
        ack(machine, 1, version)
    nack(machine, 1, 3)
    assert take(machine).grants == (Grant(3, 3, 2, 2),)
    ack(machine, 2, 3)
    assert stats(machine).holes == 1
    assert take(machine).grants == (Grant(6, 6, 1, 1),)


def test_over_the_cap_an_empty_group_is_just_empty() -> None:
    """L5: where nothing is available above either, nobody is told of a cap."""
    machine = queue_with(5, max_ack_holes=1)
    take(machine)
    for version in (2, 4):
        ack(machine, 1, version)
    assert take(machine) == NOTHING


def test_a_message_delayed_for_long_does_not_use_up_the_cap() -> None:
    """L5: a range held back by its due time that delivery has passed adds one to the cap in force."""
    machine = queue_with(1, MessageParts(b"later", delay_ms=10**9), b"3", b"4", b"5", b"6", max_ack_holes=1)
    assert take(machine, 4).grants == (Grant(1, 1, 1, 1), Grant(3, 5, 1, 1))
    ack(machine, 1, 3)
    ack(machine, 1, 5)
    assert stats(machine).holes == 2
    assert take(machine, 1).grants == (Grant(6, 6, 1, 1),)


def test_a_message_that_has_come_due_counts_like_any_other() -> None:
    """L5: when its due time has come, the cap in force is the plain one again."""
    machine = queue_with(1, MessageParts(b"later", delay_ms=1_000), b"3", b"4", b"5", b"6", max_ack_holes=1)
    take(machine, 4)
    ack(machine, 1, 3)
    ack(machine, 1, 5)
    machine.pass_ms(1_000)
    assert take(machine).grants == (Grant(2, 2, 1, 1),)
    refusal = AckHoleCapExceeded(holes=2, cap=1, next_due_ms=START_MS + 30_000)
    assert machine.do(lease()) == Failed(refusal)


def test_every_way_to_settle_leaves_a_hole() -> None:
    """L5: acked, dead, cancelled, discarded and purged versions above an open one are holes alike."""
    machine = queue_with(6, MessageParts(b"mortal", ttl_ms=10), b"8", MessageParts(b"later", delay_ms=9_000))
    machine.do(Cancel(queue_id=Q, versions=((6, 6),)))
    assert stats(machine).holes == 1
    take(machine, 5)
    ack(machine, 1, 2)
    assert stats(machine).holes == 2
    nack(machine, 1, 4, dead=True)
    assert stats(machine).holes == 3
    machine.pass_ms(10)
    machine.do(Touch(queue_id=Q))
    assert stats(machine).holes == 3  # version 7 beside version 6 is the same hole
    assert take(machine, 1).grants == (Grant(8, 8, 1, 1),)
    machine.do(PurgeQueue(queue_id=Q))
    assert stats(machine).holes == 4
    ack(machine, 1, 1)
    assert stats(machine).holes == 3


def test_redriven_messages_do_not_use_up_the_cap() -> None:
    """L5: a redriven range that is not settled again adds one to the cap in force."""
    machine = queue_with(8, max_ack_holes=1)
    take(machine, 6)
    for version in (2, 4, 6):
        nack(machine, 1, version, dead=True)
    refusal = AckHoleCapExceeded(holes=3, cap=1, next_due_ms=START_MS + 30_000)
    assert machine.do(lease()) == Failed(refusal)
    for dead_seq, version in ((1, 2), (2, 4)):
        machine.do(Redrive(queue_id=Q, group="default", dead=((version, version, dead_seq),)))
    assert take(machine, 3).grants == (Grant(2, 2, 2, 1, 1), Grant(4, 4, 2, 1, 1), Grant(7, 7, 1, 1))


def test_the_refusal_tells_when_to_come_again() -> None:
    """L5: the first of the open deadlines and of the nack delays, at which something older can be had."""
    machine = queue_with(6, max_ack_holes=1)
    take(machine, 5)
    for version in (2, 4):
        ack(machine, 1, version)
    nack(machine, 1, 3, delay_ms=700)
    assert machine.do(lease()) == Failed(AckHoleCapExceeded(holes=2, cap=1, next_due_ms=START_MS + 700))
    machine.pass_ms(700)
    assert take(machine).grants == (Grant(3, 3, 2, 2),)


def test_over_the_cap_it_always_drains() -> None:
    """L5: with a consumer that acks only every second message, waiting as told ends with everything settled."""
    machine = queue_with(40, max_ack_holes=3, max_delivery_attempts=3)
    refusals = 0
    for _ in range(200):
        reply = machine.do(lease(8))
        if isinstance(reply, Leased):
            for grant in reply.grants:
                for version in range(grant.first, grant.last + 1):
                    if version % 2 == 0:
                        ack(machine, reply.lease_id, version)
            if not reply.grants:
                machine.pass_ms(30_000)
        else:
            assert isinstance(reply, Failed)
            assert isinstance(reply.error, AckHoleCapExceeded)
            refusals += 1
            assert reply.error.next_due_ms is not None
            assert reply.error.next_due_ms > machine.now_ms
            machine.now_ms = reply.error.next_due_ms
    assert refusals > 0
    assert (stats(machine).acked, stats(machine).dead, stats(machine).in_flight) == (20, 20, 0)
    assert all(attempts == 3 for _, _, attempts, _ in deaths(machine))


# L6: at most once


def test_auto_ack_settles_at_hand_out() -> None:
    """L6: nothing is in flight, nothing comes back, and a crash loses it."""
    machine = queue_with(2)
    reply = take(machine, auto_ack=True)
    assert reply.grants == (Grant(1, 2, 1, 1),)
    assert machine.payloads(Q, reply) == [b"1", b"2"]
    assert (stats(machine).acked, stats(machine).in_flight) == (2, 0)
    machine.pass_ms(60_000)
    assert take(machine) == NOTHING


def test_auto_ack_can_be_read_again_until_the_timeout() -> None:
    """L6: a replay a millisecond before the end has the bodies, at the end it is over and they are freed."""
    machine = queue_with(2)
    request = machine.envelope(lease(auto_ack=True))
    first = again(machine, request)
    machine.pass_ms(29_999)
    reply = again(machine, request)
    assert isinstance(first, Leased)
    assert reply == Leased(
        lease_id=first.lease_id,
        group_generation=1,
        deadline_ms=START_MS + 30_000,
        grants=(Grant(1, 2, 1, 1),),
        replayed=True,
    )
    assert machine.payloads(Q, reply) == [b"1", b"2"]
    machine.pass_ms(1)
    assert again(machine, request) == Failed(LeaseExpired(lease_id=first.lease_id))
    machine.do(Touch(queue_id=Q))
    described = machine.ask(DescribeQueue(name="q"))
    assert isinstance(described, QueueDescribed)
    assert described.stored_messages == 0


def test_auto_ack_keeps_the_bodies_no_longer_than_its_session_needs_them() -> None:
    """L6: when the session is done with the request, its messages are freed before the timeout."""
    machine = queue_with(2)
    request = machine.envelope(lease(auto_ack=True))
    again(machine, request)
    after = machine.envelope(lease())
    again(machine, replace(after, done_below=after.request_seq))
    machine.do(Touch(queue_id=Q))
    described = machine.ask(DescribeQueue(name="q"))
    assert isinstance(described, QueueDescribed)
    assert described.stored_messages == 0
    superseded = RequestSuperseded(request_seq=request.request_seq, done_below=after.request_seq)
    assert again(machine, request) == Failed(superseded)


def test_auto_ack_leaves_nothing_to_settle() -> None:
    """L6: a nack comes too late to bring it back."""
    machine = queue_with(1)
    taken = take(machine, auto_ack=True)
    reply = machine.do(Nack(queue_id=Q, group="default", ranges=((taken.lease_id, 1, 1),)))
    assert isinstance(reply, Settled)
    assert reply.count == 0
    assert take(machine) == NOTHING


# L7: waiting


def test_whatever_makes_something_available_wakes_its_group() -> None:
    """L7: the fold tells the leader whom to answer, and looks at wait_ms itself in no way."""
    machine = queue_with(0)
    wake = WakeConsumers(Q, "default")
    assert take(machine, wait_ms=60_000) == NOTHING
    assert wake not in machine.effects
    machine.do(produce(Q, b"a", MessageParts(b"b", delay_ms=500)))
    assert wake in machine.effects
    take(machine)
    assert wake not in machine.effects
    nack(machine, 1, 1)
    assert wake in machine.effects
    take(machine)
    machine.pass_ms(500)
    machine.do(Touch(queue_id=Q))
    assert wake in machine.effects
    take(machine)
    machine.pass_ms(30_000)
    machine.do(Touch(queue_id=Q))
    assert wake in machine.effects


# What the mutants showed to be untried


def test_a_lease_cuts_a_batch_at_max_messages() -> None:
    """L1: of five messages that came together it takes the first two, the next lease the others."""
    machine = queue_with(0)
    machine.do(produce(Q, *[b"m"] * 5))
    assert take(machine, 2).grants == (Grant(1, 2, 1, 1),)
    assert take(machine, 2).grants == (Grant(3, 4, 1, 1),)
    assert take(machine, 2).grants == (Grant(5, 5, 1, 1),)


def test_begun_is_of_one_lease() -> None:
    """L2: what was begun in a lease that expired is not begun in the next one."""
    machine = queue_with(1, count="begun")
    begun = Extend(queue_id=Q, group="default", lease_id=take(machine).lease_id, begin=((1, 1),))
    machine.do(begun)
    machine.pass_ms(30_000)
    assert take(machine).grants == (Grant(1, 1, 2, 1),)
    machine.pass_ms(30_000)
    assert take(machine).grants == (Grant(1, 1, 3, 1),)


def test_the_floor_passes_over_all_that_is_settled_whatever_the_reasons() -> None:
    """L5: behind the head lie an acked and a dead one; when the head is settled no hole is left, nor one behind it."""
    machine = queue_with(5)
    lease_id = take(machine).lease_id
    ack(machine, lease_id, 2)
    nack(machine, lease_id, 3, dead=True)
    assert stats(machine).holes == 1
    ack(machine, lease_id, 1)
    assert stats(machine).holes == 0
    ack(machine, lease_id, 4)
    assert stats(machine).holes == 0
