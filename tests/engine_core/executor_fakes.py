"""A connector whose worker halves send prescribed reports, for executors with any kind of ranks.

`kv_connector_extra_config`: {"raises_in_forward": step}, {"silent_ranks": [...]}, {"expects": {rank: count}}.
"""

import os
import threading
from dataclasses import dataclass, field
from typing import Any

from baton.contract import (
    AllRanks,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorSchedulerHalf,
    KVConnectorTransferResults,
    KVConnectorWorkerHalf,
    NotCombined,
    NullSchedulerHalf,
    RankReport,
    Sum,
)
from baton.core.config import EngineConfig


@dataclass
class Order(KVConnectorMetadata):
    """The report of each rank in this step."""

    step: int
    received: dict[int, set[str]] = field(default_factory=dict)  # This and all following fields are by rank.
    failed: dict[int, set[str]] = field(default_factory=dict)
    invalid: dict[int, set[int]] = field(default_factory=dict)
    expected: dict[int, int] = field(default_factory=dict)
    is_silent: bool = False  # Ranks report nothing else.
    says_unsendable: bool = False  # Every rank adds an object that cannot be pickled.
    unsendable: Any = None


@dataclass
class Pid(KVConnectorHandshakeMetadata):
    tp_rank: int
    pid: int


@dataclass(kw_only=True)
class Seen(RankReport):
    """Calls that a rank has seen since its start."""

    steps: NotCombined[tuple[int, ...]] = ()
    num_binds: Sum[int] = 0
    num_clears: Sum[int] = 0
    finished: NotCombined[tuple[str, ...]] = ()
    pids: AllRanks[set[int]] = field(default_factory=set)


@dataclass(kw_only=True)
class Unsendable(RankReport):
    lock: NotCombined[Any] = field(default_factory=threading.Lock)


class ToldHalf(KVConnectorWorkerHalf):
    def __init__(self, tp_rank: int) -> None:
        self._tp_rank = tp_rank
        self._steps: list[int] = []
        self._finished: list[str] = []
        self._num_binds = self._num_clears = 0
        self._order: Order | None = None

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return Pid(self._tp_rank, os.getpid())

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        assert not self.has_connector_metadata(), "bound twice"
        assert isinstance(connector_metadata, Order)
        super().bind_connector_metadata(connector_metadata)
        self._num_binds += 1
        self._order = connector_metadata
        self._steps.append(connector_metadata.step)

    def clear_connector_metadata(self) -> None:
        assert self.has_connector_metadata(), "cleared twice"
        super().clear_connector_metadata()
        self._num_clears += 1

    def _assert_bound(self, *arguments: Any, **named: Any) -> None:
        assert self.has_connector_metadata()

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = _assert_bound

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self._finished += sorted(finished_req_ids)
        order = self._order
        assert order is not None
        return KVConnectorTransferResults(
            set(), order.received.get(self._tp_rank, set()), order.failed.get(self._tp_rank, set())
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self._order is not None
        return self._order.invalid.get(self._tp_rank, set())

    def get_expected_finished_count(self) -> int:
        assert self._order is not None
        return self._order.expected.get(self._tp_rank, 0)

    def build_connector_worker_meta(self) -> Seen | None:
        if self._order is not None and self._order.is_silent:
            return None
        if self._order is not None and self._order.says_unsendable:
            return Unsendable(rank=self._tp_rank)
        return Seen(
            rank=self._tp_rank,
            steps=tuple(self._steps),
            num_binds=self._num_binds,
            num_clears=self._num_clears,
            finished=tuple(self._finished),
            pids={os.getpid()},
        )


class ToldFactory:
    def scheduler_half(self, config: EngineConfig) -> KVConnectorSchedulerHalf:
        return NullSchedulerHalf()

    def worker_half(self, config: EngineConfig, tp_rank: int) -> KVConnectorWorkerHalf:
        return ToldHalf(tp_rank)


factory = ToldFactory()
FACTORY = "executor_fakes:factory"
