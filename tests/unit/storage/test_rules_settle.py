"""Rules S1 … S5: how a version's turn ends, and who may end it."""

from typing import Any

import pytest

from holdfast.client.protocol import limits
from holdfast.client.protocol.commands import (
    AckBatch,
    CreateQueue,
    Extend,
    Lease,
    Nack,
    OpenSession,
    Release,
    SetLimits,
    Touch,
)
from holdfast.client.protocol.errors import (
    AlreadySettled,
    BadValue,
    LeaseExpired,
    LeaseNotFound,
    LeaseTooLong,
    NackDelayTooLong,
    NotLeaseOwner,
    VersionNotInLease,
)
from holdfast.client.protocol.queries import DeadLetters, Explain, Stats
from holdfast.client.protocol.replies import (
    DeadListed,
    Explained,
    Extended,
    Failed,
    Grant,
    GroupStats,
    Leased,
    QueueCreated,
    RefusedRange,
    Reply,
    Settled,
)
from holdfast.client.protocol.values import Backoff, LeaseId, QueueId, QueueSettings
from tests.support.machine import START_MS, Machine, produce

Q = QueueId(1)
NOTHING = Leased(lease_id=LeaseId(0), deadline_ms=0, grants=())


def queue_with(messages: int, /, **settings: Any) -> Machine:
    machine = Machine()
    for session in (1, 2):
        machine.do(OpenSession(consumer_id=f"worker-{session}"), session)
    assert machine.do(CreateQueue(name="q", settings=QueueSettings(**settings))) == QueueCreated(queue_id=Q)
    machine.do(produce(Q, *[b"m"] * messages))
    return machine


def take(machine: Machine, count: int = 100, session: int = 1, **named: Any) -> Leased:
    reply = machine.do(Lease(queue_id=Q, group="default", max_messages=count, **named), session)
    assert isinstance(reply, Leased), reply
    return reply


def ack(*ranges: tuple[int, int, int]) -> AckBatch:
    return AckBatch(queue_id=Q, group="default", ranges=ranges)


def nack(*ranges: tuple[int, int, int], **named: Any) -> Nack:
    return Nack(queue_id=Q, group="default", ranges=ranges, **named)


def extend(lease_id: int, timeout_ms: int | None = None, **named: Any) -> Extend:
    return Extend(queue_id=Q, group="default", lease_id=LeaseId(lease_id), visibility_timeout_ms=timeout_ms, **named)


def stats(machine: Machine) -> GroupStats:
    reply = machine.ask(Stats(queue_id=Q, group="default"))
    assert isinstance(reply, GroupStats), reply
    return reply


def why(machine: Machine, version: int = 1) -> Reply:
    return machine.ask(Explain(queue_id=Q, group="default", version=version))


def delayed(until_ms: int) -> Explained:
    return Explained(reason="delayed", facts=(("until_ms", START_MS + until_ms),))


def errors(machine: Machine) -> list[tuple[int, str, str | None]]:
    """Of each dead row: version, reason, last error."""
    reply = machine.ask(DeadLetters(queue_id=Q))
    assert isinstance(reply, DeadListed), reply
    return [(row.version, row.reason, row.last_error) for row in reply.rows]


# S1: whose turn it is to refuse


@pytest.mark.parametrize("kind", [AckBatch, Nack, Release])
def test_a_settle_counts_until_the_deadline_and_not_at_it(kind: type[AckBatch | Nack | Release]) -> None:
    """S1: a millisecond before the deadline it is done, at the deadline itself it is refused."""
    machine = queue_with(2)
    take(machine, visibility_timeout_ms=1_000)
    machine.pass_ms(999)
    assert machine.do(kind(queue_id=Q, group="default", ranges=((1, 1, 1),))) == Settled(count=1)
    machine.pass_ms(1)
    late = machine.do(kind(queue_id=Q, group="default", ranges=((1, 2, 2),)))
    assert late == Settled(count=0, refused=(RefusedRange(1, 2, 2, LeaseExpired.code),))


