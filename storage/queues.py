"""What a queue and a group are: creating, changing, seeking, purging and deleting them (G1, G2, G5, D1)."""

from collections.abc import Sequence
from dataclasses import replace

from holdfast.client.protocol.commands import (
    CreateGroup,
    CreateQueue,
    PurgeQueue,
    Seek,
    UpdateGroup,
    UpdateQueue,
)
from holdfast.client.protocol.errors import (
    BadValue,
    DeadLetterCycle,
    GroupExists,
    LimitReached,
    QueueExists,
    QueueNotFound,
    QueueReferenced,
)
from holdfast.client.protocol.replies import Done, Purged, QueueCreated, Started
from holdfast.client.protocol.values import GroupSettings, QueueId, QueueSettings, Version
from holdfast.storage import due, gaps, groups, reap, retention, settled, sums, survivors, unfinished
from holdfast.storage.effects import EndLeases, WakeConsumers
from holdfast.storage.rows import (
    NEVER,
    GroupRow,
    QueueRow,
    pack_settings,
)
from holdfast.storage.state import State, View
from holdfast.storage.tables import Table, k1, queue_name_key


def create_queue(state: State, command: CreateQueue) -> QueueCreated:
    known = state.queue_id(command.name)
    if known is not None:
        raise QueueExists(name=command.name, queue_id=known)
    if state.meta.queues >= state.limits.queues:
        raise LimitReached(limit_name="queues", limit=state.limits.queues)
    if len(command.groups) > state.limits.groups_per_queue:
        raise LimitReached(limit_name="groups_per_queue", limit=state.limits.groups_per_queue)
    _check_target(state, command.name, command.settings.dlq_queue)
    q = state.next_id("queue_ids")
    queue = QueueRow(q, command.name, pack_settings(command.settings))
    state.add_queue(queue)
    state.put(Table.NAME, queue_name_key(command.name), k1(q))
    state.meta.queues += 1
    for name in command.groups:
        state.add_group(_new_group(state, queue, name, GroupSettings()))
    return QueueCreated(queue_id=QueueId(q))


def update_queue(state: State, queue: QueueRow, command: UpdateQueue) -> Done:
    settings = replace(queue.settings, **dict(command.changes))  # type: ignore[arg-type]
    if settings.dlq_queue != queue.settings.dlq_queue:
        _check_target(state, queue.name, settings.dlq_queue)
    for group in state.groups(queue.q):
        _check_strategy(settings, group.settings)
    was_replay = retention.is_replay(queue.settings)
    queue.settings_bytes = pack_settings(settings)
    state.touch_queue(queue)
    _wake(state, queue, state.groups(queue.q))
    if was_replay and not retention.is_replay(settings):
        reap.release_range(state, queue, queue.low, queue.tail)
    return Done()


def delete_queue(state: State, queue: QueueRow) -> Done:
    referrer = _referrer(state, queue)
    if referrer is not None:
        raise QueueReferenced(name=queue.name, referrer=referrer)
    for group in list(state.groups(queue.q)):
        _drop_group(state, queue, group)
    reap.forget_queue(state, queue)
    state.delete(Table.NAME, queue_name_key(queue.name))
    state.meta.queues -= 1
    tombstone = QueueRow(queue.q, queue.name, b"", deleted=1)
    state.add_queue(tombstone)
    return Done()


def create_group(state: State, queue: QueueRow, command: CreateGroup) -> Started:
    if state.group(queue.q, command.group) is not None:
        raise GroupExists(group=command.group)
    if len(state.groups(queue.q)) >= state.limits.groups_per_queue:
        raise LimitReached(limit_name="groups_per_queue", limit=state.limits.groups_per_queue)
    _check_target(state, queue.name, command.settings.dlq_queue)
    _check_strategy(queue.settings, command.settings)
    start, moved = _start(state, queue, command.start)
    group = _new_group(state, queue, command.group, command.settings)
    state.add_group(group)
    _begin(state, queue, group, start)
    reap.release_range(state, queue, queue.low, start - 1)
    return Started(version=Version(start), moved=moved)


def update_group(state: State, queue: QueueRow, group: GroupRow, command: UpdateGroup) -> Done:
    settings = replace(group.settings, **dict(command.changes))  # type: ignore[arg-type]
    if settings.dlq_queue != group.settings.dlq_queue:
        _check_target(state, queue.name, settings.dlq_queue)
    _check_strategy(queue.settings, settings)
    group.settings_bytes = pack_settings(settings)
    state.touch_group(group)
    _wake(state, queue, [group])
    return Done()


def delete_group(state: State, queue: QueueRow, group: GroupRow) -> Done:
    _drop_group(state, queue, group)
    reap.release_range(state, queue, queue.low, queue.tail)
    return Done()


def seek(state: State, queue: QueueRow, group: GroupRow, command: Seek) -> Started:
    """A new generation somewhere else: all leases end, all counts start anew (G2)."""
    start, moved = _start(state, queue, command.to)
    _end_generation(state, queue, group)
    if command.dead:
        reap.forget_dead(state, group)
        group.grave, group.parked = state.new_scope(), 0
    ids = state.new_scope(), group.grave, state.new_scope(), state.new_scope()
    fresh = GroupRow(group.q, group.gid, *ids, group.name, group.settings_bytes)
    fresh.generation = state.next_id("group_generations")
    fresh.dead_seq, fresh.parked = group.dead_seq, group.parked
    fresh.dead = fresh.carried = group.parked
    rows = state.groups(queue.q)
    rows[rows.index(group)] = fresh
    _begin(state, queue, fresh, start)
    _wake(state, queue, [fresh])
    reap.release_range(state, queue, queue.low, queue.tail)
    return Started(version=Version(start), moved=moved)


