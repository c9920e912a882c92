"""Workers on a real node, on each shell: with threads, and with tasks on asyncio and on trio."""

import asyncio
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import anyio
import pytest

from holdfast.client.blocking import Client
from holdfast.client.inbox import Inbox
from holdfast.client.protocol.errors import BadValue, GroupNotFound, LeaseExpired, QueueNotFound
from holdfast.client.worker import Received, Reject, Retry, Worker
from holdfast.cluster.embedded import Node
from tests.fakes.scripted_server import Brain, ScriptedServer
from tests.support.processes import until
from tests.support.workers import SHELLS, running

NAMES = (f"q{number}" for number in count())
HELD_S = 60.0  # the longest that a handler of a test waits to be told to go on


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with Node(Path(tmp_path_factory.mktemp("node")), fsync="os") as node:
        yield node


@pytest.fixture
def client(node: Node) -> Iterator[Client]:
    with Client(node.address, timeout_ms=10_000) as client:
        yield client


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def queue(client: Client) -> Callable[..., str]:
    def make(messages: int = 0, **settings: Any) -> str:
        name = next(NAMES)
        client.create_queue(name, **settings)
        client.produce(name, [b"%d" % number for number in range(1, messages + 1)])
        return name

    return make


def acked(client: Client, queue: str, count: int) -> None:
    until(lambda: client.stats(queue).acked == count, f"{count} messages are acked")


def held_until_ms(client: Client, queue: str) -> int:
    return int(client.explain(queue, 1).facts["until_ms"] or 0)


# Outcomes ---------------------------------------------------------------------------------------------


def test_every_message_is_handled_and_acked(node: Node, client: Client, queue: Callable[..., str], shell: str) -> None:
    orders = queue(200)
    seen: list[bytes] = []
    with running(shell, node.address, orders, lambda message: seen.append(message.payload), concurrency=7):
        acked(client, orders, 200)
    assert sorted(map(int, seen)) == list(range(1, 201))


def test_a_handler_knows_what_it_has(node: Node, client: Client, queue: Callable[..., str], shell: str) -> None:
    orders = queue(1)
    seen: list[Received] = []
    with running(shell, node.address, orders, seen.append):
        acked(client, orders, 1)
    (message,) = seen
    assert isinstance(message, Received)
    assert (message.queue, message.group, message.version, message.payload) == (orders, "default", 1, b"1")
    assert (message.attempts, message.delivery_count, message.redrives) == (1, 1, 0)
    assert message.lease_id > 0


def test_an_exception_nacks_with_its_type_and_text(
    node: Node, client: Client, queue: Callable[..., str], shell: str
) -> None:
    orders, attempts = queue(1, max_delivery_attempts=3), []

    def handle(message: Received) -> None:
        attempts.append(message.attempts)
        raise ValueError("no such customer \udc80")

    with running(shell, node.address, orders, handle):
        (dead,) = until(lambda: client.dead(orders), "it is dead")
    assert attempts == [1, 2, 3]
    assert (dead.reason, dead.last_error) == ("max_attempts", "ValueError: no such customer ?")


def test_a_failure_comes_back_after_the_groups_backoff(
    node: Node, client: Client, queue: Callable[..., str], shell: str
) -> None:
    orders, times = queue(1), []
    client.update_group(orders, "default", backoff={"kind": "fixed", "base_ms": 400, "cap_ms": 400})

    def handle(message: Received) -> None:
        times.append(datetime.now(UTC))
        if len(times) == 1:
            raise ValueError

    with running(shell, node.address, orders, handle):
        acked(client, orders, 1)
    assert times[1] - times[0] >= timedelta(milliseconds=350)


def test_reject_gives_up_at_once(node: Node, client: Client, queue: Callable[..., str], shell: str) -> None:
    orders = queue(1)

    def handle(message: Received) -> None:
        raise Reject("unknown format")

    with running(shell, node.address, orders, handle):
        (dead,) = until(lambda: client.dead(orders), "it is dead")
    assert (dead.reason, dead.attempts, dead.last_error) == ("rejected", 1, "unknown format")


