"""The floor under a figure of the bench: the same LMDB operations, keys and bytes, without the rules.

`RecordingTxn` notes what the fold asks of its transaction. `replay` does the same again in the barest loop that Python
allows: one call of the binding for each operation, bound before the clock runs, in the same order, with as many
commits. What is left out is everything that a store may do cleverly: a put does not look for the former value, nor a
delete. `replay_plainly` is the loop that one would write: the binding's own calls by name, one after the other.

An entry is replayed as soon as it was recorded. The keys and values of a whole round are megabytes, and a replay of all
of them at its end wavered between 180,000 and 420,000 messages a second, in its operations alone: no page faults, no
switches, begin and commit as ever. Most likely it measured in which cache they still lay, which the fold, that makes
its keys itself, hardly feels. Entry by entry the rounds of a run differ half as much.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from holdfast.storage.lmdb_store import LmdbStore
from holdfast.storage.store import WriteTxn
from holdfast.storage.tables import Table

Operation = tuple[int, str, tuple[Any, ...]]  # table, kind, arguments


@dataclass(slots=True)
class Trace:
    """What one entry did, in order."""

    operations: list[Operation] = field(default_factory=list)

    def counts(self) -> Counter[tuple[str, str]]:
        """How many operations of each (kind, table)."""
        return Counter((kind, Table(table).name.lower()) for table, kind, _ in self.operations)


class RecordingTxn:
    """A write transaction that notes every operation before it passes it on."""

    def __init__(self, txn: WriteTxn, trace: Trace) -> None:
        self._txn = txn
        self._note = trace.operations.append

    def get(self, table: int, key: bytes) -> bytes | None:
        self._note((table, "get", (key,)))
        return self._txn.get(table, key)

    def view(self, table: int, key: bytes) -> memoryview | None:
        self._note((table, "get", (key,)))
        return self._txn.view(table, key)

    def first(self, table: int, low: bytes, high: bytes) -> tuple[bytes, bytes] | None:
        self._note((table, "seek", (low,)))
        return self._txn.first(table, low, high)

    def last(self, table: int, low: bytes, high: bytes) -> tuple[bytes, bytes] | None:
        self._note((table, "seek", (high,)))
        self._note((table, "prev", ()))
        return self._txn.last(table, low, high)

    def scan(self, table: int, low: bytes, high: bytes) -> Iterator[tuple[bytes, bytes]]:
        self._note((table, "seek", (low,)))
        for row in self._txn.scan(table, low, high):
            yield row
            self._note((table, "next", ()))

    def put(self, table: int, key: bytes, value: bytes | memoryview) -> bytes | None:
        self._note((table, "put", (key, value)))
        return self._txn.put(table, key, value)

    def append(self, table: int, key: bytes, value: bytes | memoryview) -> None:
        self._note((table, "append", (key, value, True, False, True)))
        self._txn.append(table, key, value)

    def insert(self, table: int, key: bytes, value: bytes | memoryview) -> None:
        self._note((table, "insert", (key, value, True, False)))
        self._txn.insert(table, key, value)

    def delete(self, table: int, key: bytes) -> bytes | None:
        self._note((table, "delete", (key,)))
        return self._txn.delete(table, key)


_METHODS = {
    "get": "get",
    "seek": "set_range",
    "prev": "prev",
    "next": "next",
    "put": "put",
    "append": "put",
    "insert": "put",
}

# Which methods of which cursors an entry needs, and its calls by their place in that list.
Script = tuple[list[tuple[Any, str]], list[tuple[int, tuple[Any, ...]]]]


def prepare(store: LmdbStore, trace: Trace) -> Script:
    """All that can be looked up before the clock runs."""
    needed: dict[tuple[int, str], int] = {}
    calls = []
    for table, kind, arguments in trace.operations:
        if kind == "delete":  # twice as fast by the transaction than by a cursor, and it fetches nothing
            slot = needed.setdefault((-1, "delete"), len(needed))
            calls.append((slot, (*arguments, b"", store._dbs[table])))
        else:
            slot = needed.setdefault((table, _METHODS[kind]), len(needed))
            calls.append((slot, arguments))
    methods = [(store._dbs[table] if table >= 0 else None, name) for table, name in needed]
    return methods, calls


def replay(store: LmdbStore, script: Script) -> None:
    """One entry, in one transaction; this is what the clock measures."""
    methods, calls = script
    txn = store._env.begin(None, None, True, False)
    cursors: dict[Any, Any] = {}
    bound = []
    for db, name in methods:
        if db is None:
            bound.append(getattr(txn, name))
            continue
        cursor = cursors.get(db)
        if cursor is None:
            cursor = cursors[db] = txn.cursor(db)
        bound.append(getattr(cursor, name))
    for slot, arguments in calls:
        bound[slot](*arguments)
    txn.commit()


def replay_plainly(store: LmdbStore, trace: Trace) -> None:
    """The same entry by the transaction's get, put and delete, and one cursor a table for the seeks."""
    dbs = store._dbs
    cursors: dict[int, Any] = {}
    with store._env.begin(write=True) as txn:
        for table, kind, arguments in trace.operations:
            if kind == "get":
                txn.get(arguments[0], db=dbs[table])
            elif kind == "delete":
                txn.delete(arguments[0], db=dbs[table])
            elif kind == "put":
                txn.put(arguments[0], arguments[1], db=dbs[table])
            elif kind == "insert":
                txn.put(arguments[0], arguments[1], overwrite=False, db=dbs[table])
            elif kind == "append":
                txn.put(arguments[0], arguments[1], append=True, db=dbs[table])
            else:
                cursor = cursors.get(table)
                if cursor is None:
                    cursor = cursors[table] = txn.cursor(db=dbs[table])
                if kind == "seek":
                    cursor.set_range(arguments[0])
                elif kind == "prev":
                    cursor.prev()
                else:
                    cursor.next()
