"""Who asks at the wrong moment: sequences that seeds come upon too seldom, written down step by step.

The nodes are those of every simulation; only the clients are here, each of which reaches some nodes and not others.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

import pytest

from holdfast.client.events import Outcome
from holdfast.client.protocol import commands as c
from holdfast.client.protocol import queries as q
from holdfast.client.protocol.columns import MessageParts, pack
from holdfast.client.protocol.errors import HoldfastError
from holdfast.client.protocol.replies import Answer, Leased, Produced, QueueCreated
from holdfast.client.protocol.values import QueueId, QueueSettings
from holdfast.cluster.consensus import BATCH
from holdfast.jepsen.simulation.clients import PROMPT_S, Ask, Shell
from holdfast.jepsen.simulation.cluster import OUTCOME_S, Plan, Simulation
from holdfast.jepsen.simulation.host import HostedLog
from holdfast.storage.entry import decode_entry

Q = QueueId(1)
VISIBLE_MS = 500
STATS = q.Stats(queue_id=Q, group="default")
EMPTY = c.Lease(queue_id=Q, group="default", max_messages=1)
WAIT = c.Lease(queue_id=Q, group="default", max_messages=1, wait_ms=30_000)


def produced(body: bytes, **times: int) -> c.Produce:
    columns, data = pack([MessageParts(body, **times)])  # type: ignore[arg-type]
    return c.Produce(queue_id=Q, columns=columns, body=data)


class Person:
    """One client that does what it is told."""

    def __init__(self, simulation: Simulation, name: str, *nodes: str) -> None:
        self._simulation = simulation
        self.shell = Shell(simulation, 0, name, Random(name), nodes or None)

    def begins(self, what: c.Command | q.Query, stale: bool = False) -> list[Outcome]:
        """Ask; the outcome will be in the list."""
        outcomes: list[Outcome] = []
        self.shell.call(Ask(what, stale=stale), outcomes.append)
        return outcomes

    def asks(self, what: c.Command | q.Query, stale: bool = False) -> Outcome:
        outcomes = self.begins(what, stale)
        until(self._simulation, lambda: bool(outcomes), 5.0)
        return outcomes[0]


def until(simulation: Simulation, holds: Callable[[], bool], limit_s: float, step_s: float = 0.001) -> None:
    began_s = simulation.scheduler.now_s
    while not holds():
        assert simulation.scheduler.now_s - began_s < limit_s, simulation.describe()
        simulation.run(step_s)


@contextmanager
def led(seed: int) -> Iterator[tuple[Simulation, HostedLog]]:
    """Three nodes, their leader, and a queue with nothing in it that nobody else uses."""
    with Simulation(Plan(seed=seed, clients=0, faults=())) as simulation:
        simulation.run(2.0)
        leader = simulation.leader()
        assert leader is not None and leader.replica.serving
        settings = QueueSettings(visibility_timeout_ms=VISIBLE_MS)
        created = Person(simulation, "maker").asks(c.CreateQueue(name="q", settings=settings))
        assert isinstance(created, Answer) and isinstance(created.reply, QueueCreated), created
        simulation.run(0.2)
        simulation.is_prompt = False
        yield simulation, leader


def cut_off(simulation: Simulation, name: str, noticed_by: list[str]) -> None:
    """From all other nodes; these find out at once, and the node itself does not."""
    others = [other for other in simulation.names if other != name]
    simulation.network.cut_off([link for other in others for link in ((name, other), (other, name))])
    for other in noticed_by:
        simulation.network.end_side(other, name)


@pytest.mark.parametrize("what", [STATS, EMPTY], ids=["a query", "an empty long poll"])
def test_a_leader_that_is_cut_off_tells_those_who_still_reach_it_nothing_old(what: c.Lease | q.Stats) -> None:
    """Q1, L7, I26: another leads and has confirmed more, and this one does not know."""
    asked_in_time = 0
    for seed in range(5):
        with led(seed) as (simulation, leader):
            others = [name for name in simulation.names if name != leader.host.name]
            within = Person(simulation, "within", leader.host.name)
            assert isinstance(within.asks(what), Answer)
            without = Person(simulation, "without", *others)
            assert isinstance(without.asks(STATS, stale=True), Answer)
            cut_off(simulation, leader.host.name, others)
            confirmed = without.begins(produced(b"new"))
            until(simulation, lambda: bool(confirmed), 5.0)  # noqa: B023
            assert isinstance(confirmed[0], Answer) and isinstance(confirmed[0].reply, Produced)
            asked_in_time += leader.leads
            outcome = within.begins(what)
            simulation.run(6.0)  # the checker compares what it is told with what the other was told
            assert isinstance(outcome[0], HoldfastError), outcome
    assert asked_in_time >= 3


@pytest.mark.parametrize("what", [STATS, EMPTY, produced(b"x")], ids=["a query", "a lease", "a produce"])
def test_what_came_early_to_a_leader_that_never_serves_has_an_outcome(what: c.Command | q.Query) -> None:
    """I32: it is elected and cut off before its first entry is anybody else's."""
    for seed in range(3):
        with led(seed) as (simulation, former):
            others = [host for host in simulation.hosts if host is not former.host]
            people = {host.name: Person(simulation, host.name, host.name) for host in others}
            for person in people.values():
                assert isinstance(person.asks(STATS, stale=True), Answer)  # it is connected
            former.host.crash(power=False)
            until(simulation, lambda: any(host.logs[0].leads for host in others), 5.0, 0.0002)  # noqa: B023
            leader = next(host.logs[0] for host in others if host.logs[0].leads)
            cut_off(simulation, leader.host.name, [])
            outcome = people[leader.host.name].begins(what)
            until(simulation, lambda: bool(leader.replica._early), 0.1)  # noqa: B023
            assert not leader.replica.serving
            simulation.run(OUTCOME_S + 1.0)
            assert isinstance(outcome[0], HoldfastError)
            simulation._check_outcomes()
            assert leader.replica._early == []


