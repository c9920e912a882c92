"""Queries: answers from the state as it is folded, changing nothing (Q1, D3, E1, G4)."""

from collections.abc import Sequence
from typing import Any, assert_never

from holdfast.client.protocol import queries as q
from holdfast.client.protocol.columns import encode_headers
from holdfast.client.protocol.errors import ProducerUnknown, QueueNotFound, VersionNotKept
from holdfast.client.protocol.replies import (
    DeadListed,
    DeadRow,
    GroupDescribed,
    GroupsListed,
    GroupStats,
    HistoryListed,
    MessageBatch,
    Messages,
    ProducerDescribed,
    QueueDescribed,
    QueuesListed,
    ReaderDescribed,
    Reply,
    TxnDescribed,
    VersionsFound,
)
from holdfast.client.protocol.values import Columns, QueueId, ends_of
from holdfast.jepsen.model import filters, groups, history, produce, staging
from holdfast.jepsen.model.explain import explain
from holdfast.jepsen.model.records import SETTLED, Dead, Group, Message, Queue, runs
from holdfast.jepsen.model.state import State


def answer(state: State, query: q.Query) -> Reply:
    """Raises what the query cannot be answered with."""
    match query:
        case q.DescribeQueue():
            return _describe(state, query)
        case q.ListQueues():
            found = sorted((queue.name, queue.id) for queue in state.queues.values() if queue.name > query.after)
            return QueuesListed(queues=tuple(found[: query.limit]))
        case q.ListGroups():
            return GroupsListed(groups=_groups(state.queue(query.queue_id)))
        case q.Stats():
            return stats(*state.group(query.queue_id, query.group))
        case q.Peek():
            return _peek(state, query)
        case q.Read():
            return _read(state, query)
        case q.DeadLetters():
            return _dead_letters(state, query)
        case q.Explain():
            queue, group = state.group(query.queue_id, query.group)
            explained = explain(state, queue, group, query.version)
            state.fire(f"E1.{explained.reason}")
            return explained
        case q.ProducerState():
            return _producer(state, query)
        case q.TxnStatus():
            return _txn(state, query)
        case q.History():
            rows = [row for row in history.kept(state, state.queue(query.queue_id)) if row.seq >= query.from_seq]
            more = rows[query.limit].seq if len(rows) > query.limit else None
            return HistoryListed(rows=tuple(rows[: query.limit]), next_seq=more)
        case q.FindByKey():
            return _find_by_key(state, query)
        case q.FindMoved():
            return _find_moved(state, query)
        case unknown:
            assert_never(unknown)


# Queues and groups -------------------------------------------------------------------------------------


def _describe(state: State, query: q.DescribeQueue) -> QueueDescribed:
    queue = state.queue_named(query.name)
    if queue is None:
        raise QueueNotFound(queue=query.name)
    return QueueDescribed(
        queue_id=QueueId(queue.id),
        name=queue.name,
        settings=queue.settings,
        tail_version=queue.tail,
        lowest_version=queue.lowest_stored,
        stored_messages=sum(len(batch.messages) for batch in queue.batches),
        stored_bytes=sum(batch.size_bytes for batch in queue.batches),
        groups=_groups(queue),
        readers=tuple(
            ReaderDescribed(
                name=name,
                version=reader.version,
                lag=max(0, queue.tail - reader.version),
                reported_ms=reader.reported_ms,
            )
            for name, reader in sorted(queue.readers.items())
        ),
    )


def _groups(queue: Queue) -> tuple[GroupDescribed, ...]:
    return tuple(
        GroupDescribed(name=group.name, start=group.start, settings=group.settings) for group in queue.groups.values()
    )


def counters(group: Group) -> dict[str, int]:
    """The ten of G4, and `produced`, which is their sum."""
    counts = {"ready": 0, "delayed": 0, "in_flight": 0} | dict.fromkeys(SETTLED, 0)
    for life in group.lives.values():
        if life.state != "freed":
            counts["in_flight" if life.state == "leased" else life.state] += 1
    for name, count in group.carried.items():
        counts[name] += count
    return {"produced": sum(counts.values())} | counts


