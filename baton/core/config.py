"""Configuration of one engine: frozen, validated, derived in one place.

Attribute names follow vLLM's `VllmConfig`, so that a connector reads the same names in both hosts:
`config.cache_config.block_size`, `config.kv_transfer_config.engine_id`, ...
"""

import functools
import hashlib
import hmac
import uuid
from bisect import bisect_right
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from baton.core.errors import ConfigError
from baton.core.hashing import HASH_SEED
from baton.core.identity import KVIdentity, check_version
from baton.core.kv_groups import (
    KVCacheGroup,
    group_layers,
    index_layer_name,
    is_hybrid,
    layer_name,
    one_group,
)
from baton.core.layout import (
    CONSTANT_SCALES,
    INDEX_KEYS,
    INLINE_SCALES,
    KEYS_AND_VALUES,
    LATENT,
    NO_SCALES,
    CacheSpec,
)
from baton.core.option import Option
from baton.core.states import StatePart
from baton.core.validation import explain

T = TypeVar("T")

KVRole = Literal["kv_producer", "kv_consumer", "kv_both"]
LoadFailurePolicy = Literal["recompute", "fail"]
KVCacheDtype = Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head"]
"""vLLM's `CacheDType`, those that this engine has. "fp8" is "fp8_e4m3"."""

_STORED_DTYPES = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "int8_per_token_head": "int8",
}
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}
_SCALES_BYTES = 8  # Inline scales of a slot: one float32 for K and one for V.

BLOCK_SIZE_MAX = 1024  # Tokens.
MIN_SECRET_BYTES = 16
_SCRYPT_N, _SCRYPT_R = 1 << 14, 8  # 16 MiB (128 * n * r bytes), hashlib's default limit.


