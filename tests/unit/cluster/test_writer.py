"""The disk's thread: flushes in order, failures told once, nothing tried again (R26)."""

from collections.abc import Callable
from queue import SimpleQueue

import pytest

from holdfast.cluster.journal import Flush
from holdfast.cluster.journal_errors import JournalFailed
from holdfast.cluster.writer import Writer


class Files:
    """What was asked of the files, in order; fails at the flush with the number `fails_at`."""

    def __init__(self, fails_at: int = 0) -> None:
        self.done: list[str] = []
        self._fails_at = fails_at

    def write(self, flush: Flush) -> None:
        self.done.append(f"write {flush.number}")
        if flush.number == self._fails_at:
            raise JournalFailed("the disk is full")

    def drop_before(self, index: int) -> int:
        self.done.append(f"drop {index}")
        return 0


class Loop:
    """The node's thread, as far as the writer needs it."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self.durable: list[int] = []
        self.failures: list[BaseException] = []

    def writer(self, files: Files) -> Writer:
        return Writer(files, self._calls.put, durable=self._durable, failed=self.failures.append)

    def run(self) -> None:
        """Make the calls that have come."""
        while not self._calls.empty():
            self._calls.get()()

    def _durable(self, flush: Flush, took_s: float) -> None:
        assert took_s >= 0
        self.durable.append(flush.number)


def flushes(count: int) -> list[Flush]:
    return [Flush(lsn=number * 10, number=number, records=b"x") for number in range(1, count + 1)]


def test_flushes_are_written_in_order_and_reported_on_the_nodes_thread() -> None:
    files, loop = Files(), Loop()
    writer = loop.writer(files)
    for flush in flushes(3):
        writer.flush(flush)
    writer.drop_before(7)
    writer.stop()
    assert files.done == ["write 1", "write 2", "write 3", "drop 7"]
    assert loop.durable == []  # nothing happens on the node's thread but by its own loop
    loop.run()
    assert loop.durable == [1, 2, 3]
    assert loop.failures == []


@pytest.mark.parametrize("fails_at", [1, 2])
def test_after_a_failure_nothing_more_is_written_or_reported(fails_at: int) -> None:
    """R26: a write or sync that failed is never tried again, and the node hears of it once."""
    files, loop = Files(fails_at), Loop()
    writer = loop.writer(files)
    for flush in flushes(4):
        writer.flush(flush)
    writer.stop()
    loop.run()
    assert files.done == [f"write {number}" for number in range(1, fails_at + 1)]
    assert loop.durable == list(range(1, fails_at))
    assert [str(error) for error in loop.failures] == ["the disk is full"]
