"""Sending the log and taking it: one peer's progress, what of a message the library may see, read barriers. Pure.

The library would cut a follower's log at every repeated message and believe a commit index that was never compared;
so its input is rewritten here (R3, R4), and sending is ours (R10, R11, R18 … R20).
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.cluster.messages import AppendEntries, LogEntry

ReadCallback = Callable[[int | None], None]  # the index to wait for, or None: leadership was lost


class Log(Protocol):
    """What is asked of a journal here."""

    @property
    def last(self) -> int: ...
    @property
    def last_term(self) -> int: ...
    def term_at(self, index: int) -> int | None: ...


@dataclass(slots=True)
class Progress:
    """What the leader knows about one peer in this leadership, beside the library's own maps."""

    epoch: int
    acked: int = 0  # the highest index that the peer has on disk; the library may be told less (R8)
    barrier: int = 0  # the newest read barrier that it echoed
    wants_snapshot: bool = False
    in_flight_bytes: int = 0
    _in_flight: deque[tuple[int, int]] = field(default_factory=deque)  # last index of a message, its size

    def sent(self, last: int, size_bytes: int) -> None:
        self._in_flight.append((last, size_bytes))
        self.in_flight_bytes += size_bytes

    def received(self, index: int) -> None:
        """The peer has seen up to `index`: room in the window, whether it counts or not."""
        while self._in_flight and self._in_flight[0][0] <= index:
            self.in_flight_bytes -= self._in_flight.popleft()[1]

    def restart(self, epoch: int) -> None:
        """Begin a new attempt to find the match point: nothing that was sent before counts as on its way."""
        self.epoch = epoch
        self.wants_snapshot = False
        self._in_flight.clear()
        self.in_flight_bytes = 0


@dataclass(frozen=True, slots=True)
class Fitted:
    """An append as the library may see it; `ack_cap` bounds the next index of the answer."""

    prev_index: int
    prev_term: int
    entries: tuple[LogEntry, ...]
    commit_index: int
    ack_cap: int | None


def fit(message: AppendEntries, prev_index: int, log: Log) -> Fitted:
    """Drop what we already have, so that the library truncates at a conflict and nowhere else.

    1. The leader sends 3 … 14 in two messages, both are acknowledged, it commits.
    2. The first message comes again. The library would cut at 7 and wait for the second.
    3. The leader dies. 8 … 14, promised to clients, are gone (R3).

    Without the cut the library's bound on the commit index, our last entry, no longer is one that the leader has
    compared: behind the message may stand a loser of an earlier term. So the commit index is clipped (R4).
    """
    entries = message.entries
    if log.term_at(prev_index) != message.prev_term:
        return Fitted(prev_index, message.prev_term, entries, message.commit_index, None)  # it will be rejected
    verified = prev_index + len(entries)
    commit_index = min(message.commit_index, verified)
    known = _known(entries, log)
    if known == len(entries):
        return Fitted(log.last, log.last_term, (), commit_index, verified + 1)
    if known:
        _, prev_index, prev_term = entries[known - 1]
        return Fitted(prev_index, prev_term, entries[known:], commit_index, None)
    return Fitted(prev_index, message.prev_term, entries, commit_index, None)


def _known(entries: tuple[LogEntry, ...], log: Log) -> int:
    """How many of the first entries our log has, by index and term."""
    for count, (_, index, term) in enumerate(entries):
        if log.term_at(index) != term:
            return count
    return len(entries)


class Barriers:
    """Reads that wait until a majority has confirmed, since they came, that we still lead (R15)."""

    def __init__(self) -> None:
        self.newest = 0  # the number that every message to a peer carries
        self.unannounced = False  # no round of messages has been made for the newest number yet
        self._open = False  # no message with the newest number has left yet, so further reads may share it
        self._waiting: list[tuple[int, int, ReadCallback]] = []

    def add(self, commit_index: int, callback: ReadCallback) -> None:
        if not self._open:
            self._open = self.unannounced = True
            self.newest += 1
        self._waiting.append((self.newest, commit_index, callback))

    def __len__(self) -> int:
        return len(self._waiting)

    def messages_leave(self) -> None:
        """An echo of the newest number says nothing about reads that come from now on."""
        self._open = False

    def passed(
        self, voters: Collection[str], me: str, progress: Mapping[str, Progress]
    ) -> list[tuple[int, ReadCallback]]:
        """Those that a majority of voters has let through, with the index that each must see applied."""
        if not self._waiting:
            return []
        echoed = sorted((self.newest if name == me else progress[name].barrier for name in voters), reverse=True)
        confirmed = echoed[len(echoed) // 2]
        passed = [(index, callback) for number, index, callback in self._waiting if number <= confirmed]
        self._waiting = [waiting for waiting in self._waiting if waiting[0] > confirmed]
        return passed

    def drop_all(self) -> list[ReadCallback]:
        waiting, self._waiting = self._waiting, []
        return [callback for _, _, callback in waiting]
