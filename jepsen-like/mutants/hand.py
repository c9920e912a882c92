"""What is put into people's hands: redrive in steps, staged chunks added up, framed streams, a test's own clock."""

from holdfast.jepsen.mutants.mutant import Mutant

BROKER = "tests/unit/client/testing/test_broker.py"
FRAMING = "tests/unit/client/cli/test_framing.py"
REDRIVE = "tests/unit/client/test_redrive.py"
STAGED = "tests/unit/client/test_staged.py"

HAND_MUTANTS = (
    Mutant(
        name="a-poisonous-message-goes-round-for-ever",
        rule="D4",
        file="client/redrive.py",
        old="[row for row in page.rows if row.died_ms <= begun_ms]",
        new="list(page.rows)",
        tests=(REDRIVE,),
    ),
    Mutant(
        name="what-an-origin-did-not-take-is-passed-over",
        rule="D4",
        file="client/redrive.py",
        old="if 0 < count < matched:",
        new="if count > matched:",
        tests=(REDRIVE,),
    ),
    Mutant(
        name="a-rate-makes-up-for-a-pause",
        rule="D4",
        file="client/redrive.py",
        old="self._next_s = now_s + count / self._rate",
        new="self._next_s = max(self._next_s, 0.0) + count / self._rate",
        tests=(REDRIVE,),
    ),
    Mutant(
        name="what-was-not-moved-is-sent-home",
        rule="D4",
        file="storage/moved_letters.py",
        old='if "holdfast-origin-queue-id" not in headers:',
        new='if "holdfast-no-such-header" in headers:',
        tests=(REDRIVE,),
    ),
    Mutant(
        name="a-chunk-that-is-named-twice-is-counted-once",
        rule="X2",
        file="client/staged.py",
        old="known.digest ^ part.digest,",
        new="known.digest | part.digest,",
        tests=(STAGED,),
    ),
    Mutant(
        name="two-attempts-are-published-as-one",
        rule="X2",
        file="client/staged.py",
        old="if known.attempt != part.attempt:",
        new="if known.attempt == part.attempt and False:",
        tests=(STAGED,),
    ),
    Mutant(
        name="a-line-in-a-payload-becomes-two",
        rule="cli",
        file="client/cli/framing.py",
        old='if b"\\n" in payload:',
        new='if b"\\r" in payload:',
        tests=(FRAMING,),
    ),
    Mutant(
        name="a-move-of-the-clock-is-one-leap",
        rule="T1",
        file="cluster/passing.py",
        old="SLICE_MS = 1_800_000",
        new="SLICE_MS = 1_800_000_000_000",
        tests=(BROKER,),
    ),
    Mutant(
        name="a-move-of-the-clock-forgets-the-order",
        rule="T3",
        file="cluster/node.py",
        old="min(self.replica.next_due_in_ms() or by_ms, by_ms, SLICE_MS)",
        new="min(by_ms, SLICE_MS)",
        tests=(BROKER,),
    ),
    Mutant(
        name="only-one-of-two-clocks-is-moved",
        rule="T2",
        file="cluster/passing.py",
        old="return real_ms + self._ahead_ms",
        new="return real_ms",
        tests=(BROKER,),
    ),
)
