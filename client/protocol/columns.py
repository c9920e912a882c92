"""Cutting a batch's body by its columns, and building both from messages.

The one place that knows how messages lie in a batch. Encoded headers are a run of
(name length u16, name, value length u32, value), UTF-8, little-endian: no general decoder is needed to read
them.
"""

import struct
from collections.abc import Mapping, Sequence
from operator import sub

from holdfast.client.protocol import limits
from holdfast.client.protocol.errors import BadHeader, BadValue, BatchTooLarge, MessageTooLarge
from holdfast.client.protocol.quick import dataclass
from holdfast.client.protocol.values import RESERVED_HEADERS, Columns, ends_of

_END = struct.Struct("<i")
_NONE = -1
_LOWEST = {"delays": 0, "not_befores": 0, "ttls": 1}
_TIME_MAX = limits.U63_MAX >> 8
_NAME_SIZE = struct.Struct("<H")
_VALUE_SIZE = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class MessageParts:
    """One message as a producer gives it; all times in milliseconds, none where unset."""

    payload: bytes
    key: str | None = None
    headers: Mapping[str, str] | None = None
    delay_ms: int | None = None
    not_before_ms: int | None = None
    ttl_ms: int | None = None


def pack(messages: Sequence[MessageParts]) -> tuple[Columns, bytes]:
    """Columns and body of these messages. Raises Misuse for what no queue would take."""
    keys = [_encode("key", message.key) if message.key else b"" for message in messages]
    headers = [encode_headers(message.headers) if message.headers else b"" for message in messages]
    size = sum(len(message.payload) for message in messages) + sum(map(len, keys)) + sum(map(len, headers))
    if size > limits.FRAME_BODY_BYTES:
        raise BatchTooLarge(size=size, limit=limits.FRAME_BODY_BYTES, limit_name="FRAME_BODY_BYTES")
    for key in keys:
        if len(key) > limits.KEY_BYTES:
            raise BadValue(field="key", problem=f"has {len(key)} bytes; up to {limits.KEY_BYTES} are allowed")
    columns = Columns(
        ends=ends_of([len(message.payload) for message in messages]),
        key_ends=ends_of([len(key) for key in keys]) if any(keys) else b"",
        header_ends=ends_of([len(cell) for cell in headers]) if any(headers) else b"",
        delays=_times("delays", [message.delay_ms for message in messages]),
        not_befores=_times("not_befores", [message.not_before_ms for message in messages]),
        ttls=_times("ttls", [message.ttl_ms for message in messages]),
    )
    body = b"".join([*(message.payload for message in messages), *keys, *headers])
    return columns, body


def check(columns: Columns, body: bytes | memoryview, *, reserved_headers: bool = False) -> None:
    """Refuse columns that do not cut `body` into messages; every later reader relies on it.

    Costs a loop only over the columns that are there; `reserved_headers` is for copies that the fold made.
    """
    if columns.lanes:
        raise BadValue(field="lanes", problem="is reserved")
    ends, start, key_ends, header_ends = columns.ends, columns.start, columns.key_ends, columns.header_ends
    delays, not_befores, ttls = columns.delays, columns.not_befores, columns.ttls
    plain = not (key_ends or header_ends or delays or not_befores or ttls)
    if plain and len(ends) == 4:  # one message and nothing about it: the commonest batch
        if not 0 <= start <= _END.unpack(ends)[0]:
            raise BadValue(field="ends", problem="does not grow from its start")
    else:
        count = len(ends) // 4
        if len(ends) % 4 or not count:
            raise BadValue(field="ends", problem="is not a column of int32")
        _check_ends("ends", ends, start)
        for name, cells in (("key_ends", key_ends), ("header_ends", header_ends)):
            if cells:
                if len(cells) != 4 * count:
                    raise BadValue(field=name, problem=f"has {len(cells)} bytes; {4 * count} are needed")
                _check_ends(name, cells, 0)
        for name, times in (("delays", delays), ("not_befores", not_befores), ("ttls", ttls)):
            if times:
                if len(times) not in (8, 8 * count):
                    raise BadValue(field=name, problem=f"has {len(times)} bytes; 8 or {8 * count} are needed")
                _check_times(name, times)
    if len(body) != columns.body_bytes:
        raise BadValue(field="body", problem=f"has {len(body)} bytes; its columns say {columns.body_bytes}")
    if key_ends:
        _check_keys(key_ends, body, columns.payload_bytes)
    if header_ends:
        base = len(body) - _end(header_ends, columns.count - 1)
        for cell in set(_cells(header_ends, body, base)):  # messages of a batch mostly have the same ones
            decode_headers(cell, reserved=reserved_headers)


