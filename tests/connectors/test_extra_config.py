"""Errors in `kv_connector_extra_config` name the key and the allowed values."""

from pathlib import Path
from typing import Any

import pytest

from baton.connectors.extra_config import NIXL, parse_extra
from baton.connectors.pull import EngineIdentity, PullSettings
from baton.connectors.push import PushSettings
from baton.connectors.storage.memory.settings import OffloadSettings
from baton.connectors.storage.stores.settings import StorageSettings
from baton.core.errors import ConfigError
from tests.connectors.pull_world import engine_config

BAD: dict[type[Any], list[tuple[dict[str, Any], str]]] = {
    OffloadSettings: [
        ({}, r"\.cpu_gib: is required"),
        ({"cpu_gib": 0}, r"cpu_gib: must be positive"),
        ({"cpu_gib": "1"}, r"\.cpu_gib: Expected `float`, got `str`$"),
        (
            {"cpu_gib": 1, "eviction": "slru"},
            r"\.eviction: Invalid enum value 'slru'; one of arc, learned, lru$",
        ),
        ({"cpu_gib": 1, "prompt_only": "yes"}, r"prompt_only"),
        ({"cpu_gib": 1, "blocks_per_chunk": 0}, r"blocks_per_chunk: must be at least 1"),
        ({"cpu_gb": 1}, r"\.cpu_gb: is not known; known are cpu_gib, eviction, "),
        ({"cpu_gib": 1, "shutdown_timeout_s": 0}, r"shutdown_timeout_s: must be positive"),
    ],
    StorageSettings: [
        ({}, r"path: is required, or tiers instead of it$"),
        ({"path": "relative"}, r"path: must be an absolute path"),
        ({"path": "/x", "max_gb": 3}, r"max_gb: is not known; known are .*max_gib"),
        ({"path": "/x", "max_gib": 0}, r"max_gib: must be positive"),
        ({"path": "/x", "io_threads": 0}, r"io_threads: must be at least 1"),
        ({"path": "/x", "max_age_s": "old"}, r"kv_connector_extra_config\.max_age_s: Expected"),
        (
            {"kv_lease_duration": 60},
            r"\.kv_lease_duration: is not known \(an option of vLLM's NixlConnector; here it is timers",
        ),
    ],
    PullSettings: [
        ({"hsot": "x"}, r"kv_connector_extra_config\.hsot: is not known; known are host"),
        ({"port": "x"}, r"kv_connector_extra_config\.port: Expected"),
        ({"port": 70000}, r"kv_connector_extra_config\.port"),
        ({"checksum": False}, r"checksum: is now integrity: mac"),
        ({"integrity": "none"}, r"integrity: Invalid enum value 'none'"),
        ({"data_port": -1}, r"kv_connector_extra_config\.data_port"),
        ({"data_advertise_port": 70000}, r"kv_connector_extra_config\.data_advertise_port"),
        ({"timers": {"ttl": 3}}, r"unknown field `ttl`"),
        ({"timers": {"ttl_s": 1}}, r"timers\.ttl_s: must be longer"),
        ({"transports": []}, r"transports: must name at least one"),
        ({"host": "10.0.0.1"}, r"BATON_SECRET"),
        ({"host": "0.0.0.0"}, r"advertise_host"),
    ],
    PushSettings: [
        ({"allowed_peers": [peer]}, "allowed_peers")
        for peer in ("p", "p:", ":1", "p:0", "p:65536", "tcp://p:1", "::1:5", "p:1/", "p q:1")
    ],
    EngineIdentity: [
        ({"turns": {"ttl_s": 0}}, "ttl_s"),
        ({"turns": {"min_tokens": 0}}, "min_tokens"),
        ({"turns": {"pool_share_max": 1.5}}, "pool_share_max"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "extra", "message"), [(kind, *case) for kind, cases in BAD.items() for case in cases]
)
def test_the_key_is_named(kind: Any, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(kind, extra)


def parse(kind: Any, extra: dict[str, Any]) -> None:
    if kind is EngineIdentity:
        kind.of_engine(engine_config("d", extra=extra))
    elif kind is OffloadSettings:
        kind.parse(extra)
    elif issubclass(kind, PullSettings):
        kind.parse(extra, None)
    else:
        parse_extra(kind, extra)


def test_the_guide_names_every_option_of_nixl() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
    section = guide.partition("## Options of vLLM's NIXL connectors")[2].partition("\n## ")[0]
    assert [name for name in NIXL if f"`{name}`" not in section] == []
