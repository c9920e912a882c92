"""Rules G1 … G5: groups apart from each other, where they start, what is kept, what is counted."""

from typing import Any

import pytest

from holdfast.client.protocol.columns import MessageParts
from holdfast.client.protocol.commands import (
    AckBatch,
    Cancel,
    Command,
    CreateGroup,
    CreateQueue,
    DeleteGroup,
    DeleteQueue,
    DropDead,
    Extend,
    ForgetProducer,
    Lease,
    Nack,
    OpenProducer,
    OpenSession,
    PurgeQueue,
    Redrive,
    RedriveToOrigin,
    Release,
    ReportCursor,
    Reschedule,
    Seek,
    SetLimits,
    Touch,
    UpdateGroup,
    UpdateQueue,
)
from holdfast.client.protocol.errors import AckHoleCapExceeded, LeaseExpired, QueueNotFound, QueueRecreated
from holdfast.client.protocol.queries import DeadLetters, DescribeQueue, Explain, Stats
from holdfast.client.protocol.replies import (
    DeadListed,
    Done,
    Explained,
    Failed,
    Grant,
    GroupStats,
    Leased,
    Purged,
    QueueCreated,
    QueueDescribed,
    ReaderDescribed,
    RefusedRange,
    Reply,
    Settled,
    Started,
)
from holdfast.client.protocol.values import Job, LeaseId, QueueId, QueueSettings, Version
from holdfast.storage.tables import Table
from tests.support.machine import START_MS, Machine, produce, stage

Q = QueueId(1)
NOTHING = Leased(lease_id=LeaseId(0), deadline_ms=0, grants=())


def queue_with(*messages: bytes | MessageParts, groups: tuple[str, ...] = ("default",), **settings: Any) -> Machine:
    """Each message is a batch of its own."""
    machine = Machine()
    machine.do(OpenSession(consumer_id="worker"))
    created = machine.do(CreateQueue(name="q", settings=QueueSettings(**settings), groups=groups))
    assert created == QueueCreated(queue_id=Q)
    for message in messages:
        machine.do(produce(Q, message))
    return machine


def take(machine: Machine, count: int = 100, group: str = "default", **named: Any) -> Leased:
    reply = machine.do(Lease(queue_id=Q, group=group, max_messages=count, **named))
    assert isinstance(reply, Leased), reply
    return reply


def ack(machine: Machine, lease: int, first: int, last: int, group: str = "default") -> Reply:
    return machine.do(AckBatch(queue_id=Q, group=group, ranges=((lease, first, last),)))


def nack(machine: Machine, lease: int, version: int, group: str = "default", **named: Any) -> Reply:
    return machine.do(Nack(queue_id=Q, group=group, ranges=((lease, version, version),), **named))


def stats(machine: Machine, group: str = "default") -> GroupStats:
    """The counters, which must add up (G4)."""
    reply = machine.ask(Stats(queue_id=Q, group=group))
    assert isinstance(reply, GroupStats), reply
    states = (reply.ready, reply.delayed, reply.in_flight, reply.acked, reply.dead, reply.moved)
    assert reply.produced == sum(states) + reply.discarded + reply.cancelled + reply.purged + reply.trimmed
    return reply


def described(machine: Machine) -> QueueDescribed:
    reply = machine.ask(DescribeQueue(name="q"))
    assert isinstance(reply, QueueDescribed), reply
    return reply


def dead_versions(machine: Machine) -> list[int]:
    reply = machine.ask(DeadLetters(queue_id=Q))
    assert isinstance(reply, DeadListed), reply
    return [row.version for row in reply.rows]


def why(machine: Machine, version: int, group: str = "default") -> Reply:
    return machine.ask(Explain(queue_id=Q, group=group, version=version))


def rows(machine: Machine, table: Table) -> int:
    """How many rows a table has."""
    with machine.store.read() as txn:
        return sum(1 for _ in txn.scan(table, b"", b"\xff" * 64))


# G1: apart


