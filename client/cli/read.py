"""`holdfast read`: kept messages by version, settled or not."""

import argparse
from typing import TYPE_CHECKING

from holdfast.client.cli.arguments import add_verb, connected, count
from holdfast.client.cli.output import message_line, message_object, print_line, print_object

if TYPE_CHECKING:
    from holdfast.client.cli.arguments import Subparsers


def add_parser(subparsers: "Subparsers") -> None:
    parser = add_verb(subparsers, "read", run, "print the kept messages of a queue by version, settled or not")
    parser.add_argument("queue", metavar="QUEUE")
    parser.add_argument("--from", dest="first", metavar="VERSION", type=count, help="(default: the lowest kept)")
    parser.add_argument(
        "--to", dest="last", metavar="VERSION", type=count, help="this one included (default: the tail)"
    )


def run(args: argparse.Namespace) -> int:
    with connected(args) as client:
        first = args.first
        if first is None:
            first = max(client.queue(args.queue).lowest_version, 1)
        for message in client.read(args.queue, from_version=first, to_version=args.last):
            if args.json:
                print_object(message_object(message))
            else:
                print_line(message_line(message, {}))
    return 0
