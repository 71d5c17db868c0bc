"""Stores chunks with LMCache's LocalDiskBackend and loads them; run by `lab.bench.lmcache_disk`.

    vLLM's python, with LMCache on PYTHONPATH
    python lmcache_program.py FOLDER CHUNKS LAYERS TOKENS WIDTH    then lines `put`, `get`, `remove` -> `done`

A chunk is float32 of [2, LAYERS, TOKENS, WIDTH]. `put` first copies it into LMCache's memory, as in an
engine, and `get` copies it out. LMCache neither synchronises files nor verifies what it reads.
"""

import asyncio
import importlib
import sys
import threading
from typing import Any

import torch

ANSWER = "done"
TIMEOUT_S = 120.0


class Disk:
    def __init__(self, folder: str, num_chunks: int, layers: int, tokens: int, width: int) -> None:
        config: Any = importlib.import_module("lmcache.v1.config").LMCacheEngineConfig.from_defaults(
            chunk_size=tokens,
            local_disk=folder,
            max_local_disk_size=4.0,
            max_local_cpu_size=1.0,
            local_cpu=False,  # Otherwise `get` would find the chunk in memory.
            lmcache_instance_id="bench",
        )
        metadata: Any = importlib.import_module("lmcache.v1.metadata").LMCacheMetadata(
            model_name="bench",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.float32,
            kv_shape=(layers, 2, tokens, 1, width),
        )
        backends = "lmcache.v1.storage_backend"
        memory: Any = importlib.import_module(f"{backends}.local_cpu_backend").LocalCPUBackend
        disk: Any = importlib.import_module(f"{backends}.local_disk_backend").LocalDiskBackend
        key: Any = importlib.import_module("lmcache.utils").CacheEngineKey
        self._format = importlib.import_module("lmcache.v1.memory_management").MemoryFormat.KV_2LTD
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        self._memory = memory(config, metadata, dst_device="cpu")
        self._disk = disk(config, loop, self._memory, dst_device="cpu", metadata=metadata)
        self._keys = [key("bench", 1, 0, number, torch.float32) for number in range(num_chunks)]
        self._chunks = torch.rand(num_chunks, 2, layers, tokens, width)
        self._loaded = torch.zeros_like(self._chunks)

    def put(self) -> None:
        written = threading.Semaphore(0)
        for key, chunk in zip(self._keys, self._chunks, strict=True):
            allocated = self._memory.allocate(chunk.shape, chunk.dtype, self._format)
            allocated.tensor.copy_(chunk)
            self._disk.submit_put_task(key, allocated, on_complete_callback=lambda key: written.release())
            allocated.ref_count_down()
        for _ in self._keys:
            if not written.acquire(timeout=TIMEOUT_S):
                raise TimeoutError("LMCache has not written a chunk")

    def get(self) -> None:
        for loaded, target in zip(self._disk.batched_get_blocking(self._keys), self._loaded, strict=True):
            target.copy_(loaded.tensor)
            loaded.ref_count_down()

    def remove(self) -> None:
        if not torch.equal(self._loaded, self._chunks):
            raise ValueError("LMCache has loaded other bytes than it stored")
        self._loaded.zero_()
        for key in self._keys:
            self._disk.remove(key)


def main(arguments: list[str]) -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # LMCache's log goes to stdout.
    folder, *numbers = arguments
    disk = Disk(folder, *map(int, numbers))
    print(ANSWER, file=answers, flush=True)
    for line in sys.stdin:
        {"put": disk.put, "get": disk.get, "remove": disk.remove}[line.strip()]()
        print(ANSWER, file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
