"""How messages stand in a stream of bytes: one a line, or each behind its length (four bytes, big-endian).

Lines are for tools of the shell, and cannot carry a payload with a line's end in it; lengths carry everything.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from holdfast.client.protocol.errors import Misuse, Refused
from holdfast.client.protocol.limits import FRAME_BODY_BYTES

Framing = Literal["lines", "lengths"]
FRAMINGS: tuple[Framing, ...] = ("lines", "lengths")

BATCH_MESSAGES = 1_000
BATCH_BYTES = 1_048_576  # a quarter of what a request may carry: headers and keys come on top

_LENGTH = struct.Struct(">I")


class BadInput(Misuse):
    """The stream is not framed as it was said to be."""


class NotALine(Refused):
    """A payload would be taken for several lines."""


def read_messages(read: Callable[[int], bytes], framing: Framing) -> Iterator[list[bytes]]:
    """The messages of a stream as they come, in batches of a number and a size."""
    return lines(read) if framing == "lines" else lengths(read)


def lines(read: Callable[[int], bytes]) -> Iterator[list[bytes]]:
    """The lines of a stream, without their ends, as they come. A last line needs no end; an empty line is a message."""
    rest = b""
    while data := read(BATCH_BYTES):
        *whole, rest = (rest + data).split(b"\n")
        yield from split(whole)
        if len(rest) > FRAME_BODY_BYTES:  # no message can be that long: let it be refused before it fills the memory
            break
    if rest:
        yield [rest]


def lengths(read: Callable[[int], bytes]) -> Iterator[list[bytes]]:
    """The messages behind their lengths. Raises BadInput where the stream ends in the middle of one."""
    rest = b""
    while data := read(BATCH_BYTES):
        rest += data
        at = 0
        whole: list[bytes] = []
        while len(rest) - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(rest, at)
            if size > FRAME_BODY_BYTES:
                yield from split(whole)
                raise BadInput(
                    f"a message of {size} bytes is announced, which none can have; are there lengths at all?"
                )
            if len(rest) - at < _LENGTH.size + size:
                break
            whole.append(rest[at + _LENGTH.size : at + _LENGTH.size + size])
            at += _LENGTH.size + size
        rest = rest[at:]
        yield from split(whole)
    if rest:
        raise BadInput("the input ends in the middle of a message; what was whole before it was sent")


def split(messages: Sequence[bytes]) -> Iterator[list[bytes]]:
    """These messages in batches of a number and a size, but at least one."""
    batch: list[bytes] = []
    size = 0
    for message in messages:
        if batch and (len(batch) == BATCH_MESSAGES or size + len(message) > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(message)
        size += len(message)
    if batch:
        yield batch


def framed(payload: bytes, framing: Framing) -> bytes:
    """One message as it stands in a stream. Raises NotALine."""
    if framing == "lengths":
        return _LENGTH.pack(len(payload)) + payload
    if b"\n" in payload:
        raise NotALine("a payload has a line's end in it; print it with --as lengths or --json")
    return payload + b"\n"
