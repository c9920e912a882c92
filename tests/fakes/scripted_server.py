"""A node that does what a test says: real TCP on 127.0.0.1, real frames and codec, the real state machine.

One entry for each request, no log, no disk, no second replica. Several servers may share one `Brain`, as nodes share a
state; a test says who leads. Faults are lined up by the kind of command or query that they are to meet.
"""

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Condition, Thread, Timer
from typing import Literal

from holdfast.client.protocol import codec
from holdfast.client.protocol.commands import Command, Envelope, Lease, Produce, Stage, Touch, Transaction
from holdfast.client.protocol.errors import HoldfastError, NotLeader, Withdrawn
from holdfast.client.protocol.frames import FrameReader, write_frame
from holdfast.client.protocol.messages import (
    Answered,
    Declined,
    FromClient,
    FromNode,
    Hello,
    Inquiry,
    Ping,
    Pong,
    Request,
    Unusable,
    Welcome,
    Withdraw,
    choose_version,
)
from holdfast.client.protocol.queries import NodeStatus, Query, Stats
from holdfast.client.protocol.replies import Answer, Fsync, GroupStats, Leased, MemberDescribed, NodeDescribed
from holdfast.client.protocol.values import LOCAL_PRINCIPAL, NO_SESSION, Place, QueueId
from holdfast.storage import machine, views
from holdfast.storage.entry import decode_entry, encode_entry
from holdfast.storage.memory_store import MemoryStore
from holdfast.storage.state import content_hash
from holdfast.storage.tables import TABLES

# `late`: what is asked happens, and is answered when its client has withdrawn it.
Fate = Literal["drop_before", "drop_after", "silent_before", "silent_after", "late"]
DUE_S = 0.02  # how late what falls due is noticed
Asked = tuple[socket.socket, int]  # a connection, and the id of a request on it


@dataclass(frozen=True)
class Fault:
    """What is to happen to the next request of this kind: a fate, or an error to decline it with."""

    kind: type
    fate: Fate | HoldfastError


