"""One log's consensus, without I/O: what the library may see and what may leave, guard by guard.

`leading.py` has the leader's half, `following.py` the others'; here they are put together with the library.

Nothing here reads a clock, draws a random number or waits: those are given in. Whoever owns a `Raft` runs its turns:

    deliver every frame that has come; propose; push; step; apply up to `committed()`, set_applied;
    give `begin_flush()` to the disk; hand `take_ready()` to the peers' senders.

Frames come first, so that a process that was paused hears the waiting heartbeats before it looks at its timers. An
exception out of any method means that this node's promises can no longer be kept: the process ends (R26).
"""

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from holdfast.client.protocol.errors import BatchTooLarge, StateBroken
from holdfast.cluster import membership
from holdfast.cluster.elections import Elections, Timing
from holdfast.cluster.events import BecameLeader, Event, LeaderChanged, LostLeadership, Role
from holdfast.cluster.following import Following
from holdfast.cluster.journal import Flush, Journal
from holdfast.cluster.leading import Clock, Leading, Window
from holdfast.cluster.membership import CONFIGURATION, Configuration, ConfigurationRefused, Configurations
from holdfast.cluster.messages import (
    ENTRY_BYTES,
    AppendEntries,
    AppendReply,
    Message,
    PreVote,
    PreVoteReply,
    RequestVote,
    SnapshotHead,
    StaleTerm,
    TimeoutNow,
    VoteGranted,
)
from holdfast.cluster.outbox import Outbox
from holdfast.cluster.replication import ReadCallback

if TYPE_CHECKING:
    from holdfast.cluster.raft import Library

NO_OP = b"\x01"  # the library's own entry at the begin of a leadership
BATCH = b"\x10"  # the first byte of an entry with client commands
_SCAN_BYTES = 1_048_576


