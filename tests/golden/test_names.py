"""Names that stand in the code as literals and are seen outside of it.

Keys of `kv_transfer_params`, headers, paths, purposes of keys, environment variables, names of processes,
threads and temporary folders. Prometheus' names are in `metrics`, paths of modules in `test_references`.
"""

import re

from baton.cli.settings import ENV_PREFIX, OTHER_PREFIXES, OTHER_VARIABLES, ServeSettings
from tests.golden.golden import check, literals, source

PRODUCT = (
    "baton/cli",
    "baton/connectors",
    "baton/contract",
    "baton/core",
    "baton/engine",
    "baton/http",
    "baton/protocol",
    "baton/router",
    "baton/server",
    "baton/tiers",
    "baton/transport",
    "baton/vllm_plugin",
)
_OURS = re.compile(r"(\{\}\.|[./])?(x-)?baton([-_/]\S*|\.\S*\d|)", re.IGNORECASE)


def test_names_with_ours_in_them() -> None:
    check("names", sorted(text for text in literals(*PRODUCT) if _OURS.fullmatch(text)))


def test_variables_that_are_read() -> None:
    from_environment = r'\b(?:environ|environment|env)(?:\.get\(|\[)"([A-Z_]+)"(?!\] =)'
    read = set(re.findall(from_environment, source("baton", "benchmarks", "chaos")))
    assert sorted(read) == ["HOME", "LD_LIBRARY_PATH", "PYTHONPATH", "XDG_CACHE_HOME", "XDG_STATE_HOME"]


def test_variables_of_ours() -> None:
    """Those of `baton serve` are its settings in capitals, those of `baton route` its options."""
    assert ENV_PREFIX == "BATON_"
    assert OTHER_PREFIXES == ("BATON_ROUTE_", "BATON_BENCH_")
    assert sorted(OTHER_VARIABLES) == [
        "BATON_API_KEY",
        "BATON_CONFIG",
        "BATON_ENGINE_API_KEY",
        "BATON_PREVIOUS_SECRET",
        "BATON_SECRET",
    ]
    assert not {ENV_PREFIX + name.upper() for name in ServeSettings.__struct_fields__} & OTHER_VARIABLES
