"""A cluster begins once, with all its nodes, whoever stops or loses its disk at whichever step (R24).

Real cores and identity files on disks in memory; a seed decides who meets whom and what arrives next.
"""

from collections import deque
from collections.abc import Callable, Iterable
from random import Random

import pytest

from holdfast.client.protocol.errors import HoldfastError, Misuse
from holdfast.cluster.founding import (
    Action,
    ClusterExists,
    Fail,
    Finish,
    Founding,
    FoundingLost,
    MembersDiffer,
    Save,
    Send,
)
from holdfast.cluster.identity import IdentityFile, Record, Stage
from holdfast.cluster.membership import Configuration, Member
from holdfast.cluster.messages import Agreed, Found, FoundingMessage, Introduce, decode, encode
from tests.fakes.disk import MemoryDisk, PowerCut

STEPS_MAX = 5_000  # many times what any of these worlds needs
NAMES = ("n1", "n2", "n3")


class Host:
    """One node: a disk, and while it is up a process on it."""

    def __init__(self, world: "World", name: str, listed: Iterable[str]) -> None:
        self.world, self.name, self.listed = world, name, tuple(listed)
        self.disk = MemoryDisk()
        self.error: HoldfastError | None = None
        self.core: Founding | None = None  # while it takes part in the founding
        self.formed: Record | None = None  # while it runs as part of a cluster
        self.kept: Record | None = None  # the newest record that the disk is known to hold
        self.sessions: dict[str, deque[bytes]] = {}  # what is on its way to us
        self._draws = Random(name)

    @property
    def up(self) -> bool:
        return self.core is not None or self.formed is not None

    def file(self) -> IdentityFile:
        return IdentityFile("data", "data/log-0/journal", disk=self.disk, segment_bytes=1_024)

    def start(self) -> None:
        self.error = None
        try:
            with self.file() as file:
                record = file.open(self.name, lambda: self._draws.getrandbits(63))
            self.kept = record
            if record.stage == Stage.FORMED:
                self.formed = record
                return
            addresses = {name: f"{name}:7421" for name in self.listed}
            self.core = Founding(record, addresses, f"{self.name}:7401", self.world.new_cluster_id)
            self.perform(self.core.begin())
        except PowerCut:
            self.stop(power_lost=True)
        except HoldfastError as error:
            self.error = error

    def perform(self, actions: list[Action]) -> None:
        try:
            for action in actions:
                match action:
                    case Save(record=record):
                        self.file().save(record)
                        self.kept = record
                    case Send(peer=peer, message=message):
                        there = self.world.hosts[peer].sessions.get(self.name)
                        if peer in self.sessions and there is not None:  # else it is lost with the session
                            there.append(encode(message))
                    case Finish():
                        assert self.core is not None
                        self.formed = self.core.record
                        self.world.ever_formed.setdefault(self.formed.cluster_id, set()).add(self.name)
                        self.leave()
                        self.core = None
                    case Fail(error=error):
                        self.error = error
                        self.leave()
                        self.core = None
        except PowerCut:
            self.stop(power_lost=True)

    def hear(self, peer: str) -> None:
        assert self.core is not None
        _, message = decode(self.sessions[peer].popleft())
        assert isinstance(message, FoundingMessage)
        self.perform(self.core.received(peer, message))

    def leave(self) -> None:
        """All sessions end. What the others were sent before is delivered, or not, as they come to it."""
        for peer in list(self.sessions):
            self.world.disconnect(self.name, peer, drained=self.world.rng.random() < 0.5)

    def stop(self, power_lost: bool) -> None:
        self.core = self.formed = None
        self.leave()
        if power_lost:
            self.disk.crash(self.world.rng if self.world.rng.random() < 0.7 else None)
        else:
            self.disk.kill()

    def wipe(self) -> None:
        self.stop(power_lost=False)
        self.disk, self.kept, self.error = MemoryDisk(), None, None


