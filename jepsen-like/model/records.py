"""One record for each message, and one more for each message in each group: what a queue is made of.

Plain dicts and lists, searched from end to end. A number that can be computed from the records is
computed whenever it is asked for, so that nothing here can fall out of step with itself.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from holdfast.client.protocol.columns import encode_headers
from holdfast.client.protocol.replies import Grant, HistoryRow
from holdfast.client.protocol.values import GroupSettings, QueueSettings

Headers = tuple[tuple[str, str], ...]

UNSETTLED = ("ready", "delayed", "leased")
SETTLED = ("acked", "dead", "moved", "discarded", "cancelled", "purged", "trimmed")  # L5
# `freed` is no end of a life: the message was gone before the group began to look (0002, 13).


@dataclass(frozen=True, slots=True)
class Draft:
    """A message that has no version yet."""

    payload: bytes
    key: bytes
    headers: Headers
    delay_ms: int | None = None
    not_before_ms: int | None = None
    ttl_ms: int | None = None

    @property
    def size_bytes(self) -> int:
        return body_bytes(self.payload, self.key, self.headers)


@dataclass(frozen=True, slots=True)
class Message:
    """A message as its queue holds it; nothing of this ever changes."""

    version: int
    generation: int  # restore generation in which it was produced (T4)
    enqueued_ms: int
    client_id: str
    client_seq: int
    payload: bytes
    key: bytes
    headers: Headers

    @property
    def size_bytes(self) -> int:
        """Its share of a body: payload, key and encoded headers."""
        return body_bytes(self.payload, self.key, self.headers)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


@dataclass
class Batch:
    """A stored batch: consecutive messages with one due time and one expiry, freed together (0002, 11)."""

    messages: list[Message]
    due_ms: int | None
    expires_ms: int | None
    ttl_ms: int | None
    kept: bool = False  # every group had settled it once: it is no backlog any more, even if a group seeks back to it

    @property
    def first(self) -> int:
        return self.messages[0].version

    @property
    def last(self) -> int:
        return self.messages[-1].version

    @property
    def enqueued_ms(self) -> int:
        return self.messages[0].enqueued_ms

    @property
    def size_bytes(self) -> int:
        return sum(message.size_bytes for message in self.messages)


@dataclass
class Life:
    """One message's life in one group."""

    version: int
    state: str = "ready"
    due_ms: int | None = None  # end of its delay, while delayed
    held: bool = False  # delayed by P6, as long as that is not folded; otherwise a delay is a nack's
    expires_ms: int | None = None
    delivery_count: int = 0
    attempts: int = 0  # without the lease that holds it now
    lease_id: int = 0
    redrives: int = 0
    ever_leased: bool = False  # in this generation of the group
    redriven: bool = False  # and not settled again
    last_error: str | None = None
    first_delivered_ms: int | None = None
    last_delivered_ms: int | None = None
    consumer_id: str | None = None

    @property
    def unsettled(self) -> bool:
        return self.state in UNSETTLED

    @property
    def counts_as_settled(self) -> bool:
        """For floor, holes and highest settled a redriven version is one that was settled (0002, 14)."""
        return not self.unsettled or self.redriven

    def settle(self, state: str) -> None:
        self.state = state
        self.lease_id = 0
        self.due_ms = None
        self.held = self.redriven = False


@dataclass
class OpenLease:
    id: int
    session: bytes
    consumer_id: str
    granted_at: int  # lease time
    deadline: int  # lease time
    counts: Literal["leased", "begun"]
    grants: tuple[Grant, ...]
    begun: set[int] = field(default_factory=set)

    def granted(self, version: int) -> bool:
        return any(grant.first <= version <= grant.last for grant in self.grants)


@dataclass
class AutoAck:
    """Grants that were settled at hand-out and can still be replayed (L6)."""

    lease_id: int
    session: bytes
    request_seq: int
    deadline: int  # lease time
    grants: tuple[Grant, ...]

    def covers(self, version: int) -> bool:
        return any(grant.first <= version <= grant.last for grant in self.grants)


@dataclass
class Dead:
    """A parked death; it owns its message (D2)."""

    dead_seq: int
    message: Message
    reason: str
    attempts: int
    delivery_count: int
    redrives: int
    last_error: str | None
    first_delivered_ms: int | None
    last_delivered_ms: int | None
    died_ms: int
    consumer_id: str | None
    move_failed: bool
    carried: bool = False  # from before the last Seek

    @property
    def version(self) -> int:
        return self.message.version


