"""The committed log of a node as values: every entry with its commands, and the answers that the fold gave them.

Reads a node's folder beside it, running or not. Answers are not kept anywhere; they are made again, by folding the log
from its first entry on a store in memory, which gives the same ones (Q2). So there are answers as long as the whole log
is there: `keep_log`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.client.protocol.commands import Envelope
from holdfast.client.protocol.errors import Refused
from holdfast.client.protocol.replies import Answer
from holdfast.cluster import membership
from holdfast.cluster.consensus import BATCH
from holdfast.cluster.identity import journal_folder
from holdfast.cluster.membership import CONFIGURATION, Configuration
from holdfast.cluster.segments import Segments
from holdfast.cluster.state import applied_in
from holdfast.storage import machine
from holdfast.storage.entry import decode_entry
from holdfast.storage.memory_store import MemoryStore
from holdfast.storage.tables import TABLES

READ_BYTES = 4_194_304
FIRST_INDEX = 2  # the sentinel of a new log has 1


class LogIncomplete(Refused):
    """The log does not reach back as far as was asked."""


@dataclass(frozen=True, slots=True)
class Exported:
    """One entry; without commands where it carries none."""

    index: int
    term: int
    stamp_ms: int | None
    commands: tuple[tuple[Envelope, Answer | None], ...] = ()
    configuration: Configuration | None = None


def exported(data: Path, first: int = FIRST_INDEX, *, log: int = 0, answers: bool = True) -> Iterator[Exported]:
    """The committed entries from `first` on, as far as this node has applied them. Raises LogIncomplete."""
    segments = Segments.seen(str(journal_folder(data, log)))
    base = segments.recovered.base
    last = min(applied_in(data / f"log-{log}"), segments.recovered.last)
    begin = FIRST_INDEX if answers else max(first, FIRST_INDEX)
    if begin <= base:
        remedy = "run nodes with keep_log, or ask for no answers" if answers else f"begin at {base + 1}"
        raise LogIncomplete(f"the log of {data} begins after {base}; {remedy}")
    store = MemoryStore(tables=TABLES)
    at = begin
    while at <= last:
        entries, _ = segments.read_entries(at, READ_BYTES)
        for command, index, term in entries[: last - at + 1]:
            found = _exported(store if answers else None, command, index, term)
            if index >= first:
                yield found
        at += len(entries)


def _exported(store: MemoryStore | None, command: bytes, index: int, term: int) -> Exported:
    if command[:1] == CONFIGURATION:
        return Exported(index, term, None, configuration=membership.decode(command))
    if command[:1] != BATCH:
        return Exported(index, term, None)
    entry = decode_entry(index, memoryview(command)[1:])
    given: tuple[Answer | None, ...] = (None,) * len(entry.commands)
    if store is not None:
        given = store.transact(lambda txn: machine.apply(txn, entry)).answers
    envelopes = (envelope for envelope, _ in entry.commands)
    return Exported(index, term, entry.stamp_ms, tuple(zip(envelopes, given, strict=True)))
