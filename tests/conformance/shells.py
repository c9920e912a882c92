"""One way to write a scenario for every shell: an async function over a client that is awaited.

On trio and asyncio that is the async client. The blocking one is made awaitable: each of its calls runs in a thread.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Literal

import anyio
import anyio.to_thread

from holdfast.client import aio, blocking
from holdfast.client.blocking_producer import Producer

Name = Literal["trio", "asyncio", "blocking"]
NAMES: tuple[Name, ...] = ("trio", "asyncio", "blocking")

_BLOCKING = (Producer, blocking.Client, blocking.Lease, blocking.Transaction, blocking.Consumer, blocking.Received)
_AT_ONCE = {"transaction", "consume"}  # these make something, and ask nobody, on every shell

_STREAMS = {"read", "redrive_steps"}  # these give one after the other


class Shell:
    """What a scenario is run on. Its clients are written as `Any`: they are of one shape, not of one type."""

    def __init__(self, name: Name) -> None:
        self.name = name

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        anyio.run(scenario, backend="trio" if self.name == "trio" else "asyncio")

    def client(self, addresses: str, **arguments: Any) -> "AbstractAsyncContextManager[Any]":
        if self.name == "blocking":
            return Awaited(blocking.Client(addresses, **arguments))
        return aio.Client(addresses, **arguments)


async def in_thread(call: Callable[..., Any], *arguments: Any) -> Any:
    """Something that blocks, such as a condition of the scripted server."""
    return await anyio.to_thread.run_sync(partial(call, *arguments))


class Awaited:
    """Something of the blocking client's, in the shape of the async one's."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return _wrapped(found)
        if name in _AT_ONCE or isinstance(self._inner, blocking.Transaction):
            return lambda *given, **named: _wrapped(found(*map(_inner, given), **named))
        if name == "producer":
            return lambda *given, **named: _Entered(partial(found, *given, **named))
        if name in _STREAMS:
            return lambda *given, **named: _each(partial(found, *given, **named))

        async def call(*given: Any, **named: Any) -> Any:
            return _wrapped(await in_thread(partial(found, *map(_inner, given), **named)))

        return call

    async def __aenter__(self) -> "Awaited":
        await in_thread(self._inner.__enter__)
        return self

    async def __aexit__(self, *ended: Any) -> None:
        with anyio.CancelScope(shield=True):
            await in_thread(self._inner.__exit__, *ended)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._inner)

    def __len__(self) -> int:
        return len(self._inner)

    def __aiter__(self) -> AsyncIterator[Any]:
        return _each(self._inner.__iter__)


class _Entered:
    """A blocking producer is open when it is made; the async one when its block is entered."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    async def __aenter__(self) -> Awaited:
        self._inner = await in_thread(self._make)
        return Awaited(self._inner)

    async def __aexit__(self, *ended: Any) -> None:
        with anyio.CancelScope(shield=True):
            await in_thread(self._inner.__exit__, *ended)


async def _each(make: Callable[[], Iterator[Any]]) -> AsyncIterator[Any]:
    iterator = await in_thread(make)
    end = object()
    while (found := await in_thread(next, iterator, end)) is not end:
        yield _wrapped(found)


def _wrapped(found: Any) -> Any:
    if isinstance(found, Future):
        return _Promised(found)
    return Awaited(found) if isinstance(found, _BLOCKING) else found


class _Promised:
    def __init__(self, future: "Future[Any]") -> None:
        self._future = future

    def __await__(self) -> Any:
        return in_thread(self._future.result).__await__()


def _inner(given: Any) -> Any:
    return given._inner if isinstance(given, Awaited) else given
