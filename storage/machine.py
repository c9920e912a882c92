"""The rules of the queue as one function: a transaction and a committed entry in, answers and effects out.

`apply` reads no clock, no randomness and no environment, and has two outcomes: the entry is applied, or an exception
stops the node. A command that is refused is an answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import assert_never

from holdfast.client.protocol.commands import (
    Abort,
    AckBatch,
    Cancel,
    Command,
    CreateGroup,
    CreateQueue,
    DeleteGroup,
    DeleteQueue,
    DropDead,
    Envelope,
    Extend,
    ForgetProducer,
    ForgetTxn,
    Lease,
    Nack,
    OpenProducer,
    OpenSession,
    Produce,
    Publish,
    PurgeQueue,
    Redrive,
    RedriveToOrigin,
    Release,
    ReportCursor,
    Reschedule,
    Seek,
    SetLimits,
    SetRules,
    Stage,
    TimeStep,
    Touch,
    Transaction,
    UpdateGroup,
    UpdateQueue,
)
from holdfast.client.protocol.errors import (
    BadValue,
    HoldfastError,
    InvariantBroken,
    Overloaded,
    RulesUnknown,
    SessionExpired,
    StateBroken,
    Unavailable,
)
from holdfast.client.protocol.limits import Limits, limit_max
from holdfast.client.protocol.replies import Answer, Done, Failed, Reply, Touched
from holdfast.client.protocol.values import Place
from holdfast.storage import (
    clock,
    dead,
    due,
    groups,
    leases,
    origin,
    produce,
    queues,
    reap,
    retention,
    schedule,
    sessions,
    settle,
    staging,
    transactions,
)
from holdfast.storage.effects import Effect
from holdfast.storage.entry import Entry
from holdfast.storage.rows import GroupRow, QueueRow
from holdfast.storage.state import State
from holdfast.storage.store import WriteTxn

RULES_VERSION = 1
_WITHOUT_SESSION = (Touch, TimeStep, Stage)
RETRY_AFTER_MS = 100  # the leader touches what is due as fast as it can


@dataclass(frozen=True, slots=True)
class Applied:
    answers: tuple[Answer, ...]
    effects: tuple[Effect, ...]


def apply(txn: WriteTxn, entry: Entry) -> Applied:
    """Run one committed entry: same store and entry, same result, on every node."""
    return apply_all(txn, (entry,))[0]


def apply_all(txn: WriteTxn, entries: Sequence[Entry]) -> list[Applied]:
    """Run a whole number of entries in one transaction."""
    return [_apply_one(txn, entry) for entry in entries]


def begin_generation(txn: WriteTxn) -> None:
    """What a restore adds to the state that it brings back: ids and epochs count above all that were given out (T4)."""
    state = State(txn)
    state.meta.generation += 1
    state.meta.queue_ids = state.meta.lease_ids = state.meta.group_generations = 0
    state.flush()


def _apply_one(txn: WriteTxn, entry: Entry) -> Applied:
    state = State(txn)
    meta = state.meta
    if entry.index <= meta.applied:
        raise StateBroken(problem=f"entry {entry.index} was applied before; applied is {meta.applied}")
    if meta.rules > RULES_VERSION:
        raise StateBroken(problem=f"the log speaks rules version {meta.rules}; this node knows {RULES_VERSION}")
    clock.advance(meta, entry.stamp_ms, state.limits.stamp_advance_ms)
    state.time_ms = meta.time_ms
    state.lease_time = meta.time_ms - meta.steps  # the rest of the entry is at this one: a TimeStep does not move it
    _end_what_is_over(state)
    answers = []
    for position, (envelope, command_hash) in enumerate(entry.commands):
        reply = _answer(state, envelope, command_hash)
        answers.append(Answer(Place(entry.index, position, state.time_ms), reply))
    meta.applied = entry.index
    state.flush()
    return Applied(tuple(answers), tuple(state.effects))


def _answer(state: State, envelope: Envelope, command_hash: int) -> Reply:
    """One command: its session's memory first (A1), then the rules. A refusal is remembered as an answer is."""
    command = envelope.command
    try:
        if not _needs_session(command):
            reply = _execute(state, envelope)
            _free_what_was_kept(state, command)
            return reply
        if isinstance(command, OpenSession):
            if not envelope.session:
                raise SessionExpired
            return sessions.open_session(state, envelope, command)
        row = sessions.known_session(state, envelope.session)
        known = sessions.first_answer(state, row, envelope, command_hash)
    except InvariantBroken:
        raise
    except HoldfastError as error:
        return Failed(error)
    if known is not None:
        return known
    sessions.begin(state, row, envelope)
    try:
        reply = _execute(state, envelope)
    except InvariantBroken:
        raise
    except HoldfastError as error:
        reply = Failed(error)
    _free_what_was_kept(state, command)
    if isinstance(reply, Failed) and isinstance(reply.error, Unavailable):
        return reply  # nothing was done but folding; the same request may be asked again, and then have its answer
    where = b""
    if isinstance(command, Lease):
        group = state.group(command.queue_id, command.group)
        where = sessions.lease_place(command.queue_id, group.gid if group is not None else 0)
    sessions.remember(state, row, envelope, command_hash, reply, where)
    return reply


