"""Requests that change state. Each is one frozen value for wire, log and tests.

A command says *what*; its `Envelope` says *as whom*: the principal, and the session's numbering by which a
retry finds the first answer (A1). Queues are named by id once the client has resolved them, so that a queue
that was deleted and created again is never taken for the old one (G5).
"""

from dataclasses import fields
from typing import Literal

from holdfast.client.protocol import limits
from holdfast.client.protocol.errors import BadValue, BatchTooLarge
from holdfast.client.protocol.quick import dataclass
from holdfast.client.protocol.values import (
    DEFAULT_GROUP,
    DEFAULT_QUEUE,
    GROUP_SETTINGS,
    NO_SESSION,
    QUEUE_SETTINGS,
    Columns,
    GroupSettings,
    LeaseId,
    QueueId,
    QueueSettings,
    SessionId,
    Setting,
    TxnId,
    check_name,
    check_range,
    check_reference,
    check_text,
    fits_versions,
)

Range = tuple[int, int]  # first and last version, both included
SettleRange = tuple[int, int, int]  # lease id, first and last version
DeadRange = tuple[int, int, int]  # first and last version, dead_seq of the first
Change = tuple[str, object]  # a setting's name and its new value

LIMITS = tuple(field.name for field in fields(limits.Limits))
ATTEMPT_BYTES = 64


