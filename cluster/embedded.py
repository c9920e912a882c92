"""A node inside this process: the same code as `holdfast serve`, without peers, for tests and small tools.

    with Node("data") as node, Client(node.address) as client:
        client.create_queue("orders")

It serves on a port of its own on loopback, in a thread of its own, and syncs to disk as any node does.
"""

import os
import time
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import TextIO

import trio

from holdfast.client.protocol.errors import Misuse, NoLeader
from holdfast.cluster import node as nodes
from holdfast.cluster.config import Address, Config
from holdfast.cluster.logs import Log
from holdfast.cluster.passing import Passing
from holdfast.cluster.serve import run_alone, serve

START_S = 30.0
STOP_S = 30.0


class Node:
    """One node. Context manager; entered once."""

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        fsync: str = "always",
        log: TextIO | None = None,
        passing: Passing | None = None,
    ) -> None:
        """`log` is where its log lines go; by default nowhere. With `passing`, `advance` can let time pass."""
        if fsync not in ("always", "os"):
            raise Misuse(f"fsync is {fsync!r}; always or os is allowed")
        self.address = ""  # where clients find it, while it runs
        self._config = Config(
            data=Path(path), listen=Address("127.0.0.1", 0), fsync="always" if fsync == "always" else "os"
        )
        self._stream = log
        self._passing = passing
        self._ready = Event()
        self._thread = Thread(target=self._run, name="holdfast-node", daemon=True)
        self._token: trio.lowlevel.TrioToken
        self._node: nodes.Node | None = None
        self._failure: BaseException | None = None

    def __enter__(self) -> "Node":
        self._thread.start()
        if not self._ready.wait(START_S):
            raise NoLeader(f"the embedded node did not start within {START_S:.0f} s")
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop it. Raises what ended it before."""
        if self._thread.is_alive() and self._node is not None:
            self._token.run_sync_soon(self._node.stop, "closed")
        self._thread.join(STOP_S)
        self.address = ""
        if self._failure is not None and error is None:
            raise self._failure

    @property
    def parked(self) -> int:
        """How many leases wait here for a message."""
        return len(self._node.replica.waiters) if self._node is not None else 0

    def advance(self, seconds: float) -> None:
        """Let this much time pass for its messages, at once. From any thread but its own."""
        if self._passing is None or self._node is None:
            raise Misuse("this node has no clock that can be moved, or does not run")
        by_ms = int(seconds * 1_000)
        self._passing.forward(min(by_ms, 0))  # refuses to go back
        try:
            trio.from_thread.run(self._node.pass_time, by_ms, trio_token=self._token)
        except trio.RunFinishedError:
            raise Misuse("this node does not run any more") from None

    def _run(self) -> None:
        try:
            run_alone(self._serve)
        except BaseException as error:
            self._failure = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        with ExitStack() as stack:
            stream = self._stream or stack.enter_context(open(os.devnull, "w"))
            log = Log(node=self._config.node, stream=stream, wall_ms=nodes.real_wall_ms, now_s=time.monotonic)
            await serve(self._config, log, self._started, passing=self._passing)

    def _started(self, node: nodes.Node) -> None:
        self._node = node
        self.address = str(node.config.listen)
        self._ready.set()
