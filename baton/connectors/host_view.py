"""The host as a connector knows it: one value, which an adapter of each host makes.

    embedded engine   HostView.of_engine(config)                        this module
    vLLM              view_of(kind, vllm_config, kv_cache_config)       baton.hosts.vllm.view

A connector derives a kind of its own. It says what the host has to find out, how the connector's settings are
parsed, and which hosts it cannot work in. The halves read their host here and nowhere else.

Unless the adapter says so, requests with adapters are not named, no layer is a draft's, and no promise about
failed loads is made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, Self, TypeVar

import msgspec

from baton.connectors.prompt_identity import WITHOUT_ADAPTERS, RequestNames
from baton.connectors.store_events import EventGroup, NameBlocks, own_names
from baton.contract import host
from baton.core.config import ClusterSecret, EngineConfig
from baton.core.errors import ConfigError
from baton.core.identity import CurrentIdentity, KVIdentity
from baton.core.ids import EngineId, LoanId
from baton.core.kv_groups import KVCacheGroup, has_tables
from baton.core.layout import CacheSpec, kv_heads_of
from baton.core.states import ALIGNMENT, StatePart, state_bytes

if TYPE_CHECKING:
    import torch

V = TypeVar("V", bound="HostView")


class BlockHolder(Protocol):
    """Keeps lent blocks by references of its own, for a host that forgets a request when it has finished.

    Called on the engine's thread only.
    """

    @property
    def num_free(self) -> int:
        """Blocks of the pool without a reference."""

    def bind(self, pool: Any) -> int:
        """Called once, with the host's block pool. Returns its number of blocks."""

    def hold(self, loan_id: LoanId, block_ids: Sequence[int]) -> None: ...

    def release(self, loan_id: LoanId) -> None:
        """A loan that was never held changes nothing."""


class IdleWait(Protocol):
    """How a host's empty steps wait for a message of a peer."""

    def take(self) -> None: ...
    def end(self) -> None:
        """End a wait, because something has arrived. On any thread."""


class Traces(Protocol):
    """Spans of what the half does, for a host without timelines. Called with the half's lock held."""

    def begin(self, request: host.Request) -> None: ...
    def record(self, name: str, record: Mapping[str, Any]) -> None:
        """See `PullStats.on_record`."""

    def scheduled(self, num_scheduled_tokens: Mapping[str, int], now: float) -> None:
        """A step begins. `num_scheduled_tokens`: by request id."""

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPolicy:
    """How a host differs from what the contract says. The defaults are those of Baton's engine."""

    holder: BlockHolder | None = None  # Keeps lent blocks; None: the host does, because of `delay_free`.
    traces: Traces | None = None
    # Waits for a host that steps without pause while a request waits for a load.
    idle_wait: IdleWait | None = None
    # The host ends with what `build_connector_meta` raises: without the control thread, prompts are computed.
    survives_dead_control: bool = False
    # Routers have no other way to the half than a request:
    # {"baton_introduce": true} --> {"baton_kv_identity": {...}}      kv_transfer_params of request, answer
    #                               with "baton_introduction": "..." of a producer that pushes, and
    #                               with "baton_has_states": true for a model with recurrent states
    # {"baton_take_back": "the ticket of a loan that no consumer will claim", or {"transfer_id": its name}}
    answers_by_request: bool = False
    # Takes the prompt's last token from a request that has not run, unless it is the only one.
    truncate_prompt: Callable[[Any], None] = lambda request: request.drop_last_prompt_token()
    # Makes tables that are indexed by position of the host's, given the number of the request's tokens.
    expand_tables: Callable[[tuple[list[int], ...], int], tuple[list[int], ...]] = lambda tables, _: tables
    # Finds how the attention packs a block of these caches, which have tokens; None: slot by slot.
    find_packing: Callable[[dict[str, torch.Tensor]], str] | None = None
    # Finds which of the registered layers are a draft model's.
    find_drafts: Callable[[Collection[str]], Collection[str]] = lambda names: ()
    empty_step_wait_s: float = 0.0  # A step that computes nothing waits so long for running reads, seconds.
    # Names and groups of blocks in KV events. Groups None: by index, if there are several.
    name_blocks: NameBlocks = own_names
    event_groups: Sequence[EventGroup] | None = None


BATON_POLICY: Final = HostPolicy()


