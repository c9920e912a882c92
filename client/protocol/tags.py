"""Every tag number, and the fields that stand behind it: the one table of wire and log.

A tag is permanent. A value that goes out of use moves its number to `RETIRED`; a field that is added, taken
away or changed in kind makes a new tag. So is what a missing setting means: the defaults of `QueueSettings`
are part of the format. `docs/protocol.md` shows this table to people, and a test compares the two.
"""

from dataclasses import replace
from typing import Any, get_args

from holdfast.client.protocol import commands, messages, queries, replies
from holdfast.client.protocol.limits import U32_MAX, U63_MAX
from holdfast.client.protocol.quick import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """How one field stands on the wire.

    `wrong`, `load` and `dump` are expressions that the codec compiles into the reader and the writer of each
    form: `{v}` is the field as msgpack has it, `{x}` the field of our value. `batch` marks the eight columns
    of a batch, which stand in the form itself, and `body` what takes its bytes from the frame's body.
    """

    name: str
    wrong: str
    load: str = "{v}"
    dump: str = "{x}"
    batch: bool = False
    body: bool = False


def number(low: int, high: int, name: str) -> Kind:
    return Kind(name, f"type({{v}}) is not int or not {low} <= {{v}} <= {high}")


def word(*words: str) -> Kind:
    """One of a few texts."""
    return Kind(" or ".join(f'"{each}"' for each in words), f"type({{v}}) is not str or {{v}} not in {words!r}")


def optional(kind: Kind) -> Kind:
    """The same, or nil."""
    return Kind(
        f"{kind.name} or nil",
        f"{{v}} is not None and ({kind.wrong})",
        kind.load if kind.load == "{v}" else f"None if {{v}} is None else {kind.load}",
        kind.dump if kind.dump == "{x}" else f"None if {{x}} is None else {kind.dump}",
    )


def packed(name: str, wide: int, load: str, dump: str) -> Kind:
    """Rows of `wide` big-endian u64 in one bin, so that 65,536 of them cost one element."""
    wrong = f"type({{v}}) is not bytes or len({{v}}) % {8 * wide} or ({{v}} and max({{v}}[::8]) > 127)"
    return Kind(name, wrong, load, dump)


def rows(form: str) -> Kind:
    load, dump = f"load_rows({form!r}, {{v}})", f"dump_rows({form!r}, {{x}})"
    return Kind(f"array of {form}", NO_ARRAY, load, dump)


NO_ARRAY = "type({v}) is not tuple"
NO_MAP = "type({v}) is not dict"
NO_U63 = f"type({{v}}) is not int or not 0 <= {{v}} <= {U63_MAX}"


NUMBER = number(0, U63_MAX, "u63")
SMALL = number(0, U32_MAX, "u32")
OFFSET = number(0, 2**31 - 1, "u31")
POSITION = number(-1, U32_MAX, "u32 or -1")
FLAG = Kind("bool", "{v} is not True and {v} is not False")
TEXT = Kind("str", "type({v}) is not str")
BYTES = Kind("bin", "type({v}) is not bytes")
NO_BYTES = Kind("empty bin", "type({v}) is not bytes or {v}")  # reserved
NOTHING = Kind("empty array", "type({v}) is not tuple or {v}")  # reserved
HASH = Kind("bin", "type({v}) is not bytes or len({v}) != 16")
START = Kind("str or u63", f"type({{v}}) is not str and ({NO_U63})")
TEXTS = Kind("array of str", NO_ARRAY, "load_texts({v})", "dump_texts({x})")
TXN = Kind("txn", "type({v}) is not str and type({v}) is not tuple", "load_txn({v})", "dump_txn({x})")
PAIRS = packed("pairs", 2, "tuple(PAIR.iter_unpack({v}))", "pack_rows({x})")
TRIPLES = packed("triples", 3, "tuple(TRIPLE.iter_unpack({v}))", "pack_rows({x})")
GRANTS = packed("quints", 5, "load_grants({v})", "dump_grants({x})")
REFUSALS = packed("quads", 4, "load_refusals({v})", "dump_refusals({x})")
NUMBERED = Kind("array of str, u63, …", NO_ARRAY, "load_named({v}, int)", "dump_named({x}, int)")
HEADERS = Kind("array of str, str, …", NO_ARRAY, "load_named({v}, str)", "dump_named({x}, str)")
FACTS = Kind("array of str, fact, …", NO_ARRAY, "load_named({v}, *FACT)", "dump_named({x}, *FACT)")
LIMITS = Kind("map", NO_MAP, "load_limits({v})", "dump_limits({x})")
QUEUE_SETTINGS = Kind("settings", NO_MAP, "load_queue_settings({v})", "dump_settings({x})")
GROUP_SETTINGS = Kind("settings", NO_MAP, "load_group_settings({v})", "dump_settings({x})")
QUEUE_CHANGES = Kind("settings", NO_MAP, "load_changes({v}, QUEUE_SETTINGS)", "dump_changes({x})")
GROUP_CHANGES = replace(QUEUE_CHANGES, load="load_changes({v}, GROUP_SETTINGS)")
PARTS = Kind("parts", NO_ARRAY, "load_parts({v})", "dump_parts({x})")
ERROR = Kind("error", NO_ARRAY, "load_error({v})", "dump_error({x})")
ROLE = word(*get_args(replies.Role))
FSYNC = word(*get_args(replies.Fsync))
VERSIONS = Kind("array of u32, u32", NO_ARRAY, "load_versions({v})", "tuple({x})")