def test_groups_do_not_see_each_other() -> None:
    """G1: leases, counts, delays and acks of one group leave the other where it was."""
    machine = queue_with(b"a", b"b", b"c", groups=("one", "two"))
    take(machine, group="one")
    ack(machine, 1, 1, 1, "one")
    nack(machine, 1, 2, "one", delay_ms=9_000)
    assert take(machine, group="two").grants == (Grant(1, 3, 1, 1),)
    one, two = stats(machine, "one"), stats(machine, "two")
    assert (one.acked, one.delayed, one.in_flight, one.holes) == (1, 1, 1, 0)
    assert (two.acked, two.delayed, two.in_flight, two.holes) == (0, 0, 3, 0)


def test_a_lease_of_one_group_settles_nothing_in_another() -> None:
    """G1: under the other group's name the lease is not open."""
    machine = queue_with(b"a", groups=("one", "two"))
    take(machine, group="one")
    refused = Settled(count=0, refused=(RefusedRange(1, 1, 1, LeaseExpired.code),))
    assert ack(machine, 1, 1, 1, "two") == refused
    assert ack(machine, 1, 1, 1, "one") == Settled(count=1)


def test_deaths_and_holes_of_one_group_are_not_anothers() -> None:
    """G1: a group that has its cap full of holes and dead rows does not stop its neighbour."""
    machine = queue_with(*[b"m"] * 6, groups=("one", "two"), max_ack_holes=1)
    take(machine, 5, group="one")
    ack(machine, 1, 2, 2, "one")
    nack(machine, 1, 4, "one", dead=True)
    reply = machine.do(Lease(queue_id=Q, group="one", max_messages=1))
    assert isinstance(reply, Failed)
    assert isinstance(reply.error, AckHoleCapExceeded)
    assert (stats(machine, "one").holes, stats(machine, "one").dead) == (2, 1)
    assert (stats(machine, "two").holes, stats(machine, "two").dead) == (0, 0)
    assert take(machine, group="two").grants == (Grant(1, 6, 1, 1),)


# G2: starts


def test_a_new_group_starts_where_it_is_told() -> None:
    """G2: earliest is what some group has not settled, latest is behind the tail, a version is itself."""
    machine = queue_with(b"a", b"b", b"c", b"d")
    take(machine, 1)
    ack(machine, 1, 1, 1)
    starts = {"early": "earliest", "late": "latest", "third": 3}
    replies = [machine.do(CreateGroup(queue_id=Q, group=name, start=start)) for name, start in starts.items()]  # type: ignore[arg-type]
    assert replies == [Started(version=Version(number), moved=False) for number in (2, 5, 3)]
    assert take(machine, group="early").grants == (Grant(2, 4, 1, 1),)
    assert take(machine, group="late") == NOTHING
    assert take(machine, group="third").grants == (Grant(3, 4, 1, 1),)


def test_a_start_that_is_gone_is_moved_and_says_so() -> None:
    """G2: below the lowest kept version it is that one, above the tail it is the next to come."""
    machine = queue_with(b"a", b"b", b"c")
    take(machine, 1)
    ack(machine, 1, 1, 1)
    low = machine.do(CreateGroup(queue_id=Q, group="low", start=1))
    assert low == Started(version=Version(2), moved=True)
    high = machine.do(CreateGroup(queue_id=Q, group="high", start=9))
    assert high == Started(version=Version(4), moved=True)


def test_a_seek_ends_leases_and_counts_anew() -> None:
    """G2: the lease from before is over, and what is delivered again is delivered for the first time."""
    machine = queue_with(b"a", b"b", replay_ms=10**9)
    take(machine)
    ack(machine, 1, 1, 1)
    assert machine.do(Seek(queue_id=Q, group="default", to="earliest")) == Started(version=Version(1), moved=False)
    assert ack(machine, 1, 2, 2) == Settled(count=0, refused=(RefusedRange(1, 2, 2, LeaseExpired.code),))
    assert take(machine).grants == (Grant(1, 2, 1, 1),)
    assert stats(machine).acked == 0


