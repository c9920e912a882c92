"""The log as a node's one thread sees it: entries, term, vote, and how much of that is on disk.

Nothing here touches a disk. A change becomes a record with a sequence number; `take` hands the records over as
one flush, `segments.py` makes it durable beside the loop, and `on_durable` says so. The rule that keeps it
honest: what a message or a commit may rely on is `durable_lsn` and `durable_index`, never what was only added.
Truncation is a record, not an edit, and nothing at or below the commit index is ever truncated.

In memory are the terms as runs and the bytes of the newest entries; older bytes are read back from disk.

`Journal` answers to the names that pysyncobj 0.3.17 calls (docs/raft.md). Item 0 is the sentinel, index and
term of the last compacted entry. The library reads only index and term of an item, so its command is empty.
"""

import struct
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NoReturn, TypeAlias

from holdfast.client.protocol.errors import InvariantBroken
from holdfast.client.protocol.limits import U63_MAX

MAX_COMMAND_BYTES: Final = 8 << 20  # batches are split at 1 MB, this is the hard limit above
FLUSH_BYTES: Final = 1 << 20  # a flush is closed once it has as much: a reader of old entries checks a whole one
WINDOW_BYTES: Final = 16 << 20  # two full send windows: a peer that keeps up is served from memory
OPEN_SLICE_MAX: Final = 4096  # the library copies the whole suffix otherwise (R19)
ENTRY_OVERHEAD_BYTES: Final = 24  # what an entry weighs beside its command, in a message and in `read`
_OBJECT_BYTES: Final = 64  # what CPython adds to a command that is kept: a window of tiny ones is bounded too

FIRST_INDEX: Final = 1  # the sentinel of a log that never had an entry; its term is 0

# Records: kind, two numbers, length of the payload; the payload. The numbers of a kind never change meaning.
RECORD: Final = struct.Struct("<BQQI")
ENTRY: Final = 1  # index, term, command
TRUNCATE: Final = 2  # first index that is gone, 0
BASE: Final = 3  # index, term: everything up to here is compacted
RESET: Final = 4  # index, term: the log is empty and goes on after this one
STAMP: Final = 5  # last index, its term, STANDING and the vote: how things stand; each flush ends with one
RUNS: Final = 6  # last index, 0, pairs of RUN: the terms of entries that are in older segments
STANDING: Final = struct.Struct("<QQQ")  # term, promised index, promised term
RUN: Final = struct.Struct("<QQ")  # first index, term

Entry: TypeAlias = tuple[bytes, int, int]  # command, index, term: the order in which pysyncobj has it
ReadEntries: TypeAlias = Callable[[int, int, int], tuple[list[Entry], int]]  # first, bytes, and last at most


class JournalBroken(InvariantBroken):
    """The log was asked for something that would break a promise: the node stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """How far a log may have reached before a repair cut it: until a leader has covered it, no vote and no ack."""

    index: int
    term: int


_NOTHING_PROMISED: Final = Promise(index=0, term=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What the files say: all of it is durable. `flush` is the number of the newest flush among them."""

    base: int = FIRST_INDEX
    base_term: int = 0
    last: int = FIRST_INDEX
    runs: tuple[tuple[int, int], ...] = ()  # (first index, term), ascending, of the entries after base
    term: int = 0
    vote: str | None = None
    promise: Promise | None = None
    flush: int = 0


NEVER_WRITTEN: Final = Recovered()


@dataclass(frozen=True, slots=True)
class Flush:
    """Records to be written as one frame and synced; then `on_durable(lsn)`, and only then the next flush."""

    lsn: int
    number: int
    records: bytes


