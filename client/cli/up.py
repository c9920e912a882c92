"""`holdfast up`: a local cluster in the foreground, each node a process of its own; Ctrl-C stops it.

It restarts no node by itself: what was killed stays dead until somebody starts it, as on real machines.
"""

import argparse
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final, NoReturn

from holdfast.client.cli.arguments import count
from holdfast.client.protocol.errors import Misuse

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

HOST: Final = "127.0.0.1"
STOP_S: Final = 10.0  # for one node to hand over and close; then it is killed
NODES_MAX: Final = 9


def add_parser(subparsers: "Subparsers") -> None:
    parser = subparsers.add_parser(
        "up",
        help="run a local cluster",
        description=(
            "Runs a cluster on this machine until Ctrl-C. Clients connect to 127.0.0.1, base port + 1, + 2 and so on; "
            "pages for operators are at + 11 …, nodes meet at + 21 …"
        ),
    )
    parser.add_argument("--nodes", type=count, default=3, metavar="N", help="how many (default 3)")
    parser.add_argument(
        "--data", type=Path, default=Path("holdfast-data"), metavar="DIR", help="(default holdfast-data)"
    )
    parser.add_argument("--base-port", type=count, default=7400, metavar="PORT", help="(default 7400)")
    parser.add_argument("--demo", action="store_true", help="show live what it does, then go on serving")
    parser.set_defaults(run=run)


@dataclass(frozen=True, slots=True)
class Plan:
    """Which nodes, where."""

    nodes: int
    data: Path
    base_port: int

    @property
    def names(self) -> list[str]:
        return [f"n{number}" for number in range(1, self.nodes + 1)]

    @property
    def connect(self) -> str:
        return ",".join(f"{HOST}:{self.base_port + number}" for number in range(1, self.nodes + 1))

    def command(self, name: str) -> list[str]:
        """The whole command line of one node."""
        number = self.names.index(name) + 1
        peers = ",".join(f"{other}={HOST}:{self.base_port + 20 + at}" for at, other in enumerate(self.names, start=1))
        shared = ["--peers", peers, "--secret-file", str(self.data / "secret")] if self.nodes > 1 else []
        return [
            *(sys.executable, "-m", "holdfast.client.cli", "serve", "--node", name),
            *("--data", str(self.data / name)),
            *("--listen", f"{HOST}:{self.base_port + number}"),
            *("--http", f"{HOST}:{self.base_port + 10 + number}"),
            *("--peer-listen", f"{HOST}:{self.base_port + 20 + number}"),
            *shared,
        ]


class Cluster:
    """The processes of a plan. Context manager: whatever happens, none of them is left behind."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Cluster":
        self.plan.data.mkdir(parents=True, exist_ok=True)
        _make_secret(self.plan.data / "secret")
        for name in self.plan.names:
            self.start(name)
        return self

    def __exit__(self, *_: object) -> None:
        """Ask all of them to stop, the ones that lead hand over; then end those that do not."""
        for process in self._running.values():
            process.terminate()
        until_s = time.monotonic() + STOP_S
        for process in self._running.values():
            try:
                process.wait(max(until_s - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def start(self, name: str) -> None:
        """Its log goes to a file beside its data; in a session of its own, so that Ctrl-C is ours to hand on."""
        with (self.plan.data / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                self.plan.command(name), stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def pid(self, name: str) -> int:
        return self._running[name].pid

    def kill(self, name: str) -> None:
        """kill -9."""
        self._running[name].kill()
        self._running[name].wait()

    def dead(self) -> dict[str, int]:
        """Nodes that have ended, with their exit codes."""
        found = {name: process.poll() for name, process in self._running.items()}
        return {name: code for name, code in found.items() if code is not None}


def run(args: argparse.Namespace) -> int:
    if not 1 <= args.nodes <= NODES_MAX:
        raise Misuse(f"--nodes is {args.nodes}; 1 to {NODES_MAX} is allowed")
    plan = Plan(args.nodes, args.data, args.base_port)
    with contextlib.suppress(KeyboardInterrupt), _interruptible(), Cluster(plan) as cluster:
        try:
            _announce(plan, cluster)
            if args.demo:
                from holdfast.client.cli.live import show

                show(cluster)
            _watch(plan, cluster)
        except KeyboardInterrupt:
            print("\nstopping the nodes", flush=True)
    print("stopped", flush=True)
    return 0


def _announce(plan: Plan, cluster: Cluster) -> None:
    print(f"{plan.nodes} nodes, data in {plan.data}", flush=True)
    for number, name in enumerate(plan.names, start=1):
        http = f"http://{HOST}:{plan.base_port + 10 + number}/status"
        print(f"  {name}  pid {cluster.pid(name):<8} clients {HOST}:{plan.base_port + number}  {http}")
    print(f"connect with HOLDFAST_CONNECT={plan.connect}; Ctrl-C stops all", flush=True)


def _watch(plan: Plan, cluster: Cluster) -> None:
    """Until interrupted, or until no node is left: a death is told once."""
    told: set[str] = set()
    while True:
        dead = cluster.dead()
        for name in dead.keys() - told:
            log = plan.data / f"{name}.log"
            print(f"{name} has ended with {dead[name]}; {log} says why. It is not restarted", flush=True)
        told |= dead.keys()
        if len(dead) == plan.nodes:
            raise Misuse(f"all nodes have ended; see {plan.data}/*.log")
        time.sleep(0.2)


def _make_secret(path: Path) -> None:
    if not path.exists():
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM as Ctrl-C, and both also where the shell that started us in the background has them ignored."""

    def interrupt(_: int, __: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    former = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
