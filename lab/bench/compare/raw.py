"""Raw transports: 64 MiB in shuffled blocks between two processes, by our transports and the peers',
alternately.

A round is a run of `baton.bench.transports` (ours: local, tcp, nixl), of NIXL without Baton (UCX's own
choice, and over TCP), and of Mooncake's Transfer Engine over TCP. Rounds are repeated while there is time.
"""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from baton.bench import nixl_raw, transports
from baton.core.errors import TransferError
from lab.bench.compare.journal import Journal

TOTAL_BYTES = 64 << 20
REPEATS = 5
MOONCAKE_TIMEOUT_S = 180.0
NIXL_PATHS = {
    "NIXL": (None, True),
    "NIXL, no reader thread": (None, False),
    "NIXL over tcp": ("tcp", True),
    "NIXL over tcp, no reader thread": ("tcp", False),
}
MOONCAKE = "Mooncake over tcp"
# Our transports and the peers over the same kind of path.
RAW_PEERS: dict[str, tuple[str, ...]] = {
    "baton local": ("NIXL", "NIXL, no reader thread"),
    "baton tcp": ("NIXL over tcp", "NIXL over tcp, no reader thread", MOONCAKE),
}

_MOONCAKE_PROGRAM = Path(__file__).with_name("raw_mooncake.py")

Speeds = dict[int, tuple[float, float]]  # GB/s and CPU seconds per GB, by block size.


def setting(block_bytes: int) -> str:
    return f"{block_bytes >> 10} KiB"


def measure(
    journal: Journal, peers: Path, *, rounds_max: int, budget_s: float, say: Callable[[str], None]
) -> None:
    """Run at least one round. A transport that does not work here is recorded once, with the reason."""
    end_s = time.monotonic() + budget_s
    paths = _paths(peers)
    for index in range(rounds_max):
        if index and time.monotonic() > end_s:
            return
        number = journal.next_round()
        journal.samples("machine", "raw", "all", "load_1min", number, [os.getloadavg()[0]])
        for name, run in list(paths.items()):
            try:
                measured = run()
            except (TransferError, ImportError, OSError, subprocess.SubprocessError) as error:
                del paths[name]
                journal.skipped("raw", name, str(error))
                say(f"skipped: {name}: {error}")
                continue
            for system, speeds in measured.items():
                for block_bytes, (gb_per_s, cpu_s_per_gb) in speeds.items():
                    journal.samples("raw", setting(block_bytes), system, "gb_per_s", number, [gb_per_s])
                    journal.samples(
                        "raw", setting(block_bytes), system, "cpu_s_per_gb", number, [cpu_s_per_gb]
                    )
                shown = ", ".join(f"{speeds[size][0]:.2f} at {setting(size)}" for size in sorted(speeds))
                say(f"  raw: {system:32} GB/s {shown}")


def _paths(peers: Path) -> dict[str, Callable[[], dict[str, Speeds]]]:
    paths: dict[str, Callable[[], dict[str, Speeds]]] = {"Baton's transports": _ours}
    for name, (tls, has_thread) in NIXL_PATHS.items():
        paths[name] = lambda name=name, tls=tls, thread=has_thread: {name: _nixl(tls, thread)}  # type: ignore[misc]
    paths[MOONCAKE] = lambda: {MOONCAKE: _mooncake(peers)}
    return paths


def _ours() -> dict[str, Speeds]:
    measured: dict[str, Speeds] = {}
    for row in transports.run(TOTAL_BYTES, REPEATS):
        measured.setdefault(f"baton {row.transport}", {})[row.block_bytes] = (row.gb_per_s, row.cpu_s_per_gb)
        measured.setdefault(row.limit, {})[row.block_bytes] = (row.limit_gb_per_s, 0.0)
    return measured


def _nixl(tls: str | None, has_thread: bool) -> Speeds:
    return nixl_raw.measure(
        tls,
        transports.BLOCK_SIZES,
        total_bytes=TOTAL_BYTES,
        repeats=REPEATS,
        reader_thread=has_thread,
    )


def _mooncake(peers: Path) -> Speeds:
    """Run the Mooncake program. Raises TransferError."""
    python = peers / "bin" / "python"
    if not python.exists():
        raise TransferError(f"{peers} does not exist; make it with scripts/setup-peers")
    sizes = [str(size) for size in transports.BLOCK_SIZES]
    answer = subprocess.run(
        [str(python), str(_MOONCAKE_PROGRAM), str(TOTAL_BYTES), str(REPEATS), *sizes],
        env={**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(_library_folders(peers))},
        capture_output=True,
        text=True,
        timeout=MOONCAKE_TIMEOUT_S,
        check=False,
    )
    if answer.returncode != 0 or not answer.stdout.strip():
        errors = [line for line in answer.stderr.splitlines() if line.strip()]
        raise TransferError(errors[-1] if errors else f"Mooncake ended with status {answer.returncode}")
    return {
        int(size): (sorted(speeds)[len(speeds) // 2], cost)
        for size, (speeds, cost) in json.loads(answer.stdout.splitlines()[-1]).items()
    }


def _library_folders(peers: Path) -> Iterator[str]:
    """Yield the library folders unpacked by scripts/setup-peers, then the system's."""
    yield from (str(path) for path in sorted((peers / "debian").glob("**/x86_64-linux-gnu")))
    if inherited := os.environ.get("LD_LIBRARY_PATH"):
        yield inherited
