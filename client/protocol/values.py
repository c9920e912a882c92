"""Small checked types that commands and replies are made of.

A value checks itself when built; past the codec nobody checks again.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, NewType

from holdfast.client.protocol import limits
from holdfast.client.protocol.errors import BadName, BadValue
from holdfast.client.protocol.quick import dataclass

LogId = NewType("LogId", int)  # which Raft log an id belongs to: one log now, many later
QueueId = NewType("QueueId", int)
LeaseId = NewType("LeaseId", int)
Version = NewType("Version", int)
SessionId = NewType("SessionId", bytes)

THE_LOG = LogId(0)
NO_SESSION = SessionId(b"")
GENERATION_SHIFT = 48  # T4: ids are (restore generation << 48) | counter

LOCAL_PRINCIPAL = "local"  # who every command is from until there is authentication

RESERVED_CLIENTS = ("moved/", "session/", "txn/")  # D6, X1, X2: identities that only the fold gives
RESERVED_HEADERS = "holdfast-"  # D6

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")


def check_name(kind: str, name: str) -> str:
    """A queue, group or reader name: letters, digits and `. _ / -`, beginning with a letter or digit."""
    if len(name) > limits.NAME_BYTES or not _NAME.fullmatch(name):
        raise BadName(kind=kind, name=name[: limits.NAME_BYTES], limit=limits.NAME_BYTES)
    return name


def check_reference(kind: str, name: str) -> None:
    """A name to look something up by: short enough for every key; an impossible one is just not found."""
    if len(name) > limits.NAME_BYTES or not name.isascii():
        raise BadName(kind=kind, name=name[: limits.NAME_BYTES], limit=limits.NAME_BYTES)


def check_text(kind: str, text: str, limit: int) -> str:
    """A text that people chose freely: any characters that UTF-8 can carry, bounded in bytes, not empty."""
    try:
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError:
        raise BadValue(field=kind, problem="is not valid Unicode") from None
    if not 1 <= size <= limit:
        raise BadValue(field=kind, problem=f"has {size} bytes; 1 to {limit} are allowed")
    return text


def check_range(field: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise BadValue(field=field, problem=f"is {value}; {low} to {high} is allowed")
    return value


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long a nacked version stays away: integers only, so that every node computes the same (S3)."""

    kind: Literal["none", "fixed", "exponential"] = "none"
    base_ms: int = 0
    cap_ms: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("none", "fixed", "exponential"):
            problem = f"is {self.kind!r}; none, fixed or exponential is allowed"
            raise BadValue(field="backoff.kind", problem=problem)
        check_range("backoff.base_ms", self.base_ms, 0, limits.U63_MAX >> 8)  # room for a time plus it
        check_range("backoff.cap_ms", self.cap_ms, 0, limits.U63_MAX >> 8)

    def delay_ms(self, attempts: int) -> int:
        """The delay after the `attempts`-th attempt failed; doubling from `base_ms`, never above `cap_ms`."""
        if self.kind == "none":
            return 0
        if self.kind == "fixed":
            return self.base_ms
        doublings = min(max(attempts, 1) - 1, 62)  # capped before shifting: no huge integers
        return min(self.base_ms << doublings, self.cap_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """One queue's configuration; `None` means no limit. The last block are the defaults of its groups."""

    max_ack_holes: int = 10_000
    max_in_flight_per_session: int | None = None
    max_backlog_messages: int | None = None
    max_backlog_bytes: int | None = None
    max_message_bytes: int | None = None
    default_message_ttl_ms: int | None = None
    on_expired: Literal["discard", "dead_letter"] = "discard"
    dead_retention_ms: int | None = None
    replay_ms: int | None = None
    replay_bytes: int | None = None
    drop_after_ms: int | None = None
    drop_after_bytes: int | None = None
    producer_expiry_ms: int | None = None
    max_lease_ms: int = 43_200_000  # 12 h
    max_nack_delay_ms: int = 604_800_000  # 7 days
    history: bool = False

    visibility_timeout_ms: int = 30_000
    max_delivery_attempts: int = 5
    max_in_flight: int | None = None
    dlq_strategy: Literal["park", "move", "discard"] = "park"
    dlq_queue: str | None = None
    backoff: Backoff = Backoff()
    backoff_on_expiry: bool = False
    count: Literal["leased", "begun"] = "leased"

    def __post_init__(self) -> None:
        _check_settings(self, QUEUE_SETTINGS)
        if self.visibility_timeout_ms > self.max_lease_ms:
            problem = f"is above max_lease_ms ({self.max_lease_ms})"
            raise BadValue(field="visibility_timeout_ms", problem=problem)
        if self.dlq_strategy == "move" and self.dlq_queue is None:
            raise BadValue(field="dlq_queue", problem="is missing; dlq_strategy 'move' needs a target queue")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """What one group sets for itself; `None` means: as its queue says."""

    visibility_timeout_ms: int | None = None
    max_delivery_attempts: int | None = None
    max_in_flight: int | None = None
    dlq_strategy: Literal["park", "move", "discard"] | None = None
    dlq_queue: str | None = None
    backoff: Backoff | None = None
    backoff_on_expiry: bool | None = None
    count: Literal["leased", "begun"] | None = None

    def __post_init__(self) -> None:
        _check_settings(self, GROUP_SETTINGS)


@dataclass(frozen=True, slots=True)
class Setting:
    """What one setting may be: a whole number in a range, one of some words, a flag, a name or a backoff."""

    low: int = 0
    high: int = 0
    words: tuple[str, ...] = ()
    kind: Literal["number", "word", "flag", "queue", "backoff"] = "number"
    optional: bool = False

    def check(self, name: str, value: object) -> None:
        if value is None:
            if not self.optional:
                raise BadValue(field=name, problem="may not be null")
        elif self.kind == "flag":
            if type(value) is not bool:
                raise BadValue(field=name, problem="must be true or false")
        elif self.kind == "word":
            if value not in self.words:
                raise BadValue(field=name, problem=f"is {value!r}; one of {', '.join(self.words)} is allowed")
        elif self.kind == "backoff":
            if not isinstance(value, Backoff):
                raise BadValue(field=name, problem="must be a backoff")
        elif self.kind == "queue":
            if not isinstance(value, str):
                raise BadValue(field=name, problem="must be a queue name")
            check_name("queue", value)
        elif type(value) is not int or not self.low <= value <= self.high:
            raise BadValue(field=name, problem=f"is {value!r}; {self.low} to {self.high} is allowed")


_BIG = limits.U63_MAX >> 8  # leaves room for sums of a time and a duration below 2^63
_COUNT = Setting(low=1, high=_BIG)
_LIMIT = Setting(low=1, high=_BIG, optional=True)
_MS = Setting(low=1, high=_BIG)
_KEEP_MS = Setting(low=0, high=_BIG, optional=True)

_SHARED = {
    "visibility_timeout_ms": _MS,
    "max_delivery_attempts": Setting(low=1, high=limits.U32_MAX),
    "max_in_flight": _LIMIT,
    "dlq_strategy": Setting(kind="word", words=("park", "move", "discard")),
    "dlq_queue": Setting(kind="queue", optional=True),
    "backoff": Setting(kind="backoff"),
    "backoff_on_expiry": Setting(kind="flag"),
    "count": Setting(kind="word", words=("leased", "begun")),
}

QUEUE_SETTINGS: dict[str, Setting] = {
    "max_ack_holes": _COUNT,
    "max_in_flight_per_session": _LIMIT,
    "max_backlog_messages": _LIMIT,
    "max_backlog_bytes": _LIMIT,
    "max_message_bytes": _LIMIT,
    "default_message_ttl_ms": _LIMIT,
    "on_expired": Setting(kind="word", words=("discard", "dead_letter")),
    "dead_retention_ms": _LIMIT,
    "replay_ms": _KEEP_MS,
    "replay_bytes": _KEEP_MS,
    "drop_after_ms": _LIMIT,
    "drop_after_bytes": _LIMIT,
    "producer_expiry_ms": _LIMIT,
    "max_lease_ms": _MS,
    "max_nack_delay_ms": Setting(low=0, high=_BIG),
    "history": Setting(kind="flag"),
    **_SHARED,
}

GROUP_SETTINGS: dict[str, Setting] = {name: replace(setting, optional=True) for name, setting in _SHARED.items()}


def _check_settings(settings: QueueSettings | GroupSettings, rules: dict[str, Setting]) -> None:
    for name, rule in rules.items():
        rule.check(name, getattr(settings, name))


DEFAULT_QUEUE = QueueSettings()
DEFAULT_GROUP = GroupSettings()


_ENDS = struct.Struct("<i")
_SHAPE = struct.Struct("<8I")


@dataclass(frozen=True, slots=True)
class Columns:
    """What a batch says of its messages, as Arrow lays it out, so that its buffers go in without a loop.

    `ends` is Arrow's int32 offsets buffer without its first offset, which is `start`: message i is
    `body[ends[i-1] - start : ends[i] - start]`. The body holds all payloads, then all keys, then all
    encoded headers; `key_ends` and `header_ends` (same layout, starting at 0) cut the second and third part,
    and an empty key or header cell means none. `delays`, `not_befores` and `ttls` are int64 little-endian,
    one for each message, or a single one for all; -1 means none. `lanes` is reserved, for order by key (L1):
    it is hashed, stored and sent, and must be empty.
    """

    ends: bytes
    start: int = 0
    key_ends: bytes = b""
    header_ends: bytes = b""
    delays: bytes = b""
    not_befores: bytes = b""
    ttls: bytes = b""
    lanes: bytes = b""

    @property
    def count(self) -> int:
        return len(self.ends) // 4

    @property
    def payload_bytes(self) -> int:
        ends = self.ends
        return (_ENDS.unpack_from(ends, len(ends) - 4)[0] - self.start) if ends else 0

    @property
    def body_bytes(self) -> int:
        """How long the body must be."""
        ends, key_ends, header_ends = self.ends, self.key_ends, self.header_ends
        size = int(_ENDS.unpack_from(ends, len(ends) - 4)[0]) - self.start if ends else 0
        if key_ends:
            size += _last(key_ends)
        if header_ends:
            size += _last(header_ends)
        return size

    def content(self) -> tuple[bytes, ...]:
        """The columns in hashing order; with the body behind them they are what a batch *is* (P2)."""
        shape = _SHAPE.pack(
            self.start,
            len(self.ends),
            len(self.key_ends),
            len(self.header_ends),
            len(self.delays),
            len(self.not_befores),
            len(self.ttls),
            len(self.lanes),
        )
        times = (self.delays, self.not_befores, self.ttls)
        return (shape, self.ends, self.key_ends, self.header_ends, *times, self.lanes)


def _last(ends: bytes) -> int:
    return int(_ENDS.unpack_from(ends, len(ends) - 4)[0]) if ends else 0


def ends_of(sizes: Iterator[int] | list[int]) -> bytes:
    """The `ends` column for parts of these sizes."""
    total = 0
    out = bytearray()
    for size in sizes:
        total += size
        out += _ENDS.pack(total)
    return bytes(out)


@dataclass(frozen=True, slots=True)
class Stream:
    """A staged transaction of a stream: batches are numbered without gaps, so `seq <= last` is published."""

    app: str
    seq: int

    def __post_init__(self) -> None:
        check_text("txn.app", self.app, limits.TXN_ID_BYTES)
        check_range("txn.seq", self.seq, 0, limits.U63_MAX)


@dataclass(frozen=True, slots=True)
class Job:
    """A staged transaction of one job, under an opaque id."""

    id: str

    def __post_init__(self) -> None:
        check_text("txn.id", self.id, limits.TXN_ID_BYTES)


TxnId = Stream | Job


@dataclass(frozen=True, slots=True)
class Place:
    """Where the fold decided something: index in its log, position in that entry, and the committed time (Q2)."""

    index: int
    position: int
    time_ms: int
    log: LogId = THE_LOG


def fits_versions(first: int, last: int) -> bool:
    """Whether first..last is a range of versions: they begin at 1."""
    return 1 <= first <= last <= limits.U63_MAX
