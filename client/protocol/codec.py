"""Typed value <-> bytes; the only importer of msgpack.

Each value is a positional array whose fields `tags.py` lists; from that table one reader and one writer are
compiled for each type, when it is first met, so that nothing is looked up field by field in the hot path.

Reading is strict, and ends in one of three ways: the value; `BadFrame`, where the bytes are not of the
protocol (arity, types, ranges of the format, unknown tags and keys, a body of another length); or the
`Misuse` that the value itself raised when it was built, where the frame was well formed but the call was
wrong. A node closes the connection after the former and declines the request after the latter. Integers that
are not minimal are read like minimal ones: no identity hangs on a client's msgpack bytes, for the log holds
what *we* wrote, and a batch is hashed over its columns and its body.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import msgpack

from holdfast.client.protocol import cells, tags
from holdfast.client.protocol.cells import Buffer, Fields, is_number
from holdfast.client.protocol.commands import Command, Envelope
from holdfast.client.protocol.errors import BadFrame, BadValue, Misuse
from holdfast.client.protocol.limits import (
    DEPTH_MAX,
    ELEMENTS_MAX,
    REPLY_ELEMENTS_MAX,
    U32_MAX,
    U63_MAX,
    UNSCANNED_BYTES,
    UNSCANNED_ELEMENTS,
)
from holdfast.client.protocol.messages import (
    NO_REQUEST,
    Answered,
    FromClient,
    FromNode,
    Inquiry,
    Request,
    Unusable,
)
from holdfast.client.protocol.queries import AnyQuery
from holdfast.client.protocol.replies import Answer, DeadRow
from holdfast.client.protocol.values import Place, SessionId

Loader = Callable[[Fields, Buffer, int], tuple[Any, int]]  # fields, body, where in it -> value, where then
Dumper = Callable[[Any, list[Buffer]], tuple[Any, ...]]  # value, body parts to add to -> fields

_PREFIX = struct.Struct(">II")


# Commands, queries and answers by themselves -----------------------------------------------------------


def encode_command(command: Command) -> tuple[bytes, Buffer]:
    """Header and body as a client sends them, without `content_hash`. Raises BadValue for what has no form."""
    parts: list[Buffer] = []
    return pack(_WIRE_DUMPERS[type(command)](command, parts)), _join(parts)


def decode_command(header: Buffer, body: Buffer) -> Command:
    command: Command = _load(_WIRE_LOADERS, _unpack(header, ELEMENTS_MAX), 0, body)
    return command


def encode_query(query: AnyQuery) -> tuple[bytes, Buffer]:
    return pack(_QUERY_DUMPERS[type(query)](query, [])), b""


def decode_query(header: Buffer, body: Buffer = b"") -> AnyQuery:
    query: AnyQuery = _load(_QUERY_LOADERS, _unpack(header, ELEMENTS_MAX), 0, body)
    return query


def encode_answer(answer: Answer) -> tuple[bytes, Buffer]:
    parts: list[Buffer] = []
    return pack(_dump_answer(answer, parts)), _join(parts)


def decode_answer(header: Buffer, body: Buffer) -> Answer:
    return _load_answer(_unpack(header, REPLY_ELEMENTS_MAX), 0, _ANSWER_LOADERS, body)


# The log ----------------------------------------------------------------------------------------------


def encode_envelope(envelope: Envelope) -> bytes:
    """One command as the log holds it: lengths of header and body, header, body."""
    parts: list[Buffer] = []
    command = envelope.command
    fields = _LOG_DUMPERS[type(command)](command, parts)
    head = (envelope.principal, envelope.session, envelope.request_seq, envelope.done_below)
    _check_head(head, BadValue, field="envelope")
    header = pack(head + fields)
    return b"".join((_PREFIX.pack(len(header), sum(map(len, parts))), header, *parts))


def decode_envelope(data: memoryview, offset: int) -> tuple[Envelope, int]:
    """The command at `offset`, and where the next one begins. A body is a slice of `data`, not a copy."""
    try:
        header_bytes, body_bytes = _PREFIX.unpack_from(data, offset)
    except struct.error:
        raise BadFrame(problem="an entry ends inside a command's prefix") from None
    middle = offset + 8 + header_bytes
    end = middle + body_bytes
    if end > len(data):
        raise BadFrame(problem="an entry ends inside a command")
    fields = _unpack(data[offset + 8 : middle], ELEMENTS_MAX)
    try:
        principal, session, request_seq, done_below, tag = fields[:5]
    except ValueError:
        raise BadFrame(problem="an envelope has another number of fields") from None
    if (
        type(principal) is not str
        or type(session) is not bytes
        or type(request_seq) is not int
        or not 0 <= request_seq <= U63_MAX
        or type(done_below) is not int
        or not 0 <= done_below <= U63_MAX
        or type(tag) is not int
    ):
        raise BadFrame(problem="an envelope has a field of another type or range")
    command, at = _LOG_LOADERS[tag](fields, data[middle:end], 0)
    if at != body_bytes:
        raise BadFrame(problem=f"a body has {body_bytes} bytes; its command takes {at}")
    envelope = Envelope(
        principal=principal,
        command=command,
        session=SessionId(session),
        request_seq=request_seq,
        done_below=done_below,
    )
    return envelope, end


# Frames of a connection --------------------------------------------------------------------------------


def encode_message(message: FromClient | FromNode) -> tuple[bytes, list[Buffer]]:
    """Header and body parts of one frame, for `frames.write_frame`."""
    parts: list[Buffer] = []
    fields: tuple[Any, ...]
    match message:
        case Request():
            command = _WIRE_DUMPERS[type(message.command)](message.command, parts)
            head = (message.request_id, message.log, message.session, message.request_seq, message.done_below)
            _check_request(head, BadValue, field="request")
            fields = (tags.REQUEST, *head, command)
        case Inquiry():
            query = _QUERY_DUMPERS[type(message.query)](message.query, parts)
            asked = (message.request_id, message.log, message.stale, message.min_index)
            _check_inquiry(asked, BadValue, field="inquiry")
            fields = (tags.INQUIRY, *asked, query)
        case Answered():
            _check_numbers((message.request_id,), BadValue, field="request_id")
            fields = (tags.ANSWERED, message.request_id, *_dump_answer(message.answer, parts))
        case other:
            fields = _FRAME_DUMPERS[type(other)](other, parts)
    return pack(fields), parts


def decode_from_client(header: Buffer, body: Buffer) -> FromClient | Unusable:
    """What a node reads. Raises nothing but BadFrame: a call that is wrong in itself comes as `Unusable`."""
    fields = _unpack(header, ELEMENTS_MAX)
    request_id = NO_REQUEST
    try:
        match _kind(fields):
            case tags.REQUEST if len(fields) == 7:
                _, request_id, log, session, request_seq, done_below, command = fields
                _check_request(fields[1:6], BadFrame)
                return Request(
                    request_id=request_id,
                    command=_load(_WIRE_LOADERS, command, 0, body),
                    log=log,
                    session=session,
                    request_seq=request_seq,
                    done_below=done_below,
                )
            case tags.INQUIRY if len(fields) == 6:
                _, request_id, log, stale, min_index, query = fields
                _check_inquiry(fields[1:5], BadFrame)
                return Inquiry(
                    request_id=request_id,
                    query=_load(_QUERY_LOADERS, query, 0, body),
                    log=log,
                    stale=stale,
                    min_index=min_index,
                )
            case tags.HELLO | tags.PING | tags.WITHDRAW:
                asked: FromClient = _load(_FRAME_LOADERS, fields, 0, body)
                return asked
            case _:
                raise BadFrame(problem="a client sends no such frame")
    except Misuse as error:
        return Unusable(request_id, error)


def decode_from_node(header: Buffer, body: Buffer) -> FromNode:
    """What a client reads. Raises nothing but BadFrame: a node has no excuse for values that are wrong."""
    fields = _unpack(header, REPLY_ELEMENTS_MAX)
    try:
        match _kind(fields):
            case tags.ANSWERED if len(fields) > 2:
                _check_numbers(fields[1:2], BadFrame)
                return Answered(fields[1], _load_answer(fields, 2, _ANSWERED_LOADERS, body))
            case tags.WELCOME | tags.DECLINED | tags.PONG:
                told: FromNode = _load(_FRAME_LOADERS, fields, 0, body)
                return told
            case _:
                raise BadFrame(problem="a node sends no such frame")
    except Misuse as error:
        raise BadFrame(problem=f"a node's answer is wrong: {error}") from None


def _kind(fields: Fields) -> int:
    return fields[0] if fields and type(fields[0]) is int else 0


# msgpack ----------------------------------------------------------------------------------------------


def pack(fields: tuple[Any, ...]) -> bytes:
    """One array. Raises BadValue for what has no form."""
    try:
        return bytes(msgpack.packb(fields))
    except UnicodeEncodeError:
        raise BadValue(field="text", problem="is not valid Unicode") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise BadValue(field="value", problem=f"has no form on the wire: {error}") from None


def _unpack(header: Buffer, elements_max: int) -> Fields:
    """The header's outer array. What it may cost is known before anything is built from it."""
    if len(header) > UNSCANNED_BYTES:
        _scan(header, elements_max)
    try:
        fields = msgpack.unpackb(header, use_list=False, object_pairs_hook=_unique, ext_hook=_refuse_ext)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise BadFrame(problem=f"a header cannot be read: {type(error).__name__}: {error}"[:200]) from None
    if type(fields) is not tuple:
        raise BadFrame(problem="a header is not an array")
    return fields


