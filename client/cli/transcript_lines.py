"""The command lines of a transcript: one line of words in, one command or query out. Never evaluates anything.

    ann: lease orders max=2 timeout=10s
    produce orders "a" "b" client=svc seq=1

A line is a speaker (whose session it is; may be missing), a verb, and behind it words, quoted texts, `name=value` and
flags in any order. Durations are `500ms`, `30s`, `5m`, `2h`, `7d`; a time is `t+30s`, counted from the beginning.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from holdfast.client.protocol import commands as c
from holdfast.client.protocol import queries as q
from holdfast.client.protocol.columns import MessageParts, pack
from holdfast.client.protocol.values import (
    GROUP_SETTINGS,
    QUEUE_SETTINGS,
    Backoff,
    Columns,
    GroupSettings,
    Job,
    LeaseId,
    QueueId,
    QueueSettings,
    Setting,
    Stream,
    TxnId,
)

_SPEAKER = re.compile(r"([a-z][a-z0-9-]*): ")
_TOKEN = re.compile(r'(?:([a-z][\w.-]*)=)?(?:"((?:[^"\\]|\\.)*)"|([^\s"=]+(?![="])))(?=\s|$)')
_DURATION = re.compile(r"(\d+)(ms|s|m|h|d)")
_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


class TranscriptError(ValueError):
    """A line that cannot be read, or replicas that disagree."""


class World(Protocol):
    """What a line may refer to."""

    def time_ms(self, since_start_ms: int) -> int:
        """The time so long after the beginning."""
        ...

    def queue_id(self, name: str) -> QueueId:
        """The id of a queue as a client learns it: by asking for its name."""
        ...

    def content_hash(self, columns: Columns, body: bytes) -> bytes: ...

    def staged(self, txn: TxnId, part: int, attempt: str) -> c.Part:
        """A part as its writer knows it after staging it."""
        ...


@dataclass(slots=True)
class Line:
    """The words of one line; each getter takes what it gives, and `end` refuses what is left."""

    speaker: str | None
    verb: str
    words: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    options: dict[str, str] = field(default_factory=dict)

    def word(self) -> str:
        if not self.words:
            raise TranscriptError(f"{self.verb}: a word is missing")
        return self.words.pop(0)

    def rest(self) -> list[str]:
        rest, self.words = self.words, []
        return rest

    def flag(self, name: str) -> bool:
        if name in self.words:
            self.words.remove(name)
            return True
        return False

    def option(self, name: str) -> str | None:
        return self.options.pop(name, None)

    def number(self, name: str) -> int | None:
        text = self.option(name)
        return None if text is None else int(text)

    def duration(self, name: str) -> int | None:
        text = self.option(name)
        return None if text is None else duration_ms(text)

    def time(self, name: str, world: World) -> int | None:
        text = self.option(name)
        if text is None:
            return None
        if not text.startswith("t+"):
            raise TranscriptError(f"{name}={text}: a time is written t+30s")
        return world.time_ms(duration_ms(text[2:]))

    def end(self) -> None:
        left = [*self.words, *(f'"{text}"' for text in self.texts), *(f"{name}=" for name in self.options)]
        if left:
            raise TranscriptError(f"{self.verb}: not understood: {' '.join(left)}")


def parse(text: str) -> Line:
    """Cut a line into its words."""
    speaker = _SPEAKER.match(text)
    line = Line(speaker[1] if speaker else None, "")
    at = speaker.end() if speaker else 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise TranscriptError(f"cannot be read from here on: {text[at:]}")
        name, quoted, word = token.groups()
        value = word if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
        if name is not None:
            line.options[name] = value
        elif quoted is not None:
            line.texts.append(value)
        elif line.verb:
            line.words.append(value)
        else:
            line.verb = value
        at = token.end()
        while at < len(text) and text[at] == " ":
            at += 1
    return line


def duration_ms(text: str) -> int:
    found = _DURATION.fullmatch(text)
    if found is None:
        raise TranscriptError(f"{text}: a duration is written 500ms, 30s, 5m, 2h or 7d")
    return int(found[1]) * _UNIT_MS[found[2]]


def build(line: Line, world: World) -> c.Command | q.Query:
    """What a line asks for. Raises ValueError for what is not understood, Misuse for a value that is not allowed."""
    builder = _BUILDERS.get(line.verb)
    if builder is None:
        raise TranscriptError(f"{line.verb}: is no verb; these are: {', '.join(sorted(_BUILDERS))}")
    built = builder(line, world)
    line.end()
    return built


# Queues and groups ---------------------------------------------------------------------------------------


def _create(line: Line, world: World) -> c.Command:
    groups = line.option("groups")
    return c.CreateQueue(
        name=line.word(),
        groups=("default",) if groups is None else tuple(filter(None, groups.split(","))),
        settings=QueueSettings(**dict(_settings(line, QUEUE_SETTINGS))),  # type: ignore[arg-type]
    )


def _update(line: Line, world: World) -> c.Command:
    return c.UpdateQueue(queue_id=_queue(line, world), changes=_settings(line, QUEUE_SETTINGS))


def _delete(line: Line, world: World) -> c.Command:
    return c.DeleteQueue(queue_id=_queue(line, world))


def _purge(line: Line, world: World) -> c.Command:
    group, in_flight, dead = line.option("group"), line.flag("in_flight"), line.flag("dead")
    return c.PurgeQueue(queue_id=_queue(line, world), group=group, in_flight=in_flight, dead=dead)


def _create_group(line: Line, world: World) -> c.Command:
    queue_id, group = _queue(line, world), line.word()
    settings = GroupSettings(**dict(_settings(line, GROUP_SETTINGS, "start")))  # type: ignore[arg-type]
    return c.CreateGroup(queue_id=queue_id, group=group, start=_start(line.option("start")), settings=settings)


def _update_group(line: Line, world: World) -> c.Command:
    queue_id, group = _queue(line, world), line.word()
    return c.UpdateGroup(queue_id=queue_id, group=group, changes=_settings(line, GROUP_SETTINGS))


def _delete_group(line: Line, world: World) -> c.Command:
    return c.DeleteGroup(queue_id=_queue(line, world), group=line.word())


def _seek(line: Line, world: World) -> c.Command:
    dead = line.flag("dead")
    return c.Seek(queue_id=_queue(line, world), group=_group(line), to=_start(line.option("to")), dead=dead)


def _report_cursor(line: Line, world: World) -> c.Command:
    return c.ReportCursor(queue_id=_queue(line, world), reader=line.word(), version=int(line.word()))


# Produce -------------------------------------------------------------------------------------------------


def _produce(line: Line, world: World) -> c.Produce:
    columns, body = _batch(line, world)
    return c.Produce(
        queue_id=_queue(line, world),
        client_id=line.option("client"),
        epoch=line.number("epoch") or 0,
        numbering_epoch=line.number("numbering") or 0,
        first_seq=line.number("seq") or 1,
        after_seq=line.number("after"),
        done_below=line.number("done_below"),
        columns=columns,
        body=body,
        content_hash=world.content_hash(columns, body),
    )


def _open_producer(line: Line, world: World) -> c.Command:
    nonce = (line.option("nonce") or "").encode().rjust(16, b"\0")
    return c.OpenProducer(queue_id=_queue(line, world), client_id=line.word(), nonce=nonce)


def _forget_producer(line: Line, world: World) -> c.Command:
    return c.ForgetProducer(queue_id=_queue(line, world), client_id=line.word())


def _cancel(line: Line, world: World) -> c.Command:
    return c.Cancel(queue_id=_queue(line, world), versions=_versions(line.rest()))


def _reschedule(line: Line, world: World) -> c.Command:
    delay_ms, not_before_ms = line.duration("delay"), line.time("not_before", world)
    queue_id, versions = _queue(line, world), _versions(line.rest())
    return c.Reschedule(queue_id=queue_id, versions=versions, delay_ms=delay_ms, not_before_ms=not_before_ms)


def _batch(line: Line, world: World) -> tuple[Columns, bytes]:
    """The texts as messages; what is said of them is said of each."""
    headers = {name[7:]: line.options.pop(name) for name in list(line.options) if name.startswith("header.")}
    key, delay_ms, ttl_ms = line.option("key"), line.duration("delay"), line.duration("ttl")
    not_before_ms = line.time("not_before", world)
    texts, line.texts = line.texts, []
    return pack([MessageParts(text.encode(), key, headers, delay_ms, not_before_ms, ttl_ms) for text in texts])


# Lease and settle ----------------------------------------------------------------------------------------


def _lease(line: Line, world: World) -> c.Command:
    auto_ack = line.flag("auto_ack")
    return c.Lease(
        queue_id=_queue(line, world),
        group=_group(line),
        max_messages=line.number("max") or 100,
        max_bytes=line.number("max_bytes") or 1_048_576,
        visibility_timeout_ms=line.duration("timeout"),
        auto_ack=auto_ack,
    )


def _ack(line: Line, world: World) -> c.AckBatch:
    return c.AckBatch(queue_id=_queue(line, world), group=_group(line), ranges=_settles(line.rest()))


def _nack(line: Line, world: World) -> c.Nack:
    dead = line.flag("dead")
    return c.Nack(
        queue_id=_queue(line, world),
        group=_group(line),
        ranges=_settles(line.rest()),
        delay_ms=line.duration("delay"),
        not_before_ms=line.time("not_before", world),
        error=line.option("error"),
        dead=dead,
    )


def _release(line: Line, world: World) -> c.Command:
    return c.Release(queue_id=_queue(line, world), group=_group(line), ranges=_settles(line.rest()))


def _extend(line: Line, world: World) -> c.Command:
    begin = line.option("begin")
    return c.Extend(
        queue_id=_queue(line, world),
        group=_group(line),
        lease_id=LeaseId(int(line.word())),
        visibility_timeout_ms=line.duration("timeout"),
        begin=_versions(begin.split(",")) if begin else (),
    )


# Dead letters --------------------------------------------------------------------------------------------


def _redrive(line: Line, world: World) -> c.Command:
    return c.Redrive(queue_id=_queue(line, world), group=_group(line), dead=_deaths(line.rest()))


def _drop_dead(line: Line, world: World) -> c.Command:
    return c.DropDead(queue_id=_queue(line, world), group=_group(line), dead=_deaths(line.rest()))


def _redrive_to_origin(line: Line, world: World) -> c.Command:
    return c.RedriveToOrigin(queue_id=_queue(line, world), group=_group(line), versions=_versions(line.rest()))


# Together ------------------------------------------------------------------------------------------------


def transaction(parts: list[str], world: World) -> c.Transaction:
    """A transaction's items, each written as the command that it is."""
    items: list[c.AckBatch | c.Nack | c.Produce] = []
    for part in parts:
        line = parse(part)
        match line.verb:
            case "ack":
                items.append(_ack(line, world))
            case "nack":
                items.append(_nack(line, world))
            case "produce":
                items.append(_produce(line, world))
            case other:
                raise TranscriptError(f"{other}: a transaction acks, nacks and produces")
        line.end()
    return c.Transaction(items=tuple(items))


