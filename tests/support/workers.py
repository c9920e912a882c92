"""A worker that runs beside a test, on each of its shells."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

import anyio

from holdfast.client import aio, blocking
from holdfast.client.worker import Worker

SHELLS = ("threads", "asyncio", "trio")
JOIN_S = 60.0


class Running:
    """`worker` runs until `stop`; `join` raises what ended it otherwise."""

    def __init__(self, shell: str, address: str, queue: str, handler: Callable[[Any], object], options: Any) -> None:
        self._shell, self._address, self._queue, self._handler, self._options = shell, address, queue, handler, options
        self._made = Event()
        self._error: BaseException | None = None
        self.worker: Any = None
        self._thread = Thread(target=self._run, name="worker-of-a-test", daemon=True)
        self._thread.start()
        assert self._made.wait(JOIN_S)

    def stop(self, timeout_ms: int | None = None) -> None:
        self.worker.stop(timeout_ms)

    def join(self) -> None:
        self._thread.join(JOIN_S)
        assert not self._thread.is_alive(), "the worker does not end"
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            if self._shell == "threads":
                with blocking.Client(self._address, timeout_ms=10_000, consumer_id="worker") as client:
                    self.worker = Worker(client, self._queue, self._handler, **self._options)
                    self._made.set()
                    self.worker.run()
            else:
                anyio.run(self._run_tasks, backend=self._shell)
        except BaseException as error:
            self._error = error
        finally:
            self._made.set()

    async def _run_tasks(self) -> None:
        async with aio.Client(self._address, timeout_ms=10_000, consumer_id="worker") as client:
            self.worker = Worker(client, self._queue, self._handler, **self._options)
            self._made.set()
            await self.worker.run()


@contextmanager
def running(
    shell: str, address: str, queue: str, handler: Callable[[Any], object], **options: Any
) -> Iterator[Running]:
    """Stopped at the end of the block, if it is not over by then; what it raised is raised."""
    worker = Running(shell, address, queue, handler, options)
    try:
        yield worker
    finally:
        worker.stop()
        worker.join()
