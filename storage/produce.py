"""Numbered produce: a retry gets the first answer (P1 … P5); how messages get versions, due times and expiries.

Messages of one request that differ in due time or expiry are stored as several batches, so that a batch row says one
thing of all its messages.
"""

from collections.abc import Mapping, Sequence
from itertools import islice

from holdfast.client.protocol import columns as batches
from holdfast.client.protocol.commands import ForgetProducer, OpenProducer, Produce
from holdfast.client.protocol.errors import (
    BatchTooLarge,
    HoldfastError,
    IdempotencyConflict,
    LimitReached,
    ProducerFenced,
    ProducerUnknown,
    ProducerWindowFull,
    QueueFull,
    ReservedName,
    SequenceGap,
)
from holdfast.client.protocol.replies import Done, Produced, ProducerOpened
from holdfast.client.protocol.values import GENERATION_SHIFT, RESERVED_CLIENTS, Columns, Version, ends_of
from holdfast.storage import freeing, history
from holdfast.storage.effects import WakeConsumers
from holdfast.storage.rows import BatchRow, ProducerRow, QueueRow
from holdfast.storage.state import State, View, content_hash
from holdfast.storage.tables import Table, after, k1

PRODUCERS_LOOKED_AT = 1_024  # for expired ones, by a produce that meets the limit


def numbered(state: State, queue: QueueRow, command: Produce) -> Produced:
    """A produce under its own client id. The order of the checks is P2's."""
    client = command.client_id
    assert client is not None
    if client.startswith(RESERVED_CLIENTS):
        raise ReservedName(kind="client_id", name=client)
    count = command.columns.count
    first_seq = command.first_seq
    producer = known_producer(state, queue, client)
    if producer is not None:
        known = _remembered(producer, command.numbering_epoch, first_seq)
        if known is not None and known[2] == count and known[4] == command.content_hash:
            return Produced(first_version=Version(known[3]), count=count, replayed=True)
        if command.epoch < producer.epoch:
            raise ProducerFenced(epoch=producer.epoch, high_water=producer.high_water)
        # Numbers that were given out before the row began: what was written under them is forgotten (P5).
        if command.epoch > producer.epoch or 0 < command.numbering_epoch < producer.born:
            raise ProducerUnknown(client_id=client)
        if first_seq <= producer.high_water:
            raise IdempotencyConflict(high_water=producer.high_water, different_body=known is not None)
        high_water = producer.high_water
    else:
        if command.epoch:
            raise ProducerUnknown(client_id=client)
        high_water = 0
    if command.after_seq is not None and command.after_seq != high_water:
        raise SequenceGap(high_water=high_water)
    check_batch(state, queue, command.columns)
    check_room(queue, count, len(command.body))
    if producer is None:
        _check_place(state, queue, client)
        window = []
    else:
        done_below = first_seq if command.done_below is None else min(command.done_below, first_seq)
        over = 0  # the window ascends: those that the client is done with are its first
        for item in producer.window:
            if item[1] + item[2] > done_below:
                break
            over += 1
        window = producer.window[over:] if over else producer.window
        if len(window) >= state.limits.producer_window:
            raise ProducerWindowFull(limit=state.limits.producer_window)
    if producer is None:
        producer = _new_producer(state, queue, client)
    first = append(state, queue, command.columns, command.body, command.content_hash, client, first_seq)
    window.append((command.numbering_epoch, first_seq, count, first, command.content_hash))
    producer.window = window
    producer.high_water = first_seq + count - 1
    producer.last_use = state.time_ms
    state.touch_producer(queue.q, client)
    return Produced(first_version=Version(first), count=count)


def by_session(state: State, queue: QueueRow, command: Produce, session: bytes) -> Produced:
    """A produce without a client id: its session's numbering makes it safe to retry (P5)."""
    check_batch(state, queue, command.columns)
    check_room(queue, command.columns.count, len(command.body))
    first = append(state, queue, command.columns, command.body, command.content_hash, session_client(session), None)
    return Produced(first_version=Version(first), count=command.columns.count)


def session_client(session: bytes) -> str:
    return f"session/{session.hex()}"


