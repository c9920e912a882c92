"""`holdfast top`: a live screen of nodes, queues, groups and rates, until q or Ctrl-C.

Two threads ask, one the nodes, one their leader; the screen draws what they last heard and how long ago that was. So it
goes on, and can be left, while there is no leader or no node.
"""

import argparse
import os
import select
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from holdfast.client.cli import looks
from holdfast.client.cli.arguments import WrongUsage, add_verb, connected, duration_ms
from holdfast.client.cli.output import (
    cells_of,
    flush,
    is_terminal,
    numbers_of,
    print_line,
    print_object,
    print_table,
    printable,
)
from holdfast.client.cli.stopping import ended_gently
from holdfast.client.protocol.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.client.cli.arguments import Subparsers
    from holdfast.client.status import ClusterStatus

T = TypeVar("T")

OLD = 3  # after so many intervals without news they are called old
DRAW_S = 0.5  # at least so often: how old the news are changes too
NODES_MAX = 20  # rows of nodes; a cluster has fewer


def add_parser(subparsers: "Subparsers") -> None:
    parser = add_verb(subparsers, "top", run, "watch nodes, queues, groups and rates, until q or Ctrl-C")
    parser.add_argument("queues", metavar="QUEUE", nargs="*", help="these only (default: all)")
    parser.add_argument("--interval", metavar="TIME", type=duration_ms, default=1_000, help="between looks (1s)")
    parser.add_argument("--once", action="store_true", help="look twice, an interval apart, print that and end")


def run(args: argparse.Namespace) -> int:
    if args.interval < 1:
        raise WrongUsage("--interval must be above 0", usage="holdfast top [--interval TIME]")
    try:
        if args.json:
            _print_objects(args)
        elif args.once or not is_terminal(sys.stdout):
            _print_once(args)
        else:
            _draw(args)
    except KeyboardInterrupt:
        if args.once:
            raise
    return 0


# For scripts -------------------------------------------------------------------------------------------


def _print_objects(args: argparse.Namespace) -> None:
    """An object a look, until Ctrl-C; with --once the one that has rates."""
    with connected(args) as client:
        before = None if not args.once else looks.look_at_groups(client, args.queues)
        while True:
            if before is not None:
                time.sleep(args.interval / 1_000)
            now = looks.look_at_groups(client, args.queues)
            print_object(looks.as_json(client.status(), before, now))
            flush()
            if args.once:
                return
            before = now


def _print_once(args: argparse.Namespace) -> None:
    with connected(args) as client:
        before = looks.look_at_groups(client, args.queues)
        time.sleep(args.interval / 1_000)
        now = looks.look_at_groups(client, args.queues)
        status = client.status()
    print_line(looks.title(status))
    print_table(looks.NODE_HEAD, looks.node_rows(status))
    print_line("")
    print_table(looks.GROUP_HEAD, looks.group_rows(before, now))
    if now.left_out:
        print_line(f"and {now.left_out} more; name the queues to see")


# For people --------------------------------------------------------------------------------------------


class _Watcher(Generic[T]):
    """Asks again and again in a thread of its own. `last` and `before` are what it heard, `problem` why no more."""

    def __init__(self, ask: Callable[[], T], interval_s: float, news: Event) -> None:
        self.last: T | None = None
        self.before: T | None = None
        self.at_s: float | None = None
        self.problem: str | None = None
        self._ask, self._interval_s, self._news = ask, interval_s, news
        self._over = Event()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()

    def age_s(self, now_s: float) -> float | None:
        return None if self.at_s is None else now_s - self.at_s

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                heard = self._ask()
                self.before, self.last, self.at_s, self.problem = self.last, heard, time.monotonic(), None
            except HoldfastError as error:
                self.problem = error.message
            self._news.set()
            self._over.wait(self._interval_s)


def _draw(args: argparse.Namespace) -> None:
    from holdfast.client.cli import screen

    interval_s = args.interval / 1_000
    with connected(args) as client, ended_gently(), _keys() as pressed, screen.live() as draw:
        news = Event()
        nodes: _Watcher[ClusterStatus] = _Watcher(client.status, interval_s, news)
        groups = _Watcher(lambda: looks.look_at_groups(client, args.queues), interval_s, news)
        try:
            while True:
                draw(_parts(nodes, groups, interval_s))
                until_s = time.monotonic() + DRAW_S
                news.clear()
                while not news.is_set() and time.monotonic() < until_s:
                    if pressed(0.05) in ("q", "Q"):
                        return
        finally:
            nodes.stop()
            groups.stop()


def _parts(nodes: "_Watcher[ClusterStatus]", groups: "_Watcher[looks.Groups]", interval_s: float) -> list[Any]:
    """The screen from top to bottom, as many rows as it has."""
    from holdfast.client.cli import screen

    now_s = time.monotonic()
    left = shutil.get_terminal_size().lines - 2
    parts: list[Any] = []
    status = nodes.last
    parts.append(screen.line(printable(looks.title(status)) if status is not None else "looking …", screen.HEAD))
    parts.append(screen.line("q ends", "dim"))
    if status is not None:
        rows = looks.node_rows(status)[:NODES_MAX]
        parts.append(screen.table(looks.NODE_HEAD, cells_of(rows), numbers_of(looks.NODE_HEAD, rows)))
        left -= len(rows) + 3
    for what, watcher in (("nodes", nodes), ("queues", groups)):
        told = _trouble(what, watcher, now_s, interval_s)
        if told is not None:
            parts.append(screen.line(printable(told), screen.ERROR))
            left -= 1
    if groups.last is not None:
        rows = looks.group_rows(groups.before, groups.last)
        more = len(rows) + groups.last.left_out - max(left - 4, 1)
        shown = rows[: max(left - 4, 1)]
        parts.append(screen.table(looks.GROUP_HEAD, cells_of(shown), numbers_of(looks.GROUP_HEAD, shown)))
        if more > 0:
            parts.append(screen.line(f"and {more} more", "dim"))
    return parts


def _trouble(what: str, watcher: "_Watcher[Any]", now_s: float, interval_s: float) -> str | None:
    """What a person should know of news that are old, or that never came."""
    age_s = watcher.age_s(now_s)
    if watcher.problem is not None:
        since = f" for {age_s:.0f} s" if age_s is not None else ""
        return f"no news of the {what}{since}: {watcher.problem}"
    if age_s is not None and age_s > max(OLD * interval_s, OLD):
        return f"no news of the {what} for {age_s:.0f} s"
    return None


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """`pressed(seconds)` gives the next key, or nothing within this time. Without a terminal to type at, only waits."""
    if not sys.stdin.isatty():

        def wait(seconds: float) -> str:
            time.sleep(seconds)
            return ""

        yield wait
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    former = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)  # keys come at once, and are not shown; Ctrl-C stays Ctrl-C

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        return os.read(descriptor, 1).decode(errors="replace") if ready else ""

    try:
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, former)
