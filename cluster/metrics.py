"""A node's numbers in Prometheus's text format, 0.0.4: counters, gauges and histograms with fixed buckets.

No label comes from a user: not a queue's name, not a client's. Label values are class names of the protocol, words of
this file and names of nodes, and a family holds at most SERIES_MAX of them, so a scrape is cheap whatever the queues
hold. What is asked about one queue is answered by `stats`. Kept by the node's one thread: plain numbers, no locks.
"""

import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar, TypeVar

from holdfast.client.protocol.errors import (
    HoldfastError,
    Indeterminate,
    InvariantBroken,
    Misuse,
    ProtocolViolated,
    Refused,
    Unavailable,
)
from holdfast.cluster.events import Role
from holdfast.cluster.health import NodeStatus, role_name
from holdfast.cluster.links import LinkStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SERIES_MAX = 512  # of one family: every command and query with every outcome is about 300
OTHER = "other"  # the labels of whatever comes after that

# From a fast SSD's fsync to a disk that an operator will hear about; the election timeout lies in between.
_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)

_OUTCOMES: dict[type[HoldfastError], str] = {
    Misuse: "misuse",
    Refused: "refused",
    Unavailable: "unavailable",
    Indeterminate: "indeterminate",
    ProtocolViolated: "violated",
    InvariantBroken: "broken",
}


class Family:
    """One metric: its name, what it means, and a number for each combination of its labels."""

    type: ClassVar[str]

    def __init__(self, name: str, means: str, *labels: str) -> None:
        self.name, self.means, self.labels = name, means, labels
        self._values: dict[tuple[str, ...], float] = {}

    def samples(self) -> Iterator[str]:
        for values, number in self._values.items():
            yield _sample(self.name, zip(self.labels, values, strict=True), number)

    def _key(self, values: tuple[str, ...]) -> tuple[str, ...]:
        if values in self._values or len(self._values) < SERIES_MAX:
            return values
        return (OTHER,) * len(values)


class Counter(Family):
    """Only grows. Without labels it is told from the beginning, as 0."""

    type = "counter"

    def __init__(self, name: str, means: str, *labels: str) -> None:
        super().__init__(name, means, *labels)
        if not labels:
            self._values[()] = 0

    def add(self, *values: str, count: int = 1) -> None:
        key = self._key(values)
        self._values[key] = self._values.get(key, 0) + count

    def read(self, total: float, *values: str) -> None:
        """The total of something that is counted elsewhere."""
        self._values[self._key(values)] = total


class Gauge(Family):
    """Goes up and down. Until it is set, it is not told: nobody takes what is unknown for 0."""

    type = "gauge"

    def set(self, number: float, *values: str) -> None:
        self._values[self._key(values)] = number

    def clear(self) -> None:
        self._values.clear()


class Histogram(Family):
    type = "histogram"

    def __init__(self, name: str, means: str, bounds: tuple[float, ...]) -> None:
        super().__init__(name, means)
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)  # one bucket each, the last for what is above all bounds
        self._sum: float = 0

    def observe(self, number: float) -> None:
        self._counts[bisect_left(self._bounds, number)] += 1
        self._sum += number

    def samples(self) -> Iterator[str]:
        total = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield _sample(f"{self.name}_bucket", [("le", bound)], total)
        yield _sample(f"{self.name}_sum", [], self._sum)
        yield _sample(f"{self.name}_count", [], total)


_F = TypeVar("_F", bound=Family)


