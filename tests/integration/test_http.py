"""The pages on real sockets of the loopback: asked by a library that is not ours, and by clients that misbehave."""

import http.client
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
import trio
import trio.testing

from holdfast.client.protocol.errors import StateBroken
from holdfast.cluster.health import NodeStatus
from holdfast.cluster.http import HEAD_BYTES, HttpLimits, serve_http
from holdfast.cluster.metrics import CONTENT_TYPE, Metrics
from tests.unit.cluster.test_health import HEALTHY

HOST = "127.0.0.1"
HANG_S = 10.0  # a test that hangs fails here; none waits for it
GET = b"GET /healthz HTTP/1.1\r\nHost: n1\r\n\r\n"
pytestmark = pytest.mark.trio


class Site:
    """A server, what it is asked about, and what it said it answered."""

    def __init__(self) -> None:
        self.port = 0
        self.status = HEALTHY
        self.metrics = Metrics()
        self.answered: list[tuple[str, int]] = []

    async def connect(self) -> trio.SocketStream:
        return await trio.open_tcp_stream(HOST, self.port)

    async def send(self, data: bytes) -> bytes:
        """All that comes back."""
        async with await self.connect() as stream:
            await stream.send_all(data)
            return await read_all(stream)

    def page(self) -> str:
        self.metrics.use_status(self.status)
        return self.metrics.render()

    def note(self, path: str, code: int) -> None:
        self.answered.append((path, code))
        self.metrics.http_answered(path, code)


@asynccontextmanager
async def serving(
    limits: HttpLimits | None = None,
    status: Callable[[], NodeStatus] | None = None,
    metrics: Callable[[], str] | None = None,
) -> AsyncIterator[Site]:
    site = Site()
    listeners = await trio.open_tcp_listeners(0, host=HOST)
    site.port = listeners[0].socket.getsockname()[1]
    with trio.fail_after(HANG_S):
        async with trio.open_nursery() as nursery:

            async def serve() -> None:
                await serve_http(
                    listeners,
                    status or (lambda: site.status),
                    metrics or site.page,
                    answered=site.note,
                    limits=limits or HttpLimits(),
                )

            nursery.start_soon(serve)
            yield site
            nursery.cancel_scope.cancel()


async def read_all(stream: trio.SocketStream) -> bytes:
    """All that comes until the other side closes or resets."""
    found = bytearray()
    with suppress(trio.BrokenResourceError):
        while data := await stream.receive_some():
            found += data
    return bytes(found)


def code_of(answer: bytes) -> int:
    version, code, _ = answer.split(b" ", 2)
    assert version == b"HTTP/1.1"
    return int(code)


def body_of(answer: bytes) -> bytes:
    head, _, body = answer.partition(b"\r\n\r\n")
    [length] = [line.split(b": ")[1] for line in head.split(b"\r\n") if line.startswith(b"Content-Length")]
    assert len(body) == int(length)
    return body


async def until(holds: Callable[[], bool]) -> None:
    """`serving` ends a test that waits in vain."""
    while not holds():
        await trio.sleep(0.005)  # between two looks


# Asked as it should be


def fetch(port: int, method: str, path: str) -> tuple[int, str | None, bytes]:
    connection = http.client.HTTPConnection(HOST, port, timeout=HANG_S)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.getheader("Content-Type"), response.read()
    finally:
        connection.close()


async def test_every_page_is_read_by_a_common_client() -> None:
    async with serving() as site:
        for path, key in (("/healthz", "alive"), ("/readyz", "ready"), ("/status", "members")):
            code, kind, body = await trio.to_thread.run_sync(fetch, site.port, "GET", path)
            assert (code, kind) == (200, "application/json")
            assert key in json.loads(body)
        code, kind, body = await trio.to_thread.run_sync(fetch, site.port, "GET", "/metrics")
        assert (code, kind) == (200, CONTENT_TYPE)
        assert b'holdfast_http_requests_total{path="/healthz",code="200"} 1\n' in body


async def test_head_has_the_length_of_get_and_no_body() -> None:
    async with serving() as site:
        whole = await site.send(GET)
        head = await site.send(GET.replace(b"GET", b"HEAD"))
        assert body_of(whole)
        assert head == whole[: -len(body_of(whole))]


async def test_the_answer_follows_the_status() -> None:
    async with serving() as site:
        site.status = replace(HEALTHY, stopping=True)
        assert code_of(await site.send(b"GET /readyz HTTP/1.0\r\n\r\n")) == 503
        assert code_of(await site.send(b"GET /healthz HTTP/1.0\r\n\r\n")) == 200


async def test_answers_are_told_with_their_codes_and_no_path_of_a_stranger() -> None:
    async with serving() as site:
        await site.send(GET)
        await site.send(b"GET /what-a-stranger-says HTTP/1.0\r\n\r\n")
        await site.send(b"DELETE /metrics HTTP/1.0\r\n\r\n")
        await site.send(b"nonsense\r\n")
        assert site.answered == [("/healthz", 200), ("other", 404), ("/metrics", 405), ("other", 400)]


# Asked as it should not be


async def test_a_request_that_comes_byte_by_byte_is_answered() -> None:
    async with serving() as site, await site.connect() as stream:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(len(GET)):
            await stream.send_all(GET[at : at + 1])
        assert code_of(await read_all(stream)) == 200


async def test_the_first_of_pipelined_requests_is_answered_and_the_connection_closed() -> None:
    async with serving() as site:
        answer = await site.send(GET * 100)
        assert answer.count(b"HTTP/1.1 ") == 1
        assert code_of(answer) == 200 and body_of(answer)


