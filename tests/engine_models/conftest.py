"""Small checkpoints, written once, and a driver that runs a model over a paged cache."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from baton.core.config import CacheConfig, ModelConfig
from baton.engine.attention.kv_memory import allocate_kv_cache
from baton.engine.checkpoints.checkpoint import load_model_config
from baton.engine.checkpoints.random_model import write_checkpoint
from baton.engine.forward_context import ForwardContext, build_attention_metadata
from baton.engine.models import Decoder, TensorParallelGroup, build_model, load_weights

BLOCK_SIZE = 8
NUM_BLOCKS = 64

# Two KV heads of four query heads, and a window shorter than the prompts of the tests.
SMALL = {"hidden": 64, "layers": 4, "heads": 4, "kv_heads": 2, "vocab": 768, "max_position": 512}
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {"family": "llama", "rope_scaling": "llama3"},
    "mistral": {"family": "mistral", "sliding_window": 24},
    "qwen2": {"family": "qwen2", "sliding_window": 24, "tie_word_embeddings": True},
    "qwen3": {"family": "qwen3", "head_dim": 24, "rope_scaling": "linear"},
    "gemma3": {"family": "gemma3", "sliding_window": 24, "tie_word_embeddings": True},
    "gpt_oss": {"family": "gpt_oss", "sliding_window": 24, "rope_scaling": "yarn"},
}


class PagedModel:
    """A model, its cache, and one step at a time."""

    def __init__(
        self, config: ModelConfig, group: TensorParallelGroup | None = None, *, device: str = "cpu"
    ) -> None:
        rank, size = (group.rank, group.size) if group is not None else (0, 1)
        self.model: Decoder = build_model(config, rank, size, device, group=group)
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


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("checkpoints")

    def make(name: str) -> Path:
        if not (root / name).exists():
            write_checkpoint(root / name, seed=len(name), **{**SMALL, **FAMILIES[name]})  # type: ignore[arg-type]
        return root / name

    return make


@pytest.fixture(scope="session")
def paged_model_of(checkpoint_of: Callable[[str], Path]) -> Callable[[str], PagedModel]:
    made: dict[str, PagedModel] = {}

    def make(name: str) -> PagedModel:
        if name not in made:
            made[name] = PagedModel(load_model_config(checkpoint_of(name)))
        return made[name]

    return make


@pytest.fixture(scope="session")
def paged_model_type() -> type[PagedModel]:
    return PagedModel


@pytest.fixture(scope="session")
def block_size() -> int:
    return BLOCK_SIZE


@pytest.fixture(scope="session")
def shuffled_blocks() -> list[int]:
    """All block ids of the pool, in random order."""
    generator = torch.Generator().manual_seed(0)
    return torch.randperm(NUM_BLOCKS, generator=generator).tolist()


@pytest.fixture(scope="session")
def prompt_of() -> Callable[[int, int], list[int]]:
    def make(seed: int, num_tokens: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(4, SMALL["vocab"], (num_tokens,), generator=generator).tolist()

    return make