def unpack_flat(data: Buffer, elements_max: int) -> Fields:
    """One array of scalars, for messages between nodes: any container inside is refused, or left in if it is small.

    Raises BadFrame. Inside a short array none may claim more than that one has, so it needs no scan: 2 MiB at worst.
    """
    mark = data[0] if len(data) else 0
    length_bytes = 0 if 0x90 <= mark <= 0x9F else _ARRAY_LENGTH_BYTES.get(mark)
    if length_bytes is None:
        raise BadFrame(problem="what came is not an array")
    count = int.from_bytes(data[1 : 1 + length_bytes], "big") if length_bytes else mark & 0x0F
    if count > elements_max:
        raise BadFrame(problem=f"an array of {count} elements; up to {elements_max} are allowed")
    try:
        if count > UNSCANNED_ELEMENTS:
            return _unpack_scalars(memoryview(data)[1 + length_bytes :], count)
        fields: Fields = msgpack.unpackb(
            data, use_list=False, max_array_len=count, max_map_len=0, max_ext_len=0, ext_hook=_refuse_ext
        )
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise BadFrame(problem=f"an array cannot be read: {type(error).__name__}: {error}"[:200]) from None
    return fields


def _unpack_scalars(data: memoryview, count: int) -> Fields:
    unpacker = msgpack.Unpacker(
        read_size=1, max_buffer_size=len(data), max_array_len=0, max_map_len=0, max_ext_len=0, ext_hook=_refuse_ext
    )
    unpacker.feed(data)
    fields = tuple(islice(unpacker, count))
    if len(fields) != count or unpacker.tell() != len(data):  # it stops in silence where the bytes do
        raise ValueError("it has another length than it says")
    return fields


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a map has a key twice")
    return found


