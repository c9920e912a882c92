"""How soon a cluster is whole again, fault by fault, in simulated time."""

from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.cluster import messages
from holdfast.cluster.messages import RequestVote, TimeoutNow
from holdfast.jepsen.simulation.cluster import Plan, Simulation
from holdfast.jepsen.simulation.host import Host, HostedLog


@contextmanager
def calm(seed: int) -> Iterator[tuple[Simulation, HostedLog, Host]]:
    """A cluster without faults that has a leader, and one of its followers."""
    with Simulation(Plan(seed=seed, clients=4, faults=())) as simulation:
        simulation.pace = 0.5
        simulation.run(3.0)
        leader = simulation.leader()
        assert leader is not None
        simulation.is_prompt = False  # what follows is noticed
        follower = next(host for host in simulation.hosts if host is not leader.host)
        yield simulation, leader, follower


def links(simulation: Simulation, name: str) -> list[tuple[str, str]]:
    others = [other for other in simulation.names if other != name]
    return [link for other in others for link in ((name, other), (other, name))]


def seconds_until_progress(simulation: Simulation, limit_s: float) -> float:
    """How long until fifty more commands are acknowledged."""
    checker = simulation.checkers[0]
    goal, began_s = checker.counts["acknowledged"] + 50, simulation.scheduler.now_s
    while checker.counts["acknowledged"] < goal and simulation.scheduler.now_s - began_s < limit_s:
        simulation.run(0.05)
    return simulation.scheduler.now_s - began_s


def test_an_isolated_follower_comes_back_without_a_new_leader() -> None:
    """R12."""
    for seed in range(2):
        with calm(seed) as (simulation, leader, follower):
            term, elections = leader.raft.term, simulation.checkers[0].counts["elections"]
            simulation.network.cut_off(links(simulation, follower.name))
            simulation.run(5.0)
            simulation.network.heal()
            simulation.run(2.0)
            assert simulation.checkers[0].counts["elections"] == elections
            assert leader.raft.term == term
            assert follower.logs[0].state.reached.index > leader.state.reached.index - 20


def test_a_follower_of_a_higher_term_is_not_lost() -> None:
    """R13: it refuses the leader, and no election of its own would be granted."""
    with calm(4) as (simulation, leader, follower):
        raft = follower.logs[0].raft
        follower.run(lambda: raft.deliver(leader.host.name, RequestVote(raft.term + 5, 1, 0)))
        before = follower.logs[0].state.reached.index
        simulation.run(3.0)
        assert follower.logs[0].state.reached.index > before + 50


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
        assert seconds_until_progress(simulation, 10.0) < 1.5
    with calm(8) as (simulation, leader, _):
        leader.host.pause(30.0)
        assert seconds_until_progress(simulation, 10.0) < 3.0


def test_the_whole_cluster_comes_back_after_a_power_cut() -> None:
    with calm(9) as (simulation, _, _):
        for host in simulation.hosts:
            host.crash(power=True)
        simulation.run(1.0)
        for host in simulation.hosts:
            host.boot()
        assert seconds_until_progress(simulation, 10.0) < 4.0
        simulation.outcome(simulation.settle(), simulation.drain())


def test_handing_over_is_handing_on() -> None:
    with calm(10) as (simulation, leader, follower):
        leader.host.run(lambda: leader.replica.hand_over(follower.name))
        assert seconds_until_progress(simulation, 10.0) < 1.0
        now = simulation.leader()
        assert now is not None and now.host is follower
        simulation.outcome(simulation.settle(), simulation.drain())


def test_a_hand_over_that_the_target_does_not_take_is_given_up() -> None:
    """It has all of the log and may not stand, as after a repair (R25): nobody may be kept waiting for it."""
    with calm(11) as (simulation, leader, follower):
        carry = simulation.network.send

        def lose_the_wish(sender: str, receiver: str, data: bytes) -> None:
            if not isinstance(messages.decode(data)[1], TimeoutNow):
                carry(sender, receiver, data)

        simulation.network.send = lose_the_wish  # type: ignore[method-assign]
        leader.host.run(lambda: leader.replica.hand_over(follower.name))
        assert seconds_until_progress(simulation, 10.0) < 2.5
        assert not leader.replica.handing_over


def test_a_step_of_time_that_is_long_on_its_way_costs_no_lease_its_time() -> None:
    """T2: what is formed behind a TimeStep before it is applied must not lose the time that passes meanwhile."""
    with calm(12) as (simulation, leader, _):
        for host in simulation.hosts:
            host.disk_slowness = 1.0 if host is leader.host else 60.0
            host.wall_error_ms += 10_000
        simulation.run(2.0)
        outcome = simulation.outcome(simulation.settle(), simulation.drain())
        assert outcome.counts["T2.step"] == 1
