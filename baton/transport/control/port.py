"""Listening port of a control channel, with a bound on connections whose handshake is unfinished.

    accepted --> handshake done       not bounded
             --> failed, or too late  counted as a stranger
    too many unfinished, or no file descriptor is left: the port ignores connection requests for a while

Open connections are not affected by a pause.
"""

import ctypes
import logging
import os
import resource
import socket as sockets
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass

import zmq

logger = logging.getLogger(__name__)

# Accepted connections with an unfinished handshake, and their share of the process's descriptors.
WAITING_MAX = 128
WAITING_SHARE_MAX = 1 / 8
# Pause after an accept without a free descriptor; ZeroMQ would retry at once and occupy a whole core.
ACCEPT_AGAIN_S = 1.0
EVENTS_MAX = 256  # Read at once. Until the pause, ZeroMQ may report failed accepts as fast as they are read.
_BACKLOG = 128
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # asm-generic/socket.h
_BPF_DROP_ALL = bytes((0x06, 0, 0, 0, 0, 0, 0, 0))  # One instruction: return 0.

# EVENT_HANDSHAKE_FAILED_PROTOCOL is left out: libzmq 4.3.5 also reports it for a frame that does not decrypt.
# The report overwrites the error number, so that libzmq takes the bad frame for a full queue and never reads
# from that connection again.
_FAILED_HANDSHAKE = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
WATCHED = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_ACCEPT_FAILED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | _FAILED_HANDSHAKE
)
"""Events of a monitor socket that `ControlPort.take_events` needs."""


@dataclass(slots=True)
class ControlCounters:
    """Counts of dropped frames and connections, by reason. Metrics read them from any thread."""

    strangers: int = 0  # Handshakes that failed.
    malformed: int = 0  # Frames with a wrong number of parts, or too long.
    unroutable: int = 0  # Frames to a connection that is gone.
    overflowed: int = 0  # Frames to a peer whose queue is full.
    failed: int = 0  # Socket errors, such as too few file descriptors.
    pauses: int = 0  # Times that the port stopped accepting because of too many strangers.


class ControlPort:
    """Used on the thread that owns the channel. Raises OSError for an address that cannot be bound."""

    def __init__(self, host: str, port: int, counters: ControlCounters, *, handshake_max_s: float) -> None:
        """`port`: 0 takes a free one. `handshake_max_s`: a client that needs longer is a stranger."""
        self.is_paused = False
        self.accepted: set[int] = set()  # Descriptors of open incoming connections.
        self._counters = counters
        self._handshake_max_s = handshake_max_s
        # Accept times of the connections with an unfinished handshake.
        self._introducing: deque[float] = deque()
        self._paused_until = 0.0
        self._waiting_max = _waiting_max()
        self._socket = _listen(host, port)
        self.number: int = self._socket.getsockname()[1]

    def duplicate(self) -> int:
        return os.dup(self._socket.fileno())

    def close(self) -> None:
        self._socket.close()

    def take_events(self, monitor: "zmq.Socket[bytes]") -> None:
        """Follow the connections of the socket that listens here, by the events of its monitor.

        libzmq reports only some failed handshakes: it hangs up on a client that speaks HTTP, for example,
        or keeps waiting, without a report. `bound_strangers` counts those later. Raises ZMQError.
        """
        now = time.monotonic()
        for _ in range(EVENTS_MAX):
            try:
                message = monitor.recv_multipart(zmq.NOBLOCK)[0]
            except zmq.Again:
                return
            event = int.from_bytes(message[:2], sys.byteorder)
            descriptor = int.from_bytes(message[2:6], sys.byteorder)
            match event:
                case zmq.EVENT_ACCEPTED:
                    self._introducing.append(now)
                    self.accepted.add(descriptor)
                case zmq.EVENT_ACCEPT_FAILED:
                    self._paused_until = now + ACCEPT_AGAIN_S
                case zmq.EVENT_DISCONNECTED:
                    self.accepted.discard(descriptor)
                case _:
                    # Only their number is tracked: a success does not tell which connection it belongs to.
                    if self._introducing:
                        self._introducing.popleft()
                    if event & _FAILED_HANDSHAKE:
                        self._counters.strangers += 1

    def bound_strangers(self) -> None:
        """Stop accepting at the bound and resume at half of it; pause when no descriptor is left."""
        now = time.monotonic()
        while self._introducing and now - self._introducing[0] > self._handshake_max_s:
            self._introducing.popleft()
            self._counters.strangers += 1
        # Those that left at once are still in `_introducing`; those with a finished handshake in `accepted`.
        num_waiting = min(len(self._introducing), len(self.accepted))
        is_short = now < self._paused_until
        if not self.is_paused and (is_short or num_waiting >= self._waiting_max):
            self.is_paused = _drop_connection_requests(self._socket)
            self._counters.pauses += self.is_paused
            if self.is_paused and self._counters.pauses & (self._counters.pauses - 1) == 0:
                logger.warning(
                    "%s; connection requests to the control port %d are ignored for a while",
                    "no file descriptor is left"
                    if is_short
                    else f"{num_waiting} connections wait for their handshake",
                    self.number,
                )
        elif self.is_paused and not is_short and num_waiting <= self._waiting_max // 2:
            self._socket.setsockopt(sockets.SOL_SOCKET, _SO_DETACH_FILTER, 0)
            self.is_paused = False


def _waiting_max() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return WAITING_MAX if limit < 0 else max(2, min(WAITING_MAX, int(limit * WAITING_SHARE_MAX)))


def _listen(host: str, port: int) -> sockets.socket:
    """A listening socket that we keep, so that it can be told to ignore connection requests."""
    family, kind, protocol, _, address = sockets.getaddrinfo(
        host.strip("[]"), port, type=sockets.SOCK_STREAM, flags=sockets.AI_PASSIVE
    )[0]
    listener = sockets.socket(family, kind, protocol)
    try:
        listener.setblocking(False)  # ZeroMQ shares this flag.
        listener.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)  # ZeroMQ sets this option too.
        if family == sockets.AF_INET6:
            listener.setsockopt(sockets.IPPROTO_IPV6, sockets.IPV6_V6ONLY, 0)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _drop_connection_requests(listener: sockets.socket) -> bool:
    """Lets the kernel drop what reaches this socket, which are connection requests. False: not supported.

    Connections accepted earlier have their own sockets.
    """
    code = ctypes.create_string_buffer(_BPF_DROP_ALL, len(_BPF_DROP_ALL))
    program = struct.pack("@HP", 1, ctypes.addressof(code))  # struct sock_fprog
    try:
        listener.setsockopt(sockets.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    except OSError:
        return False
    return True
