"""A node that does not serve yet: it waits for its peers to found a cluster, or makes its state ready.

Its pages say so, for a probe that hears nothing ends a node that is well; clients are told, and go on to another one.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from typing import NoReturn

import trio

from holdfast.client.protocol.errors import NoLeader
from holdfast.cluster.client_stream import Client, ServerLimits
from holdfast.cluster.config import Config
from holdfast.cluster.connection import Asked, Greeting
from holdfast.cluster.events import Role
from holdfast.cluster.health import NodeStatus
from holdfast.cluster.logs import Log
from holdfast.cluster.metrics import Metrics
from holdfast.cluster.peers import Lent
from holdfast.cluster.server import Clients


class Waiting:
    """What `Node` is to the pages and to clients, until there is one."""

    def __init__(self, config: Config, log: Log, wall_ms: Callable[[], int], limits: ServerLimits) -> None:
        self.metrics = Metrics()
        self.cluster_id = ""  # once it is known
        self._config, self._log, self._limits = config, log, limits
        self._started_ms = wall_ms()

    async def turn_away(self, listeners: Sequence[trio.SocketListener]) -> None:
        """Tell every client that says hello to come again, until cancelled. The listeners stay open."""
        log = self._log
        clients = Clients(
            self,
            self._refuse,
            rejected=lambda client, error: None,  # all of them, and each comes again soon: no line for it
            short=lambda error: log.out_of_files(doing="accept", error=error),
            limits=self._limits,
        )
        await clients.serve([Lent(listener) for listener in listeners])

    def _refuse(self) -> Greeting:
        node = self._config.node
        if self.cluster_id:
            raise NoLeader(f"{node} is starting; retry")
        raise NoLeader(f"{node} waits for its peers: the cluster is not founded yet; retry")

    def ask(self, client: Client, asked: Asked, size_bytes: int) -> NoReturn:
        raise AssertionError("nobody was welcomed who could ask")

    def gone(self, client: Client) -> None:
        """It never asked for anything."""

    def status(self) -> NodeStatus:
        config = self._config
        return NodeStatus(
            node=config.node,
            cluster_id=self.cluster_id,
            role=Role.FOLLOWER,
            term=0,
            leader=None,
            leader_address=None,
            applied=0,
            committed=0,
            durable=0,
            last=0,
            time_ms=0,
            fsync=config.fsync,
            pid=os.getpid(),
            address=str(config.listen),
            members=(),
            skew_ms={},
            journal_bytes=0,
            state_bytes=0,
            started_ms=self._started_ms,
            turn_age_ms=0,
            stopping=False,
            failed=None,
            disk_free_bytes=shutil.disk_usage(config.data).free,
            refusing_produce=False,
            digest="",
        )

    def render_metrics(self) -> str:
        self.metrics.use_status(self.status())
        return self.metrics.render()
