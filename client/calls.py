"""The calls of a client as steps that any shell can take: a generator yields a request and is sent its answer.

What is refused is thrown in as its error, so a step can learn from it. Both shells run the same generators; neither
has an `if` of its own. Queue names are resolved once and kept, until the cluster says that the id is of the past.
"""

from collections.abc import Generator, Iterable, Mapping
from dataclasses import fields
from typing import Any, Literal, TypeVar

from holdfast.client.events import Outcome
from holdfast.client.message import Delivered, Message, pack, unpack
from holdfast.client.protocol import commands as c
from holdfast.client.protocol import queries as q
from holdfast.client.protocol import replies as r
from holdfast.client.protocol.commands import Command
from holdfast.client.protocol.errors import BadValue, HoldfastError, QueueNotFound, QueueRecreated, TooLate
from holdfast.client.protocol.limits import VERSION_RANGES
from holdfast.client.protocol.queries import LeaderQuery
from holdfast.client.protocol.quick import dataclass
from holdfast.client.protocol.replies import Answer, Failed
from holdfast.client.protocol.values import Backoff, GroupSettings, QueueId, QueueSettings

T = TypeVar("T")
Steps = Generator[Command | LeaderQuery, Answer, T]
Start = Literal["earliest", "latest"] | int
Payloads = bytes | Message | Iterable[bytes | Message]


