"""What the commands print: lines and tables for people, one object a line for programs.

A terminal gets colours and, while something takes long, a bar; a pipe or a file gets the same words without them.

Whatever came from elsewhere (payloads, keys, errors, names) is escaped before a person sees it: a message must not
be able to move the cursor or recolour the terminal of who looks at it.
"""

import base64
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO

from holdfast.client.protocol.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.client.message import Delivered

CELL_CHARACTERS = 60  # of a payload or an error in a table; `show` and `--json` have all of it


def print_object(value: Mapping[str, Any]) -> None:
    """One object of --json on its own line."""
    print(json.dumps(value))


def print_line(text: str) -> None:
    print(printable(text))


def flush() -> None:
    """What was printed is out: whoever reads it may have it, or is gone, which raises BrokenPipeError."""
    sys.stdout.flush()


def is_terminal(stream: TextIO) -> bool:
    """Whether a person looks at it, on something that can draw."""
    return stream.isatty() and os.environ.get("TERM") not in (None, "", "dumb")


def print_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Columns as wide as their widest cell; a missing value is a dash."""
    found = [list(row) for row in rows]
    cells = cells_of(found)
    if is_terminal(sys.stdout):
        from holdfast.client.cli import screen

        screen.print_table(head, cells, numbers_of(head, found))
        return
    cells.insert(0, list(head))
    widths = [max(len(row[at]) for row in cells) for at in range(len(head))]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def cells_of(rows: Iterable[Sequence[object]]) -> list[list[str]]:
    """As they may be shown: escaped, and a dash for what is missing."""
    return [[_cell(value) for value in row] for row in rows]


def numbers_of(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[bool]:
    """Which columns hold numbers and nothing else."""
    kinds = [{type(row[at]) for row in rows} - {type(None)} for at in range(len(head))]
    return [bool(kind) and kind <= {int, float} for kind in kinds]


def print_facts(facts: Mapping[str, object]) -> None:
    """Names and values below each other; times are shown as people write them."""
    cells = [_cell(shown(name, value)) for name, value in facts.items()]
    if is_terminal(sys.stdout):
        from holdfast.client.cli import screen

        screen.print_facts([printable(name) for name in facts], cells)
        return
    width = max(map(len, facts), default=0)
    for name, cell in zip(facts, cells, strict=True):
        print(f"{printable(name):<{width}}  {cell}")


def print_error(error: HoldfastError, as_json: bool) -> None:
    """On standard output with --json, where a program reads; else where people look for it."""
    if as_json:
        facts = {name: value for name, value in error.facts.items() if name not in ("error", "message")}
        print_object({"error": type(error).__name__, "message": error.message, **facts, "happened": error.happened})
    else:
        note(error.message)


def note(message: str) -> None:
    """To whoever looks on, beside the output."""
    for line in f"holdfast: {message}".splitlines():
        if is_terminal(sys.stderr):
            from holdfast.client.cli import screen

            screen.print_error(printable(line))
        else:
            print(printable(line), file=sys.stderr)


@contextmanager
def progress(label: str, total: Callable[[], int] | None = None) -> Iterator[Callable[[int], None]]:
    """A bar for who looks on while the block runs; `update(done)` moves it. The total is asked for only then."""
    if not is_terminal(sys.stderr):
        yield lambda done: None
        return
    from holdfast.client.cli import screen

    with screen.progress(printable(label), None if total is None else total()) as update:
        yield update


def printable(text: str) -> str:
    """The text with everything escaped that is no visible character: controls, bidirectional marks, surrogates."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def payload_text(payload: bytes) -> str:
    """A payload for people: bytes that are no text are shown by their numbers."""
    return printable(payload.decode(errors="backslashreplace"))


def payload_fields(payload: bytes) -> dict[str, str]:
    """A payload for programs: as text if it is text, else in base64."""
    try:
        return {"payload": payload.decode()}
    except UnicodeDecodeError:
        return {"payload_base64": base64.b64encode(payload).decode()}


def short(text: str) -> str:
    return text if len(text) <= CELL_CHARACTERS else f"{text[: CELL_CHARACTERS - 1]}…"


def when(ms: int) -> str:
    """A time of the cluster in UTC; as a number where it is beyond the calendar."""
    try:
        seconds, rest = divmod(ms, 1_000)
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:03}Z"
    except (ValueError, OverflowError, OSError):
        return f"{ms} ms"


def shown(name: str, value: object) -> object:
    """A value for people, by what its name says that it is."""
    if isinstance(value, int) and not isinstance(value, bool) and name.endswith("_ms") and is_time(name):
        return when(value)
    return value


def is_time(name: str) -> bool:
    """Whether a field in milliseconds is a point in time, and no duration."""
    return name in _TIMES


_TIMES = {
    *("oldest_ms", "as_of_ms", "until_ms", "last_used_ms", "enqueued_ms", "died_ms", "time_ms", "reported_ms"),
    *("first_delivered_ms", "last_delivered_ms", "expires_at_ms"),
}


def as_object(value: Any) -> dict[str, Any]:
    """The fields of a reply by name, those inside it too."""
    return {field.name: plain(getattr(value, field.name)) for field in fields(value)}


def message_object(message: "Delivered") -> dict[str, Any]:
    """A message as --json has it."""
    origin = message.origin
    return {
        "version": message.version,
        **payload_fields(message.payload),
        "key": message.key,
        "headers": message.headers,
        "enqueued_ms": message.enqueued_ms,
        "client_id": message.client_id,
        "client_seq": message.client_seq,
        "origin": None if origin is None else {"queue": origin.queue, "version": origin.version},
    }


def message_line(message: "Delivered", more: Mapping[str, object]) -> str:
    """A message as people see it: its version, its payload, and what is out of the ordinary about it."""
    beside = {"key": message.key, **more, **message.headers}
    told = ", ".join(f"{name}={value}" for name, value in beside.items() if value is not None)
    return f"{message.version:>6}  {payload_text(message.payload)}" + (f"  ({printable(told)})" if told else "")


def plain(value: Any) -> Any:
    """As JSON can have it: dataclasses by their fields, bytes as base64, errors by name and facts."""
    if hasattr(value, "__dataclass_fields__"):
        return as_object(value)
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    if isinstance(value, HoldfastError):
        return {"error": type(value).__name__, **plain(value.facts)}
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return value


def _cell(value: object) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case _:
            return printable(str(value))
