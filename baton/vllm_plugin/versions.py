"""Which vLLM we have been tried with. Another one is refused at start, unless the operator insists.

vLLM calls its connector interface experimental, and changes it; a hook that is called differently from what
we believe gives wrong tokens rather than an error. `baton/vllm_plugin/record` has what we believe.
"""

from __future__ import annotations

import re
from typing import Final

from baton.core.errors import ConfigError

TESTED: Final = ("0.32", "0.33")
FIELD = "kv_transfer_config.kv_connector_extra_config.allow_untested_vllm"

_RELEASE = re.compile(r"(\d+)\.(\d+)")


def check_version(version: str, *, allow_untested: bool) -> str | None:
    """What to warn of, or None. Raises ConfigError for an untested version that nobody has allowed."""
    if release_of(version) in TESTED:
        return None
    tested = " and ".join(TESTED)
    if not allow_untested:
        raise ConfigError(
            f"this is vLLM {version}, and Baton's connectors have been tried with {tested} only; install one "
            'of them, or set "allow_untested_vllm": true and compare answers first',
            field=FIELD,
        )
    return f"vLLM {version} is untested with Baton's connectors, which know {tested}; told to go on"


def release_of(version: str) -> str:
    """ "0.32.1+cpu" is of 0.32."""
    found = _RELEASE.match(version)
    return f"{found[1]}.{found[2]}" if found is not None else version
