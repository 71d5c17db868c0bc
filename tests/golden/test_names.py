"""Names that stand in the code as literals and are seen outside of it.

Keys of `kv_transfer_params`, headers, paths, purposes of keys, environment variables, names of processes,
threads and temporary folders. Prometheus' names are in `metrics`, paths of modules in `test_references`.
"""

import re

from tests.golden.golden import check, literals

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
    "baton/stores",
    "baton/transport",
    "baton/hosts/vllm",
)
_OURS = re.compile(r"(\{\}\.|[./])?(x-)?baton([-_/]\S*|\.\S*\d|)", re.IGNORECASE)


def test_names_with_ours_in_them() -> None:
    check("names", sorted(text for text in literals(*PRODUCT) if _OURS.fullmatch(text)))
