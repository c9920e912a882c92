"""The pages for operators and their tools: /healthz, /readyz, /metrics and /status, over HTTP/1.1.

One request for each connection, no body, no keep-alive: then where a request ends matters to nobody, and what is left
of HTTP is a request line and headers that are counted and thrown away. That is why there is no library here. Above are
the decisions, without I/O; below is the shell on trio. A page changes nothing, so no method but GET and HEAD is served.
"""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from typing import ClassVar

import trio

from holdfast.client.protocol.errors import InvariantBroken, ProtocolViolated
from holdfast.cluster.accepting import Short, accept_all
from holdfast.cluster.health import Json, NodeStatus, healthz, readyz, status_page
from holdfast.cluster.metrics import CONTENT_TYPE, OTHER

HEAD_BYTES = 8_192  # of the request line and all headers together
HEADERS_MAX = 64
PATHS = ("/healthz", "/readyz", "/metrics", "/status")

_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([!-~]+) HTTP/([0-9])\.([0-9])")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t -~\x80-\xff]*)")
_ABSOLUTE = re.compile(r"https?://[^/?#]*", re.IGNORECASE)


class RequestRefused(ProtocolViolated):
    """This is no request that can be answered; `status` says so in HTTP's words."""

    status: ClassVar[HTTPStatus] = HTTPStatus.BAD_REQUEST


class TargetTooLong(RequestRefused):
    status = HTTPStatus.REQUEST_URI_TOO_LONG


class HeadTooLarge(RequestRefused):
    status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE


class OtherHttp(RequestRefused):
    status = HTTPStatus.HTTP_VERSION_NOT_SUPPORTED


class TooSlow(RequestRefused):
    status = HTTPStatus.REQUEST_TIMEOUT


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str


@dataclass(frozen=True, slots=True)
class Response:
    status: HTTPStatus
    body: bytes
    content_type: str = "application/json"
    allow: bool = False  # tell which methods there are

    def head(self, date: str) -> bytes:
        lines = [
            f"HTTP/1.1 {self.status.value} {self.status.phrase}",
            f"Date: {date}",
            f"Content-Type: {self.content_type}",
            f"Content-Length: {len(self.body)}",
            "Cache-Control: no-store",
            "X-Content-Type-Options: nosniff",
            "Connection: close",
        ]
        if self.allow:
            lines.append("Allow: GET, HEAD")
        return "".join(f"{line}\r\n" for line in (*lines, "")).encode("ascii")


