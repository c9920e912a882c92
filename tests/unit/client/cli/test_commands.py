"""Every noun on a whole command line: what programs get with --json, and what people get without."""

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.client.blocking import Client
from holdfast.client.protocol.commands import Produce
from holdfast.client.protocol.values import GroupSettings, QueueSettings, Stream
from tests.fakes.scripted_server import ScriptedServer
from tests.unit.client.cli.conftest import ENVIRONMENT, Cli

# Queues ------------------------------------------------------------------------------------------------


def test_a_queue_is_created_with_its_settings_and_shown(cli: Cli) -> None:
    flags = "--visibility-timeout 10s --max-delivery-attempts 3 --max-message-bytes 64k --backoff fixed:5s --history"
    created = cli.ok("queue", "create", "orders", *flags.split(), "--groups", "a,b", "--json").object
    assert created == {"queue": "orders", "queue_id": created["queue_id"], "groups": ["a", "b"]}
    shown = cli.ok("queue", "show", "orders", "--json").object
    assert list(shown) == [
        *("queue", "queue_id", "log", "settings", "tail_version", "lowest_version", "stored_messages"),
        *("stored_bytes", "groups", "readers"),
    ]
    assert (shown["queue"], shown["queue_id"], shown["readers"]) == ("orders", created["queue_id"], [])
    settings = shown["settings"]
    assert set(settings) == set(QueueSettings.__dataclass_fields__)
    assert (settings["visibility_timeout_ms"], settings["max_delivery_attempts"]) == (10_000, 3)
    assert (settings["max_message_bytes"], settings["history"]) == (65_536, True)
    assert settings["backoff"] == {"kind": "fixed", "base_ms": 5_000, "cap_ms": 5_000}
    unset = dict.fromkeys(GroupSettings.__dataclass_fields__)
    assert shown["groups"] == [{"group": name, "start": 1, "settings": unset} for name in ("a", "b")]


def test_a_queue_is_shown_to_people(cli: Cli) -> None:
    assert cli.ok("queue", "create", "orders", "--groups", "a", "--backoff", "exponential:1s:10m").lines == [
        "created queue orders"
    ]
    cli.ok("group", "create", "orders", "b", "--backoff", "none", "--visibility-timeout", "5s")
    lines = cli.ok("queue", "show", "orders").lines
    facts = dict(line.split(None, 1) for line in lines if not line.startswith("group "))
    assert facts["visibility_timeout_ms"] == "30000"
    assert facts["max_in_flight"] == "-"
    assert facts["history"] == "no"
    assert facts["backoff"] == "exponential, 1000 ms up to 600000 ms"
    assert lines[-2:] == [
        "group a from version 1",
        "group b from version 1: visibility_timeout_ms=5000, backoff=none",
    ]


def test_queues_are_listed(cli: Cli) -> None:
    assert cli.ok("queue", "list").out == ""
    cli.ok("queue", "create", "b")
    cli.ok("queue", "create", "a", "--groups", "")
    assert cli.ok("queue", "list").lines == ["a", "b"]
    assert cli.ok("queue", "list", "--json").objects == [{"queue": "a"}, {"queue": "b"}]
    assert cli.ok("queue", "show", "a", "--json").object["groups"] == []


def test_a_queue_is_updated(cli: Cli) -> None:
    cli.ok("queue", "create", "q", "--max-in-flight", "7")
    changed = cli.ok("queue", "update", "q", "--max-in-flight", "none", "--default-message-ttl", "1h", "--json").object
    assert changed == {"queue": "q", "changes": {"default_message_ttl_ms": 3_600_000, "max_in_flight": None}}
    settings = cli.ok("queue", "show", "q", "--json").object["settings"]
    assert (settings["max_in_flight"], settings["default_message_ttl_ms"]) == (None, 3_600_000)
    assert cli.ok("queue", "update", "q", "--history").lines == ["updated queue q"]
    assert cli("queue", "update", "q").code == 2


