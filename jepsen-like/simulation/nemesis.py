"""What goes wrong: one seeded source of faults, each of which counts itself when it has had an effect."""

from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.jepsen.simulation.cluster import Simulation

FAULTS = (
    "kill",
    "power cut",
    "power cut of all",
    "power cut of a majority",
    "isolation",
    "cut link",
    "one-way cut",
    "slow link",
    "reset",
    "slow disk",
    "hanging disk",
    "pause",
    "clock jump",
    "lost connections",
    "clients cut off",
    "client killed",
)
# What no other client notices: the rest of the promises must hold to the second.
HARMLESS = frozenset({"clock jump", "client killed"})
JUMP_MS = 3_600_000


class Nemesis:
    """Draws a fault every second or so, and its end. `enabled` is this seed's choice of faults."""

    def __init__(self, simulation: "Simulation", rng: Random, enabled: Sequence[str]) -> None:
        self._simulation = simulation
        self._rng = rng
        self._enabled = enabled
        self.is_harmless = set(enabled) <= HARMLESS
        self._stopped = False
        self._acts: dict[str, Callable[[], None]] = {
            "kill": lambda: self._crash(power=False),
            "power cut": lambda: self._crash(power=True),
            "power cut of all": self._crash_all,
            "power cut of a majority": self._crash_majority,
            "isolation": self._isolate,
            "cut link": self._cut_link,
            "one-way cut": self._cut_one_way,
            "slow link": self._slow_link,
            "reset": self._reset,
            "slow disk": lambda: self._slow_disk(self._rng.choice((20.0, 100.0))),
            "hanging disk": lambda: self._slow_disk(1_000.0),
            "pause": self._pause,
            "clock jump": self._jump,
            "lost connections": self._lose_connections,
            "clients cut off": self._cut_clients_off,
            "client killed": self._simulation.replace_client,
        }

    def start(self) -> None:
        if self._enabled:
            self._simulation.scheduler.after(1.0, self._next)

    def stop(self) -> None:
        self._stopped = True

    def _next(self) -> None:
        if self._stopped:
            return
        fault = self._rng.choice(self._enabled)
        self._simulation.counts[fault] += 1
        self._acts[fault]()
        self._simulation.scheduler.after(0.2 + 2 * self._rng.random(), self._next)

    def _crash(self, power: bool) -> None:
        self._rng.choice(self._simulation.hosts).restart(power)

    def _crash_all(self) -> None:
        for host in self._simulation.hosts:
            host.restart(power=True)

    def _crash_majority(self) -> None:
        """Slow disks lose the power with much in flight, and come back while those who had it all are away."""
        hosts = self._rng.sample(self._simulation.hosts, len(self._simulation.hosts))
        cut = len(hosts) // 2 + 1
        for host in hosts[:cut]:
            host.disk_slowness = 60.0

        def strike() -> None:
            for host in hosts[:cut]:
                host.disk_slowness = 1.0
                host.crash(power=True)
                self._simulation.scheduler.after(0.2 * self._rng.random(), host.boot)
            for host in hosts[cut:]:
                host.crash(power=False)
                self._simulation.scheduler.after(1 + self._rng.random(), host.boot)

        self._simulation.scheduler.after(0.1 + 0.3 * self._rng.random(), strike)

    def _isolate(self) -> None:
        lonely, *others = self._rng.sample(self._simulation.names, len(self._simulation.names))
        self._cut([link for other in others for link in ((lonely, other), (other, lonely))])

    def _cut_link(self) -> None:
        one, other = self._rng.sample(self._simulation.names, 2)
        self._cut([(one, other), (other, one)])

    def _cut_one_way(self) -> None:
        lonely, *others = self._rng.sample(self._simulation.names, len(self._simulation.names))
        links = [(lonely, other) for other in others[: self._rng.randint(1, len(others))]]
        self._cut(links if self._rng.random() < 0.5 else [(there, here) for here, there in links])

    def _cut(self, links: list[tuple[str, str]]) -> None:
        self._simulation.network.cut_off(links)
        self._simulation.scheduler.after(2.5 * self._rng.random(), self._simulation.network.heal)

    def _slow_link(self) -> None:
        one, other = self._rng.sample(self._simulation.names, 2)
        slow_s = self._simulation.network.slow_s
        slow_s[one, other] = 2 * self._rng.random()
        self._simulation.scheduler.after(2 * self._rng.random(), lambda: slow_s.pop((one, other), None))

    def _reset(self) -> None:
        one, other = self._rng.sample(self._simulation.names, 2)
        self._simulation.network.reset(one, other)

    def _slow_disk(self, slowness: float) -> None:
        host = self._rng.choice(self._simulation.hosts)
        host.disk_slowness = slowness

        def recover() -> None:
            host.disk_slowness = 1.0

        self._simulation.scheduler.after(3 * self._rng.random(), recover)

    def _pause(self) -> None:
        host = self._rng.choice(self._simulation.hosts)
        if host.up:
            host.pause(2 * self._rng.random())

    def _jump(self) -> None:
        """Wall clocks are set, forward or back, on some of the nodes or on all of them (T2)."""
        hosts = self._simulation.hosts
        for host in self._rng.sample(hosts, self._rng.choice((1, 1, 2, len(hosts))) % (len(hosts) + 1)):
            host.wall_error_ms = self._rng.randint(-JUMP_MS, JUMP_MS)

    def _lose_connections(self) -> None:
        self._rng.choice(self._simulation.clients).shell.drop_connections()

    def _cut_clients_off(self) -> None:
        """One node goes on among its peers, and hears nothing of its clients, nor they of it."""
        simulation = self._simulation
        simulation.wires.cut_off(self._rng.choice(simulation.logs))
        simulation.scheduler.after(2 * self._rng.random(), lambda: simulation.wires.heal(simulation.logs))
