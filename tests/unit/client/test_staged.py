"""Staged produce through the client (X2): put aside, published once, aborted, and what is refused."""

from collections.abc import Iterator

import pytest

from holdfast.client.blocking import Client
from holdfast.client.calls import Names
from holdfast.client.message import Message
from holdfast.client.protocol.commands import Part, Publish, Stage
from holdfast.client.protocol.errors import (
    BadValue,
    BatchTooLarge,
    NoLeader,
    OutcomeUnknown,
    StageConflict,
    StagedMissing,
    TxnClosed,
    TxnFenced,
)
from holdfast.client.protocol.replies import Answer, Committed
from holdfast.client.protocol.values import Place, Stream
from holdfast.client.staged import publish, whole
from tests.fakes.scripted_server import ScriptedServer


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[Client]:
    with Client(server.address, timeout_ms=10_000) as client:
        client.create_queue("orders")
        client.create_queue("billing")
        yield client


def test_what_is_staged_is_nowhere_until_it_is_published(client: Client) -> None:
    later = client.stage("job", "orders", [b"c"], part=2, attempt="x")
    parts = [client.stage("job", "orders", [b"a", Message(b"b", key="k")], part=1, attempt="x"), later]
    assert (client.stats("orders").produced, client.txn_status("job").state) == (0, "open")
    assert client.txn_status("job").staged_bytes > 0
    published = client.publish("job", parts)
    assert (published.versions, published.replayed) == ({"orders": [1, 2, 3]}, False)
    assert [(message.payload, message.key) for message in client.lease("orders")] == [
        (b"a", None),
        (b"b", "k"),
        (b"c", None),
    ]
    again = client.publish("job", parts)
    assert (again.versions, again.replayed) == ({"orders": [1, 2, 3]}, True)
    told = client.txn_status("job")
    assert (told.state, told.versions) == ("published", {"orders": [1, 2, 3]})
    with pytest.raises(TxnClosed):
        client.stage("job", "orders", [b"late"])


def test_the_chunks_of_a_part_are_added_up(client: Client) -> None:
    chunks = [client.stage("job", "orders", [b"m%d" % chunk], chunk=chunk) for chunk in range(3)]
    assert whole(chunks) == (Part(0, "0", 3, 3, chunks[0].digest ^ chunks[1].digest ^ chunks[2].digest),)
    assert client.publish("job", chunks).versions == {"orders": [1, 2, 3]}


def test_a_chunk_that_is_forgotten_or_named_twice_is_refused_not_lost(client: Client) -> None:
    chunks = [client.stage("job", "orders", [b"m%d" % chunk], chunk=chunk) for chunk in range(3)]
    for wrong in (chunks[1:], [chunks[0], *chunks]):
        with pytest.raises(StagedMissing):
            client.publish("job", wrong)
    assert client.publish("job", chunks).versions == {"orders": [1, 2, 3]}


def test_of_two_attempts_one_is_published(client: Client) -> None:
    first = client.stage("job", "orders", [b"a"], attempt="1")
    second = client.stage("job", "orders", [b"b"], attempt="2")
    with pytest.raises(BadValue, match="two attempts"):
        client.publish("job", [first, second])
    client.publish("job", [second])
    assert [message.payload for message in client.lease("orders")] == [b"b"]


def test_staging_again_is_the_same_or_a_conflict(client: Client) -> None:
    part = client.stage("job", "orders", [b"a"])
    assert client.stage("job", "orders", [b"a"]) == part
    with pytest.raises(StageConflict):
        client.stage("job", "orders", [b"b"])


def test_one_transaction_spans_queues_also_those_that_this_client_never_named(
    client: Client, server: ScriptedServer
) -> None:
    parts = [client.stage("job", "orders", [b"a"], part=1), client.stage("job", "billing", [b"b"], part=2)]
    with Client(server.address) as driver:
        assert driver.publish("job", parts).versions == {"orders": [1], "billing": [1]}
    client.delete_queue("billing")
    with Client(server.address) as other:
        told = other.txn_status("job").versions
        assert told["orders"] == [1]
        assert [name for name in told if name != "orders"] == [f"#{client.queue('orders').queue_id + 1}"]


