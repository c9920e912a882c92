"""`holdfast up --demo`: what the product is, live on the cluster that was just started, in half a minute.

Every number that it prints was counted here, from answers of the cluster. What does not come out as promised raises.
"""

import sys
import threading
import time
from collections import Counter
from typing import Final

from holdfast.client.blocking import Client
from holdfast.client.cli.arguments import CONNECT
from holdfast.client.cli.output import is_terminal
from holdfast.client.cli.up import Cluster
from holdfast.client.protocol.errors import HoldfastError, StateBroken, Unavailable

QUEUE: Final = "demo"
ATTEMPTS: Final = 3
READY_S: Final = 30.0
BEFORE_S, AFTER_S = 5.0, 5.0  # messages flow, and the leader dies between
DRAIN_S: Final = 30.0


def show(cluster: Cluster) -> None:
    """The whole demonstration; the cluster is whole again at its end."""
    connect = cluster.plan.connect
    with Client(connect) as client:
        _head("Messages flow")
        _say(f"The cluster has formed, {_leader(client)} leads.")
        _fresh_queue(client)
        flow = _Flow(connect)
        _say("A producer numbers its messages, a consumer acks what it gets.")
        flow.start()
        flow.report(BEFORE_S)
        if cluster.plan.nodes > 1:
            leader = _leader(client)
            _head("The leader dies")
            _say(f"kill -9 of {leader}, pid {cluster.pid(leader)}, in the middle of it.")
            cluster.kill(leader)
            flow.report(AFTER_S)
            _say(f"{_leader(client)} leads now. The longest the producer ever waited: {flow.silence_ms:,.0f} ms.")
        flow.stop()
        _head("The account")
        _account(flow)
        _head("A poison message")
        _poison(client)
        if cluster.plan.nodes > 1:
            _head("The dead node comes back")
            cluster.start(leader)
            _say(f"{leader} is started again, and has everything after {_caught_up(client, leader):.1f} s.")
    _head("The cluster goes on serving; Ctrl-C stops it")
    _say("In another terminal:")
    if connect != CONNECT:
        _say(f"    export HOLDFAST_CONNECT={connect}")
    for command in ("status", f"produce {QUEUE} hello", f"consume {QUEUE} --ack"):
        _say(f"    holdfast {command}")


