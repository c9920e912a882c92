"""Calls whose callers have gone, by scripted events: what is sent then, and that no lease is left behind."""

import pytest

from holdfast.client.events import CallId, Disconnected
from holdfast.client.protocol.commands import Lease, Release
from holdfast.client.protocol.errors import (
    HoldfastError,
    LeaseExpired,
    NotLeader,
    OutcomeUnknown,
    RequestConflict,
    SessionWindowFull,
    Withdrawn,
)
from holdfast.client.protocol.messages import Request, Withdraw
from holdfast.client.protocol.queries import ListQueues
from holdfast.client.protocol.replies import Answer, Grant, Leased
from holdfast.client.protocol.values import LeaseId, Place, QueueId
from holdfast.client.search import SILENCE_S
from holdfast.client.unwanted import LINGER_S, UNDO_S
from tests.unit.client.test_core import CHANGE, Script, identity

LEASE = Lease(queue_id=QueueId(1), group="g", max_messages=9, wait_ms=20_000)
GRANTED = Leased(lease_id=LeaseId(7), deadline_ms=1, grants=(Grant(3, 5, 1, 1), Grant(9, 9, 2, 2)))
GIVEN_BACK = ((7, 3, 5), (7, 9, 9))
NOTHING = ((0, 1, 1),)


def leave(script: Script, call: CallId, outcome: Answer | None = None) -> None:
    script._note(script.core.abandon(call, LEASE, outcome, script.now_s))


def parked(script: Script) -> tuple[CallId, Request]:
    """A Lease that has come to `a` and waits there."""
    call = script.call(LEASE)
    script.open("a")
    return call, script.request("a", Lease)


def released(script: Script, address: str = "a") -> Request:
    request = script.request(address, Release)
    assert isinstance(request.command, Release) and request.command.ranges == GIVEN_BACK
    return request


def placeholder(script: Script, address: str) -> Request:
    request = script.request(address, Release)
    assert isinstance(request.command, Release) and request.command.ranges == NOTHING
    return request


def nothing_more(script: Script) -> bool:
    """Whether the core waits for nothing, and would say nothing more for a minute."""
    script.pass_to(script.now_s + 60.0)
    return not script.core._calls and not any(script.take(address) for address in ("a", "b"))


def is_closed(script: Script) -> bool:
    return script.core.closed


def test_what_was_never_sent_is_forgotten() -> None:
    script = Script()
    call = script.call()
    leave(script, call)
    assert nothing_more(script) and not script.finished


def test_a_parked_lease_is_withdrawn_and_has_not_happened() -> None:
    script = Script()
    call, lease = parked(script)
    leave(script, call)
    assert script.take("a") == [Withdraw(lease.request_id)]
    script.decline("a", lease, Withdrawn())
    assert nothing_more(script) and not script.finished


def test_a_lease_that_crossed_its_withdrawal_is_released() -> None:
    script = Script()
    call, lease = parked(script)
    leave(script, call)
    assert script.take("a") == [Withdraw(lease.request_id)]
    script.answer("a", lease, GRANTED)
    release = released(script)
    assert release.session == lease.session and release.done_below == release.request_seq
    script.answer("a", release)
    assert nothing_more(script) and not script.finished


def test_a_lease_whose_answer_nobody_heard_is_released() -> None:
    """The answer came, and its caller was cancelled before it was looked at."""
    script = Script()
    call, lease = parked(script)
    script.answer("a", lease, GRANTED)
    leave(script, call, Answer(Place(1, 0, 1), GRANTED))
    script.answer("a", released(script))
    assert nothing_more(script)


def test_after_a_lost_connection_the_number_is_taken_so_that_no_lease_can_be_granted() -> None:
    script = Script()
    call, lease = parked(script)
    leave(script, call)
    script.tell(Disconnected("a"))
    script.welcome("a")
    instead = placeholder(script, "a")
    assert identity(instead) == identity(lease)
    script.answer("a", instead)
    assert nothing_more(script)


def test_a_lease_that_was_granted_before_the_connection_was_lost_is_found_and_released() -> None:
    script = Script()
    call, lease = parked(script)
    leave(script, call)
    script.tell(Disconnected("a"))
    script.welcome("a")
    script.refuse("a", placeholder(script, "a"), RequestConflict(request_seq=lease.request_seq))
    again = script.request("a", Lease)
    assert identity(again) == identity(lease) and again.command == LEASE
    script.answer("a", again, GRANTED)
    script.answer("a", released(script))
    assert nothing_more(script)


@pytest.mark.parametrize("end", [RequestConflict(request_seq=1), LeaseExpired(lease_id=7)])
def test_a_lease_that_cannot_be_found_is_over(end: HoldfastError) -> None:
    """A placeholder of before had taken the number, or the lease has ended by itself."""
    script = Script()
    call, _ = parked(script)
    leave(script, call)
    script.tell(Disconnected("a"))
    script.welcome("a")
    script.refuse("a", placeholder(script, "a"), RequestConflict(request_seq=1))
    script.refuse("a", script.request("a", Lease), end)
    assert nothing_more(script)


