"""What a node does beside its turns: watches its disk, saves its state, lets go of old log, reads old messages again.

Decides no more than `Policy` does; what takes long runs on a worker thread. The rule that keeps it honest: the journal
needs the same disk, and a full one ends the node, so nothing here is begun that would not leave the reserve free.
"""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import trio

from holdfast.client.protocol.errors import BodyDamaged, InvariantBroken, StateBroken, Unavailable
from holdfast.cluster.config import Config
from holdfast.cluster.descriptors import is_shortage
from holdfast.cluster.leading import Clock
from holdfast.cluster.logs import Log
from holdfast.cluster.replica import Replica
from holdfast.cluster.segments import Segments
from holdfast.cluster.snapshots import Policy, Retries
from holdfast.cluster.state import NodeState, StateBusy
from holdfast.storage import scrub
from holdfast.storage.store import Store, StoreClosed, StoreError

WATCH_S = 0.2  # a disk that takes 500 MB/s takes less than half of the reserve meanwhile
KEEP_S = 1.0
SCRUB_BYTES = 1_048_576  # each second: a terabyte in twelve days, a gigabyte in a quarter of an hour

FreeBytes = Callable[[Path], int]


class NoRoom(Unavailable):
    """A snapshot of the state would take the reserve that the journal needs."""

    text = (
        "a snapshot needs {needed} bytes of disk with the reserve, {free} are free: the log is kept, and grows. Make "
        "room in {folder}, or consume what is stored"
    )
    fact_names = ("needed", "free", "folder")
    needed: int
    free: int
    folder: str


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


class Housekeeping:
    """One node's. `watch`, `keep` and `scrub` run for ever, each as a task; `damaged` is told what is found."""

    def __init__(
        self,
        *,
        config: Config,
        policy: Policy,
        segments: Segments,
        state: NodeState,
        replica: Replica,
        log: Log,
        clock: Clock,
        matches: Callable[[], Iterable[int]],
        damaged: Callable[[InvariantBroken], None],
        free: FreeBytes = free_bytes,
    ) -> None:
        """`matches` gives those of the connected peers while this node leads."""
        self._data, self._reserve_bytes = config.data, config.disk_reserve_bytes
        self._policy, self._retries = policy, Retries()
        self._segments, self._state, self._replica = segments, state, replica
        self._log, self._clock = log, clock
        self._matches, self._damaged, self._free = matches, damaged, free
        self._unsaved_bytes = segments.size_bytes  # of log since the last snapshot, or all that is there
        self._without_room = False  # that was told
        self._tried: Path | None = None  # the newest snapshot, when it was last read whether it will do alone
        self._relied = False  # it will

    def logged(self, size_bytes: int) -> None:
        """So much more of the log is on disk."""
        self._unsaved_bytes += size_bytes

    # The disk

    def look(self) -> None:
        """Before the disk is full, messages are refused; settling goes on, which makes room."""
        short = self._free(self._data) < self._reserve_bytes
        self._replica.disk_limit = self._reserve_bytes if short else None

    async def watch(self) -> None:
        while True:
            self.look()
            await trio.sleep(WATCH_S)

    # State and log

    async def keep(self, drop_before: Callable[[int], None]) -> None:
        """`drop_before` removes the files of the log before an index, after what was asked of the disk before."""
        while True:
            await trio.sleep(KEEP_S)
            try:
                drop_before(self._replica.raft.journal.base)  # what an earlier round let go of: that is on disk by now
                await self.save_if_due()
                await self.compact()
            except OSError as error:
                if not is_shortage(error):
                    raise
                self._log.out_of_files(doing="housekeeping", error=error)  # the next round tries again

    async def save_if_due(self) -> None:
        wanted = self._policy.wants_snapshot(log_bytes=self._unsaved_bytes, state_bytes=self._state.size_bytes)
        if not wanted or self._replica.damage is not None or not self._retries.due(self._clock()):
            return  # of a damaged state there is no snapshot, and the node is about to end
        try:
            await self.save()
        except StateBusy:
            pass  # a state is being installed: that is as good
        except NoRoom as error:  # costs nothing to ask again, so nothing has to be waited for once there is room
            if not self._without_room:
                self._without_room = True
                self._log.snapshot_failed(error=error)
        except (StoreError, OSError) as error:
            self._retries.failed(self._clock())
            self._log.snapshot_failed(error=error)

    async def save(self) -> None:
        """Take a snapshot. Raises StateBusy, NoRoom, or what the disk refuses."""
        if self._is_short:
            await self._make_do_with_newest()
        needed, free = self._needed_bytes, self._free(self._data)
        if free < needed:
            raise NoRoom(needed=needed, free=free, folder=str(self._data))
        began_s, covered_bytes = self._clock(), self._unsaved_bytes
        try:
            reached = await trio.to_thread.run_sync(self._state.snapshot)
        except StateBroken as error:
            if self._replica.damage is None:
                raise
            raise StateBusy("damage was found meanwhile, and the node ends for that") from error
        took_ms = int((self._clock() - began_s) * 1_000)
        newest = self._state.newest_snapshot()
        size_bytes = newest[0].stat().st_size if newest is not None else 0
        self._log.snapshot_taken(index=reached.index, size_bytes=size_bytes, took_ms=took_ms)
        self._unsaved_bytes -= covered_bytes
        self._without_room = False
        self._retries.succeeded()

    async def compact(self) -> None:
        """Let go of the log that no snapshot of ours needs, and no peer that is worth waiting for."""
        short = self._is_short
        relied = short and await self._make_do_with_newest()
        raft = self._replica.raft
        target = self._policy.compacts_to(
            base=raft.journal.base,
            snapshots=[reached.index for _, reached in self._state.snapshots()],
            applied=min(self._state.reached.index, raft.journal.durable_index),
            matches=self._matches(),
            journal_bytes=self._segments.size_bytes,
            state_bytes=self._state.size_bytes,
            short=short,
            relied=relied,
        )
        if target is not None:
            raft.compact(target)
            self._log.journal_compacted(base=target)

    @property
    def _needed_bytes(self) -> int:
        return self._state.size_bytes + self._reserve_bytes

    @property
    def _is_short(self) -> bool:
        """Whether the next snapshot would not leave the reserve."""
        return self._free(self._data) < self._needed_bytes

    async def _make_do_with_newest(self) -> bool:
        """Give older snapshots up for room, if all of the newest can be read: whether it may be relied on alone.

        Each one is read once for that.
        """
        newest = self._state.newest_snapshot()
        if newest is None:
            return False
        if newest[0] != self._tried:
            try:
                self._relied = await trio.to_thread.run_sync(self._state.rely_on_snapshot, newest[0])
            except (StateBusy, OSError):
                return False  # the next round asks again
            self._tried = newest[0]
        now = self._state.newest_snapshot()
        return self._relied and now is not None and now[0] == self._tried

    # What is stored

    async def scrub(self) -> None:
        """Read a little of what is stored again, so that damage is found before a consumer asks for it."""
        after: int | None = scrub.BEGIN
        while True:
            await trio.sleep(KEEP_S)
            try:
                after = await trio.to_thread.run_sync(_scrub_step, self._state.store, after or scrub.BEGIN)
            except BodyDamaged as error:
                self._damaged(error)
            except StoreClosed:
                pass  # another state has taken its place meanwhile


def _scrub_step(store: Store, after: int) -> int | None:
    with store.read() as txn:
        return scrub.step(txn, after, SCRUB_BYTES)
