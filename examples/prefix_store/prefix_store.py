"""A complete KV connector: saves prompts' KV in a folder and loads it for repeated prompts (README.md)."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from baton.contract import KVConnectorMetadata, NullSchedulerHalf, NullWorkerHalf, TwoHalves


@dataclass
class Metadata(KVConnectorMetadata):
    loads: list[tuple[str, str, list[int]]]  # Request, file name, blocks to fill with the file's last blocks.
    saves: list[tuple[str, list[int]]]


class SchedulerHalf(NullSchedulerHalf):
    def __init__(self, config: Any) -> None:
        model, self._block_size = config.model_config, config.cache_config.block_size
        # A block's bytes depend on these besides its tokens; the file of another model must never match.
        shape = (model.dtype, self._block_size, config.parallel_config.tensor_parallel_size)
        self._kind = (model.architecture_digest, model.weights_digest, *shape)
        self._folder = Path(config.kv_transfer_config.kv_connector_extra_config["path"])
        self._metadata = Metadata([], [])

    def _num_blocks(self, request: Any) -> int:
        return (request.num_prompt_tokens - 1) // self._block_size  # The last token is always computed.

    def _name(self, request: Any) -> str:
        tokens = request.prompt_token_ids[: self._num_blocks(request) * self._block_size]
        return hashlib.sha256(repr((self._kind, request.cache_salt, tokens)).encode()).hexdigest()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Changes nothing, since it may be called often. False: the load happens within the step."""
        num_new = self._num_blocks(request) * self._block_size - num_computed_tokens
        return (num_new if num_new > 0 and (self._folder / f"{self._name(request)}.0").exists() else 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            (table,) = blocks.get_block_ids()  # All its blocks; those of the prefix cache come first.
            end = self._num_blocks(request)
            fresh = table[end - num_external_tokens // self._block_size : end]
            self._metadata.loads.append((request.request_id, self._name(request), fresh))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        metadata, self._metadata = self._metadata, Metadata([], [])
        return metadata

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The blocks are free now; they are copied at the next step's start, before they are overwritten."""
        last = self._num_blocks(request)
        if last and request.status.name in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"):
            self._metadata.saves.append((self._name(request), block_ids[:last]))
        return False, None

    def has_pending_push_work(self) -> bool:
        return bool(self._metadata.saves)  # Run another step even if no request waits for one.


class WorkerHalf(NullWorkerHalf):
    def __init__(self, config: Any) -> None:
        self._folder = Path(config.kv_transfer_config.kv_connector_extra_config["path"])
        self._rank = config.parallel_config.rank
        self._failed: set[int] = set()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = kv_caches  # Each [num_blocks, kv_heads, block_size, 2 * head_dim], any strides.

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        for name, block_ids in connector_metadata.saves:
            temp = self._folder / uuid4().hex
            save_file({layer: kv[block_ids].cpu().contiguous() for layer, kv in self._caches.items()}, temp)
            temp.rename(self._folder / f"{name}.{self._rank}")  # Atomic: readers see a whole file or none.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for _, name, block_ids in self._get_connector_metadata().loads:  # type: ignore[attr-defined]
            self._failed |= self._load(name, block_ids)

    def _load(self, name: str, block_ids: list[int]) -> set[int]:
        try:
            for layer, kv in load_file(self._folder / f"{name}.{self._rank}").items():
                self._caches[layer][block_ids] = kv[-len(block_ids) :].to(self._caches[layer].device)
        except (OSError, SafetensorError):
            return set(block_ids)  # The engine computes these blocks.
        return set()

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed


class PrefixStoreConnector(TwoHalves):
    make_scheduler_half = classmethod(lambda cls, config, kv_cache_config: SchedulerHalf(config))
    make_worker_half = classmethod(lambda cls, config, kv_cache_config: WorkerHalf(config))
