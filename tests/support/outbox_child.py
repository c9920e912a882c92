"""A process that sends numbered rows through an outbox and kills itself at a given step; for the kill tests.

    python outbox_child.py ADDRESS OUTBOX ROWS STEP OCCURRENCE

Rows go on where the producer's mark is, as an application would go on that numbers its own rows.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import holdfast.client.outbox
from holdfast.client.blocking import Client
from holdfast.client.blocking_producer import Producer
from holdfast.client.core import Core
from holdfast.client.outbox import Outbox
from holdfast.client.protocol.commands import Produce
from holdfast.client.sockets import Loop

STEPS = ("before_save", "after_save", "before_write", "after_write", "before_answer", "after_told", "at_close")
PORTION = 7


def die_at(step: str, occurrence: int) -> Callable[[str], None]:
    left = occurrence

    def passing(here: str) -> None:
        nonlocal left
        if here == step:
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    return passing


def watch(passing: Callable[[str], None]) -> None:
    """Put a mark before and after each step; what the steps do stays as it is."""

    class Watched(Outbox):
        def save(self, erased: Any, stored: Any) -> None:
            passing("before_save")
            super().save(erased, stored)
            passing("after_save")

        def close(self) -> None:
            passing("at_close")
            super().close()

    holdfast.client.outbox.Outbox = Watched  # type: ignore[misc]
    asked: list[bool] = []
    call, flush, answered, tell = Core.call, Loop._flush, Producer._answered, Producer._tell

    def watched_call(self: Core, what: Any, *rest: Any, **named: Any) -> Any:
        asked.extend([True] * isinstance(what, Produce))
        return call(self, what, *rest, **named)

    def watched_flush(self: Loop, connection: Any) -> None:
        if asked:
            passing("before_write")
        flush(self, connection)
        if asked:
            asked.clear()
            passing("after_write")

    def watched_answered(self: Producer, request: Any, asked: Any) -> None:
        passing("before_answer")
        answered(self, request, asked)

    def watched_tell(self: Producer, sending: Any, outcome: Any) -> None:
        tell(self, sending, outcome)
        passing("after_told")

    Core.call = watched_call  # type: ignore[method-assign]
    Loop._flush = watched_flush  # type: ignore[method-assign]
    Producer._answered = watched_answered  # type: ignore[method-assign]
    Producer._tell = watched_tell  # type: ignore[method-assign]


def main(address: str, outbox: str, rows: int, step: str, occurrence: int) -> None:
    watch(die_at(step, occurrence))
    with Client(address) as client, client.producer("q", client_id="rows", window=20, outbox=outbox) as producer:
        for row in range(producer.high_water + 1, rows + 1):
            producer.send_nowait(b"%d" % row, key=str(row))
            if row % PORTION == 0:
                producer.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
