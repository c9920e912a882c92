"""Staged produce (X2): chunks put aside, invisible until one Publish makes them messages, all at once."""

from functools import reduce
from operator import xor

from holdfast.client.protocol.commands import Abort, ForgetTxn, Part, Publish, Stage
from holdfast.client.protocol.errors import Overloaded, StageConflict, StagedMissing, TxnClosed, TxnFenced
from holdfast.client.protocol.replies import Aborted, Committed, Done, Staged
from holdfast.client.protocol.values import Job, Stream, TxnId
from holdfast.jepsen.model.produce import append, check_limits, content_of, drafts_of
from holdfast.jepsen.model.records import Queue
from holdfast.jepsen.model.state import Chunk, OpenTxn, PublishedJob, PublishedStream, State, Versions

RETRY_AFTER_MS = 1_000


def expire(state: State) -> None:
    """From its deadline on, what a transaction staged does not exist; job records age out likewise."""
    for txn in [txn for txn, opened in state.open_txns.items() if opened.deadline_ms <= state.time_ms]:
        state.fire("X2.expiry")
        del state.open_txns[txn]
    for job in [job for job, published in state.jobs.items() if published.forget_at_ms <= state.time_ms]:
        state.fire("X2.job_forgotten")
        del state.jobs[job]


def published(state: State, txn: TxnId) -> Versions | None:
    """The versions of a transaction that is published, as far as they are still known; none where it is not."""
    match txn:
        case Stream(app=app, seq=seq):
            stream = state.streams.get(app)
            if stream is None or seq > stream.seq:
                return None
            return stream.versions if seq == stream.seq else ()
        case Job(id=job):
            known = state.jobs.get(job)
            return None if known is None else known.versions


def stage(state: State, command: Stage) -> Staged:
    queue = state.queue(command.queue_id)
    if published(state, command.txn) is not None:
        state.fire("X2.closed")
        raise TxnClosed()
    key = (command.part, command.attempt, command.chunk)
    chunk = Chunk(
        queue_id=queue.id,
        content=content_of(command.columns, command.body, command.content_hash),
        content_hash=command.content_hash,
        messages=drafts_of(command.columns, command.body),
    )
    opened = state.open_txns.get(command.txn)
    if opened is not None and key in opened.chunks:
        if opened.chunks[key] == chunk:
            state.fire("X2.stage_replay")
            return Staged(replayed=True)
        state.fire("X2.stage_conflict")
        raise StageConflict(part=command.part, attempt=command.attempt, chunk=command.chunk)
    check_limits(state, queue, command.columns, command.body)
    _check_quotas(state, opened, chunk.size_bytes)
    if opened is None:
        opened = state.open_txns[command.txn] = OpenTxn(deadline_ms=0)
    state.fire("X2.stage")
    opened.chunks[key] = chunk
    opened.deadline_ms = state.time_ms + command.expires_ms
    return Staged()


def _check_quotas(state: State, opened: OpenTxn | None, size_bytes: int) -> None:
    everybody = sum(txn.size_bytes for txn in state.open_txns.values())
    for name, used in (("staged_bytes_per_txn", opened.size_bytes if opened else 0), ("staged_bytes", everybody)):
        limit = getattr(state.limits, name)
        if used + size_bytes > limit:
            state.fire(f"X2.{name}")
            raise Overloaded(limit_name=name, limit=limit, retry_after_ms=RETRY_AFTER_MS)


def publish(state: State, command: Publish) -> Committed:
    txn = command.txn
    stream = state.streams.get(txn.app) if isinstance(txn, Stream) else None
    if isinstance(txn, Stream) and stream is not None and stream.fence != command.fence:
        state.fire("X2.fenced")
        raise TxnFenced(app=txn.app, fence=stream.fence)
    before = published(state, txn)
    if before is not None:
        state.fire("X2.publish_replay")
        return Committed(versions=before, replayed=True)
    opened = state.open_txns.get(txn) or OpenTxn(deadline_ms=0)
    parts = sorted(command.parts, key=lambda part: part.part)
    chunks = [chunk for part in parts for chunk in _chunks(state, opened, part)]
    queues = {chunk.queue_id: state.queue(chunk.queue_id) for chunk in chunks}
    versions = _write(state, txn, chunks, queues)
    state.fire("X2.publish")
    state.open_txns.pop(txn, None)
    if isinstance(txn, Stream):
        state.streams[txn.app] = PublishedStream(txn.seq, command.fence, versions)
    else:
        state.jobs[txn.id] = PublishedJob(state.time_ms + state.limits.job_memory_ms, versions)
    return Committed(versions=versions)


def _chunks(state: State, opened: OpenTxn, part: Part) -> list[Chunk]:
    """A part's chunks in order. Raises StagedMissing unless they are all there and amount to what the part says."""
    found = [opened.chunks.get((part.part, part.attempt, number)) for number in range(part.chunks)]
    chunks = [chunk for chunk in found if chunk is not None]
    count = sum(len(chunk.messages) for chunk in chunks)
    digest = reduce(xor, (int.from_bytes(chunk.content_hash[:8], "big") for chunk in chunks), 0)
    if len(chunks) < part.chunks or (count, digest) != (part.count, part.digest):
        state.fire("X2.missing")
        raise StagedMissing(part=part.part, attempt=part.attempt)
    return chunks


def _write(state: State, txn: TxnId, chunks: list[Chunk], queues: dict[int, Queue]) -> Versions:
    """Append every chunk, whatever the backlog; one range of versions for each queue, in order of first writing."""
    name = txn.app if isinstance(txn, Stream) else txn.id
    ranges: dict[int, tuple[int, int]] = {}
    for chunk in chunks:
        first, last = append(state, queues[chunk.queue_id], chunk.messages, f"txn/{name}", None)
        ranges[chunk.queue_id] = (ranges.get(chunk.queue_id, (first, last))[0], last)
    return tuple((queue_id, first, last) for queue_id, (first, last) in ranges.items())


def abort(state: State, command: Abort) -> Aborted:
    """Drop what is staged; what is published stays as it is."""
    opened = state.open_txns.get(command.txn)
    if opened is None or published(state, command.txn) is not None:
        state.fire("X2.abort_nothing")
        return Aborted(chunks=0)
    dropped = [key for key in opened.chunks if command.attempts is None or key[1] in command.attempts]
    for key in dropped:
        state.fire("X2.abort")
        del opened.chunks[key]
    if not opened.chunks:
        del state.open_txns[command.txn]
    return Aborted(chunks=len(dropped))


def forget_txn(state: State, command: ForgetTxn) -> Done:
    state.fire("X2.forget")
    match command.txn:
        case Stream(app=app):
            state.streams.pop(app, None)
        case Job(id=job):
            state.jobs.pop(job, None)
    return Done()
