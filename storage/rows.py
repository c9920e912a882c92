"""The values of the tables: what each row holds and how it lies in bytes.

Rows are `struct` layouts (never msgpack: two encoders may differ in bytes, and digests compare bytes).
Rows that many commands of one entry touch are small mutable objects, kept by `state.py` and written once.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import lru_cache
from itertools import starmap
from operator import attrgetter
from typing import Any, Literal, TypeVar, get_args

from holdfast.client.protocol.values import (
    GROUP_SETTINGS,
    QUEUE_SETTINGS,
    Backoff,
    Columns,
    GroupSettings,
    QueueSettings,
    Setting,
)

T = TypeVar("T")

Why = Literal["acked", "dead", "moved", "discarded", "cancelled", "purged", "trimmed", "freed", "redriven"]
WHYS: tuple[Why, ...] = get_args(Why)
WHY_NUMBER = {why: number for number, why in enumerate(WHYS)}
REDRIVEN = WHY_NUMBER["redriven"]
FREED = WHY_NUMBER["freed"]
DEAD = WHY_NUMBER["dead"]

Cause = Literal["rejected", "max_attempts", "expired"]
CAUSES: tuple[Cause, ...] = get_args(Cause)

NEVER = 2**63 - 1  # a due time that does not come

_U16 = struct.Struct(">H")


def pack_text(text: str) -> bytes:
    data = text.encode()
    return _U16.pack(len(data)) + data


def unpack_text(data: bytes, at: int) -> tuple[str, int]:
    size = _U16.unpack_from(data, at)[0]
    return data[at + 2 : at + 2 + size].decode(), at + 2 + size


# Spans ---------------------------------------------------------------------------------------------------

BEGUN = 1
REDRIVE = 2

_SPAN = struct.Struct(">QQIIIBQQHH")


class Span:
    """Consecutive versions of a group with what they have in common: counts, times, last consumer and error."""

    __slots__ = ("attempts", "consumer", "count", "error", "first_ms", "flags", "hi", "last_ms", "lo", "redrives")

    def __init__(
        self,
        lo: int,
        hi: int,
        count: int = 0,
        attempts: int = 0,
        flags: int = 0,
        first_ms: int = 0,
        last_ms: int = 0,
        consumer: str = "",
        error: str = "",
        redrives: int = 0,
    ) -> None:
        self.lo = lo
        self.hi = hi
        self.count = count
        self.attempts = attempts
        self.flags = flags
        self.first_ms = first_ms
        self.last_ms = last_ms
        self.consumer = consumer
        self.error = error
        self.redrives = redrives  # how often it was brought back from the dead

    def part(self, lo: int, hi: int) -> "Span":
        return Span(
            lo, hi, self.count, self.attempts, self.flags, self.first_ms, self.last_ms, self.consumer, self.error,
            self.redrives,
        )  # fmt: skip

    def pack(self) -> bytes:
        consumer, error = self.consumer.encode(), self.error.encode()
        return (
            _SPAN.pack(
                self.lo,
                self.hi,
                self.count,
                self.attempts,
                self.redrives,
                self.flags,
                self.first_ms,
                self.last_ms,
                len(consumer),
                len(error),
            )
            + consumer
            + error
        )


def unpack_span(data: bytes, at: int = 0) -> tuple[Span, int]:
    lo, hi, count, attempts, redrives, flags, first_ms, last_ms, consumer, error = _SPAN.unpack_from(data, at)
    at += _SPAN.size
    middle = at + consumer
    end = middle + error
    return (
        Span(
            lo,
            hi,
            count,
            attempts,
            flags,
            first_ms,
            last_ms,
            data[at:middle].decode(),
            data[middle:end].decode() if error else "",
            redrives,
        ),
        end,
    )


def versions_in(spans: list[Span]) -> int:
    """How many versions these spans hold together."""
    total = 0
    for span in spans:
        total += span.hi - span.lo + 1
    return total


# Leases --------------------------------------------------------------------------------------------------

LEASE_COUNTS_BEGUN = 1
LEASE_AUTO = 2

_LEASE = struct.Struct(">16sQQBHH")
_PAIR = struct.Struct(">QQ")


class LeaseRow:
    """An open lease: its owner, its deadline in lease time, what it was granted and what of that it still holds."""

    __slots__ = ("deadline", "flags", "granted", "granted_at", "held", "session")

    def __init__(
        self,
        session: bytes,
        deadline: int,
        granted_at: int,
        flags: int,
        granted: list[tuple[int, int]],
        held: list[Span],
    ) -> None:
        self.session = session
        self.deadline = deadline
        self.granted_at = granted_at
        self.flags = flags
        self.granted = granted
        self.held = held

    def pack(self) -> bytes:
        parts = [
            _LEASE.pack(self.session, self.deadline, self.granted_at, self.flags, len(self.granted), len(self.held))
        ]
        parts.extend(starmap(_PAIR.pack, self.granted))
        parts.extend(map(Span.pack, self.held))
        return b"".join(parts)


def unpack_lease(data: bytes) -> LeaseRow:
    session, deadline, granted_at, flags, granted_count, held_count = _LEASE.unpack_from(data)
    at = _LEASE.size
    begin, at = at, at + 16 * granted_count
    granted: list[tuple[int, int]] = list(_PAIR.iter_unpack(data[begin:at]))
    held = []
    for _ in range(held_count):
        span, at = unpack_span(data, at)
        held.append(span)
    return LeaseRow(session, deadline, granted_at, flags, granted, held)


# Batches -------------------------------------------------------------------------------------------------

BATCH_KEPT = 1  # every group has settled it once: it is stored for replay only (G3)

_BATCH = struct.Struct(">IQQQQQIBHH")


class BatchRow:
    """Consecutive messages that are stored together: one due time, one expiry, one blob."""

    __slots__ = (
        "blob", "body_bytes", "client", "count", "due", "enqueued", "expires", "first", "first_seq", "flags",
        "generation", "last",
    )  # fmt: skip

    def __init__(
        self,
        first: int,
        count: int,
        blob: int,
        enqueued: int,
        due: int,
        expires: int,
        first_seq: int,
        body_bytes: int,
        client: str,
        generation: int,
        flags: int = 0,
    ) -> None:
        self.first = first
        self.count = count
        self.last = first + count - 1
        self.blob = blob
        self.enqueued = enqueued
        self.due = due  # 0: never held back
        self.expires = expires  # 0: never
        self.first_seq = first_seq
        self.body_bytes = body_bytes
        self.client = client
        self.generation = generation  # the restore generation in which it was produced (T4)
        self.flags = flags

    def pack(self) -> bytes:
        client = self.client.encode()
        return (
            _BATCH.pack(
                self.count,
                self.blob,
                self.enqueued,
                self.due,
                self.expires,
                self.first_seq,
                self.body_bytes,
                self.flags,
                self.generation,
                len(client),
            )
            + client
        )


def unpack_batch(first: int, data: bytes) -> BatchRow:
    count, blob, enqueued, due, expires, first_seq, body, flags, generation, client = _BATCH.unpack_from(data)
    at = _BATCH.size
    return BatchRow(
        first,
        count,
        blob,
        enqueued,
        due,
        expires,
        first_seq,
        body,
        data[at : at + client].decode(),
        generation,
        flags,
    )


CHECKSUM_BYTES = 16
_SHAPE = struct.Struct("<8I")


def pack_blob(checksum: bytes, columns: Columns, body: bytes | memoryview) -> bytes:
    return b"".join((checksum, *columns.content(), body))


def unpack_blob(data: bytes | memoryview) -> tuple[bytes, Columns, memoryview]:
    """Checksum, columns and body of a stored blob; the checksum is not verified here."""
    view = memoryview(data)
    start, *sizes = _SHAPE.unpack_from(view, CHECKSUM_BYTES)
    at = CHECKSUM_BYTES + _SHAPE.size
    parts = []
    for size in sizes:
        parts.append(bytes(view[at : at + size]))
        at += size
    ends, key_ends, header_ends, delays, not_befores, ttls, lanes = parts
    columns = Columns(ends, start, key_ends, header_ends, delays, not_befores, ttls, lanes)
    return bytes(view[:CHECKSUM_BYTES]), columns, view[at:]


# Settings ------------------------------------------------------------------------------------------------

_NUMBER = struct.Struct(">q")


def _pack_setting(rule: Setting, value: Any) -> bytes:
    if value is None:
        return b"\x00"
    if rule.kind == "flag":
        return b"\x01" + bytes([value])
    if rule.kind in ("word", "queue"):
        return b"\x01" + pack_text(value)
    if rule.kind == "backoff":
        return b"\x01" + pack_text(value.kind) + _NUMBER.pack(value.base_ms) + _NUMBER.pack(value.cap_ms)
    return b"\x01" + _NUMBER.pack(value)


def _unpack_setting(rule: Setting, data: bytes, at: int) -> tuple[Any, int]:
    at += 1
    if not data[at - 1]:
        return None, at
    if rule.kind == "flag":
        return bool(data[at]), at + 1
    if rule.kind in ("word", "queue"):
        return unpack_text(data, at)
    if rule.kind == "backoff":
        kind, at = unpack_text(data, at)
        return Backoff(kind, *_PAIR_SIGNED.unpack_from(data, at)), at + 16  # type: ignore[arg-type]
    return _NUMBER.unpack_from(data, at)[0], at + 8


_PAIR_SIGNED = struct.Struct(">qq")


def pack_settings(settings: QueueSettings | GroupSettings) -> bytes:
    """Every setting in the order of its table; a new setting goes to the end of the table."""
    rules = QUEUE_SETTINGS if isinstance(settings, QueueSettings) else GROUP_SETTINGS
    return b"".join(_pack_setting(rule, getattr(settings, name)) for name, rule in rules.items())


@lru_cache(maxsize=1024)
def unpack_queue_settings(data: bytes) -> QueueSettings:
    """Cached by its bytes: decoding is pure, and a queue's settings are read by every command."""
    return QueueSettings(**_unpack_settings(QUEUE_SETTINGS, data))


