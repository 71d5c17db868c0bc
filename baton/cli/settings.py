"""Settings of `baton serve`: command line over environment over one TOML file over defaults.

They are typed and checked, and each keeps its origin for `--show-config`.

    command line   --block-size 32
    environment    BATON_BLOCK_SIZE=32
    file           [cache]
                   block_size = 32

The cluster secret is no setting: it comes from BATON_SECRET, from the file that `secret_file` names, or from
a file of the user (`baton.core.secret_source`), and is never shown. Only this package reads the environment.
"""

import difflib
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from baton.cli.http_options import (
    ADMIN_API_KEY_ENV,
    API_KEY_ENV,
    ENGINE_API_KEY_ENV,
    REGISTER_KEY_ENV,
    read_api_keys,
)
from baton.core.config import ClusterSecret, KVCacheDtype, KVEventsConfig, KVTransferConfig
from baton.core.errors import ConfigError, UserError
from baton.core.limited_file import read_limited
from baton.core.secret_source import PREVIOUS_SECRET_ENV, SECRET_ENV, find_secret
from baton.core.timers import Timers
from baton.core.validation import explain
from baton.http.auth import KeyFiles
from baton.http.gate import is_loopback
from baton.http.registration import TTL_S, Registration, Role, register_places
from baton.http.settings import HttpLimits, HttpSettings
from baton.http.tls import TlsFiles

