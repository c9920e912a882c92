"""The trace of a node: one line for each thing done, in order, without payloads, whole after a kill."""

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.client.protocol.errors import BadValue
from holdfast.cluster.journal import Flush, Journal
from holdfast.cluster.messages import AppendEntries, AppendReply, SnapshotChunk, VoteGranted
from holdfast.cluster.trace import Trace, told


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def flushed() -> Flush:
    """One entry in term 3; the term that was entered behind it is not part of the flush."""
    journal = Journal()
    journal.setCurrentTerm(3, "b")
    journal.add(b"x", 2, 3)
    flush = journal.take()
    assert flush is not None
    journal.setCurrentTerm(4, None)
    return flush


def test_everything_is_in_the_file_before_the_call_returns(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    trace = Trace(path, lambda: 1.5)
    trace.started(node="a", incarnation=7, term=2, vote="b", durable=9)
    trace.synced(flushed())
    trace.sent([("b", VoteGranted(3)), ("c", VoteGranted(3))])
    trace.answered(2, 12)
    found = lines(path)  # not closed: as a killed node leaves it
    assert [line["kind"] for line in found] == ["started", "synced", "sent", "sent", "answered"]
    assert found[1] == {"at_s": 1.5, "kind": "synced", "term": 3, "vote": "b", "durable": 2}
    assert [line["to"] for line in found if line["kind"] == "sent"] == ["b", "c"]
    trace.close()


def test_a_second_life_goes_on_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    for life in (1, 2):
        trace = Trace(path, lambda: 0.0)
        trace.started(node="a", incarnation=life, term=0, vote=None, durable=1)
        trace.close()
    assert [line["incarnation"] for line in lines(path)] == [1, 2]


def test_nothing_sent_is_nothing_written(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace", lambda: 0.0)
    trace.sent([])
    trace.close()
    assert (tmp_path / "trace").read_bytes() == b""


def test_entries_are_told_by_their_places_and_bytes_by_their_number() -> None:
    secret = b"a payload"
    message = AppendEntries(4, 6, 6, 3, ((secret, 7, 3), (secret, 8, 4)), 1, 2)
    assert told(message)["entries"] == [[7, 3], [8, 4]]
    assert told(SnapshotChunk(1, 0, secret)) == {"message": "SnapshotChunk", "epoch": 1, "offset": 0, "data_bytes": 9}
    assert "payload" not in json.dumps(told(message))


def test_an_acknowledgement_tells_how_far_it_goes() -> None:
    reply = AppendReply(next_index=9, reset=False, success=True, term=4, epoch=1, barrier=0, wall_ms=5)
    assert (told(reply)["next_index"], told(reply)["success"], told(reply)["term"]) == (9, True, 4)


def test_a_path_that_cannot_be_written_is_refused_by_its_key(tmp_path: Path) -> None:
    with pytest.raises(BadValue) as caught:
        Trace(tmp_path / "absent" / "trace", lambda: 0.0)
    assert caught.value.field == "trace"
