"""A client's connection, byte by byte: what it may ask for, and what closes it."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.client.protocol import codec
from holdfast.client.protocol.commands import OpenSession
from holdfast.client.protocol.errors import BadFrame, NotLeader, Overloaded, VersionUnsupported
from holdfast.client.protocol.frames import FrameReader, write_frame
from holdfast.client.protocol.limits import FRAME_BODY_BYTES
from holdfast.client.protocol.messages import (
    Answered,
    Declined,
    FromClient,
    FromNode,
    Hello,
    Inquiry,
    Ping,
    Pong,
    Request,
    Welcome,
    Withdraw,
)
from holdfast.client.protocol.queries import ListQueues
from holdfast.client.protocol.replies import Answer, Done, MessageBatch, Messages
from holdfast.client.protocol.values import Columns, Place, ends_of
from holdfast.cluster.connection import Connection, Greeting


def greet() -> Greeting:
    return Greeting("cluster-1", "a")


DONE = Answer(Place(3, 0, 1_000), Done())


def wire(*messages: FromClient) -> bytes:
    parts: list[bytes] = []
    for message in messages:
        header, body = codec.encode_message(message)
        parts += [bytes(buffer) for buffer in write_frame(header, *body)]
    return b"".join(parts)


def said(connection: Connection) -> list[FromNode]:
    frames = FrameReader().feed(b"".join(bytes(buffer) for buffer in connection.take()))
    return [codec.decode_from_node(frame.header, frame.body) for frame in frames]


def request(number: int) -> Request:
    return Request(request_id=number, command=OpenSession(), session=b"s" * 16)  # type: ignore[arg-type]


def greeted(requests_open: int = 4) -> Connection:
    connection = Connection(greet, requests_open)
    connection.feed(wire(Hello(client="test")))
    connection.take()
    return connection


def test_a_hello_is_answered_with_the_version_and_the_place() -> None:
    connection = Connection(greet)
    assert connection.feed(wire(Hello(client="test"))) == []
    assert said(connection) == [Welcome(version=1, cluster_id="cluster-1", node="a")]
    assert (connection.greeted, connection.closing) == (True, False)


def test_a_client_that_speaks_no_version_of_ours_is_told_and_closed() -> None:
    connection = Connection(greet)
    connection.feed(wire(Hello(versions=(7, 9), client="test")))
    assert said(connection) == [Declined(0, VersionUnsupported(version=9, low=1, high=1))]
    assert connection.closing


@pytest.mark.parametrize("first", [request(1), Ping(1), Inquiry(request_id=1, query=ListQueues())])
def test_nothing_comes_before_the_hello(first: FromClient) -> None:
    connection = Connection(greet)
    assert connection.feed(wire(first, request(2))) == []
    assert [type(message) for message in said(connection)] == [Declined]
    assert connection.closing


def test_requests_and_inquiries_are_given_and_answered_by_their_ids() -> None:
    connection = greeted()
    asked: list[Request | Inquiry] = [request(1), Inquiry(request_id=2, query=ListQueues()), request(3)]
    assert [one for one, _ in connection.feed(wire(*asked))] == asked
    connection.answer(3, DONE)
    connection.decline(1, NotLeader(leader="127.0.0.1:7402"))
    assert said(connection) == [Answered(3, DONE), Declined(1, NotLeader(leader="127.0.0.1:7402"))]
    assert connection.open_requests == (2,)


def test_a_request_above_the_window_is_declined_and_the_connection_goes_on() -> None:
    connection = greeted(requests_open=2)
    assert [one for one, _ in connection.feed(wire(*map(request, (1, 2, 3))))] == [request(1), request(2)]
    declined = said(connection)
    assert [type(one.error) for one in declined if isinstance(one, Declined)] == [Overloaded]
    connection.answer(1, DONE)
    assert [one for one, _ in connection.feed(wire(request(3)))] == [request(3)]


def test_a_request_id_that_is_in_use_breaks_the_protocol() -> None:
    connection = greeted()
    connection.feed(wire(request(1)))
    assert connection.feed(wire(request(1))) == []
    assert connection.closing


def test_an_answer_that_nobody_waits_for_is_not_sent() -> None:
    connection = greeted()
    connection.feed(wire(request(1)))
    for _ in range(2):
        connection.answer(1, DONE)
    connection.decline(7, NotLeader(leader=None))
    assert said(connection) == [Answered(1, DONE)]


def test_a_ping_is_answered_without_a_request() -> None:
    connection = greeted()
    assert connection.feed(wire(Ping(9))) == []
    assert said(connection) == [Pong(9)]


def test_a_second_hello_breaks_the_protocol() -> None:
    connection = greeted()
    connection.feed(wire(Hello(client="again")))
    assert connection.closing


def test_an_answer_too_large_for_a_frame_is_declined_by_its_limit() -> None:
    connection = greeted()
    connection.feed(wire(request(1)))
    body = bytes(FRAME_BODY_BYTES + 1)
    batch = MessageBatch(1, 0, 0, "c", 1, Columns(ends=ends_of([len(body)])), body)
    connection.answer(1, Answer(Place(1, -1, 0), Messages(batches=(batch,), next_version=None)))
    assert [type(message) for message in said(connection)] == [Declined]
    assert connection.open_requests == ()


def test_what_is_unsent_is_counted() -> None:
    connection = greeted()
    connection.feed(wire(request(1), Ping(2)))
    connection.answer(1, DONE)
    assert connection.unsent_bytes == sum(map(len, connection.take())) > 0
    assert (connection.unsent_bytes, connection.has_unsent) == (0, False)


def test_who_is_turned_away_at_the_hello_is_told_why() -> None:
    def refuse() -> Greeting:
        raise Overloaded(limit_name="connections", limit=7, retry_after_ms=50)

    connection = Connection(refuse)
    assert connection.feed(wire(Hello(client="test"), request(1))) == []
    [declined] = said(connection)
    assert declined == Declined(0, Overloaded(limit_name="connections", limit=7, retry_after_ms=50))
    assert (connection.closing, connection.greeted) == (True, False)
    assert connection.error == declined.error


def test_an_unfinished_frame_has_the_number_that_it_will_be_counted_under() -> None:
    """So that more of the same frame can be told from the next one."""
    stream, hello = wire(request(1), request(2)), wire(Hello(client="test"))
    connection = Connection(greet)
    connection.feed(hello[:3])
    assert (connection.unfinished, connection.unfinished_bytes) == (1, 3)
    connection.feed(hello[3:9])
    assert (connection.unfinished, connection.unfinished_bytes) == (1, 9)
    connection.feed(hello[9:])
    assert (connection.unfinished, connection.unfinished_bytes) == (0, 0)
    connection.feed(stream[:-1])
    assert connection.unfinished == 3
    connection.feed(stream[-1:] + b"\0")
    assert connection.unfinished == 4


@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_any_cutting_of_the_stream_asks_for_the_same(cuts: Sequence[int]) -> None:
    stream = wire(Hello(client="test"), request(1), Ping(5), request(2))
    connection = Connection(greet)
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    asked = [one for low, high in pairwise(places) for one, _ in connection.feed(stream[low:high])]
    assert asked == [request(1), request(2)]
    assert [type(message) for message in said(connection)] == [Welcome, Pong]


@given(data=st.binary(max_size=200))
def test_any_bytes_at_all_raise_nothing(data: bytes) -> None:
    for connection in (Connection(greet), greeted()):
        connection.feed(data)
        connection.feed(data)
        for message in said(connection):
            assert isinstance(message, Declined | Welcome | Pong)


def test_a_broken_stream_is_not_read_any_further() -> None:
    connection = greeted()
    connection.feed(b"\xff" * 16)
    assert connection.feed(wire(request(1))) == []
    refusals = [message for message in said(connection) if isinstance(message, Declined)]
    assert [type(refusal.error) for refusal in refusals] == [BadFrame]


def test_a_withdrawal_is_for_a_request_that_is_open() -> None:
    connection = greeted()
    connection.feed(wire(request(7)))
    assert [asked for asked, _ in connection.feed(wire(Withdraw(7)))] == [Withdraw(7)]
    connection.answer(7, DONE)
    assert connection.feed(wire(Withdraw(7), Withdraw(8))) == []
    assert not connection.closing
