"""Hypothesis strategies for every value of the protocol, odd ones included.

`COMMANDS`, `QUERIES` and `REPLIES` have one strategy for each member of their union, by type, so that a test
can take one, some or all; `commands()`, `any_queries()` and `replies()` draw from all of them.
"""

import struct
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, get_args

from hypothesis import strategies as st

from holdfast.client.protocol import commands as c
from holdfast.client.protocol import errors, limits
from holdfast.client.protocol import queries as q
from holdfast.client.protocol import replies as r
from holdfast.client.protocol.columns import MessageParts, encode_headers, pack
from holdfast.client.protocol.messages import Answered, Declined, Hello, Inquiry, Ping, Pong, Request, Welcome, Withdraw
from holdfast.client.protocol.values import (
    GROUP_SETTINGS,
    QUEUE_SETTINGS,
    Backoff,
    Columns,
    GroupSettings,
    Job,
    LeaseId,
    LogId,
    Place,
    QueueId,
    QueueSettings,
    SessionId,
    Setting,
    Stream,
    TxnId,
    Version,
)

U63 = limits.U63_MAX
BIG = U63 >> 8
EDGES = (0, 1, 127, 128, 255, 256, 65_535, 65_536, 2**31 - 1, 2**32 - 1, 2**32, 2**48, BIG, U63)


def numbers(low: int = 0, high: int = U63) -> st.SearchStrategy[int]:
    """Whole numbers, often those where an encoding changes its width."""
    edges = sorted({edge for edge in (low, high, *EDGES) if low <= edge <= high})
    return st.one_of(st.sampled_from(edges), st.integers(low, high))


def texts(max_bytes: int, min_size: int = 1) -> st.SearchStrategy[str]:
    """Any text of so many bytes in UTF-8."""
    free = st.text(st.characters(exclude_categories=["Cs"]), min_size=min_size, max_size=min(max_bytes, 40))
    longest = st.sampled_from(["x" * max_bytes, "é" * (max_bytes // 2)])
    return st.one_of(free, longest).filter(lambda text: len(text.encode()) <= max_bytes)


def optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), strategy)


names = st.one_of(
    st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._/-]{0,20}\Z").map(lambda name: name.rstrip("\n")),
    st.sampled_from(["default", "0", "a" * limits.NAME_BYTES]),
)
references = st.one_of(names, st.text(st.characters(max_codepoint=127), max_size=limits.NAME_BYTES))
queue_ids = numbers().map(QueueId)
logs = numbers().map(LogId)
client_ids = texts(limits.CLIENT_ID_BYTES)
sessions = st.one_of(st.just(b""), st.binary(min_size=16, max_size=16)).map(SessionId)
hashes = st.binary(min_size=16, max_size=16)
milliseconds = numbers(0, BIG)


@st.composite
def ranges(draw: st.DrawFn, max_size: int = 20, named_max: int = limits.VERSIONS_NAMED) -> tuple[tuple[int, int], ...]:
    """Ascending ranges of versions, apart from each other, with so many versions in all."""
    bounds = sorted(draw(st.sets(numbers(1), min_size=2, max_size=2 * max_size)))
    longest = named_max // max_size
    found = zip(bounds[::2], bounds[1::2], strict=False)
    return tuple((first, min(last, first + longest - 1)) for first, last in found)


@st.composite
def settle_ranges(draw: st.DrawFn) -> tuple[tuple[int, int, int], ...]:
    found = draw(st.lists(st.tuples(numbers(), numbers(1), numbers(1)), min_size=1, max_size=20))
    return apart((lease_id, min(first, last), max(first, last)) for lease_id, first, last in found)


