"""The client for threads, scripts and Spark executors: one `Client`, usable from many threads at once.

Every method is one of the steps of `calls.py` or `leases.py`, taken one after the other over the socket thread.
After a fork a client goes on with sockets and a session of its own; leases belong to the session that took them.
"""

import os
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from holdfast.client import calls, leases, options, staged, status
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
from holdfast.client.events import Address, host_and_port
from holdfast.client.leases import Held, LeaseFacts
from holdfast.client.message import Delivered, Message
from holdfast.client.protocol import commands as c
from holdfast.client.protocol import queries as q
from holdfast.client.protocol import replies as r
from holdfast.client.protocol.errors import BadValue, Indeterminate, LeaseExpired, LeaseNotFound, Refused, Unavailable
from holdfast.client.protocol.limits import NONCE_BYTES
from holdfast.client.protocol.quick import dataclass
from holdfast.client.redrive import Redrive
from holdfast.client.sockets import Loop
from holdfast.client.status import ClusterStatus, Heard
from holdfast.client.transactions import Collected

if TYPE_CHECKING:
    from holdfast.client.blocking_producer import Producer

T = TypeVar("T")


class Client:
    """Connects at first use. `timeout_ms` is for a call as its caller sees it, retries and redirects included.

    A queue's name is resolved once. When that queue is gone, the call raises QueueNotFound, or QueueRecreated where
    another has its name now: nothing was done, and the next call by that name means the new one.
    """

    def __init__(
        self, addresses: str | Sequence[Address], timeout_ms: int = 30_000, consumer_id: str | None = None
    ) -> None:
        self._options = options.checked(addresses, timeout_ms, consumer_id)
        self._names = Names()
        self._lock = Lock()
        self._loop: Loop | None = None
        self._closed = False
        _clients.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all connections; calls of other threads end with what is known of them. Closing twice is fine."""
        with self._lock:
            self._closed = True
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.stop()

    # Queues and groups ----------------------------------------------------------------------------------

    def create_queue(self, name: str, **settings: Any) -> r.QueueCreated:
        return self._run(calls.create_queue(self._names, name, settings))

    def update_queue(self, name: str, **settings: Any) -> None:
        self._run(calls.update_queue(self._names, name, settings))

    def delete_queue(self, name: str) -> None:
        self._run(calls.delete_queue(self._names, name))

    def purge_queue(self, name: str, group: str | None = None, in_flight: bool = False, dead: bool = False) -> r.Purged:
        return self._ask(
            name, r.Purged, lambda i: c.PurgeQueue(queue_id=i, group=group, in_flight=in_flight, dead=dead)
        )

    def queue(self, name: str) -> r.QueueDescribed:
        """Settings, tail and groups as they are now."""
        return self._run(calls.describe(self._names, name))

    def queues(self) -> list[str]:
        return self._run(calls.queues())

    def create_group(self, queue: str, group: str, start: Start = "earliest", **settings: Any) -> r.Started:
        return self._run(calls.create_group(self._names, queue, group, start, settings))

    def update_group(self, queue: str, group: str, **settings: Any) -> None:
        self._run(calls.update_group(self._names, queue, group, settings))

    def delete_group(self, queue: str, group: str) -> None:
        self._ask(queue, r.Done, lambda i: c.DeleteGroup(queue_id=i, group=group))

    def groups(self, queue: str) -> list[r.GroupDescribed]:
        return list(self._ask(queue, r.GroupsListed, lambda i: q.ListGroups(queue_id=i)).groups)

    def seek(self, queue: str, group: str = "default", to: Start = "earliest", dead: bool = False) -> r.Started:
        return self._ask(queue, r.Started, lambda i: c.Seek(queue_id=i, group=group, to=to, dead=dead))

    # Produce --------------------------------------------------------------------------------------------

    def produce(
        self, queue: str, payloads: Payloads, client_id: str | None = None, client_seq: int | None = None,
        epoch: int = 0, numbering_epoch: int | None = None, after_seq: int | None = None,
        done_below: int | None = None, key: str | None = None, headers: Mapping[str, str] | None = None,
        delay_ms: int | None = None, not_before_ms: int | None = None, ttl_ms: int | None = None,
    ) -> Produced:  # fmt: skip
        """Append all or none. With `client_id` you number (P1); without, the session does, for this client's life."""
        shared = Message(b"", key, headers, delay_ms, not_before_ms, ttl_ms)
        return self._run(
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

    def open_producer(self, queue: str, client_id: str, nonce: bytes | None = None) -> r.ProducerOpened:
        """The next epoch of this producer, which fences older ones; the same for the same nonce (P4)."""
        chosen = nonce if nonce is not None else os.urandom(NONCE_BYTES)
        return self._ask(
            queue, r.ProducerOpened, lambda i: c.OpenProducer(queue_id=i, client_id=client_id, nonce=chosen)
        )

    def producer(
        self, queue: str, client_id: str, window: int = 1000, outbox: str | PathLike[str] | None = None
    ) -> "Producer":
        """A producer that numbers, batches and retries by itself; `window` messages may be unacknowledged.

        Opens an epoch, which fences this client id's former producers. With `outbox`, a file, what a killed process
        had not confirmed is sent again first.
        """
        from holdfast.client.blocking_producer import Producer

        return Producer(self, queue, client_id, window, outbox)

    def forget_producer(self, queue: str, client_id: str) -> None:
        """End what the queue remembers of this producer: numbers that it used would be taken for new ones (P5)."""
        self._ask(queue, r.Done, lambda i: c.ForgetProducer(queue_id=i, client_id=client_id))

    def producer_state(self, queue: str, client_id: str) -> r.ProducerDescribed:
        return self._ask(queue, r.ProducerDescribed, lambda i: q.ProducerState(queue_id=i, client_id=client_id))

    def cancel(self, queue: str, version: int | None = None, key: str | None = None) -> list[r.VersionOutcome]:
        """Before any group has leased it: by version, else TooLate; by key, with an outcome for each match (P6)."""
        return self._run(calls.change_versions(self._names, queue, version, key, c.Cancel))

    def reschedule(
        self, queue: str, version: int | None = None, key: str | None = None,
        delay_ms: int | None = None, not_before_ms: int | None = None,
    ) -> list[r.VersionOutcome]:  # fmt: skip
        when = {"delay_ms": delay_ms, "not_before_ms": not_before_ms}
        return self._run(calls.change_versions(self._names, queue, version, key, c.Reschedule, **when))

    # Lease and settle -----------------------------------------------------------------------------------

    def lease(
        self, queue: str, group: str = "default", max_messages: int = 100, max_bytes: int | None = None,
        wait_ms: int = 0, visibility_timeout_ms: int | None = None, auto_ack: bool = False,
    ) -> "Lease":  # fmt: skip
        """What is available, at most `max_messages`; an empty lease is false. The wait comes on top of the timeout."""
        steps = leases.lease(
            self._names, queue, group, max_messages, max_bytes, wait_ms, visibility_timeout_ms, auto_ack
        )
        return Lease(self, self._run(steps, extra_s=wait_ms / 1000))

    def ack(self, queue: str, lease_id: int, versions: Iterable[int], group: str = "default") -> r.Settled:
        return self._run(leases.settle_by_id(self._names, queue, lease_id, versions, leases.acking(group)))

    def nack(
        self, queue: str, lease_id: int, versions: Iterable[int], group: str = "default",
        delay_ms: int | None = None, not_before_ms: int | None = None, error: str | None = None, dead: bool = False,
    ) -> r.Settled:  # fmt: skip
        command = leases.nacking(group, delay_ms, not_before_ms, error, dead)
        return self._run(leases.settle_by_id(self._names, queue, lease_id, versions, command))

    def release(self, queue: str, lease_id: int, versions: Iterable[int], group: str = "default") -> r.Settled:
        return self._run(leases.settle_by_id(self._names, queue, lease_id, versions, leases.releasing(group)))

    def extend(
        self, queue: str, lease_id: int, group: str = "default",
        visibility_timeout_ms: int | None = None, begin: Iterable[int] | None = None,
    ) -> r.Extended:  # fmt: skip
        return self._run(leases.extend(self._names, queue, group, lease_id, visibility_timeout_ms, begin))

    def consume(
        self, queue: str, group: str = "default", max_messages: int = 10, wait_ms: int = 20_000,
        visibility_timeout_ms: int | None = None, until_empty: bool = False,
    ) -> "Consumer":  # fmt: skip
        """Messages one by one: `with client.consume("q") as messages: for message in messages: …`"""
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

    def stats(self, queue: str, group: str = "default") -> Stats:
        return self._run(calls.stats(self._names, queue, group))

    def peek(self, queue: str, group: str | None = None, from_version: int = 1, limit: int = 10) -> list[Delivered]:
        return self._run(calls.peek(self._names, queue, group, from_version, limit))

    def read(self, queue: str, from_version: int = 1, to_version: int | None = None) -> Iterator[Delivered]:
        """Kept messages by version, both ends included, fetched as they are needed; each page has its own timeout."""
        at: int | None = from_version
        last = to_version if to_version is not None else self.queue(queue).tail_version
        while at is not None and at <= last:
            page, at = self._run(calls.read_page(self._names, queue, at, last))
            yield from page

    def explain(self, queue: str, version: int | None = None, group: str = "default") -> Explanation:
        return self._run(calls.explain(self._names, queue, version, group))

    def history(self, queue: str, from_seq: int = 1, limit: int = 1_000) -> list[r.HistoryRow]:
        """Rows of a queue that keeps a history, from this number on."""
        listed = self._ask(queue, r.HistoryListed, lambda i: q.History(queue_id=i, from_seq=from_seq, limit=limit))
        return list(listed.rows)

    # Dead letters ---------------------------------------------------------------------------------------

    def dead(
        self, queue: str, group: str | None = None, where: str = "", limit: int = 100, after: bytes | None = None
    ) -> DeadPage:
        """A list of dead letters; its `after` leads to the next page."""
        return self._run(calls.dead(self._names, queue, group, where, limit, after))

    def dead_count(self, queue: str, group: str | None = None, where: str = "") -> int:
        return self._run(calls.dead_count(self._names, queue, group, where))

    def redrive(
        self, queue: str, group: str | None = None, where: str = "", dry_run: bool = False,
        rate: float | None = None, to_origin: bool = False,
    ) -> Redriven:  # fmt: skip
        """Bring back all that match, at most `rate` a second; asking again goes on where it stopped (D4)."""
        *_, total = self.redrive_steps(queue, group, where, dry_run, rate, to_origin)
        return total

    def redrive_steps(
        self, queue: str, group: str | None = None, where: str = "", dry_run: bool = False,
        rate: float | None = None, to_origin: bool = False, pause: Callable[[float], object] = time.sleep,
    ) -> Iterator[Redriven]:  # fmt: skip
        """The same step by step, each with its own timeout: gives the total so far. Stop between any two.

        `to_origin`: `queue` is the dead-letter queue from which moved messages go home. `pause` is called before each
        step with the seconds to wait, often none; whatever it raises ends the redrive there.
        """
        work = Redrive(queue, group, where, dry_run=dry_run, rate=rate, to_origin=to_origin)
        while not work.done:
            pause(work.pause_s(time.monotonic()))
            yield self._run(work.step(self._names, time.monotonic()))

    # Staged produce -------------------------------------------------------------------------------------

    def stage(
        self, txn: staged.Txn, queue: str, payloads: Payloads, part: int = 0, attempt: str = "0", chunk: int = 0,
        expires_ms: int = staged.EXPIRES_MS,
    ) -> c.Part:  # fmt: skip
        """Put one chunk of a part aside, invisible until `publish` is given what this gives (X2).

        A text names a job; `(app, seq)` is a transaction of a stream, which numbers its own without gaps.
        """
        return self._run(staged.stage(self._names, txn, queue, payloads, part, attempt, chunk, expires_ms))

    def publish(self, txn: staged.Txn, parts: Iterable[c.Part], fence: str = "") -> Published:
        """Make all of these parts messages in one entry, or none; again, it answers what it wrote the first time."""
        return self._run(staged.publish(self._names, txn, parts, fence))

    def abort(self, txn: staged.Txn, attempts: Iterable[str] | None = None) -> int:
        """Drop what is staged, of all attempts or of some: how many chunks. What is published stays as it is."""
        return self._run(staged.abort(txn, attempts))

    def txn_status(self, txn: staged.Txn) -> TxnState:
        return self._run(staged.status(self._names, txn))

    def forget_txn(self, txn: staged.Txn) -> None:
        """End the memory of a job or of a whole stream: published again, it would be written again."""
        self._run(staged.forget(txn))

    # The cluster ----------------------------------------------------------------------------------------

    def hand_over(self, target: str | None = None) -> None:
        """Let another node lead, the one named or the best one. Raises NotHandedOver; then nothing has changed."""
        self._run(calls.hand_over(target))

    def status(self) -> ClusterStatus:
        """Who leads, and how each node does; nodes that are down are in it too. ConnectFailed if all are.

        Every address is asked on a connection of its own, also those that only the nodes' answers name.
        """
        rounds = status.ask(self._options.addresses)
        wait_s = min(status.ANSWER_S, self._options.timeout_s)
        try:
            wanted = next(rounds)
            while True:
                wanted = rounds.send(_ask_nodes(wanted, wait_s))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    # How a call is made ---------------------------------------------------------------------------------

    def _ask(self, queue: str, kind: type[T], build: Any) -> T:
        return calls.expect(kind, self._run(self._names.asking(queue, build)))

    def _run(self, steps: Steps[T], extra_s: float = 0.0) -> T:
        """Take all steps within one timeout. Raises what the last of them could not get over."""
        loop = self._started()
        deadline_s = time.monotonic() + self._options.timeout_s + extra_s
        try:
            request = next(steps)
            while True:
                request = calls.advance(steps, loop.outcome_of(loop.ask(request, deadline_s)))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    def _started(self) -> Loop:
        loop = self._loop
        if loop is not None:
            return loop
        with self._lock:
            if self._closed:
                raise BadValue(field="client", problem="is closed; make another")
            if self._loop is None:
                self._loop = Loop(self._options.core())
            return self._loop

    def _after_fork(self) -> None:
        """In the child, before anything else runs there: what a thread of the parent held is not ours."""
        loop, self._loop, self._lock = self._loop, None, Lock()
        if loop is not None:
            loop.drop_sockets()


class Lease(LeaseFacts):
    """Messages held until `deadline_ms`; `id` is the fencing token. Methods without versions mean all still held.

    Refused as a whole raises that error, in part `PartlyRefused`; what this object settled before is not asked again.
    """

    def __init__(self, client: Client, held: Held) -> None:
        super().__init__(held)
        self._client = client

    def ack(self, versions: Iterable[int] | None = None) -> r.Settled:
        return self._settle("ack", versions, leases.acking(self._held.group))

    def nack(
        self, versions: Iterable[int] | None = None, delay_ms: int | None = None, not_before_ms: int | None = None,
        error: str | None = None, dead: bool = False,
    ) -> r.Settled:  # fmt: skip
        return self._settle("nack", versions, leases.nacking(self._held.group, delay_ms, not_before_ms, error, dead))

    def release(self, versions: Iterable[int] | None = None) -> r.Settled:
        return self._settle("release", versions, leases.releasing(self._held.group))

    def extend(self, visibility_timeout_ms: int | None = None, begin: Iterable[int] | None = None) -> r.Extended:
        held = self._held
        reply = self._client.extend(held.queue, held.id, held.group, visibility_timeout_ms, begin)
        held.extended(reply)
        return reply

    def _settle(
        self, verb: Literal["ack", "nack", "release"], versions: Iterable[int] | None, command: leases.Settle
    ) -> r.Settled:
        client = self._client
        return client._run(leases.settle(client._names, self._held, verb, versions, command))


@dataclass(frozen=True, slots=True, kw_only=True)
class Received(Delivered):
    """A message in hand, with the lease that it came in."""

    lease: Lease

    def ack(self) -> r.Settled:
        return self.lease.ack([self.version])

    def nack(
        self, delay_ms: int | None = None, not_before_ms: int | None = None,
        error: str | None = None, dead: bool = False,
    ) -> r.Settled:  # fmt: skip
        return self.lease.nack([self.version], delay_ms, not_before_ms, error, dead)

    def release(self) -> r.Settled:
        return self.lease.release([self.version])


class Consumer:
    """One message after the other, each the caller's to settle. Not for two threads at once.

    `max_messages` are leased at a time. When the block ends, those that were not handed out yet are released, at no
    attempt. An error of a call comes out of the loop; another loop in the same block goes on.
    """

    def __init__(self, client: Client, wanted: Wanted) -> None:
        self._client, self._wanted = client, wanted
        self._lease: Lease | None = None
        self._hand: Hand | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        lease, hand, self._lease, self._hand = self._lease, self._hand, None, None
        rest = hand.rest() if hand is not None else []
        if lease is not None and rest:
            with suppress(Refused, Unavailable, Indeterminate):  # their lease then ends by itself
                lease.release(rest)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Received:
        while True:
            message = self._next_in_hand()
            if message is not None:
                return message
            wanted = self._wanted
            lease = self._client.lease(
                wanted.queue,
                group=wanted.group,
                max_messages=wanted.max_messages,
                wait_ms=wanted.wait_ms,
                visibility_timeout_ms=wanted.visibility_timeout_ms,
            )
            if not lease and wanted.until_empty:
                raise StopIteration
            self._lease, self._hand = lease, Hand(lease.held, time.monotonic())

    def _next_in_hand(self) -> Received | None:
        lease, hand = self._lease, self._hand
        if lease is None or hand is None:
            return None
        if hand.is_due(time.monotonic()):
            try:
                reply = lease.extend(self._wanted.visibility_timeout_ms)
                hand.extended(reply, time.monotonic())
            except (LeaseExpired, LeaseNotFound):
                hand.lost()
        message = hand.take()
        return received(Received, message, lease) if message is not None else None


class Transaction(Collected):
    """All or nothing, one log entry (X1): sent when the block ends, unless it ends by an exception."""

    def __init__(self, client: Client) -> None:
        super().__init__()
        self._client = client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self._client._run(self.commit(self._client._names))


def _ask_nodes(addresses: Sequence[Address], wait_s: float) -> dict[Address, Heard]:
    """Ask each node how it does, all at once. Threads that nobody waits for: a name's lookup knows no deadline."""
    deadline_s = time.monotonic() + wait_s
    heard: dict[Address, Heard] = {}
    told: SimpleQueue[tuple[Address, Heard]] = SimpleQueue()
    for address in addresses:
        asking = lambda address=address: told.put((address, _ask_node(address, deadline_s)))  # noqa: E731
        Thread(target=asking, name=f"holdfast-status-{address}", daemon=True).start()
    with suppress(Empty):
        while len(heard) < len(addresses):
            address, what = told.get(timeout=max(deadline_s - time.monotonic(), 0.0))
            heard[address] = what
    return status.with_the_silent(addresses, heard)


def _ask_node(address: Address, deadline_s: float) -> Heard:
    exchange = status.Exchange()
    try:
        left_s = max(deadline_s - time.monotonic(), 0.001)
        with socket.create_connection(host_and_port(address), timeout=left_s) as sock:
            sock.sendall(exchange.opening())
            while data := sock.recv(65_536):
                heard = exchange.feed(data)
                if heard is not None:
                    return heard
                sock.settimeout(max(deadline_s - time.monotonic(), 0.001))
        return status.hung_up(address)
    except (OSError, ValueError) as error:
        return status.unreachable(address, error)


_clients: "weakref.WeakSet[Client]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for client in list(_clients):
        client._after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
