"""`holdfast consume`: what is printed is settled, what is not settled is handed back, whatever ends the command."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.client import blocking
from holdfast.client.blocking import Client
from holdfast.client.cli import consume, output
from holdfast.client.protocol.commands import AckBatch, Extend, Lease, Release
from holdfast.client.protocol.messages import Request
from tests.fakes.scripted_server import ScriptedServer
from tests.unit.client.cli.conftest import ENVIRONMENT, Cli


@pytest.fixture(autouse=True)
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt waits for the request under way: let that not be a second in each test."""
    monkeypatch.setattr(consume, "SLICE_MS", 100)


@pytest.fixture
def queue(cli: Cli) -> Cli:
    """A queue with three messages."""
    cli.ok("queue", "create", "q")
    cli.ok("produce", "q", "a", "b", "c")
    return cli


def counters(cli: Cli) -> tuple[int, int, int]:
    stats = cli.ok("stats", "q", "--json").object
    return stats["ready"], stats["in_flight"], stats["acked"]


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def leases(server: ScriptedServer) -> list[Lease]:
    """Those that were asked for, answered or not."""
    asked = [each.command for each in server.arrived if isinstance(each, Request)]
    return [command for command in asked if isinstance(command, Lease)]


# What is there -----------------------------------------------------------------------------------------


def test_messages_are_printed_and_acked(queue: Cli) -> None:
    first = queue.ok("consume", "q", "--max", "1", "--json").object
    assert list(first) == [
        *("version", "payload", "key", "headers", "enqueued_ms", "client_id", "client_seq", "origin"),
        *("delivery_count", "attempts", "lease_id"),
    ]
    assert (first["version"], first["payload"], first["delivery_count"], first["attempts"]) == (1, "a", 1, 1)
    assert counters(queue) == (2, 0, 1)
    assert queue.ok("consume", "q", "--ack").lines == ["     2  b", "     3  c"]
    assert counters(queue) == (0, 0, 3)


def test_an_empty_consume_is_done(queue: Cli) -> None:
    queue.ok("consume", "q")
    assert queue.ok("consume", "q").out == ""
    assert queue.ok("consume", "q", "--json", "--wait", "20ms").out == ""


def test_nacked_messages_fail_once_however_many_are_wanted(queue: Cli) -> None:
    shown = queue.ok("consume", "q", "--nack", "--error", "boom", "--max", "50", "--json").objects
    assert [(each["version"], each["attempts"]) for each in shown] == [(1, 1), (2, 1), (3, 1)]
    assert counters(queue) == (3, 0, 0)
    assert queue.ok("consume", "q", "--max", "1").lines == ["     1  a  (attempts=2)"]
    queue.ok("consume", "q", "--nack", "--delay", "1h", "--max", "1")
    assert queue.ok("explain", "q", "2", "--json").object["reason"] == "delayed"
    queue.ok("consume", "q", "--nack", "--dead")
    assert queue.ok("dead", "list", "q", "--json").object["version"] == 3


def test_kept_messages_come_back_unstarted(queue: Cli) -> None:
    assert len(queue.ok("consume", "q", "--keep").lines) == 3
    assert counters(queue) == (3, 0, 0)
    again = queue.ok("consume", "q", "--json").objects
    assert [(each["delivery_count"], each["attempts"]) for each in again] == [(2, 1)] * 3


def test_more_than_one_lease_holds_is_taken_in_several(cli: Cli) -> None:
    cli.ok("queue", "create", "q")
    for _ in range(3):
        cli.ok("produce", "q", "--file", "-", stdin=b"x" * 700_000)
    assert len(cli.ok("consume", "q", "--keep", "--json").lines) == 3
    assert len(cli.ok("consume", "q", "--max", "2", "--json").lines) == 2
    assert counters(cli) == (1, 0, 2)


def test_a_limit_that_the_command_itself_uses_up_ends_it_well(queue: Cli) -> None:
    queue.ok("queue", "update", "q", "--max-in-flight", "2")
    assert len(queue.ok("consume", "q", "--keep").lines) == 2
    with Client(queue.server.address) as other:
        other.lease("q", max_messages=2)
        refused = queue("consume", "q", "--wait", "10ms", "--json")
    assert (refused.code, refused.object["error"], refused.object["limit"]) == (1, "InFlightLimit", 2)


