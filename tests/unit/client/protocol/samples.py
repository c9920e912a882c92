"""One value of every form, for tests that need some value and not any.

Each field is away from its default, but for those that are reserved.
"""

from typing import Any

from holdfast.client.protocol import commands as c
from holdfast.client.protocol import queries as q
from holdfast.client.protocol import replies as r
from holdfast.client.protocol.columns import MessageParts, pack
from holdfast.client.protocol.errors import BadFilter, LeaseExpired, NotLeader
from holdfast.client.protocol.messages import Answered, Declined, Hello, Inquiry, Ping, Pong, Request, Welcome, Withdraw
from holdfast.client.protocol.values import (
    Backoff,
    GroupSettings,
    Job,
    LeaseId,
    LogId,
    Place,
    QueueId,
    QueueSettings,
    SessionId,
    Stream,
    Version,
)

QUEUE = QueueId((1 << 48) | 7)
LEASE = LeaseId((1 << 48) | 300)
SESSION = SessionId(bytes(range(16)))
HASH = bytes(range(16, 32))
COLUMNS, BODY = pack(
    [
        MessageParts(b"first", key="k-1", headers={"trace": "ab"}, delay_ms=1_000, ttl_ms=60_000),
        MessageParts(b"", key="ключ", not_before_ms=1_700_000_000_000),
        MessageParts(b"third", headers={"a": "", "b": "ß"}, ttl_ms=60_000),
    ]
)
PLAIN_COLUMNS, PLAIN_BODY = pack([MessageParts(b"one"), MessageParts(b"two")])
GROUP_SETTINGS = GroupSettings(
    visibility_timeout_ms=5_000,
    max_delivery_attempts=3,
    max_in_flight=1_000,
    dlq_strategy="move",
    dlq_queue="dead/orders",
    backoff=Backoff("exponential", 100, 60_000),
    backoff_on_expiry=True,
    count="begun",
)
QUEUE_SETTINGS = QueueSettings(
    max_ack_holes=500,
    max_in_flight_per_session=64,
    max_backlog_messages=1_000_000,
    max_backlog_bytes=1 << 40,
    max_message_bytes=65_536,
    default_message_ttl_ms=86_400_000,
    on_expired="dead_letter",
    dead_retention_ms=2_592_000_000,
    replay_ms=0,
    replay_bytes=1 << 30,
    drop_after_ms=604_800_000,
    drop_after_bytes=1 << 35,
    producer_expiry_ms=31_536_000_000,
    max_lease_ms=3_600_000,
    max_nack_delay_ms=3_600_001,
    history=True,
    visibility_timeout_ms=10_000,
    max_delivery_attempts=9,
    max_in_flight=128,
    dlq_strategy="discard",
    dlq_queue="dead.orders",
    backoff=Backoff("fixed", 250),
    backoff_on_expiry=True,
    count="begun",
)
RANGES = ((LEASE, 1, 100), (LEASE + 1, 102, 102))
VERSIONS = ((1, 5), (9, 9), (61_000, 70_000))
DEAD = ((4, 4, 11), (70, 72, 900))
STREAM = Stream("app-1", 42)
PRODUCE = c.Produce(
    queue_id=QUEUE,
    columns=COLUMNS,
    body=BODY,
    client_id="svc",
    epoch=3,
    numbering_epoch=2,
    first_seq=101,
    after_seq=100,
    done_below=90,
    content_hash=HASH,
)
ACK = c.AckBatch(queue_id=QUEUE, group="default", ranges=RANGES)
NACK = c.Nack(queue_id=QUEUE, group="default", ranges=RANGES[:1], delay_ms=500, error="boom — späť", dead=True)

