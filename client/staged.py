"""Staged produce (X2) as steps: chunks put aside under a transaction, then made messages all at once.

A part is put together from its chunks: what `stage` gives for each of them is added up by `publish`, and the cluster
publishes only what amounts to exactly that. A chunk that was forgotten, or named twice, is refused, never lost.
"""

from collections.abc import Iterable, Mapping

from xxhash import xxh3_128_digest

from holdfast.client.calls import Names, Payloads, Published, Steps, TxnState, expect
from holdfast.client.message import Message, pack
from holdfast.client.protocol import commands as c
from holdfast.client.protocol import queries as q
from holdfast.client.protocol import replies as r
from holdfast.client.protocol.commands import Part
from holdfast.client.protocol.errors import BadValue, OutcomeUnknown, Unavailable
from holdfast.client.protocol.values import Job, Stream, TxnId

Txn = str | tuple[str, int] | TxnId  # a text names a job, app and number a transaction of a stream
EXPIRES_MS = 3_600_000


def stage(
    names: Names, txn: Txn, queue: str, payloads: Payloads, part: int, attempt: str, chunk: int, expires_ms: int
) -> Steps[Part]:
    """Put one chunk aside; the same again changes nothing. At most 1 MiB; split what is larger."""
    columns, body = pack(payloads, Message(b""))
    if not columns.ends:
        raise BadValue(field="payloads", problem="is empty; stage no chunk for a part without messages")
    answer = yield from names.asking(
        queue,
        lambda queue_id: c.Stage(
            txn=txn_id(txn),
            part=part,
            attempt=attempt,
            chunk=chunk,
            queue_id=queue_id,
            expires_ms=expires_ms,
            columns=columns,
            body=body,
        ),
    )
    expect(r.Staged, answer)
    content_hash = xxh3_128_digest(b"".join((*columns.content(), body)))
    return Part(part, attempt, 1, columns.count, int.from_bytes(content_hash[:8], "big"))


def publish(names: Names, txn: Txn, parts: Iterable[Part], fence: str) -> Steps[Published]:
    answer = yield c.Publish(txn=txn_id(txn), parts=whole(parts), fence=fence)
    done = expect(r.Committed, answer)
    try:
        return Published((yield from _by_name(names, done.versions)), done.replayed)
    except Unavailable as error:
        problem = "it was published, and what its queues are called was not answered in time"
        raise OutcomeUnknown(f"{problem}; the same again is answered", problem=problem) from error


def abort(txn: Txn, attempts: Iterable[str] | None) -> Steps[int]:
    """How many chunks were dropped."""
    chosen = None if attempts is None else tuple(attempts)
    return expect(r.Aborted, (yield c.Abort(txn=txn_id(txn), attempts=chosen))).chunks


def forget(txn: Txn) -> Steps[None]:
    expect(r.Done, (yield c.ForgetTxn(txn=txn_id(txn))))


def status(names: Names, txn: Txn) -> Steps[TxnState]:
    found = expect(r.TxnDescribed, (yield q.TxnStatus(txn=txn_id(txn))))
    versions = yield from _by_name(names, found.versions)
    return TxnState(found.state, found.staged_bytes, found.expires_at_ms, versions)


def whole(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Chunks of one part added up, as `Publish` names it. Of two attempts at a part only one may be named."""
    found: dict[int, Part] = {}
    for part in parts:
        known = found.get(part.part, Part(part.part, part.attempt, 0, 0, 0))
        if known.attempt != part.attempt:
            raise BadValue(field="parts", problem=f"names two attempts at part {part.part}; publish one of them")
        found[part.part] = Part(
            part.part,
            part.attempt,
            known.chunks + part.chunks,
            known.count + part.count,
            known.digest ^ part.digest,
        )
    return tuple(found.values())


def txn_id(txn: Txn) -> TxnId:
    match txn:
        case str():
            return Job(txn)
        case (app, seq):
            return Stream(app, seq)
        case _:
            return txn


def _by_name(names: Names, versions: Iterable[tuple[int, int, int]]) -> Steps[dict[str, list[int]]]:
    rows = list(versions)
    found: Mapping[int, str] = yield from names.name_all({queue_id for queue_id, _, _ in rows})
    written: dict[str, list[int]] = {}
    for queue_id, first, last in rows:
        written.setdefault(found[queue_id], []).extend(range(first, last + 1))
    return written
