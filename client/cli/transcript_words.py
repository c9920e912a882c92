"""How a transcript tells an answer: replies, effects and times as lines that a person reads.

Every field of a reply is shown, so that the recorded text is a full record of what the machine said; what is
empty or zero is left out where a row has many fields.
"""

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum

from holdfast.client.protocol import columns as batches
from holdfast.client.protocol.errors import BY_CODE, HoldfastError
from holdfast.client.protocol.replies import (
    Answer,
    Committed,
    DeadListed,
    Explained,
    Failed,
    GroupStats,
    HistoryListed,
    Leased,
    MessageBatch,
    Messages,
    QueueDescribed,
    Reply,
    Settled,
    TxnDescribed,
    VersionsChanged,
    VersionsFound,
)
from holdfast.client.protocol.values import DEFAULT_GROUP, DEFAULT_QUEUE

COUNTERS = (
    "ready", "delayed", "in_flight", "acked", "dead", "moved", "discarded", "cancelled", "purged", "trimmed",
)  # fmt: skip


class Words:
    """Tells answers; times are counted from `start_ms`."""

    def __init__(self, start_ms: int) -> None:
        self._start_ms = start_ms

    def answer(self, answer: Answer) -> list[str]:
        """The place of an answer, and its reply."""
        place = answer.place
        head, *more = self.reply(answer.reply)
        where = f"#{place.index}" if place.position >= 0 else f"as of #{place.index}"
        return [f"{where} {self.time(place.time_ms)} {head}", *(f"    {line}" for line in more)]

    def effect(self, effect: object) -> str:
        return f"-> {self._whole(effect)}"

    def time(self, time_ms: int) -> str:
        """A time as `t+hours:minutes:seconds` since the beginning."""
        seconds, milliseconds = divmod(time_ms - self._start_ms, 1_000)
        minutes, seconds = divmod(seconds, 60)
        hours, minutes = divmod(minutes, 60)
        fraction = f".{milliseconds:03}" if milliseconds else ""
        return f"t+{hours:02}:{minutes:02}:{seconds:02}{fraction}"

    def reply(self, reply: Reply) -> list[str]:
        """One line for the reply, and one for each part of it that is a list."""
        name = type(reply).__name__
        match reply:
            case Failed(error=error):
                return [self._error(error)]
            case Leased(lease_id=0):
                return [f"{name} nothing"]
            case Leased():
                head = self._facts(reply, "group_generation", "counts_begun", "grants", "batches")
                return [f"{name} {head}", *self._grants(reply)]
            case Settled():
                refused = [
                    f"refused {_range(part.first, part.last)} of lease {part.lease_id}: {BY_CODE[part.code].__name__}"
                    for part in reply.refused
                ]
                return [f"{name} count={reply.count}", *refused]
            case VersionsChanged():
                return [
                    name,
                    *(self._outcome(part.first, part.last, part.outcome, part.group) for part in reply.outcomes),
                ]
            case Committed() | TxnDescribed():
                written = [f"queue {queue}: {_range(first, last)}" for queue, first, last in reply.versions]
                return [f"{name} {self._facts(reply, 'versions')}".rstrip(), *written]
            case GroupStats():
                return [self._stats(reply)]
            case Messages():
                return [f"{name} {self._facts(reply, 'batches')}".rstrip(), *map(self._batch, reply.batches)]
            case DeadListed():
                head = f"{name} matched={reply.matched} scanned={reply.scanned}"
                return [head, *(self._facts(row) for row in reply.rows)]
            case HistoryListed():
                return [name, *(self._facts(row) for row in reply.rows)]
            case VersionsFound():
                return [f"{name} {' '.join(_range(*pair) for pair in reply.versions)}".rstrip()]
            case Explained():
                facts = [f"{fact}={self._told(fact, value)}" for fact, value in reply.facts]
                return [" ".join([name, reply.reason, *facts])]
            case QueueDescribed():
                return [f"{name} {self._facts(reply, 'settings', 'groups', 'readers')}", *self._described(reply)]
            case _:
                return [self._whole(reply)]

    def _error(self, error: HoldfastError) -> str:
        facts = [f"{name}={self._told(name, value)}" for name, value in error.facts.items()]
        return f"refused: {' '.join([type(error).__name__, *facts])} ({error})"

    def _grants(self, leased: Leased) -> Iterator[str]:
        """Each grant with the messages that it delivers."""
        for grant in leased.grants:
            counts = f"delivery_count={grant.delivery_count} attempts={grant.attempts}"
            if grant.redrives:
                counts += f" redrives={grant.redrives}"
            inside = [
                message
                for batch in leased.batches
                for version, message in self._messages(batch)
                if grant.first <= version <= grant.last
            ]
            yield " ".join([_range(grant.first, grant.last), counts, *inside])

    def _batch(self, batch: MessageBatch) -> str:
        last = batch.first + batch.columns.count - 1
        head = f"{_range(batch.first, last)} {self._facts(batch, 'first', 'columns', 'body')}"
        return " ".join([head, *(message for _, message in self._messages(batch))])

    def _messages(self, batch: MessageBatch) -> Iterator[tuple[int, str]]:
        for index in range(batch.columns.count):
            parts = [_text(batches.payload_of(batch.columns, batch.body, index))]
            key = batches.key_of(batch.columns, batch.body, index)
            headers = batches.decode_headers(batches.header_cell(batch.columns, batch.body, index))
            if key:
                parts.append(f"key={key.decode()}")
            parts += [f"{name}={value}" for name, value in headers.items()]
            yield batch.first + index, parts[0] if len(parts) == 1 else f"({' '.join(parts)})"

    def _outcome(self, first: int, last: int, outcome: str, group: str) -> str:
        return f"{_range(first, last)} {outcome}" + (f" group={group}" if group else "")

    def _stats(self, stats: GroupStats) -> str:
        """The counters of G4 as the sum they are; those that are zero are left out."""
        parts = [f"{name} {getattr(stats, name)}" for name in COUNTERS if getattr(stats, name)]
        rest = self._facts(stats, "produced", *COUNTERS)
        return f"produced {stats.produced} = {' + '.join(parts) or '0'}; {rest}"

    def _described(self, queue: QueueDescribed) -> Iterator[str]:
        for name in type(queue.settings).__dataclass_fields__:
            value = getattr(queue.settings, name)
            if value != getattr(DEFAULT_QUEUE, name):
                yield f"{name}={_value(value)}"
        for group in queue.groups:
            own = [
                f"{name}={_value(getattr(group.settings, name))}"
                for name in type(group.settings).__dataclass_fields__
                if getattr(group.settings, name) != getattr(DEFAULT_GROUP, name)
            ]
            yield " ".join([f"group {group.name} start={group.start}", *own])
        for reader in queue.readers:
            yield f"reader {self._facts(reader)}"

    def _whole(self, value: object) -> str:
        return f"{type(value).__name__} {self._facts(value)}".rstrip()

    def _facts(self, value: object, *hidden: str) -> str:
        """The fields of a value that say something, by name."""
        if not is_dataclass(value):
            raise TypeError(f"{value!r} has no fields")
        shown = [(each.name, getattr(value, each.name)) for each in fields(value) if each.name not in hidden]
        kept = [
            (name, item)
            for name, item in shown
            if item not in (None, False, "", (), b"")
            or (type(item) is int and name != "log")  # the only log says little
        ]
        return " ".join(f"{name}={self._told(name, item)}" for name, item in kept)

    def _told(self, name: str, value: object) -> str:
        """A time where the name and the size say so: durations are shorter than the time of any transcript."""
        if name.endswith("_ms") and isinstance(value, int) and value >= self._start_ms:
            return self.time(value)
        return _value(value)


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _text(data: bytes | memoryview) -> str:
    return json.dumps(bytes(data).decode("utf-8", "backslashreplace"), ensure_ascii=False)


def _value(value: object) -> str:
    match value:
        case bool() | None:
            return str(value).lower()
        case bytes():
            return _text(value)
        case str():
            return value if value.isprintable() and value and " " not in value else json.dumps(value)
        case Enum():
            return value.name
        case tuple():
            return ",".join(_pair(item) for item in value)
        case _ if is_dataclass(value):
            return "/".join(_value(getattr(value, each.name)) for each in fields(value))
        case _:
            return str(value)


def _pair(item: object) -> str:
    match item:
        case (int() as first, int() as last):
            return _range(first, last)
        case (str() as name, value):
            return f"{name}:{_value(value)}"
        case _:
            return _value(item)
