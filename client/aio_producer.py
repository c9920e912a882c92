"""The managed producer for asyncio and trio: `producing.py` over the tasks of `streams.py`. The twin of
`blocking_producer.py`.

One task of the client's block does what the core asks for, another waits for each answer. The outbox is written in a
worker thread; only while a producer opens is it read on the event loop.
"""

import os
from collections.abc import Generator, Iterable, Mapping
from os import PathLike
from random import SystemRandom
from types import TracebackType
from typing import TYPE_CHECKING, Self, assert_never

import anyio
from anyio import to_thread

from holdfast.client.message import Message
from holdfast.client.producing import Ask, Do, ProducerForked, Producing, Save, Tell, ended_by, opening, versions_of
from holdfast.client.protocol.errors import BadValue, HoldfastError, OutcomeUnknown
from holdfast.client.protocol.limits import NONCE_BYTES
from holdfast.client.protocol.values import QueueId
from holdfast.client.streams import Asked
from holdfast.client.window import REQUEST_MESSAGES, Numbered, Sending, check_window, sendings_of

if TYPE_CHECKING:
    from holdfast.client.aio import Client
    from holdfast.client.outbox import Outbox


class Sent:
    """Messages on their way; awaiting it gives the version of the one that was sent. For any number of tasks."""

    def __init__(self) -> None:
        self._told = anyio.Event()
        self._outcome: range | HoldfastError = range(0)

    def __await__(self) -> Generator[None, None, int]:
        versions = yield from self.versions().__await__()
        return versions[0]

    def done(self) -> bool:
        return self._told.is_set()

    async def versions(self) -> range:
        outcome = await self.outcome()
        if isinstance(outcome, HoldfastError):
            raise outcome
        return outcome

    async def outcome(self) -> range | HoldfastError:
        await self._told.wait()
        return self._outcome

    def tell(self, outcome: range | HoldfastError) -> None:
        self._outcome = outcome
        self._told.set()


