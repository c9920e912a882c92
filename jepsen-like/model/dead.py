"""Dead letters: how a version dies, where it then goes, and how it comes back (D1 … D6)."""

from holdfast.client.protocol.commands import DeadRange, DropDead, Redrive, RedriveToOrigin
from holdfast.client.protocol.errors import OriginGone
from holdfast.client.protocol.replies import Purged, Redriven
from holdfast.client.protocol.values import RESERVED_HEADERS
from holdfast.jepsen.model import history
from holdfast.jepsen.model.produce import append, over_backlog
from holdfast.jepsen.model.records import Batch, Dead, Draft, Group, Headers, Life, Message, Queue, effective, runs
from holdfast.jepsen.model.state import State

# Dying -------------------------------------------------------------------------------------------------


def end_lives(state: State, queue: Queue, group: Group, reasons: dict[int, str], at_ms: int) -> None:
    """These versions will not be delivered again: runs of equal reason end together, lowest first."""
    for first, last, reason in _runs_of_reason(reasons):
        run = range(first, last + 1)
        state.fire(f"L3.{reason}")
        if reason == "expired":
            group.expired += len(run)
            if queue.settings.on_expired == "discard":
                state.fire("P7.discard")
                for version in run:
                    group.lives[version].settle("discarded")
                continue
            state.fire("P7.dead_letter")
        _die(state, queue, group, run, reason, at_ms)


def _runs_of_reason(reasons: dict[int, str]) -> list[tuple[int, int, str]]:
    found = [
        (first, last, reason)
        for reason in set(reasons.values())
        for first, last in runs(version for version, given in reasons.items() if given == reason)
    ]
    return sorted(found)


def _die(state: State, queue: Queue, group: Group, run: range, reason: str, at_ms: int) -> None:
    for version in run:
        last = group.lives[version].consumer_id or ""
        history.record(state, queue, "dead", [version], at_ms=at_ms, group=group.name, consumer_id=last, error=reason)
    strategy = effective(queue, group, "dlq_strategy")
    if strategy == "discard":
        state.fire("D1.discard")
        for version in run:
            group.lives[version].settle("discarded")
        return
    rows = [_row(queue, group.lives[version], reason, at_ms) for version in run]
    if strategy == "move":
        if _move(state, queue, group, rows):
            for version in run:
                group.lives[version].settle("moved")
            return
        for row in rows:
            row.move_failed = True
    state.fire("D1.move_failed" if strategy == "move" else "D1.park")
    for row in rows:
        group.dead_seq += 1
        row.dead_seq = group.dead_seq
        group.dead[row.dead_seq] = row
        group.lives[row.version].settle("dead")


def _row(queue: Queue, life: Life, reason: str, at_ms: int) -> Dead:
    message = queue.message(life.version)
    assert message is not None, "an unsettled version is stored"
    return Dead(
        dead_seq=0,
        message=message,
        reason=reason,
        attempts=life.attempts,
        delivery_count=life.delivery_count,
        redrives=life.redrives,
        last_error=life.last_error,
        first_delivered_ms=life.first_delivered_ms,
        last_delivered_ms=life.last_delivered_ms,
        died_ms=at_ms,
        consumer_id=life.consumer_id,
        move_failed=False,
    )


def _move(state: State, queue: Queue, group: Group, rows: list[Dead]) -> bool:
    """Produce a run into the dead-letter queue, all of it or, where that is full, nothing."""
    target = state.queue_named(effective(queue, group, "dlq_queue"))
    assert target is not None, "a queue that is referenced cannot be deleted"
    drafts = [
        Draft(row.message.payload, row.message.key, _with_lineage(queue, group, row.message, row)) for row in rows
    ]
    if over_backlog(target, len(drafts), sum(draft.size_bytes for draft in drafts)):
        return False
    state.fire("D1.move")
    append(state, target, drafts, f"moved/{queue.id}", None)
    return True


def _with_lineage(queue: Queue, group: Group, message: Message, row: Dead) -> Headers:
    lineage = {
        "holdfast-origin-queue": queue.name,
        "holdfast-origin-queue-id": str(queue.id),
        "holdfast-origin-version": str(message.version),
        "holdfast-client-id": message.client_id,
        "holdfast-client-seq": str(message.client_seq),
        "holdfast-reason": row.reason,
        "holdfast-attempts": str(row.attempts),
        "holdfast-last-error": row.last_error,
        "holdfast-group": group.name,
    }
    return (*without_lineage(message.headers), *((name, text) for name, text in lineage.items() if text is not None))


def without_lineage(headers: Headers) -> Headers:
    return tuple((name, text) for name, text in headers if not name.startswith(RESERVED_HEADERS))


# Coming back -------------------------------------------------------------------------------------------


def redrive(state: State, command: Redrive) -> Redriven:
    queue, group = state.group(command.queue_id, command.group)
    count = skipped = 0
    for asked in command.dead:
        rows = _named(group, asked)
        done = [row for row in rows if not _goes_on(queue, group, row) and _bring_back(state, queue, group, row)]
        onward = [row for row in rows if _goes_on(queue, group, row)]
        for first, last in runs(row.version for row in onward):
            run = [row for row in onward if first <= row.version <= last]
            if _send_on(state, queue, group, run):
                done += run
        history.record(state, queue, "redrive", (row.version for row in done), at_ms=state.time_ms, group=group.name)
        count += len(done)
        skipped += asked[1] - asked[0] + 1 - len(done)
    if skipped:
        state.fire("D4.skipped")
    return Redriven(count=count, skipped=skipped)


