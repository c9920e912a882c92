"""What a node sent and synced, in that order, for whoever checks that nothing was said before it was on disk.

One JSON object a line: `at_s` by the node's monotonic clock, `kind`, and the facts. Written without a buffer, so that a
node that is killed has left everything that it did. It holds no payloads: of an entry its index and term are told.
"""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from holdfast.client.protocol.errors import BadValue
from holdfast.cluster.journal import Flush
from holdfast.cluster.journal_frames import records_in, stamped
from holdfast.cluster.messages import AppendEntries, Message


class Trace:
    """An open trace. Every call is one write."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        """Goes on at the end of the file. Raises BadValue where it cannot be written."""
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise BadValue(field="trace", problem=f"{path} cannot be written: {error.strerror}") from None
        self._clock = clock

    def close(self) -> None:
        os.close(self._file)

    def started(self, *, node: str, incarnation: int, term: int, vote: str | None, durable: int) -> None:
        """A life of the node begins, with what its disk says."""
        self._write([{"kind": "started", "node": node, "incarnation": incarnation, "term": term, "vote": vote,
                      "durable": durable}])  # fmt: skip

    def sent(self, messages: Iterable[tuple[str, Message]]) -> None:
        """These were handed to the links, in this order."""
        self._write([{"kind": "sent", "to": peer, **told(message)} for peer, message in messages])

    def synced(self, flush: Flush) -> None:
        """A sync has returned. What is on disk is what the flush says, not what was added to the journal since."""
        *_, (_, last, _, standing) = records_in(flush.records)
        term, vote, _ = stamped(standing)
        self._write([{"kind": "synced", "term": term, "vote": vote, "durable": last}])

    def answered(self, count: int, applied: int) -> None:
        """So many requests were answered, by the state at this index."""
        self._write([{"kind": "answered", "count": count, "applied": applied}])

    def _write(self, lines: list[dict[str, Any]]) -> None:
        if lines:
            at_s = round(self._clock(), 6)
            os.write(self._file, b"".join(json.dumps({"at_s": at_s, **line}).encode() + b"\n" for line in lines))


def told(message: Message) -> dict[str, Any]:
    """A message by its name and its numbers; of entries the places, of bytes the number."""
    found: dict[str, Any] = {"message": type(message).__name__}
    for field in fields(message):
        value = getattr(message, field.name)
        if isinstance(message, AppendEntries) and field.name == "entries":
            found["entries"] = [[index, term] for _, index, term in message.entries]
        elif isinstance(value, bytes):
            found[f"{field.name}_bytes"] = len(value)
        elif isinstance(value, int | str | None):
            found[field.name] = value
    return found
