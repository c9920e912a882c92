"""Random schedules against the real state machine: no message lost, none doubled, order kept, every outcome true.

The world between the producer and the fold is as bad as the client core allows it to be: an attempt may arrive late,
also long after its call is over, be declined, or lose its answer; the queue fills up and empties, limits change,
another incarnation fences, the outbox fails, the process is killed. Afterwards what is still on the wire arrives.
"""

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

import pytest

from holdfast.client.events import CallId
from holdfast.client.flight import Pending, gave_up, unresolved
from holdfast.client.message import Message
from holdfast.client.outbox import OutboxFailed
from holdfast.client.producing import Ask, Do, Producing, Save, Tell
from holdfast.client.protocol.commands import Command, CreateQueue, OpenProducer, OpenSession, Produce, UpdateQueue
from holdfast.client.protocol.errors import HoldfastError, Indeterminate, NotLeader, OutcomeUnknown
from holdfast.client.protocol.messages import Request
from holdfast.client.protocol.queries import Read
from holdfast.client.protocol.replies import Answer, Failed, Messages, ProducerOpened, QueueCreated
from holdfast.client.protocol.values import NO_SESSION, QueueId, QueueSettings, SessionId
from holdfast.client.window import Numbered, Sending, sendings_of
from tests.fakes.scripted_server import Brain

SEEDS = range(400)
TIMEOUT_S = 10.0
WINDOW = 12
PLAIN = Message(b"")
CRASHED = OutcomeUnknown(problem="the process was killed")
T = TypeVar("T")


class Killed(Exception):
    """The process is no more."""


@dataclass(eq=False)
class Call:
    """One Ask, as the client core has it."""

    ask: Ask
    pending: Pending
    over: bool = False


@dataclass
class Told:
    sending: Sending
    outcome: range | HoldfastError | None = None
    saved: bool = False  # it was in the outbox at some time
    payloads: list[bytes] = field(default_factory=list)


