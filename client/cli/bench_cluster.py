"""A cluster to be measured: real processes, a folder and ports of its own, and the meters beside it.

Nothing of it is left behind: processes, ports and folder are gone when the block ends.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from holdfast.client.blocking import Client
from holdfast.client.cli.bench_load import Job
from holdfast.client.cli.up import HOST, NODES_MAX, Cluster, Plan
from holdfast.client.protocol.errors import HoldfastError, Misuse, Unavailable

READY_S: Final = 60.0
PORTS: Final = range(15_000, 32_000, 40)  # below what the system gives out by itself
LOAD_READY_S: Final = 60.0
QUEUE: Final = "bench"
POLL_S: Final = 0.005
NEAR: Final = 50  # entries that a node may lack under load
PROBE_FILL_BYTES: Final = 8 << 20

T = TypeVar("T")
Figures = dict[str, Any]
Change = Callable[[Plan, list[str], str], list[str]]  # of a node's command line


class Place:
    """A running cluster with one queue in it. All nodes are level when `opened` gives it."""

    def __init__(self, cluster: Cluster, client: Client) -> None:
        self.cluster, self.client = cluster, client
        self.data = cluster.plan.data

    @property
    def names(self) -> list[str]:
        return self.cluster.plan.names

    @property
    def connect(self) -> str:
        return self.cluster.plan.connect

    # Who leads, who is level

    def leader(self) -> str:
        """Who leads, once somebody does and answers."""

        def led() -> str | None:
            status = self.client.status()
            roles = {node.name: node.role for node in status.nodes}
            return status.leader if status.leader is not None and roles[status.leader] == "leader" else None

        return wait_for("a leader", led)

    def followers(self) -> list[str]:
        leader = self.leader()
        return [name for name in self.names if name != leader]

    def leads_among(self, names: Sequence[str]) -> str | None:
        """Which of these leads by its own word."""
        for node in self.client.status().nodes:
            if node.name in names and node.role == "leader":
                return node.name
        return None

    def wait_all_up(self) -> None:
        """Until every node answers and lacks next to nothing: level is not to be had while a load goes on."""

        def near() -> bool:
            nodes = self.client.status().nodes
            return len(nodes) == len(self.names) and all(node.lag is not None and node.lag < NEAR for node in nodes)

        wait_for("all nodes to be up", near)

    def wait_level(self, timeout_s: float = READY_S) -> float:
        """Until every node has applied what the leader had when it was asked; how many seconds that took."""
        began_s = time.monotonic()
        wait_for("all nodes to be level", self._level, timeout_s)
        return time.monotonic() - began_s

    def _level(self) -> bool:
        applied = [node.applied for node in self.client.status().nodes]
        known = [index for index in applied if index is not None]
        return len(known) == len(self.names) and min(known) == max(known)

    def applied(self, name: str) -> int | None:
        """How far one node has come by its own word; none while it does not answer."""
        try:
            with urllib.request.urlopen(f"{self._http(name)}/status", timeout=2.0) as page:
                return int(json.load(page)["applied"])
        except OSError:
            return None

    # Meters

    def metrics(self, name: str) -> dict[str, float]:
        """The node's numbers that have no labels."""
        with urllib.request.urlopen(f"{self._http(name)}/metrics", timeout=5.0) as page:
            lines = page.read().decode().splitlines()
        found = (line.rpartition(" ") for line in lines if line and line[0] != "#" and "{" not in line)
        return {metric: float(number) for metric, _, number in found}

    def cpu_s(self, name: str) -> float:
        """Processor time of a node, all its threads."""
        text = Path(f"/proc/{self.cluster.pid(name)}/stat").read_text()
        user, system = text.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def memory(self, name: str) -> dict[str, int]:
        """Resident bytes of a node, and those of them that belong to no file: the pages of LMDB's file come and go."""
        text = Path(f"/proc/{self.cluster.pid(name)}/status").read_text()
        lines = dict(line.split(":", 1) for line in text.splitlines())
        kib = {field: int(lines[field].split()[0]) for field in ("VmRSS", "RssAnon")}
        return {"resident_bytes": kib["VmRSS"] * 1_024, "anonymous_bytes": kib["RssAnon"] * 1_024}

    def _http(self, name: str) -> str:
        return f"http://{HOST}:{self.cluster.plan.base_port + 10 + self.names.index(name) + 1}"

    # What is done to nodes

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.cluster.pid(name), number)

    def terminate(self, name: str) -> None:
        """Ask a node to end in good order, and wait until it has."""
        self.signal(name, signal.SIGTERM)
        wait_for(f"{name} to end", lambda: name in self.cluster.dead())


@contextmanager
def opened(nodes: int, directory: Path | None = None, change: Change | None = None, **settings: Any) -> Iterator[Place]:
    """A cluster of its own. `change` may alter how a node is started; `settings` are the queue's."""
    if not 1 <= nodes <= NODES_MAX:
        raise Misuse(f"--nodes is {nodes}; 1 to {NODES_MAX} is allowed")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=directory))
        plan = _Plan(nodes, Path(folder), free_ports(), change)
        cluster = stack.enter_context(Cluster(plan))
        place = Place(cluster, stack.enter_context(Client(plan.connect, timeout_ms=60_000)))
        place.leader()
        place.client.create_queue(QUEUE, **{"visibility_timeout_ms": 600_000, **settings})
        place.wait_level()
        yield place


@dataclass(frozen=True, slots=True)
class _Plan(Plan):
    change: Change | None = None

    def command(self, name: str) -> list[str]:
        return Plan.command(self, name) if self.change is None else self.change(self, Plan.command(self, name), name)


