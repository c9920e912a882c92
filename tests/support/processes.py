"""A real cluster for tests: processes of `holdfast serve` on loopback, killed, stopped and started by their ids.

Nothing sleeps to wait for a result: `until` asks again and again for what is wanted, with a generous bound.
"""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom
from typing import Any, Self, TypeVar

from holdfast.client.blocking import Client
from holdfast.client.cli.up import Cluster, Plan
from holdfast.client.protocol import codec
from holdfast.client.protocol.commands import Command, OpenSession
from holdfast.client.protocol.errors import HoldfastError
from holdfast.client.protocol.frames import FrameReader, write_frame
from holdfast.client.protocol.messages import Answered, Declined, FromClient, FromNode, Hello, Inquiry, Request, Welcome
from holdfast.client.protocol.queries import AnyQuery
from holdfast.client.protocol.replies import Answer, Failed
from holdfast.client.protocol.values import NO_SESSION, SessionId

T = TypeVar("T")

WAIT_S = 60.0  # for anything that must come to pass; a healthy cluster needs a hundredth of it
SUPPORT = Path(__file__).parent


def until(wanted: Callable[[], T | None], what: str, within_s: float = WAIT_S) -> T:
    """The first answer that is not None or False; a HoldfastError counts as not yet."""
    end_s = time.monotonic() + within_s
    last: HoldfastError | None = None
    while time.monotonic() < end_s:
        try:
            found = wanted()
        except HoldfastError as error:
            last, found = error, None
        if found:
            return found
        time.sleep(0.03)  # between two looks, not for a result
    raise AssertionError(f"not within {within_s} s: {what} (last: {last!r})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How the nodes of a cluster are started, beside their plan."""

    flags: Mapping[str, str] = field(default_factory=dict)  # further ones of `serve`; {name} is the node's
    environment: Mapping[str, str] = field(default_factory=dict)
    traced: str | None = None  # system calls that strace writes down, beside each node's log
    injected: str | None = None  # what strace lets happen to them, in its words
    wall_clocks: bool = False  # each node has a wall clock that `set_clock` moves
    files: int | None = None  # that each node may have open at most; it starts with half of them
    snapshot_log_bytes: int | None = None  # take snapshots after so much log, and keep no log behind them

    def command(self, plan: Plan, name: str) -> list[str]:
        flags = (f"--{flag.replace('_', '-')}={value.format(name=name)}" for flag, value in self.flags.items())
        command = [*plan.command(name), *flags]
        seams: list[str] = []
        if self.wall_clocks:
            seams += ["--wall-offset-file", str(plan.data / f"{name}.clock")]
        if self.snapshot_log_bytes is not None:
            seams += ["--snapshot-log-bytes", str(self.snapshot_log_bytes)]
        if seams:
            command = [sys.executable, str(SUPPORT / "serve_node.py"), *seams, *command[command.index("serve") :]]
        if self.traced is not None:
            # -D: the tracer stands aside, so that the process that we signal and wait for is the node itself.
            trace = str(plan.data / f"{name}.trace")
            injected = () if self.injected is None else ("-e", f"inject={self.injected}")
            command = ["strace", "-D", "-f", "-q", "-A", "-o", trace, "-e", f"trace={self.traced}", *injected, *command]
        if self.files is not None:
            limited = f'ulimit -Sn {self.files // 2}; ulimit -Hn {self.files}; exec "$@"'
            command = ["bash", "-c", limited, "node", *command]
        return command


class Processes(Cluster):
    """`holdfast up` without its foreground: the same processes, with what a test does to them."""

    def __init__(self, plan: Plan, setup: Setup) -> None:
        super().__init__(plan)
        self._setup = setup

    def __enter__(self) -> "Processes":
        self.plan.data.mkdir(parents=True, exist_ok=True)
        if self._setup.wall_clocks:
            for name in self.plan.names:
                self.set_clock(name, 0)
        super().__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():  # a stopped process hears no SIGTERM
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
        super().__exit__()

    # Asking

    def client(self, **arguments: Any) -> Client:
        return Client(self.plan.connect, **arguments)

    def wire(self, name: str) -> "Wire":
        return Wire(self.address(name))

    def address(self, name: str) -> str:
        return self.plan.connect.split(",")[self.plan.names.index(name)]

    def leader(self, within_s: float = WAIT_S, among: Sequence[str] = ()) -> str:
        """Who leads, by a majority's word: the one that says so itself and is followed; one of `among` if given."""
        with self.client(timeout_ms=5_000) as client:

            def found() -> str | None:
                status = client.status()
                leading = {node.name for node in status.nodes if node.role == "leader"}
                led = status.leader in leading and (not among or status.leader in among)
                return status.leader if led else None

            return until(found, f"a leader among {among or self.plan.names}", within_s)

    def followers(self) -> list[str]:
        leader = self.leader()
        return [name for name in self.plan.names if name != leader]

    def others(self, *names: str) -> list[str]:
        return [name for name in self.plan.names if name not in names]

    def whole(self, within_s: float = WAIT_S) -> int:
        """All nodes are up, follow one leader and have applied the same; the index."""
        with self.client(timeout_ms=5_000) as client:

            def found() -> int | None:
                status = client.status()
                roles = sorted(node.role for node in status.nodes)
                applied = {node.applied for node in status.nodes}
                led = roles == ["follower"] * (self.plan.nodes - 1) + ["leader"]
                return applied.pop() if led and len(applied) == 1 else None

            return until(found, "all nodes level", within_s)

    def formed(self, within_s: float = WAIT_S) -> None:
        """All nodes are up, follow one leader and are connected to each other, however far each is."""
        with self.client(timeout_ms=5_000) as client:
            wanted = ["follower"] * (self.plan.nodes - 1) + ["leader"]

            def found() -> bool:
                if sorted(node.role for node in client.status().nodes) != wanted:
                    return False
                members = [member for name in self.plan.names for member in self.status_of(name)["members"]]
                return all(member["connected"] for member in members)

            until(found, "all nodes up", within_s)

    def page(self, name: str, path: str) -> tuple[int, str]:
        """One page over HTTP: its code and its text."""
        port = self.plan.base_port + 10 + self.plan.names.index(name) + 1
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def status_of(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.page(name, "/status")[1])
        return found

    def log_of(self, name: str) -> str:
        return (self.plan.data / f"{name}.log").read_text()

    def trace_of(self, name: str) -> list[str]:
        return (self.plan.data / f"{name}.trace").read_text().splitlines()

    # Doing

    def start(self, name: str) -> None:
        with (self.plan.data / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                self._setup.command(self.plan, name),
                env={**os.environ, **self._setup.environment},
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def kill_all(self) -> None:
        """kill -9 of every node before any of them is waited for."""
        for process in self._running.values():
            process.kill()
        for process in self._running.values():
            process.wait()

    def start_all(self) -> None:
        for name in self.plan.names:
            self.start(name)

    def pause(self, name: str) -> None:
        os.kill(self.pid(name), signal.SIGSTOP)

    def resume(self, name: str) -> None:
        os.kill(self.pid(name), signal.SIGCONT)

    def stop(self, name: str, within_s: float = WAIT_S) -> int:
        """SIGTERM, and its exit code."""
        process = self._running[name]
        process.terminate()
        return process.wait(within_s)

    def ended(self, name: str, within_s: float = WAIT_S) -> int:
        """The exit code of a node that ends by itself."""
        return self._running[name].wait(within_s)

    def let_lead(self, name: str) -> None:
        """Make this one of three lead: of the other two one falls behind, then the other is away. All are up then."""
        behind, ahead = self.others(name)
        self.kill(behind)
        with self.client() as client:
            client.create_queue(f"what-{behind}-lacks")
        until(lambda: self.status_of(name)["last"] == self.status_of(ahead)["last"], f"{name} has the whole log")
        self.kill(ahead)
        self.start(behind)
        self.leader(among=[name])
        self.start(ahead)
        self.whole()

    def set_clock(self, name: str, offset_ms: int) -> None:
        """Move a node's wall clock; in one step, for it reads the file at any time."""
        file = self.plan.data / f"{name}.clock"
        partial = file.with_suffix(".new")
        partial.write_text(str(offset_ms))
        partial.rename(file)


@contextmanager
def cluster(folder: Path, nodes: int = 3, **setup: Any) -> Iterator[Processes]:
    """A cluster of its own on ports of its own. `setup` is that of `Setup`."""
    with Processes(Plan(nodes, folder, free_base(nodes)), Setup(**setup)) as processes:
        yield processes


class Wire:
    """One connection to one node, without a client's mind: what this node says, and nobody else is asked."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=WAIT_S)
        self._reader = FrameReader()
        self._came: list[FromNode] = []
        self._next_id = 1
        self.send(Hello())
        assert isinstance(self.receive(), Welcome)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, *messages: FromClient) -> None:
        """All of them in one write, and nothing is waited for."""
        frames = [codec.encode_message(message) for message in messages]
        self._socket.sendall(b"".join(bytes(part) for header, body in frames for part in write_frame(header, *body)))

    def receive(self) -> FromNode:
        """The next frame, in the order in which they came."""
        while not self._came:
            data = self._socket.recv(262_144)
            if not data:
                raise ConnectionResetError("the node closed the connection")
            self._came += [codec.decode_from_node(frame.header, frame.body) for frame in self._reader.feed(data)]
        return self._came.pop(0)

    def request(self, command: Command, session: SessionId = NO_SESSION, seq: int = 0, done_below: int = 0) -> Request:
        """A request with an id of its own on this connection, not sent yet."""
        self._next_id += 1
        return Request(
            request_id=self._next_id, command=command, session=session, request_seq=seq, done_below=done_below
        )

    def inquiry(self, query: AnyQuery, stale: bool = False, min_index: int = 0) -> Inquiry:
        self._next_id += 1
        return Inquiry(request_id=self._next_id, query=query, stale=stale, min_index=min_index)

    def outcomes(self, asked: Sequence[Request | Inquiry]) -> list[Answer | HoldfastError]:
        """What becomes of these, in their order; refusals of the fold and of the node alike are errors."""
        found: dict[int, Answer | HoldfastError] = {}
        while len(found) < len(asked):
            match self.receive():
                case Answered(request_id=request_id, answer=answer):
                    found[request_id] = answer.reply.error if isinstance(answer.reply, Failed) else answer
                case Declined(request_id=request_id, error=error):
                    found[request_id] = error
        return [found[each.request_id] for each in asked]

    def ask(self, asked: Request | Inquiry) -> Answer:
        """Its answer; raises what it is refused with."""
        self.send(asked)
        [outcome] = self.outcomes([asked])
        if isinstance(outcome, HoldfastError):
            raise outcome
        return outcome

    def open_session(self, session: SessionId) -> None:
        self.ask(self.request(OpenSession(), session))


def free_base(nodes: int) -> int:
    """A base port whose ports for clients, pages and peers are all free now.

    Below those that the system gives to outgoing connections: one of these could take a port while its node is down.
    """
    chosen = SystemRandom()
    for _ in range(100):
        base = chosen.randrange(10_000, 32_000)
        try:
            for offset in (0, 10, 20):
                for number in range(1, nodes + 1):
                    socket.create_server(("127.0.0.1", base + offset + number)).close()
        except OSError:
            continue
        return base
    raise AssertionError("no free ports on loopback")
