"""Seeded clusters with every fault at once: no promise broken, everything whole afterwards, one seed one run."""

import os
import subprocess
import sys
from collections import Counter
from random import Random

import pytest

from holdfast.client.protocol.replies import Answer
from holdfast.cluster.consensus import BATCH
from holdfast.jepsen.simulation.checker import Checker, Violation
from holdfast.jepsen.simulation.cluster import Plan, Simulation, simulate
from holdfast.jepsen.simulation.host import Replica, Sizes
from holdfast.jepsen.simulation.nemesis import FAULTS
from holdfast.jepsen.simulation.state import ChainState, MachineState
from holdfast.storage.entry import encode_entry
from tests.support.generator import Generator
from tests.support.machine import START_MS

PLANS = (
    *(Plan(seed=seed, seconds=20.0) for seed in range(24)),
    *(Plan(seed=seed, seconds=20.0, spares=2) for seed in range(100, 112)),
    *(Plan(seed=seed, seconds=20.0, spares=2, sizes=Sizes(snapshot_chance=0.0)) for seed in range(120, 124)),
    *(Plan(seed=seed, seconds=20.0, nodes=5) for seed in range(200, 206)),
    *(Plan(seed=seed, seconds=20.0, nodes=1, faults=("kill", "power cut", "slow disk")) for seed in range(300, 303)),
)
WORK = (
    "elections",
    "acknowledged",
    "reads",
    "transfers",
    "torn flushes",
    "compactions",
    "snapshots sent",
    "snapshots installed",
    "crashes in install",
    "configuration changes",
    "configurations refused",
)

_totals: Counter[str] = Counter()


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.nodes}+{plan.spares} nodes, seed {plan.seed}")
def test_no_promise_is_broken_and_the_cluster_becomes_whole(plan: Plan) -> None:
    outcome = simulate(plan)
    _totals.update(outcome.counts)
    _totals["plans"] += 1


def test_every_kind_of_fault_and_of_work_has_happened() -> None:
    """Must stand behind the plans: what never happened was not shown to be harmless."""
    if _totals["plans"] < len(PLANS):
        pytest.skip("only some of the plans were run")
    print(", ".join(f"{count} {name}" for name, count in sorted(_totals.items())))
    assert [name for name in (*FAULTS, *WORK) if not _totals[name]] == []


DIGEST = """
from holdfast.jepsen.simulation.cluster import Plan, simulate
print(simulate(Plan(seed=31, seconds=6.0, spares=2)).digest)
"""


def test_one_seed_is_one_run_whatever_the_hash_seed() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", DIGEST],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "1", "4242")
    }
    assert len(digests) == 1
    assert digests != {simulate(Plan(seed=32, seconds=6.0, spares=2)).digest + "\n"}


def test_two_logs_share_one_set_of_nodes() -> None:
    plan = Plan(seed=41, seconds=20.0, logs=2)
    with Simulation(plan) as simulation:
        simulation.run(plan.seconds)
        simulation.outcome(simulation.settle())
        first, second = (checker.chosen for checker in simulation.checkers.values())
        assert min(len(first), len(second)) > 200
        assert first != second
        leaders = [checker.leaders for checker in simulation.checkers.values()]
        assert leaders[0] != leaders[1]


def test_the_real_state_machine_is_the_same_on_every_node() -> None:
    """Real entries of random commands through the log, across crashes and snapshots."""
    generator, now_ms = Generator(Random(51)), START_MS

    def draw(_: Replica) -> tuple[bytes, object]:
        nonlocal now_ms
        now_ms += generator.step_ms()
        envelopes = generator.entry()

        def answered(answers: tuple[Answer, ...]) -> None:
            for envelope, answer in zip(envelopes, answers, strict=True):
                generator.learn(envelope, answer)

        return BATCH + encode_entry(now_ms, envelopes), answered

    plan = Plan(seed=51, seconds=8.0, rate=40.0)
    with Simulation(plan, MachineState, draw) as simulation:  # type: ignore[arg-type]
        simulation.run(plan.seconds)
        outcome = simulation.outcome(simulation.settle())
        states = [host.replicas[0].state for host in simulation.hosts]
        assert all(isinstance(state, MachineState) and state.recomputed() == state.digest() for state in states)
        assert outcome.counts["acknowledged"] > 100


# A checker that has never said no has shown nothing.


def test_another_entry_at_the_same_index_is_noticed() -> None:
    checker = Checker()
    checker.applied("a", 5, 2, b"x", b"1")
    checker.applied("b", 5, 2, b"x", b"1")
    for term, command, digest in ((3, b"x", b"1"), (2, b"y", b"1"), (2, b"x", b"2")):
        with pytest.raises(Violation):
            checker.applied("c", 5, term, command, digest)


def test_a_lost_acknowledgement_is_noticed() -> None:
    checker = Checker()
    checker.applied("a", 5, 2, b"x", b"1")
    checker.acknowledge(5, 2)
    checker.nothing_lost()
    checker.acknowledge(6, 2)
    with pytest.raises(Violation, match="gone"):
        checker.nothing_lost()


def test_a_second_leader_and_a_stale_read_are_noticed() -> None:
    checker = Checker()
    checker.elected("a", 3)
    with pytest.raises(Violation, match="both lead"):
        checker.elected("b", 3)
    checker.read("a", 7, 7)
    with pytest.raises(Violation, match="read"):
        checker.read("a", 6, 7)


def test_a_cluster_that_does_not_become_whole_is_noticed() -> None:
    with Simulation(Plan(seed=1, faults=())) as simulation:
        simulation.run(2.0)
        simulation.hosts[0].boot = lambda: None  # type: ignore[method-assign]
        simulation.hosts[0].crash(power=True)
        with pytest.raises(Violation, match="not whole"):
            simulation.settle()


def test_states_of_different_histories_have_different_digests() -> None:
    one, other = ChainState(Simulation(Plan(seed=1)).founders), ChainState(Simulation(Plan(seed=1)).founders)
    one.apply(2, 1, b"x")
    other.apply(2, 2, b"x")
    assert one.digest() != other.digest()