def test_parked_rows_survive_a_seek_unless_told() -> None:
    """G2: they stay and stay counted; with dead=True they are gone."""
    machine = queue_with(b"a", b"b")
    take(machine)
    nack(machine, 1, 1, dead=True)
    machine.do(Seek(queue_id=Q, group="default", to="latest"))
    assert (dead_versions(machine), stats(machine).dead, stats(machine).produced) == ([1], 1, 1)
    machine.do(Seek(queue_id=Q, group="default", to="latest", dead=True))
    assert (dead_versions(machine), stats(machine).dead, stats(machine).produced) == ([], 0, 0)


def test_in_a_replay_queue_a_new_group_starts_at_the_lowest_kept() -> None:
    """G2: earliest is then what is stored, settled by others or not."""
    machine = queue_with(b"a", b"b", b"c", replay_ms=10**9)
    take(machine)
    ack(machine, 1, 1, 2)
    early = machine.do(CreateGroup(queue_id=Q, group="early"))
    assert early == Started(version=Version(1), moved=False)
    assert take(machine, group="early").grants == (Grant(1, 3, 1, 1),)


def test_a_seek_to_what_is_gone_says_where_it_went() -> None:
    """G2: it starts at the lowest kept version and tells that it was moved."""
    machine = queue_with(b"a", b"b", b"c")
    take(machine, 1)
    ack(machine, 1, 1, 1)
    assert machine.do(Seek(queue_id=Q, group="default", to=1)) == Started(version=Version(2), moved=True)
    assert take(machine).grants == (Grant(2, 3, 1, 1),)
    assert machine.do(Seek(queue_id=Q, group="default", to=3)) == Started(version=Version(3), moved=False)


def test_a_seek_forgets_attempts_and_delays() -> None:
    """G2: what was tried four times and nacked into the future is new in the next generation."""
    machine = queue_with(b"a")
    for lease in range(1, 5):
        take(machine)
        nack(machine, lease, 1, delay_ms=0 if lease < 4 else 60_000)
    machine.do(Seek(queue_id=Q, group="default", to="earliest"))
    assert take(machine).grants == (Grant(1, 1, 1, 1),)


def test_a_lease_names_the_generation_of_its_group() -> None:
    """G2: it is never the same again: another one after a seek, for another group, and for one that was made anew."""
    machine = queue_with(b"a")
    machine.do(CreateGroup(queue_id=Q, group="two"))
    seen = [take(machine).group_generation, take(machine, group="two").group_generation]
    for _ in range(2):
        machine.do(Seek(queue_id=Q, group="default", to="earliest"))
        seen.append(take(machine).group_generation)
    machine.do(DeleteGroup(queue_id=Q, group="two"))
    machine.do(CreateGroup(queue_id=Q, group="two", start=1))
    seen.append(take(machine, group="two").group_generation)
    assert len(set(seen)) == len(seen)


def test_a_purge_and_a_nack_keep_the_generation() -> None:
    """G2: only a seek begins another one."""
    machine = queue_with(b"a", b"b")
    before = take(machine, 1).group_generation
    nack(machine, 1, 1)
    machine.do(PurgeQueue(queue_id=Q, in_flight=True))
    machine.do(produce(Q, b"c"))
    assert take(machine).group_generation == before


def test_a_new_generation_sees_what_has_come_due_before_it() -> None:
    """G2: after a seek or in a new group what expired is not delivered again, and what was delayed is not late."""
    mortal, later = MessageParts(b"m", ttl_ms=1_000), MessageParts(b"l", delay_ms=1_000)
    machine = queue_with(mortal, later, b"c", replay_ms=10**9)
    take(machine)
    ack(machine, 1, 1, 1)
    ack(machine, 1, 3, 3)
    machine.pass_ms(2_000)
    machine.do(Seek(queue_id=Q, group="default", to="earliest"))
    assert take(machine).grants == (Grant(2, 3, 1, 1),)
    machine.do(CreateGroup(queue_id=Q, group="early"))
    assert take(machine, group="early").grants == (Grant(2, 3, 1, 1),)
    assert (stats(machine).expired, stats(machine, "early").expired) == (1, 1)


# G3: storage


