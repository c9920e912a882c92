"""What is to be sent to peers, and what of it may leave now.

Each journal record has a sequence number, and a message is tagged with the newest one of its moment: what a message
depends on is on disk before anybody sees it.
"""

from collections import deque

from holdfast.cluster.journal import Journal
from holdfast.cluster.messages import Message

HELD_MAX = 10_000  # messages that wait for our disk: what is lost is asked for again, memory is not


class Outbox:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._ready: list[tuple[str, Message]] = []
        self._held: deque[tuple[int, str, Message]] = deque()

    def send(self, peer: str, message: Message) -> None:
        """Hold a message until every journal record that exists now is on disk.

        So a term, a vote and entries are durable before anybody sees what depends on them (R9).
        """
        if self._journal.lsn > self._journal.durable_lsn:
            if len(self._held) < HELD_MAX:
                self._held.append((self._journal.lsn, peer, message))
        else:
            self._ready.append((peer, message))

    def send_now(self, peer: str, message: Message) -> None:
        """For a leader's entries alone: they may overtake its own disk, for nobody counts it before that."""
        self._ready.append((peer, message))

    def release(self, lsn: int) -> None:
        """The journal is durable up to `lsn`."""
        while self._held and self._held[0][0] <= lsn:
            self._ready.append(self._held.popleft()[1:])

    def drop(self, peer: str) -> None:
        """A session is over: what was meant for it must not be spoken into the next (R27)."""
        self._ready = [each for each in self._ready if each[0] != peer]
        self._held = deque(each for each in self._held if each[1] != peer)

    def take(self) -> list[tuple[str, Message]]:
        ready, self._ready = self._ready, []
        return ready
