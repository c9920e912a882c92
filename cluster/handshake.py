"""How two nodes prove to each other that they know the cluster's secret, before anything else is read. No I/O.

    dialler                             listener
    hello                      ->       checks it
    checks it                  <-       hello
    proof of the dialler       ->       checks it
    checks it                  <-       proof of the listener

A hello is bounded, its magic is compared byte by byte as it comes, and only a version that we speak is read further. A
proof covers both hellos from end to end, with both nonces and names; each side has a label of its own, so no proof can
be sent back to the one who made it. From the same transcript come the keys that authenticate every later frame.
Nothing here is encrypted: who reads the wire reads the log. TLS is a later layer around this one.

The higher name dials, so that two nodes never build two sessions at once. The listener says nothing before it has seen
a hello of its own cluster, or of a node without one, and proves nothing before the dialler did. Randomness is given in.
"""

import hmac
import struct
from dataclasses import dataclass

from holdfast.client.protocol.errors import BadValue, ProtocolViolated, VersionUnsupported
from holdfast.client.protocol.limits import U63_MAX
from holdfast.cluster.journal_frames import Identity

MAGIC = b"HFpeer\r\n"  # a transport that changes line ends breaks it
VERSION = 1
NONCE_BYTES = 32
PROOF_BYTES = 32
SECRET_BYTES_MIN = 16  # a shorter one could be guessed from one recorded handshake
MAC_BYTES = 16

_VERSIONED = struct.Struct(">8sH")  # what every version begins with
_HELLO = struct.Struct(f">8sH2BQ{NONCE_BYTES}s")  # magic, version, bytes of cluster id and name, incarnation, nonce
_COVERED = struct.Struct(">QI")  # a frame's number and the length of its content
_DIALLER, _LISTENER = b"holdfast peer 1: proof of the dialler\0", b"holdfast peer 1: proof of the listener\0"
_SESSION = b"holdfast peer 1: session key\0"
_FROM_DIALLER, _FROM_LISTENER = b"frames of the dialler\0", b"frames of the listener\0"


class HandshakeRefused(ProtocolViolated):
    """The other side is not who may talk to us here; the connection is closed without a word."""


class NotAPeer(HandshakeRefused):
    """What came is not a hello, or came before its turn."""


class OtherCluster(HandshakeRefused):
    """It belongs to another cluster."""


class OwnName(HandshakeRefused):
    """It claims our own name: an address that leads back to us, or a second node under one name."""


class OtherPeer(HandshakeRefused):
    """Another node than the one that was dialled, or one that should have waited for us to dial."""


class ProofWrong(HandshakeRefused):
    """It does not know the cluster's secret, or somebody between us changed what was said."""


class ClusterKnown(HandshakeRefused):
    """We belong to no cluster yet, and a peer that knows the secret does: see `founding.py` for what follows (R24)."""

    text = "{node!r} belongs to cluster {cluster_id!r}, and we to none yet"
    fact_names = ("node", "cluster_id")
    node: str
    cluster_id: str


class PeerUnformed(HandshakeRefused):
    """A peer that knows the secret belongs to no cluster yet; it has learned from us that there is one."""

    text = "{node!r} belongs to no cluster yet"
    fact_names = ("node",)
    node: str


@dataclass(frozen=True, slots=True)
class Hello:
    """What a node says of itself. It is believed only once the proof has come."""

    cluster_id: str  # empty: the node has not become part of any cluster yet
    node: str
    incarnation: int
    nonce: bytes

    def encode(self) -> bytes:
        cluster, node = self.cluster_id.encode(), self.node.encode()
        return _HELLO.pack(MAGIC, VERSION, len(cluster), len(node), self.incarnation, self.nonce) + cluster + node


@dataclass(frozen=True, slots=True)
class Established:
    """Both sides have proven themselves. `rest` came behind the last proof and belongs to the session."""

    peer: str
    incarnation: int
    send_key: bytes
    receive_key: bytes
    rest: bytes = b""
    founding: bool = False  # neither side belongs to a cluster yet: they may speak of forming one, and of nothing else


class FrameMac:
    """What authenticates the frames of one direction of one session, each in its place.

    Numbers count from 0 and are not sent: a frame that is repeated, left out, moved or of another session, or that is
    our own coming back, does not fit.
    """

    def __init__(self, key: bytes) -> None:
        self._keyed = hmac.new(key, digestmod="sha256")
        self._number = 0

    def place(self, length: int) -> bytes:
        """What is covered beside the content: the next frame's number and its length."""
        return _COVERED.pack(self._number, length)

    def next(self, content: bytes) -> bytes:
        """The code of the next frame, and on to the one after it."""
        mac = self._keyed.copy()  # the key's own blocks are hashed once a session
        mac.update(self.place(len(content)))
        mac.update(content)
        self._number += 1
        return mac.digest()[:MAC_BYTES]


