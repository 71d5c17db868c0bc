"""The reader's side of tcp: one peer, a few lanes to it; bytes are received straight into their blocks.

    queue of readings --take--> lane 0: request, request | answer, answer ...
                      --take--> lane 1: ...

A lane is a connection with the only thread that sends and receives on it. It keeps a few requests in flight,
so that the owner never waits for the next. Operations take turns, one chunk at a time.

Every answer ends with a tag over the request and the bytes (`tcp_wire`). The tag is checked when the bytes
are in the blocks. After a wrong tag the request is repeated once, then the reading fails. If the
connection is encrypted, an answer is received into a buffer of the lane and decrypted into the blocks.

A cancelled operation ends, without the peer's help, as soon as each lane has redirected the rest of its
answers from the blocks to a scrap buffer. If a lane fails, the peer is lost: all its operations end, not ok.
"""

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from baton.core.errors import TransferError
from baton.core.ids import Address
from baton.transport.base.completions import CompletionQueue
from baton.transport.base.interface import OpId
from baton.transport.base.iovec import Scratch, iovec_array
from baton.transport.base.peers import ActivePeer, Reading
from baton.transport.base.spans import Copies
from baton.transport.base.stream import Ghash, Message, Outcome, Stream
from baton.transport.base.threads import join_all, start_owned_thread
from baton.transport.tcp.sealing import TAG_BYTES, Opening
from baton.transport.tcp.wire import (
    ANSWER,
    COPIES_MAX,
    DATA,
    ENCRYPTED_BYTES_MAX,
    FAIL,
    READ,
    REQUEST,
    Session,
    TcpEndpoint,
)

logger = logging.getLogger(__name__)

REQUESTS_PER_LANE = 2  # One being answered, one waiting at the owner.
CHUNK_BYTES_MIN = 256 << 10  # A smaller request costs more than a second lane gains.
STALL_S = 10.0  # An owner that takes longer for one answer of at most 16 MiB counts as gone.
CLOSE_TIMEOUT_S = 10.0
_SCRAP_BYTES = 256 << 10


