"""Sessions with peers, without I/O: frames in and out, what waits for whom, and when a session is over.

A frame is its length and a checksum (u32 each), a message or nothing (a ping), and 16 bytes of HMAC-SHA256 over the
frame's number, its length and its content (`FrameMac`). The checksum, of number and length, is there only to notice an
accident in the length at once, instead of waiting for bytes that nobody will send.

Within a session every lane is FIFO: one lane for each log, and one for snapshot streams, which go in their own order
everywhere. Lanes take turns, so what is put into an empty lane waits for the piece that is being written and for one
frame of every other lane, never behind their megabytes: heartbeats of one log pass entries of another, and both pass
snapshots. Within one log a heartbeat follows its entries, which are heartbeats themselves.
"""

import struct
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hmac import compare_digest
from typing import Protocol
from zlib import crc32

from holdfast.client.protocol.errors import BadFrame, HoldfastError, ProtocolViolated, Unavailable
from holdfast.cluster.handshake import MAC_BYTES, Established, FrameMac
from holdfast.cluster.messages import (
    CHUNK_BYTES,
    CONFIGURATION_BYTES,
    MESSAGE_BYTES,
    FoundingMessage,
    Message,
    SnapshotChunk,
    SnapshotDone,
    SnapshotHead,
    decode,
    encode,
)

FRAME_COST_BYTES = 256  # what a waiting frame costs beside its bytes, so that empty ones are bounded too
WRITE_BYTES = 262_144  # one piece for the socket: a lane's first frame waits for one of these at most

_PREFIX = struct.Struct(">II")  # length of the content, checksum of number and length
_SNAPSHOT = -1  # the lane beside those of the logs


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLimits:
    """Bounds of one session."""

    send_bytes: int = 67_108_864  # several windows of 8 MB: who is behind by more is not slow but stuck (R20)
    snapshot_bytes: int = 4 * CHUNK_BYTES + CONFIGURATION_BYTES  # what a stream may have waiting: see `has_room`
    ping_s: float = 1.0  # silence of our own before a ping
    silence_s: float = 5.0  # of the peer: the connection is half open, or the peer stopped
    frame_s: float = 10.0  # for the rest of a frame that has begun, and for one piece to be written


class SessionLost(Unavailable):
    """The connection closed or failed. What was sent may have arrived or not, as with any lost session."""


class PeerSilent(SessionLost):
    """Nothing came for too long, or a frame began and did not end."""


class PeerSlow(SessionLost):
    """More waits for the peer than it will be given memory for, or it takes nothing."""


class Replaced(SessionLost):
    """The peer has begun a newer session."""


class FrameReader:
    """One direction of one session. After BadFrame it is of no use: where frames begin is lost."""

    def __init__(self, key: bytes) -> None:
        self._mac = FrameMac(key)
        self._pending = bytearray()

    @property
    def pending_bytes(self) -> int:
        """How much of an unfinished frame is held: what came of it, whatever length it claims."""
        return len(self._pending)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The contents that `data` completes, each as soon as it is verified. Raises BadFrame."""
        self._pending += data
        at = 0
        try:
            while (end := self._end_of_frame(at)) is not None:
                content = bytes(self._pending[at + _PREFIX.size : end - MAC_BYTES])
                if not compare_digest(self._pending[end - MAC_BYTES : end], self._mac.next(content)):
                    raise BadFrame(problem="a peer frame fails its authentication")
                at = end
                yield content
        finally:
            del self._pending[:at]

    def _end_of_frame(self, at: int) -> int | None:
        """Where the frame that begins at `at` ends; None if not all of it is there."""
        if len(self._pending) - at < _PREFIX.size:
            return None
        length, checksum = _PREFIX.unpack_from(self._pending, at)
        if checksum != crc32(self._mac.place(length)):
            raise BadFrame(problem="the length of a peer frame is damaged")
        if length > MESSAGE_BYTES:
            raise BadFrame(problem=f"a peer frame of {length} bytes; up to {MESSAGE_BYTES} are allowed")
        end: int = at + _PREFIX.size + length + MAC_BYTES
        return end if end <= len(self._pending) else None


class FrameWriter:
    def __init__(self, key: bytes) -> None:
        self._mac = FrameMac(key)

    def seal(self, content: bytes) -> tuple[bytes, bytes, bytes]:
        """The parts of the next frame; they leave in the order in which they were sealed."""
        length = len(content)
        prefix = _PREFIX.pack(length, crc32(self._mac.place(length)))
        return prefix, content, self._mac.next(content)


class SendQueue:
    """What waits for one peer, in lanes that take turns frame by frame."""

    def __init__(self) -> None:
        self.cost_bytes = 0
        self.snapshot_bytes = 0
        self._lanes: dict[int, deque[bytes]] = {}  # the next to be served first; an empty one is not kept

    def put(self, lane: int, content: bytes) -> None:
        self._lanes.setdefault(lane, deque()).append(content)
        self._count(lane, len(content), 1)

    def take(self) -> list[bytes]:
        """The next contents to write: up to WRITE_BYTES, or one that is longer."""
        taken: list[bytes] = []
        size = 0
        while self._lanes:
            lane = next(iter(self._lanes))
            waiting = self._lanes[lane]
            if taken and size + len(waiting[0]) > WRITE_BYTES:
                break
            content = waiting.popleft()
            del self._lanes[lane]
            if waiting:
                self._lanes[lane] = waiting  # behind the others
            taken.append(content)
            size += len(content)
            self._count(lane, len(content), -1)
        return taken

    def clear(self) -> None:
        self._lanes.clear()
        self.cost_bytes = self.snapshot_bytes = 0

    def _count(self, lane: int, size: int, sign: int) -> None:
        self.cost_bytes += sign * (size + FRAME_COST_BYTES)
        if lane == _SNAPSHOT:
            self.snapshot_bytes += sign * size


@dataclass(slots=True)
class Traffic:
    frames_in: int = 0
    frames_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


class Shell(Protocol):
    """Who performs a session's I/O. Neither call waits or calls back."""

    def wake(self) -> None:
        """There is something to write."""

    def cancel(self) -> None:
        """The session is over: stop reading and writing, then `close` it."""


