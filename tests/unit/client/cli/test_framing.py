"""Messages in a stream of bytes: lines and lengths, in pieces of any size, both ways."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.client.cli.framing import BATCH_MESSAGES, BadInput, Framing, NotALine, framed, read_messages
from holdfast.client.protocol.limits import FRAME_BODY_BYTES
from tests.unit.client.cli.conftest import Cli


def pieces(data: bytes, size: int) -> Callable[[int], bytes]:
    """A stream that gives so many bytes at a time."""
    left = [data]

    def read(_: int) -> bytes:
        given, left[0] = left[0][:size], left[0][size:]
        return given

    return read


@given(st.lists(st.binary(max_size=40), max_size=30), st.integers(1, 50))
def test_what_is_framed_by_lengths_is_read_as_it_was(messages: list[bytes], size: int) -> None:
    data = b"".join(framed(message, "lengths") for message in messages)
    assert [each for batch in read_messages(pieces(data, size), "lengths") for each in batch] == messages


@given(st.lists(st.binary(max_size=40).filter(lambda each: b"\n" not in each), max_size=30), st.integers(1, 50))
def test_what_is_framed_by_lines_is_read_as_it_was(messages: list[bytes], size: int) -> None:
    data = b"".join(framed(message, "lines") for message in messages)
    assert [each for batch in read_messages(pieces(data, size), "lines") for each in batch] == messages


def test_a_payload_that_is_no_line_is_not_printed_as_one() -> None:
    with pytest.raises(NotALine):
        framed(b"a\nb", "lines")
    assert framed(b"a\nb", "lengths") == b"\x00\x00\x00\x03a\nb"


@pytest.mark.parametrize("data", [b"\x00\x00\x00\x05hell", b"\x00\x00", b"\x00\x00\x00\x01a\x00"])
def test_a_stream_that_ends_in_a_message_is_refused_behind_what_was_whole(data: bytes) -> None:
    found: list[bytes] = []
    with pytest.raises(BadInput):
        for batch in read_messages(pieces(data, 3), "lengths"):
            found += batch
    assert found == ([b"a"] if data.startswith(b"\x00\x00\x00\x01") else [])


def test_what_has_no_lengths_is_noticed_before_it_fills_the_memory() -> None:
    assert int.from_bytes(b"hell", "big") > FRAME_BODY_BYTES
    with pytest.raises(BadInput, match="announced"):
        list(read_messages(pieces(b"hello world\n", 100), "lengths"))


@pytest.mark.parametrize("framing", ["lines", "lengths"])
def test_many_messages_come_in_batches(framing: Framing) -> None:
    data = framed(b"m", framing) * (2 * BATCH_MESSAGES + 1)
    sizes = [len(batch) for batch in read_messages(pieces(data, 1 << 20), framing)]
    assert sizes == [BATCH_MESSAGES, BATCH_MESSAGES, 1]


# On the command line -----------------------------------------------------------------------------------


def test_messages_travel_from_file_to_file_by_their_lengths(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "messages"
    file.write_bytes(framed(b"one", "lengths") + framed(b"t\nwo", "lengths"))
    cli.ok("queue", "create", "q")
    assert cli.ok("produce", "q", "--file", str(file), "--as", "lengths").lines == ["1", "2"]
    assert cli.ok("consume", "q", "--as", "lengths").out == "\x00\x00\x00\x03one\x00\x00\x00\x04t\nwo"
    piped = cli.ok("produce", "q", "--as", "lengths", stdin=file.read_bytes())
    assert piped.lines == ["3", "4"]


def test_a_file_is_one_message_or_its_lines(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "messages"
    file.write_bytes(b"one\ntwo\n")
    cli.ok("queue", "create", "q")
    assert cli.ok("produce", "q", "--file", str(file)).lines == ["1"]
    assert cli.ok("produce", "q", "--file", str(file), "--as", "lines").lines == ["2", "3"]
    assert cli.ok("produce", "q", "--file", "-", "--as", "lines", stdin=b"three\n").lines == ["4"]
    assert cli.ok("consume", "q", "--max", "1", "--as", "lengths").out == "\x00\x00\x00\x08one\ntwo\n"
    assert cli.ok("consume", "q", "--as", "lines").lines == ["one", "two", "three"]


def test_a_message_that_is_no_line_goes_back_unstarted(cli: Cli) -> None:
    cli.ok("queue", "create", "q")
    cli.ok("produce", "q", "good", "b\nad")
    refused = cli("consume", "q", "--as", "lines")
    assert (refused.code, refused.out) == (1, "good\n")
    assert "--as lengths" in refused.err
    stats = cli.ok("stats", "q", "--json").object
    assert (stats["ready"], stats["in_flight"], stats["acked"]) == (2, 0, 0)


@pytest.mark.parametrize(
    "command",
    [
        ["produce", "q", "text", "--as", "lines"],
        ["produce", "q", "--file", "/nonexistent", "--as", "lines"],
        ["consume", "q", "--as", "lines", "--json"],
        ["consume", "q", "--as", "words"],
    ],
    ids=" ".join,
)
def test_what_contradicts_itself_is_wrong_usage(cli: Cli, command: list[str]) -> None:
    cli.ok("queue", "create", "q")
    assert cli(*command).code == 2
