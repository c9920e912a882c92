"""`holdfast status` with nodes up and down."""

import os
from collections.abc import Iterator

import pytest

from tests.fakes.scripted_server import Brain, ScriptedServer
from tests.unit.client.cli.conftest import Cli


@pytest.fixture
def followers(server: ScriptedServer) -> Iterator[list[ScriptedServer]]:
    """Two more nodes; `server` leads."""
    others = [ScriptedServer(server.brain, name) for name in ("n2", "n3")]
    for each in (server, *others):
        each.members = [server, *others]
        each.leader = server.address
        each.term = 4
    yield others
    for each in others:
        each.stop()


def test_status_is_one_object_with_all_nodes(cli: Cli, followers: list[ScriptedServer]) -> None:
    cli.ok("queue", "create", "q")
    applied = cli.server.brain.index
    found = cli.ok("status", "--json").object
    rows = found.pop("nodes")
    assert found == {"leader": "n1", "term": 4, "fsync": "always", "cluster_id": "scripted"}
    pid = os.getpid()
    assert rows == [
        {
            "name": node.name,
            "pid": pid,
            "address": node.address,
            "role": role,
            "applied": applied,
            "lag": 0,
            "fsync": "always",
            "problem": None,
        }
        for node, role in zip(cli.server.members, ("leader", "follower", "follower"), strict=True)
    ]


def test_status_answers_with_nodes_down(cli: Cli, followers: list[ScriptedServer]) -> None:
    followers[1].stop()
    found = cli.ok("status", "--json").object
    down = found["nodes"][2]
    assert (down["name"], down["role"], down["pid"], down["applied"]) == ("n3", "down", None, None)
    assert down["address"] == followers[1].address
    lines = cli.ok("status").lines
    assert lines[0] == "cluster scripted: leader n1, term 4, fsync always"
    assert lines[1].split() == ["NODE", "ROLE", "APPLIED", "LAG", "PID", "ADDRESS"]
    assert lines[4].split() == ["n3", "down", "-", "0", "-", followers[1].address, "Connection", "refused"]
    followers[1].start()


def test_status_without_a_leader_is_still_an_answer(cli: Cli) -> None:
    cli.server.leader = None
    assert cli.ok("status").lines[0] == "cluster scripted: no leader, term 1, fsync always"
    assert cli.ok("status", "--json").object["leader"] is None


def test_status_names_the_fsync_that_is_not_the_default(cli: Cli, followers: list[ScriptedServer]) -> None:
    followers[0].fsync = "os"
    lines = cli.ok("status").lines
    assert lines[0].endswith("fsync os")
    assert "power cut" in lines[1]


def test_status_of_nothing_is_unavailable(cli: Cli) -> None:
    lost = cli("status", "--json", "--connect", "127.0.0.1:1")
    assert (lost.code, lost.object["error"], lost.object["addresses"]) == (3, "ConnectFailed", "127.0.0.1:1")
    told = cli("status", "--connect", "127.0.0.1:1")
    assert (told.code, told.out) == (3, "")


def test_names_from_the_network_cannot_move_the_cursor(cli: Cli) -> None:
    with ScriptedServer(Brain(), "n1\x1b[2J") as odd:
        odd.cluster_id = "c\x1b[31m"
        shown = cli.ok("status", "--connect", odd.address).out
    assert all(line.isprintable() for line in shown.splitlines())
