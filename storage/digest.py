"""The digest of the whole state, recomputed from the rows as they are on disk.

The one in the meta row follows every change; two replicas compare that one at equal applied index. This one says
whether the rows still are what the changes made them: at rest, after a snapshot, in a slow scrub.
"""

from holdfast.storage.rows import unpack_meta
from holdfast.storage.state import DIGEST_MASK, row_hash
from holdfast.storage.store import ReadTxn
from holdfast.storage.tables import META_KEY, Table

_ABOVE = b"\xff" * 64


def maintained(txn: ReadTxn) -> int:
    data = txn.get(Table.META, META_KEY)
    return 0 if data is None else unpack_meta(data).digest


def recomputed(txn: ReadTxn) -> int:
    """Reads every row once; bodies count by their stored checksum and are not hashed again."""
    total = 0
    for table in Table:
        if table == Table.META:
            continue
        for key, value in txn.scan(table, b"", _ABOVE):
            total += row_hash(table, key, value)
    return total & DIGEST_MASK
