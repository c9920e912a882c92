"""The machine against the model while a purge or a seek is not done (G5): one row is reaped an entry.

The model does all at once, and knows of no budget. So the machine may lag behind in what is stored, and in nothing
else: commands that look at storage wait here until nothing is left to be done, all others, and all questions, do not.
"""

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.client.protocol import queries as q
from holdfast.client.protocol.commands import (
    AckBatch,
    Envelope,
    Extend,
    Lease,
    Nack,
    OpenSession,
    Produce,
    PurgeQueue,
    Release,
    SetLimits,
    TimeStep,
    Touch,
    Transaction,
)
from holdfast.client.protocol.values import QueueId
from holdfast.storage import views
from holdfast.storage.tables import Table
from tests.oracle.pair import _plain
from tests.oracle.test_oracle import Run
from tests.support import invariants
from tests.support.generator import PURGES, Generator
from tests.support.machine import session_id

SEEDS = range(0, 16)
ENTRIES = 120
AT_ONCE = (AckBatch, Extend, Lease, Nack, OpenSession, Produce, PurgeQueue, Release, TimeStep, Touch, Transaction)
RARE = (
    "open_producer", "forget_producer", "cancel", "reschedule", "redrive", "redrive_to_origin", "drop_dead", "stage",
    "publish", "abort", "update_queue", "create_group", "update_group", "seek", "report_cursor", "delete_group",
    "delete_queue", "forget_txn", "set_limits",
)  # fmt: skip
HOLES = 10_000  # a cap that nobody reaches: a Lease that meets it waits until all is done


class SlowRun(Run):
    """A run whose machine reaps one row an entry."""

    def __init__(self, seed: int, folder: Path) -> None:
        super().__init__(seed, folder)
        settings = {**PURGES.settings, "max_ack_holes": (HOLES,), "default_message_ttl_ms": (None, None, 5_000)}
        likes = PURGES.likes | dict.fromkeys(RARE, 0.1)
        self.generator = Generator(self.rng, replace(PURGES, likes=likes, settings=settings))
        self._number = 1
        self.unfinished = 0
        self._limit(1)

    def entry(self) -> None:
        pair, generator = self.pair, self.generator
        pair.now_ms += generator.step_ms()
        envelopes = generator.entry()
        if not all(isinstance(envelope.command, AT_ONCE) for envelope in envelopes):
            self._finish()
            self._limit(256)
        for envelope, answer in zip(envelopes, pair.entry(envelopes), strict=True):
            generator.learn(envelope, answer)
        if not all(isinstance(envelope.command, AT_ONCE) for envelope in envelopes):
            self._finish()
            self._limit(1)
        generator.known.deaths = [
            (queue.id, group.name, row.version, row.dead_seq)
            for queue in pair.model.state.queues.values()
            for group in queue.groups.values()
            for row in group.dead.values()
        ]

    def play(self, entries: int) -> None:
        for number in range(entries):
            self.entry()
            self.ask()
            if number % 40 == 39:
                self.pair.copy() if self.rng.random() < 0.5 else self.pair.reopen()
        self._finish()
        self.pair.compare_state()

    def ask(self) -> None:
        """All that does not depend on what is stored."""
        self.unfinished += self._left()
        with self.pair.store.read() as txn:
            invariants.check(txn)
            for queue in self.pair.model.state.queues.values():
                queue_id = QueueId(queue.id)
                questions: list[q.Query] = []
                for group in queue.groups:
                    questions += [
                        q.Stats(queue_id=queue_id, group=group),
                        q.Peek(queue_id=queue_id, group=group, limit=100),
                        q.Explain(queue_id=queue_id, group=group),
                        *(q.Explain(queue_id=queue_id, group=group, version=v) for v in range(1, queue.tail + 2)),
                    ]
                for question in questions:
                    mine = views.answer(txn, question).reply
                    self.pair._compare(f"answer to {question}", _plain(mine), _plain(self.pair.model.query(question)))
        for queue_id in map(QueueId, self.pair.model.state.queues):
            deaths = self.pair._deaths(queue_id, "", ask_model=False)
            self.pair._compare(f"deaths of {queue_id}", deaths, self.pair._deaths(queue_id, "", ask_model=True))

    def _finish(self) -> None:
        """Entries without a command, until nothing is left to be done; then retention looks at what was released."""
        while self._left():
            self.pair.entry([])
        touches = [Touch(queue_id=QueueId(queue_id)) for queue_id in self.pair.model.state.queues]
        self.pair.entry([Envelope(principal="local", command=touch, session=session_id(9)) for touch in touches])

    def _left(self) -> bool:
        with self.pair.store.read() as txn:
            return txn.first(Table.REAP, b"", b"\xff" * 9) is not None

    def _limit(self, rows: int) -> None:
        """Under a session of its own, which no other command has."""
        self._number += 1
        command = SetLimits(changes=(("reap_rows", rows),))
        opened = Envelope(principal="local", command=OpenSession(), session=session_id(9))
        asked = Envelope(principal="local", command=command, session=session_id(9), request_seq=self._number)
        self.pair.entry([opened, asked])


@pytest.mark.slow
def test_an_unfinished_purge_is_seen_by_nobody() -> None:
    """G5: whatever is leased, settled, expired, produced or purged again before it is done, all answers are right."""
    first, _, end = os.environ.get("HOLDFAST_SEEDS", "").partition("-")
    seeds = range(int(first), int(end or first + "1")) if first else SEEDS
    unfinished = 0
    for seed in seeds:
        with tempfile.TemporaryDirectory(prefix="holdfast-oracle-") as folder:
            run = SlowRun(seed, Path(folder))
            try:
                run.play(ENTRIES)
            except Exception as error:
                error.add_note(
                    f"seed {seed}, entry {run.pair.index}: HOLDFAST_SEEDS={seed}-{seed + 1} pytest tests/oracle"
                )
                raise
            finally:
                run.pair.close()
            unfinished += run.unfinished
    print(f"{unfinished} of {len(seeds) * ENTRIES} times something was not done yet")
    assert unfinished > len(seeds) * ENTRIES // 8
