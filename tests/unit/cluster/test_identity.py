"""A disk says whose it is: whatever happens to the file, the node is who it was, or does not start (R24)."""

import errno
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from holdfast.client.protocol.errors import Misuse
from holdfast.cluster import membership
from holdfast.cluster.identity import (
    DiskLost,
    IdentityDamaged,
    IdentityFile,
    Record,
    Stage,
    WrongFolder,
    journal_folder,
)
from holdfast.cluster.journal_errors import JournalFailed
from holdfast.cluster.journal_frames import Identity
from holdfast.cluster.membership import Configuration, Member
from holdfast.cluster.segments import Segments
from tests.fakes.disk import MemoryDisk, PowerCut

SEGMENT_BYTES = 1_024
FOLDER, JOURNAL = "data", "data/log-0/journal"
MEMBERS = Configuration((Member("n1", "h1:7421", "h1:7401"), Member("n2", "h2:7421", "h2:7401")))
NEW = Record(node="n1", incarnation=11)
DECIDING = Record(
    node="n1", incarnation=11, stage=Stage.DECIDING, cluster_id="c1", members=MEMBERS, incarnations=(11, 12)
)
AGREED, FORMED = DECIDING.at(Stage.AGREED), DECIDING.at(Stage.FORMED)


def file_on(disk: MemoryDisk) -> IdentityFile:
    return IdentityFile(FOLDER, JOURNAL, disk=disk, segment_bytes=SEGMENT_BYTES)


def opened(disk: MemoryDisk, node: str = "n1", incarnation: int = 11) -> Record:
    with file_on(disk) as file:
        return file.open(node, lambda: incarnation)


def disk_with(*records: Record) -> MemoryDisk:
    disk = MemoryDisk()
    with file_on(disk) as file:
        file.open("n1", lambda: 11)
        for record in records:
            file.save(record)
    return disk


def test_an_empty_folder_gets_an_incarnation_and_keeps_it() -> None:
    disk = MemoryDisk()
    assert opened(disk) == NEW
    disk.crash()
    assert opened(disk, incarnation=99) == NEW


@pytest.mark.parametrize("record", [DECIDING, AGREED, FORMED], ids=lambda record: record.stage)
def test_every_stage_comes_back_whole(record: Record) -> None:
    disk = disk_with(DECIDING, record)
    disk.crash()
    assert opened(disk) == record


def test_a_cluster_id_is_said_to_others_only_once_the_cluster_exists() -> None:
    assert [record.identity.cluster_id for record in (NEW, DECIDING, AGREED, FORMED)] == ["", "", "", "c1"]
    assert FORMED.identity == Identity(cluster_id="c1", node="n1", incarnation=11)


def test_a_formed_node_has_a_journal_of_its_own_from_the_first_moment() -> None:
    disk = disk_with(DECIDING, FORMED)
    disk.crash()
    Segments.open(JOURNAL, FORMED.identity, disk=disk, segment_bytes=SEGMENT_BYTES).close()


# The power goes ------------------------------------------------------------------------------------------


def steps_of(before: list[Record], record: Record) -> Iterator[int]:
    whole = disk_with(*before)
    first = whole.steps
    with file_on(whole) as file:
        file.save(record)
    return iter(range(whole.steps - first))


@pytest.mark.parametrize(
    ("before", "record"),
    [([], DECIDING), ([], AGREED), ([DECIDING], FORMED), ([AGREED], FORMED)],
    ids=["decide", "agree", "form", "form after agreeing"],
)
@pytest.mark.parametrize("seed", range(6))
def test_a_power_cut_at_any_step_leaves_the_former_record_or_the_new_one(
    before: list[Record], record: Record, seed: int
) -> None:
    former = before[-1] if before else NEW
    for step in steps_of(before, record):
        disk = disk_with(*before)
        disk.cut_at = disk.steps + step
        with pytest.raises(PowerCut):
            file_on(disk).save(record)
        disk.crash(Random(seed) if seed else None)
        assert opened(disk) in (former, record)
        with file_on(disk) as file:
            file.save(record)
        disk.crash()
        assert opened(disk) == record


def test_a_record_that_a_killed_process_left_in_the_page_cache_is_durable_before_it_is_believed() -> None:
    for step in steps_of([DECIDING], FORMED):
        disk = disk_with(DECIDING)
        disk.cut_at = disk.steps + step
        with pytest.raises(PowerCut):
            file_on(disk).save(FORMED)
        disk.kill()
        found = opened(disk)
        disk.crash()
        assert opened(disk) == found
        with file_on(disk) as file:
            file.save(FORMED)
        disk.crash()
        assert opened(disk) == FORMED


class Watched(MemoryDisk):
    """Remembers which folders were synced: the disk of the fakes syncs them all at once."""

    def __init__(self) -> None:
        super().__init__()
        self.synced: list[str] = []

    def sync_directory(self, directory: str) -> None:
        super().sync_directory(directory)
        self.synced.append(directory)


def test_a_journal_that_a_killed_process_left_in_the_page_cache_is_durable_before_the_node_is_formed() -> None:
    disk = Watched()
    with file_on(disk) as file:
        file.open("n1", lambda: 11)
        file.save(DECIDING)
        Segments.create(JOURNAL, FORMED.identity, disk=disk, segment_bytes=SEGMENT_BYTES).close()
        disk.synced.clear()
        file.save(FORMED)
    assert disk.synced == [JOURNAL, FOLDER]


