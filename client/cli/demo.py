"""`holdfast demo`: plays a transcript on a real store in a temporary directory, and prints it as it comes."""

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.client.cli.stories import STORIES, title

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: "Subparsers") -> None:
    parser = subparsers.add_parser("demo", help="play a story of the queue on a real store")
    parser.add_argument("--transcript", metavar="NAME", choices=sorted(STORIES), default="tour", help="which story")
    parser.add_argument("--list", action="store_true", help="list the stories, and play none")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.list:
        for name, story in STORIES.items():
            print(f"{name:<20} {title(story)}")
        return 0
    from holdfast.client.cli.transcript import play

    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as directory:
        for line in play(STORIES[args.transcript], "lmdb", Path(directory)):
            print(line, flush=True)
    return 0
