"""NIXL without Baton, used as in its own examples: two processes, prepared lists, reads by index, a poll
loop.

It uses the public Python API and no protocol of ours. Both ends have memory as the embedded engine's cache:
between numpy's arrays, which have pages of 2 MiB, NIXL needs half of the CPU time.

`tls` goes to UCX: None for UCX's choice on one host, "tcp" for its choice between hosts without RDMA. By
default each agent has a progress thread that polls without a pause; on a machine with few cores the reader is
faster without it (`reader_thread=False`).
"""

import importlib.util
import os
import statistics
import time
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil

from baton.bench.cold import ColdCaches
from baton.core.errors import TransferError
from baton.stores.host.memory import allocate_shareable
from baton.transport.base.threads import free_affinity

ANSWER_TIMEOUT_S = 120.0


def measure(
    tls: str | None,
    block_sizes: Sequence[int],
    *,
    total_bytes: int,
    repeats: int,
    reader_thread: bool = True,
) -> dict[int, tuple[float, float]]:
    """Return by block size: median GB/s, and mean CPU seconds of both processes per GB (resolution 10 ms).

    Raises TransferError if NIXL does not work here.
    """
    if importlib.util.find_spec("nixl") is None:
        raise TransferError("NIXL is not installed; run: pip install nixl")
    spawn = get_context("spawn")
    owner_end, owner_pipe = spawn.Pipe()
    reader_end, reader_pipe = spawn.Pipe()
    owner = spawn.Process(target=_own, args=(owner_pipe, tls, total_bytes), daemon=True)
    reader = spawn.Process(
        target=_read,
        args=(reader_pipe, tls, tuple(block_sizes), total_bytes, repeats, reader_thread),
        daemon=True,
    )
    owner.start()
    reader.start()
    owner_pipe.close()
    reader_pipe.close()
    try:
        reader_end.send((*_answer(owner_end, "owner"), owner.pid))
        speeds = _answer(reader_end, "reader")
        assert isinstance(speeds, dict)
        return speeds
    finally:
        for process in (reader, owner):
            process.kill()
            process.join()
            process.close()
        owner_end.close()
        reader_end.close()


def _answer(pipe: Connection, process: str) -> Any:
    try:
        if pipe.poll(ANSWER_TIMEOUT_S):
            return pipe.recv()
    except EOFError:
        raise TransferError(f"NIXL's {process} ended without an answer") from None
    raise TransferError(f"NIXL's {process} did not answer within {ANSWER_TIMEOUT_S:g} s")


def _make_agent(name: str, tls: str | None, *, thread: bool = True) -> Any:
    free_affinity()
    os.environ["NIXL_LOG_LEVEL"] = "WARN"
    if tls is not None:
        os.environ["UCX_TLS"] = tls
    from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(enable_prog_thread=thread, backends=["UCX"]))


def _own(pipe: Connection, tls: str | None, total_bytes: int) -> None:
    agent = _make_agent("owner", tls)
    memory = allocate_shareable(total_bytes)
    memory[:] = np.random.default_rng(0).integers(0, 256, total_bytes, dtype=np.uint8)
    agent.register_memory([(memory.ctypes.data, total_bytes, 0, "")], "DRAM")
    pipe.send((agent.get_agent_metadata(), memory.ctypes.data))
    pipe.poll(None)  # Waits until this process is killed or its parent has ended.


def _read(
    pipe: Connection,
    tls: str | None,
    block_sizes: tuple[int, ...],
    total_bytes: int,
    repeats: int,
    reader_thread: bool,
) -> None:
    agent = _make_agent("reader", tls, thread=reader_thread)
    memory = allocate_shareable(total_bytes)
    memory.fill(0)
    agent.register_memory([(memory.ctypes.data, total_bytes, 0, "")], "DRAM")
    metadata, remote_address, owner_pid = pipe.recv()
    owners = psutil.Process(owner_pid)

    def cpu_s() -> float:
        return float(time.process_time() + sum(owners.cpu_times()[:2]))

    owner = agent.add_remote_agent(metadata)
    owner = owner.decode() if isinstance(owner, bytes) else owner
    speeds = {}
    caches = ColdCaches()
    for block_bytes in block_sizes:
        count = total_bytes // block_bytes
        ours = agent.prep_xfer_dlist("", _blocks(memory.ctypes.data, block_bytes, count), "DRAM")
        theirs = agent.prep_xfer_dlist(owner, _blocks(remote_address, block_bytes, count), "DRAM")
        rng = np.random.default_rng(block_bytes)
        local = rng.permutation(count).astype(np.int32)
        remote = rng.permutation(count).astype(np.int32)
        _time_read(agent, ours, local, theirs, remote)  # Warm-up of pages and connections.
        timed, used_s = [], 0.0
        for _ in range(repeats):
            caches.forget()
            before_s = cpu_s()
            timed.append(_time_read(agent, ours, local, theirs, remote))
            used_s += cpu_s() - before_s
        cost = used_s / (repeats * total_bytes / 1e9)
        speeds[block_bytes] = (total_bytes / statistics.median(timed) / 1e9, cost)
    pipe.send(speeds)
    pipe.poll(None)


def _blocks(address: int, block_bytes: int, count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array([(address, block_bytes, 0, block_bytes, count)], dtype=np.uint64)


def _time_read(agent: Any, ours: Any, local: Any, theirs: Any, remote: Any) -> float:
    started = time.perf_counter()
    handle = agent.make_prepped_xfer("READ", ours, local, theirs, remote)
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    took_s = time.perf_counter() - started
    assert state == "DONE", state
    agent.release_xfer_handle(handle)
    return took_s
