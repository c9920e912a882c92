"""Consumers parked until something is available (L7), and the Touches that make due things happen (T3).

Pure: effects, answers and times come in as values, `step` says what to do. Every Lease passes through here, so that
first come is first served in each group, and so that a Lease enters the log only if it may get something: the fold
remembers an empty answer under its request as it does any other (A1), so a Lease can be folded once and no more.
`now_ms` is the monotonic clock, for waits; `time_ms` is what the leader would stamp now, for what falls due.
"""

import heapq
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar, assert_never

from holdfast.client.protocol.commands import Envelope, Lease, Touch
from holdfast.client.protocol.errors import InFlightLimit, NotLeader, Overloaded, StateBroken
from holdfast.client.protocol.replies import Failed, Reply
from holdfast.client.protocol.values import QueueId
from holdfast.storage import explain, groups, leases, unfinished
from holdfast.storage.effects import Effect, EndLeases, ReapSoon, TouchSoon, WakeConsumers
from holdfast.storage.rows import NEVER, GroupRow, QueueRow
from holdfast.storage.state import View
from holdfast.storage.tables import TOP, Table, k1, k3

Token = Hashable
Connection = Hashable
Place = tuple[int, str]  # a queue and a group of it
K = TypeVar("K", bound=Hashable)

RETRY_AFTER_MS = 1_000  # waits are long: room comes no sooner
TOUCH_GAP_MS = 100  # between two Touches of a group: what falls due meanwhile shares the next
REFRESH_MS = 250  # how soon a change of a group for which nobody waits reaches its timer; T3 has a second


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    parked: int = 10_000  # about a kilobyte each
    parked_per_connection: int = 256  # a session's window (A1): more could not be numbered


@dataclass(frozen=True, slots=True)
class Propose:
    """Put this Lease into the log; then `resolved`, whatever became of it. Its answer is final."""

    token: Token
    envelope: Envelope


@dataclass(frozen=True, slots=True)
class Confirm:
    """The wait is over: pass a read barrier (Q1), then `confirmed`. One that fails while we lead is tried again."""

    token: Token


@dataclass(frozen=True, slots=True)
class Finish:
    """Answer with this, from the state that `step` was shown; nothing of it is in the log."""

    token: Token
    reply: Reply


Action = Propose | Confirm | Finish | Touch  # a Touch is to be proposed; then `touched`, whatever became of it


# Reading the state ---------------------------------------------------------------------------------------


def could_grant(view: View, queue_id: int, group: str, time_ms: int | None = None) -> bool:
    """Whether a Lease of a session without limits of its own may get something now."""
    queue, row = view.queue(queue_id), view.group(queue_id, group)
    if queue is None or queue.deleted or row is None:
        return False
    return _nothing_to_grant(view, queue, row, time_ms or view.time_ms) is None


def unlogged_answer(view: View, envelope: Envelope, time_ms: int) -> Reply | None:
    """The fold's answer to a Lease that would grant nothing: empty, or a limit (L1, L5). None: the fold must say.

    That is so where something may be granted, and where the request is refused or was answered before (A1, L4).
    """
    command, session = _lease(envelope), envelope.session
    queue, group = view.queue(command.queue_id), view.group(command.queue_id, command.group)
    if queue is None or group is None or _fold_must_say(view, envelope, time_ms):
        return None
    return _nothing_to_grant(view, queue, group, time_ms, session, None if command.auto_ack else session)


def next_due_ms(view: View, queue: QueueRow, group: GroupRow) -> int | None:
    """When, in committed time, the next lease expires, delay ends or TTL passes in a group; it may be past."""
    times = [NEVER]
    lease_or_nack = leases.next_due(view, group)
    if lease_or_nack is not None:
        times.append(lease_or_nack)
    cursors = []
    if queue.sched_rows and group.held:
        cursors.append((Table.SCHED, group.sched_time, group.sched_version))
    if queue.ttl_rows:
        cursors.append((Table.TTL, group.ttl_time, group.ttl_version))
    for table, folded_ms, version in cursors:
        row = view.txn.first(table, k3(queue.q, folded_ms, version + 1), k1(queue.q + 1))
        if row is not None:
            times.append(int.from_bytes(row[0][8:16], "big"))
    return min(times) if min(times) < NEVER else None


