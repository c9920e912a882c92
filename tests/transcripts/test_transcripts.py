"""The stories of the rules, each played on both stores: what comes out is what was recorded, byte for byte."""

from pathlib import Path
from typing import get_args

import pytest

from holdfast.client.cli.main import main
from holdfast.client.cli.replica import Kind
from holdfast.client.cli.stories import STORIES
from holdfast.client.cli.transcript import play
from holdfast.client.cli.transcript_lines import TranscriptError

RECORDED = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.txt"))}


def played(text: str, kind: Kind, directory: Path) -> str:
    return "".join(f"{line}\n" for line in play(text, kind, directory / kind))


def on_both_stores(text: str, directory: Path) -> str:
    memory, lmdb = (played(text, kind, directory) for kind in ("memory", "lmdb"))
    assert memory == lmdb
    return lmdb


@pytest.mark.parametrize("name", RECORDED)
def test_a_story_comes_out_as_recorded_on_both_stores(name: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    recorded = RECORDED[name].read_text()
    told = on_both_stores(STORIES.get(name, recorded), tmp_path)
    if pytestconfig.getoption("--record", default=False):
        RECORDED[name].write_text(told)
    else:
        assert told == recorded


def test_every_shipped_story_is_recorded() -> None:
    assert STORIES.keys() <= RECORDED.keys()


@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_changed_answer_is_noticed(kind: Kind, tmp_path: Path) -> None:
    text = "> open admin\n> create orders\n  #2 t+00:00:00 QueueCreated queue_id=7\n"
    assert "QueueCreated queue_id=1" in played(text, kind, tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "> frobnicate orders",
        "> create orders colour=blue",
        "> create orders max_ack_holes",
        '> produce orders "a" sequence=1',
        '> produce orders "a',
        "> +30",
        "> lease orders max=0x10",
        "> ann: again",
        "> publish nightly",
    ],
)
def test_a_line_that_is_not_understood_is_named(line: str, tmp_path: Path) -> None:
    with pytest.raises(TranscriptError, match="line 3: "):
        played(f"> open admin\n> create orders\n{line}\n", "memory", tmp_path)


@pytest.mark.parametrize("name", STORIES)
def test_the_demo_plays_each_shipped_story_and_ends(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--transcript", name]) == 0
    assert capsys.readouterr().out == RECORDED[name].read_text()


def test_the_demo_lists_its_stories(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == list(STORIES)
