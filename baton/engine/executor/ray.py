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
import secrets
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Container, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from baton.core.errors import BatonError, ConfigError
from baton.engine.executor import Executor, ExecutorDied
from baton.engine.executor.answers import RankAnswers, StepFuture
from baton.engine.executor.last_words import LISTEN_S, LastWords
from baton.engine.executor.worker import (
    Rank,
    RankAssignment,
    RankCapture,
    RankFailed,
    RankReady,
    RankStep,
    failure_of,
)

if TYPE_CHECKING:
    from baton.contract import KVConnectorHandshakeMetadata, KVConnectorMetadata
    from baton.core.config import EngineConfig
    from baton.engine.step import ModelRunnerOutput, SchedulerOutput

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0  # Reading the weights of a large model from a slow disk.
STOP_TIMEOUT_S = 10.0  # For worker halves to end what they own.
WATCH_S = 1.0  # The watching thread looks up as often, to see whether it is to end.
WATCH_END_S = 10.0
READY_S = 10.0  # To fetch what is said to be ready.
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

# Ray reads these when it is imported or started. Ours give way to what the user has set, loopback excepted.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # "0", on any system: all that Ray binds is 127.0.0.1.


class RankActor:
    """Runs in a process of Ray's. Answers what `worker.Rank` answers, or RankFailed."""

    def __init__(self, path: list[str], environment: dict[str, str], log_level: int) -> None:
        """`path`: where our process finds modules; Ray's finds this one."""
        sys.path += [entry for entry in path if entry not in sys.path]
        os.environ.update(environment)
        logging.basicConfig(level=log_level)
        self._rank = Rank()

    def answer(self, message: Any) -> Any:
        try:
            return self._rank.answer(message)
        except Exception as error:  # Text, since not every exception can be pickled.
            return failure_of(error)

    def close(self) -> None:
        self._rank.close()

    def watch(self) -> None:
        """Ends with the process, and so tells of its end."""
        threading.Event().wait()


