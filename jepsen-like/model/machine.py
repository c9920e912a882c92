"""The model's front door: entries and queries in, answers out. The one big `match` over commands is here.

Each entry's commands run in order at one time. A command first meets its session (A1), then folds what
is due in the groups it touches (T3), then has its queues tended (G3), and only then does what it says.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any, Self, assert_never

from holdfast.client.protocol import commands as c
from holdfast.client.protocol.errors import HoldfastError, RulesUnknown
from holdfast.client.protocol.queries import Query
from holdfast.client.protocol.replies import Answer, Done, Failed, Reply, Touched
from holdfast.client.protocol.values import Place
from holdfast.jepsen.model import (
    cancel,
    clock,
    dead,
    due,
    groups,
    lease,
    picture,
    produce,
    queues,
    retention,
    sessions,
    settle,
    staging,
    transactions,
    views,
)
from holdfast.jepsen.model.records import Group, Queue
from holdfast.jepsen.model.state import State

NEWEST_RULES = 1


class Model:
    """The rules of the queue, told naively."""

    def __init__(self) -> None:
        self.state = State()

    @property
    def fired(self) -> Counter[str]:
        """How often each branch of the rules was taken; the names are `rules.RULES`."""
        return self.state.fired

    def apply(self, index: int, stamp_ms: int, envelopes: Sequence[c.Envelope]) -> list[Answer]:
        """Fold one entry of the log."""
        clock.advance(self.state, stamp_ms)
        answers = []
        for position, envelope in enumerate(envelopes):
            staging.expire(self.state)
            reply = self._answer(envelope)
            answers.append(Answer(Place(index, position, self.state.time_ms), reply))
        staging.expire(self.state)
        return answers

    def query(self, query: Query) -> Reply:
        """Answer from the state as it is folded now; nothing changes."""
        try:
            return views.answer(self.state, query)
        except HoldfastError as error:
            return Failed(error)

    def groups_view(self, queue_id: int) -> dict[str, Any]:
        """One queue in plain values; `picture.py` says what they are."""
        return picture.queue(self.state, self.state.queues[queue_id])

    def view(self) -> dict[str, Any]:
        """Everything in plain values: queues, sessions, staged transactions."""
        return picture.everything(self.state)

    def restore(self) -> None:
        """What a restore from a backup adds to the state that it brings back: the next generation of ids (T4)."""
        self.state.generation += 1

    def copy(self) -> Self:
        return copy.deepcopy(self)

    def _answer(self, envelope: c.Envelope) -> Reply:
        state = self.state
        numbered = sessions.is_numbered(envelope.command)
        try:
            if numbered:
                known = sessions.admit(state, envelope)
                if known is not None:
                    return known
                sessions.begin(state, envelope)
        except HoldfastError as error:
            return Failed(error)
        try:
            reply = self._execute(envelope)
        except HoldfastError as error:
            reply = Failed(error)
        if numbered:
            sessions.remember(state, envelope, reply)
        return reply

    def _execute(self, envelope: c.Envelope) -> Reply:
        """Touch, tend, do, free. Raises what the fold refuses."""
        try:
            self._touch(envelope.command)
            return self._do(envelope)
        finally:
            for queue_id in _queues_of(envelope.command):
                if queue_id in self.state.queues:
                    retention.free(self.state, self.state.queues[queue_id])

    def _do(self, envelope: c.Envelope) -> Reply:
        state, session, command = self.state, envelope.session, envelope.command
        match command:
            case c.OpenSession():
                return sessions.open_session(state, envelope, command)
            case c.Touch():
                state.fire("T3.touch")
                return Touched(more=False)
            case c.TimeStep(by_ms=by_ms):
                clock.step(state, by_ms)
                return Done()
            case c.SetLimits():
                return queues.set_limits(state, command)
            case c.SetRules(version=version):
                if version != NEWEST_RULES:
                    raise RulesUnknown(version=version, supported=NEWEST_RULES)
                state.rules_version = version
                return Done()
            case c.CreateQueue():
                return queues.create_queue(state, command)
            case c.UpdateQueue():
                return queues.update_queue(state, command)
            case c.DeleteQueue():
                return queues.delete_queue(state, command)
            case c.PurgeQueue():
                return queues.purge_queue(state, command)
            case c.ReportCursor():
                return queues.report_cursor(state, command)
            case c.CreateGroup():
                return groups.create_group(state, command)
            case c.UpdateGroup():
                return groups.update_group(state, command)
            case c.DeleteGroup():
                return groups.delete_group(state, command)
            case c.Seek():
                return groups.seek(state, command)
            case c.OpenProducer():
                return produce.open_producer(state, command)
            case c.ForgetProducer():
                return produce.forget_producer(state, command)
            case c.Produce():
                return produce.produce(state, session, command)
            case c.Cancel():
                return cancel.cancel(state, command)
            case c.Reschedule():
                return cancel.reschedule(state, command)
            case c.Lease():
                return lease.lease(state, session, envelope.request_seq, command)
            case c.AckBatch():
                return settle.ack(state, session, command)
            case c.Nack():
                return settle.nack(state, session, command)
            case c.Release():
                return settle.release(state, session, command)
            case c.Extend():
                return settle.extend(state, session, command)
            case c.Redrive():
                return dead.redrive(state, command)
            case c.RedriveToOrigin():
                return dead.redrive_to_origin(state, command)
            case c.DropDead():
                return dead.drop_dead(state, command)
            case c.Transaction():
                return transactions.run(state, session, command)
            case c.Stage():
                return staging.stage(state, command)
            case c.Publish():
                return staging.publish(state, command)
            case c.Abort():
                return staging.abort(state, command)
            case c.ForgetTxn():
                return staging.forget_txn(state, command)
            case unknown:
                assert_never(unknown)

    def _touch(self, command: c.Command) -> None:
        """Fold the groups that a command touches, then tend its queues. Raises where one of them is missing."""
        state = self.state
        for queue, group in self._touched(command):
            due.fold(state, queue, group)
        for queue_id in _queues_of(command):
            if queue_id in state.queues:
                retention.tend(state, state.queues[queue_id])

    def _touched(self, command: c.Command) -> list[tuple[Queue, Group]]:
        state = self.state
        match command:
            case (
                c.Lease(queue_id=queue_id, group=name)
                | c.AckBatch(queue_id=queue_id, group=name)
                | c.Nack(queue_id=queue_id, group=name)
                | c.Release(queue_id=queue_id, group=name)
                | c.Extend(queue_id=queue_id, group=name)
                | c.Redrive(queue_id=queue_id, group=name)
                | c.RedriveToOrigin(queue_id=queue_id, group=name)
                | c.DropDead(queue_id=queue_id, group=name)
                | c.Seek(queue_id=queue_id, group=name)
                | c.UpdateGroup(queue_id=queue_id, group=name)
                | c.DeleteGroup(queue_id=queue_id, group=name)
            ):
                return [state.group(queue_id, name)]
            case c.Touch(queue_id=queue_id, group=str(named)):
                return [state.group(queue_id, named)]
            case c.PurgeQueue(queue_id=queue_id, group=str(named)):
                state.group(queue_id, named)
                return _all_groups(state.queue(queue_id))
            case (
                c.Touch(queue_id=queue_id)
                | c.PurgeQueue(queue_id=queue_id)
                | c.Cancel(queue_id=queue_id)
                | c.Reschedule(queue_id=queue_id)
                | c.UpdateQueue(queue_id=queue_id)
                | c.DeleteQueue(queue_id=queue_id)
            ):
                return _all_groups(state.queue(queue_id))
            case c.Transaction(items=items):
                return self._touched_by_items(items)
            case _:
                for carried in _queues_of(command):
                    state.queue(carried)
                return []

    def _touched_by_items(self, items: Sequence[c.AckBatch | c.Nack | c.Produce]) -> list[tuple[Queue, Group]]:
        """The groups of a transaction's settles, each once; an item that names none is refused later."""
        found: dict[tuple[int, str], tuple[Queue, Group]] = {}
        for item in items:
            if not isinstance(item, c.Produce):
                queue = self.state.queues.get(item.queue_id)
                if queue is not None and item.group in queue.groups:
                    found[item.queue_id, item.group] = (queue, queue.groups[item.group])
        return list(found.values())


def _all_groups(queue: Queue) -> list[tuple[Queue, Group]]:
    return [(queue, group) for group in queue.groups.values()]


def _queues_of(command: c.Command) -> list[int]:
    """The queues that a command carries the id of, each once."""
    if isinstance(command, c.Transaction):
        return list(dict.fromkeys(item.queue_id for item in command.items))
    queue_id = getattr(command, "queue_id", None)
    return [] if queue_id is None else [queue_id]
