"""Context of one forward pass: positions of its tokens in the paged cache, and the connector's hooks.

A batch is flattened: the scheduled tokens of request 0, then of request 1, ...

    request        0                1     2
    tokens    | 5 6 7 8 |           9  | 40 41 |         num_scheduled   [4, 1, 2]
    positions | 0 1 2 3 |           17 | 8  9  |         num_computed    [0, 17, 8]
    query_start_loc  0              4    5       7       seq_lens        [4, 18, 10]

The context is passed as an argument; there is no global current context.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from baton.contract import KVConnectorWorkerHalf
from baton.contract.base import hidden_states_name

IntArray: TypeAlias = npt.NDArray[np.int64]
OutsideGraph: TypeAlias = Callable[[Callable[[], torch.Tensor]], torch.Tensor]
BlockIds: TypeAlias = "Sequence[int] | npt.NDArray[np.integer]"


@dataclass(slots=True)
class AttentionMetadata:
    """Attention metadata of one step, with vLLM's names. The tensors share the arrays' memory, on the CPU."""

    num_actual_tokens: int
    num_reqs: int
    max_query_len: int
    block_size: int
    query_start_loc_np: IntArray  # [R + 1]
    seq_lens_np: IntArray  # [R]; includes this step's tokens.
    slot_mapping_np: IntArray  # [T]: block id * block_size + offset.
    block_table_np: IntArray  # [R, most blocks of a request]; entries after a request's tokens are of no use.
    positions_np: IntArray  # [T]

    @property
    def max_seq_len(self) -> int:
        return int(self.seq_lens_np.max())

    @property
    def query_start_loc(self) -> torch.Tensor:
        return torch.from_numpy(self.query_start_loc_np)

    @property
    def seq_lens(self) -> torch.Tensor:
        return torch.from_numpy(self.seq_lens_np)

    @property
    def slot_mapping(self) -> torch.Tensor:
        return torch.from_numpy(self.slot_mapping_np)

    @property
    def block_table(self) -> torch.Tensor:
        return torch.from_numpy(self.block_table_np)

    @property
    def positions(self) -> torch.Tensor:
        return torch.from_numpy(self.positions_np)


class AttentionLayer(NamedTuple):
    """One layer, as connectors see it."""

    kv_cache: torch.Tensor  # The pool's blocks, without scratch blocks.
    group: int  # KV-cache group; see `baton.core.kv_groups`.


class ConnectorContext(NamedTuple):
    """Argument of `start_load_kv`, with the names of vLLM's ForwardContext.

    `attn_metadata` maps layers to metadata, which layers of one cache group share. None in a step without
    tokens.
    """

    attn_metadata: dict[str, AttentionMetadata] | None
    no_compile_layers: Mapping[str, AttentionLayer]


@dataclass(slots=True)
class ForwardContext:
    """All that a model needs of a step besides token ids.

    `attn_metadata` None: a dummy run, in which attention does nothing and no connector is called.
    """

    attn_metadata: AttentionMetadata | None = None  # Metadata of the first group, if there are several.
    kv_caches: dict[str, torch.Tensor] = field(default_factory=dict)
    worker_half: KVConnectorWorkerHalf | None = None
    layers: Mapping[str, AttentionLayer] = field(default_factory=dict)  # Layers as `worker_half` sees them.
    # Indices into T of the hidden states that are needed; a prompt needs at most the last one. None: all. A
    # model may skip the others once all keys and values are written.
    wanted_tokens: torch.Tensor | None = None
    # Attention plans of a recorded step by kind of layer, at fixed addresses. None: the model makes its own.
    plans: dict[Any, Any] | None = None
    # Set while a step is recorded in pieces: calls through it run between two pieces, in every replay.
    outside_graph: OutsideGraph | None = None
    # Metadata of each KV-cache group (own block table and slot mapping). Empty: there is one group.
    group_metadata: Sequence[AttentionMetadata] = ()

    def metadata_of(self, group: int) -> AttentionMetadata | None:
        return self.group_metadata[group] if self.group_metadata else self.attn_metadata

    def for_connector(self) -> ConnectorContext:
        metadata = self.attn_metadata
        if metadata is None:
            return ConnectorContext(None, self.layers)
        if not (groups := self.group_metadata):
            return ConnectorContext(dict.fromkeys(self.layers, metadata), self.layers)
        of_layers = {name: groups[layer.group] for name, layer in self.layers.items()}
        return ConnectorContext(of_layers, self.layers)

    @property
    def watcher(self) -> KVConnectorWorkerHalf | None:
        """The half whose per-layer hooks this pass calls, if any."""
        if self.attn_metadata is None or self.worker_half is None:
            return None
        return self.worker_half if self.worker_half.has_connector_metadata() else None

    @property
    def hidden_states_wanted(self) -> tuple[int, ...]:
        """Hidden states that the connector needs; see the contract's property of this name."""
        return () if (watcher := self.watcher) is None else watcher.hidden_states_wanted

    def show_hidden_states(self, layer: int, hidden_TM: torch.Tensor) -> None:
        """Pass the hidden states before `layer`, or those of the whole model, to the connector."""
        assert self.watcher is not None, "no half wants hidden states"
        self.watcher.save_kv_layer(hidden_states_name(layer), hidden_TM, self.attn_metadata)