class RayExecutor(Executor):
    def __init__(self, config: EngineConfig, connector_factory: str | None) -> None:
        self._size = config.parallel_config.tensor_parallel_size
        self._step_timeout_s = config.step_timeout_s
        self._answers = RankAnswers(self._size)
        self._last_words = LastWords(self._size)
        self._in_flight: deque[tuple[StepFuture, list[Any]]] = deque()
        self._actors: list[Any] = []
        self._is_broken = False
        self._is_shut_down = False
        self._watch: _Watch | None = None
        self._ray = import_ray()
        self._uses_ours = _OURS.enter(self._ray, config)
        try:
            with tempfile.TemporaryDirectory(prefix="baton-ranks-") as folder:
                ready = self._start_ranks(config, connector_factory, os.path.join(folder, "store"))
        except BaseException:
            self._is_broken = True
            self.shutdown()
            raise
        self._any_awaits_capture = any(answer.awaits_capture for answer in ready)
        self._handshake = {
            rank: answer.handshake_metadata
            for rank, answer in enumerate(ready)
            if answer.handshake_metadata is not None
        }

    def _start_ranks(
        self, config: EngineConfig, connector_factory: str | None, store_path: str
    ) -> list[RankReady]:
        environment = {
            "OMP_NUM_THREADS": str(config.device_config.num_threads),
            "GLOO_SOCKET_IFNAME": LOOPBACK,
            "NCCL_SOCKET_IFNAME": LOOPBACK,
        }
        # Ranks choose their GPUs by rank, as they do without Ray; so Ray is not to hide any. In a Ray of ours
        # there is nobody to share processors with; to a user's, a rank is one processor's work.
        num_cpus = 0 if self._uses_ours else 1
        actor = self._ray.remote(num_cpus=num_cpus, max_restarts=0, concurrency_groups={"watch": 1})(
            RankActor
        )
        log_level = logging.getLogger().getEffectiveLevel()
        path = [os.path.abspath(entry) for entry in sys.path]
        self._actors = [actor.remote(path, environment, log_level) for _ in range(self._size)]
        self._watch = _Watch(
            self._ray, [a.watch.options(concurrency_group="watch").remote() for a in self._actors]
        )
        assignments = [
            RankAssignment(config, connector_factory, rank, store_path) for rank in range(self._size)
        ]
        tasks = [a.answer.remote(assigned) for a, assigned in zip(self._actors, assignments, strict=True)]
        return self._gather(tasks, START_TIMEOUT_S)

    def submit(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        tasks = self._send(RankStep(scheduler_output, self._answers.take_untold()))
        future = StepFuture(self._drive)
        self._in_flight.append((future, tasks))
        return future

    def _send(self, message: RankStep | RankCapture) -> list[Any]:
        shared = self._ray.put(message)  # Serialised once for all ranks.
        return [actor.answer.remote(shared) for actor in self._actors]

    def _drive(self, future: StepFuture, is_waiting: bool) -> None:
        while self._in_flight and self._in_flight[0][0] is not future:
            self._finish_oldest()
        tasks = self._in_flight[0][1]
        if is_waiting or len(self._ray.wait(tasks, num_returns=len(tasks), timeout=0)[0]) == len(tasks):
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        future, tasks = self._in_flight.popleft()
        try:
            future.set_result(self._answers.combine(self._gather(tasks, self._step_timeout_s)))
        except BatonError as error:
            future.set_exception(error)
            raise

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
            answer = self._ray.get(task, timeout=READY_S)
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

    def handshake_metadata(self) -> dict[int, KVConnectorHandshakeMetadata]:
        return self._handshake

    @property
    def awaits_capture(self) -> bool:
        return self._any_awaits_capture

    def capture(self, metadata: KVConnectorMetadata) -> None:
        self._gather(self._send(RankCapture(metadata)), START_TIMEOUT_S)

    def expect_reports(self, expected_count: int | None) -> None:
        self._answers.expect(expected_count)

    def forget_all_but(self, request_ids: Container[str]) -> None:
        self._answers.forget_all_but(request_ids)

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
        if self._is_shut_down:
            return
        self._is_shut_down = True
        actors, self._actors = self._actors, []
        if self._watch is not None:
            self._watch.close()
        if not self._is_broken and actors:
            tasks = [actor.close.remote() for actor in actors]
            if self._ray.wait(tasks, num_returns=len(tasks), timeout=STOP_TIMEOUT_S)[1]:
                logger.warning("ranks did not end within %.0f s; killing them", STOP_TIMEOUT_S)
        for actor in actors:
            self._ray.kill(actor)
        if self._uses_ours:
            _OURS.leave(self._ray)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class _OurRay:
    """The Ray that this process's executors have started and share. Ray knows one to a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0

    def enter(self, ray: Any, config: EngineConfig) -> bool:
        """Starts it where there is none; False: there is one, and it is somebody else's."""
        with self._lock:
            if self._num_users == 0:
                if ray.is_initialized():
                    return False
                if os.environ.get(_LOOPBACK_ONLY) != "0":
                    raise ConfigError(
                        "Ray was imported before this engine could tell it to stay on loopback: call "
                        f"ray.init yourself, or set {_LOOPBACK_ONLY}=0 before the import",
                        field="parallel_config.executor",
                    )
                on_gpu = config.device_config.device == "cuda"
                size = config.parallel_config.tensor_parallel_size
                ray.init(
                    address="local",
                    num_cpus=size,
                    num_gpus=size if on_gpu else 0,
                    include_dashboard=False,
                    configure_logging=False,  # The logging of this process is ours.
                )
            self._num_users += 1
            return True

    def leave(self, ray: Any) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                ray.shutdown()


_OURS = _OurRay()


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


def import_ray() -> Any:
    """Raises ConfigError without the extra."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if "ray" not in sys.modules:
        os.environ[_LOOPBACK_ONLY] = "0"
    # Whoever else is on this host cannot join; without it Ray keeps one in the user's home.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            f"executor 'ray' needs Ray: pip install 'kv-baton[ray]' ({error})",
            field="parallel_config.executor",
        ) from error
    return ray
