"""Lost requests, lost replies, silence and leaders that go: the same on every shell, with the exact outcome."""

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from holdfast.client import blocking
from holdfast.client.protocol.commands import (
    AckBatch,
    Cancel,
    CreateGroup,
    CreateQueue,
    Extend,
    Lease,
    Nack,
    OpenProducer,
    OpenSession,
    Produce,
    PurgeQueue,
    Redrive,
    Release,
    Seek,
    Transaction,
)
from holdfast.client.protocol.errors import (
    ConnectFailed,
    ConnectionLost,
    Indeterminate,
    NoLeader,
    OutcomeUnknown,
    Overloaded,
    QueueNotFound,
    Unavailable,
)
from holdfast.client.protocol.messages import Request
from holdfast.client.protocol.queries import DeadLetters, DescribeQueue, Explain, Peek, Stats
from tests.conformance.shells import NAMES, Shell
from tests.fakes.scripted_server import Brain, Fate, ScriptedServer

DROPS: list[Fate] = ["drop_before"] * 100
SILENCES: list[Fate] = ["silent_before"] * 100
WAIT_MS = 20_000

COMMANDS = [
    *(CreateQueue, CreateGroup, OpenProducer, Produce, Lease, AckBatch, Nack, Extend, Release),
    *(Redrive, Cancel, Transaction, Seek, PurgeQueue, OpenSession),
]
QUERIES = [DescribeQueue, Stats, Peek, DeadLetters, Explain]

Main = Callable[[Any], Awaitable[None]]


@pytest.fixture(params=NAMES)
def shell(request: pytest.FixtureRequest) -> Shell:
    return Shell(request.param)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture
def nodes() -> Iterator[list[ScriptedServer]]:
    """Three nodes of one state; the first leads."""
    brain = Brain()
    with ExitStack() as stack:
        nodes = [stack.enter_context(ScriptedServer(brain, name)) for name in ("n1", "n2", "n3")]
        lead(nodes, 0)
        yield nodes


def lead(nodes: list[ScriptedServer], number: int) -> None:
    for node in nodes:
        node.leader = nodes[number].address


def joined(nodes: list[ScriptedServer]) -> str:
    return ",".join(node.address for node in nodes)


def run(shell: Shell, addresses: str, main: Main, timeout_ms: int = 20_000) -> None:
    async def scenario() -> None:
        async with shell.client(addresses, timeout_ms=timeout_ms) as client:
            await main(client)

    shell.run(scenario)


def filled(address: str, *payloads: bytes) -> None:
    with blocking.Client(address) as client:
        client.create_queue("q")
        client.produce("q", list(payloads))


async def everything(client: Any) -> None:
    """Each kind of command and query once, with what must come of it, whatever is lost on the way."""
    await client.create_queue("q", max_delivery_attempts=1)
    await client.create_group("q", "g")
    assert (await client.open_producer("q", client_id="p")).epoch == 1
    assert (await client.produce("q", [b"%d" % n for n in range(1, 9)])).versions == list(range(1, 9))
    lease = await client.lease("q", max_messages=6)
    assert [(m.version, m.delivery_count) for m in lease] == [(n, 1) for n in range(1, 7)]
    await lease.ack([1])
    await lease.nack([2], error="boom")
    await lease.release([3])
    assert (await lease.extend()).held == ((4, 6),)
    async with client.transaction() as txn:
        txn.ack(lease, [4])
        txn.produce("q", [b"9"])
    assert txn.versions == {"q": [9]}
    assert (await client.redrive("q")).redriven == 1
    late = (await client.produce("q", [b"10"], delay_ms=600_000)).versions
    assert [outcome.outcome for outcome in await client.cancel("q", version=late[0])] == ["ok"]
    assert (await client.seek("q", group="g", to=5)).version == 5
    assert (await client.purge_queue("q", group="g")).count == 5
    assert len(await client.peek("q", limit=20)) == 9
    assert (await client.dead("q")) == []
    assert (await client.queue("q")).tail_version == 10
    assert (await client.explain("q", 5)).reason == "leased"
    stats = await client.stats("q")
    counted = (stats.produced, stats.ready, stats.in_flight, stats.acked, stats.dead, stats.cancelled)
    assert counted == (10, 5, 2, 2, 0, 1)