class Producer:
    """Made by `Client.producer`; opened by `async with`, which flushes at its end."""

    def __init__(
        self, client: "Client", queue: str, client_id: str, window: int, outbox: str | PathLike[str] | None
    ) -> None:
        check_window(window)
        self._client, self._queue, self._client_id, self._window, self._path = client, queue, client_id, window, outbox
        self._timeout_s = client._options.timeout_s
        self._outbox: Outbox | None = None
        self._opened: Producing | None = None
        self._closed = False
        self._pid = os.getpid()
        self._callers: dict[Sending, Sent] = {}
        self._waits: set[anyio.CancelScope] = set()  # for answers
        self._bell = anyio.Event()
        self._changed = anyio.Event()
        self._ended = anyio.Event()

    # What it is for -------------------------------------------------------------------------------------

    async def send(
        self, payload: bytes | Message, key: str | None = None, headers: Mapping[str, str] | None = None,
        delay_ms: int | None = None, not_before_ms: int | None = None, ttl_ms: int | None = None,
    ) -> int:  # fmt: skip
        """The version of the message, once it is on the disks of a majority. Who is cancelled has perhaps sent it."""
        shared = Message(b"", key, headers, delay_ms, not_before_ms, ttl_ms)
        return await (await self._send_one(payload, shared, awaited=True))

    async def send_many(
        self, payloads: Iterable[bytes | Message], key: str | None = None, headers: Mapping[str, str] | None = None,
        delay_ms: int | None = None, not_before_ms: int | None = None, ttl_ms: int | None = None,
    ) -> list[int]:  # fmt: skip
        """The versions, in order. Up to 1,000 messages (or the window) and 1 MiB are written together or not at all."""
        shared = Message(b"", key, headers, delay_ms, not_before_ms, ttl_ms)
        until_s = anyio.current_time() + self._timeout_s
        portions = sendings_of(payloads, shared, min(REQUEST_MESSAGES, self._core.window))
        sent: list[Sent] = []
        refused: list[HoldfastError] = []
        for sending in portions:
            try:
                sent.append(await self._accept(sending, until_s))
            except HoldfastError as error:
                refused.append(error)
                break
        return versions_of([*[await each.outcome() for each in sent], *refused])

    async def send_nowait(
        self, payload: bytes | Message, key: str | None = None, headers: Mapping[str, str] | None = None,
        delay_ms: int | None = None, not_before_ms: int | None = None, ttl_ms: int | None = None,
    ) -> Sent:  # fmt: skip
        """Waits for nothing but room in the window; what it gives is awaited for the version."""
        shared = Message(b"", key, headers, delay_ms, not_before_ms, ttl_ms)
        return await self._send_one(payload, shared, awaited=False)

    async def flush(self) -> None:
        """Wait until everything that was sent has its outcome. Raises what ended the producer, Indeterminate where some
        have none in time, or the first failure of a `send_nowait` since the last flush."""
        core = self._core
        with anyio.move_on_after(self._timeout_s):
            while not core.settled:
                await self._changed.wait()
        core.check_flushed()

    @property
    def epoch(self) -> int:
        """Which incarnation of this client id it is (P4)."""
        return self._core.epoch

    @property
    def high_water(self) -> int:
        """The highest number that is confirmed; where nothing was ever refused, how many messages were written."""
        return self._core.high_water

    async def close(self) -> None:
        """End it without waiting: who still waits is told what is known. Closing twice is fine."""
        if self._closed or self._opened is None or self._pid != os.getpid():
            return
        self._closed = True
        self._opened.close()
        self._bell.set()
        with anyio.CancelScope(shield=True):
            await self._ended.wait()
        for wait in list(self._waits):
            wait.cancel()

    async def __aenter__(self) -> Self:
        if self._path is not None:
            from holdfast.client.outbox import Outbox  # brings SQLite along, for those who want it

            self._outbox = await to_thread.run_sync(Outbox, self._path)
        try:
            await self._open()
        except BaseException:
            await self.close()
            if self._opened is None and self._outbox is not None:
                self._outbox.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        try:
            if not self._closed:
                await self.flush()
        except HoldfastError:
            if kind is None:
                raise
        finally:
            await self.close()

    # Opening --------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        client = self._client
        self._loop = loop = client._started()
        until_s = anyio.current_time() + self._timeout_s

        def claim(queue_id: QueueId) -> list[Numbered]:
            if self._outbox is None:
                return []
            return self._outbox.claim(self._queue, queue_id, self._client_id, loop.cluster_id)

        nonce = os.urandom(NONCE_BYTES)
        steps = opening(client._names, self._queue, self._client_id, nonce, claim)
        queue_id, opened, left = await client._run(steps)
        core = self._opened = Producing(
            queue_id=queue_id,
            client_id=self._client_id,
            window=self._window,
            timeout_s=self._timeout_s,
            random=SystemRandom(),
            durable=self._outbox is not None,
        )
        core.opened(opened.epoch, opened.high_water, left)
        assert client._group is not None, "a client that has started was entered"
        self._group = client._group
        self._group.start_soon(self._run)
        with anyio.CancelScope(deadline=until_s):  # what a former process left goes first
            while not core.settled:
                await self._changed.wait()
        core.check_settled()

    @property
    def _core(self) -> Producing:
        if self._pid != os.getpid():
            raise ProducerForked()
        if self._opened is None:
            raise BadValue(field="producer", problem="is not open; use it in `async with`")
        return self._opened

    # Callers --------------------------------------------------------------------------------------------

    async def _send_one(self, payload: bytes | Message, shared: Message, *, awaited: bool) -> Sent:
        (sending,) = sendings_of([payload], shared, 1)
        sending.awaited = awaited
        return await self._accept(sending, anyio.current_time() + self._timeout_s)

    async def _accept(self, sending: Sending, until_s: float) -> Sent:
        core = self._core
        core.line_up(sending)
        try:
            with anyio.CancelScope(deadline=until_s):
                while core.ended is None and not core.may_enter(sending):
                    await self._changed.wait()
            core.check()
            if not core.may_enter(sending):
                raise core.no_room()
            core.send(sending, until_s)
            sent = self._callers[sending] = Sent()
        finally:
            core.leave_line(sending)
            self._notify()
        self._bell.set()
        return sent

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    # Doing ----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """What the core asks for, in its order, until the producer is closed."""
        core = self._core
        with anyio.CancelScope(shield=True):
            while True:
                while actions := core.take_actions(anyio.current_time()):
                    await self._do_all(actions)
                self._notify()
                if self._closed and not self._bell.is_set():
                    break
                with anyio.CancelScope(deadline=core.wake_at_s):
                    await self._bell.wait()
                self._bell = anyio.Event()
            if self._outbox is not None:
                await to_thread.run_sync(self._outbox.close)
            self._ended.set()

    async def _do_all(self, actions: list[Do]) -> None:
        for at, action in enumerate(actions):
            match action:
                case Tell(sending=sending, outcome=outcome):
                    self._callers.pop(sending).tell(outcome)
                case Ask():
                    self._ask(action)
                case Save(erased=erased, stored=stored):
                    assert self._outbox is not None
                    try:
                        await to_thread.run_sync(self._outbox.save, erased, stored)
                    except HoldfastError as error:
                        await self._do_all(self._core.not_saved(actions[at + 1 :], error))
                        return
                case unknown:
                    assert_never(unknown)

    def _ask(self, ask: Ask) -> None:
        try:
            asked = self._loop.ask(ask.command, ask.deadline_s)
        except Exception as error:  # the client is closed
            self._core.end(ended_by(error))
            self._core.answered(ask.request, OutcomeUnknown(problem=str(error)), anyio.current_time())
            return
        self._group.start_soon(self._await_answer, ask.request, asked)

    async def _await_answer(self, request: Numbered, asked: Asked) -> None:
        with anyio.CancelScope(shield=True) as wait:
            self._waits.add(wait)
            try:
                outcome = await self._loop.outcome_of(asked)
            except Exception as error:
                self._core.end(ended_by(error))
                outcome = OutcomeUnknown(problem=str(error))
            self._core.answered(request, outcome, anyio.current_time())
            self._bell.set()
        self._waits.discard(wait)
