"""The state of a store in the plain values of the model's picture (`holdfast.jepsen.model.picture`).

What only one of the two keeps is left out on both sides: the past of versions that are settled, and how far a group has
looked ahead. `of_model` makes the model's picture comparable, `of_store` reads the other one.
"""

from dataclasses import asdict
from typing import Any

from holdfast.client.protocol import columns as cutting
from holdfast.client.protocol.values import Stream, TxnId
from holdfast.jepsen.model import groups as model_groups
from holdfast.jepsen.model.machine import Model
from holdfast.storage import dead, groups, history, leases, produce, reap, retention, settled, staging, unfinished
from holdfast.storage.rows import (
    BEGUN,
    CAUSES,
    DEAD_MOVE_FAILED,
    LEASE_AUTO,
    LEASE_COUNTS_BEGUN,
    REDRIVE,
    WHYS,
    GroupRow,
    QueueRow,
    Span,
    unpack_dead,
    unpack_lease,
    unpack_queue,
    unpack_session,
    unpack_span,
)
from holdfast.storage.state import View
from holdfast.storage.store import ReadTxn
from holdfast.storage.tables import Table, k1

UNSETTLED = ("ready", "delayed", "leased")
ABOVE = b"\xff" * 64

Picture = dict[Any, Any]


def of_model(model: Model) -> Picture:
    """The model's picture without what the tables do not keep."""
    picture = model.view()
    for queue_id, queue in picture["queues"].items():
        queue["batches"] = [batch[:4] for batch in queue["batches"]]
        queue["history"] = history_by_version(queue["history"])
        for name, group in queue["groups"].items():
            del group["highest_plain"]
            rows = model.state.queues[queue_id]
            group["cap"] = model_groups.cap_in_force(rows, rows.groups[name])
            group["versions"] = {version: _life(life) for version, life in group["versions"].items()}
            for lease in group["leases"].values():
                lease["begun"] = [version for version in lease["begun"] if version in lease["held"]]
            for row in group["dead"].values():
                row["consumer_id"] = row["consumer_id"] or None
    for opened in picture["open_txns"].values():
        opened["chunks"] = len(opened["chunks"])
    return picture


def _life(life: Picture) -> Picture:
    if life["state"] not in UNSETTLED:
        return {"state": life["state"]}
    return life | {"consumer_id": life["consumer_id"] or None}


def history_by_version(rows: Any) -> list[tuple[object, ...]]:
    """Version by version: how many versions share a row is the machine's own affair."""
    return sorted(
        (row.kind, row.time_ms, version, row.group, row.lease_id, row.consumer_id, row.error)
        for row in rows
        for version in range(row.first, row.last + 1)
    )


def of_store(txn: ReadTxn, txns: set[TxnId]) -> Picture:
    """The same of a store; `txns` are the transactions to look for, because the store knows them by key only."""
    view = View(txn)
    rows = [unpack_queue(data) for _, data in txn.scan(Table.QUEUE, b"", ABOVE)]
    return {
        "time_ms": view.time_ms,
        "steps_ms": view.meta.steps,
        "limits": asdict(view.limits),
        "queues": {row.q: _queue(view, row) for row in rows if not row.deleted},
        "sessions": _sessions(view),
        **_txns(view, txns),
    }


def _sessions(view: View) -> Picture:
    found = {}
    for key, data in view.txn.scan(Table.SESSION, b"", ABOVE):
        row = unpack_session(data)
        if view.time_ms - row.last_use <= view.limits.session_idle_ms:
            found[key] = {
                "principal": row.principal,
                "consumer_id": row.consumer,
                "last_use_ms": row.last_use,
                "done_below": row.done_below,
                "remembered": sorted(row.window),
            }
    return found