def _from_json(text: str | bytes, kind: type[T], field: str) -> T:
    """Raises ConfigError naming the field."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        problem, path = explain(error, kind)
        raise ConfigError(problem, field=field + path) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(error), field=field) from error


class KVTransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Same fields and the same JSON as vLLM's `KVTransferConfig` (config/kv_transfer.py, 0.32).

    Two defaults differ. `kv_load_failure_policy` is "recompute", so the user notices a failed load only as
    latency. `kv_buffer_device` is the device of the cache.
    """

    kv_connector: str | None = None
    kv_role: KVRole | None = None
    engine_id: str = msgspec.field(default_factory=lambda: str(uuid.uuid4()))
    # The memory that peers read. None: the cache itself. "cpu" with a cache on a GPU: a copy in host memory.
    kv_buffer_device: str | None = None
    kv_buffer_size: float = 1e9
    kv_rank: int | None = None
    kv_parallel_size: int = 1
    kv_ip: str = "127.0.0.1"
    kv_port: int = 14579
    kv_connector_extra_config: dict[str, Any] = {}
    kv_connector_module_path: str | None = None
    enable_permute_local_kv: bool = False
    kv_load_failure_policy: LoadFailurePolicy = "recompute"

    def __post_init__(self) -> None:
        if self.kv_connector is not None and self.kv_role is None:
            raise ConfigError(
                "is required with kv_connector; one of kv_producer, kv_consumer, kv_both",
                field="kv_transfer_config.kv_role",
            )
        if self.kv_connector_module_path == "":
            raise ConfigError(
                "must name a module, or be left out", field="kv_transfer_config.kv_connector_module_path"
            )
        if not self.engine_id:
            raise ConfigError("must not be empty", field="kv_transfer_config.engine_id")

    @property
    def is_kv_transfer_instance(self) -> bool:
        return self.kv_connector is not None and self.kv_role is not None

    @property
    def is_kv_producer(self) -> bool:
        return self.kv_connector is not None and self.kv_role in ("kv_producer", "kv_both")

    @property
    def is_kv_consumer(self) -> bool:
        return self.kv_connector is not None and self.kv_role in ("kv_consumer", "kv_both")

    def get_from_extra_config(self, key: str, default: Any) -> Any:
        return self.kv_connector_extra_config.get(key, default)

    @classmethod
    def from_json(cls, text: str | bytes) -> "KVTransferConfig":
        """Raises ConfigError naming the field."""
        return _from_json(text, cls, "kv_transfer_config")


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Same fields and the same JSON as vLLM's `KVEventsConfig` (config/kv_events.py, 0.32).

    One default differs: events hold token ids, so the default endpoints are on the loopback interface.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None  # None: "zmq" if events are enabled, else "null".
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000  # Batches kept for replay; one batch holds the events of one step.
    hwm: int = 100_000  # Batches queued for one slow subscriber; further ones are dropped for it.
    max_queue_size: int = 100_000  # Batches that wait to be published.
    topic: str = ""

    def __post_init__(self) -> None:
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            if getattr(self, name) < 1:
                raise ConfigError("must be at least 1", field=f"kv_events_config.{name}")

    @property
    def is_published(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"

    @classmethod
    def from_json(cls, text: str | bytes) -> "KVEventsConfig":
        """Raises ConfigError naming the field."""
        return _from_json(text, cls, "kv_events_config")


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint, as its folder describes it. baton.checkpoints makes it."""

    model: str  # Folder.
    served_model_name: str
    dtype: str  # "float32", "bfloat16", "float16": weights and activations.
    max_model_len: int  # Tokens of prompt plus output.
    num_hidden_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    architecture_digest: str  # Digest of config.json in canonical form.
    weights_digest: str  # Digest of the weights' content.
    weights_version: str = ""  # The operator's name of the weights; empty: their digest identifies them.
    hf_config: dict[str, Any]  # Content of config.json.
    generation_config: dict[str, Any] = {}  # Content of generation_config.json; empty if there is none.
    windows: tuple[int | None, ...] = ()  # Sliding window of each layer, None without. Empty: no windows.
    state_parts: tuple[StatePart, ...] = ()  # Parts of the recurrent state of each of `state_layers`.
    state_layers: tuple[int, ...] = ()  # Indices of the layers with a recurrent state instead of attention.
    latent_size: int = 0  # Elements of a slot that holds a latent instead of K and V (MLA); 0: K and V.
    index_size: int = 0  # Elements of a slot of the second cache of each layer, of index keys; 0: none.
    # Element type of keys, values and latents; "auto": `dtype`. Index keys always have `dtype`.
    kv_cache_dtype: KVCacheDtype = "auto"

    def __post_init__(self) -> None:
        if self.weights_version:
            check_version(self.weights_version, field="weights_version")
        if self.has_scales and self.slot_size % 4:
            raise ConfigError(
                f"needs slots of a multiple of 4 numbers; this model has {self.slot_size}",
                field="kv_cache_dtype",
            )

    @property
    def stored_dtype(self) -> str:
        """Element type of keys, values and latents in the cache, by its name in torch."""
        return _STORED_DTYPES.get(self.kv_cache_dtype, self.dtype)

    @property
    def has_scales(self) -> bool:
        """Whether a slot ends with its scales (`baton.engine.attention.quantised`)."""
        return self.kv_cache_dtype == "int8_per_token_head"

    @property
    def item_bytes(self) -> int:
        """Size of an element of `stored_dtype`."""
        return _ITEM_BYTES[self.stored_dtype]

    @property
    def slot_size(self) -> int:
        """Numbers of a layer's cache per token and KV head."""
        return self.latent_size or 2 * self.head_dim

    @property
    def stored_slot_size(self) -> int:
        """Elements of a layer's cache per token and KV head: the numbers, and their scales."""
        return self.slot_size + (_SCALES_BYTES if self.has_scales else 0)

    @property
    def token_bytes(self) -> int:
        """Size of all caches of a layer per token and KV head."""
        return self.stored_slot_size * self.item_bytes + self.index_size * _ITEM_BYTES[self.dtype]

    @property
    def num_layer_caches(self) -> int:
        return self.num_hidden_layers * (2 if self.index_size else 1)

    @property
    def cache_specs(self) -> dict[str, CacheSpec]:
        """What the caches with tokens hold, by name, in layer order."""
        if self.has_scales:
            scales = INLINE_SCALES
        else:
            scales = NO_SCALES if self.stored_dtype == self.dtype else CONSTANT_SCALES
        kind = LATENT if self.latent_size else KEYS_AND_VALUES
        spec = CacheSpec(kind, self.stored_dtype, self.num_kv_heads, scales)
        specs: dict[str, CacheSpec] = {}
        for layer in range(self.num_hidden_layers):
            if layer not in self.state_layers:
                specs[layer_name(layer)] = spec
            if self.index_size:
                specs[index_layer_name(layer)] = CacheSpec(INDEX_KEYS, self.dtype, 1)
        return specs

    def kv_identity(self, hash_seed: str) -> KVIdentity:
        # Hosts differ about these numbers if no layer has attention; the numbers then mean nothing.
        attends = len(self.state_layers) < self.num_hidden_layers
        return KVIdentity(
            model=self.architecture_digest,
            weights=self.weights_digest,
            # Scales make another format of the same element type.
            dtype=self.kv_cache_dtype if self.has_scales else self.stored_dtype,
            num_layers=self.num_layer_caches,
            num_kv_heads=self.num_kv_heads if attends else 1,
            head_dim=self.head_dim if attends else 1,
            hash_seed=hash_seed,
            version=self.weights_version,
        )


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Cache of one engine.

    enable_prefix_caching: Reuse the KV of equal prefixes
    hybrid_kv_cache: auto: layers with a sliding window have their own block tables and free the blocks before
        the window, if the connector supports groups. off: one table; windows are attention masks only
    """

    block_size: int = 16  # Tokens in a block.
    num_gpu_blocks: int = 2048  # vLLM's name. Blocks of the pool on any device.
    enable_prefix_caching: Annotated[bool, Option(section="cache")] = True
    hash_seed: str = HASH_SEED
    hybrid_kv_cache: Annotated[Literal["auto", "off"], Option(section="cache")] = "auto"

    def __post_init__(self) -> None:
        if not 1 <= self.block_size <= BLOCK_SIZE_MAX:
            raise ConfigError(f"must be in [1, {BLOCK_SIZE_MAX}]", field="cache_config.block_size")
        if self.num_gpu_blocks < 2:
            raise ConfigError("must be at least 2", field="cache_config.num_gpu_blocks")


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Scheduler of one engine.

    max_num_batched_tokens: Token budget of a step
    max_num_seqs: Largest number of running requests
    policy: fcfs or priority
    enable_chunked_prefill: Spread long prompts over steps
    """

    max_num_batched_tokens: Annotated[int, Option(section="scheduler")] = 2048
    max_num_seqs: Annotated[int, Option(section="scheduler")] = 256
    policy: Annotated[Literal["fcfs", "priority"], Option("scheduling_policy", "scheduler")] = "fcfs"
    enable_chunked_prefill: Annotated[bool, Option(section="scheduler")] = True
    long_prefill_token_threshold: int = 0  # Most tokens of one prompt in a step; 0: no limit.

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < 1:
            raise ConfigError("must be positive", field="scheduler_config.max_num_batched_tokens")
        if self.max_num_seqs < 1:
            raise ConfigError("must be positive", field="scheduler_config.max_num_seqs")


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks of one engine.

    max_concurrent_batches: Steps in flight at once; above 1 hides the scheduler's time
    on_rank_death: exit, or restart the ranks; open requests fail in both cases
    """

    tensor_parallel_size: int = 1
    executor: Literal["inprocess", "multiprocess", "ray"] = "inprocess"
    max_concurrent_batches: Annotated[int, Option(section="parallel")] = 1
    on_rank_death: Annotated[Literal["exit", "restart"], Option(section="parallel")] = "exit"
    rank: int = 0  # Rank of this process. The code that makes a rank's connector sets it.

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size

    def __post_init__(self) -> None:
        if self.tensor_parallel_size < 1:
            raise ConfigError("must be positive", field="parallel_config.tensor_parallel_size")
        if self.tensor_parallel_size > 1 and self.executor == "inprocess":
            raise ConfigError(
                "more than one rank needs executor 'multiprocess' or 'ray'", field="parallel_config.executor"
            )
        if not 1 <= self.max_concurrent_batches <= 16:
            raise ConfigError("must be in [1, 16]", field="parallel_config.max_concurrent_batches")
        if self.executor == "inprocess" and self.max_concurrent_batches > 1:
            raise ConfigError(
                "more than one needs executor 'multiprocess' or 'ray'",
                field="parallel_config.max_concurrent_batches",
            )


class DeviceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Device of the ranks.

    graph_mode: CUDA graphs of decode steps: off, auto, piecewise, full. auto: on a GPU, piecewise or full as
        the connector needs it; off on a CPU, where graphs bring no gain
    """

    device: Literal["cpu", "cuda"] = "cpu"
    num_threads: int = 1  # Torch intra-op threads of one rank (CPU).
    # Decode steps are captured once per batch size and replayed (`baton.engine.graphs`).
    graph_mode: Annotated[Literal["off", "auto", "piecewise", "full"], Option(section="parallel")] = "auto"
    graph_buckets: tuple[int, ...] = ()  # Batch sizes; empty: 1, 2, 4, ... up to max_num_seqs.

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.graph_buckets):
            raise ConfigError("must be positive", field="device_config.graph_buckets")


