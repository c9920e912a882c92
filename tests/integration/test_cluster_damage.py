"""A stored message that is not what was written: found by the leader that hands it out, and healed by its successor."""

import shutil
from io import StringIO
from pathlib import Path

import pytest

from holdfast.client.blocking import Client
from holdfast.client.protocol.errors import BodyDamaged, HoldfastError, StateBroken
from holdfast.cluster.embedded import Node
from holdfast.cluster.identity import journal_folder
from holdfast.cluster.journal import Journal
from holdfast.cluster.journal_errors import JournalFailed
from holdfast.cluster.segments import Segments
from holdfast.cluster.state import DAMAGED, MARK
from holdfast.storage.lmdb_store import DATA_FILE, LmdbStore
from holdfast.storage.store import StoreError
from tests.support.processes import WAIT_S, cluster

PAYLOAD = b"a payload that is found nowhere else: " + bytes(range(256))


def test_a_damaged_body_is_handed_out_by_the_next_leader_and_the_node_is_made_anew(tmp_path: Path) -> None:
    """Fail-stop: the leader hands over and ends, the same Lease is answered, and a restart rebuilds the state."""
    with cluster(tmp_path) as processes, processes.client() as client:
        client.create_queue("orders")
        client.produce("orders", [b"first", PAYLOAD, b"last"])
        processes.whole()
        leader = processes.leader()
        _flip(tmp_path / leader / "log-0" / "state" / DATA_FILE)
        lease = client.lease("orders", wait_ms=10_000)
        assert [message.payload for message in lease] == [b"first", PAYLOAD, b"last"]
        assert {message.delivery_count for message in lease} == {1}  # the attempt that met the damage was this one
        assert processes.ended(leader) != 0
        assert "BodyDamaged" in processes.log_of(leader)
        assert processes.leader(among=processes.others(leader)) != leader
        processes.start(leader)
        processes.whole()
        processes.let_lead(leader)
        assert [message.payload for message in client.peek("orders", from_version=1, limit=3)] == [
            b"first",
            PAYLOAD,
            b"last",
        ]
        lease.ack()


def test_damage_that_is_found_while_the_node_is_ending_is_marked_too(tmp_path: Path) -> None:
    """The next start must not trust the state, whatever the former end was about; in one process, too."""
    damage = BodyDamaged(queue_id=1, version=2)
    # A failure that is kept keeps what it met: nothing may depend on its being forgotten.
    with pytest.raises(BodyDamaged) as kept, Node(tmp_path / "data") as node, Client(node.address) as client:
        client.create_queue("orders")
        client.produce("orders", [b"a", b"b"])

        def end() -> None:
            assert node._node is not None
            node._node.stop("closed")
            node._node.replica.damage = damage

        node._token.run_sync_soon(end)
        node._thread.join(WAIT_S)
    assert kept.value is damage
    assert (tmp_path / "data" / "log-0" / MARK).read_text() == DAMAGED
    log = StringIO()
    with Node(tmp_path / "data", log=log) as node, Client(node.address) as client:
        assert [message.payload for message in client.read("orders")] == [b"a", b"b"]
        assert " applied=1\n" in log.getvalue()  # it was made anew, from the log
    assert not (tmp_path / "data" / "log-0" / MARK).exists()


def test_an_embedded_node_that_failed_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    node = Node(tmp_path / "data")
    with pytest.raises(JournalFailed, match="check the disk") as kept, node, monkeypatch.context() as patched:
        with Client(node.address) as client:
            client.create_queue("orders")
        patched.setattr("os.fdatasync", fail)
        with Client(node.address, timeout_ms=1_000) as client, pytest.raises(HoldfastError):
            client.produce("orders", [b"a"])
        node._thread.join(WAIT_S)
    assert node._failure is kept.value
    with Node(tmp_path / "data") as again, Client(again.address) as client:
        assert client.stats("orders").tail_version <= 1


def test_an_embedded_node_whose_state_cannot_be_synced_at_its_end_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: LmdbStore) -> None:
        raise StoreError("Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(LmdbStore, "sync", fail)
        with pytest.raises(StoreError) as kept, Node(tmp_path / "data") as node, Client(node.address) as client:
            client.create_queue("orders")
    with Node(tmp_path / "data") as again, Client(again.address) as client:
        assert client.stats("orders").tail_version == 0
    assert str(kept.value) == "Input/output error"


def test_an_embedded_node_that_could_not_start_leaves_nothing_open(tmp_path: Path) -> None:
    """What it cannot start with is found when its state is open already."""
    with Node(tmp_path / "data") as node, Client(node.address) as client:
        client.create_queue("orders")
    state = tmp_path / "data" / "log-0" / "state"
    kept = tmp_path / "kept"
    journal = Path(journal_folder(tmp_path / "data"))
    segments = Segments.open(str(journal))
    log = Journal.recovered(segments.recovered, segments.read_entries)
    log.setRaftCommitIndex(log.last)
    log.compact(log.last)
    flush = log.take()
    assert flush is not None
    segments.write(flush)
    segments.close()
    shutil.copytree(state, kept)
    shutil.rmtree(state)
    raised = []
    for _ in range(2):
        with pytest.raises(StateBroken, match="put back a readable copy") as refused, Node(tmp_path / "data"):
            pass
        raised.append(refused)
    shutil.rmtree(state)
    shutil.copytree(kept, state)
    (tmp_path / "data" / "log-0" / MARK).unlink()
    with Node(tmp_path / "data") as node, Client(node.address) as client:
        assert client.stats("orders").tail_version == 0


def _flip(path: Path) -> None:
    """One bit of the payload, in every page of the file that holds it: an older copy may be there too."""
    data = path.read_bytes()
    with path.open("r+b") as file:
        at = data.find(PAYLOAD)
        assert at >= 0
        while at >= 0:
            file.seek(at + len(PAYLOAD) - 1)
            file.write(bytes([PAYLOAD[-1] ^ 1]))
            at = data.find(PAYLOAD, at + 1)