@pytest.mark.parametrize("step", ["create", "pwrite", "sync", "rename", "sync_directory"])
def test_a_disk_that_fails_stops_the_node(step: str) -> None:
    disk = disk_with()
    disk.failures[step] = errno.EIO
    with pytest.raises(JournalFailed, match="identity in data"):
        file_on(disk).save(DECIDING)


# Refused -------------------------------------------------------------------------------------------------


def test_a_folder_of_another_node_is_refused() -> None:
    with pytest.raises(WrongFolder, match=r"'n1'.*'n2'"):
        opened(disk_with(), node="n2")


@pytest.mark.parametrize("stage", Stage)
def test_a_formed_node_whose_journal_is_gone_is_refused_with_the_remedy_and_others_never_had_one(stage: Stage) -> None:
    record = NEW if stage == Stage.NEW else DECIDING.at(stage)
    disk = disk_with() if record == NEW else disk_with(DECIDING, record)
    for name in disk.names(JOURNAL):
        disk.remove(f"{JOURNAL}/{name}")
    if stage != Stage.FORMED:
        assert opened(disk) == record
        return
    with pytest.raises(DiskLost, match="never used") as caught:
        opened(disk)
    assert isinstance(caught.value, Misuse)
    assert caught.value.facts["node"] == "n1"


@pytest.mark.parametrize("left", ["journal", "state"])
@pytest.mark.parametrize("said", ["nothing", "new"])
def test_a_folder_with_remains_of_a_log_is_not_new(left: str, said: str) -> None:
    disk = disk_with() if said == "new" else MemoryDisk()
    disk.poke(f"{JOURNAL}/0000000001.wal" if left == "journal" else "data/log-0/state.open", b"remains")
    with pytest.raises(DiskLost, match="remains"):
        opened(disk)


def test_a_journal_under_repair_is_a_journal() -> None:
    disk = disk_with(DECIDING, FORMED)
    for name in disk.names(JOURNAL):
        disk.remove(f"{JOURNAL}/{name}")
    disk.poke(f"{JOURNAL}/repair", b"")
    assert opened(disk) == FORMED


def test_another_format_is_refused_and_named() -> None:
    disk = disk_with()
    content = bytearray(disk.peek("data/identity"))
    content[8] = 2
    disk.poke("data/identity", bytes(content))
    with pytest.raises(WrongFolder, match="format 2"):
        opened(disk)


def test_a_flipped_bit_anywhere_is_noticed() -> None:
    for record in (NEW, FORMED):
        disk = disk_with() if record == NEW else disk_with(DECIDING, FORMED)
        size = len(disk.peek("data/identity"))
        for offset in range(size):
            copy = disk.copy()
            copy.flip("data/identity", offset, 1 << offset % 8)
            with pytest.raises((IdentityDamaged, WrongFolder)):
                opened(copy)


@pytest.mark.parametrize("size", [0, 1, 17, 18, 30])
def test_a_file_that_is_cut_off_or_goes_on_is_noticed(size: int) -> None:
    disk = disk_with()
    whole = disk.peek("data/identity")
    for content in (whole[:size], whole + bytes(size + 1)):
        disk.poke("data/identity", content)
        with pytest.raises(IdentityDamaged):
            opened(disk)


@pytest.mark.parametrize(
    "changes",
    [
        {"stage": Stage.NEW},
        {"cluster_id": ""},
        {"members": membership.of(())},
        {"incarnations": (11,)},
        {"node": ""},
        {"incarnation": -1},
        {"incarnation": 1 << 63},
    ],
    ids=str,
)
def test_a_record_that_contradicts_itself_is_not_made(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        replace(DECIDING, **changes)  # type: ignore[arg-type]


def test_a_folder_is_one_process() -> None:
    disk = MemoryDisk()
    with file_on(disk) as file:
        file.open("n1", lambda: 11)
        with pytest.raises(WrongFolder, match="in use"):
            opened(disk)
    assert opened(disk) == NEW


def test_a_refused_folder_is_let_go() -> None:
    disk = disk_with()
    file = file_on(disk)
    with pytest.raises(WrongFolder):
        file.open("n2", lambda: 1)
    assert disk.locks == {}


def test_a_real_folder_is_made_with_all_above_it(tmp_path: Path) -> None:
    data = tmp_path / "deep" / "data"
    for expected in (NEW, NEW):
        with IdentityFile(str(data), str(journal_folder(data)), segment_bytes=SEGMENT_BYTES) as file:
            assert file.open("n1", lambda: 11) == expected
    with IdentityFile(str(data), str(journal_folder(data)), segment_bytes=SEGMENT_BYTES) as file:
        file.open("n1", lambda: 11)
        file.save(DECIDING)
        file.save(FORMED)
    Segments.open(str(journal_folder(data)), FORMED.identity).close()
    for path in journal_folder(data).glob("*.wal"):
        path.unlink()
    with (
        IdentityFile(str(data), str(journal_folder(data))) as file,
        pytest.raises(DiskLost),
    ):
        file.open("n1", lambda: 11)
