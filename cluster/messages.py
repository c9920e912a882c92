"""Everything that one node may say to another about a log: a closed set of values, and their bytes.

Fixed fields are struct layouts and entries are raw bytes behind a column of heads: nothing is unpacked that a
journal would only pack again, and an unknown shape has nowhere to hide. Reading is strict: a message that differs
from what `encode` would write raises BadFrame, and the session that carried it ends. Commands are never forwarded
between nodes, so there is no message for that.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from holdfast.client.protocol.errors import BadFrame, BatchTooLarge
from holdfast.client.protocol.limits import U63_MAX

ENTRY_BYTES = 8_388_608  # the hard limit of one log entry; the batcher splits far below it
ENTRIES_PER_MESSAGE = 65_536  # so that a small message cannot become a big heap
CHUNK_BYTES = 262_144  # one piece of a snapshot: short enough not to delay a heartbeat behind it
CONFIGURATION_BYTES = 65_536  # members with their addresses, in a snapshot's head
DIGEST_BYTES = 32
MESSAGE_BYTES = 9_437_184  # one entry of the greatest size with everything around it; the frame limit of peers

LogEntry: TypeAlias = tuple[bytes, int, int]  # command, index, term: the order in which the library has it
Buffer: TypeAlias = bytes | memoryview


@dataclass(frozen=True, slots=True)
class AppendEntries:
    """The leader's log behind `prev_index`, or a heartbeat. Without `prev_index` the peer waits for a snapshot."""

    term: int
    commit_index: int
    prev_index: int | None
    prev_term: int
    entries: tuple[LogEntry, ...]
    epoch: int  # which attempt of the leader to find this peer's match point; echoed
    barrier: int  # the newest read barrier; echoed


@dataclass(frozen=True, slots=True)
class AppendReply:
    """`next_index` is where the sender's log may go on: matched below it (success) or a hint (reset)."""

    next_index: int
    reset: bool
    success: bool
    term: int  # of the sender when the reply was made: an old reply must not count for a new leadership (R5)
    epoch: int
    barrier: int
    wall_ms: int  # the sender's wall clock (T2)


@dataclass(frozen=True, slots=True)
class RequestVote:
    term: int
    last_index: int
    last_term: int


@dataclass(frozen=True, slots=True)
class VoteGranted:
    term: int


@dataclass(frozen=True, slots=True)
class TimeoutNow:
    """The leader asks this peer to stand for election at once."""

    term: int


@dataclass(frozen=True, slots=True)
class PreVote:
    """Would you vote for me in `term`? Changes nothing on either side."""

    term: int
    round: int
    last_index: int
    last_term: int


@dataclass(frozen=True, slots=True)
class PreVoteReply:
    term: int
    round: int
    granted: bool


@dataclass(frozen=True, slots=True)
class StaleTerm:
    """What you sent belongs to a term that is over; the sender knows this one (R13)."""

    term: int


@dataclass(frozen=True, slots=True)
class SnapshotHead:
    """Begins the stream of a state at `index`; `configuration` is the one in force there (R23)."""

    term: int
    index: int
    index_term: int
    epoch: int
    configuration_index: int
    size_bytes: int
    digest: bytes
    configuration: bytes


@dataclass(frozen=True, slots=True)
class SnapshotChunk:
    epoch: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class SnapshotDone:
    """The last chunk was sent; the receiver checks size and digest of what it has."""

    epoch: int
    index: int


Message: TypeAlias = (
    AppendEntries
    | AppendReply
    | RequestVote
    | VoteGranted
    | TimeoutNow
    | PreVote
    | PreVoteReply
    | StaleTerm
    | SnapshotHead
    | SnapshotChunk
    | SnapshotDone
)