def free_ports() -> int:
    """A base port of which nobody has any of the next forty."""
    for base in random.SystemRandom().sample(PORTS, len(PORTS)):
        if all(_is_free(base + at) for at in range(1, 40)):
            return base
    raise HoldfastError("no forty free ports in a row")


def _is_free(port: int) -> bool:
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def wait_for(what: str, look: Callable[[], T | None], timeout_s: float = READY_S) -> T:
    """Look again and again until there is something; nodes that do not answer are waited for too."""
    until_s = time.monotonic() + timeout_s
    while True:
        try:
            found = look()
        except (Unavailable, OSError):
            found = None
        if found:
            return found
        if time.monotonic() > until_s:
            raise HoldfastError(f"{what}: waited {timeout_s:.0f} s; the logs of the nodes say why")
        time.sleep(POLL_S)


# Load ----------------------------------------------------------------------------------------------------


class Loads:
    """Processes of load that begin at the same moment."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        for job in self.jobs:
            command = [sys.executable, "-m", "holdfast.client.cli.bench_load"]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._processes.append(process)
            self._tell(process, job.line())
        for process in self._processes:
            self._read(process)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def go(self) -> float:
        """All of them begin; when, on the clock that all processes share."""
        at_s = time.monotonic() + 0.05
        for process in self._processes:
            self._tell(process, json.dumps({"at_s": at_s}))
        return at_s

    def stop(self) -> list[Figures]:
        """End those that have no end of their own, and what each of them counted."""
        for process, job in zip(self._processes, self.jobs, strict=True):
            if job.seconds is None:
                self._tell(process, "stop")
        return [self._read(process) for process in self._processes]

    def _tell(self, process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(f"{line}\n")
        process.stdin.flush()

    def _read(self, process: subprocess.Popen[str]) -> Figures:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise HoldfastError("a process of the load has ended; what it said stands above")
        told: Figures = json.loads(line)
        return told


@dataclass(frozen=True, slots=True)
class Reading:
    """All meters at one moment."""

    leader: str
    cpu_s: dict[str, float]
    fsyncs: float
    entries: float
    journal_bytes: float

    @classmethod
    def of(cls, place: Place, leader: str) -> "Reading":
        dead = place.cluster.dead()
        metrics = place.metrics(leader)
        return cls(
            leader,
            {name: place.cpu_s(name) for name in place.names if name not in dead},
            metrics["holdfast_fsync_seconds_count"],
            metrics["holdfast_entries_proposed_total"],
            metrics["holdfast_journal_bytes"],
        )


def measured(place: Place, jobs: Sequence[Job], seconds: float) -> tuple[Figures, list[Figures]]:
    """Run a load for so long: the figures of the whole, and what each process counted."""
    jobs = [replace(job, seconds=seconds) for job in jobs]
    leader = place.leader()
    with Loads(jobs) as loads:
        at_s = loads.go()
        _sleep_until(at_s + jobs[0].warm_s)
        before = Reading.of(place, leader)
        _sleep_until(at_s + jobs[0].warm_s + seconds)
        after = Reading.of(place, leader)
        results = loads.stop()
    messages = sum(result["messages"] for result in results)
    servers = {name: after.cpu_s[name] - before.cpu_s[name] for name in after.cpu_s}
    fsyncs, entries = after.fsyncs - before.fsyncs, after.entries - before.entries
    figures = {
        "messages_per_s": round(messages / seconds),
        **quantiles("", [took_ms for result in results for took_ms in result["took_ms"]]),
        "server_cpu_us": _micros(sum(servers.values()), messages),
        "leader_cpu_us": _micros(servers[leader], messages),
        "client_cpu_us": _micros(sum(result["cpu_s"] for result in results), messages),
        "fsyncs_per_1000": round(fsyncs * 1_000 / messages, 1),
        "requests_per_entry": round(sum(result["requests"] for result in results) / max(entries, 1), 1),
        "bytes_per_fsync": round((after.journal_bytes - before.journal_bytes) / max(fsyncs, 1)),
    }
    return figures, results


def quantiles(name: str, values: Sequence[float]) -> Figures:
    """`p50_ms` and `p99_ms` of these milliseconds, with a name before them; nothing where there are none."""
    if not values:
        return {}
    prefix = f"{name}_" if name else ""
    return {f"{prefix}p50_ms": quantile(values, 0.5), f"{prefix}p99_ms": quantile(values, 0.99)}


def quantile(values: Sequence[float], part: float) -> float:
    return round(sorted(values)[round(part * (len(values) - 1))], 3)


def _micros(seconds: float, messages: int) -> float:
    return round(seconds * 1e6 / messages, 1)


def _sleep_until(at_s: float) -> None:
    time.sleep(max(at_s - time.monotonic(), 0.0))


# The disk ------------------------------------------------------------------------------------------------


class Disk:
    """The disk's own part: an fdatasync of so many bytes into a file that was filled before, as the journal does it."""

    def __init__(self, directory: Path) -> None:
        self._file = os.open(directory / "probe", os.O_RDWR | os.O_CREAT, 0o600)
        os.pwrite(self._file, bytes(PROBE_FILL_BYTES), 0)
        os.fsync(self._file)
        self._at = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def sync_ms(self, size_bytes: int, count: int) -> list[float]:
        """What each of `count` syncs took, one after the other, with a breath between as requests have it."""
        data = random.Random(size_bytes).randbytes(size_bytes)
        took_ms = []
        for _ in range(count):
            self._at = self._at + size_bytes if self._at + 2 * size_bytes <= PROBE_FILL_BYTES else 0
            os.pwrite(self._file, data, self._at)
            began_s = time.perf_counter()
            os.fdatasync(self._file)
            took_ms.append((time.perf_counter() - began_s) * 1_000)
            time.sleep(0.0005)
        return took_ms
