"""The example's connector with faults that outlive an example, because they are in its folder."""

from typing import Any

import torch

from examples.prefix_store.prefix_store import PrefixStoreConnector, WorkerHalf


class _Silent(WorkerHalf):
    def get_block_ids_with_load_errors(self) -> set[int]:
        super().get_block_ids_with_load_errors()
        return set()


class SaysNothingOfBadFiles(PrefixStoreConnector):
    make_worker_half = classmethod(lambda cls, config, kv_cache_config: _Silent(config))


class _Zeros(WorkerHalf):
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._real = kv_caches

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._caches = {name: torch.zeros_like(cache) for name, cache in self._real.items()}
        super().bind_connector_metadata(connector_metadata)
        self._caches = self._real


class SavesZeros(PrefixStoreConnector):
    make_worker_half = classmethod(lambda cls, config, kv_cache_config: _Zeros(config))


class TokensFirst(PrefixStoreConnector):
    """Requires tokens before heads in a block, and checks that it gets that."""

    make_worker_half = classmethod(lambda cls, config, kv_cache_config: _TokensFirst(config))

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return "NHD"


class _TokensFirst(WorkerHalf):
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert all(cache.transpose(1, 2).is_contiguous() for cache in kv_caches.values())
        super().register_kv_caches(kv_caches)


class BlocksInside(PrefixStoreConnector):
    """Requires a layout that vLLM supports and Baton's engine does not."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return "LHBNC"


class WearsOut(PrefixStoreConnector):
    """Fails in another way on each further try."""

    num_loads = 0

    make_worker_half = classmethod(lambda cls, config, kv_cache_config: _WearsOut(config))


class _WearsOut(WorkerHalf):
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        WearsOut.num_loads += 1
        if WearsOut.num_loads >= 30:
            raise OSError("worn out")
        super().start_load_kv(forward_context, **kwargs)
