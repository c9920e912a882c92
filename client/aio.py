"""The client for asyncio and trio: one `Client`, usable from many tasks at once. The twin of `blocking.py`.

Every method is one of the steps of `calls.py` or `leases.py`, taken one after the other over the tasks of `streams.py`.
A client lives in the event loop, and in the process, in which its block was entered.
"""

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint_if_cancelled

from holdfast.client import calls, leases, options, staged, status, streams
from holdfast.client.calls import (
    DeadPage,
    Explanation,
    Names,
    Payloads,
    Produced,
    Published,
    Redriven,
    Start,
    Stats,
    Steps,
    TxnState,
)
from holdfast.client.consuming import Hand, Wanted, received
from holdfast.client.events import Address
from holdfast.client.leases import Held, LeaseFacts
from holdfast.client.message import Delivered, Message
from holdfast.client.protocol import commands as c
from holdfast.client.protocol import queries as q
from holdfast.client.protocol import replies as r
from holdfast.client.protocol.errors import BadValue, Indeterminate, LeaseExpired, LeaseNotFound, Refused, Unavailable
from holdfast.client.protocol.limits import NONCE_BYTES
from holdfast.client.protocol.quick import dataclass
from holdfast.client.redrive import Redrive
from holdfast.client.status import ClusterStatus
from holdfast.client.streams import Loop
from holdfast.client.transactions import Collected
from holdfast.client.unwanted import LINGER_S

if TYPE_CHECKING:
    from holdfast.client.aio_producer import Producer

T = TypeVar("T")


