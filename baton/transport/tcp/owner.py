"""The owner's side of tcp: listens, and serves reads of its registered regions.

    accepted --stranger--> handshake in time --peer--> requests, one after the other
                       `--> closed                 `--> closed: a bad request, or the reader is gone

One thread accepts. Each connection has a thread that serves it, and sleeps while there is no request.
Strangers have few slots and little time; if all slots are taken, the oldest stranger loses its slot, so that
a peer, which needs one round trip, still gets in. Peers have separate slots.

A request is authenticated before memory is touched. A caller that fails the handshake, or asks for memory
that is not registered, loses its connection. It has no other effect.
"""

import contextlib
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from baton.core.config import ClusterSecret
from baton.core.errors import ConfigError, PeerError, TransferError
from baton.core.ids import Address
from baton.core.layout import Region
from baton.transport.base.iovec import Scratch
from baton.transport.base.spans import Int64s, RegionTable
from baton.transport.base.stream import Message, Stream
from baton.transport.base.threads import join_all, start_owned_thread
from baton.transport.tcp.sealing import TAG_BYTES, Integrity
from baton.transport.tcp.wire import (
    ANSWER,
    COPIES_MAX,
    COPY_BYTES,
    DATA,
    ENCRYPTED_BYTES_MAX,
    FAIL,
    READ,
    REQUEST,
    TOKEN_BYTES,
    Session,
    admit,
    connection_keys,
    receive_exactly,
)

logger = logging.getLogger(__name__)

PEERS_MAX = 512  # Connections after their handshake.
STRANGERS_MAX = 32  # Connections in their handshake, which takes a peer one round trip.
BACKLOG = 128
SEND_STALL_S = 10  # A reader that takes longer for one answer, at any rate, is disconnected.
ACCEPT_RETRY_S = 0.1  # Pause after running out of file descriptors or threads.
CLOSE_TIMEOUT_S = 10.0


@dataclass(slots=True)
class TcpCounters:
    """Metrics read these from any thread."""

    lock: threading.Lock = field(default_factory=threading.Lock)  # Each connection has a thread.
    served_bytes: int = 0
    strangers: int = 0  # Connections that failed the handshake.
    refused: int = 0  # Requests that are malformed or ask for memory that is not registered.
    bad_requests: int = 0  # Requests whose tag is wrong.
    turned_away: int = 0  # Connections that lost or got no slot.


@dataclass(eq=False)
class _Connection:
    sock: socket.socket
    is_peer: bool = False  # The handshake is over.
    thread: threading.Thread | None = None


@dataclass(eq=False)
class TcpOwner:
    """Raises ConfigError if `host` cannot be bound."""

    address: Address
    regions: Sequence[Region]
    host: str
    port: int
    secret: ClusterSecret | None
    integrity: Integrity
    thread_cpus: Collection[int] | None
    counters: TcpCounters = field(default_factory=TcpCounters)
    token: bytes = field(default_factory=lambda: secrets.token_bytes(TOKEN_BYTES), init=False)

    def __post_init__(self) -> None:
        self._table = RegionTable(self.regions)
        self._keys = connection_keys(self.secret, self.token)
        self._lock = threading.Lock()
        self._connections: dict[_Connection, None] = {}  # Oldest first.
        self._closing = threading.Event()
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((self.host, self.port))
            self._listener.listen(BACKLOG)
        except OSError as error:
            self._listener.close()
            raise ConfigError(f"cannot bind {self.host}:{self.port}: {error}", field="tcp.host") from error
        self.port = self._listener.getsockname()[1]
        self._thread = start_owned_thread(
            "baton-tcp-listen", self._accept, on_death=self._lose_listener, cpus=self.thread_cpus
        )

    def close(self) -> None:
        """When this returns, no peer reads from the regions any more."""
        self._closing.set()
        _shut_down(self._listener)
        join_all([self._thread], CLOSE_TIMEOUT_S)
        self._listener.close()
        with self._lock:
            connections = list(self._connections)
            for connection in connections:
                _shut_down(connection.sock)
        join_all([c.thread for c in connections if c.thread is not None], CLOSE_TIMEOUT_S)

    def _accept(self) -> None:
        level = logging.WARNING
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
                self._start_connection(sock)
                level = logging.WARNING
            except (OSError, RuntimeError) as error:  # No descriptor, or no thread, is left.
                if not self._closing.is_set():
                    logger.log(level, "cannot accept a tcp connection: %s", error)
                    level = logging.DEBUG  # Repetitions are logged for debugging only.
                    self._closing.wait(ACCEPT_RETRY_S)

    def _start_connection(self, sock: socket.socket) -> None:
        """Raises RuntimeError, and closes the connection, if no thread can be started."""
        with self._lock:
            strangers = [c for c in self._connections if not c.is_peer]
            if len(strangers) >= 2 * STRANGERS_MAX or self._closing.is_set():
                # Strangers without a slot are still ending.
                self.counters.turned_away += 1
                sock.close()
                return
            if len(strangers) >= STRANGERS_MAX:
                self.counters.turned_away += 1
                _shut_down(strangers[-STRANGERS_MAX].sock)
            connection = _Connection(sock)
            self._connections[connection] = None
            try:
                connection.thread = start_owned_thread(
                    "baton-tcp-serve",
                    lambda: self._serve(connection),
                    on_death=lambda _: self._end(connection),
                    cpus=self.thread_cpus,
                )
            except BaseException:
                del self._connections[connection]
                sock.close()
                raise

    def _serve(self, connection: _Connection) -> None:
        sock = connection.sock
        try:
            caller, session = admit(sock, self._keys, self.integrity, ours=self.address)
        except (PeerError, TransferError, OSError) as error:
            with self.counters.lock:
                self.counters.strangers += 1
            logger.info("refused a tcp connection: %s", error)
            self._end(connection)
            return
        try:
            self._become_peer(connection)
            _prepare_to_serve(sock)
            requests = _Requests(sock, session, self._table, self.counters)
            while True:
                requests.serve_one()
        except (PeerError, TransferError, OSError) as error:
            # Also the normal end of a reader.
            logger.debug("connection of tcp reader %s ended: %s", caller.engine_id, error)
        self._end(connection)

    def _become_peer(self, connection: _Connection) -> None:
        with self._lock:
            if sum(c.is_peer for c in self._connections) >= PEERS_MAX:
                self.counters.turned_away += 1
                raise TransferError(f"all {PEERS_MAX} connections of peers are in use")
            connection.is_peer = True

    def _end(self, connection: _Connection) -> None:
        with self._lock:
            self._connections.pop(connection, None)
            connection.sock.close()

    def _lose_listener(self, error: BaseException) -> None:
        """Keeps the peers after a bug of ours; the kernel refuses new ones."""
        self._listener.close()


