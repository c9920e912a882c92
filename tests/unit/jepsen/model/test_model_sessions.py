"""A1, A2, L4: asking twice."""

from holdfast.client.protocol import commands as c
from holdfast.client.protocol.errors import (
    LeaseExpired,
    LimitReached,
    PrincipalDiffers,
    QueueExists,
    QueueNotFound,
    RequestConflict,
    RequestSuperseded,
    SessionExpired,
    SessionWindowFull,
)
from holdfast.client.protocol.replies import Done, Failed, Grant, Leased, Produced, QueueCreated
from tests.unit.jepsen.model.story import DEFAULT, START_MS, Q, Story, parts, session_of

LEASE = c.Lease(queue_id=Q, group=DEFAULT, max_messages=10)


def test_a_known_request_gets_its_first_answer_and_changes_nothing() -> None:
    story = Story()
    command = c.CreateQueue(name="other")
    first = story.do(command, seq=50)
    assert story.do(command, seq=50) == first == QueueCreated(queue_id=2)  # type: ignore[arg-type]
    assert len(story.model.state.queues) == 2


def test_a_refusal_is_remembered_too() -> None:
    story = Story()
    command = c.CreateQueue(name="q")
    assert isinstance(story.refused(command, seq=50), QueueExists)
    story.do(c.DeleteQueue(queue_id=Q), seq=51)
    assert isinstance(story.refused(command, seq=50), QueueExists)


def test_a_known_number_with_another_content_is_a_conflict() -> None:
    story = Story()
    story.do(c.CreateQueue(name="a"), seq=50)
    assert story.refused(c.CreateQueue(name="b"), seq=50) == RequestConflict(request_seq=50)


def test_what_a_session_is_done_with_is_superseded() -> None:
    story = Story()
    story.do(c.CreateQueue(name="a"), seq=50)
    story.do(c.CreateQueue(name="b"), seq=51, done_below=51)
    assert story.refused(c.CreateQueue(name="a"), seq=50) == RequestSuperseded(request_seq=50, done_below=51)


def test_a_request_below_its_own_done_below_is_superseded() -> None:
    story = Story()
    assert story.refused(c.CreateQueue(name="a"), seq=50, done_below=60) == RequestSuperseded(
        request_seq=50, done_below=60
    )


def test_a_full_window_refuses_until_done_below_moves() -> None:
    story = Story()
    story.limits(session_window=3)
    story.do(c.CreateQueue(name="a"))
    assert story.refused(c.CreateQueue(name="b"), seq=50) == SessionWindowFull(limit=3)
    assert isinstance(story.do(c.CreateQueue(name="b"), seq=50, done_below=3), QueueCreated)


def test_an_unknown_session_is_never_taken_for_a_new_one() -> None:
    story = Story()
    stranger = c.Envelope(principal="p", command=LEASE, session=session_of("stranger"), request_seq=1)
    assert story.send(stranger) == [Failed(SessionExpired())]


def test_a_command_that_needs_a_session_and_has_none_is_refused() -> None:
    story = Story()
    assert story.send(c.Envelope(principal="p", command=LEASE)) == [Failed(SessionExpired())]


def test_a_session_that_was_idle_too_long_has_expired_and_opens_as_a_new_one() -> None:
    story = Story()
    story.limits(session_idle_ms=1_000)
    assert isinstance(story.at(1_001).refused(LEASE), SessionExpired)
    opened = c.Envelope(principal="p", command=c.OpenSession(), session=session_of("ann"))
    assert story.send(opened) == [Done()]
    assert story.model.view()["sessions"][session_of("ann")]["remembered"] == []


def test_a_session_lives_to_the_end_of_its_idle_time() -> None:
    story = Story()
    story.limits(session_idle_ms=1_000)
    assert isinstance(story.at(1_000).do(LEASE), Leased)


def test_a_session_belongs_to_its_principal() -> None:
    story = Story()
    story.lease()
    thief = c.Envelope(principal="thief", command=LEASE, session=session_of("ann"), request_seq=70)
    again = c.Envelope(principal="thief", command=c.OpenSession(), session=session_of("ann"))
    assert story.send(thief, again) == [Failed(PrincipalDiffers())] * 2


def test_opening_a_session_again_renews_it_and_its_consumer_id() -> None:
    story = Story()
    story.limits(session_idle_ms=1_000)
    opened = c.Envelope(principal="p", command=c.OpenSession(consumer_id="new"), session=session_of("ann"))
    story.at(900).send(opened)
    story.at(1_800).produce("a")
    story.lease()
    assert story.life(1)["consumer_id"] == "new"


def test_sessions_are_limited_in_number() -> None:
    story = Story()
    story.limits(sessions=1)
    opened = c.Envelope(principal="p", command=c.OpenSession(), session=session_of("bob"))
    assert story.send(opened) == [Failed(LimitReached(limit_name="sessions", limit=1))]


def test_a_produce_without_client_id_is_replayed_under_its_session() -> None:
    story = Story()
    columns, body = parts("a", "b")
    command = c.Produce(queue_id=Q, columns=columns, body=body)
    assert story.do(command, seq=50) == Produced(first_version=1, count=2)  # type: ignore[arg-type]
    assert story.do(command, seq=50) == Produced(first_version=1, count=2, replayed=True)  # type: ignore[arg-type]
    assert story.view()["messages"][2][2:4] == (f"session/{session_of('ann').hex()}", 2)


def test_a_retried_lease_is_answered_as_it_is_now() -> None:
    story = Story(visibility_timeout_ms=1_000)
    story.produce("a", "b", "c")
    lease = story.do(LEASE, seq=50)
    assert isinstance(lease, Leased)
    story.ack(lease.lease_id, 2, 2)
    story.at(500).extend(lease.lease_id)
    again = story.do(LEASE, seq=50)
    assert again == Leased(
        lease_id=lease.lease_id,
        group_generation=1,
        deadline_ms=START_MS + 1_500,
        grants=(Grant(1, 1, 1, 1), Grant(3, 3, 1, 1)),
        replayed=True,
    )
    assert story.life(1)["delivery_count"] == 1


def test_a_retried_lease_that_is_over_has_expired() -> None:
    story = Story(visibility_timeout_ms=1_000)
    story.produce("a")
    lease = story.do(LEASE, seq=50)
    assert isinstance(lease, Leased)
    assert story.at(1_000).refused(LEASE, seq=50) == LeaseExpired(lease_id=lease.lease_id)
    assert story.states() == {1: "leased"}  # a replay folds nothing


def test_a_retried_lease_of_a_deleted_queue_says_so() -> None:
    story = Story()
    story.produce("a")
    story.do(LEASE, seq=50)
    story.do(c.DeleteQueue(queue_id=Q))
    assert story.refused(LEASE, seq=50) == QueueNotFound(queue=1)


def test_a_retried_empty_lease_stays_empty() -> None:
    story = Story()
    story.do(LEASE, seq=50)
    story.produce("a")
    assert story.do(LEASE, seq=50) == Leased(lease_id=0, deadline_ms=0, grants=(), replayed=True)  # type: ignore[arg-type]