class Session:
    """One connection to one authenticated peer. `number` is this node's own and never comes twice."""

    def __init__(self, number: int, met: Established, limits: LinkLimits, now_s: float, shell: Shell) -> None:
        self.number, self.peer, self.incarnation = number, met.peer, met.incarnation
        self._founding = met.founding
        self.error: HoldfastError | None = None  # why it is over
        self.queue = SendQueue()
        self.traffic = Traffic()
        self._reader, self._writer = FrameReader(met.receive_key), FrameWriter(met.send_key)
        self._limits, self._shell = limits, shell
        self._heard_s = self._wrote_s = now_s
        self._frame_began_s: float | None = None

    @property
    def over(self) -> bool:
        return self.error is not None

    def end(self, error: HoldfastError) -> None:
        """From here on nothing of this session is delivered or sent. The first reason stays."""
        if self.error is None:
            self.error = error
            self.queue.clear()
            self._reader = FrameReader(b"")  # frees what came of an unfinished frame: status keeps the session
            self._shell.cancel()

    # Out

    @property
    def ping_due_s(self) -> float:
        return self._wrote_s + self._limits.ping_s

    @property
    def has_waiting(self) -> bool:
        return bool(self.queue.cost_bytes)

    @property
    def has_room(self) -> bool:
        """Whether a snapshot stream may go on: streams wait for this, where a log is cut off instead."""
        return self.over or self.queue.snapshot_bytes + CHUNK_BYTES <= self._limits.snapshot_bytes

    def put(self, message: Message, log: int) -> None:
        """Queue a message, or end the session if that is too much. Raises BatchTooLarge for what no peer takes."""
        content = encode(message, log)
        bulk = isinstance(message, SnapshotHead | SnapshotChunk | SnapshotDone)
        self.queue.put(_SNAPSHOT if bulk else log, content)
        if self.queue.cost_bytes > self._limits.send_bytes:
            self.end(PeerSlow(f"more than {self._limits.send_bytes} bytes wait for {self.peer!r}"))
        else:
            self._shell.wake()

    def take(self, now_s: float) -> bytes:
        """What to write now: waiting frames, a ping if one is due, or nothing."""
        contents = [] if self.over else self.queue.take()
        if not contents and not self.over and now_s >= self.ping_due_s:
            contents = [b""]
        if not contents:
            return b""
        piece = b"".join(part for content in contents for part in self._writer.seal(content))
        self.traffic.frames_out += len(contents)
        self.traffic.bytes_out += len(piece)
        self._wrote_s = now_s
        return piece

    # In

    @property
    def deadline_s(self) -> float:
        """When `check` will find that the peer is gone, if nothing comes."""
        silent_s = self._heard_s + self._limits.silence_s
        if self._frame_began_s is None:
            return silent_s
        return min(silent_s, self._frame_began_s + self._limits.frame_s)

    @property
    def pending_bytes(self) -> int:
        return self._reader.pending_bytes

    def check(self, now_s: float) -> None:
        """End the session if its deadline has passed. Feed what has come first: it may only be us who slept."""
        if now_s >= self.deadline_s:
            self.end(PeerSilent(f"{self.peer!r} was silent for too long"))

    def messages(self, data: bytes, now_s: float) -> Iterator[tuple[Message, int]]:
        """The messages that `data` completes, with their logs, while the session lasts. Raises BadFrame."""
        self._heard_s = now_s
        self.traffic.bytes_in += len(data)
        for content in self._reader.feed(data):
            self.traffic.frames_in += 1
            self._frame_began_s = None
            if content:
                log, message = decode(content)
                # A node that runs has no ear for the founding of a cluster, nor one that founds for a log.
                if isinstance(message, FoundingMessage) != self._founding:
                    raise BadFrame(problem=f"{type(message).__name__} has no place in this session")
                yield message, log
        if not self._reader.pending_bytes:
            self._frame_began_s = None
        elif self._frame_began_s is None:
            self._frame_began_s = now_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStatus:
    """One peer that was ever connected, for status pages."""

    peer: str
    connected: bool
    incarnation: int
    session_count: int
    last_error: HoldfastError | None
    queued_bytes: int
    traffic: Traffic  # of its last session