def _named(group: Group, asked: DeadRange) -> list[Dead]:
    """The rows that a range names: the version and the death must both be right."""
    first, last, dead_seq = asked
    found = [
        row
        for row in group.dead.values()
        if first <= row.version <= last and row.dead_seq == dead_seq + row.version - first
    ]
    return sorted(found, key=lambda row: row.version)


def _goes_on(queue: Queue, group: Group, row: Dead) -> bool:
    """Whether a redrive sends it to the dead-letter queue that could not take it before."""
    return row.move_failed and bool(effective(queue, group, "dlq_strategy") == "move")


def _send_on(state: State, queue: Queue, group: Group, run: list[Dead]) -> bool:
    if not _move(state, queue, group, run):
        state.fire("D4.move_failed_again")
        return False
    for row in run:
        state.fire("D4.moved_on")
        del group.dead[row.dead_seq]
        if row.carried:
            group.carried["dead"] -= 1
            group.carried["moved"] += 1
        else:
            group.lives[row.version].settle("moved")
    return True


def _bring_back(state: State, queue: Queue, group: Group, row: Dead) -> bool:
    """Available at once, with its history but without its attempts. False where the group walks the version anyway."""
    life = group.lives.get(row.version)
    if row.carried:
        if life is not None and life.state != "freed":
            state.fire("D4.walked_again")
            return False
        group.carried["dead"] -= 1
    state.fire("D4.redrive")
    del group.dead[row.dead_seq]
    group.lives[row.version] = Life(
        row.version,
        delivery_count=row.delivery_count,
        redrives=row.redrives + 1,
        ever_leased=life is not None and life.ever_leased,
        redriven=True,
        last_error=row.last_error,
        first_delivered_ms=row.first_delivered_ms,
        last_delivered_ms=row.last_delivered_ms,
        consumer_id=row.consumer_id,
    )
    if queue.batch_of(row.version) is None:
        # Its batch was freed, for nobody else needed it; the row's own message is stored again, alone.
        state.fire("D4.stored_again")
        queue.batches.append(Batch([row.message], None, None, None))
        queue.batches.sort(key=lambda batch: batch.first)
    return True


def redrive_to_origin(state: State, command: RedriveToOrigin) -> Redriven:
    """Version by version; the first origin that cannot take its message ends the command."""
    queue, group = state.group(command.queue_id, command.group)
    done: list[int] = []
    skipped = 0
    for first, last in command.versions:
        for version in range(first, min(last, queue.tail) + 1):
            message = _returnable(queue, group, version)
            if message is None:
                state.fire("D4.origin_skipped")
                skipped += 1
                continue
            gone = _return(state, queue, message)
            if gone is not None and not done:
                state.fire("D4.origin_gone")
                raise gone
            if gone is not None:
                state.fire("D4.origin_gone_midway")
                return _returned(state, queue, group, done, skipped)
            state.fire("D4.to_origin")
            group.lives[version].settle("moved")
            done.append(version)
        skipped += max(0, last - max(first - 1, queue.tail))
    return _returned(state, queue, group, done, skipped)


def _returned(state: State, queue: Queue, group: Group, done: list[int], skipped: int) -> Redriven:
    history.record(state, queue, "redrive", done, at_ms=state.time_ms, group=group.name)
    return Redriven(count=len(done), skipped=skipped)


def _returnable(queue: Queue, group: Group, version: int) -> Message | None:
    """The message, if it is available here and says where it died."""
    life, message = group.lives.get(version), queue.message(version)
    if life is None or message is None or life.state != "ready":
        return None
    return message if "holdfast-origin-queue-id" in dict(message.headers) else None


def _return(state: State, queue: Queue, message: Message) -> OriginGone | None:
    """Produce a copy where it died, for the group it died in; or say why that cannot be."""
    lineage = dict(message.headers)
    name, origin_id = lineage["holdfast-origin-queue"], int(lineage["holdfast-origin-queue-id"])
    origin = state.queues.get(origin_id)
    draft = Draft(message.payload, message.key, without_lineage(message.headers))
    problem = ""
    if origin is None:
        problem = "gone" if state.queue_named(name) is None else "recreated"
    elif lineage["holdfast-group"] not in origin.groups:
        problem = "without its group"
    elif over_backlog(origin, 1, draft.size_bytes):
        problem = "full"
    if origin is None or problem:
        return OriginGone(queue=name, queue_id=origin_id, problem=problem)
    version, _ = append(state, origin, [draft], f"moved/{queue.id}", None)
    for group in origin.groups.values():
        if group.name != lineage["holdfast-group"]:
            group.lives[version].settle("cancelled")
    return None


# Ending rows -------------------------------------------------------------------------------------------


def drop_dead(state: State, command: DropDead) -> Purged:
    _, group = state.group(command.queue_id, command.group)
    rows = [row for asked in command.dead for row in _named(group, asked)]
    for row in rows:
        state.fire("D2.drop")
        del group.dead[row.dead_seq]
    return Purged(count=len(rows))


def end_old_rows(state: State, queue: Queue, group: Group) -> None:
    retention_ms = queue.settings.dead_retention_ms
    if retention_ms is None:
        return
    for row in list(group.dead.values()):
        if row.died_ms + retention_ms <= state.time_ms:
            state.fire("D2.retention")
            del group.dead[row.dead_seq]
