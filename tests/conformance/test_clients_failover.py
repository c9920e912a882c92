"""Three real processes, and leaders that are killed while every kind of call is on its way, on every shell."""

from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.conformance.shells import NAMES, Name, Shell, in_thread
from tests.support.processes import Processes, cluster

pytestmark = pytest.mark.slow

KILLS = 3
TURNS = 2  # of every kind, after each kill


class Kind:
    """One kind of call, made again and again. `turn` asserts what its outcome must be, given all turns before it."""

    def __init__(self, client: Any, name: str) -> None:
        self.client = client
        self.queue = name
        self.turns = 0

    async def begin(self) -> None:
        await self.client.create_queue(self.queue, max_delivery_attempts=1_000_000)

    async def turn(self) -> None:
        raise NotImplementedError

    async def end(self) -> None:
        """What must be so at the end."""


class Produces(Kind):
    async def turn(self) -> None:
        assert (await self.client.produce(self.queue, [b"x"])).versions == [self.turns + 1]


class ProducesNumbered(Kind):
    async def turn(self) -> None:
        done = await self.client.produce(self.queue, [b"x"], client_id="p", client_seq=self.turns + 1)
        assert done.versions == [self.turns + 1]


class Sends(Kind):
    """A managed producer: twenty on their way at once, in order."""

    async def begin(self) -> None:
        await super().begin()
        self.block = self.client.producer(self.queue, client_id="p", window=50)
        self.producer = await self.block.__aenter__()

    async def turn(self) -> None:
        sent = [await self.producer.send_nowait(b"x") for _ in range(20)]
        assert [await each for each in sent] == list(range(20 * self.turns + 1, 20 * self.turns + 21))

    async def end(self) -> None:
        await self.block.__aexit__(None, None, None)
        assert (await self.client.stats(self.queue)).produced == 20 * self.turns


class Consumes(Kind):
    """One after the other, as long as somebody produces."""

    async def begin(self) -> None:
        await super().begin()
        self.block = self.client.consume(self.queue)
        self.messages = await self.block.__aenter__()

    async def turn(self) -> None:
        await self.client.produce(self.queue, [b"%d" % self.turns])
        async for message in self.messages:
            assert (message.payload, message.attempts) == (b"%d" % self.turns, 1)
            await message.ack()
            break

    async def end(self) -> None:
        await self.block.__aexit__(None, None, None)
        stats = await self.client.stats(self.queue)
        assert (stats.acked, stats.in_flight) == (self.turns, 0)


class Acks(Kind):
    async def turn(self) -> None:
        await self.client.produce(self.queue, [b"%d" % self.turns])
        lease = await self.client.lease(self.queue, wait_ms=20_000)
        assert [(m.payload, m.delivery_count, m.attempts) for m in lease] == [(b"%d" % self.turns, 1, 1)]
        assert (await lease.ack()).count == 1

    async def end(self) -> None:
        stats = await self.client.stats(self.queue)
        assert (stats.produced, stats.acked, stats.in_flight) == (self.turns, self.turns, 0)


class Nacks(Kind):
    """Each costs one attempt, no more."""

    async def begin(self) -> None:
        await super().begin()
        await self.client.produce(self.queue, [b"x"])

    async def turn(self) -> None:
        lease = await self.client.lease(self.queue)
        assert [(m.delivery_count, m.attempts) for m in lease] == [(self.turns + 1, self.turns + 1)]
        assert (await lease.nack(error="x")).count == 1


class Releases(Nacks):
    """Each costs none."""

    async def turn(self) -> None:
        lease = await self.client.lease(self.queue)
        assert [(m.delivery_count, m.attempts) for m in lease] == [(self.turns + 1, 1)]
        assert (await lease.release()).count == 1


class Extends(Nacks):
    async def turn(self) -> None:
        if not self.turns:
            self.lease = await self.client.lease(self.queue, visibility_timeout_ms=600_000)
        assert (await self.lease.extend(visibility_timeout_ms=600_000)).held == ((1, 1),)


