"""Answers queries from a read transaction (Q1): one applied index, nothing written, nothing folded.

What is due and not folded yet is shown as it stands; before a current read the leader commits a Touch.
"""

import bisect
from collections.abc import Iterator
from dataclasses import replace
from typing import assert_never

from holdfast.client.protocol import columns as batches
from holdfast.client.protocol.errors import (
    HoldfastError,
    InvariantBroken,
    ProducerUnknown,
    QueueNotFound,
    VersionNotKept,
)
from holdfast.client.protocol.queries import (
    DeadLetters,
    DescribeQueue,
    Explain,
    FindByKey,
    FindMoved,
    History,
    ListGroups,
    ListQueues,
    Peek,
    ProducerState,
    Query,
    Read,
    Stats,
    TxnStatus,
)
from holdfast.client.protocol.replies import (
    Answer,
    DeadListed,
    Explained,
    Failed,
    GroupDescribed,
    GroupsListed,
    GroupStats,
    HistoryListed,
    Leased,
    MessageBatch,
    Messages,
    ProducerDescribed,
    QueueDescribed,
    QueuesListed,
    Reply,
    VersionsFound,
)
from holdfast.client.protocol.values import Place, QueueId
from holdfast.storage import (
    dead_letters,
    explain,
    groups,
    history,
    moved_letters,
    produce,
    retention,
    staging,
    unfinished,
)
from holdfast.storage.rows import GroupRow, QueueRow
from holdfast.storage.state import View
from holdfast.storage.store import ReadTxn
from holdfast.storage.tables import Table

PEEK_BYTES = 4_194_304  # the bodies of one page; at least one message


def answer(txn: ReadTxn, query: Query) -> Answer:
    """The answer and the index and committed time it was read at; a refusal is an answer too."""
    view = View(txn)
    try:
        reply = _reply(view, query)
    except InvariantBroken:
        raise
    except HoldfastError as error:
        reply = Failed(error)
    return Answer(Place(view.meta.applied, -1, view.time_ms), reply)


def deliver(txn: ReadTxn, q: int, leased: Leased) -> Leased:
    """A lease's answer with its messages: stored bodies are verified and cut, never unpacked."""
    view = View(txn)
    pieces: list[MessageBatch] = []
    for grant in leased.grants:
        pieces += _pieces(view, q, grant.first, grant.last)
    return replace(leased, batches=tuple(pieces))


def _reply(view: View, query: Query) -> Reply:
    match query:
        case DescribeQueue():
            q = view.queue_id(query.name)
            if q is None:
                raise QueueNotFound(queue=query.name)
            return _describe(view, groups.find_queue(view, q))
        case ListQueues():
            return _list_queues(view, query)
        case ListGroups():
            queue = groups.find_queue(view, query.queue_id)
            return GroupsListed(groups=_describe_groups(view, queue))
        case Stats():
            queue = groups.find_queue(view, query.queue_id)
            return _stats(view, queue, groups.find_group(view, queue, query.group))
        case Peek():
            return _peek(view, groups.find_queue(view, query.queue_id), query)
        case Read():
            return _read(view, groups.find_queue(view, query.queue_id), query)
        case DeadLetters():
            return _dead(view, groups.find_queue(view, query.queue_id), query)
        case Explain():
            queue = groups.find_queue(view, query.queue_id)
            return _explain(view, queue, groups.find_group(view, queue, query.group), query)
        case ProducerState():
            return _producer(view, groups.find_queue(view, query.queue_id), query)
        case TxnStatus():
            return staging.describe(view, query.txn)
        case History():
            return _history(view, groups.find_queue(view, query.queue_id), query)
        case FindByKey():
            return _find(view, groups.find_queue(view, query.queue_id), query)
        case FindMoved():
            queue = groups.find_queue(view, query.queue_id)
            return moved_letters.find(view, queue, groups.find_group(view, queue, query.group), query)
        case unknown:
            assert_never(unknown)


def _describe(view: View, queue: QueueRow) -> QueueDescribed:
    return QueueDescribed(
        queue_id=QueueId(queue.q),
        name=queue.name,
        settings=queue.settings,
        tail_version=queue.tail,
        lowest_version=queue.low,
        stored_messages=queue.stored_count,
        stored_bytes=queue.stored_bytes,
        groups=_describe_groups(view, queue),
        readers=retention.readers(view, queue),
    )


def _describe_groups(view: View, queue: QueueRow) -> tuple[GroupDescribed, ...]:
    return tuple(
        GroupDescribed(name=group.name, start=group.start, settings=group.settings) for group in view.groups(queue.q)
    )


def _list_queues(view: View, query: ListQueues) -> QueuesListed:
    found = []
    for key, data in view.txn.scan(Table.NAME, b"q" + query.after.encode() + b"\x00", b"r"):
        found.append((key[1:].decode(), int.from_bytes(data, "big")))
        if len(found) == query.limit:
            break
    return QueuesListed(queues=tuple(found))


def _stats(view: View, queue: QueueRow, group: GroupRow) -> GroupStats:
    group, lowest = unfinished.finished(view, queue, group)
    oldest = view.next_batch(queue.q, lowest) if lowest <= queue.tail else None
    return GroupStats(
        produced=groups.produced(queue, group),
        ready=groups.ready(queue, group),
        delayed=groups.delayed(group),
        in_flight=group.in_flight,
        acked=group.acked,
        dead=group.dead,
        moved=group.moved,
        discarded=group.discarded,
        cancelled=group.cancelled,
        purged=group.purged,
        trimmed=group.trimmed,
        expired=group.expired,
        tail_version=queue.tail,
        holes=group.holes,
        oldest_ms=oldest.enqueued if oldest is not None else None,
    )


