"""Engines exchange KV if their weights have the same numbers, and refuse each other by name if not."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec import structs

from baton.core.config import ModelConfig
from baton.engine.checkpoints.checkpoint import load_model_config
from baton.engine.checkpoints.random_model import write_checkpoint
from tests.connectors.engine_world import BLOCK, GREEDY, config_of, hand_over, hands_over, prompt_of, start_in
from tests.connectors.storage_world import config_of as storage_config
from tests.connectors.storage_world import fill, storage

PROMPTS = [prompt_of(17 * BLOCK + 1), prompt_of(8 * BLOCK + 1, step=11)]  # D computes one token of each.


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, hidden=32, layers=3, heads=4, vocab=512, max_position=256)
    return load_model_config(folder)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_equal_weights_give_the_tokens_of_a_single_engine(stack: ExitStack, model: ModelConfig) -> None:
    int4 = structs.replace(model, quantization="int4")
    p, d = (start_in(stack, config_of(int4, hands_over(name), num_blocks=100)) for name in "pd")
    for prompt in PROMPTS:
        decoded = hand_over(p, d, prompt)
        assert decoded.num_transferred_tokens > 0
        # P has all blocks but the last token's in its prefix cache, so it computes what D computes.
        assert decoded.token_ids == p.generate([prompt], GREEDY)[0].token_ids


@pytest.mark.parametrize("connector", ["Pull", "Push"])
def test_unlike_weights_are_refused_by_name(
    stack: ExitStack, model: ModelConfig, connector: str, caplog: pytest.LogCaptureFixture
) -> None:
    int4 = structs.replace(model, quantization="int4")
    p = start_in(stack, config_of(int4, hands_over("p", connector), num_blocks=100))
    d = start_in(stack, config_of(model, hands_over("d", connector), num_blocks=100))
    decoded = hand_over(p, d, PROMPTS[0])
    assert decoded.num_transferred_tokens == 0
    assert decoded.token_ids == d.generate([PROMPTS[0]], GREEDY)[0].token_ids
    digest = model.weights_digest
    assert f"weights: ours '{digest}', theirs '{digest} as int4 in groups of 32'" in caplog.text


def test_engines_find_the_files_of_their_own_weights_only(
    stack: ExitStack, model: ModelConfig, tmp_path: Path
) -> None:
    int4, prompt = structs.replace(model, quantization="int4"), prompt_of(43)
    a, alike, other = (
        start_in(stack, storage_config(config, storage(tmp_path))) for config in (int4, int4, model)
    )
    fill(a, tmp_path, prompt, num_files=6)
    assert other.generate([prompt], GREEDY)[0].num_transferred_tokens == 0
    assert alike.generate([prompt], GREEDY)[0].num_transferred_tokens == 40
