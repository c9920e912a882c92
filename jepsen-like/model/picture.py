"""The whole state in plain values, for comparison with another machine that folded the same log.

A queue is
    id, name, tail
    lowest            lowest stored version, or tail + 1
    live_messages, live_bytes
    stored            list of stored versions (live or kept), ascending
    batches           list of (first, last, due_ms, expires_ms, live) of stored batches
    messages          version -> (generation, enqueued_ms, client_id, client_seq, payload, key, headers)
    groups            name -> group, in order of creation
    producers         client_id -> {epoch, high_water, last_use_ms, first_epoch, window}; the window is a list of
                      (numbering_epoch, first_seq, n, first_version)
    last_epoch, readers: name -> (version, reported_ms), history: list of HistoryRow

A group is
    start, generation, floor, holes, highest_plain, expired, counters (the ten of G4 and `produced`)
    versions          version -> {state, delivery_count, attempts, attempts_now, redrives, lease_id, deadline,
                      last_error, due_ms, held, expires_ms, redriven, first_delivered_ms, last_delivered_ms,
                      consumer_id}.
                      `attempts` leaves out the lease that holds the version now; `attempts_now` counts it where its
                      mode does. `deadline` is lease time. `due_ms` is the end of a delay; `held` tells P6 from nack.
    leases            id -> {session, consumer_id, granted_at, deadline, counts, held, begun}
    auto_acks         ids of auto_ack grants that can be replayed
    dead              dead_seq -> the row's fields as in `replies.DeadRow`, but `key` as bytes; and `redrives`

Everything is
    time_ms, steps_ms, limits, queues: id -> queue, sessions: id -> {principal, consumer_id, last_use_ms, done_below,
    remembered}, without those that are overdue; open_txns: txn -> {deadline_ms, size_bytes, chunks}, streams, jobs
"""

from dataclasses import asdict
from typing import Any

from holdfast.jepsen.model import groups, history
from holdfast.jepsen.model.produce import is_overdue as producer_is_overdue
from holdfast.jepsen.model.records import Dead, Group, Life, Queue
from holdfast.jepsen.model.sessions import is_overdue
from holdfast.jepsen.model.state import State
from holdfast.jepsen.model.views import counters


def everything(state: State) -> dict[str, Any]:
    return {
        "time_ms": state.time_ms,
        "steps_ms": state.time_ms - state.lease_ms,
        "limits": asdict(state.limits),
        "queues": {queue_id: queue(state, one) for queue_id, one in state.queues.items()},
        "sessions": {
            session_id: {
                "principal": session.principal,
                "consumer_id": session.consumer_id,
                "last_use_ms": session.last_use_ms,
                "done_below": session.done_below,
                "remembered": sorted(session.replies),
            }
            for session_id, session in state.sessions.items()
            if not is_overdue(state, session)
        },
        "open_txns": {
            txn: {"deadline_ms": opened.deadline_ms, "size_bytes": opened.size_bytes, "chunks": sorted(opened.chunks)}
            for txn, opened in state.open_txns.items()
        },
        "streams": {app: (one.seq, one.fence, one.versions) for app, one in state.streams.items()},
        "jobs": {job: one.versions for job, one in state.jobs.items()},
    }


def queue(state: State, queue: Queue) -> dict[str, Any]:
    stored = [message for batch in queue.batches for message in batch.messages]
    return {
        "id": queue.id,
        "name": queue.name,
        "tail": queue.tail,
        "lowest": queue.lowest_stored,
        "live_messages": queue.live_messages,
        "live_bytes": queue.live_bytes,
        "stored": [message.version for message in stored],
        "batches": [
            (batch.first, batch.last, batch.due_ms, batch.expires_ms, queue.is_live(batch)) for batch in queue.batches
        ],
        "messages": {
            one.version: (
                one.generation,
                one.enqueued_ms,
                one.client_id,
                one.client_seq,
                one.payload,
                one.key,
                one.headers,
            )
            for one in stored
        },
        "groups": {name: _group(queue, one) for name, one in queue.groups.items()},
        "producers": {
            client_id: {
                "epoch": producer.epoch,
                "high_water": producer.high_water,
                "last_use_ms": producer.last_use_ms,
                "first_epoch": producer.first_epoch,
                "window": [
                    (known.numbering_epoch, known.first_seq, known.count, known.first_version)
                    for known in producer.window
                ],
            }
            for client_id, producer in queue.producers.items()
            if not producer_is_overdue(state, queue, producer)
        },
        "last_epoch": queue.last_epoch,
        "readers": {name: (reader.version, reader.reported_ms) for name, reader in queue.readers.items()},
        "history": history.kept(state, queue),
    }


def _group(queue: Queue, group: Group) -> dict[str, Any]:
    return {
        "start": group.start,
        "generation": group.generation,
        "floor": groups.floor(queue, group),
        "holes": groups.holes(queue, group),
        "highest_plain": group.highest_plain,
        "expired": group.expired,
        "counters": counters(group),
        "versions": {version: _life(group, life) for version, life in sorted(group.lives.items())},
        "leases": {
            lease.id: {
                "session": lease.session,
                "consumer_id": lease.consumer_id,
                "granted_at": lease.granted_at,
                "deadline": lease.deadline,
                "counts": lease.counts,
                "held": group.held_by(lease.id),
                "begun": sorted(lease.begun),
            }
            for lease in group.leases.values()
        },
        "auto_acks": sorted(group.auto_acks),
        "dead": {row.dead_seq: _dead(row) for row in group.dead.values()},
    }


def _life(group: Group, life: Life) -> dict[str, Any]:
    lease = group.leases.get(life.lease_id)
    counted = lease is not None and (lease.counts == "leased" or life.version in lease.begun)
    return {
        "state": life.state,
        "delivery_count": life.delivery_count,
        "attempts": life.attempts,
        "attempts_now": life.attempts + counted,
        "redrives": life.redrives,
        "lease_id": life.lease_id,
        "deadline": lease.deadline if lease else None,
        "last_error": life.last_error,
        "due_ms": life.due_ms,
        "held": life.held,
        "expires_ms": life.expires_ms if life.unsettled else None,
        "redriven": life.redriven,
        "first_delivered_ms": life.first_delivered_ms,
        "last_delivered_ms": life.last_delivered_ms,
        "consumer_id": life.consumer_id,
    }


def _dead(row: Dead) -> dict[str, Any]:
    return {
        "version": row.version,
        "reason": row.reason,
        "attempts": row.attempts,
        "delivery_count": row.delivery_count,
        "redrives": row.redrives,
        "last_error": row.last_error,
        "first_delivered_ms": row.first_delivered_ms,
        "last_delivered_ms": row.last_delivered_ms,
        "died_ms": row.died_ms,
        "consumer_id": row.consumer_id,
        "client_id": row.message.client_id,
        "client_seq": row.message.client_seq,
        "key": row.message.key,
        "headers": row.message.headers,
        "payload": row.message.payload,
        "move_failed": row.move_failed,
    }
