"""The load of a bench: many clients on one selector and one thread, in a process of its own.

Every client is a sans-IO core, as the library's own shells have it, without their threads and futures: what is measured
is the cluster, and as little as possible of us. A client runs programs, generators that yield a command and are sent
what became of it; several programs on one client are requests in flight on one connection.

The parent writes a job as one line of JSON, reads "ready", says when to go, and reads the figures:

    {"kind": "produce", …}   ->
                             <-   {"ready": true}
    {"at_s": 1234.5}         ->
    stop                     ->   (only if the job has no `seconds`)
                             <-   {"messages": …, …}

Times are of CLOCK_MONOTONIC, which all processes of a machine share.
"""

import gc
import json
import os
import selectors
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, field
from random import Random, SystemRandom
from typing import Any, assert_never

from holdfast.client.core import Core
from holdfast.client.events import (
    Action,
    Address,
    BytesReceived,
    CallId,
    Close,
    Connect,
    Connected,
    Disconnected,
    Finish,
    Outcome,
    WakeAt,
    Woken,
    Write,
    parse_addresses,
)
from holdfast.client.message import Message as Parts
from holdfast.client.message import pack
from holdfast.client.protocol import commands as c
from holdfast.client.protocol import queries as q
from holdfast.client.protocol import replies as r
from holdfast.client.protocol.errors import HoldfastError, StateBroken
from holdfast.client.protocol.frames import Buffer
from holdfast.client.protocol.replies import Failed, Reply
from holdfast.client.protocol.values import QueueId

RECEIVE_BYTES = 1_048_576
CALL_S = 30.0  # for one call, retries included
STAMP = struct.Struct(">dII")  # how a payload begins: when it was sent, by which client, its number there
PARKED_MS = 5_000  # how long a lease of a waiting consumer waits

Program = Generator[c.Command | q.Query | float, Reply, None]  # a number is a pause of so many seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one process of load does. The same line of JSON for parent and child."""

    kind: str  # produce, consume, deliver
    connect: str
    queue: str
    name: str = "load"  # a producer's identity begins with it
    first: int = 0  # number of the first client: unique among the processes of a bench
    clients: int = 1  # each with a session and a connection of its own
    in_flight: int = 1  # requests that each client has open at a time
    batch: int = 1  # messages in a request, or in a lease
    payload: int = 256
    pace_s: float = 0.0  # pause of a program between two requests
    warm_s: float = 0.5  # at the beginning, which does not count
    seconds: float | None = None  # without it until it is told to stop
    keep: bool = False  # tell every confirm: when, client, number, version

    def line(self) -> str:
        return json.dumps(asdict(self))


@dataclass(slots=True)
class Tally:
    """What counts, between `begin_s` and `end_s`."""

    begin_s: float = 0.0
    end_s: float = float("inf")
    messages: int = 0
    requests: int = 0
    took_s: list[float] = field(default_factory=list)  # of each request
    delivered_s: list[float] = field(default_factory=list)  # of each message, from its producer's hand
    confirms: list[tuple[float, int, int, int]] = field(default_factory=list)
    last_s: float = 0.0

    def add(self, began_s: float, ended_s: float, messages: int) -> None:
        if self.begin_s <= ended_s < self.end_s:
            self.messages += messages
            self.requests += 1
            self.took_s.append(ended_s - began_s)
            self.last_s = ended_s


# Programs ------------------------------------------------------------------------------------------------


class Numbers:
    """One producer's numbers: what is given out and not confirmed yet."""

    def __init__(self) -> None:
        self._next = 1
        self._open: dict[int, None] = {}  # ascending

    def take(self, count: int) -> int:
        first, self._next = self._next, self._next + count
        self._open[first] = None
        return first

    def release(self, first: int) -> None:
        del self._open[first]

    @property
    def done_below(self) -> int:
        return next(iter(self._open))


def produce(job: Job, queue_id: QueueId, client: int, numbers: Numbers, tally: Tally) -> Program:
    """One request after the other; those of the same client share its numbers."""
    rest = Random(client).randbytes(job.payload)
    columns, _ = pack([rest] * job.batch, Parts(b""))
    tail = rest[STAMP.size :] + rest * (job.batch - 1)
    client_id = f"{job.name}-{client}"
    while True:
        first = numbers.take(job.batch)
        began_s = time.monotonic()
        body = (STAMP.pack(began_s, client, first) + tail)[: job.payload * job.batch]
        done = yield c.Produce(
            queue_id=queue_id,
            columns=columns,
            body=body,
            client_id=client_id,
            first_seq=first,
            after_seq=first - 1 if job.in_flight > 1 else None,
            done_below=numbers.done_below,
        )
        ended_s = time.monotonic()
        numbers.release(first)
        tally.add(began_s, ended_s, job.batch)
        if job.keep:
            assert isinstance(done, r.Produced)
            tally.confirms.append((ended_s, client, first, done.first_version))
        if job.pace_s:
            yield job.pace_s


