"""Digests of replicas: the minority stops, without a majority nobody serves, silence is no difference."""

import pytest

from holdfast.cluster.comparing import EVERY, KEPT, Comparing, StateDiverged, Undecided

VOTERS = ("a", "b", "c")


def comparing(**told: bytes) -> Comparing:
    found = Comparing("a")
    for node, digest in told.items():
        found.tell(node, EVERY, digest)
    return found


def test_equal_digests_and_silence_are_no_difference() -> None:
    assert comparing().verdict(VOTERS) is None
    assert comparing(a=b"1").verdict(VOTERS) is None
    assert comparing(a=b"1", b=b"1", c=b"1").verdict(VOTERS) is None


def test_the_one_that_differs_from_the_majority_stops() -> None:
    verdict = comparing(a=b"2", b=b"1", c=b"1").verdict(VOTERS)
    assert verdict == StateDiverged(index=EVERY, others="b, c")


def test_the_majority_goes_on() -> None:
    assert comparing(a=b"1", b=b"2", c=b"1").verdict(VOTERS) is None


@pytest.mark.parametrize("told", [{"a": b"1", "b": b"2"}, {"b": b"1", "c": b"2"}, {"a": b"1", "b": b"2", "c": b"3"}])
def test_without_a_majority_nobody_serves(told: dict[str, bytes]) -> None:
    assert comparing(**told).verdict(VOTERS) == Undecided(EVERY, tuple(told))


def test_the_third_digest_decides() -> None:
    found = comparing(a=b"1", b=b"2")
    found.tell("c", EVERY, b"1")
    assert found.verdict(VOTERS) is None


def test_a_newer_place_where_a_majority_is_known_ends_the_doubt() -> None:
    found = comparing(a=b"1", b=b"2")
    found.tell("b", 2 * EVERY, b"4")
    found.tell("c", 2 * EVERY, b"3")
    assert isinstance(found.verdict(VOTERS), Undecided)
    found.tell("a", 2 * EVERY, b"3")
    assert found.verdict(VOTERS) is None


def test_who_does_not_vote_decides_nothing_and_stops_if_it_differs() -> None:
    assert comparing(b=b"1", c=b"1", d=b"2").verdict(VOTERS) is None
    learner = Comparing("d")
    for node, digest in (("d", b"2"), ("a", b"1"), ("b", b"1")):
        learner.tell(node, EVERY, digest)
    assert isinstance(learner.verdict(VOTERS), StateDiverged)


def test_the_state_that_came_by_snapshot_is_not_judged_by_what_the_former_one_was() -> None:
    found = comparing(a=b"2", b=b"1", c=b"1")
    found.forget()
    assert found.verdict(VOTERS) is None


def test_only_places_of_comparison_count_and_old_ones_are_forgotten() -> None:
    found = Comparing("a")
    found.tell("a", EVERY + 1, b"1")
    found.tell("b", EVERY + 1, b"2")
    assert found.verdict(VOTERS) is None
    found.tell("a", EVERY, b"1")
    found.tell("b", EVERY, b"2")
    for place in range(2, KEPT + 2):
        found.tell("a", place * EVERY, b"1")
    assert found.verdict(VOTERS) is None


def test_the_next_place_is_above_the_index() -> None:
    assert [Comparing.next_place(index) for index in (0, 1, EVERY - 1, EVERY)] == [EVERY, EVERY, EVERY, 2 * EVERY]
