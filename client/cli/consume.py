"""`holdfast consume`: take messages, print them, and settle them after they are printed.

Nothing is settled that was not written out before, and nothing stays behind leased: whatever way the command ends,
what it holds unsettled is handed back unstarted.
"""

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Event
from typing import TYPE_CHECKING, Any

from holdfast.client.cli.arguments import WrongUsage, add_group, add_verb, connected, count, duration_ms
from holdfast.client.cli.framing import FRAMINGS, framed
from holdfast.client.cli.output import flush, message_line, message_object, print_line, print_object
from holdfast.client.cli.stopping import ended_gently
from holdfast.client.protocol.errors import AckHoleCapExceeded, HoldfastError, InFlightLimit, Refused
from holdfast.client.protocol.limits import LEASE_MESSAGES

if TYPE_CHECKING:
    from holdfast.client.blocking import Client, Lease
    from holdfast.client.cli.arguments import Subparsers

MAX = 100  # as a lease of the client's
SLICE_MS = 1_000  # how long one request waits at most: so long Ctrl-C waits for the answer, to give it back
RENEW_AT = 3  # what is kept is renewed after a third of its timeout: two more tries before it is lost

USAGE = "holdfast consume QUEUE [--ack|--nack|--keep] [--follow] [--as lines|lengths]"


def add_parser(subparsers: "Subparsers") -> None:
    parser = add_verb(subparsers, "consume", run, "take messages of a queue, print them, and acknowledge them")
    parser.add_argument("queue", metavar="QUEUE")
    add_group(parser)
    parser.add_argument(
        "--max", metavar="NUMBER", type=count, help=f"stop after so many (default: {MAX}; with --follow: never)"
    )
    parser.add_argument(
        "--wait", metavar="TIME", type=duration_ms, default=0, help="wait so long for the first one (default: 0)"
    )
    parser.add_argument("--follow", action="store_true", help="go on with what comes, until Ctrl-C")
    settle = parser.add_mutually_exclusive_group()
    settle.add_argument(
        "--ack", dest="settle", action="store_const", const="ack", default="ack", help="they are done (the default)"
    )
    settle.add_argument(
        "--nack", dest="settle", action="store_const", const="nack", help="they failed: counts an attempt"
    )
    settle.add_argument(
        "--keep",
        dest="settle",
        action="store_const",
        const="keep",
        help="hold them until the command ends, then hand them back: costs no attempt",
    )
    nack = parser.add_argument_group("with --nack")
    nack.add_argument("--error", metavar="TEXT", help="what went wrong")
    nack.add_argument("--delay", metavar="TIME", type=duration_ms, help="come back after so long (default: backoff)")
    nack.add_argument("--dead", action="store_true", help="give up on them at once")
    parser.add_argument(
        "--as",
        dest="framing",
        choices=FRAMINGS,
        help="print payloads and nothing else: one a line, or each behind its length in four bytes",
    )
    parser.add_argument("--visibility-timeout", metavar="TIME", type=duration_ms, help="(default: the group's)")


def run(args: argparse.Namespace) -> int:
    if args.settle != "nack" and (args.error is not None or args.delay is not None or args.dead):
        raise WrongUsage("--error, --delay and --dead belong to --nack", usage=USAGE)
    if args.json and args.framing is not None:
        raise WrongUsage("--json and --as exclude each other", usage=USAGE)
    with connected(args) as client, ended_gently():
        consumer = _Consumer(client, args)
        try:
            if args.follow:
                consumer.follow()
            else:
                consumer.take_what_is_there()
        except KeyboardInterrupt:
            if not args.follow:
                raise
        finally:
            consumer.release()
    return 0


