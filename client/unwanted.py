"""What becomes of a call that nobody waits for any more: it ends without a word, and leaves no lease behind.

Part of the core: decides, touches nothing. What was never sent is forgotten. What was sent keeps its number until it is
answered, is not sent again, and so ends with its connection. Only a Lease is seen to, because it would hold messages:

  1. It is parked. `Withdraw` goes to the leader, `Withdrawn` comes back, and it has not happened.
  2. The two cross: the lease was granted before the Withdraw came. The answer names it, and the core releases it, which
     costs no attempt (L2).
  3. The connection is lost in between, or its node is silent and another leads. To ask for the lease again could grant
     one that nobody wants. So something that does nothing is asked for under the same number: a Release of nothing.
     a. It is answered. Now the number is taken, and the lease will never be granted (A1).
     b. It is a RequestConflict: the lease was granted. Asked for under its number it is the very same (L4), and is
        released as in 2. Where 3 was done by an earlier attempt whose answer was lost, this is a conflict too: over.
  4. A release is asked again like any request. What is not done after `UNDO_S` is left to the lease's own timeout,
     which ends it and costs an attempt.
"""

from holdfast.client.events import Outcome
from holdfast.client.protocol.commands import Command, Lease, Release
from holdfast.client.protocol.queries import LeaderQuery
from holdfast.client.protocol.replies import Answer, Leased
from holdfast.client.protocol.values import LeaseId

UNDO_S = 10.0  # an election and some backoff; the default visibility timeout is three times as long
LINGER_S = 1.0  # of a client that is closed: a round trip, but not an election

NO_LEASE = LeaseId(0)  # never issued: whatever is done to it is refused, and changes nothing


def placeholder(lease: Lease) -> Release:
    """What takes the number of a lease and does nothing."""
    return Release(queue_id=lease.queue_id, group=lease.group, ranges=((NO_LEASE, 1, 1),))


def undoing(what: Command | LeaderQuery | None, outcome: Outcome) -> Release | None:
    """What gives back a lease that came for nobody; none where nothing is held."""
    if not isinstance(what, Lease) or what.auto_ack or not isinstance(outcome, Answer):
        return None
    leased = outcome.reply
    if not isinstance(leased, Leased) or not leased.grants:
        return None
    ranges = tuple((leased.lease_id, grant.first, grant.last) for grant in leased.grants)
    return Release(queue_id=what.queue_id, group=what.group, ranges=ranges)