def consume(job: Job, queue_id: QueueId, tally: Tally) -> Program:
    """Lease, ack, and again; waits where there is nothing. The time is that of both together."""
    while True:
        began_s = time.monotonic()
        leased = yield c.Lease(queue_id=queue_id, group="default", max_messages=job.batch, wait_ms=PARKED_MS)
        assert isinstance(leased, r.Leased)
        if not leased.grants:
            continue
        arrived_s = time.monotonic()
        if job.kind == "deliver":
            _note_delivery(leased, arrived_s, tally)
        ranges = tuple((leased.lease_id, grant.first, grant.last) for grant in leased.grants)
        yield c.AckBatch(queue_id=queue_id, group="default", ranges=ranges)
        tally.add(began_s, time.monotonic(), sum(grant.last - grant.first + 1 for grant in leased.grants))


def _note_delivery(leased: r.Leased, arrived_s: float, tally: Tally) -> None:
    for batch in leased.batches:
        body, at = memoryview(batch.body), 0
        for (stop,) in struct.iter_unpack("<i", batch.columns.ends):
            sent_s, _, _ = STAMP.unpack_from(body, at)
            if tally.begin_s <= arrived_s < tally.end_s:
                tally.delivered_s.append(arrived_s - sent_s)
            at = stop - batch.columns.start


# The station ---------------------------------------------------------------------------------------------


class _Socket:
    def __init__(self, address: Address, sock: socket.socket) -> None:
        self.address, self.sock = address, sock
        self.connected = False
        self.out: list[Buffer] = []


class Client:
    """One core with its sockets, and the programs that wait for its calls."""

    def __init__(self, station: "Station", core: Core) -> None:
        self.core = core
        self.wake_at_s = float("inf")
        self._station = station
        self._sockets: dict[Address, _Socket] = {}
        self._waiting: dict[CallId, Program] = {}
        self._todo: deque[Action] = deque()
        self._performing = False

    def begin(self, program: Program) -> None:
        self._go_on(program, None)

    def _go_on(self, program: Program, reply: Reply | None) -> None:
        if self._station.over:
            return
        try:
            wanted = next(program) if reply is None else program.send(reply)
        except StopIteration:
            return
        now_s = time.monotonic()
        if isinstance(wanted, float):
            self._station.later(now_s + wanted, lambda: self._go_on(program, r.Done()))
            return
        call, actions = self.core.call(wanted, now_s, deadline_s=now_s + CALL_S + PARKED_MS / 1_000)
        self._waiting[call] = program
        self.perform(actions)

    def perform(self, actions: list[Action]) -> None:
        """In the order in which the core asked: a program that goes on asks it for more meanwhile."""
        self._todo.extend(actions)
        if not self._performing:
            self._performing = True
            while self._todo:
                self._do(self._todo.popleft())
            self._performing = False

    def _do(self, action: Action) -> None:
        match action:
            case Finish(call=call, outcome=outcome):
                self._go_on(self._waiting.pop(call), _reply(outcome))
            case Write(address=address, buffers=buffers):
                target = self._sockets.get(address)
                if target is not None:
                    target.out += buffers
                    self._station.dirty[target] = self
            case WakeAt(at_s=at_s):
                self.wake_at_s = at_s
            case Connect(address=address):
                self._connect(address)
            case Close(address=address):
                self._close(address)
            case unknown:
                assert_never(unknown)

    def woken(self, now_s: float) -> None:
        self.perform(self.core.handle(Woken(), now_s))

    def serve(self, target: _Socket, events: int) -> None:
        if self._sockets.get(target.address) is not target:
            return
        try:
            if not target.connected:
                problem = target.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if problem:
                    raise OSError(problem, os.strerror(problem))
                target.connected = True
                self._station.watch(target, selectors.EVENT_READ, self)
                self.perform(self.core.handle(Connected(target.address), time.monotonic()))
            elif events & selectors.EVENT_READ:
                data = target.sock.recv(RECEIVE_BYTES)
                if not data:
                    raise ConnectionResetError
                self.perform(self.core.handle(BytesReceived(target.address, data), time.monotonic()))
            self._station.dirty[target] = self
        except BlockingIOError:
            pass
        except OSError:
            self._lost(target)

    def flush(self, target: _Socket) -> None:
        """All that the programs wrote in this turn leaves in one call of the system."""
        if not target.out or not target.connected or self._sockets.get(target.address) is not target:
            return
        data: Buffer = b"".join(target.out) if len(target.out) > 1 else target.out[0]
        try:
            sent = target.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._lost(target)
            return
        target.out = [memoryview(data)[sent:]] if sent < len(data) else []
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if target.out else 0)
        self._station.watch(target, wanted, self)

    def _connect(self, address: Address) -> None:
        host, _, port = address.rpartition(":")
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        target = self._sockets[address] = _Socket(address, sock)
        self._station.watch(target, selectors.EVENT_WRITE, self)
        try:
            sock.connect((host, int(port)))
        except BlockingIOError:
            pass
        except OSError:
            self._lost(target)

    def _lost(self, target: _Socket) -> None:
        self._close(target.address)
        self.perform(self.core.handle(Disconnected(target.address), time.monotonic()))

    def _close(self, address: Address) -> None:
        target = self._sockets.pop(address, None)
        if target is not None:
            self._station.forget(target)
            target.sock.close()


