"""`holdfast bench`: what a cluster does on this machine, and what the rules alone cost, beside what is wanted.

The works on a cluster are in `bench_works.py` and `bench_faults.py`, those of `apply`, the state machine alone, in
`holdfast.storage.bench`; this file reads the command line, gives them what they need, and prints.
"""

import argparse
import contextlib
import importlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from holdfast.client.cli.arguments import count, size_bytes
from holdfast.client.cli.output import progress
from holdfast.client.protocol.errors import Misuse

QUICK = 50  # how many times smaller the stores of --quick are

Figures = dict[str, Any]


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure a cluster, or the state machine alone",
        description="All but `apply` and `client` run on a cluster of their own, with fsync on, and remove it again.",
    )
    kinds = parser.add_subparsers(metavar="WORK", required=True)
    for name, (module, help, options) in WORKS.items():
        work = kinds.add_parser(name, help=help, description=f"{help[:1].upper()}{help[1:]}.")
        for flag, option in {**SHARED, **options}.items():
            work.add_argument(flag, **option)
        work.set_defaults(run=run, what=name, module=module)
    apply = kinds.add_parser(
        "apply",
        help="messages a second through produce, lease and ack, and how flat their cost is",
        description="Measures the fold over log entries on a real store, without fsync, on one core. The full works"
        " need about 10 GB of disk at a time and many minutes; --quick ones a fiftieth.",
    )
    apply.add_argument("--json", action="store_true", help="one object a work instead of tables")
    apply.add_argument("--quick", action="store_true", help=f"stores {QUICK} times smaller, and fewer rounds")
    apply.add_argument("--only", metavar="NAME", action="append", help="this work alone; may be given again")
    apply.add_argument(
        "--cpu", action="store_true", help="count processor time instead: for a machine that others use meanwhile"
    )
    apply.add_argument("--directory", type=Path, help="where the stores are made and removed (default: temporary)")
    apply.set_defaults(run=run, what="apply", scale=None)
    client = kinds.add_parser(
        "client",
        help="what the client itself costs, against a server that only counts",
        description="Processor time of the client alone, and how long its import takes. Needs no cluster.",
    )
    for flag in ("--seconds", "--payload", "--json"):
        client.add_argument(flag, **SHARED[flag])
    client.set_defaults(run=run, what="client")
    opened = kinds.add_parser("open", help="open a store of the bench once, and say what it took")
    opened.add_argument("directory", type=Path)
    opened.set_defaults(run=run, what="open")


def _several(text: str) -> list[int]:
    return [count(part) for part in text.split(",")]


SHARED: dict[str, dict[str, Any]] = {
    "--nodes": {"type": count, "default": 3, "metavar": "N", "help": "how many (default 3)"},
    "--seconds": {"type": float, "default": 5.0, "metavar": "S", "help": "of each measurement (default 5)"},
    "--payload": {"type": size_bytes, "default": 256, "metavar": "BYTES", "help": "of a message (default 256)"},
    "--directory": {"type": Path, "metavar": "DIR", "help": "where the data is made and removed (default: temporary)"},
    "--json": {"action": "store_true", "help": "one object for each line of figures"},
}
_REPEAT = {"--repeat": {"type": count, "default": 1, "metavar": "N", "help": "measure so often (default 1)"}}


def _in_flight(default: int) -> dict[str, Any]:
    return {"type": count, "default": default, "metavar": "N", "help": f"requests open at a time (default {default})"}


def _rounds(default: int) -> dict[str, Any]:
    return {"type": count, "default": default, "metavar": "N", "help": f"(default {default})"}


_BATCH = {"type": _several, "default": [100, 1_000], "metavar": "N,…", "help": "messages in a request (100,1000)"}

NEEDS_OTHERS = ("one_down", "failover", "heal")