def _refuse_ext(code: int, data: bytes) -> None:
    raise ValueError("extension types are not used")


def _fixed_size(mark: int) -> int:
    """The whole size of a scalar that begins with this byte; 0 for what says its length, or is not ours."""
    if mark <= 0x7F or mark >= 0xE0 or mark in (0xC0, 0xC2, 0xC3):
        return 1
    if 0xA0 <= mark <= 0xBF:
        return 1 + (mark & 0x1F)
    return {0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}.get(mark, 0)


_FIXED_SIZES = tuple(map(_fixed_size, range(256)))
_ARRAY_LENGTH_BYTES = {0xDC: 2, 0xDD: 4}
_LENGTH_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}


def _scan(header: Buffer, elements_max: int) -> None:
    """Refuse more elements or more nesting than allowed, by walking over the bytes and building nothing.

    msgpack allocates an array at the length that it claims, level for level, before it misses the content.
    """
    at, end = 0, len(header)
    outer: list[int] = []  # for each open container around this one, how many elements it still lacks
    missing = 1
    while missing or outer:
        if not missing:
            missing = outer.pop()
            continue
        missing -= 1
        elements_max -= 1
        if at >= end:
            raise BadFrame(problem="a header is cut off")
        if elements_max < 0:
            raise BadFrame(problem="a header has too many elements")
        mark = header[at]
        size = _FIXED_SIZES[mark]
        if size:
            at += size
            continue
        if 0x80 <= mark <= 0x9F:
            count, at = mark & 0x0F, at + 1
        elif mark in _LENGTH_BYTES:
            begin, at = at + 1, at + 1 + _LENGTH_BYTES[mark]
            count = int.from_bytes(header[begin:at], "big")
            if mark < 0xDC:
                at += count
                continue
        else:
            raise BadFrame(problem="a header has a float, an extension type or a byte without meaning")
        if mark <= 0x8F or mark >= 0xDE:
            count *= 2
        outer.append(missing)
        missing = count
        if len(outer) > DEPTH_MAX:
            raise BadFrame(problem=f"a header is nested deeper than {DEPTH_MAX}")


