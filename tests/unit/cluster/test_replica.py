"""One log's turns: what requests, syncs, messages and time make of them. Real parts, no I/O, time by hand."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest

from holdfast.client.protocol import commands as c
from holdfast.client.protocol import errors
from holdfast.client.protocol import queries as q
from holdfast.client.protocol.columns import MessageParts
from holdfast.client.protocol.errors import (
    BadValue,
    BehindIndex,
    BodyDamaged,
    HoldfastError,
    LeaderChanged,
    NoLeader,
    NotLeader,
    Overloaded,
    Withdrawn,
)
from holdfast.client.protocol.limits import U63_MAX
from holdfast.client.protocol.messages import Inquiry, Request
from holdfast.client.protocol.replies import Answer, GroupStats, Leased, Produced, QueueCreated, Settled
from holdfast.client.protocol.values import QueueId, QueueSettings
from holdfast.cluster import comparing
from holdfast.cluster.consensus import BATCH
from holdfast.cluster.events import Role
from holdfast.cluster.journal import Entry, Flush, Journal, Recovered
from holdfast.cluster.membership import Configuration, Member
from holdfast.cluster.messages import DIGEST_BYTES, AppendEntries, AppendReply, Message, StateDigest
from holdfast.cluster.raft import Raft, use_library_clock
from holdfast.cluster.replica import HAND_OVER_MS, LOOK_EVERY_MS, STALE_WAIT_MS, Replica
from holdfast.cluster.state import Reached
from holdfast.jepsen.simulation.state import MachineState
from holdfast.storage.entry import decode_entry
from holdfast.storage.rows import pack_meta
from holdfast.storage.state import View
from holdfast.storage.store import WriteTxn
from holdfast.storage.tables import META_KEY, Table
from tests.support.machine import START_MS, numbered, produce, session_id

Q = QueueId(1)
STATS = q.Stats(queue_id=Q, group="default")
TICK_S = 0.01


class Node:
    """A replica with a disk that is as quick as it is told to be."""

    def __init__(self, cluster: "Nodes", name: str, ruling: Configuration) -> None:
        self._cluster = cluster
        self.name = name
        self.disk_hangs = False
        self.silent = False  # it neither hears nor is heard
        self.again = False  # it wants another turn
        self.outcomes: dict[object, Answer | HoldfastError] = {}
        self.state = MachineState(Reached(1, 0, 0, ruling), lambda *_: None)
        self._start(Journal(Recovered(base=1, base_term=0, last=1)))

    def _start(self, journal: Journal) -> None:
        clock, reached = self._cluster.clock, self.state.reached
        self.raft = Raft(
            me=self.name,
            journal=journal,
            clock=clock,
            rng=Random(self.name),
            applied=reached.index,
            applied_term=reached.term,
            configuration=reached.configuration,
            wall_ms=lambda: self._cluster.wall_ms,
        )
        self.replica = Replica(raft=self.raft, state=self.state, clock=clock, wall_ms=lambda: self._cluster.wall_ms)
        self._flush: Flush | None = None

    def restart(self) -> None:
        """A process that begins anew on the same disk, all of which was written."""
        self._start(self.raft.journal)

    @property
    def is_writing(self) -> bool:
        return self._flush is not None and not self.disk_hangs

    def turn(self) -> None:
        if self._flush is not None and not self.disk_hangs:
            flush, self._flush = self._flush, None
            self.replica.durable(flush.lsn)
        turn = self.replica.turn()
        self._flush = turn.flush or self._flush
        self.again = turn.again
        for token, outcome in turn.outcomes:
            assert token not in self.outcomes, f"{token!r} has a second outcome"
            self.outcomes[token] = outcome
        for peer, message in turn.messages:
            self._cluster.post.append((self.name, peer, message))

    def ask(self, token: object, command: c.Command, session: int = 1, seq: int | None = None) -> None:
        """Give a command to it; nothing happens before the next turn."""
        if numbered(command) and seq is None:
            self._cluster.numbers += 1
        request = Request(
            request_id=1,
            command=command,
            session=session_id(session),
            request_seq=(seq or self._cluster.numbers) if numbered(command) else 0,
        )
        self.replica.request(token, "connection", request, 100)

    def read(self, token: object, query: q.Query = STATS, **named: Any) -> None:
        self.replica.inquire(token, Inquiry(request_id=1, query=query, **named), query)

    def do(self, command: c.Command, session: int = 1) -> Any:
        """A command and its reply."""
        token = object()
        self.ask(token, command, session)
        self._cluster.run()
        return self.reply(token)

    def reply(self, token: object) -> Any:
        outcome = self.outcomes[token]
        assert isinstance(outcome, Answer), outcome
        return outcome.reply

    def has_stepped(self) -> bool:
        """Whether the newest entry of its log is a step of time."""
        return any(isinstance(command, c.TimeStep) for command in self.entries()[-1])

    def entries(self) -> list[list[c.Command]]:
        """The commands of every entry with commands, of the whole log."""
        found, _ = self.raft.journal.read(2, 1 << 30)
        data = [(index, command[1:]) for command, index, _ in found if command[:1] == BATCH]
        return [[envelope.command for envelope, _ in decode_entry(*each).commands] for each in data]


class Nodes:
    """Some nodes that hear each other at once, and time that passes by hand."""

    def __init__(self, *names: str) -> None:
        self.now_s = 1_000.0
        self.wall_error_ms = 0
        self.numbers = 0  # of requests
        self.post: list[tuple[str, str, Message]] = []
        self.loses: Callable[[Message], bool] = lambda _: False
        ruling = Configuration(tuple(Member(name, client_address=f"{name}:7401") for name in names))
        self.nodes = {name: Node(self, name, ruling) for name in names}
        for node in self.nodes.values():
            for peer in names:
                if peer != node.name:
                    node.replica.connected(peer)

    @property
    def wall_ms(self) -> int:
        return START_MS + int((self.now_s - 1_000.0) * 1_000) + self.wall_error_ms

    def clock(self) -> float:
        return self.now_s

    def run(self, seconds: float = 0.0) -> None:
        """Let everything happen that can happen now; then let time pass, a tick at a time."""
        self._exchange()
        for _ in range(round(seconds / TICK_S)):
            self.now_s += TICK_S
            self._exchange()

    def _exchange(self) -> None:
        for _ in range(12):
            for node in self.nodes.values():
                node.turn()
            post, self.post = self.post, []
            if not post and not any(node.is_writing for node in self.nodes.values()):
                return
            for sender, receiver, message in post:
                heard = not (self.nodes[sender].silent or self.nodes[receiver].silent)
                if heard and not self.loses(message):
                    self.nodes[receiver].replica.deliver(sender, message)

    def leader(self) -> Node:
        """Whoever leads and serves now, or soon does."""
        for _ in range(500):
            serving = [node for node in self.nodes.values() if node.replica.serving and not node.silent]
            if serving:
                return serving[-1]
            self.run(TICK_S)
        raise AssertionError("nobody leads")


@contextmanager
def new_nodes(*names: str) -> Iterator[Nodes]:
    """Nodes whose time is also the library's."""
    made: list[Nodes] = []
    former = use_library_clock(lambda: made[0].now_s if made else 1_000.0)
    try:
        made.append(Nodes(*names))
        yield made[0]
    finally:
        use_library_clock(former)


