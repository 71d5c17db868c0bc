"""One answer from two engines: P says the first token, D the rest. Asked for with

    kv_transfer_params: {"baton_first_token": true, ...}

on both legs, whose bodies are otherwise the client's own, limits included:

    P  (do_remote_decode)  ends behind the first token. Unless that ends the answer, `finish_reason` is null
                           and text that is held back (a part of a character, or of a stop string) stays so:
                           D holds it back as well, and shows it with the next token.
    D                      as ever. Both send the chunk of the first token even if there is no text to show,
                           and name its `token_ids`, so that a router can tell that they agree.

Where P is an engine that knows nothing of this, whoever asks shows P's token, and then asks D with

    kv_transfer_params: {"baton_goes_on": true, ...}

and a prompt in ids whose last one is that token: D's text goes on behind it, as in the middle of an answer.
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
    """Raises UserError."""
    return _flag(raw, KEY)


def goes_on(raw: Mapping[str, Any] | None) -> bool:
    """The prompt's last token is the answer's first. Raises UserError."""
    if _flag(raw, GOES_ON) and is_asked(raw):
        raise UserError(f"contradicts {KEY}: the first token is said elsewhere", field=f"{FIELD}.{GOES_ON}")
    return _flag(raw, GOES_ON)


def first_of(params: SamplingParams) -> SamplingParams:
    """How to choose only the first token of an answer, exactly as in the whole of it."""
    return msgspec.structs.replace(params, max_tokens=1, min_tokens=min(1, params.min_tokens))


def _flag(raw: Mapping[str, Any] | None, key: str) -> bool:
    wish = (raw or {}).get(key)
    if wish is not None and not isinstance(wish, bool):
        raise UserError(f"must be true or false, not {type(wish).__name__}", field=f"{FIELD}.{key}")
    return bool(wish)
