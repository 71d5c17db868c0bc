"""Chunks of prompts and batches of single tokens, compared with the papers' recurrences token by token."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.checkpoints.architecture import DecoderArchitecture
from baton.checkpoints.families import parse_architecture
from baton.checkpoints.state_config import GatedDelta, Mamba2
from baton.engine.models import SingleRank
from baton.engine.models.gated_delta import GatedDeltaMixer
from baton.engine.models.kinds import Kind
from baton.engine.models.layers import EmptyParameters
from baton.engine.models.mamba2 import Mamba2Mixer
from baton.engine.models.state_mixer import CHUNK, StateMixer

EMPTY = EmptyParameters(SingleRank(), torch.float32, torch.device("cpu"))

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
    mixer = Mamba2Mixer(a, a.state, 0, Kind(0, None), EMPTY)
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


def gated_delta_mixer(groups: int, in_group: int, key_dim: int, value_dim: int) -> GatedDeltaMixer:
    a = parse_architecture(
        {
            "architectures": ["Qwen3NextForCausalLM"],
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_attention_heads": 1,
            "head_dim": 8,
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
            "linear_num_key_heads": groups,
            "linear_num_value_heads": groups * in_group,
            "linear_key_head_dim": key_dim,
            "linear_value_head_dim": value_dim,
            "num_hidden_layers": 1,
            "vocab_size": 8,
        }
    )
    assert isinstance(a.state, GatedDelta)
    return GatedDeltaMixer(a, a.state, 0, Kind(0, None), EMPTY)


def gated_delta_token(
    mixer: GatedDeltaMixer,
    convolved: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
    matrix: torch.Tensor,
) -> torch.Tensor:
    """One token by the formula of the module, head by head, in float64. Replaces `matrix`."""
    state, outputs = mixer.state, []
    q, k, v = convolved.split(mixer.channels)
    for head in range(state.num_value_heads):
        group = head // (state.num_value_heads // state.num_key_heads)
        q_g, k_g = (part[group * state.key_dim : (group + 1) * state.key_dim] for part in (q, k))
        q_g, k_g = (part / (part.square().sum() + 1e-6).sqrt() for part in (q_g, k_g))
        v_h = v[head * state.value_dim : (head + 1) * state.value_dim]
        matrix[head] *= math.exp(decay[head])
        matrix[head] += torch.outer(k_g, rate[head] * (v_h - k_g @ matrix[head]))
        outputs.append(q_g @ matrix[head] / math.sqrt(state.key_dim))
    return torch.cat(outputs)


@pytest.mark.parametrize(
    ("mixer_of", "token_of"), [(mamba2_mixer, mamba2_token), (gated_delta_mixer, gated_delta_token)]
)
@settings(max_examples=40, deadline=None)
@given(
    groups=SIZES,
    in_group=SIZES,
    inner=st.sampled_from([1, 3, 8]),
    outer=st.sampled_from([1, 4, 16]),
    length=st.sampled_from([1, 2, 7, CHUNK]),
    speed=st.sampled_from([0.01, 1.0, 30.0]),
    seed=st.integers(0, 1 << 30),
)
@example(groups=3, in_group=4, inner=8, outer=16, length=CHUNK, speed=30.0, seed=7)
def test_chunks_and_steps_are_the_recurrence(
    mixer_of: Callable[[int, int, int, int], StateMixer],
    token_of: Callable[..., torch.Tensor],
    groups: int,
    in_group: int,
    inner: int,
    outer: int,
    length: int,
    speed: float,
    seed: int,
) -> None:
    """`inner`, `outer`: the shape of the matrix of each head."""
    torch.manual_seed(seed)
    mixer, heads = mixer_of(groups, in_group, inner, outer), groups * in_group
    convolved = torch.randn(length, sum(mixer.channels))
    decay, rate = -speed * torch.rand(length, heads), torch.rand(length, heads)
    start = torch.randn(heads, inner, outer)

    exact = start.double()
    expected = torch.stack(
        [
            token_of(mixer, *token, exact)
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
