"""Layer part with a recurrent state, in the place of attention: Mamba 2 and the gated delta rule.

    hidden [T, M] -> projection -> convolution over the last K tokens -> recurrence -> gated norm [T, I]

A step reads the states of its requests from their blocks, computes, and writes them to the blocks of the
requests' last tokens (`baton.engine.states`). Requests with one token are one batch of tensor operations. A
prompt is computed in chunks of tokens, one after the other. Except for rounding, the results are the same
for any division of a prompt into steps. All between the projections is computed in float32.

Legend: T tokens of the step, R requests, L tokens of a prompt, C channels of the convolution and H heads on
this rank, I outputs of these heads, K kernel size, M hidden size.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from baton.core.kv_groups import layer_name
from baton.core.states import StatePart, place_parts
from baton.engine.forward_context import AttentionMetadata, ForwardContext
from baton.engine.models.kinds import Kind, StepOfKind
from baton.engine.models.layers import EmptyParameters, PackedLinear, RowParallelLinear
from baton.engine.states import state_metadata, state_views

CHUNK = 64  # Tokens of a chunk of a prompt. 32 to 128 are equally fast for a prompt of 500 on one core.


class PromptSlice(NamedTuple):
    """A request with several tokens in the step."""

    request: int
    tokens: slice


@dataclass(frozen=True, slots=True)
class StatePlan:
    """What the layers of one group share in a step."""

    reads: torch.Tensor  # [R] blocks.
    writes: torch.Tensor
    beginners: torch.Tensor | None  # Requests that begin, from a state of zeros. None: no request does.
    has_singles: bool
    singles: torch.Tensor | slice  # Requests with one token.
    single_tokens: torch.Tensor | slice  # The tokens of `singles`.
    prompts: tuple[PromptSlice, ...]


def plan_states(metadata: AttentionMetadata, device: torch.device) -> StatePlan:
    states = state_metadata(metadata)
    starts = states.query_start_loc_np
    counts = np.diff(starts)
    beginners, singles = np.flatnonzero(~states.has_state_np), np.flatnonzero(counts == 1)
    has_prompts = len(singles) < len(counts)
    return StatePlan(
        reads=torch.from_numpy(states.read_blocks_np).to(device),
        writes=torch.from_numpy(states.write_blocks_np).to(device),
        beginners=torch.from_numpy(beginners).to(device) if len(beginners) else None,
        has_singles=len(singles) > 0,
        singles=torch.from_numpy(singles).to(device) if has_prompts else slice(None),
        single_tokens=torch.from_numpy(starts[singles]).to(device) if has_prompts else slice(None),
        prompts=tuple(
            PromptSlice(int(request), slice(int(starts[request]), int(starts[request + 1])))
            for request in np.flatnonzero(counts > 1)
        ),
    )


class Projected(NamedTuple):
    """Projections of the tokens. The heads' numbers are in float32."""

    inputs_TC: torch.Tensor  # Inputs of the convolution.
    decay_TH: torch.Tensor  # Logarithm of the factor of a head's matrix at this token; at most 0.
    rate_TH: torch.Tensor  # Factor of what the token adds to the matrix.
    gate_TI: torch.Tensor