# Results -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Produced:
    versions: list[int]
    replayed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats(r.GroupStats):
    """The counters of a group, and the committed time and log index at which they were read (Q1)."""

    as_of_ms: int
    index: int


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One death (D2)."""

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
    headers: dict[str, str]
    payload: bytes
    move_failed: bool


class DeadPage(list[DeadLetter]):
    """A page of dead letters; `after` leads to the next one, and is none at the end."""

    after: bytes | None = None


@dataclass(frozen=True, slots=True)
class Redriven:
    """`matched` the filter; `redriven` came back; the others were not dead any more, or it was a dry run."""

    matched: int
    redriven: int


@dataclass(frozen=True, slots=True)
class Published:
    """The versions that a publish wrote, by queue; `replayed` if it had been published before.

    Of a stream the cluster remembers the versions of the last publish alone: an older one is replayed without any.
    """

    versions: dict[str, list[int]]
    replayed: bool


@dataclass(frozen=True, slots=True)
class TxnState:
    """What is known of a staged transaction: `open`, `published` or `unknown`."""

    state: str
    staged_bytes: int
    expires_at_ms: int | None
    versions: dict[str, list[int]]


class Explanation:
    """The one `reason`, and its facts as attributes and in `facts` (E1)."""

    def __init__(self, reply: r.Explained) -> None:
        self.reason = reply.reason
        self.facts = dict(reply.facts)

    def __getattr__(self, name: str) -> int | str | None:
        try:
            return self.__dict__["facts"][name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(name) from None

    def __repr__(self) -> str:
        return f"Explanation(reason={self.reason!r}, facts={self.facts!r})"


# Names -------------------------------------------------------------------------------------------------


class Names:
    """Ids of queues by name. What a thread learns all may use: single dict operations are atomic."""

    def __init__(self) -> None:
        self._ids: dict[str, QueueId] = {}

    def resolve(self, name: str) -> Steps[QueueId]:
        known = self._ids.get(name)
        if known is None:
            known = expect(r.QueueDescribed, (yield q.DescribeQueue(name=name))).queue_id
            self._ids[name] = known
        return known

    def learn(self, name: str, queue_id: QueueId) -> None:
        self._ids[name] = queue_id

    def forget(self, name: str) -> None:
        self._ids.pop(name, None)

    def name_all(self, wanted: Iterable[int]) -> Steps[dict[int, str]]:
        """The names of these ids. One that has no queue any more is called by its number."""
        known = {queue_id: name for name, queue_id in list(self._ids.items())}
        named = {each: known.get(QueueId(each)) for each in wanted}
        if None in named.values():
            for name, queue_id in (yield from list_queues()):
                self.learn(name, QueueId(queue_id))
                if queue_id in named:
                    named[queue_id] = name
        return {each: name if name is not None else f"#{each}" for each, name in named.items()}

    def asking(self, name: str, build: Any) -> Steps[Answer]:
        """Ask what `build(queue_id)` says. An id of the past is forgotten and raised: the next call asks anew."""
        queue_id = yield from self.resolve(name)
        try:
            return (yield build(queue_id))
        except (QueueNotFound, QueueRecreated):
            self.forget(name)
            raise


def advance(steps: Steps[Any], outcome: Outcome) -> Command | LeaderQuery:
    """Give the steps what came of their last request; gives the next one. Ends with StopIteration, as they do."""
    if isinstance(outcome, HoldfastError):
        return steps.throw(outcome)
    if isinstance(outcome.reply, Failed):
        return steps.throw(outcome.reply.error)
    return steps.send(outcome)


def expect(kind: type[T], answer: Answer) -> T:
    """The reply, which a node that keeps the protocol gives to this request."""
    reply = answer.reply
    if not isinstance(reply, kind):
        raise TypeError(f"{type(reply).__name__} came where {kind.__name__} was due")
    return reply


# Queues and groups -------------------------------------------------------------------------------------


def create_queue(names: Names, name: str, settings: Mapping[str, Any]) -> Steps[r.QueueCreated]:
    chosen = _settings(settings)
    groups = tuple(chosen.pop("groups", ("default",)))
    _check_known(chosen, QueueSettings)
    command = c.CreateQueue(name=name, settings=QueueSettings(**chosen), groups=groups)
    created = expect(r.QueueCreated, (yield command))
    names.learn(name, created.queue_id)
    return created


def update_queue(names: Names, name: str, settings: Mapping[str, Any]) -> Steps[None]:
    changes = tuple(_settings(settings).items())
    yield from names.asking(name, lambda queue_id: c.UpdateQueue(queue_id=queue_id, changes=changes))


def delete_queue(names: Names, name: str) -> Steps[None]:
    yield from names.asking(name, lambda queue_id: c.DeleteQueue(queue_id=queue_id))
    names.forget(name)


def describe(names: Names, name: str) -> Steps[r.QueueDescribed]:
    """As it is now, whatever was known of it."""
    described = expect(r.QueueDescribed, (yield q.DescribeQueue(name=name)))
    names.learn(name, described.queue_id)
    return described


def hand_over(target: str | None) -> Steps[None]:
    expect(r.Done, (yield q.HandOver(target)))


def list_queues() -> Steps[list[tuple[str, int]]]:
    """All names with their ids."""
    found: list[tuple[str, int]] = []
    while True:
        after = found[-1][0] if found else ""
        page = expect(r.QueuesListed, (yield q.ListQueues(after=after, limit=1_000))).queues
        found += page
        if len(page) < 1_000:
            return found


def queues() -> Steps[list[str]]:
    return [name for name, _ in (yield from list_queues())]


def create_group(names: Names, queue: str, group: str, start: Start, settings: Mapping[str, Any]) -> Steps[r.Started]:
    chosen = _settings(settings)
    _check_known(chosen, GroupSettings)
    own = GroupSettings(**chosen)
    answer = yield from names.asking(
        queue, lambda queue_id: c.CreateGroup(queue_id=queue_id, group=group, start=start, settings=own)
    )
    return expect(r.Started, answer)


def update_group(names: Names, queue: str, group: str, settings: Mapping[str, Any]) -> Steps[None]:
    changes = tuple(_settings(settings).items())
    yield from names.asking(queue, lambda queue_id: c.UpdateGroup(queue_id=queue_id, group=group, changes=changes))


def _settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    chosen = dict(settings)
    if isinstance(chosen.get("backoff"), Mapping):
        _check_known(chosen["backoff"], Backoff)
        chosen["backoff"] = Backoff(**chosen["backoff"])
    return chosen


def _check_known(chosen: Mapping[str, Any], kind: Any) -> None:
    known = [field.name for field in fields(kind)]
    for name in chosen:
        if name not in known:
            raise BadValue(field=name, problem=f"is no setting; these are: {', '.join(known)}")


# Produce, cancel, reschedule ---------------------------------------------------------------------------


def produce(
    names: Names, queue: str, payloads: Payloads, shared: Message, client_id: str | None, client_seq: int | None,
    **numbers: int | None,
) -> Steps[Produced]:  # fmt: skip
    """One Produce. With a client id the caller numbers, else the session does (P5)."""
    if (client_id is None) != (client_seq is None):
        raise BadValue(field="client_seq", problem="and client_id belong together; give both or none")
    columns, body = pack(payloads, shared)
    if not columns.ends:
        return Produced([], False)
    if numbers["numbering_epoch"] is None:
        numbers["numbering_epoch"] = numbers["epoch"]
    chosen: dict[str, Any] = {"client_id": client_id, "first_seq": client_seq, **numbers} if client_id else {}
    answer = yield from names.asking(
        queue, lambda queue_id: c.Produce(queue_id=queue_id, columns=columns, body=body, **chosen)
    )
    done = expect(r.Produced, answer)
    return Produced(list(range(done.first_version, done.first_version + done.count)), done.replayed)


def change_versions(
    names: Names, queue: str, version: int | None, key: str | None, kind: Any, **when: int | None
) -> Steps[list[r.VersionOutcome]]:
    """Cancel or reschedule by version, which raises TooLate, or by key, with an outcome for each match (P6)."""
    if (version is None) == (key is None):
        raise BadValue(field="version", problem="or key is needed, one of them")
    if version is not None:
        ranges = [(version, version)]
    else:
        ranges = yield from _find_by_key(names, queue, str(key))
    outcomes: list[r.VersionOutcome] = []
    for at in range(0, len(ranges), VERSION_RANGES):
        part = tuple(ranges[at : at + VERSION_RANGES])
        answer = yield from names.asking(queue, lambda i, part=part: kind(queue_id=i, versions=part, **when))
        outcomes += expect(r.VersionsChanged, answer).outcomes
    for outcome in outcomes:
        if version is not None and outcome.outcome == "too_late":
            raise TooLate(version=version, group=outcome.group)
    return outcomes


def _find_by_key(names: Names, queue: str, key: str) -> Steps[list[tuple[int, int]]]:
    found: list[tuple[int, int]] = []
    at: int | None = 1
    while at is not None:
        page = expect(
            r.VersionsFound,
            (
                yield from names.asking(
                    queue, lambda i, at=at: q.FindByKey(queue_id=i, key=key.encode(), from_version=at)
                )
            ),
        )
        found += page.versions
        at = page.next_version
    return found


# Ask ---------------------------------------------------------------------------------------------------


def stats(names: Names, queue: str, group: str) -> Steps[Stats]:
    answer = yield from names.asking(queue, lambda queue_id: q.Stats(queue_id=queue_id, group=group))
    counters = expect(r.GroupStats, answer)
    values = {field.name: getattr(counters, field.name) for field in fields(counters)}
    return Stats(**values, as_of_ms=answer.place.time_ms, index=answer.place.index)


def peek(names: Names, queue: str, group: str | None, from_version: int, limit: int) -> Steps[list[Delivered]]:
    """Up to `limit` messages; several pages where their bodies do not fit into one."""
    queue_id = yield from names.resolve(queue)
    found: list[Delivered] = []
    at: int | None = from_version
    while at is not None and len(found) < limit:
        wanted = min(limit - len(found), q.PAGE_MAX)
        page = expect(
            r.Messages,
            (yield from names.asking(
                queue, lambda i, at=at, wanted=wanted: q.Peek(queue_id=i, group=group, from_version=at, limit=wanted)
            )),
        )  # fmt: skip
        found += unpack(queue_id, page.batches)
        at = page.next_version
    return found


def read_page(
    names: Names, queue: str, from_version: int, to_version: int
) -> Steps[tuple[list[Delivered], int | None]]:
    """Messages by version, and where the next page begins."""
    queue_id = yield from names.resolve(queue)
    answer = yield from names.asking(
        queue, lambda i: q.Read(queue_id=i, from_version=from_version, to_version=to_version)
    )
    page = expect(r.Messages, answer)
    return list(unpack(queue_id, page.batches)), page.next_version


def explain(names: Names, queue: str, version: int | None, group: str) -> Steps[Explanation]:
    answer = yield from names.asking(queue, lambda i: q.Explain(queue_id=i, group=group, version=version))
    return Explanation(expect(r.Explained, answer))


# Dead letters ------------------------------------------------------------------------------------------


def dead(names: Names, queue: str, group: str | None, where: str, limit: int, after: bytes | None) -> Steps[DeadPage]:
    """A page with up to `limit` rows; scan budgets that end without any are walked over."""
    found = DeadPage()
    token = after or b""
    while True:
        page = yield from dead_page(names, queue, group, where, limit - len(found), token, count_only=False)
        found += [
            DeadLetter(**{n: getattr(row, n) for n in _DEAD_FIELDS if n != "headers"}, headers=dict(row.headers))
            for row in page.rows
        ]
        token = page.next_token
        if not token or len(found) >= limit:
            found.after = token or None
            return found


def dead_count(names: Names, queue: str, group: str | None, where: str) -> Steps[int]:
    count, token = 0, b""
    while True:
        page = yield from dead_page(names, queue, group, where, 1, token, count_only=True)
        count, token = count + page.matched, page.next_token
        if not token:
            return count


def dead_page(
    names: Names, queue: str, group: str | None, where: str, limit: int, after: bytes, *, count_only: bool
) -> Steps[r.DeadListed]:
    limit = max(min(limit, q.PAGE_MAX), 1)
    answer = yield from names.asking(
        queue,
        lambda i: q.DeadLetters(queue_id=i, group=group, where=where, limit=limit, after=after, count_only=count_only),
    )
    return expect(r.DeadListed, answer)


_DEAD_FIELDS = [field.name for field in fields(DeadLetter)]