class Consensus:
    """One node's part in one log. Every method is called on the node's one thread and returns at once."""

    def __init__(
        self,
        make_library: "Callable[[Consensus], Library]",
        *,
        me: str,
        journal: Journal,
        clock: Clock,
        rng: Random,
        applied: int,
        applied_term: int,
        configuration: Configuration,
        configuration_index: int,
        wall_ms: Callable[[], int],
        timing: Timing,
        window: Window,
    ) -> None:
        self.me = me
        self.journal = journal
        self._clock, self._timing = clock, timing
        self._elections = Elections(timing, rng)
        self._configurations = Configurations(configuration_index, configuration)
        self._outbox = Outbox(journal)
        self._sessions: set[str] = set()  # peers with an open connection, of our configuration or not
        self._answers: list[tuple[ReadCallback, int | None]] = []
        self._events: list[Event] = []
        self._told: tuple[str | None, int] = (None, 0)
        self._library = make_library(self)
        self._leading = Leading(self._library, journal, self._outbox, clock, timing, window, self._tell)
        self._following = Following(
            me, self._library, journal, self._outbox, clock, self._elections, self._configurations, wall_ms
        )
        self._restore(applied, applied_term)
        journal.on_append, journal.on_truncate = self._appended, self._truncated

    def _restore(self, applied: int, applied_term: int) -> None:
        journal, library = self.journal, self._library
        if applied < journal.base:
            problem = (
                f"it ends at {applied}, before the journal begins at {journal.base}, for no newer snapshot can be "
                "read. With peers: bring the node back under a new name with an empty folder; they have what it had. "
                "Alone: put back a readable copy of the newest snapshot; nothing else has what is missing"
            )
            raise StateBroken(problem=problem)
        # 1. A snapshot was received, fsynced and swapped in as our state.
        # 2. The crash came before the journal was reset to it.
        # All up to the snapshot is committed, so the reset is made now; the journal's own entries there are losers.
        if journal.term_at(applied) != applied_term:
            journal.reset_to(applied, applied_term)
        library.term = max(journal.term, journal.last_term)
        library.vote = journal.vote if journal.term == library.term else None
        library.commit_index = library.applied = applied
        journal.setRaftCommitIndex(applied)
        library.deadline_s = self._clock() + self.timeout_s()
        at = applied + 1
        while at <= journal.last:
            entries, _ = journal.read(at, _SCAN_BYTES)
            for command, index, _ in entries:
                if command[:1] == CONFIGURATION:
                    self._configurations.appended(index, membership.decode(command))
            at += len(entries)
        self._use_configuration()

    def settle_promise_alone(self, saw_all: bool) -> None:
        """At the start: see `Following`."""
        self._following.settle_promise_alone(saw_all)

    # What is so

    @property
    def role(self) -> Role:
        return Role(self._library.state)

    @property
    def term(self) -> int:
        return self._library.term

    @property
    def leader(self) -> str | None:
        """Who led when we last heard of it; it may be over."""
        return self._library.leader

    @property
    def commit_index(self) -> int:
        return self._library.commit_index

    @property
    def applied(self) -> int:
        return self._library.applied

    @property
    def match(self) -> dict[str, int]:
        """How far each peer's disk is known to agree with our log; of use on the leader only."""
        return {peer: progress.acked for peer, progress in self._leading.progress.items()}

    @property
    def in_flight_bytes(self) -> dict[str, int]:
        return {peer: progress.in_flight_bytes for peer, progress in self._leading.progress.items()}

    @property
    def walls(self) -> dict[str, tuple[int, float]]:
        """Each peer's wall clock in milliseconds, and when by our clock it said so (T2)."""
        return dict(self._leading.walls)

    @property
    def configuration(self) -> Configuration:
        """The one that rules: the newest in the log, committed or not."""
        return self._configurations.current

    @property
    def configuration_index(self) -> int:
        return self._configurations.index

    def configuration_at(self, index: int) -> tuple[int, Configuration]:
        """The configuration in force at an applied index, with its own index: a snapshot there carries it."""
        return self._configurations.at(index)

    def committed(self) -> int:
        """The highest index that may be applied here: committed, and on our own disk (R8)."""
        return self._leading.committed()

    def set_applied(self, index: int) -> None:
        self._library.applied = index
        self._configurations.applied(index)

    def take_ready(self) -> list[tuple[str, Message]]:
        """The messages that may leave now, in order for each peer."""
        self._leading.barriers.messages_leave()
        return self._outbox.take()

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _tell(self, event: Event) -> None:
        self._events.append(event)

    @property
    def _leads(self) -> bool:
        return self._library.state == Role.LEADER

    # One turn

    def step(self) -> None:
        """Let time pass: elections, commit index, quorum check, heartbeats; then the reads that are through."""
        library, now_s = self._library, self._clock()
        if self._following.may_not_stand():
            library.deadline_s = now_s + self._timing.election_max_s
        elif not self._leads and 0 != library.deadline_s < now_s:  # 0: an election was decided, and begins now
            self._following.begin_pre_vote(now_s)
        library.tick()
        if self._leads:
            barriers, voters = self._leading.barriers, self.configuration.voter_names
            if barriers.unannounced:
                self._leading.heartbeat()
            passed = barriers.passed(voters, self.me, self._leading.progress)
            self._answers += [(callback, index) for index, callback in passed]
        self._following.check_promise()
        if self._told != (library.leader, library.term):
            self._told = (library.leader, library.term)
            self._tell(LeaderChanged(*self._told))
        answers, self._answers = self._answers, []
        for callback, outcome in answers:
            callback(outcome)

    def propose(self, command: bytes) -> tuple[int, int] | None:
        """Append an entry; its index and term at once, or None where we do not lead. Raises BatchTooLarge.

        Applied with that term it has happened; with another term it has certainly not.
        """
        if len(command) > ENTRY_BYTES:
            raise BatchTooLarge(size=len(command), limit=ENTRY_BYTES, limit_name="ENTRY_BYTES")
        if not self._leads:
            return None
        index, term = self.journal.last + 1, self._library.term
        self.journal.add(command, index, term)
        return index, term

    def push(self) -> None:
        """Send what was proposed, as far as each peer's window allows; it need not be on our own disk yet."""
        if self._leads:
            self._leading.push()

    def begin_flush(self) -> Flush | None:
        """What to write and sync now; None if there is nothing, or a flush is under way. Ends with `durable`."""
        flush = self.journal.take()
        if flush is not None:
            self._leading.flush_began_s = self._clock()
        return flush

    def durable(self, lsn: int) -> None:
        """The flush up to `lsn` is on disk: what waited for it may leave, and we count ourselves."""
        self._leading.flush_began_s = None
        self.journal.on_durable(lsn)
        self._outbox.release(lsn)
        if self._leads:
            self._leading.synced()

    # Peers

    def connected(self, peer: str) -> None:
        """A new session with this peer begins; every frame of the former one is gone (R27)."""
        self._sessions.add(peer)
        if peer in self._library.peers:
            self._library.connect(peer)
            self._leading.reconnected(peer)

    def disconnected(self, peer: str) -> None:
        """The session is over, and with it everything that was meant for it."""
        self._sessions.discard(peer)
        self._outbox.drop(peer)
        if peer not in self._library.peers:
            return
        self._library.disconnect(peer)
        if self.role == Role.FOLLOWER and self.leader == peer:
            self._library.deadline_s = self._clock() + self._elections.leader_gone()

    def deliver(self, peer: str, message: Message) -> None:
        """One message of an authenticated peer, in the order of its session."""
        # A leader or candidate outside our configuration is heard: ours may be the stale one (R22). It counts nowhere.
        if peer not in self._library.peers and not isinstance(message, AppendEntries | RequestVote | PreVote):
            return
        match message:
            case AppendEntries():
                self._following.on_append(peer, message)
            case AppendReply():
                self._on_append_reply(peer, message)
            case RequestVote():
                self._following.on_request_vote(peer, message)
            case VoteGranted():
                self._following.on_vote_granted(peer, message)
            case TimeoutNow(term=term):
                self._library.timeout_now(peer, term)
            case PreVote():
                self._following.on_pre_vote(peer, message)
            case PreVoteReply():
                self._following.on_pre_vote_reply(peer, message)
            case StaleTerm(term=term):
                self._following.adopt_term(peer, term)
            case _:
                raise StateBroken(problem=f"{type(message).__name__} belongs to the snapshot stream, not to the log")

    def _on_append_reply(self, peer: str, reply: AppendReply) -> None:
        self._following.adopt_term(peer, reply.term)
        if not self._leads or reply.term != self.term:  # R5: of another leadership, perhaps a former one of our own
            return
        self._leading.on_reply(peer, reply)

    # What the library asks: `Owner` in `raft.py`

    def timeout_s(self) -> float:
        return self._elections.timeout_s()

    def heartbeat(self) -> None:
        self._leading.heartbeat()

    def state_changed(self, old: int, new: int) -> None:
        if new == Role.LEADER:
            self._leading.begin()
            self._tell(BecameLeader(self.term))
        if old == Role.LEADER:
            self._tell(LostLeadership(self.term))
            self._library.deadline_s = self._clock() + self.timeout_s()
            self._answers += [(callback, None) for callback in self._leading.barriers.drop_all()]
        if new == Role.CANDIDATE:
            self._elections.forget_votes()

    def send(self, peer: str, message: Message) -> None:
        self._outbox.send(peer, message)

    def answer(self, peer: str, next_index: int, reset: bool, success: bool) -> None:
        self._following.answer(peer, next_index, reset, success)

    # Reads, transfer

    def read_barrier(self, callback: ReadCallback) -> None:
        """Calls back in a later `step`: with the index that must be applied before the answer, or None.

        The index covers everything that was acknowledged to anybody before this call. None: we do not lead, or not
        yet for certain, or lost it meanwhile.
        """
        if self._leads and self._own_term_committed():
            self._leading.barriers.add(self._library.commit_index, callback)
        else:
            self._answers.append((callback, None))

    @property
    def confirming(self) -> bool:
        """Whether a read barrier was asked for and has not called back."""
        return bool(self._leading.barriers or self._answers)

    def _own_term_committed(self) -> bool:
        no_op_index = self._library.no_op_index
        return no_op_index is not None and self._library.commit_index >= no_op_index

    def transfer(self, peer: str) -> bool:
        """Ask a voter with all of our log to take over; whether it was asked. The caller has stopped proposing."""
        return peer in self._library.peers and self._library.transfer(peer)

    # Snapshots

    def compact(self, index: int) -> None:
        """Let the journal forget up to `index`, which a durable snapshot of ours must cover."""
        if index > self.applied:
            raise StateBroken(problem=f"compaction to {index}, but only {self.applied} is applied")
        self.journal.compact(index)

    def accepts_snapshot(self, peer: str, head: SnapshotHead) -> bool:
        """Whether to receive this stream; if not, the peer is told why."""
        return self._following.accepts_snapshot(peer, head)

    def snapshot_installed(self, peer: str, head: SnapshotHead) -> None:
        """The state of this stream is fsynced and swapped in: state first, then journal. Answers the sender."""
        journal, library = self.journal, self._library
        if head.index > library.applied:
            keep_suffix = journal.term_at(head.index) == head.index_term
            if not keep_suffix:
                journal.reset_to(head.index, head.index_term)
            ruling = membership.decode(head.configuration)
            self._configurations.installed(head.index, head.configuration_index, ruling, keep_suffix)
            self._use_configuration()
            library.commit_index = max(library.commit_index, head.index)
            journal.setRaftCommitIndex(library.commit_index)
            self.set_applied(head.index)
        self._following.acknowledge_snapshot(peer, head)

    # Membership

    def propose_configuration(self, configuration: Configuration) -> tuple[int, int]:
        """Append a change of members; it rules at once. Raises ConfigurationRefused."""
        if not self._own_term_committed() or self.configuration_index > self.commit_index:
            raise ConfigurationRefused("the former change, or this leader's first entry, is not committed yet")
        caught_up = filter(self._leading.caught_up, self._library.peers)
        membership.check_change(self.configuration, configuration, self.me, caught_up)
        proposed = self.propose(membership.encode(configuration))
        if proposed is None:
            raise ConfigurationRefused("this node does not lead")
        return proposed

    def _appended(self, command: bytes, index: int) -> None:
        if command[:1] == CONFIGURATION:
            self._configurations.appended(index, membership.decode(command))
            self._use_configuration()

    def _truncated(self, first: int) -> None:
        if self._configurations.truncated(first):
            self._use_configuration()

    def _use_configuration(self) -> None:
        """Make the library count and address exactly the members of the ruling configuration."""
        library, ruling = self._library, self.configuration
        known = set(library.peers)
        now_s, next_index = self._clock(), self.journal.last + 1
        library.use_members(self.me, ruling.voter_names, ruling.learner_names, now_s, next_index)
        self._leading.members_changed()
        for peer in library.peers:
            if peer not in known and peer in self._sessions:
                library.connect(peer)
