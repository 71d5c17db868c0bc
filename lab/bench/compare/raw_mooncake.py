"""Mooncake's Transfer Engine without Baton, over TCP: two processes, registered memory, scattered reads.

It is run by path with the Python of scripts/setup-peers' environment and imports nothing of Baton:

    python raw_mooncake.py TOTAL_BYTES REPEATS BLOCK_BYTES...  -> {"16384": [[GB/s, ...], CPU s per GB], ...}

It uses the public Python API with the settings that its documentation starts with: "P2PHANDSHAKE" instead of
a metadata server, protocol "tcp". Its queues refuse more than about a thousand pieces at once, so larger
reads are split into batches. The bytes are checked. A block size that fails is left out, with the reason on
standard error.
"""

import importlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

HOST = "127.0.0.1"
TIMEOUT_S = 60.0
CACHE_MAX_BYTES = 128 << 20
PIECES_MAX = 512  # Per batch. The queues hold about a thousand; half of that never failed here.


def make_engine(memory: "np.ndarray[Any, Any]") -> tuple[Any, str]:
    engine: Any = importlib.import_module("mooncake.engine").TransferEngine()
    if engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") != 0:
        raise RuntimeError("Mooncake's engine cannot be initialized")
    if engine.register_memory(memory.ctypes.data, memory.nbytes) != 0:
        raise RuntimeError("Mooncake's engine cannot register memory")
    return engine, f"{HOST}:{engine.get_rpc_port()}"


def own(pipe: Connection, total_bytes: int) -> None:
    memory = np.random.default_rng(0).integers(0, 256, total_bytes, dtype=np.uint8)
    _engine, name = make_engine(memory)
    pipe.send((name, memory.ctypes.data, int(memory.sum(dtype=np.uint64))))
    while True:
        pipe.recv()
        pipe.send(time.process_time())  # CPU time of all its threads.


class ReadError(Exception):
    """A read failed or returned wrong bytes."""


def measure(
    engine: Any,
    name: str,
    memory: "np.ndarray[Any, Any]",
    remote: int,
    total: int,
    block_bytes: int,
    repeats: int,
    owners_cpu_s: Callable[[], float],
) -> list[object]:
    """Return [[GB/s of each repeat], CPU s of both processes per GB]. `total`: sum of the owner's bytes."""
    count = memory.nbytes // block_bytes
    rng = np.random.default_rng(block_bytes)
    to = [memory.ctypes.data + int(i) * block_bytes for i in rng.permutation(count)]
    source = [remote + int(i) * block_bytes for i in rng.permutation(count)]
    sizes = [block_bytes] * count
    memory[:] = 0
    others = np.zeros(CACHE_MAX_BYTES, dtype=np.uint8)
    took = []
    cpu_s = 0.0
    for repeat in range(repeats + 1):
        others += 1  # Evicts processor caches, as for the other transports (`baton.bench.cold`).
        before_s = time.process_time() + owners_cpu_s()
        began = time.perf_counter()
        for first in range(0, count, PIECES_MAX):
            batch = slice(first, first + PIECES_MAX)
            if engine.batch_transfer_sync_read(name, to[batch], source[batch], sizes[batch]) != 0:
                raise ReadError("a read failed")
        took.append(time.perf_counter() - began)
        if repeat > 0:  # The first repeat is a warm-up of connections and pages.
            cpu_s += time.process_time() + owners_cpu_s() - before_s
    if int(memory.sum(dtype=np.uint64)) != total:
        raise ReadError("the bytes are wrong")
    return [[memory.nbytes / seconds / 1e9 for seconds in took[1:]], cpu_s / (repeats * memory.nbytes / 1e9)]


def main() -> None:
    total_bytes, repeats, *block_sizes = (int(text) for text in sys.argv[1:])
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    owner = spawn.Process(target=own, args=(theirs, total_bytes), daemon=True)
    owner.start()
    theirs.close()
    try:
        memory = np.zeros(total_bytes, dtype=np.uint8)
        engine, _ = make_engine(memory)
        if not ours.poll(TIMEOUT_S):
            raise RuntimeError("the owner of the memory is not ready")
        name, remote, total = ours.recv()

        def owners_cpu_s() -> float:
            ours.send("cpu")
            return float(ours.recv())

        results = {}
        for block_bytes in block_sizes:
            try:
                results[block_bytes] = measure(
                    engine, name, memory, remote, total, block_bytes, repeats, owners_cpu_s
                )
            except ReadError as error:
                print(f"blocks of {block_bytes} bytes: {error}", file=sys.stderr)
        print(json.dumps(results), flush=True)
    finally:
        owner.kill()
        owner.join()
    os._exit(0)  # The engine's threads do not end by themselves.


if __name__ == "__main__":
    main()
