"""Rule G5: purge and seek are complete at once, whatever comes before the rest of them is done.

`reap_rows` is one, so that what is left to later entries stays undone for as long as a test wants; the tables are
checked against themselves after every entry.
"""

from typing import Any

import pytest

from holdfast.client.protocol.columns import MessageParts
from holdfast.client.protocol.commands import (
    AckBatch,
    Cancel,
    Command,
    CreateGroup,
    DeleteGroup,
    DeleteQueue,
    Extend,
    Lease,
    Nack,
    OpenSession,
    PurgeQueue,
    Redrive,
    Release,
    Seek,
    Touch,
)
from holdfast.client.protocol.errors import LeaseExpired, Overloaded
from holdfast.client.protocol.replies import (
    Done,
    Extended,
    Failed,
    Leased,
    Produced,
    Purged,
    Redriven,
    Settled,
    Started,
)
from holdfast.client.protocol.values import LeaseId, Version
from holdfast.storage.tables import Table
from tests.support import invariants
from tests.support.machine import Machine, produce
from tests.support.watched import Q, Watched, singles


def test_a_seek_counts_delayed_messages_from_any_version() -> None:
    """G5, G4: the number is exact though nobody looked at each batch, also behind the borders of the blocks."""
    machine = Watched(reap_rows=256)
    for number in range(8):
        machine.together(*[produce(Q, MessageParts(b"m", delay_ms=60_000 + number), b"p")] * 50)
    for start in (1, 2, 3, 255, 256, 257, 511, 512, 513, 700, 800, 801):
        assert machine.do(Seek(queue_id=Q, group="default", to=start)) == Started(version=Version(start), moved=False)
        delayed = sum(1 for version in range(start, 801) if version % 2)
        assert (machine.stats().delayed, machine.stats().ready) == (delayed, 801 - start - delayed)


def test_a_seek_counts_a_part_of_a_delayed_batch_and_none_that_is_gone() -> None:
    """G5, G4: a batch counts from the start on, and no more when it was cancelled."""
    machine = Watched(reap_rows=256)
    machine.checked = True
    machine.do(produce(Q, b"first"))
    for _ in range(30):
        machine.do(produce(Q, *[MessageParts(b"m", delay_ms=60_000)] * 10))
    machine.do(Cancel(queue_id=Q, versions=((102, 111), (113, 114))))
    for start, delayed in ((2, 288), (5, 285), (100, 190), (103, 188), (110, 188), (113, 187), (250, 52)):
        machine.do(Seek(queue_id=Q, group="default", to=start))
        assert (start, machine.stats().delayed) == (start, delayed)


def test_a_purge_below_leased_messages_settles_no_further() -> None:
    """L5: over the cap only versions below the highest settled one are delivered, and that is not the line."""
    machine = Watched(6, max_ack_holes=1)
    machine.checked = True
    for _ in range(6):
        machine.take()
    for version in (2, 4):
        machine.nack(version, version, version, delay_ms=0)
    machine.do(PurgeQueue(queue_id=Q))
    machine.finish()
    machine.nack(6, 6, 6, delay_ms=0)
    refused = machine.do(Lease(queue_id=Q, group="default", max_messages=1))
    assert isinstance(refused, Failed) and refused.error.facts["holes"] == 2
    machine.nack(3, 3, 3, delay_ms=0)
    assert [(grant.first, grant.last) for grant in machine.take(100).grants] == [(3, 3)]


# What is true at once, and what may come before the rest is done -----------------------------------------


def open_queue(leases: int = 6, **named: Any) -> Watched:
    """Version 1 acked, 2 returned, 3 delayed, then each second version leased by itself and the others available."""
    machine = Watched(2 * leases + 4, **named)
    for version in range(1, 2 * leases + 4):
        assert machine.take().lease_id == version
    machine.ack(1, 1, 1)
    machine.nack(2, 2, 2, delay_ms=0)
    machine.nack(3, 3, 3, delay_ms=60_000)
    machine.do(Release(queue_id=Q, group="default", ranges=tuple((v, v, v) for v in range(5, 2 * leases + 4, 2))))
    machine.checked = True
    machine.check()
    return machine


