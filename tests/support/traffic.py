"""Producers and consumers that write down every answer they got, and the account that is asked of the cluster then."""

import re
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from threading import Event, Lock, Thread
from typing import Self

from holdfast.client.blocking import Client
from holdfast.client.protocol.queries import Stats
from holdfast.client.protocol.values import QueueId
from tests.support.processes import WAIT_S, Processes, until

QUEUE = "orders"
REQUESTS_MAX = 900  # of one client id, all of them remembered: 1,024 may be (P2)
AHEAD = 100  # requests that go on by themselves after a `progress`, so that what a test does then meets traffic
HOUR_MS = 3_600_000


def payload_of(client_id: str, seq: int) -> bytes:
    return f"{client_id} {seq} ".encode() * 3


class Traffic:
    """Two producers and two consumers while the block runs; at its end the consumers take what is left.

    Every produce is remembered by the cluster, messages are kept after their acks, and no lease runs out: so whatever
    was answered can be asked for again. One message in five is nacked, until its third delivery.
    """

    def __init__(self, cluster: Processes, seed: int) -> None:
        self.confirmed: dict[tuple[str, int], list[int]] = {}  # client id and first number -> versions
        self.deliveries: dict[int, list[tuple[int, int, str]]] = defaultdict(list)  # lease id, count, nack or ack
        self._cluster = cluster
        self._goal = 0
        self._lock = Lock()
        self._producing, self._consuming = Event(), Event()
        self._errors: list[BaseException] = []
        self._producers = [self._thread(self._produce, f"p{at}", Random(seed * 10 + at)) for at in range(2)]
        self._consumers = [self._thread(self._consume, f"c{at}", Random(seed * 10 + 5 + at)) for at in range(2)]

    def __enter__(self) -> Self:
        with self._cluster.client() as client:
            settings = {"visibility_timeout_ms": HOUR_MS, "max_delivery_attempts": 10, "replay_ms": HOUR_MS}
            client.create_queue(QUEUE, **settings)
        self._producing.set()
        self._consuming.set()
        for thread in (*self._producers, *self._consumers):
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._producing.clear()
        self._join(self._producers)
        try:
            if kind is None:
                until(self._drained, "everything acked")
        finally:
            self._consuming.clear()
            self._join(self._consumers)

    def progress(self, requests: int) -> None:
        """So many more requests are confirmed."""
        self._goal = goal = len(self.confirmed) + requests
        until(lambda: self._raise_errors() or len(self.confirmed) >= goal, f"{requests} more requests confirmed")

    def check(self) -> None:
        """What the cluster says now is what it answered then."""
        with self._cluster.client() as client:
            self._check_messages(client)
            self._check_replays(client)
            self._check_deliveries()
            stats = client.stats(QUEUE)
            assert stats.produced == stats.acked == stats.tail_version == len(self.deliveries)
            assert (stats.ready, stats.in_flight, stats.delayed, stats.dead) == (0, 0, 0, 0)

    def check_every_node(self) -> None:
        """All nodes hold the same, each asked for itself."""
        index = self._cluster.whole()
        with self._cluster.client() as client:
            query = Stats(queue_id=QueueId(client.queue(QUEUE).queue_id), group="default")
        told = []
        for name in self._cluster.plan.names:
            with self._cluster.wire(name) as wire:
                told.append(wire.ask(wire.inquiry(query, stale=True, min_index=index)).reply)
        assert told[0] == told[1] == told[2]
        until(self._states_compared, "all nodes at one index, with their digests")

    def _states_compared(self) -> bool:
        """Whether all are at one index now; their whole states are the same then."""
        pages = [self._cluster.status_of(name) for name in self._cluster.plan.names]
        if len({page["applied"] for page in pages}) > 1:
            return False  # an entry was on its way between two of the pages
        assert len({page["digest"] for page in pages}) == 1, pages
        return True

    def _check_messages(self, client: Client) -> None:
        """None lost, none doubled, none that nobody sent (P1, P3)."""
        expected = {
            version: (client_id, first + at, payload_of(client_id, first + at))
            for (client_id, first), versions in self.confirmed.items()
            for at, version in enumerate(versions)
        }
        kept = {each.version: (each.client_id, each.client_seq, each.payload) for each in client.read(QUEUE)}
        assert kept == expected

    def _check_replays(self, client: Client) -> None:
        """P2: the same again is answered with the first versions, and writes nothing."""
        tail = client.queue(QUEUE).tail_version

        def again(request: tuple[tuple[str, int], list[int]]) -> None:
            (client_id, first), versions = request
            payloads = [payload_of(client_id, first + at) for at in range(len(versions))]
            done = client.produce(QUEUE, payloads, client_id=client_id, client_seq=first, done_below=1)
            assert (done.versions, done.replayed) == (versions, True)

        with ThreadPoolExecutor(32) as pool:
            list(pool.map(again, self.confirmed.items()))
        assert client.queue(QUEUE).tail_version == tail

    def _check_deliveries(self) -> None:
        """L2, L4: each delivery counted once, in every failover; nothing came after its ack."""
        for version, seen in self.deliveries.items():
            lease_ids, counts, fates = zip(*sorted(seen), strict=True)
            assert counts == tuple(range(1, len(seen) + 1)), (version, seen)
            assert fates == ("nack",) * (len(seen) - 1) + ("ack",), (version, seen)
            assert len(set(lease_ids)) == len(seen)

    def _drained(self) -> bool:
        self._raise_errors()
        with self._lock:
            acked = {version for version, seen in self.deliveries.items() if any(fate == "ack" for *_, fate in seen)}
        return all(version in acked for versions in self.confirmed.values() for version in versions)

    def _produce(self, name: str, rng: Random) -> None:
        with self._cluster.client() as client:
            requests, seq, client_id = 0, 1, f"{name}-0"
            while self._producing.is_set():
                if len(self.confirmed) >= self._goal + AHEAD:
                    time.sleep(0.005)  # until the test goes on: a busy machine has better things to do
                    continue
                payloads = [payload_of(client_id, seq + at) for at in range(rng.randint(1, 3))]
                done = client.produce(QUEUE, payloads, client_id=client_id, client_seq=seq, done_below=1)
                self.confirmed[client_id, seq] = done.versions
                requests, seq = requests + 1, seq + len(payloads)
                if requests % REQUESTS_MAX == 0:
                    seq, client_id = 1, f"{name}-{requests}"

    def _consume(self, name: str, rng: Random) -> None:
        with self._cluster.client(consumer_id=name) as client:
            while self._consuming.is_set():
                lease = client.lease(QUEUE, max_messages=20, wait_ms=200)
                nacked = [each.version for each in lease if each.delivery_count < 3 and rng.random() < 0.2]
                if nacked:
                    lease.nack(nacked, error="boom")
                lease.ack()
                with self._lock:
                    for each in lease:
                        fate = "nack" if each.version in nacked else "ack"
                        self.deliveries[each.version].append((lease.id, each.delivery_count, fate))

    def _thread(self, work: Callable[[str, Random], None], name: str, rng: Random) -> Thread:
        def guarded() -> None:
            try:
                work(name, rng)
            except BaseException as error:
                self._errors.append(error)

        return Thread(target=guarded, name=name, daemon=True)

    def _join(self, threads: list[Thread]) -> None:
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()

    def _raise_errors(self) -> bool:
        if self._errors:
            raise self._errors[0]
        return False


def compacted_to(processes: Processes, name: str) -> int:
    """Where the log of this node begins."""
    return max(map(int, re.findall(r"event=journal_compacted base=(\d+)", processes.log_of(name))), default=0)


def fill_until_compacted(processes: Processes, names: list[str], index: int) -> None:
    """Write until the logs of these nodes begin behind `index`; the messages are gone at once, for a state that is
    larger than the log puts a snapshot off."""
    with processes.client() as client:
        client.create_queue("filler")

        def filled() -> bool:
            client.produce("filler", [bytes(1_024)] * 50)
            client.purge_queue("filler")
            return all(compacted_to(processes, name) > index for name in names)

        until(filled, f"logs that begin behind {index}")