def chunk_bytes_for(total_bytes: int, num_lanes: int, bytes_max: int) -> int:
    """Size of a request, of which all lanes get the same number."""
    share = -(-total_bytes // num_lanes)
    num_requests = max(1, -(-share // bytes_max))
    return max(-(-share // num_requests), CHUNK_BYTES_MIN)


@dataclass(eq=False)
class _Chunk:
    """One request in flight on a lane."""

    number: int  # Number of the request.
    reading: Reading[Copies]
    copies: Copies
    header: Scratch
    tag: Scratch
    target: Message  # Message for the whole answer, from header to tag.
    opening: Opening
    is_second_try: bool = False
    discarded: bool = False

    @property
    def nbytes(self) -> int:
        return self.copies.total_bytes

    def discard(self, scrap: Scratch) -> None:
        """Redirects the rest of this answer to the scrap buffer, which is overwritten repeatedly."""
        # The header is still checked: it belongs to the framing, not to the blocks.
        done = self.target.done_bytes
        header_rest = max(0, ANSWER.size - done)
        lengths = [header_rest] if header_rest else []
        rest = self.target.rest_bytes - header_rest
        full, tail = divmod(rest, scrap.nbytes)
        lengths += [scrap.nbytes] * full + ([tail] if tail else [])
        addresses = [scrap.address] * len(lengths)
        if header_rest:
            addresses[0] = self.header.address + done
        self.target = Message(
            np.array(addresses, dtype=np.int64), np.array(lengths, dtype=np.int64), done_before=done
        )
        self.discarded = True

    @property
    def ghash(self) -> Ghash | None:
        return None if self.discarded else self.opening.ghash


class TcpPeer(ActivePeer):
    def __init__(
        self,
        address: Address,
        endpoint: TcpEndpoint,
        lanes: Sequence[tuple[socket.socket, Session]],
        completions: CompletionQueue,
        thread_cpus: Collection[int] | None,
    ) -> None:
        self.address = address
        self.endpoint = endpoint
        self.lost: str | None = None
        self.lock = threading.Lock()
        self._completions = completions
        self._queue: deque[Reading[Copies]] = deque()
        self._by_op: dict[OpId, Reading[Copies]] = {}
        self._request_bytes_max = min(session.request_bytes_max for _, session in lanes)
        self._lanes: list[_Lane] = []
        self._threads: list[threading.Thread] = []
        try:
            for sock, session in lanes:
                self._lanes.append(_Lane(self, sock, session))
            for number, lane in enumerate(self._lanes):
                thread = start_owned_thread(
                    f"baton-tcp-{number}",
                    lane.run,
                    on_death=lambda error: self.lose(f"a lane's thread died: {error!r}"),
                    cpus=thread_cpus,
                )
                self._threads.append(thread)
        except BaseException:  # No descriptor, or no thread, is left.
            self.close("not all lanes could be started")
            raise

    def post(self, copies: Copies) -> OpId:
        """Raises TransferError, with nothing posted, if the peer is lost."""
        chunk_bytes = chunk_bytes_for(copies.total_bytes, len(self._lanes), self._request_bytes_max)
        with self.lock:
            if self.lost is not None:
                raise TransferError(f"cannot read from {self.address.engine_id}: {self.lost}")
            op = self._completions.open()
            if len(copies):
                chunks = copies.batches(count_max=COPIES_MAX, bytes_max=chunk_bytes)
                reading = Reading(op, chunks)
                self._by_op[op] = reading
                self._queue.append(reading)
                self._wake_lanes()
                return op
        self._completions.finish(op, nbytes=0)
        return op

    def cancel(self, op: OpId) -> None:
        with self.lock:
            reading = self._by_op.get(op)
            if reading is None:
                return
            reading.error = "cancelled"
            self._unqueue(reading)
            over = self._pop_if_over(reading)
            self._wake_lanes()
        self._finish(over)

    def lose(self, reason: str) -> None:
        """Ends everything with this peer. Chunks that lanes hold end with their lanes."""
        with self.lock:
            if self.lost is not None:
                return
            self.lost = reason
            self._queue.clear()
            over: list[Reading[Copies]] = []
            for reading in list(self._by_op.values()):
                reading.error = reading.error or reason
                over += self._pop_if_over(reading)
            self._wake_lanes()
        self._finish(over)

    def close(self, reason: str) -> None:
        self.lose(reason)
        join_all(self._threads, CLOSE_TIMEOUT_S)
        with self.lock:
            for lane in self._lanes:
                lane.close_wake_fd()

    # --- For the lanes.

    def take_nowait(self) -> tuple[Reading[Copies], Copies] | None:
        """The next chunk to request; operations take turns."""
        over: list[Reading[Copies]] = []
        taken = None
        with self.lock:
            while taken is None and self._queue:
                reading = self._queue.popleft()
                chunk = next(reading.batches, None)
                if chunk is None:
                    reading.all_taken = True
                    over += self._pop_if_over(reading)
                else:
                    reading.under_way += 1
                    self._queue.append(reading)
                    taken = (reading, chunk)
        self._finish(over)
        return taken

    def return_chunk(self, reading: Reading[Copies], nbytes: int, error: str | None = None) -> None:
        """A lane is done with a chunk and touches no memory for it any more."""
        with self.lock:
            reading.under_way -= 1
            reading.copied_bytes += nbytes
            if error is not None:
                reading.error = reading.error or error
                self._unqueue(reading)
            over = self._pop_if_over(reading)
        self._finish(over)

    def _unqueue(self, reading: Reading[Copies]) -> None:
        with contextlib.suppress(ValueError):  # A lane may have taken its last chunk.
            self._queue.remove(reading)

    def _pop_if_over(self, reading: Reading[Copies]) -> list[Reading[Copies]]:
        if not reading.is_over or reading.op not in self._by_op:
            return []
        return [self._by_op.pop(reading.op)]

    def _finish(self, over: list[Reading[Copies]]) -> None:
        """Call it without the lock: the completion hook is foreign code."""
        for reading in over:
            self._completions.finish(reading.op, nbytes=reading.copied_bytes, error=reading.error)

    def _wake_lanes(self) -> None:
        for lane in self._lanes:
            lane.wake()


class _Lane:
    """One connection. All methods but `wake` and `close_wake_fd` run on its thread."""

    def __init__(self, peer: TcpPeer, sock: socket.socket, session: Session) -> None:
        self._peer = peer
        self._sock = sock
        self._session = session
        # Holds the one answer that is being received.
        self._ciphertext = np.empty(ENCRYPTED_BYTES_MAX if session.answers.encrypts else 0, dtype=np.uint8)
        self._sock.setblocking(False)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stream = Stream(sock, self._wake_fd)
        self._poll = select.poll()  # While no answer is due.
        self._poll.register(sock, select.POLLIN)
        self._poll.register(self._wake_fd, select.POLLIN)
        self._under_way: deque[_Chunk] = deque()
        self._unsent = b""
        self._requests = 0
        self._scrap: Scratch | None = None
        self._progress_at = time.monotonic()

    def wake(self) -> None:
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def close_wake_fd(self) -> None:
        if self._wake_fd >= 0:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def run(self) -> None:
        reason = "the lane ended"
        try:
            while self._peer.lost is None:
                self._request_more()
                self._discard_cancelled()
                if self._under_way:
                    self._receive()
                else:
                    self._wait()
        except (OSError, TransferError) as error:
            reason = f"connection to {self._peer.address.engine_id} lost: {error}"
        finally:
            self._sock.close()
            self._peer.lose(reason)
            for chunk in self._under_way:
                if not chunk.discarded:
                    self._peer.return_chunk(chunk.reading, 0, reason)
            self._under_way.clear()

    def _request_more(self) -> None:
        while len(self._under_way) < REQUESTS_PER_LANE and (taken := self._peer.take_nowait()):
            self._request(*taken)
        if self._unsent:
            with contextlib.suppress(BlockingIOError):
                self._unsent = self._unsent[self._sock.send(self._unsent) :]

    def _request(self, reading: Reading[Copies], copies: Copies, *, is_second_try: bool = False) -> None:
        if not self._under_way:
            self._progress_at = time.monotonic()
        self._requests += 1
        number = self._requests
        header, tag = Scratch.of(ANSWER.size), Scratch.of(TAG_BYTES)
        addresses, nbytes = copies.local, copies.nbytes
        if self._session.answers.encrypts:
            addresses = np.array([self._ciphertext.ctypes.data])
            nbytes = np.array([copies.total_bytes])
        target = Message(
            np.concatenate(([header.address], addresses, [tag.address])),
            np.concatenate(([ANSWER.size], nbytes, [TAG_BYTES])),
        )
        wanted = iovec_array(copies.remote, copies.nbytes).astype("<i8", copy=False)
        request = REQUEST.pack(READ, len(copies), number) + wanted.tobytes()
        self._unsent += request + self._session.requests.seal(number, request).tag()
        opening = self._session.answers.open(number, ANSWER.pack(DATA, 0, number) + request)
        self._under_way.append(
            _Chunk(number, reading, copies, header, tag, target, opening, is_second_try=is_second_try)
        )

    def _discard_cancelled(self) -> None:
        for chunk in self._under_way:
            if chunk.reading.error is not None and not chunk.discarded:
                self._scrap = self._scrap or Scratch.of(_SCRAP_BYTES)
                chunk.discard(self._scrap)
                self._peer.return_chunk(chunk.reading, 0)

    def _receive(self) -> None:
        """Receives the next answer, or until there is other work.

        Raises TransferError if the owner is gone or does not answer.
        """
        chunk = self._under_way[0]
        # A deadline for the whole answer, because the owner may send too slowly.
        outcome = self._stream.receive(
            chunk.target, chunk.ghash, self._progress_at + STALL_S, wants_to_send=bool(self._unsent)
        )
        if chunk.target.done_bytes >= ANSWER.size:
            header = chunk.header.read()
            if header != ANSWER.pack(DATA, 0, chunk.number):
                raise TransferError(
                    "the owner refused the request"
                    if header.startswith(FAIL)
                    else "an answer to another request than the next"
                )
        match outcome:
            case Outcome.WHOLE:
                self._under_way.popleft()
                self._progress_at = time.monotonic()
                if not chunk.discarded:
                    self._check_and_return(chunk)
            case Outcome.WOKEN:
                self._clear_wake()
            case Outcome.CLOSED:
                raise TransferError("the other end closed it")
            case Outcome.TIMED_OUT:
                raise TransferError(f"no answer was complete within {STALL_S:g} s")

    def _check_and_return(self, chunk: _Chunk) -> None:
        """Accepts the chunk if its tag is right; otherwise requests it again, once."""
        if chunk.opening.ghash is None:  # Otherwise the bytes were added as they were received.
            chunk.opening.add(chunk.copies.local, chunk.copies.nbytes, self._ciphertext.data)
        if chunk.opening.is_genuine(chunk.tag.read()):
            self._peer.return_chunk(chunk.reading, chunk.nbytes)
            return
        if chunk.is_second_try:
            self._peer.return_chunk(
                chunk.reading, 0, "the tag of an answer was wrong, also at the second try"
            )
        else:
            logger.warning(
                "the tag of an answer of %s was wrong; requesting it again", self._peer.address.engine_id
            )
            self._request(chunk.reading, chunk.copies, is_second_try=True)

    def _wait(self) -> None:
        """Sleeps until there is work. Raises TransferError if the owner is gone."""
        ready = dict(self._poll.poll())
        if self._wake_fd in ready:
            self._clear_wake()
        if self._sock.fileno() in ready:
            # No answer is due: the owner has closed the connection, or broken the protocol.
            received = self._sock.recv(1)
            raise TransferError("the other end closed it" if not received else "bytes that answer no request")

    def _clear_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