COMMANDS: list[Any] = [
    c.OpenSession(consumer_id="worker-1"),
    c.Touch(queue_id=QUEUE, group="fraud"),
    c.TimeStep(by_ms=7_200_000),
    c.SetLimits(changes=(("queues", 20_000), ("batch_bytes", 8_388_608))),
    c.SetRules(version=2),
    c.CreateQueue(name="orders/eu-1", settings=QUEUE_SETTINGS, groups=("default", "fraud")),
    c.UpdateQueue(
        queue_id=QUEUE, changes=(("replay_ms", None), ("history", False), ("backoff", Backoff("none", 1, 2)))
    ),
    c.DeleteQueue(queue_id=QUEUE),
    c.PurgeQueue(queue_id=QUEUE, group="fraud", in_flight=True, dead=True),
    c.CreateGroup(queue_id=QUEUE, group="fraud", start=17, settings=GROUP_SETTINGS),
    c.UpdateGroup(queue_id=QUEUE, group="fraud", changes=(("count", "leased"), ("max_in_flight", None))),
    c.DeleteGroup(queue_id=QUEUE, group="fraud"),
    c.Seek(queue_id=QUEUE, group="fraud", to="latest", dead=True),
    c.ReportCursor(queue_id=QUEUE, reader="nightly", version=4_000_000_000),
    c.OpenProducer(queue_id=QUEUE, client_id="svc", nonce=bytes(range(100, 116))),
    c.ForgetProducer(queue_id=QUEUE, client_id="svc"),
    PRODUCE,
    c.Cancel(queue_id=QUEUE, versions=VERSIONS),
    c.Reschedule(queue_id=QUEUE, versions=VERSIONS, not_before_ms=1_700_000_000_000),
    c.Lease(
        queue_id=QUEUE,
        group="default",
        max_messages=100,
        max_bytes=65_536,
        visibility_timeout_ms=45_000,
        auto_ack=True,
        wait_ms=5_000,
    ),
    ACK,
    NACK,
    c.Release(queue_id=QUEUE, group="default", ranges=RANGES),
    c.Extend(queue_id=QUEUE, group="default", lease_id=LEASE, visibility_timeout_ms=60_000, begin=VERSIONS[:2]),
    c.Redrive(queue_id=QUEUE, group="default", dead=DEAD),
    c.RedriveToOrigin(queue_id=QUEUE, group="default", versions=VERSIONS),
    c.DropDead(queue_id=QUEUE, group="default", dead=DEAD),
    c.Transaction(
        items=(
            ACK,
            c.Produce(queue_id=QUEUE, columns=COLUMNS, body=BODY, content_hash=HASH),
            NACK,
            c.Produce(queue_id=QUEUE, columns=PLAIN_COLUMNS, body=PLAIN_BODY, content_hash=HASH[::-1]),
        )
    ),
    c.Stage(
        txn=STREAM,
        part=3,
        attempt="a1b2",
        chunk=1,
        queue_id=QUEUE,
        expires_ms=3_600_000,
        columns=COLUMNS,
        body=BODY,
        content_hash=HASH,
    ),
    c.Publish(
        txn=STREAM,
        parts=(c.Part(0, "a1b2", 2, 2_000, 2**64 - 1), c.Part(7, "ffff", 1, 1, 5)),
        fence="query-9",
    ),
    c.Abort(txn=Job("job-77"), attempts=("a1b2", "ffff")),
    c.ForgetTxn(txn=STREAM),
]

QUERIES: list[Any] = [
    q.DescribeQueue(name="orders"),
    q.ListQueues(after="orders", limit=10),
    q.ListGroups(queue_id=QUEUE),
    q.Stats(queue_id=QUEUE, group="default"),
    q.Peek(queue_id=QUEUE, group="default", from_version=7, limit=3),
    q.Read(queue_id=QUEUE, from_version=7, to_version=1_000, max_bytes=65_536),
    q.DeadLetters(
        queue_id=QUEUE,
        group="default",
        where="attempts >= 5",
        limit=7,
        after=b"\x00\xfftoken",
        scan=5_000,
        count_only=True,
    ),
    q.Explain(queue_id=QUEUE, group="default", version=42),
    q.ProducerState(queue_id=QUEUE, client_id="svc"),
    q.TxnStatus(txn=Job("job-77")),
    q.History(queue_id=QUEUE, from_seq=9, limit=20),
    q.FindByKey(queue_id=QUEUE, key=b"k-1", from_version=2, limit=5, scan=500),
    q.NodeStatus(),
    q.HandOver(target="n2"),
    q.FindMoved(queue_id=QUEUE, group="default", where="reason = 'rejected'", from_version=3, limit=7, scan=900),
]

BATCHES = (
    r.MessageBatch(1, 0, 1_700_000_000_000, "svc", 101, COLUMNS, BODY),
    r.MessageBatch(4, 1, 1_700_000_000_001, "", 4, PLAIN_COLUMNS, PLAIN_BODY),
)
DESCRIBED = r.GroupDescribed(name="fraud", start=17, settings=GROUP_SETTINGS)
DEAD_ROW = r.DeadRow(
    group="default",
    dead_seq=11,
    version=4,
    reason="max_attempts",
    attempts=5,
    delivery_count=6,
    last_error="boom",
    first_delivered_ms=1_700_000_000_000,
    last_delivered_ms=1_700_000_090_000,
    died_ms=1_700_000_100_000,
    consumer_id="worker-1",
    client_id="svc",
    client_seq=101,
    key="k-1",
    headers=(("trace", "ab"), ("lang", "sk")),
    payload=b"poison",
    move_failed=True,
)
BARE_DEAD_ROW = r.DeadRow(
    group="default",
    dead_seq=12,
    version=5,
    reason="expired",
    attempts=0,
    delivery_count=0,
    last_error=None,
    first_delivered_ms=None,
    last_delivered_ms=None,
    died_ms=1_700_000_100_000,
    consumer_id=None,
    client_id="moved/9",
    client_seq=5,
    key=None,
    headers=(),
    payload=b"",
    move_failed=False,
)

