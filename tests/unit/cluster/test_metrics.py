"""The metrics: what was counted is read back by a parser that knows the format alone, and nothing grows for ever."""

import math
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.client.protocol import errors
from holdfast.client.protocol.commands import Command
from holdfast.client.protocol.errors import HoldfastError, LeaseNotFound, NoLeader, OutcomeUnknown, SessionExpired
from holdfast.client.protocol.queries import Query
from holdfast.cluster.events import Role
from holdfast.cluster.links import LinkStatus, Traffic
from holdfast.cluster.metrics import OTHER, SERIES_MAX, Counter, Family, Gauge, Histogram, Metrics
from tests.unit.cluster.test_health import HEALTHY, MEMBER

DOC = (Path(__file__).parents[3] / "docs" / "operating.md").read_text()
NOWHERE = Path("no-such-folder")


@dataclass
class Parsed:
    type: str
    means: str
    samples: dict[tuple[str, tuple[tuple[str, str], ...]], float] = field(default_factory=dict)


_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(,|$)')
_SAMPLE = re.compile(rf'({_NAME})(?:\{{((?:[^"}}]|"(?:[^"\\]|\\.)*")*)\}})? (\S+)')


def unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: {"n": "\n", "\\": "\\", '"': '"'}[found[1]], text)


def parse(page: str) -> dict[str, Parsed]:
    """The page by family; every line of it is understood, and every rule of the format is checked."""
    assert page.endswith("\n")
    families: dict[str, Parsed] = {}
    means: dict[str, str] = {}
    current = ""
    for line in page[:-1].split("\n"):
        if help_line := re.fullmatch(rf"# HELP ({_NAME}) (.*)", line, re.DOTALL):
            assert help_line[1] not in means
            means[help_line[1]] = unescaped(help_line[2])
        elif type_line := re.fullmatch(rf"# TYPE ({_NAME}) (counter|gauge|histogram)", line):
            current = type_line[1]
            assert current not in families
            families[current] = Parsed(type_line[2], means[current])
        else:
            sample = _SAMPLE.fullmatch(line)
            assert sample is not None, line
            parsed = families[current]
            suffixes = ("_bucket", "_sum", "_count") if parsed.type == "histogram" else ("",)
            assert sample[1] in [current + suffix for suffix in suffixes]
            key = (sample[1], tuple(labels(sample[2] or "")))
            assert key not in parsed.samples
            parsed.samples[key] = float(sample[3])
    for name, parsed in families.items():
        assert (parsed.type == "counter") == name.endswith("_total")
        if parsed.type == "histogram":
            check_histogram(name, parsed)
    return families


def labels(inside: str) -> list[tuple[str, str]]:
    found, at = [], 0
    while at < len(inside):
        match = _LABEL.match(inside, at)
        assert match is not None, inside
        found.append((match[1], unescaped(match[2])))
        at = match.end()
    return found


def check_histogram(name: str, parsed: Parsed) -> None:
    buckets = [(key[1], number) for key, number in parsed.samples.items() if key[0] == f"{name}_bucket"]
    bounds = [float(dict(label)["le"]) for label, _ in buckets]
    counts = [number for _, number in buckets]
    assert bounds == sorted(set(bounds)) and bounds[-1] == math.inf
    assert counts == sorted(counts)
    assert counts[-1] == parsed.samples[f"{name}_count", ()]


def numbers(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    """One family's samples by their label values."""
    family = parse(metrics.render())[name]
    return {tuple(value for _, value in key[1]): number for key, number in family.samples.items()}


def only(family: Family) -> Parsed:
    """A family that stands alone on its page."""
    metrics = Metrics(NOWHERE)
    metrics.families[:] = [family]
    return parse(metrics.render())[family.name]


STATUS = replace(
    HEALTHY,
    committed=91,
    durable=92,
    last=93,
    members=tuple(
        replace(MEMBER, name=name, connected=name != "n3", lag={"n1": 0, "n2": 4}.get(name))
        for name in ("n1", "n2", "n3")
    ),
    started_ms=1_735_787_000_500,
    refusing_produce=True,
)


def link(peer: str, session_count: int, connected: bool = True, queued_bytes: int = 0) -> LinkStatus:
    return LinkStatus(
        peer=peer,
        connected=connected,
        incarnation=1,
        session_count=session_count,
        last_error=None,
        queued_bytes=queued_bytes,
        traffic=Traffic(),
    )


# The format

LABEL_TEXT = st.text(st.characters(codec="utf-8") | st.sampled_from('\\"\n\r{},= #'), max_size=20)


@given(counts=st.dictionaries(st.tuples(LABEL_TEXT, LABEL_TEXT), st.integers(0, 2**63), max_size=20))
def test_counters_are_read_back_whatever_their_labels_hold(counts: dict[tuple[str, str], int]) -> None:
    counter = Counter("a_total", "x", "one", "two")
    for key, count in counts.items():
        counter.add(*key, count=count)
    expected = {("a_total", (("one", one), ("two", two))): float(count) for (one, two), count in counts.items()}
    assert only(counter).samples == expected


@given(means=LABEL_TEXT.filter(lambda text: text.strip() == text))
def test_a_meaning_is_read_back_whatever_it_holds(means: str) -> None:
    assert only(Gauge("a", means)).means == means


@given(number=st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False))
def test_a_gauge_is_read_back_exactly(number: float) -> None:
    gauge = Gauge("a", "x")
    gauge.set(number)
    assert only(gauge).samples == {("a", ()): float(number)}


