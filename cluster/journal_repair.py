"""Repair of a damaged journal: what can be read before the damage is kept, what was promised beyond it is marked.

The rule that keeps it honest: what is kept and what is added is written down, durably, before anything that proves it
is removed; from then on the journal does not open until the plan is carried out.
"""

import os
from contextlib import closing

from holdfast.cluster.disk import REAL_DISK, Disk
from holdfast.cluster.journal import Flush, Promise, Recovered
from holdfast.cluster.journal_errors import JournalDamaged, JournalRefused, JournalUnreadable, failing
from holdfast.cluster.journal_frames import (
    FrameReader,
    Identity,
    frame_bytes,
    header_bytes,
    read_header,
    records_in,
    salt_of,
    stamped,
    wipe,
)
from holdfast.cluster.journal_recovery import (
    PLAN,
    UNFINISHED,
    DurableLog,
    Scan,
    lock,
    require,
    segment_numbers,
    segment_path,
)
from holdfast.cluster.segments import SEGMENT_BYTES, Segments


def repair(directory: str, *, disk: Disk = REAL_DISK, segment_bytes: int = SEGMENT_BYTES) -> Recovered:
    """Keep what can be read before the damage, and mark what the node may have promised beyond it.

    Afterwards the journal opens, with `promise` set if entries were lost. Term and vote are those of the newest
    flush that can be read; if none can be behind the damage, or a later one was there, a vote may be forgotten, and
    `JournalRefused` says that only a new member name helps. What the disk cannot read is damage like any other. A
    crash or a failure (`JournalFailed`) at any moment leaves a journal that does not open and that this function
    finishes. A journal without damage is left as it is.
    """
    with failing(f"repairing the journal in {directory}", "repair it again"):
        require(directory, disk)
        with closing(lock(directory, disk)):
            if PLAN not in disk.names(directory):
                scan = Scan(directory, None, disk)
                try:
                    scan.run()
                    scan.check_begin()
                    return scan.log.outlined(scan.log.flush)
                except (JournalDamaged, JournalUnreadable) as damage:
                    _plan(scan, damage, directory, disk)
            return _carry_out(directory, disk, segment_bytes)


def _plan(scan: Scan, damage: JournalDamaged | JournalUnreadable, directory: str, disk: Disk) -> None:
    """Write down what is kept and what is added to it, before anything that proves it is removed."""
    scan.learn_identity()
    evidence = scan.evidence()
    if evidence is None:
        raise JournalRefused(
            f"{damage.path} at byte {damage.offset}: {damage.problem}, and the newest flush behind it cannot be read: "
            "this node's vote may be lost. Only a new member name helps: remove the member, add it under another name"
        ) from damage
    log, identity = scan.log, scan.known_identity()
    *_, (_, last, last_term, standing) = records_in(evidence)
    term, vote, promise = stamped(standing)
    if (last, last_term) != (log.last, log.last_term):
        promise = max(promise, Promise(index=last, term=last_term), key=lambda each: (each.term, each.index))
    records = log.settle(term, vote, promise)
    number, end = (log.segments[-1].number, log.segments[-1].end) if log.segments else (0, 0)
    path = os.path.join(directory, PLAN)
    with closing(disk.create(path + UNFINISHED)) as file:
        file.pwrite(header_bytes(identity, number) + frame_bytes(salt_of(identity, number), end, records), 0)
        file.sync()
    disk.rename(path + UNFINISHED, path)
    disk.sync_directory(directory)


def _carry_out(directory: str, disk: Disk, segment_bytes: int) -> Recovered:
    path = os.path.join(directory, PLAN)
    disk.sync_directory(directory)  # whoever wrote the plan may have died before its name was durable
    identity, kept, end, records = _read_plan(path, disk)
    for number in segment_numbers(directory, disk):
        if number > kept:
            disk.unlink(segment_path(directory, number))  # in any order; the folder is synced before the plan goes
    if kept:
        log = _cut(directory, identity, kept, end, records, disk, segment_bytes)
    else:
        log = DurableLog()
        *_, (_, _, _, standing) = records_in(records)
        log.settle(*stamped(standing))
        Segments.begun(directory, identity, disk, segment_bytes, log).close()
    disk.unlink(path)
    disk.sync_directory(directory)
    return log.outlined(log.flush)


def _read_plan(path: str, disk: Disk) -> tuple[Identity, int, int, bytes]:
    """Whose journal it is, the last segment that is kept, where it ends, and the records that are added."""
    with closing(disk.open(path)) as file:
        try:
            identity, kept, size = read_header(file, path)
            found = FrameReader(file, salt_of(identity, kept), path).frame(size)
        except (JournalDamaged, JournalUnreadable):
            found = None
    if found is None:
        raise JournalRefused(
            f"{path}, the plan of a repair that was begun, is unreadable, and what it was made from may be gone. Put "
            "back the copy of the folder from before the repair, and repair that. Without a copy this node's vote may "
            "be lost, and only a new member name helps: remove the member and add it under another name"
        )
    return identity, kept, *found


def _cut(
    directory: str, identity: Identity, kept: int, end: int, records: bytes, disk: Disk, segment_bytes: int
) -> DurableLog:
    """End the kept segment at `end` and add the records as one more flush."""
    with closing(disk.open(segment_path(directory, kept))) as file:
        wipe(file, end)
        file.sync()
    scan = Scan(directory, identity, disk)
    scan.run()
    with closing(Segments.resumed(scan, directory, disk, segment_bytes)) as segments:
        segments.write(Flush(0, scan.log.flush + 1, records))
    return scan.log