def test_a_queue_is_purged_and_deleted_by_who_says_yes(cli: Cli) -> None:
    cli.ok("queue", "create", "q", "--groups", "a,b")
    cli.ok("produce", "q", "1", "2")
    assert cli.ok("queue", "purge", "q", "--group", "a", "--yes", "--json").object == {
        "queue": "q",
        "group": "a",
        "purged": 2,
    }
    assert cli.ok("queue", "purge", "q", "--in-flight", "--dead", "--yes").lines == [
        "purged 2 messages of queue q in every group"
    ]
    assert cli.ok("queue", "delete", "q", "--yes", "--json").object == {"queue": "q", "deleted": True}
    cli.ok("queue", "create", "q")
    assert cli.ok("queue", "delete", "q", "--yes").lines == ["deleted queue q"]
    assert cli.ok("queue", "list").out == ""


DESTROYING = [
    ["queue", "delete", "q"],
    ["queue", "purge", "q"],
    ["group", "delete", "q", "default"],
    ["group", "seek", "q", "default", "--to", "1", "--dead"],
    ["txn", "forget", "nightly"],
]


@pytest.mark.parametrize("command", DESTROYING, ids=" ".join)
def test_what_destroys_does_nothing_where_nobody_can_be_asked(cli: Cli, command: list[str]) -> None:
    cli.ok("queue", "create", "q")
    refused = cli(*command, "--json", stdin=b"y\n")
    assert (refused.code, refused.object["error"]) == (2, "NeedsYes")
    assert "--yes" in refused.object["message"]
    assert len(cli.server.brain.applied) == 2  # the session and the queue


@pytest.mark.parametrize("command", DESTROYING, ids=" ".join)
def test_what_destroys_asks_the_person_at_the_terminal(cli: Cli, command: list[str]) -> None:
    cli.ok("queue", "create", "q")
    for typed in (b"\n", b"n\n", b"", b"yeah\n"):
        refused = cli(*command, typed=typed)
        assert (refused.code, refused.out) == (1, "")
        assert "[y/N]" in refused.err and "nothing was done" in refused.err
    assert len(cli.server.brain.applied) == 2
    assert cli(*command, typed=b"Y\n").code == 0
    assert len(cli.server.brain.applied) == 4


# Groups ------------------------------------------------------------------------------------------------


def test_groups_have_a_life_of_their_own(cli: Cli) -> None:
    cli.ok("queue", "create", "q")
    cli.ok("produce", "q", "1", "2", "3")
    created = cli.ok("group", "create", "q", "g", "--start", "2", "--visibility-timeout", "5s", "--json").object
    assert created == {"queue": "q", "group": "g", "version": 2, "moved": False}
    assert cli.ok("group", "create", "q", "late", "--start", "latest").lines == [
        "created group late of queue q: it begins at version 4"
    ]
    listed = cli.ok("group", "list", "q", "--json").objects
    assert [(each["queue"], each["group"], each["start"]) for each in listed] == [
        ("q", "default", 1),
        ("q", "g", 2),
        ("q", "late", 4),
    ]
    assert listed[1]["settings"]["visibility_timeout_ms"] == 5_000
    assert [line.split() for line in cli.ok("group", "list", "q").lines[:2]] == [["GROUP", "START"], ["default", "1"]]
    updated = cli.ok("group", "update", "q", "g", "--visibility-timeout", "inherit", "--json").object
    assert updated == {"queue": "q", "group": "g", "changes": {"visibility_timeout_ms": None}}
    assert cli("group", "update", "q", "g").code == 2
    sought = cli.ok("group", "seek", "q", "g", "--to", "earliest", "--json").object
    assert sought == {"queue": "q", "group": "g", "version": 1, "moved": False}
    assert cli.ok("group", "seek", "q", "g", "--to", "latest").lines == [
        "moved group g of queue q: it begins at version 4"
    ]
    assert cli.ok("group", "delete", "q", "g", "--yes", "--json").object == {
        "queue": "q",
        "group": "g",
        "deleted": True,
    }
    assert cli("stats", "q", "--group", "g", "--json").object["error"] == "GroupNotFound"