def test_storage_is_freed_when_every_group_has_settled() -> None:
    """G3: the last group frees it, also behind a head that is stuck."""
    machine = queue_with(b"a", b"b", b"c", groups=("one", "two"))
    take(machine, group="one")
    take(machine, group="two")
    ack(machine, 1, 2, 3, "one")
    assert described(machine).stored_messages == 3
    ack(machine, 2, 2, 2, "two")
    assert described(machine).stored_messages == 2
    ack(machine, 1, 1, 1, "one")
    ack(machine, 2, 1, 1, "two")
    assert (described(machine).stored_messages, described(machine).lowest_version) == (1, 3)


def test_a_queue_without_groups_keeps_its_messages() -> None:
    """G3: a group that comes later finds them all."""
    machine = queue_with(b"a", b"b", groups=())
    machine.pass_ms(3_000_000)
    machine.do(Touch(queue_id=Q))
    assert described(machine).stored_messages == 2
    machine.do(CreateGroup(queue_id=Q, group="default"))
    assert take(machine).grants == (Grant(1, 2, 1, 1),)


def test_replay_keeps_settled_messages_for_its_time() -> None:
    """G3: a millisecond before they can be walked again, at the time they are freed."""
    machine = queue_with(b"a", b"b", replay_ms=1_000)
    take(machine)
    ack(machine, 1, 1, 2)
    machine.pass_ms(999)
    machine.do(Touch(queue_id=Q))
    assert described(machine).stored_messages == 2
    machine.pass_ms(1)
    machine.do(Touch(queue_id=Q))
    assert described(machine).stored_messages == 0


def test_drop_after_ends_what_is_old_but_not_what_is_leased_or_not_due() -> None:
    """G3: the ready one is trimmed at its age; the leased and the delayed one are not."""
    machine = queue_with(b"a", MessageParts(b"later", delay_ms=5_000), b"c", drop_after_ms=1_000)
    take(machine, 1)
    machine.pass_ms(999)
    machine.do(Touch(queue_id=Q))
    assert stats(machine).trimmed == 0
    machine.pass_ms(1)
    machine.do(Touch(queue_id=Q))
    assert why(machine, 3) == Explained(reason="trimmed")
    assert (stats(machine).in_flight, stats(machine).delayed, stats(machine).trimmed) == (1, 1, 1)
    assert ack(machine, 1, 1, 1) == Settled(count=1)


def test_a_reader_shows_its_lag_and_holds_replay_back() -> None:
    """G3: what a reader has not read is kept beyond replay_ms, until it has read it."""
    machine = queue_with(b"a", b"b", replay_ms=1_000)
    assert machine.do(ReportCursor(queue_id=Q, reader="spark", version=1)) == Done()
    reader = ReaderDescribed(name="spark", version=1, lag=1, reported_ms=START_MS)
    assert described(machine).readers == (reader,)
    take(machine)
    ack(machine, 1, 1, 2)
    machine.pass_ms(2_000)
    machine.do(Touch(queue_id=Q))
    assert (described(machine).stored_messages, described(machine).lowest_version) == (1, 2)
    machine.do(ReportCursor(queue_id=Q, reader="spark", version=2))
    machine.do(Touch(queue_id=Q))
    assert described(machine).stored_messages == 0


def test_replay_keeps_settled_messages_up_to_its_bytes() -> None:
    """G3: counted from the newest, those within replay_bytes are kept and the older ones freed."""
    machine = queue_with(b"aaaa", b"bbbb", b"cccc", replay_bytes=8)
    take(machine)
    ack(machine, 1, 1, 3)
    machine.do(Touch(queue_id=Q))
    assert (described(machine).stored_messages, described(machine).lowest_version) == (2, 2)


def test_replay_frees_nothing_that_is_not_settled() -> None:
    """G3: it says how long settled messages stay, and ends none that a group still needs."""
    machine = queue_with(b"aaaa", b"bbbb", b"cccc", replay_bytes=0, replay_ms=0)
    machine.pass_ms(60_000)
    machine.do(Touch(queue_id=Q))
    assert take(machine).grants == (Grant(1, 3, 1, 1),)


