"""Latent caches are handed over, stored and loaded: one head with slots of another width than K and V."""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from baton.core.config import ModelConfig
from baton.engine.checkpoints.checkpoint import load_model_config
from baton.engine.checkpoints.random_model import write_checkpoint
from baton.engine.core.engine_core import EngineCore
from tests.connectors import mirrored, offload_world
from tests.connectors.engine_world import (
    BLOCK,
    FACTORY,
    GREEDY,
    PATIENT,
    SETTLE_S,
    AnswerOf,
    Legs,
    ModelOf,
    answering,
    config_of,
    core_in,
    hand_over,
    hands_over,
    prompt_of,
    start_in,
)
from tests.connectors.storage_world import fill, starting, storage

pytestmark = pytest.mark.slow

FAMILIES = ["deepseek_v2", "deepseek_v3", "deepseek_v32"]  # The last has a second cache in each layer.
PROMPTS = [prompt_of(70), prompt_of(3), prompt_of(32, step=11), prompt_of(101, step=13)]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> ModelOf:
    def make(family: str) -> ModelConfig:
        folder = tmp_path_factory.mktemp(family)
        write_checkpoint(folder, family=family, hidden=32, layers=3, heads=4, vocab=512, max_position=256)
        return load_model_config(folder)

    return cache(make)


@pytest.fixture(scope="module")
def answer_of(model_of: ModelOf) -> Iterator[AnswerOf]:
    with answering(model_of) as answer:
        yield answer


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("block_of_p", "block_of_d"), [(4, 4), (4, 8), (8, 4)])
def test_a_pulled_prompt_gets_the_tokens_of_a_single_engine(
    stack: ExitStack, model_of: ModelOf, answer_of: AnswerOf, family: str, block_of_p: int, block_of_d: int
) -> None:
    model = model_of(family)
    p, d = (
        start_in(
            stack,
            config_of(model, hands_over(name, timers=PATIENT), num_blocks=100, block_size=block_size),
        )
        for name, block_size in (("p", block_of_p), ("d", block_of_d))
    )
    for prompt in PROMPTS:
        decoded = hand_over(p, d, prompt)
        assert decoded.token_ids == answer_of(family, prompt)
        assert decoded.num_transferred_tokens > 0
    p.settle(SETTLE_S)
    d.settle(SETTLE_S)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cross_layer_blocks", [False, True])
@pytest.mark.parametrize("stream", ["off", "chunk", "layer"])
def test_a_pushed_prompt_gets_the_tokens_of_a_single_engine(
    stack: ExitStack,
    model_of: ModelOf,
    answer_of: AnswerOf,
    family: str,
    stream: str,
    cross_layer_blocks: bool,
) -> None:
    check_push(stack, model_of(family), answer_of, family, stream, cross_layer_blocks=cross_layer_blocks)


@pytest.mark.processes
@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
@pytest.mark.parametrize(("tp_of_p", "tp_of_d"), [(2, 1), (1, 2)])
def test_every_rank_has_the_whole_latent(
    stack: ExitStack, model_of: ModelOf, answer_of: AnswerOf, family: str, tp_of_p: int, tp_of_d: int
) -> None:
    sizes = {"tp_of_p": tp_of_p, "tp_of_d": tp_of_d, "block_of_d": 2 * BLOCK}
    check_push(stack, model_of(family), answer_of, family, "layer", **sizes)


def check_push(
    stack: ExitStack,
    model: ModelConfig,
    answer_of: AnswerOf,
    family: str,
    stream: str,
    *,
    tp_of_p: int = 1,
    tp_of_d: int = 1,
    block_of_d: int = BLOCK,
    cross_layer_blocks: bool = False,
) -> None:
    extra: dict[str, Any] = {"timers": PATIENT, "cross_layer_blocks": cross_layer_blocks}
    sizes: dict[str, Any] = {"num_blocks": 100, "budget": 16}
    p = core_in(
        stack, config_of(model, hands_over("p", "Push", stream=stream, **extra), tp_size=tp_of_p, **sizes)
    )
    d = core_in(
        stack,
        config_of(model, hands_over("d", "Push", **extra), tp_size=tp_of_d, block_size=block_of_d, **sizes),
    )
    legs = Legs(p, d)
    decoded = [legs.add_pair(p, d, f"r{index}", prompt) for index, prompt in enumerate(PROMPTS)]
    legs.run()
    assert [one.token_ids for one in decoded] == [answer_of(family, prompt) for prompt in PROMPTS]
    assert all(one.num_transferred_tokens > 0 for one in decoded)
    record = max(legs.transfers, key=lambda transfer: transfer["bytes"])
    least = len(PROMPTS[-1]) * model.num_hidden_layers * model.token_size * 4 * tp_of_d
    assert least <= record["bytes"] < 1.2 * least, "each of D's ranks reads the latents once"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("connector", ["MirroredPull", "MirroredPush"])
def test_a_copy_in_host_memory_is_read_as_well(
    stack: ExitStack, model_of: ModelOf, answer_of: AnswerOf, family: str, connector: str
) -> None:
    fields = {"kv_connector": connector, "kv_connector_module_path": mirrored.__name__}
    p, d = (
        start_in(stack, config_of(model_of(family), {**(hands_over(name) or {}), **fields}, num_blocks=100))
        for name in ("p", "d")
    )
    for prompt in PROMPTS:
        assert hand_over(p, d, prompt).token_ids == answer_of(family, prompt)
    assert mirrored.COUNTED.blocks["h2d"] > 0
    mirrored.COUNTED.blocks.clear()


@pytest.mark.parametrize("family", FAMILIES)
def test_one_engine_reads_the_files_of_another(
    model_of: ModelOf, answer_of: AnswerOf, tmp_path: Path, family: str
) -> None:
    prompt = prompt_of(43)
    with starting(model_of(family)) as start:
        a, b = start(storage(tmp_path)), start(storage(tmp_path))
        of_a = fill(a, tmp_path, prompt, num_files=6)
        (by_b,) = b.generate([prompt], GREEDY)
    assert by_b.token_ids == answer_of(family, prompt)
    assert of_a == by_b.token_ids[: len(of_a)]
    assert by_b.num_transferred_tokens == 40


@pytest.mark.parametrize("family", FAMILIES)
def test_offloaded_latents_are_loaded_again(model_of: ModelOf, answer_of: AnswerOf, family: str) -> None:
    core = EngineCore(offload_world.config_of(model_of(family), 120, slots=200), FACTORY)
    engine = offload_world.Engine(core)
    try:
        for prompt in [*PROMPTS, *PROMPTS]:
            engine.forget()
            tokens = engine.tokens(prompt)
            assert tokens == answer_of(family, prompt)[: len(tokens)]
        assert engine.counts["hit_tokens"] > 100
        engine.assert_whole()
    finally:
        core.shutdown()
