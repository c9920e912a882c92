"""One log entry: the leader's stamp and the commands that arrived together, as bytes and as values.

The bytes are what the log holds and what every node folds: a leader, too, folds what it decoded.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from holdfast.client.protocol.codec import decode_envelope, encode_envelope
from holdfast.client.protocol.commands import Envelope
from holdfast.client.protocol.errors import BadFrame

FORMAT = 1
_HEAD = struct.Struct(">BQI")  # format, stamp, number of commands
_LENGTHS = struct.Struct(">II")


@dataclass(frozen=True, slots=True)
class Entry:
    index: int
    stamp_ms: int
    commands: tuple[tuple[Envelope, int], ...]  # each with the hash that tells a retry from another request (A1)


def encode_entry(stamp_ms: int, envelopes: Sequence[Envelope]) -> bytes:
    return b"".join((_HEAD.pack(FORMAT, stamp_ms, len(envelopes)), *map(encode_envelope, envelopes)))


def decode_entry(index: int, data: bytes | memoryview) -> Entry:
    """The entry at `index`. Raises BadFrame for bytes that `encode_entry` would not write: the node stops then."""
    view = memoryview(data)
    try:
        version, stamp_ms, count = _HEAD.unpack_from(view)
    except struct.error:
        raise BadFrame(problem="an entry is shorter than its head") from None
    if version != FORMAT:
        raise BadFrame(problem=f"an entry has format {version}; {FORMAT} is known")
    commands = []
    at = _HEAD.size
    for _ in range(count):
        envelope, end = decode_envelope(view, at)
        commands.append((envelope, _command_hash(view, at, envelope) if envelope.session else 0))
        at = end
    if at != len(view):
        raise BadFrame(problem="an entry has bytes behind its last command")
    return Entry(index, stamp_ms, tuple(commands))


def stamp_of(data: bytes | memoryview) -> int:
    """The stamp of an entry, without reading the rest of it."""
    _, stamp_ms, _ = _HEAD.unpack_from(data)
    return int(stamp_ms)


def _command_hash(view: memoryview, at: int, envelope: Envelope) -> int:
    """Hash of the command's own bytes: what stands behind the envelope's four fields, which may differ in a retry."""
    begin = at + 8
    end = begin + _LENGTHS.unpack_from(view, at)[0]
    begin += 1 if view[begin] < 0xDC else 3  # the array's own mark
    text = envelope.principal
    principal = len(text) if text.isascii() else len(text.encode())
    begin += (1 if principal < 32 else 2 if principal < 256 else 3) + principal
    begin += 2 + len(envelope.session)
    begin += _int_size(envelope.request_seq) + _int_size(envelope.done_below)
    return xxh3_64_intdigest(view[begin:end])


def _int_size(number: int) -> int:
    if number < 128:
        return 1
    return 2 if number < 256 else 3 if number < 65_536 else 5 if number < 4_294_967_296 else 9