# Produce -----------------------------------------------------------------------------------------------


def payloads(cli: Cli, queue: str = "q") -> list[str]:
    return [each["payload"] for each in cli.ok("peek", queue, "--limit", "10000", "--json").objects]


def test_each_text_is_a_message(cli: Cli) -> None:
    cli.ok("queue", "create", "q")
    assert cli.ok("produce", "q", "a", "b c", "-").lines == ["1", "2", "3"]
    assert cli.ok("produce", "q", "d", "--json").object == {"queue": "q", "versions": [4], "replayed": False}
    assert payloads(cli) == ["a", "b c", "-", "d"]


@pytest.mark.parametrize("named", [[], ["-"]])
def test_each_line_of_standard_input_is_a_message(cli: Cli, named: list[str]) -> None:
    cli.ok("queue", "create", "q")
    assert cli.ok("produce", "q", *named, stdin=b"a\n\nb\r\nc").lines == ["1", "2", "3", "4"]
    assert payloads(cli) == ["a", "", "b\r", "c"]
    assert cli.server.brain.count(Produce) == 2  # what had its end, then what had none
    assert cli.ok("produce", "q", *named, stdin=b"").out == ""


def test_a_line_of_a_slow_pipe_is_sent_at_once(server: ScriptedServer) -> None:
    call = "import sys; from holdfast.client.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", call, "produce", "q", "--connect", server.address]
    with Client(server.address) as client:
        client.create_queue("q")
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT) as process:
            assert process.stdin is not None and process.stdout is not None
            for number in (1, 2):
                process.stdin.write(b"line\n")
                process.stdin.flush()
                assert process.stdout.readline() == b"%d\n" % number
            process.stdin.close()
            assert process.wait(timeout=20) == 0


def test_many_lines_are_sent_in_batches_in_order(cli: Cli) -> None:
    cli.ok("queue", "create", "q")
    lines = [f"{number:05}" for number in range(2_500)]
    done = cli.ok("produce", "q", "--json", stdin="".join(f"{line}\n" for line in lines).encode()).objects
    assert [len(each["versions"]) for each in done] == [1_000, 1_000, 500]
    assert payloads(cli) == lines


def test_a_batch_is_bounded_in_bytes(cli: Cli) -> None:
    cli.ok("queue", "create", "q")
    done = cli.ok("produce", "q", "--json", stdin=b"".join(b"%d" % at + b"x" * 400_000 + b"\n" for at in range(5)))
    assert [each["versions"] for each in done.objects] == [[1, 2], [3, 4], [5]]


def test_a_line_that_never_ends_is_refused_and_not_collected(cli: Cli) -> None:
    cli.ok("queue", "create", "q")
    refused = cli("produce", "q", "--json", stdin=b"x" * 20_000_000)
    assert (refused.code, refused.object["error"]) == (2, "BatchTooLarge")
    assert refused.object["size"] < 10_000_000


def test_what_was_confirmed_before_an_error_is_printed(cli: Cli) -> None:
    cli.ok("queue", "create", "q", "--max-message-bytes", "10")
    done = cli("produce", "q", "--json", stdin=b"a\n" * 1_000 + b"x" * 11 + b"\n")
    assert done.code == 2
    assert done.objects[0]["versions"] == list(range(1, 1_001))
    assert (done.objects[1]["error"], done.objects[1]["limit"]) == ("MessageTooLarge", 10)


def test_a_file_is_one_message(cli: Cli, tmp_path: Path) -> None:
    cli.ok("queue", "create", "q")
    (tmp_path / "message").write_bytes(b"\x00\xffline\nline\n")
    cli.ok("produce", "q", "--file", str(tmp_path / "message"))
    cli.ok("produce", "q", "--file", "-", stdin=b"all\nof it\n")
    first, second = cli.ok("peek", "q", "--json").objects
    assert base64.b64decode(first["payload_base64"]) == b"\x00\xffline\nline\n"
    assert "payload" not in first
    assert second["payload"] == "all\nof it\n"
    assert cli("produce", "q", "--file", str(tmp_path / "none")).code == 2
    assert cli("produce", "q", "text", "--file", "-").code == 2


