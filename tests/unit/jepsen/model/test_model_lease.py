"""L1 … L7: handing out."""

from typing import Any

import pytest

from holdfast.client.protocol import commands as c
from holdfast.client.protocol.columns import MessageParts
from holdfast.client.protocol.errors import (
    AckHoleCapExceeded,
    GroupNotFound,
    InFlightLimit,
    LeaseExpired,
    LeaseTooLong,
)
from holdfast.client.protocol.replies import Grant, Leased
from tests.unit.jepsen.model.story import DEFAULT, START_MS, Q, Story, granted

LEASE = c.Lease(queue_id=Q, group=DEFAULT, max_messages=10)


def test_the_lowest_available_versions_are_handed_out_first() -> None:
    story = Story()
    story.produce("a", "b", "c", "d")
    first = story.lease(2)
    assert granted(first) == [1, 2]
    story.nack(first.lease_id, 1, 1)
    assert granted(story.lease(2)) == [1, 3]


def test_lease_ids_grow_and_never_repeat() -> None:
    story = Story()
    other = story.queue("other")
    story.produce("a")
    story.produce("b", queue=other)
    assert [story.lease().lease_id, story.lease(queue=other).lease_id] == [1, 2]


def test_max_bytes_clips_but_one_message_always_goes() -> None:
    story = Story()
    story.produce("aaaaa", "bbb", "cc", "d")
    assert granted(story.lease(max_bytes=2)) == [1]
    assert granted(story.lease(max_bytes=5)) == [2, 3]


def test_a_lease_lasts_for_the_requests_timeout_else_the_groups_else_the_queues() -> None:
    story = Story(visibility_timeout_ms=700)
    story.group("own", visibility_timeout_ms=200)
    story.produce("a", "b")
    assert story.lease(1).deadline_ms == START_MS + 700
    assert story.lease(1, group="own").deadline_ms == START_MS + 200
    assert story.lease(1, visibility_timeout_ms=50).deadline_ms == START_MS + 50


def test_a_timeout_above_the_longest_lease_is_refused() -> None:
    story = Story(visibility_timeout_ms=100, max_lease_ms=100)
    command = c.Lease(queue_id=Q, group=DEFAULT, max_messages=1, visibility_timeout_ms=101)
    assert story.refused(command) == LeaseTooLong(timeout_ms=101, limit=100)


def test_a_group_that_is_not_there_is_told() -> None:
    story = Story()
    command = c.Lease(queue_id=Q, group="nobody", max_messages=1)
    assert story.refused(command) == GroupNotFound(queue_id=1, group="nobody")


@pytest.mark.parametrize("name", ["max_in_flight", "max_in_flight_per_session"])
def test_in_flight_limits_clip_the_grant_and_refuse_at_zero(name: str) -> None:
    limit: dict[str, Any] = {name: 2}
    story = Story(**limit)
    assert granted(story.lease()) == []
    story.produce("a", "b", "c")
    assert granted(story.lease()) == [1, 2]
    assert story.refused(LEASE) == InFlightLimit(limit_name=name, limit=2)
    assert granted(story.lease(by="bob")) == [3] if name.endswith("session") else True


def test_a_session_may_hold_so_many_leases() -> None:
    story = Story()
    story.limits(leases_per_session=2)
    story.produce("a", "b", "c", "d")
    story.lease(1)
    assert granted(story.lease(2)) == [2, 3]
    assert story.refused(LEASE) == InFlightLimit(limit_name="leases_per_session", limit=2)
    assert granted(story.lease(by="bob")) == [4]


def test_delivery_count_counts_leases_and_attempts_leave_out_released_ones() -> None:
    story = Story()
    story.produce("a")
    story.release(story.lease().lease_id, 1, 1)
    story.nack(story.lease().lease_id, 1, 1)
    assert story.lease().grants == (Grant(1, 1, 3, 2),)


