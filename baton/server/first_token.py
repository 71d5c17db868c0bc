"""First token from P, the rest from D: one answer by two engines. Requested with

    kv_transfer_params: {"baton_first_token": true, ...}

on both legs, whose bodies are otherwise the client's own, limits included:

    P  (do_remote_decode)  ends after the first token. Unless that ends the answer, `finish_reason` is null
                           and text that is held back (a part of a character, or of a stop string) stays so:
                           D holds it back too, and shows it with the next token.
    D                      as usual. Both send the chunk of the first token even if it has no text, with its
                           `token_ids`, so that a router can compare them.

If P is an engine without this feature, the router shows P's token and then asks D with

    kv_transfer_params: {"baton_goes_on": true, ...}

and a prompt in ids that ends with that token: D's text continues after it, as in the middle of an answer.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from baton.core.errors import UserError
from baton.core.transfer_params import FIELD
from baton.engine.api import SamplingParams

KEY = "baton_first_token"
GOES_ON = "baton_goes_on"


def is_asked(raw: Mapping[str, Any] | None) -> bool:
    """Return whether the request has the flag `baton_first_token`. Raises UserError."""
    return _flag(raw, KEY)


def goes_on(raw: Mapping[str, Any] | None) -> bool:
    """Return whether the prompt's last token is the answer's first. Raises UserError."""
    if _flag(raw, GOES_ON) and is_asked(raw):
        raise UserError(f"cannot be combined with {KEY}; send one of the two", field=f"{FIELD}.{GOES_ON}")
    return _flag(raw, GOES_ON)


def first_of(params: SamplingParams) -> SamplingParams:
    """Return params that choose only the first token of an answer, exactly as in the whole answer."""
    return msgspec.structs.replace(params, max_tokens=1, min_tokens=min(1, params.min_tokens))


def _flag(raw: Mapping[str, Any] | None, key: str) -> bool:
    value = (raw or {}).get(key)
    if value is not None and not isinstance(value, bool):
        raise UserError(f"must be true or false, not {type(value).__name__}", field=f"{FIELD}.{key}")
    return bool(value)
