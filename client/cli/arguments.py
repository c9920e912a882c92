"""What the commands take: the flags that all share, durations, sizes, times, settings, and asking before destroying.

Nothing here connects to anything before `connected` is called, and nothing heavy is imported before.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from holdfast.client.protocol.errors import Misuse, Refused
from holdfast.client.protocol.values import Setting

if TYPE_CHECKING:
    from holdfast.client.blocking import Client

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

CONNECT = "127.0.0.1:7401,127.0.0.1:7402,127.0.0.1:7403"  # what `holdfast up` listens on
TIMEOUT = "30s"

NONE = "none"  # on the command line: no limit
INHERIT = "inherit"  # as the group's queue says

_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?(?:ms|s|m|h|d))+")
_PART = re.compile(r"([0-9]+)(?:\.([0-9]+))?(ms|s|m|h|d)")
_SIZE = re.compile(r"([0-9]+)([kmgKMG]?)")
_ADDRESS = re.compile(r"(\[[^\]]+\]|[^:\s\[\]]+):([0-9]{1,5})")


class WrongUsage(Misuse):
    """The command line itself is wrong."""

    fact_names = ("usage",)
    text = "{usage}"
    usage: str


class NeedsYes(Misuse):
    """It destroys, and there is nobody to ask."""


class NotConfirmed(Refused):
    """A person was asked, and did not say yes."""


# Flags that every command has --------------------------------------------------------------------------


def add_common(parser: argparse.ArgumentParser) -> None:
    """How to reach the cluster, how long to try, and whom the output is for."""
    common = parser.add_argument_group("every command has")
    common.add_argument(
        "--connect",
        metavar="HOST:PORT,…",
        type=addresses,
        default=os.environ.get("HOLDFAST_CONNECT") or CONNECT,
        help="where nodes are; one that answers is enough (default: HOLDFAST_CONNECT, else the ports of `holdfast up`)",
    )
    common.add_argument(
        "--timeout", metavar="TIME", type=duration_ms, default=TIMEOUT, help="for each call, retries included (30s)"
    )
    common.add_argument("--json", action="store_true", help="one object a line; errors too, on standard output")


def add_verb(
    verbs: "Subparsers", name: str, run: Callable[[argparse.Namespace], int], help: str, **options: Any
) -> argparse.ArgumentParser:
    """A leaf of the command line: with the shared flags, and what runs it."""
    parser = verbs.add_parser(name, help=help, description=f"{help[:1].upper()}{help[1:]}.", **options)
    parser.set_defaults(run=run)
    add_common(parser)
    return parser


def add_group(parser: argparse.ArgumentParser, default: str | None = "default") -> None:
    shown = f"default: {default}" if default is not None else "default: all"
    parser.add_argument("--group", metavar="GROUP", default=default, help=f"the consumer group ({shown})")


def connected(args: argparse.Namespace) -> "Client":
    """The client of these flags; it connects when it is first asked for something."""
    import socket

    from holdfast.client.blocking import Client

    return Client(args.connect, timeout_ms=args.timeout, consumer_id=f"cli/{socket.gethostname()}/{os.getpid()}"[:200])


def confirm(args: argparse.Namespace, what: str) -> None:
    """Go on only if `--yes` was said, or a person at the terminal says yes. Raises NeedsYes or NotConfirmed."""
    if args.yes:
        return
    if not sys.stdin.isatty():
        raise NeedsYes(f"this would {what}; say --yes if that is meant")
    print(f"This will {what}. Go on? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise NotConfirmed("nothing was done")


def add_yes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--yes", action="store_true", help="do not ask")


# Values ------------------------------------------------------------------------------------------------


def addresses(text: str) -> str:
    for part in text.split(","):
        found = _ADDRESS.fullmatch(part.strip())
        if part.strip() and (found is None or not 1 <= int(found[2]) <= 65_535):
            raise argparse.ArgumentTypeError(f"{part.strip()!r} is no HOST:PORT")
    if not text.replace(",", "").strip():
        raise argparse.ArgumentTypeError("at least one HOST:PORT is needed")
    return text


def duration_ms(text: str) -> int:
    """Whole milliseconds of `500ms`, `30s`, `1h30m`, `1.5h` or `0`. Another number needs its unit."""
    if text == "0":
        return 0
    if not _DURATION.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no duration: say 500ms, 30s, 5m, 12h or 7d")
    total = 0
    for whole, fraction, unit in _PART.findall(text):
        scaled = int(whole + fraction) * _UNITS_MS[unit]
        if scaled % 10 ** len(fraction):
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of milliseconds")
        total += scaled // 10 ** len(fraction)
    return total


def size_bytes(text: str) -> int:
    """Bytes of `4096`, `64k`, `16m` or `2g`, in powers of 1,024."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: say 4096, 64k, 16m or 2g")
    return int(found[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[found[2].lower()]


def time_ms(text: str) -> int:
    """Milliseconds since 1970 of `2030-01-31T09:00:00Z`; without a zone it is local time. A number stays as it is."""
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        # Integers all the way: a float's seconds are not exact to the millisecond.
        moment = datetime.fromisoformat(text).astimezone()
        since = moment - datetime.fromisoformat("1970-01-01T00:00:00+00:00")
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no time: say 2030-01-31T09:00:00Z, or milliseconds") from None
    return (since.days * 86_400 + since.seconds) * 1_000 + since.microseconds // 1_000


def count(text: str) -> int:
    """A whole number from 1 on: a version, or how many."""
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def whole(text: str) -> int:
    """A whole number from 0 on."""
    return 0 if text == "0" else count(text)


def rate(text: str) -> float:
    """So many a second."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return found


def place(text: str) -> str | int:
    """Where a group begins."""
    return text if text in ("earliest", "latest") else count(text)


def header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=VALUE")
    return name, value


def backoff(text: str) -> dict[str, Any]:
    """`none`, `fixed:BASE` or `exponential:BASE:CAP`, as `create_queue` takes it."""
    match text.split(":"):
        case ["none"]:
            return {"kind": "none"}
        case ["fixed", base]:
            return {"kind": "fixed", "base_ms": duration_ms(base), "cap_ms": duration_ms(base)}
        case ["exponential", base, cap]:
            return {"kind": "exponential", "base_ms": duration_ms(base), "cap_ms": duration_ms(cap)}
        case _:
            raise argparse.ArgumentTypeError(f"{text!r} is no backoff: say none, fixed:5s or exponential:1s:10m")


# Settings, from the table that the rules themselves are checked by -------------------------------------------


def add_settings(parser: argparse.ArgumentParser, settings: dict[str, Setting], unset: str = NONE) -> None:
    """A flag for each setting: `visibility_timeout_ms` is `--visibility-timeout 30s`. `unset` is the word for null."""
    flags = parser.add_argument_group("settings")
    for name, setting in settings.items():
        flag = f"--{name.removesuffix('_ms').replace('_', '-')}"
        options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
        if setting.kind == "flag":
            flags.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
            continue
        read, metavar = _reader(name, setting)
        if setting.optional:
            read, metavar = _or_null(read, unset), f"{metavar}|{unset}"
        flags.add_argument(flag, type=read, metavar=metavar, **options)


def chosen_settings(args: argparse.Namespace, settings: Iterable[str]) -> dict[str, Any]:
    """Those that the command line names."""
    return {name: getattr(args, name) for name in settings if hasattr(args, name)}


def _reader(name: str, setting: Setting) -> tuple[Callable[[str], Any], str]:
    if setting.kind == "backoff":
        return backoff, "none|fixed:5s|exponential:1s:10m"
    if setting.kind == "queue":
        return str, "QUEUE"
    if setting.kind == "word":
        return _one_of(setting.words), "|".join(setting.words)
    if name.endswith("_ms"):
        return duration_ms, "TIME"
    return (size_bytes, "SIZE") if name.endswith("_bytes") else (count, "NUMBER")


def _one_of(words: tuple[str, ...]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(words)}")
        return text

    return read


def _or_null(read: Callable[[str], Any], unset: str) -> Callable[[str], Any]:
    return lambda text: None if text == unset else read(text)