class World:
    def __init__(self, seed: int = 0, names: Iterable[str] = NAMES, lists: dict[str, Iterable[str]] | None = None):
        self.rng = Random(seed)
        names = tuple(names)
        self.cluster_ids = 0
        self.ever_formed: dict[str, set[str]] = {}
        self.hosts = {name: Host(self, name, (lists or {}).get(name, names)) for name in names}

    def new_cluster_id(self) -> str:
        self.cluster_ids += 1
        return f"c{self.cluster_ids}"

    def connect(self, one: Host, other: Host) -> None:
        if one.formed is not None and other.formed is not None:
            return
        for here, there in ((one, other), (other, one)):
            if there.formed is not None and here.core is not None:
                here.perform(here.core.known(there.name, there.formed.cluster_id))
                return
        for here, there in ((one, other), (other, one)):
            here.sessions[there.name] = deque()
        for here, there in ((one, other), (other, one)):
            assert here.core is not None and there.kept is not None
            here.perform(here.core.connected(there.name, there.kept.incarnation))

    def disconnect(self, one: str, other: str, drained: bool = False) -> None:
        """`drained`: the other side reads what had come to it before it learns of the end."""
        here, there = self.hosts[one], self.hosts[other]
        here.sessions.pop(other, None)
        while drained and there.core is not None and there.sessions.get(one):
            there.hear(one)
        ended = there.sessions.pop(one, None)
        for host, peer in ((here, other), (there, one)):
            if host.core is not None and (host is here or ended is not None):
                host.perform(host.core.disconnected(peer))

    def choices(self) -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = []
        hosts = list(self.hosts.values())
        for host in hosts:
            if not host.up and host.error is None:
                found.append(host.start)
            found += [lambda host=host, peer=peer: host.hear(peer) for peer in host.sessions if host.sessions[peer]]  # type: ignore[misc]
        for number, one in enumerate(hosts):
            for other in hosts[number + 1 :]:
                both_run = one.formed is not None and other.formed is not None
                if one.up and other.up and not both_run and other.name not in one.sessions:
                    found.append(lambda one=one, other=other: self.connect(one, other))  # type: ignore[misc]
        return found

    def step(self) -> bool:
        choices = self.choices()
        if choices:
            self.rng.choice(choices)()
            self.check()
        return bool(choices)

    def run(self, steps: int = STEPS_MAX) -> None:
        """Until nothing can happen any more, or so many steps."""
        for _ in range(steps):
            if not self.step():
                return
        assert steps < STEPS_MAX, "it never comes to rest"

    def check(self) -> None:
        """What must hold after every step."""
        formed = [host.formed for host in self.hosts.values() if host.formed is not None]
        assert len(self.ever_formed) <= 1, self.ever_formed
        for record in formed:
            assert record.incarnation == record.incarnations[record.members.voter_names.index(record.node)]
            for name, incarnation in zip(record.members.voter_names, record.incarnations, strict=True):
                kept = self.hosts[name].kept
                if kept is not None and kept.incarnation == incarnation:
                    assert (kept.cluster_id, kept.members) == (record.cluster_id, record.members)
        for host in self.hosts.values():
            if isinstance(host.error, FoundingLost):  # its remedy is to empty all folders
                served = self.ever_formed.get(host.error.cluster_id, set())
                assert len(served) <= len(self.hosts) // 2, f"{host.error} though {served} were formed"

    def assert_all_formed(self) -> None:
        records = [host.formed for host in self.hosts.values()]
        assert all(records), {host.name: host.error or host.core for host in self.hosts.values()}
        assert len({(record.cluster_id, record.members) for record in records if record}) == 1


# All goes well -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("n1",), ("n1", "n2"), NAMES, ("n1", "n10", "n2", "n3", "n4")], ids=len)
@pytest.mark.parametrize("seed", range(20))
def test_nodes_that_list_each_other_become_one_cluster(names: tuple[str, ...], seed: int) -> None:
    world = World(seed, names)
    world.run()
    world.assert_all_formed()
    record = world.hosts[names[0]].formed
    assert record is not None
    expected = (Member(name, f"{name}:7421", f"{name}:7401") for name in sorted(names))
    assert record.members == Configuration(tuple(expected))


def test_a_node_without_peers_waits_for_nobody() -> None:
    core = Founding(Record(node="n1", incarnation=5), {"n1": "h:1"}, "h:2", lambda: "c1")
    deciding, formed, finish = core.begin()
    assert isinstance(deciding, Save) and deciding.record.stage == Stage.DECIDING
    assert isinstance(formed, Save) and formed.record.stage == Stage.FORMED
    assert finish == Finish()
    assert formed.record.members == Configuration((Member("n1", "h:1", "h:2"),))


@pytest.mark.parametrize("absent", NAMES)
def test_while_one_is_absent_nothing_is_formed_and_it_completes_the_cluster_when_it_comes(absent: str) -> None:
    world = World(1)
    world.hosts[absent].error = Misuse("not started yet")
    world.run()
    assert world.cluster_ids == 0
    for host in world.hosts.values():
        if host.name != absent:
            assert host.kept is not None and host.kept.stage == Stage.NEW
            assert host.core is not None and host.core.waits_for == (absent,)
    world.hosts[absent].error = None
    world.run()
    world.assert_all_formed()


