"""`holdfast producer`: what a queue remembers of a producer, and ending that."""

import argparse
from typing import TYPE_CHECKING

from holdfast.client.cli.arguments import add_verb, add_yes, confirm, connected
from holdfast.client.cli.output import as_object, print_facts, print_line, print_object

if TYPE_CHECKING:
    from holdfast.client.cli.arguments import Subparsers


def add_parser(subparsers: "Subparsers") -> None:
    parser = subparsers.add_parser("producer", help="show or forget what a queue remembers of a producer")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    show = add_verb(verbs, "show", run_show, "show a producer's epoch and high-water mark, without fencing anybody")
    _add_names(show)
    forget = add_verb(verbs, "forget", run_forget, "forget a producer; what it sends again is then taken for new")
    _add_names(forget)
    add_yes(forget)


def run_show(args: argparse.Namespace) -> int:
    with connected(args) as client:
        state = client.producer_state(args.queue, client_id=args.client_id)
    found = {"queue": args.queue, "client_id": args.client_id, **as_object(state)}
    if args.json:
        print_object(found)
    else:
        print_facts(found)
    return 0


def run_forget(args: argparse.Namespace) -> int:
    confirm(args, f"forget producer {args.client_id} of queue {args.queue}: what it sends again is then written again")
    with connected(args) as client:
        client.forget_producer(args.queue, client_id=args.client_id)
    if args.json:
        print_object({"queue": args.queue, "client_id": args.client_id, "forgotten": True})
    else:
        print_line(f"forgot producer {args.client_id} of queue {args.queue}")
    return 0


def _add_names(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("queue", metavar="QUEUE")
    parser.add_argument("client_id", metavar="CLIENT_ID")
