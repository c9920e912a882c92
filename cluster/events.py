"""What the consensus of a log tells its owner: roles, and what has come to pass."""

from dataclasses import dataclass
from enum import IntEnum


class Role(IntEnum):
    FOLLOWER = 0
    CANDIDATE = 1
    LEADER = 2


@dataclass(frozen=True, slots=True)
class BecameLeader:
    term: int


@dataclass(frozen=True, slots=True)
class LostLeadership:
    """What waits for an index is indeterminate until that index is applied."""

    term: int


@dataclass(frozen=True, slots=True)
class LeaderChanged:
    """Another leader, none, or another term."""

    leader: str | None
    term: int


@dataclass(frozen=True, slots=True)
class SnapshotNeeded:
    """This peer is behind the begin of our log: send it a state, under this epoch."""

    peer: str
    epoch: int


Event = BecameLeader | LostLeadership | LeaderChanged | SnapshotNeeded
