"""Compiled norms, rotations and gates, compared with torch's operations."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.attention import build_backend
from baton.engine.attention.compiled import LEVELS, LIBRARY
from baton.engine.forward_context import build_attention_metadata
from baton.engine.models import compiled_rows
from baton.engine.models.layers import RMSNorm, rms_norm
from baton.engine.models.rotary import rotate
from tests.engine_models.attention_check import BLOCK_SIZE, shape_of

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="no C compiler on this machine")


@pytest.fixture(autouse=True, scope="module", params=range(len(LEVELS)), ids=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[None]:
    """Sets of instructions, of which the CPU may not have all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_rows, "_LEVEL", request.param)
        yield


DTYPES = [torch.float32, torch.bfloat16]


def by_torch(run: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_rows, "_functions", lambda: None)
        return run(*arguments)


def assert_near(found: torch.Tensor | None, wanted: torch.Tensor) -> None:
    """The same but for the last bit, because sums have another order; bfloat16 is rounded twice."""
    assert found is not None
    assert found.dtype == wanted.dtype
    assert found.is_contiguous()
    tolerance = 1e-5 if wanted.dtype == torch.float32 else 3 * 2**-8
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000),
    num_rows=st.integers(0, 3),
    num_heads=st.sampled_from([None, 1, 3]),
    size=st.sampled_from([16, 48, 64]),
    dtype=st.sampled_from(DTYPES),
    has_wide_weight=st.booleans(),
    has_weight_of_heads=st.booleans(),
)
def test_norms_are_those_of_torch(
    seed: int,
    num_rows: int,
    num_heads: int | None,
    size: int,
    dtype: torch.dtype,
    has_wide_weight: bool,
    has_weight_of_heads: bool,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, (num_heads or 1) + 1, size, generator=generator).to(dtype)
    x = x[:, 1] if num_heads is None else x[:, :num_heads]  # The rows have gaps between them.
    of_heads = (num_heads,) if has_weight_of_heads and num_heads is not None else ()
    weight = torch.randn(*of_heads, size, generator=generator).to(torch.float32 if has_wide_weight else dtype)
    assert_near(compiled_rows.rms_norm(x, weight, 1e-6), by_torch(rms_norm, x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [32, 64, 96])
def test_rotations_are_those_of_torch(dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(3, 5, size, generator=generator).to(dtype)[:, 1:4]
    cos, sin = torch.randn(2, 3, 1, size, generator=generator).to(dtype)
    assert_near(compiled_rows.rotate(x, cos, sin), by_torch(rotate, x, cos, sin))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_of_a_sum_is_that_of_torch(dtype: torch.dtype) -> None:
    x, added, weight = torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(1)).to(dtype)
    norm = RMSNorm(torch.nn.Parameter(torch.empty(48, dtype=dtype), requires_grad=False), 1e-6)
    norm.weight.copy_(weight[0])
    wanted_sum, wanted = by_torch(norm.of_sum, x, added.clone(), dtype)
    found_sum, found = norm.of_sum(x, added, dtype)
    assert found_sum is x, "no other memory"
    assert_near(found, wanted)
    assert found_sum.equal(wanted_sum)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotated", [0, 32, 64])
@pytest.mark.parametrize("norm_dtype", [None, torch.float32, torch.bfloat16])
def test_heads_are_placed_as_by_torch(
    dtype: torch.dtype, rotated: int, norm_dtype: torch.dtype | None
) -> None:
    if norm_dtype is torch.bfloat16 and dtype is torch.float32:
        norm_dtype = dtype
    shape = shape_of(head_dim=64, dtype=dtype)
    backend, generator = build_backend(shape), torch.Generator().manual_seed(rotated)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    packed = random(3, 10, 64)  # The last two heads are none of attention's.
    norm = None if norm_dtype is None else (random(6, 64).to(norm_dtype), 1e-6)
    rotation = (random(3, 1, rotated), random(3, 1, rotated)) if rotated else None
    metadata = build_attention_metadata([3, 7], [2, 1], [[0, 2], [3, 1]], BLOCK_SIZE)
    wanted_cache = torch.zeros(4, BLOCK_SIZE, 2, 128, dtype=dtype).transpose(1, 2)
    cache = wanted_cache.clone(memory_format=torch.preserve_format)
    plan = backend.plan(metadata, None, cache)
    queries = compiled_rows.place_heads(packed, norm, rotation, cache, plan.write_rows, 4)

    qk = packed[:, :6] if norm is None else by_torch(rms_norm, packed[:, :6], *norm)
    qk = qk if rotation is None else by_torch(rotate, qk, *rotation)
    backend.write(qk[:, 4:], packed[:, 6:8], wanted_cache, plan)
    assert_near(queries, qk[:, :4].contiguous())
    assert_near(cache.contiguous(), wanted_cache.contiguous())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gate_is_that_of_torch(dtype: torch.dtype) -> None:
    x = torch.randn(3, 2, 48, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[0, 0, :6] = torch.tensor([0.0, -0.0, 200.0, -200.0, torch.nan, -3e38])
    wanted = torch.nn.functional.silu(x[:, 0]) * x[:, 1]
    found = compiled_rows.gate(x.view(3, 96))
    assert found is not None
    assert found[0, 4].isnan()
    assert_near(found.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_is_not_a_number_stays_so(dtype: torch.dtype) -> None:
    x = torch.ones(2, 32, dtype=dtype)
    x[1, 3] = torch.nan
    normed = compiled_rows.rms_norm(x, torch.ones(32, dtype=dtype), 1e-6)
    assert normed is not None
    assert normed[0].isfinite().all()
    assert normed[1].isnan().all()


def test_other_rows_are_left_to_torch() -> None:
    x = torch.ones(2, 3, 24)
    assert compiled_rows.rms_norm(x, torch.ones(24), 1e-6) is None
    assert compiled_rows.rms_norm(torch.ones(2, 32).half(), torch.ones(32).half(), 1e-6) is None
    assert compiled_rows.rms_norm(torch.ones(32, 32).t(), torch.ones(32), 1e-6) is None
    assert compiled_rows.rotate(torch.ones(2, 3, 48), *torch.ones(2, 2, 1, 48)) is None
    assert compiled_rows.rotate(torch.ones(2, 3, 64), *torch.ones(2, 2, 1, 32)) is None
    assert compiled_rows.rms_norm(torch.ones(2, 3, 32), torch.ones(1, 32), 1e-6) is None
    assert compiled_rows.rms_norm(torch.ones(2, 3, 32), torch.ones(1), 1e-6) is None
    assert compiled_rows.rotate(torch.ones(2, 3, 64), torch.ones(2, 1, 64), torch.ones(1, 1, 64)) is None
    assert compiled_rows.gate(torch.ones(2, 24)) is None
    half = torch.ones(2, 1, 64).bfloat16()
    assert compiled_rows.rotate(torch.ones(2, 3, 64), torch.ones(2, 1, 64), half) is None
