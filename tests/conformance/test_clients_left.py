"""Callers that go while they wait, cancelled or interrupted: no lease is left behind, and no attempt is charged."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import anyio
import anyio.abc
import pytest

from holdfast.client import aio, blocking
from holdfast.client.protocol.commands import AckBatch, Lease, Produce, Release
from holdfast.cluster.embedded import Node
from tests.conformance.shells import in_thread
from tests.fakes.scripted_server import Brain, Fate, ScriptedServer

WAIT_MS = 20_000
BACKENDS = ["trio", "asyncio"]


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


def filled(address: str, *payloads: bytes) -> None:
    with blocking.Client(address) as client:
        client.create_queue("q")
        client.produce("q", list(payloads))


def counts(address: str) -> tuple[int, int, int]:
    """As another client sees it: ready, in flight, acked."""
    with blocking.Client(address) as client:
        stats = client.stats("q")
        return stats.ready, stats.in_flight, stats.acked


def next_attempt(address: str) -> tuple[int, int]:
    """Delivery count and attempts of the first message, when it is leased now."""
    with blocking.Client(address) as client:
        (message,) = client.lease("q", max_messages=1)
        return message.delivery_count, message.attempts


Waiting = Callable[[Any], Any]


def leasing(client: Any) -> Any:
    return client.lease("q", wait_ms=WAIT_MS)


def left(shell: str, address: str, waiting: Waiting, when: Callable[[], None], then: Callable[[], None]) -> None:
    """Somebody waits on a client of this shell, and goes after `when`; the client lives on until `then`."""
    if shell == "blocking":
        interrupted(address, waiting, when, then)
    else:
        anyio.run(partial(cancelled, address, waiting, when, then), backend=shell)


async def cancelled(address: str, waiting: Waiting, when: Callable[[], None], then: Callable[[], None]) -> None:
    async with aio.Client(address, timeout_ms=20_000) as client:
        await client.queue("q")
        async with anyio.create_task_group() as group:
            group.start_soon(waiting, client)
            await in_thread(when)
            group.cancel_scope.cancel()
        await in_thread(then)
        assert await client.queues() == ["q"]


def interrupted(address: str, waiting: Waiting, when: Callable[[], None], then: Callable[[], None]) -> None:
    """Ctrl-C, as the main thread of a script meets it."""

    def interrupt() -> None:
        when()
        os.kill(os.getpid(), signal.SIGINT)

    with blocking.Client(address, timeout_ms=20_000) as client:
        client.queue("q")
        thread = Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            waiting(client)
        thread.join()
        then()
        assert client.queues() == ["q"]


shells = pytest.mark.parametrize("shell", [*BACKENDS, "blocking"])


@shells
def test_a_parked_lease_is_gone_with_its_caller(shell: str, server: ScriptedServer) -> None:
    """L7: who does not wait any more gets nothing."""
    filled(server.address)
    left(shell, server.address, leasing, server.await_parked, partial(server.await_parked, 0))
    filled_again(server.address)
    assert counts(server.address) == (1, 0, 0)
    assert next_attempt(server.address) == (1, 1)


def filled_again(address: str) -> None:
    with blocking.Client(address) as client:
        client.produce("q", [b"1"])


@shells
def test_a_lease_that_was_granted_meanwhile_is_released(shell: str, server: ScriptedServer) -> None:
    """L7: It crosses its withdrawal; the release costs no attempt."""
    filled(server.address, b"1")
    server.fail(Lease, "late")
    left(
        shell,
        server.address,
        leasing,
        partial(server.await_applied, Lease),
        partial(server.await_applied, Release),
    )
    assert counts(server.address) == (1, 0, 0)
    assert next_attempt(server.address) == (2, 1)


@shells
def test_a_lease_whose_answer_is_lost_after_its_caller_went_is_found_and_released(
    shell: str, server: ScriptedServer
) -> None:
    """L7, L4: found under its number, not granted anew."""
    filled(server.address, b"1")
    server.fail(Lease, "silent_after")

    def released() -> None:
        server.drop_connections()
        server.await_applied(Release, times=2)  # in place of the lease, and of what it held

    left(shell, server.address, leasing, partial(server.await_applied, Lease), released)
    assert counts(server.address) == (1, 0, 0)
    assert next_attempt(server.address) == (2, 1)


@shells
@pytest.mark.parametrize("fate", ["silent_before", "silent_after"])
def test_a_lease_left_on_a_frozen_leader_is_undone_at_the_next_one(shell: str, fate: Fate) -> None:
    with ExitStack() as stack:
        brain = Brain()
        nodes = [stack.enter_context(ScriptedServer(brain, name)) for name in ("n1", "n2")]
        for node in nodes:
            node.leader = nodes[0].address
        filled(nodes[0].address, b"1")
        nodes[0].fail(Lease, fate)

        def frozen() -> None:
            nodes[0].await_arrived(Lease)
            if fate == "silent_after":
                nodes[0].await_applied(Lease)
            nodes[0].frozen = True
            for node in nodes:
                node.leader = nodes[1].address

        def undone() -> None:
            nodes[1].await_applied(Release, times=2 if fate == "silent_after" else 1)

        left(shell, ",".join(node.address for node in nodes), leasing, frozen, undone)
        assert counts(nodes[1].address) == (1, 0, 0)
        assert next_attempt(nodes[1].address) == ((2, 1) if fate == "silent_after" else (1, 1))


@shells
def test_a_command_that_was_sent_happens_at_most_once_and_the_client_goes_on(
    shell: str, server: ScriptedServer
) -> None:
    filled(server.address)
    server.fail(Produce, "silent_after")
    left(
        shell,
        server.address,
        lambda client: client.produce("q", [b"1"]),
        partial(server.await_applied, Produce),
        server.drop_connections,
    )
    filled_again(server.address)
    assert counts(server.address) == (2, 0, 0)
    assert server.brain.count(Produce) == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cancelled_block_of_a_client_leaves_no_lease_behind(backend: str, server: ScriptedServer) -> None:
    """Everything is cancelled at once: the calls, the block, and the task that it is in."""
    filled(server.address, b"1")
    server.fail(Lease, "late")

    async def main() -> None:
        with anyio.CancelScope() as scope:

            async def stop() -> None:
                await in_thread(server.await_applied, Lease)
                scope.cancel()

            async with anyio.create_task_group() as group:
                group.start_soon(stop)
                async with aio.Client(server.address) as client:
                    await leasing(client)
        assert scope.cancelled_caught

    anyio.run(main, backend=backend)
    assert server.brain.count(Release) == 1
    assert counts(server.address) == (1, 0, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cancelled_consumer_hands_back_what_it_holds(backend: str, server: ScriptedServer) -> None:
    filled(server.address, b"1", b"2", b"3")

    async def main() -> None:
        async with aio.Client(server.address) as client:
            with anyio.CancelScope() as scope:
                async with client.consume("q") as messages:
                    async for message in messages:
                        await message.ack()
                        scope.cancel()
            assert scope.cancelled_caught

    anyio.run(main, backend=backend)
    assert server.brain.count(AckBatch) == 1
    assert counts(server.address) == (2, 0, 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hundred_that_are_cancelled_leave_nothing_on_a_real_node(backend: str, tmp_path: Path) -> None:
    """L7: Half of them parked, half of them in a race with the messages that come."""

    async def main() -> None:
        async with aio.Client(node.address) as client, aio.Client(node.address) as other:

            async def waiting(*, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
                task_status.started()
                await client.lease("q", max_messages=1, wait_ms=WAIT_MS)

            for _ in range(10):
                async with anyio.create_task_group() as group:
                    for _ in range(10):
                        await group.start(waiting)
                    await other.produce("q", [b"x"] * 5)
                    group.cancel_scope.cancel()

    with Node(tmp_path, fsync="os") as node:
        filled(node.address)
        anyio.run(main, backend=backend)
        ready, in_flight, _ = counts(node.address)
        assert ready + in_flight == 50
        with blocking.Client(node.address) as client:
            taken = [message for message in client.lease("q", max_messages=100)]
        assert len(taken) == ready and all(message.attempts == 1 for message in taken)