def test_a_restarted_cluster_is_not_founded_again() -> None:
    world = World(1)
    world.run()
    for host in world.hosts.values():
        host.stop(power_lost=True)
    world.run()
    world.assert_all_formed()
    assert world.cluster_ids == 1


# Somebody stops ------------------------------------------------------------------------------------------


def disk_steps(seed: int, victim: str) -> int:
    world = World(seed)
    world.run()
    return world.hosts[victim].disk.steps


@pytest.mark.parametrize("victim", NAMES)
@pytest.mark.parametrize("seed", range(4))
def test_the_power_of_one_may_go_at_any_step_of_its_disk(seed: int, victim: str) -> None:
    for step in range(disk_steps(seed, victim)):
        world = World(seed)
        world.hosts[victim].disk.cut_at = step
        world.run()
        world.assert_all_formed()


@pytest.mark.parametrize("power_lost", [True, False], ids=["power", "killed"])
@pytest.mark.parametrize("victims", [("n1",), ("n2",), ("n3",), ("n1", "n2"), NAMES], ids="+".join)
def test_any_may_stop_between_any_two_events(victims: tuple[str, ...], power_lost: bool) -> None:
    for seed in range(3):
        at = 0
        while True:
            world = World(seed)
            world.run(at)
            if not world.choices():
                break
            for victim in victims:
                world.hosts[victim].stop(power_lost)
            world.check()
            world.run()
            world.assert_all_formed()
            at += 1
        assert at > 15


@pytest.mark.parametrize("seed", range(40))
def test_a_storm_of_stops_and_lost_connections_ends_in_one_cluster(seed: int) -> None:
    world = World(seed, ("n1", "n2", "n3", "n4"))
    for _ in range(60):
        world.run(world.rng.randrange(8))
        host = world.rng.choice(list(world.hosts.values()))
        match world.rng.randrange(4):
            case 0:
                host.stop(power_lost=world.rng.random() < 0.5)
            case 1:
                host.disk.cut_at = host.disk.steps + world.rng.randrange(12)
            case _ if host.sessions:
                world.disconnect(host.name, world.rng.choice(sorted(host.sessions)), drained=world.rng.random() < 0.5)
        world.check()
    for host in world.hosts.values():
        host.disk.cut_at = None
    world.run()
    world.assert_all_formed()


# Somebody loses its disk ---------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", NAMES)
@pytest.mark.parametrize("seed", range(12))
def test_a_disk_may_be_lost_at_any_event_and_never_votes_under_its_old_name_again(seed: int, victim: str) -> None:
    """`World.check` has the rules; here is what each case must come to."""
    outcomes = set()
    at = 0
    while True:
        world = World(seed)
        world.run(at)
        if not world.choices():
            break
        host = world.hosts[victim]
        existed = host.kept is not None
        host.wipe()
        others = [each.kept for each in world.hosts.values() if each is not host]
        promised = existed and any(kept is not None and kept.cluster_id for kept in others)
        world.run()
        outcomes.add(outcome(world, host, promised))
        at += 1
    assert outcomes == {"all formed", "lost", "refused"}


def outcome(world: World, host: Host, promised: bool) -> str:
    """`promised`: when it was lost, another disk held a decision with it in."""
    if not promised:
        world.assert_all_formed()
        return "all formed"
    assert host.formed is None
    others = [each for each in world.hosts.values() if each is not host]
    if any(each.formed for each in others):
        assert isinstance(host.error, ClusterExists), host.error
        assert all(each.formed for each in others)
        return "refused"
    lost = [each.error for each in world.hosts.values() if isinstance(each.error, FoundingLost)]
    assert lost and {error.node for error in lost} == {host.name}
    assert "empty the data folders of all" in str(lost[0])
    return "lost"


def test_a_formed_cluster_refuses_a_wiped_node_again_and_again() -> None:
    world = World(3)
    world.run()
    for _ in range(3):
        world.hosts["n2"].wipe()
        world.run()
        error = world.hosts["n2"].error
        assert isinstance(error, ClusterExists) and isinstance(error, Misuse)
        assert error.cluster_id == "c1" and "name that was never used" in str(error)


# Word for word -------------------------------------------------------------------------------------------

ADDRESSES = {"n1": "h1:1", "n2": "h2:1", "n3": "h3:1"}
HELLO = Introduce("h:2", "", NAMES)
MEMBERS = Configuration((Member("n1", "h1:1", "h1:2"), Member("n2", "h2:1", "h:2"), Member("n3", "h3:1", "h:2")))
FOUND = Found("c1", MEMBERS, (11, 12, 13))


