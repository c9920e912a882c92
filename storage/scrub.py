"""Reads stored bodies again, a little at a time, so that damage is found before a consumer asks for them.

LMDB has no checksums of its own. A step is a short read transaction of its own, so that a long walk holds no old pages
back; what is stored or freed between two steps is met or not, and both are right.
"""

from xxhash import xxh3_128_digest

from holdfast.client.protocol.errors import BodyDamaged
from holdfast.storage.rows import CHECKSUM_BYTES, unpack_batch, unpack_dead
from holdfast.storage.store import ReadTxn
from holdfast.storage.tables import TOP, Table, k1

BEGIN = 0  # blobs count from 1


def step(txn: ReadTxn, after: int, budget_bytes: int) -> int | None:
    """Verify the bodies above blob `after`, at least one and else up to a size; where to go on, None at the end.

    Raises BodyDamaged, which names queue and version; 0 for what is staged and has no version yet.
    """
    for key, data in txn.scan(Table.BLOB, k1(after + 1), TOP):
        blob = int.from_bytes(key, "big")
        if xxh3_128_digest(memoryview(data)[CHECKSUM_BYTES:]) != data[:CHECKSUM_BYTES]:
            raise _damaged(txn, blob)
        budget_bytes -= len(data)
        if budget_bytes <= 0:
            return blob
    return None


def _damaged(txn: ReadTxn, blob: int) -> BodyDamaged:
    """Find out whose it is: once in a node's life, so it may take as long as it takes."""
    for key, data in txn.scan(Table.BATCH, k1(0), TOP):
        batch = unpack_batch(int.from_bytes(key[8:], "big"), data)
        if batch.blob == blob:
            return BodyDamaged(queue_id=int.from_bytes(key[:8], "big"), version=batch.first)
    for _, data in txn.scan(Table.DEAD, k1(0), TOP):
        row = unpack_dead(data)
        if row.blob == blob:
            return BodyDamaged(queue_id=0, version=row.span.lo)
    return BodyDamaged(queue_id=0, version=0)
