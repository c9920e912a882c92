"""`holdfast bench` on real clusters, for so short a time that only the form of its figures means anything."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast.client.cli.bench import print_figures
from holdfast.client.cli.bench_cluster import quantile, quantiles
from holdfast.client.cli.bench_faults import silence_ms
from holdfast.client.cli.bench_load import Job, Numbers
from holdfast.client.cli.bench_works import shared_out
from holdfast.client.cli.main import main

QUICK = ("--seconds", "0.4", "--json")
EVERY = ("server_cpu_us", "leader_cpu_us", "client_cpu_us", "fsyncs_per_1000")


def bench(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """The figures of one work, whose data is gone afterwards."""
    assert main(["bench", *arguments, *QUICK, "--directory", str(folder)]) == 0
    assert list(folder.iterdir()) == []
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for figures in found:
        assert figures["work"] == arguments[0]
        assert set(figures["wanted"]) <= set(figures)
    return found


@pytest.mark.slow
def test_latency_has_the_disk_of_the_same_run_beside_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    [figures] = bench(capsys, tmp_path, "latency", "--nodes", "1")
    assert figures["confirm_p50_ms"] > figures["fdatasync_p50_ms"] > 0
    assert figures["over_fdatasync_ms"] == pytest.approx(figures["confirm_p50_ms"] - figures["fdatasync_p50_ms"])
    assert figures["delivered_p50_ms"] > 0
    assert figures["bytes_per_fsync"] > 256


@pytest.mark.slow
def test_single_produces_share_syncs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    [figures] = bench(capsys, tmp_path, "produce_single", "--nodes", "3", "--in-flight", "16")
    assert figures["connections"] == 16
    assert figures["messages_per_s"] > 0
    assert figures["p99_ms"] >= figures["p50_ms"]
    assert all(figures[name] > 0 for name in EVERY)
    assert figures["fsyncs_per_1000"] < 1_000


@pytest.mark.slow
def test_requests_in_flight_may_share_a_connection(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ("produce_single", "--nodes", "1", "--in-flight", "64", "--connections", "2", "--payload", "1k")
    [figures] = bench(capsys, tmp_path, *arguments)
    assert (figures["in_flight"], figures["connections"], figures["payload"]) == (64, 2, 1_024)
    assert figures["wanted"] == {"messages_per_s": 10_000}


@pytest.mark.slow
def test_batches_are_measured_size_by_size(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    produced = bench(capsys, tmp_path, "produce_batch", "--nodes", "1", "--batch", "10,100")
    consumed = bench(capsys, tmp_path, "consume_ack", "--nodes", "1", "--batch", "1,10", "--messages", "100000")
    assert [figures["batch"] for figures in produced] == [10, 100]
    assert [figures["batch"] for figures in consumed] == [1, 10]
    assert all(figures["messages_per_s"] > 0 for figures in (*produced, *consumed))


@pytest.mark.slow
def test_a_queue_that_ran_dry_gives_no_figure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The rate would be that of what was there, not of the cluster."""
    arguments = ("consume_ack", "--nodes", "1", "--batch", "1", "--messages", "2", *QUICK, "--directory", str(tmp_path))
    assert main(["bench", *arguments]) != 0
    assert "messages_per_s" not in capsys.readouterr().out


@pytest.mark.slow
def test_mixed_counts_what_went_in_and_what_came_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    [figures] = bench(capsys, tmp_path, "mixed", "--nodes", "1", "--in-flight", "4", "--consumers", "2")
    assert figures["messages_per_s"] > 0
    assert figures["consumed_per_s"] > 0
    assert figures["delivered_p50_ms"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "stop", "transfer"])
def test_a_leader_that_goes_costs_a_silence_and_no_message(
    how: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    [figures] = bench(capsys, tmp_path, "failover", "--rounds", "1", "--how", how)
    assert (figures["lost"], figures["doubled"]) == (0, 0)
    assert figures["confirmed"] > 0
    assert 0 < figures["silence_median_ms"] <= figures["silence_worst_ms"] + 1


@pytest.mark.slow
def test_a_node_with_entries_of_its_own_becomes_level_after_the_heal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    [figures] = bench(capsys, tmp_path, "heal", "--entries", "200")
    assert figures["behind"] > 0
    assert figures["heal_ms"] >= figures["connected_ms"] > 0


@pytest.mark.slow
def test_one_node_down_is_a_ratio_within_one_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    [figures] = bench(capsys, tmp_path, "one_down", "--rounds", "1", "--in-flight", "4")
    assert figures["ratios"] == [figures["ratio"]]
    assert figures["ratio"] > 0


@pytest.mark.slow
def test_a_backlog_is_measured_at_every_size(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = bench(capsys, tmp_path, "backlog", "--nodes", "1", "--messages", "1000,5000")
    assert [figures["messages"] for figures in found] == [1_000, 5_000]
    for figures in found:
        assert figures["resident_bytes"] > figures["anonymous_bytes"] > 0
        assert figures["restart_s"] > 0


def test_a_work_that_needs_others_refuses_to_be_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "failover", "--nodes", "1"]) == 2
    assert "at least 3 nodes" in capsys.readouterr().err


def test_a_payload_must_hold_who_sent_it_when(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "latency", "--payload", "8"]) == 2
    assert "at least 16 bytes" in capsys.readouterr().err


def test_what_is_wanted_stands_beside_the_figure(capsys: pytest.CaptureFixture[str]) -> None:
    print_figures({"messages_per_s": 12_345, "p50_ms": 1.5, "wanted": {"messages_per_s": 10_000, "p50_ms": 2}})
    rate, middle, _ = capsys.readouterr().out.splitlines()
    assert rate.split() == ["messages_per_s", "12,345", "wanted", ">=", "10,000"]
    assert middle.split() == ["p50_ms", "1.5", "wanted", "<=", "2"]


@pytest.mark.parametrize(
    ("times", "silence"),
    [
        ([0.0, 0.9, 1.2, 2.0], 800.0),  # the gap is in the middle
        ([0.0, 0.9, 3.0], 2_100.0),  # it begins before the blow, with the last confirm of the old leader
        ([0.0, 0.5, 0.9, 1.0, 1.1, 2.9], 1_800.0),  # confirms that were on their way come after the blow
    ],
)
def test_a_silence_is_the_longest_gap_that_the_blow_may_have_made(times: Sequence[float], silence: float) -> None:
    assert silence_ms(list(times), 1.0, 2.5) == pytest.approx(silence)


def test_quantiles_are_values_that_were_measured() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantiles("confirm", [1.0] * 99 + [9.0]) == {"confirm_p50_ms": 1.0, "confirm_p99_ms": 1.0}
    assert quantiles("confirm", []) == {}


def test_clients_are_shared_out_over_the_processes_without_a_number_twice() -> None:
    jobs = shared_out(Job(kind="produce", connect="", queue=""), clients=5, in_flight=10)
    assert [(job.first, job.clients, job.in_flight) for job in jobs] == [(0, 3, 2), (3, 2, 2)]


def test_numbers_that_are_open_hold_done_below_back() -> None:
    numbers = Numbers()
    assert [numbers.take(10), numbers.take(10)] == [1, 11]
    assert numbers.done_below == 1
    numbers.release(1)
    assert numbers.done_below == 11