REPLIES: list[Any] = [
    r.Failed(LeaseExpired(lease_id=LEASE)),
    r.Done(),
    r.Touched(more=True),
    r.QueueCreated(queue_id=QUEUE, log=LogId(1)),
    r.Purged(count=12_345),
    r.Started(version=Version(17), moved=True),
    r.ProducerOpened(epoch=(1 << 48) | 4, high_water=100),
    r.Produced(first_version=Version(1_000), count=3, replayed=True),
    r.VersionsChanged(
        outcomes=(r.VersionOutcome(1, 5, "ok"), r.VersionOutcome(9, 9, "too_late", "fraud")),
    ),
    r.Settled(count=100, refused=(r.RefusedRange(LEASE + 1, 102, 102, 219),)),
    r.Extended(deadline_ms=1_700_000_060_000, held=((1, 5), (9, 9))),
    r.Redriven(count=3, skipped=1),
    r.Committed(versions=((QUEUE, 6, 8), (QUEUE + 1, 1, 2)), replayed=True),
    r.Staged(replayed=True),
    r.Aborted(chunks=4),
    r.QueueDescribed(
        queue_id=QUEUE,
        log=LogId(1),
        name="orders",
        settings=QUEUE_SETTINGS,
        tail_version=70_000,
        lowest_version=3,
        stored_messages=69_998,
        stored_bytes=1 << 33,
        groups=(DESCRIBED, r.GroupDescribed(name="default", start=1, settings=GroupSettings())),
        readers=(r.ReaderDescribed(name="nightly", version=5, lag=69_995, reported_ms=1_700_000_000_000),),
    ),
    r.QueuesListed(queues=(("orders", QUEUE), ("billing", QUEUE + 1))),
    r.GroupsListed(groups=(DESCRIBED,)),
    r.GroupStats(
        produced=55,
        ready=1,
        delayed=2,
        in_flight=3,
        acked=4,
        dead=5,
        moved=6,
        discarded=7,
        cancelled=8,
        purged=9,
        trimmed=10,
        expired=11,
        tail_version=60,
        holes=12,
        oldest_ms=1_700_000_000_000,
    ),
    r.Messages(batches=BATCHES, next_version=6),
    r.DeadListed(rows=(DEAD_ROW, BARE_DEAD_ROW), matched=2, scanned=900, next_token=b"\x01\x02"),
    r.Explained(reason="leased", facts=(("by", "worker-1"), ("until_ms", 1_700_000_030_000), ("error", None))),
    r.ProducerDescribed(epoch=3, high_water=100, last_used_ms=1_700_000_000_000, window=2),
    r.TxnDescribed(
        state="published",
        staged_bytes=9,
        expires_at_ms=1_700_000_000_000,
        versions=((QUEUE, 1, 5),),
    ),
    r.HistoryListed(
        rows=(
            r.HistoryRow(
                seq=1,
                kind="nacked",
                time_ms=1_700_000_000_000,
                first=1,
                last=5,
                group="default",
                lease_id=LEASE,
                consumer_id="worker-1",
                error="boom",
            ),
        ),
        next_seq=2,
    ),
    r.VersionsFound(versions=((1, 5), (9, 9)), next_version=10),
    r.NodeDescribed(
        node="n1",
        cluster_id="5f0c",
        address="127.0.0.1:7401",
        role="leader",
        term=4,
        leader="n1",
        leader_address="127.0.0.1:7401",
        applied=123_455,
        committed=123_456,
        last=123_457,
        time_ms=1_700_000_000_123,
        fsync="os",
        pid=4_242,
        members=(
            r.MemberDescribed("n1", "127.0.0.1:7401", True, True, 0),
            r.MemberDescribed("n2", "127.0.0.1:7402", True, False, 17),
            r.MemberDescribed("n3", None, False, False, None),
        ),
    ),
    r.Leased(
        lease_id=LEASE,
        deadline_ms=1_700_000_030_000,
        group_generation=(1 << 48) | 7,
        counts_begun=True,
        grants=(r.Grant(1, 3, 2, 1), r.Grant(4, 5, 3, 1, 2)),
        replayed=True,
        batches=BATCHES,
    ),
]

PLACE = Place(123_456, 2, 1_700_000_000_123, LogId(1))
FRAMES: list[Any] = [
    Hello((1, 3), "holdfast-python/0.1"),
    Welcome(version=1, cluster_id="5f0c", node="n1"),
    Request(request_id=9, command=ACK, log=LogId(1), session=SESSION, request_seq=77, done_below=70),
    Inquiry(request_id=10, query=QUERIES[3], log=LogId(1), stale=True, min_index=123_000),
    Answered(9, r.Answer(PLACE, r.Settled(count=101))),
    Declined(10, NotLeader(leader="n2")),
    Declined(11, BadFilter("at position 3: what is this?", position=3)),
    Ping(4_242),
    Withdraw(4_243),
    Pong(4_242),
]
