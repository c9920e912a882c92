"""The fold's view of the store during one entry: rows kept and written once, and the digest that follows every change.

Nothing in here decides anything. A `State` lives for one transaction: it is dropped on abort, so that nothing
of an entry that was not applied can be seen by the next one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import lru_cache
from operator import attrgetter
from typing import Any, TypeVar

from xxhash import xxh3_128_digest, xxh3_128_intdigest

from holdfast.client.protocol.errors import BodyDamaged, HoldfastError, InvariantBroken, StateBroken
from holdfast.client.protocol.limits import Limits
from holdfast.client.protocol.values import GENERATION_SHIFT, Columns
from holdfast.storage.effects import Effect
from holdfast.storage.rows import (
    CHECKSUM_BYTES,
    BatchRow,
    GroupRow,
    Meta,
    ProducerRow,
    QueueRow,
    SessionRow,
    pack_blob,
    pack_group,
    pack_meta,
    pack_queue,
    unpack_batch,
    unpack_blob,
    unpack_group,
    unpack_meta,
    unpack_producer,
    unpack_queue,
    unpack_session,
)
from holdfast.storage.store import ReadTxn, WriteTxn
from holdfast.storage.tables import (
    BATCH,
    BLOB,
    FLIGHT,
    META_KEY,
    PRODUCER,
    SESSION,
    Table,
    after,
    group_name_key,
    k1,
    k2,
    queue_name_key,
    session_key,
    text_key,
    u2,
)

DIGEST_MASK = (1 << 128) - 1
_PREFIX = [bytes([table]) for table in Table]
K = TypeVar("K")
T = TypeVar("T")

CONTENT_BYTES = 16 << 20  # verified bodies that are kept at hand: a few of the largest batches

_KEPT = (QueueRow, GroupRow, ProducerRow, SessionRow, Meta)
_NAMES: dict[type, tuple[str, ...]] = {kind: tuple(field.name for field in fields(kind)) for kind in _KEPT}
_VALUES = {kind: attrgetter(*names) for kind, names in _NAMES.items()}


def row_hash(table: int, key: bytes, value: bytes) -> int:
    """What one row adds to the digest: a body counts by the checksum that is stored before it."""
    if table == BLOB:
        value = value[:CHECKSUM_BYTES]
    return xxh3_128_intdigest(_PREFIX[table] + key + b"\x00" + value)


def content_hash(columns: Columns, body: bytes | memoryview) -> bytes:
    """The one hash of a batch: identity of a produce (P2) and checksum of what is stored."""
    return xxh3_128_digest(b"".join((*columns.content(), body)))


@lru_cache(maxsize=64)
def _limits(changed: tuple[tuple[str, int], ...]) -> Limits:
    """Cached: an entry builds its limits anew, and they hardly ever change."""
    return Limits(**dict(changed))


def _former(kept: object) -> Any:
    """What a kept row says now, so that `_bring_back` can make it say so again. Costs one row."""
    if kept is None or type(kept) is int:
        return None
    if isinstance(kept, list):  # a queue's groups; the two numbers of a flight
        return [(item, _former(item)) for item in kept]
    values = _VALUES[type(kept)](kept)
    return [value.copy() if type(value) in (list, dict) else value for value in values]


def _bring_back(kept: object, former: Any) -> None:
    """In place: whoever holds the row sees what it said before."""
    if former is None:
        return
    if isinstance(kept, list):
        for item, values in former:
            _bring_back(item, values)
        kept[:] = [item for item, _ in former]
        return
    for name, value in zip(_NAMES[type(kept)], former, strict=True):
        setattr(kept, name, value)


class _Watched(dict[K, T]):
    """Kept rows of one kind, during a block that may be undone: a row is remembered when it is first handed out.

    What the block reads or adds itself stays in here until the block is over.
    """

    def __init__(self, kept: dict[K, T]) -> None:
        super().__init__()
        self._kept = kept
        self._saved: dict[K, Any] = {}

    def __missing__(self, key: K) -> T:
        row = self._kept[key]
        self._saved[key] = _former(row)
        self[key] = row
        return row

    def done(self) -> dict[K, T]:
        self._kept.update(self)
        return self._kept

    def undone(self) -> dict[K, T]:
        for key, former in self._saved.items():
            _bring_back(self._kept[key], former)
        return self._kept


class _Block:
    """All kept rows during a block that may be undone; costs what the block touches, whatever else is kept.

    Whoever changes a row in the block has asked the state for it in the block: so it is known how it was.
    """

    def __init__(self, state: "State") -> None:
        self._state = state
        self._meta = _former(state.meta)
        self._effects = len(state.effects)
        self._digest = state._digest
        self._sets = (state._dirty_queues, state._dirty_producers, state._dirty_sessions, state._dirty_flights)
        self._dirty_groups = dict(state._dirty_groups)
        state._dirty_queues, state._dirty_producers = set(), set()
        state._dirty_sessions, state._dirty_flights = set(), set()
        self._queues = state._queues = _Watched(state._queues)
        self._groups = state._groups = _Watched(state._groups)
        self._producers = state._producers = _Watched(state._producers)
        self._sessions = state._sessions = _Watched(state._sessions)
        self._flights = state._flights = _Watched(state._flights)

    def done(self) -> None:
        state = self._state
        state._queues, state._groups = self._queues.done(), self._groups.done()
        state._producers, state._sessions = self._producers.done(), self._sessions.done()
        state._flights = self._flights.done()
        queues, producers, sessions, flights = self._sets
        queues |= state._dirty_queues
        producers |= state._dirty_producers
        sessions |= state._dirty_sessions
        flights |= state._dirty_flights
        state._dirty_queues, state._dirty_producers, state._dirty_sessions, state._dirty_flights = self._sets

    def undone(self) -> None:
        state = self._state
        state._queues, state._groups = self._queues.undone(), self._groups.undone()
        state._producers, state._sessions = self._producers.undone(), self._sessions.undone()
        state._flights = self._flights.undone()
        state._dirty_queues, state._dirty_producers, state._dirty_sessions, state._dirty_flights = self._sets
        state._dirty_groups = self._dirty_groups
        state._digest = self._digest
        _bring_back(state.meta, self._meta)
        while len(state.effects) > self._effects:  # they are only ever added
            state.effects.popitem()
        state._contents.clear()  # the ids of blobs that the block added are given out again
        state._contents_bytes = 0


class View:
    """Reading the state: typed rows over a read transaction."""

    def __init__(self, txn: ReadTxn) -> None:
        self.txn = txn
        data = txn.get(Table.META, META_KEY)
        self.meta = unpack_meta(data) if data is not None else Meta()
        self.limits = _limits(tuple(self.meta.limits.items()))
        self.time_ms = self.meta.time_ms
        self.lease_time = self.meta.time_ms - self.meta.steps
        self._queues: dict[int, QueueRow | None] = {}
        self._groups: dict[int, list[GroupRow]] = {}
        self._producers: dict[tuple[int, str], ProducerRow | None] = {}
        self._sessions: dict[bytes, SessionRow | None] = {}
        self._flights: dict[tuple[int, bytes], list[int]] = {}
        self._contents: dict[int, tuple[Columns, memoryview]] = {}
        self._contents_bytes = 0
        self.lowest_readers: dict[tuple[int, int, int], int] = {}  # kept by `retention`, read once an entry

    def queue(self, q: int) -> QueueRow | None:
        """The row of a queue, deleted ones too (as a tombstone that knows its name)."""
        try:
            return self._queues[q]
        except KeyError:
            data = self.txn.get(Table.QUEUE, k1(q))
            row = self._queues[q] = unpack_queue(data) if data is not None else None
            return row

    def queue_id(self, name: str) -> int | None:
        data = self.txn.get(Table.NAME, queue_name_key(name))
        return None if data is None else int.from_bytes(data, "big")

    def groups(self, q: int) -> list[GroupRow]:
        """A queue's groups in the order of their creation."""
        try:
            return self._groups[q]
        except KeyError:
            prefix = k1(q)
            rows = [unpack_group(data) for _, data in self.txn.scan(Table.GROUP, prefix, after(prefix))]
            self._groups[q] = rows
            return rows

    def group(self, q: int, name: str) -> GroupRow | None:
        for row in self.groups(q):
            if row.name == name:
                return row
        return None

    def producer(self, q: int, client: str) -> ProducerRow | None:
        try:
            return self._producers[q, client]
        except KeyError:
            data = self.txn.get(PRODUCER, text_key(q, client))
            row = self._producers[q, client] = unpack_producer(data) if data is not None else None
            return row

    def session(self, session: bytes) -> SessionRow | None:
        try:
            return self._sessions[session]
        except KeyError:
            data = self.txn.get(SESSION, session)
            row = self._sessions[session] = unpack_session(data) if data is not None else None
            return row

    def flight(self, hold: int, session: bytes) -> list[int]:
        """[versions, leases] that a session has in flight in a group."""
        try:
            return self._flights[hold, session]
        except KeyError:
            data = self.txn.get(FLIGHT, session_key(hold, session))
            row = self._flights[hold, session] = list(u2(data)) if data is not None else [0, 0]
            return row

    # Batches and bodies

    def batch_at(self, q: int, version: int) -> BatchRow | None:
        """The stored batch that holds this version: mostly one asks for the first of its versions."""
        data = self.txn.get(BATCH, k2(q, version))
        if data is not None:
            return unpack_batch(version, data)
        found = self.txn.last(BATCH, k1(q), k2(q, version + 1))
        if found is None:
            return None
        key, data = found
        batch = unpack_batch(int.from_bytes(key[8:], "big"), data)
        return batch if batch.last >= version else None

    def batches(self, q: int, low: int, high: int) -> Iterator[BatchRow]:
        """Stored batches that hold any of low … high, ascending."""
        inside = self.batch_at(q, low)
        if inside is not None:
            yield inside
            low = inside.last + 1
            if low > high:
                return
        for key, data in self.txn.scan(BATCH, k2(q, low), k2(q, high + 1)):
            yield unpack_batch(int.from_bytes(key[8:], "big"), data)

    def next_batch(self, q: int, low: int) -> BatchRow | None:
        """The first stored batch that ends at or above `low`."""
        inside = self.batch_at(q, low)
        if inside is not None:
            return inside
        found = self.txn.first(BATCH, k2(q, low), k2(q + 1, 0))
        return None if found is None else unpack_batch(int.from_bytes(found[0][8:], "big"), found[1])

    def content(self, q: int, version: int, blob: int) -> tuple[Columns, memoryview]:
        """A stored body, verified. Raises BodyDamaged: LMDB has no checksums of its own.

        The last few stay at hand, so that many cuts of one batch read and verify it once.
        """
        known = self._contents.get(blob)
        if known is not None:
            return known
        data = self._blob(blob)
        checksum, columns, body = unpack_blob(data)
        if xxh3_128_digest(memoryview(data)[CHECKSUM_BYTES:]) != checksum:
            raise BodyDamaged(queue_id=q, version=version)
        if self._contents_bytes + len(data) > CONTENT_BYTES:
            self._contents.clear()
            self._contents_bytes = 0
        self._contents[blob] = columns, body
        self._contents_bytes += len(data)
        return columns, body

    def _blob(self, blob: int) -> bytes:
        data = self.txn.get(BLOB, k1(blob))
        if data is None:
            raise StateBroken(problem=f"blob {blob} is referenced but not stored")
        return data


