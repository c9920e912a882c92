"""A mutant's own build: a copy of the sources in which one text is replaced, and the tests run against it.

The sources themselves are never touched, and a running node cannot come here: what is wrong lives in a temporary folder
and ends with it. A verdict says something only if the same tests pass without the defect, so `control` comes first.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from holdfast.jepsen.mutants.mutant import Mutant

PACKAGES = {"client": "client", "storage": "storage", "cluster": "cluster", "jepsen": "jepsen-like"}
TIMEOUT_S = 600.0  # far more than all named tests take without a defect: what is not done then hangs
_IMPORTS = "import holdfast.storage.machine as machine; print(machine.__file__)"

Outcome = Literal["caught", "survived", "broken"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the tests said of one mutant: `by` is the first test that failed, or why there is no verdict."""

    name: str
    rule: str
    outcome: Outcome
    by: str
    seconds: float


class ControlFailed(Exception):
    """The tests fail without any defect, so they can show nothing about one."""


def root() -> Path:
    """The repository that this package is a folder of."""
    return Path(__file__).resolve().parents[2]


def snapshot(target: Path, source: Path | None = None) -> None:
    """Copy what a build needs: the four folders, the tests, the settings of the tools."""
    source = root() if source is None else source
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    for folder in (*PACKAGES.values(), "tests"):
        shutil.copytree(source / folder, target / folder, ignore=ignore, symlinks=True)
    shutil.copy2(source / "pyproject.toml", target / "pyproject.toml")
    (target / "path" / "holdfast").mkdir(parents=True)
    for package, folder in PACKAGES.items():
        (target / "path" / "holdfast" / package).symlink_to(Path("..", "..", folder))


def mutate(target: Path, mutant: Mutant) -> None:
    """Make the one replacement in a copy. Raises ValueError unless the old text is there exactly once."""
    path = target / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: the old text is {text.count(mutant.old)} times in {mutant.file}")
    path.write_text(text.replace(mutant.old, mutant.new))
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()


def control(pristine: Path, tests: Sequence[str], timeout_s: float = TIMEOUT_S) -> float:
    """Run the tests on a copy without a defect; gives the seconds. Raises ControlFailed."""
    began = time.monotonic()
    problem = _import_problem(pristine)
    if problem:
        raise ControlFailed(problem)
    code, output = _pytest(pristine, tests, timeout_s)
    if code:
        raise ControlFailed(output)
    return time.monotonic() - began


def judge(pristine: Path, workspace: Path, mutant: Mutant, timeout_s: float = TIMEOUT_S) -> Verdict:
    """Build one mutant beside the copy without a defect, run its tests, remove it again."""
    began = time.monotonic()
    target = workspace / mutant.name
    shutil.copytree(pristine, target, symlinks=True)
    try:
        mutate(target, mutant)
        problem = _import_problem(target)
        if problem:
            outcome: Outcome = "broken"
            by = problem
        else:
            outcome, by = _outcome(*_pytest(target, mutant.tests, timeout_s))
    finally:
        shutil.rmtree(target)
    return Verdict(mutant.name, mutant.rule, outcome, by, time.monotonic() - began)


def _outcome(code: int, output: str) -> tuple[Outcome, str]:
    """A failing test catches, and so does one that never ends; a run that could not begin shows nothing."""
    if code == 0:
        return "survived", ""
    if code == 1:
        failed = [line for line in output.splitlines() if line.startswith("FAILED ")]
        if failed:
            path, _, test = failed[0].removeprefix("FAILED ").split(" - ")[0].partition("::")
            return "caught", f"{Path(path).name}::{test}"
    if code < 0:
        return "caught", "the time limit"
    return "broken", output[-2_000:]


def _import_problem(target: Path) -> str:
    """Why the build cannot be used, or nothing. A build that imports other sources than its own would judge those."""
    command = [sys.executable, "-c", _IMPORTS]
    done = subprocess.run(command, cwd=target, env=_environment(target), capture_output=True, text=True, check=False)
    if done.returncode:
        return done.stderr[-2_000:]
    found = Path(done.stdout.strip()).resolve()
    return "" if found.is_relative_to(target.resolve()) else f"imports {found}, which is not in {target}"


def _pytest(target: Path, tests: Sequence[str], timeout_s: float) -> tuple[int, str]:
    """pytest's exit code and output; -1 after the time limit."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=short", "-p", "no:cacheprovider", *tests]
    env = _environment(target)
    try:
        done = subprocess.run(
            command, cwd=target, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return -1, f"not done after {timeout_s} s"
    if done.returncode < 0:
        return 1000 - done.returncode, f"ended by signal {-done.returncode}"
    return done.returncode, done.stdout + done.stderr


def _environment(target: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHON"))}
    return {**inherited, "PYTHONPATH": str(target / "path"), "PYTHONHASHSEED": "0"}
