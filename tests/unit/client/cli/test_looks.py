"""What `top` makes of two looks: rates, order, ages."""

import pytest

from holdfast.client.calls import Stats
from holdfast.client.cli.looks import GROUP_HEAD, Groups, Rates, _age, _rate, group_rows, in_order, oldest_age_ms, rates


def stats(**counters: int | None) -> Stats:
    names = ("produced", "ready", "delayed", "in_flight", "acked", "dead", "moved", "discarded", "cancelled", "purged")
    zero = dict.fromkeys((*names, "trimmed", "expired", "tail_version", "holes", "as_of_ms", "index"), 0)
    return Stats(**{**zero, "oldest_ms": None, **counters})  # type: ignore[arg-type]


Q = ("q", "default")


def test_a_rate_is_what_was_added_over_the_time_between() -> None:
    before = Groups(10.0, 0, {Q: stats(produced=100, acked=40)})
    now = Groups(12.0, 0, {Q: stats(produced=150, acked=40), ("new", "default"): stats(produced=7)})
    assert rates(before, now) == {Q: Rates(25.0, 0.0), ("new", "default"): Rates()}
    assert rates(None, now)[Q] == Rates()


def test_a_counter_that_went_down_belongs_to_another_group() -> None:
    before = Groups(1.0, 0, {Q: stats(produced=100, acked=100)})
    assert rates(before, Groups(2.0, 0, {Q: stats(produced=3, acked=0)})) == {Q: Rates()}
    assert rates(before, Groups(1.0, 0, {Q: stats(produced=100, acked=100)})) == {Q: Rates()}


def test_where_most_is_waiting_stands_first() -> None:
    seen = Groups(
        1.0,
        0,
        {
            ("b", "g"): stats(ready=1),
            ("a", "g"): stats(ready=1),
            ("c", "g"): stats(ready=1, delayed=2, in_flight=3),
            ("d", "g"): stats(dead=9),
        },
    )
    assert [place[0] for place, _ in in_order(seen)] == ["c", "a", "b", "d"]


def test_a_row_has_a_cell_for_each_head() -> None:
    seen = Groups(1.0, 0, {Q: stats(ready=3, oldest_ms=1_000, as_of_ms=62_000)})
    [row] = group_rows(None, seen)
    assert len(row) == len(GROUP_HEAD)
    assert row[-1] == "1m"


def test_a_message_grows_older_also_where_nothing_happens() -> None:
    idle = stats(ready=1, oldest_ms=1_000, as_of_ms=1_000)  # committed time moves with entries alone
    [row] = group_rows(None, Groups(1.0, 3_601_000, {Q: idle}))
    assert row[-1] == "1h"
    assert oldest_age_ms(idle, 0) == 0  # our clock is behind the cluster's


@pytest.mark.parametrize(
    ("ms", "shown"), [(None, None), (0, "0s"), (59_999, "59s"), (3_600_000, "1h"), (200_000_000, "2d")]
)
def test_an_age_is_one_number(ms: int | None, shown: str | None) -> None:
    assert _age(ms) == shown


@pytest.mark.parametrize(("per_s", "shown"), [(None, None), (0.04, 0.0), (9.96, 10.0), (1234.5, 1234)])
def test_a_rate_is_as_exact_as_it_is_small(per_s: float | None, shown: float | None) -> None:
    assert _rate(per_s) == shown
