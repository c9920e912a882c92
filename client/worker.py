"""Workers: a handler for each message of a queue, with leases, acks, retries and stopping seen to.

`Worker` runs over either client. With the blocking one, handlers run in threads, and `run()` blocks; with the async one
they are tasks, plain functions run in threads, and `await worker.run()` is what waits.
"""

from collections.abc import Awaitable, Callable
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from holdfast.client.blocking import Client as BlockingClient
from holdfast.client.protocol.errors import BadValue
from holdfast.client.protocol.limits import LEASE_MESSAGES
from holdfast.client.protocol.values import check_range, check_reference
from holdfast.client.received import Received, Reject, Retry
from holdfast.client.turns import Options

if TYPE_CHECKING:
    from holdfast.client.aio import Client as AsyncClient

__all__ = ["Received", "Reject", "Retry", "Worker"]

R = TypeVar("R")

STOP_TIMEOUT_MS = 25_000  # Kubernetes kills 30 seconds after its SIGTERM


class Worker(Generic[R]):
    """Hands each message of a group to `handler`, at most `concurrency` at a time.

    What the handler returns does not matter: that it returns acks the message. An exception nacks it with the
    exception's type and text, and the group's backoff says when it comes back; `Reject` gives it up, `Retry` says when.
    While a handler runs its lease is extended, for `max_run_ms` at most. `prefetch` messages more are held ready.

    `stop()`, SIGTERM and SIGINT let running handlers end, for `stop_timeout_ms` at most, and hand back at once what was
    not begun. A second signal gives up what runs. Signals are heard while `run` is on the main thread, by one worker of
    a process: for several, say `handle_signals=False` and stop each.
    """

    @overload
    def __init__(
        self: "Worker[None]", client: BlockingClient, queue: str, handler: Callable[[Any], object],
        group: str = "default", concurrency: int = 10, prefetch: int | None = None, *, wait_ms: int = 20_000,
        visibility_timeout_ms: int | None = None, max_run_ms: int | None = None,
        stop_timeout_ms: int = STOP_TIMEOUT_MS, remember: int = 10_000, handle_signals: bool = True,
    ) -> None: ...  # fmt: skip

    @overload
    def __init__(
        self: "Worker[Awaitable[None]]", client: "AsyncClient", queue: str, handler: Callable[[Any], object],
        group: str = "default", concurrency: int = 10, prefetch: int | None = None, *, wait_ms: int = 20_000,
        visibility_timeout_ms: int | None = None, max_run_ms: int | None = None,
        stop_timeout_ms: int = STOP_TIMEOUT_MS, remember: int = 10_000, handle_signals: bool = True,
    ) -> None: ...  # fmt: skip

    def __init__(
        self, client: Any, queue: str, handler: Callable[[Any], object], group: str = "default",
        concurrency: int = 10, prefetch: int | None = None, *, wait_ms: int = 20_000,
        visibility_timeout_ms: int | None = None, max_run_ms: int | None = None,
        stop_timeout_ms: int = STOP_TIMEOUT_MS, remember: int = 10_000, handle_signals: bool = True,
    ) -> None:  # fmt: skip
        check_reference("queue", queue)
        check_reference("group", group)
        check_range("concurrency", concurrency, 1, LEASE_MESSAGES)
        check_range("prefetch", concurrency if prefetch is None else prefetch, 0, LEASE_MESSAGES)
        for name, value in (("visibility_timeout_ms", visibility_timeout_ms), ("max_run_ms", max_run_ms)):
            if value is not None and value < 1:
                raise BadValue(field=name, problem="must be at least 1, or none")
        options = Options(
            group=group,
            concurrency=concurrency,
            prefetch=concurrency if prefetch is None else prefetch,
            wait_ms=wait_ms,
            visibility_timeout_ms=visibility_timeout_ms,
            max_run_ms=max_run_ms,
            remember=remember,
        )
        self._shell: Any
        if isinstance(client, BlockingClient):
            if iscoroutinefunction(handler):
                raise BadValue(field="handler", problem="is a coroutine function; these need the async client")
            from holdfast.client.worker_threads import Threads

            self._shell = Threads(client, queue, handler, options, stop_timeout_ms / 1000, handle_signals)
        else:
            from holdfast.client.worker_tasks import Tasks

            self._shell = Tasks(client, queue, handler, options, stop_timeout_ms / 1000, handle_signals)

    def run(self) -> R:
        """Work until `stop`, or until the queue or the group is gone: then that error is raised."""
        return self._shell.run()  # type: ignore[no-any-return]

    def stop(self, timeout_ms: int | None = None) -> None:
        """Begin nothing more; from any thread, and from a handler. `run` returns when what runs has ended."""
        self._shell.stop(timeout_ms)
