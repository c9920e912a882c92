"""Ack, Nack, Release and Extend (S1 … S5), and what happens to a version that comes back (L2, L3)."""

from collections.abc import Callable, Iterable

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
from holdfast.jepsen.model import dead, history
from holdfast.jepsen.model.clock import shown_deadline
from holdfast.jepsen.model.records import Group, OpenLease, Queue, effective, runs
from holdfast.jepsen.model.state import State


def ack(state: State, session: bytes, command: AckBatch) -> Settled:
    queue, group = state.group(command.queue_id, command.group)

    def settle(lease: OpenLease, versions: list[int]) -> None:
        state.fire("S2.ack")
        _record(state, queue, group, lease, "ack", versions)
        for version in versions:
            group.lives[version].settle("acked")

    return _settle(state, session, group, command.ranges, settle)


def nack(state: State, session: bytes, command: Nack) -> Settled:
    queue, group = state.group(command.queue_id, command.group)
    delay_ms = command.delay_ms
    if command.not_before_ms is not None:
        delay_ms = max(0, command.not_before_ms - state.time_ms)
    limit = queue.settings.max_nack_delay_ms
    if delay_ms is not None and delay_ms > limit:
        state.fire("S3.delay_too_long")
        raise NackDelayTooLong(delay_ms=delay_ms, limit=limit)

    def settle(lease: OpenLease, versions: list[int]) -> None:
        state.fire("S3.dead" if command.dead else "S3.nack")
        _record(state, queue, group, lease, "nack", versions, command.error)
        come_back(
            state,
            queue,
            group,
            lease,
            versions,
            state.time_ms,
            error=command.error,
            rejected=command.dead,
            nacked=True,
            delay_ms=delay_ms,
            backs_off=True,
        )

    return _settle(state, session, group, command.ranges, settle)


def release(state: State, session: bytes, command: Release) -> Settled:
    queue, group = state.group(command.queue_id, command.group)

    def settle(lease: OpenLease, versions: list[int]) -> None:
        state.fire("L2.release")
        _record(state, queue, group, lease, "release", versions)
        come_back(state, queue, group, lease, versions, state.time_ms, released=True)

    return _settle(state, session, group, command.ranges, settle)


def extend(state: State, session: bytes, command: Extend) -> Extended:
    queue, group = state.group(command.queue_id, command.group)
    lease = _find(state, session, group, command.lease_id)
    if isinstance(lease, HoldfastError):
        raise lease
    timeout_ms = command.visibility_timeout_ms or effective(queue, group, "visibility_timeout_ms")
    max_lease_ms = queue.settings.max_lease_ms
    if timeout_ms > max_lease_ms:
        state.fire("S4.too_long")
        raise LeaseTooLong(timeout_ms=timeout_ms, limit=max_lease_ms)
    asked, cap = state.lease_ms + timeout_ms, lease.granted_at + max_lease_ms
    state.fire("S4.capped" if asked > cap else "S4.extend")
    lease.deadline = max(lease.deadline, min(asked, cap))
    held = group.held_by(lease.id)
    for first, last in command.begin:
        begun = {version for version in held if first <= version <= last}
        if begun:
            state.fire("L2.begin")
        lease.begun |= begun
    _record(state, queue, group, lease, "extend", held)
    return Extended(deadline_ms=shown_deadline(state, lease.deadline), held=tuple(runs(held)))


# One range after the other -----------------------------------------------------------------------------


def _settle(
    state: State,
    session: bytes,
    group: Group,
    ranges: tuple[SettleRange, ...],
    settle: Callable[[OpenLease, list[int]], None],
) -> Settled:
    """Do what can be done of each range, at once, and say what could not."""
    count = 0
    refused: list[RefusedRange] = []
    for lease_id, first, last in ranges:
        lease = _find(state, session, group, lease_id)
        if isinstance(lease, HoldfastError):
            refused.append(RefusedRange(lease_id, first, last, lease.code))
            continue
        held = [version for version in group.held_by(lease_id) if first <= version <= last]
        refused += _refusals(state, lease, first, last, set(held))
        if held:
            settle(lease, held)
            count += len(held)
            end_if_empty(group, lease)
    return Settled(count=count, refused=tuple(refused))


