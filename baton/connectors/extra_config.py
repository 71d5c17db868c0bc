"""Reading `kv_connector_extra_config`: what is wrong with it is said with the name of its key."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from baton.core.errors import ConfigError

FIELD = "kv_transfer_config.kv_connector_extra_config"

T = TypeVar("T", bound=msgspec.Struct)


def parse_extra(kind: type[T], extra: Mapping[str, Any]) -> T:
    """`extra` as this kind of settings. Raises ConfigError naming the key, and what it may be."""
    refuse_unknown(kind, extra)
    try:
        return msgspec.convert(dict(extra), kind)
    except msgspec.ValidationError as error:
        # "Invalid enum value 'x' - at `$.eviction`"; without a path it is of a check of the settings' own.
        message, _, path = str(error).partition(" - at `$")
        key = path.rstrip("`")
        if choices := _choices(get_type_hints(kind).get(key.removeprefix("."))):
            message += f"; one of {', '.join(choices)}"
        raise ConfigError(message, field=FIELD + key) from error


def refuse_unknown(kind: type[msgspec.Struct], extra: Mapping[str, Any]) -> None:
    """Raises ConfigError naming the key, and those that there are."""
    known = kind.__struct_fields__
    for key in extra:
        if key not in known:
            raise ConfigError(f"is not known; known are {', '.join(known)}", field=f"{FIELD}.{key}")


def _choices(hint: Any) -> list[str]:
    if get_origin(hint) is Literal:
        return [str(value) for value in get_args(hint)]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return [str(member.value) for member in hint]
    return []
