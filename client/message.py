"""Messages as a user gives and gets them; batches are made and cut here, for both shells.

`Message` is what goes in, `Delivered` what comes out of a lease, a peek or a read.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from itertools import accumulate
from typing import NamedTuple

from holdfast.client.protocol import columns as batches
from holdfast.client.protocol.columns import MessageParts
from holdfast.client.protocol.commands import check_when
from holdfast.client.protocol.errors import BadValue, BatchTooLarge
from holdfast.client.protocol.limits import FRAME_BODY_BYTES
from holdfast.client.protocol.quick import dataclass
from holdfast.client.protocol.replies import Grant, MessageBatch
from holdfast.client.protocol.values import Columns


@dataclass(frozen=True, slots=True)
class Message:
    """A payload with what travels beside it; what is not set is taken from the call."""

    payload: bytes
    key: str | None = None
    headers: Mapping[str, str] | None = None
    delay_ms: int | None = None
    not_before_ms: int | None = None
    ttl_ms: int | None = None

    def __post_init__(self) -> None:
        check_payload(self.payload)
        check_when(self.delay_ms, self.not_before_ms)


Parts = list[bytes | MessageParts]  # messages that are ready to be packed


class MessageId(NamedTuple):
    """The identity of a message, for ever and in every restore (T4)."""

    queue_id: int
    generation: int
    version: int


class Origin(NamedTuple):
    """Where a moved message came from."""

    queue: str
    version: int


@dataclass(frozen=True, slots=True)
class Delivered:
    """A message as the cluster holds it. Counts are those of the lease it came in; 0 where it was only looked at."""

    id: MessageId
    payload: bytes = field(repr=False)
    key: str | None
    headers: dict[str, str]
    enqueued_ms: int
    client_id: str
    client_seq: int
    delivery_count: int = 0
    attempts: int = 0
    redrives: int = 0
    group: str = ""  # in which it was leased; empty where it was only looked at
    group_generation: int = 0  # another one after every Seek

    @property
    def version(self) -> int:
        return self.id.version

    @property
    def origin(self) -> Origin | None:
        """The queue and version it was moved from, or none."""
        queue, version = self.headers.get("holdfast-origin-queue"), self.headers.get("holdfast-origin-version")
        return None if queue is None or version is None else Origin(queue, int(version))


def pack(payloads: bytes | Message | Iterable[bytes | Message], shared: Message) -> tuple[Columns, bytes]:
    """Columns and body of these messages; `shared` has what the call says for all. Raises Misuse."""
    return pack_parts(parts_of(payloads, shared))


def parts_of(payloads: bytes | Message | Iterable[bytes | Message], shared: Message) -> Parts:
    """The messages one by one; where there is nothing beside the payloads, just these. Raises Misuse."""
    given: Sequence[bytes | Message]
    if isinstance(payloads, bytes | bytearray | memoryview | Message):
        given = [payloads if isinstance(payloads, Message) else bytes(payloads)]
    else:
        given = list(payloads)  # a str becomes letters here, which are refused one by one
    if shared == _NOTHING and all(type(payload) is bytes for payload in given):
        return [payload for payload in given if isinstance(payload, bytes)]
    return [_parts(payload, shared) for payload in given]


def pack_parts(parts: Parts) -> tuple[Columns, bytes]:
    """Columns and body of a batch. Raises Misuse."""
    plain = [part for part in parts if isinstance(part, bytes)]
    if len(plain) == len(parts):
        return _pack_plain(plain)
    return batches.pack([MessageParts(part) if isinstance(part, bytes) else part for part in parts])


def unpack(
    queue_id: int, pieces: Iterable[MessageBatch], grants: Iterable[Grant] = (), group: str = "", generation: int = 0
) -> Iterator[Delivered]:
    """The messages of these batches, in order; with the counts of the grants that cover them, in this group."""
    counts = list(grants)
    at = 0
    for piece in pieces:
        columns, body = piece.columns, bytes(piece.body)
        begin = 0
        for index, stop in enumerate(struct.unpack(f"<{columns.count}i", columns.ends)):
            version = piece.first + index
            while at < len(counts) and counts[at].last < version:
                at += 1
            grant = counts[at] if at < len(counts) else _NO_GRANT
            end = stop - columns.start
            key = batches.key_of(columns, body, index).decode() if columns.key_ends else ""
            cell = batches.header_cell(columns, body, index) if columns.header_ends else b""
            yield Delivered(
                MessageId(queue_id, piece.generation, version),
                body[begin:end],
                key or None,
                batches.decode_headers(cell) if cell else {},
                piece.enqueued_ms,
                piece.client_id,
                piece.first_seq + index,
                grant.delivery_count,
                grant.attempts,
                grant.redrives,
                group,
                generation,
            )
            begin = end


def check_payload(payload: object) -> bytes:
    if not isinstance(payload, bytes | bytearray | memoryview):
        raise BadValue(field="payload", problem=f"is a {type(payload).__name__}; bytes are needed")
    return bytes(payload)


_NOTHING = Message(b"")
_NO_GRANT = Grant(0, 0, 0, 0)


def _pack_plain(payloads: Sequence[bytes]) -> tuple[Columns, bytes]:
    """Without anything beside the payloads: no object for each message, so a batch costs about two copies."""
    body = b"".join(payloads)
    if len(body) > FRAME_BODY_BYTES:
        raise BatchTooLarge(size=len(body), limit=FRAME_BODY_BYTES, limit_name="FRAME_BODY_BYTES")
    return Columns(ends=struct.pack(f"<{len(payloads)}i", *accumulate(map(len, payloads)))), body


def _parts(given: bytes | Message, shared: Message) -> MessageParts:
    if not isinstance(given, Message):
        given = Message(check_payload(given))
    own_time = given.delay_ms is not None or given.not_before_ms is not None
    return MessageParts(
        payload=bytes(given.payload),
        key=shared.key if given.key is None else given.key,
        headers=shared.headers if given.headers is None else given.headers,
        delay_ms=given.delay_ms if own_time else shared.delay_ms,
        not_before_ms=given.not_before_ms if own_time else shared.not_before_ms,
        ttl_ms=shared.ttl_ms if given.ttl_ms is None else given.ttl_ms,
    )
