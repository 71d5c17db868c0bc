"""`baton route --config FILE`: a TOML file with one table, [route], whose keys are the options' names.

    [route]
    prefill = ["http://10.0.0.7:8100"]
    decode = ["http://10.0.0.8:8200"]
    mode = "push"

Flags go over the environment (BATON_ROUTE_MODE=push), the environment over the file, the file over defaults.
"""

import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from baton.cli.settings import MAX_CONFIG_BYTES
from baton.core.errors import ConfigError
from baton.core.limited_file import read_limited

TABLE = "route"


def read_route_config(path: Path, known: Collection[str]) -> dict[str, Any]:
    """Raises ConfigError naming file and key."""
    text = read_limited(path, MAX_CONFIG_BYTES, field="config")
    try:
        document = tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", field="config") from error
    values = document.pop(TABLE, None)
    if document or not isinstance(values, dict):
        raise ConfigError(f"{path} must have one table, [{TABLE}]", field="config")
    for name in values:
        if name not in known:
            raise ConfigError(
                f"unknown in {path}; [{TABLE}] has {', '.join(sorted(known))}", field=f"{TABLE}.{name}"
            )
    return values
