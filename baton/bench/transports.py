"""Transport benchmark: speed of moving scattered blocks, compared with the machine's limits in the same
run.

Two processes on different cores move 64 MiB in shuffled blocks, between memory of the kind that the embedded
engine's cache is in. `local` maps it, `local, cross-memory` does not. The limits are memcpy (one thread,
contiguous, between such memory) for transports on one host, and a plain loopback stream (large buffers, no
protocol) for `tcp`. NIXL without Baton follows, between such memory, with its defaults and without the
reader's progress thread. Compare ratios, because the figures depend on the machine and its load. A start of
the processes gets other pages of memory, which changes some ratios by a tenth; so each row is that of the
start with the median ratio.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from baton.bench import nixl_raw
from baton.bench.cold import ColdCaches
from baton.bench.machine import machine_line
from baton.core.errors import ConfigError, TransferError
from baton.core.ids import Address, EngineId, Epoch
from baton.core.layout import CopySpan, Region
from baton.stores.host.memory import allocate_shareable
from baton.transport.base.interface import Transport
from baton.transport.local.transport import LocalTransport
from baton.transport.nixl.transport import NixlTransport
from baton.transport.tcp.sealing import Integrity
from baton.transport.tcp.transport import TcpOptions, TcpTransport

TOTAL_BYTES = 64 << 20
BLOCK_SIZES = (2 << 10, 4 << 10, 16 << 10, 256 << 10, 1 << 20)
REPEATS = 9
STARTS = 5
STREAM_BUFFER_BYTES = 1 << 20
TIMEOUT_S = 120.0
TARGETS = {  # Ratio to the limit, at 2, 16 and 256 KiB.
    "local": (0.5, 0.85, 1.2),
    "tcp": (0.4, 0.65, 0.75),
    "tcp, off": (0.5, 0.75, 0.9),
}
TARGET_SIZES = (2 << 10, 16 << 10, 256 << 10)
NIXL_TARGET = 1.0  # Share of NIXL's rate, at every size.

LIMITS = {
    "local": "memcpy",
    "local, cross-memory": "memcpy",
    "nixl": "memcpy",
    "tcp": "loopback stream",  # Has a MAC, as on the loopback by default.
    "tcp, encrypt": "loopback stream",
    "tcp, off": "loopback stream",
}
TCP_LEVELS: dict[str, Integrity] = {"tcp": "mac", "tcp, encrypt": "encrypt", "tcp, off": "off"}
PRODUCER, CONSUMER = Address(EngineId("producer"), Epoch(1)), Address(EngineId("consumer"), Epoch(2))


@dataclass(frozen=True)
class Row:
    """One line of the table. Median over the repeats."""

    transport: str
    block_bytes: int
    gb_per_s: float
    limit: str
    limit_gb_per_s: float
    cpu_s_per_gb: float = 0.0  # CPU time of both processes; resolution 10 ms.

    @property
    def ratio(self) -> float:
        return self.gb_per_s / self.limit_gb_per_s

    @property
    def target(self) -> float | None:
        if self.block_bytes not in TARGET_SIZES or self.transport not in TARGETS:
            return None
        return TARGETS[self.transport][TARGET_SIZES.index(self.block_bytes)]

    @property
    def meets_target(self) -> bool | None:
        """None if there is no target."""
        return None if self.target is None else self.ratio >= self.target


@dataclass(frozen=True)
class Comparison:
    """A transport of ours compared with NIXL without Baton over the same kind of path."""

    transport: str
    nixl: str
    block_bytes: int
    ratio: float

    @property
    def meets_target(self) -> bool:
        return self.ratio >= NIXL_TARGET


NIXL_PATHS = {"NIXL": "local", "NIXL over tcp": "tcp"}  # NIXL's defaults.
NIXL_TUNED_PATHS = {"NIXL, no reader thread": "local", "NIXL over tcp, no reader thread": "tcp"}


def run(total_bytes: int = TOTAL_BYTES, repeats: int = REPEATS) -> list[Row]:
    """Measure our transports. Takes a few seconds on an idle machine.

    All measurements at one block size alternate, so that other programs disturb them equally.
    """
    cpus = sorted(os.sched_getaffinity(0))
    our_cpu, their_cpu = cpus[0], cpus[-1]
    os.sched_setaffinity(0, {our_cpu})
    try:
        with _producer(total_bytes, their_cpu) as (pipe, pid), contextlib.ExitStack() as opened:
            endpoints, stream_port = pipe.recv()
            memory = _cache(total_bytes)
            limits = {
                "memcpy": _memcpy(total_bytes),
                "loopback stream": opened.enter_context(_stream(stream_port, memory)),
            }
            readers = {
                name: opened.enter_context(_reader(name, our_cpu, endpoints[_path(name)], memory))
                for name in LIMITS
                if _path(name) in endpoints
            }
            rows: list[Row] = []
            for block_bytes in BLOCK_SIZES:
                moves = {**limits, **{name: read(block_bytes) for name, read in readers.items()}}
                speeds, costs = _measure(moves, memory.nbytes, repeats, pid)
                rows += [
                    Row(name, block_bytes, speeds[name], LIMITS[name], speeds[LIMITS[name]], costs[name])
                    for name in readers
                ]
            return sorted(rows, key=lambda row: list(LIMITS).index(row.transport))
    finally:
        os.sched_setaffinity(0, cpus)


def of_starts(starts: Sequence[Sequence[Row]]) -> list[Row]:
    """Return, for each row, that of the start with the median ratio."""
    return [
        sorted(rows, key=lambda row: row.ratio)[(len(rows) - 1) // 2] for rows in zip(*starts, strict=True)
    ]


def run_nixl() -> dict[str, dict[int, float]]:
    """Return GB/s of NIXL without Baton, by path and block size; empty if it does not work."""
    speeds: dict[str, dict[int, float]] = {}
    for name, path in {**NIXL_PATHS, **NIXL_TUNED_PATHS}.items():
        try:
            measured = nixl_raw.measure(
                None if path == "local" else "tcp",
                BLOCK_SIZES,
                total_bytes=TOTAL_BYTES,
                repeats=REPEATS,
                reader_thread=name in NIXL_PATHS,
            )
            speeds[name] = {size: speed for size, (speed, _) in measured.items()}
        except (TransferError, ImportError) as error:
            print(f"{name} was not measured: {error}")
    return speeds


def compare(rows: list[Row], nixl: dict[str, dict[int, float]]) -> list[Comparison]:
    ours = {(row.transport, row.block_bytes): row.gb_per_s for row in rows}
    return [
        Comparison(path, name, block_bytes, ours[path, block_bytes] / speed)
        for name, path in {**NIXL_PATHS, **NIXL_TUNED_PATHS}.items()
        for block_bytes, speed in nixl.get(name, {}).items()
        if (path, block_bytes) in ours
    ]


def make(name: str, address: Address, cpu: int) -> Transport:
    """Make a transport. Raises ConfigError if it is not available."""
    match name:
        case "local":
            return LocalTransport(address)  # The threads run on any core, as in an engine.
        case "local, cross-memory":
            return LocalTransport(address, library=None)
        case "nixl":
            return NixlTransport(address)
        case _:
            return TcpTransport(address, TcpOptions(integrity=TCP_LEVELS[name]), thread_cpus={cpu})


def _path(name: str) -> str:
    return name.partition(",")[0]


@contextmanager
def _reader(
    name: str, cpu: int, endpoint: bytes, memory: NDArray[np.uint8]
) -> Iterator[Callable[[int], Callable[[], None]]]:
    """Yield a function that prepares, for a block size, a read of everything in shuffled blocks."""
    transport = make(name, CONSUMER, cpu)
    try:
        transport.register([Region(memory.ctypes.data, memory.nbytes)])
        peer = transport.connect(PRODUCER, endpoint)

        def prepare(block_bytes: int) -> Callable[[], None]:
            prepared = transport.prepare(peer, [CopySpan(0, 0, block_bytes, 0, 0, block_bytes, block_bytes)])
            num_blocks = memory.nbytes // block_bytes
            rng = np.random.default_rng(block_bytes)
            local, remote = rng.permutation(num_blocks).tolist(), rng.permutation(num_blocks).tolist()

            def read() -> None:
                transport.post_read(prepared, local, remote)
                assert transport.wait_completion(TIMEOUT_S), "the read never ended"
                (completion,) = transport.poll()
                assert completion.ok, completion.error

            return read

        yield prepare
    finally:
        transport.close()


def _cache(nbytes: int) -> NDArray[np.uint8]:
    memory = allocate_shareable(nbytes)
    memory.fill(0)
    return memory


def _memcpy(nbytes: int) -> Callable[[], None]:
    # Not numpy's own memory, which may have larger pages than a cache can have.
    target, source = _cache(nbytes), _cache(nbytes)
    return lambda: np.copyto(target, source)


@contextmanager
def _stream(port: int, memory: NDArray[np.uint8]) -> Iterator[Callable[[], None]]:
    """Yield a function that asks the other end for its whole memory and receives it."""
    view = memory.data
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as sock:
        sock.settimeout(None)

        def receive() -> None:
            sock.sendall(b"!")
            done = 0
            while done < len(view):
                done += sock.recv_into(view[done : done + STREAM_BUFFER_BYTES])

        yield receive


def _measure(
    moves: dict[str, Callable[[], None]], nbytes: int, repeats: int, producer_pid: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return by name: median GB/s, and mean CPU seconds of both processes per GB."""
    producer = psutil.Process(producer_pid)

    def cpu_s() -> float:
        return float(time.process_time() + sum(producer.cpu_times()[:2]))

    caches = ColdCaches()
    for move in moves.values():
        move()  # Warm-up of pages and connections.
    speeds: dict[str, list[float]] = {name: [] for name in moves}
    costs = dict.fromkeys(moves, 0.0)
    for _ in range(repeats):
        for name, move in moves.items():
            caches.forget()
            cpu_before_s, start = cpu_s(), time.perf_counter()
            move()
            speeds[name].append(nbytes / (time.perf_counter() - start) / 1e9)
            costs[name] += cpu_s() - cpu_before_s
    gigabytes = repeats * nbytes / 1e9
    return (
        {name: statistics.median(measured) for name, measured in speeds.items()},
        {name: cost / gigabytes for name, cost in costs.items()},
    )


