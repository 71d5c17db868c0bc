"""Frames over one stream socket between two processes of one engine. Sending never blocks.

    | length, u32 little endian | payload |

Data that the peer does not read at once is queued here, in order, so a slow reader delays only itself. Frames
come only from a process that this one started, over a socket pair that no other process can reach.
"""

import select
import socket
import time
from collections import deque

HEADER_BYTES = 4
RECEIVE_BYTES = 1 << 18


class ChannelClosed(ConnectionError):
    """The process at the other end has ended or closed the socket."""


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(HEADER_BYTES, "little") + payload


class FrameSplitter:
    """Splits received bytes into payloads."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, received: bytes) -> list[bytes]:
        pending = self._pending
        pending += received
        payloads: list[bytes] = []
        start = 0
        while len(pending) - start >= HEADER_BYTES:
            body = start + HEADER_BYTES
            end = body + int.from_bytes(pending[start:body], "little")
            if len(pending) < end:
                break
            payloads.append(bytes(pending[body:end]))
            start = end
        del pending[:start]
        return payloads


class Channel:
    """One end, for a process without an event loop. Raises ChannelClosed when the other end is closed."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._splitter = FrameSplitter()
        self._unsent: deque[memoryview] = deque()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send_nowait(self, payload: bytes) -> None:
        self._unsent.append(memoryview(frame(payload)))
        self.flush_nowait()

    def flush_nowait(self) -> None:
        """Send as much as the peer accepts now."""
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent[0])
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if sent == len(self._unsent[0]):
                self._unsent.popleft()
            else:
                self._unsent[0] = self._unsent[0][sent:]

    def receive_nowait(self) -> list[bytes]:
        """The payloads that have arrived completely; may be empty."""
        payloads: list[bytes] = []
        while True:
            try:
                received = self._socket.recv(RECEIVE_BYTES)
            except BlockingIOError:
                return payloads
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not received:
                if payloads:
                    return payloads  # The next call raises ChannelClosed.
                raise ChannelClosed("end of stream")
            payloads += self._splitter.feed(received)
            if len(received) < RECEIVE_BYTES:
                return payloads

    def wait_readable(self, timeout_s: float | None = None) -> bool:
        """Wait, and flush meanwhile. True: data or the end of the stream has arrived."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        poll = select.poll()
        while True:
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            events = dict(poll.poll(None if left_s is None else left_s * 1e3))
            event = events.get(self._socket.fileno(), 0)
            if event & ~select.POLLOUT:
                return True
            if event & select.POLLOUT:
                self.flush_nowait()
            elif left_s is not None and deadline is not None and time.monotonic() >= deadline:
                return False

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything is sent. False if the peer does not read it in time."""
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        self.flush_nowait()
        while self._unsent:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            poll.poll(left_s * 1e3)
            self.flush_nowait()
        return True

    def close(self) -> None:
        self._socket.close()