@pytest.mark.parametrize(
    "later",
    [
        lambda: Retry(timedelta(milliseconds=300)),
        lambda: Retry(0.3),
        lambda: Retry(at=datetime.now(UTC) + timedelta(milliseconds=300)),
    ],
    ids=["timedelta", "seconds", "at"],
)
def test_retry_comes_back_later(
    node: Node, client: Client, queue: Callable[..., str], shell: str, later: Callable[[], Retry]
) -> None:
    orders, times = queue(1), []

    def handle(message: Received) -> None:
        times.append(datetime.now(UTC))
        if message.attempts == 1:
            raise later()

    with running(shell, node.address, orders, handle):
        acked(client, orders, 1)
    assert times[1] - times[0] >= timedelta(milliseconds=250)


def test_a_retry_is_told_its_mistakes() -> None:
    with pytest.raises(BadValue):
        Retry(1, at=datetime.now(UTC))
    with pytest.raises(BadValue, match="time zone"):
        Retry(at=datetime(2030, 1, 1))


def test_a_message_that_was_leased_by_hand_goes_into_an_inbox_too(client: Client, queue: Callable[..., str]) -> None:
    orders = queue(1)
    client.create_group(orders, "audit", start=1)
    with closing(sqlite3.connect(":memory:")) as database:
        inbox = Inbox(database)
        marks = [inbox.once(message) for group in ("default", "audit") for message in client.lease(orders, group)]
    assert marks == [True, True]


# Leases -----------------------------------------------------------------------------------------------


def test_a_lease_is_extended_while_its_handler_runs(
    node: Node, client: Client, queue: Callable[..., str], shell: str
) -> None:
    orders, go, begun = queue(1, visibility_timeout_ms=600), Event(), Event()

    def handle(message: Received) -> None:
        begun.set()
        assert go.wait(HELD_S)

    with running(shell, node.address, orders, handle):
        assert begun.wait(HELD_S)
        first = held_until_ms(client, orders)
        until(lambda: held_until_ms(client, orders) > first + 900, "it was extended more than once")
        go.set()
        acked(client, orders, 1)
    assert client.dead_count(orders) == 0


def test_a_lost_message_is_seen_by_its_handler_and_not_acked(
    node: Node, client: Client, queue: Callable[..., str], shell: str
) -> None:
    orders, begun, errors = queue(1, visibility_timeout_ms=600), Event(), []

    def handle(message: Received) -> None:
        if begun.is_set():
            return
        message.check()
        begun.set()
        until(lambda: message.lost, "it is lost")
        try:
            message.check()
        except LeaseExpired as error:
            errors.append(error.lease_id == message.lease_id)

    with running(shell, node.address, orders, handle, concurrency=1, prefetch=0):
        assert begun.wait(HELD_S)
        client.seek(orders, to="latest")
        until(lambda: errors, "the handler has seen it")
    assert errors == [True]
    assert client.stats(orders).acked == 0


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_lost_message_cancels_its_task(node: Node, client: Client, queue: Callable[..., str], backend: str) -> None:
    orders, begun, cancelled = queue(1, visibility_timeout_ms=600), Event(), Event()

    async def handle(message: Received) -> None:
        begun.set()
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            cancelled.set()
            raise

    with running(backend, node.address, orders, handle):
        assert begun.wait(HELD_S)
        client.seek(orders, to="latest")
        assert cancelled.wait(HELD_S)
    assert client.stats(orders).acked == 0


def test_a_handler_that_waits_for_something_cancelled_fails_alone(
    node: Node, client: Client, queue: Callable[..., str]
) -> None:
    """On asyncio that is a CancelledError in the handler, which nobody has sent to the worker."""
    orders = queue(2, max_delivery_attempts=1)

    async def handle(message: Received) -> None:
        if message.version == 1:
            other = asyncio.ensure_future(asyncio.sleep(HELD_S))
            other.cancel()
            await other

    with running("asyncio", node.address, orders, handle, concurrency=1):
        (dead,) = until(lambda: client.dead(orders), "it is dead")
        acked(client, orders, 1)
    assert (dead.version, dead.last_error) == (1, "CancelledError: ")


def test_where_the_group_counts_begun_only_begun_work_costs_an_attempt(
    node: Node, client: Client, queue: Callable[..., str], shell: str
) -> None:
    orders, go, begun = queue(3, visibility_timeout_ms=60_000), Event(), Event()
    client.update_group(orders, "default", count="begun")

    def handle(message: Received) -> None:
        begun.set()
        assert go.wait(HELD_S)

    with running(shell, node.address, orders, handle, concurrency=1, prefetch=2) as worker:
        assert begun.wait(HELD_S)
        worker.stop(0)
        worker.join()
        until(lambda: client.stats(orders).in_flight == 1, "what had not begun is back")
        assert [(m.version, m.attempts) for m in client.lease(orders)] == [(2, 0), (3, 0)]
        go.set()


