"""Messages over a socket: scattered memory that compiled code (`stream.c`) sends or receives in one call.

The compiled loop waits, moves bytes and computes their GMAC without the interpreter's lock. Where the library
was not built, the same loop runs in Python, and `sealing` computes GMAC before or after it.
"""

import contextlib
import ctypes
import errno
import functools
import select
import socket
import time
from enum import IntEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from baton.core.errors import TransferError
from baton.core.instructions import most_level
from baton.transport.base import gather
from baton.transport.base.iovec import iovec_array, os_error, receive_segments, send_segments

_BLOCK_BYTES = 16
_POWERS = 32
# Sets of instructions for GMAC, as `stream.c` numbers them.
LEVELS = ("none", "PCLMULQDQ", "AVX2", "AVX-512")


class Outcome(IntEnum):
    """End of a call, as `stream.c` numbers them."""

    WHOLE = 0  # All bytes of the message have crossed.
    WOKEN = 1
    CLOSED = 2
    TIMED_OUT = 3


class _Left(ctypes.Structure):
    """struct message."""

    _fields_ = (
        ("segments", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("index", ctypes.c_uint64),
        ("total_bytes", ctypes.c_uint64),
        ("done_bytes", ctypes.c_uint64),
    )


class Message:
    """Memory segments that a socket drains or fills from front to back: header, payload, tag.

    |== done ==|== done ==|===.......|..........|
                           ^ the next call continues here: entry `index`, shortened in place
    """

    def __init__(
        self, addresses: NDArray[np.int64], nbytes: NDArray[np.int64], *, done_before: int = 0
    ) -> None:
        """`done_before`: bytes that were transferred elsewhere and count as done."""
        self.entries = iovec_array(addresses, nbytes)
        total = int(nbytes.sum()) + done_before
        self.left = _Left(self.entries.ctypes.data, len(self.entries), 0, total, done_before)

    @property
    def total_bytes(self) -> int:
        return int(self.left.total_bytes)

    @property
    def done_bytes(self) -> int:
        return int(self.left.done_bytes)

    @property
    def rest_bytes(self) -> int:
        return self.total_bytes - self.done_bytes

    @property
    def rest(self) -> NDArray[np.int64]:
        return self.entries[self.left.index :]

    def advance(self, count: int) -> None:
        self.left.done_bytes += count
        rest = self.rest
        ends = np.cumsum(rest[:, 1])
        whole = int(np.searchsorted(ends, count, side="right"))
        self.left.index += whole
        if whole < len(rest):
            tail = int(ends[whole]) - count
            rest[whole, 0] += rest[whole, 1] - tail
            rest[whole, 1] = tail


class GhashKey(ctypes.Structure):
    """struct ghash_key. Made by `Library.key`."""

    _fields_ = (("powers", ctypes.c_uint64 * (2 * _POWERS)), ("level", ctypes.c_uint64))


class Ghash(ctypes.Structure):
    """struct ghash: GMAC of one message, of which all bytes are additional data."""

    _fields_ = (
        ("key", ctypes.POINTER(GhashKey)),
        ("bytes", ctypes.c_uint64),
        ("sum", ctypes.c_uint64 * 2),
        ("partial", ctypes.c_ubyte * _BLOCK_BYTES),
        ("mask", ctypes.c_char * _BLOCK_BYTES),
    )


class Library:
    """The compiled functions. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Raises TransferError if the library was not built, or for another version of Baton."""
        loaded = gather.load(path)
        try:
            self.send = loaded.baton_send_1
            self.receive = loaded.baton_receive_1
            self._make_key = loaded.baton_ghash_key_1
            self._add = loaded.baton_ghash_add_1
            self._tag = loaded.baton_ghash_tag_1
            self.ghash_level = min(int(loaded.baton_ghash_level_1()), most_level(LEVELS))
        except AttributeError as error:
            raise gather.unusable("of another version") from error
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self.send.argtypes = (number, pointer, pointer, ctypes.c_int64)
        self.receive.argtypes = (number, number, number, pointer, pointer, ctypes.c_int64)
        self._make_key.argtypes = (pointer, ctypes.c_char_p, number)
        self._add.argtypes = (pointer, pointer, ctypes.c_size_t)
        self._tag.argtypes = (pointer, pointer)
        for function in (self._make_key, self._add, self._tag):
            function.restype = None

    def key(self, zeros: bytes, level: int | None = None) -> GhashKey:
        """`zeros`: AES of a block of zeros. `level`: index of LEVELS, not 0; None: the best of this CPU."""
        level = self.ghash_level if level is None else level
        assert len(zeros) == _BLOCK_BYTES
        assert 0 < level <= self.ghash_level, f"this CPU has no {LEVELS[level]}"
        key = GhashKey()
        self._make_key(ctypes.byref(key), zeros, level)
        return key

    def add(self, ghash: Ghash, content: bytes | int, nbytes: int) -> None:
        """`content`: bytes, or an address."""
        self._add(ctypes.byref(ghash), content, nbytes)

    def tag(self, ghash: Ghash) -> bytes:
        """Nothing can be added afterwards."""
        tag = ctypes.create_string_buffer(_BLOCK_BYTES)
        self._tag(ctypes.byref(ghash), tag)
        return tag.raw


@functools.cache
def _load(path: Path) -> Library | None:
    with contextlib.suppress(TransferError):  # `baton doctor` reports it.
        return Library(path)
    return None


def compiled() -> Library | None:
    """The library of this installation; None if there is none."""
    return _load(gather.LIBRARY)


class Stream:
    """A connected socket. Used by one thread."""

    def __init__(self, sock: socket.socket, wake_fd: int = -1) -> None:
        """`wake_fd`: ends `receive` early when it can be read."""
        self._fd = sock.fileno()
        self._wake_fd = wake_fd
        self._library = compiled()

    def send(self, message: Message, ghash: Ghash | None, deadline: float) -> None:
        """Sends the whole message. With `ghash` its last segment, the tag, is filled on the way.

        `deadline`: a time of time.monotonic(). Raises OSError; TimeoutError at the deadline.
        """
        if self._library is None:
            assert ghash is None
            outcome = self._send(message, deadline)
        else:
            outcome = _outcome(self._library.send(self._fd, _at(message.left), _at(ghash), _ns(deadline)))
        if outcome == Outcome.TIMED_OUT:
            raise TimeoutError(errno.ETIMEDOUT, "the other end did not take a message in time")

    def receive(
        self, message: Message, ghash: Ghash | None, deadline: float, *, wants_to_send: bool = False
    ) -> Outcome:
        """Receives until the message is whole. With `ghash` the payload is added to it on the way.

        WOKEN also if `wants_to_send` and the socket takes bytes. A later call receives the rest. Raises
        OSError.
        """
        if self._library is None:
            assert ghash is None
            return self._receive(message, deadline, wants_to_send)
        return _outcome(
            self._library.receive(
                self._fd, self._wake_fd, wants_to_send, _at(message.left), _at(ghash), _ns(deadline)
            )
        )

    def _send(self, message: Message, deadline: float) -> Outcome:
        writable = select.poll()
        writable.register(self._fd, select.POLLOUT)
        while message.rest_bytes:
            try:
                message.advance(send_segments(self._fd, message.rest))
            except BlockingIOError:
                rest_s = deadline - time.monotonic()
                if rest_s <= 0 or not writable.poll(rest_s * 1000):
                    return Outcome.TIMED_OUT
        return Outcome.WHOLE

    def _receive(self, message: Message, deadline: float, wants_to_send: bool) -> Outcome:
        readable = select.poll()
        readable.register(self._fd, select.POLLIN | (select.POLLOUT if wants_to_send else 0))
        readable.register(self._wake_fd, select.POLLIN)
        while message.rest_bytes:
            try:
                count = receive_segments(self._fd, message.rest)
            except BlockingIOError:
                rest_s = deadline - time.monotonic()
                ready = dict(readable.poll(rest_s * 1000)) if rest_s > 0 else {}
                if not ready:
                    return Outcome.TIMED_OUT
                if self._wake_fd in ready or ready[self._fd] & select.POLLOUT:
                    return Outcome.WOKEN
                continue
            if count == 0:
                return Outcome.CLOSED
            message.advance(count)
        return Outcome.WHOLE


def _outcome(result: int) -> Outcome:
    if result < 0:
        raise os_error(-result)
    return Outcome(result)


def _at(structure: ctypes.Structure | None) -> "ctypes._CArgObject | None":
    return None if structure is None else ctypes.byref(structure)


def _ns(deadline: float) -> int:
    return int(deadline * 1e9)
