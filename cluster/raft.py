"""The seam to pysyncobj: the only importer of it, and nothing but the seam.

The library keeps terms, votes, log matching and the commit rule. `Library` gives it our journal and our clock, takes
its sockets, threads, pickles, queues and snapshots away, and turns its dictionaries into our values; it decides
nothing. What the library would get wrong is kept from it in `consensus.py`. The release is pinned, and
`tests/contract` fails when any name or file that is used here changes; `docs/raft.md` has the reasons (R1 … R28).
"""

import zlib
from collections.abc import Callable, Iterable
from random import Random
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import pysyncobj.pickle
import pysyncobj.syncobj
from pysyncobj.config import SyncObjConf
from pysyncobj.node import Node
from pysyncobj.transport import Transport

from holdfast.client.protocol.errors import StateBroken
from holdfast.cluster.consensus import Consensus
from holdfast.cluster.elections import Timing
from holdfast.cluster.journal import Journal
from holdfast.cluster.leading import Clock, Window
from holdfast.cluster.membership import Configuration
from holdfast.cluster.messages import Message, RequestVote, TimeoutNow, VoteGranted
from holdfast.cluster.replication import Fitted

T = TypeVar("T")

_TIMING, _WINDOW = Timing(), Window()


class Raft(Consensus):
    """One node's part in one log, over the library. See `Consensus` for how it is driven."""

    def __init__(
        self,
        *,
        me: str,
        journal: Journal,
        clock: Clock,
        rng: Random,
        applied: int,
        applied_term: int,
        configuration: Configuration,
        configuration_index: int = 0,
        wall_ms: Callable[[], int] = lambda: 0,
        timing: Timing = _TIMING,
        window: Window = _WINDOW,
    ) -> None:
        """Go on where journal and state were left; `configuration` is the state's, in force at `applied`.

        `clock` is `library_clock()` wherever time is real. Raises StateBroken if the state ends before the journal
        begins.
        """
        super().__init__(
            lambda owner: Library(owner, me, journal, timing),
            me=me,
            journal=journal,
            clock=clock,
            rng=rng,
            applied=applied,
            applied_term=applied_term,
            configuration=configuration,
            configuration_index=configuration_index,
            wall_ms=wall_ms,
            timing=timing,
            window=window,
        )


def library_clock() -> Clock:
    """The clock that the library reads, CLOCK_MONOTONIC_RAW: beside any other its heartbeats would not fire."""
    clock: Clock = pysyncobj.syncobj.monotonicTime
    return clock


def use_library_clock(clock: Clock) -> Clock:
    """Give the library another clock and get the former back. For simulated time alone."""
    former = library_clock()
    pysyncobj.syncobj.monotonicTime = clock
    return former


def _poisoned(*_: Any, **__: Any) -> NoReturn:
    raise StateBroken(problem="pysyncobj reached for pickle")


for _name in ("load", "loads", "dump", "dumps"):  # R2: the library finds them through this module
    setattr(pysyncobj.pickle, _name, _poisoned)


class Owner(Protocol):
    """What the library asks, in the middle of its own handlers: answer or note it, and call nothing of it."""

    def timeout_s(self) -> float: ...
    def heartbeat(self) -> None: ...
    def state_changed(self, old: int, new: int) -> None: ...
    def answer(self, peer: str, next_index: int, reset: bool, success: bool) -> None: ...
    def send(self, peer: str, message: Message) -> None: ...


class _Private(Generic[T]):
    """One private attribute of the library, as an attribute of `Library`."""

    def __init__(self, name: str) -> None:
        self.name = f"_SyncObj__{name}"

    def __get__(self, library: "Library", owner: type["Library"]) -> T:
        value: T = getattr(library.engine, self.name)
        return value

    def __set__(self, library: "Library", value: T) -> None:
        setattr(library.engine, self.name, value)


