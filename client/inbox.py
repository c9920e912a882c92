"""Effectively once: that a message was done is marked in the same database transaction as its effect.

A message comes at least once. Where its effect is a change in a database, the mark "done" can be part of that change:
both are there or neither is, wherever the process dies. The mark is a row; the database's own uniqueness decides, so
that two workers that have the same message, because a lease ran out, cannot both commit.

Known are SQLite (`sqlite3`) and PostgreSQL (`psycopg`, `psycopg2`), by their DB-API connections.
"""

import re
import sys
import time
from datetime import timedelta
from typing import Any, Literal, Protocol

from holdfast.client.message import MessageId
from holdfast.client.protocol.errors import BadValue

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?", re.ASCII)
_COLUMNS = ("queue_id", "generation", "version", "group_name", "turn")
_IDLE = 0  # libpq's word for a connection without a transaction


class Connection(Protocol):
    """What is needed of a DB-API connection."""

    def cursor(self) -> Any: ...

    def commit(self) -> object: ...


class Marked(Protocol):
    """What is needed of a message: one that was leased has it."""

    @property
    def id(self) -> MessageId: ...

    @property
    def group(self) -> str: ...

    @property
    def group_generation(self) -> int: ...


class Inbox:
    """What was done, in one table. Make it wherever it is needed: it keeps nothing but the connection.

    The table is made if it is missing: in the transaction that is open, else in one of its own. A mark names the
    message for ever (its id outlives a restore and is never given to another) and the group. A redrive does not make
    it another message: whether the effect is there is what the mark knows better than who redrives. Nor does a Seek,
    unless `after_seek` is "again".
    """

    def __init__(
        self,
        connection: Connection,
        table: str = "holdfast_inbox",
        *,
        after_seek: Literal["skip", "again"] = "skip",
        create: bool = True,
    ) -> None:
        if not _NAME.fullmatch(table):
            raise BadValue(field="table", problem=f"is {table!r}; letters, digits and _ are allowed")
        if after_seek not in ("skip", "again"):
            raise BadValue(field="after_seek", problem=f"is {after_seek!r}; skip or again is allowed")
        self._connection, self._table, self._after_seek = connection, table, after_seek
        self._place = _placeholder(connection)
        if create:
            self._create()

    def once(self, message: Marked) -> bool:
        """Mark this message done in the open transaction. False: it is done already, and its effect is there.

        Where another transaction has just marked it, this waits for how that one ends. Raises BadValue on a connection
        that commits each statement by itself, for then the mark would be there without the effect.
        """
        if _commits_by_itself(self._connection):
            raise BadValue(field="connection", problem="commits by itself; begin a transaction, so that both are one")
        if not message.group:
            raise BadValue(field="message", problem="was only looked at; a leased one has a group")
        turn = message.group_generation if self._after_seek == "again" else 0
        row = (*message.id, message.group, turn, time.time_ns() // 1_000_000)
        columns, places = ", ".join((*_COLUMNS, "done_ms")), ", ".join([self._place] * len(row))
        return (
            self._execute(f"INSERT INTO {self._table} ({columns}) VALUES ({places}) ON CONFLICT DO NOTHING", row) == 1
        )

    def prune(self, older_than: timedelta) -> int:
        """Forget marks of that age, in the open transaction; how many. What they named would be done again."""
        before_ms = time.time_ns() // 1_000_000 - round(older_than.total_seconds() * 1000)
        return self._execute(f"DELETE FROM {self._table} WHERE done_ms < {self._place}", (before_ms,))

    def _create(self) -> None:
        alone = not _in_transaction(self._connection)
        columns = ", ".join(
            f"{name} {'VARCHAR(255)' if name == 'group_name' else 'BIGINT'} NOT NULL" for name in (*_COLUMNS, "done_ms")
        )
        key = ", ".join(_COLUMNS)
        self._execute(f"CREATE TABLE IF NOT EXISTS {self._table} ({columns}, PRIMARY KEY ({key}))", ())
        if alone:
            self._connection.commit()  # else a rollback of the first message's effect would take the table with it

    def _execute(self, statement: str, values: tuple[Any, ...]) -> int:
        cursor = self._connection.cursor()
        try:
            cursor.execute(statement, values)
            return int(cursor.rowcount)
        finally:
            cursor.close()


def _placeholder(connection: Connection) -> str:
    """How this driver writes a value's place in a statement."""
    module = type(connection).__module__.partition(".")[0]
    style = getattr(sys.modules.get(module), "paramstyle", None)
    if style == "qmark":
        return "?"
    if style in ("format", "pyformat"):
        return "%s"
    raise BadValue(field="connection", problem=f"is of {module!r}; sqlite3, psycopg and psycopg2 are known")


def _in_transaction(connection: Any) -> bool:
    if hasattr(connection, "in_transaction"):
        return bool(connection.in_transaction)
    return bool(connection.info.transaction_status != _IDLE)


def _commits_by_itself(connection: Any) -> bool:
    """Whether the next statement would be a transaction of its own."""
    if hasattr(connection, "isolation_level") and hasattr(connection, "in_transaction"):  # sqlite3
        by_itself = connection.isolation_level is None or getattr(connection, "autocommit", -1) is True
    else:
        by_itself = bool(connection.autocommit)
    return by_itself and not _in_transaction(connection)
