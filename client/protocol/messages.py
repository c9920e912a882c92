"""What travels in one frame: who speaks, which request it is, and the command, query or answer itself.

The forms of `Hello`, `Welcome` and `Declined` are the same in every version of the protocol, so that two
sides that share no version can still say so.
"""

from holdfast.client.protocol import limits
from holdfast.client.protocol.commands import Command
from holdfast.client.protocol.errors import BadValue, HoldfastError, Misuse, VersionUnsupported
from holdfast.client.protocol.queries import AnyQuery
from holdfast.client.protocol.quick import dataclass
from holdfast.client.protocol.replies import Answer
from holdfast.client.protocol.values import NO_SESSION, THE_LOG, LogId, SessionId, check_range, check_text

PROTOCOL_VERSION = 1  # the newest spoken here
PROTOCOL_OLDEST = 1  # the oldest still spoken here

NO_REQUEST = 0  # the request id of a Declined that answers no request, such as one to a Hello


@dataclass(frozen=True, slots=True)
class Hello:
    """A client's first frame: the versions it speaks, and its name and release for people to read."""

    versions: tuple[int, int] = (PROTOCOL_OLDEST, PROTOCOL_VERSION)
    client: str = "holdfast"

    def __post_init__(self) -> None:
        low, high = self.versions
        check_range("versions", high, low, limits.U32_MAX)
        check_text("client", self.client, limits.CLIENT_ID_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The node's answer: the version that both will speak, and where the client has come to."""

    version: int
    cluster_id: str
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A command. `request_id` is the client's own, to find the answer on this connection."""

    request_id: int
    command: Command
    log: LogId = THE_LOG
    session: SessionId = NO_SESSION
    request_seq: int = 0
    done_below: int = 0

    def __post_init__(self) -> None:
        if len(self.session) not in (0, limits.SESSION_BYTES):
            raise BadValue(field="session", problem=f"must have {limits.SESSION_BYTES} bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inquiry:
    """A query; `stale` asks this node whatever it leads, at or after the applied index `min_index` (Q1)."""

    request_id: int
    query: AnyQuery
    log: LogId = THE_LOG
    stale: bool = False
    min_index: int = 0


@dataclass(frozen=True, slots=True)
class Answered:
    """The fold's answer to a request, or the state's to an inquiry; refusals too (Q2)."""

    request_id: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class Declined:
    """The node's own no, which has no place in the log and leaves an earlier attempt open (A2)."""

    request_id: int
    error: HoldfastError


@dataclass(frozen=True, slots=True)
class Ping:
    token: int


@dataclass(frozen=True, slots=True)
class Pong:
    token: int


@dataclass(frozen=True, slots=True)
class Unusable:
    """A well-formed frame whose call was wrong: decline its request with the error, and read on."""

    request_id: int
    error: Misuse


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Nobody waits for this request any more. A Lease that still waits is declined with Withdrawn, at once.

    Whatever else it is, it is answered as if this had not come: what is in the log happens.
    """

    request_id: int


FromClient = Hello | Request | Inquiry | Ping | Withdraw
FromNode = Welcome | Answered | Declined | Pong


def choose_version(hello: Hello) -> int:
    """The newest version that both sides speak. Raises VersionUnsupported where there is none."""
    low, high = hello.versions
    chosen = min(high, PROTOCOL_VERSION)
    if chosen < max(low, PROTOCOL_OLDEST):
        raise VersionUnsupported(version=high, low=PROTOCOL_OLDEST, high=PROTOCOL_VERSION)
    return chosen
