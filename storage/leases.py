"""Granting (L1 … L6): which versions a Lease takes, and what a lease is when it is asked for again.

Available are the spans of BACK, and the *plain* versions at or above the cursor: stored in a batch without due time,
and not settled. Both are walked together, lowest version first.
"""

import bisect

from holdfast.client.protocol import columns as batches
from holdfast.client.protocol.commands import Lease
from holdfast.client.protocol.errors import AckHoleCapExceeded, InFlightLimit, LeaseExpired, LeaseTooLong
from holdfast.client.protocol.replies import Grant, Leased
from holdfast.client.protocol.values import Columns, LeaseId
from holdfast.storage import clock, freeing, groups, history, settled, unfinished
from holdfast.storage.effects import WakeConsumers
from holdfast.storage.groups import Policy
from holdfast.storage.rows import (
    BEGUN,
    LEASE_AUTO,
    LEASE_COUNTS_BEGUN,
    NEVER,
    REDRIVE,
    WHY_NUMBER,
    BatchRow,
    GroupRow,
    LeaseRow,
    QueueRow,
    Span,
    unpack_lease,
    unpack_span,
    versions_in,
)
from holdfast.storage.state import State, View
from holdfast.storage.tables import BACK, DONE, LEASE, LEASE_DUE, Table, k1, k2, k4

ACKED = WHY_NUMBER["acked"]
NOTHING = Leased(lease_id=LeaseId(0), deadline_ms=0, grants=())


def grant(state: State, queue: QueueRow, group: GroupRow, command: Lease, session: bytes, consumer: str) -> Leased:
    """Take the lowest available versions for this session, under a new lease id (L1)."""
    policy = groups.policy(queue, group)
    timeout = command.visibility_timeout_ms
    if timeout is None:
        timeout = policy.visibility_timeout_ms
    elif timeout > policy.max_lease_ms:
        raise LeaseTooLong(timeout_ms=timeout, limit=policy.max_lease_ms)
    walk = Walk(state, queue, group, policy.max_delivery_attempts)
    if not walk.find():
        walk.finish()
        return NOTHING
    room = min(_room(state, group, policy, session, command.auto_ack), command.max_messages)
    ceiling = NEVER
    if unfinished.may_exceed(queue, group, hole_cap(group, policy)):
        raise unfinished.overloaded(state)
    over = cap_exceeded(state, group, policy)
    if over is not None:
        ceiling = group.settled_top
        if walk.lo > ceiling:
            raise over
    taken = _take(walk, room, command.max_bytes, ceiling)
    walk.finish()
    lease_id = state.next_id("lease_ids")
    deadline = state.lease_time + timeout
    _mark_delivered(taken, state.time_ms, consumer)
    flags = LEASE_COUNTS_BEGUN if policy.count == "begun" else 0
    ranges = _ranges(taken)
    for lo, hi in ranges:
        history.record(state, queue, "lease", state.time_ms, lo, hi, group.name, lease_id, consumer, "")
    if command.auto_ack:
        _settle_at_hand_out(state, queue, group, lease_id, taken, ranges, consumer)
        flags |= LEASE_AUTO
    else:
        n = versions_in(taken)
        group.in_flight += n
        state.add_flight(group.hold, session, n, 1)
    row = LeaseRow(session, deadline, state.lease_time, flags, ranges, taken)
    scope = group.g if command.auto_ack else group.hold  # an auto-acked one is not in flight: no purge ends it
    state.insert(LEASE, k2(scope, lease_id), row.pack())
    state.insert(LEASE_DUE, k4(scope, deadline, ranges[0][0], lease_id), b"")
    if deadline < group.lease_due:
        group.lease_due = deadline
    state.touch_group(group)
    return _leased(state, group, lease_id, row)


def again(view: View, group: GroupRow | None, lease_id: int) -> Leased:
    """A Lease asked for again: that lease as it is now (L4), or LeaseExpired."""
    row = read_lease(view, group, lease_id) if group is not None else None
    if group is None or row is None or view.lease_time >= row.deadline:
        raise LeaseExpired(lease_id=lease_id)
    return _leased(view, group, lease_id, row, replayed=True)


def read_lease(view: View, group: GroupRow, lease_id: int) -> LeaseRow | None:
    data = view.txn.get(LEASE, k2(group.hold, lease_id))
    if data is None and group.pins:
        data = view.txn.get(LEASE, k2(group.g, lease_id))
    return None if data is None else unpack_lease(data)