class Client:
    """Connects at first use. `timeout_ms` is for a call as its caller sees it, retries and redirects included.

    `async with` is needed: the connections are tasks of that block. A queue's name is resolved once. When that queue
    is gone, the call raises QueueNotFound, or QueueRecreated where another has its name now: nothing was done, and the
    next call by that name means the new one.
    """

    def __init__(
        self, addresses: str | Sequence[Address], timeout_ms: int = 30_000, consumer_id: str | None = None
    ) -> None:
        self._options = options.checked(addresses, timeout_ms, consumer_id)
        self._names = Names()
        self._group: TaskGroup | None = None
        self._loop: Loop | None = None
        self._closed = False
        self._pid = os.getpid()

    async def __aenter__(self) -> Self:
        if self._group is not None:
            raise BadValue(field="client", problem="was entered before; make another")
        self._group = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()
        if self._group is not None:
            # Its tasks end without an error: what ended the block is its own, and no group of errors.
            await self._group.__aexit__(None, None, None)

    async def close(self) -> None:
        """End all connections; calls of other tasks end with what is known of them. Closing twice is fine."""
        self._closed = True
        loop, self._loop = self._loop, None
        if loop is not None:
            await loop.stop()

    # Queues and groups ----------------------------------------------------------------------------------

    async def create_queue(self, name: str, **settings: Any) -> r.QueueCreated:
        return await self._run(calls.create_queue(self._names, name, settings))

    async def update_queue(self, name: str, **settings: Any) -> None:
        await self._run(calls.update_queue(self._names, name, settings))

    async def delete_queue(self, name: str) -> None:
        await self._run(calls.delete_queue(self._names, name))

    async def purge_queue(
        self, name: str, group: str | None = None, in_flight: bool = False, dead: bool = False
    ) -> r.Purged:
        return await self._ask(
            name, r.Purged, lambda i: c.PurgeQueue(queue_id=i, group=group, in_flight=in_flight, dead=dead)
        )

    async def queue(self, name: str) -> r.QueueDescribed:
        """Settings, tail and groups as they are now."""
        return await self._run(calls.describe(self._names, name))

    async def queues(self) -> list[str]:
        return await self._run(calls.queues())

    async def create_group(self, queue: str, group: str, start: Start = "earliest", **settings: Any) -> r.Started:
        return await self._run(calls.create_group(self._names, queue, group, start, settings))

    async def update_group(self, queue: str, group: str, **settings: Any) -> None:
        await self._run(calls.update_group(self._names, queue, group, settings))

    async def delete_group(self, queue: str, group: str) -> None:
        await self._ask(queue, r.Done, lambda i: c.DeleteGroup(queue_id=i, group=group))

    async def groups(self, queue: str) -> list[r.GroupDescribed]:
        return list((await self._ask(queue, r.GroupsListed, lambda i: q.ListGroups(queue_id=i))).groups)

    async def seek(self, queue: str, group: str = "default", to: Start = "earliest", dead: bool = False) -> r.Started:
        return await self._ask(queue, r.Started, lambda i: c.Seek(queue_id=i, group=group, to=to, dead=dead))

    # Produce --------------------------------------------------------------------------------------------

    async def produce(
        self, queue: str, payloads: Payloads, client_id: str | None = None, client_seq: int | None = None,
        epoch: int = 0, numbering_epoch: int | None = None, after_seq: int | None = None,
        done_below: int | None = None, key: str | None = None, headers: Mapping[str, str] | None = None,
        delay_ms: int | None = None, not_before_ms: int | None = None, ttl_ms: int | None = None,
    ) -> Produced:  # fmt: skip
        """Append all or none. With `client_id` you number (P1); without, the session does, for this client's life."""
        shared = Message(b"", key, headers, delay_ms, not_before_ms, ttl_ms)
        return await self._run(
            calls.produce(
                self._names,
                queue,
                payloads,
                shared,
                client_id,
                client_seq,
                epoch=epoch,
                numbering_epoch=numbering_epoch,
                after_seq=after_seq,
                done_below=done_below,
            )
        )

    async def open_producer(self, queue: str, client_id: str, nonce: bytes | None = None) -> r.ProducerOpened:
        """The next epoch of this producer, which fences older ones; the same for the same nonce (P4)."""
        chosen = nonce if nonce is not None else os.urandom(NONCE_BYTES)
        return await self._ask(
            queue, r.ProducerOpened, lambda i: c.OpenProducer(queue_id=i, client_id=client_id, nonce=chosen)
        )

    async def forget_producer(self, queue: str, client_id: str) -> None:
        """End what the queue remembers of this producer: numbers that it used would be taken for new ones (P5)."""
        await self._ask(queue, r.Done, lambda i: c.ForgetProducer(queue_id=i, client_id=client_id))

    def producer(
        self, queue: str, client_id: str, window: int = 1000, outbox: str | PathLike[str] | None = None
    ) -> "Producer":
        """A producer that numbers, batches and retries by itself; `window` messages may be unacknowledged.

        `async with` opens an epoch, which fences this client id's former producers. With `outbox`, a file, what a
        killed process had not confirmed is sent again first.
        """
        from holdfast.client.aio_producer import Producer

        return Producer(self, queue, client_id, window, outbox)

    async def producer_state(self, queue: str, client_id: str) -> r.ProducerDescribed:
        return await self._ask(queue, r.ProducerDescribed, lambda i: q.ProducerState(queue_id=i, client_id=client_id))

    async def cancel(self, queue: str, version: int | None = None, key: str | None = None) -> list[r.VersionOutcome]:
        """Before any group has leased it: by version, else TooLate; by key, with an outcome for each match (P6)."""
        return await self._run(calls.change_versions(self._names, queue, version, key, c.Cancel))

    async def reschedule(
        self, queue: str, version: int | None = None, key: str | None = None,
        delay_ms: int | None = None, not_before_ms: int | None = None,
    ) -> list[r.VersionOutcome]:  # fmt: skip
        when = {"delay_ms": delay_ms, "not_before_ms": not_before_ms}
        return await self._run(calls.change_versions(self._names, queue, version, key, c.Reschedule, **when))

    # Lease and settle -----------------------------------------------------------------------------------

    async def lease(
        self, queue: str, group: str = "default", max_messages: int = 100, max_bytes: int | None = None,
        wait_ms: int = 0, visibility_timeout_ms: int | None = None, auto_ack: bool = False,
    ) -> "Lease":  # fmt: skip
        """What is available, at most `max_messages`; an empty lease is false. The wait comes on top of the timeout."""
        steps = leases.lease(
            self._names, queue, group, max_messages, max_bytes, wait_ms, visibility_timeout_ms, auto_ack
        )
        return Lease(self, await self._run(steps, extra_s=wait_ms / 1000))

    async def ack(self, queue: str, lease_id: int, versions: Iterable[int], group: str = "default") -> r.Settled:
        return await self._run(leases.settle_by_id(self._names, queue, lease_id, versions, leases.acking(group)))

    async def nack(
        self, queue: str, lease_id: int, versions: Iterable[int], group: str = "default",
        delay_ms: int | None = None, not_before_ms: int | None = None, error: str | None = None, dead: bool = False,
    ) -> r.Settled:  # fmt: skip
        command = leases.nacking(group, delay_ms, not_before_ms, error, dead)
        return await self._run(leases.settle_by_id(self._names, queue, lease_id, versions, command))

    async def release(self, queue: str, lease_id: int, versions: Iterable[int], group: str = "default") -> r.Settled:
        return await self._run(leases.settle_by_id(self._names, queue, lease_id, versions, leases.releasing(group)))

    async def extend(
        self, queue: str, lease_id: int, group: str = "default",
        visibility_timeout_ms: int | None = None, begin: Iterable[int] | None = None,
    ) -> r.Extended:  # fmt: skip
        return await self._run(leases.extend(self._names, queue, group, lease_id, visibility_timeout_ms, begin))

    def consume(
        self, queue: str, group: str = "default", max_messages: int = 10, wait_ms: int = 20_000,
        visibility_timeout_ms: int | None = None, until_empty: bool = False,
    ) -> "Consumer":  # fmt: skip
        """Messages one by one: `async with client.consume("q") as messages: async for message in messages: …`"""
        return Consumer(
            self,
            Wanted(
                queue=queue,
                group=group,
                max_messages=max_messages,
                wait_ms=wait_ms,
                visibility_timeout_ms=visibility_timeout_ms,
                until_empty=until_empty,
            ),
        )

    def transaction(self) -> "Transaction":
        return Transaction(self)

    # Ask ------------------------------------------------------------------------------------------------

    async def stats(self, queue: str, group: str = "default") -> Stats:
        return await self._run(calls.stats(self._names, queue, group))

    async def peek(
        self, queue: str, group: str | None = None, from_version: int = 1, limit: int = 10
    ) -> list[Delivered]:
        return await self._run(calls.peek(self._names, queue, group, from_version, limit))

    async def read(self, queue: str, from_version: int = 1, to_version: int | None = None) -> AsyncIterator[Delivered]:
        """Kept messages by version, both ends included, fetched as they are needed; each page has its own timeout."""
        at: int | None = from_version
        last = to_version if to_version is not None else (await self.queue(queue)).tail_version
        while at is not None and at <= last:
            page, at = await self._run(calls.read_page(self._names, queue, at, last))
            for message in page:
                yield message

    async def explain(self, queue: str, version: int | None = None, group: str = "default") -> Explanation:
        return await self._run(calls.explain(self._names, queue, version, group))

    async def history(self, queue: str, from_seq: int = 1, limit: int = 1_000) -> list[r.HistoryRow]:
        """Rows of a queue that keeps a history, from this number on."""
        listed = await self._ask(
            queue, r.HistoryListed, lambda i: q.History(queue_id=i, from_seq=from_seq, limit=limit)
        )
        return list(listed.rows)

    # Dead letters ---------------------------------------------------------------------------------------

    async def dead(
        self, queue: str, group: str | None = None, where: str = "", limit: int = 100, after: bytes | None = None
    ) -> DeadPage:
        """A list of dead letters; its `after` leads to the next page."""
        return await self._run(calls.dead(self._names, queue, group, where, limit, after))

    async def dead_count(self, queue: str, group: str | None = None, where: str = "") -> int:
        return await self._run(calls.dead_count(self._names, queue, group, where))

    async def redrive(
        self, queue: str, group: str | None = None, where: str = "", dry_run: bool = False,
        rate: float | None = None, to_origin: bool = False,
    ) -> Redriven:  # fmt: skip
        """Bring back all that match, at most `rate` a second; asking again goes on where it stopped (D4)."""
        steps = self.redrive_steps(queue, group, where, dry_run, rate, to_origin)
        return [total async for total in steps][-1]

    async def redrive_steps(
        self, queue: str, group: str | None = None, where: str = "", dry_run: bool = False,
        rate: float | None = None, to_origin: bool = False,
        pause: Callable[[float], Awaitable[object]] = anyio.sleep,
    ) -> AsyncIterator[Redriven]:  # fmt: skip
        """The same step by step, each with its own timeout: gives the total so far. Stop between any two.

        `to_origin`: `queue` is the dead-letter queue from which moved messages go home. `pause` is called before each
        step with the seconds to wait, often none; whatever it raises ends the redrive there.
        """
        work = Redrive(queue, group, where, dry_run=dry_run, rate=rate, to_origin=to_origin)
        while not work.done:
            await pause(work.pause_s(anyio.current_time()))
            yield await self._run(work.step(self._names, anyio.current_time()))

    # Staged produce -------------------------------------------------------------------------------------

    async def stage(
        self, txn: staged.Txn, queue: str, payloads: Payloads, part: int = 0, attempt: str = "0", chunk: int = 0,
        expires_ms: int = staged.EXPIRES_MS,
    ) -> c.Part:  # fmt: skip
        """Put one chunk of a part aside, invisible until `publish` is given what this gives (X2).

        A text names a job; `(app, seq)` is a transaction of a stream, which numbers its own without gaps.
        """
        return await self._run(staged.stage(self._names, txn, queue, payloads, part, attempt, chunk, expires_ms))

    async def publish(self, txn: staged.Txn, parts: Iterable[c.Part], fence: str = "") -> Published:
        """Make all of these parts messages in one entry, or none; again, it answers what it wrote the first time."""
        return await self._run(staged.publish(self._names, txn, parts, fence))

    async def abort(self, txn: staged.Txn, attempts: Iterable[str] | None = None) -> int:
        """Drop what is staged, of all attempts or of some: how many chunks. What is published stays as it is."""
        return await self._run(staged.abort(txn, attempts))

    async def txn_status(self, txn: staged.Txn) -> TxnState:
        return await self._run(staged.status(self._names, txn))

    async def forget_txn(self, txn: staged.Txn) -> None:
        """End the memory of a job or of a whole stream: published again, it would be written again."""
        await self._run(staged.forget(txn))

    # The cluster ----------------------------------------------------------------------------------------

    async def hand_over(self, target: str | None = None) -> None:
        """Let another node lead, the one named or the best one. Raises NotHandedOver; then nothing has changed."""
        await self._run(calls.hand_over(target))

    async def status(self) -> ClusterStatus:
        """Who leads, and how each node does; nodes that are down are in it too. ConnectFailed if all are.

        Every address is asked on a connection of its own, also those that only the nodes' answers name.
        """
        rounds = status.ask(self._options.addresses)
        wait_s = min(status.ANSWER_S, self._options.timeout_s)
        try:
            wanted = next(rounds)
            while True:
                wanted = rounds.send(await streams.ask_nodes(wanted, wait_s))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    # How a call is made ---------------------------------------------------------------------------------

    async def _ask(self, queue: str, kind: type[T], build: Any) -> T:
        return calls.expect(kind, await self._run(self._names.asking(queue, build)))

    async def _run(self, steps: Steps[T], extra_s: float = 0.0) -> T:
        """Take all steps within one timeout. Raises what the last of them could not get over."""
        loop = self._started()
        await checkpoint_if_cancelled()  # who is cancelled already asks for nothing
        deadline_s = anyio.current_time() + self._options.timeout_s + extra_s
        try:
            request = next(steps)
            while True:
                request = calls.advance(steps, await loop.outcome_of(loop.ask(request, deadline_s)))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    def _started(self) -> Loop:
        if self._pid != os.getpid():
            raise BadValue(field="client", problem="is of the process before the fork; make another")
        if self._loop is None:
            if self._closed:
                raise BadValue(field="client", problem="is closed; make another")
            if self._group is None:
                raise BadValue(field="client", problem="is not entered; use it in `async with`")
            self._loop = Loop(self._options.core(), self._group)
        return self._loop


