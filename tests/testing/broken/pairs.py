"""Faults that need two engines: D believes what P's params do not prove."""

from __future__ import annotations

import msgspec

from baton.contract import host
from baton.core.prefilled import PrefilledTokens
from tests.testing.broken import breaks
from tests.testing.sound_pair import PairScheduler


@breaks("params-believed")
class BelievesParams(PairScheduler):
    """Assumes that a request with params has the prompt that they were made for."""

    def num_matching(self, request: host.Request, offered: list[list[str]]) -> int:
        return len(offered)


@breaks("wrong-token")
class MisreadsTheFirstToken(PairScheduler):
    """Gives D another first token than P has sampled."""

    def take_prefilled_tokens(self, request_id: str) -> PrefilledTokens | None:
        taken = super().take_prefilled_tokens(request_id)
        return taken and msgspec.structs.replace(taken, token_ids=(taken.token_ids[0] ^ 1,))
