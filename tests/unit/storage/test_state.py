"""What the state rests on: bodies that are verified, a digest that follows every row, entries that count once."""

from dataclasses import replace

import pytest

from holdfast.client.protocol.commands import AckBatch, CreateQueue, Lease, Nack, OpenSession, Touch
from holdfast.client.protocol.errors import BadFrame, BodyDamaged, StateBroken
from holdfast.client.protocol.replies import Grant, Leased
from holdfast.client.protocol.values import QueueId, QueueSettings
from holdfast.storage import views
from holdfast.storage.entry import decode_entry
from holdfast.storage.state import row_hash
from holdfast.storage.store import WriteTxn
from holdfast.storage.tables import Table, k1
from tests.support import invariants
from tests.support.machine import Machine, produce

Q = QueueId(1)


def queue_with(*messages: bytes) -> Machine:
    """Each message is a batch of its own."""
    machine = Machine()
    machine.do(OpenSession(consumer_id="ann"))
    machine.do(CreateQueue(name="q", settings=QueueSettings(history=True)))
    for message in messages:
        machine.do(produce(Q, message))
    return machine


def take(machine: Machine, *, auto_ack: bool = False) -> Leased:
    reply = machine.do(Lease(queue_id=Q, group="default", max_messages=1, auto_ack=auto_ack))
    assert isinstance(reply, Leased), reply
    return reply


def damage(machine: Machine, blob: int) -> None:
    """Flip the last bit of a stored body."""

    def flip(txn: WriteTxn) -> None:
        data = txn.get(Table.BLOB, k1(blob))
        assert data is not None
        txn.put(Table.BLOB, k1(blob), data[:-1] + bytes([data[-1] ^ 1]))

    machine.store.transact(flip)


def test_a_damaged_body_is_named_and_not_delivered() -> None:
    machine = queue_with(b"other", b"damaged")
    machine.do(AckBatch(queue_id=Q, group="default", ranges=((take(machine).lease_id, 1, 1),)))
    machine.do(produce(Q, b"sound"))
    damage(machine, 2)
    damaged, sound = take(machine), take(machine)
    assert machine.payloads(Q, sound) == [b"sound"]
    with machine.store.read() as txn, pytest.raises(BodyDamaged) as caught:
        views.deliver(txn, Q, damaged)
    assert caught.value.facts == {"queue_id": Q, "version": 2}


def test_damage_is_named_by_the_version_that_was_to_be_read() -> None:
    machine = queue_with(b"first")
    machine.do(produce(Q, b"second", b"third"))
    leased = replace(take(machine), grants=(Grant(3, 3, 1, 1),))
    damage(machine, 2)
    with machine.store.read() as txn, pytest.raises(BodyDamaged) as caught:
        views.deliver(txn, Q, leased)
    assert caught.value.facts == {"queue_id": Q, "version": 3}


def test_a_lease_that_would_cut_a_damaged_batch_stops_the_node() -> None:
    """Sizes that were damaged on one replica would make it grant other versions than the rest, for good."""
    machine = queue_with(b"first")
    machine.do(produce(Q, b"second", b"third"))
    damage(machine, 2)
    with pytest.raises(BodyDamaged):
        machine.do(Lease(queue_id=Q, group="default", max_messages=2))


def test_the_digest_follows_rows_that_come_change_and_go() -> None:
    machine = queue_with(b"a", b"b", b"c")
    take(machine)
    take(machine, auto_ack=True)
    machine.do(Nack(queue_id=Q, group="default", ranges=((1, 1, 1),), dead=True))
    with machine.store.read() as txn:
        invariants.check(txn)
        assert txn.first(Table.PIN, b"", b"\xff" * 64) is not None
    machine.pass_ms(60_000)
    machine.do(Touch(queue_id=Q))
    with machine.store.read() as txn:
        invariants.check(txn)
        assert txn.first(Table.PIN, b"", b"\xff" * 64) is None


def test_the_digest_tells_tables_keys_and_values_apart() -> None:
    hashes = {
        row_hash(Table.DONE, b"k", b"v"),
        row_hash(Table.BACK, b"k", b"v"),
        row_hash(Table.DONE, b"l", b"v"),
        row_hash(Table.DONE, b"k", b"w"),
    }
    assert len(hashes) == 4


def test_an_entry_is_applied_once() -> None:
    machine = queue_with(b"a")
    before = machine.digest()
    with pytest.raises(StateBroken):
        machine.replay(*machine.log[-1])
    assert machine.digest() == before


def test_bytes_behind_the_last_command_of_an_entry_stop_the_node() -> None:
    machine = queue_with(b"a")
    index, data = machine.log[-1]
    assert len(decode_entry(index, data).commands) == 1
    with pytest.raises(BadFrame):
        decode_entry(index, data + b"\x00")