class Brain:
    """The state of a cluster, and the log of what was applied to it."""

    def __init__(self, now_ms: Callable[[], int] | None = None) -> None:
        self.applied: list[Request] = []  # in order, retries too
        self.changed = Condition()
        self.parked = 0  # leases that wait
        self.skipped_ms = 0  # a test lets time pass by adding to it
        self._now_ms = now_ms or (lambda: time.time_ns() // 1_000_000)
        self._store = MemoryStore(tables=TABLES)
        self._index = 0

    def pass_ms(self, milliseconds: int) -> None:
        with self.changed:
            self.skipped_ms += milliseconds
            self.changed.notify_all()

    def request(self, request: Request, is_over: Callable[[], bool] = lambda: False) -> Answer | None:
        """Apply a request; a Lease that may wait is applied when there is something, or when its time is over.

        None: while it waited, `is_over` became true.
        """
        with self.changed:
            command = request.command
            if isinstance(command, Lease) and command.wait_ms and not self._knows(request):
                self.parked += 1
                self.changed.notify_all()
                until_s = time.monotonic() + command.wait_ms / 1000
                while not is_over() and not self._ready(command) and time.monotonic() < until_s:
                    self.changed.wait(min(until_s - time.monotonic(), DUE_S))
                self.parked -= 1
                self.changed.notify_all()
                if is_over():
                    return None
            self.applied.append(request)
            answer = self._commit(
                Envelope(
                    principal=LOCAL_PRINCIPAL,
                    command=_hashed(command),
                    session=request.session,
                    request_seq=request.request_seq,
                    done_below=request.done_below,
                )
            )
            if isinstance(command, Lease) and isinstance(answer.reply, Leased):
                with self._store.read() as txn:
                    answer = replace(answer, reply=views.deliver(txn, command.queue_id, answer.reply))
            return answer

    def query(self, query: Query) -> Answer:
        with self.changed:
            queue_id = getattr(query, "queue_id", None)
            if queue_id is not None:
                self._touch(queue_id)
            with self._store.read() as txn:
                return views.answer(txn, query)

    @property
    def index(self) -> int:
        """Of the last entry that was applied."""
        return self._index

    def count(self, kind: type[Command]) -> int:
        """How many requests of a kind reached the state, retries too."""
        with self.changed:
            return sum(isinstance(request.command, kind) for request in self.applied)

    def _knows(self, request: Request) -> bool:
        """Whether something was asked under this number before: then there is an answer, whatever is available."""
        number = (request.session, request.request_seq)
        return any((before.session, before.request_seq) == number for before in self.applied)

    def _ready(self, lease: Lease) -> bool:
        self._touch(lease.queue_id)
        with self._store.read() as txn:
            reply = views.answer(txn, Stats(queue_id=lease.queue_id, group=lease.group)).reply
        return not isinstance(reply, GroupStats) or reply.ready > 0

    def _touch(self, queue_id: QueueId) -> None:
        self._commit(Envelope(principal=LOCAL_PRINCIPAL, command=Touch(queue_id=queue_id), session=NO_SESSION))

    def _commit(self, envelope: Envelope) -> Answer:
        self._index += 1
        entry = decode_entry(self._index, encode_entry(self._now_ms() + self.skipped_ms, [envelope]))
        applied = self._store.transact(lambda txn: machine.apply(txn, entry))
        if not isinstance(envelope.command, Touch):
            self.changed.notify_all()
        return applied.answers[0]


class ScriptedServer:
    """One node. Context manager; `address` is there from the start, also after `stop` and a second `start`."""

    def __init__(self, brain: Brain | None = None, name: str = "n1") -> None:
        self.brain = brain or Brain()
        self.name = name
        self.cluster_id = "scripted"
        self.term = 1
        self.fsync: Fsync = "always"
        self.members: list[ScriptedServer] = [self]  # as this node knows them
        self.faults: list[Fault] = []
        self.slow_s = 0.0  # how long a command takes to be answered, while others are
        self.when_failed: Callable[[], None] = lambda: None  # called as a fault is met
        self.frozen = False  # reads everything, says nothing
        self.arrived: list[Request | Inquiry] = []
        self.connections = 0
        self._port = 0
        self._open: list[socket.socket] = []
        self._withdrawn: set[Asked] = set()
        self._ended: set[socket.socket] = set()
        self.start()
        self.leader: str | None = self.address

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def fail(self, kind: type, *fates: Fate | HoldfastError) -> None:
        self.faults += [Fault(kind, fate) for fate in fates]

    def await_parked(self, count: int = 1, within_s: float = 20.0) -> None:
        """Until so many leases wait."""
        with self.brain.changed:
            assert self.brain.changed.wait_for(lambda: self.brain.parked == count, within_s), "they do not wait"

    def await_applied(self, kind: type[Command], within_s: float = 20.0, times: int = 1) -> None:
        """Until requests of this kind have reached the state."""
        with self.brain.changed:
            reached = lambda: self.brain.count(kind) >= times  # noqa: E731
            assert self.brain.changed.wait_for(reached, within_s), f"{self.brain.count(kind)} {kind.__name__} came"

    def await_arrived(self, kind: type[Command], within_s: float = 20.0) -> None:
        """Until a request of this kind has come to this node, whatever becomes of it."""
        with self.brain.changed:
            came = lambda: any(isinstance(a, Request) and isinstance(a.command, kind) for a in self.arrived)  # noqa: E731
            assert self.brain.changed.wait_for(came, within_s), f"no {kind.__name__} came"

    def start(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._port = self._listener.getsockname()[1]
        self._acceptor = Thread(target=self._accept, args=(self._listener,), daemon=True)
        self._acceptor.start()

    def stop(self) -> None:
        """As a killed process: nothing listens, and every connection is over."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join()
        self.drop_connections()

    def drop_connections(self) -> None:
        for connection in self._open:
            _end(connection)
        self._open.clear()

    def __enter__(self) -> "ScriptedServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        reader = FrameReader()
        try:
            while data := connection.recv(65_536):
                for frame in reader.feed(data):
                    self._take(connection, codec.decode_from_client(frame.header, frame.body))
        except OSError:
            pass
        finally:
            with self.brain.changed:
                self._ended.add(connection)
                self.brain.changed.notify_all()
            connection.close()

    def _take(self, connection: socket.socket, message: FromClient | Unusable) -> None:
        if isinstance(message, Request | Inquiry):
            with self.brain.changed:
                self.arrived.append(message)
                self.brain.changed.notify_all()
        if self.frozen:
            return
        match message:
            case Hello():
                welcome = Welcome(version=choose_version(message), cluster_id=self.cluster_id, node=self.name)
                _send(connection, welcome)
            case Ping(token=token):
                _send(connection, Pong(token))
            case Unusable(request_id=request_id, error=error):
                _send(connection, Declined(request_id, error))
            case Withdraw(request_id=request_id):
                with self.brain.changed:
                    self._withdrawn.add((connection, request_id))
                    self.brain.changed.notify_all()
            case Request() if self.slow_s:
                Timer(self.slow_s, self._decide, (connection, message)).start()
            case Request(command=Lease(wait_ms=wait_ms)) if wait_ms:
                Thread(target=self._decide, args=(connection, message), daemon=True).start()
            case _:
                self._decide(connection, message)

    def _decide(self, connection: socket.socket, message: Request | Inquiry) -> None:
        what = message.command if isinstance(message, Request) else message.query
        fault = next((fault for fault in self.faults if isinstance(what, fault.kind)), None)
        if fault is not None:
            self.faults.remove(fault)
            self.when_failed()
        fate = fault.fate if fault is not None else None
        if isinstance(fate, HoldfastError):
            _send(connection, Declined(message.request_id, fate))
        elif fate == "drop_before":
            _end(connection)
        elif fate == "silent_before":
            pass
        elif self.leader != self.address and not (isinstance(message, Inquiry) and message.stale):
            _send(connection, Declined(message.request_id, NotLeader(leader=self.leader)))
        else:
            asked = (connection, message.request_id)
            is_over = lambda: asked in self._withdrawn or connection in self._ended  # noqa: E731
            answer = self._answer(message, is_over if fate != "late" else lambda: False)
            if fate == "late":
                with self.brain.changed:
                    assert self.brain.changed.wait_for(is_over, 20.0), "nobody withdrew it"
            if fate == "drop_after":
                _end(connection)
            elif answer is None:
                _send(connection, Declined(message.request_id, Withdrawn()))
            elif fate in (None, "late"):
                _send(connection, Answered(message.request_id, answer))

    def _answer(self, message: Request | Inquiry, is_over: Callable[[], bool]) -> Answer | None:
        if isinstance(message, Request):
            return self.brain.request(message, is_over)
        if isinstance(message.query, Query):
            return self.brain.query(message.query)
        assert isinstance(message.query, NodeStatus), "a test says who leads here, nobody else"
        return self._describe()

    def _describe(self) -> Answer:
        """This node about itself, as the real ones answer: only who leads knows how far the others are."""
        leads = self.leader == self.address
        leader = next((member for member in self.members if member.address == self.leader), None)
        described = NodeDescribed(
            node=self.name,
            cluster_id=self.cluster_id,
            address=self.address,
            role="leader" if leads else "follower",
            term=self.term,
            leader=leader.name if leader is not None else None,
            leader_address=self.leader,
            applied=self.brain.index,
            committed=self.brain.index,
            last=self.brain.index,
            time_ms=0,
            fsync=self.fsync,
            pid=os.getpid(),
            members=tuple(
                MemberDescribed(member.name, member.address, True, True, 0 if leads else None)
                for member in self.members
            ),
        )
        return Answer(Place(self.brain.index, -1, 0), described)


def _hashed(command: Command) -> Command:
    """As the node that proposes has it."""
    if isinstance(command, Produce | Stage):
        return replace(command, content_hash=content_hash(command.columns, command.body))
    if isinstance(command, Transaction):
        items = [
            replace(item, content_hash=content_hash(item.columns, item.body)) if isinstance(item, Produce) else item
            for item in command.items
        ]
        return Transaction(items=tuple(items))
    return command


def _send(connection: socket.socket, message: FromNode) -> None:
    header, body = codec.encode_message(message)
    with suppress(OSError):  # the client may have left
        connection.sendall(b"".join(write_frame(header, *body)))


def _end(connection: socket.socket) -> None:
    with suppress(OSError):  # it may be over already
        connection.shutdown(socket.SHUT_RDWR)
