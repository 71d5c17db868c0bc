"""Executor with one Ray actor per tensor-parallel rank (`pip install kv-baton[ray]`).

    core --RankStep--> rank 0's actor, rank 1's, ...       an actor task per rank; actors run them in order
    core <--ModelRunnerOutput-- each                        awaited with `ray.wait`, always with a bound

The executor starts Ray on this host, on loopback only, and stops it with the last executor of this process.
If the process has called `ray.init` itself, that Ray is used and not stopped.

When a rank dies its tasks fail, so a waiting step fails at once. Each actor also has a task that never ends,
for an idle engine. A thread waits for these tasks and makes `death_filenos` readable. Ray notices the end of
a worker by its broken connection, so both take milliseconds. `RankFailures` finds the cause.
"""

import contextlib
import logging
import os
import pickle
import tempfile
import threading
import time
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
    failure_of,
    packed,
)
from baton.engine.executor.ray_actors import RankActors, RankProcess

logger = logging.getLogger(__name__)

WATCH_S = 1.0  # Interval at which the watching thread checks whether it has to end.
WATCH_END_S = 10.0
READY_S = 10.0  # Time to fetch a result that Ray reports as ready.


class RayExecutor(RemoteExecutor):
    """Runs each rank in a Ray actor."""

    def __init__(
        self, config: EngineConfig, connector_factory: str | None, actors: RankActors | None = None
    ) -> None:
        """`actors`: owned by the caller, for several executors. None: the executor owns its actors."""
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
        self._ranks = self._actors.take(self._num_ranks)
        self._watch = _Watch(self._ray, [process.end for process in self._ranks])
        assignments = [
            RankAssignment(config, connector_factory, rank, store_path) for rank in range(self._num_ranks)
        ]
        tasks = [
            process.actor.answer.remote(packed(assigned))
            for process, assigned in zip(self._ranks, assignments, strict=True)
        ]
        return self._gather(tasks, START_TIMEOUT_S)

    def _send(self, payload: bytes) -> list[Any]:
        shared = self._ray.put(payload)  # Stored once for all ranks.
        return [process.actor.answer.remote(shared) for process in self._ranks]

    def _has_answers(self, tasks: list[Any]) -> bool:
        return len(self._ray.wait(tasks, num_returns=len(tasks), timeout=0)[0]) == len(tasks)

    def _gather(self, tasks: list[Any], timeout_s: float) -> list[Any]:
        """Each rank's answer. Raises as soon as the task of one rank fails."""
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
            answers[rank] = self._collect(rank, ready[0])
            if self._failures:
                raise self._death({task: tasks.index(task) for task in missing})
        return [answers[rank] for rank in range(self._num_ranks)]

    def _collect(self, rank: int, task: Any) -> Any:
        """The result of an ended task. A failure is noted for `_death`."""
        try:
            answer = pickle.loads(self._ray.get(task, timeout=READY_S))
        except self._ray.exceptions.RayActorError as error:
            self._failures.take_end(rank, _first_line(error))
            return None
        except self._ray.exceptions.RayError as error:
            answer = failure_of(error)
        if isinstance(answer, RankFailed):
            self._failures.take_failure(rank, answer)
        return answer

    def _death(self, rank_of: dict[Any, int]) -> BatonError:
        """The error for a failed rank. Waits up to REPORT_WAIT_S for reports of the others.

        `rank_of`: the ranks of the tasks that have not ended.
        """
        self._is_broken = True
        deadline = time.monotonic() + REPORT_WAIT_S
        if self._watch is not None:  # The task of each rank that never ends.
            rank_of |= {task: rank for rank, task in enumerate(self._watch.tasks)}
        while rank_of and not self._failures.is_explained and (left_s := deadline - time.monotonic()) > 0:
            for task in self._ray.wait(list(rank_of), timeout=left_s)[0]:
                self._collect(rank_of.pop(task), task)
        return self._failures.error()

    def death_filenos(self) -> Sequence[int]:
        return [] if self._watch is None else [self._watch.fileno()]

    def check_alive(self) -> None:
        if self._watch is None or not self._watch.has_ended:
            return
        if not self._watch.ended:
            self._is_broken = True
            raise ExecutorDied("the watch over the ranks has failed; see the log")
        for task in self._watch.ended:
            self._collect(self._watch.tasks.index(task), task)
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
        """Close all ranks. False if one failed or was late, or if a rank has died: its peers may hang."""
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
            logger.warning("a rank failed while it closed: %s", error)
            return False
        return True


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class _Watch:
    """Thread that waits for the first actor to end, and then makes a descriptor readable."""

    def __init__(self, ray: Any, tasks: list[Any]) -> None:
        """`tasks`: one task per rank that ends only with its actor."""
        self.tasks = tasks
        self.ended: list[Any] = []
        self.has_ended = False  # True also if the watch has failed.
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
        except Exception:  # The executor must notice that the watch has failed.
            logger.exception("the watch over the ranks has failed")
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
