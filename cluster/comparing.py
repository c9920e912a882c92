"""Whether the replicas of a log still agree: digests of the state at the same index, compared by every node.

Pure. At each index that is a multiple of `EVERY` a node tells its digest to all others. Equal logs folded by equal code
give equal states, so a difference is damage or a bug, and nobody can tell by himself on which side he is. The rule:

    a majority of the voters has one digest and ours is another   this node stops, and its state is made anew
    digests differ and no majority is known for one of them       nobody serves, until more are known

Silence is no difference: who is away or behind says nothing. What a node has said it says again in every new session,
and the last of it also after a restart: a doubt is not over because the nodes that are in it were started again.
"""

import struct
from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from holdfast.client.protocol.errors import InvariantBroken
from holdfast.cluster.messages import DIGEST_BYTES
from holdfast.storage import digest
from holdfast.storage.store import ReadTxn, WriteTxn
from holdfast.storage.tables import Table

EVERY = 256  # entries; the digest itself is kept up to date, telling it is all that this costs
KEPT = 64  # places that are remembered: a node further behind than that catches up first, and is compared then


_INDEX = struct.Struct(">Q")
_KEY = b"compared"  # beside the machine's own row, and no part of the digest


class StateDiverged(InvariantBroken):
    """This node's state is not that of the majority."""

    text = (
        "the state at index {index} differs from that of {others}: this node stops, and makes its state anew from "
        "snapshot and log when it is started. If that happens again, wipe it and bring it back under a new name"
    )
    fact_names = ("index", "others")
    index: int
    others: str


@dataclass(frozen=True, slots=True)
class Undecided:
    """Digests differ, and none is known to be the majority's."""

    index: int
    nodes: tuple[str, ...]


def remember(txn: WriteTxn, index: int) -> None:
    """For the transaction in which a state comes to this index."""
    if index % EVERY == 0:
        txn.put(Table.META, _KEY, _INDEX.pack(index) + own_digest(txn))


def remembered(txn: ReadTxn) -> tuple[int, bytes] | None:
    """The last place that this state has passed, and its digest there."""
    row = txn.get(Table.META, _KEY)
    return None if row is None else (*_INDEX.unpack_from(row), row[_INDEX.size :])


def own_digest(txn: ReadTxn) -> bytes:
    return digest.maintained(txn).to_bytes(DIGEST_BYTES, "big")


class Comparing:
    """What one node knows about the states of all."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._told: OrderedDict[int, dict[str, bytes]] = OrderedDict()

    @staticmethod
    def next_place(index: int) -> int:
        """The first index above this one at which states are compared."""
        return (index // EVERY + 1) * EVERY

    def tell(self, node: str, index: int, digest: bytes) -> None:
        """A node's digest at an index; our own is one of them."""
        if index % EVERY:
            return
        self._told.setdefault(index, {})[node] = digest
        while len(self._told) > KEPT:
            del self._told[min(self._told)]

    @property
    def own(self) -> list[tuple[int, bytes]]:
        """What this node has said."""
        return [(index, told[self._me]) for index, told in self._told.items() if self._me in told]

    def forget(self) -> None:
        """Our state was replaced by another: what we said of the former one does not hold."""
        for told in self._told.values():
            told.pop(self._me, None)

    def verdict(self, voters: Collection[str]) -> StateDiverged | Undecided | None:
        """None while nothing differs. The newest place decides at which we and a majority are known."""
        for index in sorted(self._told, reverse=True):
            told = {node: digest for node, digest in self._told[index].items() if node in voters or node == self._me}
            counts = Counter(digest for node, digest in told.items() if node in voters)
            digest, count = counts.most_common(1)[0] if counts else (b"", 0)
            if count > len(voters) // 2 and self._me in told:
                if told[self._me] == digest:
                    return None
                others = ", ".join(sorted(node for node, theirs in told.items() if theirs == digest))
                return StateDiverged(index=index, others=others)
            if len(set(told.values())) > 1 and count <= len(voters) // 2:
                return Undecided(index, tuple(sorted(told)))
        return None
