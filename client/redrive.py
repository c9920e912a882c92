"""A redrive as steps (D4): what to ask for next, how long to wait before it, and what has come of it so far.

Each step is one request that names what it brings back, so that stopping between two of them loses and doubles nothing;
asking for the same again goes on where it stopped. Decides, touches nothing: a shell takes the steps and the pauses.
"""

from collections.abc import Iterable

from holdfast.client.calls import Names, Redriven, Steps, dead_page, expect
from holdfast.client.protocol import commands as c
from holdfast.client.protocol import queries as q
from holdfast.client.protocol import replies as r
from holdfast.client.protocol.errors import BadValue

STEP_MESSAGES = 1_000  # a short command, and a short way back for a rate or a Ctrl-C
STEPS_PER_S = 4  # with a rate: often enough to be even, seldom enough that a request each does not matter


class Pace:
    """So many messages a second, and no burst to make up for a pause."""

    def __init__(self, rate: float | None) -> None:
        if rate is not None and not 0 < rate < float("inf"):
            raise BadValue(field="rate", problem=f"is {rate}; give messages per second, above 0")
        self._rate = rate
        self._next_s = float("-inf")

    @property
    def messages(self) -> int:
        """How many one step may have."""
        return STEP_MESSAGES if self._rate is None else max(1, min(STEP_MESSAGES, int(self._rate / STEPS_PER_S)))

    def pause_s(self, now_s: float) -> float:
        return max(self._next_s - now_s, 0.0)

    def took(self, count: int, now_s: float) -> None:
        if self._rate is not None:
            self._next_s = now_s + count / self._rate


class Redrive:
    """Begin with `pause_s`, then `step`, until `done`; `total` is what has come of it so far."""

    def __init__(
        self, queue: str, group: str | None, where: str, *, dry_run: bool, rate: float | None, to_origin: bool
    ) -> None:
        self.total = Redriven(0, 0)
        self.done = False
        self._queue, self._group, self._where = queue, group, where
        self._dry_run, self._to_origin = dry_run, to_origin
        self._pace = Pace(rate)
        self._token = b""  # behind the last parked death that was looked at
        self._from = 1  # the first moved version that was not looked at
        self._begun: tuple[int, int] | None = None  # the queue's last version and committed time then

    def pause_s(self, now_s: float) -> float:
        """How long to wait before the next step."""
        return self._pace.pause_s(now_s)

    def step(self, names: Names, now_s: float) -> Steps[Redriven]:
        """The next request, or a few; gives the total. What was refused is raised, and can be asked for again.

        What dies once more meanwhile is left for another time: else a poisonous message would go round for ever.
        """
        if self._begun is None:
            answer = yield q.DescribeQueue(name=self._queue)
            self._begun = expect(r.QueueDescribed, answer).tail_version, answer.place.time_ms
        step = self._step_to_origin if self._to_origin else self._step_here
        matched, redriven = yield from step(names, *self._begun)
        self._pace.took(redriven, now_s)
        self.total = Redriven(self.total.matched + matched, self.total.redriven + redriven)
        return self.total

    def _step_here(self, names: Names, tail: int, begun_ms: int) -> Steps[tuple[int, int]]:
        """Parked ones: the token names each death, so that none is done twice."""
        page = yield from dead_page(
            names, self._queue, self._group, self._where, self._pace.messages, self._token, count_only=self._dry_run
        )
        rows = [row for row in page.rows if row.died_ms <= begun_ms]
        count = 0
        for name in dict.fromkeys(row.group for row in rows):
            named = deaths_of([row for row in rows if row.group == name])
            answer = yield from names.asking(
                self._queue, lambda i, name=name, named=named: c.Redrive(queue_id=i, group=name, dead=named)
            )
            count += expect(r.Redriven, answer).count
        self._token = page.next_token
        self.done = not page.next_token
        return page.matched if self._dry_run else len(rows), count

    def _step_to_origin(self, names: Names, tail: int, begun_ms: int) -> Steps[tuple[int, int]]:
        """Moved ones, from their dead-letter queue; the group is that queue's."""
        group = self._group if self._group is not None else "default"
        found = expect(
            r.VersionsFound,
            (
                yield from names.asking(
                    self._queue,
                    lambda i: q.FindMoved(
                        queue_id=i,
                        group=group,
                        where=self._where,
                        from_version=self._from,
                        limit=self._pace.messages,
                    ),
                )
            ),
        )
        versions = [(first, min(last, tail)) for first, last in found.versions if first <= tail]
        matched = sum(last - first + 1 for first, last in versions)
        count = 0
        if versions and not self._dry_run:
            answer = yield from names.asking(
                self._queue, lambda i: c.RedriveToOrigin(queue_id=i, group=group, versions=tuple(versions))
            )
            count = expect(r.Redriven, answer).count
        if 0 < count < matched:
            # Others took some meanwhile, or an origin could not take one: there the step ended, and those behind it
            # were not tried. Looked for again from the same place, the latter raises, and what is gone is not found.
            return count, count
        next_version = found.next_version
        self.done = next_version is None or next_version > tail
        self._from = next_version if next_version is not None else tail + 1
        return matched, count


def deaths_of(rows: Iterable[r.DeadRow]) -> tuple[c.DeadRange, ...]:
    """Ranges of versions whose deaths are numbered alike; of a version that died twice, the last death."""
    ranges: list[c.DeadRange] = []
    for version, dead_seq in sorted({row.version: row.dead_seq for row in rows}.items()):
        if ranges:
            first, last, first_seq = ranges[-1]
            if version == last + 1 and dead_seq == first_seq + version - first:
                ranges[-1] = (first, version, first_seq)
                continue
        ranges.append((version, version, dead_seq))
    return tuple(ranges)
