"""T1 … T4: committed time, lease time, and what falls due."""

from holdfast.client.protocol import commands as c
from holdfast.client.protocol.columns import MessageParts
from holdfast.client.protocol.replies import Leased
from holdfast.client.protocol.values import Backoff
from tests.unit.jepsen.model.story import DEFAULT, HOUR_MS, START_MS, Q, Story, granted


def test_committed_time_never_goes_back() -> None:
    story = Story()
    story.at(500).touch()
    story.at(100).touch()
    assert story.model.state.time_ms == START_MS + 500


def test_an_ordinary_stamp_adds_at_most_one_hour() -> None:
    story = Story()
    story.at(5 * HOUR_MS).touch()
    assert story.model.state.time_ms == START_MS + HOUR_MS


def test_commands_of_one_entry_share_one_time() -> None:
    story = Story()
    first, second = (story.envelope(c.Touch(queue_id=Q)) for _ in range(2))
    answers = story.model.apply(99, START_MS + 7, [first, second])
    assert [(a.place.index, a.place.position, a.place.time_ms) for a in answers] == [
        (99, 0, START_MS + 7),
        (99, 1, START_MS + 7),
    ]


def test_a_time_step_expires_no_lease() -> None:
    story = Story(visibility_timeout_ms=1_000)
    story.produce("a")
    lease = story.lease()
    story.step(10_000)
    assert story.ack(lease.lease_id, 1, 1).count == 1


def test_a_time_step_ends_a_delay() -> None:
    story = Story()
    story.produce(MessageParts(b"a", delay_ms=5_000))
    story.step(5_000)
    assert granted(story.lease()) == [1]


def test_a_deadline_is_shown_with_the_steps_so_far() -> None:
    story = Story(visibility_timeout_ms=1_000)
    story.produce("a")
    lease = story.lease()
    story.step(10_000)
    assert story.extend(lease.lease_id).deadline_ms == START_MS + 11_000


def test_an_expired_lease_falls_due_at_its_deadline_plus_the_steps_made_before_it() -> None:
    story = Story(visibility_timeout_ms=1_000, max_delivery_attempts=1)
    story.produce("a")
    story.lease()
    story.step(10_000)
    story.at(12_000).touch()  # lease time is now 2,000 after the grant
    story.step(500)
    assert [row["died_ms"] for row in story.dead().values()] == [START_MS + 11_000]


def test_a_step_at_the_deadline_itself_lies_before_it() -> None:
    story = Story(visibility_timeout_ms=1_000, max_delivery_attempts=1)
    story.produce("a")
    story.lease()
    story.at(1_000).step(10_000)
    story.touch()
    assert [row["died_ms"] for row in story.dead().values()] == [START_MS + 11_000]


def test_what_is_due_is_folded_only_when_its_group_is_touched() -> None:
    story = Story(visibility_timeout_ms=1_000)
    story.produce("a")
    story.lease()
    story.at(2_000).produce("b")
    assert story.states() == {1: "leased", 2: "ready"}
    story.touch()
    assert story.states() == {1: "ready", 2: "ready"}


def test_the_result_does_not_depend_on_when_somebody_touched() -> None:
    def told(*touches: int) -> dict[str, object]:
        story = Story(
            visibility_timeout_ms=1_000,
            max_delivery_attempts=3,
            backoff=Backoff("fixed", 700, 0),
            backoff_on_expiry=True,
            on_expired="dead_letter",
        )
        story.produce(MessageParts(b"a", ttl_ms=1_500), "b", MessageParts(b"c", delay_ms=1_200, ttl_ms=100))
        story.lease(2)
        for ms in touches:
            story.at(ms).touch()
        story.at(5_000).touch()
        groups: dict[str, object] = story.view()["groups"]
        return groups

    assert told() == told(1_000, 1_200, 1_300, 1_500, 1_700, 4_000) == told(1_400)


def test_a_lease_that_expires_comes_before_a_ttl_of_the_same_time() -> None:
    story = Story(visibility_timeout_ms=1_000, on_expired="dead_letter")
    story.produce(MessageParts(b"a", ttl_ms=1_000), MessageParts(b"b", ttl_ms=1_000))
    story.lease(1)
    story.at(1_000).touch()
    assert [(row["version"], row["last_error"]) for row in story.dead().values()] == [(1, "lease expired"), (2, None)]


def test_a_restore_raises_the_generation_of_new_ids() -> None:
    story = Story()
    story.model.restore()
    again = story.queue("again")
    story.produce("a", queue=again)
    assert again == (1 << 48) + 1
    assert story.lease(queue=again).lease_id == (1 << 48) + 1
    assert story.view(again)["messages"][1][0] == 1
    assert isinstance(story.do(c.Lease(queue_id=Q, group=DEFAULT, max_messages=1)), Leased)