def build_attention_metadata(
    num_computed: Sequence[int] | IntArray,
    num_scheduled: Sequence[int] | IntArray,
    block_ids: Sequence[BlockIds],
    block_size: int,
) -> AttentionMetadata:
    """Build the metadata of a step. Each argument has one entry per request.

    `block_ids[i]` is request i's whole block table, and may be longer.
    """
    computed = np.asarray(num_computed, dtype=np.int64)
    scheduled = np.asarray(num_scheduled, dtype=np.int64)
    assert len(computed) == len(scheduled) == len(block_ids) > 0
    counts = (-(-(computed + scheduled) // block_size)).tolist()
    assert all(len(ids) >= count for ids, count in zip(block_ids, counts, strict=True)), (
        "a request has tokens beyond its blocks"
    )
    block_table = np.zeros((len(counts), max(counts)), dtype=np.int64)
    for row, (ids, count) in enumerate(zip(block_ids, counts, strict=True)):
        block_table[row, :count] = ids[:count]
    return metadata_of_tables(computed, scheduled, block_table, block_size, int(scheduled.sum()))


def metadata_of_tables(
    computed: IntArray,
    scheduled: IntArray,
    block_table: IntArray,
    block_size: int,
    num_tokens: int,
) -> AttentionMetadata:
    """Build the metadata from `computed`, `scheduled` [R] and `block_table` [R, most blocks of a request].

    `num_tokens`: sum of `scheduled`. The metadata keeps `block_table` without a copy.
    """
    num_reqs = len(computed)
    seq_lens = computed + scheduled
    max_query_len = 1
    if num_tokens == num_reqs:  # One token per request: a decode step, which has to be fast.
        query_start_loc = np.arange(num_reqs + 1)
        positions, request_of_token = computed, query_start_loc[:-1]
    else:
        max_query_len = int(scheduled.max())
        query_start_loc = np.zeros(num_reqs + 1, np.int64)
        np.cumsum(scheduled, out=query_start_loc[1:])
        positions = np.arange(num_tokens) + np.repeat(computed - query_start_loc[:-1], scheduled)
        request_of_token = np.repeat(np.arange(num_reqs), scheduled)
    block_index, offset = np.divmod(positions, block_size)
    return AttentionMetadata(
        num_actual_tokens=num_tokens,
        num_reqs=num_reqs,
        max_query_len=max_query_len,
        block_size=block_size,
        query_start_loc_np=query_start_loc,
        seq_lens_np=seq_lens,
        slot_mapping_np=block_table[request_of_token, block_index] * block_size + offset,
        block_table_np=block_table,
        positions_np=positions,
    )
