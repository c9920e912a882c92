"""Asking twice (A1): a session's requests are numbered, and each number has one effect and one answer."""

from dataclasses import replace
from itertools import islice
from typing import Any

from holdfast.client.protocol.codec import decode_answer, encode_answer
from holdfast.client.protocol.commands import Envelope, OpenSession
from holdfast.client.protocol.errors import (
    LimitReached,
    PrincipalDiffers,
    RequestConflict,
    RequestSuperseded,
    SessionExpired,
    SessionWindowFull,
)
from holdfast.client.protocol.replies import Answer, Committed, Done, Leased, Produced, Reply, Settled, Staged
from holdfast.client.protocol.values import Place
from holdfast.storage import groups, leases, retention
from holdfast.storage.rows import (
    LEASE_AUTO,
    REPLY_APART,
    REPLY_INLINE,
    REPLY_LEASE,
    REPLY_SETTLED,
    Asked,
    SessionRow,
)
from holdfast.storage.state import State, View
from holdfast.storage.tables import Table, k1, k2, u1, u3

HOUR_MS = 3_600_000
SESSIONS_LOOKED_AT = 1_024  # for overdue ones, by an OpenSession that meets the limit
INLINE_BYTES = 256  # a longer reply has a row of its own, so that the session's row stays cheap to write

_NOWHERE = Place(0, 0, 0)


def open_session(state: State, envelope: Envelope, command: OpenSession) -> Done:
    """Create the session, or note that it is in use (A1). Its id must be random: an unknown one is never assumed."""
    session = envelope.session
    row = state.session(session)
    if row is not None and not _overdue(state, row):
        if row.principal != envelope.principal:
            raise PrincipalDiffers
        row.consumer = command.consumer_id
    else:
        if row is not None:
            drop_session(state, session, row)
        if state.meta.sessions >= state.limits.sessions:
            _end_overdue(state)
        if state.meta.sessions >= state.limits.sessions:
            raise LimitReached(limit_name="sessions", limit=state.limits.sessions)
        row = SessionRow(envelope.principal, command.consumer_id)
        state.set_session(session, row)
        state.meta.sessions += 1
    _use(state, session, row)
    return Done()


def known_session(view: View, session: bytes) -> SessionRow:
    row = view.session(session) if session else None
    if row is None or _overdue(view, row):
        raise SessionExpired
    return row


def first_answer(state: State, row: SessionRow, envelope: Envelope, command_hash: int) -> Reply | None:
    """The stored answer of a request that was made before, or none: then it may be executed. Raises as A1 says."""
    if row.principal != envelope.principal:
        raise PrincipalDiffers
    number = envelope.request_seq
    if number < row.done_below:
        raise RequestSuperseded(request_seq=number, done_below=row.done_below)
    known = row.window.get(number)
    if known is not None:
        if known[1] != command_hash:
            raise RequestConflict(request_seq=number)
        return _stored(state, envelope.session, known)
    if number < envelope.done_below:
        raise RequestSuperseded(request_seq=number, done_below=envelope.done_below)
    if len(row.window) >= state.limits.session_window:
        open_requests = sum(seq >= envelope.done_below for seq in row.window)
        if open_requests >= state.limits.session_window:
            raise SessionWindowFull(limit=state.limits.session_window)
    return None


def begin(state: State, row: SessionRow, envelope: Envelope) -> None:
    """The request will be executed: the session is in use, and answers that the client is done with are forgotten."""
    session = envelope.session
    if envelope.done_below > row.done_below:
        row.done_below = envelope.done_below
        for number in [number for number in row.window if number < row.done_below]:
            _forget(state, session, row.window.pop(number))
    _use(state, session, row)


def remember(state: State, row: SessionRow, envelope: Envelope, command_hash: int, reply: Reply, where: bytes) -> None:
    """The request was executed: keep its answer."""
    session, number = envelope.session, envelope.request_seq
    if type(reply) is Settled and not reply.refused:
        kind, data = REPLY_SETTLED, k1(reply.count)
    elif type(reply) is Leased and reply.grants:
        kind, data = REPLY_LEASE, where + k1(reply.lease_id)
    else:
        kind, data = REPLY_INLINE, encode_answer(Answer(_NOWHERE, reply))[0]
        if len(data) > INLINE_BYTES:
            state.insert(Table.REPLY, session + k1(number), data)
            kind, data = REPLY_APART, b""
    row.window[number] = (number, command_hash, kind, data)
    state.touch_session(session)


