"""Rules A1 and A2: a request asked twice is done once, and a lease belongs to the session that took it."""

from typing import Any

import pytest

from holdfast.client.protocol.commands import (
    AckBatch,
    Command,
    CreateQueue,
    Envelope,
    Extend,
    Lease,
    Nack,
    OpenSession,
    Release,
    SetLimits,
    TimeStep,
)
from holdfast.client.protocol.errors import (
    HoldfastError,
    LeaseExpired,
    NotLeaseOwner,
    PrincipalDiffers,
    QueueExists,
    RequestConflict,
    RequestSuperseded,
    SessionExpired,
    SessionWindowFull,
)
from holdfast.client.protocol.queries import ListQueues, Stats
from holdfast.client.protocol.replies import (
    Done,
    Extended,
    Failed,
    Grant,
    GroupStats,
    Leased,
    Produced,
    QueueCreated,
    QueuesListed,
    RefusedRange,
    Reply,
    Settled,
)
from holdfast.client.protocol.values import LOCAL_PRINCIPAL, NO_SESSION, LeaseId, QueueId, Version
from tests.support.machine import START_MS, Machine, produce, session_id

Q = QueueId(1)
DAY_MS = 86_400_000


def opened() -> Machine:
    machine = Machine()
    for session in (1, 2):
        assert machine.do(OpenSession(consumer_id=f"worker-{session}"), session) == Done()
    return machine


def ask(
    machine: Machine, command: Command, number: int, *, session: int = 1, done_below: int = 0, **named: Any
) -> Reply:
    """One command under a number of our choice."""
    fields = {"principal": LOCAL_PRINCIPAL, "session": session_id(session)} | named
    envelope = Envelope(command=command, request_seq=number, done_below=done_below, **fields)
    return machine.entry([envelope])[0].reply


def create(name: str) -> CreateQueue:
    return CreateQueue(name=name)


def queues(machine: Machine) -> list[str]:
    reply = machine.ask(ListQueues())
    assert isinstance(reply, QueuesListed)
    return [name for name, _ in reply.queues]


# A1: asking twice


def test_a_request_asked_again_gets_the_first_answer() -> None:
    """A1: the second time nothing is done, and the reply is the stored one."""
    machine = opened()
    assert ask(machine, create("a"), 1) == QueueCreated(queue_id=QueueId(1))
    assert ask(machine, create("a"), 1) == QueueCreated(queue_id=QueueId(1))
    assert ask(machine, create("a"), 2) == Failed(QueueExists(name="a", queue_id=1))


def test_a_refusal_is_remembered_too() -> None:
    """A1: a request that was refused stays refused under its number, even when it would work now."""
    machine = opened()
    ask(machine, create("a"), 1)
    take = Lease(queue_id=QueueId(2), group="default", max_messages=1)
    refusal = ask(machine, take, 2)
    assert isinstance(refusal, Failed)
    ask(machine, create("b"), 3)
    assert ask(machine, take, 2) == refusal
    assert ask(machine, take, 4) == Leased(lease_id=LeaseId(0), deadline_ms=0, grants=())


def test_a_number_used_with_another_content_is_a_conflict() -> None:
    """A1: the second content is refused by name and not done; the first is still answered."""
    machine = opened()
    ask(machine, create("a"), 1)
    assert ask(machine, create("b"), 1) == Failed(RequestConflict(request_seq=1))
    assert queues(machine) == ["a"]
    assert ask(machine, create("a"), 1) == QueueCreated(queue_id=QueueId(1))


def test_a_request_below_done_below_is_superseded() -> None:
    """A1: what the client declared done is neither answered from memory nor done again."""
    machine = opened()
    ask(machine, create("a"), 1)
    ask(machine, create("b"), 5, done_below=5)
    assert ask(machine, create("a"), 1) == Failed(RequestSuperseded(request_seq=1, done_below=5))
    assert ask(machine, create("c"), 4) == Failed(RequestSuperseded(request_seq=4, done_below=5))
    assert ask(machine, create("b"), 5) == QueueCreated(queue_id=QueueId(2))
    assert queues(machine) == ["a", "b"]


def test_a_request_below_its_own_done_below_is_superseded() -> None:
    """A1: a request that calls itself done is not done, and its mark does not count."""
    machine = opened()
    ask(machine, create("a"), 1)
    assert ask(machine, create("b"), 2, done_below=3) == Failed(RequestSuperseded(request_seq=2, done_below=3))
    assert ask(machine, create("a"), 1) == QueueCreated(queue_id=QueueId(1))
    assert queues(machine) == ["a"]


def test_a_session_remembers_256_replies_and_refuses_the_next() -> None:
    """A1: the 257th open reply is refused without effect, and moving done_below by one makes room for one."""
    machine = opened()
    for number in range(1, 257):
        assert isinstance(ask(machine, create(f"q{number}"), number), QueueCreated)
    assert ask(machine, create("more"), 257) == Failed(SessionWindowFull(limit=256))
    assert "more" not in queues(machine)
    assert ask(machine, create("q1"), 1) == QueueCreated(queue_id=QueueId(1))
    assert ask(machine, create("more"), 257, done_below=2) == QueueCreated(queue_id=QueueId(257))


