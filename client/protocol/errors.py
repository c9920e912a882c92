"""The error tree: six families that answer "what now?", leaves that name the condition and carry its facts.

A leaf declares its facts as annotations and a text with the remedy; the wire carries its permanent code
and its facts, never a Python name. `happened` says what a caller in a cluster asks first.
"""

from typing import Any, ClassVar, Literal

Happened = Literal["no", "maybe"]


class HoldfastError(Exception):
    """Base of every error of Holdfast."""

    code: ClassVar[int] = 0
    happened: ClassVar[Happened] = "no"
    text: ClassVar[str] = "{message}"
    fact_names: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        own = cls.__dict__
        if "code" not in own:
            return
        cls.fact_names = tuple(cls.__annotations__)  # the own ones only, and also where they are lazy (3.14)
        clash = BY_CODE.setdefault(cls.code, cls)
        if clash is not cls:
            raise TypeError(f"{cls.__name__} and {clash.__name__} both have code {cls.code}")

    def __init__(self, message: str | None = None, **facts: Any) -> None:
        if facts.keys() != set(self.fact_names):
            raise TypeError(f"{type(self).__name__} has the facts {self.fact_names}, not {tuple(facts)}")
        for name, value in facts.items():
            setattr(self, name, value)
        self.message = message if message is not None else self.text.format(**facts)
        super().__init__(self.message)

    @property
    def facts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.fact_names}

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.facts == self.facts

    def __hash__(self) -> int:
        return hash((self.code, tuple(map(repr, self.facts.values()))))

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.facts))


BY_CODE: dict[int, type[HoldfastError]] = {}


def _rebuild(kind: type[HoldfastError], message: str, facts: dict[str, Any]) -> HoldfastError:
    return kind(message, **facts)


class Misuse(HoldfastError):
    """The call was wrong; the same call will never work."""


class Refused(HoldfastError):
    """The cluster said no; nothing was done."""


class Unavailable(HoldfastError):
    """It did not happen; retry freely."""


class Indeterminate(HoldfastError):
    """It may have happened; only the answer to a retry under the first identity tells."""

    happened = "maybe"


class ProtocolViolated(HoldfastError):
    """The peer broke the rules of the protocol; the connection is closed."""


class InvariantBroken(HoldfastError):
    """Our own bug, or damage: the node stops rather than go on, whatever it was in the middle of."""

    happened = "maybe"


# Misuse ------------------------------------------------------------------------------------------------


class BadName(Misuse):
    code = 101
    text = "{kind} name {name!r} is not allowed: letters, digits and . _ / -, first a letter or digit, up to {limit}"
    kind: str
    name: str
    limit: int


class BadValue(Misuse):
    code = 102
    text = "{field} {problem}"
    field: str
    problem: str


class BadHeader(Misuse):
    code = 103
    text = "header {name!r} {problem}"
    name: str
    problem: str


class MessageTooLarge(Misuse):
    code = 104
    text = "a message of {size} bytes is above {limit_name} = {limit}; send it smaller or raise the limit"
    size: int
    limit: int
    limit_name: str


class BatchTooLarge(Misuse):
    code = 105
    text = "a request of {size} is above {limit_name} = {limit}; split it"
    size: int
    limit: int
    limit_name: str


class BadFilter(Misuse):
    code = 106
    text = "the filter is wrong at position {position}"
    position: int


class DeadLetterCycle(Misuse):
    code = 107
    text = "dead letters of {queue!r} would come back to it through {target!r}; choose another dlq_queue"
    queue: str
    target: str


class ReservedName(Misuse):
    code = 108
    text = "{name!r} begins with a reserved prefix; choose another {kind}"
    kind: str
    name: str


# Refused -----------------------------------------------------------------------------------------------


class QueueNotFound(Refused):
    code = 201
    text = "there is no queue {queue}; create it first"
    queue: str | int


class QueueRecreated(Refused):
    code = 202
    text = "queue {name!r} was deleted and created again as {queue_id}; ask for it by name again"
    name: str
    queue_id: int


class QueueExists(Refused):
    code = 203
    text = "queue {name!r} exists already as {queue_id}; use update_queue to change it"
    name: str
    queue_id: int


class QueueReferenced(Refused):
    code = 204
    text = "queue {name!r} takes the dead letters of {referrer!r}; point that one elsewhere first"
    name: str
    referrer: str


class GroupNotFound(Refused):
    code = 205
    text = "queue {queue_id} has no group {group!r}; create it first"
    queue_id: int
    group: str


class GroupExists(Refused):
    code = 206
    text = "group {group!r} exists already; use update_group to change it"
    group: str


class LimitReached(Refused):
    code = 207
    text = "{limit_name} = {limit} is reached; remove some or raise the limit"
    limit_name: str
    limit: int


class QueueFull(Refused):
    code = 208
    text = "the queue is at {limit_name} = {limit}; retry when consumers have caught up, or raise the limit"
    limit_name: str
    limit: int


class SequenceGap(Refused):
    code = 209
    text = "after_seq is not the producer's high-water mark {high_water}; resend what comes between first"
    high_water: int


class IdempotencyConflict(Refused):
    code = 210
    text = "numbers at or below {high_water} are used; different_body={different_body}; continue above the mark"
    high_water: int
    different_body: bool


class ProducerFenced(Refused):
    code = 211
    text = "epoch {epoch} of this producer was opened since; stop, or open it again"
    epoch: int
    high_water: int


class ProducerUnknown(Refused):
    code = 212
    text = "producer {client_id!r} is not known here any more (producer_expiry_ms, or forgotten); open it again"
    client_id: str


