"""A stopped node's journal, looked at and spoilt from outside."""

from collections.abc import Iterator
from pathlib import Path

from holdfast.client.cli.main import main
from holdfast.cluster.disk import REAL_DISK
from holdfast.cluster.identity import journal_folder
from holdfast.cluster.journal_frames import HEAD_BYTES, FrameReader, read_header, salt_of
from holdfast.cluster.journal_recovery import Scan

SEGMENT = "0000000001.wal"


def segment(data: Path) -> Path:
    """The only file of a young journal."""
    return journal_folder(data) / SEGMENT


def last_frame(data: Path) -> tuple[int, int]:
    """Where it begins, and how long it is."""
    scan = Scan(str(journal_folder(data)), None, REAL_DISK)
    scan.run()
    assert scan.newest_frame is not None
    begin, records = scan.newest_frame
    return begin, HEAD_BYTES + len(records)


def frames(data: Path) -> Iterator[tuple[int, bytes]]:
    """Where each begins, and its records; the opening is the first."""
    path = str(segment(data))
    file = REAL_DISK.open(path)
    try:
        identity, number, at = read_header(file, path)
        reader = FrameReader(file, salt_of(identity, number), path)
        while (found := reader.frame(at)) is not None:
            yield at, found[1]
            at += HEAD_BYTES + len(found[1])
    finally:
        file.close()


def flip(data: Path, at: int) -> None:
    """One bit of the byte at this place of the journal."""
    with segment(data).open("r+b") as file:
        file.seek(at)
        [byte] = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def damage_before_the_last_frame(data: Path) -> None:
    """In a frame that another one follows: what was acknowledged cannot be read."""
    begin, _ = last_frame(data)
    flip(data, begin - 10)


def damage_message(data: Path, payload: bytes) -> None:
    """In the frame that brought this message."""
    [at] = [at for at, records in frames(data) if payload in records]
    flip(data, at + HEAD_BYTES + 3)


def repair(data: Path) -> int:
    """`holdfast node repair`, and its exit code."""
    return main(["node", "repair", "--data", str(data), "--yes", "--json"])
