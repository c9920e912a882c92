"""Committed time and lease time (T1, T2): how an entry moves them, and where a deadline falls in committed time."""

from holdfast.storage.rows import Meta

STEPS_KEPT = 1_024  # far more steps than the longest lease (12 h) sees; what is older counts as one
TIME_MAX_MS = 2**62  # committed time stops there, so that a time plus any duration fits its column


def advance(meta: Meta, stamp_ms: int, at_most_ms: int) -> None:
    """Take an entry's stamp: never back, and never far ahead; the first one ever is taken as it is."""
    if stamp_ms > meta.time_ms:
        latest = meta.time_ms + at_most_ms if meta.time_ms else stamp_ms
        meta.time_ms = min(stamp_ms, latest, TIME_MAX_MS)


def step(meta: Meta, by_ms: int) -> None:
    """Committed time jumps; lease time stays."""
    lease_time = meta.time_ms - meta.steps
    by_ms = min(by_ms, TIME_MAX_MS - meta.time_ms)
    meta.time_ms += by_ms
    meta.steps += by_ms
    if meta.step_log and meta.step_log[-1][0] == lease_time:
        meta.step_log.pop()
    meta.step_log.append((lease_time, meta.steps))
    if len(meta.step_log) > STEPS_KEPT:
        del meta.step_log[0]
        meta.step_log[0] = (0, meta.step_log[0][1])


def due_time(meta: Meta, deadline: int) -> int:
    """The committed time at which lease time reaches `deadline`: with the steps made up to and at that lease time."""
    total = 0
    for lease_time, steps in reversed(meta.step_log):
        if lease_time <= deadline:
            total = steps
            break
    return deadline + total
