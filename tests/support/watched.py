"""A machine that counts what its entries cost the store, and checks its tables after every one.

`reap_rows` is one unless told otherwise, so that what a purge or a seek leaves to later entries stays undone (G5).
"""

from collections.abc import Callable
from typing import Any, TypeVar

from holdfast.client.protocol.commands import (
    AckBatch,
    Command,
    CreateQueue,
    Lease,
    Nack,
    OpenSession,
    SetLimits,
    Touch,
)
from holdfast.client.protocol.queries import DeadLetters, DescribeQueue, Explain, Peek, Stats
from holdfast.client.protocol.replies import (
    DeadListed,
    Explained,
    GroupStats,
    Leased,
    Messages,
    QueueDescribed,
    Reply,
)
from holdfast.client.protocol.values import QueueId, QueueSettings
from holdfast.storage.bench_floor import RecordingTxn, Trace
from holdfast.storage.memory_store import MemoryStore
from holdfast.storage.store import WriteTxn
from holdfast.storage.tables import TABLES, Table
from tests.support import invariants
from tests.support.machine import Machine, produce

Q = QueueId(1)
T = TypeVar("T")


class RecordingStore(MemoryStore):
    def __init__(self) -> None:
        super().__init__(TABLES)
        self.trace = Trace()

    def transact(self, work: Callable[[WriteTxn], T]) -> T:
        self.trace = Trace()
        return super().transact(lambda txn: work(RecordingTxn(txn, self.trace)))


class Watched(Machine):
    """A machine that says what its last entry cost, and checks its tables after every one."""

    def __init__(
        self, messages: int = 0, *, reap_rows: int = 1, groups: tuple[str, ...] = ("default",), **settings: Any
    ):
        self._recording = RecordingStore()
        super().__init__(self._recording)
        self.checked = False
        self.do(OpenSession(consumer_id="worker"))
        self.do(OpenSession(consumer_id="other"), session=2)
        self.do(CreateQueue(name="q", settings=QueueSettings(**settings), groups=groups))
        for _ in range(messages):
            self.do(produce(Q, b"m"))
        self.do(SetLimits(changes=(("reap_rows", reap_rows),)))

    def do(self, command: Command, session: int = 1) -> Reply:
        reply = super().do(command, session)
        if self.checked:
            self.check()
        return reply

    def together(self, *commands: Command) -> list[Reply]:
        """Several commands in one entry."""
        return [answer.reply for answer in self.entry([self.envelope(command) for command in commands])]

    def check(self) -> None:
        with self.store.read() as txn:
            invariants.check(txn)

    @property
    def cost(self) -> int:
        return len(self._recording.trace.operations)

    def rows(self, table: Table) -> int:
        with self.store.read() as txn:
            return sum(1 for _ in txn.scan(table, b"", b"\xff" * 64))

    def finish(self) -> None:
        """As many entries as it takes until nothing is left to be done."""
        for _ in range(20_000):
            if not self.rows(Table.REAP):
                return
            super().do(Touch(queue_id=Q))
            if self.checked:
                self.check()
        raise AssertionError("reaping does not end")

    def take(self, count: int = 1, session: int = 1, **named: Any) -> Leased:
        reply = self.do(Lease(queue_id=Q, group="default", max_messages=count, **named), session)
        assert isinstance(reply, Leased), reply
        return reply

    def ack(self, lease: int, first: int, last: int) -> Reply:
        return self.do(AckBatch(queue_id=Q, group="default", ranges=((lease, first, last),)))

    def nack(self, lease: int, first: int, last: int, **named: Any) -> Reply:
        return self.do(Nack(queue_id=Q, group="default", ranges=((lease, first, last),), **named))

    def stats(self, group: str = "default") -> GroupStats:
        """The counters, which must add up (G4)."""
        reply = self.ask(Stats(queue_id=Q, group=group))
        assert isinstance(reply, GroupStats), reply
        states = (reply.ready, reply.delayed, reply.in_flight, reply.acked, reply.dead, reply.moved)
        assert reply.produced == sum(states) + reply.discarded + reply.cancelled + reply.purged + reply.trimmed
        return reply

    def why(self, *versions: int) -> list[str]:
        found = []
        for version in versions:
            reply = self.ask(Explain(queue_id=Q, group="default", version=version))
            assert isinstance(reply, Explained), reply
            found.append(reply.reason)
        return found

    def peeked(self) -> list[int]:
        reply = self.ask(Peek(queue_id=Q, group="default", limit=1_000))
        assert isinstance(reply, Messages), reply
        return [batch.first + index for batch in reply.batches for index in range(batch.columns.count)]

    def dead(self) -> list[int]:
        reply = self.ask(DeadLetters(queue_id=Q))
        assert isinstance(reply, DeadListed), reply
        return [row.version for row in reply.rows]

    def stored(self) -> int:
        reply = self.ask(DescribeQueue(name="q"))
        assert isinstance(reply, QueueDescribed), reply
        return reply.stored_messages


def singles(lease: int, versions: range) -> tuple[tuple[int, int, int], ...]:
    return tuple((lease, version, version) for version in versions)
