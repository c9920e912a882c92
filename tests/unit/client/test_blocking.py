"""The blocking client against a real state machine behind real frames: every call that it has."""

from collections.abc import Iterator

import pytest

from holdfast.client.blocking import Client
from holdfast.client.leases import PartlyRefused
from holdfast.client.message import Message, Origin
from holdfast.client.protocol.commands import AckBatch, Produce
from holdfast.client.protocol.errors import (
    BadValue,
    GroupNotFound,
    IdempotencyConflict,
    LeaseExpired,
    NotLeaseOwner,
    ProducerFenced,
    QueueExists,
    QueueNotFound,
    QueueRecreated,
    TooLate,
    TransactionRefused,
    VersionNotInLease,
)
from tests.fakes.scripted_server import ScriptedServer


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[Client]:
    with Client(server.address, timeout_ms=10_000, consumer_id="tester") as client:
        yield client


def test_the_example_of_the_design_runs(client: Client, server: ScriptedServer) -> None:
    client.create_queue("orders", visibility_timeout_ms=30_000, max_delivery_attempts=2, history=True)
    client.create_queue("billing")
    client.create_queue("reminders")
    client.create_group("orders", "fraud", start="earliest")
    assert client.produce("orders", [b"a", b"b"], client_id="svc", client_seq=1).versions == [1, 2]
    assert client.produce("orders", [b"a", b"b"], client_id="svc", client_seq=1).replayed
    late = Message(b"c", key="k", headers={"h": "v"}, delay_ms=60_000)
    assert client.produce("orders", [late, b"d"]).versions == [3, 4]

    lease = client.lease("orders", group="default", max_messages=100, wait_ms=5_000)
    assert [(message.version, message.payload) for message in lease] == [(1, b"a"), (2, b"b"), (4, b"d")]
    first = lease.messages[0]
    assert (first.client_id, first.client_seq, first.delivery_count, first.attempts) == ("svc", 1, 1, 1)
    assert first.id == (client.queue("orders").queue_id, 0, 1)
    lease.ack([1])
    lease.nack([2], delay_ms=0, error="boom")
    assert lease.extend().held == ((4, 4),)
    with client.transaction() as txn:
        txn.ack(lease)
        txn.produce("billing", [b"x"])
        txn.produce("reminders", [b"y"], delay_ms=60_000)
    assert txn.versions == {"billing": [1], "reminders": [1]}

    stats = client.stats("orders", group="default")
    assert (stats.tail_version, stats.ready, stats.in_flight, stats.delayed, stats.acked) == (4, 1, 0, 1, 2)
    assert stats.index > 0 and stats.as_of_ms > 0
    again = client.lease("orders")
    assert [(message.version, message.delivery_count) for message in again] == [(2, 2)]
    again.release([2])
    client.lease("orders").nack(dead=True, error="no use")
    (dead,) = client.dead("orders", where="reason = 'rejected' and attempts >= 2", limit=100)
    assert (dead.version, dead.last_error, dead.payload, dead.consumer_id) == (2, "no use", b"b", "tester")
    assert client.dead_count("orders") == 1
    assert client.redrive("orders", where="version = 2", dry_run=True).matched == 1
    assert client.redrive("orders").redriven == 1
    assert [message.version for message in client.peek("orders", from_version=1, limit=10)] == [1, 2, 3, 4]
    assert [message.version for message in client.peek("orders", group="default")] == [2, 3]
    assert [message.payload for message in client.read("orders", from_version=2, to_version=3)] == [b"b", b"c"]
    assert client.explain("orders", 3).reason == "delayed"
    assert [(o.first, o.outcome) for o in client.reschedule("orders", key="k", delay_ms=0)] == [(3, "ok")]
    server.brain.pass_ms(1)  # it is due one millisecond after the command at the earliest
    assert client.explain("orders", 3).reason == "available"
    assert [o.outcome for o in client.cancel("orders", version=3)] == ["ok"]
    with pytest.raises(TooLate):
        client.cancel("orders", version=1)
    assert [row.kind for row in client.history("orders", limit=2)] == ["produce", "produce"]
    assert client.queues() == ["billing", "orders", "reminders"]


