"""Everything that one node may say to another: a closed set of values, and their bytes.

A message is one flat msgpack array: tag, log, then the fields in their order; what there are several of stands at the
end, and so nothing ever nests. Reading is strict: another arity, type or range, an extension type or a byte too many
raises BadFrame, and the session that carried it ends. As in the client's protocol a number need not be packed as short
as it could be: nothing hangs on these bytes, for the journal packs anew. There is no message that forwards a command
(R17), and none that holds a pickle (R2).
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, TypeAlias

from holdfast.client.protocol.codec import pack, unpack_flat
from holdfast.client.protocol.errors import BadFrame, BatchTooLarge
from holdfast.client.protocol.limits import U63_MAX
from holdfast.cluster import membership
from holdfast.cluster.membership import MEMBERS_MAX, NAME_BYTES, Configuration

ENTRY_BYTES = 8_388_608  # the hard limit of one log entry; the batcher splits far below it
ENTRIES_PER_MESSAGE = 65_536  # so that a small message cannot become a big heap
CHUNK_BYTES = 262_144  # one piece of a snapshot: short enough not to delay a heartbeat behind it
CONFIGURATION_BYTES = 65_536  # members with their addresses, in a snapshot's head and at the founding
DIGEST_BYTES = 32
CLUSTER_ID_BYTES = 255
ADDRESS_BYTES = 1_024
MESSAGE_BYTES = 9_437_184  # one entry of the greatest size with everything around it; the frame limit of peers

LogEntry: TypeAlias = tuple[bytes, int, int]  # command, index, term: the order in which the library has it
Buffer: TypeAlias = bytes | memoryview
Fields: TypeAlias = tuple[Any, ...]
Reader: TypeAlias = Callable[[Fields], "Message"]
Writer: TypeAlias = Callable[[Any], Fields | list[Any]]


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


@dataclass(frozen=True, slots=True)
class StateDigest:
    """The sender's whole state at an applied index, as a digest: see `comparing.py`."""

    index: int
    digest: bytes


# Before there is a cluster: see `founding.py`


@dataclass(frozen=True, slots=True)
class Introduce:
    """What a node without a cluster says first. With `cluster_id` it has agreed to that one and waits for its begin."""

    client_address: str
    cluster_id: str
    names: tuple[str, ...]  # all members that it knows of, itself too


@dataclass(frozen=True, slots=True)
class Found:
    """The founder has decided: this is the cluster, and these incarnations of its voters, in their order."""

    cluster_id: str
    members: Configuration
    incarnations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Agreed:
    """The cluster that was decided is on the sender's disk."""

    cluster_id: str


LogMessage: TypeAlias = (
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
    | StateDigest
)
FoundingMessage: TypeAlias = Introduce | Found | Agreed
Message: TypeAlias = LogMessage | FoundingMessage

LOG_MAX = 65_535

_HEAD = 2  # tag and log, before a message's own fields
_APPEND_FIELDS = 6
_ELEMENTS_MAX = _HEAD + _APPEND_FIELDS + 2 * ENTRIES_PER_MESSAGE


def encode(message: Message, log: int = 0) -> bytes:
    """The bytes of one message of one log. Raises BatchTooLarge for what no peer would take."""
    tag = _TAGS[type(message)]
    data = pack((tag, log, *_WRITERS[tag](message)))
    if len(data) > MESSAGE_BYTES:
        raise BatchTooLarge(size=len(data), limit=MESSAGE_BYTES, limit_name="MESSAGE_BYTES")
    return data


def decode(data: Buffer) -> tuple[int, Message]:
    """The log and the message. Raises BadFrame for anything that is none, before it has cost much."""
    if len(data) > MESSAGE_BYTES:
        raise BadFrame(problem=f"a peer message of {len(data)} bytes; up to {MESSAGE_BYTES} are allowed")
    found = unpack_flat(data, _ELEMENTS_MAX)
    tag, log = found[:_HEAD] if len(found) >= _HEAD else (None, None)
    if type(tag) is not int or type(log) is not int or not 0 <= log <= LOG_MAX:
        raise BadFrame(problem="a peer message does not begin with its tag and its log")
    reader = _READERS.get(tag)
    if reader is None:
        raise BadFrame(problem=f"no peer message has the tag {tag}")
    return log, reader(found[_HEAD:])


# Messages that are more than their fields ------------------------------------------------------------------


def _write_append(message: AppendEntries) -> list[Any]:
    found: list[Any] = [
        message.term,
        message.commit_index,
        message.prev_index,
        message.prev_term,
        message.epoch,
        message.barrier,
    ]
    for command, _, term in message.entries:  # the index follows from the place
        found += (term, command)
    return found


def _read_append(found: Fields) -> AppendEntries:
    if len(found) < _APPEND_FIELDS or len(found) % 2:
        raise BadFrame(problem="AppendEntries has another number of fields")
    term, commit_index, prev_index, prev_term, epoch, barrier = found[:_APPEND_FIELDS]
    _check_types((term, commit_index, prev_term, epoch, barrier), _FIVE)
    if prev_index is None:
        if len(found) > _APPEND_FIELDS or prev_term:
            raise BadFrame(problem="entries without the place that they follow")
    elif type(prev_index) is not int or not 0 < prev_index <= U63_MAX - len(found):
        raise BadFrame(problem="entries that follow no place")
    entries: list[LogEntry] = []
    index = prev_index
    for at in range(_APPEND_FIELDS, len(found), 2):
        entry_term, command = found[at], found[at + 1]
        if type(entry_term) is not int or not prev_term <= entry_term <= term:
            raise BadFrame(problem="an entry that is older than what it follows, or newer than its message")
        if type(command) is not bytes or not 0 < len(command) <= ENTRY_BYTES:
            raise BadFrame(problem=f"an entry is 1 to {ENTRY_BYTES} bytes")
        index += 1
        entries.append((command, index, entry_term))
    return AppendEntries(term, commit_index, prev_index, prev_term, tuple(entries), epoch, barrier)


