"""A connector that stores the blocks of finished requests in files, and loads them with the given faults.

Found by module path, also in the engine's processes. `kv_connector_extra_config`: {"path": folder}. A request
sets the faults of its load in `kv_transfer_params["store"]`:

    mode    "async", "sync" or "off" (neither loaded nor saved)
    bad     indices of the loaded blocks that are garbage; [] is a good load
    how     "invalid": reported by block id. "early": by block id, a step before the end (async). "failed": as
            a whole (async). "raise": start_load_kv raises on these ranks. "hang": its end is never reported
            (async)
    ranks   the ranks with the fault; without it, all
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from baton.contract import (
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorSchedulerHalf,
    KVConnectorTransferResults,
    KVConnectorWorkerHalf,
    TwoHalves,
)

GARBAGE = 50.0  # Large enough to change any answer.


@dataclass
class StoreLoad:
    request_id: str
    block_ids: list[int]
    keys: list[str]
    is_async: bool
    bad: set[int]
    how: str
    ranks: list[int] | None

    def bad_blocks(self, rank: int) -> set[int]:
        if self.ranks is not None and rank not in self.ranks:
            return set()
        return {self.block_ids[i] for i in self.bad}


@dataclass
class StoreSave:
    request_id: str
    block_ids: list[int]
    keys: list[str]


@dataclass
class StoreMetadata(KVConnectorMetadata):
    loads: list[StoreLoad] = field(default_factory=list)
    saves: list[StoreSave] = field(default_factory=list)


class StoreSchedulerHalf(KVConnectorSchedulerHalf):
    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.stored: set[str] = set()
        self._matched: dict[str, int] = {}
        self._next = StoreMetadata()
        self._saving: dict[str, StoreSave] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        told = _told(request)
        if told["mode"] == "off":
            return 0, False
        num_stored = 0
        for key in _keys(request, request.num_tokens // self._block_tokens):
            if key not in self.stored:
                break
            num_stored += self._block_tokens
        matched = max(0, num_stored - num_computed_tokens)
        self._matched[request.request_id] = num_computed_tokens
        return matched, bool(matched) and told["mode"] == "async"

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        told = _told(request)
        first = self._matched[request.request_id] // self._block_tokens
        last = first + num_external_tokens // self._block_tokens
        self._next.loads.append(
            StoreLoad(
                request.request_id,
                blocks.get_block_ids()[0][first:last],
                _keys(request, last)[first:],
                told["mode"] == "async",
                {i for i in told["bad"] if i < last - first},
                told["how"],
                told["ranks"],
            )
        )

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        metadata, self._next = self._next, StoreMetadata()
        return metadata

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        num_full = request.num_computed_tokens // self._block_tokens
        missing = [
            (block_id, key)
            for block_id, key in zip(block_ids, _keys(request, num_full), strict=False)
            if key not in self.stored
        ]
        if _told(request)["mode"] == "off" or not missing or "ERROR" in request.status.name:
            return False, None
        save = StoreSave(request.request_id, [b for b, _ in missing], [key for _, key in missing])
        self._next.saves.append(save)
        self._saving[request.request_id] = save
        return True, {"stored_blocks": len(missing)}

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        for request_id in connector_output.finished_sending or ():
            self.stored.update(self._saving.pop(request_id).keys)

    def shutdown(self) -> None:
        return


class StoreWorkerHalf(KVConnectorWorkerHalf):
    def __init__(self, path: str, rank: int) -> None:
        self._folder = Path(path)
        self._rank = rank
        self.caches: list[torch.Tensor] = []
        self._started: list[StoreLoad] = []  # Loads of this step; they end in the next one.
        self._ending: list[StoreLoad] = []
        self._saved: list[str] = []
        self._invalid: set[int] = set()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StoreMetadata)
        for load in metadata.loads:
            bad = load.bad_blocks(self._rank)
            if load.how == "raise" and bad:
                raise OSError("the disk is gone")
            for block_id, key in zip(load.block_ids, load.keys, strict=True):
                for cache, content in zip(self.caches, self.read(key), strict=True):
                    cache[block_id] = GARBAGE if block_id in bad else content
            if load.how == "early" or not load.is_async:
                self._invalid |= bad
            if load.is_async:
                self._started.append(load)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StoreMetadata)
        for save in metadata.saves:
            for block_id, key in zip(save.block_ids, save.keys, strict=True):
                torch.save([cache[block_id].clone() for cache in self.caches], self._file(key))
            self._saved.append(save.request_id)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        done = [load for load in self._ending if load.how != "hang"]
        self._ending, self._started = self._started, []
        failed = set()
        for load in done:
            bad = load.bad_blocks(self._rank)
            if load.how == "failed" and bad:
                failed.add(load.request_id)
            else:
                self._invalid |= bad
        saved, self._saved = set(self._saved), []
        received = {load.request_id for load in done}
        return KVConnectorTransferResults(saved, received, failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def read(self, key: str) -> list[torch.Tensor]:
        """`[kv_heads, block_tokens, 2 * head_dim]` of each layer."""
        content: list[torch.Tensor] = torch.load(self._file(key))
        return content

    def _file(self, key: str) -> Path:
        return self._folder / f"{key}-{self._rank}.pt"


class FaultyStore(TwoHalves):
    @classmethod
    def make_scheduler_half(cls, vllm_config: Any, kv_cache_config: Any) -> KVConnectorSchedulerHalf:
        return StoreSchedulerHalf(vllm_config.cache_config.block_size)

    @classmethod
    def make_worker_half(cls, vllm_config: Any, kv_cache_config: Any) -> KVConnectorWorkerHalf:
        path = vllm_config.kv_transfer_config.get_from_extra_config("path", None)
        return StoreWorkerHalf(path, vllm_config.parallel_config.rank)


def _told(request: Any) -> dict[str, Any]:
    told = (request.kv_transfer_params or {}).get("store", {})
    return {"mode": "async", "bad": [], "how": "invalid", "ranks": None, **told}


def _keys(request: Any, num_blocks: int) -> list[str]:
    hashes: Sequence[bytes] = request.block_hashes[:num_blocks]
    return [block_hash.hex() for block_hash in hashes]
