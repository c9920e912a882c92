"""Settle and publish together (X1): the items are done one after the other, and all undone if one is refused."""

from holdfast.client.protocol.commands import AckBatch, Nack, Produce, Transaction
from holdfast.client.protocol.errors import BY_CODE, HoldfastError, InvariantBroken, TransactionRefused
from holdfast.client.protocol.replies import Committed, Settled
from holdfast.storage import due, groups, produce, retention, settle
from holdfast.storage.state import State


def run(state: State, command: Transaction, session: bytes) -> Committed:
    """All items, in their order, or TransactionRefused with the first that cannot be done."""
    for item in command.items:
        if not isinstance(item, Produce):
            _fold(state, item)
    for item in command.items:
        queue = state.queue(item.queue_id)
        if queue is not None and not queue.deleted:
            retention.fold(state, queue)
    versions: list[tuple[int, int, int]] = []
    with state.all_or_nothing():
        for number, item in enumerate(command.items):
            try:
                problem = _do(state, item, session, versions)
            except InvariantBroken:
                raise
            except HoldfastError as error:
                problem = type(error).__name__
            if problem:
                raise TransactionRefused(item=number, problem=problem)
    return Committed(versions=tuple(versions))


def _fold(state: State, item: AckBatch | Nack) -> None:
    queue = state.queue(item.queue_id)
    group = state.group(item.queue_id, item.group) if queue is not None and not queue.deleted else None
    if queue is not None and group is not None:
        due.fold(state, queue, group)


def _do(state: State, item: AckBatch | Nack | Produce, session: bytes, versions: list[tuple[int, int, int]]) -> str:
    """One item; the name of the error if it was refused, even in part: every settle must change all it names."""
    queue = groups.find_queue(state, item.queue_id)
    if isinstance(item, Produce):
        done = produce.by_session(state, queue, item, session)
        versions.append((queue.q, done.first_version, done.first_version + done.count - 1))
        return ""
    group = groups.find_group(state, queue, item.group)
    settled: Settled
    if isinstance(item, AckBatch):
        settled = settle.ack(state, queue, group, item, session)
    else:
        settled = settle.nack(state, queue, group, item, session)
    return BY_CODE[settled.refused[0].code].__name__ if settled.refused else ""
