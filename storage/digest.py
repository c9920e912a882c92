"""The digest of the whole state: what two replicas compare at an equal applied index.

The meta row keeps a sum over all other rows that follows every change; `maintained` adds the meta row itself: time,
steps, counters, limits. `recomputed` makes the same from the rows as they are on disk, and says whether they still are
what the changes made them: at rest, after a snapshot, in a slow scrub.
"""

from dataclasses import replace

from holdfast.storage.rows import Meta, pack_meta, unpack_meta
from holdfast.storage.state import DIGEST_MASK, row_hash
from holdfast.storage.store import ReadTxn
from holdfast.storage.tables import META_KEY, Table

_ABOVE = b"\xff" * 64


def maintained(txn: ReadTxn) -> int:
    meta = _meta(txn)
    return (meta.digest + _of_meta(meta)) & DIGEST_MASK


def recomputed(txn: ReadTxn) -> int:
    """Reads every row once; bodies count by their stored checksum and are not hashed again."""
    total = _of_meta(_meta(txn))
    for table in Table:
        if table == Table.META:
            continue
        for key, value in txn.scan(table, b"", _ABOVE):
            total += row_hash(table, key, value)
    return total & DIGEST_MASK


def _meta(txn: ReadTxn) -> Meta:
    data = txn.get(Table.META, META_KEY)
    return Meta() if data is None else unpack_meta(data)


def _of_meta(meta: Meta) -> int:
    return row_hash(Table.META, META_KEY, pack_meta(replace(meta, digest=0)))