@contextmanager
def nodes(*names: str) -> Iterator[tuple[Nodes, Node]]:
    """They have a leader, two sessions and a queue."""
    with new_nodes(*names) as cluster:
        leader = cluster.leader()
        for number in (1, 2):
            leader.do(c.OpenSession(), number)
        settings = QueueSettings(visibility_timeout_ms=2_000)
        created = leader.do(c.CreateQueue(name="work", settings=settings))
        assert isinstance(created, QueueCreated) and created.queue_id == Q
        cluster.run(0.1)
        yield cluster, leader


@pytest.fixture
def one() -> Iterator[tuple[Nodes, Node]]:
    with nodes("a") as found:
        yield found


@pytest.fixture
def three() -> Iterator[tuple[Nodes, Node]]:
    with nodes("a", "b", "c") as found:
        yield found


def lease(wait_ms: int = 0, **named: Any) -> c.Lease:
    return c.Lease(queue_id=Q, group="default", max_messages=10, wait_ms=wait_ms, **named)


def ack(leased: Leased) -> c.AckBatch:
    ranges = tuple((leased.lease_id, grant.first, grant.last) for grant in leased.grants)
    return c.AckBatch(queue_id=Q, group="default", ranges=ranges)


# Commands ------------------------------------------------------------------------------------------------


def test_a_command_is_answered_from_its_place_once_it_is_on_disk(one: tuple[Nodes, Node]) -> None:
    """Q2, and durable before answered."""
    cluster, node = one
    node.disk_hangs = True
    node.ask("produce", produce(1, b"x"))
    cluster.run(0.05)
    assert "produce" not in node.outcomes
    node.disk_hangs = False
    cluster.run()
    outcome = node.outcomes["produce"]
    assert isinstance(outcome, Answer) and isinstance(outcome.reply, Produced)
    assert (outcome.place.index, outcome.place.position) == (node.raft.journal.last, 0)


def test_what_comes_while_the_disk_writes_becomes_one_entry(one: tuple[Nodes, Node]) -> None:
    """Group commit."""
    cluster, node = one
    node.disk_hangs = True
    before = len(node.entries())
    for number in range(5):
        node.ask(number, produce(1, b"x"))
        node.turn()
    node.disk_hangs = False
    cluster.run()
    assert [len(commands) for commands in node.entries()[before:]] == [1, 4]
    assert [node.reply(number).first_version for number in range(5)] == [1, 2, 3, 4, 5]


