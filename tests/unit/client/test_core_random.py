"""Random interleavings against a naive cluster that remembers requests: nothing is done twice, all is finished once.

The cluster is three inboxes and one memory. A leader that has changed still has in its inbox what it was sent; a lost
connection loses both directions; sessions may be forgotten; callers leave. Afterwards everything heals, and every call
must be over, and no lease be held that nobody was told of.
"""

import math
from collections import Counter, deque
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.client.core import Core
from holdfast.client.events import (
    Action,
    BytesReceived,
    CallId,
    Close,
    Connect,
    Connected,
    Disconnected,
    Event,
    Finish,
    Outcome,
    WakeAt,
    Woken,
    Write,
)
from holdfast.client.flight import WINDOW
from holdfast.client.protocol import codec
from holdfast.client.protocol.commands import Command, DeleteQueue, Lease, OpenSession, Release
from holdfast.client.protocol.errors import (
    HoldfastError,
    LeaderChanged,
    NotLeader,
    Overloaded,
    RequestConflict,
    RequestSuperseded,
    SessionExpired,
    Withdrawn,
)
from holdfast.client.protocol.frames import FrameReader, write_frame
from holdfast.client.protocol.messages import (
    Answered,
    Declined,
    FromNode,
    Hello,
    Inquiry,
    Ping,
    Pong,
    Request,
    Welcome,
    Withdraw,
)
from holdfast.client.protocol.queries import LeaderQuery, ListQueues
from holdfast.client.protocol.replies import Answer, Done, Failed, Grant, Leased, QueuesListed, Reply
from holdfast.client.protocol.values import LeaseId, Place, QueueId
from holdfast.client.unwanted import UNDO_S

NODES = ("a", "b", "c")
TIMEOUT_S = 5.0
FULL = Overloaded(limit_name="x", limit=1, retry_after_ms=5)


class Memory:
    """What the fold knows: A1, told in a few lines."""

    def __init__(self) -> None:
        self.sessions: dict[bytes, tuple[dict[int, tuple[str, Reply]], list[int]]] = {}
        self.ended: set[bytes] = set()
        self.done: Counter[int] = Counter()
        self.held: dict[int, int] = {}  # leases that are not released, and which call they were for
        self.put_off = 0  # how many next requests are answered with the fold's own Overloaded

    def apply(self, request: Request) -> Reply:
        if isinstance(request.command, OpenSession):
            if request.session not in self.ended:
                self.sessions.setdefault(request.session, ({}, [0]))
            return Done()
        if request.session not in self.sessions:
            return Failed(SessionExpired())
        replies, below = self.sessions[request.session]
        number, key = request.request_seq, identity(request.command)
        if number < below[0]:
            return Failed(RequestSuperseded(request_seq=number, done_below=below[0]))
        if number in replies:
            return replies[number][1] if replies[number][0] == key else Failed(RequestConflict(request_seq=number))
        below[0] = max(below[0], request.done_below)
        for old in [old for old in replies if old < below[0]]:
            del replies[old]
        assert len(replies) < WINDOW, "the client asked for more than its window"
        if self.put_off:
            self.put_off -= 1
            return Failed(FULL)  # which is not remembered
        reply = self.do(request.command)
        replies[number] = (key, reply)
        return reply

    def knows(self, request: Request) -> bool:
        replies, below = self.sessions.get(request.session, ({}, [1 << 60]))
        return request.request_seq in replies or request.request_seq < below[0]

    def do(self, command: Command) -> Reply:
        match command:
            case DeleteQueue(queue_id=key):
                self.done[key] += 1
            case Lease(queue_id=key):
                self.done[key] += 1
                self.held[len(self.held) + 1] = key
                return leased(len(self.held))
            case Release(ranges=((lease_id, _, _),)):
                self.held[lease_id] = 0
        return Done()

    def forget(self) -> None:
        """Leases belong to their session: with it they are lost to everybody, until their timeout."""
        self.ended |= self.sessions.keys()
        self.sessions.clear()
        self.held = dict.fromkeys(self.held, 0)


def identity(command: Command) -> str:
    return repr(command)


def leased(lease_id: int) -> Leased:
    return Leased(lease_id=LeaseId(lease_id), deadline_ms=1, grants=(Grant(1, 1, 1, 1),))


