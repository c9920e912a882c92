"""What the owner of a lease says of it, and its end (S1 … S5)."""

from holdfast.jepsen.mutants.mutant import Mutant

SETTLE = "tests/unit/storage/test_rules_settle.py"

SETTLE_MUTANTS = (
    Mutant(
        name="a-settle-at-the-deadline-counts",
        rule="S1",
        file="storage/settle.py",
        old="view.lease_time >= row.deadline",
        new="view.lease_time > row.deadline",
        tests=(SETTLE,),
    ),
    Mutant(
        name="the-newest-lease-is-not-found",
        rule="S1",
        file="storage/settle.py",
        old="(generation, counter) > newest",
        new="(generation, counter) >= newest",
        tests=(SETTLE,),
    ),
    Mutant(
        name="settled-before-is-called-not-in-lease",
        rule="S1",
        file="storage/settle.py",
        old="        add(at, end, AlreadySettled.code)",
        new="        add(at, end, VersionNotInLease.code)",
        tests=(SETTLE,),
    ),
    Mutant(
        name="one-refused-range-ends-the-batch",
        rule="S1",
        file="storage/settle.py",
        old=("        taken = taking.take(wanted)\n        for lo, hi, redriven"),
        new=(
            "        taken = taking.take(wanted)\n"
            "        if not taken:\n"
            "            break\n"
            "        for lo, hi, redriven"
        ),
        tests=(SETTLE,),
    ),
    Mutant(
        name="a-batch-settles-its-first-range",
        rule="S2",
        file="storage/settle.py",
        old=("    for wanted in command.ranges:\n        taken = taking.take(wanted)\n        for lo, hi, redriven"),
        new=(
            "    for wanted in command.ranges[:1]:\n        taken = taking.take(wanted)\n        for lo, hi, redriven"
        ),
        tests=(SETTLE,),
    ),
    Mutant(
        name="a-settled-lease-is-written-again",
        rule="S2",
        file="storage/settle.py",
        old="                del self._open[lease_id]\n",
        new="",
        tests=(SETTLE,),
    ),
    Mutant(
        name="a-batch-has-one-range-too-many",
        rule="S2",
        file="client/protocol/limits.py",
        old="SETTLE_RANGES = 65_536",
        new="SETTLE_RANGES = 65_537",
        tests=(SETTLE,),
    ),
    Mutant(
        name="the-longest-nack-delay-is-refused",
        rule="S3",
        file="storage/settle.py",
        old="delay is not None and delay > limit",
        new="delay is not None and delay >= limit",
        tests=(SETTLE,),
    ),
    Mutant(
        name="a-nack-delay-of-zero-is-the-backoff",
        rule="S3",
        file="storage/settle.py",
        old="            if away is None:",
        new="            if not away:",
        tests=(SETTLE,),
    ),
    Mutant(
        name="a-backoff-is-not-clipped",
        rule="S3",
        file="storage/settle.py",
        old="min(policy.backoff.delay_ms(span.attempts), policy.max_nack_delay_ms)",
        new="policy.backoff.delay_ms(span.attempts)",
        tests=(SETTLE,),
    ),
    Mutant(
        name="a-nack-without-text-clears-the-error",
        rule="S3",
        file="storage/settle.py",
        old=("            if error is not None:\n                span.error = error"),
        new='            span.error = error or ""',
        tests=(SETTLE,),
    ),
    Mutant(
        name="the-backoff-doubles-once-too-often",
        rule="S3",
        file="client/protocol/values.py",
        old="max(attempts, 1) - 1",
        new="max(attempts, 1)",
        tests=(SETTLE,),
    ),
    Mutant(
        name="an-extend-shortens",
        rule="S4",
        file="storage/settle.py",
        old="deadline = max(row.deadline, min(state.lease_time + timeout, row.granted_at + policy.max_lease_ms))",
        new="deadline = min(state.lease_time + timeout, row.granted_at + policy.max_lease_ms)",
        tests=(SETTLE,),
    ),
    Mutant(
        name="a-lease-can-be-extended-for-ever",
        rule="S4",
        file="storage/settle.py",
        old="row.granted_at + policy.max_lease_ms",
        new="state.lease_time + policy.max_lease_ms",
        tests=(SETTLE,),
    ),
    Mutant(
        name="an-extended-lease-never-ends",
        rule="S4",
        file="storage/settle.py",
        old='        state.insert(Table.LEASE_DUE, k4(group.hold, deadline, lowest, command.lease_id), b"")\n',
        new="",
        tests=(SETTLE,),
    ),
    Mutant(
        name="a-lease-ends-a-millisecond-late",
        rule="S5",
        file="storage/due.py",
        old="deadline <= state.lease_time",
        new="deadline < state.lease_time",
        tests=(SETTLE,),
    ),
    Mutant(
        name="an-expiry-keeps-the-former-error",
        rule="S5",
        file="storage/due.py",
        old="span.error = LEASE_EXPIRED",
        new="span.error = span.error or LEASE_EXPIRED",
        tests=(SETTLE,),
    ),
    Mutant(
        name="an-expiry-always-backs-off",
        rule="S5",
        file="storage/due.py",
        old="if policy.backoff_on_expiry:",
        new='if policy.backoff.kind != "none":',
        tests=(SETTLE,),
    ),
    Mutant(
        name="what-expires-stays-in-flight",
        rule="S5",
        file="storage/due.py",
        old=("    group.in_flight -= n\n    state.add_flight(group.hold, row.session, -n, 0)\n    policy"),
        new=("    group.in_flight -= n\n    policy"),
        tests=(SETTLE,),
    ),
)
