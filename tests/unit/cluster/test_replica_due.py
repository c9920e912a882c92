"""One log's turns: what is due and what is left to do, and who may wait for it. See `test_replica` for the parts."""

from collections.abc import Iterator

import pytest

from holdfast.client.protocol import commands as c
from holdfast.client.protocol.columns import MessageParts
from holdfast.client.protocol.errors import Overloaded
from holdfast.client.protocol.replies import GroupStats
from holdfast.client.protocol.values import QueueId, QueueSettings
from holdfast.cluster.batcher import Bounds
from holdfast.cluster.messages import AppendEntries
from holdfast.cluster.replica import HAND_OVER_MS, REAP_EVERY_MS
from holdfast.cluster.waiters import REFRESH_ROWS
from holdfast.storage.tables import Table
from tests.support.machine import produce
from tests.unit.cluster.test_replica import Node, Nodes, Q, lease, nodes


@pytest.fixture
def single() -> Iterator[tuple[Nodes, Node]]:
    with nodes("a") as found:
        yield found


def rows(node: Node, table: Table) -> int:
    with node.state.store.read() as txn:
        return sum(1 for _ in txn.scan(table, b"\x00", b"\xff" * 64))


def test_what_commands_wait_for_is_done_without_a_pause_between_entries(single: tuple[Nodes, Node]) -> None:
    """G5: what a purge has to sort in takes as many entries as it takes, and no time but the disk's."""
    cluster, node = single
    node.do(c.SetLimits(changes=(("reap_rows", 2),)))
    node.do(produce(1, *[b"x"] * 40))
    for _ in range(20):
        node.do(c.Lease(queue_id=Q, group="default", max_messages=1))
    node.do(c.PurgeQueue(queue_id=Q))
    for _ in range(4):  # each lets happen what can happen at one time
        cluster.run()
    with node.state.store.read() as txn:
        waited_for = txn.first(Table.REAP, b"\x00", (2**62).to_bytes(8, "big"))
    assert waited_for is None


def test_what_only_takes_room_leaves_the_disk_to_others_between_entries(single: tuple[Nodes, Node]) -> None:
    """G5."""
    cluster, node = single
    node.do(c.SetLimits(changes=(("reap_rows", 2),)))
    for _ in range(20):
        node.do(produce(1, b"x"))
    node.do(c.DeleteQueue(queue_id=Q))
    before, left = node.raft.journal.last, rows(node, Table.REAP)
    cluster.run()
    assert left and node.raft.journal.last == before
    cluster.run(40 * REAP_EVERY_MS / 1_000)
    assert rows(node, Table.REAP) == 0


def test_what_is_left_to_do_goes_on_after_a_hand_over_that_failed() -> None:
    """G5: nobody asks for anything, and the entry that was due meanwhile could not be formed."""
    with nodes("a", "b", "c") as (cluster, leader):
        leader.do(c.SetLimits(changes=(("reap_rows", 2),)))
        for _ in range(20):
            leader.do(produce(1, b"x"))
        target = next(node for node in cluster.nodes.values() if node is not leader)
        target.silent = True
        leader.do(c.DeleteQueue(queue_id=Q))
        assert leader.replica.hand_over(target.name)
        cluster.run(HAND_OVER_MS / 1_000 + 0.1)
        assert not leader.replica.handing_over and rows(leader, Table.REAP)
        cluster.run(40 * REAP_EVERY_MS / 1_000)
        assert rows(leader, Table.REAP) == 0


def test_a_new_leader_of_many_queues_turns_again_until_its_timers_are_set(single: tuple[Nodes, Node]) -> None:
    """T3: it serves meanwhile."""
    cluster, node = single
    for number in range(REFRESH_ROWS):
        node.do(c.CreateQueue(name=f"queue-{number}", settings=QueueSettings()))
    cluster.run(1.0)
    node.replica.waiters.begin()
    node.ask("produce", produce(1, b"x"))
    assert node.replica.turn().again
    turns = 1
    while node.replica.turn().again:
        turns += 1
        assert turns < 20
    assert turns >= 2


