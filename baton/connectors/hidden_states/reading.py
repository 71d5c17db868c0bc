"""For whoever asked: the file that the answer named, once it is there.

hidden_states   [tokens, layers asked for, hidden size]
token_ids       [tokens]

The file's metadata has "layer_ids", in the order of the second dimension, and "final_norm": whether states of
the last layer are those behind the model's final norm ("applied", as in transformers) or not ("not applied").
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LOOK_S = 0.01


def load_hidden_states(path: str | Path, timeout_s: float = 30.0) -> dict[str, torch.Tensor]:
    """Waits until the file is there, which it is whole. Raises TimeoutError if it does not come."""
    from safetensors.torch import load_file

    deadline_s = time.monotonic() + timeout_s
    while not Path(path).exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError(
                f"{path} has not been written in {timeout_s:g} s; the engine's log may say why"
            )
        time.sleep(LOOK_S)
    return load_file(path)
