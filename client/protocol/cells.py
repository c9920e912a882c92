"""Fields that are more than a number, a flag, a text or bytes: what `tags.py` calls to read and write them.

A reader raises BadFrame for what is not of the protocol, a writer BadValue for what its reader would refuse.
"""

import struct
from collections.abc import Iterable, Sequence
from itertools import chain, starmap
from types import NoneType
from typing import Any, get_args

from holdfast.client.protocol.columns import check
from holdfast.client.protocol.commands import Part
from holdfast.client.protocol.errors import BY_CODE, BadFrame, BadValue, HoldfastError
from holdfast.client.protocol.limits import U32_MAX, U63_MAX
from holdfast.client.protocol.replies import Grant, MessageBatch, RefusedRange
from holdfast.client.protocol.values import (
    DEFAULT_GROUP,
    DEFAULT_QUEUE,
    GROUP_SETTINGS,
    QUEUE_SETTINGS,
    Backoff,
    Columns,
    GroupSettings,
    Job,
    QueueSettings,
    Setting,
    Stream,
    TxnId,
)

Buffer = bytes | memoryview
Fields = tuple[Any, ...]

PAIR, TRIPLE, QUAD, QUINT = (struct.Struct(f">{count}Q") for count in (2, 3, 4, 5))
FACT = (int, str, bool, NoneType)

_BACKOFF = struct.Struct(">BQQ")
_BACKOFF_KINDS = ("none", "fixed", "exponential")
_PART = struct.Struct(">IIQQ")
# first, generation, enqueued_ms, first_seq; start; the lengths of the seven columns and of the client id
_BATCH = struct.Struct(">4Q8IH")


def is_number(value: Any, low: int = 0, high: int = U63_MAX) -> bool:
    return type(value) is int and low <= value <= high


def pack_rows(rows: Iterable[tuple[int, ...]]) -> bytes:
    flat = list(chain.from_iterable(rows))
    try:
        return struct.pack(f">{len(flat)}Q", *flat)
    except struct.error as error:
        raise BadValue(field="ranges", problem=f"cannot be packed: {error}") from None


def load_grants(data: bytes) -> tuple[Grant, ...]:
    return tuple(starmap(Grant, QUINT.iter_unpack(data)))


def dump_grants(grants: Iterable[Grant]) -> bytes:
    return pack_rows((each.first, each.last, each.delivery_count, each.attempts, each.redrives) for each in grants)


def load_refusals(data: bytes) -> tuple[RefusedRange, ...]:
    return tuple(starmap(RefusedRange, QUAD.iter_unpack(data)))


def dump_refusals(ranges: Iterable[RefusedRange]) -> bytes:
    return pack_rows((each.lease_id, each.first, each.last, each.code) for each in ranges)


def load_texts(texts: Fields) -> tuple[str, ...]:
    for text in texts:
        if type(text) is not str:
            raise BadFrame(problem="a list of texts has something else")
    return texts


def dump_texts(texts: Sequence[str]) -> tuple[str, ...]:
    if any(type(text) is not str for text in texts):
        raise BadValue(field="texts", problem="are not all texts")
    return tuple(texts)


def load_versions(versions: Fields) -> tuple[int, int]:
    if len(versions) != 2 or not all(is_number(version, 0, U32_MAX) for version in versions):
        raise BadFrame(problem="versions are not two numbers")
    return versions[0], versions[1]


def load_named(flat: Fields, *kinds: type[Any]) -> tuple[tuple[str, Any], ...]:
    """(name, value) pairs that stand one behind the other."""
    names, values = flat[::2], flat[1::2]
    low = 0 if kinds == (int,) else -U63_MAX
    if len(names) != len(values) or not all(type(name) is str for name in names):
        raise BadFrame(problem="a list of names and values has another order")
    for value in values:
        if type(value) not in kinds or (type(value) is int and not low <= value <= U63_MAX):
            raise BadFrame(problem="a named value has another type or range")
    return tuple(zip(names, values, strict=True))


def dump_named(pairs: Iterable[tuple[str, Any]], *kinds: type[Any]) -> tuple[Any, ...]:
    flat = tuple(chain.from_iterable(pairs))
    try:
        load_named(flat, *kinds)
    except BadFrame as error:
        raise BadValue(field="named value", problem=error.problem) from None
    return flat


def load_limits(changes: dict[Any, Any]) -> tuple[tuple[str, int], ...]:
    for name, value in changes.items():
        if type(name) is not str or not is_number(value):
            raise BadFrame(problem="a limit is not a name with a number")
    return tuple(changes.items())