class Lease(LeaseFacts):
    """Messages held until `deadline_ms`; `id` is the fencing token. Methods without versions mean all still held.

    Refused as a whole raises that error, in part `PartlyRefused`; what this object settled before is not asked again.
    """

    def __init__(self, client: Client, held: Held) -> None:
        super().__init__(held)
        self._client = client

    async def ack(self, versions: Iterable[int] | None = None) -> r.Settled:
        return await self._settle("ack", versions, leases.acking(self._held.group))

    async def nack(
        self, versions: Iterable[int] | None = None, delay_ms: int | None = None, not_before_ms: int | None = None,
        error: str | None = None, dead: bool = False,
    ) -> r.Settled:  # fmt: skip
        return await self._settle(
            "nack", versions, leases.nacking(self._held.group, delay_ms, not_before_ms, error, dead)
        )

    async def release(self, versions: Iterable[int] | None = None) -> r.Settled:
        return await self._settle("release", versions, leases.releasing(self._held.group))

    async def extend(self, visibility_timeout_ms: int | None = None, begin: Iterable[int] | None = None) -> r.Extended:
        held = self._held
        reply = await self._client.extend(held.queue, held.id, held.group, visibility_timeout_ms, begin)
        held.extended(reply)
        return reply

    async def _settle(
        self, verb: Literal["ack", "nack", "release"], versions: Iterable[int] | None, command: leases.Settle
    ) -> r.Settled:
        client = self._client
        return await client._run(leases.settle(client._names, self._held, verb, versions, command))


