"""A node's disk in memory: what was written stays, and a power cut may tear the write that it meets."""

from dataclasses import dataclass, field


@dataclass
class MemoryFile:
    disk: "MemoryDisk"
    data: bytearray = field(default_factory=bytearray)

    def pread(self, size: int, offset: int) -> bytes:
        return bytes(self.data[offset : offset + size])

    def pwrite(self, data: bytes, offset: int) -> None:
        kept = self.disk.allow(len(data))
        if offset > len(self.data):
            self.data.extend(bytes(offset - len(self.data)))
        self.data[offset : offset + kept] = data[:kept]
        if kept < len(data):
            raise OSError("the power went")

    def sync(self) -> None:
        self.disk.allow(0)

    def size(self) -> int:
        return len(self.data)

    def close(self) -> None:
        pass


@dataclass
class MemoryLock:
    disk: "MemoryDisk"
    path: str

    def close(self) -> None:
        self.disk.locked.discard(self.path)


class MemoryDisk:
    """The journal's `Disk`. After `cut_after(n)` only n more bytes reach it; everything then fails until `restore`."""

    def __init__(self) -> None:
        self.files: dict[str, MemoryFile] = {}
        self.locked: set[str] = set()
        self._left: int | None = None

    def cut_after(self, size_bytes: int) -> None:
        self._left = size_bytes

    def restore(self) -> None:
        self._left = None

    def allow(self, size_bytes: int) -> int:
        """How much of a write comes through."""
        if self._left is None:
            return size_bytes
        if self._left < 0:
            raise OSError("the power is off")
        kept = min(size_bytes, self._left)
        self._left = -1 if size_bytes > self._left else self._left - size_bytes
        return kept

    def make_directory(self, path: str) -> None:
        pass

    def names(self, directory: str) -> list[str]:
        return sorted(path.rsplit("/", 1)[1] for path in self.files if path.rsplit("/", 1)[0] == directory)

    def create(self, path: str) -> MemoryFile:
        self.allow(0)
        file = self.files[path] = MemoryFile(self)
        return file

    def open(self, path: str) -> MemoryFile:
        return self.files[path]

    def rename(self, path: str, new_path: str) -> None:
        self.allow(0)
        self.files[new_path] = self.files.pop(path)

    def unlink(self, path: str) -> None:
        self.allow(0)
        del self.files[path]

    def sync_directory(self, directory: str) -> None:
        self.allow(0)

    def lock(self, path: str) -> MemoryLock:
        if path in self.locked:
            raise BlockingIOError(f"{path} is locked")
        self.locked.add(path)
        return MemoryLock(self, path)
