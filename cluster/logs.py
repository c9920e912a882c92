"""What a node tells its operator: one line for each event, on one stream, for people and machines.

A method for each event, with the facts it may carry: the list is closed, so that `docs/operating.md` can show all of it
and no payload, key, header or secret can slip in with a `**facts`. A line is ASCII and has no control characters,
whatever a fact holds: nobody outside can forge a line or steer a terminal.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import PurePath
from typing import Literal, TextIO, TypeAlias

from holdfast.client.protocol.errors import HoldfastError

Level: TypeAlias = Literal["info", "warning", "error"]
Fact: TypeAlias = str | int | bool | None
EventName: TypeAlias = Literal[
    "started",
    "founded",
    "waiting_for_peers",
    "became_leader",
    "lost_leadership",
    "leader_changed",
    "peer_connected",
    "peer_lost",
    "peer_refused",
    "snapshot_taken",
    "snapshot_failed",
    "snapshot_sent",
    "snapshot_installed",
    "journal_compacted",
    "promise_open",
    "slow_disk",
    "out_of_files",
    "clock_skew",
    "overloaded",
    "client_rejected",
    "transfer_begun",
    "transfer_done",
    "stopping",
    "stopped",
    "failed",
]

VALUE_CHARS = 300  # of one fact: an error's text is told, a stranger's novel is not
BURST = 10  # lines of a noisy event that are written at once
EVERY_S = 10.0  # and then one in so many seconds

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_BARE = re.compile(r"[A-Za-z0-9._:/@-]+")
_NUMBER_OR_WORD = re.compile(r"-?[0-9]+|true|false|none")


@dataclass(frozen=True, slots=True)
class Kind:
    level: Level = "info"
    noisy: bool = False  # others can make it happen as often as they like, so its lines are limited


EVENTS: dict[EventName, Kind] = {
    "started": Kind(),
    "founded": Kind(),
    "waiting_for_peers": Kind(noisy=True),
    "became_leader": Kind(),
    "lost_leadership": Kind("warning"),
    "leader_changed": Kind(),
    "peer_connected": Kind(noisy=True),
    "peer_lost": Kind("warning", noisy=True),
    "peer_refused": Kind("warning", noisy=True),
    "snapshot_taken": Kind(),
    "snapshot_failed": Kind("warning", noisy=True),
    "snapshot_sent": Kind(),
    "snapshot_installed": Kind(),
    "journal_compacted": Kind(),
    "promise_open": Kind("warning", noisy=True),
    "slow_disk": Kind("warning", noisy=True),
    "out_of_files": Kind("warning", noisy=True),
    "clock_skew": Kind("warning", noisy=True),
    "overloaded": Kind("warning", noisy=True),
    "client_rejected": Kind("warning", noisy=True),
    "transfer_begun": Kind(),
    "transfer_done": Kind(),
    "stopping": Kind(),
    "stopped": Kind(),
    "failed": Kind("error"),
}


class Log:
    """One node's log. Every method writes at most one line, and none raises because the stream is gone.

    To be called on the node's one thread: a stream that blocks, blocks the node.
    """

    def __init__(
        self,
        *,
        node: str,
        stream: TextIO,
        wall_ms: Callable[[], int],
        now_s: Callable[[], float],
        as_json: bool = False,
    ) -> None:
        """`wall_ms` dates the lines. `now_s` limits them: a wall clock that jumps must not silence anything."""
        self._node, self._stream = node, stream
        self._wall_ms, self._now_s = wall_ms, now_s
        self._render = _json if as_json else _pairs
        self._gates = {event: _Gate(now_s()) for event, kind in EVENTS.items() if kind.noisy}
        self._lost_count = 0
        self._has_failed = False

    # The node

    def started(
        self,
        *,
        version: str,
        pid: int,
        address: str,
        peer_address: str,
        http_address: str | None,
        fsync: str,
        applied: int,
    ) -> None:
        self._tell(
            "started",
            version=version,
            pid=pid,
            address=address,
            peer_address=peer_address,
            http_address=http_address,
            fsync=fsync,
            applied=applied,
        )

    def founded(self, *, cluster_id: str, voters: Iterable[str]) -> None:
        self._tell("founded", cluster_id=cluster_id, voters=",".join(voters))

    def stopping(self, *, reason: str) -> None:
        self._tell("stopping", reason=reason)

    def stopped(self, *, uptime_ms: int) -> None:
        """The last line; it also tells how many lines were suppressed and never accounted for."""
        self._tell("stopped", uptime_ms=uptime_ms)

    def failed(self, *, error: BaseException) -> None:
        """The node cannot go on. `where` is the innermost line of ours or of a library that raised.

        Told once: what the end of one part does to the others is not why. A cancellation is no failure at all.
        """
        cause = cause_of(error)
        if isinstance(cause, Exception) and not self._has_failed:
            self._has_failed = True
            self._tell("failed", **_told(cause), where=_where(cause))

    # The cluster

    def waiting_for_peers(self, *, missing: Iterable[str]) -> None:
        self._tell("waiting_for_peers", missing=",".join(missing))

    def became_leader(self, *, term: int) -> None:
        self._tell("became_leader", term=term)

    def lost_leadership(self, *, term: int) -> None:
        self._tell("lost_leadership", term=term)

    def leader_changed(self, *, leader: str | None, term: int) -> None:
        self._tell("leader_changed", leader=leader, term=term)

    def peer_connected(self, *, peer: str) -> None:
        self._tell("peer_connected", peer=peer)

    def peer_lost(self, *, peer: str, error: HoldfastError) -> None:
        self._tell("peer_lost", peer=peer, **_told(error))

    def peer_refused(self, *, peer: str, error: HoldfastError) -> None:
        """A dial or a handshake failed; `peer` is a name or, of one who has not proven a name, its address."""
        self._tell("peer_refused", peer=peer, **_told(error))

    def transfer_begun(self, *, to: str) -> None:
        self._tell("transfer_begun", to=to)

    def transfer_done(self, *, to: str, took_ms: int) -> None:
        self._tell("transfer_done", to=to, took_ms=took_ms)

    # The disk

    def snapshot_taken(self, *, index: int, size_bytes: int, took_ms: int) -> None:
        self._tell("snapshot_taken", index=index, size_bytes=size_bytes, took_ms=took_ms)

    def snapshot_failed(self, *, error: BaseException) -> None:
        self._tell("snapshot_failed", **_told(error))

    def snapshot_sent(self, *, peer: str, index: int, size_bytes: int, took_ms: int) -> None:
        self._tell("snapshot_sent", peer=peer, index=index, size_bytes=size_bytes, took_ms=took_ms)

    def snapshot_installed(self, *, index: int, size_bytes: int, took_ms: int) -> None:
        self._tell("snapshot_installed", index=index, size_bytes=size_bytes, took_ms=took_ms)

    def journal_compacted(self, *, base: int) -> None:
        self._tell("journal_compacted", base=base)

    def promise_open(self, *, promised: int, term: int, last: int, leader: str | None) -> None:
        """The journal was repaired, and this node waits for a leader with this entry."""
        self._tell("promise_open", promised=promised, term=term, last=last, leader=leader)

    def slow_disk(self, *, took_ms: int) -> None:
        self._tell("slow_disk", took_ms=took_ms)

    def out_of_files(self, *, doing: str, error: OSError) -> None:
        self._tell("out_of_files", doing=doing, **_told(error))

    def clock_skew(self, *, peer: str, skew_ms: int) -> None:
        self._tell("clock_skew", peer=peer, skew_ms=skew_ms)

    # Clients

    def overloaded(self, *, limit_name: str, limit: int) -> None:
        self._tell("overloaded", limit_name=limit_name, limit=limit)

    def client_rejected(self, *, client: str, error: HoldfastError) -> None:
        """The node ends a connection, or takes none. `client` is its address.

        The error's text may quote what the client sent, so only its name is told.
        """
        self._tell("client_rejected", client=client, error=type(error).__name__)

    # Lines

    def _tell(self, event: EventName, **facts: Fact) -> None:
        gate = self._gates.get(event)
        if gate is not None and not gate.passes(self._now_s()):
            return
        last = event in ("stopped", "failed")
        suppressed = sum(gate.suppressed() for gate in (self._gates.values() if last else [gate] if gate else []))
        head: dict[str, Fact] = {
            "time": _time(self._wall_ms()),
            "level": EVENTS[event].level,
            "node": self._node,
            "event": event,
        }
        tail: dict[str, Fact] = {"suppressed": suppressed} if suppressed else {}
        if self._lost_count:
            tail["lost"] = self._lost_count
        try:
            self._stream.write(self._render({name: _bounded(fact) for name, fact in {**head, **facts, **tail}.items()}))
            self._stream.flush()
        except (OSError, ValueError):  # a full disk, a closed pipe, a closed file: the queue goes on without its log
            self._lost_count += 1
        else:
            self._lost_count = 0


class _Gate:
    """Lets a burst through, then one line in a while, and counts what it held back."""

    def __init__(self, now_s: float) -> None:
        self._tokens, self._at_s = float(BURST), now_s
        self._held_count = 0

    def passes(self, now_s: float) -> bool:
        self._tokens = min(BURST, self._tokens + (now_s - self._at_s) / EVERY_S)
        self._at_s = now_s
        if self._tokens < 1:
            self._held_count += 1
            return False
        self._tokens -= 1
        return True

    def suppressed(self) -> int:
        """How many were held back since this was last asked."""
        count, self._held_count = self._held_count, 0
        return count


def cause_of(error: BaseException) -> BaseException:
    """The first error that a group is about, and not what it did to other tasks: those were cancelled."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [cause_of(each) for each in error.exceptions]
    return next((cause for cause in causes if isinstance(cause, Exception)), causes[0])


