"""Rule T2: what time a leader stamps, however the clocks around it behave."""

from collections.abc import Iterable
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from holdfast.client.protocol.commands import TimeStep
from holdfast.client.protocol.limits import Limits
from holdfast.cluster.timekeeper import STEP_MAX_MS, STEP_OVER_MS, TOUCH_EVERY_MS, Timekeeper

START_MS = 1_700_000_000_000
HOUR_MS = 3_600_000
ADVANCE_MS = Limits().stamp_advance_ms
THREE = ("a", "b", "c")


class Leader:
    """A timekeeper with its clocks: one monotonic, and a wall clock for each voter as an offset to it."""

    def __init__(self, latest_ms: int = START_MS, voters: Iterable[str] = THREE, term: int = 3) -> None:
        self.now_ms = 5_000_000
        self.term = term
        self.walls = {node: START_MS - self.now_ms for node in voters}
        self.keeper = Timekeeper()
        self.keeper.begin(term=term, latest_ms=latest_ms, voters=voters, now_ms=self.now_ms)
        self.committed_ms, self.steps_ms = latest_ms, 0
        self.hear()

    def hear(self, *silent: str) -> None:
        for node, offset in self.walls.items():
            if node not in silent:
                self.keeper.heard(node, self.now_ms + offset, self.now_ms)

    def pass_ms(self, milliseconds: int) -> None:
        self.now_ms += milliseconds
        self.hear()

    def stamp(self) -> int:
        return self.keeper.stamp(self.now_ms)

    def step_due(self) -> TimeStep | None:
        return self.keeper.step_due(self.now_ms)

    def apply(self, stamp_ms: int, step_ms: int = 0, *, term: int | None = None) -> None:
        """Commit an entry as the fold does: never back, clipped, then the step."""
        if stamp_ms > self.committed_ms:
            clipped = min(stamp_ms, self.committed_ms + ADVANCE_MS) if self.committed_ms else stamp_ms
            self.committed_ms = clipped
        self.committed_ms += step_ms
        self.steps_ms += step_ms
        applied(self.keeper, term or self.term, self.committed_ms, self.now_ms, self.steps_ms)

    def commit(self) -> int:
        """Form and apply one entry, with the step that is due in front; gives the step."""
        step = self.step_due()
        by_ms = step.by_ms if step is not None else 0
        self.apply(self.stamp(), by_ms)
        return by_ms


def applied(keeper: Timekeeper, term: int, time_ms: int, now_ms: int, steps_ms: int = 0) -> None:
    keeper.applied(term=term, time_ms=time_ms, steps_ms=steps_ms, advance_ms=ADVANCE_MS, now_ms=now_ms)


def leader(latest_ms: int = START_MS) -> Leader:
    """One that has applied its own first entry, so that it may step."""
    made = Leader(latest_ms)
    made.apply(made.committed_ms)
    return made


# Following the monotonic clock


def test_stamps_advance_with_the_monotonic_clock() -> None:
    """T2."""
    clock = leader()
    stamps = []
    for milliseconds in (0, 1, 7, 60_000):
        clock.pass_ms(milliseconds)
        stamps.append(clock.stamp() - START_MS)
    assert stamps == [0, 1, 8, 60_008]


def test_new_leader_starts_from_the_largest_stamp_and_not_from_its_wall_clock() -> None:
    """T2: also where all wall clocks are an hour behind it."""
    clock = leader(latest_ms=START_MS + HOUR_MS)
    assert clock.stamp() == START_MS + HOUR_MS
    clock.keeper.begin(term=4, latest_ms=START_MS + 2 * HOUR_MS, voters=THREE, now_ms=clock.now_ms)
    assert clock.stamp() == START_MS + 2 * HOUR_MS


def test_stamps_stand_still_when_the_clock_does() -> None:
    clock = leader()
    assert [clock.stamp() for _ in range(3)] == [START_MS] * 3


