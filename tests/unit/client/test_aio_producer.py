"""The managed producer on asyncio and trio: what the blocking one does, and what is its own (tasks, cancellation)."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest

from holdfast.client.aio import Client
from holdfast.client.aio_producer import Sent
from holdfast.client.outbox import OutboxInUse
from holdfast.client.protocol.commands import Produce
from holdfast.client.protocol.errors import (
    BadValue,
    Indeterminate,
    MessageTooLarge,
    ProducerFenced,
    QueueFull,
    QueueNotFound,
    Unavailable,
)
from tests.fakes.scripted_server import ScriptedServer

Run = Callable[[Callable[[Client, ScriptedServer], Awaitable[None]]], None]


@pytest.fixture(params=["asyncio", "trio"])
def run(request: pytest.FixtureRequest) -> Run:
    """Play a story on one of the two, with a client whose calls take 10 s at most."""

    async def play(story: Callable[[Client, ScriptedServer], Awaitable[None]]) -> None:
        with ScriptedServer() as server:
            async with connected(server) as client:
                await client.create_queue("q")
                with anyio.fail_after(60):
                    await story(client, server)

    return lambda story: anyio.run(partial(play, story), backend=request.param)


@asynccontextmanager
async def connected(server: ScriptedServer, timeout_ms: int = 10_000) -> AsyncIterator[Client]:
    async with Client(server.address, timeout_ms=timeout_ms) as client:
        yield client


async def payloads(client: Client) -> list[bytes]:
    return [message.payload async for message in client.read("q")]


async def wait_for(wanted: Callable[[], bool]) -> None:
    with anyio.fail_after(30):
        while not wanted():
            await anyio.sleep(0.001)  # between two looks


def test_the_example_of_the_design_runs(run: Run) -> None:
    async def story(client: Client, server: ScriptedServer) -> None:
        async with client.producer("q", client_id="svc") as producer:
            assert await producer.send(b"c", key="k", headers={"h": "v"}, delay_ms=0, ttl_ms=None) == 1
            assert await producer.send_many([b"d", b"e"]) == [2, 3]
            sent = [await producer.send_nowait(b"%d" % n) for n in range(100)]
            await producer.flush()
            assert all(each.done() for each in sent)
            assert [await each for each in sent] == list(range(4, 104))
            assert (producer.epoch, producer.high_water) == (1, 103)
        assert len(await payloads(client)) == 103

    run(story)


def test_many_tasks_share_one_producer_and_its_window(run: Run) -> None:
    async def story(client: Client, server: ScriptedServer) -> None:
        told: dict[int, bytes] = {}
        async with client.producer("q", client_id="svc", window=20) as producer, anyio.create_task_group() as group:

            async def work(name: int) -> None:
                for n in range(10):
                    payload = b"%d/%d" % (name, n)
                    told[await producer.send(payload)] = payload

            for name in range(50):
                group.start_soon(work, name)
        stored = await payloads(client)
        assert [told[version + 1] for version in range(len(stored))] == stored
        assert len(stored) == 500

    run(story)


def test_lost_connections_in_the_middle_of_a_window_cost_nothing(run: Run) -> None:
    async def story(client: Client, server: ScriptedServer) -> None:
        async with client.producer("q", client_id="svc", window=8) as producer:
            for turn in range(6):
                server.fail(Produce, "drop_before" if turn % 2 else "drop_after")
                sent = [await producer.send_nowait(b"%d" % (turn * 20 + n)) for n in range(20)]
                assert [await each for each in sent] == list(range(turn * 20 + 1, turn * 20 + 21))
        assert await payloads(client) == [b"%d" % n for n in range(120)]

    run(story)


def test_refusals_are_told_to_those_whom_they_concern(run: Run) -> None:
    async def story(client: Client, server: ScriptedServer) -> None:
        await client.update_queue("q", max_message_bytes=100, max_backlog_messages=3)
        async with client.producer("q", client_id="svc") as producer:
            sent = [await producer.send_nowait(bytes(101 if n == 1 else 1)) for n in range(4)]
            with pytest.raises(MessageTooLarge):
                await producer.flush()
            with pytest.raises(MessageTooLarge):
                await sent[1]
            with pytest.raises(QueueFull):
                await producer.send(b"x")
            assert [await each for each in (sent[0], sent[2], sent[3])] == [1, 2, 3]

    run(story)


def test_a_newer_producer_fences_the_older_one(run: Run) -> None:
    async def story(client: Client, server: ScriptedServer) -> None:
        old = await client.producer("q", client_id="svc").__aenter__()
        async with client.producer("q", client_id="svc") as new:
            for _ in range(2):
                with pytest.raises(ProducerFenced):
                    await old.send(b"1")
            assert await new.send(b"2") == 1
        await old.close()

    run(story)


def test_who_is_cancelled_while_he_waits_for_room_has_sent_nothing(run: Run) -> None:
    async def story(client: Client, server: ScriptedServer) -> None:
        async with client.producer("q", client_id="svc", window=1) as producer:
            server.fail(Produce, "silent_after")
            first = await producer.send_nowait(b"1")
            with anyio.move_on_after(0.05):
                await producer.send(b"2")
            server.drop_connections()
            assert await first == 1
            assert await producer.send(b"3") == 2
        assert await payloads(client) == [b"1", b"3"]

    run(story)


def test_a_cancelled_send_keeps_its_place_in_the_window(run: Run) -> None:
    async def story(client: Client, server: ScriptedServer) -> None:
        async with client.producer("q", client_id="svc") as producer:
            server.fail(Produce, "silent_after")
            with anyio.move_on_after(0.05):
                await producer.send(b"1")
            server.drop_connections()
            assert await producer.send(b"2") == 2
        assert await payloads(client) == [b"1", b"2"]

    run(story)


def test_after_indeterminate_the_producer_goes_on_and_the_flush_waits(run: Run) -> None:
    async def story(client: Client, server: ScriptedServer) -> None:
        async with connected(server, 400) as hasty, hasty.producer("q", client_id="svc") as producer:
            server.frozen = True
            with pytest.raises(Indeterminate):
                await producer.send(b"1")
            with pytest.raises(Indeterminate):
                await producer.flush()
            server.frozen = False
            server.drop_connections()
            assert await producer.send(b"2") == 2
            await producer.flush()
        assert await payloads(client) == [b"1", b"2"]

    run(story)


def test_a_closed_client_ends_its_producer(run: Run) -> None:
    async def story(client: Client, server: ScriptedServer) -> None:
        sent: list[Sent] = []
        with pytest.raises((Indeterminate, Unavailable)):
            async with connected(server) as other, other.producer("q", client_id="svc") as producer:
                server.frozen = True
                sent = [await producer.send_nowait(b"1"), await producer.send_nowait(b"2")]
                await wait_for(lambda: isinstance(getattr(server.arrived[-1], "command", None), Produce))
                await other.close()
        with pytest.raises(Indeterminate):
            await sent[0]
        with pytest.raises((Indeterminate, Unavailable)):
            await sent[1]
        server.frozen = False

    run(story)


def test_a_producer_is_used_in_its_block_alone(run: Run) -> None:
    async def story(client: Client, server: ScriptedServer) -> None:
        producer = client.producer("q", client_id="svc")
        with pytest.raises(BadValue):
            await producer.send(b"1")
        async with producer:
            await producer.send(b"1")
        with pytest.raises(BadValue):
            await producer.send(b"2")
        with pytest.raises(QueueNotFound):
            async with client.producer("nowhere", client_id="svc"):
                raise AssertionError("it was opened")

    run(story)


def test_a_window_that_was_left_is_sent_again_first(run: Run, tmp_path: Path) -> None:
    async def story(client: Client, server: ScriptedServer) -> None:
        async with (
            connected(server) as other,
            other.producer("q", client_id="svc", window=4, outbox=tmp_path / "o") as producer,
        ):
            with pytest.raises(OutboxInUse):
                await client.producer("q", client_id="svc", outbox=tmp_path / "o").__aenter__()
            server.fail(Produce, "silent_after")
            await producer.send_nowait(b"1")
            await wait_for(lambda: server.brain.count(Produce) == 1)
            server.frozen = True
            asked = len(server.arrived)
            await producer.send_nowait(b"2")
            await wait_for(lambda: len(server.arrived) > asked)
            await producer.close()
        server.frozen = False
        async with client.producer("q", client_id="svc", outbox=tmp_path / "o") as producer:
            assert producer.high_water == 2
            assert await producer.send(b"3") == 3
        assert await payloads(client) == [b"1", b"2", b"3"]

    run(story)