def test_drop_after_bytes_ends_the_oldest() -> None:
    """G3: of what nobody settled, the newest within the bytes stay, and a leased one is not taken away."""
    machine = queue_with(b"aaaa", b"bbbb", b"cccc", b"dddd", drop_after_bytes=8)
    machine.do(Touch(queue_id=Q))
    assert [why(machine, version) for version in (2, 3)] == [
        Explained(reason="trimmed"),
        Explained(reason="available"),
    ]
    take(machine, 1)
    machine.do(produce(Q, b"eeee"))
    machine.do(Touch(queue_id=Q))
    assert (stats(machine).trimmed, stats(machine).in_flight, stats(machine).ready) == (2, 1, 2)


def test_a_leased_message_is_trimmed_when_it_comes_back() -> None:
    """G3: it was spared only while it was leased."""
    machine = queue_with(b"a", drop_after_ms=1_000)
    take(machine)
    machine.pass_ms(5_000)
    nack(machine, 1, 1)
    machine.do(Touch(queue_id=Q))
    assert why(machine, 1) == Explained(reason="trimmed")


def test_a_silent_reader_holds_replay_back_for_a_bounded_time() -> None:
    """G3: a reader that was not heard of for cursor_hold_ms holds nothing any more."""
    machine = queue_with(b"a", replay_ms=1_000)
    machine.do(SetLimits(changes=(("cursor_hold_ms", 10_000),)))
    machine.do(ReportCursor(queue_id=Q, reader="spark", version=0))
    take(machine)
    ack(machine, 1, 1, 1)
    machine.pass_ms(9_999)
    machine.do(Touch(queue_id=Q))
    assert described(machine).stored_messages == 1
    machine.pass_ms(1)
    machine.do(Touch(queue_id=Q))
    assert described(machine).stored_messages == 0


def test_deleting_the_last_group_that_needs_a_message_frees_it() -> None:
    """G3: the others have settled it, so nobody is left."""
    machine = queue_with(b"a", b"b", groups=("one", "two"))
    take(machine, group="one")
    ack(machine, 1, 1, 2, "one")
    machine.do(DeleteGroup(queue_id=Q, group="two"))
    for _ in range(3):
        machine.do(Touch(queue_id=Q))
    assert described(machine).stored_messages == 0


# G4: counters


def test_every_message_is_counted_in_exactly_one_state() -> None:
    """G4: one message in each of seven states, and the sum is what was produced."""
    mortal, later = MessageParts(b"m", ttl_ms=1_000), MessageParts(b"l", delay_ms=9_000)
    machine = queue_with(b"1", b"2", b"3", mortal, later, b"6", b"7")
    machine.do(Cancel(queue_id=Q, versions=((6, 6),)))
    take(machine, 3)
    ack(machine, 1, 1, 1)
    nack(machine, 1, 2, dead=True)
    machine.pass_ms(1_000)
    machine.do(Touch(queue_id=Q))
    assert stats(machine) == GroupStats(
        produced=7, ready=1, delayed=1, in_flight=1, acked=1, dead=1, moved=0, discarded=1, cancelled=1, purged=0,
        trimmed=0, expired=1, tail_version=7, holes=2, oldest_ms=START_MS,
    )  # fmt: skip


def test_a_group_counts_since_its_start() -> None:
    """G4: a group that starts later has not produced what was before it."""
    machine = queue_with(b"a", b"b")
    machine.do(CreateGroup(queue_id=Q, group="late", start="latest"))
    machine.do(produce(Q, b"c"))
    assert (stats(machine, "late").produced, stats(machine, "late").ready) == (1, 1)
    assert stats(machine).produced == 3


def test_moved_purged_and_trimmed_are_counted_too() -> None:
    """G4: the other three states, one message each, and the sum is what was produced."""
    machine = Machine()
    machine.do(OpenSession(consumer_id="worker"))
    machine.do(CreateQueue(name="q"))
    machine.do(CreateQueue(name="graves"))
    machine.do(UpdateQueue(queue_id=Q, changes=(("dlq_strategy", "move"), ("dlq_queue", "graves"))))
    machine.do(produce(Q, b"1"))
    machine.do(produce(Q, b"2"))
    take(machine, 1)
    nack(machine, 1, 1, dead=True)
    machine.do(PurgeQueue(queue_id=Q))
    machine.do(produce(Q, b"3"))
    machine.do(UpdateQueue(queue_id=Q, changes=(("drop_after_ms", 1_000),)))
    machine.pass_ms(1_000)
    machine.do(produce(Q, b"4"))
    machine.do(Touch(queue_id=Q))
    counted = stats(machine)
    assert (counted.moved, counted.purged, counted.trimmed, counted.ready) == (1, 1, 1, 1)
    assert counted.produced == 4


