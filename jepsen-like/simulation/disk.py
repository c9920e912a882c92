"""A node's disk in memory: what was synced stays, what was only written may be lost, torn or reordered by a power cut.

A process that is killed loses nothing that it wrote. Names live apart from contents: a new one is durable once its
directory is synced.
"""

from collections.abc import Callable
from random import Random

SECTOR_BYTES = 512

Names = dict[str, "_Content"]


class _Content:
    """What processes see, what is on the platter, and the writes between the two."""

    def __init__(self) -> None:
        self.seen = bytearray()
        self._platter = bytearray()
        self._unsynced: list[tuple[int, bytes]] = []

    def write(self, data: bytes, offset: int) -> None:
        _overwrite(self.seen, data, offset)
        self._unsynced.append((offset, data))

    def sync(self) -> None:
        for offset, data in self._unsynced:
            _overwrite(self._platter, data, offset)
        self._unsynced.clear()

    def lose(self, rng: Random) -> int:
        """The power goes: of every write some sectors came through, or all, or none. How many bytes did not."""
        lost = 0
        for offset, data in self._unsynced:
            chance = rng.choice((0.0, 0.0, 0.5, 1.0))
            for at in range(0, len(data), SECTOR_BYTES):
                sector = data[at : at + SECTOR_BYTES]
                if rng.random() < chance:
                    _overwrite(self._platter, sector, offset + at)
                else:
                    lost += len(sector)
        self._unsynced.clear()
        self.seen = self._platter.copy()
        return lost


def _overwrite(content: bytearray, data: bytes, offset: int) -> None:
    if offset > len(content):
        content.extend(bytes(offset - len(content)))
    content[offset : offset + len(data)] = data


class MemoryFile:
    def __init__(self, disk: "MemoryDisk", content: _Content) -> None:
        self._disk, self._content = disk, content

    def pread(self, size: int, offset: int) -> bytes:
        return bytes(self._content.seen[offset : offset + size])

    def pwrite(self, data: bytes, offset: int) -> None:
        kept = self._disk.allow(len(data))
        self._content.write(data[:kept], offset)
        if kept < len(data):
            raise OSError("the process is gone")

    def sync(self) -> None:
        self._disk.allow(0)
        self._content.sync()

    def size(self) -> int:
        return len(self._content.seen)

    def close(self) -> None:
        pass


class MemoryLock:
    def __init__(self, disk: "MemoryDisk", path: str) -> None:
        self._disk, self._path = disk, path

    def close(self) -> None:
        self._disk.locked.discard(self._path)


class MemoryDisk:
    """The journal's `Disk`. After `cut_after(n)` only n more bytes are written; all then fails until `restore`."""

    def __init__(self) -> None:
        self.locked: set[str] = set()
        self._names: Names = {}
        self._durable_names: Names = {}
        self._renamings: list[Callable[[Names], None]] = []
        self._left: int | None = None

    def cut_after(self, size_bytes: int) -> None:
        self._left = size_bytes

    def restore(self) -> None:
        self._left = None

    def lose_power(self, rng: Random) -> int:
        """What was not synced is gone but for what `rng` lets through; how many bytes are."""
        for renaming in self._renamings:
            if rng.random() < 0.5:
                renaming(self._durable_names)
        self._renamings.clear()
        self._names = dict(self._durable_names)
        return sum(content.lose(rng) for content in self._names.values())

    def allow(self, size_bytes: int) -> int:
        """How much of a write comes through."""
        if self._left is None:
            return size_bytes
        if self._left < 0:
            raise OSError("the process is gone")
        kept = min(size_bytes, self._left)
        self._left = -1 if size_bytes > self._left else self._left - size_bytes
        return kept

    def make_directory(self, path: str) -> None:
        pass

    def names(self, directory: str) -> list[str]:
        return sorted(path.rsplit("/", 1)[1] for path in self._names if path.rsplit("/", 1)[0] == directory)

    def create(self, path: str) -> MemoryFile:
        content = _Content()
        self._rename(lambda names: names.__setitem__(path, content))
        return MemoryFile(self, content)

    def open(self, path: str) -> MemoryFile:
        return MemoryFile(self, self._names[path])

    def rename(self, path: str, new_path: str) -> None:
        content = self._names[path]

        def move(names: Names) -> None:
            names.pop(path, None)
            names[new_path] = content

        self._rename(move)

    def unlink(self, path: str) -> None:
        def remove(names: Names) -> None:
            names.pop(path, None)

        self._rename(remove)

    def sync_directory(self, directory: str) -> None:
        self.allow(0)
        for renaming in self._renamings:
            renaming(self._durable_names)
        self._renamings.clear()

    def lock(self, path: str) -> MemoryLock:
        if path in self.locked:
            raise BlockingIOError(f"{path} is locked")
        self.locked.add(path)
        return MemoryLock(self, path)

    def _rename(self, renaming: Callable[[Names], None]) -> None:
        self.allow(0)
        renaming(self._names)
        self._renamings.append(renaming)
