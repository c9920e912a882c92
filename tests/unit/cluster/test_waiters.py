"""Rules L5, L7 and T3 on the leader: who waits, who goes next, and what is touched when."""

from random import Random
from typing import Any

import pytest

from holdfast.client.protocol.columns import MessageParts
from holdfast.client.protocol.commands import (
    AckBatch,
    CreateGroup,
    CreateQueue,
    DeleteGroup,
    DeleteQueue,
    Envelope,
    Lease,
    Nack,
    OpenSession,
    Redrive,
    Release,
    TimeStep,
    Touch,
)
from holdfast.client.protocol.errors import AckHoleCapExceeded, InFlightLimit, NotLeader, Overloaded, StateBroken
from holdfast.client.protocol.queries import DeadLetters
from holdfast.client.protocol.replies import DeadListed, Failed, Leased, QueueCreated, Redriven, Reply, Settled
from holdfast.client.protocol.values import QueueId, QueueSettings
from holdfast.cluster.look import Look, next_due_ms
from holdfast.cluster.waiters import (
    REFRESH_MS,
    TOUCH_GAP_MS,
    Action,
    Bounds,
    Confirm,
    Finish,
    Propose,
    Token,
    Waiters,
)
from holdfast.storage.effects import EndLeases, ReapSoon, TouchSoon, WakeConsumers
from holdfast.storage.leases import NOTHING
from holdfast.storage.state import View
from tests.support.machine import START_MS, Machine, produce
from tests.unit.storage.test_rules_lease import queue_with

Q = QueueId(1)


class Node:
    """A leader in small: the machine applies at once what the waiters propose. Monotonic and committed time are one."""

    def __init__(self, machine: Machine, bounds: Bounds | None = None) -> None:
        self.machine = machine
        self.waiters = Waiters(bounds)
        self.replies: dict[Token, Reply] = {}
        self.from_log: list[Token] = []
        self.touches: list[Touch] = []
        self.confirms: list[Token] = []
        self.waiters.begin()

    @property
    def now_ms(self) -> int:
        return self.machine.now_ms

    def park(self, token: Token, session: int = 1, *, connection: str = "c", **named: Any) -> Envelope:
        asked: dict[str, Any] = {"max_messages": 1, "wait_ms": 10_000, "group": "default", "queue_id": Q}
        envelope = self.machine.envelope(Lease(**asked | named), session)
        self.waiters.add(token, connection, envelope, self.now_ms)
        return envelope

    def step(self) -> list[Action]:
        with self.machine.store.read() as txn:
            return self.waiters.step(View(txn), self.now_ms, self.now_ms)

    def do(self, command: Any, session: int = 1) -> Reply:
        reply = self.machine.do(command, session)
        self.waiters.effects(self.machine.effects)
        self.waiters.changed(Q)
        return reply

    def settle(self) -> None:
        """Perform what is asked for until nothing is."""
        for _ in range(50):
            actions = self.step()
            if not actions and self.waiters.next_wakeup_ms(self.now_ms, self.now_ms) != self.now_ms:
                return
            for action in actions:
                self.perform(action)
        raise AssertionError("it does not come to rest")

    def perform(self, action: Action) -> None:
        match action:
            case Propose(token=token, envelope=envelope):
                self.replies[token] = self.machine.entry([envelope])[0].reply
                self.from_log.append(token)
                self.waiters.effects(self.machine.effects)
                self.waiters.resolved(token)
                self.waiters.changed(Q)
            case Confirm(token=token):
                self.confirms.append(token)
                self.waiters.confirmed(token)
            case Finish(token=token, reply=reply):
                self.replies[token] = reply
            case Touch():
                self.touches.append(action)
                self.machine.do(action)
                self.waiters.effects(self.machine.effects)
                self.waiters.touched(action, self.now_ms)

    def pass_ms(self, milliseconds: int) -> None:
        self.machine.pass_ms(milliseconds)
        self.settle()


def versions(reply: Reply) -> list[int]:
    assert isinstance(reply, Leased), reply
    return [version for grant in reply.grants for version in range(grant.first, grant.last + 1)]


