"""Whatever bytes come, a decoder gives a valid value or one of its own errors, in bounded memory.

`make fuzz` runs these for longer, with fresh seeds.
"""

import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.client.protocol import codec, limits
from holdfast.client.protocol.cells import Buffer
from holdfast.client.protocol.commands import Envelope
from holdfast.client.protocol.errors import BadFrame, Misuse
from holdfast.client.protocol.frames import FrameReader, write_frame
from holdfast.client.protocol.messages import Unusable
from tests import strategies

pytestmark = pytest.mark.fuzz

MIB = 1_048_576

# There are more than a hundred of these tests, so each draws a quarter of what the profile says.
some = settings(max_examples=max(25, settings().max_examples // 4))


def encode_envelope(envelope: Envelope) -> tuple[bytes, bytes]:
    """The log form, as a header and a body like the others."""
    data = codec.encode_envelope(envelope)
    header_bytes = struct.unpack_from(">I", data)[0]
    return data[8 : 8 + header_bytes], data[8 + header_bytes :]


def decode_envelope(header: Buffer, body: Buffer) -> Envelope:
    data = memoryview(b"..." + struct.pack(">II", len(header), len(body)) + header + body + b"...")
    envelope, end = codec.decode_envelope(data, 3)
    assert end == len(data) - 3
    return envelope


def encode_message(message: Any) -> tuple[bytes, bytes]:
    header, parts = codec.encode_message(message)
    return header, b"".join(parts)


Form = tuple[st.SearchStrategy[Any], Callable[[Any], tuple[bytes, Buffer]], Callable[[Buffer, Buffer], Any]]
FORMS: dict[str, Form] = {
    "command": (strategies.commands(), codec.encode_command, codec.decode_command),
    "query": (strategies.any_queries(), codec.encode_query, codec.decode_query),
    "answer": (strategies.answers(), codec.encode_answer, codec.decode_answer),
    "envelope": (strategies.envelopes(), encode_envelope, decode_envelope),
    "client's frame": (strategies.from_clients, encode_message, codec.decode_from_client),
    "node's frame": (strategies.from_nodes, encode_message, codec.decode_from_node),
}
forms = pytest.mark.parametrize("form", FORMS)


def settle(form: str, header: Buffer, body: Buffer) -> Any:
    """Decode; what comes out must survive a round trip of its own, and only the named errors may come."""
    _, encode, decode = FORMS[form]
    try:
        value = decode(header, body)
    except BadFrame:
        return None
    except Misuse:
        assert form in ("command", "query", "answer", "envelope")
        return None
    if isinstance(value, Unusable):
        assert form == "client's frame"
    else:
        assert decode(*encode(value)) == value
    return value


# Round trips -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", strategies.COMMANDS, ids=lambda kind: kind.__name__)
@some
@given(data=st.data())
def test_every_command_survives_the_wire(kind: type[Any], data: st.DataObject) -> None:
    command = data.draw(strategies.COMMANDS[kind])
    header, body = codec.encode_command(command)
    assert codec.decode_command(header, body) == command
    assert codec.decode_command(memoryview(header), memoryview(body)) == command


@pytest.mark.parametrize("kind", strategies.LOGGED, ids=lambda kind: kind.__name__)
@some
@given(data=st.data())
def test_every_command_survives_the_log(kind: type[Any], data: st.DataObject) -> None:
    envelope = data.draw(strategies.envelopes(strategies.LOGGED[kind]))
    assert decode_envelope(*encode_envelope(envelope)) == envelope


@pytest.mark.parametrize("kind", strategies.QUERIES, ids=lambda kind: kind.__name__)
@some
@given(data=st.data())
def test_every_query_survives_the_wire(kind: type[Any], data: st.DataObject) -> None:
    query = data.draw(strategies.QUERIES[kind])
    assert codec.decode_query(*codec.encode_query(query)) == query


@pytest.mark.parametrize("kind", strategies.REPLIES, ids=lambda kind: kind.__name__)
@some
@given(data=st.data())
def test_every_reply_survives_the_wire(kind: type[Any], data: st.DataObject) -> None:
    answer = data.draw(strategies.answers(strategies.REPLIES[kind]))
    assert codec.decode_answer(*codec.encode_answer(answer)) == answer


@forms
@some
@given(data=st.data())
def test_every_form_survives_its_frame(form: str, data: st.DataObject) -> None:
    values, encode, decode = FORMS[form]
    value = data.draw(values)
    header, body = encode(value)
    stream = b"".join(write_frame(header, body))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    reader = FrameReader()
    frames = []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        frames += reader.feed(stream[begin:end])
    [frame] = frames
    assert decode(frame.header, frame.body) == value


# Damage ------------------------------------------------------------------------------------------------

# Bytes where msgpack's grammar turns: arrays, maps, bins, texts, extensions, floats, wide integers.
MARKS = bytes([0x00, 0x7F, 0x80, 0x90, 0x9F, 0xA0, *range(0xC0, 0xE0), 0xFF])


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(out)))
        match draw(st.sampled_from(["flip", "mark", "cut", "drop", "insert", "repeat"])):
            case "flip" if at < len(out):
                out[at] ^= 1 << draw(st.integers(0, 7))
            case "mark" if at < len(out):
                out[at] = draw(st.sampled_from(MARKS))
            case "cut":
                del out[at:]
            case "drop":
                del out[at : at + draw(st.integers(1, 4))]
            case "insert":
                out[at:at] = draw(st.binary(min_size=1, max_size=4))
            case "repeat":
                out[at:at] = out[at : at + draw(st.integers(1, 8))]
            case _:
                pass
    return bytes(out)


