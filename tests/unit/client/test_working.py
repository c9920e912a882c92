"""The worker's core, beside a real state machine: each rule of a turn by example."""

from typing import Any

import pytest

from holdfast.client.protocol.commands import (
    AckBatch,
    CreateGroup,
    CreateQueue,
    DeleteQueue,
    Extend,
    Lease,
    Nack,
    OpenSession,
    PurgeQueue,
    Redrive,
    Release,
    Seek,
)
from holdfast.client.protocol.errors import GroupNotFound, Overloaded, QueueNotFound
from holdfast.client.protocol.queries import DeadLetters, Stats
from holdfast.client.protocol.replies import DeadListed, GroupStats, Leased
from holdfast.client.protocol.values import GroupSettings, QueueId, QueueSettings
from holdfast.client.turns import SETTLED, Answered, Options, Verdict
from holdfast.client.working import GRACE_S
from tests.support.desk import Desk, fold
from tests.support.machine import Machine, produce

Q = QueueId(1)
NACK = Verdict("nack", error="boom")


def queue_with(count: int, **settings: Any) -> Machine:
    """Sessions 1 to 3, and that many messages, each a batch of its own."""
    machine = Machine()
    for session in (1, 2, 3):
        machine.do(OpenSession(consumer_id=f"worker {session}"), session)
    machine.do(CreateQueue(name="q", settings=QueueSettings(**settings)))
    for number in range(count):
        machine.do(produce(Q, str(number).encode()))
    return machine


def desk_at(machine: Machine, session: int = 1, **options: Any) -> Desk:
    desk = Desk(machine, Options(**options), session=session)
    desk.settle_down()
    return desk


def stats(machine: Machine) -> GroupStats:
    reply = machine.ask(Stats(queue_id=Q, group="default"))
    assert isinstance(reply, GroupStats)
    return reply


def steal(machine: Machine, session: int = 3) -> list[int]:
    """Lease what is available, for another session; the versions."""
    answer = fold(machine, Lease(queue_id=Q, group="default", max_messages=100), session)
    return [v for grant in answer.reply.grants for v in range(grant.first, grant.last + 1)]  # type: ignore[union-attr]


# Leasing ----------------------------------------------------------------------------------------------


def test_it_leases_what_its_handlers_and_its_prefetch_can_hold() -> None:
    machine = queue_with(10)
    desk = desk_at(machine, concurrency=2, prefetch=3)
    assert desk.at_work() == [1, 2]
    assert stats(machine).in_flight == 5


def test_it_leases_again_when_more_than_half_of_the_prefetch_is_free() -> None:
    machine = queue_with(10)
    desk = desk_at(machine, concurrency=1, prefetch=4)
    for version in (1, 2):
        desk.end(version)
        assert not desk.asked_for(Lease)
    desk.end(3)
    assert len(desk.asked_for(Lease)) == 1


def test_without_prefetch_a_message_is_leased_when_a_handler_is_free() -> None:
    machine = queue_with(3)
    desk = desk_at(machine, concurrency=1, prefetch=0)
    assert stats(machine).in_flight == 1
    desk.end(1)
    assert len(desk.asked_for(Lease)) == 1


def test_a_wait_is_never_longer_than_a_third_of_the_timeout() -> None:
    """A lease counts from when it was asked for: a long wait would use it up."""
    desk = desk_at(queue_with(0, visibility_timeout_ms=3_000), wait_ms=20_000)
    (waiting,) = desk.asked_for(Lease)
    assert desk.asks[waiting].what.wait_ms == 1_000  # type: ignore[union-attr]


def test_a_refused_lease_is_tried_again_later_and_later() -> None:
    desk = desk_at(queue_with(0))
    pauses = []
    for _ in range(6):
        (lease,) = desk.asked_for(Lease)
        del desk.asks[lease]
        before = desk.now_s
        desk.tell(Answered(lease, Overloaded(limit_name="x", limit=1, retry_after_ms=0)))
        assert not desk.asked_for(Lease)
        desk.pass_ms(int((desk.core.wake_at_s - desk.now_s) * 1000) + 1)
        pauses.append(desk.now_s - before)
    assert pauses == sorted(pauses)
    assert len(desk.notes) == 1, "one line for a row of refusals"


