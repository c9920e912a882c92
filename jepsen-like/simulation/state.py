"""The real state machine on a store in memory, as the `Machine` of a simulated node; a copy of it is a snapshot."""

from collections.abc import Callable

from holdfast.cluster import comparing, membership
from holdfast.cluster.consensus import BATCH
from holdfast.cluster.journal import Entry
from holdfast.cluster.membership import CONFIGURATION
from holdfast.cluster.state import Reached
from holdfast.storage import digest, machine
from holdfast.storage.entry import decode_entry
from holdfast.storage.machine import Applied
from holdfast.storage.memory_store import MemoryStore
from holdfast.storage.store import WriteTxn
from holdfast.storage.tables import TABLES

# An entry, what it answered, and the digest of the state behind it.
Watch = Callable[[Entry, Applied, bytes], None]

_ABOVE = b"\xff" * 64
_NOTHING = Applied((), ())


class MachineState:
    """`holdfast.storage` itself: apply raises or changes rows, and every node must end with the same ones."""

    def __init__(self, reached: Reached, watch: Watch, store: MemoryStore | None = None) -> None:
        self.reached = reached
        self.store = store or MemoryStore(tables=TABLES)
        self._watch = watch

    def apply(self, entries: list[Entry]) -> list[Applied]:
        """As `NodeState` does it: all in one transaction. `watch` is told of each, once they are applied."""
        reached = self.reached

        def fold(txn: WriteTxn) -> list[tuple[Applied, bytes]]:
            folded = []
            for command, index, _ in entries:
                is_batch = command[:1] == BATCH
                applied = machine.apply(txn, decode_entry(index, command[1:])) if is_batch else _NOTHING
                folded.append((applied, digest.maintained(txn).to_bytes(32, "big")))
            comparing.remember(txn, reached.index)
            return folded

        for command, index, term in entries:
            if index != reached.index + 1:
                raise AssertionError(f"entry {index} is applied after {reached.index}")
            ruling = (reached.configuration_index, reached.configuration)
            if command[:1] == CONFIGURATION:
                ruling = (index, membership.decode(command))
            reached = Reached(index, term, *ruling)
        folded = self.store.transact(fold)
        self.reached = reached
        for entry, (applied, after) in zip(entries, folded, strict=True):
            self._watch(entry, applied, after)
        return [applied for applied, _ in folded]

    def digest(self) -> bytes:
        with self.store.read() as txn:
            return digest.maintained(txn).to_bytes(32, "big")

    def recomputed(self) -> bytes:
        with self.store.read() as txn:
            return digest.recomputed(txn).to_bytes(32, "big")

    def copied(self) -> "MachineState":
        store = MemoryStore(tables=TABLES)
        with self.store.read() as txn:
            rows = [(table, *row) for table in range(len(TABLES)) for row in txn.scan(table, b"", _ABOVE)]

        def copy(txn: WriteTxn) -> None:
            for row in rows:
                txn.append(*row)

        store.transact(copy)
        return MachineState(self.reached, self._watch, store)

    def become(self, other: "MachineState") -> None:
        """Another state takes the place of this one, in the hands of whoever has this one."""
        twin = other.copied()
        self.reached, self.store = twin.reached, twin.store
