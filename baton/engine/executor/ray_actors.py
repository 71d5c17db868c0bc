"""Pool of Ray actors that run ranks, and the Ray that they share.

    take    --> an actor for each rank: an idle one, else a new one
    give_back   a closed rank becomes idle
    close   --> idle actors end; Ray ends with its last user in this process

An engine takes its actors once. A program that starts many engines, such as the conformance kit, keeps the
actors, because starting a process takes long.
"""

import logging
import os
import pickle
import secrets
import signal
import sys
import threading
from typing import Any, NamedTuple

from baton.core.config import EngineConfig
from baton.core.errors import ConfigError
from baton.engine.executor.rank_messages import failure_of, packed_answer, rank_environment
from baton.engine.process.child import signal_parents_death
from baton.engine.runner.malloc_tuning import compute_environment

# Ray reads these when it is imported or started. The user's values take precedence, except for loopback.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray's own control process may die as well. It is on this host and is not restarted, so all waiting steps
    # would hang for Ray's default of a minute.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3",
    # Ray's default of 15 would starve the ranks on a busy host.
    "RAY_worker_niceness": "0",
}
_LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # "0", on any system: Ray binds 127.0.0.1 only.


class RankActor:
    """A rank in a process of Ray.

    Its answers are those of `worker.Rank`, or RankFailed, pickled by `packing`.
    """

    def __init__(self, path: list[str], environment: dict[str, str], log_level: int) -> None:
        """`path`: the module path of the engine's process, which Ray's process needs."""
        sys.path += [entry for entry in path if entry not in sys.path]
        os.environ.update(environment)
        logging.basicConfig(level=log_level)
        # Ray ends workers through their connections, which a stopped process (SIGSTOP) does not notice.
        signal_parents_death(signal.SIGKILL)
        from baton.engine.executor.worker import Rank  # Imported here, because it imports torch.

        self._rank = Rank()

    def answer(self, payload: bytes) -> bytes:
        try:
            return packed_answer(self._rank.answer(pickle.loads(payload)))
        except Exception as error:  # Text, because not every exception can be pickled.
            return packed_answer(failure_of(error))

    def close(self) -> None:
        self._rank.close()

    def watch(self) -> None:
        """Never returns: the task ends with the process."""
        threading.Event().wait()


class RankProcess(NamedTuple):
    """A Ray actor that can run a rank."""

    actor: Any
    end: Any  # A task that ends only with the process.


class RankActors:
    """Pool of actors; see the module."""

    def __init__(self, config: EngineConfig) -> None:
        """`config`: that of any engine that uses the pool; all have the same device and number of threads."""
        self.ray = import_ray()
        self._uses_ours = _OURS.enter(self.ray, config)
        self._environment = {**rank_environment(config), **compute_environment()}
        self._waiting: list[RankProcess] = []
        self._is_closed = False

    def take(self, count: int) -> list[RankProcess]:
        """Actors for `count` ranks. The caller passes them to `give_back` or kills them."""
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return [*taken, *(self._start() for _ in range(count - len(taken)))]

    def _start(self) -> RankProcess:
        # Ranks choose their GPUs by rank, as without Ray, so Ray must not hide GPUs. The Ray that Baton
        # starts has no other users of processors; in a user's Ray a rank takes one processor.
        num_cpus = 0 if self._uses_ours else 1
        kind = self.ray.remote(num_cpus=num_cpus, max_restarts=0, concurrency_groups={"watch": 1})(RankActor)
        path = [os.path.abspath(entry) for entry in sys.path]
        actor = kind.remote(path, self._environment, logging.getLogger().getEffectiveLevel())
        return RankProcess(actor, actor.watch.options(concurrency_group="watch").remote())

    def give_back(self, closed: list[RankProcess]) -> None:
        """Return ranks that were closed and are alive."""
        self._waiting += closed

    def kill(self, processes: list[RankProcess]) -> None:
        for process in processes:
            self.ray.kill(process.actor)

    def close(self) -> None:
        """Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self.kill(self._waiting)
        if self._uses_ours:
            _OURS.leave(self.ray)


class _OurRay:
    """The Ray that this process's executors start and share. A process can have only one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0

    def enter(self, ray: Any, config: EngineConfig) -> bool:
        """Start Ray if needed and register a user. False: the process already had a Ray of its own."""
        with self._lock:
            if self._num_users == 0:
                if ray.is_initialized():
                    return False
                if os.environ.get(_LOOPBACK_ONLY) != "0":
                    raise ConfigError(
                        "Ray was imported before this engine could restrict it to loopback: call "
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
                    configure_logging=False,  # Baton configures the logging of this process.
                )
            self._num_users += 1
            return True

    def leave(self, ray: Any) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                ray.shutdown()


_OURS = _OurRay()


def import_ray() -> Any:
    """Import Ray. Raises ConfigError if it is not installed."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if "ray" not in sys.modules:
        os.environ[_LOOPBACK_ONLY] = "0"
    # Keeps other users of this host out. Without it Ray stores a token in the user's home.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            f"executor 'ray' needs Ray: pip install 'kv-baton[ray]' ({error})",
            field="parallel_config.executor",
        ) from error
    return ray
