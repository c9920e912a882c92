"""The checks of the simulation say no: one that never has, has shown nothing. Each history is wrong in one place."""

from dataclasses import replace

import pytest

from holdfast.client.protocol import commands as c
from holdfast.client.protocol import queries as q
from holdfast.client.protocol.errors import NoLeader, OutcomeUnknown
from holdfast.client.protocol.messages import Inquiry, Request
from holdfast.client.protocol.replies import Answer, Extended, Grant, GroupStats, Leased, Produced, Reply, Settled
from holdfast.client.protocol.values import LOCAL_PRINCIPAL, Place, QueueId
from holdfast.cluster.consensus import BATCH
from holdfast.jepsen.simulation.checker import Checker, Violation
from holdfast.jepsen.simulation.cluster import Plan, Simulation
from holdfast.jepsen.simulation.judge import Judge
from holdfast.jepsen.simulation.ledger import Ledger
from holdfast.jepsen.simulation.scheduler import Scheduler
from holdfast.storage.entry import encode_entry
from tests.support.machine import START_MS, Machine, produce, session_id

Q = QueueId(1)
LEASE = c.Lease(queue_id=Q, group="default", max_messages=10)
STATS = q.Stats(queue_id=Q, group="default")


def checker() -> Checker:
    return Checker(Scheduler())


# Nodes among themselves ----------------------------------------------------------------------------------


def answer(index: int, reply: Reply = Settled(count=1), position: int = 0) -> Answer:  # noqa: B008
    return Answer(Place(index, position, START_MS), reply)


def test_another_entry_answer_or_state_at_the_same_index_is_noticed() -> None:
    """I27, I29."""
    seen = checker()
    for node in "ab":
        seen.applied(node, (b"x", 5, 2), (answer(5),), b"1")
    for entry, answers, digest in (
        ((b"x", 5, 3), (answer(5),), b"1"),
        ((b"y", 5, 2), (answer(5),), b"1"),
        ((b"x", 5, 2), (answer(5, Settled(count=2)),), b"1"),
        ((b"x", 5, 2), (answer(5),), b"2"),
    ):
        with pytest.raises(Violation):
            seen.applied("c", entry, answers, digest)


def test_a_second_leader_is_noticed() -> None:
    """I29."""
    seen = checker()
    seen.elected("a", 3)
    with pytest.raises(Violation, match="both lead"):
        seen.elected("b", 3)


def test_an_answer_that_the_fold_did_not_give_is_noticed() -> None:
    """I1: of another term's entry at that index, for example."""
    seen = checker()
    asked = Request(request_id=1, command=LEASE, session=session_id(1), request_seq=7)
    envelope = c.Envelope(principal=LOCAL_PRINCIPAL, command=LEASE, session=session_id(1), request_seq=7)
    seen.applied("a", (BATCH + encode_entry(START_MS, [envelope]), 5, 2), (answer(5),), b"1")
    seen.gave(5, asked, answer(5))
    with pytest.raises(Violation, match="the fold said"):
        seen.gave(5, asked, answer(5, Settled(count=9)))
    with pytest.raises(Violation, match="was answered from"):
        seen.gave(5, replace(asked, request_seq=8), answer(5))


# Clients -------------------------------------------------------------------------------------------------


def test_an_answer_from_before_what_was_known_is_noticed() -> None:
    """I26: a stale read, an order of two completed commands that is swapped; what was asked to be stale may be."""
    seen = checker()
    early, stale = seen.began(STATS, False, None), seen.began(STATS, True, None)
    seen.finished(seen.began(LEASE, False, None), answer(7, position=1))
    late, other = seen.began(STATS, False, None), seen.began(LEASE, False, None)
    seen.finished(early, answer(6, position=-1))
    seen.finished(stale, answer(2, position=-1))
    seen.finished(seen.began(STATS, False, None), answer(7, position=-1))
    with pytest.raises(Violation, match="told before"):
        seen.finished(late, answer(6, position=-1))
    with pytest.raises(Violation, match="told before"):
        seen.finished(other, answer(7, position=0))


def test_a_second_outcome_a_late_one_and_none_are_noticed() -> None:
    """I32, L7."""
    seen = checker()
    call = seen.began(LEASE, False, 1.0)
    with pytest.raises(Violation, match="no outcome"):
        seen.nothing_lost()
    seen.scheduler.run(1.2)
    with pytest.raises(Violation, match="bound"):
        seen.finished(call, answer(7))
    with pytest.raises(Violation, match="second outcome"):
        seen.finished(call, answer(7))