def test_an_abort_drops_all_or_some_attempts_but_nothing_that_is_published(client: Client) -> None:
    kept = client.stage("job", "orders", [b"a"], attempt="1")
    client.stage("job", "orders", [b"b"], attempt="2")
    assert client.abort("job", ["2"]) == 1
    assert client.publish("job", [kept]).versions == {"orders": [1]}
    assert client.abort("job") == 0
    assert client.txn_status("job").state == "published"
    client.stage("other", "orders", [b"c"])
    assert client.abort("other") == 1
    assert client.txn_status("other").state == "unknown"


def test_what_was_staged_expires(client: Client, server: ScriptedServer) -> None:
    part = client.stage("job", "orders", [b"a"], expires_ms=60_000)
    server.brain.pass_ms(60_000)
    with pytest.raises(StagedMissing):
        client.publish("job", [part])
    assert client.txn_status("job").state == "unknown"


def test_a_stream_is_numbered_and_belongs_to_its_query(client: Client) -> None:
    part = client.stage(Stream("app", 0), "orders", [b"a"])
    assert client.publish(Stream("app", 0), [part], fence="query-1").versions == {"orders": [1]}
    part = client.stage(Stream("app", 1), "orders", [b"b"])
    with pytest.raises(TxnFenced):
        client.publish(Stream("app", 1), [part], fence="query-2")
    assert client.publish(Stream("app", 1), [part], fence="query-1").versions == {"orders": [2]}
    assert client.publish(Stream("app", 0), [part], fence="query-1").replayed
    assert client.txn_status(("app", 1)) == client.txn_status(Stream("app", 1))
    client.forget_txn(("app", 1))
    assert client.txn_status(Stream("app", 1)).state == "unknown"


def test_what_cannot_be_a_chunk_is_said_before_anything_is_sent(client: Client, server: ScriptedServer) -> None:
    with pytest.raises(BadValue, match="empty"):
        client.stage("job", "orders", [])
    with pytest.raises(BatchTooLarge):
        client.stage("job", "orders", [bytes(600_000), bytes(600_000)])
    assert server.brain.count(Stage) == 0


def test_lost_answers_are_asked_for_again_and_nothing_is_doubled(client: Client, server: ScriptedServer) -> None:
    server.fail(Stage, "drop_after")
    part = client.stage("job", "orders", [b"a"])
    server.fail(Publish, "drop_after")
    assert client.publish("job", [part]).versions == {"orders": [1]}
    assert (server.brain.count(Stage), server.brain.count(Publish)) == (2, 2)
    assert client.stats("orders").produced == 1


def test_a_publish_without_an_answer_says_how_to_find_out(server: ScriptedServer) -> None:
    with Client(server.address, timeout_ms=300) as client:
        client.create_queue("q")
        part = client.stage("job", "q", [b"a"])
        for _ in range(20):
            server.fail(Publish, "silent_after")
        with pytest.raises(OutcomeUnknown, match="txn_status"):
            client.publish("job", [part])
        server.faults.clear()
        assert client.txn_status("job").state == "published"


def test_a_forgotten_producer_may_use_its_numbers_again(client: Client) -> None:
    client.produce("orders", [b"a"], client_id="svc", client_seq=1)
    client.forget_producer("orders", "svc")
    again = client.produce("orders", [b"a"], client_id="svc", client_seq=1)
    assert (again.versions, again.replayed) == ([2], False)


def test_a_publish_that_happened_is_never_said_not_to_have_happened() -> None:
    """Who publishes what others have staged asks for the names of the queues, and may get no answer to that."""
    steps = publish(Names(), "job", [Part(0, "0", 1, 1, 1)], "")
    next(steps)
    steps.send(Answer(Place(1, 0, 1), Committed(versions=((7, 1, 3),))))
    with pytest.raises(OutcomeUnknown):
        steps.throw(NoLeader())
