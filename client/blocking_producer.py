"""The managed producer for threads and scripts: `producing.py` over the socket thread, and the outbox beside it.

Any number of threads may use one producer. Whoever has given the core something, a caller or the socket thread, does
what it then asks for; with an outbox a thread of its own does, for nobody else should wait for the disk.
"""

import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait
from os import PathLike
from random import SystemRandom
from threading import Condition, Event, Lock, Thread
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, assert_never

from holdfast.client.events import Outcome
from holdfast.client.message import Message
from holdfast.client.producing import Ask, Do, ProducerForked, Producing, Save, Tell, ended_by, opening, versions_of
from holdfast.client.protocol.errors import HoldfastError, OutcomeUnknown
from holdfast.client.protocol.limits import NONCE_BYTES
from holdfast.client.protocol.values import QueueId
from holdfast.client.sockets import Asked
from holdfast.client.window import REQUEST_MESSAGES, Numbered, Sending, check_window, sendings_of

if TYPE_CHECKING:
    from holdfast.client.blocking import Client
    from holdfast.client.outbox import Outbox

T = TypeVar("T")


class Producer:
    """Made by `Client.producer`; a context manager that flushes at its end."""

    def __init__(
        self, client: "Client", queue: str, client_id: str, window: int, outbox: str | PathLike[str] | None
    ) -> None:
        check_window(window)
        self._client = client
        self._timeout_s = client._options.timeout_s
        self._lock = Lock()
        self._changed = Condition(self._lock)
        self._performing = False
        self._closed = False
        self._pid = os.getpid()
        self._asked: set[Asked] = set()
        self._callers: dict[Sending, tuple[Future[int] | None, Future[range] | None]] = {}
        self._alarm_s = float("inf")
        self._outbox = _open_outbox(outbox)
        self._bell = Event()
        self._thread: Thread | None = None
        try:
            self._open(queue, client_id, window)
        except BaseException:
            self._shut()
            raise

    # What it is for -------------------------------------------------------------------------------------

    def send(
        self, payload: bytes | Message, key: str | None = None, headers: Mapping[str, str] | None = None,
        delay_ms: int | None = None, not_before_ms: int | None = None, ttl_ms: int | None = None,
    ) -> int:  # fmt: skip
        """The version of the message, once it is on the disks of a majority."""
        shared = Message(b"", key, headers, delay_ms, not_before_ms, ttl_ms)
        return self._send_one(payload, shared, awaited=True).result()

    def send_many(
        self, payloads: Iterable[bytes | Message], key: str | None = None, headers: Mapping[str, str] | None = None,
        delay_ms: int | None = None, not_before_ms: int | None = None, ttl_ms: int | None = None,
    ) -> list[int]:  # fmt: skip
        """The versions, in order. Up to 1,000 messages (or the window) and 1 MiB are written together or not at all."""
        shared = Message(b"", key, headers, delay_ms, not_before_ms, ttl_ms)
        until_s = time.monotonic() + self._timeout_s
        futures: list[Future[range]] = []
        refused: list[HoldfastError] = []
        for sending in sendings_of(payloads, shared, min(REQUEST_MESSAGES, self._core.window)):
            future: Future[range] = Future()
            try:
                self._accept(sending, until_s, None, future)
            except HoldfastError as error:
                refused.append(error)
                break
            futures.append(future)
        wait(futures)
        return versions_of([*map(_outcome, futures), *refused])

    def send_nowait(
        self, payload: bytes | Message, key: str | None = None, headers: Mapping[str, str] | None = None,
        delay_ms: int | None = None, not_before_ms: int | None = None, ttl_ms: int | None = None,
    ) -> "Future[int]":  # fmt: skip
        """A future of the version. Waits for nothing but room in the window."""
        shared = Message(b"", key, headers, delay_ms, not_before_ms, ttl_ms)
        return self._send_one(payload, shared, awaited=False)

    def flush(self) -> None:
        """Wait until everything that was sent has its outcome. Raises what ended the producer, Indeterminate where some
        have none in time, or the first failure of a `send_nowait` since the last flush."""
        self._check_process()
        with self._changed:
            self._changed.wait_for(lambda: self._core.settled, self._timeout_s)
            self._core.check_flushed()

    @property
    def epoch(self) -> int:
        """Which incarnation of this client id it is (P4)."""
        return self._core.epoch

    @property
    def high_water(self) -> int:
        """The highest number that is confirmed; where nothing was ever refused, how many messages were written."""
        return self._core.high_water

    def close(self) -> None:
        """End it without waiting: who still waits is told what is known. Closing twice is fine."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._core.close()
        self._advance()
        self._shut()
        for asked in list(self._asked):
            self._loop.abandon(asked)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if not self._closed:
                self.flush()
        except HoldfastError:
            if kind is None:
                raise
        finally:
            self.close()

    # Opening and closing --------------------------------------------------------------------------------

    def _open(self, queue: str, client_id: str, window: int) -> None:
        client = self._client
        loop = client._started()

        def claim(queue_id: QueueId) -> list[Numbered]:
            if self._outbox is None:
                return []
            return self._outbox.claim(queue, queue_id, client_id, loop.cluster_id)

        until_s = time.monotonic() + self._timeout_s
        nonce = os.urandom(NONCE_BYTES)
        queue_id, opened, left = client._run(opening(client._names, queue, client_id, nonce, claim))
        self._loop = loop
        self._core = Producing(
            queue_id=queue_id,
            client_id=client_id,
            window=window,
            timeout_s=self._timeout_s,
            random=SystemRandom(),
            durable=self._outbox is not None,
        )
        self._core.opened(opened.epoch, opened.high_water, left)
        if self._outbox is not None:
            self._thread = Thread(target=self._run, name="holdfast-outbox", daemon=True)
            self._thread.start()
        self._advance()
        with self._changed:  # what a former process left goes first
            self._changed.wait_for(lambda: self._core.settled, max(until_s - time.monotonic(), 0.0))
            self._core.check_settled()

    def _shut(self) -> None:
        self._closed = True
        self._bell.set()
        if self._thread is not None:
            self._thread.join()
        if self._outbox is not None:
            self._outbox.close()

    # Callers --------------------------------------------------------------------------------------------

    def _send_one(self, payload: bytes | Message, shared: Message, *, awaited: bool) -> "Future[int]":
        until_s = time.monotonic() + self._timeout_s
        (sending,) = sendings_of([payload], shared, 1)
        sending.awaited = awaited
        future: Future[int] = Future()
        self._accept(sending, until_s, future, None)
        return future

    def _accept(
        self, sending: Sending, until_s: float, one: "Future[int] | None", many: "Future[range] | None"
    ) -> None:
        core = self._core
        self._check_process()
        with self._changed:
            core.line_up(sending)
            try:
                left_s = max(until_s - time.monotonic(), 0.0)
                may = self._changed.wait_for(lambda: core.ended is not None or core.may_enter(sending), left_s)
                core.check()
                if not may:
                    raise core.no_room()
                core.send(sending, until_s)
                (one or many).set_running_or_notify_cancel()  # type: ignore[union-attr]  # it cannot be taken back
                self._callers[sending] = (one, many)
            finally:
                core.leave_line(sending)
                self._changed.notify_all()
        self._advance()

    def _check_process(self) -> None:
        if self._pid != os.getpid():  # what a thread of the parent held at the fork is never let go here
            raise ProducerForked()

    # Doing ----------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Do what the core asks for now; with an outbox, have it done."""
        if self._thread is not None:
            self._bell.set()
        else:
            self._perform()

    def _run(self) -> None:
        while not self._closed:
            self._bell.wait()
            self._bell.clear()
            self._perform()
        self._perform()

    def _perform(self) -> None:
        """In the core's order, one thread at a time; who comes meanwhile leaves its part to the one that is there."""
        while True:
            with self._changed:
                if self._loop.broken is not None:
                    self._core.end(ended_by(self._loop.broken))
                actions = [] if self._performing else self._core.take_actions(time.monotonic())
                if not actions:
                    self._set_alarm()
                    self._changed.notify_all()
                    return
                self._performing = True
            try:
                self._do_all(actions)
            finally:
                with self._lock:
                    self._performing = False

    def _do_all(self, actions: list[Do]) -> None:
        for at, action in enumerate(actions):
            match action:
                case Tell(sending=sending, outcome=outcome):
                    self._tell(sending, outcome)
                case Ask(request=request, command=command, deadline_s=deadline_s):
                    asked = self._loop.ask(command, deadline_s)
                    self._asked.add(asked)
                    asked.add_done_callback(lambda future, request=request: self._answered(request, future))  # type: ignore[misc]
                case Save(erased=erased, stored=stored):
                    try:
                        self._save(erased, stored)
                    except HoldfastError as error:
                        with self._lock:
                            instead = self._core.not_saved(actions[at + 1 :], error)
                        self._do_all(instead)
                        return
                case unknown:
                    assert_never(unknown)

    def _save(self, erased: list[int], stored: list[Numbered]) -> None:
        assert self._outbox is not None
        self._outbox.save(erased, stored)

    def _tell(self, sending: Sending, outcome: range | HoldfastError) -> None:
        one, many = self._callers.pop(sending)
        if one is not None:
            _settle(one, outcome if isinstance(outcome, HoldfastError) else outcome[0])
        if many is not None:
            _settle(many, outcome)

    def _answered(self, request: Numbered, asked: "Future[Outcome]") -> None:
        """On the socket thread, or on any once that has ended."""
        error = asked.exception()
        with self._lock:
            self._asked.discard(asked)
            if error is None:
                self._core.answered(request, asked.result(), time.monotonic())
            else:
                self._core.answered(request, OutcomeUnknown(problem=str(error)), time.monotonic())
        self._advance()

    def _set_alarm(self) -> None:
        at_s = self._core.wake_at_s
        if at_s < self._alarm_s:
            self._alarm_s = at_s
            self._loop.alarm(at_s, self._alarmed)

    def _alarmed(self) -> None:
        self._alarm_s = float("inf")
        self._advance()


def _outcome(future: "Future[range]") -> range | HoldfastError:
    error = future.exception()
    if error is not None and not isinstance(error, HoldfastError):
        raise error
    return error or future.result()


def _settle(future: "Future[T]", outcome: T | HoldfastError) -> None:
    if isinstance(outcome, HoldfastError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _open_outbox(path: str | PathLike[str] | None) -> "Outbox | None":
    if path is None:
        return None
    from holdfast.client.outbox import Outbox  # brings SQLite along, for those who want it

    return Outbox(path)
