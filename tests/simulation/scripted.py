"""Real Rafts whose messages go where a test sends them, whose disks sync when it says so, and whose time it tells.

Messages pass through the real codec. Nothing happens by itself: a hazard is written down as the sequence of events
that makes it.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from random import Random

from holdfast.cluster import membership, messages
from holdfast.cluster.consensus import BATCH
from holdfast.cluster.events import Role
from holdfast.cluster.journal import Journal, Recovered
from holdfast.cluster.leading import Window
from holdfast.cluster.membership import Configuration
from holdfast.cluster.messages import AppendEntries, Message
from holdfast.cluster.raft import Raft, use_library_clock

Letter = tuple[str, str, Message]  # from, to, what
Log = Iterable[tuple[int, bytes]]  # term, command; the first one is at index 2, or behind the base

NOTHING: Log = ()
BIG = Window(batch_bytes=1 << 20)


def log(*runs: tuple[int, int], command: bytes = BATCH + b"x") -> list[tuple[int, bytes]]:
    """`(term, number of entries)` one behind the other."""
    return [(term, command) for term, count in runs for _ in range(count)]


class Scripted:
    """Nodes by name, all connected. `letters` are those that have left and are on their way."""

    def __init__(
        self,
        logs: Mapping[str, Log],
        *,
        term: int = 1,
        bases: Mapping[str, tuple[int, int]] | None = None,
        configuration: Configuration | None = None,
        window: Window = BIG,
    ) -> None:
        self.now_s = 1_000.0
        self.letters: list[Letter] = []
        self.names = list(logs)
        self._window = window
        ruling = configuration or membership.of(self.names)
        self.nodes = {
            name: self._node(name, logs[name], term, (bases or {}).get(name, (1, 0)), ruling) for name in logs
        }
        for here in self.names:
            for there in self.names:
                if here != there:
                    self.nodes[here].connected(there)

    def _node(self, name: str, entries: Log, term: int, base: tuple[int, int], ruling: Configuration) -> Raft:
        journal = Journal(Recovered(base=base[0], base_term=base[1], last=base[0]))
        for entry_term, command in entries:
            journal.add(command, journal.last + 1, entry_term)
        journal.setCurrentTerm(term, None)
        sync(journal)
        return Raft(
            me=name,
            journal=journal,
            clock=lambda: self.now_s,
            rng=Random(name),
            applied=base[0],
            applied_term=base[1],
            configuration=ruling,
            window=self._window,
        )

    def __getitem__(self, name: str) -> Raft:
        return self.nodes[name]

    def role(self, name: str) -> Role:
        return self.nodes[name].role

    # Disks, time, messages

    def sync(self, name: str) -> None:
        """Everything that this node has written is on its disk; what may leave, leaves."""
        node = self.nodes[name]
        flush = node.begin_flush()
        while flush is not None:
            node.durable(flush.lsn)
            flush = node.begin_flush()
        self.collect(name)

    def collect(self, name: str) -> None:
        for peer, message in self.nodes[name].take_ready():
            self.letters.append((name, peer, messages.decode(messages.encode(message))[1]))

    def turn(self, name: str) -> None:
        self.nodes[name].step()
        self.sync(name)

    def beat(self, name: str) -> None:
        """A heartbeat is due on this node."""
        self.now_s += 0.06
        self.turn(name)

    def take(self, sender: str, receiver: str, kind: type[Message] | None = None) -> list[Letter]:
        """Take letters out of the post."""
        found = [
            letter
            for letter in self.letters
            if letter[:2] == (sender, receiver) and (kind is None or isinstance(letter[2], kind))
        ]
        self.letters = [letter for letter in self.letters if letter not in found]
        return found

    def give(self, letters: Iterable[Letter]) -> None:
        for sender, receiver, message in letters:
            self.nodes[receiver].deliver(sender, message)
            self.turn(receiver)

    def exchange(self, one: str, other: str, rounds: int = 20) -> int:
        """Carry everything between two nodes until they have nothing to say; how many letters that were."""
        count = 0
        for _ in range(rounds):
            letters = self.take(one, other) + self.take(other, one)
            if not letters:
                break
            count += len(letters)
            self.give(letters)
        return count

    def elect(self, name: str, *voters: str) -> None:
        """Make `name` leader by these votes; nobody gets an entry of it yet."""
        for _ in range(8):
            if self.nodes[name].role == Role.LEADER:
                return
            self.now_s += 0.6
            self.turn(name)
            for _ in range(6):
                for voter in voters:
                    asked = [letter for letter in self.letters if letter[:2] == (name, voter)]
                    self.give(self._without_appends(asked))
                    self.give(self.take(voter, name))
        raise AssertionError(f"{name} is {self.nodes[name].role.name} in term {self.nodes[name].term}")

    def _without_appends(self, letters: list[Letter]) -> list[Letter]:
        asked = [letter for letter in letters if not isinstance(letter[2], AppendEntries)]
        self.letters = [letter for letter in self.letters if letter not in asked]
        return asked

    def lead(self, name: str, *followers: str) -> None:
        """Elect and bring these followers level."""
        self.elect(name, *followers)
        for _ in range(3):
            for follower in followers:
                self.exchange(name, follower)
            self.beat(name)
        for follower in followers:
            self.exchange(name, follower)


@contextmanager
def scripted(logs: Mapping[str, Log], **options: object) -> Iterator[Scripted]:
    """A `Scripted` whose time is also the library's."""
    script: list[Scripted] = []
    former = use_library_clock(lambda: script[0].now_s if script else 1_000.0)
    try:
        script.append(Scripted(logs, **options))  # type: ignore[arg-type]
        yield script[0]
    finally:
        use_library_clock(former)


def sync(journal: Journal) -> None:
    flush = journal.take()
    while flush is not None:
        journal.on_durable(flush.lsn)
        flush = journal.take()
