"""Two nodes meet: who knows the cluster's secret gets in, and nobody else, whatever is replayed or changed."""

import hmac
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.client.protocol.errors import BadValue, ProtocolViolated, VersionUnsupported
from holdfast.cluster.handshake import (
    MAGIC,
    ClusterKnown,
    Established,
    Handshake,
    HandshakeRefused,
    Hello,
    NotAPeer,
    OtherCluster,
    OtherPeer,
    OwnName,
    PeerUnformed,
    ProofWrong,
)
from holdfast.cluster.journal_frames import Identity

SECRET = b"the secret of the test cluster"
A = Identity(cluster_id="c1", node="a", incarnation=3)
B = Identity(cluster_id="c1", node="b", incarnation=7)


def dialler(me: Identity = B, secret: bytes = SECRET, nonce: bytes = b"d" * 32, to: str = "a") -> Handshake:
    return Handshake(me=me, secret=secret, nonce=nonce, dialled=to)


def listener(me: Identity = A, secret: bytes = SECRET, nonce: bytes = b"l" * 32) -> Handshake:
    return Handshake(me=me, secret=secret, nonce=nonce, dialled=None)


def meet(calling: Handshake, called: Handshake) -> tuple[Established, Established]:
    """Carry every word between the two until both are done."""
    to_called, to_calling = calling.start(), called.start()
    while to_called or to_calling:
        to_calling += called.feed(to_called) if to_called else b""
        to_called, to_calling = calling.feed(to_calling) if to_calling else b"", b""
    return calling.established(), called.established()


def test_two_nodes_with_one_secret_meet_and_know_each_other() -> None:
    calling, called = meet(dialler(), listener())
    assert (calling.peer, calling.incarnation) == ("a", 3)
    assert (called.peer, called.incarnation) == ("b", 7)
    assert (calling.send_key, calling.receive_key) == (called.receive_key, called.send_key)
    assert calling.send_key != calling.receive_key


def test_keys_differ_from_session_to_session_even_if_one_side_repeats_its_nonce() -> None:
    first, _ = meet(dialler(), listener())
    second, _ = meet(dialler(), listener(nonce=b"m" * 32))
    third, _ = meet(dialler(nonce=b"e" * 32), listener())
    keys = {key for each in (first, second, third) for key in (each.send_key, each.receive_key)}
    assert len(keys) == 6


@given(st.data())
def test_words_may_come_in_any_pieces(data: st.DataObject) -> None:
    calling, called = dialler(), listener()
    words = calling.start()
    for hears in (called, calling, called, calling):
        answer = b""
        while words:
            cut = data.draw(st.integers(1, len(words)))
            piece, words = words[:cut], words[cut:]
            answer += hears.feed(piece)
        words = answer
    assert calling.established().send_key == called.established().receive_key


def test_what_comes_behind_the_last_proof_belongs_to_the_session() -> None:
    calling, called = dialler(), listener()
    proof = called.feed(calling.feed(called.feed(calling.start())))
    calling.feed(proof + b"first frame")
    assert calling.established().rest == b"first frame"


def test_a_listener_says_nothing_to_one_who_has_not_said_hello_and_proves_nothing_to_one_who_has_not_proven() -> None:
    called = listener()
    assert called.start() == b""
    hello = dialler().start()
    assert called.feed(hello[:-1]) == b""
    answer = called.feed(hello[-1:])
    assert answer == Hello("c1", "a", 3, b"l" * 32).encode()
    assert called.feed(bytes(31)) == b""
    with pytest.raises(ProofWrong):
        called.feed(bytes(1))


# Refused -----------------------------------------------------------------------------------------------


def test_a_wrong_secret_is_refused_by_the_listener_and_by_the_dialler() -> None:
    calling, called = dialler(secret=b"another secret of any length"), listener()
    proof = calling.feed(called.feed(calling.start()))
    with pytest.raises(ProofWrong):
        called.feed(proof)
    with pytest.raises(ProofWrong):
        calling.feed(hmac.digest(SECRET, b"whatever the listener could make of it", "sha256"))
    assert not called.done and not calling.done


@pytest.mark.parametrize(
    ("other", "error"),
    [
        (replace(B, cluster_id="c2"), OtherCluster),
        (replace(B, node="a"), OwnName),
        (replace(B, node="A"), OtherPeer),  # lower than a: it must wait to be dialled
    ],
)
def test_a_listener_refuses_before_it_says_a_word(other: Identity, error: type[HandshakeRefused]) -> None:
    with pytest.raises(error):
        listener().feed(dialler(other).start())


@pytest.mark.parametrize(
    ("other", "error"),
    [
        (replace(A, cluster_id="c2"), OtherCluster),
        (replace(A, node="b"), OwnName),
        (replace(A, node="aa"), OtherPeer),  # another than the one that was dialled
    ],
)
def test_a_dialler_refuses_before_it_proves_anything(other: Identity, error: type[HandshakeRefused]) -> None:
    with pytest.raises(error):
        dialler().feed(Hello(other.cluster_id, other.node, 1, bytes(32)).encode())


@pytest.mark.parametrize("version", [0, 2, 65_535])
def test_another_version_is_refused_on_both_sides_whatever_follows_it(version: int) -> None:
    words = MAGIC + struct.pack(">H", version)
    for side in (dialler(), listener()):
        with pytest.raises(VersionUnsupported) as caught:
            side.feed(words)  # its layout is unknown: the number alone is enough
        assert caught.value.facts == {"version": version, "low": 1, "high": 1}


