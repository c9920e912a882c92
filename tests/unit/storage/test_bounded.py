"""What one command may cost: store operations and hashed bytes are counted, for one thread decides for all.

Each test compares two sizes, or says how often the whole of a batch was read; none looks at a clock.
"""

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import pytest
from xxhash import xxh3_128_digest

from holdfast.client.protocol.columns import MessageParts
from holdfast.client.protocol.commands import (
    AckBatch,
    CreateGroup,
    CreateQueue,
    Lease,
    Nack,
    OpenSession,
    Part,
    Publish,
    Redrive,
    ReportCursor,
    Seek,
    SetLimits,
    Touch,
    Transaction,
    UpdateQueue,
)
from holdfast.client.protocol.errors import LimitReached
from holdfast.client.protocol.queries import DeadLetters, DescribeQueue
from holdfast.client.protocol.replies import (
    Committed,
    DeadListed,
    Done,
    Failed,
    Leased,
    Produced,
    QueueDescribed,
    Redriven,
    Settled,
)
from holdfast.client.protocol.values import Job, QueueId, QueueSettings, Version
from holdfast.storage import state
from holdfast.storage.memory_store import MemoryStore
from holdfast.storage.state import State
from holdfast.storage.store import WriteTxn
from holdfast.storage.tables import TABLES, Table, k1
from tests.support import invariants
from tests.support.counting import CountingTxn
from tests.support.machine import Machine, produce, stage

Q = QueueId(1)
T = TypeVar("T")


class CountingStore(MemoryStore):
    def __init__(self) -> None:
        super().__init__(TABLES)
        self.counts: Counter[str] = Counter()

    def transact(self, work: Callable[[WriteTxn], T]) -> T:
        return super().transact(lambda txn: work(CountingTxn(txn, self.counts)))


class Counted(Machine):
    """A machine that says what its last entries cost."""

    def __init__(self, **settings: object) -> None:
        self._counting = CountingStore()
        super().__init__(self._counting)
        self.do(OpenSession())
        self.do(CreateQueue(name="q", settings=QueueSettings(**settings)))  # type: ignore[arg-type]
        self.counts.clear()

    @property
    def counts(self) -> Counter[str]:
        return self._counting.counts

    def lease(self, count: int = 1, *, group: str = "default", auto_ack: bool = False) -> Leased:
        reply = self.do(Lease(queue_id=Q, group=group, max_messages=count, auto_ack=auto_ack))
        assert isinstance(reply, Leased), reply
        return reply

    def check(self) -> None:
        with self.store.read() as txn:
            invariants.check(txn)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many bytes were hashed to verify or to name contents; row hashes, which are short, are left out."""
    counts: Counter[str] = Counter()

    def digest(data: bytes | memoryview) -> bytes:
        counts["bytes"] += len(data)
        return xxh3_128_digest(data)

    monkeypatch.setattr(state, "xxh3_128_digest", digest)
    return counts


# All or nothing ----------------------------------------------------------------------------------------


def remembered_beside(producers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many rows 16 transactions remember, in an entry in which so many producers were at work before."""
    machine = Counted()
    for number in range(producers):
        for seq in range(1, 9):
            machine.do(produce(Q, b"x", client_id=f"p{number}", first_seq=seq, done_below=1))
    count = 0

    def former(kept: object) -> object:
        nonlocal count
        count += 1
        return original(kept)

    original = state._former
    with monkeypatch.context() as patch:
        patch.setattr(state, "_former", former)
        envelopes = [
            machine.envelope(produce(Q, b"x", client_id=f"p{number}", first_seq=99, done_below=1))
            for number in range(producers)
        ]
        envelopes += [machine.envelope(Transaction(items=(produce(Q, b"y"),))) for _ in range(16)]
        answers = machine.entry(envelopes)
    assert all(isinstance(answer.reply, Committed) for answer in answers[producers:])
    machine.check()
    return count


def test_a_transaction_remembers_what_it_touches_and_not_what_the_entry_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """X1: the cost of being able to undo follows the transaction, not its neighbours in the entry."""
    few, many = remembered_beside(1, monkeypatch), remembered_beside(40, monkeypatch)
    assert few == many <= 16 * 5  # meta, the queue, its list of groups, its group