COLUMNS = Kind("columns", "", batch=True, body=True)  # eight fields: those of COLUMN_FIELDS
PAYLOAD = Kind("size u31", OFFSET.wrong, "take", "put", body=True)
BATCHES = Kind("batches", "type({v}) is not bytes", "load_batches", "dump_batches", body=True)
DEAD_ROWS = Kind("array of DeadRow", NO_ARRAY, "load_dead_rows", "dump_dead_rows", body=True)
ITEMS = Kind("array of commands", NO_ARRAY, "load_items", "dump_items", body=True)

COLUMN_FIELDS: dict[str, Kind] = {
    "ends": BYTES,
    "start": OFFSET,
    "key_ends": BYTES,
    "header_ends": BYTES,
    "delays": BYTES,
    "not_befores": BYTES,
    "ttls": BYTES,
    "lanes": NO_BYTES,
}


@dataclass(frozen=True, slots=True)
class Form:
    """One type's fields in order. `log_only` are those that the log has behind them and the wire has not."""

    type: type[Any]
    fields: dict[str, Kind]
    log_only: dict[str, Kind]


def form(kind: type[Any], log_only: dict[str, Kind] | None = None, /, **fields: Kind) -> Form:
    return Form(kind, fields, log_only or {})


RETIRED = frozenset({105})  # numbers that are never given again

COMMANDS: dict[int, Form] = {
    1: form(commands.OpenSession, consumer_id=TEXT),
    2: form(commands.Touch, queue_id=NUMBER, group=optional(TEXT)),
    3: form(commands.TimeStep, by_ms=NUMBER),
    4: form(commands.SetLimits, changes=LIMITS),
    5: form(commands.SetRules, version=NUMBER),
    6: form(commands.CreateQueue, name=TEXT, settings=QUEUE_SETTINGS, groups=TEXTS),
    7: form(commands.UpdateQueue, queue_id=NUMBER, changes=QUEUE_CHANGES),
    8: form(commands.DeleteQueue, queue_id=NUMBER),
    9: form(commands.PurgeQueue, queue_id=NUMBER, group=optional(TEXT), in_flight=FLAG, dead=FLAG),
    10: form(commands.CreateGroup, queue_id=NUMBER, group=TEXT, start=START, settings=GROUP_SETTINGS),
    11: form(commands.UpdateGroup, queue_id=NUMBER, group=TEXT, changes=GROUP_CHANGES),
    12: form(commands.DeleteGroup, queue_id=NUMBER, group=TEXT),
    13: form(commands.Seek, queue_id=NUMBER, group=TEXT, to=START, dead=FLAG),
    14: form(commands.ReportCursor, queue_id=NUMBER, reader=TEXT, version=NUMBER),
    15: form(commands.OpenProducer, queue_id=NUMBER, client_id=TEXT, nonce=BYTES),
    16: form(commands.ForgetProducer, queue_id=NUMBER, client_id=TEXT),
    17: form(
        commands.Produce,
        {"content_hash": HASH},
        queue_id=NUMBER,
        columns=COLUMNS,
        client_id=optional(TEXT),
        epoch=NUMBER,
        numbering_epoch=NUMBER,
        first_seq=NUMBER,
        after_seq=optional(NUMBER),
        done_below=optional(NUMBER),
    ),
    18: form(commands.Cancel, queue_id=NUMBER, versions=PAIRS),
    19: form(
        commands.Reschedule,
        queue_id=NUMBER,
        versions=PAIRS,
        delay_ms=optional(NUMBER),
        not_before_ms=optional(NUMBER),
    ),
    20: form(
        commands.Lease,
        queue_id=NUMBER,
        group=TEXT,
        max_messages=NUMBER,
        max_bytes=NUMBER,
        visibility_timeout_ms=optional(NUMBER),
        auto_ack=FLAG,
        wait_ms=NUMBER,
    ),
    21: form(commands.AckBatch, queue_id=NUMBER, group=TEXT, ranges=TRIPLES),
    22: form(
        commands.Nack,
        queue_id=NUMBER,
        group=TEXT,
        ranges=TRIPLES,
        delay_ms=optional(NUMBER),
        not_before_ms=optional(NUMBER),
        error=optional(TEXT),
        dead=FLAG,
    ),
    23: form(commands.Release, queue_id=NUMBER, group=TEXT, ranges=TRIPLES),
    24: form(
        commands.Extend,
        queue_id=NUMBER,
        group=TEXT,
        lease_id=NUMBER,
        visibility_timeout_ms=optional(NUMBER),
        begin=PAIRS,
    ),
    25: form(commands.Redrive, queue_id=NUMBER, group=TEXT, dead=TRIPLES),
    26: form(commands.RedriveToOrigin, queue_id=NUMBER, group=TEXT, versions=PAIRS),
    27: form(commands.DropDead, queue_id=NUMBER, group=TEXT, dead=TRIPLES),
    28: form(commands.Transaction, items=ITEMS),
    29: form(
        commands.Stage,
        {"content_hash": HASH},
        txn=TXN,
        part=SMALL,
        attempt=TEXT,
        chunk=SMALL,
        queue_id=NUMBER,
        expires_ms=NUMBER,
        columns=COLUMNS,
    ),
    30: form(commands.Publish, txn=TXN, parts=PARTS, fence=TEXT, ops=NOTHING),
    31: form(commands.Abort, txn=TXN, attempts=optional(TEXTS)),
    32: form(commands.ForgetTxn, txn=TXN),
}
ITEM_TAGS = (17, 21, 22)  # what a Transaction is made of

