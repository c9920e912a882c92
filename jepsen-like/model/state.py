"""The whole state: queues, sessions, staged transactions, time; and the counter of the rules that fired."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

from holdfast.client.protocol.commands import Command
from holdfast.client.protocol.errors import GroupNotFound, QueueNotFound, QueueRecreated
from holdfast.client.protocol.limits import Limits
from holdfast.client.protocol.replies import Reply
from holdfast.client.protocol.values import GENERATION_SHIFT, TxnId
from holdfast.jepsen.model.records import Draft, Group, Queue
from holdfast.jepsen.model.rules import RULES

Versions = tuple[tuple[int, int, int], ...]  # (queue, first, last)


@dataclass(frozen=True, slots=True)
class RememberedReply:
    command: Command
    reply: Reply

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


@dataclass
class Session:
    principal: str
    consumer_id: str
    last_use_ms: int
    done_below: int = 0
    replies: dict[int, RememberedReply] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One staged chunk; times in it count from its publish."""

    queue_id: int
    content: tuple[bytes, ...]
    content_hash: bytes
    messages: tuple[Draft, ...]

    @property
    def size_bytes(self) -> int:
        return len(self.content[-1])

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


ChunkKey = tuple[int, str, int]  # part, attempt, chunk


@dataclass
class OpenTxn:
    deadline_ms: int
    chunks: dict[ChunkKey, Chunk] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(chunk.size_bytes for chunk in self.chunks.values())


@dataclass
class PublishedStream:
    seq: int
    fence: str
    versions: Versions


@dataclass
class PublishedJob:
    forget_at_ms: int
    versions: Versions


@dataclass
class State:
    """Everything. `fired` counts the branches of the rules that were taken."""

    generation: int = 0
    limits: Limits = field(default_factory=Limits)
    rules_version: int = 1
    time_ms: int = 0
    steps: list[tuple[int, int]] = field(default_factory=list)  # (lease time at which, by how much)
    queues: dict[int, Queue] = field(default_factory=dict)
    queue_names: dict[int, str] = field(default_factory=dict)  # of every queue there ever was
    lease_ids: set[int] = field(default_factory=set)  # every one that was ever issued
    group_generations: set[int] = field(default_factory=set)  # likewise
    sessions: dict[bytes, Session] = field(default_factory=dict)
    open_txns: dict[TxnId, OpenTxn] = field(default_factory=dict)
    streams: dict[str, PublishedStream] = field(default_factory=dict)
    jobs: dict[str, PublishedJob] = field(default_factory=dict)
    fired: Counter[str] = field(default_factory=Counter)

    @property
    def lease_ms(self) -> int:
        """Lease time: committed time without the steps (T2)."""
        return self.time_ms - sum(by for _, by in self.steps)

    def fire(self, rule: str) -> None:
        if rule not in RULES:
            raise KeyError(f"{rule} is not among the rules")
        self.fired[rule] += 1

    def queue(self, queue_id: int) -> Queue:
        """Raises QueueNotFound or, where its name is in use again, QueueRecreated (G5)."""
        if queue_id in self.queues:
            return self.queues[queue_id]
        name = self.queue_names.get(queue_id)
        again = self.queue_named(name) if name is not None else None
        if again is not None:
            self.fire("G5.recreated")
            raise QueueRecreated(name=again.name, queue_id=again.id)
        self.fire("G5.not_found")
        raise QueueNotFound(queue=queue_id)

    def queue_named(self, name: str) -> Queue | None:
        return next((queue for queue in self.queues.values() if queue.name == name), None)

    def group(self, queue_id: int, name: str) -> tuple[Queue, Group]:
        queue = self.queue(queue_id)
        if name not in queue.groups:
            self.fire("G1.not_found")
            raise GroupNotFound(queue_id=queue_id, group=name)
        return queue, queue.groups[name]

    def next_group_generation(self) -> int:
        generation = self.next_id(self.group_generations)
        self.group_generations.add(generation)
        return generation

    def next_id(self, given: Iterable[int]) -> int:
        """The id after those given out in this restore generation (T4)."""
        base = self.generation << GENERATION_SHIFT
        return max((one for one in given if one > base), default=base) + 1
