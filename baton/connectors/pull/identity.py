"""Identity of this engine in handoffs; nothing else of the connectors reads the host's configuration."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from baton.connectors.prompt_identity import WITHOUT_ADAPTERS, RequestNames
from baton.connectors.pull.settings import PullSettings
from baton.core.config import ClusterSecret, EngineConfig
from baton.core.errors import ConfigError
from baton.core.identity import CurrentIdentity, KVIdentity
from baton.core.ids import EngineId
from baton.core.kv_groups import KVCacheGroup, has_tables
from baton.core.layout import CacheSpec
from baton.core.states import ALIGNMENT, StatePart

TICKET_KEY_PURPOSE = "baton.ticket.1"


class EngineIdentity(msgspec.Struct, frozen=True, kw_only=True):
    engine_id: EngineId
    current: CurrentIdentity
    tp_size: int
    tp_rank: int  # Rank of this process; 0 in the scheduler's.
    block_tokens: int
    is_producer: bool
    is_consumer: bool
    recomputes_failed_loads: bool  # kv_load_failure_policy "recompute".
    raises_user_errors: bool  # The host turns a UserError of a hook into that request's error.
    secret: ClusterSecret | None
    settings: PullSettings
    does_push: bool = False  # The connector understands introductions.
    pp_rank: int = 0  # Rank of this process. The embedded engine has one stage; a host that has more says so.
    pp_size: int = 1
    has_host_mirror: bool = False  # Peers see a copy of the cache in host memory (`host_mirror`).
    # Groups of the layers that this rank registers. By default one group has all layers.
    groups: tuple[KVCacheGroup, ...] = (KVCacheGroup(()),)
    # Specs of the caches that the host has described, by layer name. By default all have keys and values.
    # A layout has the dtypes of the tensors instead.
    cache_specs: Mapping[str, CacheSpec] = {}
    state_parts: tuple[StatePart, ...] = ()  # Parts of one layer's recurrent state, for the whole model.
    state_alignment: int = ALIGNMENT  # Alignment of the parts, in bytes.
    draft: str = ""  # Content digest of the draft model of speculative decoding; empty: none.
    schedules_ahead: bool = False  # The host puts a step together while an earlier one still computes.
    names: RequestNames = WITHOUT_ADAPTERS  # What the host's requests are computed from.

    @classmethod
    def of_engine(
        cls,
        config: EngineConfig,
        settings_kind: type[PullSettings] = PullSettings,
        *,
        does_push: bool = False,
    ) -> EngineIdentity:
        """Identity in the embedded engine, in which a UserError fails one request only."""
        transfer = config.kv_transfer_config
        if transfer is None:
            raise ConfigError("is required", field="kv_transfer_config")
        secret = config.transfer_secret
        settings = settings_kind.parse(transfer.kv_connector_extra_config, secret)
        raises = settings.raises_user_errors
        return cls(
            engine_id=EngineId(transfer.engine_id),
            current=CurrentIdentity(config.model_config.kv_identity(config.cache_config.hash_seed)),
            tp_size=config.parallel_config.tensor_parallel_size,
            tp_rank=config.parallel_config.rank,
            block_tokens=config.cache_config.block_size,
            is_producer=transfer.is_kv_producer,
            is_consumer=transfer.is_kv_consumer,
            recomputes_failed_loads=transfer.kv_load_failure_policy == "recompute",
            raises_user_errors=True if raises is None else raises,
            secret=secret,
            settings=settings,
            does_push=does_push,
            has_host_mirror=_mirrors(transfer.kv_buffer_device, config.device_config.device),
            groups=config.kv_cache_groups,
            cache_specs=config.model_config.cache_specs,
            state_parts=config.model_config.state_parts,
            schedules_ahead=config.parallel_config.max_concurrent_batches > 1,
        )

    @property
    def kv_identity(self) -> KVIdentity:
        return self.current.value

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(group.window for group in self.groups)

    @property
    def state_groups(self) -> tuple[int, ...]:
        """Indices of the groups of layers with a recurrent state."""
        return tuple(index for index, group in enumerate(self.groups) if group.is_state)

    @property
    def has_block_tables(self) -> bool:
        return has_tables(self.groups)

    @property
    def num_ranks(self) -> int:
        return self.pp_size * self.tp_size

    @property
    def rank(self) -> int:
        """Rank of this process among all ranks of the engine."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def ticket_key(self) -> bytes | None:
        """Signs tickets and introductions."""
        return self.secret.derive(TICKET_KEY_PURPOSE) if self.secret is not None else None

    @property
    def previous_ticket_key(self) -> bytes | None:
        """Ticket key of the secret that is being replaced: it is accepted, and signs nothing."""
        if self.secret is None or self.secret.previous is None:
            return None
        return self.secret.derive_all(TICKET_KEY_PURPOSE)[1]


def _mirrors(buffer_device: str | None, device: str) -> bool:
    """Raises ConfigError for a buffer that the cache's device cannot have."""
    if buffer_device not in (None, "cpu", device):
        raise ConfigError(
            f"must be cpu or {device}, where the KV cache lies; is {buffer_device!r}",
            field="kv_transfer_config.kv_buffer_device",
        )
    return buffer_device == "cpu" and device != "cpu"