@dataclass(frozen=True, slots=True, kw_only=True)
class Handlers:
    """What the owner of the links is told. All are called in turn on the node's one thread, and never inside `send`.

    What they raise is not caught here: it means that the node cannot go on (R26).
    """

    connected: Callable[[str], None]
    disconnected: Callable[[str], None]
    deliver: Callable[[str, Message, int], None]  # peer, message, log


class Links:
    """Who is connected: at most one session for each peer, and its frames alone are delivered (R27)."""

    def __init__(self, handlers: Handlers, limits: LinkLimits) -> None:
        self._handlers, self._limits = handlers, limits
        self._sessions: dict[str, Session] = {}  # told as connected and not yet as disconnected; it may be over
        self._last: dict[str, Session] = {}
        self._counts: dict[str, int] = {}
        self._number = 0

    def open(self, met: Established, now_s: float, shell: Shell) -> Session:
        """A peer has proven itself anew. Whatever its former session still holds is never delivered:

        1. the former session is over, from this moment, for both directions;
        2. the owner hears `disconnected`, and drops what it meant for that session;
        3. the owner hears `connected`; only then may the caller feed the first bytes of the new session.
        """
        former = self._sessions.get(met.peer)
        if former is not None:
            self.close(former, Replaced(f"{met.peer!r} has connected anew"))
        self._number += 1
        session = Session(self._number, met, self._limits, now_s, shell)
        self._sessions[met.peer] = self._last[met.peer] = session
        self._counts[met.peer] = self._counts.get(met.peer, 0) + 1
        self._handlers.connected(met.peer)
        return session

    def close(self, session: Session, error: HoldfastError) -> None:
        """The session is over, if it was not; the owner hears so once, and not in the name of a newer session."""
        session.end(error)
        if self._sessions.get(session.peer) is session:
            del self._sessions[session.peer]
            self._handlers.disconnected(session.peer)

    def receive(self, session: Session, data: bytes, now_s: float) -> None:
        """Bytes of one session. A session that breaks the rules is over; what came before the breach counts."""
        arrived = session.messages(data, now_s)
        while not session.over:  # looked at before each message: the one before may have ended the session
            try:
                found = next(arrived, None)
            except ProtocolViolated as error:
                session.end(error)
                return
            if found is None:
                return
            self._handlers.deliver(session.peer, *found)

    def send(self, peer: str, message: Message, log: int = 0) -> bool:
        """Queue a message; whether there was a session to take it. Never waits and never calls a handler.

        What overruns the peer's bound ends the session; the owner hears `disconnected` soon after, outside this call.
        """
        session = self._sessions.get(peer)
        if session is None or session.over:
            return False
        session.put(message, log)
        return not session.over

    def session(self, peer: str) -> Session | None:
        """The session that lasts, if there is one."""
        session = self._sessions.get(peer)
        return None if session is None or session.over else session

    def status(self) -> list[LinkStatus]:
        return [
            LinkStatus(
                peer=peer,
                connected=not last.over,
                incarnation=last.incarnation,
                session_count=self._counts[peer],
                last_error=last.error,
                queued_bytes=last.queue.cost_bytes,
                traffic=replace(last.traffic),
            )
            for peer, last in sorted(self._last.items())
        ]