@lru_cache(maxsize=1024)
def unpack_group_settings(data: bytes) -> GroupSettings:
    return GroupSettings(**_unpack_settings(GROUP_SETTINGS, data))


def _unpack_settings(rules: dict[str, Setting], data: bytes) -> dict[str, Any]:
    values: dict[str, Any] = {}
    at = 0
    for name, rule in rules.items():
        if at >= len(data):
            break  # written before this setting existed: its default
        values[name], at = _unpack_setting(rule, data, at)
    return values


# Rows that are kept during an entry -----------------------------------------------------------------------


@dataclass(slots=True)
class QueueRow:
    q: int
    name: str
    settings_bytes: bytes
    tail: int = 0
    live_count: int = 0  # messages of batches that some group has not settled (or that no group settles)
    live_bytes: int = 0
    stored_count: int = 0  # live, and kept for replay
    stored_bytes: int = 0
    sched_rows: int = 0
    sched_versions: int = 0
    ttl_rows: int = 0
    producers: int = 0
    last_epoch: int = 0  # given out to any producer
    freed_rows: int = 0
    history_seq: int = 0
    history_low: int = 1
    kept_rows: int = 0
    low: int = 1  # the lowest stored version, or the one after the tail
    deleted: int = 0
    dead_seq: int = 0  # the highest number of a death in a group that was deleted
    trim_at: int = 0  # where retention goes on, when one command could not look at all that is old: the version,
    trim_passed: int = 0  # and the live bytes below it
    free_at: int = 0
    free_passed: int = 0
    readers: int = 0

    @property
    def settings(self) -> QueueSettings:
        return unpack_queue_settings(self.settings_bytes)


