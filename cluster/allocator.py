"""What the C library does with memory that a node has freed: keeps a bounded part of it for the next message.

By itself glibc maps every larger block anew and gives the top of its heap back at once. A node frees and asks for a
few hundred KiB with each batch: half of what a produce of 256 KiB cost was the kernel handing out zeroed pages.
"""

import ctypes
from collections.abc import Callable

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
KEPT_BYTES = 134_217_728  # of freed memory at the top of the heap; more than that goes back
MAPPED_BYTES = 33_554_432  # blocks from here on are mapped for themselves; glibc allows no more


def keep_freed_memory() -> bool:
    """For a process of our own, once, at its start. False where the C library has no such setting."""
    try:
        mallopt: Callable[[int, int], int] = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, KEPT_BYTES) and mallopt(_MMAP_THRESHOLD, MAPPED_BYTES))
