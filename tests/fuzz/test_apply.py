"""Apply meets anything that decodes, on states that a seeded run reached: it answers, or the state was broken before.

A refused command is a reply, whatever its numbers are. After every entry the answers survive the wire, the structure
of the tables holds, and the digest is the one of the rows. Queries on those states are answers, too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from holdfast.client.protocol import codec, limits
from holdfast.client.protocol import commands as c
from holdfast.client.protocol import queries as q
from holdfast.client.protocol.columns import MessageParts
from holdfast.client.protocol.errors import InvariantBroken
from holdfast.client.protocol.replies import Answer, DeadListed, Failed, Leased
from holdfast.client.protocol.values import Backoff, Job, LeaseId, QueueId, QueueSettings, SessionId
from holdfast.storage import digest, machine, views
from holdfast.storage.entry import Entry, decode_entry, encode_entry
from holdfast.storage.memory_store import MemoryStore
from holdfast.storage.rows import unpack_batch, unpack_dead, unpack_lease
from holdfast.storage.state import View, content_hash
from holdfast.storage.store import ReadTxn, WriteTxn
from holdfast.storage.tables import TABLES, Table, k1
from tests import strategies
from tests.support import invariants
from tests.support.generator import CLIENTS, GROUPS, NAMES, Generator
from tests.support.machine import START_MS, numbered, produce, session_id, stage

pytestmark = pytest.mark.fuzz

U63 = limits.U63_MAX
U64 = 2**64 - 1
BIG = U63 >> 8
ABOVE = b"\xff" * 64
OWNERS = 3  # sessions 1 to 3 are opened at the beginning of every run

# An example is a whole run, so each test draws a part of what the profile says.
UNHURRIED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


def share(of: int) -> settings:
    return settings(max_examples=max(2, settings().max_examples // of), suppress_health_check=UNHURRIED)


# A replica that is looked at after every entry ----------------------------------------------------------


class Replica:
    """Entries go in as log bytes; what comes out, and what the tables are then, is checked at once."""

    def __init__(self) -> None:
        self.store = MemoryStore(tables=TABLES)
        self.index = 0
        self.now_ms = START_MS
        self.log: list[tuple[int, tuple[c.Envelope, ...]]] = []

    def entry(self, envelopes: Sequence[c.Envelope], stamp_ms: int | None = None) -> tuple[Answer, ...]:
        """Apply one entry; the store may do as much for it as there are rows and commands, and no more."""
        stamp_ms = self.now_ms if stamp_ms is None else stamp_ms
        self.log.append((stamp_ms, tuple(envelopes)))
        self.index += 1
        decoded = decode_entry(self.index, encode_entry(stamp_ms, envelopes))
        applied = self.store.transact(lambda txn: machine.apply(Counting(txn, decoded), decoded))
        self._check_answers(applied.answers, len(envelopes))
        return applied.answers

    def check(self) -> None:
        """The structure of the tables; settled versions that lost their reason are beyond what it can count."""
        with self.store.read() as txn:
            assert View(txn).meta.applied == self.index
            assert digest.maintained(txn) == digest.recomputed(txn)
            if View(txn).limits.why_ranges >= limits.Limits().why_ranges:
                invariants.check(txn)

    def finish(self) -> None:
        """Remove what was deleted, and look for what nobody would ever remove."""
        with self.store.read() as txn:
            share = View(txn).limits.reap_rows
            most = 100 + sum(1 for table in Table for _ in txn.scan(table, b"", ABOVE)) * 2 // share
        for _ in range(most):
            if self._rows(Table.REAP) == 0:
                break
            self.entry([])
        assert self._rows(Table.REAP) == 0, "deleted things are never wholly removed"
        self.check()
        with self.store.read() as txn:
            check_nothing_is_left_over(txn)

    def ask(self, query: q.Query) -> Answer:
        header, body = codec.encode_query(query)
        with self.store.read() as txn:
            decoded = codec.decode_query(header, body)
            assert isinstance(decoded, q.Query)
            answer = views.answer(txn, decoded)
            assert (answer.place.index, answer.place.position) == (self.index, -1)
            check_wire(answer)
            return answer

    def _check_answers(self, answers: Sequence[Answer], count: int) -> None:
        assert [answer.place.position for answer in answers] == list(range(count))
        assert {answer.place.index for answer in answers} <= {self.index}
        times = [answer.place.time_ms for answer in answers]
        assert times == sorted(times)
        for answer in answers:
            check_wire(answer)
            assert not (isinstance(answer.reply, Failed) and isinstance(answer.reply.error, InvariantBroken))

    def _rows(self, table: Table) -> int:
        with self.store.read() as txn:
            return sum(1 for _ in txn.scan(table, b"", ABOVE))


def check_wire(answer: Answer) -> None:
    header, body = codec.encode_answer(answer)
    assert codec.decode_answer(header, body) == answer


class Counting:
    """A write transaction that ends after so many operations; each row of a scan is one.

    Allowed is far more than looking at every row a few times takes, and far less than a loop over versions.
    """

    def __init__(self, txn: WriteTxn, entry: Entry) -> None:
        self._txn = txn
        self._entry = entry
        self._used = 0
        self._allowed = 2_000

    def _count(self) -> None:
        self._used += 1
        if self._used > self._allowed:
            self._allowed = self._by_rows()
            assert self._used <= self._allowed, "an entry costs more than the state has rows"

    def _by_rows(self) -> int:
        rows = sum(1 for table in Table for _ in self._txn.scan(table, b"", ABOVE))
        named = sum(
            len(getattr(envelope.command, name, ()))
            for envelope, _ in self._entry.commands
            for name in ("ranges", "versions", "begin")
        )
        return 2_000 + 40 * rows * (1 + len(self._entry.commands)) + 400 * named

    def get(self, table: int, key: bytes) -> bytes | None:
        self._count()
        return self._txn.get(table, key)

    def view(self, table: int, key: bytes) -> memoryview | None:
        self._count()
        return self._txn.view(table, key)

    def first(self, table: int, low: bytes, high: bytes) -> tuple[bytes, bytes] | None:
        self._count()
        return self._txn.first(table, low, high)

    def last(self, table: int, low: bytes, high: bytes) -> tuple[bytes, bytes] | None:
        self._count()
        return self._txn.last(table, low, high)

    def scan(self, table: int, low: bytes, high: bytes) -> Iterator[tuple[bytes, bytes]]:
        for row in self._txn.scan(table, low, high):
            self._count()
            yield row

    def put(self, table: int, key: bytes, value: bytes | memoryview) -> bytes | None:
        self._count()
        return self._txn.put(table, key, value)

    def append(self, table: int, key: bytes, value: bytes | memoryview) -> None:
        self._count()
        self._txn.append(table, key, value)

    def insert(self, table: int, key: bytes, value: bytes | memoryview) -> None:
        self._count()
        self._txn.insert(table, key, value)

    def delete(self, table: int, key: bytes) -> bytes | None:
        self._count()
        return self._txn.delete(table, key)


# What nobody would ever remove ---------------------------------------------------------------------------

BY_GENERATION = (Table.DONE, Table.PIN)
BY_SHELF = (Table.BACK, Table.WAIT, Table.WAIT_DUE, Table.OPEN, Table.AGAIN)
BY_HOLD = (Table.LEASE, Table.LEASE_DUE, Table.FLIGHT)
BY_GRAVE = (Table.DEAD, Table.DEAD_DUE, Table.DEAD_AT)
BY_QUEUE = (
    Table.BATCH, Table.SCHED, Table.TTL, Table.PRODUCER, Table.READER, Table.HISTORY, Table.FREED,
    Table.KEPT, Table.SUM,
)  # fmt: skip


def check_nothing_is_left_over(txn: ReadTxn) -> None:
    """With no removal under way, each row belongs to something that exists, and each index row to a row."""
    view = View(txn)
    queue_ids = [number(key) for key, _ in txn.scan(Table.QUEUE, b"", ABOVE)]
    queues = [queue for queue in map(view.queue, queue_ids) if queue is not None and not queue.deleted]
    groups = [group for queue in queues for group in view.groups(queue.q)]
    alive = {
        **{table: {queue.q for queue in queues} for table in BY_QUEUE},
        **{table: {group.grave for group in groups} for table in BY_GRAVE},
        **{table: {group.g for group in groups} for table in BY_GENERATION},
        **{table: {group.shelf for group in groups} for table in BY_SHELF},
        **{table: {scope for group in groups for scope in (group.hold, group.g)} for table in BY_HOLD},
    }
    for table, ids in alive.items():
        for key, _ in txn.scan(table, b"", ABOVE):
            assert number(key) in ids, f"a row of {table.name} belongs to nothing"
    rows = {table: dict(txn.scan(table, b"", ABOVE)) for table in Table}
    batches = {key: unpack_batch(number(key, 8), data) for key, data in rows[Table.BATCH].items()}
    leases = {key: unpack_lease(data) for key, data in rows[Table.LEASE].items()}
    dead = {key: unpack_dead(data) for key, data in rows[Table.DEAD].items()}
    blobs = [batch.blob for batch in batches.values()] + [row.blob for row in dead.values()]
    blobs += [number(data) for data in rows[Table.STAGE].values()]
    assert sorted(blobs) == [number(key) for key in rows[Table.BLOB]], "blobs and those who own them differ"
    indexes = {
        Table.SCHED: [key[:8] + k1(batch.due) + key[8:] for key, batch in batches.items() if batch.due],
        Table.TTL: [key[:8] + k1(batch.expires) + key[8:] for key, batch in batches.items() if batch.expires],
        Table.KEPT: [key for key, batch in batches.items() if batch.flags],
        Table.LEASE_DUE: [key[:8] + k1(row.deadline) + k1(row.granted[0][0]) + key[8:] for key, row in leases.items()],
        Table.WAIT_DUE: [key[:8] + data[:8] + key[8:] for key, data in rows[Table.WAIT].items()],
        Table.DEAD_AT: [key[:8] + k1(row.span.lo) + key[8:] for key, row in dead.items()],
        Table.DEAD_DUE: [key[:8] + k1(row.died) + key[8:] for key, row in dead.items()],
    }
    for table, keys in indexes.items():
        assert sorted(keys) == list(rows[table]), f"{table.name} is not the index of its rows"
    for queue in queues:
        of_queue = {table: sum(number(key) == queue.q for key in rows[table]) for table in BY_QUEUE}
        assert of_queue[Table.KEPT] == queue.kept_rows
        assert of_queue[Table.FREED] == queue.freed_rows
        assert of_queue[Table.PRODUCER] == queue.producers
        assert of_queue[Table.READER] == queue.readers
        assert of_queue[Table.HISTORY] == queue.history_seq - queue.history_low + 1
    for group in groups:
        parked = [row.span for key, row in dead.items() if number(key) == group.grave]
        assert sum(span.hi - span.lo + 1 for span in parked) == group.parked
        pins = [(number(key, 8), number(data)) for key, data in rows[Table.PIN].items() if number(key) == group.g]
        assert len(pins) == group.pins
        assert all(before[1] < after[0] for before, after in pairwise(pins)), "pins overlap"
    assert view.meta.queues == len(queues)
    assert view.meta.sessions == len(rows[Table.SESSION]) == len(rows[Table.SESSION_IDLE])
    assert {key[:16] for key in rows[Table.REPLY]} <= set(rows[Table.SESSION])
    assert set(rows[Table.TXN_DUE].values()) <= set(rows[Table.TXN])
    opened = [data for key, data in rows[Table.TXN].items() if key[:1] in (b"o", b"p")]
    assert {number(key) for key in rows[Table.STAGE]} <= {number(data) for data in opened}
    assert sum(number(data, 8) for data in opened) == view.meta.staged_bytes


def number(data: bytes, at: int = 0) -> int:
    return int.from_bytes(data[at : at + 8], "big")


# States that a run can reach -----------------------------------------------------------------------------


@dataclass
class Reached:
    """A replica after some sensible entries, and the generator that can go on from there."""

    replica: Replica
    generator: Generator

    def go_on(self, entries: int) -> None:
        replica, generator = self.replica, self.generator
        for _ in range(entries):
            replica.now_ms += generator.step_ms()
            envelopes = generator.entry()
            for envelope, answer in zip(envelopes, replica.entry(envelopes), strict=True):
                generator.learn(envelope, answer)


def reach(seed: int, entries: int) -> Reached:
    reached = Reached(Replica(), Generator(Random(seed)))
    reached.replica.entry([opening(number) for number in range(1, OWNERS + 1)])
    reached.go_on(entries)
    enrich(reached)
    return reached


def enrich(reached: Reached) -> None:
    """Add a queue in which two groups have open leases, holes, dead rows and earlier generations."""
    rng = reached.generator.rng
    owner = 1

    def do(command: Any) -> Any:
        return reached.replica.entry([following(reached, command, owner)])[0].reply

    do(c.CreateQueue(name=RICH, settings=QueueSettings(history=rng.random() < 0.3), groups=("default", "fast")))
    with reached.replica.store.read() as txn:
        queue_id = View(txn).queue_id(RICH)
    if queue_id is None:  # there were as many queues as there may be
        return
    for _ in range(rng.randrange(1, 4)):
        do(produce(queue_id, *(b"x" for _ in range(rng.randrange(1, 4)))))
        count = rng.randrange(2, 6)
        for group in ("default", "fast"):
            owner = rng.randrange(1, OWNERS + 1)  # of the lease, and of what is said about it
            named: dict[str, Any] = {"queue_id": QueueId(queue_id), "group": group}
            if rng.random() < 0.2:
                do(c.Seek(**named, to="earliest"))
            leased = do(c.Lease(**named, max_messages=count))
            if isinstance(leased, Leased) and leased.grants:
                ranges = ((leased.lease_id, leased.grants[0].first, leased.grants[0].last - (rng.random() < 0.2)),)
                if ranges[0][1] <= ranges[0][2]:
                    dead = c.Nack(**named, ranges=ranges, dead=True)
                    do(
                        rng.choice(
                            (dead, dead, dead, dead, c.AckBatch(**named, ranges=ranges), c.Nack(**named, ranges=ranges))
                        )
                    )


def opening(number: int) -> c.Envelope:
    return c.Envelope(principal="local", command=c.OpenSession(consumer_id="ann"), session=session_id(number))


RICH = "rich"

seeds = st.integers(0, 2**32)
lengths = st.integers(20, 120)


@dataclass
class Present:
    """What exists in a state, for commands to meet."""

    time_ms: int
    queues: list[int] = field(default_factory=list)
    tails: dict[int, int] = field(default_factory=dict)
    groups: dict[int, list[str]] = field(default_factory=dict)
    leases: dict[tuple[int, str], list[tuple[int, int, int]]] = field(default_factory=dict)
    dead: dict[tuple[int, str], list[tuple[int, int, int]]] = field(default_factory=dict)
    producers: dict[int, list[tuple[str, int, int]]] = field(default_factory=dict)
    numbers: dict[bytes, list[int]] = field(default_factory=dict)
    staged: list[c.Stage] = field(default_factory=list)


def look(reached: Reached) -> Present:
    with reached.replica.store.read() as txn:
        view = View(txn)
        here = Present(view.time_ms, staged=reached.generator.known.staged)
        for key, _ in txn.scan(Table.QUEUE, b"", ABOVE):
            queue_id = number(key)
            queue = view.queue(queue_id)
            assert queue is not None
            here.queues.append(queue_id)
            here.tails[queue_id] = queue.tail
            here.groups[queue_id] = []
            for group in view.groups(queue_id):
                here.groups[queue_id].append(group.name)
                here.leases[queue_id, group.name] = [
                    (number(key, 8), lo, hi)
                    for scope in (group.g, group.hold)
                    for key, data in txn.scan(Table.LEASE, k1(scope), k1(scope + 1))
                    for lo, hi in unpack_lease(data).granted
                ]
                rows = [unpack_dead(data) for _, data in txn.scan(Table.DEAD, k1(group.grave), k1(group.grave + 1))]
                here.dead[queue_id, group.name] = [(row.span.lo, row.span.hi, row.dead_seq) for row in rows]
            here.producers[queue_id] = []
            for key, _ in txn.scan(Table.PRODUCER, k1(queue_id), k1(queue_id + 1)):
                client = key[8:].decode()
                producer = view.producer(queue_id, client)
                assert producer is not None
                here.producers[queue_id].append((client, producer.epoch, producer.high_water))
        for session, _ in txn.scan(Table.SESSION, b"", ABOVE):
            row = view.session(session)
            assert row is not None
            here.numbers[session] = [row.done_below, *sorted(row.window)[-12:]]
    return here


# Commands that meet what exists --------------------------------------------------------------------------

rarely = st.sampled_from([False] * 9 + [True])
now_and_then = st.sampled_from([False, False, True])


@st.composite
def some_ranges(draw: st.DrawFn, tail: int) -> tuple[tuple[int, int], ...]:
    """Ascending ranges of versions that may exist; the last one may go on far beyond them."""
    bounds = sorted(draw(st.sets(st.integers(1, tail + 3), min_size=1, max_size=6)))
    if len(bounds) % 2:
        bounds.append(bounds[-1] + limits.VERSIONS_NAMED // 2 if draw(now_and_then) else bounds[-1])
    return tuple(zip(bounds[::2], bounds[1::2], strict=True))


@st.composite
def some_settle_ranges(
    draw: st.DrawFn, leases: list[tuple[int, int, int]], tail: int
) -> tuple[tuple[int, int, int], ...]:
    ranges = []
    for _ in range(draw(st.integers(1, 4))):
        lease, lo, hi = draw(st.sampled_from(leases or [(1, 1, 1)]))
        lo = draw(st.sampled_from([lo, lo, 1, min(lo + 1, hi), hi]))
        hi = draw(st.sampled_from([hi, hi, lo, max(tail, lo), U63]))
        ranges.append((lease, min(lo, hi), max(lo, hi)))
    return strategies.apart(ranges)


@st.composite
def some_dead(draw: st.DrawFn, rows: list[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Deaths as they are, in part, or with numbers that go on far beyond them."""
    found: list[tuple[int, int, int]] = []
    for lo, hi, dead_seq in sorted(draw(st.lists(st.sampled_from(rows or [(1, 1, 1)]), min_size=1, max_size=4))):
        first = draw(st.integers(lo, hi))
        last = draw(st.sampled_from([hi, first, hi + 1, first + limits.VERSIONS_NAMED // 8]))
        if (found and found[-1][1] >= first) or last < first:
            continue
        found.append((first, last, dead_seq + first - lo))
    return tuple(found) or ((1, 1, 1),)


@st.composite
def fitted(draw: st.DrawFn, command: Any, here: Present) -> Any:
    """The same command with most of its names and numbers replaced by such as exist."""
    if isinstance(command, c.Transaction):
        return replace(command, items=tuple(draw(fitted(item, here)) for item in command.items))
    names = {each.name for each in fields(command)}
    new: dict[str, Any] = {}
    queue_id, group, tail = getattr(command, "queue_id", 0), getattr(command, "group", ""), 1
    if "queue_id" in names and here.queues and not draw(rarely):
        queue_id = new["queue_id"] = QueueId(draw(st.sampled_from([*here.queues, *here.queues[-1:] * 3])))
        tail = here.tails[queue_id]
    if "group" in names and not draw(rarely):
        known = here.groups.get(queue_id) or ["default"]
        group = new["group"] = draw(st.sampled_from([*known, *known, *GROUPS]))
    leases = here.leases.get((queue_id, group or ""), [])
    if "ranges" in names and not draw(rarely):
        new["ranges"] = draw(some_settle_ranges(leases, tail))
    if "lease_id" in names and leases and not draw(rarely):
        new["lease_id"] = LeaseId(draw(st.sampled_from(leases))[0])
    for name in ("versions", "begin"):
        if name in names and not draw(rarely):
            new[name] = draw(some_ranges(tail))
    if names & {"dead"} and type(command) in (c.Redrive, c.DropDead) and not draw(rarely):
        new["dead"] = draw(some_dead(here.dead.get((queue_id, group), [])))
    for name in ("start", "to"):
        if name in names and draw(now_and_then):
            new[name] = draw(st.integers(1, tail + 2))
    if "name" in names:
        new["name"] = draw(st.sampled_from([*NAMES, command.name]))
    for name in ("not_before_ms", "delay_ms"):
        if getattr(command, name, None) is not None and draw(now_and_then):
            new[name] = draw(st.integers(0, 5)) + (here.time_ms if name == "not_before_ms" else 0)
    if isinstance(command, c.CreateQueue | c.CreateGroup):
        new["settings"] = replace(command.settings, **draw(existing_target(command.settings.dlq_queue)))
    if isinstance(command, c.UpdateQueue | c.UpdateGroup):
        target = draw(existing_target(dict(command.changes).get("dlq_queue")))
        new["changes"] = tuple((name, target.get(name, value)) for name, value in command.changes)
    if isinstance(command, c.Produce | c.OpenProducer | c.ForgetProducer) and command.client_id is not None:
        new |= draw(some_producer(command, here.producers.get(queue_id, [])))
    if isinstance(command, c.Stage | c.Publish | c.Abort | c.ForgetTxn) and here.staged and not draw(rarely):
        new |= draw(some_staged(command, here.staged))
    if isinstance(command, c.Lease) and draw(now_and_then):
        new["visibility_timeout_ms"] = None
    command = replace(command, **new)
    if isinstance(command, c.Produce | c.Stage):
        command = replace(command, content_hash=content_hash(command.columns, command.body))
    return command


def existing_target(former: Any) -> st.SearchStrategy[dict[str, Any]]:
    if former is None:
        return st.just({})
    return st.fixed_dictionaries({"dlq_queue": st.sampled_from(NAMES)})


@st.composite
def some_producer(draw: st.DrawFn, command: Any, known: list[tuple[str, int, int]]) -> dict[str, Any]:
    client, epoch, high = draw(st.sampled_from(known or [(CLIENTS[0], 0, 0)]))
    if not isinstance(command, c.Produce):
        return {"client_id": client}
    return {
        "client_id": client,
        "epoch": draw(st.sampled_from([epoch, epoch, epoch, command.epoch])),
        "numbering_epoch": draw(st.sampled_from([epoch, command.numbering_epoch])),
        "first_seq": max(1, min(draw(st.sampled_from([high + 1, high + 1, high, command.first_seq])), U63 - 10**6)),
        "after_seq": draw(st.sampled_from([None, high, command.after_seq])),
    }


@st.composite
def some_staged(draw: st.DrawFn, command: Any, staged: list[c.Stage]) -> dict[str, Any]:
    made = draw(st.sampled_from(staged))
    if isinstance(command, c.Stage):
        return {"txn": made.txn, "part": made.part, "attempt": made.attempt, "chunk": draw(st.integers(0, 2))}
    if not isinstance(command, c.Publish) or draw(rarely):
        return {"txn": made.txn}
    digest_of = int.from_bytes(made.content_hash[:8], "big")
    part = c.Part(made.part, made.attempt, 1, made.columns.count, digest_of)
    return {"txn": made.txn, "parts": (part,), "fence": draw(st.sampled_from(["query", command.fence]))}


principals = st.sampled_from(["local", "local", "local", "local", "mallory", "é" * 40, "x" * limits.NAME_BYTES])


@st.composite
def envelopes(draw: st.DrawFn, here: Present, command: st.SearchStrategy[Any]) -> c.Envelope:
    """A command with some session: one that is known, none, a strange one; numbered next, again, or anyhow."""
    session = SessionId(b"")
    if not draw(rarely):
        known = [session_id(at) for at in range(1, OWNERS + 1)]
        session = draw(st.sampled_from([*known, *map(SessionId, here.numbers)]))
    elif draw(st.booleans()):
        session = draw(strategies.sessions)
    numbers = here.numbers.get(session, [0])
    request_seq = draw(st.sampled_from([max(numbers) + 1] * 4 + [max(numbers) + 2, *numbers, 0, U63]))
    request_seq = min(request_seq, U63)
    if not draw(rarely):  # so that the next one can be above it
        request_seq = min(request_seq, U63 - 1_000)
    made = draw(fitted(draw(command), here))
    return c.Envelope(
        principal=draw(principals) if draw(now_and_then) else "local",
        command=made,
        session=session,
        request_seq=request_seq,
        done_below=draw(st.sampled_from([0, 0, 0, numbers[0], request_seq, draw(strategies.numbers())])),
    )


def stamps(now_ms: int) -> st.SearchStrategy[int]:
    return st.one_of(
        st.just(now_ms),
        st.integers(0, 100_000).map(lambda more: now_ms + more),
        st.sampled_from([0, 1, now_ms - 1, now_ms + 3_600_000, now_ms + 10**9, U63, U63 + 1, U64]),
        st.integers(0, U64),
    )


any_command = st.one_of(*strategies.LOGGED.values())


def shake(data: st.DataObject, reached: Reached, entries: int, command: st.SearchStrategy[Any] = any_command) -> None:
    """Apply entries of arbitrary commands; the state must be sound after each."""
    replica = reached.replica
    for _ in range(entries):
        here = look(reached)
        made = data.draw(st.lists(envelopes(here, command), min_size=1, max_size=3))
        replica.entry(made, data.draw(stamps(here.time_ms)))
        replica.check()
    replica.now_ms = max(replica.now_ms, look(reached).time_ms)


# (a) Any command on any state ----------------------------------------------------------------------------


@share(5)
@given(seed=seeds, length=lengths, data=st.data())
def test_any_command_on_any_state_has_an_answer(seed: int, length: int, data: st.DataObject) -> None:
    reached = reach(seed, length)
    reached.replica.check()
    shake(data, reached, data.draw(st.integers(1, 5)))
    reached.go_on(10)
    reached.replica.finish()


@pytest.mark.parametrize("kind", strategies.LOGGED, ids=lambda kind: kind.__name__)
@share(40)
@given(seed=seeds, data=st.data())
def test_every_command_on_any_state_has_an_answer(kind: type[Any], seed: int, data: st.DataObject) -> None:
    reached = reach(seed, 40)
    shake(data, reached, 3, strategies.LOGGED[kind])
    reached.go_on(5)
    reached.replica.finish()


ANY: dict[str, Any] = {"queue_id": QueueId(1), "group": "default"}
about_versions = st.sampled_from(  # as small as they can be: `fitted` puts in what exists
    [
        *[c.Redrive(**ANY, dead=((1, 1, 1),))] * 4,
        c.DropDead(**ANY, dead=((1, 1, 1),)),
        *[c.Lease(**ANY, max_messages=2), c.Lease(**ANY, max_messages=9, auto_ack=True)],
        *[c.AckBatch(**ANY, ranges=((1, 1, 1),)), c.Release(**ANY, ranges=((1, 1, 1),))],
        *[c.Nack(**ANY, ranges=((1, 1, 1),), dead=True), c.Nack(**ANY, ranges=((1, 1, 1),), delay_ms=5)],
        c.Cancel(queue_id=QueueId(1), versions=((1, 1),)),
        c.Reschedule(queue_id=QueueId(1), versions=((1, 1),), delay_ms=5),
        *[c.Seek(**ANY, to="earliest"), c.CreateGroup(**ANY), c.DeleteGroup(**ANY), c.PurgeQueue(**ANY)],
        c.SetLimits(changes=(("why_ranges", 1),)),
        produce(1, b"x", b"y"),
    ]
)


@share(5)
@given(seed=seeds, data=st.data())
def test_commands_about_versions_in_any_order_have_answers(seed: int, data: st.DataObject) -> None:
    reached = reach(seed, 0)
    shake(data, reached, 8, about_versions)
    reached.go_on(10)
    reached.replica.finish()


@share(5)
@given(data=st.data(), stamp=st.integers(0, U63 >> 1))
def test_any_command_on_an_empty_state_has_an_answer(data: st.DataObject, stamp: int) -> None:
    reached = Reached(Replica(), Generator(Random(0)))
    reached.replica.entry([opening(1)], stamp)
    shake(data, reached, 4)
    reached.replica.finish()


@share(5)
@given(seed=seeds, length=lengths, data=st.data())
def test_two_replicas_that_cut_the_log_anywhere_agree(seed: int, length: int, data: st.DataObject) -> None:
    """One keeps its rows between entries and one starts from its tables: what is kept in memory decides nothing."""
    reached = reach(seed, length)
    shake(data, reached, 2)
    replica = reached.replica
    entries = [decode_entry(at, encode_entry(*logged)) for at, logged in enumerate(replica.log, 1)]
    cut = data.draw(st.integers(1, len(entries)))
    other = MemoryStore(tables=TABLES)
    for part in (entries[:cut], entries[cut:]):
        other.transact(lambda txn, part=part: machine.apply_all(txn, part))  # type: ignore[misc]
    with other.read() as theirs, replica.store.read() as ours:
        assert digest.maintained(theirs) == digest.maintained(ours)


# (b) Extremes --------------------------------------------------------------------------------------------

ENDLESS = ((1, U63), (2, U63), (5, 2**62), (U63, U63))


def endless(here: Present, queue_id: int, group: str, first: int, last: int) -> list[Any]:
    """Every command that names versions, with the widest range that it may name."""
    widest = min(last, first + limits.VERSIONS_NAMED - 1)
    named: dict[str, Any] = {"queue_id": QueueId(queue_id), "group": group}
    lease = here.leases.get((queue_id, group)) or [(1, 1, 1)]
    dead = here.dead.get((queue_id, group)) or [(1, 1, 1)]
    ranges = strategies.apart((each, first, last) for each, _, _ in lease[:10])
    deaths = ((first, widest, 0), (first, widest, 1), (dead[0][0], dead[0][0] + widest - first, dead[0][2]))
    return [
        c.Cancel(queue_id=QueueId(queue_id), versions=((first, widest),)),
        c.Reschedule(queue_id=QueueId(queue_id), versions=((first, widest),), delay_ms=BIG),
        c.Reschedule(queue_id=QueueId(queue_id), versions=((first, widest),), not_before_ms=BIG),
        c.Extend(**named, lease_id=LeaseId(lease[0][0]), begin=((first, last),)),
        c.Release(**named, ranges=ranges),
        c.Nack(**named, ranges=ranges, delay_ms=5),
        c.AckBatch(**named, ranges=ranges),
        c.Nack(**named, ranges=ranges, dead=True),
        c.RedriveToOrigin(**named, versions=((first, widest),)),
        *(c.Redrive(**named, dead=(each,)) for each in deaths),
        *(c.DropDead(**named, dead=(each,)) for each in deaths),
        c.Seek(**named, to=last),
        c.CreateGroup(queue_id=QueueId(queue_id), group="late", start=last),
        c.ReportCursor(queue_id=QueueId(queue_id), reader="far", version=last),
    ]


@share(8)
@given(seed=seeds, length=lengths, bounds=st.sampled_from(ENDLESS), session=st.integers(1, OWNERS))
def test_a_range_without_end_costs_what_is_there(seed: int, length: int, bounds: tuple[int, int], session: int) -> None:
    reached = reach(seed, length)
    here = look(reached)
    for queue_id in here.queues:
        for group in here.groups[queue_id] or ["default"]:
            for command in endless(look(reached), queue_id, group, *bounds):
                reached.replica.entry([following(reached, command, session)])
                reached.replica.check()
    reached.go_on(5)
    reached.replica.finish()


def following(reached: Reached, command: Any, session: int = 1) -> c.Envelope:
    """The next request of a session that has its answers so far."""
    used = look(reached).numbers.get(session_id(session), [0])
    seq = max(used) + 1 if numbered(command) else 0
    return c.Envelope(
        principal="local", command=command, session=session_id(session), request_seq=seq, done_below=max(used)
    )


@pytest.mark.parametrize("value", [1, 2**62])
@pytest.mark.parametrize("name", c.LIMITS)
@share(50)
@given(seed=seeds, length=lengths)
def test_every_limit_may_be_1_or_huge(name: str, value: int, seed: int, length: int) -> None:
    reached = reach(seed, length)
    reached.replica.entry([opening(1)])
    command = c.SetLimits(changes=((name, value),))
    reached.replica.entry([following(reached, command)])
    for _ in range(8):
        reached.go_on(5)
        reached.replica.check()
    reached.replica.finish()


@share(10)
@given(seed=seeds, values=st.lists(st.sampled_from([1, 2, 3, 2**62]), min_size=len(c.LIMITS), max_size=len(c.LIMITS)))
def test_all_limits_may_be_small_together(seed: int, values: list[int]) -> None:
    reached = reach(seed, 40)
    reached.replica.entry([opening(1)])
    changes = tuple(zip(c.LIMITS, values, strict=True))
    reached.replica.entry([following(reached, c.SetLimits(changes=changes))])
    for _ in range(8):
        reached.go_on(5)
        reached.replica.check()
    reached.replica.finish()


LARGEST = QueueSettings(
    max_ack_holes=BIG, max_in_flight_per_session=BIG, max_backlog_messages=BIG, max_backlog_bytes=BIG,
    max_message_bytes=BIG, default_message_ttl_ms=BIG, on_expired="dead_letter", dead_retention_ms=BIG, replay_ms=BIG,
    replay_bytes=BIG, drop_after_ms=BIG, drop_after_bytes=BIG, producer_expiry_ms=BIG, max_lease_ms=BIG,
    max_nack_delay_ms=BIG, history=True, visibility_timeout_ms=BIG, max_delivery_attempts=limits.U32_MAX,
    max_in_flight=BIG, backoff=Backoff("exponential", BIG, BIG), backoff_on_expiry=True,
)  # fmt: skip
SMALLEST = QueueSettings(
    max_ack_holes=1, max_in_flight_per_session=1, max_backlog_messages=1, max_backlog_bytes=1, max_message_bytes=1,
    default_message_ttl_ms=1, on_expired="dead_letter", dead_retention_ms=1, replay_ms=0, replay_bytes=0,
    drop_after_ms=1, drop_after_bytes=1, producer_expiry_ms=1, max_lease_ms=1, max_nack_delay_ms=0, history=True,
    visibility_timeout_ms=1, max_delivery_attempts=1, max_in_flight=1,
)  # fmt: skip
OF_THEM = tuple(each.name for each in fields(QueueSettings) if each.name not in ("dlq_strategy", "dlq_queue"))


def extreme_commands(queue_id: int, big: int) -> list[Any]:
    """One life of a queue with the largest numbers that each command takes."""
    far = [
        MessageParts(b"", delay_ms=big, ttl_ms=max(big, 1)),
        MessageParts(b"m", not_before_ms=big, ttl_ms=1),
        MessageParts(b"mm", delay_ms=big, not_before_ms=big, ttl_ms=max(big, 1)),
        MessageParts(b"mmm", ttl_ms=max(big, 1)),
        MessageParts(b"mmmm"),
    ]
    one: dict[str, Any] = {"queue_id": QueueId(queue_id), "group": "default"}
    return [
        produce(queue_id, *far),
        produce(queue_id, *far, client_id="far", epoch=0, numbering_epoch=U63, first_seq=U63 - 10**6, done_below=U63),
        produce(queue_id, *far, client_id="far", epoch=0, first_seq=U63 - 10**6, after_seq=U63),
        produce(queue_id, *far, client_id="near", epoch=U63),
        c.Lease(**one, max_messages=3, max_bytes=1, visibility_timeout_ms=BIG),
        c.Lease(**one, max_messages=10_000, max_bytes=limits.FRAME_BODY_BYTES, wait_ms=U63),
        c.Extend(**one, lease_id=LeaseId(1), visibility_timeout_ms=BIG, begin=((1, U63),)),
        c.Extend(**one, lease_id=LeaseId(U63), visibility_timeout_ms=BIG),
        c.Nack(**one, ranges=((1, 1, U63),), delay_ms=big),
        c.Nack(**one, ranges=((2, 1, 4),), not_before_ms=big),
        c.Nack(**one, ranges=((2, 1, U63), (U63, 1, U63), (0, 1, U63)), error="x" * limits.ERROR_TEXT_BYTES),
        c.Reschedule(queue_id=QueueId(queue_id), versions=((U63 - 9, U63),), delay_ms=big),
        c.Reschedule(queue_id=QueueId(queue_id), versions=((1, limits.VERSIONS_NAMED),), not_before_ms=big),
        c.ReportCursor(queue_id=QueueId(queue_id), reader="far", version=U63),
        c.Redrive(**one, dead=((1, limits.VERSIONS_NAMED, U63),)),
        c.Seek(**one, to=U63),
        c.Seek(**one, to=1),
        stage(Job("far"), queue_id, *far, part=limits.U32_MAX, chunk=limits.U32_MAX, expires_ms=BIG),
        stage(Job("far"), queue_id, *far, part=limits.U32_MAX, chunk=0, expires_ms=BIG),
        c.Publish(txn=Job("far"), parts=(c.Part(limits.U32_MAX, "a", 1, U63, 2**64 - 1),)),
        c.Touch(queue_id=QueueId(queue_id)),
    ]


@pytest.mark.parametrize("start_ms", [0, START_MS, BIG])
@share(5)
@given(
    one=st.sampled_from([LARGEST, SMALLEST]),
    other=st.sampled_from([LARGEST, SMALLEST]),
    mixed=st.sets(st.sampled_from([name for name in OF_THEM if name not in ("visibility_timeout_ms", "max_lease_ms")])),
    big=st.sampled_from([0, 1, BIG]),
    order=st.randoms(use_true_random=False),
    steps=st.lists(st.sampled_from([0, 1, 10**6, BIG]), min_size=45, max_size=45),
)
def test_the_largest_numbers_have_answers(
    start_ms: int, one: QueueSettings, other: QueueSettings, mixed: set[str], big: int, order: Random, steps: list[int]
) -> None:
    chosen = replace(one, **{name: getattr(other, name) for name in sorted(mixed)})
    reached = Reached(Replica(), Generator(order))
    replica = reached.replica
    replica.now_ms = start_ms
    replica.entry([opening(1)])
    replica.entry([following(reached, c.CreateQueue(name="grave"))])
    replica.entry([following(reached, c.CreateQueue(name="far", settings=chosen))])
    extremes = extreme_commands(2, big)
    order.shuffle(extremes)
    for command in [*extremes, *extreme_commands(2, big)]:
        aimed = [command]
        if steps and (step := steps.pop()):
            aimed.append(c.TimeStep(by_ms=step))
        replica.entry([following(reached, each) for each in aimed])
        replica.check()
        replica.entry([opening(1)])
    replica.finish()


@pytest.mark.parametrize("stamp", [U63 - 1, U63, U63 + 1, U64])
def test_the_first_stamp_may_be_any(stamp: int) -> None:
    reached = Reached(Replica(), Generator(Random(1)))
    reached.replica.now_ms = stamp
    reached.replica.entry([opening(1)])
    reached.replica.entry([following(reached, c.CreateQueue(name="q"))])
    for command in extreme_commands(1, BIG):
        reached.replica.entry([following(reached, command)])
        reached.replica.check()


def test_time_may_be_stepped_for_ever() -> None:
    reached = Reached(Replica(), Generator(Random(1)))
    reached.replica.entry([opening(1)])
    for _ in range(600):
        reached.replica.entry([c.Envelope(principal="local", command=c.TimeStep(by_ms=BIG))])
    reached.replica.entry([opening(1)])
    reached.replica.entry([following(reached, c.CreateQueue(name="q"))])
    for command in extreme_commands(1, BIG):
        reached.replica.entry([following(reached, command)])
        reached.replica.check()


def test_stamps_may_run_ahead_as_far_as_a_huge_limit_lets_them() -> None:
    reached = Reached(Replica(), Generator(Random(1)))
    reached.replica.entry([opening(1)])
    reached.replica.entry([following(reached, c.SetLimits(changes=(("stamp_advance_ms", 2**62),)))])
    for _ in range(6):
        reached.replica.entry([opening(1)], U64)
    reached.replica.entry([following(reached, c.CreateQueue(name="q"))])
    for command in extreme_commands(1, BIG):
        reached.replica.entry([following(reached, command)])
        reached.replica.check()


# (c) Who asks --------------------------------------------------------------------------------------------


@share(5)
@given(seed=seeds, data=st.data())
def test_any_session_and_number_has_an_answer(seed: int, data: st.DataObject) -> None:
    """Retries of what was asked before, under the same and other numbers, sessions and principals."""
    reached = reach(seed, 60)
    for _ in range(4):
        here = look(reached)
        sent = st.sampled_from(reached.generator.known.sent[-40:])
        made = []
        for _ in range(data.draw(st.integers(1, 4))):
            former = data.draw(sent)
            other = data.draw(envelopes(here, st.just(former.command)))
            names = data.draw(st.sets(st.sampled_from(["principal", "session", "request_seq", "done_below"])))
            made.append(replace(former, **{name: getattr(other, name) for name in names}))
        reached.replica.entry(made, data.draw(stamps(here.time_ms)))
        reached.replica.check()
    reached.replica.finish()


@share(5)
@given(
    principal=st.one_of(strategies.texts(60, min_size=1), st.sampled_from(["é" * 127, "x" * limits.NAME_BYTES])),
    consumer=strategies.texts(limits.CONSUMER_ID_BYTES, min_size=0),
    session=strategies.sessions,
    numbers=st.lists(strategies.numbers(), min_size=3, max_size=3),
)
def test_any_principal_has_an_answer(principal: str, consumer: str, session: SessionId, numbers: list[int]) -> None:
    replica = Replica()
    asks = c.Envelope(principal=principal, command=c.OpenSession(consumer_id=consumer), session=session)
    replica.entry([asks])
    for seq in numbers:
        create = c.CreateQueue(name="q")
        made = replace(asks, command=create, request_seq=seq, done_below=min(numbers))
        first, again = replica.entry([made, made])
        assert not session or type(first.reply) is type(again.reply)
        replica.check()


@share(5)
@given(seed=seeds, data=st.data(), wrong=st.binary(min_size=16, max_size=16))
def test_a_hash_that_is_not_the_contents_is_applied_or_stops_the_node(
    seed: int, data: st.DataObject, wrong: bytes
) -> None:
    """The node that proposes hashes a batch; where it did not, nothing but our own named error may come of it."""
    reached = reach(seed, 20)
    reached.replica.entry([opening(1)])
    kinds = st.one_of(strategies.LOGGED[c.Produce], strategies.LOGGED[c.Stage])
    made = data.draw(fitted(data.draw(kinds), look(reached)))
    try:
        reached.replica.entry([following(reached, replace(made, content_hash=wrong))])
        reached.go_on(15)
        reached.replica.check()
    except InvariantBroken as error:
        note(f"the node stops: {error}")


# Queries -------------------------------------------------------------------------------------------------

wheres = st.sampled_from(
    ["", "version > 0", "attempts >= 1 and reason = 'rejected'", "key is null", "not (group = 'default')", "version <"]
)


@st.composite
def fitted_query(draw: st.DrawFn, query: Any, here: Present) -> Any:
    names = {each.name for each in fields(query)}
    new: dict[str, Any] = {}
    queue_id, tail = getattr(query, "queue_id", 0), 1
    if "queue_id" in names and here.queues and not draw(rarely):
        queue_id = new["queue_id"] = QueueId(draw(st.sampled_from([*here.queues, *here.queues[-1:] * 3])))
        tail = here.tails[queue_id]
    if "name" in names and not draw(rarely):
        new["name"] = draw(st.sampled_from(NAMES))
    if getattr(query, "group", None) is not None and not draw(rarely):
        new["group"] = draw(st.sampled_from(here.groups.get(queue_id) or ["default"]))
    for name in ("from_version", "to_version", "version", "from_seq"):
        if getattr(query, name, None) is not None and not draw(rarely):
            new[name] = draw(st.integers(1, tail + 2))
    for name in ("limit", "scan", "max_bytes"):
        if name in names and not draw(rarely):
            new[name] = draw(st.integers(1, 5))
    if "where" in names and not draw(rarely):
        new["where"] = draw(wheres)
    if "after" in names and not draw(rarely):
        new["after"] = draw(st.sampled_from(["", "alpha"])) if isinstance(query.after, str) else b""
    if "client_id" in names and here.producers.get(queue_id) and not draw(rarely):
        new["client_id"] = draw(st.sampled_from(here.producers[queue_id]))[0]
    if "key" in names and not draw(rarely):
        new["key"] = draw(st.sampled_from([b"k", b"j", b""]))
    if "txn" in names and here.staged and not draw(rarely):
        new["txn"] = draw(st.sampled_from(here.staged)).txn
    return replace(query, **new)


@share(5)
@given(seed=seeds, length=lengths, data=st.data())
def test_any_query_on_any_state_has_an_answer(seed: int, length: int, data: st.DataObject) -> None:
    reached = reach(seed, length)
    if data.draw(st.booleans()):
        shake(data, reached, 2)
    here = look(reached)
    for _ in range(data.draw(st.integers(1, 15))):
        query = data.draw(fitted_query(data.draw(strategies.queries()), here))
        answer = reached.replica.ask(query)
        for _ in range(5):  # go on where the page ended
            if not isinstance(answer.reply, DeadListed) or not answer.reply.next_token:
                break
            answer = reached.replica.ask(replace(query, after=answer.reply.next_token))


@share(5)
@given(seed=seeds, length=lengths)
def test_every_version_and_group_can_be_asked_about(seed: int, length: int) -> None:
    reached = reach(seed, length)
    here = look(reached)
    for queue_id in here.queues:
        named: dict[str, Any] = {"queue_id": QueueId(queue_id)}
        tail = here.tails[queue_id]
        for low in range(1, tail + 2):
            for high in {1, low, max(low - 1, 1), tail + 1, U63}:
                reached.replica.ask(q.Read(**named, from_version=low, to_version=high, max_bytes=3))
        for group in here.groups[queue_id]:
            reached.replica.ask(q.Stats(**named, group=group))
            for version in [None, *range(1, tail + 2)]:
                reached.replica.ask(q.Explain(**named, group=group, version=version))
            for limit in (1, 2, 100):
                reached.replica.ask(q.Peek(**named, group=group, limit=limit))


@share(5)
@given(seed=seeds, length=lengths)
def test_every_lease_can_be_delivered(seed: int, length: int) -> None:
    """A granted version is stored for as long as its lease is open, or a retry may ask for it."""
    reached = reach(seed, length)
    for _ in range(15):
        sent = len(reached.generator.known.sent)
        reached.go_on(1)
        for queue_id, groups in look(reached).groups.items():
            for group in groups:
                command = c.Lease(queue_id=QueueId(queue_id), group=group, max_messages=2, auto_ack=bool(sent % 2))
                [answer] = reached.replica.entry([following(reached, command, 1 + sent % OWNERS)])
                if isinstance(answer.reply, Leased):
                    check_delivery(reached.replica, answer, queue_id, answer.reply)


def check_delivery(replica: Replica, answer: Answer, queue_id: int, leased: Leased) -> None:
    with replica.store.read() as txn:
        full = views.deliver(txn, queue_id, leased)
    versions = [piece.first + at for piece in full.batches for at in range(piece.columns.count)]
    assert versions == [version for grant in leased.grants for version in range(grant.first, grant.last + 1)]
    check_wire(Answer(answer.place, full))
