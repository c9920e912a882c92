"""A simulated node: the real `Raft`, `Journal` and `Segments` of each of its logs, and the turns that drive them.

The order inside a turn is the one that `holdfast.cluster.consensus` asks for; a real node's is the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from holdfast.cluster import membership, messages
from holdfast.cluster.elections import Timing
from holdfast.cluster.events import BecameLeader, Role, SnapshotNeeded
from holdfast.cluster.journal import Flush, Journal
from holdfast.cluster.journal_errors import JournalFailed
from holdfast.cluster.journal_frames import Identity
from holdfast.cluster.leading import Window
from holdfast.cluster.messages import CHUNK_BYTES, Message, SnapshotChunk, SnapshotDone, SnapshotHead
from holdfast.cluster.raft import Raft
from holdfast.cluster.segments import Segments
from holdfast.jepsen.simulation.checker import Checker
from holdfast.jepsen.simulation.disk import MemoryDisk
from holdfast.jepsen.simulation.network import Network
from holdfast.jepsen.simulation.scheduler import DriftingClock, Scheduler
from holdfast.jepsen.simulation.state import State

TICK_S = 0.01
CRASH_IN_INSTALL = 0.05
_WINDOW = Window(batch_bytes=400, in_flight_bytes=4_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Small, so that windows fill, segments roll and entries leave memory within seconds."""

    window: Window = _WINDOW
    segment_bytes: int = 32_768
    journal_window_bytes: int = 8_192
    snapshot_chance: float = 0.02  # of a turn


