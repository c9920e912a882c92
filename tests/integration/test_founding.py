"""First boot on real sockets and folders: all present, one missing, one wiped, one that lists others (R24)."""

import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest
import trio

from holdfast.client.protocol.errors import BadValue, HoldfastError
from holdfast.cluster.config import Address, Config
from holdfast.cluster.forming import form
from holdfast.cluster.founding import ClusterExists, FoundingLost, MembersDiffer
from holdfast.cluster.identity import DiskLost, IdentityFile, Record, Stage, WrongFolder, journal_folder
from holdfast.cluster.journal_frames import Identity
from holdfast.cluster.links import Handlers
from holdfast.cluster.membership import Configuration, Member
from holdfast.cluster.messages import Message, StaleTerm
from holdfast.cluster.peers import DialTiming, Lent, Peers, listen
from holdfast.cluster.segments import Segments

HOST = "127.0.0.1"
HANG_S = 20.0  # a test that hangs fails here; none waits for it
TIMING = DialTiming(first_wait_s=0.005, longest_wait_s=0.05)
NAMES = ("n1", "n2", "n3")
pytestmark = pytest.mark.trio


class Operator:
    """Hears what a node tells; `until` waits for what it will tell."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, ...]] = []
        self.cluster_ids: list[str] = []
        self._changed = trio.Event()

    def waiting_for_peers(self, *, missing: Iterable[str]) -> None:
        self.waiting.append(tuple(missing))
        self._changed.set()

    def founded(self, *, cluster_id: str, voters: Iterable[str]) -> None:
        self.cluster_ids.append(cluster_id)
        self._changed.set()

    def peer_connected(self, *, peer: str) -> None:
        pass

    def peer_refused(self, *, peer: str, error: HoldfastError) -> None:
        pass

    async def until(self, condition: Callable[[], bool]) -> None:
        with trio.fail_after(HANG_S):
            while not condition():
                self._changed = trio.Event()
                await self._changed.wait()


class Node:
    """A node's folder and its open listener. `run` forms, and then runs links as a node of the cluster does."""

    def __init__(self, name: str, home: Path, listeners: list[trio.SocketListener]) -> None:
        self.name, self.home, self.listeners = name, home, listeners
        self.address = Address(HOST, listeners[0].socket.getsockname()[1])
        self.peers: tuple[tuple[str, Address], ...] = ()
        self.operator = Operator()
        self.error: BaseException | None = None
        self.result: tuple[Identity, Configuration] | None = None
        self.heard: list[tuple[str, int]] = []
        self.scope = trio.CancelScope()
        self._changed = trio.Event()

    def config(self) -> Config:
        secret = self.home.parent / "secret"
        if not secret.exists():
            secret.write_text("the secret of the test cluster")
            secret.chmod(0o600)
        return Config(
            node=self.name,
            data=self.home,
            listen=Address(HOST, 7_400 + int(self.name[1:])),
            peer_listen=self.address,
            peers=self.peers,
            secret_file=secret if self.peers else None,
        )

    async def form(self) -> tuple[Identity, Configuration]:
        with trio.fail_after(HANG_S):
            return await form(self.config(), self.listeners, self.operator, timing=TIMING)

    async def run(self) -> None:
        with self.scope:
            try:
                self.result = await form(self.config(), self.listeners, self.operator, timing=TIMING)
                self._changed.set()
                await self._converse(self.result[0])
            except HoldfastError as error:
                self.error = error
            finally:
                self._changed.set()

    async def _converse(self, me: Identity) -> None:
        def greet(peer: str) -> None:
            peers.send(peer, StaleTerm(7))

        def deliver(peer: str, message: Message, log: int) -> None:
            assert isinstance(message, StaleTerm)
            self.heard.append((peer, message.term))
            self._changed.set()

        handlers = Handlers(connected=greet, disconnected=lambda peer: None, deliver=deliver)
        secret = self.config().secret()
        peers = Peers(me=me, secret=secret, handlers=handlers, nonce=os.urandom, rng=Random(self.name), timing=TIMING)
        peers.use({name: (at.host, at.port) for name, at in self.config().others.items()})
        await peers.run([Lent(listener) for listener in self.listeners])

    async def until(self, condition: Callable[[], bool]) -> None:
        with trio.fail_after(HANG_S):
            while not condition():
                self._changed = trio.Event()
                await self._changed.wait()

    async def formed(self) -> Identity:
        await self.until(lambda: self.result is not None or self.error is not None)
        assert self.result is not None, self.error
        return self.result[0]

    async def refused(self) -> BaseException:
        await self.until(lambda: self.error is not None)
        assert self.error is not None
        return self.error

    def again(self) -> "Node":
        """The same folder and listener, in another process."""
        node = Node(self.name, self.home, self.listeners)
        node.peers = self.peers
        return node

    def stage(self) -> Stage:
        with IdentityFile(str(self.home), str(journal_folder(self.home))) as file:
            return file.open(self.name, lambda: 0).stage