@forms
@some
@given(data=st.data())
def test_a_damaged_header_is_a_valid_value_or_refused(form: str, data: st.DataObject) -> None:
    values, encode, _ = FORMS[form]
    header, body = encode(data.draw(values))
    settle(form, data.draw(damaged(header)), body)


@forms
@some
@given(data=st.data())
def test_a_damaged_body_is_a_valid_value_or_refused(form: str, data: st.DataObject) -> None:
    values, encode, _ = FORMS[form]
    header, body = encode(data.draw(values))
    settle(form, header, data.draw(damaged(bytes(body))))


@forms
@some
@given(data=st.data())
def test_every_truncated_header_is_refused(form: str, data: st.DataObject) -> None:
    values, encode, _ = FORMS[form]
    header, body = encode(data.draw(values))
    assert settle(form, header[: data.draw(st.integers(0, len(header) - 1))], body) is None


@forms
@some
@given(header=st.binary(max_size=200), body=st.binary(max_size=20))
def test_random_bytes_are_a_valid_value_or_refused(form: str, header: bytes, body: bytes) -> None:
    settle(form, header, body)


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=24),
    st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=8)),
    st.builds(msgpack.Timestamp, st.integers(0, 2**40), st.integers(0, 999_999_999)),
)
trees = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=9), st.dictionaries(st.text(max_size=8) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=20,
)


@forms
@some
@given(tree=st.lists(trees, max_size=9), tag=st.integers(0, 130), at=st.integers(0, 7))
def test_any_other_msgpack_is_a_valid_value_or_refused(form: str, tree: list[Any], tag: int, at: int) -> None:
    settle(form, msgpack.packb([*tree[:at], tag, *tree[at:]]), b"")


@forms
@some
@given(data=st.data())
def test_a_field_of_any_other_kind_is_a_valid_value_or_refused(form: str, data: st.DataObject) -> None:
    values, encode, _ = FORMS[form]
    header, body = encode(data.draw(values))
    tree = msgpack.unpackb(header)
    branch = tree
    while True:  # down to some field, at any depth
        at = data.draw(st.integers(0, len(branch) - 1))
        if not isinstance(branch[at], list) or not branch[at] or data.draw(st.booleans()):
            break
        branch = branch[at]
    branch[at] = data.draw(trees)
    settle(form, msgpack.packb(tree), body)


@some
@given(pieces=st.lists(st.binary(max_size=40), max_size=8))
@example(pieces=[b"\0\0\0\1\0\0\0\0\xc0" * 3])
def test_any_stream_is_frames_or_refused(pieces: list[bytes]) -> None:
    reader = FrameReader()
    try:
        for piece in pieces:
            for frame in reader.feed(piece):
                settle("client's frame", frame.header, frame.body)
    except BadFrame:
        with pytest.raises(BadFrame):
            reader.feed(b"")


# Hostility ---------------------------------------------------------------------------------------------

