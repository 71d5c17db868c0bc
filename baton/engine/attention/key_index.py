"""Choice of the keys that a query attends to, by an index of small keys (DeepSeek Sparse Attention).

Each token has an index key in a cache of its own. The score of a key for a query is the weighted sum over the
index heads of `relu(index query . index key)`. Legend: R queries, I index heads, D index head size, L keys.
"""

from typing import NamedTuple

import torch

from baton.engine.attention.backend import rows_of, run_of


class KeyIndex(NamedTuple):
    """Index queries of a step, and the index cache of a layer."""

    queries_TID: torch.Tensor
    weights_TI: torch.Tensor  # float32.
    cache_NHPC: torch.Tensor  # One head; the slots are index keys.
    num_chosen: int  # Keys of each query.

    def gather(self, rows: torch.Tensor, num_reqs: int) -> torch.Tensor:
        """Index keys `[requests, L, D]` of blocks, as `SdpaBackend` gathers keys."""
        run, width = run_of(self.cache_NHPC), self.cache_NHPC.shape[-1]
        return rows_of(self.cache_NHPC, run).index_select(0, rows).view(num_reqs, -1, width)

    def restrict(
        self, tokens: torch.Tensor | slice, keys: torch.Tensor, mask_RL: torch.Tensor | None
    ) -> torch.Tensor | None:
        """`mask_RL`, which is added to scores, and which now hides also the keys that are not chosen.

        `tokens`: the queries. `keys`: `[L, D]`, or `[R, L, D]` if each query has its own. None: no key is
        hidden.
        """
        if keys.shape[-2] <= self.num_chosen:
            return mask_RL
        queries_RID, weights_RI = self.queries_TID[tokens].float(), self.weights_TI[tokens]
        scores_RIL = torch.matmul(queries_RID, keys.float().transpose(-1, -2)).relu_()
        scores_RL = torch.matmul(weights_RI.unsqueeze(1), scores_RIL).squeeze(1)
        if mask_RL is not None:
            scores_RL += mask_RL
        chosen = scores_RL.topk(self.num_chosen, dim=-1).indices
        hidden = torch.full_like(scores_RL, -torch.inf, dtype=self.queries_TID.dtype).scatter_(1, chosen, 0)
        return hidden if mask_RL is None else hidden.add_(mask_RL)
