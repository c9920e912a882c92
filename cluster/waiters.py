"""Consumers parked until something is available (L7), and the Touches that make due things happen (T3).

Pure: effects, answers and times come in as values, `step` says what to do. Every Lease passes through here, so that
first come is first served in each group, and so that a Lease enters the log only if it may get something: the fold
remembers an empty answer under its request as it does any other (A1), so a Lease can be folded once and no more.
`now_ms` is the monotonic clock, for waits; `time_ms` is what the leader would stamp now, for what falls due.

One thread decides for all, so a step may cost what has come to pass since the last one and no more: it looks at a group
once, whoever waits there (`look`), and at a bounded number of timers; queues for which nothing happened cost nothing.
"""

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar, assert_never

from holdfast.client.protocol.commands import Envelope, Touch
from holdfast.client.protocol.errors import NotLeader, Overloaded, StateBroken
from holdfast.client.protocol.replies import Reply
from holdfast.client.protocol.values import QueueId
from holdfast.cluster.alarms import Alarms
from holdfast.cluster.look import Look, lease_of, next_due_ms
from holdfast.storage import groups
from holdfast.storage.effects import Effect, EndLeases, ReapSoon, TouchSoon, WakeConsumers
from holdfast.storage.rows import GroupRow, QueueRow
from holdfast.storage.state import View
from holdfast.storage.tables import TOP, Table, k1

Token = Hashable
Connection = Hashable
Place = tuple[int, str]  # a queue and a group of it
Asked = tuple[bytes, int]  # a session and its number for a request
K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=Hashable)

RETRY_AFTER_MS = 1_000  # waits are long: room comes no sooner
TOUCH_GAP_MS = 100  # between two Touches of a group: what falls due meanwhile shares the next
REFRESH_MS = 250  # how soon a change of a group for which nobody waits reaches its timer; T3 has a second
REFRESH_ROWS = 256  # queues and groups whose timers one step sets: some 10 ms; a new leader may have 10,000 queues


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


# Deciding ------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Waiter:
    token: Token
    connection: Connection
    envelope: Envelope
    place: Place
    max_messages: int

    @property
    def request(self) -> Asked:
        return self.envelope.session, self.envelope.request_seq