def test_an_answer_from_an_entry_that_nobody_has_is_noticed() -> None:
    """I1."""
    seen = checker()
    seen.finished(seen.began(LEASE, False, None), answer(7))
    with pytest.raises(Violation, match="where nothing is"):
        seen.nothing_lost()


# The log -------------------------------------------------------------------------------------------------


class Log:
    """A right history of a small log, to be spoiled."""

    def __init__(self) -> None:
        self.machine = Machine()
        self.seen = checker()
        self.seen.scheduler.run(1.0)
        self.do(c.OpenSession())
        self.do(c.CreateQueue(name="work"))

    def do(self, command: c.Command, after_ms: int = 100) -> Reply:
        self.machine.pass_ms(after_ms)
        self.seen.scheduler.run(after_ms / 1_000)
        envelope = self.machine.envelope(command)
        answers = self.machine.entry([envelope])
        index = self.machine.index
        data = BATCH + encode_entry(self.machine.now_ms, [envelope])
        self.seen.formed([index], 1)
        self.seen.applied("a", (data, index, 1), answers, b"")
        return answers[0].reply

    def judge(self) -> None:
        Judge(self.seen, gap_s=2.0).run()

    def spoil(self, index: int, reply: Reply) -> None:
        self.seen.answers[index] = (replace(self.seen.answers[index][0], reply=reply),)


def test_a_right_history_is_right() -> None:
    log = Log()
    log.do(produce(1, b"a", b"b"))
    leased = log.do(LEASE)
    assert isinstance(leased, Leased)
    log.do(c.AckBatch(queue_id=Q, group="default", ranges=((leased.lease_id, 1, 2),)))
    log.judge()


def test_an_answer_against_the_rules_is_noticed() -> None:
    log = Log()
    log.do(produce(1, b"a"))
    log.spoil(3, Produced(first_version=2, count=1))  # type: ignore[arg-type]
    with pytest.raises(Violation, match="by the rules"):
        log.judge()


def test_a_wrong_read_and_a_lease_that_was_called_empty_are_noticed() -> None:
    """I26, L7."""
    log = Log()
    log.do(produce(1, b"a"))
    stats = log.machine.ask(STATS)
    assert isinstance(stats, GroupStats)
    place = Place(log.machine.index, -1, log.machine.now_ms)
    log.seen.gave(3, Inquiry(request_id=1, query=STATS), Answer(place, stats))
    log.judge()
    log.seen.gave(3, Inquiry(request_id=1, query=STATS), Answer(place, replace(stats, ready=0)))
    with pytest.raises(Violation, match="by the rules"):
        log.judge()
    log.seen.unlogged.clear()
    log.seen.gave(3, Request(request_id=1, command=LEASE), Answer(place, Leased(lease_id=0, deadline_ms=0, grants=())))  # type: ignore[arg-type]
    with pytest.raises(Violation, match="without an entry"):
        log.judge()


def test_lease_time_that_leaps_or_stands_still_is_noticed() -> None:
    """I25, T2: the same log, formed at other times."""
    log = Log()
    log.do(produce(1, b"a"), after_ms=5_000)
    log.judge()
    right = log.seen.formed_s[3, 1]
    for formed_s, problem in ((right - 4.0, "too far"), (right + 4.0, "stood still")):
        log.seen.formed_s[3, 1] = formed_s
        with pytest.raises(Violation, match=problem):
            log.judge()


def test_a_lease_that_is_left_without_a_stamp_is_noticed() -> None:
    """T2: the leader stamps every second while a lease is open."""
    log = Log()
    log.do(produce(1, b"a"))
    log.do(LEASE)
    log.do(produce(1, b"b"), after_ms=3_000)
    with pytest.raises(Violation, match="a lease was open"):
        log.judge()


# The ledger ----------------------------------------------------------------------------------------------


class Book:
    """Commands and answers of a log, as they might be told."""

    def __init__(self) -> None:
        self.ledger = Ledger({1: 2})
        self.number = 0

    def fold(self, command: c.Command, reply: Reply, *, now_ms: int = 0, again: bool = False) -> None:
        self.number += not again
        envelope = c.Envelope(
            principal=LOCAL_PRINCIPAL, command=command, session=session_id(1), request_seq=self.number
        )
        self.ledger.fold(envelope, Answer(Place(1, 0, START_MS + now_ms), reply))

    def lease(self, lease_id: int, count: int, *, now_ms: int = 0, attempts: int = 1, again: bool = False) -> None:
        leased = Leased(
            lease_id=lease_id,  # type: ignore[arg-type]
            deadline_ms=START_MS + now_ms + 1_000,
            grants=(Grant(1, 1, count, attempts),),
        )
        self.fold(LEASE, leased, now_ms=now_ms, again=again)


