"""Produce and the memory of producers (P1 … P5, P7, P8): a retry gets the first answer."""

from collections.abc import Sequence
from itertools import groupby

from holdfast.client.protocol import columns as cutting
from holdfast.client.protocol.commands import ForgetProducer, OpenProducer, Produce
from holdfast.client.protocol.errors import (
    BatchTooLarge,
    HoldfastError,
    IdempotencyConflict,
    LimitReached,
    MessageTooLarge,
    ProducerFenced,
    ProducerUnknown,
    ProducerWindowFull,
    QueueFull,
    ReservedName,
    SequenceGap,
)
from holdfast.client.protocol.replies import Done, Produced, ProducerOpened
from holdfast.client.protocol.values import GENERATION_SHIFT, RESERVED_CLIENTS, Columns, Version
from holdfast.jepsen.model import history
from holdfast.jepsen.model.records import Batch, Draft, Life, Message, Producer, Queue, RememberedProduce
from holdfast.jepsen.model.state import State


def drafts_of(columns: Columns, body: bytes | memoryview) -> tuple[Draft, ...]:
    """A request's messages, one by one."""
    return tuple(
        Draft(
            payload=cutting.payload_of(columns, body, index),
            key=cutting.key_of(columns, body, index),
            headers=tuple(cutting.decode_headers(cutting.header_cell(columns, body, index)).items()),
            delay_ms=cutting.time_of(columns.delays, index),
            not_before_ms=cutting.time_of(columns.not_befores, index),
            ttl_ms=cutting.time_of(columns.ttls, index),
        )
        for index in range(columns.count)
    )


def content_of(columns: Columns, body: bytes | memoryview, content_hash: bytes) -> tuple[bytes, ...]:
    """What makes two requests the same: here the content itself, beside the hash that stands for it."""
    return (content_hash, *columns.content(), bytes(body))


def append(
    state: State, queue: Queue, drafts: Sequence[Draft], client_id: str, first_seq: int | None
) -> tuple[int, int]:
    """Write messages to the tail, beginning their lives in every group; without `first_seq` versions number them."""
    first = queue.tail + 1
    timed = []
    for offset, draft in enumerate(drafts):
        version = first + offset
        message = Message(
            version=version,
            generation=state.generation,
            enqueued_ms=state.time_ms,
            client_id=client_id,
            client_seq=version if first_seq is None else first_seq + offset,
            payload=draft.payload,
            key=draft.key,
            headers=draft.headers,
        )
        timed.append((*_times(state, queue, draft), message))
    for (due_ms, expires_ms, ttl_ms), alike in groupby(timed, key=lambda one: one[:3]):
        batch = Batch([message for *_, message in alike], due_ms, expires_ms, ttl_ms)
        queue.batches.append(batch)
        for group in queue.groups.values():
            for message in batch.messages:
                group.lives[message.version] = new_life(state, batch, message.version)
    queue.tail += len(drafts)
    history.record(state, queue, "produce", range(first, queue.tail + 1), at_ms=state.time_ms)
    return first, queue.tail


def new_life(state: State, batch: Batch, version: int) -> Life:
    """How a stored message begins in a group that has not seen it."""
    life = Life(version, expires_ms=batch.expires_ms)
    if batch.due_ms is not None and batch.due_ms > state.time_ms:
        life.state, life.due_ms, life.held = "delayed", batch.due_ms, True
    return life


def _times(state: State, queue: Queue, draft: Draft) -> tuple[int | None, int | None, int | None]:
    """Due time, expiry and TTL of a message that is produced now (P6, P7)."""
    asked = 0
    if draft.delay_ms is not None:
        asked = state.time_ms + draft.delay_ms
    if draft.not_before_ms is not None:
        asked = max(asked, draft.not_before_ms)
    due_ms = asked if asked > state.time_ms else None
    if due_ms is not None:
        state.fire("P6.delay")
    ttl_ms = draft.ttl_ms
    if ttl_ms is not None:
        state.fire("P7.own_ttl")
    elif queue.settings.default_message_ttl_ms is not None:
        state.fire("P7.default_ttl")
        ttl_ms = queue.settings.default_message_ttl_ms
    expires_ms = None if ttl_ms is None else max(state.time_ms, asked) + ttl_ms
    return due_ms, expires_ms, ttl_ms


