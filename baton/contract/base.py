"""`KVConnectorBase_V1`: names, parameters and semantics of vLLM 0.32/0.33, as two halves.

A connector lives twice in one engine, and the two lives share nothing:

    KVConnectorSchedulerHalf   beside the scheduler, once per engine; never touches a tensor
    KVConnectorWorkerHalf      beside the model, once per rank; never touches a request

    KVConnectorBase_V1         both in one class, told apart by `role`: the form that vLLM instantiates

One engine step, in order:

    scheduler  get_num_new_matched_tokens -> update_state_after_alloc -> build_connector_meta
    each rank  handle_preemptions -> bind_connector_metadata -> start_load_kv
                 per layer: wait_for_layer_load, attention, save_kv_layer
               wait_for_save -> get_transfer_results -> get_block_ids_with_load_errors
               -> get_expected_finished_count, stats, events, build_connector_worker_meta
               -> clear_connector_metadata
    scheduler  update_connector_output -> take_events

What a connector may rely on, where a step runs on a device with streams of its own: a step's output comes
back when the device has done it, and no step in flight writes into a block that is allocated to a load.

Source: `vllm/distributed/kv_transfer/kv_connector/v1/base.py`.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from baton.contract.output import KVConnectorOutput, KVConnectorTransferResults, KVConnectorWorkerMetadata

if TYPE_CHECKING:
    import torch

    from baton.contract import host
    from baton.contract.events import KVCacheEvent, KVConnectorKVEvents
    from baton.contract.stats import KVConnectorPromMetrics, KVConnectorStats
    from baton.core.prefilled import PrefilledTokens

CopyBlocksOp = Callable[
    [dict[str, "torch.Tensor"], dict[str, "torch.Tensor"], list[int], list[int], Literal["h2d", "d2h"]], None
]
"""(source caches, destination caches, source block ids, destination block ids, direction)."""


def hidden_states_name(layer: int) -> str:
    """What `save_kv_layer` calls them; see `hidden_states_wanted`."""
    return f"hidden_states.{layer}"


class KVConnectorRole(enum.Enum):
    """Equal to vLLM's enum of the same name, member by member, so that `role == KVConnectorRole.WORKER` holds
    in both hosts. `is` does not compare across the two enums."""

    SCHEDULER = 0
    WORKER = 1

    def __eq__(self, other: object) -> bool:
        if isinstance(other, enum.Enum) and type(other).__name__ == type(self).__name__:
            return self.name == other.name
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self.name)


class KVConnectorMetadata(ABC):  # noqa: B024  A marker: each connector defines its own fields.
    """Scheduler to workers, once per step."""


class KVConnectorHandshakeMetadata(ABC):  # noqa: B024  A marker, as above.
    """One rank's part of what peers need to connect; collected by the scheduler half. Serialisable."""


