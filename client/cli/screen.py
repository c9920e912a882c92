"""What a terminal is given beyond lines: tables with colours, progress bars, a screen that is drawn anew.

The only importer of rich, and imported only where a person looks: scripts never pay for it. All text that comes here
has been made printable before, and is never read as markup.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

# Words that are worth a colour wherever they fill a cell.
STYLES = {
    "leader": "bold green",
    "candidate": "yellow",
    "learner": "cyan",
    "down": "bold red",
    "max_attempts": "red",
    "rejected": "red",
    "expired": "yellow",
}
HEAD, NAME, ERROR = "bold", "cyan", "bold red"


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[bool]) -> None:
    _console().print(table(head, rows, numbers))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[bool]) -> RenderableType:
    """Columns of `numbers` stand to the right."""
    made = Table(box=box.SIMPLE_HEAD, header_style=HEAD, pad_edge=False, show_edge=False)
    for name, number in zip(head, numbers, strict=True):
        made.add_column(Text(name), justify="right" if number else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    return made


def print_facts(names: Sequence[str], cells: Sequence[str]) -> None:
    made = Table.grid(padding=(0, 2))
    for name, cell in zip(names, cells, strict=True):
        made.add_row(Text(name, style=NAME), Text(cell, style=STYLES.get(cell, ""), overflow="fold"))
    _console().print(made)


def print_error(line: str) -> None:
    """On standard error, with who says it in red."""
    who, colon, what = line.partition(": ")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text.assemble((who + colon, ERROR), what))


@contextmanager
def progress(label: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on standard error while the block runs; `update(done)` moves it. Without a total it only shows the time."""
    columns: list[Any] = [TextColumn("{task.description}", markup=False)]
    if total is not None:
        columns += [BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    columns.append(TimeElapsedColumn())
    console = Console(stderr=True)
    # Drawn twice a second: what runs beside it may be a measurement.
    # What is printed meanwhile stays where it goes: standard output may be a file.
    shown = Progress(
        *columns, console=console, transient=True, refresh_per_second=2, redirect_stdout=False, redirect_stderr=False
    )
    with shown as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def live() -> Iterator[Callable[[Sequence[RenderableType]], None]]:
    """The whole terminal, as long as the block runs; `draw(parts)` puts these below each other."""
    with Live(Text(""), console=_console(), screen=True, auto_refresh=False) as shown:
        yield lambda parts: shown.update(Group(*parts), refresh=True)


def line(text: str, style: str = "") -> RenderableType:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _console() -> Console:
    return Console(file=sys.stdout, highlight=False)
