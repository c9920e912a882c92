"""A message's life in a group: available -> leased -> settled or dead; where what came back is put.

A version that was never delivered has no row: it lies at or above the cursor. All others are in exactly one of BACK
(available), WAIT (away after a nack), LEASE (in flight) and DONE (settled); redriven ones are in DONE as well, and
what a purge settled has no row either: it lies at or below the purge line.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from holdfast.client.protocol.errors import GroupNotFound, QueueNotFound, QueueRecreated
from holdfast.client.protocol.values import Backoff
from holdfast.storage import dead, freeing, settled
from holdfast.storage.effects import WakeConsumers
from holdfast.storage.rows import (
    REDRIVE,
    WHY_NUMBER,
    Cause,
    GroupRow,
    QueueRow,
    Span,
    unpack_group_settings,
    unpack_queue_settings,
    unpack_span,
)
from holdfast.storage.state import State, View
from holdfast.storage.tables import Table, k1, k2, k3

DISCARDED = WHY_NUMBER["discarded"]


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings that are in force for a group: its own, over its queue's."""

    visibility_timeout_ms: int
    max_delivery_attempts: int
    max_in_flight: int | None
    dlq_strategy: Literal["park", "move", "discard"]
    dlq_queue: str | None
    backoff: Backoff
    backoff_on_expiry: bool
    count: Literal["leased", "begun"]
    max_in_flight_per_session: int | None
    max_ack_holes: int
    max_lease_ms: int
    max_nack_delay_ms: int
    on_expired: Literal["discard", "dead_letter"]


@lru_cache(maxsize=1024)
def _policy(queue_bytes: bytes, group_bytes: bytes) -> Policy:
    queue, own = unpack_queue_settings(queue_bytes), unpack_group_settings(group_bytes)

    def choose(name: str) -> object:
        value = getattr(own, name)
        return getattr(queue, name) if value is None else value

    names = (
        "visibility_timeout_ms", "max_delivery_attempts", "max_in_flight", "dlq_strategy", "dlq_queue", "backoff",
        "backoff_on_expiry", "count",
    )  # fmt: skip
    return Policy(
        **{name: choose(name) for name in names},  # type: ignore[arg-type]
        max_in_flight_per_session=queue.max_in_flight_per_session,
        max_ack_holes=queue.max_ack_holes,
        max_lease_ms=queue.max_lease_ms,
        max_nack_delay_ms=queue.max_nack_delay_ms,
        on_expired=queue.on_expired,
    )


def policy(queue: QueueRow, group: GroupRow) -> Policy:
    return _policy(queue.settings_bytes, group.settings_bytes)


def find_queue(view: View, q: int) -> QueueRow:
    """The queue of a request. Raises QueueRecreated or QueueNotFound before anything else is looked at (G5)."""
    queue = view.queue(q)
    if queue is None:
        raise QueueNotFound(queue=q)
    if queue.deleted:
        now = view.queue_id(queue.name)
        if now is not None:
            raise QueueRecreated(name=queue.name, queue_id=now)
        raise QueueNotFound(queue=q)
    return queue


def find_group(view: View, queue: QueueRow, name: str) -> GroupRow:
    group = view.group(queue.q, name)
    if group is None:
        raise GroupNotFound(queue_id=queue.q, group=name)
    return group


def produced(queue: QueueRow, group: GroupRow) -> int:
    """How many versions the group answers for (G4)."""
    return queue.tail - group.start + 1 - group.freed + group.carried


def delayed(group: GroupRow) -> int:
    return group.held + group.waiting


def ready(queue: QueueRow, group: GroupRow) -> int:
    """What is left when all other states are taken away (G4)."""
    return (
        produced(queue, group)
        - delayed(group)
        - group.in_flight
        - group.acked
        - group.dead
        - group.moved
        - (group.discarded + group.cancelled + group.purged + group.trimmed)
    )


