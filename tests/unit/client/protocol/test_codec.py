"""The codec by example: what each tag looks like for ever, and where reading and writing say no."""

import json
import os
import struct
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import msgpack
import pytest

from holdfast.client.protocol import codec, limits, tags
from holdfast.client.protocol.columns import MessageParts, pack
from holdfast.client.protocol.commands import (
    AckBatch,
    Command,
    CreateQueue,
    Envelope,
    Lease,
    OpenSession,
    Part,
    Produce,
    Publish,
    SetLimits,
    Touch,
    Transaction,
)
from holdfast.client.protocol.errors import BadFrame, BadName, BadValue, HoldfastError, Misuse, VersionUnsupported
from holdfast.client.protocol.messages import (
    Answered,
    Declined,
    FromClient,
    FromNode,
    Hello,
    Request,
    Unusable,
    choose_version,
)
from holdfast.client.protocol.queries import AnyQuery
from holdfast.client.protocol.replies import (
    Answer,
    DeadListed,
    Done,
    Failed,
    Leased,
    MessageBatch,
    NodeDescribed,
    QueueDescribed,
    Reply,
    Settled,
)
from holdfast.client.protocol.values import (
    THE_LOG,
    Columns,
    GroupSettings,
    Job,
    LeaseId,
    LogId,
    Place,
    QueueId,
    QueueSettings,
)
from tests.unit.client.protocol import samples

SAMPLE_QUEUE = next(reply for reply in samples.REPLIES if isinstance(reply, QueueDescribed))
SAMPLE_NODE = next(reply for reply in samples.REPLIES if isinstance(reply, NodeDescribed))
GOLDEN = Path(__file__).with_name("golden.json")


# The table ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("union", "forms"),
    [(Command, tags.COMMANDS), (AnyQuery, tags.QUERIES), (Reply, tags.REPLIES)],
    ids=["commands", "queries", "replies"],
)
def test_every_member_of_a_union_has_one_tag(union: Any, forms: dict[int, tags.Form]) -> None:
    members = set(get_args(union))
    assert {form.type for form in forms.values()} == members
    assert len(forms) == len(members)


def test_every_frame_has_a_number() -> None:
    kinds = [tags.HELLO, tags.WELCOME, tags.REQUEST, tags.INQUIRY, tags.ANSWERED, tags.DECLINED, tags.PING, tags.PONG]
    kinds += [tags.WITHDRAW]
    assert len(set(kinds)) == len(kinds) == len({*get_args(FromClient), *get_args(FromNode)})


def test_no_tag_is_given_twice_or_after_it_retired() -> None:
    numbers = [*tags.COMMANDS, *tags.QUERIES, *tags.REPLIES]
    assert len(set(numbers)) == len(numbers)
    assert not tags.RETIRED & set(numbers)


@pytest.mark.parametrize(
    "form",
    [*tags.COMMANDS.values(), *tags.QUERIES.values(), *tags.REPLIES.values(), *tags.ROWS.values()],
    ids=lambda form: form.type.__name__,
)
def test_a_form_has_exactly_the_fields_of_its_type(form: tags.Form) -> None:
    listed = {*form.fields, *form.log_only} | ({"body"} if "columns" in form.fields else set())
    assert listed == {field.name for field in fields(form.type)}


# Golden bytes ------------------------------------------------------------------------------------------


def forms_by_name() -> dict[str, str]:
    """Every form's bytes, in hex: header and body."""
    found = {}
    for command in samples.COMMANDS:
        header, body = codec.encode_command(command)
        found[f"command {type(command).__name__}"] = f"{header.hex()} {bytes(body).hex()}"
        envelope = Envelope(principal="alice", command=command, session=samples.SESSION, request_seq=77, done_below=70)
        found[f"log {type(command).__name__}"] = codec.encode_envelope(envelope).hex()
    for query in samples.QUERIES:
        header, body = codec.encode_query(query)
        found[f"query {type(query).__name__}"] = f"{header.hex()} {bytes(body).hex()}"
    for reply in samples.REPLIES:
        header, body = codec.encode_answer(Answer(samples.PLACE, reply))
        found[f"answer {type(reply).__name__}"] = f"{header.hex()} {bytes(body).hex()}"
    for message in samples.FRAMES:
        header, parts = codec.encode_message(message)
        found[f"frame {type(message).__name__}"] = f"{header.hex()} {b''.join(parts).hex()}"
    for settings in (QueueSettings(), GroupSettings()):  # what a missing key means is part of the format
        found[f"defaults {type(settings).__name__}"] = repr(settings)
    return found


