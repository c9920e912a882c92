"""Every mutant. A family is a file with a tuple of them: one import here, and one line in `MUTANTS`."""

from holdfast.jepsen.mutants.bytes import BYTES_MUTANTS
from holdfast.jepsen.mutants.client import CLIENT_MUTANTS
from holdfast.jepsen.mutants.dead import DEAD_MUTANTS
from holdfast.jepsen.mutants.delays import DELAYS_MUTANTS
from holdfast.jepsen.mutants.groups import GROUPS_MUTANTS
from holdfast.jepsen.mutants.hand import HAND_MUTANTS
from holdfast.jepsen.mutants.lease import LEASE_MUTANTS
from holdfast.jepsen.mutants.mutant import Mutant
from holdfast.jepsen.mutants.produce import PRODUCE_MUTANTS
from holdfast.jepsen.mutants.producer import PRODUCER_MUTANTS
from holdfast.jepsen.mutants.purge import PURGE_MUTANTS
from holdfast.jepsen.mutants.raft import RAFT_MUTANTS
from holdfast.jepsen.mutants.serving import SERVING_MUTANTS
from holdfast.jepsen.mutants.settle import SETTLE_MUTANTS
from holdfast.jepsen.mutants.simulated import SIMULATED_MUTANTS
from holdfast.jepsen.mutants.time import TIME_MUTANTS
from holdfast.jepsen.mutants.together import TOGETHER_MUTANTS
from holdfast.jepsen.mutants.workers import WORKERS_MUTANTS

MUTANTS: tuple[Mutant, ...] = (
    *TIME_MUTANTS,
    *PRODUCE_MUTANTS,
    *DELAYS_MUTANTS,
    *LEASE_MUTANTS,
    *SETTLE_MUTANTS,
    *DEAD_MUTANTS,
    *GROUPS_MUTANTS,
    *PURGE_MUTANTS,
    *TOGETHER_MUTANTS,
    *BYTES_MUTANTS,
    *RAFT_MUTANTS,
    *SIMULATED_MUTANTS,
    *HAND_MUTANTS,
    *CLIENT_MUTANTS,
    *WORKERS_MUTANTS,
    *PRODUCER_MUTANTS,
    *SERVING_MUTANTS,
)
