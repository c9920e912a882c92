"""Real nodes that cannot go on, or nearly: each stops with a message that names the remedy, and that remedy helps."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.client.blocking import Client
from holdfast.client.protocol.errors import HoldfastError
from holdfast.storage import digest
from holdfast.storage.lmdb_store import DATA_FILE, LmdbStore
from holdfast.storage.rows import pack_queue, unpack_queue
from holdfast.storage.store import StoreError, WriteTxn
from holdfast.storage.tables import TABLES, TOP, Table
from tests.support.processes import Processes, cluster, until

MIB = 1 << 20
PAYLOAD = b"a payload that is found nowhere else: " + bytes(range(256))

needs_strace = pytest.mark.skipif(
    shutil.which("strace") is None, reason="needs strace to let syncs fail; on Debian: apt install strace"
)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")


@needs_strace
@pytest.mark.slow
def test_a_failed_sync_stops_the_node_and_what_was_confirmed_is_there_after_it(tmp_path: Path) -> None:
    """R26: nothing is tried again, and the message says what to look at."""
    confirmed: list[bytes] = []
    with cluster(tmp_path, nodes=1, traced="fdatasync", injected="fdatasync:error=EIO:when=25+") as processes:
        processes.leader()
        with processes.client(timeout_ms=1_000) as client, pytest.raises(HoldfastError):
            client.create_queue("orders")
            for at in range(100):
                client.produce("orders", [b"%d" % at])
                confirmed.append(b"%d" % at)
        assert processes.ended("n1") not in (0, None)
        told = processes.log_of("n1")
        assert "event=failed error=JournalFailed" in told
        assert "Input/output error; check the disk, then start the node again" in told
    assert confirmed
    with cluster(tmp_path, nodes=1) as processes, processes.client() as client:
        found = [message.payload for message in client.read("orders")]
        assert found[: len(confirmed)] == confirmed
        assert len(found) <= len(confirmed) + 1  # the one that was not answered may have happened


@needs_root
@pytest.mark.slow
def test_a_full_disk_stops_the_node_and_room_is_all_that_it_needs(tmp_path: Path) -> None:
    """Without a reserve, as if something else had taken it."""
    with (
        _small_disk(tmp_path / "n1", 24 * MIB),
        cluster(tmp_path, nodes=1, flags={"disk_reserve_bytes": "0"}) as processes,
    ):
        count = 0
        processes.leader()
        with processes.client(timeout_ms=1_000) as client:
            client.create_queue("orders")
            client.create_queue("filler")
            ballast = tmp_path / "n1" / "ballast"
            ballast.write_bytes(bytes(shutil.disk_usage(tmp_path / "n1").free - 3 * MIB))
            with pytest.raises(HoldfastError):
                for _ in range(100):
                    client.produce("orders", [b"x"])
                    count += 1
                    client.produce("filler", [bytes(200_000)])
                    client.purge_queue("filler")
        assert processes.ended("n1") not in (0, None)
        told = processes.log_of("n1")
        assert "event=failed" in told and "No space left on device; make room, then start the node again" in told
        ballast.unlink()
        processes.start("n1")
        with processes.client() as client:
            assert count <= client.stats("orders").tail_version <= count + 1
            client.produce("orders", [b"x"])


@needs_root
def test_a_state_that_has_no_room_says_so(tmp_path: Path) -> None:
    """It is the other part of a node that a full disk stops, if the journal still had room ahead."""
    with _small_disk(tmp_path / "state", 4 * MIB):
        store = LmdbStore(tmp_path / "state", TABLES)
        try:
            with pytest.raises(StoreError, match="make room on the disk of the state, or check it, then start"):
                store.transact(lambda txn: txn.put(Table.BLOB, bytes(8), bytes(8 * MIB)))
        finally:
            store.close()


@needs_root
@pytest.mark.slow
def test_a_node_whose_snapshot_would_fill_the_disk_goes_on_without_it(tmp_path: Path) -> None:
    """It says so once, and takes it when there is room."""
    reserve = 8 * MIB
    flags = {"disk_reserve_bytes": str(reserve)}
    with (
        _small_disk(tmp_path / "n1", 48 * MIB),
        cluster(tmp_path, nodes=1, flags=flags, snapshot_log_bytes=12 * MIB) as processes,
        processes.client() as client,
    ):
        client.create_queue("orders")
        ballast = tmp_path / "n1" / "ballast"
        ballast.write_bytes(bytes(14 * MIB))  # at 12 MiB of log there is no room for 9 of state and the reserve
        for _ in range(10):
            client.produce("orders", [bytes(900_000)])
        client.create_queue("flow")
        with processes.client(timeout_ms=1_000) as flowing:  # messages are refused before the snapshot is, or after it
            refused = until(lambda: _flow(flowing, processes), "snapshot_failed")
        assert refused.count("event=snapshot_failed error=NoRoom") == 1 and "Make room in" in refused
        assert client.stats("orders").tail_version == 10
        lease = client.lease("orders")
        lease.ack()
        assert shutil.disk_usage(tmp_path / "n1").free > 0
        ballast.unlink()
        while lease := client.lease("orders", max_messages=100):
            lease.ack()
        until(lambda: "event=snapshot_taken" in processes.log_of("n1"), "a snapshot once there is room")


@pytest.mark.slow
def test_the_scrub_finds_damage_that_nobody_has_read_and_the_next_start_heals_it(tmp_path: Path) -> None:
    with cluster(tmp_path, nodes=1) as processes, processes.client() as client:
        client.create_queue("orders")
        client.produce("orders", [b"first", PAYLOAD, b"last"])
        _flip_everywhere(tmp_path / "n1" / "log-0" / "state" / DATA_FILE, PAYLOAD)
        assert processes.ended("n1") not in (0, None)
        assert "event=failed error=BodyDamaged" in processes.log_of("n1")
        processes.start("n1")
        assert [message.payload for message in client.read("orders")] == [b"first", PAYLOAD, b"last"]


@pytest.mark.slow
def test_a_node_whose_state_is_another_than_that_of_the_majority_stops_and_is_made_anew(tmp_path: Path) -> None:
    """A counter that was changed while it was down: found at the next place where states are compared."""
    with cluster(tmp_path) as processes, processes.client() as client:
        client.create_queue("orders")
        client.produce("orders", [b"x"])
        processes.whole()
        other = processes.followers()[0]
        assert processes.stop(other) == 0
        _change_a_counter(tmp_path / other / "log-0" / "state")
        assert not _is_sound(tmp_path / other / "log-0" / "state")
        processes.start(other)
        processes.formed()
        for _ in range(300):
            client.produce("orders", [b"x"])
        assert processes.ended(other) not in (0, None)
        told = processes.log_of(other)
        assert "event=failed error=StateDiverged" in told
        assert "this node stops, and makes its state anew" in told
        assert sorted(processes.dead()) == [other]
        client.produce("orders", [b"x"])
        processes.start(other)
        processes.whole()
        processes.kill_all()
        assert _is_sound(tmp_path / other / "log-0" / "state")


def _flow(client: Client, processes: Processes) -> str | None:
    """A message that comes and goes; the log, once a snapshot was refused."""
    told = processes.log_of("n1")
    if "event=snapshot_failed" in told:
        return told
    client.produce("flow", [bytes(500_000)])
    client.purge_queue("flow")
    return None


def _flip_everywhere(path: Path, payload: bytes) -> None:
    """One bit of the payload, in every page of the file that holds it: an older copy may be there too."""
    data = path.read_bytes()
    with path.open("r+b") as file:
        at = data.find(payload)
        assert at >= 0
        while at >= 0:
            file.seek(at + len(payload) - 1)
            file.write(bytes([payload[-1] ^ 1]))
            at = data.find(payload, at + 1)


def _change_a_counter(home: Path) -> None:
    def change(txn: WriteTxn) -> None:
        [(key, data)] = txn.scan(Table.QUEUE, b"\x00", TOP)
        row = unpack_queue(data)
        txn.put(Table.QUEUE, key, pack_queue(replace(row, live_bytes=row.live_bytes + 1)))

    store = LmdbStore(home, TABLES)
    store.transact(change)
    store.sync()
    store.close()


def _is_sound(home: Path) -> bool:
    """Whether the rows are what the changes made them, and not only the digest is right."""
    store = LmdbStore(home, TABLES)
    try:
        with store.read() as txn:
            return digest.recomputed(txn) == digest.maintained(txn)
    finally:
        store.close()


@contextmanager
def _small_disk(folder: Path, size_bytes: int) -> Iterator[None]:
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=700", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
