"""The examples in the documents run: each page's python blocks in order, in one namespace, against a real node.

`ADDRESSES` is where the node is; the addresses of `holdfast up`, written out, mean the same. Functions named like
tests are called with the broker of the test kit. Pages in CLUSTERS get three processes, and their consoles run in a
shell. Pages are found, not listed: a new one with examples runs without a word here.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.client.cli.arguments import CONNECT
from holdfast.client.testing.broker import Broker
from tests.support.documents import DOCS, ROOT, Block, agree, blocks, commands
from tests.support.processes import Processes, cluster

CLUSTERS = {"docs/quickstart.md"}
LEADER_PID = "LEADER_PID"  # in a console: the number that a reader finds in the table above
WAIT_S = 60


def runnable(path: Path) -> list[Block]:
    wanted = ("python", "console") if name_of(path) in CLUSTERS else ("python",)
    return [block for block in blocks(path.read_text()) if block.language in wanted and block.runs]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


PAGES = [path for path in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))) if runnable(path)]


@pytest.mark.parametrize("path", [path for path in PAGES if name_of(path) not in CLUSTERS], ids=name_of)
def test_the_examples_of_a_page_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Broker() as broker:
        page = Page(path, broker.address)
        for block in runnable(path):
            page.run(block)


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in PAGES if name_of(path) in CLUSTERS], ids=name_of)
def test_the_examples_of_a_page_run_on_a_cluster(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with cluster(tmp_path / "cluster") as processes:
        processes.whole()
        page = Page(path, processes.plan.connect)
        for block in runnable(path):
            if block.language == "python":
                page.run(block)
            else:
                type_in(block, processes)


class Page:
    """One page while its blocks run."""

    def __init__(self, path: Path, addresses: str) -> None:
        self._path, self._addresses = path, addresses
        self._names: dict[str, Any] = {"__name__": "example", "ADDRESSES": addresses}

    def run(self, block: Block) -> None:
        known = set(self._names)
        source = block.text.replace(CONNECT, self._addresses)
        # So many empty lines before it, that a traceback names the lines of the page.
        exec(compile("\n" * (block.line - 1) + source, str(self._path), "exec"), self._names)
        for name in [each for each in self._names if each.startswith("test_") and each not in known]:
            call_with_fixture(self._names[name])


def call_with_fixture(test: Callable[[Broker], None]) -> None:
    with Broker() as broker:
        test(broker)


def type_in(block: Block, processes: Processes) -> None:
    """Each command of a console in a shell, and what it prints beside what the page says that it prints."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HOLDFAST_CONNECT": processes.plan.connect}
    for line, expected in commands(block):
        if LEADER_PID in line:
            line = line.replace(LEADER_PID, str(processes.pid(processes.leader())))
        done = subprocess.run(
            ["bash", "-c", line],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=WAIT_S,
        )
        assert agree(expected, done.stdout), f"line {block.line}: {line}\nprinted\n{done.stdout}\nnot\n{expected}"


# The runner itself -------------------------------------------------------------------------------------


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    yield Page(tmp_path / "page.md", "somewhere:1")


def test_blocks_share_their_names_and_know_where_the_cluster_is(page: Page) -> None:
    text = f"a\n```python\nfound = [ADDRESSES]\n```\nb\n```python\nfound.append('{CONNECT}')\n```\n"
    for block in blocks(text):
        page.run(block)
    assert page._names["found"] == ["somewhere:1", "somewhere:1"]


def test_a_failure_names_the_line_of_the_page(page: Page) -> None:
    [block] = blocks("one\n\n```python\nfine = 1\n1 / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as failed:
        page.run(block)
    assert failed.traceback[-1].lineno == 4  # counted from 0


def test_what_is_not_run_says_so_in_the_page() -> None:
    shown, run = blocks("```python\n# Not run: it takes a day.\nwait()\n```\n```python\nx = 1\n```\n")
    assert (shown.runs, run.runs) == (False, True)


def test_a_block_without_an_end_is_noticed() -> None:
    with pytest.raises(AssertionError, match="line 2"):
        list(blocks("```python\nx = 1\n"))


def test_a_console_is_commands_and_what_they_print() -> None:
    [block] = blocks("```console\n$ one \\\n    more\n1\n2\n$ two\n$ three\n3\n```\n")
    assert list(commands(block)) == [("one more", "1\n2\n"), ("two", ""), ("three", "3\n")]


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("a b\n", "a b\n", True),
        ("a b\n", " a  b \n", True),
        ("a b\n", "ab\n", False),
        ("a … c\n", "a 17 c\n", True),
        ("a … c\n", "a 1\n c\n", False),
        ("a\n…\nz\n", "a\nb\nc\nz\n", True),
        ("a\n…\nz\n", "a\nz\n", True),
        ("a\n", "a\nb\n", False),
        ("", "", True),
        ("(x)\n", "(x)\n", True),
    ],
)
def test_what_differs_from_run_to_run_is_left_open(expected: str, printed: str, same: bool) -> None:
    assert agree(expected, printed) == same
