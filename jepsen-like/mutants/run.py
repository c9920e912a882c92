"""`python -m holdfast.jepsen.mutants`: every mutant judged, one line each, and how many were caught."""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from holdfast.jepsen.mutants import build
from holdfast.jepsen.mutants.build import ControlFailed, Verdict
from holdfast.jepsen.mutants.catalogue import MUTANTS
from holdfast.jepsen.mutants.mutant import Mutant


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every chosen mutant was caught, 1 if not, 2 if that cannot be said."""
    options = _parser().parse_args(arguments)
    chosen = [mutant for mutant in MUTANTS if not options.only or mutant.name in options.only]
    unknown = set(options.only) - {mutant.name for mutant in chosen}
    if unknown:
        print(f"no mutant is called {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    width = max(len(mutant.name) for mutant in chosen)
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name:<{width}}  {mutant.rule:<8}  {mutant.file}")
        return 0
    verdicts: list[Verdict] = []
    try:
        for verdict in run(chosen, jobs=options.jobs):
            verdicts.append(verdict)
            if not options.json:
                print(line(verdict, width), flush=True)
    except ControlFailed as failure:
        print(f"without any defect the tests fail, so nothing can be shown:\n{failure}", file=sys.stderr)
        return 2
    caught = sum(verdict.outcome == "caught" for verdict in verdicts)
    print(as_json(verdicts) if options.json else f"{caught} of {len(verdicts)} caught")
    return 0 if caught == len(verdicts) else 1


def run(mutants: Sequence[Mutant], jobs: int = 2) -> Iterator[Verdict]:
    """The verdicts in the order of the mutants, after a run without any defect. Raises ControlFailed."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    with tempfile.TemporaryDirectory(prefix="holdfast-mutants-") as folder:
        pristine = Path(folder, "pristine")
        pristine.mkdir()
        build.snapshot(pristine)
        build.control(pristine, tests)
        with ThreadPoolExecutor(max_workers=jobs) as pool:
            yield from pool.map(lambda mutant: build.judge(pristine, Path(folder), mutant), mutants)


def line(verdict: Verdict, width: int) -> str:
    """One row of the table: name, rule, the test that caught it (or that none did), seconds."""
    by = verdict.by
    if verdict.outcome != "caught":
        by = f"{verdict.outcome.upper()} {_last_line(by)}".rstrip()
    return f"{verdict.name:<{width}}  {verdict.rule:<8}  {verdict.seconds:5.1f} s  {by}"


def as_json(verdicts: Sequence[Verdict]) -> str:
    rows = [
        {"name": each.name, "rule": each.rule, "caught": each.outcome == "caught", "by": each.by} for each in verdicts
    ]
    return json.dumps({"mutants": rows})


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m holdfast.jepsen.mutants", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="judge this one; may be repeated")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default: 2)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table, at the end")
    parser.add_argument("--list", action="store_true", help="name them and judge none")
    return parser
