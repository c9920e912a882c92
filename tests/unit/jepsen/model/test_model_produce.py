"""P1 … P8: numbered produce, delays, expiry, limits."""

from holdfast.client.protocol import commands as c
from holdfast.client.protocol.columns import MessageParts
from holdfast.client.protocol.errors import (
    BatchTooLarge,
    IdempotencyConflict,
    LimitReached,
    MessageTooLarge,
    ProducerFenced,
    ProducerUnknown,
    ProducerWindowFull,
    QueueFull,
    ReservedName,
    SequenceGap,
)
from holdfast.client.protocol.replies import Failed, Produced, ProducerOpened, VersionOutcome, VersionsChanged
from holdfast.client.protocol.values import Version
from tests.unit.jepsen.model.story import DEFAULT, START_MS, Q, Story, granted

ONCE = Produced(first_version=Version(1), count=2)
AGAIN = Produced(first_version=Version(1), count=2, replayed=True)


def opened(story: Story, client_id: str = "svc", nonce: bytes = b"n" * 16) -> ProducerOpened:
    reply = story.do(c.OpenProducer(queue_id=Q, client_id=client_id, nonce=nonce))
    assert isinstance(reply, ProducerOpened), reply
    return reply


def test_an_exact_replay_answers_with_the_original_versions_and_writes_nothing() -> None:
    story = Story()
    assert story.numbered("svc", 1, "a", "b") == ONCE
    assert story.numbered("svc", 1, "a", "b") == AGAIN
    assert story.view()["tail"] == 2


def test_a_replay_is_answered_whatever_the_limits_say_now() -> None:
    story = Story()
    story.numbered("svc", 1, "a", "b")
    story.update(max_backlog_messages=1, max_message_bytes=1)
    story.limits(batch_messages=1)
    assert story.numbered("svc", 1, "a", "b") == AGAIN


def test_a_different_body_under_a_known_number_is_told() -> None:
    story = Story()
    story.numbered("svc", 1, "a", "b")
    assert story.numbered("svc", 1, "a", "x") == Failed(IdempotencyConflict(high_water=2, different_body=True))


def test_a_number_at_or_below_the_mark_is_a_conflict() -> None:
    story = Story()
    story.numbered("svc", 1, "a", "b")
    assert story.numbered("svc", 2, "b", "c") == Failed(IdempotencyConflict(high_water=2, different_body=False))


def test_numbers_may_leave_a_gap_unless_the_producer_says_what_comes_before() -> None:
    story = Story()
    story.numbered("svc", 1, "a", "b")
    assert story.numbered("svc", 9, "c", after_seq=8) == Failed(SequenceGap(high_water=2))
    assert story.numbered("svc", 9, "c", after_seq=2) == Produced(first_version=Version(3), count=1)
    assert story.numbered("svc", 20, "d") == Produced(first_version=Version(4), count=1)


def test_a_request_is_remembered_until_done_below_passes_it() -> None:
    story = Story()
    story.numbered("svc", 1, "a", "b")
    story.numbered("svc", 3, "c", done_below=2)
    assert story.numbered("svc", 1, "a", "b") == AGAIN
    story.numbered("svc", 4, "d")
    assert story.numbered("svc", 1, "a", "b") == Failed(IdempotencyConflict(high_water=4, different_body=False))


def test_a_full_producer_window_refuses_and_forgets_nothing() -> None:
    story = Story()
    story.limits(producer_window=2)
    story.numbered("svc", 1, "a")
    story.numbered("svc", 2, "b", done_below=1)
    assert story.numbered("svc", 3, "c", done_below=1) == Failed(ProducerWindowFull(limit=2))
    assert story.numbered("svc", 1, "a") == Produced(first_version=Version(1), count=1, replayed=True)
    assert story.numbered("svc", 3, "c") == Produced(first_version=Version(3), count=1)


def test_opening_a_producer_fences_older_epochs_but_answers_their_replays() -> None:
    story = Story()
    story.numbered("svc", 1, "a", "b")
    assert opened(story) == ProducerOpened(epoch=1, high_water=2)
    assert story.numbered("svc", 1, "a", "b") == AGAIN
    assert story.numbered("svc", 3, "c") == Failed(ProducerFenced(epoch=1, high_water=2))
    assert story.numbered("svc", 3, "c", epoch=1) == Produced(first_version=Version(3), count=1)


def test_the_same_nonce_gets_the_same_epoch_and_another_the_next() -> None:
    story = Story()
    assert [opened(story, nonce=n * 16).epoch for n in (b"a", b"a", b"b", b"a")] == [1, 1, 2, 3]


