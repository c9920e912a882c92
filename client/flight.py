"""What is on its way: a call with its attempts, and the numbers of a session (A1).

An attempt is *open* from the moment it is written until something shows that it did not happen; a lost
connection shows nothing. Whether a call may have happened is therefore a count, not a guess (A2).
"""

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from holdfast.client.events import Address, CallId
from holdfast.client.nodes import Peer
from holdfast.client.protocol.commands import (
    Abort,
    Command,
    Lease,
    OpenSession,
    Produce,
    Publish,
    Release,
    Stage,
    TimeStep,
    Touch,
)
from holdfast.client.protocol.errors import (
    ConnectFailed,
    ConnectionLost,
    HoldfastError,
    IdempotencyConflict,
    NoLeader,
    NotLeader,
    OutcomeUnknown,
    Overloaded,
    ProducerFenced,
)
from holdfast.client.protocol.queries import LeaderQuery
from holdfast.client.protocol.values import NO_SESSION, SessionId

WINDOW = 256  # A1: replies that a session keeps; a new cluster's limit

_COMMANDS: tuple[type, ...] = get_args(Command)


class Numbering:
    """One session and its numbers (A1). A number is in use from `take` to `release`."""

    def __init__(self, session: SessionId) -> None:
        self.session = session
        self.opened: Literal["no", "asked", "yes"] = "no"
        self._next = 1
        self._used: dict[int, None] = {}  # ascending: numbers are taken in order

    @property
    def done_below(self) -> int:
        """All lower numbers have their outcome: the cluster may forget their replies."""
        return next(iter(self._used), self._next)

    @property
    def full(self) -> bool:
        """One more number would make the cluster keep more replies than it does."""
        return self._next - self.done_below >= WINDOW

    def take(self) -> int:
        number = self._next
        self._used[number] = None
        self._next += 1
        return number

    def release(self, number: int) -> None:
        self._used.pop(number, None)


@dataclass(slots=True, eq=False)
class Pending:
    """One call from its beginning to its one outcome."""

    call: CallId
    what: Command | LeaderQuery
    deadline_s: float
    asked_s: float  # when it was last sent, or first wanted
    stale: bool = False
    min_index: int = 0
    numbering: Numbering | None = None  # with `seq` its identity, from the first attempt on
    seq: int = 0
    open: int = 0  # attempts that may have happened
    lost: bool = False  # one of them went down with its connection
    at: dict[Address, int] = field(default_factory=dict)  # where an answer may still come from: request ids
    queued: bool = False  # it waits to be sent
    setbacks: int = 0  # how often it was sent back, for its backoff
    retry_at_s: float = 0.0
    refusal: HoldfastError | None = None  # what a node said last
    silent: bool = False  # nobody waits for it: the core asked it itself, or its caller has gone
    unwanted: bool = False  # its caller has gone
    taken_back: bool = False  # it is withdrawn, to be asked again
    lease: Lease | None = None  # an unwanted one, while `what` is but its placeholder

    @property
    def is_opening(self) -> bool:
        """Whether the core asked this itself."""
        return isinstance(self.what, OpenSession)

    @property
    def needs_number(self) -> bool:
        """Whether a session must know it: all that changes, but what has an identity of its own (A1)."""
        match self.what:
            case Produce():
                return self.what.client_id is None
            case OpenSession() | Touch() | TimeStep() | Stage():
                return False
            case what:
                return isinstance(what, _COMMANDS)

    @property
    def may_have_happened(self) -> bool:
        return self.open > 0 and isinstance(self.what, _COMMANDS)

    @property
    def is_left(self) -> bool:
        """Whether it is not sent again: its caller has gone, and there is nothing to undo."""
        return self.unwanted and self.lease is None

    @property
    def is_placeholder(self) -> bool:
        """Whether an unwanted lease is kept from happening, or found out to have happened."""
        return self.lease is not None and self.what is not self.lease

    @property
    def waits(self) -> bool:
        """Whether it may be parked, and if so can be asked again as another request."""
        parks = isinstance(self.what, Lease) and self.what.wait_ms > 0 and not self.unwanted
        return parks and len(self.at) == self.open == 1

    @property
    def undoes_a_lease(self) -> bool:
        return self.silent and (self.lease is not None or isinstance(self.what, Release))

    def wait_on(self, now_s: float) -> None:
        """It was taken back and has not happened: another request, for what is left of its wait."""
        if isinstance(self.what, Lease):
            self.what = replace(self.what, wait_ms=max(self.what.wait_ms - int((now_s - self.asked_s) * 1000), 1))
        self.forget_identity()

    def forget_identity(self) -> None:
        """The fold said that nothing was done under it: the next attempt is a first one."""
        if self.numbering is not None and self.seq:
            self.numbering.release(self.seq)
        if not self.is_opening:
            self.numbering, self.seq = None, 0
        self.open, self.lost = 0, False


