"""What `holdfast top` has seen: a look at nodes and groups, and what two of them say about rates.

A look has two halves that do not wait for each other: who leads is told by each node for itself, also while there is no
leader to ask for the counters of a group. Only `look_at_groups` asks and reads clocks.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.client.cli.output import as_object
from holdfast.client.protocol.errors import Refused

if TYPE_CHECKING:
    from holdfast.client.blocking import Client
    from holdfast.client.calls import Stats
    from holdfast.client.status import ClusterStatus

GROUPS_MAX = 200  # one look asks for each of them: more would be a load of its own

Place = tuple[str, str]  # queue and group


@dataclass(frozen=True, slots=True)
class Groups:
    """The counters of groups at one time, by both clocks of this machine; `left_out` are those not asked for."""

    at_s: float
    wall_ms: int
    stats: Mapping[Place, "Stats"]
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Rates:
    """Messages a second between two looks; none where nobody knows."""

    produced: float | None = None
    acked: float | None = None


def look_at_groups(client: "Client", queues: Sequence[str]) -> Groups:
    """Of these queues, or of all. What is deleted meanwhile is left out."""
    now_s, wall_ms = time.monotonic(), time.time_ns() // 1_000_000
    found: dict[Place, Stats] = {}
    left_out = 0
    for name in queues or client.queues():
        try:
            for group in client.queue(name).groups:
                if len(found) < GROUPS_MAX:
                    found[name, group.name] = client.stats(name, group=group.name)
                else:
                    left_out += 1
        except Refused:
            if queues:
                raise
    return Groups(now_s, wall_ms, found, left_out)


def rates(before: Groups | None, now: Groups) -> dict[Place, Rates]:
    """For each group of `now`. A counter that went down is another group's: it was created or begun anew."""
    found: dict[Place, Rates] = {}
    for place, stats in now.stats.items():
        former = before.stats.get(place) if before is not None else None
        if before is None or former is None or now.at_s <= before.at_s:
            found[place] = Rates()
            continue
        passed_s = now.at_s - before.at_s
        produced, acked = stats.produced - former.produced, stats.acked - former.acked
        found[place] = Rates(
            produced / passed_s if produced >= 0 else None,
            acked / passed_s if acked >= 0 else None,
        )
    return found


def waiting(stats: "Stats") -> int:
    return stats.ready + stats.delayed + stats.in_flight


def oldest_age_ms(stats: "Stats", wall_ms: int) -> int | None:
    """How long the oldest unsettled message has been there: by our own clock, for where nothing happens committed time
    stands still."""
    return None if stats.oldest_ms is None else max(max(stats.as_of_ms, wall_ms) - stats.oldest_ms, 0)


def in_order(now: Groups) -> list[tuple[Place, "Stats"]]:
    """Where most is waiting first."""
    return sorted(now.stats.items(), key=lambda each: (-waiting(each[1]), each[0]))


def as_json(status: "ClusterStatus", before: Groups | None, now: Groups) -> dict[str, Any]:
    found = rates(before, now)
    return {
        **{name: value for name, value in as_object(status).items() if name != "cluster_id"},
        "groups": [
            {
                "queue": place[0],
                "group": place[1],
                "ready": stats.ready,
                "delayed": stats.delayed,
                "in_flight": stats.in_flight,
                "dead": stats.dead,
                "holes": stats.holes,
                "oldest_age_ms": oldest_age_ms(stats, now.wall_ms),
                "produced_per_s": found[place].produced,
                "acked_per_s": found[place].acked,
            }
            for place, stats in in_order(now)
        ],
        "left_out": now.left_out,
    }


NODE_HEAD = ("NODE", "ROLE", "APPLIED", "LAG", "PID", "ADDRESS", "")
GROUP_HEAD = ("QUEUE", "GROUP", "READY", "DELAYED", "IN FLIGHT", "DEAD", "IN/S", "ACKED/S", "OLDEST")


def title(status: "ClusterStatus") -> str:
    leader = f"leader {status.leader}" if status.leader is not None else "no leader"
    return f"cluster {status.cluster_id}: {leader}, term {status.term}, fsync {status.fsync}"


def node_rows(status: "ClusterStatus") -> list[tuple[object, ...]]:
    return [
        (node.name, node.role, node.applied, node.lag, node.pid, node.address, node.problem or "")
        for node in status.nodes
    ]


def group_rows(before: Groups | None, now: Groups) -> list[tuple[object, ...]]:
    found = rates(before, now)
    return [
        (
            *place,
            *(stats.ready, stats.delayed, stats.in_flight, stats.dead),
            *(_rate(found[place].produced), _rate(found[place].acked)),
            _age(oldest_age_ms(stats, now.wall_ms)),
        )
        for place, stats in in_order(now)
    ]


def _rate(per_s: float | None) -> float | int | None:
    return None if per_s is None else round(per_s) if per_s >= 10 else round(per_s, 1)


def _age(ms: int | None) -> str | None:
    if ms is None:
        return None
    for unit_ms, unit in ((86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1_000, "s")):
        if ms >= unit_ms:
            return f"{ms // unit_ms}{unit}"
    return "0s"