class Library:
    """The library in our words. Peers are named; the names are those that `use_members` was last given."""

    state = _Private[int]("raftState")
    term = _Private[int]("raftCurrentTerm")
    vote = _Private[str | None]("votedForNodeId")
    commit_index = _Private[int]("raftCommitIndex")
    applied = _Private[int]("raftLastApplied")
    no_op_index = _Private[int | None]("noopIDx")
    deadline_s = _Private[float]("raftElectionDeadline")  # of the next election; 0: at once
    heartbeat_due_s = _Private[float]("newAppendEntriesTime")
    _leader = _Private[Any]("raftLeader")
    _next = _Private[dict[Node, int]]("raftNextIndex")
    _match = _Private[dict[Node, int]]("raftMatchIndex")
    _heard = _Private[dict[Node, float]]("lastResponseTime")
    _connected = _Private[set[Node]]("connectedNodes")
    _voters = _Private[set[Node]]("otherNodes")
    _learners = _Private[set[Node]]("readonlyNodes")
    _transport = _Private[Any]("transport")
    _serializer = _Private[Any]("serializer")
    _log = _Private[Journal]("raftLog")
    _load_dump = _Private[bool]("needLoadDumpFile")

    def __init__(self, owner: Owner, me: str, journal: Journal, timing: Timing) -> None:
        self.peers: dict[str, Node] = {}
        self.engine = _Engine(owner, me, timing)
        self._serializer = _NoSerializer()
        self._log = journal
        self._load_dump = False

    @property
    def leader(self) -> str | None:
        return None if self._leader is None else self._leader.id

    def tick(self) -> None:
        """An election whose deadline has passed, commit index, quorum check, heartbeat."""
        self.engine.doTick(0)

    def transfer(self, peer: str) -> bool:
        """Whether the peer could be asked to lead: a voter that has all of our log."""
        outcome: list[int] = []
        self.engine.transferLeadership(self.peers[peer], lambda _, reason: outcome.append(reason))
        return outcome == [0]

    # Messages in

    def append(self, peer: str, term: int, fitted: Fitted) -> None:
        given = {"prevLogIdx": fitted.prev_index, "prevLogTerm": fitted.prev_term, "entries": fitted.entries}
        self._receive(peer, type="append_entries", term=term, commit_index=fitted.commit_index, **given)

    def heard_leader(self, peer: str, term: int, commit_index: int) -> None:
        """An append without entries and without the place that they follow."""
        self._receive(peer, type="append_entries", term=term, commit_index=commit_index)

    def matched(self, peer: str, index: int) -> None:
        self._receive(peer, type="next_node_idx", next_node_idx=index + 1, reset=False, success=True)

    def request_vote(self, peer: str, term: int, last_index: int, last_term: int) -> None:
        self._receive(peer, type="request_vote", term=term, last_log_index=last_index, last_log_term=last_term)

    def vote_granted(self, peer: str, term: int) -> None:
        self._receive(peer, type="response_vote", term=term)

    def timeout_now(self, peer: str, term: int) -> None:
        self._receive(peer, type="timeout_now", term=term)

    def _receive(self, peer: str, **message: Any) -> None:
        self._transport._onMessageReceived(self.peers.get(peer) or _PeerNode(peer), message)

    # Peers

    def connect(self, peer: str) -> None:
        self._transport._onNodeConnected(self.peers[peer])

    def disconnect(self, peer: str) -> None:
        self._transport._onNodeDisconnected(self.peers[peer])

    def is_connected(self, peer: str) -> bool:
        return self.peers[peer] in self._connected

    def next_index(self, peer: str) -> int:
        return self._next[self.peers[peer]]

    def set_next_index(self, peer: str, index: int) -> None:
        self._next[self.peers[peer]] = index

    def raise_match(self, peer: str, index: int) -> None:
        node = self.peers[peer]
        self._match[node] = max(self._match[node], index)

    def heard(self, peer: str, now_s: float) -> None:
        self._heard[self.peers[peer]] = now_s

    def use_members(
        self, me: str, voters: Iterable[str], learners: Iterable[str], now_s: float, next_index: int
    ) -> None:
        """Count and address exactly these. A peer that is missing in one map is a KeyError in the library's tick."""
        wanted = [name for name in (*voters, *learners) if name != me]
        for name in [name for name in self.peers if name not in wanted]:
            node = self.peers.pop(name)
            self._connected.discard(node)
            for known in (self._next, self._match, self._heard):
                known.pop(node, None)
        for name in wanted:
            if name not in self.peers:
                node = self.peers[name] = _PeerNode(name)
                self._next[node], self._match[node], self._heard[node] = next_index, 0, now_s
        self._voters = {self.peers[name] for name in voters if name != me}
        self._learners = {self.peers[name] for name in learners if name != me}


