"""One run: a plan in, counts and a trace digest out, or the `Violation` that the seed repeats.

Faults first, while clients work, leadership is handed over and members change; then everything is healed, and the
cluster must become whole in bounded time; then the clients drain it, and everything must come to rest; and at the end
the whole log is judged.
"""

import hashlib
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import count, product
from random import Random
from types import TracebackType

from holdfast.client.protocol.commands import Lease
from holdfast.client.protocol.messages import Request
from holdfast.client.protocol.queries import DescribeQueue, Stats
from holdfast.client.protocol.replies import GroupStats, QueueDescribed
from holdfast.cluster.membership import Configuration, ConfigurationRefused, Member
from holdfast.cluster.raft import use_library_clock
from holdfast.cluster.replica import HAND_OVER_MS, STALE_WAIT_MS
from holdfast.cluster.state import Reached
from holdfast.jepsen.simulation.checker import Checker, Violation
from holdfast.jepsen.simulation.clients import GROUPS, Client, Shell, draw_settings
from holdfast.jepsen.simulation.host import Host, HostedLog, Sizes
from holdfast.jepsen.simulation.judge import Judge
from holdfast.jepsen.simulation.nemesis import FAULTS, Nemesis
from holdfast.jepsen.simulation.network import Network
from holdfast.jepsen.simulation.scheduler import START_S, Scheduler
from holdfast.jepsen.simulation.state import MachineState
from holdfast.jepsen.simulation.wire import Wire, Wires
from holdfast.storage import views

SETTLE_S = 20.0
DRAIN_S = 15.0  # far below the wait of those who drain: what is not woken is late
CALM_GAP_S = 1.2  # T2 has a second for the stamps of an open lease; the rest is for slow clocks and a turn
OUTCOME_S = STALE_WAIT_MS / 1_000 + 2.0  # what a request may take where all is well: some wait to be able to answer
FIRST_LEADER_S = 3.0
NEW_ENTRIES = 20  # what a whole cluster must commit after the faults
FIRST_INDEX = 1
_SIZES = Sizes()
_PARTS = {"_sizes", "_asked", "_early", "_reads", "_confirming", "_stale", "_touches"}  # where a replica keeps tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that a run depends on. `faults` None: the seed chooses."""

    seed: int
    nodes: int = 3
    spares: int = 0
    logs: int = 1
    clients: int = 3  # of each log
    seconds: float = 12.0
    faults: tuple[str, ...] | None = None
    sizes: Sizes = _SIZES


@dataclass(frozen=True, slots=True)
class Outcome:
    counts: Counter[str]
    digest: str
    settled_s: float
    drained_s: float
    simulated_s: float