def test_what_travels_beside_a_message(cli: Cli) -> None:
    cli.ok("queue", "create", "q")
    cli.ok("produce", "q", "x", "--key", "k", "--header", "a=b=c", "--header", "d=", "--ttl", "1m", "--delay", "10s")
    (message,) = cli.ok("peek", "q", "--json").objects
    assert (message["key"], message["headers"]) == ("k", {"a": "b=c", "d": ""})
    assert cli.ok("peek", "q").lines == ["     1  x  (key=k, a=b=c, d=)"]
    assert cli.ok("explain", "q", "1", "--json").object["reason"] == "delayed"
    cli.ok("produce", "q", "y", "--at", "2100-01-01T00:00:00Z")
    explained = cli.ok("explain", "q", "2", "--json").object
    assert explained["facts"] == {"until_ms": 4_102_444_800_000}
    assert cli("produce", "q", "x", "--delay", "1s", "--at", "2100-01-01").code == 2
    assert cli("produce", "q", "x", "--header", "a=1", "--header", "a=2").code == 2


# Looking -----------------------------------------------------------------------------------------------


def test_messages_are_looked_at_without_touching_them(cli: Cli) -> None:
    cli.ok("queue", "create", "q", "--replay", "1h")
    cli.ok("produce", "q", "a", "b", "c")
    cli.ok("consume", "q", "--max", "1")
    whole = {"version", "payload", "key", "headers", "enqueued_ms", "client_id", "client_seq", "origin"}
    for command in ("peek", "read"):
        found = cli.ok(command, "q", "--json").objects
        assert [set(each) for each in found] == [whole] * 3
        assert [each["version"] for each in found] == [1, 2, 3]
        assert cli.ok(command, "q").lines == ["     1  a", "     2  b", "     3  c"]
    assert [each["version"] for each in cli.ok("peek", "q", "--group", "default", "--json").objects] == [2, 3]
    assert [each["version"] for each in cli.ok("peek", "q", "--from", "2", "--limit", "1", "--json").objects] == [2]
    assert [each["version"] for each in cli.ok("read", "q", "--from", "2", "--to", "2", "--json").objects] == [2]
    stats = cli.ok("stats", "q", "--json").object
    assert (stats["ready"], stats["acked"], stats["in_flight"]) == (2, 1, 0)


def test_a_read_begins_at_the_lowest_that_is_kept(cli: Cli) -> None:
    cli.ok("queue", "create", "q")
    cli.ok("produce", "q", "a")
    cli.ok("produce", "q", "b")
    cli.ok("consume", "q", "--max", "1")
    assert [each["version"] for each in cli.ok("read", "q", "--json").objects] == [2]
    refused = cli("read", "q", "--from", "1", "--json")
    assert (refused.code, refused.object["error"], refused.object["lowest"]) == (1, "VersionNotKept", 2)
    cli.ok("queue", "create", "empty")
    assert cli.ok("read", "empty").out == ""


def test_terminal_control_characters_are_shown_and_not_obeyed(cli: Cli) -> None:
    cli.ok("queue", "create", "q", "--max-delivery-attempts", "1")
    evil = "\x1b]0;owned\x07\x1b[31m\u202e\x9b2J\rgone"
    cli.ok("produce", "q", evil, "--key", evil, "--header", f"h={evil}")
    cli.ok("produce", "q", "--file", "-", stdin=b"\xff\x1b[0m")
    shown = [cli.ok("peek", "q"), cli.ok("read", "q"), cli.ok("consume", "q", "--nack", "--error", evil)]
    shown += [cli.ok("dead", "list", "q"), cli.ok("dead", "show", "q")]
    shown += [cli("explain", f"q{evil}"), cli("stats", "q", "--group", "g\x1b[31m")]
    for result in shown:
        assert all(line.isprintable() for line in (result.out + result.err).split("\n"))
    assert r"\x1b]0;owned\x07\x1b[31m\u202e\x9b2J\rgone" in shown[0].out
    assert r"\xff\x1b[0m" in shown[0].out
    (row, _) = cli.ok("dead", "list", "q", "--json").objects
    assert (row["payload"], row["key"], row["last_error"]) == (evil, evil, evil)