@pytest.mark.parametrize("fate", ["drop_before", "drop_after"])
@pytest.mark.parametrize("kind", [*COMMANDS, *QUERIES], ids=lambda kind: kind.__name__)
def test_a_lost_request_or_reply_costs_nothing(shell: Shell, server: ScriptedServer, kind: type, fate: Fate) -> None:
    """A1: Twice lost, then answered: each is done once, and its caller sees the answer of the first time."""
    server.fail(kind, fate, fate)
    run(shell, server.address, everything)
    assert not server.faults


@pytest.mark.parametrize("kind", COMMANDS, ids=lambda kind: kind.__name__)
def test_a_leader_that_goes_with_the_answer_is_left_for_its_successor(
    shell: Shell, nodes: list[ScriptedServer], kind: type
) -> None:
    """What it did last is in the log; the client asks the next one under the same identity."""
    nodes[0].fail(kind, "drop_after")
    nodes[0].when_failed = lambda: lead(nodes, 1)
    run(shell, joined(nodes), everything)
    assert not nodes[0].faults


def test_a_retry_carries_the_identity_of_the_first_attempt(shell: Shell, server: ScriptedServer) -> None:
    """A1, A2: nobody can tell it from the first, so it is done once."""
    filled(server.address)
    full = Overloaded(limit_name="x", limit=1, retry_after_ms=1)

    async def main(client: Any) -> None:
        server.fail(Produce, "drop_after", "drop_before", full)
        assert (await client.produce("q", [b"1"])).replayed

    run(shell, server.address, main)
    asked = [request for request in server.arrived if isinstance(request, Request)]
    produces = [request for request in asked if isinstance(request.command, Produce)]
    assert len(produces) == 4
    assert len({(request.session, request.request_seq) for request in produces}) == 1


# Who leads ---------------------------------------------------------------------------------------------


def test_a_redirect_is_followed_to_an_address_that_nobody_gave(shell: Shell, nodes: list[ScriptedServer]) -> None:
    async def main(client: Any) -> None:
        await client.create_queue("q")
        lead(nodes, 1)
        assert (await client.produce("q", [b"1"])).versions == [1]

    run(shell, nodes[2].address, main)
    assert nodes[0].brain.count(Produce) == 1


def test_a_dead_leader_is_left_for_its_successor(shell: Shell, nodes: list[ScriptedServer]) -> None:
    async def main(client: Any) -> None:
        await client.create_queue("q")
        nodes[0].stop()
        lead(nodes, 2)
        assert (await client.produce("q", [b"1"])).versions == [1]
        nodes[0].start()

    run(shell, joined(nodes), main)


@pytest.mark.parametrize("first", [0, 1], ids=["that-led", "that-was-given-first"])
def test_a_frozen_node_costs_an_election_not_a_timeout(shell: Shell, nodes: list[ScriptedServer], first: int) -> None:
    """Asked nothing else for 250 ms, the client asks the others who leads, and goes on there."""

    async def main(client: Any) -> None:
        if not first:
            await client.create_queue("q")
        nodes[0].frozen = True
        lead(nodes, 1)
        began = time.monotonic()
        if first:
            await client.create_queue("q")
        assert (await client.produce("q", [b"1"])).versions == [1]
        assert time.monotonic() - began < 10  # far below the timeout, far above what a busy machine needs

    run(shell, joined(nodes), main, timeout_ms=30_000)


def test_a_conversation_goes_on_over_a_leader_that_freezes_again_and_again(
    shell: Shell, nodes: list[ScriptedServer]
) -> None:
    async def main(client: Any) -> None:
        await client.create_queue("q")
        for turn in range(4):
            await client.produce("q", [b"%d" % turn])
            lease = await client.lease("q", wait_ms=WAIT_MS)
            nodes[turn % 3].frozen = True
            lead(nodes, (turn + 1) % 3)
            await lease.ack()
            nodes[turn % 3].frozen = False
        stats = await client.stats("q")
        assert (stats.produced, stats.acked) == (4, 4)

    run(shell, joined(nodes), main, timeout_ms=30_000)


def test_a_slow_leader_is_waited_for_and_asked_once(shell: Shell, nodes: list[ScriptedServer]) -> None:
    """The others say that it leads, and it answers pings: silence alone moves nobody."""
    nodes[0].slow_s = 0.6

    async def main(client: Any) -> None:
        await client.create_queue("q")
        assert (await client.produce("q", [b"1"])).versions == [1]

    run(shell, joined(nodes), main, timeout_ms=30_000)
    assert (nodes[0].brain.count(CreateQueue), nodes[0].brain.count(Produce)) == (1, 1)
    assert nodes[0].connections == 1


