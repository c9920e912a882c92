"""A worker's core beside a state machine: what it asks is folded when a test says so, and time passes when it says so.

One clock serves both, so that the test sees what a lease is by the rules, and what the core believes of it.
"""

import math
from dataclasses import replace
from random import Random

from holdfast.client.events import Outcome
from holdfast.client.protocol.commands import Command, Lease
from holdfast.client.protocol.errors import OutcomeUnknown
from holdfast.client.protocol.replies import Answer, Leased
from holdfast.client.protocol.values import Place
from holdfast.client.turns import (
    ACK,
    Action,
    Answered,
    Ask,
    Ended,
    Event,
    Lose,
    Note,
    Options,
    Start,
    Stop,
    Verdict,
    Withdraw,
    Woken,
)
from holdfast.client.working import Working
from holdfast.storage import views
from tests.support.machine import START_MS, Machine

LOST = OutcomeUnknown(problem="no answer came in time")


def fold(machine: Machine, command: Command, session: int) -> Answer:
    """The answer as a client gets it, a lease with its messages."""
    answer = machine.entry([machine.envelope(command, session)])[0]
    if isinstance(answer.reply, Leased) and answer.reply.grants:
        with machine.store.read() as txn:
            answer = replace(answer, reply=views.deliver(txn, command.queue_id, answer.reply))  # type: ignore[union-attr]
    return answer


def _at_ms(at_s: float) -> float:
    return START_MS + math.ceil(at_s * 1000 - 5e-3) if at_s < math.inf else math.inf


def _is_lease(asked: Ask) -> bool:
    return isinstance(asked.what, Lease)


class Desk:
    """One worker. `asks` are on their way, `running` are the handlers at work, `lost` those that work in vain."""

    def __init__(
        self, machine: Machine, options: Options | None = None, *, session: int = 1, queue: str = "q",
        withdraws: bool = True,
    ) -> None:  # fmt: skip
        self.machine, self.session, self._withdraws = machine, session, withdraws
        self.options = options or Options()
        self.core = Working(queue, self.options, Random(session))
        self.asks: dict[int, Ask] = {}
        self.running: dict[int, Start] = {}
        self.lost: set[int] = set()
        self.started: list[int] = []  # versions, in the order of their start
        self.sent: list[Command] = []  # every command, as it was asked
        self.notes: list[str] = []
        self._do(self.core.begin(self.now_s))

    @property
    def now_s(self) -> float:
        return (self.machine.now_ms - START_MS) / 1000 + 2e-6  # not before what is due

    def tell(self, event: Event) -> None:
        self._do(self.core.handle(event, self.now_s))

    def answer(self, ask: int) -> None:
        """The request arrives, is folded, and its answer comes back."""
        self.tell(Answered(ask, self.fold(ask)))

    def fold(self, ask: int) -> Outcome:
        what = self.asks.pop(ask).what
        if isinstance(what, Command):
            return fold(self.machine, what, self.session)
        return Answer(Place(self.machine.index, -1, self.machine.now_ms), self.machine.ask(what))  # type: ignore[arg-type]

    def lose(self, ask: int, *, folded: bool) -> None:
        """Its answer never comes; it may have happened."""
        if folded:
            self.fold(ask)
        self.asks.pop(ask, None)
        self.tell(Answered(ask, LOST))

    def settle_down(self) -> None:
        """Answer all that is asked, until only a lease is asked for that finds nothing and would be parked."""
        for _ in range(1_000):
            for ask, asked in list(self.asks.items()):
                if isinstance(asked.what, Lease):
                    answer = self._unless_empty(asked.what)
                    if answer is None:
                        continue
                    del self.asks[ask]
                    self.tell(Answered(ask, answer))
                else:
                    self.answer(ask)
                break
            else:
                return
        raise AssertionError("it asks and asks")

    def pass_ms(self, milliseconds: int) -> None:
        """Time passes, with every waking that is due on the way. Parked leases are answered when their wait is over."""
        until = self.machine.now_ms + milliseconds
        for _ in range(10_000):
            waits = [(self._waits_until_ms(asked), ask) for ask, asked in self.asks.items() if _is_lease(asked)]
            due_ms, parked = min([(_at_ms(self.core.wake_at_s), 0), *waits])
            if due_ms > until:
                self.machine.now_ms = until
                return
            self.machine.now_ms = max(self.machine.now_ms, math.ceil(due_ms))
            if parked:
                self.answer(parked)
                continue
            self.tell(Woken())
            if _at_ms(self.core.wake_at_s) <= self.machine.now_ms < until:
                self.machine.now_ms += 1  # a rounding away from what is due
        raise AssertionError("it wakes and wakes")

    def _waits_until_ms(self, asked: Ask) -> float:
        return _at_ms(asked.deadline_s - self.options.timeout_s)

    def end(self, version: int, verdict: Verdict = ACK) -> None:
        """The handler of this version ends."""
        self.end_turn(next(turn for turn, start in self.running.items() if start.message.version == version), verdict)

    def end_turn(self, turn: int, verdict: Verdict) -> None:
        self.running.pop(turn)
        self.lost.discard(turn)
        self.tell(Ended(turn, verdict))

    def wake(self) -> None:
        """If it is time."""
        if self.core.wake_at_s <= self.now_s:
            self.tell(Woken())

    def stop(self, within_ms: int = 10_000) -> None:
        self.tell(Stop(self.now_s + within_ms / 1000))

    def over(self) -> bool:
        return self.core.over

    def at_work(self) -> list[int]:
        """Versions whose handlers run and are not lost."""
        return [start.message.version for turn, start in self.running.items() if turn not in self.lost]

    def asked_for(self, kind: type[Command]) -> list[int]:
        return [ask for ask, asked in self.asks.items() if isinstance(asked.what, kind)]

    def _unless_empty(self, lease: Lease) -> Answer | None:
        answer = fold(self.machine, lease, self.session)
        return None if isinstance(answer.reply, Leased) and not answer.reply.grants else answer

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Ask(ask=ask, what=what):
                    self.asks[ask] = action
                    if isinstance(what, Command):
                        self.sent.append(what)
                case Withdraw(ask=ask):
                    if self._withdraws:  # else the answer was faster
                        self.asks.pop(ask)
                        self._do(self.core.handle(Answered(ask, LOST), self.now_s))
                case Start(turn=turn, message=message):
                    self.running[turn] = action
                    self.started.append(message.version)
                case Lose(turn=turn):
                    assert turn in self.running, "a turn is lost that does not run"
                    assert turn not in self.lost, "a turn is lost twice"
                    self.lost.add(turn)
                case Note(text=text):
                    self.notes.append(text)
