"""What the state machine asks of a place to keep rows, and how that place fails.

Tables are small numbers, keys are bytes ordered as bytes, values are bytes. The contract is the part that two
stores must share and no more: whatever one store can do and the other cannot stays out of these protocols,
and `tests/conformance/test_stores.py` runs every sentence below against both.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from os import PathLike
from typing import Protocol, TypeVar

T = TypeVar("T")

MAX_KEY_BYTES = 511  # LMDB's own limit; names of any length are interned to ids before they become keys


class ReadTxn(Protocol):
    """One consistent state of all tables, for as long as the transaction lasts.

    An empty key is refused with `StoreMisused`; a key longer than `MAX_KEY_BYTES` is merely absent. Bounds
    are bytes of any length, the empty one included. A transaction belongs to one thread at a time.
    """

    def get(self, table: int, key: bytes) -> bytes | None:
        """The value of `key`, or None."""
        ...

    def view(self, table: int, key: bytes) -> memoryview | None:
        """The value of `key`, to look at until the next write or the end of the transaction and no longer.

        A read transaction copies nothing, so a body can go from the store to a socket. A write transaction
        may copy: LMDB's binding hands out one kind of buffer per transaction, and apply wants bytes.
        """
        ...

    def first(self, table: int, low: bytes, high: bytes) -> tuple[bytes, bytes] | None:
        """The row with the smallest key in low <= key < high, or None."""
        ...

    def last(self, table: int, low: bytes, high: bytes) -> tuple[bytes, bytes] | None:
        """The row with the greatest key in low <= key < high, or None."""
        ...

    def scan(self, table: int, low: bytes, high: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The rows of low <= key < high, ascending.

        The caller does not write to that table while it iterates, and does not iterate past the transaction.
        """
        ...


class WriteTxn(ReadTxn, Protocol):
    """The one transaction that changes rows; it reads its own writes.

    Writes refuse a key outside 1..`MAX_KEY_BYTES` with `StoreMisused`.
    """

    def put(self, table: int, key: bytes, value: bytes | memoryview) -> bytes | None:
        """Set `key`; return the value it had, or None."""
        ...

    def append(self, table: int, key: bytes, value: bytes | memoryview) -> None:
        """Add a key promised to be greater than every key of the table; `StoreMisused` if it is not."""
        ...

    def insert(self, table: int, key: bytes, value: bytes | memoryview) -> None:
        """Add a key that the caller knows to be absent; `StoreMisused` if it is there."""
        ...

    def delete(self, table: int, key: bytes) -> bytes | None:
        """Remove `key`; return the value it had, or None."""
        ...


class Store(Protocol):
    """Tables under transactions: one writer at a time, readers beside it, each on any thread.

    A thread opens no second read transaction inside its first: the store may have to wait for the first to
    end before it lets the second begin.
    """

    @property
    def kind(self) -> str:
        """Which implementation wrote the bytes that `copy_into` gives: "lmdb" or "memory"."""
        ...

    def read(self) -> AbstractContextManager[ReadTxn]:
        """The last committed state, unmoved by later commits until the block ends."""
        ...

    def transact(self, work: Callable[[WriteTxn], T]) -> T:
        """Run `work` in one write transaction: committed when it returns, undone when it raises.

        `work` may be run again from the start after its first run was undone (the map had to grow), so
        nothing but its result may leave it. It lets exceptions of its transaction pass through. A commit
        survives the process, not a power cut; see `sync`.
        """
        ...

    def copy_into(self, descriptor: int, started: Callable[[ReadTxn], None] | None = None) -> None:
        """Write one consistent state to a file or pipe, from any thread, beside writes.

        `started` is given the very state that is copied, before its first byte is written.
        """
        ...

    def copy_to(self, path: str | PathLike[str]) -> None:
        """`copy_into` one file at `path`, replaced if it exists and fsynced; no half-written file remains."""
        ...

    def used_bytes(self) -> int:
        """Space that the present rows take, free and reusable space not counted."""
        ...

    def sync(self) -> None:
        """Every commit up to now survives a power cut once this returns."""
        ...

    def close(self) -> None:
        """End the store; a second close does nothing. Open readers are waited for."""
        ...


class StoreError(Exception):
    """The store could not do what it promised. A node that meets one stops: it never becomes a reply.

    These errors stay inside a node, so they have no wire code and stand apart from the protocol's tree.
    """


class StoreFull(StoreError):
    """No room: the disk is full, or the map has reached the greatest size it may have."""


class StoreBusy(StoreError):
    """Readers stayed open longer than the store may wait, or more of them came than it has room for."""


class StoreClosed(StoreError):
    """The store was closed before this call."""


class StoreMisused(StoreError):
    """The caller broke the contract above: our own bug."""


class StoreDamaged(StoreError):
    """The bytes on disk are not what was written."""


class StoreFormatUnknown(StoreError):
    """The bytes on disk are whole but not ours to read: another program's, or another version's."""

    def __init__(self, what: str, *, found: int | None, supported: int) -> None:
        seen = "no version of ours" if found is None else f"version {found}"
        super().__init__(f"{what}: found {seen}, this program reads version {supported}")
        self.found = found
        self.supported = supported
