"""The unconfirmed window of one producer on disk, so that a process that was killed sends it again, the same.

One file for one producer of one queue, held by one process at a time. It holds requests as they were numbered and cut;
what is confirmed leaves it with the next commit. The file says whose it is, and refuses to be anybody else's: numbers
mean something only together with their client id, their queue's id and their cluster.
"""

import fcntl
import os
import sqlite3
import weakref
from collections.abc import Iterable
from os import PathLike
from threading import Lock
from typing import ClassVar

from holdfast.client.protocol.errors import Misuse, Refused
from holdfast.client.protocol.values import Columns, QueueId
from holdfast.client.window import Numbered

FORMAT = 1
_COLUMNS = ("ends", "key_ends", "header_ends", "delays", "not_befores", "ttls")
_SCHEMA = f"""
CREATE TABLE owner (
    format INTEGER NOT NULL, queue TEXT NOT NULL, queue_id INTEGER NOT NULL, client_id TEXT NOT NULL,
    cluster_id TEXT NOT NULL
);
CREATE TABLE requests (
    first_seq INTEGER PRIMARY KEY, numbering_epoch INTEGER NOT NULL, done_below INTEGER NOT NULL, body BLOB NOT NULL,
    {", ".join(f"{name} BLOB NOT NULL" for name in _COLUMNS)}
);
"""


class OutboxInUse(Refused):
    """Another producer holds this outbox, in this process or in another."""

    fact_names: ClassVar[tuple[str, ...]] = ("path",)
    text = "the outbox {path} is held by another producer; one at a time"
    path: str


class OutboxMismatch(Refused):
    """The outbox holds what was meant for another producer, queue or cluster; nothing of it was sent."""

    fact_names: ClassVar[tuple[str, ...]] = ("path", "problem")
    text = "the outbox {path} is not for this: {problem}; use it where it belongs, or another file"
    path: str
    problem: str


class OutboxFailed(Misuse):
    """The file cannot be opened, read or written; what was to be sent was not."""

    fact_names: ClassVar[tuple[str, ...]] = ("path", "problem")
    text = "the outbox {path} cannot be used: {problem}"
    path: str
    problem: str


