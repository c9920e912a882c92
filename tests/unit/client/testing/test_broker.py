"""The test kit: a real node inside this process, whose clock a test moves. What falls due does so as in time."""

import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from threading import Thread

import pytest

from holdfast.client.blocking import Client
from holdfast.client.calls import Stats
from holdfast.client.protocol.errors import BadValue, LeaseExpired, Misuse
from holdfast.client.testing.broker import Broker
from holdfast.cluster.embedded import Node
from tests.support.processes import until

HOUR_S = 3_600


@pytest.fixture
def broker() -> Iterator[Broker]:
    """One whose time passes only by `advance`, so that a slow machine changes nothing here."""
    with Broker() as broker:
        broker.clock.stop()
        yield broker


@pytest.fixture
def client(broker: Broker) -> Client:
    return broker.client(consumer_id="tester")


def polling(broker: Broker, client: Client, queue: str, wait_ms: int) -> tuple[Thread, list[list[bytes]]]:
    """A long poll in a thread, parked when this returns; what it got, once it has ended."""
    got: list[list[bytes]] = []

    def poll() -> None:
        got.append([message.payload for message in client.lease(queue, wait_ms=wait_ms)])

    thread = Thread(target=poll)
    thread.start()
    until(lambda: broker.parked, "the poll is parked")
    return thread, got


def test_a_delayed_message_comes_at_its_time_and_not_before(broker: Broker, client: Client) -> None:
    client.create_queue("q")
    client.produce("q", [b"later"], delay_ms=10_000)
    broker.clock.advance(9.999)
    assert not client.lease("q")
    broker.clock.advance(0.001)
    assert [message.payload for message in client.lease("q")] == [b"later"]


def test_a_lease_expires_at_its_deadline_and_counts_an_attempt(broker: Broker, client: Client) -> None:
    client.create_queue("q", visibility_timeout_ms=30_000)
    client.produce("q", [b"a"])
    lease = client.lease("q")
    broker.clock.advance(29.999)
    lease.extend()
    broker.clock.advance(29.999)
    assert not client.lease("q")
    broker.clock.advance(0.001)
    with pytest.raises(LeaseExpired):
        lease.ack()
    assert [message.attempts for message in client.lease("q")] == [2]


def test_a_message_dies_of_as_many_attempts_as_it_has(broker: Broker, client: Client) -> None:
    client.create_queue("q", visibility_timeout_ms=1_000, max_delivery_attempts=3)
    client.produce("q", [b"poison"])
    for attempt in (1, 2, 3):
        assert [message.attempts for message in client.lease("q")] == [attempt]
        broker.clock.advance(1)
    assert not client.lease("q")
    assert [(row.reason, row.attempts, row.last_error) for row in client.dead("q")] == [
        ("max_attempts", 3, "lease expired")
    ]


@pytest.mark.parametrize("seconds", [12 * HOUR_S, 2 * HOUR_S, HOUR_S + 1])
def test_hours_pass_for_an_open_lease_too(broker: Broker, client: Client, seconds: int) -> None:
    """T1: one stamp brings an hour at most, and a step expires no lease. So every hour gets its stamp."""
    client.create_queue("q", visibility_timeout_ms=seconds * 1_000)
    client.produce("q", [b"a"])
    lease = client.lease("q")
    broker.clock.advance(seconds - 0.001)
    assert client.stats("q").in_flight == 1
    broker.clock.advance(0.001)
    assert (client.stats("q").in_flight, client.stats("q").ready) == (0, 1)
    with pytest.raises(LeaseExpired):
        lease.ack()


def test_a_week_passes_where_nothing_is_open(broker: Broker, client: Client) -> None:
    client.create_queue("q")
    client.produce("q", [b"a"], delay_ms=7 * 24 * HOUR_S * 1_000)
    before_ms = client.stats("q").as_of_ms
    broker.clock.advance(timedelta(days=7, milliseconds=-1))
    assert client.stats("q").delayed == 1
    broker.clock.advance(timedelta(milliseconds=1))
    assert client.stats("q").ready == 1
    assert client.stats("q").as_of_ms == before_ms + 7 * 24 * HOUR_S * 1_000
    lease = client.lease("q")  # a lease from after the leap lasts as long as any
    broker.clock.advance(29.999)
    lease.ack()


def test_a_long_poll_is_answered_by_what_falls_due_while_it_waits(broker: Broker, client: Client) -> None:
    client.create_queue("q")
    client.produce("q", [b"later"], delay_ms=10_000)
    thread, got = polling(broker, client, "q", wait_ms=20_000)
    broker.clock.advance(10)
    thread.join()
    assert got == [[b"later"]]