def test_a_queue_that_is_not_there_ends_the_worker_with_that_error() -> None:
    desk = Desk(queue_with(0), queue="other")
    desk.settle_down()
    assert desk.over()
    assert isinstance(desk.core.failure, QueueNotFound)


def test_a_group_that_is_not_there_ends_the_worker_with_that_error() -> None:
    desk = desk_at(queue_with(0), group="other")
    assert desk.over()
    assert isinstance(desk.core.failure, GroupNotFound)


def test_a_queue_that_is_deleted_ends_the_worker_when_its_handlers_have_ended() -> None:
    machine = queue_with(1)
    desk = desk_at(machine, concurrency=1, prefetch=2)
    machine.do(DeleteQueue(queue_id=Q))
    desk.settle_down()
    assert isinstance(desk.core.failure, QueueNotFound)
    assert not desk.over()
    desk.end(1)
    desk.settle_down()
    assert desk.over()


# Verdicts ---------------------------------------------------------------------------------------------


def test_what_ends_while_an_ack_is_on_its_way_is_acked_together() -> None:
    machine = queue_with(6)
    desk = desk_at(machine, concurrency=6, prefetch=0)
    for version in (1, 3, 2, 6):
        desk.end(version)
    (first,) = desk.asked_for(AckBatch)
    desk.answer(first)
    desk.settle_down()
    acks = [command.ranges for command in desk.sent if isinstance(command, AckBatch)]
    assert acks == [((1, 1, 1),), ((1, 2, 3), (1, 6, 6))]
    assert stats(machine).acked == 4


def test_acks_of_several_leases_go_together() -> None:
    machine = queue_with(4)
    desk = desk_at(machine, concurrency=2, prefetch=0)
    desk.end(1)
    desk.end(2)
    for version in (3, 4):
        (lease,) = desk.asked_for(Lease)
        desk.answer(lease)
        desk.end(version)
    desk.settle_down()
    acks = [command.ranges for command in desk.sent if isinstance(command, AckBatch)]
    assert acks == [((1, 1, 1),), ((1, 2, 2), (2, 3, 3), (3, 4, 4))]


def test_a_failure_nacks_with_its_text_and_leaves_the_delay_to_the_group() -> None:
    machine = queue_with(1)
    desk = desk_at(machine)
    desk.end(1, NACK)
    (nack,) = [command for command in desk.sent if isinstance(command, Nack)]
    assert (nack.error, nack.delay_ms, nack.dead) == ("boom", None, False)
    desk.settle_down()
    assert desk.at_work() == [1]


def test_failures_for_different_reasons_go_apart() -> None:
    desk = desk_at(queue_with(3), concurrency=3, prefetch=0)
    for version, error in ((1, "a"), (2, "b"), (3, "a")):
        desk.end(version, Verdict("nack", error=error))
    desk.settle_down()
    nacks = [(command.error, command.ranges) for command in desk.sent if isinstance(command, Nack)]
    assert nacks == [("a", ((1, 1, 1),)), ("b", ((1, 2, 2),)), ("a", ((1, 3, 3),))]


def test_a_rejected_message_is_dead_at_once() -> None:
    machine = queue_with(1)
    desk = desk_at(machine)
    desk.end(1, Verdict("nack", error="no", dead=True))
    desk.settle_down()
    dead = machine.ask(DeadLetters(queue_id=Q))
    assert isinstance(dead, DeadListed)
    assert [(row.reason, row.last_error) for row in dead.rows] == [("rejected", "no")]