LEASED = [4, 6, 8, 10, 12, 14]
PURGED = [2, 3, 5, 7, 9, 11, 13, 15, 16]


def purged_while_open(**wider: bool) -> Watched:
    """A purge whose leases are not sorted in yet."""
    machine = open_queue()
    assert machine.do(
        PurgeQueue(queue_id=Q, in_flight=wider.get("in_flight", False), dead=wider.get("dead", False))
    ) == Purged(count=9 + 6 * bool(wider.get("in_flight")))
    return machine


def test_a_purge_is_complete_at_once() -> None:
    """G5, G4, E1, L5: before and after the rest of it is done, every question has the same answer."""
    machine = purged_while_open()
    before = None
    while True:
        stats = machine.stats()
        assert (stats.ready, stats.delayed, stats.in_flight, stats.acked, stats.purged) == (0, 0, 6, 1, 9)
        assert (stats.holes, stats.produced) == (6, 16)
        assert machine.why(1, *PURGED) == ["acked"] + ["purged"] * 9
        assert machine.why(*LEASED) == ["leased"] * 6
        assert machine.peeked() == LEASED
        assert before is None or before == stats
        before = stats
        if not machine.rows(Table.REAP):
            break
        machine.do(Touch(queue_id=Q))
    assert machine.stored() == 6
    assert [machine.rows(table) for table in (Table.BACK, Table.WAIT, Table.WAIT_DUE)] == [0, 0, 0]


def test_nothing_that_was_purged_is_handed_out() -> None:
    """G5: neither at once, nor while rows are removed, nor when a delay ends that it was away for."""
    machine = purged_while_open()
    machine.together(*[Lease(queue_id=Q, group="default", max_messages=100)] * 3)
    assert machine.take(100).grants == ()
    machine.finish()
    machine.pass_ms(60_000)
    assert [(grant.first, grant.last) for grant in machine.take(100).grants] == [(v, v) for v in LEASED]


@pytest.mark.parametrize("version", LEASED)
def test_a_lease_from_before_a_purge_settles_as_ever(version: int) -> None:
    """G5, S1: whichever of them is acked, nacked or extended before its turn to be sorted in."""
    for settle in ("ack", "nack", "release", "dead", "extend"):
        machine = purged_while_open()
        if settle == "ack":
            assert machine.ack(version, version, version) == Settled(count=1)
            assert machine.why(version) == ["acked"]
        elif settle == "nack":
            assert machine.nack(version, version, version, delay_ms=500) == Settled(count=1)
            assert (machine.why(version), machine.stats().delayed) == (["delayed"], 1)
            machine.pass_ms(500)
        elif settle == "release":
            machine.do(Release(queue_id=Q, group="default", ranges=((version, version, version),)))
        elif settle == "dead":
            machine.nack(version, version, version, dead=True)
            assert (machine.why(version), machine.dead()) == (["dead"], [version])
        else:
            reply = machine.do(Extend(queue_id=Q, group="default", lease_id=LeaseId(version)))
            assert isinstance(reply, Extended) and reply.held == ((version, version),)
        machine.check()
        granted = [(grant.first, grant.last) for grant in machine.take(100).grants]
        assert granted == ([(version, version)] if settle in ("nack", "release") else [])
        machine.finish()
        assert machine.stats().purged == 9
        assert machine.stored() == 6 - (settle in ("ack", "dead"))


