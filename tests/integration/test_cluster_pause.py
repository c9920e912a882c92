"""A leader that is stopped for longer than an election, and wakes in a cluster that has gone on without it."""

from pathlib import Path

import pytest

from holdfast.client.message import Message, pack
from holdfast.client.protocol.commands import AckBatch, Lease, Produce
from holdfast.client.protocol.errors import HoldfastError, ProducerUnknown
from holdfast.client.protocol.messages import Inquiry, Request
from holdfast.client.protocol.queries import DescribeQueue, Peek, Stats
from holdfast.client.protocol.values import LeaseId, QueueId, SessionId
from tests.support.processes import cluster, until
from tests.support.traffic import HOUR_MS, QUEUE, Traffic

SESSION = SessionId(bytes(range(16)))


@pytest.mark.slow
def test_a_leader_that_sleeps_through_an_election_costs_nothing(tmp_path: Path) -> None:
    """I1, I10: clients go on with the others; what it had not finished is finished, once."""
    with cluster(tmp_path) as processes:
        processes.whole()
        with Traffic(processes, seed=6) as traffic:
            for _ in range(2):
                leader = processes.leader()
                processes.pause(leader)
                traffic.progress(20)
                processes.resume(leader)
                processes.formed()
                traffic.progress(20)
        traffic.check()
        traffic.check_every_node()


def test_an_old_leader_that_wakes_answers_nothing_that_is_wrong(tmp_path: Path) -> None:
    """I26, A2: no stale read, no empty lease of yesterday, no confirm of what is lost."""
    with cluster(tmp_path) as processes, processes.client() as client:
        client.create_queue(QUEUE, visibility_timeout_ms=HOUR_MS)
        client.produce(QUEUE, [b"1", b"2", b"3", b"4", b"5"])
        queue_id = QueueId(client.queue(QUEUE).queue_id)
        old = processes.leader()
        term = processes.status_of(old)["term"]
        with processes.wire(old) as wire:
            wire.open_session(SESSION)
            held = wire.ask(wire.request(_lease(queue_id, 2), SESSION, seq=1, done_below=1)).reply
            lease_id = getattr(held, "lease_id", LeaseId(0))
            processes.pause(old)
            # It will find these in its socket when it wakes, before it hears of anybody else.
            asked: list[Request | Inquiry] = [
                wire.inquiry(Stats(queue_id=queue_id, group="default")),
                wire.inquiry(Peek(queue_id=queue_id, group="default")),
                wire.inquiry(DescribeQueue(name="made-meanwhile")),
                wire.request(_lease(queue_id, 10), SESSION, seq=2, done_below=2),
                wire.request(_ack(queue_id, lease_id), SESSION, seq=3, done_below=2),
                wire.request(_produce(queue_id, "late"), SESSION, seq=4, done_below=2),
            ]
            wire.send(*asked)
            new = processes.leader(among=processes.others(old))
            client.create_queue("made-meanwhile")
            client.lease(QUEUE).ack()
            client.produce(QUEUE, [b"6"])
            before = client.stats(QUEUE)
            assert (before.acked, before.in_flight, before.ready) == (3, 2, 1)
            processes.resume(old)
            outcomes = wire.outcomes(asked)
        until(lambda: processes.status_of(old)["leader"] == new, "the old one follows the new one")
        assert processes.status_of(old)["term"] > term
        for outcome in outcomes:
            # Any answer would have to know of all that the others did. One that does not lead cannot: it says so.
            assert isinstance(outcome, HoldfastError), outcome
            assert outcome.happened == "no", outcome
        after = client.stats(QUEUE)
        assert (after.acked, after.in_flight, after.ready) == (3, 2, 1)
        with pytest.raises(ProducerUnknown):
            client.producer_state(QUEUE, client_id="late")

        # Asked again as the first time, where the leader is now: each happens once.
        with processes.wire(processes.leader()) as wire:
            again = [
                wire.request(_lease(queue_id, 10), SESSION, seq=2, done_below=2),
                wire.request(_ack(queue_id, lease_id), SESSION, seq=3, done_below=2),
                wire.request(_produce(queue_id, "late"), SESSION, seq=4, done_below=2),
            ]
            for each in again:
                wire.ask(each)
        final = client.stats(QUEUE)
        assert (final.acked, final.in_flight, final.ready, final.tail_version) == (5, 1, 1, 7)


def test_a_leader_that_nobody_follows_answers_no_question(tmp_path: Path) -> None:
    """Q1, L7: leadership is confirmed by a majority after the question came. An empty lease is such an answer, too."""
    with cluster(tmp_path) as processes, processes.client() as client:
        client.create_queue(QUEUE)
        queue_id = QueueId(client.queue(QUEUE).queue_id)
        processes.whole()
        leader = processes.leader()
        with processes.wire(leader) as wire:
            wire.open_session(SESSION)
            for name in processes.others(leader):
                processes.pause(name)
            asked: list[Request | Inquiry] = [
                wire.inquiry(Stats(queue_id=queue_id, group="default")),
                wire.request(_lease(queue_id, 1), SESSION, seq=1, done_below=1),
            ]
            wire.send(*asked)
            for outcome in wire.outcomes(asked):
                assert isinstance(outcome, HoldfastError), outcome
                assert outcome.happened == "no", outcome


def _lease(queue_id: QueueId, max_messages: int) -> Lease:
    return Lease(queue_id=queue_id, group="default", max_messages=max_messages)


def _ack(queue_id: QueueId, lease_id: LeaseId) -> AckBatch:
    return AckBatch(queue_id=queue_id, group="default", ranges=((lease_id, 1, 2),))


def _produce(queue_id: QueueId, client_id: str) -> Produce:
    columns, body = pack([b"late"], Message(b""))
    return Produce(queue_id=queue_id, columns=columns, body=body, client_id=client_id, first_seq=1)
