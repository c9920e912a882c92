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
from holdfast.cluster.client_stream import ServerLimits
from holdfast.cluster.config import Address, Config
from holdfast.cluster.descriptors import allow_files, share
from holdfast.cluster.forming import form
from holdfast.cluster.http import serve_http
from holdfast.cluster.logs import Log, cause_of
from holdfast.cluster.node import Listeners, Node, Wall, real_wall_ms
from holdfast.cluster.passing import Passing
from holdfast.cluster.peers import listen
from holdfast.cluster.snapshots import Policy
from holdfast.cluster.waiting import Waiting

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
        raise cause_of(group) from None


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
    try:
        await _serve(config, log, ready, wall_ms, policy, passing)
    except BaseException as error:
        log.failed(error=error)
        raise


async def _serve(
    config: Config, log: Log, ready: Ready, wall_ms: Wall, policy: Policy | None, passing: Passing | None
) -> None:
    _make_folder(config)
    found = share(allow_files(config.max_connections), config.max_connections)
    limits = ServerLimits(connections=found.connections, strangers=found.strangers)
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
        waiting = Waiting(config, log, wall_ms, limits)
        shown: list[Waiting | Node] = [waiting]
        async with trio.open_nursery() as nursery:
            if http:
                nursery.start_soon(_serve_pages, http, lambda: shown[-1], log)
            async with trio.open_nursery() as meanwhile:
                meanwhile.start_soon(waiting.turn_away, clients)
                identity, founders = await form(config, peers, log)
                waiting.cluster_id = identity.cluster_id
                # The state may have to be built from a snapshot and the log: a thread does it, and the pages answer.
                made = partial(Node, config, identity, founders, log, wall_ms, policy, passing, limits)
                node = await trio.to_thread.run_sync(made)
                meanwhile.cancel_scope.cancel()
            shown.append(node)
            ready(node)
            await node.run(Listeners(clients, peers))
            nursery.cancel_scope.cancel()


async def _serve_pages(listeners: list[trio.SocketListener], shown: Callable[[], Waiting | Node], log: Log) -> None:
    await serve_http(
        listeners,
        lambda: shown().status(),
        lambda: shown().render_metrics(),
        answered=lambda path, code: shown().metrics.http_answered(path, code),
        short=lambda error: log.out_of_files(doing="accept", error=error),
    )


def _make_folder(config: Config) -> None:
    try:
        config.data.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise BadValue(field="data", problem=f"{config.data} cannot be made: {error.strerror}") from None
    if not os.access(config.data, os.W_OK):
        raise BadValue(field="data", problem=f"{config.data} cannot be written to")


def _bound(listeners: list[trio.SocketListener], asked: Address) -> Address:
    return Address(asked.host, listeners[0].socket.getsockname()[1])
