"""Staged produce (X2): chunks put aside under a transaction, invisible until one Publish makes them all messages.

Two kinds of transactions (X2): a stream's are numbered without gaps, so that one row an app remembers all of
them; a job's id is opaque, and its publish is remembered for `job_memory_ms`.
"""

import struct
from dataclasses import dataclass

from xxhash import xxh3_128_digest

from holdfast.client.protocol.commands import Abort, ForgetTxn, Part, Publish, Stage
from holdfast.client.protocol.errors import Overloaded, StageConflict, StagedMissing, TxnClosed, TxnFenced
from holdfast.client.protocol.replies import Aborted, Committed, Done, Staged, TxnDescribed
from holdfast.client.protocol.values import Columns, Job, Stream, TxnId
from holdfast.storage import groups, produce, reap
from holdfast.storage.rows import QueueRow, pack_text, unpack_text
from holdfast.storage.state import State, View
from holdfast.storage.tables import Table, after, k1, k2

RETRY_AFTER_MS = 1_000

_OPEN = struct.Struct(">QQQQ")
# Blob, queue, count, body bytes, mixed times; delay, not before and ttl if not mixed; content hash.
_CHUNK = struct.Struct(">QQIIB8s8s8s16s")
_NONE = b"\xff" * 8  # a cell of a time column that says nothing
_VERSIONS = struct.Struct(">QQQ")
_PUBLISHED = struct.Struct(">QQ")  # stream: seq; job: when it is forgotten; then its number in TXN_DUE


@dataclass(slots=True)
class Open:
    """A transaction in which something is staged."""

    number: int
    size: int
    deadline: int
    chunks: int


@dataclass(slots=True)
class Published:
    """What an app published last, or what a job published."""

    seq: int
    forget_at: int
    number: int
    fence: str
    versions: tuple[tuple[int, int, int], ...]


def stage(state: State, queue: QueueRow, command: Stage) -> Staged:
    """Keep one chunk; the same again changes nothing (X2)."""
    if read_published(state, command.txn) is not None and _is_published(state, command.txn):
        raise TxnClosed
    opened = read_open(state, command.txn)
    key = b""
    if opened is not None:
        key = _chunk_key(opened.number, command.part, command.attempt, command.chunk)
        known = state.txn.get(Table.STAGE, key)
        if known is not None:
            *_, content_hash = _CHUNK.unpack(known)
            if content_hash != command.content_hash or _CHUNK.unpack(known)[1] != queue.q:
                raise StageConflict(part=command.part, attempt=command.attempt, chunk=command.chunk)
            return Staged(replayed=True)
    produce.check_batch(state, queue, command.columns)
    size = len(command.body)
    for name, used in (
        ("staged_bytes_per_txn", opened.size if opened else 0),
        ("staged_bytes", state.meta.staged_bytes),
    ):
        limit = getattr(state.limits, name)
        if used + size > limit:
            raise Overloaded(limit_name=name, limit=limit, retry_after_ms=RETRY_AFTER_MS)
    if opened is None:
        state.meta.txn_ids += 1
        opened = Open(state.meta.txn_ids, 0, 0, 0)
        key = _chunk_key(opened.number, command.part, command.attempt, command.chunk)
    columns = command.columns
    blob = state.add_blob(command.content_hash, columns, command.body)
    row = _CHUNK.pack(blob, queue.q, columns.count, size, *_times(columns), command.content_hash)
    state.insert(Table.STAGE, key, row)
    state.meta.staged_bytes += size
    _unschedule(state, opened.deadline, opened.number)
    opened.size += size
    opened.chunks += 1
    opened.deadline = state.time_ms + command.expires_ms
    _write_open(state, command.txn, opened)
    return Staged()


