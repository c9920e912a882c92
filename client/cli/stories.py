"""The transcripts that come with the package, for `holdfast demo`; see `transcript.py` for how they are written.

Only what is asked stands here. What came of it is recorded beside the other transcripts, in `tests/transcripts/`.
"""

from typing import Final

TOUR: Final = """\
# A tour: produce, lease, lose a leader, fail, die, come back

A shop sends orders, numbered by their producer. The fulfilment service leases them.
> open admin ann bob
> create orders max_delivery_attempts=2 visibility_timeout_ms=30s
> produce orders "tea" "cups" "a cursed vase" client=shop seq=1 as=send
> ann: lease orders max=2 as=take

The leader is killed before either reply arrives. Another node folded the same log.
> failover

Both ask again. The shop gets the versions of its first try, and nothing is written twice. Ann gets the lease that she
has: same messages, same deadline, no second attempt.
> +5s
> again send
> ann: again take
> ann: ack orders 1:1-2

The vase breaks every worker. Bob crashes on it: his lease runs out, and the message comes back.
> bob: lease orders
> +30s
> ann: lease orders
> ann: nack orders 3:3 error="the vase bit me"

Two attempts were two attempts. The message is dead, with its reason, and nothing is lost.
> explain orders 3
> dead orders

After a repair it is sent round again. Packing it and billing it are one step: both happen, or neither.
> redrive orders 3#1
> create invoices
> bob: lease orders
> bob: transaction
>> ack orders 4:3
>> produce invoices "one vase"
> stats orders
> peek invoices
"""

FAILOVER: Final = """\
# Failover in the middle of a lease

Rules: L1 L2 L4 A1 S1 S5 T3.

Ann takes two orders. The leader dies before its answer reaches her.
> open admin ann bob
> create orders max_delivery_attempts=3
> produce orders "a" "b" "c" client=svc seq=1
> ann: lease orders max=2 timeout=30s as=take

Another node leads now. It folded the same log, so it knows the lease.
> failover

She asks again under the same number: the same lease, the same counts, the same deadline. Nothing is stranded, and no
second attempt is counted.
> +5s
> ann: again take

Bob gets what is left, and not hers.
> bob: lease orders max=10 timeout=60s

She settles the first message. Asked once more, the lease shows what she still holds.
> ann: ack orders 1:1
> ann: again take

The node restarts, too. The lease stays.
> restart
> ann: extend orders 1 timeout=30s
> explain orders 2

She stalls past her deadline. At the deadline itself the lease is over, though nobody has taken the message since.
> +30s
> ann: ack orders 1:2
> ann: again take

The next lease is the second attempt of that message: it counts leases, not elections and not retries.
> bob: lease orders max=10
> bob: ack orders 2:3 3:2
> stats orders
> failover
> stats orders
"""

STORIES: Final = {"tour": TOUR, "failover-in-a-lease": FAILOVER}


def title(story: str) -> str:
    return story.partition("\n")[0].removeprefix("# ")