def test_a_seek_counts_from_its_new_start() -> None:
    """G4: the sum holds in the new generation, too."""
    machine = queue_with(b"a", b"b", b"c", replay_ms=10**9)
    take(machine)
    ack(machine, 1, 1, 2)
    machine.do(Seek(queue_id=Q, group="default", to=2))
    counted = stats(machine)
    assert (counted.produced, counted.ready, counted.acked, counted.in_flight) == (2, 2, 0, 0)


# G5: delete, purge


def test_a_purge_settles_what_is_ready_and_delayed() -> None:
    """G5: what is leased stays leased, what is dead stays dead, unless the flags widen it."""
    machine = queue_with(b"1", b"2", MessageParts(b"3", delay_ms=5_000), b"4")
    take(machine, 2)
    nack(machine, 1, 2, dead=True)
    assert machine.do(PurgeQueue(queue_id=Q)) == Purged(count=2)
    assert (stats(machine).purged, stats(machine).in_flight, stats(machine).dead) == (2, 1, 1)
    assert machine.do(PurgeQueue(queue_id=Q, in_flight=True, dead=True)) == Purged(count=2)
    assert (stats(machine).purged, stats(machine).in_flight, dead_versions(machine)) == (4, 0, [])
    assert ack(machine, 1, 1, 1) == Settled(count=0, refused=(RefusedRange(1, 1, 1, LeaseExpired.code),))


def test_a_purge_of_one_group_leaves_the_others() -> None:
    """G5: the other group still delivers everything."""
    machine = queue_with(b"a", b"b", groups=("one", "two"))
    assert machine.do(PurgeQueue(queue_id=Q, group="one")) == Purged(count=2)
    assert take(machine, group="one") == NOTHING
    assert take(machine, group="two").grants == (Grant(1, 2, 1, 1),)


def test_a_deleted_queue_is_not_taken_for_its_successor() -> None:
    """G5: its id answers that it is gone, and once the name is in use again, as what."""
    machine = queue_with(b"a")
    assert machine.do(DeleteQueue(queue_id=Q)) == Done()
    assert machine.do(produce(Q, b"b")) == Failed(QueueNotFound(queue=1))
    machine.do(CreateQueue(name="q"))
    recreated = Failed(QueueRecreated(name="q", queue_id=2))
    assert machine.do(produce(Q, b"b", client_id="moved/1")) == recreated
    assert machine.do(Lease(queue_id=Q, group="nobody", max_messages=1)) == recreated
    assert machine.ask(Stats(queue_id=Q, group="default")) == recreated


@pytest.mark.parametrize(
    "command",
    [
        UpdateQueue(queue_id=Q, changes=(("max_ack_holes", 5),)),
        DeleteQueue(queue_id=Q),
        PurgeQueue(queue_id=Q),
        CreateGroup(queue_id=Q, group="other"),
        UpdateGroup(queue_id=Q, group="default", changes=(("max_in_flight", 5),)),
        DeleteGroup(queue_id=Q, group="default"),
        Seek(queue_id=Q, group="default", to="latest"),
        ReportCursor(queue_id=Q, reader="spark", version=1),
        OpenProducer(queue_id=Q, client_id="shop", nonce=bytes(16)),
        ForgetProducer(queue_id=Q, client_id="shop"),
        produce(Q, b"x", client_id="shop"),
        Cancel(queue_id=Q, versions=((1, 1),)),
        Reschedule(queue_id=Q, versions=((1, 1),), delay_ms=5),
        Lease(queue_id=Q, group="default", max_messages=1),
        AckBatch(queue_id=Q, group="default", ranges=((1, 1, 1),)),
        Nack(queue_id=Q, group="default", ranges=((1, 1, 1),)),
        Release(queue_id=Q, group="default", ranges=((1, 1, 1),)),
        Extend(queue_id=Q, group="default", lease_id=LeaseId(1)),
        Redrive(queue_id=Q, group="default", dead=((1, 1, 1),)),
        RedriveToOrigin(queue_id=Q, group="default", versions=((1, 1),)),
        DropDead(queue_id=Q, group="default", dead=((1, 1, 1),)),
        stage(Job("j1"), Q, b"x"),
        Touch(queue_id=Q),
    ],
    ids=lambda command: type(command).__name__,
)
def test_no_command_reaches_the_successor_of_its_queue(command: Command) -> None:
    """G5: with the old id every command is refused, and the new queue of that name is as it was."""
    machine = queue_with(b"a")
    take(machine)
    machine.do(DeleteQueue(queue_id=Q))
    machine.do(CreateQueue(name="q"))
    machine.do(produce(2, b"new"))
    assert machine.do(command) == Failed(QueueRecreated(name="q", queue_id=2))
    reply = machine.ask(Stats(queue_id=QueueId(2), group="default"))
    assert isinstance(reply, GroupStats)
    assert (reply.produced, reply.ready) == (1, 1)


