"""One replica of the state machine inside this process: a store, and the fold over it.

Owns a directory in which it may be reopened and copied. It knows no rule and no clock: whoever drives it gives it log
entries as bytes. Everything of `storage/` is imported inside, so that only those pay who call it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from holdfast.client.protocol.commands import Envelope
from holdfast.client.protocol.queries import Query
from holdfast.client.protocol.replies import Answer, Leased
from holdfast.client.protocol.values import Columns

Kind = Literal["lmdb", "memory"]


@dataclass(frozen=True, slots=True)
class Folded:
    """What one entry gave: an answer to each command, and what the fold asked of the leader."""

    answers: tuple[Answer, ...]
    effects: tuple[object, ...]


class Replica:
    """A store of one kind in `directory`, opened from what is there."""

    def __init__(self, kind: Kind, directory: Path) -> None:
        from holdfast.storage.lmdb_store import LmdbStore
        from holdfast.storage.memory_store import DUMP_FILE, MemoryStore
        from holdfast.storage.store import Store
        from holdfast.storage.tables import TABLES

        directory.mkdir(parents=True, exist_ok=True)
        store: Store
        if kind == "lmdb":
            store = LmdbStore(directory, TABLES)
        else:
            dump = directory / DUMP_FILE
            store = MemoryStore(TABLES, source=dump if dump.exists() else None)
        self.kind: Kind = kind
        self.directory = directory
        self._store = store

    def fold(self, index: int, data: bytes) -> Folded:
        """Apply the entry of these bytes in one transaction, as every node does."""
        from holdfast.storage.entry import decode_entry
        from holdfast.storage.machine import apply

        entry = decode_entry(index, data)
        applied = self._store.transact(lambda txn: apply(txn, entry))
        return Folded(applied.answers, applied.effects)

    def ask(self, query: Query) -> Answer:
        from holdfast.storage import views

        with self._store.read() as txn:
            return views.answer(txn, query)

    def deliver(self, queue_id: int, leased: Leased) -> Leased:
        """The lease's answer with its messages, which are read from the store."""
        from holdfast.storage import views

        with self._store.read() as txn:
            return views.deliver(txn, queue_id, leased)

    def digest(self) -> int:
        """The digest of the whole state, to compare replicas by."""
        from holdfast.storage import digest

        with self._store.read() as txn:
            return digest.maintained(txn)

    def reopened(self) -> "Replica":
        """Close the store and open it again from its directory."""
        from holdfast.storage.memory_store import DUMP_FILE

        if self.kind == "memory":
            self._store.copy_to(self.directory / DUMP_FILE)
        self._store.close()
        return Replica(self.kind, self.directory)

    def copied(self, directory: Path) -> "Replica":
        """Another replica in `directory`, made from a snapshot of this one, which is closed."""
        from holdfast.storage.snapshot import install_snapshot, write_snapshot

        snapshot = directory.with_suffix(".snapshot")
        write_snapshot(self._store, snapshot, b"")
        self._store.close()
        install_snapshot(snapshot, directory, kind=self.kind)
        snapshot.unlink()
        return Replica(self.kind, directory)

    def close(self) -> None:
        self._store.close()


def encode(stamp_ms: int, envelopes: Sequence[Envelope]) -> bytes:
    """The bytes of a log entry."""
    from holdfast.storage.entry import encode_entry

    return encode_entry(stamp_ms, envelopes)


def content_hash(columns: Columns, body: bytes) -> bytes:
    """The hash of a batch, as the node that proposes it computes it."""
    from holdfast.storage.state import content_hash as hashed

    return hashed(columns, body)
