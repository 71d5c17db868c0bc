"""Worker half of a Multi connector: every child gets its own metadata, and no other child's errors.

A child's error in a step has the effect that it would have if the child were the engine's only connector
(`baton.engine.runner.connector_step`), limited to its own loads:

    raised by                      effect
    anything up to the last load   the blocks that it was to load in this step are reported as invalid; the
                                   loads that it began are abandoned (the scheduler half is told)
    get_transfer_results           none of its requests finishes in this step
    get_block_ids_with_load_errors all of its requests that finished in this step have failed
    everything else                its report is left out

A child whose scheduler half sent no metadata (it raised, or is retired) takes no part in the step. Ended
requests, the number of reports they wait for, and events travel in MultiWorkerMetadata, which keeps the
children apart. Received ids are taken only from the child that loads the request. Invalid blocks go to the
host, which acts on them before it calls the scheduler half.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from baton.connectors.multi.child import ask_each, shut_down_each
from baton.connectors.multi.children import FIELD
from baton.connectors.multi.metadata import (
    ChildPart,
    ChildReport,
    MultiHandshake,
    MultiMetadata,
    MultiWorkerMetadata,
)
from baton.connectors.multi.stats import MultiStats
from baton.contract import (
    KVConnectorHandshakeMetadata,
    KVConnectorKVEvents,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorStats,
    KVConnectorTransferResults,
    KVConnectorWorkerHalf,
    KVConnectorWorkerMetadata,
    TwoHalves,
    host,
)
from baton.contract.base import hidden_states_name
from baton.contract.defaults import defined_by
from baton.contract.guard import Guard
from baton.contract.halves import own_worker
from baton.contract.surface import Half, completed, rows_of
from baton.core.errors import ConfigError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class _Child(Guard):
    """One child on this rank, in one step at a time."""

    def __init__(self, name: str, position: int, half: KVConnectorWorkerHalf) -> None:
        super().__init__(name)
        self.position = position
        self.half = half
        self.part = ChildPart(None)
        self.is_bound = False
        self.report = ChildReport()
        self.ends = KVConnectorOutput()  # Ends of requests, for its report.

    def begin_step(self, part: ChildPart) -> None:
        self.part, self.is_bound, self.loads_failed = part, False, False

    def take_report(self, rank: int) -> ChildReport:
        report, self.report = self.report, ChildReport()
        report.error, self.error = self.error, None
        ends, self.ends = self.ends, KVConnectorOutput()
        if not ends.is_empty():
            report.ends[rank] = ends
        return report

    @property
    def takes_part(self) -> bool:
        return self.part.metadata is not None


@completed((row for row in rows_of(Half.WORKER) if row.multi is not None), ask_each)
class MultiWorkerHalf(KVConnectorWorkerHalf):
    prefer_cross_layer_blocks = False  # Set by the constructor: true if all children prefer them.

    def __init__(self, children: Sequence[tuple[str, KVConnectorWorkerHalf]], *, rank: int = 0) -> None:
        """`children`: (name, half), in the scheduler half's order. `rank`: among all ranks of the engine."""
        self._children = [_Child(name, position, half) for position, (name, half) in enumerate(children)]
        self.prefer_cross_layer_blocks = all(half.prefer_cross_layer_blocks for _, half in children)
        # Hidden states go only to children that requested them; to others they would be an unknown layer.
        self._wanted_by: dict[str, set[int]] = {}
        for child in self._children:
            for layer in child.half.hidden_states_wanted:
                self._wanted_by.setdefault(hidden_states_name(layer), set()).add(child.position)
        self._rank = rank
        self._begun: MultiMetadata | None = None  # The current step.
        self._loader: dict[str, int] = {}  # Position of the child that must report a request as received.
        self._invalid_blocks: set[int] = set()  # Blocks for this step's report.

    @property
    def children(self) -> tuple[KVConnectorWorkerHalf, ...]:
        return tuple(child.half for child in self._children)

    # --- Start: a child's errors are raised ----------------------------------------------

    @property
    def hidden_states_wanted(self) -> tuple[int, ...]:
        """All layers that any child wants; each child gets its own."""
        return tuple(sorted({layer for child in self._children for layer in child.half.hidden_states_wanted}))

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """Raises ConfigError if two children need special memory for the cache."""
        given = [
            (child.name, context)
            for child in self._children
            if (context := child.half.get_mem_pool_context())
        ]
        if len(given) > 1:
            names = " and ".join(name for name, _ in given)
            raise ConfigError(f"{names} both need special memory for the KV cache; keep one", field=FIELD)
        return given[0][1] if given else None

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        of_children = tuple(child.half.get_handshake_metadata() for child in self._children)
        return MultiHandshake(of_children) if any(part is not None for part in of_children) else None

    # --- Step: before and during the forward pass -----------------------------------------------------------

    def takes_part(self, connector_metadata: KVConnectorMetadata) -> bool:
        """True if a child takes part, or if the scheduler half reports about loads."""
        assert isinstance(connector_metadata, MultiMetadata)
        parts = connector_metadata.parts
        answers = [
            child.contain("takes_part", partial(child.half.takes_part, part.metadata))
            for child, part in zip(self._children, parts, strict=True)
            if part.metadata is not None
        ]
        has_loads = any(part.begun or part.sync_blocks for part in parts)
        return any(answers) or has_loads or bool(connector_metadata.ended)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        for child in self._begin(kv_connector_metadata):
            metadata = child.part.metadata
            assert metadata is not None
            child.load("handle_preemptions", partial(child.half.handle_preemptions, metadata))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        for child in self._begin(connector_metadata):
            metadata = child.part.metadata
            assert metadata is not None
            if not child.loads_failed:
                bind = partial(child.half.bind_connector_metadata, metadata)
                child.is_bound = child.load("bind_connector_metadata", bind)

    def clear_connector_metadata(self) -> None:
        for child in self._children:
            if child.takes_part:
                child.contain("clear_connector_metadata", child.half.clear_connector_metadata)
            child.begin_step(ChildPart(None))
        self._begun = None
        super().clear_connector_metadata()

    def start_load_kv(self, forward_context: host.ForwardContext, **kwargs: Any) -> None:
        for child in self._bound():
            child.load("start_load_kv", partial(child.half.start_load_kv, forward_context, **kwargs))

    def wait_for_layer_load(self, layer_name: str) -> None:
        for child in self._bound():
            wait = partial(child.half.wait_for_layer_load, layer_name)
            if child.part.sync_blocks:
                child.load("wait_for_layer_load", wait)
            else:
                child.contain("wait_for_layer_load", wait)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        receivers = self._wanted_by.get(layer_name)  # None: a layer of the cache, for all children.
        for child in self._bound():
            if receivers is None or child.position in receivers:
                save = partial(child.half.save_kv_layer, layer_name, kv_layer, attn_metadata, **kwargs)
                child.contain("save_kv_layer", save)

    def finish_forward(self) -> None:
        for child in self._participants():
            child.contain("finish_forward", child.half.finish_forward)

    def wait_for_save(self) -> None:
        for child in self._bound():
            child.contain("wait_for_save", child.half.wait_for_save)

    def reset_capture_state(self) -> None:
        for child in self._children:
            child.contain("reset_capture_state", child.half.reset_capture_state)

    # --- Step: results ---------------------------------------------------------------------

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Returns no ids: they travel in the children's reports, and the scheduler half counts them."""
        for child in self._children:
            if child.takes_part:
                self._collect(child, finished_req_ids)
            else:
                self._invalid_blocks |= child.part.sync_blocks  # No rank got the load.
        return KVConnectorTransferResults()

    def _collect(self, child: _Child, finished_req_ids: set[str]) -> None:
        results = child.contain(
            "get_transfer_results", lambda: child.half.get_transfer_results(set(finished_req_ids))
        )
        # Called here and not when the host asks for blocks, because the result decides what else has failed.
        invalid: set[int] | None = child.contain(
            "get_block_ids_with_load_errors", lambda: set(child.half.get_block_ids_with_load_errors()), None
        )
        received = self._loaded_by(child, results.finished_recving)
        failed = self._loaded_by(child, results.failed_recving)
        if invalid is None:
            failed |= received  # The bad blocks are unknown, so no received request may be used.
        else:
            self._invalid_blocks |= invalid
        if child.loads_failed or invalid is None:
            self._invalid_blocks |= child.part.sync_blocks
        if child.loads_failed:
            child.report.abandoned |= frozenset(child.part.begun)
        for request_id in received:
            del self._loader[request_id]
        child.ends = KVConnectorOutput(results.finished_sending, received, failed)

    def _loaded_by(self, child: _Child, request_ids: set[str] | None) -> set[str]:
        loaded = {r for r in request_ids or () if self._loader.get(r) == child.position}
        if strays := set(request_ids or ()) - loaded:
            logger.warning("%s reports %s as received, but does not load them", child.name, sorted(strays))
        return loaded

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid_blocks = self._invalid_blocks, set()
        return invalid

    def get_expected_finished_count(self) -> int:
        """Counts travel in each child's own report, with the ids that they concern."""
        for child in self._participants():
            expected = partial(_expected_by, child.half)
            child.ends.expected_finished_count = child.contain("get_expected_finished_count", expected)
        return 0

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        stats = MultiStats()
        for child in self._participants():
            of_child = child.contain("get_kv_connector_stats", child.half.get_kv_connector_stats)
            stats.add(child.name, of_child)
        return None if stats.is_empty() else stats

    def get_kv_connector_kv_cache_events(self) -> KVConnectorKVEvents | None:
        """Events travel in each child's own report, because a host would mix them."""
        for child in self._participants():
            events = child.half.get_kv_connector_kv_cache_events
            child.report.events = child.contain("get_kv_connector_kv_cache_events", events)
        return None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        for child in self._participants():
            build = child.half.build_connector_worker_meta
            child.report.metadata = child.contain("build_connector_worker_meta", build)
        reports = [child.take_report(self._rank) for child in self._children]
        return None if all(report.is_empty for report in reports) else MultiWorkerMetadata(tuple(reports))

    # --- End -----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        shut_down_each({child.name: child.half.shutdown for child in self._children})

    def _begin(self, metadata: KVConnectorMetadata) -> list[_Child]:
        """Children with a part in this step. The step starts with the first call that has its metadata."""
        assert isinstance(metadata, MultiMetadata)
        if self._begun is not metadata:
            self._begun = metadata
            for request_id in metadata.ended:
                self._loader.pop(request_id, None)
            for child, part in zip(self._children, metadata.parts, strict=True):
                child.begin_step(part)
                self._loader.update(dict.fromkeys(part.begun, child.position))
        return self._participants()

    def _participants(self) -> list[_Child]:
        return [child for child in self._children if child.takes_part]

    def _bound(self) -> list[_Child]:
        return [child for child in self._children if child.is_bound]


def _expected_by(half: KVConnectorWorkerHalf) -> int:
    return int(half.get_expected_finished_count())


def worker_children(rank: KVConnectorWorkerHalf) -> tuple[KVConnectorWorkerHalf, ...]:
    """Children of a Multi connector's worker half, or of the connector that holds it."""
    half = rank.worker_half if isinstance(rank, TwoHalves) else rank
    assert isinstance(half, MultiWorkerHalf)
    return half.children


def fences(half: KVConnectorWorkerHalf) -> bool:
    """Whether the half waits in `handle_preemptions`."""
    return "handle_preemptions" in defined_by(type(own_worker(half)))