@dataclass(slots=True)
class GroupRow:
    q: int
    gid: int
    g: int
    grave: int  # under which its dead rows stand; they outlive a seek, unless it drops them all by giving this up
    shelf: int  # under which what is available, away or open again stands; a purge gives it up
    hold: int  # under which its leases stand, but for auto-acked ones; a purge of what is in flight gives it up
    name: str
    settings_bytes: bytes
    start: int = 1
    cursor: int = 1  # one above the highest plain version ever leased; what is plain and not below it was never leased
    skip_to: int = 1  # [cursor, skip_to) holds nothing plain that is unsettled: a scan need not look there again
    skip_held: int = 0  # held batches in [cursor, skip_to)
    floor: int = 0
    settled_top: int = 0
    holes: int = 0
    held: int = 0  # versions held back by P6
    held_passed: int = 0  # batches held back by P6 that begin below the cursor
    redriven: int = 0  # runs of redriven versions, not settled again: rows of AGAIN
    in_flight: int = 0
    waiting: int = 0  # versions away after a nack
    acked: int = 0
    dead: int = 0
    moved: int = 0
    discarded: int = 0
    cancelled: int = 0
    purged: int = 0
    trimmed: int = 0
    freed: int = 0  # versions that were not stored any more when this generation began
    expired: int = 0
    carried: int = 0  # versions that count as produced here though this generation never had them: parked ones
    parked: int = 0  # versions in dead rows, of this generation and of earlier ones
    dead_seq: int = 0
    done_rows: int = 0
    known_from: int = 1  # settled versions below it have lost their reason (E1: freed)
    sched_time: int = 0  # P6 batches up to (time, version) are folded
    sched_version: int = 0
    ttl_time: int = 0
    ttl_version: int = 0
    lease_due: int = NEVER  # no lease falls due before (lease time); a lower bound that saves a seek
    wait_due: int = NEVER
    pins: int = 0  # auto-acked ranges that a replay may still read
    line: int = 0  # the tail at the last purge: what is not above it is settled, unless it is in OPEN or AGAIN
    open_rows: int = 0
    sort_from: int = 0  # leases of sort_from … sort_to, from before that purge, may hold versions that are not in
    sort_to: int = 0  # OPEN or AGAIN yet; 0: none
    sort_version: int = 0  # ranges of the lease sort_from that begin below it are sorted in
    gaps_from: int = 0  # what was not stored of gaps_from … gaps_to when this generation began is not in DONE yet;
    gaps_to: int = 0  # 0: all of it is
    generation: int = 0  # another one after every Seek (G2), as clients see it

    @property
    def settings(self) -> GroupSettings:
        return unpack_group_settings(self.settings_bytes)


