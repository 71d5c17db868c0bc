"""Configuration file of `baton route`: TOML with one table, [route], whose keys are the options' names.

    [route]
    prefill = ["http://10.0.0.7:8100"]
    decode = ["http://10.0.0.8:8200"]
    mode = "push"

Flags override the environment (BATON_ROUTE_MODE=push), which overrides the file, which overrides defaults.
"""

import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.cli.settings import MAX_CONFIG_BYTES
from baton.cli.show_config import to_toml
from baton.core.errors import ConfigError
from baton.core.limited_file import read_limited

if TYPE_CHECKING:
    import typer

TABLE = "route"
OWN_OPTIONS = ("config", "show_config", "help")  # Not keys of the table.


def read_route_config(path: Path, known: Collection[str]) -> dict[str, Any]:
    """Read the table. Raises ConfigError that names file and key."""
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


_ORIGINS = {"COMMANDLINE": "command line", "ENVIRONMENT": "environment", "DEFAULT_MAP": "file"}


def show_route_config(context: "typer.Context") -> str:
    """Return the options of `baton route` in the format of `--config`, each with its origin."""
    lines = [f"[{TABLE}]"]
    for name, value in context.params.items():
        if name not in OWN_OPTIONS and value is not None:
            source = context.get_parameter_source(name)
            origin = _ORIGINS.get(source.name, "default") if source is not None else "default"
            lines.append(f"{name} = {to_toml(value)}  # {origin}")
    return "\n".join(lines)