def bounds(columns: Columns, index: int) -> tuple[int, int]:
    """Where message `index` lies in the body."""
    ends = columns.ends
    end = struct.unpack_from("<i", ends, 4 * index)[0]
    begin = struct.unpack_from("<i", ends, 4 * index - 4)[0] if index else columns.start
    return begin - columns.start, end - columns.start


def sizes(columns: Columns) -> list[int]:
    """How many bytes of a body the messages up to each one take together: payloads, keys and headers."""
    start = columns.start
    found = [end - start for end in _int32(columns.ends)]
    for cells in (columns.key_ends, columns.header_ends):
        if cells:
            found = [size + end for size, end in zip(found, _int32(cells), strict=True)]
    return found


def payload_of(columns: Columns, body: bytes | memoryview, index: int) -> bytes:
    begin, end = bounds(columns, index)
    return bytes(body[begin:end])


def key_of(columns: Columns, body: bytes | memoryview, index: int) -> bytes:
    """The message's key as bytes; empty where it has none."""
    return _cell(columns.key_ends, body, columns.payload_bytes, index)


def header_cell(columns: Columns, body: bytes | memoryview, index: int) -> bytes:
    """The message's headers, encoded; empty where it has none."""
    if not columns.header_ends:
        return b""
    base = columns.body_bytes - _end(columns.header_ends, columns.count - 1)
    return _cell(columns.header_ends, body, base, index)


def time_of(times: bytes, index: int) -> int | None:
    """One cell of a time column, or none."""
    if not times:
        return None
    value = struct.unpack_from("<q", times, 0 if len(times) == 8 else 8 * index)[0]
    return None if value == _NONE else int(value)


def largest_payload(columns: Columns) -> int:
    ends = _int32(columns.ends)
    return max(map(sub, ends, (columns.start, *ends)), default=0)


def cut(columns: Columns, body: bytes | memoryview, first: int, last: int) -> tuple[Columns, bytes]:
    """Messages `first` … `last` (by index, both included) as a batch of their own."""
    if first == 0 and last == columns.count - 1:
        return columns, bytes(body)
    begin, end = bounds(columns, first)[0], bounds(columns, last)[1]
    parts = [bytes(body[begin:end])]
    keys = headers = b""
    if columns.key_ends:
        keys, data = _cut_cells(columns.key_ends, body, columns.payload_bytes, first, last)
        parts.append(data)
    if columns.header_ends:
        base = columns.body_bytes - _end(columns.header_ends, columns.count - 1)
        headers, data = _cut_cells(columns.header_ends, body, base, first, last)
        parts.append(data)
    return (
        Columns(
            ends=columns.ends[4 * first : 4 * last + 4],
            start=begin + columns.start,
            key_ends=keys,
            header_ends=headers,
            delays=_cut_times(columns.delays, first, last),
            not_befores=_cut_times(columns.not_befores, first, last),
            ttls=_cut_times(columns.ttls, first, last),
            lanes=columns.lanes,
        ),
        b"".join(parts),
    )


def encode_headers(headers: Mapping[str, str], *, reserved: bool = False) -> bytes:
    """The cell of one message, names in the given order. Raises BadHeader."""
    out = bytearray()
    if len(headers) > limits.HEADERS_PER_MESSAGE and not reserved:
        raise BadHeader(name="", problem=f"is one of more than {limits.HEADERS_PER_MESSAGE}; send fewer")
    for name, value in headers.items():
        name_bytes, value_bytes = _encode("header name", name), _encode("header value", value)
        _check_header_name(name, len(name_bytes), reserved)
        out += _NAME_SIZE.pack(len(name_bytes)) + name_bytes
        out += _VALUE_SIZE.pack(len(value_bytes)) + value_bytes
    if len(out) > limits.HEADER_BYTES and not reserved:
        raise BadHeader(name="", problem=_too_long(len(out)))
    return bytes(out)


def decode_headers(cell: bytes, *, reserved: bool = True) -> dict[str, str]:
    """The headers of one cell. Raises BadHeader for what `encode_headers` would not write."""
    headers: dict[str, str] = {}
    at = 0
    if not reserved and len(cell) > limits.HEADER_BYTES:
        raise BadHeader(name="", problem=_too_long(len(cell)))
    try:
        while at < len(cell):
            size = _NAME_SIZE.unpack_from(cell, at)[0]
            name = cell[at + 2 : at + 2 + size].decode()
            at += 2 + size
            length = _VALUE_SIZE.unpack_from(cell, at)[0]
            at += 4
            if at + length > len(cell):
                raise BadHeader(name=name, problem="is cut off")
            if name in headers:
                raise BadHeader(name=name, problem="is there twice")
            _check_header_name(name, size, reserved)
            headers[name] = cell[at : at + length].decode()
            at += length
    except (struct.error, UnicodeDecodeError) as error:
        raise BadHeader(name="", problem=f"cannot be read: {error}") from None
    if not reserved and len(headers) > limits.HEADERS_PER_MESSAGE:
        raise BadHeader(name="", problem=f"is one of more than {limits.HEADERS_PER_MESSAGE}; send fewer")
    return headers