def test_first_stamp_of_a_cluster_is_what_a_majority_shows() -> None:
    """T1: the fold takes it as it is."""
    clock = Leader(latest_ms=0)
    clock.walls["b"] += 24 * HOUR_MS
    clock.pass_ms(1_000)
    assert clock.keeper.ready(clock.now_ms)
    assert clock.stamp() == START_MS + 1_000


def test_new_cluster_has_no_time_until_a_majority_was_heard() -> None:
    """T2: one wall clock alone must not set the time for all."""
    keeper = Timekeeper()
    keeper.begin(term=1, latest_ms=0, voters=THREE, now_ms=10)
    keeper.heard("a", START_MS, 10)
    assert not keeper.ready(10)
    keeper.heard("b", START_MS + 4, 12)
    assert keeper.ready(12)
    assert keeper.stamp(12) == START_MS + 2


def test_single_node_is_its_own_majority() -> None:
    """T2."""
    clock = Leader(latest_ms=0, voters="a")
    assert clock.keeper.ready(clock.now_ms)
    assert clock.stamp() == START_MS


# Ahead of the wall clocks


def test_time_ahead_of_the_majority_advances_ten_percent_slower_until_they_meet() -> None:
    """T2."""
    clock = leader(latest_ms=START_MS + 1_000)
    for _ in range(100):
        clock.pass_ms(1)
        clock.stamp()
    assert clock.stamp() == START_MS + 1_000 + 90
    clock.pass_ms(9_900)
    assert clock.stamp() == START_MS + 10_000
    clock.pass_ms(500)
    assert clock.stamp() == START_MS + 10_500


def test_slowing_does_not_go_on_below_the_wall_clocks_in_a_long_silence() -> None:
    """T2: a little ahead at the beginning of an hour is not six minutes behind at its end."""
    clock = leader(latest_ms=START_MS + 5)
    clock.pass_ms(HOUR_MS)
    assert clock.stamp() == START_MS + HOUR_MS
    assert clock.step_due() is None


# Behind the wall clocks


def test_behind_by_five_hundred_is_left_alone_and_by_more_is_one_step() -> None:
    """T2."""
    clock = leader(latest_ms=START_MS - STEP_OVER_MS)
    assert clock.step_due() is None
    clock = leader(latest_ms=START_MS - STEP_OVER_MS - 1)
    assert clock.step_due() == TimeStep(by_ms=STEP_OVER_MS + 1)


def test_after_two_hours_down_one_step_catches_up() -> None:
    """T2: and stamps then follow the monotonic clock from there."""
    clock = leader(latest_ms=START_MS - 2 * HOUR_MS)
    assert clock.commit() == 2 * HOUR_MS
    assert clock.committed_ms == START_MS
    clock.pass_ms(10)
    assert clock.stamp() == START_MS + 10
    assert clock.step_due() is None


def test_step_is_given_once_until_it_is_applied() -> None:
    """T2: and what passes until then is not lost to lease time."""
    clock = leader(latest_ms=START_MS - HOUR_MS)
    formed = clock.stamp()
    assert clock.step_due() == TimeStep(by_ms=HOUR_MS)
    clock.pass_ms(400)
    assert clock.step_due() is None
    assert clock.stamp() == formed + 400
    clock.apply(formed, HOUR_MS)
    assert clock.stamp() == formed + HOUR_MS + 400
    assert clock.step_due() is None


def test_refused_step_is_given_again() -> None:
    """T2."""
    clock = leader(latest_ms=START_MS - HOUR_MS)
    assert clock.step_due() is not None
    clock.pass_ms(100)
    clock.keeper.step_refused()
    assert clock.step_due() == TimeStep(by_ms=HOUR_MS)


def test_step_that_waits_long_to_be_applied_is_not_taken_for_done() -> None:
    """T2: other entries bring committed time as far meanwhile; counted as a step it would expire leases."""
    clock = leader(latest_ms=START_MS - 600)
    assert clock.step_due() == TimeStep(by_ms=600)
    clock.pass_ms(700)
    clock.apply(clock.stamp())
    assert clock.stamp() == START_MS - 600 + 700
    assert clock.step_due() is None


