"""What a step of the waiters may cost: operations of the store are counted, for one thread decides for all."""

from collections import Counter
from typing import Any

import pytest

from holdfast.client.protocol.columns import MessageParts
from holdfast.client.protocol.commands import AckBatch, CreateQueue, Lease, PurgeQueue, Seek, SetLimits, Touch
from holdfast.client.protocol.errors import Overloaded
from holdfast.client.protocol.queries import Explain, Peek, Stats
from holdfast.client.protocol.replies import Failed, GroupStats, Purged, QueueCreated
from holdfast.client.protocol.values import QueueId, QueueSettings
from holdfast.cluster.waiters import REFRESH_MS, REFRESH_ROWS, Action, Propose
from holdfast.storage import unfinished
from holdfast.storage.state import View
from holdfast.storage.tables import Table
from tests.support.counting import CountingReads
from tests.support.machine import produce
from tests.support.watched import singles
from tests.unit.cluster.test_waiters import Node, Q, take, versions
from tests.unit.storage.test_rules_lease import queue_with

FEW, MANY = 20, 2_000


class Counted(Node):
    """A leader in small that says what its last step cost."""

    cost = 0

    def step(self) -> list[Action]:
        counts: Counter[str] = Counter()
        with self.machine.store.read() as txn:
            actions = self.waiters.step(View(CountingReads(txn, counts)), self.now_ms, self.now_ms)
        self.cost = counts["operations"]
        return actions

    def until_done(self) -> int:
        """Entries with nothing in them, until no work is left over; how many it took."""
        for count in range(10_000):
            with self.machine.store.read() as txn:
                if txn.first(Table.REAP, b"\x00", b"\xff" * 9) is None:
                    return count
            self.machine.entry([])
            self.waiters.effects(self.machine.effects)
        raise AssertionError("it does not end")


def leader(holes: int, **settings: Any) -> Counted:
    node = Counted(queue_with(0, max_ack_holes=holes, visibility_timeout_ms=600_000, **settings))
    node.machine.do(SetLimits(changes=(("reap_rows", 8), ("leases_per_session", 100_000))))
    return node


def with_open_leases(node: Node, n: int) -> None:
    """Each of one message; a purge has settled what lies above them, and does not know yet what they hold."""
    node.machine.do(produce(Q, *[b"m"] * 2 * n))
    lease = Lease(queue_id=Q, group="default", max_messages=1)
    for _ in range(0, n, 20):
        node.machine.entry([node.machine.envelope(lease, 2) for _ in range(20)])
    node.do(PurgeQueue(queue_id=Q))


def with_gaps(node: Node, n: int) -> None:
    """Every other message is settled and gone, and the group begins again."""
    for _ in range(2 * n):
        node.machine.do(produce(Q, b"m"))
    lease = take(node, 2 * n).lease_id
    node.machine.do(AckBatch(queue_id=Q, group="default", ranges=singles(lease, range(2, 2 * n + 1, 2))), 2)
    node.do(Seek(queue_id=Q, group="default", to="earliest"))


def busiest(node: Counted, parked: int, **asked: Any) -> int:
    """What the dearest step costs, while so many wait and messages come."""
    for number in range(parked):
        node.park(number, connection=str(number), **asked)
    dearest = 0
    for _ in range(3):
        node.do(produce(Q, b"new"))
        for _ in range(3):
            for action in node.step():
                node.perform(action)
            dearest = max(dearest, node.cost)
    return dearest


def test_beside_gaps_that_are_not_counted_yet_one_lease_at_a_time_finds_out() -> None:
    """L7: more seems to be ready than is stored, and whoever is proposed for that gets an empty answer too soon."""
    node = leader(100_000)
    node.machine.do(SetLimits(changes=(("reap_rows", 1),)))
    with_gaps(node, FEW)
    assert versions(take(node, FEW - 1)) == list(range(1, 2 * FEW - 2, 2))
    for number in range(3):
        node.park(number, connection=str(number))
    assert [isinstance(action, Propose) for action in node.step()] == [True]