def stats(queue: Queue, group: Group) -> GroupStats:
    unsettled = [version for version, life in group.lives.items() if life.unsettled]
    oldest = queue.message(min(unsettled)) if unsettled else None
    return GroupStats(
        **counters(group),
        expired=group.expired,
        tail_version=queue.tail,
        holes=groups.holes(queue, group),
        oldest_ms=oldest.enqueued_ms if oldest else None,
    )


# Messages ----------------------------------------------------------------------------------------------


def _peek(state: State, query: q.Peek) -> Messages:
    queue = state.queue(query.queue_id)
    wanted = [version for version in _stored(queue) if version >= query.from_version]
    if query.group is not None:
        lives = state.group(query.queue_id, query.group)[1].lives
        wanted = [version for version in wanted if version in lives and lives[version].unsettled]
    more = wanted[query.limit] if len(wanted) > query.limit else None
    return Messages(batches=batches_of(queue, wanted[: query.limit]), next_version=more)


def _read(state: State, query: q.Read) -> Messages:
    queue = state.queue(query.queue_id)
    if query.from_version < queue.lowest_stored:
        raise VersionNotKept(version=query.from_version, lowest=queue.lowest_stored)
    wanted = [version for version in _stored(queue) if query.from_version <= version <= query.to_version]
    page: list[int] = []
    size_bytes = 0
    for version in wanted:
        message = queue.message(version)
        size_bytes += message.size_bytes if message else 0
        if page and size_bytes > query.max_bytes:
            return Messages(batches=batches_of(queue, page), next_version=version)
        page.append(version)
    return Messages(batches=batches_of(queue, page), next_version=None)


def _find_by_key(state: State, query: q.FindByKey) -> VersionsFound:
    """Look at `scan` stored messages at most, and stop at `limit` versions that carry the key."""
    queue = state.queue(query.queue_id)
    found: list[int] = []
    for looked, version in enumerate(v for v in _stored(queue) if v >= query.from_version):
        if looked == query.scan or len(found) == query.limit:
            return VersionsFound(versions=tuple(runs(found)), next_version=version)
        message = queue.message(version)
        if message is not None and message.key == query.key:
            found.append(version)
    return VersionsFound(versions=tuple(runs(found)), next_version=None)


def _find_moved(state: State, query: q.FindMoved) -> VersionsFound:
    """Look at `scan` available messages at most, and stop at `limit` that can go home and are selected."""
    queue, group = state.group(query.queue_id, query.group)
    selects = filters.parse(query.where)
    found: list[int] = []
    ready = [v for v in _stored(queue) if v >= query.from_version and v in group.lives]
    for looked, version in enumerate(v for v in ready if group.lives[v].state == "ready"):
        if looked == query.scan or len(found) == query.limit:
            return VersionsFound(versions=tuple(runs(found)), next_version=version)
        message = queue.message(version)
        moved = message is not None and "holdfast-origin-queue-id" in dict(message.headers)
        if message is not None and moved and selects(_moved_row(message)):
            found.append(version)
    return VersionsFound(versions=tuple(runs(found)), next_version=None)


def _moved_row(message: Message) -> DeadRow:
    """The dead row that it had where it died, as far as its lineage tells."""
    lineage = dict(message.headers)
    nothing: Any = None
    return DeadRow(
        group=lineage["holdfast-group"],
        dead_seq=nothing,
        version=message.version,
        reason=lineage["holdfast-reason"],
        attempts=int(lineage["holdfast-attempts"]),
        delivery_count=nothing,
        last_error=lineage.get("holdfast-last-error"),
        first_delivered_ms=None,
        last_delivered_ms=None,
        died_ms=message.enqueued_ms,
        consumer_id=None,
        client_id=lineage["holdfast-client-id"],
        client_seq=int(lineage["holdfast-client-seq"]),
        key=message.key.decode() or None,
        headers=message.headers,
        payload=message.payload,
        move_failed=False,
    )