_ENVELOPE = struct.Struct(">BH")  # tag, log
_APPEND = struct.Struct(">6QI")  # term, commit, prev index (0: none), prev term, epoch, barrier, number of entries
_ENTRY = struct.Struct(">QI")  # term, length; the index follows from the place
_REPLY = struct.Struct(">Q2B4Q")
_ONE, _THREE, _FOUR = struct.Struct(">Q"), struct.Struct(">3Q"), struct.Struct(">4Q")
_VERDICT = struct.Struct(">2QB")
_HEAD = struct.Struct(f">6Q{DIGEST_BYTES}sI")
_CHUNK = struct.Struct(">2QI")
_DONE = struct.Struct(">2Q")


def encode(message: Message, log: int = 0) -> bytes:
    """The bytes of one message of one log. Raises BatchTooLarge for what no peer would take."""
    tag = _TAGS[type(message)]
    data = _ENVELOPE.pack(tag, log) + _WRITERS[tag](message)
    if len(data) > MESSAGE_BYTES:
        raise BatchTooLarge(size=len(data), limit=MESSAGE_BYTES, limit_name="MESSAGE_BYTES")
    return data


def decode(data: Buffer) -> tuple[int, Message]:
    """The log and the message. Raises BadFrame for any bytes that `encode` does not write."""
    if len(data) > MESSAGE_BYTES:
        raise BadFrame(problem=f"a peer message of {len(data)} bytes; up to {MESSAGE_BYTES} are allowed")
    view = memoryview(data)
    try:
        tag, log = _ENVELOPE.unpack_from(view)
        reader = _READERS.get(tag)
        if reader is None:
            raise BadFrame(problem=f"no peer message has the tag {tag}")
        return log, reader(view[_ENVELOPE.size :])
    except struct.error:
        raise BadFrame(problem="a peer message has another length") from None


# One writer and one reader for each ------------------------------------------------------------------------


def _write_append(message: AppendEntries) -> bytes:
    entries = message.entries
    prev = 0 if message.prev_index is None else message.prev_index
    head = _APPEND.pack(
        message.term, message.commit_index, prev, message.prev_term, message.epoch, message.barrier, len(entries)
    )
    heads = [_ENTRY.pack(term, len(command)) for command, _, term in entries]
    return b"".join((head, *heads, *(command for command, _, _ in entries)))


def _read_append(view: memoryview) -> AppendEntries:
    *numbers, count = _APPEND.unpack_from(view)
    term, commit_index, prev, prev_term, epoch, barrier = _checked(*numbers)
    if count > ENTRIES_PER_MESSAGE:
        raise BadFrame(problem=f"{count} entries in one message; up to {ENTRIES_PER_MESSAGE} are allowed")
    if not prev and (count or prev_term):
        raise BadFrame(problem="entries without the place that they follow")
    at = _APPEND.size + count * _ENTRY.size
    entries: list[LogEntry] = []
    for number in range(count):
        entry_term, size = _ENTRY.unpack_from(view, _APPEND.size + number * _ENTRY.size)
        if not prev_term <= entry_term <= term or not 0 < size <= ENTRY_BYTES:
            raise BadFrame(problem=f"an entry of {size} bytes and term {entry_term} in a message of term {term}")
        entries.append((bytes(view[at : at + size]), prev + 1 + number, entry_term))
        at += size
    _ends(view, at)
    return AppendEntries(term, commit_index, prev or None, prev_term, tuple(entries), epoch, barrier)


def _write_reply(message: AppendReply) -> bytes:
    return _REPLY.pack(
        message.next_index,
        message.reset,
        message.success,
        message.term,
        message.epoch,
        message.barrier,
        message.wall_ms,
    )


def _read_reply(view: memoryview) -> AppendReply:
    next_index, reset, success, *rest = _REPLY.unpack(view)
    _checked(next_index, *rest)
    if next_index < 1 or (reset and success):
        raise BadFrame(problem="a reply that both matches and rejects, or ends before the log begins")
    return AppendReply(next_index, _flag(reset), _flag(success), *rest)


def _write_pre_vote_reply(message: PreVoteReply) -> bytes:
    return _VERDICT.pack(message.term, message.round, message.granted)


