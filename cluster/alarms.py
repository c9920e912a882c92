"""Many times at which something is to be done, the earliest first. Pure."""

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Alarms(Generic[K]):
    """The earliest of many times, each of which may be moved or taken away."""

    def __init__(self) -> None:
        self._at: dict[K, int] = {}
        self._heap: list[tuple[int, int, K]] = []
        self._number = 0

    def set(self, key: K, at: int) -> None:
        if self._at.get(key) == at:
            return
        self._at[key] = at
        self._number += 1  # ties are not for the keys to break
        heapq.heappush(self._heap, (at, self._number, key))
        if len(self._heap) > 2 * len(self._at) + 64:  # long waits that were given up must not pile up
            self._heap = [(at, n, key) for n, (key, at) in enumerate(self._at.items())]
            self._number = len(self._heap)
            heapq.heapify(self._heap)

    def discard(self, key: K) -> None:
        self._at.pop(key, None)

    def next_at(self) -> int | None:
        while self._heap and self._at.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take(self, now: int) -> list[K]:
        """Take out those whose time has come, in order."""
        taken = []
        while (at := self.next_at()) is not None and at <= now:
            key = heapq.heappop(self._heap)[2]
            del self._at[key]
            taken.append(key)
        return taken
