"""The closed set of peer messages: each survives its bytes, and every other byte sequence is refused."""

import resource
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.client.protocol.errors import BadFrame, BadValue, BatchTooLarge
from holdfast.client.protocol.limits import U63_MAX
from holdfast.cluster import membership
from holdfast.cluster.membership import MEMBERS_MAX, Configuration, Member
from holdfast.cluster.messages import (
    CHUNK_BYTES,
    CONFIGURATION_BYTES,
    ENTRIES_PER_MESSAGE,
    ENTRY_BYTES,
    MESSAGE_BYTES,
    Agreed,
    AppendEntries,
    AppendReply,
    Found,
    Introduce,
    Message,
    PreVote,
    PreVoteReply,
    RequestVote,
    SnapshotChunk,
    SnapshotDone,
    SnapshotHead,
    StaleTerm,
    StateDigest,
    TimeoutNow,
    VoteGranted,
    decode,
    encode,
)

APPEND = AppendEntries(5, 7, 8, 3, ((b"\x10a", 9, 3), (b"\x10", 10, 5)), 2, 4)
REPLY = AppendReply(11, False, True, 5, 2, 4, 1_700_000_000_000)
HEAD = SnapshotHead(5, 40, 4, 2, 12, 99, bytes(range(32)), b"\x11\x00\x00")
MEMBERS = Configuration((Member("n1", "h1:7421", "h1:7401"), Member("ü", "h2:7421", "h2:7401")))
INTRODUCE = Introduce("h1:7401", "", ("n1", "ü"))
FOUND = Found("c1", MEMBERS, (7, U63_MAX))
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
    StateDigest(256, bytes(range(32))),
    INTRODUCE,
    replace(INTRODUCE, cluster_id="c1"),
    FOUND,
    Agreed("c1"),
]
# One array each, tag and log first: permanent, for nodes of two releases talk to each other during an upgrade.
LAYOUTS: list[tuple[Message, list[Any]]] = [
    (APPEND, [1, 0, 5, 7, 8, 3, 2, 4, 3, b"\x10a", 5, b"\x10"]),
    (AppendEntries(5, 7, None, 0, (), 2, 4), [1, 0, 5, 7, None, 0, 2, 4]),
    (REPLY, [2, 0, 11, False, True, 5, 2, 4, 1_700_000_000_000]),
    (RequestVote(5, 9, 4), [3, 0, 5, 9, 4]),
    (VoteGranted(5), [4, 0, 5]),
    (TimeoutNow(6), [5, 0, 6]),
    (PreVote(5, 1, 9, 4), [6, 0, 5, 1, 9, 4]),
    (PreVoteReply(5, 1, True), [7, 0, 5, 1, True]),
    (StaleTerm(6), [8, 0, 6]),
    (HEAD, [9, 0, 5, 40, 4, 2, 12, 99, bytes(range(32)), b"\x11\x00\x00"]),
    (SnapshotChunk(2, 262_144, b"rows"), [10, 0, 2, 262_144, b"rows"]),
    (SnapshotDone(2, 40), [11, 0, 2, 40]),
    (StateDigest(256, bytes(range(32))), [15, 0, 256, bytes(range(32))]),
    (INTRODUCE, [12, 0, "h1:7401", "", "n1", "ü"]),
    (FOUND, [13, 0, "c1", membership.encode(MEMBERS), 7, U63_MAX]),
    (Agreed("c1"), [14, 0, "c1"]),
]
u63 = st.integers(0, U63_MAX)


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_survives_its_bytes_with_its_log(message: Message) -> None:
    for log in (0, 7, 65_535):
        assert decode(encode(message, log)) == (log, message)
        assert decode(memoryview(encode(message, log))) == (log, message)


@pytest.mark.parametrize(("message", "layout"), LAYOUTS, ids=lambda each: type(each).__name__)
def test_a_message_is_one_flat_array(message: Message, layout: list[Any]) -> None:
    assert msgpack.unpackb(encode(message)) == layout
    assert decode(msgpack.packb(layout)) == (0, message)