@given(
    bounds=st.sets(st.floats(0.001, 1000), min_size=1, max_size=8).map(lambda each: tuple(sorted(each))),
    observed=st.lists(st.floats(0, 2000), max_size=50),
)
def test_each_bucket_counts_what_is_at_or_below_its_bound(bounds: tuple[float, ...], observed: list[float]) -> None:
    histogram = Histogram("a", "x", bounds)
    for number in [*observed, *bounds]:
        histogram.observe(number)
    samples = only(histogram).samples
    for bound in (*bounds, math.inf):
        [count] = [count for key, count in samples.items() if key[1] and float(key[1][0][1]) == bound]
        assert count == sum(number <= bound for number in [*observed, *bounds])
    assert samples["a_sum", ()] == pytest.approx(sum(observed) + sum(bounds))


# The node's numbers


def test_the_document_lists_every_metric_with_its_type_labels_and_meaning() -> None:
    metrics = Metrics()
    rows = [
        f"| `{each.name}` | {each.type} | {', '.join(f'`{label}`' for label in each.labels) or '–'} | {each.means} |"
        for each in metrics.families + metrics.process_families
    ]
    assert [line for line in DOC.splitlines() if re.match(r"\| `(holdfast|process)_", line)] == rows


def test_the_whole_page_follows_the_format_before_anything_has_happened_and_after() -> None:
    metrics = Metrics()
    before = parse(metrics.render())
    metrics.use_status(STATUS)
    metrics.use_links([link("n2", 3)])
    metrics.answered("Produce", None)
    metrics.http_answered("/metrics", 200)
    for histogram in (metrics.fsync_seconds, metrics.apply_seconds, metrics.commit_seconds, metrics.commands_per_entry):
        histogram.observe(0.004)
    for gauge in (metrics.parked_waiters, metrics.queued_commands, metrics.queued_bytes, metrics.connections):
        gauge.set(1)
    metrics.snapshot_age_seconds.set(60)
    after = parse(metrics.render())
    assert list(before) == list(after)
    assert all(family.samples for family in after.values())


def test_an_unset_gauge_is_not_told_and_a_plain_counter_begins_at_zero() -> None:
    metrics = Metrics(NOWHERE)
    assert numbers(metrics, "holdfast_term") == {}
    assert numbers(metrics, "holdfast_elections_total") == {(): 0}


@pytest.mark.parametrize(
    ("error", "outcome", "name"),
    [
        (None, "done", "none"),
        (SessionExpired(), "refused", "SessionExpired"),
        (NoLeader(), "unavailable", "NoLeader"),
        (OutcomeUnknown("x", **dict.fromkeys(OutcomeUnknown.fact_names, 0)), "indeterminate", "OutcomeUnknown"),
        (HoldfastError("of no family"), OTHER, "HoldfastError"),
    ],
)
def test_an_answer_counts_once_by_its_outcome_and_once_by_its_error(
    error: HoldfastError | None, outcome: str, name: str
) -> None:
    metrics = Metrics(NOWHERE)
    metrics.answered("Produce", error)
    metrics.answered("Produce", error, count=4)
    assert numbers(metrics, "holdfast_requests_total") == {("Produce", outcome): 5}
    assert numbers(metrics, "holdfast_answers_total") == {(name,): 5}


def test_every_error_of_the_protocol_has_an_outcome() -> None:
    metrics = Metrics(NOWHERE)
    for kind in errors.BY_CODE.values():
        metrics.answered("Lease", kind("x", **dict.fromkeys(kind.fact_names, 0)))
    outcomes = {outcome for _, outcome in numbers(metrics, "holdfast_requests_total")}
    assert outcomes == {"misuse", "refused", "unavailable", "indeterminate", "violated", "broken"}
    assert len(numbers(metrics, "holdfast_answers_total")) == len(errors.BY_CODE)


def test_a_status_becomes_gauges() -> None:
    metrics = Metrics(NOWHERE)
    metrics.use_status(STATUS)
    page = parse(metrics.render())
    plain = {key[0]: number for family in page.values() for key, number in family.samples.items() if not key[1]}
    expected = {
        "holdfast_applied_index": 90,
        "holdfast_committed_index": 91,
        "holdfast_durable_index": 92,
        "holdfast_last_index": 93,
        "holdfast_term": 3,
        "holdfast_leader_known": 1,
        "holdfast_journal_bytes": 1000,
        "holdfast_state_bytes": 2000,
        "holdfast_disk_free_bytes": 10_000_000,
        "holdfast_refusing_produce": 1,
        "holdfast_committed_time_seconds": 1_735_787_045.678,
        "holdfast_start_time_seconds": 1_735_787_000.5,
        "holdfast_turn_age_seconds": 0.005,
    }
    assert {name: plain[name] for name in expected} == expected
    assert numbers(metrics, "holdfast_node_info") == {("n1", "c1", "always"): 1}
    assert numbers(metrics, "holdfast_clock_skew_milliseconds") == {("n1",): 0, ("n2",): -12}