def _stage(line: Line, world: World) -> c.Command:
    columns, body = _batch(line, world)
    return c.Stage(
        txn=_txn(line.word()),
        queue_id=_queue(line, world),
        part=line.number("part") or 0,
        attempt=line.option("attempt") or "a",
        chunk=line.number("chunk") or 0,
        expires_ms=line.duration("expires") or 3_600_000,
        columns=columns,
        body=body,
        content_hash=world.content_hash(columns, body),
    )


def _publish(line: Line, world: World) -> c.Command:
    txn, fence = _txn(line.word()), line.option("fence") or ""
    parts = [word.split("/") for word in line.rest()]
    return c.Publish(txn=txn, fence=fence, parts=tuple(world.staged(txn, int(part), name) for part, name in parts))


def _abort(line: Line, world: World) -> c.Command:
    txn, attempts = _txn(line.word()), line.rest()
    return c.Abort(txn=txn, attempts=tuple(attempts) or None)


def _forget_txn(line: Line, world: World) -> c.Command:
    return c.ForgetTxn(txn=_txn(line.word()))


# Time and limits -----------------------------------------------------------------------------------------


def _touch(line: Line, world: World) -> c.Command:
    return c.Touch(queue_id=_queue(line, world), group=line.option("group"))


def _step(line: Line, world: World) -> c.Command:
    return c.TimeStep(by_ms=duration_ms(line.word()))