class RequestReader:
    """The head of one request, fed piece by piece. What it says does not depend on how the bytes were cut."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._read_bytes = 0  # of the lines that are done with
        self._looked_bytes = 0  # of the pending ones: no line ends there
        self._request: Request | None = None
        self._minor = 0
        self._header_count = self._host_count = 0

    @property
    def begun(self) -> bool:
        return bool(self._read_bytes or self._pending)

    def feed(self, data: bytes) -> Request | None:
        """The request, once its head is whole; what follows it is not looked at. Raises RequestRefused."""
        self._pending += data
        while (end := self._pending.find(b"\n", self._looked_bytes)) >= 0:
            self._check_size(end + 1)
            line = bytes(self._pending[: end + 1])
            del self._pending[: end + 1]
            self._read_bytes += end + 1
            self._looked_bytes = 0
            if self._take(line):
                return self._request
        self._looked_bytes = len(self._pending)
        self._check_size(len(self._pending))
        return None

    def _check_size(self, line_bytes: int) -> None:
        if self._read_bytes + line_bytes <= HEAD_BYTES:
            return
        if self._request is None:
            raise TargetTooLong(f"the request line is longer than {HEAD_BYTES} bytes")
        raise HeadTooLarge(f"the headers are longer than {HEAD_BYTES} bytes")

    def _take(self, line: bytes) -> bool:
        """One line, its end included; whether the head is whole."""
        if not line.endswith(b"\r\n"):
            raise RequestRefused("a line ends without a carriage return")
        content = line[:-2]
        if self._request is None:
            if content:  # empty lines before a request are what some clients leave behind
                self._take_request_line(content)
            return False
        if not content:
            if self._host_count != 1 and (self._minor or self._host_count):
                raise RequestRefused("exactly one Host header is wanted")
            return True
        self._take_header(content)
        return False

    def _take_request_line(self, content: bytes) -> None:
        found = _LINE.fullmatch(content)
        if found is None:
            raise RequestRefused("the request line is not METHOD TARGET HTTP/1.1")
        method, target, major, minor = (part.decode("ascii") for part in found.groups())
        if major != "1":
            raise OtherHttp("HTTP/1.1 is spoken here")
        self._minor = int(minor)
        self._request = Request(method, _path(target))

    def _take_header(self, content: bytes) -> None:
        found = _HEADER.fullmatch(content)
        if found is None:
            raise RequestRefused("a header is not NAME: VALUE")
        self._header_count += 1
        if self._header_count > HEADERS_MAX:
            raise HeadTooLarge(f"there are more than {HEADERS_MAX} headers")
        self._host_count += found[1].lower() == b"host"


def _path(target: str) -> str:
    """Without the query, and without the host that a proxy puts before it."""
    return _ABSOLUTE.sub("", target, count=1).partition("?")[0]


def answer(request: Request, status: Callable[[], NodeStatus], metrics: Callable[[], str]) -> Response:
    """The page that is asked for, or why there is none."""
    if request.path not in PATHS:
        return _page(HTTPStatus.NOT_FOUND, {"error": "not_found", "paths": list(PATHS)})
    if request.method not in ("GET", "HEAD"):
        return _page(HTTPStatus.METHOD_NOT_ALLOWED, {"error": "method_not_allowed"}, allow=True)
    match request.path:
        case "/metrics":
            return Response(HTTPStatus.OK, metrics().encode("utf-8", "replace"), CONTENT_TYPE)
        case "/healthz":
            code, facts = healthz(status())
        case "/readyz":
            code, facts = readyz(status())
        case _:
            code, facts = HTTPStatus.OK, status_page(status())
    return _page(HTTPStatus(code), facts)


def refusal(error: RequestRefused) -> Response:
    return _page(error.status, {"error": "bad_request", "message": error.message})


def _page(status: HTTPStatus, facts: Mapping[str, Json], allow: bool = False) -> Response:
    return Response(status, json.dumps(facts).encode("ascii") + b"\n", allow=allow)


# The shell


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    connections: int = 64  # one more, and the oldest goes: a probe is never kept out by those who only hold on
    request_s: float = 5.0  # for the whole head, however it drips
    response_s: float = 10.0
    linger_s: float = 1.0  # for the other side to read the answer; see `_linger`
    linger_bytes: int = 262_144


_LIMITS = HttpLimits()
_RECEIVE_BYTES = 4_096


async def serve_http(
    listeners: list[trio.SocketListener],
    status: Callable[[], NodeStatus],
    metrics: Callable[[], str],
    *,
    answered: Callable[[str, int], None] = lambda path, code: None,
    short: Short = lambda error: None,
    limits: HttpLimits = _LIMITS,
) -> None:
    """Serve the pages until cancelled. The callables are called on this thread, between two awaits.

    What `status` or `metrics` raises is answered with 500 and ends nothing, for asking how a node is must not stop it;
    but InvariantBroken passes through, as everywhere. `answered` hears of each answer with
    its path (one of PATHS, or `other`) and its code, `short` of connections that the system has no descriptor for.
    """
    server = _Server(status, metrics, answered, limits)
    async with trio.open_nursery() as nursery:
        await accept_all(listeners, server.converse, short, nursery)


class _Server:
    def __init__(
        self,
        status: Callable[[], NodeStatus],
        metrics: Callable[[], str],
        answered: Callable[[str, int], None],
        limits: HttpLimits,
    ) -> None:
        self._status, self._metrics = status, metrics
        self._answered, self._limits = answered, limits
        self._open: dict[trio.CancelScope, None] = {}  # oldest first

    async def converse(self, stream: trio.SocketStream) -> None:
        """One connection from its begin to its end; never raises what the other side can cause."""
        with trio.CancelScope() as scope:
            if len(self._open) >= self._limits.connections:
                oldest = next(iter(self._open))
                del self._open[oldest]
                oldest.cancel()
            self._open[scope] = None
            try:
                with suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError):
                    await self._exchange(stream)
            finally:
                self._open.pop(scope, None)
                await trio.aclose_forcefully(stream)

    async def _exchange(self, stream: trio.SocketStream) -> None:
        path, with_body = OTHER, True
        try:
            request = await self._receive(stream)
        except RequestRefused as error:
            response = refusal(error)
        else:
            if request is None:
                return
            with_body = request.method != "HEAD"
            path = request.path if request.path in PATHS else OTHER
            response = self._answer(request)
        self._answered(path, response.status.value)
        with trio.move_on_after(self._limits.response_s) as scope:
            await stream.send_all(response.head(formatdate(usegmt=True)) + (response.body if with_body else b""))
            await stream.send_eof()
        if not scope.cancelled_caught:
            await self._linger(stream)

    async def _receive(self, stream: trio.SocketStream) -> Request | None:
        """The request; None of one who asks nothing. Raises RequestRefused."""
        reader = RequestReader()
        with trio.move_on_after(self._limits.request_s):
            while data := await stream.receive_some(_RECEIVE_BYTES):
                request = reader.feed(bytes(data))
                if request is not None:
                    return request
            if reader.begun:
                raise RequestRefused("the request ends before its head does")
            return None
        if reader.begun:
            raise TooSlow(f"a request has to come within {self._limits.request_s:g} s")
        return None

    def _answer(self, request: Request) -> Response:
        try:
            return answer(request, self._status, self._metrics)
        except InvariantBroken:
            raise
        except Exception as error:
            return _page(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": type(error).__name__})

    async def _linger(self, stream: trio.SocketStream) -> None:
        """Read on for a moment. Closed with bytes unread, TCP resets, and the answer may be lost on its way."""
        rest = self._limits.linger_bytes
        with trio.move_on_after(self._limits.linger_s):
            while rest > 0 and (data := await stream.receive_some(_RECEIVE_BYTES)):
                rest -= len(data)