def unresolved(pending: Pending, error: HoldfastError) -> OutcomeUnknown | None:
    """What a refusal by the fold is where it does not speak for every attempt; none where it does.

    A refused produce under its own numbers is not remembered, so an earlier attempt that is still on its way may be
    written after this one was refused: of a full queue when there is room again, of a gap when it is closed. An
    earlier one may also have been written and, by a later incarnation of the producer, forgotten.
    """
    if pending.open <= 1 or not isinstance(pending.what, Produce) or pending.what.client_id is None:
        return None
    if isinstance(error, IdempotencyConflict):  # its number is used, for ever
        return None
    if isinstance(error, ProducerFenced) and error.high_water < pending.what.first_seq:
        return None
    unknown = OutcomeUnknown(problem=f"a retry was answered with {type(error).__name__}")
    unknown.__cause__ = error
    return unknown


def gave_up(pending: Pending, peers: dict[Address, Peer], *, connected: bool, window_full: bool) -> HoldfastError:
    """What is known of a call that is over without an answer: Indeterminate only if it may have happened."""
    if pending.may_have_happened:
        advice = f"{type(pending.what).__name__} may have happened; {how_to_find_out(pending.what)}"
        if pending.lost:
            return ConnectionLost(f"the connection was lost before the answer came: {advice}")
        return OutcomeUnknown(f"no answer came in time: {advice}", problem="no answer came in time")
    if pending.needs_number and pending.numbering is None and window_full and pending.refusal is None:
        return Overloaded(
            f"{WINDOW} requests of this session are unanswered; this one was not sent",
            limit_name="session_window",
            limit=WINDOW,
            retry_after_ms=0,
        )
    if isinstance(pending.refusal, NotLeader):
        return NoLeader()
    if pending.refusal is not None:
        return pending.refusal
    if connected:
        return NoLeader("a node is connected, but no leader answered in time; retry")
    problems = [peer.problem for peer in peers.values() if peer.problem is not None]
    return problems[0] if problems else ConnectFailed(addresses=",".join(peers))


def how_to_find_out(what: Command | LeaderQuery) -> str:
    """For people, at the end of an Indeterminate: what tells whether it happened."""
    match what:
        case Produce() if what.client_id is not None:
            return "produce the same again under the same client_id and client_seq: it is answered, not doubled"
        case Produce():
            return "peek at the queue, or number your messages (client_id, client_seq) to ask again safely"
        case Stage():
            return "stage the same chunk again: it is kept once"
        case Publish() | Abort():
            return "ask txn_status; the same again is done once"
        case Lease():
            return "what it may hold comes back after its visibility timeout"
        case _:
            return "ask for the state of what it names (queue, stats, explain)"


def envelope_of(pending: Pending) -> tuple[SessionId, int, int]:
    """Session, number and done_below as a request carries them."""
    numbering = pending.numbering
    if numbering is None:
        return NO_SESSION, 0, 0
    return numbering.session, pending.seq, numbering.done_below if pending.seq else 0
