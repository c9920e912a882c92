"""The entry point of `holdfast`: finds the noun, runs it, and turns its outcome into an exit code.

Each noun is a module of this folder with `add_parser(subparsers)`, which calls
`set_defaults(run=...)`, and `run(args) -> int`. Modules named in NOUNS import whatever is heavy
inside `run`, so that `holdfast --version` stays quick.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Final

from holdfast.client.protocol.errors import HoldfastError, InvariantBroken, Misuse, Refused

DONE: Final = 0
REFUSED: Final = 1
WRONG_USAGE: Final = 2  # argparse exits with the same number
UNAVAILABLE: Final = 3  # or indeterminate: the answer, if any, was not seen

NOUNS: Final[tuple[str, ...]] = ("bench", "demo")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and give its exit code; argparse exits by itself on wrong usage."""
    args = parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except InvariantBroken:
        raise  # our own bug: the traceback is the message
    except HoldfastError as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return exit_code(error)


def parser() -> argparse.ArgumentParser:
    """The whole command line: every noun of NOUNS has added its own part."""
    result = argparse.ArgumentParser(prog="holdfast", description="A replicated message queue.")
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
