"""Ctrl-C in the middle of work that is done in steps: it ends between two of them, so that what was done is known."""

import os
import signal
import time
from threading import current_thread, main_thread
from types import FrameType
from typing import Self

_STANDARD_ERROR = 2
_ENDING = b"\nholdfast: ending when the step under way is done; Ctrl-C again ends at once\n"


class Stopping:
    """Context manager for the main thread; elsewhere, where signals are not ours, it only pauses.

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
