"""Rules P1 … P8: what is written once, under which number, from when and until when."""

from typing import Any

import pytest

from holdfast.client.protocol.columns import MessageParts
from holdfast.client.protocol.commands import (
    AckBatch,
    Cancel,
    CreateGroup,
    CreateQueue,
    Extend,
    ForgetProducer,
    Lease,
    Nack,
    OpenProducer,
    OpenSession,
    PurgeQueue,
    Reschedule,
    SetLimits,
    TimeStep,
    Touch,
    UpdateQueue,
)
from holdfast.client.protocol.errors import (
    BatchTooLarge,
    HoldfastError,
    IdempotencyConflict,
    MessageTooLarge,
    ProducerFenced,
    ProducerUnknown,
    ProducerWindowFull,
    QueueFull,
    QueueNotFound,
    ReservedName,
    SequenceGap,
)
from holdfast.client.protocol.queries import DeadLetters, Explain, FindByKey, Peek, ProducerState, Stats
from holdfast.client.protocol.replies import (
    DeadListed,
    Done,
    Explained,
    Extended,
    Failed,
    Grant,
    GroupStats,
    Leased,
    Messages,
    Produced,
    ProducerDescribed,
    ProducerOpened,
    QueueCreated,
    Reply,
    Settled,
    VersionOutcome,
    VersionsChanged,
    VersionsFound,
)
from holdfast.client.protocol.values import LeaseId, QueueId, QueueSettings, Version
from tests.support.machine import START_MS, Machine, produce, session_id

Q = QueueId(1)
NOTHING = Leased(lease_id=LeaseId(0), deadline_ms=0, grants=())


def queue_with(*messages: bytes | MessageParts, **settings: Any) -> Machine:
    machine = Machine()
    for session in (1, 2):
        machine.do(OpenSession(consumer_id=f"worker-{session}"), session)
    assert machine.do(CreateQueue(name="q", settings=QueueSettings(**settings))) == QueueCreated(queue_id=Q)
    for message in messages:
        assert isinstance(machine.do(produce(Q, message)), Produced)
    return machine


def send(machine: Machine, first: int, *messages: bytes, client: str = "shop", **named: Any) -> Reply:
    return machine.do(produce(Q, *messages, client_id=client, first_seq=first, **named))


def wrote(first: int, count: int = 1, *, replayed: bool = False) -> Produced:
    return Produced(first_version=Version(first), count=count, replayed=replayed)


def open_producer(machine: Machine, nonce: int, client: str = "shop") -> Reply:
    return machine.do(OpenProducer(queue_id=Q, client_id=client, nonce=nonce.to_bytes(16, "big")))


def take(machine: Machine, count: int = 10, session: int = 1, **named: Any) -> Leased:
    reply = machine.do(Lease(queue_id=Q, group="default", max_messages=count, **named), session)
    assert isinstance(reply, Leased), reply
    return reply


def tail(machine: Machine) -> int:
    return stats(machine).tail_version


def stats(machine: Machine) -> GroupStats:
    reply = machine.ask(Stats(queue_id=Q, group="default"))
    assert isinstance(reply, GroupStats), reply
    return reply


def why(machine: Machine, version: int) -> Explained:
    reply = machine.ask(Explain(queue_id=Q, group="default", version=version))
    assert isinstance(reply, Explained), reply
    return reply


def delayed(until_ms: int) -> Explained:
    return Explained(reason="delayed", facts=(("until_ms", START_MS + until_ms),))


def refused(error: HoldfastError) -> Failed:
    return Failed(error)


# P1: numbers


def test_the_reply_carries_the_versions() -> None:
    """P1: versions count from 1 without gaps, over all producers of the queue."""
    machine = queue_with()
    assert send(machine, 1, b"a", b"b") == wrote(1, 2)
    assert send(machine, 1, b"c", client="till") == wrote(3)
    assert send(machine, 3, b"d") == wrote(4)


def test_numbers_may_leave_gaps_but_only_upwards() -> None:
    """P1: a number above the mark is new, whatever lies between; one at or below it is not."""
    machine = queue_with()
    assert send(machine, 5, b"a") == wrote(1)
    assert send(machine, 100, b"b") == wrote(2)
    assert send(machine, 50, b"c") == refused(IdempotencyConflict(high_water=100, different_body=False))


def test_a_request_that_overtook_another_is_refused() -> None:
    """P1: after_seq names what must have been written before; else nothing is written."""
    machine = queue_with()
    assert send(machine, 1, b"a", b"b", after_seq=0) == wrote(1, 2)
    assert send(machine, 4, b"d", after_seq=3) == refused(SequenceGap(high_water=2))
    assert tail(machine) == 2
    assert send(machine, 3, b"c", after_seq=2) == wrote(3)
    assert send(machine, 4, b"d", after_seq=3) == wrote(4)


