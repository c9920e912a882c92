"""A simulated node: the real `Replica`, `Raft`, `Journal` and `Segments` of each of its logs, and what drives them.

What happens around a turn, and in which order, is what `holdfast.cluster.node` does; disk, peers, clients, clocks and
snapshots are simulated.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from holdfast.client.protocol.errors import HoldfastError
from holdfast.client.protocol.messages import Inquiry, Request, Withdraw
from holdfast.client.protocol.replies import Answer
from holdfast.cluster import membership, messages
from holdfast.cluster.connection import Asked, Connection
from holdfast.cluster.elections import Timing
from holdfast.cluster.events import BecameLeader, Event, SnapshotNeeded
from holdfast.cluster.journal import Entry, Flush, Journal
from holdfast.cluster.journal_errors import JournalFailed
from holdfast.cluster.journal_frames import Identity
from holdfast.cluster.leading import Window
from holdfast.cluster.messages import CHUNK_BYTES, Message, SnapshotChunk, SnapshotDone, SnapshotHead
from holdfast.cluster.raft import Raft
from holdfast.cluster.replica import Replica
from holdfast.cluster.segments import Segments
from holdfast.cluster.state import Reached
from holdfast.jepsen.simulation.checker import Checker, Violation
from holdfast.jepsen.simulation.disk import MemoryDisk
from holdfast.jepsen.simulation.network import Network
from holdfast.jepsen.simulation.scheduler import DriftingClock, Scheduler
from holdfast.jepsen.simulation.state import MachineState
from holdfast.jepsen.simulation.wire import Wire
from holdfast.storage.machine import Applied

TICK_S = 0.01
WAKE_S = 0.0005  # from the first thing that comes to the turn that takes it, with what has come besides
DRIFT = 0.05  # what a crystal and its worst neighbour do would never be seen; this is far beyond
CRASH_IN_INSTALL = 0.05
_WINDOW = Window(batch_bytes=400, in_flight_bytes=4_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Small, so that windows fill, segments roll and entries leave memory within seconds."""

    window: Window = _WINDOW
    segment_bytes: int = 32_768
    journal_window_bytes: int = 8_192
    snapshot_chance: float = 0.02  # of a turn that applied something


@dataclass(frozen=True, slots=True)
class Asking:
    """One request of one connection."""

    wire: Wire
    request_id: int


