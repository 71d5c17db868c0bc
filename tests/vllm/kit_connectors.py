"""Small connector of vLLM's own base class, in variants with faults. Keeps blocks in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)


@dataclass
class Orders(KVConnectorMetadata):
    saves: list[tuple[str, int]] = field(default_factory=list)  # (key, block)
    loads: list[tuple[str, int]] = field(default_factory=list)
    num_tokens: int = 0


class Sound(KVConnectorBase_V1):
    """Saves the whole blocks of prompts that one step computes, and loads them in the step."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.block = vllm_config.cache_config.block_size
        self.orders = Orders()
        self.stored: set[str] = set()
        self.requests: dict[str, Any] = {}
        self.local: dict[str, int] = {}
        self.kept: dict[str, list[torch.Tensor]] = {}
        self.caches: dict[str, torch.Tensor] = {}

    def key(self, request: Any, index: int) -> str:
        return repr((request.cache_salt, request.prompt_token_ids[: (index + 1) * self.block]))

    # --- Scheduler -----------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        self.requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        first = index = num_computed_tokens // self.block
        while (index + 1) * self.block < request.num_prompt_tokens and self.key(
            request, index
        ) in self.stored:
            index += 1
        self.local[request.request_id] = first
        return (index - first) * self.block, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        first = self.local[request.request_id]
        for index in range(first, first + num_external_tokens // self.block):
            self.orders.loads.append((self.key(request, index), blocks.get_block_ids()[0][index]))

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        orders, self.orders = self.orders, Orders()
        orders.num_tokens = scheduler_output.total_num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            last = new.num_computed_tokens + scheduler_output.num_scheduled_tokens[new.req_id]
            for index in range(
                new.num_computed_tokens // self.block, min(last, new.prompt_len) // self.block
            ):
                key = self.key(self.requests[new.req_id], index)
                orders.saves.append((key, new.block_ids[0][index]))
        self.stored.update(key for key, _ in orders.saves)
        return orders

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        self.local.pop(request.request_id, None)
        del self.requests[request.request_id]
        return False, None

    def reset_cache(self) -> bool:
        self.stored.clear()
        return True

    # --- Worker --------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for key, block_id in self._get_connector_metadata().loads:
            for cache, saved in zip(self.caches.values(), self.kept[key], strict=True):
                cache[block_id] = saved

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        for key, block_id in self._get_connector_metadata().saves:
            self.kept[key] = [cache[block_id].clone() for cache in self.caches.values()]


class IgnoresSalts(Sound):
    rule: ClassVar = "salt-ignored"

    def key(self, request: Any, index: int) -> str:
        return repr(request.prompt_token_ids[: (index + 1) * self.block])


class RoundsUp(Sound):
    rule: ClassVar = "match-out-of-range"

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        count, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return count + (self.block if count else 0), is_async


class AssertsTokens(Sound):
    rule: ClassVar = "empty-step-raised"

    def wait_for_save(self) -> None:
        assert self._get_connector_metadata().num_tokens, "a step computes"
        super().wait_for_save()


class RemembersEverybody(Sound):
    rule: ClassVar = "ids-left"

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return False, None


class KeysWithoutPrefix(Sound):
    rule: ClassVar = "wrong-bytes"

    def key(self, request: Any, index: int) -> str:
        block = request.prompt_token_ids[index * self.block : (index + 1) * self.block]
        return repr((request.cache_salt, index, block[2:]))


BROKEN = (IgnoresSalts, RoundsUp, AssertsTokens, RemembersEverybody, KeysWithoutPrefix)
