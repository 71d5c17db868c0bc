"""Readers for fields of a checkpoint's config.json.

A missing or wrong field raises UserError with its name.
"""

from collections.abc import Mapping
from typing import Any

from baton.core.errors import UserError


def config_error(message: str, key: str) -> UserError:
    return UserError(message, field=f"config.json: {key}")


MAX_INTEGER = 1 << 24  # Far above all dimensions of current models; a product of four fits into 128 bits.
MAX_NUMBER = 1e12  # Above every theta and factor; products stay finite.


def positive(
    config: Mapping[str, Any],
    key: str,
    *,
    default: int | None = None,
    minimum: int = 1,
    maximum: int = MAX_INTEGER,
) -> int:
    """An integer in [minimum, maximum]. Raises UserError for other values, or without value and default."""
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise config_error("is missing", key)
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise config_error(f"must be an integer of at least {minimum}, is {value!r}", key)
    if value > maximum:
        raise config_error(f"must be at most {maximum}, is {value}", key)
    return value


def number(
    config: Mapping[str, Any], key: str, default: float | None = None, *, prefix: str | None = None
) -> float:
    """A number above 0, called `prefix.key` in errors. Raises UserError as `positive` does."""
    field = f"{prefix}.{key}" if prefix else key
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise config_error("is missing", field)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= MAX_NUMBER:
        raise config_error(f"must be in (0, {MAX_NUMBER:g}], is {value!r}", field)
    return float(value)


def flag(config: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    """A boolean. Raises UserError for other values."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise config_error(f"must be true or false, is {value!r}", key)
    return value