class StateMixer(nn.Module, ABC):
    """Called as `Attention` is: the caller applies `output` to the result, possibly not to every token."""

    input: PackedLinear
    output: RowParallelLinear
    a_log: torch.Tensor

    def __init__(
        self,
        index: int,
        kind: Kind,
        empty: EmptyParameters,
        parts: tuple[StatePart, ...],
        *,
        kernel: int,
        conv_bias: bool = False,
    ) -> None:
        """`parts`: those of the convolution in the order of its channels, and then the matrices."""
        super().__init__()
        self._name, self._kind = layer_name(index), kind
        self._group, self._parts = empty.group, parts
        *convolved, _ = place_parts(parts, tp_rank=empty.group.rank, tp_size=empty.group.size)
        self.channels = tuple(placed.num_units * placed.part.unit_shape[0] for placed in convolved)
        total = sum(self.channels)
        self.conv = empty(total, 1, kernel)
        self.conv_bias = empty(total) if conv_bias else None
        self._kernel_KC = torch.empty(0)
        self._bias_C: torch.Tensor | None = None
        self._decay_H = torch.empty(0)

    def seal(self) -> None:
        """See `Decoder.seal`."""
        self._kernel_KC = self.conv.squeeze(1).t().float().contiguous()
        self._bias_C = None if self.conv_bias is None else self.conv_bias.float()
        self._decay_H = -self.a_log.exp()
        self.input.seal()
        self.output.seal()

    def forward(
        self, hidden: torch.Tensor, context: ForwardContext, steps: Mapping[Kind, StepOfKind]
    ) -> torch.Tensor:
        projected = self._project(hidden)
        if context.attn_metadata is None:
            return torch.zeros_like(projected.gate_TI)
        plan: StatePlan = steps[self._kind].plan
        cache, watcher = context.kv_caches[self._name], context.watcher
        if watcher is not None:
            watcher.wait_for_layer_load(self._name)
        views = state_views(cache, self._parts, tp_rank=self._group.rank, tp_size=self._group.size)
        # Copies of all states before the first one is written: requests may continue from the same block.
        states = [view[plan.reads] for view in views]
        if plan.beginners is not None:
            for state in states:
                state[plan.beginners] = 0
        mixed_TI = self._mix(projected, states, plan)
        for view, state in zip(views, states, strict=True):
            view[plan.writes] = state
        if watcher is not None:
            watcher.save_kv_layer(self._name, cache, context.metadata_of(self._kind.group))
        return self._gated_norm(mixed_TI, projected.gate_TI)

    def _mix(self, projected: Projected, states: list[torch.Tensor], plan: StatePlan) -> torch.Tensor:
        """Convolution and recurrence of the step. Replaces the `states`."""
        *inputs, matrices = states
        past_RCK = torch.cat([part.flatten(1, 2) for part in inputs], dim=1)
        past_RKC = past_RCK.transpose(1, 2)
        mixed_TI = torch.empty(projected.gate_TI.shape, dtype=torch.float32, device=projected.gate_TI.device)
        if plan.has_singles:
            singles, tokens = plan.singles, plan.single_tokens
            window_RKC = torch.cat((past_RKC[singles], projected.inputs_TC[tokens].unsqueeze(1)), dim=1)
            convolved_RC = self._convolve(window_RKC).squeeze(1)
            some = matrices[singles]
            mixed_TI[tokens] = self._step(
                convolved_RC, projected.decay_TH[tokens], projected.rate_TH[tokens], some
            )
            if plan.prompts:
                matrices[singles] = some  # `some` is a copy here; without prompts it is a view.
            self._keep(inputs, singles, window_RKC[:, 1:])
        for request, tokens in plan.prompts:
            window_KC = torch.cat((past_RKC[request], projected.inputs_TC[tokens]))
            convolved_LC = self._convolve(window_KC)
            decay_LH, rate_LH = projected.decay_TH[tokens], projected.rate_TH[tokens]
            mixed_LI, matrix = mixed_TI[tokens], matrices[request]
            for start in range(0, len(convolved_LC), CHUNK):
                chunk = slice(start, start + CHUNK)
                mixed_LI[chunk] = self._scan(convolved_LC[chunk], decay_LH[chunk], rate_LH[chunk], matrix)
            self._keep(inputs, request, window_KC[len(window_KC) - past_RKC.shape[1] :])
        return mixed_TI

    def _convolve(self, window_KC: torch.Tensor) -> torch.Tensor:
        """Convolution `[..., L, C]` of `[..., K - 1 + L, C]`, with its activation."""
        wide, num = window_KC.float(), window_KC.shape[-2] - len(self._kernel_KC) + 1
        shifted = (wide[..., shift : shift + num, :] for shift in range(len(self._kernel_KC)))
        terms = [inputs * weights for inputs, weights in zip(shifted, self._kernel_KC, strict=True)]
        convolved = sum(terms[1:], terms[0])
        return F.silu(convolved if self._bias_C is None else convolved + self._bias_C)

    def _keep(
        self, inputs: list[torch.Tensor], requests: torch.Tensor | slice | int, last_KC: torch.Tensor
    ) -> None:
        """Replace the convolution's `inputs` of `requests` by their last ones, `[..., K - 1, C]`."""
        for part, kept in zip(inputs, last_KC.split_with_sizes(self.channels, dim=-1), strict=True):
            part[requests] = kept.transpose(-1, -2).reshape(*kept.shape[:-2], *part.shape[1:])

    @abstractmethod
    def _project(self, hidden: torch.Tensor) -> Projected: ...

    @abstractmethod
    def _step(
        self,
        convolved_RC: torch.Tensor,
        decay_RH: torch.Tensor,
        rate_RH: torch.Tensor,
        matrices: torch.Tensor,
    ) -> torch.Tensor:
        """Outputs `[R, I]` of one token of each request. Replaces the heads' matrices `[R, H, ...]`."""

    @abstractmethod
    def _scan(
        self, convolved_LC: torch.Tensor, decay_LH: torch.Tensor, rate_LH: torch.Tensor, matrix: torch.Tensor
    ) -> torch.Tensor:
        """Outputs `[L, I]` of the tokens of a chunk. Replaces the heads' matrices `[H, ...]`."""

    @abstractmethod
    def _gated_norm(self, mixed_TI: torch.Tensor, gate_TI: torch.Tensor) -> torch.Tensor:
        """The normed outputs, in the model's dtype."""


def decays(decay_LH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of the logarithms up to each token `[H, L]`, and factors from token j to i >= j `[H, i, j]`.

    Sums are in float64: in float32 they made relative errors of 1e-4 in heads that forget quickly.
    """
    sums_HL = decay_LH.t().double().cumsum(-1)
    between_HLL = (sums_HL.unsqueeze(-1) - sums_HL.unsqueeze(-2)).float()
    is_later = torch.ones(between_HLL.shape[1:], dtype=torch.bool, device=sums_HL.device).triu_(1)
    return sums_HL.float(), between_HLL.masked_fill_(is_later, -torch.inf).exp_()
