"""Mixture of experts of GPT-OSS: a router selects a few of many small MLPs for each token.

A rank has a slice of every expert, so the ranks' results are partial sums as in a dense MLP. Legend: T
tokens, E experts, K experts of a token, M hidden size, I inner size of this rank's slices.
"""

import torch
import torch.nn.functional as F
from torch import nn

from baton.engine.checkpoints.architecture import DecoderArchitecture
from baton.engine.models.layers import empty_parameter
from baton.engine.models.matmul import Matmul
from baton.engine.models.parallel import TensorParallelGroup


class MixtureOfExperts(nn.Module):
    """Router and experts of one layer."""

    def __init__(
        self, a: DecoderArchitecture, group: TensorParallelGroup, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        assert a.experts is not None
        self._experts, self._group = a.experts, group
        num, hidden, inner = a.experts.num_experts, a.hidden_size, a.intermediate_size // group.size

        def empty(*shape: int) -> nn.Parameter:
            return empty_parameter(*shape, dtype=dtype, device=device)

        self.router, self.router_bias = empty(num, hidden), empty(num)
        # Rows of gate and up alternate, as the columns of the checkpoint's matrices do.
        self.gate_up, self.gate_up_bias = empty(num, 2 * inner, hidden), empty(num, 2 * inner)
        self.down, self.down_bias = empty(num, hidden, inner), empty(num, hidden)
        self._gate_up: list[Matmul] = []
        self._down: list[Matmul] = []

    def seal(self) -> None:
        """See `Decoder.seal`."""
        self._gate_up = [
            Matmul(weight, bias) for weight, bias in zip(self.gate_up, self.gate_up_bias, strict=True)
        ]
        self._down = [Matmul(weight) for weight in self.down]
        if self._down[0].is_packed:
            self.gate_up.data = self.down.data = torch.empty(0, dtype=self.down.dtype)

    def forward(self, hidden_TM: torch.Tensor) -> torch.Tensor:
        best_TK, chosen_TK = F.linear(hidden_TM, self.router, self.router_bias).topk(
            self._experts.num_per_token, dim=-1
        )
        shares_TE = hidden_TM.new_zeros(len(hidden_TM), self._experts.num_experts)
        shares_TE.scatter_(1, chosen_TK, best_TK.softmax(-1))
        sum_TM = torch.zeros_like(hidden_TM)
        for expert in sorted(set(chosen_TK.flatten().tolist())):
            (tokens,) = torch.where((chosen_TK == expert).any(-1))
            part = self._down[expert](self._gated(self._gate_up[expert](hidden_TM[tokens])))
            sum_TM.index_add_(0, tokens, part * shares_TE[tokens, expert, None])
        if self._group.size > 1:
            sum_TM = self._group.all_reduce(sum_TM)
        return sum_TM + shares_TE @ self.down_bias

    def _gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        limit = self._experts.limit
        gate = gate_up[..., ::2].clamp(max=limit)
        up = gate_up[..., 1::2].clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self._experts.alpha))
