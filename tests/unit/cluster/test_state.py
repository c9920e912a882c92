"""A node's state on disk: what is trusted after which crash, and what a snapshot brings back."""

from pathlib import Path

import pytest

from holdfast.client.protocol.commands import CreateQueue, Envelope, OpenSession
from holdfast.client.protocol.errors import StateBroken
from holdfast.client.protocol.replies import QueueCreated
from holdfast.client.protocol.values import LOCAL_PRINCIPAL
from holdfast.cluster import membership
from holdfast.cluster.consensus import BATCH, NO_OP
from holdfast.cluster.journal import Entry
from holdfast.cluster.state import MARK, NodeState, Reached
from holdfast.storage.entry import encode_entry
from holdfast.storage.snapshot import SnapshotDamaged
from tests.support.machine import START_MS, produce, session_id

FIRST = Reached(1, 0, 0, membership.of(["a", "b", "c"]))


def opened(folder: Path, booted: str = "boot-1") -> NodeState:
    return NodeState(folder, FIRST, lambda: booted)


def batch(index: int, *envelopes: Envelope, term: int = 1) -> Entry:
    return BATCH + encode_entry(START_MS + index, envelopes), index, term


def opening(index: int) -> Entry:
    session = session_id(1)
    asked = Envelope(principal=LOCAL_PRINCIPAL, command=OpenSession(), session=session)
    create = Envelope(
        principal=LOCAL_PRINCIPAL, command=CreateQueue(name="q"), session=session, request_seq=1, done_below=0
    )
    return batch(index, asked, create)


def message(index: int, text: bytes = b"x") -> Entry:
    command = produce(1, text, client_id="svc", first_seq=index)
    return batch(index, Envelope(principal=LOCAL_PRINCIPAL, command=command))


def crash(state: NodeState) -> None:
    """The process is gone; what it wrote is in the page cache."""
    state.store.close()


def lose_the_page_cache(folder: Path) -> None:
    """The machine went down: of what was not synced anything may be left, here garbage."""
    (folder / "state" / "data.mdb").write_bytes(b"\x5a" * 65_536)


def test_entries_are_folded_in_order_and_their_answers_given(tmp_path: Path) -> None:
    state = opened(tmp_path)
    applied = state.apply([(NO_OP, 2, 1), opening(3), message(4)])
    assert [len(one.answers) for one in applied] == [0, 2, 1]
    assert isinstance(applied[1].answers[1].reply, QueueCreated)
    assert (state.reached.index, state.reached.term) == (4, 1)
    state.close()


def test_an_entry_out_of_order_stops_the_node(tmp_path: Path) -> None:
    state = opened(tmp_path)
    with pytest.raises(StateBroken, match="3 is applied after 1"):
        state.apply([opening(3)])
    assert state.reached == FIRST
    state.close()


def test_the_configuration_in_force_is_part_of_the_state(tmp_path: Path) -> None:
    state = opened(tmp_path)
    grown = membership.of(["a", "b", "c"], ["d"])
    state.apply([(NO_OP, 2, 1), (membership.encode(grown), 3, 1), opening(4)])
    state.close()
    again = opened(tmp_path)
    assert again.reached == Reached(4, 1, 3, grown)
    again.close()


def test_a_crash_of_the_process_loses_nothing_that_was_applied(tmp_path: Path) -> None:
    state = opened(tmp_path)
    state.apply([(NO_OP, 2, 1), opening(3), message(4)])
    before = state.digest
    crash(state)
    again = opened(tmp_path)
    assert (again.rebuilt, again.reached.index, again.digest) == (False, 4, before)
    again.close()


