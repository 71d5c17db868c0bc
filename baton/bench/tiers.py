"""Tiers benchmark: chunks to and from files, compared with plain files of as many bytes in the same run.

    store          blocks -> chunk -> file, synchronised            plain write, fsync
    load           file -> proven -> blocks, from the page cache    plain read    into distinct memory
    load, direct   the same around the page cache                   direct read   1 MiB each, same threads
    lookup         of a prompt of 4,000 tokens, hashes given

15 chunks of 256 tokens of a model with 12 layers: 90 MiB. All moves alternate. TMPDIR selects the file
system.
"""

from __future__ import annotations

import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from rich.console import Console
from rich.table import Table

from baton.connectors.storage.stores.cache_blocks import CacheBlocks
from baton.connectors.storage.stores.layer_kinds import LayerKind
from baton.connectors.storage.stores.settings import CHUNK_TOKENS, StorageSettings
from baton.stores.backends.files import FileStore
from baton.stores.backends.tiers import Tiers
from baton.stores.base.aligned import AlignedMemory, AlignedPool
from baton.stores.base.chunk_name import ChunkName
from baton.stores.chunks.chunk import HEADER_BYTES_MAX, open_sealed, seal
from baton.stores.host.slots import SlotIndex
from baton.stores.policies.eviction import make_policy

LAYERS, BLOCK_TOKENS, HEADS, CONTENT = 12, 16, 4, 128  # 32 KiB per block and layer, in float32.
NUM_CHUNKS = 15  # Chunks of a prompt of 4,000 tokens.
NUM_BLOCKS = 250
STEP_CHUNKS = 8  # Chunks of a step of 2,048 tokens.
TURNS = 9
THREADS = StorageSettings(path="/").io_threads
KEY = b"a key of a length as any other"
DIRECT_BYTES = 1 << 20
PLAIN_WRITE, PLAIN_READ = "plain write", "plain read"
LOOKUPS = 200


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    gb_per_s: float
    of: str  # The limit, another row of the same run.
    ratio: float
    goal: float | None = None


@dataclass(frozen=True, slots=True)
class Lookup:
    where: str
    us: float
    goal_us: float


GOALS = {"store": 0.8, f"load, {THREADS} threads": 0.75, f"load, direct, {THREADS} threads": 0.9}


class Files:
    """The same bytes in chunks and in plain files."""

    def __init__(self, folder: Path, num_chunks: int = NUM_CHUNKS) -> None:
        chunk_blocks = CHUNK_TOKENS // BLOCK_TOKENS
        shape = (LAYERS, num_chunks * chunk_blocks, HEADS, BLOCK_TOKENS, CONTENT)
        caches = {f"layer {i}": layer for i, layer in enumerate(torch.rand(shape))}
        self._blocks = CacheBlocks(LayerKind(None, (0,), chunk_blocks, BLOCK_TOKENS), [caches])
        self._tables = torch.arange(shape[1]).view(num_chunks, chunk_blocks).tolist()
        self._names = [ChunkName("bench", secrets.token_bytes(32), 0) for _ in self._tables]
        self._stores = {is_direct: FileStore(folder, direct=is_direct) for is_direct in (False, True)}
        for store in self._stores.values():
            store.check()
        self._memory = AlignedMemory()
        self._bodies = AlignedPool(STEP_CHUNKS)
        self._plain = folder / "plain"
        self._plain.mkdir()
        self._content = secrets.token_bytes(self._blocks.form.nbytes)
        self._distinct = [bytearray(len(self._content)) for _ in self._tables]
        self.nbytes = len(self._content) * num_chunks

    def store(self) -> None:
        """Store like the connector's writer: the chunks of a step together."""
        chunks = list(self._chunks())
        for start in range(0, len(chunks), STEP_CHUNKS):
            bodies, values, form = [], [], self._blocks.form
            for name, table in chunks[start : start + STEP_CHUNKS]:
                bodies.append(self._bodies.take(form.nbytes))
                self._blocks.copy_out(table, form.body_in(bodies[-1]))
                values.append((str(name), self.sealed(name, memoryview(bodies[-1])[: form.nbytes])))
            assert self._stores[False].write_all(values) == [None] * len(values)
            for body in bodies:
                self._bodies.give_back(body)

    def load(self, num_threads: int = 1, *, is_direct: bool = False) -> None:
        """Loads as the connector's threads do: each takes the next chunk when its own is done."""
        with ThreadPoolExecutor(num_threads) as threads:
            list(threads.map(lambda each: self._load(each[0], each[1], is_direct), self._chunks()))

    def seal(self) -> None:
        """Compute only the MACs."""
        for name in self._names:
            self.sealed(name, memoryview(self._content))

    def sealed(self, name: ChunkName, body: memoryview) -> tuple[bytes, memoryview]:
        return seal(name, self._blocks.form.entries, body, KEY)

    def write_plain(self, *, fsync: bool = True) -> None:
        for index in range(len(self._tables)):
            with open(self._plain / str(index), "wb", buffering=0) as file:
                file.write(self._content)
                if fsync:
                    os.fsync(file.fileno())

    def read_plain(self) -> None:
        for index, memory in enumerate(self._distinct):
            fileno = os.open(self._plain / str(index), os.O_RDONLY)
            try:
                os.readv(fileno, [memory])
            finally:
                os.close(fileno)

    def read_direct(self, num_threads: int) -> None:
        with ThreadPoolExecutor(num_threads) as threads:
            list(threads.map(self._read_direct, range(len(self._tables))))

    def remove(self) -> None:
        self._stores[False].remove([str(name) for name in self._names])
        for file in self._plain.iterdir():
            file.unlink()

    def find(self) -> Callable[[], object]:
        tiers, names = Tiers([self._stores[False]]), [str(name) for name in self._names]
        return lambda: tiers.find(names)

    def _chunks(self) -> Iterable[tuple[ChunkName, list[int]]]:
        return zip(self._names, self._tables, strict=True)

    def _load(self, name: ChunkName, table: list[int], is_direct: bool) -> None:
        form = self._blocks.form
        memory = self._memory.take(HEADER_BYTES_MAX + form.nbytes)
        stored = memory[: self._stores[is_direct].read(str(name), memory)]
        body = open_sealed(stored, name, form.entries, form.nbytes, KEY)
        self._blocks.copy_in(form.body_in(body), table)

    def _read_direct(self, index: int) -> None:
        memory = self._memory.take(DIRECT_BYTES)
        fileno = os.open(self._plain / str(index), os.O_RDONLY | os.O_DIRECT)
        try:
            while os.readv(fileno, [memory]):
                pass
        finally:
            os.close(fileno)


