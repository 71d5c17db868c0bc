"""Contents of configuration files and `kv_connector_extra_config`: keys, types, defaults and sections.

The fields of EngineConfig and SamplingParams are in `engine_fields`, since they also cross processes.
"""

import msgspec

from baton.cli import route, serve_settings
from baton.connectors.pull.settings import PullSettings
from baton.connectors.push.settings import PushSettings
from baton.connectors.storage.memory.settings import LendSettings, OffloadSettings
from baton.connectors.storage.stores.settings import StorageSettings
from baton.hosts.vllm.settings import PluginSettings
from baton.http.settings import HttpLimits
from baton.router.values.settings import RouterSettings
from baton.server.settings import ServeSettings
from tests.golden.golden import check
from tests.golden.shapes import fields

KINDS: dict[str, type[msgspec.Struct]] = {
    "baton serve": ServeSettings,
    "baton serve --limits, baton route --limits": HttpLimits,
    "the router": RouterSettings,
    "baton route, besides those of the router": route.RouteSettings,
    "BatonPullConnector": PullSettings,
    "BatonPushConnector": PushSettings,
    "BatonOffloadConnector": OffloadSettings,
    "lend of BatonOffloadConnector": LendSettings,
    "BatonSharedStorageConnector": StorageSettings,
    "every connector in vLLM": PluginSettings,
}


def test_keys() -> None:
    check("settings", [line for name, kind in KINDS.items() for line in (f"# {name}", *fields(kind))])


def test_options_of_route() -> None:
    """Each with the field that it sets; `settings` has its type and default."""
    by_kind = route.COMMAND.by_kind.items()
    check(
        "settings_route",
        [f"{one.name} {kind.__name__}.{one.field}" for kind, settings in by_kind for one in settings],
    )


def test_sections_of_the_file_of_serve() -> None:
    check(
        "settings_sections",
        [f"[{section}] {' '.join(keys)}" for section, keys in serve_settings.COMMAND.sections.items()],
    )
