"""Seeded clusters with every fault at once: no promise broken, everything whole afterwards, one seed one run.

`HOLDFAST_SEEDS=5000-5200 pytest tests/simulation -k drawn` plays other seeds than these, and as many as wanted.
"""

import os
import subprocess
import sys
from collections import Counter
from random import Random

import pytest

from holdfast.jepsen.simulation.cluster import Plan, Simulation, simulate
from holdfast.jepsen.simulation.host import Sizes
from holdfast.jepsen.simulation.nemesis import FAULTS

ALONE = ("kill", "power cut", "slow disk", "clock jump", "lost connections", "client killed")
THREE = tuple(Plan(seed=seed) for seed in range(10))
CHANGING = (
    *(Plan(seed=seed, spares=2, seconds=10.0) for seed in (100, 101, 103, 104, 105)),
    Plan(seed=120, spares=2, sizes=Sizes(snapshot_chance=0.0)),
)
OTHERS = (
    *(Plan(seed=seed, nodes=5, seconds=10.0) for seed in range(200, 202)),
    *(Plan(seed=seed, nodes=1, faults=ALONE) for seed in range(300, 302)),
)
CALM = (
    *(Plan(seed=seed, faults=("clock jump",)) for seed in range(400, 402)),
    *(Plan(seed=seed, faults=("client killed",)) for seed in range(402, 404)),
    Plan(seed=410, faults=()),
)
PLANS = (*THREE, *CHANGING, *OTHERS, *CALM)
WORK = (
    "elections",
    "acknowledged",
    "reads",
    "transfers",
    "torn flushes",
    "lost bytes",
    "compactions",
    "snapshots sent",
    "snapshots installed",
    "crashes in install",
    "configuration changes",
    "configurations refused",
    "forgotten",
    "asked again",
    "produced",
    "delivered again",
    "settled by AckBatch",
    "settled by Nack",
    "settled by Release",
    "told Committed",
    "told Extended",
    "told Redriven",
    "declined NotLeader",
    "declined LeaderChanged",
    "refused LeaseExpired",
    "refused InFlightLimit",
    "T2.step",
    "T3.expiry",
    "T3.nack_delay",
    "T3.held_delay",
    "T3.ttl",
)

_totals: Counter[str] = Counter()


def named(plan: Plan) -> str:
    return f"{plan.nodes}+{plan.spares} nodes, seed {plan.seed}"


def play(plan: Plan) -> None:
    outcome = simulate(plan)
    _totals.update(outcome.counts)
    _totals["plans"] += 1
    _totals["simulated seconds"] += int(outcome.simulated_s)


@pytest.mark.parametrize("plan", THREE, ids=named)
def test_three_nodes_break_no_promise_and_become_whole(plan: Plan) -> None:
    play(plan)


@pytest.mark.parametrize("plan", CHANGING, ids=named)
def test_members_change_and_no_promise_is_broken(plan: Plan) -> None:
    play(plan)


@pytest.mark.parametrize("plan", OTHERS, ids=named)
def test_five_nodes_and_one_alone_break_no_promise(plan: Plan) -> None:
    play(plan)


@pytest.mark.parametrize("plan", CALM, ids=named)
def test_clocks_that_jump_and_clients_that_die_are_noticed_by_nobody(plan: Plan) -> None:
    """T2, L7: every answer is prompt, and lease time goes on second by second."""
    play(plan)


def test_every_kind_of_fault_and_of_work_has_happened() -> None:
    """Must stand behind the plans: what never happened was not shown to be harmless."""
    if _totals["plans"] < len(PLANS):
        pytest.skip("only some of the plans were run")
    print(", ".join(f"{count} {name}" for name, count in sorted(_totals.items())))
    assert [name for name in (*FAULTS, *WORK) if not _totals[name]] == []


def drawn(seed: int) -> Plan:
    """Some cluster or other."""
    rng = Random(seed)
    nodes, spares = rng.choice(((3, 0), (3, 0), (3, 2), (3, 1), (5, 0), (4, 0), (2, 1), (1, 0)))
    faults = ALONE if nodes == 1 else rng.choice((None, None, None, None, ("clock jump",), ("client killed",)))
    sizes = Sizes(snapshot_chance=rng.choice((0.0, 0.02, 0.1)))
    return Plan(
        seed=seed, nodes=nodes, spares=spares, seconds=rng.choice((6.0, 15.0, 40.0)), faults=faults, sizes=sizes
    )


def test_drawn_seeds_break_no_promise() -> None:
    first, _, end = os.environ.get("HOLDFAST_SEEDS", "").partition("-")
    for seed in range(int(first), int(end)) if end else ():
        try:
            play(drawn(seed))
        except BaseException as error:
            error.add_note(f"{drawn(seed)}: HOLDFAST_SEEDS={seed}-{seed + 1} pytest tests/simulation -k drawn")
            raise


DIGEST = """
from holdfast.jepsen.simulation.cluster import Plan, simulate
print(simulate(Plan(seed=31, seconds=4.0, spares=2)).digest)
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
    assert digests != {simulate(Plan(seed=32, seconds=4.0, spares=2)).digest + "\n"}


def test_two_logs_share_one_set_of_nodes() -> None:
    """Shape 8: each log has its own replica, journal and leader; disk, peers and crashes are the node's."""
    plan = Plan(seed=41, logs=2, clients=2, faults=FAULTS)
    with Simulation(plan) as simulation:
        simulation.run(plan.seconds)
        outcome = simulation.outcome(simulation.settle(), simulation.drain())
        first, second = simulation.checkers.values()
        assert min(len(first.chosen), len(second.chosen)) > 100
        assert first.chosen != second.chosen
        assert first.leaders != second.leaders
        assert outcome.counts["power cut"] + outcome.counts["kill"] + outcome.counts["power cut of all"]


def test_what_changes_kept_is_what_the_rows_say() -> None:
    """The digest that every node maintains is the one of its rows, after crashes and installed snapshots, too."""
    with Simulation(Plan(seed=51, seconds=6.0, sizes=Sizes(snapshot_chance=0.1))) as simulation:
        simulation.run(6.0)
        simulation.settle()
        assert all(log.state.recomputed() == log.state.digest() for log in simulation.logs)