class _Engine(pysyncobj.syncobj.SyncObj):  # type: ignore[misc]
    """The unmodified library with every door but ours closed.

    It has no properties: the library's constructor evaluates every one of them before its own attributes exist.
    """

    def __init__(self, owner: Owner, me: str, timing: Timing) -> None:
        self._owner = owner
        settings = SyncObjConf(
            autoTick=False,  # R26: its thread would swallow exceptions
            appendEntriesUseBatch=True,  # else it makes a pipe
            dynamicMembershipChange=False,  # R21
            commandsWaitLeader=False,
            raftMinTimeout=timing.election_min_s,
            raftMaxTimeout=timing.election_max_s,
            appendEntriesPeriod=timing.heartbeat_s,
            leaderFallbackTimeout=timing.election_max_s,  # R14
            connectionTimeout=max(10.0, timing.election_max_s),
            logCompactionMinEntries=1 << 60,
            logCompactionMinTime=1 << 60,
            fullDumpFile=None,
            journalFile=None,
            onStateChanged=owner.state_changed,
        )
        super().__init__(_PeerNode(me), [], conf=settings, transport=_Outbox(owner))
        self._poller = _NoPoller()

    def _SyncObj__applyLogEntries(self) -> bool:  # noqa: N802
        return False  # applying is the owner's

    def _SyncObj__sendAppendEntries(self) -> None:  # noqa: N802
        self._owner.heartbeat()

    def _SyncObj__generateRaftTimeout(self) -> float:  # noqa: N802
        return self._owner.timeout_s()

    def _SyncObj__tryLogCompaction(self) -> None:  # noqa: N802
        pass

    def _SyncObj__loadDumpFile(self, clearJournal: bool) -> NoReturn:  # noqa: N802, N803
        raise StateBroken(problem="pysyncobj reached for a full dump")

    def _checkCommandsToApply(self) -> None:  # noqa: N802
        pass  # no queue, no forwarding (R17)


class _PeerNode(Node):  # type: ignore[misc]
    """The library iterates over sets of nodes: their order must not depend on PYTHONHASHSEED."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._hash = zlib.crc32(name.encode())  # asked for some seventy times for each entry

    def __hash__(self) -> int:
        return self._hash


class _Outbox(Transport):  # type: ignore[misc]
    """The library's way out: no socket, a method of ours."""

    def __init__(self, owner: Owner) -> None:
        super().__init__(None, None, None)
        self._owner = owner

    def send(self, node: Any, message: dict[str, Any]) -> bool:
        match message["type"]:
            case "next_node_idx":
                self._owner.answer(node.id, message["next_node_idx"], message["reset"], message["success"])
            case "request_vote":
                last_index, last_term = message["last_log_index"], message["last_log_term"]
                self._owner.send(node.id, RequestVote(message["term"], last_index, last_term))
            case "response_vote":
                self._owner.send(node.id, VoteGranted(message["term"]))
            case "timeout_now":
                self._owner.send(node.id, TimeoutNow(message["term"]))
            case unknown:
                raise StateBroken(problem=f"pysyncobj would send {unknown}")
        return True


class _NoPoller:
    def poll(self, timeout: float) -> None:
        pass


class _NoSerializer:
    def __getattr__(self, name: str) -> NoReturn:
        raise StateBroken(problem=f"pysyncobj reached for its serializer: {name}")
