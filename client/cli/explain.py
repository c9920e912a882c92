"""`holdfast explain`: why a version, or anything at all, is not being delivered now."""

import argparse
from typing import TYPE_CHECKING

from holdfast.client.cli.arguments import add_group, add_verb, connected, count
from holdfast.client.cli.output import print_line, print_object, shown

if TYPE_CHECKING:
    from holdfast.client.cli.arguments import Subparsers

MEANINGS = {
    "not_produced": "no such version was produced yet",
    "available": "it is delivered to whoever asks next",
    "delayed": "it is held back until its time",
    "leased": "a consumer has it",
    "dead": "the group gave up on it; `holdfast dead redrive` brings it back",
    "moved": "it was moved to the dead-letter queue",
    "discarded": "it was discarded: expired, or given up by a queue that keeps no dead letters",
    "cancelled": "it was cancelled before it was delivered",
    "purged": "it was purged",
    "trimmed": "the queue dropped it for its age or size",
    "acked": "it was done",
    "before_start": "the group began behind it",
    "freed": "every group has settled it, and nothing more is kept of it",
    "in_flight_limit": "as many messages are in flight as the group allows",
    "hole_cap": "too many ack holes: older messages have to be settled first",
    "empty": "there is nothing to deliver",
}


def add_parser(subparsers: "Subparsers") -> None:
    parser = add_verb(subparsers, "explain", run, "tell why a version, or anything, is not being delivered now")
    parser.add_argument("queue", metavar="QUEUE")
    parser.add_argument("version", metavar="VERSION", type=count, nargs="?", help="(default: the first that waits)")
    add_group(parser)


def run(args: argparse.Namespace) -> int:
    with connected(args) as client:
        found = client.explain(args.queue, args.version, group=args.group)
    if args.json:
        asked = {"queue": args.queue, "group": args.group, "version": args.version}
        print_object({**asked, "reason": found.reason, "facts": found.facts})
        return 0
    facts = ", ".join(f"{name}={shown(name, value)}" for name, value in found.facts.items())
    meaning = MEANINGS.get(found.reason)
    print_line(found.reason + (f": {meaning}" if meaning else "") + (f" ({facts})" if facts else ""))
    return 0