def test_grants_are_runs_with_equal_counts() -> None:
    story = Story()
    story.produce("a", "b", "c")
    story.nack(story.lease(1).lease_id, 1, 1)
    assert story.lease().grants == (Grant(1, 1, 2, 2), Grant(2, 3, 1, 1))


def test_where_begun_counts_a_crash_costs_only_what_was_begun() -> None:
    story = Story(count="begun", visibility_timeout_ms=100)
    story.produce("a", "b")
    lease = story.lease()
    assert lease.grants == (Grant(1, 2, 1, 0),)
    story.extend(lease.lease_id, begin=((1, 1), (7, 9)))
    story.at(100).touch()
    assert (story.life(1)["attempts"], story.life(2)["attempts"]) == (1, 0)


def test_the_way_of_counting_is_the_one_at_the_grant() -> None:
    story = Story(count="begun", visibility_timeout_ms=1_000)
    story.produce("a")
    story.lease()
    story.update(count="leased")
    story.at(1_000).touch()
    assert story.life(1)["attempts"] == 0


def test_a_version_dies_in_the_command_in_which_it_would_come_back_whatever_its_delay() -> None:
    story = Story(max_delivery_attempts=2)
    story.produce("a")
    story.nack(story.lease().lease_id, 1, 1)
    story.nack(story.lease().lease_id, 1, 1, delay_ms=5_000, error="boom")
    (row,) = story.dead().values()
    assert (row["reason"], row["attempts"], row["delivery_count"], row["last_error"]) == ("max_attempts", 2, 2, "boom")


def test_a_limit_that_was_lowered_kills_at_hand_out_and_only_as_far_as_the_walk_goes() -> None:
    story = Story()
    story.produce("a", "b", "c", "d")
    lease = story.lease()
    story.nack(lease.lease_id, 1, 1)
    story.release(lease.lease_id, 2, 2)
    story.nack(lease.lease_id, 3, 4)
    story.update(max_delivery_attempts=1)
    assert granted(story.lease(1)) == [2]
    assert story.states() == {1: "dead", 2: "leased", 3: "ready", 4: "ready"}
    assert granted(story.lease()) == []
    assert story.stats().dead == 3


def test_a_limit_that_was_lowered_kills_at_the_end_of_a_delay() -> None:
    story = Story()
    story.produce("a")
    story.nack(story.lease().lease_id, 1, 1, delay_ms=100)
    story.update(max_delivery_attempts=1)
    story.at(300).touch()
    assert [row["died_ms"] for row in story.dead().values()] == [START_MS + 100]


def test_over_the_hole_cap_only_versions_below_the_highest_settled_one_are_delivered() -> None:
    story = Story(max_ack_holes=1)
    story.produce("a", "b", "c", "d", "e")
    lease = story.lease(4)
    story.ack(lease.lease_id, 2, 2)
    story.ack(lease.lease_id, 4, 4)
    next_due_ms = lease.deadline_ms
    assert story.refused(LEASE) == AckHoleCapExceeded(holes=2, cap=1, next_due_ms=next_due_ms)
    story.nack(lease.lease_id, 1, 1, delay_ms=9)
    assert story.refused(LEASE) == AckHoleCapExceeded(holes=2, cap=1, next_due_ms=START_MS + 9)
    assert granted(story.at(9).lease()) == [1]


def test_over_the_hole_cap_a_group_with_nothing_available_is_just_empty() -> None:
    story = Story(max_ack_holes=1)
    story.produce("a", "b", "c", "d")
    lease = story.lease()
    story.ack(lease.lease_id, 2, 2)
    story.ack(lease.lease_id, 4, 4)
    assert granted(story.lease()) == []


def test_a_delayed_batch_that_delivery_has_passed_raises_the_cap() -> None:
    story = Story(max_ack_holes=1)
    story.produce(MessageParts(b"1", delay_ms=9_000), *"2345678")
    lease = story.lease(6)
    assert granted(lease) == [2, 3, 4, 5, 6, 7]
    story.ack(lease.lease_id, 3, 3)
    story.ack(lease.lease_id, 5, 5)
    assert story.explain(8).reason == "available"
    story.ack(lease.lease_id, 7, 7)
    assert story.refused(LEASE) == AckHoleCapExceeded(holes=3, cap=2, next_due_ms=lease.deadline_ms)


