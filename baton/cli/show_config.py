"""`baton serve --show-config`: prints all settings with their origins, as a TOML file with the same
effect.
"""

import json
from typing import Any

import msgspec

from baton.cli.settings import SECTIONS, Resolved, ServeSettings
from baton.core.config import CacheConfig


def show_config(resolved: Resolved) -> str:
    """Return the settings as TOML. Never contains the secret."""
    lines: list[str] = []
    for section, names in SECTIONS.items():
        lines += [f"[{section}]", *(_line(name, resolved) for name in names), ""]
    found = f"*** ({resolved.secret_origin})" if resolved.secret else "none"
    return "\n".join([*lines, f"# cluster secret: {found}"])


def _line(name: str, resolved: Resolved) -> str:
    value = getattr(resolved.settings, name)
    if value is None:
        return f"# {name}: {_unset(name, resolved.settings)}"
    return f"{name} = {to_toml(value)}  # {resolved.origins.get(name, 'default')}"


def _unset(name: str, settings: ServeSettings) -> str:
    """Describe the value that applies to an unset setting."""
    match name:
        case "block_size":
            return f"{CacheConfig().block_size}; with recurrent states as many tokens as have their size"
        case "num_blocks" if settings.kv_cache_memory is None:
            return f"{CacheConfig().num_gpu_blocks} (default)"
        case "num_blocks":
            return "as many as kv_cache_memory holds"
        case "drain_timeout_s":
            return f"{settings.drains_for_s:g} (default of this role)"
        case "executor":
            return f"{settings.ranks_executor} (default for {settings.tensor_parallel_size} ranks)"
        case "served_model_name":
            return "the name of the model's folder"
        case "max_model_len":
            return "the value in the model's config.json, or what the KV cache holds"
        case _:
            return "not set"


def to_toml(value: Any) -> str:
    """Return a value as TOML, without keys that have no value."""
    if isinstance(value, msgspec.Struct):
        value = msgspec.to_builtins(value)
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key)} = {to_toml(item)}" for key, item in value.items() if item is not None)
        return "{ " + ", ".join(pairs) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(to_toml(item) for item in value if item is not None) + "]"
    # JSON's strings, numbers and booleans are TOML's too.
    return json.dumps(value, ensure_ascii=False)
