"""The rules as a user meets them: the same scenarios on every shell, against a real node and against a scripted one."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, aclosing
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import pytest

from holdfast.client.leases import PartlyRefused
from holdfast.client.message import Message, Origin
from holdfast.client.protocol.errors import (
    AlreadySettled,
    BadFilter,
    BadHeader,
    BadValue,
    GroupExists,
    GroupNotFound,
    IdempotencyConflict,
    InFlightLimit,
    LeaseExpired,
    LeaseNotFound,
    MessageTooLarge,
    NotLeaseOwner,
    ProducerFenced,
    QueueExists,
    QueueFull,
    QueueNotFound,
    QueueRecreated,
    SequenceGap,
    StagedMissing,
    TooLate,
    TransactionRefused,
    TxnClosed,
    VersionNotInLease,
)
from holdfast.cluster.embedded import Node
from tests.conformance.shells import NAMES, Name, Shell
from tests.fakes.scripted_server import ScriptedServer

WAIT_MS = 20_000  # a wait that is answered long before

_numbers = count(1)


class Here:
    """A client, and a queue's name that nobody has used."""

    def __init__(self, shell: Shell, address: str, client: Any) -> None:
        self._shell, self._address = shell, address
        self.client = client
        self.queue = f"q-{next(_numbers)}"

    def another(self, **arguments: Any) -> Any:
        return self._shell.client(self._address, timeout_ms=20_000, **arguments)

    async def filled(self, *payloads: bytes, **settings: Any) -> tuple[Any, str]:
        await self.client.create_queue(self.queue, **settings)
        await self.client.produce(self.queue, list(payloads))
        return self.client, self.queue


Scenario = Callable[[Here], Awaitable[None]]


@pytest.fixture(scope="module", params=["node", "scripted"])
def address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with ExitStack() as stack:
        folder: Path = tmp_path_factory.mktemp("node")
        if request.param == "node":
            yield stack.enter_context(Node(folder, fsync="os")).address
        else:
            yield stack.enter_context(ScriptedServer()).address


def on_every_shell(scenario: Scenario) -> Callable[[Name, str], None]:
    def test(name: Name, address: str) -> None:
        shell = Shell(name)

        async def main() -> None:
            async with shell.client(address, timeout_ms=20_000, consumer_id="tester") as client:
                await scenario(Here(shell, address, client))

        shell.run(main)

    test.__doc__ = scenario.__doc__
    marked: Callable[[Name, str], None] = pytest.mark.parametrize("name", NAMES)(test)
    return marked


def versions(messages: Any) -> list[int]:
    return [message.version for message in messages]


# Produce -----------------------------------------------------------------------------------------------


@on_every_shell
async def test_a_replay_gets_the_first_answer_and_another_body_is_a_conflict(here: Here) -> None:
    client, q = await here.filled()
    first = await client.produce(q, [b"a", b"b"], client_id="svc", client_seq=1)
    again = await client.produce(q, [b"a", b"b"], client_id="svc", client_seq=1)
    assert (first.versions, first.replayed, again.versions, again.replayed) == ([1, 2], False, [1, 2], True)
    with pytest.raises(IdempotencyConflict):
        await client.produce(q, [b"a", b"c"], client_id="svc", client_seq=1)
    with pytest.raises(SequenceGap):
        await client.produce(q, [b"c"], client_id="svc", client_seq=4, after_seq=3)
    assert (await client.stats(q)).produced == 2


@on_every_shell
async def test_a_newer_epoch_fences_the_older_one(here: Here) -> None:
    client, q = await here.filled()
    opened = await client.open_producer(q, client_id="p", nonce=b"n" * 16)
    assert await client.open_producer(q, client_id="p", nonce=b"n" * 16) == opened
    await client.produce(q, [b"1"], client_id="p", client_seq=1, epoch=opened.epoch)
    await client.open_producer(q, client_id="p")
    with pytest.raises(ProducerFenced):
        await client.produce(q, [b"2"], client_id="p", client_seq=2, epoch=opened.epoch)
    assert (await client.producer_state(q, client_id="p")).high_water == 1