@asynccontextmanager
async def cluster_of(home: Path, *names: str) -> AsyncIterator[list[Node]]:
    nodes = [Node(name, home / name, await listen((HOST, 0))) for name in names]
    for node in nodes:
        node.peers = tuple((each.name, each.address) for each in nodes)
    yield nodes
    for node in nodes:
        for listener in node.listeners:
            await listener.aclose()


async def test_three_nodes_form_one_cluster_and_talk_on_the_same_listeners(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, *NAMES) as nodes, trio.open_nursery() as nursery:
        for node in nodes:
            nursery.start_soon(node.run)
        identities = [await node.formed() for node in nodes]
        assert len({identity.cluster_id for identity in identities}) == 1
        assert [identity.node for identity in identities] == list(NAMES)
        members = tuple(Member(n.name, str(n.address), f"{HOST}:740{n.name[1]}") for n in nodes)
        for node in nodes:
            assert node.result is not None and node.result[1] == Configuration(members)
            assert node.operator.cluster_ids == [identities[0].cluster_id]
            others = {(name, 7) for name in NAMES if name != node.name}
            await node.until(lambda node=node, others=others: set(node.heard) == others)  # type: ignore[misc]
        nursery.cancel_scope.cancel()
    for node, identity in zip(nodes, identities, strict=True):
        Segments.open(str(journal_folder(node.home)), identity).close()


async def test_a_third_node_that_is_missing_is_waited_for_by_name_and_completes_the_cluster_late(
    tmp_path: Path,
) -> None:
    async with cluster_of(tmp_path, *NAMES) as (n1, n2, n3), trio.open_nursery() as nursery:
        nursery.start_soon(n1.run)
        nursery.start_soon(n2.run)
        for node in (n1, n2):
            await node.operator.until(lambda node=node: node.operator.waiting[-1:] == [("n3",)])  # type: ignore[misc]
            assert node.result is None
        nursery.start_soon(n3.run)
        assert len({(await node.formed()).cluster_id for node in (n1, n2, n3)}) == 1
        nursery.cancel_scope.cancel()


async def test_a_formed_node_starts_without_anybody(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, *NAMES) as nodes:
        async with trio.open_nursery() as nursery:
            for node in nodes:
                nursery.start_soon(node.run)
            first = await nodes[1].formed()
            for node in nodes:
                await node.formed()
            nursery.cancel_scope.cancel()
        again = nodes[1].again()
        identity, members = await again.form()
        assert identity == first and members.voter_names == NAMES
        assert again.operator.waiting == [] and again.operator.cluster_ids == []


@pytest.mark.parametrize("victim", NAMES)
async def test_a_node_that_was_wiped_is_refused_under_its_old_name(tmp_path: Path, victim: str) -> None:
    async with cluster_of(tmp_path, *NAMES) as nodes, trio.open_nursery() as nursery:
        for node in nodes:
            nursery.start_soon(node.run)
        for node in nodes:
            await node.formed()
        lost = next(node for node in nodes if node.name == victim)
        lost.scope.cancel()
        shutil.rmtree(lost.home)
        again = lost.again()
        with pytest.raises(ClusterExists, match="never used"):
            await again.form()
        assert again.stage() == Stage.NEW
        for node in nodes:
            if node is not lost:
                assert node.error is None
        nursery.cancel_scope.cancel()