@pytest.mark.parametrize("fill", [with_open_leases, with_gaps])
@pytest.mark.parametrize("holes", [5, 100_000])
def test_a_step_costs_the_same_whatever_a_purge_or_a_seek_has_left_to_do(fill: Any, holes: int) -> None:
    """L7, G5: over the most holes there may be and below it, for each consumer that waits."""
    costs = []
    for n in (FEW, MANY):
        node = leader(holes)
        fill(node, n)
        costs.append(busiest(node, 10))
    assert costs[1] <= costs[0] + 4, f"{costs[1]} operations instead of {costs[0]}"


def test_a_group_is_looked_at_once_whoever_waits_there() -> None:
    """L7: where nobody can be given anything, each further consumer costs nothing."""
    costs = []
    for parked in (10, 200):
        node = leader(5)
        with_open_leases(node, FEW)
        for number in range(parked):
            node.park(number, connection=str(number))
        node.settle()
        node.do(produce(Q, b"new"))
        assert node.step() == []
        costs.append(node.cost)
    assert costs[0] == costs[1]


def test_consumers_of_one_session_at_its_limit_are_looked_at_once() -> None:
    """L1: `max_in_flight_per_session` is asked for a session, not for each of its requests."""
    costs = []
    for parked in (10, 200):
        node = leader(100, max_in_flight_per_session=1)
        node.do(produce(Q, b"a", b"b"))
        take(node, 1, session=1)
        for number in range(parked):
            node.park(number, connection=str(number), wait_ms=60_000)
        node.settle()
        node.do(produce(Q, b"c"))
        assert node.step() == []
        costs.append(node.cost)
    assert costs[0] == costs[1]


def test_delayed_batches_before_the_first_that_is_ready_are_walked_in_the_log_and_not_here() -> None:
    """L7, T3: a Lease walks so many of them and no more, and the next one goes on from there."""
    node = leader(100)
    node.machine.do(SetLimits(changes=(("scan_batches", 8),)))
    for _ in range(40):
        node.do(produce(Q, MessageParts(b"later", delay_ms=600_000, ttl_ms=600_000)))
    node.do(produce(Q, b"now"))
    node.park("a", wait_ms=60_000)
    (action,) = node.step()
    assert isinstance(action, Propose)
    assert node.cost <= 40


def test_who_waits_while_the_holes_are_not_known_gets_a_message_as_soon_as_they_are() -> None:
    """L5, L7: it is parked, not refused, and woken when the leases from before the purge are sorted in."""
    node = leader(5)
    with_open_leases(node, 40)  # there may be forty holes, as far as is known; there is one
    node.do(produce(Q, b"new"))
    node.park("a", wait_ms=60_000)
    node.settle()
    assert node.replies == {} and node.from_log == []
    node.until_done()
    node.settle()
    assert versions(node.replies["a"]) == [81]


