"""System under test of the handoff benchmark: P, D and a single engine with one checkpoint, and two routers.

    router         --first-token      the client sees P's token at once
    late router    --no-first-token   the client sees only D's tokens

All of it runs on this machine's loopback and ends with the block that started it.
"""

import json
import os
import random
import secrets
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from baton.cli.processes import Child, Fleet, free_ports
from baton.cli.system import EngineArguments

MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "pull": ("BatonPullConnector", {}),
    "push-off": ("BatonPushConnector", {"stream": "off"}),
    "push-chunk": ("BatonPushConnector", {"stream": "chunk"}),
    "push-layer": ("BatonPushConnector", {"stream": "layer"}),
}
START_TIMEOUT_S = 300.0

# 88 million parameters; 24 KiB of KV cache per token.
MODEL: dict[str, Any] = {
    "family": "qwen3",
    "hidden": 768,
    "layers": 12,
    "heads": 12,
    "kv_heads": 4,
    "intermediate": 2048,
    "vocab": 8192,
    "max_position": 8192,
}


@dataclass(frozen=True, slots=True)
class System:
    """Root URLs, and the process whose time is measured."""

    producer: str
    consumer: str
    single: str
    router: str
    late_router: str
    producer_process: Child


class Prompts:
    """Random prompts, all different, so that no prefix is cached anywhere."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def of(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(300, MODEL["vocab"] - 8) for _ in range(num_tokens)]


class Neighbours:
    """Measures how much of this machine other programs use, which disturbs measurements."""

    def __init__(self) -> None:
        ours = psutil.Process()
        self._tree = [ours, *ours.children(recursive=True)]
        self._began = self._now()

    def cores(self) -> float:
        """Return the mean number of cores used by other programs since this object was made."""
        wall_s, others_s = (after - before for before, after in zip(self._began, self._now(), strict=True))
        if wall_s <= 0:
            return 0.0  # Less than the resolution of the kernel's counters.
        return max(0.0, others_s) / wall_s * (os.cpu_count() or 1)

    def _now(self) -> tuple[float, float]:
        """Return CPU seconds since boot: (of all, including idle time; of other programs, busy)."""
        times = psutil.cpu_times()
        all_s = sum(times) - times.guest - times.guest_nice  # `user` and `nice` contain these too.
        ours_s = 0.0
        for process in self._tree:
            with suppress(psutil.NoSuchProcess):  # A request to it will report its end.
                ours_s += sum(process.cpu_times()[:2])
        return all_s, all_s - times.idle - times.iowait - ours_s


def model_folder() -> Path:
    """Return the folder of a checkpoint, made once in the folder for temporary files."""
    from baton.engine.checkpoints.random_model import write_checkpoint

    folder = Path(tempfile.gettempdir()) / f"baton-bench-model-{os.getuid()}"
    if not (folder / "config.json").is_file():
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
        write_checkpoint(unfinished, **MODEL)
        unfinished.rename(folder)
    return folder


@contextmanager
def running_system(mode: str, model: Path, max_tokens: int) -> Iterator[System]:
    """Start the system. Raises ChildDied or StartTimeout."""
    connector, extra = MODES[mode]
    arguments = EngineArguments(
        model, max_model_len=max_tokens, num_blocks=4 * max_tokens // 16, served_model_name="bench"
    )
    urls = [f"http://127.0.0.1:{port}" for port in free_ports(5)]
    producer, consumer, single, router, late_router = urls

    def engine(url: str, role: str | None) -> list[str]:
        command = arguments.command(httpx.URL(url).port or 0, None)
        if role is None:
            return command
        transfer = {
            "kv_connector": connector,
            "kv_role": role,
            "engine_id": role,
            "kv_connector_extra_config": extra,
        }
        return [*command, "--kv-transfer-config", json.dumps(transfer), "--drain-timeout-s", "0"]

    def route(url: str, *options: str) -> list[str]:
        command = [sys.executable, "-m", "baton.cli", "route", "--port", str(httpx.URL(url).port)]
        # The router has its own mode: an engine with the push connector also serves a pull router.
        router_mode = ["--mode", mode.partition("-")[0]]
        return [*command, *router_mode, "--prefill", producer, "--decode", consumer, *options]

    environment = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    environment |= {"BATON_SECRET": secrets.token_hex(32), "TOKENIZERS_PARALLELISM": "false"}
    with (
        tempfile.TemporaryDirectory(prefix="baton-bench-logs-") as logs,
        Fleet(Path(logs), env=environment) as fleet,
    ):
        engines = {
            fleet.start("producer", engine(producer, "kv_producer")): producer,
            fleet.start("consumer", engine(consumer, "kv_consumer")): consumer,
            fleet.start("single", engine(single, None)): single,
        }
        fleet.wait_ready(
            {child: f"{url}/health" for child, url in engines.items()}, timeout_s=START_TIMEOUT_S
        )
        routers = {
            fleet.start("router", route(router)): router,
            fleet.start("late-router", route(late_router, "--no-first-token")): late_router,
        }
        fleet.wait_ready(
            {child: f"{url}/health" for child, url in routers.items()}, timeout_s=START_TIMEOUT_S
        )
        yield System(producer, consumer, single, router, late_router, next(iter(engines)))
