"""Snapshots between nodes: when to take one and what the journal may forget then, sending one, receiving one.

What a snapshot is and how it replaces a state is `state.py`'s; who needs one and who may send one is decided by the
consensus of the log. A stream is a head, the file in chunks, and an end, all under one epoch of the sender. It lives
and dies with its session: what is lost with that begins anew, under another epoch.

The head carries the SHA-256 of the whole file. Frames are authenticated and the file has checksums of its own, so this
tells one thing more: that the chunks are those of one file, all of them, in their order.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import trio

from holdfast.client.protocol.errors import Unavailable
from holdfast.cluster import membership
from holdfast.cluster.messages import CHUNK_BYTES, Message, SnapshotChunk, SnapshotDone, SnapshotHead
from holdfast.cluster.state import SNAPSHOTS_KEPT, Reached, close_aside, reached_by
from holdfast.storage.snapshot import verify_snapshot
from holdfast.storage.store import StoreError

# When, and what may go then ------------------------------------------------------------------------------


RETRY_MIN_S = 10.0
RETRY_MAX_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """When a snapshot is worth its cost, and how much of the log is kept behind it."""

    log_bytes_min: int = 64 << 20  # one segment of the journal: below that nothing could be dropped
    journal_bytes_max: int = 1 << 30  # the log is kept for those who lag up to this, or to twice the state
    reserve_entries: int = 1_000  # behind the slowest: a peer that is back after a moment goes on from the log
    keep_log: bool = False

    def wants_snapshot(self, *, log_bytes: int, state_bytes: int) -> bool:
        """Whether to take one now, `log_bytes` of log after the last one.

        A snapshot writes the whole state once. Waiting for as much log keeps that at one byte for each byte written
        to the log, and a restart from replaying more than it would read. After a start the size of the journal will
        do for `log_bytes`: too much by what was kept for peers, so at worst the first snapshot comes early.
        """
        return log_bytes >= max(self.log_bytes_min, state_bytes)

    def compacts_to(
        self,
        *,
        base: int,
        snapshots: Sequence[int],
        applied: int,
        matches: Iterable[int],
        journal_bytes: int,
        state_bytes: int,
        short: bool,
        relied: bool,
    ) -> int | None:
        """Up to where the journal may forget; None if that is nothing new.

        `snapshots` are the indexes of our durable ones, ascending. The log is kept behind the last but one: if the
        newest cannot be read when it is needed, the one before it and the log make the state. Where the disk is `short`
        the newest has to do, if it may be `relied` on: it was read whole. A received one may be ahead of the state.

        `applied` is what is applied and on our own disk. `matches` are those of the peers that are connected, if we
        lead: one that waits for a snapshot holds the log after it, so that the snapshot will not come too late. Twice
        the state in log is dearer to send than the state: nobody is waited for beyond that, nor on a short disk.
        """
        behind = 1 if relied else SNAPSHOTS_KEPT
        if self.keep_log or len(snapshots) < behind:
            return None
        target = min(snapshots[-behind], applied)
        if not short and journal_bytes <= max(self.journal_bytes_max, 2 * state_bytes):
            target = min(target, min(matches, default=applied) - self.reserve_entries)
        return target if target > base else None


class Retries:
    """When to try a snapshot again that failed. Each try may write the whole state: they become rare."""

    def __init__(self) -> None:
        self._wait_s, self._at_s = RETRY_MIN_S, float("-inf")

    def due(self, now_s: float) -> bool:
        return now_s >= self._at_s

    def failed(self, now_s: float) -> None:
        self._at_s = now_s + self._wait_s
        self._wait_s = min(2 * self._wait_s, RETRY_MAX_S)

    def succeeded(self) -> None:
        self._wait_s, self._at_s = RETRY_MIN_S, float("-inf")


# Receiving -----------------------------------------------------------------------------------------------


class StreamBroken(Unavailable):
    """This stream cannot become a state. End the session: nothing else tells the sender, who then begins anew."""


@dataclass(frozen=True, slots=True)
class Received:
    """A whole snapshot with the right digest, in a file that now is the caller's: for `NodeState.prepare`."""

    head: SnapshotHead
    path: Path


@dataclass(slots=True)
class _Stream:
    peer: str
    head: SnapshotHead
    path: Path
    descriptor: int
    digest: "hashlib._Hash"
    size_bytes: int = 0

    def belongs(self, peer: str, epoch: int) -> bool:
        return (peer, epoch) == (self.peer, self.head.epoch)