def test_what_falls_due_before_a_wait_ends_is_handed_out_though_both_are_in_one_move(
    broker: Broker, client: Client
) -> None:
    client.create_queue("q", visibility_timeout_ms=15_000)
    client.produce("q", [b"a"])
    client.lease("q")
    thread, got = polling(broker, client, "q", wait_ms=20_000)
    broker.clock.advance(60)
    thread.join()
    assert got == [[b"a"]]


def test_a_long_poll_that_finds_nothing_ends_when_its_time_has_passed(broker: Broker, client: Client) -> None:
    client.create_queue("q")
    client.produce("q", [b"later"], delay_ms=20_001)
    thread, got = polling(broker, client, "q", wait_ms=20_000)
    broker.clock.advance(19.999)
    assert broker.parked
    broker.clock.advance(60)
    thread.join()
    assert got == [[]]


def test_moved_dead_letters_are_in_their_queue_when_the_move_is_over(broker: Broker, client: Client) -> None:
    """T3: what falls due moves to another queue though nobody asks."""
    client.create_queue("graves")
    client.create_queue("q", dlq_strategy="move", dlq_queue="graves", max_delivery_attempts=1)
    client.produce("q", [b"a"])
    client.lease("q", visibility_timeout_ms=1_000)
    broker.clock.advance(2)
    assert client.stats("graves").ready == 1


def test_backoff_grows_as_time_would_show(broker: Broker, client: Client) -> None:
    client.create_queue("q", backoff={"kind": "exponential", "base_ms": 1_000, "cap_ms": 8_000})
    client.produce("q", [b"a"])
    for wait_s in (1, 2, 4, 8):
        client.lease("q").nack()
        broker.clock.advance(wait_s - 0.001)
        assert not client.lease("q")
        broker.clock.advance(0.001)
    assert [message.attempts for message in client.lease("q")] == [5]


def test_a_clock_that_runs_moves_too_and_goes_on_where_it_stood() -> None:
    with Broker() as broker:
        client = broker.client()
        client.create_queue("q")

        def now_ms() -> int:
            client.produce("q", [b"a"])  # an entry, and so a stamp
            found: Stats = client.stats("q")
            return found.as_of_ms

        begun_ms = now_ms()
        broker.clock.advance(HOUR_S)
        broker.clock.stop()
        moved_ms = now_ms()
        assert moved_ms >= begun_ms + HOUR_S * 1_000
        assert now_ms() == moved_ms
        broker.clock.go()
        assert now_ms() >= moved_ms


def test_time_never_goes_back(broker: Broker) -> None:
    with pytest.raises(BadValue):
        broker.clock.advance(-1)


def test_a_node_has_a_clock_of_its_own_only_if_it_is_given_one(tmp_path: Path) -> None:
    with Node(tmp_path) as node, pytest.raises(Misuse):
        node.advance(1)


def test_a_broker_that_has_ended_has_no_clock() -> None:
    with Broker() as broker:
        pass
    with pytest.raises(Misuse):
        broker.clock.advance(1)


def test_each_broker_has_its_own_messages_and_its_own_time(broker: Broker) -> None:
    with Broker() as other:
        other.clock.advance(HOUR_S)
        mine, theirs = broker.client(), other.client()
        mine.create_queue("q")
        assert theirs.queues() == []
        theirs.create_queue("q")
        mine.produce("q", [b"a"])
        theirs.produce("q", [b"a"])
        assert theirs.stats("q").as_of_ms - mine.stats("q").as_of_ms >= HOUR_S * 1_000


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Broker() as broker:
        client = broker.client()
        client.create_queue("q")
        assert list(tmp_path.iterdir())
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(BadValue, match="closed"):
        client.queues()


@pytest.mark.slow
def test_the_fixture_is_there_for_who_imports_it(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from holdfast.client.testing.fixtures import broker  # noqa: F401\n")
    (tmp_path / "test_it.py").write_text(
        """
def test_retry(broker):
    client = broker.client()
    client.create_queue("q")
    client.produce("q", [b"a"], delay_ms=60_000)
    assert not client.lease("q")
    broker.clock.advance(60)
    assert client.lease("q")


def test_each_test_begins_empty(broker):
    assert broker.client().queues() == []
"""
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "2 passed" in done.stdout, done.stdout + done.stderr
