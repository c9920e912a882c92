"""When to stand for election and whom to believe: timeouts, pre-votes, votes counted once. Pure.

The library runs the election itself; this decides whether it may begin. A node asks first whether it would win
(pre-vote), so that one who was away does not depose a leader that everybody else hears (R12).
"""

from collections.abc import Collection
from dataclasses import dataclass
from random import Random

from holdfast.cluster.messages import PreVote


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Election times are at least three heartbeats and ten times a slow fsync; scale them up on slow disks."""

    heartbeat_s: float = 0.05
    election_min_s: float = 0.25
    election_max_s: float = 0.5
    quick_s: float = 0.03  # a round after the leader's connection closed: it is dead, not slow


class Elections:
    """What one node knows about leaders and votes between two elections."""

    def __init__(self, timing: Timing, rng: Random) -> None:
        self._timing = timing
        self._rng = rng
        self._heard_s = float("-inf")
        self._leader_gone = False  # its connection closed, and no leader was heard since
        self._round = 0
        self._granted: set[str] = set()
        self._counted: set[tuple[int, str]] = set()

    def timeout_s(self) -> float:
        if self._leader_gone:
            return self._timing.quick_s * (1 + 2 * self._rng.random())
        low, high = self._timing.election_min_s, self._timing.election_max_s
        return low + (high - low) * self._rng.random()

    def heard_leader(self, now_s: float) -> None:
        self._heard_s = now_s
        self._leader_gone = False

    def leader_gone(self) -> float:
        """The leader's connection closed; how long to wait before the first round."""
        self._leader_gone = True
        return self._timing.quick_s * self._rng.random()

    # Pre-votes

    def begin_round(self, me: str) -> int:
        self._round += 1
        self._granted = {me}
        return self._round

    def collect(self, round_: int, voter: str) -> None:
        if round_ == self._round:
            self._granted.add(voter)

    def won(self, voters: Collection[str]) -> bool:
        """Whether a majority would vote for us; says so once a round."""
        if 2 * len(self._granted.intersection(voters)) <= len(voters):
            return False
        self._granted = set()
        return True

    def grants(
        self, asked: PreVote, asker: str, *, term: int, last: tuple[int, int], leader: str | None, now_s: float
    ) -> bool:
        """Whether a node that does not lead would vote; `last` is the term and index of its last entry."""
        # Somebody who hears the leader keeps it, unless the leader itself asks or is known to be gone.
        if (
            now_s - self._heard_s < self._timing.election_min_s
            and not self._leader_gone
            and leader not in (None, asker)
        ):
            return False
        return asked.term > term and (asked.last_term, asked.last_index) >= last

    # Votes

    def counts_now(self, term: int, voter: str, voters: Collection[str]) -> bool:
        """Whether the library may count this vote: it counts without looking who votes, and how often (R7)."""
        if (term, voter) in self._counted:
            return False
        self._counted.add((term, voter))
        return voter in voters

    def forget_votes(self) -> None:
        """A new candidacy: earlier terms cannot be counted any more."""
        self._counted.clear()
