"""`holdfast top` in a terminal, on three processes whose leader is killed while it draws."""

from pathlib import Path

import pytest

from tests.support.processes import cluster
from tests.support.terminal import TerminalCommand


@pytest.mark.slow
def test_top_goes_on_when_the_leader_is_killed(tmp_path: Path) -> None:
    with cluster(tmp_path) as nodes, nodes.client() as client:
        client.create_queue("orders")
        first = nodes.leader()
        with TerminalCommand("top", "--interval", "100ms", connect=nodes.plan.connect) as top:
            top.until(f"leader {first}")
            top.until(r"orders +default +0 ")
            nodes.kill(first)
            top.until(f"{first} +down")
            second = nodes.leader(among=nodes.others(first))
            top.until(f"leader {second}")
            client.produce("orders", [b"a"] * 7)
            top.until(r"orders +default +7 ")
            nodes.start(first)
            top.forget()
            top.until(f"{first} +follower")
            top.type("q")
            assert top.end() == 0
            assert top.leaves_the_terminal_as_it_was()
