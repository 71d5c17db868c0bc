"""Tests of the Triton kernel of paged attention, on a GPU and as far as possible without one.

    what                     with a GPU    without, TRITON_INTERPRET=1       without
    agrees with definition   on it         on the CPU, line by line          skipped
    whole models             on it         on the CPU                        skipped
    compiles for GPUs        yes           skipped (nothing is compiled)     yes

All of these need the triton package, which set-up installs beside CPU builds of torch too. One test runs
everywhere: a step leaves no tensor on another device.
"""

import os
from typing import Any

import pytest
import torch

from baton.checkpoints.checkpoint import load_model_config
from baton.engine.attention.cuda import CudaBackend, why_unavailable
from baton.engine.forward_context import ForwardContext
from baton.engine.models import decoder
from tests.engine_models.attention_check import check_backend, shape_of
from tests.engine_models.paged import (
    SHUFFLED_BLOCKS,
    CheckpointOf,
    PagedModel,
    load_reference,
    prompt_of,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NUM_GREEDY = 4 if INTERPRETED else 64  # Seconds, not minutes.


@pytest.fixture
def device() -> str:
    """The device of the kernel; skips with a reason if it cannot run."""
    if INTERPRETED:
        pytest.importorskip("triton")
        return "cpu"
    if (reason := why_unavailable()) is not None:
        pytest.skip(reason)
    return "cuda"


@pytest.mark.gpu
@pytest.mark.parametrize("is_token_major", [False, True])
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("requests", [[(9, 21), (0, 1), (0, 17), (30, 1)], [(5, 1), (0, 1), (30, 1)]])
def test_it_agrees_with_the_definition(
    device: str, requests: list[tuple[int, int]], window: int | None, num_layers: int, is_token_major: bool
) -> None:
    how = {"num_layers": num_layers, "is_token_major": is_token_major}
    for has_sinks in (False, True):
        check_backend(CudaBackend(shape_of(device)), requests, window, 2, has_sinks=has_sinks, **how)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(7, 1, 24), (4, 4, 64), (16, 2, 80)])
def test_odd_shapes_and_short_numbers_agree_too(
    device: str, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    if INTERPRETED and dtype is torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies no bfloat16 numbers (3.9: the products are nonsense)")
    shape = shape_of(device, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    check_backend(CudaBackend(shape), [(9, 21), (0, 17), (30, 1)], None, seed=3)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("is_token_major", [False, True])
def test_warming_up_leaves_the_cache_alone(device: str, block_size: int, is_token_major: bool) -> None:
    shape = shape_of(device)
    in_block = (block_size, shape.num_kv_heads) if is_token_major else (shape.num_kv_heads, block_size)
    cache = torch.full((3, *in_block, 2 * shape.head_dim), torch.nan, device=device)
    if is_token_major:
        cache = cache.transpose(1, 2)
    for window in (None, 5):
        CudaBackend(shape).warm_up(cache, window)
    assert cache.isnan().all()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3", "gpt_oss"])
def test_whole_models_give_the_tokens_of_transformers(
    device: str, family: str, monkeypatch: pytest.MonkeyPatch, checkpoint_of: CheckpointOf
) -> None:
    # The interpreted kernel replaces the CPU backend.
    monkeypatch.setattr(decoder, "build_backend", CudaBackend)
    model = PagedModel(load_model_config(checkpoint_of(family)), device=device)
    reference, prompt = load_reference(checkpoint_of(family), device), prompt_of(1, 60)
    with torch.inference_mode():
        answer = reference.generate(
            torch.tensor([prompt], device=device),
            max_new_tokens=NUM_GREEDY,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        expected = reference(torch.tensor([prompt], device=device)).logits[0]
    torch.testing.assert_close(model.step([(prompt, 0, SHUFFLED_BLOCKS)]), expected, atol=1e-3, rtol=0)
    assert model.greedy(prompt, NUM_GREEDY, SHUFFLED_BLOCKS) == answer[0, len(prompt) :].tolist()


class NoKernel(CudaBackend):
    """The backend without its kernel, on torch's meta device, which refuses to mix devices as a GPU does."""

    def attend(
        self, q_TQD: torch.Tensor, cache_NHPC: torch.Tensor, plan: Any, sinks_Q: torch.Tensor | None = None
    ) -> torch.Tensor:
        used = (q_TQD, cache_NHPC, plan.write_rows, plan.block_table, plan.tiles)
        assert {tensor.device.type for tensor in used} == {"meta"}
        return torch.empty_like(q_TQD).view(len(q_TQD), -1)


# Not gpt_oss: routing to experts reads values.
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3"])
def test_nothing_of_a_step_is_left_on_another_device(
    family: str, monkeypatch: pytest.MonkeyPatch, checkpoint_of: CheckpointOf
) -> None:
    monkeypatch.setattr(decoder, "build_backend", NoKernel)
    model = PagedModel(load_model_config(checkpoint_of(family)), device="meta")
    logits = model.step([([5] * 20, 0, [4, 9, 1]), ([7], 9, [2, 3])])
    assert (logits.device.type, logits.shape) == ("meta", (21, 768))
    warming_up = ForwardContext(kv_caches=model.kv_caches)
    hidden = model.model(
        torch.zeros(8, dtype=torch.int64, device="meta"), torch.arange(8, device="meta"), warming_up
    )
    assert hidden.device.type == "meta"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")  # About the compiler's own defaults.
# Triton 3.7 makes this node without a field, of which Python 3.13 warns.
@pytest.mark.filterwarnings("ignore:AnnAssign.__init__ missing:DeprecationWarning")
@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "group_size", "rows", "has_sinks", "num_heads_apart"),
    [
        (80, "fp32", 64, 7, 64, True, 1),
        (80, "bf16", 128, 4, 16, False, 8),
        (80, "fp16", 64, 7, 64, True, 1),
        (90, "fp32", 128, 4, 16, False, 8),
        (90, "bf16", 64, 7, 64, True, 1),
        (90, "fp16", 128, 4, 16, False, 8),
    ],
)
def test_it_compiles_for_gpus_that_are_not_here(
    capability: int,
    dtype: str,
    head_dim: int,
    group_size: int,
    rows: int,
    has_sinks: bool,
    num_heads_apart: int,
) -> None:
    """Compile to machine code. Code that only the interpreter accepts fails here, and not at a user's first
    request.

    `num_heads_apart`: from one token of a head to the next; 1 where heads come first.
    """
    pytest.importorskip("triton")
    if INTERPRETED:
        pytest.skip("TRITON_INTERPRET=1: nothing is compiled")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from baton.engine.attention.triton_kernel import _KEYS, _kernel

    constants = {
        "GROUP": group_size,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": triton.next_power_of_2(head_dim),
        "BLOCK_SIZE": 16,
        "TOKEN_STRIDE": 2 * head_dim * num_heads_apart,
        "ROWS": rows,
        "KEYS": _KEYS,
        "HAS_SINKS": has_sinks,
    }
    types = {"table_pointer": "*i32", "tiles_pointer": "*i32", "scale": "fp32"}
    types |= {name: f"*{dtype}" for name in ("q_pointer", "cache_pointer", "out_pointer", "sinks_pointer")}
    types |= dict.fromkeys(constants, "constexpr")
    names = _kernel.arg_names
    source = ASTSource(
        _kernel,
        {name: types.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert compiled.asm["cubin"]