@contextmanager
def _producer(total_bytes: int, cpu: int) -> Iterator[tuple[Connection, int]]:
    """Start the producer; yield the pipe to it and its process id."""
    spawn = get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_produce, args=(theirs, total_bytes, cpu), daemon=True)
    process.start()
    theirs.close()
    try:
        assert process.pid is not None
        yield ours, process.pid
        ours.send("done")
        process.join(TIMEOUT_S)
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()


def _produce(pipe: Connection, total_bytes: int, cpu: int) -> None:
    os.sched_setaffinity(0, {cpu})
    memory = _cache(total_bytes)
    memory[:] = np.random.default_rng(0).integers(0, 256, total_bytes, dtype=np.uint8)
    regions = [Region(memory.ctypes.data, memory.nbytes)]
    transports: dict[str, Transport] = {}
    # A connection uses the stronger level of its two ends, so the readers select it.
    for name in ("local", "nixl", "tcp, off"):
        with contextlib.suppress(ConfigError):  # NIXL is optional.
            transports[_path(name)] = make(name, PRODUCER, cpu)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoints = {name: transport.register(regions) for name, transport in transports.items()}
        pipe.send((endpoints, listener.getsockname()[1]))
        sock, _ = listener.accept()
        view = memory.data
        with sock:
            while sock.recv(1):
                for start in range(0, total_bytes, STREAM_BUFFER_BYTES):
                    sock.sendall(view[start : start + STREAM_BUFFER_BYTES])
    pipe.recv()
    for transport in transports.values():
        transport.close()


