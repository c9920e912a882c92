"""How many bytes connections hold in memory, all together, and who goes when that is too much. No I/O."""

from collections.abc import Hashable
from typing import Generic, TypeVar

Holder = TypeVar("Holder", bound=Hashable)


class Holdings(Generic[Holder]):
    """Of one kind of bytes. A bound for each holder alone would be multiplied by as many holders as there may be."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.total_bytes = 0
        self._held: dict[Holder, int] = {}  # in the order in which they began to hold, or last moved

    def hold(self, holder: Holder, size_bytes: int) -> Holder | None:
        """So much it holds now. Gives who must go, if all together hold too much: who has stood still the longest."""
        self.total_bytes += size_bytes - self._held.get(holder, 0)
        if size_bytes:
            self._held[holder] = size_bytes
        else:
            self._held.pop(holder, None)
        return next(iter(self._held)) if self.total_bytes > self.limit_bytes else None

    def moved(self, holder: Holder) -> None:
        """Something of what it held has gone: others have stood still for longer now."""
        if holder in self._held:
            self._held[holder] = self._held.pop(holder)
