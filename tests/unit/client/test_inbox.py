"""The inbox on SQLite and on PostgreSQL: the mark and the effect are one."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import psycopg
import pytest

from holdfast.client.inbox import Inbox
from holdfast.client.message import MessageId
from holdfast.client.protocol.errors import BadValue
from tests.support import postgres
from tests.support.processes import until

Connect = Callable[..., Any]


@dataclass(frozen=True)
class Message:
    id: MessageId = field(default_factory=lambda: MessageId(7, 0, 1))
    group: str = "default"
    group_generation: int = 3


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    reason = postgres.missing()
    if reason:
        pytest.skip(reason)
    with postgres.server() as where:
        yield where


@pytest.fixture(params=["sqlite", "postgres"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Connect:
    """Opens a connection; on PostgreSQL each test has its own schema."""
    if request.param == "sqlite":
        return lambda **options: sqlite3.connect(tmp_path / "effects.db", timeout=30, **options)
    where = request.getfixturevalue("server")
    schema = request.node.name.translate(str.maketrans("[]-", "___"))

    def made() -> bool:
        try:
            with psycopg.connect(where, autocommit=True) as connection:
                connection.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}")
        except psycopg.OperationalError:
            return False  # it is still starting
        return True

    until(made, "the server answers")
    return lambda **options: psycopg.connect(where, options=f"-c search_path={schema}", **options)


def rows(connection: Any, table: str = "holdfast_inbox") -> int:
    cursor = connection.cursor()
    cursor.execute(f"SELECT count(*) FROM {table}")
    return int(cursor.fetchone()[0])


def test_once_is_true_once(connect: Connect) -> None:
    with closing(connect()) as connection:
        inbox = Inbox(connection)
        assert inbox.once(Message())
        connection.commit()
        assert not inbox.once(Message())


def test_a_mark_goes_with_its_transaction(connect: Connect) -> None:
    with closing(connect()) as connection:
        inbox = Inbox(connection)
        assert inbox.once(Message())
        connection.rollback()
        assert inbox.once(Message()), "the table is there, and the mark is not"


def test_a_table_made_within_a_transaction_goes_with_it(connect: Connect) -> None:
    with closing(connect()) as connection:
        cursor = connection.cursor()
        cursor.execute("CREATE TABLE effects (n INTEGER)")
        connection.commit()
        cursor.execute("INSERT INTO effects VALUES (1)")
        assert Inbox(connection).once(Message())
        connection.rollback()
        assert rows(connection, "effects") == 0
        assert Inbox(connection).once(Message())


@pytest.mark.parametrize(
    "other",
    [
        Message(id=MessageId(8, 0, 1)),
        Message(id=MessageId(7, 1, 1)),
        Message(id=MessageId(7, 0, 2)),
        Message(group="audit"),
    ],
    ids=["queue", "restore", "version", "group"],
)
def test_another_message_or_group_is_another_mark(connect: Connect, other: Message) -> None:
    """T4: after a restore, a new message under an old version is not taken for the old one."""
    with closing(connect()) as connection:
        inbox = Inbox(connection)
        assert inbox.once(Message())
        assert inbox.once(other)


def test_a_seek_is_no_other_message_unless_told(connect: Connect) -> None:
    sought = replace(Message(), group_generation=4)
    with closing(connect()) as connection:
        inbox, again = Inbox(connection), Inbox(connection, "again", after_seek="again")
        assert inbox.once(Message()) and again.once(Message())
        assert not inbox.once(sought)
        assert again.once(sought)
        assert not again.once(sought)


def test_two_at_once_get_one_mark(connect: Connect) -> None:
    """The second waits for the first: had that one rolled back, it would do the work."""
    outcomes: list[bool] = []

    def second() -> None:
        with closing(connect()) as connection:
            outcomes.append(Inbox(connection).once(Message()))
            connection.commit()

    for end, expected in (("rollback", True), ("commit", False)):
        with closing(connect()) as first:
            inbox = Inbox(first)
            first.cursor().execute("DELETE FROM holdfast_inbox")
            first.commit()
            assert inbox.once(Message())
            thread = Thread(target=second)
            thread.start()
            thread.join(0.2)
            assert thread.is_alive(), "it waits"
            getattr(first, end)()
            thread.join(60)
            assert outcomes.pop() is expected


def test_old_marks_are_pruned(connect: Connect) -> None:
    with closing(connect()) as connection:
        inbox = Inbox(connection)
        inbox.once(Message())
        assert inbox.prune(timedelta(days=1)) == 0
        connection.cursor().execute("UPDATE holdfast_inbox SET done_ms = done_ms - 100000000")
        inbox.once(Message(group="audit"))
        assert inbox.prune(timedelta(days=1)) == 1
        assert rows(connection) == 1


def test_a_connection_that_commits_by_itself_is_refused(connect: Connect, request: pytest.FixtureRequest) -> None:
    """Else the mark would be there though the effect failed."""
    sqlite = "sqlite" in request.node.name
    with closing(connect(**({"isolation_level": None} if sqlite else {"autocommit": True}))) as connection:
        inbox = Inbox(connection)
        with pytest.raises(BadValue, match="begin a transaction"):
            inbox.once(Message())
        assert rows(connection) == 0
        connection.cursor().execute("BEGIN")
        assert inbox.once(Message())
        connection.cursor().execute("ROLLBACK")
        assert rows(connection) == 0


def test_a_table_may_have_another_name_but_not_any(connect: Connect) -> None:
    with closing(connect()) as connection:
        assert Inbox(connection, "done_orders").once(Message())
        assert rows(connection, "done_orders") == 1
        with pytest.raises(BadValue):
            Inbox(connection, "x; DROP TABLE effects")


def test_a_message_that_was_only_looked_at_has_no_mark(connect: Connect) -> None:
    with closing(connect()) as connection, pytest.raises(BadValue, match="only looked at"):
        Inbox(connection).once(Message(group=""))


def test_an_unknown_driver_is_refused() -> None:
    class Other:
        def cursor(self) -> None: ...
        def commit(self) -> None: ...

    with pytest.raises(BadValue, match="sqlite3, psycopg"):
        Inbox(Other())
