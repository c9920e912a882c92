"""What a log may never say, told without the rules: a second bookkeeping of messages and leases from its answers alone.

One message has one version. A version is with one lease at a time, in lease time; handed out once more it counts one
more, and never once it is settled for good. What a client was told, or believes not to have happened, is in line with
that.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace

from holdfast.client.protocol import columns as cutting
from holdfast.client.protocol import commands as c
from holdfast.client.protocol.errors import HoldfastError
from holdfast.client.protocol.replies import Answer, Committed, Extended, Failed, Leased, Produced, Reply, Settled
from holdfast.jepsen.simulation.checker import Call, Violation

Life = tuple[int, str, int]  # queue, group, version


@dataclass(slots=True)
class _Held:
    lease_id: int
    deadline_ms: int  # in lease time


class Ledger:
    def __init__(self, attempts_max: dict[int, int]) -> None:
        """`attempts_max`: of each queue that this is about."""
        self.lease_ms = 0
        self.payloads: dict[tuple[int, int], bytes] = {}  # queue, version
        self.counts: Counter[str] = Counter()
        self._attempts_max = attempts_max
        self._requests: dict[tuple[bytes, int], Reply] = {}  # session and number -> what was said first
        self._versions: dict[bytes, tuple[int, int]] = {}  # payload -> queue, version
        self._steps_ms = 0
        self._deliveries: Counter[Life] = Counter()
        self._held: dict[Life, _Held] = {}
        self._over: set[Life] = set()  # acked

    def fold(self, envelope: c.Envelope, answer: Answer) -> None:
        """One command of the log and what the fold said to it, in the order of the log."""
        command, reply = envelope.command, answer.reply
        if isinstance(command, c.TimeStep):
            self._steps_ms += command.by_ms
        self.lease_ms = answer.place.time_ms - self._steps_ms
        if self._asked_again(envelope, reply):
            return
        match command:
            case c.Produce() if isinstance(reply, Produced) and not reply.replayed:
                self._produced(command, reply.first_version)
            case c.Transaction(items=items) if isinstance(reply, Committed):
                self._committed(items, reply)
            case c.Lease() if isinstance(reply, Leased):
                self._leased(command, reply)
            case c.AckBatch() | c.Nack() | c.Release() if isinstance(reply, Settled):
                self._settled(command, reply)
            case c.Extend() if isinstance(reply, Extended):
                self._extended(command, reply)
            case _:
                pass

    def _asked_again(self, envelope: c.Envelope, reply: Reply) -> bool:
        """I11: one request, one effect. A Lease tells how its lease is now, everything else what it said at first."""
        request = (envelope.session, envelope.request_seq)
        if not envelope.request_seq or isinstance(reply, Failed):
            return False
        known = self._requests.setdefault(request, reply)
        if known is reply:
            return False
        self.counts["asked again"] += 1
        if isinstance(known, Leased) and isinstance(reply, Leased):
            same = known.lease_id == reply.lease_id and (reply.replayed or not reply.grants)
        elif isinstance(known, Produced | Committed) and isinstance(reply, Produced | Committed):
            same = known == replace(reply, replayed=False)
        else:
            same = known == reply
        if not same:
            raise Violation(f"{envelope} was answered with {known}, and then with {reply}")
        return True

    def _produced(self, command: c.Produce, first: int) -> None:
        for index in range(command.columns.count):
            payload = cutting.payload_of(command.columns, command.body, index)
            place = (command.queue_id, first + index)
            if payload in self._versions:
                raise Violation(f"{payload!r} is {place} and {self._versions[payload]}: one message, two versions")
            if place in self.payloads:
                raise Violation(f"{place} is {payload!r} and {self.payloads[place]!r}: one version, two messages")
            self._versions[payload] = place
            self.payloads[place] = payload
            self.counts["produced"] += 1

    def _committed(self, items: Sequence[c.AckBatch | c.Nack | c.Produce], committed: Committed) -> None:
        """All or nothing (X1): every settle in it has changed something, every produce has its versions."""
        versions = iter(committed.versions)
        for item in items:
            if isinstance(item, c.Produce):
                self._produced(item, next(versions)[1])
            else:
                self._settled(item, Settled(count=0))

    def _extended(self, command: c.Extend, extended: Extended) -> None:
        for version in _versions(extended.held):
            held = self._held.get((command.queue_id, command.group, version))
            if held is None or held.lease_id != command.lease_id:
                raise Violation(f"{command} extends version {version}; held: {held}")
            held.deadline_ms = extended.deadline_ms - self._steps_ms

    def _leased(self, command: c.Lease, leased: Leased) -> None:
        limit = self._attempts_max.get(command.queue_id)
        for grant in leased.grants:
            if limit is not None and grant.attempts > limit:
                raise Violation(f"{grant} of {command}: {limit} attempts is the limit")
            for version in range(grant.first, grant.last + 1):
                life = (command.queue_id, command.group, version)
                held = self._held.get(life)
                if held is not None and held.deadline_ms > self.lease_ms:
                    raise Violation(
                        f"{life} is leased by {leased.lease_id} at lease time {self.lease_ms}, and by {held.lease_id}"
                        f" until {held.deadline_ms}"
                    )
                if life in self._over:
                    raise Violation(f"{life} is leased by {leased.lease_id}, but is settled")
                self._deliveries[life] += 1
                if self._deliveries[life] != grant.delivery_count:
                    raise Violation(f"{life} is delivery {self._deliveries[life]}, and said to be {grant}")
                self._held[life] = _Held(leased.lease_id, leased.deadline_ms - self._steps_ms)
                self.counts["delivered"] += 1
                self.counts["delivered again"] += grant.delivery_count > 1
                if command.auto_ack:
                    self._over.add(life)

    def _settled(self, command: c.AckBatch | c.Nack | c.Release, settled: Settled) -> None:
        refused = {(part.lease_id, version) for part in settled.refused for version in range(part.first, part.last + 1)}
        for lease_id, first, last in command.ranges:
            for version in range(first, last + 1):
                if (lease_id, version) in refused:
                    continue
                life = (command.queue_id, command.group, version)
                held = self._held.pop(life, None)
                if held is None or held.lease_id != lease_id or held.deadline_ms <= self.lease_ms:
                    raise Violation(f"{command} settles {life} at lease time {self.lease_ms}; held: {held}")
                self.counts[f"settled by {type(command).__name__}"] += 1
                if isinstance(command, c.AckBatch):
                    self._over.add(life)

    # What clients and nodes say of it

    def check_calls(self, calls: Iterable[Call]) -> None:
        """Confirmed is there, under the version that was told (I1); said not to have happened, it is not (I2)."""
        perhaps: dict[bytes, bool] = {}  # whether any call with this message may have happened
        for call in calls:
            for item in _produces(call.what):
                payloads = [cutting.payload_of(item.columns, item.body, index) for index in range(item.columns.count)]
                self._check_told(call, item.queue_id, payloads)
                refused = isinstance(call.outcome, HoldfastError) and call.outcome.happened == "no"
                perhaps |= {payload: perhaps.get(payload, False) or not refused for payload in payloads}
        ghosts = [payload for payload, happened in perhaps.items() if not happened and payload in self._versions]
        if ghosts:
            raise Violation(f"{ghosts} are said not to have happened, and are there")

    def _check_told(self, call: Call, queue_id: int, payloads: list[bytes]) -> None:
        found = [self._versions.get(payload) for payload in payloads]
        match call.outcome:
            case Answer(reply=Produced(first_version=first)):
                told = [(queue_id, first + index) for index in range(len(payloads))]
                if found != told:
                    raise Violation(f"{payloads} were confirmed as {told}, and are {found}")
            case Answer(reply=Committed()):
                if None in found:
                    raise Violation(f"{payloads} were confirmed, and are gone")
            case _:
                pass

    def check_delivery(self, command: c.Lease, leased: Leased, stored: Set[int]) -> None:
        """The messages that came with a lease are the ones that were produced, and all that were stored by then.

        An answer that comes late may be of a lease that is over: what was freed since cannot be sent.
        """
        found = {
            batch.first + index: cutting.payload_of(batch.columns, batch.body, index)
            for batch in leased.batches
            for index in range(batch.columns.count)
        }
        for version in _versions([(grant.first, grant.last) for grant in leased.grants]):
            produced = self.payloads.get((command.queue_id, version))  # none for what was moved here
            if version not in found and version in stored:
                raise Violation(f"{leased} was sent without version {version}")
            if version in found and produced not in (None, found[version]):
                raise Violation(f"version {version} is {produced!r}; {found[version]!r} was delivered: {command}")


def _produces(what: object) -> list[c.Produce]:
    if isinstance(what, c.Produce):
        return [what]
    if isinstance(what, c.Transaction):
        return [item for item in what.items if isinstance(item, c.Produce)]
    return []


def _versions(ranges: Sequence[tuple[int, int]]) -> Iterator[int]:
    return (version for first, last in ranges for version in range(first, last + 1))