def test_one_message_under_two_versions_is_noticed() -> None:
    """I2, I3."""
    book = Book()
    book.fold(produce(1, b"a"), Produced(first_version=1, count=1))  # type: ignore[arg-type]
    with pytest.raises(Violation, match="two versions"):
        book.fold(produce(1, b"a"), Produced(first_version=2, count=1))  # type: ignore[arg-type]
    with pytest.raises(Violation, match="two messages"):
        book.fold(produce(1, b"b"), Produced(first_version=1, count=1))  # type: ignore[arg-type]


def test_a_version_in_two_leases_is_noticed() -> None:
    """I7: before the deadline, not at it; a step of time moves no deadline, an Extend does."""
    book = Book()
    book.lease(1, 1)
    with pytest.raises(Violation, match="until"):
        book.lease(2, 2, now_ms=999)
    book = Book()
    book.lease(1, 1)
    book.lease(2, 2, now_ms=1_000)
    book.fold(c.TimeStep(by_ms=5_000), Settled(count=0), now_ms=6_100)
    with pytest.raises(Violation, match="until"):
        book.lease(3, 3, now_ms=6_500)
    book.fold(
        c.Extend(queue_id=Q, group="default", lease_id=2),  # type: ignore[arg-type]
        Extended(deadline_ms=START_MS + 9_000, held=((1, 1),)),
        now_ms=6_500,
    )
    with pytest.raises(Violation, match="until"):
        book.lease(3, 3, now_ms=8_900)


def test_a_wrong_count_and_one_attempt_too_many_are_noticed() -> None:
    """I10, I12."""
    with pytest.raises(Violation, match="delivery 1"):
        Book().lease(1, 2)
    with pytest.raises(Violation, match="the limit"):
        Book().lease(1, 1, attempts=3)


def test_what_is_settled_is_not_leased_and_what_is_not_held_is_not_settled() -> None:
    """I8, I14."""
    ack = c.AckBatch(queue_id=Q, group="default", ranges=((1, 1, 1),))
    book = Book()
    book.lease(1, 1)
    book.fold(ack, Settled(count=1), now_ms=500)
    with pytest.raises(Violation, match="is settled"):
        book.lease(2, 2, now_ms=600)
    book = Book()
    book.lease(1, 1)
    with pytest.raises(Violation, match="settles"):
        book.fold(ack, Settled(count=1), now_ms=1_000)


def test_one_request_with_two_effects_is_noticed() -> None:
    """I11."""
    book = Book()
    book.lease(1, 1)
    with pytest.raises(Violation, match="and then with"):
        book.lease(2, 2, now_ms=2_000, again=True)


def test_what_clients_believe_is_held_against_the_log() -> None:
    """I1, I2: confirmed and gone, confirmed as something else, a ghost; what is unknown may be there or not."""
    book = Book()
    book.fold(produce(1, b"a"), Produced(first_version=1, count=1))  # type: ignore[arg-type]
    seen = checker()
    for payload, outcome, problem in (
        (b"a", answer(1, Produced(first_version=1, count=1)), None),  # type: ignore[arg-type]
        (b"a", answer(1, Produced(first_version=2, count=1)), "confirmed"),  # type: ignore[arg-type]
        (b"b", answer(1, Produced(first_version=2, count=1)), "confirmed"),  # type: ignore[arg-type]
        (b"a", OutcomeUnknown(problem="lost"), None),
        (b"b", NoLeader(), None),
        (b"a", NoLeader(), "are there"),
    ):
        call = seen.began(produce(1, payload), False, None)
        seen.finished(call, outcome)
        if problem is None:
            book.ledger.check_calls([call])
        else:
            with pytest.raises(Violation, match=problem):
                book.ledger.check_calls([call])


# The whole -----------------------------------------------------------------------------------------------


def test_a_cluster_that_does_not_become_whole_is_noticed() -> None:
    with Simulation(Plan(seed=1, faults=())) as simulation:
        simulation.run(2.0)
        simulation.is_prompt = False
        simulation.hosts[0].boot = lambda: None  # type: ignore[method-assign]
        simulation.hosts[0].crash(power=True)
        with pytest.raises(Violation, match="not whole"):
            simulation.settle()


def test_somebody_who_still_waits_at_the_end_is_noticed() -> None:
    with Simulation(Plan(seed=1, faults=(), clients=1)) as simulation:
        simulation.run(2.0)
        leader = simulation.leader()
        assert leader is not None
        leader.replica._asked["nobody"] = None  # type: ignore[assignment]
        simulation.settle()
        with pytest.raises(Violation, match="still has"):
            simulation.drain()