async def test_unequal_lists_are_refused_on_both_sides(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, "n1", "n2") as (n1, n2), trio.open_nursery() as nursery:
        n2.peers = (*n2.peers, ("n9", Address(HOST, 1)))
        nursery.start_soon(n1.run)
        nursery.start_soon(n2.run)
        for node, only in ((n1, "only_theirs"), (n2, "only_ours")):
            error = await node.refused()
            assert isinstance(error, MembersDiffer) and error.facts[only] == "n9"
            assert node.stage() == Stage.NEW


async def test_a_disk_that_is_lost_while_the_cluster_is_formed_is_refused_there_and_at_the_founder(
    tmp_path: Path,
) -> None:
    async with cluster_of(tmp_path, "n1", "n2") as (n1, n2):
        with (
            IdentityFile(str(n1.home), str(journal_folder(n1.home))) as file,
            IdentityFile(str(n2.home), str(journal_folder(n2.home))) as other,
        ):
            other.open("n2", lambda: 2)
            file.open("n1", lambda: 1)
            decided = Record(
                node="n1",
                incarnation=1,
                stage=Stage.DECIDING,
                cluster_id="c1",
                members=Configuration((Member("n1"), Member("n2"))),
                incarnations=(1, 3),  # n2 had another disk then
            )
            file.save(decided)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(n1.run)
            nursery.start_soon(n2.run)
            for node in (n1, n2):
                error = await node.refused()
                assert error == FoundingLost(node="n2", cluster_id="c1")


async def test_a_founder_that_was_stopped_after_deciding_completes_the_same_cluster(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, "n1", "n2") as (n1, n2):
        with (
            IdentityFile(str(n1.home), str(journal_folder(n1.home))) as file,
            IdentityFile(str(n2.home), str(journal_folder(n2.home))) as other,
        ):
            file.open("n1", lambda: 1)
            other.open("n2", lambda: 2)
            file.save(
                Record(
                    node="n1",
                    incarnation=1,
                    stage=Stage.DECIDING,
                    cluster_id="decided before",
                    members=Configuration((Member("n1"), Member("n2"))),
                    incarnations=(1, 2),
                )
            )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(n1.run)
            nursery.start_soon(n2.run)
            for node in (n1, n2):
                assert (await node.formed()).cluster_id == "decided before"
            nursery.cancel_scope.cancel()


async def test_a_node_alone_is_a_cluster_of_one_without_any_network(tmp_path: Path) -> None:
    node = Node("n1", tmp_path / "n1", await listen((HOST, 0)))
    for listener in node.listeners:
        await listener.aclose()
    first, members = await form(node.config(), [], node.operator)
    assert members == Configuration((Member("n1", str(node.address), f"{HOST}:7401"),))
    assert node.operator.cluster_ids == [first.cluster_id] and len(first.cluster_id) == 32
    assert node.operator.waiting == []
    assert await form(node.config(), [], node.operator) == (first, members)


async def test_two_nodes_alone_never_have_the_same_cluster_or_incarnation(tmp_path: Path) -> None:
    found = []
    for number in range(2):
        config = Config(data=tmp_path / str(number))
        found.append((await form(config, [], Operator()))[0])
    assert found[0].cluster_id != found[1].cluster_id
    assert found[0].incarnation != found[1].incarnation


async def test_a_folder_that_cannot_be_this_nodes_is_refused_before_anybody_is_met(tmp_path: Path) -> None:
    await form(Config(node="n1", data=tmp_path), [], Operator())
    with pytest.raises(WrongFolder, match="'n1'"):
        await form(Config(node="n2", data=tmp_path), [], Operator())
    shutil.rmtree(journal_folder(tmp_path))
    with pytest.raises(DiskLost, match="never used"):
        await form(Config(node="n1", data=tmp_path), [], Operator())


async def test_a_node_that_listens_everywhere_must_say_where_it_is_found(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, "n1", "n2") as (n1, n2):
        config = n1.config()
        everywhere = Config(
            node="n1",
            data=n1.home,
            listen=config.listen,
            peer_listen=Address("0.0.0.0", n1.address.port),
            peers=(("n2", n2.address),),
            secret_file=config.secret_file,
            insecure_plaintext=True,
        )
        with pytest.raises(BadValue, match="itself"):
            await form(everywhere, n1.listeners, n1.operator)
