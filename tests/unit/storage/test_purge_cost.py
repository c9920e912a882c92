"""Rule G5: what a purge and a seek cost, in operations of the store, is the same whatever is open."""

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.client.protocol.columns import MessageParts
from holdfast.client.protocol.commands import (
    AckBatch,
    Command,
    Lease,
    Nack,
    PurgeQueue,
    Redrive,
    Release,
    Seek,
)
from holdfast.client.protocol.replies import (
    Purged,
    Started,
)
from tests.support.machine import produce
from tests.support.watched import Q, Watched, singles

FEW, MANY = 10, 5_000


def with_leases(machine: Watched, n: int) -> None:
    machine.do(produce(Q, *[b"m"] * 2 * n))
    lease = Lease(queue_id=Q, group="default", max_messages=1)
    for _ in range(0, n, 100):
        machine.together(*[lease] * min(n, 100))


def with_one_lease(machine: Watched, n: int) -> int:
    machine.do(produce(Q, *[b"m"] * 2 * n))
    return machine.take(2 * n).lease_id


def with_returned_ranges(machine: Watched, n: int) -> None:
    lease = with_one_lease(machine, n)
    machine.do(Release(queue_id=Q, group="default", ranges=singles(lease, range(1, 2 * n + 1, 2))))
    machine.nack(lease, 1, 2 * n, delay_ms=0)


def with_delayed_ranges(machine: Watched, n: int) -> None:
    lease = with_one_lease(machine, n)
    machine.do(Nack(queue_id=Q, group="default", ranges=singles(lease, range(1, 2 * n + 1, 2)), delay_ms=60_000))
    machine.nack(lease, 1, 2 * n, delay_ms=60_000)


def with_holes(machine: Watched, n: int) -> None:
    lease = with_one_lease(machine, n)
    machine.do(AckBatch(queue_id=Q, group="default", ranges=singles(lease, range(2, 2 * n + 1, 2))))


def with_dead_rows(machine: Watched, n: int) -> None:
    lease = with_one_lease(machine, n)
    machine.do(Nack(queue_id=Q, group="default", ranges=singles(lease, range(1, 2 * n + 1, 2)), dead=True))


def with_redriven_ranges(machine: Watched, n: int) -> None:
    with_dead_rows(machine, n)
    deaths = tuple((2 * number - 1, 2 * number - 1, number) for number in range(1, n + 1))
    machine.do(Redrive(queue_id=Q, group="default", dead=deaths))


def with_delayed_batches(machine: Watched, n: int) -> None:
    for _ in range(0, n, 100):
        machine.together(*[produce(Q, MessageParts(b"m", delay_ms=60_000))] * min(n, 100))


def with_freed_ranges(machine: Watched, n: int) -> None:
    for _ in range(0, n, 100):
        machine.together(*[produce(Q, b"m")] * 2 * min(n, 100))
    lease = machine.take(2 * n).lease_id
    machine.do(AckBatch(queue_id=Q, group="default", ranges=singles(lease, range(2, 2 * n + 1, 2))))


OPEN = (
    with_leases, with_returned_ranges, with_delayed_ranges, with_holes, with_dead_rows, with_redriven_ranges,
    with_delayed_batches, with_freed_ranges,
)  # fmt: skip


def cost(fill: Callable[[Watched, int], None], n: int, command: Command, reap_rows: int) -> int:
    machine = Watched(reap_rows=reap_rows, max_ack_holes=100_000)
    fill(machine, n)
    machine.finish()
    reply = machine.do(command)
    assert isinstance(reply, Purged | Started), reply
    return machine.cost


@pytest.mark.parametrize("wider", [{}, {"in_flight": True}, {"dead": True}, {"in_flight": True, "dead": True}], ids=str)
@pytest.mark.parametrize("fill", OPEN)
def test_a_purge_costs_the_same_whatever_is_open(fill: Callable[[Watched, int], None], wider: dict[str, bool]) -> None:
    """G5: with five thousand leases, ranges, holes, dead rows or delayed batches as with ten."""
    purge = PurgeQueue(queue_id=Q, **wider)  # type: ignore[arg-type]
    few, many = cost(fill, FEW, purge, 4), cost(fill, MANY if not wider else MANY // 10, purge, 4)
    assert many <= few + 8, f"{many} operations instead of {few}"


@pytest.mark.parametrize("to", ["earliest", 2, 9, "latest"])
@pytest.mark.parametrize("fill", OPEN)
def test_a_seek_costs_the_same_whatever_is_open(fill: Callable[[Watched, int], None], to: Any) -> None:
    """G5: there are as many leases, ranges, holes, dead rows, delayed batches and freed ranges as there may be."""
    seek = Seek(queue_id=Q, group="default", to=to)
    few, many = cost(fill, FEW, seek, 4), cost(fill, MANY if to == 2 else MANY // 10, seek, 4)
    blocks = 2 * 64 if fill is with_delayed_batches else 0  # of at most 64 batches or blocks on each of two levels
    assert many <= few + 8 + blocks, f"{many} operations instead of {few}"


@pytest.mark.parametrize("fill", OPEN)
def test_a_purge_and_a_seek_keep_to_their_budget(fill: Callable[[Watched, int], None]) -> None:
    """G5: with `reap_rows` as it is by default, a purge does at most so much of what later entries would do."""
    for command in (PurgeQueue(queue_id=Q), Seek(queue_id=Q, group="default", to="earliest")):
        assert cost(fill, MANY // 2, command, 256) <= 256 * 16