def test_no_step_before_all_that_a_former_leader_left_is_applied() -> None:
    """T2.

    1. A leader comes back after an hour's outage, logs a TimeStep, and dies before anybody applies it.
    2. The next leader has that entry in its log; its state is an hour behind.
    A second step now would put committed time an hour ahead.
    """
    clock = Leader(latest_ms=START_MS - HOUR_MS)
    assert clock.step_due() is None
    clock.apply(START_MS - HOUR_MS, HOUR_MS, term=2)
    assert clock.step_due() is None
    clock.apply(START_MS - HOUR_MS)  # our own no-op
    assert clock.step_due() is None
    assert clock.stamp() == START_MS


def test_step_that_was_on_its_way_is_forgotten_with_its_term() -> None:
    """T2."""
    clock = leader(latest_ms=START_MS - HOUR_MS)
    assert clock.step_due() is not None
    clock.keeper.begin(term=9, latest_ms=START_MS - HOUR_MS, voters=THREE, now_ms=clock.now_ms)
    clock.apply(START_MS - HOUR_MS, term=9)
    assert clock.step_due() == TimeStep(by_ms=HOUR_MS)


def test_step_fits_the_command_that_carries_it() -> None:
    clock = leader()
    clock.walls = dict.fromkeys(THREE, 2**62)
    clock.pass_ms(1)
    assert clock.step_due() == TimeStep(by_ms=STEP_MAX_MS)


def test_stamp_after_a_long_idle_time_adds_at_most_what_the_fold_takes() -> None:
    """T1, T2.

    1. Nothing is committed for three hours. A stamp three hours later would be clipped to one.
    2. A lease is granted at that time. The next stamp would be clipped two hours later, and the lease be over.
    So stamps go on from where the fold is, and a step, which leases do not see, brings the rest.
    """
    clock = leader()
    clock.pass_ms(3 * HOUR_MS)
    first = clock.stamp()
    assert first == START_MS + ADVANCE_MS
    clock.pass_ms(20)
    assert clock.stamp() == first + 20
    clock.apply(first)
    assert clock.commit() == 2 * HOUR_MS
    assert clock.committed_ms == START_MS + 3 * HOUR_MS + 20


# Wall clocks that are wrong


def test_wall_clock_that_jumps_an_hour_on_one_node_changes_no_stamp() -> None:
    """T2: forward or back, on the leader or on another."""
    for node in THREE:
        for jump in (HOUR_MS, -HOUR_MS):
            clock = leader()
            clock.walls[node] += jump
            for _ in range(20):
                clock.pass_ms(500)
                assert clock.commit() == 0
            assert clock.committed_ms == START_MS + 10_000


def test_wall_clock_that_jumps_while_another_node_is_down_changes_no_stamp() -> None:
    """T2: two of three are a majority only where they agree."""
    for jump in (HOUR_MS, -HOUR_MS):
        keeper = Timekeeper()
        keeper.begin(term=1, latest_ms=START_MS, voters=THREE, now_ms=0)
        applied(keeper, 1, START_MS, 0)
        for now_ms in (0, 1_000, 2_000):
            keeper.heard("a", START_MS + now_ms, now_ms)
            keeper.heard("b", START_MS + now_ms + jump, now_ms)
            assert keeper.step_due(now_ms) is None
            assert keeper.stamp(now_ms) == START_MS + now_ms


def test_what_two_of_three_clocks_say_is_the_time() -> None:
    """T2: the majority's clocks, right or wrong."""
    clock = leader()
    for node in "bc":
        clock.walls[node] += HOUR_MS
    clock.pass_ms(0)
    assert clock.step_due() == TimeStep(by_ms=HOUR_MS)
    clock = leader()
    for node in "bc":
        clock.walls[node] -= HOUR_MS
    clock.pass_ms(1_000)
    assert clock.stamp() == START_MS + 900


