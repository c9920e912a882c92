"""The leader's half of replication: what each peer is sent, what its answers count for, and which reads are through.

The library decides what is committed; this feeds it acknowledgements of this leadership only, and of nothing that is
not on our own disk too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.client.protocol.errors import StateBroken
from holdfast.cluster.elections import Timing
from holdfast.cluster.events import SnapshotNeeded
from holdfast.cluster.journal import Journal
from holdfast.cluster.messages import ENTRIES_PER_MESSAGE, AppendEntries, AppendReply, LogEntry
from holdfast.cluster.outbox import Outbox
from holdfast.cluster.replication import Barriers, Progress

if TYPE_CHECKING:
    from holdfast.cluster.raft import Library

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """How much goes to one peer: per message, and unacknowledged in all (R20)."""

    batch_bytes: int = 262_144
    in_flight_bytes: int = 8_388_608


class Leading:
    """What a leader knows beside the library. It is there also while another leads, and then only waits."""

    def __init__(
        self,
        library: "Library",
        journal: Journal,
        outbox: Outbox,
        clock: Clock,
        timing: Timing,
        window: Window,
        wants_snapshot: Callable[[SnapshotNeeded], None],
    ) -> None:
        self.progress: dict[str, Progress] = {}
        self.barriers = Barriers()
        self.walls: dict[str, tuple[int, float]] = {}  # peer -> its wall clock, when by our clock it said so (T2)
        self.flush_began_s: float | None = None
        self._library, self._journal, self._outbox = library, journal, outbox
        self._clock, self._timing, self._window = clock, timing, window
        self._wants_snapshot = wants_snapshot
        self._epoch = 0
        self._elected_lsn = 0

    def begin(self) -> None:
        """A leadership begins: what peers have and what they echoed is unknown again."""
        self._elected_lsn = self._journal.lsn
        self.progress = {peer: Progress(self._new_epoch()) for peer in self._library.peers}

    def members_changed(self) -> None:
        self.progress = {peer: self.progress.get(peer) or Progress(self._new_epoch()) for peer in self._library.peers}

    def reconnected(self, peer: str) -> None:
        progress = self.progress[peer]
        progress.restart(self._new_epoch())
        if progress.acked:  # what was on its way is lost; while no match is known, the peer's answer will tell
            self._library.set_next_index(peer, progress.acked + 1)

    def synced(self) -> None:
        """Our own disk has caught up: raise what had to wait for it."""
        for peer, progress in self.progress.items():
            self._library.raise_match(peer, self._creditable(progress))

    def committed(self) -> int:
        """Committed, and on our own disk: a sole voter "commits" before that, and nobody must believe it (R8)."""
        return min(self._library.commit_index, self._journal.durable_index)

    def caught_up(self, peer: str) -> bool:
        """Everything was sent, and what is not acknowledged yet fits into one window."""
        everything_sent = self._library.next_index(peer) == self._journal.last + 1
        return self._library.is_connected(peer) and self.progress[peer].acked > 0 and everything_sent

    # Sending

    def heartbeat(self) -> None:
        self._library.heartbeat_due_s = self._clock() + self._timing.heartbeat_s
        self.barriers.unannounced = False
        for peer in self._library.peers:
            self.replicate(peer, heartbeat=True)

    def push(self) -> None:
        for peer in self._library.peers:
            self._send_more(peer)

    def _send_more(self, peer: str) -> None:
        if self._library.next_index(peer) <= self._journal.last:
            self.replicate(peer, heartbeat=False)

    def replicate(self, peer: str, heartbeat: bool) -> None:
        """Send what this peer lacks within its window, or, if that is nothing, a heartbeat where one is due."""
        library, progress, journal = self._library, self.progress[peer], self._journal
        if not library.is_connected(peer) or self._silent():
            return
        next_index = library.next_index(peer)
        if next_index <= journal.base:
            if not progress.wants_snapshot:
                progress.restart(self._new_epoch())  # the answer to the snapshot can be told from all before it
                progress.wants_snapshot = True
                self._wants_snapshot(SnapshotNeeded(peer, progress.epoch))
            if heartbeat:
                self._append(peer, progress, None, ())
            return
        while next_index <= journal.last and progress.in_flight_bytes < self._window.in_flight_bytes:
            entries, size_bytes = journal.read(next_index, self._window.batch_bytes)
            self._append(peer, progress, next_index - 1, tuple(entries[:ENTRIES_PER_MESSAGE]))
            next_index += min(len(entries), ENTRIES_PER_MESSAGE)
            progress.sent(next_index - 1, size_bytes)
            heartbeat = False
        library.set_next_index(peer, next_index)
        if heartbeat:
            self._append(peer, progress, next_index - 1, ())

    def _silent(self) -> bool:
        """Whether a leader must not be heard."""
        # A leader whose disk hangs commits nothing; heartbeats would only keep another from leading (R28).
        if self.flush_began_s is not None and self._clock() - self.flush_began_s > self._timing.election_max_s:
            return True
        # A sole voter elects itself before its term is on disk. If it sent that term to a learner and crashed, it
        # would lead again in the same term, with other entries.
        return self._journal.durable_lsn < self._elected_lsn

    def _append(self, peer: str, progress: Progress, prev_index: int | None, entries: tuple[LogEntry, ...]) -> None:
        prev_term = 0 if prev_index is None else self._journal.term_at(prev_index)
        if prev_term is None:
            raise StateBroken(problem=f"{peer} is to be sent what follows {prev_index}, which the log does not have")
        term, commit_index, newest = self._library.term, self.committed(), self.barriers.newest
        message = AppendEntries(term, commit_index, prev_index, prev_term, entries, progress.epoch, newest)
        self._outbox.send_now(peer, message)

    # Answers

    def on_reply(self, peer: str, reply: AppendReply) -> None:
        """An answer of the present term, to us who lead in it."""
        library, progress = self._library, self.progress[peer]
        library.heard(peer, self._clock())
        self.walls[peer] = (reply.wall_ms, self._clock())
        received = min(reply.next_index - 1, self._journal.last)
        if reply.reset:
            if reply.epoch == progress.epoch:  # else it answers what was sent before the present attempt (R11)
                progress.restart(self._new_epoch())
                library.set_next_index(peer, received + 1)
        else:
            progress.received(received)
        if reply.success:
            self._matched(peer, progress, received, reply.epoch)
        elif progress.wants_snapshot and reply.epoch == progress.epoch and received:
            # It has the snapshot, and counts as no copy yet: a repaired node, whose promise reaches further.
            progress.wants_snapshot = False
            library.set_next_index(peer, received + 1)
        progress.barrier = max(progress.barrier, reply.barrier)
        self._send_more(peer)

    def _matched(self, peer: str, progress: Progress, index: int, epoch: int) -> None:
        library = self._library
        progress.acked = max(progress.acked, index)
        before = library.next_index(peer)
        library.matched(peer, self._creditable(progress))
        library.set_next_index(peer, max(before, library.next_index(peer)))  # what is in flight stays sent (R10)
        # The log may have been cut behind the snapshot while it travelled: then another one is needed.
        if progress.wants_snapshot and (epoch == progress.epoch or progress.acked >= self._journal.base):
            progress.wants_snapshot = False
            library.set_next_index(peer, progress.acked + 1)

    def _creditable(self, progress: Progress) -> int:
        """What the library may count as matched: never more than we have on disk ourselves (R8)."""
        return min(progress.acked, self._journal.durable_index)

    def _new_epoch(self) -> int:
        self._epoch += 1
        return self._epoch
