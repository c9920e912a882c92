"""Settle and publish together (X1): every item is checked before the first is done, so nothing needs undoing."""

from holdfast.client.protocol.commands import AckBatch, Nack, Produce, Transaction
from holdfast.client.protocol.errors import HoldfastError, TransactionRefused
from holdfast.client.protocol.replies import Committed
from holdfast.storage import due, groups, produce, settle
from holdfast.storage.rows import QueueRow
from holdfast.storage.state import State


def run(state: State, command: Transaction, session: bytes) -> Committed:
    """All items, in their order, or TransactionRefused with the first that cannot be done."""
    for item in command.items:
        if not isinstance(item, Produce):
            _fold(state, item)
    _check_all(state, command, session)
    versions = []
    for item in command.items:
        queue = groups.find_queue(state, item.queue_id)
        match item:
            case AckBatch():
                settle.ack(state, queue, groups.find_group(state, queue, item.group), item, session)
            case Nack():
                settle.nack(state, queue, groups.find_group(state, queue, item.group), item, session)
            case Produce():
                done = produce.by_session(state, queue, item, session)
                versions.append((queue.q, done.first_version, done.first_version + done.count - 1))
    return Committed(versions=tuple(versions))


def _fold(state: State, item: AckBatch | Nack) -> None:
    queue = state.queue(item.queue_id)
    group = state.group(item.queue_id, item.group) if queue is not None and not queue.deleted else None
    if queue is not None and group is not None:
        due.fold(state, queue, group)


def _check_all(state: State, command: Transaction, session: bytes) -> None:
    taken: dict[int, list[tuple[int, int]]] = {}  # by lease: a version can be settled once
    added: dict[int, tuple[int, int]] = {}  # by queue: messages and bytes of the produces before
    for number, item in enumerate(command.items):
        try:
            queue = groups.find_queue(state, item.queue_id)
            if isinstance(item, Produce):
                _check_produce(state, queue, item, added)
            else:
                _check_settle(state, queue, item, session, taken)
        except HoldfastError as error:
            raise TransactionRefused(item=number, problem=type(error).__name__) from None


def _check_produce(state: State, queue: QueueRow, item: Produce, added: dict[int, tuple[int, int]]) -> None:
    produce.check_batch(state, queue, item.columns)
    count, size = added.get(queue.q, (0, 0))
    count, size = count + item.columns.count, size + len(item.body)
    error = produce.no_room(queue, count, size)
    if error is not None:
        raise error
    added[queue.q] = (count, size)


def _check_settle(
    state: State, queue: QueueRow, item: AckBatch | Nack, session: bytes, taken: dict[int, list[tuple[int, int]]]
) -> None:
    group = groups.find_group(state, queue, item.group)
    if isinstance(item, Nack):
        settle.nack_delay(state, queue, group, item)
    for lease_id, first, last in item.ranges:
        row = settle.open_lease(state, group, lease_id, session)
        settle.check_held(row, lease_id, first, last, taken.setdefault(lease_id, []))