def print_table(rows: list[Row], console: Console) -> None:
    table = Table(title="Transports: scattered blocks between two processes, median")
    for heading in ("transport", "block", "GB/s", "CPU s/GB", "limit", "GB/s", "ratio", "target"):
        table.add_column(heading, justify="left" if heading in ("transport", "limit") else "right")
    for row in rows:
        verdict = {None: "", True: "met", False: "missed"}[row.meets_target]
        table.add_row(
            row.transport,
            f"{row.block_bytes >> 10} KiB",
            f"{row.gb_per_s:.2f}",
            f"{row.cpu_s_per_gb:.2f}",
            row.limit,
            f"{row.limit_gb_per_s:.2f}",
            f"{row.ratio:.2f}",
            f"{row.target} {verdict}" if row.target else "",
        )
    console.print(table)


def print_comparisons(comparisons: list[Comparison], console: Console) -> None:
    table = Table(title="Speed relative to NIXL without Baton")
    table.add_column("ours")
    table.add_column("NIXL")
    for block_bytes in BLOCK_SIZES:
        table.add_column(f"{block_bytes >> 10} KiB", justify="right")
    table.add_column(f"goal {NIXL_TARGET}", justify="right")
    for name, path in {**NIXL_PATHS, **NIXL_TUNED_PATHS}.items():
        line = {c.block_bytes: c for c in comparisons if (c.transport, c.nixl) == (path, name)}
        if line:
            verdict = "met" if all(c.meets_target for c in line.values()) else "missed"
            ratios = (f"{line[size].ratio:.1f}" if size in line else "" for size in BLOCK_SIZES)
            table.add_row(path, name, *ratios, verdict)
    console.print(table)


