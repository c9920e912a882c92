"""What a group has for Leases, as the leader sees it in one state at one time: looked at once for all who wait there.

Pure, and the same for one open lease and for a hundred thousand: nothing here walks over leases, holes or gaps. What
the fold would answer without handing anything out needs no log entry (L7); where that is not certain, the fold says it.
"""

from holdfast.client.protocol.commands import Envelope, Lease
from holdfast.client.protocol.errors import InFlightLimit, StateBroken
from holdfast.client.protocol.replies import Failed, Reply
from holdfast.storage import explain, groups, leases, unfinished
from holdfast.storage.rows import NEVER, GroupRow, QueueRow
from holdfast.storage.state import View
from holdfast.storage.tables import Table, k1, k3


class Look:
    """See the module. Whatever is asked of it, it reads the group's part of the state no more than once."""

    def __init__(self, view: View, queue_id: int, name: str, time_ms: int) -> None:
        self._view, self._time_ms = view, time_ms
        queue, group = view.queue(queue_id), view.group(queue_id, name)
        self._found = (queue, group) if queue is not None and not queue.deleted and group is not None else None
        self._limits: dict[tuple[bytes, bool], Failed | None] = {}  # of sessions
        self._is_due: bool | None = None
        self._first: Reply | None = None
        self._last: Reply | None = None
        self.room = 0  # how many messages may be handed out now, at most
        if self._found is not None:
            self._read(*self._found)

    @property
    def exists(self) -> bool:
        return self._found is not None

    @property
    def is_shut(self) -> bool:
        """Whether nobody gets anything now, whoever it is."""
        return self._first is not None or self._last is not None

    @property
    def is_due(self) -> bool:
        """Whether something has fallen due and is not folded yet (T3)."""
        if self._is_due is None:
            self._is_due = self._found is not None and is_due(self._view, *self._found, self._time_ms)
        return self._is_due

    def unlogged_answer(self, envelope: Envelope) -> Reply | None:
        """The fold's answer to a Lease that would grant nothing: empty, or a limit (L1, L5). None: the fold must say.

        That is so where something may be granted, and where the request is refused or was answered before (A1, L4).
        """
        return None if self.fold_must_say(envelope) else self.refusal(envelope)

    def fold_must_say(self, envelope: Envelope) -> bool:
        """Whether there is an answer, whatever is available: of the session (A1), or a refusal."""
        if self._found is None:
            return True
        command, number, view = lease_of(envelope), envelope.request_seq, self._view
        row = view.session(envelope.session)
        return (
            row is None
            or row.principal != envelope.principal
            or number < max(row.done_below, envelope.done_below)
            or number in row.window
            or len(row.window) >= view.limits.session_window
            or self._time_ms - row.last_use > view.limits.session_idle_ms
            or (command.visibility_timeout_ms or 0) > groups.policy(*self._found).max_lease_ms
        )

    def refusal(self, envelope: Envelope) -> Reply | None:
        """Why there is nothing for this one, in the order of `leases.grant`; none: it may get something."""
        if self._first is not None or self._found is None:
            return self._first
        key = envelope.session, lease_of(envelope).auto_ack
        if key not in self._limits:
            self._limits[key] = self._limit(*self._found, *key)
        return self._limits[key] or self._last

    def _limit(self, queue: QueueRow, group: GroupRow, session: bytes, auto_ack: bool) -> Failed | None:
        flown, leased = self._view.flight(group.hold, session)
        limit = groups.policy(queue, group).max_in_flight_per_session
        if limit is not None and flown >= limit:
            return Failed(InFlightLimit(limit_name="max_in_flight_per_session", limit=limit))
        limit = self._view.limits.leases_per_session
        if not auto_ack and leased >= limit:  # one that is settled at hand-out does not count as one of its leases
            return Failed(InFlightLimit(limit_name="leases_per_session", limit=limit))
        return None

    def _read(self, queue: QueueRow, group: GroupRow) -> None:
        """What everybody is told, before and after the limits of one's own session."""
        view, policy = self._view, groups.policy(queue, group)
        if groups.ready(queue, group) <= 0:
            self._first = leases.NOTHING
            return
        over = leases.cap_exceeded(view, group, policy)
        unknown = unfinished.may_exceed(queue, group, leases.hole_cap(group, policy))
        lowest = None
        if over is not None or unknown or queue.ttl_rows or group.gaps_to:
            # Else any version will do, and none need be looked for. While gaps are taken over, some of what seems to
            # be ready is not stored.
            lowest = explain.lowest_available(view, queue, group, view.limits.scan_batches)
            if lowest == 0:
                self.room = 1  # one Lease at a time goes on in the log from where the one before it came to
                return
            if lowest is None or self._expires_unfolded(queue, group, lowest):
                self._first = leases.NOTHING
                return
        if policy.max_in_flight is not None and group.in_flight >= policy.max_in_flight:
            self._first = Failed(InFlightLimit(limit_name="max_in_flight", limit=policy.max_in_flight))
        elif unknown:
            self._last = Failed(unfinished.overloaded(view))
        elif over is not None and lowest is not None and lowest > group.settled_top:
            self._last = Failed(over)
        else:
            self.room = groups.ready(queue, group)
            if policy.max_in_flight is not None:
                self.room = min(self.room, policy.max_in_flight - group.in_flight)
            # Over the cap of L5 only some of what is ready may go, and while gaps are taken over only some of it is
            # stored: one Lease at a time finds out.
            self.room = min(self.room, 1) if over is not None or group.gaps_to else self.room

    def _expires_unfolded(self, queue: QueueRow, group: GroupRow, version: int) -> bool:
        """Whether the TTL of this version is due and not folded: a Touch will come, and then the next may be seen."""
        batch = self._view.batch_at(queue.q, version)
        if batch is None or not 0 < batch.expires <= self._time_ms:
            return False
        return (batch.expires, batch.first) > (group.ttl_time, group.ttl_version)


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


def is_due(view: View, queue: QueueRow, group: GroupRow, time_ms: int) -> bool:
    """Whether something of the group has fallen due and is not folded yet (T3)."""
    due_ms = next_due_ms(view, queue, group)
    return due_ms is not None and due_ms <= time_ms


def lease_of(envelope: Envelope) -> Lease:
    if not isinstance(envelope.command, Lease):
        raise StateBroken(problem=f"{type(envelope.command).__name__} came to wait; only a Lease does")
    return envelope.command