# Sessions and time -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSession:
    """Begin the session of the envelope; the same again changes nothing (A1)."""

    consumer_id: str = ""

    def __post_init__(self) -> None:
        if self.consumer_id:
            check_text("consumer_id", self.consumer_id, limits.CONSUMER_ID_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Touch:
    """Fold what is due in one group, or in all; decides nothing that another command would not (T3)."""

    queue_id: QueueId
    group: str | None = None

    def __post_init__(self) -> None:
        if self.group is not None:
            check_reference("group", self.group)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeStep:
    """Committed time jumps forward by this much; lease time does not (T2)."""

    by_ms: int

    def __post_init__(self) -> None:
        check_range("by_ms", self.by_ms, 1, limits.U63_MAX >> 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class SetLimits:
    """Change limits that the fold reads, for every node at once."""

    changes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        if len({name for name, _ in self.changes}) != len(self.changes):
            raise BadValue(field="changes", problem="names a limit twice")
        for name, value in self.changes:
            if name not in LIMITS:
                raise BadValue(field=name, problem=f"is no limit; these are: {', '.join(LIMITS)}")
            check_range(name, value, 1, limits.U63_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class SetRules:
    """Switch the rules version, once every member knows it."""

    version: int

    def __post_init__(self) -> None:
        check_range("version", self.version, 1, limits.U32_MAX)


# Queues and groups -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateQueue:
    name: str
    settings: QueueSettings = DEFAULT_QUEUE
    groups: tuple[str, ...] = ("default",)

    def __post_init__(self) -> None:
        check_name("queue", self.name)
        for group in self.groups:
            check_name("group", group)
        if len(set(self.groups)) != len(self.groups):
            raise BadValue(field="groups", problem="names a group twice")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateQueue:
    queue_id: QueueId
    changes: tuple[Change, ...]

    def __post_init__(self) -> None:
        _check_changes(self.changes, QUEUE_SETTINGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteQueue:
    queue_id: QueueId


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgeQueue:
    """Settle what is ready and delayed, of one group or of all; the flags widen it (G5)."""

    queue_id: QueueId
    group: str | None = None
    in_flight: bool = False
    dead: bool = False

    def __post_init__(self) -> None:
        if self.group is not None:
            check_reference("group", self.group)


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateGroup:
    """A group that starts at the earliest kept, the latest, or a given version (G2)."""

    queue_id: QueueId
    group: str
    start: Literal["earliest", "latest"] | int = "earliest"
    settings: GroupSettings = DEFAULT_GROUP

    def __post_init__(self) -> None:
        check_name("group", self.group)
        _check_start(self.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateGroup:
    queue_id: QueueId
    group: str
    changes: tuple[Change, ...]

    def __post_init__(self) -> None:
        check_reference("group", self.group)
        _check_changes(self.changes, GROUP_SETTINGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteGroup:
    queue_id: QueueId
    group: str

    def __post_init__(self) -> None:
        check_reference("group", self.group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seek:
    """End the group's leases and start a new generation of it somewhere else (G2)."""

    queue_id: QueueId
    group: str
    to: Literal["earliest", "latest"] | int
    dead: bool = False  # also drop its parked dead rows

    def __post_init__(self) -> None:
        check_reference("group", self.group)
        _check_start(self.to)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportCursor:
    """How far a reader by version has come: shows its lag and holds `replay` back within a bound (G3)."""

    queue_id: QueueId
    reader: str
    version: int

    def __post_init__(self) -> None:
        check_name("reader", self.reader)
        check_range("version", self.version, 0, limits.U63_MAX)


# Produce -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenProducer:
    """The next epoch of a producer; the same nonce gets the same epoch (P4)."""

    queue_id: QueueId
    client_id: str
    nonce: bytes

    def __post_init__(self) -> None:
        check_text("client_id", self.client_id, limits.CLIENT_ID_BYTES)
        if len(self.nonce) != limits.NONCE_BYTES:
            raise BadValue(field="nonce", problem=f"must have {limits.NONCE_BYTES} bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetProducer:
    queue_id: QueueId
    client_id: str

    def __post_init__(self) -> None:
        check_text("client_id", self.client_id, limits.CLIENT_ID_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Produce:
    """Append messages to the tail of one queue, all or none (P1 … P8).

    The body travels beside the header, unopened; `content_hash` is computed once, by the node that
    proposes, over the columns and the body (`Columns.content`), and is empty on the wire of a client.
    Without `client_id` the request is numbered under its session, and the last six numbers are unused.
    """

    queue_id: QueueId
    columns: Columns
    body: bytes | memoryview
    client_id: str | None = None
    epoch: int = 0
    numbering_epoch: int = 0
    first_seq: int = 1
    after_seq: int | None = None
    done_below: int | None = None
    content_hash: bytes = b""

    def __post_init__(self) -> None:
        if self.client_id is not None:
            check_text("client_id", self.client_id, limits.CLIENT_ID_BYTES)
            check_range("first_seq", self.first_seq, 1, limits.U63_MAX - 1_000_000)
        check_batch(self.columns, self.body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Settle versions that no group has leased or settled yet (P6)."""

    queue_id: QueueId
    versions: tuple[Range, ...]

    def __post_init__(self) -> None:
        check_versions(self.versions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reschedule:
    """Move versions that no group has leased or settled yet to another due time; TTLs count anew (P6)."""

    queue_id: QueueId
    versions: tuple[Range, ...]
    delay_ms: int | None = None
    not_before_ms: int | None = None

    def __post_init__(self) -> None:
        check_versions(self.versions)
        check_when(self.delay_ms, self.not_before_ms)
        if self.delay_ms is None and self.not_before_ms is None:
            raise BadValue(field="delay_ms", problem="is missing; give it or not_before_ms")


# Lease and settle --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Take the lowest available versions for this session (L1).

    `wait_ms` is for the leader; the fold ignores it (L7).
    """

    queue_id: QueueId
    group: str
    max_messages: int
    max_bytes: int = 1_048_576
    visibility_timeout_ms: int | None = None
    auto_ack: bool = False
    wait_ms: int = 0

    def __post_init__(self) -> None:
        check_reference("group", self.group)
        check_range("max_messages", self.max_messages, 1, limits.LEASE_MESSAGES)
        check_range("max_bytes", self.max_bytes, 1, limits.FRAME_BODY_BYTES)
        check_range("wait_ms", self.wait_ms, 0, limits.U63_MAX)
        if self.visibility_timeout_ms is not None:
            check_range("visibility_timeout_ms", self.visibility_timeout_ms, 1, limits.U63_MAX >> 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class AckBatch:
    """Done with these versions, over any number of leases of one group (S2)."""

    queue_id: QueueId
    group: str
    ranges: tuple[SettleRange, ...]

    def __post_init__(self) -> None:
        check_reference("group", self.group)
        check_settle(self.ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nack:
    """These failed: back after a delay, or dead at once (S3)."""

    queue_id: QueueId
    group: str
    ranges: tuple[SettleRange, ...]
    delay_ms: int | None = None
    not_before_ms: int | None = None
    error: str | None = None
    dead: bool = False

    def __post_init__(self) -> None:
        check_reference("group", self.group)
        check_settle(self.ranges)
        check_when(self.delay_ms, self.not_before_ms)
        if self.error:
            check_text("error", self.error, limits.ERROR_TEXT_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Handed back unstarted: costs no attempt (L2)."""

    queue_id: QueueId
    group: str
    ranges: tuple[SettleRange, ...]

    def __post_init__(self) -> None:
        check_reference("group", self.group)
        check_settle(self.ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extend:
    """Move the lease's deadline (S4) and mark versions begun (L2)."""

    queue_id: QueueId
    group: str
    lease_id: LeaseId
    visibility_timeout_ms: int | None = None
    begin: tuple[Range, ...] = ()

    def __post_init__(self) -> None:
        check_reference("group", self.group)
        if self.visibility_timeout_ms is not None:
            check_range("visibility_timeout_ms", self.visibility_timeout_ms, 1, limits.U63_MAX >> 8)
        if self.begin:
            check_versions(self.begin, named_max=limits.U63_MAX)  # what of them is held is bounded by the lease


# Dead letters ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Redrive:
    """Bring these deaths back, each at most once; the leader evaluated the filter (D4)."""

    queue_id: QueueId
    group: str
    dead: tuple[DeadRange, ...]

    def __post_init__(self) -> None:
        check_reference("group", self.group)
        check_dead(self.dead)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedriveToOrigin:
    """Send available versions of a dead-letter queue back to the queue and group that they died in (D4)."""

    queue_id: QueueId
    group: str
    versions: tuple[Range, ...]

    def __post_init__(self) -> None:
        check_reference("group", self.group)
        check_versions(self.versions)


@dataclass(frozen=True, slots=True, kw_only=True)
class DropDead:
    """End these dead rows by hand (D2)."""

    queue_id: QueueId
    group: str
    dead: tuple[DeadRange, ...]

    def __post_init__(self) -> None:
        check_reference("group", self.group)
        check_dead(self.dead)


# Together ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    """Settle and publish in one entry, all or nothing (X1)."""

    items: tuple["AckBatch | Nack | Produce", ...]

    def __post_init__(self) -> None:
        check_range("items", len(self.items), 1, limits.TRANSACTION_ITEMS)
        if any(isinstance(item, Produce) and item.client_id is not None for item in self.items):
            problem = "is not for a transaction's produces; the session numbers them"
            raise BadValue(field="client_id", problem=problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Put one chunk of a part aside, invisible until `Publish` (X2)."""

    txn: TxnId
    part: int
    attempt: str
    chunk: int
    queue_id: QueueId
    expires_ms: int
    columns: Columns
    body: bytes | memoryview
    content_hash: bytes = b""

    def __post_init__(self) -> None:
        check_range("part", self.part, 0, limits.U32_MAX)
        check_range("chunk", self.chunk, 0, limits.U32_MAX)
        check_text("attempt", self.attempt, ATTEMPT_BYTES)
        check_range("expires_ms", self.expires_ms, 1, limits.U63_MAX >> 8)
        if len(self.body) > limits.STAGE_BYTES:
            raise BatchTooLarge(size=len(self.body), limit=limits.STAGE_BYTES, limit_name="STAGE_BYTES")
        check_batch(self.columns, self.body)


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a publish: the attempt that counts, and what it must amount to."""

    part: int
    attempt: str
    chunks: int
    count: int
    digest: int  # xor of the first 8 bytes of each chunk's content hash, big-endian


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Make the named parts visible at once, in (part, chunk, row) order (X2).

    `ops` is reserved, for settling leases in the same entry as a Transaction does, and must be empty.
    """

    txn: TxnId
    parts: tuple[Part, ...]
    fence: str = ""
    ops: tuple["AckBatch | Nack", ...] = ()

    def __post_init__(self) -> None:
        if self.ops:
            raise BadValue(field="ops", problem="is reserved")
        check_range("chunks", sum(part.chunks for part in self.parts), 0, limits.PUBLISH_CHUNKS)
        if len({part.part for part in self.parts}) != len(self.parts):
            raise BadValue(field="parts", problem="names a part twice")
        for part in self.parts:
            check_range("part", part.part, 0, limits.U32_MAX)
            check_text("attempt", part.attempt, ATTEMPT_BYTES)
            check_range("chunks", part.chunks, 0, limits.PUBLISH_CHUNKS)
            check_range("count", part.count, 0, limits.U63_MAX)
            check_range("digest", part.digest, 0, 2**64 - 1)
        if self.fence:
            check_text("fence", self.fence, limits.TXN_ID_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Drop what is staged, of all attempts or of some; a published transaction stays as it is."""

    txn: TxnId
    attempts: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for attempt in self.attempts or ():
            check_text("attempt", attempt, ATTEMPT_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetTxn:
    """An administrator ends the memory of a stream app or of a job."""

    txn: TxnId


Command = (
    OpenSession
    | Touch
    | TimeStep
    | SetLimits
    | SetRules
    | CreateQueue
    | UpdateQueue
    | DeleteQueue
    | PurgeQueue
    | CreateGroup
    | UpdateGroup
    | DeleteGroup
    | Seek
    | ReportCursor
    | OpenProducer
    | ForgetProducer
    | Produce
    | Cancel
    | Reschedule
    | Lease
    | AckBatch
    | Nack
    | Release
    | Extend
    | Redrive
    | RedriveToOrigin
    | DropDead
    | Transaction
    | Stage
    | Publish
    | Abort
    | ForgetTxn
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """A command as it stands in the log: who asks, under which number, and what.

    `session` is empty for what needs none: a Produce with a client id, a Stage, and the leader's own
    Touch and TimeStep.
    """

    principal: str
    command: Command
    session: SessionId = NO_SESSION
    request_seq: int = 0
    done_below: int = 0

    def __post_init__(self) -> None:
        check_text("principal", self.principal, limits.NAME_BYTES)
        if len(self.session) not in (0, limits.SESSION_BYTES):
            raise BadValue(field="session", problem=f"must have {limits.SESSION_BYTES} bytes")


# Checks shared by several commands ----------------------------------------------------------------------


def check_versions(ranges: tuple[Range, ...], named_max: int = limits.VERSIONS_NAMED) -> None:
    """Ascending and apart, so that a command names each version once; and not more than one command may touch."""
    check_range("versions", len(ranges), 1, limits.VERSION_RANGES)
    before = named = 0
    for first, last in ranges:
        if first <= before or not fits_versions(first, last):
            problem = f"must be ascending ranges without overlap, not {first}-{last}"
            raise BadValue(field="versions", problem=problem)
        before = last
        named += last - first + 1
    check_range("versions named in all", named, 1, named_max)


def check_settle(ranges: tuple[SettleRange, ...]) -> None:
    """For one lease ascending and apart, so that an answer is never larger than the request and the lease."""
    check_range("ranges", len(ranges), 1, limits.SETTLE_RANGES)
    ends: dict[int, int] = {}
    for lease_id, first, last in ranges:
        if not 1 <= first <= last <= limits.U63_MAX or not 0 <= lease_id <= limits.U63_MAX:
            problem = f"has {first}-{last} of lease {lease_id}; a range begins at 1 or above"
            raise BadValue(field="ranges", problem=problem)
        if first <= ends.get(lease_id, 0):
            problem = f"has {first}-{last} of lease {lease_id} after {ends[lease_id]}; those of a lease ascend, apart"
            raise BadValue(field="ranges", problem=problem)
        ends[lease_id] = last


def check_dead(ranges: tuple[DeadRange, ...]) -> None:
    check_versions(tuple((first, last) for first, last, _ in ranges))
    for _, _, dead_seq in ranges:
        check_range("dead_seq", dead_seq, 0, limits.U63_MAX)


def check_when(delay_ms: int | None, not_before_ms: int | None) -> None:
    if delay_ms is not None and not_before_ms is not None:
        raise BadValue(field="delay_ms", problem="and not_before_ms exclude each other")
    for name, value in (("delay_ms", delay_ms), ("not_before_ms", not_before_ms)):
        if value is not None:
            check_range(name, value, 0, limits.U63_MAX >> 8)


def check_batch(columns: Columns, body: bytes | memoryview) -> None:
    """The cheap part of a batch's check; `columns.py` has the rest, for what was decoded."""
    if not columns.ends:
        raise BadValue(field="ends", problem="is empty; a batch has at least one message")
    if columns.lanes:
        raise BadValue(field="lanes", problem="is reserved")
    if len(body) != columns.body_bytes:
        raise BadValue(field="body", problem=f"has {len(body)} bytes; its columns say {columns.body_bytes}")


def _check_start(start: object) -> None:
    if type(start) is int:
        check_range("start", start, 1, limits.U63_MAX)
    elif start not in ("earliest", "latest"):
        raise BadValue(field="start", problem=f"is {start!r}; earliest, latest or a version is allowed")


def _check_changes(changes: tuple[Change, ...], rules: dict[str, Setting]) -> None:
    if len({name for name, _ in changes}) != len(changes):
        raise BadValue(field="changes", problem="names a setting twice")
    for name, value in changes:
        if name not in rules:
            raise BadValue(field=name, problem=f"is no setting; these are: {', '.join(rules)}")
        rules[name].check(name, value)
