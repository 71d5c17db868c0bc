"""Base class of our vLLM connectors: forwards vLLM's hooks to one of our halves.

    class BatonOtherConnector(ForwardingConnector):
        kind = other.BatonOtherConnector       # an IdentityConnector; the embedded engine has it as it is
        _cache_hit_source = "disk"
        _empty_metadata = OtherMetadata()

The name of such a class goes into `baton.hosts.vllm.CONNECTORS`. vLLM makes one instance for its scheduler
and one in each worker. An instance holds one half, by `role`, which sees vLLM as `view` tells it. It forwards
to the half each of vLLM's methods in the contract's table (`baton.contract.surface`). The drift test finds
methods that vLLM adds. Requests, scheduler outputs and blocks are passed on unchanged.

Errors of our half are contained here (`containment`); only start-up may raise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

from baton.connectors.observed import IdentityConnector
from baton.contract import KVConnectorMetadata
from baton.contract import SupportsHMA as KnowsGroups
from baton.contract.halves import HoldsOneHalf, forward_to_half
from baton.contract.surface import ROWS, Half, Row, Scope, completed
from baton.core.errors import BatonError, ConfigError
from baton.core.identity import unnamed_version
from baton.core.reasons import FailureCode
from baton.hosts.vllm import drift
from baton.hosts.vllm.containment import Containment
from baton.hosts.vllm.groups import in_order, keep_one_token_more
from baton.hosts.vllm.log import share_log
from baton.hosts.vllm.registration import register
from baton.hosts.vllm.settings import PluginSettings
from baton.hosts.vllm.states import with_states_as_bytes
from baton.hosts.vllm.stats import BatonPromMetrics, BatonStats
from baton.hosts.vllm.versions import Start, decide_start, name_some, name_tested
from baton.hosts.vllm.view import view_of
from baton.hosts.vllm.weights import follow_weights

logger = logging.getLogger(__name__)

# Otherwise Python shows only warnings, without the name of the process.
share_log()

# MultiConnector finds the statistics of its children by their registered names.
register()


@runtime_checkable
class FailsLoads(Protocol):
    """A scheduler half that can have its ranks report a load as failed that could not start."""

    def fail_load(self, request_id: str, block_ids: tuple[int, ...]) -> None: ...


@cache
def _find_misfits(version: str) -> tuple[str, ...]:
    return tuple(drift.find_misfits(Path(vllm.__file__).parent, version))


def _forward(row: Row) -> Callable[..., Any]:
    forward = forward_to_half(row)
    if row.scope is Scope.START:
        return forward

    def contained(self: ForwardingConnector, *arguments: Any, **keywords: Any) -> Any:
        return self._contained.contain(row.name, partial(forward, self, *arguments, **keywords))

    return contained


@completed((row for row in ROWS if row.by == "vllm" and row.half is not Half.CLASS), _forward)
class ForwardingConnector(KVConnectorBase_V1, SupportsHMA, HoldsOneHalf):  # type: ignore[misc]  # vLLM is not installed
    # where types are checked, so that its base classes are Any there.
    kind: ClassVar[type[IdentityConnector]]  # The data of its statistics has "failures": {reason: count}.
    _cache_hit_source: str  # Where loaded tokens are from: a value of vLLM's CacheHitSource.
    _empty_metadata: ClassVar[KVConnectorMetadata]  # Used for a step in which the scheduler half failed.
    _has_self_test: ClassVar[bool] = False
    weights_version: str = ""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises ConfigError for a vLLM version or a configuration that cannot work."""
        super().__init__(vllm_config, role, kv_cache_config)
        plugin, _ = PluginSettings.split(self._kv_transfer_config.kv_connector_extra_config)
        self._misfits = _find_misfits(vllm.__version__)
        self._start = decide_start(
            vllm.__version__,
            self._misfits,
            has_self_test=self._has_self_test,
            allow_untested=plugin.allow_untested_vllm,
        )
        if self._start is Start.UNTESTED:
            logger.warning(
                "vLLM %s is untested with %s (tested: %s); allowed by allow_untested_vllm",
                vllm.__version__,
                type(self).__name__,
                name_tested(),
            )
        sleeps = getattr(vllm_config.model_config, "enable_sleep_mode", False)
        if sleeps and not hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
            raise ConfigError(
                "this vLLM takes the cache's memory away without telling its connectors; use 0.33, or start "
                "without --enable-sleep-mode",
                field="model_config.enable_sleep_mode",
            )
        self._contained = Containment()
        self._num_contained_counted = 0
        see = partial(view_of, self.kind.identity_kind, vllm_config, kv_cache_config)
        if role is KVConnectorRole.WORKER:
            self._worker_half = self.kind.worker_kind(see(is_worker=True))
        else:
            from vllm.v1.engine.core import EngineCore  # Workers do without it.

            follow_weights(EngineCore)
            keep_one_token_more(kv_cache_config)
            self._scheduler_half = self.kind.scheduler_kind(see(is_worker=False))

    # --- Class level, at configuration time ------------------------------------------------------

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return cls.kind.requires_piecewise_for_cudagraph(extra_config)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return cls.kind.supports_sleep_mode(kv_transfer_config)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> BatonStats | None:
        return BatonStats(cls.kind.stats_kind, data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> BatonPromMetrics | None:
        return BatonPromMetrics(
            cls.kind.stats_kind, vllm_config, metric_types, labelnames, per_engine_labelvalues
        )

    # --- Scheduler half ------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._kv_cache_manager = kv_cache_manager
        self.bind_gpu_block_pool(kv_cache_manager.block_pool)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): value for rank, value in metadata.items()})

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        # Imported here, because vLLM 0.31, which does not call this, does not have it.
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        source = CacheHitSource(self._cache_hit_source)
        return {source: num_external_tokens} if num_external_tokens else {}

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        update = partial(self._allocated, request, blocks, num_external_tokens)
        self._contained.contain("update_state_after_alloc", update)

    def _allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        half = self.scheduler_half
        try:
            half.update_state_after_alloc(request, blocks, num_external_tokens)
        except Exception:
            if not isinstance(half, FailsLoads):
                raise
            logger.exception(
                "the load of request %s could not start; its prompt is computed instead", request.request_id
            )
            if num_external_tokens:
                # vLLM has parked the request already: it waits until a rank reports the end of the load.
                held = tuple(block_id for table in blocks.get_block_ids() for block_id in table)
                half.fail_load(request.request_id, held)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        build = partial(self.scheduler_half.build_connector_meta, scheduler_output)
        return self._contained.contain("build_connector_meta", build, self._empty_metadata)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        finish = partial(self._finished, request, block_ids)
        return self._contained.contain("request_finished_all_groups", finish)

    def _finished(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        half = self.scheduler_half
        assert isinstance(half, KnowsGroups), "every scheduler half of Baton's supports groups"
        return half.request_finished_all_groups(request, block_ids)

    def reset_cache(self) -> bool:
        """vLLM resets caches after it may have changed the weights, and does not report whether it has."""
        return self.set_weights(None, None)

    def set_weights(self, weights: str | None, version: str | None) -> bool:
        """Called by `weights`, since vLLM has no such hook."""
        self.weights_version = unnamed_version() if version is None else version
        change = partial(self.scheduler_half.set_weights, weights, self.weights_version)
        return self._contained.contain("set_weights", change) is True

    # --- Worker half ---------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        kv_caches = in_order(kv_caches, self._kv_cache_config)
        kv_caches = with_states_as_bytes(kv_caches, self._kv_cache_config)
        if self._start is not Start.AFTER_SELF_TEST:
            self.worker_half.register_kv_caches(kv_caches)
            return
        try:
            self.worker_half.register_kv_caches(kv_caches)
            checked = self.self_test(kv_caches)
        except BatonError as error:
            raise ConfigError(
                f"this is vLLM {vllm.__version__}, which is not among the tested versions and fails the "
                f"self-test: {error}. Install {name_tested('or')}",
                field="vllm",
            ) from error
        # Other ranks of the engine test their own caches, with the same result.
        logger.log(
            logging.INFO if self._vllm_config.parallel_config.rank else logging.WARNING,
            "vLLM %s is not among the tested versions (%s); it %s, and passes the self-test: %s",
            vllm.__version__,
            name_tested(),
            f"lacks {name_some(self._misfits)}" if self._misfits else "fits the record of one",
            checked,
        )

    def self_test(self, kv_caches: dict[str, Any]) -> str:
        """Test the registered caches, and return what was tested. Raises BatonError; see `_has_self_test`."""
        raise NotImplementedError

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    # --- Both halves ---------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> BatonStats | None:
        half = self.either_half
        taken = self._contained.contain("get_kv_connector_stats", lambda: half.get_kv_connector_stats())
        num_new = self._contained.num_errors - self._num_contained_counted
        if taken is None and num_new == 0:
            return None
        stats = BatonStats(self.kind.stats_kind, None if taken is None else taken.data)
        if num_new:
            self._num_contained_counted += num_new
            failures = stats.data["failures"]
            label = FailureCode.INTERNAL.value
            failures[label] = failures.get(label, 0) + num_new
        return stats

    def shutdown(self) -> None:
        half = self._scheduler_half or self._worker_half
        if half is not None:
            self._contained.contain("shutdown", lambda: half.shutdown())
