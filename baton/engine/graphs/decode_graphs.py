"""Buckets: static inputs, an attention plan at fixed addresses, and the recording that uses both."""

from __future__ import annotations

import enum
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from baton.contract.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorWorkerHalf
from baton.contract.null import NullWorkerHalf
from baton.core.config import EngineConfig
from baton.engine.attention.backend import StaticArray
from baton.engine.forward_context import (
    AttentionMetadata,
    ForwardContext,
    IntArray,
    OutsideGraph,
    metadata_of_tables,
)
from baton.engine.graphs.recorders import Recorder, Replay, recorder_for
from baton.engine.models.decoder import Decoder

logger = logging.getLogger(__name__)


class GraphMode(enum.Enum):
    """How decode steps are recorded: not at all, in pieces between attention layers, or as a whole."""

    OFF = "off"
    PIECEWISE = "piecewise"
    FULL = "full"


def choose_mode(config: EngineConfig, half: KVConnectorWorkerHalf) -> GraphMode:
    """The configured mode, as far as the connector allows it."""
    asked = config.device_config.graph_mode
    if half.hidden_states_wanted:
        return GraphMode.OFF  # The connector gets hidden states between layers, in Python.
    if asked == "auto":
        # Graphs gain nothing on a CPU.
        asked = "full" if config.device_config.device == "cuda" else "off"
    if asked != "full":
        return GraphMode(asked)
    if not half.graph_capturable and needs_layer_hooks(config, half):
        if config.device_config.graph_mode == "full":
            logger.warning("%s needs its layer hooks: graphs are piecewise", type(half).__name__)
        return GraphMode.PIECEWISE
    model = config.model_config
    if config.device_config.device == "cuda" and (model.latent_size or model.stored_dtype != model.dtype):
        return GraphMode.PIECEWISE  # Attention over such a cache gathers as many blocks as a step needs.
    return GraphMode.FULL


def needs_layer_hooks(config: EngineConfig, half: KVConnectorWorkerHalf) -> bool:
    """Whether decode steps need the layer hooks.

    The connector's class decides, as in vLLM; without one: True.
    """
    if isinstance(half, NullWorkerHalf):
        return False
    if isinstance(half, KVConnectorBase_V1) and config.kv_transfer_config is not None:
        extra = config.kv_transfer_config.kv_connector_extra_config
        return type(half).requires_piecewise_for_cudagraph(extra)
    return True


def bucket_sizes(config: EngineConfig) -> tuple[int, ...]:
    """Recorded batch sizes, ascending: as configured, or powers of two up to the most concurrent requests."""
    most = config.scheduler_config.max_num_seqs
    sizes = config.device_config.graph_buckets
    if not sizes:
        sizes = (*(1 << power for power in range((most - 1).bit_length())), most)
    return tuple(sorted({min(size, most) for size in sizes}))


logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Bucket:
    """Recording for at most B requests with one token each."""

    input_ids: StaticArray  # [B]
    positions: StaticArray  # [B]
    context: ForwardContext  # Argument of the model in every replay.
    replay: Replay | None = None


