"""What we rely on in pysyncobj 0.3.17, name by name: an upgrade must not pass unread.

`cluster/raft.py` drives private parts of the library, and `cluster/consensus.py` guards against what exactly this code
does. Any other code may do otherwise.
"""

import hashlib
import importlib
import io
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

import pysyncobj.pickle
import pytest
from pysyncobj.config import FAIL_REASON, SyncObjConf
from pysyncobj.node import Node
from pysyncobj.syncobj import _COMMAND_TYPE, _RAFT_STATE, SyncObj
from pysyncobj.transport import Transport

from holdfast.client.protocol.errors import StateBroken
from holdfast.cluster import consensus, membership
from holdfast.cluster.events import Role
from holdfast.cluster.journal import Journal
from holdfast.cluster.raft import Library, Raft, _Engine, _Private, library_clock

READ_AGAIN = (
    "pysyncobj has changed: re-read the notes on it in docs/raft.md against the new sources, hazard by hazard, "
    "run the simulation and its mutants, and only then pin the new release here"
)
FILES = {
    "syncobj": "e8bdf06797085d734df86e24ab4802fe87893dff77268565ec036f7ad4a1cfe4",
    "transport": "0c9d89f9c4781ec9772df8011d7975a1a4a1a5f541357e12eae85a813e92b50b",
    "node": "e4a3f027cd8291f558334bb9c977e952f6b6989e7e1fa1588d3005ef0b990e2c",
    "config": "fbbc7ff9f18e4d15a7fd563376e42f5bd192956879d4b810b056d5248b955698",
}
OVERRIDDEN = (
    "_SyncObj__applyLogEntries",
    "_SyncObj__sendAppendEntries",
    "_SyncObj__generateRaftTimeout",
    "_SyncObj__tryLogCompaction",
    "_SyncObj__loadDumpFile",
    "_checkCommandsToApply",
)
JOURNAL = (
    "add",
    "deleteEntriesFrom",
    "deleteEntriesTo",
    "clear",
    "setCurrentTerm",
    "getCurrentTerm",
    "getVotedForNodeId",
    "setRaftCommitIndex",
    "getRaftCommitIndex",
    "onOneSecondTimer",
    "_destroy",
    "__getitem__",
    "__len__",
)


def test_the_release_is_the_pinned_one() -> None:
    assert version("pysyncobj") == "0.3.17", READ_AGAIN


@pytest.mark.parametrize(("name", "digest"), FILES.items())
def test_a_file_is_the_one_that_was_read(name: str, digest: str) -> None:
    path = importlib.import_module(f"pysyncobj.{name}").__file__
    assert path is not None
    assert hashlib.sha256(Path(path).read_bytes()).hexdigest() == digest, READ_AGAIN


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_a_method_that_we_override_is_there_to_be_overridden(name: str) -> None:
    assert callable(getattr(SyncObj, name, None)), READ_AGAIN
    assert name in vars(_Engine)


def private_names() -> list[str]:
    return [each.name for each in vars(Library).values() if isinstance(each, _Private)]


def plain() -> Any:
    class Nowhere(Transport):  # type: ignore[misc]
        def send(self, node: Any, message: Any) -> bool:
            return True

    settings = SyncObjConf(autoTick=False)
    return SyncObj(Node("a"), [Node("b")], conf=settings, transport=Nowhere(None, None, None))


@pytest.mark.parametrize("name", private_names())
def test_a_private_attribute_that_we_use_exists(name: str) -> None:
    assert name in vars(plain()), READ_AGAIN


@pytest.mark.parametrize("name", ["doTick", "transferLeadership"])
def test_a_public_method_that_we_call_exists(name: str) -> None:
    assert callable(getattr(SyncObj, name, None)), READ_AGAIN


@pytest.mark.parametrize("name", ["_onMessageReceived", "_onNodeConnected", "_onNodeDisconnected"])
def test_a_door_of_the_transport_exists(name: str) -> None:
    assert callable(getattr(Transport, name, None)), READ_AGAIN


@pytest.mark.parametrize("name", JOURNAL)
def test_the_journal_answers_to_what_the_library_calls(name: str) -> None:
    assert callable(getattr(Journal, name, None))


def test_numbers_mean_what_we_take_them_for() -> None:
    assert tuple(Role) == (_RAFT_STATE.FOLLOWER, _RAFT_STATE.CANDIDATE, _RAFT_STATE.LEADER), READ_AGAIN
    assert bytes([_COMMAND_TYPE.NO_OP]) == consensus.NO_OP, READ_AGAIN
    assert FAIL_REASON.SUCCESS == 0, READ_AGAIN
    library_types = {_COMMAND_TYPE.REGULAR, _COMMAND_TYPE.NO_OP, _COMMAND_TYPE.MEMBERSHIP, _COMMAND_TYPE.VERSION}
    assert library_types.isdisjoint({consensus.BATCH[0], membership.CONFIGURATION[0]}), READ_AGAIN


def test_pickle_is_out_of_the_library_s_reach() -> None:
    """R2."""
    library: Any = pysyncobj.pickle
    for name, arguments in (
        ("loads", (b"N.",)),
        ("dumps", (None,)),
        ("load", (io.BytesIO(b"N."),)),
        ("dump", (None, io.BytesIO())),
    ):
        with pytest.raises(StateBroken, match="pickle"):
            getattr(library, name)(*arguments)


def test_serializer_dumps_and_forwarding_are_out_of_reach() -> None:
    raft = Raft(
        me="a",
        journal=Journal(),
        clock=library_clock(),
        rng=Random(1),
        applied=1,
        applied_term=0,
        configuration=membership.of("ab"),
    )
    engine = raft._library.engine
    with pytest.raises(StateBroken, match="serializer"):
        engine._SyncObj__serializer.serialize(None, 1)
    with pytest.raises(StateBroken, match="full dump"):
        engine._SyncObj__loadDumpFile(clearJournal=True)
    with pytest.raises(StateBroken, match="apply_command"):
        engine._SyncObj__transport.send(Node("b"), {"type": "apply_command"})


def test_the_failure_says_what_to_do() -> None:
    assert "docs/raft.md" in READ_AGAIN