class _Consumer:
    def __init__(self, client: "Client", args: argparse.Namespace) -> None:
        self._client, self._args = client, args
        self._asking = ThreadPoolExecutor(1)
        self._idle = Event()  # no request is under way
        self._idle.set()
        self._held: list[Lease] = []
        self._renew_ms = 0
        self._renew_at_s: dict[int, float] = {}  # by lease id

    def take_what_is_there(self) -> None:
        """Up to `--max`. Nacks come last, else what was nacked would be taken again."""
        left = self._args.max or MAX
        wait_ms = self._args.wait
        while left:
            try:
                lease = self._lease(left, wait_ms)
            except (InFlightLimit, AckHoleCapExceeded):
                if not self._held:
                    raise
                break  # it is this command that has used up the limit
            if not lease:
                break
            left -= len(lease)
            wait_ms = 0
            self._show(lease)
            if self._args.settle == "ack":
                self._settle(lease)
        if self._args.settle == "nack":
            for lease in list(self._held):
                self._settle(lease)

    def follow(self) -> None:
        """Until `--max`, or for ever. A limit that others use up is waited for like an empty queue."""
        left = self._args.max
        slice_ms = SLICE_MS
        if self._args.settle == "keep":
            self._renew_ms = max(self._timeout_ms() // RENEW_AT, 1)
            slice_ms = min(slice_ms, self._renew_ms)
        while left is None or left > 0:
            self._renew()
            try:
                lease = self._ask(min(left or MAX, MAX), slice_ms)
            except (InFlightLimit, AckHoleCapExceeded):
                time.sleep(slice_ms / 1000)  # also where a node says so at once
                continue
            if lease:
                self._show(lease)
                if left is not None:
                    left -= len(lease)
                if self._args.settle != "keep":
                    self._settle(lease)

    def release(self) -> None:
        """Hand back what is unsettled, also what a request under way still brings. What is over is with others."""
        self._idle.wait(2 * SLICE_MS / 1000)
        for lease in self._held:
            with suppress(HoldfastError):
                lease.release()
        self._asking.shutdown(wait=False)

    def _lease(self, limit: int, wait_ms: int) -> "Lease":
        """Wait in slices, so that Ctrl-C never has to wait for longer than one of them."""
        until_s = time.monotonic() + wait_ms / 1000
        while True:
            left_ms = max(int((until_s - time.monotonic()) * 1000), 0)
            try:
                lease = self._ask(limit, min(left_ms, SLICE_MS))
                if lease or left_ms <= SLICE_MS:
                    return lease
            except (InFlightLimit, AckHoleCapExceeded):
                if left_ms <= SLICE_MS:
                    raise

    def _ask(self, limit: int, wait_ms: int) -> "Lease":
        """One request, in a thread that Ctrl-C does not reach: no lease is left behind that nobody knows of."""
        self._idle.clear()
        return self._asking.submit(self._ask_here, limit, wait_ms).result()

    def _ask_here(self, limit: int, wait_ms: int) -> "Lease":
        args = self._args
        try:
            lease = self._client.lease(
                args.queue,
                group=args.group,
                max_messages=min(limit, LEASE_MESSAGES),
                wait_ms=wait_ms,
                visibility_timeout_ms=args.visibility_timeout,
            )
            if lease:
                self._held.append(lease)
            return lease
        finally:
            self._idle.set()

    def _show(self, lease: "Lease") -> None:
        for message in lease:
            if self._args.framing is not None:
                sys.stdout.buffer.write(framed(message.payload, self._args.framing))
            elif self._args.json:
                counts = {"delivery_count": message.delivery_count, "attempts": message.attempts}
                print_object({**message_object(message), **counts, "lease_id": lease.id})
            else:
                print_line(message_line(message, {"attempts": message.attempts if message.attempts > 1 else None}))
        flush()

    def _settle(self, lease: "Lease") -> None:
        args = self._args
        if args.settle == "ack":
            lease.ack()
        else:
            lease.nack(delay_ms=args.delay, error=args.error, dead=args.dead)
        self._held.remove(lease)

    def _timeout_ms(self) -> int:
        """For how long a lease of this command holds."""
        if self._args.visibility_timeout is not None:
            return int(self._args.visibility_timeout)
        found = self._client.queue(self._args.queue)
        own: list[Any] = [g.settings.visibility_timeout_ms for g in found.groups if g.name == self._args.group]
        return int(next(filter(None, own), found.settings.visibility_timeout_ms))

    def _renew(self) -> None:
        """What `--keep` holds with `--follow` stays held: a lease that ran out would cost an attempt."""
        now_s = time.monotonic()
        next_s = now_s + self._renew_ms / 1000
        for lease in list(self._held):
            if self._renew_at_s.setdefault(lease.id, next_s) <= now_s:
                try:
                    lease.extend(visibility_timeout_ms=self._args.visibility_timeout)
                    self._renew_at_s[lease.id] = next_s
                except Refused:
                    self._held.remove(lease)  # over, whatever was done: it is shown again when it is taken again
