"""Self-test of transports: reads between this process and a child process, and measures the speed.

    self_test(["local", "tcp"]) -> [Outcome("local", 6.1, None), Outcome("tcp", None, "the kernel ...")]

The content is compared, so that a reported speed implies correct bytes.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection

import numpy as np

from baton.core.errors import BatonError, TransferError
from baton.core.ids import Address, EngineId, Epoch
from baton.core.layout import CopySpan, Region
from baton.core.sealed_memory import allocate_sealed
from baton.transport.base.interface import Prepared, Transport
from baton.transport.registry import make_transport

TOTAL_BYTES = 32 << 20
BLOCK_BYTES = 16 << 10
REPEATS = 3
START_TIMEOUT_S = 60.0  # An interpreter and its imports, on a machine under load.
READ_TIMEOUT_S = 20.0

OWNER, READER = (
    Address(EngineId("self-test-owner"), Epoch(1)),
    Address(EngineId("self-test-reader"), Epoch(2)),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result for one transport: a speed, for blocks of 16 KiB in any order, or an error."""

    name: str
    gb_per_s: float | None
    error: str | None = None
    way: str = ""  # The peer's `way` (`PeerHandle.way`).


def self_test(names: Sequence[str]) -> list[Outcome]:
    """Takes 1 to 2 s, mostly to start the other process. Never raises for a transport that fails."""
    spawn = get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_own, args=(theirs, tuple(names)), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(START_TIMEOUT_S):
            return [Outcome(name, None, "the other process did not start in time") for name in names]
        endpoints: dict[str, bytes | str] = ours.recv()
        return [_try(name, endpoints[name]) for name in names]
    except EOFError:
        return [Outcome(name, None, "the other process died") for name in names]
    finally:
        ours.close()
        process.kill()
        process.join()
        process.close()


def _try(name: str, endpoint: bytes | str) -> Outcome:
    if isinstance(endpoint, str):
        return Outcome(name, None, endpoint)
    try:
        transport = make_transport(name, address=READER)
        try:
            gb_per_s, way = _measure(transport, endpoint)
            return Outcome(name, gb_per_s, way=way)
        finally:
            transport.close()
    except BatonError as error:
        return Outcome(name, None, str(error))


def _measure(transport: Transport, endpoint: bytes) -> tuple[float, str]:
    memory = np.zeros(TOTAL_BYTES, dtype=np.uint8)
    transport.register([Region(memory.ctypes.data, memory.nbytes)])
    peer = transport.connect(OWNER, endpoint)
    prepared = transport.prepare(peer, [CopySpan(0, 0, BLOCK_BYTES, 0, 0, BLOCK_BYTES, BLOCK_BYTES)])
    rng = np.random.default_rng(1)
    local = rng.permutation(TOTAL_BYTES // BLOCK_BYTES)
    remote = rng.permutation(TOTAL_BYTES // BLOCK_BYTES)
    took_s = min(_read(transport, prepared, local.tolist(), remote.tolist()) for _ in range(REPEATS))
    blocks = memory.reshape(-1, BLOCK_BYTES)
    if not np.array_equal(blocks[local], _content().reshape(-1, BLOCK_BYTES)[remote]):
        raise TransferError("the bytes that arrived differ from those sent")
    return TOTAL_BYTES / took_s / 1e9, peer.way


def _read(transport: Transport, prepared: Prepared, local: list[int], remote: list[int]) -> float:
    started = time.perf_counter()
    transport.post_read(prepared, local, remote)
    if not transport.wait_completion(READ_TIMEOUT_S):
        raise TransferError(f"a read of {TOTAL_BYTES >> 20} MiB did not end within {READ_TIMEOUT_S:g} s")
    (completion,) = transport.poll()
    if not completion.ok:
        raise TransferError(completion.error or "the read failed")
    return time.perf_counter() - started


def _content() -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    return np.random.default_rng(0).integers(0, 256, TOTAL_BYTES, dtype=np.uint8)


def _own(pipe: Connection, names: tuple[str, ...]) -> None:
    memory = _content()
    with contextlib.suppress(OSError):  # Memory like the embedded engine's cache.
        sealed = np.frombuffer(allocate_sealed(TOTAL_BYTES, "baton-self-test"), dtype=np.uint8)
        sealed[:] = memory
        memory = sealed
    regions = [Region(memory.ctypes.data, memory.nbytes)]
    endpoints: dict[str, bytes | str] = {}
    opened: list[Transport] = []
    for name in names:
        try:
            opened.append(make_transport(name, address=OWNER))
            endpoints[name] = opened[-1].register(regions)
        except BatonError as error:
            endpoints[name] = str(error)
    pipe.send(endpoints)
    pipe.poll(None)  # Waits until it is killed or its parent is gone.