def test_the_first_request_after_a_lost_one_is_refused() -> None:
    """P1: a producer of which nothing is known has the mark 0."""
    machine = queue_with()
    assert send(machine, 3, b"c", after_seq=2) == refused(SequenceGap(high_water=0))
    assert tail(machine) == 0


def test_a_mark_above_after_seq_is_a_gap_too() -> None:
    """P1: after_seq must be the mark itself, not something that lies below it."""
    machine = queue_with()
    send(machine, 1, b"a", b"b", b"c")
    assert send(machine, 6, b"d", after_seq=2) == refused(SequenceGap(high_water=3))
    assert tail(machine) == 3
    assert send(machine, 6, b"d", after_seq=3) == wrote(4)


def test_each_queue_has_numbers_of_its_own() -> None:
    """P1: what a client wrote to one queue says nothing about another."""
    machine = queue_with()
    machine.do(CreateQueue(name="other"))
    send(machine, 1, b"a", b"b")
    assert machine.do(produce(2, b"x", client_id="shop", first_seq=1, after_seq=0)) == wrote(1)
    assert send(machine, 3, b"c", after_seq=2) == wrote(3)


# P2: replays


def test_an_exact_replay_answers_the_original_versions() -> None:
    """P2: the second time nothing is written, and the reply says so."""
    machine = queue_with()
    send(machine, 1, b"x", client="till")
    assert send(machine, 1, b"a", b"b") == wrote(2, 2)
    assert send(machine, 1, b"a", b"b") == wrote(2, 2, replayed=True)
    assert tail(machine) == 3


def test_a_replay_is_answered_whatever_the_limits_say_now() -> None:
    """P2: a full queue refuses what is new, not what is written already."""
    machine = queue_with(max_backlog_messages=2)
    send(machine, 1, b"a", b"b")
    assert send(machine, 3, b"c") == refused(QueueFull(limit_name="max_backlog_messages", limit=2))
    machine.do(UpdateQueue(queue_id=Q, changes=(("max_message_bytes", 1), ("max_backlog_messages", 1))))
    assert send(machine, 1, b"a", b"b") == wrote(1, 2, replayed=True)


def test_requests_are_remembered_until_done_below_passes_them() -> None:
    """P2: with done_below held back both are replayed; when it passes the first, only the second is."""
    machine = queue_with()
    send(machine, 1, b"a", done_below=1)
    send(machine, 2, b"b", done_below=1)
    assert send(machine, 1, b"a", done_below=1) == wrote(1, replayed=True)
    assert send(machine, 3, b"c", done_below=2) == wrote(3)
    assert send(machine, 1, b"a", done_below=1) == refused(IdempotencyConflict(high_water=3, different_body=False))
    assert send(machine, 2, b"b", done_below=1) == wrote(2, replayed=True)


def test_by_default_one_request_is_remembered() -> None:
    """P2: without done_below a new request forgets those before it."""
    machine = queue_with()
    send(machine, 1, b"a")
    send(machine, 2, b"b")
    assert send(machine, 2, b"b") == wrote(2, replayed=True)
    assert send(machine, 1, b"a") == refused(IdempotencyConflict(high_water=2, different_body=False))


def test_a_full_window_refuses_the_next_and_forgets_nothing() -> None:
    """P2: at 1,024 remembered requests the next is refused until done_below moves."""
    machine = queue_with()
    for number in range(1, 1_025):
        assert send(machine, number, b"a", done_below=1) == wrote(number)
    assert send(machine, 1_025, b"a", done_below=1) == refused(ProducerWindowFull(limit=1_024))
    assert send(machine, 1, b"a", done_below=1) == wrote(1, replayed=True)
    assert send(machine, 1_025, b"a", done_below=2) == wrote(1_025)


def test_a_missing_queue_is_named_before_all_else() -> None:
    """P2: the queue is checked first, then the reserved name."""
    machine = queue_with()
    assert machine.do(produce(9, b"a", client_id="moved/1")) == refused(QueueNotFound(queue=9))
    assert send(machine, 1, b"a", client="moved/1") == refused(ReservedName(kind="client_id", name="moved/1"))


def test_a_replay_is_answered_when_its_messages_are_long_gone() -> None:
    """P2: settled and freed, they still are what the request wrote."""
    machine = queue_with()
    send(machine, 1, b"a", b"b")
    take(machine)
    machine.do(AckBatch(queue_id=Q, group="default", ranges=((1, 1, 2),)))
    assert machine.ask(Peek(queue_id=Q)) == Messages(batches=(), next_version=None)
    assert send(machine, 1, b"a", b"b") == wrote(1, 2, replayed=True)
    assert take(machine) == NOTHING


