"""Two workers and a meddler over one group, with requests and answers that get lost or come late; all from a seed.

Whatever happens, nobody works on a message that another may have, nothing is acked after it was lost, nothing is done
twice in one turn by the same worker, nothing is acked that nobody has done, and in the end every message is over.
"""

import os
from collections import Counter
from random import Random
from typing import Literal

import pytest

from holdfast.client.protocol.commands import (
    AckBatch,
    Command,
    CreateGroup,
    CreateQueue,
    Lease,
    Nack,
    OpenSession,
    Redrive,
    Release,
    Seek,
)
from holdfast.client.protocol.queries import DeadLetters, Stats
from holdfast.client.protocol.replies import DeadListed, GroupStats, Leased
from holdfast.client.protocol.values import GroupSettings, QueueId, QueueSettings
from holdfast.client.turns import ACK, Action, Ask, Lose, Options, Start, TurnKey, Verdict
from tests.support.desk import Desk, fold
from tests.support.machine import Machine, produce

Q = QueueId(1)
SEEDS = range(*map(int, os.environ.get("HOLDFAST_SEEDS", "0-25").split("-")))
MEDDLER = 3


class Watched(Desk):
    """Notes what its handlers do, and complains as soon as a rule is broken."""

    def __init__(self, machine: Machine, options: Options, world: "World", session: int) -> None:
        self.world = world
        self.done: set[TurnKey] = set()  # completed here, and neither lost nor refused before
        self.gone: set[tuple[int, int]] = set()  # (lease, version) of turns that were lost
        super().__init__(machine, options, session=session)

    def key(self, start: Start) -> TurnKey:
        return start.message.id, start.message.group_generation, start.message.redrives

    def finish(self, turn: int, verdict: Verdict) -> None:
        start = self.running[turn]
        if verdict is ACK and turn not in self.lost:
            self.done.add(self.key(start))
            self.world.done[start.message.version] += 1
        self.end_turn(turn, verdict)

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Start):
                version = action.message.version
                assert self.key(action) not in self.done, f"{version} was done here in this turn of it"
                assert action.message.payload == str(version).encode()
                for other in self.world.desks:
                    held = [s for t, s in other.running.items() if t not in other.lost and s.message.version == version]
                    same = [s for s in held if s.message.group_generation == action.message.group_generation]
                    assert not same, f"{version} is worked on twice"
                self.world.started[version] += 1
            elif isinstance(action, Lose):
                start = self.running[action.turn]
                self.gone.add((start.lease_id, start.message.version))
            elif isinstance(action, Ask) and isinstance(action.what, AckBatch):
                acked = {(lease, v) for lease, first, last in action.what.ranges for v in range(first, last + 1)}
                assert not acked & self.gone, "what was lost is acked"
        super()._do(actions)


