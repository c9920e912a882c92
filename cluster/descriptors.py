"""How many files and sockets this process may have open, and how they are shared between clients and all else.

Without a bound below the system's own, a few idle connections would take the descriptors that the next segment of the
journal needs, and a journal that cannot be written ends the node (R26).
"""

import errno
import resource
from dataclasses import dataclass

from holdfast.client.protocol.errors import Misuse

RESERVE = 256  # journal, state, snapshots, peers and those who are not proven yet, pages, and what Python wants
STRANGERS_MAX = 512  # connections that have not said hello
CONNECTIONS_MIN, STRANGERS_MIN = 48, 16
FILES_MIN = RESERVE + CONNECTIONS_MIN + STRANGERS_MIN

_SHORT = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}


class TooFewFiles(Misuse):
    """The system does not let this process open as many files as a node needs."""


@dataclass(frozen=True, slots=True)
class Share:
    """What clients may have."""

    connections: int  # that have said hello
    strangers: int  # that have not


def share(files: int, wanted: int) -> Share:
    """Of so many files, with so many connections wanted. Raises TooFewFiles."""
    if files < FILES_MIN:
        raise TooFewFiles(
            f"a node needs at least {FILES_MIN} open files, and the system allows {files}: raise the hard limit "
            "(ulimit -Hn, LimitNOFILE= of systemd, nofile of a container)"
        )
    rest = files - RESERVE
    strangers = min(STRANGERS_MAX, rest // 4)
    return Share(min(wanted, rest - strangers), strangers)


def allow_files(connections: int) -> int:
    """Raise this process's own limit as far as so many connections need it and the system allows; gives what it is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = RESERVE + STRANGERS_MAX + connections
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        return wanted if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


def is_shortage(error: OSError) -> bool:
    """Whether the system had nothing to give at that moment: it may have later, and nothing is broken."""
    return error.errno in _SHORT