def test_checks_have_an_order() -> None:
    """P2: a request that is wrong in every way is refused for the epoch, then the conflict, the gap, the limit."""
    machine = queue_with(max_message_bytes=1)
    open_producer(machine, 1)
    open_producer(machine, 2)
    named: dict[str, Any] = {"numbering_epoch": 2, "done_below": 1}
    assert send(machine, 1, b"a", epoch=2, after_seq=0, **named) == wrote(1)
    assert send(machine, 2, b"b", epoch=2, after_seq=1, **named) == wrote(2)
    assert send(machine, 1, b"a", epoch=1, after_seq=0, **named) == wrote(1, replayed=True)
    assert send(machine, 1, b"big", epoch=1, after_seq=7, **named) == refused(ProducerFenced(epoch=2, high_water=2))
    conflict = IdempotencyConflict(high_water=2, different_body=True)
    assert send(machine, 1, b"big", epoch=2, after_seq=7, **named) == refused(conflict)
    assert send(machine, 3, b"big", epoch=2, after_seq=7, **named) == refused(SequenceGap(high_water=2))
    too_large = MessageTooLarge(size=3, limit=1, limit_name="max_message_bytes")
    assert send(machine, 3, b"big", epoch=2, after_seq=2, **named) == refused(too_large)
    assert tail(machine) == 2


# P3: conflicts


def test_a_different_body_under_a_known_number_is_named() -> None:
    """P3: the same first number with another content is told so, with the mark."""
    machine = queue_with()
    send(machine, 1, b"a", b"b")
    assert send(machine, 1, b"a", b"B") == refused(IdempotencyConflict(high_water=2, different_body=True))
    assert tail(machine) == 2


def test_a_request_that_straddles_the_mark_writes_nothing() -> None:
    """P3: the new half of a request is not taken for the whole."""
    machine = queue_with()
    send(machine, 1, b"a", b"b")
    assert send(machine, 2, b"b", b"c") == refused(IdempotencyConflict(high_water=2, different_body=False))
    assert tail(machine) == 2


def test_another_count_under_a_known_number_is_a_conflict() -> None:
    """P3: a longer and a shorter batch under the same first number are other contents."""
    machine = queue_with()
    send(machine, 1, b"a", b"b")
    for messages in ([b"a"], [b"a", b"b", b"c"]):
        assert send(machine, 1, *messages) == refused(IdempotencyConflict(high_water=2, different_body=True))
    assert tail(machine) == 2


@pytest.mark.parametrize(
    "message",
    [
        MessageParts(b"a", key="k"),
        MessageParts(b"a", headers={"colour": "green"}),
        MessageParts(b"a", delay_ms=1),
        MessageParts(b"a", ttl_ms=1),
    ],
)
def test_what_stands_beside_the_payload_is_content_too(message: MessageParts) -> None:
    """P3: the same payload with another key, header, delay or TTL is no replay."""
    machine = queue_with()
    send(machine, 1, b"a")
    reply = machine.do(produce(Q, message, client_id="shop", first_seq=1))
    assert reply == refused(IdempotencyConflict(high_water=1, different_body=True))
    assert tail(machine) == 1


# P4: epochs


def test_the_same_nonce_gets_the_same_epoch() -> None:
    """P4: a retried open fences nobody, another nonce does."""
    machine = queue_with()
    assert open_producer(machine, 1) == ProducerOpened(epoch=1, high_water=0)
    assert open_producer(machine, 1) == ProducerOpened(epoch=1, high_water=0)
    send(machine, 1, b"a", b"b", epoch=1, numbering_epoch=1)
    assert open_producer(machine, 2) == ProducerOpened(epoch=2, high_water=2)


def test_an_older_epoch_is_fenced() -> None:
    """P4: after a new open the old incarnation writes nothing more, and learns the epoch and the mark."""
    machine = queue_with()
    open_producer(machine, 1)
    send(machine, 1, b"a", epoch=1, numbering_epoch=1)
    open_producer(machine, 2)
    assert send(machine, 2, b"b", epoch=1, numbering_epoch=1) == refused(ProducerFenced(epoch=2, high_water=1))
    assert send(machine, 2, b"b", epoch=2, numbering_epoch=2) == wrote(2)


def test_a_fenced_producer_still_gets_its_replays_answered() -> None:
    """P4: what the old epoch had written is answered to it as before."""
    machine = queue_with()
    open_producer(machine, 1)
    send(machine, 1, b"a", epoch=1, numbering_epoch=1)
    open_producer(machine, 2)
    assert send(machine, 1, b"a", epoch=1, numbering_epoch=1) == wrote(1, replayed=True)


def test_an_outbox_resends_under_its_new_epoch_and_old_numbering() -> None:
    """P4: the numbering epoch finds the first write; under the new numbering it is a conflict."""
    machine = queue_with()
    open_producer(machine, 1)
    send(machine, 1, b"a", epoch=1, numbering_epoch=1)
    open_producer(machine, 2)
    assert send(machine, 1, b"a", epoch=2, numbering_epoch=1) == wrote(1, replayed=True)
    conflict = IdempotencyConflict(high_water=1, different_body=False)
    assert send(machine, 1, b"a", epoch=2, numbering_epoch=2) == refused(conflict)


