"""`KVConnectorBase_V1`: names, parameters and semantics of vLLM 0.32/0.33, as two halves.

A connector has two halves in an engine, which share nothing:

    KVConnectorSchedulerHalf   beside the scheduler, once per engine; never touches a tensor
    KVConnectorWorkerHalf      beside the model, once per rank; never touches a request

    KVConnectorBase_V1         both in one class, selected by `role`: the form that vLLM instantiates

One engine step, in order:

    scheduler  get_num_new_matched_tokens -> update_state_after_alloc -> build_connector_meta
    each rank  takes_part -> handle_preemptions -> bind_connector_metadata -> start_load_kv
                 per layer: wait_for_layer_load, attention, save_kv_layer
               wait_for_save -> get_transfer_results -> get_block_ids_with_load_errors
               -> get_expected_finished_count, stats, events, build_connector_worker_meta
               -> clear_connector_metadata
    scheduler  update_connector_output -> take_events

A host may leave out a call for which a half's class has the default of this module.

Guarantees to a connector if a device has streams of its own: the host gets a step's output only after the
device has finished the step, and no step in flight writes into a block that is allocated to a load.

Source: `vllm/distributed/kv_transfer/kv_connector/v1/base.py`.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from baton.contract.output import KVConnectorOutput, KVConnectorTransferResults, KVConnectorWorkerMetadata
from baton.core.errors import BatonError

if TYPE_CHECKING:
    import torch

    from baton.contract import host
    from baton.contract.stats import KVConnectorPromMetrics, KVConnectorStats
    from baton.core.kv_events import KVCacheEvent, KVConnectorKVEvents
    from baton.core.prefilled import PrefilledTokens

CopyBlocksOp = Callable[
    [dict[str, "torch.Tensor"], dict[str, "torch.Tensor"], list[int], list[int], Literal["h2d", "d2h"]], None
]
"""Arguments: source caches, destination caches, source block ids, destination block ids, direction."""


def hidden_states_name(layer: int) -> str:
    """Layer name under which `save_kv_layer` gets hidden states; see `hidden_states_wanted`."""
    return f"hidden_states.{layer}"


class ConnectorDead(BatonError):
    """Raised by a half that will never work again, for example because a thread that it needs has ended.

    The host can then retire it at once instead of trying further steps.
    """


class KVConnectorRole(enum.Enum):
    """Compares equal, member by member, to vLLM's enum of the same name, so that
    `role == KVConnectorRole.WORKER` holds in both hosts. Do not compare with `is`."""

    SCHEDULER = 0
    WORKER = 1

    def __eq__(self, other: object) -> bool:
        if isinstance(other, enum.Enum) and type(other).__name__ == type(self).__name__:
            return self.name == other.name
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self.name)


class KVConnectorMetadata(ABC):  # noqa: B024  A marker: each connector defines its own fields.
    """Sent by the scheduler half to the workers, once per step."""


class KVConnectorHandshakeMetadata(ABC):  # noqa: B024  A marker, as above.
    """One rank's part of what peers need to connect. Serialisable; the scheduler half collects all parts."""