def plot(rows: list[Row], nixl: Mapping[str, Mapping[int, float]], folder: Path) -> Path:
    """Draw rates as ratios to the limits (crosses: goals), and CPU seconds a GB."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 4.5))
    for name in dict.fromkeys(row.transport for row in rows):
        line = [row for row in rows if row.transport == name]
        sizes = [row.block_bytes >> 10 for row in line]
        (drawn,) = left.plot(
            sizes, [row.ratio for row in line], marker="o", label=f"{name} / {line[0].limit}"
        )
        right.plot(sizes, [row.cpu_s_per_gb for row in line], marker="o", label=name)
        goals = [(row.block_bytes >> 10, row.target) for row in line if row.target]
        if goals:
            left.scatter(*zip(*goals, strict=True), marker="x", s=60, color=drawn.get_color())
    limits = {(row.limit, row.block_bytes): row.limit_gb_per_s for row in rows}
    for name, speeds in nixl.items():
        limit = LIMITS[{**NIXL_PATHS, **NIXL_TUNED_PATHS}[name]]
        ratios = [speed / limits[limit, size] for size, speed in speeds.items()]
        left.plot([size >> 10 for size in speeds], ratios, linestyle="--", label=f"{name} / {limit}")
    left.set(ylabel="ratio to the limit", title="Rate (x: goal)", yscale="log")
    right.set(ylabel="CPU s/GB", title="CPU time of both processes")
    for axes in (left, right):
        axes.set(xlabel="KiB in one block", xscale="log")
        axes.set_xticks([size >> 10 for size in BLOCK_SIZES], [f"{size >> 10}" for size in BLOCK_SIZES])
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="x-small")
    figure.tight_layout()
    picture = folder / "transports.png"
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)
    return picture


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m baton.bench.transports")
    parser.add_argument("--out", type=Path, help="folder for the figures and the plot")
    parser.add_argument("--starts", type=int, default=STARTS, help="how often the processes are started")
    given = parser.parse_args(list(arguments))
    out: Path | None = given.out
    console = Console(width=None if sys.stdout.isatty() else 120)
    rows = of_starts([run() for _ in range(given.starts)])
    print_table(rows, console)
    for name in ("tcp", "tcp, encrypt"):
        console.print(
            f"{TCP_LEVELS[name]} on tcp costs "
            + "; ".join(
                f"{cost.share:.0%} of the rate and {cost.cpu_s_per_gb:+.2f} CPU s/GB at {size >> 10} KiB"
                for size, cost in integrity_costs(rows, name).items()
            )
        )
    nixl = run_nixl()
    if comparisons := compare(rows, nixl):
        print_comparisons(comparisons, console)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        found = {"machine": machine_line(), "rows": [asdict(row) for row in rows], "nixl": nixl}
        (out / "transports.json").write_text(json.dumps(found, indent=1) + "\n")
        console.print(f"wrote {plot(rows, nixl, out)}")


@dataclass(frozen=True)
class Cost:
    """Cost of a level of integrity compared with `off`."""

    share: float  # Share of the rate.
    cpu_s_per_gb: float  # CPU time of both processes.


def integrity_costs(rows: list[Row], name: str) -> dict[int, Cost]:
    """Return the cost by block size."""
    found = {(row.transport, row.block_bytes): row for row in rows}
    return {
        size: Cost(
            1 - found[name, size].gb_per_s / found["tcp, off", size].gb_per_s,
            found[name, size].cpu_s_per_gb - found["tcp, off", size].cpu_s_per_gb,
        )
        for size in BLOCK_SIZES
        if (name, size) in found and ("tcp, off", size) in found
    }


if __name__ == "__main__":
    main(sys.argv[1:])