def test_the_rows_of_a_deleted_queue_go_a_few_with_each_entry() -> None:
    """G5: the delete itself is small, no entry removes more than reap_rows, and in the end nothing is left."""
    machine = queue_with(*[b"m"] * 50)
    machine.do(SetLimits(changes=(("reap_rows", 8),)))
    before = rows(machine, Table.BATCH)
    assert machine.do(DeleteQueue(queue_id=Q)) == Done()
    assert before - rows(machine, Table.BATCH) <= 8
    for _ in range(20):
        left = rows(machine, Table.BATCH)
        machine.do(OpenSession(consumer_id="worker"))
        assert 0 <= left - rows(machine, Table.BATCH) <= 8
    assert [rows(machine, table) for table in (Table.BATCH, Table.BLOB, Table.REAP)] == [0, 0, 0]


def test_a_seek_and_a_purge_leave_their_rows_to_later_entries() -> None:
    """G5: both take effect at once, and what they made unreachable goes a few rows at a time."""
    machine = queue_with(*[b"m"] * 60, replay_ms=10**9)
    machine.do(SetLimits(changes=(("reap_rows", 8),)))
    take(machine)
    for version in range(2, 61, 2):
        ack(machine, 1, version, version)
    assert rows(machine, Table.DONE) == 30
    machine.do(Seek(queue_id=Q, group="default", to="earliest"))
    assert (stats(machine).ready, rows(machine, Table.DONE)) == (60, 30)
    machine.do(PurgeQueue(queue_id=Q))
    assert (stats(machine).ready, stats(machine).purged) == (0, 60)
    for _ in range(10):
        left = rows(machine, Table.DONE)
        machine.do(OpenSession(consumer_id="worker"))
        assert left - rows(machine, Table.DONE) <= 8
    assert rows(machine, Table.DONE) <= 1


# What the mutants showed to be untried


def test_a_group_does_not_see_what_the_one_before_it_settled_or_got_back() -> None:
    """G1: rows of groups lie side by side, and none is taken for a neighbour's."""
    machine = queue_with(b"a", b"b", groups=("one", "two"))
    take(machine, group="one")
    ack(machine, 1, 1, 1, "one")
    assert why(machine, 1, "two") == Explained(reason="available")
    take(machine, group="two")
    nack(machine, 1, 2, "one")
    assert isinstance(leased := why(machine, 2, "two"), Explained) and leased.reason == "leased"


def test_earliest_is_what_the_slowest_group_has_not_settled() -> None:
    """G2: not what the fastest one has left."""
    machine = queue_with(b"a", b"b", groups=("fast", "slow"))
    take(machine, group="fast")
    ack(machine, 1, 1, 2, "fast")
    started = machine.do(CreateGroup(queue_id=Q, group="new", start="earliest"))
    assert started == Started(version=Version(1), moved=False)


