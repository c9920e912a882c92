"""The managed producer over real sockets, against a real state machine: threads, lost frames, fences, forks."""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from holdfast.client.blocking import Client
from holdfast.client.blocking_producer import Producer
from holdfast.client.message import Message
from holdfast.client.outbox import OutboxInUse, OutboxMismatch
from holdfast.client.producing import ProducerForked
from holdfast.client.protocol.commands import OpenProducer, Produce
from holdfast.client.protocol.errors import (
    BadHeader,
    BadValue,
    HoldfastError,
    Indeterminate,
    MessageTooLarge,
    NoLeader,
    ProducerFenced,
    QueueFull,
    QueueNotFound,
    QueueRecreated,
    Unavailable,
)
from tests.fakes.scripted_server import Brain, Fate, ScriptedServer


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[Client]:
    with Client(server.address, timeout_ms=10_000) as client:
        client.create_queue("q")
        yield client


def payloads(client: Client) -> list[bytes]:
    return [message.payload for message in client.read("q")]


def test_the_example_of_the_design_runs(client: Client) -> None:
    with client.producer("q", client_id="svc") as producer:
        assert producer.send(b"c", key="k", headers={"h": "v"}, delay_ms=0, ttl_ms=None) == 1
        assert producer.send_many([b"d", Message(b"e", key="own")], key="shared") == [2, 3]
        futures = [producer.send_nowait(b"%d" % n) for n in range(100)]
        producer.flush()
        assert [future.result(0) for future in futures] == list(range(4, 104))
        assert producer.send_many([]) == []
        assert (producer.epoch, producer.high_water) == (1, 103)
    found = list(client.read("q"))
    assert [(message.key, message.headers) for message in found[:3]] == [("k", {"h": "v"}), ("shared", {}), ("own", {})]
    assert [message.client_seq for message in found] == list(range(1, 104))
    assert client.producer_state("q", client_id="svc").high_water == 103


def test_many_threads_share_one_producer_and_each_keeps_its_order(client: Client) -> None:
    with client.producer("q", client_id="svc", window=50) as producer, ThreadPoolExecutor(20) as threads:

        def work(name: int) -> list[tuple[int, bytes]]:
            sent = [b"%d/%d" % (name, n) for n in range(20)]
            return [(producer.send(payload), payload) for payload in sent]

        told = [pair for pairs in threads.map(work, range(20)) for pair in pairs]
    stored = payloads(client)
    assert len(stored) == 400
    assert all(stored[version - 1] == payload for version, payload in told)
    for name in range(20):
        mine = [payload for payload in stored if payload.startswith(b"%d/" % name)]
        assert mine == [b"%d/%d" % (name, n) for n in range(20)]


@pytest.mark.parametrize("fate", ["drop_before", "drop_after"])
def test_a_lost_connection_in_the_middle_of_a_window_costs_nothing(
    client: Client, server: ScriptedServer, fate: Fate
) -> None:
    with client.producer("q", client_id="svc", window=8) as producer:
        for _ in range(10):
            server.fail(Produce, fate)
            sent = [b"%d" % n for n in range(20)]
            futures = [producer.send_nowait(payload) for payload in sent]
            versions = [future.result(10) for future in futures]
            assert [payloads(client)[version - 1] for version in versions] == sent
    assert len(payloads(client)) == 200