def test_the_counters_of_a_group(cli: Cli) -> None:
    cli.ok("queue", "create", "q")
    cli.ok("produce", "q", "a", "b")
    found = cli.ok("stats", "q", "--json").object
    assert list(found) == [
        *("queue", "group", "produced", "ready", "delayed", "in_flight", "acked", "dead", "moved", "discarded"),
        *("cancelled", "purged", "trimmed", "expired", "tail_version", "holes", "oldest_ms", "as_of_ms", "index"),
    ]
    assert (found["queue"], found["group"], found["ready"], found["tail_version"]) == ("q", "default", 2, 2)
    facts = dict(line.split(None, 1) for line in cli.ok("stats", "q").lines)
    assert facts["ready"] == "2"
    assert facts["oldest_ms"].endswith("Z")


def test_explain_names_the_one_reason(cli: Cli) -> None:
    cli.ok("queue", "create", "q")
    asked = {"queue": "q", "group": "default"}
    assert cli.ok("explain", "q", "--json").object == {**asked, "version": None, "reason": "empty", "facts": {}}
    assert cli.ok("explain", "q", "9", "--json").object["reason"] == "not_produced"
    cli.ok("produce", "q", "x", "--at", "4102444800000")
    assert cli.ok("explain", "q", "1", "--json").object == {
        **asked,
        "version": 1,
        "reason": "delayed",
        "facts": {"until_ms": 4_102_444_800_000},
    }
    assert cli.ok("explain", "q", "1").lines == [
        "delayed: it is held back until its time (until_ms=2100-01-01T00:00:00.000Z)"
    ]


def test_history_tells_what_happened(cli: Cli) -> None:
    cli.ok("queue", "create", "q", "--history")
    cli.ok("produce", "q", "a", "b")
    cli.ok("consume", "q", "--nack", "--error", "boom", "--max", "1")
    rows = cli.ok("history", "q", "--json").objects
    assert [set(row) for row in rows] == [
        {"seq", "kind", "time_ms", "first", "last", "group", "lease_id", "consumer_id", "error"}
    ] * len(rows)
    assert [row["seq"] for row in rows] == list(range(1, len(rows) + 1))
    assert rows[-1]["error"] == "boom"
    assert rows[-1]["consumer_id"].startswith("cli/")
    assert cli.ok("history", "q", "--from", "2", "--limit", "1", "--json").objects == [rows[1]]
    lines = cli.ok("history", "q").lines
    assert lines[0].split() == ["ROW", "TIME", "WHAT", "VERSIONS", "GROUP", "LEASE", "CONSUMER", "ERROR"]
    assert "1-2" in lines[1] and "boom" in lines[-1]


# Changing one's mind -----------------------------------------------------------------------------------


def test_cancel_by_version_and_by_key(cli: Cli) -> None:
    cli.ok("queue", "create", "q")
    cli.ok("produce", "q", "a", "b", "c", "--key", "k")
    ok = {"queue": "q", "first": 1, "last": 1, "outcome": "ok", "group": ""}
    assert cli.ok("cancel", "q", "1", "--json").object == ok
    cli.ok("consume", "q", "--max", "1")
    refused = cli("cancel", "q", "2", "--json")
    assert (refused.code, refused.object["error"], refused.object["group"]) == (1, "TooLate", "default")
    outcomes = cli.ok("cancel", "q", "--key", "k", "--json").objects
    assert (outcomes[-1]["first"], outcomes[-1]["outcome"]) == (3, "ok")
    assert cli.ok("cancel", "q", "--key", "nobody").out == ""
    missing = cli("cancel", "q", "99")
    assert (missing.code, missing.lines) == (1, ["99: not found"])
    assert cli("cancel", "q").code == 2
    assert cli("cancel", "q", "1", "--key", "k").code == 2


