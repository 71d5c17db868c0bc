"""One Ray actor per tensor-parallel rank (`pip install kv-baton[ray]`).

    core --RankStep--> rank 0's actor, rank 1's, ...       an actor task each; actors run theirs in order
    core <--ModelRunnerOutput-- each                        awaited with `ray.wait`, never without a bound

Ray is started here, on this host and on loopback only, and ends with the last executor of this process,
unless the process has called `ray.init` itself: then that Ray is used and left as it is.

A rank that dies fails its tasks, which whoever waits for a step hears at once. For an idle engine each actor
also has a task that never ends; a thread waits for it and makes `death_filenos` readable. Ray itself hears of
its worker's end by their broken connection, so both take milliseconds. Which rank is to blame: `last_words`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from baton.core.errors import BatonError
from baton.engine.executor import ExecutorDied
from baton.engine.executor.answers import START_TIMEOUT_S, STOP_TIMEOUT_S, RemoteExecutor
from baton.engine.executor.last_words import LISTEN_S
from baton.engine.executor.packing import packed
from baton.engine.executor.rank_messages import (
    RankAssignment,
    RankFailed,
    RankReady,
    failure_of,
)
from baton.engine.executor.ray_actors import RankActors, RankProcess

if TYPE_CHECKING:
    from baton.core.config import EngineConfig

logger = logging.getLogger(__name__)

WATCH_S = 1.0  # The watching thread looks up as often, to see whether it is to end.
WATCH_END_S = 10.0
READY_S = 10.0  # To fetch what is said to be ready.


class RayExecutor(RemoteExecutor):
    def __init__(
        self, config: EngineConfig, connector_factory: str | None, actors: RankActors | None = None
    ) -> None:
        """`actors`: the caller's to close, and behind this executor there for the next. Without: its own."""
        super().__init__(config)
        self._owns_actors = actors is None
        self._actors = actors if actors is not None else RankActors(config)
        self._ray = self._actors.ray
        self._ranks: list[RankProcess] = []
        self._watch: _Watch | None = None
        try:
            with tempfile.TemporaryDirectory(prefix="baton-ranks-") as folder:
                ready = self._start_ranks(config, connector_factory, os.path.join(folder, "store"))
        except BaseException:
            self._is_broken = True
            self.shutdown()
            raise
        self._set_ready(ready)

    def _start_ranks(
        self, config: EngineConfig, connector_factory: str | None, store_path: str
    ) -> list[RankReady]:
        self._ranks = self._actors.take(self._size)
        self._watch = _Watch(self._ray, [process.end for process in self._ranks])
        assignments = [
            RankAssignment(config, connector_factory, rank, store_path) for rank in range(self._size)
        ]
        tasks = [
            process.actor.answer.remote(packed(assigned))
            for process, assigned in zip(self._ranks, assignments, strict=True)
        ]
        return self._gather(tasks, START_TIMEOUT_S)

    def _send(self, payload: bytes) -> list[Any]:
        shared = self._ray.put(payload)  # Once for all ranks.
        return [process.actor.answer.remote(shared) for process in self._ranks]

    def _has_answers(self, tasks: list[Any]) -> bool:
        return len(self._ray.wait(tasks, num_returns=len(tasks), timeout=0)[0]) == len(tasks)

    def _gather(self, tasks: list[Any], timeout_s: float) -> list[Any]:
        """Each rank's answer. A rank whose task fails is heard although others still run theirs."""
        deadline = time.monotonic() + timeout_s
        answers: dict[int, Any] = {}
        missing = list(tasks)
        while missing:
            ready, missing = self._ray.wait(missing, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self._is_broken = True
                ranks = sorted(tasks.index(task) for task in missing)
                raise ExecutorDied(f"ranks {ranks} did not answer within {timeout_s:.0f} s")
            rank = tasks.index(ready[0])
            answers[rank] = self._hear(rank, ready[0])
            if self._last_words:
                raise self._death({task: tasks.index(task) for task in missing})
        return [answers[rank] for rank in range(self._size)]

    def _hear(self, rank: int, task: Any) -> Any:
        """What a task that has ended says; of one that failed, for `_death`."""
        try:
            answer = pickle.loads(self._ray.get(task, timeout=READY_S))
        except self._ray.exceptions.RayActorError as error:
            self._last_words.take_end(rank, _first_line(error))
            return None
        except self._ray.exceptions.RayError as error:
            answer = failure_of(error)
        if isinstance(answer, RankFailed):
            self._last_words.take_failure(rank, answer)
        return answer

    def _death(self, rank_of: dict[Any, int]) -> BatonError:
        """A rank has ended or failed. Waits for what the others have to say of it, for a moment.

        `rank_of`: tasks that have not ended.
        """
        self._is_broken = True
        deadline = time.monotonic() + LISTEN_S
        if self._watch is not None:  # A task that never ends, of each rank.
            rank_of |= {task: rank for rank, task in enumerate(self._watch.tasks)}
        while rank_of and not self._last_words.say_why and (left_s := deadline - time.monotonic()) > 0:
            for task in self._ray.wait(list(rank_of), timeout=left_s)[0]:
                self._hear(rank_of.pop(task), task)
        return self._last_words.error()

    def death_filenos(self) -> Sequence[int]:
        return [] if self._watch is None else [self._watch.fileno()]

    def check_alive(self) -> None:
        if self._watch is None or not self._watch.has_ended:
            return
        if not self._watch.ended:
            self._is_broken = True
            raise ExecutorDied("nobody hears any more whether ranks live: see the log")
        for task in self._watch.ended:
            self._hear(self._watch.tasks.index(task), task)
        raise self._death({})

    def shutdown(self) -> None:
        ranks, self._ranks = self._ranks, []
        if self._watch is not None:
            self._watch.close()
        if self._has_closed(ranks) and not self._owns_actors:
            self._actors.give_back(ranks)
        else:
            self._actors.kill(ranks)
        if self._owns_actors:
            self._actors.close()

    def _has_closed(self, ranks: list[RankProcess]) -> bool:
        """All of them, in time. A rank whose peer is gone may hang, and is not asked."""
        if self._is_broken or not ranks:
            return False
        tasks = [process.actor.close.remote() for process in ranks]
        ended, late = self._ray.wait(tasks, num_returns=len(tasks), timeout=STOP_TIMEOUT_S)
        if late:
            logger.warning("ranks did not end within %.0f s; killing them", STOP_TIMEOUT_S)
            return False
        try:
            self._ray.get(ended, timeout=READY_S)
        except self._ray.exceptions.RayError as error:
            logger.warning("a rank did not end in order: %s", error)
            return False
        return True


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class _Watch:
    """Hears of the first actor that ends, in a thread of its own; a descriptor tells whoever polls."""

    def __init__(self, ray: Any, tasks: list[Any]) -> None:
        """`tasks`: of each rank one that never ends, but with its actor."""
        self.tasks = tasks
        self.ended: list[Any] = []
        self.has_ended = False  # Also when watching failed.
        self._ray = ray
        self._closing = threading.Event()
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="ray-watch", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._read

    def _run(self) -> None:
        try:
            while not self.ended and not self._closing.is_set():
                self.ended, _ = self._ray.wait(self.tasks, timeout=WATCH_S)
        except Exception:  # Whoever polls has to hear that nobody watches any more.
            logger.exception("Ray cannot be asked whether ranks live")
        if self._closing.is_set():
            return
        self.has_ended = True
        with contextlib.suppress(OSError):
            os.write(self._write, b"x")

    def close(self) -> None:
        """Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join(WATCH_END_S)
        os.close(self._read)
        os.close(self._write)
