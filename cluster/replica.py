"""One log on one node: what a request, a peer's message, a sync and the passing of time do to it. No I/O, one thread.

Joins consensus, batcher, timekeeper, waiters and state, and is the one place that knows the order of a turn. Requests
go in by `request` and `inquire`, peers and disk through `raft` and `durable`; `turn` does what there is to do and gives
what is to be sent, written and answered. A leader serves from the moment its first own entry is applied: before that it
knows neither all steps of time nor what is due (T2, T3), and what comes meanwhile waits.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, assert_never

from holdfast.client.protocol import errors
from holdfast.client.protocol.commands import Command, Envelope, Lease, Produce, Stage, TimeStep, Touch, Transaction
from holdfast.client.protocol.errors import (
    BadValue,
    BehindIndex,
    BodyDamaged,
    HoldfastError,
    InvariantBroken,
    NoLeader,
    NotLeader,
    Overloaded,
    Withdrawn,
)
from holdfast.client.protocol.messages import Inquiry, Request
from holdfast.client.protocol.queries import Query
from holdfast.client.protocol.replies import Answer, Failed, Leased, MessageBatch, Messages, Reply
from holdfast.client.protocol.values import LOCAL_PRINCIPAL, Place, QueueId
from holdfast.cluster import batcher, comparing, waiters
from holdfast.cluster.batcher import Batcher
from holdfast.cluster.comparing import Comparing, StateDiverged, Undecided
from holdfast.cluster.consensus import BATCH, Consensus
from holdfast.cluster.events import BecameLeader, Event, LeaderChanged, LostLeadership, Role, SnapshotNeeded
from holdfast.cluster.journal import Entry, Flush
from holdfast.cluster.leading import Clock
from holdfast.cluster.look import is_due
from holdfast.cluster.membership import Configuration
from holdfast.cluster.messages import Message, StateDigest
from holdfast.cluster.state import Reached
from holdfast.cluster.timekeeper import Timekeeper
from holdfast.cluster.waiters import Waiters
from holdfast.storage import views
from holdfast.storage.effects import ReapSoon
from holdfast.storage.entry import stamp_of
from holdfast.storage.machine import Applied
from holdfast.storage.state import View
from holdfast.storage.store import Store
from holdfast.storage.tables import TOP, Table

Token = Hashable  # one request, in the owner's words
Outcome = tuple[Token, Answer | HoldfastError]

APPLY_BYTES = 4_194_304  # of entries in one transaction, and in one turn: heartbeats come between
READ_BYTES = 8_388_608  # of answers read in one turn, and one more: about 4 ms; what is left is read in the next ones
ANSWER_COST_BYTES = 4_096  # what an answer counts beside its messages, so that small ones are bounded too
SCAN_BYTES = 1_048_576
EARLY_MAX = 16_384  # requests that wait for a new leader's first entry
STALE_MAX = 1_024  # stale reads that wait for their index
STALE_WAIT_MS = 5_000
REAP_EVERY_MS = 20  # an idle leader leaves the disk to others between two entries that only make room
HAND_OVER_MS = 1_000
LOOK_EVERY_MS = 10  # at the clocks, for what needs an entry by itself
FULL_RETRY_MS = 1_000


class Machine(Protocol):
    """The state of a log: `NodeState`, or one in memory."""

    reached: Reached

    @property
    def store(self) -> Store: ...
    def apply(self, entries: list[Entry]) -> list[Applied]: ...


@dataclass(frozen=True, slots=True)
class Turn:
    """What the owner has to do now, in any order: nothing in here depends on the rest of it."""

    outcomes: list[Outcome]
    messages: list[tuple[str, Message]]
    flush: Flush | None  # to be written and synced; then `durable`
    events: list[Event]
    again: bool  # there is more to apply, to read or to look at: turn again soon, whatever comes
    proposed: list[tuple[int, int]]  # entries of this turn: index, commands in it
    applied: int  # entries
    apply_s: float  # what they took


@dataclass(frozen=True, slots=True, eq=False)
class _TouchToken:
    """A Touch of ours; `reads` wait for it (Q1)."""

    touch: Touch
    at_ms: int = 0  # when we asked for it: its stamp is no older
    reads: "list[_Read]" = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class _StepToken:
    """A TimeStep of ours."""


@dataclass(frozen=True, slots=True)
class _Read:
    token: Token
    query: Query
    index: int = 0  # must be applied
    until_ms: int = 0  # of a stale one: when to give up
    came_ms: int = 0  # of a current one
    touched: bool = False  # what was due is folded


@dataclass(frozen=True, slots=True)
class _Delivery:
    """A lease that was granted, and whose messages are still to be read."""

    token: Token
    queue_id: QueueId
    place: Place
    leased: Leased


class Replica:
    """See the module. `damage` is set when the state cannot be trusted any more: hand over, answer nothing, rebuild.

    That is where a stored body fails its checksum, and where a majority has come to another state.
    """

    def __init__(self, *, raft: Consensus, state: Machine, clock: Clock, wall_ms: Callable[[], int]) -> None:
        """`clock` is the one that `raft` has, where there are peers; `wall_ms` decides nothing by itself (T2)."""
        self.raft, self.state = raft, state
        self.damage: InvariantBroken | None = None
        self.steps = 0  # TimeSteps of ours that were applied
        self.disk_limit: int | None = None  # set while there is too little room left to take messages
        self.batcher = Batcher()
        self.waiters = Waiters()
        self.time = Timekeeper()
        self._clock, self._wall_ms = clock, wall_ms
        self._serving = self._flushing = self._more = False
        self._stepping = False  # a TimeStep of ours is in the log and not applied
        self._reap_at_ms: int | None = None
        self._looked_at_ms = -LOOK_EVERY_MS
        self._counting = -1  # the configuration whose voters' clocks count
        self._hand_over: tuple[str | None, int] | None = None  # to whom, until when
        self._sizes: dict[Token, int] = {}
        self._asked: dict[Token, Envelope] = {}
        self._early: list[Callable[[], None]] = []
        self._reads: list[_Read] = []  # through their barrier; the index may not be applied yet
        self._confirming: list[tuple[int, Token]] = []  # waits that are over, and through their barrier
        self._stale: list[_Read] = []
        self._deliveries: deque[_Delivery] = deque()
        self._read_bytes = 0  # of answers, in this turn
        self._comparing = Comparing(raft.me)
        self._undecided: Undecided | None = None
        self._digests: list[tuple[str, Message]] = []  # of ours, to be told
        self._touches: dict[QueueId, _TouchToken] = {}  # that reads may share
        self._left: list[tuple[int, Token, Command]] = []  # of clients that are gone: decided with this index
        self._proposed: list[tuple[int, int]] = []
        self._outcomes: list[Outcome] = []
        with state.store.read() as txn:
            passed = comparing.remembered(txn)
        if passed is not None:
            self._comparing.tell(raft.me, *passed)

    # What is so

    @property
    def leads(self) -> bool:
        return self.raft.role == Role.LEADER

    @property
    def serving(self) -> bool:
        """Whether requests are taken and answered here."""
        return self._serving and self.damage is None

    @property
    def _is_doubtful(self) -> bool:
        """Whether what this node's fold says may not be what the log says."""
        return self._undecided is not None or isinstance(self.damage, StateDiverged)

    @property
    def now_ms(self) -> int:
        return int(self._clock() * 1_000)

    def leader_address(self) -> str | None:
        """Where clients find the leader that we know, if it is another node."""
        return self._address(self.raft.leader)

    def _address(self, node: str | None) -> str | None:
        ruling: Configuration = self.raft.configuration
        for member in (*ruling.voters, *ruling.learners):
            if member.name == node != self.raft.me:
                return member.client_address or None
        return None

    @property
    def at_rest(self) -> bool:
        """Whether all that came is answered or parked, and nothing is due that needs an entry by itself."""
        now_ms = self.now_ms
        under_way = self._stepping or self._flushing or self._more or self._reads or self._confirming or self._early
        asked = self.batcher.queued_bytes or self.batcher.entries_in_flight or self.raft.confirming
        if not self._serving or under_way or asked:
            return False
        due_in_ms = self.next_due_in_ms()
        return due_in_ms != 0 and not self.time.touch_due(now_ms, self._lease_open(now_ms))

    def next_due_in_ms(self) -> int | None:
        """How long it is until something falls due that somebody here waits for, if nothing comes before."""
        now_ms = self.now_ms
        wakeup_ms = self.waiters.next_wakeup_ms(now_ms, self.time.time_ms(now_ms))
        return max(wakeup_ms - now_ms, 0) if wakeup_ms is not None else None

    # What comes in

    def request(
        self, token: Token, connection: Hashable, request: Request, size_bytes: int, principal: str = LOCAL_PRINCIPAL
    ) -> None:
        """A command. Its outcome comes with one of the next turns, once, unless it is abandoned."""
        command = request.command
        if isinstance(command, TimeStep | Touch):
            self._outcomes.append(
                (token, BadValue(field="command", problem="is the leader's own; leave it to the node"))
            )
        elif not self.leads or self._is_doubtful:
            self._outcomes.append((token, self._not_here()))
        elif self.disk_limit is not None and _adds_messages(command):
            limit = self.disk_limit
            error = Overloaded(limit_name="disk_free_bytes", limit=limit, retry_after_ms=FULL_RETRY_MS)
            self._outcomes.append((token, error))
        else:
            self._asked[token] = Envelope(
                principal=principal,
                command=command,
                session=request.session,
                request_seq=request.request_seq,
                done_below=request.done_below,
            )
            self._sizes[token] = size_bytes
            self._when_serving(token, partial(self._take, token, connection))

    def inquire(self, token: Token, inquiry: Inquiry, query: Query) -> None:
        """A query. A stale one is answered from what is applied here; a current one by the leader (Q1)."""
        if self._is_doubtful:
            self._outcomes.append((token, self._not_here()))
        elif inquiry.stale:
            read = _Read(token, query, inquiry.min_index, self.now_ms + STALE_WAIT_MS)
            if len(self._stale) >= STALE_MAX and read.index > self.state.reached.index:
                self._outcomes.append((token, self._behind(read)))
            else:
                self._stale.append(read)
        elif not self.leads:
            self._outcomes.append((token, self._not_here()))
        else:
            self._when_serving(token, partial(self._begin_read, token, query))

    def connected(self, peer: str) -> None:
        """A session with an authenticated peer has begun."""
        self.raft.connected(peer)
        self._digests += [(peer, StateDigest(*said)) for said in self._comparing.own]

    def deliver(self, peer: str, message: Message) -> None:
        """A message of an authenticated peer that is not part of a snapshot stream."""
        if isinstance(message, StateDigest):
            self._compare(peer, message)
        else:
            self.raft.deliver(peer, message)

    def abandon(self, tokens: Iterable[Token]) -> None:
        """Nobody waits for these any more; those that are not in the log yet will not be."""
        for token in tokens:
            known = self.batcher.abandon(token)
            envelope = self._asked.pop(token, None)
            self._sizes.pop(token, None)
            if envelope is not None and isinstance(known, errors.LeaderChanged):
                # It is in the log, and a Lease there may take what others wait for: these are not to be proposed for
                # it before that is folded, or they would get an empty answer that they did not ask for.
                self._left.append((self.raft.journal.last, token, envelope.command))
            else:
                self.waiters.cancel(token)

    def withdraw(self, token: Token) -> None:
        """Nobody waits for this one any more, but its outcome is wanted: a Lease that is parked has not happened."""
        envelope = self._asked.get(token)
        granted = any(delivery.token == token for delivery in self._deliveries)
        if not granted and envelope is not None and isinstance(envelope.command, Lease) and token not in self.batcher:
            self.waiters.cancel(token)
            self._finish(token, Withdrawn())

    def durable(self, lsn: int) -> None:
        """The flush that a turn gave is on disk."""
        self._flushing = False
        self.raft.durable(lsn)

    def installed(self) -> None:
        """A snapshot has taken the place of the state, and consensus has been told."""
        reached = self.state.reached
        self._comparing.forget()
        deliveries, self._deliveries = self._deliveries, deque()
        for delivery in deliveries:  # the state that granted them is gone
            self._finish(delivery.token, errors.LeaderChanged())
        self._resolve(self.batcher.installed(reached.index, reached.term), None)

    def hand_over(self, target: str | None = None) -> bool:
        """Make another voter lead, the one named or the one that has most of the log; whether there is one to ask.

        Until that is decided commands are taken and wait. It is over when `handing_over` is false again.
        """
        others = [name for name in self.raft.configuration.voter_names if name != self.raft.me]
        if not self.leads or (target not in others if target else not others):
            return False
        self._hand_over = (target, self.now_ms + HAND_OVER_MS)
        self.raft.read_barrier(lambda _: None)  # makes every peer answer now, not at the next heartbeat
        self.batcher.held = True
        return True

    @property
    def handing_over(self) -> bool:
        return self._hand_over is not None

    # One turn

    def turn(self) -> Turn:
        raft = self.raft
        raft.step()
        events = raft.take_events()
        self._note(events)
        self._read_bytes = 0
        began_s = self._clock()
        applied, outcomes = self._apply()
        apply_s = self._clock() - began_s
        if applied or self._has_work():
            with self.state.store.read() as txn:
                self._serve(View(txn), applied, outcomes)
        self._continue_hand_over()
        self._propose()
        raft.push()
        flush = raft.begin_flush()
        self._flushing = self._flushing or flush is not None
        answered, self._outcomes = self._outcomes, []
        proposed, self._proposed = self._proposed, []
        digests, self._digests = self._digests, []
        return Turn(
            answered,
            raft.take_ready() + digests,
            flush,
            events,
            self._more or (self._serving and self.waiters.is_behind(self.now_ms)),
            proposed,
            len(applied),
            apply_s,
        )

    def _note(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case BecameLeader(term=term):
                    latest_ms = self._latest_stamp_ms()
                    voters = self.raft.configuration.voter_names
                    self.time.begin(term=term, latest_ms=latest_ms, voters=voters, now_ms=self.now_ms)
                case LostLeadership():
                    self._lost_leadership()
                case LeaderChanged() | SnapshotNeeded():
                    pass
                case unknown:
                    assert_never(unknown)

    def _lost_leadership(self) -> None:
        self._hand_over = None
        self.batcher.held = False
        self._stop_serving()

    def _stop_serving(self) -> None:
        """Whatever is not in the log goes elsewhere; what is in it is decided as the log goes on."""
        leader = self.raft.leader
        self._serving = self._stepping = False
        self._reap_at_ms = None
        early, self._early = self._early, []
        for take in early:
            take()  # finds that we do not serve
        refused: list[Outcome] = [*self.waiters.lost_leadership(leader), *self.batcher.lost_leadership(leader)]
        self._resolve(refused, None)
        for read in self._reads:
            self._finish(read.token, self._not_here())
        self._reads = []
        self._confirming = []
        self._touches.clear()

    def _apply(self) -> tuple[list[Applied], list[Outcome]]:
        """Fold what is committed and on our own disk (R8): one transaction, then the outcomes of its commands.

        Leases whose messages are not read yet hold it back: these are read from the state that granted them.
        """
        raft, state = self.raft, self.state
        self._more = bool(self._deliveries)
        if self._deliveries:
            return [], []
        target = raft.committed()
        if state.reached.index >= target:
            return [], []
        bound = min(target, Comparing.next_place(state.reached.index))
        entries, _ = raft.journal.read(state.reached.index + 1, APPLY_BYTES, bound)
        applied = state.apply(entries)
        raft.set_applied(state.reached.index)
        self._more = state.reached.index < target
        outcomes: list[Outcome] = []
        for (_, index, term), folded in zip(entries, applied, strict=True):
            outcomes += self.batcher.applied(index, term, folded.answers)
        return applied, outcomes

    def _has_work(self) -> bool:
        if self._stale or self._reads or self._confirming or self._deliveries or self._may_begin:
            return True
        if not self._serving:
            return False
        return self.next_due_in_ms() == 0

    def _serve(self, view: View, applied: list[Applied], outcomes: list[Outcome]) -> None:
        """Answer and wake by the state as it is now."""
        now_ms = self.now_ms
        self._deliver_messages(view)
        if applied and self.state.reached.index % comparing.EVERY == 0:
            own = StateDigest(self.state.reached.index, comparing.own_digest(view.txn))
            ruling = self.raft.configuration
            others = [name for name in (*ruling.voter_names, *ruling.learner_names) if name != self.raft.me]
            self._digests += [(name, own) for name in others]
            self._compare(self.raft.me, own)
        if applied and self.leads:
            self._follow_time(view, now_ms)
        if self._may_begin:
            self._begin_serving(view)
        if self._serving:
            for folded in applied:
                self.waiters.effects(folded.effects)
                soon = [effect.is_waited_for for effect in folded.effects if isinstance(effect, ReapSoon)]
                if soon:
                    self._reap_at_ms = now_ms + (0 if any(soon) else REAP_EVERY_MS)
        self._resolve(outcomes, view)
        self._forget_who_left()
        if self._serving:
            self._wake(view, now_ms)
        self._answer_reads(view, now_ms)

    def _forget_who_left(self) -> None:
        """What their commands did is done: it may be what others wait for."""
        applied = self.state.reached.index
        for _, token, command in [each for each in self._left if each[0] <= applied]:
            self.waiters.resolved(token)
            if self._serving:
                for queue_id in _queues_of(command):
                    self.waiters.changed(queue_id)
        self._left = [each for each in self._left if each[0] > applied]

    def _follow_time(self, view: View, now_ms: int) -> None:
        self.time.applied(
            term=self.state.reached.term,
            time_ms=view.time_ms,
            steps_ms=view.meta.steps,
            advance_ms=view.limits.stamp_advance_ms,
            now_ms=now_ms,
        )

    @property
    def _may_begin(self) -> bool:
        """Also after a doubt that is over: what was on its way then must be folded first, as in a new leadership."""
        ready = not self._is_doubtful and self.state.reached.term == self.raft.term and not self.batcher.in_doubt
        return not self._serving and self.leads and ready

    def _begin_serving(self, view: View) -> None:
        self._serving = True
        self.waiters.begin()
        if view.txn.first(Table.REAP, b"\x00", TOP) is not None:
            self._reap_at_ms = self.now_ms
        early, self._early = self._early, []
        for take in early:
            take()

    def _wake(self, view: View, now_ms: int) -> None:
        time_ms, applied = self.time.time_ms(now_ms), self.state.reached.index
        for _, token in [each for each in self._confirming if each[0] <= applied]:
            self.waiters.confirmed(token)
        self._confirming = [each for each in self._confirming if each[0] > applied]
        for action in self.waiters.step(view, now_ms, time_ms):
            match action:
                case waiters.Propose(token=token, envelope=envelope):
                    self._submit(token, envelope)
                case waiters.Confirm(token=token):
                    self.raft.read_barrier(partial(self._confirmed, token))
                case waiters.Finish(token=token, reply=reply):
                    self._finish(token, Answer(self._place(view), reply))
                case Touch():
                    self._submit_own(_TouchToken(action), action)
                case unknown:
                    assert_never(unknown)

    def _propose(self) -> None:
        """Everything that came while the former entry was on its way to our disk becomes the next one."""
        now_ms = self.now_ms
        if self._undecided is not None and self.leads:
            self._go_on_to_compare(self._undecided, now_ms)
        if not self._serving or not self.leads:
            return
        can_form = self.batcher.can_form() and self._may_form()
        reap = self._reap_at_ms is not None and self._reap_at_ms <= now_ms and not self.batcher.entries_in_flight
        if not can_form and not reap and now_ms < self._looked_at_ms + LOOK_EVERY_MS:
            return  # most turns are for messages and syncs: time asks for no entry of its own so soon
        self._looked_at_ms = now_ms
        if self.raft.configuration_index != self._counting:
            self._counting = self.raft.configuration_index
            self.time.use_voters(self.raft.configuration.voter_names)
        self.time.heard(self.raft.me, self._wall_ms(), now_ms)
        for peer, (wall_ms, at_s) in self.raft.walls.items():
            self.time.heard(peer, wall_ms, int(at_s * 1_000))
        if not self.time.ready(now_ms):
            return
        step = None if self.batcher.held else self.time.step_due(now_ms)
        if step is not None:
            self._submit_own(_StepToken(), step, first=True)
        formed = False
        # Until a step is applied the timekeeper does not count it. A stamp taken meanwhile would be below committed
        # time, so lease time would stand still behind the step and leap later, over leases granted in between (T2).
        while self.batcher.can_form() and self._may_form() and not self._stepping:
            formed = self._form(now_ms)
        if self._stepping:
            return
        wanted = not formed and (reap or self.time.touch_due(now_ms, self._lease_open(now_ms)))
        if wanted and self._form(now_ms, even_empty=True):
            self._reap_at_ms = None  # until the fold says that there is more

    def _go_on_to_compare(self, undecided: Undecided, now_ms: int) -> None:
        """Empty entries up to the next place, where somebody could decide who came past this one without a word.

        That is so after a snapshot. Otherwise nothing is asked of the log: time decides nothing here.
        """
        raft = self.raft
        silent = [name for name in raft.configuration.voter_names if name not in undecided.nodes]
        past = any(name == raft.me or raft.match.get(name, 0) > undecided.index for name in silent)
        if not past or now_ms < self._looked_at_ms + LOOK_EVERY_MS or self.state.reached.term != raft.term:
            return
        self._looked_at_ms = now_ms
        if not self.batcher.entries_in_flight and self._may_form() and self.time.ready(now_ms):
            self._form(now_ms, even_empty=True)

    def _may_form(self) -> bool:
        return not self._flushing or self.batcher.queued_bytes >= self.batcher.bounds.entry_bytes

    def _form(self, now_ms: int, even_empty: bool = False) -> bool:
        proposal = self.batcher.next_entry(self.time.stamp(now_ms), even_empty)
        if proposal is None:
            return False
        place = self.raft.propose(proposal.data)
        if place is None:
            self._resolve(self.batcher.not_proposed(proposal, self.raft.leader), None)
            return False
        self.batcher.proposed(proposal, *place)
        self._stepping = bool(proposal.tokens) and isinstance(proposal.tokens[0], _StepToken)
        self._proposed.append((place[0], len(proposal.tokens)))
        self._flushing = True  # from now on, not from when the disk begins: what comes next forms the next entry
        return True

    def _lease_open(self, now_ms: int) -> bool:
        if not self.time.touch_due(now_ms, True):
            return False  # not asked yet: spare the look
        with self.state.store.read() as txn:
            return txn.first(Table.LEASE_DUE, b"\x00", TOP) is not None

    def _continue_hand_over(self) -> None:
        """Wait for the target to have all of our log, ask it, and go on as before if it does not take over."""
        if self._hand_over is None:
            return
        target, until_ms = self._hand_over
        if self.now_ms >= until_ms:
            self._hand_over = None
            self.batcher.held = False
            return
        for name in [target] if target else self._heirs(until_ms - HAND_OVER_MS):
            if self.raft.match.get(name, 0) == self.raft.journal.last and self.raft.transfer(name):
                # It stands for election at once; asked again in the next turn if that is lost. Nobody else is asked:
                # two that stand at the same time split the votes.
                self._hand_over = (name, until_ms)
                return

    def _heirs(self, since_ms: int) -> list[str]:
        """Who may lead next, most of the log first. Even one that hangs may have all of it: it must have answered."""
        match, heard = self.raft.match, self.raft.walls
        answering = [name for name in self.raft.configuration.voter_names if name in match and name in heard]
        answering = [name for name in answering if int(heard[name][1] * 1_000) >= since_ms]
        return sorted(answering, key=lambda name: -match[name])

    def _compare(self, node: str, told: StateDigest) -> None:
        self._comparing.tell(node, told.index, told.digest)
        verdict = self._comparing.verdict(self.raft.configuration.voter_names)
        was_doubtful = self._is_doubtful
        self._undecided = verdict if isinstance(verdict, Undecided) else None
        if isinstance(verdict, StateDiverged):
            self.damage = self.damage or verdict
        if self._is_doubtful and not was_doubtful:
            self._nobody_is_served()

    def _nobody_is_served(self) -> None:
        """The states differ, and ours may be the wrong one."""
        self._stop_serving()
        for read in self._stale:
            self._finish(read.token, self._not_here())
        self._stale = []

    def _not_here(self) -> NotLeader | NoLeader:
        """Why nothing is taken or answered here; the request has not happened."""
        if self._undecided is not None:
            nodes, index = ", ".join(self._undecided.nodes), self._undecided.index
            return NoLeader(
                f"the states of {nodes} differ at index {index}, and no majority agrees; nobody serves until the other "
                "nodes are back and decide it"
            )
        if self._is_doubtful:
            return NoLeader("the state of this node is not that of the majority; ask another")
        return NotLeader(leader=self.leader_address())

    # Requests

    def _when_serving(self, token: Token, take: Callable[[], None]) -> None:
        if self._serving:
            take()
        elif len(self._early) < EARLY_MAX:
            self._early.append(take)
        else:
            error = Overloaded(limit_name="EARLY_MAX", limit=EARLY_MAX, retry_after_ms=batcher.RETRY_AFTER_MS)
            self._finish(token, error)

    def _take(self, token: Token, connection: Hashable) -> None:
        envelope = self._asked.get(token)
        if envelope is None:
            return  # abandoned
        if not self.leads or self._is_doubtful:
            self._finish(token, self._not_here())
        elif isinstance(envelope.command, Lease):
            try:
                self.waiters.add(token, connection, envelope, self.now_ms)
            except HoldfastError as error:
                self._finish(token, error)
        else:
            self._submit(token, envelope)

    def _submit(self, token: Token, envelope: Envelope) -> None:
        try:
            self.batcher.submit(envelope, token, self._sizes.get(token))
        except HoldfastError as error:
            self.waiters.resolved(token)
            self._finish(token, error)

    def _submit_own(self, token: Token, command: TimeStep | Touch, first: bool = False) -> None:
        try:
            self.batcher.submit(Envelope(principal=LOCAL_PRINCIPAL, command=command), token, first=first)
        except Overloaded as error:  # it comes again: the timer is still due
            self._resolve([(token, error)], None)

    def _resolve(self, outcomes: Iterable[Outcome], view: View | None) -> None:
        """Hand on what became of commands; those of our own are for our own parts."""
        for token, outcome in outcomes:
            match token:
                case _TouchToken():
                    self._touched(token, outcome)
                case _StepToken():
                    self._stepping = False
                    if not isinstance(outcome, Answer) or isinstance(outcome.reply, Failed):
                        self.time.step_refused()
                    else:
                        self.steps += 1
                case _:
                    self._resolve_client(token, outcome, view)

    def _resolve_client(self, token: Token, outcome: Answer | HoldfastError, view: View | None) -> None:
        envelope = self._asked.get(token)
        if envelope is not None:
            if isinstance(envelope.command, Lease):
                self.waiters.resolved(token)
            if self._serving:
                for queue_id in _queues_of(envelope.command):
                    self.waiters.changed(queue_id)
            if isinstance(outcome, Answer) and self._is_doubtful:
                outcome = _not_vouched_for()
            match outcome, envelope.command:
                case Answer(place=place, reply=Leased() as leased), Lease(queue_id=queue_id) if view is not None:
                    self._deliveries.append(_Delivery(token, queue_id, place, leased))
                    self._deliver_messages(view)
                    return
        self._finish(token, outcome)

    def _deliver_messages(self, view: View) -> None:
        """Read the messages of leases, as far as one turn may; who is gone meanwhile gets none."""
        while self._deliveries and self._may_read:
            delivery = self._deliveries.popleft()
            if delivery.token not in self._asked:
                continue
            if self._is_doubtful:
                self._finish(delivery.token, _not_vouched_for())
            else:
                queue_id, place, leased = delivery.queue_id, delivery.place, delivery.leased
                self._read_body(delivery.token, partial(_delivered, view, queue_id, place, leased))
        self._more = self._more or bool(self._deliveries)

    def _touched(self, token: _TouchToken, outcome: Answer | HoldfastError) -> None:
        """One that came after the Touch was asked for may see more due than that has folded: it is looked at again."""
        if self._serving:
            self.waiters.touched(token.touch, self.time.time_ms(self.now_ms))
        if self._touches.get(token.touch.queue_id) is token:
            del self._touches[token.touch.queue_id]
        for read in token.reads:
            if isinstance(outcome, Overloaded):
                self._finish(read.token, outcome)  # without its Touch it would not be current
            elif not self._serving or not isinstance(outcome, Answer):
                self._finish(read.token, self._not_here())
            else:
                self._reads.append(replace(read, touched=read.came_ms <= token.at_ms))

    def _finish(self, token: Token, outcome: Answer | HoldfastError) -> None:
        self._asked.pop(token, None)
        self._sizes.pop(token, None)
        if isinstance(outcome, NotLeader):  # our parts name nodes; a client wants an address
            outcome = self._not_here()
        self._outcomes.append((token, outcome))

    def _read_body(self, token: Token, read: Callable[[], Answer]) -> None:
        """Answer with what is stored; damage is not an answer, and ends this node's part (fail-stop)."""
        try:
            answer = read()
        except BodyDamaged as error:
            self.damage = error
        else:
            self._read_bytes += ANSWER_COST_BYTES + _body_bytes(answer.reply)
            self._finish(token, answer)

    @property
    def _may_read(self) -> bool:
        """Whether this turn goes on to read: heartbeats and others' requests come between turns."""
        return self._read_bytes < READ_BYTES

    # Reads

    def _begin_read(self, token: Token, query: Query) -> None:
        if not self.leads or self._is_doubtful:
            self._finish(token, self._not_here())
        else:
            self.raft.read_barrier(partial(self._passed, token, query, self.now_ms))

    def _passed(self, token: Token, query: Query, came_ms: int, index: int | None) -> None:
        if index is not None and not self._is_doubtful:
            self._reads.append(_Read(token, query, index, came_ms=came_ms))
        else:
            self._finish(token, self._not_here())

    def _confirmed(self, token: Token, index: int | None) -> None:
        """The barrier of a wait that is over; one that fails while we lead is tried again."""
        if index is not None:
            self._confirming.append((index, token))
        elif self._serving and self.leads:
            self.raft.read_barrier(partial(self._confirmed, token))

    def _answer_reads(self, view: View, now_ms: int) -> None:
        reads, self._reads = self._reads, []
        applied = self.state.reached.index
        for read in reads:
            if read.index > applied:
                self._reads.append(read)
            elif not self._may_read:
                self._reads.append(read)
                self._more = True
            elif read.touched or not self._touch_first(view, read, now_ms):
                self._read_body(read.token, partial(_answered, view, read.query))
        stale, self._stale = self._stale, []
        for read in stale:
            if read.index <= applied and self._may_read:
                self._read_body(read.token, partial(_answered, view, read.query))
            elif read.index <= applied:
                self._stale.append(read)
                self._more = True
            elif now_ms >= read.until_ms:
                self._finish(read.token, self._behind(read))
            else:
                self._stale.append(read)

    def _touch_first(self, view: View, read: _Read, now_ms: int) -> bool:
        """Whether something is due where this read looks; then it waits for a Touch that others may share (Q1)."""
        queue_id: QueueId | None = getattr(read.query, "queue_id", None)
        queue = view.queue(queue_id) if queue_id is not None else None
        if queue_id is None or queue is None or queue.deleted or not self._serving:
            return False
        known = self._touches.get(queue_id)
        if known is not None:
            known.reads.append(read)
            return True
        time_ms = self.time.time_ms(now_ms)
        if not any(is_due(view, queue, group, time_ms) for group in view.groups(queue_id)):
            return False
        touch = Touch(queue_id=queue_id)
        self._touches[queue_id] = token = _TouchToken(touch, now_ms, [read])
        self._submit_own(token, touch)
        return True

    def _behind(self, read: _Read) -> BehindIndex:
        return BehindIndex(applied=self.state.reached.index, min_index=read.index)

    def _place(self, view: View) -> Place:
        return Place(view.meta.applied, -1, view.time_ms)

    def _latest_stamp_ms(self) -> int:
        """The largest stamp of our log, applied or not (T2)."""
        with self.state.store.read() as txn:
            latest_ms = View(txn).time_ms
        journal, at = self.raft.journal, self.state.reached.index + 1
        while at <= journal.last:
            entries, _ = journal.read(at, SCAN_BYTES)
            stamps = (stamp_of(memoryview(command)[1:]) for command, _, _ in entries if command[:1] == BATCH)
            latest_ms = max(latest_ms, max(stamps, default=0))
            at += len(entries)
        return latest_ms


def _answered(view: View, query: Query) -> Answer:
    answer = views.answer(view.txn, query)
    return Answer(answer.place, _owned(answer.reply))


def _delivered(view: View, queue_id: QueueId, place: Place, leased: Leased) -> Answer:
    return Answer(place, _owned(views.deliver(view.txn, queue_id, leased)))


def _owned(reply: Reply) -> Reply:
    """With bodies of its own: an answer outlives the transaction that it was read in."""
    match reply:
        case Leased() | Messages():
            return replace(reply, batches=tuple(_owned_batch(batch) for batch in reply.batches))
        case _:
            return reply


def _body_bytes(reply: Reply) -> int:
    return sum(len(batch.body) for batch in reply.batches) if isinstance(reply, Leased | Messages) else 0


def _owned_batch(batch: MessageBatch) -> MessageBatch:
    return replace(batch, body=bytes(batch.body))


def _not_vouched_for() -> errors.LeaderChanged:
    return errors.LeaderChanged("the states of the nodes differ: this node cannot vouch for the answer")


def _adds_messages(command: Command) -> bool:
    if isinstance(command, Transaction):
        return any(isinstance(item, Produce) for item in command.items)
    return isinstance(command, Produce | Stage)


def _queues_of(command: Command) -> list[QueueId]:
    if isinstance(command, Transaction):
        return [queue_id for item in command.items for queue_id in _queues_of(item)]
    queue_id: QueueId | None = getattr(command, "queue_id", None)
    return [] if queue_id is None else [queue_id]
