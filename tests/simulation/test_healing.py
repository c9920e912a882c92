"""How soon a cluster is whole again, fault by fault, in simulated time."""

from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.cluster.messages import RequestVote
from holdfast.jepsen.simulation.cluster import Plan, Simulation
from holdfast.jepsen.simulation.host import Host, Replica


@contextmanager
def calm(seed: int) -> Iterator[tuple[Simulation, Replica, Host]]:
    """A cluster without faults that has a leader, and one of its followers."""
    with Simulation(Plan(seed=seed, faults=())) as simulation:
        simulation.run(3.0)
        while (leader := simulation.leader()) is None:
            simulation.run(0.1)  # a transfer is under way
        follower = next(host for host in simulation.hosts if host is not leader.host)
        yield simulation, leader, follower


def links(simulation: Simulation, name: str) -> list[tuple[str, str]]:
    others = [other for other in simulation.names if other != name]
    return [link for other in others for link in ((name, other), (other, name))]


def seconds_until_progress(simulation: Simulation, limit_s: float) -> float:
    """How long until fifty more entries are acknowledged."""
    checker = simulation.checkers[0]
    goal, began_s = checker.counts["acknowledged"] + 50, simulation.scheduler.now_s
    while checker.counts["acknowledged"] < goal and simulation.scheduler.now_s - began_s < limit_s:
        simulation.run(0.05)
    return simulation.scheduler.now_s - began_s


def test_an_isolated_follower_comes_back_without_a_new_leader() -> None:
    """R12."""
    for seed in range(3):
        with calm(seed) as (simulation, leader, follower):
            term, elections = leader.raft.term, simulation.checkers[0].counts["elections"]
            transfers = simulation.counts["transfers"]
            simulation.network.cut_off(links(simulation, follower.name))
            simulation.run(10.0)
            simulation.network.heal()
            simulation.run(3.0)
            moved = simulation.counts["transfers"] - transfers
            assert simulation.checkers[0].counts["elections"] - elections == moved
            assert follower.replicas[0].state.index > leader.state.index - 50
            assert moved or leader.raft.term == term


def test_a_follower_of_a_higher_term_is_not_lost() -> None:
    """R13: it refuses the leader, and no election of its own would be granted."""
    with calm(4) as (simulation, leader, follower):
        raft = follower.replicas[0].raft
        follower.run(lambda: raft.deliver(leader.host.name, RequestVote(raft.term + 5, 1, 0)))
        before = follower.replicas[0].state.index
        simulation.run(3.0)
        assert follower.replicas[0].state.index > before + 50


def test_a_leader_that_is_cut_off_with_open_sockets_steps_down() -> None:
    """R14."""
    with calm(5) as (simulation, leader, _):
        simulation.network.cut |= set(links(simulation, leader.host.name))
        simulation.run(1.0)
        assert not leader.leads


def test_a_hanging_disk_of_the_leader_costs_seconds_not_the_cluster() -> None:
    """R28."""
    for seed in (6, 7):
        with calm(seed) as (simulation, leader, _):
            leader.host.disk_slowness = 1e6
            simulation.run(0.3)
            assert seconds_until_progress(simulation, 30.0) < 3.0


def test_a_killed_leader_is_replaced_sooner_than_a_silent_one() -> None:
    with calm(8) as (simulation, leader, _):
        leader.host.crash(power=False)
        assert seconds_until_progress(simulation, 10.0) < 1.0
    with calm(8) as (simulation, leader, _):
        leader.host.pause(30.0)
        assert seconds_until_progress(simulation, 10.0) < 2.5


def test_the_whole_cluster_comes_back_after_a_power_cut() -> None:
    with calm(9) as (simulation, _, _):
        for host in simulation.hosts:
            host.crash(power=True)
        simulation.run(1.0)
        for host in simulation.hosts:
            host.boot()
        assert seconds_until_progress(simulation, 10.0) < 3.0
        simulation.outcome(0.0)