class Outline:
    """A log without its bytes: where it begins and ends, who votes, and the term of every entry.

    The node's thread has one as its `Journal`, the disk's side one as what is durable; both change it only by
    the methods below, one for each kind of record.
    """

    def __init__(self, start: Recovered) -> None:
        self.base = start.base
        self.base_term = start.base_term
        self.last = start.last
        self.term = start.term
        self.vote = start.vote
        self.promise = start.promise
        self._firsts = [first for first, _ in start.runs]
        self._terms = [term for _, term in start.runs]
        self.last_term = self._terms[-1] if self._terms else self.base_term

    def term_at(self, index: int) -> int | None:
        """The term of the entry at `index`, the sentinel included; None if the log does not hold it."""
        if index <= self.base or index > self.last:
            return self.base_term if index == self.base else None
        if index >= self._firsts[-1]:
            return self.last_term
        return self._terms[bisect_right(self._firsts, index) - 1]

    def become(self, other: "Outline") -> None:
        """Be the same log as `other`, and share nothing with it."""
        self.base, self.base_term = other.base, other.base_term
        self.last, self.last_term = other.last, other.last_term
        self.term, self.vote, self.promise = other.term, other.vote, other.promise
        self._firsts, self._terms = other._firsts[:], other._terms[:]

    def outlined(self, flush: int) -> Recovered:
        """The whole of it as a value, after flush number `flush`."""
        return Recovered(
            base=self.base,
            base_term=self.base_term,
            last=self.last,
            runs=tuple(zip(self._firsts, self._terms, strict=True)),
            term=self.term,
            vote=self.vote,
            promise=self.promise,
            flush=flush,
        )

    def _stand(self, term: int, vote: str | None, promise: Promise) -> None:
        self.term, self.vote = term, vote
        self.promise = promise if promise.index else None

    def _append(self, index: int, term: int) -> None:
        if index != self.last + 1:
            raise JournalBroken(f"entry {index} does not follow {self.last}")
        if term != self.last_term or not self._firsts:
            if term < self.last_term:
                raise JournalBroken(f"entry {index} has term {term}, the one before it {self.last_term}")
            self._firsts.append(index)
            self._terms.append(term)
            self.last_term = term
        self.last = index

    def _truncate(self, first: int) -> None:
        if not self.base < first <= self.last:
            raise JournalBroken(f"truncation from {first} is outside of {self.base + 1} to {self.last}")
        keep = bisect_left(self._firsts, first)
        del self._firsts[keep:], self._terms[keep:]
        self.last = first - 1
        self.last_term = self._terms[-1] if keep else self.base_term

    def _compact(self, index: int, term: int) -> None:
        if not self.base < index <= self.last or self.term_at(index) != term:
            raise JournalBroken(f"no entry {index} of term {term} to compact to, the log is {self.base} to {self.last}")
        gone = bisect_right(self._firsts, index)  # runs that begin at or below; the last of them may reach beyond
        if gone and index < self.last and (gone == len(self._firsts) or self._firsts[gone] > index + 1):
            gone -= 1
            self._firsts[gone] = index + 1
        del self._firsts[:gone], self._terms[:gone]
        self.base, self.base_term = index, term

    def _reset(self, index: int, term: int) -> None:
        self.base = self.last = index
        self.base_term = self.last_term = term
        self._firsts, self._terms = [], []


class _Batch:
    """Records that become one flush; `last` is the last index of the present log once they are durable."""

    __slots__ = ("last", "lsn", "records")

    def __init__(self, records: list[bytes], lsn: int, last: int) -> None:
        self.records = records
        self.lsn = lsn
        self.last = last