def _read_pre_vote_reply(view: memoryview) -> PreVoteReply:
    *numbers, granted = _VERDICT.unpack(view)
    term, round_ = _checked(*numbers)
    return PreVoteReply(term, round_, _flag(granted))


def _write_head(message: SnapshotHead) -> bytes:
    numbers = (message.term, message.index, message.index_term, message.epoch, message.configuration_index)
    size = len(message.configuration)
    return _HEAD.pack(*numbers, message.size_bytes, message.digest, size) + message.configuration


def _read_head(view: memoryview) -> SnapshotHead:
    *numbers, digest, size = _HEAD.unpack_from(view)
    term, index, index_term, epoch, configuration_index, size_bytes = _checked(*numbers)
    if size > CONFIGURATION_BYTES:
        raise BadFrame(problem=f"a configuration of {size} bytes; up to {CONFIGURATION_BYTES} are allowed")
    if index_term > term or configuration_index > index or not index:
        raise BadFrame(problem="a snapshot that is newer than its sender")
    _ends(view, _HEAD.size + size)
    configuration = bytes(view[_HEAD.size :])
    return SnapshotHead(term, index, index_term, epoch, configuration_index, size_bytes, digest, configuration)


def _write_chunk(message: SnapshotChunk) -> bytes:
    return _CHUNK.pack(message.epoch, message.offset, len(message.data)) + message.data


def _read_chunk(view: memoryview) -> SnapshotChunk:
    *numbers, size = _CHUNK.unpack_from(view)
    epoch, offset = _checked(*numbers)
    if not 0 < size <= CHUNK_BYTES:
        raise BadFrame(problem=f"a snapshot chunk of {size} bytes; 1 to {CHUNK_BYTES} are allowed")
    _ends(view, _CHUNK.size + size)
    return SnapshotChunk(epoch, offset, bytes(view[_CHUNK.size :]))


def _checked(*numbers: int) -> tuple[int, ...]:
    if max(numbers) > U63_MAX:
        raise BadFrame(problem="a number above 2^63-1")
    return numbers


def _flag(byte: int) -> bool:
    if byte > 1:
        raise BadFrame(problem=f"a flag of {byte}")
    return byte == 1


def _ends(view: memoryview, at: int) -> None:
    if at != len(view):
        raise BadFrame(problem="a peer message has another length than its fields say")


# Tags are permanent; a retired one stays retired.
_TAGS: dict[type[Message], int] = {
    AppendEntries: 1,
    AppendReply: 2,
    RequestVote: 3,
    VoteGranted: 4,
    TimeoutNow: 5,
    PreVote: 6,
    PreVoteReply: 7,
    StaleTerm: 8,
    SnapshotHead: 9,
    SnapshotChunk: 10,
    SnapshotDone: 11,
}
_WRITERS: dict[int, Callable[..., bytes]] = {
    1: _write_append,
    2: _write_reply,
    3: lambda m: _THREE.pack(m.term, m.last_index, m.last_term),
    4: lambda m: _ONE.pack(m.term),
    5: lambda m: _ONE.pack(m.term),
    6: lambda m: _FOUR.pack(m.term, m.round, m.last_index, m.last_term),
    7: _write_pre_vote_reply,
    8: lambda m: _ONE.pack(m.term),
    9: _write_head,
    10: _write_chunk,
    11: lambda m: _DONE.pack(m.epoch, m.index),
}
_READERS: dict[int, Callable[[memoryview], Message]] = {
    1: _read_append,
    2: _read_reply,
    3: lambda view: RequestVote(*_checked(*_THREE.unpack(view))),
    4: lambda view: VoteGranted(*_checked(*_ONE.unpack(view))),
    5: lambda view: TimeoutNow(*_checked(*_ONE.unpack(view))),
    6: lambda view: PreVote(*_checked(*_FOUR.unpack(view))),
    7: _read_pre_vote_reply,
    8: lambda view: StaleTerm(*_checked(*_ONE.unpack(view))),
    9: _read_head,
    10: _read_chunk,
    11: lambda view: SnapshotDone(*_checked(*_DONE.unpack(view))),
}