class Metrics:
    """All of a node's numbers. The shell adds to the public ones as things happen and sets gauges before a scrape."""

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self._proc = proc
        self.families: list[Family] = []
        keep = self._keep
        # Requests
        self._requests = keep(
            Counter(
                "holdfast_requests_total", "Requests answered, by kind and by what came of them.", "kind", "outcome"
            )
        )
        self._answers = keep(
            Counter(
                "holdfast_answers_total", "Requests answered, by the error they were answered with, or none.", "error"
            )
        )
        self.parked_waiters = keep(Gauge("holdfast_parked_waiters", "Lease requests that wait here for a message."))
        self.queued_commands = keep(Gauge("holdfast_queued_commands", "Commands that wait for their log entry."))
        self.queued_bytes = keep(Gauge("holdfast_queued_bytes", "Size of the commands that wait for their log entry."))
        self.connections = keep(Gauge("holdfast_connections", "Open connections of clients."))
        # The log
        self.entries_proposed = keep(
            Counter("holdfast_entries_proposed_total", "Log entries this node proposed as leader.")
        )
        self.entries_applied = keep(Counter("holdfast_entries_applied_total", "Log entries applied to the state."))
        self.commands_per_entry = keep(
            Histogram("holdfast_entry_commands", "Commands in each proposed log entry.", tuple(map(float, _COUNTS)))
        )
        self.fsync_seconds = keep(Histogram("holdfast_fsync_seconds", "Time of each fsync of the journal.", _SECONDS))
        self.apply_seconds = keep(
            Histogram("holdfast_apply_seconds", "Time of each state transaction, commit included.", _SECONDS)
        )
        self.commit_seconds = keep(
            Histogram("holdfast_commit_seconds", "From the proposal of an entry to its being applied here.", _SECONDS)
        )
        self.time_steps = keep(Counter("holdfast_time_steps_total", "TimeStep commands applied (T2)."))
        self._indexes = {
            at: keep(Gauge(f"holdfast_{at}_index", means))
            for at, means in (
                ("applied", "Last log index applied to the state."),
                ("committed", "Last log index known to be committed."),
                ("durable", "Last log index on this node's disk."),
                ("last", "Last log index, on disk or not."),
            )
        }
        # The cluster
        self._info = keep(Gauge("holdfast_node_info", "Who this is; always 1.", "node", "cluster_id", "fsync"))
        self._role = keep(Gauge("holdfast_role", "1 for the role this node has, 0 for the others.", "role"))
        self._term = keep(Gauge("holdfast_term", "The Raft term."))
        self._leader_known = keep(Gauge("holdfast_leader_known", "Whether this node knows who leads."))
        self.elections = keep(Counter("holdfast_elections_total", "Elections this node won."))
        self.leadership_changes = keep(
            Counter(
                "holdfast_leadership_changes_total",
                "Times this node learned of a leader: another one, or another term.",
            )
        )
        self._connected = keep(Gauge("holdfast_peer_connected", "Whether there is a session with this member.", "peer"))
        self._lag = keep(Gauge("holdfast_peer_lag_entries", "Entries a member is behind; on the leader.", "peer"))
        self._sessions = keep(Counter("holdfast_peer_sessions_total", "Sessions that began with this peer.", "peer"))
        self._peer_queued = keep(Gauge("holdfast_peer_queued_bytes", "What waits to be sent to this peer.", "peer"))
        self._skew = keep(
            Gauge(
                "holdfast_clock_skew_milliseconds",
                "How far a node's wall clock is ahead of committed time; on the leader.",
                "node",
            )
        )
        self._time = keep(Gauge("holdfast_committed_time_seconds", "Committed time, as a Unix time."))
        # The disk
        self._journal_bytes = keep(Gauge("holdfast_journal_bytes", "Size of the journal."))
        self._state_bytes = keep(Gauge("holdfast_state_bytes", "Size of the state."))
        self._disk_free = keep(Gauge("holdfast_disk_free_bytes", "Free space where the data is."))
        self._refusing = keep(Gauge("holdfast_refusing_produce", "Whether produce is refused for want of disk space."))
        self.snapshot_age_seconds = keep(
            Gauge("holdfast_snapshot_age_seconds", "Age of the newest snapshot of the state.")
        )
        # This process
        self._started = keep(Gauge("holdfast_start_time_seconds", "When the node started, as a Unix time."))
        self._turn_age = keep(Gauge("holdfast_turn_age_seconds", "Time since the turn loop last came round."))
        self._http = keep(Counter("holdfast_http_requests_total", "HTTP requests answered.", "path", "code"))
        # Under the names that Prometheus's own libraries use, so that existing dashboards find them.
        self._memory = Gauge("process_resident_memory_bytes", "Resident memory.")
        self._fds = Gauge("process_open_fds", "Open file descriptors.")
        self._cpu = Counter("process_cpu_seconds_total", "Processor time, user and system.")
        self.process_families: list[Family] = [self._memory, self._fds, self._cpu]

    def answered(self, kind: str, error: HoldfastError | None, count: int = 1) -> None:
        """Requests were answered. `kind` is the class name of the command or query, nothing a client chose."""
        self._requests.add(kind, _outcome(error), count=count)
        self._answers.add("none" if error is None else type(error).__name__, count=count)

    def http_answered(self, path: str, code: int) -> None:
        """`path` is one of those served, or a fixed word for all others."""
        self._http.add(path, str(code))

    def use_status(self, status: NodeStatus) -> None:
        """Set what a status knows; call it before `render`."""
        for at, gauge in self._indexes.items():
            gauge.set(getattr(status, at))
        for gauge in (self._info, self._role, self._connected, self._lag, self._skew):
            gauge.clear()
        self._info.set(1, status.node, status.cluster_id, status.fsync)
        for role in Role:
            self._role.set(int(role == status.role), role_name(role))
        self._term.set(status.term)
        self._leader_known.set(int(status.leader is not None))
        for member in status.members:
            if member.name == status.node:
                continue
            self._connected.set(int(member.connected), member.name)
            if member.lag is not None:
                self._lag.set(member.lag, member.name)
        for node, skew_ms in status.skew_ms.items():
            self._skew.set(skew_ms, node)
        self._time.set(status.time_ms / 1000)
        self._journal_bytes.set(status.journal_bytes)
        self._state_bytes.set(status.state_bytes)
        self._disk_free.set(status.disk_free_bytes)
        self._refusing.set(int(status.refusing_produce))
        self._started.set(status.started_ms / 1000)
        self._turn_age.set(status.turn_age_ms / 1000)

    def use_links(self, links: Iterable[LinkStatus]) -> None:
        """Set what the links know; call it before `render`."""
        self._peer_queued.clear()
        for link in links:
            self._sessions.read(link.session_count, link.peer)
            self._peer_queued.set(link.queued_bytes if link.connected else 0, link.peer)

    def render(self) -> str:
        """The page of a scrape, with the CONTENT_TYPE."""
        families = self.families + (self.process_families if self._read_process() else [])
        return "".join(line for family in families for line in _lines(family))

    def _keep(self, family: _F) -> _F:
        self.families.append(family)
        return family

    def _read_process(self) -> bool:
        """Whether the system tells about this process: Linux does."""
        try:
            pages = int((self._proc / "statm").read_text().split()[1])
            # The command's name, in parentheses, may hold spaces and parentheses of its own.
            times = (self._proc / "stat").read_text().rpartition(")")[2].split()[11:13]
            fd_count = len(os.listdir(self._proc / "fd"))
        except OSError:
            return False
        self._memory.set(pages * os.sysconf("SC_PAGE_SIZE"))
        self._fds.set(fd_count)
        self._cpu.read(sum(map(int, times)) / os.sysconf("SC_CLK_TCK"))
        return True


def _outcome(error: HoldfastError | None) -> str:
    if error is None:
        return "done"
    return next((word for family, word in _OUTCOMES.items() if isinstance(error, family)), OTHER)


def _lines(family: Family) -> Iterator[str]:
    means = family.means.replace("\\", "\\\\").replace("\n", "\\n")
    yield f"# HELP {family.name} {means}\n# TYPE {family.name} {family.type}\n"
    yield from family.samples()


def _sample(name: str, labels: Iterable[tuple[str, str]], number: float) -> str:
    inside = ",".join(f'{label}="{_escaped(value)}"' for label, value in labels)
    return f"{name}{{{inside}}} {number!r}\n" if inside else f"{name} {number!r}\n"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