def test_an_extend_at_the_deadline_is_too_late() -> None:
    """S1: the lease cannot be brought back at its deadline."""
    machine = queue_with(1)
    take(machine, visibility_timeout_ms=1_000)
    machine.pass_ms(999)
    assert machine.do(extend(1, 2)) == Extended(deadline_ms=START_MS + 1_001, held=((1, 1),))
    machine.pass_ms(2)
    assert machine.do(extend(1, 1_000)) == Failed(LeaseExpired(lease_id=1))


def test_refusals_have_an_order() -> None:
    """S1: never issued, then gone, then another's, then what is and is not in it."""
    machine = queue_with(6)
    take(machine, 1)
    machine.do(ack((1, 1, 1)))
    take(machine, 2)
    take(machine, 1, session=2)
    machine.do(ack((2, 2, 2)))
    reply = machine.do(ack((9, 1, 1), (0, 1, 1), (1, 1, 1), (3, 4, 4), (2, 1, 6)))
    assert reply == Settled(
        count=1,
        refused=(
            RefusedRange(9, 1, 1, LeaseNotFound.code),
            RefusedRange(0, 1, 1, LeaseNotFound.code),
            RefusedRange(1, 1, 1, LeaseExpired.code),
            RefusedRange(3, 4, 4, NotLeaseOwner.code),
            RefusedRange(2, 1, 1, VersionNotInLease.code),
            RefusedRange(2, 2, 2, AlreadySettled.code),
            RefusedRange(2, 4, 6, VersionNotInLease.code),
        ),
    )


def test_an_extend_is_refused_in_the_same_order() -> None:
    """S1: not issued, over, another's."""
    machine = queue_with(2)
    take(machine, 1)
    machine.do(ack((1, 1, 1)))
    take(machine, session=2)
    assert machine.do(extend(9)) == Failed(LeaseNotFound(lease_id=9))
    assert machine.do(extend(1)) == Failed(LeaseExpired(lease_id=1))
    assert machine.do(extend(2)) == Failed(NotLeaseOwner(lease_id=2))


def test_an_old_lease_cannot_settle_what_was_leased_again() -> None:
    """S1: after the deadline the new holder's turn is not ended by the old one."""
    machine = queue_with(1, visibility_timeout_ms=1_000)
    take(machine)
    machine.pass_ms(1_000)
    assert take(machine, session=2).grants == (Grant(1, 1, 2, 2),)
    assert machine.do(ack((1, 1, 1))) == Settled(count=0, refused=(RefusedRange(1, 1, 1, LeaseExpired.code),))
    assert machine.do(ack((2, 1, 1)), session=2) == Settled(count=1)


def test_another_sessions_lease_is_named_before_its_versions() -> None:
    """S1: a stranger is not told what is and what is not in the lease."""
    machine = queue_with(3)
    take(machine, 2)
    machine.do(ack((1, 1, 1)))
    reply = machine.do(ack((1, 1, 3)), session=2)
    assert reply == Settled(count=0, refused=(RefusedRange(1, 1, 3, NotLeaseOwner.code),))


# S2: batches


def test_one_ack_settles_over_many_leases() -> None:
    """S2: ranges of several leases are done in one command, refused ones beside them."""
    machine = queue_with(6)
    for _ in range(3):
        take(machine, 2)
    assert machine.do(ack((3, 5, 6), (1, 1, 2), (7, 1, 1), (2, 4, 4))) == Settled(
        count=5, refused=(RefusedRange(7, 1, 1, LeaseNotFound.code),)
    )
    assert (stats(machine).acked, stats(machine).in_flight) == (5, 1)


def test_a_batch_carries_65536_ranges_and_not_one_more() -> None:
    """S2: the largest batch is folded whole; a larger one cannot be built."""
    assert limits.SETTLE_RANGES == 65_536
    machine = queue_with(2_000)
    take(machine, 2_000)
    own = tuple((1, version, version) for version in range(1, 2_001, 2))
    filler = tuple((1, 3_000 + at, 3_000 + at) for at in range(limits.SETTLE_RANGES - 1_000))
    reply = machine.do(ack(*own, *filler))
    assert isinstance(reply, Settled)
    assert (reply.count, len(reply.refused)) == (1_000, limits.SETTLE_RANGES - 1_000)
    with pytest.raises(BadValue):
        ack(*own, *filler, (2, 1, 1))