class World:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.brain = Brain(now_ms=lambda: 1_000 + int(self.now_s * 1000))
        self.now_s = 0.0
        self.session = SessionId(bytes(15) + b"s")
        self.seq = 0
        self.apply(OpenSession())
        created = self.apply(CreateQueue(name="q", settings=QueueSettings(), groups=("default",))).reply
        assert isinstance(created, QueueCreated)
        self.queue_id: QueueId = created.queue_id
        self.wire: list[Produce] = []  # copies that may arrive at any time
        self.calls: list[Call] = []
        self.told: list[Told] = []
        self.outbox: dict[int, Numbered] = {}
        self.outbox_fails = False
        self.dies = 0  # in so many actions
        self.written = 0
        self.nonce = 0
        self.durable = seed % 2 == 0
        self.open()

    # The producer and what it asks for ------------------------------------------------------------------

    def open(self) -> None:
        self.calls = []
        self.core = Producing(
            queue_id=self.queue_id,
            client_id="svc",
            window=WINDOW,
            timeout_s=TIMEOUT_S,
            random=self.random,
            durable=self.durable,
        )
        left = [fresh(self.outbox[number]) for number in sorted(self.outbox)]
        opened = self.fence()
        self.core.opened(opened.epoch, opened.high_water, left)
        self.perform()

    def fence(self) -> ProducerOpened:
        self.nonce += 1
        command = OpenProducer(queue_id=self.queue_id, client_id="svc", nonce=self.nonce.to_bytes(16))
        opened = self.apply(command).reply
        assert isinstance(opened, ProducerOpened)
        return opened

    def perform(self) -> None:
        while actions := self.core.take_actions(self.now_s):
            self.do(actions)
        assert self.core.wake_at_s > self.now_s

    def do(self, actions: list[Do]) -> None:
        for at, action in enumerate(actions):
            if self.dies:
                self.dies -= 1
                if not self.dies:
                    raise Killed
            match action:
                case Save(erased=erased, stored=stored):
                    if self.outbox_fails:
                        instead = self.core.not_saved(actions[at + 1 :], OutboxFailed(path="p", problem="full"))
                        self.do(instead)
                        return
                    for told in self.told:  # given up on purpose; its caller may be killed before he is told
                        request = told.sending.request
                        if request is not None and request.first_seq in erased and not request.confirmed:
                            told.saved = False
                    for number in erased:
                        self.outbox.pop(number, None)
                    for request in stored:
                        assert request.first_seq not in self.outbox
                        self.outbox[request.first_seq] = fresh(request)
                        for told in self.told:
                            told.saved = told.saved or told.sending in request.sendings
                case Ask(request=request, deadline_s=deadline_s):
                    if self.durable:
                        assert request.first_seq in self.outbox, "on the wire before it was on disk"
                        kept = self.outbox[request.first_seq]
                        assert (kept.columns, kept.body) == (request.columns, request.body)
                    pending = Pending(CallId(1), action.command, deadline_s, self.now_s)
                    self.calls.append(Call(action, pending))
                case Tell(sending=sending, outcome=outcome):
                    (told,) = [told for told in self.told if told.sending is sending]
                    assert told.outcome is None, "told twice"
                    told.outcome = outcome
                    assert self.now_s <= sending.deadline_s + 3.0, "told long after its deadline"

    def step(self, name: str) -> None:
        try:
            getattr(self, name)()
        except Killed:
            self.crash()

    # What may happen ------------------------------------------------------------------------------------

    def send(self) -> None:
        self.written += 1
        payloads = [b"%d.%d" % (self.written, n) for n in range(self.random.choice((1, 1, 2, 5)))]
        if self.random.random() < 0.1:
            payloads[0] += bytes(200)
        for sending in sendings_of(payloads, PLAIN, WINDOW):
            sending.awaited = self.random.random() < 0.5
            self.core.line_up(sending)
            if self.core.ended is None and self.core.may_enter(sending):
                self.told.append(Told(sending, payloads=payloads))
                self.core.send(sending, self.now_s + TIMEOUT_S)
            self.core.leave_line(sending)
        self.perform()

    def attempt(self) -> None:
        """The client core sends a call, for the first time or again."""
        for call in self.some(self.calls):
            assert isinstance(call.ask.command, Produce)
            call.pending.open += 1
            self.wire.append(call.ask.command)

    def decline(self) -> None:
        """A node sends an attempt away: that one did not happen."""
        for call in self.some([call for call in self.calls if call.ask.command in self.wire and call.pending.open]):
            self.wire.remove(call.ask.command)
            call.pending.open -= 1
            call.pending.refusal = NotLeader(leader=None)

    def arrive(self) -> None:
        """An attempt reaches the fold; mostly its answer reaches the caller, if he still waits."""
        for command in self.some(self.wire):
            self.wire.remove(command)
            answer = self.apply(command)
            waiting = [call for call in self.calls if call.ask.command is command]
            if waiting and self.random.random() < 0.7:
                call = waiting[0]
                error = answer.reply.error if isinstance(answer.reply, Failed) else None
                unknown = unresolved(call.pending, error) if error is not None else None
                self.finish(call, unknown or answer)

    def finish(self, call: Call, outcome: Answer | HoldfastError) -> None:
        self.calls.remove(call)
        self.core.answered(call.ask.request, outcome, self.now_s)
        self.perform()

    def wait(self) -> None:
        self.pass_to(self.now_s + self.random.choice((0.01, 0.1, 0.6, 2.0, 6.0)))

    def pass_to(self, at_s: float) -> None:
        while True:
            deadlines = [call.ask.deadline_s for call in self.calls]
            next_s = min([*deadlines, self.core.wake_at_s])
            if next_s > at_s:
                break
            self.now_s = max(self.now_s, next_s)
            for call in [call for call in self.calls if call.ask.deadline_s <= self.now_s]:
                outcome = gave_up(call.pending, {}, connected=True, window_full=False)
                self.finish(call, outcome)
            self.perform()
        self.now_s = at_s

    def fill(self) -> None:
        self.limit("max_backlog_messages", self.random.choice((1, 20, None)))

    def narrow(self) -> None:
        self.limit("max_message_bytes", self.random.choice((100, None)))

    def limit(self, name: str, value: int | None) -> None:
        self.apply(UpdateQueue(queue_id=self.queue_id, changes=((name, value),)))

    def be_fenced(self) -> None:
        self.fence()

    def fail_disk(self) -> None:
        self.outbox_fails = True

    def die(self) -> None:
        """Killed in the middle of what the core asked for."""
        self.dies = self.random.choice((1, 2, 3))

    def crash(self) -> None:
        """Killed: nobody is told anything any more, and what is on the wire stays there."""
        self.outbox_fails, self.dies = False, 0
        for told in self.told:
            if told.outcome is None:
                told.outcome = CRASHED
        self.open()

    def heal(self) -> None:
        """Room for everything, and a leader that answers: until nothing is left to do."""
        self.limit("max_backlog_messages", None)
        self.limit("max_message_bytes", None)
        for _ in range(2_000):
            if self.core.settled or (self.core.ended is not None and not self.calls):
                break
            for call in list(self.calls):
                if call in self.calls:
                    answer = self.apply(call.ask.command)
                    self.finish(call, answer)
            self.pass_to(self.now_s + 0.5)
        else:
            raise AssertionError("it never settles")
        for command in self.wire:
            self.apply(command)

    # Reading --------------------------------------------------------------------------------------------

    def apply(self, command: Command) -> Answer:
        numbered = isinstance(command, CreateQueue | UpdateQueue | OpenProducer)
        self.seq += numbered
        session = NO_SESSION if isinstance(command, Produce) else self.session
        seq = self.seq if numbered else 0
        request = Request(request_id=1, command=command, session=session, request_seq=seq, done_below=seq)
        answer = self.brain.request(request)
        assert answer is not None
        return answer

    def stored(self) -> list[bytes]:
        answer = self.brain.query(Read(queue_id=self.queue_id, from_version=1, to_version=10_000))
        assert isinstance(answer.reply, Messages)
        found = []
        for batch in answer.reply.batches:
            ends = [
                int.from_bytes(batch.columns.ends[at : at + 4], "little") for at in range(0, len(batch.columns.ends), 4)
            ]
            body, start = bytes(batch.body), batch.columns.start
            found += [body[begin - start : end - start] for begin, end in zip([start, *ends], ends, strict=False)]
        return found

    def some(self, among: list[T]) -> list[T]:
        return [self.random.choice(among)] if among else []


