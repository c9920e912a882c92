"""The verdict on a whole log: replayed through the naive model of the rules, and held against everything that was said.

Every answer of the fold, those of reads and of empty leases, every delivered message, and lease time against the time
that truly passed. Raises the first `Violation` in the order of the log.
"""

from collections import Counter
from collections.abc import Sequence

from holdfast.client.protocol import columns as cutting
from holdfast.client.protocol import commands as c
from holdfast.client.protocol.errors import AckHoleCapExceeded, InFlightLimit
from holdfast.client.protocol.queries import AnyQuery, Explain, NodeStatus
from holdfast.client.protocol.replies import (
    Answer,
    DeadListed,
    Explained,
    Failed,
    Leased,
    MessageBatch,
    Messages,
    QueueCreated,
    Reply,
)
from holdfast.cluster.consensus import BATCH
from holdfast.jepsen.model.machine import Model
from holdfast.jepsen.simulation.checker import Checker, Violation, plain
from holdfast.jepsen.simulation.host import DRIFT
from holdfast.jepsen.simulation.ledger import Ledger
from holdfast.storage.entry import decode_entry

SLACK_MS = 30  # whole milliseconds, and a tick between taking a stamp and proposing it
SLOWEST = 0.9  # T2: of the leader's clock, while the wall clocks of a majority are behind


class Judge:
    def __init__(self, checker: Checker, gap_s: float | None = None) -> None:
        """`gap_s`: how long a leader may leave an open lease without a stamp, where nothing keeps it from one."""
        self._checker = checker
        self._gap_s = gap_s
        self._attempts_max: dict[int, int] = {}
        self.model = Model()
        self.ledger = Ledger(self._attempts_max)
        self._lead_ms: float | None = None  # the least by which lease time was ever ahead of the fastest clock
        self._former: tuple[int, float, int] | None = None  # of the entry before: term, when formed, lease time

    def run(self) -> Counter[str]:
        checker = self._checker
        self._read(0)
        for index in sorted(checker.chosen):
            term, command = checker.chosen[index]
            if command[:1] == BATCH:
                self._fold(index, term, command[1:])
            self._read(index)
        self.ledger.check_calls(checker.calls)
        return self.ledger.counts + self.model.fired

    # Entries

    def _fold(self, index: int, term: int, data: bytes) -> None:
        entry = decode_entry(index, data)
        envelopes = [envelope for envelope, _ in entry.commands]
        leased_before = self._lease_open()
        lease_before_ms = self.model.state.lease_ms
        expected = self.model.apply(index, entry.stamp_ms, envelopes)
        given = self._checker.answers[index]
        for envelope, answer, other in zip(envelopes, given, expected, strict=True):
            if answer.place != other.place or plain(answer.reply) != plain(other.reply):
                raise Violation(f"entry {index}: {envelope}\n  was answered: {answer}\n  by the rules: {other}")
            if isinstance(envelope.command, c.CreateQueue) and isinstance(answer.reply, QueueCreated):
                self._attempts_max[answer.reply.queue_id] = envelope.command.settings.max_delivery_attempts
            self.ledger.fold(envelope, answer)
        self._check_pace(index, term, self.model.state.lease_ms, lease_before_ms, leased_before)

    def _lease_open(self) -> bool:
        return any(group.leases for queue in self.model.state.queues.values() for group in queue.groups.values())

    def _check_pace(self, index: int, term: int, lease_ms: int, before_ms: int, lease_open: bool) -> None:
        """T2: lease time never outruns the fastest clock; under one leader it never falls behind the slowest."""
        formed_s = self._checker.formed_s[index, term]
        if before_ms:
            lead_ms = lease_ms - formed_s * 1_000 * (1 + DRIFT)
            if self._lead_ms is not None and lead_ms > self._lead_ms + SLACK_MS:
                raise Violation(f"lease time is {lead_ms - self._lead_ms:.0f} ms too far at entry {index}")
            self._lead_ms = lead_ms if self._lead_ms is None else min(self._lead_ms, lead_ms)
        if self._former is not None and self._former[0] == term:
            passed_s = formed_s - self._former[1]
            least_ms = passed_s * 1_000 * (1 - DRIFT) * SLOWEST - SLACK_MS
            if lease_ms - self._former[2] < least_ms:
                raise Violation(f"lease time stood still before entry {index}: {lease_ms - self._former[2]} ms")
            if self._gap_s is not None and lease_open and passed_s > self._gap_s:
                raise Violation(f"a lease was open, and entry {index} came {passed_s:.2f} s after the one before")
        self._former = (term, formed_s, lease_ms)

    # Reads

    def _read(self, index: int) -> None:
        for asked, leased in self._checker.delivered.get(index, ()):
            queue = self.model.state.queues[asked.queue_id]
            stored = {message.version for batch in queue.batches for message in batch.messages}
            self.ledger.check_delivery(asked, leased, stored)
        for what, answer in self._checker.unlogged.get(index, ()):
            if isinstance(what, c.Lease):
                self._check_unlogged_lease(what, answer)
            elif not isinstance(what, NodeStatus):
                self._check_read(what, answer)

    def _check_read(self, what: c.Command | AnyQuery, answer: Answer) -> None:
        expected = self.model.query(what)  # type: ignore[arg-type]  # commands that are no Lease are logged
        if answer.place.time_ms != self.model.state.time_ms or _meaning(answer.reply) != _meaning(expected):
            problem = f"at {answer.place} was answered: {answer.reply}\n  by the rules: {expected}"
            raise Violation(f"{what}\n  {problem}")

    def _check_unlogged_lease(self, what: c.Lease, answer: Answer) -> None:
        """L7, L5: only where nothing can be had, and for that reason."""
        explained = self.model.query(Explain(queue_id=what.queue_id, group=what.group))
        reason = explained.reason if isinstance(explained, Explained) else str(explained)
        match answer.reply:
            case Failed(error=InFlightLimit()):
                right = reason == "in_flight_limit"
            case Failed(error=AckHoleCapExceeded()):
                right = reason == "hole_cap"
            case Leased(grants=()):
                right = reason in ("empty", "leased", "delayed")
            case _:
                right = False
        if not right:
            raise Violation(f"{what} got {answer} without an entry; by the rules it is {explained}")


def _meaning(reply: Reply) -> object:
    """Messages one by one, and dead letters without the token of their page."""
    if isinstance(reply, Messages):
        return _messages(reply.batches), reply.next_version
    if isinstance(reply, DeadListed):
        return sorted(reply.rows, key=lambda row: (row.group, row.dead_seq))
    return plain(reply)


def _messages(batches: Sequence[MessageBatch]) -> list[tuple[object, ...]]:
    return [
        (
            batch.first + index,
            batch.enqueued_ms,
            batch.client_id,
            batch.first_seq + index,
            cutting.payload_of(batch.columns, batch.body, index),
        )
        for batch in batches
        for index in range(batch.columns.count)
    ]
