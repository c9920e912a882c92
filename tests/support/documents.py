"""The documents as tests read them: their blocks of code, in order, and what a console is said to print.

A block that is not to run says so to its reader too: its first line is a comment that begins with `# Not run:`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NOT_RUN = "# Not run:"
ANYTHING = "…"  # in what a console prints: what differs from run to run


@dataclass(frozen=True, slots=True)
class Block:
    language: str
    text: str
    line: int  # of its first line in the page

    @property
    def runs(self) -> bool:
        return not self.text.startswith(NOT_RUN)


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page's text."""
    language, begin, lines = None, 0, list[str]()
    for number, line in enumerate(page.splitlines(), start=1):
        if line.startswith("```"):
            if language is not None:
                yield Block(language, "".join(f"{each}\n" for each in lines), begin)
                language = None
            else:
                language, begin, lines = line.removeprefix("```").strip(), number + 1, []
        elif language is not None:
            lines.append(line)
    assert language is None, f"the block that begins at line {begin} has no end"


def commands(block: Block) -> Iterator[tuple[str, str]]:
    """The command lines of a console block, each with what it prints. One that ends in a backslash goes on below."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        line, _, printed = part.partition("\n")
        while line.endswith("\\"):
            more, _, printed = printed.partition("\n")
            line = line[:-1] + more.strip()
        yield line, printed


def agree(expected: str, printed: str) -> bool:
    """Whether this was printed, however wide the columns are: `…` stands for anything within a line, alone in a line
    for any lines."""
    pattern = "".join(
        r"(?:.*\n)*?" if line == ANYTHING else re.escape(line).replace(ANYTHING, ".*?") + r"\n"
        for line in map(_narrow, expected.splitlines())
    )
    return re.fullmatch(pattern, "".join(f"{_narrow(line)}\n" for line in printed.splitlines())) is not None


def _narrow(line: str) -> str:
    return " ".join(line.split())