def _fold_must_say(view: View, envelope: Envelope, time_ms: int) -> bool:
    """Whether there is an answer, whatever is available: of the session (A1), or a refusal."""
    command, number = _lease(envelope), envelope.request_seq
    row, queue = view.session(envelope.session), view.queue(command.queue_id)
    group = view.group(command.queue_id, command.group)
    return (
        row is None
        or row.principal != envelope.principal
        or number < max(row.done_below, envelope.done_below)
        or number in row.window
        or len(row.window) >= view.limits.session_window
        or time_ms - row.last_use > view.limits.session_idle_ms
        or queue is None
        or queue.deleted > 0
        or group is None
        or (command.visibility_timeout_ms or 0) > groups.policy(queue, group).max_lease_ms
    )


def _lease(envelope: Envelope) -> Lease:
    if not isinstance(envelope.command, Lease):
        raise StateBroken(problem=f"{type(envelope.command).__name__} came to wait; only a Lease does")
    return envelope.command


def _nothing_to_grant(
    view: View, queue: QueueRow, group: GroupRow, time_ms: int, session: bytes = b"", holder: bytes | None = None
) -> Reply | None:
    """In the order of `leases.grant`. `holder`: the session, where the lease would count as one of its."""
    group, _ = unfinished.finished(view, queue, group)
    if groups.ready(queue, group) <= 0:
        return leases.NOTHING
    policy = groups.policy(queue, group)
    over = leases.cap_exceeded(view, group, policy)
    lowest = None
    if over is not None or queue.ttl_rows:  # else any will do, and none need be looked for
        lowest = explain.lowest_available(view, queue, group)
        if lowest is None or _expires_unfolded(view, queue, group, lowest, time_ms):
            return leases.NOTHING
    if policy.max_in_flight is not None and group.in_flight >= policy.max_in_flight:
        return Failed(InFlightLimit(limit_name="max_in_flight", limit=policy.max_in_flight))
    limit = policy.max_in_flight_per_session
    if session and limit is not None and view.flight(group.hold, session)[0] >= limit:
        return Failed(InFlightLimit(limit_name="max_in_flight_per_session", limit=limit))
    limit = view.limits.leases_per_session
    if holder and view.flight(group.hold, holder)[1] >= limit:
        return Failed(InFlightLimit(limit_name="leases_per_session", limit=limit))
    return Failed(over) if over is not None and lowest is not None and lowest > group.settled_top else None


def _expires_unfolded(view: View, queue: QueueRow, group: GroupRow, version: int, time_ms: int) -> bool:
    """Whether the TTL of this version is due and not folded: a Touch will come, and then the next may be looked at."""
    batch = view.batch_at(queue.q, version)
    if batch is None or not 0 < batch.expires <= time_ms:
        return False
    return (batch.expires, batch.first) > (group.ttl_time, group.ttl_version)


# Deciding ------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Waiter:
    token: Token
    connection: Connection
    envelope: Envelope
    place: Place
    max_messages: int

    @property
    def request(self) -> tuple[bytes, int]:
        return self.envelope.session, self.envelope.request_seq


@dataclass(slots=True)
class _Group:
    parked: dict[Token, _Waiter] = field(default_factory=dict)  # in order of arrival
    proposed: dict[Token, _Waiter] = field(default_factory=dict)


class _Alarms(Generic[K]):
    """The earliest of many times, each of which may be moved or taken away."""

    def __init__(self) -> None:
        self._at: dict[K, int] = {}
        self._heap: list[tuple[int, int, K]] = []
        self._number = 0

    def set(self, key: K, at: int) -> None:
        if self._at.get(key) == at:
            return
        self._at[key] = at
        self._number += 1  # ties are not for the keys to break
        heapq.heappush(self._heap, (at, self._number, key))
        if len(self._heap) > 2 * len(self._at) + 64:  # long waits that were given up must not pile up
            self._heap = [(at, n, key) for n, (key, at) in enumerate(self._at.items())]
            self._number = len(self._heap)
            heapq.heapify(self._heap)

    def discard(self, key: K) -> None:
        self._at.pop(key, None)

    def next_at(self) -> int | None:
        while self._heap and self._at.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take(self, now: int) -> list[K]:
        """Take out those whose time has come, in order."""
        taken = []
        while (at := self.next_at()) is not None and at <= now:
            key = heapq.heappop(self._heap)[2]
            del self._at[key]
            taken.append(key)
        return taken


