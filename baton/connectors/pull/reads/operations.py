"""Operations under way on all of a rank's transports, and who looks for their ends.

    the engine's step        collect: polls, never blocks
    a background thread      wait: sleeps until one operation has ended

A completion is handed out once, whoever polls. So while a background thread sleeps on a transport, that one
alone polls it, as soon as it is woken, and deals out what it finds; the step leaves that transport to it.
Everything here is called with the lock, `changed`, held, but for `wait`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from baton.connectors.pull.reads.parts import Read
from baton.transport.base import Completion, OpId, Prepared, Transport

LOOK_AGAIN_S = 0.2  # A waiting thread is woken earlier by what it waits for.


class Spans(NamedTuple):
    """Spans as a transport has prepared them."""

    prepared: Prepared
    num_spans: int


class Operations:
    def __init__(self, transports: Mapping[str, Transport], on_end: Callable[[Read], None]) -> None:
        """`on_end` hears of each read that is not staged when its last operation has ended."""
        self.changed = threading.Condition()
        self._transports = transports
        self._on_end = on_end
        self._running: dict[tuple[str, OpId], tuple[Read, int]] = {}  # With its descriptors.
        self._watched: set[str] = set()  # Transports that a background thread sleeps on.

    def post(
        self,
        read: Read,
        transport: Transport,
        spans: Spans,
        local_blocks: Sequence[int],
        remote_blocks: Sequence[int],
    ) -> OpId:
        """Raises TransferError or PeerError if nothing was posted."""
        op = transport.post_read(spans.prepared, local_blocks, remote_blocks)
        self._running[transport.name, op] = (read, spans.num_spans * len(local_blocks))
        read.num_running += 1
        return op

    @property
    def num_running(self) -> int:
        """That have been posted, and whose end has not been seen."""
        return len(self._running)

    def collect(self) -> None:
        for name, transport in self._transports.items():
            if name not in self._watched:
                self._take(name, transport.poll())

    def cancel(self, is_meant: Callable[[Read], bool]) -> None:
        for (name, op), (read, _) in list(self._running.items()):
            if is_meant(read):
                self._transports[name].cancel(op)

    def cancel_one(self, transport: Transport, op: OpId) -> None:
        if (transport.name, op) in self._running:
            transport.cancel(op)

    def wait(self, transport: Transport, op: OpId) -> None:
        """Without the lock. Returns when the operation has ended, well or not."""
        name = transport.name
        while True:
            with self.changed:
                while (name, op) in self._running and name in self._watched:
                    self.changed.wait(LOOK_AGAIN_S)
                if (name, op) not in self._running:
                    return
                self._watched.add(name)
            try:
                transport.wait_completion(LOOK_AGAIN_S)
            finally:
                with self.changed:
                    self._watched.discard(name)
                    self._take(name, transport.poll())
                    self.changed.notify_all()  # The next one sleeps on it.

    def _take(self, name: str, completions: Sequence[Completion]) -> None:
        for completion in completions:
            read, num_descriptors = self._running.pop((name, completion.op))
            read.num_running -= 1
            read.duration_s = max(read.duration_s, completion.duration_s)
            if not completion.ok:
                read.fail(completion.error or "failed")
            parts = read.parts
            parts.transport = name
            parts.nbytes += completion.nbytes
            parts.num_descriptors += num_descriptors
            if read.is_staged:
                self.changed.notify_all()
            elif read.num_running == 0:
                self._on_end(read)
