"""Settle and publish together, and what can be asked (X1, X2, Q1, Q2, E1)."""

from holdfast.jepsen.mutants.mutant import Mutant

ASK = "tests/unit/storage/test_rules_ask.py"
BOUNDED = "tests/unit/storage/test_bounded.py"
STATE = "tests/unit/storage/test_state.py"
TIME = "tests/unit/storage/test_rules_time.py"
TOGETHER = "tests/unit/storage/test_rules_together.py"

TOGETHER_MUTANTS = (
    Mutant(
        name="a-settle-refused-in-part-is-good-enough",
        rule="X1",
        file="storage/transactions.py",
        old='if settled.refused else ""',
        new='if not settled.count else ""',
        tests=(TOGETHER,),
    ),
    Mutant(
        name="the-undo-forgets-rows-that-are-new",
        rule="X1",
        file="storage/state.py",
        old=(
            "        self.txn.insert(table, key, value)\n"
            "        if self._undo is not None:\n"
            "            self._undo.append((table, key, None))\n"
        ),
        new="        self.txn.insert(table, key, value)\n",
        tests=(TOGETHER,),
    ),
    Mutant(
        name="the-undo-forgets-bodies",
        rule="X1",
        file="storage/state.py",
        old=(
            "        self.txn.append(table, key, value)\n"
            "        if self._undo is not None:\n"
            "            self._undo.append((table, key, None))\n"
        ),
        new="        self.txn.append(table, key, value)\n",
        tests=(TOGETHER,),
    ),
    Mutant(
        name="the-undo-forgets-rows-that-went",
        rule="X1",
        file="storage/state.py",
        old=("                self._undo.append((table, key, former))\n            self._digest -="),
        new=("                pass\n            self._digest -="),
        tests=(TOGETHER,),
    ),
    Mutant(
        name="the-undo-goes-forwards",
        rule="X1",
        file="storage/state.py",
        old="in reversed(self._undo):",
        new="in self._undo:",
        tests=(TOGETHER,),
    ),
    Mutant(
        name="the-undo-keeps-counters",
        rule="X1",
        file="storage/state.py",
        old="        self._saved[key] = _former(row)\n",
        new="        self._saved[key] = None\n",
        tests=(BOUNDED,),
    ),
    Mutant(
        name="the-undo-keeps-bodies-at-hand",
        rule="X1",
        file="storage/state.py",
        old="        state._contents.clear()  # the ids of blobs that the block added are given out again\n",
        new="",
        tests=(BOUNDED,),
    ),
    Mutant(
        name="the-undo-keeps-the-digest",
        rule="X1",
        file="storage/state.py",
        old="        state._digest = self._digest\n",
        new="",
        tests=(TOGETHER,),
    ),
    Mutant(
        name="the-undo-keeps-effects",
        rule="X1",
        file="storage/state.py",
        old="            state.effects.popitem()\n",
        new="            break\n",
        tests=(TOGETHER,),
    ),
    Mutant(
        name="a-refusal-names-the-item-after-it",
        rule="X1",
        file="storage/transactions.py",
        old="enumerate(command.items)",
        new="enumerate(command.items, 1)",
        tests=(TOGETHER,),
    ),
    Mutant(
        name="another-content-is-published",
        rule="X2",
        file="storage/staging.py",
        old="if count != part.count or digest != part.digest:",
        new="if count != part.count:",
        tests=(TOGETHER,),
    ),
    Mutant(
        name="a-part-with-another-count-is-published",
        rule="X2",
        file="storage/staging.py",
        old="if count != part.count or digest != part.digest:",
        new="if digest != part.digest:",
        tests=(TOGETHER,),
    ),
    Mutant(
        name="only-the-first-chunk-sets-the-expiry",
        rule="X2",
        file="storage/staging.py",
        old="opened.deadline = state.time_ms + command.expires_ms",
        new="opened.deadline = opened.deadline or state.time_ms + command.expires_ms",
        tests=(TOGETHER,),
    ),
    Mutant(
        name="a-publish-is-refused-for-backlog",
        rule="X2",
        file="storage/staging.py",
        old=("        state.delete(Table.STAGE, key)\n        if mixed:"),
        new=(
            "        produce.check_room(queues[q], count, body_bytes)\n"
            "        state.delete(Table.STAGE, key)\n"
            "        if mixed:"
        ),
        tests=(TOGETHER,),
    ),
    Mutant(
        name="an-earlier-publish-of-a-stream-is-done-again",
        rule="X2",
        file="storage/staging.py",
        old="return txn.seq <= former.seq if",
        new="return txn.seq == former.seq if",
        tests=(TOGETHER,),
    ),
    Mutant(
        name="parts-are-published-as-they-are-named",
        rule="X2",
        file="storage/staging.py",
        old="sorted(command.parts, key=lambda part: part.part)",
        new="command.parts",
        tests=(TOGETHER,),
    ),
    Mutant(
        name="a-chunk-with-another-content-is-a-replay",
        rule="X2",
        file="storage/staging.py",
        old="if content_hash != command.content_hash or _CHUNK",
        new="if _CHUNK",
        tests=(TOGETHER,),
    ),
    Mutant(
        name="an-abort-keeps-the-staged-bytes",
        rule="X2",
        file="storage/staging.py",
        old=("    _unschedule(state, opened.deadline, opened.number)\n    state.meta.staged_bytes -= opened.size\n"),
        new="    _unschedule(state, opened.deadline, opened.number)\n",
        tests=(TOGETHER,),
    ),
    Mutant(
        name="any-query-publishes-in-a-stream",
        rule="X2",
        file="storage/staging.py",
        old="and former is not None and former.fence != command.fence",
        new="and former is not None and not former.fence",
        tests=(TOGETHER,),
    ),
    Mutant(
        name="what-is-staged-stays-for-ever",
        rule="X2",
        file="storage/staging.py",
        old="k1(0), k1(state.time_ms + 1))",
        new="k1(0), k1(0))",
        tests=(TOGETHER,),
    ),
    Mutant(
        name="an-answer-tells-the-stamp-for-the-time",
        rule="Q2",
        file="storage/machine.py",
        old="Place(entry.index, position, state.time_ms)",
        new="Place(entry.index, position, entry.stamp_ms)",
        tests=(TIME,),
    ),
    Mutant(
        name="answers-of-an-entry-share-a-place",
        rule="Q2",
        file="storage/machine.py",
        old="Place(entry.index, position, state.time_ms)",
        new="Place(entry.index, 0, state.time_ms)",
        tests=(ASK,),
    ),
    Mutant(
        name="a-read-is-dated-one-entry-ahead",
        rule="Q1",
        file="storage/views.py",
        old="Place(view.meta.applied, -1, view.time_ms)",
        new="Place(view.meta.applied + 1, -1, view.time_ms)",
        tests=(ASK,),
    ),
    Mutant(
        name="an-entry-is-applied-twice",
        rule="Q2",
        file="storage/machine.py",
        old="if entry.index <= meta.applied:",
        new="if entry.index < meta.applied:",
        tests=(STATE,),
    ),
    Mutant(
        name="the-tail-is-not-produced",
        rule="E1",
        file="storage/explain.py",
        old="if version > queue.tail:",
        new="if version >= queue.tail:",
        tests=(ASK,),
    ),
    Mutant(
        name="the-start-lies-before-itself",
        rule="E1",
        file="storage/explain.py",
        old="if version < group.start and",
        new="if version <= group.start and",
        tests=(ASK,),
    ),
    Mutant(
        name="explain-shows-lease-time",
        rule="E1",
        file="storage/explain.py",
        old="until = row.deadline + view.meta.steps",
        new="until = row.deadline",
        tests=(ASK,),
    ),
    Mutant(
        name="explain-names-the-newest-lease",
        rule="E1",
        file="storage/explain.py",
        old="    lease_id = min(int.from_bytes(key[24:]",
        new="    lease_id = max(int.from_bytes(key[24:]",
        tests=(ASK,),
    ),
    Mutant(
        name="explain-names-the-cap-for-older-versions",
        rule="E1",
        file="storage/explain.py",
        old="if over is not None and version > group.settled_top:",
        new="if over is not None:",
        tests=(ASK,),
    ),
    Mutant(
        name="explain-takes-an-auto-acked-lease-for-an-open-one",
        rule="E1",
        file="storage/explain.py",
        old="view.txn.first(Table.LEASE_DUE, k1(group.hold), k1(group.hold + 1))",
        new="view.txn.first(Table.LEASE_DUE, k1(group.g), k1(group.hold + 1))",
        tests=(ASK,),
    ),
    Mutant(
        name="explain-forgets-the-in-flight-limit",
        rule="E1",
        file="storage/explain.py",
        old="group.in_flight >= policy.max_in_flight:",
        new="group.in_flight > policy.max_in_flight:",
        tests=(ASK,),
    ),
)
