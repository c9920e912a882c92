"""A command in a real pseudo-terminal, as a person has it: what it draws, keys, Ctrl-C, and how it ends."""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from typing import Self

WAIT_S = 60.0
LINES, COLUMNS = 40, 120

# The terminal has to be the process' own for Ctrl-C to be a signal; a shell would do this.
_BEGIN = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from holdfast.client.cli.main import main
sys.exit(main())
"""
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|[()][A-Z0-9]|[=>78])")


class TerminalCommand:
    """`holdfast …` in a terminal of its own. Context manager; what is still running is killed."""

    def __init__(self, *arguments: str, connect: str, environment: Mapping[str, str] | None = None) -> None:
        self.raw = ""
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
        chosen = {"TERM": "xterm-256color", "HOLDFAST_CONNECT": connect, **(environment or {})}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BEGIN, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**inherited, **chosen},
            start_new_session=True,
        )
        self._settings = termios.tcgetattr(slave)
        self._slave = slave  # kept open, so that what was written last can still be read

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._slave)
        os.close(self._master)

    @property
    def text(self) -> str:
        """All that was drawn, without what moves and colours it."""
        return _ESCAPES.sub("", self.raw).replace("\r", "")

    def until(self, wanted: str) -> str:
        """Read until this was drawn, as a pattern over the text without escapes; gives what matched."""
        end_s = time.monotonic() + WAIT_S
        while (found := re.search(wanted, self.text)) is None:
            ended = self._process.poll() is not None
            if not self._read(0.1) and ended:
                found = re.search(wanted, self.text)
                assert found is not None, f"ended with {self._process.returncode} without {wanted!r}:\n{self.text}"
                break
            assert time.monotonic() < end_s, f"no {wanted!r} within {WAIT_S} s:\n{self.text}"
        return found[0]

    def forget(self) -> None:
        """What was drawn so far does not count any more."""
        self.raw = ""

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.type("\x03")

    def end(self) -> int:
        """Its exit code; a signal's number below 0."""
        end_s = time.monotonic() + WAIT_S
        while self._process.poll() is None:
            self._read(0.05)
            assert time.monotonic() < end_s, f"has not ended within {WAIT_S} s:\n{self.text}"
        while self._read(0.0):
            pass
        return self._process.returncode

    def leaves_the_terminal_as_it_was(self) -> bool:
        return termios.tcgetattr(self._slave) == self._settings

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def _read(self, wait_s: float) -> bool:
        if not select.select([self._master], [], [], wait_s)[0]:
            return False
        with contextlib.suppress(OSError):
            self.raw += os.read(self._master, 65_536).decode(errors="replace")
        return True
