"""A node's state on disk: what is trusted after which crash, and what a snapshot brings back."""

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Lock
from typing import Any

import pytest

from holdfast.client.protocol.commands import CreateQueue, Envelope, OpenSession
from holdfast.client.protocol.errors import StateBroken
from holdfast.client.protocol.replies import QueueCreated
from holdfast.client.protocol.values import LOCAL_PRINCIPAL
from holdfast.cluster import membership
from holdfast.cluster.consensus import BATCH, NO_OP
from holdfast.cluster.journal import Entry
from holdfast.cluster.state import MARK, NodeState, Prepared, Reached, StateBusy
from holdfast.storage.entry import encode_entry
from holdfast.storage.lmdb_store import LmdbStore
from holdfast.storage.snapshot import SnapshotDamaged, install_snapshot, write_snapshot
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


def received_by(folder: Path, index: int = 4) -> tuple[Path, Reached, int]:
    """A snapshot of a sender that has come to `index`, as a file in the receiver's folder; its place and digest."""
    sender = opened(folder.with_name("sender"))
    sender.apply([(NO_OP, 2, 1), opening(3), *(message(each, b"from the sender") for each in range(4, index + 1))])
    sender.snapshot()
    found = sender.newest_snapshot()
    assert found is not None
    folder.mkdir(exist_ok=True)
    received = folder / "received"
    shutil.copyfile(found[0], received)
    try:
        return received, sender.reached, sender.digest
    finally:
        sender.close()


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


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


def test_a_snapshot_that_does_not_say_what_it_is_stops_no_node_and_is_passed_over(tmp_path: Path) -> None:
    """A running node looks for its newest one every second: rot in the header of a copy is no reason to stop."""
    state = opened(tmp_path)
    state.apply([(NO_OP, 2, 1), opening(3)])
    state.snapshot()
    state.apply([message(4)])
    state.snapshot()
    older, newest = sorted((tmp_path / "snapshots").iterdir())
    data = bytearray(newest.read_bytes())
    data[40] ^= 1
    newest.write_bytes(bytes(data))
    found = state.newest_snapshot()
    assert found is not None and found[0] == older and found[1].index == 3
    older.unlink()
    assert state.newest_snapshot() is None
    state.close()


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


def test_to_rely_on_one_snapshot_lets_older_ones_go_and_no_newer_one(tmp_path: Path) -> None:
    """A newer one may have been received since the other was the newest: the journal begins behind it then."""
    state = opened(tmp_path)
    state.apply([(NO_OP, 2, 1), opening(3)])
    state.snapshot()
    [first] = (tmp_path / "snapshots").iterdir()
    state.apply([message(4)])
    state.snapshot()
    assert state.rely_on_snapshot(first)
    assert [reached.index for _, reached in state.snapshots()] == [3, 4]
    newest = state.snapshots()[-1][0]
    assert state.rely_on_snapshot(newest)
    assert [path for path, _ in state.snapshots()] == [newest]
    state.close()


def test_the_size_of_a_state_grows_with_what_is_in_it(tmp_path: Path) -> None:
    state = opened(tmp_path)
    state.apply([(NO_OP, 2, 1), opening(3)])
    before = state.size_bytes
    state.apply([message(4, b"x" * 1_000_000)])
    assert 1_000_000 <= state.size_bytes - before < 1_100_000
    state.close()


# Installing a received snapshot ------------------------------------------------------------------------


def test_a_received_snapshot_replaces_the_state_and_outlives_a_crash_of_the_machine(tmp_path: Path) -> None:
    """Once the journal begins behind it, our own older snapshots cannot rebuild us."""
    receiver = opened(tmp_path / "receiver")
    received, reached, digest = received_by(tmp_path / "receiver")
    prepared = receiver.prepare(received)
    assert prepared.reached == reached and receiver.reached == FIRST  # nothing has changed yet
    assert receiver.swap(prepared) == receiver.reached == reached
    assert receiver.digest == digest
    assert names_in(tmp_path / "receiver") == ["snapshots", "state", MARK]
    crash(receiver)
    lose_the_page_cache(tmp_path / "receiver")
    again = opened(tmp_path / "receiver", "boot-2")
    assert (again.rebuilt, again.reached, again.digest) == (True, reached, digest)
    again.close()


