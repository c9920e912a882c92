"""The client's core: what is sent again, what a caller is told, and what becomes of calls that nobody waits for."""

from holdfast.jepsen.mutants.mutant import Mutant

UNWANTED = "tests/unit/client/test_core_unwanted.py"
CORE = "tests/unit/client/test_core.py"
RANDOM = "tests/unit/client/test_core_random.py"
CONSUMING = "tests/unit/client/test_consuming.py"

CLIENT_MUTANTS = (
    Mutant(
        name="a-retry-gets-a-number-of-its-own",
        rule="A1",
        file="client/core.py",
        old="            pending.lost = True\n",
        new="            pending.lost = True\n            pending.forget_identity()\n",
        tests=(CORE, RANDOM),
    ),
    Mutant(
        name="what-may-have-happened-is-called-unavailable",
        rule="A2",
        file="client/flight.py",
        old="        return self.open > 0 and isinstance(self.what, _COMMANDS)",
        new="        return len(self.at) > 0 and isinstance(self.what, _COMMANDS)",
        tests=(CORE, RANDOM),
    ),
    Mutant(
        name="a-parked-lease-is-not-withdrawn",
        rule="L7",
        file="client/core.py",
        old="                self._nodes.write(address, Withdraw(request_id))\n            if not",
        new="                pass\n            if not",
        tests=(UNWANTED,),
    ),
    Mutant(
        name="a-lease-that-crossed-its-withdrawal-is-kept",
        rule="L7",
        file="client/core.py",
        old="            self._undo(pending.lease, answer, now_s)",
        new="            pass",
        tests=(UNWANTED,),
    ),
    Mutant(
        name="an-outcome-that-nobody-heard-is-dropped",
        rule="L7",
        file="client/core.py",
        old="            self._undo(what, outcome, now_s)",
        new="            pass",
        tests=(UNWANTED,),
    ),
    Mutant(
        name="an-unwanted-lease-is-asked-for-again",
        rule="L7",
        file="client/core.py",
        old="pending.lease, pending.what = pending.what, placeholder(pending.what)",
        new="pending.lease = pending.what",
        tests=(UNWANTED,),
    ),
    Mutant(
        name="a-lease-that-was-granted-is-not-looked-for",
        rule="L7",
        file="client/core.py",
        old="            pending.what = pending.lease\n            self._enqueue(pending)",
        new="            self._finish(pending, answer)",
        tests=(UNWANTED,),
    ),
    Mutant(
        name="a-command-of-nobody-is-sent-again",
        rule="A2",
        file="client/flight.py",
        old="        return self.unwanted and self.lease is None",
        new="        return False",
        tests=(UNWANTED,),
    ),
    Mutant(
        name="a-lease-in-the-log-is-said-to-be-withdrawn",
        rule="L7",
        file="cluster/replica.py",
        old="isinstance(envelope.command, Lease) and token not in self.batcher:",
        new="isinstance(envelope.command, Lease):",
        tests=("tests/unit/cluster/test_replica.py",),
    ),
    Mutant(
        name="a-consumer-hands-out-what-it-does-not-hold",
        rule="S1",
        file="client/consuming.py",
        old="            if message.version in self._held.versions:\n                return message",
        new="            return message",
        tests=(CONSUMING,),
    ),
    Mutant(
        name="a-consumer-lets-its-lease-run-out",
        rule="S4",
        file="client/consuming.py",
        old="        return bool(self._left) and now_s >= self._extend_at_s",
        new="        return False",
        tests=(CONSUMING,),
    ),
)