class Waiters:
    """The Leases of one log on its leader, and its timers: from `begin` to `lost_leadership`."""

    def __init__(self, bounds: Bounds | None = None) -> None:
        self.bounds = bounds or Bounds()
        self._forget_all()

    def __len__(self) -> int:
        return len(self._waiters)

    def _forget_all(self) -> None:
        self._waiters: dict[Token, _Waiter] = {}
        self._groups: dict[Place, _Group] = {}
        self._of_connection: Counter[Connection] = Counter()
        self._ends: _Alarms[Token] = _Alarms()  # of waits, by the monotonic clock
        self._due: _Alarms[Place] = _Alarms()  # of groups, in committed time
        self._new: dict[Token, None] = {}  # to be looked at for what the fold has to say at once
        self._ended: dict[Token, None] = {}  # waits that are over and confirmed
        self._woken: dict[Place, None] = {}
        self._changed: dict[int, None] = {}  # queues whose timers may be wrong
        self._refresh_at_ms = 0
        self._touch_soon: dict[int, None] = {}
        self._touching: set[tuple[int, str | None]] = set()
        self._touched_ms: dict[Place, int] = {}

    # What has come to pass

    def begin(self, view: View) -> None:
        """We lead: timers are rebuilt from the state (T3)."""
        self._forget_all()
        for key, _ in view.txn.scan(Table.GROUP, k1(0), TOP):
            self._changed[int.from_bytes(key[:8], "big")] = None

    def lost_leadership(self, leader: str | None) -> list[tuple[Token, NotLeader]]:
        """Those that are parked did not happen and go elsewhere; those that were proposed await their outcome."""
        parked = [token for group in self._groups.values() for token in group.parked]
        self._forget_all()
        return [(token, NotLeader(leader=leader)) for token in parked]

    def add(self, token: Token, connection: Connection, envelope: Envelope, now_ms: int) -> None:
        """A Lease has come, with `wait_ms` to wait from now. Raises Overloaded; it was not taken then."""
        command = _lease(envelope)
        if token in self._waiters:
            raise StateBroken(problem=f"{token!r} waits already")
        if len(self._waiters) >= self.bounds.parked:
            raise _overloaded("parked", self.bounds.parked)
        if self._of_connection[connection] >= self.bounds.parked_per_connection:
            raise _overloaded("parked_per_connection", self.bounds.parked_per_connection)
        waiter = _Waiter(token, connection, envelope, (command.queue_id, command.group), command.max_messages)
        self._waiters[token] = waiter
        self._of_connection[connection] += 1
        self._groups.setdefault(waiter.place, _Group()).parked[token] = waiter
        self._ends.set(token, now_ms + command.wait_ms)
        self._new[token] = self._woken[waiter.place] = self._changed[command.queue_id] = None

    def confirmed(self, token: Token) -> None:
        """A read barrier has passed for this one, and the state is at its index."""
        if token in self._waiters:
            self._ended[token] = None

    def resolved(self, token: Token) -> None:
        """A Lease that was proposed has its outcome, or was not taken into the log: the next ones may go."""
        waiter = self._forget(token)
        group = self._groups.get(waiter.place) if waiter is not None else None
        if waiter is not None and group is not None:
            # The same request again, from a client that lost its connection: now its answer is known (L4).
            self._new.update((t, None) for t, other in group.parked.items() if other.request == waiter.request)

    def cancel(self, token: Token) -> None:
        """Nobody waits for this one any more; if it is parked, it will not be proposed."""
        self._forget(token)

    def disconnected(self, connection: Connection) -> list[Token]:
        """All of a connection's are cancelled; these they were."""
        tokens = [token for token, waiter in self._waiters.items() if waiter.connection == connection]
        for token in tokens:
            self._forget(token)
        return tokens

    def effects(self, effects: Iterable[Effect]) -> None:
        """What apply asked for."""
        for effect in effects:
            match effect:
                case WakeConsumers(queue_id=q, group=group) | EndLeases(queue_id=q, group=group):
                    self._woken[q, group] = None
                    self._changed[q] = None
                case TouchSoon(queue_id=q):
                    self._touch_soon[q] = None
                case ReapSoon():
                    pass  # any entry does: nothing of it is a group's
                case unknown:
                    assert_never(unknown)

    def changed(self, queue_id: int) -> None:
        """An applied command named this queue: what is due there may come at another time."""
        self._changed[queue_id] = None

    def touched(self, touch: Touch, time_ms: int) -> None:
        """A Touch has its outcome, whatever it was."""
        self._touching.discard((touch.queue_id, touch.group))
        self._changed[touch.queue_id] = None
        for place in self._groups:
            if place[0] == touch.queue_id and touch.group in (None, place[1]):
                self._woken[place] = None
        if touch.group is not None:
            self._touched_ms[touch.queue_id, touch.group] = time_ms

    # What to do

    def next_wakeup_ms(self, now_ms: int, time_ms: int) -> int | None:
        """When by the monotonic clock `step` has something to do, if nothing comes to pass before."""
        if self._new or self._ended or self._woken or self._touch_soon:
            return now_ms
        times = [self._ends.next_at()]
        due_ms = self._due.next_at()
        if due_ms is not None:
            times.append(now_ms + max(due_ms - time_ms, 0))
        if self._changed:
            times.append(max(now_ms, self._refresh_at_ms))
        return min((at for at in times if at is not None), default=None)

    def step(self, view: View, now_ms: int, time_ms: int) -> list[Action]:
        """Decide by the state as it is applied now."""
        actions: list[Action] = []
        for token in self._take(self._new):
            if token in self._waiters and _fold_must_say(view, self._waiters[token].envelope, time_ms):
                self._propose(token, actions)
        for place in self._take(self._woken):
            self._serve(view, place, time_ms, actions)
        for token in self._ends.take(now_ms):
            if self._is_parked(token):
                actions.append(Confirm(token))
        for token in self._take(self._ended):
            if self._is_parked(token):
                self._finish(view, token, time_ms, actions)
        self._refresh(view, now_ms)
        self._touch(time_ms, actions)
        return actions

    def _serve(self, view: View, place: Place, time_ms: int, actions: list[Action]) -> None:
        """Propose those that came first, as many as what is available may be enough for.

        What is on its way may take all it asked for: woken all at once, the rest would only get empty answers.
        """
        group = self._groups.get(place)
        if group is None:
            return
        queue, row = view.queue(place[0]), view.group(*place)
        if queue is None or queue.deleted or row is None:
            for token in list(group.parked):
                self._propose(token, actions)
            return
        room = _room(view, queue, row) - sum(waiter.max_messages for waiter in group.proposed.values())
        asked = {waiter.request for waiter in group.proposed.values()}
        for token, waiter in list(group.parked.items()):
            if room <= 0:
                return
            if waiter.request not in asked and unlogged_answer(view, waiter.envelope, time_ms) is None:
                room -= waiter.max_messages
                asked.add(waiter.request)
                self._propose(token, actions)

    def _finish(self, view: View, token: Token, time_ms: int, actions: list[Action]) -> None:
        """The wait is over: what the state says, unless it is not up to date with what has fallen due (Q1)."""
        waiter = self._waiters[token]
        reply = unlogged_answer(view, waiter.envelope, time_ms)
        queue, group = view.queue(waiter.place[0]), view.group(*waiter.place)
        if reply is None or queue is None or group is None or is_due(view, queue, group, time_ms):
            self._propose(token, actions)
            return
        self._forget(token)
        actions.append(Finish(token, reply))

    def _refresh(self, view: View, now_ms: int) -> None:
        """Set the timers of queues that changed: at once where somebody waits, else for many changes together."""
        waited_for = {q for q, _ in self._groups}
        all_of_them = now_ms >= self._refresh_at_ms
        chosen = [q for q in self._changed if all_of_them or q in waited_for]
        if all_of_them and chosen:
            self._refresh_at_ms = now_ms + REFRESH_MS
        for q in chosen:
            del self._changed[q]
            queue = view.queue(q)
            names = set()
            if queue is not None and not queue.deleted:
                for row in view.groups(q):
                    names.add(row.name)
                    self._set_timer(view, queue, row)
            for place in [place for place in self._touched_ms if place[0] == q and place[1] not in names]:
                del self._touched_ms[place]

    def _set_timer(self, view: View, queue: QueueRow, group: GroupRow) -> None:
        """A timer where somebody waits, or where what falls due may move a message to another queue (T3)."""
        place = (queue.q, group.name)
        wanted = place in self._groups or groups.policy(queue, group).dlq_strategy == "move"
        due_ms = next_due_ms(view, queue, group) if wanted else None
        if due_ms is None:
            self._due.discard(place)
            self._touched_ms.pop(place, None)
        else:
            self._due.set(place, max(due_ms, self._touched_ms.get(place, 0) + TOUCH_GAP_MS))

    def _touch(self, time_ms: int, actions: list[Action]) -> None:
        """One Touch in flight for a group; one of the whole queue counts for all of its groups."""
        wanted: list[tuple[int, str | None]] = [(q, None) for q in self._touch_soon if (q, None) not in self._touching]
        for q, _ in wanted:
            del self._touch_soon[q]
        self._touching.update(wanted)
        for place in self._due.take(time_ms):
            if not self._touching & {place, (place[0], None)}:
                self._touching.add(place)
                wanted.append(place)
        actions += [Touch(queue_id=QueueId(q), group=group) for q, group in wanted]

    def _is_parked(self, token: Token) -> bool:
        waiter = self._waiters.get(token)
        return waiter is not None and token in self._groups[waiter.place].parked

    def _propose(self, token: Token, actions: list[Action]) -> None:
        if self._is_parked(token):
            waiter = self._waiters[token]
            group = self._groups[waiter.place]
            group.proposed[token] = group.parked.pop(token)
            self._ends.discard(token)
            actions.append(Propose(token, waiter.envelope))

    def _forget(self, token: Token) -> _Waiter | None:
        waiter = self._waiters.pop(token, None)
        if waiter is None:
            return None
        self._ends.discard(token)
        self._of_connection[waiter.connection] -= 1
        if not self._of_connection[waiter.connection]:
            del self._of_connection[waiter.connection]
        group = self._groups[waiter.place]
        if group.proposed.pop(token, None) is not None:
            self._woken[waiter.place] = None
        group.parked.pop(token, None)
        if not group.parked and not group.proposed:
            del self._groups[waiter.place]
            self._changed[waiter.place[0]] = None  # its timer may not be wanted any more
        return waiter

    @staticmethod
    def _take(noted: dict[K, None]) -> list[K]:
        taken = list(noted)
        noted.clear()
        return taken


def _room(view: View, queue: QueueRow, group: GroupRow) -> int:
    """How many messages may be handed out now, at most."""
    policy = groups.policy(queue, group)
    room = groups.ready(queue, group)
    if policy.max_in_flight is not None:
        room = min(room, policy.max_in_flight - group.in_flight)
    # Over the cap of L5 only some of what is ready may go: one Lease at a time finds out.
    return min(room, 1) if leases.cap_exceeded(view, group, policy) is not None else room


def is_due(view: View, queue: QueueRow, group: GroupRow, time_ms: int) -> bool:
    """Whether something of the group has fallen due and is not folded yet (T3)."""
    due_ms = next_due_ms(view, queue, group)
    return due_ms is not None and due_ms <= time_ms


def _overloaded(limit_name: str, limit: int) -> Overloaded:
    return Overloaded(limit_name=limit_name, limit=limit, retry_after_ms=RETRY_AFTER_MS)
