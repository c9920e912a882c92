"""A node that was away until the log began behind it gets the state instead, and all of it."""

from pathlib import Path

import pytest

from holdfast.client.protocol.commands import Lease
from holdfast.client.protocol.replies import Leased
from holdfast.client.protocol.values import QueueId, SessionId
from holdfast.cluster.segments import SEGMENT_BYTES
from holdfast.cluster.state import MARK
from tests.support.processes import Processes, cluster, until
from tests.support.traffic import HOUR_MS, Traffic, fill_until_compacted

SESSION = SessionId(bytes(range(16)))
LOG_BYTES = 65_536
MIB = 1 << 20


@pytest.mark.slow
def test_counts_leases_and_idempotency_survive_the_install_of_a_snapshot(tmp_path: Path) -> None:
    """I3, I10, I11, I28: asked of the node that got the snapshot, which leads then; and after a full restart."""
    with cluster(tmp_path, snapshot_log_bytes=LOG_BYTES) as processes:
        away = processes.followers()[0]
        with processes.client() as client:
            client.create_queue("held", visibility_timeout_ms=HOUR_MS)
            client.produce("held", [b"a", b"b", b"c"])
            client.lease("held", max_messages=2).nack()
            wanted = Lease(queue_id=QueueId(client.queue("held").queue_id), group="default", max_messages=3)
        with processes.wire(processes.leader()) as wire:
            wire.open_session(SESSION)
            first = _leased(processes, wanted)
        with Traffic(processes, seed=5) as traffic:
            traffic.progress(20)
            last = processes.status_of(away)["last"]
            processes.kill(away)
            traffic.progress(50)
            fill_until_compacted(processes, processes.others(away), last + 100)
            processes.start(away)
            processes.formed()
            traffic.progress(20)
        assert "event=snapshot_installed" in processes.log_of(away)
        traffic.check_every_node()
        processes.let_lead(away)
        for _ in range(2):
            traffic.check()
            again = _leased(processes, wanted)
            assert again.replayed
            assert (again.lease_id, again.grants) == (first.lease_id, first.grants)
            assert [grant.delivery_count for grant in again.grants] == [2, 1]
            processes.kill_all()
            processes.start_all()


@pytest.mark.slow
def test_a_journal_does_not_grow_with_what_was_ever_written(tmp_path: Path) -> None:
    """Shape 4: another snapshot for each segment's worth of log, and the segments behind it go."""
    with (
        cluster(tmp_path, nodes=1, flags={"fsync": "os"}, snapshot_log_bytes=SEGMENT_BYTES) as processes,
        processes.client() as client,
    ):
        client.create_queue("flow")
        for round_ in range(1, 4):
            for _ in range(SEGMENT_BYTES // (3 * MIB) + 1):
                client.produce("flow", [bytes(MIB)] * 3)
                client.purge_queue("flow")
            until(lambda at=round_: _snapshots(processes) == at, f"snapshot {round_}")  # type: ignore[misc]
        kept = 2 * SEGMENT_BYTES  # the log behind the older of two snapshots, in whole segments
        until(lambda: processes.status_of("n1")["journal_bytes"] < kept, "the segments before that are gone")


@pytest.mark.slow
def test_a_newest_snapshot_that_cannot_be_read_stops_no_node(tmp_path: Path) -> None:
    """The machine went down, and the copy of which to make the state is rotten: the one before it and the log do."""
    with cluster(tmp_path, nodes=1, snapshot_log_bytes=LOG_BYTES) as processes, processes.client() as client:
        client.create_queue("orders")
        client.create_queue("flow")
        written = 0

        def taken() -> bool:
            nonlocal written
            [written] = client.produce("orders", [b"%d" % written]).versions
            client.produce("flow", [bytes(100_000)])
            client.purge_queue("flow")
            return _snapshots(processes) == 3

        until(taken, "three snapshots")
        until(lambda: "event=journal_compacted" in processes.log_of("n1"), "a log that begins behind one")
        processes.kill("n1")
        newest = max((tmp_path / "n1" / "log-0" / "snapshots").iterdir())
        data = bytearray(newest.read_bytes())
        data[len(data) // 2] ^= 1
        newest.write_bytes(bytes(data))
        (tmp_path / "n1" / "log-0" / MARK).write_text("another boot")
        processes.start("n1")
        assert [message.payload for message in client.read("orders")] == [b"%d" % at for at in range(written)]
        assert not newest.exists()


def _snapshots(processes: Processes) -> int:
    return processes.log_of("n1").count("event=snapshot_taken")


def _leased(processes: Processes, wanted: Lease) -> Leased:
    with processes.wire(processes.leader()) as wire:
        reply = wire.ask(wire.request(wanted, SESSION, seq=1, done_below=1)).reply
    assert isinstance(reply, Leased)
    return reply