@on_every_shell
async def test_what_is_wrong_or_too_much_is_refused_with_the_limit(here: Here) -> None:
    client, q = await here.filled(max_message_bytes=10, max_backlog_messages=2)
    for wrong in ("text", ["text"], [1]):
        with pytest.raises(BadValue):
            await client.produce(q, wrong)
    with pytest.raises(BadHeader):
        await client.produce(q, b"x", headers={"holdfast-origin-queue": "z"})
    with pytest.raises(MessageTooLarge) as large:
        await client.produce(q, b"x" * 11)
    with pytest.raises(QueueFull) as full:
        await client.produce(q, [b"1", b"2", b"3"])
    assert (large.value.limit, full.value.limit) == (10, 2)
    assert (await client.produce(q, [])).versions == []
    assert (await client.produce(q, b"one")).versions == [1]


@on_every_shell
async def test_messages_keep_their_own_and_take_the_calls_values(here: Here) -> None:
    client, q = await here.filled()
    own = Message(b"1", key="own", headers={"a": "b"})
    await client.produce(q, [own, b"2"], key="shared", headers={"c": "d"}, ttl_ms=60_000)
    first, second = await client.lease(q)
    assert (first.payload, first.key, first.headers) == (b"1", "own", {"a": "b"})
    assert (second.payload, second.key, second.headers) == (b"2", "shared", {"c": "d"})
    assert first.id == ((await client.queue(q)).queue_id, 0, 1)


# Lease and settle --------------------------------------------------------------------------------------


@on_every_shell
async def test_a_lease_is_acked_nacked_extended_and_released(here: Here) -> None:
    client, q = await here.filled(b"1", b"2", b"3", b"4")
    lease = await client.lease(q, max_messages=3)
    assert [(m.version, m.payload, m.delivery_count, m.attempts) for m in lease] == [
        (1, b"1", 1, 1),
        (2, b"2", 1, 1),
        (3, b"3", 1, 1),
    ]
    assert not lease.replayed and lease.id > 0
    assert (await lease.ack([1])).count == 1
    await lease.nack([2], error="boom")
    await lease.release([3])
    again = await client.lease(q)
    assert [(m.version, m.delivery_count, m.attempts) for m in again] == [(2, 2, 2), (3, 2, 1), (4, 1, 1)]
    extended = await again.extend(visibility_timeout_ms=60_000)
    assert extended.held == ((2, 4),) and again.deadline_ms == extended.deadline_ms
    await again.ack()
    stats = await client.stats(q)
    assert (stats.acked, stats.ready, stats.in_flight, stats.tail_version) == (4, 0, 0, 4)
    assert stats.index > 0 and stats.as_of_ms > 0


@on_every_shell
async def test_what_a_lease_settled_itself_is_a_success_again(here: Here) -> None:
    client, q = await here.filled(b"1", b"2")
    lease = await client.lease(q)
    await lease.ack([1])
    assert (await lease.ack([1])).count == 0
    with pytest.raises(AlreadySettled):
        await lease.nack([1])
    await lease.ack()
    await lease.ack()
    assert (await client.stats(q)).acked == 2


@on_every_shell
async def test_a_settle_that_is_refused_in_part_says_which(here: Here) -> None:
    client, q = await here.filled(b"1", b"2", b"3")
    lease = await client.lease(q, max_messages=2)
    with pytest.raises(PartlyRefused) as caught:
        await lease.ack([1, 2, 3])
    assert caught.value.outcomes == [(lease.id, 1, 2, "ok"), (lease.id, 3, 3, "VersionNotInLease")]
    third = await client.lease(q)
    with pytest.raises(VersionNotInLease):
        await third.nack([1])


@on_every_shell
async def test_a_lease_belongs_to_the_session_that_took_it(here: Here) -> None:
    """A2: also to another client of the same process."""
    client, q = await here.filled(b"1")
    lease = await client.lease(q)
    async with here.another() as other:
        with pytest.raises(NotLeaseOwner):
            await other.ack(q, lease_id=lease.id, versions=[1])
        with pytest.raises(LeaseNotFound):
            await other.ack(q, lease_id=lease.id + 1_000, versions=[1])
    assert (await client.ack(q, lease_id=lease.id, versions=[1])).count == 1