class World:
    def __init__(self) -> None:
        self.core = Core(NODES, random=Random(3))
        self.memory = Memory()
        self.now_s = 0.0
        self.wake_at_s = math.inf
        self.leader: str | None = "a"
        self.wanted: set[str] = set()
        self.readers: dict[str, FrameReader] = {}
        self.inbox: dict[str, deque[object]] = {}
        self.outbox: dict[str, deque[FromNode]] = {}
        self.parked: dict[str, dict[int, Request]] = {node: {} for node in NODES}
        self.mute: set[str] = set()  # who has left something unanswered, on this connection
        self.calls: dict[CallId, int] = {}
        self.asked: dict[CallId, Command | LeaderQuery] = {}
        self.left: dict[CallId, float] = {}  # whose callers have gone, and when
        self.deadlines: dict[CallId, float] = {}
        self.outcomes: dict[CallId, Outcome] = {}

    # What may happen ------------------------------------------------------------------------------------

    def call(self, number: int) -> None:
        key = len(self.deadlines) + 1
        deadline_s = self.now_s + TIMEOUT_S * (number + 1) / 4
        kinds = (DeleteQueue(queue_id=QueueId(key)), lease_of(key), lease_of(key), ListQueues())
        call, actions = self.core.call(kinds[number], self.now_s, deadline_s=deadline_s)
        self.deadlines[call], self.asked[call] = deadline_s, kinds[number]
        if number != 3:
            self.calls[call] = key
        self.perform(actions)

    def leave(self, number: int) -> None:
        """Somebody who waits goes; or has gone just when the outcome came, which nobody heard then."""
        waiting = [call for call in self.deadlines if call not in self.left]
        for call in waiting[-1 - number % 2 :][:1]:
            self.left[call] = self.now_s
            outcome = self.outcomes.get(call)
            self.perform(self.core.abandon(call, self.asked[call], outcome, self.now_s))

    def connect(self, number: int) -> None:
        for address in chosen(self.wanted, number):
            if number < 6:
                self.wanted.discard(address)
                self.tell(Connected(address))
            else:
                self.end(address)
                self.tell(Disconnected(address))

    def work(self, number: int) -> None:
        """A node takes the next frame out of its inbox."""
        for address in chosen({node for node in self.inbox if self.inbox[node]}, number):
            answer = self.answer(address, self.inbox[address].popleft())
            if number >= 6:
                self.mute.add(address)
            elif answer is not None:
                self.outbox[address].append(answer)

    def grant(self, number: int) -> None:
        """A parked lease gets something; or its node does not lead any more."""
        for address in chosen({node for node in NODES if self.parked[node]}, number):
            request_id = min(self.parked[address])
            request = self.parked[address].pop(request_id)
            if address == self.leader:
                answer: FromNode = Answered(request_id, Answer(Place(1, 0, 1), self.memory.apply(request)))
            else:
                answer = Declined(request_id, NotLeader(leader=self.leader))
            self.outbox[address].append(answer)

    def answer(self, address: str, frame: object) -> FromNode | None:
        match frame:
            case Hello():
                return Welcome(version=1, cluster_id="c", node=address)
            case Ping(token=token):
                return Pong(token)
            case Withdraw(request_id=request_id):
                withdrawn = self.parked[address].pop(request_id, None)
                return None if withdrawn is None else Declined(request_id, Withdrawn())
            case Request() | Inquiry() if address != self.leader:
                leads = self.leader if frame.request_id % 2 else None
                return Declined(frame.request_id, NotLeader(leader=leads))
            case Request() if frame.request_id % 11 == 0:
                self.memory.apply(frame)
                return Declined(frame.request_id, LeaderChanged())
            case Request() if frame.request_id % 7 == 0:
                return Declined(frame.request_id, FULL)
            case Request(command=Lease()) if frame.request_id % 2 and not self.memory.knows(frame):
                self.parked[address][frame.request_id] = frame
                return None
            case Request():
                return Answered(frame.request_id, Answer(Place(1, 0, 1), self.memory.apply(frame)))
            case Inquiry():
                return Answered(frame.request_id, Answer(Place(1, -1, 1), QueuesListed(queues=())))
            case _:
                raise AssertionError(frame)

    def deliver(self, number: int) -> None:
        for address in chosen({node for node in self.outbox if self.outbox[node]}, number):
            header, body = codec.encode_message(self.outbox[address].popleft())
            self.tell(BytesReceived(address, b"".join(write_frame(header, *body))))

    def drop(self, number: int) -> None:
        for address in chosen(set(self.readers), number):
            self.end(address)
            self.tell(Disconnected(address))

    def deal(self, number: int) -> None:
        """All that is on its way comes to its end, but for what is parked."""
        for each in range(3):
            self.connect(each)
        for _ in range(4):
            for each in range(3):
                self.work(each)
                self.deliver(each)

    def elect(self, number: int) -> None:
        self.leader = (*NODES, None)[number % 4]

    def forget(self, number: int) -> None:
        self.memory.forget()

    def put_off(self, number: int) -> None:
        self.memory.put_off += 1

    def wait(self, number: int) -> None:
        self.pass_to(self.now_s + (0.01, 0.05, 0.26, 0.6, 1.0, 3.0)[number % 6])

    # What follows ---------------------------------------------------------------------------------------

    def pass_to(self, at_s: float) -> None:
        while self.wake_at_s <= at_s:
            self.now_s = max(self.now_s, self.wake_at_s)
            self.tell(Woken())
            assert self.wake_at_s > self.now_s, "it would be woken for ever"
        self.now_s = at_s

    def tell(self, event: Event) -> None:
        self.perform(self.core.handle(event, self.now_s))

    def end(self, address: str) -> None:
        """What the node has read already it still works on; what it would say is lost."""
        del self.readers[address]
        self.parked[address].clear()
        self.mute.discard(address)
        self.wanted.discard(address)
        self.outbox[address] = deque()

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Connect(address=address):
                    assert address not in self.readers, "two connections to one address"
                    self.readers[address] = FrameReader()
                    self.wanted.add(address)
                    for requests in list(self.inbox.get(address, ())):
                        if isinstance(requests, Request) and address == self.leader:
                            self.memory.apply(requests)  # of the connection before: done, and answered to nobody
                    self.inbox[address], self.outbox[address] = deque(), deque()
                case Write(address=address, buffers=buffers):
                    for frame in self.readers[address].feed(b"".join(buffers)):
                        self.inbox[address].append(codec.decode_from_client(frame.header, frame.body))
                case Close(address=address):
                    self.end(address)
                case Finish(call=call, outcome=outcome):
                    assert call not in self.outcomes, "finished twice"
                    assert call not in self.left, "told to nobody"
                    assert self.now_s <= self.deadlines[call], "finished after its deadline"
                    self.outcomes[call] = outcome
                case WakeAt(at_s=at_s):
                    self.wake_at_s = at_s

    def heal(self, leader: str) -> None:
        """All nodes up, one leads, everything is delivered: until every call is over."""
        self.leader = leader
        for address in self.mute & self.readers.keys():
            self.end(address)
            self.tell(Disconnected(address))
        for _ in range(4_000):
            if len(self.outcomes.keys() | self.left.keys()) == len(self.deadlines) and not self.core._calls:
                return
            for number in range(3):
                self.connect(number)
                self.work(number)
                self.grant(number)
                self.deliver(number)
            if not any(self.inbox.values()) and not any(self.outbox.values()) and not self.wanted:
                self.pass_to(min(self.wake_at_s, self.now_s + 1.0))
        raise AssertionError("some calls are never over")

    def told_of(self, key: int) -> bool:
        """Whether somebody has the lease of this call."""
        call = next(call for call, other in self.calls.items() if other == key)
        return isinstance(self.outcomes.get(call), Answer) and call not in self.left


