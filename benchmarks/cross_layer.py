"""Cross-layer blocks: the gain for a handoff when a block of all layers is contiguous, and the cost of a
decode step.

    per layer     a tensor for each layer: one run of bytes per layer and block
    cross-layer   layers inside of blocks: one run per block
    mixed         cross-layer on P, per layer on D

Two processes on different cores have the same bytes, in either layout, and scattered blocks. The speed of a
copy depends on the length of its runs, so the shapes differ in that. Compare ratios: all kinds of a shape
alternate on each transport.

    python -m benchmarks.cross_layer --out docs/benchmarks/cross_layer.json
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from baton.bench.machine import machine_line
from baton.bench.transports import CONSUMER, PRODUCER, TIMEOUT_S, make
from baton.core.config import CacheConfig
from baton.core.errors import ConfigError
from baton.core.ids import Address
from baton.core.layout import KEYS_AND_VALUES, CacheSpec, CopySpan, LayerLayout, RankLayout, Region
from baton.engine.attention.kv_memory import allocate_kv_cache
from baton.engine.checkpoints.checkpoint import load_model_config
from baton.engine.checkpoints.random_model import write_checkpoint
from baton.engine.forward_context import ForwardContext, build_attention_metadata
from baton.engine.models import Decoder, build_model, load_weights
from baton.protocol import block_runs
from baton.protocol.plan import plan_shares, share_spans
from baton.transport import make_transport
from baton.transport.base import Prepared, Transport
from baton.transport.memory import MemoryNetwork, MemoryTransport

TOTAL_BYTES = 64 << 20
REPEATS = 9
TRANSPORTS = ("local", "tcp", "nixl", "cuda_ipc")  # The last one only with a GPU.
KINDS = {
    "per layer": (False, False),
    "cross-layer": (True, True),
    "mixed": (True, False),
}  # (P, D) cross-layer.
DECODE_REQUESTS, DECODE_TOKENS, DECODE_STEPS = 8, 1000, 60


@dataclass(frozen=True)
class Shape:
    """Shape of one rank's cache."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    itemsize: int
    block_tokens: int = 16

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of a block of one layer."""
        return self.block_tokens * 2 * self.head_dim * self.itemsize

    @property
    def layer_bytes(self) -> int:
        return self.num_kv_heads * self.head_bytes

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.layer_bytes


SHAPES = (
    Shape("8 B parameters, one rank of eight", 32, 1, 128, 2),
    Shape("90 M parameters, float32", 12, 4, 64, 4),
    Shape("8 B parameters, one rank", 32, 8, 128, 2),
)


@dataclass(frozen=True)
class Row:
    transport: str
    shape: str
    kind: str
    num_descriptors: int  # Runs of bytes, before neighbouring blocks merge.
    gb_per_s: float  # Median.
    ratio: float  # Ratio to "per layer" in the same round; median.


def spans_of(local: RankLayout, remote: RankLayout) -> Sequence[CopySpan]:
    share = plan_shares(local, {0: remote})[0]
    return share_spans(local, remote, share, block_runs.Shape(0, 0, local.block_tokens))


def layout_of(shape: Shape, region: Region, *, is_together: bool) -> RankLayout:
    num_blocks = region.nbytes // shape.block_bytes
    stride = shape.block_bytes if is_together else shape.layer_bytes
    spec = CacheSpec(KEYS_AND_VALUES, "float32" if shape.itemsize == 4 else "bfloat16", shape.num_kv_heads)
    from_layer = shape.layer_bytes if is_together else num_blocks * shape.layer_bytes
    return RankLayout(
        tp_rank=0,
        tp_size=1,
        num_blocks=num_blocks,
        block_tokens=shape.block_tokens,
        regions=(region,),
        layers=tuple(
            LayerLayout(
                f"layer.{layer}", spec, 0, layer * from_layer, stride, shape.head_bytes, shape.head_bytes
            )
            for layer in range(shape.num_layers)
        ),
    )


def run(total_bytes: int = TOTAL_BYTES, repeats: int = REPEATS) -> list[Row]:
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[0]})
    try:
        rows: list[Row] = []
        with _producer(total_bytes, cpus[-1]) as pipe:
            for name, (endpoint, theirs) in pipe.recv().items():
                transport = _transport(name, CONSUMER, cpus[0])
                memory = _memory(theirs.device, total_bytes)
                rows += _measure_transport(name, transport, endpoint, theirs, _region(memory), repeats)
        network, kept = MemoryNetwork(), _memory("cpu", total_bytes)
        owner = MemoryTransport(PRODUCER, network)
        endpoint = owner.register([_region(kept)])
        reader, memory = MemoryTransport(CONSUMER, network), _memory("cpu", total_bytes)
        rows += _measure_transport("memory", reader, endpoint, _region(kept), _region(memory), repeats)
        owner.close()
        return rows
    finally:
        os.sched_setaffinity(0, cpus)


def _measure_transport(
    name: str,
    transport: Transport,
    endpoint: bytes,
    theirs: Region,
    ours: Region,
    repeats: int,
) -> list[Row]:
    rows: list[Row] = []
    with contextlib.closing(transport):
        transport.register([ours])
        peer = transport.connect(PRODUCER, endpoint)
        for shape in SHAPES:
            rng = np.random.default_rng(shape.block_bytes)
            num_blocks = ours.nbytes // shape.block_bytes
            local, remote = rng.permutation(num_blocks).tolist(), rng.permutation(num_blocks).tolist()
            reads: dict[str, Callable[[], None]] = {}
            descriptors: dict[str, int] = {}
            for kind, (is_theirs_together, is_ours_together) in KINDS.items():
                spans = spans_of(
                    layout_of(shape, ours, is_together=is_ours_together),
                    layout_of(shape, theirs, is_together=is_theirs_together),
                )
                descriptors[kind] = len(spans) * num_blocks
                reads[kind] = partial(_read, transport, transport.prepare(peer, spans), local, remote)
            nbytes = num_blocks * shape.block_bytes
            seconds = _alternately(reads, repeats)
            for kind, taken in seconds.items():
                ratios = [base / this for base, this in zip(seconds["per layer"], taken, strict=True)]
                speed = nbytes / statistics.median(taken) / 1e9
                rows.append(Row(name, shape.name, kind, descriptors[kind], speed, statistics.median(ratios)))
    return rows


def _memory(device: str, total_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (total_bytes,), dtype=torch.uint8, device=device)


def _region(memory: torch.Tensor) -> Region:
    return Region(memory.data_ptr(), memory.nbytes, str(memory.device))


def _transport(name: str, address: Address, cpu: int) -> Transport:
    """Make a transport. Raises ConfigError if it is not available."""
    return make_transport(name, address=address) if name == "cuda_ipc" else make(name, address, cpu)


def _read(
    transport: Transport, prepared: Prepared, local_blocks: Sequence[int], remote_blocks: Sequence[int]
) -> None:
    transport.post_read(prepared, local_blocks, remote_blocks)
    assert transport.wait_completion(TIMEOUT_S), "the read never ended"
    (completion,) = transport.poll()
    assert completion.ok, completion.error


def _alternately(calls: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each call by round, after a warm-up round."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(repeats + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if round_:
                seconds[name].append(time.perf_counter() - started)
    return seconds


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
    memories = {"cpu": _memory("cpu", total_bytes)}
    if torch.cuda.is_available():
        memories["cuda"] = _memory("cuda:0", total_bytes)
    transports: dict[str, Transport] = {}
    offers: dict[str, tuple[bytes, Region]] = {}
    for name in TRANSPORTS:
        memory = memories.get("cuda" if name == "cuda_ipc" else "cpu")
        if memory is not None:
            with contextlib.suppress(ConfigError):  # NIXL is optional.
                transports[name] = _transport(name, PRODUCER, cpu)
                offers[name] = transports[name].register([_region(memory)]), _region(memory)
    pipe.send(offers)
    pipe.recv()
    for transport in transports.values():
        transport.close()


def decode_cost(num_steps: int = DECODE_STEPS) -> float:
    """Return the ratio of a decode step over cross-layer blocks to one over a tensor per layer; median.

    A small model with a long context, so that attention, the only affected part, is much of the step.
    """
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        write_checkpoint(folder, hidden=256, layers=6, heads=8, kv_heads=4, vocab=512)
        config = load_model_config(folder, max_model_len=2 * DECODE_TOKENS)
        model = build_model(config)
        load_weights(model, config.model)
    blocks_each = DECODE_TOKENS // 16 + 1
    num_blocks = DECODE_REQUESTS * blocks_each
    cache_config = CacheConfig(num_gpu_blocks=num_blocks)
    order = np.random.default_rng(0).permutation(num_blocks).reshape(DECODE_REQUESTS, -1)
    metadata = build_attention_metadata(
        [DECODE_TOKENS] * DECODE_REQUESTS, [1] * DECODE_REQUESTS, list(order), cache_config.block_size
    )
    steps = {
        kind: _decode_step(model, ForwardContext(metadata, caches))
        for kind, caches in (
            ("per layer", allocate_kv_cache(config, cache_config, 0, 1, "cpu", layout="LBHNC")),
            ("cross-layer", allocate_kv_cache(config, cache_config, 0, 1, "cpu", layout="BLHNC")),
        )
    }
    seconds = _alternately(steps, num_steps)
    ratios = [this / base for base, this in zip(seconds["per layer"], seconds["cross-layer"], strict=True)]
    return statistics.median(ratios)


def _decode_step(model: Decoder, context: ForwardContext) -> Callable[[], None]:
    metadata = context.attn_metadata
    assert metadata is not None
    input_ids = torch.full((metadata.num_reqs,), 5)

    @torch.inference_mode()
    def step() -> None:
        model.forward(input_ids, metadata.positions, context)

    return step


def print_table(rows: Sequence[Row], console: Console) -> None:
    table = Table(title="Reads of scattered blocks; ratio to a tensor per layer", title_justify="left")
    for heading in ("transport", "cache", "blocks", "runs", "GB/s", "ratio"):
        table.add_column(heading, justify="right" if heading in ("runs", "GB/s", "ratio") else "left")
    for row in rows:
        figures = (str(row.num_descriptors), f"{row.gb_per_s:.2f}", f"{row.ratio:.2f}")
        table.add_row(row.transport, row.shape, row.kind, *figures)
    console.print(table)


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for the figures, as JSON")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 120)
    rows = run(repeats=options.repeats)
    print_table(rows, console)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cost = decode_cost()
    finally:
        torch.set_num_threads(threads)
    console.print(f"A decode step over cross-layer blocks takes {cost:.3f} of one over a tensor per layer.")
    if options.out is not None:
        kept = {"machine": machine_line(), "reads": [asdict(row) for row in rows], "decode_step_ratio": cost}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