def kept_rows(of: State) -> object:
    """All that an undone block must give back."""
    kept = (of._queues, of._groups, of._producers, of._sessions, of._flights)
    rows = [{key: state._former(row) for key, row in part.items()} for part in kept]
    dirty = (of._dirty_queues, dict(of._dirty_groups), of._dirty_producers, of._dirty_sessions, of._dirty_flights)
    return rows, [sorted(part) for part in dirty], state._former(of.meta), of._digest, list(of.effects)


def test_an_undone_block_gives_back_every_kept_row_in_place() -> None:
    """X1: rows, what is to be written, digest and effects are as before, and whoever held a row holds that row."""
    machine = Counted()
    machine.do(produce(Q, b"a", client_id="p", first_seq=1, done_below=1))
    machine.lease()

    def work(txn: WriteTxn) -> None:
        of = State(txn)
        queue, group, producer = of.queue(1), of.group(1, "default"), of.producer(1, "p")
        assert queue is not None and group is not None and producer is not None
        session = next(txn.scan(Table.SESSION, b"", b"\xff" * 17))[0]
        row, flight = of.session(session), of.flight(group.hold, session)
        assert row is not None and flight == [1, 1]
        of.touch_group(group)
        meta, before = of.meta, kept_rows(of)
        with pytest.raises(LimitReached), of.all_or_nothing():
            inside = of.queue(1)
            assert inside is queue
            inside.tail += 7
            of.touch_queue(inside)
            for inner in of.groups(1):
                inner.in_flight += 7
                of.touch_group(inner)
            of.groups(1).pop()
            known = of.producer(1, "p")
            assert known is not None
            known.window.clear()
            of.touch_producer(1, "p")
            of.set_session(session, None)
            of.add_flight(group.hold, session, 5, 5)
            of.next_blob()
            of.meta.limits["queues"] = 1
            of.put(Table.READER, b"r", b"1")
            raise LimitReached(limit_name="queues", limit=1)
        assert kept_rows(of) == before
        assert of.queue(1) is queue and of.group(1, "default") is group and of.meta is meta
        assert of.session(session) is row and of.flight(group.hold, session) is flight
        assert txn.get(Table.READER, b"r") is None

    machine.store.transact(work)


def test_what_follows_a_refused_transaction_in_its_entry_sees_nothing_of_it() -> None:
    """X1: the rows that the entry keeps are those of before, for the commands behind it and on disk."""
    machine = Counted()
    machine.do(produce(Q, b"a"))
    lease_id = machine.lease().lease_id
    refused = Transaction(
        items=(
            AckBatch(queue_id=Q, group="default", ranges=((lease_id, 1, 1),)),
            produce(Q, b"b"),
            AckBatch(queue_id=Q, group="default", ranges=((lease_id, 1, 1),)),
        )
    )
    commands = (produce(Q, b"c"), refused, produce(Q, b"d"), Lease(queue_id=Q, group="default", max_messages=9))
    answers = [answer.reply for answer in machine.entry([machine.envelope(command) for command in commands])]
    assert answers[0] == Produced(first_version=Version(2), count=1)
    assert isinstance(answers[1], Failed)
    assert answers[2] == Produced(first_version=Version(3), count=1)
    assert isinstance(answers[3], Leased) and machine.payloads(Q, answers[3]) == [b"c", b"d"]
    machine.check()
    assert machine.do(AckBatch(queue_id=Q, group="default", ranges=((lease_id, 1, 1),))) == Settled(count=1)
    machine.check()


def test_a_block_that_is_done_leaves_its_changes() -> None:
    machine = Counted()

    def work(txn: WriteTxn) -> None:
        of = State(txn)
        queue = of.queue(1)
        assert queue is not None
        with of.all_or_nothing():
            inside = of.queue(1)
            assert inside is queue
            inside.tail += 1
            of.touch_queue(inside)
            assert of.producer(1, "new") is None
        assert of.queue(1) is queue and queue.tail == 1
        assert of._dirty_queues == {1}
        with pytest.raises(LimitReached), of.all_or_nothing():
            raise LimitReached(limit_name="queues", limit=1)
        assert queue.tail == 1 and of._dirty_queues == {1}

    machine.store.transact(work)


def test_a_body_of_an_undone_block_is_not_taken_for_the_next_of_that_number() -> None:
    """The ids of blobs are given out again after an undo: what was kept at hand of them goes."""
    machine = Counted()
    machine.do(produce(Q, b"a"))

    def work(txn: WriteTxn) -> None:
        of = State(txn)
        columns, body = of.content(1, 1, 1)
        blobs = []
        with pytest.raises(LimitReached), of.all_or_nothing():
            blobs.append(of.add_blob(state.content_hash(columns, b"b"), columns, b"b"))
            assert bytes(of.content(1, 1, blobs[0])[1]) == b"b"
            raise LimitReached(limit_name="queues", limit=1)
        blobs.append(of.add_blob(state.content_hash(columns, body), columns, body))
        assert blobs[0] == blobs[1]
        assert bytes(of.content(1, 1, blobs[1])[1]) == b"a"

    machine.store.transact(work)


