"""Where the rules meet their limits: full maps, full frames, wide ranges, work that does not end in one command."""

from pathlib import Path

import pytest

from holdfast.client.protocol.codec import encode_answer
from holdfast.client.protocol.columns import MessageParts
from holdfast.client.protocol.commands import (
    AckBatch,
    Cancel,
    CreateGroup,
    CreateQueue,
    DropDead,
    Lease,
    Nack,
    OpenSession,
    Redrive,
    RedriveToOrigin,
    Reschedule,
    Seek,
    SetLimits,
    TimeStep,
    Touch,
    Transaction,
)
from holdfast.client.protocol.errors import BadValue, Overloaded
from holdfast.client.protocol.limits import FRAME_BODY_BYTES, FRAME_HEADER_BYTES, VERSIONS_NAMED
from holdfast.client.protocol.queries import DeadLetters, History, Peek, Read
from holdfast.client.protocol.replies import (
    Answer,
    Committed,
    DeadListed,
    Failed,
    Grant,
    HistoryListed,
    Leased,
    Messages,
    Produced,
    Settled,
    Started,
    VersionsChanged,
)
from holdfast.client.protocol.values import Place, QueueId, QueueSettings, Version
from holdfast.storage import digest, machine, views
from holdfast.storage.bench_floor import RecordingTxn, Trace
from holdfast.storage.effects import WakeConsumers
from holdfast.storage.entry import decode_entry, encode_entry
from holdfast.storage.lmdb_store import LmdbStore
from holdfast.storage.tables import TABLES
from tests.support.machine import Machine, produce

Q = QueueId(1)
HEAVY = MessageParts(b"x", headers={"h": "v" * 8_000})


def queue_with(*messages: bytes | MessageParts, store: LmdbStore | None = None, **settings: object) -> Machine:
    made = Machine(store)
    made.do(OpenSession(consumer_id="ann"))
    made.do(CreateQueue(name="q", settings=QueueSettings(**settings)))  # type: ignore[arg-type]
    if messages:
        assert isinstance(made.do(produce(Q, *messages)), Produced)
    return made


def take(made: Machine, count: int = 10_000, **named: object) -> Leased:
    reply = made.do(Lease(queue_id=Q, group="default", max_messages=count, **named))  # type: ignore[arg-type]
    assert isinstance(reply, Leased), reply
    return reply


# Full maps


def test_a_map_that_fills_up_inside_a_transaction_grows_and_the_transaction_is_done(tmp_path: Path) -> None:
    """X1: undoing its rows in a store transaction that has failed already would stop the node instead."""
    store = LmdbStore(tmp_path, TABLES, initial_map_bytes=1 << 18)
    made = queue_with(b"a", store=store)
    take(made)
    before = store.map_bytes()
    large = produce(Q, bytes(200_000))
    reply = made.do(Transaction(items=(AckBatch(queue_id=Q, group="default", ranges=((1, 1, 1),)), large, large)))
    assert isinstance(reply, Committed)
    assert store.map_bytes() > before
    store.close()


# Full frames


def test_a_lease_counts_keys_and_headers_so_that_its_answer_fits() -> None:
    """L1: an answer that fits no frame would be leased again and again, and its messages would die unseen."""
    made = queue_with(*[HEAVY] * 400, max_delivery_attempts=3)
    leased = take(made, max_bytes=100_000)
    assert leased.grants == (Grant(1, 12, 1, 1),)
    with made.store.read() as txn:
        _, body = encode_answer(Answer(Place(1, 0, 0), views.deliver(txn, Q, leased)))
    assert len(body) <= 100_000 < FRAME_BODY_BYTES


def test_pages_of_messages_count_keys_and_headers_too() -> None:
    made = queue_with(*[HEAVY] * 500)
    for _ in range(3):
        made.do(produce(Q, *[HEAVY] * 500))
    page = made.ask(Read(queue_id=Q, from_version=1, to_version=1_000, max_bytes=50_000))
    assert isinstance(page, Messages) and page.next_version == 7
    peeked = made.ask(Peek(queue_id=Q, limit=1_000))
    assert isinstance(peeked, Messages) and peeked.next_version is not None
    _, body = encode_answer(Answer(Place(1, -1, 0), peeked))
    assert len(body) < FRAME_BODY_BYTES


# Wide ranges


@pytest.mark.parametrize("kind", [Cancel, Redrive, DropDead, RedriveToOrigin, Reschedule])
def test_one_command_names_a_bounded_number_of_versions(kind: type) -> None:
    """P6, D4: one thread does the work; more versions are more commands."""

    def named(last: int) -> object:
        if kind is Cancel:
            return Cancel(queue_id=Q, versions=((1, last),))
        if kind is Reschedule:
            return Reschedule(queue_id=Q, versions=((1, last),), delay_ms=1)
        if kind is RedriveToOrigin:
            return RedriveToOrigin(queue_id=Q, group="default", versions=((1, last),))
        return kind(queue_id=Q, group="default", dead=((1, last, 1),))

    named(VERSIONS_NAMED)
    with pytest.raises(BadValue, match=str(VERSIONS_NAMED)):
        named(VERSIONS_NAMED + 1)


@pytest.mark.parametrize("kind", [Cancel, Reschedule])
def test_many_cuts_of_one_batch_cost_as_many_steps(kind: type) -> None:
    """P6: four times the cuts are about four times the operations and bytes, not sixteen times."""
    costs = [cost_of_cuts(kind, cuts) for cuts in (50, 200)]
    assert costs[1][0] < 6 * costs[0][0]
    assert costs[1][1] < 6 * costs[0][1]


