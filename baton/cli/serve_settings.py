"""Settings of `baton serve` with what they name: the secret, and keys in files.

The cluster secret is no setting: it comes from BATON_SECRET, from the file that `secret_file` names, or from
a file of the user (`baton.core.secret_source`), and is never shown.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.cli.http_options import http_settings
from baton.cli.settings import Command, Values
from baton.core.config import CacheConfig, ClusterSecret, DeviceConfig, ParallelConfig, SchedulerConfig
from baton.core.errors import ConfigError
from baton.core.secret_source import PREVIOUS_SECRET_ENV, SECRET_ENV, find_secret
from baton.http.gate import is_loopback
from baton.http.options import ADMIN_API_KEY_ENV, API_KEY_ENV, ENGINE_API_KEY_ENV, REGISTER_KEY_ENV
from baton.http.settings import HttpSettings
from baton.server.settings import ServeSettings

COMMAND = Command(
    "serve",
    ServeSettings,
    CacheConfig,
    SchedulerConfig,
    ParallelConfig,
    DeviceConfig,
    prefix="BATON_",
    others=(
        SECRET_ENV,
        PREVIOUS_SECRET_ENV,
        API_KEY_ENV,
        ADMIN_API_KEY_ENV,
        ENGINE_API_KEY_ENV,
        REGISTER_KEY_ENV,
    ),
    other_prefixes=("BATON_ROUTE_", "BATON_BENCH_"),  # Other commands, in a shared environment.
)


@dataclass(frozen=True, slots=True)
class Resolved:
    """Settings with what they name: secret, keys and their files."""

    settings: ServeSettings
    values: Values
    secret: ClusterSecret | None
    secret_origin: str | None
    secret_warning: str | None
    http: HttpSettings
    register_key: str | None  # Key that routers ask for.

    def shown(self) -> str:
        """Return the settings as TOML. Never contains the secret."""
        found = f"*** ({self.secret_origin})" if self.secret else "none"
        return f"{self.values.shown(self.settings.unset)}\n\n# cluster secret: {found}"


def resolve(
    given: Mapping[str, Any], *, environment: Mapping[str, str], config_file: str | None = None
) -> Resolved:
    """Read all settings, and the files that they name. `given`: the options on the command line.

    Raises ConfigError naming setting and origin.
    """
    return read_named(COMMAND.resolve(given, environment=environment, config_file=config_file))


def read_named(values: Values) -> Resolved:
    """Read the files that the settings name. Raises ConfigError."""
    settings = values.make(ServeSettings)
    found = find_secret(
        values.environment,
        file=settings.secret_file,
        field="secret_file",
        # BATON_SECRET ranks with the environment: below --secret-file, above the configuration file.
        is_file_first=values.origins.get("secret_file", "").startswith("command line"),
        moves_kv=settings.moves_kv,
        is_insecure=settings.insecure_no_secret,
    )
    has_shared_secret = found.secret is not None and not found.secret.is_generated
    if settings.moves_kv and not has_shared_secret and not is_loopback(settings.host):
        raise ConfigError(
            f"{settings.host} is not a loopback address, and this engine moves KV without a secret that "
            f"other hosts can have; set {SECRET_ENV} (or --secret-file) to the same value on all engines, "
            "or bind to 127.0.0.1",
            field="host",
        )
    http = http_settings(values)
    has_keys = bool(http.api_keys or http.admin_keys)
    if settings.weights_root is not None and not has_keys and not is_loopback(settings.host):
        raise ConfigError(
            f"{settings.host} is not a loopback address, and without a key (--admin-api-key-file, "
            f"{ADMIN_API_KEY_ENV}) any client could update the weights; set one, or bind to 127.0.0.1",
            field="weights_root",
        )
    # One key for a whole fleet is the usual case.
    keys = (*values.keys("register_key_file"), *http.admin_keys, *http.api_keys)
    return Resolved(settings, values, *found, http, next(iter(keys), None))
