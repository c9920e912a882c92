"""`docs/errors.md` and the code name the same errors, in the same families, with the same facts."""

import re

import pytest

from holdfast.client.cli.arguments import NeedsYes, NotConfirmed, WrongUsage
from holdfast.client.cli.dead import NoDeadLetter
from holdfast.client.cli.framing import BadInput, NotALine
from holdfast.client.cli.main import exit_code
from holdfast.client.leases import PartlyRefused
from holdfast.client.outbox import OutboxFailed, OutboxInUse, OutboxMismatch
from holdfast.client.producing import ProducerForked
from holdfast.client.protocol.errors import (
    BY_CODE,
    HoldfastError,
    Indeterminate,
    InvariantBroken,
    Misuse,
    ProtocolViolated,
    Refused,
    Unavailable,
)
from tests.support.documents import DOCS

PAGE = (DOCS / "errors.md").read_text()
FAMILIES = (Misuse, Refused, Unavailable, Indeterminate, ProtocolViolated, InvariantBroken)
OWN = (
    *(PartlyRefused, WrongUsage, NeedsYes, NotConfirmed, NoDeadLetter, BadInput, NotALine),
    *(ProducerForked, OutboxFailed, OutboxInUse, OutboxMismatch),
)


def rows(heading: str) -> dict[str, list[str]]:
    """The cells behind the first, by the name in the first, of the tables under a heading."""
    part = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in part.splitlines()]
    return {row[0].strip("` "): row[1:] for row in cells if row[0].startswith("`") and len(row) == 3}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_a_family_is_documented_with_all_its_errors(family: type[HoldfastError]) -> None:
    kinds = {kind.__name__: kind for kind in (*BY_CODE.values(), *OWN) if issubclass(kind, family)}
    found = rows(family.__name__)
    assert set(found) == set(kinds)
    for name, (facts, advice) in found.items():
        assert tuple(re.findall(r"`(\w+)`", facts)) == kinds[name].fact_names, name
        assert advice.endswith("."), name


def test_a_familys_exit_code_is_the_one_that_is_told() -> None:
    table = dict(re.findall(r"^\| \[(\w+)\]\(#\w+\) \| .* \| (\d) \|$", PAGE, flags=re.MULTILINE))
    assert set(table) == {family.__name__ for family in FAMILIES}
    assert {name: int(code) for name, code in table.items()} == {
        family.__name__: exit_code(family.__new__(family)) for family in FAMILIES
    }


def test_a_familys_word_on_whether_it_happened_is_the_one_that_is_told() -> None:
    table = dict(re.findall(r"^\| \[(\w+)\]\(#\w+\) \| (no|maybe) \|", PAGE, flags=re.MULTILINE))
    assert table == {family.__name__: family.happened for family in FAMILIES}