def test_the_bytes_of_every_tag_are_those_that_were_recorded() -> None:
    """With HOLDFAST_RECORD=1, forms that are new are recorded; those that are there never change."""
    recorded = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    made = forms_by_name()
    if os.environ.get("HOLDFAST_RECORD"):
        GOLDEN.write_text(json.dumps(made | recorded, indent=1) + "\n")
        recorded = made | recorded
    assert made == recorded


def test_recorded_bytes_are_read_as_the_samples() -> None:
    recorded = json.loads(GOLDEN.read_text())

    def read(name: str) -> tuple[bytes, bytes]:
        header, body = recorded[name].split(" ")
        return bytes.fromhex(header), bytes.fromhex(body)

    for command in samples.COMMANDS:
        name = type(command).__name__
        assert codec.decode_command(*read(f"command {name}")) == unhashed(command)
        data = memoryview(bytes.fromhex(recorded[f"log {name}"]))
        assert codec.decode_envelope(data, 0)[0].command == command
    for query in samples.QUERIES:
        assert codec.decode_query(*read(f"query {type(query).__name__}")) == query
    for reply in samples.REPLIES:
        assert codec.decode_answer(*read(f"answer {type(reply).__name__}")) == Answer(samples.PLACE, reply)


def test_there_is_a_sample_of_every_type() -> None:
    kinds = [type(sample) for sample in (*samples.COMMANDS, *samples.QUERIES, *samples.REPLIES)]
    assert kinds == [form.type for form in (tags.COMMANDS | tags.QUERIES | tags.REPLIES).values()]
    assert {type(frame) for frame in samples.FRAMES} == {*get_args(FromClient), *get_args(FromNode)}


def unhashed(command: Any) -> Any:
    """The command as a client's wire carries it."""
    if isinstance(command, Transaction):
        return replace(command, items=tuple(unhashed(item) for item in command.items))
    return replace(command, content_hash=b"") if hasattr(command, "content_hash") else command


# Commands ----------------------------------------------------------------------------------------------


def test_the_content_hash_stays_in_the_log() -> None:
    header, body = codec.encode_command(samples.PRODUCE)
    assert samples.HASH not in header
    assert codec.decode_command(header, body) == replace(samples.PRODUCE, content_hash=b"")


def test_a_body_is_passed_on_uncopied() -> None:
    header, body = codec.encode_command(samples.PRODUCE)
    assert body is samples.PRODUCE.body
    produce = codec.decode_command(header, body)
    assert isinstance(produce, Produce) and produce.body is body


def test_the_bodies_of_a_transaction_lie_one_behind_the_other() -> None:
    [transaction] = [command for command in samples.COMMANDS if isinstance(command, Transaction)]
    header, body = codec.encode_command(transaction)
    assert body == samples.BODY + samples.PLAIN_BODY
    with pytest.raises(BadFrame):
        codec.decode_command(header, bytes(body)[:-1])
    with pytest.raises(BadFrame):
        codec.decode_command(header, bytes(body) + b"x")


def test_a_body_beside_a_command_without_one_is_refused() -> None:
    header, body = codec.encode_command(samples.ACK)
    assert body == b""
    with pytest.raises(BadFrame):
        codec.decode_command(header, b"x")


