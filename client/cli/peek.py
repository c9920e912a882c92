"""`holdfast peek`: look at messages without touching any group."""

import argparse
from typing import TYPE_CHECKING

from holdfast.client.cli.arguments import add_group, add_verb, connected, count
from holdfast.client.cli.output import message_line, message_object, print_line, print_object

if TYPE_CHECKING:
    from holdfast.client.cli.arguments import Subparsers

LIMIT = 10


def add_parser(subparsers: "Subparsers") -> None:
    parser = add_verb(subparsers, "peek", run, "look at messages without touching any group")
    parser.add_argument("queue", metavar="QUEUE")
    add_group(parser, default=None)
    parser.add_argument("--from", dest="first", metavar="VERSION", type=count, default=1, help="(default: 1)")
    parser.add_argument("--limit", metavar="NUMBER", type=count, default=LIMIT, help=f"(default: {LIMIT})")


def run(args: argparse.Namespace) -> int:
    with connected(args) as client:
        for message in client.peek(args.queue, group=args.group, from_version=args.first, limit=args.limit):
            if args.json:
                print_object(message_object(message))
            else:
                print_line(message_line(message, {}))
    return 0