class Handshake:
    """One side of one handshake: send `start()`, then what `feed` gives, until `done`; then ask `established`.

    Every refusal is raised, and after it the object is of no use; close the connection.
    """

    def __init__(self, *, me: Identity, secret: bytes, nonce: bytes, dialled: str | None) -> None:
        """`dialled` names the peer that we called; without it we were called. A nonce is used once, ever."""
        if len(secret) < SECRET_BYTES_MIN:
            raise BadValue(field="the cluster's secret", problem=f"is shorter than {SECRET_BYTES_MIN} bytes")
        if len(nonce) != NONCE_BYTES:
            raise BadValue(field="nonce", problem=f"has {len(nonce)} bytes instead of {NONCE_BYTES}")
        if not me.node or max(len(me.node.encode()), len(me.cluster_id.encode())) > 255:
            raise BadValue(field="node name or cluster id", problem="is empty or longer than 255 bytes")
        self._me = me
        self._secret = secret
        self._dialled = dialled
        self._own_hello = Hello(me.cluster_id, me.node, me.incarnation, nonce).encode()
        self._pending = b""
        self._peer: Hello | None = None  # read, and not believed before `done`
        self._transcript = b""  # the dialler's hello, the listener's hello
        self.done = False

    def start(self) -> bytes:
        """What to send before anything came."""
        return b"" if self._dialled is None else self._own_hello

    def feed(self, data: bytes) -> bytes:
        """Take what came, in any pieces; gives what to send back. Raises HandshakeRefused or VersionUnsupported.

        Not to be called once `done`. Holds no more than one hello and the piece that was fed.
        """
        self._pending += data
        if self._peer is not None:
            return self._take_proof(self._peer)
        size = _hello_size(self._pending)
        if size is None or len(self._pending) < size:
            return b""
        # Each side waits for the other's word, so that nothing can have come behind a hello.
        if len(self._pending) > size:
            raise NotAPeer("more than a hello came in its place")
        raw, self._pending = self._pending, b""
        peer = _read_hello(raw)
        self._check(peer)
        self._peer = peer
        if self._dialled is None:
            self._transcript = raw + self._own_hello
            return self._own_hello
        self._transcript = self._own_hello + raw
        return self._proof(_DIALLER)

    def _check(self, peer: Hello) -> None:
        """Whether to talk to one who says this of itself at all."""
        me = self._me
        if peer.node == me.node:
            raise OwnName(f"the other side calls itself {me.node!r}, as we do")
        # 1. An empty node starts, and its peers have a cluster.
        # 2. It must learn so for certain before it may take part in forming one.
        # So where one side has no cluster, the handshake goes on to the proofs, and `established` refuses.
        if peer.cluster_id != me.cluster_id and peer.cluster_id and me.cluster_id:
            raise OtherCluster(f"{peer.node!r} belongs to cluster {peer.cluster_id!r}, we to {me.cluster_id!r}")
        if self._dialled is not None and peer.node != self._dialled:
            raise OtherPeer(f"{self._dialled!r} was dialled and {peer.node!r} answered; check the addresses")
        if self._dialled is None and peer.node < me.node:
            raise OtherPeer(f"{peer.node!r} dialled {me.node!r}; the higher name dials")

    def _take_proof(self, peer: Hello) -> bytes:
        if len(self._pending) < PROOF_BYTES:
            return b""
        proof, self._pending = self._pending[:PROOF_BYTES], self._pending[PROOF_BYTES:]
        listening = self._dialled is None
        if not hmac.compare_digest(proof, self._proof(_DIALLER if listening else _LISTENER)):
            raise ProofWrong(f"who calls itself {peer.node!r} does not prove that it knows the cluster's secret")
        if listening and self._pending:
            raise NotAPeer("frames came before our proof could have been seen")
        self.done = True
        return self._proof(_LISTENER) if listening else b""

    def _proof(self, label: bytes) -> bytes:
        return hmac.digest(self._secret, label + self._transcript, "sha256")

    def established(self) -> Established:
        """The session's begin, once `done`. Raises ClusterKnown or PeerUnformed if one side has no cluster yet."""
        peer = self._peer
        if peer is None or not self.done:
            raise NotAPeer("the handshake is not over")
        if not self._me.cluster_id and peer.cluster_id:
            raise ClusterKnown(node=peer.node, cluster_id=peer.cluster_id)
        if self._me.cluster_id and not peer.cluster_id:
            raise PeerUnformed(node=peer.node)
        session = self._proof(_SESSION)
        keys = [hmac.digest(session, label, "sha256") for label in (_FROM_DIALLER, _FROM_LISTENER)]
        send_key, receive_key = keys if self._dialled is not None else reversed(keys)
        founding = not self._me.cluster_id
        return Established(peer.node, peer.incarnation, send_key, receive_key, self._pending, founding)


def _hello_size(data: bytes) -> int | None:
    """How long the hello is that begins so; None while that is not known. Refuses at the first wrong byte."""
    if data[: len(MAGIC)] != MAGIC[: len(data)]:
        raise NotAPeer("what came is not the hello of a peer")
    if len(data) >= _VERSIONED.size:
        _, version = _VERSIONED.unpack_from(data)
        if version != VERSION:  # another version may have another layout: nothing behind the number is looked at
            raise VersionUnsupported(version=version, low=VERSION, high=VERSION)
    if len(data) < _HELLO.size:
        return None
    _, _, cluster_bytes, node_bytes, _, _ = _HELLO.unpack_from(data)
    return int(_HELLO.size + cluster_bytes + node_bytes)


def _read_hello(raw: bytes) -> Hello:
    _, _, cluster_bytes, node_bytes, incarnation, nonce = _HELLO.unpack_from(raw)
    names = raw[_HELLO.size :]
    try:
        cluster_id, node = names[:cluster_bytes].decode(), names[cluster_bytes:].decode()
    except UnicodeDecodeError:
        raise NotAPeer("a name in the hello is no text") from None
    if not node_bytes or incarnation > U63_MAX:
        raise NotAPeer("a hello without a name, or with a number above 2^63-1")
    return Hello(cluster_id, node, incarnation, nonce)
