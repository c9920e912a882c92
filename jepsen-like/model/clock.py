"""Committed time and lease time (T1, T2). Nothing else in the model knows a clock."""

from holdfast.jepsen.model.state import State


def advance(state: State, stamp_ms: int) -> None:
    """Move committed time to an entry's stamp: never back, and at most by one ordinary step."""
    if state.time_ms == 0:
        state.time_ms = stamp_ms
    elif stamp_ms < state.time_ms:
        state.fire("T1.behind")
    else:
        furthest = state.time_ms + state.limits.stamp_advance_ms
        if stamp_ms > furthest:
            state.fire("T1.clipped")
        state.time_ms = min(stamp_ms, furthest)


def step(state: State, by_ms: int) -> None:
    """Committed time jumps; lease time does not."""
    state.fire("T2.step")
    state.steps.append((state.lease_ms, by_ms))
    state.time_ms += by_ms


def due_of_deadline(state: State, deadline: int) -> int:
    """When a lease deadline falls due in committed time: steps made up to and at it lie before it (T3)."""
    return deadline + sum(by for at, by in state.steps if at <= deadline)


def shown_deadline(state: State, deadline: int) -> int:
    """A deadline as replies tell it: committed time, as if no more steps came."""
    return deadline + sum(by for _, by in state.steps)
