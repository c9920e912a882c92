"""Frames and sessions: every byte is accounted for, one session a peer, and nobody's slowness grows our memory."""

import struct
from dataclasses import replace
from random import Random
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.client.protocol.errors import BadFrame, BatchTooLarge, StateBroken
from holdfast.cluster.handshake import Established, FrameMac
from holdfast.cluster.links import (
    FRAME_COST_BYTES,
    WRITE_BYTES,
    FrameReader,
    FrameWriter,
    Handlers,
    LinkLimits,
    Links,
    PeerSilent,
    PeerSlow,
    Replaced,
    SendQueue,
    Session,
    SessionLost,
)
from holdfast.cluster.messages import (
    CHUNK_BYTES,
    ENTRY_BYTES,
    MESSAGE_BYTES,
    Agreed,
    AppendEntries,
    Message,
    SnapshotChunk,
    SnapshotHead,
    StaleTerm,
    TimeoutNow,
    encode,
)
from holdfast.cluster.peers import Backoff, DialTiming

KEY = b"k" * 32
LIMITS = LinkLimits()
HEARTBEAT = AppendEntries(1, 0, 1, 0, (), 1, 0)


def append(size_bytes: int) -> AppendEntries:
    return AppendEntries(1, 0, 1, 0, ((b"\x10" * size_bytes, 2, 1),), 1, 0)


def chunk(offset: int, size_bytes: int = CHUNK_BYTES) -> SnapshotChunk:
    return SnapshotChunk(1, offset, b"s" * size_bytes)


class Silent:
    """A shell that only counts what it is told."""

    def __init__(self) -> None:
        self.woken = self.cancelled = 0

    def wake(self) -> None:
        self.woken += 1

    def cancel(self) -> None:
        self.cancelled += 1


class End:
    """One node's links, and everything that they told, in order."""

    def __init__(self, limits: LinkLimits = LIMITS) -> None:
        self.told: list[tuple[object, ...]] = []
        handlers = Handlers(
            connected=lambda peer: self.told.append(("connected", peer)),
            disconnected=lambda peer: self.told.append(("disconnected", peer)),
            deliver=lambda peer, message, log: self.told.append((peer, message, log)),
        )
        self.links = Links(handlers, limits)


def keys(number: int) -> tuple[Established, Established]:
    """What a handshake between a and b leaves on a's and on b's side."""
    one, other = bytes([number]) * 32, bytes([number + 100]) * 32
    return Established("b", 7, one, other), Established("a", 3, other, one)


class Pair:
    """Nodes a and b with one session between them; bytes travel when the test says so."""

    def __init__(self, limits: LinkLimits = LIMITS) -> None:
        self.a, self.b = End(limits), End(limits)
        self.at_a, self.at_b = self.reconnect(1)

    def reconnect(self, number: int) -> tuple[Session, Session]:
        for_a, for_b = keys(number)
        return self.a.links.open(for_a, 0.0, Silent()), self.b.links.open(for_b, 0.0, Silent())


def frames(*contents: bytes, key: bytes = KEY) -> bytes:
    writer = FrameWriter(key)
    return b"".join(part for content in contents for part in writer.seal(content))


# Frames ------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=40), max_size=6), st.data())
def test_frames_come_out_as_they_went_in_however_they_are_cut(contents: list[bytes], data: st.DataObject) -> None:
    words, reader = frames(*contents), FrameReader(KEY)
    found: list[bytes] = []
    while words:
        cut = data.draw(st.integers(1, len(words)))
        found += reader.feed(words[:cut])
        words = words[cut:]
    assert found == contents
    assert reader.pending_bytes == 0


def test_frames_may_be_cut_at_every_boundary() -> None:
    words = frames(b"first", b"", b"third")
    for cut in range(len(words) + 1):
        reader = FrameReader(KEY)
        assert [*reader.feed(words[:cut]), *reader.feed(words[cut:])] == [b"first", b"", b"third"]


def test_a_flipped_bit_in_any_byte_is_noticed_with_the_frame_and_nothing_of_it_is_given_out() -> None:
    words = frames(b"first", b"second", b"third")
    begin = len(frames(b"first"))
    for position in range(begin, len(frames(b"first", b"second"))):
        for bit in range(8):
            reader, found = FrameReader(KEY), []
            flipped = words[:position] + bytes([words[position] ^ 1 << bit]) + words[position + 1 :]
            with pytest.raises(BadFrame):
                for content in reader.feed(flipped):
                    found.append(content)
            assert found == [b"first"]


