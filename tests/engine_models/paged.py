"""A model over a paged cache that runs step by step, its prompts, and the same model in transformers."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.core.config import CacheConfig, ModelConfig
from baton.core.kv_groups import KVCacheGroup, layer_name
from baton.core.states import state_bytes
from baton.engine.attention.kv_memory import allocate_kv_cache
from baton.engine.forward_context import AttentionMetadata, ForwardContext, build_attention_metadata
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
        states = frozenset(config.state_layers)
        layers = range(config.num_hidden_layers)
        groups = [KVCacheGroup(tuple(layer for layer in layers if layer not in states))]
        if states:
            groups.append(KVCacheGroup(config.state_layers))
        self.model: Decoder = build_model(config, group, device, kv_cache_groups=groups)
        load_weights(self.model, config.model)
        self.kv_caches: dict[str, torch.Tensor] = {}
        if attending := groups[0].layers:
            cache = CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=NUM_BLOCKS)
            attention = KVCacheGroup(attending)
            self.kv_caches |= allocate_kv_cache(config, cache, rank, size, device, groups=(attention,))
        row = state_bytes(config.state_parts, tp_rank=rank, tp_size=size)
        for layer in config.state_layers:
            # Not zeros, and with gaps between the pages: a new request may not read an old state.
            pages = torch.randint(256, (NUM_BLOCKS, row + 64), dtype=torch.uint8, device=device)
            self.kv_caches[layer_name(layer)] = pages[:, :row]
        self._num_groups = len(groups)
        self._device = device

    def step(self, requests: Sequence[tuple[list[int], int, list[int]]]) -> torch.Tensor:
        """Logits of every token; a request is (tokens of this step, tokens computed before, block ids)."""
        tokens, computed, blocks = zip(*requests, strict=True)
        metadata = build_attention_metadata(computed, [len(t) for t in tokens], blocks, BLOCK_SIZE)
        ids = torch.tensor([token for request in tokens for token in request], device=self._device)
        positions = metadata.positions.to(self._device)
        with torch.inference_mode():
            hidden = self.model(ids, positions, self.context(metadata))
            return self.model.compute_logits(hidden)

    def context(self, metadata: AttentionMetadata) -> ForwardContext:
        """Attention and states use the same block ids, of pages of their own."""
        return ForwardContext(metadata, self.kv_caches, group_metadata=(metadata,) * self._num_groups)

    def greedy_of_each(
        self, prompts: Sequence[list[int]], num_tokens: int, tables: Sequence[list[int]]
    ) -> list[list[int]]:
        """Answers of prompts that are computed together. Each table has its own blocks."""
        answers: list[list[int]] = [[] for _ in prompts]
        tokens, computed = list(prompts), [0] * len(prompts)
        for _ in range(num_tokens):
            logits = self.step(list(zip(tokens, computed, tables, strict=True)))
            ends = list(itertools.accumulate(map(len, tokens)))
            computed = [before + len(new) for before, new in zip(computed, tokens, strict=True)]
            tokens = [[int(logits[end - 1].argmax())] for end in ends]
            for answer, new in zip(answers, tokens, strict=True):
                answer += new
        return answers

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


def assert_greedy(reference: Any, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> None:
    """Assert that each token of each answer has the largest logit after the tokens before it.

    So the answers are those of `reference.generate`, but one forward computes them all.
    """
    wholes = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    longest = max(map(len, wholes))
    padded = torch.tensor([[*whole, *[0] * (longest - len(whole))] for whole in wholes])
    with torch.inference_mode():
        greedy = reference(padded, use_cache=False).logits.argmax(-1).tolist()
    for prompt, answer, tokens in zip(prompts, answers, greedy, strict=True):
        assert answer == tokens[len(prompt) - 1 :][: len(answer)], f"a prompt of {len(prompt)} tokens"


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