def _set_limits(line: Line, world: World) -> c.Command:
    changes = tuple((name, int(line.options.pop(name))) for name in list(line.options))
    return c.SetLimits(changes=changes)


# Queries -------------------------------------------------------------------------------------------------


def _stats(line: Line, world: World) -> q.Query:
    return q.Stats(queue_id=_queue(line, world), group=_group(line))


def _explain(line: Line, world: World) -> q.Query:
    queue_id = _queue(line, world)
    version = int(line.word()) if line.words else None
    return q.Explain(queue_id=queue_id, group=_group(line), version=version)


def _peek(line: Line, world: World) -> q.Query:
    return q.Peek(queue_id=_queue(line, world), group=line.option("group"))


def _read(line: Line, world: World) -> q.Query:
    queue_id, ((first, last),) = _queue(line, world), _versions([line.word()])
    return q.Read(queue_id=queue_id, from_version=first, to_version=last)


def _dead(line: Line, world: World) -> q.Query:
    group, where = line.option("group"), line.option("where") or ""
    return q.DeadLetters(queue_id=_queue(line, world), group=group, where=where)


def _show(line: Line, world: World) -> q.Query:
    return q.DescribeQueue(name=line.word())


def _producer(line: Line, world: World) -> q.Query:
    return q.ProducerState(queue_id=_queue(line, world), client_id=line.word())


