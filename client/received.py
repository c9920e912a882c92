"""A message as a handler gets it, and what a handler says by raising: shared by the shells of a worker."""

from collections.abc import AsyncGenerator, Coroutine, Generator
from dataclasses import dataclass as mutable
from dataclasses import field, fields
from datetime import datetime, timedelta
from typing import Any

from holdfast.client.message import Delivered
from holdfast.client.protocol.errors import BadValue, LeaseExpired
from holdfast.client.protocol.limits import ERROR_TEXT_BYTES
from holdfast.client.protocol.quick import dataclass
from holdfast.client.turns import ACK, SETTLED, Start, Verdict


class Reject(Exception):
    """Raised by a handler: this message will never succeed. It is dead at once, with this reason as its last error."""


class Retry(Exception):
    """Raised by a handler: not now. The message comes back after `delay`, or `at` a time with a time zone.

    `delay` is a timedelta or a number of seconds; without both, the group's backoff decides. It costs an attempt.
    """

    def __init__(self, delay: timedelta | float | None = None, *, at: datetime | None = None, reason: str = "") -> None:
        super().__init__(reason or "to be tried again")
        if delay is not None and at is not None:
            raise BadValue(field="delay", problem="and at exclude each other")
        if at is not None and at.tzinfo is None:
            raise BadValue(field="at", problem="has no time zone")
        seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
        self.delay_ms = None if seconds is None else max(round(seconds * 1000), 0)
        self.not_before_ms = None if at is None else max(round(at.timestamp() * 1000), 0)


@mutable(slots=True, eq=False)
class Fate:
    """What its worker and its handler tell each other about a message; single assignments, so threads may."""

    lost: bool = False
    settled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Received(Delivered):
    """A leased message. `lease_id` is a fencing token: it grows, and a later holder of the message has a larger one."""

    queue: str
    lease_id: int
    fate: Fate = field(repr=False)

    @property
    def lost(self) -> bool:
        """Whether the lease is over, or may be: somebody else may have the message now, and it will not be acked."""
        return self.fate.lost

    def check(self) -> None:
        """Raise LeaseExpired if it is lost: for handlers in threads, which nobody can stop."""
        if self.fate.lost:
            raise LeaseExpired(lease_id=self.lease_id)


def facts_of(start: Start, queue: str) -> dict[str, Any]:
    """What a `Received` is made of."""
    message = {each.name: getattr(start.message, each.name) for each in fields(Delivered)}
    return message | {"queue": queue, "lease_id": start.lease_id, "fate": Fate()}


def verdict_of(message: Received, result: object) -> Verdict:
    """What is to become of a message whose handler returned or raised this."""
    if message.fate.settled:
        return SETTLED
    match result:
        case Reject():
            return Verdict("nack", error=_text(str(result) or "rejected"), dead=True)
        case Retry(delay_ms=delay_ms, not_before_ms=not_before_ms):
            return Verdict("nack", delay_ms=delay_ms, not_before_ms=not_before_ms, error=_text(str(result)))
        case BaseException():
            return Verdict("nack", error=_text(f"{type(result).__name__}: {result}"))
        case Coroutine() | Generator() | AsyncGenerator():
            return Verdict("nack", error=f"the handler gave a {type(result).__name__}: nothing of it has run")
        case _:
            return ACK


def _text(text: str) -> str:
    """As the cluster takes it: any text that people may put into an exception."""
    return text.encode(errors="replace")[:ERROR_TEXT_BYTES].decode(errors="ignore")