def lease_of(key: int) -> Lease:
    return Lease(queue_id=QueueId(key), group="g", max_messages=1, wait_ms=1_000)


def chosen(among: set[str], number: int) -> list[str]:
    """One of these, if there is any: so that most steps do something."""
    return [sorted(among)[number % len(among)]] if among else []


OFTEN = ["call", "connect", "work", "deliver", "call", "connect", "work", "deliver", "work", "deliver"]
SELDOM = ["drop", "elect", "forget", "put_off", "wait", "leave", "leave", "grant", "deal", "deal"]


@settings(max_examples=600)
@given(st.lists(st.tuples(st.sampled_from(OFTEN + SELDOM), st.integers(0, 7)), min_size=20, max_size=100))
def test_nothing_is_done_twice_and_every_call_is_over_once(steps: list[tuple[str, int]]) -> None:
    """A1, A2: by random schedules."""
    world = World()
    world.call(0)
    world.heal("a")
    for name, number in steps:
        getattr(world, name)(number % 4 if name == "call" else number)
    healed_s = world.now_s
    world.heal("b")
    assert world.outcomes.keys() | world.left.keys() == world.deadlines.keys()
    for call, key in world.calls.items():
        outcome, times = world.outcomes.get(call), world.memory.done[key]
        assert times <= 1, "done twice"
        if outcome is None:
            assert call in world.left
        elif isinstance(outcome, Answer) and isinstance(world.asked[call], Lease):
            assert times == 1, "granted, and was not"
        elif isinstance(outcome, Answer):
            assert outcome.reply == Done()
            assert times == 1, "said to be done, and was not"
        else:
            assert isinstance(outcome, HoldfastError)
            assert times == 0 or outcome.happened == "maybe", "said not to have happened, and had"
    for key in filter(None, world.memory.held.values()):
        call = next(call for call, other in world.calls.items() if other == key)
        if world.left.get(call, world.deadlines[call]) + UNDO_S > healed_s + 1.0:
            assert world.told_of(key), "a lease is held for nobody"
