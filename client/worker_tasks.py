"""The tasks of a worker with the async client: performs what `working.py` asks. Decides nothing.

The twin of `worker_threads.py`. All but plain functions runs on the event loop on which `run` was called. Those are
called in threads of their own, which cannot be cancelled: a lost one keeps its place until it ends.
"""

import inspect
import logging
import signal
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import field, replace
from random import SystemRandom
from threading import Lock, current_thread, get_ident, main_thread
from types import TracebackType
from typing import Any, Self, assert_never

import anyio
from anyio.abc import TaskGroup
from anyio.from_thread import BlockingPortal

from holdfast.client import streams
from holdfast.client.aio import Client, Transaction
from holdfast.client.protocol.errors import BadValue, ConnectFailed, HoldfastError
from holdfast.client.protocol.quick import dataclass
from holdfast.client.received import Fate, Received, facts_of, verdict_of
from holdfast.client.turns import Action, Answered, Ask, Ended, Event, Lose, Note, Options, Start, Stop, Withdraw, Woken
from holdfast.client.worker_threads import SIGNALS, Crew, call, note_failure
from holdfast.client.working import Working

logger = logging.getLogger("holdfast.worker")


class OwnTransaction(Transaction):
    """Acks its message and produces, all or nothing; the worker does not ack again. A plain function says `with`."""

    def __init__(self, client: Client, message: Received, portal: BlockingPortal) -> None:
        super().__init__(client)
        self._message, self._portal = message, portal
        self.ack_version(message.queue, message.group, message.lease_id, message.version)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, at)
        if kind is None:
            self._message.fate.settled = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._portal.call(self.__aexit__, kind, error, at)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedInTask(Received):
    client: Client = field(repr=False)
    portal: BlockingPortal = field(repr=False)

    def transaction(self) -> OwnTransaction:
        """A block whose outputs and this message's ack are one log entry: all of it happens, or nothing."""
        return OwnTransaction(self.client, self, self.portal)