class ProducerWindowFull(Refused):
    code = 213
    text = "{limit} requests of this producer are remembered; send done_below"
    limit: int


class SessionExpired(Refused):
    code = 214
    text = "the session is unknown or was idle too long; open a fresh one"


class SessionWindowFull(Refused):
    code = 215
    text = "{limit} replies of this session are remembered; send done_below"
    limit: int


class RequestConflict(Refused):
    code = 216
    text = "request {request_seq} was used with another content; number each request once"
    request_seq: int


class RequestSuperseded(Refused):
    code = 217
    text = "request {request_seq} is below done_below = {done_below}; its reply is forgotten"
    request_seq: int
    done_below: int


class LeaseNotFound(Refused):
    code = 218
    text = "lease {lease_id} was never issued"
    lease_id: int


class LeaseExpired(Refused):
    code = 219
    text = "lease {lease_id} is over; what it held may be with others"
    lease_id: int


class NotLeaseOwner(Refused):
    code = 220
    text = "lease {lease_id} belongs to another session"
    lease_id: int


class VersionNotInLease(Refused):
    code = 221
    text = "versions {first}-{last} are not in lease {lease_id}"
    lease_id: int
    first: int
    last: int


class AlreadySettled(Refused):
    code = 222
    text = "versions {first}-{last} of lease {lease_id} were settled before"
    lease_id: int
    first: int
    last: int


class InFlightLimit(Refused):
    code = 223
    text = "{limit_name} = {limit} messages are in flight; settle some first"
    limit_name: str
    limit: int


class AckHoleCapExceeded(Refused):
    code = 224
    text = "{holes} ack holes are above max_ack_holes = {cap}; settle the older messages first"
    holes: int
    cap: int
    next_due_ms: int | None


class TooLate(Refused):
    code = 225
    text = "version {version} was leased or settled in group {group!r}"
    version: int
    group: str


class NackDelayTooLong(Refused):
    code = 226
    text = "a delay of {delay_ms} ms is above max_nack_delay_ms = {limit}"
    delay_ms: int
    limit: int


class TransactionRefused(Refused):
    code = 227
    text = "item {item} of the transaction was refused: {problem}; nothing of it was done"
    item: int
    problem: str


class StageConflict(Refused):
    code = 228
    text = "part {part} attempt {attempt!r} chunk {chunk} was staged with another content"
    part: int
    attempt: str
    chunk: int


class StagedMissing(Refused):
    code = 229
    text = "part {part} attempt {attempt!r} is not staged as named; stage it again"
    part: int
    attempt: str


class TxnClosed(Refused):
    code = 230
    text = "the transaction is published; nothing more can be staged in it"


class TxnFenced(Refused):
    code = 231
    text = "app {app!r} belongs to the query {fence!r}; choose another txn.app"
    app: str
    fence: str


class VersionNotKept(Refused):
    code = 232
    text = "version {version} is not kept any more; the lowest kept is {lowest}"
    version: int
    lowest: int


class PrincipalDiffers(Refused):
    code = 233
    text = "the session was opened by another principal"


class OriginGone(Refused):
    code = 234
    text = "origin queue {queue!r} (id {queue_id}) is {problem}; what was moved before this step stays moved"
    queue: str
    queue_id: int
    problem: str


class RulesUnknown(Refused):
    code = 235
    text = "rules version {version} is not known; {supported} is the newest"
    version: int
    supported: int


class LeaseTooLong(Refused):
    code = 236
    text = "a visibility timeout of {timeout_ms} ms is above max_lease_ms = {limit}"
    timeout_ms: int
    limit: int


class NotHandedOver(Refused):
    code = 237
    text = "leadership stays where it is: {problem}"
    problem: str


# Unavailable -------------------------------------------------------------------------------------------


class Overloaded(Unavailable):
    code = 301
    text = "{limit_name} = {limit} is reached; retry after {retry_after_ms} ms"
    limit_name: str
    limit: int
    retry_after_ms: int


class NotLeader(Unavailable):
    code = 302
    text = "this node does not lead; the leader is {leader}"
    leader: str | None


class NoLeader(Unavailable):
    code = 303
    text = "no node leads now; retry"


class ConnectFailed(Unavailable):
    code = 304
    text = "no node answered at {addresses}"
    addresses: str


class BehindIndex(Unavailable):
    code = 305
    text = "this node has applied {applied}, and {min_index} was asked for; retry, or ask another node"
    applied: int
    min_index: int


class Withdrawn(Unavailable):
    code = 306
    text = "the request was withdrawn by its client while it waited"


# Indeterminate -----------------------------------------------------------------------------------------


class ConnectionLost(Indeterminate):
    code = 401
    text = "the connection was lost before the answer came"


class LeaderChanged(Indeterminate):
    code = 402
    text = "leadership changed before the answer was certain"


class OutcomeUnknown(Indeterminate):
    code = 403
    text = "an earlier attempt may have happened, and its answer is forgotten ({problem})"
    problem: str


# ProtocolViolated --------------------------------------------------------------------------------------


class BadFrame(ProtocolViolated):
    code = 501
    text = "bad frame: {problem}"
    problem: str


class VersionUnsupported(ProtocolViolated):
    code = 502
    text = "protocol version {version} is not spoken here; {low} to {high} are"
    version: int
    low: int
    high: int


# InvariantBroken ---------------------------------------------------------------------------------------


class BodyDamaged(InvariantBroken):
    code = 601
    text = "the stored body of queue {queue_id} version {version} fails its checksum"
    queue_id: int
    version: int


class StateBroken(InvariantBroken):
    code = 602
    text = "the state contradicts itself: {problem}"
    problem: str
