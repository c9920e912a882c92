"""`holdfast producer`: what a queue remembers of a producer."""

import argparse
from typing import TYPE_CHECKING

from holdfast.client.cli.arguments import add_verb, connected
from holdfast.client.cli.output import as_object, print_facts, print_object

if TYPE_CHECKING:
    from holdfast.client.cli.arguments import Subparsers


def add_parser(subparsers: "Subparsers") -> None:
    verbs = subparsers.add_parser("producer", help="show what a queue remembers of a producer").add_subparsers(
        metavar="VERB", required=True
    )
    show = add_verb(verbs, "show", run, "show a producer's epoch and high-water mark, without fencing anybody")
    show.add_argument("queue", metavar="QUEUE")
    show.add_argument("client_id", metavar="CLIENT_ID")


def run(args: argparse.Namespace) -> int:
    with connected(args) as client:
        state = client.producer_state(args.queue, client_id=args.client_id)
    found = {"queue": args.queue, "client_id": args.client_id, **as_object(state)}
    if args.json:
        print_object(found)
    else:
        print_facts(found)
    return 0
