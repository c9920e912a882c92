"""The managed producer: numbers, boundaries, what is certain, and what the outbox keeps."""

from holdfast.jepsen.mutants.mutant import Mutant

STEPS = "tests/unit/client/test_producing.py"
RANDOM = "tests/unit/client/test_producing_random.py"
OUTBOX = "tests/unit/client/test_outbox.py"
CORE = "client/producing.py"

PRODUCER_MUTANTS = (
    Mutant(
        name="requests-do-not-say-what-they-follow",
        rule="P1",
        file=CORE,
        old="after_seq=max(before.last_seq if before is not None else 0, self.high_water),",
        new="after_seq=None,",
        tests=(STEPS, RANDOM),
    ),
    Mutant(
        name="what-was-left-is-sent-under-the-new-numbering",
        rule="P4",
        file=CORE,
        old="numbering_epoch=request.numbering_epoch,",
        new="numbering_epoch=self.epoch,",
        tests=(STEPS, RANDOM),
    ),
    Mutant(
        name="the-cluster-may-forget-what-is-not-confirmed",
        rule="P2",
        file=CORE,
        old="done_below = self._window[0].first_seq if self._window else self._next_seq",
        new="done_below = self._next_seq",
        tests=(STEPS, RANDOM),
    ),
    Mutant(
        name="the-outbox-keeps-what-the-cluster-forgets",
        rule="P2",
        file=CORE,
        old="saves = [Save(self._erased + self._confirmed, stored)]",
        new="saves = [Save(self._erased, stored)]",
        tests=(STEPS, RANDOM),
    ),
    Mutant(
        name="a-refusal-is-believed-while-an-attempt-is-open",
        rule="A2",
        file=CORE,
        old="case _ if request.uncertain or isinstance(cause, Unavailable):",
        new="case _ if isinstance(cause, Unavailable):",
        tests=(STEPS, RANDOM),
    ),
    Mutant(
        name="the-fold-speaks-for-every-attempt-of-a-produce",
        rule="A2",
        file="client/flight.py",
        old="    if pending.open <= 1 or not isinstance(pending.what, Produce) or pending.what.client_id is None:",
        new="    if pending.open >= 0:",
        tests=(RANDOM,),
    ),
    Mutant(
        name="a-refusal-is-told-before-the-outbox-forgets",
        rule="P2",
        file=CORE,
        old="        return [*good, *saves, *asks, *bad]",
        new="        return [*good, *bad, *saves, *asks]",
        tests=(STEPS, RANDOM),
    ),
    Mutant(
        name="a-request-is-on-the-wire-before-it-is-on-disk",
        rule="P2",
        file=CORE,
        old="        return [*good, *saves, *asks, *bad]",
        new="        return [*good, *asks, *saves, *bad]",
        tests=(STEPS, RANDOM),
    ),
    Mutant(
        name="one-that-overtook-does-not-wait",
        rule="P1",
        file=CORE,
        old="                if not free or not chained or request.not_before_s > now_s:",
        new="                if not free or request.not_before_s > now_s:",
        tests=(STEPS,),
    ),
    Mutant(
        name="an-old-gap-ends-the-producer",
        rule="P1",
        file=CORE,
        old="if settled and request.asked_turn > self._moved_turn:",
        new="if settled:",
        tests=(STEPS,),
    ),
    Mutant(
        name="what-was-left-is-dropped-for-a-refusal",
        rule="P2",
        file=CORE,
        old='case _ if cause.happened == "no" and not isinstance(cause, Unavailable) and not request.sendings:',
        new="case _ if False:",
        tests=(STEPS,),
    ),
    Mutant(
        name="an-outbox-goes-to-a-queue-of-the-same-name",
        rule="G5",
        file="client/outbox.py",
        old="            if found is not None and found != owner and (left or found[0] != FORMAT):",
        new="            if found is not None and found[1] != owner[1]:",
        tests=(OUTBOX,),
    ),
)