def test_the_leaders_own_commands_are_nobody_elses(one: tuple[Nodes, Node]) -> None:
    cluster, node = one
    node.ask("step", c.TimeStep(by_ms=1))
    node.ask("touch", c.Touch(queue_id=Q))
    cluster.run()
    assert all(isinstance(node.outcomes[token], BadValue) for token in ("step", "touch"))


def test_a_full_disk_refuses_messages_and_lets_go_of_them(one: tuple[Nodes, Node]) -> None:
    cluster, node = one
    node.do(produce(1, b"x"))
    leased = node.do(lease())
    node.replica.disk_limit = 1_000
    node.ask("produce", produce(1, b"y"))
    node.ask("together", c.Transaction(items=(ack(leased), produce(1, b"y"))))
    cluster.run()
    for token in ("produce", "together"):
        refused = node.outcomes[token]
        assert isinstance(refused, Overloaded) and refused.limit_name == "disk_free_bytes"
    assert isinstance(node.do(ack(leased)), Settled)
    node.replica.disk_limit = None
    assert isinstance(node.do(produce(1, b"y")), Produced)


def test_what_comes_before_a_leader_has_applied_its_first_entry_waits() -> None:
    """T2, T3: before that it knows neither all steps of time nor what is due."""
    with new_nodes("a") as cluster:
        node = cluster.nodes["a"]
        node.disk_hangs = True
        while not node.replica.leads:
            cluster.run(TICK_S)
        node.ask("session", c.OpenSession())
        node.ask("gone", c.OpenSession(), 2)
        node.read("read", q.ListQueues())
        node.replica.abandon(["gone"])
        cluster.run(0.05)
        assert not node.outcomes
        node.disk_hangs = False
        cluster.run(0.05)
        assert set(node.outcomes) == {"session", "read"}


def test_what_came_to_a_leader_that_never_served_goes_elsewhere() -> None:
    with new_nodes("a", "b", "c") as cluster:
        cluster.loses = lambda message: isinstance(message, AppendReply)
        leading: list[Node] = []
        while not leading:
            cluster.run(TICK_S)
            leading = [node for node in cluster.nodes.values() if node.replica.leads]
        leading[0].ask("command", c.OpenSession())
        leading[0].read("query", q.ListQueues())
        cluster.run(2.0)
        assert all(isinstance(leading[0].outcomes[token], NotLeader) for token in ("command", "query"))


# Leases --------------------------------------------------------------------------------------------------


def test_a_lease_brings_its_messages(one: tuple[Nodes, Node]) -> None:
    _, node = one
    node.do(produce(1, b"x", b"y"))
    leased = node.do(lease())
    assert isinstance(leased, Leased)
    assert [(grant.first, grant.last) for grant in leased.grants] == [(1, 2)]
    assert b"".join(bytes(batch.body) for batch in leased.batches) == b"xy"


def test_an_empty_lease_is_no_entry(one: tuple[Nodes, Node]) -> None:
    """L7."""
    cluster, node = one
    last = node.raft.journal.last
    node.ask("lease", lease())
    cluster.run(0.05)
    outcome = node.outcomes["lease"]
    assert isinstance(outcome, Answer) and outcome.place.position == -1
    assert node.reply("lease").grants == () and node.raft.journal.last == last


def test_a_lease_waits_until_something_comes(one: tuple[Nodes, Node]) -> None:
    """L7."""
    cluster, node = one
    node.ask("lease", lease(5_000))
    cluster.run(1.0)
    assert "lease" not in node.outcomes
    node.do(produce(1, b"x"), session=2)
    assert node.reply("lease").grants
    assert not len(node.replica.waiters)


def test_a_lease_waits_until_a_delay_ends(one: tuple[Nodes, Node]) -> None:
    """T3: the leader touches what somebody waits for."""
    cluster, node = one
    node.do(produce(1, MessageParts(b"x", delay_ms=700)))
    node.ask("lease", lease(5_000), 2)
    cluster.run(0.6)
    assert "lease" not in node.outcomes
    cluster.run(0.4)
    assert node.reply("lease").grants


def test_a_wait_ends_in_time(one: tuple[Nodes, Node]) -> None:
    """L7."""
    cluster, node = one
    node.ask("lease", lease(1_000))
    cluster.run(0.9)
    assert "lease" not in node.outcomes
    cluster.run(0.2)
    assert node.reply("lease").grants == ()