def _txns(view: View, txns: set[TxnId]) -> Picture:
    open_txns, streams, jobs = {}, {}, {}
    for txn in txns:
        opened = staging.read_open(view, txn)
        if opened is not None:
            open_txns[txn] = {"deadline_ms": opened.deadline, "size_bytes": opened.size, "chunks": opened.chunks}
        published = staging.read_published(view, txn)
        if published is None:
            continue
        if isinstance(txn, Stream):
            streams[txn.app] = (published.seq, published.fence, published.versions)
        elif view.time_ms < published.forget_at:
            jobs[txn.id] = published.versions
    return {"open_txns": open_txns, "streams": streams, "jobs": jobs}


def _queue(view: View, queue: QueueRow) -> Picture:
    messages = {}
    batches = []
    for batch in view.batches(queue.q, 1, queue.tail):
        batches.append((batch.first, batch.last, batch.due or None, batch.expires or None))
        columns, body = view.content(queue.q, batch.first, batch.blob)
        for index in range(batch.count):
            headers = cutting.decode_headers(cutting.header_cell(columns, body, index))
            messages[batch.first + index] = (
                batch.generation,
                batch.enqueued,
                batch.client,
                batch.first_seq + index,
                cutting.payload_of(columns, body, index),
                cutting.key_of(columns, body, index),
                tuple(headers.items()),
            )
    return {
        "id": queue.q,
        "name": queue.name,
        "tail": queue.tail,
        "lowest": queue.low,
        "live_messages": queue.live_count,
        "live_bytes": queue.live_bytes,
        "stored": list(messages),
        "batches": batches,
        "messages": messages,
        "groups": {group.name: _group(view, queue, group) for group in view.groups(queue.q)},
        "producers": _producers(view, queue),
        "last_epoch": queue.last_epoch,
        "readers": {row.name: (row.version, row.reported_ms) for row in retention.readers(view, queue)},
        "history": history_by_version(history.read(view, queue, 1, 1_000_000)[0]),
    }


def _producers(view: View, queue: QueueRow) -> Picture:
    found = {}
    for key, _ in view.txn.scan(Table.PRODUCER, k1(queue.q), k1(queue.q + 1)):
        client = key[8:].decode()
        row = produce.known_producer(view, queue, client)
        if row is not None:
            found[client] = {
                "epoch": row.epoch,
                "high_water": row.high_water,
                "last_use_ms": row.last_use,
                "first_epoch": row.born,
                "window": [item[:4] for item in row.window],
            }
    return found


def _group(view: View, queue: QueueRow, group: GroupRow) -> Picture:
    lives: dict[int, Picture] = {}
    opened, auto_acks = _leases(view, group, lives)
    for _, data in view.txn.scan(Table.BACK, k1(group.shelf), k1(group.shelf + 1)):
        _put(view, queue, lives, unpack_span(data)[0], "ready", None)
    for _, data in view.txn.scan(Table.WAIT, k1(group.shelf), k1(group.shelf + 1)):
        _put(view, queue, lives, unpack_span(data, 8)[0], "delayed", int.from_bytes(data[:8], "big"))
    purged = reap.purged_graves(view, group)
    for version in range(1, queue.tail + 1):
        why = None if version in lives else settled.why_settled(view, group, version)
        if why is not None:
            dead_rows = (dead.read_row(view, grave, version) for grave in purged if WHYS[why] == "dead")
            gone = any(row is not None and row.g == group.g for row in dead_rows)
            lives[version] = {"state": "purged" if gone else WHYS[why]}
    for batch in view.batches(queue.q, group.start, queue.tail):
        for version in range(max(batch.first, group.start), batch.last + 1):
            if version not in lives:
                waits = batch.due if batch.due and leases.is_held(group, batch) else None
                state = "delayed" if waits else "ready"
                _put(view, queue, lives, Span(version, version), state, waits, held=bool(waits))
    policy = groups.policy(queue, group)
    exact, _ = unfinished.finished(view, queue, group)
    names = ("acked", "dead", "moved", "discarded", "cancelled", "purged", "trimmed")
    return {
        "start": group.start,
        "generation": group.generation,
        "floor": exact.floor,
        "holes": exact.holes,
        "cap": leases.hole_cap(exact, policy),
        "expired": group.expired,
        "counters": {
            "produced": groups.produced(queue, exact),
            "ready": groups.ready(queue, exact),
            "delayed": groups.delayed(group),
            "in_flight": group.in_flight,
            **{name: getattr(group, name) for name in names},
        },
        "versions": dict(sorted(lives.items())),
        "leases": opened,
        "auto_acks": auto_acks,
        "dead": _dead(view, queue, group),
    }


