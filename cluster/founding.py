"""How a cluster begins: once, with every listed node present, and never again with one that forgot it. No I/O.

The lowest of the listed names is the founder. All nodes introduce themselves to each other.

    founder                                     every other one
    new: waits until all have introduced    ->  new
    themselves, with the same list
    deciding, durably: cluster id, members,
    the incarnations of their disks
    Found                                   ->  checks that its own incarnation is the named one
    notes it                                <-  agreed, durably; Agreed
    all have: formed, durably; runs
    its cluster id, in a handshake          ->  formed, durably; runs; its cluster id tells the rest

So when anybody is formed, everybody has at least agreed, durably, and this gives the rule of first boot (R24): a node
that is new and meets a formed one has lost its disk, or was never part of the cluster. It may only join under a name
that was never used. And while the founder is deciding nobody is formed, so nothing was ever served.

What can fail, and how it goes on:

    the founder stops before it decided     nothing has happened; it begins anew
    the founder stops after it decided      it starts as deciding, with the same id and the same incarnations; who has
                                            agreed says so when it introduces itself, and the others get Found again
    the founder stops when formed           it runs; the others learn it when they meet it
    another one stops before it agreed      it starts as new, with the same incarnation, and gets Found again
    another one stops after it agreed       it starts as agreed, and says so
    another one stops before it is formed   as above; it learns from any formed node that the cluster exists
    one is absent, before the decision      nothing is formed; all wait, and say for whom
    one is absent, after the decision       as above; it gets Found when it is back
    a disk is lost before the decision      nothing has happened: it comes with another incarnation, and takes part
    a disk is lost while deciding           its incarnation is not the one that was decided: `FoundingLost` there and at
                                            the founder; nothing was served, so all folders are emptied and all begin
    the founder's disk is lost then         it is new, and some have agreed to what it does not know: `FoundingLost`,
                                            once all were heard and none of them is formed; less than a majority was
    a disk is lost when one is formed       `ClusterExists`: a new name
    lists differ                            `MembersDiffer` on both sides, whenever two meet
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias, assert_never

from holdfast.client.protocol.errors import HoldfastError, Misuse
from holdfast.cluster.identity import Record, Stage
from holdfast.cluster.membership import Configuration, Member
from holdfast.cluster.messages import Agreed, Found, FoundingMessage, Introduce


class FoundingRefused(Misuse):
    """This node cannot take part in the founding as it is; nothing was changed."""


class MembersDiffer(FoundingRefused):
    """Two lists of who founds the cluster are not the same."""

    text = (
        "{where} has the members {theirs}, and this node has {ours}: only there {only_theirs}, only here {only_ours}; "
        "give all nodes the same list"
    )
    fact_names = ("where", "theirs", "ours", "only_theirs", "only_ours")

    @classmethod
    def between(cls, where: str, theirs: Iterable[str], ours: Iterable[str]) -> "MembersDiffer":
        there, here = set(theirs), set(ours)
        groups = {"theirs": there, "ours": here, "only_theirs": there - here, "only_ours": here - there}
        return cls(where=where, **{name: ", ".join(sorted(group)) or "none" for name, group in groups.items()})


class ClusterExists(FoundingRefused):
    """The cluster is there, and this node has nothing of it: its disk was lost, or it is new (R24)."""

    text = (
        "{node!r} belongs to cluster {cluster_id!r}, of which this disk knows nothing. A node that is new, or whose "
        "disk was lost, may only join under a name that was never used: give it one, and add it as a new member"
    )
    fact_names = ("node", "cluster_id")
    node: str
    cluster_id: str


class FoundingLost(FoundingRefused):
    """A disk was lost while the cluster was being formed, so it can never be completed."""

    text = (
        "{node!r} lost its disk while cluster {cluster_id!r} was being formed. Nothing was ever served: empty the data "
        "folders of all its nodes, and start them again"
    )
    fact_names = ("node", "cluster_id")
    node: str
    cluster_id: str


# What the shell is asked to do, in this order; each is done before the next begins -----------------------


@dataclass(frozen=True, slots=True)
class Save:
    """Make this record durable."""

    record: Record


@dataclass(frozen=True, slots=True)
class Send:
    peer: str
    message: FoundingMessage


@dataclass(frozen=True, slots=True)
class Finish:
    """The cluster exists, and the record says so."""


@dataclass(frozen=True, slots=True)
class Fail:
    """Give up with this error, once what was sent is on its way."""

    error: HoldfastError


Action: TypeAlias = Save | Send | Finish | Fail


@dataclass(frozen=True, slots=True)
class _Heard:
    """A peer in its present session."""

    incarnation: int
    introduced: Introduce | None = None
    cluster_id: str = ""  # to which it has agreed, or which it has decided on, by the last that it said


class Founding:
    """The part of one node that is not formed yet: feed what happens, perform what comes back, to Finish or Fail."""

    def __init__(
        self,
        record: Record,
        addresses: Mapping[str, str],
        client_address: str,
        new_cluster_id: Callable[[], str],
    ) -> None:
        """`addresses` are those of all members for their peers, by name, our own too. Raises MembersDiffer."""
        self.record = record
        self._addresses = dict(sorted(addresses.items()))
        self._client_address = client_address
        self._new_cluster_id = new_cluster_id
        self._founder = next(iter(self._addresses))
        self._heard: dict[str, _Heard] = {}
        self._agreed: set[str] = set()  # the founder's: who has said so, with the right disk, since we started
        decided = record.members.voter_names
        if decided and set(decided) != set(self._addresses):
            raise MembersDiffer.between("the founding that was begun on this disk", decided, self._addresses)

    @property
    def founds(self) -> bool:
        return self.record.node == self._founder

    @property
    def waits_for(self) -> tuple[str, ...]:
        """Without whom it does not go on now."""
        others = [name for name in self._addresses if name != self.record.node]
        match self.record.stage:
            case Stage.NEW:
                absent = tuple(name for name in others if not self._has_introduced(name))
                return absent or (() if self.founds else (self._founder,))
            case Stage.DECIDING:
                return tuple(name for name in others if name not in self._agreed)
            case Stage.AGREED:
                return (self._founder,)
            case Stage.FORMED:
                return ()
            case stage:
                assert_never(stage)

    # What happens

    def begin(self) -> list[Action]:
        """To be called first: one that is alone waits for nobody."""
        return self._go_on()

    def connected(self, peer: str, incarnation: int) -> list[Action]:
        """A peer that belongs to no cluster either has proven itself, with the incarnation of its disk."""
        self._heard[peer] = _Heard(incarnation)
        introduction = Introduce(self._client_address, self.record.cluster_id, tuple(self._addresses))
        return [Send(peer, introduction)]

    def disconnected(self, peer: str) -> list[Action]:
        self._heard.pop(peer, None)
        return []

    def received(self, peer: str, message: FoundingMessage) -> list[Action]:
        match message:
            case Introduce():
                return self._on_introduce(peer, message)
            case Found():
                return self._on_found(peer, message)
            case Agreed():
                return self._on_agreed(peer, message.cluster_id)
            case unknown:
                assert_never(unknown)

    def known(self, peer: str, cluster_id: str) -> list[Action]:
        """A peer has proven itself that belongs to a cluster."""
        # Only who has agreed may come in. A founder that is deciding cannot: nobody is formed before it is, so its disk
        # is an old copy of one that was, and what that one voted since is not on it (R24).
        if self.record.stage == Stage.AGREED and cluster_id == self.record.cluster_id:
            return self._formed()
        return [Fail(ClusterExists(node=peer, cluster_id=cluster_id))]

    # What follows

    def _on_introduce(self, peer: str, introduced: Introduce) -> list[Action]:
        names = introduced.names
        if set(names) != set(self._addresses) or peer not in self._addresses:
            return [Fail(MembersDiffer.between(f"node {peer!r}", names, self._addresses))]
        heard = replace(self._heard[peer], introduced=introduced, cluster_id=introduced.cluster_id)
        self._heard[peer] = heard
        if self.record.stage != Stage.DECIDING:
            return self._go_on()
        found = Found(self.record.cluster_id, self.record.members, self.record.incarnations)
        if introduced.cluster_id == self.record.cluster_id and self._incarnation_of(peer) == heard.incarnation:
            return self._on_agreed(peer, introduced.cluster_id)
        if introduced.cluster_id or self._incarnation_of(peer) != heard.incarnation:
            # Found goes all the same: by it the peer learns what is wrong.
            return [Send(peer, found), Fail(self._lost(peer))]
        return [Send(peer, found)]

    def _on_found(self, peer: str, found: Found) -> list[Action]:
        if peer != self._founder or set(found.members.voter_names) != set(self._addresses):
            return [Fail(MembersDiffer.between(f"node {peer!r}", found.members.voter_names, self._addresses))]
        record = replace(
            self.record,
            stage=Stage.AGREED,
            cluster_id=found.cluster_id,
            members=found.members,
            incarnations=found.incarnations,
        )
        if record == self.record:
            return [Send(peer, Agreed(found.cluster_id))]
        mine = found.incarnations[found.members.voter_names.index(record.node)]
        if self.record.stage != Stage.NEW:
            return [Fail(self._lost(peer))]
        if mine != record.incarnation:
            return [Fail(FoundingLost(node=record.node, cluster_id=found.cluster_id))]
        self.record = record
        self._heard[peer] = replace(self._heard[peer], cluster_id=found.cluster_id)
        return [Save(record), Send(peer, Agreed(found.cluster_id))]

    def _on_agreed(self, peer: str, cluster_id: str) -> list[Action]:
        if self.record.stage == Stage.DECIDING and cluster_id == self.record.cluster_id and peer in self._heard:
            self._agreed.add(peer)
        return self._go_on()

    def _go_on(self) -> list[Action]:
        """Whatever can be done now that all, or enough, were heard."""
        record = self.record
        others = self._addresses.keys() - {record.node}
        if record.stage == Stage.DECIDING:
            return self._formed() if others <= self._agreed else []
        if not all(map(self._has_introduced, others)):
            return []
        if record.stage == Stage.AGREED and self._heard[self._founder].cluster_id != record.cluster_id:
            return [Fail(self._lost(self._founder))]
        if record.stage == Stage.NEW and self.founds:
            unknown = next((heard.cluster_id for heard in self._heard.values() if heard.cluster_id), "")
            if unknown:
                return [Fail(FoundingLost(node=record.node, cluster_id=unknown))]
            return self._decide()
        return []

    def _decide(self) -> list[Action]:
        record = self.record
        clients = {name: heard.introduced.client_address for name, heard in self._heard.items() if heard.introduced}
        clients[record.node] = self._client_address
        disks = {name: heard.incarnation for name, heard in self._heard.items()} | {record.node: record.incarnation}
        members = Configuration(tuple(Member(name, at, clients[name]) for name, at in self._addresses.items()))
        self.record = replace(
            record,
            stage=Stage.DECIDING,
            cluster_id=self._new_cluster_id(),
            members=members,
            incarnations=tuple(disks[name] for name in self._addresses),
        )
        found = Found(self.record.cluster_id, members, self.record.incarnations)
        sends = [Send(name, found) for name in self._addresses if name != record.node]
        return [Save(self.record), *sends, *self._go_on()]

    def _formed(self) -> list[Action]:
        self.record = self.record.at(Stage.FORMED)
        return [Save(self.record), Finish()]

    def _lost(self, node: str) -> FoundingLost:
        return FoundingLost(node=node, cluster_id=self.record.cluster_id)

    def _has_introduced(self, name: str) -> bool:
        return name in self._heard and self._heard[name].introduced is not None

    def _incarnation_of(self, name: str) -> int:
        """As it was decided."""
        return self.record.incarnations[self.record.members.voter_names.index(name)]