def test_who_has_gone_gets_nothing_and_leaves_nothing(one: tuple[Nodes, Node]) -> None:
    cluster, node = one
    node.ask("parked", lease(5_000))
    node.ask("read", c.OpenSession(), 3)
    node.replica.abandon(["parked", "read"])
    before = len(node.entries())
    node.do(produce(1, b"x"), session=2)
    cluster.run(1.0)
    assert [len(commands) for commands in node.entries()[before:]] == [1]
    assert not {"parked", "read"} & set(node.outcomes)
    assert not len(node.replica.waiters) and not len(node.replica.batcher)


@pytest.mark.parametrize("dies", [False, True])
def test_who_waits_is_woken_by_what_the_command_of_a_dead_client_brings(one: tuple[Nodes, Node], dies: bool) -> None:
    """L7, T3: its entry is in the log, so it is folded as any other; only nobody is told of it."""
    cluster, node = one
    node.ask("parked", lease(60_000), session=2)
    cluster.run(1.0)
    node.ask("dead", produce(1, MessageParts(b"x", delay_ms=1_000)))
    node.turn()
    if dies:
        node.replica.abandon(["dead"])
    cluster.run(2.0)
    assert ("dead" in node.outcomes) != dies
    assert node.reply("parked").grants


@pytest.mark.parametrize("dies", [False, True])
def test_who_waits_is_woken_when_the_lease_of_a_dead_client_ends(one: tuple[Nodes, Node], dies: bool) -> None:
    """L7, S5: the consumer was killed while its Lease was on its way to the disk."""
    cluster, node = one
    node.ask("dead", lease(60_000))
    cluster.run(0.1)
    node.ask("parked", lease(60_000), session=2)
    cluster.run(0.5)
    node.ask("produce", produce(1, b"x"))
    while not any(isinstance(command, c.Lease) for command in node.entries()[-1]):
        node.turn()
    if dies:
        node.replica.abandon(["dead"])
    cluster.run(0.1)
    assert ("dead" in node.outcomes) != dies
    assert "parked" not in node.outcomes
    cluster.run(4.0)
    assert node.reply("parked").grants[0].delivery_count == 2


def test_a_withdrawn_lease_is_declined_and_gets_nothing(one: tuple[Nodes, Node]) -> None:
    cluster, node = one
    node.ask("parked", lease(5_000))
    cluster.run(0.05)
    node.replica.withdraw("parked")
    cluster.run(0.05)
    assert isinstance(node.outcomes["parked"], Withdrawn)
    before = len(node.entries())
    node.do(produce(1, b"x"), session=2)
    cluster.run(1.0)
    assert [len(commands) for commands in node.entries()[before:]] == [1]
    assert not len(node.replica.waiters)


def test_a_lease_that_is_in_the_log_is_answered_also_when_it_is_withdrawn(one: tuple[Nodes, Node]) -> None:
    cluster, node = one
    node.do(produce(1, b"x"), session=2)
    node.disk_hangs = True
    node.ask("granted", lease(5_000))
    cluster.run(0.05)
    node.replica.withdraw("granted")
    cluster.run(0.05)
    assert "granted" not in node.outcomes
    node.disk_hangs = False
    cluster.run(0.05)
    assert len(node.reply("granted").grants) == 1


def test_only_a_lease_can_be_withdrawn(one: tuple[Nodes, Node]) -> None:
    cluster, node = one
    node.ask("command", c.OpenSession(), 3)
    node.read("read")
    for token in ("command", "read", "unknown"):
        node.replica.withdraw(token)
    cluster.run(0.1)
    assert all(isinstance(node.outcomes[token], Answer) for token in ("command", "read"))
    assert "unknown" not in node.outcomes


def test_a_lease_that_is_withdrawn_before_its_leader_serves_is_declined() -> None:
    with new_nodes("a", "b", "c") as cluster:
        cluster.loses = lambda message: isinstance(message, AppendReply)
        leading: list[Node] = []
        while not leading:
            cluster.run(TICK_S)
            leading = [node for node in cluster.nodes.values() if node.replica.leads]
        leading[0].ask("early", lease(5_000))
        leading[0].replica.withdraw("early")
        cluster.loses = lambda _: False
        cluster.run(2.0)
        assert isinstance(leading[0].outcomes["early"], Withdrawn)
        assert not len(leading[0].replica.waiters)


def test_a_retried_lease_is_answered_beside_the_first(one: tuple[Nodes, Node]) -> None:
    """L4: the same request from a second connection; the first attempt still waits."""
    cluster, node = one
    node.ask("first", lease(5_000), seq=90)
    node.ask("again", lease(5_000), seq=90)
    node.do(produce(1, b"x"), session=2)
    cluster.run(0.1)
    first, again = node.reply("first"), node.reply("again")
    assert first.lease_id == again.lease_id and again.replayed and not first.replayed


