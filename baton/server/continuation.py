"""Rest of an answer that another engine has begun, exactly as that engine would have given it. Requested with

    kv_transfer_params: {"baton_output_token_ids": [17, 4, 99], ...}

in a body that is otherwise the client's own, limits included. The tokens count as output of this engine, so
draws, penalties, limits and stop strings are those of the whole answer. The stream has only what comes after
them: text that they hold back (a part of a character, or of a stop string) is shown with the next tokens.

A router learns the tokens of a stream with

    kv_transfer_params: {"baton_token_ids": true, ...}

Each chunk that has tokens then has `,"token_ids":[17,4]` in its choice: the tokens since the last chunk. The
chunks are otherwise, byte for byte, those without the flag.
"""

from collections.abc import Mapping
from typing import Any

from baton.core.errors import UserError
from baton.core.transfer_params import FIELD
from baton.server import first_token
from baton.server.protocol.sampling import SamplingFields, check_token_ids
from baton.server.text import SampleText

GIVEN = "baton_output_token_ids"
GIVEN_FIELD = f"{FIELD}.{GIVEN}"
NAMES_TOKENS = "baton_token_ids"


def names_tokens(raw: Mapping[str, Any] | None) -> bool:
    """Return whether each chunk has its token ids. Raises UserError."""
    return first_token.flag(raw, NAMES_TOKENS)


def given_tokens(fields: SamplingFields, vocab_size: int, num_choices: int) -> list[int]:
    """Return the tokens that the client has; none if the answer begins here. Raises UserError."""
    given = (fields.kv_transfer_params or {}).get(GIVEN)
    if given is None:
        return []
    if not isinstance(given, list) or not given or not all(type(token_id) is int for token_id in given):
        raise _refusal("must be a list of token ids, with at least one; leave it out to begin an answer")
    check_token_ids(given, vocab_size, GIVEN_FIELD)
    if num_choices > 1:
        raise _refusal("needs a request for one answer (one prompt, n=1)")
    if not fields.stream:
        raise _refusal("needs stream: true; an answer that is not streamed is asked for again")
    if getattr(fields, "echo", None):
        raise _refusal("cannot be combined with echo; the client has the echo")
    if first_token.is_asked(fields.kv_transfer_params):
        raise _refusal(f"cannot be combined with {first_token.KEY}; the client has the first token")
    return given


def check_goes_on(
    given: list[int], *, max_tokens: int, min_tokens: int, stop_token_ids: frozenset[int]
) -> None:
    """Raise UserError if the answer has ended with these tokens or before."""
    if len(given) >= max_tokens:
        raise _refusal(
            f"has {len(given)} tokens of an answer of at most {max_tokens}; the client has all of it"
        )
    if stop_token_ids.isdisjoint(given):
        return
    for position, token_id in enumerate(given, start=1):
        if token_id in stop_token_ids and position >= min_tokens:
            raise _refusal(f"has the stop token {token_id}, which ends the answer; the client has all of it")


def replay(given: list[int], text: SampleText) -> None:
    """Put `text` into its state after the given tokens. Raises UserError if a stop string ends it there."""
    for token_id in given:
        text.feed(token_id)
        if text.stopped_by is not None:
            raise _refusal(
                f"has the stop string {text.stopped_by!r}, which ends the answer; the client has all of it"
            )


def without_given(raw: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the params without the tokens, which the engine is given beside them."""
    if raw is None or GIVEN not in raw:
        return raw
    return {key: value for key, value in raw.items() if key != GIVEN} or None


def _refusal(message: str) -> UserError:
    return UserError(message, field=GIVEN_FIELD)