class _Flow:
    """One producer and one consumer, each with a client of its own."""

    def __init__(self, connect: str) -> None:
        self.confirmed: dict[int, int] = {}  # number -> version
        self.delivered: Counter[int] = Counter()  # version -> how often
        self.acked: set[int] = set()
        self.silence_ms = 0.0
        self._began_s = 0.0
        self._connect = connect
        self._producing, self._consuming = threading.Event(), threading.Event()
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._guard, args=(work,), daemon=True) for work in (self._produce, self._consume)
        ]

    def start(self) -> None:
        self._began_s = time.monotonic()
        self._producing.set()
        self._consuming.set()
        for thread in self._threads:
            thread.start()

    def report(self, seconds: float) -> None:
        """Let it run, and tell how it goes."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            time.sleep(min(1.0, max(until_s - time.monotonic(), 0.0)))
            passed_s = time.monotonic() - self._began_s
            _say(f"  {passed_s:3.0f} s   confirmed {len(self.confirmed):>7,}   acked {len(self.acked):>7,}")
            self._raise()

    def stop(self) -> None:
        """No more messages; the consumer goes on until it has all that were confirmed."""
        self._producing.clear()
        self._threads[0].join(DRAIN_S)
        until_s = time.monotonic() + DRAIN_S
        while set(self.confirmed.values()) - self.acked and time.monotonic() < until_s:
            self._raise()
            time.sleep(0.05)
        self._consuming.clear()
        self._threads[1].join(DRAIN_S)
        self._raise()

    def _guard(self, work: "object") -> None:
        try:
            work()  # type: ignore[operator]
        except BaseException as error:
            self._errors.append(error)

    def _raise(self) -> None:
        if self._errors:
            raise self._errors[0]

    def _produce(self) -> None:
        number = 0
        with Client(self._connect) as client:
            while self._producing.is_set():
                number += 1
                began_s = time.monotonic()
                produced = client.produce(QUEUE, [b"order %d" % number], client_id="demo", client_seq=number)
                self.silence_ms = max(self.silence_ms, (time.monotonic() - began_s) * 1_000)
                self.confirmed[number] = produced.versions[0]

    def _consume(self) -> None:
        with Client(self._connect) as client:
            while self._consuming.is_set():
                lease = client.lease(QUEUE, max_messages=100, wait_ms=200)
                if lease:
                    versions = [message.version for message in lease]
                    self.delivered.update(versions)
                    lease.ack()
                    self.acked.update(versions)


def _account(flow: _Flow) -> None:
    """What was confirmed, against what came out."""
    confirmed = set(flow.confirmed.values())
    lost = confirmed - flow.acked
    doubled = [version for version, count in flow.delivered.items() if count > 1]
    unknown = flow.acked - confirmed
    _say(f"{len(flow.confirmed):,} messages were confirmed, {len(flow.acked):,} were acked:")
    _say(_bold(f"{len(lost)} lost, {len(doubled)} handed out twice, {len(unknown)} that nobody sent."))
    if lost or doubled or unknown or len(confirmed) != len(flow.confirmed):
        raise StateBroken(problem=f"lost {sorted(lost)[:5]}, doubled {doubled[:5]}, unknown {sorted(unknown)[:5]}")


def _poison(client: Client) -> None:
    _say(f"Its handler always fails. The queue allows {ATTEMPTS} attempts.")
    [version] = client.produce(QUEUE, [b"poison"]).versions
    attempts = 0
    while True:
        lease = client.lease(QUEUE, max_messages=1, wait_ms=1_000)
        if not lease:
            break
        attempts += 1
        [message] = lease
        _say(f"  attempt {message.attempts}: boom")
        lease.nack(error="boom")
    [row] = [row for row in client.dead(QUEUE, limit=10) if row.version == version]
    _say(_bold(f"Dead after exactly {row.attempts} attempts") + f" ({row.reason}, last error {row.last_error!r});")
    _say(f"kept with its history: `holdfast dead list {QUEUE}`.")
    if attempts != ATTEMPTS or row.attempts != ATTEMPTS:
        raise StateBroken(problem=f"{attempts} deliveries, {row.attempts} attempts counted")


def _fresh_queue(client: Client) -> None:
    if QUEUE in client.queues():
        client.delete_queue(QUEUE)
    client.create_queue(QUEUE, max_delivery_attempts=ATTEMPTS, visibility_timeout_ms=30_000)


def _leader(client: Client) -> str:
    """Who leads, once somebody does."""
    until_s = time.monotonic() + READY_S
    while True:
        try:
            leader = client.status().leader
        except Unavailable:
            leader = None
        if leader is not None:
            return leader
        if time.monotonic() > until_s:
            raise HoldfastError(f"no leader within {READY_S:.0f} s; the logs of the nodes say why")
        time.sleep(0.05)


def _caught_up(client: Client, name: str) -> float:
    began_s = time.monotonic()
    while time.monotonic() - began_s < READY_S:
        nodes = client.status().nodes
        applied = {node.name: node.applied for node in nodes if node.applied is not None}
        if name in applied and applied[name] >= max(applied.values()) - 1:
            return time.monotonic() - began_s
        time.sleep(0.05)
    raise HoldfastError(f"{name} did not come back within {READY_S:.0f} s")


def _head(text: str) -> None:
    print(f"\n{_bold(text)}", flush=True)


def _say(text: str) -> None:
    print(f"  {text}", flush=True)


def _bold(text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m" if is_terminal(sys.stdout) else text