HUGE = limits.FRAME_HEADER_BYTES
HOSTILE = {
    "empty arrays": b"\xdd" + struct.pack(">I", 900_000) + b"\x90" * 900_000,
    "empty arrays in each other": b"\x9f" + b"\x9f\x90" * 450_000,
    "empty maps": b"\xdd" + struct.pack(">I", HUGE - 5) + b"\x80" * (HUGE - 5),
    "small numbers": b"\xdd" + struct.pack(">I", HUGE - 5) + b"\x01" * (HUGE - 5),
    "empty texts": b"\xdd" + struct.pack(">I", HUGE - 5) + b"\xa0" * (HUGE - 5),
    "short texts": b"\xdd" + struct.pack(">I", HUGE // 2 - 5) + b"\xa1a" * (HUGE // 2 - 5),
    "a large map": b"\xdf"
    + struct.pack(">I", 300_000)
    + b"".join(b"\xa5" + b"%05x" % i + b"\x90" for i in range(262_144)),
    "deep arrays": b"\x91" * HUGE,
    "deep maps": b"\x81\xa1a" * (HUGE // 3),
    "deep arrays in a small header": b"\x91" * 1_000,
    "deep arrays that claim much": b"\xdc\x03\xff" * 341,
    "deep arrays that claim more": b"\xdd\x00\x01\x00\x00" * 1_000 + bytes(70_000),
    "an array that claims 2^32-1": b"\xdd\xff\xff\xff\xff",
    "a map that claims 2^32-1": b"\xdf\xff\xff\xff\xff",
    "a bin that claims 2^32-1": b"\x92\x01\xc6\xff\xff\xff\xff",
    "a text that claims 2^32-1": b"\x92\x01\xdb\xff\xff\xff\xff",
    "an extension that claims 2^32-1": b"\x92\x01\xc9\xff\xff\xff\xff\x01",
    "long claims in a long header": b"\xdd\xff\xff\xff\xff" + bytes(5_000),
    "an extension": b"\x92\x01\xd4\x01a",
    "a timestamp": b"\x92\x01\xd6\xff\0\0\0\0",
    "a timestamp out of range": b"\x92\x01\xc7\x0c\xff" + b"\xff" * 12,
    "NaN": b"\x92\x03\xcb\x7f\xf8" + bytes(6),
    "a float": b"\x92\x03\xca\x3f\x80\0\0",
    "a float as the tag": msgpack.packb([3.0, 1, 0, b"", 0, 0, [8, 1]]),
    "a bool as the tag": msgpack.packb([True, ""]),
    "a number above 2^63": msgpack.packb([8, 2**63]),
    "a negative number": msgpack.packb([8, -1]),
    "a bool for a number": msgpack.packb([8, True]),
    "bin for text": msgpack.packb([1, b"worker"]),
    "text for bin": msgpack.packb([15, 1, "svc", "n" * 16]),
    "text that is not UTF-8": b"\x92\x01\xa2\xff\xfe",
    "a lone surrogate": b"\x92\x01\xa3\xed\xa0\x80",
    "a key twice": b"\x94\x06\xa1q\x82\xa7history\xc2\xa7history\xc3\x91\xa1g",
    "a key that is no setting": msgpack.packb([6, "q", {"colour": 1}, []]),
    "a key in bytes": msgpack.packb([6, "q", {b"history": True}, []]),
    "a number as a key": msgpack.packb([6, "q", {1: True}, []]),
    "an array as a key": b"\x94\x06\xa1q\x81\x90\xc2\x90",
    "a byte without meaning": b"\x92\x08\xc1",
    "trailing bytes": msgpack.packb([8, 1]) + b"\0",
    "a field too many": msgpack.packb([8, 1, 1]),
    "a field too few": msgpack.packb([8]),
    "no tag": msgpack.packb([]),
    "no array": msgpack.packb({"tag": 8}),
    "an unknown tag": msgpack.packb([63, 1]),
    "a map as the tag": msgpack.packb([{}, 1]),
    "nothing": b"",
}


@forms
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused_in_bounded_memory(form: str, name: str) -> None:
    header, decode = HOSTILE[name], FORMS[form][2]
    bound = (17 if form in ("answer", "node's frame") else 4) * MIB
    tracemalloc.start()
    try:
        with pytest.raises(BadFrame):
            if form == "envelope":  # without the copies that the helper above makes
                codec.decode_envelope(memoryview(struct.pack(">II", len(header), 0) + header), 0)
            else:
                decode(header, b"")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < bound + (len(header) if form == "envelope" else 0)