def test_an_outbox_resends_under_a_new_epoch_and_the_old_numbering_epoch() -> None:
    story = Story()
    opened(story)
    story.numbered("svc", 1, "a", "b", epoch=1, numbering_epoch=1)
    opened(story, nonce=b"m" * 16)
    assert story.numbered("svc", 1, "a", "b", epoch=2, numbering_epoch=1) == AGAIN
    assert story.numbered("svc", 1, "a", "b", epoch=2, numbering_epoch=2) == Failed(
        IdempotencyConflict(high_water=2, different_body=False)
    )


def test_an_expired_producer_is_unknown_and_its_epoch_never_comes_again() -> None:
    story = Story(producer_expiry_ms=1_000)
    opened(story)
    story.numbered("svc", 1, "a", epoch=1)
    assert story.at(1_000).numbered("svc", 1, "a", epoch=1) == Failed(ProducerUnknown(client_id="svc"))
    assert opened(story).epoch == 2


def test_a_forgotten_producer_is_unknown_and_its_epoch_never_comes_again() -> None:
    story = Story()
    opened(story)
    story.do(c.ForgetProducer(queue_id=Q, client_id="svc"))
    assert story.refused(c.ForgetProducer(queue_id=Q, client_id="svc")) == ProducerUnknown(client_id="svc")
    assert story.numbered("svc", 1, "a", epoch=1) == Failed(ProducerUnknown(client_id="svc"))
    assert opened(story).epoch == 2


def test_replays_do_not_keep_a_producer_alive() -> None:
    story = Story(producer_expiry_ms=1_000)
    story.numbered("svc", 1, "a", "b")
    assert story.at(999).numbered("svc", 1, "a", "b") == AGAIN
    assert story.at(1_000).numbered("svc", 1, "a", "b") == Produced(first_version=Version(3), count=2)


def test_reserved_client_ids_are_refused() -> None:
    story = Story()
    refusal = ReservedName(kind="client_id", name="moved/1")
    assert story.numbered("moved/1", 1, "a") == Failed(refusal)
    assert story.refused(c.OpenProducer(queue_id=Q, client_id="moved/1", nonce=b"n" * 16)) == refusal


def test_limits_of_a_request_are_typed_refusals_in_order() -> None:
    story = Story(max_message_bytes=3)
    story.limits(batch_messages=2, batch_bytes=12, message_bytes=8)
    for payloads, refusal in (
        (("aaaaa", "bbbbb", "ccccc"), BatchTooLarge(size=3, limit=2, limit_name="batch_messages")),
        (("aaaaaaaaa", "bbbb"), BatchTooLarge(size=13, limit=12, limit_name="batch_bytes")),
        (("aaaaaaaaa", "b"), MessageTooLarge(size=9, limit=8, limit_name="message_bytes")),
        (("aaaa", "b"), MessageTooLarge(size=4, limit=3, limit_name="max_message_bytes")),
    ):
        assert story.numbered("svc", 1, *payloads) == Failed(refusal)


def test_a_full_queue_refuses_the_whole_batch() -> None:
    story = Story(max_backlog_messages=3, max_backlog_bytes=10)
    story.produce("aaa", "bbb")
    assert story.numbered("svc", 1, "c", "d") == Failed(QueueFull(limit_name="max_backlog_messages", limit=3))
    assert story.numbered("svc", 1, "ccccc") == Failed(QueueFull(limit_name="max_backlog_bytes", limit=10))
    assert story.numbered("svc", 1, "cccc") == Produced(first_version=Version(3), count=1)


def test_a_backlog_counts_a_batch_until_all_of_it_is_settled() -> None:
    story = Story(max_backlog_messages=2)
    story.produce("a", "b")
    lease = story.lease()
    story.ack(lease.lease_id, 1, 1)
    assert isinstance(story.numbered("svc", 1, "c"), Failed)
    story.ack(lease.lease_id, 2, 2)
    assert isinstance(story.numbered("svc", 1, "c"), Produced)


def test_producers_of_a_queue_are_limited_in_number() -> None:
    story = Story()
    story.limits(producers_per_queue=1)
    story.numbered("svc", 1, "a")
    assert story.numbered("other", 1, "a") == Failed(LimitReached(limit_name="producers_per_queue", limit=1))
    assert isinstance(story.numbered("svc", 2, "b"), Produced)


def test_a_delayed_message_is_held_back_until_its_time() -> None:
    story = Story()
    story.produce(MessageParts(b"a", delay_ms=100), MessageParts(b"b", not_before_ms=START_MS + 50), "c")
    assert granted(story.lease()) == [3]
    assert granted(story.at(50).lease()) == [2]
    assert granted(story.at(99).lease()) == []
    assert granted(story.at(100).lease()) == [1]


