"""The seam where a committed entry meets a state machine, and two machines for it.

`ChainState` remembers a hash over all entries, so that a whole history is compared in sixteen bytes. `MachineState` is
the real state machine on a store in memory. Both carry the configuration in force, as a node's state does.
"""

import copy
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from holdfast.client.protocol.replies import Answer
from holdfast.cluster import membership
from holdfast.cluster.consensus import BATCH
from holdfast.cluster.membership import CONFIGURATION, Configuration
from holdfast.storage import digest, machine
from holdfast.storage.entry import decode_entry
from holdfast.storage.memory_store import MemoryStore
from holdfast.storage.tables import TABLES

S = TypeVar("S", bound="State")

_ABOVE = b"\xff" * 64


class State(Protocol):
    """What a node has applied. A copy of it is a snapshot."""

    index: int
    term: int
    configuration: Configuration
    configuration_index: int

    def apply(self, index: int, term: int, command: bytes) -> tuple[Answer, ...]: ...
    def digest(self) -> bytes: ...
    def copied(self: S) -> S: ...


@dataclass
class ChainState:
    configuration: Configuration
    index: int = 1
    term: int = 0
    configuration_index: int = 0
    chain: bytes = b""

    def apply(self, index: int, term: int, command: bytes) -> tuple[Answer, ...]:
        _note(self, index, term, command)
        head = b"%d %d " % (index, term)
        self.chain = hashlib.blake2b(self.chain + head + command, digest_size=16).digest()
        return ()

    def digest(self) -> bytes:
        return self.chain

    def copied(self) -> "ChainState":
        return copy.copy(self)


@dataclass
class MachineState:
    """`holdfast.storage` itself: apply raises or changes rows, and every node must end with the same ones."""

    configuration: Configuration
    index: int = 1
    term: int = 0
    configuration_index: int = 0
    store: MemoryStore = field(default_factory=lambda: MemoryStore(tables=TABLES))

    def apply(self, index: int, term: int, command: bytes) -> tuple[Answer, ...]:
        _note(self, index, term, command)
        if command[:1] != BATCH:
            return ()
        entry = decode_entry(index, command[1:])
        return self.store.transact(lambda txn: machine.apply(txn, entry)).answers

    def digest(self) -> bytes:
        with self.store.read() as txn:
            return digest.maintained(txn).to_bytes(32, "big")

    def recomputed(self) -> bytes:
        with self.store.read() as txn:
            return digest.recomputed(txn).to_bytes(32, "big")

    def copied(self) -> "MachineState":
        store = MemoryStore(tables=TABLES)
        with self.store.read() as txn:
            rows = [(table, key, value) for table in range(len(TABLES)) for key, value in txn.scan(table, b"", _ABOVE)]
        store.transact(lambda txn: [txn.put(*row) for row in rows])
        return MachineState(self.configuration, self.index, self.term, self.configuration_index, store)


MakeState = Callable[[Configuration], State]


def _note(state: State, index: int, term: int, command: bytes) -> None:
    if index != state.index + 1:
        raise AssertionError(f"entry {index} is applied after {state.index}")
    state.index, state.term = index, term
    if command[:1] == CONFIGURATION:
        state.configuration, state.configuration_index = membership.decode(command), index
