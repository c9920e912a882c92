"""A worker without its threads, tasks and sockets: what to lease, start, extend, settle and give up, and when.

Decides and touches nothing: time comes as `now_s`, what is to be done is returned as actions, what came of it is told
as events. `turns.py` has these values.

What is lost stays lost: from the moment at which a lease may have run out, nothing of it is acked. The moment is
counted from when the lease, or its last extension, was *asked* for. The cluster granted it later than that, and its
clock never runs faster than ours, so somebody else can have the message only after we have given it up.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random
from typing import Literal, assert_never

from holdfast.client import leases
from holdfast.client.events import Outcome
from holdfast.client.leases import ranges_of
from holdfast.client.message import unpack
from holdfast.client.nodes import backoff_s
from holdfast.client.protocol import commands as c
from holdfast.client.protocol import queries as q
from holdfast.client.protocol import replies as r
from holdfast.client.protocol.errors import (
    AckHoleCapExceeded,
    AlreadySettled,
    GroupNotFound,
    HoldfastError,
    Indeterminate,
    InFlightLimit,
    LeaseExpired,
    NackDelayTooLong,
    SessionExpired,
    SessionWindowFull,
    Unavailable,
)
from holdfast.client.protocol.limits import LEASE_MESSAGES, SETTLE_RANGES
from holdfast.client.protocol.values import GroupSettings, LeaseId, QueueId
from holdfast.client.turns import (
    ACK,
    RELEASE,
    Action,
    Answered,
    Ask,
    Ended,
    Event,
    Held,
    Lose,
    Note,
    Options,
    Start,
    Stop,
    Turn,
    TurnKey,
    Verdict,
    Withdraw,
    Woken,
)

WAIT_PART = 1 / 3  # of the visibility timeout is the longest wait for a lease, for it is counted as if it were held
CAPPED_PART = 0.75  # an extension that gives less than this of the timeout has met the longest lease
SETTLES_MAX = 8  # requests that settle, on their way at once; one for each verdict
UNSETTLED_MAX = 20_000  # turns that wait for their settle, beyond which nothing more is leased
GRACE_S = 5.0  # after the stop's deadline, for what was done to be acked


@dataclass(slots=True, eq=False)
class _Asked:
    kind: Literal["describe", "lease", "extend", "settle"]
    asked_s: float
    lease: Held | None = None
    turns: list[Turn] | None = None
    verdict: Verdict = ACK


class Working:
    """One worker of one group of one queue. `over` says that nothing is left to do, `failure` why it stopped itself."""

    def __init__(self, queue: str, options: Options, random: Random) -> None:
        self._queue, self._options, self._random = queue, options, random
        self._queue_id: QueueId | None = None
        self._timeout_s = 0.0  # the visibility timeout, as far as it is known
        self._turns: dict[int, Turn] = {}  # all that are not over
        self._waiting: deque[Turn] = deque()
        self._beginning: dict[int, Turn] = {}
        self._busy: dict[int, Turn] = {}  # handlers that run, also in vain; in the order of their start
        self._leases: dict[LeaseId, Held] = {}
        self._unsettled: dict[Verdict, dict[int, Turn]] = {}
        self._settling: set[Verdict] = set()
        self._done: dict[TurnKey, None] = {}
        self._asks: dict[int, _Asked] = {}
        self._polling: int | None = None
        self._poll_at_s = self._settle_at_s = 0.0
        self._poll_setbacks = self._settle_setbacks = 0
        self._stop_by_s = math.inf
        self._stopping = False
        self._next = 1
        self._actions: list[Action] = []
        self.failure: HoldfastError | None = None
        self.wake_at_s = 0.0  # when `Woken` is due at the latest; infinite: not before another event

    @property
    def over(self) -> bool:
        """Nothing runs any more that counts, all verdicts are settled, and no lease is on its way."""
        return self._stopping and not self._turns and self._polling is None

    def begin(self, now_s: float) -> list[Action]:
        return self._conclude(now_s)

    def handle(self, event: Event, now_s: float) -> list[Action]:
        match event:
            case Answered(ask=ask, outcome=outcome):
                asked = self._asks.pop(ask, None)
                if asked is not None:
                    self._answered(ask, asked, outcome, now_s)
            case Ended(turn=turn, verdict=verdict):
                self._ended(self._busy.pop(turn), verdict)
            case Stop(by_s=by_s):
                self._stop(by_s)
            case Woken():
                pass
            case unknown:
                assert_never(unknown)
        return self._conclude(now_s)

    # What is due --------------------------------------------------------------------------------------------

    def _conclude(self, now_s: float) -> list[Action]:
        self._give_up_what_is_due(now_s)
        self._start_what_fits(now_s)
        self._extend_what_is_due(now_s)
        self._settle_what_is_due(now_s)
        self._poll(now_s)
        self.wake_at_s = self._next_wake_s(now_s)
        actions, self._actions = self._actions, []
        return actions

    def _next_wake_s(self, now_s: float) -> float:
        times = [self._stop_by_s, self._stop_by_s + GRACE_S]
        for lease in self._leases.values():
            if any(turn.needs_its_lease for turn in lease.turns.values()):
                times.append(lease.safe_s)
                if not lease.capped and not lease.extending:
                    times.append(lease.extend_at_s)
        if self._options.max_run_ms is not None:
            running = next((turn for turn in self._busy.values() if turn.state == "running"), None)
            if running is not None:
                times.append(running.started_s + self._options.max_run_ms / 1000)
        if self._polling is None and not self._stopping:
            times.append(self._poll_at_s)
        if self._unsettled:
            times.append(self._settle_at_s)
        return min((time for time in times if time > now_s), default=math.inf)

    def _give_up_what_is_due(self, now_s: float) -> None:
        for lease in list(self._leases.values()):
            if lease.safe_s <= now_s:
                for turn in [turn for turn in lease.turns.values() if turn.state in ("waiting", "beginning")]:
                    self._decide(turn, RELEASE)  # perhaps it is still held; then this saves an attempt
                self._lose_lease(lease, "its lease could not be extended in time")
        limit_ms = self._options.max_run_ms
        if limit_ms is not None:
            for turn in list(self._busy.values()):
                if turn.started_s + limit_ms / 1000 > now_s:
                    break
                if turn.state == "running":
                    self._actions.append(Lose(turn.number))
                    self._note(turn, f"its handler ran for more than {limit_ms} ms")
                    self._decide(turn, Verdict("nack", error=f"the handler ran for more than {limit_ms} ms"))
        if self._stop_by_s <= now_s:
            for turn in [turn for turn in self._turns.values() if turn.state == "running"]:
                self._lose(turn, "the worker was stopped while its handler ran")
        if self._stop_by_s + GRACE_S <= now_s:
            self._polling = None
            for turn in list(self._turns.values()):
                self._lose(turn, "the worker was stopped before it could be settled")

    def _start_what_fits(self, now_s: float) -> None:
        while self._waiting:
            turn = self._waiting[0]
            if turn.state != "waiting":
                self._waiting.popleft()
            elif turn.key in self._done:
                self._waiting.popleft()
                self._decide(turn, ACK)
            elif len(self._busy) + len(self._beginning) < self._options.concurrency:
                self._waiting.popleft()
                if turn.lease.counts_begun:
                    turn.state = "beginning"
                    self._beginning[turn.number] = turn
                else:
                    self._start(turn, now_s)
            else:
                break

    def _start(self, turn: Turn, now_s: float) -> None:
        turn.state, turn.started_s = "running", now_s
        self._busy[turn.number] = turn
        self._actions.append(Start(turn.number, turn.message, turn.lease.id))

    def _extend_what_is_due(self, now_s: float) -> None:
        for lease in list(self._leases.values()):
            if lease.extending:
                continue
            begin = [turn for turn in self._beginning.values() if turn.lease is lease]
            due = lease.extend_at_s <= now_s and not lease.capped
            if not begin and not (due and any(turn.needs_its_lease for turn in lease.turns.values())):
                continue
            if begin and lease.setbacks and lease.extend_at_s > now_s:
                continue  # the last attempt failed; it is tried again when that says so
            assert self._queue_id is not None, "a lease without its queue"
            command = c.Extend(
                queue_id=self._queue_id,
                group=self._options.group,
                lease_id=lease.id,
                visibility_timeout_ms=self._options.visibility_timeout_ms,
                begin=tuple(ranges_of(sorted(turn.message.version for turn in begin))),
            )
            lease.extending = True
            self._ask(command, _Asked("extend", now_s, lease, begin), lease.safe_s - now_s)

    def _settle_what_is_due(self, now_s: float) -> None:
        """One request for each verdict at a time: what ends while it is on its way makes up the next one."""
        if self._settle_at_s > now_s:
            return
        for verdict in list(self._unsettled):
            if len(self._settling) >= SETTLES_MAX:
                return
            if verdict not in self._settling:
                turns = list(self._unsettled[verdict].values())[:SETTLE_RANGES]
                for turn in turns:
                    del self._unsettled[verdict][turn.number]
                if not self._unsettled[verdict]:
                    del self._unsettled[verdict]
                self._settling.add(verdict)
                asked = _Asked("settle", now_s, None, turns, verdict)
                self._ask(self._settle_command(verdict, turns), asked, self._options.timeout_s)

    def _settle_command(self, verdict: Verdict, turns: Iterable[Turn]) -> c.AckBatch | c.Nack | c.Release:
        by_lease: dict[LeaseId, list[int]] = {}
        for turn in turns:
            by_lease.setdefault(turn.lease.id, []).append(turn.message.version)
        ranges = tuple(
            (lease_id, first, last)
            for lease_id, versions in by_lease.items()
            for first, last in ranges_of(sorted(versions))
        )
        assert self._queue_id is not None, "a verdict without its queue"
        group = self._options.group
        if verdict.kind == "ack":
            return leases.acking(group)(self._queue_id, ranges)
        if verdict.kind == "release":
            return leases.releasing(group)(self._queue_id, ranges)
        nack = leases.nacking(group, verdict.delay_ms, verdict.not_before_ms, verdict.error, verdict.dead)
        return nack(self._queue_id, ranges)

    def _poll(self, now_s: float) -> None:
        """One Lease at a time, when more than half of the prefetch is free: a few large ones, and no idle hand."""
        options = self._options
        if self._polling is not None or self._stopping or self._poll_at_s > now_s:
            return
        if self._queue_id is None:
            self._polling = self._ask(q.DescribeQueue(name=self._queue), _Asked("describe", now_s), options.timeout_s)
            return
        in_hand = len(self._waiting) + len(self._beginning) + len(self._busy)
        room = options.concurrency + options.prefetch - in_hand
        if room <= options.prefetch // 2 or len(self._turns) > UNSETTLED_MAX:
            return
        wait_s = min(options.wait_ms / 1000, self._timeout_s * WAIT_PART)
        command = c.Lease(
            queue_id=self._queue_id,
            group=options.group,
            max_messages=min(room, LEASE_MESSAGES),
            visibility_timeout_ms=options.visibility_timeout_ms,
            wait_ms=int(wait_s * 1000),
        )
        self._polling = self._ask(command, _Asked("lease", now_s), wait_s + options.timeout_s)

    def _ask(self, what: c.Command | q.LeaderQuery, asked: _Asked, within_s: float) -> int:
        ask, self._next = self._next, self._next + 1
        self._asks[ask] = asked
        self._actions.append(Ask(ask, what, asked.asked_s + within_s))
        return ask

    # Answers ------------------------------------------------------------------------------------------------

    def _answered(self, ask: int, asked: _Asked, outcome: Outcome, now_s: float) -> None:
        """Each kind of request takes its reply, or the error that came in its place."""
        if ask == self._polling:
            self._polling = None
        if asked.lease is not None:
            asked.lease.extending = False
        if asked.kind == "settle":
            self._settling.discard(asked.verdict)
        reply = outcome if isinstance(outcome, HoldfastError) else outcome.reply
        error = reply.error if isinstance(reply, r.Failed) else reply
        if isinstance(error, HoldfastError):
            self._refused(asked, error, now_s)
            return
        assert not isinstance(outcome, HoldfastError), "an error is no answer"
        match reply:
            case r.QueueDescribed():
                self._described(reply)
            case r.Leased():
                self._leased(asked, reply, outcome.place.time_ms)
            case r.Extended():
                self._extended(asked, reply, outcome.place.time_ms, now_s)
            case r.Settled():
                self._settled(asked, reply)
            case other:
                raise TypeError(f"{type(other).__name__} came as the answer to a worker's {asked.kind}")

    def _refused(self, asked: _Asked, error: HoldfastError, now_s: float) -> None:
        again = isinstance(error, Unavailable | Indeterminate | SessionExpired | SessionWindowFull)
        match asked.kind:
            case "describe" | "lease" if self._stopping:
                pass
            case "describe" | "lease" if again or isinstance(error, InFlightLimit | AckHoleCapExceeded | LeaseExpired):
                if not self._poll_setbacks:
                    self._actions.append(Note(f"{self._queue}: no lease: {error}"))
                self._poll_setbacks += 1
                self._poll_at_s = now_s + backoff_s(self._poll_setbacks, self._random)
            case "describe" | "lease":
                self.failure = self.failure or error
                self._stop(math.inf)
            case "extend":
                assert asked.lease is not None, "an extension without its lease"
                if again:
                    asked.lease.setbacks += 1
                    asked.lease.extend_at_s = now_s + backoff_s(asked.lease.setbacks, self._random)
                else:
                    self._lose_lease(asked.lease, str(error))
            case "settle":
                self._not_settled(asked, error, now_s, again=again)

    def _described(self, queue: r.QueueDescribed) -> None:
        own = {group.name: group.settings for group in queue.groups}
        settings: GroupSettings | None = own.get(self._options.group)
        if settings is None:
            self.failure = GroupNotFound(queue_id=queue.queue_id, group=self._options.group)
            self._stop(math.inf)
            return
        self._queue_id = queue.queue_id
        timeout_ms = self._options.visibility_timeout_ms or settings.visibility_timeout_ms
        self._timeout_s = (timeout_ms or queue.settings.visibility_timeout_ms) / 1000
        self._poll_setbacks, self._poll_at_s = 0, 0.0

    def _leased(self, asked: _Asked, leased: r.Leased, time_ms: int) -> None:
        self._poll_setbacks, self._poll_at_s = 0, 0.0
        if not leased.grants:
            return
        assert self._queue_id is not None, "a lease without its queue"
        lease = Held(leased.lease_id, leased.counts_begun)
        self._timeout_s = (leased.deadline_ms - time_ms) / 1000
        lease.granted(asked.asked_s, self._timeout_s)
        self._leases[lease.id] = lease
        group, generation = self._options.group, leased.group_generation
        for message in unpack(self._queue_id, leased.batches, leased.grants, group, generation):
            turn = Turn(self._next, lease, message)
            self._next += 1
            self._turns[turn.number] = lease.turns[message.version] = turn
            if turn.key in self._done:
                self._decide(turn, ACK)
            elif self._stopping:
                self._decide(turn, RELEASE)
            else:
                self._waiting.append(turn)

    def _extended(self, asked: _Asked, extended: r.Extended, time_ms: int, now_s: float) -> None:
        lease = asked.lease
        assert lease is not None and asked.turns is not None, "an extension without its lease"
        lease.setbacks = 0
        granted_s = (extended.deadline_ms - time_ms) / 1000
        lease.granted(asked.asked_s, granted_s)
        if granted_s < self._timeout_s * CAPPED_PART:
            lease.capped = True
            for turn in [turn for turn in lease.turns.values() if turn.state == "waiting"]:
                self._decide(turn, RELEASE)  # in a fresh lease there is time for it
        held = {version for first, last in extended.held for version in range(first, last + 1)}
        for turn in [turn for turn in lease.turns.values() if turn.needs_its_lease]:
            if turn.message.version not in held:
                self._lose(turn, "it is not in its lease any more")
        for turn in asked.turns:
            if turn.state == "beginning":
                del self._beginning[turn.number]
                self._start(turn, now_s)

    def _settled(self, asked: _Asked, settled: r.Settled) -> None:
        self._settle_setbacks, self._settle_at_s = 0, 0.0
        refused = {part.lease_id for part in settled.refused if part.code != AlreadySettled.code}
        late = [turn for turn in asked.turns or () if turn.lease.id in refused and not turn.perhaps]
        if late:
            text = f"its lease was over: no {asked.verdict.kind}, and so for {len(late) - 1} others"
            self._note(late[0], text)
        for turn in asked.turns or ():
            self._end(turn)

    def _not_settled(self, asked: _Asked, error: HoldfastError, now_s: float, *, again: bool) -> None:
        """What may be said again is said again: a verdict that has arrived already is answered AlreadySettled."""
        turns = [turn for turn in asked.turns or () if turn.state == "settling"]
        verdict = asked.verdict
        if isinstance(error, NackDelayTooLong):
            verdict = replace(verdict, delay_ms=error.limit, not_before_ms=None)
        elif again:
            self._settle_setbacks += 1
            self._settle_at_s = now_s + backoff_s(self._settle_setbacks, self._random)
            for turn in turns:
                turn.perhaps |= isinstance(error, Indeterminate)
        else:
            self._actions.append(Note(f"{self._queue}: no {verdict.kind} for {len(turns)} messages: {error}"))
            for turn in turns:
                self._end(turn)
            return
        self._unsettled.setdefault(verdict, {}).update((turn.number, turn) for turn in turns)

    # Turns --------------------------------------------------------------------------------------------------

    def _ended(self, turn: Turn, verdict: Verdict) -> None:
        if turn.state != "running":
            return  # lost meanwhile: what its handler says counts no more
        if verdict.kind in ("ack", "settled"):
            self._remember(turn.key)
        if verdict.kind == "settled":
            self._end(turn)
        else:
            self._decide(turn, verdict)

    def _remember(self, key: TurnKey) -> None:
        """That this turn was completed. The oldest are forgotten first."""
        self._done[key] = None
        while len(self._done) > self._options.remember:
            del self._done[next(iter(self._done))]

    def _decide(self, turn: Turn, verdict: Verdict) -> None:
        turn.state = "settling"
        self._beginning.pop(turn.number, None)
        self._unsettled.setdefault(verdict, {})[turn.number] = turn

    def _lose(self, turn: Turn, why: str) -> None:
        """It is not ours any more, or may not be: nothing more is said about it."""
        if turn.state == "running":
            self._actions.append(Lose(turn.number))
            self._note(turn, why)
        elif turn.state == "settling":
            for verdict in [verdict for verdict, turns in self._unsettled.items() if turn.number in turns]:
                del self._unsettled[verdict][turn.number]
                if not self._unsettled[verdict]:
                    del self._unsettled[verdict]
        self._end(turn)

    def _lose_lease(self, lease: Held, why: str) -> None:
        """What was done already is acked all the same, if the cluster still takes it; the rest is lost."""
        for turn in [turn for turn in lease.turns.values() if turn.needs_its_lease]:
            self._lose(turn, why)

    def _end(self, turn: Turn) -> None:
        turn.state = "over"
        self._turns.pop(turn.number, None)
        self._beginning.pop(turn.number, None)
        turn.lease.turns.pop(turn.message.version, None)
        if not turn.lease.turns:
            self._leases.pop(turn.lease.id, None)

    def _note(self, turn: Turn, why: str) -> None:
        self._actions.append(Note(f"{self._queue}: version {turn.message.version} is lost: {why}"))

    def _stop(self, by_s: float) -> None:
        self._stopping = True
        self._stop_by_s = min(self._stop_by_s, by_s)
        if self._polling is not None:
            self._actions.append(Withdraw(self._polling))
        for turn in list(self._turns.values()):
            if turn.state in ("waiting", "beginning"):
                self._decide(turn, RELEASE)
        self._waiting.clear()
