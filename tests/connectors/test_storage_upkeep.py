"""Upkeep of stores: which evicted chunks are gone. Sweeps and keeps are in `test_shared_storage_halves`."""

from pathlib import Path

from baton.connectors.extra_config import parse_extra
from baton.connectors.storage.stores.settings import StorageSettings
from baton.connectors.storage.stores.tiers import make_tiers
from baton.connectors.storage.stores.upkeep import Upkeep
from baton.stores.base.chunk_name import ChunkName
from tests.connectors.storage_world import settings_in

NAMESPACES = ["current", "old"]  # The second one is that of the previous secret.


def test_an_evicted_chunk_is_gone_if_no_store_has_it_under_any_name(tmp_path: Path) -> None:
    settings = parse_extra(StorageSettings, settings_in(tmp_path))
    tiers = make_tiers(settings.stored_tiers, lambda: 0.0)
    upkeep = Upkeep(tiers, settings, namespaces=lambda: NAMESPACES, values_of=lambda namespace, key: [])
    tiers.stores[0].write(str(ChunkName("old", b"\1", 0)), (b"content",))
    evicted = [ChunkName("current", b"\1", 0), ChunkName("old", b"\2", 1, 8), ChunkName("another", b"\3", 0)]
    assert upkeep._gone_among([*map(str, evicted), "current/zz/zz.0.safetensors"]) == {b"\2"}
    upkeep.close()
    tiers.close()