class Station:
    """Runs clients until it is over."""

    def __init__(self) -> None:
        self.over = False
        self.clients: list[Client] = []
        self.dirty: dict[_Socket, Client] = {}
        self._selector = selectors.DefaultSelector()
        self._watched: dict[_Socket, int] = {}
        self._pauses: list[tuple[float, Callable[[], None]]] = []

    def add(self, addresses: list[Address]) -> Client:
        # Sessions are drawn by it: one that came twice would be taken for the first.
        client = Client(self, Core(addresses, random=SystemRandom(), consumer_id="bench"))
        self.clients.append(client)
        return client

    def later(self, at_s: float, what: Callable[[], None]) -> None:
        self._pauses.append((at_s, what))

    def watch(self, target: _Socket, events: int, client: Client) -> None:
        known = self._watched.get(target)
        if known is None:
            self._selector.register(target.sock, events, (client, target))
        elif known != events:
            self._selector.modify(target.sock, events, (client, target))
        self._watched[target] = events

    def forget(self, target: _Socket) -> None:
        del self._watched[target]
        self._selector.unregister(target.sock)

    def listen_to(self, descriptor: int) -> None:
        """Over as soon as a line comes here, or its end."""
        self._selector.register(descriptor, selectors.EVENT_READ, None)

    def run(self, until_s: float = float("inf")) -> None:
        while not self.over and time.monotonic() < until_s:
            self._turn(until_s)

    def _turn(self, until_s: float) -> None:
        self._flush()
        wake_s = min(client.wake_at_s for client in self.clients)
        pause_s = min((at_s for at_s, _ in self._pauses), default=float("inf"))
        wait_s = max(min(wake_s, pause_s, until_s) - time.monotonic(), 0.0)
        for key, events in self._selector.select(min(wait_s, 1.0)):
            if key.data is None:
                self.over = True
            else:
                client, target = key.data
                client.serve(target, events)
        now_s = time.monotonic()
        if now_s >= wake_s:
            for client in self.clients:
                if now_s >= client.wake_at_s:
                    client.woken(now_s)
        if now_s >= pause_s:
            due = [what for at_s, what in self._pauses if at_s <= now_s]
            self._pauses = [pause for pause in self._pauses if pause[0] > now_s]
            for what in due:
                what()

    def _flush(self) -> None:
        while self.dirty:
            target, client = self.dirty.popitem()
            client.flush(target)


def _reply(outcome: Outcome) -> Reply:
    if isinstance(outcome, HoldfastError):
        raise outcome
    if isinstance(outcome.reply, Failed):
        raise outcome.reply.error
    return outcome.reply


# The process ---------------------------------------------------------------------------------------------


def main() -> None:
    job = Job(**json.loads(sys.stdin.readline()))
    station = Station()
    clients = [station.add(parse_addresses(job.connect)) for _ in range(job.clients)]
    found: list[QueueId] = []
    for client in clients:
        client.begin(_resolve(job.queue, found))
    while len(found) < job.clients:  # every client has its connection to the leader before the clock runs
        station.run(time.monotonic() + 0.01)
    print(json.dumps({"ready": True}), flush=True)
    at_s = float(json.loads(sys.stdin.readline())["at_s"])
    gc.collect()
    gc.freeze()  # what was imported is not looked through again and again
    tally = Tally(at_s + job.warm_s)
    for number, client in enumerate(clients, start=job.first):
        numbers = Numbers()
        for _ in range(job.in_flight):
            if job.kind == "produce":
                client.begin(produce(job, found[0], number, numbers, tally))
            else:
                client.begin(consume(job, found[0], tally))
    station.listen_to(sys.stdin.fileno())
    print(json.dumps(_measure(job, station, tally)), flush=True)


def _resolve(queue: str, found: list[QueueId]) -> Program:
    described = yield q.DescribeQueue(name=queue)
    assert isinstance(described, r.QueueDescribed)
    found.append(described.queue_id)


def _measure(job: Job, station: Station, tally: Tally) -> dict[str, Any]:
    if job.seconds is not None:
        tally.end_s = tally.begin_s + job.seconds
    station.run(tally.begin_s)
    began_cpu_s = time.process_time()
    station.run(tally.end_s)
    cpu_s = time.process_time() - began_cpu_s
    if not tally.requests:
        raise StateBroken(problem="the load ended without one answer")
    return {
        "messages": tally.messages,
        "requests": tally.requests,
        "cpu_s": cpu_s,
        "last_s": tally.last_s,
        "took_ms": [round(took_s * 1_000, 3) for took_s in tally.took_s],
        "delivered_ms": [round(took_s * 1_000, 3) for took_s in tally.delivered_s],
        "confirms": tally.confirms,
    }


if __name__ == "__main__":
    main()
