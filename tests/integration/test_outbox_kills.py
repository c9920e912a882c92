"""A real process with an outbox is killed at each step, and started again: every row once, in its order."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.client.blocking import Client
from holdfast.client.outbox import OutboxMismatch
from holdfast.cluster.embedded import Node
from tests.support.outbox_child import STEPS

CHILD = Path(__file__).parents[1] / "support" / "outbox_child.py"
ROWS = 40


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with Node(tmp_path / "node") as node:
        yield node


def run(node: Node, outbox: Path, step: str = "never", occurrence: int = 1, rows: int = ROWS) -> int:
    """How it ended. SIGKILL is by its own hand, at that step."""
    arguments = [node.address, str(outbox), str(rows), step, str(occurrence)]
    return subprocess.run([sys.executable, str(CHILD), *arguments], timeout=60).returncode


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_a_producer_that_is_killed_at_a_step_loses_and_doubles_no_row(node: Node, tmp_path: Path, step: str) -> None:
    """P2, as the client does it."""
    with Client(node.address) as client:
        client.create_queue("q")
        killed = 0
        for occurrence in (1, 2, 4):  # what the former one left is sent again by one that dies too
            killed += run(node, tmp_path / "o", step, occurrence) == -signal.SIGKILL
        assert killed == 3 or step == "at_close"
        assert run(node, tmp_path / "o") == 0
        assert [message.payload for message in client.read("q")] == [b"%d" % row for row in range(1, ROWS + 1)]
        assert [message.client_seq for message in client.read("q")] == list(range(1, ROWS + 1))
        assert client.stats("q").produced == ROWS


@pytest.mark.slow
def test_what_a_killed_process_left_never_reaches_a_queue_that_was_created_again(node: Node, tmp_path: Path) -> None:
    with Client(node.address) as client:
        client.create_queue("q")
        assert run(node, tmp_path / "o", "after_save") == -signal.SIGKILL
        client.delete_queue("q")
        client.create_queue("q")
        with pytest.raises(OutboxMismatch):
            client.producer("q", client_id="rows", outbox=tmp_path / "o")
        assert list(client.read("q")) == []
