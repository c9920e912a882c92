"""Disks of real nodes, torn, rotten, emptied or nearly full: what was confirmed stays, or the node says what to do."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.client.blocking import Client
from holdfast.client.protocol.errors import Overloaded
from holdfast.cluster.embedded import Node
from holdfast.cluster.identity import journal_folder
from holdfast.cluster.state import MARK
from tests.support.disks import SEGMENT, damage_before_the_last_frame, last_frame, segment
from tests.support.processes import cluster, until

MESSAGES = 8


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """The folder of a node that was killed after it confirmed some messages, one by one.

    It looks as after a crash of the machine: the state is not trusted, so that the journal alone has to bring it back.
    """
    folder = tmp_path / "killed"
    with cluster(folder, nodes=1) as processes, processes.client() as client:
        client.create_queue("orders")
        for at in range(MESSAGES):
            client.produce("orders", [b"%d" % at])
        processes.kill("n1")
    data = folder / "n1"
    (data / "log-0" / MARK).write_text("another boot")
    begin, size = last_frame(data)
    with segment(data).open("r+b") as file:
        file.truncate(begin + size)  # the zeros ahead are 4 MB to copy each time, and tell nothing
    return data


@pytest.mark.slow
def test_a_journal_torn_at_any_byte_of_its_last_frame_loses_nothing_else(killed: Path, tmp_path: Path) -> None:
    """I28: the frame whose sync had not ended is not there; all before it is, and the node goes on."""
    begin, size = last_frame(killed)

    def start_torn(kept: int, zeros: int) -> None:
        data = tmp_path / f"torn-{kept}-{zeros}"
        shutil.copytree(killed, data)
        _tear(data, begin + kept, zeros)
        expected = [b"%d" % at for at in range(MESSAGES if kept == size else MESSAGES - 1)]
        with Node(data) as node, Client(node.address) as client:
            assert [message.payload for message in client.read("orders")] == expected, (kept, zeros)
            assert client.produce("orders", [b"next"]).versions == [len(expected) + 1]
        shutil.rmtree(data)

    cuts = [(kept, 0) for kept in range(size + 1)] + [(kept, 4_096) for kept in range(0, size + 1, 8)]
    with ThreadPoolExecutor(16) as pool:  # each waits for its election, most of the time
        list(pool.map(start_torn, *zip(*cuts, strict=True)))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_node_started_on_a_torn_journal_serves(killed: Path, share: float) -> None:
    """The same with a process of its own, which ends in good order then."""
    begin, size = last_frame(killed)
    _tear(killed, begin + int((size - 1) * share), 0)
    with cluster(killed.parent, nodes=1) as processes, processes.client() as client:
        assert [message.payload for message in client.read("orders")] == [b"%d" % at for at in range(MESSAGES - 1)]
        client.produce("orders", [b"next"])
        assert processes.stop("n1") == 0
        processes.start("n1")
        assert client.stats("orders").tail_version == MESSAGES


def test_a_flipped_bit_in_the_middle_of_the_journal_stops_the_node_with_the_remedy(killed: Path) -> None:
    """I30: what it acknowledged is damaged, so it does not start, and does not cut it off as if it were torn."""
    damage_before_the_last_frame(killed)
    before = segment(killed).read_bytes()
    with cluster(killed.parent, nodes=1) as processes:
        assert processes.ended("n1") not in (0, None)
        assert "holdfast node repair" in processes.log_of("n1")
        assert SEGMENT in processes.log_of("n1")
    assert segment(killed).read_bytes() == before


def test_an_emptied_node_under_its_old_name_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    """R24: it might vote a second time. The message says what to do instead."""
    with cluster(tmp_path) as processes, processes.client() as client:
        client.create_queue("orders")
        emptied = processes.followers()[0]
        processes.kill(emptied)
        shutil.rmtree(tmp_path / emptied)
        for _ in range(2):
            processes.start(emptied)
            assert processes.ended(emptied) == 2
            client.produce("orders", [b"a"])
        assert "under a name that was never used" in processes.log_of(emptied)
        assert client.stats("orders").tail_version == 2


def test_a_node_without_its_journal_is_refused_too(tmp_path: Path) -> None:
    """R24: a part of the folder is gone."""
    with cluster(tmp_path) as processes, processes.client() as client:
        client.create_queue("orders")
        robbed = processes.followers()[0]
        processes.kill(robbed)
        shutil.rmtree(journal_folder(tmp_path / robbed))
        processes.start(robbed)
        assert processes.ended(robbed) == 2
        assert "is gone" in processes.log_of(robbed)
        assert client.produce("orders", [b"a"]).versions == [1]


def test_a_nearly_full_disk_refuses_messages_and_lets_consumers_go_on(tmp_path: Path) -> None:
    """5.4: the refusal names the limit; leases and acks, which make room, are taken."""
    with cluster(tmp_path, nodes=1) as processes, processes.client() as client:
        client.create_queue("orders")
        client.produce("orders", [b"a", b"b", b"c"])
    reserve = shutil.disk_usage(tmp_path).total * 2
    with cluster(tmp_path, nodes=1, flags={"disk_reserve_bytes": str(reserve)}) as processes:
        processes.leader()
        with processes.client(timeout_ms=1_500) as client:
            with pytest.raises(Overloaded) as refused:
                client.produce("orders", [b"d"])
            assert (refused.value.limit_name, refused.value.limit) == ("disk_free_bytes", reserve)
            with pytest.raises(Overloaded), client.transaction() as txn:
                txn.produce("orders", [b"d"])
            lease = client.lease("orders")
            lease.nack([1])
            lease.ack()
            client.lease("orders").extend()
            stats = client.stats("orders")
            assert (stats.acked, stats.in_flight, stats.tail_version) == (2, 1, 3)
        assert processes.status_of("n1")["refusing_produce"] is True
    with cluster(tmp_path, nodes=1) as processes, processes.client() as client:
        assert until(lambda: client.produce("orders", [b"d"]), "room again").versions == [4]


def _tear(data: Path, at: int, zeros: int) -> None:
    with segment(data).open("r+b") as file:
        file.truncate(at)
        file.truncate(at + zeros)