# Transactions -----------------------------------------------------------------------------------------


def test_a_transaction_acks_and_produces_in_one_entry(
    node: Node, client: Client, queue: Callable[..., str], shell: str
) -> None:
    orders, billing = queue(3, history=True), queue()

    def handle(message: Received) -> None:
        with message.transaction() as txn:  # type: ignore[attr-defined]
            txn.produce(billing, [b"bill " + message.payload])

    with running(shell, node.address, orders, handle, concurrency=1):
        acked(client, orders, 3)
        until(lambda: client.stats(billing).ready == 3, "the bills are there")
    assert [row.kind for row in client.history(orders)].count("ack") == 3


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_task_takes_part_in_a_transaction(
    node: Node, client: Client, queue: Callable[..., str], backend: str
) -> None:
    orders, billing = queue(3), queue()

    async def handle(message: Any) -> None:
        async with message.transaction() as txn:
            txn.produce(billing, [b"bill"])

    with running(backend, node.address, orders, handle):
        acked(client, orders, 3)
    assert client.stats(billing).ready == 3


def test_a_transaction_that_fails_has_done_nothing_and_nacks(
    node: Node, client: Client, queue: Callable[..., str], shell: str
) -> None:
    orders, billing = queue(1), queue()

    def handle(message: Received) -> None:
        with message.transaction() as txn:  # type: ignore[attr-defined]
            txn.produce(billing, [b"attempt %d" % message.attempts])
            if message.attempts == 1:
                raise ValueError

    with running(shell, node.address, orders, handle):
        acked(client, orders, 1)
    assert [message.payload for message in client.peek(billing)] == [b"attempt 2"]


def test_a_failure_after_the_transaction_does_not_bring_the_message_back(
    node: Node, client: Client, queue: Callable[..., str], shell: str
) -> None:
    orders, billing, seen = queue(1), queue(), []

    def handle(message: Received) -> None:
        seen.append(message.attempts)
        with message.transaction() as txn:  # type: ignore[attr-defined]
            txn.produce(billing, [b"bill"])
        raise ValueError

    with running(shell, node.address, orders, handle):
        acked(client, orders, 1)
    assert seen == [1]
    assert client.stats(billing).ready == 1


# Stopping ---------------------------------------------------------------------------------------------


def test_stop_drains_and_hands_back_at_once_what_was_not_begun(
    node: Node, client: Client, queue: Callable[..., str], shell: str
) -> None:
    orders, go, begun = queue(5, visibility_timeout_ms=600_000), Event(), Event()

    def handle(message: Received) -> None:
        begun.set()
        assert go.wait(HELD_S)

    with running(shell, node.address, orders, handle, concurrency=1, prefetch=4) as worker:
        assert begun.wait(HELD_S)
        worker.stop()
        until(lambda: client.stats(orders).ready == 4, "the others are available again")
        assert [message.attempts for message in client.lease(orders)] == [1, 1, 1, 1]
        go.set()
        worker.join()
        assert client.stats(orders).acked == 1


def test_stop_gives_up_what_runs_too_long(node: Node, client: Client, queue: Callable[..., str], shell: str) -> None:
    orders, go, begun = queue(1), Event(), Event()

    def handle(message: Received) -> None:
        begun.set()
        assert go.wait(HELD_S)

    with running(shell, node.address, orders, handle) as worker:
        assert begun.wait(HELD_S)
        worker.stop(50)
        worker.join()
        assert client.stats(orders).acked == 0
        assert client.stats(orders).in_flight == 1
        go.set()


def test_an_idle_worker_stops_at_once_and_leaves_no_lease_behind(
    node: Node, client: Client, queue: Callable[..., str], shell: str
) -> None:
    orders = queue(0, visibility_timeout_ms=600_000)
    with running(shell, node.address, orders, print, wait_ms=600_000) as worker:
        client.stats(orders)
        worker.stop()
        worker.join()
    client.produce(orders, [b"later"])
    assert [message.payload for message in client.lease(orders)] == [b"later"]


def test_a_handler_may_stop_its_worker(node: Node, client: Client, queue: Callable[..., str], shell: str) -> None:
    orders = queue(3)
    with running(shell, node.address, orders, lambda _: worker.stop(), concurrency=1, prefetch=0) as worker:
        worker.join()
    assert client.stats(orders).acked == 1