def dump_limits(changes: tuple[tuple[str, int], ...]) -> dict[str, int]:
    if not all(is_number(value) for _, value in changes):
        raise BadValue(field="changes", problem="are not all whole numbers from 0 to 2^63-1")
    return dict(changes)


_SETTING_TYPES = {"number": int, "word": str, "flag": bool, "queue": str, "backoff": bytes}


def load_changes(settings: dict[Any, Any], rules: dict[str, Setting]) -> tuple[tuple[str, Any], ...]:
    found: list[tuple[str, Any]] = []
    for name, value in settings.items():
        rule = rules.get(name)
        if rule is None:
            raise BadFrame(problem="there is no setting of a name that is there")
        if value is not None and type(value) is not _SETTING_TYPES[rule.kind]:
            raise BadFrame(problem=f"setting {name} has another type")
        found.append((name, load_backoff(value) if isinstance(value, bytes) else value))
    return tuple(found)


def load_queue_settings(settings: dict[Any, Any]) -> QueueSettings:
    return QueueSettings(**dict(load_changes(settings, QUEUE_SETTINGS)))


def load_group_settings(settings: dict[Any, Any]) -> GroupSettings:
    return GroupSettings(**dict(load_changes(settings, GROUP_SETTINGS)))


def dump_changes(changes: Iterable[tuple[str, object]]) -> dict[str, object]:
    return {name: dump_backoff(value) if isinstance(value, Backoff) else value for name, value in changes}


def dump_settings(settings: QueueSettings | GroupSettings) -> dict[str, object]:
    """Only what differs from the default, in the order of the rules."""
    if isinstance(settings, QueueSettings):
        return _differing(settings, DEFAULT_QUEUE, QUEUE_SETTINGS)
    return _differing(settings, DEFAULT_GROUP, GROUP_SETTINGS)


def _differing(settings: object, default: object, rules: Iterable[str]) -> dict[str, object]:
    given = ((name, getattr(settings, name)) for name in rules)
    return dump_changes((name, value) for name, value in given if value != getattr(default, name))


def load_backoff(data: bytes) -> Backoff:
    if len(data) != _BACKOFF.size or data[0] >= len(_BACKOFF_KINDS):
        raise BadFrame(problem="a backoff is not a kind and two numbers")
    kind, base_ms, cap_ms = _BACKOFF.unpack(data)
    return Backoff(_BACKOFF_KINDS[kind], base_ms, cap_ms)  # type: ignore[arg-type]


def dump_backoff(backoff: Backoff) -> bytes:
    try:
        return _BACKOFF.pack(_BACKOFF_KINDS.index(backoff.kind), backoff.base_ms, backoff.cap_ms)
    except struct.error as error:
        raise BadValue(field="backoff", problem=f"cannot be packed: {error}") from None


def load_txn(txn: Any) -> TxnId:
    if type(txn) is str:
        return Job(txn)
    if len(txn) != 2 or type(txn[0]) is not str or not is_number(txn[1]):
        raise BadFrame(problem="a txn is neither an id nor an app with its number")
    return Stream(*txn)


def dump_txn(txn: TxnId) -> Any:
    return txn.id if isinstance(txn, Job) else (txn.app, txn.seq)


def load_parts(parts: Fields) -> tuple[Part, ...]:
    if len(parts) != 2 or type(parts[0]) is not bytes or type(parts[1]) is not tuple:
        raise BadFrame(problem="parts are not a bin of numbers and an array of attempts")
    numbers, attempts = parts[0], load_texts(parts[1])
    if len(numbers) != _PART.size * len(attempts):
        raise BadFrame(problem="parts have more numbers or fewer than attempts")
    found = tuple(
        Part(part, attempt, chunks, count, digest)
        for (part, chunks, count, digest), attempt in zip(_PART.iter_unpack(numbers), attempts, strict=True)
    )
    if any(part.count > U63_MAX for part in found):
        raise BadFrame(problem="a part's count is out of range")
    return found


def dump_parts(parts: tuple[Part, ...]) -> tuple[bytes, tuple[str, ...]]:
    try:
        numbers = b"".join(_PART.pack(part.part, part.chunks, part.count, part.digest) for part in parts)
    except struct.error as error:
        raise BadValue(field="parts", problem=f"cannot be packed: {error}") from None
    return numbers, dump_texts([part.attempt for part in parts])