def test_a_delay_that_is_too_long_becomes_the_longest_one() -> None:
    machine = queue_with(1, max_nack_delay_ms=5_000)
    desk = desk_at(machine)
    desk.end(1, Verdict("nack", delay_ms=60_000))
    desk.settle_down()
    nacks = [command.delay_ms for command in desk.sent if isinstance(command, Nack)]
    assert nacks == [60_000, 5_000]
    assert stats(machine).delayed == 1


def test_what_its_own_transaction_settled_is_not_acked_again() -> None:
    machine = queue_with(1)
    desk = desk_at(machine)
    machine.do(AckBatch(queue_id=Q, group="default", ranges=((1, 1, 1),)))
    desk.end(1, SETTLED)
    desk.settle_down()
    assert not [command for command in desk.sent if isinstance(command, AckBatch)]


@pytest.mark.parametrize("folded", [False, True])
def test_an_ack_without_an_answer_is_sent_again(folded: bool) -> None:
    machine = queue_with(1)
    desk = desk_at(machine)
    desk.end(1)
    (ack,) = desk.asked_for(AckBatch)
    desk.lose(ack, folded=folded)
    assert not desk.asked_for(AckBatch), "not at once"
    desk.pass_ms(1_000)
    desk.settle_down()
    assert stats(machine).acked == 1
    assert desk.notes == []
    assert desk.started == [1]


# Extending, and what is lost --------------------------------------------------------------------------


def test_a_lease_is_extended_while_its_handler_runs() -> None:
    machine = queue_with(1, visibility_timeout_ms=1_000)
    desk = desk_at(machine)
    for _ in range(50):
        desk.pass_ms(200)
        desk.settle_down()
    assert desk.at_work() == [1]
    extends = [command for command in desk.sent if isinstance(command, Extend)]
    assert 15 <= len(extends) <= 30
    desk.end(1)
    desk.settle_down()
    assert stats(machine).acked == 1


def test_a_lease_is_extended_for_what_waits_in_it_too() -> None:
    machine = queue_with(2, visibility_timeout_ms=1_000)
    desk = desk_at(machine, concurrency=1, prefetch=1)
    for _ in range(20):
        desk.pass_ms(200)
        desk.settle_down()
    desk.end(1)
    desk.settle_down()
    assert desk.at_work() == [2]
    assert stats(machine).acked == 1


def test_a_message_is_given_up_before_anybody_else_can_have_it() -> None:
    machine = queue_with(1, visibility_timeout_ms=1_000)
    desk = desk_at(machine, prefetch=0)
    while desk.at_work():
        assert steal(machine) == []
        desk.pass_ms(1)
    assert "could not be extended in time" in desk.notes[0]
    desk.pass_ms(50)
    assert steal(machine) == [1]
    desk.end(1)
    desk.settle_down()
    assert not [command for command in desk.sent if isinstance(command, AckBatch)], "what is lost is never acked"


def test_a_lease_counts_from_when_it_was_asked_for_and_not_from_its_answer() -> None:
    """Its answer took 700 ms: of one second, 300 ms are left."""
    machine = queue_with(1, visibility_timeout_ms=1_000)
    desk = Desk(machine)
    desk.answer(next(iter(desk.asks)))
    (lease,) = desk.asked_for(Lease)
    outcome = desk.fold(lease)
    machine.pass_ms(700)
    desk.tell(Answered(lease, outcome))
    desk.pass_ms(270)
    assert desk.at_work() == [1]
    desk.pass_ms(20)
    assert desk.at_work() == []


def test_an_extension_counts_from_when_it_was_asked_for_too() -> None:
    """Asked for after 480 ms, answered after 880: until 1460, and not until 1860."""
    machine = queue_with(1, visibility_timeout_ms=1_000)
    desk = desk_at(machine, prefetch=0)
    desk.pass_ms(485)
    (extend,) = desk.asked_for(Extend)
    outcome = desk.fold(extend)
    machine.pass_ms(400)
    desk.tell(Answered(extend, outcome))
    desk.pass_ms(500)
    assert desk.at_work() == [1]
    desk.pass_ms(100)
    assert desk.at_work() == []