def test_who_does_not_wait_is_told_to_come_again_while_the_holes_are_not_known() -> None:
    """L5, A2: it did not happen, and nothing of it is in the log."""
    node = leader(5)
    with_open_leases(node, MANY // 10)
    node.do(produce(Q, b"new"))
    index = node.machine.index
    node.park("a", wait_ms=0)
    node.settle()
    reply = node.replies["a"]
    assert isinstance(reply, Failed) and isinstance(reply.error, Overloaded) and reply.error.limit_name == "reap_rows"
    assert node.machine.index == index


def test_a_wait_that_ends_while_the_holes_are_not_known_is_refused_as_not_happened() -> None:
    """L5, L7."""
    node = leader(5)
    with_open_leases(node, MANY // 10)
    node.do(produce(Q, b"new"))
    node.park("a", wait_ms=1_000)
    node.settle()
    node.pass_ms(1_000)
    reply = node.replies["a"]
    assert isinstance(reply, Failed) and isinstance(reply.error, Overloaded)
    assert node.from_log == []


# Many queues


def with_queues(node: Node, n: int) -> list[QueueId]:
    made = []
    for number in range(n):
        reply = node.machine.do(CreateQueue(name=f"queue-{number}", settings=QueueSettings()))
        assert isinstance(reply, QueueCreated)
        made.append(reply.queue_id)
    return made


def test_a_new_leader_sets_its_timers_a_part_in_each_step() -> None:
    """T3: with a thousand queues no step looks at more of them than another, and all are done; so too for changes."""
    node = leader(10)
    made = with_queues(node, 1_000)
    node.waiters.begin()
    for _ in range(2):
        steps = 0
        while node.waiters.is_behind(node.now_ms):
            assert node.waiters.next_wakeup_ms(node.now_ms, node.now_ms) == node.now_ms
            assert node.step() == []
            assert node.cost <= 6 * REFRESH_ROWS
            steps += 1
        assert steps >= 2_000 // REFRESH_ROWS
        node.step()
        assert node.cost <= 1
        for queue_id in made:
            node.waiters.changed(queue_id)
        node.machine.pass_ms(REFRESH_MS)


def test_a_step_for_one_queue_costs_the_same_however_many_have_consumers_and_changes() -> None:
    """L7: who waits elsewhere is not looked at."""
    costs = []
    for n in (1, 300):
        node = leader(10)
        for number, queue_id in enumerate(with_queues(node, n)):
            node.park(number, connection=str(number), queue_id=queue_id, wait_ms=60_000)
        node.settle()
        node.park("here", wait_ms=60_000)
        node.settle()
        node.pass_ms(REFRESH_MS)
        node.do(produce(Q, b"x"))
        (action,) = node.step()
        costs.append(node.cost)
        assert isinstance(action, Propose) and action.token == "here"
    assert costs[0] == costs[1]


# Queries


def test_a_query_looks_at_a_bounded_number_of_leases_that_a_purge_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """G5, Q1: where more is to be looked at it is refused for the moment, and answered when that is done."""
    monkeypatch.setattr(unfinished, "LOOK_MAX", 50)
    node = leader(5)
    with_open_leases(node, 200)
    node.do(produce(Q, b"new"))
    for query in (
        Stats(queue_id=Q, group="default"),
        Peek(queue_id=Q, group="default", limit=1),
        Explain(queue_id=Q, group="default"),
    ):
        reply = node.machine.ask(query)
        assert isinstance(reply, Failed) and isinstance(reply.error, Overloaded), query
    node.until_done()
    stats = node.machine.ask(Stats(queue_id=Q, group="default"))
    assert isinstance(stats, GroupStats) and (stats.in_flight, stats.ready, stats.holes) == (200, 1, 1)


def test_a_query_looks_at_a_bounded_number_of_gaps_that_a_seek_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """G5, Q1."""
    monkeypatch.setattr(unfinished, "LOOK_MAX", 50)
    node = leader(5)
    with_gaps(node, 200)
    assert isinstance(node.machine.ask(Stats(queue_id=Q, group="default")), Failed)
    node.until_done()
    stats = node.machine.ask(Stats(queue_id=Q, group="default"))
    assert isinstance(stats, GroupStats) and stats.ready == 200


def test_what_somebody_waits_for_goes_before_what_only_takes_room() -> None:
    """G5: leases are sorted in before the rows of an earlier purge are removed."""
    node = leader(5)
    node.machine.do(produce(Q, *[b"m"] * 1_000))
    node.do(PurgeQueue(queue_id=Q, in_flight=True))
    (other,) = with_queues(node, 1)
    for _ in range(200):
        node.machine.do(produce(other, b"m"))
    node.machine.do(Lease(queue_id=other, group="default", max_messages=200), 2)
    assert isinstance(node.do(PurgeQueue(queue_id=other, in_flight=True)), Purged)  # 200 batches to release
    with_open_leases(node, 40)
    for _ in range(40 // 8 + 1):
        node.machine.do(Touch(queue_id=other))
    with node.machine.store.read() as txn:
        group = View(txn).group(Q, "default")
        assert group is not None and not group.sort_to
        assert txn.first(Table.REAP, b"\x00", b"\xff" * 9) is not None
