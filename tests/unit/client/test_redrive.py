"""Redrive in steps: parked and moved ones, at a rate, stopped half-way and asked for again (D4)."""

from collections.abc import Iterator

import pytest

from holdfast.client.blocking import Client
from holdfast.client.calls import Redriven
from holdfast.client.protocol.commands import Redrive as RedriveCommand
from holdfast.client.protocol.errors import BadFilter, BadValue, OriginGone
from holdfast.client.redrive import STEP_MESSAGES, Pace
from tests.fakes.scripted_server import ScriptedServer


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[Client]:
    with Client(server.address, timeout_ms=10_000) as client:
        yield client


def bury(client: Client, queue: str, count: int, group: str = "default", error: str = "boom") -> None:
    """Produce so many and give them up at once."""
    client.produce(queue, [b"m%d" % number for number in range(count)])
    left = count
    while left:
        lease = client.lease(queue, group=group, max_messages=min(left, 1_000))
        lease.nack(dead=True, error=error)
        left -= len(lease)


def moving(client: Client, queue: str, count: int, **settings: object) -> None:
    """A queue whose dead letters go to `graves`, with so many of them there."""
    if "graves" not in client.queues():
        client.create_queue("graves")
    client.create_queue(queue, dlq_strategy="move", dlq_queue="graves", **settings)
    bury(client, queue, count)


# Pace --------------------------------------------------------------------------------------------------


def test_without_a_rate_nothing_is_waited_for() -> None:
    pace = Pace(None)
    assert (pace.messages, pace.pause_s(5.0)) == (STEP_MESSAGES, 0.0)
    pace.took(1_000, 5.0)
    assert pace.pause_s(5.0) == 0.0


def test_a_rate_spaces_the_steps_and_does_not_make_up_for_a_pause() -> None:
    pace = Pace(100)
    assert (pace.messages, pace.pause_s(5.0)) == (25, 0.0)
    pace.took(25, 5.0)
    assert pace.pause_s(5.0) == 0.25
    assert pace.pause_s(5.125) == 0.125
    assert pace.pause_s(500.0) == 0.0
    pace.took(25, 500.0)
    assert pace.pause_s(500.0) == 0.25


def test_a_slow_rate_is_one_message_a_step() -> None:
    pace = Pace(0.5)
    assert pace.messages == 1
    pace.took(1, 0.0)
    assert pace.pause_s(0.0) == 2.0


@pytest.mark.parametrize("rate", [0, -1, float("inf"), float("nan")])
def test_a_rate_is_above_nothing(client: Client, rate: float) -> None:
    with pytest.raises(BadValue):
        client.redrive("q", rate=rate)


# Parked ------------------------------------------------------------------------------------------------


def test_a_rate_makes_small_steps_with_pauses_between(client: Client) -> None:
    client.create_queue("q")
    bury(client, "q", 10)
    pauses: list[float] = []
    totals = list(client.redrive_steps("q", rate=12, pause=pauses.append))
    assert totals[0] == Redriven(3, 3)
    assert totals[-1] == Redriven(10, 10)
    assert len(totals) == 4 == len(pauses)
    assert pauses[0] == 0.0
    assert all(0.2 < pause <= 0.25 for pause in pauses[1:])


def test_a_redrive_that_was_stopped_goes_on_when_asked_again(client: Client, server: ScriptedServer) -> None:
    """D4: nothing is lost and nothing doubled by stopping between two steps."""
    client.create_queue("q")
    bury(client, "q", 10)
    for total in client.redrive_steps("q", rate=16, pause=lambda seconds: None):
        if total.redriven == 8:
            break
    assert client.stats("q").dead == 2
    assert client.redrive("q") == Redriven(2, 2)
    assert (client.stats("q").ready, client.stats("q").dead) == (10, 0)
    assert server.brain.count(RedriveCommand) == 3


def test_a_message_that_dies_again_meanwhile_is_left_alone(client: Client, server: ScriptedServer) -> None:
    client.create_queue("q")
    bury(client, "q", 4)
    steps = client.redrive_steps("q", rate=8, pause=lambda seconds: None)
    assert next(steps) == Redriven(2, 2)
    server.brain.pass_ms(1)
    client.lease("q").nack(dead=True)  # the first two, once more
    assert list(steps)[-1] == Redriven(4, 4)
    assert client.stats("q").dead == 2


def test_a_dry_run_counts_without_reading_what_it_counts(client: Client, server: ScriptedServer) -> None:
    client.create_queue("q")
    bury(client, "q", 3)
    assert client.redrive("q", dry_run=True) == Redriven(3, 0)
    assert server.brain.count(RedriveCommand) == 0


# Moved -------------------------------------------------------------------------------------------------


def test_moved_messages_go_home_by_a_filter_on_their_lineage(client: Client) -> None:
    moving(client, "orders", 3)
    moving(client, "billing", 2)
    assert client.redrive("graves", where="origin_queue = 'billing'", to_origin=True, dry_run=True) == Redriven(2, 0)
    assert client.redrive("graves", where="origin_queue = 'billing'", to_origin=True) == Redriven(2, 2)
    assert (client.stats("billing").ready, client.stats("orders").ready) == (2, 0)
    assert client.redrive("graves", where="last_error = 'other'", to_origin=True) == Redriven(0, 0)
    assert client.redrive("graves", where="reason = 'rejected' and origin_version <= 2", to_origin=True).redriven == 2
    assert [message.payload for message in client.lease("orders")] == [b"m0", b"m1"]
    assert client.stats("graves").ready == 1


def test_what_is_leased_in_the_dead_letter_queue_stays(client: Client) -> None:
    moving(client, "orders", 3)
    held = client.lease("graves", max_messages=1)
    assert client.redrive("graves", to_origin=True) == Redriven(2, 2)
    held.release()
    assert client.redrive("graves", to_origin=True) == Redriven(1, 1)


def test_a_message_that_never_moved_has_no_home(client: Client) -> None:
    moving(client, "orders", 1)
    client.produce("graves", [b"by hand"])
    assert client.redrive("graves", to_origin=True) == Redriven(1, 1)
    assert client.stats("graves").ready == 1


def test_an_origin_that_is_full_ends_the_redrive_with_what_was_done(client: Client) -> None:
    """D4: what it could not take stays, and goes home when asked again."""
    moving(client, "orders", 5)
    client.update_queue("orders", max_backlog_messages=2)
    steps = client.redrive_steps("graves", to_origin=True)
    assert next(steps) == Redriven(2, 2)
    with pytest.raises(OriginGone) as refused:
        next(steps)
    assert refused.value.problem == "full"
    client.lease("orders").ack()
    client.update_queue("orders", max_backlog_messages=None)
    assert client.redrive("graves", to_origin=True) == Redriven(3, 3)
    assert sorted(message.payload for message in client.lease("orders")) == [b"m2", b"m3", b"m4"]


def test_what_dies_again_while_it_goes_home_is_not_sent_home_for_ever(client: Client) -> None:
    moving(client, "orders", 3)
    steps = client.redrive_steps("graves", to_origin=True, rate=4, pause=lambda seconds: None)
    total = Redriven(0, 0)
    for number, found in enumerate(steps):
        assert number < 5
        total = found
        client.lease("orders").nack(dead=True)
    assert total == Redriven(3, 3)
    assert client.stats("graves").ready == 3


def test_a_filter_that_is_wrong_is_refused_before_anything_moves(client: Client) -> None:
    moving(client, "orders", 1)
    with pytest.raises(BadFilter):
        client.redrive("graves", where="attempts = 'x'", to_origin=True)
    assert client.stats("graves").ready == 1