# Name: the module that has it, what it measures, the flags beside those that all share.
WORKS: dict[str, tuple[str, str, dict[str, dict[str, Any]]]] = {
    "latency": ("bench_works", "one message at a time: until its confirm, and until a waiting consumer has it", {}),
    "produce_single": (
        "bench_works",
        "producers that each send one message and wait for it",
        {
            "--in-flight": _in_flight(16),
            "--connections": {"type": count, "metavar": "N", "help": "that share these (default: one for each)"},
            **_REPEAT,
        },
    ),
    "produce_batch": (
        "bench_works",
        "one producer of whole batches",
        {"--batch": _BATCH, "--in-flight": _in_flight(4), **_REPEAT},
    ),
    "consume_ack": (
        "bench_works",
        "one consumer of a full queue: lease, ack, and again",
        {
            "--batch": _BATCH,
            "--in-flight": _in_flight(1),
            "--messages": {"type": count, "default": 300_000, "metavar": "N", "help": "before it begins (300000)"},
        },
    ),
    "mixed": (
        "bench_works",
        "producers and consumers at the same time",
        {
            "--in-flight": _in_flight(16),
            "--consumers": {"type": count, "default": 4, "metavar": "N", "help": "that lease and ack (default 4)"},
            **_REPEAT,
        },
    ),
    "one_down": (
        "bench_works",
        "producers without one follower, as a ratio to the whole cluster",
        {"--in-flight": _in_flight(16), "--rounds": _rounds(3)},
    ),
    "failover": (
        "bench_faults",
        "the leader goes under load: how long it is silent, and what was lost",
        {
            "--rounds": _rounds(20),
            "--how": {
                "choices": ("kill", "stop", "transfer"),
                "default": "kill",
                "help": "kill -9 (default), SIGSTOP, or a planned end that hands leadership over",
            },
        },
    ),
    "heal": (
        "bench_faults",
        "a cut-off leader with entries that nobody else has: until it is level again",
        {
            "--entries": {"type": count, "default": 10_000, "metavar": "N", "help": "of 1 KiB (default 10000)"},
            "--rounds": _rounds(1),
        },
    ),
    "backlog": (
        "bench_faults",
        "memory, restart and cost of a request beside many waiting messages",
        {
            "--messages": {"type": _several, "default": [1_000, 1_000_000], "metavar": "N,…", "help": "(1000,1000000)"},
            "--full": {"action": "store_true", "help": "ten million as well; needs about 25 GB of disk"},
        },
    ),
}


def run(args: argparse.Namespace) -> int:
    if args.what in WORKS:
        return _run_on_cluster(args)
    if args.what == "client":
        from holdfast.client.cli import bench_client

        for figures in bench_client.run(args):
            _print({"work": "client", **figures}, as_json=args.json)
        return 0
    if args.what == "open":
        print(json.dumps(open_here(args.directory)))
        return 0
    divisor = args.scale or (QUICK if args.quick else 1)
    show: Callable[[Figures], None] = (lambda figures: print(json.dumps(figures), flush=True)) if args.json else Table()
    clock = time.process_time_ns if args.cpu else time.perf_counter_ns
    from holdfast.cluster.allocator import keep_freed_memory

    keep_freed_memory()  # as a node does
    return measure(args.only, divisor, clock, args.directory, show)


def _run_on_cluster(args: argparse.Namespace) -> int:
    """One work on a cluster of its own; SIGTERM ends it as Ctrl-C does, so that no node is left behind."""
    from holdfast.client.cli.bench_load import STAMP

    if args.payload < STAMP.size:
        raise Misuse(f"--payload is {args.payload}; at least {STAMP.size} bytes are needed, which say who sent it when")
    if args.nodes == 1 and args.what in NEEDS_OTHERS:
        raise Misuse(f"{args.what} needs at least 3 nodes")
    if getattr(args, "full", False):
        args.messages = [*args.messages, 10_000_000]
    work: Callable[[argparse.Namespace], Iterator[Figures]] = getattr(
        importlib.import_module(f"holdfast.client.cli.{args.module}"), args.what
    )
    with _ended_by(signal.SIGTERM):
        for figures in _watched(work(args), f"bench {args.what}"):
            _print({"work": args.what, "nodes": args.nodes, **figures}, as_json=args.json)
    return 0


def _print(figures: Figures, *, as_json: bool) -> None:
    print(json.dumps(figures), flush=True) if as_json else print_figures(figures)


def _watched(found: Iterator[Figures], label: str) -> Iterator[Figures]:
    """The same figures; while each of them is measured, by other processes, whoever looks on sees that it goes on."""
    while True:
        with progress(label):
            figures = next(found, None)
        if figures is None:
            return
        yield figures


@contextlib.contextmanager
def _ended_by(number: signal.Signals) -> Iterator[None]:
    former = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(number, former)


def print_figures(figures: Figures) -> None:
    """One figure a line, and what is wanted beside it."""
    wanted = figures["wanted"]
    for name, value in figures.items():
        if name != "wanted":
            beside = f"   wanted {_bound(name, wanted[name])}" if name in wanted else ""
            shown = f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else value
            print(f"{name:<24} {shown!s:>14}{beside}")
    print(flush=True)