def produce(state: State, session: bytes, command: Produce) -> Produced:
    queue = state.queue(command.queue_id)
    if command.client_id is None:
        return _produce_of_session(state, queue, session, command)
    _refuse_reserved(state, command.client_id)
    producer = find_producer(state, queue, command.client_id)
    content = content_of(command.columns, command.body, command.content_hash)
    for known in producer.window if producer else ():
        if (known.numbering_epoch, known.first_seq, known.count, known.content) == (
            command.numbering_epoch,
            command.first_seq,
            command.columns.count,
            content,
        ):
            state.fire("P2.replay")
            return Produced(first_version=Version(known.first_version), count=known.count, replayed=True)
    _check_epoch(state, producer, command)
    _check_numbers(state, producer, command)
    check_limits(state, queue, command.columns, command.body)
    check_backlog(state, queue, command.columns.count, len(command.body))
    if producer is None:
        check_producers(state, queue, command.client_id)
    done_below = command.first_seq if command.done_below is None else min(command.done_below, command.first_seq)
    window = [known for known in producer.window if known.last_seq >= done_below] if producer else []
    if len(window) >= state.limits.producer_window:
        state.fire("P2.window_full")
        raise ProducerWindowFull(limit=state.limits.producer_window)
    if producer is None:
        producer = queue.producers[command.client_id] = Producer(epoch=0, high_water=0, last_use_ms=0)
    elif len(window) < len(producer.window):
        state.fire("P2.forget")
    first, _ = append(state, queue, drafts_of(command.columns, command.body), command.client_id, command.first_seq)
    remembered = RememberedProduce(command.numbering_epoch, command.first_seq, command.columns.count, content, first)
    producer.window = [*window, remembered]
    producer.high_water = remembered.last_seq
    producer.last_use_ms = state.time_ms
    state.fire("P1.write")
    return Produced(first_version=Version(first), count=command.columns.count)


def _produce_of_session(state: State, queue: Queue, session: bytes, command: Produce) -> Produced:
    """Numbered under its session, which remembers the reply (P5)."""
    check_limits(state, queue, command.columns, command.body)
    check_backlog(state, queue, command.columns.count, len(command.body))
    state.fire("P5.session")
    first, _ = append(state, queue, drafts_of(command.columns, command.body), f"session/{session.hex()}", None)
    return Produced(first_version=Version(first), count=command.columns.count)


def _check_epoch(state: State, producer: Producer | None, command: Produce) -> None:
    if command.epoch != 0 and (producer is None or producer.epoch < command.epoch):
        state.fire("P5.unknown")
        raise ProducerUnknown(client_id=command.client_id)
    if producer is not None and command.epoch < producer.epoch:
        state.fire("P4.fenced")
        raise ProducerFenced(epoch=producer.epoch, high_water=producer.high_water)
    if producer is not None and 0 < command.numbering_epoch < producer.first_epoch:
        state.fire("P5.forgotten_numbers")
        raise ProducerUnknown(client_id=command.client_id)


def _check_numbers(state: State, producer: Producer | None, command: Produce) -> None:
    high_water = producer.high_water if producer else 0
    if command.first_seq <= high_water:
        different = producer is not None and any(
            (known.numbering_epoch, known.first_seq) == (command.numbering_epoch, command.first_seq)
            for known in producer.window
        )
        state.fire("P3.different_body" if different else "P3.conflict")
        raise IdempotencyConflict(high_water=high_water, different_body=different)
    if command.after_seq is not None and command.after_seq != high_water:
        state.fire("P1.gap")
        raise SequenceGap(high_water=high_water)


