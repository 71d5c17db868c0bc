"""Contents of configuration files and `kv_connector_extra_config`: keys, types, defaults and sections.

The fields of EngineConfig and SamplingParams are in `engine_fields`, since they also cross processes.
"""

import msgspec

from baton.cli.route import OWN_OPTIONS, TABLE
from baton.cli.settings import SECTIONS, ServeSettings
from baton.connectors.decode_bench.settings import DecodeBenchSettings
from baton.connectors.extra_config import NIXL
from baton.connectors.hidden_states.settings import HiddenStatesSettings
from baton.connectors.multi.children import KEY as MULTI_KEY
from baton.connectors.offload.settings import OffloadSettings
from baton.connectors.pull.settings import PullSettings
from baton.connectors.push.settings import PushSettings
from baton.connectors.shared_storage.settings import CHUNK_TOKENS, StorageSettings
from baton.http.settings import HttpLimits
from baton.router.settings import RouterSettings
from baton.vllm_plugin.settings import PluginSettings
from tests.golden.golden import check
from tests.golden.shapes import fields

KINDS: dict[str, type[msgspec.Struct]] = {
    "baton serve": ServeSettings,
    "baton serve --limits, baton route --limits": HttpLimits,
    "the router": RouterSettings,
    "BatonPullConnector": PullSettings,
    "BatonPushConnector": PushSettings,
    "BatonOffloadConnector": OffloadSettings,
    "BatonSharedStorageConnector": StorageSettings,
    "BatonHiddenStatesConnector": HiddenStatesSettings,
    "BatonDecodeBenchConnector": DecodeBenchSettings,
    "every connector in vLLM": PluginSettings,
}


def test_keys() -> None:
    check("settings", [line for name, kind in KINDS.items() for line in (f"# {name}", *fields(kind))])


def test_sections_of_the_file_of_serve() -> None:
    check("settings_sections", [f"[{section}] {' '.join(keys)}" for section, keys in SECTIONS.items()])


def test_the_table_of_the_file_of_route() -> None:
    """Its keys are the options of the command, which `cli` has."""
    assert TABLE == "route"
    assert OWN_OPTIONS == ("config", "show_config", "help")


def test_what_stands_for_no_field() -> None:
    assert MULTI_KEY == "connectors"
    assert CHUNK_TOKENS == 256, "the default of chunk_tokens, by which engines find each other's files"
    assert sorted(NIXL) == [
        "backends",
        "bidirectional_kv_xfer",
        "decoder_kv_blocks_ttl",
        "enforce_handshake_compat",
        "engine_ttl",
        "kv_lease_duration",
        "kv_recompute_threshold",
        "num_threads",
        "push_registration_timeout",
    ], "options of vLLM's that are refused with what stands for them"
