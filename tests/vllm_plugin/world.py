"""`tests.connectors.pull_world` with the halves for vLLM, on a pool that counts references."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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


@dataclass
class Block:
    block_id: int
    ref_cnt: int = 0


class Pool:
    """A block without references is free."""

    def __init__(self, engine: VllmEngine, num_blocks: int) -> None:
        self.num_gpu_blocks = num_blocks
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._engine = engine

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            assert block.ref_cnt > 0, "a free block"
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        for block in ordered_blocks:
            assert block.ref_cnt > 0, "freed twice"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self._engine.free_blocks.append(block.block_id)

    def get_num_free_blocks(self) -> int:
        return len(self._engine.free_blocks)


class VllmEngine(pull_world.Engine):
    def __init__(self, world: pull_world.World, config: EngineConfig, url: str, epoch: Epoch) -> None:
        super().__init__(world, config, url, epoch)
        self.pool = Pool(self, config.cache_config.num_gpu_blocks)
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

    def allocate(self, num_tokens: int) -> list[int]:
        block_ids = super().allocate(num_tokens)
        for block_id in block_ids:
            self.pool.blocks[block_id].ref_cnt = 1
        return block_ids

    def give_back(self, block_ids: Sequence[int]) -> None:
        self.pool.free_blocks(self.pool.blocks[block_id] for block_id in block_ids)


class VllmWorld(pull_world.World):
    engine_kind = VllmEngine