def take(node: Node, count: int, session: int = 2) -> Leased:
    reply = node.do(Lease(queue_id=Q, group="default", max_messages=count), session)
    assert isinstance(reply, Leased)
    return reply


def ack(node: Node, lease_id: int, first: int, last: int, session: int = 2) -> None:
    assert isinstance(
        node.do(AckBatch(queue_id=Q, group="default", ranges=((lease_id, first, last),)), session), Settled
    )


# Waiting


def test_parked_lease_is_answered_as_soon_as_a_message_comes() -> None:
    """L7."""
    node = Node(queue_with(0))
    node.park("a")
    node.settle()
    assert node.replies == {} and node.from_log == []
    node.do(produce(Q, b"x"))
    node.settle()
    assert versions(node.replies["a"]) == [1]
    assert len(node.waiters) == 0


def test_lease_that_finds_something_is_proposed_at_once() -> None:
    """L7: and asks for no read barrier."""
    node = Node(queue_with(3))
    node.park("a", max_messages=2, wait_ms=0)
    node.settle()
    assert versions(node.replies["a"]) == [1, 2]
    assert node.confirms == []


def test_empty_answer_is_no_log_entry_and_passes_the_read_barrier() -> None:
    """L7, Q1."""
    node = Node(queue_with(0))
    index = node.machine.index
    node.park("a", wait_ms=0)
    assert node.step() == [Confirm("a")]
    assert node.step() == []
    node.waiters.confirmed("a")
    assert node.step() == [Finish("a", NOTHING)]
    assert node.machine.index == index
    assert len(node.waiters) == 0


def test_wait_ends_when_it_was_asked_to_and_not_before() -> None:
    """L7."""
    node = Node(queue_with(0))
    node.park("a", wait_ms=5_000)
    node.settle()
    node.pass_ms(4_999)
    assert node.replies == {}
    assert node.waiters.next_wakeup_ms(node.now_ms, node.now_ms) == node.now_ms + 1
    node.pass_ms(1)
    assert node.replies == {"a": NOTHING}


def test_message_that_comes_while_the_barrier_is_passed_is_still_given() -> None:
    """L7."""
    node = Node(queue_with(0))
    node.park("a", wait_ms=0)
    assert node.step() == [Confirm("a")]
    node.do(produce(Q, b"x"))
    node.waiters.confirmed("a")
    node.settle()
    assert versions(node.replies["a"]) == [1]


def test_first_come_is_first_served() -> None:
    """L7: in each group."""
    node = Node(queue_with(0))
    for token in "abc":
        node.park(token)
    node.settle()
    node.do(produce(Q, b"x", b"y"))
    node.settle()
    assert node.from_log == ["a", "b"]
    assert [versions(node.replies[token]) for token in "ab"] == [[1], [2]]


def test_one_message_proposes_one_of_many_waiters() -> None:
    """L7: the others would get empty answers, and those would be remembered (A1)."""
    node = Node(queue_with(0))
    for token in range(20):
        node.park(token, session=1 + token % 2)
    node.settle()
    node.do(produce(Q, b"x"))
    assert [action.token for action in node.step() if isinstance(action, Propose)] == [0]
    node.waiters.effects([WakeConsumers(Q, "default")])
    assert [action for action in node.step() if isinstance(action, Propose)] == []


def test_many_messages_propose_many_waiters_together() -> None:
    """So that they share an entry."""
    node = Node(queue_with(25))
    for token in range(4):
        node.park(token, max_messages=10)
    assert [action.token for action in node.step() if isinstance(action, Propose)] == [0, 1, 2]


def test_what_a_lease_left_goes_to_the_next() -> None:
    """L7: it asked for ten, and bytes allowed it one."""
    node = Node(queue_with(0))
    for token in "ab":
        node.park(token, max_messages=10, max_bytes=1)
    node.settle()
    node.do(produce(Q, b"one", b"two"))
    node.settle()
    assert [versions(node.replies[token]) for token in "ab"] == [[1], [2]]


