"""Configuration of a kit run for one connector, and the toy engine configurations made from it."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from baton.connectors.registry import (
    BUILT_IN,
    connector_class,
    from_module,
    knows_several_groups,
    knows_these_groups,
)
from baton.contract import KVConnectorRole
from baton.core.config import (
    CacheConfig,
    ClusterSecret,
    EngineConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from baton.core.errors import ConfigError
from baton.core.kv_groups import is_hybrid
from baton.core.layout import INDEX_KEYS, SCALES, SCALES_BESIDE, CacheSpec
from baton.core.states import StatePart
from baton.testing.contract.arithmetic import NUM_MARKS, VOCAB

BLOCK = 4  # Tokens.
MAX_MODEL_LEN = 96
KV_HEADS = 4
HEAD_DIM = 2

Windows = tuple[int | None, ...]
"""Per layer: attention window in tokens; None: full attention; STATE, LATENT, or where scales are. Each has a
KV-cache group.
"""

STATE: Final = 0  # Value in place of a window: the layer has a recurrent state.
LATENT: Final = -1  # The layer has latents, and index keys beside them. All layers have, or none.
LATENTS: Final[Windows] = (LATENT, LATENT)
# The layer has int8 keys and values, and the scales of each token and head: in the slot, or in a second cache
# beside it. All layers with tokens have the same, or none.
INLINE: Final = -2
BESIDE: Final = -3
INT8: Final[tuple[Windows, ...]] = ((INLINE, INLINE), (BESIDE, BESIDE))
INT8_AND_STATE: Final[Windows] = (INLINE, STATE)
WINDOWS: Final[tuple[Windows, ...]] = ((), (), (None, 6), (9, None, 5))
WINDOWS_AND_STATES: Final[tuple[Windows, ...]] = ((None, STATE), (STATE, 6, STATE), (STATE, STATE))

Pairing = Literal["none", "pull", "push"]
"""Mode of the handoff. none: one engine. pull: P's params go to D. push: P and D are asked at once."""


@dataclass(frozen=True, kw_only=True)
class ConnectorCase:
    """A connector and its configuration. The defaults suit one that saves and loads within one engine."""

    path: str  # "package.module:Class", or the name of a built-in connector.
    extra_config: dict[str, Any] = field(default_factory=dict)
    pairing: Pairing = "none"
    # Merged over `extra_config` for the decode engine.
    decode_extra_config: dict[str, Any] = field(default_factory=dict)
    # How long to wait for background work when steps make no progress. 0: count steps only.
    patience_s: float = 5.0
    # Longest time of one method in this process; a longer call breaks "never-returned".
    call_max_s: float = 60.0
    tensor_parallel_sizes: tuple[int, ...] = (1, 2)
    # Damages what the connector has stored (cuts a file, loses a server). Called between steps.
    break_store: Callable[[], None] | None = None
    new_example: Callable[[], None] | None = None  # Called before an example's engines are made.
    # The connector keeps a bounded number of ended requests' ids on purpose.
    remembers_requests: bool = False
    plays_latents: bool = False  # Models with latents, and narrower index keys beside them, too.
    plays_scales: bool = False  # Models with int8 caches and their scales, inline or beside, too.
    plays_sleep: bool = False  # Engines sleep: the memory of their caches goes, and comes back empty.
    speaks_text: bool = True  # False: the connector's KV is synthetic, so the tokens are not checked.

    @property
    def name(self) -> str:
        return self.path.rpartition(":")[2]


def find_class(path: str) -> type[Any]:
    """Return the class of `module:Class`, or of a built-in name. Raises ConfigError."""
    if path in BUILT_IN:
        path = BUILT_IN[path]
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        known = ", ".join(BUILT_IN)
        raise ConfigError(
            f"must look like 'package.module:Class', or be one of {known}; is {path!r}", field="connector"
        )
    found = from_module(module, name, "connector")
    if not isinstance(found, type):
        raise ConfigError(f"{path!r} is no class", field="connector")
    return found


def transfer_config(case: ConnectorCase, engine_id: str, role: str, policy: str) -> KVTransferConfig:
    """Return the config as a user would write it, so the embedded engine and vLLM find the same class."""
    own = case.extra_config | (case.decode_extra_config if role == "kv_consumer" else {})
    fields: dict[str, Any] = {
        "kv_role": role,
        "engine_id": engine_id,
        "kv_connector_extra_config": own,
        "kv_load_failure_policy": policy,
    }
    if case.path in BUILT_IN:
        return KVTransferConfig(kv_connector=case.path, **fields)
    module, _, name = case.path.partition(":")
    return KVTransferConfig(kv_connector=name, kv_connector_module_path=module, **fields)


def knows_groups(case: ConnectorCase) -> bool:
    """Return whether the connector supports several KV-cache groups."""
    return knows_several_groups(find_class(case.path), transfer_config(case, "e", "kv_both", "recompute"))