class DecodeGraphs:
    """Recordings of decode steps, one bucket per batch size."""

    def __init__(
        self,
        config: EngineConfig,
        model: Decoder,
        kv_caches: dict[str, torch.Tensor],
        mode: GraphMode,
        device: torch.device,
    ) -> None:
        """`kv_caches` have a scratch block after the pool's blocks; no request owns it."""
        assert mode is not GraphMode.OFF
        self._model = model
        self._kv_caches = kv_caches
        self._mode = mode
        self._block_size = config.cache_config.block_size
        self._max_blocks = -(-config.model_config.max_model_len // self._block_size) + 1  # Per request.
        self._scratch_block = config.cache_config.num_gpu_blocks
        self._num_groups = len(config.kv_cache_groups)
        self._device = device
        sizes = bucket_sizes(config)
        logger.info("decode steps are replayed, %s: batches of %s", mode.value, ", ".join(map(str, sizes)))
        self._buckets = {size: self._make_bucket(size) for size in sizes}
        self._hooks_are_recorded = False

    def _make_bucket(self, size: int) -> _Bucket:
        return _Bucket(
            input_ids=StaticArray((size,), torch.int64, self._device),
            positions=StaticArray((size,), torch.int64, self._device),
            context=ForwardContext(
                kv_caches=self._kv_caches,
                plans=self._model.decode_plans(size, self._max_blocks, self._kv_caches),
            ),
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self._buckets)

    def record(
        self, half: KVConnectorWorkerHalf | None = None, metadata: KVConnectorMetadata | None = None
    ) -> None:
        """Record all buckets, before the first step. A half's layer hooks are recorded under `metadata`.

        Errors of the half are raised, because its connector declares that the hooks can be captured.
        """
        recorder = recorder_for(self._device)
        self._hooks_are_recorded = half is not None
        if half is None:
            self._record_all(recorder, None)
            return
        assert metadata is not None, "the hooks of a half need its metadata"
        half.bind_connector_metadata(metadata)
        try:
            self._record_all(recorder, half)
        finally:
            half.clear_connector_metadata()
            half.reset_capture_state()

    def _record_all(self, recorder: Recorder, half: KVConnectorWorkerHalf | None) -> None:
        for size, bucket in reversed(self._buckets.items()):  # Smaller ones reuse the memory of larger ones.
            no_rows = np.zeros(0, np.int64)
            padding = self._padded(no_rows, np.zeros((0, 1), np.int64), size)
            self._fill(bucket, no_rows, [padding] * self._num_groups)
            bucket.context.attn_metadata = padding
            bucket.context.worker_half = half

            def forward(outside: OutsideGraph | None, bucket: _Bucket = bucket) -> torch.Tensor:
                context = bucket.context
                context.outside_graph = outside
                return self._model.forward(bucket.input_ids.tensor, bucket.positions.tensor, context)

            try:
                bucket.replay = recorder.record(forward, in_pieces=self._mode is GraphMode.PIECEWISE)
            finally:
                bucket.context.worker_half = None

    def can_run(self, metadata: AttentionMetadata) -> bool:
        return (
            metadata.max_query_len == 1
            and metadata.num_reqs <= self.sizes[-1]
            and metadata.block_table_np.shape[1] <= self._max_blocks
        )

    def run(self, token_ids: IntArray, step: ForwardContext) -> torch.Tensor:
        """Hidden states `[R, M]` of a step that it `can_run`; valid until the next step."""
        metadata = step.attn_metadata
        assert metadata is not None
        num_reqs = metadata.num_reqs
        size = next(size for size in self.sizes if size >= num_reqs)
        bucket = self._buckets[size]
        assert bucket.replay is not None, "`record` comes before the first step"
        padded = [
            self._padded(metadata.positions_np, of_group.block_table_np, size)
            for of_group in step.group_metadata or (metadata,)
        ]
        self._fill(bucket, token_ids, padded)
        context = bucket.context
        context.attn_metadata = metadata  # Hooks get the metadata without padding.
        context.group_metadata = step.group_metadata
        if self._mode is GraphMode.PIECEWISE or self._hooks_are_recorded:
            context.worker_half = step.worker_half
        try:
            return bucket.replay()[:num_reqs]
        finally:
            context.worker_half = None

    def _padded(self, positions: IntArray, block_table: IntArray, size: int) -> AttentionMetadata:
        """The metadata of a padded batch. Rows of padding compute position 0 of the scratch block."""
        num_reqs, width = block_table.shape
        computed = np.zeros(size, np.int64)
        computed[:num_reqs] = positions
        table = np.full((size, width), self._scratch_block, np.int64)
        table[:num_reqs] = block_table
        return metadata_of_tables(computed, np.ones(size, np.int64), table, self._block_size, size)

    def _fill(self, bucket: _Bucket, token_ids: IntArray, padded: Sequence[AttentionMetadata]) -> None:
        ids = np.zeros(padded[0].num_reqs, np.int64)
        ids[: len(token_ids)] = token_ids
        bucket.input_ids.fill(ids)
        bucket.positions.fill(padded[0].positions_np)
        plans = bucket.context.plans
        assert plans is not None
        self._model.refill_plans(plans, padded, self._kv_caches)
