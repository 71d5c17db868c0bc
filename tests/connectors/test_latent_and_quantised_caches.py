"""Latent and quantised caches are handed over, stored and loaded: slots of other widths and dtypes."""

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import msgpack, structs

from baton.connectors.pull.control import agent
from baton.core.config import ModelConfig
from baton.engine.core.engine_core import EngineCore
from baton.engine.llm import LLM
from baton.protocol import peers
from baton.protocol.handshake import RankCard
from baton.protocol.messages import Welcome
from tests.connectors import mirrored, offload_world
from tests.connectors.engine_world import (
    BLOCK,
    FACTORY,
    GREEDY,
    ONE_TOKEN,
    SETTLE_S,
    AnswerOf,
    ModelOf,
    config_of,
    hand_over,
    hands_over,
    pair_in,
    prompt_of,
    push_all,
    start_in,
)
from tests.connectors.storage_world import fill, starting, storage

pytestmark = pytest.mark.slow

# A family, and the dtype of its cache if that is another one.
FAMILIES = [
    "deepseek_v3",
    "deepseek_v32",  # Each layer has a second cache.
    "deepseek_v2 int8_per_token_head",
    "deepseek_v32 fp8_e4m3",  # The index keys stay in float32.
    "llama fp8_e4m3",
    "qwen3 int8_per_token_head",
]
OTHERS = ["mamba2", "granite_hybrid", "qwen3_next", "gemma3"]  # States, and layers in groups.
PROMPTS = [prompt_of(70), prompt_of(3), prompt_of(32, step=11), prompt_of(101, step=13)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("block_of_p", "block_of_d"), [(4, 8), (8, 4)])
def test_a_pulled_prompt_gets_the_tokens_of_a_single_engine(
    stack: ExitStack, model_of: ModelOf, answer_of: AnswerOf, family: str, block_of_p: int, block_of_d: int
) -> None:
    p, d = pair_in(stack, model_of(family), block_sizes=(block_of_p, block_of_d))
    for prompt in PROMPTS:
        decoded = hand_over(p, d, prompt)
        assert decoded.token_ids == answer_of(family, prompt)
        assert decoded.num_transferred_tokens > 0
    p.settle(SETTLE_S)
    d.settle(SETTLE_S)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("stream", "cross_layer_blocks"), [("off", True), ("chunk", False), ("layer", True)])
def test_a_pushed_prompt_gets_the_tokens_of_a_single_engine(
    stack: ExitStack,
    model_of: ModelOf,
    answer_of: AnswerOf,
    family: str,
    stream: str,
    cross_layer_blocks: bool,
) -> None:
    check_push(
        stack, model_of(family), answer_of, family, stream=stream, cross_layer_blocks=cross_layer_blocks
    )


@pytest.mark.processes
@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize(
    ("family", "tp_of_p", "tp_of_d"),
    [
        ("deepseek_v3", 2, 1),
        ("deepseek_v32 fp8_e4m3", 1, 2),
        ("qwen3 int8_per_token_head", 2, 1),
        ("qwen3 int8_per_token_head", 1, 2),
    ],
)
def test_ranks_have_the_whole_latent_or_their_heads(
    stack: ExitStack, model_of: ModelOf, answer_of: AnswerOf, family: str, tp_of_p: int, tp_of_d: int
) -> None:
    sizes: dict[str, Any] = {"tp_sizes": (tp_of_p, tp_of_d), "block_of_d": 2 * BLOCK}
    check_push(stack, model_of(family), answer_of, family, stream="layer", **sizes)


def check_push(
    stack: ExitStack, model: ModelConfig, answer_of: AnswerOf, family: str, **options: Any
) -> None:
    decoded, transfers = push_all(stack, model, PROMPTS, **options)
    assert [one.token_ids for one in decoded] == [answer_of(family, prompt) for prompt in PROMPTS]
    assert all(one.num_transferred_tokens > 0 for one in decoded)
    record = max(transfers, key=lambda transfer: transfer["bytes"])
    _, tp_of_d = options.get("tp_sizes", (1, 1))
    num_slots = len(PROMPTS[-1]) * (tp_of_d if model.latent_size else model.num_kv_heads)
    least = num_slots * model.num_hidden_layers * model.token_bytes
    assert least <= record["bytes"] < 1.2 * least, "each of D's ranks reads the latents, or its heads, once"


@pytest.mark.parametrize(("family", "kind"), list(zip([*FAMILIES, *OTHERS], cycle(["Pull", "Push"]))))
def test_a_copy_in_host_memory_is_read_as_well(
    stack: ExitStack, model_of: ModelOf, answer_of: AnswerOf, family: str, kind: str
) -> None:
    fields = {"kv_connector": f"Mirrored{kind}", "kv_connector_module_path": mirrored.__name__}
    p, d = pair_in(stack, model_of(family), fields)
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


def test_the_handoff_of_a_quantised_cache_is_exact(stack: ExitStack, model_of: ModelOf) -> None:
    model = model_of("qwen3 int8_per_token_head")
    p, d = pair_in(stack, model, hash_seed="one")
    prompt = prompt_of(8 * BLOCK)
    (alone,) = p.generate([prompt], ONE_TOKEN)
    assert hand_over(p, d, prompt).token_ids[:1] == alone.token_ids
    # Blocks of equal content, whose ids differ; the last one is computed by D.
    of_p, of_d = (sorted(map(bytes, _blocks(llm))) for llm in (p, d))
    assert len(set(of_p) & set(of_d) - {bytes(len(of_p[0]))}) >= 3 * 7


