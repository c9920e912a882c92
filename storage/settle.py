"""Ack, Nack, Release and Extend (S1 … S4): what a session may still say about the lease that it holds."""

from holdfast.client.protocol.commands import AckBatch, Extend, Nack, Release, SettleRange
from holdfast.client.protocol.errors import (
    AlreadySettled,
    HoldfastError,
    LeaseExpired,
    LeaseNotFound,
    LeaseTooLong,
    NackDelayTooLong,
    NotLeaseOwner,
    VersionNotInLease,
)
from holdfast.client.protocol.replies import Extended, RefusedRange, Settled
from holdfast.client.protocol.values import GENERATION_SHIFT
from holdfast.storage import groups, history, leases, survivors
from holdfast.storage.effects import WakeConsumers
from holdfast.storage.rows import (
    BEGUN,
    LEASE_AUTO,
    REDRIVE,
    WHY_NUMBER,
    GroupRow,
    LeaseRow,
    QueueRow,
    Span,
    versions_in,
)
from holdfast.storage.state import State, View
from holdfast.storage.tables import Table, k2, k4

ACKED = WHY_NUMBER["acked"]

Run = tuple[int, int, int]  # first, last, error code (0: held)


def ack(state: State, queue: QueueRow, group: GroupRow, command: AckBatch, session: bytes) -> Settled:
    """Settle what is held of these ranges; the others of the batch are done all the same (S1)."""
    taking = Taking(state, queue, group, session)
    for wanted in command.ranges:
        taken = taking.take(wanted)
        for lo, hi, redriven in _merged(taken):
            groups.settle(state, queue, group, lo, hi, ACKED, redriven=redriven)
            history.record(state, queue, "ack", state.time_ms, lo, hi, group.name, wanted[0], taken[0].consumer, "")
    return taking.finish()


def nack(state: State, queue: QueueRow, group: GroupRow, command: Nack, session: bytes) -> Settled:
    """These failed (S3): dead at once, away for a while, or available again."""
    delay = nack_delay(state, queue, group, command)
    policy = groups.policy(queue, group)
    error = command.error or None
    taking = Taking(state, queue, group, session)
    for wanted in command.ranges:
        back: list[tuple[Span, int]] = []
        for span in taking.take(wanted):
            span.flags |= BEGUN  # who says that it failed has begun it
            span.attempts = leases.attempts_after(taking.row, span)
            span.flags &= ~BEGUN
            if error is not None:
                span.error = error
            away = delay
            if away is None:
                away = min(policy.backoff.delay_ms(span.attempts), policy.max_nack_delay_ms)
            history.record(
                state, queue, "nack", state.time_ms, span.lo, span.hi, group.name, wanted[0], span.consumer, error or ""
            )
            back.append((span, state.time_ms + away))
        groups.come_back(state, queue, group, back, at_ms=state.time_ms, rejected=command.dead)
    return taking.finish()


def release(state: State, queue: QueueRow, group: GroupRow, command: Release, session: bytes) -> Settled:
    """Handed back unstarted: no attempt, no delay (L2)."""
    taking = Taking(state, queue, group, session)
    for wanted in command.ranges:
        taken = taking.take(wanted)
        for span in taken:
            span.flags &= ~BEGUN
            history.record(
                state, queue, "release", state.time_ms, span.lo, span.hi, group.name, wanted[0], span.consumer, ""
            )
        groups.come_back(state, queue, group, [(span, 0) for span in taken], at_ms=state.time_ms)
    return taking.finish()


def extend(state: State, queue: QueueRow, group: GroupRow, command: Extend, session: bytes) -> Extended:
    """Move the deadline, never back and never beyond the longest lease (S4); mark what was begun (L2)."""
    policy = groups.policy(queue, group)
    row = open_lease(state, group, command.lease_id, session)
    timeout = command.visibility_timeout_ms
    if timeout is None:
        timeout = policy.visibility_timeout_ms
    elif timeout > policy.max_lease_ms:
        raise LeaseTooLong(timeout_ms=timeout, limit=policy.max_lease_ms)
    deadline = max(row.deadline, min(state.lease_time + timeout, row.granted_at + policy.max_lease_ms))
    if deadline != row.deadline:
        lowest = row.granted[0][0]
        state.delete(Table.LEASE_DUE, k4(group.hold, row.deadline, lowest, command.lease_id))
        state.insert(Table.LEASE_DUE, k4(group.hold, deadline, lowest, command.lease_id), b"")
        row.deadline = deadline
    for lo, hi in command.begin:
        row.held = _begin(row.held, lo, hi)
    state.put(Table.LEASE, k2(group.hold, command.lease_id), row.pack())
    for lo, hi, _ in _merged(row.held):
        consumer = row.held[0].consumer
        history.record(state, queue, "extend", state.time_ms, lo, hi, group.name, command.lease_id, consumer, "")
    held = tuple((lo, hi) for lo, hi in _plain_ranges(row.held))
    return Extended(deadline_ms=deadline + state.meta.steps, held=held)


def open_lease(view: View, group: GroupRow, lease_id: int, session: bytes) -> LeaseRow:
    """The lease, if this session may speak of it now. Raises in the order of S1."""
    counter = lease_id & ((1 << GENERATION_SHIFT) - 1)
    generation = lease_id >> GENERATION_SHIFT
    newest = (view.meta.generation, view.meta.lease_ids)
    if not counter or (generation, counter) > newest:
        raise LeaseNotFound(lease_id=lease_id)
    row = leases.read_lease(view, group, lease_id)
    if row is None or row.flags & LEASE_AUTO or view.lease_time >= row.deadline:
        raise LeaseExpired(lease_id=lease_id)
    if row.session != session:
        raise NotLeaseOwner(lease_id=lease_id)
    return row


