"""Joins two halves, each a class of its own, into the one class that vLLM instantiates.

A connector author writes a KVConnectorSchedulerHalf and a KVConnectorWorkerHalf and joins them:

    class MyConnector(TwoHalves):
        @classmethod
        def make_scheduler_half(cls, vllm_config, kv_cache_config): return MySchedulerHalf(...)
        @classmethod
        def make_worker_half(cls, vllm_config, kv_cache_config): return MyWorkerHalf(...)

An instance holds exactly one half, selected by `role`, and forwards every method of `surface` to it. A call
for the other half is an error of the host and fails an assertion.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from baton.contract.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorSchedulerHalf,
    KVConnectorWorkerHalf,
    SupportsHMA,
)
from baton.contract.surface import ROWS, Half, Row, completed
from baton.core.kv_groups import KVCacheGroup, has_states

if TYPE_CHECKING:
    from baton.contract import host


class HoldsOneHalf:
    """Holds one half, selected by the role. Access to the other half fails an assertion."""

    _scheduler_half: KVConnectorSchedulerHalf | None = None
    _worker_half: KVConnectorWorkerHalf | None = None

    @property
    def scheduler_half(self) -> KVConnectorSchedulerHalf:
        assert self._scheduler_half is not None, "this instance has the worker role"
        return self._scheduler_half

    @property
    def worker_half(self) -> KVConnectorWorkerHalf:
        assert self._worker_half is not None, "this instance has the scheduler role"
        return self._worker_half

    @property
    def either_half(self) -> KVConnectorSchedulerHalf | KVConnectorWorkerHalf:
        return self.worker_half if self._scheduler_half is None else self._scheduler_half


def forward_to_half(row: Row) -> Callable[..., Any]:
    """The connector's method or property that forwards to its half."""
    find = attrgetter(f"{row.half.value}.{row.name}")

    def forward(self: HoldsOneHalf, *arguments: Any, **keywords: Any) -> Any:
        return find(self)(*arguments, **keywords)

    return find if row.kind == "property" else forward


@completed((row for row in ROWS if row.half is not Half.CLASS), forward_to_half)
class TwoHalves(KVConnectorBase_V1, HoldsOneHalf):
    def __init__(
        self, vllm_config: host.HostConfig, role: KVConnectorRole, kv_cache_config: Any = None
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler_half = self.make_scheduler_half(vllm_config, kv_cache_config)
        else:
            self._worker_half = self.make_worker_half(vllm_config, kv_cache_config)
            self.prefer_cross_layer_blocks = self._worker_half.prefer_cross_layer_blocks

    @classmethod
    @abstractmethod
    def make_scheduler_half(
        cls, vllm_config: host.HostConfig, kv_cache_config: Any
    ) -> KVConnectorSchedulerHalf: ...

    @classmethod
    @abstractmethod
    def make_worker_half(cls, vllm_config: host.HostConfig, kv_cache_config: Any) -> KVConnectorWorkerHalf:
        """The rank is `vllm_config.parallel_config.rank`."""

    def bind_only_rank(self, rank: KVConnectorWorkerHalf) -> None:
        self.scheduler_half.bind_only_rank(rank.worker_half if isinstance(rank, TwoHalves) else rank)

    if TYPE_CHECKING:  # Abstract in the base, and defined by the decorator.
        get_num_new_matched_tokens = KVConnectorBase_V1.get_num_new_matched_tokens
        update_state_after_alloc = KVConnectorBase_V1.update_state_after_alloc
        build_connector_meta = KVConnectorBase_V1.build_connector_meta
        start_load_kv = KVConnectorBase_V1.start_load_kv
        wait_for_layer_load = KVConnectorBase_V1.wait_for_layer_load
        save_kv_layer = KVConnectorBase_V1.save_kv_layer
        wait_for_save = KVConnectorBase_V1.wait_for_save


class TwoHalvesOfGroups(TwoHalves, SupportsHMA):
    """A connector whose scheduler half handles KV-cache groups."""

    @classmethod
    def supports_groups(
        cls, kv_transfer_config: host.KVTransferConfigLike, groups: Sequence[KVCacheGroup]
    ) -> bool:
        """Whether it supports these groups. Baton's addition. If not, the host uses one group.

        By default all but those of layers with a recurrent state.
        """
        return not has_states(groups)

    def request_finished_all_groups(
        self, request: host.Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        half = self.scheduler_half
        assert isinstance(half, SupportsHMA)
        return half.request_finished_all_groups(request, block_ids)


@cache
def _forwards_all(kind: type[TwoHalves]) -> bool:
    """Whether the connector has no code of its own for a method of a half."""
    names = [row.name for row in ROWS if row.half is not Half.CLASS]
    bases = (TwoHalves, TwoHalvesOfGroups)
    return all(getattr(kind, name, None) in [getattr(base, name, None) for base in bases] for name in names)


def own_worker(rank: KVConnectorWorkerHalf) -> KVConnectorWorkerHalf:
    """The half that answers the calls of `rank`: the one to which a connector forwards them, or `rank`."""
    return rank.worker_half if isinstance(rank, TwoHalves) and _forwards_all(type(rank)) else rank


def own_scheduler(half: KVConnectorSchedulerHalf) -> KVConnectorSchedulerHalf:
    """The half that answers the calls of `half`: the one to which a connector forwards them, or `half`."""
    return half.scheduler_half if isinstance(half, TwoHalves) and _forwards_all(type(half)) else half
