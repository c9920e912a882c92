"""A stored message that is not what was written: found by the leader that hands it out, and healed by its successor."""

from pathlib import Path

from holdfast.storage.lmdb_store import DATA_FILE
from tests.support.processes import cluster

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