class HostedLog:
    """One log on one node. What outlives a crash: the disk's files and the last durable snapshot."""

    def __init__(self, host: "Host", log: int, checker: Checker, first: Reached) -> None:
        self.host, self.log, self.checker = host, log, checker
        self.state = MachineState(first, self._applied)
        self.snapshot = self.state.copied()  # fsynced
        self.replica: Replica
        self.wires: dict[Wire, None] = {}
        self.asked: dict[Asking, tuple[Request | Inquiry, float]] = {}  # that have no outcome yet, with when they came
        self._segments: Segments
        self._flight: Flush | None = None
        self._woken = False
        self._receiving: dict[str, tuple[SnapshotHead, bytes]] = {}
        self._rng = Random(f"{host.rng.random()} {log}")

    @property
    def raft(self) -> Raft:
        assert isinstance(self.replica.raft, Raft)
        return self.replica.raft

    @property
    def leads(self) -> bool:
        return self.replica.leads

    def boot(self) -> None:
        directory, host = f"log{self.log}", self.host
        disk, bytes_max = host.disk, host.sizes.segment_bytes
        if disk.names(directory):
            self._segments = Segments.open(directory, disk=disk, segment_bytes=bytes_max)
        else:
            identity = Identity(cluster_id="simulated", node=host.name, incarnation=1)
            self._segments = Segments.create(directory, identity, disk=disk, segment_bytes=bytes_max)
        journal = Journal.recovered(
            self._segments.recovered, self._segments.read_entries, window_bytes=host.sizes.journal_window_bytes
        )
        reached = self.state.reached
        raft = Raft(
            me=host.name,
            journal=journal,
            clock=host.clock,
            rng=Random(self._rng.random()),
            applied=reached.index,
            applied_term=reached.term,
            configuration=reached.configuration,
            configuration_index=reached.configuration_index,
            wall_ms=host.wall_ms,
            timing=Timing(),
            window=host.sizes.window,
        )
        self.replica = Replica(raft=raft, state=self.state, clock=host.clock, wall_ms=host.wall_ms)
        self._flight = None
        self._woken = False
        self._receiving.clear()

    def crash(self, power: bool) -> None:
        """The flush in flight leaves any prefix of its bytes. Without power what was not synced may be gone, too, and
        the state, which never is, goes back to its snapshot."""
        disk = self.host.disk
        if self._flight is not None:
            disk.cut_after(self._rng.randint(0, len(self._flight.records) + 64))
            try:
                self._segments.write(self._flight)
            except JournalFailed:
                self.checker.counts["torn flushes"] += 1
            disk.restore()
        self._segments.close()
        if power:
            self.state.become(self.snapshot)
        for wire in self.wires:
            wire.died(0.01 * self._rng.random() if not power else self._rng.choice((None, self._rng.random())))
        self.wires.clear()
        self.asked.clear()

    # Turns

    def wake(self) -> None:
        if not self._woken:
            self._woken = True
            self.host.later(WAKE_S * self._rng.random(), self.turn)

    def turn(self) -> None:
        self._woken = False
        before, index = self.raft.journal.last, self.state.reached.index
        turn = self.replica.turn()
        if self.leads:
            self.checker.formed(range(before + 1, self.raft.journal.last + 1), self.raft.term)
        if turn.flush is not None:
            self._begin_flush(turn.flush)
        for peer, message in turn.messages:
            self._send(peer, message)
        for token, outcome in turn.outcomes:
            assert isinstance(token, Asking)
            self._finish(token, outcome)
        for event in turn.events:
            self._note(event)
        if turn.again:
            self.wake()
        if self.replica.damage is not None:
            raise Violation(f"{self.host.name} found damage where nothing was damaged: {self.replica.damage}")
        if self.state.reached.index > index and self._rng.random() < self.host.sizes.snapshot_chance:
            self._take_snapshot()

    def _begin_flush(self, flush: Flush) -> None:
        self._flight = flush
        delay_s = (0.001 + 0.004 * self._rng.random()) * self.host.disk_slowness
        self.host.later(delay_s, lambda: self._flushed(flush))

    def _flushed(self, flush: Flush) -> None:
        self._segments.write(flush)
        self._flight = None
        self.replica.durable(flush.lsn)
        self.wake()

    def _finish(self, asking: Asking, outcome: Answer | HoldfastError) -> None:
        asked, _ = self.asked.pop(asking, (None, 0.0))
        if asked is not None:
            self.checker.gave(self.state.reached.index, asked, outcome)
            asking.wire.finish(asking.request_id, outcome)
        elif asking.wire.server is not None:
            raise Violation(f"{self.host.name} gave a second outcome for request {asking.request_id}: {outcome}")

    def _note(self, event: Event) -> None:
        match event:
            case BecameLeader(term=term):
                self.checker.elected(self.host.name, term)
            case SnapshotNeeded(peer=peer, epoch=epoch):
                copying_s = 0.4 * self._rng.random()
                self.host.later(copying_s, partial(self._send_snapshot, peer, epoch, self.raft.term))
            case _:
                pass

    def _applied(self, entry: Entry, applied: Applied, digest: bytes) -> None:
        self.checker.applied(self.host.name, entry, applied.answers, digest)

    def _take_snapshot(self) -> None:
        self.snapshot = self.state.copied()
        keep, index = self._rng.randint(0, 60), self.snapshot.reached.index
        if self._rng.random() < 0.5 and index - keep > self.raft.journal.base:
            self.checker.counts["compactions"] += 1
            self.raft.compact(index - keep)
            self._segments.drop_before(self.raft.journal.base)

    # Clients

    def ask(self, wire: Wire, asked: Asked, size_bytes: int) -> None:
        token = Asking(wire, asked.request_id)
        if isinstance(asked, Withdraw):
            self.replica.withdraw(token)
            self.wake()
            return
        self.asked[token] = (asked, self.checker.scheduler.now_s)
        if isinstance(asked, Request):
            self.replica.request(token, wire, asked, size_bytes)
        else:
            self.replica.inquire(token, asked, asked.query)  # type: ignore[arg-type]  # none asks for a node's status
        self.wake()

    def gone(self, wire: Wire, server: Connection) -> None:
        """A client's connection is over."""
        tokens = [Asking(wire, request_id) for request_id in sorted(server.open_requests)]
        self.replica.abandon(tokens)
        for token in tokens:
            self.asked.pop(token, None)
        self.wires.pop(wire, None)

    # Peers

    def _send(self, peer: str, message: Message) -> None:
        self.host.network.send(self.host.name, peer, messages.encode(message, self.log))

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
                self.replica.deliver(peer, message)
        if self.host.up:
            self.wake()

    def _send_snapshot(self, peer: str, epoch: int, term: int) -> None:
        """A copy stands for the bytes of a state; what travels in the chunks is the number under which it is kept."""
        state, raft = self.state.copied(), self.raft
        if not self.leads or raft.term != term:
            return
        self.checker.counts["snapshots sent"] += 1
        self.host.kept_snapshots.append(state)
        data = b"%d" % (len(self.host.kept_snapshots) - 1) + bytes(self._rng.randint(0, 3) * CHUNK_BYTES)
        index = state.reached.index
        configuration_index, configuration = raft.configuration_at(index)
        head = SnapshotHead(
            term=term,
            index=index,
            index_term=state.reached.term,
            epoch=epoch,
            configuration_index=configuration_index,
            size_bytes=len(data),
            digest=bytes(32),
            configuration=membership.encode(configuration),
        )
        self._send(peer, head)
        for offset in range(0, len(data), CHUNK_BYTES):
            self._send(peer, SnapshotChunk(epoch, offset, data[offset : offset + CHUNK_BYTES]))
        self._send(peer, SnapshotDone(epoch, index))

    def _install(self, peer: str, head: SnapshotHead, data: bytes) -> None:
        state = self.host.kept_snapshots[int(data.rstrip(b"\0"))]
        if state.reached.index > self.state.reached.index:
            self.checker.counts["snapshots installed"] += 1
            self.checker.same_state(self.host.name, state.reached.index, state.digest())
            self.state.become(state)
            self.snapshot = state.copied()
            if self._rng.random() < CRASH_IN_INSTALL:
                self.checker.counts["crashes in install"] += 1
                self.host.restart(power=False)
                return
        self.raft.snapshot_installed(peer, head)
        self.replica.installed()

    def connected(self, peer: str) -> None:
        self.replica.connected(peer)
        self.wake()

    def disconnected(self, peer: str) -> None:
        self._receiving.pop(peer, None)
        self.raft.disconnected(peer)
        self.wake()


