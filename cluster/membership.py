"""Who belongs to a log: configuration entries, which of them rules, and which change may follow.

The newest configuration *in the log* rules, from the moment it is appended and committed or not; truncation returns
to the one before (R21). Pure: `raft.py` tells what was appended and cut.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.client.protocol.errors import BadFrame

CONFIGURATION = b"\x11"  # the first byte of a configuration's log entry
NAME_BYTES = 255
MEMBERS_MAX = 64

_COUNTS = struct.Struct(">BB")
_LENGTHS = struct.Struct(">BHH")


class ConfigurationRefused(Exception):
    """This change may not be proposed now; the message says why. Nothing was appended."""


@dataclass(frozen=True, slots=True)
class Member:
    name: str
    address: str = ""  # where it listens for peers
    client_address: str = ""  # where it serves clients: others send them there


@dataclass(frozen=True, slots=True)
class Configuration:
    """Voters are counted; learners get every entry and are counted nowhere."""

    voters: tuple[Member, ...] = ()
    learners: tuple[Member, ...] = ()

    def __post_init__(self) -> None:
        names = [member.name for member in (*self.voters, *self.learners)]
        if len(set(names)) != len(names) or len(names) > MEMBERS_MAX:
            raise ValueError(f"members repeat, or are more than {MEMBERS_MAX}: {names}")

    @property
    def voter_names(self) -> tuple[str, ...]:
        return tuple(member.name for member in self.voters)

    @property
    def learner_names(self) -> tuple[str, ...]:
        return tuple(member.name for member in self.learners)


def of(voters: Iterable[str], learners: Iterable[str] = ()) -> Configuration:
    """A configuration of bare names."""
    return Configuration(tuple(map(Member, voters)), tuple(map(Member, learners)))


def encode(configuration: Configuration) -> bytes:
    """The log entry, its type byte included."""
    parts = [CONFIGURATION, _COUNTS.pack(len(configuration.voters), len(configuration.learners))]
    for member in (*configuration.voters, *configuration.learners):
        texts = (member.name.encode(), member.address.encode(), member.client_address.encode())
        parts += (_LENGTHS.pack(*map(len, texts)), *texts)
    return b"".join(parts)


def decode(data: bytes) -> Configuration:
    """Raises BadFrame for bytes that `encode` does not write."""
    try:
        if data[:1] != CONFIGURATION:
            raise ValueError("it has another type")
        voters, learners = _COUNTS.unpack_from(data, 1)
        at = 1 + _COUNTS.size
        members = []
        for _ in range(voters + learners):
            lengths = _LENGTHS.unpack_from(data, at)
            at += _LENGTHS.size
            texts = []
            for length in lengths:
                texts.append(data[at : at + length].decode())
                at += length
            members.append(Member(*texts))
        if at != len(data):
            raise ValueError("it has another length")
        return Configuration(tuple(members[:voters]), tuple(members[voters:]))
    except (struct.error, ValueError) as error:
        raise BadFrame(problem=f"a configuration cannot be read: {error}") from None


class Configurations:
    """The configurations of one log that may still rule, oldest first, each with its index."""

    def __init__(self, index: int, configuration: Configuration) -> None:
        """Start from the one that the applied state has."""
        self._known = [(index, configuration)]

    @property
    def index(self) -> int:
        return self._known[-1][0]

    @property
    def current(self) -> Configuration:
        return self._known[-1][1]

    def at(self, index: int) -> tuple[int, Configuration]:
        """The one in force at `index`, with its own index: what a snapshot there must carry (R23)."""
        return next(known for known in reversed(self._known) if known[0] <= index)

    def appended(self, index: int, configuration: Configuration) -> None:
        self._known.append((index, configuration))

    def truncated(self, first: int) -> bool:
        """Forget those from `first` on; whether another one rules now."""
        kept = [known for known in self._known if known[0] < first]
        changed = len(kept) < len(self._known)
        self._known = kept
        return changed

    def applied(self, index: int) -> None:
        """Committed and applied up to `index`: nothing can return to what was before the newest there."""
        while len(self._known) > 1 and self._known[1][0] <= index:
            del self._known[0]

    def installed(self, snapshot_index: int, index: int, configuration: Configuration, keep_suffix: bool) -> None:
        """A snapshot replaces everything up to its index, and the rest too where the log behind it was dropped."""
        # The configuration of a dropped suffix would rule for ever: no truncation will ever name it again (R23).
        suffix = [known for known in self._known if known[0] > snapshot_index and keep_suffix]
        self._known = [(index, configuration), *suffix]


def check_change(old: Configuration, new: Configuration, me: str, ready: Iterable[str]) -> None:
    """Raises ConfigurationRefused unless `new` may follow `old` at once; `ready` are the learners that caught up.

    Two configurations that differ in one voter share a majority, two that differ in more need not (R21).
    """
    before, after = set(old.voter_names), set(new.voter_names)
    if len(before ^ after) > 1:
        raise ConfigurationRefused("more than one voter differs")
    if me not in after:
        raise ConfigurationRefused("the leader itself goes: transfer first")
    for name in after - before:
        if name not in old.learner_names:
            raise ConfigurationRefused(f"{name} must be a learner first")
        if name not in set(ready):
            raise ConfigurationRefused(f"{name} has not caught up yet")