@pytest.mark.parametrize("words", [b"GET / HTTP/1.1\r\n\r\n", b"\0", b"HFpeer\n", b"\x80\x04"])
def test_garbage_is_refused_at_its_first_wrong_byte(words: bytes) -> None:
    for side in (dialler(), listener()):
        with pytest.raises(NotAPeer):
            side.feed(words)


@pytest.mark.parametrize(
    "words",
    [
        struct.pack(">8sH2BQ32s", MAGIC, 1, 2, 0, 1, bytes(32)) + b"c1",  # no name
        struct.pack(">8sH2BQ32s", MAGIC, 1, 2, 1, 1, bytes(32)) + b"c1\xff",  # no text
        struct.pack(">8sH2BQ32s", MAGIC, 1, 2, 1, 2**63, bytes(32)) + b"c1x",
        dialler().start() + b"more",
    ],
)
def test_a_hello_out_of_shape_is_refused(words: bytes) -> None:
    with pytest.raises(NotAPeer):
        listener().feed(words)


def test_frames_before_the_listeners_proof_are_refused() -> None:
    calling, called = dialler(), listener()
    proof = calling.feed(called.feed(calling.start()))
    with pytest.raises(NotAPeer):
        called.feed(proof + b"frame")


def test_a_recorded_dialler_is_refused_by_a_listener_with_a_fresh_nonce() -> None:
    calling, called = dialler(), listener()
    hello = calling.start()
    proof = calling.feed(called.feed(hello))
    called.feed(proof)
    assert called.done
    again = listener(nonce=b"n" * 32)
    again.feed(hello)
    with pytest.raises(ProofWrong):
        again.feed(proof)


def test_a_recorded_listener_is_refused_by_a_dialler_with_a_fresh_nonce() -> None:
    calling, called = dialler(), listener()
    hello = called.feed(calling.start())
    proof = called.feed(calling.feed(hello))
    again = dialler(nonce=b"e" * 32)
    again.feed(hello)
    with pytest.raises(ProofWrong):
        again.feed(proof)


def test_a_proof_that_is_sent_back_to_its_maker_is_refused() -> None:
    calling = dialler()
    proof = calling.feed(Hello("c1", "a", 3, b"x" * 32).encode())  # whoever answers need not know the secret for this
    with pytest.raises(ProofWrong):
        calling.feed(proof)


def test_a_hello_that_is_sent_back_to_its_maker_is_refused() -> None:
    calling = dialler()
    with pytest.raises(OwnName):
        calling.feed(calling.start())


def test_a_flipped_bit_in_any_byte_of_any_word_keeps_both_sides_from_a_session() -> None:
    """One bit of each byte, in each of the four words. What may follow a shortened word is given too."""
    sizes = [len(dialler().start()), len(listener().feed(dialler().start())), 32, 32]
    for word, size in enumerate(sizes):
        for position in range(size):
            assert not session_with_flip(word, position), f"byte {position} of word {word}"


def session_with_flip(word: int, position: int) -> bool:
    """Whether the side that hears the changed word, or hears of it by the next one, takes the other for a peer."""
    calling, called = dialler(), listener()
    words = calling.start()
    try:
        for number, hears in enumerate((called, calling, called, calling)):
            if number == word:
                words = words[:position] + bytes([words[position] ^ 1 << position % 8]) + words[position + 1 :]
            words = hears.feed(words)
    except ProtocolViolated:
        pass
    # The listener is done before its own proof travels; then it is the dialler who must not be.
    return calling.done if word == 3 else calling.done or called.done


# First boot --------------------------------------------------------------------------------------------


def test_an_empty_node_learns_from_a_proven_peer_that_there_is_a_cluster() -> None:
    empty = replace(B, cluster_id="")
    calling, called = dialler(empty), listener()
    calling.feed(called.feed(calling.feed(called.feed(calling.start()))))
    assert calling.done and called.done
    with pytest.raises(ClusterKnown, match="'c1'") as known:
        calling.established()
    assert (known.value.node, known.value.cluster_id) == ("a", "c1")
    with pytest.raises(PeerUnformed, match="'b'") as unformed:
        called.established()
    assert unformed.value.node == "b"


def test_an_empty_node_is_not_told_by_one_who_does_not_know_the_secret() -> None:
    calling, called = dialler(replace(B, cluster_id="")), listener(secret=b"another secret of any length")
    calling.feed(called.feed(calling.start()))
    with pytest.raises(ProofWrong):
        calling.feed(bytes(32))
    with pytest.raises(NotAPeer):
        calling.established()


def test_two_empty_nodes_meet_to_found_a_cluster_and_two_of_a_cluster_do_not() -> None:
    calling, called = meet(dialler(replace(B, cluster_id="")), listener(replace(A, cluster_id="")))
    assert calling.peer == "a"
    assert calling.founding and called.founding
    calling, called = meet(dialler(), listener())
    assert not calling.founding and not called.founding


@pytest.mark.parametrize(
    ("me", "secret", "nonce"),
    [
        (A, b"short", bytes(32)),
        (A, SECRET, bytes(31)),
        (replace(A, node=""), SECRET, bytes(32)),
        (replace(A, node="n" * 256), SECRET, bytes(32)),
        (replace(A, cluster_id="n" * 256), SECRET, bytes(32)),
    ],
)
def test_what_cannot_be_used_for_a_handshake_is_misuse(me: Identity, secret: bytes, nonce: bytes) -> None:
    with pytest.raises(BadValue):
        Handshake(me=me, secret=secret, nonce=nonce, dialled=None)


def test_the_longest_names_fit() -> None:
    calling, _ = meet(
        dialler(Identity(cluster_id="c" * 255, node="z" * 255, incarnation=2**63 - 1)),
        listener(Identity(cluster_id="c" * 255, node="a", incarnation=0)),
    )
    assert calling.incarnation == 0