@on_every_shell
async def test_leases_by_id_do_what_the_object_does(here: Here) -> None:
    client, q = await here.filled(b"1", b"2", b"3")
    lease = await client.lease(q)
    assert (await client.extend(q, lease_id=lease.id, begin=[1])).held == ((1, 3),)
    assert (await client.ack(q, lease_id=lease.id, versions=[1])).count == 1
    assert (await client.nack(q, lease_id=lease.id, versions=[2], delay_ms=60_000, error="x" * 5_000)).count == 1
    assert (await client.release(q, lease_id=lease.id, versions=[3])).count == 1
    stats = await client.stats(q)
    assert (stats.acked, stats.delayed, stats.ready) == (1, 1, 1)


@on_every_shell
async def test_an_expired_lease_comes_to_who_waits_and_is_lost_to_who_held_it(here: Here) -> None:
    client, q = await here.filled(b"1")
    lost = await client.lease(q, visibility_timeout_ms=50)
    again = await client.lease(q, wait_ms=WAIT_MS)
    assert [(message.version, message.attempts) for message in again] == [(1, 2)]
    for late in (lost.ack, lost.extend):
        with pytest.raises(LeaseExpired):
            await late()


@on_every_shell
async def test_auto_ack_settles_at_hand_out(here: Here) -> None:
    client, q = await here.filled()
    assert not await client.lease(q)
    await client.produce(q, [b"1"])
    lease = await client.lease(q, auto_ack=True)
    assert lease and [message.payload for message in lease] == [b"1"]
    await lease.ack()
    assert (await client.stats(q)).acked == 1


@on_every_shell
async def test_a_long_poll_is_answered_as_soon_as_something_is_there(here: Here) -> None:
    client, q = await here.filled()
    taken: list[bytes] = []

    async def wait() -> None:
        taken.extend(message.payload for message in await client.lease(q, wait_ms=WAIT_MS))

    async with here.another() as other, anyio.create_task_group() as group:
        group.start_soon(wait)
        await other.produce(q, [b"1"])
    assert taken == [b"1"]


@on_every_shell
async def test_an_empty_wait_ends_with_an_empty_lease(here: Here) -> None:
    client, q = await here.filled()
    lease = await client.lease(q, wait_ms=30)
    assert not lease and len(lease) == 0 and lease.messages == []
    assert (await lease.ack()).count == 0


@on_every_shell
async def test_what_is_in_flight_is_limited(here: Here) -> None:
    client, q = await here.filled(b"1", b"2", max_in_flight=1)
    lease = await client.lease(q)
    assert versions(lease) == [1]
    with pytest.raises(InFlightLimit) as caught:
        await client.lease(q)
    assert caught.value.limit == 1
    await lease.ack()
    assert versions(await client.lease(q)) == [2]


# Messages one by one -----------------------------------------------------------------------------------


@on_every_shell
async def test_a_consumer_gives_every_message_once_until_there_is_none(here: Here) -> None:
    client, q = await here.filled(*(b"%d" % n for n in range(25)))
    seen = []
    async with client.consume(q, max_messages=10, wait_ms=0, until_empty=True) as messages:
        async for message in messages:
            seen.append(message.payload)
            await message.ack()
    assert seen == [b"%d" % n for n in range(25)]
    assert (await client.stats(q)).acked == 25


@on_every_shell
async def test_what_a_consumer_did_not_hand_out_is_released_and_what_it_did_is_the_callers(here: Here) -> None:
    client, q = await here.filled(b"1", b"2", b"3", b"4")
    async with client.consume(q) as messages:
        async for message in messages:
            if message.version == 2:
                break
            await message.nack(delay_ms=60_000, error="later")
    stats = await client.stats(q)
    assert (stats.delayed, stats.in_flight, stats.ready) == (1, 1, 2)
    assert [(m.version, m.attempts) for m in await client.lease(q)] == [(3, 1), (4, 1)]
    await message.ack()
    assert (await client.stats(q)).acked == 1