class HostView(msgspec.Struct, frozen=True, kw_only=True):
    """One host as one of its connectors sees it, in the scheduler's process or in one rank's."""

    has_peers: ClassVar[bool] = False  # Peers read the cache, parts of blocks too. Else blocks are stored.
    title: ClassVar[str]  # The connector's name in errors, if it stores blocks.
    measures_blocks: ClassVar[bool] = False  # The adapter has to find `block_bytes`.

    settings: Any
    engine_id: EngineId
    current: CurrentIdentity  # A host need not name weights of which no KV is shared.
    tp_size: int
    tp_rank: int  # Rank of this process; 0 in the scheduler's.
    pp_size: int = 1
    pp_rank: int = 0
    block_tokens: int
    block_bytes: int = 0  # Bytes of one block on one rank, for all layers of its group.
    is_producer: bool
    is_consumer: bool
    secret: ClusterSecret | None  # None: no KV is shared, or with every process of this host.
    # Groups of the layers that this rank registers. By default one group has all layers.
    groups: tuple[KVCacheGroup, ...] = (KVCacheGroup(()),)
    # Specs of the caches that the host has described, by layer name. By default all have keys and values.
    # A layout has the dtypes of the tensors instead.
    cache_specs: Mapping[str, CacheSpec] = {}
    state_parts: tuple[StatePart, ...] = ()  # Parts of one layer's recurrent state, for the whole model.
    state_alignment: int = ALIGNMENT  # Alignment of the parts, in bytes.
    draft: str = ""  # Content digest of the draft model of speculative decoding; empty: none.
    names: RequestNames = WITHOUT_ADAPTERS  # What the host's requests are computed from.
    device: str = "cpu"  # Where the cache lies.
    buffer_device: str | None = None  # Where the memory lies that peers read; None: it is the cache.
    publishes_events: bool = False
    schedules_ahead: bool = False  # The host puts a step together while an earlier one still computes.
    step_timeout_s: float = float("inf")  # A longer step ends the host.
    recomputes_failed_loads: bool = False  # kv_load_failure_policy "recompute".
    raises_user_errors: bool = False  # The host turns a UserError of a hook into that request's error.
    takes_back_tokens: bool = False  # The host takes back what it computed from a load that failed in use.
    lends_memory: bool = False  # Offloaded blocks of the host can be lent.
    policy: HostPolicy

    @classmethod
    def parse(cls, extra: Mapping[str, Any], secret: ClusterSecret | None) -> Any:
        """The connector's settings, from `kv_connector_extra_config`. Raises ConfigError naming the key."""
        raise NotImplementedError

    @classmethod
    def shares_kv(cls, extra: Mapping[str, Any]) -> bool:
        """Whether other processes get KV, so that weights need a name and messages a secret."""
        return True

    @classmethod
    def of_engine(cls, config: EngineConfig) -> Self:
        """The view in the embedded engine, in which a UserError fails one request only.

        Raises ConfigError.
        """
        transfer, model, parallel = config.kv_transfer_config, config.model_config, config.parallel_config
        if transfer is None:
            raise ConfigError("is required", field="kv_transfer_config")
        extra = transfer.kv_connector_extra_config
        secret = config.transfer_secret if cls.shares_kv(extra) else None
        return cls(
            settings=cls.parse(extra, secret),
            engine_id=EngineId(transfer.engine_id),
            current=CurrentIdentity(model.kv_identity(config.cache_config.hash_seed)),
            tp_size=parallel.tensor_parallel_size,
            tp_rank=parallel.rank,
            block_tokens=config.cache_config.block_size,
            block_bytes=_block_bytes(config) if cls.measures_blocks else 0,
            is_producer=transfer.is_kv_producer,
            is_consumer=transfer.is_kv_consumer,
            secret=secret,
            groups=config.kv_cache_groups,
            cache_specs=model.cache_specs,
            state_parts=model.state_parts,
            device=config.device_config.device,
            buffer_device=transfer.kv_buffer_device,
            publishes_events=config.enable_kv_events,
            schedules_ahead=parallel.max_concurrent_batches > 1,
            step_timeout_s=config.step_timeout_s,
            recomputes_failed_loads=transfer.kv_load_failure_policy == "recompute",
            raises_user_errors=True,
            takes_back_tokens=True,
            lends_memory=True,
            policy=BATON_POLICY,
        )

    def seen_as(self, kind: type[V], **changes: Any) -> V:
        """The same host as a connector of another kind sees it."""
        fields = {name: getattr(self, name) for name in HostView.__struct_fields__}
        return kind(**fields | changes)

    @property
    def kv_identity(self) -> KVIdentity:
        return self.current.value

    @property
    def num_ranks(self) -> int:
        return self.pp_size * self.tp_size

    @property
    def rank(self) -> int:
        """Rank of this process among all ranks of the engine."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def has_block_tables(self) -> bool:
        return has_tables(self.groups)


def bytes_of_places(layer_bytes: Iterable[Sequence[int]]) -> int:
    """Bytes of one block for all layers of its group. `layer_bytes`: a block's, of each layer of each group.

    Layers at the same place of several groups share their memory, of which the largest part is copied.
    """
    return sum(map(max, zip_longest(*layer_bytes, fillvalue=0)))


def _block_bytes(config: EngineConfig) -> int:
    model, tp_size = config.model_config, config.parallel_config.tensor_parallel_size
    rank = config.parallel_config.rank
    num_heads = len(kv_heads_of(rank, tp_size=tp_size, num_kv_heads=model.num_kv_heads))
    of_tokens = config.cache_config.block_size * num_heads * model.token_bytes
    of_state = state_bytes(model.state_parts, tp_rank=rank, tp_size=tp_size)
    groups = config.kv_cache_groups
    return bytes_of_places([of_state if one.is_state else of_tokens] * len(one.layers) for one in groups)