# Pins --------------------------------------------------------------------------------------------------


def life_beside(pins: int) -> Counter[str]:
    """What the ack of one message costs in a queue with so many auto-acked leases that may still be asked for."""
    machine = Counted()
    machine.do(SetLimits(changes=(("session_window", 1_000),)))
    for session in range(2, 2 + pins):
        machine.do(OpenSession(), session=session)
        machine.do(produce(Q, b"x"))
        machine.do(Lease(queue_id=Q, group="default", max_messages=1, auto_ack=True), session=session)
    machine.do(produce(Q, b"x"))
    leased = machine.lease()
    machine.counts.clear()
    machine.do(AckBatch(queue_id=Q, group="default", ranges=((leased.lease_id, pins + 1, pins + 1),)))
    machine.check()
    return machine.counts.copy()


def test_freeing_a_batch_costs_the_same_beside_any_number_of_pins() -> None:
    """L6, G3: whether somebody may still ask for this batch is one look, not one for each that may ask for another."""
    few, many = life_beside(3), life_beside(200)
    assert few["last PIN"] == many["last PIN"] == 1
    assert not many["row PIN"]
    assert few["operations"] == many["operations"]


def test_pins_hold_batches_across_their_borders_and_only_those() -> None:
    """L6: a lease over several batches pins each of them, until its timeout."""
    machine = Counted(visibility_timeout_ms=1_000)
    machine.do(CreateGroup(queue_id=Q, group="other", start=1))
    for _ in range(4):
        machine.do(produce(Q, b"a", b"b", b"c"))
    taken = machine.lease(2, group="other")
    machine.do(AckBatch(queue_id=Q, group="other", ranges=((taken.lease_id, 1, 2),)))
    rest = machine.lease(10, group="other")
    machine.do(AckBatch(queue_id=Q, group="other", ranges=((rest.lease_id, 3, 12),)))
    first = machine.lease(2)
    machine.do(AckBatch(queue_id=Q, group="default", ranges=((first.lease_id, 1, 2),)))
    machine.lease(5, auto_ack=True)  # 3 … 7: the end of the first batch, the second, the beginning of the third
    last = machine.lease(5)  # 8 … 12
    machine.do(AckBatch(queue_id=Q, group="default", ranges=((last.lease_id, 8, 12),)))

    def stored() -> list[int]:
        with machine.store.read() as txn:
            return [int.from_bytes(key[8:], "big") for key, _ in txn.scan(Table.BATCH, k1(Q), k1(Q + 1))]

    assert stored() == [1, 4, 7]
    machine.pass_ms(1_000)
    machine.do(Touch(queue_id=Q))
    assert stored() == []
    machine.check()


def test_a_seek_leaves_the_pins_of_its_generation_to_the_reaper() -> None:
    """G5: a seek is one command however much was auto-acked, and its pins hold nothing from then on."""
    costs = []
    for pins in (2, 300):
        machine = Counted()
        for session in range(2, 2 + pins):
            machine.do(OpenSession(), session=session)
            machine.do(produce(Q, b"x"))
            machine.do(Lease(queue_id=Q, group="default", max_messages=1, auto_ack=True), session=session)
        machine.do(SetLimits(changes=(("reap_rows", 10),)))
        machine.counts.clear()
        machine.do(Seek(queue_id=Q, group="default", to="latest"))
        costs.append(machine.counts["row PIN"] + machine.counts["delete PIN"])
        for _ in range(250):
            machine.do(Touch(queue_id=Q))
        with machine.store.read() as txn:
            assert txn.first(Table.PIN, b"", b"\xff" * 32) is None
            assert txn.first(Table.BATCH, b"", b"\xff" * 32) is None
        machine.check()
    assert costs == [0, 0]


# Bodies ------------------------------------------------------------------------------------------------

N = 200
PAYLOAD = b"x" * 100
BATCH_BYTES = N * len(PAYLOAD)


def batch_of(machine: Counted, count: int = N) -> None:
    machine.do(produce(Q, *[PAYLOAD] * count))
    machine.counts.clear()


