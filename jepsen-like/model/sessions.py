"""Asking twice (A1, L4): a session's requests are numbered, and a number that is known gets its first answer."""

from dataclasses import replace

from holdfast.client.protocol.commands import Command, Envelope, Lease, OpenSession, Produce, Stage, TimeStep, Touch
from holdfast.client.protocol.errors import (
    LeaseExpired,
    LimitReached,
    PrincipalDiffers,
    RequestConflict,
    RequestSuperseded,
    SessionExpired,
    SessionWindowFull,
)
from holdfast.client.protocol.replies import Committed, Done, Grant, Leased, Produced, Reply, Staged
from holdfast.jepsen.model.clock import shown_deadline
from holdfast.jepsen.model.records import Group, runs
from holdfast.jepsen.model.retention import free
from holdfast.jepsen.model.state import RememberedReply, Session, State


def is_numbered(command: Command) -> bool:
    """Whether a command needs a session and is remembered under it."""
    match command:
        case OpenSession() | Touch() | TimeStep() | Stage():
            return False
        case Produce(client_id=client_id):
            return client_id is None
        case _:
            return True


def is_overdue(state: State, session: Session) -> bool:
    return state.time_ms - session.last_use_ms > state.limits.session_idle_ms


def open_session(state: State, envelope: Envelope, command: OpenSession) -> Done:
    if not envelope.session:
        state.fire("A1.unknown")
        raise SessionExpired()
    session = state.sessions.get(envelope.session)
    if session is not None and is_overdue(state, session):
        state.fire("A1.reopened_anew")
        for group in [group for queue in state.queues.values() for group in queue.groups.values()]:
            for auto_ack in group.auto_acks.values():
                if auto_ack.session == envelope.session:
                    auto_ack.session = b""  # nobody can say any more that it is done with them
        del state.sessions[envelope.session]
        session = None
    if session is None:
        alive = sum(not is_overdue(state, other) for other in state.sessions.values())
        if alive >= state.limits.sessions:
            state.fire("A1.sessions_limit")
            raise LimitReached(limit_name="sessions", limit=state.limits.sessions)
        state.fire("A1.open")
        state.sessions[envelope.session] = Session(envelope.principal, command.consumer_id, state.time_ms)
        return Done()
    if session.principal != envelope.principal:
        state.fire("A1.principal")
        raise PrincipalDiffers()
    state.fire("A1.open_again")
    session.consumer_id = command.consumer_id
    session.last_use_ms = state.time_ms
    return Done()


def admit(state: State, envelope: Envelope) -> Reply | None:
    """The first answer to a known request, or none for a new one. Raises what A1 refuses, and changes nothing."""
    session, number = state.sessions.get(envelope.session), envelope.request_seq
    if session is None or is_overdue(state, session):
        state.fire("A1.unknown" if session is None else "A1.idle")
        raise SessionExpired()
    if session.principal != envelope.principal:
        state.fire("A1.principal")
        raise PrincipalDiffers()
    if number < session.done_below:
        state.fire("A1.superseded")
        raise RequestSuperseded(request_seq=number, done_below=session.done_below)
    if number in session.replies:
        known = session.replies[number]
        if known.command != envelope.command:
            state.fire("A1.conflict")
            raise RequestConflict(request_seq=number)
        state.fire("A1.replay")
        return _replay(state, known)
    if number < envelope.done_below:
        state.fire("A1.superseded_by_itself")
        raise RequestSuperseded(request_seq=number, done_below=envelope.done_below)
    if sum(one >= envelope.done_below for one in session.replies) >= state.limits.session_window:
        state.fire("A1.window_full")
        raise SessionWindowFull(limit=state.limits.session_window)
    return None


def begin(state: State, envelope: Envelope) -> None:
    """A new request of a session: its use, and what it is done with."""
    session = state.sessions[envelope.session]
    session.last_use_ms = state.time_ms
    session.done_below = max(session.done_below, envelope.done_below)
    forget_replies(state, envelope.session, below=session.done_below)


def remember(state: State, envelope: Envelope, reply: Reply) -> None:
    state.sessions[envelope.session].replies[envelope.request_seq] = RememberedReply(envelope.command, reply)


def forget_replies(state: State, session_id: bytes, below: int) -> None:
    """Drop replies below a number; bodies kept for the replay of an auto_ack go with them (L6)."""
    session = state.sessions[session_id]
    forgotten = [number for number in session.replies if number < below]
    for number in forgotten:
        state.fire("A1.forget")
        del session.replies[number]
    for queue in state.queues.values():
        for group in queue.groups.values():
            for auto_ack in list(group.auto_acks.values()):
                if auto_ack.session == session_id and auto_ack.request_seq in forgotten:
                    state.fire("L6.session_done")
                    del group.auto_acks[auto_ack.lease_id]
                    free(state, queue)


# Answering again ---------------------------------------------------------------------------------------


def _replay(state: State, known: RememberedReply) -> Reply:
    match known.command, known.reply:
        case Lease() as command, Leased(lease_id=lease_id) as leased if lease_id:
            return _lease_as_it_is_now(state, command, leased)
        case _, (Leased() | Produced() | Committed() | Staged()) as reply:
            return replace(reply, replayed=True)
        case _, reply:
            return reply


def _lease_as_it_is_now(state: State, command: Lease, leased: Leased) -> Leased:
    """What is still held, with the counts of the grant and the present deadline (L4)."""
    queue = state.queue(command.queue_id)
    group = queue.groups.get(command.group)
    found = None
    if group is not None:
        found = group.auto_acks.get(leased.lease_id) or group.leases.get(leased.lease_id)
    if group is None or found is None or found.deadline <= state.lease_ms:
        state.fire("L4.expired")
        raise LeaseExpired(lease_id=leased.lease_id)
    state.fire("L6.replay" if command.auto_ack else "L4.replay")
    grants = leased.grants if command.auto_ack else _still_held(group, leased)
    return replace(leased, grants=grants, deadline_ms=shown_deadline(state, found.deadline), replayed=True)


def _still_held(group: Group, leased: Leased) -> tuple[Grant, ...]:
    held = group.held_by(leased.lease_id)
    return tuple(
        Grant(first, last, grant.delivery_count, grant.attempts, grant.redrives)
        for grant in leased.grants
        for first, last in runs(version for version in held if grant.first <= version <= grant.last)
    )