def test_a_full_window_still_answers_what_it_knows() -> None:
    """A1: a retry is looked up before the window is measured."""
    machine = opened()
    ask(machine, SetLimits(changes=(("session_window", 2),)), 1)
    ask(machine, create("a"), 2)
    assert ask(machine, create("b"), 3) == Failed(SessionWindowFull(limit=2))
    assert ask(machine, create("a"), 2) == QueueCreated(queue_id=QueueId(1))


def test_an_unknown_session_is_not_taken_for_a_new_one() -> None:
    """A1: without OpenSession, and without any session, nothing is done."""
    machine = opened()
    assert ask(machine, create("a"), 1, session=9) == Failed(SessionExpired())
    assert ask(machine, create("a"), 1, session=9) == Failed(SessionExpired())
    assert ask(machine, create("a"), 1, **{"session": 1}) == QueueCreated(queue_id=QueueId(1))
    envelope = Envelope(principal=LOCAL_PRINCIPAL, command=create("b"), session=NO_SESSION, request_seq=1)
    assert machine.entry([envelope])[0].reply == Failed(SessionExpired())
    assert queues(machine) == ["a"]


def test_a_session_idle_for_a_day_is_still_good_and_a_millisecond_later_gone() -> None:
    """A1: only more than 24 hours of silence end a session, and its memory with it."""
    machine = opened()
    ask(machine, create("a"), 1)
    machine.do(TimeStep(by_ms=DAY_MS))
    machine.pass_ms(DAY_MS)
    assert ask(machine, create("b"), 2) == QueueCreated(queue_id=QueueId(2))
    machine.do(TimeStep(by_ms=DAY_MS + 1))
    machine.pass_ms(DAY_MS + 1)
    assert ask(machine, create("b"), 2) == Failed(SessionExpired())
    assert ask(machine, create("c"), 3) == Failed(SessionExpired())
    assert queues(machine) == ["a", "b"]


def test_opening_a_session_again_keeps_its_memory() -> None:
    """A1: OpenSession is idempotent, and counts as a use."""
    machine = opened()
    ask(machine, create("a"), 1)
    machine.do(TimeStep(by_ms=DAY_MS))
    assert machine.do(OpenSession(consumer_id="worker-1")) == Done()
    machine.do(TimeStep(by_ms=DAY_MS))
    assert ask(machine, create("a"), 1) == QueueCreated(queue_id=QueueId(1))


def test_an_overdue_session_opened_again_is_a_new_one() -> None:
    """A1: after the idle time the same id starts with an empty memory."""
    machine = opened()
    ask(machine, create("a"), 7, done_below=7)
    machine.do(TimeStep(by_ms=DAY_MS + 1))
    assert machine.do(OpenSession()) == Done()
    assert ask(machine, create("b"), 1) == QueueCreated(queue_id=QueueId(2))


def test_a_session_is_of_one_principal() -> None:
    """A1: another principal can neither use a session, nor open it, nor read a stored reply."""
    machine = opened()
    ask(machine, create("a"), 1)
    assert ask(machine, create("a"), 1, principal="eve") == Failed(PrincipalDiffers())
    assert ask(machine, OpenSession(), 0, principal="eve") == Failed(PrincipalDiffers())
    assert ask(machine, create("b"), 2, principal="eve") == Failed(PrincipalDiffers())
    assert queues(machine) == ["a"]


def test_sessions_number_their_requests_apart() -> None:
    """A1: the same number in another session is another request."""
    machine = opened()
    assert ask(machine, create("a"), 1) == QueueCreated(queue_id=QueueId(1))
    assert ask(machine, create("b"), 1, session=2) == QueueCreated(queue_id=QueueId(2))


def test_a_produce_without_client_id_is_remembered_by_its_session() -> None:
    """A1: asked again it answers the first versions as replayed and writes nothing."""
    machine = opened()
    ask(machine, create("a"), 1)
    assert ask(machine, produce(Q, b"x", b"y"), 2) == Produced(first_version=Version(1), count=2)
    assert ask(machine, produce(Q, b"x", b"y"), 2) == Produced(first_version=Version(1), count=2, replayed=True)
    assert ask(machine, produce(Q, b"x", b"z"), 2) == Failed(RequestConflict(request_seq=2))
    assert ask(machine, produce(Q, b"x", b"y"), 3) == Produced(first_version=Version(3), count=2)


def test_another_replica_answers_a_retry_the_same() -> None:
    """A1: the memory is in the state, so a node that only folded the log knows the first answer."""
    machine = opened()
    first = ask(machine, create("a"), 1)
    other = Machine()
    for index, data in machine.log:
        other.replay(index, data)
    other.now_ms = machine.now_ms + 5
    assert ask(other, create("a"), 1) == first