def test_epoch_zero_is_accepted_until_somebody_opens() -> None:
    """P4: low-level produce works without an open, and is fenced by the first one."""
    machine = queue_with()
    assert send(machine, 1, b"a") == wrote(1)
    assert open_producer(machine, 1) == ProducerOpened(epoch=1, high_water=1)
    assert send(machine, 2, b"b") == refused(ProducerFenced(epoch=1, high_water=1))


def test_a_producer_that_restarts_at_one_is_told() -> None:
    """P4: the numbers of a forgetful producer meet the mark and are not swallowed."""
    machine = queue_with()
    send(machine, 1, b"a")
    send(machine, 2, b"b")
    assert send(machine, 1, b"new") == refused(IdempotencyConflict(high_water=2, different_body=False))


def test_opening_one_producer_fences_no_other() -> None:
    """P4: an epoch belongs to one client on one queue."""
    machine = queue_with()
    machine.do(CreateQueue(name="other"))
    send(machine, 1, b"a", client="till")
    open_producer(machine, 1)
    assert send(machine, 2, b"b", client="till") == wrote(2)
    assert machine.do(produce(2, b"x", client_id="shop", first_seq=1)) == wrote(1)


def test_an_epoch_that_was_never_given_out_is_unknown() -> None:
    """P4: nobody can run ahead of the epochs."""
    machine = queue_with()
    open_producer(machine, 1)
    reply = send(machine, 1, b"a", epoch=2, numbering_epoch=2)
    assert reply == refused(ProducerUnknown(client_id="shop"))
    assert tail(machine) == 0


# P5: memory


def test_a_producer_is_forgotten_at_its_expiry_and_not_before() -> None:
    """P5: a millisecond before a replay is answered; at the expiry its epoch is unknown, and nothing is written."""
    machine = queue_with(producer_expiry_ms=1_000)
    open_producer(machine, 1)
    send(machine, 1, b"a", epoch=1, numbering_epoch=1)
    machine.pass_ms(999)
    assert send(machine, 1, b"a", epoch=1, numbering_epoch=1) == wrote(1, replayed=True)
    machine.pass_ms(1)
    assert send(machine, 1, b"a", epoch=1, numbering_epoch=1) == refused(ProducerUnknown(client_id="shop"))
    assert tail(machine) == 1
    assert open_producer(machine, 2) == ProducerOpened(epoch=2, high_water=0)


def test_without_expiry_a_producer_is_remembered_for_ever() -> None:
    """P5: a year later the replay is still a replay."""
    machine = queue_with()
    machine.do(SetLimits(changes=(("stamp_advance_ms", 10**12),)))
    send(machine, 1, b"a")
    machine.pass_ms(366 * 86_400_000)
    assert send(machine, 1, b"a") == wrote(1, replayed=True)


def test_an_administrator_can_forget_a_producer() -> None:
    """P5: forgotten, its epoch is unknown; forgetting one that is unknown says so."""
    machine = queue_with()
    open_producer(machine, 1)
    send(machine, 1, b"a", epoch=1, numbering_epoch=1)
    assert machine.do(ForgetProducer(queue_id=Q, client_id="shop")) == Done()
    assert send(machine, 2, b"b", epoch=1, numbering_epoch=1) == refused(ProducerUnknown(client_id="shop"))
    forget = machine.do(ForgetProducer(queue_id=Q, client_id="shop"))
    assert forget == refused(ProducerUnknown(client_id="shop"))


def test_an_outbox_that_outlived_its_producer_writes_nothing_a_second_time() -> None:
    """P5: what was written under its numbers is forgotten, so they are refused, in the epoch that it opened anew."""
    machine = queue_with()
    open_producer(machine, 1)
    assert send(machine, 1, b"a", epoch=1, numbering_epoch=1) == wrote(1)
    machine.do(ForgetProducer(queue_id=Q, client_id="shop"))
    assert open_producer(machine, 2) == ProducerOpened(epoch=2, high_water=0)
    unknown = refused(ProducerUnknown(client_id="shop"))
    assert send(machine, 1, b"a", epoch=2, numbering_epoch=1) == unknown
    assert send(machine, 1, b"b", epoch=2, numbering_epoch=2) == wrote(2)


def test_a_produce_without_client_id_leaves_no_producer() -> None:
    """P5: it is numbered under its session, and its messages say which."""
    machine = queue_with(b"a", b"b")
    name = f"session/{session_id(1).hex()}"
    assert machine.ask(ProducerState(queue_id=Q, client_id=name)) == refused(ProducerUnknown(client_id=name))
    page = machine.ask(Peek(queue_id=Q))
    assert isinstance(page, Messages)
    assert [(batch.client_id, batch.first_seq) for batch in page.batches] == [(name, 1), (name, 2)]


