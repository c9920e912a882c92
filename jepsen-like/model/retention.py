"""What a queue stores (G3): live batches always, others while `replay` says so, unsettled ones until `drop_after`.

Looked at when a command that names the queue begins, after the groups that it touches were folded, and
again when it is done; never in between, and never for a queue that no command names.
"""

from holdfast.jepsen.model.records import Batch, Queue
from holdfast.jepsen.model.state import State


def tend(state: State, queue: Queue) -> None:
    """At the beginning of a command: end what is too old, then free what nobody needs."""
    _trim(state, queue)
    free(state, queue)


def free(state: State, queue: Queue) -> None:
    """Keep a batch that is live or that retention keeps; newest first, for bytes count from the newest on."""
    stored: list[Batch] = []
    newer_bytes = 0
    for batch in reversed(queue.batches):
        if queue.is_live(batch):
            stored.append(batch)
        elif _is_kept(state, queue, batch, newer_bytes):
            batch.kept = True
            stored.append(batch)
        else:
            state.fire("G3.freed")
        newer_bytes += batch.size_bytes  # freed ones too: nothing older is kept in their place
    queue.batches = stored[::-1]


def _is_kept(state: State, queue: Queue, batch: Batch, newer_bytes: int) -> bool:
    """Whether a batch that is not live stays readable: within every replay limit that is set, or held by a reader."""
    settings = queue.settings
    if settings.replay_ms is None and settings.replay_bytes is None:
        return False
    young = settings.replay_ms is None or batch.enqueued_ms + settings.replay_ms > state.time_ms
    small = settings.replay_bytes is None or newer_bytes + batch.size_bytes <= settings.replay_bytes
    if young and small:
        state.fire("G3.kept")
        return True
    hold_ms = state.limits.cursor_hold_ms
    if batch.enqueued_ms + (settings.replay_ms or 0) + hold_ms <= state.time_ms:
        return False
    for reader in queue.readers.values():
        if reader.version < batch.last and reader.reported_ms + hold_ms > state.time_ms:
            state.fire("G3.held_by_reader")
            return True
    return False


def _trim(state: State, queue: Queue) -> None:
    """End what is available and too old, or too far behind; never what is leased, delayed or redriven."""
    settings = queue.settings
    if settings.drop_after_ms is None and settings.drop_after_bytes is None:
        return
    live_bytes = 0
    for batch in list(reversed(queue.batches)):
        live_bytes += batch.size_bytes if queue.is_backlog(batch) else 0
        old = settings.drop_after_ms is not None and batch.enqueued_ms + settings.drop_after_ms <= state.time_ms
        far = settings.drop_after_bytes is not None and live_bytes > settings.drop_after_bytes
        if not old and not far:
            continue
        for group in queue.groups.values():
            for message in batch.messages:
                life = group.lives.get(message.version)
                if life is not None and life.state == "ready" and not life.redriven:
                    state.fire("G3.trimmed_by_age" if old else "G3.trimmed_by_bytes")
                    life.settle("trimmed")