def test_an_fp8_engine_converts_what_it_reads(stack: ExitStack, model_of: ModelOf) -> None:
    d_model = model_of("llama fp8_e4m3")
    p = start_in(
        stack, config_of(structs.replace(d_model, kv_cache_dtype="auto"), hands_over("p"), num_blocks=100)
    )
    d = start_in(stack, config_of(d_model, hands_over("d"), num_blocks=100))
    decoded = hand_over(p, d, prompt_of(8 * BLOCK))
    assert decoded.num_transferred_tokens > 0
    of_p, of_d = (set(map(bytes, _blocks(llm, torch.float8_e4m3fn))) for llm in (p, d))
    assert len(of_p & of_d - {bytes(len(next(iter(of_p))))}) >= 3 * 7, "scale 1, rounded as D itself rounds"


def _caches(llm: LLM) -> dict[str, torch.Tensor]:
    caches: dict[str, torch.Tensor] = llm.core.executor._worker._runner._kv_caches  # type: ignore[attr-defined]
    return caches


def _blocks(llm: LLM, dtype: torch.dtype | None = None) -> list[Any]:
    """The blocks of all layers as bytes; `dtype`: after conversion to it."""
    caches = _caches(llm).values()
    converted = [cache.to(dtype or cache.dtype).reshape(len(cache), -1) for cache in caches]
    return [block for cache in converted for block in cache.view(torch.uint8).numpy()]


def test_latents_are_converted_beside_index_keys_that_are_not(stack: ExitStack, model_of: ModelOf) -> None:
    d_model = model_of("deepseek_v32 fp8_e4m3")
    p = start_in(
        stack, config_of(structs.replace(d_model, kv_cache_dtype="auto"), hands_over("p"), num_blocks=100)
    )
    d = start_in(stack, config_of(d_model, hands_over("d"), num_blocks=100))
    assert hand_over(p, d, prompt_of(8 * BLOCK)).num_transferred_tokens > 0
    of_p, of_d = (_caches(llm) for llm in (p, d))
    for name, theirs in of_p.items():
        ours = of_d[name]
        assert ours.dtype == (torch.float32 if "indexer" in name else torch.float8_e4m3fn)
        moved = {bytes(block.view(torch.uint8).numpy()) for block in theirs.to(ours.dtype).flatten(1)}
        found = {bytes(block.view(torch.uint8).numpy()) for block in ours.flatten(1)}
        assert len(moved & found) >= 7, name


def test_a_peer_with_a_kind_of_cache_that_is_not_known_costs_its_loads(
    stack: ExitStack,
    model_of: ModelOf,
    answer_of: AnswerOf,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    family = "deepseek_v32"

    def of_a_newer_version(cards: Sequence[RankCard]) -> bytes:
        (card,) = cards
        *layers, last = card.layout.layers
        newer = structs.replace(last, spec=structs.replace(last.spec, kind="circular_buffer"))
        layout = structs.replace(card.layout, layers=(*layers, newer))
        return msgpack.encode((structs.replace(card, layout=layout),))

    with monkeypatch.context() as newer:
        newer.setattr(agent, "encode_ranks", of_a_newer_version)
        p = start_in(stack, config_of(model_of(family), hands_over("p"), num_blocks=100))
    d = start_in(stack, config_of(model_of(family), hands_over("d"), num_blocks=100))
    decoded = hand_over(p, d, PROMPTS[0])
    assert decoded.num_transferred_tokens == 0
    assert decoded.token_ids == answer_of(family, PROMPTS[0])
    assert "indexer.k_cache': kind is 'circular_buffer'; known: keys_and_values, latent" in caplog.text


def test_an_engine_of_another_release_costs_its_loads(
    stack: ExitStack,
    model_of: ModelOf,
    answer_of: AnswerOf,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    family = "deepseek_v32"
    monkeypatch.setattr(peers, "answer_hello", lambda _, kv_identity, __: Welcome(6, kv_identity, b"older"))
    p, d = pair_in(stack, model_of(family))
    decoded = hand_over(p, d, PROMPTS[0])
    assert decoded.num_transferred_tokens == 0
    assert decoded.token_ids == answer_of(family, PROMPTS[0])
    assert "protocol_version: ours 8, theirs 6" in caplog.text


@pytest.mark.parametrize("connector", ["Pull", "Push"])
def test_unlike_quantised_caches_are_refused_by_name(
    stack: ExitStack, model_of: ModelOf, answer_of: AnswerOf, connector: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain, scaled = "qwen3", "qwen3 int8_per_token_head"
    model = structs.replace(model_of(scaled), kv_cache_dtype="auto")
    p = start_in(stack, config_of(model_of(scaled), hands_over("p", connector), num_blocks=100))
    d = start_in(stack, config_of(model, hands_over("d", connector), num_blocks=100))
    decoded = hand_over(p, d, PROMPTS[0])
    assert decoded.num_transferred_tokens == 0
    assert decoded.token_ids == d.generate([PROMPTS[0]], GREEDY)[0].token_ids, plain
    assert "dtype: ours 'float32', theirs 'int8_per_token_head'" in caplog.text


@pytest.mark.parametrize("dtype", ["fp8_e5m2", "int8_per_token_head"])
def test_quantised_attention_beside_recurrent_states(
    stack: ExitStack, model_of: ModelOf, answer_of: AnswerOf, dtype: str
) -> None:
    family = f"granite_hybrid {dtype}"
    p, d = pair_in(stack, model_of(family))
    for prompt in PROMPTS:
        decoded = hand_over(p, d, prompt)
        assert decoded.token_ids == answer_of(family, prompt)
        assert decoded.num_transferred_tokens > 0