def test_reschedule_by_version_and_by_key(cli: Cli) -> None:
    cli.ok("queue", "create", "q")
    cli.ok("produce", "q", "a", "--key", "k", "--delay", "1h")
    assert cli.ok("reschedule", "q", "1", "--at", "2100-01-01T00:00:00Z").lines == ["1: rescheduled"]
    assert cli.ok("explain", "q", "1", "--json").object["facts"] == {"until_ms": 4_102_444_800_000}
    done = cli.ok("reschedule", "q", "--key", "k", "--delay", "0", "--json").object
    assert done == {"queue": "q", "first": 1, "last": 1, "outcome": "ok", "group": ""}
    cli.server.brain.pass_ms(1)
    assert cli.ok("explain", "q", "1", "--json").object["reason"] == "available"
    assert cli("reschedule", "q", "1").code == 2
    assert cli("reschedule", "q", "--delay", "0").code == 2


# Dead letters ------------------------------------------------------------------------------------------


@pytest.fixture
def graves(cli: Cli) -> Cli:
    """A queue with three dead letters: two failed, and one was given up."""
    cli.ok("queue", "create", "q", "--max-delivery-attempts", "1")
    cli.ok("produce", "q", "a", "b", "--key", "k", "--header", "h=v")
    cli.ok("consume", "q", "--nack", "--error", "boom")
    cli.ok("produce", "q", "c")
    cli.ok("consume", "q", "--nack", "--dead", "--error", "no use")
    return cli


def test_dead_letters_are_listed_by_a_filter(graves: Cli) -> None:
    rows = graves.ok("dead", "list", "q", "--json").objects
    assert set(rows[0]) == {
        *("group", "dead_seq", "version", "reason", "attempts", "delivery_count", "last_error", "first_delivered_ms"),
        *("last_delivered_ms", "died_ms", "consumer_id", "client_id", "client_seq", "key", "headers", "move_failed"),
        "payload",
    }
    assert [(row["version"], row["reason"], row["last_error"], row["payload"]) for row in rows] == [
        (1, "max_attempts", "boom", "a"),
        (2, "max_attempts", "boom", "b"),
        (3, "rejected", "no use", "c"),
    ]
    assert rows[0]["headers"] == {"h": "v"}
    chosen = graves.ok("dead", "list", "q", "--where", "reason = 'rejected'", "--group", "default", "--json").objects
    assert [row["version"] for row in chosen] == [3]
    lines = graves.ok("dead", "list", "q").lines
    assert lines[0].split() == ["VERSION", "GROUP", "REASON", "ATTEMPTS", "DIED", "ERROR", "PAYLOAD"]
    assert lines[3].split()[:3] == ["3", "default", "rejected"]
    more = graves("dead", "list", "q", "--limit", "2", "--json")
    assert (more.code, len(more.objects)) == (0, 2)
    assert "there are more" in more.err
    assert "more" not in graves("dead", "list", "q", "--limit", "3").err


def test_dead_letters_are_shown_in_full(graves: Cli) -> None:
    assert graves.ok("dead", "show", "q", "2", "--json").object["payload"] == "b"
    lines = graves.ok("dead", "show", "q", "2").lines
    facts = {line[:20].strip(): line[20:] for line in lines[1:]}
    assert lines[0] == "queue q"
    assert (facts["version"], facts["last_error"], facts["header h"], facts["payload"]) == ("2", "boom", "v", "b")
    assert facts["died_ms"].endswith("Z")
    assert [row["version"] for row in graves.ok("dead", "show", "q", "--json").objects] == [1, 2, 3]
    narrowed = graves("dead", "show", "q", "2", "--where", "reason = 'x' or reason = 'rejected'", "--json")
    assert (narrowed.code, narrowed.object["error"]) == (1, "NoDeadLetter")
    assert graves("dead", "show", "q", "9").code == 1