def end_lease(state: State, group: GroupRow, lease_id: int, row: LeaseRow) -> None:
    """Forget a lease that holds nothing any more."""
    auto = row.flags & LEASE_AUTO
    scope = group.g if auto else group.hold
    state.delete(LEASE, k2(scope, lease_id))
    state.delete(LEASE_DUE, k4(scope, row.deadline, row.granted[0][0], lease_id))
    if not auto:
        state.add_flight(group.hold, row.session, 0, -1)
    state.touch_group(group)


def end_auto(state: State, queue: QueueRow, group: GroupRow, lease_id: int, row: LeaseRow) -> None:
    """Nobody can ask for this auto-acked lease again: its bodies need not be kept for it (L6)."""
    end_lease(state, group, lease_id, row)
    freeing.unpin(state, queue, group, row.granted)


def attempts_after(row: LeaseRow, span: Span) -> int:
    """The attempts of a span whose lease ends without Release (L2)."""
    if row.flags & LEASE_COUNTS_BEGUN and not span.flags & BEGUN:
        return span.attempts
    return span.attempts + 1


def cap_exceeded(view: View, group: GroupRow, policy: Policy) -> AckHoleCapExceeded | None:
    """The refusal of L5, if the group is over its cap."""
    cap = hole_cap(group, policy)
    if group.holes <= cap:
        return None
    return AckHoleCapExceeded(holes=group.holes, cap=cap, next_due_ms=next_due(view, group))


def hole_cap(group: GroupRow, policy: Policy) -> int:
    """The cap in force (0002, 14)."""
    return policy.max_ack_holes + group.held_passed + group.redriven


def next_due(view: View, group: GroupRow) -> int | None:
    """When the next lease falls due or the next nack delay ends, in committed time."""
    times = []
    lease = view.txn.first(LEASE_DUE, k1(group.hold), k1(group.hold + 1)) if group.in_flight else None
    if lease is not None:
        times.append(clock.due_time(view.meta, int.from_bytes(lease[0][8:16], "big")))
    wait = view.txn.first(Table.WAIT_DUE, k1(group.shelf), k1(group.shelf + 1)) if group.waiting else None
    if wait is not None:
        times.append(int.from_bytes(wait[0][8:16], "big"))
    return min(times) if times else None


