"""Who leads, when nobody answers: a call that is silent for too long has the other nodes asked.

Part of the core: decides, touches nothing. A frozen leader then costs an election, not a timeout.
"""

import math
from collections.abc import Mapping

from holdfast.client.events import Address, CallId
from holdfast.client.flight import Pending
from holdfast.client.nodes import Link, Nodes
from holdfast.client.protocol.messages import Inquiry, Ping
from holdfast.client.protocol.queries import ListQueues

SILENCE_S = 0.25  # after this long without an answer the other nodes are asked who leads
PROBE_AGAIN_S = 0.1  # then again, ever more slowly: an election may be under way, or a long poll just waits
PROBE_SLOWER = 1.5
PROBE_MAX_S = 4.0

_PROBE = ListQueues(limit=1)  # cheap, and only the leader answers it


class Search:
    """Over the calls that it is given, which it reads only. `at_s` is when to `look` next."""

    def __init__(self, nodes: Nodes, calls: Mapping[CallId, Pending]) -> None:
        self._nodes = nodes
        self._calls = calls
        self._gap_s = PROBE_AGAIN_S
        self.at_s = math.inf

    def expect_answer(self, now_s: float) -> None:
        """A call was begun or sent."""
        self.at_s = min(self.at_s, now_s + SILENCE_S)

    def look(self, now_s: float) -> list[Pending]:
        """Ask all others, if a call has had no answer for too long; gives the calls that belong to another leader."""
        if not self._silent(now_s):
            since = min(map(self._heard_s, self._calls.values()), default=math.inf)
            self.at_s = max(since + SILENCE_S, now_s + PROBE_AGAIN_S)
            self._gap_s = PROBE_AGAIN_S
            return []
        self.at_s = now_s + self._gap_s
        self._gap_s = min(self._gap_s * PROBE_SLOWER, PROBE_MAX_S)
        for address in list(self._nodes.peers):
            link = self._nodes.links.get(address) or self._nodes.connect(address, now_s)
            if link is None:
                continue
            if address == self._nodes.target:
                self._ping(address, link, now_s)
            elif not link.probing:
                link.probing = True
                if link.ready:
                    self.probe(address, link)
        return self._misplaced(now_s)

    def probe(self, address: Address, link: Link) -> None:
        request_id = self._nodes.next_request_id()
        link.sent[request_id] = None
        self._nodes.write(address, Inquiry(request_id=request_id, query=_PROBE))

    def learn(self, address: Address, link: Link, leader: Address | None, now_s: float) -> list[Pending]:
        """A probe was answered: by the leader itself, or by one who names it. Gives the calls to send there."""
        link.probing = False
        if leader == address:
            link.heard_s = now_s
        if leader is None:
            return []
        self._nodes.believe(leader)
        return self._misplaced(now_s)

    def _ping(self, address: Address, link: Link, now_s: float) -> None:
        if link.ready and link.pinged_s is None:
            link.pinged_s = now_s
            self._nodes.write(address, Ping(0))

    def _silent(self, now_s: float) -> list[Pending]:
        """Calls without a sign of the leader for too long; those that were just sent back are not among them."""
        return [
            call
            for call in self._calls.values()
            if not call.stale and (call.at or not call.retry_at_s) and self._heard_s(call) + SILENCE_S <= now_s
        ]

    def _heard_s(self, pending: Pending) -> float:
        """Since when there is no sign of a leader that has this call: another's answer on its connection is one."""
        links = self._nodes.links
        return max([pending.asked_s, *(links[address].heard_s for address in pending.at if address in links)])

    def _misplaced(self, now_s: float) -> list[Pending]:
        leader = self._nodes.leader
        if leader is None:
            return []
        return [call for call in self._silent(now_s) if call.at and leader not in call.at]
