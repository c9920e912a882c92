"""What a held lease knows of itself, and the steps that settle it; both shells put their methods around this.

A lease knows what it settled itself, and answers the same again with success (S1). It also knows what it *may* have
settled: since only its own session can, `AlreadySettled` then says that it was this lease.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal

from holdfast.client.calls import Names, Steps, expect
from holdfast.client.message import Delivered, unpack
from holdfast.client.protocol import commands as c
from holdfast.client.protocol import replies as r
from holdfast.client.protocol.errors import (
    BY_CODE,
    AlreadySettled,
    HoldfastError,
    Indeterminate,
    Refused,
)
from holdfast.client.protocol.limits import ERROR_TEXT_BYTES, LEASE_MESSAGES, SETTLE_RANGES
from holdfast.client.protocol.replies import Answer
from holdfast.client.protocol.values import LeaseId, QueueId

Verb = Literal["ack", "nack", "release"]
RangeOutcome = tuple[int, int, int, str]  # lease id, first and last version, "ok" or the name of an error
Settle = Callable[[QueueId, tuple[c.SettleRange, ...]], c.AckBatch | c.Nack | c.Release]


class PartlyRefused(Refused):
    """Some ranges were settled and some not: `outcomes` has (lease_id, first, last, outcome) for all of them."""

    fact_names: ClassVar[tuple[str, ...]] = ("outcomes",)
    text = "only a part was settled: {outcomes}"
    outcomes: list[RangeOutcome]


class Held:
    """One lease as this client knows it. Not for two threads at once."""

    def __init__(self, queue: str, group: str, queue_id: int, answer: Answer, *, auto_ack: bool) -> None:
        leased = expect(r.Leased, answer)
        self.queue, self.group = queue, group
        self.term_ms = leased.deadline_ms - answer.place.time_ms  # how long it was when it was granted
        self.id = leased.lease_id
        self.deadline_ms = leased.deadline_ms
        self.replayed = leased.replayed
        self.messages: list[Delivered] = list(
            unpack(queue_id, leased.batches, leased.grants, group, leased.group_generation)
        )
        self.versions: dict[int, None] = {}  # still held, as far as this side knows, ascending
        if not auto_ack:
            self.versions = dict.fromkeys(v for grant in leased.grants for v in range(grant.first, grant.last + 1))
        self._settled: dict[int, Verb] = {}
        self._perhaps: dict[int, Verb] = {}  # asked for, and the answer never came

    def wanted(self, verb: Verb, versions: Iterable[int] | None) -> list[int]:
        """What to settle: all that is held, or what is named without what was settled so before."""
        if versions is None:
            return list(self.versions)
        return [v for v in sorted(set(versions)) if self._settled.get(v) != verb]

    def settled(self, verb: Verb, versions: Iterable[int]) -> None:
        for version in versions:
            self._settled[version] = verb
            self._perhaps.pop(version, None)
            self.versions.pop(version, None)

    def perhaps_settled(self, verb: Verb, versions: Iterable[int]) -> None:
        self._perhaps.update((version, verb) for version in versions)

    def was_ours(self, verb: Verb, refused: r.RefusedRange) -> bool:
        """Whether a refusal says that an earlier attempt of the same had happened."""
        return refused.code == AlreadySettled.code and all(
            self._perhaps.get(version) == verb for version in range(refused.first, refused.last + 1)
        )

    def extended(self, reply: r.Extended) -> None:
        self.deadline_ms = reply.deadline_ms
        self.versions = dict.fromkeys(v for first, last in reply.held for v in range(first, last + 1))


class LeaseFacts:
    """What both shells' `Lease` tells without asking anybody."""

    def __init__(self, held: Held) -> None:
        self._held = held

    def __iter__(self) -> Iterator[Delivered]:
        return iter(self._held.messages)

    def __len__(self) -> int:
        return len(self._held.messages)

    @property
    def held(self) -> Held:
        return self._held

    @property
    def id(self) -> int:
        return self._held.id

    @property
    def deadline_ms(self) -> int:
        return self._held.deadline_ms

    @property
    def replayed(self) -> bool:
        return self._held.replayed

    @property
    def messages(self) -> list[Delivered]:
        return self._held.messages


def lease(
    names: Names, queue: str, group: str, max_messages: int, max_bytes: int | None, wait_ms: int,
    visibility_timeout_ms: int | None, auto_ack: bool,
) -> Steps[Held]:  # fmt: skip
    chosen: dict[str, Any] = {} if max_bytes is None else {"max_bytes": max_bytes}
    chosen |= {"max_messages": min(max_messages, LEASE_MESSAGES), "wait_ms": wait_ms}
    chosen |= {"visibility_timeout_ms": visibility_timeout_ms, "auto_ack": auto_ack}
    queue_id = yield from names.resolve(queue)
    answer = yield from names.asking(
        queue,
        lambda i: c.Lease(queue_id=i, group=group, **chosen),
    )
    return Held(queue, group, queue_id, answer, auto_ack=auto_ack)