def test_dead_letters_are_counted_and_redriven(graves: Cli) -> None:
    asked = {"queue": "q", "group": None}
    assert graves.ok("dead", "count", "q", "--json").object == {**asked, "count": 3}
    assert graves.ok("dead", "count", "q", "--where", "key = 'k'").lines == ["2"]
    tried = graves.ok("dead", "redrive", "q", "--where", "key = 'k'", "--dry-run", "--json").object
    assert tried == {**asked, "matched": 2, "redriven": 0, "dry_run": True, "finished": True}
    assert graves.ok("dead", "redrive", "q", "--dry-run").lines == ["3 dead letters would come back"]
    done = graves.ok("dead", "redrive", "q", "--where", "key = 'k'", "--json").object
    assert done == {**asked, "matched": 2, "redriven": 2, "dry_run": False, "finished": True}
    assert graves.ok("dead", "redrive", "q").lines == ["1 of 1 dead letters came back"]
    assert graves.ok("dead", "count", "q").lines == ["0"]
    assert graves.ok("dead", "list", "q", "--json").out == ""


# Producers ---------------------------------------------------------------------------------------------


def test_a_producer_is_shown(cli: Cli) -> None:
    cli.ok("queue", "create", "q")
    with Client(cli.server.address) as client:
        epoch = client.open_producer("q", client_id="svc").epoch
        client.produce("q", [b"1", b"2"], client_id="svc", client_seq=1, epoch=epoch)
    found = cli.ok("producer", "show", "q", "svc", "--json").object
    assert list(found) == ["queue", "client_id", "epoch", "high_water", "last_used_ms", "window"]
    assert (found["queue"], found["client_id"], found["epoch"], found["high_water"]) == ("q", "svc", epoch, 2)
    assert "high_water    2" in cli.ok("producer", "show", "q", "svc").lines
    assert cli("producer", "show", "q", "nobody", "--json").object["error"] == "ProducerUnknown"


# Form --------------------------------------------------------------------------------------------------


def test_an_object_is_one_line_whatever_the_payload(cli: Cli) -> None:
    cli.ok("queue", "create", "q")
    cli.ok("produce", "q", "a\nb\u2028c\x85")
    (line,) = cli.ok("consume", "q", "--json").out.split("\n")[:-1]
    found: dict[str, Any] = json.loads(line)
    assert line.isascii() and found["payload"] == "a\nb\u2028c\x85"


# Producers and transactions ----------------------------------------------------------------------------


def test_a_producer_is_forgotten_by_who_says_yes(cli: Cli) -> None:
    cli.ok("queue", "create", "q")
    with Client(cli.server.address) as client:
        client.produce("q", [b"a"], client_id="svc", client_seq=1)
        assert cli("producer", "forget", "q", "svc").code == 2
        assert cli.ok("producer", "forget", "q", "svc", "--yes", "--json").object == {
            "queue": "q",
            "client_id": "svc",
            "forgotten": True,
        }
        assert cli("producer", "show", "q", "svc").code == 1
        client.produce("q", [b"a"], client_id="svc", client_seq=1)
        assert cli.ok("producer", "forget", "q", "svc", "--yes").lines == ["forgot producer svc of queue q"]
    assert cli("producer", "forget", "q", "svc", "--yes").code == 1


