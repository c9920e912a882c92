"""What a node has applied: the LMDB state, the snapshots beside it, and which of them to trust after a crash.

The log is the truth, so the state is not synced commit by commit. A crash of the process leaves it in the page cache,
and the node goes on from it. A crash of the machine may leave anything, so the state is thrown away then and made
from the newest snapshot; the journal, which is cut only behind a durable one, has the rest. How they are told apart:

    1. `state.open` holds the boot id of the machine while the state is open, and is durable before the first change.
    2. A clean end syncs the state first and removes the mark then.
    3. A mark with another boot id at the start means that the machine went down under an open state.

A crash between any two of these steps leads at worst to a rebuild that was not needed. A state that was found damaged
gets a mark that is no boot id, and so is rebuilt as well. The mark also says that a state was made anew: it need not
have come again to where it was, so it is no witness of all that was ever answered from it (`unbroken`).
"""

import os
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread

from holdfast.client.protocol.errors import StateBroken, Unavailable
from holdfast.cluster import comparing, membership
from holdfast.cluster.consensus import BATCH
from holdfast.cluster.journal import Entry
from holdfast.cluster.membership import CONFIGURATION, Configuration
from holdfast.storage import digest, machine
from holdfast.storage.entry import decode_entry
from holdfast.storage.lmdb_store import DATA_FILE, LmdbStore
from holdfast.storage.machine import Applied
from holdfast.storage.snapshot import (
    SnapshotDamaged,
    install_snapshot,
    read_snapshot_meta,
    verify_snapshot,
    write_snapshot,
)
from holdfast.storage.store import ReadTxn, WriteTxn
from holdfast.storage.tables import TABLES, Table

MARK = "state.open"
DAMAGED = "damaged"  # in the mark, in the place of a boot id
REBUILT = " rebuilt"  # ends the mark of a state that was made anew, until a clean end
SNAPSHOTS_KEPT = 2  # the newest one may be the one that cannot be read

_RAFT_KEY = b"raft"  # beside the machine's own row; not part of the digest, which compares what the rules made
_RAFT = struct.Struct(">QQQ")  # applied index, its term, index of the configuration in force; its bytes follow
_NOTHING = Applied((), ())


