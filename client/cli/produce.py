"""`holdfast produce`: messages from the command line, a file or standard input.

Lines are sent in batches of what is there: a slow pipe's line goes out at once, a file's lines a thousand at a time.
What was confirmed is printed before the next batch is sent, so that after an error it is known what was not.
"""

import argparse
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from holdfast.client.cli.arguments import WrongUsage, add_verb, connected, duration_ms, header, time_ms
from holdfast.client.cli.output import flush, print_line, print_object
from holdfast.client.protocol.limits import FRAME_BODY_BYTES

if TYPE_CHECKING:
    from holdfast.client.cli.arguments import Subparsers

BATCH_MESSAGES = 1_000
BATCH_BYTES = 1_048_576  # a quarter of what a request may carry: headers and keys come on top

USAGE = "holdfast produce QUEUE [TEXT…|-] [--file F]"


def add_parser(subparsers: "Subparsers") -> None:
    parser = add_verb(subparsers, "produce", run, "append messages to a queue, and print their versions")
    parser.add_argument("queue", metavar="QUEUE")
    parser.add_argument(
        "texts", metavar="TEXT", nargs="*", help="a message each; - or nothing: one for each line of standard input"
    )
    parser.add_argument("--file", metavar="FILE", help="one message with all that a file has; - is standard input")
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
        return iter([[_content(args.file)]])
    if args.texts not in ([], ["-"]):
        # As the bytes that they were, also where these are no text in the terminal's encoding.
        return split([os.fsencode(text) for text in args.texts])
    return lines(cast(io.BufferedReader, sys.stdin.buffer).read1)


def _content(file: str) -> bytes:
    if file == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise WrongUsage(f"{file} cannot be read: {error.strerror}", usage=USAGE) from None


def lines(read: Callable[[int], bytes]) -> Iterator[list[bytes]]:
    """The lines of a stream, without their ends, as they come. A last line needs no end; an empty line is a message."""
    rest = b""
    while data := read(BATCH_BYTES):
        *whole, rest = (rest + data).split(b"\n")
        yield from split(whole)
        if len(rest) > FRAME_BODY_BYTES:  # no message can be that long: let it be refused before it fills the memory
            break
    if rest:
        yield [rest]


def split(messages: Sequence[bytes]) -> Iterator[list[bytes]]:
    """These messages in batches of a number and a size, but at least one."""
    batch: list[bytes] = []
    size = 0
    for message in messages:
        if batch and (len(batch) == BATCH_MESSAGES or size + len(message) > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(message)
        size += len(message)
    if batch:
        yield batch
