"""Buckets: static inputs, an attention plan at fixed addresses, and the recording that uses both."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from baton.contract.base import KVConnectorMetadata, KVConnectorWorkerHalf
from baton.core.config import EngineConfig
from baton.engine.attention.static_array import StaticArray
from baton.engine.forward_context import (
    AttentionMetadata,
    ForwardContext,
    IntArray,
    OutsideGraph,
    metadata_of_tables,
)
from baton.engine.graphs.mode import GraphMode, bucket_sizes
from baton.engine.graphs.recorders import Recorder, Replay, recorder_for

logger = logging.getLogger(__name__)


class GraphedModel(Protocol):
    """Interface of a model whose decode steps can be replayed."""

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor: ...

    def decode_plans(
        self, num_reqs: int, max_blocks: int, kv_caches: dict[str, torch.Tensor]
    ) -> dict[Any, Any]:
        """Plans at fixed addresses for `ForwardContext.plans`, for steps with one token per request."""

    def refill_plans(
        self,
        plans: dict[Any, Any],
        group_metadata: Sequence[AttentionMetadata],
        kv_caches: dict[str, torch.Tensor],
    ) -> None:
        """Set the plans' contents for a step. `metadata` is per KV-cache group."""


def graphs_of(
    config: EngineConfig,
    model: GraphedModel,
    kv_caches: dict[str, torch.Tensor],
    mode: GraphMode,
    device: torch.device,
) -> DecodeGraphs:
    """`kv_caches` have a scratch block after the pool's blocks."""
    block_size, sizes = config.cache_config.block_size, bucket_sizes(config)
    logger.info("decode steps are replayed, %s: batches of %s", mode.value, ", ".join(map(str, sizes)))
    return DecodeGraphs(
        model,
        kv_caches,
        mode=mode,
        sizes=sizes,
        block_size=block_size,
        max_blocks=-(-config.model_config.max_model_len // block_size) + 1,
        scratch_block=config.cache_config.num_gpu_blocks,
        num_groups=len(config.kv_cache_groups),
        device=device,
    )


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
        model: GraphedModel,
        kv_caches: dict[str, torch.Tensor],
        *,
        mode: GraphMode,
        sizes: Sequence[int],
        block_size: int,
        max_blocks: int,
        scratch_block: int,
        num_groups: int = 1,
        device: torch.device,
    ) -> None:
        """`max_blocks`: of the longest request.

        `scratch_block`: its id in every cache; no request owns it.
        """
        assert mode is not GraphMode.OFF
        self._model = model
        self._kv_caches = kv_caches
        self._mode = mode
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._scratch_block = scratch_block
        self._num_groups = num_groups
        self._device = device
        self._buckets = {size: self._make_bucket(size) for size in sorted(sizes)}
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
        """Record all buckets, before the first step. With a half, its layer hooks are recorded under
        `metadata`.

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
        context.attn_metadata = metadata  # For hooks, without padding.
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
        return metadata_of_tables(computed, np.ones(size, np.int64), table, self._block_size)

    def _fill(self, bucket: _Bucket, token_ids: IntArray, padded: Sequence[AttentionMetadata]) -> None:
        ids = np.zeros(padded[0].num_reqs, np.int64)
        ids[: len(token_ids)] = token_ids
        bucket.input_ids.fill(ids)
        bucket.positions.fill(padded[0].positions_np)
        plans = bucket.context.plans
        assert plans is not None
        self._model.refill_plans(plans, padded, self._kv_caches)