def test_a_crash_of_the_machine_goes_back_to_the_newest_snapshot(tmp_path: Path) -> None:
    state = opened(tmp_path)
    state.apply([(NO_OP, 2, 1), opening(3)])
    assert state.snapshot().index == 3
    at_snapshot = state.digest
    state.apply([message(4)])
    after = state.digest
    crash(state)
    lose_the_page_cache(tmp_path)
    again = opened(tmp_path, "boot-2")
    assert (again.rebuilt, again.reached.index, again.digest) == (True, 3, at_snapshot)
    again.apply([message(4)])
    assert again.digest == after
    again.close()


def test_a_crash_of_the_machine_before_any_snapshot_goes_back_to_the_beginning(tmp_path: Path) -> None:
    state = opened(tmp_path)
    state.apply([(NO_OP, 2, 1), opening(3)])
    crash(state)
    lose_the_page_cache(tmp_path)
    again = opened(tmp_path, "boot-2")
    assert (again.rebuilt, again.reached) == (True, FIRST)
    again.close()


def test_a_machine_that_goes_down_after_a_clean_end_keeps_the_state(tmp_path: Path) -> None:
    state = opened(tmp_path)
    state.apply([(NO_OP, 2, 1), opening(3)])
    state.close()
    assert not (tmp_path / MARK).exists()
    again = opened(tmp_path, "boot-2")
    assert (again.rebuilt, again.reached.index) == (False, 3)
    again.close()


def test_a_damaged_snapshot_is_passed_over_for_an_older_one(tmp_path: Path) -> None:
    state = opened(tmp_path)
    state.apply([(NO_OP, 2, 1), opening(3)])
    state.snapshot()
    state.apply([message(4)])
    state.snapshot()
    crash(state)
    lose_the_page_cache(tmp_path)
    newest = sorted((tmp_path / "snapshots").iterdir())[-1]
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(bytes(data))
    again = opened(tmp_path, "boot-2")
    assert again.reached.index == 3
    again.close()


def test_only_the_newest_snapshots_are_kept(tmp_path: Path) -> None:
    state = opened(tmp_path)
    state.apply([(NO_OP, 2, 1), opening(3)])
    for index in range(4, 9):
        state.apply([message(index)])
        state.snapshot()
    names = sorted(path.name for path in (tmp_path / "snapshots").iterdir())
    assert names == [f"{7:020d}.snapshot", f"{8:020d}.snapshot"]
    found = state.newest_snapshot()
    assert found is not None and found[1].index == 8
    state.close()


def test_a_received_snapshot_replaces_the_state_and_outlives_a_crash_of_the_machine(tmp_path: Path) -> None:
    """Once the journal begins behind it, our own older snapshots cannot rebuild us."""
    sender, receiver = opened(tmp_path / "sender"), opened(tmp_path / "receiver")
    sender.apply([(NO_OP, 2, 1), opening(3), message(4, b"from the sender")])
    sender.snapshot()
    found = sender.newest_snapshot()
    assert found is not None
    received = tmp_path / "receiver" / "snapshots" / "received.partial"
    received.write_bytes(found[0].read_bytes())
    assert receiver.install(received) == sender.reached
    assert receiver.digest == sender.digest
    crash(receiver)
    lose_the_page_cache(tmp_path / "receiver")
    again = opened(tmp_path / "receiver", "boot-2")
    assert (again.rebuilt, again.reached, again.digest) == (True, sender.reached, sender.digest)
    again.close()
    sender.close()


def test_a_received_snapshot_with_a_wrong_byte_changes_nothing(tmp_path: Path) -> None:
    sender, receiver = opened(tmp_path / "sender"), opened(tmp_path / "receiver")
    sender.apply([(NO_OP, 2, 1), opening(3)])
    sender.snapshot()
    found = sender.newest_snapshot()
    assert found is not None
    data = bytearray(found[0].read_bytes())
    data[len(data) // 2] ^= 1
    received = tmp_path / "received.partial"
    received.write_bytes(bytes(data))
    with pytest.raises(SnapshotDamaged):
        receiver.install(received)
    assert receiver.reached == FIRST
    receiver.apply([(NO_OP, 2, 1)])
    receiver.close()
    sender.close()