def _find(state: State, session: bytes, group: Group, lease_id: int) -> OpenLease | HoldfastError:
    """The open lease, or why this session cannot use it, in the order of S1."""
    earlier = 0 < lease_id < state.generation << GENERATION_SHIFT  # nobody knows which of those a restore undid (T4)
    if lease_id not in state.lease_ids and not earlier:
        state.fire("S1.lease_not_found")
        return LeaseNotFound(lease_id=lease_id)
    lease = group.leases.get(lease_id)
    if lease is None or lease.deadline <= state.lease_ms:
        state.fire("S1.lease_expired")
        return LeaseExpired(lease_id=lease_id)
    if lease.session != session:
        state.fire("S1.not_owner")
        return NotLeaseOwner(lease_id=lease_id)
    return lease


def _refusals(state: State, lease: OpenLease, first: int, last: int, held: set[int]) -> list[RefusedRange]:
    """Maximal runs of what this lease never had, or has no more."""
    lowest = min(grant.first for grant in lease.grants)
    highest = max(grant.last for grant in lease.grants)
    found: list[RefusedRange] = []

    def refuse(first: int, last: int, code: int) -> None:
        if first > last:
            return
        if found and (found[-1].last, found[-1].code) == (first - 1, code):
            first = found.pop().first
        found.append(RefusedRange(lease.id, first, last, code))

    refuse(first, min(last, lowest - 1), VersionNotInLease.code)
    for version in range(max(first, lowest), min(last, highest) + 1):
        if not lease.granted(version):
            refuse(version, version, VersionNotInLease.code)
        elif version not in held:
            refuse(version, version, AlreadySettled.code)
    refuse(max(first, highest + 1), last, VersionNotInLease.code)
    for one in found:
        state.fire("S1.already_settled" if one.code == AlreadySettled.code else "S1.version_not_in_lease")
    return found


def end_if_empty(group: Group, lease: OpenLease) -> None:
    """A lease of which nothing is held any more is gone at once."""
    if not group.held_by(lease.id):
        group.leases.pop(lease.id, None)


# Coming back -------------------------------------------------------------------------------------------


def come_back(
    state: State,
    queue: Queue,
    group: Group,
    lease: OpenLease,
    versions: Iterable[int],
    at_ms: int,
    *,
    error: str | None = None,
    rejected: bool = False,
    released: bool = False,
    nacked: bool = False,
    delay_ms: int | None = None,
    backs_off: bool = False,
) -> None:
    """Versions of a lease that were not done: dead, expired, or available again, now or after a delay (0002, 25)."""
    limit = effective(queue, group, "max_delivery_attempts")
    ending: dict[int, str] = {}
    for version in versions:
        life = group.lives[version]
        life.state, life.lease_id = "ready", 0
        if nacked or (not released and (lease.counts == "leased" or version in lease.begun)):
            life.attempts += 1
        else:
            state.fire("L2.not_counted")
        if error:
            life.last_error = error
        if rejected:
            ending[version] = "rejected"
        elif life.attempts >= limit:
            ending[version] = "max_attempts"
        elif life.expires_ms is not None and life.expires_ms <= at_ms:
            state.fire("P7.expired_in_flight")
            ending[version] = "expired"
        else:
            wait_ms = delay_ms
            if wait_ms is None:
                wait_ms = _backoff_ms(state, queue, group, life.attempts) if backs_off else 0
            if wait_ms > 0:
                state.fire("S3.delayed")
                life.state, life.due_ms, life.held = "delayed", at_ms + wait_ms, False
    dead.end_lives(state, queue, group, ending, at_ms)


def _backoff_ms(state: State, queue: Queue, group: Group, attempts: int) -> int:
    backoff = effective(queue, group, "backoff")
    wait_ms: int = backoff.delay_ms(attempts)
    if wait_ms > 0:
        state.fire(f"S3.backoff_{backoff.kind}")
    if wait_ms > queue.settings.max_nack_delay_ms:
        state.fire("S3.backoff_clipped")
    return min(wait_ms, queue.settings.max_nack_delay_ms)


def _record(
    state: State,
    queue: Queue,
    group: Group,
    lease: OpenLease,
    kind: str,
    versions: Iterable[int],
    error: str | None = None,
) -> None:
    history.record(
        state,
        queue,
        kind,
        versions,
        at_ms=state.time_ms,
        group=group.name,
        lease_id=lease.id,
        consumer_id=lease.consumer_id,
        error=error,
    )
