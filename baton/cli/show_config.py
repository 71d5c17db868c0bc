"""`baton serve --show-config`: what holds and where it came from, as a TOML file that would say the same."""

import json
from typing import Any

import msgspec

from baton.cli.settings import SECTIONS, Resolved


def show_config(resolved: Resolved) -> str:
    """Never contains the secret."""
    lines: list[str] = []
    for section, names in SECTIONS.items():
        lines += [f"[{section}]", *(_line(name, resolved) for name in names), ""]
    found = f"*** ({resolved.secret_origin})" if resolved.secret else "none (loopback only)"
    return "\n".join([*lines, f"# cluster secret: {found}"])


def _line(name: str, resolved: Resolved) -> str:
    value = getattr(resolved.settings, name)
    if value is None:
        return f"# {name} is not set"
    return f"{name} = {_toml(value)}  # {resolved.origins.get(name, 'default')}"


def _toml(value: Any) -> str:
    if isinstance(value, msgspec.Struct):
        value = msgspec.to_builtins(value)
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items() if item is not None)
        return "{ " + ", ".join(pairs) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value if item is not None) + "]"
    # JSON's strings, numbers and booleans are TOML's too.
    return json.dumps(value, ensure_ascii=False)