def _free_what_was_kept(state: State, command: Command) -> None:
    """What a command settled may be beyond retention at once."""
    for item in command.items if isinstance(command, Transaction) else (command,):
        queue = state.queue(getattr(item, "queue_id", 0))
        if queue is not None and queue.kept_rows and not queue.deleted:
            retention.free_kept(state, queue)


def _needs_session(command: Command) -> bool:
    if isinstance(command, Produce):
        return command.client_id is None
    return not isinstance(command, _WITHOUT_SESSION)


def _execute(state: State, envelope: Envelope) -> Reply:
    """The one big choice. What each command touches is folded first (T3)."""
    command, session = envelope.command, envelope.session
    match command:
        case Produce():
            queue = _queue(state, command.queue_id)
            if command.client_id is None:
                return produce.by_session(state, queue, command, session)
            return produce.numbered(state, queue, command)
        case Lease():
            queue, group = _touched(state, command.queue_id, command.group)
            row = state.session(session)
            return leases.grant(state, queue, group, command, session, row.consumer if row is not None else "")
        case AckBatch():
            return settle.ack(state, *_touched(state, command.queue_id, command.group), command, session)
        case Nack():
            return settle.nack(state, *_touched(state, command.queue_id, command.group), command, session)
        case Release():
            return settle.release(state, *_touched(state, command.queue_id, command.group), command, session)
        case Extend():
            return settle.extend(state, *_touched(state, command.queue_id, command.group), command, session)
        case Touch():
            return _touch(state, command)
        case TimeStep():
            clock.step(state.meta, command.by_ms)
            state.time_ms = state.meta.time_ms
            return Done()
        case OpenSession():
            raise StateBroken(problem="OpenSession is answered before this")
        case OpenProducer():
            return produce.open_producer(state, _queue(state, command.queue_id), command)
        case ForgetProducer():
            return produce.forget_producer(state, _queue(state, command.queue_id), command)
        case Cancel():
            return schedule.cancel(state, _all_folded(state, command.queue_id), command)
        case Reschedule():
            return schedule.reschedule(state, _all_folded(state, command.queue_id), command)
        case Redrive():
            return dead.redrive(state, *_folded(state, command.queue_id, command.group), command)
        case RedriveToOrigin():
            return origin.redrive_to_origin(state, *_folded(state, command.queue_id, command.group), command)
        case DropDead():
            _, group = _folded(state, command.queue_id, command.group)
            return dead.drop(state, group, command)
        case Transaction():
            return transactions.run(state, command, session)
        case Stage():
            return staging.stage(state, _queue(state, command.queue_id), command)
        case Publish():
            return staging.publish(state, command)
        case Abort():
            return staging.abort(state, command)
        case ForgetTxn():
            return staging.forget(state, command)
        case CreateQueue():
            return queues.create_queue(state, command)
        case UpdateQueue():
            return queues.update_queue(state, _all_folded(state, command.queue_id), command)
        case DeleteQueue():
            return queues.delete_queue(state, _all_touched(state, command.queue_id)[0])
        case PurgeQueue():
            return _purge(state, command)
        case CreateGroup():
            return queues.create_group(state, _queue(state, command.queue_id), command)
        case UpdateGroup():
            return queues.update_group(state, *_folded(state, command.queue_id, command.group), command)
        case DeleteGroup():
            return queues.delete_group(state, *_touched(state, command.queue_id, command.group))
        case Seek():
            return queues.seek(state, *_folded(state, command.queue_id, command.group), command)
        case ReportCursor():
            return retention.report_cursor(state, _queue(state, command.queue_id), command)
        case SetLimits():
            return _set_limits(state, command)
        case SetRules():
            return _set_rules(state, command)
        case unknown:
            assert_never(unknown)