def core_of(name: str, stage: Stage = Stage.NEW) -> Founding:
    record = Record(node=name, incarnation=10 + int(name[1]))
    if stage != Stage.NEW:
        record = Record(
            node=name,
            incarnation=record.incarnation,
            stage=stage,
            cluster_id="c1",
            members=MEMBERS,
            incarnations=FOUND.incarnations,
        )
    return Founding(record, ADDRESSES, "h1:2", lambda: "c1")


def waiting(core: Founding) -> tuple[str, ...]:
    return core.waits_for


def failure(actions: list[Action]) -> HoldfastError:
    assert isinstance(actions[-1], Fail)
    return actions[-1].error


def test_the_decision_is_durable_before_it_is_said_and_names_every_disk() -> None:
    core = core_of("n1")
    assert core.begin() == []
    assert core.connected("n2", 12) == [Send("n2", Introduce("h1:2", "", NAMES))]
    assert core.connected("n3", 13)
    assert core.received("n2", HELLO) == []
    assert waiting(core) == ("n3",)
    save, *sends = core.received("n3", HELLO)
    assert save == Save(core.record) and core.record.stage == Stage.DECIDING
    assert sends == [Send("n2", FOUND), Send("n3", FOUND)]
    assert waiting(core) == ("n2", "n3")
    assert core.received("n2", Agreed("c1")) == []
    assert waiting(core) == ("n3",)
    decided = core.record
    assert core.received("n3", Agreed("c1")) == [Save(decided.at(Stage.FORMED)), Finish()]
    assert core.record == decided.at(Stage.FORMED)


def test_an_agreement_is_durable_before_it_is_said_and_is_said_again() -> None:
    core = core_of("n2")
    core.connected("n1", 11)
    core.received("n1", HELLO)
    save, send = core.received("n1", FOUND)
    assert save == Save(core.record) and core.record.stage == Stage.AGREED
    assert send == Send("n1", Agreed("c1"))
    assert core.received("n1", FOUND) == [Send("n1", Agreed("c1"))]
    assert core.connected("n3", 13) == [Send("n3", Introduce("h1:2", "c1", NAMES))]
    assert core.known("n3", "c1") == [Save(core.record), Finish()]


def test_a_founder_that_comes_back_resumes_with_the_same_cluster_and_counts_who_has_agreed() -> None:
    core = core_of("n1", Stage.DECIDING)
    assert core.begin() == []
    core.connected("n2", 12)
    core.connected("n3", 13)
    assert core.received("n2", Introduce("h:2", "c1", NAMES)) == []
    assert waiting(core) == ("n3",)
    assert core.received("n3", HELLO) == [Send("n3", FOUND)]
    assert core.received("n3", Agreed("c1"))[-1] == Finish()


def test_an_agreement_to_another_cluster_does_not_count() -> None:
    core = core_of("n1", Stage.DECIDING)
    core.connected("n2", 12)
    assert core.received("n2", Agreed("c2")) == []
    assert waiting(core) == ("n2", "n3")


@pytest.mark.parametrize("introduced", [HELLO, Introduce("h:2", "c1", NAMES)], ids=["new", "agreed"])
def test_a_founder_refuses_another_disk_under_a_decided_name_and_lets_it_know(introduced: Introduce) -> None:
    core = core_of("n1", Stage.DECIDING)
    core.connected("n2", 99)
    actions = core.received("n2", introduced)
    assert actions[0] == Send("n2", FOUND)
    assert failure(actions) == FoundingLost(node="n2", cluster_id="c1")


def test_another_disk_refuses_a_founding_that_does_not_mean_it() -> None:
    core = Founding(Record(node="n2", incarnation=99), ADDRESSES, "h:2", lambda: "c9")
    core.connected("n1", 11)
    actions = core.received("n1", FOUND)
    assert failure(actions) == FoundingLost(node="n2", cluster_id="c1")
    assert core.record.stage == Stage.NEW and len(actions) == 1


def test_who_has_agreed_agrees_to_nothing_else() -> None:
    core = core_of("n2", Stage.AGREED)
    core.connected("n1", 11)
    actions = core.received("n1", Found("c2", MEMBERS, (11, 12, 13)))
    assert isinstance(failure(actions), FoundingLost) and len(actions) == 1
    assert core.record.cluster_id == "c1"


def test_only_the_founder_founds() -> None:
    core = core_of("n2")
    core.connected("n3", 13)
    actions = core.received("n3", FOUND)
    assert isinstance(failure(actions), HoldfastError)
    assert core.record.stage == Stage.NEW


