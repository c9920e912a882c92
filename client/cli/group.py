"""`holdfast group`: create, list, update, seek and delete the consumer groups of a queue."""

import argparse
from typing import TYPE_CHECKING

from holdfast.client.cli.arguments import (
    INHERIT,
    WrongUsage,
    add_settings,
    add_verb,
    add_yes,
    chosen_settings,
    confirm,
    connected,
    place,
)
from holdfast.client.cli.output import as_object, print_line, print_object, print_table
from holdfast.client.protocol.values import GROUP_SETTINGS

if TYPE_CHECKING:
    from holdfast.client.cli.arguments import Subparsers
    from holdfast.client.protocol.replies import Started


def add_parser(subparsers: "Subparsers") -> None:
    verbs = subparsers.add_parser("group", help="create, list, update, seek and delete consumer groups").add_subparsers(
        metavar="VERB", required=True
    )
    create = add_verb(verbs, "create", run_create, "create a group")
    _add_names(create)
    create.add_argument("--start", metavar="earliest|latest|VERSION", type=place, default="earliest")
    add_settings(create, GROUP_SETTINGS, unset=INHERIT)
    listing = add_verb(verbs, "list", run_list, "list the groups of a queue")
    listing.add_argument("queue", metavar="QUEUE")
    update = add_verb(verbs, "update", run_update, "change settings of a group")
    _add_names(update)
    add_settings(update, GROUP_SETTINGS, unset=INHERIT)
    seek = add_verb(verbs, "seek", run_seek, "let a group begin anew elsewhere; its leases end, its counts start at 0")
    _add_names(seek)
    seek.add_argument("--to", metavar="earliest|latest|VERSION", type=place, required=True)
    seek.add_argument("--dead", action="store_true", help="drop its dead letters too")
    add_yes(seek)
    delete = add_verb(verbs, "delete", run_delete, "delete a group with its dead letters")
    _add_names(delete)
    add_yes(delete)


def run_create(args: argparse.Namespace) -> int:
    with connected(args) as client:
        settings = chosen_settings(args, GROUP_SETTINGS)
        started = client.create_group(args.queue, args.group, start=args.start, **settings)
    _print_start(args, "created", started)
    return 0


def run_list(args: argparse.Namespace) -> int:
    with connected(args) as client:
        found = client.groups(args.queue)
    if args.json:
        for each in found:
            print_object(
                {"queue": args.queue, "group": each.name, "start": each.start, "settings": as_object(each.settings)}
            )
    else:
        print_table(("GROUP", "START"), [(each.name, each.start) for each in found])
    return 0


def run_update(args: argparse.Namespace) -> int:
    changes = chosen_settings(args, GROUP_SETTINGS)
    if not changes:
        raise WrongUsage("name a setting to change", usage="see holdfast group update --help")
    with connected(args) as client:
        client.update_group(args.queue, args.group, **changes)
    if args.json:
        print_object({"queue": args.queue, "group": args.group, "changes": changes})
    else:
        print_line(f"updated group {args.group} of queue {args.queue}")
    return 0


def run_seek(args: argparse.Namespace) -> int:
    if args.dead:
        confirm(args, f"drop the dead letters of group {args.group} of queue {args.queue}")
    with connected(args) as client:
        started = client.seek(args.queue, group=args.group, to=args.to, dead=args.dead)
    _print_start(args, "moved", started)
    return 0


def run_delete(args: argparse.Namespace) -> int:
    confirm(args, f"delete group {args.group} of queue {args.queue} with its dead letters")
    with connected(args) as client:
        client.delete_group(args.queue, args.group)
    if args.json:
        print_object({"queue": args.queue, "group": args.group, "deleted": True})
    else:
        print_line(f"deleted group {args.group} of queue {args.queue}")
    return 0


def _add_names(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("queue", metavar="QUEUE")
    parser.add_argument("group", metavar="GROUP")


def _print_start(args: argparse.Namespace, done: str, started: "Started") -> None:
    if args.json:
        print_object({"queue": args.queue, "group": args.group, "version": started.version, "moved": started.moved})
    else:
        instead = ", the first that is still kept" if started.moved else ""
        print_line(f"{done} group {args.group} of queue {args.queue}: it begins at version {started.version}{instead}")
