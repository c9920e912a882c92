"""The machine against the model: the same random log for both, and everything they say and hold compared.

Runs are drawn from seeds, so that any of them can be played again: `HOLDFAST_SEEDS=7000-7100 pytest tests/oracle` plays
others. `make fuzz` draws fresh ones, which Hypothesis makes shorter when they fail.
"""

import os
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from holdfast.client.protocol.commands import AckBatch, Envelope, OpenSession, SetLimits
from holdfast.jepsen.model.machine import Model
from holdfast.jepsen.model.rules import RULES
from tests.oracle.pair import Disagreement, Pair
from tests.support.generator import THEMES, Generator
from tests.support.machine import session_id

SEEDS = range(0, 200)
ENTRIES = 120
LEASES = 3  # a seed whose theme is leases
PICTURE_EVERY, QUERIES_EVERY = 2, 12  # entries: often enough to say which one went wrong


class Run:
    """One seed: a pair, and a generator that knows what an observer of the answers could know."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = Random(seed)
        self.generator = Generator(self.rng, THEMES[seed % len(THEMES)])
        self.pair = Pair(folder)
        # The model looks at all batches at once; with this limit the machine does so too (0002, 5).
        limit = SetLimits(changes=(("retention_batches", 10_000),))
        opened = Envelope(principal="local", command=OpenSession(), session=session_id(9))
        self.pair.entry([opened, replace(opened, command=limit, request_seq=1)])

    def entry(self) -> None:
        """Some time passes, and one entry is folded."""
        pair, generator = self.pair, self.generator
        pair.now_ms += generator.step_ms()
        envelopes = generator.entry()
        for envelope, answer in zip(envelopes, pair.entry(envelopes), strict=True):
            generator.learn(envelope, answer)
        generator.known.deaths = [
            (queue.id, group.name, row.version, row.dead_seq)
            for queue in pair.model.state.queues.values()
            for group in queue.groups.values()
            for row in group.dead.values()
        ]

    def play(self, entries: int) -> None:
        """Entries, with restarts, snapshots and restores between them."""
        for number in range(1, entries + 1):
            self.entry()
            if number % PICTURE_EVERY == 0:
                self.pair.compare_state()
            if number % QUERIES_EVERY == 0:
                self.pair.compare_queries()
            chance = self.rng.random()
            if chance < 0.02:
                self.pair.reopen()
            elif chance < 0.03:
                self.pair.copy()
            elif chance < 0.033:
                self.pair.restore()
        self.pair.compare_state()


def play(seed: int, entries: int = ENTRIES) -> Counter[str]:
    """One seed from its beginning; how often each branch of the rules was taken."""
    with tempfile.TemporaryDirectory(prefix="holdfast-oracle-") as folder:
        run = Run(seed, Path(folder))
        try:
            run.play(entries)
        except Exception as error:
            error.add_note(f"seed {seed}, entry {run.pair.index}: HOLDFAST_SEEDS={seed}-{seed + 1} pytest tests/oracle")
            raise
        finally:
            run.pair.close()
        return run.pair.model.fired


@pytest.mark.slow
def test_machine_and_model_agree_and_every_rule_fires() -> None:
    """Every rule: answers, delivered messages and whole states are equal, and no branch of the rules was left out."""
    first, _, end = os.environ.get("HOLDFAST_SEEDS", "").partition("-")
    seeds = range(int(first), int(end or first + "1")) if first else SEEDS
    fired: Counter[str] = Counter()
    for seed in seeds:
        fired += play(seed)
    print(f"{len(seeds)} seeds of {ENTRIES} entries; how often each rule fired:")
    for name in RULES:
        print(f"  {name:<28} {fired[name]:>7}")
    if not first:
        assert [name for name in RULES if not fired[name]] == []


@pytest.mark.fuzz
class Drawn(RuleBasedStateMachine):
    """The same with steps that Hypothesis chooses, and takes away again where they are not to blame."""

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="holdfast-oracle-")
        self.run_ = Run(seed, Path(self.folder.name))

    @rule(seed=st.integers(0, 2**32))
    def entry(self, seed: int) -> None:
        self.run_.rng.seed(seed)
        self.run_.entry()
        self.run_.pair.compare_state()

    @rule()
    def ask_everything(self) -> None:
        self.run_.pair.compare_queries()

    @rule()
    def restart(self) -> None:
        self.run_.pair.reopen()

    @rule()
    def snapshot(self) -> None:
        self.run_.pair.copy()

    @rule()
    def restore(self) -> None:
        self.run_.pair.restore()

    def teardown(self) -> None:
        if hasattr(self, "run_"):
            self.run_.pair.close()
            self.folder.cleanup()


TestDrawn = pytest.mark.fuzz(Drawn.TestCase)
TestDrawn.settings = settings(max_examples=settings().max_examples // 5, stateful_step_count=40)


def test_a_disagreement_is_noticed(tmp_path: Path) -> None:
    """A comparison that has never said no has shown nothing: a model that acks too little is told from the machine."""
    run = Run(LEASES, tmp_path)
    honest = Model._do

    def forgets_acks(model: Model, envelope: object) -> object:
        if isinstance(envelope.command, AckBatch):  # type: ignore[attr-defined]
            model = model.copy()
        return honest(model, envelope)  # type: ignore[arg-type]

    run.pair.model._do = forgets_acks.__get__(run.pair.model)  # type: ignore[method-assign]
    with pytest.raises(Disagreement):
        run.play(ENTRIES)
    run.pair.close()