def test_damage_is_no_answer(one: tuple[Nodes, Node]) -> None:
    """Fail-stop: what is stored is not what was produced."""
    cluster, node = one
    node.do(produce(1, b"x" * 40))

    def spoil(txn: Any) -> None:
        key, blob = txn.first(Table.BLOB, b"\x00", b"\xff" * 16)
        txn.put(Table.BLOB, key, blob[:-1] + b"y")

    node.state.store.transact(spoil)
    node.ask("lease", lease())
    cluster.run(0.1)
    assert isinstance(node.replica.damage, BodyDamaged)
    assert "lease" not in node.outcomes and not node.replica.serving


# Reads ---------------------------------------------------------------------------------------------------


def test_a_current_read_sees_what_was_answered(three: tuple[Nodes, Node]) -> None:
    """Q1."""
    cluster, leader = three
    leader.do(produce(1, b"x"))
    leader.read("read")
    cluster.run(0.1)
    assert isinstance(leader.reply("read"), GroupStats) and leader.reply("read").ready == 1


def test_a_leader_that_nobody_confirms_answers_no_read(three: tuple[Nodes, Node]) -> None:
    """Q1: neither a query nor an empty lease."""
    cluster, leader = three
    leader.silent = True
    leader.read("read")
    leader.ask("lease", lease())
    cluster.run(0.2)
    assert not leader.outcomes.keys() & {"read", "lease"}
    cluster.run(2.0)
    assert isinstance(leader.outcomes["read"], NotLeader) and isinstance(leader.outcomes["lease"], NotLeader)


def test_reads_share_the_touch_that_they_need(one: tuple[Nodes, Node]) -> None:
    """Q1: what has fallen due is folded before a current read, once for all of them."""
    cluster, node = one
    node.do(produce(1, MessageParts(b"x", delay_ms=500)))
    cluster.run(0.6)
    before = len(node.entries())
    for number in range(3):
        node.read(number)
    node.read("stale", stale=True)
    cluster.run()
    assert node.entries()[before:] == [[c.Touch(queue_id=Q)]]
    assert [node.reply(number).ready for number in range(3)] == [1, 1, 1]
    assert node.reply("stale").delayed == 1


def test_a_stale_read_is_for_any_node_and_waits_for_its_index(three: tuple[Nodes, Node]) -> None:
    """Q1."""
    cluster, leader = three
    follower = next(node for node in cluster.nodes.values() if node is not leader)
    follower.read("now", stale=True)
    follower.read("next", stale=True, min_index=leader.raft.journal.last + 1)
    follower.read("far", stale=True, min_index=leader.raft.journal.last + 100)
    cluster.run(0.1)
    assert follower.reply("now").ready == 0 and not follower.outcomes.keys() & {"next", "far"}
    leader.do(produce(1, b"x"))
    cluster.run(0.2)
    assert follower.reply("next").ready == 1 and "far" not in follower.outcomes
    cluster.run(STALE_WAIT_MS / 1_000)
    assert isinstance(follower.outcomes["far"], BehindIndex)


def test_who_does_not_lead_says_who_does(three: tuple[Nodes, Node]) -> None:
    cluster, leader = three
    follower = next(node for node in cluster.nodes.values() if node is not leader)
    follower.ask("command", produce(1, b"x"))
    follower.read("query")
    cluster.run()
    for token in ("command", "query"):
        outcome = follower.outcomes[token]
        assert isinstance(outcome, NotLeader) and outcome.leader == f"{leader.name}:7401"


# Leadership ----------------------------------------------------------------------------------------------


def test_what_a_lost_leader_has_goes_elsewhere_or_is_decided_by_the_log(three: tuple[Nodes, Node]) -> None:
    """R16: parked and queued did not happen; what is in the log is open until the next leader's entry stands there."""
    cluster, leader = three
    leader.silent = True
    leader.ask("parked", lease(30_000))
    cluster.run()
    leader.ask("in the log", produce(1, b"x"))
    cluster.run()
    leader.read("read")
    cluster.run(2.0)
    assert leader.raft.role != Role.LEADER
    assert isinstance(leader.outcomes["parked"], NotLeader) and isinstance(leader.outcomes["read"], NotLeader)
    assert "in the log" not in leader.outcomes
    heir = cluster.leader()
    assert heir is not leader
    heir.do(produce(1, b"y"))
    leader.silent = False
    cluster.run(2.0)
    outcome = leader.outcomes["in the log"]
    assert isinstance(outcome, NotLeader) and outcome.leader == f"{heir.name}:7401"
    assert not len(leader.replica.batcher)


