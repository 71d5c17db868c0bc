"""Control messages between engines: small frames, encrypted and authenticated with the cluster secret.

    channel = ControlChannel(secret=secret)      bound; `channel.url` goes into tickets and introductions
    channel.send(url, frame)                     to a peer, connected on first use
    for received in channel.poll(timeout_s=1):   requests from peers, and answers to ours
        channel.send(received.route, answer)
    channel.wake()                               from any thread: poll returns now

One thread owns the channel; other threads may only call `wake`. Only `poll` blocks. Delivery is best effort:
frames may be lost or late but are never altered, and the protocol above expects no more.

Every engine of a cluster derives the same CURVE key pairs from the secret. A process that does not know it
cannot finish the handshake in either direction. Without a secret the channel connects to this host only.
CURVE proves membership of the cluster; the frame itself proves which member wrote it
(protocol/signed_frame.py).

While a secret is replaced, the channel accepts clients with either secret, and dials with both.

Data from strangers (another protocol, frames too long or too many) is dropped and counted. Connections with
an unfinished handshake are bounded far below the limit of file descriptors: at the bound the port ignores
connection requests until some of them end. `send` and `poll` raise no socket errors.
"""

import errno
import logging
import math
import os
import re
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NewType, TypeAlias

import zmq
from zmq.utils import z85

from baton.core.config import ClusterSecret
from baton.core.errors import ConfigError, PeerError, TransferError
from baton.core.hosts import bracketed, check_bind_host, is_host, is_loopback, is_wildcard
from baton.transport.control.port import ACCEPT_AGAIN_S, WATCHED, ControlCounters, ControlPort

logger = logging.getLogger(__name__)

Route = NewType("Route", bytes)  # One incoming connection; invalid when that ends.
Destination: TypeAlias = Route | str  # str: a url.

MAX_FRAME_BYTES = 4 << 20
QUEUE_FRAMES_MAX = 1000  # Queued in each direction of one connection; further ones are dropped.
PEERS_MAX = 256  # Dialled at once; the least recently used connection is closed first.
PEER_IDLE_S = 300.0
POLL_FRAMES_MAX = 1000  # Returned by one poll, so that a flood does not block its caller.
HANDSHAKE_TIMEOUT_MS = 5_000
# The kernel notices a host that vanished: after 5 + 2 * 5 s of silence, or when sent data is not acknowledged
# for 10 s. libzmq's own heartbeat is off: its timer writes to a connection whose input has failed while it
# was stopped, and libzmq 4.3.5 then ends the process (`!_io_error`).
KEEPALIVE_IDLE_S = 5
KEEPALIVE_EVERY_S = 5
KEEPALIVE_PROBES = 2
ACKNOWLEDGED_WITHIN_MS = 10_000
# A peer that does not answer repeated messages for this long is dialled again. A corrupted frame length makes
# the other end wait for bytes that never come, on a connection that looks alive.
SILENT_S = 2.5
RECONNECT_FIRST_MS = 100
RECONNECT_MAX_MS = 2_000

NUM_SPARE_DESCRIPTORS = 8  # Released when none are left, so that peers can still be dialled.
_FAILED_POLL_PAUSE_S = 0.05

