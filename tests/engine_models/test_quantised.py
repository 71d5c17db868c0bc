"""Quantised slots: the stated errors, and attention over them against attention over what they stand for."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from baton.core.errors import ConfigError
from baton.engine.attention import build_backend
from baton.engine.attention.quantised import dequantise, quantise
from baton.engine.forward_context import build_attention_metadata
from tests.engine_models.attention_check import BLOCK_SIZE, shape_of
from tests.engine_models.test_forward_context import model_config

SIZE = 4
NUMBERS = st.floats(-(2.0**126), 2.0**126, width=32)  # The int8 steps of these are numbers, too.
DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]


def through(k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    slots = quantise(k, v, dtype)
    assert slots.dtype == dtype
    return dequantise(slots, k.shape[-1], k.shape[-1] + v.shape[-1], k.dtype)


@given(st.lists(NUMBERS, min_size=2 * SIZE, max_size=2 * SIZE))
def test_an_int8_number_is_within_its_vectors_step(numbers: list[float]) -> None:
    k, v = torch.tensor(numbers, dtype=torch.float32).view(2, 1, 1, SIZE)
    found_k, found_v = through(k, v, torch.int8).split(SIZE, dim=-1)
    for exact, found in ((k, found_k), (v, found_v)):
        largest = exact.double().abs().max()
        bound = largest / 254 * (1 + 1e-5) + 2 * torch.finfo(torch.float32).tiny
        assert (found.double() - exact.double()).abs().max() <= bound


@pytest.mark.parametrize(
    ("dtype", "relative", "absolute", "largest"),
    [(torch.float8_e4m3fn, 2**-4, 2**-10, 448.0), (torch.float8_e5m2, 2**-3, 2**-17, 57344.0)],
)
@given(numbers=st.lists(NUMBERS, min_size=2 * SIZE, max_size=2 * SIZE))
def test_an_fp8_number_is_near_or_saturated(
    dtype: torch.dtype, relative: float, absolute: float, largest: float, numbers: list[float]
) -> None:
    k, v = torch.tensor(numbers, dtype=torch.float32).view(2, 1, 1, SIZE)
    exact = torch.cat((k, v), dim=-1).double().clamp(-largest, largest)
    bound = (exact.abs() * relative).clamp_min(absolute)
    assert ((through(k, v, dtype).double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_not_a_number_stays_visible(dtype: torch.dtype) -> None:
    k = torch.tensor([[[1.0, torch.nan]]])
    found = through(k, torch.ones(1, 1, 2), dtype)
    assert found[..., :2].isnan().any()
    assert not found[..., 2:].isnan().any()


@pytest.mark.parametrize("is_token_major", [False, True])
@pytest.mark.parametrize("latent_dim", [None, 12])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_sees_what_the_slots_stand_for(
    dtype: torch.dtype, latent_dim: int | None, is_token_major: bool
) -> None:
    torch.manual_seed(3)
    shape = replace(shape_of(num_kv_heads=2 if latent_dim is None else 1), latent_dim=latent_dim)
    key_size, value_size = (16, 16) if latent_dim is None else (12, 4)
    # Two decoded tokens and a prompt's part.
    metadata = build_attention_metadata([8, 6, 2], [1, 7, 1], [[1, 2, 3], [4, 5, 6, 7], [8]], BLOCK_SIZE)
    answers = []
    history = torch.randn(10, shape.num_kv_heads, BLOCK_SIZE, shape.slot_size)
    q = torch.randn(9, 4, 16)
    k, v = torch.randn(9, shape.num_kv_heads, key_size), torch.randn(9, shape.num_kv_heads, value_size)
    for is_quantised in (True, False):
        backend = build_backend(replace(shape, is_quantised=is_quantised))
        slots = quantise(history[..., :key_size], history[..., key_size:], dtype)
        if not is_quantised:
            slots = dequantise(slots, key_size, shape.slot_size, torch.float32)
            k, v = through(k, v, dtype).split((key_size, value_size), dim=-1)
        cache = slots.transpose(1, 2).contiguous().transpose(1, 2) if is_token_major else slots.contiguous()
        plan = backend.plan(metadata, None, cache)
        backend.write(k, v, cache, plan)
        answers.append(backend.attend(q, cache, plan))
    torch.testing.assert_close(answers[0], answers[1], rtol=0, atol=1e-6)


def test_what_cannot_be_quantised_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype: needs slots of a multiple of 4 numbers"):
        structs.replace(model_config(2), head_dim=15, kv_cache_dtype="int8_per_token_head")