class KVConnectorSchedulerHalf(ABC):
    """The half beside the scheduler. Only the engine's thread calls it."""

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """True: local hits of several KV-cache groups may differ in length."""
        return False

    @property
    def requires_kv_delivery(self) -> bool:
        """True: a preempted request's stale output is dropped, so that no freed blocks are handed off."""
        return False

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Called once, with the scheduler's cache, so that a connector can count or scan its blocks."""
        if (pool := getattr(kv_cache_manager, "block_pool", None)) is not None:
            self.bind_gpu_block_pool(pool)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Called by `bind_kv_cache_manager`."""

    def on_new_request(self, request: host.Request) -> None:
        """Called at arrival, before any queueing. Start what takes long here."""

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: host.Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Number of tokens after the local, block-aligned `num_computed_tokens` that the connector can load.

        Returns (count, is_async). A count of None: ask again in a later step. With is_async the request waits
        in WAITING_FOR_REMOTE_KVS until its id is reported in `finished_recving`; it must be False with count
        0. May be called any number of times, so it must have no side effects.
        """

    def get_loaded_kv_cache_group_ids(self, request: host.Request) -> tuple[int, ...]:
        """The KV-cache groups that the load fills, after a positive match."""
        return (0,)

    @abstractmethod
    def update_state_after_alloc(
        self, request: host.Request, blocks: host.KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Called after blocks were allocated. `blocks` is the request's whole table, local hits first.

        It is called again with 0 when the request is scheduled after its load: decide by
        `num_external_tokens`. It is also called with 0 after a positive match if the host loads nothing for
        this request, as vLLM does with `prompt_logprobs`: then free what was reserved for it.
        """

    def get_external_cache_hit_sources(
        self, request: host.Request, num_external_tokens: int
    ) -> dict[str, int]:
        """Number of tokens by source, one of vLLM's `CacheHitSource` ("host", "p2p", "disk",
        "external_unspecified"). The sum is `num_external_tokens`."""
        return {"external_unspecified": num_external_tokens} if num_external_tokens else {}

    @abstractmethod
    def build_connector_meta(self, scheduler_output: host.SchedulerOutput) -> KVConnectorMetadata:
        """Called every step, also empty ones. Hands over the step's state; must not modify its argument."""

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Called every step with the aggregated report, before the scheduler acts on it (KVConnectorOutput).

        By then every rank's device has finished the step, so every reader can see the KV that it computed.
        """

    def request_finished(
        self, request: host.Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Called exactly once per request, before its blocks are freed.

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
        """Called before `request_finished`, for blocks that the last step filled in part. Only by vLLM.

        True: the blocks stay until the id is reported in `finished_sending`.
        """
        return False

    def take_prefilled_tokens(self, request_id: str) -> PrefilledTokens | None:
        """Output tokens that the prompt's producer has sampled already. Returned once per request.

        Baton's addition. Hosts that can continue after these tokens call it when the request's load has
        arrived, or has failed and is computed here. Other hosts sample these tokens themselves.
        """
        return None

    def get_load_failure(self, request_id: str) -> str | None:
        """Why the load of this request has failed, as one of few phrases to log and count. None: unknown.

        Baton's addition. Hosts call it when a load is reported as failed, before `request_finished`.
        """
        return None

    def introduction(self) -> str | None:
        """Signed text by which consumers of the cluster find this engine; None if it has none.

        Baton's addition, for a router that sends both legs of a request at once.
        """
        return None

    def take_back(self, kv_transfer_params: Mapping[str, Any]) -> None:
        """No consumer will come for the blocks of these params, which `request_finished` returned.

        Baton's addition, and only a hint: a consumer that has come keeps what it was promised.
        """

    def bind_wake(self, wake: Callable[[], None]) -> bool:
        """`wake` makes an idle host step soon. Call it when a step would find something to do.

        Baton's addition. The host calls it once, on either half in the engine core's process. `wake` may be
        called from any thread, and more often than needed. Return True if every event between steps leads to
        a call, so that the host need not poll.
        """
        return False

    def bind_only_rank(self, rank: KVConnectorWorkerHalf) -> None:
        """The engine has one rank, in this process: `rank` is its worker half.

        Baton's addition, called at most once, after the handshake. The two halves can then inform each other
        without waiting for a step. A host must not call it if it plans a step while another one runs, or if
        it has another connector that waits for its saves in `handle_preemptions`.
        """

    def take_events(self) -> Iterable[KVCacheEvent]:
        """KV events since the last call."""
        return ()

    def has_pending_block_frees(self) -> bool:
        """True: blocks are about to be freed, so a failing allocation should wait instead of preempting."""
        return False

    def has_pending_push_work(self) -> bool:
        """True: keep the engine stepping although no request is live."""
        return False

    def get_finished_count(self) -> int | None:
        """Number of ranks that report each finished id; None: all of them."""
        return None

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Each tensor-parallel rank's `get_handshake_metadata`, called once all ranks are ready."""

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The same, keyed by (pipeline rank, tensor rank)."""
        if any(pp_rank for pp_rank, _ in metadata):
            raise ValueError(f"{type(self).__name__} does not support pipeline parallelism")
        self.set_xfer_handshake_metadata({tp_rank: value for (_, tp_rank), value in metadata.items()})

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Stats of the step, to be merged with the workers'."""
        return None

    def drain(self, timeout_s: float) -> None:
        """The engine will stop: promise nothing new; let loans end, if possible within `timeout_s` seconds.

        Baton's hosts keep stepping until no block is held any more or the time is up. vLLM does not call it.
        """

    def reset_cache(self) -> bool | None:
        """Drops what is cached. Answers True only if nothing that was stored before can be found again.

        vLLM calls it after it has changed the weights, and counts None as success.
        """
        return None

    def set_weights(self, weights: str | None, version: str | None) -> bool | None:
        """The host computes with other weights from now on; see `KVIdentity.updated` for the arguments.

        Baton's addition. Answers True only if KV that was computed before is used no more, here or by other
        engines, except by engines that still have these weights.
        """
        return self.reset_cache()

    def shutdown(self) -> None:
        """Closes every thread, socket and file of this half. Idempotent."""


