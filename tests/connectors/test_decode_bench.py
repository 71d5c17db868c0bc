"""Decoding after synthetic KV: no prefill, the same answers every time, and marked as synthetic."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.connectors.decode_bench import BatonDecodeBenchConnector
from baton.connectors.decode_bench.halves import ANSWERED, DecodeBenchWorkerHalf
from baton.connectors.decode_bench.settings import DecodeBenchSettings
from baton.core.config import EngineConfig, ModelConfig
from baton.core.errors import ConfigError
from baton.engine.api import SamplingParams
from baton.engine.checkpoints.checkpoint import load_model_config
from baton.engine.checkpoints.random_model import write_checkpoint
from baton.engine.llm import LLM
from tests.connectors import engine_world
from tests.connectors.engine_world import FACTORY, WINDOW, ModelOf, start_in

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
PROMPT = [(7 * i) % 500 + 5 for i in range(50)]


def config_of(model: ModelConfig, num_blocks: int = 64, **extra: Any) -> EngineConfig:
    transfer = {"kv_connector": "BatonDecodeBenchConnector", "kv_connector_extra_config": extra}
    return engine_world.config_of(model, transfer, num_blocks=num_blocks, budget=2048)


class Start:
    def __init__(self, stack: ExitStack, model: ModelConfig) -> None:
        self.stack, self.model = stack, model

    def __call__(self, **options: Any) -> LLM:
        return start_in(self.stack, config_of(self.model, **options))


@pytest.fixture
def start(model: ModelConfig) -> Iterator[Start]:
    with ExitStack() as stack:
        yield Start(stack, model)


def caches_of(llm: LLM) -> list[torch.Tensor]:
    half = llm.core.executor.only_half()
    assert half is not None
    return list(half.worker_half._caches.values())  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("startup_fill", [False, True])
def test_only_the_last_prompt_token_is_computed(start: Start, startup_fill: bool) -> None:
    llm = start(startup_fill=startup_fill)
    (completion,) = llm.generate([PROMPT], GREEDY)
    assert completion.num_transferred_tokens == len(PROMPT) - 1
    assert len(completion.token_ids) == 6
    assert completion.kv_transfer_params == {ANSWERED: len(PROMPT) - 1}
    filled = sum(int((cache == 0.015).all(dim=(1, 2, 3)).sum()) for cache in caches_of(llm))
    assert filled >= 2 * 12, "all whole blocks of both layers before the last token"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "mistral"])
def test_only_blocks_within_a_window_are_filled(
    family: str, model_of: ModelOf, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(model_of(family), num_blocks=120)
    with (
        caplog.at_level(logging.WARNING),
        LLM(config, FACTORY) as llm,
    ):
        assert "block table" not in caplog.text
        (completion,) = llm.generate([PROMPT], GREEDY)
        assert completion.num_transferred_tokens == len(PROMPT) - 1
        groups = config.kv_cache_groups
        # 49 tokens have thirteen blocks; ten tokens and one more reach into four blocks.
        held = [13 if group.window is None else 13 - (49 - WINDOW) // 4 for group in groups]
        for cache in caches_of(llm):  # The prompt's own tokens follow in the last block.
            filled = int((cache == 0.015).any(dim=1).any(dim=1).any(dim=1).sum())
            assert filled == sum(held)
        assert len(caches_of(llm)) == 6 // len(groups)
        again = llm.generate([PROMPT, PROMPT[:30]], GREEDY)
        assert again[0].token_ids == completion.token_ids
        llm.core.scheduler.kv_cache.assert_empty()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mamba2", "granite_hybrid"])
def test_recurrent_states_begin_at_zero(family: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family=family)  # type: ignore[arg-type]
    answers = []
    for left_over in (0, 0x7F):  # 0x7F7F7F7F is 3.4e38.
        with LLM(config_of(load_model_config(tmp_path), num_blocks=120), FACTORY) as llm:
            half = llm.core.executor.only_half()
            assert half is not None
            for cache in half.worker_half._states:  # type: ignore[attr-defined]
                cache.fill_(left_over)
            (completion,) = llm.generate([PROMPT], GREEDY)
            assert completion.num_transferred_tokens == len(PROMPT) - 1
            (again,) = llm.generate([PROMPT], GREEDY)
            assert again.token_ids == completion.token_ids
            answers.append(completion.token_ids)
            llm.core.scheduler.kv_cache.assert_empty()
    assert len(answers[0]) == 6
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_answers_depend_on_the_settings_only(start: Start) -> None:
    def answer(**extra: Any) -> list[int]:
        (completion,) = start(fill_mean=0.0, fill_std=5.0, **extra).generate([PROMPT], GREEDY)
        return completion.token_ids

    assert answer(seed=1) == answer(seed=1)
    assert answer(seed=1) != answer(seed=2)


@pytest.mark.slow
def test_preemption_and_equal_prefixes_are_handled(start: Start) -> None:
    llm = start(num_blocks=32)  # Too few for all requests.
    prompts = [PROMPT[:40] + [number] * 5 for number in range(5)]
    many = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    completions = llm.generate(prompts, many)
    assert [len(completion.token_ids) for completion in completions] == [30] * 5
    llm.core.scheduler.kv_cache.assert_empty()


def test_it_warns_when_it_starts(model: ModelConfig, caplog: pytest.LogCaptureFixture) -> None:
    BatonDecodeBenchConnector.make_scheduler_half(config_of(model), None)
    assert "SYNTHETIC" in caplog.text


def test_a_cache_of_packed_bytes_is_refused() -> None:
    half = DecodeBenchWorkerHalf(DecodeBenchSettings())
    with pytest.raises(ConfigError, match=r"kv_caches\.layer: cannot be filled"):
        half.register_kv_caches({"layer": torch.zeros(4, 1, 4, 8, dtype=torch.uint8)})