QUERIES: dict[int, Form] = {
    64: form(queries.DescribeQueue, name=TEXT),
    65: form(queries.ListQueues, after=TEXT, limit=NUMBER),
    66: form(queries.ListGroups, queue_id=NUMBER),
    67: form(queries.Stats, queue_id=NUMBER, group=TEXT),
    68: form(queries.Peek, queue_id=NUMBER, group=optional(TEXT), from_version=NUMBER, limit=NUMBER),
    69: form(queries.Read, queue_id=NUMBER, from_version=NUMBER, to_version=NUMBER, max_bytes=NUMBER),
    70: form(
        queries.DeadLetters,
        queue_id=NUMBER,
        group=optional(TEXT),
        where=TEXT,
        limit=NUMBER,
        after=BYTES,
        scan=NUMBER,
        count_only=FLAG,
    ),
    71: form(queries.Explain, queue_id=NUMBER, group=TEXT, version=optional(NUMBER)),
    72: form(queries.ProducerState, queue_id=NUMBER, client_id=TEXT),
    73: form(queries.TxnStatus, txn=TXN),
    74: form(queries.History, queue_id=NUMBER, from_seq=NUMBER, limit=NUMBER),
    75: form(queries.FindByKey, queue_id=NUMBER, key=BYTES, from_version=NUMBER, limit=NUMBER, scan=NUMBER),
    76: form(queries.NodeStatus),
    77: form(queries.HandOver, target=optional(TEXT)),
    78: form(
        queries.FindMoved, queue_id=NUMBER, group=TEXT, where=TEXT, from_version=NUMBER, limit=NUMBER, scan=NUMBER
    ),
}