# Settling --------------------------------------------------------------------------------------------------


def settle(
    state: State, queue: QueueRow, group: GroupRow, lo: int, hi: int, why: int, *, redriven: bool = False
) -> None:
    """These versions are over in this group, and their storage goes if nobody else needs it."""
    if redriven:
        settled.change(state, group, lo, hi, why)
    else:
        settled.add(state, group, lo, hi, why)
    settled.count(group, why, hi - lo + 1)
    state.touch_group(group)
    freeing.release(state, queue, lo, hi)


def come_back(
    state: State,
    queue: QueueRow,
    group: GroupRow,
    spans: Iterable[tuple[Span, int]],
    *,
    at_ms: int,
    rejected: bool = False,
) -> None:
    """Spans that were in flight are judged (L3): dead, expired, away until the time beside them, or available.

    `span.attempts` is what counts now. The caller has taken the spans out of where they were, counters included.
    Neighbours that end for the same cause end together, and so are moved together or not at all (D1).
    """
    limit = policy(queue, group).max_delivery_attempts
    ending: list[Span] = []
    ends_by: Cause = "rejected"
    for span, until_ms in spans:
        for part, cause in _judge(state, queue, span, limit, at_ms, rejected):
            if ending and (cause != ends_by or part.lo != ending[-1].hi + 1):
                end(state, queue, group, ending, ends_by, at_ms)
                ending = []
            if cause is None:
                put(state, queue, group, part, at_ms, until_ms)
            else:
                ending.append(part)
                ends_by = cause
    if ending:
        end(state, queue, group, ending, ends_by, at_ms)


def _judge(
    state: State, queue: QueueRow, span: Span, limit: int, at_ms: int, rejected: bool
) -> list[tuple[Span, Cause | None]]:
    """The span in maximal parts, each with the cause for which it ends, or none."""
    if rejected:
        return [(span, "rejected")]
    if span.attempts >= limit:
        return [(span, "max_attempts")]
    if queue.ttl_rows and not span.flags & REDRIVE:
        return [(part, "expired" if over else None) for part, over in _split_expired(state, queue, span, at_ms)]
    return [(span, None)]


def end(state: State, queue: QueueRow, group: GroupRow, spans: list[Span], cause: Cause, at_ms: int) -> None:
    """Neighbouring versions that nobody holds will not be delivered again; a TTL may just discard them (P7)."""
    if cause == "expired":
        group.expired += sum(span.hi - span.lo + 1 for span in spans)
        if queue.settings.on_expired == "discard":
            for span in spans:
                settle(state, queue, group, span.lo, span.hi, DISCARDED, redriven=bool(span.flags & REDRIVE))
            return
    dead.die(state, queue, group, spans, cause, at_ms)


def make_available(state: State, queue: QueueRow, group: GroupRow, span: Span) -> None:
    state.insert(Table.BACK, k2(group.shelf, span.lo), span.pack())
    state.touch_group(group)
    state.effects[WakeConsumers(queue.q, group.name)] = None


def put(state: State, queue: QueueRow, group: GroupRow, span: Span, at_ms: int, until_ms: int) -> None:
    """Available now, or away until then."""
    if until_ms <= at_ms:
        make_available(state, queue, group, span)
        return
    state.insert(Table.WAIT, k2(group.shelf, span.lo), k1(until_ms) + span.pack())
    state.insert(Table.WAIT_DUE, k3(group.shelf, until_ms, span.lo), b"")
    group.waiting += span.hi - span.lo + 1
    group.wait_due = min(group.wait_due, until_ms)
    state.touch_group(group)


def _split_expired(state: State, queue: QueueRow, span: Span, at_ms: int) -> list[tuple[Span, bool]]:
    """The span in maximal parts whose TTL has passed by then, or not."""
    parts: list[tuple[Span, bool]] = []
    for batch in state.batches(queue.q, span.lo, span.hi):
        over = 0 < batch.expires <= at_ms
        lo, hi = max(batch.first, span.lo), min(batch.last, span.hi)
        if parts and parts[-1][1] == over:
            parts[-1][0].hi = hi
        else:
            parts.append((span.part(lo, hi), over))
    return parts


