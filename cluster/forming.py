"""The founding of a cluster on trio: joins `founding.py` to the links, the disk and the operator, and decides nothing.

What is saved is saved in the loop's own thread, between two awaits: nothing else runs yet that could be held up, and so
nothing is ever said in the time between a decision and its disk.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from ipaddress import ip_address
from random import Random, SystemRandom
from secrets import randbits, token_hex
from typing import Protocol, assert_never

import trio

from holdfast.client.protocol.errors import BadValue, HoldfastError
from holdfast.cluster.config import Address, Config
from holdfast.cluster.disk import REAL_DISK, Disk
from holdfast.cluster.founding import Action, Fail, Finish, Founding, Save, Send
from holdfast.cluster.handshake import ClusterKnown
from holdfast.cluster.identity import IdentityFile, Stage, journal_folder
from holdfast.cluster.journal_frames import Identity
from holdfast.cluster.links import Handlers
from holdfast.cluster.membership import Configuration
from holdfast.cluster.messages import FoundingMessage, Message
from holdfast.cluster.peers import DialTiming, Lent, Peers

FAREWELL_S = 1.0  # for peers to hear why we give up; who does not take it in that time finds out alone
CLUSTER_ID_BYTES = 16  # random: two clusters never have the same

_TIMING = DialTiming()


class Told(Protocol):
    """Who hears how it goes: the node's log."""

    def waiting_for_peers(self, *, missing: Iterable[str]) -> None: ...

    def founded(self, *, cluster_id: str, voters: Iterable[str]) -> None: ...

    def peer_connected(self, *, peer: str) -> None: ...

    def peer_refused(self, *, peer: str, error: HoldfastError) -> None: ...


async def form(
    config: Config,
    listeners: Sequence[trio.SocketListener],
    told: Told,
    *,
    disk: Disk = REAL_DISK,
    timing: DialTiming = _TIMING,
) -> tuple[Identity, Configuration]:
    """Who this node is, and who founded its cluster; on first boot, form that cluster with all listed peers.

    Waits for them as long as it takes, and tells for whom. Without peers it is a cluster of one, at once. The listeners
    stay open. `config.listen` is told to the others as the address for clients. Raises FoundingRefused, what
    `IdentityFile.open` raises, and BadValue for a secret or an address that cannot be used.
    """
    with IdentityFile(str(config.data), str(journal_folder(config.data)), disk=disk) as file:
        record = file.open(config.node, lambda: randbits(63))
        if record.stage != Stage.FORMED:
            addresses = {name: str(address) for name, address in config.others.items()}
            addresses[config.node] = str(_own_address(config, listeners))
            founding = Founding(record, addresses, str(config.listen), lambda: token_hex(CLUSTER_ID_BYTES))
            await _Forming(founding, file, told).run(config, listeners, timing)
            record = founding.record
            told.founded(cluster_id=record.cluster_id, voters=record.members.voter_names)
        return record.identity, record.members


def _own_address(config: Config, listeners: Sequence[trio.SocketListener]) -> Address:
    """Where the others find us: what the list says of this node, or where it listens."""
    listed = dict(config.peers).get(config.node)
    if listed is not None or not config.others:
        return listed or config.peer_listen
    host = config.peer_listen.host
    if _is_wildcard(host):
        problem = f"does not have {config.node!r} itself, and {host} is no address at which others reach it; add it"
        raise BadValue(field="peers", problem=problem)
    return Address(host, listeners[0].socket.getsockname()[1])


def _is_wildcard(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False


class _Forming:
    """Performs what the founding asks for. Errors are kept and raised at the end, outside the links."""

    def __init__(self, founding: Founding, file: IdentityFile, told: Told) -> None:
        self._founding, self._file, self._told = founding, file, told
        self._peers: Peers | None = None
        self._over = trio.Event()
        self._error: Exception | None = None
        self._missing: tuple[str, ...] = ()

    async def run(self, config: Config, listeners: Sequence[trio.SocketListener], timing: DialTiming) -> None:
        """Until the cluster is formed, or the founding has failed, which is raised."""
        self._feed(self._founding.begin)
        if not self._over.is_set():
            self._peers = self._make_peers(config, timing)
            await self._meet(self._peers, config, listeners)
        if self._error is not None:
            raise self._error

    def _make_peers(self, config: Config, timing: DialTiming) -> Peers:
        return Peers(
            me=self._founding.record.identity,
            secret=config.secret(),
            handlers=Handlers(connected=self._connected, disconnected=self._disconnected, deliver=self._deliver),
            nonce=os.urandom,
            rng=Random(SystemRandom().getrandbits(64)),
            trouble=self._trouble,
            timing=timing,
        )

    async def _meet(self, peers: Peers, config: Config, listeners: Sequence[trio.SocketListener]) -> None:
        peers.use({name: (address.host, address.port) for name, address in config.others.items()})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peers.run, [Lent(listener) for listener in listeners])
            await self._over.wait()
            with trio.move_on_after(FAREWELL_S):
                for status in peers.status():
                    await peers.flushed(status.peer)
            nursery.cancel_scope.cancel()

    # What the links tell

    def _connected(self, peer: str) -> None:
        assert self._peers is not None
        incarnation = self._peers.incarnation(peer)
        assert incarnation is not None  # told inside the opening of its session
        self._told.peer_connected(peer=peer)
        self._feed(lambda: self._founding.connected(peer, incarnation))

    def _disconnected(self, peer: str) -> None:
        self._feed(lambda: self._founding.disconnected(peer))

    def _deliver(self, peer: str, message: Message, log: int) -> None:
        assert isinstance(message, FoundingMessage)  # `links.py` lets nothing else through before there is a cluster
        self._feed(lambda: self._founding.received(peer, message))

    def _trouble(self, where: str, error: HoldfastError) -> None:
        if isinstance(error, ClusterKnown):
            known = error
            self._feed(lambda: self._founding.known(known.node, known.cluster_id))
        else:
            self._told.peer_refused(peer=where, error=error)

    def _feed(self, happens: Callable[[], list[Action]]) -> None:
        """Let it happen to the founding, unless that is over, and do what it asks."""
        if self._over.is_set():
            return
        try:
            for action in happens():
                self._do(action)
        except Exception as error:  # of the disk: nothing after it may happen, and it ends the node like any other
            self._error = error
            self._over.set()
        missing = self._founding.waits_for
        if missing != self._missing and not self._over.is_set():
            self._told.waiting_for_peers(missing=missing)
        self._missing = missing

    def _do(self, action: Action) -> None:
        match action:
            case Save(record=record):
                self._file.save(record)
            case Send(peer=peer, message=message):
                assert self._peers is not None
                self._peers.send(peer, message)  # who is gone again will introduce itself again
            case Finish():
                self._over.set()
            case Fail(error=error):
                self._error = error
                self._over.set()
            case unknown:
                assert_never(unknown)
