"""How a command ends: exit codes, errors for people and for programs, and what is imported for it."""

import subprocess
import sys

import pytest

from holdfast.client.cli import main as entry
from holdfast.client.protocol.commands import CreateQueue, Produce
from holdfast.client.protocol.errors import (
    BY_CODE,
    HoldfastError,
    InvariantBroken,
    Misuse,
    NoLeader,
    Refused,
    StateBroken,
)
from holdfast.client.protocol.queries import ListQueues
from tests.unit.client.cli.conftest import Cli

NOWHERE = "127.0.0.1:1"  # nothing listens there


@pytest.mark.parametrize("error", BY_CODE.values(), ids=lambda error: error.__name__)
def test_the_family_of_an_error_is_its_exit_code(error: type[HoldfastError]) -> None:
    code = entry.exit_code(error.__new__(error))
    assert code == (2 if issubclass(error, Misuse) else 1 if issubclass(error, Refused) else 3)


def test_a_refusal_is_1_with_its_facts(cli: Cli) -> None:
    cli.ok("queue", "create", "q")
    refused = cli("queue", "create", "q", "--json")
    assert (refused.code, refused.err) == (1, "")
    found = refused.object
    assert list(found) == ["error", "message", "name", "queue_id", "happened"]
    assert (found["error"], found["name"], found["happened"]) == ("QueueExists", "q", "no")
    assert isinstance(found["queue_id"], int)
    told = cli("queue", "create", "q")
    assert (told.code, told.out) == (1, "")
    assert told.err == f"holdfast: {found['message']}\n"


@pytest.mark.parametrize(
    "command",
    [
        ["stats", "q"],
        ["produce", "q", "x"],
        ["consume", "q"],
        ["explain", "q"],
        ["queue", "show", "q"],
        ["queue", "update", "q", "--history"],
        ["queue", "delete", "q", "--yes"],
        ["queue", "purge", "q", "--yes"],
        ["group", "create", "q", "g"],
        ["group", "list", "q"],
        ["group", "update", "q", "g", "--count", "begun"],
        ["group", "seek", "q", "g", "--to", "1"],
        ["group", "delete", "q", "g", "--yes"],
        ["peek", "q"],
        ["read", "q"],
        ["history", "q"],
        ["cancel", "q", "1"],
        ["reschedule", "q", "1", "--delay", "1s"],
        ["dead", "list", "q"],
        ["dead", "show", "q"],
        ["dead", "count", "q"],
        ["dead", "redrive", "q"],
        ["producer", "show", "q", "svc"],
        ["producer", "forget", "q", "svc", "--yes"],
        ["top", "q", "--once", "--interval", "1ms"],
    ],
    ids=" ".join,
)
def test_every_command_that_names_a_queue_ends_alike(cli: Cli, command: list[str]) -> None:
    refused = cli(*command, "--json")
    assert (refused.code, refused.object["error"], refused.object["queue"]) == (1, "QueueNotFound", "q")
    wrong = cli(*["no queue" if word == "q" else word for word in command], "--json")
    assert (wrong.code, wrong.object["error"], wrong.object["name"]) == (2, "BadName", "no queue")
    lost = cli(*command, "--json", "--connect", NOWHERE, "--timeout", "10ms")
    assert (lost.code, lost.object["error"], lost.object["happened"]) == (3, "ConnectFailed", "no")


