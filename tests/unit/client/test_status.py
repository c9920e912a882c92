"""What `status()` makes of the answers of some nodes and the silence of others."""

import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from holdfast.client import status
from holdfast.client.blocking import Client
from holdfast.client.protocol import codec
from holdfast.client.protocol.errors import ConnectFailed, HoldfastError, NoLeader
from holdfast.client.protocol.frames import write_frame
from holdfast.client.protocol.messages import Answered, Inquiry, Pong
from holdfast.client.protocol.queries import NodeStatus
from holdfast.client.protocol.replies import Answer, Done, Failed, MemberDescribed, NodeDescribed
from holdfast.client.protocol.values import Place
from holdfast.client.status import ClusterStatus, Heard, NodeState
from tests.fakes.scripted_server import Brain, ScriptedServer

REFUSED = ConnectFailed("Connection refused", addresses="")


def member(number: int, lag: int | None = None) -> MemberDescribed:
    return MemberDescribed(f"n{number}", f"h:{number}", True, True, lag)


def described(number: int, **changes: Any) -> NodeDescribed:
    """Node n1, n2 or n3, which follows n1 in term 5 unless told otherwise."""
    plain = NodeDescribed(
        node=f"n{number}",
        cluster_id="ours",
        address=f"h:{number}",
        role="follower",
        term=5,
        leader="n1",
        leader_address="h:1",
        applied=100 - number,
        committed=100,
        last=110 - number,
        time_ms=0,
        fsync="always",
        pid=1_000 + number,
        members=(member(1), member(2), member(3)),
    )
    return replace(plain, **changes)


LEADER = described(1, role="leader", members=(member(1), member(2, 4), member(3, 40)))


def rounds(known: str, world: Mapping[str, Heard]) -> tuple[list[list[str]], ClusterStatus]:
    """What is asked, round by round, and what comes of it, where these addresses answer and no others."""
    asked = []
    steps = status.ask(known.split(","))
    try:
        wanted = next(steps)
        while True:
            asked.append(wanted)
            wanted = steps.send({address: world.get(address, REFUSED) for address in wanted})
    except StopIteration as end:
        return asked, end.value


def test_one_address_leads_to_all_members() -> None:
    asked, found = rounds("h:2", {"h:1": LEADER, "h:2": described(2), "h:3": described(3)})
    assert asked == [["h:2"], ["h:1", "h:3"]]
    assert (found.leader, found.term, found.fsync, found.cluster_id) == ("n1", 5, "always", "ours")
    assert found.nodes == [
        NodeState(name="n1", pid=1_001, address="h:1", role="leader", applied=99, lag=0, fsync="always"),
        NodeState(name="n2", pid=1_002, address="h:2", role="follower", applied=98, lag=4, fsync="always"),
        NodeState(name="n3", pid=1_003, address="h:3", role="follower", applied=97, lag=40, fsync="always"),
    ]


def test_a_node_that_is_down_is_in_it_with_the_lag_that_the_leader_knows() -> None:
    _, found = rounds("h:1,h:2,h:3", {"h:1": LEADER, "h:2": described(2)})
    assert found.nodes[2] == NodeState(name="n3", address="h:3", role="down", lag=40, problem="Connection refused")


def test_without_its_leader_a_cluster_says_whom_it_takes_for_it() -> None:
    _, found = rounds("h:2", {"h:2": described(2), "h:3": described(3, leader=None, term=4, role="candidate")})
    assert (found.leader, found.term) == ("n1", 5)
    assert [(node.name, node.role, node.lag) for node in found.nodes] == [
        ("n1", "down", None),
        ("n2", "follower", None),
        ("n3", "candidate", None),
    ]
    _, found = rounds("h:2", {"h:2": described(2, leader=None)})
    assert found.leader is None


def test_an_old_leader_is_outvoted_by_its_successor() -> None:
    new = described(2, role="leader", term=6, leader="n2")
    _, found = rounds("h:1,h:2,h:3", {"h:1": LEADER, "h:2": new, "h:3": described(3, term=6, leader="n2")})
    assert (found.leader, found.term) == ("n2", 6)
    _, found = rounds("h:1,h:3", {"h:1": LEADER, "h:3": described(3, term=6, leader="n2")})
    assert (found.leader, found.term) == ("n2", 6)


def test_a_candidate_that_nobody_hears_does_not_unseat_the_leader() -> None:
    lonely = described(3, role="candidate", term=90, leader=None, leader_address=None)
    _, found = rounds("h:1,h:2,h:3", {"h:1": LEADER, "h:2": described(2), "h:3": lonely})
    assert (found.leader, found.term) == ("n1", 5)
    assert found.nodes[2].role == "candidate"


def test_the_weakest_fsync_is_named() -> None:
    _, found = rounds("h:1", {"h:1": LEADER, "h:2": described(2, fsync="os")})
    assert found.fsync == "os"
    assert [node.fsync for node in found.nodes] == ["always", "os", None]


def test_a_silent_address_that_is_no_members_is_no_node() -> None:
    alone = replace(LEADER, members=(member(1),))
    _, found = rounds("h:1,h:2,h:3", {"h:1": alone})
    assert [node.name for node in found.nodes] == ["n1"]


def test_a_node_that_is_reached_under_two_names_is_one() -> None:
    asked, found = rounds("alias:1", {"alias:1": LEADER, "h:1": LEADER})
    assert asked == [["alias:1"], ["h:1", "h:2", "h:3"]]
    assert [(node.name, node.address) for node in found.nodes] == [("n1", "h:1"), ("n2", "h:2"), ("n3", "h:3")]