def test_what_a_lost_leader_had_in_the_log_may_have_happened(three: tuple[Nodes, Node]) -> None:
    """R16: the followers have the entry, and the next leader commits it: it is answered after all."""
    cluster, leader = three
    cluster.loses = lambda message: isinstance(message, AppendReply)
    leader.ask("in the log", produce(1, b"x"))
    cluster.run(0.02)
    leader.silent = True
    cluster.loses = lambda _: False
    cluster.run(2.0)
    heir = cluster.leader()
    assert heir.do(produce(1, b"y")).first_version == 2
    leader.silent = False
    cluster.run(2.0)
    assert leader.reply("in the log").first_version == 1


def test_what_a_snapshot_covers_is_not_known(three: tuple[Nodes, Node]) -> None:
    cluster, leader = three
    leader.silent = True
    leader.ask("in the log", produce(1, b"x"))
    cluster.run(2.0)
    heir = cluster.leader()
    for _ in range(3):
        heir.do(produce(1, b"y"))
    leader.state.become(heir.state)
    leader.replica.installed()
    cluster.run()
    assert isinstance(leader.outcomes["in the log"], LeaderChanged)


def test_commands_wait_for_the_end_of_a_hand_over(three: tuple[Nodes, Node]) -> None:
    cluster, leader = three
    other = next(node for node in cluster.nodes.values() if node is not leader)
    assert leader.replica.hand_over(other.name)
    leader.ask("meanwhile", produce(1, b"x"))
    cluster.run(0.3)
    assert cluster.leader() is other and not leader.replica.handing_over
    assert isinstance(leader.outcomes["meanwhile"], NotLeader)


def test_a_hand_over_that_fails_is_over_in_time(three: tuple[Nodes, Node]) -> None:
    """The target hears nothing more of us; everybody else does not wait for it."""
    cluster, leader = three
    others = [node for node in cluster.nodes.values() if node is not leader]
    others[0].silent = True
    assert leader.replica.hand_over(others[0].name)
    leader.ask("meanwhile", produce(1, b"x"))
    cluster.run(HAND_OVER_MS / 1_000 - 0.1)
    assert "meanwhile" not in leader.outcomes
    cluster.run(0.2)
    assert isinstance(leader.reply("meanwhile"), Produced) and not leader.replica.handing_over


def test_nobody_can_take_over_from_one_alone(one: tuple[Nodes, Node]) -> None:
    _, node = one
    assert not node.replica.hand_over() and not node.replica.hand_over("nobody")
    assert isinstance(node.do(produce(1, b"x")), Produced)


# Time ----------------------------------------------------------------------------------------------------


def test_a_step_of_time_stands_first_in_its_entry(one: tuple[Nodes, Node]) -> None:
    """T2: what came with it is judged by the right time."""
    cluster, node = one
    cluster.wall_error_ms = 10_000
    node.ask("produce", produce(1, b"x"))
    cluster.run()
    step, command = node.entries()[-1]
    assert isinstance(step, c.TimeStep) and 9_000 < step.by_ms <= 10_000
    assert isinstance(command, c.Produce)
    outcome = node.outcomes["produce"]
    assert isinstance(outcome, Answer) and abs(outcome.place.time_ms - cluster.wall_ms) < 100


def test_the_clocks_that_count_are_those_of_the_voters_of_now(three: tuple[Nodes, Node]) -> None:
    """T2: members change under one leader; without this a node that grew into a cluster would believe itself alone."""
    cluster, leader = three
    left = leader.raft.configuration.voters[:2] if leader.name != "c" else leader.raft.configuration.voters[1:]
    leader.raft.propose_configuration(Configuration(left))
    cluster.run(0.2)
    assert set(leader.replica.time.skew(leader.replica.now_ms)) == {member.name for member in left}


def test_nothing_is_formed_behind_a_step_before_it_is_applied(three: tuple[Nodes, Node]) -> None:
    """T2: a stamp taken meanwhile would not know of the step, and a lease granted by it would lose that time."""
    cluster, leader = three
    leader.do(produce(1, b"x", b"y"))
    cluster.wall_error_ms = 10_000
    cluster.loses = lambda message: isinstance(message, AppendEntries | AppendReply) and leader.has_stepped()
    while not leader.has_stepped():
        cluster.run(TICK_S)
    last = leader.raft.journal.last
    leader.ask("lease", lease())
    cluster.run(0.2)
    assert leader.raft.journal.last == last
    cluster.loses = lambda _: False
    cluster.run(0.2)
    leased = leader.reply("lease")
    assert isinstance(leased, Leased) and leased.grants
    assert leased.deadline_ms > cluster.wall_ms + 2_000 - 250


def test_an_open_lease_is_given_a_stamp_every_second(one: tuple[Nodes, Node]) -> None:
    """T2, S5: the lease ends on time though nobody asks for anything."""
    cluster, node = one
    node.do(produce(1, b"x"))
    before = len(node.entries())
    cluster.run(2.0)
    assert len(node.entries()) == before
    node.do(lease())
    before = len(node.entries())
    cluster.run(1.9)
    assert node.entries()[before:] == [[], []]


