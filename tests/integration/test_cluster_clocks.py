"""Wall clocks that jump by an hour on real nodes, while leases are open (T2, I25)."""

import time
from pathlib import Path

import pytest

from tests.support.processes import Processes, cluster, until
from tests.support.traffic import HOUR_MS

SLACK_MS = 60_000  # between committed time and ours: a slow machine, never an hour


def test_one_wrong_wall_clock_expires_no_lease_and_freezes_none(tmp_path: Path) -> None:
    """T2: an hour forward and back, on the leader and on a node that leads next."""
    with cluster(tmp_path, wall_clocks=True) as processes, processes.client() as client:
        client.create_queue("long", visibility_timeout_ms=10 * 60_000)
        client.create_queue("short")
        client.produce("long", [b"a", b"b", b"c"])
        held = client.lease("long")
        for offset_ms in (HOUR_MS, -HOUR_MS):
            wrong = processes.leader()
            processes.set_clock(wrong, offset_ms)
            _skew_seen(processes, wrong, offset_ms)
            _short_lease_ends(processes)
            stats = client.stats("long")
            assert stats.in_flight == 3
            assert abs(stats.as_of_ms - time.time() * 1_000) < SLACK_MS
            processes.kill(processes.others(wrong)[0])
            processes.kill(processes.others(wrong)[1])
            for name in processes.others(wrong):
                processes.start(name)
            processes.whole()
            assert client.stats("long").in_flight == 3
            processes.set_clock(wrong, 0)
        assert [message.delivery_count for message in held] == [1, 1, 1]
        held.ack()
        assert client.stats("long").acked == 3


@pytest.mark.slow
def test_all_wall_clocks_wrong_bring_what_is_due_and_end_no_lease(tmp_path: Path) -> None:
    """T2: forward is one TimeStep, which delays see and leases do not; back, time neither stops nor goes back."""
    with cluster(tmp_path, wall_clocks=True) as processes, processes.client() as client:
        client.create_queue("long", visibility_timeout_ms=10 * 60_000)
        client.create_queue("short")
        client.create_queue("later")
        client.produce("long", [b"a"])
        client.produce("later", [b"b"], delay_ms=HOUR_MS // 2)
        held = client.lease("long")
        assert not client.lease("later")
        for name in processes.plan.names:
            processes.set_clock(name, HOUR_MS)
        lease = until(lambda: client.lease("later", wait_ms=1_000) or None, "the delayed message")
        lease.ack()
        forward = client.stats("long")
        assert forward.in_flight == 1
        assert abs(forward.as_of_ms - time.time() * 1_000 - HOUR_MS) < SLACK_MS
        for name in processes.plan.names:
            processes.set_clock(name, -HOUR_MS)
        _skew_seen(processes, processes.leader(), -2 * HOUR_MS)
        _short_lease_ends(processes)
        back = client.stats("long")
        assert back.in_flight == 1
        assert back.as_of_ms > forward.as_of_ms
        held.ack()


def _skew_seen(processes: Processes, name: str, offset_ms: int) -> None:
    """The leader knows of the jump: from here on it would have taken effect."""

    def seen() -> bool:
        skew_ms = processes.status_of(processes.leader())["skew_ms"].get(name, 0)
        return abs(int(skew_ms) - offset_ms) < SLACK_MS

    until(seen, f"a clock of {name} that is {offset_ms} ms off")


def _short_lease_ends(processes: Processes) -> None:
    """Lease time goes on, and not faster than real time: a lease of a second ends after a second."""
    with processes.client() as client:
        client.produce("short", [b"x"])
        began_s = time.monotonic()
        first = client.lease("short", visibility_timeout_ms=1_000)
        second = until(lambda: client.lease("short", wait_ms=1_000) or None, "the message again")
        assert time.monotonic() - began_s >= 0.9
        assert [message.delivery_count for message in first] == [1]
        assert [message.delivery_count for message in second] == [2]
        second.ack()