def test_versions_that_die_one_by_one_at_hand_out_read_their_batch_once(hashed: Counter[str]) -> None:
    """L3: the limit was lowered; each dies by itself, and the batch is read and verified once."""
    machine = Counted()
    batch_of(machine)
    leased = machine.lease(N)
    machine.do(Nack(queue_id=Q, group="default", ranges=((leased.lease_id, 1, N),)))
    machine.do(UpdateQueue(queue_id=Q, changes=(("max_delivery_attempts", 1),)))
    machine.counts.clear()
    hashed.clear()
    assert not machine.lease(N).grants
    assert machine.counts["get BLOB"] == 1
    assert hashed["bytes"] < 3 * BATCH_BYTES  # the batch, and each message's own copy
    machine.check()


def test_versions_that_die_one_by_one_when_their_delay_ends_read_their_batch_once(hashed: Counter[str]) -> None:
    machine = Counted()
    batch_of(machine)
    leased = machine.lease(N)
    machine.do(Nack(queue_id=Q, group="default", ranges=((leased.lease_id, 1, N),), delay_ms=100))
    machine.do(UpdateQueue(queue_id=Q, changes=(("max_delivery_attempts", 1),)))
    machine.pass_ms(100)
    machine.counts.clear()
    hashed.clear()
    machine.do(Touch(queue_id=Q))
    assert machine.counts["append BLOB"] == N
    assert machine.counts["get BLOB"] == 1
    assert hashed["bytes"] < 3 * BATCH_BYTES
    machine.check()


@pytest.mark.parametrize("strategy", ["park", "move"])
def test_a_nack_of_many_ranges_reads_their_batch_once(strategy: str, hashed: Counter[str]) -> None:
    """D1: what dies range by range in one command is cut from one reading of its batch."""
    machine = Counted()
    machine.do(CreateQueue(name="dlq"))
    if strategy == "move":
        machine.do(UpdateQueue(queue_id=Q, changes=(("dlq_queue", "dlq"), ("dlq_strategy", "move"))))
    batch_of(machine)
    leased = machine.lease(N)
    ranges = tuple((leased.lease_id, version, version) for version in range(1, N, 2))
    machine.counts.clear()
    hashed.clear()
    machine.do(Nack(queue_id=Q, group="default", ranges=ranges, dead=True))
    assert machine.counts["append BLOB"] == N // 2
    assert machine.counts["get BLOB"] == 1
    assert hashed["bytes"] < 6 * BATCH_BYTES  # lineage headers are longer than these payloads
    machine.check()


def test_a_redrive_of_one_row_reads_its_body_once(hashed: Counter[str]) -> None:
    """D4: where the batch is gone each version is stored by itself, cut from one reading of the dead row's copy."""
    machine = Counted()
    batch_of(machine)
    leased = machine.lease(N)
    machine.do(Nack(queue_id=Q, group="default", ranges=((leased.lease_id, 1, N),), dead=True))
    machine.counts.clear()
    hashed.clear()
    reply = machine.do(Redrive(queue_id=Q, group="default", dead=((1, N, 1),)))
    assert reply == Redriven(count=N, skipped=0)
    assert machine.counts["get BLOB"] == 1
    assert hashed["bytes"] < 3 * BATCH_BYTES
    machine.check()


def test_listing_the_deaths_of_one_row_verifies_its_body_once(hashed: Counter[str]) -> None:
    """D3: a query over a row of many versions reads the row's body once."""
    machine = Counted()
    batch_of(machine)
    leased = machine.lease(N)
    machine.do(Nack(queue_id=Q, group="default", ranges=((leased.lease_id, 1, N),), dead=True))
    hashed.clear()
    listed = machine.ask(DeadLetters(queue_id=Q, count_only=True))
    assert isinstance(listed, DeadListed) and listed.matched == N
    assert hashed["bytes"] < 2 * BATCH_BYTES


def test_bodies_at_hand_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Counted()
    for number in range(20):
        machine.do(produce(Q, bytes([number]) * 1_000))
    monkeypatch.setattr(state, "CONTENT_BYTES", 5_000)
    with machine.store.read() as txn:
        view = state.View(txn)
        for blob in (*range(1, 21), 3, 20):
            assert view.content(1, blob, blob)[1] == bytes([blob - 1]) * 1_000
            assert sum(len(body) for _, body in view._contents.values()) <= 5_000


# Staged produce ----------------------------------------------------------------------------------------


