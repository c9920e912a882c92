"""The managed producer on every shell: the same scenarios, over lost frames, new leaders, fences and an outbox."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest

from holdfast.client import aio
from holdfast.client.message import Message
from holdfast.client.outbox import OutboxInUse
from holdfast.client.protocol.commands import OpenProducer, Produce
from holdfast.client.protocol.errors import (
    BadValue,
    Indeterminate,
    MessageTooLarge,
    NoLeader,
    OutcomeUnknown,
    ProducerFenced,
    QueueFull,
    QueueNotFound,
    QueueRecreated,
)
from tests.conformance.shells import NAMES, Shell, in_thread
from tests.fakes.scripted_server import Brain, Fate, ScriptedServer


@pytest.fixture(params=NAMES)
def shell(request: pytest.FixtureRequest) -> Shell:
    return Shell(request.param)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


def run(
    shell: Shell, addresses: str, main: Callable[[Any], Awaitable[None]], timeout_ms: int = 20_000, **settings: Any
) -> None:
    async def scenario() -> None:
        async with shell.client(addresses, timeout_ms=20_000) as client:
            await client.create_queue("q", **settings)
        async with shell.client(addresses, timeout_ms=timeout_ms) as client:
            await main(client)

    shell.run(scenario)


async def payloads(client: Any) -> list[bytes]:
    return [message.payload async for message in client.read("q")]


def test_the_example_of_the_design_runs(shell: Shell, server: ScriptedServer) -> None:
    async def main(client: Any) -> None:
        async with client.producer("q", client_id="svc") as producer:
            assert await producer.send(b"c", key="k", headers={"h": "v"}, delay_ms=0, ttl_ms=None) == 1
            assert await producer.send_many([b"d", Message(b"e", key="own")], key="shared") == [2, 3]
            sent = [await producer.send_nowait(b"%d" % n) for n in range(100)]
            await producer.flush()
            assert [await each for each in sent] == list(range(4, 104))
            assert await producer.send_many([]) == []
            assert (producer_of(producer).epoch, producer_of(producer).high_water) == (1, 103)
        found = [message async for message in client.read("q")]
        labels = [(message.key, message.headers) for message in found[:3]]
        assert labels == [("k", {"h": "v"}), ("shared", {}), ("own", {})]
        assert [message.client_seq for message in found] == list(range(1, 104))
        assert (await client.producer_state("q", client_id="svc")).high_water == 103

    run(shell, server.address, main)


def producer_of(producer: Any) -> Any:
    return getattr(producer, "_inner", producer)


def test_many_tasks_share_one_producer_and_each_keeps_its_order(shell: Shell, server: ScriptedServer) -> None:
    async def main(client: Any) -> None:
        told: list[tuple[int, bytes]] = []
        async with client.producer("q", client_id="svc", window=50) as producer:

            async def work(name: int) -> None:
                for n in range(20):
                    payload = b"%d/%d" % (name, n)
                    told.append((await producer.send(payload), payload))

            async with anyio.create_task_group() as group:
                for name in range(20):
                    group.start_soon(work, name)
        stored = await payloads(client)
        assert len(stored) == 400
        assert all(stored[version - 1] == payload for version, payload in told)
        for name in range(20):
            mine = [payload for payload in stored if payload.startswith(b"%d/" % name)]
            assert mine == [b"%d/%d" % (name, n) for n in range(20)]

    run(shell, server.address, main)


@pytest.mark.parametrize("fate", ["drop_before", "drop_after"])
def test_a_lost_connection_in_the_middle_of_a_window_costs_nothing(
    shell: Shell, server: ScriptedServer, fate: Fate
) -> None:
    async def main(client: Any) -> None:
        server.fail(OpenProducer, fate)
        async with client.producer("q", client_id="svc", window=8) as producer:
            assert producer_of(producer).epoch == 1
            for turn in range(5):
                server.fail(Produce, fate)
                sent = [await producer.send_nowait(b"%d" % n) for n in range(20)]
                assert [await each for each in sent] == list(range(20 * turn + 1, 20 * turn + 21))
        assert await payloads(client) == [b"%d" % n for n in range(20)] * 5

    run(shell, server.address, main)


def test_a_new_leader_in_the_middle_of_a_window_costs_nothing(shell: Shell) -> None:
    with ExitStack() as stack:
        brain = Brain()
        nodes = [stack.enter_context(ScriptedServer(brain, name)) for name in ("n1", "n2")]

        def lead(number: int) -> None:
            for node in nodes:
                node.leader = nodes[number].address

        async def main(client: Any) -> None:
            async with client.producer("q", client_id="svc", window=16) as producer:
                for turn in range(6):
                    sent = [await producer.send_nowait(b"%d" % n) for n in range(40)]
                    lead(turn % 2)
                    nodes[1 - turn % 2].drop_connections()
                    assert [await each for each in sent] == list(range(40 * turn + 1, 40 * turn + 41))

        lead(0)
        run(shell, ",".join(node.address for node in nodes), main)


def test_a_full_queue_refuses_and_a_large_message_fails_alone(shell: Shell, server: ScriptedServer) -> None:
    async def main(client: Any) -> None:
        async with client.producer("q", client_id="svc") as producer:
            with pytest.raises(MessageTooLarge):
                await producer.send(b"x" * 11)
            assert await producer.send_many([b"1", b"2"]) == [1, 2]
            with pytest.raises(QueueFull):
                await producer.send(b"3")
            await (await client.lease("q")).ack()
            assert await producer.send(b"4") == 3
            await producer.send_nowait(b"x" * 11)
            with pytest.raises(MessageTooLarge):
                await producer.flush()

    run(shell, server.address, main, max_message_bytes=10, max_backlog_messages=2)


def test_a_newer_producer_fences_the_older_one(shell: Shell, server: ScriptedServer) -> None:
    async def main(client: Any) -> None:
        with pytest.raises(ProducerFenced):
            async with client.producer("q", client_id="svc") as older:
                await older.send(b"1")
                async with client.producer("q", client_id="svc") as newer:
                    assert await newer.send(b"2") == 2
                    with pytest.raises(ProducerFenced):
                        await older.send(b"3")
                await older.flush()
        assert await payloads(client) == [b"1", b"2"]

    run(shell, server.address, main)


def test_a_queue_that_is_gone_or_another_ends_the_producer(shell: Shell, server: ScriptedServer) -> None:
    async def main(client: Any) -> None:
        with pytest.raises(QueueNotFound):
            async with client.producer("nowhere", client_id="svc"):
                raise AssertionError("there is no such queue")
        with pytest.raises(QueueRecreated):
            async with client.producer("q", client_id="svc") as producer:
                await client.delete_queue("q")
                await client.create_queue("q")
                await producer.send(b"1")

    run(shell, server.address, main)


def test_what_could_not_be_sent_is_unavailable_and_what_could_indeterminate(
    shell: Shell, server: ScriptedServer
) -> None:
    async def main(client: Any) -> None:
        async with client.producer("q", client_id="svc") as producer:
            server.leader = None
            with pytest.raises(NoLeader):
                await producer.send(b"1")
            server.leader = server.address
            server.fail(Produce, "silent_after")
            with pytest.raises(Indeterminate):
                await producer.send(b"2")
            server.drop_connections()
            assert await producer.send(b"3") == 2
            await producer.flush()
        assert await payloads(client) == [b"2", b"3"]

    run(shell, server.address, main, timeout_ms=500)


def test_a_closed_producer_and_a_closed_client_send_nothing(shell: Shell, server: ScriptedServer) -> None:
    async def main(client: Any) -> None:
        async with client.producer("q", client_id="a") as first, client.producer("q", client_id="b") as second:
            await first.close()
            await first.close()
            with pytest.raises(BadValue, match="closed"):
                await first.send(b"1")
            server.fail(Produce, "silent_after")
            sent = await second.send_nowait(b"2")
            await in_thread(server.await_applied, Produce)
            await client.close()
            with pytest.raises(Indeterminate):
                await sent
            with pytest.raises(Exception, match="closed"):
                await second.send(b"3")
            await second.close()

    run(shell, server.address, main)


def test_the_blocks_own_exception_is_the_one_that_comes_out(shell: Shell, server: ScriptedServer) -> None:
    async def main(client: Any) -> None:
        with pytest.raises(ZeroDivisionError):
            async with client.producer("q", client_id="svc") as producer:
                await producer.send(b"1")
                raise ZeroDivisionError

    run(shell, server.address, main)


def test_a_window_that_was_left_in_the_outbox_is_sent_again_first(
    shell: Shell, server: ScriptedServer, tmp_path: Path
) -> None:
    """P1, P4: under the same numbers, whether it was written before or not."""
    path = tmp_path / "outbox"

    async def main(client: Any) -> None:
        async with client.producer("q", client_id="svc", outbox=path) as producer:
            assert await producer.send(b"1") == 1
            with pytest.raises(OutboxInUse):
                async with client.producer("q", client_id="svc", outbox=path):
                    raise AssertionError("one at a time")
            server.fail(Produce, "silent_after")
            left = await producer.send_nowait(b"2")
            await in_thread(server.await_applied, Produce, 20.0, 2)
            await producer.close()
            with pytest.raises(Indeterminate):
                await left
        async with client.producer("q", client_id="svc", outbox=path) as producer:
            assert producer_of(producer).epoch == 2
            assert await payloads(client) == [b"1", b"2"]
            assert await producer.send(b"3") == 3
        assert await payloads(client) == [b"1", b"2", b"3"]

    run(shell, server.address, main)


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_a_cancelled_send_may_be_written_and_harms_nobody(backend: str, server: ScriptedServer) -> None:
    async def main() -> None:
        async with aio.Client(server.address) as client:
            await client.create_queue("q")
            async with client.producer("q", client_id="svc", window=2) as producer:
                server.fail(Produce, "silent_after")
                async with anyio.create_task_group() as group:
                    for _ in range(4):  # two in the window, two in line
                        group.start_soon(producer.send, b"x")
                    await in_thread(server.await_applied, Produce)
                    group.cancel_scope.cancel()
                server.drop_connections()
                await producer.send(b"y")
            assert len(await payloads(client)) <= 3
            assert (await payloads(client))[-1] == b"y"

    anyio.run(main, backend=backend)


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_a_cancelled_block_ends_its_producer(backend: str, server: ScriptedServer, tmp_path: Path) -> None:
    async def main() -> None:
        with anyio.CancelScope() as scope:
            async with aio.Client(server.address) as client:
                await client.create_queue("q")
                async with client.producer("q", client_id="svc", outbox=tmp_path / "outbox") as producer:
                    server.fail(Produce, "silent_after")
                    await producer.send_nowait(b"x")
                    scope.cancel()
                    await producer.flush()
        assert scope.cancelled_caught

    anyio.run(main, backend=backend)


def test_a_call_that_is_written_in_part_is_not_said_not_to_have_happened(shell: Shell, server: ScriptedServer) -> None:
    async def main(client: Any) -> None:
        await client.create_queue("small", max_backlog_messages=3)
        async with client.producer("small", client_id="svc", window=2) as producer:
            with pytest.raises(OutcomeUnknown, match="2 of these messages are written") as caught:
                await producer.send_many([b"1", b"2", b"3", b"4"])
            assert isinstance(caught.value.__cause__, QueueFull)
        assert (await client.stats("small")).produced == 2

    run(shell, server.address, main)
