"""The works of `holdfast bench` in which something dies or comes back: failover, healing, a long backlog.

What was confirmed is counted afterwards, message by message: a figure of speed says nothing if something was lost.
"""

import os
import selectors
import signal
import socket
import time
from argparse import Namespace
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Final, Self

from holdfast.client.cli.bench_cluster import (
    QUEUE,
    Change,
    Figures,
    Loads,
    Place,
    measured,
    opened,
    quantile,
    wait_for,
)
from holdfast.client.cli.bench_load import STAMP, Job
from holdfast.client.cli.bench_works import fill
from holdfast.client.cli.up import HOST, Plan
from holdfast.client.protocol.errors import HoldfastError

MEDIAN_MS: Final = {"kill": 150.0, "stop": 700.0, "transfer": 100.0}  # silence that is wanted, by how the leader goes
WORST_MS: Final = {"kill": 1_000.0}
HEAL_MS: Final = 1_000.0
SETTLE_S: Final = 0.4  # of undisturbed load before and after each blow
STOPPED_S: Final = 2.0  # for how long a stopped leader stays so: longer than any election
FAILOVER_CLIENTS: Final = 4
SILENCE_MAX_S: Final = 20.0
CONFLICT_BYTES: Final = 1_024
GO_ON_S: Final = 300.0
ISOLATED: Final = "n1"  # dials nobody, for the higher name dials: one relay is all that leads to it


# Failover ------------------------------------------------------------------------------------------------


def failover(args: Namespace) -> Iterator[Figures]:
    """The leader goes under load, again and again; how long no client gets a confirm, and what was lost."""
    with opened(args.nodes, args.directory) as place:
        job = Job(
            kind="produce",
            connect=place.connect,
            queue=QUEUE,
            clients=FAILOVER_CLIENTS,
            payload=args.payload,
            pace_s=0.001,  # the load is to notice the gap, not to fill the machine
            keep=True,
        )
        blows: list[tuple[float, float]] = []
        with Loads([job]) as loads:
            loads.go()
            time.sleep(job.warm_s)
            for _ in range(args.rounds):
                blows.append(_blow(place, args.how))
            [result] = loads.stop()
        confirms = sorted((at_s, client, seq, version) for at_s, client, seq, version in result["confirms"])
        times = [at_s for at_s, *_ in confirms]
        silences = [silence_ms(times, began_s, ended_s) for began_s, ended_s in blows]
        lost, doubled = _account(place, confirms)
        wanted = {"silence_median_ms": MEDIAN_MS[args.how], "lost": 0}
        if args.how in WORST_MS:
            wanted["silence_worst_ms"] = WORST_MS[args.how]
        yield {
            "how": args.how,
            "rounds": args.rounds,
            "silence_median_ms": quantile(silences, 0.5),
            "silence_worst_ms": round(max(silences), 1),
            "silences_ms": [round(silence_ms) for silence_ms in silences],
            "confirmed": len(confirms),
            "lost": lost,
            "doubled": doubled,
            "wanted": wanted,
        }


def _blow(place: Place, how: str) -> tuple[float, float]:
    """Take the leader away under load and bring it back; from when until when its going may be felt."""
    place.wait_all_up()
    leader = place.leader()
    time.sleep(SETTLE_S)
    began_s = time.monotonic()
    match how:
        case "kill":
            place.cluster.kill(leader)
        case "stop":
            place.signal(leader, signal.SIGSTOP)
            time.sleep(STOPPED_S)
        case _:
            place.signal(leader, signal.SIGTERM)
    others = [name for name in place.names if name != leader]
    wait_for("another leader", lambda: place.leads_among(others))
    time.sleep(SETTLE_S)
    ended_s = time.monotonic()
    match how:
        case "kill":
            place.cluster.start(leader)
        case "stop":
            place.signal(leader, signal.SIGCONT)
        case _:
            wait_for(f"{leader} to end", lambda: leader in place.cluster.dead())
            place.cluster.start(leader)
    return began_s, ended_s


def silence_ms(times: list[float], began_s: float, ended_s: float) -> float:
    """The longest gap between two confirms, of whatever client, that begins or lasts after the blow."""
    at = max(bisect_left(times, began_s) - 1, 0)
    until = bisect_left(times, ended_s)
    seen = times[at : until + 1]
    if len(seen) < 2:
        raise HoldfastError(f"nothing was confirmed for {SILENCE_MAX_S:.0f} s after a blow")
    return max(later - earlier for earlier, later in pairwise(seen)) * 1_000


