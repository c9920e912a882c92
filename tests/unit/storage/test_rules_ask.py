"""Rules Q1, Q2 and E1: reads change nothing, every answer has its place, and there is always one reason."""

from dataclasses import replace
from typing import Any

import pytest

from holdfast.client.protocol.columns import MessageParts
from holdfast.client.protocol.commands import (
    AckBatch,
    Cancel,
    CreateGroup,
    CreateQueue,
    Envelope,
    Lease,
    Nack,
    OpenSession,
    PurgeQueue,
    Seek,
    TimeStep,
    Touch,
    UpdateQueue,
)
from holdfast.client.protocol.errors import GroupNotFound, QueueNotFound, RequestConflict, SessionExpired
from holdfast.client.protocol.queries import (
    DeadLetters,
    DescribeQueue,
    Explain,
    FindByKey,
    FindMoved,
    History,
    ListGroups,
    ListQueues,
    Peek,
    ProducerState,
    Query,
    Read,
    Stats,
    TxnStatus,
)
from holdfast.client.protocol.replies import Explained, Failed, GroupStats, Leased, Produced
from holdfast.client.protocol.values import LOCAL_PRINCIPAL, GroupSettings, Job, Place, QueueId, QueueSettings
from holdfast.storage import views
from tests.support.machine import START_MS, Machine, produce, session_id

Q = QueueId(1)


def queue_with(*messages: bytes | MessageParts, **settings: Any) -> Machine:
    machine = Machine()
    machine.do(OpenSession(consumer_id="ann"))
    machine.do(CreateQueue(name="q", settings=QueueSettings(**settings)))
    for message in messages:
        assert isinstance(machine.do(produce(Q, message)), Produced)
    return machine


def take(machine: Machine, count: int = 100) -> Leased:
    reply = machine.do(Lease(queue_id=Q, group="default", max_messages=count))
    assert isinstance(reply, Leased), reply
    return reply


def settle(machine: Machine, kind: type[AckBatch | Nack], *versions: int, **named: Any) -> None:
    ranges = tuple((1, version, version) for version in versions)
    machine.do(kind(queue_id=Q, group="default", ranges=ranges, **named))


def why(machine: Machine, version: int | None = None, group: str = "default") -> Explained:
    reply = machine.ask(Explain(queue_id=Q, group=group, version=version))
    assert isinstance(reply, Explained), reply
    return reply


# Q1: reads


@pytest.mark.parametrize(
    "query",
    [
        DescribeQueue(name="q"),
        ListQueues(),
        ListGroups(queue_id=Q),
        Stats(queue_id=Q, group="default"),
        Peek(queue_id=Q),
        Read(queue_id=Q, from_version=1, to_version=9),
        DeadLetters(queue_id=Q),
        Explain(queue_id=Q, group="default"),
        FindByKey(queue_id=Q, key=b"k"),
        FindMoved(queue_id=Q, group="default"),
        ProducerState(queue_id=Q, client_id="shop"),
        TxnStatus(txn=Job("j1")),
        History(queue_id=Q),
        Stats(queue_id=Q, group="nobody"),
    ],
    ids=lambda query: type(query).__name__,
)
def test_a_read_writes_nothing_and_says_when_it_was_true(query: Query) -> None:
    """Q1: the state is the same to the last bit, and the answer carries the applied index and committed time."""
    machine = queue_with(b"a", MessageParts(b"b", ttl_ms=10))
    machine.pass_ms(500)
    machine.do(OpenSession(consumer_id="ann"))
    before = machine.digest()
    with machine.store.read() as txn:
        answer = views.answer(txn, query)
    assert answer.place == Place(machine.index, -1, START_MS + 500)
    assert machine.digest() == before


def test_a_read_shows_what_is_due_as_folded_only() -> None:
    """Q1: what fell due but was not folded yet is shown as it stands, and after a Touch as it is."""
    machine = queue_with(MessageParts(b"a", delay_ms=1_000))
    machine.pass_ms(1_000)
    machine.do(OpenSession(consumer_id="ann"))
    assert why(machine, 1).reason == "delayed"
    machine.do(Touch(queue_id=Q))
    assert why(machine, 1).reason == "available"


# Q2: places


def test_every_answer_has_its_place_in_the_log() -> None:
    """Q2: index, position in the entry and committed time, for refusals as for the rest."""
    machine = queue_with()
    machine.pass_ms(40)
    answers = machine.entry(
        [
            machine.envelope(produce(Q, b"a")),
            machine.envelope(produce(9, b"a")),
            machine.envelope(Lease(queue_id=Q, group="nobody", max_messages=1)),
        ]
    )
    assert [answer.place for answer in answers] == [Place(3, position, START_MS + 40) for position in range(3)]
    assert answers[1].reply == Failed(QueueNotFound(queue=9))
    assert answers[2].reply == Failed(GroupNotFound(queue_id=1, group="nobody"))


