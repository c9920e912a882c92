"""`holdfast queue`: create, show, list, update, delete and purge queues."""

import argparse
from typing import TYPE_CHECKING, Any

from holdfast.client.cli.arguments import (
    WrongUsage,
    add_settings,
    add_verb,
    add_yes,
    chosen_settings,
    confirm,
    connected,
)
from holdfast.client.cli.output import as_object, print_facts, print_line, print_object, print_table
from holdfast.client.protocol.values import QUEUE_SETTINGS

if TYPE_CHECKING:
    from holdfast.client.cli.arguments import Subparsers


def add_parser(subparsers: "Subparsers") -> None:
    verbs = subparsers.add_parser("queue", help="create, show, list, update, delete and purge queues").add_subparsers(
        metavar="VERB", required=True
    )
    create = add_verb(verbs, "create", run_create, "create a queue")
    create.add_argument("queue", metavar="QUEUE")
    create.add_argument("--groups", metavar="GROUP,…", default="default", help="its first groups (default: default)")
    add_settings(create, QUEUE_SETTINGS)
    show = add_verb(verbs, "show", run_show, "show a queue's settings, groups and readers")
    show.add_argument("queue", metavar="QUEUE")
    add_verb(verbs, "list", run_list, "list all queues")
    update = add_verb(verbs, "update", run_update, "change settings of a queue")
    update.add_argument("queue", metavar="QUEUE")
    add_settings(update, QUEUE_SETTINGS)
    delete = add_verb(verbs, "delete", run_delete, "delete a queue with all that it holds")
    delete.add_argument("queue", metavar="QUEUE")
    add_yes(delete)
    purge = add_verb(verbs, "purge", run_purge, "end what is ready and delayed, in one group or in all")
    purge.add_argument("queue", metavar="QUEUE")
    purge.add_argument("--group", metavar="GROUP", help="in this group only (default: in all)")
    purge.add_argument("--in-flight", action="store_true", help="also what consumers hold")
    purge.add_argument("--dead", action="store_true", help="also dead letters")
    add_yes(purge)


def run_create(args: argparse.Namespace) -> int:
    groups = [name for name in args.groups.split(",") if name]
    with connected(args) as client:
        created = client.create_queue(args.queue, groups=groups, **chosen_settings(args, QUEUE_SETTINGS))
    if args.json:
        print_object({"queue": args.queue, "queue_id": created.queue_id, "groups": groups})
    else:
        print_line(f"created queue {args.queue}")
    return 0


def run_show(args: argparse.Namespace) -> int:
    with connected(args) as client:
        found = as_object(client.queue(args.queue))
    facts: dict[str, Any] = {"queue": found.pop("name"), **found}
    facts["groups"] = [{"group": each.pop("name"), **each} for each in facts["groups"]]
    facts["readers"] = [{"reader": each.pop("name"), **each} for each in facts["readers"]]
    if args.json:
        print_object(facts)
        return 0
    settings, groups, readers = facts.pop("settings"), facts.pop("groups"), facts.pop("readers")
    print_facts({**facts, **settings, "backoff": _backoff(settings["backoff"])})
    for each in groups:
        own = {name: value for name, value in each["settings"].items() if value is not None}
        shown = ", ".join(f"{name}={_backoff(value) if name == 'backoff' else value}" for name, value in own.items())
        print_line(f"group {each['group']} from version {each['start']}" + (f": {shown}" if shown else ""))
    if readers:
        print_table(("READER", "VERSION", "LAG"), [(each["reader"], each["version"], each["lag"]) for each in readers])
    return 0


def run_list(args: argparse.Namespace) -> int:
    with connected(args) as client:
        for name in client.queues():
            if args.json:
                print_object({"queue": name})
            else:
                print_line(name)
    return 0


def run_update(args: argparse.Namespace) -> int:
    changes = chosen_settings(args, QUEUE_SETTINGS)
    if not changes:
        raise WrongUsage("name a setting to change", usage="see holdfast queue update --help")
    with connected(args) as client:
        client.update_queue(args.queue, **changes)
    if args.json:
        print_object({"queue": args.queue, "changes": changes})
    else:
        print_line(f"updated queue {args.queue}")
    return 0


def run_delete(args: argparse.Namespace) -> int:
    confirm(args, f"delete queue {args.queue} with all its messages and dead letters")
    with connected(args) as client:
        client.delete_queue(args.queue)
    if args.json:
        print_object({"queue": args.queue, "deleted": True})
    else:
        print_line(f"deleted queue {args.queue}")
    return 0


def run_purge(args: argparse.Namespace) -> int:
    where = f"group {args.group}" if args.group is not None else "every group"
    states = ["ready", "delayed", *["in flight"] * args.in_flight, *["dead"] * args.dead]
    confirm(args, f"end all messages of queue {args.queue} that are {', '.join(states)} in {where}")
    with connected(args) as client:
        done = client.purge_queue(args.queue, group=args.group, in_flight=args.in_flight, dead=args.dead)
    if args.json:
        print_object({"queue": args.queue, "group": args.group, "purged": done.count})
    else:
        print_line(f"purged {done.count} messages of queue {args.queue} in {where}")
    return 0


def _backoff(value: dict[str, Any]) -> str:
    match value["kind"]:
        case "none":
            return "none"
        case "fixed":
            return f"fixed, {value['base_ms']} ms"
        case kind:
            return f"{kind}, {value['base_ms']} ms up to {value['cap_ms']} ms"
