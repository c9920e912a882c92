"""What must hold whatever fails, checked as it happens; it knows every node and believes none.

Every entry applied at an index is the same on all nodes, in term and bytes; what was acknowledged stays; a term has one
leader; a read sees everything that was acknowledged before it began. That nothing committed is truncated, the journal
itself refuses.
"""

from collections import Counter
from dataclasses import dataclass, field


class Violation(Exception):
    """A promise was broken; the seed repeats it."""


@dataclass
class Checker:
    """The checks of one log."""

    chosen: dict[int, tuple[int, bytes]] = field(default_factory=dict)  # index -> term, command
    digests: dict[int, bytes] = field(default_factory=dict)  # index -> digest of the state after it
    acknowledged: dict[int, int] = field(default_factory=dict)  # index -> term
    newest_acknowledged: int = 0
    leaders: dict[int, str] = field(default_factory=dict)  # term -> name
    counts: Counter[str] = field(default_factory=Counter)

    def applied(self, node: str, index: int, term: int, command: bytes, digest: bytes) -> None:
        chosen = self.chosen.setdefault(index, (term, command))
        if chosen != (term, command):
            raise Violation(f"{node} applied {term, command[:20]} at {index}, others {chosen[0], chosen[1][:20]}")
        self.same_state(node, index, digest)

    def same_state(self, node: str, index: int, digest: bytes) -> None:
        """Also for a snapshot that was installed: its whole history is in the digest."""
        if self.digests.setdefault(index, digest) != digest:
            raise Violation(f"the state of {node} at {index} differs from that of others")

    def acknowledge(self, index: int, term: int) -> None:
        self.acknowledged[index] = term
        self.newest_acknowledged = max(self.newest_acknowledged, index)
        self.counts["acknowledged"] += 1

    def elected(self, node: str, term: int) -> None:
        self.counts["elections"] += 1
        if self.leaders.setdefault(term, node) != node:
            raise Violation(f"{node} and {self.leaders[term]} both lead in term {term}")

    def read(self, node: str, index: int, needed: int) -> None:
        self.counts["reads"] += 1
        if index < needed:
            raise Violation(f"{node} answered a read at {index}, but {needed} was acknowledged before it began")

    def nothing_lost(self) -> None:
        for index, term in self.acknowledged.items():
            if self.chosen.get(index, (0, b""))[0] != term:
                raise Violation(f"entry {index} of term {term} was acknowledged and is gone")
