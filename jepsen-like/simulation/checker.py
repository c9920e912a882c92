"""What must hold whatever fails, checked as it happens; it knows every node and every client and believes none.

Every entry applied at an index is the same on all nodes, in term, bytes, answers and the state behind it; a term has
one leader; what a node answers is what the fold answered at that place; what a client was told never precedes what
anybody was told before it asked. What is left for the end is kept here: `judge` has it.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from holdfast.client.protocol.commands import Command, Envelope, Lease, Produce
from holdfast.client.protocol.errors import HoldfastError, OutcomeUnknown
from holdfast.client.protocol.messages import Inquiry, Request
from holdfast.client.protocol.queries import AnyQuery
from holdfast.client.protocol.replies import Answer, Failed, Leased, Reply
from holdfast.cluster.journal import Entry
from holdfast.jepsen.simulation.scheduler import Scheduler
from holdfast.storage.entry import decode_entry

NO_PLACE = (0, 0)


class Violation(Exception):
    """A promise was broken; the seed repeats it."""


@dataclass(slots=True, eq=False)
class Call:
    """One call of one client, from its beginning to its one outcome."""

    what: Command | AnyQuery
    stale: bool
    began_s: float
    needed: tuple[int, int]  # the furthest place that anybody knew of when it began
    bound_s: float | None = None  # it must be over so soon
    outcome: Answer | HoldfastError | None = None


@dataclass
class Checker:
    """The checks of one log."""

    scheduler: Scheduler
    chosen: dict[int, tuple[int, bytes]] = field(default_factory=dict)  # index -> term, command
    answers: dict[int, tuple[Answer, ...]] = field(default_factory=dict)  # index -> those of the fold
    digests: dict[int, bytes] = field(default_factory=dict)  # index -> digest of the state after it
    formed_s: dict[tuple[int, int], float] = field(default_factory=dict)  # index, term -> when it was proposed
    unlogged: dict[int, list[tuple[Command | AnyQuery, Answer]]] = field(default_factory=dict)  # read at an index
    delivered: dict[int, list[tuple[Lease, Leased]]] = field(default_factory=dict)  # read at an index
    calls: list[Call] = field(default_factory=list)
    told: tuple[int, int] = NO_PLACE  # the furthest place that any client was told of
    leaders: dict[int, str] = field(default_factory=dict)  # term -> name
    counts: Counter[str] = field(default_factory=Counter)

    # What nodes do

    def formed(self, indexes: Iterable[int], term: int) -> None:
        for index in indexes:
            self.formed_s[index, term] = self.scheduler.now_s

    def applied(self, node: str, entry: Entry, answers: tuple[Answer, ...], digest: bytes) -> None:
        command, index, term = entry
        chosen = self.chosen.setdefault(index, (term, command))
        if chosen != (term, command):
            raise Violation(f"{node} applied {term, command[:20]} at {index}, others {chosen[0], chosen[1][:20]}")
        if not _same(self.answers.setdefault(index, answers), answers):
            raise Violation(f"{node} answered entry {index} with {answers}, others with {self.answers[index]}")
        self.same_state(node, index, digest)

    def same_state(self, node: str, index: int, digest: bytes) -> None:
        """Also for a snapshot that was installed: its whole history is in the digest."""
        if self.digests.setdefault(index, digest) != digest:
            raise Violation(f"the state of {node} at {index} differs from that of others")

    def elected(self, node: str, term: int) -> None:
        self.counts["elections"] += 1
        if self.leaders.setdefault(term, node) != node:
            raise Violation(f"{node} and {self.leaders[term]} both lead in term {term}")

    def gave(self, applied: int, asked: Request | Inquiry, outcome: Answer | HoldfastError) -> None:
        """The outcome for one attempt of a node that has applied so much, whether or not it ever arrives."""
        if not isinstance(outcome, Answer):
            self.counts[f"declined {type(outcome).__name__}"] += 1
            return
        place, reply = outcome.place, outcome.reply
        what = asked.command if isinstance(asked, Request) else asked.query
        self.counts["answers"] += 1
        if place.position < 0:
            self.unlogged.setdefault(place.index, []).append((what, outcome))
            return
        bare = replace(outcome, reply=replace(reply, batches=())) if isinstance(reply, Leased) else outcome
        if not _same((bare,), self.answers[place.index][place.position : place.position + 1]):
            raise Violation(f"{asked} was answered with {bare}; the fold said {self.answers[place.index]}")
        command, _ = decode_entry(place.index, self.chosen[place.index][1][1:]).commands[place.position]
        if isinstance(asked, Request) and _identity(asked) != _identity(command):
            raise Violation(f"{asked} was answered from {place}, where {command} is")
        if isinstance(reply, Leased) and isinstance(what, Lease):
            self.delivered.setdefault(applied, []).append((what, reply))

    # What clients see

    def began(self, what: Command | AnyQuery, stale: bool, bound_s: float | None) -> Call:
        call = Call(what, stale, self.scheduler.now_s, self.told, bound_s)
        self.calls.append(call)
        return call

    def finished(self, call: Call, outcome: Answer | HoldfastError) -> None:
        """The one outcome of a call (I26): behind all that was told before it began."""
        if call.outcome is not None:
            raise Violation(f"{call.what} has a second outcome: {outcome}")
        call.outcome = outcome
        took_s = self.scheduler.now_s - call.began_s
        if call.bound_s is not None and took_s > call.bound_s:
            raise Violation(f"{call.what} took {took_s:.2f} s, {call.bound_s:.2f} s is the bound: {outcome}")
        if not isinstance(outcome, Answer):
            self.counts[f"failed {type(outcome).__name__}"] += 1
            return
        self.counts[f"told {type(outcome.reply).__name__}"] += 1
        if isinstance(outcome.reply, Failed):
            self.counts[f"refused {type(outcome.reply.error).__name__}"] += 1
        place = outcome.place
        self.counts["acknowledged"] += place.position >= 0
        self.counts["reads"] += place.position < 0
        # What was read at an index saw all of its entry.
        known = (place.index, place.position) if place.position >= 0 else (place.index, 1 << 31)
        if known < call.needed and not call.stale:
            problem = f"is answered at {place}, but {call.needed} was told before it began"
            raise Violation(f"{call.what} {problem}: {outcome.reply}")
        self.told = max(self.told, (place.index, place.position))

    def forgotten(self, call: Call) -> None:
        """Its client is no more: nobody knows what became of it."""
        self.counts["forgotten"] += 1
        call.outcome = OutcomeUnknown(problem="the client died")

    def nothing_lost(self) -> None:
        """What a client was told stands in the log that all nodes agree on."""
        for call in self.calls:
            if call.outcome is None:
                raise Violation(f"{call.what} has no outcome")
            index = call.outcome.place.index if isinstance(call.outcome, Answer) else 0
            if index and index not in self.chosen:
                raise Violation(f"{call.what} was answered at {index}, where nothing is: {call.outcome}")


def _identity(asked: Request | Envelope) -> tuple[object, ...]:
    """What tells a request from all others, attempts of its own aside."""
    command = asked.command
    if isinstance(command, Produce):
        return asked.session, asked.request_seq, command.client_id, command.first_seq, bytes(command.body)
    return asked.session, asked.request_seq, type(command)


def _same(answers: tuple[Answer, ...], others: tuple[Answer, ...]) -> bool:
    """Errors are equal by their facts."""
    return len(answers) == len(others) and all(
        one.place == other.place and plain(one.reply) == plain(other.reply)
        for one, other in zip(answers, others, strict=True)
    )


def plain(reply: Reply) -> object:
    if isinstance(reply, Failed):
        return type(reply.error).__name__, reply.error.facts
    return reply