def measure(
    folder: Path,
    more: Mapping[str, tuple[str, Callable[[], None]]] = MappingProxyType({}),
    *,
    num_chunks: int = NUM_CHUNKS,
    turns: int = TURNS,
    after_turn: Callable[[], None] = lambda: None,
) -> list[Row]:
    """`more`: further moves of as many bytes, and the row that each is compared with."""
    files = Files(folder, num_chunks)
    synchronised, direct = "plain write, fsync", f"direct read, {THREADS} threads"
    moves: dict[str, tuple[str, Callable[[], None]]] = {
        PLAIN_WRITE: (PLAIN_WRITE, lambda: files.write_plain(fsync=False)),
        synchronised: (synchronised, files.write_plain),
        "store": (synchronised, files.store),
        PLAIN_READ: (PLAIN_READ, files.read_plain),
        "MAC alone": (PLAIN_READ, files.seal),
        "load": (PLAIN_READ, files.load),
        f"load, {THREADS} threads": (PLAIN_READ, lambda: files.load(THREADS)),
        **more,
    }
    if files._stores[True].is_direct:
        moves[direct] = direct, lambda: files.read_direct(THREADS)
        moves[f"load, direct, {THREADS} threads"] = direct, lambda: files.load(THREADS, is_direct=True)
    seconds: dict[str, list[float]] = {name: [] for name in moves}
    for _ in range(turns):
        files.remove()  # A chunk that is stored is not stored again.
        for name, (_, move) in moves.items():
            seconds[name].append(_timed(move))
        after_turn()
    rates = {name: files.nbytes / statistics.median(taken) / 1e9 for name, taken in seconds.items()}
    return [
        Row(name, rate, moves[name][0], rate / rates[moves[name][0]], GOALS.get(name))
        for name, rate in rates.items()
    ]


def measure_lookups(folder: Path) -> list[Lookup]:
    files = Files(folder)
    files.store()
    keys = [number.to_bytes(32, "big") for number in range(NUM_BLOCKS)]
    index: SlotIndex[bytes] = SlotIndex(4 * NUM_BLOCKS, make_policy("lru", 4 * NUM_BLOCKS))
    for key in keys:
        reserved = index.reserve(key)
        assert reserved is not None
        index.end_store(reserved.entry, ok=True)
    looked_up: Mapping[str, tuple[float, Callable[[], object]]] = {
        f"memory, {NUM_BLOCKS} blocks": (50, lambda: index.num_found(keys)),
        f"files, {NUM_CHUNKS} chunks": (300, files.find()),
    }
    return [
        Lookup(where, statistics.median(_timed(look) for _ in range(LOOKUPS)) * 1e6, goal_us)
        for where, (goal_us, look) in looked_up.items()
    ]


def _timed(move: Callable[[], object]) -> float:
    began = time.perf_counter()
    move()
    return time.perf_counter() - began


def print_tables(rows: list[Row], lookups: list[Lookup], console: Console) -> None:
    table = Table(title="Chunks in files (median)", title_justify="left")
    for heading in ("what", "GB/s", "of", "ratio", "goal"):
        table.add_column(heading, justify="left" if heading in ("what", "of") else "right")
    for row in rows:
        goal = "" if row.goal is None else f"{row.goal:.2f}"
        table.add_row(row.what, f"{row.gb_per_s:.2f}", row.of, f"{row.ratio:.2f}", goal)
    console.print(table)
    for lookup in lookups:
        console.print(
            f"lookup of 4,000 tokens in {lookup.where}: {lookup.us:.0f} us (goal {lookup.goal_us:g})"
        )


def main() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="baton-bench-") as first,
        tempfile.TemporaryDirectory(prefix="baton-bench-") as second,
    ):
        print_tables(measure(Path(first)), measure_lookups(Path(second)), Console())


if __name__ == "__main__":
    main()
