"""`holdfast stats`: the counters of a group."""

import argparse
from typing import TYPE_CHECKING

from holdfast.client.cli.arguments import add_group, add_verb, connected
from holdfast.client.cli.output import as_object, print_facts, print_object

if TYPE_CHECKING:
    from holdfast.client.cli.arguments import Subparsers


def add_parser(subparsers: "Subparsers") -> None:
    parser = add_verb(subparsers, "stats", run, "show how many messages of a group are ready, in flight, dead, …")
    parser.add_argument("queue", metavar="QUEUE")
    add_group(parser)


def run(args: argparse.Namespace) -> int:
    with connected(args) as client:
        found = {"queue": args.queue, "group": args.group, **as_object(client.stats(args.queue, group=args.group))}
    if args.json:
        print_object(found)
    else:
        print_facts(found)
    return 0