def open_producer(state: State, queue: QueueRow, command: OpenProducer) -> ProducerOpened:
    """The next epoch, which fences all older ones; the same nonce gets the same again (P4)."""
    if command.client_id.startswith(RESERVED_CLIENTS):
        raise ReservedName(kind="client_id", name=command.client_id)
    producer = known_producer(state, queue, command.client_id)
    if producer is None or not producer.epoch or producer.nonce != command.nonce:
        is_new = producer is None
        if producer is None:
            _check_place(state, queue, command.client_id)
            producer = _new_producer(state, queue, command.client_id)
        generation = state.meta.generation << GENERATION_SHIFT
        producer.epoch = queue.last_epoch = max(queue.last_epoch, generation) + 1
        if is_new:
            producer.born = producer.epoch
        state.touch_queue(queue)
        producer.nonce = command.nonce
    producer.last_use = state.time_ms
    state.touch_producer(queue.q, command.client_id)
    return ProducerOpened(epoch=producer.epoch, high_water=producer.high_water)


def forget_producer(state: State, queue: QueueRow, command: ForgetProducer) -> Done:
    if known_producer(state, queue, command.client_id) is None:
        raise ProducerUnknown(client_id=command.client_id)
    _drop_producer(state, queue, command.client_id)
    return Done()


def known_producer(view: View, queue: QueueRow, client: str) -> ProducerRow | None:
    """The producer's row, unless it was idle for longer than the queue remembers (P5)."""
    producer = view.producer(queue.q, client)
    if producer is None:
        return None
    expiry = queue.settings.producer_expiry_ms
    if expiry is not None and producer.last_use + expiry <= view.time_ms:
        return None
    return producer


def check_batch(state: State, queue: QueueRow, columns: Columns) -> None:
    """The limits that look at the request alone (P8)."""
    limits = state.limits
    if columns.count > limits.batch_messages:
        raise BatchTooLarge(size=columns.count, limit=limits.batch_messages, limit_name="batch_messages")
    if columns.body_bytes > limits.batch_bytes:
        raise BatchTooLarge(size=columns.body_bytes, limit=limits.batch_bytes, limit_name="batch_bytes")
    batches.check_sizes(columns, message_bytes=limits.message_bytes, limit_name="message_bytes")
    own = queue.settings.max_message_bytes
    if own is not None:
        batches.check_sizes(columns, message_bytes=own, limit_name="max_message_bytes")


def check_room(queue: QueueRow, count: int, size: int) -> None:
    """The limits that look at what is stored already (P8)."""
    error = no_room(queue, count, size)
    if error is not None:
        raise error


def no_room(queue: QueueRow, count: int, size: int) -> HoldfastError | None:
    settings = queue.settings
    if settings.max_backlog_messages is not None and queue.live_count + count > settings.max_backlog_messages:
        return QueueFull(limit_name="max_backlog_messages", limit=settings.max_backlog_messages)
    if settings.max_backlog_bytes is not None and queue.live_bytes + size > settings.max_backlog_bytes:
        return QueueFull(limit_name="max_backlog_bytes", limit=settings.max_backlog_bytes)
    return None


def append(
    state: State,
    queue: QueueRow,
    columns: Columns,
    body: bytes | memoryview,
    checksum: bytes,
    client: str,
    first_seq: int | None,
) -> int:
    """Give the messages their versions and store them; `first_seq` none means: numbered by their versions."""
    count = columns.count
    first = queue.tail + 1
    if first_seq is None:
        first_seq = first
    queue.tail += count
    if columns.delays or columns.not_befores or columns.ttls:
        runs = _runs(columns, state.time_ms, queue.settings.default_message_ttl_ms)
    else:
        ttl = queue.settings.default_message_ttl_ms
        runs = [(0, count - 1, 0, 0 if ttl is None else state.time_ms + ttl)]
    plain = False
    for low, high, due, expires in runs:
        part_columns, part, part_checksum = columns, body, checksum
        if len(runs) > 1:
            part_columns, part = batches.cut(columns, body, low, high)
            part_checksum = content_hash(part_columns, part)
        _store(state, queue, first + low, part_columns, part, part_checksum, client, first_seq + low, due, expires)
        plain = plain or not due
    if plain:
        for group in state.groups(queue.q):
            state.effects[WakeConsumers(queue.q, group.name)] = None
    history.record(state, queue, "produce", state.time_ms, first, queue.tail, "", 0, "", "")
    return first


def append_stored(
    state: State,
    queue: QueueRow,
    blob: int,
    count: int,
    body_bytes: int,
    client: str,
    times: Columns,
) -> int:
    """A staged chunk becomes a batch: its body is where it is, and no message of it is looked at.

    `times` says in single cells what is true of all its messages.
    """
    first = queue.tail + 1
    queue.tail += count
    [(_, _, due, expires)] = _runs(times, state.time_ms, queue.settings.default_message_ttl_ms)
    now, generation = state.time_ms, state.meta.generation
    batch = BatchRow(first, count, blob, now, due, expires, first, body_bytes, client, generation)
    freeing.store_batch(state, queue, batch)
    for group in state.groups(queue.q):
        if due:
            group.held += count
            state.touch_group(group)
        else:
            state.effects[WakeConsumers(queue.q, group.name)] = None
    history.record(state, queue, "produce", state.time_ms, first, queue.tail, "", 0, "", "")
    return first


