"""BatonPullConnector over wires that break: reads of one cache group fail, on one rank or on all.

Found by module path, in the engine's processes too. `kv_connector_extra_config["breaks"]`: {"group": index,
"rank": of the reader, null for all, "times": how many requests it hits}. What has failed leaves garbage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch

from baton.connectors.pull.connector import BatonPullConnector
from baton.connectors.pull.identity import EngineIdentity
from baton.connectors.pull.metadata import Order, ReadBlocks
from baton.connectors.pull.worker import PullWorkerHalf
from baton.contract import KVConnectorWorkerHalf
from baton.core.config import EngineConfig
from baton.core.ids import Address
from baton.transport.base import Completion, OpId, Prepared, Transport

GARBAGE = 50.0  # Large enough to change any answer.


class Breaks(msgspec.Struct):
    group: int
    rank: int | None = None
    times: int = 1


class BreakingWorkerHalf(PullWorkerHalf):
    def __init__(self, identity: EngineIdentity, breaks: Breaks) -> None:
        super().__init__(identity)
        self._breaks = breaks
        self._bad_blocks: set[int] = set()
        self._bad_ops: dict[OpId, Sequence[int]] = {}
        self._caches: list[torch.Tensor] = []

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = list(kv_caches.values())
        super().register_kv_caches(kv_caches)

    def _carry_out(self, order: Order) -> None:
        if isinstance(order, ReadBlocks) and order.groups is not None:
            self._draw(order, order.groups.local)
        super()._carry_out(order)

    def _draw(self, order: ReadBlocks, group: int) -> None:
        breaks = self._breaks
        self._bad_blocks.difference_update(order.local_blocks)
        if group == breaks.group and breaks.rank in (None, self._identity.rank) and breaks.times:
            breaks.times -= 1
            self._bad_blocks.update(order.local_blocks)

    def _make_transports(self, names: Sequence[str], address: Address) -> Mapping[str, Transport]:
        made = super()._make_transports(names, address)
        for transport in made.values():
            self._break(transport)
        return made

    def _break(self, transport: Any) -> None:
        post_read, poll = transport.post_read, transport.poll

        def post(prepared: Prepared, local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> OpId:
            op: OpId = post_read(prepared, local_blocks, remote_blocks)
            if not self._bad_blocks.isdisjoint(local_blocks):
                self._bad_ops[op] = local_blocks
            return op

        def poll_broken() -> list[Completion]:
            return [self._ended(completion) for completion in poll()]

        transport.post_read, transport.poll = post, poll_broken

    def _ended(self, completion: Completion) -> Completion:
        blocks = self._bad_ops.pop(completion.op, None)
        if blocks is None:
            return completion
        for cache in self._caches:
            cache[list(blocks)] = GARBAGE
        return replace(completion, ok=False, error="the wire broke")


class BreakingPull(BatonPullConnector):
    @classmethod
    def identity_of(cls, vllm_config: Any) -> EngineIdentity:
        return super().identity_of(_without_breaks(vllm_config)[0])

    @classmethod
    def make_worker_half(cls, vllm_config: Any, kv_cache_config: Any) -> KVConnectorWorkerHalf:
        _, breaks = _without_breaks(vllm_config)
        return BreakingWorkerHalf(cls.identity_of(vllm_config), breaks)


def _without_breaks(config: EngineConfig) -> tuple[EngineConfig, Breaks]:
    transfer = config.kv_transfer_config
    assert transfer is not None
    extra = dict(transfer.kv_connector_extra_config)
    breaks = msgspec.convert(extra.pop("breaks"), Breaks)
    transfer = msgspec.structs.replace(transfer, kv_connector_extra_config=extra)
    return msgspec.structs.replace(config, kv_transfer_config=transfer), breaks
