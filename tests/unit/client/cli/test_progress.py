"""What shows that long work goes on: on standard error, where a person looks, and nowhere else."""

import io
import sys

import pytest

from holdfast.client.cli.bench import _watched
from holdfast.client.cli.output import progress


class Watched(io.StringIO):
    """Standard error as a terminal."""

    def isatty(self) -> bool:
        return True


def watch(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """In the test itself, not as a fixture: pytest puts its own stream there between the two."""
    stream = Watched()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm-256color")
    return stream


def test_figures_come_as_they_were_while_a_bar_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watched = watch(monkeypatch)
    for figures in _watched(iter([{"a": 1}, {"b": 2}]), "bench it"):
        print(figures)
    assert capsys.readouterr().out == "{'a': 1}\n{'b': 2}\n"
    assert "bench it" in watched.getvalue()


def test_a_bar_shows_how_much_is_done_and_goes_when_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch(monkeypatch)
    with progress("redrive [bold]q", lambda: 10) as update:
        update(7)
    assert "redrive [bold]q" in watched.getvalue()
    assert "7/10" in watched.getvalue()
    assert watched.getvalue().endswith("\x1b[2K")  # the line is empty again


def test_nobody_who_does_not_look_pays_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    def total() -> int:
        raise AssertionError("nobody looks, so nobody has to count")

    with progress("redrive q", total) as update:
        update(1)
    assert capsys.readouterr().err == ""
