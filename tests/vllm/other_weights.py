"""Changes the weights of a running vLLM in place, as a trainer does: an extension of its workers."""

from __future__ import annotations

from typing import Any

import torch


class OtherWeights:
    def use_weights(self, seed: str) -> None:
        """0: those of the checkpoint. Equal seeds give equal weights in every engine."""
        model: Any = self.model_runner.model  # type: ignore[attr-defined]
        first = self.__dict__.setdefault(
            "_first_weights", {name: value.clone() for name, value in model.named_parameters()}
        )
        generator = torch.Generator().manual_seed(int(seed))
        with torch.no_grad():
            for name, value in model.named_parameters():
                value.copy_(first[name])
                if int(seed):
                    value.mul_(1 + torch.randn(value.shape, generator=generator).to(value.dtype))