def test_a_frame_that_is_repeated_left_out_moved_or_of_another_key_is_refused() -> None:
    writer = FrameWriter(KEY)
    first, second = (b"".join(writer.seal(content)) for content in (b"same", b"same"))
    for words in (first + first, second, second + first, frames(b"same", key=b"x" * 32)):
        with pytest.raises(BadFrame):
            list(FrameReader(KEY).feed(words))


def test_a_frame_with_a_length_made_to_fit_its_checksum_is_refused_by_its_code() -> None:
    """The checksum is no protection against somebody: that is what the code is for."""
    content = frames(b"content")[8:]
    length = len(b"content") - 1
    forged = struct.pack(">II", length, crc32(struct.pack(">QI", 0, length))) + content
    with pytest.raises(BadFrame, match="authentication"):
        list(FrameReader(KEY).feed(forged))


def test_a_frame_that_is_moved_with_its_checksum_made_to_fit_is_refused_by_its_code() -> None:
    first = frames(b"same")
    moved = struct.pack(">II", 4, crc32(struct.pack(">QI", 1, 4))) + first[8:]
    with pytest.raises(BadFrame, match="authentication"):
        list(FrameReader(KEY).feed(first + moved))


@pytest.mark.parametrize("length", [MESSAGE_BYTES + 1, 2**32 - 1])
def test_an_oversize_frame_is_refused_by_its_first_eight_bytes(length: int) -> None:
    reader = FrameReader(KEY)
    with pytest.raises(BadFrame, match="up to"):
        list(reader.feed(struct.pack(">II", length, crc32(FrameMac(KEY).place(length)))))
    assert reader.pending_bytes <= 8


def test_memory_grows_with_what_came_and_not_with_what_was_claimed() -> None:
    reader = FrameReader(KEY)
    list(reader.feed(struct.pack(">II", MESSAGE_BYTES, crc32(FrameMac(KEY).place(MESSAGE_BYTES))) + b"x" * 100))
    assert reader.pending_bytes == 108


def test_the_largest_message_passes_and_a_larger_one_is_refused_to_its_sender() -> None:
    pair = Pair()
    largest = append(ENTRY_BYTES)
    assert pair.a.links.send("b", largest)
    pair.b.links.receive(pair.at_b, pair.at_a.take(0.0), 0.0)
    assert pair.b.told[-1] == ("a", largest, 0)
    two = AppendEntries(1, 0, 1, 0, ((b"\x10" * ENTRY_BYTES, 2, 1), (b"\x10" * ENTRY_BYTES, 3, 1)), 1, 0)
    with pytest.raises(BatchTooLarge):
        pair.a.links.send("b", two)
    assert not pair.at_a.over


# Sessions ----------------------------------------------------------------------------------------------


def test_messages_of_several_logs_arrive_in_order_with_their_log() -> None:
    pair = Pair()
    for number in range(100):
        assert pair.a.links.send("b", StaleTerm(number), log=number % 3)
    while piece := pair.at_a.take(0.0):
        pair.b.links.receive(pair.at_b, piece, 0.0)
    assert pair.b.told[0] == ("connected", "a")
    for log in range(3):
        of_log = [told[1] for told in pair.b.told[1:] if told[2] == log]
        assert of_log == [StaleTerm(number) for number in range(100) if number % 3 == log]


def test_a_new_session_ends_the_former_before_its_own_first_frame_and_late_frames_are_never_delivered() -> None:
    pair = Pair()
    pair.a.links.send("b", StaleTerm(1))
    late = pair.at_a.take(0.0)
    old = pair.at_b
    _, new = pair.reconnect(2)
    assert pair.b.told == [("connected", "a"), ("disconnected", "a"), ("connected", "a")]
    assert isinstance(old.error, Replaced)
    pair.b.links.receive(old, late, 0.0)  # bytes that its task had read before it was cancelled
    pair.b.links.close(old, SessionLost("its task ends"))
    assert pair.b.told == [("connected", "a"), ("disconnected", "a"), ("connected", "a")]
    pair.b.links.receive(new, late, 0.0)  # and bytes that found their way into the new one
    assert isinstance(new.error, BadFrame)
    assert len(pair.b.told) == 3