def test_lease_that_was_not_taken_into_the_log_makes_way_for_the_next() -> None:
    """L7: refused by a full queue of commands."""
    node = Node(queue_with(1))
    node.park("a")
    node.park("b")
    assert [action.token for action in node.step() if isinstance(action, Propose)] == ["a"]
    node.waiters.resolved("a")
    assert [action.token for action in node.step() if isinstance(action, Propose)] == ["b"]


def test_groups_do_not_wake_each_other() -> None:
    """G1."""
    node = Node(queue_with(0))
    node.machine.do(CreateGroup(queue_id=Q, group="other", start="latest"))
    node.park("a")
    node.park("b", group="other")
    node.settle()
    node.waiters.effects([WakeConsumers(Q, "other")])
    assert [action for action in node.step() if isinstance(action, Propose)] == []


# Limits


def test_session_at_its_limit_waits_and_others_pass_it() -> None:
    """L1, L5."""
    node = Node(queue_with(3, max_in_flight_per_session=1))
    node.park("a", session=1)
    node.settle()
    node.park("b", session=1)
    node.park("c", session=2)
    node.settle()
    assert node.from_log == ["a", "c"]
    node.pass_ms(9_999)
    assert "b" not in node.replies
    node.pass_ms(1)
    assert node.replies["b"] == Failed(InFlightLimit(limit_name="max_in_flight_per_session", limit=1))
    assert "b" not in node.from_log


def test_settling_makes_room_for_the_next_under_the_groups_limit() -> None:
    """L1, L5."""
    node = Node(queue_with(3, max_in_flight=1))
    lease = take(node, 1)
    for token in "ab":
        node.park(token)
    node.settle()
    assert node.from_log == []
    ack(node, lease.lease_id, 1, 1)
    node.settle()
    assert node.from_log == ["a"]


def test_hole_cap_is_answered_at_the_end_of_the_wait_with_its_facts() -> None:
    """L5: and without the log."""
    node = Node(queue_with(6, max_ack_holes=1))
    lease = take(node, 5)
    for version in (2, 4):
        ack(node, lease.lease_id, version, version)
    node.park("now", wait_ms=0)
    node.park("later", wait_ms=1_000)
    node.settle()
    refused = node.replies["now"]
    assert isinstance(refused, Failed) and isinstance(refused.error, AckHoleCapExceeded)
    assert (refused.error.holes, refused.error.cap) == (2, 1)
    assert "later" not in node.replies
    ack(node, lease.lease_id, 1, 1)
    node.settle()
    assert versions(node.replies["later"]) == [6]


def test_over_the_hole_cap_one_lease_at_a_time_finds_out() -> None:
    """L5: what is ready above the settled ones is not for now."""
    node = Node(queue_with(7, max_ack_holes=1))
    lease = take(node, 5)
    for version in (2, 4):
        ack(node, lease.lease_id, version, version)
    node.do(Release(queue_id=Q, group="default", ranges=((lease.lease_id, 1, 1),)), session=2)
    node.park("a")
    node.park("b")
    assert [action.token for action in node.step() if isinstance(action, Propose)] == ["a"]


def test_answer_without_the_log_is_what_the_fold_would_have_said() -> None:
    """L1, L5, L7: on many states, for many requests; where the fold has more to say, it is asked."""
    rng = Random(11)
    compared = 0
    for round_ in range(40):
        settings = {"max_ack_holes": rng.choice((1, 100)), "max_in_flight": rng.choice((None, 2, 4))}
        settings |= {"max_in_flight_per_session": rng.choice((None, 1, 3)), "max_lease_ms": 60_000}
        node = Node(queue_with(rng.randint(0, 5), **settings))
        held: list[tuple[int, int]] = []
        for _ in range(25):
            session = rng.randint(1, 2)
            if held and rng.random() < 0.3:
                lease_id, version = held.pop(rng.randrange(len(held)))
                for owner in (1, 2):
                    node.do(AckBatch(queue_id=Q, group="default", ranges=((lease_id, version, version),)), owner)
                continue
            lease = Lease(queue_id=Q, group="default", max_messages=rng.randint(1, 3), auto_ack=rng.random() < 0.2)
            envelope = node.machine.envelope(lease, session)
            with node.machine.store.read() as txn:
                expected = Look(View(txn), Q, "default", node.now_ms).unlogged_answer(envelope)
            reply = node.machine.entry([envelope])[0].reply
            if expected is not None:
                assert reply == expected, round_
                compared += 1
            else:
                assert isinstance(reply, Leased) and reply.grants, round_
                held += [(reply.lease_id, version) for version in versions(reply) if not lease.auto_ack]
    assert compared > 100