def test_the_memory_is_one_mark_and_the_open_window() -> None:
    """P5: what is remembered can be read, and shrinks with done_below."""
    machine = queue_with()
    for number in range(1, 6):
        send(machine, number, b"a", done_below=3)
    described = ProducerDescribed(epoch=0, high_water=5, last_used_ms=START_MS, window=3)
    assert machine.ask(ProducerState(queue_id=Q, client_id="shop")) == described


def test_accepted_produces_keep_a_producer_alive() -> None:
    """P5: its expiry counts from the last write."""
    machine = queue_with(producer_expiry_ms=1_000)
    open_producer(machine, 1)
    for number in range(1, 4):
        machine.pass_ms(999)
        assert send(machine, number, b"a", epoch=1, numbering_epoch=1) == wrote(number)
    machine.pass_ms(999)
    assert send(machine, 3, b"a", epoch=1, numbering_epoch=1) == wrote(3, replayed=True)


# P6: later, or not at all


@pytest.mark.parametrize("message", [
    MessageParts(b"later", delay_ms=1_000),
    MessageParts(b"later", not_before_ms=START_MS + 1_000),
    MessageParts(b"later", delay_ms=1_000, not_before_ms=START_MS + 5),
])  # fmt: skip
def test_a_delayed_message_is_held_until_its_time(message: MessageParts) -> None:
    """P6: a millisecond before nothing is delivered, at the time itself it is, and others pass it meanwhile."""
    machine = queue_with(message, b"now")
    assert take(machine).grants == (Grant(2, 2, 1, 1),)
    machine.pass_ms(999)
    assert take(machine) == NOTHING
    machine.pass_ms(1)
    assert take(machine).grants == (Grant(1, 1, 1, 1),)


def test_a_delay_has_no_horizon() -> None:
    """P6: ten years are as good as a second."""
    ten_years = 10 * 366 * 86_400_000
    machine = queue_with(MessageParts(b"later", delay_ms=ten_years))
    assert why(machine, 1) == delayed(ten_years)


def test_what_no_group_has_met_can_be_cancelled() -> None:
    """P6: ready or delayed, it is settled as cancelled; the outcome is told run by run."""
    machine = queue_with(b"a", MessageParts(b"b", delay_ms=1_000), b"c", b"d")
    assert take(machine, 1).grants == (Grant(1, 1, 1, 1),)
    reply = machine.do(Cancel(queue_id=Q, versions=((1, 3), (9, 9))))
    assert reply == VersionsChanged(
        outcomes=(
            VersionOutcome(1, 1, "too_late", "default"),
            VersionOutcome(2, 3, "ok"),
            VersionOutcome(9, 9, "not_found"),
        )
    )
    assert why(machine, 2) == Explained(reason="cancelled")
    machine.pass_ms(1_000)
    assert take(machine).grants == (Grant(4, 4, 1, 1),)


def test_one_group_that_met_it_is_enough_to_be_too_late() -> None:
    """P6: a version that was leased once, even if it came back, cannot be cancelled nor rescheduled."""
    machine = queue_with(b"a")
    machine.do(CreateGroup(queue_id=Q, group="other"))
    take(machine)
    machine.do(Nack(queue_id=Q, group="default", ranges=((1, 1, 1),)))
    too_late = VersionsChanged(outcomes=(VersionOutcome(1, 1, "too_late", "default"),))
    assert machine.do(Cancel(queue_id=Q, versions=((1, 1),))) == too_late
    assert machine.do(Reschedule(queue_id=Q, versions=((1, 1),), delay_ms=5)) == too_late


def test_a_rescheduled_message_counts_its_ttl_anew() -> None:
    """P6: the TTL runs from the new due time, and ends exactly then."""
    machine = queue_with(MessageParts(b"a", ttl_ms=1_000))
    machine.pass_ms(900)
    reply = machine.do(Reschedule(queue_id=Q, versions=((1, 1),), delay_ms=500))
    assert reply == VersionsChanged(outcomes=(VersionOutcome(1, 1, "ok"),))
    assert why(machine, 1) == delayed(1_400)
    machine.pass_ms(1_499)
    machine.do(Touch(queue_id=Q))
    assert why(machine, 1) == Explained(reason="available")
    machine.pass_ms(1)
    machine.do(Touch(queue_id=Q))
    assert why(machine, 1) == Explained(reason="discarded")


def test_versions_are_found_by_key_for_cancelling() -> None:
    """P6: a key finds the versions that carry it, and those alone."""
    machine = queue_with(MessageParts(b"a", key="tea"), MessageParts(b"b", key="cups"), MessageParts(b"c", key="tea"))
    found = machine.ask(FindByKey(queue_id=Q, key=b"tea"))
    assert found == VersionsFound(versions=((1, 1), (3, 3)), next_version=None)


