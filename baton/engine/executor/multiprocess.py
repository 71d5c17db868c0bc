"""Executor with one process per tensor-parallel rank on this host, connected by socket pairs.

    core --RankStep (pickled once, sent to all)--> rank 0, rank 1, ...
    core <--ModelRunnerOutput------------------------ each; rank 0's has the tokens

A rank that ends for any reason closes its socket. The core notices this at once, in a step or idle, ends the
other ranks (which may be stuck in a collective that can never complete) and fails with the reason
(`RankFailures`).
"""

import os
import pickle
import select
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from baton.core.config import EngineConfig
from baton.core.errors import BatonError
from baton.engine.executor import ExecutorDied
from baton.engine.executor.answers import START_TIMEOUT_S, STOP_TIMEOUT_S, RemoteExecutor
from baton.engine.executor.rank_messages import (
    REPORT_WAIT_S,
    RankAssignment,
    RankFailed,
    RankReady,
    RankStop,
    packed,
    rank_environment,
)
from baton.engine.process.channel import Channel, ChannelClosed
from baton.engine.process.child import Child

BROKEN_STOP_TIMEOUT_S = 2.0  # Short: once a rank has ended, the others are stuck or about to end.


class MultiprocessExecutor(RemoteExecutor):
    """Runs each rank in a child process."""

    def __init__(self, config: EngineConfig, connector_factory: str | None) -> None:
        super().__init__(config)
        self._ranks: list[Child] = []
        self._channels: list[Channel] = []
        self._received: list[deque[Any]] = [deque() for _ in range(self._num_ranks)]  # Answers, by rank.
        try:
            with tempfile.TemporaryDirectory(prefix="baton-ranks-") as folder:
                for rank in range(self._num_ranks):
                    self._spawn(rank, config)
                    assignment = RankAssignment(
                        config, connector_factory, rank, os.path.join(folder, "store")
                    )
                    self._channels[rank].send_nowait(packed(assignment))
                ready: list[RankReady] = self._gather(None, START_TIMEOUT_S)
        except BaseException:
            self._kill()
            raise
        self._set_ready(ready)

    def _spawn(self, rank: int, config: EngineConfig) -> None:
        child = Child.spawn(
            "baton.engine.executor.worker:worker_main",
            name=f"baton-rank-{rank}",
            grace_s=0.0,
            environment=rank_environment(config),
            dies_with_thread=True,  # The engine core steps in its main thread.
        )
        self._ranks.append(child)
        self._channels.append(Channel(child.socket))

    def _send(self, payload: bytes) -> None:
        for channel in self._channels:
            try:
                channel.send_nowait(payload)
            except ChannelClosed as error:
                raise self._death() from error

    def _has_answers(self, sent: None) -> bool:
        self._receive(0.0)
        return all(self._received)

    def _gather(self, sent: None, timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        while not all(self._received):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self._is_broken = True
                missing = [rank for rank, answers in enumerate(self._received) if not answers]
                raise ExecutorDied(f"ranks {missing} did not answer within {timeout_s:.0f} s")
            self._receive(left_s)
        return [answers.popleft() for answers in self._received]

    def _receive(self, timeout_s: float) -> None:
        """Receive what has arrived, or arrives first within `timeout_s`. Raises if a rank has failed."""
        self._poll_ranks(timeout_s)
        if self._failures:
            raise self._death()

    def _poll_ranks(self, timeout_s: float) -> None:
        rank_of = {
            channel.fileno(): rank
            for rank, channel in enumerate(self._channels)
            if not self._failures.has_ended(rank)
        }
        poll = select.poll()
        for fd, rank in rank_of.items():
            poll.register(fd, select.POLLIN | (select.POLLOUT if self._channels[rank].has_unsent else 0))
        for fd, event in poll.poll(timeout_s * 1e3):
            self._exchange(rank_of[fd], event)

    def _exchange(self, rank: int, event: int) -> None:
        """Receive and send, as far as `event` allows."""
        channel = self._channels[rank]
        try:
            if event & ~select.POLLOUT:  # First, because a rank that closed its end may have sent the reason.
                for payload in channel.receive_nowait():
                    message = pickle.loads(payload)
                    if isinstance(message, RankFailed):
                        self._failures.take_failure(rank, message)
                    else:
                        self._received[rank].append(message)
            if event & select.POLLOUT:
                channel.flush_nowait()
        except ChannelClosed:
            self._failures.take_end(rank, self._ranks[rank].describe_exit())

    def _death(self) -> BatonError:
        """The error for a failed rank. Waits up to REPORT_WAIT_S for reports of the others."""
        self._is_broken = True
        deadline = time.monotonic() + REPORT_WAIT_S
        while not self._failures.is_explained and (left_s := deadline - time.monotonic()) > 0:
            self._poll_ranks(left_s)
        return self._failures.error()

    def death_filenos(self) -> Sequence[int]:
        return [channel.fileno() for channel in self._channels]

    def check_alive(self) -> None:
        poll = select.poll()
        for channel in self._channels:
            poll.register(channel, getattr(select, "POLLRDHUP", 0))
        if poll.poll(0):
            raise self._death()

    def shutdown(self) -> None:
        deadline = time.monotonic() + (BROKEN_STOP_TIMEOUT_S if self._is_broken else STOP_TIMEOUT_S)
        stop = packed(RankStop())
        for child, channel in zip(self._ranks, self._channels, strict=True):
            if child.is_alive:
                try:
                    channel.send_nowait(stop)
                    child.resume()
                except ChannelClosed:
                    child.kill()  # The rank closed its end of the connection and did not exit.
        for child in self._ranks:
            child.stop(max(0.0, deadline - time.monotonic()))
        self._ranks, self._channels = [], []

    def _kill(self) -> None:
        for child in self._ranks:
            child.kill()
        self._ranks, self._channels = [], []
