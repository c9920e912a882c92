"""Who leads: redirects, loops of them, silence, and what is sent where."""

import pytest

from holdfast.client.events import CallId, Disconnected
from holdfast.client.nodes import PONG_S
from holdfast.client.protocol.errors import ConnectionLost, NoLeader, NotLeader, OutcomeUnknown, SessionExpired
from holdfast.client.protocol.messages import Inquiry, Ping, Pong, Request
from holdfast.client.protocol.queries import ListQueues
from holdfast.client.protocol.replies import Answer, QueuesListed
from holdfast.client.search import SILENCE_S
from tests.unit.client.test_core import Script, identity

LISTED = QueuesListed(queues=())


def test_a_redirect_is_followed_at_once_also_to_an_address_nobody_gave() -> None:
    script = Script("a", "b")
    call = script.call()
    script.open("a")
    first = script.request("a")
    script.decline("a", first, NotLeader(leader="z"))
    assert script.connects == ["a", "z"]
    script.welcome("z")
    again = script.request("z")
    assert identity(again) == identity(first)
    script.answer("z", again)
    assert isinstance(script.finished[call], Answer)
    script.call()
    assert script.request("z").done_below == 2  # the belief is kept


def test_a_session_is_opened_where_the_leader_is() -> None:
    script = Script("a", "b")
    script.call()
    script.welcome("a")
    (opening,) = script.take("a")
    assert isinstance(opening, Request)
    script.decline("a", opening, NotLeader(leader="b"))
    script.open("b")
    assert script.request("b").request_seq == 1


def test_nodes_that_point_at_each_other_are_asked_a_bounded_number_of_times() -> None:
    script = Script("a", "b")
    call = script.call(ListQueues(), timeout_s=30.0)
    script.welcome("a")
    asked = 0
    other = {"a": "b", "b": "a"}
    while not script.finished:
        for address in ("a", "b"):
            if address in script.connects and not script.core._nodes.links[address].ready:
                script.welcome(address)
            for frame in script.take(address):
                if isinstance(frame, Inquiry):
                    asked += 1
                    script.decline(address, frame, NotLeader(leader=other[address]))
        script.pass_to(script.wake_at_s)
    assert isinstance(script.finished[call], NoLeader)
    assert script.finished_at[call] == 30.0
    assert 30 < asked < 200


def test_a_node_without_a_leader_sends_us_round_with_backoff() -> None:
    script = Script("a", "b", "c")
    script.call(ListQueues())
    for number, address in enumerate(["a", "b", "c", "a"]):
        if number < 3:
            script.welcome(address)
        script.decline(address, script.inquiry(address), NotLeader(leader=None))
        assert all(not script.take(other) for other in "abc")  # not before its backoff
        script.pass_to(script.now_s + 0.1)
    assert script.connects == ["a", "b", "c"]


def test_a_dead_address_makes_way_for_the_next() -> None:
    script = Script("a", "b")
    call = script.call(ListQueues())
    script.tell(Disconnected("a"))
    assert script.connects == ["a", "b"]
    script.welcome("b")
    script.answer("b", script.inquiry("b"), LISTED)
    assert isinstance(script.finished[call], Answer)


def silent_leader() -> tuple[Script, CallId, Request]:
    """`a` has a call and says nothing; `b` and `c` are connected and have just been asked."""
    script = Script("a", "b", "c")
    call = script.call()
    script.open("a")
    request = script.request("a")
    script.pass_to(SILENCE_S - 0.001)
    assert script.connects == ["a"]
    script.pass_to(SILENCE_S)
    assert script.connects == ["a", "b", "c"]
    script.welcome("b")
    script.welcome("c")
    assert script.take("a") == [Ping(0)]
    return script, call, request


def test_a_silent_leader_is_left_for_one_who_leads() -> None:
    script, call, request = silent_leader()
    script.answer("b", script.inquiry("b"), LISTED)
    again = script.request("b")
    assert identity(again) == identity(request)
    script.answer("b", again)
    assert list(script.finished) == [call]
    script.answer("a", request)  # it wakes up, and nobody cares
    assert list(script.finished) == [call]


def test_a_silent_leader_is_left_for_one_whom_another_names() -> None:
    script, _, request = silent_leader()
    script.decline("b", script.inquiry("b"), NotLeader(leader="c"))
    (probe, again) = script.take("c")
    assert isinstance(probe, Inquiry) and isinstance(again, Request)
    assert identity(again) == identity(request)


def test_a_slow_leader_keeps_its_calls_while_all_say_that_it_leads() -> None:
    script, call, request = silent_leader()
    for address in ("b", "c"):
        script.decline(address, script.inquiry(address), NotLeader(leader="a"))
    script.pass_to(0.3)
    assert [script.take(address) for address in "abc"] == [[], [], []]
    script.answer("a", request)
    assert list(script.finished) == [call]


def test_the_others_are_asked_again_while_an_election_may_be_under_way() -> None:
    script, _, request = silent_leader()
    script.decline("b", script.inquiry("b"), NotLeader(leader=None))
    script.pass_to(0.5)
    script.answer("b", script.inquiry("b"), LISTED)
    assert identity(script.request("b")) == identity(request)


def test_an_expired_session_at_the_new_leader_leaves_the_silent_attempt_open() -> None:
    script, call, _ = silent_leader()
    script.answer("b", script.inquiry("b"), LISTED)
    script.refuse("b", script.request("b"), SessionExpired())
    assert isinstance(script.finished[call], OutcomeUnknown)


def test_a_connection_on_which_nothing_comes_is_taken_for_dead() -> None:
    script = Script("a")
    call = script.call(timeout_s=7.0)
    script.open("a")
    request = script.request("a")
    script.pass_to(SILENCE_S)
    assert script.take("a") == [Ping(0)]
    script.pass_to(SILENCE_S + PONG_S)
    assert script.closed == ["a"] and script.connects == ["a", "a"]
    script.welcome("a")
    assert identity(script.request("a")) == identity(request)
    script.pass_to(7.0)
    assert isinstance(script.finished[call], ConnectionLost)


def test_a_connection_that_answers_a_ping_is_kept() -> None:
    script = Script("a")
    script.call(timeout_s=30.0)
    script.open("a")
    script.take("a")
    while script.now_s < 20.0:
        script.pass_to(script.now_s + 1.0)
        if Ping(0) in script.take("a"):
            script.say("a", Pong(0))
    assert script.closed == []


@pytest.mark.parametrize("leader", ["a", None])
def test_a_node_that_names_itself_while_declining_is_not_believed(leader: str | None) -> None:
    script = Script("a", "b")
    script.call(ListQueues())
    script.welcome("a")
    script.decline("a", script.inquiry("a"), NotLeader(leader=leader))
    script.pass_to(0.1)
    assert script.connects == ["a", "b"]
