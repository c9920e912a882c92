"""`holdfast bench client`: what the client itself costs, in processor time of its own process and of nothing else.

The other side is a process of its own that only counts: it answers every request with a reply that it made beforehand,
looks at no payload and keeps nothing. All threads of the client are in the figures.
"""

import selectors
import socket
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import count
from typing import Any

from holdfast.client.blocking import Client
from holdfast.client.message import Message, pack
from holdfast.client.protocol import codec
from holdfast.client.protocol.commands import AckBatch, Lease, OpenProducer, OpenSession, Produce
from holdfast.client.protocol.frames import FrameReader, write_frame
from holdfast.client.protocol.messages import Answered, FromNode, Hello, Inquiry, Ping, Pong, Request, Welcome
from holdfast.client.protocol.replies import (
    Answer,
    Done,
    Grant,
    Leased,
    MessageBatch,
    Produced,
    ProducerOpened,
    QueueDescribed,
    Reply,
    Settled,
)
from holdfast.client.protocol.values import LeaseId, Place, QueueId, QueueSettings, Version

Figures = dict[str, Any]

QUEUE = "counted"
BATCH = 1_000
WANTED_PER_CPU_S = 400_000
WANTED_SINGLE_US = 100.0
WANTED_IMPORT_MS = 100.0
IMPORTS = 20


def run(args: Namespace) -> Iterator[Figures]:
    """One object for each thing that a client does."""
    payload = bytes(args.payload)
    batch = [payload] * BATCH
    with _counting(args.payload) as address, Client(address) as client:
        numbers = count(1, BATCH)
        figures = _measured(
            args.seconds,
            BATCH,
            lambda: client.produce(QUEUE, batch, client_id="bench", client_seq=next(numbers)),
        )
        yield {"what": "produce", "batch": BATCH, **figures, "wanted": {"messages_per_cpu_s": WANTED_PER_CPU_S}}
        figures = _measured(args.seconds, 1, lambda: client.produce(QUEUE, [payload]))
        yield {"what": "produce", "batch": 1, **figures, "wanted": {"client_cpu_us": WANTED_SINGLE_US}}
        with client.producer(QUEUE, client_id="bench") as producer:
            figures = _measured(args.seconds, BATCH, lambda: producer.send_many(batch))
            yield {"what": "send_many", "batch": BATCH, **figures, "wanted": {"messages_per_cpu_s": WANTED_PER_CPU_S}}
            figures = _measured(args.seconds, 1, lambda: producer.send(payload))
            yield {"what": "send", "batch": 1, **figures, "wanted": {"client_cpu_us": WANTED_SINGLE_US}}
            open_: deque[Future[int]] = deque(maxlen=BATCH)
            figures = _measured(args.seconds, 1, lambda: open_.append(producer.send_nowait(payload)))
            yield {"what": "send_nowait", "batch": 1, **figures, "wanted": {}}
        figures = _measured(args.seconds, BATCH, lambda: client.lease(QUEUE, max_messages=BATCH).ack())
        yield {"what": "lease_ack", "batch": BATCH, **figures, "wanted": {}}
    yield {"what": "import", "import_ms": _import_ms(), "wanted": {"import_ms": WANTED_IMPORT_MS}}


def _measured(seconds: float, messages: int, call: Callable[[], object]) -> Figures:
    """Call again and again; the first calls, which connect and compile, are left out."""
    for _ in range(20):
        call()
    calls = 0
    until_s = time.monotonic() + seconds
    began_s, cpu_began_s = time.monotonic(), time.process_time()
    while time.monotonic() < until_s:
        call()
        calls += 1
    cpu_s, took_s = time.process_time() - cpu_began_s, time.monotonic() - began_s
    return {
        "messages_per_cpu_s": round(calls * messages / cpu_s),
        "messages_per_s": round(calls * messages / took_s),
        "client_cpu_us": round(cpu_s * 1e6 / (calls * messages), 3),
    }


def _import_ms() -> float:
    """The median of fresh processes: from the beginning of the import to its end."""
    text = "import time; t = time.perf_counter(); import holdfast.client.blocking; print(time.perf_counter() - t)"
    told = [
        subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout
        for _ in range(IMPORTS)
    ]
    return round(statistics.median(float(line) for line in told) * 1_000, 1)


# The other side ------------------------------------------------------------------------------------------


@contextmanager
def _counting(payload: int) -> Iterator[str]:
    """The address of a process that only counts."""
    text = f"from holdfast.client.cli.bench_client import serve; serve({payload})"
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def serve(payload: int) -> None:
    """Print the address, then answer whoever comes until the process is ended."""
    selector = selectors.DefaultSelector()
    listener = socket.create_server(("127.0.0.1", 0))
    selector.register(listener, selectors.EVENT_READ)
    print(f"127.0.0.1:{listener.getsockname()[1]}", flush=True)
    answers = _Answers(payload)
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                connection, _ = listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                selector.register(connection, selectors.EVENT_READ, FrameReader())
                continue
            assert isinstance(key.fileobj, socket.socket)
            data = key.fileobj.recv(1_048_576)
            if not data:
                selector.unregister(key.fileobj)
                key.fileobj.close()
                continue
            for frame in key.data.feed(data):
                header, body = codec.encode_message(answers.to(codec.decode_from_client(frame.header, frame.body)))
                key.fileobj.sendall(b"".join(write_frame(header, *body)))


class _Answers:
    def __init__(self, payload: int) -> None:
        columns, body = pack([bytes(payload)] * BATCH, Message(b""))
        self._columns, self._body = columns, body
        self._produced = 0
        self._leases = 0

    def to(self, message: object) -> FromNode:
        match message:
            case Hello():
                return Welcome(version=1, cluster_id="bench", node="n1")
            case Ping(token=token):
                return Pong(token)
            case Request() | Inquiry():
                return Answered(message.request_id, Answer(Place(1, 0, 1), self._reply(message)))
            case _:
                raise TypeError(f"{message!r} is no part of the bench")

    def _reply(self, message: Request | Inquiry) -> Reply:
        match message:
            case Request(command=Produce(columns=columns)):
                first = self._produced + 1
                self._produced += columns.count
                return Produced(first_version=Version(first), count=columns.count)
            case Request(command=Lease()):
                return self._leased()
            case Request(command=AckBatch()):
                return Settled(count=BATCH)
            case Request(command=OpenSession()):
                return Done()
            case Request(command=OpenProducer()):
                return ProducerOpened(epoch=1, high_water=0)
            case _:
                return QueueDescribed(
                    queue_id=QueueId(1),
                    name=QUEUE,
                    settings=QueueSettings(),
                    tail_version=0,
                    lowest_version=1,
                    stored_messages=0,
                    stored_bytes=0,
                    groups=(),
                    readers=(),
                )

    def _leased(self) -> Leased:
        self._leases += 1
        first = self._leases * BATCH
        batch = MessageBatch(
            first=first,
            generation=0,
            enqueued_ms=1,
            client_id="bench",
            first_seq=1,
            columns=self._columns,
            body=self._body,
        )
        grant = Grant(Version(first), Version(first + BATCH - 1), 1, 1)
        return Leased(lease_id=LeaseId(self._leases), deadline_ms=1, grants=(grant,), batches=(batch,))