class _Requests:
    """Requests of one connection. Used by its thread only."""

    def __init__(
        self, sock: socket.socket, session: Session, table: RegionTable, counters: TcpCounters
    ) -> None:
        self._sock = sock
        self._session = session
        self._table = table
        self._counters = counters
        self._number = 0  # Number of the last request.
        self._header = Scratch.of(ANSWER.size)
        self._tag = Scratch.of(TAG_BYTES)
        self._stream = Stream(sock)
        self._ciphertext = np.empty(ENCRYPTED_BYTES_MAX if session.answers.encrypts else 0, dtype=np.uint8)

    def serve_one(self) -> None:
        """Raises PeerError for a bad request, OSError or TransferError if the connection is lost."""
        request, addresses, nbytes = self._receive()
        number = self._number
        bytes_max = self._session.request_bytes_max
        if not self._table.covers(addresses, nbytes, bytes_max) or nbytes.sum() > bytes_max:
            with self._counters.lock:
                self._counters.refused += 1
            header = ANSWER.pack(FAIL, 0, number)
            self._sock.sendall(header + self._session.answers.seal(number, header + request).tag())
            raise PeerError("a request for memory that is not registered")
        header = ANSWER.pack(DATA, 0, number)
        sealing = self._session.answers.seal(number, header + request)
        self._header.write(header)
        if sealing.ghash is None:  # Otherwise the bytes are added as they are sent.
            sealing.add(addresses, nbytes, self._ciphertext.data)
            self._tag.write(sealing.tag())
        if self._session.answers.encrypts:
            addresses, nbytes = _one(self._ciphertext.ctypes.data), _one(int(nbytes.sum()))
        answer = Message(
            np.concatenate((_one(self._header.address), addresses, _one(self._tag.address))),
            np.concatenate((_one(ANSWER.size), nbytes, _one(TAG_BYTES))),
        )
        self._stream.send(answer, sealing.ghash, time.monotonic() + SEND_STALL_S)
        with self._counters.lock:
            self._counters.served_bytes += answer.total_bytes - ANSWER.size - TAG_BYTES

    def _receive(self) -> tuple[bytes, Int64s, Int64s]:
        """The next request, authenticated, with the addresses and lengths that it asks for."""
        header = receive_exactly(self._sock, REQUEST.size)
        kind, count, number = REQUEST.unpack(header)
        if kind != READ or not 0 < count <= COPIES_MAX or number != self._number + 1:
            with self._counters.lock:
                self._counters.refused += 1
            raise PeerError("a malformed request, or a request out of order")
        body = receive_exactly(self._sock, count * COPY_BYTES + TAG_BYTES)
        request, tag = bytes(header + body[:-TAG_BYTES]), bytes(body[-TAG_BYTES:])
        if not self._session.requests.open(number, request).is_genuine(tag):
            with self._counters.lock:
                self._counters.bad_requests += 1
            raise PeerError("a request with a wrong tag, changed in transit")
        self._number = number
        copies = np.frombuffer(request, dtype="<i8", offset=REQUEST.size).reshape(-1, 2)
        return request, copies[:, 0], copies[:, 1]


def _one(number: int) -> Int64s:
    return np.array([number], dtype=np.int64)


def _prepare_to_serve(sock: socket.socket) -> None:
    sock.settimeout(None)
    keep_alive(sock)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_STALL_S, 0))


def keep_alive(sock: socket.socket) -> None:
    """Detects a host that vanished within about 11 s."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000)


def _shut_down(sock: socket.socket) -> None:
    """Wakes the thread that sleeps in this socket."""
    with contextlib.suppress(OSError):  # Not connected: no thread sleeps in it.
        sock.shutdown(socket.SHUT_RDWR)
