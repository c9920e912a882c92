"""The closed set of peer messages: each survives its bytes, and every other byte sequence is refused."""

import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.client.protocol.errors import BadFrame, BatchTooLarge
from holdfast.client.protocol.limits import U63_MAX
from holdfast.cluster.messages import (
    CHUNK_BYTES,
    ENTRY_BYTES,
    MESSAGE_BYTES,
    AppendEntries,
    AppendReply,
    Message,
    PreVote,
    PreVoteReply,
    RequestVote,
    SnapshotChunk,
    SnapshotDone,
    SnapshotHead,
    StaleTerm,
    TimeoutNow,
    VoteGranted,
    decode,
    encode,
)

APPEND = AppendEntries(5, 7, 8, 3, ((b"\x10a", 9, 3), (b"\x10", 10, 5)), 2, 4)
REPLY = AppendReply(11, False, True, 5, 2, 4, 1_700_000_000_000)
HEAD = SnapshotHead(5, 40, 4, 2, 12, 99, bytes(range(32)), b"\x11\x00\x00")
SAMPLES: list[Message] = [
    APPEND,
    AppendEntries(5, 7, None, 0, (), 2, 4),
    REPLY,
    AppendReply(1, True, False, 5, 2, 4, 0),
    RequestVote(5, 9, 4),
    VoteGranted(5),
    TimeoutNow(U63_MAX),
    PreVote(5, 1, 9, 4),
    PreVoteReply(5, 1, True),
    StaleTerm(6),
    HEAD,
    SnapshotChunk(2, 262_144, b"rows"),
    SnapshotDone(2, 40),
]
u63 = st.integers(0, U63_MAX)


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_survives_its_bytes_with_its_log(message: Message) -> None:
    for log in (0, 7, 65_535):
        assert decode(encode(message, log)) == (log, message)
        assert decode(memoryview(encode(message, log))) == (log, message)


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_no_other_length_is_read(message: Message) -> None:
    data = encode(message)
    for size in range(len(data)):
        with pytest.raises(BadFrame):
            decode(data[:size])
    with pytest.raises(BadFrame):
        decode(data + b"\0")


@pytest.mark.parametrize("tag", [0, 12, 99, 255])
def test_an_unknown_tag_is_refused(tag: int) -> None:
    """There is no message that forwards a command, and none that carries a pickle."""
    with pytest.raises(BadFrame, match="tag"):
        decode(bytes([tag]) + encode(StaleTerm(1))[1:])


@pytest.mark.parametrize(
    "bad",
    [
        replace(APPEND, entries=((b"\x10", 9, 6),)),  # newer than its leader
        replace(APPEND, entries=((b"\x10", 9, 2),)),  # older than what it follows
        replace(APPEND, entries=((b"", 9, 4),)),
        replace(APPEND, prev_index=None),
        replace(APPEND, prev_index=None, entries=()),  # a term of nothing
        replace(APPEND, commit_index=U63_MAX + 1),
        replace(REPLY, reset=True),
        replace(REPLY, next_index=0),
        replace(REPLY, wall_ms=1 << 63),
        replace(HEAD, index_term=6),
        replace(HEAD, configuration_index=41),
        replace(HEAD, index=0, configuration_index=0),
        replace(HEAD, configuration=bytes(65_537)),
        SnapshotChunk(2, 0, b""),
        SnapshotChunk(2, 0, bytes(CHUNK_BYTES + 1)),
        SnapshotChunk(1 << 63, 0, b"x"),
        StaleTerm(1 << 63),
        PreVote(1, 1 << 63, 1, 1),
    ],
    ids=str,
)
def test_what_contradicts_itself_is_refused(bad: Message) -> None:
    with pytest.raises(BadFrame):
        decode(encode(bad))


def test_a_flag_is_0_or_1() -> None:
    data = bytearray(encode(PreVoteReply(5, 1, True)))
    data[-1] = 2
    with pytest.raises(BadFrame, match="flag"):
        decode(bytes(data))


def test_a_claim_of_many_entries_costs_nothing() -> None:
    head = encode(AppendEntries(5, 7, 8, 3, (), 2, 4))[:-4]
    for count in (1, 65_536, 65_537, 2**32 - 1):
        with pytest.raises(BadFrame):
            decode(head + struct.pack(">I", count))


def test_the_largest_entry_fits_and_a_larger_message_does_not() -> None:
    largest = AppendEntries(5, 7, 8, 3, ((bytes(ENTRY_BYTES), 9, 4),), 2, 4)
    assert decode(encode(largest)) == (0, largest)
    two = replace(largest, entries=((bytes(ENTRY_BYTES), 9, 4), (bytes(ENTRY_BYTES), 10, 4)))
    with pytest.raises(BatchTooLarge):
        encode(two)
    with pytest.raises(BadFrame, match="allowed"):
        decode(bytes(MESSAGE_BYTES + 1))


@pytest.mark.fuzz
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    try:
        log, message = decode(data)
    except BadFrame:
        return
    assert encode(message, log) == data


@pytest.mark.fuzz
@given(st.integers(1, 11), st.integers(0, 65_535), st.binary(max_size=120))
def test_any_body_under_a_known_tag_is_a_message_or_refused(tag: int, log: int, body: bytes) -> None:
    data = struct.pack(">BH", tag, log) + body
    try:
        found = decode(data)
    except BadFrame:
        return
    assert encode(found[1], found[0]) == data


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=20), u63, u63)
def test_entries_keep_their_order_and_places(commands: list[bytes], epoch: int, barrier: int) -> None:
    entries = tuple((command, 101 + number, 4) for number, command in enumerate(commands))
    message = AppendEntries(4, 90, 100, 2, entries, epoch, barrier)
    assert decode(encode(message, 3)) == (3, message)