@on_every_shell
async def test_a_consumer_waits_for_what_is_not_there_yet(here: Here) -> None:
    client, q = await here.filled()
    seen: list[bytes] = []

    async def consume() -> None:
        async with client.consume(q, wait_ms=WAIT_MS) as messages:
            async for message in messages:
                seen.append(message.payload)
                await message.ack()
                if len(seen) == 2:
                    break

    async with here.another() as other, anyio.create_task_group() as group:
        group.start_soon(consume)
        for payload in (b"1", b"2"):
            await other.produce(q, [payload])
    assert seen == [b"1", b"2"]


@on_every_shell
async def test_a_message_that_was_settled_with_its_lease_is_not_handed_out(here: Here) -> None:
    client, q = await here.filled(b"1", b"2", b"3")
    async with client.consume(q, wait_ms=0, until_empty=True) as messages:
        seen = []
        async for message in messages:
            seen.append(message.version)
            await message.lease.ack()
    assert seen == [1]


@on_every_shell
async def test_a_consumer_that_would_ask_without_a_pause_is_refused(here: Here) -> None:
    with pytest.raises(BadValue, match="until_empty"):
        here.client.consume("q", wait_ms=0)
    with pytest.raises(QueueNotFound):
        async with here.client.consume(here.queue) as messages:
            async for _ in messages:
                raise AssertionError("there is no such queue")


# Dead letters ------------------------------------------------------------------------------------------


@on_every_shell
async def test_the_dead_are_listed_counted_and_redriven(here: Here) -> None:
    client, q = await here.filled(b"1", b"2", b"3", max_delivery_attempts=1)
    await (await client.lease(q, max_messages=2)).nack(error="boom")
    await (await client.lease(q)).nack(dead=True, error="no use")
    first = await client.dead(q, limit=2)
    second = await client.dead(q, limit=2, after=first.after)
    rows = [(row.version, row.reason, row.last_error, row.attempts, row.payload) for row in [*first, *second]]
    assert rows == [
        (1, "max_attempts", "boom", 1, b"1"),
        (2, "max_attempts", "boom", 1, b"2"),
        (3, "rejected", "no use", 1, b"3"),
    ]
    assert second.after is None and first[0].consumer_id == "tester"
    assert await client.dead_count(q, where="reason = 'max_attempts'") == 2
    tried = await client.redrive(q, where="version = 1", dry_run=True)
    assert (tried.matched, tried.redriven, await client.dead_count(q)) == (1, 0, 3)
    done = await client.redrive(q, where="version = 1")
    assert (done.matched, done.redriven, await client.dead_count(q)) == (1, 1, 2)
    assert [(m.version, m.delivery_count, m.attempts) for m in await client.lease(q)] == [(1, 2, 1)]
    with pytest.raises(BadFilter) as caught:
        await client.dead(q, where="colour = 1")
    assert caught.value.position == 0


@on_every_shell
async def test_a_moved_message_tells_where_it_came_from(here: Here) -> None:
    graves = f"{here.queue}-graves"
    await here.client.create_queue(graves)
    client, q = await here.filled(b"1", max_delivery_attempts=1, dlq_strategy="move", dlq_queue=graves)
    await (await client.lease(q)).nack(error="x")
    (message,) = await client.lease(graves)
    assert message.origin == Origin(q, 1)
    assert message.headers["holdfast-last-error"] == "x"


@on_every_shell
async def test_a_redrive_goes_in_steps_and_can_be_stopped_between_them(here: Here) -> None:
    client, q = await here.filled(*[b"m"] * 4)
    await (await client.lease(q)).nack(dead=True)
    async for total in client.redrive_steps(q, rate=1_000):
        assert (total.matched, total.redriven) == (4, 4)
    await (await client.lease(q)).nack(dead=True)
    async with aclosing(client.redrive_steps(q, rate=4)) as steps:
        async for total in steps:
            assert total.redriven == 1
            break
    assert await client.dead_count(q) == 3
    done = await client.redrive(q)
    assert (done.matched, done.redriven) == (3, 3)