def cost_of_cuts(kind: type, cuts: int) -> tuple[int, int]:
    """Operations and bytes written by one command that takes every second message out of a batch."""
    made = queue_with(*[b"x" * 100] * (2 * cuts))
    versions = tuple((version, version) for version in range(1, 2 * cuts + 1, 2))
    delays = {} if kind is Cancel else {"delay_ms": 5}
    data = encode_entry(made.now_ms, [made.envelope(kind(queue_id=Q, versions=versions, **delays))])
    trace = Trace()
    entry = decode_entry(made.index + 1, data)
    applied = made.store.transact(lambda txn: machine.apply(RecordingTxn(txn, trace), entry))
    reply = applied.answers[0].reply
    assert isinstance(reply, VersionsChanged) and all(one.outcome == "ok" for one in reply.outcomes)
    written = sum(len(arguments[1]) for _, name, arguments in trace.operations if name in ("put", "insert", "append"))
    return len(trace.operations), written


# What is not over in one command


def test_a_request_that_came_too_early_is_done_when_it_is_asked_again() -> None:
    """A1, T3: while more is due than one command folds, the answer is no answer: nothing is remembered under it."""
    made = queue_with(*[MessageParts(b"x", ttl_ms=1_000 + at) for at in range(10)], b"stays")
    made.do(SetLimits(changes=(("fold_ranges", 2),)))
    made.pass_ms(5_000)
    envelope = made.envelope(Cancel(queue_id=Q, versions=((11, 11),)))
    early = made.entry([envelope])[0].reply
    assert isinstance(early, Failed) and isinstance(early.error, Overloaded)
    for _ in range(10):
        made.do(Touch(queue_id=Q))
    late = made.entry([envelope])[0].reply
    assert isinstance(late, VersionsChanged) and late.outcomes[0].outcome == "ok"
    assert made.entry([envelope])[0].reply == late


def test_a_walk_that_ends_early_wakes_whoever_waits() -> None:
    """L7: behind more held batches than one Lease looks at something is available; the next Lease finds it."""
    made = queue_with(*[MessageParts(b"x", delay_ms=9_000 + at) for at in range(5)], b"plain")
    made.do(SetLimits(changes=(("scan_batches", 3),)))
    assert take(made).grants == ()
    assert WakeConsumers(Q, "default") in made.effects
    assert take(made).grants == (Grant(6, 6, 1, 1),)


def test_pages_of_history_go_on_behind_rows_that_are_too_old() -> None:
    """A page whose rows are all beyond their retention is not the end."""
    made = queue_with(*[b"x"], history=True)
    for _ in range(9):
        made.do(produce(Q, b"x"))
    made.do(SetLimits(changes=(("history_ms", 1_000),)))
    made.pass_ms(2_000)
    made.do(produce(Q, b"young"))
    found = []
    from_seq: int | None = 1
    while from_seq is not None:
        page = made.ask(History(queue_id=Q, from_seq=from_seq, limit=2))
        assert isinstance(page, HistoryListed)
        found += [row.first for row in page.rows]
        from_seq = page.next_seq
    assert found == [11]


# What must not get lost


@pytest.mark.parametrize("command", [Seek, CreateGroup])
def test_earliest_includes_what_was_redriven(command: type) -> None:
    """G2: it is unsettled again, below the floor that it left behind."""
    made = queue_with(b"a", b"b", b"c")
    take(made)
    made.do(Nack(queue_id=Q, group="default", ranges=((1, 1, 1),), dead=True))
    assert made.do(AckBatch(queue_id=Q, group="default", ranges=((1, 2, 3),))) == Settled(count=2)
    made.do(Redrive(queue_id=Q, group="default", dead=((1, 1, 1),)))
    if command is Seek:
        started = made.do(Seek(queue_id=Q, group="default", to="earliest"))
    else:
        started = made.do(CreateGroup(queue_id=Q, group="late", start="earliest"))
    assert started == Started(version=Version(1), moved=False)
    if command is Seek:
        assert take(made).grants == (Grant(1, 1, 1, 1),)


def test_the_digest_tells_states_apart_that_differ_in_time_alone() -> None:
    """Q2: time, steps, counters and limits are state, too."""
    digests = set()
    for by_ms in (1_000, 99_000):
        made = queue_with(b"a")
        made.do(TimeStep(by_ms=by_ms))
        with made.store.read() as txn:
            digests.add(digest.maintained(txn))
            assert digest.maintained(txn) == digest.recomputed(txn)
    assert len(digests) == 2


@pytest.mark.parametrize("message", [HEAVY, b"x" * 100_000], ids=["headers", "payloads"])
def test_pages_of_dead_letters_fit_a_frame(message: bytes | MessageParts) -> None:
    """D3: however many rows are asked for; the token goes on behind the last."""
    made = queue_with(message, dlq_strategy="park", max_delivery_attempts=1)
    for _ in range(119):
        made.do(produce(Q, message))
    leased = take(made, max_bytes=FRAME_BODY_BYTES)
    while leased.grants:
        ranges = tuple((leased.lease_id, grant.first, grant.last) for grant in leased.grants)
        made.do(Nack(queue_id=Q, group="default", ranges=ranges, dead=True))
        leased = take(made, max_bytes=FRAME_BODY_BYTES)
    found: list[int] = []
    token = b""
    pages = 0
    while pages == 0 or token:
        page = made.ask(DeadLetters(queue_id=Q, limit=10_000, after=token))
        assert isinstance(page, DeadListed) and page.rows
        header, body = encode_answer(Answer(Place(1, -1, 0), page))
        assert len(header) < FRAME_HEADER_BYTES and len(body) < FRAME_BODY_BYTES
        found += [row.version for row in page.rows]
        token = page.next_token
        pages += 1
    assert found == list(range(1, 121)) and pages > 1