def _check_reply(message: AppendReply) -> None:
    if message.next_index < 1 or (message.reset and message.success):
        raise BadFrame(problem="a reply that both matches and rejects, or ends before the log begins")


def _check_head(message: SnapshotHead) -> None:
    if len(message.digest) != DIGEST_BYTES or len(message.configuration) > CONFIGURATION_BYTES:
        raise BadFrame(problem="a digest of another size, or a configuration that is too large")
    if message.index_term > message.term or message.configuration_index > message.index or not message.index:
        raise BadFrame(problem="a snapshot that is newer than its sender")


def _check_chunk(message: SnapshotChunk) -> None:
    if not 0 < len(message.data) <= CHUNK_BYTES:
        raise BadFrame(problem=f"a snapshot chunk of {len(message.data)} bytes; 1 to {CHUNK_BYTES} are allowed")


def _check_digest(message: StateDigest) -> None:
    if len(message.digest) != DIGEST_BYTES:
        raise BadFrame(problem=f"a digest of {len(message.digest)} bytes; {DIGEST_BYTES} are wanted")


def _write_introduce(message: Introduce) -> tuple[Any, ...]:
    return (message.client_address, message.cluster_id, *message.names)


def _read_introduce(found: Fields) -> Introduce:
    texts, names = found[:2], found[2:]
    _check_types(texts, (str, str))
    client_address, cluster_id = texts
    _check_text(client_address, ADDRESS_BYTES)
    _check_text(cluster_id, CLUSTER_ID_BYTES)
    if not 0 < len(names) <= MEMBERS_MAX or set(map(type, names)) != {str} or len(set(names)) != len(names):
        raise BadFrame(problem=f"members are 1 to {MEMBERS_MAX} names, each once")
    for name in names:
        _check_text(name, NAME_BYTES, 1)
    return Introduce(client_address, cluster_id, names)


def _write_found(message: Found) -> tuple[Any, ...]:
    return (message.cluster_id, membership.encode(message.members), *message.incarnations)


def _read_found(found: Fields) -> Found:
    head, incarnations = found[:2], found[2:]
    _check_types(head, (str, bytes))
    cluster_id, encoded = head
    _check_text(cluster_id, CLUSTER_ID_BYTES, 1)
    if len(encoded) > CONFIGURATION_BYTES:
        raise BadFrame(problem=f"a configuration of {len(encoded)} bytes; up to {CONFIGURATION_BYTES} are allowed")
    members = membership.decode(encoded)
    if members.learners or not members.voters:
        raise BadFrame(problem="a cluster is founded by voters alone")
    _check_types(incarnations, (int,) * len(members.voters))
    return Found(cluster_id, members, incarnations)


def _check_agreed(message: Agreed) -> None:
    _check_text(message.cluster_id, CLUSTER_ID_BYTES, 1)


def _check_text(text: str, most_bytes: int, least_bytes: int = 0) -> None:
    if not least_bytes <= len(text.encode()) <= most_bytes:
        raise BadFrame(problem=f"a text of {len(text.encode())} bytes; {least_bytes} to {most_bytes} are allowed")


# Messages that are their fields, and the table of all ------------------------------------------------------


def _check_types(found: Fields, types: tuple[type, ...]) -> None:
    """As many as these, of exactly these types, and every number within u63."""
    if tuple(map(type, found)) != types:
        raise BadFrame(problem="a peer message has another number of fields, or one of another type")
    for value in found:
        if value.__class__ is int and not 0 <= value <= U63_MAX:
            raise BadFrame(problem="a number below 0 or above 2^63-1")


def _reader(kind: type[Any], check: Callable[[Any], None] | None = None) -> Reader:
    types = tuple(_annotated(field.type) for field in fields(kind))

    def read(found: Fields) -> Message:
        _check_types(found, types)
        message: Message = kind(*found)
        if check is not None:
            check(message)
        return message

    return read


def _writer(kind: type[Any]) -> Writer:
    names = [field.name for field in fields(kind)]
    get = attrgetter(*names)
    return get if len(names) > 1 else lambda message: (get(message),)


def _annotated(annotation: Any) -> type:
    if annotation not in (int, bool, bytes, str):
        raise TypeError(f"a field of {annotation} needs a reader of its own")
    kind: type = annotation
    return kind


_FIVE = (int,) * 5
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
    Introduce: 12,
    Found: 13,
    Agreed: 14,
    StateDigest: 15,
}
_CHECKS: dict[type[Message], Callable[[Any], None]] = {
    AppendReply: _check_reply,
    SnapshotHead: _check_head,
    SnapshotChunk: _check_chunk,
    Agreed: _check_agreed,
    StateDigest: _check_digest,
}
_OWN_READERS: dict[type[Message], Reader] = {
    AppendEntries: _read_append,
    Introduce: _read_introduce,
    Found: _read_found,
}
_OWN_WRITERS: dict[type[Message], Writer] = {
    AppendEntries: _write_append,
    Introduce: _write_introduce,
    Found: _write_found,
}
_READERS = {tag: _OWN_READERS.get(kind) or _reader(kind, _CHECKS.get(kind)) for kind, tag in _TAGS.items()}
_WRITERS = {tag: _OWN_WRITERS.get(kind) or _writer(kind) for kind, tag in _TAGS.items()}
