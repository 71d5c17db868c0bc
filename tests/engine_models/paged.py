"""A model over a paged cache that runs step by step, its prompts, and the same model in transformers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.core.config import CacheConfig, ModelConfig
from baton.engine.attention.kv_memory import allocate_kv_cache
from baton.engine.forward_context import ForwardContext, build_attention_metadata
from baton.engine.models import Decoder, TensorParallelGroup, build_model, load_weights

BLOCK_SIZE = 8
NUM_BLOCKS = 64
VOCAB = 768

# All block ids of the pool, in random order.
SHUFFLED_BLOCKS: list[int] = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(0)).tolist()


class PagedModel:
    """A model, its cache, and one step at a time."""

    def __init__(
        self, config: ModelConfig, group: TensorParallelGroup | None = None, *, device: str = "cpu"
    ) -> None:
        rank, size = (group.rank, group.size) if group is not None else (0, 1)
        self.model: Decoder = build_model(config, group, device)
        load_weights(self.model, config.model)
        cache = CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=NUM_BLOCKS)
        self.kv_caches = allocate_kv_cache(config, cache, rank, size, device)
        self._device = device

    def step(self, requests: Sequence[tuple[list[int], int, list[int]]]) -> torch.Tensor:
        """Logits of every token; a request is (tokens of this step, tokens computed before, block ids)."""
        tokens, computed, blocks = zip(*requests, strict=True)
        metadata = build_attention_metadata(computed, [len(t) for t in tokens], blocks, BLOCK_SIZE)
        ids = torch.tensor([token for request in tokens for token in request], device=self._device)
        positions = metadata.positions.to(self._device)
        with torch.inference_mode():
            hidden = self.model(ids, positions, ForwardContext(metadata, self.kv_caches))
            return self.model.compute_logits(hidden)

    def greedy(self, prompt: list[int], num_tokens: int, block_ids: list[int]) -> list[int]:
        logits = self.step([(prompt, 0, block_ids)])
        output = [int(logits[-1].argmax())]
        while len(output) < num_tokens:
            logits = self.step([([output[-1]], len(prompt) + len(output) - 1, block_ids)])
            output.append(int(logits[-1].argmax()))
        return output


CheckpointOf = Callable[[str], Path]
PagedModelOf = Callable[[str], PagedModel]


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCAB, (num_tokens,), generator=generator).tolist()


def load_reference(folder: Path, device: str = "cpu") -> Any:
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        return model.eval().to(device)
    finally:
        transformers.utils.logging.enable_progress_bar()