def _bound(name: str, number: float) -> str:
    """Rates and ratios are to be reached, all else is not to be passed."""
    return f"{'>=' if name in ('messages_per_s', 'messages_per_cpu_s', 'ratio') else '<='} {number:,}"


def measure(
    only: list[str] | None,
    divisor: int,
    clock: Callable[[], int],
    directory: Path | None,
    show: Callable[[Figures], None],
) -> int:
    """Run the works, each in a directory of its own that is removed behind it; 2 for a name that is none."""
    from holdfast.storage.bench import Scale, works

    chosen = works(open_elsewhere)
    names = [work.name for work in chosen]
    for name in only or ():
        if name not in names:
            print(f"holdfast: there is no work {name!r}; these are: {', '.join(names)}", file=sys.stderr)
            return 2
    for work in chosen:
        if only and work.name not in only:
            continue
        with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=directory) as place:
            figures = work.run(Path(place), clock, Scale(divisor))
        show({"work": work.name, "title": work.title, "scale": divisor, **figures, "wanted": work.wanted})
    return 0


def open_here(directory: Path) -> Figures:
    """Open the store in this process and say how long it took and how much memory the process has used."""
    from holdfast.storage.bench import open_once

    return {**open_once(directory, time.perf_counter_ns), "resident_bytes": resident_bytes()}


def open_elsewhere(directory: Path) -> Figures:
    """The same in a process that has done nothing else."""
    call = (
        f"import sys; from holdfast.client.cli.main import main; sys.exit(main(['bench', 'open', {str(directory)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=True)
    found: Figures = json.loads(done.stdout)
    return found


def resident_bytes() -> int:
    """The most memory that this process ever had resident."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Table:
    """The figures as lines for people; a heading whenever another kind of work begins."""

    def __init__(self) -> None:
        self._kind = ""

    def __call__(self, figures: Figures) -> None:
        title, wanted = figures["title"], figures["wanted"]
        if "messages_per_s" in figures:
            took = figures["us_per_command"]
            self._line(
                "whole life",
                title,
                {
                    "messages/s": f"{figures['messages_per_s']:,}",
                    "wanted": f"{wanted['messages_per_s']:,}",
                    "floor": f"{figures['floor_messages_per_s']:,}",
                    "of it": f"{figures['of_floor']:.3f}",
                    "wanted ": f"{wanted['of_floor']:.2f}",
                    "plain floor": f"{figures['plain_floor_messages_per_s']:,}",
                    "of it ": f"{figures['of_plain_floor']:.3f}",
                    "deliver/s": f"{figures['deliver_messages_per_s']:,}",
                    "hash/s": f"{figures['hash_messages_per_s']:,}",
                    "produce µs": f"{took['produce']:.1f}",
                    "lease µs": f"{took['lease']:.1f}",
                    "ack µs": f"{took['ack']:.1f}",
                },
            )
        elif "ratio" in figures:
            self._line(
                "flat cost, beside",
                f"{_amount(figures)} {title}",
                {
                    "ratio": f"{figures['ratio']:.2f}",
                    "wanted": f"{wanted['ratio']:.1f}",
                    "empty µs": f"{figures['empty_us']:.1f}",
                    "loaded µs": f"{figures['loaded_us']:.1f}",
                    "filling s": f"{figures['fill_s']:.1f}",
                    "file MB": f"{figures['file_bytes'] / 1e6:,.0f}",
                    "used MB": f"{figures['used_bytes'] / 1e6:,.0f}",
                },
            )
        else:
            self._line(
                "opening",
                f"{figures['waiting']:,} {title}",
                {
                    "seconds": f"{figures['open_s']:.3f}",
                    "wanted": f"{wanted['open_s']:.1f}",
                    "resident MB": f"{figures['resident_bytes'] / 1e6:.1f}",
                    "wanted ": f"{wanted['resident_bytes'] / 1e6:.0f}",
                    "file MB": f"{figures['file_bytes'] / 1e6:,.0f}",
                },
            )

    def _line(self, kind: str, title: str, cells: dict[str, str]) -> None:
        if kind != self._kind:
            print(("\n" if self._kind else "") + f"{kind:<46}" + "".join(f"{name.strip():>12}" for name in cells))
            self._kind = kind
        print(f"{title:<46}" + "".join(f"{cell:>12}" for cell in cells.values()), flush=True)


def _amount(figures: Figures) -> str:
    for name in ("open_leases", "holes", "delayed", "waiting"):
        if name in figures:
            return f"{figures[name]:,}"
    return ""
