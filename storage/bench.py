"""What the rules cost on a real store: the works of `holdfast bench apply`.

Each work drives the fold as a node does, from the bytes of log entries. Decoding and applying are measured; encoding
is not. The clock and the directory come from the caller, and every figure is a middle of rounds, so that a passing
disturbance of the machine does not decide; what is compared is measured in turns.
"""

import shutil
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from holdfast.client.protocol.columns import MessageParts, pack
from holdfast.client.protocol.commands import (
    AckBatch,
    Command,
    CreateQueue,
    Envelope,
    Lease,
    OpenSession,
    Produce,
    SettleRange,
)
from holdfast.client.protocol.errors import StateBroken
from holdfast.client.protocol.queries import Stats
from holdfast.client.protocol.replies import Failed, GroupStats, Leased, QueueCreated, Reply
from holdfast.client.protocol.values import (
    LOCAL_PRINCIPAL,
    NO_SESSION,
    QueueId,
    QueueSettings,
    SessionId,
)
from holdfast.storage import bench_floor, machine, views
from holdfast.storage.bench_floor import RecordingTxn, Trace
from holdfast.storage.entry import Entry, decode_entry, encode_entry
from holdfast.storage.lmdb_store import LmdbStore
from holdfast.storage.machine import Applied
from holdfast.storage.state import content_hash
from holdfast.storage.tables import TABLES

Clock = Callable[[], int]  # nanoseconds that only grow
Figures = dict[str, Any]  # one object of the JSON output

MESSAGE_BYTES = 256
QUEUE, GROUP = "bench", "default"
START_MS = 1_700_000_000_000
LONG_MS = 43_200_000  # leases that stay open while others are measured
HOUR_MS = 3_600_000
FILL_COMMANDS = 100  # in one entry of a filling
FILL_ENTRIES = 4  # in one transaction of a filling
FILL_LEASES = 5_000  # of one session; a session may hold 10,000
PATIENT = QueueSettings(max_ack_holes=10_000_000)  # the cap on holes is not what is measured


@dataclass(frozen=True, slots=True)
class Shape:
    """How messages come: how many in a command, how many commands in an entry, from how many clients."""

    batch: int
    commands: int
    clients: int
    lives: int  # how often one round produces, leases and acks an entry

    @property
    def messages(self) -> int:
        return self.batch * self.commands * self.lives