# Readers and writers, compiled from the table ----------------------------------------------------------


class _Loaders(dict[int, Loader]):
    """Readers by tag. `before` is how many fields of the array stand before the form's own."""

    def __init__(self, forms: dict[int, tags.Form], before: int = 1, log: bool = False) -> None:
        self._forms, self._before, self._log = forms, before, log

    def __missing__(self, tag: int) -> Loader:
        if tag not in self._forms:
            raise BadFrame(problem=f"there is no tag {tag} here")
        loader = self[tag] = _compile_loader(self._forms[tag], self._before, self._log)
        return loader


class _Dumpers(dict[type[Any], Dumper]):
    """Writers by type."""

    def __init__(self, forms: dict[int, tags.Form], log: bool = False) -> None:
        self._tags = {form.type: tag for tag, form in forms.items()}
        self._forms, self._log = forms, log

    def __missing__(self, kind: type[Any]) -> Dumper:
        if kind not in self._tags:
            raise BadValue(field="value", problem=f"is a {kind.__name__}, which has no form on the wire")
        tag = self._tags[kind]
        dumper = self[kind] = _compile_dumper(self._forms[tag], (tag,), self._log)
        return dumper


def _wire_fields(form: tags.Form, log: bool) -> list[tuple[str, str, tags.Kind]]:
    """(variable, name, kind) of each field of the array, in order."""
    found: list[tuple[str, str, tags.Kind]] = []
    for name, kind in (form.fields | form.log_only if log else form.fields).items():
        if kind.batch:
            found += [(f"c_{column}", column, of) for column, of in tags.COLUMN_FIELDS.items()]
        else:
            found.append((f"f_{name}", name, kind))
    return found


def _compile_loader(form: tags.Form, before: int, log: bool) -> Loader:
    """A function like this one, for a Touch:

    def load(fields, body, at):
        try:
            _, f_queue_id, f_group, = fields
        except ValueError:
            raise BadFrame(problem="Touch has another number of fields") from None
        if type(f_queue_id) is not int or not 0 <= f_queue_id <= 9223372036854775807:
            raise BadFrame(problem="Touch.queue_id is not u63")
        if f_group is not None and (type(f_group) is not str):
            raise BadFrame(problem="Touch.group is not str or nil")
        return Touch(queue_id=f_queue_id, group=f_group), at
    """
    title = form.type.__name__
    wire = _wire_fields(form, log)
    targets = "".join(f"{variable}, " for variable in ["_"] * before + [variable for variable, _, _ in wire])
    lines = [
        "try:",
        f"    {targets}= fields",
        "except ValueError:",
        f"    raise BadFrame(problem='{title} has another number of fields') from None",
    ]
    for variable, name, kind in wire:
        lines += [
            f"if {kind.wrong.format(v=variable)}:",
            f"    raise BadFrame(problem='{title}.{name} is not {kind.name}')",
        ]
    given = {}
    for name, kind in (form.fields | form.log_only if log else form.fields).items():
        given[name] = variable = f"f_{name}"
        if kind.batch:
            given["body"] = "f_body"
            lines += [
                f"{variable} = Columns({', '.join(f'c_{column}' for column in tags.COLUMN_FIELDS)})",
                f"f_body, at = take_body({variable}, body, at)",
                f"check({variable}, f_body)",
            ]
        elif kind.body:
            lines.append(f"{variable}, at = {kind.load}({variable}, body, at, {log})")
        elif kind.load != "{v}":
            lines.append(f"{variable} = {kind.load.format(v=variable)}")
    lines.append(f"return {title}({', '.join(f'{name}={variable}' for name, variable in given.items())}), at")
    loader: Loader = _run(title, "fields, body, at", lines, form)
    return loader


