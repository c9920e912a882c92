"""One replica as a process of its own: `python -m tests.oracle.follow LOG FOLDER KIND RESTART_EVERY`.

Folds a log that was written before, restarting as often as it is told, and prints what another replica of the same log
must print too: after each entry the digest of the state and a hash of the answers.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from xxhash import xxh3_64_hexdigest

from holdfast.client.cli.replica import Replica
from holdfast.client.protocol.codec import encode_answer


def write_log(path: Path, entries: list[tuple[int, bytes]]) -> None:
    with path.open("wb") as file:
        for index, data in entries:
            file.write(index.to_bytes(8, "big") + len(data).to_bytes(4, "big") + data)


def read_log(path: Path) -> Iterator[tuple[int, bytes]]:
    data = path.read_bytes()
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at + 8 : at + 12], "big")
        yield int.from_bytes(data[at : at + 8], "big"), data[at + 12 : at + 12 + size]
        at += 12 + size


def follow(log: Path, folder: Path, kind: str, restart_every: int) -> Iterator[str]:
    """Restarts come as plain reopenings and, every third time, as a copy made from a snapshot."""
    replica = Replica("lmdb" if kind == "lmdb" else "memory", folder / "0")
    restarts = 0
    for index, data in read_log(log):
        folded = replica.fold(index, data)
        answers = b"".join(part for answer in folded.answers for part in encode_answer(answer))
        yield f"{index} {replica.digest():032x} {xxh3_64_hexdigest(answers)}"
        if index % restart_every == 0:
            restarts += 1
            replica = replica.copied(folder / str(restarts)) if restarts % 3 == 0 else replica.reopened()
    replica.close()


if __name__ == "__main__":
    for line in follow(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])):
        print(line)
