"""vLLM versions that the plug-in was tested with, and the decision whether another one may start.

vLLM's connector interface is experimental and changes. A hook that is called in another way than recorded
gives wrong tokens rather than an error. `baton/hosts/vllm/record` has the records.

    listed, fits its record          starts
    not listed, fits a record        starts after the self-test (`self_test`) of pull and push
    does not fit                     refused; with "allow_untested_vllm" as one that fits
    not listed, other connectors     refused; with "allow_untested_vllm" starts
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum, auto
from typing import Final

from baton.core.errors import ConfigError

TESTED: Final = ("0.31", "0.32", "0.33")
FIELD = "kv_transfer_config.kv_connector_extra_config.allow_untested_vllm"
MAX_NAMED: Final = 5  # Differences in a message.

_RELEASE = re.compile(r"(\d+)\.(\d+)")


class Start(Enum):
    AT_ONCE = auto()
    AFTER_SELF_TEST = auto()
    UNTESTED = auto()  # Starts with a warning: the operator allows it, and nothing can be tested.


def decide_start(version: str, misfits: Sequence[str], *, has_self_test: bool, allow_untested: bool) -> Start:
    """Decide how a connector may start in this version of vLLM.

    `misfits`: what `drift.find_misfits` returns. The operator can overrule these, because they are read in
    sources, but not a self-test that fails. Raises ConfigError for a version that must not start.
    """
    if is_listed(version) and not misfits:
        return Start.AT_ONCE
    if not allow_untested and (misfits or not has_self_test):
        problem = f". It lacks what they need: {name_some(misfits)}" if misfits else ""
        raise ConfigError(
            f"this is vLLM {version}, and Baton's connectors are tested with {name_tested()}{problem}. "
            'Install one of these, or set "allow_untested_vllm": true and compare answers first',
            field=FIELD,
        )
    return Start.AFTER_SELF_TEST if has_self_test else Start.UNTESTED


def is_listed(version: str) -> bool:
    return release_of(version) in TESTED


def of_unlisted_version() -> str:
    """Ending of a packing's name in this vLLM; empty for a version whose backends were read."""
    import vllm

    return "" if is_listed(vllm.__version__) else f" of {vllm.__version__}"


def name_tested(conjunction: str = "and") -> str:
    return f"{', '.join(TESTED[:-1])} {conjunction} {TESTED[-1]}"


def name_some(misfits: Sequence[str]) -> str:
    more = len(misfits) - MAX_NAMED
    return "; ".join(misfits[:MAX_NAMED]) + (f"; and {more} more" if more > 0 else "")


def release_of(version: str) -> str:
    """ "0.32.1+cpu" -> "0.32"."""
    found = _RELEASE.match(version)
    return f"{found[1]}.{found[2]}" if found is not None else version