def test_leases_from_before_a_purge_expire_as_ever() -> None:
    """G5, S5: all of them return, with their attempts, though none was sorted in before."""
    machine = purged_while_open()
    machine.pass_ms(30_000)
    machine.do(Touch(queue_id=Q))
    assert (machine.stats().ready, machine.stats().in_flight, machine.stats().purged) == (6, 0, 9)
    grants = machine.take(100).grants
    assert [(grant.first, grant.delivery_count, grant.attempts) for grant in grants] == [(v, 2, 2) for v in LEASED]
    machine.finish()
    for version in LEASED:
        machine.ack(16, version, version)
    assert (machine.stats().holes, machine.stats().acked, machine.stored()) == (0, 7, 0)


def test_a_second_purge_may_come_before_the_first_is_done() -> None:
    """G5: what came back between them is purged by the second, what is still leased by neither."""
    machine = purged_while_open()
    machine.do(Release(queue_id=Q, group="default", ranges=((14, 14, 14), (6, 6, 6))))
    machine.do(produce(Q, b"m", b"m"))
    assert machine.do(PurgeQueue(queue_id=Q)) == Purged(count=4)
    assert machine.why(6, 14, 17, 18, 4, 8) == ["purged"] * 4 + ["leased"] * 2
    assert (machine.stats().holes, machine.peeked()) == (4, [4, 8, 10, 12])
    machine.finish()
    assert (machine.stats().holes, machine.stored()) == (4, 4)
    assert machine.do(PurgeQueue(queue_id=Q, in_flight=True)) == Purged(count=4)
    machine.finish()
    assert (machine.stats().purged, machine.stats().holes, machine.stored()) == (17, 0, 0)


def test_a_purge_of_what_is_in_flight_ends_its_leases() -> None:
    """G5, S1: they are over at once, the session has room again, and an auto-acked lease can still be asked for."""
    machine = open_queue(max_in_flight_per_session=30)
    auto = machine.envelope(Lease(queue_id=Q, group="default", max_messages=1, auto_ack=True))
    first = machine.entry([auto])[0].reply
    assert isinstance(first, Leased) and first.grants
    machine.do(PurgeQueue(queue_id=Q, in_flight=True))
    assert (machine.stats().in_flight, machine.stats().purged) == (0, 14)
    assert machine.do(Extend(queue_id=Q, group="default", lease_id=LeaseId(4))) == Failed(
        LeaseExpired(lease_id=LeaseId(4))
    )
    again = machine.entry([auto])[0].reply
    assert isinstance(again, Leased) and (again.grants, again.replayed) == (first.grants, True)
    machine.do(produce(Q, *[b"m"] * 30))
    assert sum(grant.last - grant.first + 1 for grant in machine.take(100).grants) == 30
    machine.finish()
    machine.pass_ms(30_000)
    machine.do(Touch(queue_id=Q))
    machine.finish()
    assert machine.stored() == 30
    machine.do(PurgeQueue(queue_id=Q, in_flight=True))
    machine.finish()
    left = {table.name: machine.rows(table) for table in (Table.LEASE, Table.LEASE_DUE, Table.FLIGHT, Table.PIN)}
    assert set(left.values()) == {0}, left


def test_new_messages_are_leased_and_acked_before_a_purge_is_done() -> None:
    """G5, L5: they lie above the line, and floor and holes are right with what is sorted in below it."""
    machine = purged_while_open()
    assert machine.do(produce(Q, b"m", b"m", b"m")) == Produced(first_version=Version(17), count=3)
    lease = machine.take(100)
    assert [(grant.first, grant.last) for grant in lease.grants] == [(17, 19)]
    machine.ack(lease.lease_id, 17, 17)
    assert machine.stats().holes == 6
    machine.ack(lease.lease_id, 19, 19)
    assert machine.stats().holes == 7
    machine.finish()
    assert machine.stats().holes == 7
    for version in LEASED:
        machine.ack(version, version, version)
    assert (machine.stats().holes, machine.why(18)) == (1, ["leased"])
    machine.ack(lease.lease_id, 18, 18)
    assert (machine.stats().holes, machine.stored()) == (0, 0)


