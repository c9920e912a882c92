"""The slow walk over stored bodies: all of them, in bounded steps, and damage is named."""

import pytest

from holdfast.client.protocol.commands import CreateQueue, OpenSession
from holdfast.client.protocol.errors import BodyDamaged
from holdfast.client.protocol.replies import QueueCreated
from holdfast.storage import scrub
from holdfast.storage.store import WriteTxn
from holdfast.storage.tables import TOP, Table, k1
from tests.support.machine import Machine, produce

BODY = bytes(1_000)


def filled(batches: int) -> tuple[Machine, int]:
    machine = Machine()
    machine.do(OpenSession())
    created = machine.do(CreateQueue(name="q"))
    assert isinstance(created, QueueCreated)
    for number in range(batches):
        machine.do(produce(created.queue_id, b"%d" % number + BODY, client_id="c", first_seq=number + 1))
    return machine, created.queue_id


def steps(machine: Machine, budget_bytes: int) -> int:
    """How many it takes to the end."""
    after, count = scrub.BEGIN, 0
    while True:
        with machine.store.read() as txn:
            found = scrub.step(txn, after, budget_bytes)
        count += 1
        if found is None:
            return count
        assert found > after
        after = found


def damage(machine: Machine, blob: int) -> None:
    def flip(txn: WriteTxn) -> None:
        data = bytearray(txn.get(Table.BLOB, k1(blob)) or b"")
        data[-1] ^= 1
        txn.put(Table.BLOB, k1(blob), bytes(data))

    machine.store.transact(flip)


def blobs(machine: Machine) -> list[int]:
    with machine.store.read() as txn:
        return [int.from_bytes(key, "big") for key, _ in txn.scan(Table.BLOB, k1(0), TOP)]


def test_a_sound_store_is_walked_to_its_end_in_steps_of_the_budget() -> None:
    machine, _ = filled(10)
    assert steps(machine, 1 << 30) == 1
    assert steps(machine, 1) == 11  # one body a step, and one that finds the end
    assert steps(machine, 2_500) == 4


def test_an_empty_store_is_sound() -> None:
    assert steps(Machine(), 1) == 1


@pytest.mark.parametrize("place", [0, 4, 9])
def test_damage_anywhere_is_found_and_named(place: int) -> None:
    machine, queue_id = filled(10)
    damage(machine, blobs(machine)[place])
    with pytest.raises(BodyDamaged) as caught:
        steps(machine, 2_500)
    assert caught.value == BodyDamaged(queue_id=queue_id, version=place + 1)