@pytest.mark.parametrize("ranges", [((1, 1, 2), (1, 2, 2)), ((1, 2, 2), (1, 1, 1)), ((1, 1, 1), (2, 1, 1), (1, 1, 1))])
def test_a_batch_names_each_version_of_a_lease_once(ranges: tuple[tuple[int, int, int], ...]) -> None:
    """S2: ranges of one lease ascend and do not overlap, else the answer could be larger than the request."""
    with pytest.raises(BadValue, match="ascend"):
        ack(*ranges)


def test_a_range_asked_for_again_is_settled_already() -> None:
    """S1: in the next batch, while something else of the lease is still held."""
    machine = queue_with(3)
    take(machine)
    assert machine.do(ack((1, 1, 2))) == Settled(count=2)
    assert machine.do(ack((1, 2, 2))) == Settled(count=0, refused=(RefusedRange(1, 2, 2, AlreadySettled.code),))


# S3: nack


def test_a_nacked_version_stays_away_for_its_delay() -> None:
    """S3: it is delivered at the end of the delay and not a millisecond before."""
    machine = queue_with(1)
    take(machine)
    assert machine.do(nack((1, 1, 1), delay_ms=1_000)) == Settled(count=1)
    assert why(machine) == delayed(1_000)
    machine.pass_ms(999)
    assert take(machine) == NOTHING
    machine.pass_ms(1)
    assert take(machine).grants == (Grant(1, 1, 2, 2),)


def test_a_nack_may_name_the_time_itself() -> None:
    """S3: not_before_ms is committed time."""
    machine = queue_with(1)
    take(machine)
    machine.do(nack((1, 1, 1), not_before_ms=START_MS + 5_000))
    assert why(machine) == delayed(5_000)


@pytest.mark.parametrize(
    ("backoff", "delays"),
    [
        (Backoff(), (0, 0, 0, 0)),
        (Backoff("fixed", base_ms=300), (300, 300, 300, 300)),
        (Backoff("exponential", base_ms=100, cap_ms=350), (100, 200, 350, 350)),
    ],
)
def test_the_groups_backoff_is_whole_numbers(backoff: Backoff, delays: tuple[int, ...]) -> None:
    """S3: without a delay of its own a nack waits as the group says, by the attempt that failed."""
    machine = queue_with(1, backoff=backoff)
    passed = 0
    for number, delay in enumerate(delays, start=1):
        assert take(machine).grants == (Grant(1, 1, number, number),)
        machine.do(nack((number, 1, 1)))
        assert why(machine) == (delayed(passed + delay) if delay else Explained(reason="available"))
        machine.pass_ms(delay)
        passed += delay


def test_a_nack_with_delay_zero_comes_back_at_once() -> None:
    """S3: the request's own delay wins over the backoff, also when it is zero."""
    machine = queue_with(1, backoff=Backoff("fixed", base_ms=9_000))
    take(machine)
    machine.do(nack((1, 1, 1), delay_ms=0))
    assert why(machine) == Explained(reason="available")


def test_a_nack_without_text_keeps_the_former_error() -> None:
    """S3: the last error that was told stays with the message until another is."""
    machine = queue_with(1, max_delivery_attempts=3)
    for number, error in ((1, "the vase bit me"), (2, None), (3, None)):
        take(machine)
        machine.do(nack((number, 1, 1), error=error))
    assert errors(machine) == [(1, "max_attempts", "the vase bit me")]


def test_a_nack_can_give_up_at_once() -> None:
    """S3: dead=true on the first attempt is the end, with its reason."""
    machine = queue_with(2)
    take(machine)
    machine.do(nack((1, 2, 2), dead=True, error="not ours"))
    assert errors(machine) == [(2, "rejected", "not ours")]
    assert stats(machine).in_flight == 1


