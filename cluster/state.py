"""What a node has applied: the LMDB state, the snapshots beside it, and which of them to trust after a crash.

The log is the truth, so the state is not synced commit by commit. A crash of the process leaves it in the page cache,
and the node goes on from it. A crash of the machine may leave anything, so the state is thrown away then and made
from the newest snapshot; the journal, which is cut only behind a durable one, has the rest. How they are told apart:

    1. `state.open` holds the boot id of the machine while the state is open, and is durable before the first change.
    2. A clean end syncs the state first and removes the mark then.
    3. A mark with another boot id at the start means that the machine went down under an open state.

A crash between any two of these steps leads at worst to a rebuild that was not needed.
"""

import os
import shutil
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.client.protocol.errors import StateBroken
from holdfast.cluster import membership
from holdfast.cluster.consensus import BATCH
from holdfast.cluster.journal import Entry
from holdfast.cluster.membership import CONFIGURATION, Configuration
from holdfast.storage import digest, machine
from holdfast.storage.entry import decode_entry
from holdfast.storage.lmdb_store import LmdbStore
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


def boot_id() -> str:
    """Another one after every start of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class NodeState:
    """The state of one log on one node, in a folder of its own. All methods but `snapshot` are the node's thread's."""

    def __init__(self, folder: Path, first: Reached, booted: Callable[[], str] = boot_id) -> None:
        """Open what is there, or begin with `first`: a new member's state before any entry."""
        self._folder = folder
        self._home = folder / "state"
        self._snapshots = folder / "snapshots"
        self._snapshots.mkdir(parents=True, exist_ok=True)
        present = booted()
        self.rebuilt = self._mark() not in (None, present)
        if self.rebuilt:
            self._rebuild()
        self._write_mark(present)
        self.store = LmdbStore(self._home, TABLES)
        self.reached = self._read(first)

    @property
    def digest(self) -> int:
        with self.store.read() as txn:
            return digest.maintained(txn)

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
            return applied

        applied = self.store.transact(fold)
        self.reached = reached
        return applied

    def snapshot(self) -> Reached:
        """Write the present state beside the store, durably. For a worker thread: applying goes on meanwhile."""
        target = self._snapshots / "next.snapshot"
        write_snapshot(self.store, target, _raft_row)
        reached = _unpack(read_snapshot_meta(target))
        self._name(target, reached.index)
        return reached

    def newest_snapshot(self) -> tuple[Path, Reached] | None:
        """The newest one by its name; whether it can be read is seen when it is."""
        found = self._numbered()
        return None if not found else (found[-1], _unpack(read_snapshot_meta(found[-1])))

    def install(self, received: Path) -> Reached:
        """Replace the state by a snapshot that a peer sent. Afterwards the journal may follow it, not before.

        It is put among our own snapshots first: once the journal begins behind it, nothing older can rebuild us.
        """
        verify_snapshot(received)
        reached = _unpack(read_snapshot_meta(received))
        with received.open("rb") as file:
            os.fsync(file.fileno())
        kept = self._name(received, reached.index)
        self.store.close()
        install_snapshot(kept, self._home)
        self.store = LmdbStore(self._home, TABLES)
        self.reached = self._read(reached)
        return self.reached

    def close(self) -> None:
        """A clean end: the next start trusts the state, whatever happens to the machine until then."""
        self.store.sync()
        self.store.close()
        (self._folder / MARK).unlink(missing_ok=True)
        _sync(self._folder)

    def _rebuild(self) -> None:
        """Make the state from the newest snapshot that can be read; without one, from nothing."""
        for path in reversed(self._numbered()):
            try:
                verify_snapshot(path)
            except SnapshotDamaged:
                continue
            install_snapshot(path, self._home)
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
            file.write(booted)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(self._folder / MARK)
        _sync(self._folder)


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
