"""Answers. `Answer` puts a reply beside its place in the log, refusals too (Q2)."""

from typing import Literal

from holdfast.client.protocol.errors import HoldfastError
from holdfast.client.protocol.quick import dataclass
from holdfast.client.protocol.values import (
    THE_LOG,
    Backoff,
    Columns,
    GroupSettings,
    LeaseId,
    LogId,
    Place,
    QueueId,
    QueueSettings,
    Version,
)

# Replies to commands -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Failed:
    """The fold refused; nothing was changed by this command."""

    error: HoldfastError


@dataclass(frozen=True, slots=True)
class Done:
    """It is done, and there is nothing more to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Touched:
    more: bool  # something due is not folded yet: touch again


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueCreated:
    queue_id: QueueId
    log: LogId = THE_LOG  # in which the queue lives


@dataclass(frozen=True, slots=True, kw_only=True)
class Purged:
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A group was created or sought: where it starts, and whether the asked version was gone (G2)."""

    version: Version
    moved: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerOpened:
    epoch: int
    high_water: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Produced:
    first_version: Version
    count: int
    replayed: bool = False


@dataclass(frozen=True, slots=True)
class VersionOutcome:
    """What became of a range of a Cancel or Reschedule: `ok`, `too_late` (with the group) or `not_found`."""

    first: int
    last: int
    outcome: str
    group: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionsChanged:
    outcomes: tuple[VersionOutcome, ...]


@dataclass(frozen=True, slots=True)
class Grant:
    """A range of versions that a lease holds, with what all of them have in common."""

    first: int
    last: int
    delivery_count: int
    attempts: int  # including this delivery, where the group counts it already (`count = "leased"`)
    redrives: int = 0  # how often they were brought back from the dead letters (D4)


@dataclass(frozen=True, slots=True)
class MessageBatch:
    """Consecutive messages with their content: `columns` cut `body` as in Produce."""

    first: int
    generation: int
    enqueued_ms: int
    client_id: str
    first_seq: int
    columns: Columns
    body: bytes | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class Leased:
    """What a session now holds. Empty grants: nothing was available, and there is no lease.

    `deadline_ms` is committed time, as if no more TimeStep came. The messages are read from the store when
    the answer is sent, not by the fold. `group_generation` is another one after every Seek, and for a group that was
    made anew under its name; with a grant's `redrives` it tells whether a message that comes again is to be done again.
    """

    lease_id: LeaseId
    deadline_ms: int
    group_generation: int = 0
    counts_begun: bool = False  # an attempt counts when it is marked begun (L2)
    grants: tuple[Grant, ...]
    replayed: bool = False
    batches: tuple[MessageBatch, ...] = ()


@dataclass(frozen=True, slots=True)
class RefusedRange:
    """A part of a settle that was refused, with the code of its error."""

    lease_id: int
    first: int
    last: int
    code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """How many versions an AckBatch, Nack or Release settled; which ranges it could not, in request order."""

    count: int
    refused: tuple[RefusedRange, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Extended:
    deadline_ms: int
    held: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Redriven:
    count: int
    skipped: int  # not dead any more, or another death than the one named


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """Versions that a transaction or a publish wrote: (queue, first, last), in the order of writing."""

    versions: tuple[tuple[int, int, int], ...]
    replayed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    replayed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Aborted:
    chunks: int


# Replies to queries ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDescribed:
    name: str
    start: int
    settings: GroupSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderDescribed:
    name: str
    version: int
    lag: int
    reported_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDescribed:
    queue_id: QueueId
    log: LogId = THE_LOG  # in which the queue lives
    name: str
    settings: QueueSettings
    tail_version: int
    lowest_version: int
    stored_messages: int
    stored_bytes: int
    groups: tuple[GroupDescribed, ...]
    readers: tuple[ReaderDescribed, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuesListed:
    queues: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsListed:
    groups: tuple[GroupDescribed, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """`produced` is the sum of the ten behind it, `ready` … `trimmed` (G4)."""

    produced: int
    ready: int
    delayed: int
    in_flight: int
    acked: int
    dead: int
    moved: int
    discarded: int
    cancelled: int
    purged: int
    trimmed: int
    expired: int
    tail_version: int
    holes: int
    oldest_ms: int | None  # when the oldest unsettled message was produced


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """A page of messages; `next_version` is where to go on, or none at the end."""

    batches: tuple[MessageBatch, ...]
    next_version: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadRow:
    group: str
    dead_seq: int
    version: int
    reason: str
    attempts: int
    delivery_count: int
    last_error: str | None
    first_delivered_ms: int | None
    last_delivered_ms: int | None
    died_ms: int
    consumer_id: str | None
    client_id: str
    client_seq: int
    key: str | None
    headers: tuple[tuple[str, str], ...]
    payload: bytes
    move_failed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadListed:
    rows: tuple[DeadRow, ...]
    matched: int
    scanned: int
    next_token: bytes  # empty at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """The one reason, with its facts by name, in a fixed order (E1)."""

    reason: str
    facts: tuple[tuple[str, int | str | None], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerDescribed:
    epoch: int
    high_water: int
    last_used_ms: int
    window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TxnDescribed:
    state: str  # "open", "published", "unknown"
    staged_bytes: int = 0
    expires_at_ms: int | None = None
    versions: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRow:
    seq: int
    kind: str
    time_ms: int
    first: int
    last: int
    group: str
    lease_id: int
    consumer_id: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryListed:
    rows: tuple[HistoryRow, ...]
    next_seq: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionsFound:
    versions: tuple[tuple[int, int], ...]
    next_version: int | None


# A node about itself -----------------------------------------------------------------------------------


Role = Literal["leader", "follower", "candidate", "learner"]
Fsync = Literal["always", "os"]


@dataclass(frozen=True, slots=True)
class MemberDescribed:
    """A member of the cluster as the answering node sees it, itself included."""

    name: str
    client_address: str | None  # none where this node has not been told yet
    voter: bool
    connected: bool
    lag: int | None  # entries that it lacks of the leader's log; only the leader knows


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDescribed:
    """`applied <= committed <= last` are indexes of its log; `leader` is whom it takes for the leader of `term`."""

    node: str
    cluster_id: str
    address: str  # where it serves clients
    role: Role
    term: int
    leader: str | None
    leader_address: str | None
    applied: int
    committed: int
    last: int
    time_ms: int
    fsync: Fsync
    pid: int
    members: tuple[MemberDescribed, ...]


Reply = (
    Failed
    | Done
    | Touched
    | QueueCreated
    | Purged
    | Started
    | ProducerOpened
    | Produced
    | VersionsChanged
    | Leased
    | Settled
    | Extended
    | Redriven
    | Committed
    | Staged
    | Aborted
    | QueueDescribed
    | QueuesListed
    | GroupsListed
    | GroupStats
    | Messages
    | DeadListed
    | Explained
    | ProducerDescribed
    | TxnDescribed
    | HistoryListed
    | VersionsFound
    | NodeDescribed
)

# Values that stand inside replies and have a place in the codec of their own.
Inner = (
    Grant
    | MessageBatch
    | VersionOutcome
    | RefusedRange
    | GroupDescribed
    | ReaderDescribed
    | DeadRow
    | HistoryRow
    | MemberDescribed
    | Backoff
)


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply and where the fold gave it; a query's position is -1."""

    place: Place
    reply: Reply