def _leases(view: View, group: GroupRow, lives: dict[int, Picture]) -> tuple[Picture, list[int]]:
    opened, auto_acks = {}, []
    for key, data in view.txn.scan(Table.LEASE, k1(group.g), k1(group.g + 1)):
        assert unpack_lease(data).flags & LEASE_AUTO
        auto_acks.append(int.from_bytes(key[8:], "big"))
    for key, data in view.txn.scan(Table.LEASE, k1(group.hold), k1(group.hold + 1)):
        lease_id, row = int.from_bytes(key[8:], "big"), unpack_lease(data)
        queue = view.queue(group.q)
        assert queue is not None
        for span in row.held:
            counts = not row.flags & LEASE_COUNTS_BEGUN or span.flags & BEGUN
            _put(view, queue, lives, span, "leased", None, lease=(lease_id, row.deadline), counts=bool(counts))
        opened[lease_id] = {
            "session": row.session,
            "consumer_id": row.held[0].consumer,
            "granted_at": row.granted_at,
            "deadline": row.deadline,
            "counts": "begun" if row.flags & LEASE_COUNTS_BEGUN else "leased",
            "held": [version for span in row.held for version in range(span.lo, span.hi + 1)],
            "begun": [v for span in row.held if span.flags & BEGUN for v in range(span.lo, span.hi + 1)],
        }
    return opened, auto_acks


def _put(
    view: View,
    queue: QueueRow,
    lives: dict[int, Picture],
    span: Span,
    state: str,
    due_ms: int | None,
    *,
    held: bool = False,
    lease: tuple[int, int] | None = None,
    counts: bool = False,
) -> None:
    for version in range(span.lo, span.hi + 1):
        assert version not in lives, f"version {version} is in two places"
        batch = view.batch_at(queue.q, version)
        assert batch is not None, f"version {version} is {state} but not stored"
        redriven = bool(span.flags & REDRIVE)
        lives[version] = {
            "state": state,
            "delivery_count": span.count,
            "attempts": span.attempts,
            "attempts_now": span.attempts + counts,
            "redrives": span.redrives,
            "lease_id": lease[0] if lease else 0,
            "deadline": lease[1] if lease else None,
            "last_error": span.error or None,
            "due_ms": due_ms,
            "held": held,
            "expires_ms": None if redriven else batch.expires or None,
            "redriven": redriven,
            "first_delivered_ms": span.first_ms or None,
            "last_delivered_ms": span.last_ms or None,
            "consumer_id": span.consumer or None,
        }


def _dead(view: View, queue: QueueRow, group: GroupRow) -> Picture:
    rows = {}
    for _, data in view.txn.scan(Table.DEAD, k1(group.grave), k1(group.grave + 1)):
        row = unpack_dead(data)
        columns, body = view.content(queue.q, row.span.lo, row.blob)
        for index in range(row.span.hi - row.span.lo + 1):
            headers = cutting.decode_headers(cutting.header_cell(columns, body, index))
            rows[row.dead_seq + index] = {
                "version": row.span.lo + index,
                "reason": CAUSES[row.cause],
                "attempts": row.span.attempts,
                "delivery_count": row.span.count,
                "redrives": row.span.redrives,
                "last_error": row.span.error or None,
                "first_delivered_ms": row.span.first_ms or None,
                "last_delivered_ms": row.span.last_ms or None,
                "died_ms": row.died,
                "consumer_id": row.span.consumer or None,
                "client_id": row.client,
                "client_seq": row.first_seq + index,
                "key": cutting.key_of(columns, body, index),
                "headers": tuple(headers.items()),
                "payload": cutting.payload_of(columns, body, index),
                "move_failed": bool(row.flags & DEAD_MOVE_FAILED),
            }
    return rows
