"""Shared storage: the cost of storing KV in files, and its gain for a prompt that returns.

    files     chunks of an engine's blocks <-> files, compared with plain files of as many bytes; alternating
    returns   a prompt that the engine's own cache has lost: loaded, compared with computed (`returns`)

    python -m benchmarks.shared_storage                      a few minutes; JSON after the tables
    python -m benchmarks.shared_storage --out FILE           and writes the JSON to a file
    TMPDIR=/mnt/kv python -m benchmarks.shared_storage       files in that folder; they are removed again

All reads are from the page cache, so the time of a disk or network is not included. Files are written through
to the disk, ours and the plain ones.
"""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from rich.console import Console

from baton.connectors.shared_storage.cache_blocks import CacheBlocks
from baton.connectors.shared_storage.form import bytes_of
from baton.connectors.shared_storage.layer_kinds import LayerKind
from baton.connectors.shared_storage.settings import CHUNK_TOKENS, StorageSettings
from baton.core.config import KVTransferConfig
from baton.engine.llm import LLM
from baton.tiers.aligned import AlignedMemory
from baton.tiers.chunk import HEADER_BYTES_MAX, open_sealed, seal
from baton.tiers.chunk_name import SUFFIX, ChunkName
from baton.tiers.file_store import FileStore
from benchmarks.returns import (
    BLOCK_TOKENS,
    Measured,
    measure_returns,
    median_rates,
    print_rates,
    print_returns,
    run_command,
)

LAYERS, BLOCK_SHAPE = 12, (4, BLOCK_TOKENS, 128)  # As in the model: 32 KiB per block and layer.
NUM_CHUNKS = 15  # Of 4,000 tokens: 90 MiB.
TURNS = 5
IO_THREADS = StorageSettings(path="/").io_threads
PLAIN_WRITE, PLAIN_READ = "plain write", "plain read"
PATIENCE_S = 120.0
LOOK_S = 0.01
KEY = b"a key of a length as any other"


class Files:
    """The same bytes in our files and in plain files."""

    def __init__(self, folder: Path, num_chunks: int) -> None:
        chunk_blocks = CHUNK_TOKENS // BLOCK_TOKENS
        shape = (LAYERS, num_chunks * chunk_blocks, *BLOCK_SHAPE)
        caches = {f"layer {i}": layer for i, layer in enumerate(torch.rand(shape))}
        self._blocks = CacheBlocks(LayerKind(None, (0,), chunk_blocks, BLOCK_TOKENS), [caches])
        self._tables = torch.arange(shape[1]).view(num_chunks, chunk_blocks).tolist()
        self._names = [ChunkName("bench", secrets.token_bytes(32), 0) for _ in self._tables]
        self._store, self._memory, self._plain = FileStore(folder), AlignedMemory(), folder / "plain"
        self._plain.mkdir()
        self._content = secrets.token_bytes(self._blocks.form.nbytes)
        self.nbytes = len(self._content) * num_chunks

    def store(self) -> None:
        for name, table in zip(self._names, self._tables, strict=True):
            body = self._blocks.copy_out(table)
            header, sealed = seal(name, self._blocks.form.entries, bytes_of(body), KEY)
            self._store.write(str(name), (header, sealed))

    def load(self, num_threads: int = 1) -> None:
        """Load as the connector's threads do: each takes the next chunk when its own is done."""
        with ThreadPoolExecutor(num_threads) as threads:
            list(threads.map(self._load_chunk, self._names, self._tables))

    def write(self) -> None:
        for index in range(len(self._tables)):
            with open(self._plain / str(index), "wb", buffering=0) as file:
                file.write(self._content)
                os.fsync(file.fileno())

    def read(self) -> None:
        for index in range(len(self._tables)):
            (self._plain / str(index)).read_bytes()

    def checksum(self) -> None:
        """Compute only the checksums."""
        for name in self._names:
            seal(name, self._blocks.form.entries, memoryview(self._content), KEY)

    def _load_chunk(self, name: ChunkName, table: list[int]) -> None:
        form = self._blocks.form
        memory = self._memory.take(HEADER_BYTES_MAX + form.nbytes)
        stored = memory[: self._store.read(str(name), memory)]
        self._blocks.copy_in(form.body_in(open_sealed(stored, name, form.entries, form.nbytes, KEY)), table)


def measure_files(folder: Path, num_chunks: int = NUM_CHUNKS, turns: int = TURNS) -> Measured:
    """Return median GB/s. Storing and loading include copies from and to blocks, and checksums."""
    kept = Files(folder, num_chunks)
    rates = median_rates(
        kept.nbytes,
        turns,
        {
            PLAIN_WRITE: kept.write,
            "store": kept.store,
            PLAIN_READ: kept.read,
            "checksum alone": kept.checksum,
            "load": kept.load,
            f"load, {IO_THREADS} threads": lambda: kept.load(IO_THREADS),
        },
    )
    return {
        "mib": kept.nbytes / 2**20,
        "num_files": num_chunks,
        "gb_per_s": rates,
        "of_plain": {
            name: rate / rates[PLAIN_WRITE if name.startswith(("store", PLAIN_WRITE)) else PLAIN_READ]
            for name, rate in rates.items()
        },
    }


class Written:
    """Waits until the files of each prompt exist: they are written while the next one is computed."""

    def __init__(self, folder: Path, files_per_prompt: int) -> None:
        self._folder = folder
        self._files_per_prompt = files_per_prompt
        self._num_expected = 0

    def wait(self, engine: LLM) -> None:
        """Wait for the files of one more prompt. Raises TimeoutError."""
        self._num_expected += self._files_per_prompt
        engine.settle(PATIENCE_S)  # Steps tell the ranks that they may write.
        deadline_s = time.monotonic() + PATIENCE_S
        while (num_written := len(list(self._folder.glob(f"*/*/*{SUFFIX}")))) < self._num_expected:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{num_written} of {self._num_expected} files in {self._folder}")
            time.sleep(LOOK_S)


def measure(
    prompt_tokens: int,
    repeats: int,
    *,
    num_chunks: int = NUM_CHUNKS,
    chunk_tokens: int = CHUNK_TOKENS,
    model: Path | None = None,
) -> Measured:
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        measured = {"files": measure_files(Path(folder), num_chunks)}
        kept = Path(folder) / "kv"
        transfer = KVTransferConfig(
            kv_connector="BatonSharedStorageConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"path": str(kept), "chunk_tokens": chunk_tokens},
        )
        written = Written(kept, prompt_tokens // chunk_tokens)
        measured["returns"] = measure_returns(
            transfer, prompt_tokens, repeats, model=model, wait_stored=written.wait
        )
    return measured


def print_tables(measured: Measured, console: Console) -> None:
    kept = measured["files"]
    title = f"{kept['num_files']} files, {kept['mib']:.0f} MiB"
    print_rates(title, "of plain files", kept["gb_per_s"], kept["of_plain"], console)
    print_returns(measured["returns"], "files", console)


def main(arguments: Sequence[str] = ()) -> int:
    return run_command("benchmarks.shared_storage", arguments, measure, print_tables)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
