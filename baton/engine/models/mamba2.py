"""Mixer of Mamba 2 (arXiv 2405.21060), as in Mamba 2 models and in Granite's hybrids.

Head h of group g has a matrix S `[P, N]`. With the token's x_h `[P]`, B_g and C_g `[N]`, time step dt_h > 0
and the head's constant A_h < 0:

    S <- exp(dt_h A_h) S + dt_h x_h B_g^T        y_h = S C_g + D_h x_h

A chunk of tokens is two products instead (section 6 of the paper): y_i is the sum over tokens j <= i of
`(C_i . B_j) exp(sum of dt A from j + 1 to i) dt_j x_j`, plus what the state before the chunk adds.

Legend: L tokens of a chunk, R requests, H heads, G groups of this rank, E heads of a group, P head size,
N state size, I = H * P.
"""

import torch
import torch.nn.functional as F

from baton.checkpoints.architecture import DecoderArchitecture
from baton.checkpoints.state_config import Mamba2
from baton.core.layout import kv_heads_of
from baton.engine.models.kinds import Kind
from baton.engine.models.layers import EmptyParameters, PackedLinear, RowParallelLinear
from baton.engine.models.state_mixer import Projected, StateMixer, decays


class Mamba2Mixer(StateMixer):
    """One rank's heads. If there are more ranks than groups, several ranks have the same group."""

    def __init__(
        self, a: DecoderArchitecture, state: Mamba2, index: int, kind: Kind, empty: EmptyParameters
    ) -> None:
        parts, group = state.parts(str(empty.dtype).removeprefix("torch.")), empty.group
        super().__init__(index, kind, empty, parts, kernel=state.kernel, conv_bias=state.conv_bias)
        self.state = state
        self._eps = a.rms_norm_eps
        self._heads = state.num_heads // group.size
        self._groups = kv_heads_of(group.rank, tp_size=group.size, num_kv_heads=state.num_groups)
        inner = self._heads * state.head_dim
        # Gate, then what is convolved (x, B, C), then the time steps.
        self.input = PackedLinear(
            a.hidden_size, (inner, *self.channels, self._heads), empty, bias=state.projection_bias
        )
        self.output = RowParallelLinear(inner, a.hidden_size, empty, bias=state.projection_bias)
        self.norm = empty(inner)
        self.a_log, self.skip, self.step_bias = (empty(self._heads, dtype=torch.float32) for _ in range(3))

    def _project(self, hidden: torch.Tensor) -> Projected:
        inner = self._heads * self.state.head_dim
        gate_TI, inputs_TC, steps_TH = self.input(hidden).split_with_sizes(
            (inner, sum(self.channels), self._heads), dim=-1
        )
        rate_TH = F.softplus(steps_TH.float() + self.step_bias)
        lower, upper = self.state.min_time_step, self.state.max_time_step
        if lower is not None or upper is not None:
            rate_TH = rate_TH.clamp(lower, upper)
        return Projected(inputs_TC, self._decay_H * rate_TH, rate_TH, gate_TI)

    def _split(self, convolved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x `[L, G, E, P]`, B and C `[L, G, N]`."""
        x, b, c = convolved.split_with_sizes(self.channels, dim=-1)
        groups = len(self._groups)
        return (
            x.view(len(x), groups, -1, self.state.head_dim),
            b.view(len(b), groups, -1),
            c.view(len(c), groups, -1),
        )

    def _step(
        self,
        convolved_RC: torch.Tensor,
        decay_RH: torch.Tensor,
        rate_RH: torch.Tensor,
        matrices: torch.Tensor,
    ) -> torch.Tensor:
        x_RGEP, b_RGN, c_RGN = self._split(convolved_RC)
        num, groups, in_group, head_dim = x_RGEP.shape
        of_groups = matrices.view(num, groups, in_group * head_dim, -1)
        matrices.mul_(decay_RH.exp()[..., None, None])
        added_RGE = x_RGEP * rate_RH.view(num, groups, in_group, 1)
        of_groups.addcmul_(added_RGE.flatten(2).unsqueeze(-1), b_RGN.unsqueeze(2))
        read_RGE = (of_groups @ c_RGN.unsqueeze(-1)).view(x_RGEP.shape)
        return self._with_skip(read_RGE, x_RGEP)

    def _scan(
        self, convolved_LC: torch.Tensor, decay_LH: torch.Tensor, rate_LH: torch.Tensor, matrix: torch.Tensor
    ) -> torch.Tensor:
        x_LGEP, b_LGN, c_LGN = self._split(convolved_LC)
        num, groups, in_group, _ = x_LGEP.shape
        sums_HL, factors_HLL = decays(decay_LH)
        of_groups = matrix.view(groups, in_group, *matrix.shape[1:])
        added_LGEP = x_LGEP * rate_LH.view(num, groups, in_group, 1)
        scores_GLL = torch.einsum("ign,jgn->gij", c_LGN, b_LGN)
        weights_GELL = scores_GLL.unsqueeze(1) * factors_HLL.view(groups, in_group, num, num)
        inside_LGEP = torch.einsum("geij,jgep->igep", weights_GELL, added_LGEP)
        before_LGEP = torch.einsum("ign,gepn->igep", c_LGN, of_groups)
        since_start_LGE = sums_HL.exp().t().view(num, groups, in_group, 1)
        outputs_LGEP = inside_LGEP + before_LGEP * since_start_LGE
        until_end_LGE = factors_HLL[:, -1].t().reshape(num, groups, in_group, 1)
        matrix.mul_(sums_HL[:, -1].exp()[:, None, None])
        of_groups.add_(torch.einsum("jgep,jgn->gepn", added_LGEP * until_end_LGE, b_LGN))
        return self._with_skip(outputs_LGEP, x_LGEP)

    def _with_skip(self, outputs: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(outputs, x, self.skip.view(x.shape[1], x.shape[2], 1)).flatten(1)

    def _gated_norm(self, mixed_TI: torch.Tensor, gate_TI: torch.Tensor) -> torch.Tensor:
        """RMS norm of each group of the whole model, after the gate."""
        gated_TGI = (mixed_TI * F.silu(gate_TI.float())).view(len(mixed_TI), len(self._groups), -1)
        squares_TG = gated_TGI.square().sum(-1)
        if self._group.size > self.state.num_groups:
            # Other ranks have the other heads of this rank's only group.
            of_all_TG = squares_TG.new_zeros(len(squares_TG), self.state.num_groups)
            of_all_TG[:, self._groups.start] = squares_TG[:, 0]
            squares_TG = self._group.all_reduce(of_all_TG)[:, self._groups.start :][:, :1]
        size = self.state.inner_size // self.state.num_groups
        normed_TGI = gated_TGI * torch.rsqrt(squares_TG / size + self._eps).unsqueeze(-1)
        normed: torch.Tensor = self.norm * normed_TGI.flatten(1).to(gate_TI.dtype)
        return normed