class ClusterSecret(msgspec.Struct, frozen=True):
    """Secret that all engines of a cluster share. It signs tickets and keys every wire. Never printed.

    During a rotation `previous` is the old secret. Baton signs with `key` and accepts both.
    """

    key: bytes
    previous: bytes | None = None
    is_generated: bool = False  # Generated for this user on this host; other hosts do not have it.

    def __post_init__(self) -> None:
        for key in self._keys():
            if len(key) < MIN_SECRET_BYTES:
                raise ConfigError(f"must have at least {MIN_SECRET_BYTES} bytes", field="secret")

    def __repr__(self) -> str:
        return "ClusterSecret(***)"

    __str__ = __repr__

    def derive(self, purpose: str) -> bytes:
        """32-byte key for one purpose, from the current secret. Each purpose has its own key."""
        return _derive(self.key, purpose)

    def derive_all(self, purpose: str) -> tuple[bytes, ...]:
        """Accepted keys for `purpose`: the current secret's, then the previous one's."""
        return tuple(_derive(key, purpose) for key in self._keys())

    def _keys(self) -> tuple[bytes, ...]:
        return (self.key,) if self.previous is None else (self.key, self.previous)


@functools.lru_cache(maxsize=64)
def _derive(key: bytes, purpose: str) -> bytes:
    return hmac.digest(_stretch(key), purpose.encode(), "sha256")


