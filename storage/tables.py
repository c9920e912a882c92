"""Every table and every key's byte layout; nobody else builds keys.

Keys are big-endian, so that their byte order is their numeric order. `q` is a queue id, `gid` a group's permanent id,
`g` the id of one generation of it, `shelf`, `hold` and `grave` those under which its available, leased and dead ones
stand: Seek and Purge give a group new ids, and all that was kept under the old ones is unreachable at once and reaped
later (G5). Names never stand inside a longer key: they are interned to ids.
"""

import struct
from enum import IntEnum


class Table(IntEnum):
    META = 0  # one row
    NAME = 1  # kind, scope, name -> id
    QUEUE = 2  # q -> queue row (a short tombstone once deleted)
    GROUP = 3  # q gid -> group row
    BATCH = 4  # q first -> batch row
    BLOB = 5  # blob id -> checksum, columns, body
    SCHED = 6  # q due first -> count: batches with a due time (P6)
    TTL = 7  # q expires first -> count (P7)
    BACK = 8  # shelf lo -> span: came back, or fell due, and is available
    WAIT = 9  # shelf lo -> due, span: nacked, and away until then
    WAIT_DUE = 10  # shelf due lo -> nothing
    LEASE = 11  # hold lease -> lease row; g lease if it was auto-acked
    LEASE_DUE = 12  # hold (or g) deadline lowest lease -> nothing
    DONE = 13  # g lo -> hi, why: settled ranges; above the floor their runs are the holes
    FLIGHT = 14  # hold session -> versions and leases in flight
    DEAD = 15  # grave dead_seq -> dead row, under the number of its first death
    DEAD_DUE = 16  # grave died dead_seq -> nothing
    PIN = 17  # g lo -> hi: auto-acked ranges that a replay may still read
    PRODUCER = 18  # q client -> producer row
    SESSION = 19  # session -> session row
    SESSION_IDLE = 20  # last use, session -> nothing
    REPLY = 21  # session seq -> a reply too long for the session row
    TXN = 22  # kind, name -> what is staged under it, or what was published
    TXN_DUE = 23  # time, number -> key in TXN: when it is dropped or forgotten
    STAGE = 24  # number part hash-of-attempt chunk -> staged chunk
    READER = 25  # q name -> cursor
    HISTORY = 26  # q seq -> history row
    FREED = 27  # q lo -> hi: ranges above the lowest stored version whose storage is gone
    REAP = 28  # number -> what is left to remove
    KEPT = 29  # q first -> nothing: batches that are stored for replay only
    DEAD_AT = 30  # grave lo dead_seq -> nothing: a version may have died in several generations
    OPEN = 31  # shelf lo -> hi: not above the purge line and not settled: in flight when the purge came (G5)
    AGAIN = 32  # shelf lo -> hi: redriven, and not settled again
    SUM = 33  # q level block -> versions of delayed batches that begin in it


TABLES = tuple(table.name.lower() for table in Table)

# Those that every message meets, by themselves: to find a member in its enumeration takes longer than to build a key.
BATCH = Table.BATCH
BLOB = Table.BLOB
BACK = Table.BACK
LEASE = Table.LEASE
LEASE_DUE = Table.LEASE_DUE
DONE = Table.DONE
FLIGHT = Table.FLIGHT
PRODUCER = Table.PRODUCER
SESSION = Table.SESSION

KIND_QUEUE = b"q"
KIND_GROUP = b"g"

_ONE = struct.Struct(">Q")
_TWO = struct.Struct(">QQ")
_THREE = struct.Struct(">QQQ")
_FOUR = struct.Struct(">QQQQ")

META_KEY = b"m"
TOP = b"\xff" * 8  # above every u64 that is used

k1 = _ONE.pack
k2 = _TWO.pack
k3 = _THREE.pack
k4 = _FOUR.pack
u1 = _ONE.unpack
u2 = _TWO.unpack
u3 = _THREE.unpack
u4 = _FOUR.unpack


def queue_name_key(name: str) -> bytes:
    return KIND_QUEUE + name.encode()


def group_name_key(q: int, name: str) -> bytes:
    return KIND_GROUP + k1(q) + name.encode()


def after(prefix: bytes) -> bytes:
    """The first key above every key that begins with `prefix`, an id of which only ids follow."""
    return prefix + b"\xff" * 25


def session_key(hold: int, session: bytes) -> bytes:
    return k1(hold) + session


def text_key(q: int, text: str) -> bytes:
    """A row of queue `q` by a text: the text stands last, so that nothing can collide with it."""
    return k1(q) + text.encode()