def test_65_536_settled_ranges_fit_one_header() -> None:
    ranges = tuple((limits.U63_MAX, 2 * n + 1, 2 * n + 1) for n in range(limits.SETTLE_RANGES))
    command = AckBatch(queue_id=QueueId(1), group="default", ranges=ranges)
    header, body = codec.encode_command(command)
    assert len(header) < limits.FRAME_HEADER_BYTES
    assert codec.decode_command(header, body) == command


def test_a_publish_of_as_many_parts_as_are_allowed_fits_one_header() -> None:
    parts = tuple(Part(n, "a" * 36, 1, 10**12, 2**64 - 1) for n in range(limits.PUBLISH_CHUNKS))
    command = Publish(txn=Job("j"), parts=parts)
    header, body = codec.encode_command(command)
    assert len(header) < limits.FRAME_HEADER_BYTES
    assert codec.decode_command(header, body) == command


def test_a_transaction_of_as_many_items_as_are_allowed_fits_one_header() -> None:
    columns, body = pack([MessageParts(b"x", key="k")])
    item = Produce(queue_id=QueueId(1), columns=columns, body=body)
    transaction = Transaction(items=(item,) * limits.TRANSACTION_ITEMS)
    header, bodies = codec.encode_command(transaction)
    assert codec.decode_command(header, bodies) == transaction


def test_numbers_that_are_not_minimal_are_read_and_written_minimal() -> None:
    wide = b"\x93\xcf" + struct.pack(">Q", 2) + b"\xd3" + struct.pack(">q", 5) + b"\xc0"
    touch = codec.decode_command(wide, b"")
    assert touch == Touch(queue_id=QueueId(5))
    assert codec.encode_command(touch)[0] == b"\x93\x02\x05\xc0"


def test_only_settings_that_differ_from_the_default_are_written() -> None:
    command = CreateQueue(name="q", settings=QueueSettings(history=True, max_lease_ms=43_200_000))
    header, _ = codec.encode_command(command)
    assert msgpack.unpackb(header) == [6, "q", {"history": True}, ["default"]]


def test_settings_that_are_the_default_may_be_written() -> None:
    header = msgpack.packb([6, "q", {"max_lease_ms": 43_200_000, "max_in_flight": None}, []])
    assert codec.decode_command(header, b"") == CreateQueue(name="q", groups=())


def lease(**changes: Any) -> list[Any]:
    wire = {"tag": 20, "queue_id": 1, "group": "default", "max_messages": 1, "max_bytes": 1}
    wire |= {"visibility_timeout_ms": None, "auto_ack": False, "wait_ms": 0}
    return list((wire | changes).values())


def described(**changes: Any) -> Any:
    """A node about itself, with one field of it or of its first member changed on the wire."""
    [form] = [form for form in tags.REPLIES.values() if form.type is NodeDescribed]
    header, _ = codec.encode_answer(Answer(samples.PLACE, SAMPLE_NODE))
    wire = msgpack.unpackb(header)
    for name, value in changes.items():
        if name in form.fields:
            wire[5 + list(form.fields).index(name)] = value
        else:
            wire[-1][0][list(tags.ROWS["MemberDescribed"].fields).index(name)] = value
    return codec.decode_answer(msgpack.packb(wire), b"").reply


