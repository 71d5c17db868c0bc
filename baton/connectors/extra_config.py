"""Parsing of `kv_connector_extra_config` into typed settings, with errors that name the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from baton.core.errors import ConfigError
from baton.core.validation import explain

FIELD = "kv_transfer_config.kv_connector_extra_config"

T = TypeVar("T", bound=msgspec.Struct)

NIXL = {
    "backends": 'name transports: ["nixl"]; its backend is UCX',
    "num_threads": "each transport has the threads that it needs",
    "kv_lease_duration": "it is timers.ttl_s",
    "engine_ttl": "an idle peer is forgotten after 600 s",
    "enforce_handshake_compat": "engines that differ are always refused, with the fields that differ",
    "kv_recompute_threshold": "it is baton route --min-prefill-tokens",
    "bidirectional_kv_xfer": "it is turns",
    "decoder_kv_blocks_ttl": "it is turns.ttl_s",
    "push_registration_timeout": "it is timers.hold_s",
}
"""Options of vLLM 0.32's NIXL connectors (`kv_connector/v1/nixl`), and their equivalents here."""


def parse_extra(kind: type[T], extra: Mapping[str, Any]) -> T:
    """Converts `extra` to settings of this kind. Raises ConfigError naming the key and the allowed values."""
    refuse_unknown(kind, extra)
    try:
        return msgspec.convert(dict(extra), kind)
    except msgspec.ValidationError as error:
        problem, path = explain(error, kind)
        raise ConfigError(problem, field=FIELD + path) from error


def check_positive(settings: msgspec.Struct, *names: str) -> None:
    """Raises ConfigError for a field that is neither None nor above 0."""
    for name in names:
        if (value := getattr(settings, name)) is not None and not value > 0:
            raise ConfigError("must be positive", field=f"{FIELD}.{name}")


def check_at_least_one(settings: msgspec.Struct, *names: str) -> None:
    """Raises ConfigError for a field that is neither None nor at least 1."""
    for name in names:
        if (value := getattr(settings, name)) is not None and value < 1:
            raise ConfigError("must be at least 1", field=f"{FIELD}.{name}")


def check_share(settings: msgspec.Struct, name: str) -> None:
    """Raises ConfigError for a field that is neither None nor a share."""
    share = getattr(settings, name)
    if share is not None and not 0 < share <= 1:
        raise ConfigError("must be above 0 and at most 1", field=f"{FIELD}.{name}")


def refuse_unknown(kind: type[msgspec.Struct], extra: Mapping[str, Any]) -> None:
    """Raises ConfigError naming the key, the equivalent of an option of NIXL's, and the known keys."""
    known = kind.__struct_fields__
    for key in extra:
        if key not in known:
            hint = f" (an option of vLLM's NixlConnector; here {NIXL[key]})" if key in NIXL else ""
            raise ConfigError(f"is not known{hint}; known are {', '.join(known)}", field=f"{FIELD}.{key}")
