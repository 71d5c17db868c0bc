"""Models with recurrent states: where a step reads and writes them, and variants of their configuration."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.checkpoints.checkpoint import load_model_config, read_json
from baton.checkpoints.random_model import write_checkpoint
from baton.contract import NullConnectorMetadata, NullWorkerHalf
from baton.core.kv_groups import layer_name
from baton.core.states import StatePart
from baton.engine.forward_context import ForwardContext, build_attention_metadata
from baton.engine.models.state_mixer import CHUNK
from baton.engine.states import state_views
from tests.engine_models.conftest import SMALL
from tests.engine_models.paged import (
    BLOCK_SIZE,
    SHUFFLED_BLOCKS,
    CheckpointOf,
    PagedModel,
    PagedModelOf,
    load_reference,
    prompt_of,
)

STATE_FAMILIES = ["mamba2", "granite_hybrid", "qwen3_next", "qwen3_5", "qwen3_5_moe", "nemotron_h"]


def decode(model: PagedModel, prompt: list[int], table: list[int], num_tokens: int = 16) -> list[int]:
    """Greedy tokens after a prompt of which all but the last token are computed."""
    output: list[int] = []
    while len(output) < num_tokens:
        tokens = prompt + output
        output.append(int(model.step([(tokens[-1:], len(tokens) - 1, table)])[-1].argmax()))
    return output


def pages(model: PagedModel) -> list[torch.Tensor]:
    return [cache.clone() for cache in model.kv_caches.values() if cache.dtype == torch.uint8]


def changed_blocks(before: list[torch.Tensor], after: list[torch.Tensor]) -> set[int]:
    return {
        block
        for one, other in zip(before, after, strict=True)
        for block in (one != other).any(-1).nonzero().flatten().tolist()
    }


@pytest.mark.parametrize("family", STATE_FAMILIES)
def test_requests_continue_from_one_state_which_stays(family: str, paged_model_of: PagedModelOf) -> None:
    model = paged_model_of(family)
    shared, ends = prompt_of(1, 2 * BLOCK_SIZE), [prompt_of(2, 9), prompt_of(3, 1), prompt_of(4, 20)]
    first, tables = SHUFFLED_BLOCKS[:2], [SHUFFLED_BLOCKS[start : start + 6] for start in (2, 8, 14)]
    whole = [model.greedy(shared + end, 16, SHUFFLED_BLOCKS[30:]) for end in ends]
    model.step([(shared, 0, first)])
    before = pages(model)
    logits = model.step([(end, len(shared), first + table) for end, table in zip(ends, tables, strict=True)])
    # One block a request: that of its last token.
    assert changed_blocks(before, pages(model)) == {tables[0][1], tables[1][0], tables[2][2]}
    position = -1
    for end, table, expected in zip(ends, tables, whole, strict=True):
        position += len(end)
        token = int(logits[position].argmax())
        assert [token, *decode(model, [*shared, *end, token], first + table, 15)] == expected


@pytest.mark.parametrize("family", STATE_FAMILIES)
def test_zeros_instead_of_any_part_change_the_answer(
    family: str, paged_model_of: PagedModelOf, checkpoint_of: CheckpointOf
) -> None:
    """Otherwise tests of transfers could not detect that one of them is lost."""
    model, prompt, table = paged_model_of(family), prompt_of(7, 60), SHUFFLED_BLOCKS
    parts = load_model_config(checkpoint_of(family)).state_parts
    model.step([(prompt[:-1], 0, table)])
    stored = {name: cache.clone() for name, cache in model.kv_caches.items()}
    right = decode(model, prompt, table)
    for index, part in enumerate(parts):
        for name, cache in model.kv_caches.items():
            cache.copy_(stored[name])
            if cache.dtype == torch.uint8:
                state_views(cache, parts, tp_rank=0, tp_size=1)[index].zero_()
        assert decode(model, prompt, table) != right, part.name


@pytest.mark.parametrize("family", STATE_FAMILIES)
def test_a_dummy_run_touches_no_state(family: str, paged_model_of: PagedModelOf) -> None:
    model = paged_model_of(family)
    before = pages(model)
    with torch.inference_mode():
        model.model(torch.tensor([3, 4]), torch.tensor([0, 1]), ForwardContext(None, model.kv_caches))
    assert changed_blocks(before, pages(model)) == set()


class StateCopies(NullWorkerHalf):
    """Loads the pages it has in `wait_for_layer_load`, and keeps the pages it is shown."""

    def __init__(self, model: PagedModel) -> None:
        self._caches = model.kv_caches
        self.loads: dict[str, torch.Tensor] = {}
        self.saved: dict[str, torch.Tensor] = {}

    def wait_for_layer_load(self, layer_name: str) -> None:
        if layer_name in self.loads:
            self._caches[layer_name].copy_(self.loads[layer_name])

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        assert attn_metadata.num_reqs == 1
        self.saved[layer_name] = kv_layer.clone()


@pytest.mark.parametrize("family", STATE_FAMILIES)
def test_a_layer_waits_for_its_state_and_shows_the_new_one(family: str, paged_model_of: PagedModelOf) -> None:
    model, prompt, half = paged_model_of(family), prompt_of(9, 30), StateCopies(paged_model_of(family))
    half.bind_connector_metadata(NullConnectorMetadata())

    def run(tokens: list[int], computed: int) -> torch.Tensor:
        metadata = build_attention_metadata([computed], [len(tokens)], [SHUFFLED_BLOCKS], BLOCK_SIZE)
        context = model.context(metadata)
        context.worker_half = half
        with torch.inference_mode():
            return model.model(torch.tensor(tokens), metadata.positions, context)

    run(prompt[:-1], 0)
    assert all(model.kv_caches[name].equal(saved) for name, saved in half.saved.items())
    assert half.saved.keys() == model.kv_caches.keys()
    half.loads = dict(half.saved)
    expected = run(prompt[-1:], 29)
    for cache in model.kv_caches.values():
        cache.zero_()
    assert run(prompt[-1:], 29).equal(expected)


Tensors = dict[str, torch.Tensor]


def with_biases_of(*names: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        generator = torch.Generator().manual_seed(0)
        for name in [name for name in tensors if name.endswith(tuple(f"{part}.weight" for part in names))]:
            bias = torch.randn(len(tensors[name]), generator=generator).mul_(0.3)
            tensors[name.replace("weight", "bias")] = bias

    return change


def without(part: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if part in name]:
            del tensors[name]

    return change


OF_PROJECTIONS = with_biases_of("in_proj", "out_proj")
OF_ATTENTION = with_biases_of(*(f"self_attn.{part}_proj" for part in "qkvo"))


def with_drafts(tensors: Tensors) -> None:
    tensors["mtp.fc.weight"] = torch.zeros(2, 2)


def with_nothing_else(tensors: Tensors) -> None:
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "fields", "change"),
    [
        ("mamba2", {"use_bias": True}, OF_PROJECTIONS),
        ("mamba2", {"use_conv_bias": False}, without("conv1d.bias")),
        ("mamba2", {"time_step_limit": [0.4, 0.6]}, with_nothing_else),
        ("granite_hybrid", {"mamba_proj_bias": True}, OF_PROJECTIONS),
        ("granite_hybrid", {"mamba_conv_bias": False}, without("conv1d.bias")),
        ("granite_hybrid", {"position_embedding_type": "rope", "rope_theta": 500.0}, with_nothing_else),
        ("granite_hybrid", {"num_local_experts": 0}, without("block_sparse_moe")),
        ("granite_hybrid", {"time_step_limit": [0.4, 0.6]}, with_nothing_else),
        ("qwen3_next", {"attention_bias": True}, OF_ATTENTION),
        ("qwen3_next", {"partial_rotary_factor": 0.5}, with_nothing_else),
        ("qwen3_next", {"partial_rotary_factor": 1.0, "norm_topk_prob": False}, with_nothing_else),
        ("qwen3_next", {"rope_theta": 500.0}, with_drafts),
        ("qwen3_5", {"attention_bias": True}, OF_ATTENTION),
        ("nemotron_h", {"use_bias": True}, OF_PROJECTIONS),
        ("nemotron_h", {"mlp_bias": True}, with_biases_of("up_proj", "down_proj")),
    ],
)
def test_variants_of_the_configuration_give_the_logits_of_transformers(
    family: str, fields: dict[str, Any], change: Callable[[Tensors], None], tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, family=family, **SMALL)  # type: ignore[arg-type]
    (folder / "config.json").write_text(json.dumps({**read_json(folder / "config.json"), **fields}))
    plain = load_file(folder / "model.safetensors")
    changed = dict(plain)
    change(changed)
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    prompt = prompt_of(6, CHUNK + 20)
    with torch.inference_mode():
        expected = load_reference(folder)(torch.tensor([prompt])).logits[0]
    logits = PagedModel(load_model_config(folder)).step([(prompt, 0, SHUFFLED_BLOCKS)])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_the_configuration_has_the_states_of_the_model(checkpoint_of: CheckpointOf) -> None:
    pure, hybrid, delta = (load_model_config(checkpoint_of(family)) for family in STATE_FAMILIES[:3])
    assert pure.state_layers == (0, 1, 2, 3)
    assert hybrid.state_layers == (0, 2, 3)
    assert pure.state_parts == (
        StatePart("conv_x", 4, (32, 3), "float32"),
        StatePart("conv_b", 2, (32, 3), "float32"),
        StatePart("conv_c", 2, (32, 3), "float32"),
        StatePart("ssm", 4, (32, 32), "float32"),
    )
    assert [part.num_units for part in hybrid.state_parts] == [8, 1, 1, 8]
    assert delta.state_layers == (0, 2, 3)
    assert delta.state_parts == (
        StatePart("conv_q", 2, (32, 3), "float32"),
        StatePart("conv_k", 2, (32, 3), "float32"),
        StatePart("conv_v", 4, (24, 3), "float32"),
        StatePart("recurrent", 4, (32, 24), "float32"),
    )
    low = load_model_config(checkpoint_of("mamba2"), dtype="bfloat16")
    assert [part.dtype for part in low.state_parts] == ["bfloat16"] * 3 + ["float32"]


@pytest.mark.parametrize("family", STATE_FAMILIES)
def test_states_of_bfloat16_models_do_not_depend_on_the_steps(
    family: str, checkpoint_of: CheckpointOf
) -> None:
    model = PagedModel(load_model_config(checkpoint_of(family), dtype="bfloat16"))
    prompt, name = prompt_of(8, 40), layer_name(0)
    model.step([(prompt, 0, [1, 2, 3, 4, 5])])
    for computed, stop in ((0, 7), (7, 8), (8, 40)):
        model.step([(prompt[computed:stop], computed, [11, 12, 13, 14, 15])])
    # The first layer has the same inputs in both cases, and computes in float32.
    conv = model.kv_caches[name][:, :64].view(torch.bfloat16)
    ssm = model.kv_caches[name][:, -4096:].view(torch.float32)
    assert conv[5].equal(conv[15])
    torch.testing.assert_close(ssm[5], ssm[15], atol=1e-3, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("is_wide", [True, False])
def test_the_residual_stream_has_the_precision_that_the_file_names(
    is_wide: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(
        tmp_path,
        family="mamba2",
        dtype="bfloat16",
        **SMALL,
        fields={"residual_in_fp32": is_wide},  # type: ignore[arg-type]
    )
    prompt = prompt_of(3, 40)
    seen: list[torch.dtype] = []

    def note(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        seen.append(inputs[0].dtype)

    reference, paged = load_reference(folder).to(torch.bfloat16), PagedModel(load_model_config(folder))
    reference.backbone.norm_f.register_forward_pre_hook(note)
    of_sum = paged.model.norm.of_sum

    def noted(hidden: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(hidden.dtype)
        return of_sum(hidden, *arguments)

    monkeypatch.setattr(paged.model.norm, "of_sum", noted)
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    logits = paged.step([(prompt, 0, SHUFFLED_BLOCKS)])
    torch.testing.assert_close(
        logits, expected.float(), atol=0.5, rtol=0
    )  # bfloat16 scans sum in other orders.
    assert seen == [torch.float32 if is_wide else torch.bfloat16] * 2
