"""Simulated clients: the real client core over simulated connections, and people who use it as people do.

A task is a generator: it yields what it wants, a call or a pause, and is sent the outcome. What may have happened is
asked again under its first identity by the core, and where that gives up, a numbered produce by its producer.
"""

from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Literal

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
from holdfast.client.protocol import commands as c
from holdfast.client.protocol import queries as q
from holdfast.client.protocol.columns import MessageParts, pack
from holdfast.client.protocol.replies import Answer, DeadListed, Leased, Produced, QueueCreated, QueueDescribed, Reply
from holdfast.client.protocol.values import Backoff, QueueId, QueueSettings
from holdfast.jepsen.simulation.checker import Call, Violation
from holdfast.jepsen.simulation.wire import Wire

if TYPE_CHECKING:
    from holdfast.jepsen.simulation.cluster import Simulation

GROUPS = ("default", "audit")
CALL_S = (0.3, 1.0, 4.0)  # what a call may take, beside its wait: some do not wait for a new leader
PROMPT_S = 1.5  # what an answer may take, where nothing fails: an entry or two, and a Touch
DRAIN_WAIT_MS = 30_000  # longer than a drain may take: only a wake can end such a wait in time


@dataclass(frozen=True, slots=True)
class Ask:
    what: c.Command | q.Query
    stale: bool = False
    min_index: int = 0


@dataclass(frozen=True, slots=True)
class Pause:
    seconds: float


Task = Generator[Ask | Pause, Reply | None, None]  # sent: the reply, or None where there was none
Steps = Generator[Ask | Pause, Reply | None, Reply | None]


class Shell:
    """What `aio` and `blocking` are to real clients: carries out what the core asks for."""

    def __init__(
        self, simulation: "Simulation", log: int, name: str, rng: Random, reached: Collection[str] | None = None
    ) -> None:
        """`reached`: the nodes that it finds its way to, where that is not all of them."""
        self._simulation, self._log, self._rng = simulation, log, rng
        self._scheduler, self._checker = simulation.scheduler, simulation.checkers[log]
        self._reached = simulation.names if reached is None else reached
        addresses = [simulation.address(node, log) for node in simulation.names if node in self._reached]
        self._core = Core(rng.sample(addresses, len(addresses)), random=Random(rng.random()), consumer_id=name)
        self._wires: dict[str, Wire] = {}
        self._calls: dict[CallId, tuple[Call, Callable[[Outcome], None]]] = {}
        self._alarm = 0
        self.closed = False

    @property
    def open_calls(self) -> int:
        return len(self._calls)

    def call(self, ask: Ask, done: Callable[[Outcome], None]) -> None:
        what, now_s = ask.what, self._scheduler.now_s
        wait_s = what.wait_ms / 1_000 if isinstance(what, c.Lease) else 0.0
        bound_s = wait_s * 1.1 + PROMPT_S if self._simulation.is_calm else None
        record = self._checker.began(what, ask.stale, bound_s)
        patience_s = max(CALL_S) if self._simulation.is_prompt else self._rng.choice(CALL_S)
        deadline_s = now_s + wait_s * 1.1 + patience_s
        call, actions = self._core.call(what, now_s, deadline_s=deadline_s, stale=ask.stale, min_index=ask.min_index)
        self._calls[call] = (record, done)
        self._perform(actions)

    def close(self) -> None:
        """End everything; each open call gets what is known of it."""
        self.closed = True
        self._perform(self._core.close(self._scheduler.now_s))

    def vanish(self) -> None:
        """As a process that is killed: nobody hears what becomes of its calls, its sockets close."""
        self.closed = True
        for wire in self._wires.values():
            wire.close()
        self._wires.clear()
        for record, _ in self._calls.values():
            self._checker.forgotten(record)
        self._calls.clear()

    def drop_connections(self) -> None:
        for wire in list(self._wires.values()):
            wire.reset()

    # Connections: see `Caller`

    def connected(self, wire: Wire) -> None:
        self._handle(wire, Connected(self._address(wire)))

    def received(self, wire: Wire, data: bytes) -> None:
        self._handle(wire, BytesReceived(self._address(wire), data))

    def disconnected(self, wire: Wire) -> None:
        address = self._address(wire)
        if self._wires.get(address) is wire:
            del self._wires[address]
            self._feed(Disconnected(address))

    def _address(self, wire: Wire) -> str:
        return self._simulation.address(wire.node.host.name, self._log)

    def _handle(self, wire: Wire, event: Event) -> None:
        if self._wires.get(self._address(wire)) is wire:
            self._feed(event)

    def _feed(self, event: Event) -> None:
        self._perform(self._core.handle(event, self._scheduler.now_s))

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Connect(address=address):
                    wire = self._wires[address] = self._simulation.wire(self, address)
                    if wire.node.host.name in self._reached:
                        wire.dial()
                case Write(address=address, buffers=buffers):
                    if address in self._wires:
                        self._wires[address].write(b"".join(buffers))
                case Close(address=address):
                    if address in self._wires:
                        self._wires.pop(address).close()
                case WakeAt(at_s=at_s):
                    self._set_alarm(at_s)
                case Finish(call=call, outcome=outcome):
                    record, done = self._calls.pop(call)
                    self._checker.finished(record, outcome)
                    # Not from here: the caller may call again, and the core is in the middle of something.
                    self._scheduler.after(0.0, lambda done=done, outcome=outcome: done(outcome))  # type: ignore[misc]

    def _set_alarm(self, at_s: float) -> None:
        self._alarm += 1
        alarm = self._alarm
        if at_s != float("inf"):
            at_s = max(at_s, self._scheduler.now_s)
            self._scheduler.at(at_s, lambda: self._feed(Woken()) if alarm == self._alarm and not self.closed else None)