class Journal(Outline):
    """The log of one node, for its one thread. Attributes are read by everyone and written here only.

    `on_append(command, index)` and `on_truncate(first)` are told after the log has changed; a `reset_to` tells
    neither, for whoever resets installs all that depended on the old log.
    """

    def __init__(
        self, start: Recovered = NEVER_WRITTEN, read: ReadEntries | None = None, *, window_bytes: int = WINDOW_BYTES
    ) -> None:
        """An empty log, or what was recovered; `read` is asked for durable entries that left the window."""
        super().__init__(start)
        self.commit = self.base
        self.lsn = self.durable_lsn = 0
        self.durable_index = self.last
        self.pending_bytes = 0  # of records that no flush has taken yet
        self.on_append: Callable[[bytes, int], None] | None = None
        self.on_truncate: Callable[[int], None] | None = None
        self._read_entries = read
        self._window: list[bytes] = []  # commands from _window_first to last
        self._window_first = self.last + 1
        self._window_bytes = 0
        self._window_max = window_bytes
        self._flush_number = start.flush
        self._records: list[bytes] = []  # of the batch that is still open
        self._records_bytes = 0
        self._closed: deque[_Batch] = deque()
        self._flight: _Batch | None = None

    @classmethod
    def recovered(cls, start: Recovered, read: ReadEntries, *, window_bytes: int = WINDOW_BYTES) -> "Journal":
        """The log that the files hold. Its commit index is the base until somebody knows better."""
        return cls(start, read, window_bytes=window_bytes)

    # What the library calls ------------------------------------------------------------------------------

    def add(self, command: bytes, index: int, term: int) -> None:
        """Append one entry; it counts for nothing until it is durable."""
        size = len(command)
        if size > MAX_COMMAND_BYTES:
            raise JournalBroken(f"entry {index} has {size} bytes, at most {MAX_COMMAND_BYTES} are written")
        self._append(index, term)
        self._window.append(command)
        self._window_bytes += size + _OBJECT_BYTES
        self._records.append(RECORD.pack(ENTRY, index, term, size))
        self._records.append(command)
        self._recorded(RECORD.size + size)
        if self.on_append is not None:
            self.on_append(command, index)

    def deleteEntriesFrom(self, offset: int) -> None:  # noqa: N802, the library's name
        """Cut the log before item `offset`. At or below the commit index that would lose committed data (R3)."""
        first = self.base + offset
        if first > self.last:
            return
        if first <= self.commit:
            raise JournalBroken(f"truncation from {first} would remove committed entries, commit index {self.commit}")
        self._truncate(first)
        self._cut_durable(first - 1)
        self._cut_window(first)
        self._record(TRUNCATE, first, 0)
        if self.on_truncate is not None:
            self.on_truncate(first)

    def setCurrentTerm(self, term: int, vote: str | None) -> None:  # noqa: N802, the library's name
        """Enter a term, or vote in it. A term never goes back, and a vote in it is given once."""
        if term == self.term and vote == self.vote:
            return
        if term < self.term:
            raise JournalBroken(f"term goes back from {self.term} to {term}")
        if term == self.term and self.vote is not None:
            raise JournalBroken(f"term {term} has a vote for {self.vote} and would get one for {vote}")
        self.term, self.vote = term, vote
        self._recorded(0)  # the stamp that closes the batch tells it

    def setRaftCommitIndex(self, index: int) -> None:  # noqa: N802, the library's name
        """Nothing at or below `index` is truncated from now on. Not written: it is found again from the peers."""
        if index > self.commit:
            self.commit = index

    def getRaftCommitIndex(self) -> int:  # noqa: N802, the library's name
        return self.commit

    def getCurrentTerm(self) -> int:  # noqa: N802, the library's name
        return self.term

    def getVotedForNodeId(self) -> str | None:  # noqa: N802, the library's name
        return self.vote

    def __len__(self) -> int:
        return self.last - self.base + 1

    def __getitem__(self, item: int | slice) -> Entry | list[Entry]:
        """Index and term of items, without their commands; an open slice ends after `OPEN_SLICE_MAX` of them."""
        if item == -1:
            return (b"", self.last, self.last_term)
        if item == 0:
            return (b"", self.base, self.base_term)
        if isinstance(item, slice):
            start, stop, _ = item.indices(len(self))
            if item.stop is None:
                stop = min(stop, start + OPEN_SLICE_MAX)
            return [(b"", index, self._known_term(index)) for index in range(self.base + start, self.base + stop)]
        index = self.base + item if item >= 0 else self.last + 1 + item
        if not self.base <= index <= self.last:
            raise IndexError(item)
        return (b"", index, self._known_term(index))

    def onOneSecondTimer(self) -> None:  # noqa: N802, the library's name
        pass

    def _destroy(self) -> None:
        pass

    def deleteEntriesTo(self, offset: int) -> NoReturn:  # noqa: N802, the library's name
        raise JournalBroken(f"the library may not compact the log (to item {offset})")

    def clear(self) -> NoReturn:
        raise JournalBroken("the library may not clear the log")

    # What the node calls ---------------------------------------------------------------------------------

    def read(self, index: int, max_bytes: int, last: int = U63_MAX) -> tuple[list[Entry], int]:
        """Entries from `index` to `last`, at least one and else no more than `max_bytes`, and their size.

        Empty past the end. What the window no longer has is read from disk, and then no further than to it.
        """
        if index <= self.base:
            raise JournalBroken(f"entry {index} is compacted, the log begins after {self.base}")
        if index < self._window_first:
            return self._read_older(index, max_bytes, last)
        entries: list[Entry] = []
        size = 0
        for at in range(index - self._window_first, len(self._window)):  # a slice would copy the rest on every call
            command = self._window[at]
            weight = len(command) + ENTRY_OVERHEAD_BYTES
            if entries and (size + weight > max_bytes or index > last):
                break
            entries.append((command, index, self._known_term(index)))
            size += weight
            index += 1
        return entries, size

    def compact(self, index: int) -> None:
        """Forget entries up to `index`, which becomes the sentinel; the caller has them in a durable snapshot."""
        if index <= self.base:
            return
        if index > min(self.commit, self.durable_index):
            raise JournalBroken(f"no compaction to {index}: committed {self.commit}, durable {self.durable_index}")
        term = self._known_term(index)
        self._compact(index, term)
        if index >= self._window_first:
            self._drop_window(index + 1)
        self._record(BASE, index, term)

    def reset_to(self, index: int, term: int) -> None:
        """A snapshot of everything up to `index` was installed: the log is empty and goes on after it."""
        if index < self.commit:
            raise JournalBroken(f"reset to {index} would remove committed entries, commit index {self.commit}")
        self._reset(index, term)
        self.commit = index
        self._cut_durable(index)
        self._window, self._window_first, self._window_bytes = [], index + 1, 0
        self._record(RESET, index, term)

    def promise_kept(self) -> None:
        """A leader has covered all that this log may have promised before its repair: the mark goes."""
        if self.promise is not None:
            self.promise = None
            self._recorded(0)

    def take(self) -> Flush | None:
        """The next flush; None if nothing waits or the flush before is not yet durable."""
        if self._flight is not None:
            return None
        if not self._closed:
            if self.lsn == self.durable_lsn:
                return None
            self._close()
        batch = self._flight = self._closed.popleft()
        self._flush_number += 1
        records = b"".join(batch.records)
        batch.records = []
        self.pending_bytes -= len(records)
        return Flush(batch.lsn, self._flush_number, records)

    def on_durable(self, lsn: int) -> None:
        """The flush that ends with `lsn` is on disk."""
        batch = self._flight
        if batch is None or batch.lsn != lsn:
            raise JournalBroken(f"flush {lsn} is said to be durable and was not taken")
        self._flight = None
        self.durable_lsn = lsn
        self.durable_index = batch.last
        if self._window_bytes > self._window_max:
            self._trim_window()

    # Steps -----------------------------------------------------------------------------------------------

    def _known_term(self, index: int) -> int:
        term = self.term_at(index)
        if term is None:
            raise JournalBroken(f"entry {index} is outside of the log, {self.base} to {self.last}")
        return term

    def _record(self, kind: int, index: int, term: int) -> None:
        self._records.append(RECORD.pack(kind, index, term, 0))
        self._recorded(RECORD.size)

    def _recorded(self, size: int) -> None:
        self.lsn += 1
        self.pending_bytes += size
        self._records_bytes += size
        if self._records_bytes >= FLUSH_BYTES:
            self._close()

    def _close(self) -> None:
        """End the open batch with a stamp: any flush alone tells how far the log went, and the vote.

        Several terms in one flush leave one stamp, the newest: nothing that depends on an older one was sent.
        """
        stamp = stamp_of(self)
        self.pending_bytes += len(stamp)
        self._records.append(stamp)
        self._closed.append(_Batch(self._records, self.lsn, self.last))
        self._records, self._records_bytes = [], 0

    def _cut_durable(self, last: int) -> None:
        """What is above `last` is no longer of this log, though a flush that holds it may yet become durable."""
        self.durable_index = min(self.durable_index, last)
        for batch in self._closed:
            batch.last = min(batch.last, last)
        if self._flight is not None:
            self._flight.last = min(self._flight.last, last)

    def _cut_window(self, first: int) -> None:
        kept = max(0, first - self._window_first)
        gone = self._window[kept:]
        self._window_bytes -= sum(map(len, gone)) + _OBJECT_BYTES * len(gone)
        del self._window[kept:]
        self._window_first = min(self._window_first, first)

    def _trim_window(self) -> None:
        """Let durable bytes go until half of the window is free, so that this is rare and each byte moved once."""
        excess = self._window_bytes - self._window_max // 2
        first = self._window_first
        for command in self._window:
            if excess <= 0 or first > self.durable_index:
                break
            excess -= len(command) + _OBJECT_BYTES
            first += 1
        self._drop_window(first)

    def _drop_window(self, first: int) -> None:
        gone = self._window[: first - self._window_first]
        self._window_bytes -= sum(map(len, gone)) + _OBJECT_BYTES * len(gone)
        del self._window[: len(gone)]
        self._window_first = first

    def _read_older(self, index: int, max_bytes: int, last: int) -> tuple[list[Entry], int]:
        if self._read_entries is None:
            raise JournalBroken(f"entry {index} is not in memory, and there is no disk to read it from")
        entries, size = self._read_entries(index, max_bytes, last)
        # The disk may not know yet of a truncation that waits to be written; from the window on, memory rules.
        while entries and entries[-1][1] >= self._window_first:
            size -= len(entries.pop()[0]) + ENTRY_OVERHEAD_BYTES
        if [(at, self.term_at(at)) for at in range(index, index + len(entries))] != [entry[1:] for entry in entries]:
            raise JournalBroken(f"the disk has other entries than the log from {index} on")
        if not entries:
            raise JournalBroken(f"the disk has no entry {index}")
        return entries, size


def stamp_of(log: Outline) -> bytes:
    """The record that says how things stand: end of the log, term, vote, and what was promised before a repair."""
    promise = log.promise or _NOTHING_PROMISED
    standing = STANDING.pack(log.term, promise.index, promise.term) + (log.vote or "").encode()
    return RECORD.pack(STAMP, log.last, log.last_term, len(standing)) + standing
