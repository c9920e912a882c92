"""Journals of real nodes, damaged and repaired: who counts again, who waits for whom, and who never goes on."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.journal_frames import HEAD_BYTES
from holdfast.cluster.state import MARK
from tests.support.disks import damage_before_the_last_frame, damage_message, flip, last_frame, repair, segment
from tests.support.processes import Processes, cluster, until


@pytest.mark.slow
def test_a_repaired_node_catches_up_and_counts_again(tmp_path: Path) -> None:
    """Refused first, with the remedy; after it the node has all that was confirmed, and can make a majority."""
    with cluster(tmp_path) as processes, processes.client() as client:
        client.create_queue("orders")
        for at in range(5):
            client.produce("orders", [b"message %d" % at])
        processes.whole()
        damaged, away = processes.followers()
        processes.kill(damaged)
        damage_before_the_last_frame(tmp_path / damaged)
        client.produce("orders", [b"message 5"])
        processes.start(damaged)
        assert processes.ended(damaged) not in (0, None)
        assert "holdfast node repair" in processes.log_of(damaged)
        assert repair(tmp_path / damaged) == 0
        processes.start(damaged)
        processes.whole()
        until(lambda: processes.status_of(damaged)["promised"] is None, "it waits for nobody any more")
        processes.kill(away)
        client.produce("orders", [b"message 6"])
        assert [message.payload for message in client.read("orders")] == [b"message %d" % at for at in range(7)]


@pytest.mark.slow
def test_two_repaired_nodes_of_three_follow_the_third(tmp_path: Path) -> None:
    with cluster(tmp_path) as processes, processes.client() as client:
        client.create_queue("orders")
        for at in range(5):
            client.produce("orders", [b"message %d" % at])
        processes.whole()
        whole, *damaged = processes.plan.names
        processes.kill_all()
        for name in damaged:
            _damage_and_repair(tmp_path / name, b"message 3", state_is_gone=True)
        processes.start_all()
        assert processes.leader(among=[whole]) == whole
        processes.whole()
        assert [message.payload for message in client.read("orders")] == [b"message %d" % at for at in range(5)]
        assert client.produce("orders", [b"message 5"]).versions == [6]


@pytest.mark.slow
def test_two_repaired_nodes_that_lost_what_they_confirmed_say_what_they_wait_for(tmp_path: Path) -> None:
    """The third was away then. Nobody leads, rather than that a confirmed message would never have been."""
    with cluster(tmp_path) as processes, processes.client() as client:
        client.create_queue("orders")
        processes.whole()
        away = processes.followers()[0]
        damaged = processes.others(away)
        processes.kill(away)
        for text in (b"one", b"two", b"three"):
            client.produce("orders", [text])
        last = max(processes.status_of(name)["last"] for name in damaged)
        processes.kill_all()
        for name in damaged:
            _damage_and_repair(tmp_path / name, b"two", state_is_gone=True)
        processes.start_all()
        for name in damaged:
            reasons = until(lambda name=name: _reasons(processes, name), f"{name} says what it waits for")  # type: ignore[misc]
            assert reasons["repaired"]["promised"] >= last and "no_leader" in reasons
            until(lambda name=name: "event=promise_open" in processes.log_of(name), "it says so")  # type: ignore[misc]
        assert {processes.status_of(name)["leader"] for name in processes.plan.names} == {None}


@pytest.mark.slow
def test_a_repaired_node_alone_leads_again_with_the_state_that_it_had(tmp_path: Path) -> None:
    """What it told to a client it had applied: nothing that was told is missing."""
    with _killed_alone(tmp_path) as processes:
        _damage_and_repair(tmp_path / "n1", b"message 3")
        processes.start("n1")
        with processes.client() as client:
            assert [message.payload for message in client.read("orders")] == [b"message %d" % at for at in range(5)]
            assert client.produce("orders", [b"message 5"]).versions == [6]
            assert processes.status_of("n1")["promised"] is None


@pytest.mark.slow
@pytest.mark.parametrize("is_there", [True, False])
def test_a_repaired_node_alone_whose_state_is_gone_too_ends_and_says_why(tmp_path: Path, is_there: bool) -> None:
    """Every time, also when the start before has made the state anew, as far as a snapshot goes."""
    with _killed_alone(tmp_path, snapshot=is_there) as processes:
        _damage_and_repair(tmp_path / "n1", b"message 3", state_is_gone=True)
        if not is_there:
            shutil.rmtree(tmp_path / "n1" / "log-0" / "state")
            (tmp_path / "n1" / "log-0" / MARK).unlink()
        for _ in range(2):
            processes.start("n1")
            assert processes.ended("n1") not in (0, None)
        assert processes.log_of("n1").count("is the only voter, so nobody else has that") >= 2


@pytest.mark.slow
def test_a_journal_whose_vote_cannot_be_read_is_not_repaired(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only a new member name helps; nothing is changed."""
    with _killed_alone(tmp_path):
        begin, _ = last_frame(tmp_path / "n1")
        damage_before_the_last_frame(tmp_path / "n1")
        flip(tmp_path / "n1", begin + HEAD_BYTES + 3)
        before = segment(tmp_path / "n1").read_bytes()
        assert repair(tmp_path / "n1") != 0
        assert "Only a new member name helps" in capsys.readouterr().err
        assert segment(tmp_path / "n1").read_bytes() == before


@contextmanager
def _killed_alone(folder: Path, *, snapshot: bool = False) -> Iterator[Processes]:
    with cluster(folder, nodes=1, snapshot_log_bytes=1 << 20) as processes:
        with processes.client() as client:
            client.create_queue("orders")
            if snapshot:
                client.create_queue("filler")
                client.produce("filler", [bytes(500_000)] * 3)
                client.purge_queue("filler")
                until(lambda: "event=snapshot_taken" in processes.log_of("n1"), "a snapshot")
            for at in range(5):
                client.produce("orders", [b"message %d" % at])
        processes.kill("n1")
        yield processes


def _damage_and_repair(data: Path, payload: bytes, *, state_is_gone: bool = False) -> None:
    """Everything from the entry with this message on is lost."""
    damage_message(data, payload)
    if state_is_gone:
        (data / "log-0" / MARK).write_text("another boot")
    assert repair(data) == 0


def _reasons(processes: Processes, name: str) -> dict[str, dict[str, Any]] | None:
    """Why a repaired node is not ready; nothing while it is not yet up."""
    try:
        code, page = processes.page(name, "/readyz")
    except OSError:
        return None
    reasons = {each["reason"]: each for each in json.loads(page).get("reasons", [])}
    return reasons if code == 503 and "repaired" in reasons else None
