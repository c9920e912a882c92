"""Who goes when connections together hold too much."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.cluster.holdings import Holdings


def test_within_the_bound_nobody_goes() -> None:
    holdings = Holdings[str](10)
    assert holdings.hold("a", 4) is holdings.hold("b", 6) is None
    assert holdings.total_bytes == 10


def test_above_it_goes_who_began_to_hold_first() -> None:
    holdings = Holdings[str](10)
    holdings.hold("a", 4)
    holdings.hold("b", 6)
    assert holdings.hold("c", 1) == "a"
    assert holdings.hold("a", 0) is None
    assert holdings.total_bytes == 7


def test_who_moves_something_has_not_stood_still() -> None:
    holdings = Holdings[str](10)
    holdings.hold("a", 4)
    holdings.hold("b", 6)
    holdings.moved("a")
    holdings.moved("unknown")
    assert holdings.hold("a", 5) == "b"


def test_more_of_the_same_is_no_movement() -> None:
    holdings = Holdings[str](10)
    holdings.hold("a", 4)
    holdings.hold("b", 4)
    assert holdings.hold("a", 7) == "a"


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20))))
def test_the_total_is_the_sum_and_ends_within_the_bound(steps: list[tuple[int, int]]) -> None:
    holdings = Holdings[int](30)
    held: dict[int, int] = {}
    for holder, size_bytes in steps:
        held[holder] = size_bytes
        goes = holdings.hold(holder, size_bytes)
        while goes is not None:
            held[goes] = 0
            goes = holdings.hold(goes, 0)
        assert holdings.total_bytes == sum(held.values()) <= 30