def test_a_node_of_another_cluster_is_named_and_not_believed() -> None:
    other = described(1, cluster_id="theirs", address="x:1", role="leader", term=99, fsync="os", members=())
    _, found = rounds("h:1,x:1", {"h:1": LEADER, "x:1": other})
    assert (found.leader, found.term, found.fsync, found.cluster_id) == ("n1", 5, "always", "ours")
    assert [node.name for node in found.nodes] == ["n1", "n2", "n3", "n1"]
    assert found.nodes[3].problem == "belongs to another cluster, theirs"


def test_a_member_whose_address_nobody_knows_is_down() -> None:
    unknown = replace(LEADER, members=(member(1), MemberDescribed("n2", None, True, False, 7)))
    asked, found = rounds("h:1", {"h:1": unknown})
    assert asked == [["h:1"]]
    problem = "its address for clients is not known"
    assert found.nodes[1] == NodeState(name="n2", address=None, lag=7, problem=problem)


def test_members_without_end_are_not_asked_without_end() -> None:
    crowd = replace(LEADER, members=tuple(member(number) for number in range(1, 200)))
    asked, found = rounds("h:1", {"h:1": crowd})
    assert sum(map(len, asked)) == 64
    assert len(found.nodes) == 199
    assert found.nodes[-1].problem == "was not asked"


def test_nobody_answers() -> None:
    with pytest.raises(ConnectFailed) as caught:
        rounds("h:1,h:2", {"h:2": REFUSED})
    assert caught.value.addresses == "h:1,h:2"


def test_where_no_node_answers_yet_one_that_says_why_is_heard() -> None:
    with pytest.raises(NoLeader, match="not founded yet"):
        rounds("h:1,h:2", {"h:1": REFUSED, "h:2": NoLeader("the cluster is not founded yet")})


# One connection ----------------------------------------------------------------------------------------


def told(*messages: Any) -> bytes:
    frames = (codec.encode_message(message) for message in messages)
    return b"".join(bytes(part) for header, body in frames for part in write_frame(header, *body))


def test_an_exchange_ends_with_what_the_node_says() -> None:
    place = Place(1, -1, 1)
    answer = told(Pong(1), Answered(1, Answer(place, LEADER)))
    exchange = status.Exchange()
    assert [exchange.feed(answer[at : at + 1]) for at in range(len(answer))] == [None] * (len(answer) - 1) + [LEADER]
    assert status.Exchange().feed(told(Answered(1, Answer(place, Failed(NoLeader()))))) == NoLeader()
    for odd in (told(Answered(1, Answer(place, Done()))), b"\x00" * 8):
        assert isinstance(status.Exchange().feed(odd), HoldfastError)


# Real nodes --------------------------------------------------------------------------------------------


@pytest.fixture
def nodes() -> Iterator[list[ScriptedServer]]:
    """Three nodes of one cluster; the first leads."""
    brain = Brain()
    servers = [ScriptedServer(brain, f"n{number}") for number in (1, 2, 3)]
    for server in servers:
        server.members = servers
        server.leader = servers[0].address
    yield servers
    for server in servers:
        server.stop()


def test_every_node_is_asked_itself_and_none_redirects(nodes: list[ScriptedServer]) -> None:
    with Client(nodes[2].address) as client:
        found = client.status()
    assert (found.leader, found.term, found.fsync) == ("n1", 1, "always")
    assert [(node.name, node.address, node.role) for node in found.nodes] == [
        ("n1", nodes[0].address, "leader"),
        ("n2", nodes[1].address, "follower"),
        ("n3", nodes[2].address, "follower"),
    ]
    for node in nodes:
        (asked,) = node.arrived
        assert isinstance(asked, Inquiry) and asked.stale and isinstance(asked.query, NodeStatus)


def test_a_killed_node_costs_no_waiting(nodes: list[ScriptedServer]) -> None:
    nodes[0].stop()
    began_s = time.monotonic()
    with Client(",".join(node.address for node in nodes)) as client:
        found = client.status()
    assert time.monotonic() - began_s < status.ANSWER_S
    assert [node.role for node in found.nodes] == ["down", "follower", "follower"]
    assert found.nodes[0].problem == "Connection refused"
    assert found.leader == "n1"  # as the others still believe
    nodes[0].start()


def test_a_frozen_node_is_waited_for_once(nodes: list[ScriptedServer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "ANSWER_S", 0.2)
    nodes[1].frozen = True
    with Client(nodes[0].address) as client:
        found = client.status()
    assert [(node.role, node.problem) for node in found.nodes][1] == ("down", "no answer in time")


def test_a_node_that_hangs_up_or_declines_is_down(nodes: list[ScriptedServer]) -> None:
    nodes[1].fail(NodeStatus, "drop_before")
    nodes[2].fail(NodeStatus, NoLeader())
    with Client(nodes[0].address) as client:
        found = client.status()
    assert [(node.role, node.problem) for node in found.nodes][1:] == [
        ("down", "closed the connection without an answer"),
        ("down", "no node leads now; retry"),
    ]


def test_a_short_timeout_is_kept() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        began_s = time.monotonic()
        known = f"{address},no.such.host.invalid:1,127.0.0.1:0"
        with Client(known, timeout_ms=50) as client, pytest.raises(ConnectFailed):
            client.status()
        assert time.monotonic() - began_s < status.ANSWER_S
