"""The blocking client through lost connections, redirects, silence, threads and forks: exact outcomes."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from holdfast.client.blocking import Client
from holdfast.client.protocol.commands import AckBatch, CreateQueue, Lease, OpenSession, Produce, Transaction
from holdfast.client.protocol.errors import (
    BadValue,
    ConnectFailed,
    ConnectionLost,
    Indeterminate,
    NoLeader,
    NotLeaseOwner,
    OutcomeUnknown,
    Overloaded,
    Unavailable,
)
from holdfast.client.protocol.messages import Request
from holdfast.client.protocol.queries import DescribeQueue, Stats
from tests.fakes.scripted_server import Brain, Fate, ScriptedServer

DROPS: list[Fate] = ["drop_before"] * 100
SILENCES: list[Fate] = ["silent_before"] * 100


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[Client]:
    with Client(server.address, timeout_ms=10_000) as client:
        client.create_queue("q")
        yield client


@pytest.fixture
def nodes() -> Iterator[list[ScriptedServer]]:
    """Three nodes of one state; the first leads."""
    brain = Brain()
    with ExitStack() as stack:
        nodes = [stack.enter_context(ScriptedServer(brain)) for _ in range(3)]
        lead(nodes, 0)
        yield nodes


def lead(nodes: list[ScriptedServer], number: int) -> None:
    for node in nodes:
        node.leader = nodes[number].address


def joined(nodes: list[ScriptedServer]) -> str:
    return ",".join(node.address for node in nodes)


@pytest.mark.parametrize("fate", ["drop_before", "drop_after"])
@pytest.mark.parametrize("kind", [CreateQueue, Produce, Lease, AckBatch, Transaction])
def test_a_lost_connection_costs_nothing_whatever_was_lost(server: ScriptedServer, kind: type, fate: Fate) -> None:
    with Client(server.address, timeout_ms=10_000) as client:
        server.fail(kind, fate, fate)
        client.create_queue("q")
        assert client.produce("q", [b"1", b"2"]).versions == [1, 2]
        lease = client.lease("q", max_messages=1)
        assert [message.delivery_count for message in lease] == [1]
        assert lease.replayed is (kind is Lease and fate == "drop_after")
        assert lease.ack().count == 1
        with client.transaction() as txn:
            txn.produce("q", [b"3"])
        assert txn.versions == {"q": [3]}
        stats = client.stats("q")
        assert (stats.produced, stats.ready, stats.in_flight, stats.acked) == (3, 2, 0, 1)
        assert not server.faults


@pytest.mark.parametrize("fate", ["drop_before", "drop_after"])
def test_a_query_and_an_opening_are_asked_again(server: ScriptedServer, fate: Fate) -> None:
    with Client(server.address, timeout_ms=10_000) as client:
        server.fail(OpenSession, fate)
        server.fail(Stats, fate)
        client.create_queue("q")
        assert client.stats("q").produced == 0


def test_a_retry_carries_the_identity_of_the_first_attempt(client: Client, server: ScriptedServer) -> None:
    server.fail(Produce, "drop_after", "drop_before", Overloaded(limit_name="x", limit=1, retry_after_ms=1))
    assert client.produce("q", [b"1"]).replayed
    asked = [request for request in server.arrived if isinstance(request, Request)]
    produces = [request for request in asked if isinstance(request.command, Produce)]
    assert len(produces) == 4
    assert len({(request.session, request.request_seq) for request in produces}) == 1


def test_a_redirect_is_followed(nodes: list[ScriptedServer]) -> None:
    with Client(nodes[2].address, timeout_ms=10_000) as client:
        client.create_queue("q")
        lead(nodes, 1)
        assert client.produce("q", [b"1"]).versions == [1]
    assert nodes[0].brain.count(Produce) == 1


def test_a_dead_leader_is_left_for_its_successor(nodes: list[ScriptedServer]) -> None:
    with Client(joined(nodes), timeout_ms=10_000) as client:
        client.create_queue("q")
        nodes[0].stop()
        lead(nodes, 2)
        assert client.produce("q", [b"1"]).versions == [1]
        nodes[0].start()


def test_a_frozen_leader_costs_an_election_not_a_timeout(nodes: list[ScriptedServer]) -> None:
    with Client(joined(nodes), timeout_ms=30_000) as client:
        client.create_queue("q")
        nodes[0].frozen = True
        lead(nodes, 1)
        began = time.monotonic()
        assert client.produce("q", [b"1"]).versions == [1]
        assert time.monotonic() - began < 10  # far below the timeout, far above what a busy machine needs


def test_a_frozen_first_address_is_passed_over(nodes: list[ScriptedServer]) -> None:
    lead(nodes, 1)
    nodes[0].frozen = True
    with Client(joined(nodes), timeout_ms=30_000) as client:
        client.create_queue("q")
        assert client.queues() == ["q"]


def test_after_the_deadline_what_may_have_happened_is_indeterminate(server: ScriptedServer) -> None:
    with Client(server.address, timeout_ms=10_000) as client:
        client.create_queue("q")
    with Client(server.address, timeout_ms=300) as client:
        client.queue("q")
        server.fail(Produce, "silent_after")
        with pytest.raises(OutcomeUnknown, match="may have happened"):
            client.produce("q", [b"1"])
        server.fail(Produce, "drop_after", *DROPS)
        with pytest.raises(ConnectionLost):
            client.produce("q", [b"1"])


def test_after_the_deadline_what_cannot_have_happened_is_unavailable(server: ScriptedServer) -> None:
    with Client(server.address, timeout_ms=10_000) as client:
        client.create_queue("q")
    with Client(server.address, timeout_ms=300) as client:
        client.queue("q")
        server.leader = None
        with pytest.raises(NoLeader):
            client.produce("q", [b"1"])
        server.leader = server.address
        full = Overloaded(limit_name="x", limit=1, retry_after_ms=1)
        server.fail(Produce, *[full] * 1_000)
        with pytest.raises(Overloaded):
            client.produce("q", [b"1"])
        server.faults.clear()
        server.fail(DescribeQueue, *SILENCES)
        with pytest.raises(Unavailable):
            client.queue("q")
    assert server.brain.count(Produce) == 0


def test_nobody_at_home_is_connect_failed() -> None:
    server = ScriptedServer()
    server.stop()
    with Client(server.address, timeout_ms=200) as client, pytest.raises(ConnectFailed):
        client.queues()
    with Client("nowhere.invalid:1", timeout_ms=200) as client, pytest.raises(ConnectFailed):
        client.queues()


def test_an_ack_that_may_have_happened_is_recognised_when_asked_again(server: ScriptedServer) -> None:
    with Client(server.address, timeout_ms=500) as client:
        client.create_queue("q")
        client.produce("q", [b"1", b"2"])
        lease = client.lease("q")
        server.fail(AckBatch, "silent_after", *SILENCES)
        with pytest.raises(Indeterminate):
            lease.ack([1])
        server.faults.clear()
        lease.ack([1])
        assert client.stats("q").acked == 1


def test_a_long_poll_is_answered_as_soon_as_something_is_there(client: Client, server: ScriptedServer) -> None:
    with ThreadPoolExecutor(1) as pool, Client(server.address) as other:
        waiting = pool.submit(client.lease, "q", wait_ms=20_000)
        other.produce("q", [b"1"])
        assert [message.payload for message in waiting.result(15)] == [b"1"]


def test_a_hundred_threads_share_one_client(client: Client, server: ScriptedServer) -> None:
    server.fail(Produce, "drop_after", *DROPS[:5], "drop_after")
    with ThreadPoolExecutor(100) as pool:
        made = list(pool.map(lambda n: client.produce("q", [b"%d" % n] * 3).versions, range(300)))
    assert sorted(version for versions in made for version in versions) == list(range(1, 901))
    assert client.stats("q").produced == 900


def test_one_connection_serves_all(client: Client, server: ScriptedServer) -> None:
    with ThreadPoolExecutor(20) as pool:
        list(pool.map(lambda n: client.produce("q", [b"x"]), range(100)))
    assert server.connections == 1


def test_a_large_batch_goes_out_and_comes_back(client: Client) -> None:
    payloads = [bytes([n]) * 400_000 for n in range(10)]
    client.produce("q", payloads)
    assert [message.payload for message in client.lease("q", max_bytes=8_000_000)] == payloads


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


def test_a_restarted_server_that_forgot_everything_is_met_with_a_fresh_session(server: ScriptedServer) -> None:
    with Client(server.address, timeout_ms=10_000) as client:
        client.create_queue("q")
        server.brain = Brain()
        client.create_queue("r")
        assert client.queues() == ["r"]
    sessions = {request.session for request in server.arrived if isinstance(request, Request)}
    assert len(sessions) == 2


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
