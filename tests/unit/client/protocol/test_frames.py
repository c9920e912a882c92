"""Frames: any cutting of the stream gives the same ones, and a claim costs nothing."""

import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.client.protocol.errors import BadFrame, BatchTooLarge
from holdfast.client.protocol.frames import Frame, FrameReader, write_frame
from holdfast.client.protocol.limits import FRAME_BODY_BYTES, FRAME_HEADER_BYTES


def stream_of(*frames: tuple[bytes, bytes]) -> bytes:
    return b"".join(b"".join(write_frame(header, body)) for header, body in frames)


def prefix(header_bytes: int, body_bytes: int) -> bytes:
    return struct.pack(">II", header_bytes, body_bytes)


@given(
    frames=st.lists(st.tuples(st.binary(min_size=1, max_size=30), st.binary(max_size=50)), max_size=5),
    cuts=st.lists(st.integers(0, 500), max_size=10),
)
def test_any_cutting_of_the_stream_gives_the_same_frames(frames: list[tuple[bytes, bytes]], cuts: list[int]) -> None:
    stream = stream_of(*frames)
    places = sorted(min(cut, len(stream)) for cut in cuts)
    reader = FrameReader()
    found = []
    for begin, end in zip([0, *places], [*places, len(stream)], strict=True):
        found += reader.feed(stream[begin:end])
    assert found == [Frame(header, body) for header, body in frames]
    assert reader.pending_bytes == 0


def test_a_stream_may_come_byte_by_byte() -> None:
    frames = [(b"one", b""), (b"two", b"body"), (b"x" * 300, b"y" * 3_000)]
    reader = FrameReader()
    found = [frame for byte in stream_of(*frames) for frame in reader.feed(bytes([byte]))]
    assert found == [Frame(header, body) for header, body in frames]


def test_a_frame_of_the_largest_size_is_read() -> None:
    header, body = b"h" * FRAME_HEADER_BYTES, b"b" * FRAME_BODY_BYTES
    stream = stream_of((header, body))
    assert FrameReader().feed(stream) == [Frame(header, body)]
    reader = FrameReader()
    found = []
    for at in range(0, len(stream), 65_536):
        found += reader.feed(stream[at : at + 65_536])
    assert found == [Frame(header, body)]


@pytest.mark.parametrize(
    "claim",
    [
        prefix(FRAME_HEADER_BYTES + 1, 0),
        prefix(1, FRAME_BODY_BYTES + 1),
        prefix(2**32 - 1, 2**32 - 1),
        prefix(0, 5),
        prefix(0, 0),
    ],
    ids=["long header", "long body", "both", "no header", "nothing"],
)
def test_a_bad_prefix_is_refused_as_soon_as_it_is_there(claim: bytes) -> None:
    with pytest.raises(BadFrame):
        FrameReader().feed(claim)
    reader = FrameReader()
    assert reader.feed(claim[:7]) == []
    with pytest.raises(BadFrame):
        reader.feed(claim[7:])
    reader = FrameReader()
    with pytest.raises(BadFrame):
        reader.feed(stream_of((b"good", b"body")) + claim)


def test_nothing_is_read_after_a_bad_frame() -> None:
    reader = FrameReader()
    with pytest.raises(BadFrame):
        reader.feed(prefix(0, 0))
    with pytest.raises(BadFrame):
        reader.feed(stream_of((b"good", b"")))


def test_a_claim_costs_nothing_until_its_bytes_come() -> None:
    tracemalloc.start()
    try:
        readers = [FrameReader() for _ in range(100)]
        for reader in readers:
            reader.feed(prefix(FRAME_HEADER_BYTES, FRAME_BODY_BYTES))
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def test_many_small_pieces_cost_no_more_than_their_bytes() -> None:
    pieces = [b"ab"] * 50_000
    reader = FrameReader()
    reader.feed(prefix(FRAME_HEADER_BYTES, 0))
    tracemalloc.start()
    try:
        for piece in pieces:
            reader.feed(piece)
        assert tracemalloc.get_traced_memory()[1] < 400_000
    finally:
        tracemalloc.stop()
    assert reader.pending_bytes == 8 + 100_000


def test_a_body_that_is_most_of_its_piece_is_not_copied() -> None:
    stream = stream_of((b"h", b"b" * 10_000))
    [frame] = FrameReader().feed(stream)
    assert isinstance(frame.body, memoryview)
    assert frame.body.obj is stream


def test_a_small_body_does_not_keep_its_piece_alive() -> None:
    stream = stream_of((b"h", b"small"), (b"h", b"b" * 10_000))
    small, _ = FrameReader().feed(stream)
    assert type(small.body) is bytes


def test_a_body_that_came_in_pieces_is_read_only() -> None:
    stream = stream_of((b"h", b"b" * 100))
    reader = FrameReader()
    reader.feed(stream[:20])
    [frame] = reader.feed(stream[20:])
    assert isinstance(frame.body, memoryview) and frame.body.readonly


def test_large_parts_are_written_as_they_are() -> None:
    large = b"b" * 100_000
    buffers = write_frame(b"header", b"", large, memoryview(b"end"))
    assert buffers[0] == prefix(6, 100_003) + b"header"
    assert buffers[1] is large
    assert len(buffers) == 3


def test_a_small_frame_is_one_buffer() -> None:
    assert write_frame(b"header", b"a", memoryview(b"b")) == [prefix(6, 2) + b"headerab"]


def test_what_no_reader_takes_is_not_written() -> None:
    with pytest.raises(BatchTooLarge, match="FRAME_HEADER_BYTES"):
        write_frame(b"h" * (FRAME_HEADER_BYTES + 1))
    with pytest.raises(BatchTooLarge, match="FRAME_BODY_BYTES"):
        write_frame(b"h", b"b" * FRAME_BODY_BYTES, b"b")