def test_minority_of_known_clocks_neither_slows_nor_steps() -> None:
    """T2."""
    keeper = Timekeeper()
    keeper.begin(term=1, latest_ms=START_MS, voters=THREE, now_ms=0)
    applied(keeper, 1, START_MS, 0)
    keeper.heard("a", START_MS + HOUR_MS, 0)
    assert keeper.step_due(0) is None
    keeper.heard("a", START_MS - HOUR_MS, 1)
    assert keeper.stamp(1_000) == START_MS + 1_000


def test_clock_of_a_silent_node_is_taken_to_run_on() -> None:
    """T2: what was heard long ago still says how its clock stood to ours."""
    clock = leader()
    clock.now_ms += HOUR_MS // 2
    clock.hear("b", "c")
    assert clock.keeper.skew(clock.now_ms) == {"a": 0, "b": 0, "c": 0}


def test_late_report_of_a_clock_does_not_replace_a_newer_one() -> None:
    keeper = Timekeeper()
    keeper.begin(term=1, latest_ms=START_MS, voters="a", now_ms=0)
    keeper.heard("a", START_MS + 7, 10)
    keeper.heard("a", START_MS - 90, 5)
    assert keeper.skew(10) == {"a": START_MS + 7 - keeper.time_ms(10)}


def test_only_voters_count() -> None:
    """T2: not a learner, nor one that was removed."""
    clock = leader()
    clock.keeper.heard("learner", START_MS + HOUR_MS, clock.now_ms)
    assert set(clock.keeper.skew(clock.now_ms)) == set(THREE)
    clock.keeper.use_voters("ab")
    assert set(clock.keeper.skew(clock.now_ms)) == {"a", "b"}


def test_skew_says_how_far_each_wall_clock_is_ahead_of_committed_time() -> None:
    clock = leader()
    clock.walls["b"] += 250
    clock.walls["c"] -= HOUR_MS
    clock.pass_ms(40)
    assert clock.keeper.skew(clock.now_ms) == {"a": 0, "b": 250, "c": -HOUR_MS}


# A stamp every second


def test_open_lease_asks_for_a_stamp_at_least_every_second() -> None:
    """T2: and any entry is one."""
    clock = leader()
    clock.stamp()
    assert TOUCH_EVERY_MS <= 1_000
    clock.pass_ms(TOUCH_EVERY_MS - 1)
    assert not clock.keeper.touch_due(clock.now_ms, lease_open=True)
    clock.pass_ms(1)
    assert clock.keeper.touch_due(clock.now_ms, lease_open=True)
    clock.stamp()
    assert not clock.keeper.touch_due(clock.now_ms, lease_open=True)


def test_without_an_open_lease_no_stamp_is_asked_for() -> None:
    """T2: an idle cluster writes nothing."""
    clock = leader()
    clock.pass_ms(HOUR_MS)
    assert not clock.keeper.touch_due(clock.now_ms, lease_open=False)


# Whatever the clocks do

MOVES = st.lists(
    st.tuples(
        st.integers(0, 5_000) | st.integers(0, 3 * HOUR_MS),  # time that passes
        st.none() | st.tuples(st.sampled_from(THREE), st.integers(-HOUR_MS, HOUR_MS)),  # a wall clock is set
        st.booleans(),  # whether an entry is formed and applied then
        st.integers(0, 9).map(lambda n: n == 0),  # whether another term begins
    ),
    max_size=40,
)


