"""Commands that arrived together become one stamped entry, and each of them gets its outcome exactly once (R16).

Pure: the owner forms entries, proposes their bytes, and reports what became of each index. A command is in one of
three places: *queued*, where it has certainly not happened; *on its way* in an entry of this leadership; or *in doubt*,
in an entry of a leadership that is over, until the log says whether that entry is part of it.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from holdfast.client.protocol.codec import encode_envelope
from holdfast.client.protocol.commands import Command, Envelope, Produce, Stage, Transaction
from holdfast.client.protocol.errors import (
    BatchTooLarge,
    HoldfastError,
    LeaderChanged,
    NotLeader,
    Overloaded,
    StateBroken,
)
from holdfast.client.protocol.replies import Answer
from holdfast.cluster.consensus import BATCH
from holdfast.cluster.messages import ENTRY_BYTES
from holdfast.storage.entry import encode_entry
from holdfast.storage.state import content_hash

T = TypeVar("T", bound=Command)
Token = Hashable  # whoever waits: the owner's word for one request
Outcome = tuple[Token, Answer | HoldfastError]

RETRY_AFTER_MS = 100  # a full queue is some tens of entries: about as long as a slow disk takes for a few of them
LOG_OVERHEAD_BYTES = 16_384  # what the log adds to a request as it came: envelope, and a hash for each of 256 produces
COMMAND_BYTES = ENTRY_BYTES - LOG_OVERHEAD_BYTES  # of one request; an entry can hold it, with its head


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    queued_commands: int = 16_384  # more than a thousand connections with full windows
    queued_bytes: int = 67_108_864  # 64 MiB: a second of a fast disk
    entry_bytes: int = 1_048_576  # an entry is split here, so that one does not delay all behind it
    entry_commands: int = 4_096  # so that one apply stays short
    entries_in_flight: int = 6  # beyond a few, pipelining gains nothing and group commit loses


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """An entry that is formed: propose `data`, then report with `proposed` or `not_proposed`."""

    data: bytes
    tokens: list[Token | None]  # in the order of the commands; None: nobody waits any more


@dataclass(slots=True)
class _Queued:
    envelope: Envelope
    size_bytes: int


@dataclass(slots=True)
class _Waiting:
    index: int
    term: int
    tokens: list[Token | None] = field(repr=False)


class Batcher:
    """The commands of one log on one node, from admission to outcome. Every list of outcomes is in log order."""

    def __init__(self, bounds: Bounds | None = None) -> None:
        self.bounds = bounds or Bounds()
        self.held = False  # while leadership is handed over: commands are taken, entries are not formed
        self._leader: str | None = None
        self._queue: OrderedDict[Token, _Queued] = OrderedDict()
        self._queued_bytes = 0
        self._formed: Proposal | None = None
        self._on_its_way: list[_Waiting] = []
        self._in_doubt: list[_Waiting] = []
        self._places: dict[Token, tuple[list[Token | None], int]] = {}  # of those that are in an entry

    def __len__(self) -> int:
        """How many wait for an outcome."""
        return len(self._queue) + len(self._places)

    def __contains__(self, token: Token) -> bool:
        """Whether this one waits for an outcome here."""
        return token in self._queue or token in self._places

    @property
    def queued(self) -> int:
        """Commands that wait for their entry."""
        return len(self._queue)

    @property
    def queued_bytes(self) -> int:
        return self._queued_bytes

    @property
    def entries_in_flight(self) -> int:
        return len(self._on_its_way)

    @property
    def in_doubt(self) -> int:
        """Entries of lost leaderships that the log has not decided yet."""
        return len(self._in_doubt)

    # In

    def submit(self, envelope: Envelope, token: Token, size_bytes: int | None = None, *, first: bool = False) -> None:
        """Take a command for one of the next entries. Raises Overloaded or BatchTooLarge; nothing was taken then.

        `size_bytes` is that of the request as it came, header and body; without it the command is measured. `first`:
        before all that is queued, for a TimeStep, so that what came with it is judged by the right time.
        """
        if size_bytes is None:
            envelope = _hashed(envelope)
            size_bytes = len(encode_envelope(envelope))
        if token in self:
            raise StateBroken(problem=f"{token!r} waits already")
        if size_bytes > COMMAND_BYTES:
            raise BatchTooLarge(size=size_bytes, limit=COMMAND_BYTES, limit_name="COMMAND_BYTES")
        bounds = self.bounds
        if len(self._queue) >= bounds.queued_commands:
            raise _overloaded("queued_commands", bounds.queued_commands)
        if self._queue and self._queued_bytes + size_bytes > bounds.queued_bytes:
            raise _overloaded("queued_bytes", bounds.queued_bytes)
        self._queue[token] = _Queued(envelope, size_bytes)
        if first:
            self._queue.move_to_end(token, last=False)
        self._queued_bytes += size_bytes

    def can_form(self) -> bool:
        """Whether `next_entry` would give one: only then is a stamp worth taking."""
        return bool(self._queue) and self._has_room()

    def next_entry(self, stamp_ms: int, even_empty: bool = False) -> Proposal | None:
        """What is queued, as far as one entry takes it; None if nothing is, or enough is on its way already.

        What arrives meanwhile forms the next one. `even_empty`: an entry for the sake of its stamp (T2).
        """
        if not self._has_room() or not (self._queue or even_empty):
            return None
        tokens: list[Token | None] = []
        envelopes = []
        size_bytes = 0
        while self._queue and len(tokens) < self.bounds.entry_commands:
            token, queued = next(iter(self._queue.items()))
            size_bytes += queued.size_bytes
            if tokens and size_bytes > self.bounds.entry_bytes:
                break
            self._unqueue(token)
            self._places[token] = (tokens, len(tokens))
            tokens.append(token)
            envelopes.append(_hashed(queued.envelope))
        self._formed = Proposal(BATCH + encode_entry(stamp_ms, envelopes), tokens)
        return self._formed

    def proposed(self, proposal: Proposal, index: int, term: int) -> None:
        """The entry stands in our log, at this place."""
        self._take_formed(proposal)
        self._on_its_way.append(_Waiting(index, term, proposal.tokens))

    def not_proposed(self, proposal: Proposal, leader: str | None) -> list[Outcome]:
        """The entry was not taken, for we do not lead: it has not happened."""
        self._take_formed(proposal)
        self._leader = leader
        return self._refuse(proposal.tokens)

    # Out

    def applied(self, index: int, term: int, answers: Sequence[Answer] = ()) -> list[Outcome]:
        """The entry at `index` is applied; it was proposed in `term`. To be told of every index, in order."""
        outcomes: list[Outcome] = []
        for waiting in self._decided(index, term):
            if waiting.index < index:
                raise StateBroken(problem=f"index {waiting.index} was passed over; {index} is applied")
            if (waiting.index, waiting.term) == (index, term):
                outcomes += self._answer(waiting, answers)
            else:
                outcomes += self._refuse(waiting.tokens)
        return outcomes

    def installed(self, index: int, term: int) -> list[Outcome]:
        """A snapshot took the place of all up to `index`, of `term`: what was applied there is not known here."""
        outcomes: list[Outcome] = []
        for waiting in self._decided(index, term):
            outcomes += self._refuse(waiting.tokens) if waiting.index > index else self._doubt(waiting.tokens)
        return outcomes

    def lost_leadership(self, leader: str | None) -> list[Outcome]:
        """What is queued did not happen; what is on its way is in doubt, and is decided as the log goes on."""
        self._leader = leader
        self._in_doubt += self._on_its_way
        self._on_its_way = []
        outcomes = self._refuse_formed()
        queued = list(self._queue)
        self._queue.clear()
        self._queued_bytes = 0
        return outcomes + [(token, NotLeader(leader=leader)) for token in queued]

    def abandon(self, token: Token) -> HoldfastError | None:
        """Nobody waits for this one any more, by disconnect or deadline. What to say if somebody asks.

        Overloaded: it was queued, and will not be proposed. LeaderChanged: it is in the log, and may happen. None: it
        is not known here, so it had its outcome.
        """
        if token in self._queue:
            self._unqueue(token)
            return _overloaded("queued_commands", self.bounds.queued_commands)
        place = self._places.pop(token, None)
        if place is None:
            return None
        tokens, position = place
        tokens[position] = None
        return LeaderChanged()

    def _has_room(self) -> bool:
        if self._formed is not None:
            raise StateBroken(problem="an entry was formed, and nobody said whether it was proposed")
        return not self.held and len(self._on_its_way) < self.bounds.entries_in_flight

    def _unqueue(self, token: Token) -> None:
        self._queued_bytes -= self._queue.pop(token).size_bytes

    def _take_formed(self, proposal: Proposal) -> None:
        if proposal is not self._formed:
            raise StateBroken(problem="another entry was formed last")
        self._formed = None

    def _refuse_formed(self) -> list[Outcome]:
        formed, self._formed = self._formed, None
        return self._refuse(formed.tokens) if formed is not None else []

    def _decided(self, index: int, term: int) -> list[_Waiting]:
        """Take out what an entry of `term` at `index` decides: all up to there, and above it what is of older terms.

        Terms grow along a log, so an older one cannot follow. Without that, entries beyond the end of the new leader's
        log would wait for as long as it takes to grow there.
        """

        def is_decided(waiting: _Waiting) -> bool:
            return waiting.index <= index or waiting.term < term

        decided = [waiting for waiting in (*self._in_doubt, *self._on_its_way) if is_decided(waiting)]
        if decided:
            self._in_doubt = [waiting for waiting in self._in_doubt if not is_decided(waiting)]
            self._on_its_way = [waiting for waiting in self._on_its_way if not is_decided(waiting)]
        return decided

    def _answer(self, waiting: _Waiting, answers: Sequence[Answer]) -> list[Outcome]:
        if len(answers) != len(waiting.tokens):
            problem = f"entry {waiting.index} carried {len(waiting.tokens)} commands and got {len(answers)} answers"
            raise StateBroken(problem=problem)
        self._forget(waiting.tokens)
        return [(token, answer) for token, answer in zip(waiting.tokens, answers, strict=True) if token is not None]

    def _refuse(self, tokens: Iterable[Token | None]) -> list[Outcome]:
        """It has certainly not happened: retry freely."""
        return [(token, NotLeader(leader=self._leader)) for token in self._forget(tokens)]

    def _doubt(self, tokens: Iterable[Token | None]) -> list[Outcome]:
        return [(token, LeaderChanged()) for token in self._forget(tokens)]

    def _forget(self, tokens: Iterable[Token | None]) -> list[Token]:
        left = [token for token in tokens if token is not None]
        for token in left:
            del self._places[token]
        return left


def _overloaded(limit_name: str, limit: int) -> Overloaded:
    return Overloaded(limit_name=limit_name, limit=limit, retry_after_ms=RETRY_AFTER_MS)


def _hashed(envelope: Envelope) -> Envelope:
    """With the content hash of every batch: computed once, by the node that proposes (P2)."""
    command = envelope.command
    if isinstance(command, Transaction):
        items = tuple(_with_hash(item) for item in command.items)
        if any(new is not old for new, old in zip(items, command.items, strict=True)):
            return replace(envelope, command=replace(command, items=items))
        return envelope
    hashed: Command = _with_hash(command)
    return envelope if hashed is command else replace(envelope, command=hashed)


def _with_hash(command: T) -> T:
    if isinstance(command, Produce | Stage) and not command.content_hash:
        return replace(command, content_hash=content_hash(command.columns, command.body))
    return command
