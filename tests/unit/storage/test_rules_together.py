"""Rules X1 and X2: settle and publish in one entry, and messages put aside until they are published."""

from typing import Any

import pytest

from holdfast.client.protocol.commands import (
    Abort,
    AckBatch,
    CreateQueue,
    Lease,
    Nack,
    OpenSession,
    Part,
    Publish,
    SetLimits,
    Stage,
    Transaction,
    UpdateQueue,
)
from holdfast.client.protocol.errors import (
    BatchTooLarge,
    StageConflict,
    StagedMissing,
    TransactionRefused,
    TxnClosed,
    TxnFenced,
)
from holdfast.client.protocol.limits import STAGE_BYTES
from holdfast.client.protocol.queries import Peek, Stats, TxnStatus
from holdfast.client.protocol.replies import (
    Aborted,
    Committed,
    Failed,
    Grant,
    GroupStats,
    Leased,
    Messages,
    Staged,
    TxnDescribed,
)
from holdfast.client.protocol.values import Job, QueueId, QueueSettings, Stream
from holdfast.storage.tables import Table
from tests.support import invariants
from tests.support.machine import START_MS, Machine, produce, session_id, stage

ORDERS = QueueId(1)
BILLS = QueueId(2)
JOB = Job("j1")


def queues(*orders: bytes, **bills: Any) -> Machine:
    """Two queues; the orders are leased by session 1 in lease 1."""
    machine = Machine()
    for session in (1, 2):
        machine.do(OpenSession(consumer_id=f"worker-{session}"), session)
    machine.do(CreateQueue(name="orders"))
    machine.do(CreateQueue(name="bills", settings=QueueSettings(**bills)))
    if orders:
        machine.do(produce(ORDERS, *orders))
        take(machine, ORDERS)
    return machine


def take(machine: Machine, queue: QueueId) -> Leased:
    reply = machine.do(Lease(queue_id=queue, group="default", max_messages=100))
    assert isinstance(reply, Leased), reply
    return reply


def ack(first: int, last: int, lease: int = 1) -> AckBatch:
    return AckBatch(queue_id=ORDERS, group="default", ranges=((lease, first, last),))


def stats(machine: Machine, queue: QueueId) -> GroupStats:
    reply = machine.ask(Stats(queue_id=queue, group="default"))
    assert isinstance(reply, GroupStats), reply
    return reply


def part(number: int, *chunks: Stage, attempt: str = "a") -> Part:
    """What a publish says of a part that has these chunks."""
    digest = 0
    for chunk in chunks:
        digest ^= int.from_bytes(chunk.content_hash[:8], "big")
    return Part(number, attempt, len(chunks), sum(chunk.columns.count for chunk in chunks), digest)


# X1: transactions


def test_a_transaction_settles_and_publishes_at_once() -> None:
    """X1: acks, nacks and produces over two queues are done in one entry, and the versions are told."""
    machine = queues(b"tea", b"cups")
    nack = Nack(queue_id=ORDERS, group="default", ranges=((1, 2, 2),), dead=True)
    reply = machine.do(Transaction(items=(ack(1, 1), produce(BILLS, b"x", b"y"), nack, produce(ORDERS, b"more"))))
    assert reply == Committed(versions=((2, 1, 2), (1, 3, 3)))
    assert (stats(machine, ORDERS).acked, stats(machine, ORDERS).dead, stats(machine, ORDERS).ready) == (1, 1, 1)
    assert machine.payloads(BILLS, take(machine, BILLS)) == [b"x", b"y"]


def test_one_refused_item_undoes_the_whole() -> None:
    """X1: a settle that would change nothing in part, or a queue that is full, leaves all as it was."""
    machine = queues(b"tea", b"cups", max_backlog_messages=1)
    digest = stats(machine, ORDERS), stats(machine, BILLS)
    for items, at in (
        ((produce(BILLS, b"x"), ack(1, 3)), 1),
        ((produce(BILLS, b"x"), ack(1, 1, lease=9)), 1),
        ((ack(1, 2), produce(BILLS, b"x", b"y")), 1),
        ((ack(1, 1), ack(1, 2)), 1),
        ((produce(9, b"x"), ack(1, 1)), 0),
    ):
        reply = machine.do(Transaction(items=items))
        assert isinstance(reply, Failed)
        assert isinstance(reply.error, TransactionRefused)
        assert reply.error.item == at
        assert (stats(machine, ORDERS), stats(machine, BILLS)) == digest
    assert machine.do(Transaction(items=(ack(1, 2), produce(BILLS, b"x")))) == Committed(versions=((2, 1, 1),))