@pytest.mark.parametrize("verb", ["list", "show", "count", "redrive"])
def test_a_bad_filter_is_wrong_usage_with_its_position(cli: Cli, verb: str) -> None:
    cli.ok("queue", "create", "q")
    wrong = cli("dead", verb, "q", "--where", "reason = ", "--json")
    assert (wrong.code, wrong.object["error"]) == (2, "BadFilter")
    assert isinstance(wrong.object["position"], int)


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["queue"],
        ["nonsense"],
        ["queue", "create"],
        ["queue", "create", "q", "--colour", "red"],
        ["queue", "create", "q", "--visibility-timeout", "30"],
        ["queue", "create", "q", "--visibility", "30s"],
        ["queue", "create", "q", "--dlq-strategy", "burn"],
        ["explain", "q", "first"],
        ["stats", "q", "--connect", "localhost"],
        ["stats", "q", "--timeout", "soon"],
        ["group", "seek", "q", "g"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_2_for_people_and_for_programs(cli: Cli, command: list[str]) -> None:
    told = cli(*command)
    assert (told.code, told.out) == (2, "")
    assert told.err.startswith("usage: holdfast") and "\nholdfast: " in told.err
    wrong = cli(*command, "--json")
    assert (wrong.code, wrong.err, wrong.object["error"]) == (2, "", "WrongUsage")
    assert wrong.object["message"] and wrong.object["usage"].startswith("usage: holdfast")
    assert cli.server.arrived == []


def test_settings_that_contradict_each_other_are_wrong_usage(cli: Cli) -> None:
    wrong = cli("queue", "create", "q", "--dlq-strategy", "move", "--json")
    assert (wrong.code, wrong.object["error"], wrong.object["field"]) == (2, "BadValue", "dlq_queue")


def test_what_may_have_happened_is_3_and_says_so(cli: Cli) -> None:
    cli.ok("queue", "create", "q")
    cli.server.fail(Produce, "silent_after")
    lost = cli("produce", "q", "x", "--timeout", "200ms", "--json")
    assert (lost.code, lost.object["error"], lost.object["happened"]) == (3, "OutcomeUnknown", "maybe")
    assert cli.ok("stats", "q", "--json").object["produced"] == 1


def test_no_leader_is_3(cli: Cli) -> None:
    cli.server.fail(ListQueues, *[NoLeader()] * 100)
    lost = cli("queue", "list", "--timeout", "100ms", "--json")
    assert (lost.code, lost.object["error"]) == (3, "NoLeader")


def test_damage_is_3_with_a_traceback_for_who_reports_it(cli: Cli) -> None:
    cli.server.fail(CreateQueue, *[StateBroken(problem="two and two are five")] * 50)
    broken = cli("queue", "create", "q", "--timeout", "200ms", "--json")
    assert broken.code == 3
    assert broken.object["happened"] == "maybe"


def test_an_invariant_that_breaks_here_is_3_with_a_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.client.blocking import Client

    def broken(self: Client) -> None:
        raise StateBroken(problem="two and two are five")

    monkeypatch.setattr(Client, "queues", broken)
    told = cli("queue", "list", "--json")
    assert (told.code, told.object["error"]) == (3, "StateBroken")
    assert issubclass(StateBroken, InvariantBroken) and "Traceback" in told.err


def test_the_address_comes_from_the_flag_the_environment_or_the_default(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.ok("queue", "list")
    assert cli("queue", "list", "--connect", NOWHERE, "--timeout", "10ms").code == 3
    for unset in ("", None):
        if unset is None:
            monkeypatch.delenv("HOLDFAST_CONNECT", raising=False)
        else:
            monkeypatch.setenv("HOLDFAST_CONNECT", unset)
        args = entry.parser().parse_args(["queue", "list"])
        assert args.connect == "127.0.0.1:7401,127.0.0.1:7402,127.0.0.1:7403"
        assert args.timeout == 30_000


def test_a_text_that_looks_like_a_flag_is_a_text(cli: Cli) -> None:
    cli.ok("queue", "create", "q")
    assert cli.ok("produce", "q", "--", "--json").lines == ["1"]
    assert cli.ok("consume", "q").lines == ["     1  --json"]
    refused = cli("produce", "missing", "--", "--json")
    assert (refused.code, refused.out) == (1, "")


def test_version_and_help_import_no_client() -> None:
    """They stay quick: the libraries of a client, a node or a store are met only by who needs them."""
    call = (
        "import sys\nfrom holdfast.client.cli.main import main\n"
        "try:\n    main([sys.argv[1]])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "heavy = 'msgpack', 'anyio', 'trio', 'lmdb', 'pysyncobj', 'rich'\n"
        "heavy = (*heavy, 'holdfast.client.blocking', 'holdfast.client.calls')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    for flag in ("--version", "--help"):
        done = subprocess.run([sys.executable, "-c", call, flag], capture_output=True, text=True, check=True)
        assert done.stdout.startswith("holdfast 0." if flag == "--version" else "usage: holdfast")
        assert done.stdout.splitlines()[-1] == "[]"