def _told(error: BaseException) -> dict[str, Fact]:
    return {"error": type(error).__name__, "reason": str(error)}


def _where(error: BaseException) -> str | None:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return None if trace is None else f"{PurePath(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"


def _time(wall_ms: int) -> str:
    """UTC with milliseconds; by whole numbers, for a float would round some of them."""
    return f"{(_EPOCH + timedelta(milliseconds=wall_ms)).replace(tzinfo=None).isoformat(timespec='milliseconds')}Z"


def _bounded(fact: Fact) -> Fact:
    return f"{fact[:VALUE_CHARS]}..." if isinstance(fact, str) and len(fact) > VALUE_CHARS else fact


def _json(facts: dict[str, Fact]) -> str:
    return json.dumps(facts, separators=(",", ":")) + "\n"  # ASCII only, which is the default


def _pairs(facts: dict[str, Fact]) -> str:
    return " ".join(f"{name}={_value(fact)}" for name, fact in facts.items()) + "\n"


def _value(fact: Fact) -> str:
    """Numbers, true, false and none stand bare, and so do plain words; any other text is a JSON string."""
    match fact:
        case None:
            return "none"
        case bool():
            return "true" if fact else "false"
        case int():
            return str(int(fact))
        case str():
            plain = _BARE.fullmatch(fact) and not _NUMBER_OR_WORD.fullmatch(fact)
            return fact if plain else json.dumps(fact)
