"""From a configuration to a running node: sockets, first boot, the node itself, its pages and its signals."""

import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import TextIO

import trio

from holdfast.client.protocol.errors import BadValue
from holdfast.cluster.allocator import keep_freed_memory
from holdfast.cluster.config import Address, Config
from holdfast.cluster.forming import form
from holdfast.cluster.http import serve_http
from holdfast.cluster.logs import Log
from holdfast.cluster.node import Listeners, Node, Wall, real_wall_ms
from holdfast.cluster.passing import Passing
from holdfast.cluster.peers import listen
from holdfast.cluster.snapshots import Policy

Ready = Callable[[Node], None]


def run_node(
    config: Config,
    stream: TextIO,
    *,
    as_json: bool = False,
    wall_ms: Wall = real_wall_ms,
    policy: Policy | None = None,
) -> None:
    """Run a node until SIGTERM or SIGINT. Raises what it cannot start with or go on from.

    The wall clock and when to take snapshots are given in by tests alone.
    """
    keep_freed_memory()
    log = Log(node=config.node, stream=stream, wall_ms=real_wall_ms, now_s=time.monotonic, as_json=as_json)
    run_alone(partial(_until_signal, config, log, wall_ms, policy))


def run_alone(main: Callable[[], Awaitable[None]]) -> None:
    """`trio.run`, but raises the one error that ended a node, not the groups that its tasks wrapped it in."""
    try:
        trio.run(main)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


async def _until_signal(config: Config, log: Log, wall_ms: Wall, policy: Policy | None) -> None:
    running: list[Node] = []

    async def stop_on_signal(scope: trio.CancelScope) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                if running and not running[0].stopping:
                    running[0].stop(signal.Signals(number).name)
                else:
                    scope.cancel()  # not yet a node, or asked twice

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stop_on_signal, nursery.cancel_scope)
        await serve(config, log, running.append, wall_ms=wall_ms, policy=policy)
        nursery.cancel_scope.cancel()


async def serve(
    config: Config,
    log: Log,
    ready: Ready = lambda node: None,
    *,
    wall_ms: Wall = real_wall_ms,
    policy: Policy | None = None,
    passing: Passing | None = None,
) -> None:
    """Listen, become part of a cluster, and serve until the node is stopped. `ready` is told the node.

    A port of 0 in `listen` is replaced by the one that the system chose, for a node that is alone.
    """
    _make_folder(config)
    async with AsyncExitStack() as stack:

        async def opened(address: Address) -> list[trio.SocketListener]:
            listeners = await listen((address.host, address.port))
            for listener in listeners:
                stack.push_async_callback(trio.aclose_forcefully, listener)
            return listeners

        clients = await opened(config.listen)
        config = replace(config, listen=_bound(clients, config.listen))
        peers = await opened(config.peer_listen) if config.others else []
        http = await opened(config.http) if config.http is not None else []
        identity, founders = await form(config, peers, log)
        node = Node(config, identity, founders, log, wall_ms, policy, passing)
        async with trio.open_nursery() as nursery:
            if http:
                answered = node.metrics.http_answered
                nursery.start_soon(partial(serve_http, http, node.status, node.render_metrics, answered=answered))
            ready(node)
            await node.run(Listeners(clients, peers))
            nursery.cancel_scope.cancel()


def _make_folder(config: Config) -> None:
    try:
        config.data.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise BadValue(field="data", problem=f"{config.data} cannot be made: {error.strerror}") from None
    if not os.access(config.data, os.W_OK):
        raise BadValue(field="data", problem=f"{config.data} cannot be written to")


def _bound(listeners: list[trio.SocketListener], asked: Address) -> Address:
    return Address(asked.host, listeners[0].socket.getsockname()[1])