def apart(ranges: Iterable[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Those of the ranges that a settle may name: for one lease they ascend and do not overlap."""
    ends: dict[int, int] = {}
    kept = []
    for lease_id, first, last in ranges:
        if first > ends.get(lease_id, 0):
            ends[lease_id] = last
            kept.append((lease_id, first, last))
    return tuple(kept)


@st.composite
def dead_ranges(draw: st.DrawFn) -> tuple[tuple[int, int, int], ...]:
    return tuple((first, last, draw(numbers())) for first, last in draw(ranges()))


def triples() -> st.SearchStrategy[tuple[tuple[int, int, int], ...]]:
    return st.lists(st.tuples(numbers(), numbers(), numbers()), max_size=10).map(tuple)


# Batches -----------------------------------------------------------------------------------------------

header_names = texts(60).filter(lambda name: not name.startswith("holdfast-"))
messages = st.builds(
    MessageParts,
    payload=st.binary(max_size=60),
    key=optional(texts(60, min_size=0)),
    headers=optional(st.dictionaries(header_names, texts(60, min_size=0), max_size=3)),
    delay_ms=optional(milliseconds),
    not_before_ms=optional(milliseconds),
    ttl_ms=optional(numbers(1, BIG)),
)
plain_messages = st.builds(MessageParts, payload=st.binary(max_size=60))


@st.composite
def batches(draw: st.DrawFn) -> tuple[Columns, bytes]:
    """Columns with their body; some begin above 0, as a slice of an Arrow array does."""
    kind = draw(st.sampled_from([plain_messages, messages]))
    columns, body = pack(draw(st.lists(kind, min_size=1, max_size=6)))
    start = draw(st.sampled_from([0, 0, 1, 1_000_000]))
    ends = struct.unpack(f"<{columns.count}i", columns.ends)
    shifted = struct.pack(f"<{columns.count}i", *(end + start for end in ends))
    return replace(columns, ends=shifted, start=start), body


@st.composite
def message_batches(draw: st.DrawFn) -> r.MessageBatch:
    """A batch as a consumer gets it: it may be a moved one, with reserved headers."""
    columns, body = draw(batches())
    if draw(st.booleans()) and not columns.header_ends:
        cell = encode_headers({"holdfast-reason": draw(texts(20))}, reserved=True)
        ends = [len(cell)] * columns.count
        columns = replace(columns, header_ends=struct.pack(f"<{columns.count}i", *ends))
        body += cell
    return r.MessageBatch(
        first=draw(numbers()),
        generation=draw(numbers()),
        enqueued_ms=draw(numbers()),
        client_id=draw(texts(limits.CLIENT_ID_BYTES, min_size=0)),
        first_seq=draw(numbers()),
        columns=columns,
        body=body,
    )


many_batches = st.lists(message_batches(), max_size=4).map(tuple)

# Settings ----------------------------------------------------------------------------------------------

backoffs = st.builds(
    Backoff,
    kind=st.sampled_from(["none", "fixed", "exponential"]),
    base_ms=milliseconds,
    cap_ms=milliseconds,
)


def setting(rule: Setting) -> st.SearchStrategy[Any]:
    kinds: dict[str, st.SearchStrategy[Any]] = {
        "number": numbers(rule.low, max(rule.low, rule.high)),
        "word": st.sampled_from(rule.words or ("",)),
        "flag": st.booleans(),
        "queue": names,
        "backoff": backoffs,
    }
    return optional(kinds[rule.kind]) if rule.optional else kinds[rule.kind]


def changes(rules: dict[str, Setting]) -> st.SearchStrategy[tuple[tuple[str, Any], ...]]:
    """Some settings in some order."""
    every = st.fixed_dictionaries({}, optional={name: setting(rule) for name, rule in rules.items()})
    return every.flatmap(lambda found: st.permutations(list(found.items()))).map(tuple)


def _whole_queue(given: tuple[tuple[str, Any], ...]) -> QueueSettings:
    """Settings that fit each other: those that belong together are made to."""
    found = dict(given)
    found["max_lease_ms"] = max(found.get("max_lease_ms", 43_200_000), found.get("visibility_timeout_ms", 30_000))
    if found.get("dlq_strategy") == "move":
        found["dlq_queue"] = found.get("dlq_queue") or "dead"
    return QueueSettings(**found)


queue_settings = changes(QUEUE_SETTINGS).map(_whole_queue)
group_settings = changes(GROUP_SETTINGS).map(lambda given: GroupSettings(**dict(given)))
txns: st.SearchStrategy[TxnId] = st.one_of(
    st.builds(Stream, app=texts(limits.TXN_ID_BYTES), seq=numbers()),
    st.builds(Job, id=texts(limits.TXN_ID_BYTES)),
)
attempts = texts(c.ATTEMPT_BYTES)
starts = st.one_of(st.sampled_from(["earliest", "latest"]), numbers(1))

# Commands ----------------------------------------------------------------------------------------------


@st.composite
def produces(draw: st.DrawFn, numbered: bool = True, hashed: bool = False) -> c.Produce:
    columns, body = draw(batches())
    client_id = draw(optional(client_ids)) if numbered else None
    return c.Produce(
        queue_id=draw(queue_ids),
        columns=columns,
        body=body,
        client_id=client_id,
        epoch=draw(numbers()),
        numbering_epoch=draw(numbers()),
        first_seq=draw(numbers(1, U63 - 1_000_000)),
        after_seq=draw(optional(numbers())),
        done_below=draw(optional(numbers())),
        content_hash=draw(hashes) if hashed else b"",
    )


@st.composite
def stages(draw: st.DrawFn, hashed: bool = False) -> c.Stage:
    columns, body = draw(batches())
    return c.Stage(
        txn=draw(txns),
        part=draw(numbers(0, limits.U32_MAX)),
        attempt=draw(attempts),
        chunk=draw(numbers(0, limits.U32_MAX)),
        queue_id=draw(queue_ids),
        expires_ms=draw(numbers(1, BIG)),
        columns=columns,
        body=body,
        content_hash=draw(hashes) if hashed else b"",
    )


@st.composite
def whens(draw: st.DrawFn, needed: bool = False) -> dict[str, int]:
    """`delay_ms`, `not_before_ms`, or neither where that is allowed."""
    name = draw(st.sampled_from(["delay_ms", "not_before_ms", *([] if needed else [""])]))
    return {name: draw(milliseconds)} if name else {}


@st.composite
def nacks(draw: st.DrawFn) -> c.Nack:
    return c.Nack(
        queue_id=draw(queue_ids),
        group=draw(references),
        ranges=draw(settle_ranges()),
        error=draw(optional(texts(limits.ERROR_TEXT_BYTES, min_size=0))),
        dead=draw(st.booleans()),
        **draw(whens()),
    )


@st.composite
def reschedules(draw: st.DrawFn) -> c.Reschedule:
    when = draw(whens(needed=True))
    return c.Reschedule(queue_id=draw(queue_ids), versions=draw(ranges()), **when)


ack_batches = st.builds(c.AckBatch, queue_id=queue_ids, group=references, ranges=settle_ranges())


def transactions(hashed: bool = False) -> st.SearchStrategy[c.Transaction]:
    items = st.one_of(ack_batches, nacks(), produces(numbered=False, hashed=hashed))
    return st.builds(c.Transaction, items=st.lists(items, min_size=1, max_size=5).map(tuple))


parts = st.builds(
    c.Part,
    part=numbers(0, limits.U32_MAX),
    attempt=attempts,
    chunks=numbers(0, 100),
    count=numbers(),
    digest=numbers(0, 2**64 - 1),
)

COMMANDS: dict[type[Any], st.SearchStrategy[Any]] = {
    c.OpenSession: st.builds(c.OpenSession, consumer_id=texts(limits.CONSUMER_ID_BYTES, min_size=0)),
    c.Touch: st.builds(c.Touch, queue_id=queue_ids, group=optional(references)),
    c.TimeStep: st.builds(c.TimeStep, by_ms=numbers(1, BIG)),
    c.SetLimits: st.builds(
        c.SetLimits,
        changes=st.dictionaries(st.sampled_from(c.LIMITS), numbers(1)).map(lambda found: tuple(found.items())),
    ),
    c.SetRules: st.builds(c.SetRules, version=numbers(1, limits.U32_MAX)),
    c.CreateQueue: st.builds(
        c.CreateQueue,
        name=names,
        settings=queue_settings,
        groups=st.lists(names, max_size=4, unique=True).map(tuple),
    ),
    c.UpdateQueue: st.builds(c.UpdateQueue, queue_id=queue_ids, changes=changes(QUEUE_SETTINGS)),
    c.DeleteQueue: st.builds(c.DeleteQueue, queue_id=queue_ids),
    c.PurgeQueue: st.builds(
        c.PurgeQueue,
        queue_id=queue_ids,
        group=optional(references),
        in_flight=st.booleans(),
        dead=st.booleans(),
    ),
    c.CreateGroup: st.builds(c.CreateGroup, queue_id=queue_ids, group=names, start=starts, settings=group_settings),
    c.UpdateGroup: st.builds(c.UpdateGroup, queue_id=queue_ids, group=references, changes=changes(GROUP_SETTINGS)),
    c.DeleteGroup: st.builds(c.DeleteGroup, queue_id=queue_ids, group=references),
    c.Seek: st.builds(c.Seek, queue_id=queue_ids, group=references, to=starts, dead=st.booleans()),
    c.ReportCursor: st.builds(c.ReportCursor, queue_id=queue_ids, reader=names, version=numbers()),
    c.OpenProducer: st.builds(
        c.OpenProducer, queue_id=queue_ids, client_id=client_ids, nonce=st.binary(min_size=16, max_size=16)
    ),
    c.ForgetProducer: st.builds(c.ForgetProducer, queue_id=queue_ids, client_id=client_ids),
    c.Produce: produces(),
    c.Cancel: st.builds(c.Cancel, queue_id=queue_ids, versions=ranges()),
    c.Reschedule: reschedules(),
    c.Lease: st.builds(
        c.Lease,
        queue_id=queue_ids,
        group=references,
        max_messages=numbers(1, limits.LEASE_MESSAGES),
        max_bytes=numbers(1, limits.FRAME_BODY_BYTES),
        visibility_timeout_ms=optional(numbers(1, BIG)),
        auto_ack=st.booleans(),
        wait_ms=numbers(),
    ),
    c.AckBatch: ack_batches,
    c.Nack: nacks(),
    c.Release: st.builds(c.Release, queue_id=queue_ids, group=references, ranges=settle_ranges()),
    c.Extend: st.builds(
        c.Extend,
        queue_id=queue_ids,
        group=references,
        lease_id=numbers().map(LeaseId),
        visibility_timeout_ms=optional(numbers(1, BIG)),
        begin=st.one_of(st.just(()), ranges(named_max=U63)),
    ),
    c.Redrive: st.builds(c.Redrive, queue_id=queue_ids, group=references, dead=dead_ranges()),
    c.RedriveToOrigin: st.builds(c.RedriveToOrigin, queue_id=queue_ids, group=references, versions=ranges()),
    c.DropDead: st.builds(c.DropDead, queue_id=queue_ids, group=references, dead=dead_ranges()),
    c.Transaction: transactions(),
    c.Stage: stages(),
    c.Publish: st.builds(
        c.Publish,
        txn=txns,
        parts=st.lists(parts, max_size=5, unique_by=lambda part: part.part).map(tuple),
        fence=texts(limits.TXN_ID_BYTES, min_size=0),
    ),
    c.Abort: st.builds(c.Abort, txn=txns, attempts=optional(st.lists(attempts, max_size=4).map(tuple))),
    c.ForgetTxn: st.builds(c.ForgetTxn, txn=txns),
}

# As the log has them: the node that proposes has put the hash of their content in.
LOGGED: dict[type[Any], st.SearchStrategy[Any]] = COMMANDS | {
    c.Produce: produces(hashed=True),
    c.Transaction: transactions(hashed=True),
    c.Stage: stages(hashed=True),
}


def commands() -> st.SearchStrategy[c.Command]:
    return st.one_of(*COMMANDS.values())


def envelopes(command: st.SearchStrategy[c.Command] | None = None) -> st.SearchStrategy[c.Envelope]:
    return st.builds(
        c.Envelope,
        principal=texts(60, min_size=1),
        command=st.one_of(*LOGGED.values()) if command is None else command,
        session=sessions,
        request_seq=numbers(),
        done_below=numbers(),
    )


# Queries -----------------------------------------------------------------------------------------------

pages = numbers(1, q.PAGE_MAX)
scans = numbers(1, q.SCAN_MAX)

QUERIES: dict[type[Any], st.SearchStrategy[Any]] = {
    q.DescribeQueue: st.builds(q.DescribeQueue, name=names),
    q.ListQueues: st.builds(q.ListQueues, after=references, limit=pages),
    q.ListGroups: st.builds(q.ListGroups, queue_id=queue_ids),
    q.Stats: st.builds(q.Stats, queue_id=queue_ids, group=references),
    q.Peek: st.builds(q.Peek, queue_id=queue_ids, group=optional(references), from_version=numbers(1), limit=pages),
    q.Read: st.builds(
        q.Read,
        queue_id=queue_ids,
        from_version=numbers(1),
        to_version=numbers(1),
        max_bytes=numbers(1, limits.FRAME_BODY_BYTES),
    ),
    q.DeadLetters: st.builds(
        q.DeadLetters,
        queue_id=queue_ids,
        group=optional(references),
        where=texts(200, min_size=0),
        limit=pages,
        after=st.binary(max_size=40),
        scan=scans,
        count_only=st.booleans(),
    ),
    q.Explain: st.builds(q.Explain, queue_id=queue_ids, group=references, version=optional(numbers(1))),
    q.ProducerState: st.builds(q.ProducerState, queue_id=queue_ids, client_id=client_ids),
    q.TxnStatus: st.builds(q.TxnStatus, txn=txns),
    q.History: st.builds(q.History, queue_id=queue_ids, from_seq=numbers(1), limit=pages),
    q.FindByKey: st.builds(
        q.FindByKey,
        queue_id=queue_ids,
        key=st.binary(max_size=60),
        from_version=numbers(1),
        limit=pages,
        scan=scans,
    ),
    q.FindMoved: st.builds(
        q.FindMoved,
        queue_id=queue_ids,
        group=references,
        where=texts(200, min_size=0),
        from_version=numbers(1),
        limit=pages,
        scan=scans,
    ),
    q.NodeStatus: st.just(q.NodeStatus()),
    q.HandOver: st.builds(q.HandOver, target=st.none() | st.sampled_from(["n1", "n2"])),
}


def queries() -> st.SearchStrategy[q.Query]:
    """Those that the state answers."""
    return st.one_of(*(strategy for kind, strategy in QUERIES.items() if kind not in (q.NodeStatus, q.HandOver)))


def any_queries() -> st.SearchStrategy[q.AnyQuery]:
    return st.one_of(*QUERIES.values())


# Replies -----------------------------------------------------------------------------------------------

_FACTS: dict[type[Any], st.SearchStrategy[Any]] = {
    int: numbers(-U63),
    str: texts(60, min_size=0),
    bool: st.booleans(),
    type(None): st.none(),
}


def facts_of(kind: type[errors.HoldfastError]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            name: st.one_of(*(_FACTS[each] for each in get_args(annotation) or (annotation,)))
            for name, annotation in kind.__annotations__.items()
        }
    )


@st.composite
def failures(draw: st.DrawFn, kind: type[errors.HoldfastError] | None = None) -> errors.HoldfastError:
    """An error of any code, with its own text or with one that somebody gave it."""
    if kind is None:
        kind = draw(st.sampled_from(list(errors.BY_CODE.values())))
    return kind(draw(optional(texts(100, min_size=0))), **draw(facts_of(kind)))


def rows(of: type[Any], /, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(st.builds(of, **fields), max_size=4).map(tuple)


words = texts(30, min_size=0)
groups_described = rows(r.GroupDescribed, name=names, start=numbers(), settings=group_settings)
dead_rows = rows(
    r.DeadRow,
    group=words,
    dead_seq=numbers(),
    version=numbers(),
    reason=words,
    attempts=numbers(),
    delivery_count=numbers(),
    last_error=optional(words),
    first_delivered_ms=optional(numbers()),
    last_delivered_ms=optional(numbers()),
    died_ms=numbers(),
    consumer_id=optional(words),
    client_id=words,
    client_seq=numbers(),
    key=optional(words),
    headers=st.lists(st.tuples(words, words), max_size=3).map(tuple),
    payload=st.binary(max_size=60),
    move_failed=st.booleans(),
)
history_rows = rows(
    r.HistoryRow,
    seq=numbers(),
    kind=words,
    time_ms=numbers(),
    first=numbers(),
    last=numbers(),
    group=words,
    lease_id=numbers(),
    consumer_id=words,
    error=words,
)
_COUNTERS = (
    *("produced", "ready", "delayed", "in_flight", "acked", "dead", "moved", "discarded", "cancelled"),
    *("purged", "trimmed", "expired", "tail_version", "holes"),
)
facts = st.lists(st.tuples(words, st.one_of(st.none(), words, numbers(-U63), st.booleans())), max_size=5)

REPLIES: dict[type[Any], st.SearchStrategy[Any]] = {
    r.Failed: st.builds(r.Failed, error=failures()),
    r.Done: st.just(r.Done()),
    r.Touched: st.builds(r.Touched, more=st.booleans()),
    r.QueueCreated: st.builds(r.QueueCreated, queue_id=queue_ids, log=logs),
    r.Purged: st.builds(r.Purged, count=numbers()),
    r.Started: st.builds(r.Started, version=numbers().map(Version), moved=st.booleans()),
    r.ProducerOpened: st.builds(r.ProducerOpened, epoch=numbers(), high_water=numbers()),
    r.Produced: st.builds(r.Produced, first_version=numbers().map(Version), count=numbers(), replayed=st.booleans()),
    r.VersionsChanged: st.builds(
        r.VersionsChanged,
        outcomes=rows(r.VersionOutcome, first=numbers(), last=numbers(), outcome=words, group=words),
    ),
    r.Leased: st.builds(
        r.Leased,
        lease_id=numbers().map(LeaseId),
        deadline_ms=numbers(),
        grants=rows(r.Grant, first=numbers(), last=numbers(), delivery_count=numbers(), attempts=numbers()),
        replayed=st.booleans(),
        batches=many_batches,
    ),
    r.Settled: st.builds(
        r.Settled,
        count=numbers(),
        refused=rows(r.RefusedRange, lease_id=numbers(), first=numbers(), last=numbers(), code=numbers()),
    ),
    r.Extended: st.builds(r.Extended, deadline_ms=numbers(), held=st.lists(st.tuples(numbers(), numbers())).map(tuple)),
    r.Redriven: st.builds(r.Redriven, count=numbers(), skipped=numbers()),
    r.Committed: st.builds(r.Committed, versions=triples(), replayed=st.booleans()),
    r.Staged: st.builds(r.Staged, replayed=st.booleans()),
    r.Aborted: st.builds(r.Aborted, chunks=numbers()),
    r.QueueDescribed: st.builds(
        r.QueueDescribed,
        queue_id=queue_ids,
        log=logs,
        name=names,
        settings=queue_settings,
        tail_version=numbers(),
        lowest_version=numbers(),
        stored_messages=numbers(),
        stored_bytes=numbers(),
        groups=groups_described,
        readers=rows(r.ReaderDescribed, name=names, version=numbers(), lag=numbers(), reported_ms=numbers()),
    ),
    r.QueuesListed: st.builds(r.QueuesListed, queues=st.lists(st.tuples(names, numbers()), max_size=5).map(tuple)),
    r.GroupsListed: st.builds(r.GroupsListed, groups=groups_described),
    r.GroupStats: st.builds(r.GroupStats, oldest_ms=optional(numbers()), **{name: numbers() for name in _COUNTERS}),
    r.Messages: st.builds(r.Messages, batches=many_batches, next_version=optional(numbers())),
    r.DeadListed: st.builds(
        r.DeadListed, rows=dead_rows, matched=numbers(), scanned=numbers(), next_token=st.binary(max_size=40)
    ),
    r.Explained: st.builds(r.Explained, reason=words, facts=facts.map(tuple)),
    r.ProducerDescribed: st.builds(
        r.ProducerDescribed, epoch=numbers(), high_water=numbers(), last_used_ms=numbers(), window=numbers()
    ),
    r.TxnDescribed: st.builds(
        r.TxnDescribed,
        state=words,
        staged_bytes=numbers(),
        expires_at_ms=optional(numbers()),
        versions=triples(),
    ),
    r.HistoryListed: st.builds(r.HistoryListed, rows=history_rows, next_seq=optional(numbers())),
    r.VersionsFound: st.builds(
        r.VersionsFound,
        versions=st.lists(st.tuples(numbers(), numbers()), max_size=10).map(tuple),
        next_version=optional(numbers()),
    ),
    r.NodeDescribed: st.builds(
        r.NodeDescribed,
        node=words,
        cluster_id=words,
        address=words,
        role=st.sampled_from(get_args(r.Role)),
        term=numbers(),
        leader=optional(words),
        leader_address=optional(words),
        applied=numbers(),
        committed=numbers(),
        last=numbers(),
        time_ms=numbers(),
        fsync=st.sampled_from(get_args(r.Fsync)),
        pid=numbers(),
        members=rows(
            r.MemberDescribed,
            name=words,
            client_address=optional(words),
            voter=st.booleans(),
            connected=st.booleans(),
            lag=optional(numbers()),
        ),
    ),
}


def replies() -> st.SearchStrategy[r.Reply]:
    return st.one_of(*REPLIES.values())


def answers(reply: st.SearchStrategy[r.Reply] | None = None) -> st.SearchStrategy[r.Answer]:
    places = st.builds(Place, index=numbers(), position=numbers(-1, limits.U32_MAX), time_ms=numbers(), log=logs)
    return st.builds(r.Answer, place=places, reply=replies() if reply is None else reply)


# Frames ------------------------------------------------------------------------------------------------


@st.composite
def hellos(draw: st.DrawFn) -> Hello:
    low, high = sorted((draw(numbers(0, limits.U32_MAX)), draw(numbers(0, limits.U32_MAX))))
    return Hello((low, high), draw(client_ids))


from_clients = st.one_of(
    hellos(),
    st.builds(
        Request,
        request_id=numbers(),
        command=commands(),
        log=logs,
        session=sessions,
        request_seq=numbers(),
        done_below=numbers(),
    ),
    st.builds(
        Inquiry,
        request_id=numbers(),
        query=any_queries(),
        log=logs,
        stale=st.booleans(),
        min_index=numbers(),
    ),
    st.builds(Ping, token=numbers()),
    st.builds(Withdraw, request_id=numbers()),
)
from_nodes = st.one_of(
    st.builds(Welcome, version=numbers(), cluster_id=words, node=words),
    st.builds(Answered, request_id=numbers(), answer=answers()),
    st.builds(Declined, request_id=numbers(), error=failures()),
    st.builds(Pong, token=numbers()),
)
