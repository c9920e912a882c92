"""The entry point of `holdfast`: finds the noun, runs it, and turns its outcome into an exit code.

Each noun is a module of this folder with `add_parser(subparsers)`, which calls
`set_defaults(run=...)`, and `run(args) -> int`. Modules named in NOUNS import whatever is heavy
inside `run`, so that `holdfast --version` stays quick.
"""

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Final, NoReturn

from holdfast.client.cli.arguments import WrongUsage
from holdfast.client.cli.output import note, print_error
from holdfast.client.protocol.errors import HoldfastError, InvariantBroken, Misuse, Refused

DONE: Final = 0
REFUSED: Final = 1
WRONG_USAGE: Final = 2  # argparse exits with the same number
UNAVAILABLE: Final = 3  # or indeterminate: the answer, if any, was not seen
INTERRUPTED: Final = 130  # as a shell says it of SIGINT
PIPE_CLOSED: Final = 141  # and of SIGPIPE

NOUNS: Final[tuple[str, ...]] = (
    "serve",
    "up",
    "status",
    "queue",
    "group",
    "produce",
    "consume",
    "dead",
    "explain",
    "stats",
    "peek",
    "read",
    "history",
    "cancel",
    "reschedule",
    "producer",
    "txn",
    "top",
    "node",
    "bench",
    "demo",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and give its exit code; only --help and --version exit by themselves."""
    given = sys.argv[1:] if arguments is None else arguments
    as_json = "--json" in given  # until it is parsed: wrong usage is told in the way that was asked for
    try:
        args = parser().parse_args(given)
        as_json = getattr(args, "json", False)
        run: Callable[[argparse.Namespace], int] = args.run
        code = run(args)
        sys.stdout.flush()  # while a closed pipe can still be told from success
        return code
    except HoldfastError as error:
        if isinstance(error, InvariantBroken):
            traceback.print_exc()  # a bug of ours, or damage: whoever reports it needs to say where
        if isinstance(error, WrongUsage) and not as_json:
            print(error.usage, file=sys.stderr)
        print_error(error, as_json)
        return exit_code(error)
    except BrokenPipeError:
        # Whoever read our output has gone; what is left of it would fail again when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except KeyboardInterrupt:
        note("interrupted")
        return INTERRUPTED


def parser() -> argparse.ArgumentParser:
    """The whole command line: every noun of NOUNS has added its own part."""
    result = Parser(prog="holdfast", description="A replicated message queue.")
    result.add_argument("--version", action="version", version=f"holdfast {version('holdfast')}")
    subparsers = result.add_subparsers(metavar="COMMAND", required=True)
    for noun in NOUNS:
        importlib.import_module(f"holdfast.client.cli.{noun}").add_parser(subparsers)
    return result


def exit_code(error: HoldfastError) -> int:
    """What a script may conclude: call it differently, accept the no, or look again later."""
    match error:
        case Misuse():
            return WRONG_USAGE
        case Refused():
            return REFUSED
        case _:
            return UNAVAILABLE


class Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that wrong usage too is an object with --json.

    Abbreviated flags are refused: a script that uses one breaks on the day another flag begins alike.
    """

    def __init__(self, **options: object) -> None:
        super().__init__(**{"allow_abbrev": False, **options})  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        raise WrongUsage(message, usage=self.format_usage().strip())