def test_deaths_are_counted_on_through_a_seek() -> None:
    """G2: the numbers of parked rows, which stay, are not given out again."""
    machine = queue_with(b"a", b"b")
    take(machine, 1)
    nack(machine, 1, 1, dead=True)
    machine.do(Seek(queue_id=Q, group="default", to="earliest"))
    take(machine)
    nack(machine, 2, 2, dead=True)
    reply = machine.ask(DeadLetters(queue_id=Q))
    assert isinstance(reply, DeadListed)
    assert [(row.version, row.dead_seq) for row in reply.rows] == [(1, 1), (2, 2)]


def test_a_new_group_has_what_came_due_before_it_at_once() -> None:
    """G2: it is ready, and not delayed until somebody touches the group."""
    machine = queue_with(MessageParts(b"later", delay_ms=1_000))
    machine.pass_ms(1_000)
    machine.do(CreateGroup(queue_id=Q, group="new"))
    assert (stats(machine, "new").ready, stats(machine, "new").delayed) == (1, 0)


def test_a_queue_that_loses_its_last_group_keeps_its_messages() -> None:
    """G3: without groups nobody has settled anything."""
    machine = queue_with(b"a", b"b")
    machine.do(DeleteGroup(queue_id=Q, group="default"))
    for _ in range(3):
        machine.do(ReportCursor(queue_id=Q, reader="spark", version=0))
    assert described(machine).stored_messages == 2


def test_a_reader_that_reports_and_does_not_read_holds_replay_back_for_a_bounded_time() -> None:
    """G3: the bound is the age of the message, so a reader that is heard of every second cannot hold it for ever."""
    machine = queue_with(b"a", replay_ms=1_000)
    machine.do(SetLimits(changes=(("cursor_hold_ms", 10_000),)))
    take(machine)
    ack(machine, 1, 1, 1)
    machine.do(ReportCursor(queue_id=Q, reader="spark", version=0))
    kept = []
    for _ in range(2):
        machine.pass_ms(5_500)
        machine.do(ReportCursor(queue_id=Q, reader="spark", version=0))
        machine.do(Touch(queue_id=Q))
        kept.append(described(machine).stored_messages)
    assert kept == [1, 0]


def test_a_range_counts_as_many_messages_as_it_has() -> None:
    """G4: three that are acked together are three."""
    machine = queue_with()
    machine.do(produce(Q, b"a", b"b", b"c"))
    take(machine)
    ack(machine, 1, 1, 3)
    assert (stats(machine).acked, stats(machine).ready) == (3, 0)


def test_a_group_does_not_answer_for_what_was_gone_before_it() -> None:
    """G4: behind a stuck head a message was freed; a group that starts at the head never had it."""
    machine = queue_with(b"a", b"b", b"c")
    take(machine)
    ack(machine, 1, 2, 2)
    machine.do(CreateGroup(queue_id=Q, group="new", start="earliest"))
    assert (stats(machine, "new").produced, stats(machine, "new").ready) == (2, 2)
    assert take(machine, group="new").grants == (Grant(1, 1, 1, 1), Grant(3, 3, 1, 1))


def test_a_purge_leaves_nothing_held_back() -> None:
    """G5: a message that was delayed is purged, once, and does not come later."""
    machine = queue_with(b"a", MessageParts(b"later", delay_ms=1_000))
    assert machine.do(PurgeQueue(queue_id=Q)) == Purged(count=2)
    assert (stats(machine).purged, stats(machine).delayed, stats(machine).ready) == (2, 0, 0)
    machine.pass_ms(1_000)
    assert take(machine) == NOTHING


def test_a_seek_leaves_no_row_of_the_former_generation() -> None:
    """G5: some entries later all of its tables are empty."""
    machine = queue_with(b"a", b"b", b"c", b"d")
    take(machine, 3)
    ack(machine, 1, 1, 1)
    nack(machine, 1, 2, delay_ms=60_000)
    machine.do(Seek(queue_id=Q, group="default", to="latest"))
    for _ in range(10):
        machine.do(Touch(queue_id=Q))
    tables = (Table.BACK, Table.WAIT, Table.WAIT_DUE, Table.LEASE, Table.LEASE_DUE, Table.DONE, Table.FLIGHT)
    assert {table.name: rows(machine, table) for table in tables} == dict.fromkeys([table.name for table in tables], 0)