# What the fold must say


def test_lease_asked_for_again_gets_its_first_answer_though_nothing_is_available() -> None:
    """L4: a client that lost its connection must not wait for messages that it already holds."""
    node = Node(queue_with(1))
    envelope = node.park("a")
    node.settle()
    node.waiters.add("again", "d", envelope, node.now_ms)
    node.settle()
    assert versions(node.replies["again"]) == [1]
    assert isinstance(node.replies["again"], Leased) and node.replies["again"].replayed


def test_lease_asked_for_again_while_the_first_is_on_its_way_is_answered_after_it() -> None:
    """L4: though it has taken all there was."""
    node = Node(queue_with(1))
    envelope = node.park("a")
    (first,) = (action for action in node.step() if isinstance(action, Propose))
    node.waiters.add("again", "d", envelope, node.now_ms)
    assert [action for action in node.step() if isinstance(action, Propose)] == []
    node.perform(first)
    node.settle()
    assert versions(node.replies["again"]) == versions(node.replies["a"]) == [1]


def test_unknown_session_and_wrong_requests_are_for_the_fold_to_refuse() -> None:
    """A1: with the place in the log that Q2 promises."""
    node = Node(queue_with(0))
    node.park("unknown session", session=7)
    node.park("no such group", group="nobody")
    node.park("no such queue", queue_id=QueueId(99))
    node.park("too long", visibility_timeout_ms=10**12)
    node.settle()
    assert all(isinstance(reply, Failed) for reply in node.replies.values())
    names = [type(reply.error).__name__ for reply in node.replies.values() if isinstance(reply, Failed)]
    assert sorted(names) == ["GroupNotFound", "LeaseTooLong", "QueueNotFound", "SessionExpired"]


def test_waiters_of_a_deleted_group_are_told() -> None:
    """G5: at once, not at the end of their wait."""
    for command in (DeleteGroup(queue_id=Q, group="default"), DeleteQueue(queue_id=Q)):
        node = Node(queue_with(0))
        node.park("a")
        node.settle()
        node.do(command)
        node.settle()
        assert isinstance(node.replies["a"], Failed)


# Going away


def test_cancelled_waiter_is_not_proposed_any_more() -> None:
    """L7: and leaves no lease behind."""
    node = Node(queue_with(0))
    node.park("a")
    node.park("b")
    node.settle()
    node.waiters.cancel("a")
    node.do(produce(Q, b"x"))
    node.settle()
    assert node.from_log == ["b"]
    assert len(node.waiters) == 0


def test_waiter_that_left_while_its_wait_was_confirmed_is_not_answered() -> None:
    """L7."""
    node = Node(queue_with(0))
    node.park("a", wait_ms=0)
    assert node.step() == [Confirm("a")]
    node.waiters.cancel("a")
    node.waiters.confirmed("a")
    assert node.step() == []


def test_parked_are_bounded_for_a_connection_and_in_all() -> None:
    """STYLE: waits are bounded; overload is told at once."""
    node = Node(queue_with(0), Bounds(parked=3, parked_per_connection=2))
    node.park("a")
    node.park("b")
    with pytest.raises(Overloaded) as full:
        node.park("c")
    assert full.value.limit_name == "parked_per_connection"
    node.park("c", connection="d")
    with pytest.raises(Overloaded) as full:
        node.park("e", connection="e")
    assert full.value.limit_name == "parked"
    node.waiters.cancel("a")
    node.park("e")


