"""`holdfast serve`: one node, in the foreground, until SIGTERM or Ctrl-C."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

# Flag, what it takes, what it means. The name of a flag is the key of the configuration with dashes.
FLAGS: Final = (
    ("--node", "NAME", "this node's name (default n1)"),
    ("--data", "DIR", "where journal and state live (default holdfast-data)"),
    ("--listen", "HOST:PORT", "for clients (default 127.0.0.1:7401)"),
    ("--peer-listen", "HOST:PORT", "for the other nodes (default 127.0.0.1:7421)"),
    ("--peers", "n1=HOST:PORT,…", "all nodes of the cluster, at its founding; without it the node is alone"),
    ("--secret-file", "FILE", "the cluster's secret; readable by nobody else"),
    ("--http", "HOST:PORT", "health, metrics and status pages (default: none)"),
    ("--fsync", "always|os", "os: a crash of the machine may lose what was confirmed"),
    ("--trace", "FILE", "append what was sent and synced, in order, to this file"),
    ("--max-connections", "N", "of clients (default 4096, fewer where the system allows few open files)"),
    ("--disk-reserve-bytes", "N", "with less disk left, messages are refused (default 256 MiB)"),
)
SWITCHES: Final = (
    ("--keep-log", "never let go of applied entries"),
    ("--insecure-plaintext", "listen beyond loopback although nothing is encrypted"),
)


def add_parser(subparsers: "Subparsers") -> None:
    parser = subparsers.add_parser(
        "serve",
        help="run one node",
        description="Runs one node in the foreground. Flags win over HOLDFAST_… variables, those over --config.",
    )
    for flag, takes, means in FLAGS:
        parser.add_argument(flag, metavar=takes, help=means)
    for flag, means in SWITCHES:
        parser.add_argument(flag, action="store_const", const="true", help=means)
    parser.add_argument("--config", metavar="FILE.toml", type=Path, help="settings by their names, dashes as _")
    parser.add_argument("--json-log", action="store_true", help="log lines as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from holdfast.cluster.config import load
    from holdfast.cluster.serve import run_node

    names = [flag.removeprefix("--").replace("-", "_") for flag, *_ in (*FLAGS, *SWITCHES)]
    flags = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    run_node(load(flags, os.environ, args.config), sys.stderr, as_json=args.json_log)
    return 0