# Taking rows out -------------------------------------------------------------------------------------------


def take_back(state: State, group: GroupRow, lo: int, hi: int) -> list[Span]:
    """Take the available ones of lo … hi out of BACK; what remains of cut rows goes back in."""
    taken = []
    for key, data in _overlapping(state, Table.BACK, group.shelf, lo, hi):
        span, _ = unpack_span(data)
        state.delete(Table.BACK, key)
        for part in _outside(span, lo, hi):
            state.insert(Table.BACK, k2(group.shelf, part.lo), part.pack())
        taken.append(span.part(max(span.lo, lo), min(span.hi, hi)))
    return taken


def peek_back(view: View, group: GroupRow, lo: int, hi: int) -> list[Span]:
    """The available ones of lo … hi that are in BACK."""
    return _clipped((unpack_span(data)[0] for _, data in _overlapping(view, Table.BACK, group.shelf, lo, hi)), lo, hi)


def peek_waiting(view: View, group: GroupRow, lo: int, hi: int) -> list[Span]:
    """The nacked ones of lo … hi that are away."""
    return _clipped(
        (unpack_span(data, 8)[0] for _, data in _overlapping(view, Table.WAIT, group.shelf, lo, hi)), lo, hi
    )


def _clipped(spans: Iterable[Span], lo: int, hi: int) -> list[Span]:
    return [span.part(max(span.lo, lo), min(span.hi, hi)) for span in spans]


def take_waiting(state: State, group: GroupRow, lo: int, hi: int) -> list[Span]:
    """Take the nacked ones of lo … hi out of WAIT."""
    taken = []
    for key, data in _overlapping(state, Table.WAIT, group.shelf, lo, hi):
        until = int.from_bytes(data[:8], "big")
        span, _ = unpack_span(data, 8)
        state.delete(Table.WAIT, key)
        state.delete(Table.WAIT_DUE, k3(group.shelf, until, span.lo))
        for part in _outside(span, lo, hi):
            state.insert(Table.WAIT, k2(group.shelf, part.lo), k1(until) + part.pack())
            state.insert(Table.WAIT_DUE, k3(group.shelf, until, part.lo), b"")
        part = span.part(max(span.lo, lo), min(span.hi, hi))
        group.waiting -= part.hi - part.lo + 1
        taken.append(part)
    state.touch_group(group)
    return taken


def _outside(span: Span, lo: int, hi: int) -> list[Span]:
    parts = []
    if span.lo < lo:
        parts.append(span.part(span.lo, lo - 1))
    if span.hi > hi:
        parts.append(span.part(hi + 1, span.hi))
    return parts


def _overlapping(view: View, table: Table, shelf: int, lo: int, hi: int) -> list[tuple[bytes, bytes]]:
    """Rows of BACK or WAIT that hold any of lo … hi, ascending."""
    at = 8 if table == Table.WAIT else 0
    rows = []
    before = view.txn.last(table, k1(shelf), k2(shelf, lo))
    if before is not None and unpack_span(before[1], at)[0].hi >= lo:
        rows.append(before)
    rows += view.txn.scan(table, k2(shelf, lo), k2(shelf, hi + 1))
    return rows


def span_at(view: View, table: Table, shelf: int, version: int) -> tuple[Span, int] | None:
    """The span of BACK or WAIT that holds this version, and until when it waits."""
    rows = _overlapping(view, table, shelf, version, version)
    if not rows:
        return None
    if table == Table.WAIT:
        return unpack_span(rows[0][1], 8)[0], int.from_bytes(rows[0][1][:8], "big")
    return unpack_span(rows[0][1])[0], 0