def test_a_group_that_is_not_there_is_raised(node: Node, queue: Callable[..., str], shell: str) -> None:
    with pytest.raises(GroupNotFound), running(shell, node.address, queue(), print, group="other") as worker:
        worker.join()


def test_a_queue_that_is_deleted_is_raised(node: Node, client: Client, queue: Callable[..., str], shell: str) -> None:
    orders = queue(1)
    with pytest.raises(QueueNotFound), running(shell, node.address, orders, print) as worker:
        acked(client, orders, 1)
        client.delete_queue(orders)
        worker.join()


def test_a_worker_runs_once(client: Client, queue: Callable[..., str]) -> None:
    worker = Worker(client, queue(), print)
    worker.stop()
    worker.run()
    with pytest.raises(BadValue):
        worker.run()


@pytest.mark.parametrize("wrong", [{"concurrency": 0}, {"prefetch": -1}, {"max_run_ms": 0}])
def test_a_wrong_option_is_refused(client: Client, wrong: dict[str, Any]) -> None:
    with pytest.raises(BadValue):
        Worker(client, "q", print, **wrong)


def test_a_coroutine_function_needs_the_async_client(client: Client) -> None:
    async def handle(message: Received) -> None: ...

    with pytest.raises(BadValue, match="coroutine"):
        Worker(client, "q", handle)


def test_what_a_handler_only_made_and_did_not_run_is_not_acked(
    node: Node, client: Client, queue: Callable[..., str], shell: str
) -> None:
    orders = queue(1, max_delivery_attempts=1)
    with running(shell, node.address, orders, lambda message: (part for part in message.payload)):
        (dead,) = until(lambda: client.dead(orders), "it is dead")
    assert dead.last_error == "the handler gave a generator: nothing of it has run"


# Done already -----------------------------------------------------------------------------------------


def test_what_was_done_too_late_for_its_ack_is_acked_when_it_comes_again(shell: str) -> None:
    """The lease has run out in the cluster when the handler returns; its worker knows the message again."""
    brain = Brain()
    seen: list[tuple[int, int]] = []

    def handle(message: Received) -> None:
        seen.append((message.version, message.attempts))
        brain.pass_ms(30_001)

    with ScriptedServer(brain=brain) as server, Client(server.address, timeout_ms=10_000) as client:
        client.create_queue("orders", visibility_timeout_ms=30_000)
        client.produce("orders", [b"1"])
        with running(shell, server.address, "orders", handle, concurrency=1, prefetch=0):
            acked(client, "orders", 1)
    assert seen == [(1, 1)]


def test_what_comes_again_by_a_seek_is_done_again(
    node: Node, client: Client, queue: Callable[..., str], shell: str
) -> None:
    orders = queue(2, replay_ms=600_000)
    seen: list[int] = []
    with running(shell, node.address, orders, lambda message: seen.append(message.version)):
        acked(client, orders, 2)
        client.seek(orders, to=1)
        until(lambda: len(seen) == 4, "both are done again")
    assert sorted(seen) == [1, 1, 2, 2]


def test_what_comes_again_by_a_redrive_is_done_again(
    node: Node, client: Client, queue: Callable[..., str], shell: str
) -> None:
    orders = queue(1, max_delivery_attempts=1)
    seen: list[tuple[int, int]] = []

    def handle(message: Received) -> None:
        seen.append((message.attempts, message.redrives))
        if not message.redrives:
            raise ValueError

    with running(shell, node.address, orders, handle):
        until(lambda: client.dead(orders), "it is dead")
        client.redrive(orders)
        acked(client, orders, 1)
    assert seen == [(1, 0), (1, 1)]


def test_signals_are_left_alone_where_told(client: Client, queue: Callable[..., str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []
    orders = queue(1)

    def handle(message: Received) -> None:
        seen.append(signal.getsignal(signal.SIGTERM))
        worker.stop()

    worker = Worker(client, orders, handle, handle_signals=False)
    worker.run()
    assert seen == [before]


def test_signals_are_those_of_before_when_it_has_run(client: Client, queue: Callable[..., str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def handle(message: Received) -> None:
        seen.append(signal.getsignal(signal.SIGTERM))
        worker.stop()

    worker = Worker(client, queue(1), handle)
    worker.run()
    assert seen != [before]
    assert signal.getsignal(signal.SIGTERM) is before