def test_the_role_is_one_hot() -> None:
    metrics = Metrics(NOWHERE)
    for role in Role:
        metrics.use_status(replace(STATUS, role=role))
        roles = numbers(metrics, "holdfast_role")
        assert roles == {(each.name.lower(),): each == role for each in Role}


def test_members_are_told_by_name_and_what_is_unknown_is_left_out() -> None:
    metrics = Metrics(NOWHERE)
    metrics.use_status(STATUS)
    assert numbers(metrics, "holdfast_peer_connected") == {("n2",): 1, ("n3",): 0}
    assert numbers(metrics, "holdfast_peer_lag_entries") == {("n2",): 4}


def test_what_a_status_no_longer_knows_is_no_longer_told() -> None:
    metrics = Metrics(NOWHERE)
    metrics.use_status(STATUS)
    metrics.use_status(replace(STATUS, members=STATUS.members[:2], skew_ms={}, cluster_id="c2", leader=None))
    assert numbers(metrics, "holdfast_peer_connected") == {("n2",): 1}
    assert numbers(metrics, "holdfast_clock_skew_milliseconds") == {}
    assert numbers(metrics, "holdfast_node_info") == {("n1", "c2", "always"): 1}
    assert numbers(metrics, "holdfast_leader_known") == {(): 0}


def test_links_are_told_by_peer_and_nothing_waits_for_one_that_is_gone() -> None:
    metrics = Metrics(NOWHERE)
    metrics.use_links([link("n2", 3, queued_bytes=50), link("n3", 1, connected=False, queued_bytes=70)])
    assert numbers(metrics, "holdfast_peer_sessions_total") == {("n2",): 3, ("n3",): 1}
    assert numbers(metrics, "holdfast_peer_queued_bytes") == {("n2",): 50, ("n3",): 0}


# Bounds


def test_a_family_is_bounded_whatever_labels_come_and_known_ones_go_on_counting() -> None:
    metrics = Metrics(NOWHERE)
    for number in range(10 * SERIES_MAX):
        metrics.http_answered(f"/{number}", 404)
    metrics.http_answered("/0", 404)
    counted = numbers(metrics, "holdfast_http_requests_total")
    assert len(counted) == SERIES_MAX + 1
    assert counted["/0", "404"] == 2
    assert counted[OTHER, OTHER] == 9 * SERIES_MAX


def test_every_command_and_query_with_every_outcome_fits_into_a_family() -> None:
    outcome_count = 7
    assert (len(get_args(Command)) + len(get_args(Query))) * outcome_count <= SERIES_MAX


# The process


def fake_proc(folder: Path, stat: str) -> Path:
    (folder / "fd").mkdir()
    for name in "0123":
        (folder / "fd" / name).touch()
    (folder / "statm").write_text("5000 250 100 1 0 300 0\n")
    (folder / "stat").write_text(stat)
    return folder


@pytest.mark.parametrize("command", ["python", "a b", "x) S 1 (y", "(("])
def test_the_process_is_read_whatever_its_command_is_called(tmp_path: Path, command: str) -> None:
    numbers_after = " ".join(map(str, range(1, 50)))  # field 4 is 1, so utime, field 14, is 11, and stime is 12
    metrics = Metrics(fake_proc(tmp_path, f"77 ({command}) S {numbers_after}\n"))
    assert numbers(metrics, "process_resident_memory_bytes") == {(): 250 * os.sysconf("SC_PAGE_SIZE")}
    assert numbers(metrics, "process_open_fds") == {(): 4}
    assert numbers(metrics, "process_cpu_seconds_total") == {(): 23 / os.sysconf("SC_CLK_TCK")}


def test_where_the_system_tells_nothing_the_process_is_absent() -> None:
    assert not [name for name in parse(Metrics(NOWHERE).render()) if name.startswith("process_")]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system has no /proc")
def test_this_process_uses_memory_files_and_time() -> None:
    metrics = Metrics()
    assert numbers(metrics, "process_resident_memory_bytes")[()] > 1_000_000
    assert numbers(metrics, "process_open_fds")[()] >= 3
    assert numbers(metrics, "process_cpu_seconds_total")[()] > 0


def test_an_unknown_lease_is_counted_without_its_id() -> None:
    metrics = Metrics(NOWHERE)
    metrics.answered("Extend", LeaseNotFound("x", **dict.fromkeys(LeaseNotFound.fact_names, 987654321)))
    assert "987654321" not in metrics.render()
