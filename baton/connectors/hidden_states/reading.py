"""Reads the file that an answer names, as soon as it exists.

hidden_states   [tokens, requested layers, hidden size]
token_ids       [tokens]

The file's metadata has "layer_ids", in the order of the second dimension, and "final_norm": whether states of
the last layer are taken after the model's final norm ("applied", as in transformers) or before it
("not applied").
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

POLL_INTERVAL_S = 0.01


def load_hidden_states(path: str | Path, timeout_s: float = 30.0) -> dict[str, torch.Tensor]:
    """Waits for the file, which appears complete. Raises TimeoutError if it does not."""
    from safetensors.torch import load_file

    deadline_s = time.monotonic() + timeout_s
    while not Path(path).exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError(
                f"{path} was not written within {timeout_s:g} s; look for the reason in the engine's log"
            )
        time.sleep(POLL_INTERVAL_S)
    return load_file(path)