@dataclass
class Group:
    name: str
    settings: GroupSettings
    start: int
    generation: int  # never the same again: a Seek gives another one, and so does a group that is made anew
    lives: dict[int, Life] = field(default_factory=dict)
    leases: dict[int, OpenLease] = field(default_factory=dict)
    auto_acks: dict[int, AutoAck] = field(default_factory=dict)
    dead: dict[int, Dead] = field(default_factory=dict)  # by dead_seq
    highest_plain: int = 0  # highest version without a due time that was ever leased in this generation
    dead_seq: int = 0  # the last one given
    expired: int = 0
    carried: Counter[str] = field(default_factory=Counter)  # what became of rows from before the last Seek

    def held_by(self, lease_id: int) -> list[int]:
        """What a lease still holds, ascending."""
        return sorted(v for v, life in self.lives.items() if life.state == "leased" and life.lease_id == lease_id)

    def in_state(self, *states: str) -> list[int]:
        return sorted(version for version, life in self.lives.items() if life.state in states)


@dataclass(frozen=True, slots=True)
class RememberedProduce:
    numbering_epoch: int
    first_seq: int
    count: int
    content: tuple[bytes, ...]
    first_version: int

    @property
    def last_seq(self) -> int:
        return self.first_seq + self.count - 1


@dataclass
class Producer:
    epoch: int
    high_water: int
    last_use_ms: int
    first_epoch: int = 0  # with which it came to be; 0 where a produce made it
    nonce: bytes | None = None
    window: list[RememberedProduce] = field(default_factory=list)


@dataclass
class Reader:
    version: int
    reported_ms: int


@dataclass
class Queue:
    id: int
    name: str
    settings: QueueSettings
    tail: int = 0
    batches: list[Batch] = field(default_factory=list)  # stored ones, ascending
    groups: dict[str, Group] = field(default_factory=dict)  # in order of creation
    producers: dict[str, Producer] = field(default_factory=dict)
    last_epoch: int = 0  # given out to any producer
    dead_seq: int = 0  # the highest given in a group that was deleted
    readers: dict[str, Reader] = field(default_factory=dict)
    history: list[HistoryRow] = field(default_factory=list)
    history_seq: int = 0

    def batch_of(self, version: int) -> Batch | None:
        return next((batch for batch in self.batches if batch.first <= version <= batch.last), None)

    def message(self, version: int) -> Message | None:
        batch = self.batch_of(version)
        return batch.messages[version - batch.first] if batch else None

    @property
    def lowest_stored(self) -> int:
        return self.batches[0].first if self.batches else self.tail + 1

    def is_live(self, batch: Batch) -> bool:
        """Whether somebody still needs it (0002, 11)."""
        return not self.groups or any(
            self._needs(group, message.version) for group in self.groups.values() for message in batch.messages
        )

    def is_backlog(self, batch: Batch) -> bool:
        """Whether it counts for the limits that look at what consumers have not done yet (0002, 12)."""
        return not batch.kept and self.is_live(batch)

    @staticmethod
    def _needs(group: Group, version: int) -> bool:
        life = group.lives.get(version)
        if life is not None and life.unsettled:
            return True
        return any(auto_ack.covers(version) for auto_ack in group.auto_acks.values())

    @property
    def live_messages(self) -> int:
        return sum(len(batch.messages) for batch in self.batches if self.is_backlog(batch))

    @property
    def live_bytes(self) -> int:
        return sum(batch.size_bytes for batch in self.batches if self.is_backlog(batch))


def body_bytes(payload: bytes, key: bytes, headers: Headers) -> int:
    cell = encode_headers(dict(headers), reserved=True) if headers else b""
    return len(payload) + len(key) + len(cell)


def runs(versions: Iterable[int]) -> list[tuple[int, int]]:
    """Maximal runs of consecutive versions, as (first, last), ascending."""
    found: list[tuple[int, int]] = []
    for version in sorted(versions):
        if found and found[-1][1] == version - 1:
            found[-1] = (found[-1][0], version)
        else:
            found.append((version, version))
    return found


def effective(queue: Queue, group: Group, name: str) -> Any:
    """A group's own setting, else its queue's."""
    own = getattr(group.settings, name)
    return getattr(queue.settings, name) if own is None else own