def test_a_cluster_that_forgot_everything_is_met_with_a_fresh_session(shell: Shell, server: ScriptedServer) -> None:
    async def main(client: Any) -> None:
        await client.create_queue("q")
        server.brain = Brain()
        await client.create_queue("r")
        assert await client.queues() == ["r"]

    run(shell, server.address, main)
    assert len({request.session for request in server.arrived if isinstance(request, Request)}) == 2


# Deadlines ---------------------------------------------------------------------------------------------


def test_what_may_have_happened_is_indeterminate_and_says_how_to_find_out(shell: Shell, server: ScriptedServer) -> None:
    """A2: sent, and never answered."""
    filled(server.address)

    async def main(client: Any) -> None:
        await client.queue("q")
        server.fail(Produce, "silent_after")
        with pytest.raises(OutcomeUnknown, match=r"Produce may have happened; peek at the queue"):
            await client.produce("q", [b"1"])
        server.fail(Produce, "drop_after", *DROPS)
        with pytest.raises(ConnectionLost, match=r"produce the same again under the same client_id and client_seq"):
            await client.produce("q", [b"1"], client_id="svc", client_seq=1)
        server.faults.clear()
        assert (await client.produce("q", [b"1"], client_id="svc", client_seq=1)).replayed

    run(shell, server.address, main, timeout_ms=300)
    assert server.brain.count(Produce) == 3


def test_what_cannot_have_happened_is_unavailable(shell: Shell, server: ScriptedServer) -> None:
    """A2: declined each time, or never sent."""
    filled(server.address)
    before = server.brain.count(Produce)

    async def main(client: Any) -> None:
        await client.queue("q")
        server.leader = None
        with pytest.raises(NoLeader):
            await client.produce("q", [b"1"])
        server.leader = server.address
        server.fail(Produce, *[Overloaded(limit_name="x", limit=1, retry_after_ms=1)] * 1_000)
        with pytest.raises(Overloaded):
            await client.produce("q", [b"1"])
        server.faults.clear()
        server.fail(DescribeQueue, *SILENCES)
        with pytest.raises(Unavailable):
            await client.queue("q")

    run(shell, server.address, main, timeout_ms=300)
    assert server.brain.count(Produce) == before


def test_nobody_at_home_is_connect_failed(shell: Shell) -> None:
    async def main(client: Any) -> None:
        with pytest.raises(ConnectFailed):
            await client.queues()
        with pytest.raises(ConnectFailed):
            await client.status()

    server = ScriptedServer()
    server.stop()
    for nowhere in (server.address, "nowhere.invalid:1", "127.0.0.1:http!", "127.0.0.1:70000"):
        run(shell, nowhere, main, timeout_ms=200)


def test_an_ack_that_may_have_happened_is_recognised_when_asked_again(shell: Shell, server: ScriptedServer) -> None:
    """A2: only this session can have done it."""
    filled(server.address, b"1", b"2")

    async def main(client: Any) -> None:
        lease = await client.lease("q")
        server.fail(AckBatch, "silent_after", *SILENCES)
        with pytest.raises(Indeterminate):
            await lease.ack([1])
        server.faults.clear()
        assert (await lease.ack([1])).count in (0, 1)
        assert (await client.stats("q")).acked == 1

    run(shell, server.address, main, timeout_ms=500)


def test_a_refusal_is_no_retry(shell: Shell, server: ScriptedServer) -> None:
    async def main(client: Any) -> None:
        with pytest.raises(QueueNotFound):
            await client.produce("nowhere", [b"1"])

    run(shell, server.address, main)
    assert len(server.arrived) == 1


def test_a_consumer_extends_by_the_timeout_that_it_asked_for(shell: Shell, server: ScriptedServer) -> None:
    filled(server.address, b"1", b"2")

    async def main(client: Any) -> None:
        async with client.consume("q", visibility_timeout_ms=600_000) as messages:
            async for _ in messages:
                break
            getattr(messages, "_inner", messages)._hand._extend_at_s = 0.0  # as if half of it were over
            async for _ in messages:
                break

    run(shell, server.address, main)
    asked = [request.command for request in server.arrived if isinstance(request, Request)]
    assert [command.visibility_timeout_ms for command in asked if isinstance(command, Extend)] == [600_000]
