"""What a consumer hands out of a lease, and when it extends it: pure, with a clock by hand."""

import pytest

from holdfast.client.consuming import Hand, Wanted
from holdfast.client.leases import Held
from holdfast.client.protocol.columns import MessageParts, pack
from holdfast.client.protocol.errors import BadValue
from holdfast.client.protocol.replies import Answer, Extended, Grant, Leased, MessageBatch
from holdfast.client.protocol.values import LeaseId, Place

TERM_S = 30.0


def held(count: int = 4) -> Held:
    """Messages 1 to `count`, leased for 30 s at committed time 1,000."""
    columns, body = pack([MessageParts(b"x")] * count)
    batch = MessageBatch(first=1, generation=0, enqueued_ms=0, client_id="", first_seq=1, columns=columns, body=body)
    leased = Leased(lease_id=LeaseId(7), deadline_ms=31_000, grants=(Grant(1, count, 1, 1),), batches=(batch,))
    return Held("q", "default", 1, Answer(Place(1, 0, 1_000), leased), auto_ack=False)


def taken(hand: Hand) -> list[int]:
    versions = []
    while (message := hand.take()) is not None:
        versions.append(message.version)
    return versions


def test_messages_are_handed_out_in_order_and_once() -> None:
    hand = Hand(held(), 0.0)
    assert taken(hand) == [1, 2, 3, 4]
    assert hand.rest() == []


def test_what_is_not_handed_out_is_the_rest() -> None:
    hand = Hand(held(), 0.0)
    hand.take()
    assert hand.rest() == [2, 3, 4]
    assert taken(hand) == [] and hand.rest() == []


def test_what_was_settled_meanwhile_is_neither_handed_out_nor_left() -> None:
    lease = held()
    hand = Hand(lease, 0.0)
    lease.settled("ack", [2, 3])
    assert hand.take() is not None
    assert hand.rest() == [4]


def test_a_lease_is_extended_when_half_of_its_time_is_over_and_something_is_left() -> None:
    hand = Hand(held(), 100.0)
    assert not hand.is_due(100.0 + TERM_S / 2 - 0.1)
    assert hand.is_due(100.0 + TERM_S / 2)
    taken(hand)
    assert not hand.is_due(100.0 + TERM_S / 2), "nothing would be gained"


def test_an_extended_lease_is_due_when_half_of_what_it_gained_is_over() -> None:
    hand = Hand(held(), 100.0)
    hand.extended(Extended(deadline_ms=31_000 + 16_000, held=((1, 4),)), 116.0)
    assert not hand.is_due(116.0 + 14.9)  # it ends at 146
    assert hand.is_due(116.0 + 15.0)


def test_what_an_extension_says_is_gone_is_not_handed_out() -> None:
    lease = held()
    hand = Hand(lease, 0.0)
    reply = Extended(deadline_ms=40_000, held=((3, 4),))
    lease.extended(reply)
    hand.extended(reply, 15.0)
    assert taken(hand) == [3, 4]


def test_a_lost_lease_hands_out_nothing_more() -> None:
    hand = Hand(held(), 0.0)
    hand.lost()
    assert taken(hand) == [] and hand.rest() == [] and not hand.is_due(1_000.0)


def test_asking_without_a_pause_is_refused() -> None:
    with pytest.raises(BadValue, match="until_empty"):
        Wanted(queue="q", group="g", max_messages=1, wait_ms=0, visibility_timeout_ms=None, until_empty=False)