@pytest.mark.parametrize(("message", "layout"), LAYOUTS, ids=lambda each: type(each).__name__)
def test_another_arity_or_type_in_any_place_is_refused(message: Message, layout: list[Any]) -> None:
    for at, value in enumerate(layout):
        others: list[Any] = [-1, 1 << 63, 1.5, True, None, "1", b"1", [], {}, [value], msgpack.ExtType(1, b"x")]
        others += [b"\x80\x04."] if type(value) is not bytes else []  # a pickle
        for other in others:
            if type(other) is type(value) is not int:
                continue  # another value, not another type
            changed = [*layout[:at], other, *layout[at + 1 :]]
            with pytest.raises(BadFrame):
                decode(msgpack.packb(changed))
    shorter = layout[:2] if message is INTRODUCE else layout[:-1]  # with a name less it is another introduction
    for changed in (shorter, [*layout, 0], [*layout, b"x"], layout[1:], [layout]):
        with pytest.raises(BadFrame):
            decode(msgpack.packb(changed))


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_no_other_length_is_read(message: Message) -> None:
    data = encode(message)
    for size in range(len(data)):
        with pytest.raises(BadFrame):
            decode(data[:size])
    with pytest.raises(BadFrame):
        decode(data + b"\0")


@pytest.mark.parametrize("tag", [0, 16, 99, 1 << 40])
def test_an_unknown_tag_is_refused(tag: int) -> None:
    """There is no message that forwards a command, and none that carries a pickle."""
    with pytest.raises(BadFrame, match="tag"):
        decode(msgpack.packb([tag, 0, 1]))


@pytest.mark.parametrize("log", [-1, 65_536])
def test_a_log_is_a_u16(log: int) -> None:
    with pytest.raises(BadFrame, match="log"):
        decode(msgpack.packb([8, log, 1]))


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
        replace(APPEND, prev_index=0),
        replace(APPEND, prev_index=U63_MAX),  # its entries would be beyond all numbers
        replace(HEAD, digest=bytes(31)),
        replace(INTRODUCE, names=()),
        replace(INTRODUCE, names=("a", "a")),
        replace(INTRODUCE, names=("a", "")),
        replace(INTRODUCE, names=("n" * 256,)),
        replace(INTRODUCE, names=tuple(map(str, range(MEMBERS_MAX + 1)))),
        replace(INTRODUCE, client_address="h" * 1_025),
        replace(INTRODUCE, cluster_id="c" * 256),
        replace(FOUND, cluster_id=""),
        replace(FOUND, cluster_id="c" * 256),
        replace(FOUND, incarnations=(7,)),
        replace(FOUND, incarnations=(7, 8, 9)),
        replace(FOUND, incarnations=(7, 1 << 63)),
        replace(FOUND, members=membership.of("a", "b"), incarnations=(7,)),
        replace(FOUND, members=membership.of(()), incarnations=()),
        replace(FOUND, members=Configuration((Member("a", "h" * 60_000, "h" * 6_000),)), incarnations=(7,)),
        Agreed(""),
    ],
    ids=lambda bad: str(bad)[:100],
)
def test_what_contradicts_itself_is_refused(bad: Message) -> None:
    with pytest.raises(BadFrame):
        decode(encode(bad))