@given(st.lists(st.sampled_from(["send", "arrive", "late", "reconnect", "close"]), max_size=60))
def test_a_storm_of_reconnects_delivers_each_session_in_order_and_nothing_late(steps: list[str]) -> None:
    pair, sent, number, term = Pair(), 0, 1, 0
    on_the_wire: list[tuple[Session, bytes]] = []
    sessions = {1: (pair.at_a, pair.at_b)}
    for step in steps:
        at_a, at_b = sessions[number]
        if step == "send":
            term += 1
            sent += pair.a.links.send("b", StaleTerm(1_000 * number + term))
            if piece := at_a.take(0.0):
                on_the_wire.append((at_b, piece))
        elif step == "reconnect" and number < 90:
            number += 1
            sessions[number] = pair.reconnect(number)
        elif step == "close":
            pair.b.links.close(at_b, SessionLost("cut"))
        elif step == "arrive" and on_the_wire:
            pair.b.links.receive(*on_the_wire.pop(0), 0.0)
        elif step == "late" and on_the_wire:
            pair.b.links.receive(*on_the_wire.pop(), 0.0)  # the newest first: what lies between is missing
    check_story(pair.b.told)
    assert sum(told[0] == "a" for told in pair.b.told) <= sent


def check_story(told: list[tuple[object, ...]]) -> None:
    """Connected and disconnected alternate; between them come messages of one session, growing."""
    open_, session, last = False, 0, 0
    for each in told:
        if each[0] in ("connected", "disconnected"):
            assert open_ == (each[0] == "disconnected")
            open_ = not open_
            session += each[0] == "connected"
            last = 0
        else:
            message = each[1]
            assert open_ and isinstance(message, StaleTerm)
            assert message.term // 1_000 == session and message.term > last
            last = message.term


def test_a_breach_ends_the_session_what_came_before_it_counts_and_nothing_after_it() -> None:
    pair = Pair()
    writer = FrameWriter(keys(1)[0].send_key)
    good, bad, after = (
        b"".join(writer.seal(content)) for content in (encode(StaleTerm(1)), b"\xff\0\0", encode(StaleTerm(2)))
    )
    pair.b.links.receive(pair.at_b, good + bad + after, 0.0)
    pair.b.links.receive(pair.at_b, after, 0.0)
    assert pair.b.told == [("connected", "a"), ("a", StaleTerm(1), 0)]
    assert isinstance(pair.at_b.error, BadFrame)


def test_a_session_that_ends_while_a_message_is_handled_delivers_no_more_of_the_same_piece() -> None:
    pair = Pair()
    for number in range(3):
        pair.a.links.send("b", StaleTerm(number))
    heard: list[Message] = []

    def deliver(peer: str, message: Message, log: int) -> None:
        heard.append(message)
        session.end(SessionLost("the owner has enough"))

    links = Links(Handlers(connected=lambda _: None, disconnected=lambda _: None, deliver=deliver), LIMITS)
    session = links.open(keys(1)[1], 0.0, Silent())
    links.receive(session, pair.at_a.take(0.0), 0.0)
    assert heard == [StaleTerm(0)]


def test_what_a_handler_raises_is_not_taken_for_a_breach_of_the_peer() -> None:
    def deliver(peer: str, message: Message, log: int) -> None:
        raise BadFrame(problem="found by the handler") if message == StaleTerm(1) else StateBroken(problem="broken")

    for term, error in ((1, BadFrame), (2, StateBroken)):
        links = Links(Handlers(connected=lambda _: None, disconnected=lambda _: None, deliver=deliver), LIMITS)
        session = links.open(keys(1)[1], 0.0, Silent())
        with pytest.raises(error):
            links.receive(session, frames(encode(StaleTerm(term)), key=keys(1)[0].send_key), 0.0)
        assert not session.over


@pytest.mark.parametrize(
    ("founding", "good", "bad"), [(True, Agreed("c1"), StaleTerm(1)), (False, StaleTerm(1), Agreed("c1"))]
)
def test_a_session_speaks_of_the_founding_or_of_logs_and_never_of_both(
    founding: bool, good: Message, bad: Message
) -> None:
    b = End()
    session = b.links.open(replace(keys(1)[1], founding=founding), 0.0, Silent())
    words = frames(encode(good), encode(bad), encode(good), key=keys(1)[0].send_key)
    b.links.receive(session, words, 0.0)
    assert b.told == [("connected", "a"), ("a", good, 0)]
    assert isinstance(session.error, BadFrame)


