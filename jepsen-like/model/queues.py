"""Queues: created, changed, purged, deleted; and where their dead letters may go (D1, G5)."""

from dataclasses import asdict, fields, replace
from typing import Any

from holdfast.client.protocol.commands import CreateQueue, DeleteQueue, PurgeQueue, ReportCursor, SetLimits, UpdateQueue
from holdfast.client.protocol.errors import (
    BadValue,
    DeadLetterCycle,
    LimitReached,
    QueueExists,
    QueueNotFound,
    QueueReferenced,
)
from holdfast.client.protocol.limits import Limits
from holdfast.client.protocol.replies import Done, Purged, QueueCreated
from holdfast.client.protocol.values import GroupSettings, QueueId
from holdfast.jepsen.model.records import Group, Queue, Reader
from holdfast.jepsen.model.state import State


def create_queue(state: State, command: CreateQueue) -> QueueCreated:
    known = state.queue_named(command.name)
    if known is not None:
        state.fire("G5.queue_exists")
        raise QueueExists(name=known.name, queue_id=known.id)
    if len(state.queues) >= state.limits.queues:
        state.fire("P8.queues")
        raise LimitReached(limit_name="queues", limit=state.limits.queues)
    if len(command.groups) > state.limits.groups_per_queue:
        state.fire("P8.groups_per_queue")
        raise LimitReached(limit_name="groups_per_queue", limit=state.limits.groups_per_queue)
    check_target(state, command.name, command.settings.dlq_queue)
    queue_id = state.next_id(state.queue_names)
    queue = Queue(queue_id, command.name, command.settings)
    for name in command.groups:
        queue.groups[name] = Group(name, GroupSettings(), start=1, generation=state.next_group_generation())
    state.queues[queue_id] = queue
    state.queue_names[queue_id] = command.name
    return QueueCreated(queue_id=QueueId(queue_id))


def update_queue(state: State, command: UpdateQueue) -> Done:
    queue = state.queue(command.queue_id)
    changes: dict[str, Any] = dict(command.changes)
    settings = replace(queue.settings, **changes)  # raises BadValue
    for group in queue.groups.values():
        check_strategy(
            group.settings.dlq_strategy or settings.dlq_strategy, group.settings.dlq_queue or settings.dlq_queue
        )
    check_target(state, queue.name, settings.dlq_queue)
    queue.settings = settings
    return Done()


def delete_queue(state: State, command: DeleteQueue) -> Done:
    queue = state.queue(command.queue_id)
    others = [other for other in state.queues.values() if other is not queue]
    referrers = [other.name for other in others if queue.name in targets_of(other)]
    if referrers:
        state.fire("D1.referenced")
        raise QueueReferenced(name=queue.name, referrer=min(referrers))
    state.fire("G5.delete")
    del state.queues[queue.id]
    return Done()


def purge_queue(state: State, command: PurgeQueue) -> Purged:
    """Settle what is ready and delayed; the flags widen it to what is leased and to what is dead."""
    if command.group is None:
        groups = list(state.queue(command.queue_id).groups.values())
    else:
        groups = [state.group(command.queue_id, command.group)[1]]
    states = ("ready", "delayed", "leased") if command.in_flight else ("ready", "delayed")
    count = 0
    for group in groups:
        for version in group.in_state(*states):
            state.fire("G5.purge")
            group.lives[version].settle("purged")
            count += 1
        if command.in_flight:
            group.leases.clear()
        if command.dead:
            count += _purge_dead(state, group)
    return Purged(count=count)


def _purge_dead(state: State, group: Group) -> int:
    count = len(group.dead)
    for row in group.dead.values():
        state.fire("G5.purge_dead")
        if row.carried:
            group.carried["dead"] -= 1
            group.carried["purged"] += 1
        else:
            group.lives[row.version].settle("purged")
    group.dead.clear()
    return count


def report_cursor(state: State, command: ReportCursor) -> Done:
    state.fire("G3.cursor")
    readers, limit = state.queue(command.queue_id).readers, state.limits.readers_per_queue
    if command.reader not in readers and len(readers) >= limit:
        for name, reader in list(readers.items()):
            if reader.reported_ms + state.limits.cursor_hold_ms <= state.time_ms:
                state.fire("G3.reader_forgotten")
                del readers[name]
        if len(readers) >= limit:
            state.fire("G3.readers_limit")
            raise LimitReached(limit_name="readers_per_queue", limit=limit)
    readers[command.reader] = Reader(command.version, state.time_ms)
    return Done()


def set_limits(state: State, command: SetLimits) -> Done:
    known = {field.name for field in fields(Limits)}
    for name, _ in command.changes:
        if name not in known:
            raise BadValue(field=name, problem="is no limit")
    try:
        state.limits = Limits(**(asdict(state.limits) | dict(command.changes)))
    except ValueError as error:
        raise BadValue(field="changes", problem=str(error)) from None
    return Done()


def targets_of(queue: Queue) -> set[str]:
    """Every queue that this one or one of its groups names, whatever the strategies."""
    named = {queue.settings.dlq_queue} | {group.settings.dlq_queue for group in queue.groups.values()}
    return {name for name in named if name is not None}


def check_target(state: State, name: str, target: str | None) -> None:
    """A dead-letter queue must exist and may not lead back to the queue of this name (D1)."""
    if target is None:
        return
    if target != name and state.queue_named(target) is None:
        state.fire("D1.no_target")
        raise QueueNotFound(queue=target)
    ahead, seen = [target], set[str]()
    while ahead:
        here = ahead.pop()
        if here == name:
            state.fire("D1.cycle")
            raise DeadLetterCycle(queue=name, target=target)
        queue = state.queue_named(here)
        if queue is not None and here not in seen:
            seen.add(here)
            ahead += targets_of(queue)


def check_strategy(strategy: str, target: str | None) -> None:
    if strategy == "move" and target is None:
        raise BadValue(field="dlq_queue", problem="is missing; dlq_strategy 'move' needs a target queue")
