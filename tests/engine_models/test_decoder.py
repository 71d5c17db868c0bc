"""Models compared with transformers, and with themselves for any division of a prompt into steps."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.checkpoints.checkpoint import load_model_config
from baton.contract import NullConnectorMetadata, NullWorkerHalf
from baton.engine.forward_context import ForwardContext, build_attention_metadata
from baton.engine.models.state_mixer import CHUNK
from tests.engine_models.paged import (
    BLOCK_SIZE,
    SHUFFLED_BLOCKS,
    CheckpointOf,
    PagedModel,
    PagedModelOf,
    assert_greedy,
    load_reference,
    prompt_of,
)

LATENT = [
    "deepseek_v2",
    "deepseek_v2, as Lite",
    "deepseek_v3",
    "deepseek_v3, halves rotated",
    "deepseek_v32",
]
STATES = ["mamba2", "granite_hybrid", "qwen3_next", "qwen3_5", "qwen3_5_moe", "nemotron_h"]
ALL_FAMILIES = [
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma3",
    "gpt_oss",
    *LATENT,
    *STATES,
]


@pytest.mark.slow
@pytest.mark.parametrize("family", [*ALL_FAMILIES, "qwen3_moe, shares not normalised"])
def test_logits_and_greedy_tokens_are_those_of_transformers(
    family: str, paged_model_of: PagedModelOf, checkpoint_of: CheckpointOf
) -> None:
    """A long prompt alone, and a batch of prompts around the ends of blocks."""
    model, prompt = paged_model_of(family), prompt_of(1, 100)
    reference = load_reference(checkpoint_of(family))
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    # Sums have another order: 1.05e-4 of scores up to 10 in Qwen3-Next.
    torch.testing.assert_close(model.step([(prompt, 0, SHUFFLED_BLOCKS)]), expected, atol=2e-4, rtol=0)
    lengths = [1, 2, *(k * BLOCK_SIZE + more for k in (1, 2, 3) for more in (-1, 0, 1))]
    prompts = [prompt_of(length, length) for length in lengths]
    free = iter(SHUFFLED_BLOCKS)
    tables = [[*itertools.islice(free, 3 + length // BLOCK_SIZE)] for length in lengths]
    answers = [
        model.greedy(prompt, 32, SHUFFLED_BLOCKS),
        *model.greedy_of_each(prompts, 2 * BLOCK_SIZE, tables),
    ]
    assert_greedy(reference, [prompt, *prompts], answers)
    # Otherwise tests of transfers could not detect answers to wrong prompts. Special tokens would end them.
    assert len(set(answers[0])) > 16
    assert len({tuple(answer[:8]) for answer in answers}) == len(answers)
    assert not any(token < 3 for answer in answers for token in answer)


@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize(
    "chunks",
    [
        (1,) * 8 + (142,),
        (BLOCK_SIZE, BLOCK_SIZE, 134),
        (149, 1),
        (3, 50, 97),
        (CHUNK - 1, CHUNK - 1, 24),
        (CHUNK + 1, 1, CHUNK + 1, 1, 18),
    ],
)
def test_chunks_of_a_prompt_give_the_logits_of_the_whole(
    family: str, chunks: tuple[int, ...], paged_model_of: PagedModelOf
) -> None:
    model, prompt = paged_model_of(family), prompt_of(2, 150)
    whole = model.step([(prompt, 0, SHUFFLED_BLOCKS)])
    parts, computed = [], 0
    for chunk in chunks:
        parts.append(model.step([(prompt[computed : computed + chunk], computed, SHUFFLED_BLOCKS)]))
        computed += chunk
    torch.testing.assert_close(torch.cat(parts), whole, atol=2e-4, rtol=0)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_other_requests_of_a_batch_do_not_matter(family: str, paged_model_of: PagedModelOf) -> None:
    model = paged_model_of(family)
    prompts = [prompt_of(seed, length) for seed, length in enumerate((40, 9, 41, 30, 1))]
    tables = [SHUFFLED_BLOCKS[6 * index : 6 * index + 6] for index in range(5)]
    alone = [model.step([(p, 0, table)]) for p, table in zip(prompts, tables, strict=True)]
    # Four decode their last token; the fourth one is prefilled in the middle of them.
    done = [len(p) - 1 for p in prompts]
    done[3] = 5
    for p, d, table in zip(prompts, done, tables, strict=True):
        if d:  # A state is that of all tokens computed, so it is computed again up to here.
            model.step([(p[:d], 0, table)])
    together = model.step([(p[d:], d, table) for p, d, table in zip(prompts, done, tables, strict=True)])
    expected = torch.cat([logits[d:] for logits, d in zip(alone, done, strict=True)])
    torch.testing.assert_close(together, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek_v3"])
def test_a_wrong_block_of_keys_changes_the_answer(family: str, paged_model_of: PagedModelOf) -> None:
    """Otherwise tests of transfers could not detect a wrong transfer.

    Exchanging two blocks of a prompt is no such fault: keys carry their position, and attention is a sum.
    """
    model, prompt, table = paged_model_of(family), prompt_of(7, 200), SHUFFLED_BLOCKS[:30]
    right = model.greedy(prompt, 32, table)
    model.step([(prompt_of(8, BLOCK_SIZE), 0, SHUFFLED_BLOCKS[40:41])])
    wrong_table = [*table[:9], SHUFFLED_BLOCKS[40], *table[10:]]
    wrong = []
    while len(wrong) < 32:
        last = [(prompt + wrong)[-1]]
        wrong.append(int(model.step([(last, len(prompt) + len(wrong) - 1, wrong_table)])[-1].argmax()))
    assert wrong != right


def test_the_choice_of_keys_by_the_index_changes_the_answer(
    paged_model_of: PagedModelOf, checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    """Otherwise the comparison with transformers would not test it."""
    folder = Path(shutil.copytree(checkpoint_of("deepseek_v32"), tmp_path / "all"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "index_topk": 512}))
    prompt, every_key = prompt_of(1, 100), PagedModel(load_model_config(folder))
    by_index = paged_model_of("deepseek_v32").step([(prompt, 0, SHUFFLED_BLOCKS)])
    by_all = every_key.step([(prompt, 0, SHUFFLED_BLOCKS)])
    torch.testing.assert_close(by_index[:32], by_all[:32], atol=1e-4, rtol=0)
    assert ((by_index - by_all).abs().amax(-1)[32:] > 0.1).all()


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
@pytest.mark.parametrize("wanted", [[], [4], [0, 4, 6]])
def test_unwanted_hidden_states_are_skipped_and_the_rest_is_the_same(
    wanted: list[int], family: str, paged_model_of: PagedModelOf
) -> None:
    paged, ids = paged_model_of(family), torch.tensor([*prompt_of(1, 5), *prompt_of(2, 2)])
    metadata = build_attention_metadata([0, 0], [5, 2], [[0], [1]], BLOCK_SIZE)

    def run(wanted_tokens: torch.Tensor | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        for cache in paged.kv_caches.values():
            cache.zero_()
        context = ForwardContext(metadata, paged.kv_caches, wanted_tokens=wanted_tokens)
        with torch.inference_mode():
            hidden = paged.model(ids, metadata.positions, context)
        return hidden, [cache.clone() for cache in paged.kv_caches.values()]

    everything, caches = run(None)
    some, same_caches = run(torch.tensor(wanted, dtype=torch.int64))
    torch.testing.assert_close(some, everything[wanted])
    assert all(one.equal(other) for one, other in zip(caches, same_caches, strict=True))


class RecordingHalf(NullWorkerHalf):
    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.calls.append(("wait", layer_name))

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        assert len(attn_metadata.slot_mapping) == attn_metadata.num_actual_tokens
        assert not kv_layer.view(-1, kv_layer.shape[-1]).isnan().any()
        self.calls.append(("save", layer_name))


@pytest.mark.parametrize(("family", "per_layer"), [("llama", 1), ("deepseek_v2", 1), ("deepseek_v32", 2)])
def test_each_layer_waits_then_saves_but_only_for_a_half_with_metadata(
    family: str, per_layer: int, paged_model_of: PagedModelOf
) -> None:
    paged, half, ids = paged_model_of(family), RecordingHalf(), torch.tensor(prompt_of(1, 5))
    metadata = build_attention_metadata([0], [5], [[0]], BLOCK_SIZE)

    def run(context: ForwardContext) -> None:
        half.calls.clear()
        with torch.inference_mode():
            paged.model(ids, metadata.positions, context)

    run(ForwardContext(metadata, paged.kv_caches, half))
    assert half.calls == []
    half.bind_connector_metadata(NullConnectorMetadata())
    run(ForwardContext(None, paged.kv_caches, half))
    assert half.calls == []
    run(ForwardContext(metadata, paged.kv_caches, half))
    names = list(paged.kv_caches)
    layers = [names[first : first + per_layer] for first in range(0, len(names), per_layer)]
    assert half.calls == [(call, name) for layer in layers for call in ("wait", "save") for name in layer]
