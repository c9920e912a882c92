"""A transaction as it is collected, and the steps that commit it; both shells put their block around this."""

from collections.abc import Callable, Iterable, Mapping

from holdfast.client import leases
from holdfast.client.calls import Names, Payloads, Steps, expect
from holdfast.client.leases import Held, LeaseFacts, Verb, ranges_of
from holdfast.client.message import Message, pack
from holdfast.client.protocol import commands as c
from holdfast.client.protocol import replies as r
from holdfast.client.protocol.errors import Indeterminate, TransactionRefused
from holdfast.client.protocol.values import QueueId

Item = c.AckBatch | c.Nack | c.Produce


class Collected:
    """Collects; `commit` sends all in one entry, or nothing (X1)."""

    def __init__(self) -> None:
        self.versions: dict[str, list[int]] = {}  # what was written, by queue; empty until it is committed
        self._items: list[tuple[str, Callable[[QueueId], Item]]] = []
        self._settles: list[tuple[Held, Verb, list[int]]] = []

    def ack(self, lease: LeaseFacts, versions: Iterable[int] | None = None) -> None:
        self._settle(lease.held, "ack", versions, leases.acking(lease.held.group))

    def ack_version(self, queue: str, group: str, lease_id: int, version: int) -> None:
        """The same for who has no lease object, but one message of it."""
        command = leases.acking(group)
        self._items.append((queue, lambda queue_id: command(queue_id, ((lease_id, version, version),))))

    def nack(
        self, lease: LeaseFacts, versions: Iterable[int] | None = None, delay_ms: int | None = None,
        not_before_ms: int | None = None, error: str | None = None, dead: bool = False,
    ) -> None:  # fmt: skip
        command = leases.nacking(lease.held.group, delay_ms, not_before_ms, error, dead)
        self._settle(lease.held, "nack", versions, command)

    def produce(
        self, queue: str, payloads: Payloads, key: str | None = None, headers: Mapping[str, str] | None = None,
        delay_ms: int | None = None, not_before_ms: int | None = None, ttl_ms: int | None = None,
    ) -> None:  # fmt: skip
        columns, body = pack(payloads, Message(b"", key, headers, delay_ms, not_before_ms, ttl_ms))
        if columns.ends:
            build = lambda queue_id: c.Produce(queue_id=queue_id, columns=columns, body=body)  # noqa: E731
            self._items.append((queue, build))

    def commit(self, names: Names) -> Steps[None]:
        """Raises TransactionRefused with the first item that cannot be done; then nothing is."""
        if not self._items:
            return
        items = []
        for queue, build in self._items:
            queue_id = yield from names.resolve(queue)
            items.append(build(queue_id))
        try:
            answer = yield c.Transaction(items=tuple(items))
        except TransactionRefused:
            for queue, _ in self._items:
                names.forget(queue)
            raise
        except Indeterminate:
            for held, verb, versions in self._settles:
                held.perhaps_settled(verb, versions)
            raise
        for held, verb, versions in self._settles:
            held.settled(verb, versions)
        by_id = {item.queue_id: queue for item, (queue, _) in zip(items, self._items, strict=True)}
        for written, first, last in expect(r.Committed, answer).versions:
            self.versions.setdefault(by_id[QueueId(written)], []).extend(range(first, last + 1))

    def _settle(
        self,
        held: Held,
        verb: Verb,
        versions: Iterable[int] | None,
        command: Callable[[QueueId, tuple[c.SettleRange, ...]], c.AckBatch | c.Nack],
    ) -> None:
        wanted = held.wanted(verb, versions)
        if wanted:
            ranges = tuple((held.id, first, last) for first, last in ranges_of(wanted))
            self._items.append((held.queue, lambda queue_id: command(queue_id, ranges)))
            self._settles.append((held, verb, wanted))