def test_what_is_leased_stays_stored_when_another_group_settles_it_before_a_purge_is_done() -> None:
    """G5, G3: until its lease is sorted in, nobody can tell that this group still needs it."""
    machine = Watched(6, groups=("default", "other"))
    machine.checked = True
    for _ in range(6):
        machine.take()
    theirs = machine.do(Lease(queue_id=Q, group="other", max_messages=6))
    assert isinstance(theirs, Leased)
    purge = PurgeQueue(queue_id=Q, group="default")
    machine.together(purge, AckBatch(queue_id=Q, group="other", ranges=((theirs.lease_id, 1, 6),)))
    assert machine.stored() == 6
    machine.finish()
    machine.nack(6, 6, 6, delay_ms=0)
    assert [(grant.first, grant.last) for grant in machine.take(100).grants] == [(6, 6)]


def test_one_lease_of_many_ranges_is_sorted_in_range_by_range() -> None:
    """G5, S1: what is settled of it in between is settled once, before or after its turn."""
    machine = Watched(13)
    lease = machine.take(12).lease_id
    machine.do(Release(queue_id=Q, group="default", ranges=singles(lease, range(1, 13, 2))))
    machine.checked = True
    assert machine.do(PurgeQueue(queue_id=Q)) == Purged(count=7)
    for version in (2, 12, 6, 4):
        assert machine.ack(lease, version, version) == Settled(count=1)
        assert machine.stats().in_flight == len(machine.peeked())
    assert machine.why(2, 4, 6, 8, 10, 12) == ["acked"] * 3 + ["leased"] * 2 + ["acked"]
    machine.finish()
    assert (machine.stats().holes, machine.stored()) == (2, 2)
    machine.nack(lease, 8, 10, delay_ms=0)
    assert [(grant.first, grant.last) for grant in machine.take(100).grants] == [(8, 8), (10, 10)]


def test_leases_side_by_side_leave_no_hole_between_them() -> None:
    """L5: a purge around three neighbours makes one hole above them, and none in their midst."""
    machine = Watched(6)
    for _ in range(5):
        machine.take()
    machine.nack(1, 1, 1, delay_ms=0)
    machine.nack(5, 5, 5, delay_ms=0)
    machine.checked = True
    machine.do(PurgeQueue(queue_id=Q))
    assert machine.stats().holes == 1
    machine.finish()
    assert (machine.stats().holes, machine.rows(Table.OPEN)) == (1, 1)
    machine.ack(3, 3, 3)
    assert (machine.stats().holes, machine.rows(Table.OPEN)) == (2, 2)


def test_the_last_version_may_be_leased_when_a_purge_comes() -> None:
    """L5: what is settled ends below it, and is one hole less."""
    machine = Watched(4)
    machine.checked = True
    for _ in range(4):
        machine.take()
    machine.nack(2, 2, 2, delay_ms=0)
    assert machine.do(PurgeQueue(queue_id=Q)) == Purged(count=1)
    assert machine.stats().holes == 1
    machine.do(Touch(queue_id=Q))
    machine.do(produce(Q, b"m"))
    machine.ack(machine.take().lease_id, 5, 5)
    assert machine.stats().holes == 2
    machine.ack(4, 4, 4)
    assert machine.stats().holes == 2
    machine.finish()
    machine.ack(3, 3, 3)
    assert machine.stats().holes == 1
    machine.ack(1, 1, 1)
    assert machine.stats().holes == 0