def _peek(view: View, queue: QueueRow, query: Peek) -> Messages:
    group = groups.find_group(view, queue, query.group) if query.group is not None else None
    return _page(_wanted(view, queue, group, query.from_version), view, queue, query.limit, PEEK_BYTES)


def _wanted(view: View, queue: QueueRow, group: GroupRow | None, low: int) -> Iterator[tuple[int, int]]:
    """Stored ranges from `low` on, without those that the group has settled or never had."""
    plain, again = unfinished.unsorted(view, group) if group is not None else ([], [])
    unsorted = sorted(plain + again)
    highest = [hi for _, hi in unsorted]
    for batch in view.batches(queue.q, low, queue.tail):
        lo = max(low, batch.first)
        if group is None:
            yield lo, batch.last
        else:
            parts = explain.unsettled_ranges(view, group, lo, batch.last)
            at = bisect.bisect_left(highest, lo)
            while at < len(unsorted) and unsorted[at][0] <= batch.last:
                parts.append((max(lo, unsorted[at][0]), min(unsorted[at][1], batch.last)))
                at += 1
            yield from sorted(parts)


def _read(view: View, queue: QueueRow, query: Read) -> Messages:
    if query.from_version < queue.low:
        raise VersionNotKept(version=query.from_version, lowest=queue.low)
    if query.to_version < query.from_version:
        return Messages(batches=(), next_version=None)
    ranges = (
        (max(batch.first, query.from_version), min(batch.last, query.to_version))
        for batch in view.batches(queue.q, query.from_version, min(query.to_version, queue.tail))
    )
    return _page(ranges, view, queue, 2**62, query.max_bytes)


def _page(ranges: Iterator[tuple[int, int]], view: View, queue: QueueRow, limit: int, max_bytes: int) -> Messages:
    """Messages of these ranges up to a number and a size, but at least one; and where to go on."""
    pieces: list[MessageBatch] = []
    size = count = 0
    for lo, hi in ranges:
        for piece in _pieces(view, queue.q, lo, min(hi, lo + limit - count)):
            before = 0
            for index, end in enumerate(batches.sizes(piece.columns)):
                if count == limit or (count and size + end - before > max_bytes):
                    if index:
                        pieces.append(_cut(piece, index))
                    return Messages(batches=tuple(pieces), next_version=piece.first + index)
                count += 1
                size += end - before
                before = end
            pieces.append(piece)
    return Messages(batches=tuple(pieces), next_version=None)


def _cut(piece: MessageBatch, count: int) -> MessageBatch:
    columns, body = batches.cut(piece.columns, piece.body, 0, count - 1)
    return replace(piece, columns=columns, body=body)


def _pieces(view: View, q: int, lo: int, hi: int) -> Iterator[MessageBatch]:
    """The stored messages of lo … hi, one piece a batch."""
    for batch in view.batches(q, lo, hi):
        columns, body = view.content(q, max(lo, batch.first), batch.blob)
        first, last = max(lo, batch.first), min(hi, batch.last)
        part: bytes | memoryview = body
        if (first, last) != (batch.first, batch.last):
            columns, part = batches.cut(columns, body, first - batch.first, last - batch.first)
        first_seq = batch.first_seq + first - batch.first
        yield MessageBatch(first, batch.generation, batch.enqueued, batch.client, first_seq, columns, part)


def _dead(view: View, queue: QueueRow, query: DeadLetters) -> DeadListed:
    chosen = view.groups(queue.q)
    if query.group is not None:
        chosen = [groups.find_group(view, queue, query.group)]
    return dead_letters.select(view, queue, chosen, query)


def _explain(view: View, queue: QueueRow, group: GroupRow, query: Explain) -> Explained:
    if query.version is None:
        return explain.group_reason(view, queue, group)
    return explain.version_reason(view, queue, group, query.version)


def _producer(view: View, queue: QueueRow, query: ProducerState) -> ProducerDescribed:
    row = produce.known_producer(view, queue, query.client_id)
    if row is None:
        raise ProducerUnknown(client_id=query.client_id)
    return ProducerDescribed(
        epoch=row.epoch, high_water=row.high_water, last_used_ms=row.last_use, window=len(row.window)
    )


def _history(view: View, queue: QueueRow, query: History) -> HistoryListed:
    rows, next_seq = history.read(view, queue, query.from_seq, query.limit)
    return HistoryListed(rows=tuple(rows), next_seq=next_seq)


def _find(view: View, queue: QueueRow, query: FindByKey) -> VersionsFound:
    found: list[tuple[int, int]] = []
    scanned = 0
    for batch in view.batches(queue.q, query.from_version, queue.tail):
        columns, body = view.content(queue.q, batch.first, batch.blob)
        for index in range(max(query.from_version - batch.first, 0), batch.count):
            version = batch.first + index
            if scanned >= query.scan or len(found) >= query.limit:
                return VersionsFound(versions=tuple(found), next_version=version)
            scanned += 1
            if columns.key_ends and batches.key_of(columns, body, index) == query.key:
                if found and found[-1][1] == version - 1:
                    found[-1] = (found[-1][0], version)
                else:
                    found.append((version, version))
    return VersionsFound(versions=tuple(found), next_version=None)