def test_nothing_is_sent_to_who_is_not_connected() -> None:
    pair = Pair()
    assert not pair.a.links.send("c", StaleTerm(1))
    pair.a.links.close(pair.at_a, SessionLost("cut"))
    assert not pair.a.links.send("b", StaleTerm(1))
    assert pair.a.links.session("b") is None
    assert pair.at_a.take(99.0) == b""


# Buffers -----------------------------------------------------------------------------------------------


def test_a_peer_that_takes_nothing_loses_its_session_and_what_waited_is_freed() -> None:
    limits = LinkLimits(send_bytes=1_000_000)
    pair = Pair(limits)
    shell = Silent()
    session = pair.a.links.open(keys(2)[0], 0.0, shell)
    most = count = 0
    while count < 1_000 and pair.a.links.send("b", append(10_000)):
        most, count = max(most, session.queue.cost_bytes), count + 1
    assert 900_000 < most <= limits.send_bytes
    assert isinstance(session.error, PeerSlow)
    assert session.queue.cost_bytes == 0 and session.queue.take() == []
    assert shell.cancelled == 1
    assert pair.a.told[-1] == ("connected", "b")  # nothing is told inside `send`
    pair.a.links.close(session, SessionLost("its task ends"))
    assert pair.a.told[-1] == ("disconnected", "b")
    assert isinstance(session.error, PeerSlow)  # the first reason stays


def test_a_session_that_is_over_keeps_nothing_of_an_unfinished_frame() -> None:
    pair = Pair()
    pair.a.links.send("b", append(1_000_000))
    pair.b.links.receive(pair.at_b, pair.at_a.take(0.0)[:900_000], 0.0)
    assert pair.at_b.pending_bytes == 900_000
    pair.b.links.close(pair.at_b, SessionLost("cut"))
    assert pair.at_b.pending_bytes == 0


def test_many_small_messages_are_bounded_too() -> None:
    pair = Pair(LinkLimits(send_bytes=100 * FRAME_COST_BYTES))
    assert sum(pair.a.links.send("b", StaleTerm(1)) for _ in range(1_000)) < 100


def test_a_heartbeat_of_one_log_passes_the_megabytes_of_another_and_of_a_snapshot() -> None:
    pair = Pair()
    for number in range(32):
        pair.a.links.send("b", append(250_000), log=1)
        pair.a.links.send("b", chunk(number * CHUNK_BYTES), log=1)
    pair.at_a.take(0.0)  # the piece that is being written
    pair.a.links.send("b", HEARTBEAT, log=2)
    before, piece = 0, b""
    while encode(HEARTBEAT, 2) not in piece:
        piece = pair.at_a.take(0.0)
        assert piece
        before += len(piece)
    assert before <= 3 * WRITE_BYTES
    assert pair.at_a.queue.cost_bytes > 10_000_000


