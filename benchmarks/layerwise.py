"""Loads layer by layer: the first token of a prompt whose beginning is stored, and whose rest is computed.

    whole       the request waits for its load, then computes
    layerwise   it computes while the later layers are loaded
    cached      the beginning is in the engine's own cache: no load at all

    python -m benchmarks.layerwise                  files from the page cache, then a store of 100 MiB/s
    python -m benchmarks.layerwise --mib-s 50

The engines are in one process, read the same files, and alternate. The slow store is the same files, with
reads that share a bandwidth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from baton.bench.handoff_system import Prompts, model_folder
from baton.bench.machine import machine_line
from baton.connectors.shared_storage.settings import CHUNK_TOKENS
from baton.core.config import CacheConfig, EngineConfig, KVTransferConfig, SchedulerConfig
from baton.engine.checkpoints.checkpoint import load_model_config
from baton.engine.llm import LLM
from baton.tiers.file_store import FileStore
from benchmarks.returns import BLOCK_TOKENS, FACTORY, ONE_TOKEN
from benchmarks.shared_storage import Written

MIB = 1 << 20


@contextmanager
def bandwidth(bytes_s: float | None) -> Iterator[None]:
    """All reads of files together have this bandwidth. None: they are as they are."""
    if bytes_s is None:
        yield
        return
    lock, free_s = threading.Lock(), 0.0
    read, read_part = FileStore.read, FileStore.read_part

    def wait(nbytes: int) -> None:
        nonlocal free_s
        with lock:
            free_s = max(free_s, time.monotonic()) + nbytes / bytes_s
            until_s = free_s
        time.sleep(max(0.0, until_s - time.monotonic()))

    def slow_read(self: FileStore, name: str, into: memoryview) -> int:
        nbytes = read(self, name, into)
        wait(nbytes)
        return nbytes

    def slow_read_part(self: FileStore, name: str, into: memoryview, start: int, nbytes: int) -> None:
        read_part(self, name, into, start, nbytes)
        wait(nbytes)

    with (
        mock.patch.object(FileStore, "read", slow_read),
        mock.patch.object(FileStore, "read_part", slow_read_part),
    ):
        yield


def measure(
    stored: int, new: int, repeats: int, rates: Sequence[float | None], *, model: Path | None = None
) -> list[dict[str, Any]]:
    """Seconds to the first token. `rates`: bytes a second of the store; None: files from the page cache."""
    model = model if model is not None else model_folder()
    prompts, rows = Prompts(seed=stored), []
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder, ExitStack() as stack:

        def start(role: str, **settings: Any) -> LLM:
            transfer = KVTransferConfig(
                kv_connector="BatonSharedStorageConnector",
                kv_role=role,  # type: ignore[arg-type]
                kv_connector_extra_config={
                    "path": folder,
                    "recompute_if_faster_by_s": None,
                    "prefetch_max_mib": 0,
                    "lookup_timeout_s": 30.0,
                    **settings,
                },
            )
            num_blocks = (stored + new) // BLOCK_TOKENS + 8
            config = EngineConfig(
                model_config=load_model_config(model, max_model_len=stored + new + BLOCK_TOKENS),
                cache_config=CacheConfig(block_size=BLOCK_TOKENS, num_gpu_blocks=num_blocks),
                scheduler_config=SchedulerConfig(max_num_batched_tokens=2048),
                kv_transfer_config=transfer,
            )
            return stack.enter_context(LLM(config, FACTORY))

        writer = start("kv_producer")
        readers = {
            "whole": start("kv_consumer"),
            "layerwise": start("kv_consumer", layerwise=True, layer_wait_s=5.0),
        }
        written = Written(Path(folder), stored // CHUNK_TOKENS)
        for rate in rates:
            seconds: dict[str, list[float]] = {name: [] for name in ("cached", *readers)}
            answers, loaded = [], []
            for _ in range(repeats):
                beginning, rest, other = prompts.of(stored), prompts.of(new), prompts.of(new)
                writer.generate([beginning], ONE_TOKEN)
                written.wait(writer)
                for name, engine in (*readers.items(), ("cached", readers["layerwise"])):
                    prompt = [*beginning, *(other if name == "cached" else rest)]
                    engine.settle(30.0)
                    if name != "cached":
                        engine.core.scheduler.reset_prefix_cache()
                    began_s = time.perf_counter()
                    with bandwidth(rate):
                        (completion,) = engine.generate([prompt], ONE_TOKEN)
                    seconds[name].append(time.perf_counter() - began_s)
                    if name != "cached":
                        answers.append(completion.token_ids)
                        loaded.append(completion.num_transferred_tokens)
            rows.append(
                {
                    "store_mib_s": None if rate is None else rate / MIB,
                    "stored_tokens": stored,
                    "new_tokens": new,
                    "loaded_tokens": min(loaded),
                    "seconds": seconds,
                    "layerwise_over_whole": statistics.median(
                        one / other for one, other in zip(seconds["layerwise"], seconds["whole"], strict=True)
                    ),
                    "tokens_are_equal": answers[::2] == answers[1::2],
                }
            )
    return rows


def main(arguments: Sequence[str] = ()) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layerwise")
    parser.add_argument("--stored", type=int, default=2048)
    parser.add_argument("--new", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--mib-s", type=float, default=100.0, help="bandwidth of the slow store")
    given = parser.parse_args(list(arguments))
    rows = measure(given.stored, given.new, given.repeats, [None, given.mib_s * MIB])
    print(json.dumps({"machine": machine_line(), "rows": rows}, indent=1))
    return 0 if all(row["tokens_are_equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
