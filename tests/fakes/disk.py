"""A disk in memory that keeps `holdfast.cluster.disk.Disk`'s contract and no more than that.

What was not synced may be lost, torn or reordered by a power cut; names live and die apart from contents. Every
change is a step, and the power can be cut before any of them. The caller's generator decides what survives.
"""

import errno
import os
from collections.abc import Callable, Collection
from random import Random

SECTOR_BYTES = 64  # far below a real one, so that even small frames are torn


class PowerCut(Exception):
    """The machine is off: no step happens after this one until `crash`."""


class _Inode:
    """Content as processes see it, as it is on the platter, and the writes between the two."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.durable = b""
        self.unsynced: list[tuple[int, bytes]] = []
        self.unreadable: list[tuple[int, int]] = []  # begin and end; a write over all of it gives it a new sector

    def write(self, data: bytes, offset: int) -> None:
        self.unreadable = [(a, b) for a, b in self.unreadable if a < offset or b > offset + len(data)]
        _overwrite(self.content, data, offset)
        self.unsynced.append((offset, data))

    def sync(self) -> None:
        platter = bytearray(self.durable)
        for offset, data in self.unsynced:
            _overwrite(platter, data, offset)
        self.durable = bytes(platter)
        self.unsynced.clear()

    def lose(self, random: Random | None) -> None:
        platter = bytearray(self.durable)
        for offset, data in self.unsynced if random else ():
            whole = random is not None and random.random() < 0.3
            for at in range(0, len(data), SECTOR_BYTES):
                if whole or (random is not None and random.random() < 0.5):
                    _overwrite(platter, data[at : at + SECTOR_BYTES], offset + at)
        self.durable = bytes(platter)
        self.content = platter
        self.unsynced.clear()


def _overwrite(content: bytearray, data: bytes, offset: int) -> None:
    if len(content) < offset + len(data):
        content.extend(bytes(offset + len(data) - len(content)))
    content[offset : offset + len(data)] = data


class MemoryFile:
    """A handle; it dies with the machine."""

    def __init__(self, disk: "MemoryDisk", inode: _Inode) -> None:
        self._disk = disk
        self._inode = inode
        self._boot = disk.boot
        disk.handles.append(self)

    def pread(self, size: int, offset: int) -> bytes:
        self._alive()
        if any(begin < offset + size and offset < end for begin, end in self._inode.unreadable):
            self._disk.failed_reads += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        data = bytes(self._inode.content[offset : offset + size])
        if self._disk.on_read is not None:
            self._disk.on_read(len(data))
        return data

    def pwrite(self, data: bytes, offset: int) -> None:
        self._alive()
        self._disk.step("pwrite")
        room = self._disk.room(len(self._inode.content))
        if room is not None and offset + len(data) > room:
            self._inode.write(data[: max(0, room - offset)], offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._inode.write(data, offset)

    def sync(self) -> None:
        self._alive()
        try:
            self._disk.step("sync")
        except OSError:
            # As Linux does it: the pages count as written from now on, so a second sync succeeds and does nothing.
            self._inode.unsynced.clear()
            raise
        self._inode.sync()

    def size(self) -> int:
        return len(self._inode.content)

    def close(self) -> None:
        if self in self._disk.handles:
            self._disk.handles.remove(self)

    def is_of(self, inodes: Collection[_Inode]) -> bool:
        return self._inode in inodes

    def _alive(self) -> None:
        if self._boot != self._disk.boot:
            raise OSError(errno.EBADF, "a file of before the crash")
        if self not in self._disk.handles:
            raise OSError(errno.EBADF, "the file is closed")


class MemoryLock:
    """A lock that its holder, or the end of its process, lets go."""

    def __init__(self, disk: "MemoryDisk", path: str) -> None:
        self._disk = disk
        self._path = path

    def close(self) -> None:
        if self._disk.locks.get(self._path) is self:
            del self._disk.locks[self._path]


class MemoryDisk:
    """Flat names; a directory is whatever stands before the last slash."""

    def __init__(self) -> None:
        self.steps = 0
        self.cut_at: int | None = None  # the power goes before this step
        self.failures: dict[str, int] = {}  # step -> errno with which it fails, once
        self.capacity_bytes: int | None = None
        self.boot = 0
        self.on_read: Callable[[int], None] | None = None  # told how many bytes each read gave
        self.failed_reads = 0
        self.trace: list[str] = []
        self.handles: list[MemoryFile] = []  # that are open
        self.locks: dict[str, MemoryLock] = {}
        self._names: dict[str, _Inode] = {}
        self._durable_names: dict[str, _Inode] = {}
        self._renamings: list[Callable[[dict[str, _Inode]], None]] = []

    # The contract ----------------------------------------------------------------------------------------

    def make_directory(self, path: str) -> None:
        pass

    def names(self, directory: str) -> list[str]:
        return sorted(os.path.basename(path) for path in self._names if os.path.dirname(path) == directory)

    def create(self, path: str) -> MemoryFile:
        self.step("create")
        inode = _Inode()
        self._rename(lambda names: names.__setitem__(path, inode))
        return MemoryFile(self, inode)

    def open(self, path: str) -> MemoryFile:
        if path not in self._names:
            raise FileNotFoundError(path)
        return MemoryFile(self, self._names[path])

    def rename(self, path: str, new_path: str) -> None:
        self.step("rename")
        inode = self._names[path]

        def move(names: dict[str, _Inode]) -> None:
            names.pop(path, None)
            names[new_path] = inode

        self._rename(move)

    def unlink(self, path: str) -> None:
        self.step("unlink")

        def remove(names: dict[str, _Inode]) -> None:
            names.pop(path, None)

        self._rename(remove)

    def sync_directory(self, directory: str) -> None:
        self.step("sync_directory")
        for renaming in self._renamings:
            renaming(self._durable_names)
        self._renamings.clear()

    def lock(self, path: str) -> MemoryLock:
        if path in self.locks:
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))
        self.locks[path] = held = MemoryLock(self, path)
        return held

    # What a test does to it ------------------------------------------------------------------------------

    def crash(self, random: Random | None = None) -> None:
        """Power comes back: synced is there; of the rest nothing, or what `random` lets through in any order."""
        for renaming in self._renamings if random else ():
            if random is not None and random.random() < 0.5:
                renaming(self._durable_names)
        self._renamings.clear()
        self._names = dict(self._durable_names)
        for inode in self._names.values():
            inode.lose(random)
        self.kill()

    def kill(self) -> None:
        """The process dies and the machine goes on: whatever was written is still seen."""
        self.cut_at = None
        self.next_process()

    def next_process(self) -> None:
        """Whoever had files and locks is no more."""
        self.boot += 1
        self.handles.clear()
        self.locks.clear()

    def peek(self, path: str) -> bytes:
        return bytes(self._names[path].content)

    def poke(self, path: str, content: bytes) -> None:
        """This file is now `content`, durably, whoever wrote it."""
        inode = self._names.setdefault(path, _Inode())
        self._durable_names[path] = inode
        inode.content = bytearray(content)
        inode.durable = bytes(content)
        inode.unsynced.clear()

    def flip(self, path: str, offset: int, mask: int = 1) -> None:
        content = bytearray(self.peek(path))
        content[offset] ^= mask
        self.poke(path, bytes(content))

    def make_unreadable(self, path: str, begin: int, end: int) -> None:
        """Reading any of these bytes gives EIO."""
        self._names[path].unreadable.append((begin, end))

    def handles_without_name(self) -> int:
        """Open files whose name is gone: their room is not free."""
        return sum(not handle.is_of(self._names.values()) for handle in self.handles)

    def remove(self, path: str) -> None:
        """This file was never there."""
        del self._names[path], self._durable_names[path]

    def copy(self) -> "MemoryDisk":
        """The same synced files on another disk."""
        twin = MemoryDisk()
        for path, inode in self._names.items():
            twin.poke(path, bytes(inode.content))
            twin._names[path].unreadable = list(inode.unreadable)
        return twin

    def step(self, name: str) -> None:
        if self.cut_at is not None and self.steps >= self.cut_at:
            raise PowerCut(name)
        self.steps += 1
        self.trace.append(name)
        if name in self.failures:
            number = self.failures.pop(name)
            raise OSError(number, os.strerror(number))

    def room(self, own_bytes: int) -> int | None:
        """How large a file of `own_bytes` may become."""
        if self.capacity_bytes is None:
            return None
        return self.capacity_bytes - sum(len(inode.content) for inode in self._names.values()) + own_bytes

    def _rename(self, renaming: Callable[[dict[str, _Inode]], None]) -> None:
        renaming(self._names)
        self._renamings.append(renaming)
