"""What time a leader stamps into its entries (T1, T2), and when time itself needs an entry.

Pure: clocks enter as numbers. `now_ms` is the leader's monotonic clock in whole milliseconds, `wall_ms` what a node's
wall clock shows. What is stamped follows the monotonic clock; the wall clocks of a majority only slow it down, or ask
for a `TimeStep`, which no lease notices. So one wrong wall clock decides nothing, whoever leads.

Order of a turn: `heard` for every wall clock, `applied` after every apply, and, before an entry is formed, `step_due`;
a TimeStep stands first in its entry, so that what came with it is judged by the right time.
"""

from collections.abc import Iterable

from holdfast.client.protocol.commands import TimeStep
from holdfast.client.protocol.limits import U63_MAX, Limits

STEP_OVER_MS = 500  # T2: behind by more than this is an outage, not the noise of late messages
TOUCH_EVERY_MS = 900  # T2 asks for a stamp every second; the rest is for forming and committing it
STEP_MAX_MS = U63_MAX >> 8  # what a TimeStep may carry
_PARTS = 10  # time is kept in tenths of a millisecond, so that nine tenths of any time is a whole number of them


class Timekeeper:
    """One leader's clock. `begin` starts it in each term; between terms nobody asks it."""

    def __init__(self) -> None:
        self._term = 0
        self._voters: frozenset[str] = frozenset()
        self._walls: dict[str, tuple[int, int]] = {}  # node -> its wall clock, when by ours
        self._tenths = 0  # the time that a stamp of the moment `_at_ms` would have
        self._at_ms = 0
        self._latest_ms = 0  # of all stamps and of committed time: the next stamp is never below
        self._stamped_at_ms = 0
        self._advance_ms = Limits().stamp_advance_ms
        self._caught_up = False
        self._steps_ms = 0  # all steps that are in committed time
        self._stepping = False  # a step is on its way

    def begin(self, *, term: int, latest_ms: int, voters: Iterable[str], now_ms: int) -> None:
        """A leadership begins. `latest_ms`: the largest of all stamps in the log and the state's committed time."""
        self._term = term
        self._tenths = latest_ms * _PARTS
        self._at_ms = self._stamped_at_ms = now_ms
        self._latest_ms = latest_ms
        self._caught_up = self._stepping = False
        self.use_voters(voters)

    def use_voters(self, voters: Iterable[str]) -> None:
        """Whose wall clocks count from now on; what others show is forgotten."""
        self._voters = frozenset(voters)
        self._walls = {node: wall for node, wall in self._walls.items() if node in self._voters}

    def heard(self, node: str, wall_ms: int, at_ms: int) -> None:
        """What a voter's wall clock showed at `at_ms` by our monotonic clock; our own is one of them."""
        known = self._walls.get(node)
        if node in self._voters and (known is None or known[1] <= at_ms):
            self._walls[node] = (wall_ms, at_ms)

    def applied(self, *, term: int, time_ms: int, steps_ms: int, advance_ms: int, now_ms: int) -> None:
        """An entry of `term` is applied. Now committed time, the sum of its steps, and what a stamp may add are these.

        To be told of our own no-op too: only then is every step known that a former leader has left in the log.
        """
        self._pass(now_ms)
        self._advance_ms = advance_ms
        if self._caught_up and steps_ms > self._steps_ms:
            # Our own step: we go on from where we are and not from its stamp, or lease time would lose the way here.
            self._tenths += (steps_ms - self._steps_ms) * _PARTS
            self._stepping = False
        self._steps_ms = steps_ms
        self._caught_up = self._caught_up or term == self._term
        self._latest_ms = max(self._latest_ms, time_ms)
        self._tenths = max(self._tenths, time_ms * _PARTS)

    def ready(self, now_ms: int) -> bool:
        """Whether there is a time to stamp: a new cluster has none until a majority's wall clocks are known."""
        return self._latest_ms > 0 or self._majority(now_ms) is not None

    def stamp(self, now_ms: int) -> int:
        """The stamp of an entry that is formed now: never below an earlier one, never faster than the clock."""
        self._pass(now_ms)
        self._latest_ms = max(self._latest_ms, self._tenths // _PARTS)
        self._stamped_at_ms = now_ms
        return self._latest_ms

    def time_ms(self, now_ms: int) -> int:
        """What `stamp` would say, without an entry being formed."""
        self._pass(now_ms)
        return max(self._latest_ms, self._tenths // _PARTS)

    def step_due(self, now_ms: int) -> TimeStep | None:
        """The step that brings committed time to the majority's clocks; given once, until it is applied or refused."""
        # A step that a former leader left in our log may bring us there: until it is applied nobody knows, and a
        # second one would put committed time as far ahead as it was behind.
        majority = self._majority(now_ms)
        time_ms = self.time_ms(now_ms)
        if majority is None or not self._caught_up or self._stepping or not self._latest_ms:
            return None
        by_ms = min(majority[0] - time_ms, STEP_MAX_MS)
        if by_ms <= STEP_OVER_MS:
            return None
        self._stepping = True
        return TimeStep(by_ms=by_ms)

    def step_refused(self) -> None:
        """The step did not happen and will not: `step_due` may give another."""
        self._stepping = False

    def touch_due(self, now_ms: int, lease_open: bool) -> bool:
        """Whether an entry must be formed for the sake of its stamp: lease time moves while a leader is there."""
        return lease_open and now_ms >= self._stamped_at_ms + TOUCH_EVERY_MS

    def skew(self, now_ms: int) -> dict[str, int]:
        """How far each voter's wall clock, as last heard of, is ahead of committed time."""
        time_ms = self.time_ms(now_ms)
        return {node: wall_ms + now_ms - at_ms - time_ms for node, (wall_ms, at_ms) in sorted(self._walls.items())}

    def _pass(self, now_ms: int) -> None:
        """Let time pass up to now: as near to the majority's clocks as a pace of 90 to 100 % can come."""
        elapsed = max(now_ms - self._at_ms, 0)
        self._at_ms = max(now_ms, self._at_ms)
        majority = self._majority(now_ms)
        if not self._latest_ms:  # the first stamp of a cluster is taken from the wall, as the fold takes it
            self._tenths = majority[0] * _PARTS if majority is not None else 0
            return
        latest = self._tenths + elapsed * _PARTS
        if majority is not None:
            earliest = self._tenths + elapsed * (_PARTS - 1)
            latest = max(earliest, min(latest, majority[1] * _PARTS))
        # The fold clips a stamp that adds more than `advance_ms`, and the next one would then bring the rest: lease
        # time would leap over a lease that was granted in between. So the rest is left to a TimeStep.
        self._tenths = min(latest, (self._latest_ms + self._advance_ms) * _PARTS)

    def _majority(self, now_ms: int) -> tuple[int, int] | None:
        """The latest time that a majority's wall clocks have reached, and the earliest that a majority's are not above.

        With all clocks known and their number odd, both are the median. None while a majority has not been heard.
        """
        walls = sorted(wall_ms + now_ms - at_ms for wall_ms, at_ms in self._walls.values())
        quorum = len(self._voters) // 2 + 1
        if len(walls) < quorum:
            return None
        return walls[-quorum], walls[quorum - 1]
