"""Shared storage: the gain of files for a prompt that returns (`returns`).

`baton bench tiers` measures the files themselves.

    python -m lab.bench.shared_storage                      a few minutes; JSON after the tables
    python -m lab.bench.shared_storage --out FILE           and writes the JSON to a file
    TMPDIR=/mnt/kv python -m lab.bench.shared_storage       files in that folder; they are removed again

All reads are from the page cache, so the time of a disk or network is not included.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from baton.connectors.storage.stores.settings import CHUNK_TOKENS
from baton.core.config import KVTransferConfig
from baton.engine.llm import LLM
from baton.stores.base.chunk_name import SUFFIX
from lab.bench.returns import (
    Measured,
    measure_returns,
    print_returns,
    run_command,
)

PATIENCE_S = 120.0
RATIO_MIN = 20.0  # Computing over loading.
LOOK_S = 0.01


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
    chunk_tokens: int = CHUNK_TOKENS,
    model: Path | None = None,
) -> Measured:
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        kept = Path(folder) / "kv"
        transfer = KVTransferConfig(
            kv_connector="BatonSharedStorageConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "path": str(kept),
                "chunk_tokens": chunk_tokens,
                "recompute_if_faster_by_s": None,
            },
        )
        written = Written(kept, prompt_tokens // chunk_tokens)
        return {
            "returns": measure_returns(
                transfer, prompt_tokens, repeats, model=model, wait_stored=written.wait
            )
        }


def print_tables(measured: Measured, console: Console) -> None:
    print_returns(measured["returns"], "files", console, ratio_min=RATIO_MIN)


def main(arguments: Sequence[str] = ()) -> int:
    return run_command("lab.bench.shared_storage", arguments, measure, print_tables)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
