"""The machine and the model, given the same log and compared in all they say and all they hold.

The machine runs on a real store through real entry bytes, and may be reopened or copied at any time; the model is told
nothing of that. `Disagreement` says where the two differ, with the commands of the entry.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.client.protocol import columns as cutting
from holdfast.client.protocol import queries as q
from holdfast.client.protocol.commands import Abort, Envelope, ForgetTxn, Lease, Publish, Stage
from holdfast.client.protocol.replies import (
    Answer,
    DeadListed,
    DeadRow,
    Failed,
    HistoryListed,
    Leased,
    MessageBatch,
    Messages,
    Reply,
)
from holdfast.client.protocol.values import QueueId, TxnId
from holdfast.jepsen.model.machine import Model
from holdfast.storage import digest, machine, views
from holdfast.storage.entry import decode_entry, encode_entry
from holdfast.storage.lmdb_store import LmdbStore
from holdfast.storage.snapshot import install_snapshot, write_snapshot
from holdfast.storage.store import Store
from holdfast.storage.tables import TABLES
from tests.oracle import picture
from tests.support import invariants

START_MS = 1_700_000_000_000
MAP_BYTES = 1 << 26


class Disagreement(AssertionError):
    """The machine and the model differ; one of them breaks the rules."""


class Pair:
    """Both, side by side. Stores live in `folder`, one at a time."""

    def __init__(self, folder: Path) -> None:
        self.model = Model()
        self.index = 0
        self.now_ms = START_MS
        self._folder = folder
        self._copies = 0
        self._txns: set[TxnId] = set()
        self.store: Store = self._open(folder / "0")

    def entry(self, envelopes: Sequence[Envelope]) -> tuple[Answer, ...]:
        """One entry for both; raises Disagreement unless every answer and every delivered message is the same."""
        self.index += 1
        entry = decode_entry(self.index, encode_entry(self.now_ms, envelopes))
        applied = self.store.transact(lambda txn: machine.apply(txn, entry))
        expected = self.model.apply(self.index, self.now_ms, envelopes)
        for envelope, answer, other in zip(envelopes, applied.answers, expected, strict=True):
            self._compare(f"answer to {envelope}", _plain(answer.reply), _plain(other.reply))
            self._compare(f"place of the answer to {envelope}", answer.place, other.place)
            command = envelope.command
            if isinstance(command, Stage | Publish | Abort | ForgetTxn):
                self._txns.add(command.txn)
        for envelope, answer in zip(envelopes, applied.answers, strict=True):
            if isinstance(envelope.command, Lease) and isinstance(answer.reply, Leased):
                self._compare_bodies(envelope.command.queue_id, answer.reply)
        return applied.answers

    def compare_state(self) -> None:
        """Everything that both hold, by the model's picture; and the tables against themselves."""
        with self.store.read() as txn:
            invariants.check(txn)
            mine = picture.of_store(txn, self._txns)
        theirs = picture.of_model(self.model)
        if mine != theirs:
            raise Disagreement("\n".join(_differences("state", mine, theirs)))

    def compare_queries(self) -> None:
        """What both answer to every question that can be asked about every queue, group and version."""
        for queue in list(self.model.state.queues.values()):
            queue_id = QueueId(queue.id)
            questions: list[q.Query] = [
                q.DescribeQueue(name=queue.name),
                q.ListQueues(),
                q.ListGroups(queue_id=queue_id),
                q.Peek(queue_id=queue_id, limit=3),
                q.Read(queue_id=queue_id, from_version=1, to_version=queue.tail + 1),
                q.Read(queue_id=queue_id, from_version=queue.lowest_stored, to_version=queue.tail + 1),
                q.History(queue_id=queue_id),
                q.FindByKey(queue_id=queue_id, key=b"k"),
                *(q.ProducerState(queue_id=queue_id, client_id=one) for one in queue.producers),
                *(q.TxnStatus(txn=txn) for txn in sorted(self._txns, key=repr)),
            ]
            for group in queue.groups:
                questions += [
                    q.Stats(queue_id=queue_id, group=group),
                    q.Peek(queue_id=queue_id, group=group, limit=100),
                    q.Explain(queue_id=queue_id, group=group),
                    q.FindMoved(queue_id=queue_id, group=group),
                    q.FindMoved(
                        queue_id=queue_id, group=group, where="attempts >= 2 and not reason = 'expired'", limit=2
                    ),
                    *(q.Explain(queue_id=queue_id, group=group, version=v) for v in range(1, queue.tail + 2)),
                ]
            with self.store.read() as txn:
                for question in questions:
                    mine = views.answer(txn, question).reply
                    self._compare(f"answer to {question}", _plain(mine), _plain(self.model.query(question)))

            for where in ("", "attempts >= 1 and reason != 'expired'"):
                deaths = self._deaths(queue_id, where, ask_model=False)
                expected = self._deaths(queue_id, where, ask_model=True)
                self._compare(f"deaths of queue {queue_id} where {where!r}", deaths, expected)

    def _deaths(self, queue_id: QueueId, where: str, *, ask_model: bool) -> list[DeadRow]:
        """All dead letters of a queue, page by page; the order within a page is the machine's own affair."""
        rows: list[DeadRow] = []
        token = b""
        while True:
            query = q.DeadLetters(queue_id=queue_id, where=where, limit=2, after=token)
            if ask_model:
                reply = self.model.query(query)
            else:
                with self.store.read() as txn:
                    reply = views.answer(txn, query).reply
            assert isinstance(reply, DeadListed), reply
            rows += reply.rows
            token = reply.next_token
            if not token:
                return sorted(rows, key=lambda row: (row.group, row.dead_seq))

    def reopen(self) -> None:
        """Close the store and open it again, as after a restart."""
        self.store.close()
        self.store = self._open(self._folder / str(self._copies))

    def copy(self) -> None:
        """Go on in a store that was made from a snapshot of the present one."""
        self._copies += 1
        snapshot = self._folder / f"{self._copies}.snapshot"
        directory = self._folder / str(self._copies)
        write_snapshot(self.store, snapshot, b"")
        before = self.digest()
        self.store.close()
        install_snapshot(snapshot, directory, kind="lmdb")
        snapshot.unlink()
        self.store = self._open(directory)
        self._compare("digest after a snapshot", self.digest(), before)

    def restore(self) -> None:
        """Both begin the next restore generation (T4)."""
        self.store.transact(machine.begin_generation)
        self.model.restore()

    def digest(self) -> int:
        with self.store.read() as txn:
            return digest.maintained(txn)

    def close(self) -> None:
        self.store.close()

    def _open(self, directory: Path) -> Store:
        directory.mkdir(exist_ok=True)
        return LmdbStore(directory, TABLES, initial_map_bytes=MAP_BYTES)

    def _compare_bodies(self, queue_id: int, leased: Leased) -> None:
        """The messages that a lease's answer carries: a replayed one's too."""
        queue = self.model.state.queues.get(queue_id)
        if queue is None:
            return  # deleted later in the same entry
        with self.store.read() as txn:
            found = _messages(views.deliver(txn, queue_id, leased).batches)
        versions = [v for grant in leased.grants for v in range(grant.first, grant.last + 1)]
        expected = []
        for version in versions:
            message = queue.message(version)
            if message is not None:  # settled and freed later in the same entry
                expected.append((version, message.payload, message.key, message.headers))
        stored = {version for version, *_ in expected}  # the machine may store the others for some entries (G5)
        self._compare(f"messages of {leased}", [(m[0], *m[-3:]) for m in found if m[0] in stored], expected)

    def _compare(self, what: str, mine: object, theirs: object) -> None:
        if mine != theirs:
            raise Disagreement(f"{what}\n  machine: {mine}\n  model:   {theirs}")