@dataclass(frozen=True, slots=True)
class Reached:
    """How far a state has come in its log, and who belonged to the log there."""

    index: int
    term: int
    configuration_index: int
    configuration: Configuration


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A received state that is built and durable beside the present one; good for one `swap`."""

    reached: Reached


class StateBusy(Unavailable):
    """A snapshot is being written, or a received one is about to replace the state."""


def boot_id() -> str:
    """Another one after every start of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class NodeState:
    """The state of one log on one node, in a folder of its own.

    `snapshot` and `prepare` are for a worker thread, all else is the node's thread's. Of those two one runs at a time,
    and none between a `prepare` and its `swap`: they read and name what the swap closes and replaces.
    """

    def __init__(self, folder: Path, first: Reached, booted: Callable[[], str] = boot_id) -> None:
        """Open what is there, or begin with `first`: a new member's state before any entry."""
        self._folder = folder
        self._home = folder / "state"
        self._incoming = folder / "state.incoming"
        self._snapshots = folder / "snapshots"
        self._snapshots.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        self._booted = booted()
        mark = self._mark()
        self.rebuilt = mark is not None and mark.removesuffix(REBUILT) != self._booted
        self.unbroken = not self.rebuilt and (mark is None or not mark.endswith(REBUILT))
        if self.rebuilt:
            self._rebuild()
        self._write_mark(self._booted)
        self._damaged = False
        self._alone = Lock()  # held by `snapshot`, and from `prepare` until `swap`
        self._prepared: Prepared | None = None
        self.store = LmdbStore(self._home, TABLES)  # another one after a `swap`: not to be kept
        try:
            self.reached = self._read(first)
        except BaseException:
            self.store.close()
            raise

    @property
    def digest(self) -> int:
        with self.store.read() as txn:
            return digest.maintained(txn)

    @property
    def size_bytes(self) -> int:
        """What the rows take, about as much as a snapshot of them: 20 microseconds, whatever the size."""
        return self.store.used_bytes()

    def apply(self, entries: Sequence[Entry]) -> list[Applied]:
        """Fold committed entries in one transaction that also says how far it came. Raises what stops the node."""
        reached = self.reached
        folds = []
        for command, index, term in entries:
            if index != reached.index + 1:
                raise StateBroken(problem=f"entry {index} is applied after {reached.index}")
            kind = command[:1]
            folds.append(decode_entry(index, memoryview(command)[1:]) if kind == BATCH else None)
            if kind == CONFIGURATION:
                reached = Reached(index, term, index, membership.decode(command))
            else:
                reached = Reached(index, term, reached.configuration_index, reached.configuration)

        def fold(txn: WriteTxn) -> list[Applied]:
            applied = [_NOTHING if entry is None else machine.apply(txn, entry) for entry in folds]
            txn.put(Table.META, _RAFT_KEY, _pack(reached))
            comparing.remember(txn, reached.index)
            return applied

        applied = self.store.transact(fold)
        self.reached = reached
        return applied

    def snapshot(self) -> Reached:
        """Write the present state beside the store, durably. For a worker thread: applying goes on meanwhile.

        Raises StateBusy instead of running beside another one or a `prepare`, and StateBroken for a state that is
        marked as damaged: a copy of the damage must not become what the node is rebuilt from.
        """
        with self._by_itself():
            self._refuse_damaged()
            target = self._snapshots / "next.snapshot"
            write_snapshot(self.store, target, _raft_row)
            self._refuse_damaged()  # it may have been found meanwhile
            reached = reached_by(target)
            self._name(target, reached.index)
            return reached

    def snapshots(self) -> list[tuple[Path, Reached]]:
        """Those that say what they are, oldest first; whether the rest of one can be read is seen when it is."""
        found = []
        for path in self._numbered():
            with suppress(SnapshotDamaged):
                found.append((path, reached_by(path)))
        return found

    def newest_snapshot(self) -> tuple[Path, Reached] | None:
        """The last of `snapshots`."""
        return next(reversed(self.snapshots()), None)

    def rely_on_snapshot(self, path: Path) -> bool:
        """Remove what is older than this snapshot, to make room, if every byte of it can be read; whether it could.

        For a worker thread. Raises StateBusy as `snapshot` does.
        """
        with self._by_itself():
            try:
                verify_snapshot(path)
            except SnapshotDamaged:
                return False
            for each in self._numbered():
                if each < path:  # a newer one may have been received meanwhile
                    each.unlink()
            return True

    def prepare(self, received: Path) -> Prepared:
        """Make everything ready for a snapshot that a peer sent to replace the state. For a worker thread.

        `received` lies in the node's folder and is gone afterwards in any case. Waits for a `snapshot` that runs and
        for another one's `swap`. Raises SnapshotDamaged, StoreFormatUnknown or OSError, and then nothing has changed.

        What a crash after each step of `prepare` and `swap` leaves for the next start:

            1. A store is built beside ours, each byte checked before it counts, and synced.    old; the rest is removed
            2. The received file is synced and named among our own snapshots, durably.          old; the machine's: new
            3. Our store is closed.                                                             the same
            4. One rename, of the one file that a store is, replaces it; the folder is synced.  new
            5. The store is opened. Only now may the journal follow.                            new

        A crash of the machine throws the state away and takes the newest snapshot, so it brings the new one from 2 on:
        all of it is committed, and the journal is reset to it at the start. 2 comes before 4, for once the journal
        begins behind the new state nothing older can rebuild us.
        """
        self._alone.acquire()
        try:
            header = install_snapshot(received, self._incoming)
            reached = _unpack(header.meta)
            with received.open("rb") as file:
                os.fsync(file.fileno())
            self._name(received, reached.index)
        except BaseException:
            received.unlink(missing_ok=True)
            shutil.rmtree(self._incoming, ignore_errors=True)
            self._alone.release()
            raise
        self._prepared = Prepared(reached)
        return self._prepared

    def swap(self, prepared: Prepared) -> Reached:
        """Let the prepared state replace ours, unless ours has come as far meanwhile; how far it is now.

        Takes milliseconds, whatever the sizes, if no other thread reads the store; it waits for those that do. `store`
        is another one afterwards. The steps are told at `prepare`; whatever is raised, the node cannot go on.
        """
        if prepared is not self._prepared:
            raise StateBroken(problem="a state is to be swapped in that was not prepared, or was already")
        ours, theirs = self._home / DATA_FILE, self._incoming / DATA_FILE
        if prepared.reached.index > self.reached.index:
            self.store.close()
            unneeded = os.open(ours, os.O_RDONLY)
            theirs.rename(ours)
            _sync(self._home)
            self.store = LmdbStore(self._home, TABLES)
            self.reached = self._read(prepared.reached)
            if self._damaged:
                self._write_mark(self._booted)
                self._damaged = False
        else:  # going back would unsay what was answered
            unneeded = os.open(theirs, os.O_RDONLY)
            theirs.unlink()
        close_aside(unneeded)
        self._incoming.rmdir()
        self._prepared = None
        self._alone.release()
        return self.reached

    def mark_damaged(self) -> None:
        """Something stored is not what was written: the next start makes the state anew from snapshot and journal.

        Durable when it returns; the caller ends the node soon. A `swap` before that heals the state, and nothing else
        does. Damage that is older than the newest snapshot is in that one, too, and will be found again.
        """
        self._damaged = True
        self._write_mark(DAMAGED)

    def close(self) -> None:
        """A clean end: the next start trusts the state, whatever happens to the machine until then.

        Waits for a `snapshot` that runs.
        """
        try:
            self.store.sync()
        finally:
            self.store.close()
        if not self._damaged:
            (self._folder / MARK).unlink(missing_ok=True)
            _sync(self._folder)

    def abandon(self) -> None:
        """The end of a node that cannot go on: the files are closed, and the next start goes by the mark."""
        self.store.close()

    @contextmanager
    def _by_itself(self) -> Iterator[None]:
        if not self._alone.acquire(blocking=False):
            raise StateBusy("a snapshot is being written, or a received one is being installed")
        try:
            yield
        finally:
            self._alone.release()

    def _remove_leftovers(self) -> None:
        """What a crash left of a snapshot that was being written or installed."""
        if self._incoming.exists():
            shutil.rmtree(self._incoming)
        numbered = set(self._numbered())
        for path in self._snapshots.iterdir():
            if path not in numbered:
                path.unlink()

    def _refuse_damaged(self) -> None:
        if self._damaged:
            raise StateBroken(problem="it is damaged, and no snapshot is made of it")

    def _rebuild(self) -> None:
        """Make the state from the newest snapshot that can be read; without one, from nothing.

        One that cannot be read is removed once an older one has taken its place: it would count as one of those kept.
        """
        damaged = []
        for path in reversed(self._numbered()):
            try:
                verify_snapshot(path)
            except SnapshotDamaged:
                damaged.append(path)
                continue
            install_snapshot(path, self._home)
            for each in damaged:
                each.unlink()
            return
        if self._home.exists():
            shutil.rmtree(self._home)
            _sync(self._folder)

    def _read(self, first: Reached) -> Reached:
        with self.store.read() as txn:
            data = txn.get(Table.META, _RAFT_KEY)
        return first if data is None else _unpack(data)

    def _numbered(self) -> list[Path]:
        return sorted(path for path in self._snapshots.glob("*.snapshot") if path.stem.isdigit())

    def _name(self, path: Path, index: int) -> Path:
        """Give a durable snapshot its place, and let go of those that are not needed any more."""
        target = self._snapshots / f"{index:020d}.snapshot"
        path.rename(target)
        _sync(self._snapshots)
        for old in self._numbered()[:-SNAPSHOTS_KEPT]:
            old.unlink()
        return target

    def _mark(self) -> str | None:
        try:
            return (self._folder / MARK).read_text().strip()
        except FileNotFoundError:
            return None

    def _write_mark(self, booted: str) -> None:
        partial = self._folder / f"{MARK}.new"
        with partial.open("w") as file:
            file.write(booted if self.unbroken else booted + REBUILT)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(self._folder / MARK)
        _sync(self._folder)


