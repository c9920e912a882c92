"""Cancel and reschedule what no group has leased or settled yet (P6)."""

from dataclasses import replace

from holdfast.client.protocol.commands import Cancel, Reschedule
from holdfast.client.protocol.replies import VersionOutcome, VersionsChanged
from holdfast.jepsen.model.records import Batch, Queue, runs
from holdfast.jepsen.model.state import State

Judged = dict[int, tuple[str, str]]  # version -> outcome and group


def cancel(state: State, command: Cancel) -> VersionsChanged:
    queue = state.queue(command.queue_id)
    outcomes: list[VersionOutcome] = []
    for first, last in command.versions:
        judged = _judge(state, queue, first, last)
        for version, (outcome, _) in judged.items():
            if outcome == "ok":
                state.fire("P6.cancel")
                for group in queue.groups.values():
                    life = group.lives.get(version)
                    if life is not None and life.unsettled:
                        life.settle("cancelled")
        gone = {version for version, (outcome, _) in judged.items() if outcome == "ok"}
        queue.batches = [part for batch in queue.batches for part in _without(batch, gone)]
        outcomes += _outcomes(queue, first, last, judged)
    return VersionsChanged(outcomes=tuple(outcomes))


def reschedule(state: State, command: Reschedule) -> VersionsChanged:
    queue = state.queue(command.queue_id)
    asked_ms = command.not_before_ms if command.delay_ms is None else state.time_ms + command.delay_ms
    due_ms = max(asked_ms or 0, state.time_ms + 1)
    outcomes: list[VersionOutcome] = []
    for first, last in command.versions:
        judged = _judge(state, queue, first, last)
        changed = {version for version, (outcome, _) in judged.items() if outcome == "ok"}
        queue.batches = [part for batch in queue.batches for part in _split(batch, changed, due_ms)]
        for version in changed:
            state.fire("P6.reschedule")
            batch = queue.batch_of(version)
            for group in queue.groups.values():
                life = group.lives.get(version)
                if life is not None and life.unsettled:
                    life.state, life.due_ms, life.held = "delayed", due_ms, True
                    life.expires_ms = None if life.redriven or batch is None else batch.expires_ms
        outcomes += _outcomes(queue, first, last, judged)
    return VersionsChanged(outcomes=tuple(outcomes))


def _judge(state: State, queue: Queue, first: int, last: int) -> Judged:
    return {version: _judge_one(state, queue, version) for version in range(first, min(last, queue.tail) + 1)}


def _judge_one(state: State, queue: Queue, version: int) -> tuple[str, str]:
    if queue.message(version) is None:
        state.fire("P6.not_found")
        return "not_found", ""
    for group in queue.groups.values():
        life = group.lives.get(version)
        if life is not None and life.state != "freed" and (life.ever_leased or life.redriven or not life.unsettled):
            state.fire("P6.too_late")
            return "too_late", group.name
    return "ok", ""


def _outcomes(queue: Queue, first: int, last: int, judged: Judged) -> list[VersionOutcome]:
    """Maximal runs of equal outcome; what lies above the tail was never produced."""
    found: list[VersionOutcome] = []
    for version, (outcome, group) in judged.items():
        _add(found, version, version, outcome, group)
    if last > queue.tail:
        _add(found, max(first, queue.tail + 1), last, "not_found", "")
    return found


def _add(found: list[VersionOutcome], first: int, last: int, outcome: str, group: str) -> None:
    if found and (found[-1].outcome, found[-1].group) == (outcome, group):
        first = found.pop().first
    found.append(VersionOutcome(first, last, outcome, group))


def _without(batch: Batch, gone: set[int]) -> list[Batch]:
    """What is left of a batch: a cancelled message is not stored any more, for no later group may get it."""
    kept = {message.version: message for message in batch.messages if message.version not in gone}
    return [
        replace(batch, messages=[kept[version] for version in range(first, last + 1)]) for first, last in runs(kept)
    ]


def _split(batch: Batch, changed: set[int], due_ms: int) -> list[Batch]:
    """A batch or, where it is changed in part, its parts: only the rescheduled ones get new times (0002, 11)."""
    parts: list[Batch] = []
    moved_before: bool | None = None
    for message in batch.messages:
        moved = message.version in changed
        if moved is moved_before:
            parts[-1].messages.append(message)
        elif moved:
            expires_ms = None if batch.ttl_ms is None else due_ms + batch.ttl_ms
            parts.append(Batch([message], due_ms, expires_ms, batch.ttl_ms, batch.kept))
        else:
            parts.append(Batch([message], batch.due_ms, batch.expires_ms, batch.ttl_ms, batch.kept))
        moved_before = moved
    return parts
