"""One answer from two engines: P says the first token, D the rest. Asked for with

    kv_transfer_params: {"baton_first_token": true, ...}

on both legs, whose bodies are otherwise the client's own, limits included:

    P  (do_remote_decode)  ends behind the first token. Unless that ends the answer, `finish_reason` is null
                           and text that is held back (a part of a character, or of a stop string) stays so:
                           D holds it back as well, and shows it with the next token.
    D                      as ever. Both send the chunk of the first token even if there is no text to show,
                           and name its `token_ids`, so that a router can tell that they agree.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from baton.core.errors import UserError
from baton.core.transfer_params import FIELD
from baton.engine.api import SamplingParams

KEY = "baton_first_token"


def is_asked(raw: Mapping[str, Any] | None) -> bool:
    """Raises UserError."""
    wish = (raw or {}).get(KEY)
    if wish is not None and not isinstance(wish, bool):
        raise UserError(f"must be true or false, not {type(wish).__name__}", field=f"{FIELD}.{KEY}")
    return bool(wish)


def first_of(params: SamplingParams) -> SamplingParams:
    """How to choose only the first token of an answer, exactly as in the whole of it."""
    return msgspec.structs.replace(params, max_tokens=1, min_tokens=min(1, params.min_tokens))
