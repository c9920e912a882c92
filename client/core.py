"""The client without its sockets: who leads, what is in flight, when to retry and as whom.

Decides and touches nothing: time comes as `now_s`, randomness is given in, and what is to be done is returned as
actions. Whatever may have happened is sent again under its first identity only, and every call is finished
exactly once: by an answer of the fold, or at its deadline by what is known then.
"""

import math
from collections.abc import Sequence
from heapq import heappop, heappush
from random import Random
from typing import assert_never

from holdfast.client.events import (
    Action,
    Address,
    BytesReceived,
    CallId,
    Connected,
    Disconnected,
    Event,
    Finish,
    Outcome,
    WakeAt,
    Woken,
)
from holdfast.client.flight import Numbering, Pending, envelope_of, gave_up, unresolved
from holdfast.client.nodes import Link, Nodes, backoff_s
from holdfast.client.protocol import codec
from holdfast.client.protocol.commands import Command, Lease, OpenSession
from holdfast.client.protocol.errors import (
    BadFrame,
    HoldfastError,
    Misuse,
    NoLeader,
    NotLeader,
    OutcomeUnknown,
    Overloaded,
    ProtocolViolated,
    RequestConflict,
    RequestSuperseded,
    SessionExpired,
    SessionWindowFull,
    Unavailable,
    Withdrawn,
)
from holdfast.client.protocol.messages import (
    Answered,
    Declined,
    FromNode,
    Inquiry,
    Pong,
    Request,
    Welcome,
    Withdraw,
)
from holdfast.client.protocol.queries import LeaderQuery
from holdfast.client.protocol.replies import Answer, Failed
from holdfast.client.protocol.values import SessionId
from holdfast.client.search import Search
from holdfast.client.unwanted import LINGER_S, UNDO_S, placeholder, undoing