def test_entries_and_snapshot_take_turns_so_that_neither_starves() -> None:
    queue = SendQueue()
    for number in range(20):
        queue.put(0, b"entry %d" % number)
        queue.put(-1, b"c" * (WRITE_BYTES // 2))
    first = [content for _ in range(4) for content in queue.take()]
    chunks = sum(len(content) > 100 for content in first)
    assert len(first) - chunks >= 4 and chunks >= 4


def test_a_piece_is_bounded_and_a_single_longer_frame_goes_alone() -> None:
    queue = SendQueue()
    for size in (WRITE_BYTES // 2, WRITE_BYTES // 2, 1, 2 * WRITE_BYTES, 1):
        queue.put(0, b"x" * size)
    pieces = [[len(content) for content in queue.take()] for _ in range(4)]
    assert pieces == [[WRITE_BYTES // 2] * 2, [1], [2 * WRITE_BYTES], [1]]
    assert queue.cost_bytes == 0 and queue.take() == []


def test_a_snapshot_stream_is_told_to_wait_long_before_the_session_would_be_lost() -> None:
    pair = Pair()
    pair.a.links.send("b", SnapshotHead(1, 5, 1, 1, 1, 9, bytes(32), b"members"))
    count = 0
    while pair.at_a.has_room:
        assert pair.a.links.send("b", chunk(count * CHUNK_BYTES))
        count += 1
    assert count == 4
    assert pair.a.links.send("b", append(1_000_000))  # entries are not held up by it
    head, entries, first_chunk = (len(pair.at_a.take(0.0)) for _ in range(3))
    assert head < 1_000 and entries > 1_000_000 and first_chunk > CHUNK_BYTES
    assert pair.at_a.has_room


# Time --------------------------------------------------------------------------------------------------


def test_a_silent_peer_is_dropped_and_a_ping_is_enough_to_be_heard() -> None:
    pair = Pair()
    now_s = 0.0
    while now_s < 3 * LIMITS.silence_s:
        now_s += LIMITS.ping_s
        pair.b.links.receive(pair.at_b, pair.at_a.take(now_s), now_s)
        pair.at_b.check(now_s)
    assert not pair.at_b.over
    assert pair.b.told == [("connected", "a")]
    heard_s = now_s
    pair.at_b.check(heard_s + LIMITS.silence_s - 0.001)
    assert pair.at_b.error is None
    assert pair.at_b.deadline_s == heard_s + LIMITS.silence_s
    pair.at_b.check(heard_s + LIMITS.silence_s)
    assert isinstance(pair.at_b.error, PeerSilent)


def test_who_has_sent_something_sends_no_ping_until_it_is_due() -> None:
    pair = Pair()
    assert pair.at_a.take(LIMITS.ping_s - 0.001) == b""
    pair.a.links.send("b", TimeoutNow(1))
    assert pair.at_a.take(0.5) != b""
    assert pair.at_a.ping_due_s == 0.5 + LIMITS.ping_s
    assert pair.at_a.take(LIMITS.ping_s + 0.4) == b""
    assert len(pair.at_a.take(LIMITS.ping_s + 0.5)) == 8 + 16


def test_a_frame_that_does_not_end_is_given_up_though_bytes_keep_dripping() -> None:
    pair = Pair()
    pair.a.links.send("b", append(10_000))
    words, now_s = pair.at_a.take(0.0), 0.0
    for byte in words[:1_000]:
        now_s += 1.0
        pair.at_b.check(now_s)
        if pair.at_b.over:
            break
        pair.b.links.receive(pair.at_b, bytes([byte]), now_s)
    assert isinstance(pair.at_b.error, PeerSilent)
    assert now_s == 1.0 + LIMITS.frame_s


def test_each_frame_has_its_own_time() -> None:
    """Frames that overlap the pieces they come in, for much longer than one of them may take."""
    pair, now_s = Pair(), 0.0
    for _ in range(20):
        pair.a.links.send("b", append(100))
    words = pair.at_a.take(0.0)
    for begin in range(0, len(words), 100):
        now_s += 2.0
        pair.at_b.check(now_s)
        pair.b.links.receive(pair.at_b, words[begin : begin + 100], now_s)
    assert now_s > 3 * LIMITS.frame_s
    assert not pair.at_b.over and len(pair.b.told) == 21


def test_status_counts_sessions_frames_and_bytes_and_keeps_the_last_reason() -> None:
    pair = Pair()
    pair.a.links.send("b", StaleTerm(1))
    assert pair.a.links.status()[0].queued_bytes > FRAME_COST_BYTES
    piece = pair.at_a.take(0.0)
    pair.b.links.receive(pair.at_b, piece, 0.0)
    there = pair.b.links.status()[0]
    assert (there.peer, there.connected, there.incarnation, there.session_count) == ("a", True, 3, 1)
    assert (there.traffic.frames_in, there.traffic.bytes_in) == (1, len(piece))
    here = pair.a.links.status()[0].traffic
    assert (here.frames_out, here.bytes_out) == (1, len(piece))
    pair.reconnect(2)
    pair.b.links.close(pair.at_b, SessionLost("of no effect any more"))
    assert pair.b.links.status()[0].session_count == 2
    pair.b.links.close(pair.b.links.session("a") or pair.at_b, PeerSilent("gone"))
    last = pair.b.links.status()[0]
    assert not last.connected and isinstance(last.last_error, PeerSilent)


def test_attempts_are_spread_and_grow_to_a_bound_and_a_session_that_lasted_begins_anew() -> None:
    timing, rng = DialTiming(first_wait_s=0.1, longest_wait_s=1.0), Random(5)
    backoff = Backoff(timing, rng)
    waits = [backoff.next_s(0.0) for _ in range(8)]
    for wait_s, step_s in zip(waits, [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0], strict=True):
        assert 0.5 * step_s <= wait_s < 1.5 * step_s
    assert len(set(waits)) == 8
    assert backoff.next_s(0.5) >= 0.5  # a session that was soon over is no success
    assert backoff.next_s(1.0) < 0.15
