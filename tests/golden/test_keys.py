"""Keys and signatures: the same secret and the same content give the same bytes in every release.

Engines of a cluster derive them, each by itself. A change splits a cluster into old and new engines.
"""

from typing import Any

import numpy as np

from baton.core.config import ClusterSecret
from baton.protocol.introduction import sign_introduction
from baton.protocol.messages import WIRE_VERSION, Envelope, Stranger
from baton.protocol.signed_frame import ProcessKey, epoch_of
from baton.protocol.ticket import sign_ticket
from baton.server.introduction import secret_ids
from baton.transport.base.identity_page import identity_bytes
from baton.transport.control import channel as control
from baton.transport.tcp import wire as tcp_wire
from baton.transport.tcp.sealing import Direction
from baton.transport.tcp.wire import connection_keys
from tests.golden.golden import check_values
from tests.golden.samples import INTRODUCTION, PUBLIC_KEY, SECRET, TICKET, D, P, pull_identity

CLUSTER = ClusterSecret(SECRET)
KEY = bytes(range(16))


def test_keys_from_the_cluster_secret() -> None:
    """Those of stored files are in `digests`."""
    [curve] = control._Keys.of(CLUSTER)
    check_values(
        "keys",
        {
            "a purpose": CLUSTER.derive("purpose"),
            "tickets and introductions": pull_identity(secret=CLUSTER).ticket_key,
            "id of the secret": secret_ids(CLUSTER)[0],
            "control channel, server": curve.server_public,
            "control channel, client": curve.client_public,
            "tcp": connection_keys(CLUSTER, b"token")[0],
            "tcp without a secret": connection_keys(None, b"token")[0],
        },
    )


def test_signatures() -> None:
    writer, reader = ProcessKey(bytes(range(32))), ProcessKey(bytes(range(32, 64)))
    envelope = Envelope(WIRE_VERSION, D, P, (Stranger(P),))
    check_values(
        "signatures",
        {
            "ticket": sign_ticket(TICKET, KEY),
            "ticket without a key": sign_ticket(TICKET, None),
            "introduction": sign_introduction(INTRODUCTION, KEY),
            "epoch of a public key": epoch_of(PUBLIC_KEY),
            "frame": writer.sign(envelope, reader.public),
            "frame to a process without a known key": writer.sign(envelope, None),
            "identity page": identity_bytes(7, 9, b"nonce"),
        },
    )


def test_connections_of_tcp() -> None:
    handshake = tcp_wire._Handshake(challenge=b"challenge", nonce=b"nonce", caller=D, target=P)
    session = handshake.session(KEY, "encrypt")
    check_values(
        "tcp",
        {
            "proof of the reader": handshake.proof(KEY, "reader", "mac"),
            "proof of the owner": handshake.proof(KEY, "owner", "encrypt"),
            "requests of a session": session.requests.seal(1, b"header").tag(),
            "answers of a session": session.answers.seal(1, b"header").tag(),
            "request": tcp_wire.REQUEST.pack(tcp_wire.READ, 2, 3),
            "answer": tcp_wire.ANSWER.pack(tcp_wire.DATA, 0, 3),
            "answer that failed": tcp_wire.ANSWER.pack(tcp_wire.FAIL, 0, 3),
            **{f"integrity {name}": sealed(name) for name in ("off", "mac", "encrypt")},
        },
    )


def sealed(integrity: Any) -> str:
    memory, ciphertext = np.arange(32, dtype=np.uint8), bytearray(32)
    sealing = Direction(KEY, integrity).seal(1, b"header")
    sealing.add(np.array([memory.ctypes.data]), np.array([32]), memoryview(ciphertext))
    return f"tag {sealing.tag().hex()}, ciphertext {ciphertext.hex()}"