def test_a_message_of_ten_years_comes_after_ten_years() -> None:
    """P6: not a millisecond before, and then at once."""
    ten_years = 10 * 366 * 86_400_000
    machine = queue_with(MessageParts(b"later", delay_ms=ten_years))
    for by_ms, grants in ((ten_years - 1, ()), (1, (Grant(1, 1, 1, 1),))):
        machine.do(TimeStep(by_ms=by_ms))
        machine.do(OpenSession(consumer_id="worker-1"))
        assert take(machine).grants == grants


def test_a_cancelled_message_is_cancelled_in_every_group() -> None:
    """P6: no group gets it, and each counts it."""
    machine = queue_with(b"a", b"b")
    machine.do(CreateGroup(queue_id=Q, group="other"))
    machine.do(Cancel(queue_id=Q, versions=((1, 1),)))
    assert take(machine).grants == (Grant(2, 2, 1, 1),)
    reply = machine.do(Lease(queue_id=Q, group="other", max_messages=10))
    assert isinstance(reply, Leased)
    assert reply.grants == (Grant(2, 2, 1, 1),)
    for group in ("default", "other"):
        counted = machine.ask(Stats(queue_id=Q, group=group))
        assert isinstance(counted, GroupStats)
        assert counted.cancelled == 1


def test_a_group_that_settled_it_unseen_makes_it_too_late() -> None:
    """P6: purged in one group without a lease, it can neither be cancelled nor rescheduled in the others."""
    machine = queue_with(b"a")
    machine.do(CreateGroup(queue_id=Q, group="other"))
    machine.do(PurgeQueue(queue_id=Q, group="other"))
    too_late = VersionsChanged(outcomes=(VersionOutcome(1, 1, "too_late", "other"),))
    assert machine.do(Cancel(queue_id=Q, versions=((1, 1),))) == too_late
    assert machine.do(Reschedule(queue_id=Q, versions=((1, 1),), delay_ms=5)) == too_late
    assert take(machine).grants == (Grant(1, 1, 1, 1),)


def test_the_middle_of_a_batch_is_rescheduled_alone() -> None:
    """P6: ready ones are held back, its neighbours are delivered, and at its time it comes with its own payload."""
    machine = queue_with()
    send(machine, 1, b"a", b"b", b"c")
    reply = machine.do(Reschedule(queue_id=Q, versions=((2, 2),), not_before_ms=START_MS + 500))
    assert reply == VersionsChanged(outcomes=(VersionOutcome(2, 2, "ok"),))
    assert machine.payloads(Q, take(machine)) == [b"a", b"c"]
    machine.pass_ms(499)
    assert take(machine) == NOTHING
    machine.pass_ms(1)
    assert machine.payloads(Q, take(machine)) == [b"b"]


def test_a_delayed_message_can_be_brought_forward() -> None:
    """P6: rescheduled to now it is delivered a millisecond later, not at its old time."""
    machine = queue_with(MessageParts(b"a", delay_ms=10**9))
    machine.do(Reschedule(queue_id=Q, versions=((1, 1),), delay_ms=0))
    machine.pass_ms(1)
    assert take(machine).grants == (Grant(1, 1, 1, 1),)
    machine.do(AckBatch(queue_id=Q, group="default", ranges=((1, 1, 1),)))
    machine.do(TimeStep(by_ms=10**9))
    machine.do(OpenSession(consumer_id="worker-1"))
    assert take(machine) == NOTHING


def test_a_search_by_key_has_a_budget_and_goes_on() -> None:
    """P6: page by page every version with the key is found once."""
    machine = queue_with(*[MessageParts(b"m", key="tea" if number % 3 else "cups") for number in range(9)])
    for limit, scan in ((2, 100), (100, 2), (1, 1)):
        found: list[int] = []
        start: int | None = 1
        while start is not None:
            reply = machine.ask(FindByKey(queue_id=Q, key=b"cups", from_version=start, limit=limit, scan=scan))
            assert isinstance(reply, VersionsFound)
            found += [version for first, last in reply.versions for version in range(first, last + 1)]
            start = reply.next_version
        assert found == [1, 4, 7]


# P7: until when


def test_a_message_expires_at_its_time_and_not_before() -> None:
    """P7: deliverable a millisecond before, discarded and counted at the time itself."""
    machine = queue_with(MessageParts(b"a", ttl_ms=1_000), MessageParts(b"b", ttl_ms=1_000))
    machine.pass_ms(999)
    assert take(machine, 1).grants == (Grant(1, 1, 1, 1),)
    machine.pass_ms(1)
    assert take(machine) == NOTHING
    assert (stats(machine).discarded, stats(machine).expired, stats(machine).in_flight) == (1, 1, 1)