def test_an_extension_that_fails_is_tried_again_until_the_lease_is_over() -> None:
    machine = queue_with(1, visibility_timeout_ms=1_000)
    desk = desk_at(machine)
    tries = 0
    for _ in range(1_000):
        desk.pass_ms(1)
        for ask in desk.asked_for(Extend):
            desk.lose(ask, folded=False)
            tries += 1
    assert tries >= 3
    assert desk.at_work() == []


def test_a_lease_that_is_over_before_it_arrives_is_handed_back() -> None:
    """Perhaps it is still held: then it comes again without having cost an attempt."""
    machine = queue_with(1, visibility_timeout_ms=1_000)
    desk = Desk(machine)
    desk.answer(next(iter(desk.asks)))
    (lease,) = desk.asked_for(Lease)
    machine.pass_ms(2_000)
    desk.answer(lease)
    assert desk.started == []
    (release,) = desk.asked_for(Release)
    desk.answer(release)
    desk.settle_down()
    assert [start.message.attempts for start in desk.running.values()] == [1]


def test_what_a_purge_took_out_of_the_lease_is_lost() -> None:
    machine = queue_with(2, visibility_timeout_ms=1_000)
    desk = desk_at(machine, concurrency=2, prefetch=0)
    machine.do(PurgeQueue(queue_id=Q, in_flight=True))
    desk.pass_ms(600)
    desk.settle_down()
    assert desk.at_work() == []


def test_what_somebody_settled_by_hand_is_lost_alone() -> None:
    machine = queue_with(2, visibility_timeout_ms=1_000)
    desk = desk_at(machine, concurrency=2, prefetch=0)
    machine.do(AckBatch(queue_id=Q, group="default", ranges=((1, 2, 2),)))
    desk.pass_ms(600)
    desk.settle_down()
    assert desk.at_work() == [1]


def test_a_handler_that_works_in_vain_keeps_its_place() -> None:
    """A thread cannot be stopped: no other one is started beside it."""
    machine = queue_with(2, visibility_timeout_ms=1_000)
    desk = desk_at(machine, concurrency=1, prefetch=0)
    desk.pass_ms(2_000)
    desk.settle_down()
    assert desk.at_work() == []
    assert len(desk.running) == 1
    desk.end(1)
    desk.settle_down()
    assert desk.at_work() == [1]


def test_the_longest_lease_ends_all_extension() -> None:
    machine = queue_with(3, visibility_timeout_ms=1_000, max_lease_ms=3_000)
    desk = desk_at(machine, concurrency=1, prefetch=1)
    for _ in range(40):
        desk.pass_ms(100)
        desk.settle_down()
    assert 1 not in desk.at_work()
    assert len([command for command in desk.sent if isinstance(command, Extend)]) <= 8
    releases = [command.ranges for command in desk.sent if isinstance(command, Release)]
    assert releases[0] == ((1, 2, 2),), "what had not begun is handed back while there is time"


def test_a_handler_has_its_longest_run() -> None:
    machine = queue_with(2, visibility_timeout_ms=1_000)
    desk = desk_at(machine, concurrency=2, prefetch=0, max_run_ms=2_500)
    for _ in range(13):
        desk.pass_ms(200)
        desk.settle_down()
    assert desk.lost
    nacks = [command for command in desk.sent if isinstance(command, Nack)]
    assert [nack.error for nack in nacks] == ["the handler ran for more than 2500 ms"] * len(nacks)
    desk.end(1)
    desk.settle_down()
    assert stats(machine).acked == 0


def test_work_that_was_done_is_acked_even_if_the_time_of_its_lease_seems_over() -> None:
    """Lease time stands still while there is no leader; the cluster knows whether it is over."""
    machine = queue_with(1, visibility_timeout_ms=1_000)
    desk = desk_at(machine)
    desk.end(1)
    (ack,) = desk.asked_for(AckBatch)
    asked = desk.asks[ack]
    machine.pass_ms(5_000)
    desk.lose(ack, folded=False)
    machine.now_ms -= 4_500  # as if the leader's clock had not gone on meanwhile
    answer = fold(machine, asked.what, 1)  # type: ignore[arg-type]
    assert answer.reply.count == 1  # type: ignore[union-attr]
    machine.pass_ms(5_000)
    desk.pass_ms(1_000)
    assert len(desk.asked_for(AckBatch)) == 1, "it is said again"
    desk.settle_down()
    assert stats(machine).acked == 1


