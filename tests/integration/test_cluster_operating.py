"""What an operator does to real nodes: start them wrongly, stop them in good order, look at their pages."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from threading import Event, Thread

import pytest

from holdfast.client.blocking import Client
from holdfast.client.cli.main import main
from holdfast.client.protocol.errors import QueueExists
from holdfast.cluster.embedded import Node
from tests.support.processes import WAIT_S, cluster, until

HERE = ("--listen", "127.0.0.1:0", "--peer-listen", "127.0.0.1:0")
PEERS = ("--peers", "n1=127.0.0.1:1,n2=127.0.0.1:2")


def test_a_leader_that_is_stopped_hands_over_first_and_clients_see_no_error(tmp_path: Path) -> None:
    """Shape 5: exit code 0, the next leader is there before it goes, and nobody has to wait for an election."""
    with cluster(tmp_path) as processes, processes.client() as client:
        client.create_queue("orders")
        processes.whole()
        stopping, gaps_s, errors = Event(), [0.0], list[BaseException]()

        def produce() -> None:
            try:
                while not stopping.is_set():
                    began_s = time.monotonic()
                    client.produce("orders", [b"x"])
                    gaps_s.append(time.monotonic() - began_s)
            except BaseException as error:
                errors.append(error)

        thread = Thread(target=produce)
        thread.start()
        try:
            for _ in range(2):
                leader = processes.leader()
                before = len(gaps_s)
                assert processes.stop(leader) == 0
                until(lambda at=before: len(gaps_s) > at + 20, "messages after it")  # type: ignore[misc]
                told = _events(processes.log_of(leader).rpartition("event=started")[2])
                assert "lost_leadership" in told[told.index("stopping") :]
                assert told[-1] == "stopped"
                processes.start(leader)
                processes.formed()
        finally:
            stopping.set()
            thread.join()
        assert not errors
        print(f"longest of {len(gaps_s)} produces, through two hand-overs: {max(gaps_s) * 1_000:.0f} ms")
        assert client.stats("orders").tail_version == len(gaps_s) - 1


def test_leadership_is_handed_to_a_node_that_answers(tmp_path: Path) -> None:
    """One that hangs has all of an idle log, too: it is not the one that is asked."""
    with cluster(tmp_path) as processes:
        processes.whole()
        leader = processes.leader()
        hanging, answering = processes.others(leader)
        processes.pause(hanging)
        assert processes.stop(leader) == 0
        assert "lost_leadership" in _events(processes.log_of(leader))
        # By the leader's own vote: with one that hangs there is no other.
        assert "became_leader" in _events(processes.log_of(answering))
        processes.resume(hanging)
        processes.start(leader)
        processes.whole()


def test_a_node_alone_keeps_everything_over_a_restart(tmp_path: Path) -> None:
    """Shape 4: stopped and killed alike."""
    with cluster(tmp_path, nodes=1) as processes, processes.client() as client:
        client.create_queue("orders", visibility_timeout_ms=600_000)
        client.produce("orders", [b"a", b"b", b"c"], client_id="svc", client_seq=1)
        lease = client.lease("orders", max_messages=2)
        for end in (processes.stop, processes.kill):
            end("n1")
            processes.start("n1")
            again = client.produce("orders", [b"a", b"b", b"c"], client_id="svc", client_seq=1)
            assert (again.versions, again.replayed) == ([1, 2, 3], True)
            assert client.stats("orders").in_flight == 2
        lease.ack()
        assert [message.version for message in client.lease("orders")] == [3]


def test_an_embedded_node_is_a_node(tmp_path: Path) -> None:
    """The same data, opened again; a folder in use is refused."""
    with Node(tmp_path / "data") as node, Client(node.address) as client:
        client.create_queue("orders")
        client.produce("orders", [b"a", b"b"])
        with pytest.raises(Exception, match="in use"), Node(tmp_path / "data"):
            pass
    assert not node.address
    with Node(tmp_path / "data", fsync="os") as node, Client(node.address) as client:
        with pytest.raises(QueueExists):
            client.create_queue("orders")
        lease = client.lease("orders")
        assert [message.payload for message in lease] == [b"a", b"b"]
        lease.ack()
        assert client.stats("orders").acked == 2


def test_the_pages_tell_how_a_node_does(tmp_path: Path) -> None:
    with cluster(tmp_path) as processes, processes.client() as client:
        client.create_queue("orders")
        processes.whole()
        leader = processes.leader()
        for name in processes.plan.names:
            code, text = processes.page(name, "/healthz")
            assert (code, json.loads(text)["alive"]) == (200, True)
            code, text = processes.page(name, "/readyz")
            assert (code, json.loads(text)["ready"]) == (200, True)
            status = processes.status_of(name)
            assert (status["leader"], status["pid"], status["fsync"]) == (leader, processes.pid(name), "always")
            assert [member["name"] for member in status["members"]] == processes.plan.names
            assert processes.page(name, "/nothing")[0] == 404
        code, text = processes.page(leader, "/metrics")
        assert code == 200
        assert 'holdfast_role{role="leader"} 1' in text
        assert "holdfast_fsync_seconds_count" in text
        for name in processes.others(leader):
            processes.kill(name)
        until(lambda: processes.page(leader, "/readyz")[0] == 503, "not ready without a majority")
        assert processes.page(leader, "/healthz")[0] == 200


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--listen", "0.0.0.0:0"], "listen is 0.0.0.0:0, beyond loopback"),
        (["--http", "192.0.2.1:80"], "http is 192.0.2.1:80, beyond loopback"),
        ([*PEERS], "secret_file is missing"),
        ([*PEERS, "--secret-file", "absent"], "secret_file cannot be read"),
        ([*PEERS, "--secret-file", "short"], "secret_file has 5 bytes"),
        ([*PEERS, "--secret-file", "open"], "secret_file is readable by others"),
        (["--config", "unknown.toml"], "colour"),
        (["--config", "absent.toml"], "config absent.toml cannot be read"),
        (["--disk-reserve-bytes", "lots"], "disk_reserve_bytes"),
        (["--fsync", "never"], "fsync is 'never'"),
        (["--node", "a b"], "node has 'a b'"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_a_wrong_setting_ends_the_node_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    """Exit code 2, and one line that names the key."""
    monkeypatch.chdir(tmp_path)
    _write("short", "abcde", 0o600)
    _write("open", "0123456789abcdef", 0o644)
    _write("unknown.toml", 'colour = "red"', 0o600)
    assert main(["serve", "--data", "data", *HERE, *arguments]) == 2
    assert told in capsys.readouterr().err


def test_a_process_with_a_wrong_setting_ends_with_one_line(tmp_path: Path) -> None:
    """As a user meets it; the setting is one of the environment."""
    command = [sys.executable, "-m", "holdfast.client.cli", "serve", "--data", str(tmp_path), *HERE]
    environment = {**os.environ, "HOLDFAST_FSYNC": "never"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["holdfast: fsync is 'never'; always or os is allowed"]


def _write(name: str, text: str, mode: int) -> None:
    Path(name).write_text(text)
    os.chmod(name, mode)


def _events(log: str) -> list[str]:
    return [line.partition("event=")[2].split(" ")[0] for line in log.splitlines() if "event=" in line]