@pytest.mark.parametrize("command", [
    Seek(queue_id=Q, group="default", to=1), Seek(queue_id=Q, group="default", to="latest"),
    DeleteGroup(queue_id=Q, group="default"), DeleteQueue(queue_id=Q),
])  # fmt: skip
def test_a_seek_or_a_delete_may_come_before_a_purge_is_done(command: Command) -> None:
    """G5: nothing of the purge is left over, and nothing of it reaches what comes after."""
    machine = purged_while_open(dead=True)
    reply = machine.do(command)
    assert isinstance(reply, Started | Done), reply
    for _ in range(100):
        machine.do(OpenSession(consumer_id="worker"))
    assert machine.rows(Table.REAP) == 0
    tables = (
        Table.BACK,
        Table.WAIT,
        Table.WAIT_DUE,
        Table.LEASE,
        Table.LEASE_DUE,
        Table.FLIGHT,
        Table.OPEN,
        Table.DONE,
    )
    assert [machine.rows(table) for table in tables if table != Table.DONE] == [0] * 7
    if isinstance(command, Seek) and command.to == 1:
        assert (machine.stats().ready, machine.stats().purged) == (15, 0)  # all that was still stored


def test_a_group_that_asks_for_the_earliest_waits_until_it_is_known() -> None:
    """G2, G5: which version is the lowest that is not settled depends on leases that are not sorted in."""
    machine = purged_while_open()
    create = CreateGroup(queue_id=Q, group="new", start="earliest")
    refused = machine.do(create)
    assert isinstance(refused, Failed) and isinstance(refused.error, Overloaded)
    machine.finish()
    assert machine.do(create) == Started(version=Version(4), moved=False)


def test_a_lease_waits_where_the_holes_may_be_too_many() -> None:
    """L5, G5: it is refused for the moment rather than judged by holes that are not counted yet."""
    machine = open_queue(max_ack_holes=20)
    machine.do(produce(Q, *[b"m"] * 3))
    machine.do(PurgeQueue(queue_id=Q))
    machine.do(produce(Q, b"m"))
    assert machine.take().grants != ()  # six leases cannot make twenty holes
    machine = open_queue(max_ack_holes=5)
    machine.together(PurgeQueue(queue_id=Q), produce(Q, b"m"))
    refused = machine.do(Lease(queue_id=Q, group="default", max_messages=1))
    assert isinstance(refused, Failed) and isinstance(refused.error, Overloaded)
    machine.finish()
    refused = machine.do(Lease(queue_id=Q, group="default", max_messages=1))
    assert isinstance(refused, Failed) and refused.error.facts["holes"] == 6
    machine.ack(4, 4, 4)
    assert machine.take().grants != ()


# Dead letters and redriven ones --------------------------------------------------------------------------


def dead_queue(**named: Any) -> Watched:
    """Versions 1, 3 and 5 are dead; 2 is leased, 4 acked."""
    machine = Watched(6, **named)
    lease = machine.take(5)
    for version in (1, 3, 5):
        machine.nack(lease.lease_id, version, version, dead=True)
    machine.ack(lease.lease_id, 4, 4)
    machine.checked = True
    return machine


def test_purged_dead_letters_are_gone_at_once() -> None:
    """G5, D3, E1: no query shows one, no redrive brings one back, and a dropped one stays dead."""
    machine = dead_queue()
    with machine.store.read() as txn:
        blobs = sum(1 for _ in txn.scan(Table.BLOB, b"", b"\xff" * 64))
    assert machine.do(PurgeQueue(queue_id=Q, dead=True)) == Purged(count=4)
    for _ in range(12):
        assert machine.dead() == []
        assert machine.why(1, 2, 3, 4, 5, 6) == ["purged", "leased", "purged", "acked", "purged", "purged"]
        assert (machine.stats().dead, machine.stats().purged) == (0, 4)
        assert machine.do(Redrive(queue_id=Q, group="default", dead=((3, 3, 2),))) == Redriven(count=0, skipped=1)
    machine.finish()
    assert machine.rows(Table.BLOB) == 1 < blobs
    assert [machine.rows(table) for table in (Table.DEAD, Table.DEAD_AT, Table.DEAD_DUE)] == [0, 0, 0]


