"""Taking connections on trio. A process that may open no more files takes none for a while, and goes on."""

from collections.abc import Awaitable, Callable, Sequence

import trio

from holdfast.cluster.descriptors import is_shortage

RETRY_S = 0.1

Handler = Callable[[trio.SocketStream], Awaitable[None]]
Short = Callable[[OSError], None]


async def accept_all(
    listeners: Sequence[trio.abc.Listener[trio.SocketStream]], handler: Handler, short: Short, nursery: trio.Nursery
) -> None:
    """Start `handler` in `nursery` for every connection, until cancelled; then the listeners and streams are closed.

    `short` hears each time that the system had nothing to give.
    """
    async with trio.open_nursery() as accepting:
        for listener in listeners:
            accepting.start_soon(_accept, listener, handler, short, nursery)


async def _accept(
    listener: trio.abc.Listener[trio.SocketStream], handler: Handler, short: Short, nursery: trio.Nursery
) -> None:
    async with listener:
        while True:
            try:
                stream = await listener.accept()
            except OSError as error:
                if not is_shortage(error):
                    raise
                short(error)
                await trio.sleep(RETRY_S)
            else:
                nursery.start_soon(_handle, stream, handler)


async def _handle(stream: trio.SocketStream, handler: Handler) -> None:
    try:
        await handler(stream)
    finally:
        await trio.aclose_forcefully(stream)
