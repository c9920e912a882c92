"""HTTP without I/O: what a request is does not depend on how it was cut, and what is none is refused by its code."""

import json
from collections.abc import Iterable
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cluster.health import NodeStatus
from holdfast.cluster.http import (
    HEAD_BYTES,
    HEADERS_MAX,
    PATHS,
    HttpLimits,
    Request,
    RequestReader,
    RequestRefused,
    Response,
    answer,
    refusal,
)
from holdfast.cluster.metrics import CONTENT_TYPE
from tests.unit.cluster.test_health import HEALTHY

DOC = (Path(__file__).parents[3] / "docs" / "operating.md").read_text()
PLAIN = b"GET /healthz HTTP/1.1\r\nHost: n1\r\n\r\n"


def outcome(pieces: Iterable[bytes]) -> Request | HTTPStatus | None:
    """The request, the code of its refusal, or None while more is wanted."""
    reader = RequestReader()
    try:
        for piece in pieces:
            request = reader.feed(piece)
            if request is not None:
                return request
    except RequestRefused as error:
        return error.status
    return None


def bytewise(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


def with_headers(*headers: bytes) -> bytes:
    return b"GET / HTTP/1.1\r\nHost: n1\r\n" + b"".join(header + b"\r\n" for header in headers) + b"\r\n"


# Requests


@pytest.mark.parametrize(
    ("data", "request_"),
    [
        (PLAIN, Request("GET", "/healthz")),
        (b"HEAD /status HTTP/1.1\r\nhost:n1\r\n\r\n", Request("HEAD", "/status")),
        (b"GET /metrics HTTP/1.0\r\n\r\n", Request("GET", "/metrics")),
        (b"GET /metrics?a=b?c HTTP/1.1\r\nHost: n1\r\n\r\n", Request("GET", "/metrics")),
        (b"GET http://n1:7411/readyz HTTP/1.1\r\nHost: n1\r\n\r\n", Request("GET", "/readyz")),
        (b"GET http://n1?/readyz HTTP/1.1\r\nHost: n1\r\n\r\n", Request("GET", "")),
        (b"POST / HTTP/1.1\r\nHost: n1\r\nContent-Length: 4\r\n\r\nbody", Request("POST", "/")),
        (b"OPTIONS * HTTP/1.1\r\nHost: n1\r\n\r\n", Request("OPTIONS", "*")),
        (b"\r\n\r\n" + PLAIN, Request("GET", "/healthz")),
        (PLAIN + b"GET /status HTTP/1.1\r\n", Request("GET", "/healthz")),
        (PLAIN + b"\x00\xff" * 10_000, Request("GET", "/healthz")),
        (with_headers(b"Empty:", b"Latin: caf\xe9", b"Tab: a\tb", b"A:B:C"), Request("GET", "/")),
        (with_headers(*[b"A: b"] * (HEADERS_MAX - 1)), Request("GET", "/")),
    ],
)
def test_a_request_is_read_at_once_and_byte_by_byte(data: bytes, request_: Request) -> None:
    assert outcome([data]) == outcome(bytewise(data)) == request_


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /healthz HTTP/1.1\n\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: n1\n\r\n", 400),
        (b"GET  /healthz HTTP/1.1\r\n\r\n", 400),
        (b" GET /healthz HTTP/1.1\r\n\r\n", 400),
        (b"GET /healthz\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1 \r\n\r\n", 400),
        (b"GET /healthz http/1.1\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.10\r\n\r\n", 400),
        (b"GET /health\x00z HTTP/1.1\r\n\r\n", 400),
        (b"GET /h\xc3\xa9 HTTP/1.1\r\n\r\n", 400),
        (b"GET /healthz\rHTTP/1.1\r\n\r\n", 400),
        (b"G(T /healthz HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n", 400),  # someone speaks TLS
        (b"GET /healthz HTTP/2.0\r\n", 505),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (b"GET /healthz HTTP/0.9\r\n", 505),
        (b"GET /healthz HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"GET /healthz HTTP/1.1\r\nHost: a\r\nhOST: b\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (with_headers(b"No colon"), 400),
        (with_headers(b"Space : x"), 400),
        (with_headers(b": no name"), 400),
        (with_headers(b"A: b", b" folded"), 400),
        (with_headers(b"A: b\x00c"), 400),
        (with_headers(b"A: b\rc"), 400),
        (with_headers(b"A: b\x7fc"), 400),
        (with_headers(*[b"A: b"] * HEADERS_MAX), 431),
        (with_headers(b"A: " + b"b" * HEAD_BYTES), 431),
        (b"GET /" + b"a" * HEAD_BYTES + b" HTTP/1.1\r\n\r\n", 414),
        (b"\r\n" * HEAD_BYTES, 414),
    ],
)  # fmt: skip
def test_what_is_no_request_is_refused_at_once_and_byte_by_byte(data: bytes, status: int) -> None:
    assert outcome([data]) == outcome(bytewise(data)) == status


def test_the_largest_head_is_taken_and_one_byte_more_is_not() -> None:
    fits = with_headers(b"A: ".ljust(HEAD_BYTES - len(with_headers()) - 2, b"b"))
    assert len(fits) == HEAD_BYTES
    assert outcome([fits]) == Request("GET", "/")
    assert outcome([fits.replace(b"A: ", b"A: b")]) == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE


def test_an_endless_line_is_refused_before_it_is_held() -> None:
    reader = RequestReader()
    with pytest.raises(RequestRefused) as refused:
        for _ in range(HEAD_BYTES + 1):
            reader.feed(b"a")
    assert refused.value.status == HTTPStatus.REQUEST_URI_TOO_LONG


@pytest.mark.parametrize("length", range(len(PLAIN)))
def test_a_head_that_is_not_whole_is_no_request_yet(length: int) -> None:
    assert outcome([PLAIN[:length]]) is None


def test_a_reader_knows_whether_anything_came() -> None:
    reader = RequestReader()
    assert not reader.begun
    reader.feed(b"\r\n")
    assert reader.begun


TOKENS = [
    b"GET", b"HEAD", b" ", b"/", b"/healthz", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"\r\n", b"\n", b"\r", b"Host: a",
    b"Host", b":", b"A: b", b"\x00", b"\xff", b"\t", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.0\r\n\r\n", b"x" * 5_000,
    b"A: b\r\n" * 40,
]  # fmt: skip


@pytest.mark.fuzz
@given(tokens=st.lists(st.sampled_from(TOKENS) | st.binary(max_size=5), max_size=20), data=st.data())
def test_the_outcome_does_not_depend_on_where_the_bytes_were_cut(tokens: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(tokens)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    pieces = [whole[first:last] for first, last in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert outcome([whole]) == outcome(pieces)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_a_refusal_or_unfinished(data: bytes) -> None:
    found = outcome([data])
    assert found is None or isinstance(found, Request) or found.value in (400, 414, 431, 505)


# Answers


def ask(method: str, path: str, status: NodeStatus = HEALTHY) -> Response:
    return answer(Request(method, path), lambda: status, lambda: "a 1\n")


def unasked() -> NodeStatus:
    raise AssertionError("nobody asked for the status")


@pytest.mark.parametrize(
    ("path", "key", "value"),
    [("/healthz", "alive", True), ("/readyz", "ready", True), ("/status", "node", "n1")],
)
def test_each_page_answers_in_json(path: str, key: str, value: object) -> None:
    response = ask("GET", path)
    assert (response.status, response.content_type) == (200, "application/json")
    assert json.loads(response.body)[key] == value


def test_metrics_answer_in_their_own_format_and_do_not_ask_for_a_status() -> None:
    response = answer(Request("GET", "/metrics"), unasked, lambda: "a 1\n")
    assert response == Response(HTTPStatus.OK, b"a 1\n", CONTENT_TYPE)


def test_a_no_is_503_with_its_reason() -> None:
    response = ask("GET", "/readyz", replace(HEALTHY, leader=None))
    assert response.status == 503
    assert json.loads(response.body)["reasons"] == [{"reason": "no_leader", "term": 3}]


@pytest.mark.parametrize("path", ["", "/", "*", "/healthz/", "/HEALTHZ", "//healthz", "/%68ealthz", "/../status"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_another_page_is_404(method: str, path: str) -> None:
    response = answer(Request(method, path), unasked, lambda: "")
    assert response.status == 404
    assert not response.allow


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "get", "X"])
def test_another_method_is_405_and_says_which_there_are(method: str, path: str) -> None:
    response = answer(Request(method, path), unasked, lambda: "")
    assert response.status == 405
    assert b"\r\nAllow: GET, HEAD\r\n" in response.head("now")


@pytest.mark.parametrize("path", PATHS)
def test_head_is_answered_as_get_is(path: str) -> None:
    assert ask("HEAD", path) == ask("GET", path)


def test_an_answer_has_its_length_closes_and_is_not_kept() -> None:
    assert ask("GET", "/metrics").head("Thu, 02 Jan 2025 03:04:05 GMT").decode() == (
        "HTTP/1.1 200 OK\r\n"
        "Date: Thu, 02 Jan 2025 03:04:05 GMT\r\n"
        "Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
        "Content-Length: 4\r\n"
        "Cache-Control: no-store\r\n"
        "X-Content-Type-Options: nosniff\r\n"
        "Connection: close\r\n"
        "\r\n"
    )


def test_a_refusal_says_why_and_quotes_nothing() -> None:
    with pytest.raises(RequestRefused) as refused:
        RequestReader().feed(b"<script> / HTTP/1.1\r\n")
    response = refusal(refused.value)
    assert response.status == 400
    assert json.loads(response.body) == {
        "error": "bad_request",
        "message": "the request line is not METHOD TARGET HTTP/1.1",
    }


def test_the_document_names_every_page_bound_and_code() -> None:
    section = DOC[DOC.index("## Health") : DOC.index("## Metrics")]
    assert [path for path in PATHS if f"| `{path}` |" not in section] == []
    limits = HttpLimits()
    assert f"at most {HEAD_BYTES // 1024} KiB and {HEADERS_MAX} headers" in section
    assert f"which has {limits.request_s:g} s to come" in section
    assert f"answer has {limits.response_s:g} s to be taken" in " ".join(section.split())
    assert f"more than {limits.connections} connections" in section
    kinds: list[type[RequestRefused]] = [RequestRefused, *RequestRefused.__subclasses__()]
    codes = {int(kind.status) for kind in kinds} | {404, 405, 500}
    assert [code for code in codes if f"| {code}" not in section and f", {code} |" not in section] == []