def test_a_nack_delay_above_the_maximum_is_refused_whole() -> None:
    """S3: seven days are fine, a millisecond more is not, and then the lease is as it was."""
    machine = queue_with(2)
    week = 604_800_000
    take(machine)
    refusal = Failed(NackDelayTooLong(delay_ms=week + 1, limit=week))
    assert machine.do(nack((1, 1, 1), delay_ms=week + 1)) == refusal
    assert machine.do(nack((1, 1, 1), not_before_ms=START_MS + week + 1)) == refusal
    assert stats(machine).in_flight == 2
    assert machine.do(nack((1, 1, 1), delay_ms=week)) == Settled(count=1)
    assert why(machine) == delayed(week)


def test_a_backoff_above_the_maximum_is_clipped() -> None:
    """S3: a nack that asks for nothing is never refused for the group's own backoff."""
    machine = queue_with(1, backoff=Backoff("fixed", base_ms=9_000), max_nack_delay_ms=1_000)
    take(machine)
    assert machine.do(nack((1, 1, 1))) == Settled(count=1)
    assert why(machine) == delayed(1_000)


def test_an_exponential_backoff_stays_whole_after_many_attempts() -> None:
    """S3: the cap holds however often it doubled."""
    machine = queue_with(
        1, backoff=Backoff("exponential", base_ms=1, cap_ms=1_000), max_delivery_attempts=500, max_nack_delay_ms=1_000
    )
    for number in range(1, 101):
        take(machine)
        machine.do(nack((number, 1, 1)))
        machine.pass_ms(1_000)
    assert take(machine).grants == (Grant(1, 1, 101, 101),)


def test_a_time_in_the_past_is_now() -> None:
    """S3: not_before_ms that has passed brings it back at once."""
    machine = queue_with(1, backoff=Backoff("fixed", base_ms=9_000))
    take(machine)
    machine.do(nack((1, 1, 1), not_before_ms=START_MS - 5))
    assert why(machine) == Explained(reason="available")


def test_an_error_text_is_bounded() -> None:
    """S3: 1,024 bytes are kept whole, and a longer text cannot be sent."""
    machine = queue_with(1)
    take(machine)
    machine.do(nack((1, 1, 1), dead=True, error="x" * limits.ERROR_TEXT_BYTES))
    assert errors(machine) == [(1, "rejected", "x" * 1_024)]
    with pytest.raises(BadValue):
        nack((1, 1, 1), error="x" * (limits.ERROR_TEXT_BYTES + 1))


# S4: extend


def test_an_extend_never_shortens() -> None:
    """S4: the deadline is the later of the old one and now plus the timeout."""
    machine = queue_with(1)
    take(machine)
    machine.pass_ms(10_000)
    assert machine.do(extend(1, 5_000)) == Extended(deadline_ms=START_MS + 30_000, held=((1, 1),))
    assert machine.do(extend(1)) == Extended(deadline_ms=START_MS + 40_000, held=((1, 1),))


def test_a_lease_ends_max_lease_ms_after_its_grant() -> None:
    """S4: extends move the deadline up to that and no further."""
    machine = queue_with(1, max_lease_ms=50_000)
    take(machine)
    machine.pass_ms(29_000)
    assert machine.do(extend(1)) == Extended(deadline_ms=START_MS + 50_000, held=((1, 1),))
    machine.pass_ms(20_999)
    assert machine.do(extend(1)) == Extended(deadline_ms=START_MS + 50_000, held=((1, 1),))
    machine.pass_ms(1)
    assert machine.do(extend(1)) == Failed(LeaseExpired(lease_id=1))


def test_an_extend_by_more_than_the_maximum_is_refused() -> None:
    """S4: the timeout itself is measured, too."""
    machine = queue_with(1, max_lease_ms=50_000)
    take(machine)
    assert machine.do(extend(1, 50_001)) == Failed(LeaseTooLong(timeout_ms=50_001, limit=50_000))


def test_an_extend_says_what_is_still_held() -> None:
    """S4: settled versions are not in the answer, and the lease id is the same."""
    machine = queue_with(5)
    take(machine)
    machine.do(ack((1, 2, 3)))
    assert machine.do(extend(1, 60_000)) == Extended(deadline_ms=START_MS + 60_000, held=((1, 1), (4, 5)))
    machine.pass_ms(59_999)
    assert machine.do(ack((1, 1, 1))) == Settled(count=1)


