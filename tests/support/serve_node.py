"""`holdfast serve` as a test wants it: the same command line, with a wall clock or a snapshot policy of the test's own.

    python serve_node.py [--wall-offset-file FILE] [--snapshot-log-bytes N] serve …

The file holds how many milliseconds the node's wall clock is off, and may change at any time. None of this is in the
product: what the command line calls is replaced here, in this process.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from holdfast.client.cli.main import main
from holdfast.cluster import serve
from holdfast.cluster.snapshots import Policy


def wall_of(file: Path | None) -> Callable[[], int]:
    def wall_ms() -> int:
        offset_ms = int(file.read_text()) if file is not None else 0
        return time.time_ns() // 1_000_000 + offset_ms

    return wall_ms


def policy_of(log_bytes: int | None) -> Policy | None:
    """Snapshots after so many bytes of log, behind which nothing is kept for those who are away."""
    return None if log_bytes is None else Policy(log_bytes_min=log_bytes, reserve_entries=0)


if __name__ == "__main__":
    seams = argparse.ArgumentParser(allow_abbrev=False)
    seams.add_argument("--wall-offset-file", type=Path)
    seams.add_argument("--snapshot-log-bytes", type=int)
    given, rest = seams.parse_known_args()
    serve.run_node = partial(
        serve.run_node, wall_ms=wall_of(given.wall_offset_file), policy=policy_of(given.snapshot_log_bytes)
    )
    sys.exit(main(rest))
