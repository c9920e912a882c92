"""`holdfast node`: hand leadership over, repair a journal, look at the log."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.client.cli.arguments import add_verb, add_yes, confirm, connected, count
from holdfast.client.cli.output import plain, print_line, print_object

if TYPE_CHECKING:
    from holdfast.client.cli.arguments import Subparsers


def add_parser(subparsers: "Subparsers") -> None:
    parser = subparsers.add_parser("node", help="hand leadership over, repair a journal, look at the log")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    transfer = add_verb(verbs, "transfer", run_transfer, "let another node lead")
    transfer.add_argument("target", metavar="NODE", nargs="?", help="which (default: the one with most of the log)")
    repair = add_verb(verbs, "repair", run_repair, "keep what is readable of a stopped node's damaged journal")
    repair.add_argument("--data", type=Path, required=True, metavar="DIR", help="the node's folder")
    add_yes(repair)
    log = add_verb(verbs, "log", run_log, "print the committed log of a node, with the answers that were given")
    log.add_argument("--data", type=Path, required=True, metavar="DIR", help="the node's folder; it may be running")
    log.add_argument("--from", dest="first", type=count, default=1, metavar="INDEX", help="the first entry to print")
    log.add_argument("--no-answers", action="store_true", help="also where the log does not reach back to its begin")


def run_transfer(args: argparse.Namespace) -> int:
    with connected(args) as client:
        client.hand_over(args.target)
        leader = client.status().leader
    if args.json:
        print_object({"leader": leader})
    else:
        print_line(f"{leader or 'another node'} leads")
    return 0


def run_repair(args: argparse.Namespace) -> int:
    from holdfast.cluster.identity import journal_folder
    from holdfast.cluster.journal_repair import repair

    folder = journal_folder(args.data)
    confirm(args, f"remove what is unreadable from {folder}; without a copy of it that cannot be undone")
    kept = repair(str(folder))
    promised = None if kept.promise is None else kept.promise.index
    if args.json:
        print_object({"last": kept.last, "term": kept.term, "promised": promised})
    elif promised is None:
        print_line(f"the journal is whole up to {kept.last}")
    else:
        print_line(
            f"kept up to {kept.last}; up to {promised} may have been promised. The node neither votes nor acknowledges "
            "until the leader has covered that: start it"
        )
    return 0


def run_log(args: argparse.Namespace) -> int:
    from holdfast.cluster.export import exported

    for entry in exported(args.data, args.first, answers=not args.no_answers):
        if args.json:
            print_object(_entry_object(entry))
        else:
            for line in _entry_lines(entry):
                print_line(line)
    return 0


def _entry_object(entry: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"index": entry.index, "term": entry.term, "stamp_ms": entry.stamp_ms}
    if entry.configuration is not None:
        found["configuration"] = plain(entry.configuration)
    found["commands"] = [
        {
            "kind": type(envelope.command).__name__,
            "envelope": plain(envelope),
            "reply_kind": None if answer is None else type(answer.reply).__name__,
            "answer": plain(answer),
        }
        for envelope, answer in entry.commands
    ]
    return found


def _entry_lines(entry: Any) -> list[str]:
    what = "members" if entry.configuration is not None else "no-op" if entry.stamp_ms is None else ""
    lines = [f"{entry.index} term {entry.term} {what or f'at {entry.stamp_ms} ms, {len(entry.commands)} commands'}"]
    for position, (envelope, answer) in enumerate(entry.commands):
        reply = "" if answer is None else f" -> {type(answer.reply).__name__}"
        lines.append(f"  {position} {type(envelope.command).__name__}{reply}")
    return lines
