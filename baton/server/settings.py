"""Settings of `baton serve`, whose fields declare its options."""

import re
from functools import partial
from typing import Annotated, Literal
from urllib.parse import urlsplit

from baton.core.config import CacheConfig, KVCacheDtype, KVEventsConfig, KVTransferConfig
from baton.core.errors import ConfigError, UserError
from baton.core.option import Option
from baton.core.timers import Timers
from baton.http.options import REGISTER_KEY_ENV, SERVER, HttpOptions
from baton.http.registration import TTL_S, Registration, Role, register_places

DRAIN_S = Timers().ttl_s  # Every loan is released or has expired after one lease.
MODEL, CACHE, PARALLEL, CLUSTER = (
    partial(Option, section=section) for section in ("model", "cache", "parallel", "cluster")
)

Executor = Literal["inprocess", "multiprocess", "ray"]


class ServeSettings(HttpOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `baton serve` that EngineConfig has not. Raises ConfigError that names the field.

    model: Folder of the checkpoint.
    served_model_name: Model name in the API (default: the folder's name).
    dtype: auto, float32, bfloat16 or float16
    max_model_len: Limit for prompt plus answer, in tokens (default: the model's, or what the KV cache holds).
    seed: Seed of requests that have none
    weights_version: Name of the weights, part of their identity in the fleet: for an engine that joins one
        whose weights were updated under this name.
    weights_root: Folder below which POST /update_weights may name checkpoints (default: none; it is refused).
    shutdown_timeout_s: Time for running requests after a stop signal
    drain_timeout_s: Time to drain before that: new requests get 503, running ones finish, lent KV is returned
        (default 30 for producers, else 0).
    step_timeout_s: Time limit of a step: an engine without progress for so long is ended
    register: Routers at which this engine registers, such as http://10.0.0.1:8000, or a registry that they
        read, such as redis://10.0.0.2:6379/0; several with commas.
    register_url: URL of this engine for routers (default: where it listens).
    register_role: prefill, decode or both (default: as kv_role).
    register_weight: Share of requests, at most 1, which the others have
    register_ttl_s: Time after which a router drains this engine if it does not hear from it
    register_key_file: File with the administrator's key of the routers; or set BATON_REGISTER_KEY (default:
        the first of this engine's administrator's keys, or of its keys).
    register_ca: PEM file with the authorities of https routers (default: the system's).
    block_size: Tokens in a block (default: 16; with recurrent states as many as have their size).
    num_blocks: Blocks of the cache (default 2048).
    kv_cache_memory: Size of the cache on each rank, such as 512MiB, instead of --num-blocks.
    kv_cache_dtype: auto (that of the model), fp8, fp8_e4m3, fp8_e5m2 or int8_per_token_head
    tensor_parallel_size: Ranks that share the model
    executor: Executor of the ranks: inprocess, multiprocess or ray (default: multiprocess for several).
    device: auto, cpu or cuda
    threads: Compute threads of one rank on CPU
    kv_transfer_config: KV connector, in vLLM's JSON.
    kv_events_config: Publication of KV events, in vLLM's JSON.
    secret_file: File with the cluster secret; or set BATON_SECRET.
    insecure_no_secret: Transfer KV without a secret: trusts every process of this host. For tests.
    """

    model: Annotated[str | None, MODEL(metavar="MODEL", is_argument=True)] = None
    served_model_name: Annotated[str | None, MODEL()] = None
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], MODEL()] = "auto"
    max_model_len: Annotated[int | None, MODEL()] = None
    seed: Annotated[int, MODEL()] = 0
    weights_version: Annotated[str | None, MODEL(metavar="NAME")] = None
    weights_root: Annotated[str | None, MODEL(metavar="FOLDER")] = None

    shutdown_timeout_s: Annotated[float, SERVER()] = 5.0
    drain_timeout_s: Annotated[float | None, SERVER()] = None
    step_timeout_s: Annotated[float, SERVER()] = 300.0
    register: Annotated[str | None, SERVER(metavar="URLS")] = None
    register_url: Annotated[str | None, SERVER(metavar="URL")] = None
    register_role: Annotated[str | None, SERVER()] = None
    register_weight: Annotated[float, SERVER()] = 1.0
    register_ttl_s: Annotated[float, SERVER()] = TTL_S
    register_key_file: Annotated[str | None, SERVER(content=REGISTER_KEY_ENV)] = None
    register_ca: Annotated[str | None, SERVER()] = None

    block_size: Annotated[int | None, CACHE()] = None
    num_blocks: Annotated[int | None, CACHE()] = None
    kv_cache_memory: Annotated[str | None, CACHE()] = None
    kv_cache_dtype: Annotated[KVCacheDtype, CACHE()] = "auto"

    tensor_parallel_size: Annotated[int, PARALLEL(short="-tp")] = 1
    executor: Annotated[Executor | None, PARALLEL()] = None
    device: Annotated[Literal["auto", "cpu", "cuda"], PARALLEL()] = "auto"
    threads: Annotated[int, PARALLEL()] = 1

    kv_transfer_config: Annotated[KVTransferConfig | None, CLUSTER()] = None
    kv_events_config: Annotated[KVEventsConfig | None, CLUSTER()] = None
    secret_file: Annotated[str | None, CLUSTER()] = None
    insecure_no_secret: Annotated[bool, CLUSTER()] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_model_len", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError("must be positive", field=name)
        for name in ("shutdown_timeout_s", "drain_timeout_s"):
            if not 0 <= (getattr(self, name) or 0) <= 3600:
                raise ConfigError("must be in [0, 3600]", field=name)
        if not 0 < self.step_timeout_s <= 86_400:
            raise ConfigError("must be in (0, 86400]", field="step_timeout_s")
        if self.num_blocks is not None and self.kv_cache_memory is not None:
            raise ConfigError(
                "cannot be combined with num_blocks: both set the size of the cache", field="kv_cache_memory"
            )
        if self.kv_cache_memory is not None:
            parse_bytes(self.kv_cache_memory, field="kv_cache_memory")
        scheme = "http" if self.tls is None else "https"
        if self.register is not None:
            register_places(self.register)
            for one in self.registrations(f"{scheme}://{self.host}:{self.port}"):
                try:
                    one.check()
                except UserError as error:
                    raise ConfigError(error.problem, field=f"register_{error.field}") from error
                if urlsplit(one.instance).hostname in ("0.0.0.0", "::", None):
                    raise ConfigError(
                        f"{one.instance} is no URL that routers can reach; name one", field="register_url"
                    )

    def registrations(self, url: str, model: str | None = None) -> tuple[Registration, ...]:
        """One for each role. `url`: where this engine listens. Raises UserError."""
        roles: tuple[Role, ...]
        kv_role = None if self.kv_transfer_config is None else self.kv_transfer_config.kv_role
        wanted = self.register_role or {"kv_producer": "prefill", "kv_consumer": "decode"}.get(kv_role or "")
        match wanted:
            case "prefill" | "decode":
                roles = (wanted,)
            case "both":
                roles = ("prefill", "decode")
            case _:
                raise ConfigError("must be prefill, decode or both", field="register_role")
        return tuple(
            Registration(
                self.register_url or url,
                role,
                model,
                weight=self.register_weight,
                ttl_s=self.register_ttl_s,
            )
            for role in roles
        )

    @property
    def drains_for_s(self) -> float:
        """Return how long a drain may take until requests and loans have ended, in seconds."""
        if self.drain_timeout_s is not None:
            return self.drain_timeout_s
        transfer = self.kv_transfer_config
        return DRAIN_S if transfer is not None and transfer.is_kv_producer else 0.0

    @property
    def ranks_executor(self) -> Executor:
        return self.executor or ("multiprocess" if self.tensor_parallel_size > 1 else "inprocess")

    @property
    def moves_kv(self) -> bool:
        return self.kv_transfer_config is not None and self.kv_transfer_config.is_kv_transfer_instance

    def unset(self, name: str) -> str | None:
        """Describe the value that applies to a setting without one. None: its help does."""
        match name:
            case "num_blocks" if self.kv_cache_memory is None:
                return f"{CacheConfig().num_gpu_blocks} (default)"
            case "num_blocks":
                return "as many as kv_cache_memory holds"
            case "drain_timeout_s":
                return f"{self.drains_for_s:g} (default of this role)"
            case "executor":
                return f"{self.ranks_executor} (default for {self.tensor_parallel_size} ranks)"
            case _:
                return None


_SIZE = re.compile(r"(?P<count>\d+(?:\.\d+)?)\s*(?P<unit>[kmgt]i?b?|b)?", re.IGNORECASE | re.ASCII)


def parse_bytes(text: str, *, field: str) -> int:
    """Parse a size such as "512MiB", "1.5 GiB", "2GB" or "1000000". KiB is 1024 bytes, kB 1000."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"must be a size such as 512MiB or 2GB, is {text!r}", field=field)
    unit = (found["unit"] or "b").lower()
    base = 1024 if "i" in unit else 1000
    exponent = "bkmgt".index(unit[0])
    return int(float(found["count"]) * base**exponent)