def check_limits(state: State, queue: Queue, columns: Columns, body: bytes | memoryview) -> None:
    """How large a request and its messages may be (P8)."""
    limits = state.limits
    refusal: HoldfastError | None = None
    largest = cutting.largest_payload(columns)
    own_limit = queue.settings.max_message_bytes
    if columns.count > limits.batch_messages:
        refusal = BatchTooLarge(size=columns.count, limit=limits.batch_messages, limit_name="batch_messages")
    elif len(body) > limits.batch_bytes:
        refusal = BatchTooLarge(size=len(body), limit=limits.batch_bytes, limit_name="batch_bytes")
    elif largest > limits.message_bytes:
        refusal = MessageTooLarge(size=largest, limit=limits.message_bytes, limit_name="message_bytes")
    elif own_limit is not None and largest > own_limit:
        refusal = MessageTooLarge(size=largest, limit=own_limit, limit_name="max_message_bytes")
    if refusal is not None:
        state.fire(f"P8.{refusal.facts['limit_name']}")
        raise refusal


def check_backlog(state: State, queue: Queue, messages: int, size_bytes: int) -> None:
    name = over_backlog(queue, messages, size_bytes)
    if name:
        state.fire(f"P8.{name}")
        raise QueueFull(limit_name=name, limit=getattr(queue.settings, name))


def over_backlog(queue: Queue, messages: int, size_bytes: int) -> str:
    """The backlog limit that live batches and these messages together would exceed, if any (0002, 12)."""
    settings = queue.settings
    if settings.max_backlog_messages is not None and queue.live_messages + messages > settings.max_backlog_messages:
        return "max_backlog_messages"
    if settings.max_backlog_bytes is not None and queue.live_bytes + size_bytes > settings.max_backlog_bytes:
        return "max_backlog_bytes"
    return ""


def check_producers(state: State, queue: Queue, client_id: str) -> None:
    """Whether there is room for this one. Overdue ones give their place up, but only when it is needed."""
    limit = state.limits.producers_per_queue
    if len(queue.producers) >= limit:
        for other in [one for one in queue.producers if one != client_id and find_producer(state, queue, one) is None]:
            retire(queue, other)
    if len(queue.producers.keys() - {client_id}) >= limit:
        state.fire("P8.producers_per_queue")
        raise LimitReached(limit_name="producers_per_queue", limit=limit)


def open_producer(state: State, command: OpenProducer) -> ProducerOpened:
    queue = state.queue(command.queue_id)
    _refuse_reserved(state, command.client_id)
    known = find_producer(state, queue, command.client_id)
    producer = known
    if producer is None:
        check_producers(state, queue, command.client_id)
        producer = queue.producers[command.client_id] = Producer(epoch=0, high_water=0, last_use_ms=0)
    producer.last_use_ms = state.time_ms
    if producer.nonce == command.nonce:
        state.fire("P4.same_nonce")
    else:
        state.fire("P4.open")
        producer.nonce = command.nonce
        producer.epoch = queue.last_epoch = max(queue.last_epoch, state.generation << GENERATION_SHIFT) + 1
        if known is None:
            producer.first_epoch = producer.epoch
    return ProducerOpened(epoch=producer.epoch, high_water=producer.high_water)


def forget_producer(state: State, command: ForgetProducer) -> Done:
    queue = state.queue(command.queue_id)
    if find_producer(state, queue, command.client_id) is None:
        state.fire("P5.unknown")
        raise ProducerUnknown(client_id=command.client_id)
    state.fire("P5.forget")
    retire(queue, command.client_id)
    return Done()


def find_producer(state: State, queue: Queue, client_id: str) -> Producer | None:
    """The producer, unless it was idle for `producer_expiry_ms`, as that is set now (P5)."""
    producer = queue.producers.get(client_id)
    if producer is not None and is_overdue(state, queue, producer):
        state.fire("P5.expiry")
        return None
    return producer


def is_overdue(state: State, queue: Queue, producer: Producer) -> bool:
    expiry_ms = queue.settings.producer_expiry_ms
    return expiry_ms is not None and producer.last_use_ms + expiry_ms <= state.time_ms


def retire(queue: Queue, client_id: str) -> None:
    """Forget a producer; its epochs are never given out again, because the queue counts them."""
    del queue.producers[client_id]


def _refuse_reserved(state: State, client_id: str) -> None:
    if client_id.startswith(RESERVED_CLIENTS):
        state.fire("D6.reserved_client")
        raise ReservedName(kind="client_id", name=client_id)
