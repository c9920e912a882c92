"""Members: the newest configuration in the log rules, one voter changes at a time, and nobody counts by surprise."""

import pytest

from holdfast.client.protocol.errors import BadFrame
from holdfast.cluster import membership
from holdfast.cluster.consensus import BATCH
from holdfast.cluster.membership import Configuration, ConfigurationRefused, Configurations, Member
from holdfast.cluster.messages import AppendEntries, AppendReply, SnapshotHead
from tests.simulation.scripted import NOTHING, Scripted, log, scripted

FOUR = {name: NOTHING for name in "abcd"}


def refused(script: Scripted, voters: str, learners: str = "") -> str:
    before = script["a"].journal.last
    with pytest.raises(ConfigurationRefused) as refusal:
        script["a"].propose_configuration(membership.of(voters, learners))
    assert script["a"].journal.last == before
    return str(refusal.value)


def spread(script: Scripted, *followers: str) -> None:
    script["a"].push()
    script.sync("a")
    for _ in range(3):
        script.beat("a")
        for follower in followers:
            script.exchange("a", follower)


def test_a_configuration_survives_its_bytes() -> None:
    voters = (Member("a", "host:1", "host:2"), Member("ü", ""), Member("d", "", "host:3"))
    configuration = Configuration(voters, (Member("c", "[::1]:7"),))
    encoded = membership.encode(configuration)
    assert membership.decode(encoded) == configuration
    for size in range(len(encoded)):
        with pytest.raises(BadFrame):
            membership.decode(encoded[:size])


@pytest.mark.parametrize(
    "data", [b"", b"\x10", b"\x11", b"\x11\x01\x00", membership.encode(membership.of("ab")) + b"x"]
)
def test_other_bytes_are_no_configuration(data: bytes) -> None:
    with pytest.raises(BadFrame):
        membership.decode(data)


def test_a_second_change_waits_for_the_first() -> None:
    """R21: two that overlap may have majorities without a common node."""
    with scripted(FOUR, configuration=membership.of("abc")) as script:
        script.elect("a", "b")
        assert "not committed" in refused(script, "abc", "d")  # nor is the leader's own first entry yet
        script.lead("a", "b", "c")
        script["a"].propose_configuration(membership.of("abc", "d"))
        assert "not committed" in refused(script, "ab", "d")
        spread(script, "b", "c")
        script["a"].propose_configuration(membership.of("ab", "d"))


def test_one_voter_changes_at_a_time_and_the_leader_stays() -> None:
    """R21."""
    with scripted(FOUR, configuration=membership.of("abc")) as script:
        script.lead("a", "b", "c")
        assert "more than one voter" in refused(script, "a")
        assert "transfer first" in refused(script, "bc")
        assert "learner first" in refused(script, "abcd")


def test_a_follower_proposes_no_change() -> None:
    with scripted(FOUR, configuration=membership.of("abc")) as script:
        script.lead("a", "b", "c")
        with pytest.raises(ConfigurationRefused):
            script["b"].propose_configuration(membership.of("abc", "d"))


def test_a_learner_is_counted_nowhere_and_becomes_a_voter_when_it_has_caught_up() -> None:
    with scripted(FOUR, configuration=membership.of("abc")) as script:
        script.lead("a", "b", "c")
        script["a"].propose_configuration(membership.of("abc", "d"))
        spread(script, "b", "c")
        assert "not caught up" in refused(script, "abcd")
        script["a"].propose(BATCH)
        before = script["a"].commit_index
        spread(script, "d")
        assert script["a"].match["d"] == script["a"].journal.last
        assert script["a"].commit_index == before
        spread(script, "b", "d")
        script["a"].propose_configuration(membership.of("abcd"))
        assert script["a"].configuration == membership.of("abcd")


def test_the_configuration_rules_from_its_append_and_is_gone_with_its_truncation() -> None:
    with scripted({"a": NOTHING, "b": log((1, 3))}, configuration=membership.of("abc")) as script:
        b, change = script["b"], membership.encode(membership.of("ab"))
        script.give([("a", "b", AppendEntries(1, 1, 4, 1, ((change, 5, 1),), 1, 0))])
        assert b.configuration == membership.of("ab")
        script.give([("a", "b", AppendEntries(2, 1, 4, 1, ((BATCH, 5, 2),), 1, 0))])
        assert b.configuration == membership.of("abc")


def test_a_leader_that_our_configuration_does_not_know_is_heard_and_counts_nowhere() -> None:
    """R22: a node that was removed and is added again has the stale configuration."""
    with scripted({"a": NOTHING, "z": NOTHING}, configuration=membership.of("bz")) as script:
        script.give([("a", "z", AppendEntries(3, 1, 1, 0, ((BATCH, 2, 3),), 1, 0))])
        assert script["z"].journal.last == 2
        assert [type(letter[2]) for letter in script.take("z", "a")] == [AppendReply]
        script.give([("a", "z", AppendReply(9, False, True, 3, 1, 0, 0))])
        assert script["z"].match == {"b": 0}


def test_a_snapshot_brings_its_configuration_and_ends_that_of_the_dropped_log() -> None:
    """R23."""
    change = membership.encode(membership.of("xyz"))
    with scripted({"a": NOTHING, "b": [*log((1, 3)), (1, change)]}, configuration=membership.of("abc")) as script:
        b = script["b"]
        assert b.configuration == membership.of("xyz")
        head = SnapshotHead(9, 4, 5, 1, 3, 1, bytes(32), membership.encode(membership.of("ab")))
        assert b.accepts_snapshot("a", head)
        b.snapshot_installed("a", head)
        assert (b.configuration, b.configuration_index) == (membership.of("ab"), 3)


def test_a_snapshot_inside_the_log_leaves_later_changes_in_force() -> None:
    change = membership.encode(membership.of("ab"))
    with scripted({"a": NOTHING, "b": [*log((1, 3)), (1, change)]}, configuration=membership.of("abc")) as script:
        b = script["b"]
        head = SnapshotHead(9, 3, 1, 1, 0, 1, bytes(32), membership.encode(membership.of("abc")))
        b.snapshot_installed("a", head)
        assert (b.configuration, b.configuration_index) == (membership.of("ab"), 5)


def test_a_snapshot_carries_the_configuration_in_force_at_its_index() -> None:
    known = Configurations(0, membership.of("abc"))
    known.appended(10, membership.of("abc", "d"))
    known.appended(20, membership.of("abcd"))
    assert [known.at(index)[0] for index in (9, 10, 19, 20, 99)] == [0, 10, 10, 20, 20]
    known.applied(15)
    assert known.at(15) == (10, membership.of("abc", "d"))


def test_no_name_is_a_member_twice() -> None:
    with pytest.raises(ValueError, match="repeat"):
        membership.of("ab", "b")
