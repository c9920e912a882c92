"""One client's connection as the node sees it, without I/O: greeting, frames, and how much it may have open.

Bytes go in by `feed`, which gives what is to be done; answers go in by `answer` and `decline`; what is to be sent comes
out by `take`. A client that breaks the protocol gets nothing more: its connection is closed. One that only asks for
too much is told so, and goes on.
"""

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.client.protocol import codec
from holdfast.client.protocol.errors import BadFrame, HoldfastError, Overloaded, ProtocolViolated, Unavailable
from holdfast.client.protocol.frames import Buffer, FrameReader, write_frame
from holdfast.client.protocol.messages import (
    NO_REQUEST,
    Answered,
    Declined,
    FromClient,
    FromNode,
    Hello,
    Inquiry,
    Ping,
    Pong,
    Request,
    Unusable,
    Welcome,
    Withdraw,
    choose_version,
)
from holdfast.client.protocol.replies import Answer

REQUESTS_OPEN = 1_024  # of one connection: four full sessions' worth
RETRY_AFTER_MS = 50

Asked = Request | Inquiry | Withdraw
Sized = tuple[Asked, int]  # with the bytes that it took


@dataclass(frozen=True, slots=True)
class Greeting:
    """Who the client has come to."""

    cluster_id: str
    node: str


class Connection:
    """One connection. After `closing` is true nothing is read any more; what is unsent may still go out."""

    def __init__(self, greet: Callable[[], Greeting], requests_open: int = REQUESTS_OPEN) -> None:
        """`greet` is asked when the client says hello; what it raises of Unavailable turns the client away."""
        self.closing = False
        self.error: HoldfastError | None = None  # why it is closing
        self.client = ""  # what it calls itself, for people
        self._greet_by = greet
        self._requests_open = requests_open
        self._frames = FrameReader()
        self._frames_read = 0
        self._open: set[int] = set()
        self._unsent: list[Buffer] = []
        self._unsent_bytes = 0

    @property
    def greeted(self) -> bool:
        return bool(self.client)

    @property
    def open_requests(self) -> tuple[int, ...]:
        """The requests that have no answer yet."""
        return tuple(self._open)

    @property
    def unfinished(self) -> int:
        """The number of the frame that has begun and not ended; 0 if there is none."""
        return self._frames_read + 1 if self._frames.pending_bytes else 0

    @property
    def unfinished_bytes(self) -> int:
        """How much of it has come."""
        return self._frames.pending_bytes

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    @property
    def unsent_bytes(self) -> int:
        return self._unsent_bytes

    def feed(self, data: bytes) -> list[Sized]:
        """What the client asks for with these bytes. Never raises: what is wrong with them closes the connection."""
        if self.closing:
            return []
        asked: list[Sized] = []
        try:
            for frame in self._frames.feed(data):
                self._frames_read += 1
                found = self._read(codec.decode_from_client(frame.header, frame.body))
                if found is not None:
                    asked.append((found, len(frame.header) + len(frame.body)))
        except (ProtocolViolated, Unavailable) as error:
            self._send(Declined(NO_REQUEST, error))
            self.closing, self.error = True, error
        return asked

    def answer(self, request_id: int, answer: Answer) -> None:
        """The fold's or the state's answer. One that does not fit a frame is declined by its limit instead."""
        try:
            self._finish(request_id, Answered(request_id, answer))
        except HoldfastError as error:
            self._finish(request_id, Declined(request_id, error))

    def decline(self, request_id: int, error: HoldfastError) -> None:
        """The node's own no."""
        self._finish(request_id, Declined(request_id, error))

    def take(self) -> list[Buffer]:
        """The buffers to send now, in order."""
        unsent, self._unsent, self._unsent_bytes = self._unsent, [], 0
        return unsent

    def _read(self, message: FromClient | Unusable) -> Asked | None:
        if not self.greeted:
            self._greet(message)
            return None
        match message:
            case Request() | Inquiry():
                return self._admit(message)
            case Withdraw(request_id=request_id):
                return message if request_id in self._open else None
            case Unusable(request_id=request_id, error=error):
                self._send(Declined(request_id, error))
            case Ping(token=token):
                self._send(Pong(token))
            case Hello():
                raise BadFrame(problem="a second hello")
        return None

    def _greet(self, message: FromClient | Unusable) -> None:
        if not isinstance(message, Hello):
            raise BadFrame(problem="the first frame is no hello")
        version = choose_version(message)
        greeting = self._greet_by()
        self.client = message.client
        self._send(Welcome(version=version, cluster_id=greeting.cluster_id, node=greeting.node))

    def _admit(self, asked: Request | Inquiry) -> Asked | None:
        request_id = asked.request_id
        if request_id in self._open or request_id == NO_REQUEST:
            raise BadFrame(problem=f"request id {request_id} is in use")
        if len(self._open) >= self._requests_open:
            limit = self._requests_open
            refusal = Overloaded(limit_name="requests_open", limit=limit, retry_after_ms=RETRY_AFTER_MS)
            self._send(Declined(request_id, refusal))
            return None
        self._open.add(request_id)
        return asked

    def _finish(self, request_id: int, message: FromNode) -> None:
        """An answer to a request that is not open any more is not sent: its client has gone on."""
        if request_id in self._open:
            self._send(message)
            self._open.discard(request_id)

    def _send(self, message: FromNode) -> None:
        header, body = codec.encode_message(message)
        for buffer in write_frame(header, *body):
            self._unsent.append(buffer)
            self._unsent_bytes += len(buffer)
