"""A worker process with the handler of docs/workers.md, which kills itself at a chosen step.

`pay_worker.py ADDRESS DATABASE STEP`

STEP is the number of a line event in the handler, counted as they are run, `ack` (before the ack is sent), `acked`
(when it is answered) or `never`. It ends by SIGTERM, as a service does.
"""

import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from holdfast.client.blocking import Client
from holdfast.client.protocol.commands import AckBatch
from holdfast.client.sockets import Asked, Loop
from holdfast.client.worker import Worker

PAGE = Path(__file__).resolve().parents[2] / "docs" / "workers.md"


def example() -> dict[str, Any]:
    """The block of the page that defines `pay`, as it stands there."""
    (block,) = [text for text in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "def pay(" in text]
    names: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), names)
    return names


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_at_line(number: int, code: object) -> Callable[[FrameType, str, Any], Any]:
    """A trace function that counts the handler's lines as they are run, over all messages."""
    seen = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if frame.f_code is not code:
            return None
        if event in ("line", "return"):
            if seen == number:
                die()
            seen += 1
        return trace

    return trace


def dies_around_ack(step: str) -> None:
    ask = Loop.ask

    def asking(self: Loop, what: Any, deadline_s: float) -> Asked:
        if isinstance(what, AckBatch) and step == "ack":
            die()
        asked = ask(self, what, deadline_s)
        if isinstance(what, AckBatch) and step == "acked":
            asked.add_done_callback(lambda _: die())
        return asked

    Loop.ask = asking  # type: ignore[method-assign]


def main(address: str, database: str, step: str) -> None:
    names = example()
    names["DATABASE"] = database
    if step.isdigit():
        threading.settrace(dies_at_line(int(step), names["pay"].__code__))
    elif step != "never":
        dies_around_ack(step)
    with Client(address, timeout_ms=10_000) as client:
        Worker(client, "orders", names["pay"], concurrency=1, prefetch=0).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
