"""Chunks of prompts and batches of single tokens, compared with the papers' recurrences token by token."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.checkpoints.architecture import DecoderArchitecture, parse_architecture
from baton.engine.checkpoints.state_config import Mamba2
from baton.engine.models import SingleRank
from baton.engine.models.kinds import Kind
from baton.engine.models.mamba2 import Mamba2Mixer
from baton.engine.models.state_mixer import CHUNK

CLOSE = {"atol": 1e-4, "rtol": 1e-4}


def mamba2_mixer(groups: int, in_group: int, head_dim: int, state_size: int) -> Mamba2Mixer:
    heads = groups * in_group
    a: DecoderArchitecture = parse_architecture(
        {
            "architectures": ["Mamba2ForCausalLM"],
            "hidden_size": heads * head_dim,
            "expand": 1,
            "num_heads": heads,
            "head_dim": head_dim,
            "n_groups": groups,
            "state_size": state_size,
            "num_hidden_layers": 1,
            "vocab_size": 8,
        }
    )
    assert isinstance(a.state, Mamba2)
    mixer = Mamba2Mixer(a, a.state, 0, Kind(0, None), SingleRank(), torch.float32, torch.device("cpu"))
    mixer.skip.normal_()
    return mixer


def mamba2_token(
    mixer: Mamba2Mixer, convolved: torch.Tensor, decay: torch.Tensor, rate: torch.Tensor, matrix: torch.Tensor
) -> torch.Tensor:
    """One token by the formula of the module, head by head, in float64. Replaces `matrix`."""
    state, outputs = mixer.state, []
    x, b, c = convolved.split(mixer.channels)
    for head in range(state.num_heads):
        group = head // (state.num_heads // state.num_groups)
        x_h = x[head * state.head_dim : (head + 1) * state.head_dim]
        b_g = b[group * state.state_size : (group + 1) * state.state_size]
        c_g = c[group * state.state_size : (group + 1) * state.state_size]
        matrix[head] = math.exp(decay[head]) * matrix[head] + rate[head] * torch.outer(x_h, b_g)
        outputs.append(matrix[head] @ c_g + float(mixer.skip[head]) * x_h)
    return torch.cat(outputs)


SIZES = st.sampled_from([1, 2, 3, 4])


@settings(max_examples=40, deadline=None)
@given(
    groups=SIZES,
    in_group=SIZES,
    head_dim=st.sampled_from([1, 3, 8]),
    state_size=st.sampled_from([1, 4, 16]),
    length=st.sampled_from([1, 2, 7, CHUNK]),
    speed=st.sampled_from([0.01, 1.0, 30.0]),
    seed=st.integers(0, 1 << 30),
)
def test_mamba2_chunks_and_steps_are_the_recurrence(
    groups: int, in_group: int, head_dim: int, state_size: int, length: int, speed: float, seed: int
) -> None:
    torch.manual_seed(seed)
    mixer = mamba2_mixer(groups, in_group, head_dim, state_size)
    heads = groups * in_group
    convolved = torch.randn(length, sum(mixer.channels))
    decay, rate = -speed * torch.rand(length, heads), torch.rand(length, heads)
    start = torch.randn(heads, head_dim, state_size)

    exact = start.double()
    expected = torch.stack(
        [
            mamba2_token(mixer, *token, exact)
            for token in zip(convolved.double(), decay.double(), rate.double(), strict=True)
        ]
    ).float()
    chunked = start.clone()
    torch.testing.assert_close(mixer._scan(convolved, decay, rate, chunked), expected, **CLOSE)
    torch.testing.assert_close(chunked, exact.float(), **CLOSE)
    # The same tokens one by one, each in a batch with another request.
    stepped = torch.stack((start, torch.randn_like(start)))
    for token in range(length):
        both = [torch.stack((part[token], part[length - 1 - token])) for part in (convolved, decay, rate)]
        torch.testing.assert_close(mixer._step(*both, stepped)[0], expected[token], **CLOSE)
    torch.testing.assert_close(stepped[0], exact.float(), **CLOSE)


@pytest.mark.parametrize("kernel", [2, 4])
def test_a_convolution_sees_its_last_inputs(kernel: int) -> None:
    mixer = mamba2_mixer(1, 2, 4, 4)
    mixer.conv = torch.nn.Parameter(torch.randn(sum(mixer.channels), 1, kernel), requires_grad=False)
    assert mixer.conv_bias is not None
    for parameter in (*mixer.parameters(),):
        parameter.normal_()
    mixer.seal()
    inputs = torch.randn(kernel - 1 + 9, sum(mixer.channels))
    expected = torch.nn.functional.conv1d(inputs.t(), mixer.conv, mixer.conv_bias, groups=len(mixer.conv)).t()
    torch.testing.assert_close(mixer._convolve(inputs), torch.nn.functional.silu(expected))