def test_a_message_that_cannot_be_moved_on_by_anybody_is_moved_by_the_leader(one: tuple[Nodes, Node]) -> None:
    """T3: nobody waits, but what falls due moves a message to another queue."""
    cluster, node = one
    move = QueueSettings(visibility_timeout_ms=500, max_delivery_attempts=1, dlq_strategy="move", dlq_queue="work")
    created = node.do(c.CreateQueue(name="other", settings=move))
    node.do(produce(created.queue_id, b"x"))
    assert node.do(c.Lease(queue_id=created.queue_id, group="default", max_messages=1)).grants
    cluster.run(1.6)
    assert node.do(lease()).grants


# Replicas that differ ------------------------------------------------------------------------------------


def spoil(node: Node) -> None:
    """One bit of the state is not what the log has made of it."""

    def change(txn: WriteTxn) -> None:
        view = View(txn)
        view.meta.digest ^= 1
        txn.put(Table.META, META_KEY, pack_meta(view.meta))

    node.state.store.transact(change)


def to_the_next_comparison(cluster: Nodes, leader: Node) -> None:
    first = leader.state.reached.index
    for number in range(comparing.EVERY + 1):
        leader.ask(number, produce(Q, b"x", client_id="filler", first_seq=first * 1_000 + number))
        cluster.run()


def test_the_node_whose_state_differs_stops_and_the_others_go_on(three: tuple[Nodes, Node]) -> None:
    """A difference is damage or a bug; the majority is believed."""
    cluster, leader = three
    wrong = next(node for node in cluster.nodes.values() if node is not leader)
    spoil(wrong)
    to_the_next_comparison(cluster, leader)
    assert isinstance(wrong.replica.damage, comparing.StateDiverged)
    assert [node.replica.damage for node in cluster.nodes.values() if node is not wrong] == [None, None]
    assert isinstance(leader.do(produce(Q, b"y", client_id="other", first_seq=1)), Produced)


def test_where_no_majority_agrees_nobody_serves(three: tuple[Nodes, Node]) -> None:
    """Two that differ, and the third is away: who of them is right cannot be known."""
    cluster, leader = three
    wrong, away = (node for node in cluster.nodes.values() if node is not leader)
    away.silent = True
    quiet = leader.do(c.CreateQueue(name="quiet"))
    leader.ask("parked", c.Lease(queue_id=quiet.queue_id, group="default", max_messages=1, wait_ms=60_000))
    spoil(wrong)
    to_the_next_comparison(cluster, leader)
    assert isinstance(leader.outcomes["parked"], NoLeader)
    leader.ask("produce", produce(Q, b"y", client_id="other", first_seq=1))
    leader.read("current")
    wrong.read("stale", stale=True)
    cluster.run(1.0)
    for node, token in ((leader, "produce"), (leader, "current"), (wrong, "stale")):
        assert isinstance(node.outcomes[token], NoLeader)
    assert not leader.replica.serving
    away.silent = False
    cluster.run(2.0)
    assert leader.replica.damage is None
    assert isinstance(wrong.replica.damage, comparing.StateDiverged)
    assert cluster.leader().replica.serving


def test_what_is_in_the_log_when_the_states_differ_is_not_vouched_for(three: tuple[Nodes, Node]) -> None:
    """It may have happened, and another answer may be the right one."""
    cluster, leader = three
    wrong, away = (node for node in cluster.nodes.values() if node is not leader)
    away.silent = True
    cluster.loses = lambda message: isinstance(message, StateDigest)
    to_the_next_comparison(cluster, leader)
    leader.disk_hangs = True
    leader.ask("late", produce(Q, b"y", client_id="other", first_seq=1))
    cluster.run()
    place = leader.replica.state.reached.index // comparing.EVERY * comparing.EVERY
    leader.replica.deliver(wrong.name, StateDigest(place, bytes(DIGEST_BYTES)))
    leader.disk_hangs = False
    cluster.run()
    assert isinstance(leader.outcomes["late"], errors.LeaderChanged)


def test_a_read_whose_touch_is_folded_when_the_states_differ_is_not_answered(three: tuple[Nodes, Node]) -> None:
    """Q1: it is past its barrier and waits for the log alone."""
    cluster, leader = three
    wrong, away = (node for node in cluster.nodes.values() if node is not leader)
    away.silent = True
    cluster.loses = lambda message: isinstance(message, StateDigest)
    to_the_next_comparison(cluster, leader)
    leader.do(produce(Q, MessageParts(b"x", delay_ms=500), client_id="other", first_seq=1))
    cluster.run(0.6)
    leader.disk_hangs = True
    leader.read("read")
    cluster.run()
    assert leader.entries()[-1] == [c.Touch(queue_id=Q)]
    place = leader.replica.state.reached.index // comparing.EVERY * comparing.EVERY
    leader.replica.deliver(wrong.name, StateDigest(place, bytes(DIGEST_BYTES)))
    leader.disk_hangs = False
    cluster.run()
    assert isinstance(leader.outcomes["read"], NoLeader)


