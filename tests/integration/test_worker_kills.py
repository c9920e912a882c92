"""Worker processes that are killed, and that are told to end: what becomes of their messages and of their effects."""

import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from holdfast.client.blocking import Client
from holdfast.cluster.embedded import Node
from tests.support import drain_worker, pay_worker
from tests.support.processes import until
from tests.support.workers import SHELLS

PROGRAM = Path(pay_worker.__file__)
LINES_MAX = 60
END_S = 60.0


@contextmanager
def worker(address: str, database: Path, step: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, str(PROGRAM), address, str(database), step], cwd=PROGRAM.parents[2])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def payments(database: Path) -> list[int]:
    with closing(sqlite3.connect(database)) as connection:
        return sorted(cents for (cents,) in connection.execute("SELECT cents FROM payments"))


@pytest.mark.slow
def test_each_effect_happens_once_wherever_the_worker_is_killed(tmp_path: Path) -> None:
    """At each line of the example as it is run, at its end, before the ack is sent, and when it is answered."""
    database = tmp_path / "payments.db"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE payments (customer TEXT, cents INTEGER)")
        connection.commit()
    with Node(tmp_path / "node", fsync="os") as node, Client(node.address, timeout_ms=10_000) as client:
        client.create_queue("orders", visibility_timeout_ms=600, max_delivery_attempts=1_000)
        paid = 0

        def killed_at(step: str) -> bool:
            """A new message, and a worker that dies at this step; false if it never came there."""
            nonlocal paid
            paid += 1
            client.produce("orders", [str(paid).encode()], key=f"customer {paid}")
            with worker(node.address, database, step) as process:
                until(lambda: process.poll() is not None or client.stats("orders").acked == paid, f"killed at {step}")
                return process.poll() == -signal.SIGKILL

        lines = 0
        while killed_at(str(lines)):
            lines += 1
            assert lines < LINES_MAX
        assert lines >= 9, "each line of the example, and its end"
        assert killed_at("ack")
        assert killed_at("acked")
        with worker(node.address, database, "never") as process:
            until(lambda: client.stats("orders").acked == paid, "all is acked")
            process.terminate()
            assert process.wait(END_S) == 0
    assert payments(database) == list(range(1, paid + 1))


@contextmanager
def draining(shell: str, tmp_path: Path) -> Iterator[tuple[Client, "subprocess.Popen[bytes]"]]:
    """A worker process that is busy with one of five messages and holds the others."""
    with Node(tmp_path / "node", fsync="os") as node, Client(node.address, timeout_ms=10_000) as client:
        client.create_queue("orders", visibility_timeout_ms=600_000)
        client.produce("orders", [b"order"] * 5)
        command = [sys.executable, str(drain_worker.__file__), shell, node.address, str(tmp_path)]
        process = subprocess.Popen(command, cwd=PROGRAM.parents[2])
        try:
            until(lambda: (tmp_path / "begun").exists(), "its handler runs")
            until(lambda: client.stats("orders").in_flight == 5, "it holds all five")
            yield client, process
        finally:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
def test_sigterm_drains(shell: str, tmp_path: Path) -> None:
    with draining(shell, tmp_path) as (client, process):
        process.send_signal(signal.SIGTERM)
        until(lambda: client.stats("orders").ready == 4, "what was not begun is handed back at once")
        assert process.poll() is None
        (tmp_path / "go").touch()
        assert process.wait(END_S) == 0
        assert client.stats("orders").acked == 1
        assert (tmp_path / "ended").exists()
        assert [message.attempts for message in client.lease("orders")] == [1, 1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
def test_a_second_signal_gives_up_what_runs(shell: str, tmp_path: Path) -> None:
    with draining(shell, tmp_path) as (client, process):
        process.send_signal(signal.SIGINT)
        until(lambda: client.stats("orders").ready == 4, "the first one is heard")
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 0
        assert client.stats("orders").acked == 0
        assert client.stats("orders").in_flight == 1