def end_idle(state: State, budget: int) -> int:
    """Remove sessions that were idle for too long; says how many rows it looked at."""
    oldest = (state.time_ms - state.limits.session_idle_ms) // HOUR_MS  # hours before this one are wholly overdue
    seen = 0
    while oldest > 0 and seen < budget:
        found = state.txn.first(Table.SESSION_IDLE, k1(0), k1(oldest))
        if found is None:
            break
        session = found[0][8:]
        row = state.session(session)
        if row is not None:
            drop_session(state, session, row)
        else:
            state.delete(Table.SESSION_IDLE, found[0])
        seen += 1
    return seen


def _end_overdue(state: State) -> None:
    """Make room: those of the present hour too, a bounded number."""
    hour = (state.time_ms - state.limits.session_idle_ms) // HOUR_MS
    if hour < 0:
        return
    oldest = islice(state.txn.scan(Table.SESSION_IDLE, k1(0), k1(hour + 1)), SESSIONS_LOOKED_AT)
    for session in [key[8:] for key, _ in oldest]:
        row = state.session(session)
        if row is not None and _overdue(state, row):
            drop_session(state, session, row)


def drop_session(state: State, session: bytes, row: SessionRow) -> None:
    """Forget a session and its answers. What it auto-acked stays readable until its timeout, as for any silent one."""
    for number in sorted(row.window):
        if row.window[number][2] == REPLY_APART:
            state.delete(Table.REPLY, session + k1(number))
    state.delete(Table.SESSION_IDLE, k1(row.idle_hour) + session)
    state.set_session(session, None)
    state.meta.sessions -= 1


def _overdue(view: View, row: SessionRow) -> bool:
    return view.time_ms - row.last_use > view.limits.session_idle_ms


def _use(state: State, session: bytes, row: SessionRow) -> None:
    row.last_use = state.time_ms
    hour = state.time_ms // HOUR_MS
    if row.idle_hour != hour:
        state.delete(Table.SESSION_IDLE, k1(row.idle_hour) + session)
        state.insert(Table.SESSION_IDLE, k1(hour) + session, b"")
        row.idle_hour = hour
    state.touch_session(session)


def _stored(state: State, session: bytes, asked: Asked) -> Reply:
    number, _, kind, data = asked
    if kind == REPLY_SETTLED:
        return Settled(count=u1(data)[0])
    if kind == REPLY_LEASE:
        q, gid, lease_id = u3(data)
        queue = groups.find_queue(state, q)
        group = next((group for group in state.groups(queue.q) if group.gid == gid), None)
        return leases.again(state, group, lease_id)
    if kind == REPLY_APART:
        stored = state.txn.get(Table.REPLY, session + k1(number))
        data = stored if stored is not None else b""
    reply: Any = decode_answer(data, b"").reply
    if isinstance(reply, Leased | Produced | Committed | Staged):
        return replace(reply, replayed=True)
    return reply  # type: ignore[no-any-return]


def _forget(state: State, session: bytes, asked: Asked) -> None:
    """The client is done with this answer: what was kept for it alone goes."""
    number, _, kind, data = asked
    if kind == REPLY_APART:
        state.delete(Table.REPLY, session + k1(number))
    elif kind == REPLY_LEASE:
        q, gid, lease_id = u3(data)
        queue = state.queue(q)
        if queue is None or queue.deleted:
            return
        for group in state.groups(q):
            row = leases.read_lease(state, group, lease_id) if group.gid == gid and group.pins else None
            if row is not None and row.flags & LEASE_AUTO:
                leases.end_auto(state, queue, group, lease_id, row)
                if queue.kept_rows:
                    retention.free_kept(state, queue)


def lease_place(q: int, gid: int) -> bytes:
    """Where a remembered lease is to be found again."""
    return k2(q, gid)