def _account(place: Place, confirms: list[tuple[float, int, int, int]]) -> tuple[int, int]:
    """Read the whole queue: how many confirmed messages are not at the version that was told, and how many twice."""
    place.wait_level()
    stored: Counter[tuple[int, int]] = Counter()
    at_version: dict[int, tuple[int, int]] = {}
    for message in place.client.read(QUEUE):
        _, client, seq = STAMP.unpack_from(message.payload)
        stored[client, seq] += 1
        at_version[message.version] = (client, seq)
    lost = sum(at_version.get(version) != (client, seq) for _, client, seq, version in confirms)
    return lost, sum(count > 1 for count in stored.values())


# Heal ----------------------------------------------------------------------------------------------------


class Relay:
    """Stands before a node's address for peers, and cuts it off from them until it is healed."""

    def __init__(self, port: int, target: int) -> None:
        self.passed_s = 0.0  # when the first connection went through since it was healed
        self._target = target
        self._cut = self._over = False
        self._selector = selectors.DefaultSelector()
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._listener = socket.create_server((HOST, port), backlog=64)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = Thread(target=self._run, name="relay", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._thread.join()
        for sock in [*self._pairs, self._listener]:
            sock.close()

    def cut(self) -> None:
        self._cut = True

    def heal(self) -> None:
        self.passed_s = 0.0
        self._cut = False

    def _run(self) -> None:
        while not self._over:
            for key, _ in self._selector.select(0.01):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._pairs:
                    self._pass_on(key.fileobj)
            if self._cut:
                for sock in list(self._pairs):
                    self._close(sock)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        if self._cut:
            near.close()
            return
        try:
            far = socket.create_connection((HOST, self._target), timeout=1.0)
        except OSError:
            near.close()
            return
        self.passed_s = self.passed_s or time.monotonic()
        for sock, other in ((near, far), (far, near)):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(5.0)
            self._pairs[sock] = other
            self._selector.register(sock, selectors.EVENT_READ)

    def _pass_on(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(262_144)
            if not data:
                raise ConnectionResetError
            self._pairs[sock].sendall(data)
        except OSError:
            self._close(sock)

    def _close(self, sock: socket.socket) -> None:
        other = self._pairs.pop(sock, None)
        for end in (sock, other):
            if end is not None:
                self._pairs.pop(end, None)
                with suppress(KeyError, ValueError):
                    self._selector.unregister(end)
                end.close()


def heal(args: Namespace) -> Iterator[Figures]:
    """A leader that was alone has entries that nobody else has, and the others went on: until it is level again.

    1. The leader is cut off and killed; the others elect another, in a higher term.
    2. Its journal gets the conflicting entries, as if it had taken them while it was alone. A client could not do that:
       a leader forms no more than a few entries that nobody has acknowledged.
    3. It is started, still cut off; the others take in more messages.
    4. The relay lets its peers through.
    """

    for turn in range(args.rounds):
        with ExitStack() as stack:
            relays: list[Relay] = []
            place = stack.enter_context(opened(args.nodes, args.directory, _behind_relay(stack, relays)))
            figures = _heal(place, relays[0], args)
        yield {"rounds": args.rounds, "turn": turn + 1, **figures, "wanted": {"heal_ms": HEAL_MS}}


def _behind_relay(stack: ExitStack, relays: list[Relay]) -> Change:
    """Nodes for whom the address of the one that will be cut off is that of a relay, which begins with the first."""

    def change(plan: Plan, command: list[str], _: str) -> list[str]:
        real, ours = plan.base_port + 21, plan.base_port + 31
        if not relays:
            relays.append(stack.enter_context(Relay(ours, real)))
        at = command.index("--peers") + 1
        peers = command[at].replace(f"{HOST}:{real}", f"{HOST}:{ours}")
        return [*command[:at], peers, *command[at + 1 :]]

    return change


def _heal(place: Place, relay: Relay, args: Namespace) -> Figures:
    while (leader := place.leader()) != ISOLATED:
        place.cluster.kill(leader)
        place.leader()
        place.cluster.start(leader)
        place.wait_level()
    relay.cut()
    place.cluster.kill(ISOLATED)
    others = [name for name in place.names if name != ISOLATED]
    wait_for("another leader", lambda: place.leads_among(others))
    _forge(place.data / ISOLATED, args.entries)
    place.cluster.start(ISOLATED)
    wait_for(f"{ISOLATED} to serve", lambda: place.applied(ISOLATED))
    leader = place.leader()
    _go_on(place, leader, args.entries // 2)
    target = place.applied(leader) or 0
    behind = target - (place.applied(ISOLATED) or 0)
    healed_s = time.monotonic()
    relay.heal()
    wait_for(f"{ISOLATED} to be level", lambda: (place.applied(ISOLATED) or 0) >= target)
    level_s = time.monotonic()
    return {
        "entries": args.entries,
        "behind": behind,
        "heal_ms": round((level_s - healed_s) * 1_000, 1),
        "connected_ms": round((relay.passed_s - healed_s) * 1_000, 1),
        "leader_unchanged": place.leader() == leader,
    }


def _go_on(place: Place, leader: str, entries: int) -> None:
    """Let the others take in messages of 1 KiB, one an entry, until they have so many entries more."""
    target = (place.applied(leader) or 0) + entries
    with Loads([Job(kind="produce", connect=place.connect, queue=QUEUE, payload=CONFLICT_BYTES)]) as loads:
        loads.go()
        wait_for("the others to go on", lambda: (place.applied(leader) or 0) >= target, GO_ON_S)


def _forge(data: Path, count: int) -> None:
    """Append entries of the journal's own last term to a stopped node's journal."""
    from holdfast.cluster.consensus import BATCH
    from holdfast.cluster.identity import journal_folder
    from holdfast.cluster.journal import Journal
    from holdfast.cluster.segments import Segments
    from holdfast.storage.entry import encode_entry

    entry = BATCH + encode_entry(0, ())
    entry += os.urandom(CONFLICT_BYTES - len(entry))  # none of them is ever applied, so nobody reads them
    segments = Segments.open(str(journal_folder(data)))
    try:
        journal = Journal.recovered(segments.recovered, segments.read_entries)
        for _ in range(count):
            journal.add(entry, journal.last + 1, journal.term)
        while (flush := journal.take()) is not None:
            segments.write(flush)
            journal.on_durable(flush.lsn)
    finally:
        segments.close()


# Backlog -------------------------------------------------------------------------------------------------


def backlog(args: Namespace) -> Iterator[Figures]:
    """Memory, restart and cost of a request with so many messages waiting; the first line is the empty queue."""
    with opened(args.nodes, args.directory) as place:
        waiting = 0
        for messages in args.messages:
            filled_s = fill(place, args.payload, messages - waiting) if messages > waiting else 0.0
            yield {
                "messages": messages,
                "payload": args.payload,
                "fill_s": round(filled_s, 1),
                **_costs(place, args),
                **place.memory(place.leader()),
                **_restarted(place),
                "wanted": {},
            }
            waiting = place.client.stats(QUEUE).ready


def _costs(place: Place, args: Namespace) -> Figures:
    """One producer and one consumer, each alone: how long a request takes."""
    job = Job(kind="produce", connect=place.connect, queue=QUEUE, payload=args.payload, batch=100, warm_s=0.2)
    produced, _ = measured(place, [replace(job, name=f"cost-{time.monotonic_ns()}")], args.seconds)
    consumed, _ = measured(place, [replace(job, kind="consume")], args.seconds)
    return {
        "produce_p50_ms": produced["p50_ms"],
        "produce_leader_cpu_us": produced["leader_cpu_us"],
        "lease_ack_p50_ms": consumed["p50_ms"],
        "lease_ack_leader_cpu_us": consumed["leader_cpu_us"],
    }


def _restarted(place: Place) -> Figures:
    """A follower that is stopped in good order, and one that is killed: until it is level with the leader again."""
    follower = place.followers()[0] if len(place.names) > 1 else place.leader()
    took: Figures = {}
    for name in ("restart", "crash_restart"):
        if name == "restart":
            place.terminate(follower)
        else:
            place.cluster.kill(follower)
        began_s = time.monotonic()
        place.cluster.start(follower)
        wait_for(f"{follower} to serve", lambda: place.applied(follower))
        place.wait_level()
        took[f"{name}_s"] = round(time.monotonic() - began_s, 2)
    took["restarted_resident_bytes"] = place.memory(follower)["resident_bytes"]
    return took
