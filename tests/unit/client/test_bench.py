"""`holdfast bench apply` and `client`, on stores so small that only the form of its figures means anything."""

import json
import time
from pathlib import Path

import pytest

from holdfast.client.cli import bench
from holdfast.client.cli.main import main
from holdfast.storage.bench import works

TINY = 10_000  # how many times smaller than the full works

LIVES = ("batches-1000", "batches-100", "batches-100-together", "one-by-one", "one-by-one-each")
FLAT = {
    "waiting": ("waiting", 1_000),
    "waiting-one-by-one": ("waiting", 1_000),
    "leases": ("open_leases", 10),
    "holes": ("holes", 10),
    "delayed": ("delayed", 100),
    "turnovers": ("turnovers", 10),
}


def measured(name: str, directory: Path) -> bench.Figures:
    found: list[bench.Figures] = []
    assert bench.measure([name], TINY, time.perf_counter_ns, directory, found.append) == 0
    assert list(directory.iterdir()) == []  # every store was removed
    (figures,) = found
    assert figures["work"] == name
    assert set(figures["wanted"]) <= set(figures)
    json.dumps(figures)
    bench.Table()(figures)
    return figures


def test_every_work_is_tried_here() -> None:
    assert [work.name for work in works(bench.open_elsewhere)] == [*LIVES, *FLAT, "opening"]


@pytest.mark.parametrize("name", LIVES)
def test_a_whole_life_has_its_floor_and_its_operations_beside_it(name: str, tmp_path: Path) -> None:
    figures = measured(name, tmp_path)
    assert figures["messages_per_s"] > 0
    assert figures["deliver_messages_per_s"] > 0
    assert figures["of_floor"] == pytest.approx(figures["messages_per_s"] / figures["floor_messages_per_s"], rel=0.05)
    operations = figures["operations_per_life"]
    assert operations["append"] == {"blob": 1}  # one body is written for one produce
    assert operations["delete"]["blob"] == 1  # and freed by its ack


@pytest.mark.parametrize("name", FLAT)
def test_a_flat_cost_is_a_ratio_to_the_empty_queue(name: str, tmp_path: Path) -> None:
    figures = measured(name, tmp_path)
    assert figures["ratio"] == pytest.approx(figures["loaded_us"] / figures["empty_us"], rel=0.05)
    fact, least = FLAT[name]
    assert figures[fact] >= least


def test_a_fresh_process_opens_the_store(tmp_path: Path) -> None:
    figures = measured("opening", tmp_path)
    assert figures["ready"] == figures["waiting"] == 1_000
    assert figures["resident_bytes"] > 1_000_000


def test_the_command_prints_one_object_a_work(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["bench", "apply", "--json", "--quick", "--cpu", "--only", "opening", "--directory", str(tmp_path)]
    assert main(arguments) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["work"] == "opening"
    assert figures["scale"] == bench.QUICK


def test_a_work_that_is_none_is_refused_with_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "apply", "--only", "everything"]) == 2
    assert "waiting-one-by-one" in capsys.readouterr().err


def test_the_client_is_measured_against_a_process_that_only_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "client", "--json", "--seconds", "0.02"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(figures["what"], figures.get("batch")) for figures in told] == [
        ("produce", 1_000),
        ("produce", 1),
        ("send_many", 1_000),
        ("send", 1),
        ("send_nowait", 1),
        ("lease_ack", 1_000),
        ("import", None),
    ]
    assert all(figures["client_cpu_us"] > 0 for figures in told[:-1])
    assert set(told[0]["wanted"]) <= set(told[0])
