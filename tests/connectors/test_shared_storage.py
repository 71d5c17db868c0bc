"""Engines that share a folder share prompts; and whatever is wrong with the folder, the tokens are right."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.core.config import ModelConfig
from baton.engine.checkpoint import load_model_config
from baton.engine.new_model import write_checkpoint
from tests.connectors.storage_world import (
    CHUNK,
    GREEDY,
    Start,
    fill,
    prompt_of,
    starting,
    storage,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, hidden=64, layers=2, heads=4, kv_heads=2, vocab=512)
    return load_model_config(folder, max_model_len=256)


@pytest.fixture
def start(model: ModelConfig) -> Iterator[Start]:
    with starting(model) as start_engine:
        yield start_engine


def test_what_one_engine_has_computed_another_reads(start: Start, tmp_path: Path) -> None:
    a, b, alone = start(storage(tmp_path)), start(storage(tmp_path)), start()
    prompt = prompt_of(43)
    said_by_a = fill(a, tmp_path, prompt, num_files=6)  # 48 of its 49 tokens: answers are stored too.
    (by_b,) = b.generate([prompt], GREEDY)
    (expected,) = alone.generate([prompt], GREEDY)
    assert said_by_a == by_b.token_ids == expected.token_ids
    assert by_b.num_transferred_tokens == 40


def test_prefixes_are_shared_and_the_rest_is_computed(start: Start, tmp_path: Path) -> None:
    a, b, alone = start(storage(tmp_path)), start(storage(tmp_path)), start()
    head = prompt_of(20)
    fill(a, tmp_path, head, num_files=3)
    for tail in (prompt_of(9, step=3), prompt_of(30, step=5), []):
        (by_b,) = b.generate([head + tail], GREEDY)
        (expected,) = alone.generate([head + tail], GREEDY)
        assert by_b.token_ids == expected.token_ids
        assert by_b.num_cached_tokens >= 16


def test_a_prompt_of_whole_chunks_computes_its_last_token(start: Start, tmp_path: Path) -> None:
    a, b, alone = start(storage(tmp_path)), start(storage(tmp_path)), start()
    prompt = prompt_of(4 * CHUNK)
    fill(a, tmp_path, prompt, num_files=4)
    (by_b,) = b.generate([prompt], GREEDY)
    (expected,) = alone.generate([prompt], GREEDY)
    assert by_b.token_ids == expected.token_ids
    assert by_b.num_transferred_tokens == len(prompt) - 1