class Walk:
    """Walks the available versions of a group upwards. `find` stops at a piece: lo … hi of one batch, with its past."""

    def __init__(self, state: State, queue: QueueRow, group: GroupRow, max_attempts: int) -> None:
        self._state = state
        self._queue = queue
        self._group = group
        self._max_attempts = max_attempts
        self._back_from = 0
        self._back: Span | None = None
        self._back_key = 0
        self._back_read = False
        self._plain_from = max(group.cursor, group.skip_to)
        self._plain: tuple[int, int, BatchRow] | None = None
        self._plain_read = False
        self._held_seen = group.skip_held  # held batches between the cursor and where the plain walk is
        self._steps = state.limits.scan_batches
        self.lo = self.hi = 0
        self.past: Span | None = None  # what is known of a piece that was delivered before
        self.batch: BatchRow | None = None

    def find(self) -> bool:
        """Go to the next available piece; deaths that were due at hand-out happen on the way (L3)."""
        state = self._state
        while True:
            back, plain = self._next_back(), self._next_plain()
            if back is not None and (plain is None or back.lo < plain[0]):
                if back.attempts >= self._max_attempts:
                    state.delete(BACK, k2(self._group.shelf, self._back_key))
                    self._back_read = False
                    self._back_from = back.hi + 1
                    for version in range(back.lo, back.hi + 1):  # the limit was lowered: each dies by itself
                        gone = [back.part(version, version)]
                        groups.end(state, self._queue, self._group, gone, "max_attempts", state.time_ms)
                    continue
                batch = state.batch_at(self._queue.q, back.lo)
                assert batch is not None
                if 0 < batch.expires <= state.time_ms and not back.flags & REDRIVE:
                    self._skip_back(min(back.hi, batch.last))
                    continue
                self.lo, self.hi, self.past, self.batch = back.lo, min(back.hi, batch.last), back, batch
                return True
            if plain is None:
                return False
            self.lo, self.hi, self.batch = plain
            self.past = None
            return True

    def take(self, hi: int) -> Span:
        """Take the piece up to `hi`; the walk goes on behind it."""
        group = self._group
        lo, past = self.lo, self.past
        if past is None:
            group.held_passed += self._held_seen
            self._held_seen = 0
            group.cursor = hi + 1
            self._plain_from = hi + 1
            self._plain_read = False
            return Span(lo, hi)
        self._state.delete(BACK, k2(group.shelf, self._back_key))
        if self._back_key < lo:  # what was stepped over before this piece stays
            rest = past.part(self._back_key, lo - 1)
            self._state.insert(BACK, k2(group.shelf, rest.lo), rest.pack())
        if hi < past.hi:
            rest = past.part(hi + 1, past.hi)
            self._state.insert(BACK, k2(group.shelf, rest.lo), rest.pack())
        self._back_from = hi + 1
        self._back_read = False
        return past.part(lo, hi)

    def finish(self) -> None:
        """Remember how far the plain walk looked in vain, so that the next one need not."""
        group = self._group
        group.skip_to = max(self._plain_from, group.cursor)
        group.skip_held = self._held_seen
        self._state.touch_group(group)

    def columns(self, batch: BatchRow) -> Columns:
        """Verified: replicas that cut a lease by different sizes would part for good."""
        return self._state.content(self._queue.q, batch.first, batch.blob)[0]

    def _next_back(self) -> Span | None:
        if not self._back_read:
            shelf = self._group.shelf
            found = self._state.txn.first(BACK, k2(shelf, self._back_from), k1(shelf + 1))
            self._back = None if found is None else unpack_span(found[1])[0]
            self._back_key = self._back.lo if self._back is not None else 0
            self._back_read = True
        return self._back

    def _skip_back(self, hi: int) -> None:
        """Step over versions that may not be handed out: due for their TTL, and not folded yet."""
        assert self._back is not None
        if hi >= self._back.hi:
            self._back_from = self._back.hi + 1
            self._back_read = False
        else:
            self._back = self._back.part(hi + 1, self._back.hi)

    def _next_plain(self) -> tuple[int, int, BatchRow] | None:
        if self._plain_read:
            return self._plain
        state, queue, group = self._state, self._queue, self._group
        at = self._plain_from
        found = None
        while at <= queue.tail:
            if not self._steps:
                state.effects[WakeConsumers(queue.q, group.name)] = None  # the next Lease goes on from here
                break
            self._steps -= 1
            if at <= group.settled_top:
                row = settled.row_at_or_before(state, group, at)
                if row is not None and row[1] >= at:
                    at = row[1] + 1
                    continue
            batch = state.next_batch(queue.q, at)
            if batch is None:
                at = queue.tail + 1
                break
            last = batch.last
            if batch.due:
                if is_held(group, batch) and not settled.all_settled(state, group, batch.first, last):
                    self._held_seen += 1
                at = last + 1
                continue
            if 0 < batch.expires <= state.time_ms:
                break  # not folded yet, and never handed out; what lies above waits for the next fold
            lo = max(at, batch.first)
            hi = last
            if lo < group.settled_top:
                following = state.txn.first(DONE, k2(group.g, lo), k2(group.g, hi + 1))
                if following is not None:
                    hi = int.from_bytes(following[0][8:], "big") - 1
            found = (lo, hi, batch)
            at = lo
            break
        self._plain_from = at
        self._plain = found
        self._plain_read = True
        return found


def is_held(group: GroupRow, batch: BatchRow) -> bool:
    """Whether a batch with a due time is not folded yet in this group."""
    return (batch.due, batch.first) > (group.sched_time, group.sched_version)


def count_held(group: GroupRow, first: int, change: int) -> None:
    """A batch that begins at `first` becomes held (+1) or is held no more (-1): keep L5's count."""
    first = max(first, group.start)
    if first < group.cursor:
        group.held_passed += change
    elif first < group.skip_to:
        group.skip_held += change


def _take(walk: Walk, room: int, max_bytes: int, ceiling: int) -> list[Span]:
    """Take pieces until the lease is full: by messages, by bytes (but at least one message), or at the ceiling."""
    taken: list[Span] = []
    left = max_bytes
    while True:
        hi = min(walk.hi, walk.lo + room - 1, ceiling)
        fits, size = _fit(walk, hi, left)
        if fits < walk.lo and not taken:
            fits, size = walk.lo, left + 1  # larger than the lease may be, and alone in it
        if fits < walk.lo:
            break
        span = walk.take(fits)
        room -= fits - span.lo + 1
        left -= size
        taken.append(span)
        if fits < hi or room <= 0 or left < 0 or not walk.find() or walk.lo > ceiling:
            break
    return taken


