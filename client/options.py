"""What a client is made with, checked once and the same for both shells."""

from collections.abc import Sequence
from random import SystemRandom

from holdfast.client.core import Core
from holdfast.client.events import Address, parse_addresses
from holdfast.client.protocol.commands import OpenSession
from holdfast.client.protocol.errors import BadValue
from holdfast.client.protocol.quick import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    addresses: tuple[Address, ...]
    timeout_s: float  # for a call as its caller sees it
    consumer_id: str

    def core(self) -> Core:
        """A fresh one, with a session of its own."""
        return Core(self.addresses, random=SystemRandom(), consumer_id=self.consumer_id)


def checked(addresses: str | Sequence[Address], timeout_ms: int, consumer_id: str | None) -> Options:
    """Raises BadValue for what no client can be made with."""
    given = parse_addresses(addresses) if isinstance(addresses, str) else list(addresses)
    if not given:
        raise BadValue(field="addresses", problem="is empty; give at least one HOST:PORT")
    OpenSession(consumer_id=consumer_id or "")  # checks it
    return Options(tuple(given), timeout_ms / 1000, consumer_id or "")