async def test_one_who_sends_too_much_still_hears_why() -> None:
    async with serving() as site:
        huge = b"GET / HTTP/1.1\r\nHost: n1\r\nA: " + b"b" * 20 * HEAD_BYTES
        for _ in range(20):
            assert code_of(await site.send(huge)) == 431
        assert code_of(await site.send(b"POST /status HTTP/1.1\r\nHost: n1\r\n\r\n" + b"x" * 20 * HEAD_BYTES)) == 405


async def test_one_who_ends_in_the_middle_is_told_so() -> None:
    async with serving() as site, await site.connect() as stream:
        await stream.send_all(GET[:-4])
        await stream.send_eof()
        assert code_of(await read_all(stream)) == 400


async def test_one_who_half_closes_after_the_request_is_answered() -> None:
    async with serving() as site, await site.connect() as stream:
        await stream.send_all(GET)
        await stream.send_eof()
        assert code_of(await read_all(stream)) == 200


async def test_one_who_asks_nothing_is_told_nothing() -> None:
    async with serving() as site, await site.connect() as stream:
        await stream.send_eof()
        assert await read_all(stream) == b""
        assert site.answered == []


async def test_one_who_is_silent_is_hung_up() -> None:
    async with serving(HttpLimits(request_s=0.05)) as site, await site.connect() as stream:
        assert await read_all(stream) == b""


async def test_one_who_drips_is_told_to_hurry_however_often_something_comes() -> None:
    async with serving(HttpLimits(request_s=0.2)) as site, await site.connect() as stream:
        answer = b""

        async def drip() -> None:
            with trio.move_on_after(5):
                await stream.send_all(b"GET / HTTP/1.1\r\n")
                while not answer:
                    await stream.send_all(b"A: b\r\n")
                    await trio.sleep(0.02)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(drip)
            answer = await read_all(stream)
        assert code_of(answer) == 408


async def test_one_who_takes_no_answer_is_hung_up() -> None:
    page = "a 1\n" * 5_000_000  # more than the kernel takes for one who does not read
    async with serving(HttpLimits(response_s=0.1), metrics=lambda: page) as site:
        await trio.testing.wait_all_tasks_blocked()  # it listens
        idle = trio.lowlevel.current_statistics().tasks_living  # and one more for each connection
        async with await site.connect() as stream:
            await stream.send_all(b"GET /metrics HTTP/1.0\r\n\r\n")
            await until(lambda: site.answered != [])
            await until(lambda: trio.lowlevel.current_statistics().tasks_living == idle)
            assert 0 < len(await read_all(stream)) < len(page)
        assert code_of(await site.send(GET)) == 200


async def test_one_who_goes_away_troubles_nobody() -> None:
    async with serving() as site:
        for data in (b"", GET[:9], GET):
            stream = await site.connect()
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # closing resets
            if data:
                await stream.send_all(data)
            await stream.aclose()
        assert code_of(await site.send(GET)) == 200


async def test_those_who_only_hold_on_keep_nobody_out_and_the_oldest_goes_first() -> None:
    async with serving(HttpLimits(connections=3)) as site:
        held = [await site.connect() for _ in range(3)]
        for stream in held:
            await stream.send_all(GET[:5])
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert code_of(await site.send(GET)) == 200
        assert await read_all(held[0]) == b""
        for stream in held[1:]:
            await stream.send_all(GET[5:])
            assert code_of(await read_all(stream)) == 200
        for stream in held:
            await stream.aclose()


async def test_those_who_are_done_count_no_more() -> None:
    async with serving(HttpLimits(connections=3)) as site, await site.connect() as held:
        await held.send_all(GET[:5])
        for _ in range(10):
            assert code_of(await site.send(GET)) == 200
            await trio.testing.wait_all_tasks_blocked(0.01)
        await held.send_all(GET[5:])
        assert code_of(await read_all(held)) == 200


@pytest.mark.parametrize("limits", [HttpLimits(linger_s=0.05), HttpLimits(linger_s=99, linger_bytes=1_000)])
async def test_one_who_goes_on_sending_after_the_answer_is_hung_up(limits: HttpLimits) -> None:
    async with serving(limits) as site, await site.connect() as stream:
        await stream.send_all(GET)
        assert code_of(await read_all(stream)) == 200
        with pytest.raises(trio.BrokenResourceError):
            while True:
                await stream.send_all(b"x" * 100)
                await trio.sleep(0.01)


async def test_of_many_strangers_only_the_last_few_are_held() -> None:
    async with serving(HttpLimits(connections=8)) as site:
        held = [await site.connect() for _ in range(200)]
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert code_of(await site.send(GET)) == 200
        held_count = 0
        for stream in held:
            with trio.move_on_after(0.01) as scope:
                assert await read_all(stream) == b""
            held_count += scope.cancelled_caught
            await stream.aclose()
        assert held_count < 8


# Trouble on our own side


async def test_a_page_that_cannot_be_made_is_a_500_and_the_server_goes_on() -> None:
    def broken() -> str:
        raise ZeroDivisionError("with facts that are nobody's business")

    async with serving(metrics=broken) as site:
        answer = await site.send(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert code_of(answer) == 500
        assert json.loads(body_of(answer)) == {"error": "ZeroDivisionError"}
        assert code_of(await site.send(GET)) == 200
        assert site.answered == [("/metrics", 500), ("/healthz", 200)]


async def test_a_broken_invariant_is_not_hidden_behind_a_page() -> None:
    def broken() -> NodeStatus:
        raise StateBroken(problem="it does not add up")

    with pytest.RaisesGroup(StateBroken, flatten_subgroups=True):
        async with serving(status=broken) as site:
            await site.send(GET)
            await trio.sleep_forever()
