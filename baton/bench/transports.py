"""How fast each transport moves scattered blocks, beside the limits of the machine in the same run.

Two processes on different cores; 64 MiB in shuffled blocks. The limits: memcpy (one thread, contiguous,
warm) for `local`, a plain loopback stream (large buffers, no protocol) for `tcp`. Judge the ratios, not
the figures: those belong to the machine and to whoever else was using it.
"""

import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from baton.core.ids import Address, EngineId, Epoch
from baton.core.layout import CopySpan, Region
from baton.transport.base import Prepared, Transport
from baton.transport.local import LocalTransport
from baton.transport.tcp import TcpTransport

TOTAL_BYTES = 64 << 20
BLOCK_SIZES = (2 << 10, 16 << 10, 1 << 20)
REPEATS = 9
STREAM_BUFFER_BYTES = 1 << 20
TIMEOUT_S = 120.0
TARGETS = {("local", 16 << 10): 0.4, ("tcp", 16 << 10): 0.8}  # Of the limit.
TCP_ENOUGH_GB_PER_S = 2.0  # Reaching this is enough where the loopback stream is faster than 2.5.

PRODUCER, CONSUMER = Address(EngineId("producer"), Epoch(1)), Address(EngineId("consumer"), Epoch(2))


@dataclass(frozen=True)
class Row:
    """One line of the table. Median over the repeats."""

    transport: str
    block_bytes: int
    gb_per_s: float
    limit: str
    limit_gb_per_s: float

    @property
    def ratio(self) -> float:
        return self.gb_per_s / self.limit_gb_per_s

    @property
    def meets_target(self) -> bool | None:
        """None where there is no target."""
        target = TARGETS.get((self.transport, self.block_bytes))
        if target is None:
            return None
        return self.ratio >= target or (self.transport == "tcp" and self.gb_per_s >= TCP_ENOUGH_GB_PER_S)


def run(total_bytes: int = TOTAL_BYTES, repeats: int = REPEATS) -> list[Row]:
    """Measure. Takes a few seconds on an idle machine."""
    cpus = sorted(os.sched_getaffinity(0))
    our_cpu, their_cpu = cpus[0], cpus[-1]
    os.sched_setaffinity(0, {our_cpu})
    try:
        with _producer(total_bytes, their_cpu) as pipe:
            endpoints, stream_port = pipe.recv()
            memory = np.zeros(total_bytes, dtype=np.uint8)
            limits = {
                "local": ("memcpy", _time_memcpy(memory, repeats)),
                "tcp": ("loopback stream", _time_stream(stream_port, memory, repeats)),
            }
            return [
                Row(name, block_bytes, speed, *limits[name])
                for name in limits
                for block_bytes, speed in _time_transport(name, our_cpu, endpoints[name], memory, repeats)
            ]
    finally:
        os.sched_setaffinity(0, cpus)


def make(name: str, address: Address, cpu: int) -> Transport:
    if name == "local":
        return LocalTransport(address)  # Its threads go where there is room, as in an engine.
    return TcpTransport(address, thread_cpus={cpu})


def _time_transport(
    name: str, cpu: int, endpoint: bytes, memory: NDArray[np.uint8], repeats: int
) -> Iterator[tuple[int, float]]:
    transport = make(name, CONSUMER, cpu)
    try:
        transport.register([Region(memory.ctypes.data, memory.nbytes)])
        peer = transport.connect(PRODUCER, endpoint)
        for block_bytes in BLOCK_SIZES:
            prepared = transport.prepare(peer, [CopySpan(0, 0, block_bytes, 0, 0, block_bytes, block_bytes)])
            num_blocks = memory.nbytes // block_bytes
            rng = np.random.default_rng(block_bytes)
            local, remote = rng.permutation(num_blocks).tolist(), rng.permutation(num_blocks).tolist()

            def read(
                prepared: Prepared = prepared, local: list[int] = local, remote: list[int] = remote
            ) -> None:
                transport.post_read(prepared, local, remote)
                assert transport.wait_completion(TIMEOUT_S), "the read never ended"
                (completion,) = transport.poll()
                assert completion.ok, completion.error

            yield block_bytes, _median_gb_per_s(read, memory.nbytes, repeats)
    finally:
        transport.close()


def _time_memcpy(memory: NDArray[np.uint8], repeats: int) -> float:
    source = np.ones_like(memory)
    return _median_gb_per_s(lambda: np.copyto(memory, source), memory.nbytes, repeats)


def _time_stream(port: int, memory: NDArray[np.uint8], repeats: int) -> float:
    """The other end sends its whole memory each time that it gets a byte."""
    view = memory.data
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as sock:
        sock.settimeout(None)

        def receive() -> None:
            sock.sendall(b"!")
            done = 0
            while done < len(view):
                done += sock.recv_into(view[done : done + STREAM_BUFFER_BYTES])

        return _median_gb_per_s(receive, memory.nbytes, repeats)


def _median_gb_per_s(move: Callable[[], None], nbytes: int, repeats: int) -> float:
    move()  # Warm: pages, caches, connections.
    speeds = []
    for _ in range(repeats):
        start = time.perf_counter()
        move()
        speeds.append(nbytes / (time.perf_counter() - start) / 1e9)
    return statistics.median(speeds)


@contextmanager
def _producer(total_bytes: int, cpu: int) -> Iterator[Connection]:
    spawn = get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_produce, args=(theirs, total_bytes, cpu), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
        ours.send("done")
        process.join(TIMEOUT_S)
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()


def _produce(pipe: Connection, total_bytes: int, cpu: int) -> None:
    os.sched_setaffinity(0, {cpu})
    memory = np.random.default_rng(0).integers(0, 256, total_bytes, dtype=np.uint8)
    regions = [Region(memory.ctypes.data, memory.nbytes)]
    transports = {name: make(name, PRODUCER, cpu) for name in ("local", "tcp")}
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
    for heading in ("transport", "block", "GB/s", "limit", "GB/s", "ratio", "target"):
        table.add_column(heading, justify="left" if heading in ("transport", "limit") else "right")
    for row in rows:
        verdict = {None: "", True: "met", False: "missed"}[row.meets_target]
        table.add_row(
            row.transport,
            f"{row.block_bytes >> 10} KiB",
            f"{row.gb_per_s:.2f}",
            row.limit,
            f"{row.limit_gb_per_s:.2f}",
            f"{row.ratio:.2f}",
            verdict,
        )
    console.print(table)


def main() -> None:
    print_table(run(), Console())


if __name__ == "__main__":
    main()
