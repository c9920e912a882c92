"""Messages one by one out of leases of several: which is handed out next, and when its lease is extended before that.

Pure: time comes as `now_s`. A message is handed out only while its lease surely holds it; both shells put their loop
around this.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from holdfast.client.leases import Held
from holdfast.client.message import Delivered
from holdfast.client.protocol.errors import BadValue
from holdfast.client.protocol.quick import dataclass
from holdfast.client.protocol.replies import Extended

T = TypeVar("T", bound=Delivered)

_FIELDS = [field.name for field in fields(Delivered)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a consumer asks for, again and again. Raises BadValue for what would ask without a pause."""

    queue: str
    group: str
    max_messages: int
    wait_ms: int
    visibility_timeout_ms: int | None
    until_empty: bool

    def __post_init__(self) -> None:
        if not self.wait_ms and not self.until_empty:
            raise BadValue(field="wait_ms", problem="is 0: that would ask for ever; wait, or stop at `until_empty`")


class Hand:
    """What is left of one lease. Whoever acks a message that is not handed out yet will not see it."""

    def __init__(self, held: Held, now_s: float) -> None:
        self._held = held
        self._left = deque(held.messages)
        self._deadline_ms = held.deadline_ms
        self._ends_s = now_s + held.term_ms / 1000
        self._extend_at_s = now_s + held.term_ms / 2000

    def is_due(self, now_s: float) -> bool:
        """Whether the lease is to be extended before another message is handed out: half of its time is over."""
        return bool(self._left) and now_s >= self._extend_at_s

    def extended(self, reply: Extended, now_s: float) -> None:
        """Clocks are never compared, only what they gained."""
        self._ends_s += (reply.deadline_ms - self._deadline_ms) / 1000
        self._deadline_ms = reply.deadline_ms
        self._extend_at_s = now_s + max(self._ends_s - now_s, 0.0) / 2

    def lost(self) -> None:
        """The lease is over: what is left is somebody else's."""
        self._left.clear()

    def take(self) -> Delivered | None:
        """The next message that is still held."""
        while self._left:
            message = self._left.popleft()
            if message.version in self._held.versions:
                return message
        return None

    def rest(self) -> list[int]:
        """The versions that were never handed out and are still held; they are left no more."""
        versions = [message.version for message in self._left if message.version in self._held.versions]
        self._left.clear()
        return versions


def received(kind: Callable[..., T], message: Delivered, lease: Any) -> T:
    """The same message, together with its lease."""
    values: dict[str, Any] = {name: getattr(message, name) for name in _FIELDS}
    return kind(**values, lease=lease)
