"""Start: from the start of `baton serve` to the first token of an answer, with about 6 million parameters.

The first start reads programs and checkpoint from disk, and is not counted. Goal: 4 s.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx
from rich.console import Console

from baton.checkpoints.random_model import write_checkpoint
from baton.cli.processes import Fleet, free_ports

STARTS = 5
GOAL_S = 4.0
START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 30.0


def start_once(folder: Path, model: Path) -> tuple[float, float]:
    """Seconds until the server reports that it is ready, and until the first token."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with Fleet(folder) as fleet:
        begun_s = time.monotonic()
        command = [sys.executable, "-m", "baton.cli", "serve", str(model), "--port", str(port)]
        child = fleet.start("engine", command)
        fleet.wait_ready({child: f"{url}/health"}, timeout_s=START_TIMEOUT_S)
        ready_s = time.monotonic() - begun_s
        body = {"prompt": "a", "max_tokens": 1}
        httpx.post(f"{url}/v1/completions", json=body, timeout=ANSWER_TIMEOUT_S).raise_for_status()
        return ready_s, time.monotonic() - begun_s


def main() -> int:
    console = Console(highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="baton-start-") as temporary:
        folder = Path(temporary)
        model = write_checkpoint(folder / "model", hidden=320)
        nbytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
        console.print(f"a checkpoint of {nbytes / 1e6:.1f} MB in float32")
        start_once(folder / "logs", model)
        times = [start_once(folder / "logs", model) for _ in range(STARTS)]
    ready_s, token_s = (statistics.median(column) for column in zip(*times, strict=True))
    verdict = "met" if token_s <= GOAL_S else "missed"
    console.print(
        f"start of an engine, median of {STARTS}: ready after {ready_s:.2f} s, first token after "
        f"{token_s:.2f} s (least {min(token for _, token in times):.2f}; goal {GOAL_S:g}, {verdict})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
