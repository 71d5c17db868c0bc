"""A small model and its answers, for tests that start engines as processes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.checkpoints.checkpoint import load_model_config
from baton.checkpoints.random_model import write_checkpoint
from baton.core.config import EngineConfig
from baton.engine.api import SamplingParams
from baton.engine.llm import LLM


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A very small checkpoint; its heads can be split over two ranks."""
    folder = tmp_path_factory.mktemp("model") / "small"
    write_checkpoint(folder, family="qwen3", hidden=64, layers=2, heads=4, kv_heads=2, seed=0)
    return folder


@pytest.fixture(scope="module")
def expected(model: Path) -> Iterator[Callable[[list[int]], list[int]]]:
    """The first 12 tokens of a single engine's answer."""
    with LLM(EngineConfig(model_config=load_model_config(model))) as llm:

        def answer(prompt: list[int]) -> list[int]:
            params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
            return llm.generate([prompt], params)[0].token_ids

        yield answer