class KVConnectorWorkerHalf(ABC):
    """The half beside the model, one per rank. Metadata is bound only within a step."""

    _connector_metadata: KVConnectorMetadata | None = None

    # --- Start ---------------------------------------------------------------------------------

    prefer_cross_layer_blocks: bool = False
    """Read before the cache is allocated. True: one contiguous unit per block, over all layers. False on the
    class; an instance that needs it sets it in its constructor."""

    @property
    def hidden_states_wanted(self) -> tuple[int, ...]:
        """Indices of hidden states that `save_kv_layer` gets besides the KV, the same on every rank.

        Baton's addition, numbered as in transformers: 0 are the embeddings, i is the output of layer i, and
        the last one is taken after the final norm. The layer name is `hidden_states_name(i)`; `kv_layer` is
        [T, hidden size] of the step's tokens, in the order of `attn_metadata.slot_mapping`. Disables CUDA
        graphs.
        """
        return ()

    @property
    def graph_capturable(self) -> bool:
        """True: `wait_for_layer_load` and `save_kv_layer` may be captured into a full CUDA graph.

        Baton's addition. The hooks then run while each batch size is captured, before the first step, with
        metadata that the scheduler half built from an empty scheduler output. Kernels that they launch run in
        each replay, their Python code does not. Otherwise a connector that needs its layer hooks
        (`requires_piecewise_for_cudagraph`) gets them between graph pieces, in every step and in no capture.
        """
        return False

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """A context in which to allocate the KV cache, if this connector needs special memory."""
        return None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Called once, before the first step. Each `[num_blocks, kv_heads, block_tokens, 2 * head_dim]`.

        The strides show the layout: tokens come before heads if `get_required_kvcache_layout` returned "NHD".
        Slots of latent attention have another size, and its layers may have a second cache, of index keys.
        """

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: Any) -> None:
        """Called instead of `register_kv_caches` if `prefer_cross_layer_blocks` and the host has one tensor
        for all layers, which is not so if layers of several cache groups share memory, or have two caches.

        `[num_blocks, layers, kv_heads, block_tokens, 2 * head_dim]`, contiguous in this order, or with tokens
        before heads if "NHD" is required. Baton's hosts name the layers in `attn_backend.layer_names`.
        """

    def unregister_kv_caches(self) -> None:
        """Called before the host releases the cache's memory (sleep), without transfers. Idempotent."""

    def restore_kv_caches(self) -> None:
        """Called after the host has the cache's memory again. Idempotent."""

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:
        """Sets the function that copies blocks between the device's cache and a host buffer."""

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """This rank's part of the handshake, after registration."""
        return None

    def bind_wake(self, wake: Callable[[], None]) -> bool:
        """The same as `KVConnectorSchedulerHalf.bind_wake`, for operations that end between steps."""
        return False

    # --- Step ----------------------------------------------------------------------------------

    def takes_part(self, connector_metadata: KVConnectorMetadata) -> bool:
        """False: nothing is to be done or reported in this step, so the host makes no other call in it.

        Baton's addition, called before all other calls of a step. Most decode steps have nothing for a
        connector, and the calls for each layer take longer than those for the step.
        """
        return True

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Waits for saves whose source will be overwritten. Called before the step's metadata is bound."""

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
        """Starts this step's loads: before the forward pass if some are synchronous, otherwise after it."""

    @abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Called before a layer's attention. Blocks until the layer's synchronous loads are complete.

        It also blocks for loads that arrive layer by layer (`KVConnectorOutput.arriving_recving`). A replay
        of a recorded step calls no hook.
        """

    @abstractmethod
    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Called after a layer's attention. Starts to save what the step wrote there."""

    @abstractmethod
    def wait_for_save(self) -> None:
        """Called after the forward pass and in empty steps. Blocks until the saves no longer need the blocks,
        unless the blocks are held (delay_free) until completion is reported."""

    def finish_forward(self) -> None:
        """Called right after the model (vLLM's V2 runner)."""

    def reset_capture_state(self) -> None:
        """Called after graph capture (vLLM's V2 runner)."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """(sent, received) since the last call. A sent id must have been in `finished_req_ids` before."""
        return None, None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Called by hosts. Wraps `get_finished` unless a connector distinguishes failures itself."""
        sending, recving = self.get_finished(finished_req_ids)
        return KVConnectorTransferResults(sending or set(), recving or set())

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that could not be loaded, at the latest in the step that reports the request as received."""
        return set()

    def get_expected_finished_count(self) -> int:
        """Above 0: a finished id waits for this many reports from now on, even if it has some. 0: no change.

        Baton's addition, called in every step. It fills the field `expected_finished_count`, by which vLLM's
        aggregator lets a rank change the value of `get_finished_count` (a handshake may have shown that fewer
        ranks take part); no method of vLLM's connectors fills it. If ranks differ in one step, the last
        rank's value counts.
        """
        return 0

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return None

    def get_kv_connector_kv_cache_events(self) -> KVConnectorKVEvents | None:
        return None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """This rank's report to the scheduler half, aggregated over the ranks on its way."""
        return None

    def shutdown(self) -> None:
        """Closes every thread, socket and file of this half. Idempotent."""