@pytest.mark.parametrize(
    "changes",
    [
        {"role": "king"},
        {"role": None},
        {"role": 1},
        {"fsync": "never"},
        {"fsync": True},
        {"leader": 1},
        {"term": -1},
        {"pid": None},
        {"members": None},
        {"members": [["n1", None, True, True]]},
        {"members": ["n1"]},
        {"client_address": 7401},
        {"voter": 1},
        {"connected": None},
        {"lag": -1},
    ],
    ids=repr,
)
def test_a_node_that_describes_itself_wrongly_is_a_bad_frame(changes: dict[str, Any]) -> None:
    assert described() == SAMPLE_NODE
    with pytest.raises(BadFrame):
        described(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"queue_id": True},
        {"queue_id": -1},
        {"queue_id": 2**63},
        {"queue_id": 1.0},
        {"queue_id": None},
        {"queue_id": "1"},
        {"group": b"default"},
        {"group": None},
        {"group": ["default"]},
        {"auto_ack": 0},
        {"auto_ack": None},
        {"visibility_timeout_ms": False},
        {"another": 1},
    ],
    ids=repr,
)
def test_a_field_of_another_type_is_a_bad_frame(changes: dict[str, Any]) -> None:
    with pytest.raises(BadFrame):
        codec.decode_command(msgpack.packb(lease(**changes)), b"")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"max_messages": 0}, BadValue),
        ({"max_messages": 10_001}, BadValue),
        ({"visibility_timeout_ms": 0}, BadValue),
        ({"group": "g" * 256}, BadName),
        ({"group": "grüppe"}, BadName),
    ],
    ids=repr,
)
def test_a_wrong_call_in_a_sound_frame_is_a_misuse(changes: dict[str, Any], error: type[Misuse]) -> None:
    with pytest.raises(error):
        codec.decode_command(msgpack.packb(lease(**changes)), b"")


@pytest.mark.parametrize(
    "ranges",
    [b"\0" * 23, b"\0" * 25, struct.pack(">3Q", 2**63, 1, 1), struct.pack(">3Q", 1, 1, 2**64 - 1)],
    ids=["too short", "too long", "a lease above 2^63", "a version above 2^63"],
)
def test_ranges_that_are_no_triples_are_a_bad_frame(ranges: bytes) -> None:
    with pytest.raises(BadFrame):
        codec.decode_command(msgpack.packb([21, 1, "default", ranges]), b"")


def test_columns_that_do_not_cut_the_body_are_refused() -> None:
    def produce(ends: bytes, body: bytes, start: int = 0, key_ends: bytes = b"") -> None:
        header = [17, 1, ends, start, key_ends, b"", b"", b"", b"", b"", None, 0, 0, 1, None, None]
        codec.decode_command(msgpack.packb(header), body)

    produce(struct.pack("<2i", 1, 3), b"abc")
    for ends, body, start in [
        (struct.pack("<2i", 1, 3), b"ab", 0),
        (struct.pack("<2i", 1, 3), b"abcd", 0),
        (struct.pack("<2i", 1, 3), b"", 5),
        (b"\0\0\0", b"", 0),
    ]:
        with pytest.raises(BadFrame):
            produce(ends, body, start)
    with pytest.raises(BadFrame):
        produce(struct.pack("<i", 1), b"a", key_ends=b"\0")
    with pytest.raises(BadValue):
        produce(struct.pack("<2i", 4, 3), b"abc")
    with pytest.raises(BadValue):
        produce(b"", b"")
    with pytest.raises(BadValue):
        produce(struct.pack("<i", 1) + b"\0" + struct.pack("<i", 1), b"a")


def test_lanes_are_reserved_on_the_wire() -> None:
    columns, body = pack([MessageParts(b"a")])
    header, _ = codec.encode_command(Produce(queue_id=QueueId(1), columns=columns, body=body))
    fields = msgpack.unpackb(header)
    assert fields[9] == b""
    for other in (b"\0", None, ()):
        with pytest.raises(BadFrame, match="lanes"):
            codec.decode_command(msgpack.packb([*fields[:9], other, *fields[10:]]), body)


def test_a_table_of_batches_with_lanes_is_neither_written_nor_read() -> None:
    columns, body = pack([MessageParts(b"a")])

    def leased(columns: Columns) -> Answer:
        batch = MessageBatch(1, 0, 1, "svc", 1, columns, body)
        return Answer(samples.PLACE, Leased(lease_id=LeaseId(1), deadline_ms=1, grants=(), batches=(batch,)))

    with pytest.raises(BadValue, match="reserved"):
        codec.encode_answer(leased(replace(columns, lanes=b"\0")))
    *fields, table = msgpack.unpackb(codec.encode_answer(leased(columns))[0])
    lengths = 32 + 4  # of the columns, behind four u64 and `start`
    assert struct.unpack_from(">7IH", table, lengths) == (4, 0, 0, 0, 0, 0, 0, 3)
    laned = bytearray(table[:-3]) + b"\0" + table[-3:]
    struct.pack_into(">I", laned, lengths + 24, 1)
    with pytest.raises(BadFrame, match="lanes"):
        codec.decode_answer(msgpack.packb([*fields, bytes(laned)]), body)