def published(*messages: MessageParts, **settings: object) -> Counted:
    machine = Counted(**settings)
    command = stage(Job("j"), Q, *messages)
    machine.do(command)
    machine.counts.clear()
    digest = int.from_bytes(command.content_hash[:8], "big")
    reply = machine.do(Publish(txn=Job("j"), parts=(Part(0, "a", 1, len(messages), digest),)))
    assert reply == Committed(versions=((Q, 1, len(messages)),)), reply
    machine.check()
    return machine


@pytest.mark.parametrize(
    "times",
    [{}, {"ttl_ms": 1_000}, {"delay_ms": 500}, {"delay_ms": 500, "ttl_ms": 1_000}],
    ids=["none", "ttl", "delay", "both"],
)
def test_a_publish_of_equal_times_moves_no_body(times: dict[str, int], hashed: Counter[str]) -> None:
    """X2: what is the same for all messages of a chunk is metadata; the staged body stays where it is."""
    machine = published(*[MessageParts(PAYLOAD, **times)] * 5)  # type: ignore[arg-type]
    for what in ("get", "append", "delete", "put", "insert"):
        assert not machine.counts[f"{what} BLOB"]
    twin = Counted()
    twin.do(produce(Q, *[MessageParts(PAYLOAD, **times)] * 5))  # type: ignore[arg-type]
    for step in (0, 499, 1, 499, 500, 1):
        machine.pass_ms(step)
        twin.pass_ms(step)
        assert machine.do(Touch(queue_id=Q)) == twin.do(Touch(queue_id=Q))
        asked = [m.ask(DescribeQueue(name="q")) for m in (machine, twin)]
        assert asked[0] == asked[1]
        machine.check()


def test_a_publish_of_different_times_is_cut() -> None:
    machine = published(MessageParts(b"a", delay_ms=500), MessageParts(b"b"), MessageParts(b"c"))
    assert machine.counts["append BLOB"] == 2
    assert machine.payloads(Q, machine.lease(5)) == [b"b", b"c"]
    machine.pass_ms(500)
    assert machine.payloads(Q, machine.lease(5)) == [b"a"]


# Readers -----------------------------------------------------------------------------------------------


def report(machine: Counted, reader: str, version: int = 0) -> object:
    return machine.do(ReportCursor(queue_id=Q, reader=reader, version=version))


def readers(machine: Counted) -> list[str]:
    reply = machine.ask(DescribeQueue(name="q"))
    assert isinstance(reply, QueueDescribed)
    return [reader.name for reader in reply.readers]


def test_readers_are_limited_and_the_silent_ones_give_their_place() -> None:
    """G3: a new reader above the limit is refused, unless one was silent for longer than it could hold anything."""
    machine = Counted(replay_ms=1_000)
    machine.do(SetLimits(changes=(("readers_per_queue", 2), ("cursor_hold_ms", 10_000))))
    assert [report(machine, name) for name in ("a", "b")] == [Done(), Done()]
    refused = report(machine, "c")
    assert isinstance(refused, Failed) and isinstance(refused.error, LimitReached)
    assert refused.error.facts == {"limit_name": "readers_per_queue", "limit": 2}
    machine.pass_ms(9_999)
    assert report(machine, "a") == Done()  # a known one is never refused
    assert isinstance(report(machine, "c"), Failed)
    assert readers(machine) == ["a", "b"]
    machine.pass_ms(1)
    assert report(machine, "c") == Done()
    assert readers(machine) == ["a", "c"]


def test_readers_are_read_once_an_entry_and_not_for_each_batch() -> None:
    """G3: how far the last reader has come is one number for all batches that it holds back."""
    machine = Counted(replay_ms=1_000)
    for number in range(30):
        report(machine, f"r{number}")
    for _ in range(20):
        machine.do(produce(Q, b"x"))
    leased = machine.lease(20)
    machine.do(AckBatch(queue_id=Q, group="default", ranges=((leased.lease_id, 1, 20),)))
    machine.pass_ms(2_000)
    machine.counts.clear()
    machine.do(Touch(queue_id=Q))
    assert machine.counts["row READER"] == 30
    described = machine.ask(DescribeQueue(name="q"))
    assert isinstance(described, QueueDescribed) and described.stored_messages == 20
    for number in range(30):
        report(machine, f"r{number}", 20)
    described = machine.ask(DescribeQueue(name="q"))
    assert isinstance(described, QueueDescribed) and described.stored_messages == 0
