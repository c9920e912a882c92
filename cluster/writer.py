"""The one thread that writes and syncs a journal, so that the node's own thread never waits for the disk.

Flushes are made in the order they came, one at a time. What the disk refuses is told once, and nothing is tried again:
the node stops (R26).
"""

import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

from holdfast.cluster.journal import Flush

Soon = Callable[[Callable[[], object]], None]  # run something on the node's thread


class Files(Protocol):
    """`Segments`."""

    def write(self, flush: Flush) -> None: ...
    def drop_before(self, index: int) -> int: ...


class Writer:
    def __init__(
        self,
        files: Files,
        soon: Soon,
        *,
        durable: Callable[[Flush, float], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """`durable` gets each flush and how many seconds it took; both are called through `soon`."""
        self._files, self._soon = files, soon
        self._durable, self._failed = durable, failed
        self._work: SimpleQueue[Flush | int | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def flush(self, flush: Flush) -> None:
        self._work.put(flush)

    def drop_before(self, index: int) -> None:
        """Remove whole segments below `index`, after what was asked before."""
        self._work.put(index)

    def stop(self) -> None:
        """Everything that was asked is done or has failed."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (work := self._work.get()) is not None:
                if isinstance(work, Flush):
                    self._write(work)
                else:
                    self._files.drop_before(work)
        except BaseException as error:
            failure = error
            self._soon(lambda: self._failed(failure))

    def _write(self, flush: Flush) -> None:
        began_s = time.perf_counter()
        self._files.write(flush)
        took_s = time.perf_counter() - began_s
        self._soon(lambda: self._durable(flush, took_s))
