"""`holdfast txn`: what is known of a staged transaction, and ending the memory of one that was published."""

import argparse
from typing import TYPE_CHECKING

from holdfast.client.cli.arguments import add_verb, add_yes, confirm, connected, whole
from holdfast.client.cli.output import as_object, print_facts, print_line, print_object
from holdfast.client.protocol.values import Job, Stream, TxnId

if TYPE_CHECKING:
    from holdfast.client.cli.arguments import Subparsers


def add_parser(subparsers: "Subparsers") -> None:
    verbs = subparsers.add_parser("txn", help="show staged transactions, and forget published ones").add_subparsers(
        metavar="VERB", required=True
    )
    show = add_verb(verbs, "show", run_show, "show whether a transaction is open, published or unknown")
    _add_id(show)
    forget = add_verb(verbs, "forget", run_forget, "end the memory of a published job, or of a whole stream")
    _add_id(forget)
    add_yes(forget)


def run_show(args: argparse.Namespace) -> int:
    txn = _txn(args)
    with connected(args) as client:
        found = {"txn": args.id, "seq": args.seq, **as_object(client.txn_status(txn))}
    if args.json:
        print_object(found)
    else:
        versions = {f"queue {name}": _span(versions) for name, versions in found.pop("versions").items()}
        print_facts({**found, **versions})
    return 0


def run_forget(args: argparse.Namespace) -> int:
    what = f"stream {args.id}" if args.seq is not None else f"job {args.id}"
    confirm(args, f"forget that {what} was published: staged and published again, it is written again")
    with connected(args) as client:
        client.forget_txn(_txn(args))
    if args.json:
        print_object({"txn": args.id, "seq": args.seq, "forgotten": True})
    else:
        print_line(f"forgot {what}")
    return 0


def _add_id(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", help="of a job; with --seq, the app of a stream")
    parser.add_argument("--seq", metavar="NUMBER", type=whole, help="of a stream: the number of the transaction")


def _txn(args: argparse.Namespace) -> TxnId:
    return Job(args.id) if args.seq is None else Stream(args.id, args.seq)


def _span(versions: list[int]) -> str:
    return f"{len(versions)} messages, versions {versions[0]} to {versions[-1]}"