# Begun ------------------------------------------------------------------------------------------------


def begun_desk(count: int, **options: Any) -> Desk:
    machine = queue_with(count)
    machine.do(CreateGroup(queue_id=Q, group="begun", settings=GroupSettings(count="begun"), start=1))
    return Desk(machine, Options(group="begun", **options))


def test_where_the_group_counts_begun_a_handler_starts_when_that_is_written_down() -> None:
    desk = begun_desk(3, concurrency=1, prefetch=2)
    desk.answer(next(iter(desk.asks)))
    (lease,) = desk.asked_for(Lease)
    desk.answer(lease)
    assert desk.started == []
    (extend,) = desk.asked_for(Extend)
    assert desk.asks[extend].what.begin == ((1, 1),)  # type: ignore[union-attr]
    desk.answer(extend)
    assert desk.started == [1]
    desk.end(1)
    (extend,) = desk.asked_for(Extend)
    assert desk.asks[extend].what.begin == ((2, 2),), "and not its neighbours"  # type: ignore[union-attr]


def test_a_mark_that_got_lost_is_made_again() -> None:
    desk = begun_desk(1, concurrency=1, prefetch=0)
    desk.answer(next(iter(desk.asks)))
    desk.answer(desk.asked_for(Lease)[0])
    (extend,) = desk.asked_for(Extend)
    desk.lose(extend, folded=True)
    assert desk.started == []
    desk.pass_ms(1_000)
    desk.settle_down()
    assert desk.started == [1]


# Done already -----------------------------------------------------------------------------------------


def finished_but_not_acked(machine: Machine, **options: Any) -> Desk:
    """Version 1 was done by this worker, its ack does not arrive, and its lease of two seconds is about to run out."""
    desk = desk_at(machine, concurrency=1, prefetch=0, **options)
    desk.end(1)
    for _ in range(19):
        desk.pass_ms(100)
        for ask in desk.asked_for(AckBatch):
            desk.lose(ask, folded=False)
    return desk


def lease_by(machine: Machine, session: int) -> int:
    """Another session takes version 1; its lease."""
    leased = machine.do(Lease(queue_id=Q, group="default", max_messages=1), session)
    assert isinstance(leased, Leased)
    assert [grant.first for grant in leased.grants] == [1]
    return leased.lease_id


def test_what_was_done_and_comes_again_is_acked_again_without_its_handler() -> None:
    machine = queue_with(1, visibility_timeout_ms=2_000)
    desk = finished_but_not_acked(machine)
    for _ in range(5):
        desk.pass_ms(1_000)
        desk.settle_down()
    assert desk.started == [1]
    assert stats(machine).acked == 1


def test_so_it_is_when_somebody_else_had_and_released_it_meanwhile() -> None:
    machine = queue_with(1, visibility_timeout_ms=2_000)
    desk = finished_but_not_acked(machine)
    machine.pass_ms(101)
    machine.do(Release(queue_id=Q, group="default", ranges=((lease_by(machine, 2), 1, 1),)), 2)
    for _ in range(5):
        desk.pass_ms(1_000)
        desk.settle_down()
    assert desk.started == [1]
    assert stats(machine).acked == 1


def test_a_seek_makes_it_be_done_again() -> None:
    machine = queue_with(1, visibility_timeout_ms=2_000)
    desk = finished_but_not_acked(machine)
    machine.do(Seek(queue_id=Q, group="default", to=1))
    lease_by(machine, 2)  # so that the counts are as without the seek
    machine.pass_ms(2_001)
    for _ in range(5):
        desk.pass_ms(1_000)
        desk.settle_down()
    assert desk.started == [1, 1]


