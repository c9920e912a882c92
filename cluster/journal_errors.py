"""Why a journal's files cannot be used: the ways in which the node stops rather than go on."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.client.protocol.errors import InvariantBroken


class JournalDamaged(InvariantBroken):
    """What was acknowledged cannot be read; `path` and `offset` are where."""

    text = (
        "{path} at byte {offset}: {problem}. What this node has acknowledged is damaged, so it does not start. Copy "
        "the folder, then run `holdfast node repair`, or bring the node back under a new name with an empty folder"
    )
    fact_names = ("path", "offset", "problem")
    path: str
    offset: int
    problem: str


class JournalRefused(InvariantBroken):
    """The folder is not what the call needs: another program's or node's, in use, absent, or there already."""


class JournalFailed(InvariantBroken):
    """The disk failed. A write or sync is never tried again: what the disk then holds is known after a restart only."""


class JournalUnreadable(JournalFailed):
    """The disk gives an error instead of bytes; `path` and `offset` are where the read began. A repair may help."""

    # No word of a copy on another disk: one that ends where reading failed would pass as torn.
    text = (
        "{path} at byte {offset}: {problem}. Check the disk and start the node again. If the place stays unreadable, "
        "run `holdfast node repair` on this disk, or bring the node back under a new name with an empty folder"
    )
    fact_names = ("path", "offset", "problem")
    path: str
    offset: int
    problem: str


def damaged(path: str, offset: int, problem: str) -> JournalDamaged:
    """To be raised; positional, for it is said in many places."""
    return JournalDamaged(path=path, offset=offset, problem=problem)


@contextmanager
def failing(doing: str, then: str = "start the node again") -> Iterator[None]:
    """Whatever the disk refuses inside is a `JournalFailed` that says what was tried, and what helps."""
    try:
        yield
    except OSError as failure:
        remedy = "make room" if failure.errno == errno.ENOSPC else "check the disk"
        raise JournalFailed(f"{doing} failed: {failure}; {remedy}, then {then}") from failure
