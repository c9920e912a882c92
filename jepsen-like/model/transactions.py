"""Settle and publish together (X1): every item, or nothing."""

import copy
from typing import Any

from holdfast.client.protocol.commands import AckBatch, Nack, Produce, Transaction
from holdfast.client.protocol.errors import BY_CODE, HoldfastError, TransactionRefused
from holdfast.client.protocol.replies import Committed, Settled
from holdfast.jepsen.model import produce, settle
from holdfast.jepsen.model.state import State


def run(state: State, session: bytes, command: Transaction) -> Committed:
    """Do the items on the state as it is, one after the other, and put it back if one does not go through."""
    before = copy.deepcopy(state.__dict__)
    versions: list[tuple[int, int, int]] = []
    for number, item in enumerate(command.items):
        try:
            versions += _do(state, session, item)
        except HoldfastError as error:
            state.__dict__.update(before)
            state.fire("X1.refused")
            raise TransactionRefused(item=number, problem=type(error).__name__) from None
    state.fire("X1.commit")
    return Committed(versions=tuple(versions))


def _do(state: State, session: bytes, item: AckBatch | Nack | Produce) -> list[tuple[int, int, int]]:
    match item:
        case AckBatch():
            _check_whole(settle.ack(state, session, item))
        case Nack():
            _check_whole(settle.nack(state, session, item))
        case Produce():
            produced = produce.produce(state, session, item)
            return [(item.queue_id, produced.first_version, produced.first_version + produced.count - 1)]
    return []


def _check_whole(settled: Settled) -> None:
    """A settle that was refused in part is refused."""
    if settled.refused:
        part = settled.refused[0]
        kind = BY_CODE[part.code]
        facts: dict[str, Any] = {"lease_id": part.lease_id, "first": part.first, "last": part.last}
        raise kind(**{name: facts[name] for name in kind.fact_names})
