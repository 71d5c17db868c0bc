"""Offload to host memory: its cost, and its gain for a prompt that returns.

copies    rows of host memory <-> an engine's blocks, compared with a memcpy of as many bytes; alternating
returns   a prompt that the engine's own cache has lost: loaded, compared with computed (`returns`)

python -m lab.bench.offload                     a minute or two; JSON after the tables
python -m lab.bench.offload --out FILE          and writes the JSON to a file
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from baton.connectors.storage.row_copies import row_copier
from baton.core.config import KVTransferConfig
from baton.stores.host.rows import HostRows
from lab.bench.returns import (
    Measured,
    measure_returns,
    median_rates,
    print_rates,
    print_returns,
    run_command,
)

COPY_LAYERS, COPY_BLOCKS = 12, 176  # Values of the model: 66 MiB in pieces of 32 KiB.
COPY_PIECE_BYTES = 32 << 10
COPY_TURNS = 15

CPU_GIB = 1.0  # Ten prompts of 4,000 tokens.
RATIO_MIN = 5.0  # Time of computing over loading.
OVER_CACHED_S = 0.04


def measure_copies(num_blocks: int, turns: int) -> Measured:
    """Return median GB/s; "memcpy" is one contiguous copy of the same number of bytes."""
    shape = (COPY_LAYERS, num_blocks, COPY_PIECE_BYTES)
    caches = {f"layer {i}": layer for i, layer in enumerate(torch.ones(shape, dtype=torch.uint8))}
    rows = HostRows(caches, num_blocks, copy=row_copier())
    nbytes = num_blocks * rows.row_bytes
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    in_order = list(range(num_blocks))
    shuffled = np.random.default_rng(0).permutation(num_blocks).tolist()
    copies: dict[str, Callable[[], None]] = {
        "memcpy": lambda: np.copyto(target, source),
        "store, neighbours": lambda: rows.store(in_order, in_order),
        "load, neighbours": lambda: rows.load(in_order, in_order),
        "store, shuffled": lambda: rows.store(shuffled, in_order),
        "load, shuffled": lambda: rows.load(shuffled, in_order),
    }
    rates = median_rates(nbytes, turns, copies)
    return {
        "mib": nbytes / 2**20,
        "piece_kib": COPY_PIECE_BYTES >> 10,
        "gb_per_s": rates,
        "of_memcpy": {name: rate / rates["memcpy"] for name, rate in rates.items()},
    }


def measure(
    prompt_tokens: int,
    repeats: int,
    *,
    num_blocks: int = COPY_BLOCKS,
    turns: int = COPY_TURNS,
    model: Path | None = None,
) -> Measured:
    transfer = KVTransferConfig(
        kv_connector="BatonOffloadConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"cpu_gib": CPU_GIB},
    )
    return {
        "copies": measure_copies(num_blocks, turns),
        "returns": measure_returns(transfer, prompt_tokens, repeats, model=model),
    }


def print_tables(measured: Measured, console: Console) -> None:
    copies = measured["copies"]
    title = f"Copies of {copies['mib']:.0f} MiB in pieces of {copies['piece_kib']} KiB"
    print_rates(title, "of memcpy", copies["gb_per_s"], copies["of_memcpy"], console)
    print_returns(
        measured["returns"], "host memory", console, ratio_min=RATIO_MIN, over_cached_s=OVER_CACHED_S
    )


def main(arguments: Sequence[str] = ()) -> int:
    return run_command("lab.bench.offload", arguments, measure, print_tables)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
