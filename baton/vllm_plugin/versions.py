"""vLLM versions that the plug-in was tested with. Others are refused at start, unless the operator allows
them.

vLLM's connector interface is experimental and changes. A hook that is called in another way than recorded
gives wrong tokens rather than an error. `baton/vllm_plugin/record` has the records.
"""

from __future__ import annotations

import re
from typing import Final

from baton.core.errors import ConfigError

TESTED: Final = ("0.32", "0.33")
FIELD = "kv_transfer_config.kv_connector_extra_config.allow_untested_vllm"

_RELEASE = re.compile(r"(\d+)\.(\d+)")


def check_version(version: str, *, allow_untested: bool) -> str | None:
    """Return a warning to log, or None. Raises ConfigError for an untested version that is not allowed."""
    if release_of(version) in TESTED:
        return None
    tested = " and ".join(TESTED)
    if not allow_untested:
        raise ConfigError(
            f"this is vLLM {version}; Baton's connectors are tested with {tested}. Install one of these, or "
            'set "allow_untested_vllm": true and compare answers first',
            field=FIELD,
        )
    return (
        f"vLLM {version} is untested with Baton's connectors (tested: {tested}); allowed by "
        "allow_untested_vllm"
    )


def release_of(version: str) -> str:
    """ "0.32.1+cpu" -> "0.32"."""
    found = _RELEASE.match(version)
    return f"{found[1]}.{found[2]}" if found is not None else version