def publish(state: State, command: Publish) -> Committed:
    """All named chunks become messages, once (X2)."""
    txn = command.txn
    former = read_published(state, txn)
    if isinstance(txn, Stream) and former is not None and former.fence != command.fence:
        raise TxnFenced(app=txn.app, fence=former.fence)
    if former is not None and _is_published(state, txn):
        same = not isinstance(txn, Stream) or txn.seq == former.seq
        return Committed(versions=former.versions if same else (), replayed=True)
    opened = read_open(state, txn)
    chunks = [
        chunk for part in sorted(command.parts, key=lambda part: part.part) for chunk in _named(state, opened, part)
    ]
    queues = {q: groups.find_queue(state, q) for q in sorted({_CHUNK.unpack(data)[1] for _, data in chunks})}
    versions: dict[int, tuple[int, int, int]] = {}
    client = f"txn/{txn.app if isinstance(txn, Stream) else txn.id}"
    for key, data in chunks:
        blob, q, count, body_bytes, mixed, delay, not_before, ttl, content_hash = _CHUNK.unpack(data)
        state.delete(Table.STAGE, key)
        if mixed:  # several batches: the body is cut
            columns, body = state.content(q, 0, blob)
            first = produce.append(state, queues[q], columns, bytes(body), content_hash, client, None)
            state.drop_blob(blob)
        else:
            times = Columns(b"", delays=delay, not_befores=not_before, ttls=ttl)
            first = produce.append_stored(state, queues[q], blob, count, body_bytes, client, times)
        known = versions.get(q)
        versions[q] = (q, known[1] if known is not None else first, first + count - 1)
    if opened is not None:
        _drop_open(state, txn, opened)
    done = tuple(versions.values())
    _remember(state, txn, command.fence, done, former)
    return Committed(versions=done)