_CURVE_OVERHEAD_BYTES = 64  # Nonce, authenticator and flags around an encrypted frame.
_ZAP_ADDRESS = "inproc://zeromq.zap.01"  # RFC 27: where a context asks which clients to accept.
_ZAP_DOMAIN = b"baton"
_URL = re.compile(r"tcp://(?P<host>[^\[\]:/]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Received:
    """One frame, and the route for an answer."""

    route: Destination
    frame: bytes


@dataclass(eq=False)
class _Dialled:
    sockets: "list[zmq.Socket[bytes]]"  # One for each secret; the peer answers one of them.
    used_at: float
    connected_at: float  # When the newest of the sockets was connected.
    sent_at: float = 0.0
    asked_at: float | None = None  # First of the unanswered frames sent without a long pause between them.


@dataclass(frozen=True)
class _Keys:
    """CURVE key pairs, derived from the secret, so that only the secret has to be distributed."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    @classmethod
    def of(cls, secret: ClusterSecret | None) -> "tuple[_Keys, ...]":
        """Keys of the current secret, then of the previous one. Empty without a secret."""
        if secret is None:
            return ()
        pairs = zip(
            *(secret.derive_all(f"control-curve-{role}") for role in ("server", "client")), strict=True
        )
        return tuple(
            cls(zmq.curve_public(server), server, zmq.curve_public(client), client)
            for server, client in ((z85.encode(server), z85.encode(client)) for server, client in pairs)
        )


@dataclass(eq=False)
class ControlChannel:
    """Raises ConfigError for an address that may not or cannot be bound."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: a free one.
    secret: ClusterSecret | None = None
    advertise_host: str | None = None  # The host that peers dial; required if `host` is a wildcard.
    advertise_port: int = 0  # 0: the port that it listens on. Set it if a proxy or NAT is in between.
    max_frame_bytes: int = MAX_FRAME_BYTES
    counters: ControlCounters = field(default_factory=ControlCounters, init=False)
    url: str = field(default="", init=False)

    def __post_init__(self) -> None:
        check_bind_host(self.host, self.secret, field="control.host")
        if self.advertise_host is None and is_wildcard(self.host):
            raise ConfigError(
                f"is required when binding to {self.host}, because peers cannot dial a wildcard",
                field="control.advertise_host",
            )
        self._keys = _Keys.of(self.secret)
        self._dialled: OrderedDict[str, _Dialled] = OrderedDict()
        self._spare_fds: list[int] = []
        self._closed = False
        self._wake_lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        self._context.set(zmq.MAX_SOCKETS, PEERS_MAX + 16)
        for cpu in range(os.cpu_count() or 1):
            # Free ZeroMQ's I/O thread from the one core that a host such as vLLM pins its worker to.
            self._context.set(zmq.THREAD_AFFINITY_CPU_ADD, cpu)
        self._poller = zmq.Poller()
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._zap = self._context.socket(zmq.ROUTER)
        self._zap.linger = 0
        self._zap.bind(_ZAP_ADDRESS)
        self._poller.register(self._zap, zmq.POLLIN)
        self._router = self._context.socket(zmq.ROUTER)
        self._tune(self._router)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self._keys:
            self._router.curve_server = True
            self._router.curve_secretkey = self._keys[0].server_secret
            self._router.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        self._monitor = self._router.get_monitor_socket(WATCHED)
        self._poller.register(self._monitor, zmq.POLLIN)
        try:
            self._listener = ControlPort(
                self.host, self.port, self.counters, handshake_max_s=2 * HANDSHAKE_TIMEOUT_MS / 1000
            )
            self._router.setsockopt(zmq.USE_FD, self._listener.duplicate())  # ZeroMQ closes the copy.
            self.port = self._listener.number
            self._router.bind(f"tcp://{bracketed(self.host)}:{self.port}")
        except (OSError, zmq.ZMQError) as error:
            raise ConfigError(
                f"cannot bind {self.host}:{self.port}: {error}", field="control.port"
            ) from error
        self._poller.register(self._router, zmq.POLLIN)
        self.url = f"tcp://{bracketed(self.advertise_host or self.host)}:{self.advertise_port or self.port}"
        self._reserve_descriptors()

    def send(self, to: Destination, frame: bytes) -> bool:
        """Queues one frame; never blocks. False: dropped (and counted), as a network may drop it.

        Raises PeerError for a malformed url, TransferError for one beyond this host if no secret is set.
        """
        assert len(frame) <= self.max_frame_bytes, f"a control frame of {len(frame)} bytes"
        try:
            if isinstance(to, str):
                return self._send_each(to, self._dial(to), frame)
            self._router.send_multipart([to, frame], zmq.NOBLOCK)
        except zmq.Again:
            self.counters.overflowed += 1
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                self.counters.unroutable += 1
            else:
                self._note_failure("send", error)
            return False
        return True

    def _send_each(self, url: str, dialled: _Dialled, frame: bytes) -> bool:
        """Sends on every socket of a peer: at most one is connected, the others drop their queues."""
        self._replace_if_silent(url, dialled)
        num_queued = 0
        for index, socket in enumerate(dialled.sockets):
            try:
                socket.send(frame, zmq.NOBLOCK)
                num_queued += 1
            except zmq.Again:
                self._connect_again(url, dialled, index)
        if not num_queued:
            raise zmq.Again
        return True

    def poll(self, timeout_s: float) -> list[Received]:
        """Received frames; waits until there are some, or `wake` is called, or the timeout."""
        received: list[Received] = []
        deadline = time.monotonic() + timeout_s
        while True:
            rest_s = deadline - time.monotonic()
            if self._listener.is_paused:
                rest_s = min(rest_s, ACCEPT_AGAIN_S / 2)
            try:
                ready = {key for key, _ in self._poller.poll(max(0, math.ceil(rest_s * 1000)))}
            except zmq.ZMQError as error:
                self._note_failure("poll", error)
                time.sleep(_FAILED_POLL_PAUSE_S)
                return received
            woken = self._wake_fd in ready
            if woken:
                os.eventfd_read(self._wake_fd)
            self._answer_zap()
            self._count_strangers()
            self._receive(self._router, None, received)
            for url, dialled in list(self._dialled.items()):
                for socket in dialled.sockets:
                    if socket in ready:
                        self._receive(socket, url, received)
            # Handshakes and strangers do not concern the caller.
            if received or woken or time.monotonic() >= deadline:
                self._hang_up_idle()
                self._reserve_descriptors()
                return received

    def wake(self) -> None:
        """Makes the current or next `poll` return at once. From any thread; harmless after close."""
        with self._wake_lock:  # A closed descriptor's number could be in use again.
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)

    def forget(self, url: str) -> None:
        """Closes the connection to a peer and drops its queued frames."""
        if dialled := self._dialled.pop(url, None):
            self._hang_up(dialled)

    def close(self) -> None:
        """Drops everything and frees the port. Idempotent; takes no longer than closing sockets does."""
        with self._wake_lock:
            if self._closed:
                return
            self._closed = True
        for url in list(self._dialled):
            self.forget(url)
        if hasattr(self, "_monitor"):
            self._router.disable_monitor()
        # Linger 0 everywhere: term() would otherwise wait for peers that are gone.
        self._context.destroy(linger=0)
        if hasattr(self, "_listener"):
            self._listener.close()
        self._release_descriptors()
        os.close(self._wake_fd)

    def _dial(self, url: str) -> _Dialled:
        if dialled := self._dialled.get(url):
            dialled.used_at = time.monotonic()
            self._dialled.move_to_end(url)
            return dialled
        host = check_url(url)
        if not self._keys and not is_loopback(host):
            raise TransferError(
                f"cannot connect to {url}: without a cluster secret only this host is allowed; "
                "set BATON_SECRET"
            )
        while len(self._dialled) >= PEERS_MAX:
            self._hang_up(self._dialled.popitem(last=False)[1])
        opened: list[zmq.Socket[bytes]] = []
        try:
            for keys in self._keys or (None,):
                opened.append(self._new_dealer())
                self._connect(opened[-1], url, keys)
        except zmq.ZMQError:
            for socket in opened:
                socket.close(linger=0)
            raise
        for socket in opened:
            self._poller.register(socket, zmq.POLLIN)
        now = time.monotonic()
        self._dialled[url] = dialled = _Dialled(opened, now, now)
        return dialled

    def _connect_again(self, url: str, dialled: _Dialled, index: int) -> None:
        """Replaces a socket that takes no frame: its queue is full, or it has given up.

        libzmq reconnects after a lost connection, but not after a handshake that it found malformed, which
        one flipped bit can cause.
        """
        if time.monotonic() - dialled.connected_at >= RECONNECT_MAX_MS / 1000:
            self._replace(url, dialled, index)

    def _replace_if_silent(self, url: str, dialled: _Dialled) -> None:
        now = time.monotonic()
        if dialled.asked_at is None or now - dialled.sent_at > SILENT_S:
            dialled.asked_at = now
        elif now - dialled.asked_at > SILENT_S:
            dialled.asked_at = now
            for index in range(len(dialled.sockets)):
                self._replace(url, dialled, index)
        dialled.sent_at = now

    def _replace(self, url: str, dialled: _Dialled, index: int) -> None:
        dialled.connected_at = time.monotonic()
        socket = self._new_dealer()
        try:
            self._connect(socket, url, (self._keys or (None,))[index])
        except zmq.ZMQError:
            socket.close(linger=0)
            raise
        self._poller.unregister(dialled.sockets[index])
        dialled.sockets[index].close(linger=0)
        self._poller.register(socket, zmq.POLLIN)
        dialled.sockets[index] = socket

    def _new_dealer(self) -> "zmq.Socket[bytes]":
        try:
            return self._context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._spare_fds:
                raise
            self._release_descriptors()
            return self._context.socket(zmq.DEALER)

    def _connect(self, socket: "zmq.Socket[bytes]", url: str, keys: _Keys | None) -> None:
        self._tune(socket)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_FIRST_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        if keys is not None:
            socket.curve_serverkey = keys.server_public
            socket.curve_publickey = keys.client_public
            socket.curve_secretkey = keys.client_secret
        socket.connect(url)

    def _hang_up(self, dialled: _Dialled) -> None:
        for socket in dialled.sockets:
            self._poller.unregister(socket)
            socket.close(linger=0)

    def _reserve_descriptors(self) -> None:
        with suppress(OSError):  # None is free: the reserve is filled later.
            while len(self._spare_fds) < NUM_SPARE_DESCRIPTORS:
                self._spare_fds.append(os.dup(self._wake_fd))

    def _release_descriptors(self) -> None:
        while self._spare_fds:
            os.close(self._spare_fds.pop())

    def _note_failure(self, what: str, error: zmq.ZMQError) -> None:
        """Logs failures number 1, 2, 4, ...: a network may drop a frame, and the peer asks again."""
        self.counters.failed += 1
        is_news = self.counters.failed & (self.counters.failed - 1) == 0
        level = logging.WARNING if is_news else logging.DEBUG
        logger.log(
            level, "control channel: %s failed, failure number %d: %s", what, self.counters.failed, error
        )

    def _hang_up_idle(self) -> None:
        now = time.monotonic()
        while self._dialled:
            url, oldest = next(iter(self._dialled.items()))
            if now - oldest.used_at < PEER_IDLE_S:
                return
            self.forget(url)

    def _tune(self, socket: "zmq.Socket[bytes]") -> None:
        socket.linger = 0
        socket.setsockopt(zmq.SNDHWM, QUEUE_FRAMES_MAX)
        socket.setsockopt(zmq.RCVHWM, QUEUE_FRAMES_MAX)
        socket.setsockopt(zmq.MAXMSGSIZE, self.max_frame_bytes + _CURVE_OVERHEAD_BYTES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_EVERY_S)
        socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES)
        socket.setsockopt(zmq.TCP_MAXRT, ACKNOWLEDGED_WITHIN_MS)
        socket.setsockopt(zmq.IPV6, 1)

    def _receive(self, socket: "zmq.Socket[bytes]", url: str | None, received: list[Received]) -> None:
        for _ in range(POLL_FRAMES_MAX - len(received)):  # Malformed ones count too.
            try:
                parts = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except zmq.ZMQError as error:
                self._note_failure("receive", error)
                return
            # A ROUTER prepends the route to a received message; a DEALER has one connection, its own route.
            expected = 2 if url is None else 1
            if len(parts) != expected or len(parts[-1]) > self.max_frame_bytes:
                self.counters.malformed += 1
                continue
            if url is not None:
                self._dialled[url].used_at = time.monotonic()
                self._dialled[url].asked_at = None
                self._dialled.move_to_end(url)
            received.append(Received(url if url is not None else Route(parts[0]), parts[-1]))

    def _answer_zap(self) -> None:
        """Answers ZAP requests (RFC 27): accepts only clients that proved to own one of our keys."""
        known = {z85.decode(keys.client_public) for keys in self._keys}
        for _ in range(POLL_FRAMES_MAX):
            try:
                route, *request = self._zap.recv_multipart(zmq.NOBLOCK)
                _, version, request_id, domain, _, _, mechanism, *credentials = request
                assert (version, domain) == (b"1.0", _ZAP_DOMAIN), "only our own context sends requests here"
                ours = mechanism == b"CURVE" and len(credentials) == 1 and credentials[0] in known
                status = (b"200", b"OK") if ours else (b"400", b"not of this cluster")
                self._zap.send_multipart([route, b"", b"1.0", request_id, *status, b"", b""])
            except zmq.Again:
                return
            except zmq.ZMQError as error:
                self._note_failure("authentication", error)
                return

    def _count_strangers(self) -> None:
        try:
            self._listener.take_events(self._monitor)
        except zmq.ZMQError as error:
            self._note_failure("watching connections", error)
        self._listener.bound_strangers()


def check_url(url: str) -> str:
    """The host that a control url names. Raises PeerError unless it is tcp://host:port."""
    match = _URL.fullmatch(url)
    host = match["host"].strip("[]") if match is not None else ""
    if match is None or not is_host(host) or not 0 < int(match["port"]) <= 65535:
        raise PeerError(f"{url[:100]!r} is not a control url; expected tcp://host:port")
    return host
