"""Clocks that run like the real ones and can be moved ahead: for tests of what takes hours (`holdfast.client.testing`).

Both clocks of a node move alike. Only its messages live by them; elections, heartbeats and its own housekeeping stay
with the real ones. A node with peers has none of this: it dates by the one clock what they show it of theirs (T2).
"""

from collections.abc import Callable
from threading import Lock

from holdfast.client.protocol.errors import BadValue

SLICE_MS = 1_800_000  # half of what one stamp may add (T1): with a stamp for each slice every lease sees all of it


class Passing:
    """For any thread; only `forward` and what stands still change what it shows."""

    def __init__(self, clock: Callable[[], float], wall_ms: Callable[[], int]) -> None:
        self._clock, self._wall_ms = clock, wall_ms
        self._lock = Lock()
        self._ahead_ms = 0
        self._stood_at: tuple[float, int] | None = None  # what the real clocks showed when it was stopped

    def now_s(self) -> float:
        """The monotonic clock."""
        with self._lock:
            real_s = self._stood_at[0] if self._stood_at is not None else self._clock()
            return real_s + self._ahead_ms / 1_000

    def wall_ms(self) -> int:
        with self._lock:
            real_ms = self._stood_at[1] if self._stood_at is not None else self._wall_ms()
            return real_ms + self._ahead_ms

    def forward(self, by_ms: int) -> None:
        """Time never goes back, not even here."""
        if by_ms < 0:
            raise BadValue(field="seconds", problem="is below 0; time never goes back")
        with self._lock:
            self._ahead_ms += by_ms

    def stop(self) -> None:
        """Stand still, but for `forward`."""
        with self._lock:
            if self._stood_at is None:
                self._stood_at = (self._clock(), self._wall_ms())

    def go(self) -> None:
        """Run on from where it stands: what passed meanwhile has not passed here."""
        with self._lock:
            if self._stood_at is not None:
                stood_s, self._stood_at = self._stood_at[0], None
                self._ahead_ms -= int((self._clock() - stood_s) * 1_000)