def test_a_transaction_asked_again_is_done_once() -> None:
    """X1: the retry gets the first versions."""
    machine = queues(b"tea")
    request = machine.envelope(Transaction(items=(ack(1, 1), produce(BILLS, b"x"))))
    assert machine.entry([request])[0].reply == Committed(versions=((2, 1, 1),))
    assert machine.entry([request])[0].reply == Committed(versions=((2, 1, 1),), replayed=True)
    assert stats(machine, BILLS).tail_version == 1


def test_a_lease_that_is_over_refuses_the_transaction() -> None:
    """X1: at the deadline nothing is published, a millisecond before it is."""
    for passed, tail in ((29_999, 1), (30_000, 0)):
        machine = queues(b"tea")
        machine.pass_ms(passed)
        machine.do(Transaction(items=(ack(1, 1), produce(BILLS, b"x"))))
        assert stats(machine, BILLS).tail_version == tail


def test_messages_of_a_transaction_say_whose_they_are() -> None:
    """X1: client_id is the session's, client_seq the version."""
    machine = queues()
    machine.do(produce(BILLS, b"w"))
    machine.do(Transaction(items=(produce(BILLS, b"x"),)))
    page = machine.ask(Peek(queue_id=BILLS, from_version=2))
    assert isinstance(page, Messages)
    owner = f"session/{session_id(1).hex()}"
    assert [(batch.client_id, batch.first, batch.first_seq) for batch in page.batches] == [(owner, 2, 2)]


def test_a_refused_transaction_leaves_no_copy_of_the_dead() -> None:
    """X1: a message that its nack would have moved is undone with the rest, and is still leased."""
    machine = queues(b"tea")
    machine.do(CreateQueue(name="graves"))
    machine.do(UpdateQueue(queue_id=ORDERS, changes=(("dlq_strategy", "move"), ("dlq_queue", "graves"))))
    nack = Nack(queue_id=ORDERS, group="default", ranges=((1, 1, 1),), dead=True)
    reply = machine.do(Transaction(items=(nack, produce(BILLS, b"x"), produce(9, b"y"))))
    assert isinstance(reply, Failed)
    assert isinstance(reply.error, TransactionRefused)
    assert reply.error.item == 2
    assert [stats(machine, queue).tail_version for queue in (ORDERS, BILLS, QueueId(3))] == [1, 0, 0]
    assert stats(machine, ORDERS).in_flight == 1
    assert machine.do(Transaction(items=(nack, produce(BILLS, b"x")))) == Committed(versions=((2, 1, 1),))
    assert stats(machine, QueueId(3)).tail_version == 1


def test_another_sessions_lease_refuses_the_transaction() -> None:
    """X1: a settle that is not its session's changes nothing, so nothing is published."""
    machine = queues(b"tea")
    reply = machine.do(Transaction(items=(produce(BILLS, b"x"), ack(1, 1))), session=2)
    assert isinstance(reply, Failed)
    assert isinstance(reply.error, TransactionRefused)
    assert (stats(machine, BILLS).tail_version, stats(machine, ORDERS).in_flight) == (0, 1)


def test_a_refused_transaction_stays_refused_under_its_request() -> None:
    """X1: asked again it gets the same refusal, though it would work now."""
    machine = queues(b"tea", max_backlog_messages=1)
    machine.do(produce(BILLS, b"w"))
    request = machine.envelope(Transaction(items=(ack(1, 1), produce(BILLS, b"x"))))
    refusal = machine.entry([request])[0].reply
    assert isinstance(refusal, Failed)
    machine.do(UpdateQueue(queue_id=BILLS, changes=(("max_backlog_messages", None),)))
    assert machine.entry([request])[0].reply == refusal
    assert (stats(machine, BILLS).tail_version, stats(machine, ORDERS).in_flight) == (1, 1)


# X2: staged produce