def _plain(reply: Reply) -> object:
    """A reply by what it means: errors by their facts, messages one by one."""
    if isinstance(reply, Failed):
        return type(reply.error).__name__, reply.error.facts
    if isinstance(reply, Messages):
        return _messages(reply.batches), reply.next_version
    if isinstance(reply, HistoryListed):
        return picture.history_by_version(reply.rows)
    return reply


def _messages(batches: Sequence[MessageBatch]) -> list[tuple[Any, ...]]:
    return [
        (
            batch.first + index,
            batch.generation,
            batch.enqueued_ms,
            batch.client_id,
            batch.first_seq + index,
            cutting.payload_of(batch.columns, batch.body, index),
            cutting.key_of(batch.columns, batch.body, index),
            tuple(cutting.decode_headers(cutting.header_cell(batch.columns, batch.body, index)).items()),
        )
        for batch in batches
        for index in range(batch.columns.count)
    ]


def _differences(where: str, mine: object, theirs: object) -> list[str]:
    """The paths at which two pictures differ."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        keys = sorted({*mine, *theirs}, key=repr)
        return [line for key in keys for line in _differences(f"{where}[{key!r}]", mine.get(key), theirs.get(key))]
    return [] if mine == theirs else [f"{where}\n  machine: {mine}\n  model:   {theirs}"]