def test_a_redrive_makes_it_be_done_again() -> None:
    machine = queue_with(1, visibility_timeout_ms=2_000)
    desk = finished_but_not_acked(machine)
    machine.pass_ms(101)
    machine.do(Nack(queue_id=Q, group="default", ranges=((lease_by(machine, 2), 1, 1),), dead=True), 2)
    machine.do(Redrive(queue_id=Q, group="default", dead=((1, 1, 1),)))
    for _ in range(5):
        desk.pass_ms(1_000)
        desk.settle_down()
    assert desk.started == [1, 1]


def test_only_so_many_are_remembered() -> None:
    machine = queue_with(1, visibility_timeout_ms=2_000)
    desk = finished_but_not_acked(machine, remember=0)
    machine.pass_ms(101)
    desk.settle_down()
    assert desk.started == [1, 1]


def test_a_failure_is_not_remembered_as_done() -> None:
    desk = desk_at(queue_with(1))
    desk.end(1, NACK)
    desk.settle_down()
    assert desk.started == [1, 1]


# Stopping ---------------------------------------------------------------------------------------------


def test_a_stop_releases_at_once_what_was_not_begun_and_lets_the_rest_end() -> None:
    machine = queue_with(5)
    desk = desk_at(machine, concurrency=2, prefetch=3)
    desk.stop()
    desk.settle_down()
    assert steal(machine) == [3, 4, 5]
    assert stats(machine).in_flight == 5
    assert not desk.over()
    for version in (1, 2):
        desk.end(version)
    desk.settle_down()
    assert desk.over()
    assert stats(machine).acked == 2


def test_what_was_released_has_cost_no_attempt() -> None:
    machine = queue_with(2)
    desk = desk_at(machine, concurrency=1, prefetch=1)
    desk.stop()
    desk.settle_down()
    answer = fold(machine, Lease(queue_id=Q, group="default", max_messages=1), 3)
    assert [(grant.first, grant.attempts) for grant in answer.reply.grants] == [(2, 1)]  # type: ignore[union-attr]


def test_a_stop_asks_for_nothing_more_and_withdraws_its_wait() -> None:
    desk = desk_at(queue_with(0))
    assert desk.asked_for(Lease)
    desk.stop()
    assert not desk.asks
    assert desk.over()


def test_a_lease_that_comes_in_spite_of_the_stop_is_released() -> None:
    """Its answer was on its way when the wait for it was withdrawn."""
    machine = queue_with(1)
    desk = Desk(machine, withdraws=False)
    desk.answer(next(iter(desk.asks)))
    desk.stop()
    assert not desk.over()
    desk.settle_down()
    assert desk.started == []
    assert desk.over()
    assert steal(machine) == [1]


def test_after_the_stops_deadline_what_runs_is_given_up_and_not_acked() -> None:
    machine = queue_with(2)
    desk = desk_at(machine, concurrency=2, prefetch=0)
    desk.stop(within_ms=3_000)
    desk.pass_ms(2_999)
    assert desk.at_work() == [1, 2]
    desk.end(1)
    desk.settle_down()
    desk.pass_ms(1)
    assert desk.at_work() == []
    assert desk.over()
    desk.end(2)
    assert stats(machine).acked == 1
    assert not desk.asks


def test_a_stop_does_not_wait_for_ever_for_an_ack() -> None:
    desk = desk_at(queue_with(1))
    desk.end(1)
    desk.stop(within_ms=1_000)
    desk.pass_ms(1_000 + int(GRACE_S * 1000) - 10)
    assert not desk.over()
    desk.pass_ms(10)
    assert desk.over()


def test_a_second_stop_can_only_be_sooner() -> None:
    desk = desk_at(queue_with(1))
    desk.stop(within_ms=1_000)
    desk.stop(within_ms=60_000)
    desk.pass_ms(1_000)
    assert desk.at_work() == []
