"""Reading `kv_connector_extra_config`: what is wrong with it is said with the name of its key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from baton.core.errors import ConfigError
from baton.core.validation import explain

FIELD = "kv_transfer_config.kv_connector_extra_config"

T = TypeVar("T", bound=msgspec.Struct)


def parse_extra(kind: type[T], extra: Mapping[str, Any]) -> T:
    """`extra` as this kind of settings. Raises ConfigError naming the key, and what it may be."""
    refuse_unknown(kind, extra)
    try:
        return msgspec.convert(dict(extra), kind)
    except msgspec.ValidationError as error:
        problem, path = explain(error, kind)
        raise ConfigError(problem, field=FIELD + path) from error


def refuse_unknown(kind: type[msgspec.Struct], extra: Mapping[str, Any]) -> None:
    """Raises ConfigError naming the key, and those that there are."""
    known = kind.__struct_fields__
    for key in extra:
        if key not in known:
            raise ConfigError(f"is not known; known are {', '.join(known)}", field=f"{FIELD}.{key}")