def nack_delay(view: View, queue: QueueRow, group: GroupRow, command: Nack) -> int | None:
    """The delay that a Nack asks for, or none: then the group's backoff decides."""
    delay = command.delay_ms
    if command.not_before_ms is not None:
        delay = max(command.not_before_ms - view.time_ms, 0)
    limit = groups.policy(queue, group).max_nack_delay_ms
    if delay is not None and delay > limit:
        raise NackDelayTooLong(delay_ms=delay, limit=limit)
    return delay


class Taking:
    """Takes ranges out of leases, one requested range after the other, and writes each touched lease once."""

    def __init__(self, state: State, queue: QueueRow, group: GroupRow, session: bytes) -> None:
        policy = groups.policy(queue, group)
        self._limited = policy.max_in_flight is not None or policy.max_in_flight_per_session is not None
        self._state = state
        self._group = group
        self._session = session
        self._open: dict[int, LeaseRow] = {}
        self._count = 0
        self._refused: list[RefusedRange] = []
        self.row: LeaseRow  # the lease of the range taken last

    def take(self, wanted: SettleRange) -> list[Span]:
        """What the lease holds of this range, in flight no more; the rest is noted as refused."""
        lease_id, first, last = wanted
        row = self._open.get(lease_id)
        if row is None:
            try:
                row = open_lease(self._state, self._group, lease_id, self._session)
            except HoldfastError as error:
                self._refused.append(RefusedRange(lease_id, first, last, error.code))
                return []
            self._open[lease_id] = row
        self.row = row
        taken, rest = _split(row.held, first, last)
        n = versions_in(taken)
        if n != last - first + 1:
            for lo, hi, code in _runs(row, taken, first, last):
                if code:
                    self._refused.append(RefusedRange(lease_id, lo, hi, code))
        if n:
            if self._group.sort_to:
                survivors.sort_first(self._state, self._group, lease_id, taken)
            row.held = rest
            self._count += n
            self._group.in_flight -= n
            self._state.add_flight(self._group.hold, self._session, -n, 0)
            if not rest:
                leases.end_lease(self._state, self._group, lease_id, row)
                del self._open[lease_id]
        return taken

    def finish(self) -> Settled:
        """The answer; who waits under a limit of L1 or L5 may have room now."""
        group = self._group
        if self._count and (self._limited or group.holes):
            self._state.effects[WakeConsumers(group.q, group.name)] = None
        for lease_id, row in self._open.items():
            self._state.put(Table.LEASE, k2(self._group.hold, lease_id), row.pack())
        self._state.touch_group(self._group)
        return Settled(count=self._count, refused=tuple(self._refused))


def _split(held: list[Span], first: int, last: int) -> tuple[list[Span], list[Span]]:
    """Held spans inside and outside first … last."""
    if len(held) == 1:
        span = held[0]
        if span.lo >= first and span.hi <= last:
            return held, []
    inside: list[Span] = []
    outside: list[Span] = []
    for span in held:
        if span.hi < first or span.lo > last:
            outside.append(span)
            continue
        if span.lo < first:
            outside.append(span.part(span.lo, first - 1))
        inside.append(span.part(max(span.lo, first), min(span.hi, last)))
        if span.hi > last:
            outside.append(span.part(last + 1, span.hi))
    return inside, outside


def _runs(row: LeaseRow, taken: list[Span], first: int, last: int) -> list[Run]:
    """What is true of each version of first … last, as maximal runs: taken now, settled before, never in here."""
    runs: list[Run] = []

    def add(lo: int, hi: int, code: int) -> None:
        if lo > hi:
            return
        if runs and runs[-1][2] == code:
            runs[-1] = (runs[-1][0], hi, code)
        else:
            runs.append((lo, hi, code))

    at = first
    for granted_lo, granted_hi in row.granted:
        if granted_hi < at or granted_lo > last:
            continue
        add(at, granted_lo - 1, VersionNotInLease.code)
        at = max(at, granted_lo)
        end = min(granted_hi, last)
        for span in taken:
            if span.hi < at or span.lo > end:
                continue
            add(at, span.lo - 1, AlreadySettled.code)
            add(span.lo, span.hi, 0)
            at = span.hi + 1
        add(at, end, AlreadySettled.code)
        at = end + 1
    add(at, last, VersionNotInLease.code)
    return runs


def _begin(held: list[Span], lo: int, hi: int) -> list[Span]:
    inside, outside = _split(held, lo, hi)
    if inside is held:
        inside = [span.part(span.lo, span.hi) for span in held]
    for span in inside:
        span.flags |= BEGUN
    return sorted(inside + outside, key=lambda span: span.lo)


def _merged(spans: list[Span]) -> list[tuple[int, int, bool]]:
    """Consecutive spans as one range where both are redriven or neither is."""
    ranges: list[tuple[int, int, bool]] = []
    for span in spans:
        redriven = bool(span.flags & REDRIVE)
        if ranges and ranges[-1][1] == span.lo - 1 and ranges[-1][2] == redriven:
            ranges[-1] = (ranges[-1][0], span.hi, redriven)
        else:
            ranges.append((span.lo, span.hi, redriven))
    return ranges


def _plain_ranges(spans: list[Span]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for span in spans:
        if ranges and ranges[-1][1] == span.lo - 1:
            ranges[-1] = (ranges[-1][0], span.hi)
        else:
            ranges.append((span.lo, span.hi))
    return ranges
