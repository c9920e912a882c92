"""The page of guarantees: every rule in its order, each with tests that exist and name it."""

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guarantees.md").read_text()
RULES = [
    "T1", "T2", "T3", "T4",
    "A1", "A2",
    "P1", "P2", "P3", "P4", "P5", "P6", "P7", "P8",
    "L1", "L2", "L3", "L4", "L5", "L6", "L7",
    "S1", "S2", "S3", "S4", "S5",
    "D1", "D2", "D3", "D4", "D5", "D6",
    "G1", "G2", "G3", "G4", "G5",
    "X1", "X2",
    "Q1", "Q2", "E1",
]  # fmt: skip
HEADER = ["rule", "what is promised", "tests that try to break it"]


@dataclass(frozen=True)
class Row:
    line: int
    cells: tuple[str, ...]

    @property
    def rule(self) -> str:
        return self.cells[0]

    @property
    def tests(self) -> list[str]:
        return re.findall(r"`([^`]*)`", self.cells[-1])


@dataclass(frozen=True)
class Found:
    says: str  # its name and its docstring
    runs: bool


def rows(page: str) -> list[Row]:
    """Every line of every table but its head, whatever stands in it."""
    found = []
    for line, text in enumerate(page.splitlines(), start=1):
        cells = [cell.strip() for cell in text.strip().strip("|").split("|")]
        if text.lstrip().startswith("|") and cells != HEADER and set("".join(cells)) != {"-"}:
            found.append(Row(line, tuple(cells)))
    return found


def find(source: str) -> dict[str, Found]:
    """The tests of a source by name, read and not run; one that is parametrised has its plain name."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            marks = " ".join(ast.unparse(mark) for mark in node.decorator_list)
            says = f"{node.name.replace('_', ' ')} {ast.get_docstring(node) or ''}"
            found[node.name] = Found(says, runs=re.search(r"\b(skip|skipif|xfail)\b", marks) is None)
    return found


@cache
def find_in(path: str) -> dict[str, Found]:
    """The tests of a file, by its path from the root; none if pytest would not find it there."""
    file = ROOT / path
    return find(file.read_text()) if re.fullmatch(r"tests/[\w/]*/test_\w+\.py", path) and file.is_file() else {}


def complaints(page: str) -> list[str]:
    """All that is wrong with a page of guarantees."""
    listed = [row.rule for row in rows(page)]
    if listed != RULES:
        return [f"the rules are {' '.join(listed)}"]
    return [f"line {row.line}, {row.rule}: {problem}" for row in rows(page) for problem in problems(row)]


def problems(row: Row) -> list[str]:
    if len(row.cells) != len(HEADER) or not all(row.cells):
        return ["needs a rule, a promise and tests, and nothing else"]
    found = []
    if not row.tests:
        found.append("names no test")
    if len(set(row.tests)) != len(row.tests):
        found.append("names a test twice")
    return found + [f"{name} {problem}" for name in row.tests if (problem := doubt(row.rule, name))]


def doubt(rule: str, name: str) -> str | None:
    """What is wrong with a test that is named for a rule."""
    path, _, function = name.partition("::")
    test = find_in(path).get(function)
    if test is None:
        return "does not exist"
    if not test.runs:
        return "does not run"
    return None if re.search(rf"\b{rule}\b", test.says, re.IGNORECASE) else "does not name the rule"


def test_every_rule_has_its_row_and_every_row_its_tests() -> None:
    assert complaints(PAGE) == []


def changed(rule: str, change: Callable[[str], str]) -> str:
    """The page with one row changed."""
    [row] = re.findall(rf"^\| {rule} \|.*\n", PAGE, flags=re.MULTILINE)
    return PAGE.replace(row, change(row))


def without_tests(row: str) -> str:
    return re.sub(r"`[^`]*`(<br>)?", "", row)


@pytest.mark.parametrize(
    ("rule", "change", "complaint"),
    [
        ("L3", lambda row: "", "the rules are"),
        ("L3", lambda row: row + row, "the rules are"),
        ("L3", lambda row: row.replace("L3", "L9", 1), "the rules are"),
        ("E1", lambda row: row + row.replace("E1", "E2", 1), "the rules are"),
        ("L3", without_tests, "needs a rule, a promise and tests"),
        ("L3", lambda row: re.sub(r"^(\| L3 \|)[^|]*", r"\1 ", row), "needs a rule, a promise and tests"),
        ("L3", lambda row: row.replace(" |\n", " | more |\n"), "needs a rule, a promise and tests"),
        ("L3", lambda row: without_tests(row).replace(" |\n", " soon |\n"), "names no test"),
        ("L3", lambda row: row.replace("::test_five", "::test_six"), "does not exist"),
        ("L3", lambda row: row.replace("test_rules_lease", "test_rules_released"), "does not exist"),
        ("L3", lambda row: row.replace("::", " ", 1), "does not exist"),
        ("L3", lambda row: row.replace("five_failures_are_five_attempts", "only_a_fresh_lease_counts"), "not name"),
        ("L3", lambda row: row.replace(" |\n", "<br>" + row.split("|")[3].strip() + " |\n"), "names a test twice"),
    ],
)  # fmt: skip
def test_a_broken_row_is_noticed(rule: str, change: Callable[[str], str], complaint: str) -> None:
    broken = changed(rule, change)
    assert broken != PAGE
    assert complaint in complaints(broken)[0]


def test_two_rows_in_the_wrong_order_are_noticed() -> None:
    [first, second] = re.findall(r"^\| (?:Q2|E1) \|.*\n", PAGE, flags=re.MULTILINE)
    assert "the rules are" in complaints(PAGE.replace(first + second, second + first))[0]


def test_tests_are_found_with_what_they_say_and_whether_they_run() -> None:
    source = """
@pytest.mark.parametrize("number", [1, 2])
def test_one_rule(number):
    "L1: told in the docstring."

def test_l2_of_another(): ...

@pytest.mark.skip
def test_nothing():
    "L3: some day."

def helper():
    "L4: no test."
"""
    assert find(source) == {
        "test_one_rule": Found("test one rule L1: told in the docstring.", runs=True),
        "test_l2_of_another": Found("test l2 of another ", runs=True),
        "test_nothing": Found("test nothing L3: some day.", runs=False),
    }