def _times(columns: Columns) -> tuple[bool, bytes, bytes, bytes]:
    """Whether the times of a chunk's messages differ; if not, what each column says of all of them."""
    given = (columns.delays, columns.not_befores, columns.ttls)
    if any(times != times[:8] * (len(times) // 8) for times in given):
        return True, _NONE, _NONE, _NONE
    delay, not_before, ttl = (times[:8] or _NONE for times in given)
    return False, delay, not_before, ttl


def abort(state: State, command: Abort) -> Aborted:
    """Drop what is staged, of all attempts or of some; the same may be staged again (X2)."""
    if read_published(state, command.txn) is not None and _is_published(state, command.txn):
        return Aborted(chunks=0)
    opened = read_open(state, command.txn)
    if opened is None:
        return Aborted(chunks=0)
    if command.attempts is None:
        _drop_open(state, command.txn, opened)
        return Aborted(chunks=opened.chunks)
    wanted = {_attempt_hash(attempt) for attempt in command.attempts}
    dropped = 0
    prefix = k1(opened.number)
    for key, data in list(state.txn.scan(Table.STAGE, prefix, after(prefix))):
        if key[12:28] in wanted:
            blob, _, _, size, *_ = _CHUNK.unpack(data)
            state.delete(Table.STAGE, key)
            state.drop_blob(blob)
            opened.size -= size
            opened.chunks -= 1
            state.meta.staged_bytes -= size
            dropped += 1
    if opened.chunks:
        state.put(Table.TXN, _open_key(command.txn), _pack_open(opened))
    else:
        _drop_open(state, command.txn, opened)
    return Aborted(chunks=dropped)


def forget(state: State, command: ForgetTxn) -> Done:
    """An administrator ends the memory of an app or a job."""
    former = read_published(state, command.txn)
    if former is not None:
        state.delete(Table.TXN, _published_key(command.txn))
        if former.number:
            _unschedule(state, former.forget_at, former.number)
    return Done()


def describe(view: View, txn: TxnId) -> TxnDescribed:
    former = read_published(view, txn)
    if former is not None and _is_published(view, txn):
        same = not isinstance(txn, Stream) or txn.seq == former.seq
        return TxnDescribed(state="published", versions=former.versions if same else ())
    opened = read_open(view, txn)
    if opened is None:
        return TxnDescribed(state="unknown")
    return TxnDescribed(state="open", staged_bytes=opened.size, expires_at_ms=opened.deadline)


def end_due(state: State, budget: int) -> None:
    """Along the log: drop transactions past their deadline and old job records, a bounded number an entry."""
    for _ in range(budget):
        found = state.txn.first(Table.TXN_DUE, k1(0), k1(state.time_ms + 1))
        if found is None:
            return
        due_key, key = found
        data = state.delete(Table.TXN, key)
        state.delete(Table.TXN_DUE, due_key)
        if data is not None and key[:1] in b"op":
            opened = Open(*_OPEN.unpack(data))
            state.meta.staged_bytes -= opened.size
            reap.forget_staged(state, opened.number)


def _named(state: State, opened: Open | None, part: Part) -> list[tuple[bytes, bytes]]:
    """The chunks of one part, all there and amounting to what the publish says; else StagedMissing."""
    chunks = []
    count = digest = 0
    for chunk in range(part.chunks):
        key = _chunk_key(opened.number, part.part, part.attempt, chunk) if opened is not None else b""
        data = state.txn.get(Table.STAGE, key) if key else None
        if data is None:
            raise StagedMissing(part=part.part, attempt=part.attempt)
        chunks.append((key, data))
        count += _CHUNK.unpack(data)[2]
        digest ^= int.from_bytes(_CHUNK.unpack(data)[-1][:8], "big")
    if count != part.count or digest != part.digest:
        raise StagedMissing(part=part.part, attempt=part.attempt)
    return chunks


def _is_published(view: View, txn: TxnId) -> bool:
    former = read_published(view, txn)
    if former is None:
        return False
    return txn.seq <= former.seq if isinstance(txn, Stream) else view.time_ms < former.forget_at


def read_published(view: View, txn: TxnId) -> Published | None:
    data = view.txn.get(Table.TXN, _published_key(txn))
    if data is None:
        return None
    mark, number = _PUBLISHED.unpack_from(data)
    fence, at = unpack_text(data, _PUBLISHED.size)
    versions = tuple(_VERSIONS.iter_unpack(data[at:]))
    stream = isinstance(txn, Stream)
    return Published(mark if stream else 0, 0 if stream else mark, number, fence, versions)


def _remember(
    state: State, txn: TxnId, fence: str, versions: tuple[tuple[int, int, int], ...], former: Published | None
) -> None:
    number = 0
    if isinstance(txn, Job):
        if former is not None:
            _unschedule(state, former.forget_at, former.number)
        state.meta.txn_ids += 1
        number = state.meta.txn_ids
        mark = state.time_ms + state.limits.job_memory_ms
        state.insert(Table.TXN_DUE, k2(mark, number), _published_key(txn))
    else:
        mark = txn.seq
    rows = b"".join(_VERSIONS.pack(*row) for row in versions)
    state.put(Table.TXN, _published_key(txn), _PUBLISHED.pack(mark, number) + pack_text(fence) + rows)


def read_open(view: View, txn: TxnId) -> Open | None:
    """What is staged under this transaction now: past its deadline it does not exist (X2)."""
    data = view.txn.get(Table.TXN, _open_key(txn))
    if data is None:
        return None
    opened = Open(*_OPEN.unpack(data))
    if view.time_ms >= opened.deadline:
        if isinstance(view, State):
            _drop_open(view, txn, opened)
        return None
    return opened


def _write_open(state: State, txn: TxnId, opened: Open) -> None:
    state.put(Table.TXN, _open_key(txn), _pack_open(opened))
    state.insert(Table.TXN_DUE, k2(opened.deadline, opened.number), _open_key(txn))


def _drop_open(state: State, txn: TxnId, opened: Open) -> None:
    state.delete(Table.TXN, _open_key(txn))
    _unschedule(state, opened.deadline, opened.number)
    state.meta.staged_bytes -= opened.size
    reap.forget_staged(state, opened.number)


def _unschedule(state: State, deadline: int, number: int) -> None:
    state.delete(Table.TXN_DUE, k2(deadline, number))


def _pack_open(opened: Open) -> bytes:
    return _OPEN.pack(opened.number, opened.size, opened.deadline, opened.chunks)


def _open_key(txn: TxnId) -> bytes:
    if isinstance(txn, Stream):
        return b"o" + k1(txn.seq) + txn.app.encode()
    return b"p" + txn.id.encode()


def _published_key(txn: TxnId) -> bytes:
    return b"s" + txn.app.encode() if isinstance(txn, Stream) else b"j" + txn.id.encode()


def _attempt_hash(attempt: str) -> bytes:
    return xxh3_128_digest(attempt.encode())


def _chunk_key(number: int, part: int, attempt: str, chunk: int) -> bytes:
    return k1(number) + struct.pack(">I", part) + _attempt_hash(attempt) + struct.pack(">I", chunk)