def load_error(fields: Fields) -> HoldfastError:
    """`[code, text or nil, fact, …]`: the text is there where it is not the one that the facts make."""
    kind = BY_CODE.get(fields[0]) if len(fields) >= 2 and type(fields[0]) is int else None
    if kind is None or len(fields) != 2 + len(kind.fact_names) or type(fields[1]) not in (str, NoneType):
        raise BadFrame(problem="an error has no code that is known, or other facts")
    facts = dict(zip(kind.fact_names, fields[2:], strict=True))
    if not _fit(kind, facts):
        raise BadFrame(problem=f"a fact of {kind.__name__} has another type or range")
    return kind(fields[1], **facts)


def dump_error(error: HoldfastError) -> tuple[Any, ...]:
    kind, facts = type(error), error.facts
    if BY_CODE.get(kind.code) is not kind or not _fit(kind, facts):
        problem = f"is a {kind.__name__} without a code, or with facts of other types"
        raise BadValue(field="error", problem=problem)
    text = None if kind(**facts).message == error.message else error.message
    return kind.code, text, *facts.values()


def _fit(kind: type[HoldfastError], facts: dict[str, Any]) -> bool:
    annotations = kind.__annotations__
    return all(
        type(value) in (get_args(annotations[name]) or (annotations[name],))
        and (type(value) is not int or -U63_MAX <= value <= U63_MAX)
        for name, value in facts.items()
    )


# What lies in the body ----------------------------------------------------------------------------------


def take(size: int, body: Buffer, at: int, log: bool = False) -> tuple[bytes, int]:
    if at + size > len(body):
        raise BadFrame(problem=f"the body has {len(body)} bytes; {at + size} are needed")
    return bytes(body[at : at + size]), at + size


def put(payload: bytes, parts: list[Buffer], log: bool = False) -> int:
    parts.append(payload)
    return len(payload)


def take_body(columns: Columns, body: Buffer, at: int) -> tuple[Buffer, int]:
    """The part of the body that these columns cut, uncopied."""
    try:
        size = columns.body_bytes
    except struct.error:
        raise BadFrame(problem="a column is cut off") from None
    if size == len(body) and not at:
        return body, size
    if not 0 <= size <= len(body) - at:
        raise BadFrame(problem=f"the body has {len(body)} bytes; {at + size} are needed")
    return memoryview(body)[at : at + size], at + size


def load_batches(table: bytes, body: Buffer, at: int, log: bool) -> tuple[tuple[MessageBatch, ...], int]:
    """A table rather than arrays: a lease of 10,000 messages that came one by one stays one element."""
    found = []
    row = 0
    while row < len(table):
        try:
            first, generation, enqueued_ms, first_seq, start, *sizes = _BATCH.unpack_from(table, row)
        except struct.error:
            raise BadFrame(problem="a table of batches is cut off") from None
        row += _BATCH.size
        cells = []
        for size in sizes:
            cells.append(table[row : row + size])
            row += size
        if row > len(table) or max(first, generation, enqueued_ms, first_seq) > U63_MAX or start > 2**31 - 1:
            raise BadFrame(problem="a table of batches is cut off, or has a number out of range")
        ends, key_ends, header_ends, delays, not_befores, ttls, lanes, client_id = cells
        if lanes:
            raise BadFrame(problem="a table of batches has lanes, which are reserved")
        try:
            client = client_id.decode()
        except UnicodeDecodeError:
            raise BadFrame(problem="a client id is not valid UTF-8") from None
        columns = Columns(ends, start, key_ends, header_ends, delays, not_befores, ttls, lanes)
        cut, at = take_body(columns, body, at)
        check(columns, cut, reserved_headers=True)
        found.append(MessageBatch(first, generation, enqueued_ms, client, first_seq, columns, cut))
    return tuple(found), at


def dump_batches(batches: Iterable[MessageBatch], parts: list[Buffer], log: bool) -> bytes:
    out = bytearray()
    for batch in batches:
        columns = batch.columns
        if columns.lanes:
            raise BadValue(field="lanes", problem="is reserved")
        times = (columns.delays, columns.not_befores, columns.ttls)
        cells = (columns.ends, columns.key_ends, columns.header_ends, *times, columns.lanes)
        try:
            client_id = batch.client_id.encode()
            sizes = (columns.start, *map(len, cells), len(client_id))
            out += _BATCH.pack(batch.first, batch.generation, batch.enqueued_ms, batch.first_seq, *sizes)
        except (struct.error, UnicodeEncodeError) as error:
            raise BadValue(field="batches", problem=f"cannot be packed: {error}") from None
        out += b"".join((*cells, client_id))
        parts.append(batch.body)
    return bytes(out)