REPLIES: dict[int, Form] = {
    96: form(replies.Failed, error=ERROR),
    97: form(replies.Done),
    98: form(replies.Touched, more=FLAG),
    99: form(replies.QueueCreated, queue_id=NUMBER, log=NUMBER),
    100: form(replies.Purged, count=NUMBER),
    101: form(replies.Started, version=NUMBER, moved=FLAG),
    102: form(replies.ProducerOpened, epoch=NUMBER, high_water=NUMBER),
    103: form(replies.Produced, first_version=NUMBER, count=NUMBER, replayed=FLAG),
    104: form(replies.VersionsChanged, outcomes=rows("VersionOutcome")),
    106: form(replies.Settled, count=NUMBER, refused=REFUSALS),
    107: form(replies.Extended, deadline_ms=NUMBER, held=PAIRS),
    108: form(replies.Redriven, count=NUMBER, skipped=NUMBER),
    109: form(replies.Committed, versions=TRIPLES, replayed=FLAG),
    110: form(replies.Staged, replayed=FLAG),
    111: form(replies.Aborted, chunks=NUMBER),
    112: form(
        replies.QueueDescribed,
        queue_id=NUMBER,
        log=NUMBER,
        name=TEXT,
        settings=QUEUE_SETTINGS,
        tail_version=NUMBER,
        lowest_version=NUMBER,
        stored_messages=NUMBER,
        stored_bytes=NUMBER,
        groups=rows("GroupDescribed"),
        readers=rows("ReaderDescribed"),
    ),
    113: form(replies.QueuesListed, queues=NUMBERED),
    114: form(replies.GroupsListed, groups=rows("GroupDescribed")),
    115: form(
        replies.GroupStats,
        produced=NUMBER,
        ready=NUMBER,
        delayed=NUMBER,
        in_flight=NUMBER,
        acked=NUMBER,
        dead=NUMBER,
        moved=NUMBER,
        discarded=NUMBER,
        cancelled=NUMBER,
        purged=NUMBER,
        trimmed=NUMBER,
        expired=NUMBER,
        tail_version=NUMBER,
        holes=NUMBER,
        oldest_ms=optional(NUMBER),
    ),
    116: form(replies.Messages, batches=BATCHES, next_version=optional(NUMBER)),
    117: form(replies.DeadListed, rows=DEAD_ROWS, matched=NUMBER, scanned=NUMBER, next_token=BYTES),
    118: form(replies.Explained, reason=TEXT, facts=FACTS),
    119: form(replies.ProducerDescribed, epoch=NUMBER, high_water=NUMBER, last_used_ms=NUMBER, window=NUMBER),
    120: form(
        replies.TxnDescribed,
        state=TEXT,
        staged_bytes=NUMBER,
        expires_at_ms=optional(NUMBER),
        versions=TRIPLES,
    ),
    121: form(replies.HistoryListed, rows=rows("HistoryRow"), next_seq=optional(NUMBER)),
    122: form(replies.VersionsFound, versions=PAIRS, next_version=optional(NUMBER)),
    123: form(
        replies.NodeDescribed,
        node=TEXT,
        cluster_id=TEXT,
        address=TEXT,
        role=ROLE,
        term=NUMBER,
        leader=optional(TEXT),
        leader_address=optional(TEXT),
        applied=NUMBER,
        committed=NUMBER,
        last=NUMBER,
        time_ms=NUMBER,
        fsync=FSYNC,
        pid=NUMBER,
        members=rows("MemberDescribed"),
    ),
    124: form(
        replies.Leased,
        lease_id=NUMBER,
        deadline_ms=NUMBER,
        group_generation=NUMBER,
        counts_begun=FLAG,
        grants=GRANTS,
        replayed=FLAG,
        batches=BATCHES,
    ),
}

# Rows inside a reply: where one stands tells what it is, so they need no tag.
ROWS: dict[str, Form] = {
    "VersionOutcome": form(replies.VersionOutcome, first=NUMBER, last=NUMBER, outcome=TEXT, group=TEXT),
    "GroupDescribed": form(replies.GroupDescribed, name=TEXT, start=NUMBER, settings=GROUP_SETTINGS),
    "ReaderDescribed": form(replies.ReaderDescribed, name=TEXT, version=NUMBER, lag=NUMBER, reported_ms=NUMBER),
    "DeadRow": form(
        replies.DeadRow,
        group=TEXT,
        dead_seq=NUMBER,
        version=NUMBER,
        reason=TEXT,
        attempts=NUMBER,
        delivery_count=NUMBER,
        last_error=optional(TEXT),
        first_delivered_ms=optional(NUMBER),
        last_delivered_ms=optional(NUMBER),
        died_ms=NUMBER,
        consumer_id=optional(TEXT),
        client_id=TEXT,
        client_seq=NUMBER,
        key=optional(TEXT),
        headers=HEADERS,
        payload=PAYLOAD,
        move_failed=FLAG,
    ),
    "HistoryRow": form(
        replies.HistoryRow,
        seq=NUMBER,
        kind=TEXT,
        time_ms=NUMBER,
        first=NUMBER,
        last=NUMBER,
        group=TEXT,
        lease_id=NUMBER,
        consumer_id=TEXT,
        error=TEXT,
    ),
    "MemberDescribed": form(
        replies.MemberDescribed,
        name=TEXT,
        client_address=optional(TEXT),
        voter=FLAG,
        connected=FLAG,
        lag=optional(NUMBER),
    ),
}

# The first field of a frame's header. A Request, an Inquiry and an Answered go on with a command, a query or
# a reply, so that the codec writes them by hand; the others are forms like any other.
HELLO, WELCOME, REQUEST, INQUIRY, ANSWERED, DECLINED, PING, PONG, WITHDRAW = range(1, 10)
FRAMES: dict[int, Form] = {
    HELLO: form(messages.Hello, versions=VERSIONS, client=TEXT),
    WELCOME: form(messages.Welcome, version=NUMBER, cluster_id=TEXT, node=TEXT),
    DECLINED: form(messages.Declined, request_id=NUMBER, error=ERROR),
    PING: form(messages.Ping, token=NUMBER),
    PONG: form(messages.Pong, token=NUMBER),
    WITHDRAW: form(messages.Withdraw, request_id=NUMBER),
}
