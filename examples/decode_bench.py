"""Connector that fills prompts with made-up KV, to measure decoding after long prompts without their prefill.

    PYTHONPATH=examples baton serve MODEL --kv-transfer-config '{"kv_connector": "DecodeBenchConnector",
        "kv_connector_module_path": "decode_bench", "kv_role": "kv_both"}'

All of a prompt but its last token is "loaded" in the step that schedules it. The answers are meaningless, so
each one says so: `synthetic_tokens` in its `kv_transfer_params`. vLLM has a connector of the same name.
"""

from dataclasses import dataclass
from typing import Any

import torch

from baton.contract import KVConnectorMetadata, NullSchedulerHalf, NullWorkerHalf, TwoHalves

FILL = 0.015


@dataclass
class Metadata(KVConnectorMetadata):
    block_ids: list[int]  # Blocks to fill before the forward pass.


class SchedulerHalf(NullSchedulerHalf):
    def __init__(self, config: Any) -> None:
        self._block_size = config.cache_config.block_size
        self._to_fill: list[int] = []
        self._num_synthetic: dict[str, int] = {}  # Synthetic tokens by request id.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return max(0, request.num_tokens - 1 - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            (table,) = blocks.get_block_ids()
            end = request.num_tokens - 1
            first = (end - num_external_tokens) // self._block_size
            self._to_fill += table[first : -(-end // self._block_size)]
            self._num_synthetic[request.request_id] = num_external_tokens

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        metadata, self._to_fill = Metadata(self._to_fill), []
        return metadata

    def reset_cache(self) -> bool:
        return True  # No KV is kept.

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        num_synthetic = self._num_synthetic.pop(request.request_id, 0)
        return False, {"synthetic_tokens": num_synthetic} if num_synthetic else None


class WorkerHalf(NullWorkerHalf):
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for cache in self._caches:
            cache[self._get_connector_metadata().block_ids] = FILL  # type: ignore[attr-defined]


class DecodeBenchConnector(TwoHalves):
    stands_alone = True  # Another connector would store or lend this KV.
    answered_params = frozenset({"synthetic_tokens"})
    make_scheduler_half = classmethod(lambda cls, config, kv_cache_config: SchedulerHalf(config))
    make_worker_half = classmethod(lambda cls, config, kv_cache_config: WorkerHalf())
