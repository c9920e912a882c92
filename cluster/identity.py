"""Who a node is, in one small file: its name, its disk's incarnation, and how far the founding of its cluster is.

A node that lost its disk must never come back under its old name: it would vote a second time in a term in which it has
voted (R24). So a disk says whose it is, and a folder of which a part is gone is not used. The file is replaced as a
whole, and durable before anything that depends on it is said to another node. Where a stage leads is `founding.py`.

    file    magic, version, bytes of what follows, CRC32 of all but itself; name, incarnation, stage, cluster id,
            members, and their incarnations, as one msgpack array

The journal is made before `formed` is written, so that a formed node without one is always a node that lost it.
"""

import os
import struct
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Final
from zlib import crc32

from holdfast.client.protocol.codec import pack, unpack_flat
from holdfast.client.protocol.errors import BadFrame, InvariantBroken, Misuse
from holdfast.client.protocol.limits import U63_MAX
from holdfast.cluster import membership
from holdfast.cluster.disk import REAL_DISK, Disk, Held
from holdfast.cluster.journal_errors import failing
from holdfast.cluster.journal_frames import Identity
from holdfast.cluster.journal_recovery import PLAN, segment_numbers
from holdfast.cluster.membership import MEMBERS_MAX, Configuration
from holdfast.cluster.segments import SEGMENT_BYTES, Segments

FILE: Final = "identity"
UNFINISHED: Final = "identity.new"
LOCK: Final = "identity.lock"
FORMAT_VERSION: Final = 1
BODY_BYTES: Final = 1 << 20  # far above any: a rotten length must not make us read a disk

_MAGIC: Final = b"HFIDENT\n"
_HEAD: Final = struct.Struct("<8sHII")  # magic, version, bytes of the body, checksum
_COVERED: Final = struct.Struct("<8sHI")
_NOBODY: Final = Configuration()


def journal_folder(data: Path, log: int = 0) -> Path:
    """Where the journal of a log is, in a node's data folder."""
    return data / f"log-{log}" / "journal"


class Stage(StrEnum):
    NEW = "new"  # belongs to no cluster, and has promised nothing
    DECIDING = "deciding"  # the founder: it has decided which cluster, and not everybody is known to have agreed
    AGREED = "agreed"  # another founding member: it has promised to be part of this cluster, which may not exist yet
    FORMED = "formed"  # the cluster exists


class WrongFolder(Misuse):
    """The data folder is another node's, another program's, or in use."""


class DiskLost(Misuse):
    """A part of what this node has promised to remember is gone, so it may not come back as who it was (R24)."""

    text = (
        "{folder}: {problem}. What this node voted may be forgotten, so it must not come back as {node!r}: bring back "
        "what is missing, or start it with an empty folder under a name that was never used, as a new member"
    )
    fact_names = ("folder", "node", "problem")
    folder: str
    node: str
    problem: str


class IdentityDamaged(InvariantBroken):
    """The file cannot be read as what was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What the file says. From `deciding` or `agreed` on there is a cluster id, with the members that found it."""

    node: str
    incarnation: int
    stage: Stage = Stage.NEW
    cluster_id: str = ""
    members: Configuration = _NOBODY
    incarnations: tuple[int, ...] = ()  # of the voters, in their order

    def __post_init__(self) -> None:
        decided = bool(self.cluster_id), bool(self.members.voters), bool(self.incarnations)
        if set(decided) != {self.stage != Stage.NEW} or len(self.incarnations) != len(self.members.voters):
            raise ValueError(f"a cluster id, members and their incarnations do not go with {self.stage}")
        if not self.node or not 0 <= self.incarnation <= U63_MAX:
            raise ValueError("there is no name, or the incarnation is out of range")

    @property
    def identity(self) -> Identity:
        """As the journal and the handshake take it; without a cluster until there is one."""
        cluster_id = self.cluster_id if self.stage == Stage.FORMED else ""
        return Identity(cluster_id=cluster_id, node=self.node, incarnation=self.incarnation)

    def at(self, stage: Stage) -> "Record":
        return replace(self, stage=stage)


