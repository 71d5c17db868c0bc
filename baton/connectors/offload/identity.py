"""Configuration of the offload connector, taken from its host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from baton.connectors.extra_config import FIELD
from baton.connectors.offload.settings import GIB, LendSettings, OffloadSettings
from baton.connectors.prompt_identity import WITHOUT_ADAPTERS, RequestNames
from baton.connectors.pull.identity import EngineIdentity
from baton.core.config import EngineConfig
from baton.core.errors import ConfigError
from baton.core.hashing import HASH_SEED
from baton.core.identity import CurrentIdentity, KVIdentity
from baton.core.kv_groups import KVCacheGroup, has_states, has_tables, num_places
from baton.core.layout import kv_heads_of
from baton.core.states import state_bytes

_UNNAMED = KVIdentity("", "", "", 0, 0, 0, HASH_SEED)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadIdentity:
    """Configuration of one half. Raises ConfigError if the memory cannot hold a single chunk."""

    settings: OffloadSettings
    rank: int  # Rank among all ranks of the engine; 0 for the scheduler half.
    num_ranks: int
    block_tokens: int
    block_bytes: int  # Bytes of one block on one rank, for all layers of its group.
    groups: tuple[KVCacheGroup, ...] = (KVCacheGroup(()),)  # A chunk has blocks of each group.
    # A host need not name its weights: a process keeps its rows for itself, so only changes count.
    current: CurrentIdentity = field(default_factory=lambda: CurrentIdentity(_UNNAMED))
    publishes_events: bool = False
    is_producer: bool = True  # May store.
    is_consumer: bool = True  # May load.
    names: RequestNames = WITHOUT_ADAPTERS  # What the host's requests are computed from.
    lender: EngineIdentity | None = None  # The producer that lends slots; None: nothing is lent.

    def __post_init__(self) -> None:
        if has_states(self.groups) and self.settings.blocks_per_chunk != 1:
            raise ConfigError(
                "must be 1 for a model with recurrent states: a state is stored at the end of one block",
                field=f"{FIELD}.blocks_per_chunk",
            )
        windows = [group.window for group in self.groups if group.window is not None]
        if any(window < (self.settings.blocks_per_chunk - 1) * self.block_tokens for window in windows):
            raise ConfigError(
                f"chunks must not be longer than the window of {min(windows)} tokens: their beginning would "
                "be freed before their end is computed",
                field=f"{FIELD}.blocks_per_chunk",
            )
        if self.lender is not None and has_tables(self.groups):
            raise ConfigError(
                "needs a model whose layers all see the whole prompt, without windows and recurrent states",
                field=f"{FIELD}.lend",
            )
        if self.num_slots < 1:
            needed = self.block_bytes * self.rows_per_slot * self.num_ranks / GIB
            raise ConfigError(
                f"{self.settings.cpu_gib:g} GiB cannot hold a chunk of {self.settings.blocks_per_chunk} "
                f"blocks, which takes {needed:.6f} GiB on {self.num_ranks} ranks",
                field=f"{FIELD}.cpu_gib",
            )

    @property
    def num_slots(self) -> int:
        """Number of chunks that each rank can hold. All halves of an engine compute the same number."""
        share = int(self.settings.cpu_gib * GIB) // self.num_ranks
        return share // (self.block_bytes * self.rows_per_slot)

    @property
    def rows_per_slot(self) -> int:
        """Blocks of a chunk: those of the first group, then those of the second, and so on."""
        return self.settings.blocks_per_chunk * len(self.groups)

    @property
    def num_rows(self) -> int:
        """Number of blocks in all slots."""
        return self.num_slots * self.rows_per_slot

    @classmethod
    def of_engine(cls, config: EngineConfig) -> Self:
        """Configuration in an embedded engine. Raises ConfigError."""
        transfer, model, parallel = config.kv_transfer_config, config.model_config, config.parallel_config
        assert transfer is not None
        tp_size = parallel.tensor_parallel_size
        num_heads = len(kv_heads_of(parallel.rank, tp_size=tp_size, num_kv_heads=model.num_kv_heads))
        of_tokens = config.cache_config.block_size * num_heads * model.token_bytes
        of_state = state_bytes(model.state_parts, tp_rank=parallel.rank % tp_size, tp_size=tp_size)
        groups = config.kv_cache_groups
        # A layer's memory is shared by the groups that have a layer at its place.
        of_places = [
            max(of_state if group.is_state else of_tokens for group in groups if place < len(group.layers))
            for place in range(num_places(groups))
        ]
        settings = OffloadSettings.parse(transfer.kv_connector_extra_config)
        return cls(
            settings=settings,
            rank=parallel.rank,
            num_ranks=parallel.world_size,
            block_tokens=config.cache_config.block_size,
            block_bytes=sum(of_places),
            groups=groups,
            current=CurrentIdentity(model.kv_identity(config.cache_config.hash_seed)),
            publishes_events=config.enable_kv_events,
            is_producer=transfer.is_kv_producer,
            is_consumer=transfer.is_kv_consumer,
            lender=_lender_of(config, settings.lend) if settings.lend is not None else None,
        )


def _lender_of(config: EngineConfig, lend: dict[str, Any]) -> EngineIdentity:
    """Identity of the producer that lends slots. Raises ConfigError."""
    replace = msgspec.structs.replace
    assert config.kv_transfer_config is not None
    transfer = replace(config.kv_transfer_config, kv_connector_extra_config=lend, kv_role="kv_producer")
    try:
        lender = EngineIdentity.of_engine(replace(config, kv_transfer_config=transfer), LendSettings)
    except ConfigError as error:
        raise ConfigError(str(error), field=f"{FIELD}.lend") from error
    return replace(lender, has_host_mirror=False)