def fresh(request: Numbered) -> Numbered:
    """As a file gives it back."""
    return Numbered(
        request.first_seq, request.numbering_epoch, request.columns, request.body, request.done_below, saved=True
    )


OFTEN = ["send", "send", "send", "attempt", "attempt", "arrive", "arrive", "arrive", "wait"]
SELDOM = ["decline", "fill", "narrow", "wait", "be_fenced", "crash", "fail_disk", "die"]


def play(seed: int) -> World:
    world = World(seed)
    likely = SELDOM[: 4 + seed % 5]  # many worlds without fencing and crashes, so that they grow old
    for _ in range(120):
        world.step(world.random.choice(OFTEN * 3 + likely))
    return world


@pytest.mark.parametrize("first", SEEDS[::50])
def test_no_message_is_lost_or_doubled_and_every_outcome_is_true(first: int) -> None:
    """P2, as the client does it."""
    for seed in range(first, first + 50):
        world = play(seed)
        world.step("heal")
        if world.durable:  # the last process sends what all before it left
            world.crash()
            world.heal()
            assert world.core.ended is None
        judge(world, seed)


def judge(world: World, seed: int) -> None:
    stored = world.stored()
    assert len(set(stored)) == len(stored), f"seed {seed}: doubled"
    known = [payload for told in world.told for payload in told.payloads]
    assert [payload for payload in known if payload in stored] == stored, f"seed {seed}: out of order"
    for told in world.told:
        there = [payload in stored for payload in told.payloads]
        assert all(there) or not any(there), f"seed {seed}: in part"
        match told.outcome:
            case range() as versions:
                assert [stored[version - 1] for version in versions] == told.payloads, f"seed {seed}: other versions"
            case Indeterminate():
                assert all(there) or not (world.durable and told.saved), f"seed {seed}: lost from the outbox"
            case HoldfastError() as error:
                assert not any(there), f"seed {seed}: {error!r}, and it was written"
            case None:
                raise AssertionError(f"seed {seed}: nobody was told")


def test_the_schedules_reach_every_outcome() -> None:
    seen: Counter[str] = Counter()
    for seed in SEEDS[:60]:
        seen.update(type(told.outcome).__name__ for told in play(seed).told)
    assert {"range", "OutcomeUnknown", "NoLeader", "QueueFull", "MessageTooLarge", "ProducerFenced"} <= seen.keys()
