"""The outbox file: what it gives back, whose it is, and who may hold it."""

import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest

from holdfast.client import outbox as module
from holdfast.client.message import Message, pack
from holdfast.client.outbox import Outbox, OutboxFailed, OutboxInUse, OutboxMismatch
from holdfast.client.protocol.values import QueueId
from holdfast.client.window import Numbered

OURS = ("q", QueueId(7), "svc", "cluster")
HOLD = """
import sys
from holdfast.client.outbox import Outbox
outbox = Outbox(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def request(first_seq: int, *payloads: bytes) -> Numbered:
    columns, body = pack(list(payloads), Message(b"", key="k", headers={"h": "v"}, delay_ms=5, ttl_ms=9))
    return Numbered(first_seq, 3, columns, body, 1)


def facts(requests: list[Numbered]) -> list[tuple[object, ...]]:
    return [(r.first_seq, r.numbering_epoch, r.columns, r.body, r.done_below) for r in requests]


def test_requests_come_back_as_they_were_and_in_order(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "o")
    assert outbox.claim(*OURS) == []
    saved = [request(1, b"a", b"b"), request(3, b"c"), request(4, b"d")]
    outbox.save([], [saved[2], saved[0]])
    outbox.save([4], [saved[1]])
    outbox.close()
    outbox.close()
    again = Outbox(tmp_path / "o")
    assert facts(again.claim(*OURS)) == facts(saved[:2])
    again.close()


def test_a_commit_is_done_whole_or_not_at_all(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "o")
    outbox.claim(*OURS)
    outbox.save([], [request(1, b"a")])
    with pytest.raises(OutboxFailed):
        outbox.save([1], [request(2, b"b"), request(2, b"twice")])
    assert facts(outbox.claim(*OURS)) == facts([request(1, b"a")])
    outbox.close()


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (("p", QueueId(7), "svc", "cluster"), "queue"),
        (("q", QueueId(8), "svc", "cluster"), "queue id"),
        (("q", QueueId(7), "other", "cluster"), "client_id"),
        (("q", QueueId(7), "svc", "elsewhere"), "cluster"),
    ],
)
def test_what_it_holds_goes_to_nobody_else(tmp_path: Path, other: tuple[str, QueueId, str, str], named: str) -> None:
    outbox = Outbox(tmp_path / "o")
    outbox.claim(*OURS)
    outbox.save([], [request(1, b"a")])
    with pytest.raises(OutboxMismatch) as raised:
        outbox.claim(*other)
    assert f"for {named} " in str(raised.value)
    assert facts(outbox.claim(*OURS)) == facts([request(1, b"a")])
    outbox.close()


def test_an_empty_outbox_may_change_hands(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "o")
    outbox.claim(*OURS)
    assert outbox.claim("p", QueueId(9), "other", "elsewhere") == []
    outbox.save([], [request(1, b"a")])
    with pytest.raises(OutboxMismatch):
        outbox.claim(*OURS)
    outbox.close()


def test_one_producer_holds_it_in_this_process_also_by_another_name(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "o")
    (tmp_path / "link").symlink_to(tmp_path / "o")
    for path in (tmp_path / "o", tmp_path / "link", str(tmp_path) + "/./o"):
        with pytest.raises(OutboxInUse):
            Outbox(path)
    outbox.close()
    Outbox(tmp_path / "o").close()


def test_one_process_holds_it_and_its_death_lets_it_go(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "o")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(OutboxInUse):
            Outbox(tmp_path / "o")
        holder.kill()
        holder.wait()
        Outbox(tmp_path / "o").close()


def test_a_forked_child_neither_holds_it_nor_lets_it_go(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "o")
    child = os.fork()
    if not child:
        refused = False
        try:
            Outbox(tmp_path / "o")
        except OutboxInUse:
            refused = True
        os._exit(0 if refused else 1)
    assert os.waitpid(child, 0)[1] == 0
    outbox.claim(*OURS)
    outbox.save([], [request(1, b"a")])
    outbox.close()


def test_what_is_no_outbox_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"this is no database, and nobody should write into it" * 100)
    with pytest.raises(OutboxFailed):
        Outbox(tmp_path / "text")
    with pytest.raises(OutboxFailed):
        Outbox(tmp_path / "no" / "such" / "folder")
    assert (tmp_path / "text").read_bytes().startswith(b"this is no database")


def test_the_outbox_of_a_later_release_is_left_alone(tmp_path: Path) -> None:
    Outbox(tmp_path / "o").close()
    file = sqlite3.connect(tmp_path / "o")
    with file:
        file.execute("INSERT INTO owner VALUES (2, 'q', 7, 'svc', 'cluster')")
    file.close()
    outbox = Outbox(tmp_path / "o")
    with pytest.raises(OutboxMismatch):
        outbox.claim(*OURS)
    outbox.close()


def test_every_commit_is_synced(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "o")
    modes = [outbox._file.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")]
    assert modes == ["wal", 2]  # FULL
    outbox.close()


def test_threads_that_fork_at_the_same_time_leave_the_outbox_usable(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "o")
    outbox._saving.acquire()  # as in the middle of a commit

    def fork() -> None:
        module._before_fork()
        module._after_fork_in_parent()

    forking = [Thread(target=fork, daemon=True) for _ in range(8)]
    for thread in forking:
        thread.start()
    outbox._saving.release()
    for thread in forking:
        thread.join(20)
        assert not thread.is_alive()
    assert outbox._saving.acquire(blocking=False)
    outbox._saving.release()
    outbox.close()