class Replica:
    """One log on one node. What outlives a crash: the disk's files and the last durable snapshot."""

    def __init__(self, host: "Host", log: int, checker: Checker, state: State) -> None:
        self.host, self.log, self.checker = host, log, checker
        self.state = state
        self.snapshot = state.copied()  # fsynced
        self.raft: Raft
        self.journal: Journal
        self._segments: Segments
        self._flight: Flush | None = None
        self._waiters: dict[int, tuple[int, Callable[..., None] | None]] = {}
        self._receiving: dict[str, tuple[SnapshotHead, bytes]] = {}
        self._rng = Random(f"{host.rng.random()} {log}")

    def boot(self) -> None:
        directory = f"log{self.log}"
        disk, bytes_max = self.host.disk, self.host.sizes.segment_bytes
        if disk.names(directory):
            self._segments = Segments.open(directory, disk=disk, segment_bytes=bytes_max)
        else:
            identity = Identity(cluster_id="simulated", node=self.host.name, incarnation=1)
            self._segments = Segments.create(directory, identity, disk=disk, segment_bytes=bytes_max)
        self.journal = Journal.recovered(
            self._segments.recovered,
            self._segments.read_entries,
            window_bytes=self.host.sizes.journal_window_bytes,
        )
        self.raft = Raft(
            me=self.host.name,
            journal=self.journal,
            clock=self.host.clock,
            rng=Random(self._rng.random()),
            applied=self.state.index,
            applied_term=self.state.term,
            configuration=self.state.configuration,
            configuration_index=self.state.configuration_index,
            timing=Timing(),
            window=self.host.sizes.window,
        )
        self._flight = None
        self._waiters.clear()
        self._receiving.clear()

    def crash(self, power: bool) -> None:
        """The flush in flight leaves any prefix of its bytes; without power the state goes back to its snapshot."""
        if self._flight is not None:
            disk = self.host.disk
            disk.cut_after(self._rng.randint(0, len(self._flight.records) + 64))
            try:
                self._segments.write(self._flight)
            except JournalFailed:
                self.checker.counts["torn flushes"] += 1
            disk.restore()
        self._segments.close()
        if power:
            self.state = self.snapshot.copied()

    # Turns

    def turn(self) -> None:
        raft = self.raft
        raft.step()
        self._apply()
        for event in raft.take_events():
            match event:
                case BecameLeader(term=term):
                    self.checker.elected(self.host.name, term)
                case SnapshotNeeded(peer=peer, epoch=epoch):
                    copying_s = 0.4 * self._rng.random()
                    self.host.later(copying_s, partial(self._send_snapshot, peer, epoch, raft.term))
        flush = raft.begin_flush()
        if flush is not None:
            self._flight = flush
            delay_s = (0.001 + 0.004 * self._rng.random()) * self.host.disk_slowness
            self.host.later(delay_s, lambda: self._flushed(flush))
        for peer, message in raft.take_ready():
            self._send(peer, message)

    def _send(self, peer: str, message: Message) -> None:
        self.host.network.send(self.host.name, peer, messages.encode(message, self.log))

    def _flushed(self, flush: Flush) -> None:
        self._segments.write(flush)
        self._flight = None
        self.raft.durable(flush.lsn)
        self.turn()

    def _apply(self) -> None:
        raft, state, upto = self.raft, self.state, self.raft.committed()
        while state.index < upto:
            entries, _ = self.journal.read(state.index + 1, 65_536)
            for command, index, term in entries[: upto - state.index]:
                answers = state.apply(index, term, command)
                self.checker.applied(self.host.name, index, term, command, state.digest())
                waiting, answered = self._waiters.pop(index, (0, None))
                if waiting == term:
                    self.checker.acknowledge(index, term)
                    if answered is not None:
                        answered(answers)
        raft.set_applied(state.index)
        if state.index > self.snapshot.index and self._rng.random() < self.host.sizes.snapshot_chance:
            self._take_snapshot()

    def _take_snapshot(self) -> None:
        self.snapshot = self.state.copied()
        keep = self._rng.randint(0, 60)
        if self._rng.random() < 0.5 and self.snapshot.index - keep > self.journal.base:
            self.checker.counts["compactions"] += 1
            self.raft.compact(self.snapshot.index - keep)
            self._segments.drop_before(self.journal.base)

    # Clients

    def propose(self, command: bytes, answered: Callable[..., None] | None = None) -> None:
        proposed = self.raft.propose(command)
        if proposed is not None:
            self._waiters[proposed[0]] = (proposed[1], answered)

    def read(self) -> None:
        needed = self.checker.newest_acknowledged

        def through(index: int | None) -> None:
            if index is not None:
                self.checker.read(self.host.name, index, needed)

        self.raft.read_barrier(through)

    @property
    def leads(self) -> bool:
        return self.raft.role == Role.LEADER

    # Messages

    def receive(self, peer: str, message: Message) -> None:
        match message:
            case SnapshotHead():
                if self.raft.accepts_snapshot(peer, message):
                    self._receiving[peer] = (message, b"")
            case SnapshotChunk(epoch=epoch, offset=offset, data=data):
                head, have = self._receiving.get(peer, (None, b""))
                if head is not None and head.epoch == epoch and len(have) == offset:
                    self._receiving[peer] = (head, have + data)
            case SnapshotDone(epoch=epoch):
                head, have = self._receiving.pop(peer, (None, b""))
                if head is not None and head.epoch == epoch and len(have) == head.size_bytes:
                    self._install(peer, head, have)
            case _:
                self.raft.deliver(peer, message)
        if self.host.up:
            self.turn()

    def _send_snapshot(self, peer: str, epoch: int, term: int) -> None:
        """A copy stands for the bytes of a state; what travels in the chunks is the number under which it is kept."""
        state, raft = self.state.copied(), self.raft
        if not self.leads or raft.term != term:
            return
        self.checker.counts["snapshots sent"] += 1
        self.host.kept_snapshots.append(state)
        data = b"%d" % (len(self.host.kept_snapshots) - 1) + bytes(self._rng.randint(0, 3) * CHUNK_BYTES)
        configuration_index, configuration = raft.configuration_at(state.index)
        head = SnapshotHead(
            term=term,
            index=state.index,
            index_term=state.term,
            epoch=epoch,
            configuration_index=configuration_index,
            size_bytes=len(data),
            digest=bytes(32),
            configuration=membership.encode(configuration),
        )
        self._send(peer, head)
        for offset in range(0, len(data), CHUNK_BYTES):
            self._send(peer, SnapshotChunk(epoch, offset, data[offset : offset + CHUNK_BYTES]))
        self._send(peer, SnapshotDone(epoch, state.index))

    def _install(self, peer: str, head: SnapshotHead, data: bytes) -> None:
        state = self.host.kept_snapshots[int(data.rstrip(b"\0"))].copied()
        if state.index > self.state.index:
            self.checker.counts["snapshots installed"] += 1
            self.checker.same_state(self.host.name, state.index, state.digest())
            self.state, self.snapshot = state, state.copied()
            self._waiters.clear()
            if self._rng.random() < CRASH_IN_INSTALL:
                self.checker.counts["crashes in install"] += 1
                self.host.restart(power=False)
                return
        self.raft.snapshot_installed(peer, head)

    def disconnected(self, peer: str) -> None:
        self._receiving.pop(peer, None)
        self.raft.disconnected(peer)