def test_a_new_leader_in_the_middle_of_a_window_costs_nothing() -> None:
    with ExitStack() as stack:
        brain = Brain()
        nodes = [stack.enter_context(ScriptedServer(brain)) for _ in range(3)]
        for node in nodes:
            node.leader = nodes[0].address
        client = stack.enter_context(Client([node.address for node in nodes], timeout_ms=10_000))
        client.create_queue("q")
        producer = stack.enter_context(client.producer("q", client_id="svc", window=8))
        futures: list[Future[int]] = []
        for turn in range(30):
            futures += [producer.send_nowait(b"%d" % (turn * 10 + n)) for n in range(10)]
            if turn % 3 == 2:
                for node in nodes:
                    node.leader = nodes[turn % 9 // 3].address
                nodes[turn % 9 // 3 - 1].drop_connections()
        producer.flush()
        assert [future.result(0) for future in futures] == list(range(1, 301))
        assert payloads(client) == [b"%d" % n for n in range(300)]


def test_an_open_that_lost_its_answer_opens_one_epoch(client: Client, server: ScriptedServer) -> None:
    server.fail(OpenProducer, "drop_after")
    with client.producer("q", client_id="svc") as producer:
        assert producer.epoch == 1


def test_what_no_queue_would_take_is_refused_at_once_and_harms_nobody(client: Client) -> None:
    with client.producer("q", client_id="svc") as producer:
        with pytest.raises(BadHeader):
            producer.send(b"x", headers={"holdfast-x": "1"})
        with pytest.raises(BadValue):
            producer.send_many([b"x", "text"])  # type: ignore[list-item]
        assert producer.send(b"fine") == 1


def test_a_message_that_is_too_large_fails_alone(client: Client) -> None:
    client.update_queue("q", max_message_bytes=100)
    with client.producer("q", client_id="svc", window=100) as producer:
        futures = [producer.send_nowait(bytes(101 if n == 7 else 1)) for n in range(20)]
        with pytest.raises(MessageTooLarge):
            producer.flush()
        assert [future.exception(0) is None for future in futures] == [n != 7 for n in range(20)]
        producer.flush()
    assert len(payloads(client)) == 19


def test_a_full_queue_refuses_and_the_producer_goes_on_when_there_is_room(client: Client) -> None:
    client.update_queue("q", max_backlog_messages=2)
    with client.producer("q", client_id="svc") as producer:
        producer.send_many([b"1", b"2"])
        with pytest.raises(QueueFull) as raised:
            producer.send(b"3")
        assert raised.value.happened == "no"
        client.lease("q").ack()
        assert producer.send(b"4") == 3
    assert producer.high_water == 4  # number 3 is skipped, and was never given to another message


def test_a_newer_producer_fences_the_older_one(client: Client) -> None:
    """P4, as the client does it."""
    old = client.producer("q", client_id="svc")
    assert old.send(b"1") == 1
    with client.producer("q", client_id="svc") as new:
        assert new.epoch > old.epoch
        with pytest.raises(ProducerFenced) as raised:
            old.send(b"2")
        assert raised.value.epoch == new.epoch
        with pytest.raises(ProducerFenced):
            old.send(b"3")
        with pytest.raises(ProducerFenced):
            old.flush()
        assert new.send(b"2") == 2
    old.close()
    assert payloads(client) == [b"1", b"2"]


@pytest.mark.parametrize("again", [False, True])
def test_a_queue_that_is_gone_ends_the_producer(client: Client, again: bool) -> None:
    with client.producer("q", client_id="svc") as producer:
        client.delete_queue("q")
        if again:
            client.create_queue("q")
        for _ in range(2):
            with pytest.raises(QueueRecreated if again else QueueNotFound):
                producer.send(b"1")
        producer.close()
    assert not again or payloads(client) == []


def test_there_is_no_producer_for_a_queue_that_is_not_there(client: Client, tmp_path: Path) -> None:
    with pytest.raises(QueueNotFound):
        client.producer("nowhere", client_id="svc", outbox=tmp_path / "o")
    client.producer("q", client_id="svc", outbox=tmp_path / "o").close()  # it was let go


def test_without_a_leader_messages_are_told_not_to_have_been_sent(server: ScriptedServer) -> None:
    with Client(server.address, timeout_ms=400) as client:
        client.create_queue("q")
        producer = client.producer("q", client_id="svc", window=2)
        server.leader = None
        first, second = producer.send_nowait(b"1"), producer.send_nowait(b"2")
        with pytest.raises(Unavailable):
            producer.send(b"3")
        for future in (first, second):
            assert isinstance(future.exception(10), NoLeader)
        server.leader = server.address
        assert producer.send(b"4") == 1
        with pytest.raises(NoLeader):
            producer.flush()
        producer.flush()
        producer.close()
        assert payloads(client) == [b"4"]


def test_after_indeterminate_the_producer_goes_on_and_the_flush_waits(server: ScriptedServer) -> None:
    with Client(server.address, timeout_ms=400) as client:
        client.create_queue("q")
        with client.producer("q", client_id="svc") as producer:
            server.frozen = True
            lost = producer.send_nowait(b"1")
            assert isinstance(lost.exception(10), Indeterminate)
            with pytest.raises(Indeterminate):
                producer.flush()
            server.frozen = False
            server.drop_connections()
            assert producer.send(b"2") == 2
            producer.flush()
            assert payloads(client) == [b"1", b"2"]


def test_a_closed_producer_sends_nothing_and_says_so(client: Client) -> None:
    with client.producer("q", client_id="svc") as producer:
        producer.send(b"1")
    producer.close()
    for call in (lambda: producer.send(b"2"), producer.flush):
        with pytest.raises(BadValue, match="producer is closed"):
            call()


def test_the_blocks_own_exception_is_the_one_that_comes_out(client: Client) -> None:
    with pytest.raises(KeyError), client.producer("q", client_id="svc") as producer:
        futures = [producer.send_nowait(b"1") for _ in range(10)]
        raise KeyError
    assert [future.result(0) for future in futures] == list(range(1, 11))


def test_a_client_that_is_closed_ends_its_producers(client: Client, server: ScriptedServer) -> None:
    producer = client.producer("q", client_id="svc")
    server.frozen = True
    pending, waiting = producer.send_nowait(b"1"), producer.send_nowait(b"2")
    client.close()
    assert isinstance(pending.exception(10), Indeterminate)
    assert isinstance(waiting.exception(10), HoldfastError)
    with pytest.raises(HoldfastError):
        producer.send(b"3")
    producer.close()


def test_a_fork_in_the_middle_of_a_window_leaves_the_producer_to_the_parent(
    client: Client, server: ScriptedServer, tmp_path: Path
) -> None:
    for number, outbox in enumerate((None, tmp_path / "o")):
        producer = client.producer("q", client_id=f"svc{number}", window=8, outbox=outbox)
        server.fail(Produce, "silent_after")
        futures = [producer.send_nowait(b"%d" % n) for n in range(6)]
        until(lambda: not server.faults)
        child = os.fork()
        if not child:
            os._exit(_refused_in_child(producer))
        assert os.waitpid(child, 0)[1] == 0
        server.drop_connections()
        first = 1 + 7 * number
        assert [future.result(10) for future in futures] == list(range(first, first + 6))
        assert producer.send(b"6") == first + 6
        producer.close()
    assert payloads(client) == [b"%d" % n for n in range(7)] * 2


def _refused_in_child(producer: Producer) -> int:
    refused = 0
    for call in (lambda: producer.send(b"x"), lambda: producer.send_nowait(b"x"), producer.flush):
        try:
            call()
        except ProducerForked as error:
            refused += error.happened == "no"
    producer.close()
    return 0 if refused == 3 else 1


# The outbox ------------------------------------------------------------------------------------------------


def test_one_outbox_is_for_one_producer_at_a_time(client: Client, tmp_path: Path) -> None:
    with (
        client.producer("q", client_id="svc", outbox=tmp_path / "o") as producer,
        pytest.raises(OutboxInUse),
    ):
        client.producer("q", client_id="svc", outbox=tmp_path / "o")
    assert client.producer_state("q", client_id="svc").epoch == producer.epoch  # nobody was fenced for it


def test_a_window_that_was_left_is_sent_again_before_anything_else(
    client: Client, server: ScriptedServer, tmp_path: Path
) -> None:
    leave_a_window(server, tmp_path / "o")
    with client.producer("q", client_id="svc", outbox=tmp_path / "o") as producer:
        assert payloads(client) == [b"1", b"2", b"3"]
        assert producer.high_water == 3
        assert producer.send(b"4") == 4
    assert client.stats("q").produced == 4


def test_a_window_never_goes_to_a_queue_that_was_created_again(
    client: Client, server: ScriptedServer, tmp_path: Path
) -> None:
    leave_a_window(server, tmp_path / "o")
    client.delete_queue("q")
    client.create_queue("q")
    for _ in range(2):
        with pytest.raises(OutboxMismatch, match="3 unconfirmed requests were for queue id"):
            client.producer("q", client_id="svc", outbox=tmp_path / "o")
    assert payloads(client) == []


def test_a_window_that_the_queue_has_no_room_for_stays_on_disk(
    client: Client, server: ScriptedServer, tmp_path: Path
) -> None:
    leave_a_window(server, tmp_path / "o")
    client.update_queue("q", max_backlog_messages=1)
    with pytest.raises(QueueFull):
        client.producer("q", client_id="svc", outbox=tmp_path / "o")
    client.update_queue("q", max_backlog_messages=None)
    client.producer("q", client_id="svc", outbox=tmp_path / "o").close()
    assert payloads(client) == [b"1", b"2", b"3"]


def leave_a_window(server: ScriptedServer, path: Path) -> None:
    """Three requests of a process that is gone: the first is written, and the others never arrived."""
    with Client(server.address, timeout_ms=10_000) as client:
        producer = client.producer("q", client_id="svc", window=4, outbox=path)
        server.fail(Produce, "silent_after")
        producer.send_nowait(b"1")
        until(lambda: server.brain.count(Produce) == 1)
        server.frozen = True
        asked = len(server.arrived)
        producer.send_nowait(Message(b"2", key="k"))
        until(lambda: len(server.arrived) > asked)
        producer.send_nowait(b"3")
        until(lambda: len(server.arrived) > asked + 1)
        producer.close()
    server.frozen = False


def until(wanted: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 30
    while not wanted():
        assert time.monotonic() < end_s
        time.sleep(0.001)  # between two looks