def test_dry_run_counts_and_changes_nothing(client: Client) -> None:
    client.create_queue("q", max_delivery_attempts=1)
    client.produce("q", [b"1", b"2", b"3"])
    client.lease("q").nack(error="x")
    tried = client.redrive("q", where="version >= 2", dry_run=True)
    assert (tried.matched, tried.redriven) == (2, 0)
    done = client.redrive("q", where="version >= 2")
    assert (done.matched, done.redriven) == (2, 2)
    assert client.dead_count("q") == 1
    page = client.dead("q", limit=1)
    assert page.after is None and page[0].headers == {}


def test_pages_of_dead_letters_follow_each_other(client: Client) -> None:
    client.create_queue("q", max_delivery_attempts=1)
    client.produce("q", [b"1", b"2", b"3"])
    client.lease("q").nack()
    first = client.dead("q", limit=2)
    second = client.dead("q", limit=2, after=first.after)
    assert [row.version for row in [*first, *second]] == [1, 2, 3]
    assert first.after is not None and second.after is None


def test_groups_queues_and_their_settings(client: Client) -> None:
    client.create_queue("q", groups=["a"], backoff={"kind": "fixed", "base_ms": 5, "cap_ms": 5})
    client.update_queue("q", max_delivery_attempts=9)
    assert client.queue("q").settings.max_delivery_attempts == 9
    client.create_group("q", "b", start="latest", count="begun")
    client.update_group("q", "b", visibility_timeout_ms=1_000)
    assert [(group.name, group.settings.visibility_timeout_ms) for group in client.groups("q")] == [
        ("a", None),
        ("b", 1_000),
    ]
    client.produce("q", [b"1", b"2"])
    assert client.seek("q", group="a", to=2).version == 2
    assert client.purge_queue("q", group="b").count == 2
    client.delete_group("q", "b")
    with pytest.raises(GroupNotFound):
        client.stats("q", group="b")
    with pytest.raises(QueueExists):
        client.create_queue("q")
    with pytest.raises(BadValue, match="is no setting"):
        client.create_queue("z", colour="red")
    with pytest.raises(BadValue, match="is no setting"):
        client.update_queue("q", colour="red")


def test_a_recreated_queue_is_told_once_and_found_again(client: Client, server: ScriptedServer) -> None:
    client.create_queue("q")
    with Client(server.address) as other:
        other.delete_queue("q")
        other.create_queue("q")
    with pytest.raises(QueueRecreated):
        client.produce("q", [b"1"])
    assert client.produce("q", [b"1"]).versions == [1]
    client.delete_queue("q")
    with pytest.raises(QueueNotFound):
        client.produce("q", [b"1"])


def test_producers_are_numbered_and_fenced(client: Client) -> None:
    client.create_queue("q")
    opened = client.open_producer("q", client_id="p", nonce=b"n" * 16)
    assert client.open_producer("q", client_id="p", nonce=b"n" * 16) == opened
    client.produce("q", [b"1"], client_id="p", client_seq=1, epoch=opened.epoch)
    with pytest.raises(IdempotencyConflict):
        client.produce("q", [b"2"], client_id="p", client_seq=1, epoch=opened.epoch)
    client.open_producer("q", client_id="p")
    with pytest.raises(ProducerFenced):
        client.produce("q", [b"2"], client_id="p", client_seq=2, epoch=opened.epoch)
    assert client.producer_state("q", client_id="p").high_water == 1
    with pytest.raises(BadValue):
        client.produce("q", [b"1"], client_id="p")