def settle(names: Names, held: Held, verb: Verb, versions: Iterable[int] | None, command: Settle) -> Steps[r.Settled]:
    """Settle versions of one lease. Raises the error where nothing could be, PartlyRefused where some could not."""
    wanted = held.wanted(verb, versions)
    ranges = [(held.id, first, last) for first, last in ranges_of(wanted)]
    try:
        count, refused = yield from _settle_all(names, held.queue, ranges, command)
    except Indeterminate:
        held.perhaps_settled(verb, wanted)
        raise
    refused = [part for part in refused if not held.was_ours(verb, part)]
    missed = {version for part in refused for version in range(part.first, part.last + 1)}
    held.settled(verb, [version for version in wanted if version not in missed])
    raise_refused(ranges, refused)
    return r.Settled(count=count)


def settle_by_id(names: Names, queue: str, lease_id: int, versions: Iterable[int], command: Settle) -> Steps[r.Settled]:
    """The same without a lease object, for who kept only the numbers."""
    ranges = [(lease_id, first, last) for first, last in ranges_of(sorted(set(versions)))]
    count, refused = yield from _settle_all(names, queue, ranges, command)
    raise_refused(ranges, refused)
    return r.Settled(count=count)


def extend(
    names: Names, queue: str, group: str, lease_id: int, visibility_timeout_ms: int | None, begin: Iterable[int] | None
) -> Steps[r.Extended]:
    begun = tuple(ranges_of(sorted(set(begin or ()))))
    answer = yield from names.asking(
        queue,
        lambda i: c.Extend(
            queue_id=i,
            group=group,
            lease_id=LeaseId(lease_id),
            visibility_timeout_ms=visibility_timeout_ms,
            begin=begun,
        ),
    )
    return expect(r.Extended, answer)


# What to settle with, as `settle` and transactions take it ------------------------------------------------


def acking(group: str) -> Callable[[QueueId, tuple[c.SettleRange, ...]], c.AckBatch]:
    return lambda queue_id, ranges: c.AckBatch(queue_id=queue_id, group=group, ranges=ranges)


def nacking(
    group: str, delay_ms: int | None, not_before_ms: int | None, error: str | None, dead: bool
) -> Callable[[QueueId, tuple[c.SettleRange, ...]], c.Nack]:
    """An error text that is too long is cut, not refused: it is for people to read."""
    text = error
    if error is not None and len(error.encode(errors="replace")) > ERROR_TEXT_BYTES:
        text = error.encode(errors="replace")[:ERROR_TEXT_BYTES].decode(errors="ignore")
    return lambda queue_id, ranges: c.Nack(
        queue_id=queue_id,
        group=group,
        ranges=ranges,
        delay_ms=delay_ms,
        not_before_ms=not_before_ms,
        error=text,
        dead=dead,
    )


def releasing(group: str) -> Callable[[QueueId, tuple[c.SettleRange, ...]], c.Release]:
    return lambda queue_id, ranges: c.Release(queue_id=queue_id, group=group, ranges=ranges)


# Ranges ------------------------------------------------------------------------------------------------


def ranges_of(versions: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending versions as ranges."""
    ranges: list[tuple[int, int]] = []
    for version in versions:
        if ranges and ranges[-1][1] == version - 1:
            ranges[-1] = (ranges[-1][0], version)
        else:
            ranges.append((version, version))
    return ranges


def raise_refused(ranges: Sequence[c.SettleRange], refused: Sequence[r.RefusedRange]) -> None:
    """Nothing where nothing was refused; the one error where all was, for one reason; else PartlyRefused."""
    if not refused:
        return
    size = sum(last - first + 1 for _, first, last in ranges)
    codes = {part.code for part in refused}
    if len(codes) == 1 and sum(part.last - part.first + 1 for part in refused) == size:
        raise _error_of(refused[0])
    raise PartlyRefused(outcomes=_outcomes(ranges, refused))


def _settle_all(
    names: Names, queue: str, ranges: Sequence[c.SettleRange], command: Settle
) -> Steps[tuple[int, list[r.RefusedRange]]]:
    """All ranges, in as many requests as the protocol needs (S2)."""
    count, refused = 0, list[r.RefusedRange]()
    for at in range(0, len(ranges), SETTLE_RANGES):
        part = tuple(ranges[at : at + SETTLE_RANGES])
        reply = expect(r.Settled, (yield from names.asking(queue, lambda i, part=part: command(i, part))))
        count += reply.count
        refused += reply.refused
    return count, refused


def _error_of(part: r.RefusedRange) -> HoldfastError:
    kind = BY_CODE[part.code]
    facts: dict[str, Any] = {"lease_id": part.lease_id, "first": part.first, "last": part.last}
    return kind(**{name: facts[name] for name in kind.fact_names})


def _outcomes(ranges: Sequence[c.SettleRange], refused: Sequence[r.RefusedRange]) -> list[RangeOutcome]:
    outcomes: list[RangeOutcome] = []
    for lease_id, first, last in ranges:
        at = first
        for part in refused:
            if part.lease_id == lease_id and first <= part.first and part.last <= last:
                if at < part.first:
                    outcomes.append((lease_id, at, part.first - 1, "ok"))
                outcomes.append((lease_id, part.first, part.last, BY_CODE[part.code].__name__))
                at = part.last + 1
        if at <= last:
            outcomes.append((lease_id, at, last, "ok"))
    return outcomes