@on_every_shell
async def test_what_was_moved_goes_home(here: Here) -> None:
    graves = f"{here.queue}-graves"
    await here.client.create_queue(graves)
    client, q = await here.filled(b"1", b"2", dlq_strategy="move", dlq_queue=graves)
    await (await client.lease(q)).nack(dead=True)
    tried = await client.redrive(graves, where="origin_version = 2", dry_run=True, to_origin=True)
    assert (tried.matched, tried.redriven) == (1, 0)
    done = await client.redrive(graves, where=f"origin_queue = '{q}'", to_origin=True)
    assert (done.matched, done.redriven) == (2, 2)
    assert [message.payload for message in await client.lease(q)] == [b"1", b"2"]


# Staged ------------------------------------------------------------------------------------------------


@on_every_shell
async def test_what_is_staged_is_published_once_or_dropped(here: Here) -> None:
    client, q = await here.filled()
    job = f"job-{q}"
    parts = [await client.stage(job, q, [b"a"], chunk=chunk) for chunk in range(2)]
    assert ((await client.txn_status(job)).state, (await client.stats(q)).produced) == ("open", 0)
    assert (await client.publish(job, parts)).versions == {q: [1, 2]}
    again = await client.publish(job, parts)
    assert (again.versions, again.replayed) == ({q: [1, 2]}, True)
    with pytest.raises(TxnClosed):
        await client.stage(job, q, [b"b"])
    assert await client.abort(job) == 0
    await client.forget_txn(job)
    assert (await client.txn_status(job)).state == "unknown"
    await client.stage(job, q, [b"c"])
    assert await client.abort(job) == 1
    with pytest.raises(StagedMissing):
        await client.publish(job, parts)


@on_every_shell
async def test_a_producer_is_forgotten(here: Here) -> None:
    client, q = await here.filled()
    await client.produce(q, [b"a"], client_id="svc", client_seq=1)
    await client.forget_producer(q, "svc")
    assert not (await client.produce(q, [b"a"], client_id="svc", client_seq=1)).replayed


# Delays ------------------------------------------------------------------------------------------------


@on_every_shell
async def test_what_is_delayed_can_be_cancelled_and_rescheduled(here: Here) -> None:
    client, q = await here.filled()
    await client.produce(q, [b"1", b"2", b"3"], key="k", delay_ms=600_000)
    assert (await client.explain(q, 1)).reason == "delayed"
    assert [(o.first, o.outcome) for o in await client.cancel(q, version=1)] == [(1, "ok")]
    outcomes = await client.reschedule(q, key="k", delay_ms=0)
    assert [o.outcome for o in outcomes if o.first >= 2] == ["ok"]
    lease = await client.lease(q, wait_ms=WAIT_MS)
    assert versions(lease) == [2, 3]
    with pytest.raises(TooLate):
        await client.cancel(q, version=2)
    with pytest.raises(BadValue):
        await client.cancel(q)


# Together ----------------------------------------------------------------------------------------------


@on_every_shell
async def test_a_transaction_settles_and_produces_together(here: Here) -> None:
    other = f"{here.queue}-b"
    await here.client.create_queue(other)
    client, q = await here.filled(b"1", b"2")
    lease = await client.lease(q)
    async with client.transaction() as txn:
        txn.ack(lease, [1])
        txn.nack(lease, [2], delay_ms=60_000)
        txn.produce(other, [b"x", b"y"])
    assert txn.versions == {other: [1, 2]}
    stats = await client.stats(q)
    assert (stats.acked, stats.delayed) == (1, 1)
    assert (await lease.ack([1])).count == 0


@on_every_shell
async def test_a_refused_transaction_changes_nothing(here: Here) -> None:
    client, q = await here.filled(b"1")
    lease = await client.lease(q)
    await lease.ack()
    with pytest.raises(TransactionRefused) as caught:
        async with client.transaction() as txn:
            txn.produce(q, [b"2"])
            txn.nack(lease, [1])
    assert caught.value.item == 1
    with pytest.raises(ZeroDivisionError):
        async with client.transaction() as txn:
            txn.produce(q, [b"2"])
            raise ZeroDivisionError
    async with client.transaction():
        pass
    assert (await client.stats(q)).produced == 1


# Ask ---------------------------------------------------------------------------------------------------