def test_a_lease_left_on_a_frozen_leader_is_prevented_where_another_leads() -> None:
    script = Script("a", "b")
    call, _ = parked(script)
    leave(script, call)
    script.take("a")
    script.pass_to(SILENCE_S)
    script.welcome("b")
    script.answer("b", script.inquiry("b"))
    script.answer("b", placeholder(script, "b"))
    script.pass_to(UNDO_S)
    assert not script.core._calls


def test_a_full_session_is_waited_for() -> None:
    script = Script()
    call, _ = parked(script)
    leave(script, call)
    script.tell(Disconnected("a"))
    script.welcome("a")
    script.refuse("a", placeholder(script, "a"), SessionWindowFull(limit=256))
    script.pass_to(0.1)
    script.answer("a", placeholder(script, "a"))
    assert nothing_more(script)


def test_a_withdrawal_after_a_lost_attempt_leaves_that_one_to_a_placeholder() -> None:
    script = Script()
    call, lease = parked(script)
    script.tell(Disconnected("a"))
    script.welcome("a")
    again = script.request("a", Lease)
    leave(script, call)
    script.take("a")
    script.decline("a", again, Withdrawn())
    instead = placeholder(script, "a")
    assert identity(instead) == identity(lease)
    script.answer("a", instead)
    assert nothing_more(script)


def test_what_is_given_up_at_its_deadline_leaves_no_lease_behind_either() -> None:
    script = Script()
    call = script.call(LEASE, timeout_s=1.0)
    script.open("a")
    lease = script.request("a", Lease)
    script.pass_to(1.0)
    assert isinstance(script.finished[call], OutcomeUnknown)
    assert Withdraw(lease.request_id) in script.take("a")
    script.answer("a", lease, GRANTED)
    script.answer("a", released(script))
    assert nothing_more(script)


def test_a_command_keeps_its_number_until_it_is_answered() -> None:
    script = Script()
    call = script.call()
    script.open("a")
    left = script.request("a")
    leave(script, call)
    script.call()
    assert script.request("a").done_below == left.request_seq
    script.answer("a", left)
    script.call()
    assert script.request("a").done_below == left.request_seq + 1
    assert call not in script.finished


def test_a_command_is_not_sent_again_for_nobody() -> None:
    script = Script("a", "b")
    gone, stays = script.call(), script.call()
    script.open("a")
    first, second = script.take("a")
    assert isinstance(first, Request) and isinstance(second, Request)
    leave(script, gone)
    script.tell(Disconnected("a"))
    script.welcome(script.connects[-1])
    again = script.request(script.connects[-1])
    assert identity(again) == identity(second)
    assert again.done_below == second.request_seq, "its number is free again"
    script.answer(script.connects[-1], again)
    assert list(script.finished) == [stays]


def test_a_refused_command_of_nobody_is_over() -> None:
    script = Script()
    call = script.call()
    script.open("a")
    leave(script, call)
    script.decline("a", script.request("a"), NotLeader(leader=None))
    assert nothing_more(script)


def test_a_question_of_nobody_is_forgotten_at_once() -> None:
    script = Script()
    call = script.call(ListQueues())
    script.welcome("a")
    script.take("a")
    leave(script, call)
    assert not script.core._calls


def test_an_auto_ack_lease_has_nothing_to_release() -> None:
    script = Script()
    call = script.call(Lease(queue_id=QueueId(1), group="g", max_messages=9, wait_ms=20_000, auto_ack=True))
    script.open("a")
    lease = script.request("a", Lease)
    leave(script, call)
    assert script.take("a") == [Withdraw(lease.request_id)]
    script.answer("a", lease, GRANTED)
    assert nothing_more(script)


def test_what_cannot_be_undone_is_left_to_the_timeout_of_the_lease() -> None:
    script = Script()
    call, _ = parked(script)
    leave(script, call)
    script.tell(Disconnected("a"))
    script.pass_to(UNDO_S)
    assert not script.core._calls


def test_closing_waits_for_a_lease_that_nobody_wants_and_for_nothing_else() -> None:
    script = Script()
    call, lease = parked(script)
    other = script.call(CHANGE)
    script.take("a")
    script._note(script.core.close(script.now_s))
    assert script.finished.keys() == {call, other}
    assert not is_closed(script) and script.take("a") == [Withdraw(lease.request_id)]
    script.decline("a", lease, Withdrawn())
    assert is_closed(script) and script.closed == ["a"]


def test_closing_ends_also_where_nobody_answers() -> None:
    script = Script()
    parked(script)
    script._note(script.core.close(script.now_s))
    script.pass_to(LINGER_S / 2)
    assert not is_closed(script)
    script.pass_to(LINGER_S)
    assert is_closed(script) and script.closed == ["a"]