def test_lost_leadership_sends_those_that_are_parked_elsewhere() -> None:
    """L7: those that were proposed have their outcome from the log."""
    node = Node(queue_with(1))
    node.park("a")
    node.park("b")
    assert [action.token for action in node.step() if isinstance(action, Propose)] == ["a"]
    assert node.waiters.lost_leadership("n2") == [("b", NotLeader(leader="n2"))]
    node.waiters.resolved("a")
    assert len(node.waiters) == 0
    assert node.waiters.next_wakeup_ms(0, 0) is None


def test_only_leases_wait() -> None:
    node = Node(queue_with(0))
    with pytest.raises(StateBroken):
        node.waiters.add("a", "c", node.machine.envelope(produce(Q, b"x")), 0)


# What falls due


def test_delayed_message_wakes_its_consumer_when_it_is_due() -> None:
    """T3, P6."""
    node = Node(queue_with(0))
    node.park("a", wait_ms=60_000)
    node.do(produce(Q, MessageParts(b"x", delay_ms=5_000)))
    node.settle()
    assert node.waiters.next_wakeup_ms(node.now_ms, node.now_ms) == node.now_ms + 5_000
    node.pass_ms(4_999)
    assert node.touches == []
    node.pass_ms(1)
    assert node.touches == [Touch(queue_id=Q, group="default")]
    assert versions(node.replies["a"]) == [1]


def test_expired_lease_wakes_who_waits_for_its_messages() -> None:
    """T3, S5."""
    node = Node(queue_with(1, visibility_timeout_ms=2_000))
    take(node, 1)
    node.park("a")
    node.settle()
    node.pass_ms(2_000)
    assert versions(node.replies["a"]) == [1]


def test_lease_deadline_moves_with_a_time_step() -> None:
    """T2, T3: a step expires no lease, so its timer goes with it."""
    node = Node(queue_with(1, visibility_timeout_ms=2_000))
    take(node, 1)
    node.machine.do(TimeStep(by_ms=3_600_000))
    node.machine.now_ms += 3_600_000
    with node.machine.store.read() as txn:
        view = View(txn)
        queue = view.queue(Q)
        assert queue is not None
        assert next_due_ms(view, queue, view.groups(Q)[0]) == node.now_ms + 2_000


def test_end_of_a_nacks_delay_wakes_its_consumer() -> None:
    """T3, S3."""
    node = Node(queue_with(1))
    lease = take(node, 1)
    node.park("a")
    node.do(Nack(queue_id=Q, group="default", ranges=((lease.lease_id, 1, 1),), delay_ms=300), session=2)
    node.settle()
    node.pass_ms(300)
    assert versions(node.replies["a"]) == [1]


def test_message_whose_ttl_has_passed_is_touched_and_not_leased() -> None:
    """T3, P7: a Lease for it would come back empty, and be remembered so."""
    node = Node(queue_with(0))
    node.do(produce(Q, MessageParts(b"x", ttl_ms=1_000)))
    node.machine.pass_ms(1_000)
    node.park("a")
    node.settle()
    assert node.from_log == []
    assert node.touches == [Touch(queue_id=Q, group="default")]
    node.do(produce(Q, b"y"))
    node.settle()
    assert versions(node.replies["a"]) == [2]


def test_empty_answer_while_something_is_due_is_left_to_the_fold() -> None:
    """Q1: the state that is read must have folded what has fallen due."""
    node = Node(queue_with(1, visibility_timeout_ms=2_000))
    take(node, 1)
    node.machine.pass_ms(2_000)
    node.park("a", wait_ms=0)
    assert node.step() == [Confirm("a"), Touch(queue_id=Q, group="default")]
    node.waiters.confirmed("a")
    (proposed,) = node.step()
    node.perform(proposed)
    assert versions(node.replies["a"]) == [1]


