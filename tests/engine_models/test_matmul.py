"""Products with packed matrices equal those with plain ones."""

import pytest
import torch

from baton.engine.models.matmul import Matmul


@pytest.mark.parametrize("num_rows", [1, 2, 7, 16, 65])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_product(num_rows: int, has_bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(num_rows)
    weight, x = torch.randn(24, 40, dtype=dtype), torch.randn(num_rows, 40, dtype=dtype)
    bias = torch.randn(24, dtype=dtype) if has_bias else None
    with torch.inference_mode():
        product = Matmul(weight, bias)(x)
    wanted = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(product.double(), wanted, rtol=tolerance, atol=tolerance)


def test_a_packed_matrix_does_not_need_the_plain_one() -> None:
    weight, x = torch.randn(24, 40), torch.randn(3, 40)
    wanted = torch.nn.functional.linear(x, weight)
    matmul = Matmul(weight)
    if not matmul.keeps_weight:
        weight.zero_()
    torch.testing.assert_close(matmul(x), wanted)


def test_no_rows_make_no_rows() -> None:
    assert Matmul(torch.randn(24, 40))(torch.randn(0, 40)).shape == (0, 24)
