"""The managed producer by scripted answers: every step of `producing.py`, and the exact outcome of each failure."""

from random import Random

import pytest

from holdfast.client.message import Message
from holdfast.client.outbox import OutboxFailed
from holdfast.client.producing import Ask, Do, Producing, Save, Tell
from holdfast.client.protocol.errors import (
    BadValue,
    BatchTooLarge,
    ConnectionLost,
    HoldfastError,
    IdempotencyConflict,
    MessageTooLarge,
    NoLeader,
    OutcomeUnknown,
    Overloaded,
    ProducerFenced,
    QueueFull,
    QueueRecreated,
    SequenceGap,
)
from holdfast.client.protocol.replies import Answer, Failed, Produced
from holdfast.client.protocol.values import Columns, Place, QueueId, Version, ends_of
from holdfast.client.window import WINDOW_BYTES, Numbered, Sending, sendings_of

TIMEOUT_S = 10.0
PLACE = Place(1, 0, 1)
FULL = QueueFull(limit_name="max_backlog_messages", limit=1)


class Script:
    """A producer that opened epoch 7 at mark 0, and what it asked for."""

    def __init__(self, window: int = 4, *, durable: bool = False, high_water: int = 0, left: int = 0) -> None:
        self.now_s = 0.0
        self.core = Producing(
            queue_id=QueueId(1), client_id="c", window=window, timeout_s=TIMEOUT_S, random=Random(1), durable=durable
        )
        self.asks: list[Ask] = []
        self.told: dict[Sending, range | HoldfastError] = {}
        self.done: list[Do] = []
        self.core.opened(7, high_water, [request(n + 1) for n in range(left)])
        self.look()

    def send(self, *payloads: bytes, awaited: bool = True) -> Sending:
        (sending,) = sendings_of(list(payloads), Message(b""), 1_000)
        sending.awaited = awaited
        self.core.line_up(sending)
        assert self.core.may_enter(sending)
        self.core.send(sending, self.now_s + TIMEOUT_S)
        self.core.leave_line(sending)
        self.look()
        return sending

    def answer(self, first_seq: int, outcome: HoldfastError | int) -> None:
        """The fold's answer to what is asked with this first number: a refusal, or the first version."""
        (ask,) = [ask for ask in self.asks if ask.request.first_seq == first_seq]
        self.asks.remove(ask)
        if (
            isinstance(outcome, HoldfastError)
            and outcome.happened == "no"
            and outcome.code >= 200
            and outcome.code < 300
        ):
            reply: Failed | Produced = Failed(outcome)
        elif isinstance(outcome, HoldfastError):
            self.core.answered(ask.request, outcome, self.now_s)
            self.look()
            return
        else:
            reply = Produced(first_version=Version(outcome), count=ask.request.columns.count)
        self.core.answered(ask.request, Answer(Place(1, 0, 1), reply), self.now_s)
        self.look()

    def pass_to(self, at_s: float) -> None:
        while self.core.wake_at_s <= at_s:
            self.now_s = self.core.wake_at_s
            self.look()
        self.now_s = at_s

    def look(self) -> None:
        while actions := self.core.take_actions(self.now_s):
            self.done += actions
            for action in actions:
                if isinstance(action, Ask):
                    self.asks.append(action)
                elif isinstance(action, Tell):
                    assert action.sending not in self.told
                    self.told[action.sending] = action.outcome

    @property
    def asked(self) -> list[tuple[int, int | None, int]]:
        """Of each request on its way: first number, the number it follows, how many messages."""
        return [(a.command.first_seq, a.command.after_seq, a.command.columns.count) for a in self.asks]


def request(number: int) -> Numbered:
    return Numbered(number, 3, Columns(ends=ends_of([1])), b"x", 1)


# Numbers, batches, the window ------------------------------------------------------------------------------


def test_what_comes_while_a_request_is_on_its_way_forms_the_next() -> None:
    script = Script(window=100)
    first = script.send(b"1")
    rest = [script.send(b"2"), script.send(b"3", b"4")]
    assert script.asked == [(1, 0, 1)]
    script.answer(1, 50)
    assert script.told == {first: range(50, 51)}
    assert script.asked == [(2, 1, 3)]
    script.answer(2, 51)
    assert [script.told[sending] for sending in rest] == [range(51, 52), range(52, 54)]
    assert script.core.high_water == 4 and script.core.settled