class Receiver:
    """The receiving side of one log: one stream at a time, into a file. Every call returns at once.

    Ask the consensus first whether it accepts the head. What belongs to no stream, or to a former one, is ignored; what
    belongs to the present one and does not fit raises StreamBroken, and the stream is gone.
    """

    def __init__(
        self,
        folder: Path,
        reserve_bytes: int = 0,
        free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
    ) -> None:
        """Removes what an earlier life left unfinished. `folder` is the log's, for the file is renamed within it.

        `reserve_bytes` is what the journal is left in any case.
        """
        self._folder = folder / "received"
        if self._folder.exists():
            shutil.rmtree(self._folder)
        self._folder.mkdir(parents=True)
        self._reserve_bytes, self._free_bytes = reserve_bytes, free_bytes
        self._stream: _Stream | None = None
        self._count = 0

    @property
    def receiving(self) -> tuple[SnapshotHead, int] | None:
        """The present stream and how many bytes of it have come, for status pages."""
        return None if self._stream is None else (self._stream.head, self._stream.size_bytes)

    def head(self, peer: str, head: SnapshotHead) -> None:
        """A stream begins, and takes the place of any other: the consensus has seen that its sender leads."""
        self._drop()
        self._count += 1
        path = self._folder / f"{self._count}.partial"  # never an old name: the last file may be with its new owner
        needed = 2 * head.size_bytes + self._reserve_bytes  # as it comes, and as the store that is built of it
        try:
            # A disk that fills up would end the node, for the journal needs it too.
            if needed > (free := self._free_bytes(self._folder)):
                problem = f"the snapshot of {peer!r} needs {needed} bytes of disk with the reserve, {free} are free"
                raise StreamBroken(f"{problem}: make room")
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StreamBroken(f"the snapshot of {peer!r} cannot be stored: {error}") from error
        self._stream = _Stream(peer, head, path, descriptor, hashlib.sha256())

    def chunk(self, peer: str, chunk: SnapshotChunk) -> None:
        stream = self._stream
        if stream is None or not stream.belongs(peer, chunk.epoch):
            return
        if chunk.offset != stream.size_bytes:
            raise self._broken(f"has a chunk at {chunk.offset} where {stream.size_bytes} is next")
        if chunk.offset + len(chunk.data) > stream.head.size_bytes:
            raise self._broken(f"is longer than the {stream.head.size_bytes} bytes it was said to have")
        try:
            _write(stream.descriptor, chunk.data)
        except OSError as error:
            raise self._broken(f"cannot be stored: {error}") from error
        stream.digest.update(chunk.data)
        stream.size_bytes += len(chunk.data)

    def done(self, peer: str, done: SnapshotDone) -> Received | None:
        """The sender has sent all: the file, if it ends the present stream. It is not synced."""
        stream = self._stream
        if stream is None or not stream.belongs(peer, done.epoch):
            return None
        head = stream.head
        if (done.index, stream.size_bytes) != (head.index, head.size_bytes):
            raise self._broken(f"ends at {done.index} after {stream.size_bytes} of {head.size_bytes} bytes")
        if stream.digest.digest() != head.digest:
            raise self._broken("has another digest than its head")
        try:
            reached = reached_by(stream.path)
        except StoreError as error:
            raise self._broken(f"cannot be read: {error}") from error
        # The log goes on from what the head says, the state from what the file says (R23).
        if _placed(reached) != (head.index, head.index_term, head.configuration_index, head.configuration):
            raise self._broken("is of another place in the log than its head")
        os.close(stream.descriptor)
        self._stream = None
        return Received(head, stream.path)

    def disconnected(self, peer: str) -> None:
        """The session is over, and the stream with it."""
        if self._stream is not None and self._stream.peer == peer:
            self._drop()

    def _broken(self, why: str) -> StreamBroken:
        peer = "" if self._stream is None else self._stream.peer
        self._drop()
        return StreamBroken(f"the snapshot of {peer!r} {why}")

    def _drop(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.path.unlink(missing_ok=True)
            close_aside(stream.descriptor)


def _placed(reached: Reached) -> tuple[int, int, int, bytes]:
    return reached.index, reached.term, reached.configuration_index, membership.encode(reached.configuration)


def _write(descriptor: int, data: bytes) -> None:
    written = os.write(descriptor, data)
    while written < len(data):  # a short write tells no reason; the next one does
        written += os.write(descriptor, memoryview(data)[written:])


# Sending -------------------------------------------------------------------------------------------------


class Link(Protocol):
    """What a stream needs of `Peers`."""

    def send(self, peer: str, message: Message, log: int = 0) -> bool: ...

    async def room(self, peer: str) -> int | None: ...


async def send_snapshot(
    link: Link, peer: str, path: Path, reached: Reached, *, term: int, epoch: int, log: int = 0
) -> bool:
    """Stream a durable snapshot to a peer; whether all of it went into one session. The peer answers to the log.

    `path` and `reached` are those of `NodeState.newest_snapshot`, `term` is the one in which we lead, `epoch` that of
    the event that asked. The configuration in the head is the snapshot's own, not the one that rules now (R23). Only
    the link's room sets the pace. Ends quietly when the session that was there at the call is over: the next session
    asks anew, under another epoch.

    Raises SnapshotDamaged or OSError before anything was sent, if the file is not what was written: take another one.
    To be cancelled when the leadership or the epoch is over.
    """
    session = await link.room(peer)
    if session is None:
        return False
    size_bytes, digest = await trio.to_thread.run_sync(_examine, path, abandon_on_cancel=True)
    index, index_term, configuration_index, configuration = _placed(reached)

    async def put(message: Message) -> bool:
        return await link.room(peer) == session and link.send(peer, message, log)

    head = SnapshotHead(
        term=term,
        index=index,
        index_term=index_term,
        epoch=epoch,
        configuration_index=configuration_index,
        size_bytes=size_bytes,
        digest=digest,
        configuration=configuration,
    )
    # Kept open: once it has been replaced by newer ones it has no name any more.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not await put(head):
            return False
        for offset in range(0, size_bytes, CHUNK_BYTES):
            data = await trio.to_thread.run_sync(os.pread, descriptor, CHUNK_BYTES, offset)
            if not await put(SnapshotChunk(epoch, offset, data)):
                return False
        return await put(SnapshotDone(epoch, index))
    finally:
        close_aside(descriptor)


def _examine(path: Path) -> tuple[int, bytes]:
    """Size and digest of a snapshot, of which every byte was checked.

    A rotten one would be refused at the other end, after gigabytes, and then be sent again.
    """
    verify_snapshot(path)
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").digest()