def test_the_ops_of_a_publish_are_reserved() -> None:
    publish = Publish(txn=Job("j"), parts=())
    fields = msgpack.unpackb(codec.encode_command(publish)[0])
    assert fields[-1] == []
    for ops in ([[21, 1, "default", bytes(24)]], [0], None, b""):
        with pytest.raises(BadFrame, match="ops"):
            codec.decode_command(msgpack.packb([*fields[:-1], ops]), b"")
    with pytest.raises(BadValue, match="ops is reserved"):
        replace(publish, ops=(samples.ACK,))


def test_a_producer_may_not_send_reserved_headers_and_a_node_may() -> None:
    cell = struct.pack("<H", 15) + b"holdfast-reason" + struct.pack("<I", 1) + b"x"
    columns = Columns(struct.pack("<i", 0), header_ends=struct.pack("<i", len(cell)))
    header, body = codec.encode_command(Produce(queue_id=QueueId(1), columns=columns, body=cell))
    with pytest.raises(Misuse):
        codec.decode_command(header, body)
    leased = Leased(
        lease_id=LeaseId(1),
        deadline_ms=1,
        grants=(),
        batches=(MessageBatch(1, 0, 0, "moved/1", 1, columns, cell),),
    )
    assert codec.decode_answer(*codec.encode_answer(Answer(samples.PLACE, leased))).reply == leased


# Writing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        Touch(queue_id=QueueId(-1)),
        Touch(queue_id=QueueId(2**63)),
        Touch(queue_id=True),  # type: ignore[arg-type]
        Lease(queue_id=QueueId(1), group="g", max_messages=1, auto_ack=1),  # type: ignore[arg-type]
        Lease(queue_id=QueueId(1), group="g", max_messages=1.5),  # type: ignore[arg-type]
        AckBatch(queue_id=QueueId(1), group="g", ranges=((1.5, 1, 1),)),  # type: ignore[arg-type]
    ],
    ids=repr,
)
def test_what_could_not_be_read_is_not_written(command: Command) -> None:
    with pytest.raises(BadValue):
        codec.encode_command(command)


def test_a_text_that_is_no_unicode_is_not_written() -> None:
    with pytest.raises(BadValue):
        codec.encode_answer(Answer(samples.PLACE, Failed(BadValue(field="\ud800", problem="is odd"))))


def test_an_error_without_a_code_is_not_written() -> None:
    class Homemade(HoldfastError):
        pass

    for error in (Misuse("no leaf"), Homemade("no code")):
        with pytest.raises(BadValue):
            codec.encode_answer(Answer(samples.PLACE, Failed(error)))


def test_a_fact_of_another_type_is_not_written() -> None:
    with pytest.raises(BadValue):
        codec.encode_answer(Answer(samples.PLACE, Failed(BadValue(field="x", problem=5))))


def tag_of(kind: type[Command]) -> int:
    return next(tag for tag, form in tags.COMMANDS.items() if form.type is kind)


def test_a_key_that_is_there_twice_is_a_bad_frame() -> None:
    pair = b"\xa6queues\x01"
    head = bytes([0x92, tag_of(SetLimits)])
    assert codec.decode_command(head + b"\x81" + pair, b"") == SetLimits(changes=(("queues", 1),))
    with pytest.raises(BadFrame):
        codec.decode_command(head + b"\x82" + pair + pair, b"")


def test_a_flag_is_not_read_as_a_number() -> None:
    with pytest.raises(BadFrame):
        codec.decode_command(msgpack.packb([tag_of(SetLimits), {"queues": True}]), b"")