def test_the_state_goes_on_before_and_after_a_swap(tmp_path: Path) -> None:
    receiver = opened(tmp_path / "receiver")
    received, reached, _ = received_by(tmp_path / "receiver", index=6)
    receiver.apply([(NO_OP, 2, 1)])
    prepared = receiver.prepare(received)
    receiver.apply([opening(3)])
    receiver.swap(prepared)
    receiver.apply([message(reached.index + 1)])
    assert receiver.snapshot().index == reached.index + 1
    receiver.close()


def test_a_state_that_has_come_as_far_meanwhile_is_not_taken_back(tmp_path: Path) -> None:
    receiver = opened(tmp_path / "receiver")
    received, reached, _ = received_by(tmp_path / "receiver")
    prepared = receiver.prepare(received)
    receiver.apply([(NO_OP, 2, 1), opening(3), message(4, b"our own"), message(5)])
    ours = receiver.digest
    assert receiver.swap(prepared).index == 5 > reached.index
    assert receiver.digest == ours
    assert names_in(tmp_path / "receiver") == ["snapshots", "state", MARK]
    assert receiver.snapshot().index == 5
    receiver.close()


def test_a_prepared_state_is_swapped_in_once_and_nothing_else_is(tmp_path: Path) -> None:
    receiver = opened(tmp_path / "receiver")
    received, reached, _ = received_by(tmp_path / "receiver")
    with pytest.raises(StateBroken, match="not prepared"):
        receiver.swap(Prepared(reached))
    prepared = receiver.prepare(received)
    with pytest.raises(StateBroken, match="not prepared"):
        receiver.swap(Prepared(reached))
    receiver.swap(prepared)
    with pytest.raises(StateBroken, match="not prepared"):
        receiver.swap(prepared)
    receiver.close()