@dataclass(frozen=True, slots=True, kw_only=True)
class Received(Delivered):
    """A message in hand, with the lease that it came in."""

    lease: Lease

    async def ack(self) -> r.Settled:
        return await self.lease.ack([self.version])

    async def nack(
        self, delay_ms: int | None = None, not_before_ms: int | None = None,
        error: str | None = None, dead: bool = False,
    ) -> r.Settled:  # fmt: skip
        return await self.lease.nack([self.version], delay_ms, not_before_ms, error, dead)

    async def release(self) -> r.Settled:
        return await self.lease.release([self.version])


class Consumer:
    """One message after the other, each the caller's to settle. Not for two tasks at once.

    `max_messages` are leased at a time. When the block ends, those that were not handed out yet are released, at no
    attempt. An error of a call comes out of the loop; another loop in the same block goes on.
    """

    def __init__(self, client: Client, wanted: Wanted) -> None:
        self._client, self._wanted = client, wanted
        self._lease: Lease | None = None
        self._hand: Hand | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        lease, hand, self._lease, self._hand = self._lease, self._hand, None, None
        rest = hand.rest() if hand is not None else []
        if lease is not None and rest:
            # Also where the block was cancelled; what cannot be done soon is left to the end of their lease.
            with anyio.move_on_after(LINGER_S, shield=True), suppress(Refused, Unavailable, Indeterminate):
                await lease.release(rest)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Received:
        await checkpoint_if_cancelled()  # nor is it handed anything
        while True:
            message = await self._next_in_hand()
            if message is not None:
                return message
            wanted = self._wanted
            lease = await self._client.lease(
                wanted.queue,
                group=wanted.group,
                max_messages=wanted.max_messages,
                wait_ms=wanted.wait_ms,
                visibility_timeout_ms=wanted.visibility_timeout_ms,
            )
            if not lease and wanted.until_empty:
                raise StopAsyncIteration
            self._lease, self._hand = lease, Hand(lease.held, anyio.current_time())

    async def _next_in_hand(self) -> Received | None:
        lease, hand = self._lease, self._hand
        if lease is None or hand is None:
            return None
        if hand.is_due(anyio.current_time()):
            try:
                reply = await lease.extend(self._wanted.visibility_timeout_ms)
                hand.extended(reply, anyio.current_time())
            except (LeaseExpired, LeaseNotFound):
                hand.lost()
        message = hand.take()
        return received(Received, message, lease) if message is not None else None


class Transaction(Collected):
    """All or nothing, one log entry (X1): sent when the block ends, unless it ends by an exception."""

    def __init__(self, client: Client) -> None:
        super().__init__()
        self._client = client

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if kind is None:
            await self._client._run(self.commit(self._client._names))
