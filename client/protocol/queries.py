"""Requests that change nothing. A node answers a `Query` from its state at one applied index (Q1)."""

from holdfast.client.protocol import limits
from holdfast.client.protocol.errors import BadValue
from holdfast.client.protocol.quick import dataclass
from holdfast.client.protocol.values import (
    QueueId,
    TxnId,
    check_name,
    check_range,
    check_reference,
    check_text,
)

PAGE_MAX = 10_000  # rows one answer may hold
SCAN_MAX = 100_000  # rows one query may look at before it hands back a token


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeQueue:
    """Resolve a name: id, settings, tail, groups."""

    name: str

    def __post_init__(self) -> None:
        check_name("queue", self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListQueues:
    after: str = ""
    limit: int = 1_000

    def __post_init__(self) -> None:
        check_reference("queue", self.after)
        check_range("limit", self.limit, 1, PAGE_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListGroups:
    queue_id: QueueId


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """The ten counters of G4 and what belongs to them."""

    queue_id: QueueId
    group: str

    def __post_init__(self) -> None:
        check_reference("group", self.group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peek:
    """Messages with their bodies, without touching any group; with `group`, only those it has not settled."""

    queue_id: QueueId
    group: str | None = None
    from_version: int = 1
    limit: int = 10

    def __post_init__(self) -> None:
        if self.group is not None:
            check_reference("group", self.group)
        check_range("from_version", self.from_version, 1, limits.U63_MAX)
        check_range("limit", self.limit, 1, PAGE_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Kept messages by range of versions, settled or not; a page at a time, bounded in bytes."""

    queue_id: QueueId
    from_version: int
    to_version: int
    max_bytes: int = 4_194_304

    def __post_init__(self) -> None:
        check_range("from_version", self.from_version, 1, limits.U63_MAX)
        check_range("to_version", self.to_version, 1, limits.U63_MAX)
        check_range("max_bytes", self.max_bytes, 1, limits.FRAME_BODY_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetters:
    """Dead rows by filter, a page and a scan budget at a time (D3); `count_only` counts instead."""

    queue_id: QueueId
    group: str | None = None
    where: str = ""
    limit: int = 100
    after: bytes = b""
    scan: int = SCAN_MAX
    count_only: bool = False

    def __post_init__(self) -> None:
        if self.group is not None:
            check_reference("group", self.group)
        check_range("limit", self.limit, 1, PAGE_MAX)
        check_range("scan", self.scan, 1, SCAN_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explain:
    """Why is this version, or anything of this group, not being delivered now (E1)?"""

    queue_id: QueueId
    group: str
    version: int | None = None

    def __post_init__(self) -> None:
        check_reference("group", self.group)
        if self.version is not None:
            check_range("version", self.version, 1, limits.U63_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerState:
    """A producer's epoch and high-water mark, without fencing anybody."""

    queue_id: QueueId
    client_id: str

    def __post_init__(self) -> None:
        check_text("client_id", self.client_id, limits.CLIENT_ID_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class TxnStatus:
    txn: TxnId


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The delivery history of a queue that keeps one, by range of its own numbers."""

    queue_id: QueueId
    from_seq: int = 1
    limit: int = 1_000

    def __post_init__(self) -> None:
        check_range("from_seq", self.from_seq, 1, limits.U63_MAX)
        check_range("limit", self.limit, 1, PAGE_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class FindByKey:
    """Versions that carry a key, for cancel and reschedule by key (P6)."""

    queue_id: QueueId
    key: bytes
    from_version: int = 1
    limit: int = 1_000
    scan: int = SCAN_MAX

    def __post_init__(self) -> None:
        if len(self.key) > limits.KEY_BYTES:
            problem = f"has {len(self.key)} bytes; up to {limits.KEY_BYTES} are allowed"
            raise BadValue(field="key", problem=problem)
        check_range("from_version", self.from_version, 1, limits.U63_MAX)
        check_range("limit", self.limit, 1, PAGE_MAX)
        check_range("scan", self.scan, 1, SCAN_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class FindMoved:
    """Versions of a dead-letter queue that are available there and can go home, by a filter on their lineage (D4)."""

    queue_id: QueueId
    group: str
    where: str = ""
    from_version: int = 1
    limit: int = 1_000
    scan: int = SCAN_MAX

    def __post_init__(self) -> None:
        check_reference("group", self.group)
        check_range("from_version", self.from_version, 1, limits.U63_MAX)
        check_range("limit", self.limit, 1, PAGE_MAX)
        check_range("scan", self.scan, 1, SCAN_MAX)


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """Who are you, and how do you do? Each node answers for itself, whoever leads; its state is not asked."""


Query = (
    DescribeQueue
    | ListQueues
    | ListGroups
    | Stats
    | Peek
    | Read
    | DeadLetters
    | Explain
    | ProducerState
    | TxnStatus
    | History
    | FindByKey
    | FindMoved
)


@dataclass(frozen=True, slots=True)
class HandOver:
    """Let another voter lead: the one named, or the one that has most of the log. The leader answers when it is so."""

    target: str | None = None

    def __post_init__(self) -> None:
        if self.target is not None:
            check_text("target", self.target, limits.NAME_BYTES)


LeaderQuery = Query | HandOver  # what is asked of the leader, and asked again where that is then
AnyQuery = LeaderQuery | NodeStatus  # what an Inquiry may carry
