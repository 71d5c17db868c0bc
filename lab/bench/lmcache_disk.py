"""Files as a tier, beside LMCache's LocalDiskBackend: `baton bench tiers` in turns with LMCache's moves.

Needs `scripts/setup-peers` (LMCache) and `scripts/setup-vllm` (its dependencies). Ours synchronises each file
and proves what it loads; LMCache does neither, and is compared with plain files written without fsync.

    make bench ARGS=lmcache
    python -m lab.bench.lmcache_disk --out FOLDER      and stores the figures and a plot
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from baton.bench.machine import machine_line
from baton.bench.tiers import (
    CONTENT,
    HEADS,
    LAYERS,
    NUM_CHUNKS,
    PLAIN_READ,
    PLAIN_WRITE,
    Row,
    measure,
    measure_lookups,
    print_tables,
)
from baton.connectors.storage.stores.settings import CHUNK_TOKENS
from lab.bench.compare.environment import PEERS, VLLM_PYTHON
from lab.bench.lmcache_program import ANSWER

LMCACHE = PEERS / "lmcache"
_PROGRAM = Path(__file__).with_name("lmcache_program.py")


class LMCache:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._expect_done()

    def move(self, name: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        self._expect_done()

    def _expect_done(self) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != ANSWER:
            raise RuntimeError(f"LMCache ended with exit status {self._process.wait()}")


@contextmanager
def running_lmcache(folder: Path) -> Iterator[LMCache]:
    numbers = (NUM_CHUNKS, LAYERS, CHUNK_TOKENS, HEADS * CONTENT // 2)  # K and V are two halves.
    command = [str(VLLM_PYTHON), str(_PROGRAM), str(folder), *map(str, numbers)]
    environment = {**os.environ, "PYTHONPATH": str(LMCACHE), "LMCACHE_LOG_LEVEL": "ERROR"}
    process = subprocess.Popen(
        command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        yield LMCache(process)
    finally:
        process.kill()
        process.wait()


def plot(rows: Sequence[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    bars = axes.barh([row.what for row in rows], [row.gb_per_s for row in rows])
    axes.bar_label(bars, [f"{row.ratio:.2f} of {row.of}" for row in rows], padding=4, fontsize="small")
    axes.set(xlabel="GB/s", title="Chunks in files")
    axes.margins(x=0.35)
    axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(arguments: Sequence[str] = ()) -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.bench.lmcache_disk")
    parser.add_argument("--out", type=Path, help="folder for the figures and the plot")
    out: Path | None = parser.parse_args(list(arguments)).out
    console = Console(width=None if sys.stdout.isatty() else 120)
    if not (LMCACHE.is_dir() and VLLM_PYTHON.exists()):
        console.print("LMCache is not installed: scripts/setup-peers and scripts/setup-vllm install it")
        return 0
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as made:
        folders = [Path(made) / name for name in ("ours", "lookups", "lmcache")]
        for folder in folders:
            folder.mkdir()
        with running_lmcache(folders[2]) as peer:
            rows = measure(
                folders[0],
                {
                    "LMCache, put": (PLAIN_WRITE, lambda: peer.move("put")),
                    "LMCache, get": (PLAIN_READ, lambda: peer.move("get")),
                },
                after_turn=lambda: peer.move("remove"),
            )
        lookups = measure_lookups(folders[1])
    print_tables(rows, lookups, console)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        found = {"machine": machine_line(), "rows": [asdict(row) for row in rows]}
        (out / "tiers.json").write_text(json.dumps(found, indent=1) + "\n")
        plot(rows, out / "tiers.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
