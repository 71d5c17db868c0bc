"""The host of an offload connector, and the slots of its memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from msgspec.structs import force_setattr

from baton.connectors.extra_config import FIELD
from baton.connectors.host_view import HostView
from baton.connectors.pull.identity import EngineIdentity
from baton.connectors.storage.memory.settings import GIB, LendSettings, OffloadSettings
from baton.core.config import ClusterSecret
from baton.core.errors import ConfigError
from baton.core.identity import CurrentIdentity
from baton.core.kv_groups import has_states


class LenderIdentity(EngineIdentity, frozen=True, kw_only=True):
    """The producer that lends slots."""

    settings_kind: ClassVar[type[LendSettings]] = LendSettings

    settings: LendSettings


class OffloadIdentity(HostView, frozen=True, kw_only=True):
    """Raises ConfigError if the memory cannot hold a single chunk."""

    title: ClassVar[str] = "offload"
    measures_blocks: ClassVar[bool] = True

    settings: OffloadSettings
    lender: LenderIdentity | None = None  # The producer that lends slots; None: nothing is lent.

    @classmethod
    def parse(cls, extra: Mapping[str, Any], secret: ClusterSecret | None) -> OffloadSettings:
        return OffloadSettings.parse(extra)

    @classmethod
    def shares_kv(cls, extra: Mapping[str, Any]) -> bool:
        """A process keeps its rows for itself, unless it lends them."""
        return extra.get("lend") is not None

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
        if self.settings.lend is not None:
            force_setattr(self, "lender", self._lender(self.settings.lend))
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
    def chunk_tokens(self) -> int:
        return self.block_tokens * self.settings.blocks_per_chunk

    def rows_of(self, slot: int, group: int) -> range:
        """Rows of a slot for the blocks of a group."""
        first = slot * self.rows_per_slot + group * self.settings.blocks_per_chunk
        return range(first, first + self.settings.blocks_per_chunk)

    def first_held(self, num_computed: int) -> int:
        """First block that all groups with tokens hold in a step that starts after `num_computed` tokens."""
        with_tokens = (group for group in self.groups if not group.is_state)
        return max((group.first_kept(num_computed, self.block_tokens) for group in with_tokens), default=0)

    @property
    def num_rows(self) -> int:
        """Number of blocks in all slots."""
        return self.num_slots * self.rows_per_slot

    def _lender(self, lend: Mapping[str, Any]) -> LenderIdentity:
        """Raises ConfigError."""
        field = f"{FIELD}.lend"
        if not self.lends_memory:
            raise ConfigError("works in Baton's own engine, so far", field=field)
        try:
            settings = LenderIdentity.parse(lend, self.secret)
        except ConfigError as error:
            raise ConfigError(str(error), field=field) from error
        if self.has_block_tables:
            raise ConfigError(
                "needs a model whose layers all see the whole prompt, without windows and recurrent states",
                field=field,
            )
        current = CurrentIdentity(self.current.value)  # Each half is told of other weights.
        return self.seen_as(
            LenderIdentity,
            settings=settings,
            current=current,
            is_producer=True,
            is_consumer=False,
            buffer_device=None,
        )