@on_every_shell
async def test_why_a_version_is_not_delivered_can_be_asked(here: Here) -> None:
    client, q = await here.filled(b"1", b"2", b"3")
    lease = await client.lease(q, max_messages=2)
    await lease.ack([1])
    reasons = [(await client.explain(q, version)).reason for version in (1, 2, 3, 4)]
    assert reasons == ["acked", "leased", "available", "not_produced"]
    assert (await client.explain(q, 2)).lease_id == lease.id
    await client.purge_queue(q)
    assert (await client.explain(q)).reason == "leased"


@on_every_shell
async def test_looking_touches_no_group(here: Here) -> None:
    client, q = await here.filled(*(b"%d" % n for n in range(1, 6)), history=True)
    assert [message.payload for message in await client.peek(q, from_version=2, limit=2)] == [b"2", b"3"]
    assert [message.version async for message in client.read(q, from_version=2, to_version=4)] == [2, 3, 4]
    assert [message.version async for message in client.read(q)] == [1, 2, 3, 4, 5]
    assert [row.kind for row in await client.history(q)] == ["produce"]
    assert (await client.stats(q)).ready == 5
    await (await client.lease(q, max_messages=1)).ack()
    assert versions(await client.peek(q, group="default")) == [2, 3, 4, 5]


@on_every_shell
async def test_groups_are_made_changed_sought_and_deleted(here: Here) -> None:
    client, q = await here.filled(b"1", b"2", groups=["a"], backoff={"kind": "fixed", "base_ms": 5, "cap_ms": 5})
    assert (await client.create_group(q, "b", start="latest", count="begun")).version == 3
    await client.update_group(q, "b", visibility_timeout_ms=1_000)
    described = [(group.name, group.settings.visibility_timeout_ms) for group in await client.groups(q)]
    assert described == [("a", None), ("b", 1_000)]
    assert (await client.seek(q, group="b", to=2)).version == 2
    assert versions(await client.lease(q, group="b")) == [2]
    assert (await client.purge_queue(q, group="a")).count == 2
    with pytest.raises(GroupExists):
        await client.create_group(q, "a")
    await client.delete_group(q, "b")
    with pytest.raises(GroupNotFound):
        await client.stats(q, group="b")


@on_every_shell
async def test_queues_are_made_changed_and_deleted(here: Here) -> None:
    client, q = await here.filled()
    await client.update_queue(q, max_delivery_attempts=9)
    assert (await client.queue(q)).settings.max_delivery_attempts == 9
    assert q in await client.queues()
    with pytest.raises(QueueExists):
        await client.create_queue(q)
    with pytest.raises(BadValue, match="is no setting"):
        await client.create_queue("z", colour="red")
    async with here.another() as other:
        await other.delete_queue(q)
        await other.create_queue(q)
    with pytest.raises(QueueRecreated):
        await client.produce(q, [b"1"])
    assert (await client.produce(q, [b"1"])).versions == [1]
    await client.delete_queue(q)
    with pytest.raises(QueueNotFound):
        await client.produce(q, [b"1"])


@on_every_shell
async def test_the_cluster_tells_who_leads(here: Here) -> None:
    status = await here.client.status()
    assert status.leader == "n1"
    assert [(node.name, node.role, node.lag) for node in status.nodes] == [("n1", "leader", 0)]


# Many at once ------------------------------------------------------------------------------------------


@on_every_shell
async def test_many_ask_at_once_over_one_client(here: Here) -> None:
    client, q = await here.filled()
    made: list[int] = []
    taken: list[int] = []

    async def produce(number: int) -> None:
        made.extend((await client.produce(q, [b"%d" % number] * 3)).versions)

    async def consume() -> None:
        lease = await client.lease(q, max_messages=10, wait_ms=WAIT_MS)
        taken.extend(versions(lease))
        await lease.ack()

    async with anyio.create_task_group() as group:
        for number in range(100):
            group.start_soon(produce, number)
    assert sorted(made) == list(range(1, 301))
    async with anyio.create_task_group() as group:
        for _ in range(30):
            group.start_soon(consume)
    assert sorted(taken) == list(range(1, 301))