@pytest.mark.parametrize("brings", ["a lease", "a delayed message"])
def test_who_waits_is_woken_by_what_the_command_of_a_killed_client_brings(brings: str) -> None:
    """L7, T3, I32: it is killed at some moment between its request and the answer, and nobody else does anything."""
    killed_in_time = 0
    for at in range(12):
        with led(at % 3) as (simulation, leader):
            first, waiting, producer = (Person(simulation, name) for name in ("first", "waiting", "producer"))
            for person in (first, waiting, producer):
                assert isinstance(person.asks(EMPTY), Answer)
            if brings == "a lease":
                dead = first
                first.begins(WAIT)
                simulation.run(0.1)
                outcome = waiting.begins(WAIT)
                simulation.run(0.5)
                producer.begins(produced(b"x"))
                until(simulation, lambda: _newest(leader, c.Lease), 1.0, 0.0002)
            else:
                dead = producer
                outcome = waiting.begins(WAIT)
                simulation.run(0.5)
                producer.begins(produced(b"x", delay_ms=VISIBLE_MS))
                until(simulation, lambda: _newest(leader, c.Produce), 1.0, 0.0002)
            simulation.run(0.0004 * at)
            killed_in_time += leader.state.reached.index < leader.raft.journal.last
            dead.shell.vanish()
            simulation.run(VISIBLE_MS / 1_000 + PROMPT_S)
            assert len(outcome) == 1, f"killed after {0.4 * at:.1f} ms"
            assert isinstance(outcome[0], Answer) and isinstance(outcome[0].reply, Leased) and outcome[0].reply.grants
    assert killed_in_time >= 3


def _newest(leader: HostedLog, kind: type[c.Command]) -> bool:
    """Whether the newest entry of this log has such a command."""
    entries, _ = leader.raft.journal.read(leader.raft.journal.last, 1 << 20)
    command, index, _ = entries[-1]
    return command[:1] == BATCH and any(
        isinstance(envelope.command, kind) for envelope, _ in decode_entry(index, command[1:]).commands
    )