@dataclass(frozen=True, slots=True)
class Scale:
    """Full works at 1; at n every store is n times smaller, and rounds are fewer."""

    divisor: int = 1

    def count(self, full: int) -> int:
        return max(full // self.divisor, 1)

    @property
    def rounds(self) -> int:
        return max(3, min(40, 600 // self.divisor))

    def round(self, shape: Shape) -> Shape:
        lives = shape.lives if self.divisor <= 50 else max(shape.lives * 50 // self.divisor, 1)
        return Shape(shape.batch, shape.commands, shape.clients, lives)


BATCHES_OF_1000 = Shape(batch=1_000, commands=1, clients=1, lives=100)
BATCHES_OF_100 = Shape(batch=100, commands=1, clients=1, lives=200)
BATCHES_OF_100_TOGETHER = Shape(batch=100, commands=8, clients=8, lives=40)
ONE_BY_ONE = Shape(batch=1, commands=64, clients=1, lives=10)
ONE_BY_ONE_EACH = Shape(batch=1, commands=64, clients=64, lives=10)


class Driver:
    """One queue on one store, and clients that number their requests as real ones do."""

    def __init__(self, directory: Path, clock: Clock, settings: QueueSettings = PATIENT) -> None:
        self.directory = directory
        self.store = LmdbStore(directory, TABLES)
        self.queue_id = QueueId(0)
        self.spent_ns = 0
        self.log: list[tuple[int, bytes]] = []  # what was measured since the last round began
        self._clock = clock
        self._index = 0
        self._stamp_ms = START_MS
        self._requests: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        created = self.measured([(0, CreateQueue(name=QUEUE, settings=settings, groups=(GROUP,)))])[0]
        assert isinstance(created, QueueCreated)
        self.queue_id = created.queue_id

    def close(self) -> None:
        self.store.close()
        shutil.rmtree(self.directory)

    def measured(self, commands: Sequence[tuple[int, Command]]) -> list[Reply]:
        """One entry with these (client, command), measured; the answers, which are no refusals."""
        self._open(client for client, _ in commands)
        self._index += 1
        self._stamp_ms += 1
        index, clock, store = self._index, self._clock, self.store
        data = encode_entry(self._stamp_ms, self._envelopes(commands))
        self.log.append((index, data))
        begin = clock()
        applied = _fold(store, index, data)
        self.spent_ns += clock() - begin
        return _replies(applied)

    def fill(self, commands: Iterator[tuple[int, Command]]) -> list[Reply]:
        """Many commands, as fast as the fold can: large entries, several in a transaction, no bytes."""
        replies: list[Reply] = []
        entries: list[Entry] = []
        chunk: list[tuple[int, Command]] = []

        def flush() -> None:
            if entries:
                for applied in self.store.transact(lambda txn: machine.apply_all(txn, entries)):
                    replies.extend(reply for reply in _replies(applied) if isinstance(reply, Leased))
                entries.clear()

        def close_entry() -> None:
            if any(client not in self._requests for client, _ in chunk):
                flush()  # sessions are opened by an entry of their own, which comes behind these
                self._open(client for client, _ in chunk)
            self._index += 1
            envelopes = self._envelopes(chunk)
            entries.append(Entry(self._index, self._stamp_ms, tuple((envelope, 0) for envelope in envelopes)))
            chunk.clear()

        for command in commands:
            chunk.append(command)
            if len(chunk) == FILL_COMMANDS:
                close_entry()
                if len(entries) == FILL_ENTRIES:
                    flush()
        if chunk:
            close_entry()
        flush()
        return replies

    def produce(self, client: int, batch: "Batch", done_below: int | None = None) -> Produce:
        """The client's next numbered produce; it has the answers to all below `done_below`."""
        first = self._numbers.get(client, 1)
        self._numbers[client] = first + batch.count
        return Produce(
            queue_id=self.queue_id,
            columns=batch.columns,
            body=batch.body,
            content_hash=batch.hash,
            client_id=f"client-{client}",
            first_seq=first,
            done_below=done_below,
        )

    def next_number(self, client: int) -> int:
        return self._numbers.get(client, 1)

    def lease(self, messages: int, timeout_ms: int | None = None) -> Lease:
        size = max(messages * MESSAGE_BYTES, MESSAGE_BYTES)
        return Lease(
            queue_id=self.queue_id,
            group=GROUP,
            max_messages=messages,
            max_bytes=size,
            visibility_timeout_ms=timeout_ms,
        )

    def ack(self, ranges: Sequence[SettleRange]) -> AckBatch:
        return AckBatch(queue_id=self.queue_id, group=GROUP, ranges=tuple(ranges))

    def _open(self, clients: Iterator[int]) -> None:
        new = sorted({client for client in clients if client not in self._requests})
        if new:
            self._index += 1
            envelopes = []
            for client in new:
                self._requests[client] = 0
                command = OpenSession(consumer_id=f"client-{client}")
                envelopes.append(Envelope(principal=LOCAL_PRINCIPAL, command=command, session=_session(client)))
            data = encode_entry(self._stamp_ms, envelopes)
            self.log.append((self._index, data))
            _replies(_fold(self.store, self._index, data))

    def _envelopes(self, commands: Sequence[tuple[int, Command]]) -> list[Envelope]:
        """A client has the answers to all its requests of earlier entries, and to none of this one."""
        done_below = {client: self._requests[client] + 1 for client, _ in commands}
        envelopes = []
        for client, command in commands:
            if isinstance(command, Produce):
                envelopes.append(Envelope(principal=LOCAL_PRINCIPAL, command=command, session=NO_SESSION))
                continue
            number = self._requests[client] = self._requests[client] + 1
            envelopes.append(
                Envelope(
                    principal=LOCAL_PRINCIPAL,
                    command=command,
                    session=_session(client),
                    request_seq=number,
                    done_below=done_below[client],
                )
            )
        return envelopes


class Batch:
    """Messages as they are produced again and again."""

    def __init__(self, count: int, delay_ms: int | None = None) -> None:
        payload = bytes(range(256))[:MESSAGE_BYTES]
        self.count = count
        self.columns, self.body = pack([MessageParts(payload, delay_ms=delay_ms)] * count)
        self.hash = content_hash(self.columns, self.body)


@dataclass(slots=True)
class Round:
    """What one round took, in nanoseconds."""

    produce: int = 0
    lease: int = 0
    ack: int = 0
    deliver: int = 0

    @property
    def life(self) -> int:
        return self.produce + self.lease + self.ack


def one_round(driver: Driver, shape: Shape, batch: Batch, clock: Clock, *, deliver: bool = False) -> Round:
    """Produce, lease and ack an entry of messages, some times over."""
    took = Round()
    for _ in range(shape.lives):
        clients = [position % shape.clients for position in range(shape.commands)]
        answered = {client: driver.next_number(client) for client in set(clients)}
        driver.spent_ns = 0
        driver.measured([(client, driver.produce(client, batch, answered[client])) for client in clients])
        took.produce += driver.spent_ns
        driver.spent_ns = 0
        leased = driver.measured([(client, driver.lease(shape.batch)) for client in clients])
        took.lease += driver.spent_ns
        if deliver:
            begin = clock()
            with driver.store.read() as txn:
                for reply in leased:
                    assert isinstance(reply, Leased)
                    views.deliver(txn, driver.queue_id, reply)
            took.deliver += clock() - begin
        acks: list[tuple[int, Command]] = [
            (client, driver.ack(_held(reply))) for client, reply in zip(clients, leased, strict=True)
        ]
        driver.spent_ns = 0
        driver.measured(acks)
        took.ack += driver.spent_ns
    return took


# The whole life, beside its floor --------------------------------------------------------------------------


def whole_life(directory: Path, clock: Clock, scale: Scale, shape: Shape) -> Figures:
    """Messages a second through produce, lease and ack, on a queue that is empty otherwise."""
    shape = scale.round(shape)
    batch = Batch(shape.batch)
    driver = Driver(directory / "ours", clock)
    recorded = LmdbStore(directory / "recorded", TABLES)
    bare = LmdbStore(directory / "bare", TABLES)
    plain = LmdbStore(directory / "plain", TABLES)
    rounds: list[Round] = []
    floor_ns: list[int] = []
    plain_ns: list[int] = []
    hash_ns: list[int] = []
    counts: Counter[tuple[str, str]] = Counter()
    for number in range(scale.rounds + 1):
        took = one_round(driver, shape, batch, clock, deliver=True)
        floor_took = plain_took = 0
        for index, data in driver.log:  # entry by entry, as the fold got them: see `bench_floor`
            trace = _record(recorded, index, data)
            script = bench_floor.prepare(bare, trace)
            begin = clock()
            bench_floor.replay(bare, script)
            floor_took += clock() - begin
            begin = clock()
            bench_floor.replay_plainly(plain, trace)
            plain_took += clock() - begin
            if number:
                counts += trace.counts()
        driver.log.clear()
        begin = clock()
        for _ in range(shape.lives * shape.commands):
            content_hash(batch.columns, batch.body)
        hash_took = clock() - begin
        if number:  # the first one warms up, and opens the sessions
            rounds.append(took)
            floor_ns.append(floor_took)
            plain_ns.append(plain_took)
            hash_ns.append(hash_took)
    driver.store.close()
    recorded.close()
    bare.close()
    plain.close()
    life_ns, bare_ns, loop_ns = median(took.life for took in rounds), median(floor_ns), median(plain_ns)
    commands = shape.lives * shape.commands
    return {
        "batch": shape.batch,
        "commands_per_entry": shape.commands,
        "clients": shape.clients,
        "messages": shape.messages * scale.rounds,
        "messages_per_s": _rate(shape.messages, life_ns),
        "floor_messages_per_s": _rate(shape.messages, bare_ns),
        "of_floor": round(bare_ns / life_ns, 3),
        "plain_floor_messages_per_s": _rate(shape.messages, loop_ns),
        "of_plain_floor": round(loop_ns / life_ns, 3),
        "deliver_messages_per_s": _rate(shape.messages, median(took.deliver for took in rounds)),
        "hash_messages_per_s": _rate(shape.messages, median(hash_ns)),
        "us_per_command": {
            name: round(median(getattr(took, name) for took in rounds) / commands / 1e3, 2)
            for name in ("produce", "lease", "ack", "deliver")
        },
        "operations_per_life": _per_life(counts, commands * scale.rounds),
    }


def _record(store: LmdbStore, index: int, data: bytes) -> Trace:
    entry = decode_entry(index, data)
    trace = Trace()
    store.transact(lambda txn: machine.apply(RecordingTxn(txn, trace), entry))
    return trace


def _per_life(counts: Counter[tuple[str, str]], lives: int) -> dict[str, dict[str, float]]:
    """Operations for one produce, lease and ack: by kind, then by table."""
    found: dict[str, dict[str, float]] = {}
    for kind, table in sorted(counts):
        found.setdefault(kind, {})[table] = round(counts[kind, table] / lives, 2)
    return found


# Flat cost -------------------------------------------------------------------------------------------------


def flat(
    directory: Path, clock: Clock, scale: Scale, shape: Shape, fill: Callable[[Driver, Scale], dict[str, int]]
) -> Figures:
    """The cost of a life beside what `fill` has put there, as a ratio to its cost on an empty queue."""
    shape = scale.round(shape)
    batch = Batch(shape.batch)
    empty = Driver(directory / "empty", clock)
    loaded = Driver(directory / "loaded", clock)
    begin = clock()
    facts = fill(loaded, scale)
    filled_ns = clock() - begin
    rounds: tuple[list[int], list[int]] = ([], [])
    for number in range(scale.rounds + 1):
        for driver, found in zip((empty, loaded), rounds, strict=True):
            took = one_round(driver, shape, batch, clock)
            driver.log.clear()
            if number:
                found.append(took.life)
    file_bytes, used_bytes = loaded.store.file_bytes(), loaded.store.used_bytes()
    empty.close()
    loaded.close()
    per_life = shape.lives * shape.commands * 1e3
    empty_us, loaded_us = median(rounds[0]) / per_life, median(rounds[1]) / per_life
    return {
        "batch": shape.batch,
        "commands_per_entry": shape.commands,
        **facts,
        "fill_s": round(filled_ns / 1e9, 1),
        "file_bytes": file_bytes,
        "used_bytes": used_bytes,
        "empty_us": round(empty_us, 2),
        "loaded_us": round(loaded_us, 2),
        "ratio": round(loaded_us / empty_us, 3),
    }


def fill_waiting(driver: Driver, scale: Scale) -> dict[str, int]:
    return {"waiting": _produce_all(driver, scale.count(10_000_000), 100)}


def fill_waiting_one_by_one(driver: Driver, scale: Scale) -> dict[str, int]:
    return {"waiting": _produce_all(driver, scale.count(10_000_000), 1)}


def fill_leases(driver: Driver, scale: Scale) -> dict[str, int]:
    """Leases of one message each, which stay open."""
    count = _produce_all(driver, scale.count(100_000), 100)
    lease = driver.lease(1, LONG_MS)
    replies = driver.fill((1 + number // FILL_LEASES, lease) for number in range(count))
    return {"open_leases": len(replies)}


def fill_holes(driver: Driver, scale: Scale) -> dict[str, int]:
    """Every other message is acked, and the rest stays in flight."""
    count = _produce_all(driver, 2 * scale.count(100_000), 100)
    lease = driver.lease(100, LONG_MS)
    replies = driver.fill((1, lease) for _ in range(-(-count // 100)))
    driver.fill(
        (1, driver.ack([(lease, version, version) for lease, lo, hi in _held(reply) for version in _even_ones(lo, hi)]))
        for reply in replies
    )
    return {"holes": _stats(driver).holes}


def fill_delayed(driver: Driver, scale: Scale) -> dict[str, int]:
    """Batches that are held back, each until its own time; then the walk over them that the first Lease makes."""
    count = scale.count(1_000_000)
    batches = -(-count // 100)
    driver.fill(
        (1, driver.produce(1, Batch(100, delay_ms=HOUR_MS + (number * 7_919) % batches))) for number in range(batches)
    )
    driver.fill((1, driver.lease(1)) for _ in range(1 + batches // 1_000))
    return {"delayed": _stats(driver).delayed}


def fill_turnovers(driver: Driver, scale: Scale) -> dict[str, int]:
    """Ten times as many messages as the store holds go through it, in batches of many sizes; the last are even."""
    size = scale.count(1_000_000)
    sizes = [Batch(1 + (37 * number) % 199) for number in range(199)]  # 1 … 199, each once, in no order

    def uneven(count: int) -> Iterator[tuple[int, Command]]:
        number = 0
        while count > 0:
            batch = sizes[number % len(sizes)]
            number += 1
            count -= batch.count
            yield 1, driver.produce(1, batch)

    driver.fill(uneven(size))
    for turn in range(10):
        left = _stats(driver).ready
        step = max(left // 10, 1)
        while left > 0:
            driver.fill(uneven(step) if turn < 9 else _even(driver, step))
            left -= _consume(driver, min(step, left))
    return {"turnovers": 10, "waiting": _stats(driver).ready}


def _even(driver: Driver, count: int) -> Iterator[tuple[int, Command]]:
    batch = Batch(100)
    for _ in range(-(-count // 100)):
        yield 1, driver.produce(1, batch)


def _consume(driver: Driver, count: int) -> int:
    """Lease and ack this many of what waits, in leases of up to 1,000; says how many it was."""
    size = min(count, 1_000)
    lease = driver.lease(size)
    done = 0
    for begin in range(0, count, size):
        messages = min(size, count - begin)
        replies = driver.fill(iter([(1, lease if messages == size else driver.lease(messages))]))
        for reply in replies:
            held = _held(reply)
            done += sum(hi - lo + 1 for _, lo, hi in held)
            driver.fill(iter([(1, driver.ack(held))]))
    return done


def _produce_all(driver: Driver, count: int, size: int) -> int:
    batch = Batch(size)
    batches = -(-count // size)
    driver.fill((1, driver.produce(1, batch)) for _ in range(batches))
    return batches * size


# Opening ---------------------------------------------------------------------------------------------------


def opening(directory: Path, clock: Clock, scale: Scale, open_elsewhere: Callable[[Path], Figures]) -> Figures:
    """What a fresh process pays to open a store with many messages and to say what waits there."""
    driver = Driver(directory / "store", clock)
    waiting = _produce_all(driver, scale.count(10_000_000), 100)
    file_bytes = driver.store.file_bytes()
    driver.store.close()
    found = open_elsewhere(driver.directory)
    if found["ready"] != waiting:
        raise StateBroken(problem=f"{found['ready']} messages wait in a store that was given {waiting}")
    return {"waiting": waiting, "file_bytes": file_bytes, **found}


def open_once(directory: Path, clock: Clock) -> Figures:
    """Open the store that `opening` has left, ask it for its first queue's numbers, close it."""
    begin = clock()
    store = LmdbStore(directory, TABLES)
    with store.read() as txn:
        reply = views.answer(txn, Stats(queue_id=QueueId(1), group=GROUP)).reply
    assert isinstance(reply, GroupStats)
    spent_ns = clock() - begin
    store.close()
    return {"open_s": round(spent_ns / 1e9, 4), "ready": reply.ready}


# The list of works -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """One line of the output."""

    name: str
    title: str
    run: Callable[[Path, Clock, Scale], Figures]
    wanted: dict[str, float] = field(default_factory=dict)  # what the project promises of it


def works(open_elsewhere: Callable[[Path], Figures]) -> tuple[Work, ...]:
    def life(name: str, title: str, shape: Shape, rate: int, of_floor: float) -> Work:
        return Work(
            name,
            title,
            lambda directory, clock, scale: whole_life(directory, clock, scale, shape),
            {"messages_per_s": rate, "of_floor": of_floor},
        )

    def beside(
        name: str, title: str, fill: Callable[[Driver, Scale], dict[str, int]], shape: Shape, ratio: float
    ) -> Work:
        return Work(
            name, title, lambda directory, clock, scale: flat(directory, clock, scale, shape, fill), {"ratio": ratio}
        )

    return (
        life("batches-1000", "batches of 1000, 1 an entry", BATCHES_OF_1000, 2_000_000, 0.16),
        life("batches-100", "batches of 100, 1 an entry", BATCHES_OF_100, 500_000, 0.10),
        life("batches-100-together", "batches of 100, 8 an entry", BATCHES_OF_100_TOGETHER, 500_000, 0.10),
        life("one-by-one", "one by one, 64 an entry, one client", ONE_BY_ONE, 15_000, 0.12),
        life("one-by-one-each", "one by one, 64 an entry, 64 clients", ONE_BY_ONE_EACH, 15_000, 0.12),
        beside("waiting", "messages wait, in batches of 100", fill_waiting, BATCHES_OF_100, 1.3),
        beside("waiting-one-by-one", "messages wait, one by one", fill_waiting_one_by_one, ONE_BY_ONE, 2.0),
        beside("leases", "open leases", fill_leases, BATCHES_OF_100, 1.3),
        beside("holes", "ack holes", fill_holes, BATCHES_OF_100, 1.3),
        beside("delayed", "delayed messages", fill_delayed, BATCHES_OF_100, 1.3),
        beside("turnovers", "after ten turnovers", fill_turnovers, BATCHES_OF_100, 1.3),
        Work(
            "opening",
            "messages, opened by a fresh process",
            lambda directory, clock, scale: opening(directory, clock, scale, open_elsewhere),
            {"open_s": 2.0, "resident_bytes": 300e6},
        ),
    )


def _fold(store: LmdbStore, index: int, data: bytes) -> Applied:
    entry = decode_entry(index, data)
    return store.transact(lambda txn: machine.apply(txn, entry))


def _replies(applied: Applied) -> list[Reply]:
    replies = [answer.reply for answer in applied.answers]
    for reply in replies:
        if isinstance(reply, Failed):
            raise reply.error
    return replies


def _held(reply: Reply) -> list[SettleRange]:
    assert isinstance(reply, Leased), reply
    if not reply.grants:
        raise StateBroken(problem="nothing was available to a lease of the bench")
    return [(reply.lease_id, grant.first, grant.last) for grant in reply.grants]


def _even_ones(lo: int, hi: int) -> range:
    return range(lo + lo % 2, hi + 1, 2)


def _stats(driver: Driver) -> GroupStats:
    with driver.store.read() as txn:
        reply = views.answer(txn, Stats(queue_id=driver.queue_id, group=GROUP)).reply
    assert isinstance(reply, GroupStats)
    return reply


def _session(client: int) -> SessionId:
    return SessionId(struct.pack(">QQ", 0, client + 1))


def _rate(messages: int, nanoseconds: float) -> int:
    return round(messages * 1e9 / nanoseconds)