def test_another_replica_gives_the_same_places() -> None:
    """Q2: whoever folds the log gives the same answers at the same places."""
    machine, other = queue_with(), Machine()
    for index, data in machine.log:
        other.replay(index, data)
    envelope = machine.envelope(produce(Q, b"a"))
    answers = machine.entry([envelope])
    assert other.replay(*machine.log[-1]) == answers
    assert other.digest() == machine.digest()


def test_a_repeated_request_has_the_place_of_its_repetition() -> None:
    """Q2: the stored reply is answered at the place where it was asked for again."""
    machine = queue_with()
    envelope = machine.envelope(produce(Q, b"a"))
    machine.entry([envelope])
    machine.pass_ms(5)
    assert machine.entry([envelope])[0].place == Place(4, 0, START_MS + 5)


def test_a_refusal_before_the_rules_has_its_place_too() -> None:
    """Q2: an unknown session, a used number and a command without effect are ordered with the rest."""
    machine = queue_with()
    envelope = machine.envelope(produce(Q, b"a"))
    other = replace(envelope, command=produce(Q, b"b"))
    stranger = replace(envelope, session=session_id(9))
    touch = Envelope(principal=LOCAL_PRINCIPAL, command=Touch(queue_id=Q))
    answers = machine.entry([envelope, other, stranger, touch])
    assert [answer.place for answer in answers] == [Place(3, position, START_MS) for position in range(4)]
    assert [answer.reply for answer in answers[1:3]] == [
        Failed(RequestConflict(request_seq=envelope.request_seq)),
        Failed(SessionExpired()),
    ]


# E1: the one reason


def test_explain_names_the_reason_of_every_state() -> None:
    """E1: one version in each state, each with its facts."""
    machine = queue_with(
        b"1", b"2", b"3", MessageParts(b"4", delay_ms=7_000), MessageParts(b"5", ttl_ms=10), b"6", b"7", b"8"
    )
    machine.do(Cancel(queue_id=Q, versions=((6, 6),)))
    take(machine, 3)
    settle(machine, AckBatch, 1)
    settle(machine, Nack, 2, dead=True)
    machine.pass_ms(10)
    machine.do(Touch(queue_id=Q))
    leased = (("lease_id", 1), ("consumer_id", "ann"), ("until_ms", START_MS + 30_000))
    assert [why(machine, version) for version in range(1, 10)] == [
        Explained(reason="acked"),
        Explained(reason="dead", facts=(("dead_seq", 1), ("cause", "rejected"))),
        Explained(reason="leased", facts=leased),
        Explained(reason="delayed", facts=(("until_ms", START_MS + 7_000),)),
        Explained(reason="discarded"),
        Explained(reason="cancelled"),
        Explained(reason="available"),
        Explained(reason="available"),
        Explained(reason="not_produced"),
    ]
    machine.do(PurgeQueue(queue_id=Q))
    assert why(machine, 7) == Explained(reason="purged")


def test_explain_knows_what_a_group_never_had() -> None:
    """E1: below its start, or freed before it was created."""
    machine = queue_with(b"1", b"2", b"3", b"4")
    take(machine, 2)
    settle(machine, AckBatch, 2)
    machine.do(CreateGroup(queue_id=Q, group="early", start=1))
    machine.do(CreateGroup(queue_id=Q, group="late", start=4))
    assert why(machine, 2, "early") == Explained(reason="freed")
    assert why(machine, 3, "late") == Explained(reason="before_start")
    assert why(machine, 4, "late") == Explained(reason="available")


def test_explain_names_the_limit_that_stops_an_available_version() -> None:
    """E1: the group's in-flight limit, and the hole cap for what is above the highest settled."""
    machine = queue_with(b"1", b"2", b"3", max_in_flight=2)
    take(machine)
    assert why(machine, 3) == Explained(reason="in_flight_limit", facts=(("limit", 2),))
    machine = queue_with(*[b"m"] * 6, max_ack_holes=1)
    take(machine, 5)
    settle(machine, AckBatch, 2, 4)
    settle(machine, Nack, 3)
    assert why(machine, 3) == Explained(reason="available")
    assert why(machine, 6) == Explained(reason="hole_cap", facts=(("holes", 2), ("cap", 1)))