@functools.lru_cache(maxsize=16)
def _stretch(key: bytes) -> bytes:
    """Make each guess of a weak secret cost 16 MiB and tens of milliseconds. Computed once per process.

    The salt is fixed, because the secret is the only thing that the engines of a cluster share.
    """
    return hashlib.scrypt(key, salt=b"baton.secret.1", n=_SCRYPT_N, r=_SCRYPT_R, p=1, dklen=32)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Whole configuration of one engine. Crosses process boundaries as msgpack."""

    model_config: ModelConfig
    cache_config: CacheConfig = CacheConfig()
    scheduler_config: SchedulerConfig = SchedulerConfig()
    parallel_config: ParallelConfig = ParallelConfig()
    device_config: DeviceConfig = DeviceConfig()
    kv_transfer_config: KVTransferConfig | None = None
    # None: the engine does not move KV, or `insecure_no_secret` is set.
    cluster_secret: ClusterSecret | None = None
    # Move KV on the loopback without a secret, trusting every process of this host.
    insecure_no_secret: bool = False
    seed: int = 0
    step_timeout_s: float = 300.0  # Far above any real step. A longer step is a hang; the engine exits.
    kv_events_config: KVEventsConfig | None = None

    @property
    def transfer_secret(self) -> ClusterSecret | None:
        """The secret of an engine that moves KV; None with `insecure_no_secret`.

        Raises ConfigError if there is neither.
        """
        if self.cluster_secret is None and not self.insecure_no_secret:
            raise ConfigError(
                "is required by an engine that moves KV (baton.core.secret_source finds or generates one)",
                field="cluster_secret",
            )
        return self.cluster_secret

    @property
    def enable_kv_events(self) -> bool:
        return self.kv_events_config is not None and self.kv_events_config.enable_kv_cache_events

    @property
    def max_chunk(self) -> int:
        """Most tokens of one request that one step computes."""
        limits = self.scheduler_config
        chunk = min(limits.max_num_batched_tokens, self.model_config.max_model_len)
        if limits.enable_chunked_prefill and limits.long_prefill_token_threshold:
            chunk = min(chunk, limits.long_prefill_token_threshold)
        return chunk

    @property
    def kv_cache_groups(self) -> tuple[KVCacheGroup, ...]:
        model = self.model_config
        if model.state_layers:
            windows = model.windows or (None,) * model.num_hidden_layers
            if self.cache_config.hybrid_kv_cache == "off":
                windows = (None,) * model.num_hidden_layers
            return group_layers(windows, frozenset(model.state_layers))
        if self.cache_config.hybrid_kv_cache == "off" or not any(model.windows):
            return one_group(model.num_hidden_layers)
        return group_layers(model.windows)

    @property
    def num_tokens_max(self) -> int:
        """Most tokens of one request, prompt and answer together: the context, or what the whole pool holds.

        The last token of an answer needs no KV.
        """
        groups, size, chunk = self.kv_cache_groups, self.cache_config.block_size, self.max_chunk
        num_usable = self.cache_config.num_gpu_blocks - is_hybrid(groups)
        return bisect_right(
            range(self.model_config.max_model_len),
            num_usable,
            key=lambda n: sum(group.blocks_at_most(n, block_size=size, chunk=chunk) for group in groups),
        )

    def __post_init__(self) -> None:
        if not 0 < self.step_timeout_s <= 86_400:
            raise ConfigError("must be in (0, 86400] seconds", field="step_timeout_s")
        tp, heads = self.parallel_config.tensor_parallel_size, self.model_config.num_kv_heads
        if self.model_config.num_attention_heads % tp:
            raise ConfigError(
                f"must divide the model's {self.model_config.num_attention_heads} attention heads",
                field="parallel_config.tensor_parallel_size",
            )
        if heads % tp and tp % heads:
            raise ConfigError(
                f"must divide the model's {heads} KV heads or be a multiple of them",
                field="parallel_config.tensor_parallel_size",
            )
        if not self.scheduler_config.enable_chunked_prefill and (
            self.scheduler_config.max_num_batched_tokens < self.model_config.max_model_len
        ):
            raise ConfigError(
                "must be at least max_model_len when chunked prefill is off",
                field="scheduler_config.max_num_batched_tokens",
            )
