"""First token from P, the rest from D: one answer by two engines. Requested with

    kv_transfer_params: {"baton_first_token": true, ...}

on both legs, whose bodies are otherwise the client's own, limits included:

    P  (do_remote_decode)  ends after the first token. Unless that ends the answer, `finish_reason` is null
                           and text that is held back (a part of a character, or of a stop string) stays so:
                           D holds it back too, and shows it with the next token.
    D                      as usual. Both send the chunk of the first token even if it has no text, with its
                           `token_ids`, so that a router can compare them.

If P is an engine without this feature, the router shows P's token, and D continues after it (`continuation`).
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from baton.core.errors import UserError
from baton.core.transfer_params import FIELD
from baton.engine.api import SamplingParams

KEY = "baton_first_token"


def is_asked(raw: Mapping[str, Any] | None) -> bool:
    """Return whether the request has the flag `baton_first_token`. Raises UserError."""
    return flag(raw, KEY)


def first_of(params: SamplingParams) -> SamplingParams:
    """Return params that choose only the first token of an answer, exactly as in the whole answer."""
    return msgspec.structs.replace(params, max_tokens=1, min_tokens=min(1, params.min_tokens))


def flag(raw: Mapping[str, Any] | None, key: str) -> bool:
    """Return a flag of `kv_transfer_params`; absent means false. Raises UserError."""
    value = (raw or {}).get(key)
    if value is not None and not isinstance(value, bool):
        raise UserError(f"must be true or false, not {type(value).__name__}", field=f"{FIELD}.{key}")
    return bool(value)
