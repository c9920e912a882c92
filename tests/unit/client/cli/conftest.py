"""Whole command lines against a node that runs the real state machine."""

import io
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from holdfast.client.cli.main import main
from tests.fakes.scripted_server import ScriptedServer

# For real processes: their output is buffered like that of a user's, whatever this process was told.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]

    @property
    def object(self) -> dict[str, Any]:
        (found,) = self.objects
        return found


class Terminal(io.TextIOWrapper):
    """Standard input as a person's terminal has it."""

    def isatty(self) -> bool:
        return True


class Cli:
    """Runs `holdfast …` in this process; `ok` also says that it must succeed."""

    def __init__(
        self, address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, server: ScriptedServer
    ) -> None:
        self.server = server
        self._address, self._capsys, self._monkeypatch = address, capsys, monkeypatch

    def __call__(self, *arguments: str, stdin: bytes = b"", typed: bytes | None = None) -> Result:
        source = io.TextIOWrapper(io.BytesIO(stdin)) if typed is None else Terminal(io.BytesIO(typed))
        self._monkeypatch.setattr(sys, "stdin", source)
        self._monkeypatch.setenv("HOLDFAST_CONNECT", self._address)
        self._capsys.readouterr()
        code = main(arguments)
        told = self._capsys.readouterr()
        return Result(code, told.out, told.err)

    def ok(self, *arguments: str, stdin: bytes = b"") -> Result:
        result = self(*arguments, stdin=stdin)
        assert (result.code, result.err) == (0, ""), result
        return result


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture
def cli(server: ScriptedServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    return Cli(server.address, capsys, monkeypatch, server)