def _queue(state: State, q: int) -> QueueRow:
    queue = groups.find_queue(state, q)
    retention.fold(state, queue)
    return queue


def _touched(state: State, q: int, name: str) -> tuple[QueueRow, GroupRow]:
    queue, group, _ = _touched_more(state, q, name)
    return queue, group


def _touched_more(state: State, q: int, name: str) -> tuple[QueueRow, GroupRow, bool]:
    """Queue and group, folded; and whether more is due there than one command folds."""
    queue = groups.find_queue(state, q)
    group = groups.find_group(state, queue, name)
    more = due.fold(state, queue, group)
    retention.fold(state, queue)
    return queue, group, more


def _all_touched(state: State, q: int) -> tuple[QueueRow, bool]:
    """The queue, and whether more is due in one of its groups than one command folds."""
    queue = groups.find_queue(state, q)
    more = [due.fold(state, queue, group) for group in list(state.groups(q))]
    retention.fold(state, queue)
    return queue, any(more)


def _folded(state: State, q: int, name: str) -> tuple[QueueRow, GroupRow]:
    """As `_touched`, for commands that look at versions which nobody holds: nothing may be due there any more (T3)."""
    queue, group, more = _touched_more(state, q, name)
    if more:
        raise _more_is_due(state)
    return queue, group


def _all_folded(state: State, q: int) -> QueueRow:
    queue, more = _all_touched(state, q)
    if more:
        raise _more_is_due(state)
    return queue


def _more_is_due(state: State) -> Overloaded:
    """Acting before it is folded would make the outcome depend on who touched when."""
    return Overloaded(limit_name="fold_ranges", limit=state.limits.fold_ranges, retry_after_ms=RETRY_AFTER_MS)


def _touch(state: State, command: Touch) -> Touched:
    queue = groups.find_queue(state, command.queue_id)
    chosen = list(state.groups(queue.q))
    if command.group is not None:
        chosen = [groups.find_group(state, queue, command.group)]
    more = [due.fold(state, queue, group) for group in chosen]
    retention.fold(state, queue)
    return Touched(more=any(more))


def _purge(state: State, command: PurgeQueue) -> Reply:
    queue = groups.find_queue(state, command.queue_id)
    chosen = state.groups(queue.q)
    if command.group is not None:
        chosen = [groups.find_group(state, queue, command.group)]
    return queues.purge(state, _all_folded(state, queue.q), command, chosen)


def _set_limits(state: State, command: SetLimits) -> Done:
    known = {field.name for field in fields(Limits)}
    for name, value in command.changes:
        if name not in known:
            raise BadValue(field=name, problem=f"is no limit; these are: {', '.join(sorted(known))}")
        if not 1 <= value <= limit_max(name):
            raise BadValue(field=name, problem=f"is {value}; 1 to {limit_max(name)} is allowed")
    state.meta.limits.update(command.changes)
    state.limits = Limits(**state.meta.limits)
    return Done()


def _set_rules(state: State, command: SetRules) -> Done:
    if not state.meta.rules <= command.version <= RULES_VERSION:
        raise RulesUnknown(version=command.version, supported=RULES_VERSION)
    state.meta.rules = command.version
    return Done()


def _end_what_is_over(state: State) -> None:
    """The share of every entry in what ends along the log, without anybody asking (G5, X2)."""
    reap.work(state)
    sessions.end_idle(state, state.limits.reap_rows)
    staging.end_due(state, state.limits.reap_rows)