class State(View):
    """Reading and changing the state within one entry."""

    txn: WriteTxn

    def __init__(self, txn: WriteTxn) -> None:
        super().__init__(txn)
        self.effects: dict[Effect, None] = {}  # an ordered set
        self._dirty_queues: set[int] = set()
        self._dirty_groups: dict[int, GroupRow] = {}
        self._dirty_producers: set[tuple[int, str]] = set()
        self._dirty_sessions: set[bytes] = set()
        self._dirty_flights: set[tuple[int, bytes]] = set()
        self._digest = self.meta.digest
        self._undo: list[tuple[int, bytes, bytes | None]] | None = None

    # All or nothing

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Undo every change made within, rows and kept rows alike, if the block is refused (X1).

        Anything else that is raised passes untouched: a full map undoes and repeats the whole transaction, and what
        is broken stops the node.
        """
        if self._undo is not None:
            raise StateBroken(problem="an undo log is open already")
        block = _Block(self)
        self._undo = []
        try:
            yield
        except InvariantBroken:
            raise
        except HoldfastError:
            for table, key, former in reversed(self._undo):
                if former is None:
                    self.txn.delete(table, key)
                else:
                    self.txn.put(table, key, former)
            block.undone()
            raise
        else:
            block.done()
        finally:
            self._undo = None

    # Plain rows

    def put(self, table: int, key: bytes, value: bytes) -> None:
        former = self.txn.put(table, key, value)
        if self._undo is not None:
            self._undo.append((table, key, former))
        if former is not None:
            self._digest -= row_hash(table, key, former)
        self._digest += row_hash(table, key, value)

    def insert(self, table: int, key: bytes, value: bytes) -> None:
        """A key known to be new: no former value is looked for."""
        self.txn.insert(table, key, value)
        if self._undo is not None:
            self._undo.append((table, key, None))
        self._digest += row_hash(table, key, value)

    def append(self, table: int, key: bytes, value: bytes) -> None:
        """A key above all others of its table."""
        self.txn.append(table, key, value)
        if self._undo is not None:
            self._undo.append((table, key, None))
        self._digest += row_hash(table, key, value)

    def delete(self, table: int, key: bytes) -> bytes | None:
        former = self.txn.delete(table, key)
        if former is not None:
            if self._undo is not None:
                self._undo.append((table, key, former))
            self._digest -= row_hash(table, key, former)
        return former

    # Kept rows

    def touch_queue(self, row: QueueRow) -> None:
        self._dirty_queues.add(row.q)

    def touch_group(self, row: GroupRow) -> None:
        self._dirty_groups[row.gid] = row

    def touch_producer(self, q: int, client: str) -> None:
        self._dirty_producers.add((q, client))

    def touch_session(self, session: bytes) -> None:
        self._dirty_sessions.add(session)

    def add_queue(self, row: QueueRow) -> None:
        self._queues[row.q] = row
        self._groups[row.q] = []
        self._dirty_queues.add(row.q)

    def add_group(self, row: GroupRow) -> None:
        self.groups(row.q).append(row)
        self.touch_group(row)
        self.put(Table.NAME, group_name_key(row.q, row.name), k1(row.gid))

    def drop_group(self, row: GroupRow) -> None:
        self.groups(row.q).remove(row)
        self._dirty_groups.pop(row.gid, None)
        self.delete(Table.GROUP, k2(row.q, row.gid))
        self.delete(Table.NAME, group_name_key(row.q, row.name))

    def set_producer(self, q: int, client: str, row: ProducerRow | None) -> None:
        self._producers[q, client] = row
        self._dirty_producers.add((q, client))

    def set_session(self, session: bytes, row: SessionRow | None) -> None:
        self._sessions[session] = row
        self._dirty_sessions.add(session)

    def add_flight(self, hold: int, session: bytes, versions: int, leases: int) -> None:
        row = self.flight(hold, session)
        row[0] += versions
        row[1] += leases
        self._dirty_flights.add((hold, session))

    # Ids

    def next_id(self, counter: str) -> int:
        """The next id of a counter, in the present restore generation (T4)."""
        number: int = getattr(self.meta, counter) + 1
        setattr(self.meta, counter, number)
        return (self.meta.generation << GENERATION_SHIFT) | number

    @property
    def newest_lease(self) -> int:
        """The id of the lease that was given out last; no other is above it."""
        return (self.meta.generation << GENERATION_SHIFT) | self.meta.lease_ids

    def new_scope(self) -> int:
        """A new id of a group or of a part of its rows: to give up the old one gives up all that stands under it."""
        self.meta.group_ids += 1
        return self.meta.group_ids

    def next_blob(self) -> int:
        self.meta.blob_ids += 1
        return self.meta.blob_ids

    def add_blob(self, checksum: bytes, columns: Columns, body: bytes | memoryview) -> int:
        blob = self.next_blob()
        self.append(BLOB, k1(blob), pack_blob(checksum, columns, body))
        return blob

    def drop_blob(self, blob: int) -> None:
        self._contents.pop(blob, None)
        self.delete(BLOB, k1(blob))

    def flush(self) -> None:
        """Write what was kept; the last thing in an entry. Sorted, so that every node writes in the same order."""
        for q in sorted(self._dirty_queues):
            queue = self._queues[q]
            if queue is not None:
                self.put(Table.QUEUE, k1(q), pack_queue(queue))
        for gid in sorted(self._dirty_groups):
            group = self._dirty_groups[gid]
            self.put(Table.GROUP, k2(group.q, gid), pack_group(group))
        for q, client in sorted(self._dirty_producers):
            self._write(PRODUCER, text_key(q, client), self._producers[q, client])
        for session in sorted(self._dirty_sessions):
            self._write(SESSION, session, self._sessions[session])
        for g, session in sorted(self._dirty_flights):
            versions, leases = self._flights[g, session]
            key = session_key(g, session)
            if versions or leases:
                self.put(FLIGHT, key, k2(versions, leases))
            else:
                self.delete(FLIGHT, key)
        self.meta.digest = self._digest & DIGEST_MASK
        self.txn.put(Table.META, META_KEY, pack_meta(self.meta))

    def _write(self, table: int, key: bytes, row: ProducerRow | SessionRow | None) -> None:
        if row is None:
            self.delete(table, key)
        else:
            self.put(table, key, row.pack())