class Tasks:
    def __init__(
        self,
        client: Client,
        queue: str,
        handler: Callable[[Any], object],
        options: Options,
        stop_timeout_s: float,
        handle_signals: bool,
    ) -> None:
        self._client, self._queue, self._handler = client, queue, handler
        self._options = replace(options, timeout_s=client._options.timeout_s)
        self._stop_timeout_s, self._handle_signals = stop_timeout_s, handle_signals
        asynchronous = inspect.iscoroutinefunction
        self._in_threads = not asynchronous(handler) and not asynchronous(getattr(handler, "__call__", None))  # noqa: B004
        self._events: deque[Event] = deque()
        self._crew = Crew(f"holdfast-worker-{queue}")
        self._scopes: dict[int, anyio.CancelScope] = {}  # of requests, by their number
        self._working: dict[int, tuple[Fate, anyio.CancelScope]] = {}
        self._stops: list[float] = []  # asked for before it ran: within how many seconds
        self._group: TaskGroup
        self._portal: BlockingPortal
        self._rung: anyio.Event
        self._lock = Lock()
        self._thread: int | None = None  # on which it runs
        self._ran = False

    def stop(self, timeout_ms: int | None) -> None:
        within_s = self._stop_timeout_s if timeout_ms is None else timeout_ms / 1000
        with self._lock:
            if self._thread is None:
                self._stops.append(within_s)
                return
        if self._thread == get_ident():
            self._stop(within_s)
        else:
            with suppress(RuntimeError):  # it is over
                self._portal.start_task_soon(self._stop, within_s)

    async def run(self) -> None:
        if self._ran:
            raise BadValue(field="worker", problem="has run before; make another")
        self._ran, self._rung = True, anyio.Event()
        core = Working(self._queue, self._options, SystemRandom())
        hears = self._handle_signals and current_thread() is main_thread()
        former = {number: signal.getsignal(number) for number in SIGNALS} if hears else {}
        try:
            async with BlockingPortal() as self._portal, anyio.create_task_group() as self._group:
                with self._lock:
                    self._thread = get_ident()
                for within_s in self._stops:
                    self._stop(within_s)
                if hears:
                    self._group.start_soon(self._hear_signals)
                self._perform(core.begin(anyio.current_time()))
                while not core.over:
                    event = await self._next_event(core.wake_at_s)
                    self._perform(core.handle(event, anyio.current_time()))
                self._group.cancel_scope.cancel()
        finally:
            for fate, _ in self._working.values():
                fate.lost = True  # whoever still runs, runs in vain
            self._crew.dismiss()
            for number, before in former.items():
                signal.signal(number, before if before is not None else signal.SIG_DFL)
        if core.failure is not None:
            raise core.failure

    async def _next_event(self, wake_at_s: float) -> Event:
        if not self._events:
            with anyio.CancelScope(deadline=wake_at_s):
                await self._rung.wait()
            self._rung = anyio.Event()
        return self._events.popleft() if self._events else Woken()

    def _tell(self, event: Event) -> None:
        self._events.append(event)
        self._rung.set()

    def _stop(self, within_s: float) -> None:
        self._tell(Stop(anyio.current_time() + within_s))

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Ask():
                    self._ask(action)
                case Withdraw(ask=ask):
                    if ask in self._scopes:
                        self._scopes[ask].cancel()
                case Start(turn=turn):
                    self._start(turn, action)
                case Lose(turn=turn):
                    self._lose(turn)
                case Note(text=text):
                    logger.warning("%s", text)
                case unknown:
                    assert_never(unknown)

    def _ask(self, action: Ask) -> None:
        try:
            loop = self._client._started()
            asked = loop.ask(action.what, action.deadline_s)
        except HoldfastError as error:  # the client was closed
            self._tell(Answered(action.ask, error))
            return
        self._scopes[action.ask] = anyio.CancelScope()
        self._group.start_soon(self._await_answer, action.ask, loop, asked)

    async def _await_answer(self, ask: int, loop: streams.Loop, asked: streams.Asked) -> None:
        answered = Answered(ask, ConnectFailed("withdrawn", addresses=""))
        with self._scopes[ask]:
            try:
                answered = Answered(ask, await loop.outcome_of(asked))
            except HoldfastError as error:
                answered = Answered(ask, error)
        del self._scopes[ask]
        self._tell(answered)

    def _start(self, turn: int, start: Start) -> None:
        facts = facts_of(start, self._queue)
        message = ReceivedInTask(**facts, client=self._client, portal=self._portal)
        self._working[turn] = message.fate, anyio.CancelScope()
        if self._in_threads:
            self._crew.do(lambda: self._work_in_thread(turn, message))
        else:
            self._group.start_soon(self._work, turn, message, lambda: self._handler(message))

    def _work_in_thread(self, turn: int, message: ReceivedInTask) -> None:
        result = call(self._handler, message)
        with suppress(RuntimeError):  # the worker is over
            self._portal.start_task_soon(self._thread_ended, turn, message, result)

    async def _thread_ended(self, turn: int, message: ReceivedInTask, result: object) -> None:
        if inspect.isawaitable(result):
            self._group.start_soon(self._work, turn, message, lambda: result)
        else:
            self._end(turn, message, result)

    async def _work(self, turn: int, message: ReceivedInTask, begin: Callable[[], Any]) -> None:
        result: object = None
        with self._working[turn][1]:
            try:
                result = await begin()
            except (Exception, anyio.get_cancelled_exc_class()) as error:
                if isinstance(error, anyio.get_cancelled_exc_class()) and _is_cancelled():
                    raise
                note_failure(message, error)  # on asyncio also of something cancelled that the handler waited for
                result = error
        self._end(turn, message, result)

    def _end(self, turn: int, message: ReceivedInTask, result: object) -> None:
        self._working.pop(turn, None)
        self._tell(Ended(turn, verdict_of(message, result)))

    def _lose(self, turn: int) -> None:
        if turn in self._working:
            fate, scope = self._working[turn]
            fate.lost = True
            scope.cancel()  # for a thread it does nothing, so that it keeps its place

    async def _hear_signals(self) -> None:
        """A signal stops this worker, and a second one gives up what runs."""
        with anyio.open_signal_receiver(*SIGNALS) as signals:
            within_s = self._stop_timeout_s
            async for _ in signals:
                self._stop(within_s)
                within_s = 0.0


def _is_cancelled() -> bool:
    """Whether a cancellation is meant for this task."""
    return anyio.current_effective_deadline() == float("-inf")
