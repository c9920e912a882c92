"""Numbered produce and the memory of producers (P1 … P5)."""

from holdfast.jepsen.mutants.mutant import Mutant

PRODUCE = "tests/unit/storage/test_rules_produce.py"

PRODUCE_MUTANTS = (
    Mutant(
        name="a-mark-above-after-seq-is-no-gap",
        rule="P1",
        file="storage/produce.py",
        old="command.after_seq != high_water",
        new="command.after_seq > high_water",
        tests=(PRODUCE,),
    ),
    Mutant(
        name="a-gap-is-seen-only-below-the-mark",
        rule="P1",
        file="storage/produce.py",
        old="command.after_seq is not None and command.after_seq != high_water",
        new="command.after_seq is not None and command.after_seq < high_water",
        tests=(PRODUCE,),
    ),
    Mutant(
        name="a-replay-writes-again",
        rule="P2",
        file="storage/produce.py",
        old="if known is not None and known[2] == count and known[4] == command.content_hash:",
        new="if known is not None and known[2] == count and known[4] != command.content_hash:",
        tests=(PRODUCE,),
    ),
    Mutant(
        name="a-replay-looks-at-the-room",
        rule="P2",
        file="storage/produce.py",
        old=("    producer = known_producer(state, queue, client)\n    if producer is not None:\n        known"),
        new=(
            "    check_room(queue, count, len(command.body))\n"
            "    producer = known_producer(state, queue, client)\n"
            "    if producer is not None:\n"
            "        known"
        ),
        tests=(PRODUCE,),
    ),
    Mutant(
        name="a-request-is-forgotten-by-its-first-number",
        rule="P2",
        file="storage/produce.py",
        old="item[1] + item[2] > done_below",
        new="item[1] >= done_below",
        tests=(PRODUCE,),
    ),
    Mutant(
        name="a-request-is-remembered-one-too-long",
        rule="P2",
        file="storage/produce.py",
        old="item[1] + item[2] > done_below",
        new="item[1] + item[2] >= done_below",
        tests=(PRODUCE,),
    ),
    Mutant(
        name="the-window-has-one-place-too-many",
        rule="P2",
        file="storage/produce.py",
        old="if len(window) >= state.limits.producer_window:",
        new="if len(window) > state.limits.producer_window:",
        tests=(PRODUCE,),
    ),
    Mutant(
        name="a-request-that-straddles-the-mark-is-new",
        rule="P3",
        file="storage/produce.py",
        old="if first_seq <= producer.high_water:",
        new="if first_seq + count - 1 <= producer.high_water:",
        tests=(PRODUCE,),
    ),
    Mutant(
        name="a-different-body-is-not-named",
        rule="P3",
        file="storage/produce.py",
        old="different_body=known is not None",
        new="different_body=False",
        tests=(PRODUCE,),
    ),
    Mutant(
        name="only-the-body-is-content",
        rule="P3",
        file="storage/state.py",
        old='xxh3_128_digest(b"".join((*columns.content(), body)))',
        new="xxh3_128_digest(body)",
        tests=(PRODUCE,),
    ),
    Mutant(
        name="a-fenced-producer-gets-no-replays",
        rule="P4",
        file="storage/produce.py",
        old="if known is not None and known[2] == count",
        new="if known is not None and command.epoch == producer.epoch and known[2] == count",
        tests=(PRODUCE,),
    ),
    Mutant(
        name="epoch-zero-is-never-fenced",
        rule="P4",
        file="storage/produce.py",
        old="if command.epoch < producer.epoch:",
        new="if 0 < command.epoch < producer.epoch:",
        tests=(PRODUCE,),
    ),
    Mutant(
        name="numbers-are-looked-up-without-their-epoch",
        rule="P4",
        file="storage/produce.py",
        old="if item[1] == first_seq and item[0] == numbering_epoch:",
        new="if item[1] == first_seq:",
        tests=(PRODUCE,),
    ),
    Mutant(
        name="the-same-nonce-gets-another-epoch",
        rule="P4",
        file="storage/produce.py",
        old="if producer is None or not producer.epoch or producer.nonce != command.nonce:",
        new="if producer is None or not producer.epoch or producer.nonce == command.nonce:",
        tests=(PRODUCE,),
    ),
    Mutant(
        name="a-producer-lives-a-millisecond-too-long",
        rule="P5",
        file="storage/produce.py",
        old="producer.last_use + expiry <= view.time_ms",
        new="producer.last_use + expiry < view.time_ms",
        tests=(PRODUCE,),
    ),
    Mutant(
        name="a-produce-does-not-keep-its-producer-alive",
        rule="P5",
        file="storage/produce.py",
        old=("    producer.last_use = state.time_ms\n    state.touch_producer(queue.q, client)"),
        new="    state.touch_producer(queue.q, client)",
        tests=(PRODUCE,),
    ),
    Mutant(
        name="epochs-of-a-forgotten-producer-come-again",
        rule="P5",
        file="storage/produce.py",
        old="producer.epoch = queue.last_epoch = max(queue.last_epoch, generation) + 1",
        new="producer.epoch = max(producer.epoch, generation) + 1",
        tests=(PRODUCE,),
    ),
    Mutant(
        name="an-outbox-is-written-again-after-its-producer-was-forgotten",
        rule="P5",
        file="storage/produce.py",
        old=" or 0 < command.numbering_epoch < producer.born:",
        new=":",
        tests=(PRODUCE,),
    ),
)