def test_requests_that_are_full_are_on_their_way_together_and_name_each_other() -> None:
    script = Script(window=4)
    for payload in (b"1", b"2", b"3", b"4"):
        script.send(payload)
    assert script.asked == [(1, 0, 1), (2, 1, 1), (3, 2, 1), (4, 3, 1)]
    assert {ask.command.done_below for ask in script.asks} == {1}
    assert {(ask.command.epoch, ask.command.numbering_epoch) for ask in script.asks} == {(7, 7)}


def test_done_below_follows_the_answers() -> None:
    script = Script(window=8)
    script.send(b"1", b"2")
    script.send(b"3", b"4")
    script.answer(3, 3)  # known to be written, and with it the first; but the first one's versions are wanted still
    script.send(b"5", b"6")
    assert script.asks[-1].command.done_below == 1
    script.answer(1, 1)
    script.answer(5, 5)
    script.send(b"7")
    assert script.asks[-1].command.done_below == 7


def test_no_more_than_the_pipeline_is_on_its_way() -> None:
    script = Script(window=8)
    for _ in range(4):
        script.send(b"1", b"2")
    assert len(script.asks) == 4
    assert not may_enter(script, b"x")
    script.answer(1, 1)
    assert may_enter(script, b"x")


def test_a_full_window_lets_nobody_in_before_his_turn() -> None:
    script = Script(window=4)
    script.send(b"1", b"2", b"3")
    (large,), (small,) = (list(sendings_of(p, Message(b""), 9)) for p in ([b"4", b"5"], [b"6"]))
    script.core.line_up(large)
    script.core.line_up(small)
    assert not script.core.may_enter(large) and not script.core.may_enter(small)
    script.answer(1, 1)
    assert script.core.may_enter(large) and not script.core.may_enter(small)


