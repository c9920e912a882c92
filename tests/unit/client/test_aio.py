"""The async client on trio and on asyncio: what is its own beside the calls, which the conformance suite has."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator

import anyio
import pytest

from holdfast.client.aio import Client
from holdfast.client.protocol.commands import Produce
from holdfast.client.protocol.errors import BadValue, Indeterminate
from tests.fakes.scripted_server import ScriptedServer

Run = Callable[[Callable[[], Awaitable[None]]], None]


@pytest.fixture(params=["trio", "asyncio"])
def run(request: pytest.FixtureRequest) -> Run:
    return lambda main: anyio.run(main, backend=request.param)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


def test_a_message_goes_through(run: Run, server: ScriptedServer) -> None:
    async def main() -> None:
        async with Client(server.address, timeout_ms=10_000) as client:
            await client.create_queue("q")
            assert (await client.produce("q", [b"1", b"2"])).versions == [1, 2]
            lease = await client.lease("q")
            assert [message.payload for message in lease] == [b"1", b"2"]
            async with client.transaction() as txn:
                txn.ack(lease)
                txn.produce("q", [b"3"])
            assert txn.versions == {"q": [3]}
            assert [message.version async for message in client.read("q", from_version=3)] == [3]
            assert (await client.status()).leader == "n1"

    run(main)


def test_requests_of_many_tasks_share_one_connection(run: Run, server: ScriptedServer) -> None:
    made: list[int] = []

    async def main() -> None:
        async with Client(server.address, timeout_ms=10_000) as client:
            await client.create_queue("q")

            async def produce(number: int) -> None:
                made.extend((await client.produce("q", [b"%d" % number] * 3)).versions)

            async with anyio.create_task_group() as group:
                for number in range(100):
                    group.start_soon(produce, number)

    run(main)
    assert sorted(made) == list(range(1, 301))
    assert server.connections == 1


def test_what_ends_the_block_comes_out_as_it_is(run: Run, server: ScriptedServer) -> None:
    async def main() -> None:
        async with Client(server.address) as client:
            await client.create_queue("q")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(main)


def test_a_timeout_around_the_block_ends_it(run: Run, server: ScriptedServer) -> None:
    async def main() -> None:
        with anyio.move_on_after(0.2) as scope:
            async with Client(server.address) as client:
                server.fail(Produce, "silent_after")
                await client.create_queue("q")
                await client.produce("q", [b"1"])
        assert scope.cancelled_caught

    run(main)


def test_asyncios_own_timeouts_and_cancellations_withdraw_a_lease_too(server: ScriptedServer) -> None:
    async def main() -> None:
        async with Client(server.address) as client:
            await client.create_queue("q")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.lease("q", wait_ms=20_000), 0.05)
            await asyncio.to_thread(server.await_parked, 0)
            task = asyncio.create_task(client.lease("q", wait_ms=20_000))
            await asyncio.to_thread(server.await_parked)
            task.cancel()
            await asyncio.to_thread(server.await_parked, 0)
            await client.produce("q", [b"1"])
            assert [message.attempts for message in await client.lease("q")] == [1]

    asyncio.run(main())


def test_closing_frees_who_waits(run: Run, server: ScriptedServer) -> None:
    async def main() -> None:
        async with Client(server.address) as client:
            await client.create_queue("q")
            server.fail(Produce, "silent_after")
            refused = anyio.Event()

            async def produce() -> None:
                with pytest.raises(Indeterminate):
                    await client.produce("q", [b"1"])
                refused.set()

            async with anyio.create_task_group() as group:
                group.start_soon(produce)
                await anyio.to_thread.run_sync(server.await_applied, Produce)
                await client.close()
                await client.close()
            assert refused.is_set()
            with pytest.raises(BadValue, match="closed"):
                await client.queues()

    run(main)


def test_a_client_outside_its_block_is_refused(run: Run, server: ScriptedServer) -> None:
    async def main() -> None:
        client = Client(server.address)
        with pytest.raises(BadValue, match="async with"):
            await client.queues()
        async with client:
            assert await client.queues() == []
        with pytest.raises(BadValue, match="closed"):
            await client.queues()
        with pytest.raises(BadValue, match="entered before"):
            await client.__aenter__()

    run(main)


def test_in_a_forked_child_the_client_is_refused(run: Run, server: ScriptedServer) -> None:
    async def main() -> None:
        async with Client(server.address) as client:
            await client.create_queue("q")
            child = os.fork()
            if child == 0:
                signal.alarm(20)  # a child that waits for tasks it does not have is a failure, not a hang
                code = 1
                try:
                    client.queues().send(None)
                except BadValue as refusal:
                    code = "fork" not in str(refusal)
                finally:
                    os._exit(code)
            status = await anyio.to_thread.run_sync(os.waitpid, child, 0)
            assert os.waitstatus_to_exitcode(status[1]) == 0
            assert await client.queues() == ["q"]

    run(main)
