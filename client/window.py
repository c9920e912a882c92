"""What a managed producer has in hand: the messages of each call, and the numbered requests made of them.

A request keeps its numbers and its boundaries for as long as any attempt of it may still arrive at the cluster.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from holdfast.client.calls import Payloads
from holdfast.client.message import Message, Parts, pack_parts, parts_of
from holdfast.client.protocol.errors import BadValue
from holdfast.client.protocol.limits import FRAME_BODY_BYTES
from holdfast.client.protocol.values import Columns

PIPELINE = 4  # requests on their way at once: one is written, one is synced, one is answered, one is there already
REQUEST_MESSAGES = 1_000  # of one request: a larger one costs no less a message
REQUEST_BYTES = 1_048_576  # likewise; a quarter of what a new cluster takes in one batch
WINDOW_BYTES = 16_777_216  # unacknowledged payloads, keys and headers of one producer


@dataclass(slots=True, eq=False)
class Sending:
    """The messages of one call, or of a part of a long one: they travel together and have one outcome."""

    parts: Parts
    size_bytes: int
    deadline_s: float = 0.0
    awaited: bool = True  # its caller waits for the outcome; else `flush` tells of a failure
    told: bool = False
    request: "Numbered | None" = None  # none until it is formed


@dataclass(slots=True, eq=False)
class Numbered:
    """One produce request. `uncertain`: an attempt of it may have happened, or may still arrive."""

    first_seq: int
    numbering_epoch: int
    columns: Columns
    body: bytes
    done_below: int
    sendings: list[Sending] = field(default_factory=list)  # none where a former process sent it
    uncertain: bool = False
    confirmed: bool = False
    saved: bool = False  # the outbox has it as it is now
    asked: bool = False
    asked_turn: int = 0
    gap_turn: int = 0  # when it was found to have overtaken an earlier one
    setbacks: int = 0
    not_before_s: float = 0.0

    @property
    def last_seq(self) -> int:
        return self.first_seq + self.columns.count - 1

    @property
    def next_deadline_s(self) -> float | None:
        """When the first of those who still wait for it stops to."""
        return min((sending.deadline_s for sending in self.sendings if not sending.told), default=None)


def sendings_of(payloads: Payloads, shared: Message, most: int) -> Iterator[Sending]:
    """A call's messages in portions of at most `most`, each small enough for one request. Raises Misuse at once."""
    parts = parts_of(payloads, shared)
    sizes = [_size_of(part) for part in parts]
    begin = size = 0
    for at, more in enumerate(sizes):
        if at > begin and (at - begin >= most or size + more > REQUEST_BYTES):
            yield Sending(parts[begin:at], size)
            begin, size = at, 0
        size += more
    if parts:
        yield Sending(parts[begin:], size)


def check_window(window: int) -> None:
    if type(window) is not int or window < 1:
        raise BadValue(field="window", problem=f"is {window!r}; at least 1 message is needed")


def _size_of(part: object) -> int:
    """What it takes of a body. What no request could carry is refused before it gets a number."""
    if isinstance(part, bytes) and len(part) <= FRAME_BODY_BYTES:
        return len(part)
    columns, _ = pack_parts([part])  # type: ignore[list-item]
    return columns.body_bytes
