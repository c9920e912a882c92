"""The log: every event in one line that people and machines read alike, and that nobody outside can forge or flood."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.client.protocol.errors import BadFrame, BadValue, StateBroken
from holdfast.cluster.links import SessionLost
from holdfast.cluster.logs import BURST, EVENTS, EVERY_S, VALUE_CHARS, EventName, Log

DOC = (Path(__file__).parents[3] / "docs" / "operating.md").read_text()
HEAD = ["time", "level", "node", "event"]
LOST = SessionLost("'n2' closed the connection")
SAMPLES: dict[EventName, dict[str, Any]] = {
    "started": {
        "version": "0.1.0",
        "pid": 7,
        "address": "127.0.0.1:7401",
        "peer_address": "[::1]:7421",
        "http_address": None,
        "fsync": "always",
        "applied": 12,
    },
    "founded": {"cluster_id": "c1", "voters": ["n1", "n2", "n3"]},
    "waiting_for_peers": {"missing": ["n2", "n3"]},
    "became_leader": {"term": 3},
    "lost_leadership": {"term": 3},
    "leader_changed": {"leader": None, "term": 4},
    "peer_connected": {"peer": "n2"},
    "peer_lost": {"peer": "n2", "error": LOST},
    "peer_refused": {"peer": "10.0.0.1:999", "error": LOST},
    "snapshot_taken": {"index": 9, "size_bytes": 1000, "took_ms": 5},
    "snapshot_failed": {"error": LOST},
    "promise_open": {"promised": 9, "term": 2, "last": 5, "leader": None},
    "snapshot_sent": {"peer": "n3", "index": 9, "size_bytes": 1000, "took_ms": 5},
    "snapshot_installed": {"index": 9, "size_bytes": 1000, "took_ms": 5},
    "journal_compacted": {"base": 9},
    "slow_disk": {"took_ms": 900},
    "out_of_files": {"doing": "accept", "error": OSError(24, "Too many open files")},
    "clock_skew": {"peer": "n3", "skew_ms": -61000},
    "overloaded": {"limit_name": "queued_bytes", "limit": 1000},
    "client_rejected": {"client": "10.0.0.9:1234", "error": BadFrame(problem="a secret of the client")},
    "transfer_begun": {"to": "n2"},
    "transfer_done": {"to": "n2", "took_ms": 40},
    "stopping": {"reason": "SIGTERM"},
    "stopped": {"uptime_ms": 1},
    "failed": {"error": StateBroken(problem="it does not add up")},
}


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.wall_ms = 1_735_787_045_678


class Desk:
    """A log, the clock it looks at, and what it has written."""

    def __init__(self, as_json: bool = False, node: str = "n1") -> None:
        self.clock, self.stream = Clock(), io.StringIO()
        self.log = Log(
            node=node,
            stream=self.stream,
            wall_ms=lambda: self.clock.wall_ms,
            now_s=lambda: self.clock.now_s,
            as_json=as_json,
        )

    def tell(self, event: EventName) -> None:
        getattr(self.log, event)(**SAMPLES[event])

    @property
    def lines(self) -> list[str]:
        text = self.stream.getvalue()
        assert text == "" or text.endswith("\n")
        return text.split("\n")[:-1]


def parse(line: str) -> dict[str, Any]:
    """A line of pairs, read by someone who knows only what the document says."""
    found: dict[str, Any] = {}
    at = 0
    while at < len(line):
        match = re.compile(r'([a-z_]+)=("(?:[^"\\]|\\.)*"|[^ "]+)(?: |$)').match(line, at)
        assert match is not None, line[at:]
        name, value = match.groups()
        assert name not in found
        found[name] = {"true": True, "false": False, "none": None}.get(value, value)
        if value.startswith('"') or re.fullmatch("-?[0-9]+", value):
            found[name] = json.loads(value)
        at = match.end()
    return found


def test_the_closed_list_is_the_same_everywhere() -> None:
    methods = [name for name in vars(Log) if not name.startswith("_")]
    assert sorted(methods) == sorted(EVENTS) == sorted(get_args(EventName)) == sorted(SAMPLES)


def test_the_document_lists_every_event_with_its_level_and_its_facts() -> None:
    rows = []
    for event, kind in EVENTS.items():
        desk = Desk(as_json=True)
        desk.tell(event)
        facts = ", ".join(f"`{name}`" for name in json.loads(desk.lines[0]) if name not in HEAD)
        rows.append(f"| `{event}` | {kind.level} | {'yes' if kind.noisy else '–'} | {facts} |")
    documented = [
        line.rpartition(" | ")[0] + " |" for line in DOC.splitlines() if re.match(r"\| `[a-z_]+` \| (i|w|e)", line)
    ]
    assert documented == rows


@pytest.mark.parametrize("event", EVENTS)
def test_both_forms_tell_the_same_facts_in_the_same_order(event: EventName) -> None:
    pairs, as_json = Desk(), Desk(as_json=True)
    pairs.tell(event)
    as_json.tell(event)
    [pairs_line], [json_line] = pairs.lines, as_json.lines
    assert list(parse(pairs_line).items()) == list(json.loads(json_line).items())
    assert list(parse(pairs_line))[:4] == HEAD


def test_a_line_is_what_an_operator_expects() -> None:
    desk = Desk()
    desk.tell("peer_lost")
    assert desk.lines == [
        "time=2025-01-02T03:04:05.678Z level=warning node=n1 event=peer_lost peer=n2 error=SessionLost "
        "reason=\"'n2' closed the connection\""
    ]


@given(wall_ms=st.integers(0, 4_102_444_800_000))
def test_the_time_is_exact_to_the_millisecond(wall_ms: int) -> None:
    desk = Desk()
    desk.clock.wall_ms = wall_ms
    desk.tell("became_leader")
    time = parse(desk.lines[0])["time"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", time)
    assert int(time[-4:-1]) == wall_ms % 1000


NASTY = st.text(st.characters() | st.sampled_from('\n\r\0\x1b\x7f\x85\u2028\u202e\ud800"\\= #'), max_size=40)


@given(text=NASTY, node=NASTY)
@pytest.mark.parametrize("as_json", [False, True])
def test_no_text_can_forge_a_line_or_a_fact_or_reach_the_terminal(as_json: bool, text: str, node: str) -> None:
    desk = Desk(as_json=as_json, node=node)
    desk.log.peer_refused(peer=text, error=SessionLost(text))
    [line] = desk.lines
    assert all(" " <= each <= "~" for each in line)
    found = json.loads(line) if as_json else parse(line)
    assert list(found) == [*HEAD, "peer", "error", "reason"]
    assert (found["node"], found["peer"], found["reason"]) == (node, text, text)


@pytest.mark.parametrize("text", ["true", "none", "12", "-3", "", "a b", "a=b", "12:30", "1.5"])
def test_a_text_that_looks_like_something_else_is_still_read_as_a_text(text: str) -> None:
    desk = Desk()
    desk.log.stopping(reason=text)
    assert parse(desk.lines[0])["reason"] == text


def test_a_long_text_is_cut() -> None:
    desk = Desk()
    desk.log.stopping(reason="x" * 10_000)
    assert parse(desk.lines[0])["reason"] == "x" * VALUE_CHARS + "..."


def test_what_a_client_sent_is_not_quoted() -> None:
    desk = Desk()
    desk.log.client_rejected(client="10.0.0.9:1", error=BadValue(field="token", problem="is 'hunter2'"))
    assert parse(desk.lines[0])["error"] == "BadValue"
    assert "hunter2" not in desk.lines[0]


def test_a_failure_says_where_it_was_raised() -> None:
    def break_it() -> None:
        raise StateBroken(problem="it does not add up")

    desk = Desk()
    try:
        break_it()
    except StateBroken as error:
        desk.log.failed(error=error)
    line = break_it.__code__.co_firstlineno + 1
    found = parse(desk.lines[0])
    assert (found["level"], found["error"], found["where"]) == ("error", "StateBroken", f"test_logs.py:{line}")


# Limits


def test_a_flood_is_a_burst_and_then_a_line_in_a_while_that_tells_how_many_were_left_out() -> None:
    desk = Desk()
    for _ in range(1000):
        desk.tell("overloaded")
    assert len(desk.lines) == BURST
    desk.clock.now_s += EVERY_S
    desk.tell("overloaded")
    desk.tell("overloaded")
    assert len(desk.lines) == BURST + 1
    assert parse(desk.lines[-1])["suppressed"] == 1000 - BURST
    desk.clock.now_s += EVERY_S
    desk.tell("overloaded")
    assert parse(desk.lines[-1])["suppressed"] == 1


@pytest.mark.parametrize("event", ["stopped", "failed"])
def test_the_last_line_tells_what_is_still_open_of_all_events(event: EventName) -> None:
    desk = Desk()
    for _ in range(BURST + 3):
        desk.tell("overloaded")
        desk.tell("slow_disk")
    desk.tell(event)
    assert parse(desk.lines[-1])["suppressed"] == 6


@given(waits_s=st.lists(st.sampled_from([0.0, 0.0, 0.0, 1.0, 15.0]), min_size=BURST, max_size=60))
def test_every_noisy_event_is_either_written_or_counted(waits_s: list[float]) -> None:
    desk = Desk(as_json=True)
    for wait_s in waits_s:
        desk.clock.now_s += wait_s
        desk.tell("slow_disk")
    desk.tell("stopped")
    lines = [json.loads(line) for line in desk.lines]
    written = [line for line in lines if line["event"] == "slow_disk"]
    assert len(written) + sum(line.get("suppressed", 0) for line in lines) == len(waits_s)
    assert len(written) <= BURST + sum(waits_s) / EVERY_S + 1


def test_a_flood_of_one_event_silences_no_other() -> None:
    desk = Desk()
    for _ in range(1000):
        desk.tell("client_rejected")
    desk.tell("overloaded")
    assert parse(desk.lines[-1])["event"] == "overloaded"


def test_a_wall_clock_that_jumps_back_silences_nothing() -> None:
    desk = Desk()
    for _ in range(BURST + 1):
        desk.tell("slow_disk")
    desk.clock.wall_ms -= 3_600_000
    desk.clock.now_s += EVERY_S
    desk.tell("slow_disk")
    assert len(desk.lines) == BURST + 1


@pytest.mark.parametrize("event", [event for event, kind in EVENTS.items() if not kind.noisy and event != "failed"])
def test_what_happens_rarely_is_never_left_out(event: EventName) -> None:
    desk = Desk()
    for _ in range(100):
        desk.tell(event)
    assert len(desk.lines) == 100


def test_a_failure_is_told_once_by_the_first_error_that_is_its_cause() -> None:
    """What the end of one part does to the others is not why."""
    cause = StateBroken(problem="it does not add up")
    desk = Desk(as_json=True)
    desk.log.failed(error=BaseExceptionGroup("", [KeyboardInterrupt()]))
    assert desk.lines == []
    desk.log.failed(error=BaseExceptionGroup("", [KeyboardInterrupt(), BaseExceptionGroup("", [cause])]))
    desk.log.failed(error=OSError("what it led to"))
    [line] = desk.lines
    assert json.loads(line)["error"] == "StateBroken"


# A stream that fails


class Failing(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.fail: Callable[[], None] | None = None

    def write(self, text: str) -> int:
        if self.fail is not None:
            self.fail()
        return super().write(text)


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(28, "No space left"), ValueError("closed file")])
def test_a_log_that_cannot_be_written_stops_nothing_and_its_lost_lines_are_counted(error: Exception) -> None:
    def fail() -> None:
        raise error

    stream = Failing()
    log = Log(node="n1", stream=stream, wall_ms=lambda: 0, now_s=lambda: 0.0)
    stream.fail = fail
    log.became_leader(term=1)
    log.became_leader(term=2)
    stream.fail = None
    log.became_leader(term=3)
    log.became_leader(term=4)
    first, second = map(parse, stream.getvalue().splitlines())
    assert (first["term"], first["lost"]) == (3, 2)
    assert second["term"] == 4 and "lost" not in second