class KVConnectorSchedulerHalf(ABC):
    """The half beside the scheduler. One thread calls it, the engine's."""

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """True: local hits of several KV-cache groups may be of different lengths."""
        return False

    @property
    def requires_kv_delivery(self) -> bool:
        """True: a preempted request's stale output is dropped, so that freed blocks are never handed off."""
        return False

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Called once, with the scheduler's cache; lets a connector reference-count or scan cached blocks."""
        if (pool := getattr(kv_cache_manager, "block_pool", None)) is not None:
            self.bind_gpu_block_pool(pool)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Called by `bind_kv_cache_manager`."""

    def on_new_request(self, request: host.Request) -> None:
        """At arrival, before any queueing: the moment to start what takes long."""

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: host.Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens beyond the local, block-aligned `num_computed_tokens` the connector can load.

        Returns (count, is_async). None: ask again in a later step. With is_async the request waits in
        WAITING_FOR_REMOTE_KVS until its id is reported in `finished_recving`. Must be False with count 0.
        May be called any number of times, so it must have no side effects.
        """

    def get_loaded_kv_cache_group_ids(self, request: host.Request) -> tuple[int, ...]:
        """Which KV-cache groups the load fills, after a positive match."""
        return (0,)

    @abstractmethod
    def update_state_after_alloc(
        self, request: host.Request, blocks: host.KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """After blocks were allocated. `blocks` is the request's whole table, local hits first.

        Called again with 0 when the request is scheduled after its load: decide by `num_external_tokens`.
        Called with 0 also after a positive match if the host loads nothing for this request, as vLLM does for
        one with `prompt_logprobs`: give back what was reserved for it.
        """

    def get_external_cache_hit_sources(
        self, request: host.Request, num_external_tokens: int
    ) -> dict[str, int]:
        """Tokens by where they come from: the values of vLLM's `CacheHitSource` ("host", "p2p", "disk",
        "external_unspecified"). Sums to `num_external_tokens`."""
        return {"external_unspecified": num_external_tokens} if num_external_tokens else {}

    @abstractmethod
    def build_connector_meta(self, scheduler_output: host.SchedulerOutput) -> KVConnectorMetadata:
        """Every step, empty ones too. Takes over the per-step state; must not modify its argument."""

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Every step, with the aggregated report, before the scheduler acts on it (see KVConnectorOutput).

        By then every rank's device has done the step: what it computed lies in memory, for every reader.
        """

    def request_finished(
        self, request: host.Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Exactly once per request, before its blocks are freed.

        Returns (delay_free, kv_transfer_params). delay_free: the blocks stay until the id is reported in
        `finished_sending`. The params go into the response.
        """
        return False, None

    def register_finished_partial_tail(
        self,
        request: host.Request,
        block_ids: tuple[list[int], ...],
        partial_tail_offloads: list[tuple[int, int, int]],
    ) -> bool:
        """Before `request_finished`, for blocks that the last step has filled in part. vLLM alone calls it.

        True: the blocks stay until the id is reported in `finished_sending`.
        """
        return False

    def take_prefilled_tokens(self, request_id: str) -> PrefilledTokens | None:
        """Output tokens that the prompt's producer has sampled already; each request's once.

        Baton's addition, asked by hosts that can go on behind them: when the request's load has arrived, or
        has failed and is computed here. Hosts that do not ask sample these tokens themselves.
        """
        return None

    def get_load_failure(self, request_id: str) -> str | None:
        """Why the load of this request has failed: one of few words, to log and to count. None: not known.

        Baton's addition, asked by hosts when a load is reported as failed, before `request_finished`.
        """
        return None

    def introduction(self) -> str | None:
        """Signed text by which consumers of the cluster find this engine; None if it has none to give.

        Baton's addition, for a router that sends both legs of a request at once.
        """
        return None

    def take_back(self, kv_transfer_params: Mapping[str, Any]) -> None:
        """Whoever was to get these params, which `request_finished` returned, will not come for the blocks.

        Baton's addition, and a hint: where somebody has come all the same, he keeps what he was promised.
        """

    def bind_wake(self, wake: Callable[[], None]) -> bool:
        """Let the half say when a step would find something: `wake` makes a host that idles step soon.

        Baton's addition, asked once, of either half in the engine core's own process; `wake` may be called
        from any thread, and more often than needed. True: it will be called for whatever the half does or
        hears between steps, so the host need not look by itself.
        """
        return False

    def bind_only_rank(self, rank: KVConnectorWorkerHalf) -> None:
        """The engine has one rank, and it lives in this process: `rank` is its worker half.

        Baton's addition, called at most once, after the handshake. Halves that agree on it need not wait for
        a step to tell each other something. Hosts that plan a step while another one runs must not call it,
        nor those with another connector that waits for its saves in `handle_preemptions`.
        """

    def take_events(self) -> Iterable[KVCacheEvent]:
        """KV events since the last call."""
        return ()

    def has_pending_block_frees(self) -> bool:
        """True: blocks are about to be freed, so a failing allocation should wait instead of preempting."""
        return False

    def has_pending_push_work(self) -> bool:
        """True keeps the engine stepping although no request is live."""
        return False

    def get_finished_count(self) -> int | None:
        """How many ranks report each finished id; None: all of them."""
        return None

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """What each tensor-parallel rank's `get_handshake_metadata` returned, once all are ready."""

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The same, keyed (pipeline rank, tensor rank)."""
        if any(pp_rank for pp_rank, _ in metadata):
            raise ValueError(f"{type(self).__name__} does not support pipeline parallelism")
        self.set_xfer_handshake_metadata({tp_rank: value for (_, tp_rank), value in metadata.items()})

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Of the step, merged with the workers'."""
        return None

    def drain(self, timeout_s: float) -> None:
        """The engine is to end: promise nothing more, and let what is lent end, within `timeout_s` at best.

        Baton's hosts keep stepping until no block is held any more, or the time is up. vLLM does not call it.
        """

    def reset_cache(self) -> bool | None:
        """Forget what is cached. Only False counts as a failure."""
        return None

    def shutdown(self) -> None:
        """End every thread, socket and file of this half. Idempotent."""


class KVConnectorWorkerHalf(ABC):
    """The half beside the model, one per rank. Metadata is bound only within a step."""

    _connector_metadata: KVConnectorMetadata | None = None

    # --- Start ---------------------------------------------------------------------------------

    prefer_cross_layer_blocks: bool = False
    """Read before the cache is allocated. True: one contiguous unit per block, over all layers. False on the
    class; an instance that wants it sets it when it is made."""

    @property
    def hidden_states_wanted(self) -> tuple[int, ...]:
        """Hidden states that `save_kv_layer` is to get besides the KV: the same ones on every rank.

        Baton's addition, as transformers counts: 0 are the embeddings, i is the output of layer i, the last
        one stands behind the final norm. Named by `hidden_states_name`; then `kv_layer` is [T, hidden size]
        of the step's tokens, in the order of `attn_metadata.slot_mapping`. Costs recorded graphs.
        """
        return ()

    @property
    def graph_capturable(self) -> bool:
        """True: `wait_for_layer_load` and `save_kv_layer` may be captured into a full CUDA graph.

        Baton's addition. They then run while each batch size is captured, before the first step, with
        metadata that the scheduler half built of an empty scheduler output; what they launch runs in each
        replay, what they do in Python does not. Without it a connector that needs its layer hooks
        (`requires_piecewise_for_cudagraph`) has them called between pieces, in every step and in no capture.
        """
        return False

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """A context in which to allocate the KV cache, if this connector needs special memory."""
        return None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Once, before the first step. Each `[num_blocks, kv_heads, block_tokens, 2 * head_dim]`.

        The strides say the layout: tokens lie before heads if `get_required_kvcache_layout` said "NHD".
        """

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: Any) -> None:
        """Instead of the above, if `prefer_cross_layer_blocks` and the host has one tensor for all layers:
        not where layers of several cache groups share memory.

        `[num_blocks, layers, kv_heads, block_tokens, 2 * head_dim]`, contiguous in this order, or with tokens
        before heads if "NHD" is required. Baton's hosts name the layers in `attn_backend.layer_names`.
        """

    def unregister_kv_caches(self) -> None:
        """Before the host gives the cache's memory away (sleep). Idempotent; transfers are drained."""

    def restore_kv_caches(self) -> None:
        """After it has it back. Idempotent."""

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:
        """How to copy blocks between the device's cache and a host buffer."""

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """This rank's part of the handshake, after registration."""
        return None

    def bind_wake(self, wake: Callable[[], None]) -> bool:
        """See the scheduler half's; here for operations that end between steps."""
        return False

    # --- Step ----------------------------------------------------------------------------------

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """First in the step, metadata not bound: wait for saves whose source is about to be overwritten."""

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    def _get_connector_metadata(self) -> KVConnectorMetadata:
        assert self._connector_metadata is not None, "metadata is bound only within a step"
        return self._connector_metadata

    def has_connector_metadata(self) -> bool:
        return self._connector_metadata is not None

    @abstractmethod
    def start_load_kv(self, forward_context: host.ForwardContext, **kwargs: Any) -> None:
        """Start this step's loads: before the forward if the step has synchronous loads, else right after."""

    @abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Before a layer's attention: block until its synchronous loads are in place."""

    @abstractmethod
    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """After a layer's attention: start to save what the step wrote there."""

    @abstractmethod
    def wait_for_save(self) -> None:
        """After the forward, and on empty steps: block until the saves no longer need the blocks, or keep
        the blocks (delay_free) until completion is reported."""

    def finish_forward(self) -> None:
        """Right after the model call (vLLM's V2 runner)."""

    def reset_capture_state(self) -> None:
        """After graph capture (vLLM's V2 runner)."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """(sent, received) since the last call. A sent id must have been in `finished_req_ids` before."""
        return None, None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """What hosts call; wraps `get_finished` unless a connector tells failures apart itself."""
        sending, recving = self.get_finished(finished_req_ids)
        return KVConnectorTransferResults(sending or set(), recving or set())

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that could not be loaded: at or before the step that reports the request as received."""
        return set()

    def get_expected_finished_count(self) -> int:
        """Above 0: so many reports a finished id waits for from now on, also if it has some. 0: as before.

        Baton's addition, asked in every step: it fills the field `expected_finished_count`, by which vLLM's
        aggregator lets a rank change what `get_finished_count` said at start (a handshake may have shown that
        fewer ranks take part), and which no method of vLLM's connectors fills. Where ranks differ in one
        step, the last one's number stands.
        """
        return 0

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return None

    def get_kv_connector_kv_cache_events(self) -> KVConnectorKVEvents | None:
        return None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """This rank's report to the scheduler half, aggregated over ranks on its way."""
        return None

    def shutdown(self) -> None:
        """End every thread, socket and file of this half. Idempotent."""


class KVConnectorBase_V1(KVConnectorSchedulerHalf, KVConnectorWorkerHalf):
    """Both halves in one class; an instance is one or the other, by `role`.

    Raises ValueError without a `kv_transfer_config`.
    """

    answered_params: ClassVar[frozenset[str]] = frozenset()
    """Baton's addition: keys of `kv_transfer_params` that are this connector's to answer with. Two connectors
    that share one cannot serve one engine side by side."""

    stands_alone: ClassVar[bool] = False
    """Baton's addition. True: the KV is not what another connector may take it for; a Multi refuses it."""

    def __init__(
        self, vllm_config: host.HostConfig, role: KVConnectorRole, kv_cache_config: Any = None
    ) -> None:
        if vllm_config.kv_transfer_config is None:
            raise ValueError("kv_transfer_config must be set for KVConnectorBase_V1")
        self._vllm_config = vllm_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config
        self._role = KVConnectorRole[role.name]  # vLLM passes a member of its own enum.
        self._connector_metadata = None

    @property
    def role(self) -> KVConnectorRole:
        return self._role

    @property
    def requires_kv_delivery(self) -> bool:
        return bool(self._kv_transfer_config.is_kv_producer)

    # --- Class level, at configuration time ------------------------------------------------------

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: host.HostConfig) -> str | None:
        """A layout name ("HND", "NHD", since vLLM 0.32 "LBHNC", ...) that the host has to use, or None.

        It changes the strides of the registered tensors, and not their shape.
        """
        if cls is KVConnectorBase_V1:
            raise TypeError("get_required_kvcache_layout is asked of a connector, not of the base class")
        return None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """True when the per-layer hooks do work: they are Python, and a full graph skips them."""
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: host.KVTransferConfigLike) -> bool:
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Rebuild a stats object from its serialised form, in the process that logs."""
        return None

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: host.HostConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """Register the connector's Prometheus metrics, in the process that serves them."""
        return None

    # --- Both halves define it ---------------------------------------------------------------------

    def bind_wake(self, wake: Callable[[], None]) -> bool:
        return False

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return None

    def shutdown(self) -> None:
        return None


class SupportsHMA(ABC):
    """Mix-in: the connector handles several KV-cache groups (hybrid memory allocator)."""

    @abstractmethod
    def request_finished_all_groups(
        self, request: host.Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`, with one list of block ids per group; called instead of it."""


def supports_hma(connector: Any) -> bool:
    """Works on instances and on classes."""
    return (
        issubclass(connector, SupportsHMA)
        if isinstance(connector, type)
        else isinstance(connector, SupportsHMA)
    )
