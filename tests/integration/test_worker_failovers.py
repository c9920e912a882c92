"""A worker over a real cluster whose leaders are killed: every message's effect exactly once, in SQLite.

HOLDFAST_FAILOVERS=20 pytest tests/integration/test_worker_failovers.py
"""

import os
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path
from threading import Event, Thread

import pytest

from holdfast.client.blocking import Client
from holdfast.client.inbox import Inbox
from holdfast.client.worker import Received
from tests.support.processes import cluster, until
from tests.support.workers import running

FAILOVERS = int(os.environ.get("HOLDFAST_FAILOVERS", "3"))
DONE_S = 60.0


def producing(client: Client, stopping: Event, sent: list[int]) -> Thread:
    """One message after the other, each under its own number until it is confirmed."""

    def produce() -> None:
        for number in count(1):
            if stopping.is_set():
                return
            client.produce("orders", [b"%d" % number], client_id="shop", client_seq=number)
            sent.append(number)

    thread = Thread(target=produce, name="producer", daemon=True)
    thread.start()
    return thread


def paying(database: Path, runs: Counter[int]) -> Callable[[Received], None]:
    def pay(message: Received) -> None:
        number = int(message.payload)
        runs[number] += 1
        with closing(sqlite3.connect(database, timeout=30)) as connection:
            inbox = Inbox(connection)
            with connection:
                if inbox.once(message):
                    connection.execute("INSERT INTO payments VALUES (?)", (number,))

    return pay


def further(runs: Counter[int]) -> Callable[[], bool]:
    before = len(runs)
    return lambda: len(runs) > before + 20


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["threads", "trio"] if FAILOVERS < 10 else ["threads"])
def test_every_effect_happens_once_through_failovers(tmp_path: Path, shell: str) -> None:
    database = tmp_path / "payments.db"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE payments (number INTEGER)")
        connection.commit()
    sent: list[int] = []
    runs: Counter[int] = Counter()
    stopping = Event()
    with cluster(tmp_path / "cluster") as nodes, nodes.client(timeout_ms=60_000) as client:
        until(
            lambda: client.create_queue("orders", visibility_timeout_ms=3_000, max_delivery_attempts=1_000), "a queue"
        )
        producer = producing(client, stopping, sent)
        with running(shell, nodes.plan.connect, "orders", paying(database, runs), concurrency=4, prefetch=20) as worker:
            for _ in range(FAILOVERS):
                until(further(runs), "work goes on")
                leader = nodes.leader()
                nodes.kill(leader)
                nodes.leader(among=nodes.others(leader))
                nodes.start(leader)
                nodes.formed()
            stopping.set()
            producer.join(DONE_S)
            assert not producer.is_alive()
            until(lambda: client.stats("orders").acked == len(sent), "all is acked")
            worker.stop()
            worker.join()
        stats = client.stats("orders")
    assert (stats.produced, stats.acked, stats.dead) == (len(sent), len(sent), 0)
    with closing(sqlite3.connect(database)) as connection:
        paid = sorted(number for (number,) in connection.execute("SELECT number FROM payments"))
    assert paid == sent
    print(f"{FAILOVERS} failovers, {len(sent)} messages, {sum(runs.values())} runs of the handler")