def test_what_is_staged_is_invisible_until_one_publish() -> None:
    """X2: parts appear together, in the order of part, chunk and row, whatever the order of staging."""
    machine = queues()
    late = stage(JOB, BILLS, b"5", part=1)
    second, first = stage(JOB, BILLS, b"3", b"4", chunk=1), stage(JOB, BILLS, b"1", b"2")
    for chunk in (late, second, first):
        assert machine.do(chunk) == Staged()
    assert stats(machine, BILLS).tail_version == 0
    described = machine.ask(TxnStatus(txn=JOB))
    assert described == TxnDescribed(state="open", staged_bytes=5, expires_at_ms=START_MS + 60_000)
    publish = Publish(txn=JOB, parts=(part(1, late), part(0, first, second)))
    assert machine.do(publish) == Committed(versions=((2, 1, 5),))
    assert machine.payloads(BILLS, take(machine, BILLS)) == [b"1", b"2", b"3", b"4", b"5"]


def test_staging_and_publishing_again_changes_nothing() -> None:
    """X2: the same chunk is a replay, another content under its place a conflict; a second publish is the first."""
    machine = queues()
    chunk = stage(JOB, BILLS, b"1")
    machine.do(chunk)
    assert machine.do(chunk) == Staged(replayed=True)
    assert machine.do(stage(JOB, BILLS, b"2")) == Failed(StageConflict(part=0, attempt="a", chunk=0))
    publish = Publish(txn=JOB, parts=(part(0, chunk),))
    assert machine.do(publish) == Committed(versions=((2, 1, 1),))
    assert machine.do(publish, session=2) == Committed(versions=((2, 1, 1),), replayed=True)
    assert machine.do(stage(JOB, BILLS, b"3", chunk=1)) == Failed(TxnClosed())
    assert stats(machine, BILLS).tail_version == 1


def test_only_the_named_attempt_is_published() -> None:
    """X2: chunks of a task that was run twice are not mixed, and the other attempt's are dropped."""
    machine = queues()
    lost, kept = stage(JOB, BILLS, b"lost", attempt="a"), stage(JOB, BILLS, b"kept", attempt="b")
    machine.do(lost)
    machine.do(kept)
    assert machine.do(Publish(txn=JOB, parts=(part(0, kept, attempt="b"),))) == Committed(versions=((2, 1, 1),))
    assert machine.payloads(BILLS, take(machine, BILLS)) == [b"kept"]


def test_after_its_expiry_a_publish_is_never_a_success() -> None:
    """X2: a millisecond before it is published, at the expiry it is missing and nothing is written."""
    for passed, tail in ((59_999, 1), (60_000, 0)):
        machine = queues()
        chunk = stage(JOB, BILLS, b"1")
        machine.do(chunk)
        machine.pass_ms(passed)
        reply = machine.do(Publish(txn=JOB, parts=(part(0, chunk),)))
        missing = Failed(StagedMissing(part=0, attempt="a"))
        assert reply == (Committed(versions=((2, 1, 1),)) if tail else missing)
        assert stats(machine, BILLS).tail_version == tail


def test_a_part_that_is_not_as_named_publishes_nothing() -> None:
    """X2: a missing chunk, another count or another digest refuse the whole publish."""
    machine = queues()
    good, other = stage(JOB, BILLS, b"1"), stage(JOB, BILLS, b"2", part=1)
    machine.do(good)
    machine.do(other)
    wrong = part(1, other)
    for bad in (
        Part(1, "a", 2, wrong.count, wrong.digest),
        Part(1, "a", 1, 2, wrong.digest),
        Part(1, "a", 1, 1, wrong.digest ^ 1),
    ):
        reply = machine.do(Publish(txn=JOB, parts=(part(0, good), bad)))
        assert reply == Failed(StagedMissing(part=1, attempt="a"))
    assert stats(machine, BILLS).tail_version == 0


def test_an_abort_drops_what_is_staged() -> None:
    """X2: the number of chunks is told, and a publish afterwards finds nothing; a published one stays."""
    machine = queues()
    chunk = stage(JOB, BILLS, b"1")
    machine.do(chunk)
    assert machine.do(Abort(txn=JOB)) == Aborted(chunks=1)
    publish = Publish(txn=JOB, parts=(part(0, chunk),))
    assert machine.do(publish) == Failed(StagedMissing(part=0, attempt="a"))
    machine.do(chunk)
    assert machine.do(publish) == Committed(versions=((2, 1, 1),))
    assert machine.do(Abort(txn=JOB)) == Aborted(chunks=0)
    assert stats(machine, BILLS).ready == 1