def test_an_expired_message_is_not_dropped_in_flight() -> None:
    """P7: extend and ack after the expiry are fine while it is leased."""
    machine = queue_with(MessageParts(b"a", ttl_ms=1_000))
    take(machine, visibility_timeout_ms=2_000)
    machine.pass_ms(1_500)
    extend = Extend(queue_id=Q, group="default", lease_id=LeaseId(1), visibility_timeout_ms=2_000)
    assert machine.do(extend) == Extended(deadline_ms=START_MS + 3_500, held=((1, 1),))
    machine.pass_ms(1_999)
    assert machine.do(AckBatch(queue_id=Q, group="default", ranges=((1, 1, 1),))) == Settled(count=1)
    assert (stats(machine).acked, stats(machine).expired) == (1, 0)


def test_what_expired_in_flight_expires_when_it_returns() -> None:
    """P7: a nack after the expiry ends it then, with that time and the reason."""
    machine = queue_with(MessageParts(b"a", ttl_ms=1_000), on_expired="dead_letter")
    take(machine)
    machine.pass_ms(1_500)
    assert machine.do(Nack(queue_id=Q, group="default", ranges=((1, 1, 1),))) == Settled(count=1)
    reply = machine.ask(DeadLetters(queue_id=Q))
    assert isinstance(reply, DeadListed)
    assert [(row.reason, row.attempts, row.died_ms) for row in reply.rows] == [("expired", 1, START_MS + 1_500)]


def test_the_messages_own_ttl_wins_over_the_queues() -> None:
    """P7: the queue's default is for those that say nothing, also where theirs is longer."""
    machine = queue_with(
        b"a", MessageParts(b"b", ttl_ms=500), MessageParts(b"c", ttl_ms=5_000), default_message_ttl_ms=1_000
    )
    for passed, left in ((500, (True, False, True)), (500, (False, False, True)), (4_000, (False, False, False))):
        machine.pass_ms(passed)
        machine.do(Touch(queue_id=Q))
        assert tuple(why(machine, version).reason == "available" for version in (1, 2, 3)) == left


def test_a_ttl_runs_from_the_end_of_the_delay() -> None:
    """P7: a message is not dead before it could be delivered."""
    machine = queue_with(MessageParts(b"a", delay_ms=1_000, ttl_ms=10))
    machine.pass_ms(1_009)
    assert take(machine, visibility_timeout_ms=1).grants == (Grant(1, 1, 1, 1),)
    machine.pass_ms(1)
    assert take(machine) == NOTHING
    assert why(machine, 1) == Explained(reason="discarded")


def test_a_message_expires_while_it_waits_for_another_attempt() -> None:
    """P7: what was nacked into the future expires at its time, not at the end of the delay."""
    machine = queue_with(MessageParts(b"a", ttl_ms=1_000), on_expired="dead_letter")
    take(machine)
    machine.do(Nack(queue_id=Q, group="default", ranges=((1, 1, 1),), delay_ms=60_000, error="no"))
    machine.pass_ms(5_000)
    machine.do(Touch(queue_id=Q))
    reply = machine.ask(DeadLetters(queue_id=Q))
    assert isinstance(reply, DeadListed)
    assert [(row.reason, row.died_ms, row.last_error) for row in reply.rows] == [("expired", START_MS + 1_000, "no")]


def test_an_expired_message_goes_the_way_of_the_dead_only_if_told() -> None:
    """P7: with dead_letter it follows the queue's strategy, here `move`; either way it is counted as expired."""
    for on_expired, moved, discarded in (("discard", 0, 1), ("dead_letter", 1, 0)):
        machine = Machine()
        machine.do(OpenSession(consumer_id="worker"))
        machine.do(CreateQueue(name="q", settings=QueueSettings(default_message_ttl_ms=100)))
        machine.do(CreateQueue(name="graves"))
        changes = (("dlq_strategy", "move"), ("dlq_queue", "graves"), ("on_expired", on_expired))
        machine.do(UpdateQueue(queue_id=Q, changes=changes))
        machine.do(produce(Q, b"a"))
        machine.pass_ms(100)
        machine.do(Touch(queue_id=Q))
        counted = stats(machine)
        assert (counted.moved, counted.discarded, counted.dead, counted.expired) == (moved, discarded, 0, 1)


# P8: all or nothing


