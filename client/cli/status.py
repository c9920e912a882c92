"""`holdfast status`: who leads, and how each node does, with those that are down."""

import argparse
from typing import TYPE_CHECKING

from holdfast.client.cli import looks
from holdfast.client.cli.arguments import add_verb, connected
from holdfast.client.cli.output import as_object, print_line, print_object, print_table

if TYPE_CHECKING:
    from holdfast.client.cli.arguments import Subparsers
    from holdfast.client.status import ClusterStatus


def add_parser(subparsers: "Subparsers") -> None:
    add_verb(subparsers, "status", run, "show who leads, and how each node does")


def run(args: argparse.Namespace) -> int:
    with connected(args) as client:
        found = client.status()
    if args.json:
        print_object(as_object(found))
    else:
        _show(found)
    return 0


def _show(found: "ClusterStatus") -> None:
    print_line(looks.title(found))
    if found.fsync != "always":
        print_line("fsync is not always: a power cut may take confirmed messages with it")
    print_table(looks.NODE_HEAD, looks.node_rows(found))
