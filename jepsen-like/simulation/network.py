"""Links between simulated nodes: ordered sessions with delay, one-way and two-way cuts, resets.

Within a session nothing is lost or overtaken; a cut swallows what it meets, and such a session ends before the link is
used again, as a connection does whose bytes never arrived.
"""

import hashlib
from collections.abc import Iterable
from functools import partial
from random import Random
from typing import Protocol

from holdfast.jepsen.simulation.scheduler import Scheduler

Link = tuple[str, str]  # from, to


class Endpoint(Protocol):
    up: bool
    sessions: dict[str, int]  # peer -> number of the session that this side holds

    def connected(self, peer: str) -> None: ...
    def disconnected(self, peer: str) -> None: ...
    def receive(self, peer: str, session: int, data: bytes) -> None: ...


class Network:
    def __init__(self, scheduler: Scheduler, rng: Random) -> None:
        self.ends: dict[str, Endpoint] = {}
        self.cut: set[Link] = set()
        self.slow_s: dict[Link, float] = {}
        self.message_count = 0
        self.trace = hashlib.blake2b(digest_size=16)
        self._scheduler = scheduler
        self._rng = rng
        self._session = 0
        self._last_arrival_s: dict[Link, float] = {}

    def send(self, sender: str, receiver: str, data: bytes) -> None:
        session = self.ends[sender].sessions.get(receiver)
        if session is None or (sender, receiver) in self.cut:
            return
        now_s, link = self._scheduler.now_s, (sender, receiver)
        delay_s = 0.0002 + 0.002 * self._rng.random() + self.slow_s.get(link, 0.0)
        arrival_s = max(now_s + delay_s, self._last_arrival_s.get(link, 0.0))
        self._last_arrival_s[link] = arrival_s

        def arrive() -> None:
            end = self.ends[receiver]
            if end.up and end.sessions.get(sender) == session and link not in self.cut:
                self.message_count += 1
                self.trace.update(b"%d %s %s " % (self._scheduler.now_s * 1e6, sender.encode(), receiver.encode()))
                self.trace.update(data)
                end.receive(sender, session, data)

        self._scheduler.after(arrival_s - now_s, arrive)

    def connect(self, one: str, other: str) -> None:
        """Begin a session if both are there and the link is whole; a former one ends on both sides first."""
        both = self.ends[one].up and self.ends[other].up
        if not both or (one, other) in self.cut or (other, one) in self.cut:
            return
        for here, there in ((one, other), (other, one)):
            self.end_side(here, there)
        self._session += 1
        for here, there in ((one, other), (other, one)):
            self._last_arrival_s[here, there] = 0.0
            self.ends[here].sessions[there] = self._session
        for here, there in ((one, other), (other, one)):
            self.ends[here].connected(there)

    def end_side(self, here: str, there: str) -> None:
        """This side learns that its session is over."""
        end = self.ends[here]
        if end.sessions.pop(there, None) is not None and end.up:
            end.disconnected(there)

    def reset(self, one: str, other: str) -> None:
        """Both sides lose the session and find each other again soon."""
        self.end_side(one, other)
        self.end_side(other, one)
        self._scheduler.after(0.1 * self._rng.random(), lambda: self._reconnect(one, other))

    def _reconnect(self, one: str, other: str) -> None:
        if self.ends[one].sessions.get(other) is None or self.ends[other].sessions.get(one) is None:
            self.connect(one, other)

    def cut_off(self, links: Iterable[Link]) -> None:
        """Swallow everything on these links; their ends notice within a second, or not at all."""
        for sender, receiver in links:
            self.cut.add((sender, receiver))
            self._scheduler.after(self._rng.random(), partial(self._notice, sender, receiver))

    def _notice(self, one: str, other: str) -> None:
        if (one, other) in self.cut:
            self.end_side(one, other)
            self.end_side(other, one)

    def heal(self) -> None:
        cut, self.cut = self.cut, set()
        for one, other in sorted({(min(link), max(link)) for link in cut}):
            self.connect(one, other)

    def join(self, name: str) -> None:
        """A node that has started reaches whom it can."""
        for other in self.ends:
            if other != name:
                self.connect(name, other)
