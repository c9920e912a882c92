"""Random commands that make sense now and then: what to ask next, from what the answers so far have told.

Small numbers on purpose: few queues, groups, sessions, keys and versions, so that commands meet each other. Leases,
dead letters, producers and transactions are chosen from known, over, foreign and invented ones, so that refusals are as
common as successes.
"""

from dataclasses import dataclass, field
from random import Random

from holdfast.client.protocol.columns import MessageParts
from holdfast.client.protocol.commands import (
    Abort,
    AckBatch,
    Cancel,
    Command,
    CreateGroup,
    CreateQueue,
    DeleteGroup,
    DeleteQueue,
    DropDead,
    Envelope,
    Extend,
    ForgetProducer,
    ForgetTxn,
    Lease,
    Nack,
    OpenProducer,
    OpenSession,
    Part,
    Produce,
    Publish,
    PurgeQueue,
    Redrive,
    RedriveToOrigin,
    Release,
    ReportCursor,
    Reschedule,
    Seek,
    SetLimits,
    Stage,
    TimeStep,
    Touch,
    Transaction,
    UpdateGroup,
    UpdateQueue,
)
from holdfast.client.protocol.errors import HoldfastError, ProducerUnknown, SessionExpired
from holdfast.client.protocol.replies import (
    Answer,
    Done,
    Failed,
    Leased,
    Produced,
    ProducerOpened,
    QueueCreated,
    Reply,
    Settled,
    Started,
)
from holdfast.client.protocol.values import (
    Backoff,
    GroupSettings,
    Job,
    LeaseId,
    QueueId,
    QueueSettings,
    SessionId,
    Stream,
    TxnId,
)
from tests.support.machine import numbered, produce, session_id, stage

NAMES = ("alpha", "beta", "gamma", "grave")
GROUPS = ("default", "fast", "slow")
CLIENTS = ("svc", "job")
SESSIONS = (1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 4)


@dataclass(frozen=True)
class Theme:
    """What one run is about: commands that come more often, settings that its queues always have."""

    name: str
    likes: dict[str, float] = field(default_factory=dict)
    settings: dict[str, tuple[object, ...]] = field(default_factory=dict)
    moves: float = 0.3  # how likely a new queue moves its dead letters to another one


THEMES = (
    Theme("anything"),
    Theme(
        "dead letters",
        {"nack": 3, "redrive": 6, "redrive_to_origin": 8, "seek": 2, "delete_queue": 2, "delete_group": 3},
        {
            "max_delivery_attempts": (1, 2),
            "max_backlog_messages": (4, 6, None, None),
            "dead_retention_ms": (None, None, None, 9_000),
            "replay_ms": (None, 60_000),
            "drop_after_ms": (None,),
            "drop_after_bytes": (None,),
        },
        moves=0.9,
    ),
    Theme(
        "limits",
        {
            "set_limits": 15,
            "create_queue": 10,
            "create_group": 3,
            "stage": 3,
            "publish": 3,
            "abort": 3,
            "report_cursor": 8,
        },
        {"history": (True,), "producer_expiry_ms": (None, None, 30_000), "max_backlog_messages": (None,)},
    ),
    Theme(
        "leases",
        {"lease": 2, "extend": 5, "nack": 2, "release": 2, "redrive": 0.3, "seek": 0.3, "purge": 0.3, "set_limits": 2},
        {
            "max_lease_ms": (30_000,),
            "visibility_timeout_ms": (1_000, 30_000),
            "max_in_flight_per_session": (2, 5, None),
            "backoff": (Backoff("exponential", 5, 1_000), Backoff("fixed", 5_000, 0)),
            "max_nack_delay_ms": (100, 604_800_000),
            "max_ack_holes": (1, 1, 2),
            "max_delivery_attempts": (2, 3, 5),
            "history": (True, False),
        },
    ),
    Theme(
        "retention",
        {"produce": 2, "report_cursor": 4, "seek": 3, "create_group": 3, "cancel": 2, "reschedule": 2},
        {"replay_ms": (500, 30_000, None), "replay_bytes": (10, 60, None), "drop_after_ms": (50, 30_000, None, None)},
    ),
    Theme(
        "purges",
        {
            "purge": 8,
            "lease": 2,
            "nack": 2,
            "release": 3,
            "redrive": 4,
            "seek": 2,
            "create_group": 2,
            "extend": 0.5,
            "stage": 0.3,
            "publish": 0.3,
            "abort": 0.3,
            "set_limits": 0.2,
            "delete_queue": 0.3,
        },
        {
            "visibility_timeout_ms": (5_000, 30_000),
            "max_delivery_attempts": (2, 3, 5),
            "max_ack_holes": (1, 2, 10_000),
            "max_in_flight": (None, None, 5),
            "max_backlog_messages": (None,),
            "max_backlog_bytes": (None,),
            "drop_after_ms": (None,),
            "drop_after_bytes": (None,),
        },
        moves=0.1,
    ),
)
PURGES = THEMES[-1]


