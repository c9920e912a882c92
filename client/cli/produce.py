"""`holdfast produce`: messages from the command line, a file or standard input.

Lines are sent in batches of what is there: a slow pipe's line goes out at once, a file's lines a thousand at a time.
What was confirmed is printed before the next batch is sent, so that after an error it is known what was not.
"""

import argparse
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

from holdfast.client.cli.arguments import WrongUsage, add_verb, connected, duration_ms, header, time_ms
from holdfast.client.cli.framing import FRAMINGS, Framing, read_messages, split
from holdfast.client.cli.output import flush, print_line, print_object

if TYPE_CHECKING:
    from holdfast.client.cli.arguments import Subparsers

USAGE = "holdfast produce QUEUE [TEXT…|-] [--file F] [--as lines|lengths]"


def add_parser(subparsers: "Subparsers") -> None:
    parser = add_verb(subparsers, "produce", run, "append messages to a queue, and print their versions")
    parser.add_argument("queue", metavar="QUEUE")
    parser.add_argument(
        "texts", metavar="TEXT", nargs="*", help="a message each; - or nothing: one for each line of standard input"
    )
    parser.add_argument("--file", metavar="FILE", help="one message with all that a file has; - is standard input")
    parser.add_argument(
        "--as",
        dest="framing",
        choices=FRAMINGS,
        help="what the file or standard input is: a message a line, or each behind its length in four bytes",
    )
    parser.add_argument("--key", metavar="KEY", help="the messages' key, by which they can be cancelled")
    parser.add_argument(
        "--header", metavar="NAME=VALUE", type=header, action="append", default=[], help="may be given again"
    )
    time = parser.add_mutually_exclusive_group()
    time.add_argument("--delay", metavar="TIME", type=duration_ms, help="hold them back for so long")
    time.add_argument("--at", metavar="TIME", type=time_ms, help="hold them back until then, as 2030-01-31T09:00:00Z")
    parser.add_argument("--ttl", metavar="TIME", type=duration_ms, help="they expire after so long")


def run(args: argparse.Namespace) -> int:
    headers = dict(args.header)
    if len(headers) < len(args.header):
        raise WrongUsage("a header is given twice", usage=USAGE)
    batches = _batches(args)
    with connected(args) as client:
        for batch in batches:
            produced = client.produce(
                args.queue,
                batch,
                key=args.key,
                headers=headers or None,
                delay_ms=args.delay,
                not_before_ms=args.at,
                ttl_ms=args.ttl,
            )
            if args.json:
                print_object({"queue": args.queue, "versions": produced.versions, "replayed": produced.replayed})
            else:
                for version in produced.versions:
                    print_line(str(version))
            flush()
    return 0


def _batches(args: argparse.Namespace) -> Iterator[list[bytes]]:
    if args.file is not None:
        if args.texts:
            raise WrongUsage("TEXT and --file exclude each other", usage=USAGE)
        if args.framing is None:
            return iter([[_content(args.file)]])
        return _from_file(args.file, args.framing)
    if args.texts not in ([], ["-"]):
        if args.framing is not None:
            raise WrongUsage("--as says what --file or standard input is, and TEXT is neither", usage=USAGE)
        # As the bytes that they were, also where these are no text in the terminal's encoding.
        return split([os.fsencode(text) for text in args.texts])
    return read_messages(cast(io.BufferedReader, sys.stdin.buffer).read1, args.framing or "lines")


def _from_file(file: str, framing: Framing) -> Iterator[list[bytes]]:
    if file == "-":
        yield from read_messages(cast(io.BufferedReader, sys.stdin.buffer).read1, framing)
        return
    with _opened(file) as stream:
        yield from read_messages(stream.read1, framing)


def _opened(file: str) -> io.BufferedReader:
    try:
        return Path(file).open("rb")
    except OSError as error:
        raise WrongUsage(f"{file} cannot be read: {error.strerror}", usage=USAGE) from None


def _content(file: str) -> bytes:
    if file == "-":
        return sys.stdin.buffer.read()
    with _opened(file) as stream:
        return stream.read()