def purge(state: State, queue: QueueRow, command: PurgeQueue, chosen: Sequence[GroupRow]) -> Purged:
    """Settle what is ready and delayed; the flags widen it to what is in flight and dead (G5)."""
    for group in chosen:
        if group.gaps_to:
            unfinished.refuse(state, group)  # what it never had would be taken for purged
    count = sum(_purge_group(state, queue, group, command) for group in chosen)
    if any(group.sort_to for group in chosen):
        reap.release_later(state, queue, queue.low, queue.tail)
    else:
        reap.release_range(state, queue, queue.low, queue.tail)
    return Purged(count=count)


def _wake(state: State, queue: QueueRow, chosen: Sequence[GroupRow]) -> None:
    """Something may be deliverable to these that was not before."""
    for group in chosen:
        state.effects[WakeConsumers(queue.q, group.name)] = None


def _new_group(state: State, queue: QueueRow, name: str, settings: GroupSettings) -> GroupRow:
    """A group that does not exist yet. Deaths are counted on from those of deleted groups: no number names two."""
    gid, g, grave, shelf, hold = (state.new_scope() for _ in range(5))
    group = GroupRow(queue.q, gid, g, grave, shelf, hold, name, pack_settings(settings), dead_seq=queue.dead_seq)
    group.generation = state.next_id("group_generations")
    return group


def _start(view: View, queue: QueueRow, asked: str | int) -> tuple[int, bool]:
    """Where a group starts that asks for this (G2), and whether that is not what it asked for."""
    after_tail = queue.tail + 1
    if asked == "latest":
        return after_tail, False
    others = view.groups(queue.q)
    if asked == "earliest":
        if others and not retention.is_replay(queue.settings):
            for group in others:
                unfinished.refuse(view, group)
            return min(settled.lowest_unsettled(view, group) for group in others), False
        return queue.low, False
    assert isinstance(asked, int)
    start = min(max(asked, queue.low), after_tail)
    return start, start != asked


def _begin(state: State, queue: QueueRow, group: GroupRow, start: int) -> None:
    """Set a new generation to its start: what is not stored there counts as settled, what is delayed as held."""
    group.start = group.cursor = group.skip_to = group.known_from = start
    group.floor = group.settled_top = start - 1
    if queue.freed_rows and start <= queue.tail:
        gaps.begin(state, queue, group)
        if group.gaps_to:
            reap.fill_later(state, group)
    if queue.sched_rows and start <= queue.tail:
        group.held = sums.delayed_from(state, queue, start)
        due.release_due(state, queue, group)
    state.touch_group(group)


def _end_generation(state: State, queue: QueueRow, group: GroupRow) -> None:
    reap.forget_generation(state, group)
    state.effects[EndLeases(queue.q, group.name)] = None


def _drop_group(state: State, queue: QueueRow, group: GroupRow) -> None:
    _end_generation(state, queue, group)
    reap.forget_dead(state, group)
    queue.dead_seq = max(queue.dead_seq, group.dead_seq)
    state.touch_queue(queue)
    state.drop_group(group)


def _purge_group(state: State, queue: QueueRow, group: GroupRow, command: PurgeQueue) -> int:
    """One group: counters move, ids are given up, and the line is drawn; what stood there goes later."""
    count = groups.ready(queue, group) + groups.delayed(group)
    reap.forget_shelf(state, group)
    group.shelf = state.new_scope()
    if command.in_flight:
        count += group.in_flight
        reap.forget_hold(state, group)
        group.hold = state.new_scope()
        group.in_flight = 0
    group.purged += count
    group.waiting = group.held = group.held_passed = group.skip_held = 0
    group.wait_due = NEVER
    group.cursor = group.skip_to = queue.tail + 1
    survivors.draw_line(state, queue, group)
    if group.sort_to:
        reap.sort_later(state, group)
    if command.dead and group.parked:
        count += _purge_dead(state, group)
    return count


def _purge_dead(state: State, group: GroupRow) -> int:
    count = group.parked
    reap.forget_purged(state, group)
    group.grave = state.new_scope()
    group.dead -= count
    group.purged += count
    group.parked = 0
    return count


# Dead-letter targets -----------------------------------------------------------------------------------------


def _check_strategy(queue: QueueSettings, group: GroupSettings) -> None:
    strategy = group.dlq_strategy or queue.dlq_strategy
    if strategy == "move" and (group.dlq_queue or queue.dlq_queue) is None:
        raise BadValue(field="dlq_queue", problem="is missing; dlq_strategy 'move' needs a target queue")


def _check_target(state: State, name: str, target: str | None) -> None:
    """A dead-letter target exists and does not lead back here (D1)."""
    if target is None:
        return
    if target == name:
        raise DeadLetterCycle(queue=name, target=target)
    if state.queue_id(target) is None:
        raise QueueNotFound(queue=target)
    seen = {target}
    todo = [target]
    while todo:
        for following in _targets(state, todo.pop()):
            if following == name:
                raise DeadLetterCycle(queue=name, target=target)
            if following not in seen:
                seen.add(following)
                todo.append(following)


def _targets(view: View, name: str) -> list[str]:
    q = view.queue_id(name)
    queue = view.queue(q) if q is not None else None
    if queue is None or q is None:
        return []
    names = [queue.settings.dlq_queue, *(group.settings.dlq_queue for group in view.groups(q))]
    return sorted({target for target in names if target is not None})


def _referrer(view: View, queue: QueueRow) -> str | None:
    """The first other queue, by name, whose dead letters come here."""
    for key, _ in view.txn.scan(Table.NAME, b"q", b"r"):
        name = key[1:].decode()
        if name != queue.name and queue.name in _targets(view, name):
            return name
    return None
