"""System under test of the handoff benchmark: P, D and a single engine with one checkpoint, and two routers.

    router         --first-token      the client sees P's token at once
    late router    --no-first-token   the client sees only D's tokens

All of it runs on this machine's loopback and ends with the block that started it.
"""

import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from baton.cli.processes import Child, Fleet, free_ports
from baton.cli.system import EngineArguments, HandoffArguments, plan_system, start_system

MODES = {
    "pull": HandoffArguments("pull"),
    "pull-tcp": HandoffArguments("pull", transports=("tcp",)),
    "push-off": HandoffArguments("push", "off"),
    "push-chunk": HandoffArguments("push", "chunk"),
    "push-layer": HandoffArguments("push", "layer"),
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
    from baton.checkpoints.random_model import write_checkpoint

    folder = Path(tempfile.gettempdir()) / f"baton-bench-model-{os.getuid()}"
    if not (folder / "config.json").is_file():
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
        write_checkpoint(unfinished, **MODEL)
        unfinished.rename(folder)
    return folder


@contextmanager
def running_system(mode: str, model: Path, max_tokens: int) -> Iterator[System]:
    """Start the system. Raises ChildDied or StartTimeout."""
    arguments = EngineArguments(
        model, max_model_len=max_tokens, num_blocks=4 * max_tokens // 16, served_model_name="bench"
    )
    plan = plan_system(arguments, num_prefill=1, num_decode=1, num_single=1, handoff=MODES[mode])
    (late_port,) = free_ports(1)
    late = replace(plan, router_port=late_port)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    with (
        tempfile.TemporaryDirectory(prefix="baton-bench-logs-") as logs,
        Fleet(Path(logs), env=environment) as fleet,
    ):
        start_system(fleet, plan, timeout_s=START_TIMEOUT_S, console=Console(quiet=True))
        late_router = fleet.start("late-router", [*late.router_command(), "--no-first-token"])
        fleet.wait_ready({late_router: f"{late.router_url}/health"}, timeout_s=START_TIMEOUT_S)
        producer, consumer, single = plan.engines
        process = next(child for child in fleet.children if child.name == producer.name)
        yield System(producer.url, consumer.url, single.url, plan.router_url, late.router_url, process)
