"""Every maximum of the protocol and of the rules, each with its reason.

`Limits` holds those that the fold reads: they live in replicated state and change by `SetLimits` alone,
because a limit that differed between nodes would make their states differ. The plain constants are
part of the format and never change without a new protocol version.
"""

from dataclasses import fields

from holdfast.client.protocol.quick import dataclass

U32_MAX = 2**32 - 1
U63_MAX = 2**63 - 1  # ids, versions and times: fits a signed 64-bit column (Arrow, SQL) without surprise

NAME_BYTES = 255  # a queue, group or reader name: fits a file name and, with its kind, an LMDB key
CLIENT_ID_BYTES = 255
CONSUMER_ID_BYTES = 255
KEY_BYTES = 1_024  # a message's label, not its payload
HEADERS_PER_MESSAGE = 64
HEADER_BYTES = 16_384  # all headers of one message, encoded
ERROR_TEXT_BYTES = 1_024  # a Nack's error text; a longer one is refused, and the client cuts it
SESSION_BYTES = 16
NONCE_BYTES = 16
TXN_ID_BYTES = 255

FRAME_HEADER_BYTES = 2_097_152  # columns of 65,536 settled ranges (24 bytes each) fit with room
FRAME_BODY_BYTES = 8_388_608  # twice the largest request body: a lease reply may carry more than a request
DEPTH_MAX = 4  # nesting of a header: no value of ours needs more
ELEMENTS_MAX = 20_000  # array and map elements of one header, so that a small frame cannot become a big heap
REPLY_ELEMENTS_MAX = 250_000  # the same for a node's reply: a page of 10,000 dead rows or history rows fits
UNSCANNED_BYTES = 1_024  # a header up to here is small whatever it claims: 3 MiB at worst, and soon refused
UNSCANNED_ELEMENTS = 256  # an array between nodes up to here likewise: as many again at each of 1,024 levels

SETTLE_RANGES = 65_536  # S2
VERSION_RANGES = 10_000  # ranges in a Cancel, Reschedule, Redrive or Extend
VERSIONS_NAMED = 10_000  # versions in all that one such command may name: one thread does the work; ask again for more
LEASE_MESSAGES = 10_000  # one lease
TRANSACTION_ITEMS = 256
STAGE_BYTES = 1_048_576  # body of one staged chunk (X2): chunks of many producers take turns in the log
PUBLISH_CHUNKS = 8_192  # one Publish is one log entry of metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the fold reads. Defaults are a new cluster's; `SetLimits` changes them for all nodes at once."""

    batch_messages: int = 10_000
    batch_bytes: int = 4_194_304
    message_bytes: int = 1_048_576
    queues: int = 10_000
    groups_per_queue: int = 64
    producers_per_queue: int = 100_000
    readers_per_queue: int = 1_000  # G3: all are looked at when a batch is held back, and when a place is needed
    producer_window: int = 1_024  # P2
    session_window: int = 256  # A1
    session_idle_ms: int = 86_400_000  # A1: 24 h
    sessions: int = 1_000_000
    leases_per_session: int = 10_000
    staged_bytes_per_txn: int = 4_294_967_296
    staged_bytes: int = 17_179_869_184
    job_memory_ms: int = 2_592_000_000  # X2: 30 days
    stamp_advance_ms: int = 3_600_000  # T1: one hour
    fold_ranges: int = 1_024  # T3: how much of what is due one command folds
    scan_batches: int = 4_096  # how many batches one Lease walks over to find something to deliver
    reap_rows: int = 256  # G5: rows of deleted things that one entry removes
    why_ranges: int = 4_096  # E1: how many runs of one group's settled past keep their reason
    history_rows: int = 1_000_000  # per queue, oldest go first
    history_ms: int = 604_800_000  # 7 days
    retention_batches: int = 64  # G3: how many batches one command looks at, to trim or free them
    cursor_hold_ms: int = 604_800_000  # G3: how long a silent reader holds `replay` back

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or not 1 <= value <= limit_max(field.name):
                raise ValueError(f"limit {field.name} must be 1 to {limit_max(field.name)}, not {value!r}")


def limit_max(name: str) -> int:
    """The largest value of a limit: windows stand in one row, whose parts are counted in 16 bits; readers are
    walked."""
    if name == "readers_per_queue":
        return 10_000
    return 65_535 if name in ("session_window", "producer_window") else 2**62