def test_a_death_after_a_purge_of_the_dead_is_told_from_those_before() -> None:
    """G5, D2: it has its own number and its own row, and a second purge ends it."""
    machine = dead_queue()
    machine.do(PurgeQueue(queue_id=Q, dead=True))
    machine.nack(1, 2, 2, dead=True)
    assert (machine.dead(), machine.why(1, 2, 3)) == ([2], ["purged", "dead", "purged"])
    assert machine.do(PurgeQueue(queue_id=Q, dead=True)) == Purged(count=1)
    assert machine.why(1, 2, 3) == ["purged"] * 3
    machine.finish()
    assert (machine.why(1, 2, 3), machine.stats().purged, machine.rows(Table.BLOB)) == (["purged"] * 3, 5, 0)


def test_a_seek_between_a_purge_of_the_dead_and_its_end_counts_none_of_them() -> None:
    """G5, G2: the new generation has its own versions, and none of those rows."""
    machine = dead_queue(replay_ms=10**9)
    machine.do(PurgeQueue(queue_id=Q, dead=True))
    machine.do(Seek(queue_id=Q, group="default", to=1))
    machine.finish()
    assert (machine.stats().ready, machine.stats().dead, machine.stats().purged) == (6, 0, 0)
    assert machine.why(*range(1, 7)) == ["available"] * 6


def redriven_queue(**named: Any) -> Watched:
    """Versions 1, 3 and 5 were redriven: 1 is leased, 3 and 5 are available; 2 is leased, 4 acked, 6 available."""
    machine = dead_queue(**named)
    machine.do(Redrive(queue_id=Q, group="default", dead=((1, 1, 1), (3, 3, 2), (5, 5, 3))))
    assert [(grant.first, grant.last) for grant in machine.take().grants] == [(1, 1)]
    return machine


def test_redriven_messages_are_purged_like_others() -> None:
    """G5, D4: but for the leased one, which is settled, redriven and freed as ever."""
    machine = redriven_queue()
    assert machine.do(PurgeQueue(queue_id=Q)) == Purged(count=3)
    assert machine.why(*range(1, 7)) == ["leased", "leased", "purged", "acked", "purged", "purged"]
    assert machine.peeked() == [1, 2]
    machine.do(Nack(queue_id=Q, group="default", ranges=((2, 1, 1),), dead=True))
    assert machine.why(1, 3) == ["dead", "purged"]
    assert machine.do(Redrive(queue_id=Q, group="default", dead=((1, 1, 4),))) == Redriven(count=1, skipped=0)
    machine.finish()
    assert machine.why(1, 3, 5) == ["available", "purged", "purged"]
    assert machine.do(PurgeQueue(queue_id=Q, in_flight=True)) == Purged(count=2)
    machine.finish()
    assert (machine.why(1, 2), machine.stored()) == (["purged", "purged"], 0)


# Gaps before a generation --------------------------------------------------------------------------------


def gapped_queue(**named: Any) -> Watched:
    """Versions 2, 4, … 12 are gone, and 1, 3, … 13 are stored."""
    machine = Watched(13, **named)
    lease = machine.take(13)
    for version in range(2, 13, 2):
        machine.ack(lease.lease_id, version, version)
    machine.checked = True
    machine.check()
    return machine


def test_a_seek_over_gaps_is_complete_at_once() -> None:
    """G2, G4, G5: what is gone counts in nothing, before and after it was taken over."""
    machine = gapped_queue()
    machine.do(Seek(queue_id=Q, group="default", to="earliest"))
    for _ in range(12):
        stats = machine.stats()
        assert (stats.produced, stats.ready, stats.holes) == (7, 7, 6)
        assert machine.why(*range(1, 5)) == ["available", "freed", "available", "freed"]
        machine.do(Touch(queue_id=Q))
    machine.finish()
    assert (machine.stats().produced, machine.stats().holes) == (7, 6)