def test_redriven_message_is_given_though_its_ttl_has_passed() -> None:
    """P7: it does not carry its old expiry, and nobody must wait for a Touch that has been."""
    node = Node(queue_with(0, on_expired="dead_letter"))
    node.do(CreateGroup(queue_id=Q, group="other"))  # not folded: there the batch stays as it was
    node.do(produce(Q, MessageParts(b"x", ttl_ms=1_000)))
    node.machine.pass_ms(1_000)
    node.do(Touch(queue_id=Q, group="default"))
    listed = node.machine.ask(DeadLetters(queue_id=Q, group="default"))
    assert isinstance(listed, DeadListed)
    back = Redrive(queue_id=Q, group="default", dead=((1, 1, listed.rows[0].dead_seq),))
    assert node.do(back) == Redriven(count=1, skipped=0)
    node.park("a")
    node.settle()
    assert versions(node.replies["a"]) == [1]


def test_group_is_not_touched_while_its_whole_queue_is() -> None:
    """T3: and is looked at again after it."""
    node = Node(queue_with(0))
    node.park("a", wait_ms=60_000)
    node.do(produce(Q, MessageParts(b"x", delay_ms=1_000)))
    node.settle()
    node.waiters.effects([TouchSoon(Q)])
    assert node.step() == [Touch(queue_id=Q)]
    node.machine.pass_ms(1_000)
    assert node.step() == []
    node.waiters.touched(Touch(queue_id=Q), node.now_ms)
    assert node.step() == [Touch(queue_id=Q, group="default")]


def test_timers_are_rebuilt_on_election() -> None:
    """T3: losing them loses nothing; where messages move elsewhere, nobody need wait for it."""
    machine = Machine()
    for session in (1, 2):
        machine.do(OpenSession(), session)
    machine.do(CreateQueue(name="dead"))
    moving = QueueSettings(dlq_strategy="move", dlq_queue="dead", visibility_timeout_ms=2_000, max_delivery_attempts=1)
    created = machine.do(CreateQueue(name="q", settings=moving))
    assert isinstance(created, QueueCreated)
    machine.do(produce(created.queue_id, b"x"))
    machine.do(Lease(queue_id=created.queue_id, group="default", max_messages=1))
    node = Node(machine)
    node.park("a", wait_ms=60_000)  # in the queue of the dead letters
    node.settle()
    node.pass_ms(1_999)
    assert node.touches == []
    node.pass_ms(1)
    assert node.touches == [Touch(queue_id=created.queue_id, group="default")]
    assert versions(node.replies["a"]) == [1]


def test_nothing_is_touched_where_nobody_waits_and_nothing_moves() -> None:
    """T3."""
    node = Node(queue_with(1, visibility_timeout_ms=2_000))
    take(node, 1)
    node.pass_ms(10_000)
    assert node.touches == []


def test_change_where_nobody_waits_reaches_its_timer_within_a_second() -> None:
    """T3: many changes share one look."""
    node = Node(queue_with(0))
    node.settle()
    node.waiters.changed(Q)
    node.waiters.changed(Q)
    at_ms = node.waiters.next_wakeup_ms(node.now_ms, node.now_ms)
    assert at_ms is not None and at_ms - node.now_ms <= REFRESH_MS <= 1_000
    node.pass_ms(REFRESH_MS)
    assert node.waiters.next_wakeup_ms(node.now_ms, node.now_ms) is None


def test_at_most_one_touch_of_a_group_is_in_flight_and_they_keep_a_distance() -> None:
    """T3: what falls due meanwhile shares the next."""
    node = Node(queue_with(0))
    node.park("a", max_messages=1, wait_ms=60_000)
    for delay_ms in (10, 20, 30, 40):
        node.do(produce(Q, MessageParts(b"x", delay_ms=delay_ms)))
    node.settle()
    node.machine.pass_ms(10)
    touches = [action for action in node.step() if isinstance(action, Touch)]
    assert touches == [Touch(queue_id=Q, group="default")]
    node.machine.pass_ms(10)
    node.waiters.changed(Q)
    assert node.step() == []
    node.perform(touches[0])
    for token in "bcd":
        node.park(token, wait_ms=60_000)
    node.settle()
    assert len(node.touches) == 1
    node.pass_ms(TOUCH_GAP_MS)
    assert len(node.touches) == 2
    assert sorted(versions(node.replies[token])[0] for token in "abcd") == [1, 2, 3, 4]