def check_sizes(columns: Columns, *, message_bytes: int, limit_name: str) -> None:
    """Refuse a batch with a payload above `message_bytes`; the limit's name goes into the error."""
    if columns.payload_bytes > message_bytes:
        largest = largest_payload(columns)
        if largest > message_bytes:
            raise MessageTooLarge(size=largest, limit=message_bytes, limit_name=limit_name)


def _times(name: str, values: list[int | None]) -> bytes:
    if all(value is None for value in values):
        return b""
    low = _LOWEST[name]
    for value in values:
        if value is not None and (type(value) is not int or not low <= value <= _TIME_MAX):
            raise BadValue(field=name, problem=f"is {value!r}; {low} to {_TIME_MAX} is allowed")
    numbers = [_NONE if value is None else value for value in values]
    if len(set(numbers)) == 1:
        return struct.pack("<q", numbers[0])
    return struct.pack(f"<{len(numbers)}q", *numbers)


def _encode(field: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise BadValue(field=field, problem="is not valid Unicode") from None


def _int32(column: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(column) // 4}i", column)


def _check_ends(name: str, ends: bytes, start: int) -> None:
    values = list(_int32(ends))
    if start < 0 or values[0] < start or values != sorted(values):  # linear: what is sorted stays
        raise BadValue(field=name, problem="does not grow from its start")


def _check_times(name: str, times: bytes) -> None:
    low = _LOWEST[name]
    values = set(struct.unpack(f"<{len(times) // 8}q", times)) - {_NONE}
    if values and not low <= min(values) <= max(values) <= _TIME_MAX:
        raise BadValue(field=name, problem=f"has a value outside {low} to {_TIME_MAX}")


def _check_keys(ends: bytes, body: bytes | memoryview, base: int) -> None:
    values = _int32(ends)
    largest = max(map(sub, values, (0, *values)))
    if largest > limits.KEY_BYTES:
        raise BadValue(field="key", problem=f"has {largest} bytes; up to {limits.KEY_BYTES} are allowed")
    if bytes(body[base : base + values[-1]]).isascii():
        return
    try:
        for key in _cells(ends, body, base):
            key.decode()
    except UnicodeDecodeError:
        raise BadValue(field="key", problem="is not valid UTF-8") from None


def _cells(ends: bytes, body: bytes | memoryview, base: int) -> list[bytes]:
    values = _int32(ends)
    data = bytes(body[base : base + values[-1]])
    return [data[begin:end] for begin, end in zip((0, *values), values, strict=False)]


def _too_long(size: int) -> str:
    return f"makes {size} bytes of headers; {limits.HEADER_BYTES} are allowed"


def _check_header_name(name: str, size: int, reserved: bool) -> None:
    if not 1 <= size <= limits.NAME_BYTES:
        problem = f"has {size} bytes in its name; 1 to {limits.NAME_BYTES} are allowed"
        raise BadHeader(name=name[: limits.NAME_BYTES], problem=problem)
    if not reserved and name.startswith(RESERVED_HEADERS):
        raise BadHeader(name=name, problem=f"begins with {RESERVED_HEADERS!r}, which is reserved; rename it")


def _end(ends: bytes, index: int) -> int:
    return int(struct.unpack_from("<i", ends, 4 * index)[0])


def _cell(ends: bytes, body: bytes | memoryview, base: int, index: int) -> bytes:
    if not ends:
        return b""
    begin = _end(ends, index - 1) if index else 0
    return bytes(body[base + begin : base + _end(ends, index)])


def _cut_cells(ends: bytes, body: bytes | memoryview, base: int, first: int, last: int) -> tuple[bytes, bytes]:
    begin = _end(ends, first - 1) if first else 0
    data = bytes(body[base + begin : base + _end(ends, last)])
    values = struct.unpack_from(f"<{last - first + 1}i", ends, 4 * first)
    return struct.pack(f"<{len(values)}i", *(value - begin for value in values)), data


def _cut_times(times: bytes, first: int, last: int) -> bytes:
    return times if len(times) <= 8 else times[8 * first : 8 * last + 8]