def applied_in(folder: Path) -> int:
    """How far the state in a log's folder has come, read beside the node that may have it open; 0 for none."""
    home = folder / "state"
    if not home.exists():
        return 0
    store = LmdbStore(home, TABLES)
    try:
        with store.read() as txn:
            data = txn.get(Table.META, _RAFT_KEY)
    finally:
        store.close()
    return 0 if data is None else _unpack(data).index


def reached_by(snapshot: Path) -> Reached:
    """What a snapshot's own header says; the rest of it is not looked at. Raises SnapshotDamaged."""
    return _unpack(read_snapshot_meta(snapshot))


def close_aside(descriptor: int) -> None:
    """Close a file that has no name any more beside this thread: to free two gigabytes takes 0.3 s."""
    Thread(target=os.close, args=(descriptor,), name="close-aside", daemon=True).start()


def _raft_row(txn: ReadTxn) -> bytes:
    data = txn.get(Table.META, _RAFT_KEY)
    if data is None:
        raise StateBroken(problem="nothing was applied yet, so there is nothing to make a snapshot of")
    return data


def _pack(reached: Reached) -> bytes:
    head = _RAFT.pack(reached.index, reached.term, reached.configuration_index)
    return head + membership.encode(reached.configuration)


def _unpack(data: bytes) -> Reached:
    index, term, configuration_index = _RAFT.unpack_from(data)
    return Reached(index, term, configuration_index, membership.decode(data[_RAFT.size :]))


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
