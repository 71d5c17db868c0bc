"""Offload: host memory of a rank, and copies that take time, fail and end late.

    store, load --> due --copy_mean_s--> copied or failed
                     `------ wait -----> at once

A copy reads its source when it ends. A store whose blocks were freed and written meanwhile stores other
content, unless the connector waited for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from baton.connectors.host_view import BATON_POLICY
from baton.connectors.storage.memory.copies import Copies, CopyEnd
from baton.connectors.storage.memory.identity import OffloadIdentity
from baton.connectors.storage.memory.settings import GIB
from baton.core.config import EngineConfig
from baton.core.identity import CurrentIdentity
from baton.testing.host.memory import JUNK, UNWRITTEN, RankMemory
from baton.testing.host.model import Words
from lab.sim.checkers import fenced
from lab.sim.kernel.reads import Write

if TYPE_CHECKING:
    from lab.sim.host.engine import Engine

FENCE_MIN_S = 1.0  # A wait with a shorter timeout does not end a copy.


def offload_identity(engine: Engine, rank: int, config: EngineConfig) -> OffloadIdentity:
    spec = engine.spec
    settings = spec.offload
    assert settings is not None
    slot_bytes = GIB // spec.num_slots // spec.num_ranks
    return OffloadIdentity(
        settings=settings,
        engine_id=engine.engine_id,
        tp_size=spec.num_ranks,
        tp_rank=rank,
        block_tokens=spec.block_tokens,
        block_bytes=slot_bytes // settings.blocks_per_chunk // len(engine.groups),
        is_producer=True,
        is_consumer=True,
        secret=None,
        policy=BATON_POLICY,
        groups=engine.groups,
        current=CurrentIdentity(config.model_config.kv_identity(config.cache_config.hash_seed)),
    )


@dataclass(slots=True, eq=False, kw_only=True)
class HostCopy(Write):
    """One job. A store writes to no block."""

    pairs: list[tuple[int, int]]  # (block, row)
    is_load: bool


class HostCopies(Copies):
    def __init__(self, engine: Engine, memory: RankMemory, num_rows: int) -> None:
        self._engine, self._memory = engine, memory
        self._rows: list[Words | None] = [None] * num_rows
        self._stored_at = [0] * num_rows  # Number of updates before the store.
        self._due: dict[int, HostCopy] = {}
        self._ended: list[CopyEnd] = []

    def store(self, job: int, block_ids: Sequence[int], rows: Sequence[int]) -> None:
        self._begin(job, block_ids, rows, is_load=False)

    def load(self, job: int, block_ids: Sequence[int], rows: Sequence[int]) -> None:
        self._begin(job, block_ids, rows, is_load=True)

    def take_ended(self) -> list[CopyEnd]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, jobs: Collection[int], timeout_s: float) -> bool:
        if timeout_s < FENCE_MIN_S:
            return not self._due.keys() & set(jobs)
        for job in sorted(jobs):
            self._end(job)
        return True

    def close(self, timeout_s: float) -> None:
        network = self._engine.cluster.reads
        network.live = [one for one in network.live if one not in self._due.values()]
        self._due.clear()

    def _begin(self, job: int, block_ids: Sequence[int], rows: Sequence[int], *, is_load: bool) -> None:
        engine, network, world = self._engine, self._engine.cluster.reads, self._engine.world
        targets = tuple(block_ids) if is_load else ()
        copy = HostCopy(
            number=len(network.posted) + 1,
            consumer=engine,
            owner=self,
            targets=targets,
            pairs=list(zip(block_ids, rows, strict=True)),
            is_load=is_load,
            ok=not world.chance(world.faults.copy_error),
        )
        world.count(f"host {'load' if is_load else 'store'}: {'good' if copy.ok else 'error'}")
        self._due[job] = copy
        if is_load:
            network.begin(copy)
            self._memory.words[list(targets)] = JUNK  # Half written from the beginning.
            self._memory.writers[list(targets)] = UNWRITTEN
        took_s = world.spread(world.faults.copy_mean_s)
        world.after(took_s, lambda: engine.when_awake(partial(self._end, job)))

    def _end(self, job: int) -> None:
        copy = self._due.pop(job, None)
        if copy is None:
            return
        if copy.is_load:
            fenced.check_landing(copy)
            self._engine.cluster.reads.live.remove(copy)
        for block, row in copy.pairs if copy.ok else copy.pairs[: len(copy.pairs) // 2]:
            if not copy.is_load:
                self._rows[row] = self._memory.words[block].copy()
                self._stored_at[row] = self._engine.num_updates
            elif (words := self._rows[row]) is not None:
                self._memory.words[block] = words
                is_old = self._stored_at[row] < self._engine.num_updates
                self._engine.world.count("a rollback finds what was stored", is_old)
                self._memory.writers[block] = copy.number
        self._ended.append(CopyEnd(job, error="" if copy.ok else "the copy failed"))
        self._engine.poke()