@pytest.mark.parametrize(
    ("settings", "limits", "error"),
    [
        ({}, {"batch_messages": 2}, BatchTooLarge(size=3, limit=2, limit_name="batch_messages")),
        ({}, {"batch_bytes": 11}, BatchTooLarge(size=12, limit=11, limit_name="batch_bytes")),
        ({}, {"message_bytes": 5}, MessageTooLarge(size=6, limit=5, limit_name="message_bytes")),
        ({"max_message_bytes": 5}, {}, MessageTooLarge(size=6, limit=5, limit_name="max_message_bytes")),
        ({"max_backlog_messages": 3}, {}, QueueFull(limit_name="max_backlog_messages", limit=3)),
        ({"max_backlog_bytes": 12}, {}, QueueFull(limit_name="max_backlog_bytes", limit=12)),
    ],
)
def test_a_batch_above_a_limit_writes_nothing(
    settings: dict[str, Any], limits: dict[str, int], error: HoldfastError
) -> None:
    """P8: the refusal names the limit, no message of the batch is there, and no number is used."""
    machine = queue_with(b"x", **settings)
    if limits:
        assert machine.do(SetLimits(changes=tuple(limits.items()))) == Done()
    assert send(machine, 1, b"a", b"12345", b"123456") == refused(error)
    assert tail(machine) == 1
    assert send(machine, 1, b"a") == wrote(2)


def test_a_batch_just_at_the_limits_is_written() -> None:
    """P8: limits are inclusive."""
    machine = queue_with(b"x", max_backlog_messages=4, max_backlog_bytes=13, max_message_bytes=6)
    machine.do(SetLimits(changes=(("batch_messages", 3), ("batch_bytes", 12), ("message_bytes", 6))))
    assert send(machine, 1, b"a", b"12345", b"123456") == wrote(2, 3)


def test_room_comes_back_when_messages_are_settled() -> None:
    """P8: a refused producer may send the same again once consumers caught up."""
    machine = queue_with(b"x", max_backlog_messages=1)
    assert send(machine, 1, b"a") == refused(QueueFull(limit_name="max_backlog_messages", limit=1))
    take(machine)
    machine.do(AckBatch(queue_id=Q, group="default", ranges=((1, 1, 1),)))
    assert send(machine, 1, b"a") == wrote(2)


def test_a_produce_of_a_session_is_all_or_nothing_too() -> None:
    """P8: one message that is too large takes the others with it."""
    machine = queue_with(max_message_bytes=2)
    refusal = MessageTooLarge(size=3, limit=2, limit_name="max_message_bytes")
    assert machine.do(produce(Q, b"a", b"abc")) == refused(refusal)
    assert tail(machine) == 0


# What the mutants showed to be untried


def test_a_request_is_forgotten_by_its_last_number() -> None:
    """P2: done_below inside a request keeps the whole of it."""
    machine = queue_with()
    send(machine, 1, b"a", b"b", b"c")
    assert send(machine, 4, b"d", done_below=3) == wrote(4)
    assert send(machine, 1, b"a", b"b", b"c") == wrote(1, 3, replayed=True)
    assert send(machine, 5, b"e", done_below=4) == wrote(5)
    mark = IdempotencyConflict(high_water=5, different_body=False)
    assert send(machine, 1, b"a", b"b", b"c") == refused(mark)


def test_each_message_of_a_batch_has_its_own_ttl() -> None:
    """P7: one that lives for a second does not take its neighbours along."""
    machine = queue_with()
    machine.do(produce(Q, MessageParts(b"brief", ttl_ms=1_000), MessageParts(b"long", ttl_ms=9_000), b"ever"))
    machine.pass_ms(1_000)
    assert take(machine).grants == (Grant(2, 3, 1, 1),)


def test_too_late_names_the_group_that_was_created_first() -> None:
    """P6: where several groups were faster, the answer is the same on every node."""
    machine = queue_with(b"a")
    machine.do(CreateGroup(queue_id=Q, group="another"))
    for group in ("another", "default"):
        machine.do(Lease(queue_id=Q, group=group, max_messages=1))
    outcome = VersionOutcome(1, 1, "too_late", "default")
    assert machine.do(Cancel(queue_id=Q, versions=((1, 1),))) == VersionsChanged(outcomes=(outcome,))


def test_what_returns_in_the_millisecond_of_its_expiry_expires() -> None:
    """P7: a nack at that time brings nothing back."""
    machine = queue_with(MessageParts(b"mortal", ttl_ms=1_000))
    take(machine)
    machine.pass_ms(1_000)
    machine.do(Nack(queue_id=Q, group="default", ranges=((1, 1, 1),)))
    assert (stats(machine).expired, stats(machine).discarded, stats(machine).ready) == (1, 1, 0)


def test_every_message_that_expires_is_counted() -> None:
    """P7: three messages of one batch are three."""
    machine = queue_with(default_message_ttl_ms=1_000)
    machine.do(produce(Q, b"a", b"b", b"c"))
    machine.pass_ms(1_000)
    machine.do(Touch(queue_id=Q))
    assert (stats(machine).expired, stats(machine).discarded) == (3, 3)


def test_a_produce_of_a_session_meets_the_backlog_limit() -> None:
    """P8: without a client id the queue is as full as with one."""
    machine = queue_with(b"a", max_backlog_messages=1)
    assert machine.do(produce(Q, b"b")) == refused(QueueFull(limit_name="max_backlog_messages", limit=1))
    assert tail(machine) == 1