@dataclass(slots=True)
class Meta:
    format: int = 1
    rules: int = 1
    applied: int = 0
    time_ms: int = 0
    steps: int = 0
    generation: int = 0
    queue_ids: int = 0
    group_ids: int = 0
    group_generations: int = 0
    lease_ids: int = 0
    blob_ids: int = 0
    reap_ids: int = 0
    txn_ids: int = 0
    queues: int = 0
    sessions: int = 0
    staged_bytes: int = 0
    digest: int = 0
    step_log: list[tuple[int, int]] = field(default_factory=list)  # (lease time, sum of steps from then on)
    limits: dict[str, int] = field(default_factory=dict)  # those that differ from the defaults, by name


# One scheme for the kept rows: all whole numbers in field order, then the texts.
def _layout(kind: type) -> "tuple[struct.Struct, attrgetter[tuple[int, ...]], int]":
    """How the numbers lie, all of them from a row, and how many stand before the texts."""
    names = [f.name for f in fields(kind) if f.type in (int, "int")]
    before = [f.name for f in fields(kind)].index("name")
    return struct.Struct(f">{len(names)}Q"), attrgetter(*names), before


_QUEUE, _QUEUE_NUMBERS, _QUEUE_IDS = _layout(QueueRow)
_GROUP, _GROUP_NUMBERS, _GROUP_IDS = _layout(GroupRow)
_META_NAMES = tuple(f.name for f in fields(Meta) if f.type in (int, "int") and f.name != "digest")
_META_NUMBERS = attrgetter(*_META_NAMES)
_META = struct.Struct(f">{len(_META_NAMES)}Q16sHH")


def pack_queue(row: QueueRow) -> bytes:
    return _QUEUE.pack(*_QUEUE_NUMBERS(row)) + pack_text(row.name) + row.settings_bytes


def unpack_queue(data: bytes) -> QueueRow:
    return _unpack_row(QueueRow, _QUEUE, _QUEUE_IDS, data)


def pack_group(row: GroupRow) -> bytes:
    return _GROUP.pack(*_GROUP_NUMBERS(row)) + pack_text(row.name) + row.settings_bytes


def unpack_group(data: bytes) -> GroupRow:
    return _unpack_row(GroupRow, _GROUP, _GROUP_IDS, data)


def _unpack_row(kind: Callable[..., T], layout: struct.Struct, ids: int, data: bytes) -> T:
    numbers = layout.unpack_from(data)
    name, at = unpack_text(data, layout.size)
    return kind(*numbers[:ids], name, data[at:], *numbers[ids:])


def pack_meta(row: Meta) -> bytes:
    numbers = _META.pack(
        *_META_NUMBERS(row),
        row.digest.to_bytes(16, "big"),
        len(row.step_log),
        len(row.limits),
    )
    steps = b"".join(_PAIR.pack(*step) for step in row.step_log)
    limits = b"".join(pack_text(name) + _NUMBER.pack(row.limits[name]) for name in sorted(row.limits))
    return numbers + steps + limits


def unpack_meta(data: bytes) -> Meta:
    *numbers, digest, steps, limit_count = _META.unpack_from(data)
    row = Meta(*numbers)
    row.digest = int.from_bytes(digest, "big")
    at = _META.size
    for _ in range(steps):
        row.step_log.append(_PAIR.unpack_from(data, at))
        at += 16
    for _ in range(limit_count):
        name, at = unpack_text(data, at)
        row.limits[name] = _NUMBER.unpack_from(data, at)[0]
        at += 8
    return row


