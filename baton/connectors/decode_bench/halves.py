"""Halves of the decode benchmark: all of a prompt but its last token is "loaded", filled with synthetic KV.

    |  local hit  |  synthetic, filled within the step that schedules the prompt  | last token |
                     no forward pass                                                computed

It is an ordinary synchronous load, so everything that holds for loads holds here; only the KV is meaningless.
With several block tables, only the blocks within a window are filled. A recurrent state is zero.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from baton.connectors.counted import Count, CountedStats, LabelledCount
from baton.connectors.decode_bench.settings import DecodeBenchSettings
from baton.contract import (
    KVConnectorMetadata,
    host,
)
from baton.contract.defaults import FinishesByFirstGroup, NoLayerHooks
from baton.core.errors import ConfigError
from baton.core.kv_groups import NULL_BLOCK_ID, KVCacheGroup, is_hybrid

if TYPE_CHECKING:
    import torch

ANSWERED = "baton_synthetic_tokens"


@dataclass(frozen=True, slots=True)
class DecodeBenchMetadata(KVConnectorMetadata):
    block_ids: tuple[int, ...] = ()  # To fill before the forward pass, of any group with tokens.
    state_block_ids: tuple[int, ...] = ()  # To set to zero, of any group with recurrent states.


@dataclass
class DecodeBenchStats(CountedStats):
    """Statistics of synthetic KV: baton:synthetic_tokens, baton:synthetic_requests."""

    counts: ClassVar[Mapping[str, Count]] = {
        "synthetic_tokens": Count("baton:synthetic_tokens", "Prompt tokens with synthetic KV."),
        "synthetic_requests": Count("baton:synthetic_requests", "Requests with synthetic KV."),
    }
    labelled: ClassVar[Mapping[str, LabelledCount]] = {  # Counted by the host.
        "failures": LabelledCount("baton:synthetic_failures", "reason", "Errors that were contained."),
    }

    def reduce(self) -> dict[str, int | float | str]:
        return {
            "SYNTHETIC tokens": self.data["synthetic_tokens"],
            "requests": self.data["synthetic_requests"],
        }


class DecodeBenchSchedulerHalf(FinishesByFirstGroup):
    def __init__(
        self,
        settings: DecodeBenchSettings,
        block_tokens: int,
        groups: tuple[KVCacheGroup, ...] = (KVCacheGroup(()),),
    ) -> None:
        self._settings = settings
        self._block_tokens = block_tokens
        self._groups = groups
        self._to_fill: list[int] = []
        self._to_clear: list[int] = []
        self._num_synthetic: dict[str, int] = {}  # Tokens, by request.
        self._stats = DecodeBenchStats()

    def get_num_new_matched_tokens(
        self, request: host.Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return max(0, request.num_tokens - 1 - num_computed_tokens), False

    def update_state_after_alloc(
        self, request: host.Request, blocks: host.KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if num_external_tokens == 0:
            return
        end = request.num_tokens - 1
        first_block = (end - num_external_tokens) // self._block_tokens
        null_blocks = {NULL_BLOCK_ID} if is_hybrid(self._groups) else set()
        for group, table in zip(self._groups, blocks.get_block_ids(), strict=True):
            of_table = table[first_block : -(-end // self._block_tokens)]
            loaded = [block for block in of_table if block not in null_blocks]
            if group.is_state:
                self._to_clear += loaded
            elif not self._settings.startup_fill:
                self._to_fill += loaded
        already = self._num_synthetic.get(request.request_id, 0)
        self._num_synthetic[request.request_id] = already + num_external_tokens
        self._stats.add(synthetic_tokens=num_external_tokens, synthetic_requests=not already)

    def get_loaded_kv_cache_group_ids(self, request: host.Request) -> tuple[int, ...]:
        return tuple(range(len(self._groups)))

    def build_connector_meta(self, scheduler_output: host.SchedulerOutput) -> KVConnectorMetadata:
        to_fill, self._to_fill = self._to_fill, []
        to_clear, self._to_clear = self._to_clear, []
        return DecodeBenchMetadata(tuple(to_fill), tuple(to_clear))

    def reset_cache(self) -> bool:
        return True  # No KV is kept.

    def request_finished(
        self, request: host.Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Marks the answer with the number of its synthetic tokens."""
        num_synthetic = self._num_synthetic.pop(request.request_id, 0)
        return False, {ANSWERED: num_synthetic} if num_synthetic else None

    def get_kv_connector_stats(self) -> DecodeBenchStats | None:
        return self._stats.take()


class DecodeBenchWorkerHalf(NoLayerHooks):
    def __init__(self, settings: DecodeBenchSettings, state_layers: Collection[str] = ()) -> None:
        """`state_layers`: names of the layers with a recurrent state."""
        self._settings = settings
        self._state_layers = frozenset(state_layers)
        self._states: list[torch.Tensor] = []
        # One for each memory: layers may share memory, and a block belongs to only one group at a time.
        self._caches: dict[str, torch.Tensor] = {}
        self._patterns: dict[str, torch.Tensor] = {}  # One block of each layer; every block gets the same.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Raises ConfigError unless the caches hold floating-point numbers (not packed or quantized)."""
        import torch

        settings = self._settings
        self._states = [cache for name, cache in kv_caches.items() if name in self._state_layers]
        of_tokens = {name: cache for name, cache in kv_caches.items() if name not in self._state_layers}
        by_place = {cache.data_ptr(): (name, cache) for name, cache in reversed(of_tokens.items())}
        self._caches = dict(reversed(by_place.values()))
        for index, (name, cache) in enumerate(self._caches.items()):
            if not cache.is_floating_point() or cache.element_size() == 1:
                raise ConfigError(
                    f"cannot be filled with numbers: its dtype is {cache.dtype}", field=f"kv_caches.{name}"
                )
            draw = torch.Generator().manual_seed(settings.seed * 65_537 + index)
            block = torch.empty(cache.shape[1:]).normal_(generator=draw)
            pattern = block * settings.fill_std + settings.fill_mean
            self._patterns[name] = pattern.to(cache.dtype).to(cache.device)
            if settings.startup_fill:
                cache[:] = self._patterns[name]

    def start_load_kv(self, forward_context: host.ForwardContext, **kwargs: Any) -> None:
        import torch

        metadata = self._connector_metadata
        assert isinstance(metadata, DecodeBenchMetadata)
        if metadata.block_ids:
            index = torch.tensor(metadata.block_ids)
            for name, cache in self._caches.items():
                cache[index.to(cache.device)] = self._patterns[name]
        if metadata.state_block_ids:
            index = torch.tensor(metadata.state_block_ids)
            for cache in self._states:
                cache[index.to(cache.device)] = 0