def knows_states(case: ConnectorCase) -> bool:
    """Return whether the connector supports layers with a recurrent state."""
    groups = engine_config(case, Shape(windows=WINDOWS_AND_STATES[0])).kv_cache_groups
    return knows_these_groups(
        find_class(case.path), transfer_config(case, "e", "kv_both", "recompute"), groups
    )


class _ModelWithScalesBeside(ModelConfig, frozen=True, kw_only=True):
    """The scales of K and V are in the second cache of a layer, where other models have index keys."""

    @property
    def stored_slot_size(self) -> int:
        return self.slot_size

    @property
    def cache_specs(self) -> dict[str, CacheSpec]:
        return {
            name: CacheSpec(SCALES, self.dtype, self.num_kv_heads)
            if spec.kind == INDEX_KEYS
            else msgspec.structs.replace(spec, scales=SCALES_BESIDE)
            for name, spec in super().cache_specs.items()
        }


def toy_model(windows: Windows = (), head_dim: int = HEAD_DIM) -> ModelConfig:
    """A state has one unit for each KV head, as wide as a token's KV of that head."""
    state_layers = tuple(layer for layer, window in enumerate(windows) if window == STATE)
    state_parts = (StatePart("state", KV_HEADS, (2 * head_dim,), "float32"),)
    is_latent = LATENT in windows
    are_beside = BESIDE in windows
    is_scaled = are_beside or INLINE in windows
    windows = tuple(None if window is None or window <= 0 else window for window in windows)
    return (_ModelWithScalesBeside if are_beside else ModelConfig)(
        model="toy",
        served_model_name="toy",
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        num_hidden_layers=len(windows) or 2,
        windows=windows,
        state_layers=state_layers,
        state_parts=state_parts if state_layers else (),
        num_attention_heads=KV_HEADS,
        num_kv_heads=1 if is_latent else KV_HEADS,
        latent_size=3 * head_dim if is_latent else 0,
        index_size=head_dim + 1 if is_latent else 2 * are_beside,
        kv_cache_dtype="int8_per_token_head" if is_scaled else "auto",
        head_dim=head_dim,
        hidden_size=KV_HEADS * head_dim,
        vocab_size=VOCAB + NUM_MARKS,
        eos_token_ids=(VOCAB - 1,),
        bos_token_id=None,
        architecture_digest="kit",
        weights_digest="kit",
        hf_config={},
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Engine configuration of one example. Small pools cause preemption, small budgets chunked prefill."""

    tp: int = 1
    num_blocks: int = 24  # Blocks in each KV-cache group.
    budget: int = 64  # Tokens in one step.
    caching: bool = True  # The engine's own prefix cache.
    policy: str = "recompute"
    windows: Windows = ()  # What each layer sees; empty: two layers with full attention.
    in_flight: int = 1  # Steps that are scheduled before the result of the first one is known.


def engine_config(
    case: ConnectorCase,
    shape: Shape,
    *,
    engine_id: str = "e",
    role: str = "kv_both",
    model: ModelConfig | None = None,
    executor: str | None = None,
    secret: ClusterSecret | None = None,
) -> EngineConfig:
    model = model if model is not None else toy_model(shape.windows)
    config = EngineConfig(
        model_config=model,
        cache_config=CacheConfig(
            block_size=BLOCK, num_gpu_blocks=shape.num_blocks, enable_prefix_caching=shape.caching
        ),
        scheduler_config=SchedulerConfig(max_num_batched_tokens=shape.budget, max_num_seqs=8),
        parallel_config=ParallelConfig(
            tensor_parallel_size=shape.tp,
            max_concurrent_batches=shape.in_flight,
            executor=executor or ("multiprocess" if shape.tp * shape.in_flight > 1 else "inprocess"),  # type: ignore[arg-type]
        ),
        kv_transfer_config=transfer_config(case, engine_id, role, shape.policy),
        cluster_secret=secret,
        insecure_no_secret=secret is None,
    )
    groups = config.kv_cache_groups
    num_blocks = shape.num_blocks * len(groups) + is_hybrid(groups)
    cache = msgspec.structs.replace(config.cache_config, num_gpu_blocks=num_blocks)
    return msgspec.structs.replace(config, cache_config=cache)


def new_secret() -> ClusterSecret:
    return ClusterSecret(secrets.token_bytes(32))


def make_half(config: EngineConfig, role: KVConnectorRole, rank: int = 0) -> Any:
    """Make one half as Baton's engine does. Raises what the constructor raises."""
    assert config.kv_transfer_config is not None
    kind = connector_class(config.kv_transfer_config)
    of_rank = msgspec.structs.replace(config.parallel_config, rank=rank)
    return kind(msgspec.structs.replace(config, parallel_config=of_rank), role, None)