def _fit(walk: Walk, hi: int, left: int) -> tuple[int, int]:
    """The last version up to `hi` whose bodies fit into `left` bytes (one below the first: none), and their size.

    Keys and headers count: an answer that does not fit a frame would be leased again and again, and die unseen.
    """
    batch = walk.batch
    assert batch is not None
    lo = walk.lo
    if lo == batch.first and hi == batch.last and batch.body_bytes <= left:
        return hi, batch.body_bytes
    ends = batches.sizes(walk.columns(batch))
    begin = ends[lo - batch.first - 1] if lo > batch.first else 0
    fits = bisect.bisect_right(ends, begin + left, lo - batch.first, hi - batch.first + 1)
    size = (ends[fits - 1] - begin) if fits > lo - batch.first else 0
    return batch.first + fits - 1, size


def _room(state: State, group: GroupRow, policy: Policy, session: bytes, auto_ack: bool) -> int:
    """How many messages the in-flight limits leave; at zero, InFlightLimit (L1)."""
    room = NEVER
    if policy.max_in_flight is not None:
        room = policy.max_in_flight - group.in_flight
        if room <= 0:
            raise InFlightLimit(limit_name="max_in_flight", limit=policy.max_in_flight)
    versions, leases = state.flight(group.hold, session)
    if policy.max_in_flight_per_session is not None:
        room = min(room, policy.max_in_flight_per_session - versions)
        if room <= 0:
            raise InFlightLimit(limit_name="max_in_flight_per_session", limit=policy.max_in_flight_per_session)
    if not auto_ack and leases >= state.limits.leases_per_session:
        raise InFlightLimit(limit_name="leases_per_session", limit=state.limits.leases_per_session)
    return room


def _mark_delivered(taken: list[Span], time_ms: int, consumer: str) -> None:
    for span in taken:
        span.count += 1
        span.first_ms = span.first_ms or time_ms
        span.last_ms = time_ms
        span.consumer = consumer


def _settle_at_hand_out(
    state: State,
    queue: QueueRow,
    group: GroupRow,
    lease_id: int,
    taken: list[Span],
    ranges: list[tuple[int, int]],
    consumer: str,
) -> None:
    freeing.pin(state, group, ranges)
    for span in taken:
        groups.settle(state, queue, group, span.lo, span.hi, ACKED, redriven=bool(span.flags & REDRIVE))
    for lo, hi in ranges:
        history.record(state, queue, "ack", state.time_ms, lo, hi, group.name, lease_id, consumer, "")


def _ranges(spans: list[Span]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for span in spans:
        if ranges and ranges[-1][1] == span.lo - 1:
            ranges[-1] = (ranges[-1][0], span.hi)
        else:
            ranges.append((span.lo, span.hi))
    return ranges


def _leased(view: View, group: GroupRow, lease_id: int, row: LeaseRow, *, replayed: bool = False) -> Leased:
    return Leased(
        lease_id=LeaseId(lease_id),
        deadline_ms=row.deadline + view.meta.steps,
        group_generation=group.generation,
        counts_begun=bool(row.flags & LEASE_COUNTS_BEGUN),
        grants=_grants(row),
        replayed=replayed,
    )


def _grants(row: LeaseRow) -> tuple[Grant, ...]:
    """What a lease holds as the client sees it: maximal runs with equal counts."""
    shown = 0 if row.flags & LEASE_COUNTS_BEGUN else 1
    if len(row.held) == 1:
        span = row.held[0]
        return (Grant(span.lo, span.hi, span.count, span.attempts + shown, span.redrives),)
    grants: list[Grant] = []
    for span in row.held:
        attempts = span.attempts + shown
        if grants:
            last = grants[-1]
            counts = (last.delivery_count, last.attempts, last.redrives)
            if last.last == span.lo - 1 and counts == (span.count, attempts, span.redrives):
                grants[-1] = Grant(last.first, span.hi, *counts)
                continue
        grants.append(Grant(span.lo, span.hi, span.count, attempts, span.redrives))
    return tuple(grants)