def test_a_received_snapshot_with_a_wrong_byte_changes_nothing_and_is_gone(tmp_path: Path) -> None:
    receiver = opened(tmp_path / "receiver")
    received, _, _ = received_by(tmp_path / "receiver")
    data = bytearray(received.read_bytes())
    data[len(data) // 2] ^= 1
    received.write_bytes(bytes(data))
    with pytest.raises(SnapshotDamaged):
        receiver.prepare(received)
    assert receiver.reached == FIRST and names_in(tmp_path / "receiver" / "snapshots") == []
    assert names_in(tmp_path / "receiver") == ["snapshots", "state", MARK]
    receiver.apply([(NO_OP, 2, 1)])
    assert receiver.snapshot().index == 2  # and what was refused holds up nothing
    receiver.close()


@contextmanager
def told(monkeypatch: pytest.MonkeyPatch, tell: Callable[..., None]) -> Iterator[None]:
    """Calls `tell` with the name and arguments of everything that is done to the disk, before and after it."""
    with monkeypatch.context() as patched:
        watched: list[tuple[Any, str]] = [(os, "fsync"), (LmdbStore, "close"), (LmdbStore, "__init__")]
        watched += [(Path, name) for name in ("mkdir", "rename", "unlink", "rmdir")]
        for owner, name in watched:
            patched.setattr(owner, name, watching(name, getattr(owner, name), tell))
        yield


def watching(name: str, plain: Callable[..., Any], tell: Callable[..., None]) -> Callable[..., Any]:
    def watched(*args: Any, **named: Any) -> Any:
        tell(name, "before", *args)
        result = plain(*args, **named)
        tell(name, "after", *args)
        return result

    return watched


def test_a_crash_at_any_step_of_an_installation_leaves_the_old_state_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, copies = tmp_path / "receiver", tmp_path / "copies"
    receiver = opened(home)
    receiver.apply([(NO_OP, 2, 1), opening(3)])
    receiver.snapshot()
    old = (receiver.reached, receiver.digest)
    received, reached, digest = received_by(home, index=9)
    new = (reached, digest)
    steps: list[str] = []

    def photograph(name: str, when: str, *args: object) -> None:
        shutil.copytree(home, copies / f"{len(steps)}")
        steps.append(f"{when} {name}")

    with told(monkeypatch, photograph):
        prepared = receiver.prepare(received)
        prepared_after = len(steps)
        receiver.swap(prepared)
    receiver.close()
    outcomes = [found_after_crash(copies / f"{number}", number) for number in range(len(steps))]
    assert all(process in (old, new) and machine in (old, new) for process, machine in outcomes)
    by_process, by_machine = ([outcome[which] for outcome in outcomes] for which in (0, 1))
    # Once it is the new one it stays so, and a state that is swapped in could be made again.
    assert by_process == sorted(by_process, key=lambda found: found == new)
    assert by_machine == sorted(by_machine, key=lambda found: found == new)
    assert by_machine.index(new) < prepared_after <= by_process.index(new)


def found_after_crash(folder: Path, number: int) -> tuple[tuple[Reached, int], tuple[Reached, int]]:
    """What the next start finds: after a crash of the process, and, of a further copy, of the machine."""
    machine = folder.with_name(f"{number} without power")
    shutil.copytree(folder, machine)
    lose_the_page_cache(machine)
    outcomes = []
    for home, booted in ((folder, "boot-1"), (machine, "boot-2")):
        state = opened(home, booted)
        outcomes.append((state.reached, state.digest))
        assert {"snapshots", "state", MARK} == set(names_in(home)) - {"received"}  # that one is its receiver's
        assert all(path.stem.isdigit() for path in (home / "snapshots").iterdir())
        state.apply([message(state.reached.index + 1)])
        state.close()
    return outcomes[0], outcomes[1]


def test_nothing_gets_its_name_before_it_is_synced_and_the_swap_waits_for_the_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "receiver"
    receiver = opened(home)
    received, _, _ = received_by(home)
    steps: list[str] = []

    def note(name: str, when: str, *args: Any) -> None:
        if when == "before" and name == "fsync":
            steps.append(f"sync {os.path.relpath(os.readlink(f'/proc/self/fd/{args[0]}'), home)}")
        elif when == "before" and name == "rename":
            steps.append(f"rename {os.path.relpath(args[0], home)} to {os.path.relpath(args[1], home)}")
        elif when == "before" and name in ("close", "__init__"):
            steps.append("open the store" if name == "__init__" else "close the store")

    with told(monkeypatch, note):
        prepared = receiver.prepare(received)
        steps.append("prepared")
        receiver.swap(prepared)
    receiver.close()
    kept = f"snapshots/{4:020d}.snapshot"
    assert steps == [
        "sync .",
        "sync state.incoming/data.mdb.incoming",
        "rename state.incoming/data.mdb.incoming to state.incoming/data.mdb",
        "sync state.incoming",
        "sync received",
        f"rename received to {kept}",
        "sync snapshots",
        "prepared",
        "close the store",
        "rename state.incoming/data.mdb to state/data.mdb",
        "sync state",
        "open the store",
    ]


def test_what_a_crash_left_of_snapshots_is_removed_at_the_start(tmp_path: Path) -> None:
    state = opened(tmp_path)
    state.apply([(NO_OP, 2, 1), opening(3)])
    state.snapshot()
    crash(state)
    for leftover in ("next.snapshot", "next.snapshot.partial"):
        (tmp_path / "snapshots" / leftover).write_bytes(b"half")
    (tmp_path / "state.incoming").mkdir()
    (tmp_path / "state.incoming" / "data.mdb.incoming").write_bytes(b"half")
    again = opened(tmp_path)
    assert names_in(tmp_path) == ["snapshots", "state", MARK]
    assert names_in(tmp_path / "snapshots") == [f"{3:020d}.snapshot"]
    again.close()


# One at a time -----------------------------------------------------------------------------------------


class Held:
    """Stands in for `write_snapshot`: says that it runs, and goes on when it is let."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs, self.may_go_on = Event(), Event()
        self.log: list[str] = []

        def write(store: LmdbStore, *args: Any) -> object:
            self.runs.set()
            with store.read():  # as the copy does, all the time
                assert self.may_go_on.wait(10)
            header = write_snapshot(store, *args)
            self.log.append("snapshot written")
            return header

        monkeypatch.setattr("holdfast.cluster.state.write_snapshot", write)


def test_two_snapshots_are_not_taken_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = opened(tmp_path)
    state.apply([(NO_OP, 2, 1), opening(3)])
    held = Held(monkeypatch)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(state.snapshot)
        assert held.runs.wait(10)
        state.apply([message(4)])  # which a snapshot does not hinder
        with pytest.raises(StateBusy):
            state.snapshot()
        held.may_go_on.set()
        assert first.result(10).index == 4
    assert state.snapshot().index == 4
    state.close()


def test_an_installation_waits_for_the_snapshot_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The swap closes the store that the snapshot reads, and it must not wait for that on the node's thread."""
    state = opened(tmp_path / "receiver")
    received, reached, digest = received_by(tmp_path / "receiver", index=9)
    state.apply([(NO_OP, 2, 1), opening(3)])
    held = Held(monkeypatch)

    def install(*args: Any) -> object:
        held.log.append("installation begins")
        return install_snapshot(*args)

    monkeypatch.setattr("holdfast.cluster.state.install_snapshot", install)

    class Watched:
        """Lets the snapshot go on when somebody waits for it."""

        def __init__(self) -> None:
            self.inner = Lock()
            self.release = self.inner.release

        def acquire(self, blocking: bool = True) -> bool:
            if blocking:
                held.may_go_on.set()
            return self.inner.acquire(blocking)

    state._alone = Watched()  # type: ignore[assignment]
    with ThreadPoolExecutor() as threads:
        snapshot = threads.submit(state.snapshot)
        assert held.runs.wait(10)
        prepared = threads.submit(state.prepare, received).result(10)
        assert snapshot.result(10).index == 3
    assert held.log == ["snapshot written", "installation begins"]
    assert state.swap(prepared) == reached and state.digest == digest
    state.close()


def test_no_snapshot_is_begun_between_preparing_and_swapping(tmp_path: Path) -> None:
    state = opened(tmp_path / "receiver")
    received, reached, _ = received_by(tmp_path / "receiver")
    state.apply([(NO_OP, 2, 1)])
    prepared = state.prepare(received)
    with pytest.raises(StateBusy):
        state.snapshot()
    state.swap(prepared)
    assert state.snapshot() == reached
    state.close()


def test_a_state_that_was_made_anew_is_no_witness_of_what_was_answered_until_a_clean_end(tmp_path: Path) -> None:
    """Also for a start after the one that made it, which finds it whole; a crash of the process loses nothing."""
    state = opened(tmp_path)
    state.apply([(NO_OP, 2, 1), opening(3)])
    former = "boot-1"
    for booted, unbroken in (("boot-1", True), ("boot-2", False), ("boot-2", False), ("boot-3", False)):
        crash(state)
        state = opened(tmp_path, booted)
        assert (state.unbroken, state.rebuilt) == (unbroken, booted != former)
        former = booted
    state.close()
    state = opened(tmp_path, "boot-3")
    assert state.unbroken
    state.mark_damaged()
    state.close()
    state = opened(tmp_path, "boot-3")
    assert not state.unbroken
    state.close()


# Damage ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [crash, NodeState.close])
def test_a_damaged_state_is_made_anew_at_the_next_start_however_the_node_ended(
    tmp_path: Path, end: Callable[[NodeState], None]
) -> None:
    state = opened(tmp_path)
    state.apply([(NO_OP, 2, 1), opening(3)])
    state.snapshot()
    at_snapshot = state.digest
    state.apply([message(4)])
    state.mark_damaged()
    end(state)
    again = opened(tmp_path)
    assert (again.rebuilt, again.reached.index, again.digest) == (True, 3, at_snapshot)
    again.close()
    whole = opened(tmp_path)
    assert not whole.rebuilt
    whole.close()


def test_no_snapshot_is_made_of_a_damaged_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = opened(tmp_path)
    state.apply([(NO_OP, 2, 1), opening(3)])
    state.snapshot()
    state.apply([message(4)])

    written = 0

    def find_damage(*args: Any) -> object:
        nonlocal written
        written += 1
        state.mark_damaged()
        return write_snapshot(*args)

    with monkeypatch.context() as patched:
        patched.setattr("holdfast.cluster.state.write_snapshot", find_damage)
        with pytest.raises(StateBroken, match="damaged"):
            state.snapshot()
        with pytest.raises(StateBroken, match="damaged"):
            state.snapshot()
    assert written == 1  # none is even begun, once it is known
    newest = state.newest_snapshot()
    assert newest is not None and newest[1].index == 3
    state.close()


def test_a_received_state_heals_a_damaged_one(tmp_path: Path) -> None:
    state = opened(tmp_path / "receiver")
    received, reached, _ = received_by(tmp_path / "receiver")
    state.apply([(NO_OP, 2, 1)])
    state.mark_damaged()
    state.swap(state.prepare(received))
    assert state.snapshot() == reached
    crash(state)
    again = opened(tmp_path / "receiver")
    assert (again.rebuilt, again.reached) == (False, reached)
    again.close()


def test_a_received_state_that_did_not_replace_a_damaged_one_has_healed_nothing(tmp_path: Path) -> None:
    state = opened(tmp_path / "receiver")
    received, reached, _ = received_by(tmp_path / "receiver")
    prepared = state.prepare(received)
    state.apply([(NO_OP, 2, 1), opening(3), message(4, b"our own")])
    state.mark_damaged()
    state.swap(prepared)
    crash(state)
    again = opened(tmp_path / "receiver")
    assert (again.rebuilt, again.reached) == (True, reached)
    again.close()
