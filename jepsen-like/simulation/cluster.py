"""One run: a plan in, counts and a trace digest out, or the `Violation` that the seed repeats.

Faults first, while clients propose, read, transfer and change the members; then everything is healed, and the cluster
must become whole in bounded time.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from random import Random
from types import TracebackType

from holdfast.cluster import membership
from holdfast.cluster.consensus import BATCH
from holdfast.cluster.membership import Configuration, ConfigurationRefused
from holdfast.cluster.raft import use_library_clock
from holdfast.jepsen.simulation.checker import Checker, Violation
from holdfast.jepsen.simulation.host import Host, Replica, Sizes
from holdfast.jepsen.simulation.nemesis import FAULTS, Nemesis
from holdfast.jepsen.simulation.network import Network
from holdfast.jepsen.simulation.scheduler import START_S, Scheduler
from holdfast.jepsen.simulation.state import ChainState, MakeState, State

SETTLE_S = 20.0
_SIZES = Sizes()
NEW_ENTRIES = 20  # what a whole cluster must commit after the faults

Draw = Callable[[Replica], tuple[bytes, Callable[..., None] | None]]  # a command, and who wants its answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that a run depends on. `faults` None: the seed chooses."""

    seed: int
    nodes: int = 3
    spares: int = 0
    logs: int = 1
    seconds: float = 30.0
    rate: float = 100.0  # proposals a second, about
    faults: tuple[str, ...] | None = None
    sizes: Sizes = _SIZES


@dataclass(frozen=True, slots=True)
class Outcome:
    counts: Counter[str]
    digest: str
    settled_s: float
    simulated_s: float


