"""How a command ends that is told to: gently, and where its work is done in steps, between two of them."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType
from typing import Self

_STANDARD_ERROR = 2
_ENDING = b"\nholdfast: ending when the step under way is done; Ctrl-C again ends at once\n"


class Stopping:
    """Ctrl-C in the middle of work that is done in steps: what was done until then is known.

    Context manager for the main thread; elsewhere, where signals are not ours, it only pauses.

    The first Ctrl-C or SIGTERM ends the work at the next `pause`, which raises KeyboardInterrupt; a second one at once.
    """

    def __init__(self) -> None:
        self.at_once = False  # a step was left in its middle: what it did is not known
        self._asked = self._pausing = False
        self._former: dict[int, object] = {}

    def __enter__(self) -> Self:
        if current_thread() is main_thread():
            self._former = {each: signal.signal(each, self._ask) for each in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def pause(self, seconds: float) -> None:
        """Between two steps."""
        self._pausing = True
        try:
            if self._asked:
                raise KeyboardInterrupt
            time.sleep(seconds)
        finally:
            self._pausing = False

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._pausing:
            raise KeyboardInterrupt
        if self._asked:
            self.at_once = True
            raise KeyboardInterrupt
        self._asked = True
        os.write(_STANDARD_ERROR, _ENDING)  # not print: this may have come in the middle of one


@contextmanager
def ended_gently() -> Iterator[None]:
    """Let SIGTERM be a Ctrl-C, and Ctrl-C one also for a job in the background, whose shell has it ignored.

    What stops a container or such a job must not cost its messages an attempt either.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if current_thread() is not main_thread():
        yield  # signals are the main thread's: whoever called this from another has them in hand
        return
    former = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