def test_an_extension_type_is_not_read_as_nothing() -> None:
    assert codec.decode_command(msgpack.packb([tag_of(Touch), 1, None]), b"") == Touch(queue_id=QueueId(1))
    with pytest.raises(BadFrame):
        codec.decode_command(msgpack.packb([tag_of(Touch), 1, msgpack.ExtType(1, b"")]), b"")


# The log -----------------------------------------------------------------------------------------------


def test_envelopes_follow_each_other_in_an_entry() -> None:
    envelopes = [Envelope(principal="local", command=command) for command in samples.COMMANDS]
    data = memoryview(b"before" + b"".join(map(codec.encode_envelope, envelopes)))
    at = 6
    found = []
    while at < len(data):
        envelope, at = codec.decode_envelope(data, at)
        found.append(envelope)
    assert found == envelopes


def test_a_body_from_the_log_is_a_slice_of_it() -> None:
    data = codec.encode_envelope(Envelope(principal="local", command=samples.PRODUCE))
    produce = codec.decode_envelope(memoryview(data), 0)[0].command
    assert isinstance(produce, Produce) and isinstance(produce.body, memoryview)
    assert produce.body.obj is data


def test_an_entry_that_ends_early_is_a_bad_frame() -> None:
    data = codec.encode_envelope(Envelope(principal="local", command=samples.PRODUCE))
    for size in range(len(data)):
        with pytest.raises(BadFrame):
            codec.decode_envelope(memoryview(data)[:size], 0)


def test_a_body_longer_than_its_command_takes_is_a_bad_frame() -> None:
    data = bytearray(codec.encode_envelope(Envelope(principal="local", command=samples.PRODUCE)))
    header_bytes, body_bytes = struct.unpack_from(">II", data)
    struct.pack_into(">II", data, 0, header_bytes, body_bytes + 1)
    with pytest.raises(BadFrame):
        codec.decode_envelope(memoryview(bytes(data) + b"x"), 0)


# Frames of a connection --------------------------------------------------------------------------------


def test_a_misuse_keeps_the_id_of_its_request() -> None:
    header = msgpack.packb([tags.REQUEST, 9, 0, b"", 0, 0, lease(max_messages=0)])
    unusable = codec.decode_from_client(header, b"")
    assert isinstance(unusable, Unusable)
    assert unusable.request_id == 9 and isinstance(unusable.error, BadValue)


def test_a_session_of_another_length_is_a_misuse() -> None:
    header = msgpack.packb([tags.REQUEST, 9, 0, b"short", 0, 0, lease()])
    assert isinstance(codec.decode_from_client(header, b""), Unusable)


def test_each_side_refuses_what_only_the_other_sends() -> None:
    for message in samples.FRAMES:
        header, parts = codec.encode_message(message)
        other = codec.decode_from_node if isinstance(message, get_args(FromClient)) else codec.decode_from_client
        with pytest.raises(BadFrame):
            other(header, b"".join(parts))


def test_a_wrong_value_in_a_nodes_answer_is_a_bad_frame() -> None:
    header, _ = codec.encode_message(Answered(1, Answer(samples.PLACE, SAMPLE_QUEUE)))
    fields = msgpack.unpackb(header)
    assert "max_ack_holes" in fields[10]
    fields[10] = {"max_ack_holes": 0}
    with pytest.raises(BadFrame):
        codec.decode_from_node(msgpack.packb(fields), b"")


def test_the_text_of_an_error_travels_only_where_its_facts_do_not_make_it() -> None:
    plain, told = samples.FRAMES[5], samples.FRAMES[6]
    assert msgpack.unpackb(codec.encode_message(plain)[0]) == [6, 10, [302, None, "n2"]]
    header, _ = codec.encode_message(told)
    assert msgpack.unpackb(header) == [6, 11, [106, "at position 3: what is this?", 3]]
    read = codec.decode_from_node(header, b"")
    assert isinstance(read, Declined) and read.error.message == told.error.message