PACES = (
    (0, 0, 0, 0, 0, 1, 1, 5, 50, 500, 5_000, 30_000),
    (0, 0, 0, 0, 0, 0, 0, 1, 1, 5, 50, 500),
    (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 5_000),
)


@dataclass
class Known:
    """What a careless observer remembers."""

    open: set[int] = field(default_factory=set)  # sessions
    queues: dict[str, int] = field(default_factory=dict)
    groups: dict[int, set[str]] = field(default_factory=dict)
    gone: list[int] = field(default_factory=list)
    graves: set[str] = field(default_factory=set)  # names of queues that dead letters are moved to
    leases: list[tuple[int, int, str, int, int, int]] = field(default_factory=list)  # id, q, group, session, lo, hi
    seqs: dict[tuple[int, str], int] = field(default_factory=dict)
    epochs: dict[tuple[int, str], int] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)
    sent: list[Envelope] = field(default_factory=list)
    staged: list[Stage] = field(default_factory=list)
    deaths: list[tuple[int, str, int, int]] = field(default_factory=list)  # q, group, version, dead_seq
    tail: int = 1


class Generator:
    """Draws envelopes and learns from answers. Each one has a taste of its own: which commands it likes how much."""

    def __init__(self, rng: Random, theme: Theme = THEMES[0]) -> None:
        self.rng = rng
        self.theme = theme
        self.known = Known()
        self._taste: dict[str, float] = {}
        self._favourites: list[str] = []
        self._pace: tuple[int, ...] = ()

    def step_ms(self) -> int:
        """How much time passes before the next entry."""
        if not self._pace:
            self._pace = self.rng.choice(PACES)
        if self.rng.random() < 0.01:
            return self.rng.choice((-5_000, 7_300_000))
        return self.rng.choice(self._pace)

    def entry(self) -> list[Envelope]:
        return [self.envelope() for _ in range(self.rng.choice((1, 1, 1, 2, 3, 5)))]

    def envelope(self) -> Envelope:
        rng, known = self.rng, self.known
        if known.sent and rng.random() < 0.06:
            return rng.choice(known.sent[-20:])  # asked twice, perhaps late
        session = rng.choice(SESSIONS)
        unknown = session not in known.open and rng.random() < 0.9
        command = self.open_session() if unknown else self.command()
        if isinstance(command, OpenSession):
            known.open.add(session)
        elif rng.random() < 0.85:
            session = self._owner(command, session)
        number = 0
        if numbered(command):
            number = known.numbers[session] = known.numbers.get(session, 0) + 1
            if rng.random() < 0.02:
                number = max(number - rng.randrange(6), 0)
            if rng.random() < 0.3:
                known.done[session] = max(number - rng.randrange(4), 0)
        principal = "local" if rng.random() < 0.995 else "mallory"
        envelope = Envelope(
            principal=principal,
            command=command,
            session=session_id(session) if rng.random() < 0.995 else SessionId(b""),
            request_seq=number,
            done_below=number + 1 if rng.random() < 0.003 else known.done.get(session, 0),
        )
        known.sent.append(envelope)
        return envelope

    def _owner(self, command: Command, session: int) -> int:
        """The session whose lease a command speaks of, if it speaks of one."""
        item = command.items[0] if isinstance(command, Transaction) else command
        lease = item.lease_id if isinstance(item, Extend) else 0
        if isinstance(item, AckBatch | Nack | Release):
            lease = item.ranges[0][0]
        return next((owner for lease_id, _, _, owner, _, _ in self.known.leases if lease_id == lease), session)

    def learn(self, envelope: Envelope, answer: Answer) -> None:
        known, command, reply = self.known, envelope.command, answer.reply
        if isinstance(reply, Failed) and isinstance(reply.error, SessionExpired):
            known.open.discard(int.from_bytes(envelope.session, "big"))
        if isinstance(reply, QueueCreated) and isinstance(command, CreateQueue):
            known.queues[command.name] = reply.queue_id
            known.groups[reply.queue_id] = set(command.groups)
        if isinstance(command, DeleteQueue):
            for name in [name for name, q in known.queues.items() if q == command.queue_id]:
                known.gone.append(known.queues[name])
                if type(reply).__name__ == "Done":
                    del known.queues[name]
        if isinstance(reply, Leased) and isinstance(command, Lease):
            owner = int.from_bytes(envelope.session, "big")
            for grant in reply.grants:
                known.leases.append((reply.lease_id, command.queue_id, command.group, owner, grant.first, grant.last))
                known.tail = max(known.tail, grant.last)
        if isinstance(command, AckBatch | Nack | Release) and isinstance(reply, Settled) and reply.count:
            over = {lease for lease, _, _ in command.ranges} if self.rng.random() < 0.7 else set()
            known.leases = [lease for lease in known.leases if lease[0] not in over]
        if isinstance(reply, Produced):
            known.tail = max(known.tail, reply.first_version + reply.count - 1)
        if isinstance(command, CreateGroup) and isinstance(reply, Started):
            known.groups.setdefault(command.queue_id, set()).add(command.group)
        if isinstance(command, DeleteGroup) and isinstance(reply, Done):
            known.groups[command.queue_id].discard(command.group)
        if isinstance(command, Produce | OpenProducer) and command.client_id is not None:
            self._learn_producer(command, reply)

    def _learn_producer(self, command: Produce | OpenProducer, reply: Reply) -> None:
        """What a producer would know of its numbers and its epoch."""
        known, who = self.known, (int(command.queue_id), str(command.client_id))
        if isinstance(reply, ProducerOpened):
            known.epochs[who], known.seqs[who] = reply.epoch, reply.high_water
        elif isinstance(reply, Produced) and isinstance(command, Produce) and not reply.replayed:
            known.seqs[who] = command.first_seq + reply.count - 1
        elif isinstance(reply, Failed):
            facts = reply.error.facts
            known.seqs[who] = facts.get("high_water", known.seqs.get(who, 0))
            known.epochs[who] = facts.get("epoch", known.epochs.get(who, 0))
            if isinstance(reply.error, ProducerUnknown):
                known.epochs[who] = known.seqs[who] = 0

    # Commands

    def command(self) -> Command:
        """One command; a value that refuses to be built is the business of other tests, and another one is drawn."""
        while True:
            try:
                return self._draw()
            except HoldfastError:
                continue

    def _draw(self) -> Command:
        rng = self.rng
        if not self.known.queues or rng.random() < 0.03:
            return self.create_queue() if rng.random() < 0.7 else self.open_session()
        bare = sorted(q for q in self.known.queues.values() if not self.known.groups.get(q))
        if bare and rng.random() < 0.1:
            return CreateGroup(queue_id=QueueId(rng.choice(bare)), group="default", start="earliest")
        weighted = (
            (30, self.produce),
            (26, self.lease),
            (16, self.ack),
            (10, self.nack),
            (3, self.release),
            (4, self.extend),
            (3, self.touch),
            (1, self.time_step),
            (2, self.open_session),
            (0.3, self.create_queue),
            (3, self.open_producer),
            (1, self.forget_producer),
            (3, self.cancel),
            (3, self.reschedule),
            (4, self.redrive),
            (2, self.redrive_to_origin),
            (1, self.drop_dead),
            (3, self.transaction),
            (3, self.stage),
            (2, self.publish),
            (1, self.abort),
            (1, self.update_queue),
            (1, self.purge),
            (2, self.create_group),
            (1, self.update_group),
            (2, self.seek),
            (1, self.report_cursor),
            (0.4, self.delete_group),
            (0.3, self.delete_queue),
            (0.3, self.forget_txn),
            (1, self.set_limits),
        )
        for _, make in weighted:
            if make.__name__ not in self._taste:
                self._taste[make.__name__] = rng.choice((0.2, 1.0, 1.0, 3.0)) * self.theme.likes.get(make.__name__, 1.0)
        weights = [weight * self._taste[make.__name__] for weight, make in weighted]
        command: Command = rng.choices([make for _, make in weighted], weights)[0]()
        return command

    def queue(self) -> QueueId:
        rng, known = self.rng, self.known
        if rng.random() < 0.02:
            return QueueId(rng.choice([*known.gone, 99]))
        return QueueId(rng.choice(sorted(known.queues.values())))

    def group(self) -> str:
        return self.rng.choices(GROUPS, (8, 2, 1))[0]

    def group_of(self, q: int) -> str:
        """A group that the queue has, mostly."""
        there = sorted(self.known.groups.get(q, ()))
        return self.rng.choice(there) if there and self.rng.random() < 0.95 else self.group()

    def create_queue(self) -> CreateQueue:
        rng = self.rng
        name = rng.choice(NAMES)
        groups = rng.choice(
            (("default",), ("default",), ("default",), ("default", "fast"), ("default", "fast", "slow"), ())
        )
        return CreateQueue(name=name, settings=self.queue_settings(), groups=groups)

    def queue_settings(self) -> QueueSettings:
        rng = self.rng
        changes = dict(self.queue_changes(rng.randrange(7)))
        changes |= {name: rng.choice(values) for name, values in self.theme.settings.items()}
        if self.known.queues and rng.random() < self.theme.moves:
            target = rng.choice(sorted(self.known.queues))
            self.known.graves.add(target)
            changes |= {"dlq_strategy": "move", "dlq_queue": target}
        return QueueSettings(**changes)  # type: ignore[arg-type]

    def queue_changes(self, count: int) -> list[tuple[str, object]]:
        rng = self.rng
        options: list[tuple[str, tuple[object, ...]]] = [
            ("visibility_timeout_ms", (10, 1_000, 30_000, 30_000)),
            ("max_delivery_attempts", (1, 2, 2, 3)),
            ("max_ack_holes", (1, 2, 3)),
            ("max_in_flight", (1, 3, 5, None)),
            ("max_in_flight_per_session", (1, 2, 4, None)),
            ("max_backlog_messages", (5, 10, 20, None)),
            ("max_backlog_bytes", (20, 60, None)),
            ("max_message_bytes", (3, 8, None)),
            ("default_message_ttl_ms", (1, 50, 5_000, None)),
            ("on_expired", ("discard", "dead_letter")),
            ("dlq_strategy", ("park", "discard", "move", "move")),
            ("dlq_queue", (*NAMES, None)),
            ("dead_retention_ms", (1, 5_000, None)),
            ("producer_expiry_ms", (1, 500, 30_000, None)),
            ("max_lease_ms", (30_000, 60_000)),
            ("max_nack_delay_ms", (0, 100, 604_800_000)),
            ("history", (True, False)),
            ("backoff", (Backoff(), Backoff("fixed", 50, 0), Backoff("exponential", 5, 1_000))),
            ("backoff_on_expiry", (True, False)),
            ("count", ("leased", "begun")),
            ("replay_ms", (0, 500, 30_000, None)),
            ("replay_bytes", (0, 10, 30, None)),
            ("drop_after_ms", (50, 30_000, None)),
            ("drop_after_bytes", (10, 30, None)),
        ]
        if not self._favourites:
            self._favourites = rng.sample([name for name, _ in options], rng.randrange(3, 12))
        liked = [option for option in options if option[0] in self._favourites]
        pool = liked if count <= len(liked) and rng.random() < 0.7 else options
        return [(name, rng.choice(values)) for name, values in rng.sample(pool, count)]

    def update_queue(self) -> UpdateQueue:
        return UpdateQueue(queue_id=self.queue(), changes=tuple(self.queue_changes(self.rng.randrange(1, 4))))

    def delete_queue(self) -> DeleteQueue:
        return DeleteQueue(queue_id=self.queue())

    def purge(self) -> PurgeQueue:
        rng = self.rng
        q = self.queue()
        group = None if rng.random() < 0.3 else self.group_of(q)
        return PurgeQueue(queue_id=q, group=group, in_flight=rng.random() < 0.3, dead=rng.random() < 0.3)

    def start(self) -> str | int:
        return self.rng.choice(("earliest", "earliest", "latest", self.version(), self.version()))

    def create_group(self) -> CreateGroup:
        settings = GroupSettings(**dict(self.group_changes(self.rng.randrange(3))))  # type: ignore[arg-type]
        return CreateGroup(queue_id=self.queue(), group=self.group(), start=self.start(), settings=settings)  # type: ignore[arg-type]

    def group_changes(self, count: int) -> list[tuple[str, object]]:
        names = GroupSettings.__slots__
        return [change for change in self.queue_changes(24) if change[0] in names][:count]

    def update_group(self) -> UpdateGroup:
        q = self.queue()
        return UpdateGroup(queue_id=q, group=self.group_of(q), changes=tuple(self.group_changes(2)))

    def delete_group(self) -> DeleteGroup:
        return DeleteGroup(queue_id=self.queue(), group=self.group())

    def seek(self) -> Seek:
        q = self.queue()
        return Seek(queue_id=q, group=self.group_of(q), to=self.start(), dead=self.rng.random() < 0.3)  # type: ignore[arg-type]

    def report_cursor(self) -> ReportCursor:
        return ReportCursor(queue_id=self.queue(), reader=self.rng.choice(("spark", "audit")), version=self.version())

    def open_session(self) -> OpenSession:
        return OpenSession(consumer_id=self.rng.choice(("", "ann", "bob")))

    def message(self) -> MessageParts:
        rng = self.rng
        payload = bytes(rng.choice(b"abcdef") for _ in range(rng.randrange(5)))
        if rng.random() < 0.6:
            return MessageParts(payload)
        return MessageParts(
            payload,
            key=rng.choice((None, "k", "j")),
            headers=rng.choice((None, {"h": "v"}, {"h": "", "trace": "1"})),
            delay_ms=rng.choice((None, None, 0, 1, 50, 5_000)),
            not_before_ms=rng.choice((None, None, None, 5, 1_700_000_010_000)),
            ttl_ms=rng.choice((None, None, 1, 50, 5_000)),
        )

    def messages(self) -> list[MessageParts]:
        rng = self.rng
        if rng.random() < 0.3:
            message = self.message()
            return [message] * rng.randrange(1, 5)
        return [self.message() for _ in range(rng.randrange(1, 5))]

    def produce(self):  # type: ignore[no-untyped-def]
        rng, known = self.rng, self.known
        q = self.queue()
        messages = self.messages()
        if rng.random() < 0.25:
            return produce(q, *messages)
        client = rng.choice(CLIENTS)
        high = known.seqs.get((q, client), 0)
        first = max(1, high + rng.choice((1, 1, 1, 1, 1, 0, -1, 3)))
        epoch = known.epochs.get((q, client), 0)
        return produce(
            q,
            *messages,
            client_id=client if rng.random() < 0.99 else "moved/1",
            epoch=max(epoch + rng.choice((0, 0, 0, 0, 0, 0, 0, 0, 0, 0, -1, 1)), 0),
            numbering_epoch=max(epoch - rng.choice((0,) * 9 + (1,)), 0),  # an outbox has numbers of former epochs
            first_seq=first,
            after_seq=rng.choice((None, None, None, high, high, high, high, high + 1)),
            done_below=rng.choice((None, None, 1, first, max(high - 2, 1))),
        )

    def open_producer(self) -> OpenProducer:
        q, client = self.queue(), self.rng.choice(CLIENTS)
        return OpenProducer(queue_id=q, client_id=client, nonce=bytes([self.rng.randrange(3)]) * 16)

    def forget_producer(self) -> ForgetProducer:
        return ForgetProducer(queue_id=self.queue(), client_id=self.rng.choice(CLIENTS))

    def version(self) -> int:
        return self.rng.randrange(1, self.known.tail + 3)

    def ranges(self) -> tuple[tuple[int, int], ...]:
        cuts = sorted({self.version() for _ in range(self.rng.choice((1, 1, 2, 4)) * 2)})
        if len(cuts) == 1:
            return ((cuts[0], cuts[0]),)
        return tuple((cuts[at], cuts[at + 1] - (at + 2 < len(cuts))) for at in range(0, len(cuts) - 1, 2))

    def cancel(self) -> Cancel:
        return Cancel(queue_id=self.queue(), versions=self.high_ranges())

    def high_ranges(self) -> tuple[tuple[int, int], ...]:
        """Ranges near the tail, where something may still be untouched."""
        if self.rng.random() < 0.3:
            return self.ranges()
        first = max(1, self.known.tail - self.rng.randrange(4))
        return ((first, first + self.rng.randrange(3)),)

    def reschedule(self) -> Reschedule:
        rng = self.rng
        when: dict[str, int] = rng.choice(
            ({"delay_ms": 0}, {"delay_ms": 50}, {"delay_ms": 5_000}, {"not_before_ms": 1_700_000_020_000})
        )
        return Reschedule(queue_id=self.queue(), versions=self.high_ranges(), **when)

    def lease(self) -> Lease:
        rng = self.rng
        q = self.queue()
        return Lease(
            queue_id=q,
            group=self.group_of(q),
            max_messages=rng.choice((1, 1, 2, 3, 10)),
            max_bytes=rng.choice((1, 4, 8, 1_000_000)),
            visibility_timeout_ms=rng.choice((None, None, None, None, 1, 50, 5_000, 31_000)),
            auto_ack=rng.random() < 0.08,
        )

    def known_lease(self) -> tuple[int, int, str, int, int, int]:
        rng, known = self.rng, self.known
        if not known.leases or rng.random() < 0.05:
            return rng.choice((0, 5, 10_000)), self.queue(), self.group(), 1, 1, 2
        return rng.choice(known.leases[-5:]) if rng.random() < 0.9 else rng.choice(known.leases)

    def settle_ranges(self) -> tuple[int, str, tuple[tuple[int, int, int], ...]]:
        rng = self.rng
        lease, q, group, _, lo, hi = self.known_lease()
        ranges = []
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            if rng.random() < 0.2:
                lease, _, _, _, lo, hi = self.known_lease()
            first = max(1, rng.choice((lo, lo, lo, lo + 1, lo - 1)))
            last = max(first, rng.choice((hi, hi, lo, hi + 1, hi - 1)))
            ranges.append((lease, first, last))
        return q, group, tuple(ranges)

    def ack(self) -> AckBatch:
        q, group, ranges = self.settle_ranges()
        return AckBatch(queue_id=QueueId(q), group=group, ranges=ranges)

    def nack(self) -> Nack:
        rng = self.rng
        q, group, ranges = self.settle_ranges()
        when: dict[str, int] = {}
        if rng.random() < 0.6:
            when = rng.choice(
                ({"delay_ms": 0}, {"delay_ms": 50}, {"delay_ms": 50}, {"not_before_ms": 1_700_000_005_000})
            )
        elif rng.random() < 0.05:
            when = {"delay_ms": 700_000_000}
        return Nack(
            queue_id=QueueId(q), group=group, ranges=ranges, error=rng.choice((None, "boom", "")),
            dead=rng.random() < 0.25, **when,
        )  # fmt: skip

    def release(self) -> Release:
        q, group, ranges = self.settle_ranges()
        return Release(queue_id=QueueId(q), group=group, ranges=ranges)

    def extend(self) -> Extend:
        rng = self.rng
        lease, q, group, _, lo, hi = self.known_lease()
        begin = rng.choice(((), (), ((lo, hi),), ((lo, lo),)))
        return Extend(
            queue_id=QueueId(q),
            group=group,
            lease_id=LeaseId(lease),
            visibility_timeout_ms=rng.choice((None, 1, 5_000, 50_000)),
            begin=begin,
        )

    def touch(self) -> Touch:
        q = self.queue()
        return Touch(queue_id=q, group=None if self.rng.random() < 0.5 else self.group_of(q))

    def time_step(self) -> TimeStep:
        return TimeStep(by_ms=self.rng.choices((1, 50, 5_000, 100_000, 90_000_000), (5, 5, 5, 5, 1))[0])

    def dead_ranges(self) -> tuple[int, str, tuple[tuple[int, int, int], ...]]:
        """A queue, a group, and deaths there: known ones, perhaps with a neighbour, or invented ones."""
        rng, known = self.rng, self.known
        if not known.deaths or rng.random() < 0.15:
            versions = sorted({self.version(), self.version(), self.version()})
            return self.queue(), self.group(), tuple((v, v, rng.randrange(1, 5)) for v in versions)
        q, group, version, dead_seq = rng.choice(known.deaths)
        chosen = {version: (version, version + rng.choice((0, 0, 1, 3)), dead_seq)}
        for other_q, other_group, other, other_seq in known.deaths:
            above = other > max(last for _, last, _ in chosen.values())
            if (other_q, other_group) == (q, group) and above and rng.random() < 0.3:
                chosen[other] = (other, other, other_seq)
        return q, group, tuple(sorted(chosen.values()))

    def redrive(self) -> Redrive:
        q, group, dead = self.dead_ranges()
        return Redrive(queue_id=QueueId(q), group=group, dead=dead)

    def redrive_to_origin(self) -> RedriveToOrigin:
        graves = [self.known.queues[name] for name in sorted(self.known.graves & self.known.queues.keys())]
        q = QueueId(self.rng.choice(graves)) if graves and self.rng.random() < 0.8 else self.queue()
        versions = self.rng.choice((self.ranges(), ((1, 60),)))
        return RedriveToOrigin(queue_id=q, group=self.group_of(q), versions=versions)

    def drop_dead(self) -> DropDead:
        q, group, dead = self.dead_ranges()
        return DropDead(queue_id=QueueId(q), group=group, dead=dead)

    def transaction(self) -> Transaction:
        items = []
        for _ in range(self.rng.randrange(1, 4)):
            make = self.rng.choice((self.ack, self.nack, self.plain_produce, self.plain_produce))
            items.append(make())
        return Transaction(items=tuple(items))

    def plain_produce(self):  # type: ignore[no-untyped-def]
        return produce(self.queue(), *self.messages())

    def txn(self) -> TxnId:
        rng = self.rng
        return rng.choice((Job("nightly"), Job("other"), Stream("app", rng.randrange(3))))

    def stage(self) -> Stage:
        rng = self.rng
        made = stage(
            self.txn(),
            self.queue(),
            *self.messages(),
            part=rng.randrange(2),
            attempt=rng.choice("ab"),
            chunk=rng.randrange(2),
            expires_ms=rng.choice((1, 5_000, 500_000)),
        )
        self.known.staged.append(made)
        return made

    def publish(self) -> Publish:
        rng, known = self.rng, self.known
        txn = known.staged[-1].txn if known.staged and rng.random() < 0.8 else self.txn()
        parts = []
        for part in (0, 1):
            attempt = rng.choice("ab")
            named = [made for made in known.staged if (made.txn, made.part, made.attempt) == (txn, part, attempt)]
            chunks = {made.chunk: made for made in named}
            use = [chunks[chunk] for chunk in range(len(chunks)) if chunk in chunks]
            if not use or rng.random() < 0.2:
                continue
            mark = 0
            for made in use:
                mark ^= int.from_bytes(made.content_hash[:8], "big")
            count = sum(made.columns.count for made in use) + (rng.random() < 0.05)
            parts.append(Part(part, attempt, len(use), count, mark))
        return Publish(txn=txn, parts=tuple(parts), fence=rng.choice(("query", "query", "query", "other")))

    def abort(self) -> Abort:
        return Abort(txn=self.txn(), attempts=self.rng.choice((None, ("a",), ("a", "b"))))

    def forget_txn(self) -> ForgetTxn:
        return ForgetTxn(txn=self.txn())

    def set_limits(self) -> SetLimits:
        """Small limits, and large ones again; but not for what is removed along the way, which does not come back."""
        rng = self.rng
        return SetLimits(
            changes=(
                rng.choice(
                    (
                        ("session_window", rng.choice((3, 256))),
                        ("session_idle_ms", 40_000),
                        ("sessions", rng.choice((2, 1_000_000))),
                        ("producer_window", rng.choice((1, 2, 1_024))),
                        ("producer_window", 1),
                        ("groups_per_queue", rng.choice((1, 2, 64))),
                        ("producers_per_queue", rng.choice((1, 100_000))),
                        ("readers_per_queue", 1),
                        ("cursor_hold_ms", 50),
                        ("leases_per_session", rng.choice((1, 2, 10_000))),
                        ("batch_messages", rng.choice((3, 10_000))),
                        ("batch_bytes", rng.choice((6, 4_194_304))),
                        ("message_bytes", rng.choice((3, 1_048_576))),
                        ("staged_bytes_per_txn", rng.choice((10, 1_000_000))),
                        ("staged_bytes", rng.choice((15, 1_000_000))),
                        ("job_memory_ms", rng.choice((500, 2_592_000_000))),
                        ("history_ms", 500),
                        ("queues", rng.choice((2, 3, 10_000))),
                    )
                ),
            )
        )
