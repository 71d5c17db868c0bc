"""The owner's end of tcp: listens, and serves reads of its registered regions straight out of them.

One thread accepts; one thread per connection serves it, asleep while nothing is asked. A caller that is
no peer, or asks for what is not registered, loses its connection, and that is all that happens.
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
from baton.transport.checksum import checksum_of
from baton.transport.iovec import ScatteredMemory, Scratch
from baton.transport.spans import RegionTable
from baton.transport.tcp_wire import (
    ANSWER,
    COPIES_MAX,
    COPY_BYTES,
    DATA,
    FAIL,
    READ,
    READ_SUMMED,
    REQUEST,
    REQUEST_BYTES_MAX,
    TOKEN_BYTES,
    admit,
    connection_key,
    receive_exactly,
)
from baton.transport.threads import join_all, start_owned_thread

logger = logging.getLogger(__name__)

CONNECTIONS_MAX = 512
BACKLOG = 128
SEND_STALL_S = 30  # A reader that takes so long for one answer, however it dribbles, is cut off.
ACCEPT_RETRY_S = 0.1  # After running out of file descriptors, say.
CLOSE_TIMEOUT_S = 10.0


@dataclass(slots=True)
class TcpCounters:
    """Read by metrics from any thread."""

    served_bytes: int = 0
    strangers: int = 0  # Connections that failed to introduce themselves.
    refused: int = 0  # Requests outside the registered regions, or malformed.
    checksum_mismatches: int = 0  # As a reader: bytes that arrived otherwise than they were sent.
    turned_away: int = 0  # Connections above CONNECTIONS_MAX.


@dataclass(eq=False)
class _Session:
    sock: socket.socket
    thread: threading.Thread | None = None


@dataclass(eq=False)
class TcpOwner:
    """Raises ConfigError if `host` cannot be bound."""

    address: Address
    regions: Sequence[Region]
    host: str
    port: int
    secret: ClusterSecret | None
    thread_cpus: Collection[int] | None
    counters: TcpCounters = field(default_factory=TcpCounters)
    token: bytes = field(default_factory=lambda: secrets.token_bytes(TOKEN_BYTES), init=False)

    def __post_init__(self) -> None:
        self._table = RegionTable(self.regions)
        self._key = connection_key(self.secret, self.token)
        self._lock = threading.Lock()
        self._sessions: set[_Session] = set()
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
        """When this returns, nobody reads from the regions any more."""
        self._closing.set()
        _shut_down(self._listener)
        join_all([self._thread], CLOSE_TIMEOUT_S)
        self._listener.close()
        with self._lock:
            sessions = list(self._sessions)
            for session in sessions:
                _shut_down(session.sock)
        join_all([s.thread for s in sessions if s.thread is not None], CLOSE_TIMEOUT_S)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._closing.is_set():
                    logger.warning("cannot accept a tcp connection: %s", error)
                    self._closing.wait(ACCEPT_RETRY_S)
                continue
            self._start_session(sock)

    def _start_session(self, sock: socket.socket) -> None:
        with self._lock:
            if len(self._sessions) >= CONNECTIONS_MAX or self._closing.is_set():
                self.counters.turned_away += 1
                sock.close()
                return
            session = _Session(sock)
            self._sessions.add(session)
            session.thread = start_owned_thread(
                "baton-tcp-serve",
                lambda: self._serve(session),
                on_death=lambda _: self._end(session),
                cpus=self.thread_cpus,
            )

    def _serve(self, session: _Session) -> None:
        sock = session.sock
        try:
            caller = admit(sock, self._key, ours=self.address)
        except (PeerError, TransferError, OSError) as error:
            self.counters.strangers += 1
            logger.info("turned a tcp caller away: %s", error)
            self._end(session)
            return
        try:
            _prepare_to_serve(sock)
            header = Scratch.of(ANSWER.size)
            while True:
                self._serve_one(sock, header)
        except (PeerError, TransferError, OSError) as error:
            # The ordinary end of a reader, too.
            logger.debug("tcp reader %s is gone: %s", caller.engine_id, error)
        self._end(session)

    def _serve_one(self, sock: socket.socket, header: Scratch) -> None:
        kind, count, request = REQUEST.unpack(receive_exactly(sock, REQUEST.size))
        if kind not in (READ, READ_SUMMED) or not 0 < count <= COPIES_MAX:
            self.counters.refused += 1
            raise PeerError("a malformed request")
        copies = np.frombuffer(receive_exactly(sock, count * COPY_BYTES), dtype="<i8").reshape(-1, 2)
        addresses, nbytes = copies[:, 0], copies[:, 1]
        if not self._table.covers(addresses, nbytes, REQUEST_BYTES_MAX) or nbytes.sum() > REQUEST_BYTES_MAX:
            self.counters.refused += 1
            sock.sendall(ANSWER.pack(FAIL, 0, request, 0))
            raise PeerError("a request for memory that is not registered")
        checksum = checksum_of(addresses, nbytes) if kind == READ_SUMMED else 0
        header.write(ANSWER.pack(DATA, 0, request, checksum))
        answer = ScatteredMemory(
            np.concatenate((np.array([header.address]), addresses)), np.concatenate(([ANSWER.size], nbytes))
        )
        deadline = time.monotonic() + SEND_STALL_S
        while answer.rest_bytes:
            answer.send_to(sock.fileno(), socket.MSG_NOSIGNAL)
            if time.monotonic() > deadline:
                raise TransferError(f"the reader did not take an answer within {SEND_STALL_S} s")
        self.counters.served_bytes += answer.total_bytes - ANSWER.size

    def _end(self, session: _Session) -> None:
        with self._lock:
            self._sessions.discard(session)
            session.sock.close()

    def _lose_listener(self, error: BaseException) -> None:
        """Without its listener a transport serves whom it serves; new peers are refused by the kernel."""
        self._listener.close()


def _prepare_to_serve(sock: socket.socket) -> None:
    sock.settimeout(None)
    keep_alive(sock)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_STALL_S, 0))


def keep_alive(sock: socket.socket) -> None:
    """Notice a host that went away without a word, within about half a minute."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)


def _shut_down(sock: socket.socket) -> None:
    """Wake whoever sleeps in it."""
    with contextlib.suppress(OSError):  # Not connected any more: nobody sleeps in it.
        sock.shutdown(socket.SHUT_RDWR)