def test_a_wait_ends_when_something_comes(cli: Cli) -> None:
    cli.ok("queue", "create", "q")
    with Client(cli.server.address) as other:
        later = threading.Timer(0.1, lambda: other.produce("q", [b"x"]))
        later.start()
        assert cli.ok("consume", "q", "--wait", "30s").lines == ["     1  x"]
        later.join()


def test_only_the_first_message_is_waited_for(queue: Cli) -> None:
    assert len(queue.ok("consume", "q", "--wait", "5s").lines) == 3
    assert [lease.wait_ms for lease in leases(queue.server)] == [consume.SLICE_MS, 0]


def test_groups_and_timeouts_are_passed_on(queue: Cli) -> None:
    queue.ok("group", "create", "q", "g")
    queue.ok("consume", "q", "--group", "g", "--visibility-timeout", "7s")
    assert {(lease.group, lease.visibility_timeout_ms) for lease in leases(queue.server)} == {("g", 7_000)}
    assert counters(queue) == (3, 0, 0)


@pytest.mark.parametrize(
    "flags", [["--error", "x"], ["--keep", "--delay", "1s"], ["--ack", "--dead"], ["--ack", "--nack"], ["--max", "0"]]
)
def test_flags_that_mean_nothing_together_are_wrong_usage(queue: Cli, flags: list[str]) -> None:
    assert queue("consume", "q", *flags).code == 2
    assert queue.server.brain.count(Lease) == 0


def test_nothing_is_acked_that_could_not_be_printed(queue: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(consume, "flush", gone)
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    monkeypatch.setattr(sys.stdout, "fileno", lambda: 1, raising=False)
    assert queue("consume", "q").code == 141
    assert queue.server.brain.count(AckBatch) == 0
    assert counters(queue) == (3, 0, 0)


def test_an_ack_whose_answer_never_came_may_have_happened(queue: Cli) -> None:
    queue.server.fail(AckBatch, "silent_after")
    lost = queue("consume", "q", "--timeout", "300ms", "--json")
    assert (lost.code, len(lost.objects)) == (3, 4)
    assert (lost.objects[-1]["error"], lost.objects[-1]["happened"]) == ("OutcomeUnknown", "maybe")
    assert counters(queue) == (0, 0, 3)


# Following ---------------------------------------------------------------------------------------------


def interrupt_when(holds: Callable[[], bool]) -> threading.Thread:
    """Ctrl-C for the command that runs in this process's main thread, as soon as this holds."""

    def waiting() -> None:
        until(holds)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=waiting)
    thread.start()
    return thread


def test_follow_goes_on_until_it_is_interrupted(queue: Cli) -> None:
    brain = queue.server.brain
    thread = interrupt_when(lambda: brain.count(AckBatch) == 1)
    followed = queue.ok("consume", "q", "--follow", "--json")
    thread.join()
    assert [each["payload"] for each in followed.objects] == ["a", "b", "c"]
    assert counters(queue) == (0, 0, 3)


def test_follow_ends_after_as_many_as_are_wanted(queue: Cli) -> None:
    assert len(queue.ok("consume", "q", "--follow", "--max", "2").lines) == 2
    assert counters(queue) == (1, 0, 2)


def test_an_interrupted_follow_hands_back_what_it_keeps(queue: Cli) -> None:
    brain = queue.server.brain
    thread = interrupt_when(lambda: brain.count(Lease) >= 2)  # the first has three messages, the second waits
    assert len(queue.ok("consume", "q", "--follow", "--keep").lines) == 3
    thread.join()
    assert brain.count(Release) == 1
    assert counters(queue) == (3, 0, 0)
    assert [each["attempts"] for each in queue.ok("consume", "q", "--json").objects] == [1, 1, 1]