def test_who_waits_when_a_doubt_is_over_is_not_proposed_for_what_is_still_on_its_way(
    three: tuple[Nodes, Node],
) -> None:
    """L7: a lease from before the doubt takes what seems to be there."""
    cluster, leader = three
    wrong, away = (node for node in cluster.nodes.values() if node is not leader)
    away.silent = True
    cluster.loses = lambda message: isinstance(message, StateDigest)
    quiet = leader.do(c.CreateQueue(name="quiet")).queue_id
    leader.do(produce(quiet, b"x", client_id="other", first_seq=1))
    to_the_next_comparison(cluster, leader)
    leader.disk_hangs = True
    leader.ask("first", c.Lease(queue_id=quiet, group="default", max_messages=1))
    cluster.run()
    place = leader.replica.state.reached.index // comparing.EVERY * comparing.EVERY
    [(_, right)] = [each for each in leader.replica._comparing.own if each[0] == place]
    leader.replica.deliver(wrong.name, StateDigest(place, bytes(DIGEST_BYTES)))
    leader.replica.deliver(wrong.name, StateDigest(place, right))
    leader.ask("second", c.Lease(queue_id=quiet, group="default", max_messages=1, wait_ms=60_000), session=2)
    cluster.run()
    leader.disk_hangs = False
    cluster.run(0.1)
    assert leader.reply("first").grants and "second" not in leader.outcomes


def test_a_node_that_came_past_the_place_by_a_snapshot_decides_at_the_next(three: tuple[Nodes, Node]) -> None:
    cluster, leader = three
    wrong, away = (node for node in cluster.nodes.values() if node is not leader)
    away.silent = True
    spoil(wrong)
    to_the_next_comparison(cluster, leader)
    away.silent = False
    cluster.loses = lambda message: isinstance(message, StateDigest)
    cluster.run(1.0)
    cluster.loses = lambda message: False
    cluster.run(comparing.EVERY * LOOK_EVERY_MS / 1_000 * 2)
    assert isinstance(wrong.replica.damage, comparing.StateDiverged)
    assert cluster.leader().replica.serving


def test_a_doubt_outlives_a_restart_of_all_who_are_in_it(three: tuple[Nodes, Node]) -> None:
    """What they said is in their states, and is said again in every new session."""
    cluster, leader = three
    wrong, away = (node for node in cluster.nodes.values() if node is not leader)
    away.silent = True
    spoil(wrong)
    to_the_next_comparison(cluster, leader)
    for node in (leader, wrong):
        node.restart()
    for node, other in ((leader, wrong), (wrong, leader)):
        node.replica.connected(other.name)
    cluster.run(2.0)
    leading = next(node for node in (leader, wrong) if node.replica.leads)
    leading.read("current")
    cluster.run()
    assert isinstance(leading.outcomes["current"], NoLeader)
    assert not leading.replica.serving


def test_a_node_whose_state_differs_answers_no_question(three: tuple[Nodes, Node]) -> None:
    cluster, leader = three
    spoil(leader)
    to_the_next_comparison(cluster, leader)
    assert isinstance(leader.replica.damage, comparing.StateDiverged)
    leader.read("current")
    leader.read("stale", stale=True)
    leader.ask("command", produce(Q, b"y", client_id="other", first_seq=1))
    cluster.run()
    assert all(isinstance(leader.outcomes[token], NoLeader) for token in ("current", "stale", "command"))


def test_a_node_that_catches_up_reads_each_entry_once(three: tuple[Nodes, Node]) -> None:
    """Entries are applied up to the next place of comparing in one turn; what is behind it is not read for that."""
    cluster, leader = three
    follower = next(node for node in cluster.nodes.values() if node is not leader)
    follower.silent = True
    for _ in range(4 * comparing.EVERY):
        leader.do(produce(1, b"x"))
    journal, handed = follower.raft.journal, 0
    plain = journal.read

    def counted(index: int, max_bytes: int, last: int = U63_MAX) -> tuple[list[Entry], int]:
        nonlocal handed
        entries, size = plain(index, max_bytes, last)
        handed += len(entries)
        return entries, size

    journal.read = counted  # type: ignore[method-assign]
    behind = leader.state.reached.index - follower.state.reached.index
    follower.silent = False
    cluster.run(2.0)
    assert follower.state.reached.index == leader.state.reached.index
    assert behind > 3 * comparing.EVERY
    assert handed <= behind + 2 * comparing.EVERY