def test_messages_between_gaps_are_leased_and_acked_before_the_gaps_are_taken_over() -> None:
    """G5, L5: floor and holes come out right, and storage goes."""
    machine = gapped_queue()
    machine.do(Seek(queue_id=Q, group="default", to="earliest"))
    lease = machine.take(100)
    assert [grant.first for grant in lease.grants] == list(range(1, 14, 2))
    machine.do(AckBatch(queue_id=Q, group="default", ranges=singles(lease.lease_id, range(1, 10, 2))))
    assert (machine.stats().acked, machine.stats().holes) == (5, 1)
    machine.finish()
    assert (machine.stats().acked, machine.stats().holes, machine.stored()) == (5, 1, 2)
    machine.ack(lease.lease_id, 11, 11)
    machine.ack(lease.lease_id, 13, 13)
    assert (machine.stats().produced, machine.stats().acked, machine.stats().holes) == (7, 7, 0)


@pytest.mark.parametrize("command", [
    PurgeQueue(queue_id=Q), CreateGroup(queue_id=Q, group="new", start="earliest"),
    Redrive(queue_id=Q, group="default", dead=((1, 1, 1),)),
])  # fmt: skip
def test_what_needs_to_know_the_gaps_waits_for_them(command: Command) -> None:
    """G5: it is refused for the moment, and done when it is asked again."""
    machine = gapped_queue()
    machine.do(Seek(queue_id=Q, group="default", to="earliest"))
    refused = machine.do(command)
    assert isinstance(refused, Failed) and isinstance(refused.error, Overloaded)
    machine.finish()
    assert not isinstance(machine.do(command), Failed)
    machine.finish()
    if isinstance(command, PurgeQueue):
        assert machine.why(1, 2, 3, 4) == ["purged", "freed", "purged", "freed"]
        assert (machine.stats().produced, machine.stats().purged) == (7, 7)


def test_a_lease_waits_where_the_gaps_may_be_too_many_holes() -> None:
    """L5, G5: as after a purge."""
    machine = gapped_queue(max_ack_holes=7)
    machine.do(Seek(queue_id=Q, group="default", to="earliest"))
    refused = machine.do(Lease(queue_id=Q, group="default", max_messages=1))
    assert isinstance(refused, Failed) and isinstance(refused.error, Overloaded)
    machine.finish()
    assert machine.take().grants != ()


@pytest.mark.parametrize("command", [
    Seek(queue_id=Q, group="default", to=7), Seek(queue_id=Q, group="default", to="latest"),
    DeleteGroup(queue_id=Q, group="default"), DeleteQueue(queue_id=Q),
])  # fmt: skip
def test_a_seek_or_a_delete_may_come_before_the_gaps_are_taken_over(command: Command) -> None:
    """G5: what is left of the former one is no affair of the next."""
    machine = gapped_queue()
    machine.do(Seek(queue_id=Q, group="default", to=1))
    assert isinstance(machine.do(command), Started | Done)
    for _ in range(100):
        machine.do(OpenSession(consumer_id="worker"))
    assert machine.rows(Table.REAP) == 0
    if isinstance(command, Seek) and command.to == 7:
        assert (machine.stats().produced, machine.stats().ready, machine.stats().holes) == (4, 4, 3)


# The same on every replica -------------------------------------------------------------------------------


def test_a_replica_that_begins_in_the_middle_of_a_purge_comes_to_the_same_state() -> None:
    """G5: what is left to do is in the tables, so a restart or a snapshot in between changes nothing."""
    machine = purged_while_open(dead=True)
    twin = Machine()
    for index, data in machine.log:
        twin.replay(index, data)
    assert twin.digest() == machine.digest()
    middle = len(machine.log)
    machine.nack(14, 14, 14, delay_ms=0)
    machine.finish()
    for index, data in machine.log[middle:]:
        twin.replay(index, data)
        with twin.store.read() as txn:
            invariants.check(txn)
    assert twin.digest() == machine.digest()
