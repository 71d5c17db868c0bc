"""Mixer with the gated delta rule (arXiv 2412.06464), as in Qwen3-Next.

A value head has a matrix S `[D, P]`. With the token's key k and query q `[D]` of unit length, its value v
`[P]`, g <= 0 and beta in (0, 1):

    S <- exp(g) S        S <- S + k (beta (v - k^T S))^T        y = q^T S / sqrt(D)

What a token adds depends on S, so the tokens of a chunk form a triangular system: with `u_i` the vector that
token i adds along k_i, and S the matrix before the chunk,

    u_i + sum over j < i of beta_i (k_i . k_j) exp(sum of g from j + 1 to i) u_j
        = beta_i (v_i - exp(sum of g up to i) k_i^T S)

Legend: L tokens of a chunk, R requests, H value heads and G key heads of this rank, E value heads of a key
head, D key size, P value size.
"""

import torch
import torch.nn.functional as F

from baton.checkpoints.architecture import DecoderArchitecture
from baton.checkpoints.state_config import GatedDelta
from baton.engine.models.kinds import Kind
from baton.engine.models.layers import EmptyParameters, PackedLinear, RowParallelLinear, rms_norm
from baton.engine.models.state_mixer import Projected, StateMixer, decays

_NORM_EPS = 1e-6  # Epsilon of the length of keys and queries.


class GatedDeltaMixer(StateMixer):
    """One rank's heads. If there are more ranks than key heads, several ranks have the same key head."""

    def __init__(
        self, a: DecoderArchitecture, state: GatedDelta, index: int, kind: Kind, empty: EmptyParameters
    ) -> None:
        parts = state.parts(str(empty.dtype).removeprefix("torch."))
        super().__init__(index, kind, empty, parts, kernel=state.kernel)
        self.state = state
        self._eps = a.rms_norm_eps
        self._heads = state.num_value_heads // empty.group.size
        inner = self._heads * state.value_dim
        # What is convolved (q, k, v), then the gate, beta and the input of g.
        self.input = PackedLinear(a.hidden_size, (*self.channels, inner, self._heads, self._heads), empty)
        self.output = RowParallelLinear(inner, a.hidden_size, empty)
        self.norm = empty(state.value_dim)
        self.a_log, self.step_bias = (empty(self._heads, dtype=torch.float32) for _ in range(2))

    def _project(self, hidden: torch.Tensor) -> Projected:
        inputs_TC, gate_TI, rate_TH, steps_TH = self.input(hidden).split_with_sizes(
            (sum(self.channels), self._heads * self.state.value_dim, self._heads, self._heads), dim=-1
        )
        decay_TH = self._decay_H * F.softplus(steps_TH.float() + self.step_bias)
        return Projected(inputs_TC, decay_TH, rate_TH.float().sigmoid(), gate_TI)

    def _split(self, convolved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scaled q and k `[L, G, D]`, v `[L, G, E, P]`."""
        q, k, v = convolved.split_with_sizes(self.channels, dim=-1)
        key_dim, num = self.state.key_dim, len(convolved)
        q_LGD, k_LGD = (
            part * torch.rsqrt(part.square().sum(-1, keepdim=True) + _NORM_EPS)
            for part in (q.view(num, -1, key_dim), k.view(num, -1, key_dim))
        )
        return q_LGD * key_dim**-0.5, k_LGD, v.view(num, k_LGD.shape[1], -1, self.state.value_dim)

    def _step(
        self,
        convolved_RC: torch.Tensor,
        decay_RH: torch.Tensor,
        rate_RH: torch.Tensor,
        matrices: torch.Tensor,
    ) -> torch.Tensor:
        q_RGD, k_RGD, v_RGEP = self._split(convolved_RC)
        matrices.mul_(decay_RH.exp()[..., None, None])
        of_groups = matrices.view(*v_RGEP.shape[:3], *matrices.shape[2:])
        k_row, q_row = k_RGD[:, :, None, None], q_RGD[:, :, None, None]
        stored_RGEP = (k_row @ of_groups).squeeze(-2)
        added_RGEP = (v_RGEP - stored_RGEP) * rate_RH.view(*v_RGEP.shape[:3], 1)
        of_groups.addcmul_(k_row.transpose(-1, -2), added_RGEP.unsqueeze(-2))
        return (q_row @ of_groups).flatten(1)

    def _scan(
        self, convolved_LC: torch.Tensor, decay_LH: torch.Tensor, rate_LH: torch.Tensor, matrix: torch.Tensor
    ) -> torch.Tensor:
        q_LGD, k_LGD, v_LGEP = self._split(convolved_LC)
        num, groups, in_group, _ = v_LGEP.shape
        sums_HL, factors_HLL = decays(decay_LH)
        since_start_GEL = sums_HL.exp().view(groups, in_group, num, 1)
        factors_GELL = factors_HLL.view(groups, in_group, num, num)
        rate_GEL = rate_LH.t().reshape(groups, in_group, num, 1)
        of_groups = matrix.view(groups, in_group, *matrix.shape[1:])
        q_GLD, k_GLD = q_LGD.transpose(0, 1).unsqueeze(1), k_LGD.transpose(0, 1).unsqueeze(1)
        v_GELP = v_LGEP.permute(1, 2, 0, 3)
        # The solver reads only what is below the diagonal.
        system_GELL = rate_GEL * (k_GLD @ k_GLD.transpose(-1, -2)) * factors_GELL
        unexplained_GELP = rate_GEL * (v_GELP - since_start_GEL * (k_GLD @ of_groups))
        added_GELP = torch.linalg.solve_triangular(
            system_GELL, unexplained_GELP, upper=False, unitriangular=True
        )
        weights_GELL = (q_GLD @ k_GLD.transpose(-1, -2)) * factors_GELL
        outputs_GELP: torch.Tensor = since_start_GEL * (q_GLD @ of_groups) + weights_GELL @ added_GELP
        until_end_GEL = factors_GELL[:, :, -1].unsqueeze(-1)
        matrix.mul_(sums_HL[:, -1].exp()[:, None, None])
        of_groups.add_(k_GLD.transpose(-1, -2) @ (until_end_GEL * added_GELP))
        return outputs_GELP.permute(2, 0, 1, 3).flatten(1)

    def _gated_norm(self, mixed_TI: torch.Tensor, gate_TI: torch.Tensor) -> torch.Tensor:
        """RMS norm of each head before the gate."""
        heads = mixed_TI.to(gate_TI.dtype).view(len(mixed_TI), self._heads, -1)
        normed = rms_norm(heads, self.norm, self._eps).flatten(1)
        gated: torch.Tensor = normed * F.silu(gate_TI.float())
        return gated.to(gate_TI.dtype)