ENV_PREFIX = "BATON_"
CONFIG_ENV = "BATON_CONFIG"
OTHER_VARIABLES = frozenset(
    {
        SECRET_ENV,
        PREVIOUS_SECRET_ENV,
        CONFIG_ENV,
        API_KEY_ENV,
        ADMIN_API_KEY_ENV,
        ENGINE_API_KEY_ENV,
        REGISTER_KEY_ENV,
    }
)
OTHER_PREFIXES = ("BATON_ROUTE_", "BATON_BENCH_")  # Variables of other commands in a shared environment.
MAX_CONFIG_BYTES = 1 << 20
DEFAULT_HTTP = HttpSettings()
DRAIN_S = Timers().ttl_s  # Every loan is released or has expired after one lease.

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Policy = Literal["fcfs", "priority"]
Device = Literal["auto", "cpu", "cuda"]
Executor = Literal["inprocess", "multiprocess", "ray"]
OnRankDeath = Literal["exit", "restart"]
GraphMode = Literal["off", "auto", "piecewise", "full"]
HybridCache = Literal["auto", "off"]
LogLevel = Literal["debug", "info", "warning", "error"]


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of `baton serve`. Raises ConfigError that names the field."""

    model: str | None = None
    served_model_name: str | None = None
    dtype: Dtype = "auto"
    max_model_len: int | None = None
    seed: int = 0
    weights_version: str | None = None
    weights_root: str | None = None  # Folder of the checkpoints that updates may name; None: no updates.

    host: str = "127.0.0.1"
    port: int = 8000
    log_level: LogLevel = "info"
    otlp_traces_endpoint: str | None = None  # Where spans go. None: OpenTelemetry's variables decide.
    admin_port: int | None = None  # Port for metrics and /baton/*; None: the main port.
    api_key_file: str | None = None
    admin_api_key_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    allowed_hosts: str = ""
    limits: HttpLimits = HttpLimits()
    shutdown_timeout_s: float = 5.0  # Time for running requests after a stop signal.
    drain_timeout_s: float | None = None  # Time for the drain before. None: DRAIN_S for a producer, else 0.

    register: str | None = None  # URLs of routers, or of a Redis or Valkey, with commas.
    register_url: str | None = None  # URL of this engine, as routers reach it. None: where it listens.
    register_role: str | None = None  # None: the role of kv_role; kv_both needs one.
    register_weight: float = 1.0
    register_ttl_s: float = TTL_S
    register_key_file: str | None = None
    register_ca: str | None = None  # PEM file of the authorities of https routers; None: the system's.

    step_timeout_s: float = 300.0  # Limit of a step; an engine without progress for so long is ended.

    block_size: int | None = None  # None: `default_block_size`.
    num_blocks: int | None = None
    kv_cache_memory: str | None = None  # "512MiB", of one rank; instead of num_blocks.
    enable_prefix_caching: bool = True
    hybrid_kv_cache: HybridCache = "auto"
    kv_cache_dtype: KVCacheDtype = "auto"

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    scheduling_policy: Policy = "fcfs"
    enable_chunked_prefill: bool = True

    tensor_parallel_size: int = 1
    executor: Executor | None = None  # None: as few processes as the ranks allow.
    max_concurrent_batches: int = 1
    on_rank_death: OnRankDeath = "exit"
    device: Device = "auto"
    graph_mode: GraphMode = "auto"  # Decode steps replayed from graphs.
    threads: int = 1  # Torch threads of one rank on CPU.

    kv_transfer_config: KVTransferConfig | None = None
    kv_events_config: KVEventsConfig | None = None
    secret_file: str | None = None
    insecure_no_secret: bool = False  # Move KV on this host without a secret.

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError("must be in [0, 65535]; 0 selects a free one", field="port")
        if self.admin_port is not None and not 0 <= self.admin_port <= 65535:
            raise ConfigError("must be in [0, 65535]; 0 selects a free one", field="admin_port")
        for name in ("max_model_len", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError("must be positive", field=name)
        if not 0 <= self.shutdown_timeout_s <= 3600:
            raise ConfigError("must be in [0, 3600]", field="shutdown_timeout_s")
        if not 0 < self.step_timeout_s <= 86_400:
            raise ConfigError("must be in (0, 86400]", field="step_timeout_s")
        if self.drain_timeout_s is not None and not 0 <= self.drain_timeout_s <= 3600:
            raise ConfigError("must be in [0, 3600]", field="drain_timeout_s")
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
    def tls(self) -> TlsFiles | None:
        """Raises ConfigError."""
        return TlsFiles.of(self.tls_cert, self.tls_key, self.tls_client_ca)

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


SECTIONS: dict[str, tuple[str, ...]] = {
    "model": (
        "model",
        "served_model_name",
        "dtype",
        "max_model_len",
        "seed",
        "weights_version",
        "weights_root",
    ),
    "server": (
        "host",
        "port",
        "admin_port",
        "api_key_file",
        "admin_api_key_file",
        "tls_cert",
        "tls_key",
        "tls_client_ca",
        "allowed_hosts",
        "limits",
        "log_level",
        "otlp_traces_endpoint",
        "shutdown_timeout_s",
        "drain_timeout_s",
        "step_timeout_s",
        "register",
        "register_url",
        "register_role",
        "register_weight",
        "register_ttl_s",
        "register_key_file",
        "register_ca",
    ),
    "cache": (
        "block_size",
        "num_blocks",
        "kv_cache_memory",
        "enable_prefix_caching",
        "hybrid_kv_cache",
        "kv_cache_dtype",
    ),
    "scheduler": ("max_num_batched_tokens", "max_num_seqs", "scheduling_policy", "enable_chunked_prefill"),
    "parallel": (
        "tensor_parallel_size",
        "executor",
        "max_concurrent_batches",
        "on_rank_death",
        "device",
        "graph_mode",
        "threads",
    ),
    "cluster": ("kv_transfer_config", "kv_events_config", "secret_file", "insecure_no_secret"),
}
"""Sections of the TOML file and of the output of `--show-config`."""


_FROM_JSON: dict[str, Callable[[str], Any]] = {
    "kv_transfer_config": KVTransferConfig.from_json,
    "kv_events_config": KVEventsConfig.from_json,
    "limits": HttpLimits.from_json,
}


@dataclass(frozen=True, slots=True)
class Resolved:
    """Settings with the origin of each value."""

    settings: ServeSettings
    origins: Mapping[str, str]  # Origins by setting; settings with defaults are absent.
    secret: ClusterSecret | None
    secret_origin: str | None
    secret_warning: str | None
    http: HttpSettings = DEFAULT_HTTP
    register_key: str | None = None  # Key that routers ask for.


def resolve(
    given: Mapping[str, Any], *, environment: Mapping[str, str], config_file: str | None = None
) -> Resolved:
    """Merge all origins. `given`: the flags on the command line. Raises ConfigError naming setting and
    origin.
    """
    file = config_file or environment.get(CONFIG_ENV) or None
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    layers: list[tuple[dict[str, Any], Callable[[str], str]]] = [
        (_from_environment(environment), lambda name: f"environment {ENV_PREFIX}{name.upper()}"),
        (dict(given), lambda name: f"command line --{name.replace('_', '-')}"),
    ]
    if file:
        layers.insert(0, (_from_file(Path(file)), lambda name: f"file {file}"))
    for layer, origin in layers:
        values.update(layer)
        origins.update({name: origin(name) for name in layer})
    _refuse_unknown_variables(environment)
    settings = _typed(values, origins)
    found = find_secret(
        environment,
        file=settings.secret_file,
        field="secret_file",
        # BATON_SECRET ranks with the environment: below --secret-file, above the configuration file.
        is_file_first=origins.get("secret_file", "").startswith("command line"),
        moves_kv=settings.moves_kv,
        is_insecure=settings.insecure_no_secret,
    )
    _check_exposure(settings, found.secret)
    keys = read_api_keys(settings.api_key_file, environment, variable=API_KEY_ENV, field="api_key_file")
    admin_keys = read_api_keys(
        settings.admin_api_key_file, environment, variable=ADMIN_API_KEY_ENV, field="admin_api_key_file"
    )
    http = HttpSettings.of(
        settings.limits,
        api_keys=keys,
        allowed_hosts=settings.allowed_hosts,
        admin_keys=admin_keys,
        key_files=KeyFiles(api_keys=settings.api_key_file, admin_keys=settings.admin_api_key_file),
    )
    if settings.weights_root is not None and not (keys or admin_keys or is_loopback(settings.host)):
        raise ConfigError(
            f"{settings.host} is not a loopback address, and without a key (--admin-api-key-file, "
            f"{ADMIN_API_KEY_ENV}) any client could update the weights; set one, or bind to 127.0.0.1",
            field="weights_root",
        )
    register_keys = read_api_keys(
        settings.register_key_file, environment, variable=REGISTER_KEY_ENV, field="register_key_file"
    )
    # One key for a whole fleet is the usual case.
    register_key = next(iter((*register_keys, *admin_keys, *keys)), None)
    return Resolved(settings, origins, *found, http, register_key)


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    named = {name: environment.get(ENV_PREFIX + name.upper(), "") for name in ServeSettings.__struct_fields__}
    return {name: value for name, value in named.items() if value != ""}


def _refuse_unknown_variables(environment: Mapping[str, str]) -> None:
    """Raise ConfigError for a misspelt variable, which would silently leave a default in force."""
    settings = {ENV_PREFIX + name.upper() for name in ServeSettings.__struct_fields__}
    for name in environment:
        if (
            name.startswith(ENV_PREFIX)
            and name not in settings | OTHER_VARIABLES
            and not name.startswith(OTHER_PREFIXES)
        ):
            close = difflib.get_close_matches(name, sorted(settings | OTHER_VARIABLES), n=1, cutoff=0.8)
            advice = f"; did you mean {close[0]}?" if close else "; unset it"
            raise ConfigError(f"is set in the environment but is not a setting{advice}", field=name)


def read_toml(path: Path) -> dict[str, Any]:
    """Read a configuration file. Raises ConfigError."""
    text = read_limited(path, MAX_CONFIG_BYTES, field="config")
    try:
        return tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", field="config") from error


def _from_file(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for section, content in read_toml(path).items():
        if section not in SECTIONS or not isinstance(content, dict):
            known = ", ".join(f"[{name}]" for name in SECTIONS)
            raise ConfigError(f"unknown in {path}; the sections are {known}", field=section)
        for name, value in content.items():
            if name not in SECTIONS[section]:
                known = ", ".join(SECTIONS[section])
                raise ConfigError(f"unknown in {path}; [{section}] has {known}", field=f"{section}.{name}")
            values[name] = value
    return values


def _typed(values: Mapping[str, Any], origins: Mapping[str, str]) -> ServeSettings:
    """Convert each value by itself first, so that an error names the setting and its origin."""
    typed: dict[str, Any] = {}
    kinds = {field.name: field.type for field in msgspec.structs.fields(ServeSettings)}
    for name, value in values.items():
        try:
            if name in _FROM_JSON and isinstance(value, str):
                typed[name] = _FROM_JSON[name](value)
            else:
                # Not strict: environment values are text, so "16" is a number and "true" a flag.
                typed[name] = msgspec.convert(value, kinds[name], strict=False)
        except ConfigError as error:
            raise ConfigError(f"{error} ({origins[name]})") from error
        except msgspec.ValidationError as error:
            problem, path = explain(error, kinds[name])
            raise ConfigError(f"{problem} ({origins[name]})", field=name + path) from error
    try:
        return ServeSettings(**typed)
    except ConfigError as error:
        origin = origins.get(error.field or "", "default")
        raise ConfigError(f"{error} ({origin})") from error


def _check_exposure(settings: ServeSettings, secret: ClusterSecret | None) -> None:
    """Refuse to bind beyond loopback if KV moves and other hosts cannot have the secret."""
    if settings.moves_kv and (secret is None or secret.is_generated) and not is_loopback(settings.host):
        raise ConfigError(
            f"{settings.host} is not a loopback address, and this engine moves KV without a secret that "
            f"other hosts can have; set {SECRET_ENV} (or --secret-file) to the same value on all engines, "
            "or bind to 127.0.0.1",
            field="host",
        )


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