class Simulation(AbstractContextManager["Simulation"]):
    """A cluster in simulated time. The library's clock is ours while the block lasts."""

    plan_queue = "work"

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rng = Random(plan.seed)
        self.scheduler = Scheduler()
        self.network = Network(self.scheduler, Random(self.rng.random()))
        self.wires = Wires(self.scheduler, Random(self.rng.random()))
        self.names = [f"n{number}" for number in range(plan.nodes + plan.spares)]
        self.checkers = {log: Checker(self.scheduler) for log in range(plan.logs)}
        self.counts: Counter[str] = Counter()
        self.kept_snapshots: list[MachineState] = []
        self.hosts = [self._host(name) for name in self.names]
        self.settings = draw_settings(Random(self.rng.random()))
        self.pace = self.rng.choice((0.5, 1.0, 1.0, 4.0))  # how long clients think
        self.quiet = False  # nobody begins anything new
        if plan.faults is None:
            chosen: tuple[str, ...] = tuple(fault for fault in FAULTS if self.rng.random() < 0.7)
        else:
            chosen = plan.faults
        self.nemesis = Nemesis(self, Random(self.rng.random()), chosen)
        self.is_prompt = self.nemesis.is_harmless  # nothing happens that a client could notice
        self._names = count()
        self.clients = [self._client(log) for log in self.checkers for _ in range(plan.clients)]

    @property
    def is_calm(self) -> bool:
        """Whether every answer has to be prompt from now on."""
        return self.is_prompt and self.scheduler.now_s - START_S > FIRST_LEADER_S

    def address(self, name: str, log: int) -> str:
        return f"{name}:{log}"

    def members(self, log: int, voters: list[str], learners: list[str]) -> Configuration:
        both = ([Member(name, client_address=self.address(name, log)) for name in part] for part in (voters, learners))
        return Configuration(*map(tuple, both))

    def _host(self, name: str) -> Host:
        rng = Random(self.rng.random())
        host = Host(name, self.network, self.scheduler, rng, self.plan.sizes, self.kept_snapshots)
        founders = self.names[: self.plan.nodes]
        for log, checker in self.checkers.items():
            # A spare knows nothing of the members until a leader tells it: a stale list would let it stand for
            # election.
            known = self.members(log, founders, []) if name in founders else Configuration()
            host.logs[log] = HostedLog(host, log, checker, Reached(FIRST_INDEX, 0, 0, known))
        self.network.ends[name] = host
        return host

    def _client(self, log: int) -> Client:
        return Client(self, log, f"c{next(self._names)}", Random(self.rng.random()))

    def wire(self, shell: Shell, address: str) -> Wire:
        name, _, log = address.partition(":")
        host = self.hosts[self.names.index(name)]
        return Wire(self.wires, shell, host.logs[int(log)])

    def __enter__(self) -> "Simulation":
        self._former_clock = use_library_clock(lambda: self.scheduler.running())
        for host in self.hosts:
            host.boot()
        for client in self.clients:
            self.scheduler.after(0.5 * self.rng.random(), client.begin)
        self.scheduler.after(1.0, self._operate)
        self.nemesis.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        use_library_clock(self._former_clock)

    def run(self, seconds: float) -> None:
        self.scheduler.run(seconds)

    @property
    def logs(self) -> list[HostedLog]:
        return [log for host in self.hosts for log in host.logs.values()]

    def leader(self, log: int = 0) -> HostedLog | None:
        """The one that leads in the highest term, if any does."""
        leading = [host.logs[log] for host in self.hosts if host.up and host.logs[log].leads]
        return max(leading, key=lambda hosted: hosted.raft.term, default=None)

    # Clients and operators

    def replace_client(self) -> None:
        """A client process dies, and another one takes its place."""
        at = self.rng.randrange(len(self.clients))
        self.clients[at].shell.vanish()
        self.clients[at] = self._client(at // self.plan.clients)
        self.clients[at].begin()

    def _operate(self) -> None:
        """Leadership is handed over and members change while clients work."""
        if self.quiet:
            return
        for log in self.checkers:
            leader = self.leader(log)
            if leader is None or self.nemesis.is_harmless:
                continue
            if self.rng.random() < 0.15:
                leader.host.run(partial(self._transfer, leader))
            if self.plan.spares and self.rng.random() < 0.6:
                for _ in range(self.rng.choice((1, 1, 2))):  # the second must wait for the first
                    leader.host.run(partial(self._reconfigure, leader))
        self.scheduler.after(0.8 * self.rng.random(), self._operate)

    def _transfer(self, leader: HostedLog) -> None:
        others = [name for name in leader.raft.configuration.voter_names if name != leader.host.name]
        self.counts["transfers"] += leader.replica.hand_over(self.rng.choice((None, *others)))
        leader.wake()

    def _reconfigure(self, leader: HostedLog) -> None:
        """Some change of members, most of them legal."""
        rng, ruling = self.rng, leader.raft.configuration
        voters, learners = list(ruling.voter_names), list(ruling.learner_names)
        outside = [name for name in self.names if name not in voters + learners]
        drawn = rng.random()
        if learners and drawn < 0.6:
            voters.append(learners.pop(0))
        elif outside and drawn < 0.8:
            learners.append(rng.choice(outside))
        else:
            others = [name for name in voters if name != leader.host.name]
            gone = rng.sample(others, min(len(others), rng.choice((1, 1, 2))))  # two at once is illegal
            voters = [name for name in voters if name not in gone]
        try:
            leader.raft.propose_configuration(self.members(leader.log, voters, learners))
            self.counts["configuration changes"] += 1
        except ConfigurationRefused:
            self.counts["configurations refused"] += 1
        leader.wake()

    # The end

    def settle(self) -> float:
        """Heal everything; how long until all members have all entries and new ones are committed."""
        self.nemesis.stop()
        self.network.slow_s.clear()
        for host in self.hosts:
            host.disk_slowness = 1.0
            host.boot()
        self.network.heal()
        self.wires.heal(self.logs)
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
        states = [host.logs[log].state for host in self.hosts if host.name in members]
        return len(chosen) > goal + NEW_ENTRIES and all(state.reached.index >= goal for state in states)

    def _members(self, log: int) -> tuple[str, ...]:
        """Of the newest configuration that anybody has applied."""
        reached = (host.logs[log].state.reached for host in self.hosts)
        newest = max(reached, key=lambda reached: reached.configuration_index).configuration
        return (*newest.voter_names, *newest.learner_names)

    def drain(self) -> float:
        """Nothing new begins: how long until every message is settled. Then the clients leave, and nothing is left."""
        self.quiet = True
        began_s = self.scheduler.now_s
        self.scheduler.after(HAND_OVER_MS / 1_000, self._expect_promptness)  # one that was begun may be under way
        for log in self.checkers:
            for queue, group in product(self.settings, GROUPS):
                self.clients.append(self._client(log))
                self.clients[-1].drain(queue, group)
        while self._unsettled():
            self.run(0.1)
            if self.scheduler.now_s - began_s > DRAIN_S:
                raise Violation(f"not settled after {DRAIN_S} s: {self._unsettled()}; {self.describe()}")
        drained_s = self.scheduler.now_s - began_s
        self._check_outcomes()
        for client in self.clients:
            client.shell.close()
        self.run(1.0)
        self._check_rest()
        return drained_s

    def _expect_promptness(self) -> None:
        self.is_prompt = True

    def _unsettled(self) -> list[str]:
        """Groups with something left to deliver, as the leaders know it."""
        found = []
        for log in self.checkers:
            leader = self.leader(log)
            if leader is None:
                return ["no leader"]
            with leader.state.store.read() as txn:
                for name in self.settings:
                    described = views.answer(txn, DescribeQueue(name=name)).reply
                    for group in GROUPS:
                        if not isinstance(described, QueueDescribed):
                            break  # nobody got so far as to make it
                        stats = views.answer(txn, Stats(queue_id=described.queue_id, group=group)).reply
                        if isinstance(stats, GroupStats) and stats.ready + stats.delayed + stats.in_flight:
                            found.append(f"{name}/{group} of log {log}: {stats}")
        return found

    def _check_outcomes(self) -> None:
        """Every request has its outcome, or its connection is over, or it waits as it wanted to."""
        for hosted in self.logs:
            for asked, came_s in hosted.asked.values():
                wait_ms = (
                    asked.command.wait_ms if isinstance(asked, Request) and isinstance(asked.command, Lease) else 0
                )
                if self.scheduler.now_s - came_s > wait_ms / 1_000 * 1.1 + OUTCOME_S:
                    raise Violation(f"{hosted.host.name} owes an outcome since {came_s:.2f}: {asked}")

    def _check_rest(self) -> None:
        """Nobody waits for anything any more, so no part of a node may still know of somebody who does."""
        for hosted in self.logs:
            replica = hosted.replica
            left = {name: len(part) for name, part in vars(replica).items() if name in _PARTS and part}
            left |= {"batcher": len(replica.batcher)} if len(replica.batcher) else {}
            left |= {"waiters": len(replica.waiters)} if len(replica.waiters) else {}
            if left or hosted.asked or replica.batcher.in_doubt:
                raise Violation(f"{hosted.host.name} still has {left}, {hosted.asked}")

    def describe(self) -> str:
        return "; ".join(
            f"{hosted.host.name}/{hosted.log} {hosted.raft.role.name} term {hosted.raft.term}"
            f" applied {hosted.state.reached.index} last {hosted.raft.journal.last} leader {hosted.raft.leader}"
            f" voters {hosted.raft.configuration.voter_names} asked {len(hosted.asked)}"
            for hosted in self.logs
        )

    def outcome(self, settled_s: float, drained_s: float) -> Outcome:
        """Judge everything that was said and done."""
        counts = self.counts.copy()
        trace = hashlib.blake2b(self.network.trace.digest(), digest_size=16)
        for checker in self.checkers.values():
            checker.nothing_lost()
            counts.update(Judge(checker, CALM_GAP_S if self.nemesis.is_harmless else None).run())
            counts.update(checker.counts)
            trace.update(repr(checker.counts).encode())
        counts["messages"] = self.network.message_count
        counts["lost bytes"] = sum(host.lost_bytes for host in self.hosts)
        return Outcome(counts, trace.hexdigest(), settled_s, drained_s, self.scheduler.now_s - START_S)


def simulate(plan: Plan) -> Outcome:
    """Run a plan to its end. Raises Violation, or whatever stopped a node."""
    with Simulation(plan) as simulation:
        simulation.run(plan.seconds)
        settled_s = simulation.settle()
        return simulation.outcome(settled_s, simulation.drain())