class Simulation(AbstractContextManager["Simulation"]):
    """A cluster in simulated time. The library's clock is ours while the block lasts."""

    def __init__(self, plan: Plan, make_state: MakeState = ChainState, draw: Draw | None = None) -> None:
        self.plan = plan
        self.rng = Random(plan.seed)
        self.scheduler = Scheduler()
        self.network = Network(self.scheduler, Random(self.rng.random()))
        self.names = [f"n{number}" for number in range(plan.nodes + plan.spares)]
        self.founders = membership.of(self.names[: plan.nodes])
        self.checkers = {log: Checker() for log in range(plan.logs)}
        self.counts: Counter[str] = Counter()
        self.kept_snapshots: list[State] = []
        self.hosts = [self._host(name, make_state) for name in self.names]
        self._draw = draw or self._opaque
        self._proposed = 0
        if plan.faults is None:
            chosen: tuple[str, ...] = tuple(fault for fault in FAULTS if self.rng.random() < 0.7)
        else:
            chosen = plan.faults
        self.nemesis = Nemesis(self, Random(self.rng.random()), chosen)

    def _host(self, name: str, make_state: MakeState) -> Host:
        rng = Random(self.rng.random())
        host = Host(name, self.network, self.scheduler, rng, self.plan.sizes, self.kept_snapshots)
        # A spare knows nothing of the members until a leader tells it: a stale list would let it stand for election.
        known = self.founders if name in self.founders.voter_names else Configuration()
        for log, checker in self.checkers.items():
            host.replicas[log] = Replica(host, log, checker, make_state(known))
        self.network.ends[name] = host
        return host

    def __enter__(self) -> "Simulation":
        self._former_clock = use_library_clock(lambda: self.scheduler.running())
        for host in self.hosts:
            host.boot()
        self.scheduler.after(0.5, self._clients)
        self.nemesis.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        use_library_clock(self._former_clock)

    def run(self, seconds: float) -> None:
        self.scheduler.run(seconds)

    def leader(self, log: int = 0) -> Replica | None:
        """The one that leads in the highest term, if any does."""
        leading = [host.replicas[log] for host in self.hosts if host.up and host.replicas[log].leads]
        return max(leading, key=lambda replica: replica.raft.term, default=None)

    # Clients

    def _clients(self) -> None:
        for log in self.checkers:
            for host in self.hosts:
                if host.up and host.replicas[log].leads:
                    host.run(partial(self._ask, host.replicas[log]))
        self.scheduler.after(8.0 / self.plan.rate * self.rng.random(), self._clients)

    def _ask(self, replica: Replica) -> None:
        rng = self.rng
        handing_over = rng.random() < 0.01 and self._transfer(replica)
        for _ in range(0 if handing_over else rng.randint(1, 8)):
            replica.propose(*self._draw(replica))
        if rng.random() < 0.3:
            replica.read()
        if self.plan.spares and rng.random() < 0.05:
            for _ in range(rng.choice((1, 1, 2))):  # the second must wait for the first
                self._reconfigure(replica)
        replica.raft.push()
        replica.turn()

    def _opaque(self, _: Replica) -> tuple[bytes, None]:
        self._proposed += 1
        return BATCH + b"%d" % self._proposed + bytes(self.rng.choice((1, 60, 60, 60, 700))), None

    def _transfer(self, replica: Replica) -> bool:
        others = [name for name in replica.raft.configuration.voter_names if name != replica.host.name]
        asked = bool(others) and replica.raft.transfer(self.rng.choice(others))
        self.counts["transfers"] += asked
        return asked

    def _reconfigure(self, replica: Replica) -> None:
        """Some change of members, most of them legal."""
        rng, ruling = self.rng, replica.raft.configuration
        voters, learners = list(ruling.voter_names), list(ruling.learner_names)
        outside = [name for name in self.names if name not in voters + learners]
        drawn = rng.random()
        if learners and drawn < 0.6:
            voters.append(learners.pop(0))
        elif outside and drawn < 0.8:
            learners.append(rng.choice(outside))
        else:
            others = [name for name in voters if name != replica.host.name]
            gone = rng.sample(others, min(len(others), rng.choice((1, 1, 2))))  # two at once is illegal
            voters = [name for name in voters if name not in gone]
        try:
            replica.raft.propose_configuration(membership.of(voters, learners))
            self.counts["configuration changes"] += 1
        except ConfigurationRefused:
            self.counts["configurations refused"] += 1

    # The end

    def settle(self) -> float:
        """Heal everything; how long until all members have all entries and new ones are committed."""
        self.nemesis.stop()
        self.network.slow_s.clear()
        for host in self.hosts:
            host.disk_slowness = 1.0
            host.boot()
        self.network.heal()
        for one in self.names:
            for other in self.names:
                if one < other and self.network.ends[one].sessions.get(other) is None:
                    self.network.connect(one, other)
        began_s = self.scheduler.now_s
        self.run(1.0)
        goals = {log: len(checker.chosen) for log, checker in self.checkers.items()}
        while self.scheduler.now_s - began_s < SETTLE_S:
            self.run(0.25)
            if all(self._whole(log, goal) for log, goal in goals.items()):
                return self.scheduler.now_s - began_s
        raise Violation(f"not whole {SETTLE_S} s after the last fault: {self.describe()}")

    def _whole(self, log: int, goal: int) -> bool:
        chosen = self.checkers[log].chosen
        members = self._members(log)
        behind = [host for host in self.hosts if host.name in members and host.replicas[log].state.index < goal]
        return len(chosen) > goal + NEW_ENTRIES and not behind

    def _members(self, log: int) -> tuple[str, ...]:
        """Of the newest configuration that anybody has applied."""
        newest = max((host.replicas[log].state for host in self.hosts), key=lambda state: state.configuration_index)
        return (*newest.configuration.voter_names, *newest.configuration.learner_names)

    def describe(self) -> str:
        return "; ".join(
            f"{host.name}/{log} {replica.raft.role.name} term {replica.raft.term} applied {replica.state.index}"
            f" last {replica.journal.last} leader {replica.raft.leader} voters {replica.raft.configuration.voter_names}"
            for host in self.hosts
            for log, replica in host.replicas.items()
        )

    def outcome(self, settled_s: float) -> Outcome:
        counts = self.counts.copy()
        for checker in self.checkers.values():
            checker.nothing_lost()
            counts.update(checker.counts)
        counts["messages"] = self.network.message_count
        return Outcome(counts, self.network.trace.hexdigest(), settled_s, self.scheduler.now_s - START_S)


def simulate(plan: Plan, make_state: MakeState = ChainState, draw: Draw | None = None) -> Outcome:
    """Run a plan to its end. Raises Violation, or whatever stopped a node."""
    with Simulation(plan, make_state, draw) as simulation:
        simulation.run(plan.seconds)
        return simulation.outcome(simulation.settle())
