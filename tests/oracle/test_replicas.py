"""Replicas of one log, whatever restarts and snapshots lie behind them and however Python salts its hashes."""

import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tests.oracle.follow import write_log
from tests.support.generator import THEMES, Generator
from tests.support.machine import Machine

ROOT = Path(__file__).parents[2]
ENTRIES = 150
AGAIN = 12  # entries at the end that ask for everything of the last ones again, under the same numbers


def a_log(seed: int) -> list[tuple[int, bytes]]:
    """A random run, and after it the same requests once more: replayed answers are part of what replicas share."""
    machine, generator = Machine(), Generator(Random(seed), THEMES[seed % len(THEMES)])
    for _ in range(ENTRIES):
        machine.pass_ms(max(generator.step_ms(), 0))
        envelopes = generator.entry()
        for envelope, answer in zip(envelopes, machine.entry(envelopes), strict=True):
            generator.learn(envelope, answer)
    for envelope in generator.known.sent[-AGAIN:]:
        machine.entry([envelope])
    return machine.log


def follow(log: Path, folder: Path, kind: str, restart_every: int, hash_seed: int) -> list[str]:
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tests.oracle.follow", str(log), str(folder), kind, str(restart_every)],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(len(THEMES)))
def test_replicas_with_other_restarts_and_hash_seeds_are_equal(seed: int, tmp_path: Path) -> None:
    """Q2: equal digests and equal answers after every entry, replayed ones too."""
    log = tmp_path / "log"
    write_log(log, a_log(seed))
    first = follow(log, tmp_path / "a", "lmdb", restart_every=7, hash_seed=1)
    second = follow(log, tmp_path / "b", "lmdb", restart_every=1_000, hash_seed=2)
    third = follow(log, tmp_path / "c", "memory", restart_every=31, hash_seed=3)
    assert len(first) == ENTRIES + AGAIN
    assert first == second == third


def test_another_log_has_another_digest(tmp_path: Path) -> None:
    """The comparison can say no: one message less, and nothing is equal behind it."""
    entries = a_log(0)
    machines = Machine(), Machine()
    for index, data in entries[:20]:
        machines[0].replay(index, data)
        if index != 10:
            machines[1].replay(index, data)
    assert machines[0].digest() != machines[1].digest()