class Host:
    """A node: its logs, its one disk, its clocks and its sessions. Down, it has only the disk."""

    def __init__(
        self,
        name: str,
        network: Network,
        scheduler: Scheduler,
        rng: Random,
        sizes: Sizes,
        kept_snapshots: list[MachineState],
    ) -> None:
        self.name, self.network, self.rng, self.sizes = name, network, rng, sizes
        self.disk = MemoryDisk()
        self.up = False
        self.sessions: dict[str, int] = {}
        self.logs: dict[int, HostedLog] = {}
        self.disk_slowness = 1.0
        self.clock = DriftingClock(scheduler, 1.0)
        self.wall_error_ms = rng.randint(-50, 50)
        self.kept_snapshots = kept_snapshots
        self.lost_bytes = 0
        self._scheduler = scheduler
        self._life = 0
        self._paused_until_s = 0.0
        self._waiting: deque[Callable[[], object]] = deque()  # for the end of a pause

    def wall_ms(self) -> int:
        return self._scheduler.wall_ms + self.wall_error_ms

    def boot(self) -> None:
        if self.up:
            return
        self.up = True
        self._life += 1
        self.clock = DriftingClock(self._scheduler, self.rng.uniform(1 - DRIFT, 1 + DRIFT))
        self._each(HostedLog.boot)
        self.network.join(self.name)
        self.later(self.rng.random() * TICK_S, self._tick)

    def crash(self, power: bool) -> None:
        """Killed, the sockets close at once; without power, the peers find out by themselves."""
        if not self.up:
            return
        self.up = False
        self._life += 1
        self._paused_until_s = 0.0
        self._waiting.clear()
        self.sessions.clear()
        for log in self.logs.values():
            log.crash(power)
        if power:
            self.lost_bytes += self.disk.lose_power(self.rng)
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
        """Stopped like a process by SIGSTOP: everything that happens to it waits, and comes then in its order."""
        self._paused_until_s = self._scheduler.now_s + seconds
        life = self._life
        self._scheduler.at(self._paused_until_s, lambda: self._wake_up() if life == self._life else None)

    def _wake_up(self) -> None:
        if self._scheduler.now_s < self._paused_until_s:
            return  # paused again meanwhile
        life = self._life
        while self._waiting and life == self._life:
            self.run(self._waiting.popleft())

    def run(self, action: Callable[[], object]) -> None:
        """Let this node's code run, with its own clock, once it is awake."""
        if self._scheduler.now_s < self._paused_until_s:
            self._waiting.append(action)
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

    def _each(self, action: Callable[[HostedLog], None]) -> None:
        for log in self.logs.values():
            self.run(partial(action, log))

    def _tick(self) -> None:
        self._each(HostedLog.turn)
        self.later(TICK_S, self._tick)

    def connected(self, peer: str) -> None:
        self._each(lambda log: log.connected(peer))

    def disconnected(self, peer: str) -> None:
        self._each(lambda log: log.disconnected(peer))

    def receive(self, peer: str, session: int, data: bytes) -> None:
        def take() -> None:
            if self.sessions.get(peer) == session:
                log, message = messages.decode(data)
                self.logs[log].receive(peer, message)

        self.run(take)
