"""Byte stream <-> frames, fed piece by piece; header and opaque body stay apart.

A frame is 8 bytes of prefix (length of the header and of the body, u32 big-endian each), the header, the
body. Lengths are checked as soon as the prefix is there, and memory grows with what came, never with what
was claimed.
"""

import struct

from holdfast.client.protocol.errors import BadFrame, BatchTooLarge
from holdfast.client.protocol.limits import FRAME_BODY_BYTES, FRAME_HEADER_BYTES
from holdfast.client.protocol.quick import dataclass

Buffer = bytes | memoryview

_PREFIX = struct.Struct(">II")
_JOIN_BYTES = 16_384  # up to here one copy is cheaper than one more buffer to send


@dataclass(frozen=True, slots=True)
class Frame:
    header: bytes
    body: Buffer  # read-only


class FrameReader:
    """One direction of one connection. After BadFrame it reads nothing more: where frames begin is lost."""

    def __init__(self) -> None:
        self._pending = bytearray()  # the beginning of a frame whose end has not come
        self._needed = _PREFIX.size  # how long it must be for the next step
        self._broken: BadFrame | None = None

    @property
    def pending_bytes(self) -> int:
        """How much of an unfinished frame is held; not 0 means that a frame was started."""
        return len(self._pending)

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes. Raises BadFrame once a prefix claims too much.

        Frames before the bad one in the same piece are lost with it, as their connection is.
        """
        if self._broken is not None:
            raise self._broken
        frames: list[Frame] = []
        at = 0
        try:
            if self._pending:
                at = self._complete(data, frames)
            if not self._pending:
                at = self._cut_whole(data, at, frames)
                self._pending += memoryview(data)[at:]
                if self._pending:
                    self._needed = self._next_step()
        except BadFrame as error:
            self._broken = error
            self._pending = bytearray()
            raise
        return frames

    def _complete(self, data: bytes, frames: list[Frame]) -> int:
        """Add to the pending frame until it is whole or `data` is used up; gives how much was used."""
        at = 0
        while at < len(data) and len(self._pending) < self._needed:
            begin, at = at, at + self._needed - len(self._pending)
            self._pending += memoryview(data)[begin:at]
            if len(self._pending) == _PREFIX.size:
                self._needed = self._next_step()
        if len(self._pending) == self._needed:
            frames.append(self._finish())
        return min(at, len(data))

    def _next_step(self) -> int:
        if len(self._pending) < _PREFIX.size:
            return _PREFIX.size
        return _PREFIX.size + sum(_lengths(self._pending, 0))

    def _finish(self) -> Frame:
        """The pending frame, whole. Its body is a view of the buffer, which is given away with it."""
        whole, self._pending, self._needed = self._pending, bytearray(), _PREFIX.size
        middle = _PREFIX.size + _lengths(whole, 0)[0]
        return Frame(bytes(whole[_PREFIX.size : middle]), memoryview(whole).toreadonly()[middle:])

    def _cut_whole(self, data: bytes, at: int, frames: list[Frame]) -> int:
        """The frames that lie in `data` from end to end; gives where the rest begins."""
        size = len(data)
        while at + _PREFIX.size <= size:
            header_bytes, body_bytes = _lengths(data, at)
            middle = at + _PREFIX.size + header_bytes
            end = middle + body_bytes
            if end > size:
                break
            # A view keeps the whole piece alive, so it is for a body that is most of its piece.
            body = memoryview(data)[middle:end] if 2 * body_bytes >= size else data[middle:end]
            frames.append(Frame(data[at + _PREFIX.size : middle], body))
            at = end
        return at


def write_frame(header: bytes, *body: Buffer) -> list[Buffer]:
    """The buffers to send, in order; large ones as they are. Raises BatchTooLarge for what no reader takes."""
    body_bytes = sum(map(len, body))
    for size, limit, name in (
        (len(header), FRAME_HEADER_BYTES, "FRAME_HEADER_BYTES"),
        (body_bytes, FRAME_BODY_BYTES, "FRAME_BODY_BYTES"),
    ):
        if size > limit:
            raise BatchTooLarge(size=size, limit=limit, limit_name=name)
    prefix = _PREFIX.pack(len(header), body_bytes)
    if len(header) + body_bytes <= _JOIN_BYTES:
        return [b"".join((prefix, header, *body))]
    return [prefix + header, *(part for part in body if len(part))]


def _lengths(data: bytes | bytearray, at: int) -> tuple[int, int]:
    header_bytes, body_bytes = _PREFIX.unpack_from(data, at)
    if header_bytes > FRAME_HEADER_BYTES:
        raise BadFrame(problem=f"a header of {header_bytes} bytes; up to {FRAME_HEADER_BYTES} are allowed")
    if body_bytes > FRAME_BODY_BYTES:
        raise BadFrame(problem=f"a body of {body_bytes} bytes; up to {FRAME_BODY_BYTES} are allowed")
    if not header_bytes:
        raise BadFrame(problem="a frame without a header")
    return header_bytes, body_bytes
