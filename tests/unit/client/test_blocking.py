"""The blocking client: what is its own beside the calls, which the conformance suite has: threads, forks, closing."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.client.blocking import Client
from holdfast.client.protocol.commands import AckBatch, Produce
from holdfast.client.protocol.errors import BadValue, Indeterminate, NotLeaseOwner
from tests.fakes.scripted_server import Fate, ScriptedServer

DROPS: list[Fate] = ["drop_before"] * 5


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[Client]:
    with Client(server.address, timeout_ms=10_000) as client:
        client.create_queue("q")
        yield client


def test_a_hundred_threads_share_one_client(client: Client, server: ScriptedServer) -> None:
    server.fail(Produce, "drop_after", *DROPS, "drop_after")
    with ThreadPoolExecutor(100) as pool:
        made = list(pool.map(lambda n: client.produce("q", [b"%d" % n] * 3).versions, range(300)))
    assert sorted(version for versions in made for version in versions) == list(range(1, 901))
    assert client.stats("q").produced == 900


def test_a_hundred_threads_lease_and_ack_over_one_client(client: Client) -> None:
    client.produce("q", [b"x"] * 500)

    def consume(_: int) -> list[int]:
        lease = client.lease("q", max_messages=5, wait_ms=10_000)
        lease.ack()
        return [message.version for message in lease]

    with ThreadPoolExecutor(100) as pool:
        taken = list(pool.map(consume, range(100)))
    assert sorted(version for versions in taken for version in versions) == list(range(1, 501))
    assert client.stats("q").acked == 500


def test_one_connection_serves_all(client: Client, server: ScriptedServer) -> None:
    with ThreadPoolExecutor(20) as pool:
        list(pool.map(lambda n: client.produce("q", [b"x"]), range(100)))
    assert server.connections == 1


def test_a_large_batch_goes_out_and_comes_back(client: Client) -> None:
    payloads = [bytes([n]) * 400_000 for n in range(10)]
    client.produce("q", payloads)
    assert [message.payload for message in client.lease("q", max_bytes=8_000_000)] == payloads


def test_what_a_lease_settled_itself_is_not_asked_again(client: Client, server: ScriptedServer) -> None:
    client.produce("q", [b"1", b"2"])
    lease = client.lease("q")
    lease.ack()
    lease.ack([1])
    assert server.brain.count(AckBatch) == 1


def test_a_forked_child_has_a_session_of_its_own(client: Client, server: ScriptedServer) -> None:
    client.produce("q", [b"1"])
    lease = client.lease("q")
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a child that waits for a thread it does not have is a failure, not a hang
        code = 1
        try:
            client.produce("q", [b"2"])
            try:
                lease.ack()
            except NotLeaseOwner:
                code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert lease.ack().count == 1  # the parent's connection and session are as they were
    assert client.stats("q").produced == 2


def test_a_child_of_a_thread_that_waits_does_not_wait_with_it(client: Client, server: ScriptedServer) -> None:
    """The fork comes in the middle of a call of another thread, which goes on in the parent alone."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.lease, "q", wait_ms=20_000)
        server.await_parked()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            code = 1
            try:
                client.produce("q", [b"1"])
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert [message.payload for message in waiting.result(20)] == [b"1"]


def test_a_closed_client_refuses_and_frees_who_waits(server: ScriptedServer) -> None:
    client = Client(server.address)
    client.create_queue("q")
    with ThreadPoolExecutor(1) as pool:
        server.fail(Produce, "silent_after")
        waiting = pool.submit(client.produce, "q", [b"1"])
        server.await_applied(Produce)
        client.close()
        with pytest.raises(Indeterminate):
            waiting.result(10)
    client.close()
    with pytest.raises(BadValue, match="closed"):
        client.queues()


def test_a_client_that_is_closed_while_it_waits_leaves_no_lease_behind(server: ScriptedServer) -> None:
    client = Client(server.address)
    client.create_queue("q")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.lease, "q", wait_ms=20_000)
        server.await_parked()
        client.close()
        with pytest.raises(Indeterminate):
            waiting.result(10)
    server.await_parked(0)
    with Client(server.address) as other:
        other.produce("q", [b"1"])
        assert [message.attempts for message in other.lease("q")] == [1]