def _compile_dumper(form: tags.Form, head: tuple[int, ...], log: bool) -> Dumper:
    """The counterpart: refuses, as BadValue, what the reader would refuse."""
    lines = ["batch = value.columns"] if any(kind.batch for kind in form.fields.values()) else []
    wire = _wire_fields(form, log)
    for variable, name, kind in wire:
        source = f"batch.{name}" if variable.startswith("c_") else f"value.{name}"
        if kind.body:
            lines.append(f"{variable} = {kind.dump}({source}, parts, {log})")
        else:
            lines.append(f"{variable} = {kind.dump.format(x=source)}")
        lines += [
            f"if {kind.wrong.format(v=variable)}:",
            f"    raise BadValue(field={name!r}, problem='does not fit the wire: {kind.name}')",
        ]
    if lines and lines[0].startswith("batch"):
        lines.append("parts.append(value.body)")
    result = "".join(f"{item}, " for item in [*map(str, head), *(variable for variable, _, _ in wire)])
    lines.append(f"return ({result})")
    dumper: Dumper = _run(form.type.__name__, "value, parts", lines, form)
    return dumper


def _run(title: str, parameters: str, lines: list[str], form: tags.Form) -> Any:
    source = f"def compiled({parameters}):\n" + "".join(f"    {line}\n" for line in lines)
    names = {**vars(cells), **globals(), title: form.type}
    exec(compile(source, f"<codec of {title}>", "exec"), names)
    return names["compiled"]


def _load(loaders: _Loaders, fields: Any, at_tag: int, body: Buffer) -> Any:
    if type(fields) is not tuple or len(fields) <= at_tag or type(fields[at_tag]) is not int:
        raise BadFrame(problem="there is no tag where one belongs")
    value, at = loaders[fields[at_tag]](fields, body, 0)
    if at != len(body):
        raise BadFrame(problem=f"the body has {len(body)} bytes; the header takes {at}")
    return value


def _join(parts: list[Buffer]) -> Buffer:
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _dump_answer(answer: Answer, parts: list[Buffer]) -> tuple[Any, ...]:
    place = answer.place
    head = (place.log, place.index, place.position, place.time_ms)
    _check_place(head, BadValue, field="place")
    return head + _REPLY_DUMPERS[type(answer.reply)](answer.reply, parts)


def _load_answer(fields: Fields, before: int, loaders: _Loaders, body: Buffer) -> Answer:
    head = fields[before : before + 4]
    _check_place(head, BadFrame)
    log, index, position, time_ms = head
    return Answer(Place(index, position, time_ms, log), _load(loaders, fields, before + 4, body))


# Heads that are written by hand -------------------------------------------------------------------------


def _check(holds: bool, error: type[BadFrame] | type[BadValue], **facts: str) -> None:
    if not holds:
        raise error(problem="has a field of another type or range", **facts)


def _check_numbers(values: Sequence[Any], error: type[BadFrame] | type[BadValue], **facts: str) -> None:
    _check(all(map(is_number, values)), error, **facts)


def _check_head(head: Sequence[Any], error: type[BadFrame] | type[BadValue], **facts: str) -> None:
    principal, session, *numbers = head
    _check(type(principal) is str and type(session) is bytes, error, **facts)
    _check_numbers(numbers, error, **facts)


def _check_request(head: Sequence[Any], error: type[BadFrame] | type[BadValue], **facts: str) -> None:
    request_id, log, session, *numbers = head
    _check(type(session) is bytes, error, **facts)
    _check_numbers((request_id, log, *numbers), error, **facts)


