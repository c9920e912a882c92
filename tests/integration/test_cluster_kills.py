"""Three real nodes, killed with SIGKILL in the middle of traffic: what was answered stays so (I1 … I4, I10, I11)."""

import os
from pathlib import Path
from random import Random

import pytest

from holdfast.client.protocol.commands import Lease
from holdfast.client.protocol.replies import Leased
from holdfast.client.protocol.values import QueueId, SessionId
from tests.support.processes import Wire, cluster
from tests.support.traffic import HOUR_MS, QUEUE, Traffic

SESSION = SessionId(bytes(range(16)))


@pytest.mark.slow
def test_killed_leaders_lose_nothing_double_nothing_and_forget_no_answer(tmp_path: Path) -> None:
    """I1 to I4 and I10: kills at seeded points of the traffic, then of all nodes at once (L2, P2, shape 3)."""
    seed = int(os.environ.get("HOLDFAST_SEED", "1"))
    rng = Random(seed)
    print(f"HOLDFAST_SEED={seed}")
    with cluster(tmp_path) as processes:
        processes.whole()
        with Traffic(processes, seed) as traffic:
            for _ in range(4):
                traffic.progress(rng.randint(1, 60))
                leader = processes.leader()
                processes.kill(leader)
                traffic.progress(rng.randint(1, 60))  # by the two that are left
                processes.start(leader)
                processes.formed()
        traffic.check()
        traffic.check_every_node()
        processes.kill_all()
        processes.start_all()
        traffic.check()
        traffic.check_every_node()


@pytest.mark.slow
def test_a_follower_that_is_away_for_the_whole_run_has_everything_when_it_is_back(tmp_path: Path) -> None:
    """I1, I27: two of three go on, and the third can lead afterwards."""
    with cluster(tmp_path) as processes:
        away = processes.followers()[0]
        with Traffic(processes, seed=3) as traffic:
            traffic.progress(20)
            processes.kill(away)
            traffic.progress(100)
        processes.start(away)
        traffic.check_every_node()
        processes.let_lead(away)
        traffic.check()


@pytest.mark.slow
def test_all_nodes_killed_at_once_in_the_middle_of_traffic_go_on_where_they_were(tmp_path: Path) -> None:
    """I1, I28: clients see a pause, no error."""
    with cluster(tmp_path) as processes:
        with Traffic(processes, seed=4) as traffic:
            for _ in range(2):
                traffic.progress(50)
                processes.kill_all()
                processes.start_all()
                traffic.progress(50)
        traffic.check()
        traffic.check_every_node()


def test_a_lease_asked_for_again_after_its_leader_died_is_that_lease(tmp_path: Path) -> None:
    """L4: the same request gives the same versions and counts, by every later leader and after a full restart."""
    with cluster(tmp_path) as processes, processes.client() as client:
        client.create_queue(QUEUE, visibility_timeout_ms=HOUR_MS)
        client.produce(QUEUE, [b"%d" % at for at in range(10)])
        wanted = Lease(queue_id=QueueId(client.queue(QUEUE).queue_id), group="default", max_messages=4)
        leader = processes.leader()
        with processes.wire(leader) as wire:
            wire.open_session(SESSION)
            first = _leased(wire, wanted)
        assert not first.replayed
        processes.kill(leader)
        with processes.wire(processes.leader(among=processes.others(leader))) as wire:
            second = _leased(wire, wanted)
        processes.start(leader)
        processes.whole()
        processes.kill_all()
        processes.start_all()
        with processes.wire(processes.leader()) as wire:
            third = _leased(wire, wanted)
        for again in (second, third):
            assert again.replayed
            assert (again.lease_id, again.grants, again.batches) == (first.lease_id, first.grants, first.batches)
        assert client.stats(QUEUE).in_flight == 4
        rest = client.lease(QUEUE)
        assert [message.version for message in rest] == [5, 6, 7, 8, 9, 10]
        assert {message.delivery_count for message in rest} == {1}


def _leased(wire: Wire, wanted: Lease) -> Leased:
    reply = wire.ask(wire.request(wanted, SESSION, seq=1, done_below=1)).reply
    assert isinstance(reply, Leased)
    return reply
