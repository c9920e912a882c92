"""Real nodes under clients that misbehave, with too few files, and before their cluster is there."""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import trio

from holdfast.client.blocking import Client
from holdfast.client.protocol.errors import NoLeader, Overloaded, StateBroken
from holdfast.client.protocol.messages import Hello, Inquiry
from holdfast.client.protocol.queries import NodeStatus
from holdfast.cluster.config import Address, Config
from holdfast.cluster.descriptors import FILES_MIN, share
from holdfast.cluster.logs import Log
from holdfast.cluster.node import Node
from holdfast.cluster.serve import run_alone, serve
from tests.integration.test_server import frames
from tests.support.processes import WAIT_S, Processes, cluster, until

FILES = 350  # what the nodes of these tests may have open
ASKS_FOR_STATUS = frames(Hello(client="test"), Inquiry(request_id=1, query=NodeStatus()))
ROOM = share(FILES, 4_096)


def limited(processes: Processes, name: str, soft: int, hard: int = FILES) -> None:
    resource.prlimit(processes.pid(name), resource.RLIMIT_NOFILE, (soft, hard))


def rejected(processes: Processes, name: str) -> list[str]:
    return [line for line in processes.log_of(name).splitlines() if "event=client_rejected" in line]


@pytest.mark.slow
def test_more_connections_than_files_end_no_node(tmp_path: Path) -> None:
    """Neither those that never say hello nor those that do: files have room, and who comes is served or told."""
    with cluster(tmp_path, nodes=1, files=FILES) as processes, processes.client() as client, ExitStack() as held:
        client.create_queue("orders")
        host, _, port = processes.address("n1").rpartition(":")
        for _ in range(2 * FILES):
            held.enter_context(socket.create_connection((host, int(port)), timeout=WAIT_S))
        client.produce("orders", [b"in between"])
        for _ in range(ROOM.connections - 1):
            held.enter_context(processes.wire("n1"))
        with (
            Client(processes.address("n1"), timeout_ms=500) as one_more,
            pytest.raises(Overloaded, match=f"connections = {ROOM.connections} is reached"),
        ):
            one_more.queues()
        client.produce("orders", [b"at the limit"])
        assert processes.page("n1", "/healthz")[0] == 200
        told = rejected(processes, "n1")
        assert told and all("error=Overloaded" in line for line in told)
        assert "event=out_of_files" not in processes.log_of("n1")
        held.close()
        with Client(processes.address("n1")) as one_more:
            assert one_more.queues() == ["orders"]
        assert client.stats("orders").tail_version == 2
        assert processes.stop("n1") == 0


@pytest.mark.slow
def test_a_node_without_a_free_descriptor_waits_for_one(tmp_path: Path) -> None:
    """Whoever else takes them: no connection is taken meanwhile, and those that are there are served."""
    with cluster(tmp_path, nodes=1) as processes, processes.client() as client:
        client.create_queue("orders")
        limited(processes, "n1", soft=8)
        host, _, port = processes.address("n1").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=WAIT_S):
            until(lambda: "event=out_of_files" in processes.log_of("n1"), "it says so")
            until(lambda: "doing=housekeeping" in processes.log_of("n1"), "housekeeping, too")
            client.produce("orders", [b"x"])
        limited(processes, "n1", soft=FILES)
        with processes.wire("n1"):
            pass
        assert "Traceback" not in processes.log_of("n1")
        assert processes.stop("n1") == 0


def test_a_node_that_may_open_too_few_files_does_not_start(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (FILES_MIN - 1, FILES_MIN - 1))

    command = [sys.executable, "-m", "holdfast.client.cli", "serve", "--data", str(tmp_path), "--listen", "127.0.0.1:0"]
    done = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 2
    assert f"a node needs at least {FILES_MIN} open files" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_node_that_waits_for_its_peers_is_alive_and_says_so(tmp_path: Path) -> None:
    with cluster(tmp_path) as processes:
        processes.kill_all()
        for name in processes.plan.names:
            shutil.rmtree(tmp_path / name, ignore_errors=True)
        before = len(processes.log_of("n1"))
        processes.start("n1")
        until(lambda: "event=waiting_for_peers" in processes.log_of("n1")[before:], "it waits")
        code, text = processes.page("n1", "/healthz")
        assert (code, json.loads(text)["alive"]) == (200, True)
        code, text = processes.page("n1", "/readyz")
        assert code == 503 and {"reason": "not_formed"} in json.loads(text)["reasons"]
        assert processes.status_of("n1")["cluster_id"] == ""
        assert processes.page("n1", "/metrics")[0] == 200
        with (
            Client(processes.address("n1"), timeout_ms=500) as client,
            pytest.raises(NoLeader, match="n1 waits for its peers: the cluster is not founded yet"),
        ):
            client.status()
        with (
            Client(processes.address("n1"), timeout_ms=500) as client,
            pytest.raises(NoLeader, match="the cluster is not founded yet"),
        ):
            client.queues()
        processes.start("n2")
        processes.start("n3")
        processes.whole()
        assert processes.page("n1", "/readyz")[0] == 200


# What ends a node


class _Broken(Node):
    """A node one of whose parts raises, once it serves."""

    broken = ""

    def _turn(self) -> None:
        super()._turn()
        if self.replica.serving and self.broken == "turn":
            raise StateBroken(problem="the turn does not add up")

    def _tell_skew(self) -> None:
        if self.broken == "housekeeping":
            raise StateBroken(problem="the house does not add up")

    def _describe(self) -> None:  # type: ignore[override]
        raise StateBroken(problem="the answer does not add up")


@pytest.mark.parametrize(
    ("part", "told"), [("turn", "the turn"), ("housekeeping", "the house"), ("handler", "the answer")]
)
def test_whatever_ends_a_node_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, told: str
) -> None:
    """With the error, its reason, and where it was raised; whoever started the node gets it, too."""
    monkeypatch.setattr("holdfast.cluster.serve.Node", _Broken)
    monkeypatch.setattr(_Broken, "broken", part)
    config = Config(data=tmp_path / "n1", listen=Address("127.0.0.1", 0))
    with (tmp_path / "log").open("w+") as stream:
        log = Log(node="n1", stream=stream, wall_ms=lambda: 0, now_s=lambda: 0.0, as_json=True)

        async def ask(node: Node) -> None:
            stream = await trio.open_tcp_stream("127.0.0.1", node.config.listen.port)
            async with stream:
                with suppress(trio.BrokenResourceError):  # the node ends, and this connection with it
                    await stream.send_all(ASKS_FOR_STATUS)
                    while await stream.receive_some():
                        pass

        async def main() -> None:
            async with trio.open_nursery() as nursery:

                def ready(node: Node) -> None:
                    if part == "handler":
                        nursery.start_soon(ask, node)

                await serve(config, log, ready)

        with pytest.raises(StateBroken, match=told):
            run_alone(main)
        stream.seek(0)
        events = [json.loads(line) for line in stream]
    [failed] = [event for event in events if event["event"] == "failed"]
    assert (failed["error"], failed["where"].split(":")[0]) == ("StateBroken", os.path.basename(__file__))
    assert told in failed["reason"]
    assert "stopped" not in [event["event"] for event in events]