def _txn_status(line: Line, world: World) -> q.Query:
    return q.TxnStatus(txn=_txn(line.word()))


def _history(line: Line, world: World) -> q.Query:
    return q.History(queue_id=_queue(line, world))


def _find(line: Line, world: World) -> q.Query:
    return q.FindByKey(queue_id=_queue(line, world), key=line.word().encode())


_BUILDERS: dict[str, Callable[[Line, World], c.Command | q.Query]] = {
    "create": _create,
    "update": _update,
    "delete": _delete,
    "purge": _purge,
    "create-group": _create_group,
    "update-group": _update_group,
    "delete-group": _delete_group,
    "seek": _seek,
    "report-cursor": _report_cursor,
    "produce": _produce,
    "open-producer": _open_producer,
    "forget-producer": _forget_producer,
    "cancel": _cancel,
    "reschedule": _reschedule,
    "lease": _lease,
    "ack": _ack,
    "nack": _nack,
    "release": _release,
    "extend": _extend,
    "redrive": _redrive,
    "drop-dead": _drop_dead,
    "redrive-to-origin": _redrive_to_origin,
    "stage": _stage,
    "publish": _publish,
    "abort": _abort,
    "forget-txn": _forget_txn,
    "touch": _touch,
    "step": _step,
    "set-limits": _set_limits,
    "stats": _stats,
    "explain": _explain,
    "peek": _peek,
    "read": _read,
    "dead": _dead,
    "show": _show,
    "producer": _producer,
    "txn": _txn_status,
    "history": _history,
    "find": _find,
}


# Words that several lines use ------------------------------------------------------------------------------


def _queue(line: Line, world: World) -> QueueId:
    """A queue by its name, or `name#7` by an id that the speaker learned before."""
    name, _, known = line.word().partition("#")
    return QueueId(int(known)) if known else world.queue_id(name)


def _group(line: Line) -> str:
    return line.option("group") or "default"


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    return int(first), int(last or first)


def _versions(words: list[str]) -> tuple[tuple[int, int], ...]:
    return tuple(map(_range, words))


def _settles(words: list[str]) -> tuple[c.SettleRange, ...]:
    """Ranges of versions with their lease, as `lease:first-last`."""
    return tuple((int(lease), *_range(text)) for lease, _, text in (word.partition(":") for word in words))


def _deaths(words: list[str]) -> tuple[c.DeadRange, ...]:
    """Ranges of versions with the number of the first one's death, as `first-last#dead_seq`."""
    return tuple((*_range(text), int(number)) for text, _, number in (word.partition("#") for word in words))


def _start(text: str | None) -> Literal["earliest", "latest"] | int:
    if text is None or text == "earliest":
        return "earliest"
    return "latest" if text == "latest" else int(text)


def _txn(text: str) -> TxnId:
    """`job:nightly` or `stream:app/7`."""
    kind, _, name = text.partition(":")
    app, _, seq = name.rpartition("/")
    match kind:
        case "job":
            return Job(name)
        case "stream":
            return Stream(app, int(seq))
        case _:
            raise TranscriptError(f"{text}: a transaction is written job:NAME or stream:APP/NUMBER")


def _settings(line: Line, rules: dict[str, Setting], *others: str) -> tuple[c.Change, ...]:
    names = [name for name in line.options if name not in others]
    return tuple((name, _setting(name, line.options.pop(name), rules)) for name in names)


def _setting(name: str, text: str, rules: dict[str, Setting]) -> object:
    if name not in rules:
        raise TranscriptError(f"{name}: is no setting")
    if text == "none" and rules[name].optional:
        return None
    match rules[name].kind:
        case "number":
            return duration_ms(text) if name.endswith("_ms") else int(text)
        case "flag":
            return text == "true"
        case "backoff":
            kind, *times = text.split("/")
            base_ms, cap_ms, *_ = (*map(duration_ms, times), 0, 0)
            return Backoff(kind, base_ms, cap_ms)  # type: ignore[arg-type]
        case "word" | "queue":
            return text
