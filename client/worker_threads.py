"""The threads of a worker with a blocking client: performs what `working.py` asks. Decides nothing.

One thread, the one that called `run`, talks to the core; handlers run in threads of their own, which are daemons: what
is given up at a stop must not keep the process alive.
"""

import logging
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import field, replace
from queue import Empty, SimpleQueue
from random import SystemRandom
from threading import Lock, Thread, current_thread, main_thread
from types import TracebackType
from typing import Any, assert_never

from holdfast.client.blocking import Client, Transaction
from holdfast.client.events import Outcome
from holdfast.client.protocol.errors import BadValue, ConnectFailed, HoldfastError
from holdfast.client.protocol.quick import dataclass
from holdfast.client.received import Fate, Received, Reject, Retry, facts_of, verdict_of
from holdfast.client.sockets import Asked
from holdfast.client.turns import Action, Answered, Ask, Ended, Event, Lose, Note, Options, Start, Stop, Withdraw, Woken
from holdfast.client.working import Working

logger = logging.getLogger("holdfast.worker")

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class OwnTransaction(Transaction):
    """Acks its message and produces, all or nothing; the worker does not ack again."""

    def __init__(self, client: Client, message: Received) -> None:
        super().__init__(client)
        self._message = message
        self.ack_version(message.queue, message.group, message.lease_id, message.version)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        super().__exit__(kind, error, at)
        if kind is None:
            self._message.fate.settled = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedInThread(Received):
    client: Client = field(repr=False)

    def transaction(self) -> OwnTransaction:
        """A block whose outputs and this message's ack are one log entry: all of it happens, or nothing."""
        return OwnTransaction(self.client, self)


class Crew:
    """Threads for handlers, as many as were ever needed at once. Daemons: nobody waits for one that does not end."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[Thread] = []
        self._busy = 0
        self._lock = Lock()

    def do(self, job: Callable[[], None]) -> None:
        with self._lock:
            self._busy += 1
            if self._busy > len(self._threads):
                thread = Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._jobs.put(job)

    def dismiss(self) -> None:
        """They end when they have done what they do."""
        for _ in self._threads:
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            with self._lock:
                self._busy -= 1


class Threads:
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
        self._events: SimpleQueue[Event] = SimpleQueue()  # a signal handler may put into it, even within a put
        self._crew = Crew(f"holdfast-worker-{queue}")
        self._asked: dict[int, Asked] = {}
        self._fates: dict[int, Fate] = {}
        self._ran = False

    def stop(self, timeout_ms: int | None) -> None:
        within_s = self._stop_timeout_s if timeout_ms is None else timeout_ms / 1000
        self._events.put(Stop(time.monotonic() + within_s))

    def run(self) -> None:
        if self._ran:
            raise BadValue(field="worker", problem="has run before; make another")
        self._ran = True
        core = Working(self._queue, self._options, SystemRandom())
        try:
            with self._signals():
                self._perform(core.begin(time.monotonic()))
                while not core.over:
                    event = self._next_event(core.wake_at_s)
                    if isinstance(event, Ended):
                        self._fates.pop(event.turn, None)
                    self._perform(core.handle(event, time.monotonic()))
        finally:
            for fate in list(self._fates.values()):
                fate.lost = True  # whoever still runs, runs in vain
            self._crew.dismiss()
        if core.failure is not None:
            raise core.failure

    def _next_event(self, wake_at_s: float) -> Event:
        wait_s = None if wake_at_s == float("inf") else max(wake_at_s - time.monotonic(), 0.0)
        try:
            return self._events.get(timeout=wait_s)
        except Empty:
            return Woken()

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Ask():
                    self._ask(action)
                case Withdraw(ask=ask):
                    self._withdraw(ask)
                case Start(turn=turn):
                    self._start(turn, action)
                case Lose(turn=turn):
                    if turn in self._fates:
                        self._fates[turn].lost = True
                case Note(text=text):
                    logger.warning("%s", text)
                case unknown:
                    assert_never(unknown)

    def _ask(self, action: Ask) -> None:
        ask = action.ask
        try:
            asked = self._client._started().ask(action.what, action.deadline_s)
        except HoldfastError as error:  # the client was closed
            self._events.put(Answered(ask, error))
            return
        self._asked[ask] = asked
        asked.add_done_callback(lambda done: self._answered(ask, done))

    def _answered(self, ask: int, done: "Future[Outcome]") -> None:
        """On the client's thread."""
        self._asked.pop(ask, None)
        error = done.exception()
        if error is None:
            self._events.put(Answered(ask, done.result()))
        elif isinstance(error, HoldfastError):
            self._events.put(Answered(ask, error))
        else:
            self._events.put(Answered(ask, ConnectFailed(f"the client is broken: {error}", addresses="")))

    def _withdraw(self, ask: int) -> None:
        asked = self._asked.pop(ask, None)
        if asked is not None:
            self._client._started().abandon(asked)
            self._events.put(Answered(ask, ConnectFailed("withdrawn", addresses="")))

    def _start(self, turn: int, start: Start) -> None:
        message = ReceivedInThread(**facts_of(start, self._queue), client=self._client)
        self._fates[turn] = message.fate
        self._crew.do(lambda: self._work(turn, message))

    def _work(self, turn: int, message: ReceivedInThread) -> None:
        """On a thread of the crew. Its fate stays known until its end is told: the core may still call it lost."""
        result = call(self._handler, message)
        self._events.put(Ended(turn, verdict_of(message, result)))

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Meanwhile a signal stops this worker, and a second one gives up what runs. Only the main thread can."""
        if not self._handle_signals or current_thread() is not main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}
        signals = 0

        def stop(number: int, frame: object) -> None:
            nonlocal signals
            signals += 1
            self.stop(None if signals == 1 else 0)

        for number in SIGNALS:
            signal.signal(number, stop)
        try:
            yield
        finally:
            for number, former in before.items():
                signal.signal(number, former if former is not None else signal.SIG_DFL)


def call(handler: Callable[[Any], object], message: Received) -> object:
    """What the handler returns, or what it raises."""
    try:
        return handler(message)
    except BaseException as error:
        note_failure(message, error)
        return error


def note_failure(message: Received, error: BaseException) -> None:
    """For people: a handler's own words are in the log, and what the cluster is told with the message."""
    text = "%s: the handler of version %d (attempt %d) raised %r"
    facts = (message.queue, message.version, message.attempts, error)
    if isinstance(error, Reject | Retry):
        logger.info(text, *facts)
    else:
        logger.warning(text, *facts, exc_info=error)