def test_what_has_no_form_is_misuse() -> None:
    with pytest.raises(BadValue):
        encode(StaleTerm(1 << 64))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xdc",
        b"\xdd\xff\xff\xff\xff",
        b"\xdd\x00\x02\x00\x08\x01\x00",  # as many as are allowed, and none there
        b"\xdd\x00\x02\x00\x09\x01\x00",
        b"\xdd\x00\x02\x00\x00" * 1_023,  # each inside the one before
        b"\xdc\x01\x00" * 5_000,
        b"\x91" * 5_000,
        b"\x91" + b"\xdd\x00\x00\xff\xff" * 1_000 + bytes(65_535),  # a few that claim much more than there are
        b"\xdc\x01\x2c" + b"\xdd\x00\x00\xff\xff" * 1_000 + bytes(65_535),  # and inside many
        b"\x93\x01\x00\xc6\xff\xff\xff\xff",
        b"\x93\x01\x00\xdf\xff\xff\xff\xff",
        b"\x93\x01\x00\xc9\xff\xff\xff\xff\x01",
    ],
    ids=lambda data: f"{data[:8].hex()} x{len(data)}",
)
def test_a_claim_of_much_costs_nothing(data: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(20):
        with pytest.raises(BadFrame):
            decode(data)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB


def test_as_many_entries_as_are_allowed_are_read_and_no_more() -> None:
    entry = (b"\x10", 9, 4)
    most = replace(APPEND, entries=tuple((b"\x10", 9 + number, 4) for number in range(ENTRIES_PER_MESSAGE)))
    assert decode(encode(most)) == (0, most)
    with pytest.raises(BadFrame, match="up to"):
        decode(encode(replace(most, entries=(*most.entries, entry))))


@pytest.mark.parametrize("extra", [[], {}, [1], {1: 1}, msgpack.ExtType(1, b"x"), 1.5, None])
def test_nothing_nests_among_many_entries_either(extra: object) -> None:
    layout = [1, 0, 5, 7, 8, 3, 2, 4, *[4, b"\x10"] * 1_000]
    assert decode(msgpack.packb(layout))[0] == 0
    for at in (-1, -2):
        changed = list(layout)
        changed[at] = extra
        with pytest.raises(BadFrame):
            decode(msgpack.packb(changed))
    whole = msgpack.packb(layout)
    longer = whole[:1] + (len(layout) + 2).to_bytes(2, "big") + whole[3:]  # says that it has one entry more
    for data in (whole[:-1], whole + b"\x00", longer):
        with pytest.raises(BadFrame):
            decode(data)


def test_the_largest_configuration_fits() -> None:
    address = "h" * 500
    members = Configuration(tuple(Member(f"n{number}", address, address) for number in range(MEMBERS_MAX)))
    assert len(membership.encode(members)) < CONFIGURATION_BYTES
    found = Found("c" * 255, members, tuple(range(MEMBERS_MAX)))
    assert decode(encode(found)) == (0, found)


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
    check_read_or_refused(data)


scalars = (
    st.integers(-2, U63_MAX + 1)
    | st.booleans()
    | st.none()
    | st.text(max_size=20)
    | st.binary(max_size=40)
    | st.floats()
    | st.lists(st.integers(0, 9), max_size=3)
)


@pytest.mark.fuzz
@given(st.integers(0, 16), st.integers(0, 65_535), st.lists(scalars, max_size=12))
def test_any_fields_under_a_known_tag_are_a_message_or_refused(tag: int, log: int, fields: list[Any]) -> None:
    check_read_or_refused(msgpack.packb([tag, log, *fields]))


@pytest.mark.fuzz
@given(st.sampled_from(SAMPLES), st.data())
def test_a_message_with_any_byte_changed_is_a_message_or_refused(message: Message, data: st.DataObject) -> None:
    encoded = bytearray(encode(message))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    check_read_or_refused(bytes(encoded))


def check_read_or_refused(data: bytes) -> None:
    """Numbers need not be packed minimally, so the bytes may differ; what they say may not."""
    try:
        log, message = decode(data)
    except BadFrame:
        return
    assert decode(encode(message, log)) == (log, message)
    assert len(encode(message, log)) <= len(data)


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=20), u63, u63)
def test_entries_keep_their_order_and_places(commands: list[bytes], epoch: int, barrier: int) -> None:
    entries = tuple((command, 101 + number, 4) for number, command in enumerate(commands))
    message = AppendEntries(4, 90, 100, 2, entries, epoch, barrier)
    assert decode(encode(message, 3)) == (3, message)
