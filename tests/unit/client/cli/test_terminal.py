"""The command line in a real pseudo-terminal: tables and colours, bars, Ctrl-C in the middle, and `top`."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from holdfast.client.blocking import Client
from holdfast.client.protocol.commands import Redrive
from tests.fakes.scripted_server import ScriptedServer
from tests.support.processes import until
from tests.support.terminal import TerminalCommand
from tests.unit.client.cli.conftest import ENVIRONMENT

COLOUR = re.compile(r"\x1b\[[0-9;]*m")

pytestmark = pytest.mark.slow  # a process each


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[Client]:
    with Client(server.address) as client:
        client.create_queue("q")
        yield client


def bury(client: Client, count: int) -> None:
    client.produce("q", [b"[red]m%d\x1b[2J" % number for number in range(count)])
    client.lease("q", max_messages=count).nack(dead=True, error="boom")


# Tables and colours ------------------------------------------------------------------------------------


def test_a_person_gets_a_table_with_colours(server: ScriptedServer) -> None:
    with TerminalCommand("status", connect=server.address) as command:
        assert command.end() == 0
        assert COLOUR.search(command.raw)
        assert "NODE" in command.text and "leader n1" in command.text


def test_a_pipe_gets_the_same_words_without_any(server: ScriptedServer) -> None:
    line = [sys.executable, "-m", "holdfast.client.cli", "status", "--connect", server.address]
    done = subprocess.run(line, capture_output=True, text=True, env={**ENVIRONMENT, "TERM": "xterm-256color"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert "NODE" in done.stdout and "leader n1" in done.stdout


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"NO_COLOR": "1"}], ids=str)
def test_who_wants_no_colour_gets_none(server: ScriptedServer, environment: dict[str, str]) -> None:
    with TerminalCommand("status", connect=server.address, environment=environment) as command:
        assert command.end() == 0
        assert not re.search(r"\x1b\[[0-9;]*3[0-9]", command.raw)


def test_what_came_from_elsewhere_neither_moves_nor_colours(server: ScriptedServer, client: Client) -> None:
    bury(client, 1)
    with TerminalCommand("dead", "list", "q", connect=server.address) as command:
        assert command.end() == 0
        assert "[red]m0\\x1b[2J" in command.text
        assert "\x1b[2J" not in command.raw


def test_an_error_is_red_and_says_the_same(server: ScriptedServer) -> None:
    with TerminalCommand("stats", "nowhere", connect=server.address) as command:
        assert command.end() == 1
        assert "holdfast: there is no queue nowhere" in command.text
        assert COLOUR.search(command.raw)


def test_a_person_is_asked_before_something_is_destroyed(server: ScriptedServer, client: Client) -> None:
    with TerminalCommand("queue", "delete", "q", connect=server.address) as command:
        command.until(r"\[y/N\]")
        command.type("y\n")
        assert command.end() == 0
    assert client.queues() == []


# Redrive -----------------------------------------------------------------------------------------------


def test_ctrl_c_in_a_redrive_says_how_far_it_came_and_the_next_one_goes_on(
    server: ScriptedServer, client: Client
) -> None:
    bury(client, 30)
    with TerminalCommand("dead", "redrive", "q", "--rate", "8", connect=server.address) as command:
        command.until(r"[1-9][0-9]*/30")
        command.interrupt()
        assert command.end() == 130
        told = command.until(r"([0-9]+) dead letters came back before this ended")
        assert "at least" not in command.text
    came_back = int(told.split()[0])
    assert 0 < came_back < 30
    assert client.stats("q").ready == came_back
    with TerminalCommand("dead", "redrive", "q", connect=server.address) as command:
        assert command.end() == 0
        assert f"{30 - came_back} of {30 - came_back} dead letters came back" in command.text
    assert (client.stats("q").ready, client.stats("q").dead) == (30, 0)


def test_the_first_ctrl_c_waits_for_the_step_the_second_does_not(server: ScriptedServer, client: Client) -> None:
    bury(client, 3)
    for _ in range(50):
        server.fail(Redrive, "silent_after")
    with TerminalCommand("dead", "redrive", "q", connect=server.address) as command:
        command.until("redrive q")
        until(lambda: server.brain.count(Redrive), "a step is under way")
        command.interrupt()
        command.until("ending when the step under way is done")
        command.interrupt()
        assert command.end() == 130
        command.until("at least 0 dead letters came back")
    server.faults.clear()
    assert client.redrive("q").matched == 0  # it had happened


# Top ---------------------------------------------------------------------------------------------------


def test_top_draws_what_happens_and_ends_with_q(server: ScriptedServer, client: Client) -> None:
    client.produce("q", [b"a", b"b"])
    with TerminalCommand("top", "--interval", "50ms", connect=server.address) as command:
        command.until(r"leader n1, term 1")
        command.until(r"q +default +2 +0 +0 +0")
        client.lease("q", max_messages=1)
        command.until(r"q +default +1 +0 +1 +0")
        command.type("q")
        assert command.end() == 0
        assert command.raw.rstrip().endswith("\x1b[?25h") or "\x1b[?1049l" in command.raw
        assert command.leaves_the_terminal_as_it_was()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_top_ends_with_a_signal_and_leaves_the_terminal_as_it_was(
    server: ScriptedServer, number: signal.Signals
) -> None:
    with TerminalCommand("top", connect=server.address) as command:
        command.until("leader n1")
        if number is signal.SIGINT:
            command.interrupt()
        else:
            command.send(number)
        assert command.end() == 0
        assert command.leaves_the_terminal_as_it_was()


def test_top_survives_the_death_of_the_leader(server: ScriptedServer, client: Client) -> None:
    other = ScriptedServer(server.brain, "n2")
    for node in (server, other):
        node.members = [server, other]
        node.leader = server.address
    connect = f"{server.address},{other.address}"
    with other, TerminalCommand("top", "--interval", "50ms", connect=connect) as command:
        command.until("leader n1")
        server.stop()
        command.until("down")
        other.leader, other.term = other.address, 2
        command.until("leader n2, term 2")
        with Client(other.address) as late:
            late.produce("q", [b"x"] * 7)
        command.until(r"q +default +7 ")
        command.type("q")
        assert command.end() == 0
        server.start()  # for its end


def test_top_says_since_when_there_is_no_news(server: ScriptedServer, client: Client) -> None:
    with TerminalCommand("top", "--interval", "50ms", "--timeout", "300ms", connect=server.address) as command:
        command.until(r"q +default +0")
        server.stop()
        command.until(r"no news of the nodes for [0-9]+ s: ")
        command.until(r"no news of the queues for [0-9]+ s: ")
        command.type("q")
        assert command.end() == 0
        server.start()
