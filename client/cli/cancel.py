"""`holdfast cancel`: take back messages that no group has leased or settled yet, by version or by key."""

import argparse
from typing import TYPE_CHECKING

from holdfast.client.cli.arguments import WrongUsage, add_verb, connected, count
from holdfast.client.cli.output import as_object, print_line, print_object

if TYPE_CHECKING:
    from holdfast.client.cli.arguments import Subparsers
    from holdfast.client.protocol.replies import VersionOutcome


def add_parser(subparsers: "Subparsers") -> None:
    parser = add_verb(subparsers, "cancel", run, "take back messages that no group has leased or settled yet")
    add_target(parser)


def run(args: argparse.Namespace) -> int:
    check_target(args)
    with connected(args) as client:
        return print_outcomes(args, "cancelled", client.cancel(args.queue, version=args.version, key=args.key))


def add_target(parser: argparse.ArgumentParser) -> None:
    """Which messages: one by its version, or all with a key."""
    parser.add_argument("queue", metavar="QUEUE")
    parser.add_argument("version", metavar="VERSION", type=count, nargs="?")
    parser.add_argument("--key", metavar="KEY", help="all that have this key, instead of a version")


def check_target(args: argparse.Namespace) -> None:
    if (args.version is None) == (args.key is None):
        raise WrongUsage("VERSION or --key is needed, one of them", usage="QUEUE (VERSION | --key KEY)")


def print_outcomes(args: argparse.Namespace, done: str, outcomes: "list[VersionOutcome]") -> int:
    """What became of each range; 1 where the one version that was named could not be changed."""
    for each in outcomes:
        if args.json:
            print_object({"queue": args.queue, **as_object(each)})
        else:
            what = done if each.outcome == "ok" else each.outcome.replace("_", " ")
            versions = str(each.first) if each.first == each.last else f"{each.first}-{each.last}"
            print_line(f"{versions}: {what}" + (f" in group {each.group}" if each.group else ""))
    refused = args.version is not None and any(each.outcome != "ok" for each in outcomes)
    return 1 if refused else 0
