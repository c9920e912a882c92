"""A node on trio: joins sockets, disk and timers to a log's replica, and ends as a whole when any part of it fails.

Decides nothing about messages: `replica.py` does, in turns. Everything here runs on the loop's one thread but what
takes long: syncs (`writer.py`), snapshots and the building of a received state. What cannot be gone on from is raised
out of `run` (R26): a failed sync, a broken invariant, damage. The journal then has all that was acknowledged.
"""

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from random import Random, SystemRandom
from secrets import token_bytes
from time import time_ns

import trio

from holdfast.client.protocol.commands import Lease
from holdfast.client.protocol.errors import (
    BadValue,
    HoldfastError,
    InvariantBroken,
    NotHandedOver,
    NotLeader,
    Overloaded,
    Unavailable,
)
from holdfast.client.protocol.messages import Request, Withdraw
from holdfast.client.protocol.queries import HandOver
from holdfast.client.protocol.queries import NodeStatus as NodeStatusQuery
from holdfast.client.protocol.replies import Answer, Done, Failed, MemberDescribed, NodeDescribed, Reply
from holdfast.client.protocol.values import Place
from holdfast.cluster.client_stream import Client, ServerLimits
from holdfast.cluster.config import Config, parse_address
from holdfast.cluster.connection import Asked, Greeting
from holdfast.cluster.disk import REAL_DISK, UNSYNCED_DISK
from holdfast.cluster.events import BecameLeader, Event, LeaderChanged, LostLeadership, SnapshotNeeded
from holdfast.cluster.health import MemberStatus, NodeStatus, role_name
from holdfast.cluster.housekeeping import Housekeeping
from holdfast.cluster.identity import journal_folder
from holdfast.cluster.journal import Flush, Journal
from holdfast.cluster.journal_frames import Identity
from holdfast.cluster.links import Handlers
from holdfast.cluster.logs import Log
from holdfast.cluster.membership import Configuration
from holdfast.cluster.messages import DIGEST_BYTES, Message, SnapshotChunk, SnapshotDone, SnapshotHead
from holdfast.cluster.metrics import Metrics
from holdfast.cluster.passing import SLICE_MS, Passing
from holdfast.cluster.peers import Peers
from holdfast.cluster.raft import Raft, library_clock
from holdfast.cluster.replica import Replica, Turn
from holdfast.cluster.segments import Segments
from holdfast.cluster.server import Clients
from holdfast.cluster.snapshots import Policy, Received, Receiver, StreamBroken, send_snapshot
from holdfast.cluster.state import NodeState, Reached, StateBusy
from holdfast.cluster.trace import Trace
from holdfast.cluster.writer import Writer
from holdfast.storage import digest
from holdfast.storage.snapshot import SnapshotDamaged
from holdfast.storage.state import View
from holdfast.storage.store import StoreError

LOG = 0  # the one log of this release
TICK_S = 0.01
TELL_S = 1.0
REST_S = 5.0  # for what a move of the clock makes due; then others are keeping the node busy, and it goes on
STOP_S = 3.0  # for handing leadership over before the end
SLOW_SYNC_S = 0.5
SKEW_TOLD_MS = 1_000
FIRST_INDEX = 1  # of the sentinel: a log's first entry is the next

Wall = Callable[[], int]

_LIMITS = ServerLimits()


def real_wall_ms() -> int:
    return time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class Listeners:
    """Open sockets: whoever made them chose the addresses."""

    clients: list[trio.SocketListener]
    peers: list[trio.SocketListener] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Asking:
    """One request of one connection."""

    client: Client
    request_id: int
    kind: str = field(default="", compare=False)  # of command or query, for the metrics