@dataclass(slots=True)
class _Group:
    parked: dict[Token, _Waiter] = field(default_factory=dict)  # in order of arrival
    proposed: dict[Token, _Waiter] = field(default_factory=dict)


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
        self._waited_for: dict[int, dict[str, None]] = {}  # groups with somebody in `_groups`, by queue
        self._same: dict[Asked, dict[Token, None]] = {}  # who asks for the same: a retry, while the first may wait
        self._ends: Alarms[Token] = Alarms()  # of waits, by the monotonic clock
        self._due: Alarms[Place] = Alarms()  # of groups, in committed time
        self._new: dict[Token, None] = {}  # to be looked at for what the fold has to say at once
        self._ended: dict[Token, None] = {}  # waits that are over and confirmed
        self._woken: dict[Place, None] = {}
        self._changed_soon: dict[int, None] = {}  # queues whose timers may be wrong, where somebody waits
        self._changed: dict[int, None] = {}  # others
        self._rebuilt_to: int | None = None  # queues from this one on have no timers yet
        self._refresh_at_ms = 0
        self._touch_soon: dict[int, None] = {}
        self._touching: set[tuple[int, str | None]] = set()
        self._touched_ms: dict[int, dict[str, int]] = {}

    # What has come to pass

    def begin(self) -> None:
        """We lead: timers are rebuilt from the state (T3), a part of them in each step."""
        self._forget_all()
        self._rebuilt_to = 0

    def lost_leadership(self, leader: str | None) -> list[tuple[Token, NotLeader]]:
        """Those that are parked did not happen and go elsewhere; those that were proposed await their outcome."""
        parked = [token for group in self._groups.values() for token in group.parked]
        self._forget_all()
        return [(token, NotLeader(leader=leader)) for token in parked]

    def add(self, token: Token, connection: Connection, envelope: Envelope, now_ms: int) -> None:
        """A Lease has come, with `wait_ms` to wait from now. Raises Overloaded; it was not taken then."""
        command = lease_of(envelope)
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
        self._waited_for.setdefault(command.queue_id, {})[command.group] = None
        self._same.setdefault(waiter.request, {})[token] = None
        self._ends.set(token, now_ms + command.wait_ms)
        self._new[token] = self._woken[waiter.place] = None
        self.changed(command.queue_id)

    def confirmed(self, token: Token) -> None:
        """A read barrier has passed for this one, and the state is at its index."""
        if token in self._waiters:
            self._ended[token] = None

    def resolved(self, token: Token) -> None:
        """A Lease that was proposed has its outcome, or was not taken into the log: the next ones may go."""
        waiter = self._forget(token)
        if waiter is not None:
            # The same request again, from a client that lost its connection: now its answer is known (L4).
            self._new.update(self._same.get(waiter.request, {}))

    def cancel(self, token: Token) -> None:
        """Nobody waits for this one any more; if it is parked, it will not be proposed."""
        self._forget(token)

    def effects(self, effects: Iterable[Effect]) -> None:
        """What apply asked for."""
        for effect in effects:
            match effect:
                case WakeConsumers(queue_id=q, group=group) | EndLeases(queue_id=q, group=group):
                    self._woken[q, group] = None
                    self.changed(q)
                case TouchSoon(queue_id=q):
                    self._touch_soon[q] = None
                case ReapSoon():
                    pass  # any entry does: nothing of it is a group's
                case unknown:
                    assert_never(unknown)

    def changed(self, queue_id: int) -> None:
        """An applied command named this queue: what is due there may come at another time."""
        (self._changed_soon if queue_id in self._waited_for else self._changed)[queue_id] = None

    def touched(self, touch: Touch, time_ms: int) -> None:
        """A Touch has its outcome, whatever it was."""
        self._touching.discard((touch.queue_id, touch.group))
        self.changed(touch.queue_id)
        for name in self._waited_for.get(touch.queue_id, {}):
            if touch.group in (None, name):
                self._woken[touch.queue_id, name] = None
        if touch.group is not None:
            self._touched_ms.setdefault(touch.queue_id, {})[touch.group] = time_ms

    # What to do

    def is_behind(self, now_ms: int) -> bool:
        """Whether one step was not enough for what there was to do: the next is not to wait."""
        more = bool(self._changed) or self._rebuilt_to is not None
        return bool(self._changed_soon) or (more and now_ms >= self._refresh_at_ms)

    def next_wakeup_ms(self, now_ms: int, time_ms: int) -> int | None:
        """When by the monotonic clock `step` has something to do, if nothing comes to pass before."""
        if self._new or self._ended or self._woken or self._touch_soon or self._changed_soon:
            return now_ms
        times = [self._ends.next_at()]
        due_ms = self._due.next_at()
        if due_ms is not None:
            times.append(now_ms + max(due_ms - time_ms, 0))
        if self._changed or self._rebuilt_to is not None:
            times.append(max(now_ms, self._refresh_at_ms))
        return min((at for at in times if at is not None), default=None)

    def step(self, view: View, now_ms: int, time_ms: int) -> list[Action]:
        """Decide by the state as it is applied now."""
        actions: list[Action] = []
        looks: dict[Place, Look] = {}

        def look(place: Place) -> Look:
            if place not in looks:
                looks[place] = Look(view, *place, time_ms)
            return looks[place]

        for token in self._take(self._new):
            waiter = self._waiters.get(token)
            if waiter is not None and look(waiter.place).fold_must_say(waiter.envelope):
                self._propose(token, actions)
        for place in self._take(self._woken):
            if place in self._groups:
                self._serve(self._groups[place], look(place), actions)
        for token in self._ends.take(now_ms):
            if self._is_parked(token):
                actions.append(Confirm(token))
        for token in self._take(self._ended):
            if self._is_parked(token):
                self._finish(token, look(self._waiters[token].place), actions)
        self._refresh(view, now_ms)
        self._touch(time_ms, actions)
        return actions

    def _serve(self, group: _Group, look: Look, actions: list[Action]) -> None:
        """Propose those that came first, as many as what is available may be enough for.

        What is on its way may take all it asked for: woken all at once, the rest would only get empty answers.
        """
        if look.is_shut:
            return
        room = look.room - sum(waiter.max_messages for waiter in group.proposed.values())
        asked = {waiter.request for waiter in group.proposed.values()}
        for token, waiter in list(group.parked.items()):
            if look.exists:
                if room <= 0:
                    return
                if waiter.request in asked or look.refusal(waiter.envelope) is not None:
                    continue
            room -= waiter.max_messages
            asked.add(waiter.request)
            self._propose(token, actions)

    def _finish(self, token: Token, look: Look, actions: list[Action]) -> None:
        """The wait is over: what the state says, unless it is not up to date with what has fallen due (Q1)."""
        reply = look.unlogged_answer(self._waiters[token].envelope)
        if reply is None or look.is_due:
            self._propose(token, actions)
            return
        self._forget(token)
        actions.append(Finish(token, reply))

    def _refresh(self, view: View, now_ms: int) -> None:
        """Set the timers of queues that changed: at once where somebody waits, else for many changes together."""
        rows = self._refresh_each(view, self._changed_soon, REFRESH_ROWS)
        if now_ms < self._refresh_at_ms or not (self._changed or self._rebuilt_to is not None):
            return
        rows = self._refresh_each(view, self._changed, rows)
        while rows > 0 and self._rebuilt_to is not None:
            found = view.txn.first(Table.GROUP, k1(self._rebuilt_to), TOP)
            self._rebuilt_to = None
            if found is not None:
                q = int.from_bytes(found[0][:8], "big")
                self._rebuilt_to = q + 1
                rows = self._refresh_each(view, {q: None}, rows)
        if not self._changed and self._rebuilt_to is None:
            self._refresh_at_ms = now_ms + REFRESH_MS

    def _refresh_each(self, view: View, queues: dict[int, None], rows: int) -> int:
        """Set timers of these, and take them out, until so many rows were looked at; says how many are left."""
        while queues and rows > 0:
            q = next(iter(queues))
            del queues[q]
            queue = view.queue(q)
            rows -= 1
            names = set()
            if queue is not None and not queue.deleted:
                for row in view.groups(q):
                    names.add(row.name)
                    self._set_timer(view, queue, row)
                    rows -= 1
            touched = self._touched_ms.get(q, {})
            for name in [name for name in touched if name not in names]:
                self._forget_touch(q, name)
        return rows

    def _set_timer(self, view: View, queue: QueueRow, group: GroupRow) -> None:
        """A timer where somebody waits, or where what falls due may move a message to another queue (T3)."""
        place = (queue.q, group.name)
        wanted = place in self._groups or groups.policy(queue, group).dlq_strategy == "move"
        due_ms = next_due_ms(view, queue, group) if wanted else None
        if due_ms is None:
            self._due.discard(place)
            self._forget_touch(*place)
        else:
            touched_ms = self._touched_ms.get(queue.q, {}).get(group.name, 0)
            self._due.set(place, max(due_ms, touched_ms + TOUCH_GAP_MS))

    def _forget_touch(self, q: int, name: str) -> None:
        touched = self._touched_ms.get(q)
        if touched is not None and touched.pop(name, None) is not None and not touched:
            del self._touched_ms[q]

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
        _drop(self._same, waiter.request, token)
        group = self._groups[waiter.place]
        if group.proposed.pop(token, None) is not None:
            self._woken[waiter.place] = None
        group.parked.pop(token, None)
        if not group.parked and not group.proposed:
            del self._groups[waiter.place]
            _drop(self._waited_for, *waiter.place)
            self.changed(waiter.place[0])  # its timer may not be wanted any more
        return waiter

    @staticmethod
    def _take(noted: dict[K, None]) -> list[K]:
        taken = list(noted)
        noted.clear()
        return taken


def _drop(index: dict[K, dict[V, None]], key: K, value: V) -> None:
    index[key].pop(value, None)
    if not index[key]:
        del index[key]


def _overloaded(limit_name: str, limit: int) -> Overloaded:
    return Overloaded(limit_name=limit_name, limit=limit, retry_after_ms=RETRY_AFTER_MS)
