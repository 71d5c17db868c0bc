"""Engines of models with recurrent states: tokens equal those of transformers, with states found again."""

from pathlib import Path

import pytest
import torch

from baton.core.config import CacheConfig, EngineConfig, SchedulerConfig
from baton.engine.api import SamplingParams
from baton.engine.checkpoints.checkpoint import load_model_config
from baton.engine.checkpoints.random_model import write_checkpoint
from baton.engine.llm import LLM
from tests.engine_core.test_llm import tokens_of
from tests.engine_models.paged import VOCAB, load_reference, prompt_of

BLOCK_SIZE = 8
NUM_TOKENS = 32
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SHARED = prompt_of(1, 5 * BLOCK_SIZE)
PROMPTS = [
    *(prompt_of(length, length) for length in (1, 2, 7, 8, 9, 15, 16, 17, 23, 24, 25, 60)),
    *(SHARED + prompt_of(length, length) for length in (1, 5, 20)),
]

Expected = list[list[int]]


@pytest.fixture(scope="module", params=["mamba2", "granite_hybrid", "qwen3_next"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("model"),
        family=request.param,
        hidden=64,
        layers=6,
        heads=4,
        vocab=VOCAB,
        max_position=256,
    )


@pytest.fixture(scope="module")
def expected(folder: Path) -> Expected:
    reference = load_reference(folder)
    with torch.inference_mode():
        return [
            reference.generate(
                torch.tensor([prompt]),
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )[0, len(prompt) :].tolist()
            for prompt in PROMPTS
        ]


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [0, 7])
def test_tokens_are_those_of_transformers_also_after_a_hit(
    folder: Path, expected: Expected, chunk: int
) -> None:
    config = EngineConfig(
        model_config=load_model_config(folder),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=400),
        scheduler_config=SchedulerConfig(max_num_batched_tokens=64, long_prefill_token_threshold=chunk),
    )
    with LLM(config) as llm:
        first = llm.generate(PROMPTS, GREEDY)
        again = llm.generate(PROMPTS, GREEDY)
    assert tokens_of(first) == expected
    assert tokens_of(again) == expected
    assert sum(answer.num_cached_tokens for answer in again) > 0