def test_explain_of_a_group_names_the_first_reason() -> None:
    """E1: available, then leased, then delayed, then empty, as one message after the other goes."""
    machine = queue_with(b"1", MessageParts(b"2", delay_ms=90_000))
    assert why(machine) == Explained(reason="available")
    take(machine)
    leased = (("lease_id", 1), ("consumer_id", "ann"), ("until_ms", START_MS + 30_000))
    assert why(machine) == Explained(reason="leased", facts=leased)
    settle(machine, AckBatch, 1)
    assert why(machine) == Explained(reason="delayed", facts=(("until_ms", START_MS + 90_000),))
    machine.do(PurgeQueue(queue_id=Q))
    assert why(machine) == Explained(reason="empty")


def test_explain_follows_the_groups_own_settings() -> None:
    """E1: a group with a limit of its own is stopped by that, its neighbour is not."""
    machine = queue_with(b"1", b"2")
    machine.do(CreateGroup(queue_id=Q, group="narrow", settings=GroupSettings(max_in_flight=1)))
    machine.do(Lease(queue_id=Q, group="narrow", max_messages=5))
    assert why(machine, 2, "narrow") == Explained(reason="in_flight_limit", facts=(("limit", 1),))
    assert why(machine, 2) == Explained(reason="available")
    stats = machine.ask(Stats(queue_id=Q, group="narrow"))
    assert isinstance(stats, GroupStats)
    assert stats.in_flight == 1


def test_explain_names_what_was_moved_and_what_was_trimmed() -> None:
    """E1: the reasons that need a dead-letter queue and retention."""
    machine = queue_with(b"1", b"2", b"3")
    machine.do(CreateQueue(name="graves"))
    changes = (("dlq_strategy", "move"), ("dlq_queue", "graves"), ("drop_after_ms", 1_000))
    machine.do(UpdateQueue(queue_id=Q, changes=changes))
    take(machine, 2)
    settle(machine, Nack, 1, dead=True)
    machine.pass_ms(1_000)
    machine.do(Touch(queue_id=Q))
    assert [why(machine, version).reason for version in (1, 2, 3)] == ["moved", "leased", "trimmed"]


def test_explain_names_the_in_flight_limit_before_the_hole_cap() -> None:
    """E1: where two reasons apply, the order decides, for a version and for the group."""
    machine = queue_with(*[b"m"] * 6, max_ack_holes=1, max_in_flight=5)
    take(machine, 5)
    settle(machine, AckBatch, 2, 4)
    hole_cap = Explained(reason="hole_cap", facts=(("holes", 2), ("cap", 1)))
    assert (why(machine, 6), why(machine)) == (hole_cap, hole_cap)
    machine.do(UpdateQueue(queue_id=Q, changes=(("max_in_flight", 3),)))
    limit = Explained(reason="in_flight_limit", facts=(("limit", 3),))
    assert (why(machine, 6), why(machine)) == (limit, limit)


def test_explain_tells_until_when_a_nacked_message_is_away() -> None:
    """E1: delayed by a nack is delayed as well; of a group it is the earliest end."""
    machine = queue_with(b"1", MessageParts(b"2", delay_ms=90_000))
    take(machine)
    settle(machine, Nack, 1, delay_ms=700)
    until = Explained(reason="delayed", facts=(("until_ms", START_MS + 700),))
    assert (why(machine, 1), why(machine)) == (until, until)


def test_explain_prefers_what_became_of_a_version_to_where_it_lies() -> None:
    """E1: a parked dead row below the start of the next generation is dead, its neighbour is before the start."""
    machine = queue_with(b"1", b"2")
    take(machine)
    settle(machine, Nack, 1, dead=True)
    machine.do(Seek(queue_id=Q, group="default", to="latest"))
    assert [why(machine, version).reason for version in (1, 2)] == ["dead", "before_start"]


# What the mutants showed to be untried


def test_explain_shows_a_deadline_in_committed_time() -> None:
    """E1: after a step the lease lasts until later."""
    machine = queue_with(b"1")
    take(machine)
    machine.do(TimeStep(by_ms=5_000))
    leased = (("lease_id", 1), ("consumer_id", "ann"), ("until_ms", START_MS + 35_000))
    assert why(machine, 1) == Explained(reason="leased", facts=leased)


def test_explain_of_a_group_names_the_lease_that_ends_first() -> None:
    """E1: neither the first or the newest, nor one that was auto-acked and holds nothing; of two that end together the
    older."""
    machine = queue_with(b"1", b"2", b"3", b"4", b"5")
    for timeout, auto_ack in ((10_000, True), (30_000, False), (20_000, False), (20_000, False), (30_000, False)):
        asked = Lease(queue_id=Q, group="default", max_messages=1, visibility_timeout_ms=timeout, auto_ack=auto_ack)
        assert isinstance(machine.do(asked), Leased)
    leased = (("lease_id", 3), ("consumer_id", "ann"), ("until_ms", START_MS + 20_000))
    assert why(machine) == Explained(reason="leased", facts=leased)