@given(MOVES, st.integers(-HOUR_MS, HOUR_MS))
def test_stamps_never_go_back_nor_outrun_the_clock_but_by_a_step(moves: list[tuple], ahead_ms: int) -> None:  # type: ignore[type-arg]
    """T1, T2: and no stamp is above what the fold takes."""
    clock = leader(latest_ms=START_MS + ahead_ms)
    before, before_at_ms, steps = clock.stamp(), clock.now_ms, 0
    for passed_ms, jump, commits, elected in moves:
        if jump is not None:
            clock.walls[jump[0]] += jump[1]
        clock.pass_ms(passed_ms)
        if elected:
            clock.term += 1
            latest_ms = max(before, clock.committed_ms)
            clock.keeper.begin(term=clock.term, latest_ms=latest_ms, voters=THREE, now_ms=clock.now_ms)
        if commits:
            steps = clock.commit()
        after = clock.stamp()
        assert isinstance(after, int)
        assert 0 <= after - before <= clock.now_ms - before_at_ms + steps
        assert after <= max(before, clock.committed_ms) + ADVANCE_MS
        before, before_at_ms, steps = after, clock.now_ms, 0


@given(MOVES)
def test_slowing_is_bounded_by_ten_percent(moves: list[tuple]) -> None:  # type: ignore[type-arg]
    """T2: over any time in a term, as long as entries are formed within what a stamp may add."""
    clock = leader()
    began_ms, first = clock.now_ms, clock.stamp()
    for passed_ms, jump, _, _ in moves:
        if jump is not None:
            clock.walls[jump[0]] += jump[1]
        clock.pass_ms(min(passed_ms, ADVANCE_MS))
        elapsed_ms = clock.now_ms - began_ms
        assert elapsed_ms * 9 // 10 <= clock.stamp() - first <= elapsed_ms


@given(MOVES)
def test_steps_come_only_when_a_majority_is_ahead_by_more_than_the_noise(moves: list[tuple]) -> None:  # type: ignore[type-arg]
    """T2: and bring committed time exactly there."""
    clock = leader()
    for passed_ms, jump, _, _ in moves:
        if jump is not None:
            clock.walls[jump[0]] += jump[1]
        clock.pass_ms(passed_ms)
        median = sorted(clock.walls.values())[1] + clock.now_ms
        behind_ms = median - clock.keeper.time_ms(clock.now_ms)
        by_ms = clock.commit()
        assert by_ms == (behind_ms if behind_ms > STEP_OVER_MS else 0)
        if by_ms:
            assert clock.committed_ms == median


@given(
    st.lists(st.tuples(st.integers(0, 60_000), st.integers(-2 * HOUR_MS, 2 * HOUR_MS)), max_size=30),
    st.sampled_from(THREE),
    st.integers(-2_000, 2_000),
)
def test_one_wandering_wall_clock_changes_nothing(moves: list[tuple[int, int]], wrong: str, ahead_ms: int) -> None:
    """T2: with the other two agreed, stamps and steps are those of a cluster without it."""
    sound, odd = leader(latest_ms=START_MS + ahead_ms), leader(latest_ms=START_MS + ahead_ms)
    for passed_ms, jump in moves:
        odd.walls[wrong] += jump
        sound.pass_ms(passed_ms)
        odd.pass_ms(passed_ms)
        assert sound.commit() == odd.commit()
        assert sound.committed_ms == odd.committed_ms


@given(st.integers(STEP_OVER_MS + 1, 30 * 24 * HOUR_MS), st.lists(st.integers(0, 500), min_size=2, max_size=10))
def test_after_an_outage_exactly_one_step_catches_up(down_ms: int, pauses: list[int]) -> None:
    """T2: however long it was, and whatever is formed while the step is on its way."""
    clock = leader(latest_ms=START_MS - down_ms)
    step = clock.step_due()
    assert step is not None
    formed = [clock.stamp()]
    for pause_ms in pauses:
        clock.pass_ms(pause_ms)
        formed.append(clock.stamp())
        assert clock.step_due() is None
    clock.apply(formed[0], step.by_ms)
    for stamp in formed[1:]:
        clock.apply(stamp)
    assert clock.step_due() is None
    assert clock.stamp() == START_MS + sum(pauses)
    assert all(earlier <= later for earlier, later in pairwise(formed))
