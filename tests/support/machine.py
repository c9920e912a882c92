"""A state machine on a store, driven command by command through real log bytes."""

from collections.abc import Sequence

from holdfast.client.protocol.columns import MessageParts, pack
from holdfast.client.protocol.commands import (
    Command,
    Envelope,
    OpenSession,
    Produce,
    Stage,
    TimeStep,
    Touch,
)
from holdfast.client.protocol.queries import Query
from holdfast.client.protocol.replies import Answer, Leased, Reply
from holdfast.client.protocol.values import LOCAL_PRINCIPAL, QueueId, SessionId, TxnId
from holdfast.storage import machine, views
from holdfast.storage.effects import Effect
from holdfast.storage.entry import decode_entry, encode_entry
from holdfast.storage.memory_store import MemoryStore
from holdfast.storage.state import View, content_hash
from holdfast.storage.store import Store
from holdfast.storage.tables import TABLES

START_MS = 1_700_000_000_000


def session_id(number: int) -> SessionId:
    return SessionId(number.to_bytes(16, "big"))


def numbered(command: Command) -> bool:
    """Whether a command takes a number of its session (A1)."""
    match command:
        case OpenSession() | Touch() | TimeStep() | Stage():
            return False
        case Produce():
            return command.client_id is None
        case _:
            return True


def produce(queue_id: int, *messages: bytes | MessageParts, **named: object) -> Produce:
    """A Produce as the node that proposes it has it: with its content hash."""
    columns, body = pack([m if isinstance(m, MessageParts) else MessageParts(m) for m in messages])
    return Produce(
        queue_id=QueueId(queue_id),
        columns=columns,
        body=body,
        content_hash=content_hash(columns, body),
        **named,  # type: ignore[arg-type]
    )


def stage(
    txn: TxnId, queue_id: int, *messages: bytes | MessageParts, part: int = 0, attempt: str = "a", chunk: int = 0,
    expires_ms: int = 60_000,
) -> Stage:  # fmt: skip
    columns, body = pack([m if isinstance(m, MessageParts) else MessageParts(m) for m in messages])
    return Stage(
        txn=txn,
        part=part,
        attempt=attempt,
        chunk=chunk,
        queue_id=QueueId(queue_id),
        expires_ms=expires_ms,
        columns=columns,
        body=body,
        content_hash=content_hash(columns, body),
    )


class Machine:
    """One replica. Time stands still until `pass_ms`; each call is one entry."""

    def __init__(self, store: Store | None = None, *, index: int = 0, now_ms: int = START_MS) -> None:
        self.store: Store = store if store is not None else MemoryStore(tables=TABLES)
        self.index = index
        self.now_ms = now_ms
        self.effects: tuple[Effect, ...] = ()
        self.log: list[tuple[int, bytes]] = []
        self._numbers: dict[bytes, int] = {}

    def pass_ms(self, milliseconds: int) -> None:
        self.now_ms += milliseconds

    def envelope(self, command: Command, session: int = 1) -> Envelope:
        """The next request of a session; as if the client had got every answer so far."""
        owner = session_id(session)
        number = 0
        if numbered(command):
            number = self._numbers[owner] = self._numbers.get(owner, 0) + 1
        return Envelope(
            principal=LOCAL_PRINCIPAL, command=command, session=owner, request_seq=number, done_below=max(number - 8, 0)
        )

    def entry(self, envelopes: Sequence[Envelope]) -> tuple[Answer, ...]:
        """Commit and apply one entry."""
        self.index += 1
        data = encode_entry(self.now_ms, envelopes)
        self.log.append((self.index, data))
        return self.replay(self.index, data)

    def replay(self, index: int, data: bytes) -> tuple[Answer, ...]:
        """Apply an entry of the log, as any replica does."""
        self.index = index
        decoded = decode_entry(index, data)
        applied = self.store.transact(lambda txn: machine.apply(txn, decoded))
        self.effects = applied.effects
        return applied.answers

    def do(self, command: Command, session: int = 1) -> Reply:
        """One command in an entry of its own."""
        return self.entry([self.envelope(command, session)])[0].reply

    def ask(self, query: Query) -> Reply:
        with self.store.read() as txn:
            return views.answer(txn, query).reply

    def payloads(self, queue_id: int, leased: Reply) -> list[bytes]:
        """The bodies that a lease's answer carries."""
        assert isinstance(leased, Leased), leased
        with self.store.read() as txn:
            full = views.deliver(txn, queue_id, leased)
            return [
                bytes(piece.body[begin:end])
                for piece in full.batches
                for begin, end in _bounds(piece.columns.ends, piece.columns.start)
            ]

    def digest(self) -> int:
        with self.store.read() as txn:
            return View(txn).meta.digest


def _bounds(ends: bytes, start: int) -> list[tuple[int, int]]:
    stops = [int.from_bytes(ends[at : at + 4], "little", signed=True) - start for at in range(0, len(ends), 4)]
    return list(zip([0, *stops], stops, strict=False))