class Commits(Kind):
    async def turn(self) -> None:
        await self.client.produce(self.queue, [b"x"])
        lease = await self.client.lease(self.queue)
        async with self.client.transaction() as txn:
            txn.ack(lease)
            txn.produce(f"{self.queue}-out", [b"y"])
        assert txn.versions == {f"{self.queue}-out": [self.turns + 1]}

    async def begin(self) -> None:
        await super().begin()
        await self.client.create_queue(f"{self.queue}-out")


class Cancels(Kind):
    async def turn(self) -> None:
        (version,) = (await self.client.produce(self.queue, [b"x"], delay_ms=600_000)).versions
        moved = await self.client.reschedule(self.queue, version=version, delay_ms=700_000)
        gone = await self.client.cancel(self.queue, version=version)
        assert [outcome.outcome for outcome in [*moved, *gone]] == ["ok", "ok"]

    async def end(self) -> None:
        assert (await self.client.stats(self.queue)).cancelled == self.turns


class Redrives(Nacks):
    async def turn(self) -> None:
        await (await self.client.lease(self.queue)).nack(dead=True)
        assert await self.client.dead_count(self.queue) == 1
        assert (await self.client.redrive(self.queue)).redriven == 1


class Creates(Kind):
    """A retry that was not known again would be refused: it exists."""

    async def turn(self) -> None:
        await self.client.create_queue(f"{self.queue}-{self.turns}")
        await self.client.create_group(f"{self.queue}-{self.turns}", "g")
        await self.client.update_queue(f"{self.queue}-{self.turns}", max_delivery_attempts=7)
        await self.client.delete_queue(f"{self.queue}-{self.turns}")


class Seeks(Nacks):
    async def turn(self) -> None:
        assert (await self.client.seek(self.queue, to=1)).version == 1
        assert len(await self.client.lease(self.queue)) == 1


class Opens(Kind):
    async def turn(self) -> None:
        assert (await self.client.open_producer(self.queue, client_id="p")).epoch == self.turns + 1


class Asks(Nacks):
    async def turn(self) -> None:
        assert (await self.client.stats(self.queue)).ready == 1
        assert (await self.client.explain(self.queue, 1)).reason == "available"
        assert len(await self.client.peek(self.queue)) == 1
        assert (await self.client.queue(self.queue)).tail_version == 1
        assert [message.version async for message in self.client.read(self.queue)] == [1]


KINDS: list[type[Kind]] = [
    *(Produces, ProducesNumbered, Sends, Consumes, Acks, Nacks, Releases, Extends, Commits),
    *(Cancels, Redrives, Creates, Seeks, Opens, Asks),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_leader_costs_a_pause_and_nothing_else(name: Name, tmp_path: Path) -> None:
    """A1, A2: Each kind of call is on its way as each leader dies, and all outcomes are as if none had."""
    shell = Shell(name)

    async def main() -> None:
        async with shell.client(processes.plan.connect, timeout_ms=60_000) as client:
            kinds = [kind(client, kind.__name__.lower()) for kind in KINDS]
            for kind in kinds:
                await kind.begin()
            async with anyio.create_task_group() as group:
                for kind in kinds:
                    group.start_soon(turns, kind)
                for _ in range(KILLS):
                    await all_have_turned(kinds)
                    await in_thread(kill_the_leader, processes)
                await all_have_turned(kinds)
                stopped.set()
            for kind in kinds:
                await kind.end()

    async def turns(kind: Kind) -> None:
        while not stopped.is_set():
            await kind.turn()
            kind.turns += 1
            if kind.turns in wanted[type(kind)]:
                wanted[type(kind)].pop(kind.turns).set()

    async def all_have_turned(kinds: list[Kind]) -> None:
        for kind in kinds:
            event = wanted[type(kind)].setdefault(kind.turns + TURNS, anyio.Event())
            await event.wait()

    with cluster(tmp_path) as processes:
        processes.whole()
        wanted: dict[type[Kind], dict[int, anyio.Event]] = {kind: {} for kind in KINDS}
        stopped = anyio.Event()
        shell.run(main)


def kill_the_leader(processes: Processes) -> None:
    """And start it again, once another leads: the next kill needs a majority."""
    leader = processes.leader()
    processes.kill(leader)
    processes.leader(among=processes.others(leader))
    processes.start(leader)
    processes.formed()
