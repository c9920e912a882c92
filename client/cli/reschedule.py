"""`holdfast reschedule`: another time for messages that no group has leased or settled yet."""

import argparse
from typing import TYPE_CHECKING

from holdfast.client.cli.arguments import add_verb, connected, duration_ms, time_ms
from holdfast.client.cli.cancel import add_target, check_target, print_outcomes

if TYPE_CHECKING:
    from holdfast.client.cli.arguments import Subparsers


def add_parser(subparsers: "Subparsers") -> None:
    parser = add_verb(subparsers, "reschedule", run, "give another time to messages that no group has leased yet")
    add_target(parser)
    time = parser.add_mutually_exclusive_group(required=True)
    time.add_argument("--delay", metavar="TIME", type=duration_ms, help="so long from now on; 0 is now")
    time.add_argument("--at", metavar="TIME", type=time_ms, help="then, as 2030-01-31T09:00:00Z")


def run(args: argparse.Namespace) -> int:
    check_target(args)
    with connected(args) as client:
        outcomes = client.reschedule(
            args.queue, version=args.version, key=args.key, delay_ms=args.delay, not_before_ms=args.at
        )
        return print_outcomes(args, "rescheduled", outcomes)
