"""`tests.connectors.pull_world` with the halves for vLLM, which hold lent blocks themselves."""

from __future__ import annotations

from typing import Any

import msgspec

from baton.connectors.host_view import Traces
from baton.connectors.pull import EngineIdentity, PullSchedulerHalf, PullWorkerHalf
from baton.core.config import EngineConfig
from baton.core.ids import Epoch
from baton.core.layout import SLOT
from baton.hosts.vllm.host_policy import vllm_policy
from baton.hosts.vllm.lent_blocks import LentBlocks
from tests.connectors import pull_world


class VllmEngine(pull_world.Engine):
    def __init__(self, world: pull_world.World, config: EngineConfig, url: str, epoch: Epoch) -> None:
        super().__init__(world, config, url, epoch)
        self.half.bind_gpu_block_pool(self.pool)

    @property
    def lent_blocks(self) -> LentBlocks:
        holder = self.half._policy.holder
        assert isinstance(holder, LentBlocks)
        return holder

    @property
    def lent(self) -> dict[str, list[int]]:
        """Return the blocks that the half holds, by request id. The host keeps none."""
        names, held = self.half._loans._lent, self.lent_blocks._held
        return {
            names[loan_id].request_id: [block.block_id for block in blocks]
            for loan_id, blocks in held.items()
        }

    @lent.setter
    def lent(self, empty: dict[str, list[int]]) -> None:
        assert not empty

    def identity(self, config: EngineConfig, **of_half: Any) -> EngineIdentity:
        policy = vllm_policy(**of_half)
        return msgspec.structs.replace(EngineIdentity.of_engine(config), policy=policy)

    def make_half(self, config: EngineConfig, url: str, epoch: Epoch) -> PullSchedulerHalf:
        return PullSchedulerHalf(
            self.identity(config, traces=self.make_traces(config)),
            epoch=epoch,
            clock=lambda: self.world.now,
            control=lambda agent, lock: pull_world.Station(self.world, url, agent),
        )

    def make_traces(self, config: EngineConfig) -> Traces | None:
        return None

    def make_worker(self, config: EngineConfig, epoch: Epoch, **parts: Any) -> PullWorkerHalf:
        return PullWorkerHalf(self.identity(config, find_packing=lambda caches: SLOT), epoch=epoch, **parts)


class VllmWorld(pull_world.World):
    engine_kind = VllmEngine
