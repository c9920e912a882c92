"""Simulated time: what happens next, and what each node believes the time to be."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

START_S = 1_000.0
START_WALL_MS = 1_700_000_000_000


@dataclass(slots=True)
class DriftingClock:
    """A node's monotonic clock: it never goes back, but runs fast or slow."""

    scheduler: "Scheduler"
    rate: float

    def __call__(self) -> float:
        return START_S + (self.scheduler.now_s - START_S) * self.rate


class Scheduler:
    """A heap of events. Two at the same moment happen in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now_s = START_S
        self.running: Callable[[], float] = lambda: self.now_s  # the clock of the node whose code runs
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._count = 0

    @property
    def wall_ms(self) -> int:
        """What a wall clock shows that nobody has set wrong."""
        return START_WALL_MS + int((self.now_s - START_S) * 1_000)

    def after(self, delay_s: float, action: Callable[[], object]) -> None:
        self.at(self.now_s + delay_s, action)

    def at(self, when_s: float, action: Callable[[], object]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (when_s, self._count, action))

    def run(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self._heap and self._heap[0][0] <= end_s:
            self.now_s, _, action = heapq.heappop(self._heap)
            action()
        self.now_s = end_s