def test_a_publish_is_not_refused_for_backlog() -> None:
    """X2: what was staged is published though the queue is full by then."""
    machine = queues(max_backlog_messages=1)
    chunk = stage(JOB, BILLS, b"1")
    machine.do(chunk)
    machine.do(produce(BILLS, b"x"))
    assert machine.do(Publish(txn=JOB, parts=(part(0, chunk),))) == Committed(versions=((2, 2, 2),))
    assert take(machine, BILLS).grants == (Grant(1, 2, 1, 1),)


def test_a_stream_belongs_to_one_query() -> None:
    """X2: another query under the same app is fenced off, and batches up to the last are published already."""
    machine = queues()
    chunk = stage(Stream("app", 3), BILLS, b"1")
    machine.do(chunk)
    publish = Publish(txn=Stream("app", 3), parts=(part(0, chunk),), fence="query-1")
    assert machine.do(publish) == Committed(versions=((2, 1, 1),))
    other = Publish(txn=Stream("app", 4), parts=(), fence="query-2")
    assert machine.do(other) == Failed(TxnFenced(app="app", fence="query-1"))
    older = Publish(txn=Stream("app", 2), parts=(), fence="query-1")
    assert machine.do(older) == Committed(versions=(), replayed=True)


def test_a_payload_enters_the_log_once() -> None:
    """X2: the entry of the publish is small, however much was staged."""
    machine = queues()
    chunk = stage(JOB, BILLS, b"x" * 100_000)
    machine.do(chunk)
    assert len(machine.log[-1][1]) > 100_000
    machine.do(Publish(txn=JOB, parts=(part(0, chunk),)))
    assert len(machine.log[-1][1]) < 1_000
    assert machine.payloads(BILLS, take(machine, BILLS)) == [b"x" * 100_000]


def test_what_is_staged_ends_by_itself() -> None:
    """X2: from its expiry on nobody sees it, its rows go with later entries, and staging begins anew."""
    machine = queues()
    chunk = stage(JOB, BILLS, b"1")
    machine.do(chunk)
    machine.pass_ms(60_000)
    machine.do(OpenSession(consumer_id="worker-1"))
    assert machine.ask(TxnStatus(txn=JOB)) == TxnDescribed(state="unknown")
    machine.do(OpenSession(consumer_id="worker-1"))
    with machine.store.read() as txn:
        assert list(txn.scan(Table.BLOB, b"", b"\xff" * 9)) == []
    assert machine.do(chunk) == Staged()
    assert machine.do(Publish(txn=JOB, parts=(part(0, chunk),))) == Committed(versions=((2, 1, 1),))


def test_every_chunk_moves_the_expiry() -> None:
    """X2: it counts from the last chunk that was accepted."""
    machine = queues()
    first, second = stage(JOB, BILLS, b"1"), stage(JOB, BILLS, b"2", chunk=1)
    machine.do(first)
    machine.pass_ms(59_999)
    machine.do(second)
    machine.pass_ms(59_999)
    publish = Publish(txn=JOB, parts=(part(0, first, second),))
    assert machine.do(publish) == Committed(versions=((2, 1, 2),))


# What the mutants showed to be untried


def test_a_refused_transaction_leaves_the_digest_and_wakes_nobody() -> None:
    """X1: what it had done before the refusal is neither in the digest nor in what the node is told to do."""
    machine = queues(b"o1")
    refused = machine.do(Transaction(items=(produce(BILLS, b"b1"), ack(1, 1), ack(7, 7))))
    assert refused == Failed(TransactionRefused(item=2, problem="LeaseExpired"))
    assert machine.effects == ()
    with machine.store.read() as txn:
        invariants.check(txn)


def test_what_was_aborted_takes_no_room() -> None:
    """X2: the bytes of a stage that was dropped can be staged again."""
    machine = queues()
    machine.do(SetLimits(changes=(("staged_bytes", 10),)))
    for _ in range(3):
        assert machine.do(stage(JOB, BILLS, b"8 bytes!")) == Staged()
        assert machine.do(Abort(txn=JOB)) == Aborted(chunks=1)


def test_a_staged_chunk_is_at_most_a_mebibyte() -> None:
    """X2: chunks of many producers take turns in the log."""
    stage(JOB, ORDERS, bytes(STAGE_BYTES))
    with pytest.raises(BatchTooLarge, match="STAGE_BYTES"):
        stage(JOB, ORDERS, bytes(STAGE_BYTES + 1))
