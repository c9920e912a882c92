"""How long a node waits for one client: for its hello, for the rest of a frame, for anything at all. No I/O."""

from dataclasses import dataclass

from holdfast.client.protocol.errors import Unavailable

NEVER_S = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    hello_s: float = 5.0
    frame_s: float = 10.0  # for the rest of a frame that has begun
    idle_s: float = 900.0  # without a request open; a connection whose other side is gone is found by TCP, much sooner


class ClientSilent(Unavailable):
    """It owed us something and did not send it in time."""


class ClientIdle(Unavailable):
    """It wanted nothing for a long time; it may come again."""


class ClientSlow(Unavailable):
    """It does not take its answers."""


class Patience:
    """With one client."""

    def __init__(self, times: Times, now_s: float) -> None:
        self._times = times
        self._hello_by_s = now_s + times.hello_s
        self._idle_by_s = now_s + times.idle_s
        self._frame, self._frame_by_s = 0, NEVER_S

    def heard(self, unfinished: int, now_s: float) -> None:
        """Bytes came; `unfinished` is the number of the frame that they leave open. More of the same wins no time."""
        self._idle_by_s = now_s + self._times.idle_s
        if unfinished != self._frame:
            self._frame = unfinished
            self._frame_by_s = now_s + self._times.frame_s if unfinished else NEVER_S

    def until_s(self, greeted: bool) -> float:
        """When to look at `verdict`."""
        return min(self._frame_by_s, self._idle_by_s if greeted else self._hello_by_s)

    def verdict(self, greeted: bool, waits: bool, now_s: float) -> ClientSilent | ClientIdle | None:
        """Why the connection is to end, if it is. A client that waits for an answer of ours may be silent."""
        if not greeted and now_s >= self._hello_by_s:
            return ClientSilent(f"no hello came within {self._times.hello_s:g} s")
        if now_s >= self._frame_by_s:
            return ClientSilent(f"a frame began, and its rest did not come within {self._times.frame_s:g} s")
        if greeted and now_s >= self._idle_by_s:
            if not waits:
                return ClientIdle(f"nothing was asked for {self._times.idle_s:g} s")
            self._idle_by_s = now_s + self._times.idle_s
        return None
