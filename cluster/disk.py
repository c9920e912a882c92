"""The part of a file system that a journal needs, as protocols, and the operating system's as one of them.

Everything the journal does to a disk goes through here, so that a test can cut the power between any two steps. Nothing
here knows what is written.
"""

import errno
import fcntl
import os
from threading import Lock
from typing import Final, Protocol


class File(Protocol):
    """One open file. Whatever fails raises `OSError`, and so does any use after `close`."""

    def pread(self, size: int, offset: int) -> bytes:
        """Up to `size` bytes; fewer only at the end of the file."""
        ...

    def pwrite(self, data: bytes, offset: int) -> None:
        """All of `data`, or an error."""
        ...

    def sync(self) -> None:
        """Everything written to this file, and its size, is durable afterwards (fdatasync)."""
        ...

    def size(self) -> int: ...

    def close(self) -> None:
        """By any thread: what is in progress ends first. A second time it does nothing."""
        ...


class Held(Protocol):
    """A lock that is held until it is closed, or until its process ends."""

    def close(self) -> None: ...


class Disk(Protocol):
    """The part of a file system that a journal needs; names are durable after `sync_directory` only."""

    def make_directory(self, path: str) -> None:
        """Make it, durably, unless it is there."""
        ...

    def names(self, directory: str) -> list[str]: ...

    def create(self, path: str) -> File:
        """An empty file under this name, whatever it was before."""
        ...

    def open(self, path: str) -> File: ...

    def rename(self, path: str, new_path: str) -> None: ...

    def unlink(self, path: str) -> None: ...

    def sync_directory(self, directory: str) -> None: ...

    def lock(self, path: str) -> Held:
        """The exclusive lock with the name of this file, whose content means nothing; `BlockingIOError` if it is held.

        It is advice among those who ask for it, and there between two openers of one process as well.
        """
        ...


class RealFile:
    """`File` on a descriptor. One use at a time, so that the number is never closed, and given away, under another."""

    def __init__(self, descriptor: int) -> None:
        self._number = descriptor
        self._lock = Lock()

    def pread(self, size: int, offset: int) -> bytes:
        with self._lock:
            descriptor = self._open()
            data = os.pread(descriptor, size, offset)
            while len(data) < size and (more := os.pread(descriptor, size - len(data), offset + len(data))):
                data += more
            return data

    def pwrite(self, data: bytes, offset: int) -> None:
        with self._lock:
            descriptor = self._open()
            written = os.pwrite(descriptor, data, offset)
            while written < len(data):  # a short write tells no reason; the next one does
                written += os.pwrite(descriptor, memoryview(data)[written:], offset + written)

    def sync(self) -> None:
        with self._lock:
            os.fdatasync(self._open())

    def size(self) -> int:
        with self._lock:
            return os.fstat(self._open()).st_size

    def close(self) -> None:
        with self._lock:
            descriptor, self._number = self._number, -1
            if descriptor >= 0:
                os.close(descriptor)

    def _open(self) -> int:
        if self._number < 0:
            raise OSError(errno.EBADF, "the file is closed")
        return self._number


class RealDisk:
    """`Disk` on the operating system."""

    def make_directory(self, path: str) -> None:
        parent = os.path.dirname(os.path.abspath(path))
        if not os.path.isdir(path):
            if not os.path.isdir(parent):
                self.make_directory(parent)
            os.mkdir(path, mode=0o700)
        self.sync_directory(parent)

    def names(self, directory: str) -> list[str]:
        return os.listdir(directory) if os.path.isdir(directory) else []

    def create(self, path: str) -> RealFile:
        return RealFile(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))

    def open(self, path: str) -> RealFile:
        return RealFile(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def rename(self, path: str, new_path: str) -> None:
        os.rename(path, new_path)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def sync_directory(self, directory: str) -> None:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def lock(self, path: str) -> RealFile:
        file = RealFile(descriptor := os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            file.close()
            raise
        return file


class UnsyncedFile(RealFile):
    """Leaves it to the operating system when its bytes reach the disk."""

    def sync(self) -> None:
        pass


class UnsyncedDisk(RealDisk):
    """For `fsync = "os"`: what was acknowledged survives a kill of the process, not a crash of the machine."""

    def create(self, path: str) -> RealFile:
        return UnsyncedFile(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))

    def open(self, path: str) -> RealFile:
        return UnsyncedFile(os.open(path, os.O_RDWR | os.O_CLOEXEC))


REAL_DISK: Final = RealDisk()
UNSYNCED_DISK: Final = UnsyncedDisk()