class World:
    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.machine = Machine()
        self.done: Counter[int] = Counter()
        self.started: Counter[int] = Counter()
        self.desks: list[Watched] = []
        self.late: list[tuple[Command, int]] = []  # requests that arrive when nobody waits any more
        for session in (1, 2, MEDDLER):
            self.machine.do(OpenSession(consumer_id=""), session)
        counts: Literal["leased", "begun"] = random.choice(("leased", "begun"))
        self.machine.do(CreateQueue(name="q", settings=QueueSettings(visibility_timeout_ms=2_000), groups=()))
        settings = GroupSettings(count=counts, max_delivery_attempts=random.choice((3, 50)))
        self.machine.do(CreateGroup(queue_id=Q, group="default", settings=settings))
        self.produced = 0
        for session in (1, 2):
            options = Options(
                concurrency=random.randint(1, 4), prefetch=random.randint(0, 4), wait_ms=500, timeout_s=3.0
            )
            self.desks.append(Watched(self.machine, options, self, session))

    def step(self) -> None:
        random = self.random
        desk = random.choice(self.desks)
        match random.choices(
            ("answer", "lose", "late", "pass", "end", "produce", "meddle", "arrive"), (40, 4, 4, 25, 25, 6, 3, 4)
        )[0]:
            case "answer" if desk.asks:
                desk.answer(random.choice(list(desk.asks)))
            case "lose" if desk.asks:
                desk.lose(random.choice(list(desk.asks)), folded=random.random() < 0.5)
            case "late" if desk.asks:
                ask = random.choice(list(desk.asks))
                what = desk.asks[ask].what
                if isinstance(what, Command):
                    self.late.append((what, desk.session))
                desk.lose(ask, folded=False)
            case "arrive" if self.late:
                command, session = self.late.pop(random.randrange(len(self.late)))
                fold(self.machine, command, session)
            case "pass":
                self.pass_ms(random.choice((1, 20, 200, 1_500)))
            case "end" if desk.running:
                verdicts = (ACK, ACK, ACK, Verdict("nack", error="boom"), Verdict("nack", delay_ms=300))
                desk.finish(random.choice(list(desk.running)), random.choice(verdicts))
            case "produce" if self.produced < 60:
                self.produced += 1
                self.machine.do(produce(Q, str(self.produced).encode()), MEDDLER)
            case "meddle":
                self.meddle()

    def pass_ms(self, milliseconds: int) -> None:
        """In small steps, so that each worker wakes when it has to."""
        for _ in range(-(-milliseconds // 10)):
            self.machine.pass_ms(min(10, milliseconds))
            for desk in self.desks:
                desk.wake()

    def meddle(self) -> None:
        """Another session leases and gives back, buries, redrives, or seeks."""
        random, machine = self.random, self.machine
        what = random.choices(("release", "bury", "keep", "redrive", "seek"), (3, 3, 3, 3, 1))[0]
        if what == "seek":
            machine.do(Seek(queue_id=Q, group="default", to="earliest"), MEDDLER)
        elif what == "redrive":
            self.redrive()
        else:
            leased = machine.do(Lease(queue_id=Q, group="default", max_messages=2), MEDDLER)
            if isinstance(leased, Leased) and leased.grants:
                ranges = tuple((leased.lease_id, grant.first, grant.last) for grant in leased.grants)
                if what == "release":
                    machine.do(Release(queue_id=Q, group="default", ranges=ranges), MEDDLER)
                elif what == "bury":
                    machine.do(Nack(queue_id=Q, group="default", ranges=ranges, dead=True), MEDDLER)

    def redrive(self) -> None:
        dead = self.machine.ask(DeadLetters(queue_id=Q))
        assert isinstance(dead, DeadListed)
        for row in dead.rows:
            again = ((row.version, row.version, row.dead_seq),)
            self.machine.do(Redrive(queue_id=Q, group="default", dead=again), MEDDLER)

    def heal(self) -> None:
        """From now on everything arrives, and every handler succeeds."""
        for command, session in self.late:
            fold(self.machine, command, session)
        for _ in range(400):
            self.pass_ms(100)
            for desk in self.desks:
                for ask in list(desk.asks):
                    if ask in desk.asks:
                        desk.answer(ask)
                for turn in list(desk.running):
                    desk.finish(turn, ACK)
            self.redrive()
        for desk in self.desks:
            desk.stop()
            desk.settle_down()
            assert desk.over()


@pytest.mark.parametrize("seed", SEEDS)
def test_every_message_is_done_and_nothing_is_done_or_acked_against_the_rules(seed: int) -> None:
    world = World(seed)
    for _ in range(600):
        world.step()
    world.heal()
    stats = world.machine.ask(Stats(queue_id=Q, group="default"))
    assert isinstance(stats, GroupStats)
    assert stats.in_flight == stats.ready == stats.delayed == stats.dead == 0, stats
    assert stats.acked == stats.produced
    undone = [version for version in range(1, stats.tail_version + 1) if not world.done[version]]
    assert not undone, f"acked, and nobody has done them: {undone}"
