"""A short way to tell stories to the model: named people, whole requests numbered by themselves, time as a number.

Time begins at 1,000,000 ms. `at(5)` is five milliseconds after that.
"""

from typing import Any

from holdfast.client.protocol import commands as c
from holdfast.client.protocol import queries as q
from holdfast.client.protocol.columns import MessageParts, pack
from holdfast.client.protocol.errors import HoldfastError
from holdfast.client.protocol.replies import Failed, Leased, Produced, QueueCreated, Reply, Settled
from holdfast.client.protocol.values import GroupSettings, LeaseId, QueueId, QueueSettings, SessionId, TxnId
from holdfast.jepsen.model.machine import Model

START_MS = 1_000_000
HOUR_MS = 3_600_000
Q = QueueId(1)  # the first queue of every story
DEFAULT = "default"


def session_of(name: str) -> SessionId:
    return SessionId(name.encode().ljust(16, b"."))


def parts(*payloads: str | MessageParts) -> tuple[Any, bytes]:
    """Columns and body of messages, of which a plain one may be given as its text."""
    return pack([one if isinstance(one, MessageParts) else MessageParts(one.encode()) for one in payloads])


class Story:
    def __init__(self, *, groups: tuple[str, ...] = (DEFAULT,), **settings: Any) -> None:
        self.model = Model()
        self.now_ms = START_MS
        self.index = 0
        self.numbers: dict[str, int] = {}
        self.queue("q", groups=groups, **settings)

    # Time and requests

    def at(self, ms: int) -> "Story":
        self.now_ms = START_MS + ms
        return self

    def send(self, *envelopes: c.Envelope) -> list[Reply]:
        """One entry of the log."""
        self.index += 1
        return [answer.reply for answer in self.model.apply(self.index, self.now_ms, envelopes)]

    def envelope(self, command: c.Command, by: str = "ann", seq: int | None = None, done_below: int = 0) -> c.Envelope:
        if by not in self.numbers:
            self.numbers[by] = 0
            self.send(c.Envelope(principal="p", command=c.OpenSession(consumer_id=by), session=session_of(by)))
        if seq is None:
            self.numbers[by] += 1
            seq = self.numbers[by]
        return c.Envelope(
            principal="p", command=command, session=session_of(by), request_seq=seq, done_below=done_below
        )

    def do(self, command: c.Command, by: str = "ann", seq: int | None = None, done_below: int = 0) -> Reply:
        return self.send(self.envelope(command, by, seq, done_below))[0]

    def refused(
        self, command: c.Command, by: str = "ann", seq: int | None = None, done_below: int = 0
    ) -> HoldfastError:
        reply = self.do(command, by, seq, done_below)
        assert isinstance(reply, Failed), reply
        return reply.error

    def ask(self, query: q.Query) -> Any:
        return self.model.query(query)

    # The usual commands

    def queue(self, name: str, *, groups: tuple[str, ...] = (DEFAULT,), **settings: Any) -> QueueId:
        reply = self.do(c.CreateQueue(name=name, settings=QueueSettings(**settings), groups=groups))
        assert isinstance(reply, QueueCreated), reply
        return reply.queue_id

    def group(self, name: str, start: Any = "earliest", queue: int = Q, **settings: Any) -> Reply:
        return self.do(
            c.CreateGroup(queue_id=QueueId(queue), group=name, start=start, settings=GroupSettings(**settings))
        )

    def update(self, queue: int = Q, **changes: Any) -> Reply:
        return self.do(c.UpdateQueue(queue_id=QueueId(queue), changes=tuple(changes.items())))

    def limits(self, **changes: int) -> Reply:
        return self.do(c.SetLimits(changes=tuple(changes.items())))

    def step(self, by_ms: int) -> Reply:
        return self.send(c.Envelope(principal="p", command=c.TimeStep(by_ms=by_ms)))[0]

    def produce(self, *payloads: str | MessageParts, queue: int = Q) -> Produced:
        """Numbered under ann's session."""
        columns, body = parts(*payloads)
        reply = self.do(c.Produce(queue_id=QueueId(queue), columns=columns, body=body))
        assert isinstance(reply, Produced), reply
        return reply

    def numbered(self, client_id: str, first_seq: int, *payloads: str | MessageParts, **more: Any) -> Reply:
        columns, body = parts(*payloads)
        queue_id = more.pop("queue_id", Q)
        command = c.Produce(
            queue_id=queue_id, columns=columns, body=body, client_id=client_id, first_seq=first_seq, **more
        )
        return self.send(c.Envelope(principal="p", command=command))[0]

    def lease(self, most: int = 100, by: str = "ann", group: str = DEFAULT, queue: int = Q, **more: Any) -> Leased:
        reply = self.do(c.Lease(queue_id=QueueId(queue), group=group, max_messages=most, **more), by)
        assert isinstance(reply, Leased), reply
        return reply

    def ack(self, lease: int, first: int, last: int, by: str = "ann", group: str = DEFAULT, queue: int = Q) -> Settled:
        reply = self.do(c.AckBatch(queue_id=QueueId(queue), group=group, ranges=((lease, first, last),)), by)
        assert isinstance(reply, Settled), reply
        return reply

    def nack(
        self,
        lease: int,
        first: int,
        last: int,
        by: str = "ann",
        group: str = DEFAULT,
        queue: int = Q,
        **more: Any,
    ) -> Settled:
        reply = self.do(c.Nack(queue_id=QueueId(queue), group=group, ranges=((lease, first, last),), **more), by)
        assert isinstance(reply, Settled), reply
        return reply

    def release(self, lease: int, first: int, last: int, by: str = "ann") -> Settled:
        reply = self.do(c.Release(queue_id=Q, group=DEFAULT, ranges=((lease, first, last),)), by)
        assert isinstance(reply, Settled), reply
        return reply

    def extend(self, lease: int, by: str = "ann", **more: Any) -> Any:
        return self.do(c.Extend(queue_id=Q, group=DEFAULT, lease_id=LeaseId(lease), **more), by)

    def touch(self, queue: int = Q) -> Reply:
        return self.send(c.Envelope(principal="p", command=c.Touch(queue_id=QueueId(queue))))[0]

    def kill(self, *versions: int, queue: int = Q, group: str = DEFAULT) -> None:
        """Lease everything and reject these."""
        lease = self.lease(queue=queue, group=group)
        for version in versions:
            self.nack(lease.lease_id, version, version, dead=True, error="boom", queue=queue, group=group)

    def stage(self, txn: TxnId, *payloads: str | MessageParts, **more: Any) -> Reply:
        columns, body = parts(*payloads)
        fields: dict[str, Any] = {
            "part": 0,
            "attempt": "a",
            "chunk": 0,
            "queue_id": Q,
            "expires_ms": 60_000,
            "content_hash": bytes(7) + bytes([len(payloads)]),
        } | more
        command = c.Stage(txn=txn, columns=columns, body=body, **fields)
        return self.send(c.Envelope(principal="p", command=command))[0]

    # Looking

    def states(self, group: str = DEFAULT, queue: int = Q) -> dict[int, str]:
        versions = self.model.groups_view(queue)["groups"][group]["versions"]
        return {version: one["state"] for version, one in versions.items()}

    def life(self, version: int, group: str = DEFAULT, queue: int = Q) -> dict[str, Any]:
        found: dict[str, Any] = self.model.groups_view(queue)["groups"][group]["versions"][version]
        return found

    def view(self, queue: int = Q) -> dict[str, Any]:
        return self.model.groups_view(queue)

    def dead(self, group: str = DEFAULT, queue: int = Q) -> dict[int, dict[str, Any]]:
        rows: dict[int, dict[str, Any]] = self.model.groups_view(queue)["groups"][group]["dead"]
        return rows

    def stats(self, group: str = DEFAULT, queue: int = Q) -> Any:
        return self.ask(q.Stats(queue_id=QueueId(queue), group=group))

    def explain(self, version: int | None = None, group: str = DEFAULT) -> Any:
        return self.ask(q.Explain(queue_id=Q, group=group, version=version))


def granted(lease: Leased) -> list[int]:
    """The versions of a lease's grants."""
    return [version for grant in lease.grants for version in range(grant.first, grant.last + 1)]
