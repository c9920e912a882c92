"""Groups: where they start, how far they have come, and what is in the way (G1, G2, L5)."""

from dataclasses import replace
from typing import Any

from holdfast.client.protocol.commands import CreateGroup, DeleteGroup, Seek, UpdateGroup
from holdfast.client.protocol.errors import GroupExists, LimitReached
from holdfast.client.protocol.replies import Done, Started
from holdfast.client.protocol.values import GroupSettings, Version
from holdfast.jepsen.model.clock import due_of_deadline
from holdfast.jepsen.model.produce import new_life
from holdfast.jepsen.model.queues import check_strategy, check_target
from holdfast.jepsen.model.records import Group, Life, Queue, runs
from holdfast.jepsen.model.state import State

# Where a group stands ----------------------------------------------------------------------------------


def floor(queue: Queue, group: Group) -> int:
    """The version before the lowest unsettled one; redriven ones were settled before (0002, 14)."""
    open_versions = (v for v, life in group.lives.items() if v >= group.start and not life.counts_as_settled)
    return min(open_versions, default=queue.tail + 1) - 1


def holes(queue: Queue, group: Group) -> int:
    """Runs of settled versions above the floor."""
    above = floor(queue, group)
    return len(runs(v for v, life in group.lives.items() if v > above and life.counts_as_settled))


def highest_settled(group: Group) -> int:
    return max(
        (v for v, life in group.lives.items() if life.counts_as_settled and (v >= group.start or life.redriven)),
        default=0,
    )


def cap_in_force(queue: Queue, group: Group) -> int:
    """What L5 compares the holes with: batches held back behind delivery and redriven runs raise the cap."""
    held = sum(
        any(_is_held(group, message.version) for message in batch.messages)
        for batch in queue.batches
        if batch.first < group.highest_plain
    )
    redriven = len(runs(v for v, life in group.lives.items() if life.redriven))
    return queue.settings.max_ack_holes + held + redriven


def _is_held(group: Group, version: int) -> bool:
    life = group.lives.get(version)
    return life is not None and life.state == "delayed" and life.held


def next_due_ms(state: State, group: Group) -> int | None:
    """When a lease or a nack's delay ends next."""
    leases = [due_of_deadline(state, lease.deadline) for lease in group.leases.values()]
    delays = [life.due_ms for life in group.lives.values() if life.due_ms is not None and not life.held]
    return min(leases + delays, default=None)


# Commands ----------------------------------------------------------------------------------------------


def create_group(state: State, command: CreateGroup) -> Started:
    queue = state.queue(command.queue_id)
    if command.group in queue.groups:
        state.fire("G1.exists")
        raise GroupExists(group=command.group)
    if len(queue.groups) >= state.limits.groups_per_queue:
        state.fire("P8.groups_per_queue")
        raise LimitReached(limit_name="groups_per_queue", limit=state.limits.groups_per_queue)
    _check_settings(state, queue, command.settings)
    start, moved = find_start(state, queue, command.start)
    lives = _lives(state, queue, start)
    generation = state.next_group_generation()
    queue.groups[command.group] = Group(
        command.group, command.settings, start, generation, lives, dead_seq=queue.dead_seq
    )
    return Started(version=Version(start), moved=moved)


def update_group(state: State, command: UpdateGroup) -> Done:
    queue, group = state.group(command.queue_id, command.group)
    changes: dict[str, Any] = dict(command.changes)
    settings = replace(group.settings, **changes)
    _check_settings(state, queue, settings)
    group.settings = settings
    return Done()


def delete_group(state: State, command: DeleteGroup) -> Done:
    queue, group = state.group(command.queue_id, command.group)
    state.fire("G1.delete")
    del queue.groups[group.name]
    queue.dead_seq = max(queue.dead_seq, group.dead_seq)
    return Done()


def seek(state: State, command: Seek) -> Started:
    """A new generation: no leases, no counts; parked rows stay unless told otherwise (G2)."""
    queue, group = state.group(command.queue_id, command.group)
    start, moved = find_start(state, queue, command.to)
    lives, generation = _lives(state, queue, start), state.next_group_generation()
    fresh = Group(group.name, group.settings, start, generation, lives, dead_seq=group.dead_seq)
    if group.leases:
        state.fire("G2.seek_ends_leases")
    if not command.dead:
        for row in group.dead.values():
            state.fire("G2.seek_keeps_dead")
            row.carried = True
            fresh.dead[row.dead_seq] = row
            fresh.carried["dead"] += 1
    elif group.dead:
        state.fire("G2.seek_drops_dead")
    state.fire("G2.seek")
    queue.groups[group.name] = fresh  # assigning an existing key keeps the order of creation
    return Started(version=Version(start), moved=moved)


def find_start(state: State, queue: Queue, asked: str | int) -> tuple[int, bool]:
    """Where a group begins, and whether that is another place than it asked for (0002, 13)."""
    lowest, latest = queue.lowest_stored, queue.tail + 1
    if asked == "latest":
        state.fire("G2.latest")
        return latest, False
    if asked == "earliest":
        replays = queue.settings.replay_ms is not None or queue.settings.replay_bytes is not None
        if replays or not queue.groups:
            state.fire("G2.earliest_stored")
            return lowest, False
        state.fire("G2.earliest_unsettled")
        unsettled = [v for group in queue.groups.values() for v, life in group.lives.items() if life.unsettled]
        return min(unsettled, default=latest), False
    version = int(asked)
    if version < lowest:
        state.fire("G2.moved_up")
        return lowest, True
    if version > latest:
        state.fire("G2.moved_down")
        return latest, True
    state.fire("G2.version")
    return version, False


def _lives(state: State, queue: Queue, start: int) -> dict[int, Life]:
    lives = {}
    for version in range(start, queue.tail + 1):
        batch = queue.batch_of(version)
        if batch is None:
            state.fire("G2.freed")
            lives[version] = Life(version, state="freed")
        else:
            lives[version] = new_life(state, batch, version)
    return lives


def _check_settings(state: State, queue: Queue, settings: GroupSettings) -> None:
    check_strategy(settings.dlq_strategy or queue.settings.dlq_strategy, settings.dlq_queue or queue.settings.dlq_queue)
    check_target(state, queue.name, settings.dlq_queue)