class IdentityFile:
    """The file of one node, held by one process from `open` to `close`."""

    def __init__(
        self, folder: str, journal: str, *, disk: Disk = REAL_DISK, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        """`folder` is the node's, `journal` that of its journal: the same, one in it, or one in its log's folder."""
        self._folder, self._journal = folder, journal
        self._disk, self._segment_bytes = disk, segment_bytes
        self._held: Held | None = None

    def open(self, node: str, draw: Callable[[], int]) -> Record:
        """What the disk says of `node`; for an empty folder, durably, a new incarnation, which `draw` gives.

        Raises WrongFolder, DiskLost, IdentityDamaged, or JournalFailed if the disk does.
        """
        with failing(f"reading the identity in {self._folder}"):
            self._disk.make_directory(self._folder)
            self._hold()
            try:
                return self._open(node, draw)
            except BaseException:
                self.close()
                raise

    def save(self, record: Record) -> None:
        """Replace the file; durable on return. Before `formed` becomes so, the journal is made if there is none."""
        with failing(f"writing the identity in {self._folder}"):
            if record.stage == Stage.FORMED:
                self._make_journal(record.identity)
            path = os.path.join(self._folder, UNFINISHED)
            with closing(self._disk.create(path)) as file:
                file.pwrite(_encode(record), 0)
                file.sync()
            self._disk.rename(path, os.path.join(self._folder, FILE))
            self._disk.sync_directory(self._folder)

    def close(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None

    def __enter__(self) -> "IdentityFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _hold(self) -> None:
        try:
            self._held = self._disk.lock(os.path.join(self._folder, LOCK))
        except BlockingIOError:
            raise WrongFolder(f"{self._folder} is in use by another process; a folder is one node's") from None

    def _open(self, node: str, draw: Callable[[], int]) -> Record:
        if FILE not in self._disk.names(self._folder):
            if self._was_used():
                problem = f"there are remains of {self._journal}, and no file {FILE!r} says whose"
                raise DiskLost(folder=self._folder, node=node, problem=problem)
            record = Record(node=node, incarnation=draw())
            self.save(record)
            return record
        record = self._read()
        if record.node != node:
            raise WrongFolder(
                f"{self._folder} belongs to node {record.node!r}, and this is {node!r}; give each node its own folder"
            )
        if record.stage == Stage.FORMED and not self._has_journal():
            problem = f"the node belongs to cluster {record.cluster_id!r}, and its journal {self._journal} is gone"
            raise DiskLost(folder=self._folder, node=node, problem=problem)
        if record.stage == Stage.NEW and self._was_used():
            problem = f"there are remains of {self._journal}, and by its file {FILE!r} the node was never in a cluster"
            raise DiskLost(folder=self._folder, node=node, problem=problem)
        # Once more, for it may be in the page cache only:
        #   1. The process that renamed it was killed before the folder was synced.
        #   2. We read it, and say to others what it says.
        #   3. The power goes, and the file before it is back, which knows nothing of that.
        self.save(record)
        return record

    def _read(self) -> Record:
        path = os.path.join(self._folder, FILE)
        with closing(self._disk.open(path)) as file:
            head = file.pread(_HEAD.size, 0)
            if len(head) < _HEAD.size or head[: len(_MAGIC)] != _MAGIC:
                raise IdentityDamaged(f"{path} does not begin as an identity does; bring it back from a copy")
            magic, version, size, checksum = _HEAD.unpack(head)
            if version != FORMAT_VERSION:
                problem = f"{path} has format {version}; this program reads {FORMAT_VERSION}: use the one that wrote it"
                raise WrongFolder(problem)
            body = file.pread(min(size, BODY_BYTES) + 1, _HEAD.size)
        if len(body) != size or crc32(body, crc32(_COVERED.pack(magic, version, size))) != checksum:
            raise IdentityDamaged(f"{path} fails its checksum; bring it back from a copy")
        try:
            return _decode(body)
        except (ValueError, BadFrame) as error:
            raise IdentityDamaged(f"{path} contradicts itself: {error}") from None

    def _make_journal(self, identity: Identity) -> None:
        self._disk.make_directory(os.path.dirname(self._journal))
        if self._has_journal():
            self._disk.sync_directory(self._journal)  # its name too may be in the page cache only
        else:
            Segments.create(self._journal, identity, disk=self._disk, segment_bytes=self._segment_bytes).close()

    def _has_journal(self) -> bool:
        # One that is being repaired is there too.
        return bool(segment_numbers(self._journal, self._disk)) or PLAN in self._disk.names(self._journal)

    def _was_used(self) -> bool:
        """Whether anything of a log is left: a state without its journal is as bad as none."""
        log_folder = os.path.dirname(self._journal)
        inside = self._folder not in (self._journal, log_folder)
        return self._has_journal() or (inside and bool(self._disk.names(log_folder)))


def _encode(record: Record) -> bytes:
    body = pack(
        (
            record.node,
            record.incarnation,
            record.stage.value,
            record.cluster_id,
            membership.encode(record.members),
            *record.incarnations,
        )
    )
    covered = _COVERED.pack(_MAGIC, FORMAT_VERSION, len(body))
    return _HEAD.pack(_MAGIC, FORMAT_VERSION, len(body), crc32(body, crc32(covered))) + body


def _decode(body: bytes) -> Record:
    found: tuple[Any, ...] = unpack_flat(body, 5 + MEMBERS_MAX)
    head, incarnations = found[:5], found[5:]
    if tuple(map(type, head)) != (str, int, str, str, bytes) or any(type(each) is not int for each in incarnations):
        raise ValueError("a field is missing or of another type")
    node, incarnation, stage, cluster_id, members = head
    return Record(
        node=node,
        incarnation=incarnation,
        stage=Stage(stage),
        cluster_id=cluster_id,
        members=membership.decode(members),
        incarnations=incarnations,
    )
