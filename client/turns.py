"""What a worker's core and its shells tell each other, and what the core knows of a message's turn.

A *turn* is one delivery of a message to this worker, from the lease's answer until it is settled or lost.
"""

from dataclasses import dataclass as mutable
from dataclasses import field
from typing import Literal

from holdfast.client.events import Outcome
from holdfast.client.message import Delivered, MessageId
from holdfast.client.protocol import commands as c
from holdfast.client.protocol import queries as q
from holdfast.client.protocol.quick import dataclass
from holdfast.client.protocol.values import LeaseId

SAFE_PART = 0.98  # of what was granted: the rest is for clocks that differ, and for a handler to notice
EXTEND_PART = 0.5  # of what was granted is left when the lease is extended: an election and some retries fit in

# What a turn is known by when it comes again: the message, the generation of the group, and how often it was redriven.
TurnKey = tuple[MessageId, int, int]


# Values --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a worker works. Times are checked by the commands that they go into."""

    group: str = "default"
    concurrency: int = 1
    prefetch: int = 1
    wait_ms: int = 20_000
    visibility_timeout_ms: int | None = None  # the queue's
    max_run_ms: int | None = None  # how long a handler may run; none: as long as the queue lets a lease be extended
    remember: int = 10_000  # completed turns that are known when they come again
    timeout_s: float = 30.0  # of one request


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to become of a message. `settled`: its handler's own transaction has settled it already."""

    kind: Literal["ack", "nack", "release", "settled"]
    delay_ms: int | None = None
    not_before_ms: int | None = None
    error: str | None = None
    dead: bool = False


ACK, RELEASE, SETTLED = Verdict("ack"), Verdict("release"), Verdict("settled")


# Actions: Ask answers with Answered; Start is followed by one Ended, whatever else happens to the turn.


@dataclass(frozen=True, slots=True)
class Ask:
    ask: int
    what: c.Command | q.LeaderQuery
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Withdraw:
    """The answer is not wanted any more: end the request. It still has its one Answered, whatever that says."""

    ask: int


@dataclass(frozen=True, slots=True)
class Start:
    turn: int
    message: Delivered
    lease_id: int


@dataclass(frozen=True, slots=True)
class Lose:
    """The handler works in vain: end it if possible. Its verdict will be ignored."""

    turn: int


@dataclass(frozen=True, slots=True)
class Note:
    """For people, in the log."""

    text: str


Action = Ask | Withdraw | Start | Lose | Note


# Events


@dataclass(frozen=True, slots=True)
class Answered:
    ask: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Ended:
    """A handler has ended, with this verdict."""

    turn: int
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Stop:
    """Begin nothing more. What runs may end until `by_s`, and is given up then; a second Stop can only be sooner."""

    by_s: float


@dataclass(frozen=True, slots=True)
class Woken:
    """The time of `wake_at_s` has come; earlier is harmless."""


Event = Answered | Ended | Stop | Woken


# What is held ---------------------------------------------------------------------------------------------


@mutable(slots=True, eq=False)
class Held:
    id: LeaseId
    counts_begun: bool
    safe_s: float = 0.0  # until then nobody else can have it
    extend_at_s: float = 0.0
    capped: bool = False  # it has met the longest lease, and ends at `safe_s`
    extending: bool = False  # an Extend is on its way
    setbacks: int = 0
    turns: dict[int, "Turn"] = field(default_factory=dict)  # by version; those that are not over

    def granted(self, asked_s: float, granted_s: float) -> None:
        """It lasts that long from some moment after it was asked for."""
        self.safe_s = max(self.safe_s, asked_s + granted_s * SAFE_PART)
        self.extend_at_s = self.safe_s - granted_s * EXTEND_PART


@mutable(slots=True, eq=False)
class Turn:
    number: int
    lease: Held
    message: Delivered
    state: Literal["waiting", "beginning", "running", "settling", "over"] = "waiting"
    started_s: float = 0.0
    perhaps: bool = False  # it may be settled already: an answer got lost

    @property
    def key(self) -> TurnKey:
        return self.message.id, self.message.group_generation, self.message.redrives

    @property
    def needs_its_lease(self) -> bool:
        return self.state in ("waiting", "beginning", "running")
