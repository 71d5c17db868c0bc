"""The small connector for two engines: P saves to a shelf in memory, and its params name the blocks.

D takes only the blocks of its own prompt, whatever the params claim.
"""

from __future__ import annotations

from itertools import count, takewhile
from typing import Any

import msgspec

from baton.contract import host
from baton.core.prefilled import PrefilledTokens
from tests.testing.sound import (
    Loan,
    Match,
    MemoryConnector,
    MemoryScheduler,
    MemoryWorker,
    Metadata,
    key_of,
    name_of,
)

_SHELVES: dict[int, dict[str, Any]] = {}  # Stored blocks by rank and name.


class PairScheduler(MemoryScheduler):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.is_producer = config.kv_transfer_config.is_kv_producer
        self.names: dict[str, dict[int, tuple[str, str]]] = {}  # (key, name) of each block, by request.
        self.offers: dict[str, list[str]] = {}  # Names of blocks, by request that loads.
        self.first_tokens: dict[str, PrefilledTokens] = {}

    def order_saves(
        self, request_id: str, num_computed: int, output: host.SchedulerOutput, metadata: Metadata
    ) -> None:
        if not self.is_producer:
            return
        num_before = len(metadata.saves)
        super().order_saves(request_id, num_computed, output, metadata)
        for index, save in enumerate(metadata.saves[num_before:], start=num_computed // self.block):
            names = self.names.setdefault(request_id, {})
            names[index] = (save.key, name_of(save.key, save.step))

    def get_num_new_matched_tokens(self, request: host.Request, num_computed_tokens: int) -> Match:
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return 0, False
        first = num_computed_tokens // self.block
        offered = params["blocks"][: (request.num_tokens - 1) // self.block]
        count = max(0, self.num_matching(request, offered) - first) * self.block
        self.matched[request.request_id] = num_computed_tokens
        return count, count > 0

    def num_matching(self, request: host.Request, offered: list[list[str]]) -> int:
        """Return a number of blocks."""
        for index, (key, _) in enumerate(offered):
            if key != self.key(request, index):
                return index
        return len(offered)

    def name(self, request: host.Request, index: int) -> str:
        assert request.kv_transfer_params is not None
        name = request.kv_transfer_params["blocks"][index][1]
        assert isinstance(name, str)
        return name

    def on_new_request(self, request: host.Request) -> None:
        super().on_new_request(request)
        params = request.kv_transfer_params or {}
        first_token = params.get("first_token")
        if first_token is not None and params["prompt"] == prompt_key(request):
            self.first_tokens[request.request_id] = msgspec.json.decode(first_token, type=PrefilledTokens)

    def take_prefilled_tokens(self, request_id: str) -> PrefilledTokens | None:
        return self.first_tokens.pop(request_id, None)

    def request_finished(self, request: host.Request, block_ids: list[int]) -> Loan:
        self.first_tokens.pop(request.request_id, None)
        is_lent, _ = super().request_finished(request, block_ids)
        names = self.names.pop(request.request_id, {})
        first_token = request.prefilled_tokens
        if not self.is_producer or first_token is None or request.request_id in self.stale:
            return is_lent, None
        blocks = [names[index] for index in takewhile(names.__contains__, count())]
        first = msgspec.json.encode(first_token).decode()
        return is_lent, {
            "do_remote_prefill": True,
            "blocks": blocks,
            "prompt": prompt_key(request),
            "first_token": first,
        }


def prompt_key(request: host.Request) -> str:
    return key_of(list(request.prompt_token_ids or ()), request.cache_salt)


class PairWorker(MemoryWorker):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.store = _SHELVES.setdefault(self.rank, {})
        if config.kv_transfer_config.is_kv_producer:
            self.store.clear()  # A new example begins.


class PairConnector(MemoryConnector):
    pairing = "pull"
    scheduler_kind = PairScheduler
    worker_kind = PairWorker