def test_a_lease_that_comes_after_the_interrupt_is_handed_back_too(queue: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the request is under way: its answer is waited for, else nobody would know of the lease."""
    ask, release, interrupted = Client.lease, consume._Consumer.release, threading.Event()

    def slow(self: Client, *args: Any, **options: Any) -> blocking.Lease:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        assert interrupted.wait(20)
        return ask(self, *args, **options)

    def ending(self: consume._Consumer) -> None:
        interrupted.set()
        release(self)

    monkeypatch.setattr(Client, "lease", slow)
    monkeypatch.setattr(consume._Consumer, "release", ending)
    assert queue.ok("consume", "q", "--follow").out == ""
    assert queue.server.brain.count(Release) == 1
    assert counters(queue) == (3, 0, 0)


def test_what_is_kept_for_long_is_renewed_and_costs_no_attempt(queue: Cli) -> None:
    brain = queue.server.brain
    thread = interrupt_when(lambda: brain.count(Extend) >= 3)
    assert len(queue.ok("consume", "q", "--follow", "--keep", "--visibility-timeout", "300ms").lines) == 3
    thread.join()
    assert [each["delivery_count"] for each in queue.ok("consume", "q", "--json").objects] == [2, 2, 2]


def test_follow_waits_while_others_use_up_the_limit(queue: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consume, "SLICE_MS", 10)
    queue.ok("queue", "update", "q", "--max-in-flight", "1")
    with Client(queue.server.address) as other:
        held = other.lease("q", max_messages=1)
        brain = queue.server.brain
        asked = brain.count(Lease)

        def hand_over() -> None:
            until(lambda: brain.count(Lease) >= asked + 2)
            held.ack()

        thread = threading.Thread(target=hand_over)
        thread.start()
        assert queue.ok("consume", "q", "--follow", "--max", "1").lines == ["     2  b"]
        thread.join()


def test_an_interrupt_without_follow_hands_back_and_says_so(queue: Cli) -> None:
    queue.ok("consume", "q")
    thread = interrupt_when(lambda: any(each.wait_ms for each in leases(queue.server)))
    stopped = queue("consume", "q", "--wait", "30s")
    thread.join()
    assert (stopped.code, stopped.out) == (130, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("handler", ["SIG_DFL", "SIG_IGN"])
def test_ctrl_c_ends_a_real_process_well(server: ScriptedServer, number: signal.Signals, handler: str) -> None:
    """Also where a shell has put it into the background and lets it ignore Ctrl-C."""
    call = (
        f"import signal, sys; signal.signal({int(number)}, signal.{handler});"
        "from holdfast.client.cli.main import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", call, "consume", "q", "--follow", "--keep", "--connect", server.address]
    with Client(server.address) as client:
        client.create_queue("q")
        client.produce("q", [b"a"])
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT) as process:
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.readline() == b"     1  a\n"
            process.send_signal(number)
            assert (process.wait(timeout=20), process.stdout.read(), process.stderr.read()) == (0, b"", b"")
        stats = client.stats("q")
        assert (stats.ready, stats.in_flight) == (1, 0)


def test_a_reader_that_leaves_ends_a_real_process_without_a_word(server: ScriptedServer) -> None:
    call = "import sys; from holdfast.client.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", call, "consume", "q", "--follow", "--connect", server.address]
    with Client(server.address) as client:
        client.create_queue("q")
        client.produce("q", [b"a"])
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT) as process:
            assert process.stdout is not None and process.stderr is not None
            process.stdout.readline()
            process.stdout.close()
            until(lambda: client.stats("q").acked == 1)
            client.produce("q", [b"b"])
            assert (process.wait(timeout=20), process.stderr.read()) == (141, b"")
        stats = client.stats("q")
        assert (stats.ready, stats.in_flight, stats.acked) == (1, 0, 1)


def test_a_message_for_people_is_one_line(cli: Cli) -> None:
    cli.ok("queue", "create", "q")
    cli.ok("produce", "q", "two\nlines\tand a tab")
    assert cli.ok("consume", "q").lines == [r"     1  two\nlines\tand a tab"]
    assert output.printable("\ud800") == r"\ud800"