def test_a_lease_lives_twelve_hours_by_default() -> None:
    """S4: extended every hour it is held until twelve hours after its grant, and then over."""
    machine = queue_with(1)
    take(machine, visibility_timeout_ms=3_600_001)
    for _ in range(11):
        machine.pass_ms(3_600_000)
        assert isinstance(machine.do(extend(1, 3_600_001)), Extended)
    machine.pass_ms(3_599_999)
    assert machine.do(extend(1)) == Extended(deadline_ms=START_MS + 43_200_000, held=((1, 1),))
    machine.pass_ms(1)
    assert machine.do(extend(1)) == Failed(LeaseExpired(lease_id=1))


# S5: expiry


def test_at_the_deadline_what_is_not_settled_returns() -> None:
    """S5: the rest of a lease is available at the deadline, what was settled stays settled."""
    machine = queue_with(3)
    take(machine, visibility_timeout_ms=1_000)
    machine.do(ack((1, 2, 2)))
    machine.pass_ms(999)
    assert take(machine, session=2) == NOTHING
    machine.pass_ms(1)
    assert take(machine, session=2).grants == (Grant(1, 1, 2, 2), Grant(3, 3, 2, 2))


def test_an_expiry_does_not_back_off_unless_told() -> None:
    """S5: the group's backoff is for nacks; backoff_on_expiry counts it from the deadline."""
    for told, reason in ((False, Explained(reason="available")), (True, delayed(8_000))):
        machine = queue_with(1, backoff=Backoff("fixed", base_ms=7_000), backoff_on_expiry=told)
        take(machine, visibility_timeout_ms=1_000)
        machine.pass_ms(3_000)
        machine.do(Touch(queue_id=Q))
        assert why(machine) == reason


def test_an_expiry_leaves_its_error() -> None:
    """S5: a message that dies by an expiry says so, whatever was told before."""
    machine = queue_with(1, max_delivery_attempts=2)
    take(machine)
    machine.do(nack((1, 1, 1), error="the vase bit me"))
    take(machine)
    machine.pass_ms(30_000)
    machine.do(Touch(queue_id=Q))
    assert errors(machine) == [(1, "max_attempts", "lease expired")]


def test_an_expiry_backs_off_by_its_attempt() -> None:
    """S5: with backoff_on_expiry the delay grows as it does for nacks, counted from each deadline."""
    backoff = Backoff("exponential", base_ms=100, cap_ms=10_000)
    machine = queue_with(1, backoff=backoff, backoff_on_expiry=True, visibility_timeout_ms=1_000)
    due = 0
    for delay in (100, 200, 400):
        take(machine)
        due += 1_000 + delay
        machine.pass_ms(1_000)
        machine.do(Touch(queue_id=Q))
        assert why(machine) == delayed(due)
        machine.pass_ms(delay)


# What the mutants showed to be untried


def test_a_lease_that_is_over_but_not_folded_settles_nothing() -> None:
    """S1: two leases end together and one command folds one of them; the other is over all the same."""
    machine = queue_with(2)
    take(machine, 1)
    take(machine, 1)
    machine.do(SetLimits(changes=(("fold_ranges", 1),)))
    machine.pass_ms(30_000)
    assert machine.do(ack((2, 2, 2))) == Settled(count=0, refused=(RefusedRange(2, 2, 2, LeaseExpired.code),))


def test_an_extended_lease_ends_at_its_new_deadline() -> None:
    """S4: not at the old one, and not never."""
    machine = queue_with(1)
    take(machine)
    machine.do(extend(1, 50_000))
    machine.pass_ms(49_999)
    assert take(machine) == NOTHING
    machine.pass_ms(1)
    assert take(machine).grants == (Grant(1, 1, 2, 2),)


def test_what_expired_is_not_in_flight_of_its_session_any_more() -> None:
    """S5: the session has room for it again (L1)."""
    machine = queue_with(1, max_in_flight_per_session=1)
    take(machine)
    machine.pass_ms(30_000)
    assert take(machine).grants == (Grant(1, 1, 2, 2),)
