"""What a shell tells the core, and what the core asks back. Plain values: neither side waits for the other here.

A shell keeps at most one connection for each address. After `Close` or `Disconnected` it reports nothing more of
that connection; the core asks for no second one before that. `WakeAt` replaces the one before it.
"""

from typing import NewType

from holdfast.client.protocol.errors import HoldfastError
from holdfast.client.protocol.frames import Buffer
from holdfast.client.protocol.quick import dataclass
from holdfast.client.protocol.replies import Answer

Address = str  # HOST:PORT, as a node listens for clients
CallId = NewType("CallId", int)

# The answer of the fold or of the state, refusals too (`Failed`); or why there is none.
Outcome = Answer | HoldfastError


# Events ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connected:
    """A connection that was asked for is there."""

    address: Address


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A connection is over, or never came to be."""

    address: Address


@dataclass(frozen=True, slots=True)
class BytesReceived:
    address: Address
    data: bytes


@dataclass(frozen=True, slots=True)
class Woken:
    """The time of the last `WakeAt` has come; earlier is harmless."""


Event = Connected | Disconnected | BytesReceived | Woken


# Actions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connect:
    address: Address


@dataclass(frozen=True, slots=True)
class Write:
    """Send these buffers in order. What cannot be sent ends in `Disconnected`."""

    address: Address
    buffers: list[Buffer]


@dataclass(frozen=True, slots=True)
class Close:
    """Drop the connection, or the attempt at one."""

    address: Address


@dataclass(frozen=True, slots=True)
class Finish:
    """A call is over: exactly once for each."""

    call: CallId
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send `Woken` at this time of the shell's clock, and forget the time said before; infinite means never."""

    at_s: float


Action = Connect | Write | Close | Finish | WakeAt


def parse_addresses(addresses: str) -> list[Address]:
    """The parts of `HOST:PORT[,HOST:PORT…]`, without blanks and empty parts."""
    return [part.strip() for part in addresses.split(",") if part.strip()]


def host_and_port(address: Address) -> tuple[str, int]:
    """What a socket is given. Raises ValueError for what has no port."""
    host, _, port = address.rpartition(":")
    if not 0 < int(port) < 65_536:
        raise ValueError(f"{port} is no port")
    return host.strip("[]"), int(port)