def test_who_waits_is_not_proposed_for_what_the_lease_of_a_dead_client_may_take(single: tuple[Nodes, Node]) -> None:
    """L7: it would get an empty answer from the log, before its wait is over."""
    cluster, node = single
    node.ask("dead", lease(60_000))
    cluster.run(0.1)
    node.ask("parked", lease(60_000), session=2)
    cluster.run(0.5)
    node.ask("produce", produce(1, b"x"))
    while not any(isinstance(command, c.Lease) for command in node.entries()[-1]):
        node.turn()
    node.disk_hangs = True
    node.replica.abandon(["dead"])
    cluster.run(0.1)
    node.disk_hangs = False
    cluster.run(0.1)
    assert "parked" not in node.outcomes
    assert sum(isinstance(command, c.Lease) for entry in node.entries() for command in entry) == 1
    cluster.run(4.0)
    assert node.reply("parked").grants[0].delivery_count == 2


# Reads


def test_a_read_that_comes_behind_a_touch_sees_what_was_due_when_it_came() -> None:
    """Q1: the Touch of another read was stamped before, so there is one more."""
    with nodes("a", "b", "c") as (cluster, leader):
        leader.do(produce(1, MessageParts(b"x", delay_ms=500)))
        leader.do(produce(1, MessageParts(b"y", delay_ms=700)))
        cluster.run(0.6)
        before = len(leader.entries())
        cluster.loses = lambda message: isinstance(message, AppendEntries) and bool(message.entries)
        leader.read("first")
        cluster.run(0.2)
        for number in range(3):
            leader.read(number)  # their barriers pass, for heartbeats are heard
        cluster.run(0.1)
        assert len(leader.entries()) == before + 1 and "first" not in leader.outcomes
        cluster.loses = lambda _: False
        cluster.run(0.3)
        assert leader.entries()[before:] == [[c.Touch(queue_id=Q)]] * 2
        assert leader.reply("first").ready == 1
        assert [leader.reply(number).ready for number in range(3)] == [2, 2, 2]


def test_a_read_whose_touch_is_not_taken_is_refused_and_not_answered_from_what_is_old(
    single: tuple[Nodes, Node],
) -> None:
    """Q1: under overload, with the word that nothing happened."""
    cluster, node = single
    node.do(produce(1, MessageParts(b"x", delay_ms=500)))
    cluster.run(0.6)
    node.disk_hangs = True
    node.replica.batcher.bounds = Bounds(queued_commands=1)
    node.ask("on its way", produce(1, b"y"))
    node.turn()
    node.ask("queued", produce(1, b"z"))
    node.read("read")
    cluster.run()
    refused = node.outcomes["read"]
    assert isinstance(refused, Overloaded) and refused.limit_name == "queued_commands"
    node.disk_hangs = False
    node.replica.batcher.bounds = Bounds()
    cluster.run()
    node.read("again")
    cluster.run()
    assert isinstance(node.reply("again"), GroupStats) and node.reply("again").ready == 3
    assert node.replica.serving and node.do(lease()).grants


def test_purged_leases_that_are_not_sorted_in_refuse_no_other_queue(single: tuple[Nodes, Node]) -> None:
    """G5."""
    _, node = single
    node.do(c.SetLimits(changes=(("reap_rows", 1),)))
    node.do(c.CreateQueue(name="other", settings=QueueSettings()))
    node.do(produce(1, *[b"x"] * 10))
    for _ in range(5):
        node.do(c.Lease(queue_id=Q, group="default", max_messages=1))
    node.do(produce(2, b"x"))
    node.ask("purge", c.PurgeQueue(queue_id=Q))
    node.ask("lease", c.Lease(queue_id=QueueId(2), group="default", max_messages=1))
    for _ in range(6):
        node.turn()
    assert node.reply("lease").grants
