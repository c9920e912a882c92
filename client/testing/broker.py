"""A broker for tests: a real node inside the test's process, on a folder of its own, with a clock that can be moved.

    with Broker() as broker, broker.client() as client:
        client.create_queue("orders", visibility_timeout_ms=30_000)
        client.produce("orders", [b"a"])
        lease = client.lease("orders")
        broker.clock.advance(30)
        assert client.lease("orders").messages[0].attempts == 2

Everything is as in a cluster but the disk: `fsync="os"` spares the test the sync of each request.
"""

import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from holdfast.client.blocking import Client


class Clock:
    """The time that the broker's messages live by: delays, visibility timeouts, backoff, TTLs, waits, retention.

    It runs like any clock. It is the broker's alone: a client does not notice that it was moved, just as if it had
    stood still itself for that time.
    """

    def __init__(self, advance: Callable[[float], None], stop: Callable[[], None], go: Callable[[], None]) -> None:
        self._advance, self._stop, self._go = advance, stop, go

    def advance(self, seconds: float | timedelta) -> None:
        """Let time pass at once. When this returns, all that fell due meanwhile has come to pass, in its order.

        A lease expires as it would have, a long poll that waited for what fell due is answered. Raises BadValue for a
        time below 0.
        """
        self._advance(seconds.total_seconds() if isinstance(seconds, timedelta) else seconds)

    def stop(self) -> None:
        """Let it stand still but for `advance`. A long poll then ends only by what comes, or by an `advance`."""
        self._stop()

    def go(self) -> None:
        """Let it run on from where it stands."""
        self._go()


class Broker:
    """One node. Context manager, entered once; closes the clients that it gave, and removes its folder."""

    def __init__(self, *, fsync: str = "os", log: TextIO | None = None) -> None:
        """`log` is where its log lines go; by default nowhere."""
        from holdfast.cluster.embedded import Node
        from holdfast.cluster.node import real_wall_ms
        from holdfast.cluster.passing import Passing

        passing = Passing(time.monotonic, real_wall_ms)
        self._folder = Path(tempfile.gettempdir()) / f"holdfast-{secrets.token_hex(8)}"  # the node makes it
        self._node = Node(self._folder, fsync=fsync, log=log, passing=passing)
        self._clients: list[Client] = []
        self.clock = Clock(self._node.advance, passing.stop, passing.go)

    @property
    def address(self) -> str:
        """Where clients of all kinds find it, while it runs."""
        return self._node.address

    def client(self, **options: Any) -> Client:
        """A blocking client of its own, with its own session; `options` are those of `Client`."""
        client = Client(self.address, **options)
        self._clients.append(client)
        return client

    @property
    def parked(self) -> int:
        """How many long polls wait here now: what a test looks at before it moves the clock."""
        return self._node.parked

    def __enter__(self) -> Self:
        self._node.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raises what ended the node, if it did not end by this."""
        for client in self._clients:
            client.close()
        try:
            self._node.__exit__(kind, error, trace)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
