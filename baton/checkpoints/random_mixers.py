"""Random weights of layers with a recurrent state.

Heads forget at different rates, after a few tokens or after some hundreds, so that answers depend on all of
a prompt. What the convolution has of the last tokens matters too.
"""

from collections.abc import Iterator

from baton.checkpoints.architecture import DecoderArchitecture
from baton.checkpoints.random_tensor import RandomTensor
from baton.checkpoints.state_config import GatedDelta, Mamba2

_CONV_STD = 0.7
_BIAS_STD = 0.3
_DECAY_STD = 1.5  # Logarithm of a head's decay: standard deviation about the mean below.
_DECAY_MEAN = -3.0
_STEP_STD, _STEP_MEAN = 0.5, -0.5  # A head's time step before softplus.
_SKIP = 0.3
_GATE_GAIN = 2.0  # Compensates for a gate after the norm.


def mixer_tensors(a: DecoderArchitecture, prefix: str) -> Iterator[RandomTensor]:
    if isinstance(a.state, Mamba2):
        yield from _mamba2_tensors(a, a.state, prefix)
    if isinstance(a.state, GatedDelta):
        yield from _gated_delta_tensors(a, a.state, prefix)


def _mamba2_tensors(a: DecoderArchitecture, state: Mamba2, prefix: str) -> Iterator[RandomTensor]:
    inner, heads, hidden = state.inner_size, state.num_heads, a.hidden_size
    channels = inner + 2 * state.num_groups * state.state_size
    rows = inner + channels + heads
    yield RandomTensor(f"{prefix}.in_proj.weight", (rows, hidden), hidden**-0.5)
    yield RandomTensor(f"{prefix}.conv1d.weight", (channels, 1, state.kernel), _CONV_STD)
    if state.conv_bias:
        yield RandomTensor(f"{prefix}.conv1d.bias", (channels,), _BIAS_STD)
    yield RandomTensor(f"{prefix}.A_log", (heads,), _DECAY_STD, _DECAY_MEAN)
    yield RandomTensor(f"{prefix}.dt_bias", (heads,), _STEP_STD, _STEP_MEAN)
    yield RandomTensor(f"{prefix}.D", (heads,), _SKIP, _SKIP)
    yield RandomTensor(f"{prefix}.norm.weight", (inner,), 0.1, 1.0)
    yield RandomTensor(f"{prefix}.out_proj.weight", (hidden, inner), inner**-0.5)
    if state.projection_bias:
        yield RandomTensor(f"{prefix}.in_proj.bias", (rows,), _BIAS_STD)
        yield RandomTensor(f"{prefix}.out_proj.bias", (hidden,), _BIAS_STD)


def _gated_delta_tensors(a: DecoderArchitecture, state: GatedDelta, prefix: str) -> Iterator[RandomTensor]:
    inner, heads, hidden = state.inner_size, state.num_value_heads, a.hidden_size
    keys = state.num_key_heads * state.key_dim
    rows = {"qkvz": 2 * keys + 2 * inner, "ba": 2 * heads}
    if a.names.are_inputs_split:
        rows = {"qkv": 2 * keys + inner, "z": inner, "b": heads, "a": heads}
    for name, num_rows in rows.items():
        yield RandomTensor(f"{prefix}.in_proj_{name}.weight", (num_rows, hidden), hidden**-0.5)
    yield RandomTensor(f"{prefix}.conv1d.weight", (2 * keys + inner, 1, state.kernel), _CONV_STD)
    yield RandomTensor(f"{prefix}.A_log", (heads,), _DECAY_STD, _DECAY_MEAN)
    yield RandomTensor(f"{prefix}.dt_bias", (heads,), _STEP_STD, _STEP_MEAN)
    yield RandomTensor(f"{prefix}.norm.weight", (state.value_dim,), 0.1, 1.0)
    yield RandomTensor(f"{prefix}.out_proj.weight", (hidden, inner), _GATE_GAIN * inner**-0.5)
