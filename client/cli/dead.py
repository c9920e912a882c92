"""`holdfast dead`: list, show, count and redrive dead letters, chosen by a filter."""

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from holdfast.client.cli.arguments import add_group, add_verb, connected, count, rate
from holdfast.client.cli.output import (
    as_object,
    note,
    payload_fields,
    payload_text,
    print_facts,
    print_line,
    print_object,
    print_table,
    progress,
    short,
    when,
)
from holdfast.client.cli.stopping import Stopping
from holdfast.client.protocol.errors import HoldfastError, Refused

if TYPE_CHECKING:
    from holdfast.client.blocking import Client
    from holdfast.client.calls import DeadLetter, Redriven
    from holdfast.client.cli.arguments import Subparsers

LIMIT = 100
PAGE = 1_000


class NoDeadLetter(Refused):
    """Nothing of the kind is dead."""


def add_parser(subparsers: "Subparsers") -> None:
    verbs = subparsers.add_parser("dead", help="list, show, count and redrive dead letters").add_subparsers(
        metavar="VERB", required=True
    )
    listing = add_verb(verbs, "list", run_list, "list dead letters")
    _add_choice(listing)
    listing.add_argument("--limit", metavar="NUMBER", type=count, default=LIMIT, help=f"(default: {LIMIT})")
    show = add_verb(verbs, "show", run_show, "show dead letters with all that is known of them")
    _add_choice(show)
    show.add_argument("version", metavar="VERSION", type=count, nargs="?", help="this one only")
    show.add_argument("--limit", metavar="NUMBER", type=count, default=LIMIT, help=f"(default: {LIMIT})")
    counting = add_verb(verbs, "count", run_count, "count dead letters")
    _add_choice(counting)
    redrive = add_verb(verbs, "redrive", run_redrive, "let dead letters be delivered again")
    _add_choice(redrive)
    redrive.add_argument("--dry-run", action="store_true", help="only count what would come back")
    redrive.add_argument("--rate", metavar="NUMBER", type=rate, help="at most so many a second (default: no limit)")
    redrive.add_argument(
        "--to-origin",
        action="store_true",
        help="QUEUE is a dead-letter queue: send home what was moved there; --group is one of its own",
    )


def run_list(args: argparse.Namespace) -> int:
    with connected(args) as client:
        found = list(_rows(client, args, args.where))
    if args.json:
        for row in found:
            print_object(_object(row))
    else:
        head = ("VERSION", "GROUP", "REASON", "ATTEMPTS", "DIED", "ERROR", "PAYLOAD")
        print_table(head, [_cells(row) for row in found])
    return 0


def run_show(args: argparse.Namespace) -> int:
    where = args.where
    if args.version is not None:
        where = f"version = {args.version}" + (f" and ({where})" if where else "")
    with connected(args) as client:
        found = list(_rows(client, args, where))
    if not found:
        raise NoDeadLetter(f"queue {args.queue} has no such dead letter")
    for at, row in enumerate(found):
        if args.json:
            print_object(_object(row))
        else:
            facts = {name: value for name, value in as_object(row).items() if name not in ("headers", "payload")}
            headers = {f"header {name}": value for name, value in row.headers.items()}
            print_line("" if at else f"queue {args.queue}")
            print_facts({**facts, **headers, "payload": payload_text(row.payload)})
    return 0


def run_count(args: argparse.Namespace) -> int:
    with connected(args) as client:
        found = client.dead_count(args.queue, group=args.group, where=args.where)
    if args.json:
        print_object({"queue": args.queue, "group": args.group, "count": found})
    else:
        print_line(str(found))
    return 0


def run_redrive(args: argparse.Namespace) -> int:
    """In steps. However it ends, what it did until then is told; run again, it goes on there."""
    from holdfast.client.calls import Redriven

    total = Redriven(0, 0)
    chosen = {"group": args.group, "where": args.where, "to_origin": args.to_origin}
    with connected(args) as client, Stopping() as stopping:

        def matching() -> int:
            return client.redrive(args.queue, dry_run=True, **chosen).matched

        steps = client.redrive_steps(args.queue, dry_run=args.dry_run, rate=args.rate, pause=stopping.pause, **chosen)
        try:
            with progress(f"redrive {args.queue}", matching) as show:
                for total in steps:
                    show(total.matched)
        except KeyboardInterrupt:
            _print_redriven(args, total, finished=False, certain=not stopping.at_once)
            raise
        except HoldfastError:
            if total.matched:
                _print_redriven(args, total, finished=False, certain=False)
            raise
    _print_redriven(args, total, finished=True, certain=True)
    return 0


def _print_redriven(args: argparse.Namespace, total: "Redriven", *, finished: bool, certain: bool) -> None:
    if args.json:
        print_object(
            {
                "queue": args.queue,
                "group": args.group,
                "matched": total.matched,
                "redriven": total.redriven,
                "dry_run": args.dry_run,
                "finished": finished,
            }
        )
    elif finished and args.dry_run:
        print_line(f"{total.matched} dead letters would come back")
    elif finished:
        print_line(f"{total.redriven} of {total.matched} dead letters came back")
    else:
        least = "" if certain else "at least "
        print_line(f"{least}{total.redriven} dead letters came back before this ended; run it again to go on")


def _add_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("queue", metavar="QUEUE")
    add_group(parser, default=None)
    parser.add_argument("--where", metavar="EXPR", default="", help="as: reason = 'max_attempts' and attempts >= 5")


def _rows(client: "Client", args: argparse.Namespace, where: str) -> Iterator["DeadLetter"]:
    left, after = args.limit, None
    while left:
        page = client.dead(args.queue, group=args.group, where=where, limit=min(left, PAGE), after=after)
        yield from page
        left, after = left - len(page), page.after
        if after is None:
            return
    note("there are more; raise --limit to see them")


def _object(row: "DeadLetter") -> dict[str, Any]:
    facts = as_object(row)
    return {**{name: value for name, value in facts.items() if name != "payload"}, **payload_fields(row.payload)}


def _cells(row: "DeadLetter") -> tuple[object, ...]:
    error = short(row.last_error) if row.last_error is not None else None
    return (
        row.version,
        row.group,
        row.reason,
        row.attempts,
        when(row.died_ms),
        error,
        short(payload_text(row.payload)),
    )
