"""Errors in `kv_connector_extra_config` name the key and the allowed values."""

from pathlib import Path
from typing import Any

import pytest

from baton.connectors.extra_config import NIXL
from baton.connectors.offload.settings import OffloadSettings
from baton.connectors.shared_storage.settings import StorageSettings
from baton.core.errors import ConfigError


@pytest.mark.parametrize(
    ("kind", "extra", "message"),
    [
        (OffloadSettings, {"cpu_gb": 1}, r"\.cpu_gb: is not known; known are cpu_gib, eviction, "),
        (OffloadSettings, {}, r"\.cpu_gib: is required"),
        (OffloadSettings, {"cpu_gib": "1"}, r"\.cpu_gib: Expected `float`, got `str`$"),
        (
            OffloadSettings,
            {"cpu_gib": 1, "eviction": "mru"},
            r"\.eviction: Invalid enum value 'mru'; one of arc, lru, s3fifo$",
        ),
        (
            StorageSettings,
            {"kv_lease_duration": 60},
            r"\.kv_lease_duration: is not known \(an option of vLLM's NixlConnector; here it is timers",
        ),
        (StorageSettings, {}, r"kv_connector_extra_config: Object missing required field `path`$"),
    ],
)
def test_the_key_is_named(kind: Any, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r"^kv_transfer_config\.kv_connector_extra_config") as caught:
        kind.parse(extra)
    caught.match(message)


def test_the_guide_names_every_option_of_nixl() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
    section = guide.partition("## Options of vLLM's NIXL connectors")[2].partition("\n## ")[0]
    assert [name for name in NIXL if f"`{name}`" not in section] == []