@pytest.mark.parametrize(
    ("name", "stage", "cluster_id"),
    [
        ("n1", Stage.NEW, "c1"),
        ("n2", Stage.NEW, "c1"),
        ("n2", Stage.AGREED, "c2"),
        ("n1", Stage.DECIDING, "c1"),  # nobody is formed before the founder is: its disk is an old copy
    ],
)
def test_who_meets_a_cluster_that_it_has_not_agreed_to_may_only_join_it(
    name: str, stage: Stage, cluster_id: str
) -> None:
    error = failure(core_of(name, stage).known("n3", cluster_id))
    assert error == ClusterExists(node="n3", cluster_id=cluster_id)


def test_a_founder_without_its_disk_waits_for_all_before_it_says_that_nothing_was_served() -> None:
    core = core_of("n1")
    core.connected("n2", 12)
    core.connected("n3", 13)
    assert core.received("n2", Introduce("h:2", "c0", NAMES)) == []
    assert failure(core.received("n3", HELLO)) == FoundingLost(node="n1", cluster_id="c0")
    other = core_of("n1")
    other.connected("n2", 12)
    other.received("n2", Introduce("h:2", "c0", NAMES))
    assert failure(other.known("n3", "c0")) == ClusterExists(node="n3", cluster_id="c0")


def test_who_has_agreed_learns_that_the_founder_lost_its_disk() -> None:
    core = core_of("n2", Stage.AGREED)
    core.connected("n1", 99)
    assert core.received("n1", HELLO) == []
    core.connected("n3", 13)
    actions = core.received("n3", Introduce("h:2", "c1", NAMES))
    assert failure(actions) == FoundingLost(node="n1", cluster_id="c1")


@pytest.mark.parametrize(
    ("theirs", "facts"),
    [
        (("n1", "n2"), {"only_theirs": "none", "only_ours": "n3"}),
        (("n1", "n2", "n3", "n4"), {"only_theirs": "n4", "only_ours": "none"}),
        (("n1", "n2", "n4"), {"only_theirs": "n4", "only_ours": "n3"}),
    ],
)
@pytest.mark.parametrize("stage", [Stage.NEW, Stage.DECIDING])
def test_an_unequal_list_is_refused_and_the_difference_named(
    theirs: tuple[str, ...], facts: dict[str, str], stage: Stage
) -> None:
    core = core_of("n1", stage)
    core.connected("n2", 12)
    error = failure(core.received("n2", Introduce("h:2", "", theirs)))
    assert isinstance(error, MembersDiffer) and isinstance(error, Misuse)
    assert error.facts | facts == error.facts
    assert "n2" in str(error)


def test_one_who_is_not_listed_is_refused_whatever_it_lists() -> None:
    core = core_of("n1")
    core.connected("n9", 1)
    assert isinstance(failure(core.received("n9", HELLO)), MembersDiffer)


@pytest.mark.parametrize("seed", range(10))
def test_unequal_lists_are_refused_by_both_who_meet_and_nothing_is_formed(seed: int) -> None:
    world = World(seed, lists={"n3": ("n1", "n2", "n3", "n4")})
    world.run()
    assert world.cluster_ids == 0
    assert sum(isinstance(host.error, MembersDiffer) for host in world.hosts.values()) >= 1
    met = World(seed, ("n1", "n2"), lists={"n2": ("n1", "n2", "n3")})
    one, other = met.hosts.values()
    for host in (one, other):
        host.start()
    assert one.core is not None and other.core is not None
    for here, there in ((one, other), (other, one)):
        assert here.core is not None
        (send,) = here.core.connected(there.name, 1)
        assert isinstance(send, Send) and there.core is not None
        there.core.connected(here.name, 1)
        assert isinstance(failure(there.core.received(here.name, send.message)), MembersDiffer)


def test_a_list_that_was_changed_after_the_decision_is_refused() -> None:
    record = core_of("n1", Stage.DECIDING).record
    with pytest.raises(MembersDiffer, match="begun on this disk"):
        Founding(record, {"n1": "h1:1", "n2": "h2:1"}, "h:2", lambda: "c2")


def test_waiting_is_told_by_stage() -> None:
    assert waiting(core_of("n1")) == ("n2", "n3")
    assert waiting(core_of("n1", Stage.DECIDING)) == ("n2", "n3")
    assert waiting(core_of("n2", Stage.AGREED)) == ("n1",)
    core = core_of("n2")
    for peer, incarnation in (("n1", 11), ("n3", 13)):
        core.connected(peer, incarnation)
        core.received(peer, HELLO)
    assert waiting(core) == ("n1",)  # to decide
    core.disconnected("n3")
    assert waiting(core) == ("n3",)