def test_a_redriven_version_makes_no_hole_and_raises_the_cap_until_it_is_settled_again() -> None:
    story = Story(max_ack_holes=1)
    story.produce("1")
    story.kill(1)
    story.produce(*"2345678")
    story.do(c.Redrive(queue_id=Q, group=DEFAULT, dead=((1, 1, 1),)))
    lease = story.lease(7)
    assert granted(lease) == [1, 2, 3, 4, 5, 6, 7]
    for version in (3, 5, 7):
        story.ack(lease.lease_id, version, version)
    assert story.refused(LEASE) == AckHoleCapExceeded(holes=3, cap=2, next_due_ms=lease.deadline_ms)
    story.ack(lease.lease_id, 1, 1)
    assert story.refused(LEASE) == AckHoleCapExceeded(holes=3, cap=1, next_due_ms=lease.deadline_ms)


def test_over_the_cap_a_redriven_version_that_is_itself_the_highest_settled_one_is_delivered() -> None:
    story = Story(max_ack_holes=1)
    story.produce(*"1234567")
    lease = story.lease()
    for version in (2, 4, 6):
        story.ack(lease.lease_id, version, version)
    story.nack(lease.lease_id, 7, 7, dead=True)
    story.produce("8")
    story.do(c.Redrive(queue_id=Q, group=DEFAULT, dead=((7, 7, 1),)))
    assert granted(story.lease()) == [7]


def test_auto_ack_settles_at_hand_out() -> None:
    story = Story()
    story.produce("a", "b")
    lease = story.lease(auto_ack=True)
    assert story.states() == {1: "acked", 2: "acked"}
    assert story.ack(lease.lease_id, 1, 1).refused[0].code == LeaseExpired.code


def test_an_auto_ack_is_replayed_with_its_bodies_until_its_timeout() -> None:
    story = Story(visibility_timeout_ms=1_000)
    story.produce("a")
    command = c.Lease(queue_id=Q, group=DEFAULT, max_messages=1, auto_ack=True)
    first = story.do(command, seq=50)
    assert isinstance(first, Leased)
    assert story.at(999).do(command, seq=50) == Leased(
        lease_id=first.lease_id, group_generation=1, deadline_ms=first.deadline_ms, grants=first.grants, replayed=True
    )
    assert story.view()["stored"] == [1]
    assert story.at(1_000).refused(command, seq=50) == LeaseExpired(lease_id=first.lease_id)
    story.touch()
    assert story.view()["stored"] == []


def test_the_bodies_of_an_auto_ack_go_when_its_session_is_done_with_it() -> None:
    story = Story()
    story.produce("a")
    story.do(c.Lease(queue_id=Q, group=DEFAULT, max_messages=1, auto_ack=True), seq=50)
    assert story.view()["stored"] == [1]
    story.do(c.CreateQueue(name="other"), seq=51, done_below=51)
    assert story.view()["stored"] == []


def test_an_empty_group_answers_with_no_lease() -> None:
    assert Story().lease() == Leased(lease_id=0, deadline_ms=0, grants=())  # type: ignore[arg-type]


def test_first_and_last_delivery_and_the_consumer_travel_with_the_version() -> None:
    story = Story(max_delivery_attempts=2)
    story.produce("a")
    story.at(10).nack(story.lease(by="bob").lease_id, 1, 1, by="bob")
    story.at(20).nack(story.lease(by="cy").lease_id, 1, 1, by="cy")
    (row,) = story.dead().values()
    assert (row["first_delivered_ms"], row["last_delivered_ms"]) == (START_MS + 10, START_MS + 20)
    assert row["consumer_id"] == "cy"