class Node:
    """One node with one log. `run` once; everything else may be called while it runs."""

    def __init__(
        self,
        config: Config,
        identity: Identity,
        founders: Configuration,
        log: Log,
        wall_ms: Wall = real_wall_ms,
        policy: Policy | None = None,
        passing: Passing | None = None,
        limits: ServerLimits = _LIMITS,
    ) -> None:
        """Opens the journal, which the founding has made, and the state. Raises what they and `Raft` refuse.

        `passing` takes the place of both clocks for what becomes of messages, in a node without peers.
        """
        if passing is not None and config.others:
            raise BadValue(field="passing", problem="is for a node without peers")
        self.config, self.identity, self.log = config, identity, log
        self.stopping = False
        self._wall_ms, self._clock = wall_ms, library_clock()
        self._started_ms = wall_ms()
        self._turned_s = self._clock()
        self._rng = Random(SystemRandom().getrandbits(64))
        folder = config.data / f"log-{LOG}"
        with ExitStack() as opened:
            disk = REAL_DISK if config.fsync == "always" else UNSYNCED_DISK
            self._segments = Segments.open(str(journal_folder(config.data, LOG)), identity, disk=disk)
            opened.callback(self._segments.close)
            self._state = NodeState(folder, Reached(FIRST_INDEX, 0, 0, founders))
            opened.callback(self._state.abandon)
            reached = self._state.reached
            journal = Journal.recovered(self._segments.recovered, self._segments.read_entries)
            raft = Raft(
                me=config.node,
                journal=journal,
                clock=self._clock,
                rng=Random(self._rng.random()),
                applied=reached.index,
                applied_term=reached.term,
                configuration=reached.configuration,
                configuration_index=reached.configuration_index,
                wall_ms=wall_ms,
            )
            raft.settle_promise_alone(saw_all=self._state.unbroken and reached.index > FIRST_INDEX)
            opened.pop_all()
        self._passing = passing
        time_s, time_wall_ms = (self._clock, wall_ms) if passing is None else (passing.now_s, passing.wall_ms)
        self.replica = Replica(raft=raft, state=self._state, clock=time_s, wall_ms=time_wall_ms)
        self._receiver = Receiver(folder, config.disk_reserve_bytes)
        self._house = Housekeeping(
            config=config,
            policy=replace(policy or Policy(), keep_log=config.keep_log),
            segments=self._segments,
            state=self._state,
            replica=self.replica,
            log=log,
            clock=self._clock,
            matches=self._matches,
            damaged=self._found_damage,
        )
        self._peers: Peers | None = None
        self._addressed = -1  # the configuration whose addresses are in use
        self._trace = Trace(config.trace, self._clock) if config.trace is not None else None
        self.metrics = Metrics()
        self.clients = Clients(
            self,
            lambda: Greeting(identity.cluster_id, identity.node),
            rejected=lambda client, error: log.client_rejected(client=client, error=error),
            short=lambda error: log.out_of_files(doing="accept", error=error),
            limits=limits,
        )
        self._proposed_s: dict[int, float] = {}  # when entries that are not applied yet were proposed
        self._wake = trio.Event()
        self._turned: trio.Event | None = None  # set by the next turn, where somebody waits for it
        self._failure: BaseException | None = None
        self._marked = False  # the state, as damaged
        self._stop_by_s = 0.0
        self._hands_over = False
        self._transfer: tuple[Asking, float] | None = None  # who asked for one, and when
        self._sending: dict[str, trio.CancelScope] = {}
        self._lost: set[str] = set()  # peers whose session ended, for a reason that will be told
        self._nursery: trio.Nursery
        self._writer: Writer

    # Running

    async def run(self, listeners: Listeners) -> None:
        """Serve until `stop` or a failure, which is raised. All files are closed then."""
        token = trio.lowlevel.current_trio_token()
        self._writer = Writer(self._segments, token.run_sync_soon, durable=self._durable, failed=self._fail)
        self.log.started(
            version=version("holdfast"),
            pid=os.getpid(),
            address=str(self.config.listen),
            peer_address=str(self.config.peer_listen),
            http_address=None if self.config.http is None else str(self.config.http),
            fsync=self.config.fsync,
            applied=self._state.reached.index,
        )
        if self._trace is not None:
            identity, journal = self.identity, self.replica.raft.journal
            self._trace.started(
                node=identity.node,
                incarnation=identity.incarnation,
                term=journal.term,
                vote=journal.vote,
                durable=journal.durable_index,
            )
        clean = False
        self._house.look()  # before the first request
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                if listeners.peers:
                    self._peers = self._make_peers()
                    nursery.start_soon(self._peers.run, listeners.peers)
                nursery.start_soon(self.clients.serve, listeners.clients)
                nursery.start_soon(self._house.watch)
                nursery.start_soon(self._house.keep, self._writer.drop_before)
                nursery.start_soon(self._house.scrub)
                nursery.start_soon(self._tell_now_and_then)
                nursery.start_soon(self._ticks)
                await self._turns()
                nursery.cancel_scope.cancel()
            if self.replica.damage is not None:
                self._fail(self.replica.damage)
            clean = True
        except BaseException as error:
            self.log.failed(error=error)  # before the disk is waited for
            raise
        finally:
            self._writer.stop()
            try:
                if clean and self._failure is None:
                    self._state.close()
                else:
                    self._state.abandon()
            finally:
                self._segments.close()
        if self._failure is not None:
            raise self._failure
        self.log.stopped(uptime_ms=self._wall_ms() - self._started_ms)

    def stop(self, reason: str) -> None:
        """End in good order: no new leader has to be waited for."""
        if not self.stopping:
            self.log.stopping(reason=reason)
            self.stopping = True
            self._stop_by_s = self._clock() + STOP_S
            self._hands_over = self.replica.hand_over()
            self.wake()

    def wake(self) -> None:
        self._wake.set()

    async def pass_time(self, by_ms: int) -> None:
        """Move the clock of `passing` ahead as if that time had passed: what falls due comes to pass in its order.

        In slices: a wait that ends and a lease that expires in one leap would know nothing of their order, and one
        stamp moves lease time by an hour at most (T1).
        """
        assert self._passing is not None
        await self._rest()
        while by_ms > 0:
            slice_ms = max(min(self.replica.next_due_in_ms() or by_ms, by_ms, SLICE_MS), 1)
            self._passing.forward(slice_ms)
            by_ms -= slice_ms
            await self._rest()

    async def _rest(self) -> None:
        """Until nothing is on its way and nothing that somebody waits for is due."""
        with trio.move_on_after(REST_S):
            while self._failure is None and not self.stopping:
                turned = self._turned = self._turned or trio.Event()
                self.wake()
                await turned.wait()
                if self.replica.at_rest:
                    return

    async def _turns(self) -> None:
        while self._failure is None:
            await self._wake.wait()
            self._wake = trio.Event()
            self._turn()
            if self._turned is not None:
                self._turned.set()
                self._turned = None
            if self.stopping and self._may_end():
                return

    async def _ticks(self) -> None:
        """Time passes also where nothing comes. A task of its own: a deadline for each turn would cost more than it."""
        while True:
            await trio.sleep(TICK_S)
            self.wake()

    def _may_end(self) -> bool:
        """Whoever hands over stays until the next leader is heard of: its own vote may be the one that counts."""
        decided = not self.replica.handing_over and not (self._hands_over and self.replica.raft.leader is None)
        heard = self._peers is not None and any(link.connected for link in self._peers.status())
        return decided or not heard or self._clock() >= self._stop_by_s

    def _turn(self) -> None:
        self._turned_s = self._clock()
        turn = self.replica.turn()
        if self.replica.damage is not None:
            self._mark_damaged()
        if self._trace is not None:
            self._trace.sent(turn.messages)
            if turn.outcomes:
                self._trace.answered(len(turn.outcomes), self._state.reached.index)
        if self._peers is not None:
            self._peers.post(turn.messages, LOG)
            self._use_addresses(self._peers)
        if turn.flush is not None:  # after the peers: its thread wants the same interpreter, and their way is longer
            self._writer.flush(turn.flush)
        answered: dict[Client, None] = {}
        for token, outcome in turn.outcomes:
            assert isinstance(token, Asking)
            token.client.put(token.request_id, outcome)
            answered[token.client] = None
            error = _error_of(outcome)
            self.metrics.answered(token.kind, error)
            if isinstance(error, Overloaded):
                self.log.overloaded(limit_name=error.limit_name, limit=error.limit)
        for client in answered:
            client.flush()
        self._measure(turn)
        for event in turn.events:
            self._note(event)
        self._watch_hand_over()
        if turn.again:
            self.wake()
        if self.replica.damage is not None:
            self.stop("the state is damaged")
        if self.stopping and self.replica.damage is not None and self._may_end():
            self._fail(self.replica.damage)

    def _found_damage(self, error: InvariantBroken) -> None:
        self.replica.damage = self.replica.damage or error
        self._mark_damaged()
        self.wake()

    def _mark_damaged(self) -> None:
        """At once, also where the node is ending for another reason: the next start must not trust the state."""
        if not self._marked:
            self._marked = True
            self._state.mark_damaged()

    def _measure(self, turn: Turn) -> None:
        metrics, now_s = self.metrics, self._clock()
        for index, commands in turn.proposed:
            metrics.entries_proposed.add()
            metrics.commands_per_entry.observe(commands)
            self._proposed_s[index] = now_s
        if turn.applied:
            metrics.entries_applied.add(count=turn.applied)
            metrics.apply_seconds.observe(turn.apply_s)
            reached = self._state.reached.index
            while self._proposed_s and next(iter(self._proposed_s)) <= reached:
                metrics.commit_seconds.observe(now_s - self._proposed_s.pop(next(iter(self._proposed_s))))

    def _durable(self, flush: Flush, took_s: float) -> None:
        self._house.logged(len(flush.records))
        self.metrics.fsync_seconds.observe(took_s)
        if took_s > SLOW_SYNC_S:
            self.log.slow_disk(took_ms=int(took_s * 1_000))
        self.replica.durable(flush.lsn)
        if self._trace is not None:
            self._trace.synced(flush)
        self.wake()

    def _fail(self, error: BaseException) -> None:
        """The node cannot go on: the first reason is raised out of `run`."""
        if self._failure is None:
            self._failure = error
            self.log.failed(error=error)
            self.wake()

    def _note(self, event: Event) -> None:
        match event:
            case BecameLeader(term=term):
                self.log.became_leader(term=term)
                self.metrics.elections.add()
            case LostLeadership(term=term):
                self.log.lost_leadership(term=term)
                self._proposed_s.clear()
                for scope in self._sending.values():
                    scope.cancel()
            case LeaderChanged(leader=leader, term=term):
                self.log.leader_changed(leader=leader, term=term)
                if leader is not None:
                    self.metrics.leadership_changes.add()
            case SnapshotNeeded(peer=peer, epoch=epoch):
                self._nursery.start_soon(self._send_snapshot, peer, epoch, self.replica.raft.term)

    # Clients

    def ask(self, client: Client, asked: Asked, size_bytes: int) -> None:
        """A request of a client: see `Port`."""
        if isinstance(asked, Withdraw):
            self.replica.withdraw(Asking(client, asked.request_id, Lease.__name__))
            self.wake()
            return
        asks = asked.command if isinstance(asked, Request) else asked.query
        token = Asking(client, asked.request_id, type(asks).__name__)
        if isinstance(asked, Request):
            self.replica.request(token, client, asked, size_bytes)
        elif isinstance(asked.query, NodeStatusQuery):
            client.finish(asked.request_id, self._describe())
            self.metrics.answered(token.kind, None)
            return
        elif isinstance(asked.query, HandOver):
            self._begin_hand_over(token, asked.query.target)
        else:
            self.replica.inquire(token, asked, asked.query)
        self.wake()

    def _begin_hand_over(self, token: Asking, target: str | None) -> None:
        replica = self.replica
        if not replica.leads:
            token.client.finish(token.request_id, NotLeader(leader=replica.leader_address()))
        elif replica.handing_over:
            self._finish_hand_over(token, NotHandedOver(problem="another transfer is under way"))
        elif not replica.hand_over(target):
            problem = f"{target} is no other voter" if target else "there is no other voter"
            self._finish_hand_over(token, NotHandedOver(problem=problem))
        else:
            self._transfer = (token, self._clock())
            self.log.transfer_begun(to=target or "any")

    def _watch_hand_over(self) -> None:
        """Answer who asked for it, once it is decided."""
        if self._transfer is None or self.replica.handing_over:
            return
        (token, began_s), self._transfer = self._transfer, None
        if self.replica.leads:
            self._finish_hand_over(token, NotHandedOver(problem="no voter took over in time; it may lag, or be away"))
        else:
            took_ms = int((self._clock() - began_s) * 1_000)
            self.log.transfer_done(to=self.replica.raft.leader or "another", took_ms=took_ms)
            self._finish_hand_over(token, None)

    def _finish_hand_over(self, token: Asking, error: NotHandedOver | None) -> None:
        reply: Reply = Done() if error is None else Failed(error)
        place = Place(self._state.reached.index, -1, self._time_ms())
        token.client.finish(token.request_id, Answer(place, reply))
        self.metrics.answered(token.kind, error)

    def gone(self, client: Client) -> None:
        """A client's connection is over: see `Port`."""
        self.replica.abandon([Asking(client, request_id) for request_id in client.core.open_requests])

    # Peers

    def _make_peers(self) -> Peers:
        return Peers(
            me=self.identity,
            secret=self.config.secret(),
            handlers=Handlers(connected=self._connected, disconnected=self._disconnected, deliver=self._deliver),
            nonce=token_bytes,
            rng=Random(self._rng.random()),
            trouble=self._trouble,
            short=lambda error: self.log.out_of_files(doing="accept", error=error),
        )

    def _trouble(self, where: str, error: HoldfastError) -> None:
        """Why a session ended, or why none began."""
        if where in self._lost:
            self._lost.discard(where)
            self.log.peer_lost(peer=where, error=error)
        else:
            self.log.peer_refused(peer=where, error=error)

    def _use_addresses(self, peers: Peers) -> None:
        """Dial the members of the configuration that rules."""
        raft = self.replica.raft
        if raft.configuration_index != self._addressed:
            self._addressed = raft.configuration_index
            addresses = {}
            for member in (*raft.configuration.voters, *raft.configuration.learners):
                if member.name != raft.me and member.address:
                    address = parse_address(member.address)
                    addresses[member.name] = (address.host, address.port)
            peers.use(addresses)

    def _connected(self, peer: str) -> None:
        self._lost.discard(peer)
        self.log.peer_connected(peer=peer)
        self.replica.connected(peer)
        self.wake()

    def _disconnected(self, peer: str) -> None:
        self._lost.add(peer)
        self._receiver.disconnected(peer)
        self.replica.raft.disconnected(peer)
        self.wake()

    def _deliver(self, peer: str, message: Message, log: int) -> None:
        if log != LOG:
            return  # of a release that hosts more of them
        try:
            match message:
                case SnapshotHead():
                    if self.replica.raft.accepts_snapshot(peer, message):
                        self._receiver.head(peer, message)
                case SnapshotChunk():
                    self._receiver.chunk(peer, message)
                case SnapshotDone():
                    received = self._receiver.done(peer, message)
                    if received is not None:
                        self._nursery.start_soon(self._install, peer, received)
                case _:
                    self.replica.deliver(peer, message)
        except StreamBroken as error:
            self._drop(peer, error)
        self.wake()

    def _drop(self, peer: str, error: HoldfastError) -> None:
        self.log.peer_refused(peer=peer, error=error)
        if self._peers is not None:
            self._peers.drop(peer)

    # Snapshots

    async def _send_snapshot(self, peer: str, epoch: int, term: int) -> None:
        """A peer is behind the begin of our log. One that we cannot serve asks again: its session ends."""
        if self._peers is None:
            return
        former = self._sending.pop(peer, None)
        if former is not None:
            former.cancel()
        with trio.CancelScope() as scope:
            self._sending[peer] = scope
            try:
                await self._stream(peer, epoch, term)  # a session that ends meanwhile asks anew in the next one
            except (Unavailable, StoreError, OSError) as error:
                self._drop(peer, error if isinstance(error, HoldfastError) else HoldfastError(str(error)))

    async def _stream(self, peer: str, epoch: int, term: int) -> None:
        """Send the newest snapshot if the log goes on behind it, else one that is made now; also if it is damaged."""
        assert self._peers is not None
        began_s = self._clock()
        newest = self._state.newest_snapshot()
        for _ in range(2):
            if newest is None or newest[1].index < self.replica.raft.journal.base:
                await self._house.save()
                newest = self._state.newest_snapshot()
            if newest is None:
                raise StateBusy("the snapshot that was just taken is gone")
            path, reached = newest
            try:
                sent = await send_snapshot(self._peers, peer, path, reached, term=term, epoch=epoch, log=LOG)
            except SnapshotDamaged:
                newest = None
                continue
            if sent:
                took_ms = int((self._clock() - began_s) * 1_000)
                size_bytes = path.stat().st_size if path.exists() else 0
                self.log.snapshot_sent(peer=peer, index=reached.index, size_bytes=size_bytes, took_ms=took_ms)
            return
        raise StateBusy("a snapshot that was just taken cannot be read")

    async def _install(self, peer: str, received: Received) -> None:
        """A state has come whole: build it beside ours, then replace ours in one go. State first, then journal."""
        began_s, head = self._clock(), received.head
        try:
            prepared = await trio.to_thread.run_sync(self._state.prepare, received.path)
        except (StoreError, OSError) as error:
            self._drop(peer, HoldfastError(f"its snapshot cannot be installed: {error}"))
            return
        self._state.swap(prepared)
        self.replica.raft.snapshot_installed(peer, head)
        self.replica.installed()
        took_ms = int((self._clock() - began_s) * 1_000)
        self.log.snapshot_installed(index=head.index, size_bytes=head.size_bytes, took_ms=took_ms)
        self.wake()

    def _matches(self) -> list[int]:
        """How far the connected peers' disks agree with our log, if we lead."""
        match = self.replica.raft.match
        links = self._peers.status() if self._peers is not None and self.replica.leads else []
        return [match[link.peer] for link in links if link.connected and link.peer in match]

    # Telling

    async def _tell_now_and_then(self) -> None:
        while True:
            self._tell_skew()
            self._tell_promise()
            await trio.sleep(TELL_S)

    def _tell_promise(self) -> None:
        """What a repaired node waits for: until then it is neither a copy nor a candidate."""
        raft = self.replica.raft
        promise = raft.journal.promise
        if promise is not None:
            last, leader = raft.journal.last, raft.leader
            self.log.promise_open(promised=promise.index, term=promise.term, last=last, leader=leader)

    def _tell_skew(self) -> None:
        if self.replica.serving:
            for peer, skew_ms in self.replica.time.skew(self.replica.now_ms).items():
                if abs(skew_ms) > SKEW_TOLD_MS:
                    self.log.clock_skew(peer=peer, skew_ms=skew_ms)

    def status(self) -> NodeStatus:
        """How the node does, at this moment."""
        replica, raft = self.replica, self.replica.raft
        journal, ruling = raft.journal, raft.configuration
        links = {link.peer: link.connected for link in self._peers.status()} if self._peers is not None else {}
        match = raft.match if replica.leads else {}
        members = []
        for role, names in (("voter", ruling.voters), ("learner", ruling.learners)):
            for member in names:
                me = member.name == raft.me
                known = journal.last if me else match.get(member.name)
                members.append(
                    MemberStatus(
                        name=member.name,
                        address=member.address,
                        client_address=member.client_address or None,
                        role="voter" if role == "voter" else "learner",
                        connected=me or links.get(member.name, False),
                        match=known,
                        lag=None if known is None else max(journal.last - known, 0),
                    )
                )
        leader = raft.leader
        now_ms = replica.now_ms
        return NodeStatus(
            node=self.identity.node,
            cluster_id=self.identity.cluster_id,
            role=raft.role,
            term=raft.term,
            leader=leader,
            leader_address=str(self.config.listen) if leader == raft.me else replica.leader_address(),
            applied=self._state.reached.index,
            digest=self._digest(),
            committed=raft.commit_index,
            durable=journal.durable_index,
            last=journal.last,
            time_ms=self._time_ms(),
            fsync=self.config.fsync,
            pid=os.getpid(),
            address=str(self.config.listen),
            members=tuple(members),
            skew_ms=replica.time.skew(now_ms) if replica.serving else {},
            journal_bytes=self._segments.size_bytes,
            state_bytes=self._state.size_bytes,
            started_ms=self._started_ms,
            turn_age_ms=int((self._clock() - self._turned_s) * 1_000),
            stopping=self.stopping,
            failed=None if self._failure is None else str(self._failure),
            disk_free_bytes=shutil.disk_usage(self.config.data).free,
            refusing_produce=replica.disk_limit is not None,
            promised=None if journal.promise is None else journal.promise.index,
        )

    def _digest(self) -> str:
        with self._state.store.read() as txn:
            return f"{digest.maintained(txn):0{2 * DIGEST_BYTES}x}"

    def _time_ms(self) -> int:
        with self._state.store.read() as txn:
            return View(txn).time_ms

    def render_metrics(self) -> str:
        """The page of a scrape."""
        metrics, replica = self.metrics, self.replica
        metrics.use_status(self.status())
        if self._peers is not None:
            metrics.use_links(self._peers.status())
        metrics.parked_waiters.set(len(replica.waiters))
        metrics.queued_commands.set(replica.batcher.queued)
        metrics.queued_bytes.set(replica.batcher.queued_bytes)
        metrics.connections.set(self.clients.count)
        metrics.time_steps.read(replica.steps)
        newest = self._state.newest_snapshot()
        if newest is not None:
            metrics.snapshot_age_seconds.set(self._wall_ms() / 1_000 - newest[0].stat().st_mtime)
        return metrics.render()

    def _describe(self) -> Answer:
        """The status as a client asks for it."""
        status = self.status()
        learner = any(member.name == status.node and member.role == "learner" for member in status.members)
        role = role_name(status.role)
        reply = NodeDescribed(
            node=status.node,
            cluster_id=status.cluster_id,
            address=status.address,
            role="learner" if learner else role,  # type: ignore[arg-type]
            term=status.term,
            leader=status.leader,
            leader_address=status.leader_address,
            applied=status.applied,
            committed=status.committed,
            last=status.last,
            time_ms=status.time_ms,
            fsync=status.fsync,
            pid=status.pid,
            members=tuple(
                MemberDescribed(
                    name=member.name,
                    client_address=member.client_address,
                    voter=member.role == "voter",
                    connected=member.connected,
                    lag=member.lag,
                )
                for member in status.members
            ),
        )
        return Answer(Place(status.applied, -1, status.time_ms), reply)


def _error_of(outcome: Answer | HoldfastError) -> HoldfastError | None:
    if isinstance(outcome, HoldfastError):
        return outcome
    return outcome.reply.error if isinstance(outcome.reply, Failed) else None
