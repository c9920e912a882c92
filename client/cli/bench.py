"""`holdfast bench apply`: what the rules cost on this machine, beside the floor that the store sets.

The works are in `holdfast.storage.bench`; this file gives them a clock, a directory and a fresh process, and prints.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

QUICK = 50  # how many times smaller the stores of --quick are

Figures = dict[str, Any]


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("bench", help="measure the state machine alone")
    kinds = parser.add_subparsers(metavar="WHAT", required=True)
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
    opened = kinds.add_parser("open", help="open a store of the bench once, and say what it took")
    opened.add_argument("directory", type=Path)
    opened.set_defaults(run=run, what="open")


def run(args: argparse.Namespace) -> int:
    if args.what == "open":
        print(json.dumps(open_here(args.directory)))
        return 0
    divisor = args.scale or (QUICK if args.quick else 1)
    show: Callable[[Figures], None] = (lambda figures: print(json.dumps(figures), flush=True)) if args.json else Table()
    clock = time.process_time_ns if args.cpu else time.perf_counter_ns
    return measure(args.only, divisor, clock, args.directory, show)


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