def test_messages_with_different_times_are_stored_as_several_batches() -> None:
    story = Story()
    story.produce("a", "b", MessageParts(b"c", delay_ms=5), MessageParts(b"d", ttl_ms=5), MessageParts(b"e", ttl_ms=5))
    assert [batch[:2] for batch in story.view()["batches"]] == [(1, 2), (3, 3), (4, 5)]


def test_what_no_group_has_leased_can_be_cancelled() -> None:
    story = Story(groups=("one", "two"))
    story.produce("a", MessageParts(b"b", delay_ms=100), "c")
    story.lease(1, group="two")
    assert story.do(c.Cancel(queue_id=Q, versions=((1, 2), (5, 9)))) == VersionsChanged(
        outcomes=(
            VersionOutcome(1, 1, "too_late", "two"),
            VersionOutcome(2, 2, "ok"),
            VersionOutcome(5, 9, "not_found"),
        )
    )
    assert story.states("one") == {1: "ready", 2: "cancelled", 3: "ready"}
    assert story.states("two") == {1: "leased", 2: "cancelled", 3: "ready"}


def test_a_version_that_came_back_unleased_is_still_too_late_to_cancel() -> None:
    story = Story()
    story.produce("a")
    story.release(story.lease().lease_id, 1, 1)
    outcome = VersionOutcome(1, 1, "too_late", DEFAULT)
    assert story.do(c.Cancel(queue_id=Q, versions=((1, 1),))) == VersionsChanged(outcomes=(outcome,))


def test_a_cancelled_batch_is_freed_and_not_found_again() -> None:
    story = Story()
    story.produce("a")
    story.do(c.Cancel(queue_id=Q, versions=((1, 1),)))
    assert story.view()["stored"] == []
    assert story.do(c.Cancel(queue_id=Q, versions=((1, 1),))) == VersionsChanged(
        outcomes=(VersionOutcome(1, 1, "not_found"),)
    )


def test_rescheduling_splits_the_batch_and_counts_the_ttl_anew() -> None:
    story = Story()
    story.produce(*(MessageParts(b"x", ttl_ms=1_000) for _ in range(3)))
    story.at(400).do(c.Reschedule(queue_id=Q, versions=((2, 2),), delay_ms=100))
    expiry, due, later = START_MS + 1_000, START_MS + 500, START_MS + 1_500
    times = [batch[:4] for batch in story.view()["batches"]]
    assert times == [(1, 1, None, expiry), (2, 2, due, later), (3, 3, None, expiry)]
    story.at(1_000).touch()
    assert story.states() == {1: "discarded", 2: "ready", 3: "discarded"}
    story.at(1_500).touch()
    assert story.states()[2] == "discarded"


def test_rescheduling_to_now_still_takes_a_millisecond() -> None:
    story = Story()
    story.produce(MessageParts(b"a", delay_ms=5_000))
    story.do(c.Reschedule(queue_id=Q, versions=((1, 1),), delay_ms=0))
    assert story.life(1)["due_ms"] == START_MS + 1
    assert granted(story.at(1).lease()) == [1]


def test_a_message_expires_after_its_own_ttl_else_the_queues() -> None:
    story = Story(default_message_ttl_ms=100)
    story.produce(MessageParts(b"a", ttl_ms=50), "b", MessageParts(b"c", ttl_ms=100, delay_ms=30))
    story.at(50).touch()
    assert story.states() == {1: "discarded", 2: "ready", 3: "ready"}
    story.at(100).touch()
    assert story.states() == {1: "discarded", 2: "discarded", 3: "ready"}
    story.at(130).touch()
    assert story.stats().expired == 3


def test_an_expired_message_can_be_acked_and_extended_while_it_is_leased() -> None:
    story = Story(visibility_timeout_ms=500)
    story.produce(MessageParts(b"a", ttl_ms=100))
    lease = story.lease()
    story.at(400).extend(lease.lease_id)
    assert story.at(800).ack(lease.lease_id, 1, 1).count == 1


def test_a_message_that_expired_in_flight_expires_when_it_comes_back() -> None:
    story = Story(on_expired="dead_letter")
    story.produce(MessageParts(b"a", ttl_ms=100))
    lease = story.lease()
    story.at(200).nack(lease.lease_id, 1, 1, error="late")
    (row,) = story.dead().values()
    assert (row["reason"], row["died_ms"], row["attempts"]) == ("expired", START_MS + 200, 1)
