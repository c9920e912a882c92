"""The catalogue of mutants is sound, and the mechanism says caught, survived or broken where each is true."""

import ast
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.jepsen.mutants import build, run
from holdfast.jepsen.mutants.build import ControlFailed, Verdict
from holdfast.jepsen.mutants.catalogue import MUTANTS
from holdfast.jepsen.mutants.mutant import Mutant

ROOT = Path(__file__).parents[2]
PACKAGE = "holdfast.jepsen.mutants"
RULES = {
    "T1", "T2", "T3", "T4", "A1", "A2",
    "P1", "P2", "P3", "P4", "P5", "P6", "P7", "P8",
    "L1", "L2", "L3", "L4", "L5", "L6",
    "S1", "S2", "S3", "S4", "S5",
    "D1", "D2", "D3", "D4", "D5", "D6",
    "G1", "G2", "G3", "G4", "G5",
    "X1", "X2", "Q1", "Q2", "E1",
    "store", "digest", "snapshot", "decoder", "frames", "serving",
}  # fmt: skip

# One test of the state machine, so that a judgement takes a second.
ONE_TEST = ("tests/unit/storage/test_rules_time.py::test_committed_time_never_goes_back",)
BACKWARDS = replace(next(mutant for mutant in MUTANTS if mutant.rule == "T1"), tests=ONE_TEST)
HARMLESS = Mutant(
    name="harmless",
    rule="T1",
    file="storage/clock.py",
    old="far more steps than",
    new="many more steps than",
    tests=ONE_TEST,
)
UNIMPORTABLE = Mutant(
    name="unimportable",
    rule="T1",
    file="storage/clock.py",
    old="from holdfast.storage.rows import Meta",
    new="from holdfast.storage.rows import Nothing",
    tests=ONE_TEST,
)


# The catalogue -----------------------------------------------------------------------------------------


def test_every_mutant_has_a_name_of_its_own() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 50
    assert all(re.fullmatch(r"[a-z][a-z0-9-]*", name) for name in names)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_replaces_a_text_that_is_there_exactly_once(mutant: Mutant) -> None:
    assert mutant.old != mutant.new
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1


def test_a_mutant_is_valid_python() -> None:
    for mutant in MUTANTS:
        ast.parse((ROOT / mutant.file).read_text().replace(mutant.old, mutant.new), mutant.name)


@pytest.mark.parametrize("name", sorted({test for mutant in MUTANTS for test in mutant.tests}))
def test_a_named_test_exists(name: str) -> None:
    path, _, function = name.partition("::")
    body = ast.parse((ROOT / path).read_text()).body
    names = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert function in names if function else any(each.startswith("test_") for each in names)


def test_every_rule_has_a_mutant() -> None:
    assert {mutant.rule for mutant in MUTANTS} >= RULES


def test_a_mutant_is_of_the_sources_and_its_judges_are_tests() -> None:
    assert {mutant.file.split("/")[0] for mutant in MUTANTS} <= set(build.PACKAGES.values())
    assert {test.split("/")[0] for mutant in MUTANTS for test in mutant.tests} == {"tests"}
    assert [mutant.name for mutant in MUTANTS if not mutant.tests] == []


def test_only_the_tests_can_reach_a_mutant() -> None:
    """Other packages do not import them, not even lazily; `python -m` is the one way in."""
    own = ROOT / "jepsen-like" / "mutants"
    sources = [path for folder in build.PACKAGES.values() for path in (ROOT / folder).rglob("*.py")]
    assert [path for path in sources if not path.is_relative_to(own) and PACKAGE in path.read_text()] == []


# The mechanism -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("mutants") / "pristine"
    target.mkdir()
    build.snapshot(target)
    return target


def fingerprint() -> str:
    found = hashlib.sha256()
    for folder in build.PACKAGES.values():
        for path in sorted((ROOT / folder).rglob("*.py")):
            found.update(path.as_posix().encode() + path.read_bytes())
    return found.hexdigest()


def judged(pristine: Path, mutant: Mutant) -> Verdict:
    """The verdict; whatever it is, the repository is as before and the build is gone."""
    before = fingerprint()
    try:
        return build.judge(pristine, pristine.parent, mutant)
    finally:
        assert fingerprint() == before
        assert [path.name for path in pristine.parent.iterdir()] == ["pristine"]


def test_a_defect_that_a_test_notices_is_caught(pristine: Path) -> None:
    build.control(pristine, ONE_TEST)
    verdict = judged(pristine, BACKWARDS)
    assert (verdict.outcome, verdict.by) == ("caught", ONE_TEST[0].rpartition("/")[2])


def test_a_replacement_that_changes_nothing_survives(pristine: Path) -> None:
    assert judged(pristine, HARMLESS).outcome == "survived"


def test_a_replacement_that_cannot_be_imported_is_broken_and_not_caught(pristine: Path) -> None:
    verdict = judged(pristine, UNIMPORTABLE)
    assert verdict.outcome == "broken" and "ImportError" in verdict.by


def test_a_test_that_does_not_exist_catches_nothing(pristine: Path) -> None:
    lost = replace(BACKWARDS, tests=("tests/none.py",))
    assert judged(pristine, lost).outcome == "broken"
    with pytest.raises(ControlFailed):
        build.control(pristine, lost.tests)


def test_a_text_that_is_not_there_or_there_twice_is_refused(pristine: Path) -> None:
    for old in ("no such text", "meta.time_ms"):
        wrong = Mutant(name="wrong", rule="T1", file="storage/clock.py", old=old, new="", tests=ONE_TEST)
        with pytest.raises(ValueError, match="times in"):
            judged(pristine, wrong)


# What is printed ---------------------------------------------------------------------------------------

CAUGHT = Verdict("one", "T1", "caught", "test_rules_time.py::test_one", 1.25)
SURVIVED = Verdict("another", "digest", "survived", "", 0.5)
BROKEN = Verdict("third", "L1", "broken", "Traceback\nImportError: no", 0.25)


def test_a_line_tells_name_rule_test_and_seconds() -> None:
    assert [run.line(verdict, 8) for verdict in (CAUGHT, SURVIVED, BROKEN)] == [
        "one       T1          1.2 s  test_rules_time.py::test_one",
        "another   digest      0.5 s  SURVIVED",
        "third     L1          0.2 s  BROKEN ImportError: no",
    ]


def test_json_is_one_object() -> None:
    assert json.loads(run.as_json([CAUGHT, SURVIVED])) == {
        "mutants": [
            {"name": "one", "rule": "T1", "caught": True, "by": "test_rules_time.py::test_one"},
            {"name": "another", "rule": "digest", "caught": False, "by": ""},
        ]
    }


@pytest.mark.parametrize(
    ("verdicts", "code"), [([CAUGHT], 0), ([CAUGHT, SURVIVED], 1), ([CAUGHT, BROKEN], 1)], ids=["all", "one", "broken"]
)
def test_the_exit_code_says_whether_all_were_caught(
    verdicts: list[Verdict], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "run", lambda chosen, jobs: iter(verdicts))
    assert run.main(["--json"]) == code
    assert run.main([]) == code


def test_a_name_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--only", "nobody"]) == 2
    assert "nobody" in capsys.readouterr().err
