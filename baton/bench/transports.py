"""Transport benchmark: speed of moving scattered blocks, compared with the machine's limits in the same
run.

Two processes on different cores move 64 MiB in shuffled blocks, between memory of the kind that the embedded
engine's cache is in. `local` maps it, `local, cross-memory` does not. The limits are memcpy (one thread,
contiguous, warm) for transports on one host, and a plain loopback stream (large buffers, no protocol) for
`tcp`. NIXL without Baton follows, with its defaults and without the reader's progress
thread. Compare ratios, because the figures depend on the machine and its load.
"""

import contextlib
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection

import numpy as np
import psutil
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from baton.bench import nixl_raw
from baton.bench.cold import ColdCaches
from baton.core.errors import ConfigError, TransferError
from baton.core.ids import Address, EngineId, Epoch
from baton.core.layout import CopySpan, Region
from baton.core.sealed_memory import allocate_sealed
from baton.transport.base import Transport
from baton.transport.local import LocalTransport
from baton.transport.nixl import NixlTransport
from baton.transport.sealing import Integrity
from baton.transport.tcp import TcpOptions, TcpTransport

TOTAL_BYTES = 64 << 20
BLOCK_SIZES = (2 << 10, 4 << 10, 16 << 10, 256 << 10, 1 << 20)
REPEATS = 9
STREAM_BUFFER_BYTES = 1 << 20
TIMEOUT_S = 120.0
TARGETS = {  # Ratio to the limit.
    ("local", 2 << 10): 0.5,
    ("local", 16 << 10): 0.85,
    ("local", 256 << 10): 1.2,
    ("tcp", 16 << 10): 0.8,
}
NIXL_TARGETS = {("local", 16 << 10): 4.0, ("tcp", 16 << 10): 4.0}  # Ratio to NIXL with its defaults.
TCP_ENOUGH_GB_PER_S = 2.0  # Reaching this is enough where the loopback stream is faster than 2.5.

LIMITS = {
    "local": "memcpy",
    "local, cross-memory": "memcpy",
    "nixl": "memcpy",
    "tcp": "loopback stream",  # With a MAC, as on the loopback by default.
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
    cpu_s_per_gb: float = 0.0  # Of both processes; resolution 10 ms.

    @property
    def ratio(self) -> float:
        return self.gb_per_s / self.limit_gb_per_s

    @property
    def meets_target(self) -> bool | None:
        """None if there is no target."""
        target = TARGETS.get((self.transport, self.block_bytes))
        if target is None:
            return None
        return self.ratio >= target or (self.transport == "tcp" and self.gb_per_s >= TCP_ENOUGH_GB_PER_S)


@dataclass(frozen=True)
class Comparison:
    """A transport of ours compared with NIXL without Baton over the same kind of path."""

    transport: str
    nixl: str
    block_bytes: int
    ratio: float

    @property
    def meets_target(self) -> bool | None:
        target = NIXL_TARGETS.get((self.transport, self.block_bytes)) if self.nixl in NIXL_PATHS else None
        return None if target is None else self.ratio >= target


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


def run_nixl(total_bytes: int = TOTAL_BYTES, repeats: int = REPEATS) -> dict[str, dict[int, float]]:
    """Return GB/s of NIXL without Baton, by path and block size; empty if it does not work."""
    speeds: dict[str, dict[int, float]] = {}
    for name, path in {**NIXL_PATHS, **NIXL_TUNED_PATHS}.items():
        try:
            measured = nixl_raw.measure(
                None if path == "local" else "tcp",
                BLOCK_SIZES,
                total_bytes=total_bytes,
                repeats=repeats,
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
            return LocalTransport(address)  # Its threads run on any core, as in an engine.
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
    memory = np.frombuffer(allocate_sealed(nbytes, "baton-bench"), dtype=np.uint8)
    memory.fill(0)
    return memory


def _memcpy(nbytes: int) -> Callable[[], None]:
    target, source = np.zeros(nbytes, np.uint8), np.ones(nbytes, np.uint8)
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
            verdict,
        )
    console.print(table)


def print_comparisons(comparisons: list[Comparison], console: Console) -> None:
    table = Table(title="Speed relative to NIXL without Baton")
    table.add_column("ours")
    table.add_column("NIXL")
    for block_bytes in BLOCK_SIZES:
        table.add_column(f"{block_bytes >> 10} KiB", justify="right")
    table.add_column("goal at 16 KiB", justify="right")
    for name, path in {**NIXL_PATHS, **NIXL_TUNED_PATHS}.items():
        line = {c.block_bytes: c for c in comparisons if (c.transport, c.nixl) == (path, name)}
        if line:
            verdicts = [c.meets_target for c in line.values() if c.meets_target is not None]
            verdict = "" if not verdicts else "met" if all(verdicts) else "missed"
            ratios = (f"{line[size].ratio:.1f}" if size in line else "" for size in BLOCK_SIZES)
            table.add_row(path, name, *ratios, verdict)
    console.print(table)


def main() -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    rows = run()
    print_table(rows, console)
    for name in ("tcp", "tcp, encrypt"):
        console.print(
            f"{TCP_LEVELS[name]} on tcp costs "
            + "; ".join(
                f"{cost.share:.0%} of the rate and {cost.cpu_s_per_gb:+.2f} CPU s/GB at {size >> 10} KiB"
                for size, cost in integrity_costs(rows, name).items()
            )
        )
    if comparisons := compare(rows, run_nixl()):
        print_comparisons(comparisons, console)


@dataclass(frozen=True)
class Cost:
    """Cost of a level of integrity compared with `off`."""

    share: float  # Share of the rate.
    cpu_s_per_gb: float  # Of both processes.


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
    main()