class Outbox:
    """Opened and locked when made. One thread at a time; a forked child must not touch it."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = os.path.realpath(os.fspath(path))
        self._lock = _hold(self.path)
        self._saving = Lock()  # held in a commit, and by whoever forks meanwhile
        try:
            self._file = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
            try:
                # One sync for each commit; a commit that was answered survives a power cut.
                self._file.execute("PRAGMA journal_mode = WAL")
                self._file.execute("PRAGMA synchronous = FULL")
                self._file.execute("BEGIN IMMEDIATE")
                if not self._file.execute("SELECT 1 FROM sqlite_master WHERE name = 'owner'").fetchone():
                    for statement in _SCHEMA.split(";")[:-1]:
                        self._file.execute(statement)
                self._file.execute("COMMIT")
            except sqlite3.Error:
                self._file.close()
                raise
        except sqlite3.Error as error:
            _let_go(self.path, self._lock)
            raise OutboxFailed(path=self.path, problem=str(error)) from error
        _open.add(self)

    def claim(self, queue: str, queue_id: QueueId, client_id: str, cluster_id: str) -> list[Numbered]:
        """What is in it, ascending. Raises OutboxMismatch unless all of it was meant for this producer.

        An empty outbox changes hands: nothing can be sent to the wrong place.
        """
        owner = (FORMAT, queue, int(queue_id), client_id, cluster_id)
        try:
            found = self._file.execute("SELECT format, queue, queue_id, client_id, cluster_id FROM owner").fetchone()
            left = self._left()
            if found is not None and found != owner and (left or found[0] != FORMAT):
                raise OutboxMismatch(path=self.path, problem=_difference(found, owner, len(left)))
            if found != owner:
                self._file.execute("BEGIN IMMEDIATE")
                self._file.execute("DELETE FROM owner")
                self._file.execute("INSERT INTO owner VALUES (?, ?, ?, ?, ?)", owner)
                self._file.execute("COMMIT")
        except sqlite3.Error as error:
            raise OutboxFailed(path=self.path, problem=str(error)) from error
        return left

    def save(self, erased: Iterable[int], stored: Iterable[Numbered]) -> None:
        """One commit; when this returns it is on disk. Raises OutboxFailed, and then nothing of it is."""
        rows = [
            (
                request.first_seq,
                request.numbering_epoch,
                request.done_below,
                request.body,
                *(getattr(request.columns, name) for name in _COLUMNS),
            )
            for request in stored
        ]
        try:
            with self._saving:
                self._commit(erased, rows)
        except sqlite3.Error as error:
            raise OutboxFailed(path=self.path, problem=str(error)) from error

    def close(self) -> None:
        """Let another producer have it. Closing twice is fine."""
        self._file.close()
        _let_go(self.path, self._lock)
        self._lock = -1

    def _commit(self, erased: Iterable[int], rows: Iterable[tuple[object, ...]]) -> None:
        self._file.execute("BEGIN IMMEDIATE")
        try:
            self._file.executemany("DELETE FROM requests WHERE first_seq = ?", [(number,) for number in erased])
            self._file.executemany(f"INSERT INTO requests VALUES (?, ?, ?, ?{', ?' * len(_COLUMNS)})", rows)
            self._file.execute("COMMIT")
        except BaseException:
            if self._file.in_transaction:
                self._file.execute("ROLLBACK")
            raise

    def _left(self) -> list[Numbered]:
        names = ", ".join(("first_seq", "numbering_epoch", "done_below", "body", *_COLUMNS))
        rows = self._file.execute(f"SELECT {names} FROM requests ORDER BY first_seq")
        return [
            Numbered(first, epoch, Columns(**dict(zip(_COLUMNS, columns, strict=True))), body, done_below)
            for first, epoch, done_below, body, *columns in rows
        ]


# One process at a time -----------------------------------------------------------------------------------

_held: set[str] = set()
_held_lock = Lock()


def _hold(path: str) -> int:
    """Lock the file beside the outbox: it ends with the process, however that ends, and no child inherits it."""
    with _held_lock:
        if path in _held:  # such a lock does not keep out its own process, and would end with the second opening
            raise OutboxInUse(path=path)
        try:
            lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise OutboxFailed(path=path, problem=str(error)) from error
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise OutboxInUse(path=path) from error
        _held.add(path)
        return lock


def _let_go(path: str, lock: int) -> None:
    with _held_lock:
        if lock != -1:
            _held.discard(path)
            os.close(lock)


# Forks -----------------------------------------------------------------------------------------------------

_open: "weakref.WeakSet[Outbox]" = weakref.WeakSet()
_forking = Lock()  # one thread at a time: `_at_fork` is what it holds
_at_fork: list[Outbox] = []
_left_behind: list[Outbox] = []  # in a child: kept for ever, so that the parent's file is not closed a second time


def _before_fork() -> None:
    """Nobody forks in the middle of a commit: the child would have half of it."""
    _forking.acquire()
    _at_fork[:] = list(_open)
    for outbox in _at_fork:
        outbox._saving.acquire()


def _after_fork_in_parent() -> None:
    for outbox in _at_fork:
        outbox._saving.release()
    _at_fork.clear()
    _forking.release()


def _after_fork_in_child() -> None:
    global _held_lock, _forking
    _left_behind.extend(_at_fork)
    _forking = Lock()
    _held_lock = Lock()
    _held.clear()  # the parent holds them, and the system says so to who asks


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


# For people ------------------------------------------------------------------------------------------------


def _difference(found: tuple[object, ...], owner: tuple[object, ...], count: int) -> str:
    """For people: what is not as it was."""
    names = ("format", "queue", "queue id", "client_id", "cluster")
    for name, was, is_now in zip(names, found, owner, strict=True):
        if was != is_now:
            return f"its {count} unconfirmed requests were for {name} {was!r}, and this is {is_now!r}"
    return "it is the same"