# Producers and sessions -----------------------------------------------------------------------------------

_PRODUCER = struct.Struct(">QQQQ16sH")
_REMEMBERED = struct.Struct(">QQIQ16s")

Remembered = tuple[int, int, int, int, bytes]  # numbering epoch, first number, count, first version, content hash


@dataclass(slots=True)
class ProducerRow:
    epoch: int = 0
    high_water: int = 0
    last_use: int = 0
    born: int = 0  # the epoch in which it was first opened; 0 where it wrote before anybody opened it
    nonce: bytes = bytes(16)
    window: list[Remembered] = field(default_factory=list)

    def pack(self) -> bytes:
        head = _PRODUCER.pack(self.epoch, self.high_water, self.last_use, self.born, self.nonce, len(self.window))
        return head + b"".join([_REMEMBERED.pack(*item) for item in self.window])


def unpack_producer(data: bytes) -> ProducerRow:
    epoch, high_water, last_use, born, nonce, _ = _PRODUCER.unpack_from(data)
    window = list(_REMEMBERED.iter_unpack(data[_PRODUCER.size :]))
    return ProducerRow(epoch, high_water, last_use, born, nonce, window)


_SESSION = struct.Struct(">QQQHHH")
_ASKED = struct.Struct(">QQBI")

REPLY_INLINE = 0  # the reply's bytes
REPLY_APART = 1  # the reply is in its own table
REPLY_LEASE = 2  # q, gid, lease id: a lease is answered as it is now (L4)
REPLY_SETTLED = 3  # how many versions were settled, none refused

Asked = tuple[int, int, int, bytes]  # request number, command hash, kind of reply, its bytes


@dataclass(slots=True)
class SessionRow:
    principal: str
    consumer: str
    done_below: int = 0
    last_use: int = 0
    idle_hour: int = NEVER  # under which hour the session stands in SESSION_IDLE
    window: dict[int, Asked] = field(default_factory=dict)  # by request number; written in ascending order

    def pack(self) -> bytes:
        principal, consumer = self.principal.encode(), self.consumer.encode()
        parts = [
            _SESSION.pack(
                self.done_below, self.last_use, self.idle_hour, len(principal), len(consumer), len(self.window)
            ),
            principal,
            consumer,
        ]
        for _, (seq, command_hash, kind, reply) in sorted(self.window.items()):
            parts += (_ASKED.pack(seq, command_hash, kind, len(reply)), reply)
        return b"".join(parts)


def unpack_session(data: bytes) -> SessionRow:
    done_below, last_use, idle_hour, principal, consumer, count = _SESSION.unpack_from(data)
    at = _SESSION.size
    middle = at + principal
    end = middle + consumer
    window: dict[int, Asked] = {}
    row = SessionRow(data[at:middle].decode(), data[middle:end].decode(), done_below, last_use, idle_hour, window)
    at = end
    for _ in range(count):
        seq, command_hash, kind, size = _ASKED.unpack_from(data, at)
        at += _ASKED.size
        window[seq] = (seq, command_hash, kind, data[at : at + size])
        at += size
    return row


# Dead rows -----------------------------------------------------------------------------------------------

DEAD_MOVE_FAILED = 1

_DEAD = struct.Struct(">QQBBQQQQIHH")


@dataclass(slots=True)
class DeadRow:
    """Deaths of consecutive versions of one batch, and all that is needed to bring them back without it."""

    span: Span
    g: int  # the generation of the group in which they died
    dead_seq: int  # of the first; each version has its own
    cause: int
    flags: int
    died: int
    blob: int  # its own copy of the content (D2)
    enqueued: int
    first_seq: int
    body_bytes: int
    client: str
    generation: int

    def pack(self) -> bytes:
        client = self.client.encode()
        return (
            _DEAD.pack(
                self.g,
                self.dead_seq,
                self.cause,
                self.flags,
                self.died,
                self.blob,
                self.enqueued,
                self.first_seq,
                self.body_bytes,
                self.generation,
                len(client),
            )
            + client
            + self.span.pack()
        )


def unpack_dead(data: bytes) -> DeadRow:
    g, seq, cause, flags, died, blob, enqueued, first_seq, body, generation, size = _DEAD.unpack_from(data)
    at = _DEAD.size
    span, _ = unpack_span(data, at + size)
    client = data[at : at + size].decode()
    return DeadRow(span, g, seq, cause, flags, died, blob, enqueued, first_seq, body, client, generation)