def test_a_querys_answer_has_position_minus_one() -> None:
    answer = Answer(Place(5, -1, 6), Done())
    assert codec.decode_answer(*codec.encode_answer(answer)) == answer


def test_an_answer_says_which_log_its_index_is_of() -> None:
    assert Place(5, 0, 6).log == THE_LOG
    answer = Answer(Place(5, 0, 6, LogId(7)), Done())
    header, body = codec.encode_answer(answer)
    assert msgpack.unpackb(header)[:4] == [7, 5, 0, 6]
    assert codec.decode_answer(header, body) == answer
    for log in (-1, True, None, 2**63):
        with pytest.raises(BadFrame):
            codec.decode_answer(msgpack.packb([log, 5, 0, 6, 97]), b"")
        with pytest.raises(BadValue):
            codec.encode_answer(Answer(Place(5, 0, 6, log), Done()))  # type: ignore[arg-type]


def test_a_lease_of_10_000_single_messages_fits_one_frame() -> None:
    columns, body = pack([MessageParts(b"x" * 256)])
    batches = tuple(MessageBatch(n, 0, 1, "svc", n, columns, body) for n in range(1, limits.LEASE_MESSAGES + 1))
    leased = Leased(lease_id=LeaseId(1), deadline_ms=1, grants=(), batches=batches)
    header, parts = codec.encode_message(Answered(1, Answer(samples.PLACE, leased)))
    assert len(header) < limits.FRAME_HEADER_BYTES
    assert codec.decode_from_node(header, b"".join(parts)) == Answered(1, Answer(samples.PLACE, leased))


def test_a_page_of_10_000_dead_rows_is_read() -> None:
    listed = DeadListed(rows=(samples.DEAD_ROW,) * 10_000, matched=10_000, scanned=10_000, next_token=b"")
    header, body = codec.encode_answer(Answer(samples.PLACE, listed))
    assert codec.decode_answer(header, body).reply == listed


def test_the_newest_version_that_both_speak_is_chosen() -> None:
    assert choose_version(Hello((1, 1), "c")) == 1
    assert choose_version(Hello((0, 9), "c")) == 1
    for versions in ((2, 3), (0, 0)):
        with pytest.raises(VersionUnsupported):
            choose_version(Hello(versions, "c"))


def test_a_request_is_nested_as_deep_as_is_allowed_and_no_deeper() -> None:
    """The deepest of ours: a settings map in a group in a described queue, an array of a publish."""

    def depth(tree: Any) -> int:
        if isinstance(tree, dict):
            tree = list(tree.values())
        return 1 + max(map(depth, tree), default=0) if isinstance(tree, list) else 0

    requests = [Request(request_id=1, command=command) for command in samples.COMMANDS]
    answered = [Answered(1, Answer(samples.PLACE, reply)) for reply in (*samples.REPLIES, Settled(count=1))]
    sent: list[Request | Answered] = [*requests, *answered]
    deepest = [depth(msgpack.unpackb(codec.encode_message(message)[0])) for message in sent]
    assert max(deepest) == limits.DEPTH_MAX


def test_a_header_is_refused_for_its_size_before_it_is_built() -> None:
    deep = msgpack.packb([1, [[[[0]]]]]) + bytes(2_000)
    with pytest.raises(BadFrame, match="deeper"):
        codec.decode_command(deep, b"")
    many = msgpack.packb([0] * (limits.ELEMENTS_MAX + 1))
    with pytest.raises(BadFrame, match="too many"):
        codec.decode_command(many, b"")
    with pytest.raises(BadFrame, match="float"):
        codec.decode_command(msgpack.packb([1.5] * 1_000), b"")


def test_a_long_text_is_read_after_the_scan() -> None:
    header = msgpack.packb([1, "x" * 2_000])
    with pytest.raises(BadValue):
        codec.decode_command(header, b"")
    assert codec.decode_command(msgpack.packb([1, "x" * 200]), b"") == OpenSession(consumer_id="x" * 200)