def test_the_window_is_bounded_by_bytes_too_and_takes_one_message_of_any_size() -> None:
    script = Script(window=1_000)
    half = bytes(WINDOW_BYTES // 4 + 1)
    for _ in range(3):
        script.send(half)
    assert not may_enter(script, half)
    for ask in list(script.asks):
        script.answer(ask.request.first_seq, 1)
    for ask in list(script.asks):
        script.answer(ask.request.first_seq, 1)
    assert may_enter(script, half)


def test_a_long_call_is_cut_into_portions() -> None:
    portions = list(sendings_of([b"x"] * 25, Message(b""), 10))
    assert [len(portion.parts) for portion in portions] == [10, 10, 5]
    large = list(sendings_of([bytes(600_000)] * 3, Message(b""), 10))
    assert [len(portion.parts) for portion in large] == [1, 1, 1]


def may_enter(script: Script, payload: bytes) -> bool:
    (sending,) = sendings_of([payload], Message(b""), 1)
    script.core.line_up(sending)
    entered = script.core.may_enter(sending)
    script.core.leave_line(sending)
    return entered


# Overtaking ------------------------------------------------------------------------------------------------


def test_a_request_that_overtook_waits_for_the_one_before_it_and_is_asked_again_the_same() -> None:
    """P1, as the client does it."""
    script = Script()
    sent = [script.send(b"1"), script.send(b"2"), script.send(b"3")]
    before = {ask.request.first_seq: ask.command for ask in script.asks}
    script.answer(2, SequenceGap(high_water=0))
    script.answer(3, SequenceGap(high_water=0))
    assert script.asked == [(1, 0, 1)]
    script.answer(1, 1)
    assert script.asked == [(2, 1, 1), (3, 2, 1)]
    assert all(ask.command == before[ask.request.first_seq] for ask in script.asks)
    script.answer(2, 2)
    script.answer(3, 3)
    assert [script.told[sending] for sending in sent] == [range(1, 2), range(2, 3), range(3, 4)]


def test_a_gap_that_was_answered_before_the_mark_moved_means_nothing() -> None:
    script = Script()
    script.send(b"1")
    script.send(b"2")
    script.answer(1, 1)
    script.answer(2, SequenceGap(high_water=0))
    assert script.asked == [(2, 1, 1)] and script.core.ended is None


def test_a_mark_that_is_not_ours_ends_the_producer() -> None:
    script = Script()
    sent = script.send(b"1")
    script.answer(1, SequenceGap(high_water=5))
    assert isinstance(script.told[sent], SequenceGap)
    with pytest.raises(SequenceGap):
        script.core.check()


# Refusals --------------------------------------------------------------------------------------------------


def test_a_refused_request_is_skipped_and_those_behind_it_keep_their_numbers() -> None:
    script = Script()
    sent = [script.send(b"1"), script.send(b"2"), script.send(b"3")]
    script.answer(1, 1)
    script.answer(2, FULL)
    script.answer(3, SequenceGap(high_water=1))
    assert script.told[sent[1]] == FULL
    assert script.asked == [(3, 1, 1)]
    script.answer(3, 2)
    assert script.told[sent[2]] == range(2, 3)
    script.send(b"4")
    assert script.asked == [(4, 3, 1)]


def test_a_refusal_that_leaves_an_attempt_open_is_no_outcome() -> None:
    """A2, as the client does it."""
    script = Script()
    sent, behind = script.send(b"1"), script.send(b"2")
    unknown = OutcomeUnknown(problem="a retry was answered with QueueFull")
    unknown.__cause__ = FULL
    script.answer(1, unknown)
    script.answer(2, SequenceGap(high_water=0))
    assert not script.told and script.asks == []
    script.pass_to(1.0)
    assert script.asked == [(1, 0, 1), (2, 1, 1)]
    script.answer(1, FULL)  # of the second call alone: an attempt of the first may still arrive
    assert not script.told
    script.pass_to(2.0)
    script.answer(1, 9)
    assert script.told == {sent: range(9, 10)}
    script.answer(2, 10)
    assert script.told[behind] == range(10, 11)


def test_only_the_guilty_call_of_a_request_is_refused() -> None:
    """P8, as the client does it."""
    script = Script(window=100)
    script.send(b"0")
    sent = [script.send(b"%d" % n) for n in range(1, 5)]
    script.answer(1, 1)
    large = MessageTooLarge(size=9, limit=1, limit_name="max_message_bytes")
    assert script.asked == [(2, 1, 4)]
    script.answer(2, large)
    assert script.asked == [(2, 1, 2), (4, 3, 2)]
    script.answer(2, 2)
    script.answer(4, large)
    assert script.asked == [(4, 3, 1), (5, 4, 1)]
    script.answer(4, large)
    script.answer(5, SequenceGap(high_water=3))
    assert script.asked == [(5, 3, 1)]
    script.answer(5, 4)
    assert [script.told[sending] for sending in sent] == [range(2, 3), range(3, 4), large, range(4, 5)]


def test_a_batch_limit_of_the_cluster_is_learned() -> None:
    script = Script(window=1_000)
    script.send(b"0")
    sent = [script.send(b"x") for _ in range(100)]
    script.answer(1, 1)
    while script.asks:
        ask = script.asks[0]
        if ask.command.columns.count > 30:
            script.answer(ask.request.first_seq, BatchTooLarge(size=100, limit=30, limit_name="batch_messages"))
        elif ask.command.after_seq != script.core.high_water:
            script.answer(ask.request.first_seq, SequenceGap(high_water=script.core.high_water))
        else:
            script.answer(ask.request.first_seq, 1)
    assert all(isinstance(script.told[sending], range) for sending in sent)
    script.send(b"0")
    for _ in range(100):
        script.send(b"x")
    assert max(ask.command.columns.count for ask in script.asks) == 30


@pytest.mark.parametrize(
    "error",
    [
        ProducerFenced(epoch=9, high_water=1),
        IdempotencyConflict(high_water=5, different_body=True),
        QueueRecreated(name="q", queue_id=8),
    ],
)
def test_what_ends_a_producer_is_told_to_all_who_wait_and_all_who_come(error: HoldfastError) -> None:
    """P3, as the client does it."""
    script = Script()
    sent = [script.send(b"1"), script.send(b"2")]
    waiting = script.send(b"3", b"4")
    script.answer(1, error)
    script.answer(2, error)
    for ask in list(script.asks):
        script.answer(ask.request.first_seq, error)
    assert [script.told[sending] for sending in [*sent, waiting]] == [error] * 3
    assert script.core.settled
    with pytest.raises(type(error)):
        script.core.send(sendings(b"5"), 1.0)


def test_a_fenced_producer_does_not_say_of_what_may_be_written_that_it_is_not() -> None:
    """P4, as the client does it."""
    script = Script()
    written, open_, mine = script.send(b"1"), script.send(b"2"), script.send(b"3")
    lost = OutcomeUnknown(problem="a retry was answered with ProducerFenced")
    lost.__cause__ = ProducerFenced(epoch=9, high_water=2)
    script.answer(1, 1)
    script.answer(2, lost)
    script.answer(3, ProducerFenced(epoch=9, high_water=2))
    assert script.told[written] == range(1, 2)
    unknown = script.told[open_]
    assert isinstance(unknown, OutcomeUnknown) and isinstance(unknown.__cause__, ProducerFenced)
    assert isinstance(script.told[mine], ProducerFenced)


def test_a_mark_below_its_numbers_shows_that_a_fenced_request_was_never_written() -> None:
    script = Script()
    sent = script.send(b"1")
    script.answer(1, ConnectionLost())
    script.pass_to(1.0)
    script.answer(1, ProducerFenced(epoch=9, high_water=0))
    assert isinstance(script.told[sent], ProducerFenced)


def sendings(*payloads: bytes) -> Sending:
    (sending,) = sendings_of(list(payloads), Message(b""), 1_000)
    return sending


# Deadlines -------------------------------------------------------------------------------------------------


def test_who_never_got_out_is_told_that_nothing_happened_and_later_ones_go_on() -> None:
    script = Script()
    early = script.send(b"1")
    script.pass_to(5.0)
    late = script.send(b"2")
    script.pass_to(TIMEOUT_S)
    script.answer(1, NoLeader())
    assert isinstance(script.told[early], NoLeader) and late not in script.told
    script.answer(2, SequenceGap(high_water=0))
    assert script.asked == [(2, 0, 1)]


def test_only_those_whose_time_is_over_leave_a_request_that_never_got_out() -> None:
    script = Script(window=100)
    script.send(b"0")
    early = script.send(b"1")
    script.pass_to(5.0)
    late = script.send(b"2", b"3")
    script.answer(1, 1)
    assert script.asked == [(2, 1, 3)] and script.asks[0].deadline_s == TIMEOUT_S
    script.pass_to(TIMEOUT_S)
    script.answer(2, NoLeader())
    assert isinstance(script.told[early], NoLeader)
    script.pass_to(TIMEOUT_S + 1)
    assert script.asked == [(2, 1, 2)] and script.asks[0].deadline_s == 5.0 + TIMEOUT_S
    script.answer(2, 2)
    assert script.told[late] == range(2, 4)


def test_after_indeterminate_the_same_request_is_asked_again_and_holds_its_place() -> None:
    script = Script()
    sent = script.send(b"1")
    command = script.asks[0].command
    script.pass_to(TIMEOUT_S)
    script.answer(1, OutcomeUnknown(problem="no answer came in time"))
    assert isinstance(script.told[sent], OutcomeUnknown)
    script.pass_to(TIMEOUT_S + 1)
    assert [ask.command for ask in script.asks] == [command]
    later = script.send(b"2")
    assert script.asked == [(1, 0, 1), (2, 1, 1)]
    assert not script.core.settled
    script.answer(1, 1)
    script.answer(2, 2)
    assert script.told[later] == range(2, 3) and script.core.settled


def test_what_waits_behind_a_silent_request_is_withdrawn_at_its_deadline() -> None:
    script = Script(window=100)
    script.send(b"1")
    waiting = script.send(b"2")
    script.pass_to(TIMEOUT_S + 0.1)
    assert isinstance(script.told[waiting], NoLeader)
    script.answer(1, 1)
    assert script.asks == [] and script.core.settled


def test_a_failure_that_nobody_waited_for_is_kept_for_the_flush() -> None:
    script = Script()
    script.send(b"1", awaited=False)
    script.send(b"2")
    script.answer(1, FULL)
    script.answer(2, 1)
    with pytest.raises(QueueFull):
        script.core.check_flushed()
    script.core.check_flushed()


def test_a_failure_outlives_a_flush_that_ran_out_of_time() -> None:
    script = Script()
    script.send(b"1", awaited=False)
    script.answer(1, FULL)
    script.send(b"2")
    with pytest.raises(OutcomeUnknown):
        script.core.check_flushed()
    script.answer(2, 1)
    with pytest.raises(QueueFull):
        script.core.check_flushed()
    script.core.check_flushed()


def test_without_an_outbox_nothing_is_kept_of_what_is_confirmed() -> None:
    script = Script()
    for number in range(1, 10):
        script.send(b"x")
        script.answer(number, number)
    assert script.core.settled and not script.core._confirmed


def test_what_was_withdrawn_is_not_kept_while_nothing_can_be_formed() -> None:
    """A cluster may be away for a day, and a request that may be written keeps its place for as long."""
    script = Script(window=100)
    script.send(b"1")
    script.send(b"2")
    script.pass_to(TIMEOUT_S + 0.1)
    assert not script.core._waiting


# The outbox ------------------------------------------------------------------------------------------------


def test_a_request_is_saved_before_it_is_asked_and_taken_out_before_its_refusal_is_told() -> None:
    script = Script(durable=True)
    script.send(b"1")
    script.answer(1, FULL)
    assert [type(do) for do in script.done] == [Save, Ask, Save, Tell]
    assert script.done[2] == Save([1], [])


def test_what_is_confirmed_leaves_the_outbox_with_the_commit_that_lets_the_cluster_forget_it() -> None:
    script = Script(durable=True)
    script.send(b"1")
    script.answer(1, 1)
    assert [type(do) for do in script.done] == [Save, Ask, Tell]
    script.send(b"2")
    (save,) = [do for do in script.done[3:] if isinstance(do, Save)]
    assert save.erased == [1] and [request.first_seq for request in save.stored] == [2]
    assert script.asks[0].command.done_below == 2


def test_what_a_former_process_left_goes_first_under_its_own_numbering() -> None:
    script = Script(durable=True, high_water=1, left=3)
    new = script.send(b"n")
    assert script.asked == [(1, 1, 1), (2, 1, 1), (3, 2, 1), (4, 3, 1)]
    assert [ask.command.numbering_epoch for ask in script.asks] == [3, 3, 3, 7]
    assert {ask.command.epoch for ask in script.asks} == {7}
    for number in (1, 2, 3, 4):
        script.answer(number, number)
    assert script.told == {new: range(4, 5)}


def test_what_a_former_process_left_is_never_dropped_for_a_refusal() -> None:
    script = Script(durable=True, left=1)
    script.answer(1, FULL)
    assert script.core.ended == FULL
    assert not [do for do in script.done if isinstance(do, Save)]


def test_nobody_is_told_that_nothing_happened_when_the_outbox_fails() -> None:
    script = Script(durable=True)
    sent = script.send(b"1")
    script.answer(1, 1)
    (sending,) = sendings_of([b"2"], Message(b""), 1)
    script.core.line_up(sending)
    script.core.send(sending, TIMEOUT_S)
    save, *rest = script.core.take_actions(script.now_s)
    assert isinstance(save, Save) and script.told[sent] == range(1, 2)
    instead = script.core.not_saved(rest, OutboxFailed(path="p", problem="disk full"))
    assert len(instead) == 0
    script.look()
    assert isinstance(script.told[sending], OutcomeUnknown)
    with pytest.raises(OutboxFailed):
        script.core.check()


def test_what_was_told_to_be_uncertain_stays_in_the_outbox_of_a_fenced_producer() -> None:
    script = Script(durable=True)
    sent = script.send(b"1")
    script.pass_to(TIMEOUT_S)
    script.answer(1, ConnectionLost())
    assert isinstance(script.told[sent], OutcomeUnknown)
    script.pass_to(TIMEOUT_S + 1)
    script.answer(1, ProducerFenced(epoch=9, high_water=0))
    script.core.close()
    script.look()
    assert [do for do in script.done if isinstance(do, Save) and do.erased] == []


# Its end ---------------------------------------------------------------------------------------------------


def test_closing_says_what_is_known_and_leaves_the_open_ones_to_the_outbox() -> None:
    script = Script(window=100, durable=True)
    sent, waiting = script.send(b"1"), script.send(b"2")
    script.core.close()
    script.look()
    assert isinstance(script.told[sent], OutcomeUnknown) and isinstance(script.told[waiting], BadValue)
    assert [do for do in script.done if isinstance(do, Save)] == [Save([], [script.asks[0].request])]
    script.answer(1, 1)  # nobody is there any more
    assert script.core.settled


def test_a_window_must_hold_something() -> None:
    with pytest.raises(BadValue):
        Script(window=0)


def test_a_window_without_room_is_overload_that_did_not_happen() -> None:
    error = Script().core.no_room()
    assert (type(error), error.limit_name, error.happened) == (Overloaded, "window", "no")