def test_what_a_lease_settled_itself_is_a_success_again(client: Client, server: ScriptedServer) -> None:
    client.create_queue("q")
    client.produce("q", [b"1", b"2", b"3"])
    lease = client.lease("q")
    lease.ack([1, 2])
    asked = server.brain.count(AckBatch)
    lease.ack([1, 2])
    assert server.brain.count(AckBatch) == asked
    lease.ack()
    lease.ack()
    assert client.stats("q").acked == 3


def test_settles_that_are_refused_in_part_or_as_a_whole(client: Client, server: ScriptedServer) -> None:
    client.create_queue("q")
    client.produce("q", [b"1", b"2", b"3"])
    lease = client.lease("q", max_messages=2)
    with pytest.raises(PartlyRefused) as caught:
        lease.ack([1, 2, 3])
    assert caught.value.outcomes == [(lease.id, 1, 2, "ok"), (lease.id, 3, 3, "VersionNotInLease")]
    third = client.lease("q")
    with pytest.raises(VersionNotInLease):
        third.nack([1])
    with Client(server.address) as other, pytest.raises(NotLeaseOwner):
        other.ack("q", lease_id=third.id, versions=[3])
    server.brain.pass_ms(30_000)
    with pytest.raises(LeaseExpired):
        third.ack()
    assert client.stats("q").ready == 1


def test_leases_by_id_do_what_the_object_does(client: Client) -> None:
    client.create_queue("q")
    client.produce("q", [b"1", b"2", b"3"])
    lease = client.lease("q")
    assert client.extend("q", lease_id=lease.id, begin=[1]).held == ((1, 3),)
    assert client.ack("q", lease_id=lease.id, versions=[1]).count == 1
    assert client.nack("q", lease_id=lease.id, versions=[2], delay_ms=1_000, error="x" * 5_000).count == 1
    assert client.release("q", lease_id=lease.id, versions=[3]).count == 1
    stats = client.stats("q")
    assert (stats.acked, stats.delayed, stats.ready) == (1, 1, 1)


def test_an_empty_lease_is_false_and_auto_ack_holds_nothing(client: Client, server: ScriptedServer) -> None:
    client.create_queue("q")
    assert not client.lease("q")
    client.produce("q", [b"1"])
    lease = client.lease("q", auto_ack=True)
    assert lease and [message.payload for message in lease] == [b"1"]
    lease.ack()
    assert server.brain.count(AckBatch) == 0
    assert client.stats("q").acked == 1


def test_a_refused_transaction_changes_nothing(client: Client) -> None:
    client.create_queue("q")
    client.produce("q", [b"1"])
    lease = client.lease("q")
    lease.ack()
    with pytest.raises(TransactionRefused) as caught, client.transaction() as txn:
        txn.produce("q", [b"2"])
        txn.nack(lease, [1])
    assert caught.value.item == 1
    with pytest.raises(ZeroDivisionError), client.transaction() as txn:
        txn.produce("q", [b"2"])
        raise ZeroDivisionError
    with client.transaction():
        pass
    assert client.stats("q").produced == 1


def test_a_moved_message_tells_where_it_came_from(client: Client) -> None:
    client.create_queue("graves")
    client.create_queue("q", max_delivery_attempts=1, dlq_strategy="move", dlq_queue="graves")
    client.produce("q", [Message(b"1", key="k", headers={"a": "b"})])
    client.lease("q").nack(error="x")
    (message,) = client.lease("graves")
    assert message.origin == Origin("q", 1)
    assert (message.key, message.headers["a"]) == ("k", "b")


def test_payloads_must_be_bytes(client: Client, server: ScriptedServer) -> None:
    client.create_queue("q")
    for wrong in ("text", ["text"], [1]):
        with pytest.raises(BadValue):
            client.produce("q", wrong)  # type: ignore[arg-type]
    assert client.produce("q", []).versions == []
    assert client.produce("q", b"one").versions == [1]
    assert server.brain.count(Produce) == 1