class Host:
    """A node: its logs, its one disk, its clock and its sessions. Down, it has only the disk."""

    def __init__(
        self, name: str, network: Network, scheduler: Scheduler, rng: Random, sizes: Sizes, kept_snapshots: list[State]
    ) -> None:
        self.name, self.network, self.rng, self.sizes = name, network, rng, sizes
        self.disk = MemoryDisk()
        self.up = False
        self.sessions: dict[str, int] = {}
        self.replicas: dict[int, Replica] = {}
        self.disk_slowness = 1.0
        self.clock = DriftingClock(scheduler, 1.0)
        self.kept_snapshots = kept_snapshots
        self._scheduler = scheduler
        self._life = 0
        self._paused_until_s = 0.0

    def boot(self) -> None:
        if self.up:
            return
        self.up = True
        self._life += 1
        # Drift within what a crystal and its worst neighbour do would never be seen; this is far beyond.
        self.clock = DriftingClock(self._scheduler, self.rng.uniform(0.95, 1.05))
        self._each(Replica.boot)
        self.network.join(self.name)
        self.later(self.rng.random() * TICK_S, self._tick)

    def crash(self, power: bool) -> None:
        """Killed, the sockets close at once; without power, the peers find out by themselves."""
        if not self.up:
            return
        self.up = False
        self._life += 1
        self._paused_until_s = 0.0
        self.sessions.clear()
        for replica in self.replicas.values():
            replica.crash(power)
        for peer in self.network.ends:
            if peer != self.name:
                delay_s = self.rng.random() if power else 0.0
                session = self.network.ends[peer].sessions.get(self.name)
                self._scheduler.after(delay_s, partial(self._found_dead, peer, session))

    def restart(self, power: bool) -> None:
        """Crash, and be back within two seconds."""
        self.crash(power)
        self._scheduler.after(2 * self.rng.random(), self.boot)

    def _found_dead(self, peer: str, session: int | None) -> None:
        if session is not None and self.network.ends[peer].sessions.get(self.name) == session:
            self.network.end_side(peer, self.name)

    def pause(self, seconds: float) -> None:
        """Stopped like a process by SIGSTOP: everything that happens to it waits."""
        self._paused_until_s = self._scheduler.now_s + seconds

    def run(self, action: Callable[[], object]) -> None:
        """Let this node's code run, with its own clock, once it is awake."""
        wait_s = self._paused_until_s - self._scheduler.now_s
        if wait_s > 0:
            self.later(wait_s, action)
            return
        former, self._scheduler.running = self._scheduler.running, self.clock
        try:
            action()
        finally:
            self._scheduler.running = former

    def later(self, delay_s: float, action: Callable[[], object]) -> None:
        """The same after a while, unless the node has died since."""
        life = self._life
        self._scheduler.after(delay_s, lambda: self.run(action) if life == self._life else None)

    def _each(self, action: Callable[[Replica], None]) -> None:
        for replica in self.replicas.values():
            self.run(partial(action, replica))

    def _tick(self) -> None:
        self._each(Replica.turn)
        self.later(TICK_S, self._tick)

    def connected(self, peer: str) -> None:
        self._each(lambda replica: replica.raft.connected(peer))

    def disconnected(self, peer: str) -> None:
        self._each(lambda replica: replica.disconnected(peer))

    def receive(self, peer: str, session: int, data: bytes) -> None:
        def take() -> None:
            if self.sessions.get(peer) == session:
                log, message = messages.decode(data)
                self.replicas[log].receive(peer, message)

        self.run(take)
