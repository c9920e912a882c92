"""Real nodes seen from outside: what they sync, what they listen on, and that nothing of theirs is unpickled.

The system calls are counted by strace (Debian: apt install strace).
"""

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast.client.message import Message, pack
from holdfast.client.protocol.commands import Produce
from holdfast.client.protocol.errors import HoldfastError
from holdfast.client.protocol.values import QueueId
from tests.support.processes import SUPPORT, Processes, cluster
from tests.support.traffic import Traffic, fill_until_compacted

LISTENS = "0A"  # the state of a socket in /proc/net/tcp


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("strace") is None,
    reason="strace is missing, so syncs per confirm are not counted: apt install strace, or make tools as root",
)
def test_each_confirm_was_synced_by_a_majority_and_many_share_a_sync(tmp_path: Path) -> None:
    """Shape 2, 3: one at a time, a sync of the leader and of a follower for each; 64 at a time, far fewer."""
    with cluster(tmp_path, traced="fdatasync") as processes, processes.client() as client:
        client.create_queue("orders")
        processes.whole()
        leader = processes.leader()
        queue_id = QueueId(client.queue("orders").queue_id)
        before = _syncs(processes)
        for _ in range(20):
            client.produce("orders", [b"x"])
        after = _syncs(processes)
        assert after[leader] - before[leader] >= 20
        assert sum(after[name] - before[name] for name in processes.others(leader)) >= 20

        rounds = 20
        before = after
        with processes.wire(leader) as wire:
            for round_ in range(rounds):
                requests = [wire.request(_produce(queue_id, f"{round_}-{at}")) for at in range(64)]
                wire.send(*requests)
                assert not any(isinstance(outcome, HoldfastError) for outcome in wire.outcomes(requests))
        processes.whole()
        after = _syncs(processes)
        assert client.stats("orders").tail_version == 20 + rounds * 64
        for name in processes.plan.names:
            taken = after[name] - before[name]
            print(f"{name}: {taken} syncs for {rounds * 64} messages, 64 in flight")
            assert 0 < taken < rounds * 64 / 4
        assert after[leader] - before[leader] >= rounds  # each round waited for the one before it


@pytest.mark.slow
def test_nodes_that_cannot_unpickle_do_all_their_work(tmp_path: Path) -> None:
    """R2: founding, traffic, failover, snapshot and restart without a single pickle."""
    poisoned = {"PYTHONPATH": str(SUPPORT / "poisoned")}
    proof = subprocess.run(
        [sys.executable, "-c", "import pickle; pickle.loads(pickle.dumps(1))"],
        env={**os.environ, **poisoned},
        capture_output=True,
        text=True,
    )
    assert "something was unpickled" in proof.stderr
    with cluster(tmp_path, environment=poisoned, snapshot_log_bytes=16_384) as processes:
        with Traffic(processes, seed=8) as traffic:
            traffic.progress(50)
            leader = processes.leader()
            last = processes.status_of(leader)["last"] + 100
            processes.kill(leader)
            traffic.progress(50)
            fill_until_compacted(processes, processes.others(leader), last)
            processes.start(leader)
            processes.formed()
        assert "event=snapshot_installed" in processes.log_of(leader)
        traffic.check()
        traffic.check_every_node()


def test_a_node_listens_where_it_was_told_to_and_nowhere_else(tmp_path: Path) -> None:
    """5.2: for clients, for pages and for peers; a node alone has no peers' port."""
    with cluster(tmp_path / "three") as processes:
        processes.whole()
        base = processes.plan.base_port
        for number, name in enumerate(processes.plan.names, start=1):
            wanted = {("127.0.0.1", base + offset + number) for offset in (0, 10, 20)}
            assert _listening(processes.pid(name)) == wanted
    with cluster(tmp_path / "one", nodes=1) as processes:
        processes.whole()
        base = processes.plan.base_port
        assert _listening(processes.pid("n1")) == {("127.0.0.1", base + 1), ("127.0.0.1", base + 11)}


def test_a_trace_says_where_each_life_of_the_node_begins(tmp_path: Path) -> None:
    """Shape 3: with the term, the vote and the index that its disk says; no life begins with less than was synced."""
    trace = tmp_path / "trace"
    with cluster(tmp_path / "nodes", nodes=1, flags={"trace": str(trace)}) as processes:
        for life in range(2):
            if life:
                processes.kill_all()
                processes.start("n1")
            processes.leader()
            with processes.client() as client:
                client.create_queue(f"queue-{life}")
    told = [json.loads(line) for line in trace.read_text().splitlines()]
    begins = [at for at, line in enumerate(told) if line["kind"] == "started"]
    assert begins[0] == 0 and len(begins) == 2
    assert {told[at]["node"] for at in begins} == {"n1"}
    before = [line for line in told[: begins[1]] if line["kind"] == "synced"]
    again = told[begins[1]]
    assert before and again["durable"] >= before[-1]["durable"] and again["term"] >= before[-1]["term"]


def _syncs(processes: Processes) -> dict[str, int]:
    """Of the journals alone: each node's own thread for them makes them."""
    return {name: sum("fdatasync(" in line for line in processes.trace_of(name)) for name in processes.plan.names}


def _produce(queue_id: QueueId, client_id: str) -> Produce:
    columns, body = pack([bytes(256)], Message(b""))
    return Produce(queue_id=queue_id, columns=columns, body=body, client_id=client_id, first_seq=1)


def _listening(pid: int) -> set[tuple[str, int]]:
    """Every address on which this process takes connections or datagrams, by the kernel's own tables."""
    links = []
    for number in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # it was closed meanwhile
            links.append(os.readlink(f"/proc/{pid}/fd/{number}"))
    ours = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:")}
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in ours and (table.startswith("udp") or fields[3] == LISTENS):
                host, _, port = fields[1].partition(":")
                octets = [str(octet) for octet in reversed(bytes.fromhex(host))]
                found.add((".".join(octets), int(port, 16)))
    return found