class Client:
    """One client process: a shell and its tasks."""

    def __init__(self, simulation: "Simulation", log: int, name: str, rng: Random) -> None:
        self._simulation, self._log, self.name, self._rng = simulation, log, name, rng
        self._scheduler = simulation.scheduler
        self.shell = Shell(simulation, log, name, rng)
        self._queue_ids: dict[str, QueueId] = {}
        self._messages = 0
        self._highest_index = 0
        self._leases: list[Leased] = []  # of all that it ever got

    def begin(self) -> None:
        for task in (self._produce, self._produce_in_session, self._consume, self._consume, self._poll, self._inquire):
            self._go_on(self._with_queues(task), None)

    def drain(self, queue: str, group: str) -> None:
        """Take and settle whatever there is, until told to close. One lease at a time: a session's window is short."""
        self._go_on(self._with_queues(lambda: self._drain(queue, group)), None)

    # Running tasks

    def _go_on(self, task: Task, reply: Reply | None) -> None:
        if self.shell.closed:
            return
        try:
            wanted = task.send(reply)
        except StopIteration:
            return
        if isinstance(wanted, Pause):
            self._scheduler.after(wanted.seconds, lambda: self._go_on(task, None))
        else:
            self.shell.call(wanted, lambda outcome: self._go_on(task, self._learn(outcome)))

    def _learn(self, outcome: Outcome) -> Reply | None:
        if not isinstance(outcome, Answer):
            return None
        self._highest_index = max(self._highest_index, outcome.place.index)
        return outcome.reply

    def _with_queues(self, task: Callable[[], Task]) -> Task:
        """The queues are there before the work begins, whoever made them."""
        for name, settings in self._simulation.settings.items():
            while name not in self._queue_ids:
                reply = yield Ask(c.CreateQueue(name=name, settings=settings, groups=GROUPS))
                if not isinstance(reply, QueueCreated):
                    reply = yield Ask(q.DescribeQueue(name=name))
                if isinstance(reply, QueueCreated | QueueDescribed):
                    self._queue_ids[name] = reply.queue_id
        yield from task()

    @property
    def _queue(self) -> QueueId:
        return self._queue_ids[self._simulation.plan_queue]

    def _think(self, most_s: float) -> Pause:
        return Pause(most_s * self._rng.random() * self._simulation.pace)

    # Producing

    def _batch(self) -> dict[str, object]:
        """Messages that nobody else ever sends."""
        rng = self._rng
        times: dict[str, int] = {}
        if rng.random() < 0.15:
            times["delay_ms"] = rng.choice((1, 150, 700))
        if rng.random() < 0.1:
            times["ttl_ms"] = rng.choice((1, 300, 2_000))
        parts = []
        for _ in range(rng.choice((1, 1, 2, 4))):
            self._messages += 1
            parts.append(MessageParts(f"{self.name}/{self._messages}".encode(), **times))  # type: ignore[arg-type]
        columns, body = pack(parts)
        return {"queue_id": self._queue, "columns": columns, "body": body}

    def _produce(self) -> Task:
        """Numbered by its producer, and asked again after an unknown outcome until there is one."""
        seq = 1
        while not self._simulation.quiet:
            command = c.Produce(client_id=self.name, first_seq=seq, **self._batch())  # type: ignore[arg-type]
            reply = yield Ask(command)
            for _ in range(5):
                if reply is not None:
                    break
                reply = yield Ask(command)
            if isinstance(reply, Produced) and self._rng.random() < 0.1:
                again = yield Ask(command)
                if isinstance(again, Produced) and (again.first_version, again.replayed) != (reply.first_version, True):
                    raise Violation(f"{command} was {reply}, and is {again} when it is repeated")
            seq += command.columns.count
            yield self._think(0.15)

    def _produce_in_session(self) -> Task:
        while not self._simulation.quiet:
            yield Ask(c.Produce(**self._batch()))  # type: ignore[arg-type]
            yield self._think(0.5)

    # Consuming

    def _consume(self) -> Task:
        rng = self._rng
        while not self._simulation.quiet:
            group = rng.choice(GROUPS)
            command = c.Lease(
                queue_id=self._queue,
                group=group,
                max_messages=rng.choice((1, 3, 10)),
                visibility_timeout_ms=rng.choice((None, None, 400, 1_500)),
                wait_ms=rng.choice((0, 200, 1_000, 2_500)),
                auto_ack=rng.random() < 0.1,
            )
            reply = yield Ask(command)
            if isinstance(reply, Leased) and reply.grants and not command.auto_ack:
                self._leases.append(reply)
                yield from self._settle(self._queue, group, reply)
            yield self._think(0.1)

    def _poll(self) -> Task:
        """Look again and again where nothing is most of the time: an empty answer has no entry (L7)."""
        queue_id = self._queue_ids["grave"]
        while not self._simulation.quiet:
            reply = yield Ask(c.Lease(queue_id=queue_id, group="audit", max_messages=3))
            if isinstance(reply, Leased) and reply.grants:
                self._leases.append(reply)
                yield from self._settle(queue_id, "audit", reply)
            yield self._think(0.08)

    def _settle(self, queue_id: QueueId, group: str, leased: Leased) -> Task:
        """Most of it in time, some of it late, twice, by somebody else's number, or not at all."""
        rng = self._rng
        yield Pause(rng.choice((0.0, 0.0, 0.05, 0.4, 1.2)) * rng.random())
        drawn = rng.random()
        if drawn < 0.1:
            return
        if drawn < 0.3:
            yield Ask(c.Extend(queue_id=queue_id, group=group, lease_id=leased.lease_id))
            yield self._think(0.3)
        ranges: list[tuple[int, int, int]] = [(leased.lease_id, each.first, each.last) for each in leased.grants]
        foreign = rng.choice(self._leases).lease_id + rng.choice((-1, 0, 1))
        if rng.random() < 0.15 and foreign != leased.lease_id:
            ranges.append((foreign, 1, rng.randint(1, 20)))
        some = [each for each in ranges if each[0] > 0 and rng.random() < 0.9]
        if not some:
            return
        chosen = tuple(some)
        verbs = ["ack"] * 8 + ["nack"] * 5 + ["release"] * 2 + ["dead"] * 2 + ["transaction"]
        match rng.choice(verbs):
            case "ack":
                yield Ask(c.AckBatch(queue_id=queue_id, group=group, ranges=chosen))
                if rng.random() < 0.1:
                    yield Ask(c.AckBatch(queue_id=queue_id, group=group, ranges=chosen))
            case "nack":
                delay_ms = rng.choice((None, 0, 1, 300, 900))
                yield Ask(c.Nack(queue_id=queue_id, group=group, ranges=chosen, delay_ms=delay_ms, error=self.name))
            case "release":
                yield Ask(c.Release(queue_id=queue_id, group=group, ranges=chosen))
            case "dead":
                yield Ask(c.Nack(queue_id=queue_id, group=group, ranges=chosen, dead=True, error="poison"))
            case _:
                ack = c.AckBatch(queue_id=queue_id, group=group, ranges=chosen)
                yield Ask(c.Transaction(items=(ack, c.Produce(**self._batch()))))  # type: ignore[arg-type]

    def _drain(self, name: str, group: str) -> Task:
        queue_id = self._queue_ids[name]
        while True:
            command = c.Lease(queue_id=queue_id, group=group, max_messages=100, wait_ms=DRAIN_WAIT_MS)
            reply = yield Ask(command)
            if isinstance(reply, Leased) and reply.grants:
                ranges = tuple((reply.lease_id, grant.first, grant.last) for grant in reply.grants)
                yield Ask(c.AckBatch(queue_id=queue_id, group=group, ranges=ranges))
            else:
                yield Pause(0.05)

    # Asking

    def _inquire(self) -> Task:
        rng = self._rng
        while not self._simulation.quiet:
            group, queue_id = rng.choice(GROUPS), rng.choice(list(self._queue_ids.values()))
            version = rng.randint(1, 1 + self._messages)
            query: q.Query = rng.choice(
                (
                    q.Stats(queue_id=queue_id, group=group),
                    q.Explain(queue_id=queue_id, group=group),
                    q.Explain(queue_id=queue_id, group=group, version=version),
                    q.Peek(queue_id=queue_id, group=group, from_version=version, limit=3),
                    q.DeadLetters(queue_id=queue_id, group=group, limit=1_000),
                )
            )
            stale = rng.random() < 0.3
            known = self._highest_index
            reply = yield Ask(query, stale, known if stale and rng.random() < 0.7 else 0)
            if isinstance(reply, DeadListed) and reply.rows and rng.random() < 0.5:
                dead = tuple((row.version, row.version, row.dead_seq) for row in reply.rows[:5])
                yield Ask(c.Redrive(queue_id=queue_id, group=reply.rows[0].group, dead=dead))
            yield self._think(0.4)


def draw_settings(rng: Random) -> dict[str, QueueSettings]:
    """The queues of a run: one where dead letters go, and the one that it is about."""
    strategies: tuple[Literal["park", "move", "discard"], ...] = ("park", "move", "discard")
    strategy = rng.choice(strategies)
    work = QueueSettings(
        visibility_timeout_ms=rng.choice((500, 1_500)),
        max_delivery_attempts=rng.choice((1, 2, 3, 5)),
        max_ack_holes=rng.choice((2, 20, 10_000)),
        max_in_flight=rng.choice((None, None, 8)),
        dlq_strategy=strategy,
        dlq_queue="grave" if strategy == "move" else None,
        on_expired=rng.choice(("discard", "dead_letter")),
        backoff=rng.choice((Backoff(), Backoff("exponential", 20, 500))),
        backoff_on_expiry=rng.random() < 0.3,
        count=rng.choice(("leased", "leased", "begun")),
    )
    return {"grave": QueueSettings(visibility_timeout_ms=1_000, max_delivery_attempts=50), "work": work}
