"""What a checker asks of a running cluster: its whole log with the answers, what was sent and synced, who leads."""

import json
from pathlib import Path

import pytest

from holdfast.client.cli.main import main
from tests.support.processes import cluster, until
from tests.support.traffic import compacted_to


@pytest.mark.slow
def test_a_running_cluster_gives_its_log_its_traces_and_its_leadership(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Snapshots are taken meanwhile, and with keep_log nothing is let go of."""
    flags = {"trace": str(tmp_path / "{name}.events")}
    environment = {"HOLDFAST_KEEP_LOG": "true"}
    with (
        cluster(tmp_path, flags=flags, environment=environment, snapshot_log_bytes=16_384) as processes,
        processes.client() as client,
    ):
        client.create_queue("orders")
        for at in range(40):
            client.produce("orders", [b"%d" % at + bytes(1_000)])
            client.lease("orders").ack()
        name = processes.leader()
        client.create_queue("filler")

        def filled() -> bool:
            client.produce("filler", [bytes(50_000)])
            client.purge_queue("filler")
            return processes.log_of(name).count("event=snapshot_taken") == 2

        until(filled, "two snapshots, the first of which the log could follow")
        last = processes.whole()
        capsys.readouterr()

        logs = {}
        for node in processes.plan.names:
            assert main(["node", "log", "--data", str(tmp_path / node), "--json"]) == 0
            logs[node] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
            assert [entry["index"] for entry in logs[node]][: last - 1] == list(range(2, last + 1))
            assert compacted_to(processes, node) == 0
        entries = logs[name][: last - 1]
        assert all(logs[node][: last - 1] == entries for node in processes.plan.names)
        done = [(command["kind"], command["reply_kind"]) for entry in entries for command in entry["commands"]]
        assert done.count(("Produce", "Produced")) - done.count(("PurgeQueue", "Purged")) == 40
        assert done.count(("Lease", "Leased")) == 40
        first = entries[-3]["index"]
        assert main(["node", "log", "--data", str(tmp_path / name), "--from", str(first), "--json"]) == 0
        found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert found[:3] == entries[-3:]

        trace = [json.loads(line) for line in (tmp_path / f"{name}.events").read_text().splitlines()]
        assert {line["kind"] for line in trace} >= {"sent", "synced", "answered"}
        assert [line["at_s"] for line in trace] == sorted(line["at_s"] for line in trace)
        assert max(line["durable"] for line in trace if line["kind"] == "synced") >= last

        target = processes.others(name)[0]
        assert main(["node", "transfer", target, "--connect", processes.plan.connect, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"leader": target}
        assert processes.leader() == target
        assert "event=transfer_done" in processes.log_of(name)
        assert client.produce("orders", [b"x"]).versions == [41]
