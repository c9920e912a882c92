"""`holdfast history`: what happened to the messages of a queue that keeps a history."""

import argparse
from typing import TYPE_CHECKING

from holdfast.client.cli.arguments import add_verb, connected, count
from holdfast.client.cli.output import as_object, print_object, print_table, short, when

if TYPE_CHECKING:
    from holdfast.client.cli.arguments import Subparsers

LIMIT = 1_000


def add_parser(subparsers: "Subparsers") -> None:
    parser = add_verb(subparsers, "history", run, "show what happened to the messages of a queue with --history")
    parser.add_argument("queue", metavar="QUEUE")
    parser.add_argument("--from", dest="first", metavar="NUMBER", type=count, default=1, help="row (default: 1)")
    parser.add_argument("--limit", metavar="NUMBER", type=count, default=LIMIT, help=f"(default: {LIMIT})")


def run(args: argparse.Namespace) -> int:
    with connected(args) as client:
        found = client.history(args.queue, from_seq=args.first, limit=args.limit)
    if args.json:
        for row in found:
            print_object(as_object(row))
        return 0
    rows = [
        (
            row.seq,
            when(row.time_ms),
            row.kind,
            row.first if row.first == row.last else f"{row.first}-{row.last}",
            row.group or None,
            row.lease_id or None,
            row.consumer_id or None,
            short(row.error) or None,
        )
        for row in found
    ]
    print_table(("ROW", "TIME", "WHAT", "VERSIONS", "GROUP", "LEASE", "CONSUMER", "ERROR"), rows)
    return 0