class KVConnectorBase_V1(KVConnectorSchedulerHalf, KVConnectorWorkerHalf):
    """Both halves in one class; `role` decides which of them an instance is.

    Raises ValueError without a `kv_transfer_config`.
    """

    answered_params: ClassVar[frozenset[str]] = frozenset()
    """Baton's addition: keys of `kv_transfer_params` that this connector answers. Two connectors with a
    common key cannot be used in one engine."""

    stands_alone: ClassVar[bool] = False
    """Baton's addition. True: other connectors must not use this KV; a Multi connector refuses it."""

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
        """Layout name ("HND", "NHD", since vLLM 0.32 "LBHNC", ...) that the host must use, or None.

        It changes the strides of the registered tensors but not their shape.
        """
        if cls is KVConnectorBase_V1:
            raise TypeError(
                "call get_required_kvcache_layout on a connector class, not on KVConnectorBase_V1"
            )
        return None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """True if the per-layer hooks do work: they are Python code, which a full CUDA graph skips."""
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: host.KVTransferConfigLike) -> bool:
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Rebuilds a stats object from its serialised form, in the process that logs."""
        return None

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: host.HostConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """Registers the connector's Prometheus metrics, in the process that serves them."""
        return None


class SupportsHMA(ABC):
    """Mix-in: the connector handles several KV-cache groups (hybrid memory allocator)."""

    @abstractmethod
    def request_finished_all_groups(
        self, request: host.Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Called instead of `request_finished`, with one list of block ids per group."""


def supports_hma(connector: Any) -> bool:
    """Accepts instances and classes."""
    return (
        issubclass(connector, SupportsHMA)
        if isinstance(connector, type)
        else isinstance(connector, SupportsHMA)
    )