def test_a_transaction_is_shown_and_forgotten(cli: Cli) -> None:
    cli.ok("queue", "create", "q")
    unknown = {"txn": "nightly", "seq": None, "state": "unknown", "staged_bytes": 0, "expires_at_ms": None}
    assert cli.ok("txn", "show", "nightly", "--json").object == {**unknown, "versions": {}}
    with Client(cli.server.address) as client:
        part = client.stage("nightly", "q", [b"a", b"b"])
        opened = cli.ok("txn", "show", "nightly", "--json").object
        assert (opened["state"], opened["staged_bytes"] > 0) == ("open", True)
        client.publish("nightly", [part])
        streamed = client.stage(Stream("app", 0), "q", [b"c"])
        client.publish(Stream("app", 0), [streamed], fence="query")
    facts = dict(line.split(None, 1) for line in cli.ok("txn", "show", "nightly").lines)
    assert facts["state"] == "published"
    assert facts["queue"].split(None, 1)[1] == "2 messages, versions 1 to 2"
    assert cli.ok("txn", "show", "app", "--seq", "0", "--json").object["versions"] == {"q": [3]}
    assert cli.ok("txn", "forget", "nightly", "--yes", "--json").object == {
        "txn": "nightly",
        "seq": None,
        "forgotten": True,
    }
    assert cli.ok("txn", "forget", "app", "--seq", "0", "--yes").lines == ["forgot stream app"]
    assert cli.ok("txn", "show", "app", "--seq", "0", "--json").object["state"] == "unknown"


# Redrive and top ---------------------------------------------------------------------------------------


def test_what_was_moved_is_sent_home(cli: Cli) -> None:
    cli.ok("queue", "create", "graves")
    cli.ok("queue", "create", "q", "--dlq-strategy", "move", "--dlq-queue", "graves")
    cli.ok("produce", "q", "a", "b", "c")
    cli.ok("consume", "q", "--nack", "--dead")
    some = ["dead", "redrive", "graves", "--to-origin", "--where", "origin_version <= 2"]
    assert cli.ok(*some, "--dry-run").lines == ["2 dead letters would come back"]
    assert cli.ok(*some, "--rate", "1000").lines == ["2 of 2 dead letters came back"]
    assert cli.ok("consume", "q").lines == ["     4  a", "     5  b"]


def test_a_redrive_that_is_refused_half_way_says_how_far_it_came(cli: Cli) -> None:
    cli.ok("queue", "create", "graves")
    cli.ok("queue", "create", "q", "--dlq-strategy", "move", "--dlq-queue", "graves")
    cli.ok("produce", "q", "a", "b", "c")
    cli.ok("consume", "q", "--nack", "--dead")
    cli.ok("queue", "update", "q", "--max-backlog-messages", "2")
    ended = cli("dead", "redrive", "graves", "--to-origin", "--json")
    assert ended.code == 1
    told, error = ended.objects
    assert (told["redriven"], told["finished"]) == (2, False)
    assert (error["error"], error["problem"]) == ("OriginGone", "full")


def test_top_for_scripts_looks_twice_and_has_rates(cli: Cli) -> None:
    cli.ok("queue", "create", "q", "--groups", "a,b")
    cli.ok("queue", "create", "other")
    cli.ok("produce", "q", "1", "2")
    cli.ok("consume", "q", "--group", "b")
    found = cli.ok("top", "--once", "--interval", "5ms", "--json").object
    assert (found["leader"], found["left_out"]) == ("n1", 0)
    assert [(each["queue"], each["group"], each["ready"]) for each in found["groups"]] == [
        ("q", "a", 2),
        ("other", "default", 0),
        ("q", "b", 0),
    ]
    assert {each["acked_per_s"] for each in found["groups"]} == {0.0}
    assert len(cli.ok("top", "q", "--once", "--interval", "5ms", "--json").object["groups"]) == 2


def test_top_without_a_terminal_prints_what_it_saw(cli: Cli) -> None:
    cli.ok("queue", "create", "q")
    cli.ok("produce", "q", "1")
    lines = cli.ok("top", "--interval", "5ms").lines
    assert lines[0].startswith("cluster scripted: leader n1")
    assert lines[-1].split()[:4] == ["q", "default", "1", "0"]
    assert cli("top", "--interval", "0").code == 2
