"""The works of `holdfast bench` on a healthy cluster: latency, produce, consume, both at once, and one node down.

Each yields figures under the names that every bench uses; those that have a number to reach have it under `wanted`.
"""

import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from holdfast.client.blocking import Client
from holdfast.client.cli.bench_cluster import (
    QUEUE,
    Disk,
    Figures,
    Place,
    measured,
    opened,
    quantile,
    quantiles,
)
from holdfast.client.cli.bench_load import STAMP, Job
from holdfast.client.protocol.errors import BadValue

OVER_DISK_MS = 1.0  # what a confirm may take beyond the disk's own sync
IN_FLIGHT_PER_S = 10_000
ONE_DOWN = 0.95
PROCESSES = 2  # of load: more only take the processors from the nodes
LATENCY_TURNS = 5  # the disk is measured between them, so that both see the same neighbours
PREFILL_BATCH = 1_000


def latency(args: Namespace) -> Iterator[Figures]:
    """One command at a time: until its confirm, and until a waiting consumer has it; beside them the disk alone."""
    with opened(args.nodes, args.directory) as place, Disk(place.data) as disk:
        job = _job(place, args)
        took_ms: list[float] = []
        library_ms: list[float] = []
        disk_ms: list[float] = []
        turns: list[Figures] = []
        for turn in range(LATENCY_TURNS):
            figures, results = measured(place, [replace(job, name=f"turn-{turn}")], args.seconds / LATENCY_TURNS)
            took_ms += results[0]["took_ms"]
            turns.append(figures)
            disk_ms += disk.sync_ms(figures["bytes_per_fsync"], 200)
            library_ms += _through_library(place, args.payload, args.seconds / LATENCY_TURNS / 2)
        place.client.purge_queue(QUEUE)
        delivered_ms = _delivered(place, args)
        disk_p50_ms = quantile(disk_ms, 0.5)
        confirm = quantiles("confirm", took_ms)
        yield {
            "batch": 1,
            "payload": args.payload,
            **confirm,
            **quantiles("client", library_ms),
            "fdatasync_p50_ms": disk_p50_ms,
            "over_fdatasync_ms": round(confirm["confirm_p50_ms"] - disk_p50_ms, 3),
            **quantiles("delivered", delivered_ms),
            **{
                name: quantile([turn[name] for turn in turns], 0.5)
                for name in ("server_cpu_us", "leader_cpu_us", "client_cpu_us", "fsyncs_per_1000", "bytes_per_fsync")
            },
            "wanted": {"over_fdatasync_ms": OVER_DISK_MS},
        }


def _through_library(place: Place, payload: int, seconds: float) -> list[float]:
    """The same as a caller of the blocking client sees it, with its thread between."""
    took_ms = []
    body = bytes(payload)
    with Client(place.connect) as client:
        client.produce(QUEUE, [body])
        until_s = time.monotonic() + seconds
        while (began_s := time.monotonic()) < until_s:
            client.produce(QUEUE, [body])
            took_ms.append((time.monotonic() - began_s) * 1_000)
    return took_ms


def _delivered(place: Place, args: Namespace) -> list[float]:
    """From the producer's call until a consumer that waits for it has the message; one at a time."""
    consumer = replace(_job(place, args), kind="deliver", name="waiting", first=1)
    # Slower than consumer and cluster are, so that every message meets a lease that is parked.
    producer = replace(_job(place, args), name="paced", pace_s=0.02)
    _, results = measured(place, [consumer, producer], args.seconds)
    return list(results[0]["delivered_ms"])


def produce_single(args: Namespace) -> Iterator[Figures]:
    """Producers that each send one message and wait for it."""
    with opened(args.nodes, args.directory) as place:
        for turn in range(args.repeat):
            clients = args.connections or args.in_flight
            jobs = shared_out(replace(_job(place, args), name=f"turn-{turn}"), clients, args.in_flight)
            figures, _ = measured(place, jobs, args.seconds)
            wanted = {"messages_per_s": IN_FLIGHT_PER_S} if args.in_flight >= 64 else {}
            shape = {"batch": 1, "in_flight": args.in_flight, "connections": clients, "payload": args.payload}
            yield {**shape, **figures, "wanted": wanted}


def produce_batch(args: Namespace) -> Iterator[Figures]:
    """One producer with a few requests under way."""
    with opened(args.nodes, args.directory) as place:
        for turn in range(args.repeat):
            for batch in args.batch:
                job = replace(_job(place, args), batch=batch, in_flight=args.in_flight, name=f"turn-{turn}-{batch}")
                figures, _ = measured(place, [job], args.seconds)
                yield {"batch": batch, "in_flight": args.in_flight, "payload": args.payload, **figures, "wanted": {}}