def test_more_due_than_one_command_folds_is_touched_until_it_is_done() -> None:
    """T3: at once, one at a time, for the whole queue."""
    node = Node(queue_with(0))
    node.waiters.effects([TouchSoon(Q), ReapSoon(False), TouchSoon(Q)])
    whole = Touch(queue_id=Q)
    assert node.step() == [whole]
    node.waiters.effects([TouchSoon(Q)])
    assert node.step() == []
    node.waiters.touched(whole, node.now_ms)
    assert node.step() == [whole]
    node.waiters.touched(whole, node.now_ms)
    assert node.step() == []


def test_refused_touch_is_asked_for_again() -> None:
    """T3."""
    node = Node(queue_with(0))
    node.park("a", wait_ms=60_000)
    node.do(produce(Q, MessageParts(b"x", delay_ms=1_000)))
    node.settle()
    node.machine.pass_ms(1_000)
    (touch,) = node.step()
    assert isinstance(touch, Touch)
    node.waiters.touched(touch, node.now_ms)  # never applied
    assert node.step() == []
    node.machine.pass_ms(TOUCH_GAP_MS)
    assert node.step() == [touch]


def test_ended_leases_of_a_group_are_no_longer_waited_for() -> None:
    """G2: a seek or a purge has taken them."""
    node = Node(queue_with(0))
    node.park("a")
    node.settle()
    node.waiters.effects([EndLeases(Q, "default")])
    assert node.waiters.next_wakeup_ms(node.now_ms, node.now_ms) == node.now_ms
    assert node.step() == []


def test_given_up_waits_leave_nothing_behind() -> None:
    """STYLE: what grows is bounded."""
    node = Node(queue_with(0))
    node.park("first to end", wait_ms=200)
    for number in range(3_000):
        node.park(number, connection=str(number), wait_ms=10**9)
        node.waiters.cancel(number)
    waiters = node.waiters
    assert len(waiters._ends._heap) <= 70
    node.pass_ms(REFRESH_MS)
    node.pass_ms(REFRESH_MS)
    kept = (waiters._waiters, waiters._groups, waiters._of_connection, waiters._touched_ms, waiters._new)
    assert [len(each) for each in kept] == [0] * 5
    assert waiters.next_wakeup_ms(node.now_ms, START_MS) is None


@pytest.mark.parametrize("seed", range(12))
def test_every_consumer_is_answered_and_nobody_waits_beside_an_available_message(seed: int) -> None:
    """L7: consumers come, go and settle at random; no wait outlives its end, no message is overlooked."""
    rng = Random(seed)
    node = Node(queue_with(0, visibility_timeout_ms=3_000, max_in_flight=rng.choice((None, 3))))
    ends: dict[Token, int] = {}
    gone: set[Token] = set()
    for number in range(150):
        way = rng.random()
        if way < 0.4:
            wait_ms = rng.choice((0, 200, 2_000))
            node.park(
                number, 1 + number % 2, connection=str(number % 40), max_messages=rng.randint(1, 3), wait_ms=wait_ms
            )
            ends[number] = node.now_ms + wait_ms
        elif way < 0.7:
            delay_ms = rng.choice((None, None, 500))
            node.do(produce(Q, *[MessageParts(b"x", delay_ms=delay_ms)] * rng.randint(1, 3)))
        elif way < 0.8 and ends:
            token = rng.choice(list(ends))
            if token not in node.replies:
                node.waiters.cancel(token)
                gone.add(token)
        node.pass_ms(rng.choice((0, 10, 300)))
        waiting = [token for token in ends if token not in node.replies and token not in gone]
        assert all(ends[token] > node.now_ms for token in waiting)
        assert len(node.waiters) == len(waiting)
        with node.machine.store.read() as txn:
            assert not waiting or Look(View(txn), Q, "default", node.now_ms).is_shut
    node.pass_ms(2_000)
    assert set(node.replies) | gone == set(ends)
    assert not set(node.replies) & gone