def append_copies(
    state: State, queue: QueueRow, messages: Sequence[tuple[bytes, bytes, Mapping[str, str]]], client: str
) -> int | None:
    """Copies that the fold itself makes, as (payload, key, headers); none if the queue has no room for them."""
    cells = [batches.encode_headers(headers, reserved=True) if headers else b"" for _, _, headers in messages]
    keys = [key for _, key, _ in messages]
    columns = Columns(
        ends=ends_of([len(payload) for payload, _, _ in messages]),
        key_ends=ends_of([len(key) for key in keys]) if any(keys) else b"",
        header_ends=ends_of([len(cell) for cell in cells]) if any(cells) else b"",
    )
    body = b"".join([*(payload for payload, _, _ in messages), *keys, *cells])
    if no_room(queue, len(messages), len(body)) is not None:
        return None
    return append(state, queue, columns, body, content_hash(columns, body), client, None)


def _store(
    state: State,
    queue: QueueRow,
    first: int,
    columns: Columns,
    body: bytes | memoryview,
    checksum: bytes,
    client: str,
    first_seq: int,
    due: int,
    expires: int,
) -> None:
    blob = state.add_blob(checksum, columns, body)
    batch = BatchRow(
        first,
        columns.count,
        blob,
        state.time_ms,
        due,
        expires,
        first_seq,
        len(body),
        client,
        state.meta.generation,
    )
    freeing.store_batch(state, queue, batch)
    if due:
        for group in state.groups(queue.q):
            group.held += batch.count
            state.touch_group(group)


def _runs(columns: Columns, time_ms: int, default_ttl: int | None) -> list[tuple[int, int, int, int]]:
    """Maximal runs of messages with equal due time and expiry: (first, last, due, expires), 0 for none."""
    whole = max(len(columns.delays), len(columns.not_befores), len(columns.ttls)) <= 8
    runs: list[tuple[int, int, int, int]] = []
    for index in range(1 if whole else columns.count):
        due = max(
            time_ms + (batches.time_of(columns.delays, index) or 0), batches.time_of(columns.not_befores, index) or 0
        )
        ttl = batches.time_of(columns.ttls, index)
        if ttl is None:
            ttl = default_ttl
        held = due if due > time_ms else 0
        expires = 0 if ttl is None else due + ttl
        if runs and runs[-1][2:] == (held, expires):
            runs[-1] = (runs[-1][0], index, held, expires)
        else:
            runs.append((index, index, held, expires))
    if whole:
        return [(0, columns.count - 1, *runs[0][2:])]
    return runs


def _remembered(producer: ProducerRow, numbering_epoch: int, first_seq: int) -> tuple[int, int, int, int, bytes] | None:
    """Numbers only grow, so the window ascends: mostly one look at its end shows that a number is new."""
    for item in reversed(producer.window):
        if item[1] == first_seq and item[0] == numbering_epoch:
            return item
        if item[1] < first_seq:
            break
    return None


def _new_producer(state: State, queue: QueueRow, client: str) -> ProducerRow:
    """A new row, perhaps in the place of one that had expired. Epochs are counted by the queue, so none comes twice."""
    if state.producer(queue.q, client) is not None:
        _drop_producer(state, queue, client)
    producer = ProducerRow()
    state.set_producer(queue.q, client, producer)
    queue.producers += 1
    state.touch_queue(queue)
    return producer


def _check_place(state: State, queue: QueueRow, client: str) -> None:
    """Refuse one producer too many. Expired ones give their place when it is needed, a bounded number at a time."""
    limit = state.limits.producers_per_queue
    expiry = queue.settings.producer_expiry_ms
    if queue.producers >= limit and expiry is not None:
        prefix = k1(queue.q)
        rows = islice(state.txn.scan(Table.PRODUCER, prefix, after(prefix)), PRODUCERS_LOOKED_AT)
        names = [key[8:].decode() for key, _ in rows]
        for name in names:
            if name != client and known_producer(state, queue, name) is None:
                _drop_producer(state, queue, name)
    stale = state.producer(queue.q, client) is not None
    if queue.producers - stale >= limit:
        raise LimitReached(limit_name="producers_per_queue", limit=limit)


def _drop_producer(state: State, queue: QueueRow, client: str) -> None:
    state.set_producer(queue.q, client, None)
    queue.producers -= 1
    state.touch_queue(queue)