@pytest.mark.parametrize(
    ("number", "named", "refusal"),
    [
        (1, {"command": CreateQueue(name="other"), "done_below": 1}, RequestConflict(request_seq=1)),
        (1, {"command": CreateQueue(name="a"), "done_below": 2}, None),
        (0, {}, RequestSuperseded(request_seq=0, done_below=1)),
        (3, {"done_below": 4}, RequestSuperseded(request_seq=3, done_below=4)),
        (3, {}, SessionWindowFull(limit=2)),
        (3, {"session": 9}, SessionExpired()),
        (3, {"principal": "eve"}, PrincipalDiffers()),
    ],
    ids=["conflict", "known", "superseded", "superseded by itself", "full", "unknown", "another principal"],
)
def test_an_answer_from_memory_and_a_refusal_change_nothing(
    number: int, named: dict[str, Any], refusal: HoldfastError | None
) -> None:
    """A1: whatever the request says beside its number, the state is the same to the last bit."""
    machine = opened()
    ask(machine, create("a"), 1, done_below=1)
    ask(machine, SetLimits(changes=(("session_window", 2),)), 2, done_below=1)
    before = machine.digest()
    machine.pass_ms(1_000)
    command = named.pop("command", create("more"))
    expected = QueueCreated(queue_id=QueueId(1)) if refusal is None else Failed(refusal)
    assert ask(machine, command, number, **named) == expected
    assert machine.digest() == before


def test_a_retry_in_the_same_entry_is_a_retry() -> None:
    """A1: the memory of a request is there for the command behind it."""
    machine = opened()
    envelope = machine.envelope(create("a"))
    answers = machine.entry([envelope, envelope])
    assert [answer.reply for answer in answers] == [QueueCreated(queue_id=QueueId(1))] * 2
    assert queues(machine) == ["a"]


def test_a_request_of_an_idle_session_changes_nothing() -> None:
    """A1: it is refused, and leaves neither a queue nor the session."""
    machine = opened()
    machine.do(TimeStep(by_ms=DAY_MS + 1))
    machine.do(TimeStep(by_ms=1))
    before = machine.digest()
    assert ask(machine, create("a"), 1) == Failed(SessionExpired())
    assert machine.digest() == before


# A2: whose lease it is


@pytest.fixture
def leased() -> Machine:
    """Session 1 holds versions 1 and 2 in lease 1."""
    machine = opened()
    machine.do(create("a"))
    machine.do(produce(Q, b"x", b"y"))
    reply = machine.do(Lease(queue_id=Q, group="default", max_messages=10))
    assert reply == Leased(
        lease_id=LeaseId(1), group_generation=1, deadline_ms=START_MS + 30_000, grants=(Grant(1, 2, 1, 1),)
    )
    return machine


@pytest.mark.parametrize("kind", [AckBatch, Nack, Release])
def test_another_session_cannot_settle_a_lease(leased: Machine, kind: type[AckBatch | Nack | Release]) -> None:
    """A2: ack, nack and release of another session are refused, and the owner's still work."""
    command = kind(queue_id=Q, group="default", ranges=((1, 1, 2),))
    refused = Settled(count=0, refused=(RefusedRange(1, 1, 2, NotLeaseOwner.code),))
    assert leased.do(command, session=2) == refused
    stats = leased.ask(Stats(queue_id=Q, group="default"))
    assert isinstance(stats, GroupStats)
    assert stats.in_flight == 2
    assert leased.do(command) == Settled(count=2)


def test_another_session_cannot_extend_a_lease(leased: Machine) -> None:
    """A2: the deadline is moved by the owner alone."""
    command = Extend(queue_id=Q, group="default", lease_id=LeaseId(1), visibility_timeout_ms=60_000)
    assert leased.do(command, session=2) == Failed(NotLeaseOwner(lease_id=1))
    assert leased.do(command) == Extended(deadline_ms=START_MS + 60_000, held=((1, 2),))


def test_the_same_consumer_name_in_another_session_is_no_owner(leased: Machine) -> None:
    """A2: consumer_id is for people; ownership is by session."""
    assert leased.do(OpenSession(consumer_id="worker-1"), session=3) == Done()
    command = AckBatch(queue_id=Q, group="default", ranges=((1, 1, 1),))
    assert leased.do(command, session=3) == Settled(count=0, refused=(RefusedRange(1, 1, 1, NotLeaseOwner.code),))


def test_a_lease_whose_time_is_over_says_so_to_anybody(leased: Machine) -> None:
    """A2: after the deadline owner and stranger get the same refusal, which tells neither who it was."""
    leased.pass_ms(30_000)
    command = AckBatch(queue_id=Q, group="default", ranges=((1, 1, 1),))
    over = Settled(count=0, refused=(RefusedRange(1, 1, 1, LeaseExpired.code),))
    assert leased.do(command, session=2) == over
    assert leased.do(command) == over