def _stored(queue: Queue) -> list[int]:
    return [message.version for batch in queue.batches for message in batch.messages]


def batches_of(queue: Queue, versions: Sequence[int]) -> tuple[MessageBatch, ...]:
    """Messages as replies carry them: runs within a stored batch, without the times that their producer gave."""
    found: list[MessageBatch] = []
    for batch in queue.batches:
        for first, last in runs(version for version in versions if batch.first <= version <= batch.last):
            found.append(_packed(batch.messages[first - batch.first : last - batch.first + 1]))
    return tuple(found)


def _packed(messages: Sequence[Message]) -> MessageBatch:
    first = messages[0]
    cells = [encode_headers(dict(message.headers), reserved=True) for message in messages]
    keys = [message.key for message in messages]
    columns = Columns(
        ends=ends_of([len(message.payload) for message in messages]),
        key_ends=ends_of([len(key) for key in keys]) if any(keys) else b"",
        header_ends=ends_of([len(cell) for cell in cells]) if any(cells) else b"",
    )
    body = b"".join([*(message.payload for message in messages), *keys, *cells])
    return MessageBatch(
        first.version, first.generation, first.enqueued_ms, first.client_id, first.client_seq, columns, body
    )


# Dead letters, producers, transactions -----------------------------------------------------------------


def _dead_letters(state: State, query: q.DeadLetters) -> DeadListed:
    """Groups in order of creation, deaths in order; the token is the place of the last row that was looked at."""
    queue = state.queue(query.queue_id)
    chosen = list(queue.groups.values())
    if query.group is not None:
        chosen = [state.group(query.queue_id, query.group)[1]]
    selects = filters.parse(query.where)
    places = [(number, seq) for number, group in enumerate(chosen) for seq in sorted(group.dead)]
    if query.after:
        before = tuple(int(part) for part in query.after.split(b"/"))
        places = [place for place in places if place > before]
    rows: list[DeadRow] = []
    matched = scanned = 0
    last = b""
    for number, seq in places:
        if scanned == query.scan or (matched == query.limit and not query.count_only):
            return DeadListed(rows=tuple(rows), matched=matched, scanned=scanned, next_token=last)
        scanned += 1
        last = f"{number}/{seq}".encode()
        row = _dead_row(chosen[number], chosen[number].dead[seq])
        if selects(row):
            matched += 1
            if not query.count_only:
                rows.append(row)
    return DeadListed(rows=tuple(rows), matched=matched, scanned=scanned, next_token=b"")


def _dead_row(group: Group, row: Dead) -> DeadRow:
    return DeadRow(
        group=group.name,
        dead_seq=row.dead_seq,
        version=row.version,
        reason=row.reason,
        attempts=row.attempts,
        delivery_count=row.delivery_count,
        last_error=row.last_error,
        first_delivered_ms=row.first_delivered_ms,
        last_delivered_ms=row.last_delivered_ms,
        died_ms=row.died_ms,
        consumer_id=row.consumer_id or None,
        client_id=row.message.client_id,
        client_seq=row.message.client_seq,
        key=row.message.key.decode() or None,
        headers=row.message.headers,
        payload=row.message.payload,
        move_failed=row.move_failed,
    )


def _producer(state: State, query: q.ProducerState) -> ProducerDescribed:
    queue = state.queue(query.queue_id)
    producer = produce.find_producer(state, queue, query.client_id)
    if producer is None:
        raise ProducerUnknown(client_id=query.client_id)
    return ProducerDescribed(
        epoch=producer.epoch,
        high_water=producer.high_water,
        last_used_ms=producer.last_use_ms,
        window=len(producer.window),
    )


def _txn(state: State, query: q.TxnStatus) -> TxnDescribed:
    versions = staging.published(state, query.txn)
    if versions is not None:
        return TxnDescribed(state="published", versions=versions)
    opened = state.open_txns.get(query.txn)
    if opened is None:
        return TxnDescribed(state="unknown")
    return TxnDescribed(state="open", staged_bytes=opened.size_bytes, expires_at_ms=opened.deadline_ms)