class Core:
    """One client: one session at a time, any number of calls over at most one connection for each address."""

    def __init__(self, addresses: Sequence[Address], *, random: Random, consumer_id: str = "") -> None:
        self._random = random
        self._consumer_id = consumer_id
        self._nodes = Nodes(addresses, random)
        self._calls: dict[CallId, Pending] = {}
        self._callers = 0  # calls that somebody waits for: all but the opening of a session
        self._numbered: list[CallId] = []  # heaps of what waits to be sent: with a number of the session,
        self._plain: list[CallId] = []  # and without
        self._timers: list[tuple[float, CallId]] = []
        self._numbering = self._fresh_session()
        self._search = Search(self._nodes, self._calls)
        self._wake_at_s = math.inf
        self._next_call = 1
        self._closing_by_s = math.inf
        self.closed = False  # after `close`: all is over, and nothing more is asked
        self.cluster_id = ""  # as the last node said that welcomed this client

    @property
    def session(self) -> SessionId:
        """The session under which the next numbered call goes; leases belong to the one they were made in (A2)."""
        return self._numbering.session

    def call(
        self, what: Command | LeaderQuery, now_s: float, *, deadline_s: float, stale: bool = False, min_index: int = 0
    ) -> tuple[CallId, list[Action]]:
        """Begin a call. Its `Finish` comes from here or from a later `handle`, at `deadline_s` at the latest."""
        pending = self._add(what, now_s, deadline_s)
        pending.stale, pending.min_index = stale, min_index
        self._callers += 1
        heappush(self._timers, (deadline_s, pending.call))
        return pending.call, self._conclude(now_s)

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """What follows from an event. Events of a connection that the core has closed are ignored."""
        match event:
            case Connected(address=address):
                self._nodes.greet(address)
            case BytesReceived(address=address, data=data):
                self._receive(address, data, now_s)
            case Disconnected(address=address):
                self._lose(address, now_s, close=False)
            case Woken():
                pass
            case unknown:
                assert_never(unknown)
        return self._conclude(now_s)

    def abandon(self, call: CallId, what: Command | LeaderQuery, outcome: Outcome | None, now_s: float) -> list[Action]:
        """Who waited for this call has gone. `outcome`: what it was finished with meanwhile, unheard."""
        if self.closed:
            return []
        pending = self._calls.get(call)
        if pending is not None and not pending.silent:
            self._leave(pending, now_s)
            self._one_caller_less()
        elif outcome is not None:
            self._undo(what, outcome, now_s)
        return self._conclude(now_s)

    def close(self, now_s: float) -> list[Action]:
        """End every call with what is known of it now, then all connections: at once, or when no lease is left."""
        self._closing_by_s = now_s + LINGER_S
        for pending in list(self._calls.values()):
            if not pending.silent:
                self._give_up(pending, now_s)
        return self._conclude(now_s)

    # What is due, what can be sent, when to come back ---------------------------------------------------

    def _conclude(self, now_s: float) -> list[Action]:
        self._run_timers(now_s)
        if self._closing_by_s < math.inf:
            self._close_when_over(now_s)
        self._send_waiting(now_s)
        wake_at_s = self._next_wake_s(now_s)
        if wake_at_s != self._wake_at_s:
            self._wake_at_s = wake_at_s
            self._nodes.actions.append(WakeAt(wake_at_s))
        actions, self._nodes.actions = self._nodes.actions, []
        return actions

    def _run_timers(self, now_s: float) -> None:
        while self._timers and (self._timers[0][0] <= now_s or self._timers[0][1] not in self._calls):
            pending = self._calls.get(heappop(self._timers)[1])
            if pending is None:
                continue
            if pending.deadline_s <= now_s:
                self._give_up(pending, now_s)
            elif pending.retry_at_s and pending.retry_at_s <= now_s:
                self._enqueue(pending)
        for address in self._nodes.overdue(now_s):
            self._lose(address, now_s, close=True)
        if self._search.at_s <= now_s:
            self._enqueue_all(self._search.look(now_s))

    def _next_wake_s(self, now_s: float) -> float:
        wake_s = self._search.at_s if self._calls else math.inf
        if not self.closed:
            wake_s = min(wake_s, self._closing_by_s)
        if self._timers:
            wake_s = min(wake_s, self._timers[0][0])
        return min(wake_s, self._nodes.next_wake_s(now_s, waiting=bool(self._numbered or self._plain)))

    def _close_when_over(self, now_s: float) -> None:
        if now_s < self._closing_by_s and any(pending.undoes_a_lease for pending in self._calls.values()):
            return
        self._calls.clear()
        for address in list(self._nodes.links):
            self._nodes.lose(address, now_s, close=True)
        self.closed = True

    def _send_waiting(self, now_s: float) -> None:
        """Everything that may go now goes to the believed leader, in the order in which it was called."""
        self._forget_ended(self._plain)
        self._forget_ended(self._numbered)
        if self._numbered and self._numbering.opened == "no":
            self._numbering.opened = "asked"
            opening = self._add(OpenSession(consumer_id=self._consumer_id), now_s, math.inf)
            opening.numbering, opening.silent = self._numbering, True
        if not self._numbered and not self._plain:
            return
        if self._numbered and self._numbering.full:
            self._take_back_what_waits()
        target = self._nodes.target
        link = self._nodes.links.get(target)
        if link is None:
            self._nodes.connect(target, now_s)
        elif link.ready:
            self._send_from(self._plain, target, link, now_s)
            self._send_from(self._numbered, target, link, now_s)

    def _send_from(self, heap: list[CallId], target: Address, link: Link, now_s: float) -> None:
        while heap and self._may_send(self._calls[heap[0]]):
            pending = self._calls[heappop(heap)]
            pending.queued = False
            self._send(pending, target, link, now_s)
            self._forget_ended(heap)

    def _take_back_what_waits(self) -> None:
        """A long poll keeps its number for as long as it waits, and the window full: it is to wait under a new one."""
        for pending in self._calls.values():
            if pending.numbering is self._numbering and pending.waits and not pending.taken_back:
                pending.taken_back = True
                for address, request_id in pending.at.items():
                    self._nodes.write(address, Withdraw(request_id))

    def _forget_ended(self, heap: list[CallId]) -> None:
        """Calls that ended while they waited; those behind the first are met later."""
        while heap and heap[0] not in self._calls:
            heappop(heap)

    def _may_send(self, pending: Pending) -> bool:
        if pending.numbering is not None or not pending.needs_number:
            return True
        return self._numbering.opened == "yes" and not self._numbering.full

    # Calls ----------------------------------------------------------------------------------------------

    def _add(self, what: Command | LeaderQuery, now_s: float, deadline_s: float) -> Pending:
        pending = Pending(CallId(self._next_call), what, deadline_s, now_s)
        self._next_call += 1
        self._calls[pending.call] = pending
        self._search.expect_answer(now_s)
        self._enqueue(pending)
        return pending

    def _enqueue(self, pending: Pending) -> None:
        pending.retry_at_s = 0.0
        if pending.is_left:
            if not pending.at:
                self._finish(pending, NoLeader())
        elif not pending.queued:
            pending.queued = True
            heappush(self._numbered if pending.needs_number else self._plain, pending.call)

    def _enqueue_all(self, found: list[Pending]) -> None:
        for pending in found:
            self._enqueue(pending)

    def _send(self, pending: Pending, address: Address, link: Link, now_s: float) -> None:
        if address in pending.at or pending.is_left:
            return  # the answer to an earlier attempt may still come from there
        if pending.needs_number and pending.numbering is None:
            pending.numbering, pending.seq = self._numbering, self._numbering.take()
        request_id = self._nodes.next_request_id()
        message: Request | Inquiry
        if isinstance(pending.what, LeaderQuery):
            message = Inquiry(
                request_id=request_id, query=pending.what, stale=pending.stale, min_index=pending.min_index
            )
        else:
            session, seq, done_below = envelope_of(pending)
            message = Request(
                request_id=request_id, command=pending.what, session=session, request_seq=seq, done_below=done_below
            )
        try:
            self._nodes.write(address, message)
        except Misuse as error:  # it has no form on the wire: it was never sent, and never will be
            self._finish(pending, error)
            return
        link.sent[request_id] = pending.call
        pending.at[address] = request_id
        pending.taken_back = False
        pending.open += 1
        pending.asked_s = now_s
        self._search.expect_answer(now_s)

    def _retry_after(self, pending: Pending, delay_s: float, now_s: float) -> None:
        if delay_s <= 0.0:
            self._enqueue(pending)
        else:
            pending.retry_at_s = now_s + delay_s
            heappush(self._timers, (pending.retry_at_s, pending.call))

    def _set_back(self, pending: Pending, now_s: float, at_least_s: float = 0.0) -> None:
        pending.setbacks += 1
        self._retry_after(pending, max(at_least_s, backoff_s(pending.setbacks, self._random)), now_s)

    def _finish(self, pending: Pending, outcome: Outcome) -> None:
        del self._calls[pending.call]
        for address, request_id in pending.at.items():
            if address in self._nodes.links:
                self._nodes.links[address].sent.pop(request_id, None)
        if pending.numbering is not None:
            pending.numbering.release(pending.seq)
        if not pending.silent:
            self._tell(pending, outcome)

    def _tell(self, pending: Pending, outcome: Outcome) -> None:
        self._nodes.actions.append(Finish(pending.call, outcome))
        self._one_caller_less()

    def _one_caller_less(self) -> None:
        """Where nobody waits any more, a session that is not open yet is opened when somebody needs it."""
        self._callers -= 1
        if self._callers:
            return
        for opening in [pending for pending in self._calls.values() if pending.is_opening]:
            self._finish(opening, NoLeader())
            if opening.numbering is not None:
                opening.numbering.opened = "no"

    def _give_up(self, pending: Pending, now_s: float) -> None:
        nodes = self._nodes
        link = nodes.links.get(nodes.target)
        # Where all is open, only a full window can have kept a call from being sent.
        all_open = link is not None and link.ready and self._numbering.opened == "yes"
        outcome = gave_up(pending, nodes.peers, connected=nodes.connected, window_full=all_open)
        if isinstance(pending.what, Lease) and not pending.silent and pending.may_have_happened:
            self._tell(pending, outcome)
            self._leave(pending, now_s)
        else:
            self._finish(pending, outcome)

    def _leave(self, pending: Pending, now_s: float) -> None:
        """Nobody waits for it any more; `unwanted.py` tells what then is so, step by step."""
        pending.silent = pending.unwanted = True
        if not pending.may_have_happened:
            self._finish(pending, NoLeader())
            return
        pending.deadline_s = now_s + UNDO_S
        heappush(self._timers, (pending.deadline_s, pending.call))
        if isinstance(pending.what, Lease):
            for address, request_id in pending.at.items():
                self._nodes.write(address, Withdraw(request_id))
            if not pending.what.auto_ack:
                pending.lease, pending.what = pending.what, placeholder(pending.what)
        if not pending.at and not pending.retry_at_s:
            self._enqueue(pending)

    def _undo(self, what: Command | LeaderQuery | None, outcome: Outcome, now_s: float) -> None:
        release = undoing(what, outcome)
        if release is not None:
            own = self._add(release, now_s, now_s + UNDO_S)
            own.silent = True
            heappush(self._timers, (own.deadline_s, own.call))

    def _fresh_session(self) -> Numbering:
        return Numbering(SessionId(self._random.randbytes(16)))

    # Answers --------------------------------------------------------------------------------------------

    def _receive(self, address: Address, data: bytes, now_s: float) -> None:
        link = self._nodes.links.get(address)
        if link is None:
            return
        link.pinged_s = None
        try:
            for frame in link.reader.feed(data):
                self._read(address, link, codec.decode_from_node(frame.header, frame.body), now_s)
                if self._nodes.links.get(address) is not link:
                    return
        except BadFrame as error:
            self._nodes.peers[address].problem = error
            self._lose(address, now_s, close=True)

    def _read(self, address: Address, link: Link, message: FromNode, now_s: float) -> None:
        match message:
            case Welcome(cluster_id=cluster_id):
                self.cluster_id = cluster_id
                link.ready = True
                self._nodes.peers[address].problem = None
                if link.probing:
                    self._search.probe(address, link)
            case Answered(request_id=request_id, answer=answer) if request_id in link.sent:
                self._nodes.peers[address].failures = 0
                call = link.sent.pop(request_id)
                if call is None:
                    self._enqueue_all(self._search.learn(address, link, address, now_s))
                else:
                    self._settle(self._calls[call], address, link, answer, now_s)
            case Declined(request_id=request_id, error=error) if request_id in link.sent:
                self._nodes.peers[address].failures = 0
                call = link.sent.pop(request_id)
                if call is None:
                    named = error.leader if isinstance(error, NotLeader) else None
                    self._enqueue_all(self._search.learn(address, link, named, now_s))
                else:
                    self._declined(self._calls[call], address, error, now_s)
            case Declined(error=error) if not link.ready or isinstance(error, ProtocolViolated):
                self._nodes.peers[address].problem = error
                self._lose(address, now_s, close=True)
            case Answered() | Declined() | Pong():
                pass  # of a call that is over

    def _settle(self, pending: Pending, address: Address, link: Link, answer: Answer, now_s: float) -> None:
        """The fold has answered: that is the outcome, but for what says that an attempt is not known any more."""
        del pending.at[address]
        link.heard_s = now_s
        if not pending.stale:
            self._nodes.leader = address
        error = answer.reply.error if isinstance(answer.reply, Failed) else None
        if pending.is_opening:
            self._session_opened(pending, answer, error, now_s)
        elif isinstance(error, SessionWindowFull):
            pending.refusal = error
            pending.open -= 1
            self._set_back(pending, now_s)
        elif isinstance(error, Overloaded) and pending.seq:
            # Not done, and not remembered: an earlier attempt may still be done under this number, and is its answer.
            pending.refusal = error
            pending.open -= 1
            self._set_back(pending, now_s, error.retry_after_ms / 1000)
        elif isinstance(error, RequestConflict) and pending.is_placeholder and pending.lease is not None:
            pending.what = pending.lease
            self._enqueue(pending)
        elif pending.unwanted:
            self._finish(pending, answer)
            self._undo(pending.lease, answer, now_s)
        elif isinstance(error, SessionExpired | RequestSuperseded) and pending.open > 1:
            problem = f"a retry was answered with {type(error).__name__}"
            self._finish(pending, OutcomeUnknown(problem=problem))
        elif isinstance(error, SessionExpired) and pending.numbering is not None:
            if pending.numbering is self._numbering:
                self._numbering = self._fresh_session()
            pending.forget_identity()
            self._set_back(pending, now_s)
        else:
            unknown = unresolved(pending, error) if error is not None else None
            self._finish(pending, unknown or answer)

    def _session_opened(self, opening: Pending, answer: Answer, error: HoldfastError | None, now_s: float) -> None:
        if isinstance(error, Unavailable):
            self._set_back(opening, now_s)
            return
        self._finish(opening, answer)
        if opening.numbering is not None:
            opening.numbering.opened = "no" if error is not None else "yes"
        if error is not None:
            for pending in [call for call in self._calls.values() if call.needs_number and call.numbering is None]:
                if pending.call in self._calls:
                    self._finish(pending, answer)

    def _declined(self, pending: Pending, address: Address, error: HoldfastError, now_s: float) -> None:
        """A node's own no: it closes this attempt, if it says so, and leaves the others open (A2)."""
        del pending.at[address]
        if error.happened == "no":
            pending.open -= 1
        match error:
            case _ if pending.unwanted and not pending.may_have_happened:
                self._finish(pending, error)
            case NotLeader(leader=leader):
                pending.refusal = error
                pending.setbacks += 1
                self._nodes.does_not_lead(address, leader, now_s)
                # A named leader is worth an immediate try, once; then two nodes may be pointing at each other.
                straight_on = leader not in (None, address) and pending.setbacks == 1
                delay_s = 0.0 if straight_on else backoff_s(pending.setbacks, self._random)
                self._retry_after(pending, delay_s, now_s)
            case Overloaded(retry_after_ms=retry_after_ms):
                pending.refusal = error
                self._set_back(pending, now_s, retry_after_ms / 1000)
            case Withdrawn():
                if not pending.may_have_happened:
                    pending.wait_on(now_s)
                self._enqueue(pending)  # an earlier attempt may have happened
            case Unavailable():
                pending.refusal = error
                self._nodes.does_not_lead(address, None, now_s)
                self._set_back(pending, now_s)
            case _ if error.happened == "maybe":
                self._nodes.does_not_lead(address, None, now_s)
                self._set_back(pending, now_s)
            case _ if pending.may_have_happened:
                self._finish(pending, OutcomeUnknown(problem=f"a retry was declined with {type(error).__name__}"))
            case _:
                self._finish(pending, error)

    def _lose(self, address: Address, now_s: float, *, close: bool) -> None:
        """What was in flight there may have happened: it stays open, and is sent again where the leader is now."""
        link = self._nodes.lose(address, now_s, close=close)
        for call in filter(None, link.sent.values() if link is not None else ()):
            pending = self._calls[call]
            del pending.at[address]
            pending.lost = True
            if not pending.retry_at_s:
                self._enqueue(pending)