def _check_inquiry(head: Sequence[Any], error: type[BadFrame] | type[BadValue], **facts: str) -> None:
    request_id, log, stale, min_index = head
    _check(type(stale) is bool, error, **facts)
    _check_numbers((request_id, log, min_index), error, **facts)


def _check_place(head: Sequence[Any], error: type[BadFrame] | type[BadValue], **facts: str) -> None:
    _check(len(head) == 4, error, **facts)
    log, index, position, time_ms = head
    _check_numbers((log, index, time_ms), error, **facts)
    _check(is_number(position, -1, U32_MAX), error, **facts)


# Values inside values ----------------------------------------------------------------------------------


def load_rows(title: str, rows: Fields) -> tuple[Any, ...]:
    load = _row_loader(title)
    return tuple(load(_row(row), b"", 0)[0] for row in rows)


def dump_rows(title: str, rows: Iterable[Any]) -> tuple[Any, ...]:
    dump = _row_dumper(title)
    return tuple(dump(row, []) for row in rows)


def _row(row: Any) -> Fields:
    if type(row) is not tuple:
        raise BadFrame(problem="a row is not an array")
    return row


def load_items(items: Fields, body: Buffer, at: int, log: bool) -> tuple[tuple[Any, ...], int]:
    loaders = _LOG_ITEM_LOADERS if log else _WIRE_LOADERS
    found = []
    for item in items:
        if type(item) is not tuple or not item or type(item[0]) is not int or item[0] not in tags.ITEM_TAGS:
            raise BadFrame(problem="a transaction has an item that is no produce, ack or nack")
        value, at = loaders[item[0]](item, body, at)
        found.append(value)
    return tuple(found), at


def dump_items(items: Iterable[Any], parts: list[Buffer], log: bool) -> tuple[Any, ...]:
    dumpers = _LOG_DUMPERS if log else _WIRE_DUMPERS
    return tuple(dumpers[type(item)](item, parts) for item in items)


def load_dead_rows(rows: Fields, body: Buffer, at: int, log: bool) -> tuple[tuple[DeadRow, ...], int]:
    load = _row_loader("DeadRow")
    found = []
    for row in rows:
        value, at = load(_row(row), body, at)
        found.append(value)
    return tuple(found), at


def dump_dead_rows(rows: Iterable[DeadRow], parts: list[Buffer], log: bool) -> tuple[Any, ...]:
    dump = _row_dumper("DeadRow")
    return tuple(dump(row, parts) for row in rows)


_WIRE_LOADERS = _Loaders(tags.COMMANDS)
_LOG_LOADERS = _Loaders(tags.COMMANDS, before=5, log=True)
_LOG_ITEM_LOADERS = _Loaders(tags.COMMANDS, log=True)
_QUERY_LOADERS = _Loaders(tags.QUERIES)
_ANSWER_LOADERS = _Loaders(tags.REPLIES, before=5)
_ANSWERED_LOADERS = _Loaders(tags.REPLIES, before=7)
_FRAME_LOADERS = _Loaders(tags.FRAMES)
_WIRE_DUMPERS = _Dumpers(tags.COMMANDS)
_LOG_DUMPERS = _Dumpers(tags.COMMANDS, log=True)
_QUERY_DUMPERS = _Dumpers(tags.QUERIES)
_REPLY_DUMPERS = _Dumpers(tags.REPLIES)
_FRAME_DUMPERS = _Dumpers(tags.FRAMES)
_ROW_LOADERS: dict[str, Loader] = {}
_ROW_DUMPERS: dict[str, Dumper] = {}


def _row_loader(title: str) -> Loader:
    if title not in _ROW_LOADERS:
        _ROW_LOADERS[title] = _compile_loader(tags.ROWS[title], 0, False)
    return _ROW_LOADERS[title]


def _row_dumper(title: str) -> Dumper:
    if title not in _ROW_DUMPERS:
        _ROW_DUMPERS[title] = _compile_dumper(tags.ROWS[title], (), False)
    return _ROW_DUMPERS[title]
