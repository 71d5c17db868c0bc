"""Mixture of experts: a router selects a few of many small MLPs for each token.

A rank has a slice of every expert, so the ranks' results are partial sums as in a dense MLP. Legend: T
tokens, E experts, K experts of a token, G groups of experts, M hidden size, I experts of a group.
"""

import torch
import torch.nn.functional as F
from torch import nn

from baton.checkpoints.architecture import DecoderArchitecture, Experts
from baton.engine.models.layers import EmptyParameters, drop
from baton.engine.models.matmul import Matmul


class MixtureOfExperts(nn.Module):
    """Router and experts of one layer."""

    def __init__(self, a: DecoderArchitecture, experts: Experts, empty: EmptyParameters) -> None:
        super().__init__()
        self._experts, self._group = experts, empty.group
        num, hidden, inner = experts.num_experts, a.hidden_size, a.expert_size // empty.group.size
        has_bias = experts.alpha is not None
        self.router = empty(num, hidden)
        # Rows of gate and up alternate in GPT-OSS, as the columns of the checkpoint's matrices do. Other
        # families have the rows of gate first.
        self.gate_up, self.down = empty(num, 2 * inner, hidden), empty(num, hidden, inner)
        self.router_bias = empty(num) if has_bias else None
        self.gate_up_bias = empty(num, 2 * inner) if has_bias else None
        self.down_bias = empty(num, hidden) if has_bias else None
        self.choice_bias = empty(num, dtype=torch.float32) if experts.has_choice_bias else None
        self._gate_up: list[Matmul] = []
        self._down: list[Matmul] = []

    def seal(self) -> None:
        """See `Decoder.seal`."""
        biases = self.gate_up_bias if self.gate_up_bias is not None else [None] * len(self.gate_up)
        self._gate_up = [Matmul(weight, bias) for weight, bias in zip(self.gate_up, biases, strict=True)]
        self._down = [Matmul(weight) for weight in self.down]
        if not self._down[0].keeps_weight:
            drop(self.gate_up)
            drop(self.down)

    def forward(self, hidden_TM: torch.Tensor) -> torch.Tensor:
        chosen_TK, shares_TK = self._choose(hidden_TM)
        shares_TE = hidden_TM.new_zeros(len(hidden_TM), self._experts.num_experts)
        shares_TE.scatter_(1, chosen_TK, shares_TK)
        sum_TM = torch.zeros_like(hidden_TM)
        for expert in sorted(set(chosen_TK.flatten().tolist())):
            (tokens,) = torch.where((chosen_TK == expert).any(-1))
            part = self._down[expert](self._gated(self._gate_up[expert](hidden_TM[tokens])))
            sum_TM.index_add_(0, tokens, part * shares_TE[tokens, expert, None])
        if self._group.size > 1:
            sum_TM = self._group.all_reduce(sum_TM)
        return sum_TM if self.down_bias is None else sum_TM + shares_TE @ self.down_bias

    def _choose(self, hidden_TM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each token, and their shares."""
        experts, count = self._experts, self._experts.num_per_token
        if experts.is_wide:
            scores_TE = F.linear(hidden_TM.float(), self.router.float())
        else:
            scores_TE = F.linear(hidden_TM, self.router, self.router_bias)
        if experts.alpha is not None:
            best_TK, chosen_TK = scores_TE.topk(count, dim=-1)
            return chosen_TK, best_TK.softmax(-1)
        scores_TE = scores_TE.float()
        shares_TE = scores_TE.softmax(-1) if experts.scoring == "softmax" else scores_TE.sigmoid()
        chosen_TK = self._in_best_groups(
            shares_TE if self.choice_bias is None else shares_TE + self.choice_bias
        ).topk(count, dim=-1)[1]
        shares_TK = shares_TE.gather(1, chosen_TK)
        if experts.is_normalised:
            shares_TK = shares_TK / shares_TK.sum(-1, keepdim=True)
        return chosen_TK, (shares_TK * experts.share_scale).to(hidden_TM.dtype)

    def _in_best_groups(self, scores_TE: torch.Tensor) -> torch.Tensor:
        """The scores, with those outside of each token's best groups of experts at minus infinity."""
        experts = self._experts
        if experts.num_groups == experts.groups_per_token:
            return scores_TE
        scores_TGI = scores_TE.view(len(scores_TE), experts.num_groups, -1)
        of_groups_TG = scores_TGI.topk(experts.scores_per_group, dim=-1)[0].sum(-1)
        best_TG = of_groups_TG.topk(experts.groups_per_token, dim=-1)[1]
        is_outside_TG = torch.ones_like(of_groups_TG, dtype=torch.bool).scatter_(1, best_TG, False)
        return scores_TGI.masked_fill(is_outside_TG[..., None], -torch.inf).view_as(scores_TE)

    def _gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        alpha, limit = self._experts.alpha, self._experts.limit
        if alpha is None or limit is None:
            gate, up = gate_up.chunk(2, dim=-1)
            return F.silu(gate) * up
        gate = gate_up[..., ::2].clamp(max=limit)
        up = gate_up[..., 1::2].clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))