def consume_ack(args: Namespace) -> Iterator[Figures]:
    """One consumer on a queue that was filled before: lease, ack, and again."""
    with opened(args.nodes, args.directory) as place:
        for batch in args.batch:
            fill(place, args.payload, max(args.messages, 2 * batch))
            job = replace(_job(place, args), kind="consume", batch=batch, in_flight=args.in_flight)
            figures, _ = measured(place, [job], args.seconds)
            left = place.client.stats(QUEUE).ready
            if left < batch * args.in_flight:
                problem = f"were consumed before the {args.seconds} s were over; give more of them or less time"
                raise BadValue(field="messages", problem=problem)
            place.client.purge_queue(QUEUE, in_flight=True)
            place.wait_level()
            shape = {"batch": batch, "in_flight": args.in_flight, "payload": args.payload}
            yield {**shape, **figures, "left": left, "wanted": {}}


def mixed(args: Namespace) -> Iterator[Figures]:
    """Producers and consumers at the same time, on the same queue."""
    with opened(args.nodes, args.directory) as place:
        for turn in range(args.repeat):
            producers = replace(_job(place, args), clients=args.in_flight, name=f"turn-{turn}")
            consumers = replace(producers, kind="deliver", clients=args.consumers, batch=100, first=args.in_flight)
            figures, results = measured(place, [producers, consumers], args.seconds)
            produced, consumed = (round(result["messages"] / args.seconds) for result in results)
            # A message counts once: a produce and its share of a lease and an ack.
            share = sum(result["messages"] for result in results) / results[0]["messages"]
            per_message = ("server_cpu_us", "leader_cpu_us", "client_cpu_us", "fsyncs_per_1000")
            yield {
                "in_flight": args.in_flight,
                "consumers": args.consumers,
                "payload": args.payload,
                "messages_per_s": produced,
                "consumed_per_s": consumed,
                **quantiles("confirm", results[0]["took_ms"]),
                **quantiles("delivered", results[1]["delivered_ms"]),
                **{name: round(figures[name] * share, 1) for name in per_message},
                "wanted": {},
            }


def one_down(args: Namespace) -> Iterator[Figures]:
    """Producers against the whole cluster and against one without a follower, in turns."""
    with opened(args.nodes, args.directory) as place:
        healthy: list[float] = []
        reduced: list[float] = []
        for turn in range(args.rounds):
            job = _job(place, args)
            jobs = shared_out(replace(job, name=f"whole-{turn}"), args.in_flight, args.in_flight)
            healthy.append(measured(place, jobs, args.seconds)[0]["messages_per_s"])
            down = place.followers()[turn % (len(place.names) - 1)]
            place.cluster.kill(down)
            jobs = shared_out(replace(job, name=f"down-{turn}"), args.in_flight, args.in_flight)
            reduced.append(measured(place, jobs, args.seconds)[0]["messages_per_s"])
            place.cluster.start(down)
            place.wait_level()
        ratios = [down / whole for down, whole in zip(reduced, healthy, strict=True)]
        yield {
            "in_flight": args.in_flight,
            "payload": args.payload,
            "messages_per_s": quantile(reduced, 0.5),
            "healthy_messages_per_s": quantile(healthy, 0.5),
            "ratio": quantile(ratios, 0.5),
            "ratios": [round(ratio, 3) for ratio in ratios],
            "wanted": {"ratio": ONE_DOWN},
        }


# What the works share ------------------------------------------------------------------------------------


def fill(place: Place, payload: int, messages: int, queue: str = QUEUE) -> float:
    """Produce so many messages in batches, a few under way at a time; how many seconds that took."""
    began_s = time.monotonic()
    body = bytes(max(payload, STAMP.size))
    left = [PREFILL_BATCH] * (messages // PREFILL_BATCH)
    if messages % PREFILL_BATCH:
        left.append(messages % PREFILL_BATCH)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with suppress(IndexError):
                while True:
                    place.client.produce(queue, [body] * left.pop())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(4, len(left)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    place.wait_level()
    return time.monotonic() - began_s


def _job(place: Place, args: Namespace) -> Job:
    return Job(kind="produce", connect=place.connect, queue=QUEUE, payload=args.payload)


def shared_out(job: Job, clients: int, in_flight: int) -> list[Job]:
    """The clients over a few processes; each has its share of what is in flight."""
    processes = min(PROCESSES, clients)
    shares = [clients // processes + (at < clients % processes) for at in range(processes)]
    firsts = [sum(shares[:at]) for at in range(processes)]
    window = max(in_flight // clients, 1)
    return [
        replace(job, clients=share, first=first, in_flight=window) for share, first in zip(shares, firsts, strict=True)
    ]
